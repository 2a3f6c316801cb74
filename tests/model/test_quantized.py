"""Models with frozen weights in four or eight bits train, generate, save and resume as they do unstreamed."""
from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bitsandbytes_models
import engine
import peft
import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from tiny_models import batch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import megacompile
from megacompile.errors import ArgumentError, CheckpointError, UnsupportedError
from megacompile.weights.codes import FORMATS, FourBits, QuantizedLinear

LORA = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"])
PACKED = ".quant_state.bitsandbytes__nf4"


def build(bf16: bool = False, layers: int = 2) -> Any:
    return tiny_models.build(bf16, hidden_size=32, intermediate_size=64, num_hidden_layers=layers)


def adapted(stored: str, model: Any = None) -> Any:
    """With an adapter that has an effect."""
    model = peft.get_peft_model(build() if model is None else model, copy.deepcopy(LORA), autocast_adapter_dtype=False)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return megacompile.quantize(model, stored)


def quantized(model: nn.Module) -> list[QuantizedLinear]:
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build(bf16=True, layers=1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["nf4", pytest.param("int8", marks=pytest.mark.nightly)])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """A streamed model, and the same unstreamed."""
    native = adapted(request.param)
    model = megacompile.stream(copy.deepcopy(native), device="cpu", micro_batch_size=2, checkpoint_interval=2)
    yield model, native
    model.megacompile.close()


def test_adapters_over_quantized_weights_train_as_they_do_natively(pair: tuple[Any, Any]) -> None:
    model, native = pair
    ours = megacompile.AdamW(trained(model), lr=1e-2)
    theirs = torch.optim.AdamW(trained(native), lr=1e-2)
    before = [layer.weight.clone() for layer in quantized(model)]
    for step in range(5):
        losses = [each(**batch(step)).loss for each in (model, native)]
        for loss in losses:
            loss.backward()
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
        if step == 0:
            tiny_models.assert_same_gradients(model, native)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    tiny_models.assert_same_weights(model, native)
    assert all(torch.equal(a, b.weight) for a, b in zip(before, quantized(model), strict=True))


def test_a_streamed_quantized_model_generates_what_it_generates_unstreamed(pair: tuple[Any, Any]) -> None:
    model, native = pair
    model.load_state_dict(native.state_dict())
    ids = batch()["input_ids"][:, :5]
    ours, theirs = (each.eval().generate(input_ids=ids, max_new_tokens=6, do_sample=False) for each in (model, native))
    assert torch.equal(ours, theirs)
    model.train()
    native.train()


@pytest.mark.parametrize("options", [
    {"saved_layers": 1}, {"resident": "all"}, pytest.param({"compile": True}, marks=pytest.mark.nightly), {"reference": True}],
    ids=str)
