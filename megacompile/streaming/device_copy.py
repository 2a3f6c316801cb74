"""A plain model with the weights of a streamed one on the device, for generation and other inference.

It takes the memory that training leaves: slots give way while it lives and are made again afterwards. It is kept between uses,
and only weights that have changed are copied again, as long as the streamed model does not need its memory. If not all layers
fit, some take turns in two slots (`generation/turns.py`). Its weights are copies on a CPU too: a user may write to them.
"""
from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.compat.module_hooks import AFTER_FORWARD, BEFORE_FORWARD, FLAGS, hooks_of
from megacompile.errors import InsufficientMemoryError, MegacompileError
from megacompile.frontend.tracing.model_options import divides_weights
from megacompile.ir.program import Program, stays
from megacompile.sizes import format_bytes
from megacompile.streaming.generation.copied_tiles import CopiedTiles
from megacompile.streaming.generation.turns import (
    LayerTurns,
    TurningLayer,
    copied_bytes,
    slot_bytes,
    spared_bytes,
    staying_layers,
    turning_layers,
    turns_program,
)
from megacompile.streaming.streamed import Streamed


# --------------------
# The forward hooks of a model, in a copy of it: those that the model has now, beside those that only the copy has.
@dataclass(frozen=True, eq=False)
class _Hook:
    """Wraps a hook of a module, for the module's copy. Both call the same hook object, so they share its state. Does nothing
    once the hook was removed from the module."""

    there: Mapping[int, Any]
    key: int
    hook: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.hook(*args, **kwargs) if self.key in self.there else None


class CopiedHooks:
    """State: the keys of the hooks that the copy got from the model."""

    def __init__(self) -> None:
        self._keys: set[int] = set()

    def refresh(self, modules: Sequence[tuple[nn.Module, nn.Module]]) -> None:
        """Gives the copy's modules the current hooks of the model's modules. `modules`: pairs of a module and its copy."""
        copies = {id(ours): theirs for ours, theirs in modules}
        keys = set[int]()
        for ours, theirs in modules:
            for name in (BEFORE_FORWARD, AFTER_FORWARD, *FLAGS):
                there, now = vars(theirs)[name], vars(ours)[name]
                own = {key: value for key, value in there.items() if key not in self._keys and key not in now}
                if name not in FLAGS:
                    now = {key: _in_copy(there.get(key), _Hook(now, key, _of_copy(hook, copies))) for key, hook in now.items()}
                keys |= now.keys()
                # Hooks with which layers take turns wait for weights before the user's, and release them after these.
                wanted = own | now if name == BEFORE_FORWARD else now | own
                if list(wanted.items()) != list(there.items()):
                    there.clear()
                    there.update(wanted)
        self._keys = keys


def _in_copy(kept: Any, made: _Hook) -> _Hook:
    """The hook that the copy already has, if it is the same. A new object would make compiled code of the copy compile
    again."""
    return kept if isinstance(kept, _Hook) and kept.hook == made.hook else made


def _of_copy(hook: Callable[..., Any], copies: Mapping[int, nn.Module]) -> Callable[..., Any]:
    """The hook. If it is a method of one of the model's modules: the same method of the module's copy."""
    if isinstance(hook, MethodType) and id(hook.__self__) in copies:
        return MethodType(hook.__func__, copies[id(hook.__self__)])
    return hook


#: Values of these types in a module are read again for each use: flags of adapters, `training`, counters.
_PLAIN = (bool, int, float, str, type(None))
#: Objects that the copy shares with the streamed model, by the name of the attribute.
_SHARED = ("config", "generation_config")


class Turns(Enum):
    """The layers that take turns in two slots: none, those that do not fit, or all."""

    NONE = "none"
    SOME = "some"
    ALL = "all"


@dataclass(frozen=True)
class Arrangement:
    """A copy that fits: the most bytes of device memory that it takes, and the bytes of the layers that take turns (`turning`),
    which cross the link for each call."""

    device_bytes: int
    copied_bytes: int
    turning: tuple[TurningLayer, ...] = ()

    def bytes_for(self, tokens: int | None) -> int:
        """Bytes that cross the link for a call of so many tokens, whose routers may choose few experts. None: unknown."""
        return self.copied_bytes - spared_bytes(self.turning, tokens)


def original_class(model: nn.Module) -> type[nn.Module]:
    """The class that a streamed model had before `stream`."""
    _, original = type(model).__bases__
    return original


