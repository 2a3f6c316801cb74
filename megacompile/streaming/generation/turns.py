"""Layers whose weights take turns in slots on the device, for inference with a model that does not fit.

    slot W0    layer 4    layer 6    layer 8
    slot W1       layer 5    layer 7    layer 9

The order of copies is a program of the same language as that of a training step: an `evaluate` section, made by the passes and
proven by the verifier. Lane h2d copies weights. The calls are layers of the user's own model, and the caller's thread runs it,
so this thread takes the place of lane compute. Before a layer it waits for the events that the program names. After the layer
it fires the events that let a slot be written again. A layer's parameters are views of its slots. Weights cross the link once
for each call of the model, for any number of sequences.
"""
from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.ir.plan import Plan
from megacompile.ir.program import CallSpec, Lane, Program, Tile, argument, find, lane_of, model_program, nodes, op_of
from megacompile.passes import PIPELINE
from megacompile.passes.pipeline import compile_program
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.executor import AbortedError, Executor
from megacompile.runtime.frame import Frame, Run
from megacompile.runtime.kernels import Batch
from megacompile.runtime.memory.arena import Arena
from megacompile.runtime.memory.store import Store
from megacompile.runtime.memory.tiles import TileLayout

_SECTION = "evaluate"


@dataclass(frozen=True)
class TurningLayer:
    """A layer by its name in the model, and the host tiles that hold weights of this layer alone."""

    name: str
    tiles: tuple[Tile, ...]

    @property
    def bytes(self) -> int:
        return sum(tile.weight_bytes for tile in self.tiles)


def turning_layers(model: nn.Module, names: Sequence[str], layouts: Mapping[str, TileLayout]) -> tuple[TurningLayer, ...]:
    """The layers that can take turns, of those with these `names`, in the order in which the model runs them. `layouts`: the
    host tiles. A layer that runs twice cannot take turns, nor can weights that other parts of the model have too: they stay on
    the device."""
    holders: dict[int, set[str]] = {}
    for full, p in nn.Module.named_parameters(model, remove_duplicate=False):
        holders.setdefault(id(p), set()).add(next((name for name in names if full.startswith(f"{name}.")), ""))
    own = {full: next(iter(holders[id(p)])) for full, p in nn.Module.named_parameters(model, remove_duplicate=False)
           if len(holders[id(p)]) == 1 and p.is_contiguous()}
    tiles: dict[str | None, list[Tile]] = {}
    for tile, layout in layouts.items():
        owners = {own.get(s.name) for s in layout.slices}
        if len(owners) == 1:
            tiles.setdefault(owners.pop(), []).append(
                Tile(tile, layout.parameters, layout.weight_bytes, layout.gradient_bytes, trainable=False))
    return tuple(TurningLayer(name, tuple(tiles[name])) for name in names if name in tiles and names.count(name) == 1)


