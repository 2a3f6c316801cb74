"""Refuses tokens without an embedding, and labels without a logit.

On a GPU, a kernel that reads one would make the device useless to the process."""
from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from megacompile.errors import MegacompileError
from megacompile.frontend.captured import CapturedModel

#: How classes of transformers end whose integer labels are classes, of a row or of a token.
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")


class _Kind(NamedTuple):
    """What ids stand for: the word for one, and for several; what helps if the model lacks one."""

    one: str
    several: str
    remedy: str


_TOKENS = _Kind("token", "tokens", "use the model's own tokenizer, or call resize_token_embeddings() before stream()")
_CLASSES = _Kind("class", "classes", "give num_labels when you make or load the model")


def check_ids(name: str, model: nn.Module, captured: CapturedModel, inputs: Mapping[str, Tensor]) -> None:
    """Raises `MegacompileError` for a token without an embedding, or a label without a logit. Models that read images may have
    tokens outside of their embedding, and the user's own loss may read labels in its own way."""
    if not captured.image_positions:
        _check(name, inputs, "input_ids", _vocabulary_size(model, "get_input_embeddings"), _TOKENS)
    if captured.token_loss:
        return
    if (classes := _class_count(name, model)) is not None:
        _check(name, inputs, "labels", classes, _CLASSES)
    else:
        _check(name, inputs, "labels", _vocabulary_size(model, "get_output_embeddings"), _TOKENS)


def _check(name: str, inputs: Mapping[str, Tensor], key: str, size: int | None, kind: _Kind) -> None:
    tensor = inputs.get(key)
    if size is None or tensor is None or tensor.is_floating_point():
        return
    # Negative labels mark positions that do not count.
    outside = [each for each in map(int, tensor.aminmax()) if each >= size or (each < 0 and key == "input_ids")]
    if outside:
        raise MegacompileError(f"{name}: {key} has the {kind.one} {outside[-1]}, and the model has only the {kind.several} "
                               f"0 to {size - 1}: {kind.remedy}")


def _vocabulary_size(model: nn.Module, method: str) -> int | None:
    """How many tokens the embedding or the head has that a method of transformers returns. None if the model has no such
    method, or if the method returns another kind of module."""
    with contextlib.suppress(NotImplementedError):  # transformers raises it for models without an embedding
        match getattr(model, method, lambda: None)():
            case nn.Embedding() as table:
                return table.num_embeddings
            case nn.Linear() as head:
                return head.out_features
    return None


def _class_count(name: str, model: nn.Module) -> int | None:
    """How many classes a classifier of transformers has; None for another model, and for one whose labels are numbers or sets
    of classes."""
    config: Any = getattr(model, "config", None)
    if not name.endswith(_CLASSIFIERS) or config is None or config.num_labels < 2:
        return None
    return config.num_labels if config.problem_type in (None, "single_label_classification") else None
