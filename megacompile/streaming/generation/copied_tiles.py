"""Trained tiles of the plain model on the device, each in a slot of its own, while the host still updates later ones.

    cpu       |update prologue|update layer 0|update layer 1|...
    h2d                       |prologue|     |layer 0|      |layer 1|...
    compute                            |prologue|   |layer 0|       |layer 1|...

The copies are the section `load` of a program in which these tiles stay on the device. The lanes of training run it after the
update, so each copy waits for the update of its tile. In the first forward of a use, hooks make each layer wait for its copies.
They are gone after it. Parameters of the plain model are views of the slots.
"""
from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, fx, nn
from torch.utils.hooks import RemovableHandle

from megacompile.ir.placement import Placements
from megacompile.ir.plan import Plan
from megacompile.ir.program import CallSpec, Lane, Program, Tile, argument, find, model_program, op_of
from megacompile.passes import PIPELINE
from megacompile.passes.pipeline import compile_program
from megacompile.runtime.frame import Frame, Run
from megacompile.runtime.kernels import Batch
from megacompile.runtime.memory.arena import Arena
from megacompile.runtime.reference import ReferenceRun
from megacompile.streaming.generation.turns import read_tile, tiles_by_layer, untraced
from megacompile.streaming.streamed import Streamed

#: The stages of a forward beside its layers, which are called by name: before the first layer, and after the last one.
BEFORE, AFTER = "before", "after"


def stages_of(streamed: Streamed) -> dict[str, tuple[Tile, ...]]:
    """The trained tiles that each stage of a forward is the first to read, in order. Weights that several parts of the model
    have, and those that no layer reads, are read before the first layer."""
    tiling, calls = streamed.tiling, streamed.captured.calls
    trained = {name: layout for name, layout in tiling.layouts.items() if layout.trainable}
    names = [call.again or call.name for call in calls[1:-1]]
    found = tiles_by_layer(streamed.model, names, trained)
    earlier = {tile for call in calls[:-1] for tile in tiling.tiles_of[call.name]}
    last = [each for each in found.get("", ()) if each.name not in earlier and each.name in tiling.tiles_of[calls[-1].name]]
    first = [each for each in found.get("", ()) if each not in last]
    stages = {BEFORE: first, **{name: found[name] for name in names if name in found}, AFTER: last}
    return {stage: tuple(map(read_tile, layouts)) for stage, layouts in stages.items()}


@functools.lru_cache(maxsize=8)
def load_program(stages: tuple[tuple[str, tuple[Tile, ...]], ...]) -> Program:
    """The program whose section `load` copies these tiles to slots of their own, in this order."""
    roles = {BEFORE: "prologue", AFTER: "epilogue"}
    calls = [CallSpec(stage, roles.get(stage, "layer"), "native", tuple(tile.name for tile in its)) for stage, its in stages]
    tiles = {tile.name: tile for _, its in stages for tile in its}
    plan = Plan(1, 1, (1,), placements=Placements.named(resident=tuple(tiles)))
    return compile_program(model_program(calls, tiles, batch=1, labels=False), plan, PIPELINE).program


class CopiedTiles:
    """State: the run of the section that loads the tiles, until all of them are awaited, and the hooks that wait.

    A program of training may have slots of the same names, for tiles that stay on the device. Then events of either order the
    other one too, which only waits longer: beside this section lane h2d alone touches such slots, and it copies in order."""

    def __init__(self, streamed: Streamed) -> None:
        self._streamed, stages = streamed, stages_of(streamed)
        program = load_program(tuple(stages.items()))
        self._section, self._arena = program.section("load"), Arena(streamed.backend)
        self._arena.reserve(program.slots)
        self._views, copied = dict[str, Tensor](), dict[str, fx.Node]()
        for node in find(self._section, "prefetch"):
            layout = streamed.store.whole(argument(node, "tile")).layout
            views = self._arena.weights(argument(node, "into"), layout).views
            self._views |= {s.name: view for s, view in zip(layout.slices, views, strict=True)}
            copied[layout.name] = next(user for user in node.users if op_of(user).name == "record")
        #: One lane copies all tiles in order, so the last one of a stage is after all before it.
        self._copied = {stage: copied[tiles[-1].name] for stage, tiles in stages.items() if tiles}
        self._copied[AFTER] = list(copied.values())[-1]
        self._after = {s.name for tile in stages[AFTER] for s in streamed.tiling.layouts[tile.name].slices}
        self._run: Run | ReferenceRun | None = None
        self._hooks: list[RemovableHandle] = []

    def views(self, model: nn.Module) -> dict[int, Tensor]:
        """For the parameters of `model` that are in slots, by their `id`: the part of the slot, like the parameter."""
        return {id(p): self._views[name] for name, p in nn.Module.named_parameters(model) if name in self._views}

    def load(self) -> None:
        """Begins to copy all tiles, each after its update. Raises the failure of an earlier section."""
        streamed, backend = self._streamed, self._streamed.backend
        backend.enter([])
        backend.wait(Lane.H2D, backend.record(Lane.COMPUTE))  # which may still read the slots
        frame = Frame(backend, streamed.store, self._arena, {}, Batch([], {}))
        with streamed.guarded():
            self._run = streamed.executor.submit(self._section, frame, "load")

    def reach(self, stage: str = AFTER) -> None:
        """Makes compute wait for the tiles of this stage and of those before it. The host waits for their updates. Raises
        `LaneError` if one failed."""
        streamed = self._streamed
        if self._run is None or stage not in self._copied:
            return
        with streamed.call_lock, streamed.guarded(), streamed.backend.lane(Lane.COMPUTE):
            streamed.backend.wait(Lane.COMPUTE, self._run.reach(self._copied[stage]))
        if stage == AFTER:
            self._end()

    def attach(self, native: nn.Module) -> None:
        """Makes the layers of a model wait for their tiles in its first forward."""
        streamed, modules = self._streamed, dict(nn.Module.named_modules(native))
        readers = {name.rpartition(".")[0] for name in self._after}
        for name, stage in (*((name, name) for name in self._copied if name not in (BEFORE, AFTER)),
                            *((name, AFTER) for name in readers)):
            self._hooks.append(modules[name].register_forward_pre_hook(untraced(self._before, stage), prepend=True))
        last = streamed.captured.calls[-2]
        if (layer := modules.get(last.again or last.name)) is not None:  # what comes after it may read weights in any way
            self._hooks.append(layer.register_forward_hook(untraced(self._before, AFTER)))
        self.reach(BEFORE)

    def stop(self) -> None:
        """Waits for copies that have begun, whether or not they fail. Their memory may be freed then."""
        if self._run is not None:
            self._streamed.executor.idle()
            self._streamed.backend.synchronize()
        self._end()

    def _end(self) -> None:
        self._run = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _before(self, stage: str, *_: Any) -> None:
        self.reach(stage)
