"""Templates: what is shared, what variants compute, what stays saved, and what the template passes change."""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import models
import pytest
import sympy
import torch
import torch.nn.functional as F
from captured import CPU, captured
from layerwise import multiplied_out
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from megacompile import api
from megacompile.codegen.inductor import Inductor
from megacompile.errors import CaptureError, CompilationError, UnsupportedError
from megacompile.frontend import Template, capture, compile_variant
from megacompile.frontend.ops import attention as ours
from megacompile.frontend.ops import attention_kernels as kernels
from megacompile.frontend.ops.attention_kernels import BLOCK, flash_forward, fused_kernel, in_blocks
from megacompile.frontend.templates import variants
from megacompile.frontend.templates.joint import base_of
from megacompile.frontend.templates.template import BATCH, LENGTH
from megacompile.ir.token_loop import token_loops
from megacompile.passes import TEMPLATE_PIPELINE
from megacompile.passes.template import Target, accumulate_in_gemm, attention
from megacompile.predict import cost
from megacompile.runtime.kernels import grouped_product

GEMMS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
ATTENTION = {torch.ops.megacompile.attention.default, torch.ops.megacompile.attention_backward.default}


def count(graph: fx.GraphModule, targets: set) -> int:
    return sum(node.target in targets for node in graph.graph.nodes)


# ------------------------------------------------------------------ sharing
@pytest.mark.parametrize(("family", "expected"), [
    ("qwen2", ["decoder"] * 4),
    # Sliding and full attention alternate.
    pytest.param("gemma2", ["decoder", "decoder_1"] * 2, marks=pytest.mark.nightly),
    ("hand_written", ["decoder", "decoder_1"] * 2),  # every second layer has a scale
])
def test_equal_layers_share_a_template_and_others_have_their_own(family: str, expected: list[str]) -> None:
    assert [call.template for call in captured(family).calls[1:-1]] == expected


@pytest.mark.nightly(
    held_by="tests/model/test_traced_differences.py::test_layers_and_modes_that_differ_in_little_are_told_apart")
def test_a_changed_layer_gets_a_template_of_its_own() -> None:
    model = models.build("llama", num_hidden_layers=3)
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-3
    assert [call.template for call in capture(model).calls[1:-1]] == ["decoder", "decoder_1", "decoder"]


@pytest.mark.nightly(held_by="tests/model/test_several_stacks.py::test_loss_gradients_and_steps_in_waves_are_native_ones")
def test_a_frozen_layer_gets_a_template_of_its_own_and_no_gradients() -> None:
    model = models.build("llama", num_hidden_layers=3)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    result = capture(model)
    assert [call.template for call in result.calls[1:-1]] == ["decoder", "decoder_1", "decoder_2"]
    assert result.templates["decoder"].has_gradient == (False,)
    assert result.templates["decoder"].variant("recompute_backward").gradients == ()
    carried = [i for i, x in enumerate(result.templates["decoder_1"].inputs) if x.role.kind == "carried"]
    differentiated = {g.input for g in result.templates["decoder_1"].variant("recompute_backward").gradients}
    assert carried and not differentiated & set(carried)


@pytest.mark.nightly(held_by="tests/model/test_frontend_parity.py::test_loss_and_gradients_equal_native_autograd")
def test_a_tied_parameter_has_one_name_everywhere() -> None:
    names = [{s.name for s in call.sources if s.kind == "parameter"} for call in captured("tied").calls]
    assert "model.embed_tokens.weight" in names[0] & names[-1]
    assert "lm_head.weight" not in names[-1]


def test_batch_inputs_keep_the_order_of_forward() -> None:
    class Swapped(models.HandWritten):
        def forward(self, labels: Tensor, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids, labels)

    example = {name: torch.zeros(2, 4, dtype=torch.int64) for name in ("input_ids", "labels")}
    assert capture(Swapped(depth=1), example=example).batch_inputs == ("labels", "input_ids")


