"""An optimizer's state, whose tensors are memory of tiles.

    optimizer.state[p]["exp_avg"] = moved      copies the values into the tile (trainers move state to the device this way,
                                               where no update would use it)
    optimizer.state.pop(p)                     the parameter's moments restart at the next step, as in torch.optim
    kept = optimizer.state[p]["exp_avg"]       keeps its values when the state restarts or is replaced

Tensors of moments on disk are copies, which are written back if they were changed (`state.py`).

The low 16 bits of an FP32 master are not part of the state. They belong to the weight, and must survive a reset of the moments.
`AdamW.state_dict` includes them.
"""
from __future__ import annotations

import math
import weakref
import zlib
from collections import defaultdict
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from megacompile.errors import InsufficientMemoryError, MegacompileError, UnsupportedError
from megacompile.runtime.memory.state_layout import ElementState, scale_of
from megacompile.runtime.memory.store import Store
from megacompile.runtime.memory.tiles import MomentFile, own_storage
from megacompile.runtime.optimizer.state_format import BFLOAT16
from megacompile.sizes import format_bytes
from megacompile.streaming.optimizer.hyper_parameters import is_number
from megacompile.streaming.user_tensors.divided import divided, own_values, put
from megacompile.streaming.user_tensors.gradients import Lent
from megacompile.system.host_memory import available_host_bytes, host_memory
from megacompile.weights.tiling import Tiling


# --------------------
# Tensors of an optimizer's state whose values are on disk: read when the user asks for one, written back if it was changed.
#
#     moment = optimizer.state[p]["exp_avg"]     reads it into memory of its own
#     moment.mul_(0.5)                           counts: the next step, save or `state_dict` writes it back
#     optimizer.step()                           from here on `moment` keeps its values; read `optimizer.state` again
@dataclass(frozen=True)
class OnDisk:
    """One tensor of a parameter's state in a file: the tensor called `name`, of the parameter at a `position` of a tile."""

    file: MomentFile
    tile: str
    position: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """The values, in new memory. Raises `DiskError`, and `InsufficientMemoryError` if they do not fit memory."""
        if self.bytes > (available := available_host_bytes()):
            raise InsufficientMemoryError(
                f"{self.name} of a parameter of {self.tile} is on disk and takes {format_bytes(self.bytes)} of host memory to "
                f"read, and {format_bytes(available)} are available: drop what was read before, or save with save_checkpoint, "
                "which reads a part at a time")
        memory = host_memory(self.bytes)
        self.file.get(self.tile, self.position, self.name, 0, memory)
        return memory.view(self.dtype).view(self.shape)

    def write(self, values: Tensor) -> None:
        """Replaces the values. Raises `DiskError`."""
        flat = values.detach().to("cpu", self.dtype).contiguous().flatten()
        self.file.put(self.tile, self.position, self.name, flat.view(torch.uint8))


class Fetched:
    """A tensor that the user was given, and the values on disk."""

    def __init__(self, stored: OnDisk) -> None:
        self.stored, self.tensor = stored, stored.read()
        self._sum = self._checksum()

    def _checksum(self) -> int:
        """CRC-32 of all bytes. It also finds changes that PyTorch does not track."""
        return zlib.crc32(self.tensor.detach().flatten().view(torch.uint8).numpy().data)

    @property
    def changed(self) -> bool:
        return self._checksum() != self._sum

    def written_back(self) -> None:
        self._sum = self._checksum()


class StaleTensor:
    """A tensor that the user may still hold although a step has begun since it was read. Writes to it are lost."""

    def __init__(self, fetched: Fetched) -> None:
        self.name = fetched.stored.name
        self._tensor, self._version = TensorWeakRef(fetched.tensor), fetched.tensor._version

    @property
    def alive(self) -> bool:
        return self._tensor() is not None

    def check(self, parameter: str) -> None:
        """Raises `MegacompileError`, once, if the tensor was written since then."""
        tensor = self._tensor()
        if tensor is not None and tensor._version != self._version:
            self._version = tensor._version
            raise MegacompileError(f"{self.name} of {parameter}, which is on disk, was changed in a tensor that was read "
                                   "before a step: read it from optimizer.state again after each step, and change that tensor")


def step_count(value: Any, name: str) -> int:
    """The number of steps as an int. Raises `MegacompileError` for a value that is not a step count of the parameter `name`."""
    if not is_number(value) or not (0 <= (count := float(value)) < 2**53 and count.is_integer()):
        raise MegacompileError(f"the step of {name} is {value!r}: give a whole number of at least 0")
    return int(count)


