"""Strict readers of single fields and tensors of a frame. Knows no kind of message.

Every `take_` reader takes the frame's map and a field name, and raises `DecodeError` naming the
field and what it held; without a default it requires its field. `as_` readers take the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import DecodeError, RequestError
from shared.messages import MAX_TOKEN_ID

MAX_TENSOR_BYTES = 8 << 20
MAX_TENSORS = 16
MAX_RANK = 4
_MAX_NAME_CHARS = 64

# Closed: np.dtype(text) raises SyntaxError on some foreign text and makes objects of other.
_DTYPES: dict[str, np.dtype[Any]] = {
    "i32": np.dtype("<i4"),
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "i8": np.dtype("i1"),
    "u8": np.dtype("u1"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_REQUIRED: Any = object()


def _bad(name: str, expected: str, value: Any) -> DecodeError:
    if value is _REQUIRED:
        return DecodeError(f"{name} is missing")
    return DecodeError(f"{name} must be {expected}, got {type(value).__name__} {value!r:.80}")


def as_int(name: str, value: Any, low: int = 0, high: int = 2**53 - 1) -> int:
    """An integer in low..high; a bool or a float is none."""
    if type(value) is not int:
        raise _bad(name, "an integer", value)
    if not low <= value <= high:
        raise DecodeError(f"{name} must be in {low}..{high}, got {value!r:.80}")
    return value


def as_float(name: str, value: Any) -> float:
    """A number; an integer is taken as one, a bool is not. NaN and infinity are for the message."""
    if type(value) is float:
        return value
    # JSON integers have no end, float() of them has.
    return float(as_int(name, value, -(2**63), 2**64 - 1))


def as_bool(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise _bad(name, "true or false", value)
    return value


def take_int(
    raw: Mapping[str, Any],
    name: str,
    default: int = _REQUIRED,
    *,
    low: int = 0,
    high: int = 2**53 - 1,
) -> int:
    value = raw.get(name, default)
    if type(value) is int and low <= value <= high:
        return value
    return as_int(name, value, low, high)


def take_bool(raw: Mapping[str, Any], name: str, default: bool = _REQUIRED) -> bool:
    return as_bool(name, raw.get(name, default))


def take_text(raw: Mapping[str, Any], name: str, default: str = _REQUIRED) -> str:
    """Text that UTF-8 can carry: JSON escapes can smuggle in half of a surrogate pair."""
    value = raw.get(name, default)
    if type(value) is not str:
        raise _bad(name, "text", value)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DecodeError(f"{name} holds half of a surrogate pair") from error
    return value


def take_map(
    raw: Mapping[str, Any], name: str, default: dict[str, Any] = _REQUIRED
) -> dict[str, Any]:
    value = raw.get(name, default)
    if type(value) is not dict:
        raise _bad(name, "a map", value)
    return value


def take_list(raw: Mapping[str, Any], name: str) -> list[Any]:
    value = raw.get(name, _REQUIRED)
    if type(value) is not list:
        raise _bad(name, "an array", value)
    return value


def take_tokens(raw: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Token ids. An id outside 0..2**31-1 is a `RequestError`, another type a `DecodeError`."""
    values = tuple(take_list(raw, name))
    for number, value in enumerate(values):
        if type(value) is not int:
            raise _bad(f"{name}[{number}]", "an integer", value)
        if not 0 <= value <= MAX_TOKEN_ID:
            raise RequestError(
                f"{name}[{number}] must be in 0..2**31-1, got {value!r:.80}", param=name
            )
    return values


def check_tensors(tensors: Mapping[str, npt.NDArray[Any]]) -> int:
    """The bytes of their numbers, all together.

    Raises `ValueError` for a dtype that has no code, a rank over 4 or over 8 MiB in all: the
    receiver would refuse the frame, and the mistake is ours.
    """
    num_bytes = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _CODES and tensor.dtype.newbyteorder("<") not in _CODES:
            raise ValueError(f"tensor {name!r} has dtype {tensor.dtype}, which has no code")
        num_bytes += tensor.nbytes
        if not 1 <= tensor.ndim <= MAX_RANK or num_bytes > MAX_TENSOR_BYTES:
            raise ValueError(f"tensor {name!r} of shape {tensor.shape} is over the wire's limits")
    return num_bytes


def pack_tensors(tensors: Mapping[str, npt.NDArray[Any]]) -> dict[str, Any]:
    """{name: {dtype, shape, data}} with little-endian, row-major data.

    Raises `ValueError` as `check_tensors` does.
    """
    check_tensors(tensors)
    packed = {}
    for name, tensor in tensors.items():
        code = _CODES.get(tensor.dtype)
        if code is None:
            code = _CODES[tensor.dtype.newbyteorder("<")]
            tensor = tensor.astype(_DTYPES[code])
        packed[name] = {"dtype": code, "shape": tensor.shape, "data": tensor.tobytes()}
    return packed


def unpack_tensors(raw: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Read-only arrays over the bytes of the frame. At most 16, of rank 1 to 4, 8 MiB in all."""
    if len(raw) > MAX_TENSORS:
        raise DecodeError(f"tensors must be at most {MAX_TENSORS}, got {len(raw)}")
    tensors = {}
    total_bytes = 0
    for name, entry in raw.items():
        if type(name) is not str or not 1 <= len(name) <= _MAX_NAME_CHARS:
            raise DecodeError(
                f"tensor name must be 1-{_MAX_NAME_CHARS} characters, got {name!r:.80}"
            )
        if type(entry) is not dict:
            raise _bad(f"tensor {name!r}", "a map", entry)
        tensor = _unpack_tensor(name, entry)
        total_bytes += tensor.nbytes
        if total_bytes > MAX_TENSOR_BYTES:
            raise DecodeError(f"tensors are over {MAX_TENSOR_BYTES} bytes in all")
        tensors[name] = tensor
    return tensors


def _unpack_tensor(name: str, entry: dict[str, Any]) -> npt.NDArray[Any]:
    code = entry.get("dtype", _REQUIRED)
    dtype = _DTYPES.get(code) if type(code) is str else None
    if dtype is None:
        raise _bad(f"dtype of tensor {name!r}", f"one of {', '.join(_DTYPES)}", code)
    shape = entry.get("shape", _REQUIRED)
    if type(shape) is not list or not 1 <= len(shape) <= MAX_RANK:
        raise _bad(f"shape of tensor {name!r}", f"1-{MAX_RANK} sizes", shape)
    num_bytes = dtype.itemsize
    for size in shape:
        if type(size) is not int or not 0 <= size <= MAX_TENSOR_BYTES:
            raise _bad(f"shape of tensor {name!r}", f"sizes in 0..{MAX_TENSOR_BYTES}", size)
        num_bytes *= size
    body = entry.get("data", _REQUIRED)
    if type(body) is not bytes:
        raise _bad(f"data of tensor {name!r}", "bytes", body)
    if num_bytes != len(body):
        raise DecodeError(
            f"data of tensor {name!r} must be {num_bytes} bytes for {code} {shape}, got {len(body)}"
        )
    return np.frombuffer(body, dtype).reshape(shape)
