"""Reads the arguments of a call of a streamed model into the batch that a program runs on.

Every argument is either honored or refused with `UnsupportedError`; none is ignored.
"""
from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megacompile.errors import MegacompileError, UnsupportedError
from megacompile.frontend.batches.pair_masks import described, of_pairs
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.template import LENGTH, TemplateInput
from megacompile.inputs.images import align_patches, arrange_images, images_of_each
from megacompile.inputs.packed_layout import BoolArray, GroupedRows, Layout
from megacompile.inputs.padding_arguments import further_arguments, hidden_as_bool, read_typed_mask, zeros_and_ones
from megacompile.inputs.repacking import OTHERS_NOT_PACKED, Capture, Captures, Repacking, Wanted, present_tokens
from megacompile.inputs.rounded_lengths import MASK, POSITIONS, RightPadding, padded, padding_for
from megacompile.ir.plan import CaptureKey

# -------------------- Refuses tokens without an embedding, and labels without a logit
#
# On a GPU, a kernel that reads one would make the device useless to the process.
#: Suffixes of transformers classes whose integer labels are classes, of a row or of a token.
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")


class _Kind(NamedTuple):
    """A kind of ids: the word for one, and for several, and the remedy if the model lacks one."""

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
    """The number of tokens of the embedding or head that a method of transformers returns. None if the model has no such
    method, or if the method returns another kind of module."""
    with contextlib.suppress(NotImplementedError):  # transformers raises it for models without an embedding
        match getattr(model, method, lambda: None)():
            case nn.Embedding() as table:
                return table.num_embeddings
            case nn.Linear() as head:
                return head.out_features
    return None


def _class_count(name: str, model: nn.Module) -> int | None:
    """The number of classes of a transformers classifier; None for another model, and for one whose labels are numbers or sets
    of classes."""
    config: Any = getattr(model, "config", None)
    if not name.endswith(_CLASSIFIERS) or config is None or config.num_labels < 2:
        return None
    return config.num_labels if config.problem_type in (None, "single_label_classification") else None


#: Arguments that do not affect a streamed model of transformers when they have one of these values. A model of one's own may
#: have other meanings for all but the first: it is captured with `use_cache=False`.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_cache": (None, False), "return_dict": (None, True), "output_attentions": (None, False),
    "output_hidden_states": (None, False), "past_key_values": (None,), "cache_position": (None,),
}

_COUNTED = "its attention_mask has other values than 0 and 1, which the model may count"


@dataclass(frozen=True)
class BatchArguments:
    """The arguments of one call of the model, read and checked.

    `inputs`: the batch arguments that were passed, in the model's order, tensors [rows, length, ...]; those of the packed
    batch if the batch was packed. `rows`, `length`: their sizes. `present`: which of their positions hold a token of the
    caller that is not padding, bool [rows, length]. `key`: the capture that serves them. `has_labels`: whether
    all labels were passed. `loss_denominator`: the number of target tokens that the loss is divided by, or None without labels.
    `logits_to_keep`: the number of last positions to return logits for, 0 for all. `hidden_states`: whether the hidden states
    of all layers were requested. `layout`: how the caller's batch was packed, padded or grouped, or None.
    `useful_tokens`: the number of the caller's tokens that are not padding. `not_packed`: the reason why the batch was not
    packed, or "". `counted`: the loss denominator was counted in the batch, and not given by the caller. `only_loss`: the
    caller reads no values of tokens. `read_again(rounding)` reads the same arguments and packs no rows, and pads none either
    unless `rounding`; None if neither was done."""

    inputs: Mapping[str, Tensor]
    rows: int
    length: int
    present: Tensor
    key: CaptureKey
    has_labels: bool
    loss_denominator: Tensor | None
    logits_to_keep: int = 0
    hidden_states: bool = False
    layout: Layout | RightPadding | GroupedRows | None = None
    useful_tokens: int = 0
    not_packed: str = ""
    counted: bool = True
    only_loss: bool = False
    read_again: Callable[[bool], BatchArguments] | None = None

    @property
    def caller_size(self) -> tuple[int, int]:
        """[batch, length] of the batch that the caller passed."""
        if self.layout is not None:
            return self.layout.size
        return self.rows, self.length

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """Rows and length of each group of rows; empty if all rows are computed with the same length."""
        return self.layout.groups if isinstance(self.layout, GroupedRows) and len(self.layout.groups) > 1 else ()

    def packed(self, tensor: Tensor, filling: int = 0) -> Tensor:
        """A tensor [batch, length, ...] of the caller, rearranged as `inputs` are, with `filling` in empty slots."""
        return tensor if self.layout is None else self.layout.pack(tensor, filling)

    def unpacked(self, tensor: Tensor) -> Tensor:
        """Values of the tokens of `inputs`, rearranged as in the caller's batch: [batch, length, ...], zeros for padding. With
        several ranks, the values may be those of a larger batch, which this one was padded to."""
        if tensor.shape[:2] != (self.rows, self.length):
            tensor = tensor[:self.rows, :self.length]
        return tensor if self.layout is None else self.layout.unpack(tensor)


