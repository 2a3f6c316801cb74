"""The kernels that `megacompile::attention` runs: one forward and one backward by name.

Every kernel returns outputs and gradients in memory [B, T, heads, D], seen as [B, heads, T, D]. The projection that follows
then reads them without a copy, and the fake implementation can state strides that hold for all kernels.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

aten = torch.ops.aten


def heads_inside(x: Tensor) -> Tensor:
    """[B, heads, T, D] laid out in memory as [B, T, heads, D]; no copy if it already is."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def empty_heads_inside(x: Tensor) -> Tensor:
    """Memory of the shape of `x` [B, heads, T, D], laid out as `heads_inside` does."""
    batch, heads, length, width = x.shape
    return x.new_empty(batch, length, heads, width).transpose(1, 2)


def expand_groups(x: Tensor, heads: int) -> Tensor:
    """Key or value heads [B, Hkv, T, D] repeated for their query heads: [B, heads, T, D]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def sum_groups(x: Tensor, heads: int) -> Tensor:
    """The transpose of `expand_groups`: gradients of repeated heads [B, H, T, D] summed to [B, heads, T, D].

    The sum is taken in float32 and rounded once (`sum` does so inside)."""
    batch, repeated, length, width = x.shape
    return x if repeated == heads else x.view(batch, heads, repeated // heads, length, width).sum(2)


def add_sinks(out: Tensor, logsumexp: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Adds sinks [H], an additional term of every softmax's sum, to the result of attention without them. Changes `out` in
    place, which is a kernel's result."""
    with_sinks = torch.logaddexp(logsumexp, sinks.float()[:, None])
    return out.mul_(torch.exp(logsumexp - with_sinks)[..., None]), with_sinks


# ------------------------------------------------------------------ any device, windows and capped scores
def visible(length: int, device: torch.device, window: int, segments: Tensor | None) -> Tensor:
    """The keys that each query sees (see `attention`): bool [T, T], or with segments [B, 1 (or their own H), T, T]."""
    if segments is not None and segments.dtype == torch.bool:
        return segments
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    seen = distance >= 0
    if window:
        seen = seen & (distance < window)
    if segments is not None:
        queries, keys = segments[:, None, :, None], segments[:, None, None, :]
        seen = seen & (keys >= 0) & ((queries < 0) | (queries == keys))
    return seen


def scores_of(query: Tensor, key: Tensor, scale: float, window: int, softcap: float,
              segments: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Masked scores in float32 [B, H, T, T] and, for the backward, their capped value before the mask."""
    scores = (query @ key.transpose(2, 3) * scale).float()
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = ~visible(query.shape[2], query.device, window, segments)
    return scores.masked_fill(hidden, float("-inf")), scores


def math_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    heads = query.shape[1]
    masked, _ = scores_of(query, expand_groups(key, heads), scale, window, softcap)
    logsumexp = masked.logsumexp(-1)
    weights = masked.softmax(-1).to(query.dtype)
    return heads_inside(weights @ expand_groups(value, heads)), logsumexp


def math_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    scale: float, window: int, softcap: float, segments: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    heads, groups = query.shape[1], key.shape[1]
    keys, values = expand_groups(key, heads), expand_groups(value, heads)
    masked, capped = scores_of(query, keys, scale, window, softcap, segments)
    weights = torch.exp(masked - logsumexp[..., None])
    grad_value = weights.to(query.dtype).transpose(2, 3) @ grad_out
    # The softmax's backward needs sum(weights * grad_weights) over each row, which is grad_out . out.
    row = (grad_out.float() * out.float()).sum(-1, keepdim=True)
    grad_scores = weights * ((grad_out @ values.transpose(2, 3)).float() - row)
    if softcap:
        grad_scores = grad_scores * (1 - (capped / softcap).square())
    grad_scores = (grad_scores * scale).to(query.dtype)
    grad_query = grad_scores @ keys
    grad_key = grad_scores.transpose(2, 3) @ query
    return (heads_inside(grad_query), heads_inside(sum_groups(grad_key, groups)),
            heads_inside(sum_groups(grad_value, groups)))


# ------------------------------------------------------------------ flash attention on the CPU
def flash_cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    assert not window and not softcap, "the CPU's flash kernel knows neither windows nor capped scores"
    heads = query.shape[1]
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        query, expand_groups(key, heads), expand_groups(value, heads), 0.0, True, scale=scale)
    return heads_inside(out), logsumexp.contiguous()


def flash_cpu_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    heads, groups = query.shape[1], key.shape[1]
    # The kernel wants logsumexp with the heads innermost, as its forward returns it.
    logsumexp = logsumexp.transpose(1, 2).contiguous().transpose(1, 2)
    grad_query, grad_key, grad_value = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, expand_groups(key, heads), expand_groups(value, heads), out, logsumexp, 0.0, True, scale=scale)
    return (heads_inside(grad_query), heads_inside(sum_groups(grad_key, groups)),
            heads_inside(sum_groups(grad_value, groups)))


# ------------------------------------------------------------------ flash attention on CUDA, bf16 and fp16
def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    assert not softcap, "flash attention does not cap scores"
    length = query.shape[2]
    out, logsumexp, *_ = aten._flash_attention_forward(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), None, None, length, length, 0.0, True, False,
        scale=scale, **window_of(window))
    return heads_inside(out.transpose(1, 2)), logsumexp


def flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    length = query.shape[2]
    no_dropout_state = torch.empty(2, dtype=torch.uint64, device=query.device)  # read only where dropout > 0
    grad_query, grad_key, grad_value = aten._flash_attention_backward(
        grad_out.transpose(1, 2), query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
        out.transpose(1, 2), logsumexp, None, None, length, length, 0.0, True, no_dropout_state,
        torch.empty(0, dtype=torch.uint64, device=query.device), scale=scale, **window_of(window))
    return (heads_inside(grad_query.transpose(1, 2)), heads_inside(grad_key.transpose(1, 2)),
            heads_inside(grad_value.transpose(1, 2)))


def window_of(window: int) -> dict[str, int]:
    """A kernel's arguments for a window of n positions: the query's own, and n - 1 to its left."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


# ------------------------------------------------------------------ cuDNN's attention on CUDA, bf16 and fp16
def cudnn_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    assert not window and not softcap, "cuDNN is asked for neither windows nor capped scores"

    def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        out, logsumexp, *_ = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=scale)
        return out, logsumexp.squeeze(-1)

    out, logsumexp = in_blocks(attend, query, key, value, BLOCK)
    return heads_inside(out), logsumexp