def staying_layers(layers: Sequence[TurningLayer], budget_bytes: int) -> list[TurningLayer]:
    """The layers that stay on the device: as many as `budget_bytes` hold, evenly spread, so that copies of the others have
    time. At least one layer takes turns."""
    count = min(budget_bytes // max(layer.bytes for layer in layers), len(layers) - 1)
    return [layers[number * len(layers) // count] for number in range(count)]


@functools.lru_cache(maxsize=8)
def turns_program(layers: tuple[TurningLayer, ...]) -> Program:
    """The program of one call of a model in which these layers take turns. Its slots say what they take on the device.

    Cached: each call of `generate` asks for it several times, and for 80 layers the passes take 0.3 s."""
    turning = [CallSpec(layer.name, "layer", "native", tuple(tile.name for tile in layer.tiles)) for layer in layers]
    calls = [CallSpec("before", "prologue", "native", ()), *turning, CallSpec("after", "epilogue", "native", ())]
    tiles = {tile.name: tile for layer in layers for tile in layer.tiles}
    return compile_program(model_program(calls, tiles, batch=1, labels=False), Plan(1, 1, (1,)), PIPELINE).program


def slot_bytes(program: Program) -> int:
    """Bytes of the slots on the device."""
    return sum(slot.bytes for slot in program.slots.values())


def copied_bytes(program: Program) -> int:
    """Bytes that cross the link for each call of the model."""
    return sum(program.moved_bytes(node) for node in find(program.section(_SECTION), "prefetch"))


class LayerTurns:
    """Runs a program of `turns_program` for each call of the model. State: the run of the current call, None before the first;
    how many of its compute instructions are done; and the run of the call after it, whose first copies need not wait until the
    last layer is done."""

    def __init__(self, program: Program, backend: Backend, store: Store) -> None:
        self.program, self._backend, self._store = program, backend, store
        self._arena = Arena(backend)
        self._arena.reserve(program.slots)
        self._executor = Executor(backend)
        self._compute = [node for node in nodes(program.section(_SECTION)) if lane_of(node) == Lane.COMPUTE]
        self._run: Run | None = None
        self._next: Run | None = None
        self._done = 0
        weakref.finalize(self, self._executor.close).atexit = False

    @property
    def layers(self) -> list[str]:
        """The layers that take turns, by name, in their order."""
        return [call.name for call in self.program.calls if call.role == "layer"]

    def views(self, model: nn.Module) -> dict[int, Tensor]:
        """For the parameters of `model` that are in slots, by their `id`: the part of the slot, like the parameter."""
        parameters, found = dict(nn.Module.named_parameters(model, remove_duplicate=False)), dict[int, Tensor]()
        for node in find(self.program.section(_SECTION), "prefetch"):
            layout = self._store.whole(argument(node, "tile")).layout
            weights = self._arena.weights(argument(node, "into"), layout)
            found |= {id(parameters[s.name]): view for s, view in zip(layout.slices, weights.views, strict=True)}
        return found

    def attach(self, model: nn.Module) -> None:
        """Makes the layers of a model wait for their weights. The layers' parameters are views of the slots."""
        for name in self.layers:
            module = model.get_submodule(name)
            module.register_forward_pre_hook(_untraced_hook(self.enter, name), prepend=True)
            module.register_forward_hook(_untraced_hook(self.leave, name), always_call=True)

    def skip_call(self) -> None:
        """Copies the weights of all layers, as a call of the model does, but computes nothing."""
        self.stop()
        self._start()
        self._advance(len(self._compute))

    def stop(self) -> None:
        """Stops copies, and waits for those that have begun. The next call of the model copies its weights again, since the
        host's may have changed."""
        if self._run is not None:
            run, self._run, self._next = self._run, None, None
            self._executor.abandon(run)

    def close(self) -> None:
        """Ends the lane. The slots are free once nothing refers to their views."""
        self.stop()
        self._executor.close()

    # ---------------------------------------------------------------- the caller's thread, which is lane compute
    def _start(self) -> None:
        self._run, self._done = self._next or self._submitted(), 0
        self._next = self._submitted()

    def _submitted(self) -> Run:
        frame = Frame(self._backend, self._store, self._arena, {}, Batch([], {}))
        return self._executor.submit(self.program.section(_SECTION), frame, "generation", by_caller=Lane.COMPUTE)

    def enter(self, layer: str) -> None:
        """Waits until a layer's weights are in its slots. Called before the layer is computed."""
        position = self._position(layer)
        if position is None:  # the first call, or one that ended before its last layer
            self.stop()
            self._start()
            position = self._position(layer)
        assert position is not None, f"{layer} takes no turn"
        self._advance(position)

    def leave(self, layer: str) -> None:
        """Lets a layer's slots be written. Called after the layer was computed."""
        if self._run is None:
            return
        self._backend.enter([])  # what the layer has issued to the caller's stream comes before the events
        after = self._compute[self._done + 1:]
        waits = next((n for n, node in enumerate(after) if op_of(node).name in ("wait", "outputs")), len(after))
        self._advance(self._done + 1 + waits)
        if op_of(self._compute[self._done]).name == "outputs":
            self._advance(len(self._compute))
            self._start()

    def _position(self, layer: str) -> int | None:
        """Where this layer is computed, among the instructions that are left; None if it is not."""
        if self._run is None:
            return None
        return next((n for n in range(self._done, len(self._compute))
                     if op_of(self._compute[n]).name == "forward" and argument(self._compute[n], "call") == layer), None)

    def _advance(self, position: int) -> None:
        """Waits for events and fires events up to this instruction. The model itself does the work of the others.

        The host waits, not the device's queue: transformers' offloaded cache copies keys and values on a stream of its own,
        which is right only if the device is at most a little behind the host."""
        assert self._run is not None
        lanes = {"wait": Lane.CPU, "record": Lane.COMPUTE}
        try:
            with self._backend.lane(Lane.COMPUTE):
                for node in self._compute[self._done:position]:
                    if (lane := lanes.get(op_of(node).name)) is not None:
                        self._executor.issue(self._run, lane, node)
        except AbortedError:
            self._executor.check()  # raises what a copy failed with
        self._done = position


def _untraced_hook(act: Callable[[str], None], layer: str) -> Callable[..., None]:
    """A hook that compiled code calls without tracing it."""

    @torch.compiler.disable
    def hook(*_: Any) -> None:
        act(layer)

    return hook
