"""Products in float8: emulated, they are the same rounding written in plain PyTorch, and every plan gives the same bits."""
from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import engine
import peft
import pytest
import tiny_models
import torch
from test_fused_memory import allocated
from tiny_models import batch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

import megacompile
from megacompile import Float8
from megacompile.api import analyse
from megacompile.codegen import scaled_products
from megacompile.codegen.scaled_products import scaled_product
from megacompile.errors import LaneError, MegacompileError, ProgramError, UnsupportedError
from megacompile.frontend.ops import scaled_linear
from megacompile.frontend.templates.template import BATCH, LENGTH
from megacompile.ir.precision import PRECISIONS, precision_of, precision_text
from megacompile.ir.tokenwise import is_scaled
from megacompile.planning.config import StreamConfig
from megacompile.predict import cost
from megacompile.predict.hardware import Hardware
from megacompile.streaming.programs.captures import example_inputs

TINY = Float8(min_features=16, emulated=True)
RECIPES = [TINY, dataclasses.replace(TINY, gradients="e4m3"), dataclasses.replace(TINY, scaling="row", gradients="e4m3"),
           dataclasses.replace(TINY, weight_gradients="bfloat16"),
           dataclasses.replace(TINY, scaling="row", weight_gradients="bfloat16"), dataclasses.replace(TINY, scaling="row")]
#: Sizes of layers whose products take longer than other kernels.
WIDE = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8}
FIELDS = ("scaling", "gradients", "weight_gradients", "fast_accumulation", "emulated")
HIGHEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def build(bf16: bool = False, **changes: Any) -> Any:
    return tiny_models.build(bf16, **{"hidden_size": 32, "intermediate_size": 64, **changes})


def stream(model: Any, **options: Any) -> Any:
    return megacompile.stream(model, **{"device": "cpu", "compile": False, "micro_batch_size": 2, "precision": TINY, **options})


