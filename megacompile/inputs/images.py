"""Gives every sequence of a batch the same number of images, so that the batch can be split by rows.

The caller passes images in the order of their placeholders among the tokens. The common number is the largest number in any
row, rounded up to a power of two, since each number needs its own graphs. Sequences with fewer images are filled up with
repeated ones. These are never read: each placeholder takes its features from the images of its own row.
"""
from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megacompile.errors import UnsupportedError
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
