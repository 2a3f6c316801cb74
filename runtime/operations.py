"""The meaning of each op: one small function, called by the reference interpreter and by the lanes.

State is in `Frame`, one run of one section: the values made so far, and the section's inputs. An op reads values by node, and
returns its own value or None.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.ir.program import Kept, Lane, argument, op_of, operands
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.kernels import Activation, Batch, Kernel, bind
from megacompile.runtime.kernels import accumulate as accumulate_gradients
from megacompile.runtime.memory.arena import Accumulators, Arena, Gradients, State, Weights
from megacompile.runtime.memory.checkpoints import HostCheckpoint, as_bytes, as_tensor, dense, described
from megacompile.runtime.memory.store import Store
from megacompile.runtime.memory.tile_part import TilePart, in_slot
from megacompile.runtime.memory.tiles import HostTile
from megacompile.runtime.optimizer import adam as host
from megacompile.runtime.update import Update
from megacompile.runtime.visiting import visit


@dataclass
class Frame:
    """One run of one section."""

    backend: Backend
    store: Store
    arena: Arena
    kernels: Mapping[tuple[str, str, int], Kernel]  # (call, op, micro-batch)
    batch: Batch
    lease: dict[Kept, Any] = field(default_factory=dict)
    host: Mapping[str, HostCheckpoint] = field(default_factory=dict)  # by slot
    update: Update | None = None
    values: dict[fx.Node, Any] = field(default_factory=dict)

    def memory(self, slot: str) -> Tensor:
        return self.host[slot].memory if slot in self.host else self.arena.slots[slot]

    def read(self, node: fx.Node, name: str) -> Any:
        """The value of a parameter, or a tuple of values if the program has a tuple."""
        what = argument(node, name)
        if isinstance(what, tuple | list):
            return tuple(self.values[n] for n in what)
        return None if what is None else self.values[what]


def _pack(frame: Frame, node: fx.Node) -> Tensor:
    tile = frame.store[argument(node, "tile")]
    slab = frame.arena.slots[argument(node, "into")][:tile.layout.weight_bytes]
    for here, there in tile.weights_with(slab):
        host.copy(here, there)
    return slab


def _prefetch(frame: Frame, node: fx.Node) -> Weights:
    tile = frame.store[argument(node, "tile")]
    weights = frame.arena.weights(argument(node, "into"), tile.layout)
    staging = frame.read(node, "staging")
    for here, there in tile.weights_with(weights.memory) if staging is None else ((weights.memory, staging),):
        frame.backend.copy(here, there, Lane.H2D)
    return weights


def _resident(frame: Frame, node: fx.Node) -> Weights:
    return frame.arena.weights(argument(node, "into"), frame.store[argument(node, "tile")].layout)


def _resident_state(frame: Frame, node: fx.Node) -> State:
    return frame.arena.state(argument(node, "into"), frame.store[argument(node, "tile")].layout)


def _resident_gradients(frame: Frame, node: fx.Node) -> Gradients:
    return frame.arena.gradients(argument(node, "into"), frame.store[argument(node, "tile")].layout)


def _run(frame: Frame, node: fx.Node, *more: Any) -> tuple[Kernel, tuple[Any, ...]]:
    kernel = frame.kernels[argument(node, "call"), op_of(node).name, argument(node, "mb")]
    values = bind(kernel, frame.batch, argument(node, "mb"), frame.read(node, "weights") or (), frame.read(node, "inputs"))
    return kernel, tuple(kernel.run(*values, *more))


def _forward(frame: Frame, node: fx.Node) -> Activation:
    kernel, results = _run(frame, node)
    outputs = results[:kernel.outputs]
    if any(op_of(user).name == "stash" for user in node.users):
        outputs = tuple(map(dense, outputs))  # here, in compute: a copying lane runs no kernels
    return Activation(outputs, results[kernel.outputs:])


def _loss(frame: Frame, node: fx.Node) -> Activation:
    kernel, results = _run(frame, node)
    accumulate_gradients(kernel, results, frame.read(node, "accumulators") or ())
    return Activation(tuple(results[i] for i in kernel.carried_gradients), loss=results[0])


def _backward(frame: Frame, node: fx.Node) -> Activation:
    saved = frame.read(node, "saved") if "saved" in node.kwargs else None
    tangents = frame.read(node, "gradient").outputs
    kernel, results = _run(frame, node, *(saved.residuals if saved is not None else ()), *tangents)
    accumulate_gradients(kernel, results, frame.read(node, "accumulators") or ())
    return Activation(tuple(results[i] for i in kernel.carried_gradients))


def _output_gradient(frame: Frame, node: fx.Node) -> Activation:
    return Activation(frame.batch.output_gradients[argument(node, "mb")])


def _zeros(frame: Frame, node: fx.Node) -> Accumulators:
    return frame.arena.accumulators(frame.store[argument(node, "tile")].layout)


def _scale(frame: Frame, node: fx.Node) -> None:
    value, scale = frame.read(node, "value"), frame.batch.scale
    assert scale is not None, "a backward without the gradient of its loss"
    for tensor in value.outputs if isinstance(value, Activation) else (value.flat,):
        tensor.mul_(scale)


def _reduce(frame: Frame, node: fx.Node) -> Gradients:
    layout = frame.store[argument(node, "tile")].layout
    gradients = frame.arena.gradients(argument(node, "into"), layout)
    gradients.flat.copy_(frame.read(node, "accumulators").flat)
    # Norms of the rounded gradient, since that is what is stored and clipped.
    frame.backend.norms(gradients.views, gradients.norms)
    return gradients


def _offload(frame: Frame, node: fx.Node) -> Gradients | None:
    tile = frame.store[argument(node, "tile")]
    source = frame.read(node, "reduced")
    if argument(node, "into") is None:
        for here, there in tile.gradients_with(source.memory):
            frame.backend.copy(there, here, Lane.D2H)
        return None
    slab = frame.arena.gradients(argument(node, "into"), tile.layout)
    frame.backend.copy(slab.memory, source.memory, Lane.D2H)
    return slab


def _offload_norms(frame: Frame, node: fx.Node) -> None:
    tile, source = frame.store[argument(node, "tile")], frame.read(node, "reduced")
    assert tile.norm_bytes is not None, f"{tile.layout.name} has nothing to train"
    frame.backend.copy(tile.norm_bytes, source.memory[tile.layout.weight_bytes:tile.layout.gradient_bytes], Lane.D2H)


def _offload_weights(frame: Frame, node: fx.Node) -> None:
    frame.store.preserve(argument(node, "tile"))
    for here, there in frame.store[argument(node, "tile")].weights_with(frame.read(node, "resident").memory):
        frame.backend.copy(there, here, Lane.CPU)


def _fetch_gradients(frame: Frame, node: fx.Node) -> Gradients:
    gradients = _resident_gradients(frame, node)
    for here, there in frame.store[argument(node, "tile")].gradients_with(gradients.memory):
        frame.backend.copy(here, there, Lane.CPU)
    return gradients


def _accumulate(frame: Frame, node: fx.Node) -> None:
    tile = frame.store[argument(node, "tile")]
    slab: Gradients = frame.read(node, "slab")
    if argument(node, "overwrite"):
        for here, there in tile.gradients_with(slab.memory):
            host.copy(there, here)
        return
    flat, norms = _gradients(tile), _norm_values(tile)
    for position, s in enumerate(tile.layout.slices):
        there = flat[tile.layout.at_home(position)]
        host.accumulate(there, slab.flat[s.start:s.stop], overwrite=False)
        norms[position] = host.norm(there)


def _gradients(tile: HostTile | TilePart) -> Tensor:
    """The elements of the host tile's gradients."""
    assert tile.home.gradients is not None, f"{tile.layout.name} has nothing to train"
    return tile.home.layout.flat(tile.home.gradients)


