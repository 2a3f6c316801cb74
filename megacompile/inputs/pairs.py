"""Masks of pairs that a batch gives -> as graphs take them: bool or floats, [B, T, T] or [B, n, T, T]. Honoured or refused.

Models of transformers take an `attention_mask` of four dimensions as it is, for every layer, windows or not. Floats are added
to scores, and explicit scores are what the model's own code would make of them; so what floats hide and nothing more is read as
bool, which our attention has kernels for.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megacompile.errors import UnsupportedError
from megacompile.frontend.batches.pairs import is_pairs, refuse_added
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.template import TemplateInput

#: Whatever finite number a score is, the sum with this is so far below any other score that its weight is 0. Models write the
#: smallest number of bfloat16 or float32 for what is hidden.
_HIDDEN = -1e30


def read_mask(name: str, key: str, value: Tensor, tokens: torch.Size, shared: bool = False) -> Tensor:
    """A mask of pairs for a batch of `tokens`, [B, T], contiguous. `shared`: it may be one for all sequences.

    Raises `UnsupportedError` where it has another shape or dtype, or is to have a gradient."""
    rows, length = tokens[:2]
    masks = value.dtype == torch.bool or value.is_floating_point()
    if not (masks and is_pairs(value, tokens) and (shared or value.shape[0] == rows)):
        pairs = f"{length}, {length}]"
        raise UnsupportedError(f"{name}: {key} must be bool (True where a query sees a key) or floats (added to scores) of "
                               f"[{rows}, 1, {pairs}, or of [{rows}, heads, {pairs} for each head, not {value.dtype} of shape "
                               f"{list(value.shape)}")
    if value.requires_grad:
        raise UnsupportedError(f"{name}: {key} requires a gradient, which a streamed model does not compute: pass "
                               f"{key}.detach()")
    return value.expand(rows, *value.shape[1:]).contiguous()


def read_attention_mask(name: str, captured: CapturedModel, mask: Tensor, tokens: torch.Size) -> Tensor:
    """A model's `attention_mask` of four dimensions; `captured`: of plain batches.

    Raises `UnsupportedError` as `read_mask`, and for one that the model would not take as a mask: bool that is added to scores,
    floats of 0 and 1."""
    if captured.masks_added and mask.dtype == torch.bool:
        refuse_added(name, "attention_mask")
    if captured.masks_hide and mask.is_floating_point() and bool(((mask == 0) | (mask == 1)).all()) and bool(mask.any()):
        raise UnsupportedError(f"{name}: attention_mask holds 0 and 1 as floats, which are added to scores and hide nothing: "
                               "pass " + ("floats, 0 where a query sees a key and -inf where not" if captured.masks_added else
                                          "attention_mask.bool()"))
    return read_mask(name, "attention_mask", mask, tokens, shared=captured.masks_hide)


def hidden_as_bool(further: Mapping[str, Tensor], captured: CapturedModel,
                   reads_bool: Callable[[Mapping[str, Tensor]], bool]) -> dict[str, Tensor]:
    """A batch's further arguments, with a bool mask in the place of one that is added to scores of a model of transformers,
    where that has the very same effect and our attention reads it (`reads_bool`). `captured`: of plain batches."""
    mask = further.get("attention_mask")
    # What keeps plain batches from our attention, biases say, keeps these; but not that all of a sequence is seen.
    ours = captured.masks_hide and (captured.fused_attention or not captured.causal)
    if mask is None or not mask.is_floating_point() or not ours:
        return dict(further)
    seen = _seen(mask, captured.masks_added)
    changed = {**further, "attention_mask": mask if seen is None else seen}
    return changed if seen is not None and reads_bool(changed) else dict(further)


def _seen(mask: Tensor, added: bool) -> Tensor | None:
    """The bool mask that has the very effect of one that is added to scores, if there is one. `added`: by eager attention.

    A query that sees nothing is like a bool mask's only where all of it is -inf, and attention is not eager, which makes NaN of
    that. Of finite numbers, all of them huge, attention makes the mean of all values."""
    seen = mask == 0
    if not bool((seen | (mask <= _HIDDEN)).all()):
        return None
    blind = ~seen.any(-1)
    if bool(blind.any()) and (added or not bool(torch.isneginf(mask[blind]).all())):
        return None
    return seen


def read_typed_mask(name: str, key: str, value: object, tokens: tuple[int, ...], expected: TemplateInput,
                    captured: CapturedModel) -> Tensor:
    """A mask that every batch has, as the captured one was. Raises `UnsupportedError` as `read_mask`, and for another kind."""
    dtype, middle = expected.dtype, tuple(map(int, expected.shape[1:-2]))
    if isinstance(value, Tensor) and value.shape[1:-2] == middle and dtype is not None and (
            value.is_floating_point() == dtype.is_floating_point and torch.promote_types(value.dtype, dtype) == dtype):
        mask, size = value.to(dtype), torch.Size(tokens)
        return read_attention_mask(name, captured, mask, size) if key == "attention_mask" else read_mask(name, key, mask, size)
    sizes = [tokens[0], *middle, tokens[1], tokens[1]]
    what = f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise UnsupportedError(f"{name}: {key} must be {dtype} of {sizes}, as in the example that the model was streamed with, not "
                           f"{what}")
