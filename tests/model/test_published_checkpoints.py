"""Checkpoints whose weights are in codes as they are published (MXFP4, blocks of FP8), and experts that are stored one by one:
values are those that transformers reads, and nothing is read twice."""
from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_expert_adapters import fused, tokens
from test_loading import edit, edit_config, store_transposed
from test_quantized_experts import coded
from tiny_models import build, same_bits, weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, GptOssConfig, Mxfp4Config, Qwen3MoeConfig

import megacompile
from megacompile import loading
from megacompile.errors import CheckpointError, UnsupportedError
from megacompile.runtime.memory.store import Store
from megacompile.runtime.memory.tiles import TileLayout
from megacompile.runtime.optimizer.host_update import join_fp32
from megacompile.weights.codes import FORMATS, QuantizedLinear, ScaledFloats
from megacompile.weights.tiling import Tiling

peft = pytest.importorskip("peft")

SIZES = dict(hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
             head_dim=16, num_experts_per_tok=2, vocab_size=64, max_position_embeddings=64, pad_token_id=0, eos_token_id=1)
FILE = "model.safetensors"


def tiles_of_dtypes(model: nn.Module) -> Tiling:
    """A tiling without a capture: a tile for each dtype."""
    parameters = dict(model.named_parameters())
    layouts = {str(dtype): TileLayout.of(str(dtype), dtype, [
        (name, p.shape, p.requires_grad) for name, p in parameters.items() if p.dtype == dtype])
        for dtype in dict.fromkeys(p.dtype for p in parameters.values())}
    position = {s.name: (t, i) for t, layout in layouts.items() for i, s in enumerate(layout.slices)}
    return Tiling(layouts, layouts, {}, position, {name: (place,) for name, place in position.items()}, position)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[Store]:
    """The stores that `from_pretrained` has filled. It returns the plain model over its tiles: captures take seconds."""
    filled: list[Store] = []

    def attach(model: nn.Module, fill: Callable[..., Store], *_: Any) -> nn.Module:
        filled.append(fill(model, tiles_of_dtypes(model)))
        return model

    monkeypatch.setattr(loading, "attach", attach)
    return filled


