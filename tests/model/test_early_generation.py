"""`generate` after a clipped step begins while the host still updates later layers: with the bits of the whole update, or with
its failure."""
from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import engine
import pytest
import tiny_models
import torch
from tiny_models import batch, cut_power, same_bits, weights
from torch import Tensor, fx, nn

import megacompile
from megacompile.errors import LaneError, NonFiniteError, TornError
from megacompile.ir.ops import UPDATE_OPS
from megacompile.ir.program import argument, op_of
from megacompile.streaming.generation.copied_tiles import CopiedTiles

LAYERS = 4
PROMPT = batch(7)["input_ids"]
PLANS: dict[str, dict[str, Any]] = {
    "on the host": {}, "deferred moments": {"deferred_moments": True}, "visits": {"visiting_state": ("model.layers.1",)},
    "first tiles there": {"resident": ("prologue", "model.layers.0"), "resident_state": ("prologue", "model.layers.0")},
    "weights there": {"resident": "all"}, "slab pool": {"pinned_memory": "1MiB"}}


def streamed(tied: bool = False, **options: Any) -> Any:
    made = tiny_models.build(bf16=True, num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    return megacompile.stream(made, device="cpu", **options)


@pytest.fixture
def model() -> Iterator[Any]:
    made = streamed()
    yield made
    made.megacompile.close()


def optimizer_of(model: Any) -> Any:
    return megacompile.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2, max_grad_norm=1.0)


def step(model: Any, optimizer: Any, seed: int = 0) -> None:
    """A clipped step, whose update is still under way."""
    model(**batch(seed)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def generated(model: Any, **options: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers on padding
        return model.generate(PROMPT, **{"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, **options})


class Seen:
    """Makes updates slow, and notes which tile is updated and which layer of the copy begins, in order."""

    def __init__(self, model: Any, seconds: float = 0.04, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.events: list[str] = []
        engine.probe(model, lambda node: self._slow(node, seconds))

    def _slow(self, node: fx.Node, seconds: float) -> None:
        if op_of(node).name in UPDATE_OPS:
            time.sleep(seconds)
            self.events.append(f"update {argument(node, 'tile')}")


def test_layers_are_computed_while_later_ones_are_updated(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, seen = optimizer_of(model), Seen(model)
    generated(model)
    reach = CopiedTiles.reach

    def noted(self: CopiedTiles, stage: str = "after") -> None:
        reach(self, stage)
        seen.events.append(stage)

    monkeypatch.setattr(CopiedTiles, "reach", noted)
    step(model, optimizer)
    generated(model)
    found = seen.events
    assert found.index("before") < found.index("update model.layers.2")
    assert found.index("model.layers.1") < found.index("update epilogue") < found.index("after")
    for layer in range(LAYERS):
        assert found.index(f"update model.layers.{layer}") < found.index(f"model.layers.{layer}")
    assert found.count("model.layers.1") == 1, "hooks are gone after the first forward"


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_tokens_and_weights_are_those_of_the_whole_update(plan: dict[str, Any], tied: bool) -> None:
    def run(early: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        model = streamed(tied, **plan)
        optimizer, found = optimizer_of(model), []
        Seen(model)
        for seed in range(3):  # the first use makes the copy, also early
            step(model, optimizer, seed)
            if not early:
                model.megacompile.synchronize()
            found.append(logits_of(model))
            found.append(generated(model, do_sample=True) if early else generated(model, do_sample=True))
        native = model.megacompile.device_copy.native
        held = {name: p.clone() for name, p in native.named_parameters()}
        assert same_bits(held, weights(model))
        model.megacompile.close()
        return found, held

    (ours, held), (theirs, expected) = run(True), run(False)
    assert all(map(torch.equal, ours, theirs)) and same_bits(held, expected)


def logits_of(model: Any) -> Tensor:
    """Of the last prompt token and of all new ones."""
    torch.manual_seed(3)
    found = generated(model, output_logits=True, return_dict_in_generate=True)
    return torch.stack(found.logits)
