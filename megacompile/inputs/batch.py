"""What a user passes to a streamed model -> the batch that a program runs on. Honoured or refused, never ignored."""
from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megacompile.errors import UnsupportedError
from megacompile.frontend.batches.pairs import described, of_pairs
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.template import LENGTH, TemplateInput
from megacompile.inputs.captures import Captures
from megacompile.inputs.images import arrange_images, images_of_each
from megacompile.inputs.packed_layout import Layout
from megacompile.inputs.packing import further_arguments
from megacompile.inputs.pairs import hidden_as_bool, read_typed_mask
from megacompile.inputs.patches import align_patches
from megacompile.inputs.repacking import Repacking, Wanted, present_tokens
from megacompile.ir.plan import CaptureKey

#: Arguments whose value changes nothing that a streamed model does, when they have one of these values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_cache": (None, False), "return_dict": (None, True), "output_attentions": (None, False),
    "output_hidden_states": (None, False), "past_key_values": (None,), "cache_position": (None,),
}


@dataclass(frozen=True)
class Arguments:
    """A call of the model, taken apart. `inputs`: the batch arguments that were given, in the model's order, tensors of
    [batch, length, ...]; `loss_denominator`: the number of target tokens to divide by, or None if there are no labels; `kept`:
    of how many last positions logits are, 0 for all; `hidden_states`: whether those of all layers are wanted. `layout`: where
    the tokens of the caller's batch lie, if it was packed: `inputs` are the packed ones then. `useful_tokens`: how many of the
    caller's tokens are not padding; `refusal`: why the batch was not packed, if it was not."""

    inputs: dict[str, Tensor]
    loss_denominator: Tensor | None
    has_labels: bool
    kept: int = 0
    hidden_states: bool = False
    layout: Layout | None = None
    useful_tokens: int = 0
    refusal: str = ""

    @property
    def size(self) -> tuple[int, int]:
        """The caller's [batch, length]."""
        if self.layout is not None:
            return self.layout.size
        rows, length = next(iter(self.inputs.values())).shape[:2]
        return rows, length

    def packed(self, tensor: Tensor) -> Tensor:
        """A tensor [batch, length, ...] of the caller's, as `inputs` are."""
        return tensor if self.layout is None else self.layout.pack(tensor)

    def unpacked(self, tensor: Tensor) -> Tensor:
        """Values of the tokens of `inputs`, as the caller has its tokens: [batch, length, ...], zeros for padding."""
        return tensor if self.layout is None else self.layout.unpack(tensor)


class RepackedCaptures(Captures, Protocol):
    """The captures of a model, and which batches of uneven rows it packs."""

    @property
    def repacking(self) -> Repacking: ...


def batch_types(captured: CapturedModel) -> dict[str, TemplateInput]:
    """Shape and dtype of each batch input in the captured graphs."""
    described = (pair for call in captured.calls for pair in zip(call.sources, captured.templates[call.template].inputs,
                                                                 strict=True))
    return {source.name: x for source, x in described if source.kind == "batch"}


def read_arguments(model: nn.Module, forward: Callable[..., Any], captures: RepackedCaptures, args: tuple[Any, ...],
                   kwargs: Mapping[str, Any], wanted: Wanted = Wanted.ALL, differentiating: bool = False) -> Arguments:
    """Raises `UnsupportedError` for an argument that cannot be honoured. Without all labels a forward gives logits; where it
    is differentiated, with labels it gives nothing but the loss."""
    name, plain = type(model).__name__, captures.first.captured
    # Of a loss of the user's own: the model's forward may not know these.
    of_loss = {key: kwargs[key] for key in (*plain.labels, "num_items_in_batch") if plain.token_loss and key in kwargs}
    try:
        given = dict(inspect.signature(forward).bind(*args, **{k: v for k, v in kwargs.items() if k not in of_loss}).arguments)
    except TypeError as error:
        raise UnsupportedError(f"{name}: {error}; a streamed model takes {', '.join(plain.batch_inputs)}") from error
    for parameter in inspect.signature(forward).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name, {})
    if given.get("use_cache") is True:  # a loop that passes on what comes back would go on without what came before
        raise UnsupportedError(f"{name}: use_cache=True cannot be honoured, since a streamed model keeps no cache: leave it "
                               "out and pass all tokens, or call generate")
    given |= of_loss
    items = None if "num_items_in_batch" in plain.batch_inputs else given.pop("num_items_in_batch", None)
    kept = given.pop("logits_to_keep", None)
    kept = 0 if kept is None else kept
    hidden_states = given.get("output_hidden_states") is True and bool(given.pop("output_hidden_states"))
    given = align_patches(model, plain, given, captures.first.device)
    inputs = arrange_images(name, plain, _inputs(name, plain, captures.first.types, given))
    if given.get("output_router_logits") is plain.output.records_routers:
        del given["output_router_logits"]
    others = {key: value for key, value in given.items() if key not in plain.batch_inputs and not _neutral(key, value)}
    further = further_arguments(name, plain, others, inputs, captures.parameters)
    layout = None
    mask = others.get("attention_mask")
    if differentiating and plain.labels and set(plain.labels) <= inputs.keys():
        wanted = Wanted.LOSS
    present = present_tokens(inputs, mask, plain.labels, wanted)
    packed = captures.repacking.pack(inputs, present, mask, further, model.training, wanted)
    if not isinstance(packed, str):
        inputs, layout = packed
        further = {"position_ids": inputs.pop("position_ids")}

    def capture_key(arguments: Mapping[str, Tensor]) -> CaptureKey:
        said = tuple(sorted(described(key, value) for key, value in arguments.items()))
        return captures.capture_key(said, model.training, images_of_each(captures.first.types, inputs))

    further = hidden_as_bool(further, plain, lambda changed: captures.reads_masks(capture_key(changed)))
    served = captures.serve(capture_key(further))
    captured, types = served.captured, served.types
    captures.check_modes(captured)
    inputs |= {key: value if of_pairs(types.get(key)) else _checked(name, key, value, types.get(key))
               for key, value in further.items()}
    has_labels = captured.has_loss and all(key in inputs for key in captured.labels)
    if not isinstance(kept, int) or kept < 0 or (kept and has_labels):
        raise UnsupportedError(f"{name}: logits_to_keep must be a whole number, of a batch without labels: leave it out")
    inputs = {key: inputs[key] for key in captured.batch_inputs if key in inputs and (has_labels or key not in captured.labels)}
    loss_denominator = None
    if items is not None and has_labels and not captured.has_loss_denominator:
        raise UnsupportedError(f"{name}: num_items_in_batch cannot be honoured, since the loss is not a cross entropy over "
                               "tokens: leave it out")
    if has_labels and captured.has_loss_denominator:
        assert captured.count_targets is not None
        loss_denominator = captured.count_targets(inputs) if items is None else torch.as_tensor(items, dtype=torch.float32)
    return Arguments(inputs, loss_denominator, has_labels, kept, hidden_states, layout, int(present.sum()),
                     packed if isinstance(packed, str) else "")


