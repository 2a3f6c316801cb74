"""Gives each rank its tokens of every row, where several ranks have the tokens of a sequence together.

    rows [R, L], the same on n ranks   ->   tokens [R, L / n] of each, with their positions and the tokens that they predict

Rows are padded on the right to a length that the ranks divide. The rest of a step is that of ranks with rows of their own: its
loss is the sum of the ranks' losses.
"""
from __future__ import annotations

import zlib
from dataclasses import replace

import torch
from torch import Tensor

from megacompile.errors import UnsupportedError
from megacompile.frontend.graph.sequences import DOCUMENTS, SHIFTED, divided_key
from megacompile.inputs.batch import BatchArguments, RepackedCaptures
from megacompile.inputs.packed_layout import array_of
from megacompile.inputs.rounded_lengths import MASK, POSITIONS, RightPadding, is_usual, padded, rounded
from megacompile.losses import IGNORED
from megacompile.runtime.ranks import Ranks

_TOGETHER = "ranks have the tokens of a sequence together (the mesh's dimension sequence)"


def divided_by_all(ranks: Ranks, captures: RepackedCaptures, given: BatchArguments, doing: str) -> BatchArguments:
    """This rank's tokens of a batch, which is the same on all ranks of a sequence; with as many tokens of a row on all ranks.
    Raises what `divided` raises, `UnsupportedError` if the ranks of a sequence have different batches, and `RankError`."""
    count = ranks.sequence_ranks
    content = [zlib.crc32(array_of(tensor.cpu()).tobytes()) for tensor in given.inputs.values()]
    found = ranks.agree(doing, (given.rows, given.length, tuple(given.inputs), content))
    for rank, each in enumerate(found):
        if each != found[rank // count * count]:
            raise UnsupportedError(f"rank {rank} has another batch than rank {rank // count * count}, and these {_TOGETHER}: "
                                   "pass the same batch to both")
    return divided(captures, given, ranks.sequence.position, count, max(length for _, length, *_ in found))


def divided(captures: RepackedCaptures, given: BatchArguments, position: int, ranks: int, longest: int) -> BatchArguments:
    """The tokens of a batch that the rank at this position has, if rows are padded to at least `longest` tokens. Raises
    `UnsupportedError` for arguments that say more of a row than its tokens, positions and labels."""
    captured = captures.first.captured
    _check(captures, given)
    enabled, usual = captures.repacking.enabled, captures.repacking.usual
    wanted = rounded(longest, usual) if enabled and not is_usual(longest) else longest
    wanted = -(-wanted // ranks) * ranks
    size, documents = (given.rows, given.length), POSITIONS in given.inputs
    positions = given.inputs[POSITIONS].cpu() if documents else torch.arange(given.length).expand(size)
    padding = RightPadding(size, wanted)
    whole = {name: padded(name, tensor, padding, captured.labels) for name, tensor in given.inputs.items()}
    (labels,) = (whole[name] for name in captured.labels)
    # Padding repeats the last position: a table of positions may have no more.
    whole |= {POSITIONS: torch.cat([positions, positions[:, -1:].expand(-1, wanted - given.length)], dim=1),
              SHIFTED: torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)}
    if documents:
        begins = torch.ones(size, dtype=torch.int32)
        begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
        whole[DOCUMENTS] = padding.pack(begins, 1).cumsum(1, dtype=torch.int32)
    length = wanted // ranks

    def own(tensor: Tensor) -> Tensor:
        return tensor[:, position * length:(position + 1) * length].contiguous()

    key = divided_key(ranks, documents, given.key)
    served = captures.serve(key)
    captures.check_modes(served.captured)
    inputs = {name: own(whole[name]) for name in (*served.captured.batch_inputs, DOCUMENTS) if name in whole}
    denominator = given.loss_denominator
    if denominator is not None and given.counted:
        assert served.captured.count_targets is not None, "checked when it was captured"
        denominator = served.captured.count_targets(inputs)
    present = own(torch.nn.functional.pad(given.present, (0, wanted - given.length)))
    return replace(given, inputs=inputs, length=length, present=present, key=key, loss_denominator=denominator,
                   useful_tokens=int(present.sum()), read_again=None)


def _check(captures: RepackedCaptures, given: BatchArguments) -> None:
    captured = captures.first.captured
    if not given.has_labels or len(captured.labels) != 1:
        raise UnsupportedError(f"{_TOGETHER}, and a batch without labels has no loss to add up over them: pass labels, or "
                               "call the model under torch.no_grad(), with whole sequences")
    if MASK in given.inputs:
        raise UnsupportedError(f"{_TOGETHER}, and a mask would have to say what tokens of other ranks see: pad on the right, "
                               "label padding -100, and leave attention_mask out of batches with position_ids")
    others = [name for name in given.inputs if name not in (captured.batch_inputs[0], POSITIONS, *captured.labels)]
    if others or captured.image_positions or captured.patches:
        what = ", ".join(others) or "images"
        raise UnsupportedError(f"{_TOGETHER}, which is not supported for batches with {what}: leave the dimension out")
