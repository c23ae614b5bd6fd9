"""Private servers that are interrupted while they start leave nothing behind."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from shared.local_cluster import servers
from shared.local_cluster.servers import PrivateServers


def test_what_has_started_is_ended_when_the_rest_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Path] = []

    def up(folder: Path, **_: object) -> dict[str, object]:
        if started:
            raise KeyboardInterrupt
        started.append(folder)
        return {"amqp_url": "amqp://", "redis_url": "redis://"}

    def down(folder: Path, **_: object) -> None:
        if folder in started:
            started.remove(folder)

    script = SimpleNamespace(
        ServersError=RuntimeError, require_software=lambda *_: None, up=up, down=down
    )
    monkeypatch.setattr(servers, "_load_script", lambda: script)

    with pytest.raises(KeyboardInterrupt):
        PrivateServers(tmp_path)

    assert started == []
