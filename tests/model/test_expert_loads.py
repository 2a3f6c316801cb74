"""Loads of experts, and biases of routers that follow them: as a model without streaming would count and move them."""
from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import uneven_models
from test_expert_adapters import base, tokens
from torch import Tensor, nn

import megacompile
from megacompile.errors import UnsupportedError
from megacompile.ir.plan import BatchSpec

FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3"]


def counted(model: nn.Module, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The loads of native experts without those of padding, by layer."""
    found: dict[str, Tensor] = {}
    hooks, batch = [], {}
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            def count(module: Any, args: Any, kwargs: Any, layer: str = name.rsplit(".", 2)[0]) -> None:
                numbers = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dtype == torch.int64)
                shown = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).flatten().bool()
                load = torch.bincount(numbers.view(len(shown), -1)[shown].flatten(), minlength=module.num_experts)
                found[layer] = found.get(layer, 0) + load
            hooks.append(module.register_forward_pre_hook(count, with_kwargs=True))
    with torch.no_grad():
        for each in batches:
            batch = each
            model(**batch)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_loads_are_those_of_the_last_step_with_all_its_micro_batches(family: str, bf16: bool) -> None:
    native = base(family).to(torch.bfloat16 if bf16 else torch.float32)
    model = megacompile.stream(copy.deepcopy(native), device="cpu", micro_batch_size=2, saved_layers=1)
    optimizer = megacompile.AdamW(model.parameters(), lr=0.0)
    assert model.megacompile.expert_loads() == {}
    batches = [tokens(native, rows=4, length=7 + i) for i in range(3)]
    for batch in batches[:1]:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for batch in batches[1:]:  # two backwards before an update, and an evaluation that does not count
        model(**batch).loss.backward()
    with torch.no_grad():
        model(**batches[0])
    optimizer.step()
    expected = counted(native, batches[1:])
    loads = model.megacompile.expert_loads()
    assert loads.keys() == expected.keys() and expected
    for layer, load in loads.items():
        assert int(load.sum()) == int(expected[layer].sum())
        assert int((load - expected[layer]).abs().sum()) <= (4 if bf16 else 0), "bf16 may send a token elsewhere"
    stats = model.megacompile.stats
    assert stats["expert_loads"] == {layer: load.tolist() for layer, load in loads.items()}
    assert stats["expert_load_max"] >= 1 and 0 <= stats["expert_idle"] < 1
    model.megacompile.close()


@pytest.mark.parametrize("options", [{"expert_pieces": 2}, {"expert_pieces": 4}, {"checkpoint_interval": 2}], ids=str)
def test_whole_steps_count_every_token_once_under_other_plans(options: dict[str, Any]) -> None:
    native = base("qwen3_moe")
    model = megacompile.stream(copy.deepcopy(native), device="cpu", **options)
    optimizer = megacompile.AdamW(model.parameters(), lr=0.0)
    for length in (6, 9):
        batch = tokens(native, rows=4, length=length)
        model.megacompile.train_step(batch, optimizer)
        for layer, expected in counted(native, [batch]).items():
            assert torch.equal(model.megacompile.expert_loads()[layer], expected)
    model.megacompile.close()


def padded(model: Any, lengths: Sequence[int], left: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Rows of these lengths."""
    given = tokens(model, seed, rows=len(lengths), length=max(lengths))
    shown = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    given["attention_mask"] = (shown.flip(1) if left else shown).long()
    given["labels"] = given["labels"].masked_fill(given["attention_mask"] == 0, -100)
    return given


#: How rows of uneven length are computed, by name: a family, options, and what is true of the program of their batch.
WAYS: dict[str, tuple[str, dict[str, Any], Callable[[BatchSpec, tuple[int, int]], bool]]] = {
    "packed": ("qwen3_moe", {}, lambda spec, size: "position_ids" in spec.capture.further),
    "as they are": ("qwen3_moe", {"repack": False}, lambda spec, size: (spec.batch, spec.length) == size),
    "in groups": ("jamba", {"repack": 64}, lambda spec, size: len(spec.group_rows) > 1),
    "padded further": ("jamba", {"repack": 512}, lambda spec, size: spec.length > size[1] and not spec.group_rows)}


@pytest.mark.sample(4)
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("way", WAYS)
def test_padding_is_no_load(way: str, left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the caller, and that which is added to have other lengths of rows."""
    family, options, holds = WAYS[way]
    if way == "in groups":
        uneven_models.lower_the_cost(monkeypatch)
    native = base(family)
    model = megacompile.stream(copy.deepcopy(native), device="cpu", micro_batch_size=2, **options)
    optimizer = megacompile.AdamW(model.parameters(), lr=0.0)
    batches = [padded(native, lengths, left, seed) for seed, lengths in enumerate(([30, 3, 9, 5], [7, 40, 2, 11]))]
    for batch in batches:
        assert left or holds(model.megacompile.compiled(batch).spec, tuple(batch["input_ids"].shape))
        model(**batch).loss.backward()
    optimizer.step()
    expected, loads = counted(native, batches), model.megacompile.expert_loads()
    assert expected.keys() == loads.keys() and all(torch.equal(load, loads[layer]) for layer, load in expected.items())
    model.megacompile.close()


def test_biases_move_against_the_load_and_the_router_follows() -> None:
    native = base("deepseek_v3")
    model = megacompile.stream(copy.deepcopy(native), device="cpu")
    optimizer = megacompile.AdamW(model.parameters(), lr=0.0)
    batch = tokens(native, rows=8, length=16)
    for _ in range(3):
        model.megacompile.train_step(batch, optimizer)
        expected = counted(native, [batch])
        loads = model.megacompile.expert_loads()
        assert all(torch.equal(loads[layer], expected[layer]) for layer in expected), "the biases that were moved choose"
        model.megacompile.balance_experts(rate=0.05)
        for layer, load in expected.items():
            bias = native.get_submodule(layer).mlp.gate.e_score_correction_bias
            bias.data += 0.05 * torch.sign(load.double().mean() - load).to(bias)
            ours = model.get_submodule(layer).mlp.gate.e_score_correction_bias
            assert torch.equal(ours, bias) and bias.abs().max() > 0
    model.megacompile.close()


def test_a_model_without_such_biases_is_refused_by_name() -> None:
    model = megacompile.stream(base("qwen3_moe"), device="cpu")
    with pytest.raises(UnsupportedError, match="no router of Qwen3MoeForCausalLM has a bias that chooses experts"):
        model.megacompile.balance_experts()
    model.megacompile.close()


def test_loads_are_known_after_the_model_is_closed() -> None:
    native = base("qwen3_moe")
    model = megacompile.stream(native, device="cpu")
    handle, batch = model.megacompile, tokens(native, rows=4, length=6)
    handle.train_step(batch, megacompile.AdamW(model.parameters(), lr=0.0))
    before = handle.expert_loads()
    handle.close()
    assert before and all(torch.equal(load, before[layer]) for layer, load in handle.expert_loads().items())
