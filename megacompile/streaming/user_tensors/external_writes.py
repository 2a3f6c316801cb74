"""Writes from outside: another optimizer, `load_state_dict`, `p.add_()`. Detected by each parameter's version counter.

The remainder of a bf16 parameter is meaningless after such a write. It is set to zero, and the master becomes the written
value. A remainder that was written from outside too belongs to the written weight and stays: `torch.distributed.checkpoint`
loads a state into the tensors that `state_dict` returns.
"""
from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from megacompile.errors import UnsupportedError
from megacompile.frontend.templates.template import Call
from megacompile.runtime.memory.store import Store
from megacompile.runtime.memory.tiles import HostTile
from megacompile.streaming.user_tensors.divided import divided
from megacompile.streaming.user_tensors.gradients import Gradients
from megacompile.weights.tiling import Tiling


class ExternalWrites:
    """State: the last seen version and address of each parameter, and the remainders that users hold, with their last seen
    version."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], tiling: Tiling, store: Store,
                 gradients: Gradients) -> None:
        self.parameters, self.tiling, self.store, self.gradients = parameters, tiling, store, gradients
        self.objects = {name: id(p) for name, p in nn.Module.named_parameters(model)}
        self.seen = {name: self._state(p) for name, p in parameters.items()}
        self.homes = {name: p.data_ptr() for name, p in parameters.items()}
        self.remainders: dict[str, tuple[Tensor, int]] = {}
        self.warned = False

    def remainder(self, name: str) -> Tensor | None:
        """A parameter's remainder in its tile, for the user to read or to load; None if it has none. Our own writes do not
        count as changes."""
        if name not in self.remainders:
            if name not in self.tiling.position:  # no layer reads it
                return None
            tile_name, position = self.tiling.position[name]
            tile = self.store.tiles[tile_name]
            if tile.remainder is None:
                return None
            part = tile.layout.slices[position]
            given = tile.remainder.data[part.start:part.stop].view(part.shape)
            if tile.here is not None:
                divided(given, f"the remainder of {name}")
            self.remainders[name] = given, given._version
        return self.remainders[name][0]

    def _loaded_remainder(self, name: str) -> bool:
        given, version = self.remainders.get(name, (None, 0))
        return given is not None and given._version != version

    @staticmethod
    def _state(parameter: nn.Parameter) -> tuple[int, int]:
        return parameter._version, parameter.data_ptr()

    @contextlib.contextmanager
    def ignoring(self, names: Iterable[str]) -> Iterator[None]:
        """A context in which writes to these parameters are ignored, since they only copy the parameters' own values."""
        parameters = {name: self.parameters[name] for name in names if name in self.parameters}
        unwritten = [name for name, parameter in parameters.items() if self._state(parameter) == self.seen[name]]
        yield
        self.seen |= {name: self._state(self.parameters[name]) for name in unwritten}

    def pending(self) -> bool:
        """True if any parameter was written since it was last seen."""
        return any(self._state(p) != self.seen[name] for name, p in self.parameters.items())

    def adopt(self) -> None:
        """Adopts what was written from outside. Lanes must be idle. Raises `UnsupportedError` for a changed shape or dtype, and
        with several ranks for any write that does not load values."""
        for name, parameter in self.parameters.items():
            if self._state(parameter) == self.seen[name]:
                continue
            if self.store.shared and not self.store.loading:
                raise UnsupportedError(
                    f"{name} was changed outside megacompile.AdamW, but all ranks share its memory: "
                    "update with megacompile.AdamW, and set values with load_state_dict of the whole model on every rank")
            tile_name, position = self.tiling.position[name]
            tile = self.store.tiles[tile_name]
            part = tile.layout.slices[position]
            if parameter.data_ptr() != self.homes[name]:
                if parameter.shape != part.shape or parameter.dtype != tile.layout.dtype:
                    raise UnsupportedError(
                        f"{name} is now {parameter.dtype} of shape {list(parameter.shape)} instead of {tile.layout.dtype} of "
                        f"{list(part.shape)}: close() the model before changing its architecture, then stream() it again")
                home = tile.parameter_view(tile.weights, position)
                if self.store.writes(tile_name):
                    home.copy_(parameter.data)
                parameter.data = home
            if tile.remainder is not None and self.store.writes(tile_name) and not self._loaded_remainder(name):
                tile.remainder[part.start:part.stop] = 0
                self._warn_of_other_optimizer(tile, parameter)
            self.seen[name] = self._state(parameter)
        self.remainders = {name: (given, given._version) for name, (given, _) in self.remainders.items()}

    def _warn_of_other_optimizer(self, tile: HostTile, parameter: nn.Parameter) -> None:
        if self.gradients.made and not tile.has_moments and not self.warned:  # gradients exist, and no megacompile.AdamW does
            self.warned = True
            warnings.warn(f"another optimizer updates the parameters in their own {parameter.dtype}, where small updates are "
                          "lost to rounding: use megacompile.AdamW, which keeps an FP32 master", stacklevel=2)

    def check_model(self, model: nn.Module, differentiating: bool) -> None:
        """Raises `UnsupportedError` if parameters were added, removed or replaced since the capture; and, when
        `differentiating`, if `requires_grad` of any has changed."""
        now = {name: id(p) for name, p in nn.Module.named_parameters(model)}
        if changed := sorted(name for name in now.keys() | self.objects.keys() if now.get(name) != self.objects.get(name)):
            raise UnsupportedError(f"{changed[0]} was added, removed or replaced after stream(): close() the model, change it, "
                                   "and stream() it again")
        for name, parameter in self.parameters.items() if differentiating else ():
            tile, position = self.tiling.position[name]
            if parameter.requires_grad != self.store.tiles[tile].layout.slices[position].trainable:
                raise UnsupportedError(f"requires_grad of {name} was changed after stream(): close() the model, change it, "
                                       "and stream() it again")


class Constants:
    """The buffers that templates read, on the device. State: object and last seen version of each. They are few and small
    (rotary frequencies), so a buffer that was written or replaced is sent again."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.on_device: dict[str, Tensor] = {}
        self.seen: dict[str, tuple[int, int]] = {}

    def add(self, calls: Iterable[Call]) -> None:
        """Sends the buffers that these calls read to the device, and watches them from now on."""
        names = {s.name for call in calls for s in call.sources if s.kind == "buffer"} - self.seen.keys()
        if names:
            self.seen |= dict.fromkeys(names, (0, 0))
            self.refresh()

    def release(self) -> None:
        """Frees the buffers on the device, when the model is closed."""
        self.on_device, self.seen = {}, {}

    def stale(self) -> bool:
        """True if any buffer was written or replaced since it was sent."""
        buffers = dict(self.model.named_buffers()) if self.seen else {}
        return any(n not in buffers or (id(buffers[n]), buffers[n]._version) != seen for n, seen in self.seen.items())

    def refresh(self) -> None:
        """Sends the buffers that have changed. Lanes must be idle. Raises `UnsupportedError` for another shape or dtype."""
        buffers = dict(self.model.named_buffers()) if self.seen else {}
        for name, seen in self.seen.items():
            buffer = buffers.get(name)
            if buffer is not None and (id(buffer), buffer._version) == seen:
                continue
            known = self.on_device.get(name)
            if buffer is None or (known is not None and (known.shape, known.dtype) != (buffer.shape, buffer.dtype)):
                raise UnsupportedError(f"buffer {name} was removed or has another shape or dtype since stream(): close() the "
                                       "model, change it, and stream() it again")
            self.on_device[name] = buffer.detach().to(self.device, copy=True)
            self.seen[name] = id(buffer), buffer._version
