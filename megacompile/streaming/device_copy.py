"""A plain model with the weights of a streamed one on the device, for generation and other inference.

It takes the memory that training leaves: slots give way while it lives and are made again afterwards. It is kept between uses,
and only weights that have changed are copied again, as long as the streamed model does not need its memory. On a CPU its
weights are the tiles' own memory, so that it takes none.
"""
from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megacompile.errors import InsufficientMemoryError, MegacompileError
from megacompile.planning.planner import Planner
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.memory.arena import Arena
from megacompile.sizes import format_bytes
from megacompile.streaming.open_forward import OpenForwards
from megacompile.streaming.programs.shapes import Shapes
from megacompile.streaming.residency import Residency
from megacompile.streaming.section_runner import SectionRunner
from megacompile.streaming.step_state import StepState
from megacompile.streaming.together import Together

#: Values of these types in a module are read anew for each use: flags of adapters, `training`, counters.
_PLAIN = (bool, int, float, str, type(None))
#: Objects that the copy shares with the streamed model, by the name of the attribute.
_SHARED = ("config", "generation_config")


class Owner(Protocol):
    """A streamed model, as far as its copy knows it."""

    model: nn.Module
    backend: Backend
    arena: Arena
    runner: SectionRunner
    residency: Residency
    shapes: Shapes
    step: StepState
    forwards: OpenForwards
    together: Together

    @property
    def turn(self) -> AbstractContextManager[object]: ...

    @property
    def planner(self) -> Planner: ...

    def settle(self) -> None: ...

    def adopt_writes(self) -> None: ...

    def evict(self) -> None: ...


class DeviceCopy:
    """State: the `native` model, None where there is none, with the versions of weights and of all tensors when it was current;
    and how many uses are open, during which the streamed model does not run."""

    def __init__(self, streamed: Owner) -> None:
        self._streamed = streamed
        self.native: nn.Module | None = None
        self._version, self._versions, self._open = -1, [0], 0

    @contextmanager
    def use(self, original: type[nn.Module], more_bytes: int = 0) -> Iterator[nn.Module]:
        """The model, of its `original` class, with current weights. `more_bytes`: of device memory that its use takes. Raises
        `InsufficientMemoryError` if it does not fit, and `TornError` if the weights are not all of one step."""
        streamed = self._streamed
        with streamed.turn:
            streamed.settle()
            streamed.step.check_whole()
            streamed.adopt_writes()
            if self.native is None:
                self._make_room(more_bytes)
                self.native = self._made(original)
            elif self._version != streamed.step.version:
                self._copy_changed(self.native)
            self._version, self._versions = streamed.step.version, [tensor._version for tensor in _tensors(streamed.model)]
            self._refresh(self.native)
            self._open += 1
        try:
            yield self.native
        finally:
            self._open -= 1

    def give_way(self, needed: int) -> None:
        """Before the streamed model runs, which takes `needed` bytes of device memory: frees the copy unless both fit the
        budget. Raises `MegacompileError` while a use is open."""
        if self._open:
            raise MegacompileError("the model's weights are on the device for inference, and streaming needs the memory: leave "
                                   "the block `with model.megacompile.on_device()` first")
        if self.native is not None and not self.fits(needed):
            self.release()

    def release(self) -> None:
        self.native = None

    # ---------------------------------------------------------------- memory
    @property
    def _device(self) -> torch.device:
        return self._streamed.backend.device

    @property
    def _takes_memory(self) -> bool:
        return self._device.type != "cpu"

    @property
    def bytes(self) -> int:
        """Bytes of device memory that it takes."""
        return sum(tensor.nbytes for tensor in _tensors(self._streamed.model)) if self._takes_memory else 0

    def fits(self, more_bytes: int = 0) -> bool:
        """Whether it fits the budget, with `more_bytes` for what its use takes."""
        planner = self._streamed.planner
        return not self._takes_memory or self.bytes + more_bytes + planner.margin_bytes <= planner.device_bytes

    def _make_room(self, more_bytes: int) -> None:
        """Frees slots if the budget does not hold both, but not those that an open forward's backward reads. With several
        ranks, state that is newer on the devices stays there: all ranks copy it back together, and one of them may generate
        alone."""
        streamed = self._streamed
        if not self._takes_memory:
            return
        if not self.fits(more_bytes):
            raise InsufficientMemoryError(
                f"the weights take {format_bytes(self.bytes)} of device memory, their use {format_bytes(more_bytes)}, and "
                f"{format_bytes(streamed.planner.margin_bytes)} stay free, of {format_bytes(streamed.planner.device_bytes)}: "
                "give a larger device_memory, or call the streamed model, which needs a few layers at a time")
        if self.fits(more_bytes + max((shape.estimate.total for shape in streamed.shapes.table.values()), default=0)):
            return
        if not streamed.forwards.open() and not (streamed.together.size > 1 and streamed.residency.state_ahead):
            streamed.evict()
            awaited = set(streamed.residency.awaited())
            streamed.runner.forget_slots([slot for slot in streamed.arena.slots
                                          if slot not in awaited and not streamed.arena.is_slab(slot)])
            streamed.backend.trim()

    # ---------------------------------------------------------------- the model
    def _made(self, original: type[nn.Module]) -> nn.Module:
        """A copy of the model's structure, whose parameters and buffers are on the device."""
        model = self._streamed.model
        memo: dict[int, Any] = {}
        for tensor in _tensors(model):
            there = self._there(tensor)
            memo[id(tensor)] = nn.Parameter(there, requires_grad=False) if isinstance(tensor, nn.Parameter) else there
        for module in nn.Module.modules(model):
            memo |= {id(shared): shared for name in _SHARED if (shared := getattr(module, name, None)) is not None}
        made = object.__new__(original)
        memo[id(model)] = made
        own = {key: value for key, value in vars(model).items()
               if key != "megacompile" and not (key == "forward" and hasattr(value, "streams"))}
        made.__dict__ = copy.deepcopy(own, memo)
        self._finish_copies()
        return made

    def _there(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._device, non_blocking=True)

    @torch.no_grad()
    def _copy_changed(self, native: nn.Module) -> None:
        """Copies what may have changed since: trained parameters, and what was written from outside."""
        pairs = zip(_tensors(self._streamed.model), _tensors(native), self._versions, strict=True)
        for ours, theirs, version in pairs:
            if theirs.data_ptr() != ours.data_ptr() and (ours.requires_grad or ours._version != version):
                theirs.copy_(ours, non_blocking=True)
        self._finish_copies()

    def _finish_copies(self) -> None:
        """The next step writes the host's memory that copies read."""
        self._streamed.backend.synchronize()

    def _refresh(self, native: nn.Module) -> None:
        """Gives the copy the plain attributes that the model's modules have now."""
        for ours, theirs in zip(nn.Module.modules(self._streamed.model), native.modules(), strict=True):
            for name, value in vars(ours).items():
                if name in _SHARED or _is_plain(value):
                    vars(theirs)[name] = value if name in _SHARED else copy.copy(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, list | tuple) and all(isinstance(each, _PLAIN) for each in value))


def _tensors(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers, each once."""
    return [*(p for _, p in nn.Module.named_parameters(model)), *(b for _, b in nn.Module.named_buffers(model))]
