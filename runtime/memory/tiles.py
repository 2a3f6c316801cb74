"""Tiles in host memory, which hold the authoritative parameters, gradients and optimizer state.

    tile   weights    parameter dtype    streamed, pinned where the budget allows
           gradients  parameter dtype    streamed, followed by one FP32 norm per parameter; from the first program on that
                                         stores them (updates on arrival read them from slabs)
           remainder  int16              low bits of the FP32 master; bf16 tiles only, unless the weights are the masters
           moments    see `StateLayout`  what the optimizer keeps, from the first optimizer on
           sums       fp32               gradients added up over the waves of a step, where a plan does that here

A parameter has the same element offset in every part but the moments. State: each part is one anonymous mapping, made once.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from megacompile.runtime.memory.state_layout import (
    ADAMW_STATE,
    NO_STATE,
    ElementState,
    StateLayout,
    aligned_bytes,
)
from megacompile.runtime.optimizer.rule import scratch_bytes
from megacompile.system.direct_file import in_blocks
from megacompile.system.host_memory import SharedMemory, host_memory

# --------------------
# Where the host tiles of a model are allocated: in memory of this process, or in memory that ranks share (`store.py`).
T = TypeVar("T")


class TileMemory:
    """Memory of this process. `writes`: this process writes the values of a model that is in memory."""

    writes = True

    def allocate(self, layout: TileLayout) -> HostTile:
        return HostTile.allocate(layout)

    def share(self, work: Collection[T]) -> list[T]:
        """The part of some work that this process does. The work is the same on every rank."""
        return list(work)

    def written(self, tile: HostTile, names: Collection[str] | None = None) -> None:
        """Called on every rank when the process that writes has written these parameters (None: all) of a tile."""


# -------------------- What a host tile knows of the file that its moments are in (`state_file.py`)
class MomentFile(Protocol):
    """A file of moments. Its methods raise `DiskError` if the drive fails."""

    def read(self, tile: str, slab: Tensor) -> None:
        """Fills a slab, uint8 [disk_bytes], with this rank's moments of a tile."""

    def write(self, tile: str, slab: Tensor) -> None:
        """Writes this rank's moments of a tile from a slab."""

    def get(self, tile: str, position: int, name: str, start: int, into: Tensor) -> None:
        """Fills `into`, uint8 [n], with a parameter's stored tensor of this name, from byte `start` on."""

    def put(self, tile: str, position: int, name: str, values: Tensor) -> None:
        """Replaces a parameter's stored tensor of this name by `values`, uint8 [n]."""

    def copy(self, tile: str) -> list[Tensor]:
        """The moments of a tile in the layout of memory: one buffer for each, uint8."""


MOST_MOMENTS = 2
ALIGNMENT = 64  # elements: at least 128 bytes in every dtype, so that no two parameters share a cache line
SHARD_ALIGNMENT = 256  # elements: a block of state that has one scale is in one shard


@dataclass(frozen=True)
class ParameterSlice:
    """The location of one parameter in its tile, in elements. `stands_for`: the number of weights that its elements encode;
    None: the elements are weights."""

    name: str
    shape: tuple[int, ...]
    start: int
    trainable: bool
    stands_for: int | None = None

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def weights(self) -> int:
        return self.count if self.stands_for is None else self.stands_for


