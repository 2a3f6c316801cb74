"""Makes the recurrent mixers of transformers call our ops in a trace.

Their modules call module-level functions for convolutions and scans, which are replaced by name (`FUNCTIONS`); transformers
itself replaces them by kernels where those are installed. In batches of packed rows, the mask of a recurrent layer holds the
sequence of each token, and the mixer passes it on as `seq_idx`.
"""
from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile.compat.hugging_face import replaced
from megacompile.errors import UnsupportedError
from megacompile.frontend.ops.attention import FORMS
from megacompile.frontend.ops.recurrence import causal_conv, recurrence
from megacompile.frontend.tracing.model_options import divides_weights


def _refuse_state(*states: object) -> None:
    if any(state is not None and state is not False for state in states):
        raise UnsupportedError("a recurrent layer reads or returns its state, which captured layers do not keep: pass batches "
                               "without past_key_values")


def _causal_conv(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
    seq_idx: Tensor | None = None, initial_states: object = None, **_: object,
) -> Tensor:
    """`causal_conv1d_fn`: [B, D, T] with weight [D, taps]."""
    _refuse_state(initial_states)
    if activation not in (None, "silu", "swish"):
        raise UnsupportedError(f"a causal convolution with activation {activation} is not supported, only with silu")
    return causal_conv(  # type: ignore[no-any-return]
        hidden_states.transpose(1, 2), weight, bias, "silu" if activation else "", "neutral", seq_idx).transpose(1, 2)


