"""Hidden states: the input of the first layer, each layer's output, and the input of the model's output embeddings.

Their positions are read from the structure: a call's first output, and the input of the product that makes logits. Whether
these are what the model itself means by `output_hidden_states` is checked once, by running it on fakes, when they are first
requested.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from megacompile.compat.core import LazyGraphModule, builtin_linear, pytree
from megacompile.errors import UnsupportedError
from megacompile.frontend.graph.split import Section, needs_gradient, owned
from megacompile.frontend.templates.build import Condition, Renaming, conditions
from megacompile.frontend.templates.template import Call, Template
from megacompile.frontend.templates.token_functions import Described, name_of, with_function
from megacompile.frontend.tracing.explained import TRACING_ERRORS
from megacompile.frontend.tracing.model_graph import ModelGraph
from megacompile.ir.token_loop import CHUNK_TOKENS

#: Outputs of programs: only the last hidden state; and those of all layers, with the logits.
LAST, ALL = "last_hidden_state", "hidden_states"
_PRODUCTS = (F.linear, builtin_linear)


@dataclasses.dataclass(frozen=True)
class HiddenStates:
    """The hidden states of one captured model. `sections`: prologue and layers; `to_logits`: the epilogue that only returns
    logits, or the last hidden states if the model has no head; `fake_model`, `batch`: the model's fakes."""

    name: str
    fake_model: nn.Module
    batch: Mapping[str, Tensor]
    sections: Sequence[Section]
    to_logits: Section

    def last(self) -> Section:
        """The epilogue that returns the last hidden states, [B, T, H]. Raises `UnsupportedError` if they cannot be found."""
        return _with_results(self.to_logits, [self._last()])

    def beside_logits(self) -> Section:
        """The epilogue that returns logits and, if the model has a head, the last hidden states. Raises `UnsupportedError` if
        the model defines its hidden states in another way."""
        self._check()
        (logits,) = self.to_logits.graph.graph.output_node().all_input_nodes
        return self.to_logits if self._head() is None else _with_results(self.to_logits, [logits, self._last()])

    def _head(self) -> Any:
        """The module that makes logits from the last hidden states; None if the model has none."""
        find: Any = getattr(self.fake_model, "get_output_embeddings", None)  # torch's own modules have none
        return None if find is None else find()

    def _last(self) -> fx.Node:
        head = self._head()
        (logits,) = self.to_logits.graph.graph.output_node().all_input_nodes
        if head is None:
            return logits
        # Tied parameters are listed under their first name.
        names = {id(parameter): name for name, parameter in self.fake_model.named_parameters()}
        placeholders = self.to_logits.graph.graph.find_nodes(op="placeholder")
        weights = [node for node, source in zip(placeholders, self.to_logits.sources, strict=True)
                   if source.kind == "parameter" and source.name == names.get(id(getattr(head, "weight", None)))]
        products = [user for weight in weights for user in weight.users if user.target in _PRODUCTS and user.args[1] is weight]
        if len(products) != 1:
            raise UnsupportedError(f"{self.name} does not make its logits by one product with its output "
                                   "embeddings: stream the model without its head (AutoModel) for its hidden states")
        return products[0].args[0]  # type: ignore[return-value]

    def _check(self) -> None:
        """Raises `UnsupportedError` unless the model's own hidden states are the ones that calls pass on."""
        prologue, *layers = self.sections
        alone = sum(prologue.carried) == 1 and all(len(layer.has_gradient) == 1 for layer in layers)
        if not alone or not self._match_the_model():
            raise UnsupportedError(f"{self.name} returns hidden states that are not the outputs of its layers, one for each, "
                                   "or returns none: read them before the model is streamed")

    def _match_the_model(self) -> bool:
        """Runs the fake model. True if it returns exactly the tensors that enter its first layer, leave all layers but the
        last, and enter its head."""
        given: list[Tensor] = []
        made: list[Tensor] = []
        read: list[Tensor] = []
        calls = [section.name for section in self.sections[1:]]  # a layer is listed as often as it runs
        layers = {name: self.fake_model.get_submodule(name) for name in calls}
        head = self._head()
        hooks = [layers[calls[0]].register_forward_pre_hook(lambda _, args: given.append(args[0])),
                 *(each.register_forward_hook(lambda _, args, output: made.append(_first(output))) for each in layers.values())]
        hooks += [] if head is None else [head.register_forward_pre_hook(lambda _, args: read.append(args[0]))]
        fakes = next(self.fake_model.parameters()).fake_mode  # type: ignore[attr-defined]
        try:
            with fakes, torch.no_grad():
                returned = self.fake_model(**{key: torch.zeros(x.shape, dtype=x.dtype) for key, x in self.batch.items()},
                                           output_hidden_states=True)
        except TRACING_ERRORS:  # the model has no such argument
            return False
        finally:
            for hook in hooks:
                hook.remove()
        found = [*given[:1], *made[:-1], *(read if head is not None else [_first(returned)])]
        meant = getattr(returned, "hidden_states", None) or ()
        return len(made) == len(calls) and len(meant) == len(found) and all(map(_same_memory, meant, found))


def _first(returned: Any) -> Any:
    return returned if isinstance(returned, Tensor) else returned[0]


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """True if two fakes are the same view of one storage. (A slice of all positions is a different tensor.)"""
    return (a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.shape == b.shape and a.stride() == b.stride()
            and a.storage_offset() == b.storage_offset())


