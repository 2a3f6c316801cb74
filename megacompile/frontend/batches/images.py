"""Batches with images: patches of all images in one row, and the positions of their tokens."""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from megacompile.compat.core import FakeTensorMode, TorchDispatchMode, enable_python_dispatcher, pytree
from megacompile.errors import CaptureError, UnsupportedError, first_line
from megacompile.frontend.batches.pair_masks import MAKING_POSITIONS, MODALITIES, POSITIONS, Modality, aligned
from megacompile.frontend.batches.split_rows import images_in_a_row
from megacompile.frontend.graph.loss import TargetCount, count_batch
from megacompile.frontend.graph.split import source_line
from megacompile.frontend.ops.patch_encoder import PatchEncoder
from megacompile.frontend.templates.refused_ops import draws
from megacompile.frontend.tracing.explained import TRACING_ERRORS
from megacompile.frontend.tracing.fake_model import make_fake_model
from megacompile.frontend.tracing.model_graph import ModelGraph

# --------------------
# Images of any size: models of transformers take them as patches [patches of all images, n] and sizes [images, 3]. In the
# graphs both are aligned with tokens (`patch_encoder.py`), and so are the positions that the model computes from them.
# --------------------
# Finds the results and memory of an encoder of patches by running it on fakes, since an op in a graph does not show them.
#: Features along each side of the image that the survey uses.
_SIDE = 4


