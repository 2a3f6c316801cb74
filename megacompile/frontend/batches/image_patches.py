"""Images of any size: models of transformers take them as patches [patches of all images, n] and sizes [images, 3]. In the
graphs both are aligned with tokens (`patch_encoder.py`), and so are the positions that the model computes from them."""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megacompile.compat.core import FakeTensorMode
from megacompile.errors import CaptureError, UnsupportedError
from megacompile.frontend.batches.modalities import MAKING_POSITIONS, MODALITIES, POSITIONS, Modality, aligned
from megacompile.frontend.batches.patch_survey import survey
from megacompile.frontend.batches.split_rows import images_in_a_row
from megacompile.frontend.graph.loss import TargetCount
from megacompile.frontend.ops.patch_encoder import PatchEncoder
from megacompile.frontend.tracing.fake_model import make_fake_model


@dataclasses.dataclass(frozen=True, eq=False)
class Patches:
    """The encoder of one modality in a captured model. `dtype`: the encoder's; `feature_positions`: counts where a batch has
    features, float32 [batch, length]; None until it is captured."""

    modality: Modality
    encoder: PatchEncoder
    dtype: torch.dtype
    has_positions: bool
    feature_positions: TargetCount | None = None


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Replaces the output of a model's encoder: features at their positions, [B * T, width], for the decoder's input and for
    additional levels of the decoder."""

    pooler_output: tuple[Tensor, ...]
    deepstack_features: list[tuple[Tensor, ...]]


def install_encoders(
    model: nn.Module, example: Mapping[str, Tensor] | None,
) -> tuple[tuple[Patches, ...], Mapping[str, Tensor] | None]:
    """Lets a fake model take the patches and sizes in its example aligned with tokens, through an op for each encoder; returns
    the encoders, and the example as graphs take it. Raises `CaptureError` if the model lacks what this needs."""
    said = [m for m in MODALITIES if {m.patches, m.sizes} <= (example or {}).keys()]
    if example is None or not said:
        return (), example
    adding = [module for module in model.modules() if hasattr(type(module), _ADDING)]
    if adding and len(said) > 1:
        raise CaptureError(f"{type(model).__name__} supports images or videos, not both: give one of "
                           f"{', '.join(m.patches for m in said)} in the example")
    found = [_found(model, modality, example[modality.patches]) for modality in said]
    for owner, width, patches in found:  # after all are copied: one method may call another
        _redirect(owner, patches, width)
    for module in adding:
        module.__class__ = _of_class(type(module), {_ADDING: _added})
    installed = tuple(patches for *_, patches in found)
    return installed, _aligned_example(example, installed)


def _found(model: Any, modality: Modality, patches: Tensor) -> tuple[nn.Module, int, Patches]:
    """The module that has the modality's method, the width of its features, and its encoder."""
    name = type(model).__name__
    able = [m for m in model.modules() if hasattr(type(m), modality.method)]
    owners = [m for m in able if not any(inner in able for inner in m.modules() if inner is not m)]
    merged = getattr(getattr(getattr(model, "config", None), "vision_config", None), "spatial_merge_size", None)
    if len(owners) != 1 or merged is None or patches.dim() < 2:
        raise CaptureError(
            f"{name} takes {modality.sizes}, but does not describe its images as models of transformers do ({modality.method}, "
            f"config.vision_config.spatial_merge_size, {modality.patches} [patches, ...]): stream it for text alone, without "
            f"{modality.patches} in the example")
    owner: Any = owners[0]
    encoder = _encoder(owner, modality.method, tuple(patches.shape[1:]), merged**2)
    width = survey(encoder, name)
    dtype = next(p.dtype for p in encoder.parameters() if p.is_floating_point())
    return owner, width, Patches(modality, encoder, dtype, hasattr(type(owner), "compute_3d_position_ids"))


