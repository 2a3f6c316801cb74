"""`.grad` of every trained parameter: memory of its tile, or a tensor that the user has assigned.

As in native PyTorch, a backward adds to the tensor in `.grad`, or creates one where `.grad` is None. Changes between backward
and step count, in the norm too. PyTorch's version counters show most of them. Changes that PyTorch does not count
(`GradScaler.unscale_`, `.data`, NumPy) are found by sampling elements of each gradient.
"""
from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from megacompile.errors import UnsupportedError
from megacompile.runtime.memory.divided import within
from megacompile.runtime.memory.store import Store
from megacompile.runtime.memory.tiles import TileLayout
from megacompile.runtime.optimizer import host_update as host
from megacompile.streaming.user_tensors.divided import divided
from megacompile.weights.tiling import Tiling, named_gradients


# -------------------- Tensors over a tile's memory that users hold
#
# In native PyTorch every backward creates new gradients. Here gradients always use the same memory of a tile. A user who keeps
# `p.grad` beyond `zero_grad()` and the next backward must still keep its values, so before the memory is overwritten, the kept
# tensor moves to memory of its own.
class Lent:
    """A tensor over `memory` of a tile, which a user was given."""

    def __init__(self, tensor: Tensor, memory: Tensor) -> None:
        self._tensor, self._storage = TensorWeakRef(tensor), StorageWeakRef(tensor.untyped_storage())
        self._address, self._memory = tensor.data_ptr(), memory

    @property
    def kept(self) -> Tensor | None:
        """The tensor, if the user still holds it and it still uses this memory."""
        tensor = self._tensor()
        return tensor if tensor is not None and tensor.data_ptr() == self._address else None

    def move(self) -> None:
        """Moves a tensor that the user still holds to its own memory. Called before the tile's memory is overwritten."""
        if (tensor := self.kept) is not None:
            move(tensor, tensor.clone(), self._memory)

    @property
    def has_views(self) -> bool:
        """True if views of the tensor still use its storage after `move`. They cannot be found and moved. Only for a tensor
        with its own storage."""
        return not self._storage.expired()


def move(tensor: Tensor, elsewhere: Tensor, memory: Tensor) -> None:
    """Gives a tensor over `memory` of a tile new memory with the same values."""
    tensor.data = elsewhere
    # An array from `tensor.numpy()` still points to the tile, and keeps only the tensor alive.
    weakref.finalize(tensor, _keep_alive, memory).atexit = False


def _keep_alive(memory: Tensor) -> None:
    """Does nothing. A finalizer that calls it keeps the memory alive until then."""


#: Sampled elements per gradient. Most rows of an embedding's gradient are zero.
_SAMPLED = 256
#: Bits of an element: a NaN equals itself.
_BITS = {2: torch.int16, 4: torch.int32}


