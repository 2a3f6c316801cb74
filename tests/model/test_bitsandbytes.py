"""Models of bitsandbytes train, merge and save here as models of ours, and compute as their config says."""
from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bitsandbytes_models
import peft
import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from tiny_models import batch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import megacompile
from megacompile.errors import UnsupportedError
from megacompile.trainers.added_adapter import add_adapter
from megacompile.weights.bitsandbytes import adopt_bitsandbytes

LORA = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
MARKS = ("is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized", "quantization_method", "hf_quantizer")


def adapted(model: Any, **changes: Any) -> Any:
    """With an adapter that has an effect."""
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(**{**LORA.to_dict(), **changes}))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model


def gradients(model: Any) -> list[torch.Tensor]:
    """After one backward, in the order of parameters."""
    model(**batch()).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.requires_grad and p.grad is not None]


def assert_alike(model: Any, native: Any, tolerance: float = 1e-5) -> None:
    """One streamed step has the losses and gradients of an unstreamed one."""
    with torch.no_grad():
        assert model(**batch()).loss.item() == pytest.approx(native(**batch()).loss.item(), rel=tolerance)
    ours, theirs = gradients(model), gradients(native)
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert (a.float() - b.float()).norm() <= tolerance * b.float().norm() + 1e-9


# ---------------------------------------------------------------- marks of bitsandbytes
@pytest.mark.nightly(held_by=(
    "tests/model/test_bitsandbytes.py::test_a_model_that_cannot_be_adopted_keeps_its_marks",
    "tests/model/test_bitsandbytes.py::test_an_adapter_over_a_checkpoint_in_eight_bits_trains_as_it_does_natively"))
def test_a_streamed_model_is_no_longer_marked_as_one_of_bitsandbytes() -> None:
    model = megacompile.stream(bitsandbytes_models.loaded(), device="cpu", compile=False)
    assert not any(hasattr(model, mark) for mark in MARKS) and not hasattr(model.config, "quantization_config")
    model.megacompile.close()
    assert not any(hasattr(model, mark) for mark in MARKS)


@pytest.mark.nightly(held_by=(
    "tests/model/test_bitsandbytes.py::test_a_model_that_cannot_be_adopted_keeps_its_marks",
    "tests/model/test_bitsandbytes.py::test_an_adapter_over_a_checkpoint_in_eight_bits_trains_as_it_does_natively"))
def test_marks_go_when_the_adapter_is_there_first() -> None:
    model = adapted(bitsandbytes_models.loaded())
    assert model.is_loaded_in_4bit
    model = megacompile.stream(model, device="cpu", compile=False)
    assert not any(hasattr(model, mark) for mark in MARKS) and not hasattr(model.config, "quantization_config")
    model.megacompile.close()


def test_a_model_that_cannot_be_adopted_keeps_its_marks() -> None:
    model = bitsandbytes_models.loaded()
    model.model.layers[0].mlp.up_proj.weight.quant_state = None
    with pytest.raises(UnsupportedError, match="Linear4bit up_proj of bitsandbytes is not quantized yet"):
        megacompile.stream(model, device="cpu", compile=False)
    assert all(hasattr(model, mark) for mark in MARKS if "8bit" not in mark) and hasattr(model.config, "quantization_config")


def test_marks_of_other_quantizers_stay() -> None:
    model = megacompile.quantize(bitsandbytes_models.build().requires_grad_(False))
    model.config.quantization_config = {"quant_method": "gptq"}
    model.quantization_method, model.hf_quantizer = "gptq", SimpleNamespace()
    megacompile.dequantize(model)
    assert model.quantization_method == "gptq" and model.config.quantization_config and hasattr(model, "hf_quantizer")


