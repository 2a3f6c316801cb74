"""Templates that compute a chunk of tokens at a time: the same training in less memory, chosen only if nothing else fits."""
from __future__ import annotations

from typing import Any

import models
import pytest
import sympy
import tiny_models
import torch
import torch.nn.functional as F
from captured import CPU, captured
from layerwise import Layerwise, as_graph
from torch import Tensor, fx, nn

import megacompile
from megacompile import api
from megacompile.errors import InsufficientMemoryError, MegacompileError
from megacompile.frontend import Template, Variant, capture, compile_variant
from megacompile.frontend.templates.template import BATCH, LENGTH
from megacompile.ir.token_loop import TokenLoop, Tokens, Total, token_loops
from megacompile.passes import TEMPLATE_PIPELINE
from megacompile.passes.template import Target
from megacompile.planning import search_space
from megacompile.planning.config import StreamConfig
from megacompile.planning.planner import Planner
from megacompile.predict import cost
from megacompile.predict.durations import variant_work

aten = torch.ops.aten
GEMMS = {aten.mm.default, aten.addmm.default, aten.bmm.default}
Training = tuple[Tensor, dict[str, Tensor]]


def native(model: nn.Module, inputs: dict[str, Tensor]) -> Training:
    model.zero_grad()
    out = model(**inputs)
    loss = out if isinstance(out, Tensor) else out.loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same_training(ours: Training, reference: Training) -> None:
    torch.testing.assert_close(ours[0], reference[0], rtol=1e-6, atol=0)
    assert ours[1].keys() == reference[1].keys()
    for name, gradient in reference[1].items():
        error = (ours[1][name] - gradient).norm() / gradient.norm().clamp_min(1e-12)
        assert error <= 1e-5, f"{name}: gradient off by {error:.1e} of its norm"


# ---- the same training -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "hand_written", *(
    pytest.param(family, marks=pytest.mark.nightly) for family in ("llama", "gpt2", "gemma2", "gpt_neox"))])
def test_training_in_chunks_equals_native_autograd(family: str) -> None:
    """Chunks do not divide the sequences (the last chunk has one token, or three), or are larger than they are."""
    model, inputs = models.build(family), models.batch(3, 11)
    reference = native(model, inputs)
    for chunk in (5, 4, 16):
        assert_same_training(Layerwise(captured(family), model, chunk=chunk).loss_and_gradients(inputs, False), reference)


def test_one_token_at_a_time_is_the_same_training() -> None:
    model, inputs = models.build("qwen2"), models.batch(2, 7)
    assert_same_training(Layerwise(captured("qwen2"), model, chunk=1).loss_and_gradients(inputs, False), native(model, inputs))


