"""Follows one request to its end and shows its text as it comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shared.errors import (
    CellpipeError,
    Overloaded,
    PermanentError,
    StoreDamaged,
    StoreUnavailable,
    TransientError,
    Unroutable,
)
from shared.messages import FinishReason, Request

if TYPE_CHECKING:
    from services.cli.session import Session


@dataclass
class Answer:
    """What was generated, and when. Times are seconds since the request was submitted."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float = 0.0
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # as in a chat completion

    @property
    def tokens_per_s(self) -> float | None:
        """Decode speed: tokens after the first, over the time after the first."""
        if self.first_token_s is None or self.last_token_s <= self.first_token_s:
            return None
        return (len(self.token_ids) - 1) / (self.last_token_s - self.first_token_s)

    def closing_line(self) -> str:
        parts = [_count(len(self.token_ids), "token")]
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tok/s")
        if self.first_token_s is not None:
            parts.append(f"time to first token {self.first_token_s * 1e3:.0f} ms")
        if not self.text and self.finish_reason is FinishReason.STOP:
            parts.append("the model ended without a word")
        prompt = _count(self.num_prompt_tokens, "prompt token")
        if self.num_cached_tokens:
            prompt += f", {self.num_cached_tokens} of them cached"
        return f"{', '.join(parts)} ({prompt}, finish: {self.finish_reason})"


def ask(session: Session, request: Request, *, echo: bool) -> Answer:
    """Submit a request and follow it to its end; print text as it comes if `echo`.

    Ctrl-C cancels the request and returns what there is. Raises `PermanentError` with the request's
    own error when it fails, `TransientError` when its end is not heard of in time: of a cluster
    that says how to read the answer later.
    """
    answer = Answer()
    try:
        session.producer.submit(request)
        _follow(session, request, answer, echo=echo)
    except (Overloaded, Unroutable):
        raise  # nothing was taken
    except CellpipeError as error:
        end_line(answer.text, shown=echo)
        if isinstance(error, TransientError) and session.outlives_us:
            raise with_id(error, request.request_id) from error
        raise
    except KeyboardInterrupt:  # the second: nobody waits for the end any more
        end_line(answer.text, shown=echo)
        if session.outlives_us:
            tell(f"request {request.request_id} may run on: cellpipe cancel {request.request_id}")
        raise
    if echo and answer.text:
        print(flush=True)
    return answer


def _follow(session: Session, request: Request, answer: Answer, *, echo: bool) -> None:
    from shared.outage import wait_out
    from shared.store.ledger_base import START
    from shared.store.ledger_types import TokenEvent
    from shared.text.detokenizer import Detokenizer
    from shared.text.logprobs import ShownToken, chat_logprobs

    detokenizer = Detokenizer(session.tokenizer)
    started_s = time.perf_counter()
    after = START
    with _waiting("reading the prompt", shown=echo) as hide:

        def on_outage(_: StoreUnavailable) -> None:
            hide()
            tell_of_outage(answer.text if echo else "")

        while answer.finish_reason is None:
            try:
                for event in session.producer.events(
                    request.request_id,
                    after=after,
                    on_silence=session.check,
                    on_outage=on_outage,
                    deadline_unix_ms=request.deadline_unix_ms,
                ):
                    after = event.event_id
                    if isinstance(event, TokenEvent):
                        now_s = time.perf_counter() - started_s
                        hide()
                        answer.token_ids.append(event.token_id)
                        if event.logprobs is not None:
                            shown = ShownToken(event.token_id, 0, event.logprobs)
                            answer.logprobs += chat_logprobs([shown], session.tokenizer)["content"]
                        answer.first_token_s = answer.first_token_s or now_s
                        answer.last_token_s = now_s
                        _say(answer, detokenizer.feed([event.token_id]), echo=echo)
                        continue
                    hide()
                    _say(answer, detokenizer.finish(), echo=echo)
                    answer.finish_reason = event.finish_reason
                    answer.num_prompt_tokens = event.num_prompt_tokens
                    answer.num_cached_tokens = event.num_cached
                    if event.finish_reason is FinishReason.ERROR:
                        raise PermanentError(event.error)
                    if event.num_generated != len(answer.token_ids):
                        raise StoreDamaged(
                            f"{len(answer.token_ids)} of {event.num_generated} tokens came: "
                            "the store has lost the others"
                        )
            except KeyboardInterrupt:
                # Its final event ends the loop.
                wait_out(
                    lambda: session.producer.cancel(request.request_id, is_submitted=True),
                    on_outage=on_outage,
                )


def end_line(text: str, *, shown: bool) -> None:
    """So that what is told next begins a line of its own, after `text` that was shown."""
    if shown and text and not text.endswith("\n"):
        print(flush=True)


def tell_of_outage(text: str) -> None:
    """Say that an answer pauses, of which `text` was shown; what was said goes on behind it."""
    # On standard error: what is no part of the answer does not belong into a pipe.
    if text and not text.endswith("\n"):
        print(file=sys.stderr)
    tell("Redis does not answer; waiting")


def tell(text: str) -> None:
    """Say something on standard error, on a line of its own."""
    print(f"cellpipe: {text}", file=sys.stderr, flush=True)


def with_id(error: TransientError, request_id: str) -> TransientError:
    """The error of a request that was asked, and may be answered later."""
    text = str(error)
    return TransientError(
        text if request_id in text else f"request {request_id}: {text}",
        remedy=(f"{error.remedy}\n  " if error.remedy else "")
        + f"read the answer later: cellpipe result {request_id} --follow\n"
        f"  or end the request: cellpipe cancel {request_id} --queued",
    )


def _say(answer: Answer, text: str, *, echo: bool) -> None:
    answer.text += text
    if echo and text:
        sys.stdout.write(text)
        sys.stdout.flush()


@contextmanager
def _waiting(what: str, *, shown: bool) -> Iterator[Callable[[], None]]:
    """A spinner on a terminal until the yielded function is called: prefill can take long."""
    if not (shown and sys.stderr.isatty()):
        yield lambda: None
        return
    from rich.console import Console

    status = Console(stderr=True).status(what)
    status.start()
    try:
        yield status.stop
    finally:
        status.stop()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
