"""What goes wrong while several ranks save, and what one of them changes that all share."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import saving_jobs
from processes import start

SCRIPT = Path(saving_jobs.__file__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saving")


@pytest.fixture(scope="module")
def two(folder: Path) -> Callable[[str], list[Any]]:
    """What each of two ranks has found, by name."""
    results = start(SCRIPT, 2, folder / "two", [str(folder), "beside"]).results()
    return lambda name: [each["beside"][name] for each in results]


@pytest.mark.parametrize("copies", [0, None])
def test_training_changes_no_tile_before_the_rank_that_writes_it_has_read_it(two: Callable[[str], list[Any]],
                                                                             copies: int | None) -> None:
    """One rank's writer is slow, without and with memory for copies."""
    assert two(f"copies {copies}: restored") == two(f"copies {copies}: same bits") == [True, True]


def test_a_rank_that_cannot_write_fails_the_save_on_all_with_its_name(two: Callable[[str], list[Any]]) -> None:
    one, other = two("full")
    assert one == other and "(rank 1: No space left on device)" in one and "free some disk space" in one
    assert two("full: left") == [[], []]


def test_a_write_to_a_tile_that_another_rank_has_not_saved_yet_fails_the_save(two: Callable[[str], list[Any]]) -> None:
    one, other = two("touched")
    assert one == other and "rank 0: the weights of" in one and "were written from outside before they were saved" in one


def test_a_damaged_file_fails_the_load_on_all_before_anything_changes(two: Callable[[str], list[Any]]) -> None:
    for found in two("damaged"):
        assert "tensors-00001.safetensors is damaged" in found and "use another checkpoint" in found
    assert sum("has failed in load_checkpoint" in found and "make the call again on every rank" in found
               for found in two("damaged")) == 1  # each file is read by one rank
    assert two("damaged: unchanged") == [True, True]


@pytest.mark.parametrize("change", ["halved", "replaced"])
def test_gradients_that_ranks_change_are_refused(two: Callable[[str], list[Any]], change: str) -> None:
    for found in two(change):
        assert "the gradient of layers.1.1.weight was changed" in found and "max_grad_norm" in found


def test_gradients_that_ranks_set_to_zero_are_added_to_and_no_rank_reads_the_zeros_of_another(
        two: Callable[[str], list[Any]]) -> None:
    assert two("zeros") == [True, True]


@pytest.mark.parametrize("difference", ["other options, loop", "other options, whole step", "other parameters"])
def test_ranks_that_would_update_differently_are_refused(two: Callable[[str], list[Any]], difference: str) -> None:
    """Each updates a shard of every tile. Nothing has changed, and the next step trains."""
    for found in two(difference):
        assert found.startswith("RankError: rank 1 updates other parameters than rank 0, or with other options")


def test_a_save_is_completed_although_the_model_is_closed(folder: Path, two: Callable[[str], list[Any]]) -> None:
    assert two("closed") == [["000001-step-6"]] * 2
    assert "Exception in thread" not in "".join((folder / "two" / f"{rank}.txt").read_text() for rank in range(2))


def test_a_save_is_completed_although_a_rank_fails_in_a_step(folder: Path) -> None:
    for found in start(SCRIPT, 2, folder / "failing step", [str(folder), "fails"]).results():
        assert found["fails"]["saving"] and "power cut" in found["fails"]["step"]
        assert found["fails"]["save"] == "" and found["fails"]["left"] == ["000001-step-2"]


def test_a_rank_that_ends_while_it_saves_ends_the_others_and_leaves_nothing(folder: Path) -> None:
    job = start(SCRIPT, 2, folder / "ending", [str(folder), "ends"])
    assert job.wait() == [0, 0], job.errors(0)
    found = json.loads((job.folder / "0.json").read_text())["ends"]
    assert found["saving"] and found["left"] == []
    assert found["save"].startswith("RankError: rank 1 (process") and "has ended" in found["save"]
