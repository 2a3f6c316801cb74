"""FLOPs and bytes of templates, against counts by hand and against PyTorch's own counter."""
from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import sympy
import tiny_models
import torch
from shapes import active_parameters
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

import megacompile
from megacompile import api
from megacompile.frontend.templates.template import BATCH, LENGTH, Template
from megacompile.planning.config import StreamConfig
from megacompile.predict.durations import Durations, Work, _attention, _operands, variant_work
from megacompile.predict.hardware import Hardware

HIDDEN, FFN, HEADS, GROUPS, WIDTH, VOCABULARY = 64, 160, 4, 2, 16, 1000
SIZES = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": 6,
         "num_attention_heads": HEADS, "num_key_value_heads": GROUPS}
TOKENS = BATCH * LENGTH
ATTENTION = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * GROUPS * WIDTH  # q, o; k, v
MLP = 3 * HIDDEN * FFN


@pytest.fixture(scope="module")
def templates() -> dict[str, Template]:
    captured, _ = api.analyse(tiny_models.build(**SIZES), StreamConfig.of(device="cpu"), "cpu", None, None)
    return captured.templates


def work(templates: dict[str, Template], template: str, variant: str, **options: Any) -> Work:
    return variant_work(templates[template], templates[template].variant(variant), **options)


def test_a_layers_products_are_two_flops_a_weight_and_token(templates: dict[str, Template]) -> None:
    weights = ATTENTION + MLP
    assert sympy.expand(work(templates, "decoder", "forward").gemm_flops - 2 * TOKENS * weights) == 0
    assert work(templates, "decoder", "forward_saving").gemm_flops == work(templates, "decoder", "forward").gemm_flops


def test_a_backward_takes_twice_the_products_weight_gradients_among_them(templates: dict[str, Template]) -> None:
    """They leave the graph as operands, and are multiplied by the runtime."""
    assert sympy.expand(work(templates, "decoder", "backward").gemm_flops - 4 * TOKENS * (ATTENTION + MLP)) == 0


def test_recomputing_leaves_out_the_last_product_of_the_forward(templates: dict[str, Template]) -> None:
    total = 6 * TOKENS * (ATTENTION + MLP) - 2 * TOKENS * HIDDEN * FFN
    assert sympy.expand(work(templates, "decoder", "recompute_backward").gemm_flops - total) == 0


def test_causal_attention_counts_half_of_the_square_and_its_backward_five_products_to_two(
        templates: dict[str, Template]) -> None:
    square = BATCH * HEADS * LENGTH ** 2 * WIDTH
    found = work(templates, "decoder", "recompute_backward")
    assert set(found.attention) == {("flash_cpu", "forward"), ("flash_cpu", "backward")}
    for way, products in (("forward", 2), ("backward", 5)):
        flops, per_key = found.attention["flash_cpu", way]
        assert sympy.expand(flops - products * square) == 0
        assert sympy.expand(per_key - 2 * flops / LENGTH) == 0
    assert set(work(templates, "decoder", "backward").attention) == {("flash_cpu", "backward")}


def test_attention_in_a_window_counts_the_pairs_that_it_lets_through() -> None:
    class Sizes:
        def shape(self, _: object) -> list[Any]:
            return [1, 1, LENGTH, 1]

    for length, window in ((7, 3), (3, 7), (8, 8), (16, 1)):
        found = _attention(None, None, window, Sizes()).flops.subs({LENGTH: length})  # type: ignore[arg-type]
        pairs = sum(min(window, position + 1) for position in range(length))
        # On the diagonal half a pair counts, as in the half square.
        assert found == 4 * (pairs - sympy.Rational(min(window, length), 2))


def test_the_loss_takes_three_products_with_the_head_and_an_evaluation_one(templates: dict[str, Template]) -> None:
    head = 2 * TOKENS * VOCABULARY * HIDDEN
    assert sympy.expand(work(templates, "epilogue", "loss").gemm_flops - 3 * head) == 0
    assert sympy.expand(work(templates, "epilogue", "evaluate").gemm_flops - head) == 0
    assert work(templates, "prologue", "forward").gemm_flops == 0


def test_products_are_those_that_pytorch_counts(templates: dict[str, Template]) -> None:
    """A layer's forward and backward as native autograd runs them, at one size."""
    model = tiny_models.build(**SIZES)
    layer, hidden = model.model.layers[0], torch.randn(2, 8, HIDDEN, requires_grad=True)
    rotary = model.model.rotary_emb(hidden, torch.arange(8)[None])
    with FlopCounterMode(display=False) as counter:
        layer(hidden, position_embeddings=rotary).sum().backward()
    ours = work(templates, "decoder", "forward") + work(templates, "decoder", "backward")
    at = {BATCH: 2, LENGTH: 8}
    # Eager attention multiplies the whole square, and takes four products backward where ours takes five of half of it.
    square = 2 * HEADS * 8 * 8 * WIDTH
    assert ours.gemm_flops.subs(at) + (4 + 8) * square == counter.get_total_flops()