def test_a_meta_model_is_captured_and_dynamo_logs_its_settings_without_those_of_the_capture(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 writes them as JSON, which holds no functions, and logs an error with a traceback."""
    logged = []
    monkeypatch.setattr("torch._dynamo.utils._get_dynamo_config_for_logging",
                        lambda: logged.append(set(torch._dynamo.config.ignore_logging_functions)))
    with torch.device("meta"):
        model = models.HandWritten(depth=1)
    assert len(capture(model, pipeline=TEMPLATE_PIPELINE, target=CPU).calls) == 3
    assert logged == [set()] * len(logged) != []


# ------------------------------------------------------------------ variants
def test_a_qwen2_layer_has_the_fewest_gemms() -> None:
    template = captured("qwen2", (attention,)).templates["decoder"]
    counts = {name: (count(template.variant(name).graph, GEMMS), count(template.variant(name).graph, ATTENTION))
              for name in template.variant_names}
    # 7 projections; the backward has two GEMMs for each; the recompute leaves out the forward's last one.
    assert counts == {"forward": (7, 1), "forward_saving": (7, 1), "backward": (14, 1), "recompute_backward": (20, 2)}


def test_a_layer_that_keeps_attention_s_results_alone_computes_all_but_attention_again() -> None:
    template = captured("qwen2").templates["decoder"]
    saving, backward = (template.variant(name, residuals="attention") for name in ("forward_saving", "backward"))
    assert saving.residuals == 2  # what it gives, and the logarithms of its sums
    assert 4 * template.residual_bytes("attention").subs(at := {BATCH: 2, LENGTH: 9}) < template.residual_bytes().subs(at)
    recomputing = template.variant("recompute_backward").graph
    assert count(saving.graph, ATTENTION) == 1 and count(recomputing, ATTENTION) == 2 and count(backward.graph, ATTENTION) == 1
    assert count(backward.graph, GEMMS) == count(recomputing, GEMMS)
    for name in ("forward_saving", "backward"):
        assert token_loops(template.variant(name, 4, "attention").graph) and not token_loops(template.variant(name, 4).graph)
    assert template.variant("forward", 0, "attention") is template.variant("forward")


class GatedLayer(models.HandWrittenLayer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.logsigmoid(self.out(x))


class Gated(models.HandWritten):
    layer_class = GatedLayer


@pytest.mark.parametrize(("model", "differs"), [
    pytest.param(lambda: models.build("gpt2", n_layer=1), lambda given: torch.float32 in {value.dtype for value in given},
                 marks=pytest.mark.nightly),
    (lambda: Gated(depth=1), lambda given: 0 in {value.numel() for value in given}),
    pytest.param(lambda: models.build("llama", num_hidden_layers=1), lambda given: True, marks=pytest.mark.nightly),
], ids=["LayerNorm", "logsigmoid", "neither"])
def test_the_backward_expects_the_dtypes_and_shapes_that_the_forward_s_kernels_give_on_the_device(
        model: Callable[[], nn.Module], differs: Callable[[list[Tensor]], bool]) -> None:
    """CUDA keeps LayerNorm's statistics in float32, the CPU, on which graphs are traced, in bf16; and nothing of logsigmoid."""
    target = Target("cuda", torch.bfloat16)
    template = api.capture(model().bfloat16(), pipeline=TEMPLATE_PIPELINE, target=target).templates["decoder"]
    saving, backward = template.variant("forward_saving"), template.variant("backward")
    size = cost.at(template, 3, 3)
    with FakeTensorMode(shape_env=ShapeEnv()):
        values = (n.meta["val"] for n in saving.graph.graph.find_nodes(op="placeholder"))
        results = saving.graph(*[torch.empty([*map(size, value.shape)], dtype=value.dtype, device="cuda")
                                 if isinstance(value, Tensor) else 3 for value in values])
    first = len(template.inputs)
    expected = [n.meta["val"] for n in backward.graph.graph.find_nodes(op="placeholder")[first:first + saving.residuals]]
    given = results[saving.outputs:]
    assert [(value.dtype, [*value.shape]) for value in given if isinstance(value, Tensor)] == [
        (value.dtype, [*map(size, value.shape)]) for value in expected if isinstance(value, Tensor)]
    assert differs([value for value in given if isinstance(value, Tensor)])


def test_compiled_code_is_given_no_dtype_but_those_that_it_was_compiled_for() -> None:
    variant = captured("qwen2").templates["prologue"].variant("forward")  # the smallest one
    values = [n.meta["val"] for n in variant.graph.graph.find_nodes(op="placeholder")]
    args = [torch.ones([3 if isinstance(size, torch.SymInt) else size for size in value.shape], dtype=value.dtype)
            if isinstance(value, Tensor) else 3 for value in values]
    compiled = compile_variant(variant, args, "inductor")
    compiled(*args)
    with pytest.raises(AssertionError, match="compiled for"):
        compiled(*[arg.bfloat16() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args])


def test_compiled_code_takes_tensors_that_are_laid_out_otherwise() -> None:
    """What another graph hands over, a view of something larger or an expanded value, its compiler may have made dense."""
    dense = torch.randn(3, 4, 8)
    larger, expanded = torch.randn(3, 4, 24)[..., 8:16], torch.randn(1, 4, 8).expand(3, 4, 8)

    for example in (dense, larger, expanded):
        compiled = variants._compile_graph(fx.symbolic_trace(lambda x: (torch.ops.aten.mul.Tensor(x, 2),)), [0], [example],
                                           Inductor())
        for given in (dense, larger, expanded):
            torch.testing.assert_close(compiled(given)[0], given * 2)


def test_an_inductor_failure_is_reported_with_the_workaround(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, value = fx.symbolic_trace(lambda x: (torch.ops.aten.mul.Tensor(x, 2),)), torch.ones(3)

    def fail(*_: object) -> None:
        raise AssertionError("wrong number of dimensions\nError in op")

    monkeypatch.setattr("megacompile.compat.inductor.compile", lambda *_: fail)
    with pytest.raises(CompilationError, match=r"does not run \(AssertionError: wrong number of dimensions\): .*compile=False"):
        variants._compile_graph(graph, [0], [value], Inductor())(value)
    monkeypatch.setattr("megacompile.compat.inductor.compile", fail)
    with pytest.raises(CompilationError, match=r"cannot compile a layer \(AssertionError: wrong.*compile=False.*doctor"):
        variants._compile_graph(graph, [0], [value], Inductor())


def test_what_an_op_of_ours_asserts_is_not_laid_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, value = fx.symbolic_trace(lambda x: (torch.ops.aten.mul.Tensor(x, 2),)), torch.ones(1, 1, 2, 2)
    monkeypatch.setattr("megacompile.compat.inductor.compile",
                        lambda *_: lambda x: flash_forward(x, x, x, 1.0, 0, softcap=1.0))
    with pytest.raises(AssertionError, match="does not cap scores"):
        variants._compile_graph(graph, [0], [value], Inductor())(value)


def test_variants_take_what_the_contract_says_in_order() -> None:
    template = captured("qwen2").templates["decoder"]
    graphs = {name: template.variant(name).graph.graph for name in template.variant_names}
    sizes = {name: len(graph.find_nodes(op="placeholder")) for name, graph in graphs.items()}
    inputs, residuals = len(template.inputs), template.variant("forward_saving").residuals
    assert residuals > 0
    assert sizes == {"forward": inputs, "forward_saving": inputs, "backward": inputs + residuals + 1,
                     "recompute_backward": inputs + 1}
    with pytest.raises(CaptureError, match="has no variant loss"):
        template.variant("loss")


@pytest.mark.parametrize("family", ["qwen2", pytest.param("gpt2", marks=pytest.mark.nightly), "hand_written"])
def test_no_result_shares_memory_with_a_parameter(family: str) -> None:
    for template in captured(family).templates.values():
        parameters = {i for i, x in enumerate(template.inputs) if x.role.kind in ("parameter", "buffer")}
        for name in template.variant_names:
            graph = template.variant(name).graph.graph
            placeholders = graph.find_nodes(op="placeholder")
            bases = {base_of(node) for node in graph.output_node().args[0]}
            assert not {placeholders[i] for i in parameters} & bases, f"{template.name}.{name}"


def test_residual_and_output_bytes_are_those_of_real_tensors() -> None:
    model = captured("qwen2")
    template = model.templates["decoder"]
    b, t = template.symbols
    assert template.output_bytes() == 4 * 32 * b * t
    assert template.residual_bytes().free_symbols == {b, t}

    def real(value: Any) -> int:
        return int(sympy.sympify(value).subs({b: 2, t: 8}))

    saving = template.variant("forward_saving").graph
    values = [node.meta["val"] for node in saving.graph.find_nodes(op="placeholder")]  # torch 2.11 passes sizes, too
    args = [torch.randn([*map(real, x.shape)]) if isinstance(value, Tensor) else real(template.symbolic(value))
            for value, x in zip(values, template.inputs, strict=True)]
    results = saving(*args)
    storages = {r.untyped_storage().data_ptr(): r.untyped_storage().nbytes()
                for r in results[template.outputs:] if isinstance(r, Tensor)}
    assert sum(storages.values()) == template.residual_bytes().subs({b: 2, t: 8})


def test_logits_read_neither_labels_nor_loss_denominator() -> None:
    template = captured("qwen2").templates["epilogue"]
    roles = [template.inputs[i].role for i in template.variant("outputs").reads]
    assert not {("batch", "labels"), ("loss_denominator", "")} & {(r.kind, r.name) for r in roles}


def test_every_stage_is_kept_as_text() -> None:
    template = captured("qwen2").templates["epilogue"]
    template.variant("loss")
    assert {"captured", "attention", "fuse_loss", "joint", "loss.accumulate_in_gemm", "loss"} <= template.stages.keys()
    assert "cross_entropy(" in template.stages["attention"]
    assert "linear_cross_entropy" in template.stages["fuse_loss"]


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UnsupportedError, match='not "fast"'):
        compile_variant(captured("qwen2").templates["prologue"].variant("forward"), [], "fast")


# ------------------------------------------------------------------ loss
@pytest.mark.parametrize("family", ["qwen2", "hand_written"])
def test_targets_are_counted_after_the_models_own_shift(family: str) -> None:
    batch = models.batch(3, 9, ignored=0.4)
    shifted = batch["labels"][:, 1:]
    assert captured(family).count_targets(batch).item() == (shifted != -100).sum().item()


class SumOverOwnCount(models.HandWritten):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        labels = labels.clone()
        labels[labels == 5] = -100  # in place, unread: the count must see it
        counted = (labels[:, 1:] != -100).sum()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / counted


def test_a_sum_divided_by_something_of_the_batch_is_normalised_by_it() -> None:
    result = capture(SumOverOwnCount(depth=1), pipeline=TEMPLATE_PIPELINE, target=CPU)
    batch = models.batch(4, 12, ignored=0.2)
    counted = (batch["labels"][:, 1:] != -100) & (batch["labels"][:, 1:] != 5)
    assert result.has_loss_denominator and result.fused_loss
    assert result.count_targets(batch).item() == counted.sum().item()


class SquaredLoss(models.HandWritten):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels).square()


