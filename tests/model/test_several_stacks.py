"""Decoders of several lists of layers, and layers that run more than once, train exactly."""
from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import engine
import pytest
import torch
import torch.nn.functional as F
from models import VOCABULARY, batch
from torch import Tensor, nn

import megacompile
from megacompile.errors import CaptureError
from megacompile.frontend import capture
from megacompile.frontend.tracing.layers import find_layers

WIDTH = 16


class Layer(nn.Module):
    """Reads the token before each, and, where it is given some, what an encoder has made."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.up, self.down, self.passes = nn.Linear(2 * WIDTH, width), nn.Linear(width, WIDTH), 0

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        before = F.pad(x, (0, 0, 1, 0))[:, :-1] if encoded is None else encoded
        return x + self.down(torch.tanh(self.up(torch.cat([x, before], -1)))) * (1 + self.passes)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.through(self.tokens(input_ids)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def through(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def layers(count: int, width: int = 24) -> nn.ModuleList:
    return nn.ModuleList(Layer(width) for _ in range(count))


class UShaped(Decoder):
    """Each layer of the second half adds what its partner in the first half has made."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.gates = layers(2), layers(2, 32), nn.Parameter(torch.linspace(0.5, 1, 2))

    def through(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
        for gate, layer in zip(self.gates, self.up, strict=True):
            x = layer(x + gate * kept.pop())
        return x


class Part(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers, self.norm = layers(2, width), nn.LayerNorm(WIDTH)


class Decoding(Part):
    pass


class EncoderDecoder(Decoder):
    """The encoder's output feeds every layer of the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Part(24), Decoding(32)

    def through(self, x: Tensor) -> Tensor:
        encoded = x
        for layer in self.encoder.layers:
            encoded = layer(encoded)
        encoded = self.encoder.norm(encoded)
        for layer in self.decoder.layers:
            x = layer(x, encoded)
        return self.decoder.norm(x)


class Interleaved(Decoder):
    """A layer of one list, a layer of the other; at the end one of their class that is in none. The lists are stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stages, self.last = nn.ModuleList([layers(2), layers(2, 32)]), Layer()

    def through(self, x: Tensor) -> Tensor:
        for one, other in zip(*self.stages, strict=True):
            x = other(one(x))
        return self.last(x)


class Looped(Decoder):
    """Layers that run three times, in a way that depends on which; two share a matrix, and of the first runs nobody wants a
    gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.scale = layers(3), nn.Parameter(torch.full((WIDTH,), 0.9))
        self.blocks[2].down = self.blocks[0].down

    def through(self, x: Tensor) -> Tensor:
        embedded = x
        for number in range(3):
            with torch.set_grad_enabled(number > 0):
                for block in self.blocks:
                    block.passes = number % 2
                    x = block(x)
                x = x * self.scale
            x = x + embedded
        return x


class Shared(Decoder):
    """One layer that is every item of its list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Layer()] * 3)

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


#: Models, the lists that are named, and how layers are called.
MODELS: dict[type[Decoder], tuple[tuple[str, ...] | None, str]] = {
    UShaped: (None, "down.0 down.1 up.0 up.1"),
    EncoderDecoder: (("encoder.layers", "decoder.layers"),
                     "encoder.layers.0 encoder.layers.1 decoder.layers.0 decoder.layers.1"),
    Interleaved: (None, "stages.0.0 stages.1.0 stages.0.1 stages.1.1 last"),
    Looped: (None, "blocks.0 blocks.1 blocks.2 blocks.0@2 blocks.1@2 blocks.2@2 blocks.0@3 blocks.1@3 blocks.2@3"),
    Shared: (None, "blocks.0 blocks.0@2 blocks.0@3"),
}
FROZEN = ("tokens", "down.0", "blocks.0")
Named = dict[str, Tensor]


def built(model_class: type[Decoder], frozen: tuple[str, ...] = ()) -> Any:
    torch.manual_seed(0)
    model = model_class()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    return model


def streamed(model: nn.Module, **options: Any) -> Any:
    return megacompile.stream(model, layers=MODELS[type(model)][0], device="cpu",  # type: ignore[index]
                              **{"checkpoint_interval": 2, "micro_batch_size": 2, **options})


def gradients_of(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Named]:
    loss = model(**inputs)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), found


def assert_gradients(ours: tuple[Tensor, Named], native: tuple[Tensor, Named]) -> None:
    torch.testing.assert_close(ours[0], native[0], rtol=1e-6, atol=0)
    assert native[1].keys() <= ours[1].keys()
    for name, gradient in ours[1].items():
        expected = native[1].get(name, torch.zeros_like(gradient))
        assert (gradient - expected).norm() <= 1e-5 * expected.norm(), name


@pytest.mark.parametrize(("model_class", "frozen"), [
    (Looped, False), (UShaped, True),
    *(pytest.param(each, frozen, marks=pytest.mark.nightly) for each, frozen in (
        (UShaped, False), (EncoderDecoder, False), (Interleaved, False), (Shared, False), (Looped, True)))])