class RepackedCaptures(Captures, Protocol):
    """The captures of a model that also decides which batches of uneven rows are packed."""

    @property
    def repacking(self) -> Repacking: ...


@dataclass(frozen=True)
class _Options:
    """The arguments of a call that select outputs or scale the loss. `loss_denominator`: transformers' `num_items_in_batch`."""

    loss_denominator: Any
    logits_to_keep: Any
    hidden_states: bool


@dataclass(frozen=True)
class _Rows:
    """A batch after packing. `inputs`: the batch arguments that every batch of the model has. `further`: the other arguments
    that change what is computed (masks, positions). `present`: which positions of the caller's batch hold a token. The rest as
    in `BatchArguments`."""

    inputs: dict[str, Tensor]
    further: dict[str, Tensor]
    layout: Layout | RightPadding | GroupedRows | None
    present: BoolArray
    not_packed: str


def batch_types(captured: CapturedModel) -> dict[str, TemplateInput]:
    """Shape and dtype of each batch input in the captured graphs."""
    described = (pair for call in captured.calls for pair in zip(call.sources, captured.templates[call.template].inputs,
                                                                 strict=True))
    return {source.name: x for source, x in described if source.kind == "batch"}


def read_arguments(model: nn.Module, forward: Callable[..., Any], captures: RepackedCaptures, args: tuple[Any, ...],
                   kwargs: Mapping[str, Any], wanted: Wanted = Wanted.ALL, differentiating: bool = False,
                   packing: bool = True, rounding: bool = True) -> BatchArguments:
    """Reads the arguments of `forward(*args, **kwargs)`.

    `wanted`: the outputs that the caller reads. `differentiating`: a backward may follow, so a batch with labels returns only
    the loss. `packing`, `rounding`: off if another rank's rows cannot be packed, or padded to another length. The first batch
    of a new kind captures the model again. Raises `UnsupportedError` for an argument that is not supported."""
    name, first = type(model).__name__, captures.first
    given, options = _take_options(_bind(name, first.captured, forward, args, kwargs), first.captured)
    given = align_patches(model, first.captured, given, first.device)
    inputs = arrange_images(name, first.captured, _plain_inputs(name, first.captured, first.types, given))
    if differentiating and first.captured.labels and set(first.captured.labels) <= inputs.keys():
        wanted = Wanted.LOSS
    rows = _pack(name, captures, given, inputs, model.training, wanted, packing)
    check_ids(name, model, first.captured, rows.inputs)
    key, further = _choose_capture(captures, rows, model.training)
    served = captures.serve(key)
    captures.check_modes(served.captured)
    inputs = rows.inputs | {argument: value if of_pairs(served.types.get(argument)) else
                            _checked(name, argument, value, served.types.get(argument)) for argument, value in further.items()}
    if rows.layout is None and POSITIONS in rows.further and MASK not in rows.further:
        captures.repacking.warn_across_sequences(name, served.captured, inputs[POSITIONS])
    for table in served.captured.tables:
        table.check(name, inputs)
    if rows.layout is None and captures.repacking.enabled and rounding:
        inputs, rows = _rounded(served, inputs, rows, captures.repacking)
    if differentiating and rows.not_packed:
        computed = rows.layout.tokens if isinstance(rows.layout, GroupedRows) else rows.present.size
        captures.repacking.warn(rows.not_packed, int(rows.present.sum()), computed)
    found = _result(name, served.captured, served.types, inputs, key, options, rows)

    def read_again(rounding: bool) -> BatchArguments:
        return read_arguments(model, forward, captures, args, kwargs, wanted, differentiating, False, rounding)

    return replace(found, only_loss=wanted == Wanted.LOSS, read_again=None if rows.layout is None else read_again)


