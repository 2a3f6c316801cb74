"""Layers whose weights take turns on the device: their schedule is a program of the language, and the caller's thread follows
it in whatever order the model runs its layers."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import device_copies
import edits
import engine
import pytest
import torch
from tiny_models import batch
from torch import Tensor, fx, nn

from megacompile.errors import LaneError, ProgramError
from megacompile.ir.program import Lane, Program, Tile, copy_section, find, op_of
from megacompile.ir.text import parse
from megacompile.predict.simulate import simulate
from megacompile.runtime.backends.threads import ThreadBackend
from megacompile.streaming.device_copy import Turns, original_class
from megacompile.streaming.generation.turns import (
    LayerTurns,
    RoutedExperts,
    TurningLayer,
    copied_bytes,
    slot_bytes,
    turns_program,
)
from megacompile.verify.verifier import verify

LAYERS = 6


def program_of(layers: int = LAYERS) -> Program:
    """A layer with a tile of its adapters among layers with one tile."""
    tiles = [(Tile(f"layers.{n}", 100, 200, 200, False), *([Tile(f"layers.{n}.adapters", 50, 100, 100, False)] * (n == 1)))
             for n in range(layers)]
    return turns_program(tuple(TurningLayer(f"layers.{n}", tiles[n]) for n in range(layers)))


def program_of_experts(tokens: int | None = 1) -> Program:
    """A dense layer, then layers of 8 experts, of which 2 are chosen for each token."""
    dense = TurningLayer("layers.0", (Tile("layers.0", 100, 200, 200, False),))
    layers = [TurningLayer(f"layers.{n}", (Tile(f"layers.{n}.rest", 50, 100, 100, False),), RoutedExperts(
        f"layers.{n}.experts", (Tile(f"layers.{n}.experts", 400, 800, 800, False),), 8, 2)) for n in range(1, LAYERS)]
    return turns_program((dense, *layers), tokens)


streamed = device_copies.streamed_in_module(LAYERS)


@pytest.fixture
def turns(streamed: Any) -> Iterator[LayerTurns]:
    layers = streamed.megacompile.device_copy.layers()
    found = LayerTurns(layers, engine.backend(streamed), engine.store(streamed))
    yield found
    found.close()


def layers_of(model: Any) -> dict[str, dict[str, nn.Parameter]]:
    return {f"model.layers.{n}": dict(layer.named_parameters()) for n, layer in enumerate(model.model.layers)}


def holds(turns: LayerTurns, model: Any, layer: str) -> bool:
    """Whether the layer's slots have its weights."""
    views = turns.views(model)
    return all(torch.equal(views[id(p)], p) for p in layers_of(model)[layer].values())


def run_layer(turns: LayerTurns, model: Any, layer: str) -> bool:
    turns.enter(layer)
    held = holds(turns, model, layer)
    turns.leave(layer)
    return held


def test_the_program_is_its_own_text_and_takes_two_slots_of_each_size() -> None:
    program = program_of()
    assert parse(program.text()) == program
    assert slot_bytes(program) == 2 * 200 + 100 and set(program.sections) == {"evaluate"}


@pytest.mark.parametrize(("tokens", "copied"), [(1, 200), (3, 600), (4, 800), (None, 800)])
def test_as_many_bytes_of_experts_are_copied_as_tokens_choose_at_most(tokens: int | None, copied: int) -> None:
    program = program_of_experts(tokens)
    assert parse(program.text()) == program and slot_bytes(program) == 200 + 100 + 2 * 800
    assert copied_bytes(program) == 200 + (LAYERS - 1) * (100 + copied)
    by_choice = sum(1 for node in find(program.section("evaluate"), "prefetch_routed"))
    assert by_choice == (LAYERS - 1 if copied < 800 else 0)


@pytest.mark.parametrize("program", [program_of(), program_of_experts(), program_of_experts(None)],
                         ids=["dense", "chosen experts", "all experts"])
def test_a_program_without_one_of_its_waits_is_refused(program: Program) -> None:
    refused = 0
    for edit in edits.single(program):
        if edit.kind == "wait removed":
            with pytest.raises(ProgramError):
                verify(edit.apply(program))
            refused += 1
    assert refused > 2 * LAYERS


def _late(copy: fx.Node) -> None:
    """The experts run before they are copied."""
    next(user for user in copy.users if op_of(user).name == "forward").append(copy)


def _of_another_layer(copy: fx.Node) -> None:
    copy.kwargs = {**copy.kwargs, "router": next(find(copy.graph, "forward"))}


