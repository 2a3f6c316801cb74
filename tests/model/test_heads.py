"""Heads other than a language model's: labels for rows, and losses that are means over the elements of targets."""
from __future__ import annotations

import copy
from typing import Any

import engine
import pytest
import tiny_models
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megacompile
from megacompile.errors import MegacompileError, UnsupportedError

ROWS, LENGTH, CLASSES = 5, 13, 3


class Pooled(nn.Module):
    """A decoder whose last state of each row is scored; `loss(scores, labels)` as given."""

    def __init__(self, loss: Any, classes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.score = nn.Embedding(64, 16), nn.Linear(16, classes)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        self.compare = loss

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.tokens(input_ids).cumsum(1)
        for block in self.blocks:
            x = x + block(x)
        scores = self.score(x[:, -1])
        return (None if labels is None else self.compare(scores, labels)), scores


def squared(scores: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(scores.squeeze(), labels.squeeze())


def halved(scores: Tensor, labels: Tensor) -> Tensor:
    return 0.5 * F.l1_loss(scores, labels).float()


CLASS = torch.tensor([0, 2, -100, 1, 2])
LOSSES: dict[str, tuple[Any, Tensor]] = {
    "cross entropy": (F.cross_entropy, CLASS),
    "squares": (squared, torch.randn(ROWS)),
    "absolute values": (halved, torch.randn(ROWS, CLASSES)),
    "binary cross entropy": (F.binary_cross_entropy_with_logits, torch.randint(0, 2, (ROWS, CLASSES)).float()),
}


def given(labels: Tensor) -> dict[str, Tensor]:
    return {"input_ids": tiny_models.batch(2, rows=ROWS, length=LENGTH)["input_ids"], "labels": labels}


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", LOSSES)
def test_micro_batches_of_rows_have_native_pytorchs_loss_and_gradients(what: str) -> None:
    loss, labels = LOSSES[what]
    native = Pooled(loss, 1 if what == "squares" else CLASSES)
    model = megacompile.stream(copy.deepcopy(native), device="cpu", micro_batch_size=2, example=given(labels))
    (ours, _), (theirs, scores) = model(**given(labels)), native(**given(labels))
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-6, atol=0)
    ours.backward()
    theirs.backward()
    tiny_models.assert_same_gradients(model, native)
    with torch.no_grad():
        torch.testing.assert_close(model(given(labels)["input_ids"])[1], scores)
    assert model.megacompile.compiled(given(labels)).plan.micro_batches == (2, 2, 1)
    for wrong in (labels[:3], labels[..., None, None], labels.tolist()):
        with pytest.raises(UnsupportedError, match=r"batch size|must be a tensor"):
            model(given(labels)["input_ids"], wrong)
    model.megacompile.close()


def test_a_loss_that_is_not_a_sum_over_rows_is_not_split() -> None:
    native = Pooled(lambda scores, labels: F.cross_entropy(scores, labels).square(), CLASSES)
    model = megacompile.stream(copy.deepcopy(native), device="cpu", example=given(CLASS))
    torch.testing.assert_close(model(**given(CLASS))[0].detach(), native(**given(CLASS))[0].detach())
    assert model.megacompile.compiled(given(CLASS)).plan.micro_batches == (ROWS,)
    model.megacompile.close()
    model = megacompile.stream(model, device="cpu", example=given(CLASS), micro_batch_size=2)
    with pytest.raises(UnsupportedError, match="cannot be split into micro-batches"):
        model(**given(CLASS))
    model.megacompile.close()


def test_a_classifier_of_transformers_is_exact() -> None:
    from transformers import AutoModelForSequenceClassification, Qwen2Config

    config = Qwen2Config(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, num_labels=CLASSES)
    torch.manual_seed(0)
    native = AutoModelForSequenceClassification.from_config(config).train()
    model = megacompile.stream(copy.deepcopy(native), device="cpu", micro_batch_size=2)
    batch = {name: tensor.clamp(min=1) for name, tensor in given(CLASS).items()}
    ours, theirs = model(**batch), native(**batch)
    torch.testing.assert_close(ours.loss.detach(), theirs.loss.detach(), rtol=1e-6, atol=0)
    ours.loss.backward()
    theirs.loss.backward()
    tiny_models.assert_same_gradients(model, native)
    batch["labels"][1] = CLASSES
    with pytest.raises(MegacompileError, match=f"labels has the class {CLASSES}, .* only the classes 0 to {CLASSES - 1}: give"):
        model(**batch)
    model.megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_heads.py::test_a_classifier_of_transformers_is_exact")
@pytest.mark.parametrize("classes", [1, 12])
def test_a_classifier_scores_sequences_of_uneven_length_as_without_streaming(classes: int) -> None:
    """It takes the last token that is not padding, which it finds by its id: a batch must not get wider. A batch may be shorter
    than there are classes."""
    from transformers import AutoModelForSequenceClassification, Qwen2Config

    config = Qwen2Config(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, num_labels=classes,
                         initializer_range=0.5)
    torch.manual_seed(0)
    native = AutoModelForSequenceClassification.from_config(config).train()
    model = megacompile.stream(copy.deepcopy(native), device="cpu")
    for lengths in ((5, 9, 23, 11), (5, 2), (7,)):
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        ids = torch.randint(1, 64, mask.shape) * mask
        for given in (dict(input_ids=ids), dict(input_ids=ids, attention_mask=mask.long())):
            expected = native(**given).logits
            torch.testing.assert_close(model(**given).logits, expected)  # differentiable
            with torch.no_grad():
                torch.testing.assert_close(model(**given).logits, expected)
        with pytest.raises(UnsupportedError, match="0 for a batch with labels or a model of sequences"):
            model(input_ids=ids, logits_to_keep=1)
    assert "values for " in engine.captures(model).repacking.obstacle
    model.megacompile.close()
