"""Muon on CUDA: the same bits wherever matrices are updated, and the steps of `torch.optim.Muon`."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from test_cuda import batch, build

import megacompile

pytestmark = pytest.mark.gpu
PLANS: dict[str, dict[str, Any]] = {
    "visiting": {"resident_state": ()}, "resident": {"resident": "all", "resident_state": "all"}}


def trained(stored: str, **options: Any) -> dict[str, torch.Tensor]:
    model = megacompile.stream(build(), device="cuda", compile=False, micro_batch_size=5, **options)
    optimizer = megacompile.Muon(model.parameters(), lr=1e-3, max_grad_norm=1.0, state_dtype=stored)
    for step in range(3):
        model(**batch(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found |= {f"{index} {key}": value.clone() for index, state in optimizer.state_dict()["state"].items()
              for key, value in state.items() if isinstance(value, torch.Tensor)}
    model.megacompile.close()
    return found


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "8bit"])
def test_matrices_that_stay_and_that_visit_have_the_same_bits(stored: str) -> None:
    first, second = (trained(stored, **options) for options in PLANS.values())
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_a_step_is_that_of_torch(options: dict[str, Any]) -> None:
    model = megacompile.stream(build(torch.float32), device="cuda", compile=False, **options)
    plain = build(torch.float32).cuda()
    ours = megacompile.Muon(model.parameters(), lr=1e-2)
    model(**batch(0)).loss.backward()
    matrices = [name for name, p in plain.named_parameters() if ".layers." in name and p.dim() == 2]
    for name in matrices:
        plain.get_parameter(name).grad = model.get_parameter(name).grad.cuda()
    theirs = torch.optim.Muon([plain.get_parameter(name) for name in matrices], lr=1e-2, adjust_lr_fn="match_rms_adamw")
    theirs.step()
    ours.step()
    model.megacompile.synchronize()
    for name in matrices:
        assert torch.allclose(model.get_parameter(name), plain.get_parameter(name).cpu(), rtol=0, atol=1e-5), name
    model.megacompile.close()
