"""Who gets in, how much of it, and what the server does with hostile clients."""

from __future__ import annotations

import http.client
import json
import random
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.api.schema import ChatCompletion, TextCompletion
from tests.api_server import JSON, ApiServer
from tests.gguf_files import TinyModel, write_gguf
from tests.processes import cellpipe

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 4,
    "seed": 1,
}
KEY = "a-key-that-is-long-enough"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", TinyModel(context=8192))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with _serve(model, tmp_path_factory.mktemp("open"), "--max-body", "256KiB") as server:
        yield server


def _serve(model: Path, folder: Path, *options: str, **more: str) -> ApiServer:
    return ApiServer(
        "serve", "--model", str(model), "--threads", "1", *options,
        settings={"CELLPIPE_CACHE_DIR": str(folder / "cache"), **more},
        log=folder / "server.log",
    )  # fmt: skip


def test_keys_of_setting_and_file_get_in_and_no_others(model: Path, tmp_path: Path) -> None:
    made = cellpipe("key", "alice")
    keys = tmp_path / "keys.txt"
    keys.write_text(f"# who may\n{made.stdout}")
    alice = made.stderr.strip().rpartition(" ")[2]
    assert alice not in made.stdout

    with _serve(
        model, tmp_path, "--api-keys-file", str(keys), CELLPIPE_API_KEYS=f"{KEY},{KEY}2"
    ) as server:
        for key in (KEY, f"{KEY}2", alice):
            answer = server.client(key).chat.completions.create(model="tiny", **HELLO)
            assert answer.choices[0].finish_reason == "length"
        for key in ("wrong", KEY[:-1], f"{KEY}3"):
            with pytest.raises(openai.AuthenticationError):
                server.client(key).models.list()
        status, error, headers = server.call("POST", CHAT, HELLO)
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert error["error"]["type"] == "authentication_error"
        assert server.call("GET", "/health")[0] == 200
        log = server.log.read_text()
    assert KEY not in log
    assert alice not in log


def test_one_key_does_not_see_the_answers_of_another(model: Path, tmp_path: Path) -> None:
    with _serve(model, tmp_path, CELLPIPE_API_KEYS=f"{KEY}1,{KEY}2") as server:
        first, second = ({"authorization": f"Bearer {KEY}{n}"} for n in (1, 2))
        _, answer, _ = server.call("POST", CHAT, {**HELLO, "store": True}, first)

        found = [
            server.call("GET", f"{CHAT}/{answer['id']}", headers=headers)[0]
            for headers in (first, second)
        ]

    assert found == [200, 404]


def test_an_open_door_to_other_machines_is_refused_unless_asked_for() -> None:
    refused = cellpipe("serve", "--host", "0.0.0.0", "--model", "/nonexistent.gguf")

    assert refused.returncode == 2
    assert "--allow-anonymous" in refused.stderr


def test_a_port_that_is_taken_is_said_in_one_line(server: ApiServer, model: Path) -> None:
    cache = str(server.log.parent / "cache")
    refused = cellpipe(
        "serve", "--model", str(model), "--port", str(server.port),
        settings={"CELLPIPE_CACHE_DIR": cache},
    )  # fmt: skip

    assert refused.returncode == 3
    assert "cannot be listened on" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_too_many_answers_at_once_are_429_with_a_time(model: Path, tmp_path: Path) -> None:
    with _serve(model, tmp_path, "--max-running", "2") as server:
        body = {**HELLO, "stream": True, "max_tokens": 8_000, "ignore_eos": True, "n": 2}
        stream = server.stream(CHAT, body)
        status, error, headers = server.call("POST", CHAT, HELLO)
        stream.close()

    assert (status, error["error"]["code"]) == (429, "too_many_running")
    assert error["error"]["type"] == "rate_limit_error"
    assert int(headers["retry-after"]) >= 1


def test_too_many_requests_a_minute_are_429_with_a_time(model: Path, tmp_path: Path) -> None:
    with _serve(model, tmp_path, "--per-minute", "1") as server:
        first, *_ = server.call("POST", CHAT, HELLO)
        status, error, headers = server.call("POST", CHAT, HELLO)

    assert first == 200
    assert (status, error["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(headers["retry-after"]) <= 60


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b"[" * 100_000, 400),
        (b'{"messages":' + b'{"a":' * 50_000, 400),
        (b"\xff\xfe", 400),
        (b'{"messages":[{"role":"user","content":"\xc3("}]}', 400),
        (b'{"messages":[{"role":"user","content":"\\ud800"}]}', 400),
        (b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}', 400),
        (b'{"messages":[{"role":"user","content":"x"}],"seed":1' + b"0" * 9000 + b"}", 400),
        (b'{"messages":[{"role":"user","content":"x"}],"n":1e99}', 400),
        (b'{"messages":[{"role":"wizard","content":"x"}]}', 400),
        (b'{"messages":[]}', 400),
        (b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":"x"}]}]}', 400),
        (b'{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function"}]}', 400),
        (b'{"messages":[{"role":"user","content":"' + b"a " * 100_000 + b'"}]}', 400),
        (b'{"messages":[{"role":"user","content":"' + b"a" * (300 << 10) + b'"}]}', 413),
    ],
)
def test_hostile_bodies_are_refused_with_a_reason(
    server: ApiServer, body: bytes, status: int
) -> None:
    found, error, _ = server.call("POST", CHAT, body)

    assert found == status
    assert error["error"]["message"]
    assert error["error"]["type"] == "invalid_request_error"