def gradients(model: Any, rows: int = 4, length: int = 9) -> tuple[float, dict[str, Tensor]]:
    """The loss of a batch and the gradients of all trained parameters."""
    loss = model(**batch(0, rows, length)).loss
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def templates(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = engine.templates(model)
    return found


# ---------------------------------------------------------------- the same rounding, written in plain PyTorch
def rounded(x: Tensor, dtype: torch.dtype, dim: int | None) -> Tensor:
    """The values that remain of x, in FP32. `dim`: the dimension that is summed over; None: one scale for all of x."""
    largest = x.abs().max() if dim is None else x.abs().max(dim, keepdim=True).values
    largest = largest.float().clamp(min=1e-20)
    highest = HIGHEST[dtype]
    return (x.float() * (highest / largest)).clamp(-highest, highest).to(dtype).float() * (largest / highest)


class Plain(torch.autograd.Function):
    """A linear layer whose operands are rounded before each product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Float8) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        ctx.recipe, dim = recipe, 1 if recipe.scaling == "row" else None
        y = rounded(x, torch.float8_e4m3fn, dim) @ rounded(weight, torch.float8_e4m3fn, dim).t()
        return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        low = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[ctx.recipe.gradients]
        by_rows = ctx.recipe.scaling == "row"
        of_x = rounded(g, low, 1 if by_rows else None) @ rounded(weight, torch.float8_e4m3fn, 0 if by_rows else None)
        if ctx.recipe.weight_gradients == "bfloat16":
            of_weight = g.t() @ x
        else:
            of_weight = rounded(g, low, 0 if by_rows else None).t() @ rounded(x, torch.float8_e4m3fn, 0 if by_rows else None)
        return of_x.to(x.dtype), of_weight.to(x.dtype), g.sum(0) if ctx.needs_input_grad[2] else None, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_an_emulated_product_is_the_same_rounding_in_plain_pytorch(recipe: Float8, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape).to(dtype).requires_grad_() for shape in ((3, 7, 48), (32, 48), (32,)))
    gradient = (torch.randn(3, 7, 32) * torch.logspace(-6, 0, 7)[:, None]).to(dtype)  # of very different sizes
    ours = torch.ops.megacompile.scaled_linear(x, weight, bias, *(getattr(recipe, name) for name in FIELDS))
    plain = Plain.apply(x.reshape(-1, 48), weight, bias, recipe)
    found = torch.autograd.grad(ours, (x, weight, bias), gradient)
    expected = torch.autograd.grad(plain, (x, weight, bias), gradient.reshape(-1, 32))
    # Scales are multiplied in another order, and kernels with scales of rows give bfloat16.
    close = 1e-2 if dtype == torch.bfloat16 or recipe.scaling == "row" else 1e-6
    torch.testing.assert_close(ours.reshape(-1, 32), plain, rtol=close, atol=close)
    for a, b in zip(found, expected, strict=True):
        assert (a - b.reshape(a.shape)).norm() <= close * b.norm()


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("summed", [64, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_of_pytorch_compute_what_the_emulation_does(scaling: str, summed: int, dtype: torch.dtype) -> None:
    """Those of the CPU here, which take the same arguments; for any number of tokens, which a weight gradient sums over."""
    torch.manual_seed(0)
    (a, scale_a), (b, scale_b) = (
        scaled_linear.quantized(torch.randn(rows, summed).bfloat16(), "e4m3", scaling) for rows in (48, 32))
    scale_b = scale_b.t() if scale_b.dim() else scale_b
    found, expected = (scaled_product(a, b.t(), scale_a, scale_b, None, dtype, kernel) for kernel in ("float8", "emulated"))
    assert found.dtype == expected.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_rounding_keeps_the_largest_value_and_is_to_nearest(name: str, scaling: str) -> None:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 16)[:, None]
    values, scale = scaled_linear.quantized(x, name, scaling)
    back, largest = values.float() * scale, x.abs().amax(1, keepdim=True) if scaling == "row" else x.abs().max()
    at_most = largest * 2.0 ** (-4 if name == "e4m3" else -3)  # half of the distance of the largest values
    assert ((back - x).abs() <= at_most * 1.001).all()
    assert back.abs().max() == pytest.approx(float(x.abs().max()), rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_not_hidden(bad: float) -> None:
    x = torch.randn(4, 32)
    x[1, 2] = bad
    values, _ = scaled_linear.quantized(x, "e4m3", "tensor")
    assert values.float().isnan().any()
    zeros, scale = scaled_linear.quantized(torch.zeros(4, 32), "e5m2", "tensor")
    assert torch.equal(zeros.float(), torch.zeros(4, 32)) and 0 < float(scale) < float("inf")


def test_a_model_trains_like_one_whose_layers_round_in_plain_pytorch() -> None:
    native = build()
    for layer in native.model.layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.forward = lambda x, own=module: Plain.apply(  # type: ignore[method-assign, misc]
                    x.reshape(-1, own.in_features), own.weight, own.bias, TINY).reshape(*x.shape[:-1], own.out_features)
    model = stream(build(), micro_batch_size=4)
    (loss, ours), (expected, theirs) = gradients(model), gradients(native)
    assert loss == pytest.approx(expected, rel=1e-4)
    for name, gradient in ours.items():  # a difference of one bit may round to the other neighbour
        assert (gradient - theirs[name]).norm() <= 0.05 * theirs[name].norm(), name
    model.megacompile.close()


# ---------------------------------------------------------------- the same bits under every plan
@pytest.mark.parametrize(("recipe", "bf16"), [
    (RECIPES[0], True), *(pytest.param(*other, marks=pytest.mark.nightly) for other in (
        (RECIPES[0], False), *itertools.product((RECIPES[2], RECIPES[3], RECIPES[5]), (False, True))))], ids=str)
def test_every_plan_gives_the_same_bits(recipe: Float8, bf16: bool) -> None:
    found = []
    for plan in ({"checkpoint_interval": 1, "reference": True}, {"checkpoint_interval": 3}, {"saved_layers": 3},
                 {"resident": "all"}, {"host_checkpoints": True},
                 {"residuals": "attention", "saved_layers": 2}):
        model = stream(build(bf16), precision=recipe, **plan)
        found.append(gradients(model))
        model.megacompile.close()
    (loss, first), *others = found
    for other, theirs in others:
        assert other == loss
        assert all(torch.equal(gradient, theirs[name]) for name, gradient in first.items())


def test_steps_give_the_same_bits_as_a_loop_and_as_one_program() -> None:
    weights = []
    for whole in (False, True):
        model = stream(build(True))
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
        for seed in range(3):
            if whole:
                model.megacompile.train_step(batch(seed, 4), optimizer)
            else:
                tiny_models.train_step(model, optimizer, seed, rows=4)
        weights.append(tiny_models.weights(model))
        model.megacompile.close()
    assert tiny_models.same_bits(*weights)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", [RECIPES[0], RECIPES[5]], ids=str)
def test_chunks_of_tokens_have_the_scales_of_the_whole_micro_batch(recipe: Float8) -> None:
    found = []
    for chunk in (0, 4):
        model = stream(build(), precision=recipe, token_chunk=chunk, checkpoint_interval=1)
        found.append(gradients(model))
        model.megacompile.close()
    (loss, whole), (other, chunked) = found
    assert loss == other
    for name, gradient in whole.items():
        assert (gradient - chunked[name]).norm() <= 1e-2 * gradient.norm(), name


@pytest.mark.nightly(held_by="tests/model/test_float8.py::test_a_model_trains_like_one_whose_layers_round_in_plain_pytorch")
def test_compiled_layers_round_alike() -> None:
    losses = []
    for compiled in (False, True):
        model = stream(build(num_hidden_layers=1), compile=compiled)
        losses.append(gradients(model)[0])
        model.megacompile.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


# ---------------------------------------------------------------- which products
def explained(model: Any, **options: Any) -> str:
    return megacompile.explain_capture(model, **{"device": "cpu", "precision": TINY, **options})


def test_all_linear_layers_are_rewritten_and_embedding_and_head_stay() -> None:
    text = explained(build())
    assert ("3 calls of decoder: self_attn.q_proj, self_attn.k_proj, self_attn.v_proj, self_attn.o_proj, mlp.gate_proj, "
            "mlp.up_proj, mlp.down_proj") in text
    assert "embedding and head stay" in text and "stays, since" not in text
    assert "float8" not in explained(build(), precision=None)


@pytest.mark.nightly(held_by="tests/model/test_float8.py::test_all_linear_layers_are_rewritten_and_embedding_and_head_stay")
def test_kept_products_and_layers_stay_and_layers_that_differ_have_their_own_template() -> None:
    text = explained(build(), precision=dataclasses.replace(TINY, keep=("down_proj", "model.layers.1")))
    assert "1 calls of decoder_1: no product" in text
    assert "2 calls of decoder: self_attn.q_proj" in text
    assert "stays, since it is kept by the recipe: mlp.down_proj" in text


@pytest.mark.nightly(held_by="tests/model/test_float8.py::test_all_linear_layers_are_rewritten_and_embedding_and_head_stay")
def test_products_with_small_weights_stay() -> None:
    text = explained(build(), precision=dataclasses.replace(TINY, min_features=32))
    assert "stays, since it has fewer than 32 inputs or outputs: self_attn.k_proj, self_attn.v_proj" in text


@pytest.mark.nightly(held_by="tests/model/test_float8.py::test_all_linear_layers_are_rewritten_and_embedding_and_head_stay")
def test_products_whose_sides_16_does_not_divide_stay() -> None:
    text = explained(build(intermediate_size=56))
    assert "stays, since it has inputs or outputs that 16 does not divide: mlp.gate_proj, mlp.up_proj, mlp.down_proj" in text


@pytest.mark.nightly(held_by="tests/model/test_float8.py::test_steps_give_the_same_bits_as_a_loop_and_as_one_program")
@pytest.mark.parametrize("stored", [None, "nf4"])
def test_frozen_weights_below_adapters_are_multiplied_in_float8(stored: str | None) -> None:
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(build(True), adapter, autocast_adapter_dtype=False)
    model = stream(megacompile.quantize(model, stored) if stored else model, saved_layers=3)
    text = megacompile.explain_capture(model)
    assert "2 calls of decoder_1: self_attn.q_proj.base_layer" in text, "the first layer has no gradient of its input"
    assert "lora_A" in text.partition("stays, since")[2]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = megacompile.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = [tiny_models.train_step(model, optimizer, rows=4) for _ in range(6)]
    assert losses[-1] < losses[0]
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and all("lora" in name for name in changed)
    model.megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_float8.py::test_all_linear_layers_are_rewritten_and_embedding_and_head_stay")
def test_routers_and_experts_stay() -> None:
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=4, num_experts_per_tok=2)).bfloat16()
    text = explained(model)
    assert "2 calls of decoder: self_attn.q_proj, self_attn.k_proj, self_attn.v_proj, self_attn.o_proj\n" in text
    assert "kept by the recipe: mlp.gate" in text and "grouped products of experts stay" in text
    model = stream(model, micro_batch_size=4)
    assert 3 < gradients(model)[0] < 5
    model.megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_float8.py::test_steps_give_the_same_bits_as_a_loop_and_as_one_program")
def test_tied_weights_train() -> None:
    model = stream(build(True, tie_word_embeddings=True))
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    losses = [tiny_models.train_step(model, optimizer, rows=4) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.1
    model.megacompile.close()


# ---------------------------------------------------------------- plans, costs and memory
def test_no_weight_in_float8_is_a_residual() -> None:
    model = stream(build(True), saved_layers=3)
    joint = templates(model)["decoder"]._joint
    kept = [n.meta["val"] for n in joint.residuals if isinstance(n.meta["val"], Tensor)]
    assert kept and all(value.numel() == 1 for value in kept if all(isinstance(size, int) for size in value.shape))
    assert any(value.dtype == torch.float8_e4m3fn for value in kept)
    model.megacompile.close()


def test_weight_gradients_leave_as_operands_in_float8_with_scales() -> None:
    model = stream(build(True), saved_layers=1)
    decoder = templates(model)["decoder"]
    for variant in ("backward", "recompute_backward"):
        by_kernel = [gradient for gradient in decoder.variant(variant).gradients if gradient.kernel]
        assert len(by_kernel) == 7 and all(len(gradient.results) == 4 for gradient in by_kernel)
        assert not [n for n in decoder.variant(variant).graph.graph.nodes
                    if is_scaled(n) and n.meta["val"].dtype is torch.float32]
    model.megacompile.close()


@pytest.mark.nightly(
    held_by="tests/model/test_float8.py::test_profiles_have_a_rate_for_float8_where_the_device_has_such_products")
def test_float8_is_a_rate_of_its_own_in_predictions() -> None:
    with torch.device("meta"):
        model = tiny_models.build(True, **WIDE)
    plans = {name: megacompile.schedule(model, batch=16, length=512, hardware="h200", precision=name)
             for name in (None, "float8", "float8:weight_gradients=bfloat16", "float8-emulated")}
    work = {name: plan.durations().work("decoder", "recompute_backward") for name, plan in plans.items()}
    assert work[None].float8_flops == 0 and work["float8"].flops == work[None].flops
    assert work["float8"].gemm_flops == 0 and work["float8"].float8_flops == work[None].gemm_flops
    assert 0 < work["float8:weight_gradients=bfloat16"].gemm_flops < work["float8:weight_gradients=bfloat16"].float8_flops
    seconds = {name: sum(plan.durations().seconds("decoder", "recompute_backward", 16, 512)) for name, plan in plans.items()}
    assert seconds["float8"] < seconds["float8:weight_gradients=bfloat16"] < seconds[None] < seconds["float8-emulated"]
    layers = {name: plan.captured.templates["decoder"] for name, plan in plans.items()}
    assert cost.residual_bytes(layers["float8"], 16, 512) <= 1.1 * cost.residual_bytes(layers[None], 16, 512)
    assert "float8 (one scale for each operand" in plans["float8"].explain()


def test_a_cublaslt_that_cannot_be_loaded_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    scaled_products._library.cache_clear()
    with pytest.raises(LaneError, match=r"libcublasLt\.so\.99.*weight_gradients=bfloat16"):
        scaled_products._library()


@pytest.mark.nightly(
    held_by="tests/model/test_float8.py::test_profiles_have_a_rate_for_float8_where_the_device_has_such_products")
@pytest.mark.parametrize("whole_step", [False, True])
def test_the_planner_also_tries_larger_micro_batches_in_float8(whole_step: bool) -> None:
    with torch.device("meta"):
        model = tiny_models.build(True, **WIDE)

    def schedule(precision: str | None, **options: Any) -> megacompile.Schedule:
        return megacompile.schedule(model, batch=64, length=1024, hardware="h200", precision=precision, whole_step=whole_step,
                                    **options)

    chosen, *others = (schedule("float8", micro_batch_size=size) for size in (None, 16, 32))
    assert max(chosen.plan.micro_batches) in (16, 32) and max(schedule(None).plan.micro_batches) == 16
    assert chosen.simulate().step_s <= 1.003 * min(each.simulate().step_s for each in others)
    assert max(chosen.plan.micro_batches) == 32, "weights are rounded less often"


@pytest.mark.nightly(held_by="tests/model/test_float8.py::test_weight_gradients_leave_as_operands_in_float8_with_scales")
def test_a_gradient_in_float8_takes_no_temporary_where_it_is_added_in_its_product() -> None:
    with torch.device("meta"):
        model = tiny_models.build(True, **WIDE | {"hidden_size": 2048, "intermediate_size": 8192})
    plans = [megacompile.schedule(model, batch=1, length=64, hardware="h200", precision=name)
             for name in ("float8", "float8:scaling=row")]
    added, written = (cost.peak_bytes(layer, layer.variant("backward"), 1, 64, fused=True)
                      for layer in (plan.captured.templates["decoder"] for plan in plans))
    assert written >= 2 * 4 * 2048 * 8192 > added


def test_profiles_have_a_rate_for_float8_where_the_device_has_such_products() -> None:
    for name in ("h100", "h200", "b200", "l40s", "rtx4090", "rtx5090", "gb10", "8xh200", "4xrtx4090"):
        rates = Hardware.find(name).gemm_flops
        assert 1.4 * rates["bfloat16"] <= rates["float8"] <= 1.6 * rates["bfloat16"]  # as measured on an H200
    for name in ("a100", "rtx3090"):
        assert "float8" not in Hardware.find(name).gemm_flops


@pytest.mark.nightly(held_by="tests/model/test_float8.py::test_weight_gradients_leave_as_operands_in_float8_with_scales")
@pytest.mark.parametrize("recipe", [RECIPES[0], RECIPES[2], RECIPES[3]], ids=str)
def test_a_layer_takes_no_more_memory_than_predicted(recipe: Float8) -> None:
    with torch.device("meta"):
        model = tiny_models.build(True, hidden_size=512, intermediate_size=1024, num_attention_heads=4, num_key_value_heads=4)
    captured, _ = analyse(model, StreamConfig.of(device="cpu", precision=recipe), "cpu", None, None)
    decoder, numbers = captured.templates["decoder"], {BATCH: 2, LENGTH: 128}
    for name in ("forward", "recompute_backward"):
        variant = decoder.variant(name)
        fakes = example_inputs(decoder, variant, lambda size: int(size.xreplace(numbers)), torch.device("cpu"))
        given = [torch.randn_like(x) if isinstance(x, Tensor) and x.is_floating_point() else x for x in fakes]
        found = allocated(lambda run=variant.graph, given=given: run(*given))  # type: ignore[misc]
        assert found <= cost.peak_bytes(decoder, variant, 2, 128) <= 1.6 * found, name


# ---------------------------------------------------------------- texts of programs
@pytest.mark.nightly(held_by="tests/model/test_float8.py::test_steps_give_the_same_bits_as_a_loop_and_as_one_program")
def test_a_text_is_refused_on_a_model_of_another_precision_and_runs_on_one_of_its_own() -> None:
    precisions = {"None": None, "'float8-emulated:min_features=16'": TINY,
                  "'float8-emulated:scaling=row,min_features=16'": RECIPES[5]}
    models = {name: stream(build(num_hidden_layers=1), precision=recipe) for name, recipe in precisions.items()}
    texts = {name: model.megacompile.text(batch(0, 4)) for name, model in models.items()}
    assert texts["None"].count("program.precision(") == 0
    for due, model in models.items():
        expected = gradients(model)[0]
        for given, text in texts.items():
            if given == due:
                continue
            with pytest.raises(ProgramError) as caught:
                model.megacompile.load_program(text)
            assert str(caught.value) == (
                f"the program is for precision={given}, but this model is streamed with precision={due}: print this model's "
                "with model.megacompile.text(batch), or stream with the program's precision")
        model.megacompile.load_program(texts[due])
        assert gradients(model)[0] == expected
        model.megacompile.close()


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(("precision", "message"), [
    ("float16", "precision must be 'float8' or 'float8-emulated', a megacompile.Float8 or None, "
                "not 'float16': leave it out for bfloat16"),
    ("float8:scales=row", "precision has no field 'scales': it has scaling, gradients, weight_gradients"),
    ("float8:scaling=column", "Float8 scaling must be one of tensor, row, not 'column'"),
    ("float8:min_features=few", "min_features must be a whole number of at least 1, not 'few'")])
def test_an_unknown_precision_is_refused_with_what_there_is(precision: str, message: str) -> None:
    with pytest.raises(MegacompileError, match=message.replace("(", r"\(")):
        stream(build(), precision=precision)


def test_names_that_are_kept_must_be_text() -> None:
    with pytest.raises(MegacompileError, match="Float8 keep must be names of modules, not 3"):
        Float8(keep=3)  # type: ignore[arg-type]
    assert Float8(keep="down_proj").keep == ("down_proj",)  # type: ignore[arg-type]


@pytest.mark.nightly(held_by="tests/model/test_float8.py::test_names_that_are_kept_must_be_text")
def test_a_name_that_no_module_has_cannot_be_kept() -> None:
    with pytest.raises(MegacompileError, match=r"Float8 keep='\*down_proj' is in no name of Qwen2ForCausalLM's modules: give"):
        stream(build(num_hidden_layers=1), precision=dataclasses.replace(TINY, keep=("down_proj", "*down_proj")))


def test_fields_may_follow_the_name_of_a_precision() -> None:
    assert precision_of("float8:scaling=row, keep=down_proj+layers.0,min_features=64") == Float8(
        scaling="row", keep=("down_proj", "layers.0"), min_features=64)
    assert precision_of(None) is None and precision_of(TINY) is TINY and precision_of("float8") == PRECISIONS["float8"]
    for recipe in (*RECIPES, *PRECISIONS.values(), Float8(keep=("down_proj", "layers.0"))):
        assert precision_of(precision_text(recipe).strip("'")) == recipe


def test_a_device_without_float8_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="a CPU cannot multiply in float8: leave precision out, or use"):
        stream(build(True), precision="float8")
    with torch.device("meta"):
        model = build(True)
    with pytest.raises(UnsupportedError, match="NVIDIA A100 has no rate for products in float8, which take compute capability"):
        megacompile.schedule(model, batch=2, length=8, hardware="a100", precision="float8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A10")
    from megacompile.planning.precision import check_float8
    with pytest.raises(UnsupportedError, match=r"NVIDIA A10 has compute capability 8.6 and cannot multiply in float8"):
        check_float8(Float8(), torch.device("cuda", 0))
    check_float8(Float8(emulated=True), torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_float8(Float8(), torch.device("cuda", 0))


@pytest.mark.nightly(held_by="tests/model/test_float8.py::test_an_unknown_precision_is_refused_with_what_there_is")
def test_a_model_without_a_product_for_float8_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"no product of Qwen2ForCausalLM's layers would be computed in float8 "
                                               r"\(model.layers.0.self_attn.q_proj has fewer than 256 inputs or outputs\)"):
        stream(build(num_hidden_layers=1), precision="float8-emulated")


def test_float8_without_its_pass_is_refused() -> None:
    passes = megacompile.passes.replace_pass(megacompile.passes.TEMPLATE_PIPELINE, "float8")
    with pytest.raises(MegacompileError, match="precision has no effect without the template pass float8"):
        stream(build(), template_passes=passes)


def test_an_unknown_kernel_is_an_error() -> None:
    values = torch.zeros(16, 16).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="no such kernel: other"):
        torch.ops.megacompile.scaled_mm(values, values.t(), torch.ones(()), torch.ones(()), None, torch.float32, "other")


def test_a_plain_copy_of_a_streamed_model_has_its_own_precision() -> None:
    native = build(True)
    model = stream(copy.deepcopy(native))
    model.megacompile.close()
    loss = float(model(**batch(0, 4)).loss.detach())
    assert loss == float(native(**batch(0, 4)).loss.detach())
