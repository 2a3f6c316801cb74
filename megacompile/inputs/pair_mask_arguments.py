"""Reads masks of pairs of tokens from a batch: bool or floats, [B, T, T] or [B, n, T, T]. They are honored or refused.

Models from transformers pass a four-dimensional `attention_mask` to every layer unchanged, with or without a sliding window.
Float masks are added to attention scores, which forces the model's own attention code. A float mask that only hides tokens is
therefore read as bool, which our attention has kernels for.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megacompile.errors import UnsupportedError
from megacompile.frontend.batches.pair_masks import is_pairs, refuse_added
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.template import TemplateInput

#: Mask values at or below this hide a token: added to any finite score, they give a weight of 0. Models use the most negative
#: number of bfloat16 or float32.
_HIDDEN = -1e30


def read_mask(name: str, key: str, value: Tensor, tokens: torch.Size, shared: bool = False) -> Tensor:
    """A mask of pairs for a batch of `tokens` (B, T), contiguous. `shared`: one mask may serve all sequences.

    Raises `UnsupportedError` for another shape or dtype, or if the mask requires a gradient."""
    rows, length = tokens[:2]
    masks = value.dtype == torch.bool or value.is_floating_point()
    if not (masks and is_pairs(value, tokens) and (shared or value.shape[0] == rows)):
        pairs = f"{length}, {length}]"
        raise UnsupportedError(f"{name}: {key} must be bool (True where a query sees a key) or floats (added to scores) of "
                               f"shape [{rows}, 1, {pairs}, or [{rows}, heads, {pairs} for each head, not {value.dtype} of "
                               f"shape {list(value.shape)}")
    if value.requires_grad:
        raise UnsupportedError(f"{name}: {key} requires a gradient, which a streamed model does not compute: pass "
                               f"{key}.detach()")
    return value.expand(rows, *value.shape[1:]).contiguous()


def read_attention_mask(name: str, captured: CapturedModel, mask: Tensor, tokens: torch.Size) -> Tensor:
    """A four-dimensional `attention_mask`. `captured`: the capture for plain batches.

    Raises `UnsupportedError` as `read_mask` does, and for a mask that would hide nothing: bool where the model adds masks to
    scores, or floats of 0 and 1."""
    if captured.masks_added and mask.dtype == torch.bool:
        refuse_added(name, "attention_mask")
    if captured.masks_hide and mask.is_floating_point() and bool(((mask == 0) | (mask == 1)).all()) and bool(mask.any()):
        raise UnsupportedError(f"{name}: attention_mask holds 0 and 1 as floats, which are added to scores and hide nothing: "
                               "pass " + ("floats, 0 where a query sees a key and -inf where not" if captured.masks_added else
                                          "attention_mask.bool()"))
    return read_mask(name, "attention_mask", mask, tokens, shared=captured.masks_hide)


def hidden_as_bool(further: Mapping[str, Tensor], captured: CapturedModel,
                   reads_bool: Callable[[Mapping[str, Tensor]], bool]) -> dict[str, Tensor]:
    """The arguments `further` of a batch, with a float `attention_mask` replaced by a bool one if this has exactly the same
    effect and our attention reads it (`reads_bool`). `captured`: the capture for plain batches."""
    mask = further.get("attention_mask")
    # A causal model whose plain batches cannot use our attention (because of biases, for example) cannot use it here either.
    ours = captured.masks_hide and (captured.fused_attention or not captured.causal)
    if mask is None or not mask.is_floating_point() or not ours:
        return dict(further)
    seen = _seen(mask, captured.masks_added)
    changed = {**further, "attention_mask": mask if seen is None else seen}
    return changed if seen is not None and reads_bool(changed) else dict(further)


def _seen(mask: Tensor, added: bool) -> Tensor | None:
    """The bool mask with exactly the same effect as a float one, or None. `added`: eager attention adds the mask to scores.

    A query that sees nothing needs care. If all its values are -inf, a bool mask does the same, except that eager attention
    gives NaN. If all its values are finite but huge, attention gives the mean of all values, which no bool mask does."""
    seen = mask == 0
    if not bool((seen | (mask <= _HIDDEN)).all()):
        return None
    blind = ~seen.any(-1)
    if bool(blind.any()) and (added or not bool(torch.isneginf(mask[blind]).all())):
        return None
    return seen


def read_typed_mask(name: str, key: str, value: object, tokens: tuple[int, ...], expected: TemplateInput,
                    captured: CapturedModel) -> Tensor:
    """A mask that every batch has, in the captured dtype. Raises `UnsupportedError` as `read_mask` does, and for a mask of
    another dtype or shape than the captured one."""
    dtype, middle = expected.dtype, tuple(map(int, expected.shape[1:-2]))
    if isinstance(value, Tensor) and value.shape[1:-2] == middle and dtype is not None and (
            value.is_floating_point() == dtype.is_floating_point and torch.promote_types(value.dtype, dtype) == dtype):
        mask, size = value.to(dtype), torch.Size(tokens)
        return read_attention_mask(name, captured, mask, size) if key == "attention_mask" else read_mask(name, key, mask, size)
    sizes = [tokens[0], *middle, tokens[1], tokens[1]]
    what = f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise UnsupportedError(f"{name}: {key} must be {dtype} of shape {sizes}, as in the example that the model was streamed "
                           f"with, not {what}")
