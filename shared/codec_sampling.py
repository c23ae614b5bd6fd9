"""The fields of the sampling parameters in a frame. Knows no kind of message.

What a message does not need is left out; each field has a default. A bias is written as in
OpenAI's API: a map of token ids, as texts, to numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from shared.codec_fields import as_bool, as_float, as_int
from shared.errors import DecodeError
from shared.messages import MAX_SEED, SamplingParams
from shared.sampling_params import BIAS_KEY, MAX_BIASES

_INT64 = 2**63 - 1


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "temperature": float(sampling.temperature),
        "top_k": sampling.top_k,
        "top_p": float(sampling.top_p),
        "seed": sampling.seed,
        "max_tokens": sampling.max_tokens,
        "ignore_eos": sampling.ignore_eos,
        "speculation": sampling.speculation,
    }
    if sampling.min_p:
        fields["min_p"] = float(sampling.min_p)
    if sampling.logprobs is not None:
        fields["logprobs"] = sampling.logprobs
    if sampling.shapes_logits:
        fields |= _shape_fields(sampling)
    return fields


def _shape_fields(sampling: SamplingParams) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "frequency_penalty": float(sampling.frequency_penalty),
        "presence_penalty": float(sampling.presence_penalty),
        "repetition_penalty": float(sampling.repetition_penalty),
    }
    if sampling.logit_bias:
        fields["logit_bias"] = {str(i): float(bias) for i, bias in sampling.logit_bias}
    return fields


def read_sampling(raw: Mapping[str, Any]) -> SamplingParams:
    """Missing fields take their defaults. Raises `RequestError` for values out of range."""
    get = raw.get
    try:
        return _checked_sampling(
            get("temperature", 0.0),
            get("top_k", 0),
            get("top_p", 1.0),
            get("seed"),
            get("max_tokens", 256),
            get("ignore_eos", False),
            get("speculation", True),
            get("min_p", 0.0),
            get("logprobs"),
            get("frequency_penalty", 0.0),
            get("presence_penalty", 0.0),
            get("repetition_penalty", 1.0),
            () if get("logit_bias") is None else read_bias(raw["logit_bias"]),
        )
    except TypeError as error:  # what cannot be hashed is no number
        raise DecodeError("sampling holds a map or an array where a number belongs") from error


# Every step of a request carries the same parameters: remembering them takes 4 of 17 us off a
# decode. Typed, because True == 1 == 1.0; errors are not remembered. Of what is in a tuple it does
# not see the type: that is checked before.
@lru_cache(maxsize=256, typed=True)
def _checked_sampling(
    temperature: Any,
    top_k: Any,
    top_p: Any,
    seed: Any,
    max_tokens: Any,
    ignore_eos: Any,
    speculation: Any,
    min_p: Any,
    logprobs: Any,
    frequency_penalty: Any,
    presence_penalty: Any,
    repetition_penalty: Any,
    logit_bias: tuple[tuple[int, float], ...],
) -> SamplingParams:
    return SamplingParams(
        temperature=as_float("temperature", temperature),
        top_k=as_int("top_k", top_k, -_INT64, _INT64),
        top_p=as_float("top_p", top_p),
        seed=None if seed is None else as_int("seed", seed, -_INT64, MAX_SEED),
        max_tokens=as_int("max_tokens", max_tokens, -_INT64, _INT64),
        ignore_eos=as_bool("ignore_eos", ignore_eos),
        speculation=as_bool("speculation", speculation),
        min_p=as_float("min_p", min_p),
        logprobs=None if logprobs is None else as_int("logprobs", logprobs, -_INT64, _INT64),
        frequency_penalty=as_float("frequency_penalty", frequency_penalty),
        presence_penalty=as_float("presence_penalty", presence_penalty),
        repetition_penalty=as_float("repetition_penalty", repetition_penalty),
        logit_bias=logit_bias,
    )


def read_bias(entries: Any) -> tuple[tuple[int, float], ...]:
    """Pairs by ascending token id. Raises `DecodeError` for what is no map of ids to numbers."""
    if type(entries) is not dict:
        raise DecodeError(f"logit_bias must be a map, got {type(entries).__name__}")
    if len(entries) > MAX_BIASES:
        raise DecodeError(f"logit_bias must be at most {MAX_BIASES} tokens, got {len(entries)}")
    pairs = [(_token_id(name), as_float("logit_bias", bias)) for name, bias in entries.items()]
    return tuple(sorted(pairs))


def _token_id(name: Any) -> int:
    if type(name) is not str or not BIAS_KEY.match(name):
        raise DecodeError(f"logit_bias must map token ids to numbers, got {name!r:.80}")
    return int(name)
