"""Padded rows whose padding tokens could see, and rows of several sequences: exact or refused; free for other batches."""
from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
import uneven_models
from torch import Tensor, nn

import megacompile
from megacompile.errors import PackingWarning, UnsupportedError
from megacompile.frontend.ops import segmented_attention as segmented
from megacompile.frontend.ops.attention import attention

ROWS, LENGTH = 5, 13
LEFT = (torch.arange(LENGTH) >= torch.tensor([0, 2, 12, 5, 1])[:, None]).long()
GAPS = torch.randint(0, 2, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
#: The first row holds one sequence, the others two.
PACKED = torch.stack([torch.cat([torch.arange(n), torch.arange(LENGTH - n)]) for n in (0, 4, 1, 12, 7)])
BATCHES: dict[str, dict[str, Tensor]] = {
    "two sequences in a row": {"position_ids": PACKED},
    "padding on the left": {"attention_mask": LEFT},
    "padding anywhere": {"attention_mask": GAPS},
}


def batch(**further: Tensor) -> dict[str, Tensor]:
    return {**tiny_models.batch(7, rows=ROWS, length=LENGTH), **further}


@pytest.mark.parametrize("what", BATCHES)
def test_loss_and_gradients_are_native_pytorchs(what: str, model: Any, native: Any) -> None:
    given = batch(**BATCHES[what])
    loss, expected = model(**given).loss, native(**given, use_cache=False).loss
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-6, atol=0)
    loss.backward()
    expected.backward()
    tiny_models.assert_same_gradients(model, native)
    with torch.no_grad():
        plain = native(**batch(), use_cache=False).loss
    assert abs(float(plain) - float(expected.detach())) > 1e-4, "the argument changes nothing that could be ignored"


@pytest.mark.parametrize("what", ["two sequences in a row", "padding on the left"])
def test_logits_without_labels_are_native_pytorchs(what: str, model: Any, native: Any) -> None:
    model.eval(), native.eval()
    given = batch(**BATCHES[what])
    del given["labels"]
    with torch.no_grad():
        torch.testing.assert_close(model(**given).logits, native(**given, use_cache=False).logits, rtol=1e-4, atol=1e-5)


def counts_by_mask() -> Any:
    """A decoder whose positions count the mask."""
    from transformers import OPTConfig, OPTForCausalLM

    return OPTForCausalLM(OPTConfig(
        vocab_size=tiny_models.VOCABULARY, hidden_size=16, ffn_dim=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, word_embed_proj_dim=16, dropout=0.0, attention_dropout=0.0, pad_token_id=1))


def counts_from_two() -> Any:
    """A decoder whose positions count the tokens that are not padding, from 2."""
    from transformers import RobertaConfig, RobertaForCausalLM

    return RobertaForCausalLM(RobertaConfig(
        vocab_size=tiny_models.VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        is_decoder=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=1, use_cache=False))


@pytest.mark.nightly(held_by=(
    "tests/model/test_packing.py::test_loss_and_gradients_are_native_pytorchs",
    "tests/model/test_packing.py::test_a_mask_of_ones_reaches_a_model_that_does_not_assume_it"))
@pytest.mark.parametrize("build", [counts_by_mask, counts_from_two])
def test_positions_and_masks_count_as_they_do_natively_whatever_the_model_assumes(build: Any) -> None:
    torch.manual_seed(0)
    native = build().train()
    for parameter in native.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model = megacompile.stream(copy.deepcopy(native), device="cpu")
    positions = torch.arange(LENGTH).expand(ROWS, -1)
    batches = [{"position_ids": positions}, {"position_ids": positions, "attention_mask": LEFT},
               {"position_ids": positions, "attention_mask": LEFT.flip(1)}, {"attention_mask": LEFT},
               {"attention_mask": 1 + LEFT}, {"attention_mask": (1 + LEFT).float()}, {"attention_mask": 2 * LEFT.flip(1)},
               {"attention_mask": LEFT.flip(1).bool()}]
    seen = set()
    for further in batches:
        given = batch(**further)
        loss, expected = model(**given).loss, native(**given).loss
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=0)
        loss.backward()
        expected.backward()
        tiny_models.assert_same_gradients(model, native, least=1e-6)  # keys have biases, whose gradients are 0
        model.zero_grad(), native.zero_grad()
        seen.add(round(float(expected.detach()), 4))
    assert len(seen) > 2, "the arguments change nothing that could be ignored"
    model.megacompile.close()


def test_a_mask_whose_values_the_model_does_not_count_is_one_of_zeros_and_ones(model: Any) -> None:
    handle = model.megacompile
    assert handle.compiled(batch(attention_mask=1 + LEFT)).spec.capture.further == ()
    assert handle.compiled(batch(attention_mask=3 * LEFT)).spec.capture.further == ("attention_mask",)
    with pytest.raises(UnsupportedError, match="other values than whole numbers: pass 1"):
        model(**batch(attention_mask=LEFT / 2))


