"""The step queues of a layout: of one type, which is part of their names."""

from __future__ import annotations

import json

import pytest

from shared.errors import ModelError
from shared.topology import Layout, QueueType, Wire, even_layout, group_queues, inbox_spec


def test_the_queue_type_is_part_of_the_name_for_it_cannot_be_changed() -> None:
    classic = even_layout("m@1", 4, 2)
    quorum = even_layout("m@1", 4, 2, QueueType.QUORUM)

    names = {spec.name for spec in group_queues(classic)}

    assert names.isdisjoint(spec.name for spec in group_queues(quorum))
    assert {spec.queue_type for spec in group_queues(quorum)} == {QueueType.QUORUM}
    assert inbox_spec(quorum, "w-1", 0).queue_type is QueueType.QUORUM
    assert inbox_spec(quorum, "w-1", 0).dead_letter_queue == group_queues(quorum)[0].name


def test_a_quorum_queue_counts_no_deliveries_of_its_own() -> None:
    layout = even_layout("m@1", 4, 2, QueueType.QUORUM)

    limits = [spec.delivery_limit for spec in (*group_queues(layout), inbox_spec(layout, "w", 1))]

    assert min(limit or 0 for limit in limits) >= 1_000_000


def test_a_layout_survives_its_json_form_and_an_older_one_is_classic_and_f32() -> None:
    layout = even_layout("m@1", 4, 2, QueueType.QUORUM, Wire.I8)
    older = {"layout_id": "even1", "model_id": "m@1", "bounds": [[0, 4]]}

    assert Layout.from_json(layout.to_json()) == layout
    assert Layout.from_json(json.dumps(older)) == even_layout("m@1", 4, 1)


def test_a_layouts_id_names_what_is_not_the_default() -> None:
    assert even_layout("m@1", 4, 2).layout_id == "even2"
    assert even_layout("m@1", 4, 2, wire=Wire.F16).layout_id == "even2-f16"
    assert even_layout("m@1", 4, 2, QueueType.QUORUM, Wire.I8).layout_id == "even2-quorum-i8"


@pytest.mark.parametrize("changes", [{"queue_type": "stream"}, {"wire": "f64"}, {"wire": None}])
def test_an_unknown_queue_type_or_wire_is_refused(changes: dict[str, str | None]) -> None:
    raw = json.loads(even_layout("m@1", 4, 2).to_json()) | changes

    with pytest.raises(ModelError, match="layout"):
        Layout.from_json(json.dumps(raw))
