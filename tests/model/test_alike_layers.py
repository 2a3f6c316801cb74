"""Layers that are alike are traced once: a capture has the same calls and templates as if all were traced."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import megacompile
from megacompile.frontend.capture import CapturedModel, capture
from megacompile.frontend.tracing import trace
from megacompile.frontend.tracing.alike_layers import Shortened
from megacompile.ir.plan import CaptureKey

LAYERS = 6
#: Layers of two kinds by turns.
WINDOWED: dict[str, Any] = dict(layer_types=2 * ["sliding_attention", "full_attention"], sliding_window=8)


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, str]]:
    """What each trace leaves out, by name."""
    shorten, found = trace.shorten, list[Mapping[str, str]]()

    def watched(*args: Any) -> Shortened | None:
        shortened = shorten(*args)
        found.append({} if shortened is None else shortened.repeats)
        return shortened

    monkeypatch.setattr(trace, "shorten", watched)
    return found


def described(captured: CapturedModel) -> Any:
    return (captured.calls, {name: template.digest for name, template in captured.templates.items()}, captured.layer_names,
            captured.evaluating, captured.guards, captured.batch_inputs, captured.across_rows, captured.causal)


def whole(model: nn.Module, **options: Any) -> CapturedModel:
    """A capture that has traced all layers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "shorten", lambda *args: None)
        return capture(model, **options)


def config_of(kind: str, **changes: Any) -> Any:
    import transformers

    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
                 num_key_value_heads=1, head_dim=8, max_position_embeddings=64, pad_token_id=0)
    return getattr(transformers, kind)(**{**sizes, **changes})


def of_transformers(kind: str, **changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(kind, **changes), attn_implementation="eager").train()


class Layer(nn.Module):
    def __init__(self, index: int, scale: float = 1.0) -> None:
        super().__init__()
        self.index, self.scale = index, scale
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.up(x)) * self.scale


class Model(nn.Module):
    """Six alike layers in a chain."""

    layer: type[Layer] = Layer

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(self.layer(index) for index in range(LAYERS))
        self.head = nn.Linear(8, 64)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.run(self.embedding(input_ids)))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class BranchesOnItsIndex(Model):
    class DoublesThird(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2 if self.index == 3 else super().forward(x)

    layer = DoublesThird


class NamesItsLayers(Model):
    """Each layer knows its own name, and where it is."""

    def __init__(self) -> None:
        super().__init__()
        for number, layer in enumerate(self.layers):
            layer.own = {"name": f"model.layers.{number}.up", "device": torch.device("cpu")}


class NamesAnotherLayer(Model):
    """The first four layers know their own name, and the other two that of another layer."""

    def __init__(self) -> None:
        super().__init__()
        for number, layer in enumerate(self.layers):
            layer.own = f"layers.{min(number, 3)}"


class HasAnAttributeOfItsOwn(Model):
    """Which the traced sizes do not show."""

    class Windowed(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, -self.window:]) if x.shape[1] > self.window else super().forward(x)

    layer = Windowed

    def __init__(self) -> None:
        super().__init__()
        for index, layer in enumerate(self.layers):
            layer.window = 4096 if index == 4 else 8192  # type: ignore[assignment]


class HasAConstantOfItsOwn(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].scale = 0.5  # type: ignore[assignment]


class ReadsAnEarlierLayer(Model):
    def run(self, x: Tensor) -> Tensor:
        found = []
        for number, layer in enumerate(self.layers):
            x = layer(x + found[1] if number == 4 else x)
            found.append(x)
        return x


class ComputesBetweenLayers(Model):
    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * 0.5
        return x


class ReadsAllLayersAtItsEnd(Model):
    def run(self, x: Tensor) -> Tensor:
        found = []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        return sum(found[1:], found[0])


class CountsItsLayers(Model):
    def run(self, x: Tensor) -> Tensor:
        return super().run(x) / len(self.layers)


class RunsALayerTwice(Model):
    def run(self, x: Tensor) -> Tensor:
        return self.layers[2](super().run(x))  # type: ignore[no-any-return]


