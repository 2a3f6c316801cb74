"""The meaning of each op: one small function, called by the reference interpreter and by the lanes.

State is in `Frame`, one run of one section: the values made so far, and the section's inputs. An op reads values by node, and
returns its own value or None. Here: copies, templates and values; updates and collectives have files of their own.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from megacompile.ir.program import Kept, Lane, argument, op_of, operands
from megacompile.ir.target_tokens import target_tokens
from megacompile.runtime.collective_operations import COLLECTIVE_OPERATIONS
from megacompile.runtime.frame import Frame, own_bytes
from megacompile.runtime.kernels import Activation, Kernel, bind
from megacompile.runtime.kernels import accumulate as accumulate_gradients
from megacompile.runtime.memory.activation_checkpoints import HostCheckpoint, as_bytes, as_tensor, dense, described
from megacompile.runtime.memory.arena import Accumulators, Gradients, State, Weights
from megacompile.runtime.memory.shards import Share
from megacompile.runtime.optimizer import host_kernels as host
from megacompile.runtime.update_operations import UPDATE_OPERATIONS


def _pack(frame: Frame, node: fx.Node) -> Tensor:
    return _packed(frame, node, frame.store.whole(argument(node, "tile")))


def _pack_shard(frame: Frame, node: fx.Node) -> Tensor:
    return _packed(frame, node, frame.store[argument(node, "tile")])


def _packed(frame: Frame, node: fx.Node, tile: Share) -> Tensor:
    slab = frame.arena.slots[argument(node, "into")][:tile.layout.weight_bytes]
    for here, there in tile.weights_with(slab):
        host.copy(here, there)
    return slab


def _prefetch(frame: Frame, node: fx.Node) -> Weights:
    return _fetched(frame, node, frame.store.whole(argument(node, "tile")))


def _prefetch_shard(frame: Frame, node: fx.Node) -> Weights:
    return _fetched(frame, node, frame.store[argument(node, "tile")])


def _fetched(frame: Frame, node: fx.Node, tile: Share) -> Weights:
    weights = frame.arena.weights(argument(node, "into"), tile.layout)
    staging = frame.read(node, "staging")
    for here, there in tile.weights_with(weights.memory) if staging is None else ((weights.memory, staging),):
        frame.backend.copy(here, there, Lane.H2D)
    return weights


def _resident(frame: Frame, node: fx.Node) -> Weights:
    return frame.arena.weights(argument(node, "into"), frame.store.whole(argument(node, "tile")).layout)


def _resident_state(frame: Frame, node: fx.Node) -> State:
    return frame.arena.state(argument(node, "into"), frame.store[argument(node, "tile")].layout)


def _resident_gradients(frame: Frame, node: fx.Node) -> Gradients:
    return frame.arena.gradients(argument(node, "into"), frame.store[argument(node, "tile")].layout)


def _run(frame: Frame, node: fx.Node, *more: Any) -> tuple[Kernel, tuple[Any, ...]]:
    kernel = frame.kernels[argument(node, "call"), op_of(node).name, argument(node, "mb")]
    mb, targets = argument(node, "mb"), frame.batch.target_tokens
    values = bind(kernel, frame.batch, mb, frame.read(node, "weights") or (), frame.read(node, "inputs"))
    with target_tokens(targets[mb] if targets else None):
        return kernel, tuple(kernel.run(*values, *more))


def _forward(frame: Frame, node: fx.Node) -> Activation:
    kernel, results = _run(frame, node)
    outputs = results[:kernel.outputs]
    if any(op_of(user).name == "stash" for user in node.users):
        outputs = tuple(map(dense, outputs))  # here, in compute: a copying lane runs no kernels
    return Activation(outputs, [*results[kernel.outputs:]])


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
    return frame.arena.accumulators(frame.store.whole(argument(node, "tile")).layout)


def _scale(frame: Frame, node: fx.Node) -> None:
    value, scale = frame.read(node, "value"), frame.batch.scale
    assert scale is not None, "a backward without the gradient of its loss"
    for tensor in value.outputs if isinstance(value, Activation) else (value.flat,):
        tensor.mul_(scale)


def _reduce(frame: Frame, node: fx.Node) -> Gradients:
    tile = frame.store[argument(node, "tile")]
    gradients = frame.arena.gradients(argument(node, "into"), tile.layout)
    gradients.flat.copy_(frame.read(node, "accumulators").flat[tile.held])
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
    tile = frame.store[argument(node, "tile")]
    for here, there in tile.weights_with(own_bytes(tile, frame.read(node, "resident").memory)):
        frame.backend.copy(there, here, Lane.CPU)


def _fetch_gradients(frame: Frame, node: fx.Node) -> Gradients:
    gradients = _resident_gradients(frame, node)
    for here, there in frame.store[argument(node, "tile")].gradients_with(gradients.memory):
        frame.backend.copy(here, there, Lane.CPU)
    return gradients


def _result(frame: Frame, node: fx.Node) -> None:
    """Adds values to the caller's results under a key. A loss is added without its gradients, and with an event: the caller
    need not wait for the backward."""
    found = frame.batch.results.setdefault(argument(node, "key"), [])
    found += [value if value.loss is None else Activation((), loss=value.loss) for value in frame.read(node, "values")]
    if argument(node, "key") == "loss":
        frame.batch.loss_known = frame.backend.record(Lane.COMPUTE)


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
    """The buffer of a checkpoint. It may not be filled yet; the copy to the device waits for that."""
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
    pack=_pack, pack_shard=_pack_shard, prefetch=_prefetch, prefetch_shard=_prefetch_shard, resident=_resident,
    forward=_forward, forward_saving=_forward, evaluate=_forward, outputs=_forward, output_gradient=_output_gradient,
    loss=_loss, recompute_backward=_backward, backward=_backward, zeros=_zeros, scale=_scale,
    reduce=_reduce, offload=_offload, offload_norms=_offload_norms, offload_weights=_offload_weights,
    resident_state=_resident_state, resident_gradients=_resident_gradients, fetch_gradients=_fetch_gradients,
    result=_result, lease=_lease, leased=_leased, release=_release, stash=_stash, stashed=_stashed, fetch=_fetch,
    **UPDATE_OPERATIONS, **COLLECTIVE_OPERATIONS)
