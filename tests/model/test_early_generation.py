"""`generate` after a clipped step begins while the host still updates later layers: with the bits of the whole update, or with
its failure."""
from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine
import pytest
import tiny_models
import torch
import transformers
from tiny_models import batch, cut_power, same_bits, weights
from torch import Tensor, fx
from torch._dynamo.utils import counters

import megacompile
from megacompile.errors import LaneError, NonFiniteError, TornError
from megacompile.ir.ops import UPDATE_OPS
from megacompile.ir.program import argument, op_of
from megacompile.streaming.generation.copied_tiles import AFTER, BEFORE, CopiedTiles
from megacompile.streaming.programs.executables import Executables

LAYERS = 4
NAMES = [f"model.layers.{number}" for number in range(LAYERS)]
PROMPT = batch(7)["input_ids"]
FIRST = "prologue"  # or "tied"
PLANS: dict[str, dict[str, Any]] = {
    "on the host": {}, "deferred moments": {"deferred_moments": True}, "a visit": {"visiting_state": (NAMES[1],)},
    "first tiles there": {"resident": (FIRST, NAMES[0]), "resident_state": (FIRST, NAMES[0])},
    "weights there": {"resident": "all"}, "slab pool": {"pinned_memory": "1MiB"},
    "no lanes": {"reference": True}}


def streamed(tied: bool = False, **options: Any) -> Any:
    made = tiny_models.build(bf16=True, num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    if tied:
        options = {name: tuple("tied" if tile == FIRST else tile for tile in value) if isinstance(value, tuple) else value
                   for name, value in options.items()}
    return megacompile.stream(made, device="cpu", **options)


@pytest.fixture
def model() -> Iterator[Any]:
    made = streamed()
    yield made
    engine.probe(made, None)
    made.megacompile.close()


def optimizer_of(model: Any) -> Any:
    return megacompile.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2, max_grad_norm=1.0)


def slow(seen: list[str] | None = None, seconds: float = 0.06, only: str | None = None) -> Callable[[fx.Node], None]:
    """A probe that makes updates slow, of one tile or of all. `seen`: gets the names of updated tiles."""

    def probe(node: fx.Node) -> None:
        if op_of(node).name in UPDATE_OPS:
            time.sleep(seconds if only in (None, argument(node, "tile")) else 0)
            if seen is not None:
                seen.append(f"update {argument(node, 'tile')}")

    return probe


