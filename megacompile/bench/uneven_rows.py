"""Data of uneven length for benchmarks: rows of random tokens, and how they are put into batches."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from megacompile.finetuning.document_packing import best_fit
from megacompile.losses import IGNORED


@dataclass(frozen=True)
class Lengths:
    """A log-normal distribution of lengths in tokens, with this `median` and standard deviation `sigma` of the logarithm,
    clamped to the range from `shortest` to `longest`."""

    median: float
    sigma: float
    shortest: int
    longest: int

    def draw(self, count: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.empty(count).log_normal_(math.log(self.median), self.sigma, generator=generator)
        return [int(length) for length in drawn.clamp(self.shortest, self.longest).round().tolist()]


#: Typical data. Instructions are short, chats have a long tail, documents are truncated.
DATA = {
    "instructions": Lengths(180, 0.8, 16, 2048),
    "chat": Lengths(500, 1.1, 32, 8192),
    "documents": Lengths(1200, 1.2, 64, 4096),
}
#: Rows of one length, with as many tokens per step as instructions have.
FULL = "full"


class RandomRows(Dataset[dict[str, Any]]):
    """Rows of random tokens with these lengths. All tokens are targets. The same seed gives the same rows."""

    def __init__(self, lengths: Sequence[int], vocabulary: int, seed: int = 0) -> None:
        self.lengths, self.vocabulary, self.seed = lengths, vocabulary, seed

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self.seed * 2**32 + index)
        ids = torch.randint(0, self.vocabulary, (self.lengths[index],), generator=generator).tolist()
        return dict(input_ids=ids, labels=ids, tokens=len(ids))


def collate(found: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """A batch of rows padded on the right to the longest one: ids, mask and labels, int64 [rows, length]."""
    shape = len(found), max(len(row["input_ids"]) for row in found)
    batch = dict(input_ids=torch.zeros(shape, dtype=torch.int64), attention_mask=torch.zeros(shape, dtype=torch.int64),
                 labels=torch.full(shape, IGNORED))
    for number, row in enumerate(found):
        count = len(row["input_ids"])
        batch["input_ids"][number, :count] = torch.tensor(row["input_ids"])
        batch["labels"][number, :count] = torch.tensor(row["labels"])
        batch["attention_mask"][number, :count] = 1
    return batch


#: Rows that are packed together. Few, so that packed rows come in about the order of the rows in them.
_WINDOW = 512


class PackedRows(Dataset[dict[str, Any]]):
    """Rows of one length. Each holds several rows of `source`, packed by best fit, with position IDs that restart at 0."""

    def __init__(self, source: RandomRows, length: int) -> None:
        self.source, self.length = source, length
        self.groups: list[list[int]] = []
        for begin in range(0, len(source.lengths), _WINDOW):
            found = best_fit(source.lengths[begin:begin + _WINDOW], length)
            self.groups += sorted(sorted(begin + index for index in group) for group in found)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = dict(input_ids=[], labels=[], position_ids=[])
        for each in self.groups[index]:
            ids = self.source[each]["input_ids"]
            row["input_ids"] += ids
            row["labels"] += [IGNORED, *ids[1:]]
            row["position_ids"] += range(len(ids))
        left = self.length - len(row["input_ids"])
        return dict(input_ids=row["input_ids"] + left * [0], labels=row["labels"] + left * [IGNORED],
                    position_ids=row["position_ids"] + list(range(left)), tokens=self.length - left)


def stack(found: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """A batch of rows of one length: tensors int64 [rows, length]."""
    return {name: torch.tensor([row[name] for row in found]) for name in ("input_ids", "labels", "position_ids")}
