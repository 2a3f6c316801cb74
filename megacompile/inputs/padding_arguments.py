"""Reads the arguments that describe padding and packed rows (masks, position IDs, sequence bounds).

Only those that change what is computed are passed to the model; a batch without any runs on the graphs of plain batches.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megacompile.errors import UnsupportedError
from megacompile.frontend.batches.pair_masks import is_pairs, refuse_added
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.template import TemplateInput
from megacompile.inputs.packed_layout import array_of
from megacompile.inputs.rounded_lengths import MASK, POSITIONS, USUALLY_IMPLIED
from megacompile.ir.plan import CaptureKey
from megacompile.losses import IGNORED

# --------------------
# Reads masks of pairs of tokens from a batch: bool or floats, [B, T, T] or [B, n, T, T]. They are honored or refused.
#
# Models from transformers pass a four-dimensional `attention_mask` to every layer unchanged, with or without a sliding window.
# Float masks are added to attention scores, which forces the model's own attention code. A float mask that only hides tokens is
# therefore read as bool, which our attention has kernels for.
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
    Queries that see nothing are special. If all values of such a query are -inf, a bool mask has the same effect, except that
    eager attention gives NaN. If all its values are finite but huge, attention gives the mean of all values, which no bool mask
    does."""
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


#: Arguments for kernels of packed rows that repeat what position IDs already say.
_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_length_q", "max_length_k")


def further_arguments(name: str, captured: CapturedModel, given: Mapping[str, Any], inputs: Mapping[str, Tensor],
                      key_of: Callable[[Mapping[str, Tensor]], CaptureKey]) -> dict[str, Tensor]:
    """The arguments among `given` that change what is computed: int64 [batch, length], or masks of pairs (see `pairs.py`).

    `given`: the arguments that plain batches do not have; `inputs`: those that they have; `key_of(further)`: the key of a batch
    with these arguments. Raises `UnsupportedError` for an argument that is not supported."""
    def is_implied(argument: str, value: Tensor) -> bool:
        return captured.is_implied(key_of({**further, argument: value}), argument, USUALLY_IMPLIED[argument])

    first = next(iter(inputs.values()))
    rest = dict(given)
    further: dict[str, Tensor] = {}
    _check_bounds(name, captured, rest, first)
    counted: Tensor | None = None
    if POSITIONS in rest:
        positions = _rows(name, captured, POSITIONS, rest.pop(POSITIONS), first)
        if torch.equal(positions, torch.arange(first.shape[1], device=positions.device).expand(first.shape[:2])):
            counted = positions
        else:
            further[POSITIONS] = positions
    mask = rest.pop(MASK, None)
    for key, value in rest.items():
        if key not in captured.forward_arguments:
            raise _refused(name, captured, key)
        square = isinstance(value, Tensor) and value.dim() in (3, 4) and value.shape[-1] == value.shape[-2]
        further[key] = read_mask(name, key, value, first.shape) if square else _rows(name, captured, key, value, first)
    takes_mask = MASK in captured.forward_arguments
    if takes_mask and isinstance(mask, Tensor) and (mask.dim() == 4 or (mask.dim() == 3 and not captured.masks_hide)):
        further[MASK] = read_attention_mask(name, captured, mask, first.shape)
    elif mask is not None:
        if not isinstance(mask, Tensor) or mask.shape != first.shape[:2]:
            what = f"of shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"that is a {type(mask).__name__}"
            rows, length = first.shape[:2]
            of_pairs = f", or a mask of pairs of tokens {[rows, 1, length, length]}" if takes_mask else ""
            raise UnsupportedError(f"{name}: an attention_mask {what} is not supported: pass a tensor of shape "
                                   f"{[rows, length]}{of_pairs}, or none")
        # With other arguments, such as position IDs that restart within a row, the mask must stay: given any mask, transformers
        # assumes one sequence in each row. Some losses need it too: a user's own may count tokens labeled -100, and an
        # auxiliary loss counts padding unless the mask hides it.
        labels = () if captured.token_loss or captured.is_averaged else captured.labels
        # A model without such a parameter sees the padding anyway.
        right = (captured.causal and captured.masks_hide) or not takes_mask
        targets = [inputs[key] for key in labels if key in inputs] if right else []
        ones_mean_none = captured.masks_hide or not takes_mask
        if further or not _changes_nothing(mask, targets) or not (ones_mean_none or is_implied(MASK, mask)):
            further[MASK] = mask.long()
    if counted is not None and not is_implied(POSITIONS, counted):
        further[POSITIONS] = counted
    return further


