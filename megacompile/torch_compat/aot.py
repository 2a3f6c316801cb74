"""Private parts of AOTAutograd, which differentiates graphs."""
from __future__ import annotations

from typing import Any

import torch
from torch._functorch import config  # the settings of AOT and of the partitioner
from torch._functorch.aot_autograd import aot_export_joint_simple  # the joint forward and backward graph of a section
from torch._functorch.partitioners import min_cut_rematerialization_partition  # which values a backward needs saved
from torch.fx import GraphModule  # what is written
from torch.fx._graph_pickler import GraphPickler, Options  # writes graphs of fakes as inductor's cache does

from megacompile.torch_compat.core import FakeTensorMode
from megacompile.torch_compat.symbols import ShapeEnv

__all__ = ["aot_export_joint_simple", "config", "min_cut_rematerialization_partition", "read_graph", "written_graph"]


def written_graph(graph: GraphModule) -> bytes:
    """A graph whose values are fakes, pickled. Raises whatever pickling raises."""
    return _WithoutEnvironment.dumps(graph, Options(ops_filter=None))


def read_graph(contents: bytes, fakes: FakeTensorMode) -> GraphModule:
    """The graph that `written_graph` wrote. Its values are fakes of `fakes`, whose environment must know the same symbols.
    Raises whatever unpickling raises."""
    return _WithoutEnvironment.loads(contents, fakes)  # type: ignore[return-value]


class _WithoutEnvironment(GraphPickler):
    """PyTorch's own writes the environment of the symbols too, with tracebacks and functions of the user's modules, and
    overwrites the reader's environment with it."""

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, ShapeEnv):
            return _environment_of, (self._unpickle_state,)
        if isinstance(obj, torch.memory_format):  # pickle would name any module that has imported torch
            return _memory_format, (str(obj).removeprefix("torch."),)
        return super().reducer_override(obj)


def _memory_format(name: str) -> torch.memory_format:
    return getattr(torch, name)  # type: ignore[no-any-return]


def _environment_of(state: Any) -> ShapeEnv:
    return state.fake_mode.shape_env  # type: ignore[no-any-return]