def _inputs(name: str, captured: CapturedModel, types: Mapping[str, TemplateInput],
            given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The batch arguments of plain batches that are `given`. Raises `UnsupportedError` where some are missing or do not fit."""
    labels = captured.labels
    known = {key: given[key] for key in captured.batch_inputs if given.get(key) is not None}
    inputs = {key: _checked(name, key, value, types.get(key)) for key, value in known.items() if not of_pairs(types.get(key))}
    images = {key for places in captured.places for key in places.images}
    inputs |= {key: torch.zeros(0, *types[key].shape[1:], dtype=types[key].dtype) for key in images - inputs.keys()}
    if missing := [key for key in captured.batch_inputs if key not in labels and key not in {*inputs, *known}]:
        raise UnsupportedError(f"{name}: {', '.join(missing)} must be given to a streamed model")
    shapes = {tuple(tensor.shape[:2]) for key, tensor in inputs.items() if not _of_rows(types.get(key))}
    rows = next(iter(shapes))[0]
    sizes = {tensor.shape[0] for key, tensor in inputs.items() if key not in images}
    if sizes != {rows}:
        raise UnsupportedError(f"{name}: batch arguments must share one batch size, not {sorted(sizes)}")
    if len(shapes) > 1 or 0 in next(iter(shapes)):
        raise UnsupportedError(f"{name}: batch arguments must share one [batch, length] of at least one token, "
                               f"not {sorted(shapes)}")
    inputs |= {key: read_typed_mask(name, key, value, next(iter(shapes)), types[key], captured)
               for key, value in known.items() if of_pairs(types.get(key))}
    if any(key in inputs for key in labels) and not all(key in inputs for key in labels):
        raise UnsupportedError(f"{name}: the loss needs all of {', '.join(labels)}: give them all, or none for logits alone")
    return inputs


def _of_rows(expected: TemplateInput | None) -> bool:
    """Whether a batch argument has values for rows and not for tokens."""
    return expected is not None and (len(expected.shape) < 2 or expected.shape[1] != LENGTH)


def _checked(name: str, key: str, value: Any, expected: TemplateInput | None) -> Tensor:
    """The value in the captured dtype, and contiguous as the captured one was: its strides are part of the graphs."""
    if expected is not None and _of_rows(expected):
        if isinstance(value, Tensor) and value.shape[1:] == expected.shape[1:] and value.dim():
            return value.to(dtype=expected.dtype).contiguous()
        what = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise UnsupportedError(f"{name}: {key} must be a tensor [{', '.join(map(str, ('batch', *expected.shape[1:])))}], "
                               f"not {what}")
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


def check_token_tensors(caller: str, tensors: Mapping[str, Any], given: Arguments, labels: tuple[str, ...]) -> None:
    """Raises `UnsupportedError` unless each is a tensor [batch, length, ...] without a gradient, and the batch that `caller`
    was given has no labels and asks for no choice of outputs."""
    if labels and given.has_labels:
        raise UnsupportedError(f"{caller} computes no loss: leave {', '.join(labels)} out of the batch; what a function takes "
                               "is passed by its name")
    if given.kept or given.hidden_states:
        raise UnsupportedError(f"{caller} gives values of all positions: leave logits_to_keep and output_hidden_states out of "
                               "the batch")
    size = given.size
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tuple(tensor.shape[:2]) != size:
            what = f"of shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise UnsupportedError(f"per_token: {name} must be a tensor {[*size]} or with more dimensions behind, not {what}")
        if tensor.requires_grad:
            raise UnsupportedError(f"per_token: {name} requires a gradient, and gets none from here: pass {name}.detach(), or "
                                   "compute with it outside of the function")


def logits_of(logits: Tensor, given: Arguments) -> Tensor:
    """Of the logits of all positions, [batch, length, vocabulary], what the caller is to see."""
    logits = given.unpacked(logits)
    return logits[:, -given.kept:] if given.kept else logits