class TokenMixer(nn.Module):
    """No attention, but most ways in which one token can see another, between layers that see one token each."""

    def __init__(self, width: int, scaled: bool) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 3 * width), nn.Linear(3 * width, width), nn.LayerNorm(width)
        self.taps = nn.Parameter(torch.randn(width, 1, 3) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        before = F.pad(x[:, :-1], (0, 0, 1, 0))
        mean = x.cumsum(1) / torch.arange(1, length + 1, device=x.device)[:, None]
        x = x + self.down(torch.tanh(self.up(self.norm(before + mean))))
        x = x + F.conv1d(F.pad(x.transpose(1, 2), (2, 0)), self.taps, groups=x.shape[2]).transpose(1, 2)
        weights = torch.softmax(x[..., :1] * 0.1, dim=1)  # over tokens
        x = x + torch.sigmoid(x) * (weights * x).sum(1, keepdim=True) + x.mean(1, keepdim=True) * x.flip(1)
        x = x - x.amax(dim=1, keepdim=True) + x.sum(dim=(0, 1)) / x.shape[1]
        scores = (x @ x.transpose(1, 2) / length).tril()
        return x + self.down(F.silu(self.up(scores @ x)))


@pytest.mark.nightly(held_by="tests/model/test_chunks.py::test_training_in_chunks_equals_native_autograd")
def test_tokens_that_see_each_other_are_in_no_chunk() -> None:
    """However they do so: what such an op gives is exact, and what is tokenwise between two of them runs in chunks."""
    model = type("Model", (models.HandWritten,), {"layer_class": TokenMixer})(width=16, depth=1)
    found = capture(model, pipeline=TEMPLATE_PIPELINE, target=CPU)
    inputs = models.batch(2, 11)
    assert len(token_loops(found.templates["decoder"].variant("recompute_backward", 4).graph)) >= 3
    assert_same_training(Layerwise(found, model, chunk=4).loss_and_gradients(inputs, False), native(model, inputs))


class Router(nn.Module):
    """A dense mixture of experts: top-k, gather, stack and split along other dimensions than that of tokens."""

    def __init__(self, width: int, scaled: bool) -> None:
        super().__init__()
        self.gate, self.norm = nn.Linear(width, 4), nn.RMSNorm(width)
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(4))
        self.down = nn.Parameter(torch.randn(4, width, width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        scores = self.gate(normed).softmax(-1)
        best, which = scores.topk(2, dim=-1)
        shares = torch.zeros_like(scores).scatter(-1, which, best / best.sum(-1, keepdim=True))
        experts = []
        for number, up in enumerate(self.up):
            gate, value = up(normed).chunk(2, dim=-1)
            experts.append((F.gelu(gate) * value) @ self.down[number])
        return x + (torch.stack(experts, dim=-1) * shares[..., None, :]).sum(-1)


@pytest.mark.nightly(held_by=(
    "tests/model/test_chunks.py::test_a_decoder_layer_is_three_loops_with_the_same_products_and_nothing_wide_between_them",
    "tests/model/test_chunks.py::test_training_in_chunks_equals_native_autograd"))
def test_a_layer_without_attention_is_one_loop() -> None:
    model = type("Model", (models.HandWritten,), {"layer_class": Router})(width=16, depth=1)
    found = capture(model, pipeline=TEMPLATE_PIPELINE, target=CPU)
    inputs = models.batch(3, 11)
    variant = found.templates["decoder"].variant("recompute_backward", 4)
    assert len(token_loops(variant.graph)) == 1
    assert_same_training(Layerwise(found, model, chunk=4).loss_and_gradients(inputs, False), native(model, inputs))


@pytest.mark.nightly(held_by=(
    "tests/model/test_chunks.py::test_training_in_chunks_equals_native_autograd",
    "tests/model/test_chunks.py::test_a_streamed_model_trains_in_chunks_as_native"))
def test_compiled_chunks_equal_the_graphs() -> None:
    """With a last chunk that is shorter: two kernels a loop. A recompute has the forward's loops: these are compiled once."""
    def compiled(variant: Variant, args: list[Any]) -> Any:
        return as_graph(variant, args) if variant.name == "forward" else compile_variant(variant, args, "inductor")

    model, inputs = models.build("hand_written", depth=1), models.batch(1, 10)
    layerwise = Layerwise(captured("hand_written", depth=1), model, compiled, chunk=4)
    assert_same_training(layerwise.loss_and_gradients(inputs, False), native(model, inputs))


@pytest.mark.parametrize("options", [{}, {"checkpoint_interval": 2}, {"reference": True}, {"saved_layers": 1},
                                     {"saved_layers": 2, "residuals": "attention"}], ids=str)
def test_a_streamed_model_trains_in_chunks_as_native(options: dict[str, Any]) -> None:
    model, plain = tiny_models.build(), tiny_models.build()
    model = megacompile.stream(model, device="cpu", token_chunk=4, micro_batch_size=2, **options)
    try:
        inputs = tiny_models.batch()
        loss, reference = model(**inputs).loss, plain(**inputs).loss
        torch.testing.assert_close(loss, reference)
        loss.backward(), reference.backward()
        tiny_models.assert_same_gradients(model, plain)
        assert model.megacompile.compiled(inputs).plan.token_chunk == 4
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs).logits, plain(**inputs).logits)
    finally:
        model.megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_chunks.py::test_a_streamed_model_trains_in_chunks_as_native")
