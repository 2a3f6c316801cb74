"""Routers' auxiliary losses of all layers' router logits: exact, and what happens if a batch is split."""
from __future__ import annotations

import copy
import dataclasses
from typing import Any

import engine
import pytest
import torch
from tiny_models import assert_same_gradients, batch
from torch import Tensor, nn

import megacompile
from megacompile.errors import InsufficientMemoryError, UnsupportedError
from megacompile.frontend import capture

WEIGHT = 0.5


def mixtral(**changes: Any) -> Any:
    from transformers import AutoModelForCausalLM, MixtralConfig

    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                 num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
                 router_aux_loss_coef=WEIGHT, initializer_range=0.3)
    return AutoModelForCausalLM.from_config(MixtralConfig(**{**sizes, **changes}), attn_implementation="eager").train()


def other_experts(family: str) -> Any:
    """Qwen3-MoE, whose second layer has no experts, OLMoE or GraniteMoE, with auxiliary losses as `mixtral`."""
    import transformers

    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
                 num_key_value_heads=1, num_experts=4, num_experts_per_tok=2, output_router_logits=True,
                 router_aux_loss_coef=WEIGHT, initializer_range=0.3)
    own = {"Qwen3Moe": dict(moe_intermediate_size=12, mlp_only_layers=[1], head_dim=8),
           "GraniteMoe": dict(num_local_experts=4),
           "GraniteMoeShared": dict(num_local_experts=4, shared_intermediate_size=12)}.get(family, {})
    config = getattr(transformers, f"{family}Config")(**sizes, **own)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()


def native_loss(model: Any, given: dict[str, Tensor], rows: int) -> Tensor:
    """What native PyTorch gives for micro-batches of so many rows: cross entropies over all targets, and the mean of auxiliary
    losses, weighted by rows."""
    targets = (given["labels"][:, 1:] != -100).sum()
    loss = torch.zeros(())
    for first in range(0, len(given["labels"]), rows):
        part = {name: tensor[first:first + rows] for name, tensor in given.items()}
        result = model(**part, num_items_in_batch=targets)
        share = len(part["labels"]) / len(given["labels"])
        loss = loss + (result.loss - WEIGHT * result.aux_loss) + WEIGHT * share * result.aux_loss
    return loss


def assert_native(rows: int | None, given: dict[str, Tensor], native: Any = None) -> None:
    native = mixtral() if native is None else native
    loss = native_loss(native, given, rows or 5)
    loss.backward()
    model = copy.deepcopy(native)
    model.zero_grad()
    streamed = megacompile.stream(model, device="cpu", micro_batch_size=rows)
    result = streamed(**given)
    result.loss.backward()
    torch.testing.assert_close(result.loss, loss, rtol=1e-6, atol=0)
    assert_same_gradients(streamed, native)
    assert result.aux_loss is None and result.router_logits is None
    assert streamed.megacompile.plan.micro_batches == ((5,) if rows is None else (2, 2, 1))
    streamed.megacompile.close()


@pytest.mark.parametrize("rows", [pytest.param(None, marks=pytest.mark.nightly), 2])
def test_a_routers_loss_is_native_of_the_whole_batch_and_of_the_micro_batches_asked_for(rows: int | None) -> None:
    assert_native(rows, batch(1, rows=5, length=11))


def doubled(logits: Tensor) -> Tensor:
    return 2 * logits.float()


@pytest.mark.parametrize("rows", [pytest.param(None, marks=pytest.mark.nightly), 2])
def test_values_of_tokens_come_with_a_routers_loss(rows: int | None) -> None:
    """DPO, KTO and GRPO add it to a loss of their own."""
    native, given = mixtral(), batch(1, rows=5, length=11)
    model = megacompile.stream(copy.deepcopy(native), device="cpu", micro_batch_size=rows)
    ids = given["input_ids"]
    values, auxiliary = model.megacompile.values_of_tokens(doubled, {"input_ids": ids}, {}, auxiliary=True)
    parts = [(len(part) / 5, native(input_ids=part)) for part in ids.split(rows or 5)]
    expected = sum(share * result.aux_loss for share, result in parts)
    torch.testing.assert_close(auxiliary, expected, rtol=1e-6, atol=0)
    logits = torch.cat([result.logits for _, result in parts])
    torch.testing.assert_close(values, 2 * logits, rtol=1e-5, atol=1e-5)
    (values.square().mean() + WEIGHT * auxiliary).backward()
    ((2 * logits).square().mean() + WEIGHT * expected).backward()
    assert_same_gradients(model, native)
    model.megacompile.close()


