"""Adapters of fused experts (PEFT's `target_parameters`) on a streamed model, against PEFT on the same model unstreamed."""
from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import engine
import pytest
import torch
from tiny_configs import tiny_config
from tiny_models import assert_same_gradients, assert_same_weights, batch
from transformers import AutoModelForCausalLM

import megacompile

peft = pytest.importorskip("peft")

#: Layouts of experts: [experts, out, in] with gates; [experts, in, out] with biases; beside shared and dense ones.
FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "mixtral", "olmoe", "qwen2_moe", "minimax_m2", "ernie4_5_moe",
            "granitemoe", "dots1"]
EVERY_COMMIT = ["qwen3_moe", "gpt_oss"]


def base(family: str, bf16: bool = False) -> Any:
    torch.manual_seed(0)
    config = tiny_config(family)
    for name, value in vars(config).items():
        if value == 48:  # widths of experts: blocks of codes are of 32 and 64 weights
            setattr(config, name, 64)
    if bf16:  # rounding may send a token to other experts, unless all are chosen
        config.num_experts_per_tok = config.num_experts if hasattr(config, "num_experts") else config.num_local_experts
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if bf16 else torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model


def fused(model: Any) -> list[str]:
    """The parameters of all experts of a layer, as `target_parameters` names them."""
    return sorted({".".join(name.split(".")[-2:]) for name, p in model.named_parameters()
                   if p.dim() == 3 and name.endswith("_proj")})


def adapted(family: str = "qwen3_moe", bf16: bool = False, **options: Any) -> Any:
    model = base(family, bf16)
    config = peft.LoraConfig(**{**dict(r=4, target_parameters=fused(model), task_type="CAUSAL_LM"), **options})
    model = peft.get_peft_model(model, config).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return model


def tokens(model: Any, seed: int = 0, rows: int = 3, length: int = 12) -> dict[str, torch.Tensor]:
    ids = batch(seed, rows, length)["input_ids"] % model.config.get_text_config().vocab_size
    return {"input_ids": ids, "labels": ids}


def assert_trains_alike(native: Any, steps: int = 3, **options: Any) -> Any:
    model = megacompile.stream(copy.deepcopy(native), device="cpu", **options)
    pairs = (megacompile.AdamW, model), (torch.optim.AdamW, native)
    optimizers = [make(each.parameters(), lr=1e-2, eps=1e-4) for make, each in pairs]
    for step in range(steps):
        given = tokens(native, step)
        losses = [each(**given).loss for each in (model, native)]
        for loss in losses:
            loss.backward()
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
        assert_same_gradients(model, native, tolerance=5e-5)  # PEFT rounds W + AB, we round two products
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(model, native)
    return model


@pytest.mark.parametrize("family", [family if family in EVERY_COMMIT else pytest.param(family, marks=pytest.mark.nightly(
    held_by="tests/model/test_expert_adapters.py::test_adapters_of_experts_train_as_in_peft")) for family in FAMILIES])
def test_adapters_of_experts_train_as_in_peft(family: str) -> None:
    native = adapted(family)
    assert any(p.requires_grad and "experts" in name for name, p in native.named_parameters())
    assert_trains_alike(native).megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_expert_adapters.py::test_adapters_of_experts_train_as_in_peft")
def test_adapters_of_the_biases_of_experts_train_beside_those_of_weights() -> None:
    native = adapted("gpt_oss", target_parameters=["experts.gate_up_proj", "experts.gate_up_proj_bias"])
    assert_trains_alike(native, steps=1).megacompile.close()


@pytest.mark.parametrize("options", [
    {"target_modules": ["q_proj", "v_proj"], "r": 3},
    pytest.param({"target_modules": ["q_proj"], "modules_to_save": ["gate"], "r": 12}, marks=pytest.mark.nightly(
        held_by="tests/model/test_expert_adapters.py::test_adapters_of_experts_train_beside_others")),
    pytest.param({"target_modules": "all-linear", "target_parameters": None}, marks=pytest.mark.nightly(
        held_by="tests/model/test_expert_adapters.py::test_adapters_of_experts_train_beside_others")),
    pytest.param({"target_parameters": ["experts.gate_up_proj", "q_proj.weight"]}, marks=pytest.mark.nightly(
        held_by="tests/model/test_expert_adapters.py::test_adapters_of_experts_train_beside_others"))],
    ids=["attention", "router", "all-linear", "other parameters"])
def test_adapters_of_experts_train_beside_others(options: dict[str, Any]) -> None:
    assert_trains_alike(adapted(**options), steps=1).megacompile.close()


def test_only_adapters_have_state_and_gradients() -> None:
    model = megacompile.stream(adapted(), device="cpu")
    tiles = engine.layouts(model).values()
    trained = [part.name for layout in tiles if layout.trainable for part in layout.slices]
    assert trained and all("lora_" in name for name in trained)
    model.megacompile.close()


def test_an_adapter_of_experts_is_saved_merged_and_reloaded_as_in_peft(tmp_path: Path) -> None:
    native = adapted()
    model = assert_trains_alike(native, steps=1)
    model.save_pretrained(tmp_path / "adapter")
    reloaded = peft.PeftModel.from_pretrained(base("qwen3_moe"), tmp_path / "adapter")
    given = tokens(native)
    with torch.no_grad():
        expected = native.eval()(**given).loss.item()
        assert reloaded.eval()(**given).loss.item() == pytest.approx(expected, rel=1e-5)
        model.megacompile.close()
        model.merge_and_unload().save_pretrained(tmp_path / "merged")
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        assert plain.eval()(**given).loss.item() == pytest.approx(expected, rel=1e-5)


def test_adapters_of_experts_are_switched_off_and_generate_as_in_peft() -> None:
    native = adapted().eval()
    model = megacompile.stream(copy.deepcopy(native), device="cpu")
    given = tokens(native)
    with torch.no_grad():
        assert model(**given).loss.item() == pytest.approx(native(**given).loss.item(), rel=1e-5)
        with model.disable_adapter(), native.disable_adapter():
            assert model(**given).loss.item() == pytest.approx(native(**given).loss.item(), rel=1e-5)
    how = {"input_ids": given["input_ids"], "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(**how), native.generate(**how))
    model.megacompile.close()


def test_adapters_of_bf16_experts_are_as_near_to_fp32_as_peft_s() -> None:
    """PEFT rounds the sum of weights and adapter; here each product is rounded."""
    native = adapted(bf16=True)
    exact = copy.deepcopy(native).float()
    model = megacompile.stream(copy.deepcopy(native), device="cpu")
    given = tokens(native)
    for each in (model, native, exact):
        each(**given).loss.backward()
    gradients = [{name: p.grad.float() for name, p in each.named_parameters() if p.grad is not None}
                 for each in (model, native, exact)]
    ours, theirs = (sum(float((found[name] - gradients[2][name]).norm()) for name in found) for found in gradients[:2])
    assert gradients[0].keys() == gradients[1].keys() and ours <= 1.5 * theirs
    model.megacompile.close()
