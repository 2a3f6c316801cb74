"""The meaning of each op: one small function, called by the reference interpreter and by the lanes.

State is in `Frame`, one run of one section: the values made so far, and the section's inputs. An op reads values by node, and
returns its own value or None. Here: copies, templates and values; updates and collectives have files of their own.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.ir.program import Kept, Lane, argument, op_of, operands
from megacompile.ir.token_loop import target_tokens
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.frame import Frame, gradients_of, norms_of, own_bytes, sums_of
from megacompile.runtime.kernels import Activation, Kernel, bind
from megacompile.runtime.kernels import accumulate as accumulate_gradients
from megacompile.runtime.memory.activation_checkpoints import HostCheckpoint, as_bytes, as_tensor, dense, described
from megacompile.runtime.memory.arena import Accumulators, Gradients, Held, State, Weights
from megacompile.runtime.memory.shards import Pair, Share, at_home, in_slot, moments_at_home, rows_with
from megacompile.runtime.memory.state_layout import aligned_bytes
from megacompile.runtime.memory.tiles import MomentFile
from megacompile.runtime.optimizer import host_update
from megacompile.runtime.optimizer import host_update as host
from megacompile.runtime.optimizer.device_update import WholeMatrix, matrices_of, momentum_of, update_matrix, update_there
from megacompile.runtime.optimizer.host_update import Moments
from megacompile.runtime.optimizer.rule import MatrixRule, Part, Rule, Segment
from megacompile.runtime.optimizer.state_format import BLOCK
from megacompile.runtime.update import Update


# --------------------
# Updates a tile on the device chunk by chunk: a chunk is copied there, updated, and copied back to the host. A rule of whole
# matrices has one of them in each chunk, with memory for its products.
#
# Everything is issued to one lane, in this order, chunk after chunk, and all chunks use the same memory: the lane's own order
# keeps a chunk from being overwritten.
def visit(backend: Backend, rule: Rule, memory: Tensor, tile: Share, segments: Sequence[Segment],
          gradient_scale: float) -> None:
    """Updates a tile with the same bits as `host_update.update`. `memory`: uint8, on the device. `segments`: of the host tile.
    Returns once the last copy is issued to h2d. The host has the tile's new weights and state when that lane has finished the
    copy."""
    weights, split = tile.home.layout.flat(tile.home.weights), tile.home.remainder is not None
    for start, (segment, moments) in _at_home(tile, segments):
        for part in _chunks(segment, moments, weights.element_size(), split, memory.numel()):
            with _chunk_on_device(backend, memory, tile, part, start) as (there, here, _):
                backend.update(rule, *_of_chunk(there, part, here, split), gradient_scale, lane=Lane.H2D)


def visit_matrices(backend: Backend, rule: MatrixRule, memory: Tensor, tile: Share, segments: Sequence[Segment],
                   gradient_scale: float, momentum: Tensor | None = None) -> None:
    """Like `visit`, for segments that are whole matrices. `memory` holds the largest matrix (`TileLayout.visit_bytes`).
    `momentum`: that of the whole tile, bf16 [elements], if a rank has a shard of it; None: computed here."""
    split = tile.home.remainder is not None
    for each in _parts_of_matrices(rule, tile, segments):
        with _chunk_on_device(backend, memory, tile, each.segment, each.start) as (there, here, scratch):
            weights, remainder, gradient, [(inside, moments)] = _of_chunk(there, each.segment, here, split)
            whole = None if momentum is None else WholeMatrix(momentum[each.matrix], each.part)
            update_matrix(backend, rule, weights, remainder, gradient, inside, moments, each.shape, gradient_scale, scratch,
                          Lane.H2D, whole)


def compute_momentum(backend: Backend, rule: MatrixRule, memory: Tensor, tile: Share, segments: Sequence[Segment],
                     gradient_scale: float, momentum: Tensor) -> None:
    """Writes the momentum that an update of this share of the matrices will store to its elements of `momentum`, bf16 [elements
    of the whole tile] on the device. Changes nothing in host memory. `memory`: as for `visit_matrices`."""
    for each in _parts_of_matrices(rule, tile, segments):
        with _chunk_on_device(backend, memory, tile, each.segment, each.start, only_read=True) as (there, here, scratch):
            [(inside, moments)] = _moments_of_chunk(there[1:], each.segment, here)
            found = momentum_of(backend, rule, there[0], inside, moments, each.shape, gradient_scale, scratch, Lane.H2D)
            with backend.issuing(Lane.H2D):
                momentum[each.matrix][each.part].copy_(found)


@dataclass(frozen=True)
class _PartOfMatrix:
    """What a share has of a matrix. `segment`: its elements at home, counted from `start`, the first one of a run. `matrix`:
    the elements of the whole matrix in a slot of the whole tile. `part`: which of them the share has."""

    start: int
    segment: Segment
    shape: tuple[int, int]
    matrix: slice
    part: slice


def _parts_of_matrices(rule: MatrixRule, tile: Share, segments: Sequence[Segment]) -> Iterator[_PartOfMatrix]:
    assert tile.home.gradients is not None and tile.home.moments, f"{tile.home.layout.name} has no optimizer state"
    matrices = [each for segment in sorted(segments, key=lambda s: s.start) for each in matrices_of(rule, segment)]
    for here, there in tile.runs:
        for matrix, rows, columns in matrices:
            if (own := matrix.within(there.start, there.stop, 0)) is not None:
                first = there.start + own.start - matrix.start
                at = tile.held.start + here.start + own.start - first
                yield _PartOfMatrix(there.start, own, (rows, columns), slice(at, at + rows * columns),
                                    slice(first, first + own.stop - own.start))


def _at_home(tile: Share, segments: Sequence[Segment]) -> list[tuple[int, Pair]]:
    """The parts of segments in each run of a tile, each with the first element of its run in the host tile."""
    assert tile.home.gradients is not None and tile.home.moments, f"{tile.home.layout.name} has no optimizer state"
    return [(run.start, pair) for _, run in tile.runs for pair in at_home(segments, tile, run)]


@contextmanager
def _chunk_on_device(backend: Backend, memory: Tensor, tile: Share, part: Segment, start: int,
                     only_read: bool = False) -> Iterator[tuple[list[Tensor], Moments, Tensor]]:
    """A context with a chunk on the device: gradients, weights, the remainder if there is one, moments and scales; its moments
    at home; and the rest of the memory. Copies the chunk to the device on entry, and all but the gradients back on exit.
    `only_read`: without weights and remainder, and nothing goes back."""
    home, layout = tile.home, tile.home.layout
    assert home.gradients is not None, f"{layout.name} has no gradients"
    elements = slice(start + part.start, start + part.stop)
    here = moments_at_home(part, tile)
    weights = [layout.flat(home.weights)[elements], *([] if home.remainder is None else [home.remainder[elements]])]
    host = [layout.flat(home.gradients)[elements], *([] if only_read else weights), *here.values, *here.scales]
    there = list(_divided(memory, host))
    for away, kept in zip(there, host, strict=True):
        backend.copy(_bytes(away), _bytes(kept), Lane.H2D)
    yield there, here, memory[sum(aligned_bytes(each.nbytes) for each in host):]
    for away, kept in zip(there[1:], host[1:], strict=True) if not only_read else ():
        backend.copy(_bytes(kept), _bytes(away), Lane.H2D)


def _of_chunk(there: Sequence[Tensor], segment: Segment, moments: Moments,
              split: bool) -> tuple[Tensor, Tensor | None, Tensor, list[Pair]]:
    """Weights, remainder, gradients and segments of a chunk on the device."""
    gradients, weights, *rest = there
    remainder = rest.pop(0) if split else None
    return weights, remainder, gradients, _moments_of_chunk(rest, segment, moments)


def _moments_of_chunk(there: Sequence[Tensor], segment: Segment, moments: Moments) -> list[Pair]:
    count = len(moments.values)
    inside = segment.within(segment.start, segment.stop, 0)
    assert inside is not None, "an empty chunk"
    return [(inside, Moments(moments.format, tuple(there[:count]), tuple(there[count:])))]


def _chunks(segment: Segment, moments: Moments, weight_bytes: int, split: bool, room: int) -> Iterator[Segment]:
    """The parts of a segment that fit `room` bytes each."""
    sizes = [weight_bytes, weight_bytes, *([2] if split else []), *(moments.format.value_bytes for _ in moments.values)]

    def needed(count: int) -> int:
        scales = [4 * moments.format.scales(count)] * len(moments.values)
        return sum(map(aligned_bytes, [count * size for size in sizes] + scales))

    if needed(segment.stop - segment.start) <= room:
        yield segment
        return
    count = room // needed(BLOCK) * BLOCK
    assert count > 0, f"{room} bytes hold no chunk"
    # Blocks that have one scale begin at multiples of their size in the parameter.
    for start in range(segment.start - segment.first % BLOCK, segment.stop, count):
        if (part := segment.within(start, start + count, start)) is not None:
            yield part


def _divided(memory: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    """Tensors of the same sizes and dtypes in `memory`, one after the other."""
    start = 0
    for part in like:
        yield memory[start:start + part.nbytes].view(part.dtype)
        start += aligned_bytes(part.nbytes)


def _bytes(elements: Tensor) -> Tensor:
    return elements.view(torch.uint8)


# -------------------- The ops that add up gradients in host memory, clip them and update tiles
def _accumulate(frame: Frame, node: fx.Node) -> None:
    tile = frame.store[argument(node, "tile")]
    slab: Gradients = frame.read(node, "slab")
    if argument(node, "overwrite"):
        for here, there in tile.gradients_with(slab.memory):
            host.copy(there, here)
        return
    flat, norms = gradients_of(tile), norms_of(tile)
    for position, s in enumerate(tile.layout.slices):
        there = flat[tile.layout.at_home(position)]
        host.accumulate(there, slab.flat[s.start:s.stop], overwrite=False)
        norms[position] = host.norm(there)


def _clip(frame: Frame, node: fx.Node) -> float:
    """The clipping factor of `torch.nn.utils.clip_grad_norm_`: max_norm / (norm + 1e-6), at most 1."""
    update = frame.update
    assert update is not None, "an update without an optimizer"
    if update.norm is None:  # else a failed step is being completed, and gradients of finished tiles may be gone
        update.judge({name: _norms(frame, update, name) for name in argument(node, "tiles")})
    assert update.norm is not None
    return 1.0 if update.max_grad_norm is None else min(1.0, update.max_grad_norm / (update.norm + 1e-6))


def _norms(frame: Frame, update: Update, name: str, memory: Tensor | None = None) -> dict[str, float]:
    """Norms of the gradients that count, by parameter: from the host tile, or from `memory`, a slab."""
    tile = frame.store[name]
    norms = (norms_of(tile) if memory is None else tile.layout.norms(memory)).tolist()
    return {tile.layout.slices[position].name: norms[position] for position in update.counted.get(name, ())}


def _add_to_sum(frame: Frame, node: fx.Node) -> None:
    tile, slab = frame.store[argument(node, "tile")], frame.read(node, "slab")
    sums, source = sums_of(tile), None if slab is None else slab.flat
    if frame.update is not None and frame.update.on_arrival:  # before the global norm is known, and a sum has no norms
        frame.update.judge_tile(tile.layout.name, _norms(frame, frame.update, tile.layout.name, slab and slab.memory))
    for here, there in tile.runs:
        host.accumulate(sums[there], gradients_of(tile)[there] if source is None else source[here], argument(node, "overwrite"))


def _norms_of_sum(frame: Frame, node: fx.Node) -> None:
    tile = frame.store[argument(node, "tile")]
    norms = norms_of(tile)
    for position in range(len(tile.layout.slices)):
        norms[position] = host.norm(sums_of(tile)[tile.layout.at_home(position)])


def _update(frame: Frame, node: fx.Node) -> None:
    tile = frame.store[argument(node, "tile")]
    _update_on_host(frame, node, tile, frame.read(node, "slab"), moments=_in_slab(frame, node, tile))


def _update_weights(frame: Frame, node: fx.Node) -> None:
    """Updates a tile's weights. If the rule's moments cannot be updated later, does the whole update, and writes moments on
    disk at once, since other tiles need their slab. Then `update_moments` has nothing to do."""
    tile, update = frame.store[argument(node, "tile")], _updating(frame)
    if argument(node, "tile") not in update.halfway:
        _update_on_host(frame, node, tile, moments=_in_slab(frame, node, tile),
                        part=Part.WEIGHTS if update.rule.separable else Part.WHOLE)
        _write(frame, node, tile)


def _update_moments(frame: Frame, node: fx.Node) -> None:
    tile = frame.store[argument(node, "tile")]
    _update_on_host(frame, node, tile, moments=_in_slab(frame, node, tile), part=Part.MOMENTS)


def _update_from_sum(frame: Frame, node: fx.Node) -> None:
    tile = frame.store[argument(node, "tile")]
    _update_on_host(frame, node, tile, sums_of(tile))


def _read_state(frame: Frame, node: fx.Node) -> Tensor:
    """Reads moments from the disk. Skips the read if the tile needs none when a failed step is completed: the slab may still
    hold moments that could not be written, of this tile or of another."""
    tile, update = frame.store[argument(node, "tile")], _updating(frame)
    slab = frame.memory(argument(node, "into"))[:tile.home.layout.disk_bytes]
    done = tile.layout.name in update.halfway and any(op_of(user).name == "update_weights" for user in node.users)
    if update.pending(tile.layout.name) and not done:
        _file_of(tile).read(tile.layout.name, slab)
    return slab


def _in_slab(frame: Frame, node: fx.Node, tile: Share) -> list[Tensor] | None:
    """The moments of a tile that were read from the disk; None if they are in memory."""
    slab = frame.read(node, "moments")
    return None if slab is None else tile.layout.moments(slab)


def _write_state(frame: Frame, node: fx.Node) -> None:
    _write(frame, node, frame.store[argument(node, "tile")])


def _write(frame: Frame, node: fx.Node, tile: Share) -> None:
    update = _updating(frame)
    if tile.layout.name in update.unwritten:
        tile.home.moments_written = True  # in part, if it fails
        _file_of(tile).write(tile.layout.name, frame.read(node, "moments"))
        _updated(update, tile)


def _file_of(tile: Share) -> MomentFile:
    assert tile.home.file is not None, f"the moments of {tile.layout.name} are in memory"
    return tile.home.file


def _update_on_host(frame: Frame, node: fx.Node, tile: Share, gradients: Gradients | Tensor | None = None,
                    part: Part = Part.WHOLE, moments: Sequence[Tensor] | None = None) -> None:
    """Updates a tile on the host. `gradients`: a slab; or [elements] of the host tile, such as its sums; None: the host tile's
    gradients. `moments`: of this share, in a slab, still to be written from there; None: the host tile's."""
    update, home, name = _updating(frame), tile.home, tile.layout.name
    slab = gradients if isinstance(gradients, Gradients) else None
    if update.on_arrival and gradients is not home.sums and name in update.segments:
        update.judge_tile(name, _norms(frame, update, name, None if slab is None else slab.memory))
    if segments := update.pending(name):
        assert home.has_moments, "the optimizer made no state"
        assert not update.matrices.get(name), "whole matrices are updated on the device"
        frame.store.preserve(name)
        source = gradients_of(tile) if gradients is None else gradients
        for here, there in tile.runs:
            given = source.flat[here] if isinstance(source, Gradients) else source[there]
            host_update.update(update.rule, home.layout.flat(home.weights)[there],
                               None if home.remainder is None else home.remainder[there], given,
                               at_home(segments, tile, there, moments), _gradient_scale(frame, node), part=part)
        if part == Part.WEIGHTS:
            update.halfway.add(name)
        elif moments is not None:
            update.unwritten.add(name)
        else:
            _updated(update, tile)