#: The most positions that cuDNN's forward sees at once. Keys and values of a head then fit the 50 MB of a Hopper's cache. Of
#: 262,144 positions (28 heads, 128 wide), blocks take 0.83 s, and all at once 0.93. Its backward gains 1%, and has no blocks.
BLOCK = 65536

#: (query, key, value, causal) -> the output and the logsumexp, as of `attention`.
Attend = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]


def in_blocks(attend: Attend, query: Tensor, key: Tensor, value: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Causal attention of blocks of queries with blocks of keys. The results for a query are joined by their sums, in float32:
    exp(logsumexp) is the weight of each."""
    length = query.shape[2]
    if length <= block:
        return attend(query, key, value, True)
    out, logsumexp = empty_heads_inside(query), query.new_empty(query.shape[:3], dtype=torch.float32)
    for start in range(0, length, block):
        queries = slice(start, start + block)
        found, total = attend(query[:, :, queries], key[:, :, queries], value[:, :, queries], True)
        found = found.float()
        for first in range(0, start, block):
            keys = slice(first, first + block)
            other, its_sum = attend(query[:, :, queries], key[:, :, keys], value[:, :, keys], False)
            both = torch.logaddexp(total, its_sum)
            found.mul_(torch.exp(total - both)[..., None]).add_(other * torch.exp(its_sum - both)[..., None])
            total = both
        out[:, :, queries], logsumexp[:, :, queries] = found, total
    return out, logsumexp


def cudnn_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    length = query.shape[2]
    no_dropout_state = torch.empty((), dtype=torch.int64, device=query.device)  # read only where dropout > 0
    gradients = aten._scaled_dot_product_cudnn_attention_backward(
        grad_out, query, key, value, out, logsumexp.unsqueeze(-1), no_dropout_state, no_dropout_state, None, None, None,
        length, length, 0.0, True, scale=scale)
    grad_query, grad_key, grad_value = map(heads_inside, gradients)
    return grad_query, grad_key, grad_value


def fused_kernel(device: torch.device) -> str:
    """The kernel for causal attention without extras, in half precision, on `device`. At compute capability 9 and 10 it is
    "cudnn": PyTorch's flash kernel, made for 8.0, reaches half to two thirds of its speed there. Elsewhere it is "flash".
    cuDNN's backward adds in no fixed order for long sequences, so deterministic algorithms use "flash" too."""
    if device.type != "cuda" or not torch.cuda.is_available() or not torch.backends.cudnn.is_available():
        return "flash"
    capable = torch.cuda.get_device_capability(device)[0] in (9, 10) and torch.backends.cudnn.version() >= 91000
    return "cudnn" if capable and not torch.are_deterministic_algorithms_enabled() else "flash"


FORWARD: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "neutral": math_forward, "math": math_forward, "flash_cpu": flash_cpu_forward, "flash": flash_forward,
    "cudnn": cudnn_forward}
BACKWARD: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "neutral": math_backward, "math": math_backward, "flash_cpu": flash_cpu_backward, "flash": flash_backward,
    "cudnn": cudnn_backward}