class DeviceCopy:
    """State: the `native` model (None if there is none) with its `parameters`; the `turns` of layers that do not stay on the
    device, or, if all stay there, the trained `tiles`. Also the versions of weights, of all tensors and of the native model's
    tensors when it was last current, and the number of open uses. The streamed model does not run during a use."""

    def __init__(self, streamed: Streamed) -> None:
        self._streamed = streamed
        streamed.guests.append(self)
        self.native: nn.Module | None = None
        self.turns: LayerTurns | None = None
        self.tiles: CopiedTiles | None = None
        self._version, self._versions, self._open = -1, [0], 0
        self._parameters, self._native_versions = list[nn.Parameter](), list[int]()
        self._hooks, self._modules = CopiedHooks(), list[nn.Module]()

    @contextmanager
    def use(self, original: type[nn.Module], more_bytes: int = 0, turns: Turns = Turns.NONE,
            early: bool = False) -> Iterator[nn.Module]:
        """The model, of its `original` class, with current weights. `more_bytes`: device memory that the use takes. If it is 0
        (unknown), all memory that the streamed model can give is freed. `early`: the use reads weights only in forwards of the
        model, in eager mode; the first one may wait for layers that the host still updates. Raises `InsufficientMemoryError` if
        it does not fit, `TornError` if the weights are not all of one step, what an update has failed with, and
        `MegacompileError` if another use is open and has the wrong layers on the device."""
        streamed = self._streamed
        with streamed.call_lock, torch.inference_mode(False), torch.no_grad():  # the copy outlives the use
            early = early and streamed.ends_step is not None and self._has_tiles and not self._open
            (streamed.raise_pending if early else streamed.settle)()
            streamed.step.check_whole()
            streamed.adopt_writes()
            if self.native is not None and not (self._is_alike() and self._serves(more_bytes, turns)):
                if self._open:
                    raise MegacompileError("the weights are on the device already, but this use needs other layers or more "
                                           "memory there: leave the block `with model.megacompile.on_device()` first")
                self.release()
            stale = self.native is None or self._version != streamed.step.version or self._written(self.native)
            if self.native is None:
                found = self._arranged(more_bytes, turns)
                self._make_room(found.device_bytes + more_bytes, keep_tiles=more_bytes > 0)
                try:
                    self.native = self._made(original, found.turning)
                    self._parameters = list(self.native.parameters())
                except BaseException:  # Ctrl-C, or too little memory: the slots would stay
                    self.release()
                    raise
            else:
                self._make_room(self._taken + more_bytes, keep_tiles=more_bytes > 0)
                if stale:
                    self._copy_changed(self.native)
            self._refresh(self.native)
            if stale and self.tiles is not None:
                self._load(self.tiles, self.native, early)
            self._version, self._versions = streamed.step.version, [tensor._version for tensor in _tensors(streamed.model)]
            self._native_versions = [tensor._version for tensor in _tensors(self.native)]
            self._open += 1
        try:
            yield self.native
            if early:
                streamed.settle()  # raises what the update has failed with since
                self._native_versions = [tensor._version for tensor in _tensors(self.native)]
        except BaseException:
            if early:
                self.expect_writes()  # some tiles may be missing
            raise
        finally:
            if self.turns is not None:
                self.turns.stop()  # the user may have written to the slots
            if self.tiles is not None:
                self.tiles.stop()
            self._open -= 1

    def give_way(self, needed: int) -> None:
        """Frees the copy unless it fits the budget beside the streamed model, which is about to take `needed` bytes of device
        memory. Raises `MegacompileError` while a use is open."""
        if self._open:
            raise MegacompileError("the model's weights are on the device for inference, and streaming needs the memory: leave "
                                   "the block `with model.megacompile.on_device()` first")
        if self.native is not None and not self._holds(self._taken + needed):
            self.release()

    def expect_writes(self) -> None:
        """Makes the next use copy all weights again: they may be written in a way that is not tracked (`.data`)."""
        self._version, self._versions = -1, [-1] * len(self._versions)

    def release(self) -> None:
        if self.turns is not None:
            self.turns.close()
        if self.tiles is not None:
            self.tiles.stop()
        self.native = self.turns = self.tiles = None
        self._parameters = []

    # ---------------------------------------------------------------- memory
    @property
    def _device(self) -> torch.device:
        return self._streamed.backend.device

    @property
    def bytes(self) -> int:
        """Bytes of device memory that the copy takes with all layers on the device."""
        return sum(tensor.nbytes for tensor in _tensors(self._streamed.model))

    @property
    def _taken(self) -> int:
        """Bytes of device memory that the copy takes."""
        return self._bytes_with(None if self.turns is None else self.turns.program)

    def _bytes_with(self, turns: Program | None) -> int:
        """Bytes of device memory that the copy takes if layers take turns by this program."""
        return self.bytes if turns is None else self.bytes - copied_bytes(turns) + slot_bytes(turns)

    def _holds(self, needed: int) -> bool:
        planner = self._streamed.planner
        return needed + planner.margin_bytes <= planner.device_bytes

    def arrangement(self, more_bytes: int, turns: Turns) -> Arrangement | None:
        """The arrangement that fits the budget, with `more_bytes` for the use; None if none fits."""
        if turns != Turns.ALL and self._holds(self.bytes + more_bytes):
            return Arrangement(self.bytes, 0)
        turning = () if turns == Turns.NONE else self.layers()
        if not turning:
            return None
        program, planner = turns_program(turning), self._streamed.planner
        least = self._bytes_with(program)
        if not self._holds(least + more_bytes):
            return None
        if turns == Turns.SOME:  # fewer layers take no larger slots
            staying = staying_layers(turning, planner.device_bytes - planner.margin_bytes - more_bytes - least)
            turning = tuple(layer for layer in turning if layer not in staying)
        copied = sum(layer.bytes for layer in turning)
        return Arrangement(least + copied_bytes(program) - copied, copied, turning)

    def layers(self) -> tuple[TurningLayer, ...]:
        """The layers whose weights can take turns, in the order in which they run. A model that divides its weights in place
        has none, since later copies would undo that."""
        streamed = self._streamed
        if divides_weights(getattr(streamed.model, "config", None)):
            return ()
        return turning_layers(streamed.model, [call.again or call.name for call in streamed.captured.calls[1:-1]],
                              streamed.tiling.host)

    def _is_alike(self) -> bool:
        """True if the model has the same modules, and the copy the same parameters, as when the copy was made."""
        assert self.native is not None, "there is a copy"
        now, then = [*nn.Module.modules(self._streamed.model), *self.native.parameters()], [*self._modules, *self._parameters]
        return len(now) == len(then) and all(map(operator.is_, now, then))

    def _serves(self, more_bytes: int, turns: Turns) -> bool:
        """True if the existing copy can be used again."""
        there = 0 if self.turns is None else len(self.turns.layers)
        wanted = {Turns.NONE: not there, Turns.SOME: True, Turns.ALL: there and there == len(self.layers())}[turns]
        return bool(wanted) and self._holds(self._taken + more_bytes)

    def _arranged(self, more_bytes: int, turns: Turns) -> Arrangement:
        """As `arrangement`. Raises `InsufficientMemoryError` if it does not fit."""
        found, planner = self.arrangement(more_bytes, turns), self._streamed.planner
        if found is None:
            raise InsufficientMemoryError(
                f"the weights take {format_bytes(self.bytes)} of device memory, their use {format_bytes(more_bytes)}, and "
                f"{format_bytes(planner.margin_bytes)} stay free, of {format_bytes(planner.device_bytes)}: give a larger "
                "device_memory, let layers take turns (on_device(in_turns=True)), or call the streamed model")
        return found

    def _make_room(self, needed: int, keep_tiles: bool) -> None:
        """Frees slots if the budget does not hold both, except slots that an open forward's backward reads. With `keep_tiles`,
        tiles that stay on the device between steps stay there if the budget also holds them. Their optimizer state is newer
        there and would have to be copied to the host and back. With several ranks they always stay: all ranks must copy them
        together, and one rank may generate alone."""
        streamed = self._streamed
        if self._holds(needed + streamed.executables.largest) or streamed.forwards.open():
            return
        before = streamed.arena.device_bytes()
        if keep_tiles:
            self._forget(stays_too=False)
        if not keep_tiles or not self._holds(needed + streamed.arena.device_bytes()):
            self._forget(stays_too=True)
        # Without a stated budget the use takes the allocator's free memory, which PyTorch gives back where the device is full.
        stated = streamed.planner.config.device_memory is not None
        if stated and (self.native is None or streamed.arena.device_bytes() < before):
            streamed.settle()
            streamed.backend.trim()

    def free_slots(self) -> bool:
        """Frees the copy, and the slots that `_make_room` kept. Call it after an `OutOfMemoryError` in a use. Returns whether
        there were any."""
        streamed = self._streamed
        self.release()
        with streamed.call_lock:
            before = streamed.arena.device_bytes()
            if not streamed.forwards.open():
                streamed.settle()
                self._forget(stays_too=True)
            streamed.backend.trim()
            return streamed.arena.device_bytes() < before

    def _forget(self, stays_too: bool) -> None:
        """Frees the slots of the streamed model's steps. `stays_too`: also those of tiles that stay between steps, after newer
        state was copied to the host."""
        streamed = self._streamed
        stays_too = stays_too and not (streamed.rank_group.size > 1 and streamed.residency.state_ahead)
        if stays_too:
            streamed.evict()
        awaited = set(streamed.residency.awaited())
        if (updating := streamed.ends_step) is not None:
            awaited.update(updating.slots("update"))
        streamed.arena.forget(*(slot for slot in streamed.arena.slots if slot not in awaited
                                and not streamed.arena.is_slab(slot) and (stays_too or not stays(slot))))

    # ---------------------------------------------------------------- the model
    def _made(self, original: type[nn.Module], turning: tuple[TurningLayer, ...]) -> nn.Module:
        """A copy of the model's structure with parameters and buffers on the device. `turning`: the layers that take turns."""
        model = self._streamed.model
        streamed = self._streamed
        self.turns = LayerTurns(turning, streamed.backend, streamed.store) if turning else None
        self.tiles = CopiedTiles(streamed) if self._has_tiles and not turning else None
        in_slots = self._in_slots()
        memo: dict[int, Any] = {}
        for tensor in _tensors(model):
            there = in_slots[id(tensor)] if id(tensor) in in_slots else self._there(tensor)
            memo[id(tensor)] = nn.Parameter(there, requires_grad=False) if isinstance(tensor, nn.Parameter) else there
        for module in nn.Module.modules(model):
            memo |= {id(shared): shared for name in _SHARED if (shared := getattr(module, name, None)) is not None}
            memo |= {id(hook): hook for hook in hooks_of(module)}  # a copy runs no backward, and shares the others
        self._modules = list(nn.Module.modules(model))
        made = object.__new__(original)
        memo[id(model)] = made
        own = {key: value for key, value in vars(model).items()
               if key != "megacompile" and not (key == "forward" and hasattr(value, "streams"))}
        made.__dict__ = copy.deepcopy(own, memo)
        if self.turns is not None:
            self.turns.attach(made)
        self._finish_copies()
        return made

    @property
    def _has_tiles(self) -> bool:
        """True if trained tiles can have slots of their own: there are some, and each has whole parameters."""
        trained = [layout for layout in self._streamed.tiling.layouts.values() if layout.trainable]
        return bool(trained) and not any(layout.home for layout in trained)

    def _in_slots(self) -> dict[int, Tensor]:
        """For the streamed model's parameters whose copies are in slots, by their `id`: that part of the slot."""
        slots = self.turns or self.tiles
        return {} if slots is None else slots.views(self._streamed.model)

    def _load(self, tiles: CopiedTiles, native: nn.Module, early: bool) -> None:
        """Copies trained tiles. If `early`, the first forward waits for them, unless hooks might read weights before that."""
        self._version = -1  # until it is done
        tiles.load()
        if early and not any(hook for module in native.modules() for hook in hooks_of(module)):
            tiles.attach(native)
        else:
            tiles.reach()
            self._finish_copies()

    def _there(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._device, non_blocking=True, copy=True)

    def _written(self, native: nn.Module) -> bool:
        """True if the user has written to the copy since it was last current."""
        in_slots = {} if self.turns is None else self.turns.views(self._streamed.model)
        versions = zip(_tensors(self._streamed.model), _tensors(native), self._native_versions, strict=True)
        return any(theirs._version != then for ours, theirs, then in versions if id(ours) not in in_slots)

    def _copy_changed(self, native: nn.Module) -> None:
        """Copies what may have changed since the last use: trained parameters, and what was written from outside."""
        model, parameters = self._streamed.model, self._streamed.parameters
        # Not those that require a gradient now: PEFT freezes adapters while they are off.
        updated = {id(parameters[name]) for name in self._streamed.tiling.trained}
        pairs = zip(_tensors(model), _tensors(native), self._versions, self._native_versions, strict=True)
        in_slots = self._in_slots()
        for ours, theirs, version, native_version in pairs:
            if id(ours) not in in_slots and (id(ours) in updated or ours._version != version
                                             or theirs._version != native_version):
                theirs.copy_(ours, non_blocking=True)
        self._finish_copies()

    def _finish_copies(self) -> None:
        """Waits for the copies. The next step writes the host memory that they read."""
        self._streamed.backend.synchronize()

    def _refresh(self, native: nn.Module) -> None:
        """Gives the copy the current plain attributes and hooks of the model's modules."""
        modules = list(zip(self._modules, native.modules(), strict=True))
        for ours, theirs in modules:
            for name, value in vars(ours).items():
                if name in _SHARED or _is_plain(value):
                    vars(theirs)[name] = value if name in _SHARED else copy.copy(value)
        self._hooks.refresh(modules)
        if self.turns is not None and (config := vars(native).get("generation_config")) is not None:
            # transformers compiles generation with a static cache; here copies are issued between layers.
            vars(native)["generation_config"] = copy.copy(config)
            vars(native)["generation_config"].disable_compile = True


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, list | tuple) and all(isinstance(each, _PLAIN) for each in value))


def _tensors(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers, each once."""
    return [*(p for _, p in nn.Module.named_parameters(model)), *(b for _, b in nn.Module.named_buffers(model))]
