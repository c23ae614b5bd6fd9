"""What `cellpipe status` draws of a cluster."""

from __future__ import annotations

import pytest

from services.cli.overview import GroupState, Overview, print_overview


def test_the_name_of_a_layout_is_one_line_however_long(capsys: pytest.CaptureFixture[str]) -> None:
    model_id = f"{'a-model-of-many-words-' * 9}@0123456789ab"
    overview = Overview(model_id=model_id, layout_id="even3", groups=[GroupState(0, 0, 9, 1, 1, 0)])

    print_overview(overview)

    assert f"{model_id}, layout even3" in capsys.readouterr().out.splitlines()
