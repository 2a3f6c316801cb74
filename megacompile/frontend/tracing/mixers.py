"""Makes the recurrent mixers of transformers call our ops in a trace.

Their modules call module-level functions for convolutions and scans, which are replaced by name (`FUNCTIONS`). transformers
itself replaces them by kernels where those are installed. In batches of packed rows, the mask of a recurrent layer holds the
sequence of each token, and the mixer passes it on as `seq_idx`.
"""
from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile.compat.hugging_face import replaced
from megacompile.errors import UnsupportedError
from megacompile.frontend.ops.attention import FORMS
from megacompile.frontend.ops.recurrence import causal_conv, recurrence


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


def _unit(x: Tensor) -> Tensor:
    exact = x.float()
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
        query, key, value, g.float(), beta, query.shape[-1] ** -0.5, "neutral", seq_idx), None


def _state_space_dual(
    hidden_states: Tensor, dt: Tensor, rate: Tensor, key: Tensor, query: Tensor, chunk_size: int = 64, *,
    z: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: object = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: object = False, seq_idx: Tensor | None = None,
    **more: Any,
) -> Tensor:
    """`mamba_chunk_scan_combined`: hidden_states [B, T, H, P], dt [B, T, H], its A [H], B and C [B, T, groups, N], and D."""
    _refuse_state(initial_states, return_final_states)
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    values = (hidden_states.float() * step[..., None]).to(hidden_states.dtype)
    out = recurrence(query, key, values, step * rate.float(), None, 1.0, "neutral", seq_idx)
    passed = more.get("D")
    if passed is not None:
        out = out + hidden_states * (passed if passed.dim() > 1 else passed[:, None])
    return out if z is None else out * F.silu(z)


def _no_shortcut(*_: object, **__: object) -> None:
    """A fused kernel for a whole mixer, which transformers' own code has not either."""


#: Functions of transformers' models -> what they are in a trace. Their arguments are those of the packages `causal_conv1d`,
#: `fla` and `mamba_ssm`, which transformers calls if they are installed.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _causal_conv, "torch_chunk_gated_delta_rule": _delta_rule, "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space_dual, "mamba2_split_conv1d_scan_combined": _no_shortcut,
}


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


@contextlib.contextmanager
def mixers_as_ops(model: nn.Module) -> Iterator[None]:
    """A context in which the recurrent mixers of `model` that are transformers' call our ops."""
    with contextlib.ExitStack() as patches:
        for name in sorted({type(module).__module__ for module in model.modules()}):
            code = sys.modules.get(name)
            if code is not None and name.startswith("transformers.models."):
                patches.enter_context(replaced(code, **_replacements(code)))
        for kind in {type(module) for module in model.modules()}:
            if kind.__module__.startswith("transformers.models.") and FUNCTIONS.keys() & _called(kind):
                patches.enter_context(replaced(kind, forward=_told(kind.forward)))
        yield


def _replacements(code: ModuleType) -> dict[str, Callable[..., Any]]:
    found = {name: function for name, function in FUNCTIONS.items() if hasattr(code, name)}
    wrappers: dict[str, Callable[..., Any]] = {
        "create_recurrent_attention_mask": _recurrent_mask, "apply_mask_to_padding_states": _masked}
    for name, wrapper in wrappers.items():
        if hasattr(code, name):
            found[name] = functools.partial(wrapper, getattr(code, name))
    return found


def _called(kind: type[nn.Module]) -> set[str]:
    """The names of the functions that the forward of a module calls."""
    return set(inspect.unwrap(kind.forward).__code__.co_names)
