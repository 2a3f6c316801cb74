"""Images of any size, as Qwen-VL takes them: patches of all images in one row, sizes, and positions of three axes."""
from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine
import pytest
import torch
from test_images import disturbed
from tiny_models import assert_same_gradients, build
from torch import Tensor, nn

import megacompile
from megacompile.errors import CaptureError, UnsupportedError
from megacompile.frontend import capture
from megacompile.frontend.batches.images import install_encoders, refuse_adapters, survey
from megacompile.frontend.ops import patch_encoder
from megacompile.frontend.ops.patch_encoder import PatchEncoder
from megacompile.predict import cost

IMAGE, VIDEO, MERGE, PATCH = 63, 62, 2, 24
Sizes = list[tuple[int, int, int]]
EXAMPLE: tuple[Sizes, ...] = ([(1, 2, 3)], [(1, 1, 2), (1, 3, 2)], [])
TOWER = dict(depth=2, hidden_size=16, intermediate_size=24, num_heads=2, patch_size=2, out_hidden_size=16,
             temporal_patch_size=2, spatial_merge_size=MERGE)
TEXT = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, head_dim=8,
            num_key_value_heads=1, rope_parameters=dict(rope_type="default", mrope_section=[2, 1, 1], rope_theta=10000.0),
            bos_token_id=None, eos_token_id=None)


def qwen(frozen: str = "", family: str = "Qwen2_5_VL") -> Any:
    """Trained is what has not `frozen` in its name."""
    import transformers

    torch.manual_seed(0)
    further: dict[str, Any] = {
        "Qwen2_5_VL": dict(window_size=8, fullatt_block_indexes=[1]),
        "Qwen2VL": dict(embed_dim=16, mlp_ratio=2),
        "Qwen3VL": dict(num_position_embeddings=16, deepstack_visual_indexes=[0])}[family]
    config = getattr(transformers, f"{family}Config")(vision_config=TOWER | further, text_config=TEXT, image_token_id=IMAGE,
                                                      video_token_id=VIDEO, vision_start_token_id=61)
    model = getattr(transformers, f"{family}ForConditionalGeneration")._from_config(config, attn_implementation="sdpa")
    return disturbed(model.train(), frozen)


