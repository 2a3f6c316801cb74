"""Loading: files go into tiles as they are, everything is accounted for, and host memory holds no second copy."""
from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import build, same_bits, train_step, weights
from torch import Tensor, nn

import megacompile
from megacompile import loading
from megacompile.errors import ArgumentError, CheckpointError, InsufficientMemoryError, MegacompileError, UnsupportedError
from megacompile.runtime.memory.store import Store
from megacompile.runtime.memory.tiles import TileLayout
from megacompile.runtime.optimizer.host_update import join_fp32
from megacompile.weights import tiling
from megacompile.weights.empty_models import build_store
from megacompile.weights.saving import forget_quantized_layout
from megacompile.weights.tiling import Tiling

INDEX = "model.safetensors.index.json"
SHARDED = {"max_shard_size": "10KB"}


def two_tiles(model: nn.Module) -> Tiling:
    """A tiling without a capture: layers, and the rest; the last parameter is in no tile, as one that no call reads."""
    *parameters, _ = model.named_parameters()
    layer = re.compile(r"\.(layers|h)\.").search
    layouts = {name: TileLayout.of(name, parameters[0][1].dtype, [
        (n, p.shape, p.requires_grad) for n, p in parameters if bool(layer(n)) == (name == "layers")])
        for name in ("layers", "rest")}
    position = {s.name: (t, i) for t, layout in layouts.items() for i, s in enumerate(layout.slices)}
    return Tiling(layouts, layouts, {}, position, {name: (place,) for name, place in position.items()}, position)


class Loaded:
    """What `attach` was given. State: the store of the last model."""

    store: Store