class EndsInAnotherLayer(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers[-1].scale = 3.0  # type: ignore[assignment]


class RunsLayersInPairs(Model):
    """Odd layers have another scale."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[1::2]:
            layer.scale = 0.5


@pytest.mark.sample(3)
@pytest.mark.parametrize(("model", "kept"), [
    (Model, 2), (HasAConstantOfItsOwn, 3), (BranchesOnItsIndex, 4), (HasAnAttributeOfItsOwn, 5), (RunsLayersInPairs, 3),
    (NamesItsLayers, 2), (NamesAnotherLayer, 5),
    *((each, LAYERS) for each in (ReadsAnEarlierLayer, ComputesBetweenLayers, ReadsAllLayersAtItsEnd, CountsItsLayers,
                                  RunsALayerTwice, EndsInAnotherLayer)),
])
def test_layers_are_removed_that_are_like_others(model: type[Model], kept: int, removed: list[Mapping[str, str]]) -> None:
    found = capture(model())
    assert list(removed[0] if removed else {}) == [f"layers.{number}" for number in range(kept, LAYERS)]
    if kept < LAYERS:
        assert described(found) == described(whole(model()))


@pytest.mark.nightly(held_by=(
    "tests/model/test_alike_layers.py::test_layers_are_removed_that_are_like_others",
    "tests/model/test_training_parity.py::test_first_loss_and_gradients_equal_natives"))
@pytest.mark.parametrize(("kind", "changes", "kept", "further"), [
    pytest.param("Qwen2Config", {}, 2, (), marks=pytest.mark.nightly),
    ("LlamaConfig", dict(attention_dropout=0.1), 2, ("attention_mask",)),
    ("Gemma3TextConfig", WINDOWED, 3, ("position_ids",)),
    pytest.param("Gemma3TextConfig", WINDOWED, 3, ("attention_mask",), marks=pytest.mark.nightly),
    ("Qwen3MoeConfig", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, decoder_sparse_step=1), 2,
     ("position_ids",)),
])
def test_models_of_transformers_are_traced_with_one_layer_of_each_kind(
        kind: str, changes: dict[str, Any], kept: int, further: tuple[str, ...], removed: list[Mapping[str, str]]) -> None:
    """The models have one layer more than are kept: each further layer makes the trace of all layers longer."""
    model = of_transformers(kind, num_hidden_layers=kept + 1, **changes)
    expected, found = (capture_(model, key=CaptureKey(further)) for capture_ in (whole, capture))
    assert described(found) == described(expected)
    assert list(removed[0]) == [f"model.layers.{kept}"]


@pytest.mark.nightly(held_by=(
    "tests/model/test_alike_layers.py::test_layers_are_removed_that_are_like_others",
    "tests/model/test_frozen.py::test_a_parameter_has_a_gradient_where_it_has_one_natively"))
def test_layers_above_frozen_ones_are_of_another_kind(removed: list[Mapping[str, str]]) -> None:
    model = of_transformers("Qwen2Config", num_hidden_layers=4)
    for module in (model.model.embed_tokens, *model.model.layers[:1]):
        module.requires_grad_(False)
    assert described(capture(model)) == described(whole(model))
    assert list(removed[0]) == ["model.layers.3"]  # the first that is trained is given what requires no gradient


@pytest.mark.nightly(held_by="tests/model/test_alike_layers.py::test_layers_are_removed_that_are_like_others")
@pytest.mark.parametrize("stored", [None, pytest.param("nf4", marks=pytest.mark.nightly)])
def test_layers_with_adapters_are_alike(stored: str | None, removed: list[Mapping[str, str]]) -> None:
    """PEFT's adapters store the name of the layer that they belong to."""
    peft = pytest.importorskip("peft")
    model = of_transformers("Qwen2Config", num_hidden_layers=3, hidden_size=64, intermediate_size=64)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    if stored is not None:
        model = megacompile.quantize(model, stored)
    assert described(capture(model)) == described(whole(model))
    assert list(removed[0]) == ["base_model.model.model.layers.2"]


@pytest.mark.parametrize("stored", ["nf4", pytest.param("int8", marks=pytest.mark.nightly(
    held_by="tests/model/test_alike_layers.py::test_layers_with_experts_in_codes_are_alike"))])
def test_layers_with_experts_in_codes_are_alike(stored: str, removed: list[Mapping[str, str]]) -> None:
    """A layer's experts in codes remember the shapes of their values in objects of their own."""
    peft = pytest.importorskip("peft")
    model = of_transformers("Qwen3MoeConfig", num_hidden_layers=3, num_experts=4, num_experts_per_tok=2, hidden_size=64,
                            moe_intermediate_size=64).bfloat16()
    model = peft.get_peft_model(model, peft.LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj"], task_type="CAUSAL_LM"))
    model = megacompile.quantize(model, stored)
    assert described(capture(model)) == described(whole(model))
    assert list(removed[0]) == ["base_model.model.model.layers.2"]


@pytest.mark.nightly(held_by="tests/model/test_alike_layers.py::test_layers_are_removed_that_are_like_others")
def test_experts_in_pieces_are_repeated_piece_by_piece(removed: list[Mapping[str, str]]) -> None:
    model = of_transformers(
        "Qwen3MoeConfig", num_hidden_layers=3, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    assert described(capture(model, expert_pieces=2)) == described(whole(model, expert_pieces=2))
    assert len(removed[0]) == 1


def test_a_model_whose_second_call_differs_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counts(Layer):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return super().forward(x) * self.calls

    class Counting(Model):
        layer = Counts

    model = Counting()
    with FakeTensorMode() as fakes:
        fake_model = trace.make_fake_model(model, fakes)
        ids = torch.zeros(3, 17, dtype=torch.int64)
        stack = trace.find_layers(fake_model, "layers")
        assert trace.shorten(fake_model, dict(input_ids=ids, labels=ids), {}, stack) is None
        assert len(fake_model.layers) == LAYERS


@pytest.mark.nightly(held_by=(
    "tests/model/test_alike_layers.py::test_layers_are_removed_that_are_like_others",
    "tests/model/test_training_parity.py::test_first_loss_and_gradients_equal_natives"))
def test_a_model_of_many_layers_trains_as_native_pytorch() -> None:
    native = of_transformers("LlamaConfig", num_hidden_layers=9)
    model = megacompile.stream(of_transformers("LlamaConfig", num_hidden_layers=9), device="cpu")
    batch = tiny_models.batch(rows=4, length=13)
    for each in (model, native):
        each(**batch).loss.backward()
    tiny_models.assert_same_gradients(model, native)
    with torch.no_grad():
        ours, theirs = (each.eval()(input_ids=batch["input_ids"], output_hidden_states=True) for each in (model, native))
    assert len(ours.hidden_states) == len(theirs.hidden_states) == 10
    torch.testing.assert_close(ours.hidden_states, theirs.hidden_states)
    model.megacompile.close()
