"""Rows of uneven length -> rows of one length that several sequences share, and back.

A batch whose rows are padded to the longest one computes mostly padding, and each step has a new length to compile for. Here
the sequences of such a batch share rows of one fixed length, as sequences that do not see each other:

    batch [4, 7]          packed [2, 8]         positions
    a a a . . . .         c c c c c c d d       0 1 2 3 4 5 0 1
    b b b b . . .   ->    b b b b a a a .       0 1 2 3 0 1 2 0
    c c c c c c .
    d d . . . . .

The layout is a function of the batch alone: nothing is remembered from step to step, so a resumed run lays out what the
interrupted one would have. Which batches may be packed, `repacking.py` decides.
"""
from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: A flag for each place of a batch, [rows, length]. NumPy computes with it on the caller's thread: a PyTorch op on so many
#: elements waits for a team of threads, whose cores the last step's update occupies.
BoolArray = npt.NDArray[np.bool_]

#: Tokens of a packed row, unless a sequence is longer or the whole batch is shorter. Attention never crosses sequences, so
#: longer rows compute nothing more; they only leave less room unused at their ends.
LENGTH = 2048
#: Tokens of the shortest row.
_SHORTEST = 64


@dataclass(frozen=True)
class Span:
    """One sequence: the places `start` to `stop` of a row of the batch; `position`, that of its first token."""

    row: int
    start: int
    stop: int
    position: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def end(self) -> int:
        """The position that a next token would have."""
        return self.position + self.tokens


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a batch of `size` (rows, length) lie once they are packed.

    `source`: int64 [packed rows, packed length], which of the batch's places, counted row by row, each token is from; -1 where
    there is none. `positions`: int64, of the same shape. `begins`: bool, the first token of each sequence."""

    size: tuple[int, int]
    source: Tensor
    positions: Tensor
    begins: Tensor

    @cached_property
    def _source(self) -> npt.NDArray[np.int64]:
        """`source` as an array, with some place of the batch where there is no token (`_empty`)."""
        return np.maximum(self.source.numpy(), 0)

    @cached_property
    def _empty(self) -> BoolArray:
        return self.source.numpy() < 0

    @cached_property
    def filled(self) -> Tensor:
        """Which places hold a token: indices of the packed places, counted row by row, int64 [tokens]."""
        return (self.source.flatten() >= 0).nonzero().squeeze(1)

    def pack(self, tensor: Tensor, filling: int = 0) -> Tensor:
        """The values of a batch's tokens, [rows, length, ...], in packed places; `filling` where there is no token."""
        if tensor.is_cpu and not tensor.is_floating_point():  # ids and labels, of every batch
            packed = tensor.flatten(0, 1).numpy()[self._source]
            packed[self._empty] = filling
            return torch.from_numpy(packed)
        flat = tensor.flatten(0, 1)
        values = flat[self.source.clamp(min=0).to(flat.device)]
        values[(self.source < 0).to(flat.device)] = filling
        return values

    def pack_targets(self, labels: Tensor, ignored: int) -> Tensor:
        """Labels in packed places. That of a sequence's first token is `ignored`: the token before it is of another one."""
        packed = self.pack(labels, ignored)
        packed.masked_fill_(self.begins.to(packed.device), ignored)
        return packed

    def unpack(self, packed: Tensor) -> Tensor:
        """Values of packed tokens, [packed rows, packed length, ...], in the batch's places, zeros in those without a token.
        Differentiable."""
        flat = packed.flatten(0, 1)
        filled = self.filled.to(flat.device)
        places = self.source.flatten()[self.filled].to(flat.device)
        out = flat.new_zeros(self.size[0] * self.size[1], *flat.shape[1:])
        return out.index_copy(0, places, flat[filled]).unflatten(0, self.size)


def array_of(tensor: Tensor) -> npt.NDArray[Any]:
    """The values of a tensor as a NumPy array on the host, which shares its memory where it can."""
    here = tensor.detach().cpu()
    return (here.float() if here.dtype == torch.bfloat16 else here).numpy()


def spans_of(present: BoolArray, positions: Tensor | None, sequences: bool) -> list[Span] | None:
    """The sequences of a batch, by rows. `present`: bool [rows, length], which places hold a token; `positions`: int64, of the
    same shape (None: counted from 0 in each row); `sequences`: a row has a new one wherever positions do not go on.

    None where a row's tokens are not next to each other, or where the positions of a sequence do not go on."""
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


def lay_out(spans: Sequence[Span], size: tuple[int, int], least: int = LENGTH) -> Layout:
    """Packs the sequences of a batch of `size`, at least one: best fit, the longest first. Rows have `least` tokens, a power of
    two; more, the next power of two, where a sequence is longer, and less where all tokens together are fewer."""
    longest, tokens = max(span.tokens for span in spans), sum(span.tokens for span in spans)
    length = max(power_of_two(longest), min(least, power_of_two(max(tokens, _SHORTEST))))
    rows = _best_fit(spans, length)
    count = len(rows)
    unused = torch.arange(length) % longest  # sequences of their own, whose positions real ones have too
    source, positions = torch.full((count, length), -1), unused.repeat(count, 1)
    begins = torch.zeros((count, length), dtype=torch.bool)
    for number, row in enumerate(rows):
        at, end = 0, None
        for span in row:
            if end == span.position:  # it would seem to go on with the sequence before: a place without a token between them,
                positions[number, at] = end  # which goes on with that one, and whose position comes twice
                at += 1
            stop = at + span.tokens
            first = span.row * size[1] + span.start
            source[number, at:stop] = torch.arange(first, first + span.tokens)
            positions[number, at:stop] = torch.arange(span.position, span.end)
            begins[number, at] = True
            at, end = stop, span.end
        positions[number, at:] = unused[:length - at]
    return Layout(size, source, positions, begins)


def _best_fit(spans: Sequence[Span], length: int) -> list[list[Span]]:
    """Rows of sequences, each in the fullest row that has room, the longest first. A place is kept free in front of each that
    might seem to go on with another."""
    rows: list[list[Span]] = []
    room: list[tuple[int, int]] = []  # (places left, row), sorted
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
    """The least that is not below."""
    return 1 << (number - 1).bit_length()
