"""Captures of sequences that are divided among ranks: where exchanges are, what they cost, and what is refused."""
from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from sequence_jobs import model_of
from torch import Tensor, nn

import megacompile
from megacompile.errors import CaptureError, UnsupportedError
from megacompile.frontend.capture import CapturedModel, capture
from megacompile.frontend.graph import sequences
from megacompile.frontend.graph.sequences import divided_key, why_not_divided
from megacompile.frontend.ops.exchanges import connect_sequences
from megacompile.predict.hardware import Hardware


def captured(config: str = "LlamaConfig", ranks: int = 2, documents: bool = False, **changes: Any) -> CapturedModel:
    return capture(model_of(config, **changes), key=divided_key(ranks, documents))


def ops_of(template: Any, name: str) -> list[Any]:
    return [node for node in template.forward_graph().nodes if f"megacompile.{name}." in str(node.target)]


def test_attention_gets_all_tokens_and_this_ranks_heads() -> None:
    layer = captured(ranks=4).templates["decoder"]
    (attention,) = ops_of(layer, "attention")
    query, key, _ = (node.meta["val"] for node in attention.args[:3])
    length = layer.symbols[1]
    assert (query.shape[1], key.shape[1]) == (1, 1)  # of 4 query heads and 2 groups
    assert layer.symbolic(query.shape[2]) == 4 * length
    assert len(ops_of(layer, "to_heads")) == 3 and len(ops_of(layer, "to_tokens")) == 1


def test_a_layer_keeps_and_passes_on_its_own_tokens_alone() -> None:
    whole, divided = capture(model_of("LlamaConfig")), captured(ranks=4)
    assert divided.templates["decoder"].output_bytes() == whole.templates["decoder"].output_bytes()
    assert [call.name for call in divided.calls] == [call.name for call in whole.calls]


def test_documents_are_numbered_over_all_tokens() -> None:
    (attention,) = ops_of(captured(documents=True).templates["decoder"], "attention")
    assert "megacompile.all_tokens" in str(attention.args[7].target)


class _Ranks:
    """Ranks of this process, which all have the same values."""

    position = 0

    def all_to_all(self, sent: Tensor) -> Tensor:
        return sent


@pytest.mark.parametrize("heads", [4, 3])
def test_each_exchange_undoes_the_other(heads: int) -> None:
    connect_sequences(2, _Ranks())
    given = torch.randn(3, heads, 5, 8)
    by_heads = torch.ops.megacompile.to_heads(given, 2)
    assert by_heads.shape == (3, 2, 10, 8)
    assert torch.equal(torch.ops.megacompile.to_tokens(by_heads, 2, heads)[:, :2], given[:, :2])
    torch.library.opcheck(torch.ops.megacompile.to_heads.default, (given.requires_grad_(), 2), test_utils=(
        "test_schema", "test_autograd_registration", "test_faketensor"))


@pytest.mark.parametrize("left_out", ["to_heads", "to_tokens", "all_tokens"])
def test_an_exchange_that_is_left_out_is_refused(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    divide = sequences._divided

    def sabotaged(graph: Any, *arguments: Any) -> Any:
        made = divide(graph, *arguments)
        node = next(each for each in graph.nodes if f"megacompile.{left_out}." in str(each.target))
        given = node.args[0]
        node.replace_all_uses_with(given)
        graph.erase_node(node)
        return given if node is made else made

    monkeypatch.setattr(sequences, "_divided", sabotaged)
    with pytest.raises((UnsupportedError, CaptureError), match=r"layers\.0 .*(without an exchange|invalid for input of size)"):
        captured(documents=left_out == "all_tokens")


def test_the_check_finds_attention_of_a_ranks_own_tokens() -> None:
    assert why_not_divided(capture(model_of("LlamaConfig")).templates["decoder"]) == "attention without an exchange"
    assert why_not_divided(captured().templates["decoder"]) == ""


class Counting(transformers.LlamaForCausalLM):
    """A model that counts the positions of its tokens itself."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None,  # type: ignore[override]
                **more: Any) -> Any:
        embedded = self.get_input_embeddings()(input_ids)
        places = torch.arange(input_ids.shape[1], device=input_ids.device, dtype=embedded.dtype)
        return super().forward(inputs_embeds=embedded + places[:, None], labels=labels, position_ids=position_ids, **more)


class Shifting(transformers.LlamaForCausalLM):
    """A model whose loss shifts its labels itself."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None,  # type: ignore[override]
                shift_labels: Tensor | None = None, **more: Any) -> Any:
        logits = super().forward(input_ids=input_ids, position_ids=position_ids, **more).logits
        assert labels is not None
        targets = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


def own(kind: Any) -> Any:
    return kind(model_of("LlamaConfig").config)


@pytest.mark.parametrize(("make", "said"), [
    (lambda: model_of("GPT2Config", n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0), "dropout"),
    (lambda: model_of("MixtralConfig", num_local_experts=4, output_router_logits=True), "loss of its own"),
    (lambda: model_of("MambaConfig", state_size=4), "tokens"),
    (lambda: model_of("BloomConfig", n_head=4, n_layer=2), "tokens"),
    (lambda: own(Counting), "arange"),
    (lambda: own(Shifting), "shifts its labels"),
])
def test_what_needs_the_tokens_of_other_ranks_is_refused(make: Any, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        capture(make(), key=divided_key(2))


def test_a_plan_counts_exchanges_and_the_tokens_of_a_rank() -> None:
    config = transformers.LlamaConfig(hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8,
                                      num_key_value_heads=8, vocab_size=512)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)

    def step_s(peer_bandwidth: float, **how: Any) -> float:
        hardware = dataclasses.replace(Hardware.find("8xh200"), peer_bandwidth=peer_bandwidth)
        made = megacompile.schedule(model, batch=1, length=65536, whole_step=True, device="cuda", dtype=torch.bfloat16,
                                    hardware=hardware, gpus=4, **how)
        assert made.plan.length == 65536 // how.get("sequence_ranks", 1)
        return made.simulate().step_s

    fast, slow = (step_s(rate, sequence_ranks=4) for rate in (400e9, 4e9))
    whole = step_s(400e9)
    assert fast < whole / 3
    # Each layer exchanges queries, keys, values and results forward and backward, three quarters of which come from others.
    one_way = 4 * 4 * 16384 * 1024 * 2 * 0.75
    assert slow - fast == pytest.approx(2 * one_way * (1 / 4e9 - 1 / 400e9), rel=0.5)


def test_sequences_that_the_ranks_do_not_divide_are_refused() -> None:
    with torch.device("meta"):
        model = model_of("LlamaConfig")
    for how in ({"gpus": 3, "length": 64}, {"gpus": 2, "length": 63}):
        with pytest.raises(megacompile.MegacompileError, match="sequences cannot be divided"):
            megacompile.schedule(model, batch=1, sequence_ranks=2, hardware="h200", device="cuda", **how)
