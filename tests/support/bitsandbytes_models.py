"""Models and checkpoints as bitsandbytes makes them, for tests where it is not installed."""
from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tiny_models
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import BitsAndBytesConfig

from megacompile.weights.codes import NF4, EightBits, Format, FourBits, QuantizedLinear, dynamic_map

_NESTED_OFFSET = 16 + 256  # the index of the mean of the scales, among the FP32 numbers


def build(bf16: bool = False, layers: int = 1) -> Any:
    return tiny_models.build(bf16, hidden_size=32, intermediate_size=64, num_hidden_layers=layers)


class Params4bit(nn.Parameter):
    """Named as PEFT looks for it: its codes are not cast."""

    quant_state: Any


class Linear4bit(nn.Linear):
    """A layer with double quantization that computes as bitsandbytes' does: in its compute dtype, whatever its input's is."""

    __module__ = "bitsandbytes.nn.modules"

    def __init__(self, linear: nn.Linear, compute_dtype: torch.dtype = torch.float32) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.compute_dtype = compute_dtype
        codes, scales = encoded(FourBits(), linear.weight)
        self.values = FourBits().decode(codes, scales, (linear.out_features, linear.in_features))
        floats, absmax = divided(scales, linear.weight.numel())
        self.weight = Params4bit(codes[:, None], requires_grad=False)
        self.weight.quant_state = SimpleNamespace(
            blocksize=64, nested=True, code=floats[:16], absmax=absmax, offset=floats[_NESTED_OFFSET],
            state2=SimpleNamespace(blocksize=256, code=floats[16:_NESTED_OFFSET], absmax=floats[_NESTED_OFFSET + 1:]))

    def forward(self, input: Tensor) -> Tensor:
        dtype = self.compute_dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return functional.linear(input.to(dtype), self.values.to(dtype), bias).to(input.dtype)


def loaded(compute_dtype: torch.dtype = torch.float32, bf16: bool = True, layers: int = 1) -> Any:
    """A model as transformers loads it with a `BitsAndBytesConfig`."""
    model = build(bf16, layers).requires_grad_(False)
    for parent in list(model.model.layers.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                parent._modules[name] = Linear4bit(child, compute_dtype)
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                             bnb_4bit_compute_dtype=compute_dtype)
    model.config.quantization_config = how
    model.hf_quantizer = SimpleNamespace(quantization_config=how, is_trainable=True)
    model.is_quantized = model.is_loaded_in_4bit = True
    model.quantization_method = how.quant_method
    return model


def encoded(stored: Format, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix, both uint8."""
    shape = (weight.shape[0], weight.shape[1])
    codes, scales = (torch.empty(count, dtype=torch.uint8) for count in (stored.code_bytes(shape), stored.scale_bytes(shape)))
    stored.encode([weight.detach().flatten()], codes, scales, shape)
    return codes, scales


def divided(scales: Tensor, weights: int) -> tuple[Tensor, Tensor]:
    """The FP32 numbers of nested scales, and the scales in eight bits."""
    blocks = weights // 64
    return scales[:-blocks].clone().view(torch.float32), scales[-blocks:].clone()


def write_four_bits(source: Path, folder: Path) -> Path:
    """The model in `source`, as bitsandbytes stores it in NF4 with double quantization."""
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        weight = tensors.pop(name)
        codes, scales = encoded(FourBits(), weight)
        floats, absmax = divided(scales, weight.numel())
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape),
                 "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": floats[_NESTED_OFFSET].item()}
        tensors |= {name: codes[:, None], f"{name}.absmax": absmax, f"{name}.quant_map": torch.tensor(NF4),
                    f"{name}.nested_quant_map": dynamic_map().clone(),
                    f"{name}.nested_absmax": floats[_NESTED_OFFSET + 1:].clone(),
                    f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}
    return _write(source, folder, tensors, {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"})


def write_eight_bits(source: Path, folder: Path) -> Path:
    """The model in `source`, as bitsandbytes stores it for LLM.int8()."""
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        weight = tensors[name]
        codes, scales = encoded(EightBits(), weight)
        layer = name.removesuffix("weight")
        tensors |= {name: codes.view(torch.int8).view(weight.shape), f"{layer}SCB": scales.view(torch.float32) * 127,
                    f"{layer}weight_format": torch.tensor(0, dtype=torch.uint8)}
    return _write(source, folder, tensors, {"load_in_4bit": False, "load_in_8bit": True})


def _write(source: Path, folder: Path, tensors: dict[str, Tensor], how: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "bitsandbytes", **how}}))
    return folder


def layers_of(model: nn.Module) -> list[QuantizedLinear]:
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]