def _left_out(copy: fx.Node) -> None:
    """The experts run with the weights of the rest of the layer alone."""
    for user in find(copy.graph, "forward"):
        user.kwargs = {name: tuple(each for each in value if each is not copy) if name == "weights" else value
                       for name, value in user.kwargs.items()}


@pytest.mark.parametrize(("edit", "message"), [
    (_late, "before it is defined"), (_of_another_layer, "reads experts that forward before mb 0 has chosen"),
    (_left_out, "has weights of")])
def test_a_program_whose_experts_run_before_those_chosen_are_copied_is_refused(
        edit: Callable[[fx.Node], None], message: str) -> None:
    program = program_of_experts()
    graph = copy_section(program.section("evaluate"))
    edit(next(find(graph, "prefetch_routed")))
    with pytest.raises(ProgramError, match=message):
        verify(program.evolve(sections={"evaluate": graph}))


@pytest.mark.parametrize("link_s", [0.5, 2.0])
def test_a_call_takes_as_long_as_the_slower_of_copies_and_computation(link_s: float) -> None:
    seconds = {"prefetch": link_s, "forward": 1.0}
    program = turns_program(tuple(TurningLayer(str(n), (Tile(str(n), 100, 200, 200, False),)) for n in range(LAYERS)))
    timeline = simulate(program, lambda node: seconds.get(op_of(node).name, 0.0), sections=("evaluate",))
    assert LAYERS * max(link_s, 1.0) <= timeline.step_s <= LAYERS * max(link_s, 1.0) + link_s + 1.0


def test_each_layer_finds_its_weights_in_its_slots(turns: LayerTurns, streamed: Any) -> None:
    for _ in range(3):
        assert all(run_layer(turns, streamed, layer) for layer in turns.layers)


@pytest.mark.parametrize("order", [
    [0, 1, 2, 0, 1], [2, 3, 5, 0], [0, 0, 1, 1], [5, 4, 3], [0, 4, 5, 0, 1, 2, 3, 4, 5]], ids=str)
def test_layers_may_be_left_out_and_a_call_may_end_early(order: list[int], turns: LayerTurns, streamed: Any) -> None:
    """An exception in the model ends a call; some models leave layers out."""
    assert all(run_layer(turns, streamed, f"model.layers.{n}") for n in order)


def test_weights_that_change_between_uses_are_copied_again(turns: LayerTurns, streamed: Any) -> None:
    for layer in turns.layers:
        run_layer(turns, streamed, layer)
    turns.stop()
    with torch.no_grad():
        for p in streamed.model.layers[0].parameters():
            p.add_(1.0)
    assert run_layer(turns, streamed, "model.layers.0")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_copy_that_fails_says_so_and_the_next_call_copies_again(
        error: type[BaseException], turns: LayerTurns, streamed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run_layer(turns, streamed, "model.layers.0")
    with monkeypatch.context() as patched:
        patched.setattr(ThreadBackend, "copy", _failing(error))
        with pytest.raises(LaneError, match="prefetch failed"):
            _run_all(turns)
    turns.stop()
    assert all(run_layer(turns, streamed, layer) for layer in turns.layers)


def _run_all(turns: LayerTurns) -> None:
    for layer in turns.layers:
        turns.enter(layer)
        turns.leave(layer)


def _failing(error: type[BaseException]) -> Any:
    def copy(self: ThreadBackend, destination: Tensor, source: Tensor, lane: Lane) -> None:
        raise error("the link is gone")

    return copy


def test_generation_that_is_interrupted_goes_on_with_the_tokens_of_the_plain_model(streamed: Any) -> None:
    prompt, calls = batch(3, 2, 5)["input_ids"], []

    def interrupts(module: nn.Module, *_: Any) -> None:
        calls.append(module)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with torch.no_grad(), streamed.megacompile.on_device() as native:
        expected = native.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    streamed.megacompile.device_copy.release()
    use = streamed.megacompile.device_copy.use
    with torch.no_grad(), use(original_class(streamed), 0, Turns.ALL) as native:
        handle = native.model.layers[3].register_forward_pre_hook(interrupts)
        with pytest.raises(KeyboardInterrupt):
            native.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
        handle.remove()
        assert torch.equal(native.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0), expected)


def test_users_see_the_program_of_generation(streamed: Any) -> None:
    program = streamed.megacompile.generation_program()
    assert [call.name for call in program.calls if call.role == "layer"] == [f"model.layers.{n}" for n in range(LAYERS)]
    assert "p.prefetch(" in program.text()