@pytest.fixture
def in_mxfp4(tmp_path: Path) -> Path:
    """A checkpoint with experts in MXFP4, as GPT-OSS is published."""
    model = AutoModelForCausalLM.from_config(GptOssConfig(**SIZES, num_local_experts=4), dtype=torch.bfloat16)
    folder, form = tmp_path / "mxfp4", FORMATS["mxfp4"]
    model.save_pretrained(folder)

    def encode(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            columns = tensors.pop(name).normal_(std=0.2).transpose(1, 2).contiguous()
            experts, rows, width = columns.shape
            matrix = experts * rows, width
            codes, scales = (torch.empty(size(matrix), dtype=torch.uint8) for size in (form.code_bytes, form.scale_bytes))
            form.encode([columns.flatten()], codes, scales, matrix)
            tensors[f"{name}_blocks"] = codes.view(experts, rows, width // 32, 16)
            tensors[f"{name}_scales"] = scales.view(experts, rows, width // 32)

    edit(folder, encode)
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return folder


def mixture(folder: Path) -> Any:
    """Saves a mixture in bf16, whose files have its experts one by one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=SIZES["intermediate_size"], num_experts=4)).bfloat16()
    model.save_pretrained(folder)
    assert any(".experts.3." in name for name in load_file(folder / FILE))
    return model


def in_float8(folder: Path, block: tuple[int, int], scales: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Stores the projections of a checkpoint in FP8 with random scales. Returns all values, FP32."""
    values: dict[str, Tensor] = {}

    def encode(tensors: dict[str, Tensor]) -> None:
        for name, tensor in list(tensors.items()):
            values[name] = tensor.float()
            if name.endswith("_proj.weight"):
                (rows, columns), (down, across) = tensor.shape, block
                codes = (100 * tensor.float()).to(torch.float8_e4m3fn)
                scale = (torch.rand(math.ceil(rows / down), math.ceil(columns / across)) / 50 + 0.01).to(scales)
                of_each = scale.float().repeat_interleave(down, 0)[:rows].repeat_interleave(across, 1)[:, :columns]
                values[name] = codes.float() * of_each
                tensors |= {name: codes, f"{name}_scale_inv": scale}

    edit(folder, encode)
    edit_config(folder, quantization_config={
        "quant_method": "fp8", "weight_block_size": list(block), "modules_to_not_convert": ["lm_head", "gate"]})
    return values


# ---------------------------------------------------------------- MXFP4

def test_a_published_checkpoint_in_mxfp4_keeps_its_codes_and_has_transformers_values(in_mxfp4: Path) -> None:
    expanded = Mxfp4Config(dequantize=True)
    native = AutoModelForCausalLM.from_pretrained(in_mxfp4, quantization_config=expanded, dtype=torch.float32)
    assert native.model.layers[0].mlp.experts.gate_up_proj.is_floating_point()
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=fused(native), task_type="CAUSAL_LM")
    model = megacompile.from_pretrained(in_mxfp4, adapter=adapter, device="cpu", dtype="float32")
    assert len(coded(model)) == 2 and not hasattr(model.config, "quantization_config")
    given = tokens(model)
    with torch.no_grad():
        assert model(**given).loss.item() == pytest.approx(native(**given).loss.item(), rel=1e-5)
    model.megacompile.close()
    values = megacompile.dequantize(model).state_dict()
    for name, weight in native.state_dict().items():
        ours = next(value for key, value in values.items() if key.replace(".base_layer", "").endswith(f"model.{name}"))
        assert torch.equal(ours.float(), weight.float()), name


def test_experts_in_mxfp4_are_expanded_where_they_are_trained_and_saved_as_ordinary_ones(
        in_mxfp4: Path, tmp_path: Path) -> None:
    expanded = Mxfp4Config(dequantize=True)
    native = AutoModelForCausalLM.from_pretrained(in_mxfp4, quantization_config=expanded, dtype=torch.bfloat16)
    model = megacompile.from_pretrained(in_mxfp4, device="cpu")
    assert not coded(model) and same_bits(weights(model), weights(native))
    model.save_pretrained(tmp_path / "saved")
    stored, config = load_file(tmp_path / "saved" / FILE), json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "model.layers.1.mlp.experts.gate_up_proj" in stored and "quantization_config" not in config
    again, missing = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto", output_loading_info=True)
    assert not any(missing.values()) and same_bits(weights(again), weights(native))
    model.train()(**tokens(model)).loss.backward()
    assert model.model.layers[0].mlp.experts.gate_up_proj.grad.abs().sum() > 0
    model.megacompile.close()


# ---------------------------------------------------------------- blocks of FP8

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_weights_in_float8_have_their_exact_products_in_the_master(
        tmp_path: Path, stores: list[Store], dtype: torch.dtype, scales: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megacompile.weights.filling.fill.__defaults__", (100, None))  # elements: several parts of a matrix
    build().save_pretrained(tmp_path)
    values = in_float8(tmp_path, (5, 12), scales)  # blocks end beyond edges
    loaded = megacompile.from_pretrained(tmp_path, dtype=dtype, device="cpu")
    assert {p.dtype for p in loaded.parameters()} == {dtype} and weights(loaded).keys() == values.keys()
    for tile in stores[0].tiles.values():
        for s in tile.layout.slices:
            value = tile.layout.flat(tile.weights)[s.start:s.stop]
            value = value if tile.remainder is None else join_fp32(value, tile.remainder[s.start:s.stop])
            assert torch.equal(value, values[s.name].flatten()), s.name


def test_a_mixture_in_float8_has_transformers_values_and_is_saved_as_it_would_be_in_bfloat16(
        tmp_path: Path, stores: list[Store]) -> None:
    layout = mixture(tmp_path / "codes") and load_file(tmp_path / "codes" / FILE).keys()
    in_float8(tmp_path / "codes", (16, 16))
    expanded = FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 16))
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "codes", quantization_config=expanded, dtype=torch.bfloat16)
    loaded = megacompile.from_pretrained(tmp_path / "codes", dtype="bfloat16", device="cpu")
    assert same_bits(weights(loaded), weights(native))
    loaded.save_pretrained(tmp_path / "saved")
    assert load_file(tmp_path / "saved" / FILE).keys() == layout
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    again, missing = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto", output_loading_info=True)
    assert not any(missing.values()) and same_bits(weights(again), weights(native))


