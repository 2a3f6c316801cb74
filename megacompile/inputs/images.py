"""Images of a batch, in the order of their places among tokens -> as many for every sequence, so that rows can be split.

Sequences with fewer images than others have some of the batch's repeated, which nobody reads: each place takes its features
from the images of its own row. The number is the largest of any row, rounded up to a power of two, since each has graphs of its
own.
"""
from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megacompile.errors import UnsupportedError
from megacompile.frontend.batches.rows import images_of
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.template import TemplateInput


def arrange_images(name: str, captured: CapturedModel, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch arguments with images [batch, ...], or [batch, most, ...] where a sequence has several.

    `captured`: of plain batches. Raises `UnsupportedError` where places and images are not as many."""
    numbers: dict[str, list[int]] = {}
    for places in captured.places:
        numbers |= dict.fromkeys(places.images, places.numbers(name, inputs))
    largest = max((max(each) for each in numbers.values()), default=1)
    most = 1 << max(largest - 1, 0).bit_length()
    if most > 1 and (others := images_of(inputs) - numbers.keys()):
        raise UnsupportedError(f"{name}: {', '.join(sorted(others))} has one value for each sequence, of which some have "
                               "several images: give every sequence one image at most")
    return {key: _by_rows(name, key, tensor, numbers[key], most) if key in numbers else tensor
            for key, tensor in inputs.items()}


def _by_rows(name: str, key: str, images: Tensor, numbers: list[int], most: int) -> Tensor:
    if len(images) != sum(numbers):
        raise UnsupportedError(f"{name}: {key} has {len(images)} images, and the batch's sequences have places for "
                               f"{sum(numbers)}: give each image its places among input_ids, and leave none over")
    if not len(images):
        images = images.new_zeros((1, *images.shape[1:]))  # nobody reads it
    chosen = torch.zeros(len(numbers), most, dtype=torch.long)
    for row, number in enumerate(numbers):
        chosen[row, :number] = torch.arange(number) + sum(numbers[:row])
    if sum(numbers) < chosen.numel():  # else they are in order
        images = images[chosen.flatten().to(images.device)]
    return images.unflatten(0, chosen.shape) if most > 1 else images


def images_of_each(types: Mapping[str, TemplateInput], inputs: Mapping[str, Tensor]) -> int:
    """How many images every sequence of arranged inputs has. `types`: of plain batches."""
    return max((tensor.shape[1] for key, tensor in inputs.items() if key in types and tensor.dim() > len(types[key].shape)),
               default=1)
