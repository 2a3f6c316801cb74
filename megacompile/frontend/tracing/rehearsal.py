"""A plain run of a model on fakes before it is traced, in a small part of the time: it tells which trace would be of no use.

A model whose layers do not all call our attention is traced with its own. One whose layers run more than once is traced with
each call apart (see `trace.py`). Without this run, both would be known at the end of a first trace.
"""
from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megacompile.errors import CaptureError, UnsupportedError
from megacompile.frontend.tracing.foreign_errors import TRACING_ERRORS
from megacompile.frontend.tracing.layers import LayerStack
from megacompile.frontend.tracing.native_branches import as_traced


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """What a run has shown. `without_attention`: a layer ran that did not call our attention, or our attention refused what it
    was given; `again`: a layer ran more than once. Both are False where the run does not tell."""

    without_attention: bool = False
    again: bool = False


class _AttentionCalls(TorchDispatchMode):
    """State: how many calls of our attention there were."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        self.count += function is torch.ops.megacompile.attention.default
        return function(*args, **(kwargs or {}))


def rehearse(model: nn.Module, batch: Mapping[str, Any], options: Mapping[str, Any], stack: LayerStack) -> Rehearsal:
    """Runs `model(**batch, **options)`. `model`, whose `stack` it is, and `batch` are fakes."""
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
    except TRACING_ERRORS:  # a branch on values, say: whether the model can be traced, its trace says
        return Rehearsal()
    finally:
        for handle in handles:
            handle.remove()
    return Rehearsal(bool(idle), any(count > 1 for count in visits.values()))
