"""Makes the batches of all ranks one batch: the same shape on every rank, and one loss for all rows.

All ranks run one program, so each rank's rows are padded to the most rows and the longest length of any rank. A rank with fewer
rows would otherwise wait for the others, so this costs no time. Added rows repeat the rank's first row, without targets. Added
tokens come after a row's own, where no other token sees them.

If only the loss of packed rows is read, they are packed again, as one batch, and divided among the ranks: a rank's rows may be
computed by another one. All ranks then have the same number of rows, with little padding. Where only some ranks can pack their
rows, none does.

The target tokens of all ranks divide each rank's loss. The sum of the ranks' losses is then the loss of one process that has
all rows. A caller may give the denominator of its rank's rows; where those differ, rows stay with their rank.
"""
from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megacompile.errors import LaneError, RankError, UnsupportedError, named_line
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.graph.sequences import SHIFTED
from megacompile.inputs import packed_layout
from megacompile.inputs.batch import BatchArguments, RepackedCaptures
from megacompile.inputs.packed_layout import Grouping, Layout, Span, array_of, lengths_of_rows, of_length
from megacompile.inputs.repacking import Captures
from megacompile.inputs.rounded_lengths import (
    MASK,
    POSITIONS,
    USUALLY_IMPLIED,
    RightPadding,
    groups_of,
    is_invisible,
    padded,
    predicts_before_first_token,
)
from megacompile.ir.plan import CaptureKey
from megacompile.losses import IGNORED
from megacompile.runtime.ranks import Ranks

#: In a batch that ranks exchange: which positions hold a token.
_PRESENT = "present tokens"


@dataclass(frozen=True)
class _Summary:
    """The facts about a rank's batch that the other ranks need."""

    rows: int
    length: int
    key: CaptureKey
    has_labels: bool
    names: tuple[str, ...]
    denominator: float | None  # of its rows' loss; None if there is none
    counted: bool  # the denominator, in the rank's batch; otherwise its caller gave it
    useful_tokens: int
    packed: bool
    rearranged: bool  # packed or padded, and can be read again without
    only_loss: bool  # is read
    may_grow: bool  # padding on the right changes no loss

    @classmethod
    def of(cls, fields: tuple[Any, ...]) -> _Summary:
        """The summary with these values of `astuple`."""
        rows, length, key, *others = fields
        return cls(rows, length, CaptureKey(*key), *others)

    def described(self) -> str:
        """The batch's arguments for a message, and in which mode the model computes it."""
        key, tensors = self.key, {each.partition(":")[0] for each in self.key.further}
        modes = {"in evaluation mode": key.evaluating, "without adapters": key.without_adapters,
                 f"with {key.images} images in each row": key.images != 1}
        arguments = ", ".join((*(name for name in self.names if name not in tensors), *key.further))
        return " ".join((arguments, *(mode for mode, on in modes.items() if on)))


@dataclass(frozen=True)
class AllRows:
    """The rows of all ranks; a batch has some of them. `first`: the number of its first row. `total`: the number of all rows.
    `inputs`: the arguments, for all rows, of values that depend on all rows."""

    first: int
    total: int
    inputs: Mapping[str, Tensor]


def tell(ranks: Ranks, doing: str, error: Exception) -> None:
    """Makes `joined` fail on the other ranks, which would otherwise pair with this rank's next call. Call this before `joined`,
    or within it before all agree again. The others already know of a failed lane."""
    if not isinstance(error, LaneError):
        with contextlib.suppress(RankError):  # `error` says more
            ranks.agree(doing, named_line(error))