def test_loss_gradients_and_steps_in_waves_are_native_ones(model_class: type[Decoder], frozen: bool) -> None:
    native = built(model_class, FROZEN if frozen else ())
    model = streamed(copy.deepcopy(native))
    names = [call.name for call in engine.captured(model).calls]
    assert names[1:-1] == MODELS[model_class][1].split()
    assert_gradients(gradients_of(model, batch(5, 29)), gradients_of(native, batch(5, 29)))
    model.megacompile.replan(micro_batch_size=1, waves=3, checkpoint_interval=None)
    ours, theirs = megacompile.AdamW(model.parameters(), lr=1e-2, eps=1e-4), torch.optim.AdamW(native.parameters(), lr=1e-2,
                                                                                            eps=1e-4)
    for step in range(3):
        model.megacompile.train_step(batch(4, 11 + step), ours)
        native(**batch(4, 11 + step)).backward()
        theirs.step()
        theirs.zero_grad()
    model.megacompile.synchronize()
    for (name, p), (_, q) in zip(model.named_parameters(), native.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6, msg=name)
    model.megacompile.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [
    {"overlap": "backward"}, {"micro_batch_size": 1, "waves": 2, "host_sums": "all"}, {"resident_state": ("blocks.0", "tied")},
    {"visiting_state": "all"}, {"checkpoint_interval": 4, "host_checkpoints": True}], ids=str)
def test_every_way_to_train_gives_looped_layers_the_same_weights(options: dict[str, Any], looped: tuple[Any, Named]) -> None:
    """Against the plain loop of the fixture: bits, or where sums of waves are rounded otherwise, nearly."""
    model, expected = looped
    options, overlap = dict(options), options.get("overlap")
    options.pop("overlap", None)
    weights = trained(model, overlap, **options)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.fixture(scope="module")
def looped() -> Any:
    model = streamed(built(Looped))
    yield model, trained(model)
    model.megacompile.close()


def trained(model: Any, overlap: str | None = None, **options: Any) -> Named:
    """Weights after two steps of a model that begins again."""
    model.load_state_dict(built(Looped).state_dict())
    model.megacompile.replan(**{"checkpoint_interval": None, "micro_batch_size": 2, "waves": None, "host_sums": None,
                                "resident": (), "resident_state": None, "visiting_state": None, "host_checkpoints": None,
                                **options})
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, eps=1e-4, **({"overlap": overlap} if overlap else {}))
    for step in range(2):
        model.megacompile.train_step(batch(4, 9 + step), optimizer)
    model.megacompile.synchronize()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_a_looped_model_is_saved_by_its_own_names_and_loaded(looped: tuple[Any, Named], tmp_path: Path) -> None:
    model, _ = looped
    trained(model)
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
    model.megacompile.train_step(batch(4, 9), optimizer)
    saved = megacompile.save_checkpoint(tmp_path, model, optimizer)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert weights.keys() == built(Looped).state_dict().keys()
    model.megacompile.train_step(batch(4, 9), optimizer)
    model.megacompile.synchronize()
    assert not torch.equal(model.blocks[0].up.weight, weights["blocks.0.up.weight"])
    megacompile.load_checkpoint(saved, model, optimizer)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


@pytest.mark.nightly(held_by=(
    "tests/model/test_several_stacks.py::test_loss_gradients_and_steps_in_waves_are_native_ones",
    "tests/model/test_adapters.py::test_a_model_whose_adapters_are_switched_off_is_its_base_and_trains_on_afterwards"))
def test_an_adapter_on_one_of_two_lists_trains_and_is_switched_off() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=r"up\.\d\.(up|down)", init_lora_weights=False)
    torch.manual_seed(0)
    native = peft.get_peft_model(UShaped(), config)
    model = megacompile.stream(copy.deepcopy(native), device="cpu", micro_batch_size=2)
    captured = engine.captured(model)
    assert captured.stacks == ("base_model.model.down", "base_model.model.up")
    assert_gradients(gradients_of(model, batch(3, 11)), gradients_of(native, batch(3, 11)))
    with torch.no_grad(), model.disable_adapter(), native.disable_adapter():
        torch.testing.assert_close(model(**batch(3, 11)), native(**batch(3, 11)))
    model.megacompile.close()


