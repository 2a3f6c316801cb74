"""Heads: what a model's epilogue can return instead of its loss, to be differentiated by the caller.

    logits                           [B, T, V], as the model computes them
    last_hidden_state                [B, T, H], the input of the product that makes logits
    hidden_states                    logits and the last hidden state, for programs that return the states of all layers
    a function's values of tokens    from the logits of some tokens, [N, V], and other tensors with a row for each of these
                                     tokens: values of [N, ...], returned as [B, T, ...]

A head is a template like a layer's, made from the same section of the model as the epilogue, at its first use. A function is
traced together with it, and both run a chunk of tokens at a time, forward and backward, so that all logits never exist at
once.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch

from megacompile.compat.core import pytree
from megacompile.errors import UnsupportedError
from megacompile.frontend.graph.split import Section
from megacompile.frontend.templates.build import Renaming
from megacompile.frontend.templates.hidden_states import ALL, LAST, HiddenStates
from megacompile.frontend.templates.sizes import Condition, conditions
from megacompile.frontend.templates.template import Call, Template
from megacompile.frontend.templates.token_functions import Described, name_of, with_function
from megacompile.frontend.tracing.model_graph import ModelGraph
from megacompile.ir.token_loop import CHUNK_TOKENS

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
    """The name under which a batch has a tensor that a function takes. It differs from the tensor's own, since the model may
    have an argument of the same name."""
    return f"{_OF_TOKENS}{tensor}"


def of_tokens(name: str) -> bool:
    """Whether a name in a batch is that of a tensor that a function takes."""
    return name.startswith(_OF_TOKENS)


class Heads:
    """The heads of one captured model. State: the heads built so far, by name; and the names of functions, by what they take.
    """

    def __init__(self, model: ModelGraph, to_logits: Section, hidden: HiddenStates, build: BuildTemplate,
                 templates: dict[str, Template], renaming: Renaming) -> None:
        self._model, self._section, self._build, self._templates = model, to_logits, build, templates
        self.hidden = hidden
        self._own = {LOGITS: lambda: to_logits, LAST: hidden.last, ALL: hidden.beside_logits}
        self._renaming, self._known_guards = renaming, len(model.shape_env.guards)
        self._heads: dict[str, Head] = {}
        self._functions: dict[tuple[Callable[..., Any], Described], str] = {}

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The conditions under which the heads hold, besides the model's own: a function may depend on sizes."""
        return conditions(self._model.shape_env.guards[self._known_guards:], self._renaming)

    def head(self, name: str) -> Head:
        """Raises `UnsupportedError` for an unknown head."""
        if name in self._own and name not in self._heads:
            self._add(name, self._own[name](), 0)
        if name not in self._heads:
            there = ", ".join(dict.fromkeys((*self._own, *self._heads)))
            raise UnsupportedError(f"the model has no output {name!r}: it has {there}")
        return self._heads[name]

    def of_function(self, function: Callable[..., Any], described: Described) -> str:
        """The name of the head that a function makes. Traced at its first use with tensors of these names and shapes.

        Raises `UnsupportedError` for a function that cannot be traced, or returns something else than rows for tokens.
        """
        key = function, described
        if key not in self._functions:
            if len(self._functions) >= MOST_FUNCTIONS:
                raise UnsupportedError(f"{len(self._functions)} functions of tokens have been compiled for this model: make a "
                                       "function once, outside of the loop, and pass the same one every time")
            label = name_of(function)
            taken = {*self._own, "loss", *self._templates}
            name = next(n for n in (label, *(f"{label}_{i}" for i in range(2, MOST_FUNCTIONS + 2))) if n not in taken)
            section, structure = with_function(
                self._model, self._renaming, self._section, name, function, described, batch_name)
            self._add(name, section, CHUNK_TOKENS, structure)
            self._functions[key] = name
        return self._functions[key]

    def like(self, other: Heads, name: str) -> str:
        """The name here of a head of another capture of the same model."""
        function = next((key for key, known in other._functions.items() if known == name), None)
        return name if function is None else self.of_function(*function)

    def _add(self, name: str, section: Section, tokens_at_once: int, structure: pytree.TreeSpec | None = None) -> None:
        section = dataclasses.replace(section, name=name)
        with torch.inference_mode(False), torch.enable_grad():  # the first caller may have switched gradients off
            self._templates[name] = self._build(name, section, head=True, tokens_at_once=tokens_at_once)
        self._heads[name] = Head(Call("epilogue", name, tuple(section.sources)), tuple(section.has_gradient), structure)
