"""Experts whose frozen weights are in codes, against the same model with the values of the codes in ordinary weights."""
from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from test_expert_adapters import FAMILIES, adapted, base, fused, tokens
from tiny_models import assert_same_weights
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import megacompile
from megacompile.errors import UnsupportedError
from megacompile.weights.codes import FORMATS, QuantizedExperts, Stack, weights_of_codes

peft = pytest.importorskip("peft")

HELD_BY = "tests/model/test_quantized_experts.py::test_adapters_train_over_codes_as_over_the_codes_values"
EXPERTS = {"target_modules": None}
ATTENTION = {"target_modules": ["o_proj"], "target_parameters": None}
CASES = [("qwen3_moe", "nf4", EXPERTS), ("gpt_oss", "int8", EXPERTS), ("qwen3_moe", "mxfp4", ATTENTION)]
NIGHTLY = [(family, stored, what) for family in FAMILIES for stored in FORMATS for what in (EXPERTS, ATTENTION)
           if (family, stored, what) not in CASES]


def coded(model: Any) -> list[QuantizedExperts]:
    return [module for module in model.modules() if isinstance(module, QuantizedExperts)]


@pytest.mark.parametrize(("family", "stored", "options"), [
    *CASES, *(pytest.param(*case, marks=pytest.mark.nightly(held_by=HELD_BY)) for case in NIGHTLY)], ids=str)
def test_adapters_train_over_codes_as_over_the_codes_values(family: str, stored: str, options: dict[str, Any]) -> None:
    model = megacompile.quantize(adapted(family, **options), stored)
    assert coded(model) and not any(p.dim() == 3 for p in model.parameters() if p.requires_grad is False)
    native = megacompile.dequantize(copy.deepcopy(model))
    assert not coded(native)
    model = megacompile.stream(model, device="cpu")
    pairs = (megacompile.AdamW, model), (torch.optim.AdamW, native)
    optimizers = [make([p for p in each.parameters() if p.requires_grad], lr=1e-2, eps=1e-4) for make, each in pairs]
    for step in range(2):
        losses = [each(**tokens(native, step)).loss for each in (model, native)]
        for loss in losses:
            loss.backward()
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
        gradients = [{name: p.grad for name, p in each.named_parameters() if p.grad is not None} for each in (model, native)]
        assert gradients[0].keys() == gradients[1].keys()
        for name, exact in gradients[1].items():
            assert float((gradients[0][name] - exact).norm()) <= 1e-4 * float(exact.norm()) + 1e-7, name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    model.megacompile.close()
    assert_same_weights(megacompile.dequantize(model), native)


def test_codes_take_little_more_than_half_a_byte_for_each_weight_of_real_experts() -> None:
    matrix, weights = Stack((128, 1536, 2048), torch.bfloat16).matrix, 128 * 1536 * 2048
    for name, each in (("nf4", 0.516), ("mxfp4", 0.531)):
        form = FORMATS[name]
        assert (form.code_bytes(matrix) + form.scale_bytes(matrix)) / weights == pytest.approx(each, abs=1e-3)
    model = megacompile.quantize(adapted(**ATTENTION))
    counted = weights_of_codes(model)
    plain = sum(p.numel() for name, p in base("qwen3_moe").named_parameters() if p.dim() == 3)
    assert sum(counted[id(p)] for each in coded(model) for p in each.parameters(recurse=False) if id(p) in counted) == plain


def test_an_adapter_over_codes_runs_and_generates_as_its_values_do_and_is_not_merged_into_them() -> None:
    model = megacompile.quantize(adapted())
    native, given = megacompile.dequantize(copy.deepcopy(model)).eval(), tokens(model)
    with torch.no_grad():
        assert model.eval()(**given).loss.item() == pytest.approx(native(**given).loss.item(), rel=1e-6)
    with pytest.raises(UnsupportedError, match=r"call megacompile.dequantize\(model\) first"):
        model.merge_adapter()
    streamed = megacompile.stream(copy.deepcopy(model), device="cpu")
    how = {"input_ids": given["input_ids"], "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(streamed.generate(**how), native.generate(**how))
    streamed.megacompile.close()
    with torch.no_grad():
        expected = native(**given).loss.item()
        assert native.merge_and_unload()(**given).loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])  # stacked in its files; one by one
def test_a_checkpoint_s_experts_are_encoded_while_it_is_read(family: str, tmp_path: Path) -> None:
    base(family).save_pretrained(tmp_path)
    adapter = peft.LoraConfig(r=2, target_parameters=fused(base(family)), task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "weights .* are stored in a layout that must be converted")
        read = megacompile.from_pretrained(tmp_path, quantize="nf4", adapter=adapter, device="cpu")
    torch.manual_seed(0)
    made = megacompile.stream(megacompile.quantize(peft.get_peft_model(base(family), adapter)), device="cpu")
    given = tokens(made)
    with torch.no_grad():
        assert coded(read) and read(**given).loss.item() == pytest.approx(made(**given).loss.item(), rel=1e-5)
    for each in (read, made):
        each.megacompile.close()


def test_experts_that_are_trained_keep_their_weights() -> None:
    model = adapted(**ATTENTION)
    for p in model.parameters():
        p.requires_grad_(p.requires_grad or p.dim() == 3)
    assert not coded(megacompile.quantize(model))


def test_mxfp4_is_what_transformers_reads() -> None:
    form, generator = FORMATS["mxfp4"], torch.Generator().manual_seed(0)
    weights = torch.randn(24, 64, generator=generator) * torch.exp(3 * torch.randn(24, 1, generator=generator))
    weights[0] = 0
    codes, scales = (torch.empty(size((24, 64)), dtype=torch.uint8) for size in (form.code_bytes, form.scale_bytes))
    form.encode(weights.flatten().split(form.piece((24, 64))), codes, scales, (24, 64))
    values = form.decode(codes, scales, (24, 64))
    theirs = convert_moe_packed_tensors(codes.view(2, 12, 2, 16), scales.view(2, 12, 2), dtype=torch.float32)
    assert torch.equal(theirs.transpose(1, 2).reshape(24, 64), values)
    largest = weights.view(-1, 32).abs().amax(1, keepdim=True)
    assert ((values - weights).view(-1, 32).abs() <= largest / 4).all(), "more than a step of the largest"
