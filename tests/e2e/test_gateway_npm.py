"""The HTTP API as a user of OpenAI's client for Node meets it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.api_server import ApiServer
from tests.spelling_model import write_speller

SCRIPT = """
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const ask = { model: "", temperature: 0, messages: [{ role: "user", content: "hello" }] };
const whole = await client.chat.completions.create(ask);
const options = { stream: true, stream_options: { include_usage: true } };
let text = "", usage = null;
for await (const chunk of await client.chat.completions.create({ ...ask, ...options })) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
const unserved = { ...ask, web_search_options: {} };
const refused = await client.chat.completions.create(unserved).catch((e) => e);
console.log(JSON.stringify({
  whole: whole.choices[0].message.content, text, usage: usage.completion_tokens,
  status: refused.status, param: refused.param,
}));
"""


@pytest.mark.timeout(240)
def test_openais_client_for_node_works(tmp_path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    installed = subprocess.run(
        [npm, "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "openai@7"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    if installed.returncode != 0 and not os.environ.get("CI"):
        pytest.skip(f"the client cannot be fetched: {installed.stderr[-300:]}")
    assert installed.returncode == 0, installed.stderr
    script = tmp_path / "client.mjs"
    script.write_text(SCRIPT)
    model = write_speller(tmp_path / "speller.gguf", "hi 中!")
    settings = {"CELLPIPE_CACHE_DIR": str(tmp_path / "cache")}
    with ApiServer(
        "serve", "--model", str(model), "--threads", "1",
        settings=settings, log=tmp_path / "server.log",
    ) as server:  # fmt: skip
        done = subprocess.run(
            ["node", script, f"{server.url}/v1"],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == {
        "whole": "hi 中!",
        "text": "hi 中!",
        "usage": len("hi 中!".encode()) + 1,
        "status": 400,
        "param": "web_search_options",
    }