def survey(encoder: PatchEncoder, name: str) -> int:
    """Runs `encoder`, of the model called `name`, on fakes. Returns the width of a feature, and stores in `encoder` its levels
    and the bytes that it holds. Raises `UnsupportedError` if the encoder draws random numbers or counts batches, and
    `CaptureError` if it does not run, or does not give one feature for each `per_feature` patches."""
    if any(getattr(module, "track_running_stats", False) for module in encoder.modules()):
        raise UnsupportedError(f"the encoder of {name} keeps running statistics of batches, which its backward would count "
                               "twice: stream it for text alone, without images in the example")
    side = _SIDE * math.isqrt(encoder.per_feature)
    sizes = torch.tensor([[1, side, side]])
    weights = [p for p in encoder.parameters() if p.requires_grad]
    some: Any = next(encoder.parameters())
    with some.fake_mode:
        patches = torch.empty(side**2, *encoder.patch, dtype=some.dtype)
    forward, backward = _Watch(weights), _Watch(weights)
    # Outside of the fakes' mode, so that values computed only from sizes are real.
    with torch.inference_mode(False):
        try:
            with torch.no_grad(), forward:
                levels = encoder.features_by_level(patches, sizes)
            if weights:
                gradient = torch.empty_like(torch.cat(levels, -1))
                with torch.enable_grad(), backward:
                    encoder(patches, sizes, (gradient, weights))
        except TRACING_ERRORS as reason:
            raise CaptureError(f"the encoder of {name} does not run on an image of {side} x {side} patches {[*encoder.patch]} "
                               f"({first_line(reason)}): stream it for text alone, without images in the example") from reason
    shapes = {tuple(level.shape) for level in levels}
    if len(shapes) > 1 or levels[0].shape[0] * encoder.per_feature != side**2:
        raise CaptureError(f"the encoder of {name} makes {sorted(shapes)} of {side**2} patches, not one feature for each "
                           f"{encoder.per_feature}: stream it for text alone, without images in the example")
    if forward.random is not None:
        raise UnsupportedError(f"the encoder of {name} draws random numbers ({forward.random}), which its backward would draw "
                               "again: set its dropout to 0")
    encoder.levels = len(levels)
    encoder.held_bytes = -(-forward.most // side**2), -(-backward.most // side**2)
    return levels[0].shape[1]


class _Watch(TorchDispatchMode):
    """State: the bytes of all living tensors that are made in this mode (`held`), the `most` at once, and an op that draws
    random numbers. A tensor with the shape of one of the `weights` is assumed to be its gradient. It is a result, and is not
    counted."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.shapes = {tuple(shape) for w in weights for shape in (w.shape, reversed(w.shape))}
        self.held = self.most = 0
        self.random: str | None = None
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if draws(function, args, kwargs or {}):
            self.random = str(function)
        for value in pytree.tree_leaves(result):
            if isinstance(value, Tensor) and tuple(value.shape) not in self.shapes and (
                    storage := value.untyped_storage())._cdata not in self._known:
                self._known.add(storage._cdata)
                self.held += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.held)
        return result

    def _freed(self, storage: int, size: int) -> None:
        self._known.discard(storage)
        self.held -= size


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
    """Makes a fake model take the patches and sizes in its example aligned with tokens, through an op for each encoder. Returns
    the encoders, and the example in the form that graphs take. Raises `CaptureError` if the model lacks what this needs."""
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
    """Makes `owner` get features from the op, aligned with tokens."""
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
    """Adds features that are aligned with tokens, with zeros at all other positions."""
    return hidden_states + visual_embeds.view_as(hidden_states).to(hidden_states.dtype)


def _of_class(cls: type[nn.Module], methods: dict[str, Any]) -> type[nn.Module]:
    """A subclass with these methods and the same name."""
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
    """The batch in the form that the model takes: the `each` images of every sequence in a row, and positions [axes, B, T],
    preceded by the text's positions if rows hold several sequences."""
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
    """Raises `UnsupportedError` if an encoder has adapters. A copy of the encoder runs, so nothing could switch them off."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if any(isinstance(module, BaseTunerLayer) for each in found for module in each.encoder.modules()):
        raise UnsupportedError(f"the encoder of {name}'s images has adapters, which cannot be switched off: adapt "
                               "its decoder alone (target_modules), or leave disable_adapter() out")


# --------------------
# Features that a model writes over tokens with `masked_scatter`, such as image features at the positions that the processor
# reserved.
#
# `masked_scatter` takes features in the order of all rows, so the features of a row would depend on how many images earlier
# rows have. Here every row has the same number of images (missing ones are made up), and takes its features from the first of
# its own images (`_take_by_rows`). The model's own check looks at whole batches, and on a device its failure is not an error
# that a caller can catch. So rows are checked on the host, before anything runs.
_SCATTERS = ("masked_scatter", torch.masked_scatter)


@dataclasses.dataclass(frozen=True)
class ImagePositions:
    """`count`: counts the reserved positions of each row, float32 [batch]. `features`: how many an image has. `images`: the
    batch arguments that the features come from, or () if every row must have the positions of exactly one image."""

    count: TargetCount
    features: int
    images: tuple[str, ...]

    def numbers(self, name: str, batch: Mapping[str, Tensor]) -> list[int]:
        """The number of images that each row has positions for. Raises `UnsupportedError` for a row whose positions are not
        those of whole images or, without `images`, of one image."""
        counted = self.count.on_host(batch)
        fits = counted % self.features == 0 if self.images else counted == self.features
        for row in (~fits).nonzero().flatten().tolist():
            remedy = "give every image all of its tokens" if self.images else "give every sequence exactly one image"
            raise UnsupportedError(
                f"{name}: sequence {row} of the batch has {int(counted[row])} placeholder tokens for images, and one image "
                f"needs {self.features}: {remedy} (a model streamed without images in its example trains on text alone)")
        return (counted / self.features).int().tolist()


def find_image_positions(graph: ModelGraph, name: str, images: Collection[str], each: int) -> tuple[ImagePositions, ...]:
    """The places where every `masked_scatter` of a model puts features. `images`: batch arguments with `each` images for every
    row. Rewrites the graph so that each row takes its own images' features. Raises `UnsupportedError` if the number of features
    differs among rows, or the positions cannot be computed from the batch."""
    scatters = [n for n in graph.graph.graph.nodes if n.target in _SCATTERS]
    return tuple(_image_positions(graph, node, name, images, each) for node in scatters)


def _image_positions(graph: ModelGraph, node: fx.Node, name: str, images: Collection[str], each: int) -> ImagePositions:
    tokens, mask, features = node.args
    assert isinstance(tokens, fx.Node) and isinstance(mask, fx.Node) and isinstance(features, fx.Node)
    of_tokens = _of_tokens(mask)
    elements = sympy.simplify(_elements(features) / _size(tokens.meta["example_value"].shape[0]))
    width = _size(tokens.meta["example_value"].shape[-1])
    count = count_batch(graph, of_tokens, lambda g, t: g.call_method("sum", (g.call_method("flatten", (t, 1)), 1)))
    if (count is None or of_tokens.meta["example_value"].shape[-1] != 1 or not isinstance(elements, sympy.Integer)
            or not isinstance(width, sympy.Integer) or elements % (width * each)):
        raise _unknown(name, node)
    own = tuple(n for n in images if n in _read(graph, features))
    if own:
        _take_by_rows(graph, node, tokens, of_tokens, features, int(elements), int(width))
    return ImagePositions(count, int(elements / width) // each, own)


def _unknown(name: str, node: fx.Node) -> UnsupportedError:
    return UnsupportedError(
        f"{name} puts another number of features into each sequence, or at positions that its arguments do not "
        f"determine: stream it for text alone, without images in the example{source_line(node)}")


def _of_tokens(mask: fx.Node) -> fx.Node:
    """The mask [B, T, 1] from which `mask` was expanded; `mask` itself if it was not."""
    while mask.target in ("expand", "expand_as", "to") and mask.all_input_nodes[0].meta["example_value"].dtype == torch.bool:
        mask = mask.all_input_nodes[0]
    return mask


def _read(graph: ModelGraph, node: fx.Node) -> set[str]:
    """The batch arguments from which a value is computed."""
    seen, pending = {node}, [node]
    while pending:
        for argument in pending.pop().all_input_nodes:
            if argument not in seen:
                seen.add(argument)
                pending.append(argument)
    return {graph.sources[n].name for n in seen if n in graph.sources and graph.sources[n].kind == "batch"}


#: Ops that pass features on unchanged, one for each token. Only the last gives them the shape of tokens.
_PASSING = ("flatten", "split", "to", operator.getitem, torch.cat, "view_as")


def take_aligned(graph: ModelGraph, name: str) -> dict[int, TargetCount]:
    """Rewrites the graph to take features of patch encoders from their ops' outputs, which already have them at the right
    positions. Returns, by the encoder's number, how a batch's positions for its features are computed: float32 [batch, length],
    1 at each. Raises `UnsupportedError` if the batch's arguments do not determine them, or if the features are not only put at
    positions."""
    found: dict[int, TargetCount] = {}
    encoded = torch.ops.megacompile.encode_patches
    for encoder in [node for node in graph.graph.graph.nodes if node.target is encoded]:
        for node in _readers(encoder):
            if node.target not in _SCATTERS:
                raise _unknown(name, node)
            tokens, mask, features = node.args
            assert isinstance(mask, fx.Node), "an argument of masked_scatter"
            count = count_batch(graph, _of_tokens(mask), lambda g, t: g.call_method("squeeze", (t, -1)))
            if count is None:
                raise _unknown(name, node)
            found[encoder.args[4]] = count
            with _calls_before(graph, node) as call:
                placed = call("reshape", features, *(call("size", tokens, dim) for dim in range(3)))
                node.replace_all_uses_with(call(torch.where, mask, placed, tokens))
            graph.graph.graph.erase_node(node)
    graph.graph.recompile()
    return found


def _readers(features: fx.Node) -> list[fx.Node]:
    """The nodes that read features which are passed on unchanged, except nodes that add them to tokens."""
    readers = []
    for user in features.users:
        if user.target not in _PASSING or (user.target is torch.cat and len(user.all_input_nodes) > 1):
            readers.append(user)
        elif user.target != "view_as":
            readers += _readers(user)
    return readers


@contextlib.contextmanager
def _calls_before(graph: ModelGraph, node: fx.Node) -> Iterator[Callable[..., fx.Node]]:
    """A context that yields a function. It adds calls of functions or methods before `node`."""
    inner = graph.graph.graph

    def call(target: str | Callable[..., Any], *args: Any) -> fx.Node:
        made = inner.call_method(target, args) if isinstance(target, str) else inner.call_function(target, args)
        given = fx.map_arg(args, lambda n: n.meta["example_value"])
        made.meta = {**node.meta, "example_value": (
            getattr(given[0], target)(*given[1:]) if isinstance(target, str) else target(*given))}
        return made

    with graph.fakes, torch.enable_grad(), enable_python_dispatcher(), inner.inserting_before(node):
        yield call


def _take_by_rows(graph: ModelGraph, node: fx.Node, tokens: fx.Node, mask: fx.Node, features: fx.Node, elements: int,
                   width: int) -> None:
    """Rewrites `node` so that the n-th position of a row gets the n-th of the row's own features, `elements` in all."""
    with _calls_before(graph, node) as call:
        rank = call("sub", call("cumsum", call("long", call("squeeze", mask, -1)), 1), 1)
        first = call("mul", call("unsqueeze", call(torch.arange, call("size", mask, 0)), 1), elements // width)
        index = call("add", call("clamp", rank, 0), first)
        placed = call(F.embedding, index, call("reshape", features, -1, width))
        node.replace_all_uses_with(call(torch.where, mask, placed, tokens))
    graph.graph.graph.erase_node(node)
    graph.graph.recompile()


def _elements(node: fx.Node) -> sympy.Expr:
    return _size(node.meta["example_value"].numel())


def _size(size: int | torch.SymInt) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
