"""Decides which batches of uneven rows are packed into rows of one length, and packs them.

A batch is packed only if that changes no result: the model is causal, tokens interact only in attention, and attention reads
where sequences begin. Other batches are computed as they are, including their padding. `obstacle` and `unread` give the reason
for a model, `pack` for a batch.
"""
from __future__ import annotations

import enum
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megacompile.errors import CaptureError, PackingWarning, PaddingWarning, UnsupportedError, first_line, listed
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.across_rows import across_tokens, calls_across_sequences, calls_blind_to
from megacompile.frontend.templates.template import LENGTH as LENGTH_SYMBOL
from megacompile.frontend.templates.template import TemplateInput
from megacompile.inputs.packed_layout import (
    LENGTH,
    SHARES,
    BoolArray,
    GroupedRows,
    Grouping,
    Layout,
    Span,
    array_of,
    lay_out,
    power_of_two,
    spans_of,
)
from megacompile.inputs.rounded_lengths import MASK, POSITIONS, USUALLY_IMPLIED, RightPadding, is_usual
from megacompile.ir.plan import BatchSpec, CaptureKey
from megacompile.losses import IGNORED


# --------------------
# Protocols for a streamed model's captures, one for each kind of batch: what reading a batch needs to know of the model.
class Capture(Protocol):
    """The capture that serves one kind of batch."""

    @property
    def captured(self) -> CapturedModel: ...

    @property
    def types(self) -> Mapping[str, TemplateInput]:
        """Shape and dtype of each batch argument."""

    @property
    def device(self) -> torch.device:
        """The device that its kernels run on."""


class Captures(Protocol):
    """All captures of a model. `first`: the capture for plain batches."""

    @property
    def first(self) -> Capture: ...

    def capture_key(self, further: tuple[str, ...], training: bool, images: int = 1) -> CaptureKey:
        """The key of a batch with `further` arguments, beside those of plain batches, and `images` for each sequence."""

    def key_at(self, key: CaptureKey, length: int) -> CaptureKey:
        """The key of a capture that also holds at this length; `key` itself if there is none. May trace the model."""

    def serve(self, key: CaptureKey) -> Capture:
        """The capture for a key. The first call with a key traces the model."""

    def reads_masks(self, key: CaptureKey) -> bool:
        """True if our attention reads the masks of pairs of this key's batches in every layer."""

    def check_modes(self, captured: CapturedModel) -> None:
        """Raises `UnsupportedError` if a module inside the model was in another mode (training or evaluation) when it was
        captured."""


#: PyTorch runs an op on at most this many elements on the caller's thread (at::internal::GRAIN_SIZE). A larger op waits for a
#: thread pool whose cores are busy with the last step's update.
_SERIAL_ELEMENTS = 32768


#: Training says once why a batch is not packed if at least this share of it is padding.
_MUCH_PADDING = 0.25
_LEFT_TARGET = "padding on the left predicts a target"
_PADDING_TARGET = "padding has labels other than -100"
_NO_TARGET = "none of its tokens counts for the loss"
OTHERS_NOT_PACKED = "the rows of another rank cannot be packed"
_REMEDIES = {_LEFT_TARGET: "pad on the right, or give the first token of each row the label -100",
             _PADDING_TARGET: "give padding the label -100",
             _NO_TARGET: "leave the batch out, since the mean over no target is nan"}


class Wanted(enum.Enum):
    """The results of a batch that the caller reads."""

    #: Only the loss: tokens after the last target of a row need not be computed.
    LOSS = enum.auto()
    #: Values of tokens, but not of padding.
    TOKENS = enum.auto()
    #: Values of every position.
    ALL = enum.auto()


