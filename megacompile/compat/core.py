"""Private parts of PyTorch that `import torch` loads in any case: engine, dispatcher, fake tensors, generated code."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch._decomp import get_decompositions  # writes losses as ops that are known to treat each token alone
from torch._dispatch.python import enable_python_dispatcher  # runs ops with symbolic sizes outside of a trace
from torch._guards import TracingContext, tracing  # what inductor asks for the fakes of the graph that it compiles
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily  # tensors without data
from torch.fx import graph_module
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule  # writes its code when it is run or asked for it
from torch.fx._lazy_graph_module import _use_lazy_graph_module  # lets PyTorch make such modules too
from torch.fx.experimental.proxy_tensor import make_fx  # traces ops on fakes: variants for concrete sizes
from torch.fx.operator_schemas import get_signature_for_torch_op  # the names of a torch function's parameters
from torch.utils import _pytree as pytree  # flattens what models and functions return
from torch.utils._python_dispatch import TorchDispatchMode  # sees every op of a plain run on fakes

__all__ = [
    "FakeTensor", "FakeTensorMode", "HigherOrderOperator", "LazyGraphModule", "OpOverload", "OpOverloadPacket",
    "TorchDispatchMode", "TracingContext", "as_plain_tensors", "builtin_linear", "clear_cublas_workspaces",
    "differentiating", "enable_python_dispatcher", "foreach_norm", "generated_code", "get_decompositions",
    "get_signature_for_torch_op", "graph_is_kept", "grouped_mm", "lazy_graph_modules", "make_fx", "node_will_run",
    "parse_to", "pytree", "reported_as_export", "set_allocator_settings", "set_grad_enabled", "sleep_on_device",
    "torch_check", "tracing", "unset_fake_temporarily", "without_cache",
]

#: States that two sizes are equal, inside of code that is traced.
torch_check = torch._check
#: The product of each group of rows with its own matrix, for experts.
grouped_mm = torch._grouped_mm
#: Norms of many tensors in one kernel, for clipping.
foreach_norm = torch._foreach_norm
#: The class of the ops in a traced graph: their tags tell which draw random numbers, their schemas which change inputs.
OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
HigherOrderOperator = torch._ops.HigherOrderOperator
#: The function that `F.linear` is in a graph of Dynamo's, and the one that switches gradients on and off there.
builtin_linear: Any = torch._C._nn.linear
set_grad_enabled: Any = torch._C._set_grad_enabled
#: Reads the arguments of `Module.to` as PyTorch does.
parse_to: Any = torch._C._nn._parse_to
#: Lets a subclass of tensors call a function of plain ones.
as_plain_tensors: Any = torch._C.DisableTorchFunctionSubclass
#: True if the current backward was called with retain_graph; true if it will run a node. Call both only within a backward.
graph_is_kept: Any = torch._C._autograd._get_current_graph_task_keep_graph
node_will_run: Any = torch._C._will_engine_execute_node


@contextlib.contextmanager
def differentiating() -> Iterator[None]:
    """Lets an op differentiate in its own implementation, where PyTorch switches autograd off."""
    below = (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView)
    with (torch._C._SetExcludeDispatchKeyGuard(below[0], False), torch._C._SetExcludeDispatchKeyGuard(below[1], False),
          torch.enable_grad()):
        yield


def without_cache(fakes: FakeTensorMode) -> FakeTensorMode:
    """The mode, without its cache of results. With symbolic sizes, making an entry of the cache takes longer than computing the
    shapes again, and few ops find one."""
    fakes.cache_enabled = False
    return fakes


def lazy_graph_modules() -> AbstractContextManager[None]:
    """A context in which PyTorch's graph modules generate their code on demand. Most modules of a capture are rewritten before
    they run."""
    return _use_lazy_graph_module(True)


def reported_as_export() -> AbstractContextManager[Any]:
    """A context in which PyTorch reports that it compiles and exports, so that models take the branches of a trace in a plain
    run."""
    return mock.patch.multiple(torch.compiler, _is_compiling_flag=True, _is_exporting_flag=True)


def generated_code() -> dict[str, Any]:
    """The sources of all graph modules by file name, which torch.fx keeps and never drops."""
    return graph_module._loader.eval_cache


# CUDA builds only.
def set_allocator_settings(settings: str) -> None:
    """Configures PyTorch's CUDA allocator like PYTORCH_CUDA_ALLOC_CONF, before the first allocation."""
    torch.cuda.memory._set_allocator_settings(settings)


def clear_cublas_workspaces() -> None:
    """Frees cuBLAS's workspaces, which would fragment the next plan's memory."""
    torch._C._cuda_clearCublasWorkspaces()


def sleep_on_device(cycles: int) -> None:
    """Keeps the current stream busy, to test that lanes wait for it."""
    torch.cuda._sleep(cycles)
