"""Masks of token pairs, chosen by the caller: exact or refused, for models of transformers and custom models."""
from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import engine
import pytest
import tiny_models
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megacompile
from megacompile.errors import CaptureError, UnsupportedError
from megacompile.frontend.batches import pair_masks
from megacompile.frontend.ops.attention import attention, transformers_attention
from megacompile.inputs.padding_arguments import further_arguments, hidden_as_bool, read_attention_mask
from megacompile.ir.plan import PLAIN
from megacompile.planning import memory
from megacompile.trainer import join

ROWS, LENGTH = 5, 13
HIDDEN, LEAST = float("-inf"), torch.finfo(torch.float32).min


def seen(rows: int = ROWS, length: int = LENGTH, heads: int = 1) -> Tensor:
    """Any keys, later ones too, and each query itself."""
    generator = torch.Generator().manual_seed(rows * length)
    some = torch.rand(rows, heads, length, length, generator=generator) > 0.5
    return some | torch.eye(length, dtype=torch.bool)


def blind(rows: int = ROWS, length: int = LENGTH) -> Tensor:
    """Two queries see nothing."""
    mask = seen(rows, length)
    mask[0, :, 2] = mask[-1, :, -1] = False
    return mask


def prefix(*lengths: int) -> Tensor:
    """So many tokens of each row see each other both ways; what follows is causal."""
    prompts = torch.arange(LENGTH) < torch.tensor(lengths)[:, None, None, None]
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() | prompts


def added(mask: Tensor, hidden: float) -> Tensor:
    return torch.where(mask, 0.0, hidden)


def batch(mask: Tensor, rows: int = ROWS, length: int = LENGTH) -> dict[str, Tensor]:
    return {**tiny_models.batch(7, rows=rows, length=length), "attention_mask": mask}


def assert_native(model: Any, native: Any, given: dict[str, Tensor]) -> Tensor:
    """The loss, which is native PyTorch's, as every gradient is."""
    model.zero_grad(), native.zero_grad()
    loss, expected = model(**given).loss, native(**given, use_cache=False).loss
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-6, atol=0)
    loss.backward()
    expected.backward()
    tiny_models.assert_same_gradients(model, native)
    return loss.detach()


def said(model: Any) -> str:
    """What the last batch's capture key says of its mask."""
    (further,) = model.megacompile.compiled().spec.capture.further
    return further.partition(": ")[2]  # type: ignore[no-any-return]


# ------------------------------------------------------------------ models of transformers
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("sdpa", {}),
    "qwen3": ("sdpa", {"head_dim": 8}),
    "gemma3_text": ("sdpa", {"head_dim": 8, "sliding_window": 3, "query_pre_attn_scalar": 8,
                             "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt_oss": ("eager", {"head_dim": 8, "sliding_window": 3, "num_local_experts": 2, "num_experts_per_tok": 1,
                          "num_hidden_layers": 1, "layer_types": ["sliding_attention"]}),
}


def family(name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    attention, changes = FAMILIES[name]
    config = AutoConfig.for_model(name, **{
        "vocab_size": tiny_models.VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.nightly(held_by="tests/model/test_pairs.py::test_a_mask_goes_through_gradients_logits_and_whole_steps")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in ("llama", "qwen3")))
                                  for name in FAMILIES])
def test_every_layer_reads_the_mask_as_it_is(name: str) -> None:
    """Layers with windows too, in whose place it stands. Floats that eager attention adds are its own business."""
    native = family(name)
    masks = [seen(), blind(), prefix(3, 0, 13, 8, 1), seen(1)]
    if name == "gpt_oss":
        masks = [added(mask, HIDDEN) for mask in masks]
    model: Any = megacompile.stream(copy.deepcopy(native), device="cpu", micro_batch_size=2,
                                    example=batch(masks[0][:3, :, :6, :6], 3, 6))
    losses = [assert_native(model, native, batch(mask)) for mask in masks]
    assert model.megacompile.plan.micro_batches == (2, 2, 1)
    assert engine.captured(model).fused_attention is (name != "gpt_oss")
    with torch.no_grad():
        losses.append(native(**tiny_models.batch(7, rows=ROWS, length=LENGTH)).loss)
    assert len({round(float(loss), 4) for loss in losses}) == len(losses), "every mask changes something"
    model.megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_pairs.py::test_a_mask_goes_through_gradients_logits_and_whole_steps")