class Heads(Decoder):
    """Embeddings and heads in lists as large as the layers, and an encoder of another class: not streamed unless named."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.tower = layers(2), Part(20)
        self.embeddings = nn.ModuleList(nn.Embedding(VOCABULARY, WIDTH) for _ in range(3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        self.ids = input_ids
        return super().forward(input_ids, labels)

    def through(self, x: Tensor) -> Tensor:
        x = x + sum(embedding(self.ids) for embedding in self.embeddings)
        for layer in (*self.tower.layers, *self.blocks):
            x = layer(x)
        return x


@pytest.mark.nightly(held_by=(
    "tests/model/test_several_stacks.py::test_loss_gradients_and_steps_in_waves_are_native_ones",
    "tests/model/test_several_stacks.py::test_lists_are_declared_for_a_class"))
def test_unnamed_lists_that_form_a_chain_are_streamed_and_reported() -> None:
    assert find_layers(Heads(), None).paths == ("blocks", "embeddings")
    assert find_layers(EncoderDecoder()).paths == ("decoder.layers",), "parts of other classes stay where they are"
    text = megacompile.explain_capture(UShaped(), device="cpu")
    assert "4 layers in down and up, " in text and "other lists of modules" not in text
    text = megacompile.explain_capture(Looped(), device="cpu")
    assert "3 layers in blocks, some more than once (6 calls again)" in text
    assert "tile blocks.1 is read by blocks.1, blocks.1@2, blocks.1@3: one gradient, one update" in text


def test_lists_are_declared_for_a_class() -> None:
    declared = megacompile.layer_stack("encoder.layers", "decoder.layers")(type("Declared", (EncoderDecoder,), {}))
    assert find_layers(declared()).names == tuple(MODELS[EncoderDecoder][1].split())
    megacompile.register_layers(declared, ["decoder.layers"])
    assert find_layers(declared()).paths == ("decoder.layers",)


def through(body: Any) -> type[Decoder]:
    return type("Model", (UShaped,), {"through": body})


def in_place(self: Any, x: Tensor) -> Tensor:
    for layer in (*self.down, *self.up):
        with torch.no_grad():
            x = layer(x)
            x += 1
    return x


def selects(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = self.down[0](x)
    x = self.up[1](self.up[0](self.down[1](x)))
    return x[x > 0].sum() + x


class Constant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Empty(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Constant(), Constant()])

    def through(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


class Inside(Shared):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].inner = layers(1)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("model_class", "named", "message"), [
    (Inside, ("blocks", "blocks.0.inner"), r'"blocks\.0\.inner" is inside "blocks", whose items are whole layers: name'),
    (through(lambda self, x: self.up[1](self.up[0](x))), ("down", "up"),
     r'down\.0 is not called in a forward \(called: up\.0, up\.1\): take it out of its list, or pass layers=\(\.\.\.\) '
     r'with the lists whose layers are called \(the model has no other list\)'),
    (through(lambda self, x: self.down[1](self.down[0](x))), "up",
     r'up\.0 is not called in a forward \(called: down\.0, down\.1\): .*are called \(other lists: "down"\)'),
    (Empty, "blocks", r"a layer of blocks is called that has no parameters, so that calls cannot be told apart"),
    (through(selects), None, r"makes a tensor whose size depends on values \(getitem\): .*\nfrom source: .*x\[x > 0\]"),
    (through(in_place), None, r"runs layers under torch\.no_grad\(\) changes a value in place there: make a new value"),
], ids=["inside", "idle", "another", "no weights", "sizes", "in place"])
def test_lists_and_calls_that_cannot_be_streamed_are_refused(model_class: type[Decoder], named: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(model_class(), layers=named)


class EvaluatesLonger(Looped):
    """Runs its layers more often in evaluation mode."""

    def through(self, x: Tensor) -> Tensor:
        for _ in range(1 if self.training else 2):
            for block in self.blocks:
                x = block(x)
        return x


@pytest.mark.nightly(held_by=(
    "tests/model/test_several_stacks.py::test_lists_and_calls_that_cannot_be_streamed_are_refused",
    "tests/model/test_honored.py::test_a_model_that_differs_in_evaluation_mode_is_evaluated_as_it_is_there"))
def test_another_number_of_runs_in_evaluation_mode_is_refused_and_training_goes_on() -> None:
    model = megacompile.stream(EvaluatesLonger(), device="cpu")
    model.eval()
    with pytest.raises(megacompile.errors.UnsupportedError, match="reads its weights in other layers"), torch.no_grad():
        model(**batch(3, 11))
    model.train()
    model(**batch(3, 11)).backward()
    model.megacompile.close()


class Translates(nn.Module):
    """A sequence-to-sequence model of transformers, its loss and logits alone."""

    def __init__(self) -> None:
        from transformers import T5Config, T5ForConditionalGeneration

        super().__init__()
        self.inner = T5ForConditionalGeneration(T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=8, num_heads=2, num_layers=1, d_ff=24, dropout_rate=0.0, pad_token_id=0,
            decoder_start_token_id=0))

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out = self.inner(input_ids=input_ids, labels=labels, attention_mask=attention_mask)
        return out.loss, out.logits


@pytest.mark.nightly(held_by="tests/model/test_several_stacks.py::test_loss_gradients_and_steps_in_waves_are_native_ones")
def test_encoder_and_decoder_of_a_sequence_to_sequence_model_stream_with_padding_or_without() -> None:
    torch.manual_seed(0)
    native = Translates().train()
    model = megacompile.stream(copy.deepcopy(native), layers=("inner.encoder.block", "inner.decoder.block"), device="cpu",
                               micro_batch_size=2)
    for padded in (False, True):
        inputs = batch(3, 11)
        if padded:
            inputs["attention_mask"] = (torch.arange(11) < torch.tensor([[11], [7], [4]])).long()
        found = []
        for each in (model, native):
            loss, _ = each(**inputs)
            loss.backward()
            found.append((loss.detach(), {name: p.grad.clone() for name, p in each.named_parameters()}))
            each.zero_grad()
        assert_gradients(*found)
    model.megacompile.close()