def test_a_body_without_its_length_is_bounded_too(server: ApiServer) -> None:
    connection = server.connect()
    connection.request("POST", CHAT, iter([b'{"a":"'] + [b"x" * 65_536] * 8), JSON)

    assert connection.getresponse().status == 413
    connection.close()


def test_other_types_of_body_are_refused(server: ApiServer) -> None:
    assert server.call("POST", CHAT, b"{}", {"content-type": "text/plain"})[0] == 415


def test_a_name_that_leads_here_by_a_web_page_is_refused(server: ApiServer) -> None:
    assert server.call("GET", "/v1/models", headers={"host": "evil.example:80"})[0] == 403
    assert server.call("GET", "/v1/models", headers={"host": f"localhost:{server.port}"})[0] == 200


def test_pages_of_other_origins_get_no_permission(server: ApiServer) -> None:
    _, _, headers = server.call("GET", "/v1/models", headers={"origin": "https://page.example"})

    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\nx: " + b"a" * 200_000 + b"\r\n\r\n",
        b"\x16\x03\x01 no HTTP at all\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
    ],
)
def test_hostile_headers_cost_their_connection_alone(server: ApiServer, raw: bytes) -> None:
    with socket.create_connection((server.host, server.port), timeout=30) as client:
        try:
            client.sendall(raw)
            assert client.recv(100).startswith(b"HTTP/1.1 4")
        except ConnectionError:
            pass  # it was cut before all was sent

    assert server.call("GET", "/health")[0] == 200


FIELDS = sorted({*ChatCompletion.model_fields, *TextCompletion.model_fields})
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, min_size=1, max_size=3))
def test_no_value_of_any_field_is_a_fault_of_the_server(
    server: ApiServer, path: str, changes: dict[str, Any]
) -> None:
    body = {**(HELLO if path == CHAT else {"max_tokens": 2}), **changes}
    if isinstance(body.get("max_tokens"), int):
        body["max_tokens"] = min(body["max_tokens"], 4)

    status, answer, _ = server.call("POST", path, json.dumps(body).encode())

    assert status < 500, answer
    assert status == 200 or answer["error"]["message"]


def test_mutated_bytes_are_no_fault_of_the_server(server: ApiServer) -> None:
    rng = random.Random(3)
    good = json.dumps({**HELLO, "stop": ["a", "b"], "seed": 1, "top_p": 0.5}).encode()
    for _ in range(200):
        body = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)

        assert server.call("POST", CHAT, bytes(body))[0] in (200, 400, 404)


def test_sigterm_lets_a_running_stream_end(model: Path, tmp_path: Path) -> None:
    with _serve(model, tmp_path) as server:
        stream = server.stream(
            CHAT, {**HELLO, "stream": True, "max_tokens": 500, "ignore_eos": True}
        )
        server.process.terminate()

        assert stream.read().endswith(b"data: [DONE]\n\n")
        assert server.process.wait(timeout=30) == 0


def test_a_client_that_brings_no_headers_is_cut(server: ApiServer) -> None:
    with socket.create_connection((server.host, server.port), timeout=60) as client:
        client.sendall(b"GET /health HT")
        began_s = time.monotonic()

        assert client.recv(100) == b""
        assert time.monotonic() - began_s > 5, "it has some time"


def test_tls_and_a_page_that_may_call(model: Path, tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
         "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    options = ("--tls-cert", str(cert), "--tls-key", str(key), "--allow-origin", "https://a.page")
    with _serve(model, tmp_path, *options) as server:
        trusting = ssl.create_default_context(cafile=str(cert))
        client = http.client.HTTPSConnection("localhost", server.port, context=trusting, timeout=60)
        client.request("GET", "/v1/models", headers={"origin": "https://a.page"})
        answer = client.getresponse()
        assert answer.status == 200
        assert answer.getheader("access-control-allow-origin") == "https://a.page"
        client.close()