def _exact(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _unit(x: Tensor) -> Tensor:
    exact = _exact(x)
    return (exact * torch.rsqrt((exact * exact).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk_size: int = 64, initial_state: object = None,
    output_final_state: object = False, use_qk_l2norm_in_kernel: bool = False, seq_idx: Tensor | None = None, **_: object,
) -> tuple[Tensor, None]:
    """`chunk_gated_delta_rule` (g [B, T, Hv]) and `chunk_kda` (g [B, T, Hv, K])."""
    _refuse_state(initial_state, output_final_state)
    if use_qk_l2norm_in_kernel:
        query, key = _unit(query), _unit(key)
    return recurrence(
        query, key, value, _exact(g), beta, query.shape[-1] ** -0.5, "neutral", seq_idx), None


def _state_space_dual(
    hidden_states: Tensor, dt: Tensor, rate: Tensor, key: Tensor, query: Tensor, chunk_size: int = 64, *,
    z: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: object = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: object = False, seq_idx: Tensor | None = None,
    **more: Any,
) -> Tensor:
    """`mamba_chunk_scan_combined`: hidden_states [B, T, H, P], dt [B, T, H], its A [H], B and C [B, T, groups, N], and D."""
    _refuse_state(initial_states, return_final_states)
    step = _exact(dt) if dt_bias is None else _exact(dt) + _exact(dt_bias)
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    values = (_exact(hidden_states) * step[..., None]).to(hidden_states.dtype)
    out = recurrence(query, key, values, step * _exact(rate), None, 1.0, "neutral", seq_idx)
    passed = more.get("D")
    if passed is not None:
        out = out + hidden_states * (passed if passed.dim() > 1 else passed[:, None])
    return out if z is None else out * F.silu(z)


def _selective_scan(
    hidden_states: Tensor, dt: Tensor, rate: Tensor, key: Tensor, query: Tensor, *, z: Tensor | None = None,
    delta_bias: Tensor | None = None, delta_softplus: bool = False, return_last_state: object = False, **more: Any,
) -> Tensor:
    """`selective_scan_fn`: hidden_states and dt [B, D, T], its A [D, N], B and C [B, N, T], and D. A recurrence with a head for
    each channel, whose values are single numbers."""
    _refuse_state(return_last_state)
    step = _exact(dt) if delta_bias is None else _exact(dt) + _exact(delta_bias)[:, None]
    step = (F.softplus(step) if delta_softplus else step).transpose(1, 2)
    values = (_exact(hidden_states).transpose(1, 2) * step)[..., None].to(hidden_states.dtype)
    query, key = (x.transpose(1, 2)[:, :, None].to(values.dtype) for x in (query, key))
    out = recurrence(query, key, values, step[..., None] * _exact(rate), None, 1.0, "neutral")[..., 0].transpose(1, 2)
    passed = more.get("D")
    if passed is not None:
        out = out + hidden_states * passed[:, None]
    return out if z is None else out * F.silu(z)


def _lightning_attention(
    self: Any, hidden_states: Tensor, position_embeddings: object, attention_mask: Tensor | None,
    past_key_values: object = None, **_: object,
) -> tuple[Tensor, None]:
    """The forward of MiniMax's linear attention: a recurrence whose decays are constants of the heads."""
    _refuse_state(past_key_values)
    told = attention_mask is not None and attention_mask.dtype == torch.int32
    packed = self.act_fn(self.qkv_proj(hidden_states))
    if attention_mask is not None and not told:
        packed = packed * attention_mask[..., None].to(packed.dtype)
    query, key, value = packed.unflatten(-1, (self.num_attention_heads, 3 * self.head_dim)).split(self.head_dim, -1)
    decay = -_exact(self.slope_rate.flatten()).expand(value.shape[:3])
    out = recurrence(query, key, value, decay, None, 1.0, "neutral", attention_mask if told else None)
    out = self.norm(out.flatten(2))
    return self.out_proj(F.sigmoid(self.output_gate(hidden_states)) * out), None


def _gated_scan(
    self: Any, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, recurrent_states: object, **_: object,
) -> tuple[Tensor, None]:
    """RecurrentGemma's real-gated linear recurrent unit: a recurrence with a head for each channel, and neither queries nor
    keys. Sequences begin at position 0."""
    decay = _exact(recurrent_gate).clamp_min(torch.finfo(torch.float32).tiny).log()
    ones = torch.ones_like(hidden_states[..., :1, None])
    segments = reset[..., 0].cumsum(1).to(torch.int32)
    return recurrence(ones, ones, hidden_states[..., None], decay, None, 1.0, "neutral", segments)[..., 0], None


def _wkv(
    time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor, state: object = None, return_state: object = False,
) -> tuple[Tensor, None]:
    """RWKV's `rwkv_linear_attention` [B, T, C]: for each channel, a mean of earlier values, which decay, and the token's own.
    Weights are exp(key). As in transformers' loop, a state is relative to the largest exponent so far, here a running maximum.
    Results do not depend on it."""
    _refuse_state(state, return_state)
    keys, values, rate = _exact(key), _exact(value), _exact(time_decay).exp()
    with torch.no_grad():
        grown = torch.arange(key.shape[1], device=key.device)[:, None] * rate.double()
        largest = (keys.double() + grown).cummax(1).values - grown
        before = torch.cat([largest[:, :1], largest[:, :-1]], 1)
        falls, highest, before = (x.to(rate.dtype) for x in (before - largest, largest, before))
    weights, ones = (keys - highest).exp()[..., None], torch.ones_like(keys)[..., None]
    sums = recurrence(ones, weights, torch.cat([values[..., None], ones], -1), falls - rate, None, 1.0, "neutral")
    earlier = F.pad(sums[:, :-1], (0, 0, 0, 0, 1, 0))
    own = keys + time_first
    top = torch.maximum(before, own).detach()
    kept, new = (before - top).exp(), (own - top).exp()
    mean = (kept * earlier[..., 0] + new * values) / (kept * earlier[..., 1] + new)
    return mean.to(value.dtype), None


def _undivided(self: Any) -> None:
    """`RwkvModel._rescale_layers`, which divides weights in place before an evaluation, and multiplies them after it. Raises
    `UnsupportedError` if there are layers to divide."""
    if divides_weights(self.config):
        raise UnsupportedError("RWKV divides its weights before an evaluation: set config.rescale_every = 0 before stream()")


def _no_shortcut(*_: object, **__: object) -> None:
    """A fused kernel for a whole mixer. transformers' own code has none either."""


def _recurrent_mask(native: Callable[..., Tensor | None], config: Any, **given: Any) -> Tensor | None:
    """`create_recurrent_attention_mask`: the sequence of each token in packed rows, int32 [B, T]."""
    positions = given.get("position_ids")
    if config._attn_implementation != FORMS["packed"] or positions is None or given.get("attention_mask") is not None:
        return native(config=config, **given)
    follows = positions[:, 1:] == positions[:, :-1] + 1
    return F.pad((~follows).cumsum(1), (1, 0)).to(torch.int32).expand(given["inputs_embeds"].shape[:2])


def _masked(native: Callable[..., Tensor], hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
    """`apply_mask_to_padding_states`: numbers of sequences hide nothing."""
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        return hidden_states
    return native(hidden_states, attention_mask)


def _told(native: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a mixer, which passes the sequences of tokens on to the functions that it calls."""

    @functools.wraps(native)
    def forward(self: nn.Module, *args: Any, attention_mask: Tensor | None = None, **options: Any) -> Any:
        if attention_mask is not None and attention_mask.dtype == torch.int32:
            return native(self, *args, attention_mask=None, seq_idx=attention_mask, **options)
        return native(self, *args, attention_mask=attention_mask, **options)

    return forward


#: Functions of transformers' models -> a context in which a module has ours. Their arguments are those of the packages
#: `causal_conv1d`, `fla` and `mamba_ssm`, which transformers calls if they are installed.
FUNCTIONS: dict[str, Callable[[ModuleType], AbstractContextManager[None]]] = {
    "causal_conv1d_fn": lambda code: replaced(code, causal_conv1d_fn=_causal_conv),
    "torch_chunk_gated_delta_rule": lambda code: replaced(code, torch_chunk_gated_delta_rule=_delta_rule),
    "chunk_kimi_delta_attention": lambda code: replaced(code, chunk_kimi_delta_attention=_delta_rule),
    "mamba2_chunk_scan": lambda code: replaced(code, mamba2_chunk_scan=_state_space_dual),
    "mamba2_split_conv1d_scan_combined": lambda code: replaced(code, mamba2_split_conv1d_scan_combined=_no_shortcut),
    "mamba_selective_scan": lambda code: replaced(code, mamba_selective_scan=_selective_scan),
    "mamba_inner_fn": lambda code: replaced(code, mamba_inner_fn=_no_shortcut),
    "MiniMaxLightningAttention": lambda code: replaced(code.MiniMaxLightningAttention, forward=_lightning_attention),
    "RecurrentGemmaRglru": lambda code: replaced(code.RecurrentGemmaRglru, _rnn_scan=_gated_scan),
    "rwkv_linear_attention": lambda code: replaced(code, rwkv_linear_attention=_wkv),
    "RwkvModel": lambda code: replaced(code.RwkvModel, _rescale_layers=_undivided),
    "create_recurrent_attention_mask": lambda code: replaced(code, create_recurrent_attention_mask=functools.partial(
        _recurrent_mask, code.create_recurrent_attention_mask)),
    "apply_mask_to_padding_states": lambda code: replaced(code, apply_mask_to_padding_states=functools.partial(
        _masked, code.apply_mask_to_padding_states)),
}
#: Those that compute with several tokens. A module that calls one is a mixer.
_OF_MIXERS = {"causal_conv1d_fn", "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan"}


@contextlib.contextmanager
def mixers_as_ops(model: nn.Module) -> Iterator[None]:
    """A context in which the recurrent mixers of `model` that are transformers' call our ops."""
    kinds = {type(module) for module in model.modules() if type(module).__module__.startswith("transformers.models.")}
    with contextlib.ExitStack() as patches:
        for name in sorted({kind.__module__ for kind in kinds}):
            for function, replacing in FUNCTIONS.items():
                if hasattr(sys.modules[name], function):
                    patches.enter_context(replacing(sys.modules[name]))
        for kind in kinds:
            if _OF_MIXERS.intersection(inspect.unwrap(kind.forward).__code__.co_names):
                patches.enter_context(replaced(kind, forward=_told(kind.forward)))
        yield