@pytest.fixture
def uncaptured(monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """`from_pretrained` fills tiles and returns the plain model over them: captures take seconds."""
    loaded = Loaded()

    def attach(model: nn.Module, fill: Callable[..., Store], *_: Any) -> nn.Module:
        loaded.store = fill(model, two_tiles(model))
        return model

    monkeypatch.setattr(loading, "attach", attach)
    return loaded


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A sharded checkpoint of fp32 weights."""
    build().save_pretrained(tmp_path / "saved", **SHARDED)
    return tmp_path / "saved"


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Changes the tensors of a checkpoint, which is one file then."""
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in [*folder.glob("*.safetensors"), *folder.glob(INDEX)]:
        file.unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def store_transposed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposes the down projections of a checkpoint, and registers with transformers that Qwen2 has them so."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    turned = WeightConverter("mlp.down_proj.weight", "mlp.down_proj.weight", [Transpose(0, 1)])
    assert conversion_mapping.get_checkpoint_conversion_mapping("qwen2") is None
    monkeypatch.setitem(conversion_mapping._checkpoint_conversion_mapping_cache, "qwen2", [turned])
    edit(folder, lambda tensors: tensors.update(
        {name: each.T.contiguous() for name, each in tensors.items() if "down_proj" in name}))


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


# ---------------------------------------------------------------- what is loaded

@pytest.mark.nightly(held_by=(
    "tests/model/test_loading.py::test_every_stored_value_is_in_its_master_exactly",
    "tests/model/test_loading.py::test_what_the_models_class_wants_in_float32_stays_so"))
def test_a_loaded_model_trains_with_the_bits_of_one_that_was_streamed(model: Any, saved: Path) -> None:
    loaded = megacompile.from_pretrained(saved, device="cpu", checkpoint_interval=2, micro_batch_size=2).train()
    try:
        assert same_bits(weights(loaded), weights(model))
        optimizers = [megacompile.AdamW(m.parameters(), lr=1e-2) for m in (loaded, model)]
        for seed in range(2):
            assert train_step(loaded, optimizers[0], seed) == train_step(model, optimizers[1], seed)
        assert same_bits(weights(loaded), weights(model))
    finally:
        loaded.megacompile.close()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_stored_value_is_in_its_master_exactly(
        saved: Path, uncaptured: Loaded, stored: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megacompile.weights.filling.fill.__defaults__", (100, None))  # elements: parts end in mid-row
    edit(saved, lambda tensors: tensors.update({n: t.to(stored) for n, t in tensors.items()}))
    tensors = load_file(saved / "model.safetensors")
    loaded = megacompile.from_pretrained(saved, dtype=dtype, device="cpu")
    assert {p.dtype for p in loaded.parameters()} == {dtype} and not any(p.is_meta for p in loaded.parameters())
    for tile in uncaptured.store.tiles.values():
        for s in tile.layout.slices:
            value = tile.layout.flat(tile.weights)[s.start:s.stop]
            if tile.remainder is not None:
                value = join_fp32(value, tile.remainder[s.start:s.stop])
            assert torch.equal(value, tensors[s.name].float().flatten()), s.name
    assert not loaded.training


def test_a_parameter_in_no_tile_and_buffers_have_their_values_too(saved: Path, uncaptured: Loaded) -> None:
    loaded, plain = megacompile.from_pretrained(saved, device="cpu"), build()
    (*_, name) = (n for n, _ in loaded.named_parameters())
    assert all(name not in {s.name for s in t.layout.slices} for t in uncaptured.store.tiles.values())
    assert same_bits(weights(loaded), weights(plain))
    assert same_bits(dict(loaded.named_buffers()), dict(plain.named_buffers())) and dict(plain.named_buffers())


def test_the_dtype_is_the_configs_else_the_widest_that_is_stored(saved: Path, uncaptured: Loaded) -> None:
    edit_config(saved, dtype="bfloat16")
    assert megacompile.from_pretrained(saved, device="cpu").dtype == torch.bfloat16
    assert megacompile.from_pretrained(saved, dtype="auto", device="cpu").dtype == torch.bfloat16
    edit_config(saved, dtype=None)
    assert megacompile.from_pretrained(saved, device="cpu").dtype == torch.float32
    assert megacompile.from_pretrained(saved, dtype="bfloat16", device="cpu").dtype == torch.bfloat16
    with pytest.raises(MegacompileError, match=r"dtype must be torch.float32, torch.bfloat16 or 'auto', not 'bf16'"):
        megacompile.from_pretrained(saved, dtype="bf16", device="cpu")


def test_what_the_models_class_wants_in_float32_stays_so(
        saved: Path, uncaptured: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen2ForCausalLM

    monkeypatch.setattr(Qwen2ForCausalLM, "_keep_in_fp32_modules_strict", ["q_norm", "inv_freq", "lm_head"])
    edit_config(saved, dtype="bfloat16")
    loaded = megacompile.from_pretrained(saved, device="cpu")
    assert loaded.lm_head.weight.dtype == torch.float32 and loaded.model.norm.weight.dtype == torch.bfloat16
    assert megacompile.from_pretrained(saved, dtype=torch.bfloat16, device="cpu").lm_head.weight.dtype == torch.bfloat16


def test_another_config_and_the_generation_config_are_taken(saved: Path, uncaptured: Loaded) -> None:
    from transformers import AutoConfig

    (saved / "generation_config.json").write_text('{"max_new_tokens": 7, "eos_token_id": 3}')
    config = AutoConfig.from_pretrained(saved)
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 7.0}
    loaded = megacompile.from_pretrained(saved, config=config, device="cpu")
    assert loaded.generation_config.max_new_tokens == 7 and loaded.config.rope_parameters["rope_theta"] == 7.0


def test_modules_of_other_threads_keep_their_data_meanwhile() -> None:
    from threading import Thread

    made: list[nn.Module] = []
    with loading.parameters_on_meta():
        thread = Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        assert nn.Linear(2, 2).weight.is_meta
    assert not made[0].weight.is_meta and not nn.Linear(2, 2).weight.is_meta


# ---------------------------------------------------------------- ties and other names

def test_tied_weights_are_read_once_whichever_name_they_have(tmp_path: Path, uncaptured: Loaded) -> None:
    plain = build(tie_word_embeddings=True)
    plain.save_pretrained(tmp_path)
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"

    def rename(tensors: dict[str, Tensor]) -> None:
        tensors[head] = tensors.pop(embedding)

    def both(tensors: dict[str, Tensor]) -> None:
        tensors[embedding] = tensors[head].clone()

    for change in (lambda _: None, rename, both):
        edit(tmp_path, change)
        loaded = megacompile.from_pretrained(tmp_path, device="cpu")
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert same_bits(weights(loaded), weights(plain))
    edit(tmp_path, lambda tensors: tensors[head].add_(1))
    with pytest.raises(CheckpointError, match=r"differ, and the config ties them: set tie_word_embeddings=False"):
        megacompile.from_pretrained(tmp_path, device="cpu", strict=False)


def test_names_without_the_base_models_prefix_are_found(tmp_path: Path, uncaptured: Loaded) -> None:
    plain = build(tie_word_embeddings=True)
    plain.model.save_pretrained(tmp_path)
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    assert same_bits(weights(megacompile.from_pretrained(tmp_path, device="cpu")), weights(plain))


def test_a_layout_that_has_to_be_converted_is_loaded_by_transformers_and_said_so(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = build()
    plain.save_pretrained(tmp_path)
    store_transposed(tmp_path, monkeypatch)
    given: dict[str, Any] = {}
    monkeypatch.setattr(loading, "stream", lambda model, **options: given.update(options) or model)
    with pytest.warns(UserWarning, match=r"stored in a layout that must be converted: transformers loads the model first"):
        loaded = megacompile.from_pretrained(tmp_path, device="cpu", waves=2)
    assert same_bits(weights(loaded), weights(plain)) and given["waves"] == 2


# ---------------------------------------------------------------- what does not fit

def test_everything_that_does_not_match_is_listed(saved: Path, uncaptured: Loaded) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["model.rotary_emb.inv_freq"] = torch.zeros(4)  # older versions stored it: no mistake

    edit(saved, change)
    with pytest.raises(CheckpointError) as raised:
        megacompile.from_pretrained(saved, device="cpu")
    said = str(raised.value)
    assert "Qwen2ForCausalLM as configured (1 are missing, 1 are not used): give the checkpoint" in said.splitlines()[0]
    assert "  model.layers.1.mlp.up_proj.weight is in no file" in said
    assert "  model.layers.9.mlp.up_proj.weight is stored, and the model does not have it" in said and "inv_freq" not in said


def test_without_strict_what_is_missing_starts_as_in_a_new_model(saved: Path, uncaptured: Loaded) -> None:
    name, norm = "model.layers.1.mlp.up_proj.weight", "model.layers.2.input_layernorm.weight"
    edit(saved, lambda tensors: [tensors.pop(n) for n in (name, norm)])
    with pytest.warns(UserWarning, match=re.escape(f"{name} is in no file")):
        loaded = megacompile.from_pretrained(saved, device="cpu", strict=False)
    found, expected = weights(loaded), weights(build())
    assert torch.equal(found.pop(norm), torch.ones(16)) and expected.pop(norm) is not None
    assert 0.01 < found.pop(name).std() < 0.04 and expected.pop(name) is not None
    assert same_bits(found, expected)


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: t.update({"lm_head.weight": torch.zeros(64, 8)}), r"lm_head.weight has shape \[64, 8\], and lm_head.weight has"),
    (lambda t: t.update({"lm_head.weight": torch.zeros(64, 16, dtype=torch.int8)}), "lm_head.weight is stored as I8"),
], ids=["shape", "dtype"])
def test_a_tensor_that_cannot_be_what_its_name_says_is_refused(saved: Path, change: Any, message: str) -> None:
    edit(saved, change)
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=message):
            megacompile.from_pretrained(saved, device="cpu", strict=strict)


