"""Unsupported use is refused before anything changes, with one of our exceptions that names cause and remedy."""
from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import engine
import pytest
import tiny_models
import torch
from tiny_models import batch, same_bits, weights
from torch import nn

import megacompile
from megacompile import api
from megacompile.errors import (
    CaptureError,
    DeviceUnavailableError,
    InsufficientMemoryError,
    LeaseError,
    MegacompileError,
    UnsupportedError,
)
from megacompile.system.host_memory import host_memory

# ---------------------------------------------------------------- models that cannot be streamed


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    """A decoder that can be streamed; each fault below is one change of it."""

    layer: type[nn.Module] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 4), nn.Linear(4, 16)
        self.blocks = nn.ModuleList(self.layer() for _ in range(3))

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.stack(self.embed(input_ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class WithoutStack(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Identity()

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        return x


class BranchesOnData(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if x.sum() > 0 else x


class ReadsOnTheHost(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) * self.linear.weight.max().item()


class Drops(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1, inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.linear(x))


class DoublesInPlace(Model):
    def stack(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).mul_(2)
        return x


class Lossless(Model):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.head(self.stack(self.embed(input_ids)))


class NeedsMore(Model):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(input_ids, labels) + pixels.mean()


def with_layer(layer: type[nn.Module]) -> type[Model]:
    return type(f"ModelOf{layer.__name__}", (Model,), {"layer": layer})


def hooked(model: nn.Module) -> nn.Module:
    next(model.parameters()).register_hook(lambda gradient: gradient * 2)
    return model


def module_hooked(model: Any) -> nn.Module:
    model.blocks[1].register_forward_hook(lambda *_: None)
    return model


STREAM_REFUSALS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], type[MegacompileError], str]] = {
    "no repeated layer stack": (
        WithoutStack, {}, CaptureError, "no repeated layer stack found in WithoutStack: keep the decoder layers in an nn.Mod"),
    "data-dependent control flow": (
        with_layer(BranchesOnData), {}, CaptureError, "captured as one graph.*has Python control flow that depends on"),
    "a value read on the host": (
        with_layer(ReadsOnTheHost), {}, CaptureError, "keep it a tensor|has Python control flow"),
    "a layer's output changed in place": (
        DoublesInPlace, {}, CaptureError, r"output or a parameter in place at .*mul_.*: make a new value of it"),
    "random numbers": (
        with_layer(Drops), {}, UnsupportedError, r"drop .*draws random numbers.*use F.dropout"),
    "no loss": (Lossless, {}, UnsupportedError, "returns no scalar loss.*return the loss when labels are given"),
    "an argument without default": (NeedsMore, {}, CaptureError, "needs pixels: give it a default, or a tensor in example="),
    "half precision": (lambda: Model().half(), {}, UnsupportedError, "float16: megacompile trains float32 and bfloat16"),
    "no weights": (lambda: Model().to("meta"), {}, UnsupportedError, "meta device .*load them first"),
    "a parameter's hook": (lambda: hooked(Model()), {}, UnsupportedError, "embed.weight has a gradient hook.*remove it"),
    "a module's hook": (lambda: module_hooked(Model()), {}, UnsupportedError, "blocks.1 has a hook.*remove it"),
    "a stack that is not there": (Model, {"layers": "layers"}, CaptureError, r'layers="layers" does not exist .*found: blocks'),
    "a tile that is not there": (Model, {"resident": ("block",)}, MegacompileError, "resident names block.*from prologue"),
    "device memory below a layer": (
        Model, {"device_memory": "64B"}, InsufficientMemoryError,
        r"one layer needs \S+ \S+ of device memory and 64 B are available: use a larger device_memory"),
}


@pytest.mark.parametrize(("wrap", "reason"), [
    (torch.compile, r"^this is what torch\.compile returned.*: pass the model itself"),
    (nn.DataParallel, r"^DataParallel copies .*: pass the model itself \(\.module\)"),
])
def test_a_model_in_a_wrapper_of_pytorch_is_refused_with_the_way_out_of_it(wrap: Any, reason: str) -> None:
    with pytest.raises(MegacompileError, match=reason):
        megacompile.stream(wrap(Model()), device="cpu")


def test_a_compiled_layer_is_refused_by_name() -> None:
    model = Model()
    model.blocks[1] = torch.compile(model.blocks[1])  # type: ignore[assignment]
    with pytest.raises(MegacompileError, match=r"^blocks\.1 is what torch\.compile returned"):
        megacompile.stream(model, device="cpu")


@pytest.mark.sample(5)
@pytest.mark.parametrize("what", STREAM_REFUSALS)
def test_a_model_that_cannot_be_streamed_is_refused_and_left_as_it_was(what: str) -> None:
    make, options, kind, message = STREAM_REFUSALS[what]
    torch.manual_seed(0)
    model = make()
    cls, before, addresses = type(model), weights(model), [p.data_ptr() for p in model.parameters()]
    with pytest.raises(kind, match=message) as caught:
        megacompile.stream(model, **{"device": "cpu", **options})
    assert len(str(caught.value).splitlines()[0]) < 500
    assert type(model) is cls and not hasattr(model, "megacompile")
    assert [p.data_ptr() for p in model.parameters()] == addresses
    if not next(model.parameters()).is_meta:
        assert same_bits(weights(model), before)
    if make is Model:
        model(batch(1)["input_ids"] % 16, batch(1)["labels"] % 16).backward()


def test_too_little_host_memory_is_refused_with_what_is_needed_and_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "available_host_bytes", lambda: 3 * 2**20)
    model = Model()
    with pytest.raises(InsufficientMemoryError, match=(
            r"takes 1\.00 GiB of host memory \(.*\) and 3\.00 MiB are available: use a smaller model "
            r"\(even its frozen weights take 1\.00 GiB\)\nor use a host with more memory")):
        megacompile.stream(model, device="cpu")
    assert type(model) is Model


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none_is_refused() -> None:
    model = Model()
    with pytest.raises(DeviceUnavailableError, match="finds no CUDA device: use device='cpu'"):
        megacompile.stream(model, device="cuda")
    assert type(model) is Model


