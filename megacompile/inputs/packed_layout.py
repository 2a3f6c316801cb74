"""Rearranges rows of uneven length into packed rows of one length, which several sequences share, and back.

A batch that is padded to its longest row computes mostly padding, and each step may have a new length to compile for. Packing
puts the sequences of such a batch into rows of one of a few lengths; sequences in one row do not see each other:

    batch [4, 7]          packed [2, 8]         positions
    a a a . . . .         c c c c c c d d       0 1 2 3 4 5 0 1
    b b b b . . .   ->    b b b b a a a .       0 1 2 3 0 1 2 0
    c c c c c c .
    d d . . . . .

The layout depends only on the batch, and no state is kept between steps, so a resumed run packs every batch as the interrupted
run would have. `repacking.py` decides which batches are packed.
"""
from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megacompile.frontend.templates.symbolic_sizes import UNIT
from megacompile.losses import IGNORED

#: A flag for each position of a batch, [rows, length]. NumPy computes with it on the caller's thread. A PyTorch op on this many
#: elements would wait for a thread pool whose cores are busy with the last step's update.
BoolArray = npt.NDArray[np.bool_]

#: Length of a packed row in tokens, unless a sequence is longer or the whole batch is shorter. Attention never crosses
#: sequences, so longer rows add no work; they only waste less space at their ends.
LENGTH = 2048
#: Length of the shortest packed row in tokens.
_SHORTEST = 64
#: The shares of the usual length that rows may have where kernels serve any length.
SHARES = (Fraction(15, 16), Fraction(7, 8), Fraction(13, 16), Fraction(3, 4))
#: The share of a batch's slots that shorter rows must save. Each size of a batch needs a program of its own.
_WORTH = Fraction(1, 32)


@dataclass(frozen=True)
class Span:
    """One sequence: columns `start` (inclusive) to `stop` (exclusive) of a row of the batch. `position`: the position ID of
    its first token."""

    row: int
    start: int
    stop: int
    position: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def end(self) -> int:
        """The position ID that the next token would have."""
        return self.position + self.tokens


@dataclass(frozen=True)
class Layout:
    """The positions of the tokens of a batch of `size` (rows, length) after packing. `source`: int64 [packed rows, packed
    length], the flat index of each token in the original batch, -1 for empty slots. `positions`: int64 of the same shape,
    position IDs. `begins`: bool of the same shape, True at the first token of each sequence."""

    size: tuple[int, int]
    source: Tensor
    positions: Tensor
    begins: Tensor

    @cached_property
    def _source(self) -> npt.NDArray[np.int64]:
        """`source` as an array, with 0 in empty slots (`_empty`)."""
        return np.maximum(self.source.numpy(), 0)

    @cached_property
    def _empty(self) -> BoolArray:
        return self.source.numpy() < 0

    @cached_property
    def filled(self) -> Tensor:
        """Flat indices of the packed slots that hold a token, int64 [tokens]."""
        return (self.source.flatten() >= 0).nonzero().squeeze(1)

    @property
    def spans(self) -> list[Span]:
        """The sequences in the packed rows. `Span.row` is a packed row."""
        filled, begins = self.source.numpy() >= 0, self.begins.numpy()
        ends = filled.copy()
        ends[:, :-1] &= ~filled[:, 1:] | begins[:, 1:]
        rows, starts = begins.nonzero()
        stops, first = ends.nonzero()[1] + 1, self.positions.numpy()[begins]
        return [Span(*span) for span in zip(rows.tolist(), starts.tolist(), stops.tolist(), first.tolist(), strict=True)]

    def part(self, number: int, count: int) -> Layout:
        """One of `count` equal parts of the packed rows."""
        rows = self.source.shape[0] // count
        where = slice(number * rows, (number + 1) * rows)
        return Layout(self.size, self.source[where], self.positions[where], self.begins[where])

    def pack(self, tensor: Tensor, filling: int = 0) -> Tensor:
        """The values [rows, length, ...] of a batch's tokens, packed: [packed rows, packed length, ...], with `filling` in
        empty slots."""
        if tensor.is_cpu and not tensor.is_floating_point():  # ids and labels: every batch takes this path
            packed = tensor.flatten(0, 1).numpy()[self._source]
            packed[self._empty] = filling
            return torch.from_numpy(packed)
        flat = tensor.flatten(0, 1)
        values = flat[self.source.clamp(min=0).to(flat.device)]
        values[(self.source < 0).to(flat.device)] = filling
        return values

    def pack_targets(self, labels: Tensor, ignored: int) -> Tensor:
        """Labels, packed. The label of a sequence's first token becomes `ignored`, since the token before it belongs to another
        sequence."""
        packed = self.pack(labels, ignored)
        packed.masked_fill_(self.begins.to(packed.device), ignored)
        return packed

    def unpack(self, packed: Tensor) -> Tensor:
        """The values [packed rows, packed length, ...] of packed tokens, in the original layout [rows, length, ...], with zeros
        for padding. Differentiable."""
        flat = packed.flatten(0, 1)
        filled = self.filled.to(flat.device)
        indexes = self.source.flatten()[self.filled].to(flat.device)
        out = flat.new_zeros(self.size[0] * self.size[1], *flat.shape[1:])
        return out.index_copy(0, indexes, flat[filled]).unflatten(0, self.size)


