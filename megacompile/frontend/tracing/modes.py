"""Checks whether a captured graph also holds where it was not captured: in evaluation mode, for one sequence, for one token.

Models are captured in training mode at sizes of at least 2. A branch on `self.training` leaves no trace in the graph, and a
branch on a size of 1 leaves no guard, since symbolic sizes are assumed to be 2 or more. So before the first such call, the
model runs again in that mode or at that size, on fakes, and must perform the same operations. There are two ways to find them:
`torch_calls` come from a plain run on fakes, in a tenth of the time of a trace; `operations` come from a trace. Equal calls
settle the question. If they differ, or cannot be known, traces are compared."""
from __future__ import annotations

import inspect
import itertools
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode, resolve_name

from megacompile.errors import CaptureError
from megacompile.frontend.tracing.explained import TRACING_ERRORS
from megacompile.frontend.tracing.model_graph import ModelGraph
from megacompile.frontend.tracing.native_branches import as_traced

#: Broadcasting changes no value, and models skip it for a single sequence.
_BROADCASTS = frozenset({"expand", "expand_as", "broadcast_to", "contiguous"})
#: Arguments whose values tell calls apart, beside None and the ellipsis.
_CONSTANTS = (int, float, complex, bool, str, torch.dtype)
#: Functions of torch written in Python that have no branch on a size. What other such functions call is not seen.
_WITHOUT_BRANCHES = frozenset({
    "dropout", "embedding", "layer_norm", "rms_norm", "softmax", "log_softmax", "relu", "silu", "cross_entropy", "split",
    "unflatten", "pad", "einsum", "__rsub__", "__rpow__", "__pow__", "__floordiv__"})


class RecordedCall(NamedTuple):
    """An operation, with what it reads and its constants. `exact`: includes whole numbers, some of which are sizes. `operation`
    and `read`: the same in two parts, the operation with all constants, and what it reads."""

    text: str
    exact: str
    operation: str
    read: tuple[str, ...]


def alike(some: Sequence[RecordedCall], others: Sequence[RecordedCall], exact: bool) -> bool:
    """True if these are the same operations in the same order. If `exact`, whole numbers must be the same too."""
    return [each[exact] for each in some] == [each[exact] for each in others]


def torch_calls(model: nn.Module, batch: Mapping[str, Tensor], options: Mapping[str, Any],
                calls: list[RecordedCall] | None = None) -> tuple[RecordedCall, ...] | None:
    """The calls in `model(**batch, **options)` that make tensors, in order, described as by `operations`. `model` and `batch`
    are fakes. `calls`: a list to which each call is added as it is made. None if the calls cannot be known: the model does not
    run on fakes, or calls a function that may look at sizes unseen."""
    named = itertools.chain(model.named_parameters(), model.named_buffers(), batch.items())
    found = _Calls(_Labels({id(tensor): (tensor, name) for name, tensor in named}), [] if calls is None else calls)
    with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings(), as_traced(model), found:
        warnings.simplefilter("ignore")
        try:
            model(**batch, **options)
        except TRACING_ERRORS:  # such as a branch on values: the trace shows whether the model can be traced
            return None
    return tuple(found.calls) if found.all_seen else None


class _Labels:
    """Names of values: weights and inputs have their own, others are named after the operation that made them. Values stay
    alive once seen, so that no other gets their identity. State: the value and its name, by identity."""

    def __init__(self, known: dict[int, tuple[Any, str]]) -> None:
        self.known = known

    def of(self, value: Any) -> str:
        return self.known[id(value)][1] if id(value) in self.known else "?"

    def give(self, value: Any, name: str) -> None:
        self.known[id(value)] = value, name


class _Calls(TorchFunctionMode):
    """State: the calls so far (`calls`), and whether all calls were seen."""

    def __init__(self, labels: _Labels, calls: list[RecordedCall]) -> None:
        super().__init__()
        self.labels = labels
        self.calls = calls
        self.all_seen = True

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        read = [self.labels.of(value) for value in _leaves((args, kwargs)) if isinstance(value, Tensor)]
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        made = [value for value in _leaves(result) if isinstance(value, Tensor)]
        if made and (name in _BROADCASTS or function is F.dropout and _is_idle(args, kwargs or {})):
            self.labels.give(made[0], next(iter(read), "?"))
        elif made:
            self.all_seen &= not inspect.isfunction(function) or name in _WITHOUT_BRANCHES
            self.calls.append(_recorded_call(resolve_name(function) or str(function), args, kwargs or {}, read))
            for position, value in enumerate(made):
                self.labels.give(value, f"%{len(self.calls)}.{position}")
        return result