def step(model: Any, optimizer: Any, seed: int = 0) -> None:
    """A clipped step, whose update goes on."""
    model(**batch(seed)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def generated(model: Any, **options: Any) -> Tensor:
    """The logits of all new tokens, whose bits tell more than the tokens."""
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers on padding
        found = model.generate(input_ids=PROMPT, **{
            "max_new_tokens": 4, "do_sample": True, "pad_token_id": 0, "eos_token_id": None, "output_logits": True,
            "return_dict_in_generate": True, **options})
    return torch.stack(found.logits)


def after_steps(model: Any, count: int, early: bool) -> list[Tensor]:
    """What is generated after each of so many steps, beside their slow updates or after them."""
    optimizer, found = optimizer_of(model), []
    engine.probe(model, slow(seconds=0.01))
    for seed in range(count):
        step(model, optimizer, seed)
        if not early:
            model.megacompile.synchronize()
        found.append(generated(model))
    return found


def waited(monkeypatch: pytest.MonkeyPatch, seen: list[str], left_out: tuple[str, ...] = ()) -> None:
    """Notes when a stage of the forward has its weights. Stages that are `left_out` do not wait for them."""
    reach = CopiedTiles.reach

    def noted(self: CopiedTiles, stage: str = AFTER) -> None:
        if stage not in left_out:
            reach(self, stage)
        seen.append(stage)

    monkeypatch.setattr(CopiedTiles, "reach", noted)


def assert_overlapped(seen: list[str]) -> None:
    assert seen.index(BEFORE) < seen.index(f"update {NAMES[2]}")
    assert seen.index(NAMES[1]) < seen.index("update epilogue") < seen.index(AFTER)
    assert all(seen.index(f"update {name}") < seen.index(name) for name in NAMES)


@pytest.mark.parametrize("plan", ["on the host", "first tiles there"])
def test_layers_are_computed_while_later_ones_are_updated(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = streamed(**PLANS[plan])
    optimizer, seen = optimizer_of(model), list[str]()
    waited(monkeypatch, seen)
    for _ in range(2):  # the copy is made, and is made current
        engine.probe(model, slow(seen))
        step(model, optimizer)
        generated(model)
        engine.probe(model, None)
        assert_overlapped(seen)
        assert all(seen.count(name) == 1 for name in NAMES), "hooks are gone after the first forward"
        seen.clear()
    generated(model)
    assert not seen, "nothing has changed since"
    model.megacompile.close()


def test_a_forward_that_transformers_compiles_begins_early_and_is_compiled_once(
        model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    counters.clear()
    compiled = transformers.CompileConfig(backend="aot_eager", mode=None)
    compiled._compile_all_devices = True
    optimizer, seen = optimizer_of(model), list[str]()
    waited(monkeypatch, seen)
    for number in range(3):
        engine.probe(model, slow(seen))
        step(model, optimizer, number)
        found = generated(model, cache_implementation="static", compile_config=compiled)
        engine.probe(model, None)
        assert_overlapped(seen)
        seen.clear()
        expected = generated(model)
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)  # bf16, and keys beyond the sequence
        if number:
            model.megacompile.device_copy.release()  # the next copy is another module
    assert counters["stats"]["unique_graphs"] == 1


def test_slots_of_training_give_way_while_the_update_runs(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, seen = optimizer_of(model), list[str]()
    waited(monkeypatch, seen)
    monkeypatch.setattr(Executables, "largest", property(lambda self: 1 << 60))
    engine.probe(model, slow(seen))
    step(model, optimizer)
    before = engine.arena(model).device_bytes()
    found = generated(model)
    assert_overlapped(seen)
    assert engine.arena(model).device_bytes() < before
    assert torch.equal(generated(model), found)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("plan", [*PLANS, "moments on disk"])
def test_tokens_and_weights_are_those_of_the_whole_update(plan: str, tied: bool, drive: Path) -> None:
    on_disk = {"disk": drive, "disk_state": tuple(NAMES)}

    def run(early: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        model = streamed(tied, **PLANS.get(plan, on_disk))
        found = after_steps(model, 3, early)
        held = weights(model.megacompile.device_copy.native)
        assert same_bits(held, weights(model))
        model.megacompile.close()
        return found, held

    (ours, held), (theirs, expected) = run(early=True), run(early=False)
    assert all(map(torch.equal, ours, theirs)) and same_bits(held, expected)


@pytest.mark.parametrize(("stage", "tile"), [(BEFORE, FIRST), (NAMES[1], NAMES[1]), (AFTER, "epilogue")])
def test_a_stage_that_does_not_wait_computes_with_old_weights(
        stage: str, tile: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the tests above would notice."""
    optimizer = optimizer_of(model)
    found = []
    for left_out in ((), (stage,)):
        with monkeypatch.context() as patch:
            model.megacompile.device_copy.release()
            generated(model)
            waited(patch, [], left_out)
            engine.probe(model, slow(seconds=0.5, only=tile))
            step(model, optimizer)
            found.append((generated(model), generated(model)))
            engine.probe(model, None)
    assert torch.equal(*found[0]) and not torch.equal(*found[1])


@pytest.mark.parametrize("number", [1, 3, 6], ids=["first tile", "a layer", "last tile"])
def test_an_update_that_fails_generates_nothing(number: int, model: Any) -> None:
    optimizer, other = optimizer_of(model), streamed()
    step(other, optimizer_of(other))
    generated(model)
    model(**batch()).loss.backward()
    cut_power(model, "update", number)
    optimizer.step()
    with pytest.raises(LaneError, match="power cut"):
        generated(model)
    engine.probe(model, None)
    if number > 1:
        with pytest.raises(TornError):
            generated(model)
    optimizer.step()  # completes it
    assert torch.equal(generated(model), generated(other))
    other.megacompile.close()


def test_gradients_that_are_not_finite_generate_nothing_and_change_nothing(model: Any) -> None:
    optimizer = optimizer_of(model)
    expected = generated(model)
    for made in (True, False):
        if not made:
            model.megacompile.device_copy.release()
        (model(**batch()).loss * float("nan")).backward()
        optimizer.step()
        with pytest.raises(NonFiniteError):
            generated(model)
        optimizer.zero_grad()
        assert torch.equal(generated(model), expected)


def test_ctrl_c_while_a_layer_waits_leaves_the_update_and_a_usable_model(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, other = optimizer_of(model), streamed()
    step(other, optimizer_of(other))
    engine.probe(model, slow())
    step(model, optimizer)
    reach = CopiedTiles.reach

    def interrupted(self: CopiedTiles, stage: str = AFTER) -> None:
        if stage == NAMES[1]:
            raise KeyboardInterrupt
        reach(self, stage)

    with monkeypatch.context() as patch:
        patch.setattr(CopiedTiles, "reach", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generated(model)
    assert torch.equal(generated(model), generated(other))
    step(model, optimizer)
    step(other, optimizer_of(other))
    other.megacompile.close()


@pytest.mark.parametrize("use", ["on_device", "chunks of prompts", "hook"])
def test_where_weights_may_be_read_outside_of_layers_all_are_awaited(
        use: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, seen = optimizer_of(model), list[str]()
    waited(monkeypatch, seen)
    if use == "hook":
        model.register_forward_pre_hook(lambda *_: None)
    engine.probe(model, slow(seen))
    step(model, optimizer)
    if use == "on_device":
        with model.megacompile.on_device() as native:
            held = weights(native)
        assert same_bits(held, weights(model))
    else:
        generated(model, **dict(cache_implementation="static", prefill_chunk_size=4) if use == "chunks of prompts" else {})
    assert seen[-1] == AFTER and not set(seen) & set(NAMES)


def test_a_generation_that_computes_nothing_leaves_a_current_copy(model: Any) -> None:
    optimizer = optimizer_of(model)
    generated(model)
    engine.probe(model, slow())
    step(model, optimizer)
    with pytest.raises(ValueError, match="max_new_tokens"):
        generated(model, max_new_tokens=0)
    with model.megacompile.on_device() as native:
        assert same_bits(weights(native), weights(model))


def test_adapters_are_current_over_weights_that_do_not_change() -> None:
    peft = pytest.importorskip("peft")
    found = list[Tensor]()
    for early in (True, False):
        adapter = peft.LoraConfig(r=2, target_modules=["v_proj", "down_proj"], init_lora_weights=False)
        torch.manual_seed(1)
        model = megacompile.stream(peft.get_peft_model(tiny_models.build(), adapter), device="cpu")
        found += after_steps(model, 2, early)
        model.megacompile.close()
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3]) and not torch.equal(*found[:2])