def test_frozen_weights_in_float8_keep_their_codes(tmp_path: Path) -> None:
    mixture(tmp_path)
    values = in_float8(tmp_path, (16, 16))
    config = AutoConfig.from_pretrained(tmp_path)
    del config.quantization_config
    config.save_pretrained(tmp_path / "expanded")
    save_file(values, tmp_path / "expanded" / FILE, metadata={"format": "pt"})
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "expanded", dtype=torch.float32).eval()
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=fused(native), task_type="CAUSAL_LM")
    model = megacompile.from_pretrained(tmp_path, adapter=adapter, device="cpu", dtype="float32")
    linears = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert len(linears) == 8 and len(coded(model)) == 2
    assert {module.stored for module in (*linears, *coded(model))} == {ScaledFloats((16, 16))}
    given = tokens(model)
    with torch.no_grad():
        assert model(**given).loss.item() == pytest.approx(native(**given).loss.item(), rel=1e-5)
    how = {"input_ids": given["input_ids"], "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(**how), native.generate(**how))
    model.train()(**given).loss.backward()
    model.megacompile.close()
    assert torch.equal(linears[0].dequantized_weight(), values["model.layers.0.self_attn.q_proj.weight"])


@pytest.mark.parametrize("block", [(24, 16), (128, 128)], ids=str)
def test_experts_whose_blocks_do_not_meet_are_expanded(tmp_path: Path, stores: list[Store], block: tuple[int, int]) -> None:
    mixture(tmp_path)
    values = in_float8(tmp_path, block)
    loaded = megacompile.from_pretrained(tmp_path, trainable=False, dtype="float32", device="cpu")
    prefix = "model.layers.1.mlp.experts"
    experts = loaded.get_submodule(prefix)
    for i in range(4):
        gate, up, down = (values[f"{prefix}.{i}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        assert torch.equal(experts.gate_up_proj[i], torch.cat((gate, up))) and torch.equal(experts.down_proj[i], down)
    assert isinstance(loaded.model.layers[1].self_attn.q_proj, QuantizedLinear)


def test_float8_outside_the_layers_is_expanded_though_it_is_frozen(tmp_path: Path, stores: list[Store]) -> None:
    build().save_pretrained(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"head_proj.weight": tensors.pop("lm_head.weight")}))
    expected = in_float8(tmp_path, (8, 8))["head_proj.weight"]
    edit(tmp_path, lambda tensors: tensors.update(
        {name.replace("head_proj", "lm_head"): tensors.pop(name) for name in list(tensors) if "head_proj" in name}))
    loaded = megacompile.from_pretrained(tmp_path, trainable=False, device="cpu")
    assert torch.equal(loaded.lm_head.weight, expected.to(loaded.dtype))


# ---------------------------------------------------------------- what is refused

def _poison(folder: Path) -> None:
    edit(folder, lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].view(torch.uint8)[3:4, :2].fill_(0xFF))


@pytest.mark.parametrize("trainable", [True, False])
def test_codes_that_are_not_finite_are_refused(tmp_path: Path, stores: list[Store], trainable: bool) -> None:
    build().save_pretrained(tmp_path)
    in_float8(tmp_path, (8, 8))
    _poison(tmp_path)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight in .* has values that are not finite"):
        megacompile.from_pretrained(tmp_path, trainable=trainable, device="cpu")


