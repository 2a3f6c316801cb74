"""The fake model: the model with the same code and structure, on the CPU, whose weights have no data.

Capturing a fake model costs no memory (a 72B model is traced in under 1 GB) and leaves the user's model alone. Its fakes live
on the CPU: fakes on "cuda" need a GPU, and a plan for a GPU must be possible without one.
"""
from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.compat.core import FakeTensorMode, pytree
from megacompile.compat.module_hooks import HOOKS
from megacompile.errors import CaptureError
from megacompile.frontend.batches.pair_masks import aligned, argument, example_of, is_images, pairs_of, tokens_of
from megacompile.frontend.ops.attention import register_with_transformers
from megacompile.frontend.tracing.layers import Layers, LayerStack, encoders, find_layers
from megacompile.frontend.tracing.peft_tracing import forward_signature
from megacompile.ir.plan import CaptureKey


# -------------------- The dtype that a parameter is streamed in
def streamed_dtype(parameter: nn.Parameter, wanted: torch.dtype | None) -> torch.dtype:
    """`wanted`, if it is given. Codes of quantized weights, which are integers, stay as they are."""
    return wanted if wanted is not None and parameter.is_floating_point() else parameter.dtype


# --------------------
# Hooks of a model that is traced: transformers' own that collect values (router logits, an encoder's hidden states), those
# that make embeddings' outputs require a gradient, and the user's of the model as a whole.
ROUTERS = "router_logits"


def install_recorders(model: nn.Module, stack: LayerStack) -> None:
    """Installs the collecting hooks in the modules of a model that will collect something: encoders, and a decoder that adds
    its routers' auxiliary loss (`config.output_router_logits`). Otherwise transformers installs them in the first forward,
    under a lock, which Dynamo cannot follow."""
    beside = {id(module) for module in encoders(model, stack)}
    for module in model.modules():  # from the outside in, as forwards run
        routers = getattr(getattr(module, "config", None), f"output_{ROUTERS}", False) is True
        if (routers or id(module) in beside) and _collects(module):
            from transformers.utils.output_capturing import maybe_install_capturing_hooks

            maybe_install_capturing_hooks(module)  # type: ignore[arg-type]
    for module in model.modules():
        for key, hook in module._forward_hooks.items():
            if _records_routers(hook):
                module._forward_hooks[key] = functools.partial(_record_copies, hook)


def remove_hooks_for_gradients(model: nn.Module) -> None:
    """Removes the hooks that make embeddings' outputs require a gradient."""
    for module in model.modules():
        for key in [key for key, hook in module._forward_hooks.items() if asks_for_gradients(hook)]:
            del module._forward_hooks[key]


def remove_hooks_of_whole(model: nn.Module) -> None:
    """Removes the hooks of a model as a whole. A call of the streamed model runs them, so its graph must not. Hooks with which
    transformers collects outputs belong to the model's own forward, and stay."""
    for hooks in (getattr(model, name) for name in HOOKS):
        for key in [key for key, hook in hooks.items() if not collects_outputs(hook)]:
            del hooks[key]


def collects_outputs(hook: Any) -> bool:
    """True if a forward hook is transformers' hook that collects a module's outputs."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def asks_for_gradients(hook: Any) -> bool:
    """True if a forward hook was installed by `enable_input_require_grads` of transformers or PEFT, which
    `gradient_checkpointing_enable` calls. torch.utils.checkpoint needs it above frozen embeddings. The recomputation of
    streamed layers does not, and no gradient of a parameter depends on it."""
    return "make_inputs_require_grad" in getattr(hook, "__qualname__", "")


def _collects(module: nn.Module) -> bool:
    """True if a module's forward has transformers' decorator `capture_outputs`."""
    forward: Any = type(module).forward
    while forward is not None:
        if getattr(forward, "__globals__", {}).get("__name__") == "transformers.utils.output_capturing":
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def _records_routers(hook: Any) -> bool:
    """True if a forward hook is transformers' hook that collects router logits. Recognized by their name in its closure."""
    return any(cell.cell_contents == ROUTERS for cell in getattr(hook, "__closure__", None) or ())


def _record_copies(hook: Callable[..., None], module: nn.Module, args: Any, output: Any) -> None:
    """Calls `hook` with copies. Dynamo does not record a value that shares memory with another value of the layer, and in
    float32 a router's `logits.float()` is the tensor `logits` itself."""
    hook(module, args, pytree.tree_map_only(Tensor, Tensor.clone, output))


CAPTURE_SHAPE = (3, 17)  # batch, length. 0 and 1 would be specialized, and equal sizes could share one symbol.


def capture_shape(key: CaptureKey) -> tuple[int, int]:
    """The [batch, length] with which a model is traced for batches of a key."""
    batch, length = CAPTURE_SHAPE[0], key.traced_length or CAPTURE_SHAPE[1]
    return batch + (length == batch), length


def is_transformers_model(model: nn.Module) -> bool:
    """True if `model` follows transformers' conventions (`config`, `set_attn_implementation`)."""
    return hasattr(model, "set_attn_implementation") and hasattr(model, "config")


