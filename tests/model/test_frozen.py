"""Frozen parameters: only weights in host memory, no gradients, no backward below the first trained layer."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import engine
import pytest
import tiny_models
import torch
from tiny_models import assert_same_gradients, assert_same_weights, batch
from torch import Tensor, nn

import megacompile
from megacompile.errors import UnsupportedError
from megacompile.ir.program import argument, find, operands, size_classes


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.scale = nn.Parameter(torch.full((16,), 0.7, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x)))) * self.scale.float()


class Decoder(nn.Module):
    """Three layers of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(tiny_models.VOCABULARY, 16), nn.Linear(16, tiny_models.VOCABULARY)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def decoder(*trained: str) -> Any:
    """A model that trains what has one of these in its name."""
    torch.manual_seed(0)
    model = Decoder()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
    return model


@pytest.fixture(scope="module")
def norms() -> Iterator[Any]:
    model = megacompile.stream(decoder("norm"), device="cpu")
    model(**batch(0))[0].backward()
    yield model
    model.megacompile.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("trained", "options"), [
    (("norm",), dict(checkpoint_interval=2, micro_batch_size=2, saved_layers=1)),
    (("layers.1.up", "layers.2.scale", "head"), dict(pinned_memory="1MiB", host_checkpoints=True)),
    (("head",), {})])
def test_any_part_alone_trains_as_it_does_natively(trained: tuple[str, ...], options: dict[str, Any]) -> None:
    models = [decoder(*trained), decoder(*trained)]
    model, native = models
    megacompile.stream(model, device="cpu", **options)
    for each in models:
        for seed in range(2):
            each(**batch(seed))[0].backward()
    assert_same_gradients(model, native)
    ours, theirs = (cls([p for p in m.parameters() if p.requires_grad and p.dtype == torch.float32], lr=1e-2, eps=1e-4)
                    for cls, m in ((megacompile.AdamW, model), (torch.optim.AdamW, native)))
    for optimizer in (ours, theirs):
        optimizer.step()
        optimizer.zero_grad()
    native.zero_grad()
    model.zero_grad()
    loss = native(**batch(3))[0]
    loss.backward()
    theirs.step()
    assert model.megacompile.train_step(batch(3), ours).item() == pytest.approx(loss.item(), rel=1e-6)
    assert_same_weights(model, native)
    model.megacompile.close()


def test_what_is_frozen_has_weights_alone_in_host_memory(norms: Any) -> None:
    tiles = engine.tiles(norms)
    frozen = [name for name in tiles if not tiles[name].layout.trainable]
    assert frozen == ["prologue", *(f"layers.{i}.frozen{rest}" for i in range(3) for rest in ("", ".bfloat16")), "epilogue"]
    for name in frozen:
        tile = tiles[name]
        assert (tile.gradients, tile.remainder, tile.moments) == (None, None, [])
        assert tile.layout.host_bytes() == tile.layout.weight_bytes
    assert all("norm" in part.name for tile in tiles.values() if tile.layout.trainable for part in tile.layout.slices)


def test_tiles_of_one_rank_take_turns_in_slots_that_fit_them(norms: Any) -> None:
    program = norms.megacompile.program()
    slots = {tile: {argument(node, "into") for node in find(program.section("forward"), "prefetch")
                    if argument(node, "tile") == tile} for tile in program.tiles}
    assert slots["layers.0.frozen"] == {"W0"} and slots["layers.0"] == {"Wb0"}
    assert slots["layers.0.frozen.bfloat16"] == {"Wc0"}
    assert program.slots["W0"].bytes == program.tiles["layers.0.frozen"].weight_bytes
    assert program.slots["Wb0"].bytes == program.tiles["layers.0"].weight_bytes


def test_ranks_of_one_layer_are_distinct_and_go_by_size() -> None:
    sizes = {"a": 5, "b": 9, "shared": 7, "head": 100, "c": 1}
    assert size_classes([("a", "shared", "b"), ("shared", "c", "head")], {"head"}, sizes.__getitem__) == {
        "b": 0, "shared": 1, "a": 2, "c": 0}


@pytest.mark.nightly(held_by="tests/model/test_frozen.py::test_no_gradient_of_a_frozen_weight_is_computed")
def test_below_the_first_trained_call_there_is_no_backward_and_nothing_is_kept() -> None:
    model = megacompile.stream(decoder("layers.2.up"), device="cpu")
    model(**batch(0))[0].backward()
    program = model.megacompile.program()
    backward = program.section("backward")
    visited = [argument(node, "call") for node in find(backward, "backward", "recompute_backward", "forward_saving")]
    assert visited == ["layers.2"]
    kept = {argument(value, "call") for node in find(program.section("forward"), "lease") for value in operands(node, "value")}
    assert "layers.0" not in kept and "layers.1" in kept, "the input of the last layer alone is a checkpoint"
    fetched = [argument(node, "tile") for node in find(backward, "prefetch")]
    assert sorted(fetched) == ["layers.2", "layers.2.frozen", "layers.2.frozen.bfloat16"]
    model.megacompile.close()


