"""Causal attention as one op of our own, so that a template names no device's kernel; and its interface to transformers.

`megacompile::attention` is in every graph. Its last argument names the kernel, set by the `attention` pass for the target
device; "neutral" runs as "math". The kernels are in `attention_kernels.py`.
"""
from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile.errors import UnsupportedError
from megacompile.frontend.batches.pair_masks import argument, masks_in
from megacompile.frontend.ops import attention_kernels as kernels
from megacompile.frontend.ops import segmented_attention as segmented

# Arguments of transformers' attention functions that change nothing here: caches and additional outputs are off.
_HARMLESS = {
    "position_ids", "cache_position", "use_cache", "past_key_values", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict", "is_causal", "layer_idx", "num_items_in_batch", "shift_labels",
}

#: In the place of a window, where a layer passes none.
_NOT_GIVEN = -1

_ARGUMENTS = "Tensor query, Tensor key, Tensor value"
_OPTIONS = "float scale, int window, float softcap, str kernel, Tensor? segments=None"


def _attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float, kernel: str,
    segments: Tensor | None = None, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention with grouped queries.

    query [B, H, T, D]; key, value [B, Hkv, T, D], H a multiple of Hkv. `window`: how many positions a query sees, including
    its own (0: all before it). `softcap`: scores become softcap * tanh(scores / softcap) (0: none). `segments`, int32 [B, T]:
    the sequence of its row that each position belongs to; queries see only their own sequence. Keys below 0 are absent
    (padding), and queries there see all keys that are present. Instead of int32, `segments` may be bool [B, 1 or H, T, T]: the
    keys that each query sees, including later ones; then `window` is 0. A query that sees nothing gives zeros. `sinks` [H]: an
    additional score of each query, for a key without a value. Returns the output [B, H, T, D], in memory [B, T, H, D], and the
    logsumexp of the scores, float32 [B, H, T].
    """
    if segments is not None:
        out, logsumexp = segmented.FORWARD[kernel](query, key, value, segments, scale, window, softcap)
    else:
        out, logsumexp = kernels.FORWARD[kernel](query, key, value, scale, window, softcap)
    return (out, logsumexp) if sinks is None else kernels.add_sinks(out, logsumexp, sinks)


def _attention_fake(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float, kernel: str,
    segments: Tensor | None = None, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = query.shape
    out = query.new_empty(batch, length, heads, width).transpose(1, 2)
    return out, query.new_empty((batch, heads, length), dtype=torch.float32)


def _attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    scale: float, window: int, softcap: float, kernel: str, segments: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, each in memory [B, T, heads, D].

    Sinks are contained in `out` and `logsumexp`: weights are exp(score - logsumexp), and the sum over a row of weights x their
    gradients is grad_out . out, since a key without a value adds nothing to either.
    """
    if segments is not None:
        return segmented.BACKWARD[kernel](grad_out, query, key, value, out, logsumexp, segments, scale, window, softcap)
    return kernels.BACKWARD[kernel](grad_out, query, key, value, out, logsumexp, scale, window, softcap)