def _rename_in_index(name: str) -> Callable[[Path], Any]:
    def damage(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        first = next(iter(index["weight_map"]))
        index["weight_map"][first] = name
        (folder / INDEX).write_text(json.dumps(index))
        shutil.copy(folder / "model-00001-of-00004.safetensors", folder.parent / "outside.safetensors")
    return damage


def _truncate(folder: Path) -> None:
    file = folder / "model-00002-of-00004.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def _only_pickles(folder: Path) -> None:
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"never read")


def _copy_a_shard(folder: Path) -> None:
    shutil.copy(folder / "model-00001-of-00004.safetensors", folder / "model-00002-of-00004.safetensors")


def _header_of_a_terabyte(folder: Path) -> None:
    (folder / "model-00001-of-00004.safetensors").write_bytes(struct.pack("<Q", 1 << 40))


@pytest.mark.parametrize(("damage", "message"), [
    (_rename_in_index("../outside.safetensors"), "which is not a safetensors file of its own folder"),
    (_rename_in_index("/etc/passwd"), "which is not a safetensors file of its own folder"),
    (_rename_in_index("model.bin"), "which is not a safetensors file of its own folder"),
    (_rename_in_index("model-00009.safetensors"), "names model-00009.safetensors, which is not there"),
    (lambda f: (f / INDEX).write_text("[1]"), "is not an index of weight files"),
    (lambda f: (f / INDEX).write_text('{"weight_map": {"a": [2]}}'), "is not an index of weight files"),
    (lambda f: (f / INDEX).write_text('{"weight_map": {"a": 2}}'), "names 2, which is not a safetensors file"),
    (_truncate, r"model-00002-of-00004.safetensors is damaged or truncated"),
    (_header_of_a_terabyte, r"model-00001-of-00004.safetensors is damaged or truncated"),
    (_copy_a_shard, "mixes two checkpoints"),
    (_only_pickles, r"has only pytorch_model.bin, a pickle, which can run code when it is read"),
    (lambda f: (f / "config.json").write_text("{"), "transformers cannot read the config"),
    (lambda f: edit_config(f, auto_map={"AutoConfig": "x.Y"}, model_type="own"), "trust_remote_code"),
    (lambda f: (f / INDEX).write_text("[" * 100_000), "is not an index of weight files"),
    (lambda f: (f / "config.json").write_text("[" * 100_000), "transformers cannot read the config"),
    (lambda f: (f / "generation_config.json").write_text("[" * 100_000), "generation_config.json cannot be read"),
    (lambda f: edit_config(f, num_attention_heads=0), "cannot build a causal language model"),
    (lambda f: (f / "generation_config.json").write_text("{"), "generation_config.json cannot be read"),
])
def test_a_damaged_or_foreign_checkpoint_is_refused_with_place_and_reason(saved: Path, damage: Any, message: str) -> None:
    damage(saved)
    with pytest.raises(CheckpointError, match=message) as raised:
        megacompile.from_pretrained(saved, device="cpu")
    assert str(saved) in str(raised.value)


