"""The return value of a model: taken apart into loss and logits once, and rebuilt around new ones in every step."""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from megacompile.compat.symbols import statically_known_true
from megacompile.errors import UnsupportedError
from megacompile.frontend.tracing.model_graph import ModelGraph

#: The field of the auxiliary loss of routers.
AUXILIARY = "aux_loss"
_OF_ROUTERS = (AUXILIARY, "router_logits")
#: Outputs of models of transformers that are ingredients of the loss or the logits.
_PARTS = frozenset({*_OF_ROUTERS, "image_hidden_states"})


@dataclasses.dataclass(frozen=True)
class OutputStructure:
    """The structure in which a model returns its loss and logits. `cls`: Tensor, tuple, list, or a mapping class built from
    keywords. `fields`: (key or position, "loss" | "logits" | "part" | "") in the model's order. A "part" is an ingredient of
    the loss or logits, and is not returned. The graph's results are those of the model: the loss, the logits, and the auxiliary
    loss of routers."""

    cls: type
    fields: tuple[tuple[Any, str], ...]

    @property
    def has_loss(self) -> bool:
        return any(role == "loss" for _, role in self.fields)

    @property
    def has_logits(self) -> bool:
        return any(role == "logits" for _, role in self.fields)

    @property
    def logits_position(self) -> int:
        """Which of the graph's results are the logits."""
        return int(self.has_loss)

    @property
    def records_routers(self) -> bool:
        """True if router logits were requested when the model was captured."""
        return any(role == "part" and key in _OF_ROUTERS for key, role in self.fields)

    def rebuild(self, loss: Tensor | None, logits: Tensor | None, **further: Any) -> Any:
        """The model's return value with this `loss` and these `logits`. Fields that were None stay None. Only a mapping class
        takes `further` fields."""
        values = {key: {"loss": loss, "logits": logits}.get(role) for key, role in self.fields}
        if issubclass(self.cls, Tensor):
            return loss if loss is not None else logits
        if issubclass(self.cls, (tuple, list)):
            return self.cls(values.values())
        return self.cls(**values, **further)


def output_structure(model: ModelGraph, name: str, other_loss: bool = False) -> tuple[OutputStructure, list[int]]:
    """The structure, and which of the graph's results are the loss, the logits and, beside logits, the auxiliary loss of
    routers, if the model returns them. The model must return one scalar, with a gradient if anything in the model has one,
    and at most one other tensor, whose first dimensions are batch and length. It may return that tensor alone if it is
    computed from the whole batch: a model without a head, whose loss the caller computes. With `other_loss`, a loss that is
    not the model's, the model must return logits, and may return only them. Raises `UnsupportedError` for anything else."""
    returned = model.returned
    trained = any(getattr(n.meta["example_value"], "requires_grad", False) for n in model.sources)
    position = {id(n.meta["example_value"]): i for i, n in enumerate(model.results) if isinstance(n, fx.Node)}
    fields, found = [], {}
    for key, value in _items(returned, name):
        if value is None or key in _PARTS:
            fields.append((key, "" if value is None else "part"))
            if key == AUXILIARY and id(value) in position:
                found[key] = position[id(value)]
            continue
        if not isinstance(value, Tensor):
            raise UnsupportedError(f"{name} returns {key}={type(value).__name__}: return loss and logits only")
        role = _role(value, trained)
        if role is None or role in found or id(value) not in position:
            raise UnsupportedError(
                f"{name} returns {key} of shape {list(value.shape)} besides a scalar loss and [batch, length, vocabulary] "
                "logits: switch such outputs off in its config, or return loss and logits only")
        found[role] = position[id(value)]
        fields.append((key, role))
    if other_loss and ("logits" not in found or ("loss" not in found and not isinstance(returned, Tensor))):
        raise UnsupportedError(f"{name} must return logits for loss=, and a loss field if it returns a structure: return only "
                               "logits, or a structure that also has a loss")
    if "loss" not in found and not other_loss and not _whole_batch_makes(model, found.get("logits"), trained):
        raise UnsupportedError(
            f"{name} returns no scalar loss that depends on what is trained: return the loss when labels are given, and "
            "compute it with some parameter that has requires_grad=True")
    read = ("loss", "logits", AUXILIARY) if "logits" in found else ("loss",)  # only values of logits come with it
    return OutputStructure(type(returned), tuple(fields)), [found[role] for role in read if role in found]


def has_rows_of_tokens(model: ModelGraph, position: int) -> bool:
    """True if the graph's result at `position` has a row for each token: [batch, length, ...], not [batch, classes]."""
    shapes = [node.meta["example_value"].shape for node, source in model.sources.items() if source.kind == "batch"]
    lengths = [shape[1] for shape in shapes if len(shape) > 1 and isinstance(shape[1], torch.SymInt)]
    result = model.results[position]
    assert isinstance(result, fx.Node), "a tensor"
    _, *rows = result.meta["example_value"].shape
    return bool(rows) and any(statically_known_true(rows[0] == length) for length in lengths)


def _items(returned: Any, name: str) -> Sequence[tuple[Any, Any]]:
    """The values that a model returns, by key or position. Raises `UnsupportedError` for another structure."""
    if isinstance(returned, Tensor):
        return [(0, returned)]
    if isinstance(returned, (tuple, list)) and not hasattr(returned, "_fields"):
        return list(enumerate(returned))
    if hasattr(returned, "items"):
        return list(returned.items())
    raise UnsupportedError(f"{name} returns a {type(returned).__name__}: return a tensor, tuple or ModelOutput")


def _role(value: Tensor, trained: bool) -> str | None:
    """The role of a returned tensor, by its shape: "loss", "logits", or None. `trained`: the model has gradients."""
    if not value.is_floating_point():
        return None
    if value.dim() == 0 and value.requires_grad == trained:
        return "loss"
    rows = value.dim() >= 3 or (value.dim() == 2 and isinstance(value.shape[0], torch.SymInt))  # of a classifier
    return "logits" if rows else None


def _whole_batch_makes(model: ModelGraph, position: int | None, trained: bool) -> bool:
    """True if a result is computed from the whole batch. If nothing reads the labels, the loss was probably forgotten."""
    if position is None or model.results[position].meta["example_value"].requires_grad != trained:
        return False
    return all(any(user not in model.sources for user in node.users)  # not its sizes alone
               for node, source in model.sources.items() if node.op == "placeholder" and source.kind == "batch")
