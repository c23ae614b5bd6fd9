"""What is remembered of an answer so that it can be picked up again. Knows no store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shared.api.ask import Kind
from shared.api.tools import Calls, call_finder
from shared.errors import StoreDamaged
from shared.text.tool_calls import ForcedCalls, FreeCalls


@dataclass(frozen=True, slots=True)
class Note:
    """How an answer is shown: its choices are `num_prompts` times `n`, those of a prompt in a row.

    `owner` is the name of the key that asked, `logprobs` how many likeliest tokens it wants to see.
    `calls`: how calls of `functions` are looked for in what the model writes, "" not at all; not
    `parallel`: one at most.
    """

    kind: Kind
    owner: str
    created_unix_s: int
    deadline_unix_ms: int
    num_prompts: int
    n: int
    stops: tuple[str, ...]
    include_usage: bool
    store: bool
    logprobs: int | None = None
    calls: Calls = ""
    functions: tuple[str, ...] = ()
    parallel: bool = True

    @property
    def num_choices(self) -> int:
        return self.num_prompts * self.n

    def call_finder(self) -> FreeCalls | ForcedCalls | None:
        """What finds the calls in one choice."""
        return call_finder(self.calls, self.functions, parallel=self.parallel)

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        if self.logprobs is None:  # most ask for none, and an older gateway knows of none
            del fields["logprobs"]
        return fields

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Note:
        """Raises `StoreDamaged` for what `to_dict` did not make."""
        try:
            lists = {name: tuple(document.get(name, ())) for name in ("stops", "functions")}
            note = cls(**{**document, **lists})
        except (KeyError, TypeError) as error:
            raise StoreDamaged(
                f"the note of a completion cannot be read: {error!s:.200}"
            ) from error
        for name, kinds in (("n", int), ("num_prompts", int), ("owner", str)):
            if not isinstance(getattr(note, name), kinds):
                raise StoreDamaged(f"the note of a completion has no {name}")
        if not isinstance(note.logprobs, int | None):
            raise StoreDamaged("the logprobs of a completion are no number")
        return note


def request_ids(completion_id: str, num_choices: int) -> list[str]:
    """The ids of the requests that an answer is made of."""
    return [f"{completion_id}-{index}" for index in range(num_choices)]
