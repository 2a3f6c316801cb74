"""What a user passes to a streamed model -> the batch that a program runs on. Honoured or refused, never ignored."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.errors import UnsupportedError
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.template import TemplateInput

#: Arguments whose value changes nothing that a streamed model does, when they have one of these values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_cache": (None, False, True), "return_dict": (None, True), "output_attentions": (None, False),
    "output_hidden_states": (None, False), "output_router_logits": (None, False), "past_key_values": (None,),
    "cache_position": (None,),
}


@dataclass(frozen=True)
class Arguments:
    """A call of the model, taken apart. `inputs`: the batch arguments that were given, in the model's order, tensors of
    [batch, length, ...]; `normaliser`: the number of target tokens to divide by, or None if there are no labels; `padding`,
    bool [batch, length]: of which tokens no value is to be seen; `kept`: of how many last positions logits are, 0 for all."""

    inputs: dict[str, Tensor]
    normaliser: Tensor | None
    has_labels: bool
    padding: Tensor | None = None
    kept: int = 0


def batch_types(captured: CapturedModel) -> dict[str, TemplateInput]:
    """Shape and dtype of each batch input in the captured graphs."""
    described = (pair for call in captured.calls for pair in zip(call.sources, captured.templates[call.template].inputs,
                                                                 strict=True))
    return {source.name: x for source, x in described if source.kind == "batch"}


def read_arguments(model: nn.Module, forward: Callable[..., Any], captured: CapturedModel,
                   types: Mapping[str, TemplateInput], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """Raises `UnsupportedError` for an argument that cannot be honoured. Without all labels a forward gives
    logits. `types` as `batch_types` gives them."""
    name, labels = type(model).__name__, captured.labels
    # Of a loss of the user's own: the model's forward may not know these.
    of_loss = {key: kwargs[key] for key in (*labels, "num_items_in_batch") if captured.token_loss and key in kwargs}
    try:
        given = dict(inspect.signature(forward).bind(*args, **{k: v for k, v in kwargs.items() if k not in of_loss}).arguments)
    except TypeError as error:
        raise UnsupportedError(f"{name}: {error}; a streamed model takes {', '.join(captured.batch_inputs)}") from error
    for parameter in inspect.signature(forward).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name, {})
    given |= of_loss
    mask, items = (None if key in captured.batch_inputs else given.pop(key, None)
                   for key in ("attention_mask", "num_items_in_batch"))
    kept = given.pop("logits_to_keep", None)
    kept = 0 if kept is None else kept
    inputs: dict[str, Tensor] = {}
    for key, value in given.items():
        if key in captured.batch_inputs:
            if value is not None:
                inputs[key] = _checked(name, key, value, types.get(key))
        elif not _neutral(key, value):
            raise UnsupportedError(f"{name}: argument {key} cannot be honoured yet by a streamed model: leave it out "
                                   f"(it takes {', '.join(captured.batch_inputs)})")
    required = [key for key in captured.batch_inputs if key not in labels]
    if missing := [key for key in required if key not in inputs]:
        raise UnsupportedError(f"{name}: {', '.join(missing)} must be given to a streamed model")
    shapes = {tuple(tensor.shape[:2]) for tensor in inputs.values()}
    if len(shapes) > 1 or 0 in next(iter(shapes)):
        raise UnsupportedError(f"{name}: batch arguments must share one [batch, length] of at least one token, "
                               f"not {sorted(shapes)}")
    has_labels = all(key in inputs for key in labels)
    if not has_labels and any(key in inputs for key in labels):
        raise UnsupportedError(f"{name}: the loss needs all of {', '.join(labels)}: give them all, or none for logits alone")
    if not isinstance(kept, int) or kept < 0 or (kept and has_labels):
        raise UnsupportedError(f"{name}: logits_to_keep must be a whole number, of a batch without labels: leave it out")
    inputs = {key: inputs[key] for key in captured.batch_inputs if key in inputs and (has_labels or key not in labels)}
    padding = check_mask(name, mask, inputs, labels if has_labels and not captured.token_loss else ())
    if padding is not None and has_labels:
        raise UnsupportedError(f"{name}: padding is left out by a loss of your own itself: let it give 0 there, by one of its "
                               "tensors, and pass no attention_mask (to padding on the right no token attends)")
    normaliser = None
    if items is not None and has_labels and not captured.has_normaliser:
        raise UnsupportedError(f"{name}: num_items_in_batch cannot be honoured, since the loss is no cross entropy over "
                               "tokens: leave it out")
    if has_labels and captured.has_normaliser:
        assert captured.count_targets is not None
        normaliser = captured.count_targets(inputs) if items is None else torch.as_tensor(items, dtype=torch.float32)
    return Arguments(inputs, normaliser, has_labels, padding, kept)


def _checked(name: str, key: str, value: Any, expected: TemplateInput | None) -> Tensor:
    """The value in the captured dtype, and contiguous as the captured one was: its strides are part of the graphs."""
    shape = expected.shape[2:] if expected is not None else ()
    dtype = expected.dtype if expected is not None else None
    if not isinstance(value, Tensor) or value.dim() < 2 or tuple(value.shape[2:]) != shape or (
            value.is_floating_point() and not (dtype is not None and dtype.is_floating_point)):
        what = f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        kind = "a" if dtype is not None and dtype.is_floating_point else "an integer"
        raise UnsupportedError(f"{name}: {key} must be {kind} tensor [{', '.join(map(str, ('batch', 'length', *shape)))}], "
                               f"not {what}")
    if dtype is not None and torch.promote_types(value.dtype, dtype) != dtype:
        raise UnsupportedError(f"{name}: {key} is {value.dtype}, which {dtype} does not hold: cast it to {dtype}")
    if value.requires_grad:
        raise UnsupportedError(f"{name}: {key} requires a gradient, and gets none from here: pass {key}.detach()")
    return value.to(dtype=dtype).contiguous()


def _neutral(key: str, value: Any) -> bool:
    if value is None:
        return True
    return any(value is v or (not isinstance(value, Tensor) and value == v) for v in _NEUTRAL.get(key, ()))


def check_token_tensors(tensors: Mapping[str, Any], given: Arguments, labels: tuple[str, ...]) -> None:
    """Raises `UnsupportedError` unless each is a tensor [batch, length, ...] without a gradient, and there are no labels."""
    if labels and given.has_labels:
        raise UnsupportedError(f"per_token computes no loss: leave {', '.join(labels)} out of the batch, and pass what the "
                               "function takes by its name")
    if given.kept:
        raise UnsupportedError("per_token gives values of all positions: leave logits_to_keep out, and take the last of them")
    size = tuple(next(iter(given.inputs.values())).shape[:2])
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tuple(tensor.shape[:2]) != size:
            what = f"of shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise UnsupportedError(f"per_token: {name} must be a tensor {[*size]} or with more dimensions behind, not {what}")
        if tensor.requires_grad:
            raise UnsupportedError(f"per_token: {name} requires a gradient, and gets none from here: pass {name}.detach(), or "
                                   "compute with it outside of the function")


def check_mask(name: str, mask: Tensor | None, inputs: Mapping[str, Tensor], labels: tuple[str, ...]) -> Tensor | None:
    """Padding on the right needs no mask where its labels are -100: no real token attends to it, and no loss counts it. Without
    labels it is returned, bool [batch, length], so that nobody sees its outputs.

    Raises `UnsupportedError` for every other mask."""
    if mask is None:
        return None
    first = next(iter(inputs.values()))
    if not isinstance(mask, Tensor) or mask.shape != first.shape[:2]:
        what = f"of shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"that is a {type(mask).__name__}"
        raise UnsupportedError(f"{name}: an attention_mask {what} cannot be honoured yet: pass a tensor of "
                               f"{list(first.shape[:2])}, or none")
    present = mask != 0
    if bool(present.all()):
        return None
    if bool((present[:, 1:] & ~present[:, :-1]).any()):
        raise UnsupportedError(f"{name}: padding on the left or within a sequence cannot be honoured yet: pad on the right")
    if not labels:
        return ~present
    for key in labels:
        if bool((inputs[key].masked_select(~present.to(inputs[key].device)) != -100).any()):
            raise UnsupportedError(f"{name}: {key} of padding must be -100, so that the loss does not count it")
    return None


def logits_of(logits: Tensor, given: Arguments) -> Tensor:
    """Of the logits of all positions, [batch, length, vocabulary], what the caller is to see."""
    (logits,) = without_padding((logits,), given.padding)
    return logits[:, -given.kept:] if given.kept else logits


def without_padding(outputs: tuple[Tensor, ...], padding: Tensor | None) -> tuple[Tensor, ...]:
    """Outputs [batch, length, ...] whose padding is 0, and gets no gradient."""
    if padding is None:
        return outputs
    hidden = padding.to(outputs[0].device)
    return tuple(x.masked_fill(hidden.view(*hidden.shape, *[1] * (x.dim() - 2)), 0) for x in outputs)