class AddedLoss(models.HandWritten):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels) + 1e-3 * logits.square().mean()


class WeightedLoss(models.HandWritten):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        weight = torch.ones(logits.shape[-1], device=logits.device)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=weight)


@pytest.mark.parametrize("model", [SquaredLoss, pytest.param(WeightedLoss, marks=pytest.mark.nightly)])
def test_a_loss_that_is_not_a_mean_over_targets_is_kept_as_it_is(model: type[models.HandWritten]) -> None:
    result = capture(model(depth=1), pipeline=TEMPLATE_PIPELINE, target=CPU)
    assert not result.has_loss_denominator and not result.fused_loss and result.count_targets is None


def test_what_is_added_to_a_mean_over_targets_is_averaged_over_micro_batches() -> None:
    result = capture(AddedLoss(depth=1), pipeline=TEMPLATE_PIPELINE, target=CPU)
    assert result.is_averaged and not result.fused_loss
    assert not captured("hand_written").is_averaged


@pytest.mark.nightly(held_by=(
    "tests/model/test_templates.py::test_a_sum_divided_by_something_of_the_batch_is_normalised_by_it",
    "tests/model/test_templates.py::test_what_is_added_to_a_mean_over_targets_is_averaged_over_micro_batches"))
def test_labels_smoothing_is_normalised_but_not_fused() -> None:
    class Smoothed(models.HandWritten):
        def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)

    result = capture(Smoothed(depth=1), pipeline=TEMPLATE_PIPELINE, target=CPU)
    assert result.has_loss_denominator and not result.fused_loss