def test_no_gradient_of_a_frozen_weight_is_computed(norms: Any) -> None:
    captured = engine.captured(norms)
    for name in {call.template for call in captured.calls[1:-1]}:
        template = captured.templates[name]
        inputs = [template.inputs[g.input].role for g in template.variant("recompute_backward").gradients]
        assert all(role.kind == "carried" or "norm" in role.name for role in inputs)


@pytest.mark.nightly(held_by=(
    "tests/model/test_frozen.py::test_what_is_frozen_has_weights_alone_in_host_memory",
    "tests/model/test_frozen.py::test_a_parameter_has_a_gradient_where_it_has_one_natively"))
def test_a_model_of_which_nothing_trains_gives_losses_and_logits() -> None:
    model, native = decoder(), decoder()
    megacompile.stream(model, device="cpu")
    for ours, theirs in zip(model(**batch(1)), native(**batch(1)), strict=True):
        assert not ours.requires_grad
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert set(model.megacompile.stats["host_parts"]) == {"weights"}
    with pytest.raises(UnsupportedError, match="no parameter of the model is trained"):
        model.megacompile.train_step(batch(1), megacompile.AdamW(model.parameters()))
    with pytest.raises(UnsupportedError, match="no parameter of Decoder is trained"):
        megacompile.schedule(native, batch=2, length=8)
    model.megacompile.close()


# ---------------------------------------------------------------- trained parameters that a loss does not reach

class Chooser(Layer):
    """A layer that chooses features by scores of its own, which have no gradient; reads `wide` only in rows of at least twelve
    tokens; and, where it is `deaf`, keeps gradients from all layers below."""

    def __init__(self, deaf: bool) -> None:
        super().__init__()
        self.scores, self.wide, self.deaf = nn.Linear(16, 16), nn.Linear(16, 16), deaf

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach() if self.deaf else x
        chosen = self.scores(x).topk(8, dim=-1).indices
        x = x + torch.zeros_like(x).scatter(-1, chosen, x.gather(-1, chosen))
        return super().forward(x + self.wide(x) if x.shape[1] >= 12 else x)


def choosing(deaf: bool) -> Any:
    """Weights of one dtype, so that optimizers of PyTorch take all of them."""
    model = decoder("")
    for index in range(3):
        model.layers[index] = Chooser(deaf=deaf and index == 1)
    return model.float()


def gradients_there(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("deaf", [
    pytest.param(False, id="all layers"), pytest.param(True, id="layers below are not reached", marks=pytest.mark.nightly)])
def test_a_parameter_has_a_gradient_where_it_has_one_natively(deaf: bool) -> None:
    model, native = choosing(deaf), choosing(deaf)
    megacompile.stream(model, device="cpu", example=batch(0, length=8))
    for length in (8, 16, 8, 9):  # the second adds to what the first has left, the third to what the second has
        for each in (model, native):
            each(**batch(length, length=length))[0].backward()
        assert gradients_there(model) == gradients_there(native) < dict(native.named_parameters()).keys()
        assert_same_gradients(model, native)
        if length == 8:
            model.zero_grad()
            native.zero_grad()
    model.megacompile.close()


@pytest.mark.sample(3)
@pytest.mark.parametrize("deaf", [
    pytest.param(False, id="all layers"), pytest.param(True, id="layers below are not reached", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("how", ["loop", "whole step", "on arrival"])
@pytest.mark.parametrize(("ours", "theirs", "options"), [
    (megacompile.AdamW, torch.optim.AdamW, dict(lr=1e-2, weight_decay=0.5, eps=1e-4)),
    (megacompile.SGD, torch.optim.SGD, dict(lr=1e-2, weight_decay=0.5, momentum=0.9))], ids=["AdamW", "SGD"])
def test_a_parameter_that_the_loss_does_not_reach_is_neither_decayed_nor_moved(
        how: str, ours: Any, theirs: Any, options: dict[str, Any], deaf: bool) -> None:
    """Nor by the momentum of an earlier step that reached it."""
    model, native = choosing(deaf), choosing(deaf)
    megacompile.stream(model, device="cpu", example=batch(0, length=8))
    late = {"overlap": "backward"} if how == "on arrival" else {}
    optimizers = ours(model.parameters(), **options, **late), theirs(native.parameters(), **options)
    for seed, length in enumerate((8, 16, 8)):
        for each, optimizer in zip((model, native), optimizers, strict=True):
            given = batch(seed, length=length)
            if each is model and how == "whole step":
                each.megacompile.train_step(given, optimizer)
                continue
            each(**given)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(model, native)
    model.megacompile.close()