def pictured(length: int, *rows: Sizes, token: int = IMAGE) -> dict[str, Tensor]:
    """Sequences with images of (frames, height, width), in features, somewhere; or with videos."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, 60, (len(rows), length), generator=generator)
    sizes = torch.tensor([size for row in rows for size in row], dtype=torch.long).reshape(-1, 3)
    for row, images in zip(ids, rows, strict=True):
        at = 1
        for frames, height, width in images:
            row[at:at + frames * height * width] = token
            at += frames * height * width + 1
        assert at <= length, "too many images for the length"
    patches = torch.randn(int(sizes.prod(1).sum()) * MERGE**2, PATCH, generator=generator)
    given = {"input_ids": ids, "labels": ids.masked_fill(ids == token, -100),
             "mm_token_type_ids": (ids == token).int() * (1 if token == IMAGE else 2)}
    names = ("pixel_values", "image_grid_thw") if token == IMAGE else ("pixel_values_videos", "video_grid_thw")
    return given | (dict(zip(names, (patches, sizes * torch.tensor([1, MERGE, MERGE])), strict=True)) if len(sizes) else {})


def streamed(native: Any, **options: Any) -> Any:
    return megacompile.stream(copy.deepcopy(native), device="cpu", micro_batch_size=2, **{"example": pictured(19, *EXAMPLE),
                                                                                         **options})


def assert_native(native: Any, model: Any, given: dict[str, Tensor]) -> None:
    for parameter in (*native.parameters(), *model.parameters()):
        parameter.grad = None
    loss = native(**given, use_cache=False).loss  # with a cache, transformers looks for no sequences within a row
    loss.backward()
    ours = model(**given).loss
    ours.backward()
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
    for name, parameter in native.named_parameters():
        if parameter.grad is None and (zeros := model.get_parameter(name).grad) is not None:
            assert not zeros.any(), f"{name} changes nothing"
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None and name.endswith("k_proj.bias"):
            parameter.grad = model.get_parameter(name).grad  # zero but for rounding: a bias of keys changes no softmax
    assert_same_gradients(model, native)


def test_images_of_any_size_train_as_they_do_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tower and the decoder, in micro-batches, at another batch and length; images encoded together and one by one; text
    alone; positions of the model's own and of the caller's."""
    native = qwen()
    model = streamed(native)
    captured = engine.captured(model)
    assert captured.fused_attention and captured.causal and not captured.guards, "of any size"
    given = pictured(23, [], [(1, 1, 2), (1, 3, 2)], [(1, 4, 4)], [(1, 2, 2)], [(1, 1, 1), (1, 1, 1), (1, 2, 3)])
    assert_native(native, model, given)
    assert model.megacompile.plan.micro_batches == (2, 2, 1)
    assert_native(native, model, pictured(23, [], [], [], [], []))
    monkeypatch.setattr(patch_encoder, "PATCHES_AT_ONCE", 20)
    positions = torch.randint(0, 30, (3, 5, 23))
    assert_native(native, model, {**given, "position_ids": positions})

    forward, backward = captured.patches[0].encoder.held_bytes
    assert 0 < forward < backward
    prologue = captured.templates["prologue"]
    taken = cost.peak_bytes(prologue, prologue.variant("recompute_backward"), 2, 50)
    assert taken > 50 * MERGE**2 * backward, "every token may be of an image"

    with pytest.raises(UnsupportedError, match="pass position_ids with a mask of pairs of tokens"):
        model(**given, attention_mask=torch.ones(5, 1, 23, 23, dtype=torch.bool))
    cut = {**given, "input_ids": given["input_ids"].clone()}
    cut["input_ids"][3, 2] = 5
    few = {**given, "image_grid_thw": given["image_grid_thw"][:-1]}
    for other, message in (
            (cut, "sequence 3 of the batch has 3 placeholders for features, which do not match whole images"),
            (few, "pixel_values has 144 patches, but image_grid_thw calls for 120: pass all patches of every image"),
            ({**few, "pixel_values": given["pixel_values"][:120]}, "sequence 4 of the batch has 8 placeholders"),
            ({**pictured(23, [(1, 1, 2)]), **{name: given[name] for name in ("pixel_values", "image_grid_thw")}},
             "image_grid_thw calls for 36 features, but the batch's sequences have placeholders for 2"),
            ({**given, "pixel_values": torch.zeros(144, 8)}, r"pixel_values must be a tensor \[patches of all images, 24\]"),
            ({**given, "position_ids": positions[:2]}, r"position_ids must be a tensor \[3, 5, 23\]")):
        with pytest.raises(UnsupportedError, match=message):
            model(**other)
    model.megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_patches.py::test_images_of_any_size_train_as_they_do_natively")
@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen2VL", "Qwen3VL"])
@pytest.mark.parametrize("frozen", ["visual", "language_model", "blocks"])
def test_a_part_alone_trains_as_it_does_natively(family: str, frozen: str) -> None:
    """The decoder, the tower, or what joins them; of Qwen3-VL with features for the decoder's first layers as well."""
    native = qwen(frozen, family)
    model = streamed(native)
    assert_native(native, model, pictured(23, [], [(1, 1, 2), (1, 3, 2)], [(1, 4, 4)]))
    model.megacompile.close()


def test_the_estimate_of_an_evaluation_holds_the_tower() -> None:
    model = streamed(qwen())
    executable = model.megacompile.compiled(pictured(23, [], [(1, 1, 2)], [(1, 4, 4)]), training=False)
    captured = engine.captures(model).serve(executable.spec.capture).captured
    tower = cost.peak_bytes(captured.templates["prologue"], captured.templates["prologue"].variant("forward"),
                            executable.plan.micro_batches[0], executable.plan.length)
    assert executable.estimate.workspace >= tower > 0
    model.megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_patches.py::test_images_of_any_size_train_as_they_do_natively")
@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen2VL", "Qwen3VL"])
def test_videos_train_as_they_do_natively(family: str) -> None:
    native = qwen(family=family)
    frames = (1,) if family == "Qwen3VL" else (2, 3)  # whose videos have text between any two frames
    model = streamed(native, example=pictured(19, [(1, 2, 3)], [], token=VIDEO))
    assert_native(native, model, pictured(23, [], [(f, 1, 2) for f in frames], [(1, 3, 2)], token=VIDEO))
    model.megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_patches.py::test_images_of_any_size_train_as_they_do_natively")
