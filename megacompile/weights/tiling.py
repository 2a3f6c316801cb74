"""Parameters -> tiles: which tile holds which parameter.

A parameter belongs to the tile of the one call that reads it. A parameter that several calls read (tied weights) belongs to a
tile that all of them read, so that it has one gradient and one update. Frozen parameters have their own tiles, since only
trained ones have gradients and optimizer state; so do parameters of another dtype.

Experts that several calls divide among them are in one host tile, of which each call streams its part
(`runtime/memory/shards.py`).
"""
from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megacompile.errors import InsufficientMemoryError
from megacompile.frontend.graph.pieces import Rows
from megacompile.frontend.templates.template import Call, Template
from megacompile.frontend.tracing.fake_model import streamed_dtype
from megacompile.ir.program import CallSpec, Tile, boundary_tiles, differentiated_layers, first_trained, size_classes
from megacompile.predict import cost
from megacompile.runtime.memory.shards import TilePart
from megacompile.runtime.memory.state_layout import ElementState
from megacompile.runtime.memory.store import Store
from megacompile.runtime.memory.tiles import HostTile, TileLayout
from megacompile.runtime.optimizer.state_format import BFLOAT16, BLOCK
from megacompile.sizes import format_bytes
from megacompile.system.host_memory import available_host_bytes
from megacompile.weights.codes import weights_of_codes

#: Host memory that a process needs in addition to tiles: the interpreter, PyTorch, a batch.
HOST_MARGIN_BYTES = 1 << 30
#: With CUDA also the driver and its libraries (1 to 2 GiB were measured) and the workers that compile kernels (1 GiB).
CUDA_HOST_MARGIN_BYTES = 4 << 30


def host_margin_bytes(device_type: str) -> int:
    """Host memory that a process needs in addition to tiles."""
    return CUDA_HOST_MARGIN_BYTES if device_type == "cuda" else HOST_MARGIN_BYTES


#: (tile, index of the parameter in it).
Position = tuple[str, int]
#: (whether a parameter trains, its dtype): parameters of one kind share a tile.
Kind = tuple[bool, torch.dtype]


class Spec(NamedTuple):
    """A parameter, or a share of one, as tiles see it. `weights`: the number of weights that its elements encode; None: they
    are weights."""

    kind: Kind
    shape: tuple[int, ...]
    weights: int | None = None


