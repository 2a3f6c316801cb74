"""Masks of pairs: batch arguments that say which keys each query of a sequence sees, besides causality and padding.

They are bool (True: seen) or floats (added to scores), of shape [B, T, T] or [B, n, T, T], where n is 1 or the number of
heads. Both of their last dimensions count the batch's tokens. Models of transformers pass such an `attention_mask` to every
layer unchanged.
"""
from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from megacompile.errors import UnsupportedError
from megacompile.frontend.templates.template import LENGTH, TemplateInput


# -------------------- How models of transformers name the arguments for images or videos, and which arguments may be images
@dataclasses.dataclass(frozen=True)
class Modality:
    """One kind of input besides text. `patches`, `sizes`: arguments of the forward. `method`: the model's method that computes
    its features."""

    patches: str
    sizes: str
    method: str


MODALITIES = (Modality("pixel_values", "image_grid_thw", "get_image_features"),
              Modality("pixel_values_videos", "video_grid_thw", "get_video_features"))
#: Positions of several axes, int64 [B, T, 3], if the model computes them from sizes; and the other arguments that it uses.
POSITIONS = "mrope_positions"
MAKING_POSITIONS = ("mm_token_type_ids", "second_per_grid_ts")


def is_images(argument: Tensor) -> bool:
    """True if a batch argument that is not aligned with tokens may be images: floats of several dimensions. Their number may
    differ from the number of rows."""
    return argument.is_floating_point() and argument.dim() > 2


def aligned(batch: Collection[str]) -> set[str]:
    """The names of arguments aligned with tokens, in a batch (or an example) of a model with such encoders."""
    found = {name for m in MODALITIES if {m.patches, m.sizes} <= set(batch) for name in (m.patches, m.sizes)}
    return found | {POSITIONS} if found else found


_NO_MASKS = frozenset(modality.patches for modality in MODALITIES)


def is_pairs(value: Tensor, tokens: torch.Size) -> bool:
    """True if a tensor has the shape and dtype of a mask of pairs in a batch of `tokens`, [B, T]. The mask may have 1 sequence
    instead of B."""
    return _is_square(value) and value.shape[-1] == tokens[1] and value.shape[0] in (1, tokens[0])


def _is_square(value: Tensor) -> bool:
    kind = value.dtype == torch.bool or value.is_floating_point()
    return kind and value.dim() in (3, 4) and value.shape[-1] == value.shape[-2]


def tokens_of(batch: Mapping[str, Tensor]) -> torch.Size:
    """The shape of the batch's first argument that is not a mask of pairs. Its sizes B and T are the batch's."""
    first = next(iter(batch.values()))
    other = next((value for value in batch.values() if not _is_square(value)), first).shape
    return other if len(other) > 1 and is_pairs(first, other) else first.shape


def pairs_of(batch: Mapping[str, Tensor]) -> set[str]:
    """The names of a batch's arguments that are masks of pairs."""
    tokens = tokens_of(batch) if batch else torch.Size()
    if len(tokens) < 2:
        return set()
    return {name for name, value in batch.items() if is_pairs(value, tokens)} - _NO_MASKS - aligned(batch)


def of_pairs(expected: TemplateInput | None) -> bool:
    """True if a batch argument of captured graphs is a mask of pairs."""
    return expected is not None and len(expected.shape) > 2 and expected.shape[-2:] == (LENGTH, LENGTH)


# ---------------------------------------------------------------- descriptions in a CaptureKey
def described(name: str, value: Tensor) -> str:
    """The entry of an additional argument in a `CaptureKey`: its name; for a mask of pairs also its dtype and shape: "mask:
    bool [B, 1, T, T]"."""
    if value.dim() == 2:
        return name
    sizes = ", ".join(["B", *map(str, value.shape[1:-2]), "T", "T"])
    return f"{name}: {str(value.dtype).removeprefix('torch.')} [{sizes}]"


def masks_of(example: Mapping[str, Tensor] | None) -> list[str]:
    """The masks of pairs that every batch has, in the form of a `CaptureKey`."""
    return [described(name, example[name]) for name in pairs_of(example)] if example else []


def argument(further: str) -> str:
    """The name in the description of an additional argument."""
    return further.partition(":")[0]


def masks_in(further: Collection[str]) -> dict[str, str]:
    """The masks of pairs among a key's additional arguments: name -> the rest of the entry, "bool [B, 1, T, T]"."""
    return {argument(each): each.partition(": ")[2] for each in further if each != argument(each)}


def example_of(further: str, tokens: torch.Size) -> Tensor:
    """An additional argument on the meta device: int64 [B, T], or the described mask of pairs."""
    found = re.fullmatch(r".+: (\w+) \[B, (?:(\d+), )?T, T\]", further)
    if found is None:
        return torch.empty(tokens[:2], dtype=torch.long, device="meta")
    heads = [int(found[2])] if found[2] else []
    return torch.empty(tokens[0], *heads, tokens[1], tokens[1], dtype=getattr(torch, found[1]), device="meta")


def refuse_added(name: str, key: str) -> None:
    """Raises `UnsupportedError` for a bool mask that eager attention would add to scores as numbers."""
    raise UnsupportedError(f"{name}: {key} is bool, and eager attention adds it to scores as 0 and 1, which hides nothing: "
                           "pass floats, 0 where a query sees a key and -inf where not, or make the model with "
                           'attn_implementation="sdpa", where it has that')
