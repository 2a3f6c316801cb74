"""Moments on disk beside a GPU: the bits of the same run in memory, with updates at the end of a step and on arrival."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import batch, build, same_bits, state_of

import megacompile

pytestmark = pytest.mark.gpu


def trained(whole: bool, options: dict[str, Any], **stream: Any) -> dict[str, torch.Tensor]:
    model = megacompile.stream(build(bf16=True), device="cuda", compile=False, resident_state=(), visiting_state=(), **stream)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, eps=1e-4, **options)
    for seed in range(10):
        if whole:
            model.megacompile.train_step(batch(seed, rows=6), optimizer)
            continue
        model(**batch(seed, rows=6)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = state_of(model, optimizer)
    assert (model.megacompile.stats["disk_bytes_written"] > 0) == ("disk" in stream)
    model.megacompile.close()
    return found


@pytest.mark.parametrize("whole", [False, True], ids=["loop", "train_step"])
@pytest.mark.parametrize("options", [
    {"max_grad_norm": 1.0}, {"max_grad_norm": 1.0, "state_dtype": "bfloat16"}, {"max_grad_norm": 1.0, "state_dtype": "8bit"},
    {"overlap": "backward"}], ids=str)
def test_ten_steps_have_the_bits_of_ten_steps_in_memory(whole: bool, options: dict[str, Any], tmp_path: Path) -> None:
    expected = trained(whole, options)
    for tiles in ("all", ("model.layers.0", "epilogue")):
        assert same_bits(trained(whole, options, disk=tmp_path, disk_state=tiles), expected)
    if "overlap" not in options:
        assert same_bits(trained(whole, options, disk=tmp_path, disk_state="all", deferred_moments=True), expected)
