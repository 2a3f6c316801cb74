"""Texts -> sequences of one length, joined by the end token.

Tokens of one text see those of the text before it in the same sequence, as is usual where a model learns to continue text. It
would be wrong for conversations, which are a sequence each. Here is where they would be packed too, once a program keeps packed
documents apart.
"""
from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megacompile.errors import MegacompileError
from megacompile.finetuning.rows import Rows


def pack(tokens: Tensor, length: int) -> Rows:
    """Cuts one run of tokens, 1-D, into sequences of `length`; what is left at the end, less than one, goes.

    Raises `MegacompileError` if that is all there is."""
    count = tokens.numel() // length
    if count == 0:
        raise MegacompileError(f"the data holds {tokens.numel()} tokens, fewer than one sequence of {length}: give more text "
                               "or a smaller --length")
    starts = torch.arange(count) * length
    return Rows(tokens, torch.stack([starts, starts + length], dim=1))


def join(documents: Iterable[list[int]], end: int) -> Tensor:
    """The documents in their order, int32, each with the token `end` behind it."""
    parts = [torch.tensor(each if each[-1:] == [end] else [*each, end], dtype=torch.int32) for each in documents]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32)
