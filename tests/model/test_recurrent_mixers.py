"""Models with recurrent layers: one capture for every length, and sequences of packed rows that do not read each other."""
from __future__ import annotations

import copy
from typing import Any

import engine
import pytest
import torch
import verdicts
from tiny_configs import FIRST_PLAIN_TOKEN, VOCABULARY
from torch import Tensor

import megacompile
from megacompile.errors import UnsupportedError
from megacompile.frontend.tracing.recurrent_mixers import _causal_conv, _delta_rule, _wkv, mixers_as_ops

LENGTHS = (1, 17, 63, 64, 65, 128, 1000)
SEQUENCES = (30, 41, 33, 70, 1, 5)
PACKED = ("qwen3_5_text", "nemotron_h", "lfm2", "qwen3_next", "qwen3_5_moe_text", "kimi_linear", "olmo_hybrid", "falcon_h1",
          "bamba", "lfm2_moe", "zamba2", "minimax")
#: Their scans are not told where sequences begin, or the model's masks do not read position IDs.
NOT_PACKED = ("granitemoehybrid", "mamba2", "mamba", "falcon_mamba", "jamba", "recurrent_gemma", "zamba", "rwkv")
EACH_RUN = 2


def nightly(families: tuple[str, ...], each_run: int) -> list[Any]:
    return [each if n < each_run else pytest.param(each, marks=pytest.mark.nightly) for n, each in enumerate(families)]


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(FIRST_PLAIN_TOKEN, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(length))


def results(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    return verdicts._loss_and_gradients(model, batch)


@pytest.mark.parametrize("family", nightly(PACKED + NOT_PACKED, EACH_RUN))
def test_one_capture_serves_any_length(family: str) -> None:
    native: Any = verdicts._build(family)
    model = megacompile.stream(copy.deepcopy(native), device="cpu")
    for length in LENGTHS:
        ids = tokens(2, length)
        batch = dict(input_ids=ids, labels=ids.clone())
        if length == 1:  # no token has a target
            assert torch.isnan(model(**batch).loss)
            continue
        ours, theirs = results(model, batch), results(native, batch)
        off = verdicts._distances(ours, theirs)
        if max(off.values()) > 1e-5:  # then native training rounds more: it sums decays before it subtracts them, in float32
            double = copy.deepcopy(native).double()
            if hasattr(double, "set_experts_implementation"):
                double.set_experts_implementation("eager")  # PyTorch has no grouped products in float64
            with mixers_as_ops(double):  # transformers' own scans compute in float32
                exact = results(double, batch)
            mine, native_s = (verdicts._distances(found, exact) for found in (ours, theirs))
            assert all(mine[name] <= max(1e-5, native_s[name]) for name in mine)
    assert len(list(engine.captures(model))) == 1
    model.megacompile.close()


@pytest.mark.parametrize("family", nightly(PACKED, EACH_RUN))
def test_packed_sequences_do_not_read_each_other(family: str) -> None:
    native: Any = verdicts._build(family)
    model = megacompile.stream(copy.deepcopy(native), device="cpu")
    ids, labels = tokens(1, sum(SEQUENCES)), tokens(1, sum(SEQUENCES))
    positions = torch.cat([torch.arange(n) for n in SEQUENCES])[None]
    labels[positions == 0] = -100
    loss, gradients = results(model, dict(input_ids=ids, labels=labels, position_ids=positions))
    native.zero_grad()
    targets, apart = int((labels != -100).sum()), torch.zeros(())
    for each_ids, each_labels in zip(ids.split(SEQUENCES, 1), labels.split(SEQUENCES, 1), strict=True):
        if each_ids.shape[1] > 1:
            part = native(input_ids=each_ids, labels=each_labels).loss * ((each_labels != -100).sum() / targets)
            part.backward()
            apart = apart + part.detach()
    assert float(loss.detach()) == pytest.approx(float(apart), rel=1e-6)
    largest = max(float(p.grad.norm()) for p in native.parameters() if p.grad is not None)
    for name, parameter in native.named_parameters():
        if parameter.grad is not None:
            bound = 1e-4 * max(float(parameter.grad.norm()), 1e-3 * largest)
            assert float((gradients[name] - parameter.grad).norm()) <= bound, name
    model.megacompile.close()


def test_what_a_mixer_cannot_do_in_a_trace_is_refused() -> None:
    x, weight = torch.ones(1, 4, 3), torch.ones(4, 2)
    with pytest.raises(UnsupportedError, match=r"a causal convolution with activation gelu is not supported, only with silu"):
        _causal_conv(x, weight, activation="gelu")
    with pytest.raises(UnsupportedError, match=r"a recurrent layer reads or returns its state, which captured layers do not "
                                               r"keep: pass batches without past_key_values"):
        _delta_rule(x, x, x, x, x, output_final_state=True)


@pytest.mark.parametrize("size", [1.0, 40.0])
def test_weights_of_rwkv_neither_overflow_nor_vanish(size: float) -> None:
    """exp(40 x) of normal numbers spans more than float32 does. Some channels forget at once, some never."""
    from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

    draw = torch.Generator().manual_seed(0)
    decay, first = torch.linspace(-9, 4, 6), torch.randn(6, generator=draw)
    key, value, given = (torch.randn(2, 150, 6, generator=draw) for _ in range(3))

    def mean(decay: Tensor, first: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor]:
        """The mean of all values up to each token, by a matrix of weights."""
        ages = torch.arange(150)[:, None] - torch.arange(150) - 1  # of the values [j] of a token [i]
        exponents = key[:, None] - ages[..., None] * decay.exp()
        exponents = torch.where(ages[..., None] < 0, key[:, None] + first, exponents)
        weights = exponents.masked_fill(ages[..., None] < -1, float("-inf")).softmax(2)
        return ((weights * value[:, None]).sum(2),)

    def found(function: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (decay, first, key * size, value)]
        out = function(*leaves)[0]
        return [out.detach(), *torch.autograd.grad(out, leaves, given.to(dtype))]

    for ours, theirs, true in zip(found(_wkv), found(rwkv_linear_attention_cpu), found(mean, torch.float64), strict=True):
        error, native_s = (float((x - true).norm() / true.norm()) for x in (ours, theirs))
        assert error <= max(1e-5, 2 * native_s)


@pytest.mark.parametrize("rescale_every", [0, 1, 6])  # of three layers
def test_rwkv_evaluates_if_it_does_not_divide_its_weights(rescale_every: int) -> None:
    native: Any = verdicts._build("rwkv")
    native.config.rescale_every = rescale_every
    batch = dict(input_ids=tokens(2, 70), labels=tokens(2, 70))
    model = megacompile.stream(copy.deepcopy(native), device="cpu").eval()
    with torch.no_grad():
        if rescale_every == 1:
            with pytest.raises(UnsupportedError, match=r"RWKV divides its weights before an evaluation: set "
                                                       r"config.rescale_every = 0 before stream\(\)"):
                model(**batch)
            assert not model.megacompile.device_copy.layers(), "copies in turns would have the undivided weights"
        else:
            torch.testing.assert_close(model(**batch).logits, native.eval()(**batch).logits, rtol=1e-5, atol=1e-6)
    model.megacompile.close()
