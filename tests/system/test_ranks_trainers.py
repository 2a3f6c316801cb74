"""transformers' Trainer in two processes, against one process with batches twice as large."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine
import pytest
import tiny_models
import trained
import trainer_run
from processes import start

from megacompile.errors import UnsupportedError
from megacompile.trainer import Trainer

HERE = Path(__file__).resolve().parents[1] / "support"


def curve(history: list[dict[str, Any]], *keys: str) -> list[float]:
    return [entry[key] for entry in history for key in keys if key in entry]


def assert_parity(folder: Path, *cases: str, hosts: int = 1) -> list[dict[str, Any]]:
    """Losses, norms, weights and evaluations are those of one process, and every process has the same."""
    ranks = start(HERE / "trainer_run.py", 2, folder, cases, hosts).results()
    expected = trainer_run.all_runs(cases)
    for case, wanted in expected.items():
        assert len(wanted["weights"]) > 10
        for found in (each[case] for each in ranks):
            assert found["steps"] == wanted["steps"] and len(found["history"]) == len(wanted["history"])
            for keys, tolerance in (("loss", "eval_loss"), 1e-5), (("grad_norm",), 1e-5), (("eval_accuracy", "eval_rows"), 0):
                assert curve(found["history"], *keys) == pytest.approx(curve(wanted["history"], *keys), abs=tolerance), case
            for name, weight in wanted["weights"].items():
                assert found["weights"][name] == pytest.approx(weight, abs=2e-4), f"{case}: {name}"
    return ranks


@pytest.mark.parametrize("cases", [
    ("tail", "resumed"), pytest.param(("whole", "separate", "tail", "resumed"), marks=pytest.mark.nightly)], ids=len)
def test_two_processes_train_as_one_with_twice_the_rows(tmp_path: Path, cases: tuple[str, ...]) -> None:
    """Accumulated and clipped: whole steps; separate batches; an epoch whose last batch has too few rows for both; and a
    checkpoint that is resumed, of whole steps too."""
    (found, _) = assert_parity(tmp_path, *cases)
    assert curve(found["resumed"]["history"], "grad_norm")[-1] > trained.ARGUMENTS["max_grad_norm"], "nothing was clipped"


@pytest.mark.nightly(held_by="tests/system/test_ranks_trainers.py::test_two_processes_train_as_one_with_twice_the_rows")
def test_losses_of_outputs_and_evaluations_are_those_of_all_rows(tmp_path: Path) -> None:
    found = assert_parity(tmp_path, "outputs", "uncounted", "evaluation")[0]["evaluation"]["history"]
    assert curve(found, "eval_rows") == [8, 8, 8], "an evaluation has each row once"


@pytest.mark.nightly(held_by="tests/system/test_ranks_trainers.py::test_two_processes_train_as_one_with_twice_the_rows")
def test_processes_on_two_hosts_train_as_one_with_twice_the_rows(tmp_path: Path) -> None:
    assert_parity(tmp_path, "whole", "separate", "resumed", hosts=2)


@pytest.fixture
def model() -> Iterator[Any]:
    """A streamed model that trains alone."""
    shared = tiny_models.Shared()
    yield shared.model
    shared.close()


def test_numbers_of_processes_that_differ_are_refused(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = trained.arguments(tmp_path)
    monkeypatch.setattr(type(arguments), "world_size", 2)
    with pytest.raises(UnsupportedError, match=r"another number of processes .* leave distributed=False out"):
        Trainer(model=model, args=arguments)
    monkeypatch.setattr(type(engine.rank_group(model)), "size", 2)
    arguments.accelerator_config.even_batches = False
    with pytest.raises(UnsupportedError, match=r"fewer batches, .* dataloader_drop_last=True"):
        Trainer(model=model, args=arguments)
