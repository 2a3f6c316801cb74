"""Which batches of uneven rows are packed into rows of one length, and what the model is given then.

A batch is packed if that changes nothing but where its tokens lie: the model is causal, only attention lets tokens meet, and
attention reads where sequences begin. What cannot be packed is computed as it came, padding and all: `obstacle` and `unread`
say why of a model, and `pack` of a batch.
"""
from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from megacompile.errors import CaptureError, UnsupportedError, first_line, listed
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.across_rows import across_tokens
from megacompile.frontend.templates.segment_sources import calls_blind_to
from megacompile.frontend.templates.template import LENGTH as LENGTH_SYMBOL
from megacompile.frontend.templates.template import TemplateInput
from megacompile.inputs.captures import Captures
from megacompile.inputs.packed_layout import LENGTH, BoolArray, Layout, array_of, lay_out, power_of_two, spans_of
from megacompile.ir.plan import CaptureKey, Shape
from megacompile.losses import IGNORED

_MASK, _POSITIONS = "attention_mask", "position_ids"

#: PyTorch runs an op on so many elements on the caller's thread alone (at::internal::GRAIN_SIZE). For more it waits for a team
#: of threads, whose cores the last step's update occupies.
_SERIAL_ELEMENTS = 32768


class Wanted(enum.Enum):
    """What a caller reads of what a batch gives."""

    #: The loss alone: tokens after the last target of a row need not be computed.
    LOSS = enum.auto()
    #: Values of tokens, and not of padding.
    TOKENS = enum.auto()
    #: Values of every place.
    ALL = enum.auto()


