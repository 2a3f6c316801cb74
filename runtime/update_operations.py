"""The ops that add up gradients in host memory, clip them and update tiles."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor, fx

from megacompile.ir.program import argument, op_of
from megacompile.runtime.frame import Frame, gradients_of, norms_of, own_bytes, sums_of
from megacompile.runtime.memory.arena import Gradients, State
from megacompile.runtime.memory.moment_file import MomentFile
from megacompile.runtime.memory.segments import at_home, in_slot
from megacompile.runtime.memory.shards import Share
from megacompile.runtime.optimizer import host_kernels as host
from megacompile.runtime.optimizer import host_update
from megacompile.runtime.optimizer.matrix_update import update_there
from megacompile.runtime.optimizer.rule import Part
from megacompile.runtime.update import Update
from megacompile.runtime.visiting import visit, visit_matrices


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
    """Norms of the gradients that count, by parameter: those of the host tile, or those in `memory`, a slab."""
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
    """With a rule whose moments cannot be updated later, this is the whole update, and nothing is left for `update_moments`:
    not even to write moments, whose slab is needed for others."""
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
    """Skips the read when a failed step is completed and the tile needs none: the slab may still hold moments that could not be
    written, of this tile or of another."""
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
    gradients. `moments`: this share's, in a slab, from which they are still to be written; None: the host tile's."""
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
            frame.backend.update(update.rule, own, state.remainder, gradients.flat, in_slot(elementwise, tile, state.moments),
                                 scale, judged)
        if update.matrix_rule is not None and whole:
            update_there(frame.backend, update.matrix_rule, own, state.remainder, gradients.flat,
                         in_slot(whole, tile, state.moments), scale)
        _updated(update, tile)


def _update_visiting(frame: Frame, node: fx.Node) -> None:
    update, tile = _updating(frame), frame.store[argument(node, "tile")]
    if segments := update.pending(tile.layout.name):
        frame.store.preserve(tile.layout.name)
        memory, scale = frame.memory(argument(node, "into")), _gradient_scale(frame, node)
        elementwise, whole = update.divided(tile.layout.name, segments)
        visit(frame.backend, update.rule, memory, tile, elementwise, scale)
        if update.matrix_rule is not None:
            visit_matrices(frame.backend, update.matrix_rule, memory, tile, whole, scale)
        _updated(update, tile)


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
    # Reading the pages of moments that nothing has written would take seconds: the system would have to make them first.
    for there, here in _state(tile, state, [] if tile.home.moments_are_zero else tile.home.moments):
        if here is None:
            there.zero_()
        else:
            there.copy_(here)
    return state


def _store_state(frame: Frame, node: fx.Node) -> None:
    frame.store.preserve(argument(node, "tile"))
    tile, state = frame.store[argument(node, "tile")], frame.read(node, "state")
    for there, here in _state(tile, state, tile.home.moments):
        if here is not None:
            here.copy_(there)


def _state(tile: Share, state: State, moments: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Parts of a tile's state in its slot, and the same parts in host memory: None where the host has none. `moments`: those
    of the host tile."""
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


UPDATE_OPERATIONS: dict[str, Callable[[Frame, fx.Node], Any]] = dict(
    accumulate=_accumulate, clip=_clip, add_to_sum=_add_to_sum, norms_of_sum=_norms_of_sum, update=_update,
    update_weights=_update_weights, update_moments=_update_moments, update_from_sum=_update_from_sum,
    update_on_device=_update_on_device, update_visiting=_update_visiting, read_state=_read_state, write_state=_write_state,
    fetch_state=_fetch_state, store_state=_store_state)