class Repacking:
    """Packs the batches of one streamed model. `any_length`: kernels serve rows of any length. `alone`: no other rank trains
    the model, so rows are packed once, and grouped if they are not packed (`grouping`; all ranks' rows by `grouping_of_ranks`).
    `least`: the usual length of packed rows. `usual`: the length of the longest rows that are not packed, which determines
    their widths (`rounded`); set it if it is known better than by the option `repack`. State: for each capture key, why
    attention does not read its packed batches (`_unread`), determined for the first batch that needs it; and the calls in which
    sequences of a row read each other (`_across`), until a warning names them. `_told`: the reasons for padding in earlier
    warnings."""

    def __init__(self, captures: Captures, option: bool | int, any_length: bool, alone: bool = True) -> None:
        self.captures = captures
        self.enabled = bool(option)
        self.least = self.usual = LENGTH if option is True else power_of_two(option)
        self._possible_shares = SHARES if any_length else ()
        self.shares = self._possible_shares if alone else ()
        few_or_any = Grouping.ANY_NUMBER if any_length else Grouping.FEW_NUMBERS
        self.grouping, self.grouping_of_ranks = (few_or_any, Grouping.NONE) if alone else (Grouping.NONE, few_or_any)
        self._unread: dict[CaptureKey, str] = {}
        self._told: set[str] = set()
        self._across: dict[CaptureKey, list[str]] = {}

    def pack(self, inputs: Mapping[str, Tensor], present: BoolArray, mask: Tensor | None, further: Mapping[str, Tensor],
             training: bool, wanted: Wanted) -> tuple[dict[str, Tensor], Layout] | str:
        """The arguments of the packed batch, including position IDs, and its layout; or the reason why it is not packed.

        `inputs`: the arguments that plain batches have; `present`: which positions hold a token (`present_tokens`); `mask`: the
        batch's attention mask; `further`: the other arguments that change what is computed."""
        if not self.enabled or self.obstacle:
            return self.known_refusal
        if others := set(further) - {MASK, POSITIONS}:
            return f"{', '.join(sorted(others))} may not be valid for packed rows"
        size = next(iter(inputs.values())).shape[:2]
        rows, length = size
        labels = [inputs[name] for name in self.captures.first.captured.labels if name in inputs]
        positions = further[POSITIONS].cpu() if POSITIONS in further else None
        if mask is not None and mask.dim() != 2:
            return "its attention_mask is a mask of pairs of tokens"
        if present.all() and (is_usual(length) or (rows > 1 and positions is None)):
            return "no row has padding"
        spans = spans_of(present, positions, sequences=mask is None)
        if not spans:
            return "its attention_mask has holes, or its position_ids are not consecutive" if present.any() else _NO_TARGET
        layout = lay_out(spans, (rows, length), self.least, self.shares)
        packed_rows, packed_length = layout.source.shape
        if packed_length == length and packed_rows >= rows:
            return "packing would leave as many rows of the same length"
        packed = self._packed(inputs, layout)
        if self._targets(packed) != self._targets(inputs):
            of_padding = any((array_of(each) != IGNORED)[~present].any() for each in labels if each.shape == size)
            return _PADDING_TARGET if of_padding else _LEFT_TARGET
        key = self.captures.capture_key((POSITIONS,), training)
        if unread := self.unread(key):  # late, since it may capture the model
            return unread
        plain, of_packed = self.captures.first.captured, self.captures.serve(key).captured
        if not (plain.holds_at(length) and plain.holds_at(packed_length) and of_packed.holds_at(packed_length)):
            return f"the model's code branches on the length of rows, {length} or {packed_length}"
        on_the_left = any(not present[span.row, 0] for span in spans)
        # The padding before a row's first token predicts that token, so the caller may read its values.
        if on_the_left and wanted == Wanted.ALL and not labels:
            return "it is padded on the left, and values of padding may be read"
        if positions is None and not self._positions_are_counted(training, masked=on_the_left):
            return "the model counts positions in a way of its own"
        return {**packed, POSITIONS: layout.positions}, layout

    def lay_out_for(self, ranks: int, spans: Sequence[Span], size: tuple[int, int]) -> Layout:
        """The layout of the sequences of all ranks. Each rank computes the same number of rows."""
        return lay_out(spans, size, self.least, self._possible_shares, ranks)

    def warn(self, reason: str, useful: int, computed: int) -> None:
        """Warns of each reason once if much of a training batch that is not packed is padding: `computed` tokens, including
        `useful` ones. Call it for each such batch."""
        share = 1 - useful / computed
        if self.enabled and reason not in self._told and share >= _MUCH_PADDING:
            self._told.add(reason)
            remedy = _REMEDIES.get(reason, "group rows of similar length to compute less of it")
            warnings.warn(f"a training batch is computed with its padding, {share:.0%} of it, because {reason}: {remedy}",
                          PaddingWarning, stacklevel=2)

    def warn_across_sequences(self, name: str, captured: CapturedModel, positions: Tensor) -> None:
        """Warns once if a row of a batch holds several sequences that read each other, as they also do natively. Call it for a
        batch with position IDs and no mask. `captured`: the capture that serves it."""
        if captured.key not in self._across:
            self._across[captured.key] = calls_across_sequences(POSITIONS, captured.calls, captured.templates)
        if self._across[captured.key] and (positions[:, 1:] == 0).any():
            warnings.warn(f"{name}: position_ids begin again within a row, but sequences in one row read each other"
                          f"{_named(self._across.pop(captured.key))}, as they do without streaming: give each sequence a row "
                          "of its own, padded on the right", PackingWarning, stacklevel=2)
            self._across[captured.key] = []

    def _packed(self, inputs: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
        labels = self.captures.first.captured.labels
        return {name: layout.pack_targets(tensor, IGNORED) if name in labels else layout.pack(tensor)
                for name, tensor in inputs.items()}

    def _targets(self, inputs: Mapping[str, Tensor]) -> float:
        """The number of targets that the loss of a batch counts. Packing loses some if the padding is on the left, since
        padding then predicts a row's first token."""
        captured = self.captures.first.captured
        if captured.count_targets is None or not set(captured.labels) <= inputs.keys():
            return 0.0
        rows, length = next(iter(inputs.values())).shape[:2]
        few = max(1, _SERIAL_ELEMENTS // length)
        return sum(float(captured.count_targets({name: each[at:at + few] for name, each in inputs.items()}))
                   for at in range(0, rows, few))

    @cached_property
    def obstacle(self) -> str:
        """The reason why the model's batches cannot be packed; "" if none is known without another capture."""
        return obstacle(self.captures.first.captured, self.captures.first.types)

    @property
    def known_refusal(self) -> str:
        """Like `refusal`, as far as it is known without another capture."""
        if not self.enabled:
            return "the model was streamed with repack=False"
        return self.obstacle or next(filter(None, self._unread.values()), "")

    def refusal(self, training: bool) -> str:
        """The reason why no padded batch of the model is packed; "" if they are packed. The first call may capture the model
        with position IDs."""
        return self.known_refusal or self.unread(self.captures.capture_key((POSITIONS,), training))

    def outlook(self, spec: BatchSpec, layout: Layout | RightPadding | GroupedRows | None = None,
                refusal: str = "") -> str:
        """A line that says how the rows of a training batch are packed, or why they are not. `spec`: of the program. For
        a given batch, `layout` is how it was packed or padded, and `refusal` the reason if it was not packed."""
        size = f"{spec.batch} x {spec.length}"
        if isinstance(layout, RightPadding):
            rows, length = layout.size
            return f"rows: {rows} x {length}, padded to {size}, not packed: {refusal}"
        if isinstance(layout, GroupedRows):
            rows, length = layout.size
            groups = listed([f"{count} x {each}" for count, each in layout.groups], 12)
            return f"rows: {rows} x {length}, grouped by length into {groups}, not packed: {refusal}"
        if layout is not None:
            rows, length = layout.size
            tokens = layout.filled.numel()
            return (f"rows: {rows} x {length} with {tokens:,} tokens, packed into {size} "
                    f"({tokens / layout.source.numel():.0%} full)")
        if refusal:
            return f"rows: {size}, not packed: {refusal}"
        if spec.capture.further == (POSITIONS,):
            return f"rows: packed into {size}"
        why = self.known_refusal
        return f"rows: {size}; padded rows are " + (f"not packed: {why}" if why else f"packed into rows of {self.least}")

    def reads_padding(self, training: bool) -> bool:
        """True if a mask for padding on the right may change what is computed, if the labels of the padding are ignored. No
        token of a causal model sees such padding; tokens of another model may, unless it takes no mask. The first call may
        capture the model with a mask."""
        if self.captures.first.captured.causal:
            return False
        try:
            self.captures.serve(self.captures.capture_key((MASK,), training))
        except (CaptureError, UnsupportedError):
            return False
        return True

    def unread(self, key: CaptureKey) -> str:
        """The reason why attention does not read where the sequences of a packed batch begin; "" if it does. The first call may
        capture the model with this key."""
        if key not in self._unread:
            try:
                packed = self.captures.serve(key).captured
                fused = packed.fused_attention
                blind = calls_blind_to(POSITIONS, packed.calls, packed.templates) if fused else _mixing(packed)
                self._unread[key] = (
                    f"attention does not read position_ids{_named(blind)}" if blind or not fused else
                    "the model uses a number computed from all positions of a batch" if packed.totals else "")
            except (CaptureError, UnsupportedError) as error:
                self._unread[key] = f"the model cannot be captured with position_ids: {first_line(error)}"
        return self._unread[key]

    def _positions_are_counted(self, training: bool, masked: bool) -> bool:
        """True if the model itself counts positions from 0 at the start of a row, including padding. Some models count only
        tokens that the mask shows, or begin at another number."""
        further = (MASK, POSITIONS) if masked else (POSITIONS,)
        key = replace(self.captures.capture_key(further, True), evaluating=not training)
        return self.captures.first.captured.is_implied(key, POSITIONS, USUALLY_IMPLIED[POSITIONS])


def obstacle(captured: CapturedModel, types: Mapping[str, TemplateInput]) -> str:
    """The reason why batches of a model cannot be packed, with the names of the inputs or calls that prevent it; "" if its
    graphs for plain batches show none. `captured`: the capture for plain batches. `types`: of its batch arguments."""
    return next(_obstacles(captured, types), "")


def _obstacles(captured: CapturedModel, types: Mapping[str, TemplateInput]) -> Iterator[str]:
    images = {name for positions in captured.image_positions for name in positions.images}
    of_rows = [name for name, given in types.items() if len(given.shape) < 2 or given.shape[1] != LENGTH_SYMBOL]
    if images or captured.image_positions or captured.patches:
        yield f"the model takes images{_named(sorted(images) or of_rows)}"
    if of_rows:
        yield f"some arguments have values for rows instead of tokens{_named(of_rows)}"
    if not captured.logits_of_tokens:
        yield "the model's output has values for sequences instead of tokens"
    if not captured.masks_hide or POSITIONS not in captured.forward_arguments:
        yield "the model's forward does not take attention_mask and position_ids as models from transformers do"
    if not captured.causal or not captured.fused_attention:
        yield f"not all layers are causal attention that streaming has kernels for{_named(_mixing(captured))}"
    if captured.has_loss and (not captured.has_loss_denominator or captured.is_averaged):
        yield "the loss is not a sum over target tokens"
    if captured.token_loss:
        yield "the loss is a function of all tokens, including padding"
    if captured.across_rows:
        yield f"the model computes with several rows at once, in {captured.across_rows}"
    if mixing := _mixing(captured):
        yield f"tokens interact outside of attention, for example in a convolution or a recurrence{_named(mixing)}"


def _mixing(captured: CapturedModel) -> list[str]:
    """The calls in which tokens interact outside of our attention. If some of them have no attention, only those."""
    mixing = [call for call in captured.calls[:-1] if across_tokens(captured.templates[call.template])]
    bare = [call for call in mixing if not any("attention" in str(node.target) for node in
                                               captured.templates[call.template].forward_graph().nodes)]
    return [call.name for call in bare or mixing]


def _named(names: Sequence[str]) -> str:
    return f" ({listed(names, 4)})" if names else ""


def present_tokens(inputs: Mapping[str, Tensor], mask: Tensor | None, labels: Sequence[str], wanted: Wanted) -> BoolArray:
    """A mask of the positions that hold a token, bool [rows, length]: those that the batch's mask does not hide. Without a
    mask, if only the loss is wanted: those up to the last target of their row."""
    size = next(iter(inputs.values())).shape[:2]
    if mask is not None and mask.shape == size:
        return array_of(mask) != 0  # type: ignore[no-any-return]
    targets = [inputs[name] for name in labels if name in inputs]
    if mask is None and wanted == Wanted.LOSS and targets and all(each.shape == size for each in targets):
        return _until_last_target(targets)
    return np.ones(size, dtype=bool)


def _until_last_target(labels: Sequence[Tensor]) -> BoolArray:
    """A mask of the positions up to and including the last target of their row, bool [rows, length]."""
    counts: BoolArray = np.logical_or.reduce([array_of(each) != IGNORED for each in labels])
    # Copied, since torch takes no array with negative strides, which `ascontiguousarray` leaves in one of a single element.
    return np.logical_or.accumulate(counts[:, ::-1], axis=1)[:, ::-1].copy()