def _norm_values(tile: HostTile | TilePart) -> Tensor:
    """The norms of a tile's gradients, FP32 [parameters]."""
    assert tile.norm_bytes is not None, f"{tile.layout.name} has nothing to train"
    return tile.norm_bytes.view(torch.float32)


def _sums(tile: HostTile | TilePart) -> Tensor:
    """The host tile's sums of gradients, FP32 [elements]."""
    assert tile.home.sums is not None, f"{tile.layout.name} has no sum"
    return tile.home.sums


def _clip(frame: Frame, node: fx.Node) -> float:
    """The clipping factor of `torch.nn.utils.clip_grad_norm_`: max_norm / (norm + 1e-6), at most 1."""
    update = frame.update
    assert update is not None, "an update without an optimizer"
    if update.norm is None:  # else a failed step is being completed, and gradients of finished tiles may be gone
        update.judge({name: _norms(frame, update, name) for name in argument(node, "tiles")})
    assert update.norm is not None
    return 1.0 if update.max_grad_norm is None else min(1.0, update.max_grad_norm / (update.norm + 1e-6))


def _norms(frame: Frame, update: Update, name: str, memory: Tensor | None = None) -> dict[str, float]:
    """Norms of the gradients that count, by parameter: those of the host tile, or those in `memory`, a slab."""
    tile = frame.store[name]
    norms = (_norm_values(tile) if memory is None else tile.layout.norms(memory)).tolist()
    return {tile.layout.slices[position].name: norms[position] for position in update.counted.get(name, ())}


