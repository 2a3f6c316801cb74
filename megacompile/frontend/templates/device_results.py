"""Results that a device's kernels return in other dtypes or shapes than the CPU's kernels, on which graphs are traced:
statistics of normalizations, and values that only the CPU's backward needs."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from megacompile.compat.core import FakeTensorMode, pytree

aten = torch.ops.aten

_DIFFERING = {
    # For bf16 values the CPU keeps means and deviations in bf16, CUDA in float32.
    aten.native_layer_norm.default, aten._native_batch_norm_legit.no_stats, aten._native_batch_norm_legit_functional.default,
    # The CPU keeps exponentials for the backward; CUDA computes them again, and returns an empty tensor.
    aten.log_sigmoid_forward.default,
}


def correct_results(module: fx.GraphModule, fakes: FakeTensorMode, device_type: str) -> None:
    """Gives `meta["val"]` of nodes the dtypes and shapes that they have on `device_type`. Compiled code trusts the promised
    dtype: it would read the bits of float32 as bf16."""
    if device_type == "cpu":
        return
    changed: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.target in _DIFFERING:
            found = _evaluated(node, fakes, torch.device(device_type))
        elif changed.intersection(node.all_input_nodes) and node.op == "call_function":
            found = _evaluated(node, fakes, torch.device("cpu"))
        else:
            continue
        if _forms(found) != _forms(node.meta["val"]):
            node.meta["val"] = _on(found, fakes, torch.device("cpu"))
            changed.add(node)


def _evaluated(node: fx.Node, fakes: FakeTensorMode, device: torch.device) -> Any:
    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: _on(argument.meta["val"], fakes, device))
    with fakes:
        return target(*args, **kwargs)


def _on(value: Any, fakes: FakeTensorMode, device: torch.device) -> Any:
    """Fakes of the same shapes on a device, which need not exist: nothing is copied."""
    with fakes:
        return pytree.tree_map_only(
            Tensor, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device), value)


def _forms(value: Any) -> list[tuple[torch.dtype, str] | None]:
    """Dtypes and shapes. Sizes are compared as text: comparing symbols would add guards."""
    return [(each.dtype, str(tuple(each.shape))) if isinstance(each, Tensor) else None for each in pytree.tree_leaves(value)]