def _update_on_device(frame: Frame, node: fx.Node) -> None:
    update, tile = _updating(frame), frame.store[argument(node, "tile")]
    if segments := update.pending(tile.layout.name):
        weights, state, gradients = (frame.read(node, name) for name in ("resident", "state", "reduced"))
        # On arrival the device itself checks the norms: otherwise the host would wait for the device in every layer.
        judged = (gradients.norms, frame.arena.verdict(tile.layout.name, update)) if update.on_arrival else None
        own = tile.layout.flat(own_bytes(tile, weights.memory))
        scale, (elementwise, whole) = _gradient_scale(frame, node), update.divided(tile.layout.name, segments)
        if elementwise:
            frame.backend.update(update.rule, own, state.remainder, gradients.flat, in_slot(elementwise, tile, state.at),
                                 scale, judged)
        if update.matrix_rule is not None and whole:
            update_there(frame.backend, update.matrix_rule, own, state.remainder, gradients.flat,
                         in_slot(whole, tile, state.at), scale)
        _updated(update, tile)


def _update_visiting(frame: Frame, node: fx.Node) -> None:
    update, tile = _updating(frame), frame.store[argument(node, "tile")]
    if segments := update.pending(tile.layout.name):
        frame.store.preserve(tile.layout.name)
        memory, scale = frame.memory(argument(node, "into")), _gradient_scale(frame, node)
        elementwise, whole = update.divided(tile.layout.name, segments)
        visit(frame.backend, update.rule, memory, tile, elementwise, scale)
        if update.matrix_rule is not None:
            visit_matrices(frame.backend, update.matrix_rule, memory, tile, whole, scale, frame.read(node, "momentum"))
        _updated(update, tile)


