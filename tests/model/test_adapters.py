"""PEFT's adapters on a streamed model, against the same model unstreamed."""
from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine
import pytest
import tiny_models
import torch
from tiny_models import assert_same_gradients, assert_same_weights, batch

import megacompile
from megacompile.errors import ArgumentError, MegacompileError, UnsupportedError
from megacompile.streaming.device_copy import DeviceCopy

peft = pytest.importorskip("peft")


def adapted(bf16: bool = False, layers: int = 2, **options: Any) -> Any:
    """A model with LoRA whose second matrix is not zero, so that all gradients say something."""
    torch.manual_seed(1)
    config = peft.LoraConfig(**{**dict(r=4, lora_alpha=8, target_modules=["v_proj", "down_proj"], init_lora_weights=False,
                                       task_type="CAUSAL_LM"), **options})
    return peft.get_peft_model(tiny_models.build(bf16, num_hidden_layers=layers), config).train()


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.nightly)], ids=["LoRA", "DoRA"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """A streamed model with an adapter, and its plain twin; a test that changes weights changes those of both."""
    native = adapted(use_dora=request.param)
    model = megacompile.stream(copy.deepcopy(native), device="cpu")
    yield model, native
    if hasattr(model, "megacompile"):
        model.megacompile.close()


def test_adapters_train_as_they_do_natively_and_nothing_else_has_state(pair: tuple[Any, Any]) -> None:
    optimizers = [cls(m.parameters(), lr=1e-2, eps=1e-4) for cls, m in zip((megacompile.AdamW, torch.optim.AdamW), pair,
                                                                            strict=True)]
    for each in pair:
        each(**batch(0)).loss.backward()
    assert_same_gradients(*pair)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    assert_same_weights(*pair)
    tiles = engine.layouts(pair[0]).values()
    assert all("lora_" in part.name for layout in tiles if layout.trainable for part in layout.slices)
    parts, elements = pair[0].megacompile.stats["host_parts"], sum(x.elements for x in tiles if x.trainable)
    assert parts["gradients"] < 4.2 * elements + 1000 and parts["moments"] == 8 * elements


@pytest.mark.nightly(held_by="tests/model/test_adapters.py::test_adapters_train_as_they_do_natively_and_nothing_else_has_state")
@pytest.mark.parametrize("config", [
    pytest.param(peft.LoraConfig(r=4, target_modules=["v_proj"], trainable_token_indices=[3, 60], task_type="CAUSAL_LM"),
                 marks=pytest.mark.nightly),
    pytest.param(peft.TrainableTokensConfig(token_indices=[1, 2], task_type="CAUSAL_LM"), marks=pytest.mark.nightly),
    peft.IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"),
], ids=["LoRA and tokens", "tokens", "IA3"])
def test_other_adapters_train_as_they_do_natively(config: Any) -> None:
    native = peft.get_peft_model(tiny_models.build(num_hidden_layers=1), config).train()
    with torch.no_grad():
        for parameter in native.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model = megacompile.stream(copy.deepcopy(native), device="cpu")
    losses = [each(**batch(0)).loss for each in (model, native)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    assert_same_gradients(model, native)
    model.megacompile.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("config", "reason"), [
    (peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), "^PROMPT_TUNING puts virtual tokens .*: train"),
    (peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), "^PREFIX_TUNING puts virtual tokens .*: train"),
    (peft.AdaLoraConfig(target_modules=["v_proj"], init_r=4, target_r=2, total_step=6, task_type="CAUSAL_LM"),
     "^PeftModelForCausalLM cannot be streamed with its ADALORA adapters: train LoRA"),
    (peft.LoHaConfig(target_modules=["v_proj"], r=2, task_type="CAUSAL_LM"),
     "^PeftModelForCausalLM cannot be streamed with its LOHA adapters: train LoRA"),
], ids=["prompts", "prefixes", "AdaLoRA", "LoHa"])
def test_adapters_that_cannot_be_streamed_are_refused_by_name(config: Any, reason: str) -> None:
    with pytest.raises(MegacompileError, match=reason):
        megacompile.stream(peft.get_peft_model(tiny_models.build(num_hidden_layers=1), config), device="cpu")