def zeros_and_ones(name: str, captured: CapturedModel, mask: Any,
                   key_of: Callable[[Tensor], CaptureKey]) -> tuple[Any, bool]:
    """An `attention_mask` of tokens on the host, as zeros and ones if they mean the same, and whether they do. Other masks stay
    as they are. `key_of(mask)`: the key of a batch with such a mask. Most models only read whether a value is 0. Some count the
    values. Raises `UnsupportedError` for values that are not whole numbers."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return mask, True
    mask = mask.cpu()  # once: the host reads it several times
    values = array_of(mask)
    if ((values == 0) | (values == 1)).all():
        return mask, True
    if mask.is_floating_point() and not (np.isfinite(values) & (values == np.round(values))).all():
        raise UnsupportedError(f"{name}: attention_mask holds other values than whole numbers: pass 1 where there is a token "
                               "and 0 where there is padding")
    if captured.only_hides(key_of(mask), MASK):
        return mask != 0, True
    return mask, False


def _refused(name: str, captured: CapturedModel, key: str) -> UnsupportedError:
    return UnsupportedError(f"{name}: argument {key} is not supported yet by a streamed model: leave it out (it takes "
                            f"{', '.join(captured.batch_inputs)})")


def _rows(name: str, captured: CapturedModel, key: str, value: Any, first: Tensor) -> Tensor:
    """The value as int64 [batch, length]; a single row is expanded to all. Raises `UnsupportedError` for other values."""
    size = first.shape[:2]
    if (not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()
            or value.shape not in (size, (1, size[1]))):
        raise _refused(name, captured, key)
    return value.expand(size).long()


def _changes_nothing(mask: Tensor, labels: Collection[Tensor]) -> bool:
    """True if a mask can be removed: it hides nothing, or only padding on the right whose `labels` are all -100. In a causal
    model no real token sees such padding, and the loss does not count it. A mask with values other than 0 and 1 stays."""
    values = array_of(mask)
    present = values != 0
    if (values[present] != 1).any():
        return False
    if present.all():
        return True
    on_the_right = not (present[:, 1:] & ~present[:, :-1]).any()
    return on_the_right and bool(labels) and all(
        label.shape[:2] == mask.shape and not (array_of(label)[~present] != IGNORED).any() for label in labels)


def without_bounds(name: str, captured: CapturedModel, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch without the arguments that repeat where its sequences begin, which hold only for this batch. Raises
    `UnsupportedError` as the model would."""
    rest = dict(batch)
    first = next((value for key in captured.batch_inputs if isinstance(value := batch.get(key), Tensor)), None)
    if first is not None and first.dim() >= 2:
        _check_bounds(name, captured, rest, first)
    return rest


def _check_bounds(name: str, captured: CapturedModel, rest: dict[str, Any], first: Tensor) -> None:
    """Removes from `rest` the arguments that repeat where the sequences of packed rows begin. `first`: an argument [batch,
    length, ...]. Raises `UnsupportedError` if they contradict the position IDs, or if the model may use them for something
    else."""
    said = {key: rest.pop(key) for key in (*_BOUNDS, *_LONGEST) if key in rest}
    sequences = rest.get("seq_idx")
    if sequences is not None and captured.fused_attention:
        said["seq_idx"] = rest.pop("seq_idx")
    if not said:
        return
    names = ", ".join(said)
    if not captured.fused_attention:
        raise UnsupportedError(f"{name}: {names} cannot be used by a model whose layers are not all attention: give "
                               "each sequence a row of its own")
    given = rest.get(POSITIONS)
    implied = torch.arange(first.shape[1], device=first.device).expand(first.shape[:2])  # each row is one sequence
    positions = implied if given is None else _rows(name, captured, POSITIONS, given, first)
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    starts = begins.flatten().nonzero().squeeze(1)
    bounds = torch.cat([starts, starts.new_tensor([begins.numel()])]).cpu()
    agree = all(torch.equal(torch.as_tensor(said[key]).long().cpu().flatten(), bounds) for key in _BOUNDS if key in said)
    longest = int(bounds.diff().max())
    agree &= all(int(said[key]) >= longest for key in _LONGEST if key in said)
    if "seq_idx" in said:
        changes = torch.ones_like(begins)
        numbers = _rows(name, captured, "seq_idx", said["seq_idx"], positions)
        changes[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        agree &= torch.equal(changes, begins)
    if not agree and given is None:
        raise UnsupportedError(f"{name}: {names} cannot be used without position_ids that start again with each sequence: pass "
                               f"them, or leave {names} out")
    if not agree:
        raise UnsupportedError(f"{name}: {names} and position_ids disagree about where sequences begin: restart position_ids "
                               "at 0 with each sequence")
