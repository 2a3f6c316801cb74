"""Rounds up the length of batches that are not packed, so that uneven rows have few widths: each needs a program of its own.

    batch [2, 300], not packed  ->  [2, 512], with padding on the right that no token sees and no loss counts

A width depends only on the batch and on the usual length of rows, so a resumed run has the widths of the interrupted one.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.template import LENGTH, TemplateInput
from megacompile.inputs.packed_layout import (
    TOKENS_OF_A_GROUP,
    BoolArray,
    GroupedRows,
    Grouping,
    grouped,
    lengths_of_rows,
    of_length,
    power_of_two,
)
from megacompile.ir.plan import FULL_TOKENS
from megacompile.losses import IGNORED

#: Arguments that only some batches have. Zeros are right for padding: no mask shows it, and position 0 begins a sequence.
MASK, POSITIONS = "attention_mask", "position_ids"
#: The values that most models assume for a missing argument: those of a row, by its length. `CapturedModel.is_implied` tells
#: whether a model does.
USUALLY_IMPLIED: dict[str, Callable[[int], Tensor]] = {
    MASK: functools.partial(torch.ones, dtype=torch.long), POSITIONS: torch.arange}

#: Multiples of this number of tokens are lengths that people choose.
_CHOSEN = 256
#: Widths, in sixteenths of the usual length. Each is at most twice the one before. They are finest where a step computes most,
#: and have the powers of two that rows are often cut to.
_SIXTEENTHS = (1, 2, 4, 6, 8, 10, 12, 16)


@dataclass(frozen=True)
class RightPadding:
    """A batch of `size` (rows, length) that was padded on the right to `length` tokens."""

    size: tuple[int, int]
    length: int

    def pack(self, tensor: Tensor, filling: int = 0) -> Tensor:
        """Values [rows, length, ...] of the batch, with `filling` after them."""
        return of_length(tensor, self.length, filling)

    def unpack(self, values: Tensor) -> Tensor:
        """Values of the padded batch without those of the padding. Differentiable."""
        return values[:, :self.size[1]]


def is_usual(length: int) -> bool:
    """True if rows of this length without padding stay as they are: a power of two, or another length that people choose."""
    return length % _CHOSEN == 0 or power_of_two(length) == length


def rounded(length: int, usual: int, rows: int = 1) -> int:
    """The width to which a batch is padded if its longest row has `length` tokens. `usual`: the length of the longest rows of
    all batches, or a guess. Widths are parts of `usual`, or of two, four, ... times `usual` for longer rows. Batches of more
    than 16 rows may be narrower than the least part: the longest of so many rows vary less, and a sixteenth would be much work
    if all of them are short."""
    while length > usual:
        usual *= 2
    width = next(width for part in _SIXTEENTHS if (width := usual * part // 16) >= length)
    while width // 2 >= max(length, usual // rows):
        width //= 2
    return width


def padding_for(captured: CapturedModel, types: Mapping[str, TemplateInput], inputs: Mapping[str, Tensor],
                present: BoolArray, usual: int, grouping: Grouping) -> RightPadding | GroupedRows | None:
    """The padding of a batch that is not packed; None if its length is a width and one group is best, if all batches may have
    this length, or if padding could change a result. `inputs`: all arguments of the batch, and their `types`. `present`: the
    positions that hold a token. `usual`: as for `rounded`."""
    rows, length = present.shape
    wanted = rounded(length, usual, rows)
    full = present.all() and (rows > 1 or is_usual(length))
    if full or not is_invisible(captured, types, inputs):
        return None
    # A token that sees none attends to all of them, in transformers, so padding on the left has other values in longer rows.
    if MASK in inputs and not present[:, 0].all():
        return None
    if grouping is not Grouping.NONE and (found := _grouped(captured, inputs, present, usual, grouping)) is not None:
        return found
    if wanted == length or not (captured.holds_at(length) and captured.holds_at(wanted)):
        return None
    return RightPadding((rows, length), wanted) if _has_positions(captured, inputs, (rows, length), wanted) else None


def predicts_before_first_token(captured: CapturedModel, inputs: Mapping[str, Tensor]) -> bool:
    """True if padding on the left predicts a target of a batch. Such padding attends to all positions of its row, so the loss
    depends on their number."""
    mask = inputs.get(MASK)
    if mask is None or mask.dim() != 2 or captured.count_targets is None or not {*captured.labels} <= inputs.keys():
        return False
    before = (mask.cumsum(1) - mask) == 0  # up to the first token, whose label the padding predicts
    before &= mask[:, :1] == 0
    if not before.any():
        return False
    later = {name: tensor.masked_fill(before.view(*before.shape, *[1] * (tensor.dim() - 2)), IGNORED)
             for name, tensor in inputs.items() if name in captured.labels}
    return bool(captured.count_targets({**inputs, **later}) != captured.count_targets(inputs))


def _grouped(captured: CapturedModel, inputs: Mapping[str, Tensor], present: BoolArray, usual: int,
             grouping: Grouping) -> GroupedRows | None:
    """The groups of a batch's rows; None if they save less than a group costs."""
    lengths = lengths_of_rows(present, [inputs[name] for name in captured.labels if name in inputs])
    return groups_of(captured, inputs, present.shape, lengths, usual, grouping)


