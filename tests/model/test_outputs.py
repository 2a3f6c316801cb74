"""Logits and values of tokens that are differentiated outside the model, against native PyTorch."""
from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import engine
import pytest
import tiny_models
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import megacompile
from megacompile.errors import LaneError, LeaseError, UnsupportedError
from megacompile.ir.program import op_of
from megacompile.ir.token_loop import token_loops
from megacompile.losses import IGNORED, log_probabilities, log_probabilities_and_entropies, next_tokens
from megacompile.predict import cost

V = tiny_models.VOCABULARY


def clipped_ratio(logits: Tensor, labels: Tensor, advantages: Tensor, before: Tensor) -> Tensor:
    """PPO's loss of each token; 0 where there is no label."""
    now = log_probabilities(logits, labels)
    ratio = (now - before).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * (labels != -100)


@pytest.fixture(scope="module")
def tied() -> Iterator[tuple[Any, Any]]:
    """A streamed model with tied embeddings, K = 1, layers that run 4 positions at a time, and a loss of its user's; and the
    same unstreamed."""
    native = tiny_models.build(tie_word_embeddings=True)
    model = megacompile.stream(tiny_models.build(tie_word_embeddings=True), device="cpu", micro_batch_size=1, token_chunk=4,
                               waves=2, loss=clipped_ratio)
    yield model, native
    model.megacompile.close()


def ids(seed: int = 0, **shape: int) -> Tensor:
    return tiny_models.batch(seed, **shape)["input_ids"]


def contrast(chosen: Tensor, rejected: Tensor) -> Tensor:
    """A loss of two batches of logits, [B, T, V], with every token counted by a weight of its own."""
    weight = torch.arange(V) / V
    margins = (chosen.log_softmax(-1) * weight).sum((1, 2)) - (rejected.softmax(-1) * weight).sum((1, 2))
    return -F.logsigmoid(margins).mean()