def array_of(tensor: Tensor) -> npt.NDArray[Any]:
    """The values of a tensor as a NumPy array on the host. Shares the tensor's memory if possible."""
    here = tensor.detach().cpu()
    return (here.float() if here.dtype == torch.bfloat16 else here).numpy()


def spans_of(present: BoolArray, positions: Tensor | None, sequences: bool) -> list[Span] | None:
    """The sequences of a batch, row by row. `present`: bool [rows, length], True where there is a token. `positions`: int64 of
    the same shape, position IDs (None: 0, 1, 2, ... in each row). `sequences`: a new sequence starts wherever the position IDs
    are not consecutive.

    None if a row's tokens are not contiguous, or, without `sequences`, if its position IDs are not consecutive."""
    counted = np.broadcast_to(np.arange(present.shape[1]), present.shape) if positions is None else array_of(positions)
    follows = present[:, 1:] & present[:, :-1]
    starts = present.copy()
    starts[:, 1:] &= ~follows
    if (starts.sum(1) > 1).any():  # holes
        return None
    breaks = follows & (counted[:, 1:] != counted[:, :-1] + 1)
    if breaks.any():
        if not sequences:
            return None
        starts[:, 1:] |= breaks
    stops = present.copy()
    stops[:, :-1] &= ~present[:, 1:] | starts[:, 1:]
    rows, begin = starts.nonzero()
    end, first = stops.nonzero()[1] + 1, counted[starts]
    return [Span(*span) for span in zip(rows.tolist(), begin.tolist(), end.tolist(), first.tolist(), strict=True)]


