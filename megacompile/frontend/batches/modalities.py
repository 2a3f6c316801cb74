"""How models of transformers name the arguments for images or videos, and which arguments may be images."""
from __future__ import annotations

import dataclasses
from collections.abc import Collection

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Modality:
    """One kind of input besides text. `patches`, `sizes`: arguments of the forward; `method`: the model's method that makes
    features of them."""

    patches: str
    sizes: str
    method: str


MODALITIES = (Modality("pixel_values", "image_grid_thw", "get_image_features"),
              Modality("pixel_values_videos", "video_grid_thw", "get_video_features"))
#: Positions of several axes, int64 [B, T, 3], if the model computes them from sizes; and the other arguments that it uses.
POSITIONS = "mrope_positions"
MAKING_POSITIONS = ("mm_token_type_ids", "second_per_grid_ts")


def is_images(argument: Tensor) -> bool:
    """Whether a batch argument that is not aligned with tokens may be images: floats of several dimensions. There may be more
    or fewer of them than rows."""
    return argument.is_floating_point() and argument.dim() > 2


def aligned(batch: Collection[str]) -> set[str]:
    """The names of arguments aligned with tokens, in a batch (or an example) of a model with such encoders."""
    found = {name for m in MODALITIES if {m.patches, m.sizes} <= set(batch) for name in (m.patches, m.sizes)}
    return found | {POSITIONS} if found else found
