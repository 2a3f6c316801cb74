"""Joins the batches of one optimizer step into one batch, so that weights are streamed once for all of them."""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacompile.frontend.batches.pair_masks import pairs_of, tokens_of
from megacompile.losses import IGNORED


def join(batches: Sequence[Mapping[str, Any]], labels: Collection[str], causal: bool) -> dict[str, Any] | None:
    """The rows of all batches in order: tensors [sum of rows, longest length, ...]. Shorter rows are padded on the right,
    `labels` with -100, other arguments with 0. This changes no loss if no token sees later tokens (`causal`), or if an
    attention mask marks the padding.

    None if the batches have different arguments, if an argument is not an integer tensor [rows, length, ...], or if the model
    would see the padding. Masks of pairs of tokens are joined only if all have the same length, since only the model knows
    what such a mask must hold for padding."""
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