def _add_to_sum(frame: Frame, node: fx.Node) -> None:
    tile, slab = frame.store[argument(node, "tile")], frame.read(node, "slab")
    sums, source = _sums(tile), None if slab is None else slab.flat
    if frame.update is not None and frame.update.on_arrival:  # before the global norm is known, and a sum has no norms
        frame.update.judge_tile(tile.layout.name, _norms(frame, frame.update, tile.layout.name, slab and slab.memory))
    for here, there in tile.runs:
        host.accumulate(sums[there], _gradients(tile)[there] if source is None else source[here], argument(node, "overwrite"))


def _norms_of_sum(frame: Frame, node: fx.Node) -> None:
    tile = frame.store[argument(node, "tile")]
    norms = _norm_values(tile)
    for position in range(len(tile.layout.slices)):
        norms[position] = host.norm(_sums(tile)[tile.layout.at_home(position)])


def _adam(frame: Frame, node: fx.Node) -> None:
    tile = frame.store[argument(node, "tile")]
    _update(frame, node, tile, _gradients(tile))


def _adam_weights(frame: Frame, node: fx.Node) -> None:
    tile = frame.store[argument(node, "tile")]
    if argument(node, "tile") not in _updating(frame).halfway:
        _update(frame, node, tile, _gradients(tile), host.Part.WEIGHTS)


def _adam_moments(frame: Frame, node: fx.Node) -> None:
    tile = frame.store[argument(node, "tile")]
    _update(frame, node, tile, _gradients(tile), host.Part.MOMENTS)


def _adam_of_sum(frame: Frame, node: fx.Node) -> None:
    tile = frame.store[argument(node, "tile")]
    _update(frame, node, tile, _sums(tile))


def _update(frame: Frame, node: fx.Node, tile: HostTile | TilePart, gradients: Tensor,
            part: host.Part = host.Part.WHOLE) -> None:
    """Updates a tile on the host. `gradients`: [elements] of the host tile, in the weights' dtype or FP32."""
    update, home = _updating(frame), tile.home
    if update.on_arrival and gradients is not home.sums and tile.layout.name in update.segments:
        update.judge_tile(tile.layout.name, _norms(frame, update, tile.layout.name))
    if segments := update.pending(tile.layout.name):
        assert home.m is not None and home.v is not None, "the optimizer made no state"
        frame.store.preserve(tile.layout.name)
        host.adamw(home.layout.flat(home.weights), home.remainder, gradients, home.m, home.v, segments,
                   _gradient_scale(frame, node), part=part)
        if part == host.Part.WEIGHTS:
            update.halfway.add(tile.layout.name)
        else:
            _updated(update, tile)


def _adam_resident(frame: Frame, node: fx.Node) -> None:
    update, tile = _updating(frame), frame.store[argument(node, "tile")]
    if segments := update.pending(tile.layout.name):
        weights, state, gradients = (frame.read(node, name) for name in ("resident", "state", "reduced"))
        # On arrival the device itself checks the norms: otherwise the host would wait for the device in every layer.
        judged = (gradients.norms, frame.arena.verdict(tile.layout.name, update)) if update.on_arrival else None
        frame.backend.adamw(tile.layout.flat(weights.memory), state.remainder, gradients.flat, state.m, state.v,
                            in_slot(segments, tile.layout), _gradient_scale(frame, node), judged)
        _updated(update, tile)


def _adam_visiting(frame: Frame, node: fx.Node) -> None:
    update, tile = _updating(frame), frame.store[argument(node, "tile")]
    if segments := update.pending(tile.layout.name):
        frame.store.preserve(tile.layout.name)
        visit(frame.backend, frame.memory(argument(node, "into")), tile, segments, _gradient_scale(frame, node))
        _updated(update, tile)


