"""Heads: what a model's epilogue gives in the place of its loss, to be differentiated by whoever called the model.

    logits                           [B, T, V], as the model computes them
    a function's values of tokens    of the logits of some tokens, [N, V], and of further tensors that have a row for each of
                                     these tokens: values of [N, ...], returned as [B, T, ...]

A head is a template like a layer's, made of the same section of the model as the epilogue, at its first use. A function is
traced with it, and both run a chunk of tokens at a time, forward and backward, so that all logits never exist at once.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import sympy
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from megacompile.errors import UnsupportedError
from megacompile.frontend.build import with_result
from megacompile.frontend.model_graph import ModelGraph
from megacompile.frontend.split import Section, needs_gradient
from megacompile.frontend.template import Call, Source, Template

LOGITS = "logits"
#: Tokens of which logits exist at a time, of a head that is a function. (As of the fused loss.)
CHUNK_TOKENS = 2048
#: Functions of one model: each is traced and compiled.
MOST_FUNCTIONS = 32

#: By name: the dtype of a tensor that a function takes beside logits, and its shape behind [B, T].
Described = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


class BuildTemplate(Protocol):
    """`build_template`, for the model at hand."""

    def __call__(self, name: str, section: Section, *, head: bool, tokens_at_once: int) -> Template: ...


@dataclasses.dataclass(frozen=True)
class Head:
    """`call` stands in the place of the epilogue's; `has_gradient`, of each of its outputs; `structure`, of what a function
    returns (None: logits)."""

    call: Call
    has_gradient: tuple[bool, ...]
    structure: pytree.TreeSpec | None = None


def batch_name(tensor: str) -> str:
    """Under which name a batch has a tensor that a function takes: the model may have an argument of the same name."""
    return f"of tokens: {tensor}"


class Heads:
    """Of one captured model. State: those built so far, by name; and the names of functions, by what they take."""

    def __init__(self, model: ModelGraph, epilogue: Section, logits: int, build: BuildTemplate,
                 templates: dict[str, Template]) -> None:
        self._model, self._build, self._templates = model, build, templates
        self._section = dataclasses.replace(
            epilogue, graph=with_result(epilogue.graph, logits), has_gradient=[epilogue.has_gradient[logits]], carried=[False])
        self._heads: dict[str, Head] = {}
        self._functions: dict[tuple[Callable[..., Any], Described], str] = {}

    def head(self, name: str) -> Head:
        """Raises `UnsupportedError` for one that there is not."""
        if name == LOGITS and name not in self._heads:
            self._add(name, self._section, 0)
        if name not in self._heads:
            raise UnsupportedError(f"the model has no output {name!r}: it has {', '.join(dict.fromkeys((LOGITS, *self._heads)))}")
        return self._heads[name]

    def of_function(self, function: Callable[..., Any], described: Described) -> str:
        """The name of the head that a function makes. Traced at its first use with tensors of these names and shapes.

        Raises `UnsupportedError` for a function that cannot be traced, or returns something else than rows for tokens."""
        key = function, described
        if key not in self._functions:
            if len(self._functions) >= MOST_FUNCTIONS:
                raise UnsupportedError(f"{len(self._functions)} functions of tokens have been compiled for this model: make a "
                                       "function once, outside of the loop, and pass the same one every time")
            plain = function.func if isinstance(function, functools.partial) else function
            label = getattr(plain, "__name__", type(plain).__name__).strip("<>")
            taken = {LOGITS, "loss", "prologue", "epilogue", *self._heads}
            name = next(n for n in (label, *(f"{label}_{i}" for i in range(2, MOST_FUNCTIONS + 2))) if n not in taken)
            section, structure = self._with_function(name, function, described)
            self._add(name, section, CHUNK_TOKENS, structure)
            self._functions[key] = name
        return self._functions[key]

    def _add(self, name: str, section: Section, tokens_at_once: int, structure: pytree.TreeSpec | None = None) -> None:
        env = self._model.shape_env
        known = len(env.guards)
        section = dataclasses.replace(section, name=name)
        with torch.inference_mode(False), torch.enable_grad():  # whoever asks first may want none
            template = self._build(name, section, head=True, tokens_at_once=tokens_at_once)
        added = [guard.expr for guard in env.guards[known:] if env.simplify(guard.expr) not in (sympy.true, sympy.false)]
        if added:
            raise UnsupportedError(f"{name} does one thing or another depending on sizes ({added[0]}): let it treat all alike")
        self._templates[name] = template
        self._heads[name] = Head(Call("epilogue", name, tuple(section.sources)), tuple(section.has_gradient), structure)

    def _with_function(self, name: str, function: Callable[..., Any], described: Described) -> tuple[Section, pytree.TreeSpec]:
        """The section with a function behind its logits."""
        module = with_result(self._section.graph, 0)
        graph, output = module.graph, module.graph.output_node()
        (logits,) = output.args[0]  # type: ignore[misc]
        rows, length = self._sizes()
        value = logits.meta["example_value"]
        if value.dim() != 3 or tuple(value.shape[:2]) != (rows, length):
            raise UnsupportedError(f"functions of tokens need logits of [batch, length, vocabulary]; the model's are "
                                   f"{list(value.shape)}")
        given = []
        for key, dtype, shape in described:
            with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
                given.append(graph.placeholder(f"given_{key}"))
            with self._model.fakes:
                given[-1].meta["example_value"] = torch.zeros((rows, length, *shape), dtype=dtype)
        tokenwise = _OfTokens(name, function, tuple(key for key, _, _ in described))
        values = self._trial(name, tokenwise, [logits, *given])
        with graph.inserting_before(output):
            made = graph.call_function(tokenwise, (logits, *given))
            results = [graph.call_function(_item, (made, position)) for position in range(len(values))]
        for node, example in zip(results, values, strict=True):
            node.meta["example_value"] = example
        output.args = (tuple(results),)
        module.recompile()
        assert tokenwise.structure is not None, "the trial has run"
        sources = [*self._section.sources, *(Source("batch", batch_name(key)) for key, _, _ in described)]
        return Section(name, module, sources, [needs_gradient(node) for node in results], [False] * len(results)), (
            tokenwise.structure)

    def _sizes(self) -> tuple[Any, Any]:
        """Batch and length of the capture."""
        example = next(n.meta["example_value"] for n, s in self._model.sources.items() if s.kind == "batch")
        return example.shape[0], example.shape[1]

    def _trial(self, name: str, tokenwise: _OfTokens, arguments: Sequence[fx.Node]) -> Sequence[Tensor]:
        """What the function gives for fakes."""
        try:
            unwanted = self._model.shape_env.ignore_fresh_unbacked_symbols()  # of a function that reads values, and fails
            with torch.inference_mode(False), torch.enable_grad(), self._model.fakes, unwanted:
                return tokenwise(*(node.meta["example_value"] for node in arguments))
        except UnsupportedError:
            raise
        except Exception as reason:
            cause = next(iter(str(reason).splitlines()), "") or type(reason).__name__
            raise UnsupportedError(f"the function {name} cannot be traced: {cause}; let it compute with torch functions of what "
                                   "it is given, and decide nothing by values") from reason


class _OfTokens:
    """A function of tokens as one of sequences: logits and each tensor, [B, T, ...], go in as [B * T, ...], and what comes
    back is [B, T, ...]. State: the structure of what it returned last. (fx prints the names that functions have.)"""

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
                raise UnsupportedError(f"the function {self.__name__} returns {what} for logits of {list(logits.shape)}: let it "
                                       "return a value for each token, with as many rows as the logits, and reduce it outside")
        return tuple(value.unflatten(0, (rows, length)).clone(memory_format=torch.contiguous_format) for value in values)


def _item(values: Sequence[Tensor], position: int) -> Tensor:
    return values[position]


def described(tensors: Mapping[str, Tensor]) -> Described:
    """What a function takes beside logits: tensors [B, T, ...]."""
    return tuple((name, tensor.dtype, tuple(tensor.shape[2:])) for name, tensor in sorted(tensors.items()))
