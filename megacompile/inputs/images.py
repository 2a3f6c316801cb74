"""Gives every sequence of a batch the same number of images, so that the batch can be split by rows.

The caller passes images in the order of their placeholders among the tokens. The common number is the largest number in any
row, rounded up to a power of two, since each number needs its own graphs. Sequences with fewer images are filled up with
repeated ones. These are never read: each placeholder takes its features from the images of its own row.
"""
from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.errors import UnsupportedError
from megacompile.frontend.batches.images import Patches
from megacompile.frontend.batches.pair_masks import MAKING_POSITIONS, MODALITIES, POSITIONS
from megacompile.frontend.batches.split_rows import images_of
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.template import TemplateInput


def arrange_images(name: str, captured: CapturedModel, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch arguments with images [batch, ...], or [batch, most, ...] if a sequence has several images.

    `captured`: the capture for plain batches. Raises `UnsupportedError` if the number of images differs from the number of
    their placeholders."""
    numbers: dict[str, list[int]] = {}
    for positions in captured.image_positions:
        numbers |= dict.fromkeys(positions.images, positions.numbers(name, inputs))
    largest = max((max(each) for each in numbers.values()), default=1)
    most = 1 << max(largest - 1, 0).bit_length()
    if most > 1 and (others := images_of(inputs) - numbers.keys()):
        raise UnsupportedError(f"{name}: {', '.join(sorted(others))} has one value for each sequence, but some sequences have "
                               "several images: give every sequence at most one image")
    return {key: _by_rows(name, key, tensor, numbers[key], most) if key in numbers else tensor
            for key, tensor in inputs.items()}


def _by_rows(name: str, key: str, images: Tensor, numbers: list[int], most: int) -> Tensor:
    if len(images) != sum(numbers):
        raise UnsupportedError(f"{name}: {key} has {len(images)} images, but the batch's sequences have placeholders for "
                               f"{sum(numbers)}: put the placeholders of every image into input_ids, and no others")
    if not len(images):
        images = images.new_zeros((1, *images.shape[1:]))  # never read
    chosen = torch.zeros(len(numbers), most, dtype=torch.long)
    for row, number in enumerate(numbers):
        chosen[row, :number] = torch.arange(number) + sum(numbers[:row])
    if sum(numbers) < chosen.numel():  # otherwise they are already in order
        images = images[chosen.flatten().to(images.device)]
    return images.unflatten(0, chosen.shape) if most > 1 else images


def images_of_each(types: Mapping[str, TemplateInput], inputs: Mapping[str, Tensor]) -> int:
    """The number of images of every sequence, in the result of `arrange_images`. `types`: those of plain batches."""
    return max((tensor.shape[1] for key, tensor in inputs.items() if key in types and tensor.dim() > len(types[key].shape)),
               default=1)


# -------------------- Aligns images of any size with the tokens of a batch, so that the batch can be split by rows
#
# The caller passes the patches of all images in the order of their placeholders among the tokens. In the aligned tensors each
# placeholder token holds the patches of its feature and the size of its image; all other tokens hold zeros. Position IDs that a
# model computes from image sizes in Python loops are computed here, on the host, by the model's own code.
def align_patches(model: nn.Module, captured: CapturedModel, given: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The arguments of a batch, with images of any size aligned with its tokens. Unchanged if the model takes no such images.
    `captured`: the capture for plain batches. The aligned patches are on `device`, so only real patches cross the link, not the
    zeros of text tokens. Raises `UnsupportedError` if images and their placeholders do not match."""
    made = dict(given)
    tokens = made.get(captured.batch_inputs[0])
    name = type(model).__name__
    for modality in MODALITIES:
        if (given.get(modality.sizes) is not None and modality.sizes not in captured.batch_inputs
                and hasattr(model, modality.method)):
            raise UnsupportedError(f"{name} was streamed without {modality.patches} and cannot take it now: include "
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
    assert found.feature_positions is not None, "made when the model was captured"
    there = found.feature_positions.on_host(given) > 0
    if patches is None and sizes is None:
        patches, sizes = torch.zeros(0, *shape), torch.zeros(0, 3, dtype=torch.long)
    if (not isinstance(patches, Tensor) or not isinstance(sizes, Tensor) or patches.shape[1:] != shape or sizes.dim() != 2
            or sizes.shape[1] != 3):
        raise UnsupportedError(f"{name}: {found.modality.patches} must be a tensor [patches of all images, "
                               f"{', '.join(map(str, shape))}] and {found.modality.sizes} a tensor [images, 3]: pass both as "
                               "the model's processor makes them")
    sizes = sizes.cpu().long()
    patches_of = sizes.prod(1)
    features, counts = patches_of // per_feature, there.sum(1)
    if int(patches_of.sum()) != len(patches) or bool((patches_of % per_feature).any()):
        raise UnsupportedError(f"{name}: {found.modality.patches} has {len(patches)} patches, but {found.modality.sizes} calls "
                               f"for {int(patches_of.sum())}: pass all patches of every image")
    ends = {0, *features.cumsum(0).tolist()}
    for row, end in enumerate(counts.cumsum(0).tolist()):
        if end not in ends:
            raise UnsupportedError(f"{name}: sequence {row} of the batch has {int(counts[row])} placeholders for features, "
                                   f"which do not match whole images of {found.modality.sizes}: put all placeholders of an "
                                   "image into one sequence of input_ids")
    if int(counts.sum()) != int(features.sum()):
        raise UnsupportedError(f"{name}: {found.modality.sizes} calls for {int(features.sum())} features, but the batch's "
                               f"sequences have placeholders for {int(counts.sum())}: put the placeholders of every image into "
                               "input_ids, and no others")
    of_tokens = torch.zeros((*tokens.shape, found.encoder.elements), dtype=found.dtype, device=device)
    of_tokens[there.to(device)] = patches.to(device, found.dtype).reshape(-1, found.encoder.elements)
    spread = torch.zeros((*tokens.shape, 3), dtype=torch.long)
    spread[there] = sizes.repeat_interleave(features, 0)
    return {found.modality.patches: of_tokens, found.modality.sizes: spread}


def _positions(model: nn.Module, name: str, tokens: Tensor, given: Mapping[str, Any]) -> dict[str, Any]:
    """The position IDs of the three axes, int64 [B, T, 3], and those of the text if rows hold several sequences."""
    said, mask = given.get("position_ids"), given.get("attention_mask")
    if said is None and isinstance(mask, Tensor) and mask.dim() > 2:
        raise UnsupportedError(f"{name} makes positions only from an attention_mask [batch, length]: pass position_ids with a "
                               "mask of pairs of tokens")
    if said is None:
        said = _made_by_model(model, given)
    if said is None:
        said = torch.arange(tokens.shape[1], device=tokens.device)[None]
    if isinstance(said, Tensor) and said.shape in (tokens.shape, (1, tokens.shape[1])):
        said = said.expand(3, *tokens.shape)
    if not isinstance(said, Tensor) or said.shape[1:] != tokens.shape or said.shape[0] not in (3, 4):
        raise UnsupportedError(f"{name}: position_ids must be a tensor [3, {tokens.shape[0]}, {tokens.shape[1]}] for time, "
                               "height and width, or [4, ...] with those of the text first: pass one of these, or leave them "
                               "out")
    text = {"position_ids": said[0]} if len(said) == 4 else {}
    return {POSITIONS: said[-3:].permute(1, 2, 0).long()} | text


def _made_by_model(model: nn.Module, given: Mapping[str, Any]) -> Tensor | None:
    """Position IDs computed by the model's own code from arguments on the host. None if the model leaves them to its decoder,
    which counts from 0."""
    owner: Any = next(m for m in model.modules() if hasattr(type(m), "compute_3d_position_ids"))
    known = inspect.signature(owner.compute_3d_position_ids).parameters
    arguments = {key: value.cpu() if isinstance(value, Tensor) else value for key in known
                 for value in (given.get(key),)}
    return owner.compute_3d_position_ids(**arguments)  # type: ignore[no-any-return]
