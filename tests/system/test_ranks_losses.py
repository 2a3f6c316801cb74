"""Losses and gradients of two processes, with every trainer and loss: those of two processes with DistributedDataParallel."""
from __future__ import annotations

from pathlib import Path

import pytest
from processes import start

pytest.importorskip("datasets")
pytest.importorskip("trl")

RUN = Path(__file__).parents[1] / "support" / "loss_table_run.py"
#: `own` to `router`: the model's own loss, with and without whole steps; of a function and of a method that users write; with a
#: router loss. `dispatched` to `unseeded`: how processes get their rows.
LOSSES = {
    "trainer": ("own", "own@1", "separate", "loss_func", "smoothed", "of_logits", "of_models", "uncounted", "router",
                "router@1", "dispatched", "split", "dispatched_split", "unseeded"),
    "sft": ("nll", "dft", "smoothed", "loss_func", "packed", "padding_free", "router", "router@1"),
    "dpo": ("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
            "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm", "sigmoid+sft"),
    "grpo": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"),
    "rloo": ("rloo",),
    "kto": ("kto", "apo_zero_unpaired"),
    "online_dpo": ("sigmoid", "ipo"),
}


def assert_as_native(folder: Path, cases: list[str]) -> None:
    """The logged losses and norms of two steps are those of trainers that do not stream."""
    (results, _) = start(RUN, 2, folder, cases).results()
    for case in cases:
        expected, found = results[case]
        assert len(expected) == 2 and all(norm > 0.01 for _, norm in expected), f"{case}: nothing was trained that could differ"
        for now, then in zip(found, expected, strict=True):
            assert now == pytest.approx(then, rel=1e-4, abs=1e-5), case


def test_processes_train_the_mean_of_their_losses(tmp_path: Path) -> None:
    """Where TRL computes the loss from outputs, and where each process divides the model's loss by its own tokens."""
    assert_as_native(tmp_path, ["sft/dft/uneven/all", "trainer/of_models/uneven/each"])


@pytest.mark.nightly(held_by="tests/system/test_ranks_losses.py::test_processes_train_the_mean_of_their_losses")
@pytest.mark.parametrize(("trainer", "loss"), [(trainer, loss) for trainer, losses in LOSSES.items() for loss in losses])
def test_every_trainer_and_loss_trains_as_with_data_parallel(trainer: str, loss: str, tmp_path: Path) -> None:
    assert_as_native(tmp_path, [f"{trainer}/{loss}/{rows}/{counted}" for rows in ("even", "uneven")
                                for counted in ("all", "each")])