def test_codes_in_another_shape_or_layout_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build().save_pretrained(tmp_path)
    in_float8(tmp_path, (8, 8))
    for given in (None, [128], [0, 128], ["a", "b"]):
        edit_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": given})
        with pytest.raises(UnsupportedError, match=r"weight_block_size=.* is not supported: give a checkpoint in FP8"):
            megacompile.from_pretrained(tmp_path, device="cpu")
    edit_config(tmp_path, quantization_config={"quant_method": "fp8"})  # blocks of 128 x 128
    with pytest.raises(CheckpointError, match=r"has 384 bytes of codes and 24 bytes of scales, not 384 and 4: copy or"):
        megacompile.from_pretrained(tmp_path, device="cpu")
    edit_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [8, 8]})
    store_transposed(tmp_path, monkeypatch)
    with pytest.raises(UnsupportedError, match=r"are in codes, and .*down_proj.* must be converted: load the model with"):
        megacompile.from_pretrained(tmp_path, device="cpu")


def test_scales_or_experts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    mixture(tmp_path)
    one = "model.layers.0.mlp.experts.2.up_proj.weight"
    edit(tmp_path, lambda tensors: tensors.pop(one))
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj\.weight and others like it do not make model"):
            megacompile.from_pretrained(tmp_path, device="cpu", strict=strict)
    in_float8(tmp_path, (16, 16))
    edit(tmp_path, lambda tensors: tensors.update({one: torch.zeros(32, 64).to(torch.float8_e4m3fn)}))
    with pytest.raises(CheckpointError, match=r"is stored as F8_E4M3, which cannot become .*gate_up_proj in .*\(no scales"):
        megacompile.from_pretrained(tmp_path, device="cpu")
    edit(tmp_path, lambda tensors: tensors.update({f"{one}_scale_inv": torch.zeros(2, 4, dtype=torch.uint8)}))
    with pytest.raises(UnsupportedError, match=r"up_proj.weight of \[32, 64\] is in FP8 with scales in U8: only matrices"):
        megacompile.from_pretrained(tmp_path, device="cpu")


# ---------------------------------------------------------------- host memory

@pytest.mark.parametrize("kind", ["fp8", *(pytest.param(kind, marks=pytest.mark.nightly(
    held_by="tests/model/test_published_checkpoints.py::"
            "test_host_memory_never_holds_more_than_the_tiles_and_a_few_blocks")) for kind in ("mxfp4", "one by one"))])
def test_host_memory_never_holds_more_than_the_tiles_and_a_few_blocks(kind: str, tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import gc, sys
        from pathlib import Path
        import torch
        import megacompile
        import test_published_checkpoints as cases
        from megacompile import loading
        from megacompile.system.host_memory import give_back_freed_memory
        from megacompile.weights import filling

        def resident(key):
            return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

        folder, kind = Path(sys.argv[1]), sys.argv[2]
        cases.SIZES |= dict(hidden_size=512, intermediate_size=768, vocab_size=1024, num_hidden_layers=4)
        if kind == "mxfp4":
            folder = cases.in_mxfp4.__wrapped__(folder)
        else:
            cases.mixture(folder)
        if kind == "fp8":
            cases.in_float8(folder, (128, 128))
        filling.fill.__defaults__ = (1 << 18, None)
        loading.attach = lambda model, fill, *_: (model, fill(model, cases.tiles_of_dtypes(model)))
        for _ in range(2):  # what libraries keep is there after the first
            model = store = None
            gc.collect()
            give_back_freed_memory()
            before = resident("VmRSS")
            open("/proc/self/clear_refs", "w").write("5")
            model, store = megacompile.from_pretrained(folder, device="cpu", dtype="bfloat16")
            taken = resident("VmHWM") - before
        size = sum(tile.weights.numel() for tile in store.tiles.values())  # bytes
        print(size + sum(tile.remainder.nbytes for tile in store.tiles.values()) * (kind != "one by one"), taken)
    """)
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script, tmp_path, kind], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    size, taken = map(int, done.stdout.split())  # untouched remainders of values in bf16 take no memory
    assert size > 36 << 20, "so large that codes alone, half a byte for each weight, would be above the limit"
    assert taken - size < 8 << 20, f"loading took {taken - size:,} bytes more than the tiles' {size:,}"