def test_the_fused_loss_never_holds_all_logits() -> None:
    template = captured("qwen2").templates["epilogue"]
    b, t = template.symbols
    logits = b * t * models.VOCABULARY

    def largest(name: str) -> bool:
        values = [n.meta.get("val") for n in template.variant(name).graph.graph.nodes]
        return any(isinstance(v, Tensor) and sympy.simplify(template.symbolic(v.numel()) - logits) == 0 for v in values)

    assert largest("evaluate") and not largest("loss")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bias", "scale", "softcap"), [
    (False, 1.0, 0.0), (True, 0.5, 0.0), (True, 1.0, 3.0), (False, 2.0, 3.0)])
def test_linear_cross_entropy_equals_autograd_whatever_the_chunk(
    dtype: torch.dtype, bias: bool, scale: float, softcap: float
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(11, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(13, 8, dtype=dtype, requires_grad=True)
    offset = torch.randn(13, dtype=dtype, requires_grad=True) if bias else None
    targets, loss_denominator = torch.randint(0, 13, (11,)), torch.tensor(7.0)
    targets[3] = -100
    leaves = [x for x in (hidden, weight, offset) if x is not None]
    scores = F.linear(hidden.float(), weight.float(), None if offset is None else offset.float()) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    loss = F.cross_entropy(scores, targets, reduction="sum") / loss_denominator
    reference = [loss, *torch.autograd.grad(loss, leaves)]
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for chunk in (4, 11, 64):
        results = torch.ops.megacompile.linear_cross_entropy(
            hidden, weight, offset, targets, loss_denominator, -100, scale, softcap, chunk, True)
        assert results[2].dtype is torch.float32
        through = torch.autograd.grad(results[0], leaves)
        for a, b in zip([results[0], *through], reference, strict=True):
            assert (a - b).norm() <= tolerance * b.norm()
        for direct, differentiated in zip(results[1:], through, strict=False):
            torch.testing.assert_close(direct.to(dtype), differentiated)


# ------------------------------------------------------------------ attention
@pytest.mark.parametrize(("device", "dtype", "width", "window", "softcap", "kernel"), [
    ("cpu", torch.float32, 8, 0, 0.0, "flash_cpu"),
    ("cpu", torch.bfloat16, 8, 0, 0.0, "flash_cpu"),
    ("cpu", torch.float32, 8, 4, 0.0, "math"),
    ("cuda", torch.bfloat16, 64, 0, 0.0, "flash"),
    ("cuda", torch.bfloat16, 64, 128, 0.0, "flash"),
    ("cudnn", torch.bfloat16, 128, 0, 0.0, "cudnn"),
    ("cudnn", torch.bfloat16, 256, 0, 0.0, "flash"),
    ("cudnn", torch.bfloat16, 64, 128, 0.0, "flash"),
    ("cudnn", torch.float32, 64, 0, 0.0, "math"),
    ("cuda", torch.bfloat16, 64, 0, 30.0, "math"),
    ("cuda", torch.bfloat16, 12, 0, 0.0, "math"),
    ("cuda", torch.float32, 64, 0, 0.0, "math"),
])
def test_the_attention_pass_picks_the_kernel_of_the_target(
    device: str, dtype: torch.dtype, width: int, window: int, softcap: float, kernel: str
) -> None:
    graph = fx.Graph()
    query = graph.placeholder("query")
    query.meta["example_value"] = torch.empty(2, 4, 6, width, dtype=dtype)
    call = graph.call_function(torch.ops.megacompile.attention, (query, query, query, 1.0, window, softcap, "neutral"))
    graph.output((call,))
    module = fx.GraphModule(nn.Module(), graph)
    before = module.code
    target = Target("cuda", dtype, "cudnn") if device == "cudnn" else Target(device, dtype)
    lowered = attention.run(module, target)
    assert [n.args[-1] for n in lowered.graph.nodes if n.op == "call_function"] == [kernel]
    assert module.code == before, "a pass is pure"


def test_a_models_own_causal_attention_becomes_ours_and_a_masked_one_stays() -> None:
    assert count(captured("hand_written").templates["decoder"].variant("forward").graph, ATTENTION) == 1

    class Masked(models.HandWrittenLayer):
        def forward(self, x: Tensor) -> Tensor:
            q = self.norm(x)[:, None]
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
            return x + F.scaled_dot_product_attention(q, q, q, attn_mask=mask)[:, 0]

    model = type("Model", (models.HandWritten,), {"layer_class": Masked})(depth=1)
    graph = capture(model, pipeline=TEMPLATE_PIPELINE, target=CPU).templates["decoder"].variant("forward").graph
    assert count(graph, ATTENTION) == 0


def test_a_template_for_cuda_is_made_without_one_and_names_no_cpu() -> None:
    result = captured("hand_written", target=Target("cuda", torch.bfloat16), depth=1)
    text = "".join(t.variant(n).graph.code for t in result.templates.values() for n in t.variant_names)
    assert "device(type='cuda')" in text and "type='cpu'" not in text and "for_cpu" not in text


def reference_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float,
                        sinks: Tensor | None = None) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    if window:
        mask &= ~torch.ones_like(mask).tril(-window)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        return torch.cat([sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1), scores], -1).softmax(-1)[..., 1:] @ v
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize(("kernel", "window", "softcap"), [
    ("neutral", 0, 0.0), ("math", 3, 0.0), ("math", 0, 2.0), ("math", 4, 2.0), ("math", 100, 0.0),
    ("flash_cpu", 0, 0.0)])
