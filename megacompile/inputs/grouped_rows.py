"""Groups rows of similar length that are not packed, so that each group is padded to its own longest row.

    batch [5, 9]                 groups [1, 9] and [4, 4]
    a a . . . . . . .            c c c c c c c c c
    b b b b . . . . .            b b b b
    c c c c c c c c c     ->     d d d .
    d d d . . . . . .            a a . .
    e e . . . . . . .            e e . .

A step's micro-batches are parts of groups, so its weights are streamed once however many groups there are. The groups depend
only on the batch, and no state is kept between steps, so a resumed run has the groups of the interrupted one.
"""
from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from megacompile.inputs.packed_layout import BoolArray, array_of
from megacompile.losses import IGNORED

#: A group costs as much as this many tokens: its kernels are launched, and read the weights, once more.
TOKENS_OF_A_GROUP = 512


class Grouping(enum.Enum):
    """How many rows a group of rows of similar length may have."""

    #: There are no groups.
    NONE = enum.auto()
    #: Few numbers, since kernels are compiled for each.
    FEW_NUMBERS = enum.auto()
    #: Any number: kernels serve all of them.
    ANY_NUMBER = enum.auto()


@dataclass(frozen=True)
class GroupedRows:
    """A batch of `size` (rows, length) whose rows were sorted, the longest first. `order`: int64 [rows], the row of the batch
    that each sorted row is. `groups`: rows and length of each group, the longest first."""

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
        """Where each row of the batch is among the sorted ones, int64 [rows]."""
        return self.order.argsort()

    def pack(self, tensor: Tensor, filling: int = 0) -> Tensor:
        """Values [rows, length, ...] of the batch, sorted, with `filling` after them."""
        return of_length(tensor[self.order.to(tensor.device)], self.length, filling)

    def unpack(self, values: Tensor) -> Tensor:
        """Values of the sorted rows in the caller's order and length, zeros for what was not computed. Differentiable."""
        return of_length(values.index_select(0, self._places.to(values.device)), self.size[1])


def of_length(tensor: Tensor, length: int, filling: int = 0) -> Tensor:
    """Rows [rows, length, ...] without their ends, or with `filling` after them."""
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
    """The groups of rows that cost least. A group is padded to one of the `widths`, the largest of which holds every row, and
    has at most as many rows as `widths` says. A few numbers of rows are the powers of four."""
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