@pytest.mark.nightly(
    held_by="tests/model/test_router_losses.py::test_a_routers_loss_is_native_of_the_whole_batch_and_of_the_micro_batches_asked_for")
def test_router_logits_that_are_cast_to_the_dtype_they_have_are_recorded() -> None:
    """GraniteMoE's routers return `logits.float()`, which in float32 is the tensor that the layer computed."""
    assert_native(2, batch(1, rows=5, length=11), other_experts("GraniteMoe"))


@pytest.mark.nightly(
    held_by="tests/model/test_router_losses.py::test_a_routers_loss_is_native_of_the_whole_batch_and_of_the_micro_batches_asked_for")
@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize("family", ["Qwen3Moe", "Olmoe", "GraniteMoeShared"])
def test_routers_losses_of_other_families_are_native(family: str, rows: int | None) -> None:
    assert_native(rows, batch(1, rows=5, length=11), other_experts(family))


@pytest.mark.nightly(
    held_by="tests/model/test_router_losses.py::test_a_routers_loss_is_native_of_the_whole_batch_and_of_the_micro_batches_asked_for")
def test_padding_is_in_no_experts_share() -> None:
    given = batch(1, rows=5, length=11)
    present = torch.ones_like(given["labels"])
    present[1, 7:] = 0
    assert_native(2, {**given, "labels": given["labels"].masked_fill(present == 0, -100), "attention_mask": present})


def test_a_batch_is_split_for_an_averaged_loss_at_the_users_wish_alone() -> None:
    model = megacompile.stream(mixtral(), device="cpu")
    planner = engine.planner(model)
    assert all(plan.micro_batches == (8,) for plan in planner.considered(8, 16))
    small = dataclasses.replace(planner, budget_bytes=1)
    with pytest.raises(InsufficientMemoryError, match="or give micro_batch_size; then the auxiliary loss is the mean"):
        small.plan(8, 16)
    with pytest.raises(UnsupportedError, match="output_router_logits is not supported"):
        model(**batch(), output_router_logits=False)
    assert "an auxiliary loss" in megacompile.explain_capture(mixtral(), device="cpu")
    model.megacompile.close()


class RoutedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.router = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + torch.tanh(self.up(x)), self.router(x)


class Routed(nn.Module):
    """`way`: how the model makes totals of its routers' outputs after the last layer."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.layers = nn.ModuleList(RoutedLayer() for _ in range(3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, routed = self.embed(input_ids), []
        for layer in self.layers:
            x, given = layer(x)
            routed.append(given)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        total = torch.zeros(3)
        if self.way == "written to and read":
            before = total.exp()
            total[0] = 1.0
            total = total + before
        for each in routed:
            total = total + each.softmax(-1).mean((0, 1))
        return loss + total.square().sum()


@pytest.mark.parametrize("way", ["added up", pytest.param("written to and read", marks=pytest.mark.nightly)])
def test_totals_of_every_layer_are_made_in_the_layers_unless_others_see_what_they_write(way: str) -> None:
    torch.manual_seed(0)
    model, given = Routed(way), batch(rows=3)
    captured = capture(model)
    handed_on = [sum(s.kind == "carried" for s in call.sources) for call in captured.calls[1:]]
    assert handed_on == ([1, 2, 2, 2] if way == "added up" else [1, 2, 3, 4])
    assert len(captured.templates) == (4 if way == "added up" else 5)
    assert captured.is_averaged
    loss = model(**given)
    loss.backward()
    streamed = megacompile.stream(copy.deepcopy(model), device="cpu")
    streamed.zero_grad()
    ours = streamed(**given)
    ours.backward()
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
    assert_same_gradients(streamed, model)
    streamed.megacompile.close()


class LossWithoutLogits(nn.Module):
    """Returns its loss, and the part of it that is not of tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        auxiliary = x.square().mean()
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return {"loss": loss + WEIGHT * auxiliary, "aux_loss": auxiliary}


def test_a_model_may_return_an_auxiliary_loss_without_logits() -> None:
    native, given = LossWithoutLogits(), {name: batch(1)[name] for name in ("input_ids", "labels")}
    given["labels"] = given["labels"].clamp(min=0)
    model = megacompile.stream(copy.deepcopy(native), device="cpu")
    expected, found = native(**given), model(**given)
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-6, atol=0)
    assert found["aux_loss"] is None
    found["loss"].backward(), expected["loss"].backward()
    assert_same_gradients(model, native)
    with torch.no_grad():
        torch.testing.assert_close(model(**given)["loss"], expected["loss"].detach(), rtol=1e-6, atol=0)
    model.megacompile.close()
