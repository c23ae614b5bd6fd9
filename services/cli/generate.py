"""`cellpipe run`: a prompt in, text out as it comes; and the options of all that ask."""

from __future__ import annotations

import json
import secrets
import sys
import time
from typing import Annotated, Any

import typer

from services.cli.answer import ask
from services.cli.settings import DEFAULT_MODEL, load_config
from services.cli.tree import EXIT_INTERRUPTED, app
from shared.errors import ConfigError, RequestError
from shared.logprobs import MAX_TOP_LOGPROBS
from shared.messages import MAX_SEED, MAX_TOKENS_LIMIT, ChatMessage, FinishReason, Request
from shared.messages import SamplingParams as Sampling
from shared.sampling_params import MAX_REPETITION, MIN_REPETITION

MAX_TIMEOUT_S = 1e9

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="A catalog name, a model's own name or name@digest, or a path to a .gguf file or a "
        f"Hugging Face folder; of a cluster one that is loaded. Default: {DEFAULT_MODEL}; of a "
        "cluster the one loaded last.",
        show_default=False,
    ),
]
Cluster = Annotated[
    bool | None,
    typer.Option(
        "--cluster/--embedded",
        help="Use the workers of a cluster, or this process alone. "
        "Default: the cluster if CELLPIPE_AMQP_URL or CELLPIPE_REDIS_URL is set.",
        show_default=False,
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option(
        "--max-tokens", "-n", min=1, max=MAX_TOKENS_LIMIT, help="Longest answer, in tokens."
    ),
]
Temperature = Annotated[
    float, typer.Option("--temperature", "-t", min=0.0, max=100.0, help="0 is greedy.")
]
TopK = Annotated[int, typer.Option(min=0, help="Draw from the k likeliest tokens; 0 is off.")]
TopP = Annotated[
    float,
    typer.Option(
        max=1.0,
        help="Draw from the likeliest tokens of this mass, above 0; 1 is all.",
    ),
]
MinP = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Only tokens this likely beside the likeliest.")
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(min=-2.0, max=2.0, help="Off the logit of a token for each time it was said."),
]
PresencePenalty = Annotated[
    float, typer.Option(min=-2.0, max=2.0, help="Off the logit of a token that was said.")
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        min=MIN_REPETITION,
        max=MAX_REPETITION,
        help="Divides the logits of tokens that were said or asked; 1 is off.",
    ),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(help="TOKEN_ID=BIAS, -100 to 100, on the logit of a token; may be repeated."),
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        min=0, max=MAX_TOP_LOGPROBS, help="Tell of so many likeliest tokens; with --json."
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(min=0, max=MAX_SEED, help="Same seed, same answer. Default: a fresh one."),
]
System = Annotated[str | None, typer.Option(help="A system message for the model.")]
Timeout = Annotated[float, typer.Option(min=1.0, help="Give up after this many seconds.")]
Groups = Annotated[
    int, typer.Option("--groups", help="Layer groups of the embedded pipeline.", min=1)
]
Threads = Annotated[
    int,
    typer.Option("--threads", help="Threads of the embedded kernel; 0 is one a core.", min=0),
]
NoPrefixCache = Annotated[
    bool,
    typer.Option("--no-prefix-cache", help="Embedded: compute every prompt from its beginning."),
]
Speculate = Annotated[
    bool,
    typer.Option(
        "--speculate/--no-speculate",
        help="Guess tokens ahead from the text so far: faster where it repeats itself, "
        "and the same tokens.",
    ),
]