@pytest.mark.parametrize("name", ["config.json", INDEX, "model-00002-of-00004.safetensors", "generation_config.json"])
def test_a_pipe_in_a_file_s_place_is_refused_at_once(saved: Path, name: str) -> None:
    (saved / name).unlink()
    os.mkfifo(saved / name)
    with pytest.raises(MegacompileError, match=rf"{name} cannot be read \(it is a FIFO, not a regular file\): give regular"):
        megacompile.from_pretrained(saved, device="cpu")


def test_a_file_that_shrinks_while_it_is_read_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def attach(model: nn.Module, fill: Callable[[nn.Module, Tiling], Store], *_: Any) -> None:
        _truncate(saved)
        fill(model, two_tiles(model))

    monkeypatch.setattr(loading, "attach", attach)
    with pytest.raises(CheckpointError, match=r"ended inside .* it was changed while it was read"):
        megacompile.from_pretrained(saved, device="cpu")


def test_quantized_checkpoints_unknown_options_and_other_folders_are_refused(saved: Path, tmp_path: Path) -> None:
    edit_config(saved, quantization_config={"quant_method": "awq"})
    with pytest.raises(UnsupportedError, match="is quantized by awq, which is not supported: give the checkpoint that it was"):
        megacompile.from_pretrained(saved, device="cpu")
    with pytest.raises(MegacompileError, match=r"has no option depth"):
        megacompile.from_pretrained(saved, depth=3)
    with pytest.raises(ArgumentError, match=r"has no config.json"):
        megacompile.from_pretrained(tmp_path)
    for nothing in (saved / "config.json", tmp_path / "absent", "a/b/c", "config.json", "a/b.json"):
        with pytest.raises(ArgumentError, match="is not a checkpoint folder"):
            megacompile.from_pretrained(nothing)