def test_a_mask_of_each_head_beside_positions_trains_as_it_does_natively(model: Any, native: Any) -> None:
    """Positions turn keys and queries, and hide nothing."""
    given = {**batch(added(seen(heads=2), HIDDEN)), "position_ids": torch.arange(LENGTH).flip(0).expand(ROWS, -1)}
    assert_native(model, native, given)
    assert model.megacompile.compiled().spec.capture.further == ("attention_mask: bool [B, 2, T, T]", "position_ids")


@pytest.mark.nightly(held_by=(
    "tests/model/test_pairs.py::test_a_mask_goes_through_gradients_logits_and_whole_steps",
    "tests/model/test_pairs.py::test_only_floats_that_do_what_a_bool_mask_does_become_one"))
def test_what_is_added_to_scores_trains_as_it_does_natively(model: Any, native: Any) -> None:
    """Least numbers in all of a query's row make the mean of all values, with gradients of its scores."""
    generator = torch.Generator().manual_seed(0)
    for mask in (added(blind(), LEAST), torch.randn(1, 1, LENGTH, LENGTH, generator=generator)):
        assert_native(model, native, batch(mask))
        assert said(model) == "float32 [B, 1, T, T]"


def test_a_mask_goes_through_gradients_logits_and_whole_steps(model: Any, native: Any) -> None:
    """A prefix, read as bool whatever hides the rest."""
    given = batch(added(prefix(3, 0, 13, 8, 1), HIDDEN))
    assert assert_native(model, native, batch(added(prefix(3, 0, 13, 8, 1), LEAST))) == assert_native(model, native, given)
    compiled = model.megacompile.compiled()
    captured = engine.captures(model).serve(compiled.spec.capture).captured
    assert said(model) == "bool [B, 1, T, T]" and captured.fused_attention and not captured.causal
    assert memory._given(captured, compiled.plan) == 2 * ROWS * LENGTH**2, "a plan counts the batch's mask"
    without = {key: tensor for key, tensor in given.items() if key != "labels"}
    with torch.no_grad():
        logits = native(**without, use_cache=False).logits
        torch.testing.assert_close(model(**without).logits, logits, rtol=1e-4, atol=1e-5)
    model.zero_grad(), native.zero_grad()
    model.megacompile.replan(waves=2)
    ours, theirs = megacompile.AdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(native.parameters(), lr=1e-2)
    for _ in range(2):
        loss, expected = model.megacompile.train_step(given, ours), native(**given, use_cache=False).loss
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
        expected.backward()
        theirs.step()
        theirs.zero_grad()
    assert model.megacompile.plan.waves == 2
    tiny_models.assert_same_weights(model, native)
    model.megacompile.replan(waves=None)


def test_only_floats_that_do_what_a_bool_mask_does_become_one(model: Any) -> None:
    """Eager attention makes NaN of a query whose scores are all -inf, where a bool mask makes zeros."""
    eager = engine.captured(model)
    sdpa = copy.copy(eager)
    object.__setattr__(sdpa, "masks_added", False)

    def becomes(captured: Any, mask: Tensor, read: bool = True) -> bool:
        found = hidden_as_bool({"attention_mask": mask}, captured, lambda _: read)["attention_mask"]
        assert torch.equal(found, mask == 0) if found.dtype == torch.bool else found is mask
        return found.dtype == torch.bool

    for mask, by_eager, by_sdpa in (
            (added(seen(), HIDDEN), True, True), (added(blind(), HIDDEN), False, True), (added(blind(), LEAST), False, False),
            (added(seen(), -1e9), False, False), (added(seen(), torch.nan), False, False),
            (torch.zeros(1, 1, 2, 2), True, True)):
        assert becomes(eager, mask) is by_eager and becomes(sdpa, mask) is by_sdpa
    assert not becomes(sdpa, added(seen(), HIDDEN), read=False), "where our attention does not read it"
    with pytest.raises(UnsupportedError, match=r"which are added to scores and hide nothing: pass attention_mask\.bool\(\)"):
        read_attention_mask("Model", sdpa, seen().float(), torch.Size((ROWS, LENGTH)))


def test_an_attention_mask_of_three_dimensions_is_a_mask_of_pairs_for_a_model_of_ones_own(model: Any) -> None:
    given, inputs = {"attention_mask": seen()[:, 0]}, tiny_models.batch(7, rows=ROWS, length=LENGTH)
    own = copy.copy(engine.captured(model))
    for name in ("masks_hide", "masks_added"):
        object.__setattr__(own, name, False)
    assert torch.equal(further_arguments("Own", own, given, inputs, lambda _: PLAIN)["attention_mask"], seen()[:, 0])
    with pytest.raises(UnsupportedError, match=r"\[5, 13, 13\] is not supported: .*, or a mask of pairs of tokens"):
        model(**inputs, **given)