def statistics(logits: Tensor, targets: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Values of each token, some with a gradient, some without."""
    known = logits.log_softmax(-1)
    return {"loss": F.cross_entropy(logits, targets, ignore_index=-100, reduction="none") * weights[:, 0],
            "entropy": -(known.exp() * known).sum(-1), "right": logits.argmax(-1) == targets, "top": logits.topk(3).values}


def together(values: dict[str, Tensor]) -> Tensor:
    return (values["loss"].exp().mean() + values["entropy"].square().sum() + values["top"].sum(-1).std())


def natively(function: Any, model: Any, input_ids: Tensor, **tensors: Tensor) -> Any:
    logits = model(input_ids=input_ids).logits
    values = function(logits.flatten(0, 1), **{name: tensor.flatten(0, 1) for name, tensor in tensors.items()})
    return {name: value.unflatten(0, input_ids.shape) for name, value in values.items()}


def test_losses_of_logits_train_as_they_do_natively(model: Any, native: Any) -> None:
    """Five steps of AdamW, each of two forwards with their gradients added up, in micro-batches, K = 2."""
    ours, theirs = megacompile.AdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(native.parameters(), lr=1e-2)
    for step in range(5):
        losses = []
        for each in (model, native):
            for seed in (step, 10 + step):
                loss = contrast(*each(input_ids=ids(seed)).logits.split((2, 1))[::-1])
                loss.backward()
            losses.append(loss.detach())
            if step == 0 and each is native:
                tiny_models.assert_same_gradients(model, native)
        ours.step(), theirs.step()
        ours.zero_grad(), theirs.zero_grad()
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    tiny_models.assert_same_weights(model, native)


def test_two_forwards_of_other_shapes_share_a_backward(tied: tuple[Any, Any], model: Any, native: Any) -> None:
    """As in preference training: a policy with tied embeddings, and another streamed model that is not trained."""
    policy, unstreamed = tied
    for each, reference in ((policy, model), (unstreamed, native)):
        each.zero_grad()
        chosen, rejected = each(input_ids=ids(0)).logits, each(input_ids=ids(1, rows=3, length=6)).logits
        with torch.no_grad():
            margin = contrast(reference(input_ids=ids(0)).logits, reference(input_ids=ids(1, rows=3, length=6)).logits)
        (contrast(chosen, rejected) - margin).square().backward()
    tiny_models.assert_same_gradients(policy, unstreamed)


@pytest.mark.parametrize("chunked", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_values_of_tokens_and_their_gradients_are_natives(chunked: bool, tied: Any, model: Any, native: Any) -> None:
    """The function returns several tensors. One has no gradient, and one has a dimension more."""
    streamed, unstreamed = tied if chunked else (model, native)
    streamed.zero_grad(), unstreamed.zero_grad()
    given = dict(targets=next_tokens(ids(1)), weights=torch.rand(3, 9, 2, generator=torch.Generator().manual_seed(0)))
    values = streamed.megacompile.per_token(statistics, {"input_ids": ids(0)}, **given)
    expected = natively(statistics, unstreamed, ids(0), **given)
    assert values.keys() == expected.keys() and values["top"].shape == (3, 9, 3)
    for name, value in values.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
        assert value.requires_grad == (name != "right")
    together(values).backward()
    together(expected).backward()
    tiny_models.assert_same_gradients(streamed, unstreamed)
    with torch.no_grad():
        evaluated = streamed.megacompile.per_token(statistics, {"input_ids": ids(0)}, **given)
    assert all(torch.equal(evaluated[name], value) and not evaluated[name].requires_grad for name, value in values.items())


def test_all_logits_never_exist_in_a_head_of_a_function(model: Any) -> None:
    """Neither the graph nor the estimate of memory has the logits of 16 x 4096 tokens."""
    with torch.no_grad():
        model.megacompile.per_token(log_probabilities, {"input_ids": ids()}, targets=ids())
    template = engine.templates(model)["log_probabilities"]
    chunk = template.chunk(16, 0)
    assert chunk == 128, "2048 tokens of 16 sequences"
    for name in template.variant_names:
        variant = template.variant(name, chunk)
        assert len(token_loops(variant.graph)) == 1
        values = [n.meta["val"] for n in variant.graph.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
        assert not [v for v in values if v.dim() > 1 and v.shape[-1] == V and v.numel() > V * V]
        assert cost.peak_bytes(template, variant, 16, 4096) < 0.5 * 16 * 4096 * V * 4


def at_a_temperature(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    logp, entropy = log_probabilities_and_entropies(logits / 0.7, targets)
    return {"logp": logp, "entropy": entropy}


@pytest.mark.nightly(held_by=(
    "tests/model/test_outputs.py::test_values_of_tokens_and_their_gradients_are_natives",
    "tests/model/test_target_tokens.py::test_functions_leave_out_prompts_and_have_native_pytorchs_gradients"))
@pytest.mark.parametrize("weights", [(1.0, 0.3), (1.0, 0.0), (0.0, 1.0)])
def test_log_probabilities_and_entropies_have_the_gradients_of_pytorchs_own_formulas(
        weights: tuple[float, float], model: Any, native: Any) -> None:
    targets = next_tokens(ids()).masked_fill(torch.arange(9) % 4 == 1, IGNORED)
    found = model.megacompile.per_token(at_a_temperature, {"input_ids": ids()}, targets=targets)
    known = (native(input_ids=ids()).logits.double() / 0.7).log_softmax(-1)
    picked = known.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    expected = {name: value.masked_fill(targets == IGNORED, 0)
                for name, value in (("logp", picked), ("entropy", -(known.exp() * known).sum(-1)))}
    for values in (found, expected):
        (weights[0] * values["logp"].square().sum() + weights[1] * values["entropy"].square().sum()).backward()
    assert all(torch.equal(found[name] == 0, targets == IGNORED) for name in expected)
    torch.testing.assert_close(found, expected, check_dtype=False, rtol=1e-5, atol=1e-6)
    tiny_models.assert_same_gradients(model, native)


def test_a_range_that_a_function_reads_is_made_inside_of_the_loop(model: Any) -> None:
    model.megacompile.per_token(at_a_temperature, {"input_ids": ids()}, targets=ids())
    variant = engine.templates(model)["at_a_temperature"].variant("recompute_backward", 4)
    (loop,) = token_loops(variant.graph).values()
    outside, inside = ([n for n in graph.nodes if "arange" in str(n.target)]
                       for graph in (variant.graph.graph, loop.body.graph))
    assert not outside and len(inside) == 1


@pytest.mark.nightly(
    held_by="tests/model/test_capture_refusals.py::test_a_branch_on_the_length_becomes_a_condition_that_is_checked")
def test_a_function_that_looks_at_sizes_holds_where_it_was_traced() -> None:
    """Its condition stays with the capture, which no other test may share."""
    model = megacompile.stream(tiny_models.build(intermediate_size=40), device="cpu")

    def by_size(logits: Tensor) -> Tensor:
        return logits[:, 0] if logits.shape[0] > 8 else logits[:, 1]

    model.megacompile.per_token(by_size, {"input_ids": ids()})
    with pytest.raises(UnsupportedError, match=r"a batch of 2 x 4 breaks B\*T > 8"):
        model.megacompile.per_token(by_size, {"input_ids": ids(rows=2, length=4)})


@pytest.mark.parametrize(("of_tokens", "side"), [
    *(pytest.param(of_tokens, "left", marks=pytest.mark.nightly) for of_tokens in (False, True)), (True, "right")])
def test_outputs_of_padded_rows_are_the_models(of_tokens: bool, side: str, model: Any, native: Any) -> None:
    lengths = torch.tensor([[9], [4], [6]])
    mask = (torch.arange(9) < lengths).long()
    mask = mask.flip(1) if side == "left" else mask
    batch = {"input_ids": ids() * mask, "attention_mask": mask}
    targets = next_tokens(ids().masked_fill(mask == 0, -100))
    if of_tokens:
        ours = model.megacompile.per_token(log_probabilities, batch, targets=targets)
    else:
        logits = model(**batch).logits
        ours = log_probabilities(logits.flatten(0, 1), targets.flatten()).view(3, 9)
    theirs = log_probabilities(native(**batch).logits.flatten(0, 1), targets.flatten()).view(3, 9)
    torch.testing.assert_close(ours, theirs)
    ours.sum(1).exp().sum().backward()
    theirs.sum(1).exp().sum().backward()
    tiny_models.assert_same_gradients(model, native)


@pytest.mark.parametrize("op", ["outputs", "output_gradient"])
def test_a_fault_at_an_output_reaches_the_caller_and_the_next_step_runs(op: str, model: Any, native: Any) -> None:
    def fail(node: fx.Node) -> None:
        if op_of(node).name == op:
            raise ValueError("planted")

    engine.probe(model, fail)
    with pytest.raises(LaneError, match="planted"):
        model(input_ids=ids()).logits.sum().backward()
    engine.probe(model, None)
    assert all(p.grad is None for p in model.parameters())
    for each in (model, native):
        each(input_ids=ids()).logits.square().sum().backward()
    tiny_models.assert_same_gradients(model, native)


def test_gradients_of_outputs_are_let_go_with_the_backward(model: Any) -> None:
    """The batch stays until the update, so that it can be dumped."""
    model(input_ids=ids()).logits.sum().backward()
    (kept,) = engine.step(model).batches
    assert kept.micro_batches and not kept.output_gradients


def test_the_last_positions_alone_may_be_asked_for(model: Any, native: Any) -> None:
    for each in (model, native):
        logits = each(input_ids=ids(), logits_to_keep=4).logits
        assert logits.shape == (3, 4, V)
        logits.logsumexp(-1).square().sum().backward()
    tiny_models.assert_same_gradients(model, native)
    with pytest.raises(UnsupportedError, match="logits_to_keep"):
        model(**tiny_models.batch(), logits_to_keep=4)


def rollouts(seed: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {"input_ids": ids(seed), "labels": next_tokens(ids(seed)), "advantages": torch.randn(3, 9, generator=made),
            "before": torch.randn(3, 9, generator=made) * 0.3 - 4}


class LogitsAlone(torch.nn.Module):
    """A decoder without a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = torch.nn.Embedding(V, 16), torch.nn.Linear(16, V)
        blocks = (torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 16)) for _ in range(3))
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize("of_transformers", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_loss_of_tokens_trains_within_the_program(of_transformers: bool, tied: tuple[Any, Any]) -> None:
    """In loops with gradients added up, and in whole steps of waves; by a model that returns a loss too, or logits alone."""
    if of_transformers:
        model, native = tied[0], copy.deepcopy(tied[1])
    else:
        native, model = LogitsAlone(), megacompile.stream(LogitsAlone(), device="cpu", loss=clipped_ratio, token_chunk=4)
    initial = tiny_models.weights(model)
    model.zero_grad(), native.zero_grad()
    variant = engine.templates(model)["epilogue"].variant("loss", 4)
    assert len(token_loops(variant.graph)) == 1, "logits, values and all gradients are of one chunk at a time"
    ours, theirs = megacompile.AdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(native.parameters(), lr=1e-2)

    def natives(batch: dict[str, Tensor], count: float = 1) -> Tensor:
        logits = native(input_ids=batch["input_ids"])
        logits = logits.logits if of_transformers else logits
        given = {name: tensor.flatten() for name, tensor in batch.items() if name != "input_ids"}
        return clipped_ratio(logits.flatten(0, 1), **given).sum() / count

    for seed in range(2):
        out = model(**rollouts(seed), num_items_in_batch=torch.tensor(17))
        (out.loss if of_transformers else out).backward()
        natives(rollouts(seed), 17).backward()
    tiny_models.assert_same_gradients(model, native)
    ours.step(), theirs.step()
    for seed in range(2):
        ours.zero_grad(), theirs.zero_grad()
        loss, expected = model.megacompile.train_step(rollouts(seed), ours), natives(rollouts(seed))
        expected.backward()
        theirs.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    tiny_models.assert_same_weights(model, native)
    if of_transformers:
        model.load_state_dict(initial)
    else:
        model.megacompile.close()


def test_outputs_need_their_backward_before_the_weights_change(model: Any) -> None:
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    late, early = model(input_ids=ids(0)).logits, model(input_ids=ids(1)).logits
    early.square().mean().backward()
    optimizer.step()
    with pytest.raises(LeaseError, match="weights have changed"):
        late.square().mean().backward()


def test_updates_on_arrival_train_by_losses_of_logits(model: Any, native: Any) -> None:
    ours = megacompile.AdamW(model.parameters(), lr=1e-2, overlap="backward")
    theirs = torch.optim.AdamW(native.parameters(), lr=1e-2)
    for seed, (each, optimizer) in itertools.product(range(2), ((model, ours), (native, theirs))):
        contrast(*each(input_ids=ids(seed)).logits.split((2, 1))[::-1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    tiny_models.assert_same_weights(model, native)


def test_memory_of_outputs_is_counted(model: Any) -> None:
    """Logits, and the gradient that comes for them, are in no plan of a loss."""
    planner = engine.planner(model)
    plans = (planner.choose(8, 512, output=output).plan for output in ("loss", "logits"))
    loss, logits = (planner.estimate(plan).total for plan in plans)
    assert logits - loss > 8 * 512 * V * 4


@pytest.mark.sample(2)
@pytest.mark.parametrize(("function", "tensors", "message"), [
    (lambda logits: logits.sum(), {}, "a value for each token"),
    (lambda logits: logits[:, 0] * (1 if logits.sum() > 0 else 2), {}, "cannot be traced: .*let no branch depend on values"),
    (lambda logits: logits.argmax(-1), {}, r"returns nothing that has a gradient: call it under torch\.no_grad"),
    (lambda logits: logits[:, 0] - logits.mean(0)[0], {}, "does not compute each token alone.*aten.mean"),
    (lambda logits: logits[:, 0] - logits.sum(0)[0], {}, "does not compute each token alone.*aten.sum"),
    (lambda logits: logits[:, 0] / logits.shape[0], {}, "does not compute each token alone.*aten.div"),
    (lambda logits: logits[:, 0].cumsum(0), {}, "does not compute each token alone.*aten.cumsum"),
    (lambda logits: logits[:, 0] * torch.arange(logits.shape[0]), {}, "does not compute each token alone.*aten.arange"),
    (log_probabilities, {"targets": torch.zeros(3, 8, dtype=torch.int64)}, r"must be a tensor \[3, 9\]"),
    (lambda logits, weights: logits[:, 0] * weights, {"weights": torch.ones(3, 9, requires_grad=True)}, "weights.detach"),
])
def test_what_is_not_supported_is_refused(function: Any, tensors: dict[str, Tensor], message: str, model: Any) -> None:
    with pytest.raises(UnsupportedError, match=message):
        model.megacompile.per_token(function, {"input_ids": ids()}, **tensors)
    with pytest.raises(UnsupportedError, match="leave labels out of the batch"):
        model.megacompile.per_token(log_probabilities, tiny_models.batch(), targets=ids())