@dataclass(frozen=True)
class Tiling:
    """The tiles of a model: `layouts` as they are streamed, `host` as they are in host memory. `tiles_of`: the tiles of each
    call, its own first. `position`: each parameter's tile in host memory, and its index there. `streamed_at`: where it is
    streamed, several positions for experts in pieces. `read_at`: where a call finds a value, by the call's name for it.
    `hosts`: the number of copies of these tiles. `spread`: the number of hosts that each is divided among.
    `on_disk`: the tiles whose moments are on disk; they are streamed whole. `process_bytes`: host memory that each process
    needs in addition."""

    layouts: Mapping[str, TileLayout]
    host: Mapping[str, TileLayout]
    tiles_of: Mapping[str, tuple[str, ...]]
    position: Mapping[str, Position]
    streamed_at: Mapping[str, tuple[Position, ...]]
    read_at: Mapping[str, Position]
    hosts: int = 1
    on_disk: tuple[str, ...] = ()
    process_bytes: int = HOST_MARGIN_BYTES
    spread: int = 1

    @classmethod
    def of(cls, model: nn.Module, calls: Sequence[Call], dtype: torch.dtype | None,
           rows: Mapping[str, Rows] = MappingProxyType({}), ranks: int = 1,
           hosts: int = 1, device_type: str = "cpu", spread: int = 1) -> Tiling:
        """The tiling of a model. `dtype`: of all parameters; None: each has its own. `rows`: names that calls read which are
        shares of a parameter. `ranks`: the number of processes that share a copy of the tiles. `hosts` and `spread`: as of
        the tiling. `device_type`: of the device that computes."""
        readers = _readers(calls)
        group = _groups(calls, readers)
        shares = {name: share for name, share in rows.items() if name in readers}
        specs = _specs(model, dtype, shares)
        whole = _members({name: group[name] for name in specs if name in readers and name not in shares})
        experts = _members({share.parameter: share.parameter.rpartition(".")[0] for share in shares.values()})
        parts = _members({name: group[name] for name in shares})
        # Other parameters that a piece reads (a norm after the experts) are not part of the experts' host tile.
        whole = {f"{tile}.rest" if tile in parts else tile: names for tile, names in whole.items()}

        own, on_host, streamed = (_tiles(members, specs) for members in (whole, experts, parts))
        host = {tile: _layout(tile, names, specs, ranks) for tile, names in (own | on_host).items()}
        position = _positions(own | on_host)
        layouts = {tile: host[tile] if tile in own else _part(_layout(tile, names, specs, ranks), shares, host, position)
                   for tile, names in (own | streamed).items()}
        tiles_of = _tiles_of(calls, {tile: readers[names[0]] for tile, names in (streamed | own).items()})
        read_at = _positions(own | streamed)
        streamed_at: dict[str, tuple[Position, ...]] = {}
        for name, at in read_at.items():
            parameter = shares[name].parameter if name in shares else name
            streamed_at[parameter] = (*streamed_at.get(parameter, ()), at)
        ordered = {tile: layouts[tile] for tiles in tiles_of.values() for tile in tiles}
        homes = {layout.home or tile: host[layout.home or tile] for tile, layout in ordered.items()}
        return cls(ordered, homes, tiles_of, position, streamed_at, read_at, hosts,
                   process_bytes=host_margin_bytes(device_type), spread=spread)

    @property
    def ranks(self) -> int:
        """The number of processes that share a copy of the tiles."""
        return next(iter(self.layouts.values())).ranks

    @property
    def ranks_here(self) -> int:
        """The number of processes of a host."""
        return self.ranks // self.spread

    @property
    def margin_bytes(self) -> int:
        """Host memory that the processes of a host need in addition to tiles."""
        return self.ranks_here * self.process_bytes

    @property
    def trains(self) -> bool:
        """True if any parameter is trained."""
        return any(layout.trainable for layout in self.layouts.values())

    @property
    def quantized(self) -> bool:
        """True if any weights are in codes."""
        return any(s.stands_for is not None for layout in self.host.values() for s in layout.slices)

    def _trains(self, tile: str) -> bool:
        return self.layouts[tile].trainable

    def differentiated(self, calls: Sequence[Call]) -> list[Call]:
        """The layers that have a backward: those from the first call on that trains a parameter."""
        names = set(differentiated_layers(self._chain(), self._trains))
        return [call for call in calls if call.name in names]

    def operations(self, active: Mapping[str, float] | None = None) -> int:
        """FLOPs per token of a step's products with parameters, without recomputation. Per parameter: 2 for the forward, 2 for
        the gradient of the other operand if there is a backward, 2 for the parameter's own gradient if it is trained. `active`:
        the share of a tile's parameters that a token uses, if it is not 1."""
        chain = self._chain()
        reached = {tile for call in chain[first_trained(chain, self._trains):] for tile in call.tiles}
        boundary = self.boundary()  # an embedding tied to the head does not add a product
        used = {tile: layout.parameters * (active or {}).get(tile, 1) for tile, layout in self.layouts.items()}
        return round(sum(used[tile] * (6 if layout.trainable else 4 if tile in reached else 2)
                         * (1 if tile in boundary else self.runs(tile)) for tile, layout in self.layouts.items()))

    # Plans are compared by memory many thousand times, so these are counted once.
    @functools.cached_property
    def _runs(self) -> Counter[str]:
        return Counter(tile for tiles in self._layers() for tile in set(tiles))

    @functools.cached_property
    def _boundary(self) -> frozenset[str]:
        return frozenset(boundary_tiles(self._chain()))

    @functools.cached_property
    def _size_classes(self) -> tuple[tuple[TileLayout, ...], ...]:
        classes = size_classes(self._layers(), self.boundary(), lambda tile: self.layouts[tile].weight_bytes)
        return tuple(tuple(self.layouts[tile] for tile, its_class in classes.items() if its_class == each)
                     for each in sorted(set(classes.values())))

    def runs(self, tile: str) -> int:
        """The number of layer calls that read a tile."""
        return self._runs[tile]

    def boundary(self) -> frozenset[str]:
        """The tiles that the prologue or the epilogue reads."""
        return self._boundary

    def size_classes(self) -> tuple[tuple[TileLayout, ...], ...]:
        """The tiles that only layers read, by size class (`megacompile.ir.program.size_classes`), the largest first."""
        return self._size_classes

    @property
    def trained(self) -> list[str]:
        """The names of the parameters that updates write."""
        return [s.name for layout in self.host.values() for s in layout.slices if s.trainable]

    @property
    def states(self) -> dict[str, ElementState]:
        """The optimizer state of each trained parameter, by name."""
        return {s.name: layout.state_of(i) for layout in self.host.values() for i, s in enumerate(layout.slices) if s.trainable}

    @property
    def has_matrices(self) -> bool:
        """True if whole matrices are updated. They are updated on the device, at the end of a step."""
        return any(layout.has_matrices for layout in self.layouts.values())

    def with_states(self, states: Mapping[str, ElementState]) -> Tiling:
        """The tiling of the same weights with other optimizer state of these parameters, by name. bf16 moments replace 8-bit
        state if streamed pieces, or matrices that are updated one by one, would divide its blocks."""
        known = {s.name: layout.state_of(i) for layout in self.host.values() for i, s in enumerate(layout.slices)}
        known |= {name: self._undivided(name, state) for name, state in states.items()}

        def changed(layouts: Mapping[str, TileLayout]) -> dict[str, TileLayout]:
            return {tile: layout.with_states(known) if layout.trainable else layout for tile, layout in layouts.items()}

        return replace(self, layouts=changed(self.layouts), host=changed(self.host))

    def _undivided(self, name: str, state: ElementState) -> ElementState:
        tile, index = self.position[name]
        start, shape = self.host[tile].slices[index].start, self.host[tile].slices[index].shape
        begins = [self.layouts[streamed].at_home(i).start - start for streamed, i in self.streamed_at.get(name, ())]
        if state.whole:
            begins.append(math.prod(shape[-2:]))  # where the next matrix of a stack begins
        divided = state.format.scaled and any(begin % BLOCK for begin in begins)
        return replace(state, format=BFLOAT16) if divided else state

    def host_parts(self, gradients: bool = True) -> dict[str, int]:
        """Bytes of memory of a host for training, by part of the tiles. `gradients`: they wait there for a step."""
        parts: Counter[str] = Counter()
        for layout in self.host.values():
            parts.update(layout.host_parts(gradients))
        parts["moments"] -= sum(self.host[tile].host_parts()["moments"] for tile in self.on_disk)
        return {part: -(-count // self.spread) for part, count in parts.items()}

    def host_bytes(self, gradients: bool = True) -> int:
        return sum(self.host_parts(gradients).values())

    def store(self, tiles: Mapping[str, HostTile]) -> Store:
        """A store of these host tiles and of the parts of them that are streamed."""
        return Store(dict(tiles), {name: TilePart.of(layout, tiles[layout.home]) for name, layout in self.layouts.items()
                                   if layout.home})

    def tiles(self) -> dict[str, Tile]:
        """The tiles in the form of schedules."""
        return {name: Tile(name, layout.parameters, layout.weight_bytes, layout.gradient_bytes, layout.trainable,
                           layout.state_bytes, layout.visit_bytes, layout.disk_bytes if name in self.on_disk else 0,
                           layout.rule)
                for name, layout in self.layouts.items()}

    def call_specs(self, calls: Sequence[Call], templates: Mapping[str, Template], length: int,
                   lengths: Sequence[int] = ()) -> tuple[CallSpec, ...]:
        """The calls in the form of schedules, for sequences of `length` tokens. `lengths`: of each micro-batch if they
        differ."""
        layers = {call.template for call in calls[1:-1]}
        handed_on = {name: (cost.activation_checkpoint_bytes(templates[name], length),
                            tuple(cost.activation_checkpoint_bytes(templates[name], each) for each in lengths))
                     for name in layers}
        return tuple(replace(spec, template=call.template, weightless=_weightless(templates[call.template]),
                             output_bytes=handed_on.get(call.template, (0, ()))[0],
                             bytes_of_each=handed_on.get(call.template, (0, ()))[1])
                     for spec, call in zip(self._chain(), calls, strict=True))

    def _layers(self) -> list[tuple[str, ...]]:
        """The tiles that each call of a layer reads."""
        return [*self.tiles_of.values()][1:-1]

    def _chain(self) -> tuple[CallSpec, ...]:
        """The calls, with their roles and the tiles that each reads, but without templates."""
        first, *_, last = self.tiles_of
        roles = {first: "prologue", last: "epilogue"}
        return tuple(CallSpec(name, roles.get(name, "layer"), "", tiles) for name, tiles in self.tiles_of.items())


def _readers(calls: Sequence[Call]) -> dict[str, tuple[str, ...]]:
    """The calls that read each parameter, in order."""
    readers: dict[str, dict[str, None]] = {}
    for call in calls:
        for source in call.sources:
            if source.kind == "parameter":
                readers.setdefault(source.name, {})[call.name] = None
    return {name: tuple(names) for name, names in readers.items()}


def _groups(calls: Sequence[Call], readers: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """The name of the tile, or of the tiles if there are several kinds, for each parameter. `readers`: the calls that read it.
    A layer's tile has the layer's name, even if it runs several times. Parameters that only some of its runs read are in a
    separate tile."""
    runs: dict[str, list[str]] = {}
    for call in calls:
        runs.setdefault(call.again or call.name, []).append(call.name)
    names: dict[tuple[str, ...], str] = {}
    tied = 0
    for group in dict.fromkeys(readers.values()):
        if list(group) == runs.get(group[0]):
            names[group] = group[0]
        elif len(group) == 1:
            names[group] = f"{group[0]}@1" if group[0] in runs else group[0]
        else:
            names[group] = f"tied.{tied}" if tied else "tied"
            tied += 1
    return {name: names[group] for name, group in readers.items()}


def _specs(model: nn.Module, dtype: torch.dtype | None, shares: Mapping[str, Rows]) -> dict[str, Spec]:
    """A `Spec` for each parameter of a model, in the model's order, and for each share of one."""
    weights = weights_of_codes(model)
    specs = {name: Spec((p.requires_grad, streamed_dtype(p, dtype)), tuple(p.shape), weights.get(id(p)))
             for name, p in model.named_parameters()}
    for name, share in shares.items():
        of = specs[share.parameter]
        specs[name] = Spec(of.kind, (share.stop - share.first, *of.shape[1:]))
    return specs


def _members(groups: Mapping[str, str]) -> dict[str, list[str]]:
    """The parameters in each group, given the group of each."""
    members: dict[str, list[str]] = {}
    for name, group in groups.items():
        members.setdefault(group, []).append(name)
    return members


def _tiles_of(calls: Sequence[Call], readers: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """The tiles that each call reads. Those with the fewest calls come first, so its own come first. `readers`: the calls of
    each tile."""
    return {call.name: tuple(sorted((tile for tile, names in readers.items() if call.name in names),
                                    key=lambda tile: len(readers[tile]))) for call in calls}


def _positions(tiles: Mapping[str, Sequence[str]]) -> dict[str, Position]:
    return {name: (tile, i) for tile, names in tiles.items() for i, name in enumerate(names)}


def _tiles(members: Mapping[str, Sequence[str]], specs: Mapping[str, Spec]) -> dict[str, list[str]]:
    """The parameters in each tile. `members`: groups of parameters. Each kind in a group has its own tile, the kind with the
    most elements first."""
    tiles: dict[str, list[str]] = {}
    for group, names in members.items():
        kinds: dict[Kind, list[str]] = {}
        for name in names:
            kinds.setdefault(specs[name].kind, []).append(name)
        ordered = sorted(kinds, key=lambda each: -sum(math.prod(specs[name].shape) for name in kinds[each]))
        tiles |= zip(_names(group, ordered), (kinds[each] for each in ordered), strict=True)
    return tiles


def _layout(tile: str, names: Sequence[str], specs: Mapping[str, Spec], ranks: int) -> TileLayout:
    trainable, dtype = specs[names[0]].kind
    return TileLayout.of(tile, dtype, [(name, specs[name].shape, trainable, specs[name].weights) for name in names], ranks)


def _part(layout: TileLayout, shares: Mapping[str, Rows], host: Mapping[str, TileLayout],
          position: Mapping[str, Position]) -> TileLayout:
    """The layout of shares of parameters, as part of their host tile."""
    home, origins, slices = "", [], []
    for s in layout.slices:
        share = shares[s.name]
        home, index = position[share.parameter]
        origins.append(host[home].slices[index].start + share.first * math.prod(s.shape[1:]))
        slices.append(replace(s, name=share.parameter))
    return replace(layout, slices=tuple(slices), home=home, origins=tuple(origins))


def _names(group: str, kinds: Sequence[Kind]) -> list[str]:
    """The names of the tiles of a group's kinds of parameters: the group's own name if there is one kind. Otherwise "layers.3"
    for trained parameters, "layers.3.frozen", and "layers.3.float32" for another dtype than that of most elements."""
    names = []
    for trained, dtype in kinds:
        alike = [other for also, other in kinds if also == trained]
        frozen = ".frozen" if not trained and len(alike) < len(kinds) else ""
        names.append(f"{group}{frozen}" + (f".{str(dtype).removeprefix('torch.')}" if dtype != alike[0] else ""))
    return names


def _weightless(template: Template) -> tuple[str, ...]:
    """The variants that read no parameter, so that no weights need to be fetched for them."""
    parameters = {i for i, x in enumerate(template.inputs) if x.role.kind == "parameter"}
    names = [n for n in template.variant_names if n != "backward"]
    return tuple(n for n in names if not parameters & set(template.variant(n).reads))


def require_host_memory(needed: int) -> None:
    """Raises `InsufficientMemoryError` unless `needed` bytes are available, and `HOST_MARGIN_BYTES` in addition."""
    needed, available = needed + HOST_MARGIN_BYTES, available_host_bytes()
    if needed > available:
        raise InsufficientMemoryError(
            f"training needs {format_bytes(needed)} of host memory and {format_bytes(available)} are available: "
            f"use a smaller model, bfloat16, or a machine with more memory")


def check_device_memory(tiling: Tiling, budget: int) -> None:
    """Raises `InsufficientMemoryError` if `budget` bytes of device memory do not hold the weights of one layer."""
    largest = max(sum(tiling.layouts[tile].weight_bytes for tile in tiles) for tiles in tiling.tiles_of.values())
    if largest > budget:
        raise InsufficientMemoryError(
            f"one layer needs {format_bytes(largest)} of device memory and {format_bytes(budget)} are available: "
            "use a larger device_memory, or a smaller model")


def named_gradients(store: Store) -> Iterator[tuple[str, Tensor]]:
    """(name, view over its tile's gradients) of each trainable parameter."""
    for tile in store.tiles.values():
        if tile.gradients is not None:
            for i, s in enumerate(tile.layout.slices):
                if s.trainable:
                    yield s.name, tile.parameter_view(tile.gradients, i)
