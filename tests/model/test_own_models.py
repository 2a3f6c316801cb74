"""What graphs of custom models assume: independent rows, one mode, constant Python state, grad modes."""
from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import engine
import pytest
import tiny_models
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import megacompile
from megacompile.errors import CaptureError, UnsupportedError
from megacompile.frontend import capture
from megacompile.frontend.tracing.model_graph import order_arguments
from megacompile.inputs.padding_arguments import further_arguments
from megacompile.ir.plan import CaptureKey
from megacompile.predict.durations import Durations
from megacompile.predict.hardware import Hardware

aten = torch.ops.aten
IDS = torch.arange(12).view(3, 4)


class Block(nn.Module):
    is_causal = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop, self.calls = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5), 0

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.first(x))


class Decoder(nn.Module):
    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = nn.ModuleList(self.block() for _ in range(2))

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.through(self.embed(input_ids))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def of(body: Any) -> type[Decoder]:
    """A decoder whose blocks' forward is `body`."""
    return type("Model", (Decoder,), {"block": type("Own", (Block,), {"forward": body})})


def with_layers(body: Any) -> type[Decoder]:
    """A decoder that calls its blocks as `body` does."""
    return type("Model", (Decoder,), {"through": body})


class Contrastive(Decoder):
    """Each row's end is to be nearest to its own beginning, of the beginnings of all rows."""

    def forward(self, input_ids: Tensor) -> Any:  # type: ignore[override]
        x = self.head(self.through(self.embed(input_ids)))
        return F.cross_entropy(x[:, -1] @ x[:, 0].T, torch.arange(len(x), device=x.device))


def normed(self: Any, x: Tensor) -> Tensor:
    return x + F.batch_norm(self.first(x).transpose(1, 2), None, None, training=True).transpose(1, 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "where"), [
    (of(lambda self, x: self.first(x) - x.mean(0, keepdim=True)), r"blocks\.0\nfrom source: .*x\.mean\(0"),
    (of(normed), r"blocks\.0\nfrom source: .*F\.batch_norm"),
    (Contrastive, r"epilogue\nfrom source: .*x\[:, -1\] @ x"),
    (of(lambda self, x: (self.first(x) / self.first(x).abs().amax()).clamp(-1, 1)), r"blocks\.0\nfrom source: .*amax\("),
    (of(lambda self, x: self.first(x) - x.mean(1, keepdim=True)), "$"),
], ids=["mean", "batch norm", "contrastive", "largest value", "mean over tokens"])
def test_rows_that_read_each_other_are_found_with_their_line(model: type[Decoder], where: str) -> None:
    example = {"input_ids": IDS} if model is Contrastive else None
    found = capture(model(), example=example).across_rows
    assert re.match(where, found), found


def test_a_batch_whose_rows_read_each_other_is_not_split() -> None:
    model = of(lambda self, x: self.first(x) - x.mean(0, keepdim=True))()
    plain = model(IDS, IDS)
    streamed: Any = megacompile.stream(model, device="cpu")
    torch.testing.assert_close(streamed(IDS, IDS).detach(), plain.detach())
    assert streamed.megacompile.plan.micro_batches == (3,)
    streamed.megacompile.close()
    streamed = megacompile.stream(model, device="cpu", micro_batch_size=2)
    with pytest.raises(UnsupportedError, match="computes with several sequences of a batch at once, so that micro-batches"):
        streamed(IDS, IDS)
    streamed.megacompile.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("body", [
    lambda self, x: (self.first if self.training else self.second)(x) + 0 * self.first(x) + 0 * self.second(x),
    lambda self, x: self.first(x) * (2 if self.training else 3),
], ids=["weights", "whole numbers"])
def test_other_weights_or_numbers_in_evaluation_mode_are_seen(body: Any) -> None:
    captured = capture(of(body)())
    assert not captured.same_in_evaluation() and captured.others.holds(True, (1, 17))


@pytest.mark.nightly(held_by="tests/model/test_own_models.py::test_other_weights_or_numbers_in_evaluation_mode_are_seen")
def test_a_part_in_another_mode_is_refused_where_that_matters() -> None:
    model: Any = of(lambda self, x: self.drop(self.first(x)))()
    model.blocks[1].eval()
    model = megacompile.stream(model, device="cpu")
    with pytest.raises(UnsupportedError, match=r"blocks\.1 is in evaluation mode, but Model is not, and its graphs have"):
        model(IDS, IDS)
    model.train()
    model(IDS, IDS).backward()
    model.megacompile.close()