def _bind(name: str, plain: CapturedModel, forward: Callable[..., Any], args: tuple[Any, ...],
          kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name. Raises `UnsupportedError` if they do not match the signature of `forward`, or if they
    ask for a key-value cache."""
    # The user's loss function may take arguments that the model's forward does not.
    of_loss = {key: kwargs[key] for key in (*plain.labels, "num_items_in_batch") if plain.token_loss and key in kwargs}
    signature = inspect.signature(forward)
    try:
        given = dict(signature.bind(*args, **{k: v for k, v in kwargs.items() if k not in of_loss}).arguments)
    except TypeError as error:
        raise UnsupportedError(f"{name}: {error}; a streamed model takes {', '.join(plain.batch_inputs)}") from error
    for name_of, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(name_of, {})
        elif name_of in given and (given[name_of] is parameter.default or _equal(given[name_of], parameter.default)):
            del given[name_of]
        elif name_of in given and given[name_of] is None and parameter.default is not parameter.empty:
            raise UnsupportedError(f"{name}: {name_of}=None is not supported: leave it out, which means {parameter.default!r}")
    if given.get("use_cache") is True:  # a decoding loop would pass only the newest token to its next call
        raise UnsupportedError(f"{name}: use_cache=True is not supported, since a streamed model keeps no cache: leave it "
                               "out and pass all tokens, or call generate")
    return given | of_loss


def _take_options(given: Mapping[str, Any], plain: CapturedModel) -> tuple[dict[str, Any], _Options]:
    """Separates the arguments that select outputs or scale the loss from the others."""
    rest = dict(given)
    items = None if "num_items_in_batch" in plain.batch_inputs else rest.pop("num_items_in_batch", None)
    kept = rest.pop("logits_to_keep", None)
    if hidden_states := rest.get("output_hidden_states") is True:
        del rest["output_hidden_states"]
    if rest.get("output_router_logits") is plain.output.records_routers:
        del rest["output_router_logits"]
    return rest, _Options(items, 0 if kept is None else kept, hidden_states)


def _plain_inputs(name: str, captured: CapturedModel, types: Mapping[str, TemplateInput],
                  given: Mapping[str, Any]) -> dict[str, Tensor]:
    """The arguments among `given` that every batch of the model has. Raises `UnsupportedError` if some are missing or if their
    dtypes or sizes do not fit."""
    labels = captured.labels
    known = {key: given[key] for key in captured.batch_inputs if given.get(key) is not None}
    inputs = {key: _checked(name, key, value, types.get(key)) for key, value in known.items() if not of_pairs(types.get(key))}
    images = {key for positions in captured.image_positions for key in positions.images}
    inputs |= {key: torch.zeros(0, *types[key].shape[1:], dtype=types[key].dtype) for key in images - inputs.keys()}
    if missing := [key for key in captured.batch_inputs if key not in labels and key not in {*inputs, *known}]:
        raise UnsupportedError(f"{name}: {', '.join(missing)} must be given to a streamed model")
    shapes = {tuple(tensor.shape[:2]) for key, tensor in inputs.items() if not _is_per_row(types.get(key))}
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
        raise UnsupportedError(f"{name}: the loss needs all of {', '.join(labels)}: pass all of them, or none to get logits "
                               "without a loss")
    return inputs


def _pack(name: str, captures: RepackedCaptures, given: Mapping[str, Any], inputs: dict[str, Tensor], training: bool,
          wanted: Wanted, packing: bool) -> _Rows:
    """Packs the rows of a batch if that changes no result, and reads the arguments that not every batch of the model has."""
    def key_of(further: Mapping[str, Tensor]) -> CaptureKey:
        key = captures.capture_key(_described(further), True, images_of_each(captures.first.types, inputs))
        return replace(key, evaluating=not training)

    plain = captures.first.captured
    others = {key: value for key, value in given.items()
              if key not in plain.batch_inputs and not _is_neutral(plain, key, value)}
    others[MASK], only_shows = zeros_and_ones(name, plain, others.get(MASK), lambda mask: key_of({MASK: mask}))
    further = further_arguments(name, plain, others, inputs, key_of)
    present = present_tokens(inputs, others[MASK], plain.labels, wanted)
    packed = (OTHERS_NOT_PACKED if not packing else _COUNTED if not only_shows else
              captures.repacking.pack(inputs, present, others[MASK], further, training, wanted))
    if isinstance(packed, str):
        return _Rows(inputs, further, None, present, packed)
    inputs, layout = packed
    return _Rows(inputs, {POSITIONS: inputs.pop(POSITIONS)}, layout, present, "")


def _described(further: Mapping[str, Tensor]) -> tuple[str, ...]:
    return tuple(sorted(described(*argument) for argument in further.items()))


def _choose_capture(captures: Captures, rows: _Rows, training: bool) -> tuple[CaptureKey, dict[str, Tensor]]:
    """The capture for a batch, and the arguments that not every batch has, with masks in the form that the capture reads."""
    images = images_of_each(captures.first.types, rows.inputs)

    def key_of(further: Mapping[str, Tensor]) -> CaptureKey:
        return captures.capture_key(_described(further), training, images)

    further = hidden_as_bool(rows.further, captures.first.captured, lambda changed: captures.reads_masks(key_of(changed)))
    return key_of(further), further


def _rounded(served: Capture, inputs: dict[str, Tensor], rows: _Rows,
             repacking: Repacking) -> tuple[dict[str, Tensor], _Rows]:
    """The arguments of a batch that is not packed, padded to one of a few widths or grouped by length, if that changes no
    result."""
    padding = padding_for(served.captured, served.types, inputs, rows.present, repacking.usual, repacking.grouping)
    if padding is None:
        return inputs, rows
    return ({name: padded(name, tensor, padding, served.captured.labels) for name, tensor in inputs.items()},
            replace(rows, layout=padding))


def _result(name: str, captured: CapturedModel, types: Mapping[str, TemplateInput], inputs: Mapping[str, Tensor],
            key: CaptureKey, options: _Options, rows: _Rows) -> BatchArguments:
    """Selects the outputs. Raises `UnsupportedError` for options that contradict the labels of the batch."""
    has_labels = captured.has_loss and all(label in inputs for label in captured.labels)
    kept = options.logits_to_keep
    if not isinstance(kept, int) or kept < 0 or (kept and (has_labels or not captured.logits_of_tokens)):
        raise UnsupportedError(f"{name}: logits_to_keep must be a non-negative integer, and 0 for a batch with labels or a "
                               "model of sequences: leave it out")
    inputs = {argument: inputs[argument] for argument in captured.batch_inputs
              if argument in inputs and (has_labels or argument not in captured.labels)}
    size = next(tensor.shape for argument, tensor in inputs.items() if not _is_per_row(types.get(argument)))
    loss_denominator = _loss_denominator(name, captured, inputs, options.loss_denominator) if has_labels else None
    present = torch.from_numpy(rows.present)
    return BatchArguments(inputs, size[0], size[1], rows.layout.pack(present) if rows.layout else present, key, has_labels,
                          loss_denominator, kept, options.hidden_states, rows.layout, int(rows.present.sum()), rows.not_packed,
                          options.loss_denominator is None)


def _loss_denominator(name: str, captured: CapturedModel, inputs: Mapping[str, Tensor], given: Any) -> Tensor | None:
    """The number that the loss is divided by: the caller's, or the number of target tokens; None for a loss that is not a mean
    over tokens."""
    if captured.has_loss_denominator:
        assert captured.count_targets is not None
        return captured.count_targets(inputs) if given is None else torch.as_tensor(given, dtype=torch.float32)
    if given is not None:
        raise UnsupportedError(f"{name}: num_items_in_batch is not supported, since the loss is not a cross entropy over "
                               "tokens: leave it out")
    return None


def _is_per_row(expected: TemplateInput | None) -> bool:
    """True if a batch argument has values for rows instead of tokens."""
    return expected is not None and (len(expected.shape) < 2 or expected.shape[1] != LENGTH)


def _checked(name: str, key: str, value: Any, expected: TemplateInput | None) -> Tensor:
    """The value in the captured dtype, made contiguous like the captured one, since the graphs depend on its strides."""
    if expected is not None and _is_per_row(expected):
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
        raise UnsupportedError(f"{name}: {key} requires a gradient, which a streamed model does not compute: pass "
                               f"{key}.detach()")
    return value.to(dtype=dtype).contiguous()


def _is_neutral(captured: CapturedModel, key: str, value: Any) -> bool:
    return value is None or any(_equal(value, each) for each in _NEUTRAL.get(
        key if captured.masks_hide or key == "use_cache" else "", ()))


def _equal(value: Any, other: Any) -> bool:
    """True if two values are the same number, text, flag or None."""
    return type(value) is type(other) and isinstance(value, bool | int | float | str | None) and value == other


def check_names(caller: str, batch: Any) -> None:
    """Raises `MegacompileError` unless the batch passed to `caller` has arguments by name."""
    if not isinstance(batch, Mapping):
        raise MegacompileError(f"{caller} takes the model's arguments by name, such as {{'input_ids': ids}}, not a "
                               f"{type(batch).__name__}")


def check_labels(caller: str, given: BatchArguments, labels: tuple[str, ...], has_loss: bool) -> None:
    """Raises `UnsupportedError` unless the batch passed to `caller` has labels, for a model that has a loss."""
    if not given.has_labels:
        if not has_loss:
            raise UnsupportedError(f"{caller} needs a loss, and the model has none: give stream(model, loss=...), or train in "
                                   "a loop by a loss of the model's output")
        raise UnsupportedError(f"{caller} needs labels ({', '.join(labels)}): pass them in the batch")


def check_token_tensors(caller: str, tensors: Mapping[str, Any], given: BatchArguments, labels: tuple[str, ...]) -> None:
    """Raises `UnsupportedError` unless each tensor is [batch, length, ...] and needs no gradient, and the batch passed to
    `caller` has no labels and does not select outputs."""
    if labels and given.has_labels:
        raise UnsupportedError(f"{caller} computes no loss: leave {', '.join(labels)} out of the batch; pass tensors for the "
                               "function by keyword")
    if given.logits_to_keep or given.hidden_states:
        raise UnsupportedError(f"{caller} returns values for all positions: leave logits_to_keep and output_hidden_states out "
                               "of the batch")
    size = given.caller_size
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tuple(tensor.shape[:2]) != size:
            what = f"of shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise UnsupportedError(f"per_token: {name} must be a tensor {[*size]} or [{size[0]}, {size[1]}, ...], not {what}")
        if tensor.requires_grad:
            raise UnsupportedError(f"per_token: {name} requires a gradient, which a streamed model does not compute: pass "
                                   f"{name}.detach(), or use it outside of the function")


def logits_of(logits: Tensor, given: BatchArguments, of_tokens: bool) -> Tensor:
    """The logits to return to the caller. `logits`: those of all computed positions, [rows, length, ...], or if not
    `of_tokens`, of all rows, [rows, ...]."""
    if not of_tokens:
        return logits[:given.rows]
    logits = given.unpacked(logits)
    return logits[:, -given.logits_to_keep:] if given.logits_to_keep else logits
