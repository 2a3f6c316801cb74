"""TRL's trainers in two processes, against one process with batches twice as large."""
from __future__ import annotations

import math
from pathlib import Path

import pytest
from processes import start

pytest.importorskip("datasets")
pytest.importorskip("trl")

RUN = Path(__file__).parents[1] / "support" / "trl_run.py"


@pytest.mark.nightly(held_by="tests/system/test_ranks_losses.py::test_processes_train_the_mean_of_their_losses")
@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_two_ranks_have_the_curves_of_one(tmp_path: Path, name: str) -> None:
    alone = start(RUN, 1, tmp_path / "one", [name])
    ranks = start(RUN, 2, tmp_path / "two", [name]).results()
    expected = alone.results()[0][name]
    assert len(expected["log"]) > 3
    for found in (rank[name] for rank in ranks):
        assert found["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        for now, then in zip(found["log"], expected["log"], strict=True):
            now, then = ({key: value for key, value in each.items() if key != "total_flos"}  # it counts padding
                         for each in (now, then))
            assert now == pytest.approx(then, abs=2e-4)


@pytest.mark.nightly(held_by="tests/system/test_ranks_losses.py::test_processes_train_the_mean_of_their_losses")
def test_ranks_that_sample_train_the_same_model(tmp_path: Path) -> None:
    """GRPO: what is sampled depends on each process's random numbers."""
    one, other = (rank["grpo"] for rank in start(RUN, 2, tmp_path, ["grpo"]).results())
    assert one["norm"] == other["norm"] and all(math.isfinite(entry["loss"]) for entry in one["log"] if "loss" in entry)
