"""`cellpipe run` and `cellpipe chat`: a prompt in, text out as it comes."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from typing import Annotated

import typer

from services.cli.app import app
from services.cli.session import Session, open_session
from services.cli.settings import DEFAULT_MODEL, load_config
from shared.errors import PermanentError
from shared.messages import ChatMessage, FinishReason, Request, SamplingParams
from shared.producer import new_request_id
from shared.text.detokenizer import Detokenizer

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="A catalog name or a path to a .gguf file; with --cluster, a loaded model.",
    ),
]
Cluster = Annotated[
    bool | None,
    typer.Option(
        "--cluster/--embedded",
        help="Use the workers of a cluster, or this process alone. "
        "Default: the cluster if CELLPIPE_AMQP_URL and CELLPIPE_REDIS_URL are set.",
        show_default=False,
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Longest answer, in tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0 is off.")]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest tokens of this mass.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same answer. Default: a fresh one.")]
System = Annotated[str | None, typer.Option(help="A system message for the model.")]
Timeout = Annotated[float, typer.Option(help="Give up after this many seconds.")]
Groups = Annotated[
    int, typer.Option("--groups", help="Layer groups of the embedded pipeline.", min=1)
]
Threads = Annotated[
    int,
    typer.Option("--threads", help="Threads of the embedded kernel; 0 is one a core.", min=0),
]


@dataclass
class Answer:
    """What was generated, and when."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decode speed: tokens after the first, over the time after the first."""
        decode_s = self.total_s - self.first_token_s
        return (len(self.token_ids) - 1) / decode_s if decode_s > 0 else 0.0

    def closing_line(self) -> str:
        return (
            f"{len(self.token_ids)} tokens, {self.tokens_per_s:.1f} tok/s, "
            f"time to first token {self.first_token_s * 1e3:.0f} ms "
            f"({self.num_prompt_tokens} prompt tokens, finish: {self.finish_reason})"
        )


@app.command()
def run(
    prompt: Annotated[str, typer.Argument(help='What to ask; "-" reads standard input.')],
    model: Model = DEFAULT_MODEL,
    cluster: Cluster = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    system: System = None,
    raw: Annotated[bool, typer.Option(help="Continue the prompt, without chat template.")] = False,
    groups: Groups = 1,
    threads: Threads = 0,
    timeout: Timeout = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Answer one prompt.

    Example: cellpipe run "Why is the sky blue?" --temperature 0.8 --seed 1
    """
    config = load_config(log_level="warning")
    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, max_tokens=max_tokens
    )
    turns = _conversation(system, [ChatMessage("user", text)])
    with open_session(
        config, model=model, cluster=cluster, num_groups=groups, num_threads=threads
    ) as session:
        request = Request(
            request_id=new_request_id(),
            prompt=text if raw else None,
            messages=None if raw else turns,
            sampling=sampling,
            deadline_unix_ms=_deadline(timeout),
        )
        answer = ask(session, request, echo=not as_json)
    if as_json:
        record = {
            "request_id": request.request_id,
            "model": session.model_id,
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "num_prompt_tokens": answer.num_prompt_tokens,
            "tokens_per_s": round(answer.tokens_per_s, 2),
            "time_to_first_token_ms": round(answer.first_token_s * 1e3, 1),
        }
        typer.echo(json.dumps(record, ensure_ascii=False))
    else:
        typer.echo(f"\n{answer.closing_line()}", err=True)


@app.command()
def chat(
    model: Model = DEFAULT_MODEL,
    cluster: Cluster = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_k: TopK = 40,
    top_p: TopP = 0.95,
    seed: Seed = None,
    system: System = None,
    groups: Groups = 1,
    threads: Threads = 0,
    timeout: Timeout = 600.0,
) -> None:
    """Talk with the model. An empty line or Ctrl-D ends it; Ctrl-C stops an answer.

    Example: cellpipe chat --system "You answer in one sentence."
    """
    config = load_config(log_level="warning")
    sampling = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, max_tokens=max_tokens
    )
    history: list[ChatMessage] = []
    with open_session(
        config, model=model, cluster=cluster, num_groups=groups, num_threads=threads
    ) as session:
        typer.echo(f"{session.model_id}. An empty line ends the conversation.", err=True)
        while text := _read_line():
            history.append(ChatMessage("user", text))
            request = Request(
                request_id=new_request_id(),
                messages=_conversation(system, history),
                sampling=sampling,
                deadline_unix_ms=_deadline(timeout),
            )
            answer = ask(session, request, echo=True)
            typer.echo(f"\n{answer.closing_line()}", err=True)
            history.append(ChatMessage("assistant", answer.text))


def ask(session: Session, request: Request, *, echo: bool) -> Answer:
    """Submit a request and follow it to its end; print text as it comes if `echo`.

    Ctrl-C cancels the request and returns what there is. Raises `PermanentError` with the
    request's own error when it fails.
    """
    from shared.store.ledger_types import FinalEvent, TokenEvent

    answer = Answer()
    detokenizer = Detokenizer(session.tokenizer)
    started_s = time.perf_counter()
    session.producer.submit(request)
    try:
        for event in session.producer.events(request.request_id, on_silence=session.check):
            answer.total_s = time.perf_counter() - started_s
            if isinstance(event, TokenEvent):
                if not answer.token_ids:
                    answer.first_token_s = answer.total_s
                answer.token_ids.append(event.token_id)
                _say(answer, detokenizer.feed([event.token_id]), echo=echo)
            elif isinstance(event, FinalEvent):
                _say(answer, detokenizer.finish(), echo=echo)
                answer.finish_reason = event.finish_reason
                answer.num_prompt_tokens = event.num_prompt_tokens
                if event.finish_reason is FinishReason.ERROR:
                    raise PermanentError(event.error)
    except KeyboardInterrupt:
        session.producer.cancel(request.request_id)
        answer.finish_reason = FinishReason.ABORT
    return answer


def _say(answer: Answer, text: str, *, echo: bool) -> None:
    answer.text += text
    if echo and text:
        sys.stdout.write(text)
        sys.stdout.flush()


def _conversation(system: str | None, turns: list[ChatMessage]) -> tuple[ChatMessage, ...]:
    return (*([ChatMessage("system", system)] if system is not None else []), *turns)


def _deadline(timeout_s: float) -> int:
    return int((time.time() + timeout_s) * 1000)


def _read_line() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return ""