class Gradients(Mapping[str, Tensor]):
    """Maps the name of each trained parameter to its gradient's memory, which is part of a tile. Before tiles hold gradients,
    and with updates on arrival, it has only names. State: the tensors that users were given, and versions, norms and samples of
    the gradients as the lanes wrote them."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], tiling: Tiling, store: Store) -> None:
        self._stored: dict[str, Tensor] = {}
        self._names = {s.name: None for tile in store.tiles.values() for s in tile.layout.slices if s.trainable}  # in order
        self.parameters, self._tiling, self._store = parameters, tiling, store
        self._lent: dict[str, Lent] = {}
        self._noted: dict[str, tuple[weakref.ref[Tensor], int]] = {}  # what `.grad` was, and its version
        self._sampled: dict[str, Tensor] = {}  # by tile
        self._sampled_indexes = {name: _sampled_indexes(tile.layout)
                                 for name, tile in store.tiles.items() if tile.layout.trainable and tile.here is None}
        self.made = False  # whether a backward has run
        self._warned = False

    def __getitem__(self, name: str) -> Tensor:
        return self._stored[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names  # also before tiles hold gradients

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def hold(self) -> None:
        """Makes tiles hold gradients from now on."""
        self._stored = dict(named_gradients(self._store))

    def release(self) -> None:
        """Releases the gradients, when the model is closed. The tensors in `.grad` stay."""
        self._stored, self._lent, self._noted, self._sampled, self._sampled_indexes = {}, {}, {}, {}, {}

    @property
    def waiting(self) -> bool:
        """True if any parameter has a gradient that waits for a step."""
        return any(self.parameters[name].grad is not None for name in self._names)

    def clear(self) -> None:
        for name in self._names:
            self.parameters[name].grad = None

    # ---------------------------------------------------------------- around a backward
    def gather(self) -> bool:
        """Called before a backward. Returns whether the backward adds to gradients. If so, tiles hold them, or zeros if `.grad`
        is None or a tensor of the user's. No update may be reading gradients. Raises `UnsupportedError` for a sparse gradient,
        and with several ranks for one that the user has changed, except to zeros."""
        replaced, added = self._replaced(), self.waiting
        if self._store.shared:
            self._refuse_changed(replaced, zeros=True)
        overwritten = [name for name in self._stored if self.parameters[name].grad is None or name in replaced]
        self._before_overwrite(overwritten, replaced)
        self._noted, self._sampled = {}, {}
        for name in overwritten if added else ():
            for memory in self._own(name):
                memory.zero_()
        return added

    def _own(self, name: str) -> Iterator[Tensor]:
        """The gradient's memory on this host."""
        tile_name, position = self._tiling.position[name]
        tile, stored = self._store.tiles[tile_name], self._stored[name]
        if tile.here is None:
            yield stored
            return
        s = tile.layout.slices[position]
        yield from (stored.view(-1)[first:last] for first, last in within(tile.here, s.start, s.stop))

    @torch.no_grad()
    def hand_out(self, reached: Collection[str]) -> None:
        """Sets `.grad` of the parameters that a backward reached, or adds to its tensor. Called after all tiles were
        written."""
        for name in self._stored:
            if name in reached and self.parameters[name].grad is None:
                self.parameters[name].grad = self._lend(name)
        self._note()
        for name, given in self._replaced().items():  # maybe another parameter's: its norm has changed too
            given.add_(self._stored[name])

    def _lend(self, name: str) -> Tensor:
        tile, index = self._tiling.position[name]
        tensor = self._store.tiles[tile].parameter_view(self._memory(name), index)
        if self._store.division is not None:
            return divided(tensor, f"the gradient of {name}")
        self._lent[name] = Lent(tensor, self._memory(name))
        return tensor

    def _memory(self, name: str) -> Tensor:
        """The gradient memory of a parameter's whole tile."""
        memory = self._store.tiles[self._tiling.position[name][0]].gradients
        assert memory is not None, f"{name} is not trained"
        return memory

    def _replaced(self) -> dict[str, Tensor]:
        """Tensors that the user has assigned in place of a tile's memory."""
        found = {}
        for name, stored in self._stored.items():
            given = self.parameters[name].grad
            if given is None:
                continue
            if given.layout != torch.strided:
                raise UnsupportedError(f"the gradient of {name} is {given.layout}, which no update reads: set .grad to a dense "
                                       "tensor (to_dense())")
            if not _same_memory(given, stored):
                found[name] = given
        return found

    def _before_overwrite(self, names: Collection[str], replaced: Mapping[str, Tensor]) -> None:
        """Moves tensors that users hold to their own memory. Called before the memory of these gradients is overwritten."""
        held: dict[int, list[Tensor]] = {}  # by address: two parameters' gradients may have been exchanged
        for given in replaced.values():
            held.setdefault(given.untyped_storage().data_ptr(), []).append(given)
        for name in names:
            stored, lent = self._stored[name], self._lent.pop(name, None)
            holders = [*held.get(stored.data_ptr(), ()), *([lent.kept] if lent is not None and lent.kept is not None else ())]
            values = stored.clone() if holders else stored
            for tensor in holders:  # tensors that shared memory still share it
                move(tensor, values.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()), self._memory(name))
            if lent is not None and lent.has_views and not self._warned:
                self._warned = True
                warnings.warn(f"a view of an earlier gradient of {name} is still in use and shows later gradients from now on: "
                              "clone() what you keep (.grad itself may be kept as it is)", stacklevel=2)

    # ---------------------------------------------------------------- around an update
    def _note(self) -> None:
        """Records that the stored norms belong to the tiles' current gradients."""
        self.made = True
        self._noted, self._sampled = {}, {}
        for name, stored in self._stored.items():
            given = self.parameters[name].grad
            if given is not None and _same_memory(given, stored):
                self._noted[name] = weakref.ref(given), given._version
        self._sampled = {tile: self._sample(tile) for tile in self._sampled_indexes}

    def _sample(self, name: str) -> Tensor:
        """Some elements of a tile's gradients, as bits."""
        tile = self._store.tiles[name]
        assert tile.gradients is not None
        return tile.layout.flat(tile.gradients).view(_BITS[tile.layout.dtype.itemsize])[self._sampled_indexes[name]]

    def untouched(self) -> bool:
        """True if tiles hold the gradients that were last recorded."""
        changed = any((tensor := of()) is not None and tensor._version != version for of, version in self._noted.values())
        return not changed and not any(self._changed())

    def _changed(self) -> Iterator[str]:
        """Gradients whose elements in the tiles differ from the recorded ones."""
        for tile, noted in self._sampled.items():
            sampled, start = self._sample(tile), 0
            if not torch.equal(sampled, noted):
                for s in self._store.tiles[tile].layout.slices:
                    stop = start + min(_SAMPLED, s.count)
                    if not torch.equal(sampled[start:stop], noted[start:stop]):
                        yield s.name
                    start = stop

    @torch.no_grad()
    def refresh(self) -> bool:
        """Copies `.grad` into tiles if it differs, and recomputes norms. Called before an update. Returns whether anything had
        changed. No update may be reading gradients. With several ranks, raises `UnsupportedError` instead."""
        replaced = self._replaced()
        if self._store.shared:
            self._refuse_changed(replaced)
            return False
        # Code that changes one gradient untracked, such as a scaler, changes others too, maybe outside the samples.
        untold = any(name not in replaced and (given := self.parameters[name].grad) is not None and self._is_noted(name, given)
                     for name in self._changed())
        self._before_overwrite(replaced, replaced)
        changed = False
        for name, stored in self._stored.items():
            given = self.parameters[name].grad
            if given is None:
                continue
            if name in replaced:
                stored.copy_(given)
            elif not untold and self._is_noted(name, given):
                continue
            changed = True
            self._refresh_norms(name)
        if changed:
            self._note()
        return changed

    def _refuse_changed(self, replaced: Collection[str], zeros: bool = False) -> None:
        """Raises `UnsupportedError` for a gradient that the user has changed. All ranks share its memory, so each rank's change
        would count. `zeros`: allows gradients that are zero now, since every rank may set them to zero."""
        given = {name: tensor for name in self._stored if (tensor := self.parameters[name].grad) is not None}
        changed = [name for name, tensor in given.items() if not self._is_noted(name, tensor)]
        sampled = [name for name in self._changed() if name in given] if given else []
        for name in (*changed, *sampled):
            if not zeros or name in replaced or any(memory.any() for memory in self._own(name)):
                raise UnsupportedError(
                    f"the gradient of {name} was changed, but all ranks share its memory: clip "
                    "with megacompile.AdamW(max_grad_norm=...), and scale the loss instead of gradients")

    def _is_noted(self, name: str, given: Tensor) -> bool:
        tensor, version = self._noted.get(name, (None, 0))
        return tensor is not None and tensor() is given and given._version == version

    def _refresh_norms(self, name: str) -> None:
        for tile_name, position in self._tiling.streamed_at[name]:
            tile = self._store[tile_name]
            assert tile.home.gradients is not None and tile.norm_bytes is not None
            gradient = tile.home.layout.flat(tile.home.gradients)[tile.layout.at_home(position)]
            tile.norm_bytes.view(torch.float32)[position] = host.norm(gradient)


def _same_memory(given: Tensor, stored: Tensor) -> bool:
    """True if both tensors have the same elements at the same addresses. A transposed view does not."""
    return given.data_ptr() == stored.data_ptr() and given.stride() == stored.stride()


def _sampled_indexes(layout: TileLayout) -> Tensor:
    """Sampled elements of a tile: some of each parameter, evenly spaced, including the first and the last."""
    return torch.cat([s.start + torch.arange(count) * (s.count - 1) // max(1, count - 1)
                      for s in layout.slices for count in (min(_SAMPLED, s.count),)])
