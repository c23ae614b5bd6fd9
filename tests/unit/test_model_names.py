"""A model has three names, and every door takes each of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.loader.catalog import CATALOG, find_entry
from services.loader.packed import open_model
from shared.api.ask import check_model
from shared.api.errors import ApiError
from shared.errors import ModelError
from shared.messages import Request
from shared.model_names import CATALOG_NAMES, is_called, short_name
from tests.rig import Rig
from tests.rig_model import GREEDY, prompt_of, rig_api_model

MODEL_ID = "smollm2-135m-instruct.q4_1@0123abcd"
NAMES = ["smollm2-135m", "smollm2-135m-instruct.q4_1", MODEL_ID]
OTHERS = [
    "",
    "smollm2",
    "smollm2-135m@0123abcd",
    "smollm2-135m-instruct.q4_1@",
    "smollm2-135m-instruct.q4_1@0123",
    "another",
]


def test_names_of_the_catalog_stand_for_the_files_it_names() -> None:
    assert {name: short_name(entry.filename) for name, entry in CATALOG.items()} == CATALOG_NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_called_by_each_of_its_names(name: str) -> None:
    assert is_called(MODEL_ID, name)
    check_model(name, replace(rig_api_model(), model_id=MODEL_ID))
    assert find_entry(name) is CATALOG["smollm2-135m"]


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_is_not_called_otherwise(name: str) -> None:
    assert not is_called(MODEL_ID, name)


def test_a_name_of_the_catalog_is_not_that_of_another_model() -> None:
    assert not is_called("tiny@0123abcd", "smollm2-135m")
    with pytest.raises(ApiError, match="'smollm2-135m' does not exist here"):
        check_model("smollm2-135m", rig_api_model())


def test_a_scheduler_takes_the_names_of_its_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(1)
    model_id = rig.layout.model_id
    monkeypatch.setitem(CATALOG_NAMES, "alias", model_id.partition("@")[0])
    rig.add_worker(0)
    rig.add_scheduler()
    asked = ["", "alias", model_id.partition("@")[0], model_id, "smollm2-135m"]
    for number, name in enumerate(asked):
        rig.submit(Request(f"r{number}", token_ids=prompt_of(5), sampling=GREEDY, model=name))
    rig.run_until_quiet()

    reasons = [rig.record(f"r{number}").error for number in range(len(asked))]

    assert reasons[:-1] == [""] * 4
    assert "'smollm2-135m' is not served here" in reasons[-1]


@pytest.mark.real_model
def test_another_digest_than_the_file_makes_is_refused(
    real_model_path: Path,
) -> None:
    folder = real_model_path.parent
    model_id = open_model("smollm2-135m", folder).manifest.model_id

    assert open_model(model_id, folder).manifest.model_id == model_id
    with pytest.raises(ModelError, match=f"the file of that name makes {model_id}"):
        open_model("smollm2-135m-instruct.q4_1@0123", folder)
