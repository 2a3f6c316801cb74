"""The sequences that a model is trained on, and batches of them in an order that depends only on a seed."""
from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megacompile.errors import MegacompileError
from megacompile.finetuning.chat import Encoded
from megacompile.inputs.rounded_lengths import rounded
from megacompile.losses import IGNORED

#: If all rows are shorter than the maximum length, batches are padded to a multiple of this number of tokens.
_LENGTH_STEP = 64

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Rows:
    """A set of sequences. `tokens`: the tokens of all sequences, 1-D, any integer dtype. `spans`: int64 [rows, 2], the begin
    and end of each sequence in `tokens`. `learned`: bool of the same shape as `tokens`, which tokens count for the loss, or
    None for all. `begins`: bool of the same shape, where a conversation begins, if sequences have several conversations that
    must not see each other; otherwise None."""

    tokens: Tensor
    spans: Tensor
    learned: Tensor | None = None
    begins: Tensor | None = None

    @classmethod
    def of(cls, encoded: Iterable[Encoded]) -> Rows:
        tokens, learned, ends = [np.empty(0, np.int32)], [np.empty(0, bool)], [0]
        for each in encoded:
            tokens.append(np.asarray(each.tokens, np.int32))
            learned.append(np.asarray(each.learned, bool))
            ends.append(ends[-1] + len(each.tokens))
        boundaries = torch.tensor(ends)
        return cls(torch.from_numpy(np.concatenate(tokens)), torch.stack([boundaries[:-1], boundaries[1:]], dim=1),
                   torch.from_numpy(np.concatenate(learned)))

    def __len__(self) -> int:
        return self.spans.shape[0]

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each row, int64 [rows]."""
        return self.spans[:, 1] - self.spans[:, 0]

    def truncated(self, length: int) -> Rows:
        """The same rows, cut off after `length` tokens. Shares memory."""
        ends = torch.minimum(self.spans[:, 1], self.spans[:, 0] + length)
        return replace(self, spans=torch.stack([self.spans[:, 0], ends], dim=1))

    def learning(self) -> Tensor:
        """True for each row that has a learned token, bool [rows]."""
        if self.learned is None:
            return self.lengths > 0
        before = torch.cat([torch.zeros(1, dtype=torch.int64), self.learned.cumsum(0)])
        return before[self.spans[:, 1]] > before[self.spans[:, 0]]

    def row(self, index: int) -> tuple[Tensor, Tensor]:
        """(tokens, labels) of one sequence, int64; the model itself shifts labels."""
        where = slice(*self.spans[index].tolist())
        tokens = self.tokens[where].long()
        return tokens, tokens if self.learned is None else tokens.where(self.learned[where], IGNORED)

    def positions(self, index: int) -> Tensor:
        """The position of each token of a sequence in its conversation, int64, 1-D."""
        assert self.begins is not None, "a sequence is one conversation"
        begins = self.begins[slice(*self.spans[index].tolist())]
        indexes = torch.arange(begins.numel())
        return indexes - indexes.where(begins, 0).cummax(0).values

    def select(self, which: Tensor | Sequence[int]) -> Rows:
        """Some of the rows, selected by a mask or by indices. Shares memory."""
        return replace(self, spans=self.spans[which])

    def fingerprint(self) -> str:
        """A hash of the rows. It differs for another data set, order or tokenizer."""
        found = hashlib.blake2b(digest_size=16)
        for tensor in (self.tokens, self.spans, self.learned, self.begins):
            if tensor is not None:
                found.update(tensor.contiguous().numpy().data)
        return found.hexdigest()


def split(rows: Any, share: float, seed: int) -> tuple[Any, Any]:
    """Splits `Rows`, or a `datasets.Dataset`, into (rows to train on, a fraction `share` to evaluate on). Both keep their order
    and have at least one row, unless `share` is 0, which holds out none.

    Raises `MegacompileError` if there are too few rows."""
    count = max(1, round(len(rows) * share)) if share else 0
    if count >= len(rows):
        raise MegacompileError(f"--eval-share leaves none of {len(rows)} rows to train on: give more data or a smaller share")
    held = torch.zeros(len(rows), dtype=torch.bool)
    held[torch.from_numpy(_permutation(len(rows), seed, 0)[:count])] = True
    return rows.select((~held).nonzero().flatten().tolist()), rows.select(held.nonzero().flatten().tolist())


def _permutation(count: int, seed: int, number: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([seed, number]).permutation(count)


@dataclass(frozen=True)
class Order:
    """Assigns rows to steps. Every epoch has all rows, in its own order. A step takes `batch` rows, also across the boundaries
    of epochs. It has no state, so a run can be resumed at any step. `epochs`: None for endless."""

    rows: int
    batch: int
    seed: int
    epochs: float | None = None

    @property
    def total(self) -> int | None:
        """The number of rows of all steps together, or None for endless."""
        return None if self.epochs is None else math.ceil(self.rows * self.epochs)

    @property
    def steps(self) -> int:
        """The number of steps of all epochs."""
        assert self.total is not None, "endless"
        return -(-self.total // self.batch)

    def batches(self, done: int = 0) -> Iterator[list[int]]:
        """The indices of the rows of each step after the first `done` steps. The last step may have fewer than `batch`."""
        start, epoch, order = done * self.batch, -1, np.empty(0, np.int64)
        while self.total is None or start < self.total:
            end = start + self.batch if self.total is None else min(start + self.batch, self.total)
            step = []
            for each in range(start, end):
                if each // self.rows != epoch:
                    epoch = each // self.rows
                    order = _permutation(self.rows, self.seed, epoch + 1)
                step.append(int(order[each % self.rows]))
            yield step
            start = end


@dataclass(frozen=True)
class Padding:
    """The sizes that batches are padded to: to `rows` rows, and to one of a few widths for rows of up to `longest` tokens
    (`rounded`). By default to the batch's longest row, which is enough for a model whose rows are packed. `mask`: whether
    batches have an attention mask."""

    rows: int = 0
    longest: int = 0
    mask: bool = True

    def size(self, lengths: Sequence[int]) -> tuple[int, int]:
        """The padded size (rows, tokens) of a batch of rows with these lengths."""
        width = max(lengths)
        return max(self.rows, len(lengths)), rounded(width, self.longest) if self.longest else width


def collate(rows: Rows, indices: Sequence[int], padding: Padding = Padding()) -> Batch:
    """A batch of these rows: `input_ids`, `labels` and `attention_mask`, int64 [batch, width].

    Rows are padded on the right with labels of -100, which changes no loss; rows that consist only of padding are added if
    `padding` requires them. If sequences have several conversations, there are `position_ids` instead of a mask. They restart
    at 0 with each conversation and with the padding, by which models and kernels separate them."""
    found = [rows.row(index) for index in indices]
    shape = padding.size([tokens.numel() for tokens, _ in found])
    tokens, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED)
    for number, (row, learned) in enumerate(found):
        tokens[number, :row.numel()], labels[number, :row.numel()] = row, learned
    batch_of = {"input_ids": tokens, "labels": labels}
    if rows.begins is None and padding.mask:
        lengths = torch.zeros(shape[0], 1, dtype=torch.int64)
        lengths[:len(found), 0] = rows.lengths[torch.tensor(indices)]
        batch_of["attention_mask"] = (torch.arange(shape[1]) < lengths).long()
    if rows.begins is not None:
        batch_of["position_ids"] = torch.arange(shape[1]).repeat(shape[0], 1)
        for number, index in enumerate(indices):
            known = rows.positions(index)
            batch_of["position_ids"][number] = torch.cat([known, torch.arange(shape[1] - known.numel())])
    return batch_of


def padded_length(length: int, *rows: Rows) -> int:
    """The maximum length that batches are padded to: `length`, or less if no row is that long."""
    longest = max((int(each.lengths.max()) for each in rows if len(each)), default=length)
    return min(length, -(-longest // _LENGTH_STEP) * _LENGTH_STEP)


def in_order(rows: Rows, batch: int, padding: Padding = Padding()) -> Iterator[Batch]:
    """Batches of all rows, once and in order, `batch` rows at a time."""
    for start in range(0, len(rows), batch):
        yield collate(rows, range(start, min(start + batch, len(rows))), padding)
