"""`cellpipe chat`: a conversation, with commands between its turns."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import typer

from services.cli.answer import Answer, ask
from services.cli.generate import (
    Cluster,
    Groups,
    MaxTokens,
    Model,
    NoPrefixCache,
    Seed,
    Speculate,
    System,
    Temperature,
    Threads,
    Timeout,
    TopK,
    TopP,
    check_timeout,
    conversation,
    deadline,
    sampling_of,
    seed_note,
)
from services.cli.settings import load_config
from services.cli.tree import app
from shared.errors import CellpipeError, ConfigError
from shared.logs import redact
from shared.messages import ChatMessage, Request

if TYPE_CHECKING:
    from services.cli.session import Session
    from shared.messages import SamplingParams

QUOTES = '"""'
HELP = """\
/reset          forget the conversation; the system message stays
/system TEXT    set the system message; without TEXT take it away
/stats          show what was said and how fast
/help           show this
/exit, Ctrl-D   end
A line that ends with \\ goes on in the next; \"\"\" begins and ends a text of several lines.
Ctrl-C stops an answer, or drops what is typed."""


@dataclass
class Conversation:
    """What was said, and what it took. Knows no terminal and no model."""

    system: str | None = None
    turns: list[ChatMessage] = field(default_factory=list)
    num_answers: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    decode_s: float = 0.0

    def messages(self, text: str) -> tuple[ChatMessage, ...]:
        """The conversation with what the user says next."""
        return conversation(self.system, [*self.turns, ChatMessage("user", text)])

    def answered(self, text: str, answer: Answer) -> None:
        """Remember a turn; one that was stopped before a word was said never was."""
        if not answer.token_ids:
            return
        self.turns += [ChatMessage("user", text), ChatMessage("assistant", answer.text)]
        self.num_answers += 1
        self.num_prompt_tokens += answer.num_prompt_tokens
        self.num_cached_tokens += answer.num_cached_tokens
        self.num_tokens += len(answer.token_ids)
        if answer.first_token_s is not None:
            self.decode_s += answer.last_token_s - answer.first_token_s

    def command(self, line: str) -> str:
        """Do what a line that begins with / says; returns what to tell."""
        name, _, text = line.partition(" ")
        match name:
            case "/reset":
                num_turns = len(self.turns) // 2
                self.turns.clear()
                return f"forgot {num_turns} {'turn' if num_turns == 1 else 'turns'}"
            case "/system":
                self.system = text.strip() or None
                return "no system message" if self.system is None else "system message set"
            case "/stats":
                return self.stats()
            case "/help":
                return HELP
            case _:
                return f"no command {name}; see /help"

    def stats(self) -> str:
        num_later = self.num_tokens - self.num_answers  # the first token of each is prefill's
        speed = f"{num_later / self.decode_s:.1f} tok/s" if self.decode_s > 0 else "no speed yet"
        return (
            f"{self.num_answers} answers, {self.num_tokens} tokens, {speed}; "
            f"{self.num_prompt_tokens} prompt tokens, {self.num_cached_tokens} of them cached; "
            f"{len(self.turns) // 2} turns remembered"
        )


@app.command()
def chat(
    model: Model = "",
    cluster: Cluster = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_k: TopK = 40,
    top_p: TopP = 0.95,
    seed: Seed = None,
    speculate: Speculate = True,
    system: System = None,
    groups: Groups = 1,
    threads: Threads = 0,
    no_prefix_cache: NoPrefixCache = False,
    timeout: Timeout = 600.0,
) -> None:
    """Talk with the model; /help shows what can be typed. Ctrl-D ends, Ctrl-C stops an answer.

    Example: cellpipe chat --system "You answer in one sentence."
    """
    from services.cli.session import open_session

    config = load_config(quiet=True)
    check_timeout(timeout)
    sampling = sampling_of(temperature, top_k, top_p, seed, max_tokens, speculate)
    talk = Conversation(system=system)
    with open_session(
        config,
        model=model,
        cluster=cluster,
        num_groups=groups,
        num_threads=threads,
        prefix_cache=not no_prefix_cache,
    ) as session:
        note = seed_note(sampling)
        typer.echo(f"{session.model_id}{note}. Ctrl-D ends, /help shows what else.", err=True)
        while (text := _read_turn()) is not None:
            if text == "/exit":
                break
            if text.startswith("/"):
                typer.echo(talk.command(text), err=True)
            elif text:
                _take_turn(
                    session,
                    talk,
                    text,
                    sampling,
                    timeout_s=timeout,
                    model=session.model_id if model else "",
                )


def _take_turn(
    session: Session,
    talk: Conversation,
    text: str,
    sampling: SamplingParams,
    *,
    timeout_s: float,
    model: str = "",
) -> None:
    """Ask and show the answer. A request that fails ends its turn, not the conversation."""
    from shared.producer import new_request_id

    request = Request(
        request_id=new_request_id(),
        messages=talk.messages(text),
        sampling=sampling,
        deadline_unix_ms=deadline(timeout_s),
        model=model,
    )
    try:
        answer = ask(session, request, echo=True)
    except ConfigError:
        raise
    except CellpipeError as error:
        remedy = error.remedy or "say it once more, or begin anew: /reset"
        typer.echo(f"cellpipe: {redact(str(error))}\n  {redact(remedy)}", err=True)
    else:
        talk.answered(text, answer)
        typer.echo(answer.closing_line(), err=True)


def _read_turn() -> str | None:
    """What the user says, perhaps in several lines; "" for nothing, None for the end."""
    try:
        line = _read_line("> ")
        if line is None or not (line.startswith(QUOTES) or line.endswith("\\")):
            return None if line is None else line.strip()
        lines = _quoted(line) if line.startswith(QUOTES) else _continued(line)
        return "\n".join(lines).strip()
    except KeyboardInterrupt:
        typer.echo("\nCtrl-D ends the conversation", err=True)
        return ""


def _quoted(line: str | None) -> list[str]:
    """The lines up to the closing quotes, or the end of the input."""
    assert line is not None, "the opening line is there"
    lines = [line.removeprefix(QUOTES)]
    while not lines[-1].rstrip().endswith(QUOTES):
        line = _read_line("… ")
        if line is None:
            return lines
        lines.append(line)
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return lines


def _continued(line: str | None) -> list[str]:
    lines = []
    while line is not None and line.endswith("\\"):
        lines.append(line.removesuffix("\\"))
        line = _read_line("… ")
    return [*lines, line or ""]


def _read_line(sign: str) -> str | None:
    """A line, or None at the end of the input. Raises `ConfigError` unless it is text."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (gives input() line editing and history)
    try:
        line = input(sign if interactive else "")
        line.encode("utf-8")  # under some locales what cannot be decoded is passed on
        return line
    except EOFError:
        return None
    except UnicodeError as error:
        raise ConfigError(f"standard input is not UTF-8: {error}") from error
