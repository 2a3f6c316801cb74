"""Values that a model computes from all rows of a batch are the whole batch's values in each micro-batch."""
from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import trained
import transformers
from torch import Tensor, nn

import megacompile.trainer
from megacompile.errors import UnsupportedError

ROWS, LENGTH, ORIGINAL = 4, 24, 16
FACTORS = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0}
SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    pad_token_id=0, max_position_embeddings=64, initializer_range=0.5)
#: Two sequences in each row; the largest position of the first two rows is below `ORIGINAL`, that of the others is not.
UNLIKE = torch.stack([torch.cat([torch.arange(n), torch.arange(LENGTH - n)]) for n in (12, 10, 23, 20)])
#: The same, with another largest position in each row, all on the same side.
ALIKE = torch.stack([torch.cat([torch.arange(n), torch.arange(LENGTH - n)]) for n in (18, 20, 23, 21)])


def phi3() -> Any:
    from transformers import AutoModelForCausalLM, Phi3Config

    return AutoModelForCausalLM.from_config(Phi3Config(
        **SIZES, original_max_position_embeddings=ORIGINAL, rope_parameters=FACTORS))


def llama() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    factors = {**FACTORS, "original_max_position_embeddings": ORIGINAL}
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, rope_parameters=factors))


class Decoder(nn.Module):
    """A model of one's own whose embeddings are scaled by what `number` makes of the tokens."""

    def __init__(self, number: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.number = number
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids) * self.number(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.head(x)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def packed(positions: Tensor) -> dict[str, Any]:
    return {**tiny_models.batch(rows=ROWS, length=LENGTH), "position_ids": positions, "use_cache": False}


def same_training(built: Any, given: dict[str, Any]) -> None:
    """Loss and gradients of micro-batches of 2 are those of the whole batch without streaming."""
    native = copy.deepcopy(built)
    model = megacompile.stream(built, device="cpu", micro_batch_size=2)
    try:
        loss, expected = model(**given)[0], native(**given)[0]
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-6, atol=0)
        loss.backward()
        expected.backward()
        tiny_models.assert_same_gradients(model, native)
        assert len(model.megacompile.compiled(given).plan.micro_batches) == 2
    finally:
        model.megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_batch_totals.py::test_any_number_made_of_all_rows_is_that_of_the_whole_batch")
@pytest.mark.parametrize("build", [phi3, llama])
def test_frequencies_are_those_of_the_largest_position_of_the_whole_batch(build: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    given, built = packed(UNLIKE), build().train()
    native = copy.deepcopy(built)
    with torch.no_grad():
        whole = native(**given)[0]
        halves = [native(**{name: rows[half] for name, rows in given.items() if name != "use_cache"}, use_cache=False)[0]
                  for half in (slice(0, 2), slice(2, 4))]
    assert abs(float(whole - torch.stack(halves).mean())) > 1e-3, "parts of this batch are not like any other"
    same_training(built, given)


@pytest.mark.nightly(held_by="tests/model/test_batch_totals.py::test_any_number_made_of_all_rows_is_that_of_the_whole_batch")
def test_batches_of_which_all_rows_are_on_one_side_train_as_before() -> None:
    torch.manual_seed(0)
    same_training(phi3(), packed(ALIKE))


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", [
    lambda ids: ids.max() / 64, lambda ids: ids.max(dim=0).values[:, None] / 64, lambda ids: ids[:1].unsqueeze(-1) / 64,
    lambda ids: (ids > 62).any().float() + 1, lambda ids: ids.float().mean((0, 1)) / 64, lambda ids: ids[-1].sum() / 640,
    lambda ids: (ids - ids.float().mean()).square().mean().sqrt() / 64,
], ids=["largest", "largest of each place", "first row", "any", "mean", "last row", "deviation"])
def test_any_number_made_of_all_rows_is_that_of_the_whole_batch(number: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    same_training(Decoder(number), tiny_models.batch(rows=ROWS, length=LENGTH))


def test_a_batch_is_not_split_where_the_host_cannot_make_the_number() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("special", torch.tensor(5))

        def forward(self, ids: Tensor) -> Tensor:
            return (ids == self.special).any().float() + 1

    model: Any = megacompile.stream(Decoder(Looking()), device="cpu", micro_batch_size=2)
    try:
        with pytest.raises(UnsupportedError, match=r"(?s)several sequences of a batch at once.*what it makes of its arguments"):
            model(**tiny_models.batch(rows=ROWS, length=LENGTH))
    finally:
        model.megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_batch_totals.py::test_any_number_made_of_all_rows_is_that_of_the_whole_batch")
@pytest.mark.parametrize("positions", [False, True], ids=["of two lengths", "with positions"])
def test_trainer_takes_the_frequencies_of_each_accumulated_batch(positions: bool, tmp_path: Path) -> None:
    """The short batch of a step keeps its own frequencies beside a long one."""
    rows: list[dict[str, Any]] = [{"input_ids": torch.arange(length) % 64, **({"position_ids": torch.cat(
        [torch.arange(n), torch.arange(length - n)])} if positions else {})}
        for length, n in ([(LENGTH, 9 if k % 2 else 23) for k in range(8)] if positions else [(12, 0), (LENGTH, 0)] * 4)]

    def collated(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        (row,) = rows
        return {key: value[None] for key, value in {**row, "labels": row["input_ids"]}.items()}

    torch.manual_seed(0)
    native = phi3()
    model = megacompile.stream(copy.deepcopy(native), device="cpu")
    changes = dict(per_device_train_batch_size=1, max_steps=3, learning_rate=0.0)
    given = dict(train_dataset=rows, data_collator=collated)
    curves = [trained.curve(trained.run(trainer, tmp_path, each, given=given, **changes), "loss")
              for trainer, each in ((transformers.Trainer, native), (megacompile.trainer.Trainer, model))]
    model.megacompile.close()
    torch.testing.assert_close(*curves, rtol=0, atol=1e-4)