# ---------------------------------------------------------------- host memory, and the hub

def test_a_model_that_host_memory_does_not_hold_is_refused_before_weights_are_looked_for(
        saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _only_pickles(saved)
    parameters = sum(p.numel() for p in build().parameters())
    monkeypatch.setattr(tiling, "available_host_bytes", lambda: 1 << 30)
    with pytest.raises(InsufficientMemoryError, match=r"training needs 1\.00 GiB of host memory and 1\.00 GiB are available"):
        megacompile.from_pretrained(saved, device="cpu")
    monkeypatch.setattr(tiling, "available_host_bytes", lambda: (1 << 30) + 5 * parameters)
    with pytest.raises(InsufficientMemoryError):
        megacompile.from_pretrained(saved, device="cpu")  # 6 bytes a parameter in float32 with the smallest state, 4 in bf16
    with pytest.raises(CheckpointError):
        megacompile.from_pretrained(saved, dtype=torch.bfloat16, device="cpu")


@pytest.fixture
def hub(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str | None, list[str]]]]:
    """A hub with one model, owner/name, at the commit c0ffee. The downloads that were asked for."""
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    asked: list[tuple[str | None, list[str]]] = []
    cache = tmp_path / "cache" / "c0ffee"
    (saved / "pytorch_model.bin").write_bytes(b"never fetched")

    def snapshot_download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        if name != "owner/name":
            raise RepositoryNotFoundError("404", response=type("R", (), {"headers": {}, "request": None})())
        asked.append((revision, allow_patterns))
        cache.mkdir(parents=True, exist_ok=True)
        for pattern in allow_patterns:
            for file in saved.glob(pattern):
                (cache / file.name).unlink(missing_ok=True)
                (cache / file.name).symlink_to(file)  # as the hub's cache does
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    yield asked
    assert not (cache / "pytorch_model.bin").exists()


def test_a_model_of_the_hub_is_read_at_one_commit(hub: Any, uncaptured: Loaded) -> None:
    loaded = megacompile.from_pretrained("owner/name", revision="main", device="cpu")
    assert same_bits(weights(loaded), weights(build()))
    assert [revision for revision, _ in hub] == ["main", "c0ffee"]
    with pytest.raises(ArgumentError, match="the Hugging Face Hub returned no such model"):
        megacompile.from_pretrained("owner/other")


def test_weights_that_memory_does_not_hold_are_not_fetched(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "available_host_bytes", lambda: 1 << 30)
    with pytest.raises(InsufficientMemoryError):
        megacompile.from_pretrained("owner/name", device="cpu")
    assert len(hub) == 1 and not any("safetensors" in pattern for pattern in hub[0][1])


@pytest.mark.nightly(held_by=(
    "tests/model/test_surface.py::test_the_weights_as_they_were_are_gone_when_a_model_is_streamed_whether_or_not_the_collector_runs",
    "tests/model/test_loading.py::test_every_stored_value_is_in_its_master_exactly"))
