"""A plain run decides beforehand which trace would be useless."""
from __future__ import annotations

import functools
import importlib
from typing import Any

import engine
import pytest
import torch
from tiny_models import build
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Mamba2Config, Qwen3MoeConfig, Qwen3NextConfig

import megacompile
from megacompile.frontend import capture
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.tracing.layers import find_layers
from megacompile.frontend.tracing.trace import rehearse
from megacompile.ir.plan import CaptureKey

trace = importlib.import_module("megacompile.frontend.tracing.trace")


SIZES: dict[str, Any] = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                             num_key_value_heads=1, head_dim=8)


class Gate(nn.Module):
    """In the place of attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, width)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return self.gate(hidden_states).sigmoid() * hidden_states, None


class Again(nn.Module):
    """Runs its layers twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(input_ids)
        for layer in (*self.layers, *self.layers):
            x = torch.relu(layer(x))
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def with_experts() -> nn.Module:
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1))


def with_states() -> nn.Module:
    return AutoModelForCausalLM.from_config(Mamba2Config(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8, state_size=8, n_groups=2, chunk_size=8))


def with_delta_rule() -> nn.Module:
    """One layer with a gated delta rule, of odd sizes."""
    return AutoModelForCausalLM.from_config(Qwen3NextConfig(
        **SIZES, mlp_only_layers=[0], linear_num_key_heads=1, linear_num_value_heads=3, linear_key_head_dim=7,
        linear_value_head_dim=5, linear_conv_kernel_dim=3, layer_types=["linear_attention"]))


def gated() -> nn.Module:
    model: nn.Module = build()
    for layer in model.model.layers[:1]:  # type: ignore[union-attr,index]
        layer.self_attn = Gate(model.config.hidden_size)  # type: ignore[union-attr]
    return model


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Gets an item for each trace."""
    found: list[Any] = []
    made = trace.capture_model_graph
    monkeypatch.setattr(trace, "capture_model_graph", lambda *args: found.append(args) or made(*args))
    return found


def captured(make: Any) -> CapturedModel:
    example = {name: torch.zeros(2, 5, dtype=torch.long) for name in ("input_ids", "labels")}
    return capture(make(), example=example if make is Again else None)


@pytest.mark.parametrize("make", [
    Again, *(pytest.param(each, marks=pytest.mark.nightly) for each in (build, gated, with_experts))])
def test_a_model_is_traced_once(make: Any, traces: list[Any]) -> None:
    """Layers without our attention, layers that run again, and experts in float32 among them."""
    found = captured(make)
    if make is with_experts:
        assert found.same_in_evaluation()
    assert len(traces) == 1


@pytest.mark.nightly(held_by=(
    "tests/model/test_rehearsal.py::test_a_model_is_traced_once",
    "tests/model/test_honored.py::test_a_model_that_differs_in_evaluation_mode_is_evaluated_as_it_is_there"))
@pytest.mark.parametrize("make", [
    functools.partial(build, num_hidden_layers=1, attention_dropout=0.1),
    pytest.param(with_states, marks=pytest.mark.nightly)])
def test_a_model_that_evaluates_otherwise_is_traced_once_for_that(make: Any, traces: list[Any]) -> None:
    plain = captured(make)
    with torch.no_grad():
        assert not plain.same_in_evaluation()
        evaluating = plain.for_key(CaptureKey(evaluating=True))
    assert len(traces) == 2 and evaluating.key.evaluating
    assert any(template.has_gradient[0] for template in evaluating.templates.values())


@pytest.mark.nightly(held_by="tests/model/test_rehearsal.py::test_a_model_is_traced_once")
def test_a_layer_that_inverts_a_triangle_has_native_s_operations_and_few_conditions_on_sizes(traces: list[Any]) -> None:
    """Steps of Python in the place of a solver were 915 operations. Padding to chunks, written as it is computed, made 400
    conditions. It is traced once: it evaluates alike, divisions of whole numbers, which PyTorch writes in Python, among it."""
    found = captured(with_delta_rule)
    code = found.templates["decoder"].stages["captured"]
    assert "solve_triangular" in code and code.count("\n") < 500
    assert len(found.conditions) < 10
    assert found.same_in_evaluation() and len(traces) == 1


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])

    def forward(self) -> None:
        raise TimeoutError("the user's")


def test_what_says_nothing_about_the_model_goes_to_the_caller() -> None:
    model = Late()
    with pytest.raises(TimeoutError, match="the user's"):
        rehearse(model, {}, {}, find_layers(model))


@pytest.mark.parametrize("first_counts", [True, False], ids=["as it came", "packed"])
def test_the_first_batch_that_is_padded_on_the_left_is_captured_in_one_form(first_counts: bool) -> None:
    """Where a target stands on a row's first token the batch is computed as it came, otherwise packed."""
    model = megacompile.stream(build(), device="cpu", repack=16)
    ids = torch.randint(0, 64, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, :6] = 0
    ignored = (mask == 0) if first_counts else (mask.cumsum(1) <= 1)
    model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(ignored, -100)).loss.backward()
    found = {further for key in engine.captures(model)._known for further in key.further}
    model.megacompile.close()
    assert found == {"attention_mask" if first_counts else "position_ids"}
