"""Lua scripts by name. Knows no connection and no key.

A script is what makes several commands one: Redis runs nothing else in between. Redis also checks
its memory limit before a script's first write, so that a full server refuses all of it or none.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Script:
    """A script's source and the SHA-1 by which Redis knows it."""

    name: str
    source: str
    sha1: str


@cache
def load_script(name: str) -> Script:
    """The script in `<name>.lua` beside this module."""
    source = files(__package__).joinpath(f"{name}.lua").read_text("utf-8")
    # SHA-1 is Redis's name for a script, not a protection.
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())