def test_neither_loading_nor_streaming_nor_saving_holds_the_model_twice(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import gc, sys
        import megacompile
        from megacompile import loading
        from megacompile.weights.empty_models import build_store
        from test_loading import two_tiles
        from tiny_models import build

        def resident(key):
            return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

        def growth(work):  # of the peak while it works
            gc.collect()
            before = resident("VmRSS")
            open("/proc/self/clear_refs", "w").write("5")
            result = work()
            return result, resident("VmHWM") - before

        model = build(hidden_size=512, intermediate_size=1536, num_attention_heads=4, vocab_size=12000)
        size = sum(p.nbytes for p in model.parameters())
        model.save_pretrained(sys.argv[1], max_shard_size="20MB")
        moved, streamed = growth(lambda: build_store(model, two_tiles(model)))  # weights and gradients, less the weights
        del moved, model
        loading.attach = lambda model, fill, *_: (model, fill(model, two_tiles(model)))
        (loaded, store), read = growth(lambda: megacompile.from_pretrained(sys.argv[1], device="cpu"))
        _, saved = growth(lambda: loaded.save_pretrained(sys.argv[1] + "/again", max_shard_size="20MB"))
        print(streamed / size, read / size, saved / size)
    """)
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "model"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    streamed, read, saved = map(float, done.stdout.split())
    assert streamed < 1.4, f"moving into tiles took {streamed} of the weights' size; 1 is left at the end"
    assert read < 2.3, f"loading took {read} of the weights' size, and tiles are 2"
    assert saved < 0.5, f"saving took {saved} of the weights' size"


def test_a_half_precision_model_moved_into_bf16_tiles_keeps_every_value() -> None:
    plain, expected = build().half(), weights(build().half())
    for tile in build_store(plain, two_tiles(build(bf16=True))).tiles.values():
        assert tile.remainder is not None
        for s in tile.layout.slices:
            value = join_fp32(tile.layout.flat(tile.weights)[s.start:s.stop], tile.remainder[s.start:s.stop])
            assert torch.equal(value, expected[s.name].float().flatten()), s.name


# ---------------------------------------------------------------- models that transformers has dequantized

def _with_codes(folder: Path, method: str) -> None:
    """Replaces the experts that are stored in a folder by random codes and their scales, as published checkpoints have them."""
    stored, codes = load_file(folder / "model.safetensors"), {}
    for name in [each for each in stored if re.search(r"experts\.\d+\.\w+\.weight$|experts\.\w+_proj$", each)]:
        weight = stored.pop(name)
        if method == "mxfp4":  # [experts, in, out]: two codes of four bits in a byte, and a scale for 32 of them
            experts, inputs, outputs = weight.shape
            codes[f"{name}_blocks"] = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            codes[f"{name}_scales"] = torch.randint(120, 128, (experts, outputs, inputs // 32), dtype=torch.uint8)
        else:  # a scale for 16 x 16 weights
            codes[name] = weight.to(torch.float8_e4m3fn)
            codes[f"{name}_scale_inv"] = torch.rand(weight.shape[0] // 16, weight.shape[1] // 16) + 0.5
    assert codes
    save_file(stored | codes, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "modules_to_not_convert": ["self_attn", "embed_tokens", "lm_head"]}
    config["quantization_config"] |= {"weight_block_size": [16, 16]} if method == "fp8" else {}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("method", [pytest.param("mxfp4", marks=pytest.mark.nightly), "fp8"])
def test_a_model_that_transformers_has_dequantized_is_saved_with_every_weight(method: str, tmp_path: Path) -> None:
    """transformers itself writes full weights under the names of codes, and finds none of them again."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config, GptOssConfig, Mxfp4Config, Qwen3MoeConfig

    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                 num_experts_per_tok=2, vocab_size=64, pad_token_id=0, eos_token_id=1)
    config, how = {
        "mxfp4": (GptOssConfig(**sizes, intermediate_size=64, num_local_experts=4), Mxfp4Config(dequantize=True)),
        "fp8": (Qwen3MoeConfig(**sizes, intermediate_size=32, moe_intermediate_size=32, num_experts=4),
                FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 16)))}[method]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path / "codes")
    _with_codes(tmp_path / "codes", method)

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "codes", quantization_config=how, dtype=torch.bfloat16)
    if method == "mxfp4":
        megacompile.stream(model, device="cpu").save_pretrained(tmp_path / "streamed")
        model.megacompile.close()
    else:
        forget_quantized_layout(model)  # `stream` calls it
    model.save_pretrained(tmp_path / "plain")
    for folder in tmp_path.iterdir():
        if folder.name != "codes":
            again, missing = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
            assert not any(missing.values())
            assert all(map(torch.equal, weights(again).values(), weights(model).values()))
            assert weights(again).keys() == weights(model).keys()
