"""Models without a head (`AutoModel`): losses of their last hidden states, against native PyTorch."""
from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megacompile
from megacompile.errors import UnsupportedError


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Any, Any]]:
    native = tiny_models.build().model
    model = megacompile.stream(copy.deepcopy(native), device="cpu", micro_batch_size=2, checkpoint_interval=2)
    yield model, native
    model.megacompile.close()


def ids(seed: int = 0) -> Tensor:
    return tiny_models.batch(seed)["input_ids"]


def contrast(model: nn.Module, seed: int) -> Tensor:
    """A loss of sentence embeddings: each is a mean over a row's tokens, and is compared with those of all other rows."""
    embedded = F.normalize(model(input_ids=ids(seed)).last_hidden_state.mean(1), dim=-1)
    return (embedded @ embedded.T).logsumexp(1).sum()


def test_embeddings_train_as_they_do_natively(shared: tuple[Any, Any]) -> None:
    """Two steps in micro-batches, though the loss compares rows of all of them."""
    model, native = shared
    ours, theirs = megacompile.AdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(native.parameters(), lr=1e-2)
    for seed in range(2):
        losses = [contrast(each, seed) for each in (model, native)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
        for loss in losses:
            loss.backward()
        tiny_models.assert_same_gradients(model, native)
        ours.step(), theirs.step()
        ours.zero_grad(), theirs.zero_grad()
    with torch.no_grad():
        evaluated = [each(input_ids=ids(), output_hidden_states=True) for each in (model, native)]
    assert torch.equal(evaluated[0].last_hidden_state, evaluated[0].hidden_states[-1])
    for ours, theirs in zip(*(each.hidden_states for each in evaluated), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_what_needs_a_loss_is_refused_of_a_model_without_one(shared: tuple[Any, Any]) -> None:
    model, native = shared
    optimizer = megacompile.AdamW(model.parameters())
    with pytest.raises(UnsupportedError, match="train_step needs a loss, and the model has none"):
        model.megacompile.train_step({"input_ids": ids()}, optimizer)
    with pytest.raises(UnsupportedError, match="labels is not supported"):
        model(input_ids=ids(), labels=ids())
    with pytest.raises(UnsupportedError, match="has no loss, which a whole step needs"):
        megacompile.schedule(native, batch=2, length=8, device="cpu", whole_step=True)


def test_a_model_without_a_head_is_planned_by_its_output(shared: tuple[Any, Any]) -> None:
    schedule = megacompile.schedule(shared[1], batch=4, length=8, device="cpu")
    assert schedule.plan.output == "logits" and "backward" in schedule.program().sections
    assert "loss: none" in megacompile.explain_capture(shared[1])
