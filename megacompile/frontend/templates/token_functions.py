"""Functions of tokens: traced after a model's logits, as a head of its own or instead of its loss.

A function gets logits [N, V] of some tokens, and rows of other tensors for the same tokens, and returns values with a row for
each. It sees what the model computes in sequences, [B, T, ...], as B * T tokens; `chunk_tokens` then runs both a chunk at a
time.
"""
from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.compat.core import pytree
from megacompile.errors import UnsupportedError, first_line
from megacompile.frontend.graph.loss import DENOMINATOR
from megacompile.frontend.graph.split import Section, needs_gradient
from megacompile.frontend.templates.build import LOSSES_OF_TOKENS, Renaming, with_results
from megacompile.frontend.templates.joint import cut_graph, forward_graph
from megacompile.frontend.templates.template import Source
from megacompile.frontend.tracing.explained import TRACING_ERRORS
from megacompile.frontend.tracing.model_graph import ModelGraph
from megacompile.ir.tokenwise import across_tokens
from megacompile.losses import IGNORED, leaves_out_ignored

#: Tensors that a function takes besides logits: name, dtype, and shape after [B, T].
Described = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
#: The tensor that says which tokens may be left out.
TARGETS = ("targets", torch.int64, ())


def described(tensors: Mapping[str, Tensor]) -> Described:
    """Descriptions of the tensors [B, T, ...] that a function takes besides logits."""
    return tuple((name, tensor.dtype, tuple(tensor.shape[2:])) for name, tensor in sorted(tensors.items()))


def taken_by_loss(function: Callable[..., Any], example: Mapping[str, Tensor]) -> Described:
    """The tensors that a loss takes besides logits: its parameters after the first, as in `example`. Those that are not in it
    are [B, T]: `labels` are int64, all others float32."""
    names = list(inspect.signature(function).parameters)[1:]
    return tuple((name, example[name].dtype, tuple(example[name].shape[2:])) if name in example else
                 (name, torch.int64 if name == "labels" else torch.float32, ()) for name in names)


def filling(function: Callable[..., Any], tensor: str) -> int:
    """The value in empty slots of a tensor that a function takes."""
    return IGNORED if tensor == TARGETS[0] and leaves_out_ignored(function) else 0


def name_of(function: Callable[..., Any]) -> str:
    plain = function.func if isinstance(function, functools.partial) else function
    return str(getattr(plain, "__name__", type(plain).__name__)).strip("<>")


def with_function(model: ModelGraph, renaming: Renaming, section: Section, name: str, function: Callable[..., Any],
                  described: Described, in_batch: Callable[[str], str] = str) -> tuple[Section, pytree.TreeSpec]:
    """Turns a section that computes logits into one that computes a function of them. Returns it and the structure of the
    values. If the section also computes a number, an auxiliary loss, each token has it as a last value. `in_batch`: the
    name in a batch of a tensor that the function takes. Raises `UnsupportedError` for a function that cannot be traced,
    does not return rows for tokens, or computes a token's value from other tokens: micro-batches and chunks would each see
    only some of them."""
    module = with_results(section, range(len(section.has_gradient))).graph
    graph, output = module.graph, module.graph.output_node()
    logits, *numbers = output.all_input_nodes
    example = next(n.meta["example_value"] for n, s in model.sources.items() if s.kind == "batch")
    rows, length = example.shape[:2]
    value = logits.meta["example_value"]
    if value.dim() != 3 or tuple(value.shape[:2]) != (rows, length):
        raise UnsupportedError(f"functions of tokens need logits of [batch, length, vocabulary]; the model's are "
                               f"{list(value.shape)}: let its forward return those of all tokens")
    given = [_placeholder(model, graph, f"given_{key}", (rows, length, *shape), dtype) for key, dtype, shape in described]
    tokenwise = _OfTokens(name, function, tuple(key for key, _, _ in described))
    values = _trial(model, name, tokenwise, [logits, *given])
    with graph.inserting_before(output):
        made = graph.call_function(tokenwise, (logits, *given))
        results = [graph.call_function(operator.getitem, (made, position)) for position in range(len(values))]
        results += [graph.call_function(_of_each_token, (logits, number)) for number in numbers]
    with model.fakes, torch.enable_grad():
        values = [*values, *(_of_each_token(value, number.meta["example_value"]) for number in numbers)]
    for node, example in zip(results, values, strict=True):
        node.meta["example_value"] = example
    output.args = (tuple(results),)
    module.recompile()
    if leaves_out_ignored(function) and TARGETS in described:
        module.meta["targets"] = len(section.sources) + described.index(TARGETS)
    assert tokenwise.structure is not None, "the trial has run"
    sources = [*section.sources, *(Source("batch", in_batch(key)) for key, _, _ in described)]
    gradients = [needs_gradient(node) for node in results]
    _check_alone(model, renaming, name, module, len(values) - len(numbers))
    return Section(name, module, sources, gradients, [False] * len(results)), tokenwise.structure


