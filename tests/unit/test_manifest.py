"""A manifest or layout that was changed in any place is refused by name, not computed with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import manifest as manifest_module
from shared.errors import ModelError
from shared.manifest import Manifest
from shared.topology import Layout, check_layout, even_layout
from tests.tiny_model import tiny_model

MANIFEST = tiny_model().manifest
FREE = ("schema", "source", "source_sha256")  # says where it came from; no token depends on it


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in items:
        yield (*path, key)
        if isinstance(child, dict | list):
            yield from places(child, (*path, key))


PLACES = [path for path in places(json.loads(MANIFEST.to_json())) if path[0] not in FREE]


def test_a_manifest_that_was_not_changed_is_what_its_id_says() -> None:
    got = Manifest.from_json(MANIFEST.to_json()).checked()

    assert got.to_json() == MANIFEST.to_json()


@given(
    st.sampled_from(PLACES),
    st.sampled_from([None, -1, 0, 1, 31, 2**31, 2**63, 1.5, True, "x", "", [], {}, ...]),
)
def test_a_manifest_that_was_changed_anywhere_is_refused(
    path: tuple[str | int, ...], value: object
) -> None:
    raw = json.loads(MANIFEST.to_json())
    place = raw
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value

    try:
        got = Manifest.from_json(json.dumps(raw)).checked()
    except ModelError:
        return

    assert got.to_json() == MANIFEST.to_json()  # the same value, or one left out that is a default


def test_workers_that_compute_other_numbers_do_not_serve_one_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(manifest_module, "ARITHMETIC_VERSION", 10_000)

    with pytest.raises(ModelError, match="other numbers"):
        MANIFEST.checked()


@pytest.mark.parametrize(
    "bounds",
    [[], [[0, 2], [3, 4]], [[0, 2], [1, 4]], [[1, 4]], [[0, 0], [0, 4]], [[0, 3], [3, 2]], [[0]],
     [["a", 4]], [[0, 1e999]], 7, None],
)  # fmt: skip
def test_a_layout_with_a_hole_or_an_overlap_is_refused(bounds: Any) -> None:
    text = json.dumps({"layout_id": "x", "model_id": "m", "bounds": bounds})

    with pytest.raises(ModelError):
        Layout.from_json(text)


def test_a_layout_of_other_layers_is_refused() -> None:
    num_layers = MANIFEST.config["num_hidden_layers"]
    check_layout(even_layout(MANIFEST.model_id, num_layers, 2), MANIFEST)

    with pytest.raises(ModelError, match="4 layers"):
        check_layout(even_layout(MANIFEST.model_id, num_layers - 1, 2), MANIFEST)
    with pytest.raises(ModelError, match="not one of model"):
        check_layout(even_layout("other@0", num_layers, 2), MANIFEST)