class Scales(nn.Module):
    """A model of one's own whose mask has no meaning of transformers': it doubles what it does not hide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(tiny_models.VOCABULARY, 16), nn.Linear(16, tiny_models.VOCABULARY)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        if attention_mask is not None:
            x = x * (1 + attention_mask[..., None])
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_a_mask_of_ones_reaches_a_model_that_does_not_assume_it() -> None:
    native = Scales()
    model = megacompile.stream(copy.deepcopy(native), device="cpu")
    given = batch(attention_mask=torch.ones(ROWS, LENGTH, dtype=torch.long))
    torch.testing.assert_close(model(**given).detach(), native(**given).detach())
    model.megacompile.close()


@pytest.mark.nightly(held_by=(
    "tests/model/test_packing.py::test_loss_and_gradients_are_native_pytorchs",
    "tests/model/test_packing.py::test_bounds_that_say_what_positions_say_are_left_out_and_others_refused"))
def test_sequences_in_one_row_that_read_each_other_are_warned_of_once(model: Any) -> None:
    """A convolution reads across them, natively too. Attention does not."""
    hybrid = uneven_models.stream(uneven_models.build())
    with warnings.catch_warnings():
        warnings.simplefilter("error", PackingWarning)
        hybrid(**batch(position_ids=torch.arange(3, 3 + LENGTH).expand(ROWS, -1)))
        model(**batch(position_ids=PACKED))
    with pytest.warns(PackingWarning, match=r"begin again .* \(model.layers.0, model.layers.2\), as they do .*: give each"):
        hybrid(**batch(position_ids=PACKED))
    with warnings.catch_warnings():
        warnings.simplefilter("error", PackingWarning)
        hybrid(**batch(position_ids=PACKED))
    hybrid.megacompile.close()


def test_padding_on_the_right_is_seen_where_its_labels_count(model: Any, native: Any) -> None:
    given = batch(attention_mask=LEFT.flip(1))
    torch.testing.assert_close(model(**given).loss.detach(), native(**given).loss.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("further", [
    {}, {"attention_mask": torch.ones(ROWS, LENGTH)}, {"position_ids": torch.arange(LENGTH)[None]},
    {"attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.long), "position_ids": torch.arange(LENGTH).expand(ROWS, -1)},
], ids=["nothing", "a mask of ones", "counted positions", "both"])
def test_a_batch_that_needs_no_mask_runs_on_the_plain_graphs(further: dict[str, Tensor], model: Any) -> None:
    spec = model.megacompile.compiled(batch(**further)).spec
    assert spec.capture.further == () and not spec.capture.evaluating


def test_a_plan_counts_what_a_mask_takes(model: Any) -> None:
    """The bytes of scores under a mask, on the CPU, are in the estimate that the plan is chosen by."""
    handle = model.megacompile
    plain, padded = handle.compiled(batch()), handle.compiled(batch(attention_mask=LEFT))
    assert padded.spec.capture.further == ("attention_mask",)
    assert padded.estimate.total > plain.estimate.total


def test_bounds_that_say_what_positions_say_are_left_out_and_others_refused(model: Any) -> None:
    positions = torch.cat([torch.arange(4), torch.arange(9)])[None]
    given = {name: tensor[:1] for name, tensor in batch().items()} | {"position_ids": positions}
    bounds = torch.tensor([0, 4, 13], dtype=torch.int32)
    with torch.no_grad():
        expected = model(**given).loss
        found = model(**given, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=9, max_length_k=9,
                      seq_idx=torch.tensor([[0] * 4 + [1] * 9])).loss
        assert torch.equal(found, expected)
        for wrong in ({"cu_seq_lens_q": torch.tensor([0, 5, 13])}, {"max_length_q": 8},
                      {"seq_idx": torch.zeros(1, 13, dtype=torch.int32)}):
            with pytest.raises(UnsupportedError, match="disagree about where sequences begin"):
                model(**given, **wrong)


@pytest.mark.parametrize(("kernel", "window", "softcap"), [
    ("packed", 0, 0.0), ("packed", 3, 0.0), ("packed", 0, 2.0), ("math_packed", 0, 0.0), ("math_packed", 3, 0.0),
    ("math_packed", 0, 2.0), ("flash_cpu_packed", 0, 0.0)])
def test_segments_are_attention_of_each_sequence_alone(kernel: str, window: int, softcap: float) -> None:
    """Against the same op on each sequence by itself; absent keys are those of no sequence."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if kernel.startswith("flash") else torch.float64
    query, key, value = (torch.randn(1, heads, 9, 4, generator=generator, dtype=dtype, requires_grad=True)
                         for heads in (4, 2, 2))
    absent = -1 if kernel == "packed" else 2  # where rows hold no padding, a sequence of its own
    segments = torch.tensor([[absent, absent, 0, 0, 0, 1, 1, 1, 1]], dtype=torch.int32)
    found, _ = attention(query, key, value, 0.5, window, softcap, kernel, segments)
    found = torch.cat([torch.zeros(1, 4, 2, 4, dtype=dtype), found[:, :, 2:]], 2)
    alone = [attention(*(x[:, :, a:b] for x in (query, key, value)), 0.5, window, softcap, "math")[0]
             for a, b in ((2, 5), (5, 9))]
    expected = torch.cat([torch.zeros(1, 4, 2, 4, dtype=dtype), *alone], 2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    sent = torch.randn(expected.shape, generator=generator, dtype=dtype)
    ours = torch.autograd.grad(found, (query, key, value), sent)
    for a, b in zip(ours, torch.autograd.grad(expected, (query, key, value), sent), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # scores are float32


def test_sequences_are_bounded_by_rows_and_by_segments() -> None:
    segments = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 2, 3]], dtype=torch.int32)
    found = segmented.Bounds.of(segments)
    assert found.starts.tolist() == found.on_host.tolist() == [0, 2, 5, 8, 9, 10] and found.longest == 3
    assert found.starts.dtype == found.on_host.dtype == torch.int32