# ---------------------------------------------------------------- what products are computed in
@pytest.mark.nightly(held_by=(
    "tests/model/test_bitsandbytes.py::test_an_adapter_over_a_checkpoint_in_eight_bits_trains_as_it_does_natively",
    "tests/model/test_bitsandbytes.py::test_a_compute_dtype_changes_products_and_nothing_else"))
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_prepared_for_training_computes_as_bitsandbytes_does(compute_dtype: torch.dtype) -> None:
    """`prepare_model_for_kbit_training` makes all but codes float32. Products stay in the compute dtype."""
    native, model = (adapted(peft.prepare_model_for_kbit_training(bitsandbytes_models.loaded(compute_dtype)))
                     for _ in range(2))
    assert {p.dtype for p in native.parameters()} == {torch.float32, torch.uint8}
    model = megacompile.stream(model, device="cpu", compile=False)
    narrow = torch.bfloat16 if compute_dtype == torch.bfloat16 else None
    assert {layer.compute_dtype for layer in bitsandbytes_models.layers_of(model)} == {narrow}
    # Sums of a product in bfloat16 may be taken in another order.
    assert_alike(model, native, 1e-5 if narrow is None else 2e-2)
    model.megacompile.close()


def test_a_compute_dtype_changes_products_and_nothing_else() -> None:
    base = megacompile.quantize(bitsandbytes_models.build().requires_grad_(False))
    narrow = copy.deepcopy(base)
    for layer in bitsandbytes_models.layers_of(narrow):
        layer.compute_dtype = torch.bfloat16
    linear, x = bitsandbytes_models.layers_of(narrow)[0], torch.randn(3, 32)
    assert linear.bias is not None
    expected = nn.functional.linear(x.bfloat16(), linear.dequantized_weight().bfloat16(), linear.bias.bfloat16())
    assert torch.equal(linear(x), expected.float())
    assert narrow(**batch()).loss.dtype == torch.float32 and narrow(**batch()).loss != base(**batch()).loss


@pytest.mark.nightly(held_by="tests/model/test_bitsandbytes.py::test_a_compute_dtype_changes_products_and_nothing_else")
def test_a_config_s_compute_dtype_is_that_of_products(tmp_path: Path) -> None:
    how = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    bitsandbytes_models.build(bf16=True).save_pretrained(tmp_path)
    options: dict[str, Any] = dict(trainable=False, device="cpu", compile=False)
    for config, expected in ((BitsAndBytesConfig(**how), None), (BitsAndBytesConfig(load_in_8bit=True), None),
                             (BitsAndBytesConfig(**how, bnb_4bit_compute_dtype=torch.bfloat16), torch.bfloat16)):
        made = megacompile.quantize(bitsandbytes_models.build().requires_grad_(False), config)
        read = megacompile.from_pretrained(tmp_path, dtype=torch.float32, quantize=config, **options)
        for model in (made, read):
            assert {layer.compute_dtype for layer in bitsandbytes_models.layers_of(model)} == {expected}
        read.megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_bitsandbytes.py::test_a_compute_dtype_changes_products_and_nothing_else")
@pytest.mark.parametrize(("said", "expected"), [("bfloat16", torch.bfloat16), ("float32", None), ("float16", None)])
def test_a_checkpoint_s_compute_dtype_is_that_of_products(said: str, expected: torch.dtype | None, tmp_path: Path) -> None:
    bitsandbytes_models.build(bf16=True).save_pretrained(tmp_path / "whole")
    folder = bitsandbytes_models.write_four_bits(tmp_path / "whole", tmp_path / "packed")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["bnb_4bit_compute_dtype"] = said
    (folder / "config.json").write_text(json.dumps(config))
    model = megacompile.from_pretrained(folder, dtype=torch.float32, trainable=False, device="cpu", compile=False)
    assert {layer.compute_dtype for layer in bitsandbytes_models.layers_of(model)} == {expected}
    model.megacompile.close()


def test_products_in_float16_are_refused() -> None:
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16)
    refusal = r"bnb_4bit_compute_dtype=torch\.float16 is not supported: give torch\.bfloat16"
    with pytest.raises(UnsupportedError, match=refusal):
        megacompile.quantize(bitsandbytes_models.build().requires_grad_(False), config)
    with pytest.raises(UnsupportedError, match=refusal):
        megacompile.from_pretrained("no/model", quantize=config, trainable=False)
    with pytest.raises(UnsupportedError, match=refusal):
        megacompile.stream(bitsandbytes_models.loaded(torch.float16), device="cpu", compile=False)