def _with_results(section: Section, results: Sequence[fx.Node]) -> Section:
    """A section with only these of its values as results, without the inputs that only others need."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in section.graph.graph.nodes:
        if node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
        if all(result in copies for result in results):
            break
    graph.output(owned(graph, [copies[result] for result in results]))
    placeholders = graph.find_nodes(op="placeholder")
    sources = [source for node, source in zip(placeholders, section.sources, strict=True) if node.users]
    for node in placeholders:
        if not node.users:
            graph.erase_node(node)
    return Section(section.name, LazyGraphModule(section.graph, graph), sources, [needs_gradient(n) for n in results],
                   [False] * len(results))


# -------------------- Heads: what a model's epilogue can return instead of its loss, to be differentiated by the caller
#
#     logits                           [B, T, V], as the model computes them
#     last_hidden_state                [B, T, H], the input of the product that makes logits
#     hidden_states                    logits and the last hidden state, for programs that return the states of all layers
#     a function's values of tokens    from the logits of some tokens, [N, V], and other tensors with a row for each of these
#                                      tokens: values of [N, ...], returned as [B, T, ...]
#
# A head is a template like a layer's, made from the same section of the model as the epilogue, at its first use. A function is
# traced together with it, and both run a chunk of tokens at a time, forward and backward, so that all logits never exist at
# once.
LOGITS = "logits"
#: Limit of functions for one model: each is traced and compiled.
MOST_FUNCTIONS = 32
_OF_TOKENS = "of tokens: "


class BuildTemplate(Protocol):
    """`build_template` with the model's own arguments filled in."""

    def __call__(self, name: str, section: Section, *, head: bool, tokens_at_once: int) -> Template: ...


@dataclasses.dataclass(frozen=True)
class Head:
    """`call` replaces the epilogue's call; `has_gradient`: one bool for each of its outputs; `structure`: of what a function
    returns (None: logits)."""

    call: Call
    has_gradient: tuple[bool, ...]
    structure: pytree.TreeSpec | None = None


def batch_name(tensor: str) -> str:
    """The name in a batch of a tensor that a function takes. It differs from the tensor's name, since the model may have an
    argument of that name."""
    return f"{_OF_TOKENS}{tensor}"


def of_tokens(name: str) -> bool:
    """True if a name in a batch is the name of a tensor that a function takes."""
    return name.startswith(_OF_TOKENS)


class Heads:
    """The heads of one captured model. State: the heads built so far, by name; and the names of functions, by the tensors that
    they take."""

    def __init__(self, model: ModelGraph, to_logits: Section, to_auxiliary: Section | None, hidden: HiddenStates,
                 build: BuildTemplate, templates: dict[str, Template], renaming: Renaming) -> None:
        self._model, self._sections, self._build, self._templates = model, (to_logits, to_auxiliary), build, templates
        self.hidden = hidden
        self._own = {LOGITS: lambda: to_logits, LAST: hidden.last, ALL: hidden.beside_logits}
        self._renaming, self._known_guards = renaming, len(model.shape_env.guards)
        self._heads: dict[str, Head] = {}
        self._functions: dict[tuple[Callable[..., Any], Described, bool], str] = {}

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The conditions under which the heads hold, besides the model's: a function may depend on sizes."""
        return conditions(self._model.shape_env.guards[self._known_guards:], self._renaming)

    def head(self, name: str) -> Head:
        """The head of this name. Raises `UnsupportedError` if there is none."""
        if name in self._own and name not in self._heads:
            self._add(name, self._own[name](), 0)
        if name not in self._heads:
            there = ", ".join(dict.fromkeys((*self._own, *self._heads)))
            raise UnsupportedError(f"the model has no output {name!r}: it has {there}")
        return self._heads[name]

    @property
    def has_auxiliary(self) -> bool:
        """True if the model returns an auxiliary loss of routers."""
        return self._sections[1] is not None

    def of_function(self, function: Callable[..., Any], described: Described, auxiliary: bool = False) -> str:
        """The name of the head of a function. Traced at its first use with tensors of these names and shapes. With `auxiliary`,
        a last value of each token is the auxiliary loss of its micro-batch. Raises `UnsupportedError` for a function that
        cannot be traced, or that does not return rows for tokens."""
        key = function, described, auxiliary
        if key not in self._functions:
            if len(self._functions) >= MOST_FUNCTIONS:
                raise UnsupportedError(f"{len(self._functions)} functions of tokens have been compiled for this model: make a "
                                       "function once, outside of the loop, and pass the same one every time")
            label = name_of(function)
            taken = {*self._own, "loss", *self._templates}
            name = next(n for n in (label, *(f"{label}_{i}" for i in range(2, MOST_FUNCTIONS + 2))) if n not in taken)
            section = self._sections[auxiliary]
            assert section is not None, "the model has no auxiliary loss"
            section, structure = with_function(self._model, self._renaming, section, name, function, described, batch_name)
            self._add(name, section, CHUNK_TOKENS, structure)
            self._functions[key] = name
        return self._functions[key]

    def like(self, other: Heads, name: str) -> str:
        """Maps a head's name from another capture of the same model."""
        function = next((key for key, known in other._functions.items() if known == name), None)
        return name if function is None else self.of_function(*function)

    def _add(self, name: str, section: Section, tokens_at_once: int, structure: pytree.TreeSpec | None = None) -> None:
        section = dataclasses.replace(section, name=name)
        with torch.inference_mode(False), torch.enable_grad():  # the first caller may have switched gradients off
            self._templates[name] = self._build(name, section, head=True, tokens_at_once=tokens_at_once)
        self._heads[name] = Head(Call("epilogue", name, tuple(section.sources)), tuple(section.has_gradient), structure)
