"""Makes a model take the same branches in a trace and in a plain run on fakes, if it asks how it is run.

Dynamo reports that it exports. transformers then leaves out kernels and shortcuts that only hold for some values, which is
right for a graph of any batch. But a model's own code also avoids ops that other export formats lack: layers with a gated
delta rule invert a triangular matrix in 63 steps of Python, where native PyTorch calls a solver. Their graph has many times
the operations, and takes accordingly longer to trace, to differentiate and to run.
"""
from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from torch import nn

from megacompile.compat.core import reported_as_export
from megacompile.compat.hugging_face import replaced
from megacompile.frontend.tracing.recurrent_mixers import mixers_as_ops


@contextlib.contextmanager
def native_branches(model: nn.Module) -> Iterator[None]:
    """A context in which the code of `model`'s modules sees that it is not exported, as in a native run, and its recurrent
    mixers call our ops. Functions of transformers that it calls, such as masks and kernels, query this separately."""
    own = {type(module).__module__ for module in model.modules()}
    with mixers_as_ops(model), contextlib.ExitStack() as patches:
        for name in own:
            # What a module calls to ask whether it is exported.
            if hasattr(sys.modules.get(name), "is_torchdynamo_exporting"):
                patches.enter_context(replaced(sys.modules[name], is_torchdynamo_exporting=_not_exporting))
        yield


@contextlib.contextmanager
def as_traced(model: nn.Module) -> Iterator[None]:
    """A context in which `model` takes the same branches in a plain run as in a trace."""
    with native_branches(model), reported_as_export():
        yield


def _not_exporting() -> bool:
    return False
