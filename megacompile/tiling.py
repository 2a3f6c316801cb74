"""Parameters -> tiles: which parameter lies in which tile, and moving a model's weights there.

A parameter belongs to the tile of the one call that reads it. One that several calls read (tied weights) belongs to a tile
with all of them as readers, so that it has one gradient and one update. What is frozen lies in a tile apart from what is
trained, which alone has gradients and optimizer state; and so does what has another dtype.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megacompile import cost
from megacompile.errors import InsufficientMemoryError
from megacompile.frontend.template import Call, Template
from megacompile.program import CallSpec, Tile, slot_ranks
from megacompile.runtime.adam import split_fp32
from megacompile.runtime.store import HostTile, Store, TileLayout, available_host_bytes, give_back_freed_memory
from megacompile.sizes import format_bytes

#: What training needs beside tiles: the interpreter, PyTorch, a batch.
HOST_MARGIN_BYTES = 1 << 30


@dataclass(frozen=True)
class Tiling:
    """The tiles of a model. `tiles_of` gives each call's tiles, its own first; `position` each parameter's place."""

    layouts: Mapping[str, TileLayout]
    tiles_of: Mapping[str, tuple[str, ...]]
    position: Mapping[str, tuple[str, int]]  # parameter -> (tile, number in the tile)

    @classmethod
    def of(cls, model: nn.Module, calls: Sequence[Call], dtype: torch.dtype | None) -> Tiling:
        """`dtype`: of all parameters; None: each its own."""
        readers: dict[str, list[str]] = {}
        for call in calls:
            for source in call.sources:
                if source.kind == "parameter" and call.name not in readers.setdefault(source.name, []):
                    readers[source.name].append(call.name)
        groups: dict[tuple[str, ...], str] = {}
        for group in map(tuple, readers.values()):
            tied = sum(len(g) > 1 for g in groups)
            groups.setdefault(group, group[0] if len(group) == 1 else f"tied.{tied}" if tied else "tied")
        parameters = {name: p for name, p in model.named_parameters() if name in readers}  # in the model's own order
        members: dict[str, dict[tuple[bool, torch.dtype], list[str]]] = {}
        for name, p in parameters.items():
            kind = p.requires_grad, dtype or p.dtype
            members.setdefault(groups[tuple(readers[name])], {}).setdefault(kind, []).append(name)
        for tile, kinds in members.items():  # the most elements first
            members[tile] = dict(sorted(kinds.items(), key=lambda kind: -sum(parameters[p].numel() for p in kind[1])))
        layouts = {
            name: TileLayout.of(name, kind[1], [(p, parameters[p].shape, kind[0]) for p in inside])
            for tile, kinds in members.items()
            for name, (kind, inside) in zip(_names(tile, list(kinds)), kinds.items(), strict=True)}
        readers_of = {tile: readers[layout.slices[0].name] for tile, layout in layouts.items()}
        tiles_of = {call.name: tuple(sorted((t for t, by in readers_of.items() if call.name in by),
                                            key=lambda tile: len(readers_of[tile]))) for call in calls}
        position = {s.name: (tile, i) for tile, layout in layouts.items() for i, s in enumerate(layout.slices)}
        ordered = dict.fromkeys(tile for call in calls for tile in tiles_of[call.name])
        return cls({tile: layouts[tile] for tile in ordered}, tiles_of, position)

    @property
    def trains(self) -> bool:
        """Whether anything is trained at all."""
        return any(layout.trainable for layout in self.layouts.values())

    def _reached(self, calls: Sequence[Call]) -> Sequence[Call]:
        """The calls from the first one on that trains anything."""
        first = next((i for i, call in enumerate(calls) if any(self.layouts[t].trainable for t in self.tiles_of[call.name])),
                     len(calls))
        return calls[first:]

    def differentiated(self, calls: Sequence[Call]) -> list[Call]:
        """The layers that a backward goes through: those below the first call that trains anything have none."""
        return [call for call in self._reached(calls) if call in calls[1:-1]]

    def operations(self, calls: Sequence[Call]) -> int:
        """FLOPs that a token's step takes by its products with parameters, recomputation not counted: 2 a parameter forward, 2
        for the gradient of what is multiplied where there is a backward, 2 for the parameter's own where it is trained."""
        reached = {tile for call in self._reached(calls) for tile in self.tiles_of[call.name]}
        return sum(layout.parameters * (6 if layout.trainable else 4 if tile in reached else 2)
                   for tile, layout in self.layouts.items())

    def border(self, calls: Sequence[Call]) -> set[str]:
        """The tiles that the prologue or the epilogue reads."""
        return {tile for call in (calls[0], calls[-1]) for tile in self.tiles_of[call.name]}

    def ranked(self, calls: Sequence[Call]) -> list[list[TileLayout]]:
        """The tiles of layers alone, by their ranks (see `slot_ranks`): those of one rank take turns in slots."""
        ranks = slot_ranks([self.tiles_of[call.name] for call in calls[1:-1]], self.border(calls),
                           lambda tile: self.layouts[tile].weight_bytes)
        return [[self.layouts[tile] for tile, rank in ranks.items() if rank == each] for each in sorted(set(ranks.values()))]

    def host_parts(self) -> dict[str, int]:
        """Bytes of host memory that training with AdamW takes, by part of the tiles."""
        parts: Counter[str] = Counter()
        for layout in self.layouts.values():
            parts.update(layout.host_parts())
        return dict(parts)

    def host_bytes(self) -> int:
        return sum(self.host_parts().values())

    def tiles(self) -> dict[str, Tile]:
        """As schedules see them."""
        return {name: Tile(name, layout.parameters, layout.weight_bytes, layout.gradient_bytes, layout.trainable,
                           layout.state_bytes)
                for name, layout in self.layouts.items()}

    def call_specs(self, calls: Sequence[Call], templates: Mapping[str, Template], length: int) -> tuple[CallSpec, ...]:
        """As schedules of sequences of `length` tokens see them."""
        layers = {call.template for call in calls[1:-1]}
        handed_on = {name: cost.checkpoint_bytes(templates[name], length) for name in layers}
        roles = {calls[0].name: "prologue", calls[-1].name: "epilogue"}
        return tuple(CallSpec(c.name, roles.get(c.name, "layer"), c.template, self.tiles_of[c.name],
                              _weightless(templates[c.template]), handed_on.get(c.template, 0)) for c in calls)


