"""An encoder of image patches as one op: the module itself, run on the images of some rows.

Encoders whose images differ in size (Qwen-VL's) loop over the sizes in Python: windows, lengths, tables of rotations. No graph
of such an encoder holds for other images. So a template's graph has one node, `megacompile::encode_patches`, whose inputs are
the patches, the images' sizes and the encoder's weights; it runs the module's own code. Nothing is kept for the backward,
which runs the module again, as a layer's backward does.

Patches and sizes are aligned with tokens: the position of an image's feature in a row holds the patches that the feature is
made of. Then rows can be split like all others, and a graph contains no sizes other than the batch's and the length.
"""
from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.compat.core import differentiating

#: Images are encoded in groups of at most this many patches in all; an image with more is a group of its own.
PATCHES_AT_ONCE = 8192


class PatchEncoder(nn.Module):
    """An encoder as a function of its weights. State: `module`, a copy without data, whose method `method` gives the features
    of images. `trained`, `fixed`: the names of the tensors that it reads, in the order of the op's arguments. `patch`: a
    patch's shape. `per_feature`: the number of patches in one feature. `number` identifies the encoder in graphs, which cannot
    hold a module. A survey finds `levels`, how many features a position gets, and `held_bytes`, the bytes that a forward and a
    backward hold for each patch, without results."""

    def __init__(self, module: nn.Module, method: str, patch: tuple[int, ...], per_feature: int) -> None:
        super().__init__()
        self.module, self.method, self.patch, self.per_feature = module, method, patch, per_feature
        self.trained = tuple(n for n, p in self.named_parameters() if p.requires_grad)
        self.fixed = tuple(n for n, _ in (*self.named_parameters(), *self.named_buffers()) if n not in self.trained)
        self.number = next(_numbers)
        self.levels, self.held_bytes = 1, (0, 0)
        self._alone = threading.Lock()  # a call lends the module its weights
        _encoders[self.number] = self

    def tensors(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors of `model` named by `trained` and by `fixed`. `model` has the same tensors as `module`."""
        return [_held(model, name) for name in self.trained], [_held(model, name) for name in self.fixed]

    def features(self, patches: Tensor, sizes: Tensor, trained: Sequence[Tensor], fixed: Sequence[Tensor]) -> Tensor:
        """[features, levels * width] of images whose patches are `patches` [patches, *patch] and whose `sizes` are [images, 3].
        """
        return self._run(trained, fixed, patches, sizes, None)  # type: ignore[no-any-return]

    def gradients(self, gradient: Tensor, patches: Tensor, sizes: Tensor, trained: Sequence[Tensor],
                  fixed: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of the `trained` tensors, given that of the features. The encoder runs again, and its blocks are
        recomputed."""
        leaves = [tensor.detach().requires_grad_() for tensor in trained]
        return self._run(leaves, fixed, patches, sizes, (gradient, leaves))  # type: ignore[no-any-return]

    def _run(self, trained: Sequence[Tensor], fixed: Sequence[Tensor], *args: Any) -> Any:
        lent = dict(zip((*self.trained, *self.fixed), (*trained, *fixed), strict=True))
        with self._alone:
            return torch.func.functional_call(self, lent, args)

    def forward(self, patches: Tensor, sizes: Tensor, backward: tuple[Tensor, Sequence[Tensor]] | None) -> Any:
        # Differentiated in here, while the weights are lent: blocks are recomputed in the backward.
        features = torch.cat(self.features_by_level(patches, sizes), -1)
        if backward is None:
            return features
        gradient, leaves = backward
        found = torch.autograd.grad(features, leaves, gradient, allow_unused=True)
        return [torch.zeros_like(leaf) if each is None else each for each, leaf in zip(found, leaves, strict=True)]

    def features_by_level(self, patches: Tensor, sizes: Tensor) -> list[Tensor]:
        """[features, width] for the decoder's input, and those that some models add to the output of its first layers."""
        returned = getattr(self.module, self.method)(patches, sizes, return_dict=True)
        levels = [returned.pooler_output, *(getattr(returned, "deepstack_features", None) or ())]
        return [level if isinstance(level, Tensor) else torch.cat(tuple(level)) for level in levels]

    def patches(self, of_features: Tensor) -> Tensor:
        """[patches, *patch] of [features, elements of the patches of each]."""
        return of_features.reshape(len(of_features) * self.per_feature, *self.patch)

    @property
    def elements(self) -> int:
        """Elements of the patches of one feature."""
        return self.per_feature * math.prod(self.patch)

    def groups(self, sizes: Tensor) -> Iterator[tuple[slice, list[int]]]:
        """Groups of images that are encoded at once. `sizes` [features, 3] has each image's size at all of its features.
        Yields the indices of the features, and the first feature of each image."""
        rows: list[list[int]] = sizes.tolist()
        begin, first, firsts = 0, 0, list[int]()
        while first < len(rows):
            end = first + math.prod(rows[first]) // self.per_feature
            if firsts and (end - begin) * self.per_feature > PATCHES_AT_ONCE:
                yield slice(begin, first), firsts
                begin, firsts = first, []
            firsts.append(first)
            first = end
        if firsts:
            yield slice(begin, first), firsts


def _held(model: Any, name: str) -> Tensor:
    """Holds the module. Dynamo follows this faster than it lists everything in a model."""
    for part in name.split(".")[1:]:
        model = getattr(model, part)
    return model  # type: ignore[no-any-return]


#: The encoders that graphs name by number.
_encoders: weakref.WeakValueDictionary[int, PatchEncoder] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def encoder_of(number: int) -> PatchEncoder:
    return _encoders[number]


def _encode(patches: Tensor, sizes: Tensor, trained: list[Tensor], fixed: list[Tensor], encoder: int, width: int) -> Tensor:
    """The features of rows' images at their positions, zeros elsewhere: [B, T, width], in the dtype of the patches.

    patches [B, T, n]: at each position of a feature, the patches that it is made of; sizes, int64 [B, T, 3]: there, the
    image's (time, height, width) in patches, and zeros elsewhere. `trained`, `fixed`: the tensors that the encoder reads.
    """
    there, found = sizes[..., 0] > 0, _encoders[encoder]
    given, sizes_there = patches[there], sizes[there]
    result = patches.new_zeros((*patches.shape[:2], width))
    with torch.no_grad():
        parts = [found.features(found.patches(given[part]), sizes_there[firsts], trained, fixed)
                 for part, firsts in found.groups(sizes_there)]
    if parts:
        result[there] = torch.cat(parts)
    return result


def _encode_fake(patches: Tensor, sizes: Tensor, trained: list[Tensor], fixed: list[Tensor], encoder: int,
                 width: int) -> Tensor:
    return patches.new_empty((*patches.shape[:2], width))


def _encode_backward(gradient: Tensor, patches: Tensor, sizes: Tensor, trained: list[Tensor], fixed: list[Tensor],
                     encoder: int) -> list[Tensor]:
    """The gradients of `trained`, summed over groups of images in float32."""
    there, found = sizes[..., 0] > 0, _encoders[encoder]
    given, sizes_there, of_features = patches[there], sizes[there], gradient[there]
    total: list[Tensor] = []
    for part, firsts in found.groups(sizes_there):
        with differentiating():
            new = found.gradients(of_features[part], found.patches(given[part]), sizes_there[firsts], trained, fixed)
        total = [a.float() + b for a, b in zip(total, new, strict=True)] if total else new
    if not total:
        return [torch.zeros_like(tensor) for tensor in trained]
    return [each.to(tensor.dtype).contiguous() for each, tensor in zip(total, trained, strict=True)]


def _encode_backward_fake(gradient: Tensor, patches: Tensor, sizes: Tensor, trained: list[Tensor], fixed: list[Tensor],
                          encoder: int) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in trained]


_ARGUMENTS = "Tensor patches, Tensor sizes, Tensor[] trained, Tensor[] fixed, int encoder"
encode_patches = torch.library.custom_op(
    "megacompile::encode_patches", _encode, mutates_args=(), schema=f"({_ARGUMENTS}, int width) -> Tensor")
encode_patches.register_fake(_encode_fake)
encode_patches_backward = torch.library.custom_op(
    "megacompile::encode_patches_backward", _encode_backward, mutates_args=(),
    schema=f"(Tensor gradient, {_ARGUMENTS}) -> Tensor[]")
encode_patches_backward.register_fake(_encode_backward_fake)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    patches, sizes, trained, fixed, ctx.encoder, _ = inputs
    ctx.counts = len(trained), len(fixed)
    ctx.save_for_backward(patches, sizes, *trained, *fixed)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    patches, sizes, *tensors = ctx.saved_tensors
    trained, fixed = ctx.counts
    gradients = torch.ops.megacompile.encode_patches_backward(
        gradient, patches, sizes, tensors[:trained], tensors[trained:], ctx.encoder)
    return None, None, gradients, [None] * fixed, None, None


encode_patches.register_autograd(_differentiate, setup_context=_save_for_backward)