def _attention_backward_fake(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    scale: float, window: int, softcap: float, kernel: str, segments: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return kernels.empty_heads_inside(query), kernels.empty_heads_inside(key), kernels.empty_heads_inside(value)


attention = torch.library.custom_op(
    "megacompile::attention", _attention, mutates_args=(),
    schema=f"({_ARGUMENTS}, {_OPTIONS}, Tensor? sinks=None) -> (Tensor, Tensor)")
attention.register_fake(_attention_fake)
attention_backward = torch.library.custom_op(
    "megacompile::attention_backward", _attention_backward, mutates_args=(),
    schema=f"(Tensor grad_out, {_ARGUMENTS}, Tensor out, Tensor logsumexp, {_OPTIONS}) -> (Tensor, Tensor, Tensor)")
attention_backward.register_fake(_attention_backward_fake)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.options = inputs[3:7]
    ctx.save_for_backward(*inputs[:3], *output, *inputs[7:9])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, out, logsumexp, segments, sinks = ctx.saved_tensors
    gradients = torch.ops.megacompile.attention_backward(
        grad_out, query, key, value, out, logsumexp, *ctx.options, segments)
    of_sinks = None if sinks is None else _sinks_gradient(grad_out, out, logsumexp, sinks)
    return *gradients, None, None, None, None, None, of_sinks


def _sinks_gradient(grad_out: Tensor, out: Tensor, logsumexp: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of the sinks, as ops of the graph that compilers can fuse. A weight w without a value has the gradient -w
    (grad_out . out) in its score."""
    weights = torch.exp(sinks.float()[:, None] - logsumexp)
    return -(weights * (grad_out.float() * out.float()).sum(-1)).sum((0, 2)).to(sinks.dtype)


attention.register_autograd(_differentiate, setup_context=_save_for_backward)


def transformers_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, sliding_window: int | None = _NOT_GIVEN, softcap: float | None = None,
    s_aux: Tensor | None = None, *, form: str = "causal", **options: Any,
) -> tuple[Tensor, None]:
    """For `AttentionInterface`. `form`: a key of `FORMS`. "causal" takes no mask; the others take the segments that
    `transformers_mask` has made; all of them take its mask of every pair. `s_aux`: sinks [H].

    Returns the output as [B, T, H, D], and no attention weights. Raises `UnsupportedError` for what the op cannot do.
    """
    segments = attention_mask
    if form == "padded_eager" and softcap:
        raise UnsupportedError("capped scores have gradients of their own where a query sees nothing")
    of_pairs = segments is not None and segments.dtype == torch.bool
    if form == "pairs" and not (of_pairs and _fits(segments, query)):
        raise UnsupportedError("another mask than the batch's attention_mask reached a captured layer: pass batches without it")
    if not of_pairs and ((segments is None) != (form == "causal") or (
            segments is not None and (segments.dim(), segments.dtype) != _SEGMENTS)):
        raise UnsupportedError("an attention mask that is neither causal, nor padding or packing, reached a captured layer: "
                               "pass batches without attention_mask")
    if dropout > 0:
        raise UnsupportedError(
            f"attention dropout {dropout} in {type(module).__name__} is not supported: set it to 0 in the config "
            "(attention_dropout, attn_pdrop)")
    if not of_pairs and not options.get("is_causal", getattr(module, "is_causal", True)):
        raise UnsupportedError(f"{type(module).__name__} is not causal: only causal decoders can be streamed")
    if key.shape[2] != query.shape[2]:
        raise UnsupportedError(f"attention of {type(module).__name__} has keys of other positions than its queries have")
    if s_aux is not None and s_aux.shape != query.shape[1:2]:
        raise UnsupportedError(f"attention sinks of {type(module).__name__} are not one for each of {query.shape[1]} heads")
    for name, option in options.items():
        if option is not None and name not in _HARMLESS:
            raise UnsupportedError(f"attention argument {name} of {type(module).__name__} is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Fused kernels need values as wide as keys (in latent attention they differ). Zeros change neither scores nor sums.
    values, width = value.shape[-1], max(query.shape[-1], value.shape[-1])
    query, key, value = (_widened(x, width) for x in (query, key, value))
    window = _window_of(module) if sliding_window == _NOT_GIVEN else int(sliding_window or 0)
    window = 0 if of_pairs else window
    kernel = "packed" if form == "packed" and not of_pairs else "neutral"
    out, _ = torch.ops.megacompile.attention(
        query, key, value, float(scale), window, float(softcap or 0.0), kernel, segments, s_aux)
    if form == "padded_eager" and s_aux is None:  # with a sink, a query that sees no key sees the sink, and gives zeros
        assert segments is not None
        heads = query.shape[1]
        means = _uniform_attention(query, kernels.expand_groups(key, heads), kernels.expand_groups(value, heads), scale)
        out = torch.where(_fully_masked(segments, window)[:, None, :, None], means, out)
    if values < width:
        out = out[..., :values]
    return out.transpose(1, 2).contiguous(), None


def _window_of(module: nn.Module) -> int:
    """The window of a layer that does not pass it to attention, since transformers has put it into the mask (Qwen2-MoE). Raises
    `UnsupportedError` if only the config knows it."""
    config: Any = getattr(module, "config", None)
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not window or (kinds is not None and kinds[module.layer_idx] != "sliding_attention"):  # type: ignore[index]
        return 0
    if not hasattr(module, "sliding_window"):
        raise UnsupportedError(f"{type(module).__name__} does not pass sliding_window={window} to its attention, and masks are "
                               "left out of captured models: pass it in the module's forward, or set sliding_window=None in "
                               "the config")
    return int(module.sliding_window or 0)  # type: ignore[arg-type]


def _fits(mask: Tensor | None, query: Tensor) -> bool:
    """True if a mask covers each pair of the query's positions, for all heads at once or for each head."""
    batch, heads, length, _ = query.shape
    return mask is not None and mask.dim() == 4 and mask.shape[1] in (1, heads) and (
        mask.shape[0], *mask.shape[2:]) == (batch, length, length)


def _fully_masked(segments: Tensor, window: int) -> Tensor:
    """A mask of the queries that see no key, before padding ends: bool [B, T]."""
    if segments.dtype == torch.bool:
        return ~segments.squeeze(1).any(-1)
    seen = (segments >= 0).cumsum(1)
    if window:
        seen = seen - F.pad(seen, (window, 0))[:, :seen.shape[1]]
    return seen == 0


def _uniform_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The result of eager attention for a query that sees nothing, [B, H, T, D]. All its scores are the same huge negative
    number, so every weight is 1 / T. Its scores still get gradients, through the product that is added and subtracted again."""
    products = ((key - key.mean(2, keepdim=True)) * (scale / key.shape[2])).transpose(2, 3) @ value.detach()
    scores = query @ products
    return value.mean(2, keepdim=True) + (scores - scores.detach())


def _widened(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def transformers_mask(
    *_: Any, attention_mask: Tensor | None = None, local_size: int | None = None, use_vmap: bool = False, config: Any = None,
    mask_function: Any = None, batch_size: int = 0, q_length: int = 0, device: Any = None, form: str = "causal", **__: Any,
) -> Tensor | None:
    """For `AttentionMaskInterface`. Returns no mask, since the op handles causality and windows itself; or segments, int32 [B,
    T]; or, if the model adds to the causal mask (images whose tokens see each other both ways, chunks), bool [B, 1, T, T].

    transformers' own mask functions cannot look at data under tracing and always build bool [B, 1, T, T]; and an attention
    function *without* a mask function gets None too, and drops padding silently.
    """
    if form == "pairs" or (attention_mask is not None) != form.startswith("padded"):
        raise UnsupportedError("a padding mask reached a captured model: pass batches without attention_mask")
    # `use_vmap` is set where a model lays functions of its own over the mask. A window and a chunk both come as `local_size`.
    chunked = local_size is not None and local_size == getattr(config, "attention_chunk_size", None)
    if use_vmap or chunked or mask_function.__name__ == "or_mask":
        return _every_pair(mask_function, attention_mask, batch_size, q_length, device)
    if attention_mask is not None:
        return torch.where(attention_mask.bool(), 0, -1).to(torch.int32)
    if form == "causal":
        return None
    # A sequence begins at a position that does not see the one before it, by whichever rule transformers uses.
    rows, positions = torch.arange(batch_size, device=device)[:, None], torch.arange(q_length, device=device)[None]
    follows = mask_function(rows, 0, positions[:, 1:], positions[:, :-1])
    begins = (~follows).expand(batch_size, -1)  # a rule that does not read position_ids gives one row for all
    return F.pad(begins.cumsum(1), (1, 0)).to(torch.int32)


def _every_pair(mask_function: Any, attention_mask: Tensor | None, batch: int, length: int, device: Any) -> Tensor:
    """The keys that each query sees, bool [B, 1, T, T]. transformers calls `mask_function` for one pair at a time under vmap,
    which Dynamo does not trace. Here it is called for all pairs at once. A function that is not elementwise gives another
    shape, and is refused."""
    rows, positions = torch.arange(batch, device=device), torch.arange(length, device=device)
    seen = mask_function(rows[:, None, None, None], rows[:1], positions[:, None], positions)
    if attention_mask is not None:
        seen = seen & attention_mask.bool()[:, None, None]
    return seen.expand(batch, 1, length, length)


#: (dimensions, dtype) of segments.
_SEGMENTS = 2, torch.int32
#: Content of rows -> the attention implementation that a model is captured with. Under "pairs", transformers makes no mask:
#: every layer uses the batch's, with or without a window. A query that sees nothing (padding on the left) gives zeros in
#: transformers' "sdpa", and the mean of all values in its "eager".
FORMS = {"causal": "megacompile", "packed": "megacompile_packed", "padded": "megacompile_padded",
         "padded_eager": "megacompile_padded_eager", "pairs": "megacompile_pairs"}


def implementation_for(further: Collection[str], own: str | None) -> str | None:
    """The attention implementation for batches with `further` arguments (see `pairs.py`), for a model whose `own` is "sdpa",
    "eager", ...; None if only the model knows an argument's meaning, such as that of a mask that is added to scores."""
    names, masks = {argument(each) for each in further}, masks_in(further)
    if not names <= {"attention_mask", "position_ids", "token_type_ids"}:
        return None
    if masks:
        return FORMS["pairs"] if masks.get("attention_mask", "").startswith("bool") else None
    if "attention_mask" in names:  # then transformers does not look for sequences within a row
        return FORMS["padded_eager" if own == "eager" else "padded"]
    return FORMS["packed" if "position_ids" in names else "causal"]


def register_with_transformers() -> None:
    """Makes `set_attn_implementation` accept the implementations of `FORMS`. May be called again."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for form, implementation in FORMS.items():
        AttentionInterface.register(implementation, functools.partial(transformers_attention, form=form))
        AttentionMaskInterface.register(implementation, functools.partial(transformers_mask, form=form))