def _updating(frame: Frame) -> Update:
    assert frame.update is not None, "an update without an optimizer"
    return frame.update


def _gradient_scale(frame: Frame, node: fx.Node) -> float:
    """The clipping factor; 1 without a clip."""
    return frame.read(node, "clip") if "clip" in node.kwargs else 1.0


def _updated(update: Update, tile: HostTile | TilePart) -> None:
    tile.home.moments_written = True
    update.finish(tile.layout.name)


def _fetch_state(frame: Frame, node: fx.Node) -> State:
    tile, state = frame.store[argument(node, "tile")], _resident_state(frame, node)
    for there, here in zip(state.parts, _state(tile), strict=True):
        if there is not None and here is not None:
            for in_it, at_home in tile.runs:
                there[in_it].copy_(here[at_home])
        elif there is not None:  # no optimizer has allocated moments yet
            there.zero_()
    return state


def _store_state(frame: Frame, node: fx.Node) -> None:
    frame.store.preserve(argument(node, "tile"))
    tile, state = frame.store[argument(node, "tile")], frame.read(node, "state")
    for there, here in zip(state.parts, _state(tile), strict=True):
        if there is not None and here is not None:
            for in_it, at_home in tile.runs:
                here[at_home].copy_(there[in_it])


def _state(tile: HostTile | TilePart) -> tuple[Tensor | None, ...]:
    """The host tile's optimizer state, in the order of `State.parts`."""
    return tile.home.m, tile.home.v, tile.home.remainder


def _result(frame: Frame, node: fx.Node) -> None:
    """Adds values to the caller's results under a key. A loss is added without its gradients."""
    found = frame.batch.results.setdefault(argument(node, "key"), [])
    found += [value if value.loss is None else Activation((), loss=value.loss) for value in frame.read(node, "values")]


def _lease(frame: Frame, node: fx.Node) -> None:
    (value,) = operands(node, "value")
    frame.lease[Kept.of(value)] = frame.values[value]


def _leased(frame: Frame, node: fx.Node) -> Any:
    return frame.lease.pop(Kept.of(node))


def _stash(frame: Frame, node: fx.Node) -> HostCheckpoint:
    tensors, buffer = frame.read(node, "value").outputs, frame.host[argument(node, "into")]
    buffer.parts = described(tensors)
    for tensor, (_, where) in zip(tensors, buffer.pieces(), strict=True):
        frame.backend.copy(buffer.memory[where], as_bytes(tensor), Lane.D2H)
    return buffer


def _stashed(frame: Frame, node: fx.Node) -> HostCheckpoint:
    """The checkpoint's buffer. `stash` may not have filled it yet; `fetch` waits for that."""
    return frame.host[argument(node, "into")]


def _fetch(frame: Frame, node: fx.Node) -> Activation:
    slot, buffer = frame.arena.slots[argument(node, "into")], frame.read(node, "stashed")
    outputs = []
    for part, where in buffer.pieces():
        frame.backend.copy(slot[where], buffer.memory[where], Lane.H2D)
        outputs.append(as_tensor(slot[where], part))
    return Activation(tuple(outputs))


def _release(frame: Frame, node: fx.Node) -> None:
    """Drops the value: its own memory goes back to the allocator."""
    frame.values.pop(operands(node, "value")[0], None)


OPERATIONS: dict[str, Callable[[Frame, fx.Node], Any]] = dict(
    pack=_pack, prefetch=_prefetch, resident=_resident, forward=_forward, forward_saving=_forward, evaluate=_forward,
    outputs=_forward, output_gradient=_output_gradient,
    loss=_loss, recompute_backward=_backward, backward=_backward, zeros=_zeros, scale=_scale,
    reduce=_reduce, offload=_offload, accumulate=_accumulate, clip=_clip, adam=_adam, result=_result, lease=_lease,
    add_to_sum=_add_to_sum, norms_of_sum=_norms_of_sum, adam_of_sum=_adam_of_sum,
    adam_weights=_adam_weights, adam_moments=_adam_moments,
    leased=_leased, release=_release, stash=_stash, stashed=_stashed, fetch=_fetch,
    resident_state=_resident_state, resident_gradients=_resident_gradients,
    offload_norms=_offload_norms, offload_weights=_offload_weights, fetch_gradients=_fetch_gradients,
    fetch_state=_fetch_state, store_state=_store_state, adam_resident=_adam_resident, adam_visiting=_adam_visiting)
