"""Keys, limits and the page about the API."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.gateway.access import ANONYMOUS, Keys, Limits, key_line, new_key
from services.gateway.backend import Backend
from services.gateway.error_response import error_response
from services.gateway.gateway import (
    PROBLEM_GRACE_S,
    PROBLEM_PATIENCE_S,
    Gateway,
    GatewayLimits,
)
from services.gateway.server import ServerOptions, check_options, is_loopback
from shared.api.errors import ApiError, api_error
from shared.broker.memory import MemoryBroker, MemoryHub
from shared.errors import ConfigError, Overloaded, StoreDamaged, StoreUnavailable
from shared.producer import Producer
from shared.store.completions import Completions
from shared.store.connection import connect
from shared.store.ledger import Ledger
from shared.text.tokenizer import Tokenizer
from tests.gguf_files import tiny_vocabulary
from tests.rig import FakeClock


def test_a_key_file_holds_digests_and_lets_their_keys_in(tmp_path: Path) -> None:
    alice, bob = new_key(), new_key()
    file = tmp_path / "keys"
    file.write_text(f"{key_line('alice', alice)}\n\n# a comment\n{key_line('bob', bob)}\n")

    keys = Keys.read(None, file)

    assert alice not in file.read_text()
    assert keys.name_of(f"Bearer {alice}") == "alice"
    assert keys.name_of(f"bearer {bob}") == "bob"
    for wrong in (None, "", alice, f"Basic {alice}", f"Bearer {alice}x", "Bearer  "):
        with pytest.raises(ApiError) as refused:
            keys.name_of(wrong)
        assert refused.value.status == 401


def test_without_keys_everybody_is_anonymous() -> None:
    assert not Keys.read("", None)
    assert Keys().name_of(None) == ANONYMOUS


@pytest.mark.parametrize("line", ["alice plain-key-in-clear-text", "alice sha256:12", "\x00"])
def test_a_key_in_clear_is_refused_and_not_told(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys"
    file.write_text(line)

    with pytest.raises(ConfigError, match="line 1") as refused:
        Keys.read(None, file)

    assert "plain-key" not in str(refused.value)


def test_short_keys_and_odd_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="CELLPIPE_API_KEYS: key 2"):
        Keys.read(f"{new_key()},short", None)
    with pytest.raises(ConfigError, match="name of a key"):
        key_line("a name", new_key())


def test_running_answers_are_bounded_for_each_key() -> None:
    limits = Limits(max_running=3, max_per_minute=None)
    limits.enter("a", 2)

    with pytest.raises(ApiError) as refused:
        limits.enter("a", 2)
    limits.enter("b", 3)
    limits.leave("a", 2)
    limits.enter("a", 3)

    assert (refused.value.status, refused.value.code) == (429, "too_many_running")


def test_requests_a_minute_are_bounded_and_come_back_with_time() -> None:
    clock = FakeClock()
    limits = Limits(max_running=100, max_per_minute=6, clock=clock)
    for _ in range(6):
        limits.enter("a", 1)

    with pytest.raises(ApiError) as refused:
        limits.enter("a", 1)
    clock.now_s += 10
    limits.enter("a", 1)

    assert refused.value.retry_after_s == pytest.approx(10)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True),
        ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("localhost.example", False),
    ],
)  # fmt: skip
def test_only_loopback_needs_no_key(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    check_options(ServerOptions(host=host, allow_anonymous=True), Keys())
    check_options(ServerOptions(host=host), Keys.read(new_key(), None))
    if loopback:
        check_options(ServerOptions(host=host), Keys())
    else:
        with pytest.raises(ConfigError, match="--host"):
            check_options(ServerOptions(host=host), Keys())


def test_half_of_a_tls_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="go together"):
        check_options(ServerOptions(tls_cert=tmp_path), Keys())


def test_a_pipeline_that_died_is_told_after_a_while() -> None:
    clock = FakeClock()

    async def ask() -> None:
        gateway = Gateway(_backend("no scheduler runs"), GatewayLimits(), clock=clock)
        await gateway.check()
        clock.now_s += PROBLEM_GRACE_S + 2
        with pytest.raises(ApiError) as refused:
            await gateway.check()
        assert (refused.value.status, refused.value.message) == (503, "no scheduler runs")
        await gateway.check(is_running=True)
        clock.now_s += PROBLEM_PATIENCE_S
        with pytest.raises(ApiError, match="no scheduler runs"):
            await gateway.check(is_running=True)

    asyncio.run(ask())


def _backend(problem: str) -> Backend:
    stores = connect("memory://")
    ledger = Ledger(stores.meta)
    return Backend(
        producer=Producer(MemoryBroker(MemoryHub()), ledger),
        ledger=ledger,
        completions=Completions(stores.meta),
        tokenizer=Tokenizer.from_vocabulary(tiny_vocabulary()),
        chat_template=None,
        model_id="m@0",
        vocab_size=10,
        max_positions=10,
        problem=lambda: problem,
        gather_s=0.0,
    )


def test_a_full_cluster_says_when_to_come_again_and_no_error_names_a_host() -> None:
    full = error_response(api_error(Overloaded("the queue is full", retry_after_s=4.2)))
    gone = api_error(StoreUnavailable("no connection to Redis at secret.host:6379"))
    bug = api_error(StoreDamaged("Redis at secret.host:6379 holds a damaged value"))

    assert (full.status_code, full.headers["retry-after"]) == (429, "5")
    assert (gone.status, bug.status) == (503, 500)
    assert gone.retry_after_s is not None
    assert "secret" not in gone.message + bug.message