def test_attention_kernels_equal_autograd(kernel: str, window: int, softcap: float, heads: int, has_sinks: bool) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 9, 4, 8).transpose(1, 2).requires_grad_()
    k, v = (torch.randn(2, 9, heads, 8).transpose(1, 2).requires_grad_() for _ in range(2))
    sinks = torch.randn(4, requires_grad=True) if has_sinks else None
    out, logsumexp = torch.ops.megacompile.attention(q, k, v, 0.3, window, softcap, kernel, None, sinks)
    expected = reference_attention(q, k, v, 0.3, window, softcap, sinks)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    assert logsumexp.dtype is torch.float32 and logsumexp.shape == (2, 4, 9)
    grad = torch.randn_like(expected)
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    gradients, reference = (torch.autograd.grad(result, inputs, grad) for result in (out, expected))
    for a, b in zip(gradients, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("length", [3, 4, 8, 9, 13])
def test_attention_of_blocks_equals_attention_of_all_positions_at_once(length: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, length, heads, 8).transpose(1, 2) for heads in (4, 2, 2))

    def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        assert query.shape[2] <= 4 and key.shape[2] <= 4
        scores = 3 * query @ key.repeat_interleave(2, 1).transpose(2, 3)
        if causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[2:], dtype=torch.bool).tril(), float("-inf"))
        return scores.softmax(-1) @ value.repeat_interleave(2, 1), scores.logsumexp(-1)

    out, logsumexp = in_blocks(attend, q, k, v, 4)
    expected, sums = torch.ops.megacompile.attention(q, k, v, 3.0, 0, 0.0, "math")
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(logsumexp, sums)


