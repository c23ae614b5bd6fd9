"""Messages of every kind; a frame of each lies in tests/golden and must decode for ever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import numpy as np

from shared.codec import encode
from shared.logprobs import TokenLogprobs
from shared.messages import (
    ChatMessage,
    FinishReason,
    Message,
    Reply,
    Request,
    SamplingParams,
    Step,
    Token,
)
from shared.text.response_format import calls_format, json_format, read_function

STEP = Step(
    request_id="req-1",
    model_id="tiny@0123abcd",
    layout_id="even3",
    group=1,
    epoch=2,
    position=40,
    sample=True,
    max_position=296,
    tensors={"hidden": np.arange(32, dtype=np.float32).reshape(2, 16) / 8},
    sampling=SamplingParams(0.8, 40, 0.95, 2**64 - 1, 256, True),
    stop_token_ids=(0, 2),
    deadline_unix_ms=1_790_000_000_000,
)
TOKENS_STEP = Step(
    request_id="req-2",
    model_id="tiny@0123abcd",
    layout_id="even3",
    group=0,
    epoch=0,
    position=0,
    sample=False,
    max_position=10,
    tensors={"token_ids": np.array([1, 5, 2**31 - 1], np.int32)},
    sampling=SamplingParams(seed=7),
)
ROUTED_STEP = replace(STEP, request_id="req-3", route=("ps3-17.lan-4021-beef", "", "pi-1-77-0c"))
F16_STEP = replace(
    STEP,
    request_id="req-6",
    layout_id="even3-f16",
    tensors={"hidden": np.arange(32, dtype=np.float16).reshape(2, 16) / 8},
)
I8_STEP = replace(
    STEP,
    request_id="req-7",
    layout_id="even3-i8",
    tensors={
        "hidden": np.arange(-32, 32, dtype=np.int8).reshape(2, 32),
        "hidden_scale": np.array([[0.5], [0.0]], np.float32),
    },
)
DRAFTED_STEP = replace(
    TOKENS_STEP,
    request_id="req-4",
    position=40,
    sample=True,
    tensors={"token_ids": np.array([5, 9, 8], np.int32)},
    sampling=SamplingParams(seed=7, speculation=True),
    draft=(9, 8),
    accepted=(3, 4),
)
SHAPED_STEP = replace(
    TOKENS_STEP, request_id="req-8", sampling=SamplingParams(0.8, seed=7, min_p=0.05), shaped=True
)
REQUEST = Request(
    "req-1",
    messages=(ChatMessage("system", "Be brief."), ChatMessage("user", "Größe?")),
    model="tiny",
    sampling=SamplingParams(0.7, 5, 0.9, 11, 64, False),
    deadline_unix_ms=1_790_000_000_000,
)
LOGPROBS = TokenLogprobs.of(-1.5, ((7, -0.25), (258, -1.5)))
REPLY = Reply("req-1", FinishReason.LENGTH, "about 12 cm", (5, 6, 7), 12)
EXAMPLES: dict[str, Message] = {
    "step.v1": STEP,
    "step.v1.tokens": TOKENS_STEP,
    "step.v1.route": ROUTED_STEP,
    "step.v1.f16": F16_STEP,
    "step.v1.i8": I8_STEP,
    "step.v1.batch": replace(TOKENS_STEP, is_batch=True),
    "step.v2": DRAFTED_STEP,
    "step.v3": SHAPED_STEP,
    "step.v3.draft": replace(DRAFTED_STEP, shaped=True),
    "step.v3.logprobs": replace(TOKENS_STEP, sampling=SamplingParams(seed=7, logprobs=0)),
    "request.v1": REQUEST,
    "request.v1.prompt": Request("req-2", prompt="Hello"),
    "request.v1.token_ids": Request("req-3", token_ids=(1, 2, 3)),
    "request.v1.speculation": Request(
        "req-5", prompt="Hello", sampling=SamplingParams(speculation=False)
    ),
    "request.v1.stream": Request("req-6", prompt="Hello", stream=True),
    "request.v1.penalties": Request(
        "req-8",
        prompt="Hello",
        sampling=SamplingParams(
            0.7,
            min_p=0.05,
            frequency_penalty=-2.0,
            presence_penalty=0.5,
            repetition_penalty=1.1,
            logit_bias=((5, -100.0), (258, 1.5)),
        ),
    ),
    "request.v1.response_format": Request(
        "req-9", prompt="Hello", response_format=json_format({"type": ["object", "null"]}, "")
    ),
    "request.v1.calls": Request(
        "req-10",
        token_ids=(1,),
        response_format=calls_format([read_function("f", None, "")], parallel=True),
    ),
    "request.v1.logprobs": Request("req-9", prompt="Hello", sampling=SamplingParams(logprobs=20)),
    "token.v1": Token("req-6", 3, 258, " wörld"),
    "token.v1.logprobs": Token(
        "req-9", 3, 258, "x", TokenLogprobs.of(-1.5, ((7, -0.25), (258, -1.5)))
    ),
    "reply.v1": REPLY,
    "reply.v1.logprobs": replace(
        REPLY,
        logprobs=(
            TokenLogprobs.of(-0.5),
            TokenLogprobs.of(-2.0, ((7, -0.25),)),
            TokenLogprobs.of(0.0),
        ),
    ),
    "reply.v1.cached": replace(REPLY, num_cached_tokens=16, num_prompt_tokens=20),
    "reply.v1.error": Reply("req-4", FinishReason.ERROR, "", (), 3, "deadline passed"),
    "reply.v1.refused": Reply(
        "req-7", FinishReason.ERROR, "", (), 0, "too hot", 0, "invalid_value", "temperature"
    ),
}


def frame(message: Message, **changes: Any) -> bytes:
    """The frame of a message with fields changed; `...` takes a field away."""
    fields = msgpack.unpackb(encode(message)) | changes
    return bytes(msgpack.packb({k: v for k, v in fields.items() if v is not ...}))