@pytest.mark.parametrize(("option", "value", "message"), [
    ("checkpoint_intervall", 2, "no option checkpoint_intervall: did you mean checkpoint_interval.* it has "),
    ("checkpoint_interval", 0, "whole number of at least 1"), ("checkpoint_interval", 1.5, "whole number of at least 1"),
    ("micro_batch_size", True, "whole number of at least 1"), ("micro_batch_size", "2", "whole number of at least 1"),
    ("weight_slots", -1, "whole number of at least 1"), ("gradient_slabs", 0, "whole number of at least 1"),
    ("saved_layers", -1, "at least 0"), ("saved_layers", 0.5, "at least 0"),
    ("device_memory", "much", "not an amount of memory: write bytes"), ("device_memory", "1.2.3GiB", "not an amount of memory"),
    ("device_memory", 0, "not an amount of memory"), ("device_memory", "-1GiB", "not an amount of memory"),
    ("pinned_memory", "24 apples", "not an amount of memory"),
    ("dtype", torch.float16, "torch.float32, torch.bfloat16 or 'auto'"),
    ("resident", 5, "names of tiles, or 'all', not 5"), ("resident", "block", "resident names block, which are not tiles"),
    ("device", "tpu", "'cpu' or 'cuda'"), ("device", "cuda:first", "'cpu' or 'cuda'"), ("compile", "yes", "True or False"),
    ("deferred_moments", 1, "True or False, not 1"), ("distributed", 0, "True or False, not 0"),
    ("peer_copies", "nccl", "True or False, not 'nccl'"),
])
def test_an_option_out_of_range_is_refused(option: str, value: Any, message: str) -> None:
    model = Model()
    with pytest.raises(MegacompileError, match=message):
        megacompile.stream(model, **{"device": "cpu", option: value})
    assert type(model) is Model


@pytest.mark.parametrize(("given", "what"), [("qwen2", "a str"), (None, "a NoneType"), (Model, "the class Model")])
def test_an_argument_that_is_not_a_model_is_refused(given: Any, what: str) -> None:
    for use in (megacompile.stream, lambda x: megacompile.schedule(x, batch=2, length=4, device="cpu")):
        with pytest.raises(MegacompileError, match=f"must be a torch.nn.Module, not {what}"):
            use(given)