def test_a_mask_that_the_model_does_not_take_is_refused(model: Any) -> None:
    with pytest.raises(CaptureError, match=r"cannot be captured with attention_mask: float32 \[B, 3, T, T\]: leave the mask"):
        model(**batch(torch.randn(ROWS, 3, LENGTH, LENGTH)))
    with pytest.raises(UnsupportedError, match="another mask than the batch's attention_mask"):
        transformers_attention(nn.Module(), *[torch.randn(1, 1, 2, 8)] * 3, None, form="pairs")


def test_eager_attention_is_given_no_bool_mask_by_an_example() -> None:
    example = {**tiny_models.batch(0, 2, 6), "attention_mask": seen(2, 6)}
    with pytest.raises(UnsupportedError, match="attention_mask is bool, and eager attention adds it to scores as 0 and 1"):
        megacompile.frontend.capture(tiny_models.build(), example=example)


# ------------------------------------------------------------------ models of one's own
class Layer(nn.Module):
    def __init__(self, inverted: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.inverted = nn.Linear(16, 48), nn.Linear(16, 16), inverted

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, 4, 4).permute(2, 0, 3, 1, 4)
        mask = mask[:, None] if mask is not None and mask.dim() == 3 else mask
        if self.inverted and mask is not None:
            found = (q @ k.transpose(2, 3)).masked_fill(mask, -1e4).softmax(-1) @ v
        else:
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return x + torch.tanh(self.out(found.transpose(1, 2).reshape(rows, length, width)))


class Masked(nn.Module):
    """Takes its mask first."""

    def __init__(self, inverted: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.layers = nn.ModuleList(Layer(inverted) for _ in range(2))

    def forward(self, mask: Tensor | None = None, input_ids: Any = None, labels: Any = None) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def own_batch(mask: Tensor) -> dict[str, Tensor]:
    return {"mask": mask, **tiny_models.batch(3, mask.shape[0], mask.shape[-1])}


@pytest.fixture
def own() -> Iterator[Callable[..., tuple[Any, Any]]]:
    streamed: list[Any] = []

    def make(mask: Tensor | None, inverted: bool = False) -> tuple[Any, Any]:
        torch.manual_seed(0)
        native = Masked(inverted)
        example = tiny_models.batch(0, 3, 6) if mask is None else own_batch(mask)
        streamed.append(megacompile.stream(copy.deepcopy(native), device="cpu", micro_batch_size=2, example=example))
        return streamed[-1], native

    yield make
    for model in streamed:
        model.megacompile.close()


def assert_trains(model: Any, native: Any, mask: Tensor) -> None:
    model.zero_grad(), native.zero_grad()
    loss, expected = model(**own_batch(mask)), native(**own_batch(mask))
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-6, atol=0)
    loss.backward()
    expected.backward()
    tiny_models.assert_same_gradients(model, native)


@pytest.mark.nightly(held_by="tests/model/test_pairs.py::test_a_mask_goes_through_gradients_logits_and_whole_steps")
@pytest.mark.parametrize(("example", "inverted", "ours"), [
    (seen(2, 6), False, True), (seen(2, 6)[:, 0], False, True), (~seen(2, 6), True, False),
    (torch.zeros(2, 6, 6), False, False)], ids=["seen", "three dimensions", "hidden", "floats"])
def test_a_mask_in_the_example_is_one_of_every_batch(example: Tensor, inverted: bool, ours: bool, own: Any) -> None:
    """Masks may have any size. Our attention computes those that say what is seen."""
    model, native = own(example, inverted)
    captured = engine.captured(model)
    assert captured.fused_attention is ours and not captured.causal
    kind = {"dtype": example.dtype}
    for rows, length in ((5, 13), (1, 4), (3, 1)):
        mask = seen(rows, length) != inverted if example.dtype == torch.bool else torch.randn(rows, 1, length, length)
        assert_trains(model, native, (mask if example.dim() == 4 else mask[:, 0]).to(**kind))
    if ours:
        assert_trains(model, native, blind() if example.dim() == 4 else blind()[:, 0])


