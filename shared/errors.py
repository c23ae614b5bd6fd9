"""The error tree of cellpipe. The class of an error is the verdict on what caused it.

    CellpipeError
    ├── ConfigError            do not start: a setting, option or environment variable is wrong
    ├── PermanentError         the same input fails again: dead-letter it and tell the requester
    │   ├── DecodeError        a frame that is not a valid message
    │   ├── RequestError       a request that cannot be served; the message names field and value
    │   ├── ModelError         a model file or manifest that cannot be used
    │   │   └── ShardError     a shard in the store that is missing or not what the manifest says
    │   ├── KernelError        the kernel refuses its input (malformed chunk, sizes that disagree)
    │   └── StoreDamaged       a key in the store holds what cellpipe did not write there
    └── TransientError         worth another try, with back-off
        ├── BrokerUnavailable  no connection to the broker within the time allowed
        ├── PublishRefused     the broker refused a message: its queue is full
        │   └── Overloaded     a request that was not taken: as many wait as the cluster takes
        ├── Unroutable         a message whose queue does not exist
        ├── ConfirmTimeout     a publish whose confirm did not come in time: its fate is unknown
        ├── StoreUnavailable   no connection to the store in the time allowed, or it refuses writes
        └── KvMissing          KV rows that the store should hold and does not (yet)

Anything else that is raised is a bug. Imports nothing of cellpipe.
"""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """Why a request ended with an error, for programs; the message beside it is for people."""

    INVALID_VALUE = "invalid_value"  # it asks for what cannot be; names the field
    CONTEXT_LENGTH = "context_length_exceeded"  # prompt and answer are longer than the model holds
    MODEL_NOT_FOUND = "model_not_found"  # it names a model that is not served
    KV_MEMORY = "kv_memory_exceeded"  # larger than the memory for KV rows ever is
    NO_WORKERS = "no_workers"  # a layer group has had no worker for a while
    DEADLINE = "timeout"  # its own time was over
    LOST = "request_lost"  # the store has lost its record; asking again is right
    FAILED = "generation_failed"  # it was computed, and that failed


class CellpipeError(Exception):
    """Base of every error that cellpipe raises on purpose.

    `remedy` is one sentence that says what the reader can do about it; the CLI prints it on a
    line of its own.
    """

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class ConfigError(CellpipeError):
    """A setting is missing, unknown or out of range. Names the key and the value."""


class PermanentError(CellpipeError):
    """The same input will fail again."""


class DecodeError(PermanentError):
    """A frame that is not a valid message."""


class RequestError(PermanentError):
    """A request that cannot be served as it was asked. Names the field and the value.

    `param` is the field of the request at fault, "" for none of them.
    """

    def __init__(
        self,
        message: str,
        *,
        remedy: str = "",
        code: ErrorCode = ErrorCode.INVALID_VALUE,
        param: str = "",
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.code = code
        self.param = param


class ModelError(PermanentError):
    """A model file or manifest that cannot be used."""


class ShardError(ModelError):
    """A shard in the store that is missing, short or fails its SHA-256."""


class KernelError(PermanentError):
    """The kernel refuses its input, or its output is not finite."""


class StoreDamaged(PermanentError):
    """A key in the store holds something else than cellpipe wrote there."""


class TransientError(CellpipeError):
    """Worth another try, with back-off."""


class BrokerUnavailable(TransientError):
    """No connection to the broker within the time allowed."""


class PublishRefused(TransientError):
    """The broker refused a message because its queue is full."""


class Overloaded(PublishRefused):
    """A request that was not taken: as many wait as the cluster takes.

    `retry_after_s` is when to try again; whoever is refused again should wait twice as long.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(
            message,
            remedy=f"try again in {retry_after_s:g} s, and after twice as long each time",
        )
        self.retry_after_s = retry_after_s


class Unroutable(TransientError):
    """A message that was returned because its queue does not exist."""


class ConfirmTimeout(TransientError):
    """A publish whose confirm did not come in time; the message may or may not be in its queue."""


class StoreUnavailable(TransientError):
    """No connection to the store within the time allowed, or it refuses writes."""


class KvMissing(TransientError):
    """KV rows that the store should hold are missing or short. Never read as zeros."""