def _momentum(frame: Frame, node: fx.Node) -> Tensor:
    update, tile = _updating(frame), frame.store[argument(node, "tile")]
    name, memory = tile.layout.name, frame.memory(argument(node, "into"))
    size = 2 * frame.store.whole(name).layout.elements
    momentum = memory[:size].view(torch.bfloat16)
    _, whole = update.divided(name, update.pending(name))
    if whole:
        assert update.matrix_rule is not None, f"nothing updates the matrices of {name}"
        compute_momentum(frame.backend, update.matrix_rule, memory[size:], tile, whole, _gradient_scale(frame, node), momentum)
    return momentum


def _updating(frame: Frame) -> Update:
    assert frame.update is not None, "an update without an optimizer"
    return frame.update


def _gradient_scale(frame: Frame, node: fx.Node) -> float:
    """The clipping factor; 1 without a clip."""
    return frame.read(node, "clip") if "clip" in node.kwargs else 1.0


def _updated(update: Update, tile: Share) -> None:
    tile.home.moments_written = True
    update.finish(tile.layout.name)


def _fetch_state(frame: Frame, node: fx.Node) -> State:
    tile = frame.store[argument(node, "tile")]
    state = frame.arena.state(argument(node, "into"), tile.layout)
    for there, here in _state(tile, state, _written_moments(tile)):
        if here is None:
            there.zero_()
        else:
            there.copy_(here)
    return state


