"""What docs/producing.md holds: its schemas and its examples, as they stand there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "producing.md"


def blocks(language: str) -> list[str]:
    """The page's code blocks in a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def schemas() -> dict[str, dict[str, Any]]:
    """The page's JSON Schemas by kind of message."""
    found = [json.loads(block) for block in blocks("json")]
    return {schema["title"]: schema for schema in found}
