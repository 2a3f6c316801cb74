"""Which branches a model takes where it asks who runs it: those that a trace and a plain run on fakes have in common.

Dynamo says of itself that it exports. transformers then leaves out kernels and shortcuts that hold for some values alone, which
is right for a graph of any batch. But a model's own code avoids with it what other formats than ours lack: layers with a gated
delta rule invert a triangular matrix by 63 steps of Python, where native PyTorch calls a solver. Their graph has many times the
operations, and takes as much longer to trace, to differentiate and to run.
"""
from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from unittest import mock

import torch
from torch import nn

#: What a module of a model calls to ask whether it is exported.
_ASKS = "is_torchdynamo_exporting"


@contextlib.contextmanager
def native_branches(model: nn.Module) -> Iterator[None]:
    """Within, the code of the modules of `model` is told that it is not exported, as natively. What it calls of transformers,
    masks and kernels among it, asks for itself."""
    own = {type(module).__module__ for module in model.modules()}
    with contextlib.ExitStack() as patches:
        for name in own:
            if hasattr(sys.modules.get(name), _ASKS):
                patches.enter_context(mock.patch.object(sys.modules[name], _ASKS, _not_exporting))
        yield


@contextlib.contextmanager
def as_traced(model: nn.Module) -> Iterator[None]:
    """Within, `model` takes the branches in a plain run that it takes in a trace."""
    with native_branches(model), mock.patch.multiple(torch.compiler, _is_compiling_flag=True, _is_exporting_flag=True):
        yield


def _not_exporting() -> bool:
    return False
