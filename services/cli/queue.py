"""`cellpipe enqueue` and `cellpipe result`: ask now, read the answer later."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.answer import end_line, tell, tell_of_outage, with_id
from services.cli.cluster import ModelOption
from services.cli.generate import (
    MaxTokens,
    Seed,
    System,
    Temperature,
    TopK,
    TopP,
    check_timeout,
    conversation,
    deadline,
    prompt_text,
    sampling_of,
)
from services.cli.settings import load_config
from services.cli.tree import app
from shared.errors import (
    ConfigError,
    PermanentError,
    RequestError,
    StoreUnavailable,
    TransientError,
)
from shared.messages import REQUEST_ID_PATTERN, ChatMessage, FinishReason, Request, check_request_id

if TYPE_CHECKING:
    from services.cli.session import Session
    from shared.messages import Reply


@app.command()
def enqueue(
    prompt: Annotated[str, typer.Argument(help='What to ask; "-" reads standard input.')] = "",
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read what to ask from a file.")
    ] = None,
    model: ModelOption = "",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    system: System = None,
    raw: Annotated[bool, typer.Option(help="Continue the prompt, without chat template.")] = False,
    batch: Annotated[
        bool, typer.Option("--batch", help="Let it be served when nobody else waits.")
    ] = False,
    request_id: Annotated[
        str, typer.Option("--id", help="Its id; asking again under an id asks nothing new.")
    ] = "",
    timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds after which it is given up; 0 is never.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Put a request into the queue of a cluster and print its id.

    Example: cellpipe result $(cellpipe enqueue "Why is the sky blue?") --follow
    """
    from services.cli.session import open_session
    from shared.producer import new_request_id

    config = load_config(quiet=True)
    if timeout:
        check_timeout(timeout)
    if bool(prompt) == (file is not None):
        raise ConfigError("give either a prompt or --file")
    if raw and system is not None:
        raise ConfigError("--system goes through the chat template, which --raw leaves out")
    if request_id and not REQUEST_ID_PATTERN.match(request_id):
        raise ConfigError(
            f"--id must be 1-64 letters, digits, '-' or '_', and begin with a letter or digit, "
            f"got {request_id!r:.80}"
        )
    text = prompt_text(prompt) if file is None else _file_text(file)
    turns = conversation(system, [ChatMessage("user", text)])
    try:
        request = Request(
            request_id=request_id or new_request_id(),
            prompt=text if raw else None,
            messages=None if raw else turns,
            sampling=sampling_of(temperature, top_k, top_p, seed, max_tokens, True),
            deadline_unix_ms=deadline(timeout) if timeout else 0,
        )
    except RequestError as error:
        raise ConfigError(str(error)) from error
    with open_session(config, model=model, cluster=True, num_groups=1, num_threads=1) as session:
        if model:
            request = replace(request, model=session.model_id)
        submitted = session.producer.submit(request, batch=batch)
    typer.echo(json.dumps({"request_id": submitted}) if as_json else submitted)


