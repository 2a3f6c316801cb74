"""Layers whose weights take turns in two slots on the device, for inference with a model that does not fit.

    slot 0    layer 4    layer 6    layer 8
    slot 1       layer 5    layer 7    layer 9

A layer's parameters are views of its slot, so the model itself does not change. A hook before a layer issues the copy of the
layer that comes next and waits for the layer's own weights; a hook after it says that its slot may be written. Weights cross
the link once for each call of the model, whatever the number of sequences, and while other layers compute.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.runtime.memory.tiles import HostTile

#: Bytes. Each piece begins at a multiple of this in its slot, as kernels expect of weights.
_ALIGNMENT = 256


@dataclass(frozen=True)
class Piece:
    """Host memory, uint8 [n], and the byte of a slot where it begins there. `parameters`: for each parameter in it by name,
    its first byte in the piece."""

    host: Tensor
    start: int
    parameters: Mapping[str, int]


@dataclass(frozen=True)
class LayerWeights:
    """A layer by its name in the model. Its weights are copied in `pieces`, which are whole tiles where possible."""

    name: str
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        last = self.pieces[-1]
        return last.start + last.host.numel()

    @property
    def offsets(self) -> dict[str, int]:
        """The first byte in the slot of each parameter by name."""
        return {name: piece.start + start for piece in self.pieces for name, start in piece.parameters.items()}


def layer_weights(model: nn.Module, names: Sequence[str], tiles: Iterable[HostTile]) -> list[LayerWeights]:
    """The weights of layers, given by name, that no other part of the model has."""
    of = {name: {f"{name}.{own}": p for own, p in nn.Module.named_parameters(nn.Module.get_submodule(model, name))}
          for name in names}
    holders: dict[int, set[str]] = {}
    for full, p in nn.Module.named_parameters(model, remove_duplicate=False):
        holders.setdefault(id(p), set()).add(next((name for name in names if full.startswith(f"{name}.")), ""))
    tiles = list(tiles)
    found = []
    for name, parameters in of.items():
        own = {full: p for full, p in parameters.items() if holders[id(p)] == {name} and p.is_contiguous()}
        if own:
            found.append(LayerWeights(name, tuple(_pieces(own, tiles))))
    return found


def _pieces(parameters: Mapping[str, nn.Parameter], tiles: Iterable[HostTile]) -> Iterator[Piece]:
    """Tiles that hold nothing else, then the parameters that are left."""
    left, start = dict(parameters), 0
    for tile in tiles:
        layout = tile.layout
        if all(s.name in left for s in layout.slices):
            starts = {s.name: s.start * layout.dtype.itemsize for s in layout.slices}
            yield Piece(tile.weights, start, starts)
            start += -(-tile.weights.numel() // _ALIGNMENT) * _ALIGNMENT
            left = {name: p for name, p in left.items() if name not in starts}
    for name, p in left.items():
        yield Piece(p.detach().view(-1).view(torch.uint8), start, {name: 0})
        start += -(-p.nbytes // _ALIGNMENT) * _ALIGNMENT


def resident_layers(layers: Sequence[LayerWeights], budget_bytes: int) -> list[LayerWeights]:
    """As many layers as `budget_bytes` hold beside the slots of the others, evenly spread, so that copies of the others have
    time. `budget_bytes` hold at least the slots."""
    largest = max(layer.bytes for layer in layers)
    count = min((budget_bytes - slot_bytes(layers)) // largest, len(layers) - 1)
    return [layers[number * len(layers) // count] for number in range(count)]


def slot_bytes(layers: Sequence[LayerWeights]) -> int:
    """Bytes of the slots for these layers."""
    return min(2, len(layers)) * max((layer.bytes for layer in layers), default=0)


class _Slot:
    """State: which layer's weights it `holds`, by position, and on a GPU when they are `copied` and when they were `used`."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.holds = memory, -1
        self.copied: Any = None
        self.used: Any = None


class LayerSlots:
    """The slots for `layers`, in the order in which the model runs them. State: what the slots hold, and how many bytes were
    copied."""

    def __init__(self, layers: Sequence[LayerWeights], device: torch.device) -> None:
        self.layers = layers
        size = max(layer.bytes for layer in layers)
        self._slots = [_Slot(torch.empty(size, dtype=torch.uint8, device=device)) for _ in layers[:2]]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.copied_bytes = 0

    def views(self, model: nn.Module) -> dict[int, Tensor]:
        """For the parameters of `model` that are in slots, by their `id`: the part of the slot, like the parameter."""
        parameters, found = dict(nn.Module.named_parameters(model, remove_duplicate=False)), {}
        for position, layer in enumerate(self.layers):
            for name, start in layer.offsets.items():
                p = parameters[name]
                found[id(p)] = self._slot(position).memory[start:start + p.nbytes].view(p.dtype).view(p.shape)
        return found

    def attach(self, model: nn.Module) -> None:
        """Has the layers of a model, whose parameters are the slots' views, wait for their weights."""
        for position, layer in enumerate(self.layers):
            module = model.get_submodule(layer.name)
            module.register_forward_pre_hook(_calls(self._enter, position), prepend=True)
            module.register_forward_hook(_calls(self._leave, position), always_call=True)

    def forget(self) -> None:
        """The host's weights have changed, so that all are copied again."""
        for slot in self._slots:
            slot.holds = -1

    def finish(self) -> None:
        """Waits until no copy reads the host's memory."""
        if self._stream is not None:
            self._stream.synchronize()

    def _slot(self, position: int) -> _Slot:
        return self._slots[position % len(self._slots)]

    def _enter(self, position: int) -> None:
        slot, following = self._slot(position), (position + 1) % len(self.layers)
        self.fetch(position)
        if self._slot(following) is not slot:
            self.fetch(following)
        if slot.copied is not None:
            # The host waits, not the device's queue: transformers' offloaded cache copies keys and values on a stream of its
            # own, which is right only if the device is at most a little behind the host.
            slot.copied.synchronize()

    def _leave(self, position: int) -> None:
        slot, following = self._slot(position), (position + 1) % len(self.layers)
        if self._stream is not None:
            slot.used = torch.cuda.current_stream(slot.memory.device).record_event()
        if self._slot(following) is slot:  # the first of an odd number of layers comes after the last
            self.fetch(following)

    @torch.no_grad()
    def fetch(self, position: int) -> None:
        """Issues the copy of a layer's weights to its slot, unless they are there."""
        slot = self._slot(position)
        if slot.holds == position:
            return
        slot.holds = -1  # Ctrl-C or an error may come before all of it is copied
        if self._stream is None:
            self._copy_pieces(position, slot)
        else:
            if slot.used is not None:
                self._stream.wait_event(slot.used)
            with torch.cuda.stream(self._stream):
                self._copy_pieces(position, slot)
            slot.copied = self._stream.record_event()
        slot.holds = position

    def _copy_pieces(self, position: int, slot: _Slot) -> None:
        for piece in self.layers[position].pieces:
            slot.memory[piece.start:piece.start + piece.host.numel()].copy_(piece.host, non_blocking=True)
            self.copied_bytes += piece.host.numel()


def _calls(act: Callable[[int], None], position: int) -> Callable[..., None]:
    """A hook that compiled code calls as it is."""

    @torch.compiler.disable
    def hook(*_: Any) -> None:
        act(position)

    return hook
