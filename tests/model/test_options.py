"""Config options that cannot be captured are refused by name at once; options without an effect are accepted."""
from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import transformers
from tiny_models import assert_same_gradients, batch
from torch import Tensor, nn

import megacompile
from megacompile.errors import CaptureError, UnsupportedError
from megacompile.frontend import capture
from megacompile.frontend.tracing import model_graph, model_options
from megacompile.planning.config import StreamConfig

SIZES = dict(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
LLAMA = dict(**SIZES, intermediate_size=24, num_key_value_heads=1)
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
BART = dict(vocab_size=64, d_model=16, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=24)

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "dynamic rotary frequencies": ("Llama", dict(**LLAMA, rope_parameters=DYNAMIC), (
        r"rope_type='dynamic', by which model\.rotary_emb .*changes the rotary freq.*: use rope_type=.linear. or .yarn.")),
    "an eager loop over experts": ("Mixtral", dict(**LLAMA, num_local_experts=4, experts_implementation="eager"), (
        r"experts_implementation='eager', by which model\.layers\.0\.mlp\.experts .*loops over the experts.*: call "
        r"model\.set_experts_implementation\(\"grouped_mm\"\)")),
    "skipped layers": ("OPT", dict(**SIZES, ffn_dim=24, word_embed_proj_dim=16, layerdrop=0.1), (
        r"with layerdrop=0\.1, by which model\.decoder .*skips layers at random: "
        r"set layerdrop, or model\.decoder\.layerdrop .*to 0")),
    "skipped layers of another name": ("Bart", dict(**BART, decoder_layerdrop=0.1), "with decoder_layerdrop=0.1, by which"),
    "a router's noise": ("Mixtral", dict(**LLAMA, num_local_experts=4, router_jitter_noise=0.1), (
        "router_jitter_noise=0.1, by which .*multiplies a router's input by random numbers: set router_jitter_noise, or")),
    "chunks of a length": ("Bert", dict(**SIZES, intermediate_size=24, is_decoder=True, chunk_size_feed_forward=1), (
        "chunk_size_feed_forward=1, by which .*cuts sequences into chunks.*to 0, which computes the same")),
    "all hidden states": ("Llama", dict(**LLAMA, output_hidden_states=True), (
        r"with output_hidden_states=True, by which the model returns the outputs of all layers.*: set it to False, and pass")),
    "attention weights": ("Llama", dict(**LLAMA, output_attentions=True), (
        "with output_attentions=True, by which the model returns the attention weights of all layers .*: set it to False")),
}


def build(family: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**options)).train()


@pytest.mark.parametrize("what", REFUSED)
def test_an_option_that_cannot_be_captured_is_refused_by_name_before_anything_is_traced(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, options, message = REFUSED[what]
    monkeypatch.setattr(model_graph, "dynamo_graph_capture_for_export", None)
    with pytest.raises(UnsupportedError, match=message) as caught:
        capture(build(family, options))
    assert len(str(caught.value).splitlines()[0]) < 400


@pytest.mark.nightly(
    held_by="tests/model/test_options.py::test_an_option_that_cannot_be_captured_is_refused_by_name_before_anything_is_traced")
def test_experts_that_older_transformers_multiply_in_a_loop_are_refused_unless_their_weights_are_bfloat16(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_options, "loop_is_an_op", lambda: False)
    model = build("Mixtral", dict(**LLAMA, num_local_experts=4, experts_implementation="grouped_mm"))
    with pytest.raises(UnsupportedError, match=(
            r"experts_implementation='grouped_mm', by which model\.layers\.0\.mlp\.experts .*not bfloat16 in a loop.*: upgrade "
            r"transformers to 5\.23, or call model\.bfloat16\(\) or model\.set_experts_implementation\(\"batched_mm\"\)")):
        capture(model)
    assert capture(model.bfloat16()).templates


@pytest.mark.nightly(held_by="tests/model/test_options.py::test_what_cannot_be_captured_is_said_with_the_cause_and_the_remedy")
def test_experts_whose_loop_reads_values_are_refused_with_their_module_and_line() -> None:
    model = build("JetMoe", dict(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_key_value_heads=1, kv_channels=8,
                                 intermediate_size=24, num_local_experts=4))
    with pytest.raises(CaptureError, match=(
            r"modeling_jetmoe\.py:\d+ \(expert_size = expert_size\.tolist\(\)\): model\.layers\.0\.\S+ \(JetMoeTopKGating\) "
            "has Python control flow that depends on tensor values; give it a forward that computes the same")):
        capture(model)


class Branches(nn.Module):
    """A part of a model that looks at values, and at an option of a config."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.linear = transformers.PreTrainedConfig(threshold=0.5), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > self.config.threshold else x


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(8, 8), []

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x)
        self.kept.append(made.float())
        return x + made.tanh()


class Model(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = nn.ModuleList(layer() for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        kept = [each.square().mean() for block in self.blocks for each in getattr(block, "kept", ())]
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + sum(kept)


@pytest.mark.parametrize(("layer", "message"), [
    (Branches, r"blocks\.0 \(Branches\), with threshold=0\.5, has Python control flow that depends on tensor values"),
    (Keeps, r"reads \w+ outside of the layer that made and kept it .*shares memory with another value .*: keep \w+\.clone\(\)"),
])
def test_what_cannot_be_captured_is_said_with_the_cause_and_the_remedy(layer: type[nn.Module], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Model(layer))


@pytest.mark.nightly(
    held_by="tests/model/test_options.py::test_an_option_that_cannot_be_captured_is_refused_by_name_before_anything_is_traced")
def test_gradient_checkpointing_that_was_enabled_before_changes_nothing() -> None:
    """Its hook at the embeddings neither refuses the model nor stops its capture."""
    native = build("Llama", LLAMA)
    model = copy.deepcopy(native)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model = megacompile.stream(model, device="cpu")
    with warnings.catch_warnings(action="error"):
        assert model.is_gradient_checkpointing
    loss, ours = native(**batch(1)).loss, model(**batch(1)).loss
    loss.backward()
    ours.backward()
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
    assert_same_gradients(model, native)
    model.megacompile.close()


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", torch.bfloat16), ("float32", torch.float32), ("auto", None)])
def test_a_dtype_may_be_given_by_its_name(name: str, dtype: torch.dtype | None) -> None:
    assert StreamConfig.of(dtype=name) == StreamConfig.of(dtype=dtype)