def test_pinned_memory_too_small_for_one_layer_is_refused_before_anything_changes() -> None:
    model = Model()
    with pytest.raises(InsufficientMemoryError, match=r"at least \d.* of pinned memory, and pinned_memory is 64 B"):
        megacompile.stream(model, device="cpu", pinned_memory=64)
    assert type(model) is Model


@pytest.mark.parametrize("size", [{"batch": 0}, {"batch": -1}, {"length": 0}, {"length": 2.5}, {"batch": True}], ids=str)
def test_a_schedule_of_no_size_is_refused(size: dict[str, Any]) -> None:
    with pytest.raises(MegacompileError, match=f"{next(iter(size))} must be a whole number of at least 1, not"):
        megacompile.schedule(Model(), **{"batch": 2, "length": 4, **size}, device="cpu")


def test_an_example_that_is_not_a_tensor_is_refused() -> None:
    with pytest.raises(MegacompileError, match=r"example\['input_ids'\] must be a tensor, as .*, not a list"):
        megacompile.stream(Model(), device="cpu", example={"input_ids": [1]})  # type: ignore[dict-item]


def test_host_memory_that_the_system_does_not_give_is_refused() -> None:
    with pytest.raises(InsufficientMemoryError, match="the system cannot provide 1152921504606846976 bytes of host memory"):
        host_memory(1 << 60)


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def test_a_parameter_lives_in_one_model_s_tiles(model: Any) -> None:
    """Neither a wrapper of a streamed model nor one that shares a parameter with it can be streamed too."""
    sharing = Model()
    sharing.extra = model.lm_head
    for other in (Wrapper(model), sharing):
        with pytest.raises(MegacompileError, match=r"weight belongs to a Qwen2ForCausalLM that is streamed already: close\(\)"):
            megacompile.stream(other, device="cpu")


# ---------------------------------------------------------------- calls

def executes_nothing(node: Any) -> None:
    raise AssertionError(f"{node} was executed")


@pytest.fixture
def untouched(model: Any) -> Iterator[Any]:
    """The model; no instruction may run and no weight may change while the test has it."""
    before = weights(model)
    engine.probe(model, executes_nothing)
    yield model
    engine.probe(model, None)
    assert same_bits(weights(model), before)
    model(**batch(1)).loss.backward()


def mask(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


IDS = torch.arange(8).view(2, 4)
PADDED = torch.where(mask([1, 1, 1, 1], [1, 1, 0, 0]) == 1, IDS, -100)
CALL_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "position_ids of floats": ({"position_ids": IDS.float()}, "position_ids is not supported yet .*leave it out"),
    "positions of three kinds": ({"position_ids": IDS.expand(3, 2, 4)}, "position_ids is not supported yet"),
    "bounds without positions": ({"cu_seq_lens_q": torch.tensor([0, 2, 8])}, "without position_ids that start again"),
    "inputs_embeds": ({"inputs_embeds": torch.zeros(2, 4, 16)}, "inputs_embeds is not supported yet"),
    "a cache": ({"use_cache": True}, "keeps no cache: leave it out and pass all tokens, or call generate"),
    "past_key_values": ({"past_key_values": object()}, "past_key_values is not supported yet"),
    "hidden states": ({"output_hidden_states": True}, "leave labels out and call under"),
    "attentions": ({"output_attentions": True}, "output_attentions is not supported yet"),
    "a tuple": ({"return_dict": False}, "return_dict is not supported yet"),
    "some logits": ({"logits_to_keep": 2}, "logits_to_keep must be a non-negative integer, and 0 for a batch with labels"),
    "an unknown argument": ({"tokens": IDS}, "tokens is not supported yet"),
    "pairs as 0 and 1": ({"attention_mask": torch.ones(2, 1, 4, 4).tril()}, "holds 0 and 1 as floats, .*: pass floats, 0"),
    "pairs as bool": ({"attention_mask": torch.ones(2, 1, 4, 4).bool()}, "is bool, and eager attention adds .*: pass floats"),
    "pairs as integers": ({"attention_mask": IDS[:, None, :, None].expand(2, 1, 4, 4)},
                          r"must be bool .* of shape \[2, 1, 4, 4\], .* not torch\.int64"),
    "pairs of another length": ({"attention_mask": torch.zeros(2, 1, 4, 5)}, r"not torch\.float32 of shape \[2, 1, 4, 5\]"),
    "pairs with a gradient": ({"attention_mask": torch.zeros(2, 1, 4, 4, requires_grad=True)},
                              r"attention_mask requires a gradient, which .*: pass attention_mask\.detach\(\)"),
    "a mask of another batch": ({"attention_mask": torch.ones(1, 4)}, r"shape \[1, 4\] is not supported"),
    "masks by kind": ({"attention_mask": {"full_attention": None}}, "that is a dict is not supported"),
    "no input": ({"input_ids": None}, "input_ids must be given"),
    "floats": ({"input_ids": torch.zeros(2, 4)}, "input_ids must be an integer tensor"),
    "one sequence without batch": ({"input_ids": IDS[0], "labels": IDS[0]}, r"integer tensor \[batch, length\], not"),
    "labels of another rank": (
        {"labels": IDS[..., None]}, r"labels must be an integer tensor \[batch, length\], not .* of shape \[2, 4, 1\]"),
    "a list": ({"input_ids": IDS.tolist()}, "input_ids must be an integer tensor .*not list"),
    "shapes that differ": ({"labels": IDS[:, :3]}, r"must share one \[batch, length\]"),
    "no sequence": ({"input_ids": IDS[:0], "labels": IDS[:0]}, "of at least one token"),
}


