"""Puts several documents into one sequence, to reduce padding.

Texts are joined with the end token and cut into sequences, which all begin as a text does. Tokens of a text see those of the
text before it, as is usual in pretraining. Conversations are packed whole and do not see each other: their positions restart
at 0.
"""
from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megacompile.errors import MegacompileError
from megacompile.finetuning.training_sequences import Rows


def pack(tokens: Tensor, length: int) -> Rows:
    """Cuts tokens, 1-D, into sequences of `length`. Drops an incomplete sequence at the end.

    Raises `MegacompileError` if there is not a single complete sequence."""
    count = tokens.numel() // length
    if count == 0:
        raise MegacompileError(f"the data has {tokens.numel()} tokens, fewer than one sequence of {length}: give more text or "
                               "a smaller --length")
    starts = torch.arange(count) * length
    return Rows(tokens, torch.stack([starts, starts + length], dim=1))


def begun(tokens: Tensor, length: int, begin: Sequence[int]) -> Tensor:
    """The tokens, 1-D, with those of `begin` inserted so that every sequence of `length` begins with them, once. Models that
    were trained with a beginning-of-sequence token predict badly without it.

    Raises `MegacompileError` if `begin` fills a sequence."""
    if not begin or not tokens.numel():
        return tokens
    if len(begin) >= length:
        raise MegacompileError(f"a sequence of {length} has no room beside the {len(begin)} special tokens that the tokenizer "
                               "puts before a text: give a larger --length")
    parts, start, first = list[Tensor](), 0, torch.tensor(begin, dtype=tokens.dtype)
    while start < tokens.numel():
        # Of a text that begins here, or just before, only what is cut off is missing.
        missing = next((cut for cut in range(min(len(begin), start + 1))
                        if torch.equal(tokens[start - cut:start - cut + len(begin)], first)), len(begin))
        end = start + length - missing
        parts += [first[:missing], tokens[start:end]]
        start = end
    return torch.cat(parts)


def join(documents: Iterable[list[int]], end: int) -> Tensor:
    """The documents in order, 1-D int32, with the token `end` after each."""
    parts = [torch.tensor(each if each[-1:] == [end] else [*each, end], dtype=torch.int32) for each in documents]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32)


def pack_conversations(rows: Rows, length: int) -> Rows:
    """Packs conversations of at most `length` tokens into sequences of at most `length` by best fit, longest first."""
    lengths = rows.lengths.tolist()
    members = best_fit(lengths, length)
    order = torch.tensor([row for each in members for row in each], dtype=torch.int64)
    sizes = rows.lengths[order]
    starts = sizes.cumsum(0) - sizes
    where = torch.arange(int(sizes.sum())) + (rows.spans[order, 0] - starts).repeat_interleave(sizes)
    begins = torch.zeros(where.numel(), dtype=torch.bool)
    begins[starts] = True
    filled = torch.tensor([sum(lengths[row] for row in each) for each in members], dtype=torch.int64)
    ends = filled.cumsum(0)
    learned = torch.ones_like(begins) if rows.learned is None else rows.learned[where]
    # The first token of a conversation would be predicted from the last one's end.
    return Rows(rows.tokens[where], torch.stack([ends - filled, ends], dim=1), learned & ~begins, begins)


def best_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Groups of indices whose sizes fit together into `room`, by best fit, longest first."""
    members: list[list[int]] = []
    with_space: defaultdict[int, list[int]] = defaultdict(list)
    spaces: list[int] = []  # the keys of `with_space` with a non-empty list, sorted
    for number in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        index = bisect_left(spaces, sizes[number])
        if index == len(spaces):
            members.append([])
            which, space = len(members) - 1, room
        else:
            space = spaces[index]
            which = with_space[space].pop()
            if not with_space[space]:
                del spaces[index]
        members[which].append(number)
        left = space - sizes[number]
        if not with_space[left]:
            insort(spaces, left)
        with_space[left].append(which)
    return members
