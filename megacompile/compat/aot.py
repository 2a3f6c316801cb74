"""Private parts of AOTAutograd, which differentiates graphs."""
from __future__ import annotations

from typing import Any

import torch
from torch._functorch import config  # the settings of AOT and of the partitioner
from torch._functorch.aot_autograd import aot_export_joint_simple  # the joint forward and backward graph of a section
from torch._functorch.partitioners import min_cut_rematerialization_partition  # which values a backward needs saved
from torch.fx import GraphModule  # what is written
from torch.fx._graph_pickler import GraphPickler, Options  # writes graphs of fakes as inductor's cache does
from torch.utils._mode_utils import no_dispatch  # makes what a fake holds: a tensor without data that is not a fake

from megacompile.compat.core import FakeTensor, FakeTensorMode
from megacompile.compat.symbols import ShapeEnv

__all__ = ["aot_export_joint_simple", "config", "min_cut_rematerialization_partition", "read_graph", "written_graph"]


def written_graph(graph: GraphModule) -> bytes:
    """A graph whose values are fakes, pickled. Raises whatever pickling raises."""
    return _WithoutEnvironment.dumps(graph, Options(ops_filter=None))


def read_graph(contents: bytes, fakes: FakeTensorMode) -> GraphModule:
    """The graph that `written_graph` wrote. Its values are fakes of `fakes`, whose environment must know the same symbols.
    Raises whatever unpickling raises."""
    return _WithoutEnvironment.loads(contents, fakes)  # type: ignore[return-value]


class _WithoutEnvironment(GraphPickler):
    """PyTorch's pickler also writes the environment of the symbols, with tracebacks and functions of the user's modules, and
    overwrites the reader's environment with it. For each fake it writes and reads every attribute that a tensor may have, which
    takes more than twice as long. State: the numbers of the fakes' memories, and each tuple of sizes, since pickle writes an
    object once."""

    def __init__(self, *how: Any) -> None:
        super().__init__(*how)
        self._memories: dict[int, int] = {}
        self._sizes: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, ShapeEnv):
            return _environment_of, (self._unpickle_state,)
        if type(obj) is FakeTensor and _is_plain(obj):
            memory = self._memories.setdefault(obj.untyped_storage()._cdata, len(self._memories))
            return _fake, (self._unpickle_state, memory, obj.storage_offset(), self._once(obj.shape), self._once(obj.stride()),
                           obj.dtype, obj.device)
        if isinstance(obj, torch.memory_format):  # pickle would name any module that has imported torch
            return _memory_format, (str(obj).removeprefix("torch."),)
        return super().reducer_override(obj)

    def _once(self, sizes: tuple[Any, ...]) -> tuple[Any, ...]:
        key = tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes)
        return self._sizes.setdefault(key, tuple(sizes))


def _is_plain(fake: FakeTensor) -> bool:
    """True if a tensor consists of only a shape, a dtype and memory."""
    return (fake.layout is torch.strided and not fake.requires_grad and not fake._is_view() and not fake.is_conj()
            and not fake.is_neg() and fake.constant is None)


def _fake(
    state: Any, memory: int, offset: Any, shape: Any, strides: Any, dtype: torch.dtype, device: torch.device,
) -> FakeTensor:
    mode, memories = state.fake_mode, vars(state).setdefault("memories", {})
    with no_dispatch(), mode.shape_env.suppress_guards():
        if memory in memories:
            made = torch.empty(0, dtype=dtype, device="meta").set_(memories[memory], offset, shape, strides)
        else:
            made = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            memories[memory] = made.untyped_storage()
        return FakeTensor(mode, made, device)


def _memory_format(name: str) -> torch.memory_format:
    return getattr(torch, name)  # type: ignore[no-any-return]


def _environment_of(state: Any) -> ShapeEnv:
    return state.fake_mode.shape_env  # type: ignore[no-any-return]