@pytest.mark.nightly(held_by="tests/model/test_pairs.py::test_a_mask_goes_through_gradients_logits_and_whole_steps")
def test_a_mask_that_some_batches_have_has_a_capture_of_its_own(own: Any) -> None:
    model, native = own(None)
    captures = engine.captures(model)
    assert_trains(model, native, seen(heads=4))
    found = model.megacompile.compiled().spec
    assert found.capture.further == ("mask: bool [B, 4, T, T]",) and captures.serve(found.capture).captured.fused_attention
    plain = tiny_models.batch(3, ROWS, LENGTH)
    torch.testing.assert_close(model(**plain).detach(), native(**plain).detach(), rtol=1e-6, atol=0)
    assert model.megacompile.compiled().spec.capture.further == ()


def test_a_mask_of_another_kind_than_the_examples_is_refused(own: Any) -> None:
    model, _ = own(seen(2, 6))
    kind = r"mask must be torch\.bool of shape \[5, 1, 13, 13\], as in the example that the model was streamed with, not "
    one, short = (re.escape(f"not torch.bool of shape {sizes}") for sizes in ([1, 1, 13, 13], [5, 1, 12, 12]))
    for mask, message in ((seen(1), one), (seen(length=12), short), (seen().float(), kind + r"torch\.float32"),
                          (seen(heads=4), kind), (None, "mask must be given"), ([1], kind + "a list")):
        with pytest.raises(UnsupportedError, match=message):
            model(**{**own_batch(seen()), "mask": mask})


# ------------------------------------------------------------------ parts
def test_a_mask_of_each_head_is_explicit_scores() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(ROWS, heads, LENGTH, 4, generator=generator, requires_grad=True) for heads in (4, 2, 2))
    mask = seen(heads=4) & blind()
    found, _ = attention(query, key, value, 0.5, 0, 2.0, "math", mask)
    keys, values = (x.repeat_interleave(2, 1) for x in (key, value))
    scores = 2 * torch.tanh(query @ keys.transpose(2, 3) * 0.5 / 2)
    expected = scores.masked_fill(~mask, -1e30).softmax(-1).masked_fill(~mask, 0) @ values
    torch.testing.assert_close(found, expected)
    sent = torch.randn(expected.shape, generator=generator)
    for ours, theirs in zip(*(torch.autograd.grad(out, (query, key, value), sent) for out in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_form_says_a_mask_so_that_it_can_be_made_again() -> None:
    for mask in (seen(), seen(heads=4), seen()[:, 0], torch.zeros(ROWS, 1, LENGTH, LENGTH, dtype=torch.bfloat16)):
        further = pair_masks.described("mask", mask)
        made = pair_masks.example_of(further, torch.Size((ROWS, LENGTH)))
        assert (made.shape, made.dtype, pair_masks.argument(further)) == (mask.shape, mask.dtype, "mask")
    tokens = torch.ones(ROWS, LENGTH, dtype=torch.long)
    assert pair_masks.described("position_ids", tokens) == "position_ids" and not pair_masks.masks_in(["position_ids"])


def test_images_as_long_as_a_sequence_and_embeddings_are_no_masks() -> None:
    tokens = torch.ones(2, 6, dtype=torch.long)
    given = {"pixel_values": torch.zeros(2, 3, 6, 6), "mask": seen(2, 6), "input_ids": tokens, "codes": tokens,
             "inputs_embeds": torch.zeros(2, 6, 16), "short": torch.zeros(2, 1, 5, 5), "apart": torch.zeros(3, 1, 6, 6)}
    assert pair_masks.pairs_of(given) == {"mask"} and pair_masks.tokens_of({"mask": seen(2, 6), "input_ids": tokens}) == (2, 6)


def test_masks_of_one_length_are_joined_and_others_are_not() -> None:
    def step(rows: int, length: int, mask: Tensor) -> dict[str, Tensor]:
        return {"attention_mask": mask, "input_ids": torch.ones(rows, length, dtype=torch.long)}

    for both in ((seen(2, 4), seen(1, 4)), (torch.zeros(2, 1, 4, 4), torch.zeros(1, 1, 4, 4))):
        joined = join([step(2, 4, both[0]), step(1, 4, both[1])], labels=(), causal=True)
        assert joined is not None and torch.equal(joined["attention_mask"], torch.cat(both))
    for other in (step(1, 5, seen(1, 5)), step(3, 4, seen(1, 4)), step(1, 4, seen(1, 4).float()), step(1, 4, seen(1, 4, 2)),
                  step(1, 4, torch.ones(1, 4, dtype=torch.long))):
        assert join([step(2, 4, seen(2, 4)), other], labels=(), causal=True) is None
