"""Layers whose weights take turns in slots on the device, for inference with a model that does not fit.

    slot W0    layer 4    layer 6    layer 8
    slot W1       layer 5    layer 7    layer 9

The order of copies is a program of the same language as that of a training step: an `evaluate` section, made by the passes and
proven by the verifier. Lane h2d copies weights. The calls are layers of the user's own model, and the caller's thread runs it,
so this thread takes the place of lane compute. Before a layer it waits for the events that the program names. After the layer
it fires the events that let a slot be written again. A layer's parameters are views of its slots. Weights cross the link once
for each call of the model, for any number of sequences.

    model.layers.4                 attention, router, ...: its tiles are copied ahead
    model.layers.4.mlp.experts     experts, and the rest of the layer: only those that the router has chosen are copied

The stacked weights of a layer's experts are a tile, and a call, of their own. If a call of the model has too few tokens to
choose all experts, its program copies the chosen ones alone, between the two calls of a layer.
"""
from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from megacompile.errors import MegacompileError
from megacompile.ir.plan import Plan
from megacompile.ir.program import CallSpec, Lane, Program, Tile, argument, find, lane_of, model_program, nodes, op_of
from megacompile.passes import PIPELINE
from megacompile.passes.pipeline import compile_program
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.executor import AbortedError, Executor
from megacompile.runtime.frame import Frame, Run
from megacompile.runtime.kernels import Activation, Batch
from megacompile.runtime.memory.arena import Arena
from megacompile.runtime.memory.shards import TilePart
from megacompile.runtime.memory.store import Store
from megacompile.runtime.memory.tiles import ParameterSlice, TileLayout
from megacompile.weights.quantizing import stacked_weights

_SECTION = "evaluate"
_COPIES = ("prefetch", "prefetch_routed")
#: Options of configs: the number of experts that a router chooses for a token.
_PER_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_topk")
#: transformers' implementations of experts that read no weights of experts that are not chosen.
_READ_CHOSEN = ("eager", "grouped_mm", "batched_mm")