def test_images_and_videos_train_as_they_do_natively() -> None:
    native = qwen()
    example = {**pictured(19, *EXAMPLE), **{name: tensor for name, tensor in pictured(19, [(2, 1, 2)], token=VIDEO).items()
                                            if "video" in name}}
    model = streamed(native, example=example)
    images, videos = pictured(23, [(1, 2, 2)], [], []), pictured(23, [], [(2, 1, 2)], [(1, 3, 2)], token=VIDEO)
    joined = {**images, **videos}
    for name in ("input_ids", "labels", "mm_token_type_ids"):
        joined[name] = torch.cat([images[name][:1], videos[name][1:]])
    joined["second_per_grid_ts"] = torch.tensor([0.5, 2.0])
    assert_native(native, model, joined)
    assert_native(native, model, images)
    model.megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_patches.py::test_images_of_any_size_train_as_they_do_natively")
def test_padding_and_packing_with_images_are_as_they_are_natively() -> None:
    native = qwen()
    model = streamed(native, example={**pictured(19, *EXAMPLE), "attention_mask": torch.ones(3, 19, dtype=torch.long)})
    plain = pictured(23, [(1, 2, 2)], [(1, 1, 2), (1, 3, 2)], [])
    for rows in (torch.tensor([23, 20, 18]), torch.tensor([-23, -22, -20])):
        there = torch.arange(23) < rows[:, None] if int(rows[0]) > 0 else torch.arange(23) >= 23 + rows[:, None]
        there |= plain["input_ids"] == IMAGE
        assert_native(native, model, {**plain, "attention_mask": there.long(),
                                      "labels": plain["labels"].masked_fill(~there, -100)})
    positions, _ = native.model.get_rope_index(plain["input_ids"], plain["mm_token_type_ids"], plain["image_grid_thw"])
    text = torch.arange(23).expand(3, 23).clone()
    assert_native(native, model, {**plain, "position_ids": torch.cat([text[None], positions])})
    text[1, 11:] -= 11
    assert_native(native, model, {**plain, "position_ids": torch.cat([text[None], positions])})
    model.megacompile.close()


@pytest.mark.nightly(held_by="tests/model/test_patches.py::test_images_of_any_size_train_as_they_do_natively")
@pytest.mark.parametrize("example", [pictured(19, *EXAMPLE), None])
def test_a_checkpoint_is_read_into_tiles_and_written_again(example: Any, tmp_path: Path) -> None:
    """The model takes images and text. Transformers does not call it a causal language model. Text alone works too."""
    native = qwen()
    native.save_pretrained(tmp_path / "read")
    model = megacompile.from_pretrained(tmp_path / "read", device="cpu", dtype=torch.float32, example=example).train()
    given = pictured(23, [(1, 2, 2)], []) if example is not None else {
        name: tensor for name, tensor in pictured(23, [], []).items() if name != "mm_token_type_ids"}
    assert_native(native, model, given)
    model.save_pretrained(tmp_path / "written")
    model.megacompile.close()
    again = type(native).from_pretrained(tmp_path / "written", dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in native.state_dict().items())


@pytest.mark.nightly(held_by="tests/model/test_patches.py::test_images_of_any_size_train_as_they_do_natively")
def test_whole_steps_with_images_are_as_they_are_natively() -> None:
    """Clipped by the norm of all gradients, those of the tower among them."""
    native = qwen()
    model = streamed(native)
    ours = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    theirs = torch.optim.AdamW(native.parameters(), lr=1e-2)
    for length in range(19, 23):
        given = pictured(length, *EXAMPLE)
        loss = model.megacompile.train_step(given, ours)
        theirs.zero_grad()
        expected = native(**given).loss
        expected.backward()
        torch.nn.utils.clip_grad_norm_(native.parameters(), 0.5)
        theirs.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    model.megacompile.close()