def test_a_query_that_sees_a_sink_alone_gives_zeros() -> None:
    """Padding on the left: nothing of it reaches gradients, the sink's either."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    sinks = torch.randn(2, requires_grad=True)
    segments = torch.tensor([[-1, -1, 0, 0, 0]], dtype=torch.int32)
    out, _ = torch.ops.megacompile.attention(q, k, v, 0.3, 0, 0.0, "math", segments, sinks)
    seen = [x[:, :, 2:].detach().requires_grad_() for x in (q, k, v)]
    alone = sinks.detach().requires_grad_()
    expected = reference_attention(*seen, 0.3, 0, 0.0, alone)
    assert not out[:, :, :2].any()
    torch.testing.assert_close(out[:, :, 2:], expected)
    sent = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, k, v, sinks), sent)
    wanted = torch.autograd.grad(expected, (*seen, alone), sent[:, :, 2:])
    for ours_, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours_[:, :, 2:] if ours_.dim() == 4 else ours_, theirs)
        assert ours_.dim() < 4 or not ours_[:, :, :2].any()


@pytest.mark.parametrize("kernel", ["math", "flash_cpu"])
def test_attention_kernels_return_the_layout_that_the_fakes_promise(kernel: str) -> None:
    q, k = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8)
    options = (0.3, 0, 0.0, kernel)
    results = torch.ops.megacompile.attention(q, k, k, *options)
    gradients = torch.ops.megacompile.attention_backward(q, q, k, k, *results, *options)
    promised = ours._attention_fake(q, k, k, *options)
    promised_gradients = ours._attention_backward_fake(q, q, k, k, *results, *options)
    for real, fake in zip((*results, *gradients), (*promised, *promised_gradients), strict=True):
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("heads", [1, 4, 8])
@pytest.mark.parametrize(("kernel", "window", "width"), [
    ("flash", 0, 64), ("flash", 1, 64), ("flash", 100, 64), ("cudnn", 0, 64), ("cudnn", 0, 128), ("cudnn", 0, 72)])
def test_fused_kernels_on_cuda_equal_explicit_attention_and_their_layout_is_the_promised_one(
    kernel: str, window: int, width: int, heads: int, has_sinks: bool
) -> None:
    if kernel == "cudnn" and fused_kernel(torch.device("cuda")) != "cudnn":
        pytest.skip("cuDNN's attention is not used on this device")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 257, h, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
               for h in (8, heads, heads))
    grad = torch.randn_like(q)
    sinks = torch.randn(8, device="cuda", dtype=torch.bfloat16, requires_grad=True) if has_sinks else None
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    results, layouts = [], []
    for name in (kernel, "math"):
        out, logsumexp = torch.ops.megacompile.attention(q, k, v, 0.125, window, 0.0, name, None, sinks)
        results.append([out, logsumexp, *torch.autograd.grad(out, inputs, grad)])
        # (A dimension of size one may have any stride.)
        layouts.append([(r.shape, r.squeeze().stride(), r.dtype) for r in results[-1]])
    for fused, explicit in zip(*results, strict=True):
        # A window of one position has no gradient for query and key: what is left there is rounding, of either kernel.
        assert (fused.float() - explicit.float()).norm() <= 2e-2 * max(explicit.float().norm(), grad.float().norm())
    assert layouts[0] == layouts[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_blocks_of_cudnn_equal_its_attention_of_all_positions_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    if fused_kernel(torch.device("cuda")) != "cudnn":
        pytest.skip("cuDNN's attention is not used on this device")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, BLOCK + 1001, heads, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
               for heads in (4, 2, 2))
    out, logsumexp = torch.ops.megacompile.attention(q, k, v, 0.1, 0, 0.0, "cudnn")
    monkeypatch.setattr(kernels, "BLOCK", 2 * BLOCK)
    at_once, sums = torch.ops.megacompile.attention(q, k, v, 0.1, 0, 0.0, "cudnn")
    assert (out.float() - at_once.float()).norm() <= 5e-3 * at_once.float().norm()
    assert out.stride() == at_once.stride()
    torch.testing.assert_close(logsumexp, sums)


@pytest.mark.parametrize(("changed", "message"), [
    ({"attention_mask": torch.ones(1, 1, 2, 2)}, "attention mask"),
    ({"dropout": 0.1}, "attention dropout 0.1 in Module"),
    ({"is_causal": False}, "Module is not causal: only causal decoders can be streamed"),
    ({"s_aux": torch.ones(3)}, "sinks of Module are not one for each of 1 heads"),
    ({"position_bias": torch.ones(1)}, "attention argument position_bias"),
    ({"key": torch.ones(1, 1, 3, 8)}, "keys of other positions"),
])
def test_what_our_attention_cannot_do_is_refused(changed: dict, message: str) -> None:
    x = torch.randn(1, 1, 2, 8)
    with pytest.raises(UnsupportedError, match=message):
        ours.transformers_attention(nn.Module(), **{"query": x, "key": x, "value": x, "attention_mask": None, **changed})
    with pytest.raises(UnsupportedError, match="attention_mask"):
        ours.transformers_mask(attention_mask=torch.ones(1, 2))


# ------------------------------------------------------------------ accumulate in the GEMM
def products(template: Template, variant: str, operands: int = 2) -> set[str]:
    return {template.inputs[g.input].role.name for g in template.variant(variant).gradients if len(g.results) == operands}


@pytest.mark.parametrize("variant", ["backward", "recompute_backward"])
def test_every_projection_leaves_as_operands_and_nothing_else_does(variant: str) -> None:
    template = captured("qwen2").templates["decoder"]
    matrices = {x.role.name for x in template.inputs if x.role.kind == "parameter" and len(x.shape) == 2}
    assert len(matrices) == 7
    assert products(template, variant) == matrices
    assert count(template.variant(variant).graph, GEMMS) == count(
        captured("qwen2", (attention,)).templates["decoder"].variant(variant).graph, GEMMS) - 7


@pytest.mark.parametrize("family", [pytest.param("gpt2", marks=pytest.mark.nightly), "qwen2"])
def test_operands_have_the_shape_of_the_parameter(family: str) -> None:
    template = captured(family).templates["decoder"]
    variant = template.variant("recompute_backward")
    results = variant.graph.graph.output_node().args[0]
    for gradient in (g for g in variant.gradients if len(g.results) == 2):
        a, b = (results[i].meta["val"] for i in gradient.results)
        assert (a.shape[0], b.shape[1]) == template.inputs[gradient.input].shape


@pytest.mark.nightly(held_by=(
    "tests/model/test_expert_pieces.py::test_five_clipped_steps_are_native_pytorchs",
    "tests/model/test_templates.py::test_a_grouped_product_reads_rows_that_lie_in_columns"))
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])  # their experts' weights lie the one way and the other
def test_the_gradients_of_all_experts_leave_as_rows_and_are_multiplied_out_one_at_a_time(family: str) -> None:
    sizes = ({"num_experts": 16, "moe_intermediate_size": 64} if family == "qwen3_moe" else
             {"num_local_experts": 16, "intermediate_size": 64})
    model = models.build(family, num_hidden_layers=1, num_experts_per_tok=2, **sizes).bfloat16()
    whole, leaving = (api.capture(model, pipeline=pipeline, target=Target("cpu", torch.bfloat16)).templates["decoder"]
                      for pipeline in ((attention,), (attention, accumulate_in_gemm)))
    parameters = [x for x in whole.inputs if x.role.kind == "parameter"]
    experts = {x.role.name: math.prod(map(int, x.shape)) for x in parameters if len(x.shape) == 3}
    assert len(experts) == 2
    assert products(leaving, "backward", 3) == products(leaving, "recompute_backward", 3) == experts.keys()
    assert products(whole, "recompute_backward", 3) == set()

    torch.manual_seed(0)
    given = [_random(node.meta["val"], cost.at(whole, 3, 5))
             for node in whole.variant("recompute_backward").graph.graph.find_nodes(op="placeholder")]
    found, left = [], 0
    for template in (whole, leaving):
        variant = template.variant("recompute_backward")
        results = variant.graph(*given)
        by_name = {template.inputs[g.input].role.name: [results[i] for i in g.results] for g in variant.gradients}
        found.append({name: multiplied_out(*by_name[name]) for name in experts})
        left = sum({r.untyped_storage().data_ptr(): r.untyped_storage().nbytes() for r in results}.values())
    for name in experts:
        assert found[0][name].any() and torch.equal(found[0][name], found[1][name]), name
    # The largest is made beside everything that the variant leaves, and beside a hole that the one before has left.
    peak = cost.peak_bytes(leaving, leaving.variant("recompute_backward"), 3, 5)
    assert peak >= left + 2 * 2 * max(experts.values())


def _random(value: Tensor | int, size: Callable[[Any], int]) -> Tensor | int:
    if not isinstance(value, Tensor):
        return size(value)
    made = torch.randn([*map(size, value.shape)])
    return made.to(value.dtype) if value.is_floating_point() else torch.zeros_like(made, dtype=value.dtype)


def test_a_grouped_product_reads_rows_that_lie_in_columns() -> None:
    rows, others, ends = torch.randn(24, 9).t(), torch.randn(9, 8), torch.tensor([2, 2, 7], dtype=torch.int32)
    expected = torch.stack([rows[a:b].t() @ others[a:b] for a, b in ((0, 2), (2, 2), (2, 7))])
    torch.testing.assert_close(grouped_product(rows, others, ends), expected)


@pytest.mark.nightly(held_by=(
    "tests/model/test_templates.py::test_linear_cross_entropy_equals_autograd_whatever_the_chunk",
    "tests/model/test_templates.py::test_every_projection_leaves_as_operands_and_nothing_else_does"))
def test_an_unfused_head_leaves_as_operands_and_a_fused_one_in_float32() -> None:
    unfused = captured("qwen2", (attention, accumulate_in_gemm)).templates["epilogue"]
    assert products(unfused, "loss") == {"lm_head.weight"}
    model = models.build("qwen2").bfloat16()
    fused = api.capture(model, pipeline=TEMPLATE_PIPELINE, target=Target("cpu", torch.bfloat16)).templates["epilogue"]
    results = fused.variant("loss").graph.graph.output_node().args[0]
    dtypes = {fused.inputs[g.input].role.name: results[g.results[0]].meta["val"].dtype
              for g in fused.variant("loss").gradients}
    assert dtypes["lm_head.weight"] is torch.float32
