"""A linear layer whose frozen weight is stored in four or eight bits. It is expanded where the layer computes."""
from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from megacompile.errors import UnsupportedError
from megacompile.weights.codes import Format


class QuantizedLinear(nn.Linear):
    """`nn.Linear` whose `weight` is in codes, uint8 [bytes], with `scales`, uint8 [bytes]. Neither is trained.

    An `nn.Linear`, so that PEFT puts adapters on it. The product is computed in `compute_dtype` (None: the input's dtype), and
    the result has the input's dtype."""

    def __init__(self, in_features: int, out_features: int, bias: nn.Parameter | None, stored: Format,
                 device: torch.device | str | None = None, compute_dtype: torch.dtype | None = None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.stored = in_features, out_features, stored
        self.compute_dtype = compute_dtype
        self.weight = _bytes(stored.code_bytes(shape_of(self)), device)
        self.scales = _bytes(stored.scale_bytes(shape_of(self)), device)
        self.register_parameter("bias", bias)

    @classmethod
    def of(cls, linear: nn.Linear, stored: Format, compute_dtype: torch.dtype | None = None) -> QuantizedLinear:
        """A layer with the rounded values of this one; on the meta device, if this one is there."""
        device = "meta" if linear.weight.is_meta else "cpu"
        made = cls(linear.in_features, linear.out_features, linear.bias, stored, device, compute_dtype)
        if not linear.weight.is_meta:
            pieces = linear.weight.detach().cpu().flatten().split(stored.piece(shape_of(made)))
            stored.encode(pieces, made.weight.data, made.scales.data)
        return made.train(linear.training)

    def put(self, codes: Tensor, scales: Tensor) -> None:
        """Replaces codes and scales by these, uint8, 1-D."""
        self.weight, self.scales = (nn.Parameter(each, requires_grad=False) for each in (codes, scales))

    def dequantized_weight(self) -> Tensor:
        """The weight, FP32 [out, in]."""
        return self.stored.decode(self.weight, self.scales, shape_of(self))

    def forward(self, input: Tensor) -> Tensor:
        dtype = self.compute_dtype or input.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return functional.linear(input.to(dtype), self.dequantized_weight().to(dtype), bias).to(input.dtype)

    def reset_parameters(self) -> None:
        raise UnsupportedError("quantized weights have no initial values: initialize the model before it is quantized")

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, stored={self.stored}, compute_dtype={self.compute_dtype}"


def shape_of(linear: nn.Linear) -> tuple[int, int]:
    """The shape of a layer's weight (out, in), also of a weight in codes."""
    return linear.out_features, linear.in_features


def weights_of_codes(model: nn.Module) -> dict[int, int]:
    """How many weights each parameter of codes or scales stands for, by its `id`."""
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    return {id(layer.weight): math.prod(shape_of(layer)) for layer in layers} | {id(layer.scales): 0 for layer in layers}


def _bytes(count: int, device: torch.device | str | None) -> nn.Parameter:
    return nn.Parameter(torch.empty(count, dtype=torch.uint8, device=device), requires_grad=False)