def joined(ranks: Ranks, captures: RepackedCaptures, given: BatchArguments,
           doing: str) -> tuple[BatchArguments, BatchArguments, AllRows]:
    """This rank's batch, padded to the shape that all ranks agree on for the batches that they pass to `doing`. Its
    `useful_tokens` are those of all ranks. Also returns the batch as this rank would compute it alone, which is not packed if
    other ranks' rows cannot be. Raises `UnsupportedError` if the model computes with all rows at once, or would see padding,
    and if another rank has refused its batch; `RankError`."""
    all_ranks = _of_all(ranks, captures, given, doing)
    if any(each.rearranged for each in all_ranks) and (_common_key(all_ranks) is None or _padding_changes_loss(all_ranks)):
        try:
            given = given if given.read_again is None else given.read_again(all(each.may_grow for each in all_ranks))
        except Exception as error:
            tell(ranks, doing, error)
            raise
        all_ranks = _of_all(ranks, captures, given, doing)
    key = _common_key(all_ranks)
    if key is None:
        listed = "; ".join(f"rank {rank}: {each.described()}" for rank, each in enumerate(all_ranks))
        raise UnsupportedError(f"the ranks' batches have different arguments: pass the same arguments on every rank ({listed})")
    captured = captures.serve(key).captured
    exchangeable = _may_exchange_rows(all_ranks) and captured.has_loss_denominator and not captured.totals
    if exchangeable and all(each.packed for each in all_ranks):
        shared = _shared_out(ranks, captures, given, doing)
        if captured.holds_at(shared.length):
            total = ranks.size * shared.rows
            return _with_all_counts(shared, all_ranks, captured), given, AllRows(ranks.rank * shared.rows, total, {})
    _check(captured, all_ranks, key)
    if exchangeable and _may_be_dealt(all_ranks) and (dealt := _dealt(ranks, captures, given, key, doing)) is not None:
        return (_with_all_counts(dealt, all_ranks, captured), given,
                AllRows(ranks.rank * dealt.rows, ranks.size * dealt.rows, {}))
    rows, length = max(each.rows for each in all_ranks), max(each.length for each in all_ranks)
    if not captured.holds_at(length):  # which capture does, depends on the batches that a rank has had
        (traced_length, *_) = ranks.agree(doing, captures.key_at(key, length).traced_length)
        key = replace(key, traced_length=traced_length)
    inputs = _with_implied(given, captures, key)
    own = given.rows, given.length
    inputs = {name: _padded(name, tensor, own, (rows, length), captured) for name, tensor in inputs.items()}
    present = torch.nn.functional.pad(given.present, (0, length - given.length, 0, rows - given.rows))
    alike = _with_all_counts(replace(given, inputs=inputs, rows=rows, length=length, present=present, key=key), all_ranks,
                             captured)
    read = {source.name for total in captured.totals for source in total.sources} & inputs.keys()
    parts = ranks.agree(doing, {name: inputs[name].cpu() for name in read}) if captured.totals else []
    whole = {name: torch.cat([part[name] for part in parts]) for name in read}
    return alike, given, AllRows(ranks.rank * rows, ranks.size * rows, whole)


def _of_all(ranks: Ranks, captures: Captures, given: BatchArguments, doing: str) -> list[_Summary]:
    """The summaries of all ranks' batches. Raises `UnsupportedError` if a rank has refused its batch."""
    denominator = None if given.loss_denominator is None else float(given.loss_denominator)
    mine = _Summary(given.rows, given.length, given.key, given.has_labels, tuple(given.inputs), denominator, given.counted,
                    given.useful_tokens, isinstance(given.layout, Layout), given.read_again is not None, given.only_loss,
                    not predicts_before_first_token(captures.serve(given.key).captured, given.inputs))
    found = ranks.agree(doing, astuple(mine))
    if refused := next(((rank, text) for rank, text in enumerate(found) if isinstance(text, str)), None):
        rank, text = refused
        raise UnsupportedError(f"rank {rank}{ranks.hosts.where(rank)} has refused its batch ({text}): correct it there, or "
                               "leave the batch out on every rank")
    return [_Summary.of(fields) for fields in found]


def _padding_changes_loss(all_ranks: list[_Summary]) -> bool:
    """True if a rank's batch is shorter than another's, and would have another loss if it were padded."""
    longest = max(each.length for each in all_ranks)
    return any(each.length < longest and not each.may_grow for each in all_ranks)


def _may_exchange_rows(all_ranks: list[_Summary]) -> bool:
    """True if any rank may compute any row: only the loss is read, and one number divides all losses. Raises `UnsupportedError`
    if only some callers give a denominator."""
    own = {rank: each.denominator for rank, each in enumerate(all_ranks) if each.denominator is not None and not each.counted}
    if own and (without := next((rank for rank in range(len(all_ranks)) if rank not in own), None)) is not None:
        raise UnsupportedError(f"num_items_in_batch is passed on rank {next(iter(own))} and not on rank {without}, so that "
                               "their losses have different scales: pass it on every rank, or on none")
    return all(each.only_loss for each in all_ranks) and len({*own.values()}) <= 1