def operations(graph: ModelGraph) -> tuple[RecordedCall, ...]:
    """Every operation on tensors, in order, with what it reads: weights and inputs by name, others by the operation that made
    them."""
    calls: list[RecordedCall] = []
    _record(graph.graph, {node: source.name for node, source in graph.sources.items() if source.kind != "size"}, calls)
    return tuple(calls)


def _record(module: fx.GraphModule, labels: dict[fx.Node, str], calls: list[RecordedCall]) -> None:
    """Appends the operations of a graph whose inputs have these `labels`."""
    for node in module.graph.nodes:
        read = [labels[used] for used in node.all_input_nodes if used in labels]
        nested = [getattr(module, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr"]
        if graphs := [each for each in nested if isinstance(each, fx.GraphModule)]:
            for each in graphs:  # replaces the call: Dynamo decides whether equal layers share a region
                given = [a for a in _leaves(node.args) if not isinstance(a, str) and getattr(a, "op", "") != "get_attr"]
                inputs = zip(each.graph.find_nodes(op="placeholder"), given, strict=False)
                known = {n: labels[a] for n, a in inputs if isinstance(a, fx.Node) and a in labels}
                _record(each, known, calls)
            labels[node] = str(len(calls))
        elif node.op in ("call_function", "call_method") and _makes_tensors(node):
            if _is_idle_dropout(node) or getattr(node.target, "__name__", node.target) in _BROADCASTS:
                labels[node] = next(iter(read), "?")
                continue
            calls.append(_recorded_call(str(node.target), node.args, node.kwargs, read))
            which = f".{node.args[1]}" if node.target is operator.getitem and isinstance(node.args[1], int) else ""
            labels[node] = f"{len(calls)}{which}"


def _recorded_call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], read: Sequence[str]) -> RecordedCall:
    constants = [c for c in _leaves((args, kwargs)) if c is None or c is ... or isinstance(c, _CONSTANTS)]
    others = [c for c in constants if not isinstance(c, int) or isinstance(c, bool)]
    text, exact = (" ".join([name, *read, *map(repr, each)]) for each in (others, constants))
    return RecordedCall(text, exact, " ".join([name, *map(repr, constants)]), tuple(read))


def operation_number(label: str) -> int | None:
    """The number of the call, among those that `torch_calls` gives, that made the value with this label; None for a weight or
    an input."""
    return int(label[1:].partition(".")[0]) if label.startswith("%") else None


def _leaves(value: Any) -> Iterator[Any]:
    """The values in arguments. A slice has three, since `x[:3]` and `x[3:]` are different calls."""
    if isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _leaves(item)
    else:
        yield value


def _makes_tensors(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return any(isinstance(v, Tensor) for v in (value if isinstance(value, tuple | list) else (value,)))


def _is_idle_dropout(node: fx.Node) -> bool:
    return node.target is F.dropout and _is_idle(node.args, node.kwargs)


def _is_idle(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """True for dropout with p = 0. It has its mode among its arguments, but does nothing in either mode."""
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    return isinstance(p, int | float) and p == 0


# -------------------- Python objects that a forward changes: a graph contains their state from when it was made
def refuse_changing_state(model: nn.Module, batch: Mapping[str, Tensor], options: Mapping[str, Any]) -> None:
    """Raises `CaptureError` if `model`, a fake model, computes something else in a second call, for example because it counts
    its calls. State that it only writes (a layer's output, an auxiliary loss) is allowed."""
    first = torch_calls(model, batch, options)
    before = _plain_attributes(model)
    second = torch_calls(model, batch, options)
    if first is not None and second is not None and first != second:
        changed = (name for name, value in _plain_attributes(model).items() if before.get(name) != value)
        raise CaptureError(f"{type(model).__name__} computes something else at each call, because its forward changes "
                           f"{next(changed, 'a global')}: keep it in a buffer, and change that outside of forward")


def _plain_attributes(model: nn.Module) -> dict[str, Any]:
    return {f"{path}.{key}" if path else key: value for path, module in model.named_modules()
            for key, value in vars(module).items() if isinstance(value, int | float | str)}
