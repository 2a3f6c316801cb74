"""Tensors that users hold over tiles that hosts divide. A host has only some of their values. Their shape, dtype and gradient
can be read. Code that reads or writes values raises an error.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from megacompile.compat.core import as_plain_tensors, pytree
from megacompile.errors import UnsupportedError
from megacompile.runtime.memory.divided import parts_of_run, within
from megacompile.runtime.memory.tiles import HostTile
from megacompile.runtime.optimizer.state_format import BLOCK

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
