"""Rows of embeddings that a batch reads and the model does not have, such as positions beyond the learned ones."""
from __future__ import annotations

import copy
from typing import Any

import engine
import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, GPT2Config, OPTConfig, PreTrainedConfig

import megacompile
from megacompile.errors import MegacompileError

POSITIONS, VOCABULARY = 20, 64
CONFIGS: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=VOCABULARY, n_positions=POSITIONS, bos_token_id=0,
                       eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "opt": OPTConfig(num_hidden_layers=1, hidden_size=32, ffn_dim=64, num_attention_heads=2, vocab_size=VOCABULARY,
                     max_position_embeddings=POSITIONS, word_embed_proj_dim=32),
    "bert": BertConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=64, num_attention_heads=2,
                       vocab_size=VOCABULARY, max_position_embeddings=POSITIONS, is_decoder=True),
}


def built(name: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name]).eval()


def ids(length: int, rows: int = 2) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(length))


def positions(first: int, length: int = 8) -> torch.Tensor:
    return torch.arange(first, first + length).expand(2, -1)


REFUSED: dict[str, tuple[str, dict[str, torch.Tensor], str]] = {
    "more tokens than positions": (
        "gpt2", {"input_ids": ids(24)}, r"row 23 of transformer\.wpe\.weight, .* rows 0 to 19: pass shorter sequences"),
    "positions counted by the mask": (
        "opt", {"input_ids": ids(24), "attention_mask": torch.ones(2, 24, dtype=torch.int64)},
        r"row 25 of model\.decoder\.embed_positions\.weight, .* rows 0 to 21: pass shorter sequences"),
    "given positions": (
        "gpt2", {"input_ids": ids(8), "position_ids": positions(16)},
        r"row 23 of transformer\.wpe\.weight, .* pass position_ids within these"),
    "given positions below zero": (
        "gpt2", {"input_ids": ids(8), "position_ids": positions(-1)}, r"row -1 of transformer\.wpe\.weight"),
    "types of tokens": (
        "bert", {"input_ids": ids(8), "token_type_ids": torch.full((2, 8), 2)},
        r"row 2 of bert\.embeddings\.token_type_embeddings\.weight, .* rows 0 to 1: pass token_type_ids within these"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", REFUSED)
def test_a_row_that_a_table_does_not_have_is_refused_before_a_kernel_reads_it(what: str) -> None:
    name, batch, message = REFUSED[what]
    model = megacompile.stream(built(name), device="cpu", compile=False)
    for training in (True, False):
        with torch.set_grad_enabled(training), pytest.raises(MegacompileError, match=message):
            model(**batch, labels=batch["input_ids"])
    assert torch.isfinite(model(input_ids=ids(8), labels=ids(8)).loss), "and the model can still be used"


@pytest.mark.nightly(
    held_by="tests/model/test_embedding_tables.py::test_a_row_that_a_table_does_not_have_is_refused_before_a_kernel_reads_it")
def test_lengths_up_to_the_last_position_are_padded_to_none_beyond_it() -> None:
    native = built("gpt2")
    model = megacompile.stream(copy.deepcopy(native), device="cpu", compile=False)
    for length in (*range(11, POSITIONS + 1), 7):
        mask = torch.ones(2, length, dtype=torch.int64)
        mask[1, length // 2:] = 0
        with torch.no_grad():
            ours, theirs = (each(input_ids=ids(length), attention_mask=mask).logits for each in (model, native))
        torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()], rtol=1e-4, atol=1e-5)


class LearnedDistances(torch.nn.Module):
    """A model with a learned bias for each distance between two tokens, up to 8."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bias, self.head = torch.nn.Embedding(16, 8), torch.nn.Embedding(17, 1), torch.nn.Linear(8, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        bias = self.bias((place[:, None] - place).clamp(-8, 8) + 8).squeeze(-1)
        x = bias.softmax(-1) @ self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.nightly(
    held_by="tests/model/test_embedding_tables.py::test_a_row_that_a_table_does_not_have_is_refused_before_a_kernel_reads_it")
def test_values_of_pairs_of_tokens_are_not_computed_on_the_host() -> None:
    model = megacompile.stream(LearnedDistances(), device="cpu", compile=False)
    assert engine.captures(model).first.captured.tables == ()
    assert torch.isfinite(model(ids(12) % 16, ids(12) % 16))