def test_every_plan_expands_the_same_weights(options: dict[str, Any]) -> None:
    native = adapted("nf4", build(layers=1 if "compile" in options else 2))
    model = megacompile.stream(copy.deepcopy(native), **{"device": "cpu", "compile": False, "micro_batch_size": 2, **options})
    losses = [each(**batch()).loss for each in (model, native)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    tiny_models.assert_same_gradients(model, native)
    model.megacompile.close()


def test_layers_that_keep_residuals_expand_weights_again() -> None:
    model = megacompile.stream(adapted("nf4"), device="cpu", compile=False)
    templates = engine.templates(model)
    for template in (templates[name] for name in templates if name.startswith("decoder")):
        kept = [tuple(n.meta["val"].shape) for n in template._joint.residuals if isinstance(n.meta["val"], torch.Tensor)]
        assert kept and not [shape for shape in kept if all(isinstance(size, int) for size in shape)], "all depend on a batch"
    model.megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_quantized.py::test_adapters_over_quantized_weights_train_as_they_do_natively")
def test_tiles_hold_half_a_byte_for_each_weight_and_count_weights() -> None:
    plain, packed = (megacompile.schedule(model, batch=2, length=8, device="cpu") for model in
                     (peft.get_peft_model(build(), LORA), adapted("nf4")))
    sizes = [sum(layout.parameters for layout in made.tiling.layouts.values()) for made in (plain, packed)]
    assert sizes[0] == sizes[1]
    assert plain.tiling.operations() == packed.tiling.operations()
    linear = sum(layer.out_features * layer.in_features for layer in quantized(adapted("nf4")))
    freed = sum(sum(made.tiling.host_parts().values()) * sign for made, sign in ((plain, 1), (packed, -1)))
    assert freed > 2 * linear  # of 4 bytes each


# ---------------------------------------------------------------- files
@pytest.mark.parametrize("stored", ["nf4", pytest.param("int8", marks=pytest.mark.nightly)])
def test_weights_are_rounded_while_they_are_read(saved: Path, stored: str) -> None:
    model = megacompile.from_pretrained(saved, quantize=stored, adapter=LORA, device="cpu", compile=False)
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
    expected = adapted(stored, loaded).state_dict()
    for name, value in model.state_dict().items():
        assert "lora_" in name or torch.equal(value, expected[name]), name
    assert {p.dtype for p in trained(model)} == {torch.bfloat16} and len(quantized(model)) == 7
    model.megacompile.close()


@pytest.fixture
def packed(saved: Path, tmp_path: Path) -> Path:
    """A folder in the layout of bitsandbytes, with double quantization."""
    return bitsandbytes_models.write_four_bits(saved, tmp_path)


def test_a_checkpoint_of_bitsandbytes_is_read_as_it_is(saved: Path, packed: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16).requires_grad_(False)
    model = megacompile.from_pretrained(packed, trainable=False, device="cpu", compile=False)
    ours, theirs = megacompile.quantize(plain, "nf4").state_dict(), model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    model.megacompile.close()


def change(folder: Path, name: str, value: torch.Tensor | None) -> None:
    """Replaces a tensor in a file, or removes it."""
    tensors = load_file(folder / "model.safetensors")
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_damaged_and_foreign_checkpoints_of_bitsandbytes_are_refused(packed: Path) -> None:
    def read() -> None:
        megacompile.from_pretrained(packed, trainable=False, device="cpu", compile=False)

    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(ArgumentError, match="is quantized already: leave quantize out"):
        megacompile.from_pretrained(packed, quantize="int8", trainable=False, device="cpu")
    state = load_file(packed / "model.safetensors")[f"{name}{PACKED}"]
    changed = bytes(state.tolist()).replace(b'"nested_blocksize": 256', b'"nested_blocksize": 512')
    change(packed, f"{name}{PACKED}", torch.tensor(list(changed), dtype=torch.uint8))
    with pytest.raises(UnsupportedError, match="has nested blocks of 512 scales, not 256: quantize the model again"):
        read()
    changed = bytes(state.tolist()).replace(b'"blocksize": 64', b'"blocksize": 48')
    change(packed, f"{name}{PACKED}", torch.tensor(list(changed), dtype=torch.uint8))
    with pytest.raises(UnsupportedError, match="is stored in blocks of 48, which do not divide it: leave the layer in"):
        read()
    changed = bytes(state.tolist()).replace(b'"nested_offset"', b'"another_offset"')
    change(packed, f"{name}{PACKED}", torch.tensor(list(changed), dtype=torch.uint8))
    with pytest.raises(CheckpointError, match="is not the state of a quantized weight: copy or download it again"):
        read()
    change(packed, f"{name}{PACKED}", state[1:].clone())
    with pytest.raises(CheckpointError, match="is not the state of a quantized weight: copy or download it again"):
        read()
    change(packed, f"{name}{PACKED}", state)
    absmax = load_file(packed / "model.safetensors")[f"{name}.absmax"]
    change(packed, f"{name}.absmax", absmax[1:].clone())
    with pytest.raises(CheckpointError, match=r"bytes of codes and .* bytes of scales, not .*: copy or download"):
        read()
    change(packed, f"{name}.absmax", None)
    with pytest.raises(CheckpointError, match=r"absmax is in no file, and belongs to a quantized weight"):
        read()


def test_a_stack_of_matrices_in_eight_bits_is_refused(saved: Path, tmp_path: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    tensors |= {f"{name}.weight": torch.zeros(2, 3, 4, dtype=torch.int8), f"{name}.SCB": torch.ones(3)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((saved / "config.json").read_text())
    how = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": how}))
    with pytest.raises(UnsupportedError, match=r"of \[2, 3, 4\] is not a matrix: only quantized matrices are supported"):
        megacompile.from_pretrained(tmp_path, trainable=False, device="cpu", compile=False)


@pytest.mark.nightly(held_by="tests/model/test_quantized.py::test_weights_are_rounded_while_they_are_read")
def test_named_layers_are_quantized_while_they_are_read(saved: Path) -> None:
    options: dict[str, Any] = dict(layers="model.layers", device="cpu", compile=False)
    model = megacompile.from_pretrained(saved, quantize="int8", trainable=False, **options)
    assert len(quantized(model)) == 7
    model.megacompile.close()


def test_a_refused_option_leaves_layers_of_bitsandbytes_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from megacompile import api

    monkeypatch.setattr(api, "adopt_bitsandbytes", lambda model: pytest.fail("the model was changed first"))
    with pytest.raises(megacompile.MegacompileError, match="has no option depth"):
        megacompile.stream(build(), depth=3)


def test_the_command_s_formats_are_those_of_quantize() -> None:
    from megacompile.tools.options import Stored

    assert [each.value for each in Stored] == list(FORMATS)


def test_a_quantized_weight_outside_the_layers_is_refused(packed: Path) -> None:
    tensors = load_file(packed / "model.safetensors")
    up = "model.layers.0.mlp.up_proj.weight"
    moved = {key.replace(up, "lm_head.weight"): value.clone() for key, value in tensors.items() if key.startswith(up)}
    state = json.loads(bytes(tensors[f"{up}{PACKED}"].tolist()))
    moved[f"lm_head.weight{PACKED}"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    save_file({**tensors, **moved}, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedError, match=r"lm_head\.weight is quantized, and is not the weight of a frozen nn.Linear"):
        megacompile.from_pretrained(packed, trainable=False, device="cpu", compile=False)


def test_a_stopped_run_resumes_to_the_bit(tmp_path: Path) -> None:
    def run(steps: range, load: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = megacompile.stream(adapted("nf4"), device="cpu", compile=False)
        optimizer = megacompile.AdamW(trained(model), lr=1e-2)
        if load:
            megacompile.load_checkpoint(tmp_path, model, optimizer)
        losses = [tiny_models.train_step(model, optimizer, step) for step in steps]
        if steps.stop == 2:
            megacompile.save_checkpoint(tmp_path, model, optimizer)
        state = tiny_models.state_of(model, optimizer)
        model.megacompile.close()
        return losses, state

    first, _ = run(range(2), load=False)
    second, resumed = run(range(2, 4), load=True)
    losses, whole = run(range(4), load=False)
    assert first + second == losses and tiny_models.same_bits(resumed, whole)


@pytest.mark.nightly(held_by=(
    "tests/model/test_quantized.py::test_an_adapter_is_merged_into_the_values_of_quantized_weights_in_the_dtype_of_the_model",
    "tests/model/test_adapters.py::test_a_saved_adapter_is_that_of_peft"))
def test_an_adapter_is_saved_and_a_quantized_model_is_not(saved: Path, tmp_path: Path) -> None:
    model = megacompile.from_pretrained(saved, quantize="nf4", adapter=LORA, device="cpu", compile=False)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists() and not list(tmp_path.glob("model*.safetensors"))
    model.megacompile.close()
    model = megacompile.from_pretrained(saved, quantize="nf4", trainable=False, device="cpu", compile=False)
    with pytest.raises(UnsupportedError, match="quantized weights are not saved as a model: save the adapter, or"):
        model.save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match="the layers of a streamed model cannot be replaced: call model"):
        megacompile.dequantize(model)
    model.megacompile.close()
    megacompile.dequantize(model).save_pretrained(tmp_path / "whole")
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.bfloat16)
    assert torch.equal(rounded(**batch()).loss, model(**batch()).loss)


@pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_an_adapter_is_merged_into_the_values_of_quantized_weights_in_the_dtype_of_the_model(
        bf16: bool, adapter_dtype: torch.dtype) -> None:
    model = adapted("nf4", peft.get_peft_model(build(bf16), LORA).unload()).eval()
    for parameter in trained(model):
        parameter.data = parameter.data.to(adapter_dtype)
    with torch.no_grad():
        expected = model(**batch()).logits
        merged = megacompile.dequantize(model).merge_and_unload()
        assert {p.dtype for p in merged.parameters()} == {torch.bfloat16 if bf16 else torch.float32}
        tolerance = 1e-2 if bf16 or adapter_dtype != torch.float32 else 1e-5
        torch.testing.assert_close(merged(**batch()).logits, expected, atol=tolerance * float(expected.abs().max()), rtol=0)


def test_the_bias_of_an_expanded_layer_has_the_dtype_of_its_weight() -> None:
    layers = quantized(model := adapted("int8"))
    names = [name for name, module in model.named_modules() if module in layers and module.bias is not None]
    megacompile.dequantize(model, torch.bfloat16)
    assert names
    for layer in map(model.get_submodule, names):
        assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16


@pytest.mark.nightly(held_by="tests/model/test_quantized.py::test_adapters_over_quantized_weights_train_as_they_do_natively")
def test_dora_reads_the_values_of_quantized_weights() -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], use_dora=True)
    model = megacompile.quantize(peft.get_peft_model(build(layers=1), config))
    native = megacompile.dequantize(copy.deepcopy(model), torch.float32)
    model = megacompile.stream(model, device="cpu", compile=False)
    losses = [each(**batch()).loss for each in (model, native)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for ours, theirs in zip(trained(model), trained(native), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert (ours.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm() + 1e-9
    model.megacompile.close()


# ---------------------------------------------------------------- what is refused
def test_what_cannot_be_quantized_is_refused(saved: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"no layer of Qwen2ForCausalLM has a frozen nn.Linear to quantize"):
        megacompile.quantize(build())
    frozen = build().requires_grad_(False)
    with pytest.raises(ArgumentError, match=(
            "weights cannot be stored as 'nf3': give one of nf4, int8, mxfp4, fp8, or a BitsAndBytes")):
        megacompile.quantize(frozen, "nf3")
    with pytest.raises(UnsupportedError, match="llm_int8_skip_modules is not supported: leave it out"):
        megacompile.quantize(frozen, BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["lm_head"]))
    with pytest.raises(ArgumentError, match="quantized weights are frozen, and nothing would be trained: give an adapter"):
        megacompile.from_pretrained(saved, quantize="nf4", device="cpu")
    with pytest.raises(UnsupportedError, match="quantized weights have no initial values: initialize the model before"):
        quantized(megacompile.quantize(frozen))[0].reset_parameters()


@pytest.mark.parametrize(("options", "stored"), [
    (dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True), FourBits()),
    (dict(load_in_4bit=True, bnb_4bit_quant_type="nf4"), FourBits(nested=False)), (dict(load_in_8bit=True), FORMATS["int8"])])
def test_a_config_of_bitsandbytes_names_a_format(options: dict[str, Any], stored: Any) -> None:
    model = megacompile.quantize(build().requires_grad_(False), BitsAndBytesConfig(**options))
    assert {layer.stored for layer in quantized(model)} == {stored}


class Linear4bit(nn.Linear):
    """As bitsandbytes has it before its weights are quantized."""

    __module__ = "bitsandbytes.nn.modules"


def test_layers_of_bitsandbytes_that_cannot_be_adopted_are_refused() -> None:
    from megacompile.weights.quantizing import adopt_bitsandbytes

    model = nn.Sequential(Linear4bit(4, 4))
    with pytest.raises(UnsupportedError, match="Linear4bit 0 of bitsandbytes is not quantized yet: load the model with a Bits"):
        adopt_bitsandbytes(model)
    model[0].weight.quant_state = None
    with pytest.raises(UnsupportedError, match="Linear4bit 0 of bitsandbytes is not quantized yet: load the model with a Bits"):
        adopt_bitsandbytes(model)
    embedding: Any = type("Embedding4bit", (nn.Embedding,), {"__module__": "bitsandbytes.nn.modules"})
    with pytest.raises(UnsupportedError, match="Embedding4bit 0 of bitsandbytes cannot be streamed: only its linear layers"):
        adopt_bitsandbytes(nn.Sequential(embedding(4, 4)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("stored", FORMATS)
def test_a_weight_that_is_not_finite_is_refused_by_name_and_the_model_stays_as_it_was(
        stored: str, value: float, tmp_path: Path) -> None:
    model = build(bf16=True, layers=1).requires_grad_(False)
    model.model.layers[0].mlp.up_proj.weight[5, 3] = value
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.mlp\.up_proj\.weight has values that are not finite"):
        megacompile.quantize(model, stored)
    assert not quantized(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.up_proj\.weight in .* has values that are not finite"):
        megacompile.from_pretrained(tmp_path, quantize=stored, trainable=False, device="cpu")