def _names(group: str, kinds: Sequence[tuple[bool, torch.dtype]]) -> list[str]:
    """Of the tiles that hold a group's (trained, dtype) kinds of parameters: the group's own where there is one kind, else
    "layers.3" of what is trained, "layers.3.frozen", and "layers.3.float32" of another dtype than that of most elements."""
    names = []
    for trained, dtype in kinds:
        alike = [other for also, other in kinds if also == trained]
        frozen = ".frozen" if not trained and len(alike) < len(kinds) else ""
        names.append(f"{group}{frozen}" + (f".{str(dtype).removeprefix('torch.')}" if dtype != alike[0] else ""))
    return names


def _weightless(template: Template) -> tuple[str, ...]:
    """Variants that read no parameter: what they run on need not be fetched."""
    parameters = {i for i, x in enumerate(template.inputs) if x.role.kind == "parameter"}
    names = [n for n in template.variant_names if n != "backward"]
    return tuple(n for n in names if not parameters & set(template.variant(n).reads))


def check_host_memory(tiling: Tiling, budget: int | None = None) -> None:
    """Raises `InsufficientMemoryError` before anything is allocated. Where weights are now is not known to be given back
    in time (a model may share its storage), so the whole of the tiles must fit beside it. `budget`: bytes to stay within; None:
    all that there are."""
    require_host_memory(tiling.host_bytes(), budget)


def require_host_memory(needed: int, budget: int | None = None) -> None:
    """Raises `InsufficientMemoryError` unless that many bytes are available, and what training needs beside them."""
    needed, available = needed + HOST_MARGIN_BYTES, available_host_bytes()
    available = min(available, budget or available)
    if needed > available:
        raise InsufficientMemoryError(
            f"training needs {format_bytes(needed)} of host memory and {format_bytes(available)} are available: "
            f"use a smaller model, bfloat16 (14 bytes a parameter; float32 takes 16), or a machine with more memory")


def check_device_memory(tiling: Tiling, budget: int) -> None:
    """Raises `InsufficientMemoryError` if that many bytes of device memory do not even hold the weights of one layer."""
    largest = max(sum(tiling.layouts[tile].weight_bytes for tile in tiles) for tiles in tiling.tiles_of.values())
    if largest > budget:
        raise InsufficientMemoryError(
            f"one layer needs {format_bytes(largest)} of device memory and {format_bytes(budget)} are available: "
            "use a larger device_memory, or a smaller model")


def build_store(model: nn.Module, tiling: Tiling) -> Store:
    """Moves the model's parameters into tiles, one tile at a time, and points the parameters there: no second copy of the
    model ever exists. A bf16 tile made from fp32 weights keeps their exact remainder."""
    store = Store()
    parameters = dict(model.named_parameters())
    for name, layout in tiling.layouts.items():
        tile = store.tiles[name] = HostTile.allocate(layout)
        flat = layout.flat(tile.weights)
        for s in layout.slices:
            place(parameters[s.name].data.flatten(), flat[s.start:s.stop],
                  None if tile.remainder is None else tile.remainder[s.start:s.stop])
        point_parameters(tile, parameters)
        give_back_freed_memory()
    move_rest(model, tiling)
    return store


def move_rest(model: nn.Module, tiling: Tiling) -> None:
    """Moves to the host what lies in no tile, buffers and parameters that no call reads: after `close()` the model is one on
    the CPU, whatever device it came from."""
    for name, parameter in model.named_parameters():
        if name not in tiling.position and parameter.device.type != "cpu":
            parameter.data = parameter.data.cpu()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != "cpu":
                module._buffers[name] = buffer.cpu()


def place(value: Tensor, weights: Tensor, remainder: Tensor | None, threads: int | None = None) -> None:
    """Writes values, 1-D of any floating dtype, into as many elements of a tile. What bf16 cannot hold of them goes to the
    remainder, with `threads` (None: all cores)."""
    if remainder is not None and value.dtype != torch.bfloat16:
        high, low = split_fp32(value.detach().cpu().float().contiguous(), threads)
        weights.copy_(high)
        remainder.copy_(low)
    else:
        weights.copy_(value)


def point_parameters(tile: HostTile, parameters: Mapping[str, nn.Parameter]) -> None:
    """Each parameter becomes a CPU tensor over its part of the tile; the `Parameter` objects stay the same."""
    for i, s in enumerate(tile.layout.slices):
        parameters[s.name].data = tile.parameter_view(tile.weights, i)


def named_gradients(store: Store) -> Iterator[tuple[str, Tensor]]:
    """A view per trainable parameter over its tile's gradients."""
    for tile in store.tiles.values():
        if tile.gradients is not None:
            for i, s in enumerate(tile.layout.slices):
                if s.trainable:
                    yield s.name, tile.parameter_view(tile.gradients, i)
