"""Hidden states of all layers without gradients, and the last one with a gradient, against native PyTorch."""
from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import engine
import pytest
import tiny_models
import torch
from torch import Tensor

import megacompile
from megacompile.errors import ProgramError, UnsupportedError
from megacompile.frontend.templates import hidden_states
from megacompile.ir.text import parse
from megacompile.verify.verifier import verify


@pytest.fixture(scope="module")
def tied() -> Iterator[tuple[Any, Any]]:
    """A model whose head has no weights of its own."""
    native = tiny_models.build(tie_word_embeddings=True)
    model = megacompile.stream(copy.deepcopy(native), device="cpu", micro_batch_size=2)
    yield model, native
    model.megacompile.close()


def ids(seed: int = 0) -> Tensor:
    return tiny_models.batch(seed)["input_ids"]


def assert_natives(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs) == 4
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape == (3, 9, 16) and not a.requires_grad
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_hidden_states_are_the_models_own(model: Any, native: Any) -> None:
    """Before the first layer, after each, and after the last norm; in micro-batches."""
    batch = {"input_ids": ids()}
    with torch.no_grad():
        ours, theirs = (each(**batch, output_hidden_states=True) for each in (model, native))
        assert_natives(ours.hidden_states, theirs.hidden_states)
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model.megacompile.last_hidden_state(batch), theirs.hidden_states[-1], rtol=1e-5, atol=1e-6)


def test_the_last_hidden_state_has_a_gradient(tied: tuple[Any, Any]) -> None:
    model, native = tied
    for hidden in (model.megacompile.last_hidden_state({"input_ids": ids()}), native.model(ids()).last_hidden_state):
        hidden.pow(3).mean(1).std().backward()
    tiny_models.assert_same_gradients(model, native)


def test_a_program_that_leaves_out_a_hidden_state_is_refused(model: Any) -> None:
    with torch.no_grad():
        model(input_ids=ids(), output_hidden_states=True)
    text = model.megacompile.program().text()
    handed = '"forward", values=(s_0, s_1, h1_0, h1_1, h2_0, h2_1)'
    assert handed in text
    verify(parse(text))
    for instead in ("s_0, s_1, h1_0, h2_0, h2_1", "s_0, s_1, h1_1, h1_0, h2_0, h2_1"):
        with pytest.raises(ProgramError, match="hands over hidden states, and not those of every call"):
            verify(parse(text.replace(handed, f'"forward", values=({instead})')))


def test_what_cannot_be_given_is_refused(model: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"without gradients: .*last_hidden_state\(batch\)"):
        model(input_ids=ids(), output_hidden_states=True)
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"without a loss .*leave labels out"):
        model(**tiny_models.batch(), output_hidden_states=True)
    with pytest.raises(UnsupportedError, match=r"lm_head\.weight is trained and would get no gradient"):
        model.megacompile.last_hidden_state({"input_ids": ids()})
    with pytest.raises(UnsupportedError, match="last_hidden_state computes no loss: leave labels out"):
        model.megacompile.last_hidden_state(tiny_models.batch())


def test_logits_that_are_made_otherwise_have_no_last_hidden_state(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_states, "_PRODUCTS", ())
    with pytest.raises(UnsupportedError, match="does not make its logits by one product with its"):
        engine.captured(model).require_heads().hidden.last()


def test_a_model_that_means_other_hidden_states_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of its hidden states is the last layer's, not the last norm's."""
    found = engine.captured(model).require_heads().hidden
    found.beside_logits()
    monkeypatch.setattr(found.fake_model.config, "tie_last_hidden_states", False, raising=False)
    with pytest.raises(UnsupportedError, match="returns hidden states that are not the outputs of its layers"):
        found.beside_logits()