# ---------------------------------------------------------------- merging and saving
@pytest.mark.nightly(held_by=(
    "tests/model/test_loading.py::test_a_model_that_transformers_has_dequantized_is_saved_with_every_weight",
    "tests/model/test_bitsandbytes.py::test_an_adapter_over_a_checkpoint_in_eight_bits_trains_as_it_does_natively"))
@pytest.mark.parametrize("way", ["streamed", "read"])
def test_a_merged_model_is_saved_as_one_that_was_never_quantized(way: str, tmp_path: Path) -> None:
    if way == "read":
        bitsandbytes_models.build(bf16=True).save_pretrained(tmp_path / "whole")
        packed = bitsandbytes_models.write_four_bits(tmp_path / "whole", tmp_path / "packed")
        model = megacompile.from_pretrained(packed, adapter=copy.deepcopy(LORA), device="cpu", compile=False)
    else:
        model = megacompile.stream(adapted(bitsandbytes_models.loaded()), device="cpu", compile=False)
    model.megacompile.close()
    with torch.no_grad():
        merged = megacompile.dequantize(model).merge_and_unload().eval()
        assert not hasattr(merged, "hf_quantizer") and not hasattr(merged.config, "quantization_config")
        merged.save_pretrained(tmp_path / "merged")
        assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16, attn_implementation="eager")
        assert tiny_models.same_bits(tiny_models.weights(again), tiny_models.weights(merged))
    megacompile.from_pretrained(tmp_path / "merged", device="cpu", compile=False).megacompile.close()


# ---------------------------------------------------------------- checkpoints in eight bits, and DoRA
def test_an_adapter_over_a_checkpoint_in_eight_bits_trains_as_it_does_natively(tmp_path: Path) -> None:
    bitsandbytes_models.build(bf16=True).save_pretrained(tmp_path / "whole")
    folder = bitsandbytes_models.write_eight_bits(tmp_path / "whole", tmp_path / "packed")
    assert any(name.endswith("weight_format") for name in load_file(folder / "model.safetensors"))
    model = megacompile.from_pretrained(folder, dtype=torch.float32, adapter=LORA, device="cpu", compile=False).train()
    native = bitsandbytes_models.build(bf16=True).float().requires_grad_(False)
    native = peft.get_peft_model(megacompile.dequantize(megacompile.quantize(native, "int8"), torch.float32), LORA)
    with torch.no_grad():
        for name, value in native.named_parameters():
            if "lora_" in name:
                value.copy_(model.get_parameter(name))
    ours, theirs = ([p for p in each.parameters() if p.requires_grad] for each in (model, native))
    losses = [[tiny_models.train_step(each, optimizer, step) for step in range(2)] for each, optimizer in (
        (model, megacompile.AdamW(ours, lr=1e-2)), (native, torch.optim.AdamW(theirs, lr=1e-2)))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][0] != losses[0][1]
    model.megacompile.close()


@pytest.mark.nightly(
    held_by="tests/model/test_bitsandbytes.py::test_an_adapter_over_a_checkpoint_in_eight_bits_trains_as_it_does_natively")
def test_dora_over_layers_of_bitsandbytes_starts_from_their_values() -> None:
    """A trainer's `peft_config` is put on layers that are ours by then."""
    model = megacompile.stream(bitsandbytes_models.loaded(bf16=False), device="cpu", compile=False)
    native = bitsandbytes_models.loaded(bf16=False)
    adopt_bitsandbytes(native)
    native = megacompile.dequantize(native, torch.float32)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], use_dora=True, init_lora_weights=False)
    torch.manual_seed(1)
    native = peft.get_peft_model(native, config)
    torch.manual_seed(1)
    model = add_adapter(model, config)
    assert_alike(model, native)
    model.megacompile.close()
