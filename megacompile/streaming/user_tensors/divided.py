"""Tensors that users hold over tiles that hosts divide. A host has only some of their values. Their shape, dtype and gradient
can be read. Code that reads or writes values raises an error.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megacompile.compat.core import as_plain_tensors, pytree
from megacompile.errors import CheckpointError, UnsupportedError
from megacompile.runtime.memory.divided import parts_of_run, within
from megacompile.runtime.memory.tiles import HostTile
from megacompile.runtime.optimizer.state_format import BLOCK
from megacompile.weights.saving import memory_in_a_file

if TYPE_CHECKING:
    from megacompile.streaming.streamed import Streamed

#: The attributes and methods of tensors that read no values.
_WITHOUT_VALUES = frozenset((
    "shape", "dtype", "device", "layout", "ndim", "grad", "requires_grad", "is_leaf", "grad_fn", "_version", "is_meta",
    "is_cuda", "is_cpu", "is_sparse", "is_quantized", "nbytes", "itemsize", "_backward_hooks",
    "_post_accumulate_grad_hooks", "size", "dim", "numel", "nelement", "element_size", "stride", "storage_offset",
    "is_floating_point", "is_complex", "is_signed", "is_contiguous", "data_ptr", "untyped_storage", "requires_grad_",
    "__hash__", "__len__"))


class _Divided(Tensor):
    """`of`: its name for messages."""

    of = ""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            name = getattr(func.__self__, "__name__", "")
        if name in _WITHOUT_VALUES or (name == "copy_" and args[0] is args[1]):
            with as_plain_tensors():
                return func(*args, **(kwargs or {}))
        what = next((each.of for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, _Divided)), "this tensor")
        raise UnsupportedError(f"{what} is divided among hosts, and this host has only a part of it: before close(), call "
                               "state_dict() of the model or the optimizer on every rank to read, or load_state_dict to write")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.of}: {list(self.shape)}, divided among hosts"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UnsupportedError(f"{self.of} is divided among hosts and cannot be copied: call state_dict() on every rank")


class _DividedParameter(_Divided, nn.Parameter):
    pass


def divided(tensor: Tensor, of: str) -> Tensor:
    """The same tensor object. From now on, code that reads or writes its values raises `UnsupportedError`. `of`: its name for
    messages."""
    tensor.__class__ = _DividedParameter if isinstance(tensor, nn.Parameter) else _Divided
    tensor.of = of  # type: ignore[attr-defined]
    return tensor


def whole_values(streamed: Streamed, parts: Sequence[str], doing: str) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Each parameter in a tile, by name, with its values in these parts of the tile, over memory that is valid until the next
    one is taken: those of the moments by their names. All ranks take all of them together, in a context `failing` of their
    group. Raises `RankError`."""
    for tile_name in streamed.tiling.host:
        with streamed.store.whole_on_every_host(tile_name, parts, streamed.rank_group.ranks, doing) as tile:
            for position, s in enumerate(tile.layout.slices):
                yield s.name, _values(tile, position, parts)


def with_whole_weights(streamed: Streamed, state: Mapping[str, Any], doing: str,
                       memory: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """A `state_dict` that was made with `keep_vars`, whose weights in tiles are copies of the whole. `memory`: of the copies,
    by name; None: each is a new tensor. All ranks call this. Raises `RankError`."""
    whole: dict[int, Tensor] = {}  # by the parameter's `id`
    with streamed.rank_group.failing():
        for name, values in whole_values(streamed, ("weights",), doing):
            if memory is None or name in memory:
                copied = torch.empty_like(values["weight"]) if memory is None else memory[name]
                whole[id(streamed.parameters[name])] = copied.copy_(values["weight"])
    return {key: whole[id(value)] if id(value) in whole else value.detach() if isinstance(value, Tensor) else value
            for key, value in state.items()}


def whole_weights_in_a_file(streamed: Streamed, directory: Path) -> dict[str, Any]:
    """The model's `state_dict` on rank 0, whose whole weights are in a file without a name on the file system that `directory`
    is saved on; nothing on other ranks. All ranks call this. Raises `CheckpointError`, `RankError`."""
    ranks, layouts = streamed.rank_group.ranks, streamed.tiling.host.values()
    memory, state = dict[str, Tensor](), dict[str, Any]()
    with streamed.rank_group.all_or_none("save_pretrained", CheckpointError):
        if ranks is None or ranks.rank == 0:
            sizes = [layout.weight_bytes for layout in layouts]
            for layout, part in zip(layouts, memory_in_a_file(directory, sum(sizes)).split(sizes), strict=True):
                memory.update(zip((s.name for s in layout.slices), layout.views(layout.flat(part)), strict=True))
            state = nn.Module.state_dict(streamed.model, keep_vars=True)
    return with_whole_weights(streamed, state, "save_pretrained", memory)


def _values(tile: HostTile, position: int, parts: Sequence[str]) -> dict[str, Tensor]:
    s, layout, found = tile.layout.slices[position], tile.layout, {}
    if "weights" in parts:
        found["weight"] = layout.flat(tile.weights)[s.start:s.stop].view(s.shape)
    if "remainder" in parts and tile.remainder is not None and s.trainable:
        found["remainder"] = tile.remainder[s.start:s.stop].view(s.shape)
    if "moments" in parts and tile.moments and s.trainable:
        state = layout.state_of(position)
        for name, memory in layout.state_layout.named(tile.moments, position):
            values = name in state.moments
            found[name] = memory[:s.count].view(s.shape) if values else memory[:state.format.scales(s.count)]
    return found


def own_values(tile: HostTile, position: int, part: str) -> Iterator[tuple[slice, Tensor]]:
    """The elements of a parameter's stored tensor that this host has, each run with its memory. `part`: "weight", "remainder",
    or a name in the optimizer's state."""
    s, layout = tile.layout.slices[position], tile.layout
    for first, last in within((slice(0, layout.elements),) if tile.here is None else tile.here, s.start, s.stop):
        for name, memory in parts_of_run(tile, position, first, last):
            if name == part:
                start = first if name in ("weight", "remainder", *layout.state_of(position).moments) else first // BLOCK
                yield slice(start, start + memory.numel()), memory


def put(tile: HostTile, position: int, part: str, values: Tensor) -> None:
    """Writes what this host has of a parameter's stored tensor."""
    flat = values.detach().flatten()
    for chosen, memory in own_values(tile, position, part):
        memory.copy_(flat[chosen])
