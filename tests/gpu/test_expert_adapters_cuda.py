"""Adapters of fused experts on a GPU, over bf16 and codes: compiled grouped products with factors, against PEFT in fp32."""
from __future__ import annotations

import copy

import pytest

pytest.importorskip("peft")

from test_expert_adapters import adapted, tokens

import megacompile

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("stored", "rank"), [(None, 3), (None, 8), ("nf4", 8), ("int8", 8), ("mxfp4", 8)])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_experts_are_as_near_to_fp32_as_peft_s(family: str, stored: str | None, rank: int) -> None:
    native = adapted(family, bf16=True, r=rank, target_modules=["q_proj"])
    native = native if stored is None else megacompile.quantize(native, stored)
    model = megacompile.stream(copy.deepcopy(native), device="cuda")
    native = megacompile.dequantize(native)
    exact = copy.deepcopy(native).float()
    native.cuda()
    gradients = []
    for each, device in ((model, "cpu"), (native, "cuda"), (exact, "cpu")):
        each(**{name: tensor.to(device) for name, tensor in tokens(exact, rows=4, length=32).items()}).loss.backward()
        gradients.append({name: p.grad.float().cpu() for name, p in each.named_parameters() if p.grad is not None})
    ours, theirs = (sum(float((found[name] - gradients[2][name]).norm()) for name in found) for found in gradients[:2])
    assert gradients[0].keys() == gradients[2].keys() and ours <= 1.5 * theirs
    model.megacompile.close()