def _written_moments(tile: Share) -> list[Tensor]:
    """The host tile's moments; none if they are zero. Reading pages that nothing has written would take seconds: the system
    would have to make them first."""
    return [] if tile.home.moments_are_zero else tile.home.moments


def _store_state(frame: Frame, node: fx.Node) -> None:
    frame.store.preserve(argument(node, "tile"))
    tile, state = frame.store[argument(node, "tile")], frame.read(node, "state")
    for there, here in _state(tile, state, tile.home.moments):
        if here is not None:
            here.copy_(there)


def _state(tile: Share, state: State, moments: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Parts of a tile's state in its slot, and the same parts in host memory (None if the host has none). `moments`: of the
    host tile."""
    home = tile.home
    if state.remainder is not None:
        for here, there in tile.runs:
            yield state.remainder[here], None if home.remainder is None else home.remainder[there]
    for position, s in enumerate(tile.layout.slices):
        if s.count == 0 or not tile.layout.state_of(position).moments:
            continue
        away = tile.layout.state_layout.at(state.moments, position, 0, s.count)
        at = home.layout.position_of[s.name]
        first = tile.layout.at_home(position).start - home.layout.slices[at].start
        kept = home.layout.state_layout.at(moments, at, first, first + s.count) if moments else None
        yield from zip_longest(away.values, kept.values if kept is not None else ())
        yield from zip_longest(away.scales, kept.scales if kept is not None else ())


# A tile that the device holds. If the step fails before its update, its memory is freed, and the host updates it. If the step
# fails after it, the memory stays until the step is completed.
def _hold(frame: Frame, node: fx.Node) -> str:
    held = frame.arena.hold(argument(node, "into"), frame.store[argument(node, "tile")].layout)
    held.gradients.memory.copy_(frame.read(node, "reduced").memory)
    if (current := frame.read(node, "current")) is not None:
        held.weights.memory.copy_(current.memory)
        held.has_weights = True
    return _held(frame, node)


def _held(frame: Frame, node: fx.Node) -> str:
    """The slot. It is read when its lane comes to it: a failed step may clear it before."""
    return str(argument(node, "into"))


def _held_by(frame: Frame, node: fx.Node) -> Held | None:
    return frame.arena.held.get(frame.read(node, "held"))


def _fetch_held(frame: Frame, node: fx.Node) -> None:
    tile, held = frame.store[argument(node, "tile")], _held_by(frame, node)
    assert held is not None, f"nothing holds {tile.layout.name}"
    for away, kept in tile.weights_with(held.weights.memory) if not held.has_weights else ():
        frame.backend.copy(away, kept, Lane.H2D)
    with frame.backend.issuing(Lane.H2D):
        for there, here in _state(tile, held.state, _written_moments(tile)):
            if here is None:
                there.zero_()
            else:
                frame.backend.copy(_bytes(there), _bytes(here), Lane.H2D)


def _update_held(frame: Frame, node: fx.Node) -> None:
    update, tile, held = _updating(frame), frame.store[argument(node, "tile")], _held_by(frame, node)
    if held is None:
        _update_on_host(frame, node, tile)
    elif held.updated is not update and (segments := update.pending(tile.layout.name)):  # else the step is being completed
        own, state = tile.layout.flat(held.weights.memory), held.state
        frame.backend.update(update.rule, own, state.remainder, held.gradients.flat, in_slot(segments, tile, state.at),
                             _gradient_scale(frame, node), lane=Lane.H2D)
        held.updated = update


def _return_weights(frame: Frame, node: fx.Node) -> None:
    update, tile, held = _updating(frame), frame.store[argument(node, "tile")], _held_by(frame, node)
    if held is not None and update.pending(tile.layout.name):
        frame.store.preserve(tile.layout.name)
        update.halfway.add(tile.layout.name)
        for away, kept in tile.weights_with(held.weights.memory):
            frame.backend.copy(kept, away, Lane.D2H)


def _return_state(frame: Frame, node: fx.Node) -> None:
    update, tile, held = _updating(frame), frame.store[argument(node, "tile")], _held_by(frame, node)
    if held is not None and update.pending(tile.layout.name):
        frame.store.preserve(tile.layout.name)
        for there, here in _state(tile, held.state, tile.home.moments):
            assert here is not None, f"{tile.layout.name} has no state in host memory"
            frame.backend.copy(_bytes(here), _bytes(there), Lane.D2H)
        _updated(update, tile)
    frame.arena.let_go(frame.read(node, "held"))


UPDATE_OPERATIONS: dict[str, Callable[[Frame, fx.Node], Any]] = dict(
    accumulate=_accumulate, clip=_clip, add_to_sum=_add_to_sum, norms_of_sum=_norms_of_sum, update=_update,
    update_weights=_update_weights, update_moments=_update_moments, update_from_sum=_update_from_sum,
    update_on_device=_update_on_device, momentum=_momentum, update_visiting=_update_visiting, read_state=_read_state,
    write_state=_write_state, fetch_state=_fetch_state, store_state=_store_state, hold=_hold, held=_held,
    fetch_held=_fetch_held, update_held=_update_held, return_weights=_return_weights, return_state=_return_state)


# -------------------- The ops that several ranks run together, and what each rank tells the others
def _gather(frame: Frame, node: fx.Node) -> Weights:
    weights = frame.arena.weights(argument(node, "into"), frame.store.whole(argument(node, "tile")).layout)
    frame.together.exchanges.gather(weights.memory, frame.read(node, "shard").memory)
    return weights


def _gather_resident(frame: Frame, node: fx.Node) -> None:
    weights: Weights = frame.read(node, "resident")
    frame.together.exchanges.gather(weights.memory, own_bytes(frame.store[argument(node, "tile")], weights.memory))


def _gather_momentum(frame: Frame, node: fx.Node) -> None:
    momentum, held = _bytes(frame.read(node, "momentum")), frame.store[argument(node, "tile")].held
    frame.together.exchanges.gather(momentum, momentum[2 * held.start:2 * held.stop])


def _reduce_scatter(frame: Frame, node: fx.Node) -> None:
    (accumulators,) = operands(node, "accumulators")
    frame.together.exchanges.reduce_scatter(frame.values[accumulators].flat)


def _all_reduce(frame: Frame, node: fx.Node) -> None:
    (accumulators,) = operands(node, "accumulators")
    frame.together.exchanges.all_reduce(frame.values[accumulators].flat)


def _share_norms(frame: Frame, node: fx.Node) -> None:
    frame.together.exchanges.join_norms(frame.read(node, "reduced").norms)


def _share_host_norms(frame: Frame, node: fx.Node) -> None:
    frame.together.exchanges.join_host_norms(norms_of(frame.store[argument(node, "tile")]))


def _announce(frame: Frame, node: fx.Node) -> None:
    frame.together.updated()


def _total_loss(frame: Frame, node: fx.Node) -> Activation:
    losses = [value.loss for value in frame.read(node, "values")]
    return Activation((), loss=torch.stack(losses).sum(dim=0))


def _share_loss(frame: Frame, node: fx.Node) -> None:
    loss = frame.read(node, "value").loss
    assert loss is not None, "a total of nothing"
    frame.together.exchanges.add_up(loss)


COLLECTIVE_OPERATIONS: dict[str, Callable[[Frame, fx.Node], Any]] = dict(
    gather=_gather, gather_resident=_gather_resident, gather_momentum=_gather_momentum, reduce_scatter=_reduce_scatter,
    all_reduce=_all_reduce, share_norms=_share_norms, share_host_norms=_share_host_norms, announce=_announce,
    total_loss=_total_loss, share_loss=_share_loss)


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


def _prefetch_routed(frame: Frame, node: fx.Node) -> Weights:
    tile = frame.store.whole(argument(node, "tile"))
    weights = frame.arena.weights(argument(node, "into"), tile.layout)
    for here, there in rows_with(tile, weights.memory, frame.read(node, "router").experts):
        frame.backend.copy(here, there, Lane.H2D)
    return weights


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
    so_far, first = frame.batch.ends_of_experts, kernel.outputs + kernel.residuals
    for number, (ends, experts) in enumerate(zip(results[first::2], results[first + 1::2], strict=True)):
        if frame.batch.padding:
            padding = frame.batch.padding[argument(node, "mb")]
            if experts.numel() % padding.numel():
                continue  # of other tokens than the batch's
            ends = _ends_without(padding, experts, len(ends))
        key = argument(node, "call"), number
        so_far[key] = so_far[key] + ends if key in so_far else ends
    return Activation(outputs, [*results[kernel.outputs:first]])


def _ends_without(padding: Tensor, experts: Tensor, count: int) -> Tensor:
    """Where the pairs of each of `count` experts end, int32 [count], if those of padding are left out. `padding`: bool [rows,
    length]; `experts`: the number of each pair's expert, int64 [pairs], token by token, `count` for an expert elsewhere."""
    counted = experts.view(padding.numel(), -1).masked_fill(padding.view(-1, 1), count)
    counts = torch.histc(counted.float(), bins=count + 1, min=0, max=count)
    return counts[:-1].cumsum(0, dtype=torch.int32)


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
        frame.backend.copy(there, here, Lane.D2H)


def _fetch_gradients(frame: Frame, node: fx.Node) -> Gradients:
    gradients = _resident_gradients(frame, node)
    for here, there in frame.store[argument(node, "tile")].gradients_with(gradients.memory):
        frame.backend.copy(here, there, Lane.CPU)
    return gradients


def _result(frame: Frame, node: fx.Node) -> None:
    """Adds values to the caller's results under a key. A loss is added without its gradients, and with an event, so that the
    caller need not wait for the backward."""
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
    """The buffer of a checkpoint. It may not be filled yet. The copy to the device waits for that."""
    return frame.host[argument(node, "into")]


def _fetch(frame: Frame, node: fx.Node) -> Activation:
    slot, buffer = frame.arena.slots[argument(node, "into")], frame.read(node, "stashed")
    outputs = []
    for part, where in buffer.pieces():
        frame.backend.copy(slot[where], buffer.memory[where], Lane.H2D)
        outputs.append(as_tensor(slot[where], part))
    return Activation(tuple(outputs))


def _release(frame: Frame, node: fx.Node) -> None:
    """Drops the value. Its memory returns to the allocator."""
    frame.values.pop(operands(node, "value")[0], None)


OPERATIONS: dict[str, Callable[[Frame, fx.Node], Any]] = dict(
    pack=_pack, pack_shard=_pack_shard, prefetch=_prefetch, prefetch_routed=_prefetch_routed,
    prefetch_shard=_prefetch_shard, resident=_resident,
    forward=_forward, forward_saving=_forward, evaluate=_forward, outputs=_forward, output_gradient=_output_gradient,
    loss=_loss, recompute_backward=_backward, backward=_backward, zeros=_zeros, scale=_scale,
    reduce=_reduce, offload=_offload, offload_norms=_offload_norms, offload_weights=_offload_weights,
    resident_state=_resident_state, resident_gradients=_resident_gradients, fetch_gradients=_fetch_gradients,
    result=_result, lease=_lease, leased=_leased, release=_release, stash=_stash, stashed=_stashed, fetch=_fetch,
    **UPDATE_OPERATIONS, **COLLECTIVE_OPERATIONS)