@app.command()
def result(
    request_id: Annotated[str, typer.Argument(help="What `cellpipe enqueue` printed.")],
    follow: Annotated[
        bool, typer.Option("--follow", help="Show the text as it comes, to its end.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.0, help="With --follow: seconds until it gives up; 0 is never.")
    ] = 0.0,
    model: ModelOption = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the answer to a request. Exit code 3: none yet; 1: it failed or was cancelled.

    Answers are kept for an hour. Ctrl-C stops reading, not the request; so does --timeout, with
    exit code 3.

    Example: cellpipe result r-8f1d0c2ab94e77f3a1b2c3d4 --follow
    """
    from services.cli.session import open_session

    config = load_config(quiet=True)
    if timeout:
        check_timeout(timeout)
        if not follow:
            raise ConfigError("--timeout is how long --follow waits")
    try:
        check_request_id(request_id)
    except RequestError as error:
        raise ConfigError(f"no request has such an id: {error}") from error
    with open_session(config, model=model, cluster=True, num_groups=1, num_threads=1) as session:
        wait = Wait(session, request_id, timeout_s=timeout) if follow else None
        if wait is not None and not as_json:
            _follow(session, request_id, wait)
        reply = _reply(session, request_id, wait)
    if as_json:
        typer.echo(json.dumps(_reply_dict(reply), ensure_ascii=False))
    elif not follow:
        typer.echo(reply.text)
    if not as_json:
        typer.echo(_closing_line(reply), err=True)
    if reply.finish_reason is FinishReason.ERROR:
        raise PermanentError(reply.error)
    if reply.finish_reason is FinishReason.ABORT:
        raise PermanentError(f"request {request_id} was cancelled")


def _file_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason}") from error
    if not text.strip():
        raise ConfigError(f"{path} is empty")
    return text


class Wait:
    """Looks after a wait for a request: says once that nobody knows it, and gives up in time.

    `timeout_s` 0 is never.
    """

    def __init__(
        self,
        session: Session,
        request_id: str,
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._request_id = request_id
        self._timeout_s = timeout_s
        self._clock = clock
        self._began_s = clock()
        self._is_known: bool | None = None

    def silence(self) -> None:
        """Nothing has come for a second. Raises `TransientError` as `check` does, and in the end
        that of a pipeline that has died."""
        if not self._is_known:
            self._look()
        self.check()
        self._session.check()

    def check(self) -> None:
        """Raise `TransientError` when the time is over."""
        if 0 < self._timeout_s <= self._clock() - self._began_s:
            state = "has not ended" if self._is_known is not False else "is not known"
            raise TransientError(f"request {self._request_id} {state} after {self._timeout_s:g} s")

    def _look(self) -> None:
        try:
            is_known = bool(self._session.producer.states([self._request_id]))
        except StoreUnavailable:
            return  # whoever reads the answer waits for the store
        if not is_known and self._is_known is None:
            tell(
                f"request {self._request_id} is not known: it waits in its queue, or ended long "
                "ago, or the id is wrong; waiting"
            )
        self._is_known = is_known


def _follow(session: Session, request_id: str, wait: Wait) -> None:
    last = ""

    def on_outage(_: StoreUnavailable) -> None:
        tell_of_outage(last)

    try:
        for text in session.producer.stream(
            request_id, on_silence=wait.silence, on_outage=on_outage
        ):
            sys.stdout.write(text)
            sys.stdout.flush()
            last = text
            wait.check()
    except PermanentError:
        pass  # its reply says the same, after what there is of its text
    except TransientError as error:
        end_line(last, shown=True)
        raise with_id(error, request_id) from error
    print(flush=True)


def _reply(session: Session, request_id: str, wait: Wait | None) -> Reply:
    """The whole answer; without a `wait` only if it is there."""
    try:
        return session.producer.result(
            request_id,
            timeout_s=0.0 if wait is None else None,
            on_silence=None if wait is None else wait.silence,
            on_outage=lambda _: tell_of_outage(""),
        )
    except TransientError as error:
        if wait is not None:
            raise with_id(error, request_id) from error
        raise TransientError(
            str(error), remedy=f"wait for it: cellpipe result {request_id} --follow"
        ) from error


def _reply_dict(reply: Reply) -> dict[str, object]:
    return {
        "request_id": reply.request_id,
        "text": reply.text,
        "token_ids": reply.token_ids,
        "finish_reason": reply.finish_reason,
        "num_prompt_tokens": reply.num_prompt_tokens,
        "num_cached_tokens": reply.num_cached_tokens,
        "error": reply.error,
        "error_code": reply.error_code,
        "error_param": reply.error_param,
    }


def _closing_line(reply: Reply) -> str:
    return (
        f"{len(reply.token_ids)} tokens ({reply.num_prompt_tokens} prompt tokens, "
        f"finish: {reply.finish_reason})"
    )
