"""Images of any size in a batch, in the order of their places among tokens -> aligned with tokens, so that rows can be split.

At the place of a feature are the patches that it is made of, and the size of its image; elsewhere zeros. The positions that a
model makes of sizes, in Python loops, are made here, by the model's own code, on the host.
"""
from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.errors import UnsupportedError
from megacompile.frontend.batches.modalities import MAKING_POSITIONS, MODALITIES, POSITIONS
from megacompile.frontend.batches.patches import Patches
from megacompile.frontend.capture import CapturedModel


def align_patches(model: nn.Module, captured: CapturedModel, given: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The arguments of a model whose batches have images of any size, as its graphs take them; those of other models as they
    are. `captured`: of plain batches. Patches are then on `device`: the link carries those that there are, not text's zeros.
    Raises `UnsupportedError` where images and their places do not fit."""
    made = dict(given)
    tokens = made.get(captured.batch_inputs[0])
    name = type(model).__name__
    for modality in MODALITIES:
        if (given.get(modality.sizes) is not None and modality.sizes not in captured.batch_inputs
                and hasattr(model, modality.method)):
            raise UnsupportedError(f"{name} was streamed without {modality.patches}, and takes none now: name "
                                   f"{modality.patches} and {modality.sizes} in stream(model, example=...)")
    if not captured.patches or not isinstance(tokens, Tensor) or tokens.dim() != 2:
        return made
    of_tokens = {key: value for each in captured.patches for key, value in _aligned(name, each, made, tokens, device).items()}
    if any(each.has_positions for each in captured.patches):
        of_tokens |= _positions(model, name, tokens, made)
        made = {key: value for key, value in made.items() if key not in (*MAKING_POSITIONS, "position_ids")}
    return made | of_tokens


def _aligned(name: str, found: Patches, given: Mapping[str, Any], tokens: Tensor, device: torch.device) -> dict[str, Tensor]:
    patches, sizes = given.get(found.modality.patches), given.get(found.modality.sizes)
    per_feature, shape = found.encoder.per_feature, found.encoder.patch
    assert found.places is not None, "made when the model was captured"
    there = found.places({key: given[key].cpu() for key in {source.name for source in found.places.sources}}) > 0
    if patches is None and sizes is None:
        patches, sizes = torch.zeros(0, *shape), torch.zeros(0, 3, dtype=torch.long)
    if (not isinstance(patches, Tensor) or not isinstance(sizes, Tensor) or patches.shape[1:] != shape or sizes.dim() != 2
            or sizes.shape[1] != 3):
        raise UnsupportedError(f"{name}: {found.modality.patches} must be a tensor [patches of all images, "
                               f"{', '.join(map(str, shape))}] and {found.modality.sizes} one [images, 3], as the model's "
                               "processor makes them")
    sizes = sizes.cpu().long()
    patches_of = sizes.prod(1)
    features, places = patches_of // per_feature, there.sum(1)
    if int(patches_of.sum()) != len(patches) or bool((patches_of % per_feature).any()):
        raise UnsupportedError(f"{name}: {found.modality.patches} has {len(patches)} patches, and {found.modality.sizes} says "
                               f"{int(patches_of.sum())}: give each image all of its patches")
    ends = {0, *features.cumsum(0).tolist()}
    for row, end in enumerate(places.cumsum(0).tolist()):
        if end not in ends:
            raise UnsupportedError(f"{name}: sequence {row} of the batch has {int(places[row])} places for features, which are "
                                   f"not those of whole images of {found.modality.sizes}: give each image its places among "
                                   "input_ids, all in one sequence")
    if int(places.sum()) != int(features.sum()):
        raise UnsupportedError(f"{name}: {found.modality.sizes} says {int(features.sum())} features, and the batch's sequences "
                               f"have places for {int(places.sum())}: give each image its places among input_ids, and leave "
                               "none over")
    of_tokens = torch.zeros((*tokens.shape, found.encoder.elements), dtype=found.dtype, device=device)
    of_tokens[there.to(device)] = patches.to(device, found.dtype).reshape(-1, found.encoder.elements)
    spread = torch.zeros((*tokens.shape, 3), dtype=torch.long)
    spread[there] = sizes.repeat_interleave(features, 0)
    return {found.modality.patches: of_tokens, found.modality.sizes: spread}


def _positions(model: nn.Module, name: str, tokens: Tensor, given: Mapping[str, Any]) -> dict[str, Any]:
    """The positions of every axis, int64 [B, T, 3]; and those of the text, where rows hold several sequences."""
    said, mask = given.get("position_ids"), given.get("attention_mask")
    if said is None and isinstance(mask, Tensor) and mask.dim() > 2:
        raise UnsupportedError(f"{name} makes positions of an attention_mask [batch, length] alone: pass position_ids beside "
                               "one of every pair of tokens")
    if said is None:
        said = _made_by_model(model, given)
    if said is None:
        said = torch.arange(tokens.shape[1], device=tokens.device)[None]
    if isinstance(said, Tensor) and said.shape in (tokens.shape, (1, tokens.shape[1])):
        said = said.expand(3, *tokens.shape)
    if not isinstance(said, Tensor) or said.shape[1:] != tokens.shape or said.shape[0] not in (3, 4):
        raise UnsupportedError(f"{name}: position_ids must be a tensor [3, {tokens.shape[0]}, {tokens.shape[1]}], or [4, ...] "
                               "with the text's before those of time, height and width, or leave them out")
    text = {"position_ids": said[0]} if len(said) == 4 else {}
    return {POSITIONS: said[-3:].permute(1, 2, 0).long()} | text


def _made_by_model(model: nn.Module, given: Mapping[str, Any]) -> Tensor | None:
    """By the model's own code, of arguments on the host; None where that leaves it to the decoder, which counts from 0."""
    owner: Any = next(m for m in model.modules() if hasattr(type(m), "compute_3d_position_ids"))
    known = inspect.signature(owner.compute_3d_position_ids).parameters
    arguments = {key: value.cpu() if isinstance(value, Tensor) else value for key in known
                 for value in (given.get(key),)}
    return owner.compute_3d_position_ids(**arguments)  # type: ignore[no-any-return]