class _Assigned(dict[Any, Any]):
    """A dict that routes every write through `__setitem__`."""

    def update(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)  # a copy has memory of its own


class StateHolder(Protocol):
    """The interface of an optimizer to its state."""

    def memory_of(self, parameter: Any) -> StateMemory | None:
        """The memory of a parameter's state; None if the optimizer does not update it."""

    def release(self) -> None:
        """Drops the state, when the model is closed."""


class StateMemory:
    """The state of one parameter in its tile, whichever optimizer uses it. `before_write(tile)` is called before the tile is
    written. It is a weak reference, since optimizers outlive models. State: the `optimizer`, its current `ParameterState`, and
    the tensors that the user was given."""

    def __init__(self, name: str, tiling: Tiling, store: Store,
                 before_write: weakref.WeakMethod[Any]) -> None:
        self._before_write, self._store = before_write, store
        self.name = name
        self._tile_name, self._position = tiling.position[name]
        self._tile = store.tiles[self._tile_name]
        self._part = self._tile.layout.slices[self._position]
        self._optimizer: weakref.ref[StateHolder] | None = None
        self._state: weakref.ref[ParameterState] | None = None
        self._lent: dict[str, Lent] = {}

    @property
    def start(self) -> int:
        """The index of the parameter's first element in its host tile."""
        return self._part.start

    @property
    def kept(self) -> ElementState:
        """The state that is stored for the parameter's elements."""
        return self._tile.layout.state_of(self._position)

    def keeps(self, wanted: ElementState) -> bool:
        """True if the stored state is what was asked for, or the tile's replacement for it (bf16 instead of 8-bit moments)."""
        kept = self.kept
        alike = kept.format == wanted.format or (wanted.format.scaled and kept.format == BFLOAT16)
        return (kept.moments, kept.exact, kept.whole) == (wanted.moments, wanted.exact, wanted.whole) and alike

    @property
    def parts(self) -> list[str]:
        """The names of the stored tensors: moments, and their scales."""
        kept = self.kept
        return [*kept.moments, *(map(scale_of, kept.moments) if kept.format.scaled else ())]

    @property
    def keys(self) -> list[str]:
        return ["step", *self.parts]

    def shape_of(self, part: str) -> tuple[int, ...]:
        """The shape of a stored tensor: that of the parameter, or of its scales."""
        return self._part.shape if part in self.kept.moments else (self.kept.format.scales(self._part.count),)

    @property
    def optimizer(self) -> StateHolder | None:
        return self._optimizer() if self._optimizer is not None else None

    @optimizer.setter
    def optimizer(self, optimizer: StateHolder) -> None:
        self._optimizer = weakref.ref(optimizer)

    @property
    def held(self) -> bool:
        """True if an optimizer, or a user, holds tensors of the state."""
        return any(lent.kept is not None for lent in self._lent.values())

    @property
    def tile(self) -> str:
        """The host tile that holds the state."""
        return self._tile_name

    @property
    def remainder(self) -> Tensor | None:
        """The low bits of the FP32 master, int16; None for an fp32 parameter."""
        found = None if self._tile.remainder is None else self._own(self._tile.remainder)
        return found if found is None or self._tile.here is None else divided(found, f"the remainder of {self.name}")

    @property
    def writable(self) -> bool:
        """True if this process writes loaded values."""
        return self._store.writes(self._tile_name)

    def bind(self, state: ParameterState) -> None:
        """Makes this the parameter's state. The previous state no longer writes to the memory."""
        former = self._state() if self._state is not None else None
        if former is not None:
            former.detach()
        self._state, state.memory = weakref.ref(state), self

    def release(self) -> None:
        """Releases the state, when the model is closed. A state that a user holds keeps its values, but nothing reads them any
        more."""
        if (optimizer := self.optimizer) is not None:
            optimizer.release()
        if (state := self._state() if self._state is not None else None) is not None:
            state.memory = None
        self._lent.clear()

    def restart(self, state: ParameterState) -> None:
        """Resets the state to that of an optimizer's first step: zero moments, step 0."""
        self._wait_until_writable()
        tile = self._tile
        tile.allocate_moments()
        for part in self._lent.keys() - set(self.parts):  # of a former optimizer's state: its memory would stay
            self._lent.pop(part).move()
        are_zero = tile.moments_are_zero
        moments = {key: self._lend(key) for key in self.parts}
        for key, moment in moments.items() if not are_zero and self.writable else ():
            if tile.here is not None:
                for _, memory in own_values(tile, self._position, key):
                    memory.zero_()
            elif isinstance(moment, OnDisk):
                moment.write(torch.zeros(moment.shape, dtype=moment.dtype))
            else:
                moment.zero_()
        dict.update(state, moments, step=0)

    def check(self, key: str, value: Any) -> None:
        """Raises `MegacompileError` for a value that the parameter's state cannot hold."""
        if key == "step":
            step_count(value, self.name)
        elif key in self.parts and (not isinstance(value, Tensor) or value.shape != self.shape_of(key)):
            raise MegacompileError(f"the {key} of {self.name} must be a tensor of shape {list(self.shape_of(key))}: assign "
                                   "one, or remove the state (optimizer.state.pop(parameter)) to restart it")
        elif key in self.kept.moments and self.kept.format.scaled and value.dtype != torch.uint8:
            raise MegacompileError(f"the {key} of {self.name} must be uint8, codes of 8-bit moments, not {value.dtype}: assign "
                                   "codes, or remove the state (optimizer.state.pop(parameter)) to restart it")

    def of_torch(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """Converts a saved state of torch.optim to ours. Its optimizers that keep a `momentum_buffer` count no steps. They
        create the buffer at the first step, and have None or no entry before."""
        if "momentum_buffer" not in saved or "step" in saved or "momentum_buffer" not in self.kept.moments:
            return saved
        if saved["momentum_buffer"] is None:
            return {key: value for key, value in saved.items() if key != "momentum_buffer"}
        return {**saved, "step": 1}

    def check_saved(self, saved: Mapping[str, Any]) -> None:
        """Raises `MegacompileError` for a saved state that does not fit. It may be empty, or have only a remainder."""
        wanted = self.keys if saved.keys() - {"remainder"} else []
        if self.remainder is not None and "remainder" in saved:
            wanted.append("remainder")
        for key in wanted:
            shape = () if key == "step" else self._part.shape if key == "remainder" else self.shape_of(key)
            if key not in saved or (key != "step" and getattr(saved[key], "shape", None) != shape):
                what = key if key == "step" else f"{key} of shape {list(shape)}"
                raise MegacompileError(f"the saved optimizer state of {self.name} has no {what}: load one that was saved with "
                                       "this model and an optimizer of the same kind and state_dtype")
            self.check(key, saved[key])
        if "remainder" in wanted and saved["remainder"].dtype != torch.int16:
            raise UnsupportedError("the saved remainder is not int16: it was cast on the way; save it unchanged")

    def take(self, key: str, value: Any) -> Any:
        """Copies a checked value into the tile, and returns the tensor that represents it in the state."""
        if key not in self.keys or (key in self._lent and self._lent[key].kept is value):
            return value
        self._wait_until_writable()
        if key == "step":
            return step_count(value, self.name)
        self._tile.allocate_moments()
        moment = self._lend(key)
        self._tile.moments_written = True
        if self.writable and self._tile.here is not None:
            self.put(key, value)
        elif self.writable:
            (moment.write if isinstance(moment, OnDisk) else moment.copy_)(value)
        return moment

    def put(self, key: str, value: Tensor) -> None:
        """Writes what this host has of a part of the state, or of the remainder. A value on the meta device is written by
        whoever loads it."""
        if not value.is_meta:
            put(self._tile, self._position, key, value)

    def fetch(self, stored: OnDisk) -> Fetched:
        """Reads a tensor on disk into new memory, after the update in flight. Raises `DiskError`, `InsufficientMemoryError`."""
        self._wait_until_writable()
        return Fetched(stored)

    def write_back(self, fetched: Fetched) -> None:
        """Writes the user's changes to the disk. Raises `DiskError`; then it can be written again."""
        if fetched.changed:  # no update has begun since it was read
            self._store.preserve(self._tile_name)
            self._tile.moments_written = True
            fetched.stored.write(fetched.tensor)
            fetched.written_back()

    def _lend(self, key: str) -> Tensor | OnDisk:
        """A tensor over the tile's memory, or its place on disk, that is about to be written."""
        if key in self._lent:
            self._lent.pop(key).move()
        tile, shape = self._tile, self.shape_of(key)
        if tile.file is not None:
            state = self.kept
            dtype = state.format.dtype if key in state.moments else torch.float32
            return OnDisk(tile.file, self._tile_name, self._position, key, shape, dtype)
        found = dict(tile.layout.state_layout.named(tile.moments, self._position))[key]
        # With the tile's storage, `torch.save` would write the whole tile, and it takes no storage that has two dtypes.
        tensor = own_storage(found[:math.prod(shape)], found.dtype).view(shape)
        if tile.here is not None:
            return divided(tensor, f"the {key} of {self.name}")
        self._lent[key] = Lent(tensor, found)
        return tensor

    def _own(self, memory: Tensor) -> Tensor:
        return memory[self._part.start:self._part.stop].view(self._part.shape)

    def _wait_until_writable(self) -> None:
        """Waits until the tile may be written."""
        if (before_write := self._before_write()) is not None:
            before_write(self._tile_name)


class ParameterState(_Assigned):
    """The state of one parameter, by name. With `memory`, assigned values are copied there. Tensors on disk are read on demand.
    State: the tensors that were read, and those that were read before the last step."""

    memory: StateMemory | None = None

    def __init__(self, values: Any = ()) -> None:
        super().__init__()
        self._fetched: dict[str, Fetched] = {}
        self._stale: list[StaleTensor] = []
        self.update(values)

    @torch.no_grad()
    def __setitem__(self, key: str, value: Any) -> None:
        if self.memory is not None:
            self.memory.check(key, value)
            if key in self:
                super().__setitem__(key, None)  # other holders of the old tensor keep its values
            value = self.memory.take(key, value)
            self._fetched.pop(key, None)
        super().__setitem__(key, value)

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if not isinstance(value, OnDisk):
            return value
        if key not in self._fetched:
            self._fetched[key] = Fetched(value) if self.memory is None else self.memory.fetch(value)
        return self._fetched[key].tensor

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()  # `dict(state)` then asks for each value, as all methods below do

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401  (this is `get`)

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self:
            return super().pop(key, *default)
        value = self[key]
        del self[key]
        return value

    def copy(self) -> dict[Any, Any]:
        return dict(self)

    def items(self) -> ItemsView[Any, Any]:  # type: ignore[override]
        return dict(self).items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return dict(self).values()

    def write_back(self, drop: bool = False) -> None:
        """Writes the user's changes to the disk. `drop`: the call is before a step, and the tensors are read again after it.
        Raises `DiskError`, and `MegacompileError` if the user has changed a tensor that was dropped earlier."""
        if self.memory is None or not (self._fetched or self._stale):
            return
        for fetched in self._fetched.values():
            self.memory.write_back(fetched)
        self._stale = [each for each in self._stale if each.alive]
        for each in self._stale:
            each.check(self.memory.name)
        if drop:
            self._stale += map(StaleTensor, self._fetched.values())
            self._fetched.clear()

    def detach(self) -> None:
        """Gives this state its own values from now on. Another state replaces it."""
        for key in self:
            self[key]
        self.memory = None


#: A parameter, the memory of its state, and a state that was saved.
SavedState = tuple[Tensor, StateMemory, Mapping[str, Any]]


class OptimizerState(_Assigned, defaultdict[Tensor, ParameterState]):
    """The states of all parameters: the value of `torch.optim.Optimizer.state`."""

    def __init__(self, optimizer: StateHolder, values: Any = ()) -> None:
        super().__init__()
        self._optimizer = weakref.ref(optimizer)  # a cycle would keep dropped optimizers until the garbage collector runs
        self.update(values)

    def __missing__(self, parameter: Tensor) -> ParameterState:
        self[parameter] = ParameterState()
        return self[parameter]

    @torch.no_grad()
    def __setitem__(self, parameter: Tensor, state: Mapping[str, Any]) -> None:
        optimizer = self._optimizer()
        memory = optimizer.memory_of(parameter) if optimizer is not None else None
        if isinstance(state, ParameterState) and state.memory is memory:
            super().__setitem__(parameter, state)
            return
        if memory is not None:
            for key, value in state.items():
                memory.check(key, value)
        made = ParameterState()
        super().__setitem__(parameter, made)  # other holders of the old state keep its values
        if memory is not None:
            memory.bind(made)
        made.update(state)

    def ready(self, parameter: Tensor, memory: StateMemory) -> ParameterState:
        """The state of a parameter for a step. A removed state restarts. Raises `MegacompileError` if part of it is missing."""
        state = self[parameter]
        if state.memory is not memory:  # made before this optimizer took over the parameter
            self[parameter] = state
            state = self[parameter]
        if not state.keys() & set(memory.keys):
            memory.restart(state)
        elif missing := [key for key in memory.keys if key not in state]:
            raise MegacompileError(f"the optimizer's state of {memory.name} has no {missing[0]}: remove all of it "
                                   "(optimizer.state.pop(parameter)), and the moments restart")
        return state

    def write_back(self, drop: bool = False) -> None:
        """Calls `ParameterState.write_back` for all parameters."""
        for state in self.values():
            if isinstance(state, ParameterState):
                state.write_back(drop)