@pytest.mark.parametrize("options", [
    {"token_chunk": 64}, {"token_chunk": 257, "saved_layers": 9, "residuals": "attention"},
    {"token_chunk": 1024, "host_checkpoints": 12, "saved_layers": 3, "residuals": "attention"}, {"token_chunk": 4095}], ids=str)
def test_a_long_sequence_through_many_layers_trains_as_native_with_checkpointing(options: dict[str, Any]) -> None:
    """The shape of a 7B, narrow."""
    changes = dict(num_hidden_layers=28, hidden_size=56, intermediate_size=152, num_attention_heads=7,
                   max_position_embeddings=4096)
    model, plain = tiny_models.build(**changes), tiny_models.build(**changes)
    plain.gradient_checkpointing_enable()
    plain.set_attn_implementation("sdpa")
    model = megacompile.stream(model, device="cpu", **options)
    inputs = tiny_models.batch(rows=1, length=4096)
    loss, reference = model(**inputs).loss, plain(**inputs).loss
    torch.testing.assert_close(loss, reference, rtol=1e-6, atol=0)
    loss.backward(), reference.backward()
    tiny_models.assert_same_gradients(model, plain)
    model.megacompile.close()


# ---- what a chunked template looks like ------------------------------------------------------------------------------


def gemms(graph: fx.Graph) -> int:
    return sum(node.target in GEMMS for node in graph.nodes)


def products(loop: TokenLoop) -> int:
    return sum(isinstance(output, Total) and output.product for output in loop.outputs)


def width_of_all_tokens(template: Template, value: Any) -> int:
    """Elements a token of a value that has all tokens, the widest of several; 0 if it has none."""
    if isinstance(value, tuple | list):
        return max((width_of_all_tokens(template, each) for each in value), default=0)
    count = template.symbolic(value.numel()) if isinstance(value, Tensor) else sympy.Integer(0)
    return int(count.subs({BATCH: 1, LENGTH: 1})) if count.has(LENGTH) else 0


def test_a_decoder_layer_is_three_loops_with_the_same_products_and_nothing_wide_between_them() -> None:
    template = captured("qwen2").templates["decoder"]
    whole, variant = (template.variant("recompute_backward", chunk) for chunk in (0, 4))
    loops = token_loops(variant.graph)
    assert len(loops) == 3
    operands = sum(len(gradient.results) == 2 for gradient in whole.gradients)
    assert sum(gemms(loop.body.graph) + products(loop) for loop in loops.values()) == gemms(whole.graph.graph) + operands
    assert gemms(variant.graph.graph) == 0
    widest = {each: max(width_of_all_tokens(template, n.meta.get("val")) for n in each.graph.graph.nodes)
              for each in (whole, variant)}
    assert (widest[whole], widest[variant]) == (56, 32), "the FFN's width, that of hidden states"


@pytest.mark.parametrize("variant", ["forward_saving", "backward"])
def test_variants_with_residuals_are_whole(variant: str) -> None:
    template = captured("qwen2").templates["decoder"]
    assert template.variant(variant, 4) is template.variant(variant)


