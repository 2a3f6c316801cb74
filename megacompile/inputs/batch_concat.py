"""The batches of one optimizer step -> one batch, so that weights are streamed once for all of them."""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacompile.frontend.batches.pairs import pairs_of, tokens_of
from megacompile.losses import IGNORED


def join(batches: Sequence[Mapping[str, Any]], labels: Collection[str], causal: bool) -> dict[str, Any] | None:
    """The rows of all batches in their order: tensors [sum of rows, longest length, ...]. Shorter ones are padded on the right,
    `labels` with -100, all else with 0: no loss changes where no token sees what follows it (`causal`), or an attention mask
    says what is padding.

    None where arguments differ between batches, or are anything but integer tensors [rows, length, ...]; where padding would be
    seen; and for masks of pairs, which are joined if all are of one length: what a mask would have to say of padding is the
    model's business."""
    if len(batches) == 1:
        return dict(batches[0])
    keys = batches[0].keys()
    if any(batch.keys() != keys for batch in batches):
        return None
    joined: dict[str, Any] = {}
    tensors = [{key: value for key, value in batch.items() if isinstance(value, Tensor)} for batch in batches]
    masks = set().union(*map(pairs_of, tensors))
    for key in keys:
        parts = [batch[key] for batch in batches]
        if key in masks:
            of_all_rows = [len(part) for part in parts] == [tokens_of(batch)[0] for batch in tensors]
            if not of_all_rows or len({(part.shape[1:], part.dtype) for part in parts}) > 1:
                return None
            joined[key] = torch.cat(parts)
            continue
        if not all(_is_tokens(part) for part in parts) or len({(part.shape[2:], part.dtype) for part in parts}) > 1:
            return None
        longest = max(part.shape[1] for part in parts)
        if not causal and "attention_mask" not in keys and any(part.shape[1] < longest for part in parts):
            return None
        filling = IGNORED if key in labels else 0
        joined[key] = torch.cat([_padded(part, longest, filling) for part in parts])
    return joined


def _is_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() >= 2 and not value.is_floating_point()


def _padded(part: Tensor, length: int, filling: int) -> Tensor:
    return F.pad(part, (0, 0) * (part.dim() - 2) + (0, length - part.shape[1]), value=filling)