@pytest.mark.nightly(held_by=(
    "tests/model/test_flops.py::test_a_layers_products_are_two_flops_a_weight_and_token",
    "tests/model/test_flops.py::test_products_are_those_that_pytorch_counts"))
def test_products_of_experts_are_a_kind_of_their_own_which_takes_longer() -> None:
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                 num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes), dtype=torch.bfloat16)
    captured, _ = api.analyse(model, StreamConfig.of(device="cpu"), "cpu", None, None)
    (name,) = (name for name in captured.templates if name not in ("prologue", "epilogue"))
    found = work(captured.templates, name, "forward")
    assert sympy.expand(found.grouped_flops - 2 * TOKENS * 2 * 3 * 32 * 16) == 0
    hardware = replace(Hardware.find("h200"), grouped_overhead=0.0)
    at = {BATCH: 2**12, LENGTH: 2**10}
    whole, half, over = (
        Durations(captured, {}, replace(hardware, **rates)).seconds(name, "forward", 2**12, 2**10).experts
        for rates in ({"grouped_efficiency": 1.0}, {"grouped_efficiency": 0.5},
                      {"grouped_efficiency": 1.0, "grouped_overhead": 9}))
    assert half == 2 * whole == pytest.approx(2 * float(found.grouped_flops.subs(at)) / 6.6e14)
    assert over - whole == pytest.approx(9 * 4 * 2 * 3 * 32 * 16 / 6.6e14)  # each of four experts costs nine rows more


def test_narrow_products_take_the_time_of_their_operands(templates: dict[str, Template]) -> None:
    found = work(templates, "decoder", "forward")
    assert found.gemm_bytes == 0 and found.narrow_bytes.subs({BATCH: 4, LENGTH: 64}) > 0  # all sides are below 128
    assert _operands(sympy.Integer(5), sympy.Integer(128), BATCH) == Work(gemm_bytes=sympy.Integer(5))
    assert _operands(sympy.Integer(5), sympy.Integer(127), BATCH) == Work(narrow_bytes=sympy.Integer(5))


def test_fused_chains_move_less_than_ops_one_by_one_and_more_than_what_enters_and_leaves(
        templates: dict[str, Template]) -> None:
    at = {BATCH: 4, LENGTH: 64}
    for variant in ("forward", "forward_saving", "backward", "recompute_backward"):
        fused, unfused = (work(templates, "decoder", variant, fused=f) for f in (True, False))
        assert fused.gemm_flops == unfused.gemm_flops
        assert 4 * 4 * 64 * HIDDEN < fused.bytes.subs(at) < unfused.bytes.subs(at) / 2
        assert fused.kernels < unfused.kernels


def test_bytes_of_a_chain_by_hand(templates: dict[str, Template]) -> None:
    """rmsnorm and the gated MLP of a layer's forward, float32: h read, normed written; gate and up read, product written;
    h and the MLP read, h' written; and the same around attention."""
    found = work(templates, "decoder", "forward").bytes.subs({BATCH: 4, LENGTH: 64})
    tokens = 4 * 64
    kv = GROUPS * WIDTH
    # norm 1: h -> x; rotary: q, k -> q', k'; add and norm 2: h, o -> x; MLP: gate, up -> product; add: h, o, down -> h'
    floor = 4 * tokens * (2 * HIDDEN + 2 * HIDDEN + 2 * kv + 3 * HIDDEN + 3 * FFN + 4 * HIDDEN)
    assert floor <= found <= 1.15 * floor


def test_an_embedding_reads_the_rows_that_it_picks(templates: dict[str, Template]) -> None:
    found = work(templates, "prologue", "forward").bytes.subs({BATCH: 1, LENGTH: 8})
    assert found < 4 * VOCABULARY * HIDDEN


@pytest.mark.nightly(held_by=(
    "tests/model/test_flops.py::test_a_layers_products_are_two_flops_a_weight_and_token",
    "tests/model/test_flops.py::test_products_are_those_that_pytorch_counts"))
@pytest.mark.parametrize("divided", [False, True], ids=["whole layers", "pieces of experts"])
def test_a_plan_counts_the_experts_that_a_token_is_routed_to(divided: bool) -> None:
    sizes = dict(vocab_size=64, hidden_size=256, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=2,
                 num_attention_heads=2, num_key_value_heads=1, head_dim=128, num_experts=16, num_experts_per_tok=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes), dtype=torch.bfloat16)
    options: dict[str, Any] = {"expert_pieces": 4} if divided else {}
    outlook = megacompile.schedule(model, batch=4, length=64, hardware="h200", whole_step=True, **options).outlook()
    said, times = re.search(r"(\S+) TFLOPS", outlook.text()), outlook.chosen.times
    assert said is not None and times is not None
    assert float(said[1]) * 1e12 * times.step_s / (6 * 4 * 64) == pytest.approx(active_parameters(model), rel=0.02)