@pytest.mark.nightly(held_by="tests/model/test_chunks.py::test_many_chunks_of_bfloat16_lose_nothing")
def test_gradients_of_weights_are_summed_in_float32() -> None:
    model = models.build("hand_written", depth=1).bfloat16()
    found = capture(model, pipeline=TEMPLATE_PIPELINE, target=Target("cpu", torch.bfloat16))
    for name, kind in (("decoder", "recompute_backward"), ("epilogue", "loss")):
        template = found.templates[name]
        variant = template.variant(kind, 4)
        results = variant.graph.graph.output_node().args[0]
        dtypes = {template.inputs[g.input].role.kind: set() for g in variant.gradients}
        for gradient in variant.gradients:
            assert len(gradient.results) == 1
            dtypes[template.inputs[gradient.input].role.kind].add(results[gradient.results[0]].meta["val"].dtype)
        assert dtypes == {"parameter": {torch.float32}, "carried": {torch.bfloat16}}


def test_many_chunks_of_bfloat16_lose_nothing() -> None:
    """Where each chunk's gradients were rounded, and their sums, the error would grow with the number of chunks."""
    exact = models.build("hand_written", depth=1)
    model = models.build("hand_written", depth=1).bfloat16()
    found = capture(model, pipeline=TEMPLATE_PIPELINE, target=Target("cpu", torch.bfloat16))
    with torch.no_grad():
        for ours, theirs in zip(exact.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs)
    inputs = models.batch(1, 60)
    reference = native(exact, inputs)[1]
    name = "blocks.0.up.bias"
    errors = [(Layerwise(found, model, chunk=chunk).loss_and_gradients(inputs, False)[1][name] - reference[name]).norm()
              for chunk in (60, 1)]
    assert errors[1] <= 1.2 * errors[0]


def test_a_chunk_of_either_layout_is_taken_dense_and_put_back() -> None:
    whole = torch.arange(2 * 7 * 3.0).view(2, 7, 3)
    for tokens, value in ((Tokens(1, False, (0, 1, 2)), whole), (Tokens(0, True, (0, 1)), whole.view(14, 3)),
                          (Tokens(2, False, (0, 2, 1)), whole.transpose(1, 2)), (Tokens(1, False, (2, 1, 0)), whole)):
        pieces = [tokens.take(value, 2, 7, start, min(3, 7 - start)) for start in range(0, 7, 3)]
        again = tokens.whole(pieces[0], 2, 7)
        for start, piece in zip(range(0, 7, 3), pieces, strict=True):
            assert torch.empty_permuted(piece.shape, tokens.order).stride() == piece.stride()
            tokens.put(piece, again, 2, 7, start, piece.numel() // 6)
        assert torch.equal(again, value)


@pytest.mark.nightly(held_by="tests/model/test_chunks.py::test_variants_with_residuals_are_whole")
def test_an_unchunked_variant_is_what_it_was() -> None:
    without = tuple(p for p in TEMPLATE_PIPELINE if p.name != "chunk_tokens")
    before = captured("llama", without)
    for name, template in captured("llama").templates.items():
        for variant in template.variant_names:
            assert template.variant(variant).graph.code == before.templates[name].variant(variant).graph.code


# ---- costs and the planner -------------------------------------------------------------------------------------------

SIZES = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 640, "num_hidden_layers": 6, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 1 << 16}


@pytest.fixture(scope="module")
def analysis() -> tuple[Any, Any]:
    return api.analyse(tiny_models.build(**SIZES), StreamConfig.of(device="cpu"), "cpu", None, None)


def decoder(analysis: tuple[Any, Any], variant: str, chunk: int) -> tuple[Template, Variant]:
    template = analysis[0].templates["decoder"]
    return template, template.variant(variant, chunk)


@pytest.mark.nightly(held_by="tests/model/test_chunks.py::test_chunks_are_the_last_resort")
@pytest.mark.parametrize("variant", ["forward", "recompute_backward"])
def test_chunks_change_no_flops_and_read_weights_more_often(variant: str, analysis: tuple[Any, Any]) -> None:
    at = {BATCH: 1, LENGTH: 4096}
    whole, large, small = (variant_work(*decoder(analysis, variant, chunk)) for chunk in (0, 1024, 256))
    assert whole.flops.subs(at) == large.flops.subs(at) == small.flops.subs(at)
    assert whole.gemm_bytes.subs(at) < large.gemm_bytes.subs(at) < small.gemm_bytes.subs(at)
    assert variant_work(*decoder(analysis, variant, 4096)).gemm_flops.subs({BATCH: 3, LENGTH: 100}) == whole.gemm_flops.subs(
        {BATCH: 3, LENGTH: 100})


