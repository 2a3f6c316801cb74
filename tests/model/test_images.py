"""Encoders of images: any number of images per sequence, at places that differ from batch to batch."""
from __future__ import annotations

import copy
from typing import Any

import engine
import pytest
import torch
from tiny_models import assert_same_gradients
from torch import Tensor, nn

import megacompile
from megacompile.errors import CaptureError, UnsupportedError
from megacompile.frontend import capture
from megacompile.frontend.batches.split_rows import TRACED_ROWS

IMAGE, PATCHES, SIZE = 63, 4, 8


def gemma(attention: str = "eager", frozen: str = "") -> Any:
    """Full and sliding layers, whose window is shorter than an image. Trained is what has not `frozen` in its name."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, SiglipVisionConfig

    torch.manual_seed(0)
    vision = SiglipVisionConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                                image_size=SIZE, patch_size=2)
    text = Gemma3TextConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                            num_key_value_heads=1, head_dim=8, sliding_window=3, query_pre_attn_scalar=8,
                            layer_types=["sliding_attention", "full_attention"])
    config = Gemma3Config(vision_config=vision, text_config=text, image_token_id=IMAGE, mm_tokens_per_image=PATCHES)
    return disturbed(Gemma3ForConditionalGeneration._from_config(config, attn_implementation=attention).train(), frozen)


def llava(frozen: str = "") -> Any:
    """A model whose vision tower has more parameters than its decoder. Trained is what has not `frozen` in its name."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    vision = CLIPVisionConfig(hidden_size=16, intermediate_size=160, num_hidden_layers=1, num_attention_heads=2,
                              image_size=SIZE, patch_size=4, projection_dim=16)
    text = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                       num_key_value_heads=1)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1)
    return disturbed(LlavaForConditionalGeneration._from_config(config, attn_implementation="eager").train(), frozen)


def disturbed(model: Any, frozen: str) -> Any:
    """No weight at a value that makes its gradient, or another's, zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    return model


def pictured(rows: int, length: int, *numbers: int) -> dict[str, Tensor]:
    """Sequences with an image each, somewhere, or with `numbers` of them."""
    generator = torch.Generator().manual_seed(rows * 100 + length)
    ids = torch.randint(0, IMAGE, (rows, length), generator=generator)
    numbers = numbers or (1,) * rows
    for row, number in zip(ids, numbers, strict=True):
        for part in row.chunk(max(number, 1))[:number]:
            start = int(torch.randint(len(part) - PATCHES + 1, (), generator=generator))
            part[start:start + PATCHES] = IMAGE
    return {"input_ids": ids, "pixel_values": torch.randn(sum(numbers), 3, SIZE, SIZE, generator=generator),
            "labels": ids.masked_fill(ids == IMAGE, -100)}


def typed(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the types by which Gemma-3 lets the tokens of an image see each other."""
    return {**given, "token_type_ids": (given["input_ids"] == IMAGE).long()}


def assert_native(native: Any, streamed: Any, given: dict[str, Tensor]) -> None:
    for parameter in (*native.parameters(), *streamed.parameters()):
        parameter.grad = None
    loss = native(**{name: tensor for name, tensor in given.items() if len(tensor)}).loss
    loss.backward()
    ours = streamed(**given).loss
    ours.backward()
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
    for name, parameter in native.named_parameters():
        if name.endswith("k_proj.bias") and "vision" in name:
            parameter.grad = streamed.get_parameter(name).grad  # zero but for rounding: a bias of keys changes no softmax
        elif parameter.grad is None and (zeros := streamed.get_parameter(name).grad) is not None:
            assert not zeros.any(), f"{name} changes nothing"
            parameter.grad = torch.zeros_like(parameter)
    assert_same_gradients(streamed, native)


@pytest.mark.nightly(held_by=(
    "tests/model/test_images.py::test_a_place_takes_its_features_from_the_images_of_its_own_row",
    "tests/model/test_patches.py::test_images_of_any_size_train_as_they_do_natively"))