def make_fake_model(model: nn.Module, fakes: FakeTensorMode, attention: str | None = None, training: bool = True,
                    layers: Layers | None = None, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of `model` in training mode (or not) with fake parameters and buffers of the same shapes, strides and dtypes. Only
    parameters get the `dtype`, if it is given: rotary frequencies, which are buffers, are fp32 on purpose.

    A transformers model is switched to the `attention` implementation, one of ours. Encoders outside its stack of `layers`
    keep theirs, which is not causal. Ties between parameters survive.
    """
    memo: dict[int, object] = {}
    with fakes:
        for parameter in model.parameters():
            fake = _fake_like(parameter, streamed_dtype(parameter, dtype))
            memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
        for buffer in model.buffers():
            memo[id(buffer)] = _fake_like(buffer)
    try:
        fake_model: nn.Module = copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as reason:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied ({str(reason).splitlines()[0]}): keep tensors as parameters or "
            "buffers, and nothing in the model that copy.deepcopy refuses"
        ) from reason
    fake_model.train(training)
    remove_hooks_for_gradients(fake_model)
    remove_hooks_of_whole(fake_model)
    module: Any
    if is_transformers_model(fake_model):
        for module in fake_model.modules():
            if hasattr(getattr(module, "config", None), "use_cache"):  # also of a model inside another
                module.config.use_cache = False
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False  # recomputation is the plan's choice
            if getattr(module, "use_associative_scan", False):
                module.use_associative_scan = False  # native runs never use it
        if attention is not None:
            register_with_transformers()
            kept = [(m, m.config._attn_implementation) for m in encoders(fake_model, find_layers(fake_model, layers))]
            fake_model.set_attn_implementation(attention)  # type: ignore[operator]
            for module, own in kept:
                module.set_attn_implementation(own)
    return fake_model


def _fake_like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=dtype or tensor.dtype, device="cpu")


def fake_batch(
    model: nn.Module, example: dict[str, torch.Tensor] | None, fakes: FakeTensorMode,
    size: tuple[int, int], further: Collection[str] = (), images: int = 1,
) -> dict[str, torch.Tensor]:
    """Fake batch inputs of [batch, length] `size`, in the positional order of the model's `forward`.

    `example` gives their names and dtypes. Without it they are int64 `input_ids` and, if there is such a parameter, `labels`.
    The `further` inputs are int64, or masks of pairs as they are described (see `pairs.py`). Floats of several dimensions are
    `images` for each sequence: [batch, images, ...] if several. Masks of pairs come last: sizes are read from the first input.
    Raises `CaptureError` if the model's forward does not take the inputs or needs more, or if an input is not an integer
    tensor [batch, length, ...] of the first input's shape, one value a row ([batch], or floats [batch, ...]), or a mask of
    pairs.
    """
    parameters = forward_signature(model).parameters
    name = type(model).__name__
    if example is None:
        if "input_ids" not in parameters:
            raise CaptureError(
                f"{name}.forward has no parameter input_ids: give the batch it is trained on with "
                "example={name: integer tensor of [batch, length], ...}, labels included"
            )
        example = {"input_ids": torch.empty(CAPTURE_SHAPE, dtype=torch.long, device="meta")}
        example |= {"labels": _labels(model)} if "labels" in parameters else {}
    example = example | {argument(each): example_of(each, tokens_of(example)) for each in further}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key in example:
        if key not in parameters and not takes_any:
            raise CaptureError(f"{name}.forward has no parameter {key}: example= must name parameters of forward")
    for key, parameter in parameters.items():
        required = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY, parameter.POSITIONAL_ONLY)
        if required and key not in example:
            raise CaptureError(f"{name}.forward needs {key}: give it a default, or a tensor in example=")
    shape, pairs = tokens_of(example), pairs_of(example)
    for key, tensor in example.items():
        along = key in aligned(example) and tensor.shape[:2] == shape[:2]
        if not (along or key in pairs or of_rows(tensor, shape)) and (
                tensor.shape != shape or tensor.is_floating_point() or tensor.is_complex()):
            raise CaptureError(
                f"batch input {key} is {tensor.dtype} of shape {list(tensor.shape)}: batch inputs must be integer "
                f"tensors [batch, length, ...] of one shape, or floats with one row for each sequence, such as one image "
                f"[batch, ...], or masks [batch, ..., length, length], bool or floats; leave others out of example= and "
                f"compute them in the model"
            )
    order = [key for key in parameters if key in example] + [key for key in example if key not in parameters]
    order.sort(key=pairs.__contains__)
    with fakes:
        return {key: torch.zeros(_fake_shape(example[key], shape, size, images, key in pairs), dtype=example[key].dtype)
                for key in order}


def _fake_shape(tensor: torch.Tensor, tokens: torch.Size, size: tuple[int, int], images: int, pairs: bool) -> tuple[int, ...]:
    if pairs:
        return (size[0], *tensor.shape[1:-2], size[1], size[1])
    if not of_rows(tensor, tokens):
        return (*size, *tensor.shape[2:])
    several = (images,) if images > 1 and is_images(tensor) else ()
    return (size[0], *several, *tensor.shape[1:])


def of_rows(tensor: torch.Tensor, tokens: torch.Size) -> bool:
    """True if a batch argument has values for rows instead of tokens: [batch], or floats of another shape than `tokens`."""
    if not tensor.dim() or (tensor.shape[0] != tokens[0] and not is_images(tensor)) or tensor.is_complex():
        return False
    return tensor.dim() == 1 or (tensor.is_floating_point() and tensor.shape[:2] != tokens[:2])


def _labels(model: nn.Module) -> torch.Tensor:
    """Labels in transformers' form: one for each token; for classifiers of sequences, one for each row."""
    config: Any = getattr(model, "config", None)
    if not type(model).__name__.endswith("ForSequenceClassification") or not is_transformers_model(model):
        return torch.empty(CAPTURE_SHAPE, dtype=torch.long, device="meta")
    count, rows = config.num_labels, CAPTURE_SHAPE[:1]
    if config.problem_type == "multi_label_classification" or (config.problem_type == "regression" and count > 1):
        return torch.empty((*rows, count), device="meta")
    return torch.empty(rows, dtype=torch.float32 if count == 1 else torch.long, device="meta")
