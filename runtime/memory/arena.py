"""Device slots and host slabs, allocated once, with cached views through which templates read their weights."""
from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from megacompile.errors import InsufficientMemoryError
from megacompile.ir.program import SLOT_KINDS, Lane, Slot, slot_family
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.memory.tiles import TileLayout
from megacompile.runtime.optimizer.host_update import Moments
from megacompile.sizes import format_bytes
from megacompile.system.host_memory import available_host_bytes, host_memory
from megacompile.system.progress import at, under_way


# -------------------- Pins host memory that is already allocated, which takes a second for each few GiB
def pin_all(backend: Backend, memory: Iterable[Tensor]) -> None:
    """Pins each tensor and shows progress. Raises what `Backend.pin` raises."""
    parts = list(memory)
    done, total = 0, sum(part.nbytes for part in parts)
    with under_way("pinning host memory"):
        for part in parts:
            at(f"{format_bytes(done)} of {format_bytes(total)}")
            backend.pin(part)
            done += part.nbytes


@dataclass(frozen=True)
class Weights:
    """A tile's weights in a slot: one view per parameter, in the order of the layout."""

    tile: str
    memory: Tensor
    views: tuple[Tensor, ...]

    @classmethod
    def of(cls, layout: TileLayout, memory: Tensor) -> Self:
        return cls(layout.name, memory, layout.views(layout.flat(memory)))


@dataclass(frozen=True)
class Accumulators:
    """A tile's FP32 gradient accumulators: flat, and one view per parameter."""

    tile: str
    flat: Tensor
    views: tuple[Tensor, ...]


@dataclass(frozen=True)
class Gradients:
    """A tile's gradients in link precision, in a slot or slab. `memory` crosses the link: gradients, then norms."""

    tile: str
    memory: Tensor
    flat: Tensor
    views: tuple[Tensor, ...]
    norms: Tensor

    @classmethod
    def of(cls, layout: TileLayout, memory: Tensor) -> Self:
        flat = layout.flat(memory)
        return cls(layout.name, memory, flat, layout.views(flat), layout.norms(memory))


@dataclass(frozen=True)
class State:
    """A tile's optimizer state in a slot: moments as in `StateLayout`, and remainder int16 [elements] if there is one. Keeps
    the views of moments that updates have read."""

    layout: TileLayout
    moments: list[Tensor]
    remainder: Tensor | None
    _views: dict[tuple[int, int, int], Moments] = field(default_factory=dict)

    def at(self, position: int, start: int, stop: int) -> Moments:
        """The moments of elements [start, stop) of the parameter at this position."""
        key = position, start, stop
        if key not in self._views:
            self._views[key] = self.layout.state_layout.at(self.moments, *key)
        return self._views[key]


@dataclass
class Held:
    """A tile that the device holds for its update. `has_weights`: they came from the device. `updated`: by which step, if its
    weights and state are newer than the host's."""

    memory: list[Tensor]
    weights: Weights
    gradients: Gradients
    state: State
    has_weights: bool = False
    updated: object | None = None