class Tower(nn.Module):
    """Features of pairs of patches; `way` is what is wrong with it."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.way, self.linear, self.norm = way, nn.Linear(8, 4), nn.BatchNorm1d(4) if way == "statistics" else nn.Identity()

    def get_image_features(self, patches: Tensor, sizes: Tensor, return_dict: bool) -> Any:
        if self.way == "fails":
            raise ValueError("no such images")
        features = self.norm(self.linear(patches if self.way == "too many" else patches[::4]))
        return Features(nn.functional.dropout(features) if self.way == "random" else features)


class Features:
    def __init__(self, features: Tensor) -> None:
        self.pooler_output = features


def encoder(tower: nn.Module) -> PatchEncoder:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from megacompile.frontend.tracing.fake_model import make_fake_model

    return PatchEncoder(make_fake_model(tower, FakeTensorMode(allow_non_fake_inputs=True)), "get_image_features", (8,), 4)


@pytest.mark.parametrize(("way", "message"), [
    ("fails", r"the encoder of M does not run on an image of 8 x 8 patches \[8\] \(no such images\)"),
    ("too many", r"the encoder of M makes \[\(64, 4\)\] of 64 patches, not one feature for each 4"),
    ("random", "the encoder of M draws random numbers"),
    ("statistics", "the encoder of M keeps running statistics of batches")])
def test_an_encoder_that_cannot_run_again_is_refused(way: str, message: str) -> None:
    assert survey(encoder(Tower()), "M") == 4
    with pytest.raises((CaptureError, UnsupportedError), match=message):
        survey(encoder(Tower(way)), "M")


def test_models_that_say_images_otherwise_are_refused() -> None:
    given = {"input_ids": torch.zeros(2, 5, dtype=torch.long), "pixel_values": torch.zeros(4, 8),
             "image_grid_thw": torch.ones(1, 3, dtype=torch.long)}
    with pytest.raises(CaptureError, match="Tower takes image_grid_thw, but does not describe its images as models of"):
        install_encoders(Tower(), given)

    class Adding(Tower):
        _deepstack_process = None

    with pytest.raises(CaptureError, match="Adding supports images or videos, not both: give one of pixel_values, pixel"):
        install_encoders(Adding(), {**given, "pixel_values_videos": torch.zeros(4, 8), "video_grid_thw": torch.ones(1, 3)})


class Scaled(nn.Module):
    """Makes more of the features of all images than to put them in their places, or (`idle`) nothing."""

    def __init__(self, idle: bool = False) -> None:
        super().__init__()
        self.idle = idle
        self.config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))
        self.tower, self.embed, self.head = nn.Linear(8, 4), nn.Embedding(64, 4), nn.Linear(4, 64)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def get_decoder(self) -> nn.Module:
        return self.layers

    def get_image_features(self, patches: Tensor, sizes: Tensor, return_dict: bool) -> Features:
        return Features(self.tower(patches.unflatten(0, (-1, 4)).sum(1)))

    def forward(self, input_ids: Tensor, labels: Tensor, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        features = torch.cat(tuple(self.get_image_features(pixel_values, image_grid_thw, return_dict=True).pooler_output))
        x = self.embed(input_ids)
        if not self.idle:
            x = x.masked_scatter((input_ids == IMAGE).unsqueeze(-1), features / features.mean())
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.nightly(held_by="tests/model/test_images.py::test_a_list_of_images_that_is_more_than_joined_is_refused")
def test_features_of_which_more_is_made_are_refused() -> None:
    given = pictured(9, [(1, 1, 2)], [])
    example = {name: given[name] for name in ("input_ids", "labels", "image_grid_thw")} | {"pixel_values": torch.zeros(8, 8)}
    with pytest.raises(UnsupportedError, match="Scaled puts another number of features into each sequence"):
        capture(Scaled(), example=example)
    with pytest.raises(CaptureError, match="Scaled does not put features of pixel_values among its tokens"):
        capture(Scaled(idle=True), example=example)


def test_adapters_of_an_encoder_cannot_be_switched_off() -> None:
    from peft import LoraConfig, get_peft_model

    from megacompile.frontend.batches.images import Patches
    from megacompile.frontend.batches.pair_masks import MODALITIES

    adapted = get_peft_model(Tower(), LoraConfig(target_modules=["linear"]))  # type: ignore[arg-type]
    found = Patches(MODALITIES[0], PatchEncoder(adapted, "get_image_features", (8,), 4), torch.float32, False)
    with pytest.raises(UnsupportedError, match="the encoder of M's images has adapters, which cannot be switched off"):
        refuse_adapters([found], "M")


def test_a_model_streamed_for_text_says_how_it_takes_images() -> None:
    model = megacompile.stream(build(), device="cpu")
    model.get_image_features = None  # as models with a tower have it
    with pytest.raises(UnsupportedError, match="was streamed without pixel_values and cannot take it now: include"):
        model(**pictured(19, *EXAMPLE))
    model.megacompile.close()
