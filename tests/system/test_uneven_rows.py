"""Trainer over rows of random lengths: few kernels, one plan, and a bit-exact resume."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("accelerate")

import tiny_models
import trained

import megacompile
from megacompile.inputs.packed_layout import Layout
from megacompile.inputs.repacking import lay_out as real_lay_out
from megacompile.trainer import Trainer

LENGTH = 64
LOGGED = ("loss", "grad_norm", "learning_rate", "padding_share")
CHANGES: dict[str, Any] = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2)


def rows(count: int) -> list[dict[str, Tensor]]:
    """Each row has 3 to 60 tokens that count upwards."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(count).log_normal_(3.0, 0.8, generator=generator).clamp(3, 60).long().tolist()
    return [{"input_ids": (torch.arange(length) + number) % tiny_models.VOCABULARY} for number, length in enumerate(lengths)]


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Sizes of batches once they are packed, as they come."""
    found: list[tuple[int, ...]] = []

    def lay_out(*arguments: Any) -> Layout:
        layout = real_lay_out(*arguments)
        found.append(tuple(layout.source.shape))
        return layout

    monkeypatch.setattr("megacompile.inputs.repacking.lay_out", lay_out)
    return found


@pytest.fixture
def streamed() -> Iterator[Any]:
    """A model whose packed rows have 64 tokens."""
    model = megacompile.stream(tiny_models.build(), device="cpu", repack=LENGTH)
    yield model
    model.megacompile.close()


def test_thirty_steps_of_random_lengths_need_four_sizes_of_micro_batches_and_one_plan(
        streamed: Any, packed: list[tuple[int, ...]], tmp_path: Path) -> None:
    trained.run(Trainer, tmp_path, streamed, given=dict(train_dataset=rows(120)), max_steps=30, **CHANGES)
    stats = streamed.megacompile.stats
    assert stats["steps"] == 30 and len(packed) == 30 and {length for _, length in packed} == {LENGTH}
    assert len({*packed}) > 3, "steps were hardly uneven"
    assert stats["plan_searches"] + stats["plans_from_cache"] == 1 and stats["micro_batch_shapes"] <= 4
    assert stats["packing_efficiency"] > 0.7


def test_a_run_that_is_resumed_within_an_epoch_has_the_bits_of_one_that_was_not(
        packed: list[tuple[int, ...]], tmp_path: Path) -> None:
    """By another process: no plan is known, and the first step has another number of rows."""
    states, curves, sizes = [], [], []
    for resume in (None, str(tmp_path / "checkpoint-5")):
        model = megacompile.stream(tiny_models.build(), device="cpu", repack=LENGTH)
        packed.clear()
        run = trained.run(Trainer, tmp_path, model, resume=resume, given=dict(train_dataset=rows(60)), max_steps=12,
                          save_strategy="steps", save_steps=5, **CHANGES)
        optimizer = run.optimizer.optimizer
        states.append([value.clone() for p in model.parameters()
                       for value in (optimizer.master(p), *(optimizer.state[p][key] for key in ("exp_avg", "exp_avg_sq")))])
        curves.append(trained.curve(run, *LOGGED))
        sizes.append([*packed])
        model.megacompile.close()
    assert sizes[0][5:] == sizes[1] and sizes[0][0] != sizes[1][0]
    assert curves[0].shape == (12, len(LOGGED)) and torch.equal(*curves)
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