class Arena:
    """The memory of the slots, by name. It grows if a program of another shape needs more. It shrinks only in `close` and
    `forget`. `held`: tiles that the device holds for their update, by slot. Their memory comes from PyTorch's allocator, as
    that of activations, whose place it takes."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.slots: dict[str, Tensor] = {}
        self._weights: dict[tuple[str, str], Weights] = {}
        self._gradients: dict[tuple[str, str], Gradients] = {}
        self._states: dict[tuple[str, str], State] = {}
        self._verdicts: dict[str, tuple[Tensor, Any]] = {}
        self.held: dict[str, Held] = {}
        self._returning: deque[tuple[int, Any]] = deque()  # the sizes of held tiles, and when the host has them
        self._freed = 0  # bytes of those that accumulators have not taken yet

    def reserve(self, slots: Mapping[str, Slot]) -> None:
        """Allocates missing slots, and reallocates slots that are too small (lanes must be idle then). Raises
        `InsufficientMemoryError`, before it allocates anything, if the host has too little memory for slabs."""
        grown = [s for s in slots.values() if s.name not in self.slots or self.slots[s.name].numel() < s.bytes]
        slabs = [s for s in grown if self.is_slab(s.name)]
        needed = sum(s.bytes - (self.slots[s.name].numel() if s.name in self.slots else 0) for s in slabs)
        if slabs and needed > (available := available_host_bytes()):
            raise InsufficientMemoryError(
                f"{len(slabs)} pinned slabs need {format_bytes(needed)} of host memory and {format_bytes(available)} are "
                "available: stream with fewer gradient_slabs, or run one backward per step on a larger batch")
        with under_way("allocating slots and pinned slabs"):
            for slot in grown:
                self.forget(slot.name)
                if self.is_slab(slot.name):
                    at(slot.name)
                    slab = host_memory(slot.bytes)
                    slab.zero_()  # touched pages are pinned six times faster
                    if SLOT_KINDS[slot_family(slot.name)][0] != "moments":  # only the disk and the host touch these
                        self.backend.pin(slab)
                    self.slots[slot.name] = slab
                else:
                    self.slots[slot.name] = self.backend.memory(slot.bytes)

    def verdict(self, tile: str, update: object) -> Tensor:
        """int32 [1] on the device. An update there sets it to 1 if it skips the tile because gradients are not finite.
        `update`: returned by `take_verdicts`."""
        known = self._verdicts.get(tile)
        said = torch.zeros(1, dtype=torch.int32, device=self.backend.device) if known is None else known[0]
        self._verdicts[tile] = said, update
        return said

    def take_verdicts(self) -> dict[str, Any]:
        """Maps each tile that updates on the device have skipped since the last call to its last update. The device must be
        idle."""
        if not self._verdicts or not any(kept := torch.cat([said for said, _ in self._verdicts.values()]).tolist()):
            return {}
        found = {tile: update for (tile, (_, update)), each in zip(self._verdicts.items(), kept, strict=True) if each}
        self._verdicts.clear()
        return found

    @staticmethod
    def is_slab(slot: str) -> bool:
        return SLOT_KINDS[slot_family(slot)][0] in ("staging", "slab", "moments")

    def weights(self, slot: str, layout: TileLayout) -> Weights:
        key = slot, layout.name
        if key not in self._weights:
            self._weights[key] = Weights.of(layout, self.slots[slot][:layout.weight_bytes])
        return self._weights[key]

    def gradients(self, slot: str, layout: TileLayout) -> Gradients:
        key = slot, layout.name
        if key not in self._gradients:
            self._gradients[key] = Gradients.of(layout, self.slots[slot][:layout.gradient_bytes])
        return self._gradients[key]

    def state(self, slot: str, layout: TileLayout) -> State:
        key = slot, layout.name
        if key not in self._states:
            self._states[key] = State(layout, *layout.state(self.slots[slot]))
        return self._states[key]

    def accumulators(self, layout: TileLayout) -> Accumulators:
        """New accumulators, zeros. They never cross the link, so they come from PyTorch's allocator, on the compute lane. That
        issues kernels ahead of the device: it waits here until tiles that return to the host have freed as much."""
        self._freed -= 4 * layout.elements
        while self._freed < 0 and self._returning:
            size, event = self._returning.popleft()
            self.backend.wait(Lane.CPU, event)
            self._freed += size
        self._freed = max(self._freed, 0) if self._returning else 0
        flat = torch.zeros(layout.elements, dtype=torch.float32, device=self.backend.device)
        return Accumulators(layout.name, flat, layout.views(flat))

    def hold(self, slot: str, layout: TileLayout) -> Held:
        """New memory for a tile's weights, gradients and state, on the compute lane. Each part has a block of its own, which
        finds room more easily."""
        sizes = layout.weight_bytes, layout.gradient_bytes, layout.remainder_bytes, *layout.moment_bytes
        parts = [torch.empty(size, dtype=torch.uint8, device=self.backend.device) for size in sizes]
        weights, gradients, remainder, *moments = parts
        state = State(layout, moments, remainder.view(torch.int16) if layout.has_remainder else None)
        self.held[slot] = Held(parts, Weights.of(layout, weights), Gradients.of(layout, gradients), state)
        return self.held[slot]

    def let_go(self, slot: str) -> None:
        """Frees the memory of a tile that was held, once what the d2h lane was issued is done."""
        if (held := self.held.pop(slot, None)) is not None:
            self.backend.used_by(Lane.D2H, held.memory)
            self._returning.append((sum(part.nbytes for part in held.memory), self.backend.record(Lane.D2H)))

    def drop_held(self) -> None:
        """Frees the memory of held tiles that were not updated, after a failure. The device must be idle."""
        self.held = {slot: held for slot, held in self.held.items() if held.updated is not None}

    def device_bytes(self) -> int:
        return sum(t.numel() for name, t in self.slots.items() if not self.is_slab(name))

    def slab_bytes(self) -> int:
        return sum(t.numel() for name, t in self.slots.items() if self.is_slab(name))

    def close(self) -> None:
        self.forget(*self.slots)
        self.held.clear()

    def forget(self, *names: str) -> None:
        """Frees the memory of these slots, if there is any."""
        for name in names:
            memory = self.slots.pop(name, None)
            if memory is not None and self.is_slab(name):
                self.backend.unpin(memory)
        for cache in (self._weights, self._gradients, self._states):
            for key in [k for k in list(cache) if k[0] in names]:  # lanes may add others
                del cache[key]