def _encoder(owner: Any, method: str, patch: tuple[int, ...], per_feature: int) -> PatchEncoder:
    """A copy of everything that `owner` holds except its decoder."""
    module: Any = make_fake_model(owner, FakeTensorMode(allow_non_fake_inputs=True))
    decoder = module.get_decoder()
    for name, child in list(module.named_modules()):
        if child is decoder:
            module.set_submodule(name, nn.Module())
    for block in module.modules():
        if hasattr(block, "gradient_checkpointing"):
            block.gradient_checkpointing = True
            block._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    return PatchEncoder(module, method, patch, per_feature)


def _redirect(owner: nn.Module, patches: Patches, width: int) -> None:
    """Lets `owner` get features from the op, aligned with tokens."""
    encoder = patches.encoder

    def features(self: nn.Module, given: Tensor, sizes: Tensor, **_: Any) -> Encoded:
        trained, fixed = encoder.tensors(self)
        made = torch.ops.megacompile.encode_patches(given, sizes, trained, fixed, encoder.number, encoder.levels * width)
        first, *others = made.flatten(0, 1).split(width, -1)
        return Encoded((first,), [(other,) for other in others])

    owner.__class__ = _of_class(type(owner), {patches.modality.method: features})


#: Decoders with this method add more levels of features to the outputs of their first layers, at some positions.
_ADDING = "_deepstack_process"


def _added(self: nn.Module, hidden_states: Tensor, visual_pos_masks: Tensor, visual_embeds: Tensor) -> Tensor:
    """For features that are aligned with tokens, with zeros at all other positions."""
    return hidden_states + visual_embeds.view_as(hidden_states).to(hidden_states.dtype)


def _of_class(cls: type[nn.Module], methods: dict[str, Any]) -> type[nn.Module]:
    """A subclass with other methods and the same name."""
    return type(cls.__name__, (cls,), {**methods, "__module__": cls.__module__})


def _aligned_example(example: Mapping[str, Tensor], found: Collection[Patches]) -> dict[str, Tensor]:
    """The example with image arguments aligned with tokens, and without arguments that only some batches have."""
    has_positions = any(each.has_positions for each in found)
    apart = {"attention_mask", *aligned(example), *((*MAKING_POSITIONS, "position_ids") if has_positions else ())}
    made = {name: tensor for name, tensor in example.items() if name not in apart}
    rows, length = next(iter(made.values())).shape[:2]
    for each in found:
        made[each.modality.patches] = torch.empty(rows, length, each.encoder.elements, dtype=each.dtype, device="meta")
        made[each.modality.sizes] = torch.empty(rows, length, 3, dtype=torch.long, device="meta")
    if has_positions:
        made[POSITIONS] = torch.empty(rows, length, 3, dtype=torch.long, device="meta")
    return made


def model_arguments(batch: Mapping[str, Tensor], each: int) -> dict[str, Tensor]:
    """The batch as the model takes it: the `each` images of every sequence in a row, and positions [axes, B, T], preceded by
    the text's positions if rows hold several sequences."""
    given = images_in_a_row(batch, each)
    if POSITIONS in given:
        positions = given.pop(POSITIONS).permute(2, 0, 1)
        text = given.get("position_ids")
        given["position_ids"] = positions if text is None else torch.cat([text[None], positions])
    return given


def with_positions(found: Collection[Patches], positions: Mapping[int, TargetCount], name: str) -> tuple[Patches, ...]:
    """`found` with the positions of each encoder's features, by the encoder's number. Raises `CaptureError` if an encoder has
    none."""
    for each in found:
        if each.encoder.number not in positions:
            raise CaptureError(f"{name} does not put features of {each.modality.patches} among its tokens by masked_scatter: "
                               f"stream it for text alone, without {each.modality.patches} in the example")
    return tuple(dataclasses.replace(each, feature_positions=positions[each.encoder.number]) for each in found)


def refuse_adapters(found: Collection[Patches], name: str) -> None:
    """Raises `UnsupportedError` if an encoder has adapters: its copy is what runs, and nothing switches them off there."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if any(isinstance(module, BaseTunerLayer) for each in found for module in each.encoder.modules()):
        raise UnsupportedError(f"the encoder of {name}'s images has adapters, which cannot be switched off: adapt "
                               "its decoder alone (target_modules), or leave disable_adapter() out")