@pytest.mark.parametrize("what", CALL_REFUSALS)
def test_an_argument_that_is_not_supported_is_refused(untouched: Any, what: str) -> None:
    changes, message = CALL_REFUSALS[what]
    for training in (True, False):
        with torch.set_grad_enabled(training), pytest.raises(UnsupportedError, match=message):
            untouched(**{"input_ids": IDS, "labels": IDS, **changes})


@pytest.mark.parametrize(("argument", "token"), [("input_ids", 64), ("input_ids", -1), ("labels", 99)])
def test_a_token_that_the_model_does_not_have_is_refused_before_a_kernel_reads_it(
        untouched: Any, argument: str, token: int) -> None:
    message = f"{argument} has the token {token}, .* has only the tokens 0 to 63: use the model's own tokenizer"
    for training in (True, False):
        with torch.set_grad_enabled(training), pytest.raises(MegacompileError, match=message):
            untouched(**{"input_ids": IDS, "labels": IDS, argument: torch.full_like(IDS, token)})


def test_too_many_positional_arguments_are_refused(untouched: Any) -> None:
    with pytest.raises(UnsupportedError, match="too many positional arguments; a streamed model takes input_ids, labels"):
        untouched(*range(40))


def test_autocast_to_another_dtype_is_refused(untouched: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedError, match=r"autocast to torch\.bfloat16 differs"):
        untouched(**batch(1))