def _may_be_dealt(all_ranks: list[_Summary]) -> bool:
    """True if rows that are not packed may change their rank and their length, and have enough padding for groups to pay."""
    size = len(all_ranks)
    slots = size * max(each.rows for each in all_ranks) * max(each.length for each in all_ranks)
    padding = slots - sum(each.useful_tokens for each in all_ranks)
    return padding >= size * packed_layout.TOKENS_OF_A_GROUP and len({each.key.further for each in all_ranks}) == 1 and all(
        each.may_grow and not each.packed and each.key.sequence_ranks == 1 for each in all_ranks)


def _dealt(ranks: Ranks, captures: RepackedCaptures, given: BatchArguments, key: CaptureKey,
           doing: str) -> BatchArguments | None:
    """This rank's part of the rows of all ranks, grouped by length: the longest rows go to one rank each, then the next ones.
    So all ranks have the same groups. None, on all ranks, if that saves less than the groups cost."""
    served, repacking = captures.serve(key), captures.repacking
    captured, grouping = served.captured, repacking.grouping_of_ranks
    if grouping is Grouping.NONE or not repacking.enabled or not is_invisible(captured, served.types, given.inputs):
        return None
    found = ranks.agree(doing, {name: tensor.cpu() for name, tensor in given.inputs.items()} | {_PRESENT: given.present.cpu()})
    longest = max(each[_PRESENT].shape[1] for each in found)

    def of_all(name: str) -> Tensor:
        parts = (each[name] for each in found)
        if name == _PRESENT:
            return torch.cat([of_length(part, longest, 0) for part in parts])
        return torch.cat([padded(name, part, RightPadding(tuple(part.shape[:2]), longest), captured.labels) for part in parts])

    whole = {name: of_all(name) for name in found[0]}
    lengths = lengths_of_rows(array_of(whole[_PRESENT]), [whole[name] for name in captured.labels if name in whole])
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    rounds = [order[first:first + ranks.size] for first in range(0, len(order), ranks.size)]
    longest_of_rounds = [lengths[each[0]] for each in rounds]
    layout = groups_of(captured, whole, (len(rounds), longest), longest_of_rounds, repacking.usual, grouping)
    if layout is None:
        return None
    # Every second round is dealt backwards, so that no rank always has the longer row. The last may have too few rows.
    dealt = [each[::-1] if number % 2 else each for number, each in enumerate(rounds)]
    chosen = torch.tensor([each[min(ranks.rank, len(each) - 1)] for each in dealt])
    empty = torch.tensor([ranks.rank >= len(each) for each in dealt])

    own = {name: tensor[chosen] for name, tensor in whole.items()}
    for name, nothing in {_PRESENT: False, **dict.fromkeys(captured.labels, IGNORED)}.items():
        own[name][empty] = nothing
    present = layout.pack(own.pop(_PRESENT))
    inputs = {name: padded(name, tensor, layout, captured.labels) for name, tensor in own.items()}
    return replace(given, inputs=inputs, rows=len(dealt), length=layout.length, present=present, layout=layout)


def _with_all_counts(given: BatchArguments, all_ranks: list[_Summary], captured: CapturedModel) -> BatchArguments:
    """The batch with the counts of all ranks: useful tokens, and target tokens unless the caller gave the loss denominator. The
    user's own loss is then a plain sum over the tokens of all ranks."""
    denominator = given.loss_denominator
    if denominator is not None and given.counted and not captured.token_loss:
        denominator = torch.tensor(sum(each.denominator for each in all_ranks if each.denominator is not None))
    return replace(given, loss_denominator=denominator, useful_tokens=sum(each.useful_tokens for each in all_ranks))


def _shared_out(ranks: Ranks, captures: RepackedCaptures, given: BatchArguments, doing: str) -> BatchArguments:
    """This rank's part of the sequences of all ranks, packed together. Every rank makes the same layout."""
    assert isinstance(given.layout, Layout), "its batch is packed"
    spans = torch.tensor([astuple(span) for span in given.layout.spans])
    found = ranks.agree(doing, {"spans": spans} | {name: tensor.cpu() for name, tensor in given.inputs.items()})
    longest = max(int(each[next(iter(given.inputs))].shape[1]) for each in found)
    together, begin = [], 0
    for each in found:
        together += [Span(row + begin, *rest) for row, *rest in each["spans"].tolist()]
        begin += each[next(iter(given.inputs))].shape[0]
    layout = captures.repacking.lay_out_for(ranks.size, together, (begin, longest)).part(ranks.rank, ranks.size)
    labels, inputs = captures.first.captured.labels, {}
    for name in given.inputs:
        rows = torch.cat([RightPadding(tuple(each[name].shape[:2]), longest).pack(each[name]) for each in found])
        inputs[name] = layout.positions if name == POSITIONS else layout.pack(rows, IGNORED if name in labels else 0)
    count, length = layout.source.shape
    return replace(given, inputs=inputs, rows=count, length=length, present=layout.source >= 0, layout=None)