def test_uneven_rows_of_an_adapted_model_are_packed_and_exact(pair: tuple[Any, Any]) -> None:
    """PEFT's wrapper for language models does not name position_ids, and passes them on."""
    given = batch(0, rows=3, length=20)
    given["attention_mask"] = (torch.arange(20) < torch.tensor([[20], [4], [2]])).long()
    given["labels"][given["attention_mask"] == 0] = -100
    spec = pair[0].megacompile.compiled(given).spec
    assert "position_ids" in spec.capture.further and spec.batch == 1
    losses = [each(**given).loss for each in pair]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    assert_same_gradients(*pair)
    for each in pair:
        each.zero_grad()


def test_a_saved_adapter_is_that_of_peft(pair: tuple[Any, Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    saved = []
    for each, name in zip(pair, ("streamed", "native"), strict=True):
        each.save_pretrained(tmp_path / name)
        saved.append(load_file(tmp_path / name / "adapter_model.safetensors"))
    assert saved[0].keys() == saved[1].keys() and len(saved[0]) == (12 if any("magnitude" in name for name in saved[0]) else 8)
    for name, tensor in saved[0].items():
        torch.testing.assert_close(tensor, saved[1][name], rtol=1e-4, atol=1e-5)


def test_greedy_tokens_are_peft_s_with_all_weights_on_the_device_and_streamed(
        pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair
    how = {"input_ids": batch(5)["input_ids"], "max_new_tokens": 3, "do_sample": False}
    assert torch.equal(ours.generate(**how), theirs.generate(**how))
    with ours.disable_adapter(), theirs.disable_adapter():
        assert torch.equal(ours.generate(**how), theirs.generate(**how)), "the copy has the model's flags"
    before = len(engine.executables(ours))
    monkeypatch.setattr(DeviceCopy, "arrangement", lambda *_: None)
    assert torch.equal(ours.generate(**how), theirs.generate(**how))
    assert len(engine.executables(ours)) > before, "a length of generation has a program of its own"


def test_a_model_whose_adapters_are_switched_off_is_its_base_and_trains_on_afterwards(pair: tuple[Any, Any]) -> None:
    """With adapters, without, and with them again: losses, values of tokens and gradients."""
    def without(each: Any) -> tuple[float, torch.Tensor]:
        with torch.no_grad(), each.disable_adapter():
            return each(**batch(0)).loss.item(), each(input_ids=batch(0)["input_ids"]).logits

    model, native = pair
    with_adapters = [each(**batch(0)).loss for each in pair]
    ours, theirs = without(model), without(native)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5) and abs(ours[0] - with_adapters[0].item()) > 1e-3
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-5)
    for each, loss in zip(pair, with_adapters, strict=True):
        each.zero_grad()
        loss.backward()  # the forward before had its adapters
    assert_same_gradients(*pair)
    with torch.no_grad(), model.disable_adapter():
        scores = model.megacompile.per_token(_first, {"input_ids": batch(0)["input_ids"]})
    torch.testing.assert_close(scores, theirs[1][..., 0], rtol=1e-4, atol=1e-5)
    with model.disable_adapter(), pytest.raises(UnsupportedError, match=r"loss without them has no .*torch.no_grad\(\)"):
        model(**batch(0))
    with torch.no_grad(), model.disable_adapter(), pytest.raises(UnsupportedError, match="switched off"):
        model.megacompile.train_step(batch(0), megacompile.AdamW(model.parameters()))
    for each in pair:
        each.zero_grad()


def _first(logits: torch.Tensor) -> torch.Tensor:
    return logits[:, 0]


def test_requires_grad_that_changed_is_refused_where_it_says_anything(pair: tuple[Any, Any]) -> None:
    model = pair[0]
    parameter = next(p for p in model.parameters() if p.requires_grad)
    for changed in (parameter, model.get_output_embeddings().weight):
        changed.requires_grad_(not changed.requires_grad)
        with pytest.raises(UnsupportedError, match=r"requires_grad of .* was changed after stream\(\): close\(\) the model"):
            model(**batch(0))
        with torch.no_grad():
            model(**batch(0))
        changed.requires_grad_(not changed.requires_grad)
    model(**batch(0))


def test_a_changed_state_of_adapters_is_refused_until_it_is_put_back(pair: tuple[Any, Any]) -> None:
    model = pair[0]
    with torch.no_grad():
        model.merge_adapter()
        with pytest.raises(UnsupportedError, match=r"merged_adapters of .* is \['default'\] and was \[\]"):
            model(**batch(0))
        model.unmerge_adapter()
        ours, theirs = (each(**batch(0)).loss.item() for each in pair)
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_an_adapter_is_merged_after_close(pair: tuple[Any, Any]) -> None:
    pair[0].megacompile.close()
    ours, theirs = (each.merge_and_unload() for each in pair)
    assert not any("lora" in name for name, _ in ours.named_parameters())
    assert ours(**batch(0)).loss.item() == pytest.approx(theirs(**batch(0)).loss.item(), rel=1e-5)


@pytest.mark.nightly(held_by="tests/model/test_adapters.py::test_adapters_train_as_they_do_natively_and_nothing_else_has_state")
def test_adapters_in_float32_train_beside_bf16_weights() -> None:
    """As PEFT makes them: they lie in tiles of their own."""
    native = adapted(bf16=True, layers=1)
    model = megacompile.stream(copy.deepcopy(native), device="cpu")
    tiles = engine.layouts(model).values()
    assert {(layout.trainable, layout.dtype) for layout in tiles} == {(True, torch.float32), (False, torch.bfloat16)}
    losses = []
    for each in (model, native):
        loss = each(**batch(0)).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)
    assert_same_gradients(model, native, tolerance=0.05)
    model.megacompile.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_models.build(True, num_hidden_layers=1).save_pretrained(folder)
    return folder