class Repacking:
    """Of one streamed model. State: which forms of packed batches its attention reads, and whether its positions are counted
    from a row's first place, each asked when the first batch needs to know."""

    def __init__(self, captures: Captures, option: bool | int) -> None:
        self.captures = captures
        self.enabled = bool(option)
        self.least = LENGTH if option is True else power_of_two(option)
        self._unread: dict[CaptureKey, str] = {}
        self._counted: dict[CaptureKey, bool] = {}

    def pack(self, inputs: Mapping[str, Tensor], present: BoolArray, mask: Tensor | None, further: Mapping[str, Tensor],
             training: bool, wanted: Wanted) -> tuple[dict[str, Tensor], Layout] | str:
        """The arguments of a packed batch, positions among them, and where its tokens lie; or why it is computed as it
        is. `inputs`: the arguments of plain batches; `present`: which of their places hold a token (`present_tokens`); `mask`:
        the batch's attention mask; `further`: the arguments that change what is computed."""
        if not self.enabled or self.obstacle:
            return self.known_refusal
        if others := set(further) - {_MASK, _POSITIONS}:
            return f"what {', '.join(sorted(others))} says of the rows may not hold of packed ones"
        size = next(iter(inputs.values())).shape[:2]
        rows, length = size
        labels = [inputs[name] for name in self.captures.first.captured.labels if name in inputs]
        positions = further[_POSITIONS].cpu() if _POSITIONS in further else None
        if mask is not None and mask.dim() != 2:
            return "its attention_mask is of pairs of tokens"
        if present.all() and (positions is None or power_of_two(length) == length):
            return "no row has padding"
        spans = spans_of(present, positions, sequences=mask is None)
        if not spans:
            return "its attention_mask has holes, or its position_ids do not go on" if present.any() else "it has no token"
        layout = lay_out(spans, (rows, length), self.least)
        packed_rows, packed_length = layout.source.shape
        if packed_length == length and packed_rows >= rows:
            return "packed, it would have as many rows, as long as these"
        packed = self._packed(inputs, layout)
        if self._targets(packed) != self._targets(inputs):
            return "padding on the left predicts a target"
        if unread := self.unread(self.captures.capture_key((_POSITIONS,), training)):  # late, since it may capture the model
            return unread
        if any(not present[span.row, 0] for span in spans):
            if wanted == Wanted.ALL and not labels:  # what predicts a row's first token is padding, and its values may be read
                return "it is padded on the left, and values of padding may be read"
            if positions is None and not self._positions_are_counted(training):
                return "it is padded on the left, and the model counts positions by the mask"
        return {**packed, _POSITIONS: layout.positions}, layout

    def _packed(self, inputs: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
        labels = self.captures.first.captured.labels
        return {name: layout.pack_targets(tensor, IGNORED) if name in labels else layout.pack(tensor)
                for name, tensor in inputs.items()}

    def _targets(self, inputs: Mapping[str, Tensor]) -> float:
        """How many targets the loss of a batch counts. In left padding some are lost: what predicts a row's first token is
        padding there, which sees nothing."""
        captured = self.captures.first.captured
        if captured.count_targets is None or not set(captured.labels) <= inputs.keys():
            return 0.0
        rows, length = next(iter(inputs.values())).shape[:2]
        few = max(1, _SERIAL_ELEMENTS // length)
        return sum(float(captured.count_targets({name: each[at:at + few] for name, each in inputs.items()}))
                   for at in range(0, rows, few))

    @cached_property
    def obstacle(self) -> str:
        """Why the model's batches cannot be packed; "" if they can, as far as is known without capturing it once more."""
        return obstacle(self.captures.first.captured, self.captures.first.types, self.captures.parameters)

    @property
    def known_refusal(self) -> str:
        """As `refusal`, as far as is known without capturing the model once more."""
        if not self.enabled:
            return "the model was streamed with repack=False"
        return self.obstacle or next(filter(None, self._unread.values()), "")

    def refusal(self, training: bool) -> str:
        """Why no padded batch of the model is packed; "" if they are. The first time may capture the model with positions."""
        return self.known_refusal or self.unread(self.captures.capture_key((_POSITIONS,), training))

    def outlook(self, shape: Shape, layout: Layout | None = None, refusal: str = "") -> str:
        """How the rows of a training batch are packed, or why they are not, as a line. `shape`: what runs; of a batch at hand,
        its `layout`, or the `refusal` to pack it."""
        size = f"{shape.batch} x {shape.length}"
        if layout is not None:
            rows, length = layout.size
            tokens = layout.filled.numel()
            return (f"rows: {rows} x {length} with {tokens:,} tokens, packed into {size}, which they fill to "
                    f"{tokens / layout.source.numel():.0%}")
        if refusal:
            return f"rows: {size}, not packed: {refusal}"
        if shape.further == (_POSITIONS,):
            return f"rows: packed into {size}"
        why = self.known_refusal
        return f"rows: {size}; padded ones are " + (f"not packed: {why}" if why else f"packed, into rows of {self.least}")

    def reads_padding(self, training: bool) -> bool:
        """Whether a mask of padding on the right, whose labels are ignored, may change what is computed. No token of a causal
        model sees such padding; others may, unless they take no mask. The first time may capture the model with one."""
        if self.captures.first.captured.causal:
            return False
        try:
            self.captures.serve(self.captures.capture_key((_MASK,), training))
        except (CaptureError, UnsupportedError):
            return False
        return True

    def unread(self, key: CaptureKey) -> str:
        """Why attention does not read where the sequences of a packed batch begin; "" if it does. The first time may capture
        the model in this key."""
        if key not in self._unread:
            try:
                packed = self.captures.serve(key).captured
                fused = packed.fused_attention
                blind = calls_blind_to(_POSITIONS, packed.calls, packed.templates) if fused else _mixing(packed)
                self._unread[key] = (
                    f"attention does not read position_ids{_named(blind)}" if blind or not fused else
                    "the model computes with a number made of all positions of a batch" if packed.totals else "")
            except (CaptureError, UnsupportedError) as error:
                self._unread[key] = f"the model cannot be captured with position_ids: {first_line(error)}"
        return self._unread[key]

    def _positions_are_counted(self, training: bool) -> bool:
        """Whether positions are counted from a row's first place, padding or not; some models count tokens by the mask."""
        key = self.captures.capture_key((_MASK,), training)
        if key not in self._counted:
            try:
                self._counted[key] = self.captures.first.captured.only_hides(key, _MASK) or _only_hides(
                    self.captures.serve(key).captured)
            except (CaptureError, UnsupportedError):
                self._counted[key] = False
        return self._counted[key]


def obstacle(captured: CapturedModel, types: Mapping[str, TemplateInput], parameters: Collection[str]) -> str:
    """Why batches of a model cannot be packed, with the inputs or the calls that it is for; "" if they can, as far as its
    `captured` graphs for plain batches show. `types`: of its batch arguments; `parameters`: of its forward."""
    return next(_obstacles(captured, types, parameters), "")


def _obstacles(captured: CapturedModel, types: Mapping[str, TemplateInput], parameters: Collection[str]) -> Iterator[str]:
    images = {name for places in captured.places for name in places.images}
    of_rows = [name for name, given in types.items() if len(given.shape) < 2 or given.shape[1] != LENGTH_SYMBOL]
    if images or captured.places or captured.patches:
        yield f"the model takes images{_named(sorted(images) or of_rows)}"
    if of_rows:
        yield f"values of some arguments are of rows, and not of tokens{_named(of_rows)}"
    if not captured.masks_hide or _POSITIONS not in parameters:
        yield "the model's forward takes no attention_mask and position_ids as models of transformers do"
    if not captured.causal or not captured.fused_attention:
        yield f"not all layers are causal attention that streaming has kernels for{_named(_mixing(captured))}"
    if captured.has_loss and (not captured.has_loss_denominator or captured.is_averaged):
        yield "the loss is not a sum over target tokens"
    if captured.token_loss:
        yield "the loss is a function of all tokens, padding among them"
    if captured.across_rows:
        yield f"the model computes with several rows at once, in {captured.across_rows}"
    if mixing := _mixing(captured):
        yield f"tokens meet outside of attention, in a convolution or a recurrence, say{_named(mixing)}"


def _mixing(captured: CapturedModel) -> list[str]:
    """The calls in which tokens meet otherwise than by our attention; those without any attention, if there are some."""
    mixing = [call for call in captured.calls[:-1] if across_tokens(captured.templates[call.template])]
    bare = [call for call in mixing if not any("attention" in str(node.target) for node in
                                               captured.templates[call.template].forward_graph().nodes)]
    return [call.name for call in bare or mixing]


def _named(names: Sequence[str]) -> str:
    return f" ({listed(names, 4)})" if names else ""


def present_tokens(inputs: Mapping[str, Tensor], mask: Tensor | None, labels: Sequence[str], wanted: Wanted) -> BoolArray:
    """Which places of a batch hold a token, [rows, length]: those that its mask does not hide; without a mask, where nothing
    but the loss is wanted, those up to the last target of their row."""
    size = next(iter(inputs.values())).shape[:2]
    if mask is not None and mask.shape == size:
        return array_of(mask) != 0  # type: ignore[no-any-return]
    targets = [inputs[name] for name in labels if name in inputs]
    if mask is None and wanted == Wanted.LOSS and targets and all(each.shape == size for each in targets):
        return _until_last_target(targets)
    return np.ones(size, dtype=bool)


def _until_last_target(labels: Sequence[Tensor]) -> BoolArray:
    """Which places come before the last target of their row, or are it, [rows, length]."""
    counts: BoolArray = np.logical_or.reduce([array_of(each) != IGNORED for each in labels])
    return np.logical_or.accumulate(counts[:, ::-1], axis=1)[:, ::-1]


def _only_hides(captured: CapturedModel) -> bool:
    """Whether the mask is read as true and false alone, by nothing that counts."""
    for call in captured.calls:
        for at, source in enumerate(call.sources):
            if source.kind == "batch" and source.name == _MASK:
                graph = captured.templates[call.template].forward_graph()
                placeholder = graph.find_nodes(op="placeholder")[at]
                if any(user.meta["val"].dtype != torch.bool for user in placeholder.users):
                    return False
    return True