def _common_key(all_ranks: list[_Summary]) -> CaptureKey | None:
    """The capture key that serves the batches of all ranks, or None."""
    keys = {each.key for each in all_ranks}
    further = {each.key.further for each in all_ranks}
    most = max(further, key=len)
    alike = {replace(key, further=()) for key in keys}
    if len(alike) > 1 or any(other not in ((), most) for other in further) or (
            len(further) > 1 and not set(most) <= USUALLY_IMPLIED.keys()) or len({each.has_labels for each in all_ranks}) > 1:
        return None
    return replace(alike.pop(), further=most)


def _check(captured: CapturedModel, all_ranks: list[_Summary], key: CaptureKey) -> None:
    of_some = key.further if len({each.key.further for each in all_ranks}) > 1 else ()
    for name in of_some:
        known = name == MASK and captured.masks_hide
        if not known and not captured.is_implied(replace(key, further=(name,)), name, USUALLY_IMPLIED[name]):
            raise UnsupportedError(f"only some ranks pass {name}, and the model assumes other values without it: pass {name} "
                                   "on every rank")
    uneven = len({each.rows for each in all_ranks}) > 1
    sizes = ", ".join(f"{each.rows} x {each.length}" for each in all_ranks)
    if captured.across_rows:
        raise UnsupportedError("the model mixes sequences of a batch, so ranks cannot share a batch: train with one process; "
                               f"it mixes them in {captured.across_rows}")
    if all_ranks[0].has_labels and not captured.has_loss_denominator:
        raise UnsupportedError("the model's loss is not a cross entropy over tokens, so that it cannot be divided among ranks: "
                               "pass stream() a loss, or train with one process")
    if uneven and captured.is_averaged:
        raise UnsupportedError(f"the model's loss is an average over rows, and the ranks have batches of {sizes}: give every "
                               "rank the same number of rows")
    longer = len({each.length for each in all_ranks}) > 1
    sees_padding = captured.counts_positions or not captured.logits_of_tokens or not (captured.causal or MASK in key.further)
    if longer and sees_padding:
        raise UnsupportedError(f"the ranks have batches of {sizes}, and the model would see padding: pad all of them to one "
                               "length")
    if _padding_changes_loss(all_ranks):
        raise UnsupportedError(f"the ranks have batches of {sizes}, and padding on the left predicts a target, whose loss "
                               "depends on the length: pad on the right, or give the first token of each row the label -100, "
                               "or pad all batches to one length")


def _with_implied(given: BatchArguments, captures: Captures, key: CaptureKey) -> dict[str, Tensor]:
    """The batch arguments, with those that other ranks pass and this rank implies."""
    served, inputs = captures.serve(key), dict(given.inputs)
    for name in set(key.further) - inputs.keys():
        dtype = served.types[name].dtype
        inputs[name] = USUALLY_IMPLIED[name](given.length).to(dtype).expand(given.rows, -1).contiguous()
    return {name: inputs[name] for name in (*(n for n in served.captured.batch_inputs if n in inputs),
                                            *(n for n in inputs if n not in served.captured.batch_inputs))}


def _padded(name: str, tensor: Tensor, size: tuple[int, int], wanted: tuple[int, int], captured: CapturedModel) -> Tensor:
    """A batch argument, padded to `wanted` = [rows, length]."""
    if size == wanted:
        return tensor
    if tensor.shape[0] != size[0] or (size[1] != wanted[1] and (tensor.dim() < 2 or tensor.shape[1] != size[1])):
        raise UnsupportedError(f"the ranks have batches of different shapes, and {name}, {list(tensor.shape)}, cannot be "
                               "padded: give every rank the same number of rows of one length")
    if size[1] < wanted[1]:
        tensor = padded(name, tensor, RightPadding(size, wanted[1]), captured.labels)
    if size[0] < wanted[0]:
        first = tensor.new_full((), IGNORED) if name in (*captured.labels, SHIFTED) else tensor[:1]
        tensor = torch.cat([tensor, first.expand(wanted[0] - size[0], *tensor.shape[1:])])
    return tensor.contiguous()
