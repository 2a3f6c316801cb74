"""Experts as they are traced, against transformers' own function for them: outputs and gradients."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from test_expert_adapters import base
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from megacompile.frontend.ops.experts import GATHER, SPREAD, experts_forward, traced_experts

FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3"]  # gated; with biases, transposed; scores of another sum


def _experts(family: str) -> Any:
    return next(module for module in base(family).modules() if hasattr(module, "is_transposed"))


def _routed(experts: Any, tokens: int, chosen: int, bound: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, numbers of experts below `bound`, and their weights."""
    hidden = next(p for p in experts.parameters() if p.dim() == 3).shape[1 if experts.is_transposed else 2]
    numbers = torch.stack([torch.randperm(bound)[:chosen] for _ in range(tokens)])
    return (torch.randn(tokens, hidden, requires_grad=True), numbers,
            torch.rand(tokens, chosen, requires_grad=True))


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_transformers(family: str, elsewhere: bool) -> None:
    experts = _experts(family)
    if elsewhere:  # number `num_experts` stands for an expert of another piece
        experts._is_expert_parallel = True
    given = _routed(experts, 13, 3, experts.num_experts + elsewhere)
    inputs = [given[0], given[2], *experts.parameters()]
    results = []
    for run in (experts_forward, grouped_mm_experts_forward):
        out = run(experts, *given)
        results.append((out, *torch.autograd.grad(out.sin().sum(), inputs)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_rows_of_experts_elsewhere_which_no_product_writes_reach_nothing() -> None:
    experts = _experts("qwen3_moe").bfloat16()
    experts._is_expert_parallel = True
    hidden, numbers, weights = _routed(experts, 13, 3, experts.num_experts + 1)
    given = hidden.bfloat16().detach().requires_grad_(), numbers, weights.bfloat16().detach().requires_grad_()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that is not written is NaN
    try:
        results = []
        for run in (experts_forward, grouped_mm_experts_forward):
            out = run(experts, *given)
            results.append((out, *torch.autograd.grad(out.float().sin().sum(), [given[0], given[2], *experts.parameters()])))
    finally:
        torch.use_deterministic_algorithms(before)
    for ours, theirs in zip(*results, strict=True):
        assert ours.isfinite().all()
        assert float((ours - theirs).float().norm()) <= 0.03 * float(theirs.float().norm())


@pytest.mark.parametrize("op", [SPREAD, GATHER])
def test_each_op_is_the_gradient_of_the_other(op: Any) -> None:
    order = torch.randperm(12)
    rows = torch.randn(4 if op is SPREAD else 12, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda each: op(each, order, order.argsort(), 3), rows)


def test_a_function_of_the_users_for_grouped_experts_stays() -> None:
    def own(*_: Any) -> None: ...

    ALL_EXPERTS_FUNCTIONS["grouped_mm"] = own
    try:
        with traced_experts():
            assert ALL_EXPERTS_FUNCTIONS["grouped_mm"] is own
    finally:
        del ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    with traced_experts():
        assert ALL_EXPERTS_FUNCTIONS["grouped_mm"] is experts_forward
    assert ALL_EXPERTS_FUNCTIONS["grouped_mm"] is grouped_mm_experts_forward


@pytest.mark.parametrize("elsewhere", [False, True])
def test_gradients_of_biases_in_bfloat16_are_sums_that_are_rounded_once(elsewhere: bool) -> None:
    experts = _experts("gpt_oss")
    if elsewhere:
        experts._is_expert_parallel = True
    hidden, numbers, weights = _routed(experts, 200, 3, experts.num_experts + elsewhere)
    names = [name for name, _ in experts.named_parameters() if name.endswith("_bias")]
    assert names
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        each = experts.to(torch.bfloat16).to(dtype)  # the same values
        out = (experts_forward if dtype == torch.bfloat16 else grouped_mm_experts_forward)(
            each, hidden.bfloat16().to(dtype), numbers, weights.bfloat16().to(dtype))
        gradients.append(torch.autograd.grad(out.float().sum(), [each.get_parameter(name) for name in names]))
    for exact, ours in zip(*gradients, strict=True):
        assert float((ours.float() - exact).norm()) <= 0.01 * float(exact.norm())