def test_autocast_to_the_dtype_of_the_model_is_allowed(bf16_model: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = bf16_model(**batch(1)).loss
    assert torch.equal(loss, bf16_model(**batch(1)).loss)


def test_a_batch_for_which_a_micro_batch_does_not_fit_is_refused(untouched: Any) -> None:
    planner, captures = engine.planner(untouched), engine.captures(untouched)
    captures.plan_with(budget_bytes=planner.taken_bytes + 4096)
    try:
        with pytest.raises(InsufficientMemoryError, match=r"a batch of 6 x 40 needs .* of device .*are available"):
            untouched(**batch(1, rows=6, length=40))
    finally:
        captures.plan_with(budget_bytes=planner.budget_bytes)


class Bounded(Model):
    """Like a model with learned positions. Its loss is not a mean over tokens."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:  # type: ignore[override]
        assert input_ids.shape[1] <= 32, "too long"
        logits = self.head(self.stack(self.embed(input_ids)))
        return (logits.logsumexp(-1) - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)).square().mean()


def test_batches_that_the_captured_graph_does_not_hold_for_are_refused() -> None:
    model = megacompile.stream(Bounded(), device="cpu", micro_batch_size=4)
    tokens = torch.zeros(4, 33, dtype=torch.long)
    with pytest.raises(UnsupportedError, match=r"a batch of 4 x 33 breaks .*32, .*test_refusals.py:\d+ \(assert .*: keep"):
        model(tokens, tokens)
    with pytest.raises(UnsupportedError, match="cannot be split into micro-batches: give micro_batch_size=6 or smaller"):
        model(torch.zeros(6, 8, dtype=torch.long), torch.zeros(6, 8, dtype=torch.long))
    with pytest.raises(UnsupportedError, match=r"num_items_in_batch is not supported.*leave it out"):
        model(tokens[:, :8], tokens[:, :8], num_items_in_batch=7)
    model(tokens[:, :32], tokens[:, :32]).backward()
    model.megacompile.close()


# ---------------------------------------------------------------- backwards

def stale(model: Any, loss: torch.Tensor) -> None:
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    loss.backward()


def after_a_step(model: Any, loss: torch.Tensor) -> None:
    optimizer = megacompile.AdamW(model.parameters())
    model(**batch(2)).loss.backward()
    optimizer.step()
    loss.backward()


def twice(model: Any, loss: torch.Tensor) -> None:
    loss.backward()
    loss.backward()


def hooked_since(model: Any, loss: torch.Tensor) -> None:
    handle = model.lm_head.weight.register_hook(lambda gradient: gradient)
    try:
        loss.backward()
    finally:
        handle.remove()


def hooked_after_accumulation(model: Any, loss: torch.Tensor) -> None:
    handle = model.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    try:
        loss.backward()
    finally:
        handle.remove()


BACKWARD_REFUSALS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], type[MegacompileError], str]] = {
    "weights written since": (stale, LeaseError, "the weights have changed since this loss was computed: run backward before"),
    "a step since": (after_a_step, LeaseError, "the weights have changed since this loss was computed: run backward before"),
    "retain_graph": (lambda m, loss: loss.backward(retain_graph=True), LeaseError, "retain_graph=True is not supported"),
    "create_graph": (lambda m, loss: loss.backward(create_graph=True), LeaseError, "create_graph=True .*is not supported"),
    "autograd.grad": (lambda m, loss: torch.autograd.grad(loss, list(m.parameters())), LeaseError, "gradients of single"),
    "autograd.grad, unused allowed": (
        lambda m, loss: torch.autograd.grad(loss, [m.lm_head.weight], allow_unused=True), LeaseError, "call loss.backward"),
    "some inputs": (lambda m, loss: loss.backward(inputs=[m.lm_head.weight]), LeaseError, "gradients of single parameters"),
    "a hook": (hooked_since, UnsupportedError, "lm_head.weight has a gradient hook"),
    "a hook after accumulation": (hooked_after_accumulation, UnsupportedError, "lm_head.weight has a gradient hook"),
}


@pytest.mark.filterwarnings("ignore:Using backward")  # torch's own advice against create_graph
@pytest.mark.parametrize("what", BACKWARD_REFUSALS)
def test_a_backward_that_is_not_supported_is_refused(model: Any, native: Any, what: str) -> None:
    act, kind, message = BACKWARD_REFUSALS[what]
    loss = model(**batch(1)).loss
    with pytest.raises(kind, match=message):
        act(model, loss)
    if what not in ("weights written since", "a step since"):  # refused without harm: the backward proper still runs
        assert all(p.grad is None for p in model.parameters())
        loss.backward()
        native(**batch(1)).loss.backward()
        tiny_models.assert_same_gradients(model, native)


def test_a_second_backward_is_refused(model: Any, native: Any) -> None:
    loss = model(**batch(1)).loss
    loss.backward()
    with pytest.raises(LeaseError, match="this loss was already used by a backward, or its backward was refused"):
        loss.backward()
    native(**batch(1)).loss.backward()
    tiny_models.assert_same_gradients(model, native)


# ---------------------------------------------------------------- changes of a streamed model

def test_what_trains_cannot_change_after_stream(model: Any) -> None:
    model.lm_head.weight.requires_grad_(False)
    try:
        with pytest.raises(UnsupportedError, match=r"requires_grad of lm_head.weight was changed after stream\(\): close"):
            model(**batch(1))
    finally:
        model.lm_head.weight.requires_grad_(True)


def test_a_replaced_parameter_is_refused(model: Any) -> None:
    parameter = model.lm_head.weight
    model.lm_head.weight = nn.Parameter(parameter.detach().clone())
    try:
        with pytest.raises(UnsupportedError, match=r"lm_head.weight was added, removed or replaced after stream\(\)"):
            model(**batch(1))
    finally:
        model.lm_head.weight = parameter


def test_an_added_module_is_refused(model: Any) -> None:
    model.adapter = nn.Linear(2, 2)
    try:
        with pytest.raises(UnsupportedError, match=r"adapter\.bias was added"), torch.no_grad():
            model(**batch(1))
    finally:
        del model.adapter


@pytest.mark.parametrize("data", [torch.zeros(3, 3), torch.zeros(64, 16, dtype=torch.bfloat16)])
def test_weights_of_another_shape_or_dtype_are_refused(model: Any, data: torch.Tensor) -> None:
    parameter = model.lm_head.weight
    before = parameter.data
    parameter.data = data
    try:
        with pytest.raises(UnsupportedError, match=r"lm_head.weight is now .* instead of torch.float32 of \[64, 16\]: close"):
            model(**batch(1))
    finally:
        parameter.data = before


@pytest.mark.parametrize(("change", "message"), [
    (lambda m: m.half(), "cannot be cast to torch.float16"), (lambda m: m.bfloat16(), "cannot be cast to torch.bfloat16"),
    (lambda m: m.to(torch.bfloat16), "cannot be cast to torch.bfloat16"), (lambda m: m.to("cuda"), "cannot be moved to cuda"),
    (lambda m: m.cuda(), "cannot be moved to cuda"), (lambda m: m.to_empty(device="cpu"), "cannot be moved or cast"),
    (lambda m: m.load_state_dict(m.state_dict(), assign=True), "leave assign out"),
    (pickle.dumps, "cannot be pickled: use save_pretrained, state_dict"),
    (lambda m: torch.save(m, "/dev/null"), "cannot be pickled"),
])
def test_a_streamed_model_is_not_cast_moved_or_pickled(untouched: Any, change: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        change(untouched)


def test_streaming_twice_is_refused(untouched: Any) -> None:
    with pytest.raises(MegacompileError, match=r"streamed already: call model.megacompile.close\(\) before"):
        megacompile.stream(untouched, device="cpu")


@pytest.mark.parametrize("given", ["x", 5, {}, {"tokens": IDS}, {"input_ids": [1, 2]}, {"input_ids": IDS[0]}, IDS], ids=str)
def test_an_argument_that_is_not_a_batch_is_refused(model: Any, given: Any) -> None:
    for look in (model.megacompile.program, model.megacompile.table, model.megacompile.compiled):
        with pytest.raises(MegacompileError, match=r"a batch must map input_ids, labels to tensors \[batch, length\]"):
            look(given)


def test_a_stage_that_is_not_there_is_refused(model: Any) -> None:
    with pytest.raises(MegacompileError, match="unknown stage 'final': choose one of model, micro_batch"):
        model.megacompile.program(batch(1), stage="final")


# ---------------------------------------------------------------- optimizers

@pytest.mark.parametrize(("options", "message"), [
    ({"lr": -1.0}, "lr=-1.0 is out of range"), ({"betas": (1.0, 0.9)}, "betas=.* out of range"),
    ({"eps": -1e-8}, "eps=-1e-08 is out"), ({"weight_decay": -0.1}, "weight_decay=-0.1 is out"),
    ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0 is out of range"), ({"betas": 0.9}, "betas=0.9 is out of range: give two"),
    ({"lr": "x"}, "lr='x' is out of range: give a finite"), ({"max_grad_norm": "1"}, "max_grad_norm='1' is out of range"),
])
def test_a_hyper_parameter_out_of_range_is_refused(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(MegacompileError, match=message):
        megacompile.AdamW(model.parameters(), **options)


def test_an_option_of_another_adam_is_refused(model: Any) -> None:
    with pytest.raises(UnsupportedError, match="amsgrad=True is not implemented"):
        megacompile.AdamW([{"params": list(model.parameters()), "amsgrad": True}])


@pytest.mark.parametrize("option", [{"max_grad_norm": 1.0}, {"overlap": "backward"}, {"non_finite": "skip"},
                                    {"dump_folder": "here"}], ids=str)
def test_an_option_of_all_parameters_is_refused_in_a_group(model: Any, option: dict[str, Any]) -> None:
    with pytest.raises(MegacompileError, match=r"cannot be set for a parameter group: pass it to AdamW"):
        megacompile.AdamW([{"params": list(model.parameters()), **option}])


def test_an_optimizer_is_neither_pickled_nor_copied(model: Any) -> None:
    optimizer = megacompile.AdamW(model.parameters())
    for act in (copy.deepcopy, pickle.dumps, lambda each: torch.save(each, io.BytesIO())):
        with pytest.raises(UnsupportedError, match=r"neither pickled nor copied.*use state_dict\(\) or a CheckpointWriter"):
            act(optimizer)
    with pytest.raises(UnsupportedError, match="neither pickled nor copied"):
        copy.deepcopy(torch.optim.lr_scheduler.StepLR(optimizer, 1))


def test_torch_compile_leaves_a_streamed_model_as_it_is(model: Any) -> None:
    expected = model(**batch(1)).loss.detach()
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"are compiled by megacompile: leave torch\.compile out"):
        torch.compile(model, fullgraph=True)(**batch(1))
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of what Dynamo cannot trace
        assert torch.equal(torch.compile(model)(**batch(1)).loss.detach(), expected)


def test_parameters_that_are_not_streamed_are_refused(model: Any) -> None:
    with pytest.raises(MegacompileError, match=r"belongs to no streamed model: call model = megacompile.stream\(model\)"):
        megacompile.AdamW([*model.parameters(), nn.Parameter(torch.zeros(2))])


def test_parameters_of_two_models_are_refused(model: Any, bf16_model: Any) -> None:
    optimizer = megacompile.AdamW([*model.parameters(), *bf16_model.parameters()])
    model(**batch(1)).loss.backward()
    with pytest.raises(MegacompileError, match="updates one streamed model, not 2: make one optimizer for each"):
        optimizer.step()


def test_state_of_other_parameters_is_refused(model: Any) -> None:
    parameters = list(model.parameters())
    others = megacompile.AdamW(parameters[1:]).state_dict()
    optimizer = megacompile.AdamW(parameters)
    with pytest.raises(MegacompileError, match="the saved optimizer has other parameter groups"):
        optimizer.load_state_dict(others)
    swapped = copy.deepcopy(optimizer.state_dict())
    swapped["state"][0], swapped["state"][1] = swapped["state"][1], swapped["state"][0]
    with pytest.raises(MegacompileError, match=r"has no exp_avg of shape \[64, 16\]"):
        optimizer.load_state_dict(swapped)


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_a_saved_option_of_another_adam_is_refused_and_nothing_is_loaded(model: Any, option: str) -> None:
    optimizer = megacompile.AdamW(model.parameters())
    tiny_models.train_step(model, optimizer)
    model.megacompile.synchronize()
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        group |= {"lr": 7.0, option: True}
    for state in saved["state"].values():
        state["exp_avg"].fill_(7.0)
    with pytest.raises(UnsupportedError, match=f"{option}=True is not implemented"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert all((state["exp_avg"] != 7.0).all() for state in optimizer.state.values())


def test_a_saved_state_that_does_not_fit_is_refused_before_any_of_it_is_loaded(model: Any) -> None:
    optimizer = megacompile.AdamW(model.parameters())
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 7.0
    for state in saved["state"].values():
        state["exp_avg"].fill_(7.0)
    last = max(saved["state"])
    saved["state"][last]["exp_avg_sq"] = torch.zeros(3, 3)
    with pytest.raises(MegacompileError, match="has no exp_avg_sq of shape"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert all((state["exp_avg"] == 0).all() for state in optimizer.state.values())


def test_a_gradient_of_a_parameter_that_no_call_reads_is_refused() -> None:
    model = Model()
    model.unread = nn.Parameter(torch.ones(2))
    model = megacompile.stream(model, device="cpu")
    optimizer = megacompile.AdamW(model.parameters(), lr=0.1)
    tokens = batch(1)["input_ids"] % 16
    model(tokens, tokens).backward()
    before = weights(model)
    optimizer.step()
    after = weights(model)
    assert {name for name in before if torch.equal(before[name], after[name])} == {"unread"}
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.unread.grad = torch.ones(2)
    with pytest.raises(UnsupportedError, match="unread has a gradient, and the streamed forward does not read it"):
        optimizer.step()
    model.megacompile.close()
    with pytest.raises(MegacompileError, match=r"the model of this optimizer was closed"):
        optimizer.step()


def test_a_remainder_that_was_cast_is_refused(bf16_model: Any) -> None:
    optimizer = megacompile.AdamW(bf16_model.parameters())
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["remainder"] = saved["state"][0]["remainder"].float()
    with pytest.raises(UnsupportedError, match="remainder is not int16: it was cast on the way"):
        optimizer.load_state_dict(saved)


def test_gradients_set_by_hand_before_any_backward_are_refused_and_so_is_a_backward_after_close() -> None:
    model = megacompile.stream(Model(), device="cpu")
    optimizer = megacompile.AdamW(model.parameters())
    loss = model(batch(1)["input_ids"] % 16, batch(1)["labels"] % 16)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    said = r"set by hand, but the last training step stored none .*, or there was none: run a forward and"
    with pytest.raises(MegacompileError, match=said):
        optimizer.step()
    assert all(state["step"] == 0 for state in optimizer.state.values())
    model.megacompile.close()
    with pytest.raises(LeaseError, match="the model was closed since this loss was computed"):
        loss.backward()


def test_gradients_set_by_hand_after_a_whole_step_are_refused_since_its_update_reads_its_own() -> None:
    model = megacompile.stream(Model(), device="cpu", resident_state="all")
    optimizer = megacompile.AdamW(model.parameters())
    given = {name: tensor % 16 for name, tensor in batch(1).items()}
    model.megacompile.train_step(given, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(MegacompileError, match=r"last training step stored none .*or call zero_grad"):
        optimizer.step()
    optimizer.zero_grad()
    model(**given).backward()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert {state["step"] for state in optimizer.state.values()} == {2}


@pytest.mark.nightly(held_by="tests/model/test_refusals.py::test_a_model_that_cannot_be_streamed_is_refused_and_left_as_it_was")
def test_a_model_with_an_encoder_is_refused_with_the_reason() -> None:
    from transformers import T5Config, T5ForConditionalGeneration
    sizes = dict(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    with pytest.raises(CaptureError, match=r"has an encoder and a decoder, .*: use a model that is only a decoder"):
        megacompile.stream(T5ForConditionalGeneration(T5Config(**sizes)), device="cpu")


# ---------------------------------------------------------------- arguments of other types

@pytest.mark.parametrize(("layers", "shown"), [((), r"\(\)"), (5, "5"), (nn.ModuleList(), "ModuleList")], ids=str)
def test_layers_that_are_not_names_are_refused(layers: Any, shown: str) -> None:
    with pytest.raises(CaptureError, match=rf"layers must be the name of an nn.ModuleList, .* or several names, not {shown}"):
        megacompile.stream(Model(), device="cpu", layers=layers)


def test_an_example_without_names_is_refused() -> None:
    with pytest.raises(MegacompileError, match=r"example must give the model's arguments by name, .* not a Tensor"):
        megacompile.stream(Model(), device="cpu", example=torch.arange(4))  # type: ignore[arg-type]


def test_a_stage_that_no_pass_makes_is_refused_by_a_schedule() -> None:
    found = megacompile.schedule(Model(), batch=2, length=4, device="cpu")
    with pytest.raises(MegacompileError, match="unknown stage 'plce': choose one of model, micro_batch"):
        found.program("plce")


def test_a_whole_step_takes_named_arguments_and_an_optimizer_of_ours(untouched: Any) -> None:
    with pytest.raises(MegacompileError, match=r"train_step takes the model's arguments by name, .* not a Tensor"):
        untouched.megacompile.train_step(IDS, megacompile.AdamW(untouched.parameters()))
    with pytest.raises(MegacompileError, match=r"needs an optimizer of megacompile, not a SGD of torch.optim.sgd: make "
                                               r"megacompile.AdamW\("):
        untouched.megacompile.train_step(batch(1), torch.optim.SGD(untouched.parameters()))


def test_a_streamed_model_is_not_quantized(untouched: Any) -> None:
    with pytest.raises(MegacompileError, match="the layers of a streamed model cannot be replaced: call"):
        megacompile.quantize(untouched)