def test_images_train_as_they_do_natively_wherever_they_are() -> None:
    """The tower and the decoder, in micro-batches, at other sizes than those of the example."""
    native = llava()
    model = megacompile.stream(copy.deepcopy(native), device="cpu", micro_batch_size=2, example=pictured(2, 12))
    captured = engine.captured(model)
    assert captured.layer_names == ("model.language_model.layers.0", "model.language_model.layers.1")
    assert captured.fused_attention, "the tower's attention, which is not causal, is its own"
    assert not captured.guards, "any number of images"
    assert_native(native, model, pictured(5, 19))
    assert model.megacompile.plan.micro_batches == (2, 2, 1)
    given = {name: tensor for name, tensor in pictured(1, 9).items() if name != "labels"}
    with torch.no_grad():
        torch.testing.assert_close(model(**given).logits, native(**given).logits, rtol=1e-4, atol=1e-5)
    refused = pictured(4, 19)
    without = {**refused, "input_ids": refused["input_ids"].clone()}
    without["input_ids"][1] = 5  # and its image is still there
    two = {**refused, "input_ids": refused["input_ids"].clone()}
    two["input_ids"][2, :] = IMAGE
    for other, message in (
            (without, "pixel_values has 4 images, but the batch's sequences have placeholders for 3"),
            (two, "sequence 2 of the batch has 19 placeholder tokens for images, and one image needs 4"),
            ({**refused, "pixel_values": torch.zeros(4, 3, 8, 12)}, r"pixel_values must be a tensor \[batch, 3, 8, 8\]"),
            ({name: t for name, t in refused.items() if name != "pixel_values"}, "has 0 images")):
        with pytest.raises(UnsupportedError, match=message):
            model(**other)
    model.megacompile.close()


@pytest.mark.nightly(held_by=(
    "tests/model/test_images.py::test_a_place_takes_its_features_from_the_images_of_its_own_row",
    "tests/model/test_pairs.py::test_a_mask_goes_through_gradients_logits_and_whole_steps"))
def test_the_tokens_of_an_image_see_each_other() -> None:
    """In layers with a window shorter than an image, too; of sequences with an image and without, in micro-batches."""
    native = gemma()
    model = megacompile.stream(copy.deepcopy(native), device="cpu", micro_batch_size=2, example=typed(pictured(2, 12)))
    captured = engine.captured(model)
    assert captured.fused_attention and not captured.causal and not captured.guards
    given = typed(pictured(4, 19, 1, 0, 1, 1))
    assert_native(native, model, given)
    with torch.no_grad():
        seen = native(**given).loss
        assert abs(float(native(**{**given, "token_type_ids": torch.zeros_like(given["input_ids"])}).loss - seen)) > 1e-4
    model.megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_patches.py::test_images_of_any_size_train_as_they_do_natively")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("frozen", ["", "vision_tower", "language_model"])
def test_gemma_trains_as_it_does_natively(attention: str, frozen: str) -> None:
    """Several images in a row, padding on either side, images of the whole batch at one end, a batch without any."""
    native = gemma(attention, frozen)
    model = megacompile.stream(copy.deepcopy(native), device="cpu", micro_batch_size=2, example=typed(pictured(2, 12)))
    plain = pictured(3, 17)
    real = (torch.arange(17) < torch.tensor([17, 15, 16])[:, None]) & (plain["input_ids"] != IMAGE)
    for mask in (real | (plain["input_ids"] == IMAGE), real.flip(1) | (plain["input_ids"] == IMAGE)):
        padded = {**plain, "attention_mask": mask.long(), "labels": plain["labels"].masked_fill(~mask, -100)}
        assert_native(native, model, typed(padded))
    for numbers in ((2, 2), (0, 4, 1, 0, 3), (1,), (0, 0, 3), *([(0, 0)] if frozen != "language_model" else [])):
        assert_native(native, model, typed(pictured(len(numbers), 19, *numbers)))
    model.megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_patches.py::test_images_of_any_size_train_as_they_do_natively")