@app.command()
def run(
    prompt: Annotated[str, typer.Argument(help='What to ask; "-" reads standard input.')],
    model: Model = "",
    cluster: Cluster = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    presence_penalty: PresencePenalty = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    logit_bias: LogitBias = None,
    logprobs: Logprobs = None,
    seed: Seed = None,
    speculate: Speculate = True,
    system: System = None,
    raw: Annotated[bool, typer.Option(help="Continue the prompt, without chat template.")] = False,
    groups: Groups = 1,
    threads: Threads = 0,
    no_prefix_cache: NoPrefixCache = False,
    timeout: Timeout = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Answer one prompt.

    Example: cellpipe run "Why is the sky blue?" --temperature 0.8 --seed 1
    """
    from services.cli.session import open_session
    from shared.producer import new_request_id

    config = load_config(quiet=True)
    check_timeout(timeout)
    text = prompt_text(prompt)
    if raw and system is not None:
        raise ConfigError("--system goes through the chat template, which --raw leaves out")
    if logprobs is not None and not as_json:
        raise ConfigError("--logprobs are shown with --json alone")
    sampling = sampling_of(
        temperature,
        top_k,
        top_p,
        seed,
        max_tokens,
        speculate,
        min_p=min_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=_biases(logit_bias or []),
        logprobs=logprobs,
    )
    turns = conversation(system, [ChatMessage("user", text)])
    with open_session(
        config,
        model=model,
        cluster=cluster,
        num_groups=groups,
        num_threads=threads,
        prefix_cache=not no_prefix_cache,
    ) as session:
        request = Request(
            request_id=new_request_id(),
            prompt=text if raw else None,
            messages=None if raw else turns,
            sampling=sampling,
            deadline_unix_ms=deadline(timeout),
            model=session.model_id if model else "",
        )
        answer = ask(session, request, echo=not as_json)
    if as_json:
        first_s = answer.first_token_s
        record: dict[str, Any] = {
            "request_id": request.request_id,
            "model": session.model_id,
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "num_prompt_tokens": answer.num_prompt_tokens,
            "num_cached_tokens": answer.num_cached_tokens,
            "seed": sampling.seed,
            "tokens_per_s": answer.tokens_per_s,
            "time_to_first_token_ms": None if first_s is None else first_s * 1e3,
        }
        if logprobs is not None:
            record["logprobs"] = answer.logprobs
        typer.echo(json.dumps(record, ensure_ascii=False))
    else:
        typer.echo(answer.closing_line() + seed_note(sampling), err=True)
    if answer.finish_reason is FinishReason.ABORT:
        raise typer.Exit(EXIT_INTERRUPTED)


def sampling_of(
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    max_tokens: int,
    speculate: bool,
    **others: Any,
) -> Sampling:
    """The parameters, with a seed drawn here if none was given, so that it can be shown."""
    if seed is None:
        seed = secrets.randbits(31)
    try:
        return Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            max_tokens=max_tokens,
            speculation=speculate,
            **others,
        )
    except RequestError as error:
        raise ConfigError(str(error)) from error


def _biases(options: list[str]) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [(int(i), float(bias)) for i, bias in (text.split("=") for text in options)]
    except ValueError as error:
        raise ConfigError(f"--logit-bias must be TOKEN_ID=BIAS, got {options!r:.80}") from error
    return tuple(sorted(pairs))


def seed_note(sampling: Sampling) -> str:
    return f", seed {sampling.seed}" if sampling.temperature > 0 else ""


def prompt_text(prompt: str) -> str:
    """The prompt, or standard input for "-". Raises `ConfigError` unless it is text."""
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"standard input is not UTF-8: {error}") from error
    try:
        prompt.encode("utf-8")  # what the shell passed on undecoded cannot be sent
    except UnicodeEncodeError as error:
        raise ConfigError(f"the prompt is not UTF-8: {error.reason}") from error
    if not prompt.strip():
        raise ConfigError("the prompt is empty")
    return prompt


def conversation(system: str | None, turns: list[ChatMessage]) -> tuple[ChatMessage, ...]:
    return (*([ChatMessage("system", system)] if system is not None else []), *turns)


def check_timeout(timeout_s: float) -> None:
    if not 0 < timeout_s <= MAX_TIMEOUT_S:  # NaN is neither
        raise ConfigError(
            f"--timeout must be over 0 and at most {MAX_TIMEOUT_S:g} seconds, got {timeout_s}"
        )


def deadline(timeout_s: float) -> int:
    return int((time.time() + timeout_s) * 1000)
