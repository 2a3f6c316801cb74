"""The benchmark of loading and saving: what its row contains."""
from __future__ import annotations

from pathlib import Path

import pytest
import rows
import storage


@pytest.mark.nightly(held_by=("tests/system/test_bench.py::test_a_row_says_what_ran_how_fast_and_how_busy_its_lanes_were",
                              "tests/system/test_checkpoint_files.py::test_a_full_disk_costs_one_save_and_nothing_else"))
def test_a_row_says_how_fast_a_model_is_read_and_what_a_save_costs_the_steps_beside_it(tmp_path: Path) -> None:
    given = storage.options().parse_args(
        ["--shape", "tiny", "--layers", "2", "--batch", "2", "--length", "16", "--steps", "2", "--warm-up", "1", "--uncompiled",
         "--device", "cpu", "--save", "--folder", str(tmp_path)])
    row = rows.finished(storage.measure(given))
    assert "error" not in row
    assert len(row["times_s"]) == 2 and row["times_beside_s"] and len(row["losses"]) == 3 + len(row["times_beside_s"])
    assert 0 < row["capture_s"] < row["load_s"] and row["disk_s"] > 0
    assert row["save_returned_s"] < row["save_s"] and row["slow_down"] > 0
    assert not list(tmp_path.iterdir()), "it leaves nothing on the disk"


def test_the_folder_does_not_make_another_row() -> None:
    options = storage.options()
    assert rows.identifying(options, options.parse_args(["--folder", "a"])) == rows.identifying(options, options.parse_args([]))