def groups_of(captured: CapturedModel, inputs: Mapping[str, Tensor], size: tuple[int, int], lengths: Sequence[int], usual: int,
              grouping: Grouping) -> GroupedRows | None:
    """The groups of rows of these lengths, of a batch of this size; None if they save less than a group costs."""
    rows, length = size
    if rows * length <= 2 * TOKENS_OF_A_GROUP:
        return None
    most_rows = {width: captured.most_rows(width, max(1, FULL_TOKENS // width)) for width in {
        rounded(each, usual) for each in {*lengths}}}
    widths = {width: most for width, most in most_rows.items() if most}
    if max(most_rows) not in widths or not captured.most_rows(max(widths), 1):
        return None
    if not _has_positions(captured, inputs, (rows, length), max(length, *widths)):
        return None
    found = grouped(size, lengths, widths, grouping)
    saved = rows * rounded(length, usual, rows) - found.tokens
    return found if saved >= TOKENS_OF_A_GROUP * len(found.groups) else None


def _has_positions(captured: CapturedModel, inputs: Mapping[str, Tensor], size: tuple[int, int], width: int) -> bool:
    """True if the model's tables, such as learned positions, have all rows that a batch of this size reads when padded to a
    width."""
    if not captured.tables:
        return True
    longer = {name: padded(name, tensor, RightPadding(size, width), captured.labels) for name, tensor in inputs.items()}
    return all(table.missing(longer) is None for table in captured.tables)


def is_invisible(captured: CapturedModel, types: Mapping[str, TemplateInput], inputs: Mapping[str, Tensor]) -> bool:
    """True if more padding on the right changes no value of a token and no loss. A causal model's tokens do not see it. Tokens
    of other models do not see it if an attention mask hides it."""
    shapes = [types[name].shape if name in types else () for name in inputs]
    if any(len(shape) < 2 or shape[1] != LENGTH or LENGTH in shape[2:] for shape in shapes):
        return False  # values for rows, images or pairs of tokens
    if captured.totals or captured.counts_positions or captured.image_positions or captured.patches or captured.across_rows:
        return False
    if captured.chooses_tokens or not captured.logits_of_tokens:
        return False  # such as those of the last token, which the model finds by its id
    if captured.has_loss and (captured.token_loss or captured.is_averaged or not captured.has_loss_denominator):
        return False
    return captured.masks_hide and (captured.causal or MASK in inputs)


def padded(name: str, tensor: Tensor, padding: RightPadding | GroupedRows, labels: tuple[str, ...]) -> Tensor:
    """A batch argument of the padded batch, [rows, padded length, ...]."""
    if name in labels:
        return padding.pack(tensor, IGNORED)
    if name in (MASK, POSITIONS):
        return padding.pack(tensor)
    if padding.length > padding.size[1]:
        more = tensor[:, -1:].expand(-1, padding.length - padding.size[1], *tensor.shape[2:])  # values that occur
        tensor = torch.cat([tensor, more], dim=1)
    return padding.pack(tensor)
