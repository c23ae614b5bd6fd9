"""The tables of docs/api.md, made from the schema: python -m services.gateway.table docs/api.md"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from services.gateway.openapi import BODIES
from shared.api.fields import Peers
from shared.api.schema import Message, StreamOptions, ToolFunction, no_ops_of

BEGIN, END = "<!-- made by services/gateway/table.py -->", "<!-- end -->"
# Where each column was read. llama-server and vLLM pass over what they do not know.
SOURCES = {
    "OpenAI": "its client for Python, whose parameters a test compares",
    "llama-server": "ggml-org/llama.cpp, `tools/server`: `server-schema.cpp` at 23b5dbd4fb32, "
    "`server-common.cpp` at aa6192d38def, `README.md` at 25d5b0c53f9a",
    "vLLM": "vllm-project/vllm, `vllm/entrypoints`: `openai/chat_completion/protocol.py` and "
    "`openai/completion/protocol.py` at d5dba2d7b0ab, `openai/engine/protocol.py` at d7e52523a55c, "
    "`serve/tokenize/protocol.py` at 343bacafc7bf",
}
_HEAD = (
    "| field | type | cellpipe | OpenAI | llama-server | vLLM | |",
    "|---|---|---|---|---|---|---|",
)


def tables() -> str:
    """One table for each kind of body, as Markdown.

    Raises `ValueError` for a field without `Peers`.
    """
    sources = "\n".join(f"- {name}: {source}." for name, source in SOURCES.items())
    parts = [f"Read in:\n{sources}"]
    for path, body in BODIES.items():
        parts.append(f"### POST {path}\n\n{_table(body)}")
    parts.append(f"### A message of `messages`\n\n{_table(Message)}")
    parts.append(f"### The function of a tool of `tools`\n\n{_table(ToolFunction)}")
    parts.append(f"### `stream_options`\n\n{_table(StreamOptions)}")
    return "\n\n".join(parts)


def page_with_tables(page: str) -> str:
    """A page with the part between the two marks made anew. Raises `ValueError` without marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError("the page has no place for the tables")
    return f"{before}{begin}\n{tables()}\n{end}{after}"


def _table(body: Any) -> str:
    schema = body.model_json_schema()
    rows = [
        _row(name, field, schema["properties"][name]) for name, field in body.model_fields.items()
    ]
    return "\n".join([*_HEAD, *rows])


def _row(name: str, field: FieldInfo, schema: dict[str, Any]) -> str:
    peers = next((m for m in field.metadata if isinstance(m, Peers)), None)
    if peers is None:
        raise ValueError(f"{name} does not say what other servers do with it")
    no_ops = no_ops_of(field)
    if no_ops is None:
        kind, ours, note = _kind(schema), "yes", peers.note
        if field.is_required():
            note = f"required; {note}" if note else "required"
    else:
        allowed = ", ".join(f"`{json.dumps(value)}`" for value in no_ops)
        kind, ours, note = "", "no", f"takes {allowed} and refuses others by name"
    others = " | ".join(_yes(x) for x in (peers.openai, peers.llama_server, peers.vllm))
    return f"| `{name}` | {kind} | {ours} | {others} | {note} |"


def _yes(is_supported: bool) -> str:
    return "yes" if is_supported else "no"


def _kind(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        kinds = [_kind(part) for part in schema["anyOf"] if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in schema:
        return "object"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = str(schema.get("type", ""))
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is None or high is None:
        return kind
    opening = "(" if "exclusiveMinimum" in schema else "["
    return f"{kind} in {opening}{low}, {high}]"


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        file.write_text(page_with_tables(file.read_text()))
