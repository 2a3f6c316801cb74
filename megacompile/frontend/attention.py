"""Causal attention as one op of our own, so that a template names no device's kernel, and its face to transformers.

`megacompile::attention` stands in every graph. Which kernel serves it is its last argument, set by the `attention` pass
for the device that will run; "neutral" runs as "math". The kernels are in `attention_kernels.py`.
"""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile.errors import UnsupportedError
from megacompile.frontend import attention_kernels as kernels

ATTENTION_NAME = "megacompile"  # in transformers' AttentionInterface and AttentionMaskInterface
# Arguments of transformers' attention functions that change nothing here: caches and further outputs are off.
_HARMLESS = {
    "position_ids", "cache_position", "use_cache", "past_key_values", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict", "is_causal", "layer_idx", "num_items_in_batch",
}

_ARGUMENTS = "Tensor query, Tensor key, Tensor value"
_OPTIONS = "float scale, int window, float softcap, str kernel"


def _attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float, kernel: str
) -> tuple[Tensor, Tensor]:
    """Causal attention with grouped queries.

    query [B, H, T, D]; key, value [B, Hkv, T, D], H a multiple of Hkv. `window`: how many positions, its own among
    them, a query sees (0: all before it). `softcap`: scores become softcap * tanh(scores / softcap) (0: none).
    Returns the output [B, H, T, D], in memory [B, T, H, D], and the logsumexp of the scores, float32 [B, H, T].
    """
    return kernels.FORWARD[kernel](query, key, value, scale, window, softcap)


def _attention_fake(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float, kernel: str
) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = query.shape
    out = query.new_empty(batch, length, heads, width).transpose(1, 2)
    return out, query.new_empty((batch, heads, length), dtype=torch.float32)


def _attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    scale: float, window: int, softcap: float, kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, each in memory [B, T, heads, D]."""
    return kernels.BACKWARD[kernel](grad_out, query, key, value, out, logsumexp, scale, window, softcap)


def _attention_backward_fake(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    scale: float, window: int, softcap: float, kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    def like(x: Tensor) -> Tensor:
        batch, heads, length, width = x.shape
        return x.new_empty(batch, length, heads, width).transpose(1, 2)

    return like(query), like(key), like(value)


attention = torch.library.custom_op(
    "megacompile::attention", _attention, mutates_args=(), schema=f"({_ARGUMENTS}, {_OPTIONS}) -> (Tensor, Tensor)")
attention.register_fake(_attention_fake)
attention_backward = torch.library.custom_op(
    "megacompile::attention_backward", _attention_backward, mutates_args=(),
    schema=f"(Tensor grad_out, {_ARGUMENTS}, Tensor out, Tensor logsumexp, {_OPTIONS}) -> (Tensor, Tensor, Tensor)")
attention_backward.register_fake(_attention_backward_fake)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.options = inputs[3:]
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.megacompile.attention_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    return (*gradients, None, None, None, None)


attention.register_autograd(_differentiate, setup_context=_save_for_backward)


def transformers_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None, **options: Any,
) -> tuple[Tensor, None]:
    """For `AttentionInterface`: no mask crosses from the prologue into a layer.

    Returns the output as [B, T, H, D], and no attention weights. Raises `UnsupportedError` for what the op cannot do.
    """
    if attention_mask is not None:
        raise UnsupportedError("an attention mask reached a captured layer: pass batches without attention_mask")
    if dropout > 0:
        raise UnsupportedError(
            f"attention dropout {dropout} in {type(module).__name__} is not supported: set it to 0 in the config "
            "(attention_dropout, attn_pdrop)")
    if not options.get("is_causal", getattr(module, "is_causal", True)):
        raise UnsupportedError(f"{type(module).__name__} is not causal: only causal decoders can be streamed")
    for name, option in options.items():
        if option is not None and name not in _HARMLESS:
            raise UnsupportedError(f"attention argument {name} of {type(module).__name__} is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # No fused kernel takes values of another width than keys (latent attention has them): zeros change neither scores nor sums.
    values, width = value.shape[-1], max(query.shape[-1], value.shape[-1])
    query, key, value = (_widened(x, width) for x in (query, key, value))
    out, _ = torch.ops.megacompile.attention(
        query, key, value, float(scale), int(sliding_window or 0), float(softcap or 0.0), "neutral")
    if values < width:
        out = out[..., :values]
    return out.transpose(1, 2).contiguous(), None


def _widened(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def transformers_mask(
    *_: Any, attention_mask: Tensor | None = None, local_size: int | None = None, use_vmap: bool = False, config: Any = None,
    **__: Any,
) -> None:
    """For `AttentionMaskInterface`: there is no mask, the op knows causality and windows itself.

    transformers' own mask functions cannot look at data under tracing and always build bool [B, 1, T, T]; and an
    attention function *without* a mask function gets None too, and drops padding silently.
    Raises `UnsupportedError` for a mask that the op does not know: in chunks, or with a function of the model's own laid over
    it. The model is then captured with its own attention.
    """
    if attention_mask is not None:
        raise UnsupportedError("a padding mask reached a captured model: pass batches without attention_mask")
    # A window and a chunk both come as `local_size`; `use_vmap` is set where a model lays a function of its own over the mask.
    if use_vmap or (local_size is not None and local_size == getattr(config, "attention_chunk_size", None)):
        raise UnsupportedError("an attention mask that is neither causal nor a sliding window reached a captured model")


def register_with_transformers() -> None:
    """Make `set_attn_implementation("megacompile")` known to transformers. May be called again."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, transformers_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, transformers_mask)