@dataclass(frozen=True)
class RoutedExperts:
    """The experts of a layer: the name of their module in the model, the tiles of their stacked weights [experts, ...], their
    number, and how many of them a router chooses for a token."""

    module: str
    tiles: tuple[Tile, ...]
    count: int
    per_token: int

    def chosen_by(self, tokens: int) -> RoutedExperts:
        """The same, of which only the experts are copied that so many tokens choose at most."""
        return replace(self, tiles=tuple(replace(
            tile, routed_bytes=tile.weight_bytes * tokens * self.per_token // self.count) for tile in self.tiles))


@dataclass(frozen=True)
class TurningLayer:
    """A layer by its name in the model, and the host tiles that hold weights of this layer alone; those of its `experts` are
    apart. `parts`: the layouts of tiles that are parts of a host tile."""

    name: str
    tiles: tuple[Tile, ...]
    experts: RoutedExperts | None = None
    parts: tuple[TileLayout, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(tile.weight_bytes for tile in (*self.tiles, *(self.experts.tiles if self.experts else ())))


def turning_layers(model: nn.Module, names: Sequence[str], layouts: Mapping[str, TileLayout]) -> tuple[TurningLayer, ...]:
    """The layers that can take turns, of those with these `names`, in the order in which the model runs them. `layouts`: the
    host tiles. A layer that runs twice cannot take turns, nor can weights that other parts of the model have too: they stay on
    the device."""
    tiles = tiles_by_layer(model, names, layouts)
    return tuple(_turning(model, name, tiles[name]) for name in names if name in tiles and names.count(name) == 1)


def tiles_by_layer(model: nn.Module, names: Sequence[str], layouts: Mapping[str, TileLayout]) -> dict[str, list[TileLayout]]:
    """The tiles that hold weights of one layer alone, by its name; under "" all other tiles."""
    holders: dict[int, set[str]] = {}
    for full, p in nn.Module.named_parameters(model, remove_duplicate=False):
        holders.setdefault(id(p), set()).add(next((name for name in names if full.startswith(f"{name}.")), ""))
    own = {full: next(iter(holders[id(p)])) for full, p in nn.Module.named_parameters(model, remove_duplicate=False)
           if len(holders[id(p)]) == 1 and p.is_contiguous()}
    tiles: dict[str, list[TileLayout]] = {}
    for layout in layouts.values():
        owners = {own.get(s.name, "") for s in layout.slices}
        tiles.setdefault(owners.pop() if len(owners) == 1 else "", []).append(layout)
    return tiles


def _turning(model: nn.Module, name: str, layouts: Sequence[TileLayout]) -> TurningLayer:
    """A layer with these host tiles. Its experts are apart if one module has them all, as stacks, not in codes."""
    found = [(f"{name}.{path}", each) for path, each in model.get_submodule(name).named_modules() if stacked_weights(each)]
    path, module = found[0] if len(found) == 1 else ("", nn.Module())
    stacks = {f"{path}.{weight}": len(p) for weight, p in stacked_weights(module).items()}
    rest, experts = list[TileLayout](), list[TileLayout]()
    for layout in layouts:
        own = [s for s in layout.slices if s.name in stacks]
        others = [s for s in layout.slices if s.name not in stacks]
        experts += [_part(layout, "experts", own)] if own else []
        rest += [_part(layout, "rest", others) if own else layout] if others else []
    if not experts:
        return TurningLayer(name, tuple(map(read_tile, rest)))
    count = min(stacks.values())
    per_token = next((k for option in _PER_TOKEN if isinstance(k := getattr(module.config, option, None), int)), count)
    routed = RoutedExperts(path, tuple(map(read_tile, experts)), count, per_token)
    return TurningLayer(name, tuple(map(read_tile, rest)), routed, tuple(layout for layout in (*rest, *experts) if layout.home))


def _part(layout: TileLayout, name: str, slices: Sequence[ParameterSlice]) -> TileLayout:
    """The layout of some parameters of a host tile."""
    part = TileLayout.of(f"{layout.name}.{name}", layout.dtype, [(s.name, s.shape, s.trainable, s.stands_for) for s in slices])
    return replace(part, home=layout.name, origins=tuple(s.start for s in slices))


def read_tile(layout: TileLayout) -> Tile:
    """The tile in a program that only reads it."""
    return Tile(layout.name, layout.parameters, layout.weight_bytes, layout.gradient_bytes, trainable=False)


def staying_layers(layers: Sequence[TurningLayer], budget_bytes: int) -> list[TurningLayer]:
    """The layers that stay on the device: as many as `budget_bytes` hold, evenly spread, so that copies of the others have
    time. At least one layer takes turns."""
    count = min(budget_bytes // max(layer.bytes for layer in layers), len(layers) - 1)
    return [layers[number * len(layers) // count] for number in range(count)]


def most_tokens(layers: Sequence[TurningLayer]) -> int:
    """The most tokens of a call for which only chosen experts are copied: those that choose fewer experts than there are, in
    each layer with experts. 0 without such layers, and if a config does not tell how many experts a token has."""
    return min(((each.experts.count - 1) // each.experts.per_token for each in layers if each.experts), default=0)


def spared_bytes(layers: Sequence[TurningLayer], tokens: int | None) -> int:
    """Bytes that need not cross the link for a call of so many tokens, which choose fewer experts. None: unknown."""
    if tokens is None or tokens > most_tokens(layers):
        return 0
    chosen = (tile for each in layers if each.experts for tile in each.experts.chosen_by(tokens).tiles)
    return sum(tile.weight_bytes - tile.routed_bytes for tile in chosen)


@functools.lru_cache(maxsize=8)
def turns_program(layers: tuple[TurningLayer, ...], tokens: int | None = None) -> Program:
    """The program of one call of a model in which these layers take turns. Its slots say what they take on the device.
    `tokens`: of the call, of all sequences; if they are not more than `most_tokens`, only chosen experts are copied. None: all.

    Cached: each call of `generate` asks for it several times, and for 80 layers the passes take 0.3 s."""
    calls, tiles = [CallSpec("before", "prologue", "native", ())], dict[str, Tile]()
    for layer in layers:
        read = {tile.name: tile for tile in layer.tiles}
        calls.append(CallSpec(layer.name, "layer", "native", tuple(read)))
        if (experts := layer.experts) is not None:
            experts = experts.chosen_by(tokens) if tokens is not None and tokens <= most_tokens(layers) else experts
            read |= {tile.name: tile for tile in experts.tiles}
            calls.append(CallSpec(experts.module, "layer", "native", tuple(read)))
        tiles |= read
    calls.append(CallSpec("after", "epilogue", "native", ()))
    return compile_program(model_program(calls, tiles, batch=1, labels=False), Plan(1, 1, (1,)), PIPELINE).program


def slot_bytes(program: Program) -> int:
    """Bytes of the slots on the device."""
    return sum(slot.bytes for slot in program.slots.values())


def copied_bytes(program: Program) -> int:
    """Bytes that cross the link for each call of the model, at most: tokens may choose the same experts."""
    return sum(program.moved_bytes(node) for node in find(program.section(_SECTION), *_COPIES))


class LayerTurns:
    """Runs a program of `turns_program` for each call of the model: one that copies all weights, or one that copies only chosen
    experts. The first call copies all. It shows whether each layer runs its module of experts once: only then the numbers that
    this module is given name all experts that the layer reads. `layers`: by name, in their order.

    State: the run of the current call, None before the first, and whether it copies only chosen experts (`_routed`); how many
    of its compute instructions are done; how many `_rows` it has. The run of the call after it, whose first copies need not
    wait until the last layer is done. How often (`_times`) the current layer has run its experts, and each layer when it last
    ran."""

    def __init__(self, layers: tuple[TurningLayer, ...], backend: Backend, store: Store) -> None:
        self.layers, self._most_tokens = {layer.name: layer for layer in layers}, most_tokens(layers)
        self.program = turns_program(layers)
        self._programs = {False: self.program, True: turns_program(layers, self._most_tokens)}
        assert _slots(self.program) == _slots(self._programs[True]), "parameters are views of one slot in both programs"
        parts = {part.name: TilePart(part, store.tiles[part.home], None) for layer in layers for part in layer.parts}
        self._backend, self._store = backend, Store(store.tiles, store.parts | parts)
        self._arena = Arena(backend)
        self._arena.reserve(self.program.slots)
        self._executor = Executor(backend)
        self._compute = {routed: [node for node in nodes(program.section(_SECTION)) if lane_of(node) == Lane.COMPUTE]
                         for routed, program in self._programs.items()}
        self._positions = {routed: {argument(node, "call"): n for n, node in enumerate(compute)
                                    if op_of(node).name == "forward"} for routed, compute in self._compute.items()}
        self._run: Run | None = None
        self._next: tuple[Run, bool] | None = None
        self._routed, self._done, self._rows, self._times = False, 0, 1, 0
        self._observed: dict[str, int] = {}
        weakref.finalize(self, self._executor.close).atexit = False

    def views(self, model: nn.Module) -> dict[int, Tensor]:
        """For the parameters of `model` that are in slots, by their `id`: the part of the slot, like the parameter."""
        parameters, found = dict(nn.Module.named_parameters(model, remove_duplicate=False)), dict[int, Tensor]()
        for tile, slot in _slots(self.program).items():
            layout = self._store.whole(tile).layout
            weights = self._arena.weights(slot, layout)
            found |= {id(parameters[s.name]): view for s, view in zip(layout.slices, weights.views, strict=True)}
        return found

    def attach(self, model: nn.Module) -> None:
        """Makes the layers of a model wait for their weights. The layers' parameters are views of the slots."""
        for name, layer in self.layers.items():
            module = model.get_submodule(name)
            module.register_forward_pre_hook(untraced(self._before_layer, name), prepend=True, with_kwargs=True)
            module.register_forward_hook(untraced(self._after_layer, name), always_call=True)
            if layer.experts is not None:
                model.get_submodule(layer.experts.module).register_forward_pre_hook(
                    untraced(self._before_experts, name), prepend=True, with_kwargs=True)

    def skip_call(self) -> None:
        """Copies the weights of all layers, as a call of the model does, but computes nothing."""
        self.stop()
        self._start(routed=False)
        self._advance(len(self._compute[False]))

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
    def enter(self, layer: str, hidden: Tensor | None = None) -> None:
        """Waits until a layer's weights are in its slots, except those of experts for which `route` waits. Called before the
        layer is computed. `hidden`: the hidden states that it reads, [rows, ..., width]; None: they are not known, and all
        experts are copied."""
        tokens, self._rows = (None, 1) if hidden is None else (hidden.numel() // hidden.shape[-1], len(hidden))
        routed, position = self._copies_chosen(tokens), self._position(layer)
        if position is None or (self._done == 0 and self._routed != routed):
            # The first call, one after a call that ended before its last layer, or one of more or fewer tokens than expected.
            self.stop()
            self._start(routed)
            position = self._position(layer)
        experts = self.layers[layer].experts
        if experts is not None and not self._routed and self._observed.get(layer) != 1:
            position = self._position(experts.module)
        assert position is not None, f"{layer} takes no turn"
        self._advance(position)
        self._times = 0

    def route(self, layer: str, chosen: Tensor | None) -> None:
        """Waits until the experts of a layer are in their slots. Called before they are computed. `chosen`: the numbers of
        those that are read, int, any shape; None: all may be read. Raises `MegacompileError` if they run a second time and only
        those chosen at first are there."""
        experts = self.layers[layer].experts
        assert experts is not None, f"{layer} has no experts"
        if self._run is None or (position := self._position(experts.module)) is None:
            return  # not in a call of the layer
        self._times += 1
        if self._routed:
            if self._times > 1:
                self._refuse(layer)
            # Numbers of other ranks' experts, which transformers replaces by the last one's.
            numbers = range(experts.count) if chosen is None else sorted(
                {min(number, experts.count - 1) for number in chosen.flatten().tolist()})
            self._run.frame.values[self._compute[True][self._done]] = Activation((), experts=numbers)
        self._backend.enter([])  # what the layer has issued so far comes before the events
        self._advance(position)

    def leave(self, layer: str, failed: bool = False) -> None:
        """Lets a layer's slots be written. Called after the layer was computed, or has `failed`. Raises `MegacompileError` if
        only chosen experts would have been copied, and it has not run its experts' module."""
        if self._run is None:
            return
        if self.layers[layer].experts is not None and not failed:
            if self._routed and not self._times:
                self._refuse(layer)
            self._observed[layer] = self._times
        self._backend.enter([])  # what the layer has issued to the caller's stream comes before the events
        compute = self._compute[self._routed]
        after = compute[self._done + 1:]
        until = next((n for n, node in enumerate(after) if op_of(node).name in ("wait", "forward", "outputs")), len(after))
        self._advance(self._done + 1 + until)
        if op_of(compute[self._done]).name == "outputs":
            self._advance(len(compute))
            self._start()

    def _start(self, routed: bool = False) -> None:
        """Begins the call that was submitted last; if there is none, a new one."""
        (self._run, self._routed), self._done = self._next or self._submitted(routed), 0
        self._next = self._submitted(self._copies_chosen(self._rows, unknown=1))  # usually it has one token of each row

    def _submitted(self, routed: bool) -> tuple[Run, bool]:
        frame = Frame(self._backend, self._store, self._arena, {}, Batch([], {}))
        section = self._programs[routed].section(_SECTION)
        return self._executor.submit(section, frame, "generation", by_caller=Lane.COMPUTE), routed

    def _copies_chosen(self, tokens: int | None, unknown: int = 0) -> bool:
        """True if a call of so many tokens copies only chosen experts. `unknown`: how often layers that have not run yet are
        taken to run their experts."""
        return tokens is not None and tokens <= self._most_tokens and all(
            self._observed.get(name, unknown) == 1 for name, layer in self.layers.items() if layer.experts is not None)

    def _refuse(self, layer: str) -> NoReturn:
        self._observed[layer] = self._times
        self.stop()
        raise MegacompileError(
            f"{layer} runs its module of experts {self._times} times, and once in the call before, so that it would read "
            "experts that were not copied: call the model again, which copies all experts then")

    def _position(self, name: str) -> int | None:
        """Where this layer, or its experts, are computed, among the instructions that are left; None if they are not."""
        position = self._positions[self._routed].get(name, -1)
        return position if self._run is not None and position >= self._done else None

    def _advance(self, position: int) -> None:
        """Waits for events and fires events up to this instruction. The model itself does the work of the others.

        The host waits, not the device's queue: transformers' offloaded cache copies keys and values on a stream of its own,
        which is right only if the device is at most a little behind the host."""
        assert self._run is not None
        lanes = {"wait": Lane.CPU, "record": Lane.COMPUTE}
        try:
            with self._backend.lane(Lane.COMPUTE):
                for node in self._compute[self._routed][self._done:position]:
                    if (lane := lanes.get(op_of(node).name)) is not None:
                        self._executor.issue(self._run, lane, node)
                    elif op_of(node).name == "forward":  # a layer that was left out, or has failed, has chosen no experts
                        self._run.frame.values.setdefault(node, Activation(()))
        except AbortedError:
            self._executor.check()  # raises what a copy failed with
        self._done = position

    # ---------------------------------------------------------------- hooks of the model's modules
    def _before_layer(self, layer: str, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        self.enter(layer, next((each for each in tensors if each.is_floating_point()), None))

    def _after_layer(self, layer: str, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.leave(layer, failed=output is None)

    def _before_experts(self, layer: str, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        numbers = next((each for each in tensors if not each.is_floating_point()), None)
        self.route(layer, numbers if getattr(module.config, "_experts_implementation", None) in _READ_CHOSEN else None)


def _slots(program: Program) -> dict[str, str]:
    """The slot of each tile."""
    return {argument(node, "tile"): argument(node, "into") for node in find(program.section(_SECTION), *_COPIES)}


def untraced(act: Callable[..., None], layer: str) -> Callable[..., None]:
    """A hook that compiled code calls without tracing it."""

    @torch.compiler.disable
    def hook(*given: Any) -> None:
        act(layer, *given)

    return hook