def _of_each_token(logits: Tensor, number: Tensor) -> Tensor:
    """A number as a value of each token, float32 [B, T]."""
    return torch.zeros_like(logits[..., 0], dtype=torch.float32) + number


def _check_alone(model: ModelGraph, renaming: Renaming, name: str, module: fx.GraphModule, count: int) -> None:
    """Raises `UnsupportedError` if one of the first `count` results of a token depends on other tokens."""
    traced = forward_graph(module, model.fakes, LOSSES_OF_TOKENS)
    mixing = across_tokens(cut_graph(traced.graph, traced.inputs, traced.outputs[:count]).graph, renaming)
    if mixing is not None:
        raise UnsupportedError(f"the function {name} does not compute each token alone, or {mixing.target} is not known to: "
                               "compute that part outside, from what the function returns or from the model's logits")


def with_loss(model: ModelGraph, renaming: Renaming, logits: Section, function: Callable[..., Any],
              described: Described) -> Section:
    """The epilogue that returns the sum of a function's values of tokens over the loss denominator, and the logits. Raises
    `UnsupportedError` as `with_function` does, and for a function that does not return one differentiable value per token."""
    name = name_of(function)
    section, _ = with_function(model, renaming, logits, name, function, described)
    graph, output = section.graph.graph, section.graph.graph.output_node()
    values = output.all_input_nodes
    if len(values) != 1 or values[0].meta["example_value"].dim() != 2 or not section.has_gradient[0]:
        raise UnsupportedError(f"the loss {name} must return one differentiable value for each token: "
                               "return a tensor with as many elements as logits have rows")
    loss_denominator = _placeholder(model, graph, "loss_denominator", (), torch.float32)
    (value,) = values
    ((scores, *_),) = (made.all_input_nodes for made in value.all_input_nodes)
    with graph.inserting_before(output):
        total = graph.call_function(torch.sum, (value,), {"dtype": torch.float32})
        loss = graph.call_function(operator.truediv, (total, loss_denominator))
    with model.fakes, torch.enable_grad():
        loss.meta["example_value"] = value.meta["example_value"].sum(dtype=torch.float32)
    output.args = ((loss, scores),)
    section.graph.recompile()
    return Section("epilogue", section.graph, [*section.sources, DENOMINATOR], [True, logits.has_gradient[0]], [False, False])


def _placeholder(model: ModelGraph, graph: fx.Graph, name: str, shape: Sequence[Any], dtype: torch.dtype) -> fx.Node:
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        node = graph.placeholder(name)
    with model.fakes:
        node.meta["example_value"] = torch.zeros(tuple(shape), dtype=dtype)
    return node


def _trial(model: ModelGraph, name: str, tokenwise: _OfTokens, arguments: Sequence[fx.Node]) -> Sequence[Tensor]:
    """The function's result for fakes."""
    try:
        unwanted = model.shape_env.ignore_fresh_unbacked_symbols()  # left by a function that reads values, and fails
        with torch.inference_mode(False), torch.enable_grad(), model.fakes, unwanted:
            return tokenwise(*(node.meta["example_value"] for node in arguments))
    except UnsupportedError:
        raise
    except TRACING_ERRORS as reason:
        raise UnsupportedError(f"the function {name} cannot be traced: {first_line(reason)}; let it use only torch "
                               "functions of its arguments, and let no branch depend on values") from reason


class _OfTokens:
    """A function of tokens, wrapped as a function of sequences: logits and each tensor go in as [B, T, ...], the function sees
    [B * T, ...], and its results come back as [B, T, ...]. State: the structure of its last result. (fx prints the names that
    functions have.)"""

    __module__ = __name__

    def __init__(self, name: str, function: Callable[..., Any], names: tuple[str, ...]) -> None:
        self.__name__ = self.__qualname__ = name if name.isidentifier() else "function"
        self.function, self.names = function, names
        self.structure: pytree.TreeSpec | None = None

    def __call__(self, logits: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        rows, length = logits.shape[:2]
        flat = {name: tensor.flatten(0, 1) for name, tensor in zip(self.names, tensors, strict=True)}
        values, self.structure = pytree.tree_flatten(self.function(logits.flatten(0, 1), **flat))
        for value in values:
            if not isinstance(value, Tensor) or value.dim() < 1 or value.shape[0] != rows * length:
                what = f"of {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise UnsupportedError(f"the function {self.__name__} returns {what}: let it return a value for each token, "
                                       "with as many rows as the logits, and reduce it outside")
        return tuple(value.unflatten(0, (rows, length)).clone(memory_format=torch.contiguous_format) for value in values)