@pytest.mark.parametrize("further", [("token_type_ids",), ("attention_mask", "token_type_ids")])
def test_gemma_trains_on_text_alone(further: tuple[str, ...]) -> None:
    native = gemma()
    model = megacompile.stream(copy.deepcopy(native), device="cpu")
    ids = torch.randint(0, IMAGE, (3, 9))
    said = {"attention_mask": torch.ones_like(ids), "token_type_ids": (torch.arange(9) > 4).long().expand(3, 9)}
    assert_native(native, model, {"input_ids": ids, "labels": ids, **{name: said[name] for name in further}})
    model.megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_patches.py::test_images_of_any_size_train_as_they_do_natively")
@pytest.mark.parametrize("frozen", ["vision_tower", "language_model"])
def test_a_part_alone_trains_as_it_does_natively(frozen: str) -> None:
    native = llava(frozen)
    model = megacompile.stream(copy.deepcopy(native), device="cpu", micro_batch_size=2, example=pictured(2, 12))
    assert_native(native, model, pictured(5, 19))
    model.megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_patches.py::test_images_of_any_size_train_as_they_do_natively")
def test_a_model_of_images_trains_on_text_alone() -> None:
    native = llava()
    model = megacompile.stream(copy.deepcopy(native), device="cpu")
    assert_native(native, model, {"input_ids": (ids := torch.randint(0, IMAGE, (3, 9))), "labels": ids})
    model.megacompile.close()


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(super().forward(x))


class Described(nn.Module):
    """`way`: what the model does with a list of its images' features."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.encoder, self.embed, self.head = nn.Linear(8, 8), nn.Embedding(64, 8), nn.Linear(8, 64)
        self.layers = nn.ModuleList(Layer(8, 8) for _ in range(2))

    def forward(self, input_ids: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        features = list(self.encoder(images))
        if self.way == "backwards":
            features = features[::-1]
        if self.way == "by number":
            features = [each * (i + 1) for i, each in enumerate(features)]
        x = self.embed(input_ids)
        x = x.masked_scatter((input_ids == IMAGE).unsqueeze(-1), torch.cat(features))
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["backwards", "by number"])
def test_a_list_of_images_that_is_more_than_joined_is_refused(way: str) -> None:
    given = pictured(3, 12)
    example = {"input_ids": given["input_ids"], "images": torch.zeros(3, PATCHES, 8), "labels": given["input_ids"]}
    with pytest.raises(CaptureError, match="does more than join the list of its images' features"):
        capture(Described(way), example=example)


def test_images_of_another_shape_than_one_per_sequence_are_refused() -> None:
    """Patches of all images in one row of their own, as Qwen-VL has them."""
    given = pictured(3, 12)
    with pytest.raises(CaptureError, match=r"images is torch.float32 of shape \[48, 8\].* one image \[batch, ...\]"):
        capture(Described("joined"), example={"input_ids": given["input_ids"], "images": torch.zeros(48, 8),
                                              "labels": given["labels"]})


@pytest.mark.nightly(held_by="tests/model/test_images.py::test_a_place_takes_its_features_from_the_images_of_its_own_row")
def test_a_batch_with_as_many_rows_as_traced_images_trains_too() -> None:
    given = pictured(TRACED_ROWS, 12)
    given["images"] = torch.randn(TRACED_ROWS, PATCHES, 8)
    del given["pixel_values"]
    model = Described("joined")
    loss = model(**given)
    streamed = megacompile.stream(model, device="cpu", example={name: t[:3] for name, t in given.items()}, micro_batch_size=4)
    torch.testing.assert_close(streamed(**given), loss, rtol=1e-6, atol=0)
    streamed.megacompile.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("numbers", [(0, 2, 1, 0, 3), (0, 1, 1)])
def test_a_place_takes_its_features_from_the_images_of_its_own_row(numbers: tuple[int, ...]) -> None:
    """In micro-batches, whose images are as many as their rows have, in the order of the batch."""
    given = pictured(len(numbers), 17, *numbers)
    given["images"] = torch.randn(sum(numbers), PATCHES, 8)
    del given["pixel_values"]
    native = Described("joined")
    loss = native(**given)
    loss.backward()
    streamed = megacompile.stream(copy.deepcopy(native), device="cpu", micro_batch_size=2,
                                  example={name: t[:2] for name, t in given.items()})
    ours = streamed(**given)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
    ours.backward()
    assert_same_gradients(streamed, native)
    streamed.megacompile.close()