class Pools(Decoder):
    """Reads the mask for more than attention."""

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Any:  # type: ignore[override]
        x = self.through(self.embed(input_ids))
        seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        pooled = (x * seen[..., None]).sum(1, keepdim=True) / seen.sum(1)[:, None, None]
        return F.cross_entropy(self.head(x + pooled).flatten(0, 1), labels.flatten())


class Named(Decoder):
    """Calls functions with arguments by name."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        x = self.through(F.embedding(weight=self.embed.weight, input=input_ids))
        x = torch.cat(dim=-1, tensors=x.split(dim=-1, split_size=2))
        logits = F.linear(bias=self.head.bias, weight=self.head.weight, input=x)
        total = F.cross_entropy(target=labels.flatten(), input=logits.flatten(0, 1), reduction="sum")
        return torch.mul(other=2.0, input=torch.div(total, other=(labels != -100).sum()))


def test_arguments_by_name_are_those_by_place() -> None:
    torch.manual_seed(0)
    native = Named()
    model = megacompile.stream(copy.deepcopy(native), device="cpu", example={"input_ids": IDS, "labels": IDS})
    assert engine.captured(model).has_loss_denominator
    given = {"input_ids": IDS, "labels": IDS.masked_fill(IDS == 5, -100)}
    loss, expected = model(**given), native(**given)
    torch.testing.assert_close(loss.detach(), expected.detach())
    loss.backward()
    expected.backward()
    tiny_models.assert_same_gradients(model, native)
    model.megacompile.close()


@pytest.mark.parametrize("call", [
    lambda x: F.embedding(weight=x, input=x), lambda x: torch.div(other=x, input=x, rounding_mode="floor"),
    lambda x: x.sum(keepdim=True, dim=1), lambda x: torch.add(x, alpha=2, other=x), lambda x: x.add(alpha=2, other=1),
    lambda x: torch.where(condition=x, other=x, input=x), lambda x: torch.ops.aten.mm(self=x, mat2=x),
    lambda x: F.linear(bias=None, weight=x, input=x), lambda x: x.reshape(shape=(2, 3)),
], ids=range(9))
def test_only_what_has_a_place_is_put_there(call: Any) -> None:
    """The ordered call does the same, and gives by name only what cannot be given by place."""
    graph = torch.fx.symbolic_trace(call)
    order_arguments(graph)
    (node,) = (node for node in graph.graph.nodes if node.op.startswith("call"))
    assert len(node.args) >= 2 and set(node.kwargs) <= {"rounding_mode", "alpha"}
    if "embedding" not in str(node.target):
        x = torch.arange(9).view(3, 3)
        x = x % 2 == 0 if "where" in str(node.target) else x[:2] if "reshape" in str(node.target) else x + 1.0
        torch.testing.assert_close(graph(x), call(x))


@pytest.mark.nightly(
    held_by="tests/model/test_unusual_models.py::test_padding_on_the_right_is_seen_by_layers_that_see_all_of_a_sequence")
def test_a_model_of_ones_own_is_given_padding_on_the_right() -> None:
    captured = capture(Pools())
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]])
    inputs = {"input_ids": IDS, "labels": IDS.masked_fill(mask == 0, -100)}
    assert captured.causal
    assert "attention_mask" in further_arguments(
        "Pools", captured, {"attention_mask": mask}, inputs, lambda further: CaptureKey(tuple(further)))


def counting(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return self.first(x) * self.calls  # type: ignore[no-any-return]


def checkpointed(self: Any, x: Tensor) -> Tensor:
    for block in self.blocks:
        x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    return x


class Halves(Block):
    def forward(self, x: Tensor) -> Any:
        a, b = self.first(x).chunk(2, dim=-1)
        return x, (a, b)


def handing_halves(self: Any, x: Tensor) -> Tensor:
    for block in self.blocks:
        x, (a, b) = block(x)
        x = x + torch.cat([b, a], dim=-1)
    return x


class Valued(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = tiny_models.build(num_hidden_layers=1), nn.Linear(64, 1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        found = self.policy(input_ids=input_ids, labels=labels, output_hidden_states=True)
        return found.loss + self.value(found.hidden_states[-1]).square().mean()


@pytest.mark.sample(2)
@pytest.mark.parametrize(("model", "message"), [
    (Valued, r"Valued asks the transformers model inside it for hidden states at .*test_own_models\.py:\d+ \(found = .*: "
             r"call its decoder \(get_decoder\(\)\) and pass last_hidden_state to its head"),
    (type("Model", (Decoder,), {"block": Halves, "through": handing_halves}),
     r"Model gives a layer, or gets from one, two views of one tensor \(a and b\).*: pass or return a\.clone\(\)"),
    (of(counting), r"Model computes something else at each call, because its forward changes blocks\.0\.calls: keep it in a"),
    (of(lambda self, x: x @ self.first.weight.T @ self.first.weight),
     r"Model reads a weight and its \.T within one layer at .*: write weight\.t\(\) in the place of"),
    (with_layers(checkpointed), r"blocks are called through torch\.utils\.checkpoint: call them as they are, since"),
], ids=["hidden states", "views", "counter", "T", "checkpoint"])
def test_a_forward_that_is_not_supported_is_refused_with_the_remedy(model: type[nn.Module], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(model())


@pytest.mark.nightly(
    held_by="tests/model/test_capture_refusals.py::test_what_cannot_be_streamed_is_refused_with_cause_and_remedy")
def test_values_that_a_forward_only_stores_are_not_state() -> None:
    def keeps(self: Any, x: Tensor) -> Tensor:
        self.last = self.first(x)
        return self.last

    model, native = (of(keeps)() for _ in range(2))
    native.load_state_dict(model.state_dict())
    streamed = megacompile.stream(model, device="cpu")
    for _ in range(2):
        torch.testing.assert_close(streamed(input_ids=IDS, labels=IDS), native(input_ids=IDS, labels=IDS))
    streamed.megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_own_models.py::test_a_layer_within_a_layer_is_part_of_its_graph")
def test_a_layer_may_hand_on_an_earlier_ones_keys_in_a_tuple() -> None:
    class Shares(Block):
        def forward(self, x: Tensor, keys: Any = None) -> Any:  # type: ignore[override]
            keys = (self.first(x), self.second(x)) if keys is None else keys
            return x + torch.tanh(self.first(x) + keys[0]) * keys[1], keys

    def through(self: Any, x: Tensor) -> Tensor:
        keys = None
        for block in self.blocks:
            x, keys = block(x, keys)
        return x

    captured = capture(type("Model", (Decoder,), {"block": Shares, "through": through})())
    assert [source.kind for source in captured.calls[2].sources].count("carried") == 3


def test_a_layer_within_a_layer_is_part_of_its_graph() -> None:
    class Outer(Block):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x + torch.tanh(self.second(x)))

    class Nested(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Outer(), Block()])

    captured = capture(Nested())
    templates = [captured.templates[call.template] for call in captured.calls[1:-1]]
    assert len(templates) == 3
    products = [[node.target for node in template.variant("forward").graph.graph.nodes].count(aten.addmm.default)
                for template in templates]
    assert products == [1, 2, 1]


@pytest.mark.nightly(held_by="tests/model/test_own_models.py::test_a_layer_within_a_layer_is_part_of_its_graph")
def test_a_layer_that_pads_to_whole_chunks_takes_the_time_of_their_number() -> None:
    """Its sizes are rounded up: `-(-T // 4)`, which no sum or product is."""
    def chunked(self: Any, x: Tensor) -> Tensor:
        chunks = F.pad(x, (0, 0, 0, -x.shape[1] % 4)).unflatten(1, (-1, 4))
        return x + self.first(chunks).cumsum(2).flatten(1, 2)[:, :x.shape[1]]

    captured = capture(of(chunked)())
    hardware = replace(Hardware.find("h200"), memory_bandwidth=1e30, launch_s=0.0)  # products alone
    durations = Durations(captured, {}, hardware)
    one, also_two, two = (sum(durations.seconds(captured.calls[1].template, "forward", 3, length)) for length in (4, 5, 8))
    assert 0 < 2 * one == also_two == two
