"""What the plain model on the device computes: logits as exact as the unstreamed model's, and the same tokens from compiled and
from quantized layers."""
from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import device_copies
import peft
import pytest
import tiny_models
import torch
from tiny_models import batch
from torch import Tensor, fx, nn
from transformers import CompileConfig

import megacompile
from megacompile.weights.codes import QuantizedLinear

LAYERS = 4
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}


# ---------------------------------------------------------------- bf16
@pytest.fixture(scope="module")
def half() -> Iterator[Any]:
    model = megacompile.stream(build_half(), device="cpu")
    yield model
    model.megacompile.close()


def build_half() -> Any:
    """Wide enough that errors of single logits average out. Weights large enough that each layer matters."""
    return tiny_models.build(bf16=True, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS,
                             initializer_range=0.2).eval()


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    """[batches, rows, length, vocabulary], fp32, of full rows and of rows padded on the left and on the right."""
    ids, mask = batch(3, rows=8, length=24)["input_ids"], torch.ones(8, 24, dtype=torch.long)
    mask[::2, :5] = 0
    found = [model(input_ids=each).logits for each in (ids, batch(4, rows=8, length=24)["input_ids"])]
    found += [model(input_ids=ids, attention_mask=each).logits * each[..., None] for each in (mask, mask.flip(1))]
    return torch.stack(found).float()


def further(model: nn.Module) -> float:
    """How many times as far as the unstreamed bf16 model's logits these are from those of the same weights in fp32."""
    exact = logits(build_half().float())
    return float((logits(model) - exact).norm() / (logits(build_half()) - exact).norm())


def test_logits_of_a_bf16_copy_are_no_further_from_fp32_than_the_unstreamed_models(half: Any) -> None:
    with half.megacompile.on_device() as native:
        assert device_copies.turning(half) == 0 and further(native) <= 1


@pytest.mark.parametrize("staying", [0, 1])
def test_logits_of_bf16_layers_that_take_turns_are_no_further_from_fp32_than_the_unstreamed_models(
        staying: int, half: Any) -> None:
    more = device_copies.bytes_beside(half, staying)
    with half.megacompile.on_device(in_turns=True, more_bytes=more) as native:
        assert device_copies.turning(half) == LAYERS - staying and further(native) <= 1
    half.megacompile.device_copy.release()


@pytest.mark.nightly(held_by=(
    "tests/model/test_device_copy_values.py::test_logits_of_a_bf16_copy_are_no_further_from_fp32_than_the_unstreamed_models",
    "tests/model/test_frontend_parity.py::test_bf16_gradients_are_as_close_to_fp32_as_native_bf16_is"))
def test_logits_of_a_streamed_bf16_forward_are_no_further_from_fp32_than_the_unstreamed_models(half: Any) -> None:
    """Its attention adds in another order, so that the two errors are not equal."""
    half.megacompile.device_copy.release()
    assert further(half) <= 1


def test_logits_are_told_from_those_of_a_wrong_weight(half: Any) -> None:
    """The measure of the tests above sees one matrix that was not copied."""
    with half.megacompile.on_device() as native, torch.no_grad():
        right = native.model.layers[2].mlp.up_proj.weight.clone()
        native.model.layers[2].mlp.up_proj.weight.zero_()
        assert further(native) > 2
        native.model.layers[2].mlp.up_proj.weight.copy_(right)


# ---------------------------------------------------------------- compiled generation
@pytest.mark.nightly(held_by=(
    "tests/model/test_device_copy.py::test_generation_is_that_of_the_plain_model",
    "tests/model/test_device_copy.py::test_it_is_the_plain_class_with_the_weights_of_the_last_step"))
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_generation_with_a_static_cache_gives_eager_tokens_after_every_step(fullgraph: bool) -> None:
    """transformers compiles the tokens after the first where the device is a GPU, or if it is told to."""
    graphs, calls = list[fx.GraphModule](), list[int]()

    def counted(graph: fx.GraphModule, *_: Any, **__: Any) -> Any:
        graphs.append(graph)

        def call(*inputs: Any) -> Any:
            calls.append(len(graphs))
            return graph(*inputs)

        return call

    how = CompileConfig(fullgraph=fullgraph, backend=counted)
    how._compile_all_devices = True
    model = megacompile.stream(tiny_models.build(num_hidden_layers=2).eval(), device="cpu")
    optimizer = megacompile.AdamW(model.parameters(), lr=3e-2)
    prompt, tokens, kept = batch(4, 3, 7)["input_ids"], [], set()
    for seed in range(3):
        calls.clear()
        tokens.append(model.generate(prompt, **OPTIONS, cache_implementation="static", compile_config=how))
        assert graphs and len(calls) >= OPTIONS["max_new_tokens"] - 1, "nothing was compiled"
        assert torch.equal(tokens[-1], copy.deepcopy(model).eval().generate(prompt, **OPTIONS))
        kept.add(id(model.megacompile.device_copy.native))
        model.train()
        model.megacompile.train_step(batch(seed), optimizer)
        model.eval()
    assert len(kept) == 1, "the compiled model was refreshed, not made anew"
    assert not torch.equal(tokens[0], tokens[-1]), "training changes tokens"
    model.megacompile.close()


# ---------------------------------------------------------------- quantized weights
@pytest.fixture(scope="module", params=["nf4", pytest.param("int8", marks=pytest.mark.nightly)])
def quantized(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A streamed model of quantized layers under an adapter that has an effect."""
    plain = tiny_models.build(hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, initializer_range=0.2)
    adapter = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(plain, adapter, autocast_adapter_dtype=False)
    model = megacompile.stream(megacompile.quantize(model, request.param), device="cpu")
    yield model
    model.megacompile.close()


def dequantized(model: Any) -> Any:
    """The same model, unstreamed, with ordinary layers."""
    plain = megacompile.dequantize(copy.deepcopy(model), torch.float32).eval()
    assert not any(isinstance(module, QuantizedLinear) for module in plain.modules())
    return plain


@pytest.mark.nightly(held_by=(
    "tests/model/test_quantized.py::test_a_streamed_quantized_model_generates_what_it_generates_unstreamed",
    "tests/model/test_device_copy.py::test_turns_use_the_weights_of_the_last_step"))
@pytest.mark.parametrize("staying", [None, 1, 0], ids=["all stay", "some take turns", "all take turns"])
def test_a_copy_of_quantized_layers_generates_the_tokens_of_the_dequantized_model_after_every_step(
        staying: int | None, quantized: Any) -> None:
    optimizer = megacompile.AdamW([p for p in quantized.parameters() if p.requires_grad], lr=3e-2)
    prompt, tokens = batch(4, 3, 7)["input_ids"], []
    for seed in range(2):
        quantized.train()
        quantized.megacompile.train_step(batch(seed), optimizer)
        quantized.eval()
        plain = dequantized(quantized)
        more = {} if staying is None else dict(in_turns=True, more_bytes=device_copies.bytes_beside(quantized, staying))
        with quantized.megacompile.on_device(**more) as native, torch.no_grad():
            assert device_copies.turning(quantized) == (0 if staying is None else LAYERS - staying)
            assert sum(isinstance(module, QuantizedLinear) for module in native.modules()) == 7 * LAYERS
            tokens.append(native.generate(input_ids=prompt, **OPTIONS))
            torch.testing.assert_close(native(prompt).logits, plain(prompt).logits)
        assert torch.equal(tokens[-1], plain.generate(input_ids=prompt, **OPTIONS))
        assert torch.equal(tokens[-1], quantized.generate(input_ids=prompt, **OPTIONS))
    quantized.megacompile.device_copy.release()
