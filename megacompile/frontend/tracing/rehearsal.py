"""A plain run of a model on fakes before it is traced. It takes a small part of a trace's time, and shows which traces would
be useless.

A model whose layers do not all call our attention is traced with its own. If layers run more than once, each call is traced
separately (see `trace.py`). Without this run, both would only be known at the end of a first trace.
"""
from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megacompile.compat.core import TorchDispatchMode
from megacompile.errors import CaptureError, UnsupportedError
from megacompile.frontend.tracing.foreign_errors import TRACING_ERRORS
from megacompile.frontend.tracing.layers import LayerStack
from megacompile.frontend.tracing.native_branches import as_traced


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """What a run has shown. `without_attention`: a layer ran without calling our attention, or our attention refused its
    arguments; `again`: a layer ran more than once. Both are False if the run cannot tell."""

    without_attention: bool = False
    again: bool = False


class _AttentionCalls(TorchDispatchMode):
    """State: the number of calls of our attention."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        self.count += function is torch.ops.megacompile.attention.default
        return function(*args, **(kwargs or {}))


def rehearse(model: nn.Module, batch: Mapping[str, Any], options: Mapping[str, Any], stack: LayerStack) -> Rehearsal:
    """Runs `model(**batch, **options)`, all fakes; `stack` is the model's."""
    calls, before, visits = _AttentionCalls(), Counter[nn.Module](), Counter[nn.Module]()
    idle: set[nn.Module] = set()

    def enter(layer: nn.Module, args: Any) -> None:
        before[layer] = calls.count

    def leave(layer: nn.Module, args: Any, result: Any) -> None:
        visits[layer] += 1
        if calls.count == before[layer]:
            idle.add(layer)

    handles = [handle for layer in stack.layers
               for handle in (layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave))]
    try:
        with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings(), as_traced(model), calls:
            warnings.simplefilter("ignore")
            model(**batch, **options)
    except (UnsupportedError, CaptureError):
        return Rehearsal(without_attention=True)
    except TRACING_ERRORS:  # such as a branch on values: the trace shows whether the model can be traced
        return Rehearsal()
    finally:
        for handle in handles:
            handle.remove()
    return Rehearsal(bool(idle), any(count > 1 for count in visits.values()))