@dataclass(frozen=True)
class TileLayout:
    """The layout of a tile. All its parameters have one dtype. For a part of a host tile (`shards.py`), `home` is the name of
    that tile and `origins` the element at which each slice begins there. `ranks`: the number of equal shards (`shards.py`).
    `states`: the optimizer's state of each parameter; empty: AdamW's default."""

    name: str
    dtype: torch.dtype
    slices: tuple[ParameterSlice, ...]
    home: str = ""
    origins: tuple[int, ...] = ()
    ranks: int = 1
    states: tuple[ElementState, ...] = ()

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, parameters: Iterable[tuple[str, Sequence[int], bool, *tuple[int | None, ...]]],
           ranks: int = 1) -> TileLayout:
        """`parameters`: name, shape, whether it is trained, and the number of weights if its elements are codes."""
        slices, position = [], 0
        for parameter, shape, trainable, *weights in parameters:
            slices.append(ParameterSlice(parameter, tuple(shape), position, trainable, *weights))
            position += aligned(slices[-1].count, ranks)
        return cls(name, dtype, tuple(slices), ranks=ranks)

    def with_states(self, states: Mapping[str, ElementState]) -> Self:
        """The layout with these states of parameters, by name, and no state for frozen parameters."""
        chosen = tuple(states[s.name] if s.trainable else NO_STATE for s in self.slices)
        return replace(self, states=() if chosen == self._default_states else chosen)

    def at_home(self, index: int) -> slice:
        """The elements of a slice in its host tile."""
        s = self.slices[index]
        start = self.origins[index] if self.home else s.start
        return slice(start, start + s.count)

    @functools.cached_property
    def elements(self) -> int:
        """The number of elements, including the padding after each parameter and the padding that aligns shards."""
        each = aligned(1, self.ranks) * self.ranks
        return -(-self.slices[-1].stop // each) * each

    @property
    def parameters(self) -> int:
        return sum(s.weights for s in self.slices)

    @functools.cached_property
    def trainable(self) -> bool:
        return any(s.trainable for s in self.slices)

    @property
    def weight_bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients and of one FP32 norm per parameter after them."""
        return self.weight_bytes + 4 * len(self.slices)

    # ---------------------------------------------------------------- the optimizer's state
    @functools.cached_property
    def _default_states(self) -> tuple[ElementState, ...]:
        return tuple(ADAMW_STATE if s.trainable else NO_STATE for s in self.slices)

    def state_of(self, position: int) -> ElementState:
        """The state that the optimizer stores for a parameter."""
        return self.state_layout.states[position]

    @functools.cached_property
    def state_layout(self) -> StateLayout:
        """The layout of the optimizer's state in memory."""
        return StateLayout(self.states or self._default_states, tuple(aligned(s.count, self.ranks) for s in self.slices))

    @property
    def moment_bytes(self) -> list[int]:
        """Bytes of each moment's buffer."""
        return self.state_layout.moment_bytes if self.states else [4 * self.elements] * 2

    @functools.cached_property
    def position_of(self) -> Mapping[str, int]:
        """The position of each parameter by name."""
        return {s.name: position for position, s in enumerate(self.slices)}

    @property
    def has_remainder(self) -> bool:
        """True if the low bits of FP32 masters are kept."""
        return self.dtype == torch.bfloat16 and any(state.exact for state in self.state_layout.states)

    @property
    def remainder_bytes(self) -> int:
        return 2 * self.elements if self.has_remainder else 0

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state: moments, and the remainder of bf16 weights."""
        if not self.trainable:
            return 0
        return sum(self.moment_bytes) + self.remainder_bytes + self.state_layout.slack_bytes(self.ranks)

    @property
    def rule(self) -> str:
        """The names of the rules that update the tile; empty for AdamW alone, and for a tile that is not trained."""
        rules = {self.state_of(position).rule for position, s in enumerate(self.slices) if s.trainable}
        return "+".join(sorted(rules)) if rules - {"adamw"} else ""

    @property
    def sum_bytes(self) -> int:
        """Bytes of gradients added up over waves, FP32."""
        return 4 * self.elements if self.trainable else 0

    # ---------------------------------------------------------------- one rank's shard, in a slot
    @property
    def shard_bytes(self) -> int:
        """Bytes of a shard of the weights."""
        return self.weight_bytes // self.ranks

    @property
    def reduced_bytes(self) -> int:
        """Bytes of a shard of the gradients, then the norms of all parameters."""
        return self.shard_bytes + 4 * len(self.slices)

    @property
    def shard_state_bytes(self) -> int:
        """Bytes of a shard of the optimizer's state."""
        return self.state_bytes // self.ranks

    # ---------------------------------------------------------------- matrices that are updated whole
    @property
    def has_matrices(self) -> bool:
        return any(state.whole for state in self.states)

    @property
    def matrices(self) -> list[tuple[int, int, int, ElementState]]:
        """The matrices that an update reads whole: first element, rows, columns and state."""
        found = [(s.start, s.shape, self.state_of(position)) for position, s in enumerate(self.slices) if s.trainable]
        return [(start + number * shape[-2] * shape[-1], shape[-2], shape[-1], state)
                for start, shape, state in found if state.whole for number in range(math.prod(shape[:-2]))]

    @property
    def visit_bytes(self) -> int:
        """Bytes of device memory for a visit of the largest of `matrices`, with its products; 0 without matrices."""
        def needed(rows: int, columns: int, state: ElementState) -> int:
            count, size = rows * columns, self.dtype.itemsize
            parts = [count * size, count * size, 2 * count * self.has_remainder, count * state.format.value_bytes,
                     4 * state.format.scales(count)]
            return sum(map(aligned_bytes, parts)) + scratch_bytes(rows, columns)

        return max((needed(rows, columns, state) for _, rows, columns, state in self.matrices), default=0)

    @property
    def product_bytes(self) -> int:
        """Bytes of device memory for the products of the largest of `matrices`; 0 without matrices."""
        return max((scratch_bytes(rows, columns) for _, rows, columns, _ in self.matrices), default=0)

    def host_parts(self, gradients: bool = True) -> dict[str, int]:
        """Bytes of host memory for training this tile, by part. `gradients`: they wait in host memory for a step."""
        return {"weights": self.weight_bytes, "gradients": self.gradient_bytes if self.trainable and gradients else 0,
                "remainder": self.remainder_bytes, "moments": self.state_bytes - self.remainder_bytes}

    def host_bytes(self, gradients: bool = True) -> int:
        return sum(self.host_parts(gradients).values())

    def shared_pieces(self) -> dict[str, int]:
        """Bytes of every part that a tile of this layout may have, under any optimizer, by the name of its piece of
        `SharedMemory`. Untouched pieces take no memory."""
        moments = dict.fromkeys((f"moment {k}" for k in range(MOST_MOMENTS)), self.sum_bytes)
        sizes = {"weights": self.weight_bytes, "gradients": self.gradient_bytes if self.trainable else 0,
                 "remainder": 2 * self.elements if self.trainable and self.dtype == torch.bfloat16 else 0,
                 "sums": self.sum_bytes, **moments}
        return {f"{self.name} {part}": size for part, size in sizes.items() if size}

    def moments(self, memory: Tensor) -> list[Tensor]:
        """The moments' buffers (uint8) at the beginning of a slot's or slab's memory."""
        ends = list(accumulate(self.moment_bytes))
        return [memory[end - size:end] for size, end in zip(self.moment_bytes, ends, strict=True)]

    def state(self, memory: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """The moments' buffers (uint8), and the remainder (int16, or None), in a slot's memory."""
        at = sum(self.moment_bytes)
        return self.moments(memory), memory[at:at + self.remainder_bytes].view(torch.int16) if self.has_remainder else None

    @property
    def disk_bytes(self) -> int:
        """Bytes of each rank's file for its share of the moments."""
        moments = sum(self.moment_bytes) + self.state_layout.slack_bytes(self.ranks)
        return in_blocks(-(-moments // self.ranks)) if self.trainable else 0

    def views(self, flat: Tensor) -> tuple[Tensor, ...]:
        """One view per parameter of a flat tensor of at least `elements` elements."""
        return tuple(flat[s.start:s.stop].view(s.shape) for s in self.slices)

    def flat(self, memory: Tensor) -> Tensor:
        """Bytes -> the tile's elements."""
        return memory[:self.weight_bytes].view(self.dtype)

    def norms(self, memory: Tensor) -> Tensor:
        """The norms after the gradients: FP32 [parameters]."""
        return memory[self.weight_bytes:self.gradient_bytes].view(torch.float32)


def weights_piece(tile: str) -> str:
    """The name of the piece of `SharedMemory` that holds the weights of a tile."""
    return f"{tile} weights"


def own_storage(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """A flat tensor of this dtype over this contiguous memory, with its own storage."""
    if not memory.numel():  # `frombuffer` raises for an empty buffer
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory.view(torch.uint8).numpy(), dtype=dtype)


def aligned(count: int, ranks: int = 1) -> int:
    """The number of elements, rounded up with padding."""
    each = ALIGNMENT if ranks == 1 else SHARD_ALIGNMENT
    return -(-count // each) * each


@dataclass
class HostTile:
    """One tile's host memory. `file`: the file of its moments if they are on disk; then there are no `moments` in memory.
    `begun`: an optimizer has made moments there. `here`: the elements that this host has memory for, if the tile is divided
    among hosts (`divided.py`); None: all."""

    layout: TileLayout
    weights: Tensor  # uint8 [weight_bytes]
    gradients: Tensor | None = None  # uint8 [gradient_bytes]
    remainder: Tensor | None = None  # int16 [elements]
    moments: list[Tensor] = field(default_factory=list)  # uint8, each as `StateLayout` says
    sums: Tensor | None = None  # fp32 [elements]
    moments_written: bool = False  # by an update or a loaded optimizer; until then they are untouched zeros
    moments_lent: bool = False  # to the user, whose writes may go unnoticed
    shared: SharedMemory | None = None  # with several ranks: where all parts are
    file: MomentFile | None = None
    begun: bool = False
    here: tuple[slice, ...] | None = None
    _prepared: list[Tensor] | None = None  # memory for moments
    _shared_written: bool = False  # shared memory has the values of former moments

    @classmethod
    def allocate(cls, layout: TileLayout, shared: SharedMemory | None = None, weights: Tensor | None = None) -> HostTile:
        """Makes a zeroed tile without gradients and moments. `shared`: memory for the `shared_pieces` of its layout, except
        `weights` that are elsewhere."""
        if weights is None:
            weights = (host_memory(layout.weight_bytes, inherited=True) if shared is None
                       else shared.piece(weights_piece(layout.name)))
        tile = cls(layout, weights, shared=shared)
        if layout.trainable and layout.dtype == torch.bfloat16:
            tile.remainder = tile._memory("remainder", 2 * layout.elements).view(torch.int16)
        return tile

    def allocate_gradients(self) -> None:
        """Allocates zeroed gradients and norms."""
        self.gradients = self._memory("gradients", self.layout.gradient_bytes)
        if self.shared is None:
            self.gradients.zero_()  # touched pages are pinned faster

    def prepare_moments(self) -> list[Tensor]:
        """Reserves memory for `allocate_moments` without touching its pages. Nothing for moments on disk."""
        if self.file is not None:
            return []
        if not self.moments and self._prepared is None and self.layout.trainable:
            self._prepared = [self._memory(f"moment {k}", size) for k, size in enumerate(self.layout.moment_bytes)]
        return self._prepared or []

    def allocate_moments(self) -> None:
        """Allocates the optimizer's moments, zeroed. Moments on disk exist already."""
        if self.file is not None:
            self.begun = self.layout.trainable
        elif not self.moments and self.layout.trainable:
            self.moments, self._prepared = self.prepare_moments(), None

    @property
    def has_moments(self) -> bool:
        """True if an optimizer has made moments, in memory or on disk."""
        return bool(self.moments) or self.begun

    @property
    def moments_are_zero(self) -> bool:
        """True if nothing has written the moments. The system may not have allocated their pages yet."""
        return not (self.moments_written or self.moments_lent or any(moment._version for moment in self.moments))

    def keep(self, layout: TileLayout, file: MomentFile | None = None) -> list[Tensor]:
        """Changes the layout of the optimizer's state, with moments in this file, or in memory. Moments restart if their form
        or place changes. A master whose remainder is dropped is rounded to its weight. Returns memory that can be freed now."""
        held, before, elsewhere = self.state(), self.layout, file is not self.file
        self.layout, self.file = layout, file
        if layout.state_layout != before.state_layout or elsewhere:
            # Pages of this process start as zeros again, and so does a new file. Those of shared memory do not.
            self._shared_written |= self.shared is not None and not self.moments_are_zero
            self.moments_written = file is None and self._shared_written
            self.moments, self._prepared, self.begun = [], None, False
        if not layout.has_remainder:
            self.remainder = None
        elif self.remainder is None:
            self.remainder = self._memory("remainder", 2 * layout.elements).view(torch.int16).zero_()
        now = {id(part) for part in self.state()}
        return [part for part in held if id(part) not in now]

    def allocate_sums(self) -> None:
        """Allocates the sums of gradients."""
        self.sums = self._memory("sums", self.layout.sum_bytes).view(torch.float32)

    def release(self) -> None:
        """Drops all memory and files. Tensors that others have over it keep theirs."""
        self.weights, self.moments = torch.empty(0, dtype=torch.uint8), []
        self.gradients = self.remainder = self.sums = self._prepared = self.shared = self.file = None
        self.begun = False

    def _memory(self, part: str, size: int) -> Tensor:
        return host_memory(size) if self.shared is None else self.shared.piece(f"{self.layout.name} {part}")[:size]

    def state(self) -> list[Tensor]:
        """The allocated parts of the optimizer state."""
        return [*([] if self.remainder is None else [self.remainder]), *self.moments]

    def parameter_view(self, memory: Tensor, index: int) -> Tensor:
        """A parameter's part of this tile's weights or gradients, as a tensor with its own storage. If it shared the tile's
        storage, `torch.save` would write the whole tile and `save_pretrained` would clone everything."""
        s = self.layout.slices[index]
        size = self.layout.dtype.itemsize
        return own_storage(memory[s.start * size:s.stop * size], self.layout.dtype).view(s.shape)

    @property
    def home(self) -> HostTile:
        return self

    @property
    def held(self) -> slice:
        """The elements of the tile's slot that a single rank copies and updates: all."""
        return slice(0, self.layout.elements)

    @property
    def runs(self) -> list[tuple[slice, slice]]:
        """Elements in a slot, and the same elements of this tile."""
        return [(slice(0, self.layout.elements), slice(0, self.layout.elements))]

    @property
    def norm_bytes(self) -> Tensor | None:
        """uint8, one FP32 gradient norm for each parameter; None without gradients."""
        return None if self.gradients is None else self.gradients[self.layout.weight_bytes:self.layout.gradient_bytes]

    def weights_with(self, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes of a slot or slab, and the matching bytes of the host's weights."""
        yield memory, self.weights

    def gradients_with(self, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes of a slot or slab, and the matching bytes of the host's gradients and norms."""
        assert self.gradients is not None, f"{self.layout.name} has no gradients"
        yield memory, self.gradients

    def memories(self, parts: Iterable[str]) -> Iterator[Tensor]:
        """The allocated memory of these parts: one tensor for each part, or one for each moment."""
        for part in parts:
            yield from self.moments if part == "moments" else [each for each in [getattr(self, part)] if each is not None]

    def parts(self) -> dict[str, int]:
        """Bytes of each part, without moments on disk."""
        named = dict(weights=self.weights, gradients=self.gradients, remainder=self.remainder, sums=self.sums)
        sizes = {name: t.nbytes for name, t in named.items() if t is not None}
        return sizes | ({"moments": sum(moment.nbytes for moment in self.moments)} if self.moments else {})