@pytest.mark.nightly(
    held_by="tests/model/test_chunks.py::test_a_decoder_layer_is_three_loops_with_the_same_products_and_nothing_wide_between_them")
def test_the_peak_of_a_chunked_layer_does_not_grow_with_its_width() -> None:
    """But for its weights' gradients and one chunk: of all tokens, there are hidden states alone."""
    length, chunk, peaks = 8192, 64, []
    for width in (640, 1280):
        found = api.analyse(tiny_models.build(**{**SIZES, "intermediate_size": width}), StreamConfig.of(device="cpu"), "cpu",
                            None, None)
        peaks.append([cost.peak_bytes(*decoder(found, "recompute_backward", c), 1, length) for c in (0, chunk)])
    (whole, chunked), (wider, chunked_wider) = peaks
    weights = 3 * 64 * 640 * 4
    assert wider - whole > 4 * length * 640 * 4
    assert chunked_wider - chunked < weights + 20 * chunk * 640 * 4
    assert chunked < 16 * length * 64 * 4 < whole / 4


def test_chunks_are_the_last_resort(analysis: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the budget: only where no whole micro-batch fits, and then the largest chunk that does."""
    monkeypatch.setattr(search_space, "LEAST_CHUNK", 128)
    batch, length = 4, 2048
    config = StreamConfig.of(device="cpu", host_checkpoints=False)
    free = Planner(*analysis, config, 2**50, margin_bytes=0)
    need = {c: free.estimate(c).total for c in free._candidates(batch, length)}
    whole = min(n for c, n in need.items() if not c.token_chunk)
    chunked = {c.token_chunk: n for c, n in need.items() if c.token_chunk}
    assert list(chunked) == [1024, 512, 256, 128], "powers of two below the length, the largest first"
    assert sorted(chunked.values(), reverse=True) == list(chunked.values())
    assert max(chunked.values()) < whole

    def within(budget: int) -> Any:
        return Planner(*analysis, config, budget, margin_bytes=0).plan(batch, length)

    assert within(2**50).token_chunk == within(whole).token_chunk == 0
    assert within(whole).micro_batches == (1,) * batch
    least = min(chunked.values())
    for given in sorted({whole - 1, *chunked.values(), *(n - 1 for n in chunked.values() if n > least)}):
        chosen = within(given)
        assert need[chosen] <= given
        assert chosen.token_chunk == max(c for c, n in chunked.items() if n <= given)
    with pytest.raises(InsufficientMemoryError, match=r"micro-batches of 1, checkpoint_interval=1, token_chunk=\d+\)"):
        within(least - 1)


@pytest.mark.parametrize("given", [0, 100])
def test_a_given_chunk_is_kept_and_none_means_none(given: int, analysis: tuple[Any, Any]) -> None:
    candidates = list(Planner(*analysis, StreamConfig.of(device="cpu", token_chunk=given), 2**50)._candidates(2, 8192))
    assert {plan.token_chunk for plan in candidates} == {given}


def test_short_sequences_have_no_chunks(analysis: tuple[Any, Any]) -> None:
    assert not any(p.token_chunk for p in Planner(*analysis, StreamConfig.of(device="cpu"), 2**50)._candidates(8, 2048))


@pytest.mark.parametrize("wrong", [-1, 2.5, True, "all"])
def test_a_chunk_that_is_not_a_number_of_tokens_is_refused(wrong: Any) -> None:
    with pytest.raises(MegacompileError, match="token_chunk must be a whole number of at least 0"):
        StreamConfig(token_chunk=wrong)