def lay_out(spans: Sequence[Span], size: tuple[int, int], least: int = LENGTH, shares: Sequence[Fraction] = (),
            parts: int = 1) -> Layout:
    """Packs the sequences of a batch of `size` (at least one sequence) by best fit, longest first. The number of packed rows
    is a multiple of `parts`.

    Packed rows have `least` tokens, a power of two. If a sequence is longer, they have the next power of two; if the whole
    batch has fewer tokens, they are shorter. Or they have one of these `shares` of that length, if that leaves fewer slots
    empty."""
    longest, tokens = max(span.tokens for span in spans), sum(span.tokens for span in spans)
    usual = length = max(power_of_two(longest), min(least, power_of_two(max(tokens, _SHORTEST))))
    def rounded_up(rows: int) -> int:
        return -(-rows // parts) * parts

    rows = _best_fit(spans, length)
    most = int(rounded_up(len(rows)) * length * (1 - _WORTH))
    for shorter in lengths_of(usual, shares)[1:]:
        if shorter >= longest and (slots := rounded_up(len(tried := _best_fit(spans, shorter))) * shorter) <= most:
            rows, length, most = tried, shorter, slots - 1
    count = rounded_up(len(rows))
    unused = torch.arange(length) % longest  # separate sequences, with position IDs that also occur in real ones
    source, positions = torch.full((count, length), -1), unused.repeat(count, 1)
    begins = torch.zeros((count, length), dtype=torch.bool)
    for number, row in enumerate(rows):
        at, end = 0, None
        for span in row:
            # A sequence whose first position ID follows the last one of the sequence before would look like its continuation.
            # An empty slot between them, which continues the first sequence, repeats the position ID and so separates them.
            if end == span.position:
                positions[number, at] = end
                at += 1
            stop = at + span.tokens
            first = span.row * size[1] + span.start
            source[number, at:stop] = torch.arange(first, first + span.tokens)
            positions[number, at:stop] = torch.arange(span.position, span.end)
            begins[number, at] = True
            at, end = stop, span.end
        positions[number, at:] = unused[:length - at]
    return Layout(size, source, positions, begins)


def lengths_of(usual: int, shares: Sequence[Fraction]) -> list[int]:
    """The usual length of packed rows, and shorter ones that kernels for any length serve."""
    return [usual, *(int(usual * share) for share in shares if usual * share % UNIT == 0)]


def _best_fit(spans: Sequence[Span], length: int) -> list[list[Span]]:
    """Rows of sequences: each sequence, longest first, goes into the fullest row that has room. A slot is reserved in front of
    every sequence that might look like the continuation of another."""
    rows: list[list[Span]] = []
    room: list[tuple[int, int]] = []  # (slots left, row), sorted
    ends = {span.end for span in spans}
    for span in sorted(spans, key=lambda s: (-s.tokens, s.row, s.start)):
        needed = span.tokens + (span.position in ends)
        at = bisect_left(room, (needed, -1))
        if at == len(room):
            rows.append([span])
            insort(room, (length - span.tokens, len(rows) - 1))
        else:
            left, row = room.pop(at)
            rows[row].append(span)
            insort(room, (left - needed, row))
    return rows


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


# -------------------- Groups rows of similar length that are not packed, so that each group is padded to its own longest row
#
#     batch [5, 9]                 groups [1, 9] and [4, 4]
#     a a . . . . . . .            c c c c c c c c c
#     b b b b . . . . .            b b b b
#     c c c c c c c c c     ->     d d d .
#     d d d . . . . . .            a a . .
#     e e . . . . . . .            e e . .
#
# A step's micro-batches are parts of groups, so its weights are streamed once however many groups there are. The groups depend
# only on the batch, and no state is kept between steps, so a resumed run has the groups of the interrupted one.
#: A group costs as much as this many tokens: its kernels are launched, and read the weights, once more.
TOKENS_OF_A_GROUP = 512


class Grouping(enum.Enum):
    """The allowed numbers of rows in a group of rows of similar length."""

    #: There are no groups.
    NONE = enum.auto()
    #: Few numbers, since kernels are compiled for each.
    FEW_NUMBERS = enum.auto()
    #: Any number: kernels serve all of them.
    ANY_NUMBER = enum.auto()


@dataclass(frozen=True)
class GroupedRows:
    """A batch of `size` (rows, length) whose rows were sorted, the longest first. `order`: int64 [rows], the batch's row number
    of each sorted row. `groups`: rows and length of each group, the longest first."""

    size: tuple[int, int]
    order: Tensor
    groups: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        """The length of all rows before they are cut into groups."""
        return self.groups[0][1]

    @property
    def tokens(self) -> int:
        return sum(rows * length for rows, length in self.groups)

    @cached_property
    def _places(self) -> Tensor:
        """The position of each row of the batch among the sorted ones, int64 [rows]."""
        return self.order.argsort()

    def pack(self, tensor: Tensor, filling: int = 0) -> Tensor:
        """Values [rows, length, ...] of the batch, sorted, with `filling` after them."""
        return of_length(tensor[self.order.to(tensor.device)], self.length, filling)

    def unpack(self, values: Tensor) -> Tensor:
        """Values of the sorted rows in the caller's order and length, zeros for what was not computed. Differentiable."""
        return of_length(values.index_select(0, self._places.to(values.device)), self.size[1])


def of_length(tensor: Tensor, length: int, filling: int = 0) -> Tensor:
    """Rows [rows, length, ...], cut off or extended with `filling` to this length."""
    more = length - tensor.shape[1]
    return tensor[:, :length] if more <= 0 else torch.nn.functional.pad(
        tensor, (0, 0) * (tensor.dim() - 2) + (0, more), value=filling)


def lengths_of_rows(present: BoolArray, labels: Sequence[Tensor]) -> list[int]:
    """The length of each row up to its last token, or to its last target if that is later. `present`: which positions hold a
    token, bool [rows, length]."""
    needed = np.logical_or.reduce([present, *(array_of(each) != IGNORED for each in labels)])
    needed[:, 0] = True
    lengths: list[int] = (needed.shape[1] - needed[:, ::-1].argmax(1)).tolist()
    return lengths


def grouped(size: tuple[int, int], lengths: Sequence[int], widths: Mapping[int, int], grouping: Grouping) -> GroupedRows:
    """The cheapest groups of rows. A group is padded to one of the `widths`, the largest of which holds every row, and has at
    most as many rows as `widths` says. Unless `grouping` allows any number of rows, the number is a power of four."""
    order = np.argsort([-length for length in lengths], kind="stable")
    sorted_widths = np.sort([*widths])
    width = sorted_widths[np.searchsorted(sorted_widths, [lengths[row] for row in order])]
    rows = len(lengths)
    cost, taken = np.zeros(rows + 1, dtype=np.int64), [0] * rows
    for first in reversed(range(rows)):  # the cost of all rows from this one on
        most = min(rows - first, widths[int(width[first])])
        counts = np.arange(1, most + 1) if grouping is Grouping.ANY_NUMBER else 4 ** np.arange((most.bit_length() + 1) // 2)
        costs = cost[first + counts] + counts * width[first] + TOKENS_OF_A_GROUP
        best = int(costs.argmin())
        cost[first], taken[first] = costs[best], int(counts[best])
    groups, first = [], 0
    while first < rows:
        groups.append((taken[first], int(width[first])))
        first += taken[first]
    return GroupedRows(size, torch.from_numpy(order), tuple(groups))
