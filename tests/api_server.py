"""Starts the HTTP API as a process and talks to it, as a client of OpenAI and byte by byte."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import openai

from tests.processes import CELLPIPE, REPO, environment

JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class ServerEvent:
    """One server-sent event; `document` None for [DONE]."""

    event_id: str
    document: dict[str, Any] | None


@dataclass(frozen=True)
class Stream:
    connection: http.client.HTTPConnection
    response: http.client.HTTPResponse

    def read(self) -> bytes:
        """All of it, to its end."""
        with contextlib.closing(self):
            return self.response.read()

    def read_some(self, num_bytes: int) -> bytes:
        """So many bytes, or fewer if it ends before, and hang up."""
        with contextlib.closing(self):
            return self.response.read(num_bytes)

    def close(self) -> None:
        """Hang up."""
        self.response.close()
        self.connection.close()


class ApiServer:
    """`cellpipe serve` or `gateway` on a free port; ended with the block."""

    def __init__(self, *command: str, settings: Mapping[str, str], log: Path) -> None:
        self.log = log
        self._clients: dict[str, openai.OpenAI] = {}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*CELLPIPE, *command, "--port", "0"],
                env=environment(settings), cwd=REPO, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        deadline_s = time.monotonic() + 60
        while not (match := re.search(r"listening on https?://(.*):(\d+)/v1", log.read_text())):
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.05)
        self.host, self.port = match[1], int(match[2])

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def client(self, key: str = "none") -> openai.OpenAI:
        """One for each key, closed with the server: errors that tests keep hold on to sockets."""
        if key not in self._clients:
            self._clients[key] = openai.OpenAI(
                base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60
            )
        return self._clients[key]

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=60)

    def call(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any, Mapping[str, str]]:
        """Status, body (JSON if it is) and headers of one request; `body` bytes go as they are."""
        connection = self.connect()
        try:
            raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, raw, {**JSON, **(headers or {})})
            response = connection.getresponse()
            found = response.read()
            is_json = response.getheader("content-type") == "application/json"
            kept = {name.lower(): value for name, value in response.getheaders()}
            return response.status, json.loads(found) if is_json else found, kept
        finally:
            connection.close()

    def stream(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Stream:
        """A response whose body is still to be read."""
        connection = self.connect()
        connection.request("POST", path, json.dumps(body).encode(), {**JSON, **(headers or {})})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        return Stream(connection, response)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        for client in self._clients.values():
            client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=45)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def __enter__(self) -> ApiServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def read_events(raw: bytes) -> Iterator[ServerEvent]:
    """The complete events of a stream's bytes; what was cut at the end is left out."""
    for block in raw.split(b"\n\n")[:-1]:
        fields = dict(line.split(b": ", 1) for line in block.split(b"\n"))
        if b"data" in fields:
            text = fields[b"data"].decode()
            document = None if text == "[DONE]" else json.loads(text)
            yield ServerEvent(fields.get(b"id", b"").decode(), document)


def texts_of(events: list[ServerEvent], num_choices: int = 1) -> list[str]:
    """The text of each choice."""
    texts = [""] * num_choices
    for event in events:
        for choice in (event.document or {}).get("choices", ()):
            delta = choice.get("delta", {}).get("content", "")
            texts[choice["index"]] += choice.get("text", delta)
    return texts


def entries_of(events: list[ServerEvent], index: int = 0) -> list[Any]:
    """The log probabilities in the stream of a chat, of one choice."""
    return [
        entry
        for event in events
        for choice in (event.document or {}).get("choices", ())
        if choice["index"] == index and choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