@pytest.mark.nightly(held_by=(
    "tests/model/test_quantized.py::test_weights_are_rounded_while_they_are_read",
    "tests/model/test_adapters.py::test_adapters_train_as_they_do_natively_and_nothing_else_has_state"))
def test_a_model_read_with_an_adapter_is_the_loaded_one_with_it_and_frozen_weights_have_no_state(saved: Path) -> None:
    """Values and names are PEFT's own; the adapter is bf16 as the weights are, and has FP32 masters."""
    from transformers import AutoModelForCausalLM

    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(3)
    native = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(saved), config, autocast_adapter_dtype=False)
    torch.manual_seed(3)
    model = megacompile.from_pretrained(saved, adapter=config, device="cpu")
    for (name, ours), (known, theirs) in zip(model.named_parameters(), native.named_parameters(), strict=True):
        assert name == known and torch.equal(ours, theirs) and ours.requires_grad == theirs.requires_grad
    assert model.peft_config["default"].base_model_name_or_path == str(saved)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    optimizer = megacompile.AdamW(p for p in model.parameters() if p.requires_grad)
    parts = model.megacompile.stats["host_parts"]
    assert 2 * trained <= parts["gradients"] < 2.2 * trained + 1000 and 8 * trained <= parts["moments"] < 8.8 * trained + 4000
    del optimizer
    model.megacompile.close()


@pytest.mark.parametrize(("changes", "error", "reason"), [
    (dict(use_dora=True), UnsupportedError, "use_dora=True takes the adapter's first values from weights"),
    (dict(init_lora_weights="pissa"), UnsupportedError, "init_lora_weights='pissa' takes"),
    (dict(modules_to_save=["lm_head"]), UnsupportedError, "modules_to_save=.'lm_head'. takes"),
    (dict(target_modules=["absent"]), ArgumentError, "PEFT cannot put this adapter on a Qwen2ForCausalLM: name layers")])
def test_an_adapter_that_needs_the_weights_or_other_layers_is_refused_before_anything_is_read(
        saved: Path, changes: dict[str, Any], error: type[Exception], reason: str) -> None:
    config = peft.LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes})
    with pytest.raises(error, match=reason):
        megacompile.from_pretrained(saved, adapter=config, device="cpu")
