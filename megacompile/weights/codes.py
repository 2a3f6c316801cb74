"""Formats of frozen weights in four or eight bits, and the values of their codes.

    format        bytes per weight    values
    FourBits      0.516               16 of a table, times a scale for each block of 64 weights. Scales are 8-bit codes
                                      themselves ("double quantization"), with an FP32 scale for each 256 of them
    EightBits     1                   integers from -127 to 127, times an FP32 scale for each row

The layouts of codes are those of bitsandbytes, whose checkpoints can be read. NF4: Dettmers et al., "QLoRA" (arXiv 2305.14314),
appendix E; 8-bit codes of scales: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861).
"""
from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from megacompile.errors import UnsupportedError

#: Quantiles of a normal distribution, from -1 to 1, with an exact zero.
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
#: Scales that share an FP32 scale.
SCALES_IN_GROUP = 256
_TABLE, _MAP = 16, 256
#: Weights that are encoded at a time: what that takes in addition is some 50 bytes for each.
_AT_ONCE = 1 << 22


class Format(Protocol):
    """A format of the weights of a linear layer. Codes and scales are uint8, 1-D."""

    @property
    def name(self) -> str: ...

    def fits(self, shape: tuple[int, int]) -> bool:
        """True if a matrix of this shape can be stored in this format."""

    def code_bytes(self, shape: tuple[int, int]) -> int: ...

    def scale_bytes(self, shape: tuple[int, int]) -> int: ...

    def piece(self, shape: tuple[int, int]) -> int:
        """The number of weights that are encoded at a time. All pieces but the last have this size."""

    def encode(self, pieces: Iterable[Tensor], codes: Tensor, scales: Tensor) -> None:
        """Floats, 1-D, in pieces -> codes and scales."""

    def decode(self, codes: Tensor, scales: Tensor, shape: tuple[int, int]) -> Tensor:
        """Codes and scales -> FP32 `shape`. A compiler should fuse this into one kernel."""


@dataclass(frozen=True)
class FourBits:
    """Two codes in a byte, the first one in the high bits. Scales: FP32 values of the 16 codes; then, if `nested`, FP32 values
    of the 256 codes of scales, their mean, and a scale for each group, followed by the codes of scales; otherwise an FP32 scale
    for each block. `block`: weights that share a scale."""

    block: int = 64
    nested: bool = True

    name = "nf4"

    def fits(self, shape: tuple[int, int]) -> bool:
        return math.prod(shape) % self.block == 0

    def code_bytes(self, shape: tuple[int, int]) -> int:
        return math.prod(shape) // 2

    def scale_bytes(self, shape: tuple[int, int]) -> int:
        blocks = math.prod(shape) // self.block
        if not self.nested:
            return 4 * (_TABLE + blocks)
        return 4 * (_TABLE + _MAP + 1 + _groups(blocks)) + blocks

    def piece(self, shape: tuple[int, int]) -> int:
        return max(1, _AT_ONCE // self.block) * self.block

    def encode(self, pieces: Iterable[Tensor], codes: Tensor, scales: Tensor) -> None:
        at, maxima = 0, []
        for piece in pieces:
            blocks = piece.float().view(-1, self.block)
            maxima.append(blocks.abs().amax(1))
            numbers = _nearest(blocks * _inverse(maxima[-1])[:, None], torch.tensor(NF4)).view(-1, 2)
            codes[at:at + len(numbers)] = numbers[:, 0] << 4 | numbers[:, 1]
            at += len(numbers)
        scales.copy_(self._scales(torch.cat(maxima)))

    def _scales(self, maxima: Tensor) -> Tensor:
        """The scales of blocks with these largest absolute values, FP32 [blocks]."""
        table = torch.tensor(NF4)
        if not self.nested:
            return as_bytes(table, maxima)
        mean = maxima.mean()
        groups = torch.nn.functional.pad(maxima - mean, (0, -len(maxima) % SCALES_IN_GROUP)).view(-1, SCALES_IN_GROUP)
        largest = groups.abs().amax(1)
        codes = _nearest(groups * _inverse(largest)[:, None], dynamic_map()).flatten()[:len(maxima)]
        return torch.cat([as_bytes(table, dynamic_map(), mean, largest), codes])

    def decode(self, codes: Tensor, scales: Tensor, shape: tuple[int, int]) -> Tensor:
        blocks = math.prod(shape) // self.block
        floats = (scales[:len(scales) - blocks] if self.nested else scales).view(torch.float32)
        numbers = torch.stack((codes >> 4, codes & 15), dim=-1).view(blocks, self.block)
        values = floats[:_TABLE][numbers.int()]
        return (values * self._maxima(floats[_TABLE:], scales[len(scales) - blocks:], blocks)[:, None]).view(shape)

    def _maxima(self, floats: Tensor, codes: Tensor, blocks: int) -> Tensor:
        if not self.nested:
            return floats
        of_groups = floats[_MAP + 1:, None].expand(-1, SCALES_IN_GROUP).reshape(-1)[:blocks]
        return floats[:_MAP][codes.int()] * of_groups + floats[_MAP]


@dataclass(frozen=True)
class EightBits:
    """A signed integer for each weight, and FP32 scales of rows."""

    name = "int8"

    def fits(self, shape: tuple[int, int]) -> bool:
        return True

    def code_bytes(self, shape: tuple[int, int]) -> int:
        return math.prod(shape)

    def scale_bytes(self, shape: tuple[int, int]) -> int:
        return 4 * shape[0]

    def piece(self, shape: tuple[int, int]) -> int:
        return max(1, _AT_ONCE // shape[1]) * shape[1]

    def encode(self, pieces: Iterable[Tensor], codes: Tensor, scales: Tensor) -> None:
        at, maxima, numbers, width = 0, [], codes.view(torch.int8), codes.numel() // (scales.numel() // 4)
        for piece in pieces:
            rows = piece.float().view(-1, width)
            maxima.append(rows.abs().amax(1))
            numbers[at:at + piece.numel()] = (rows * (127 * _inverse(maxima[-1]))[:, None]).round().flatten().to(torch.int8)
            at += piece.numel()
        scales.copy_(as_bytes(torch.cat(maxima) / 127))

    def decode(self, codes: Tensor, scales: Tensor, shape: tuple[int, int]) -> Tensor:
        return codes.view(torch.int8).view(shape).float() * scales.view(torch.float32)[:, None]


#: By the name that users give.
FORMATS: dict[str, Format] = {"nf4": FourBits(), "int8": EightBits()}


@functools.cache
def dynamic_map() -> Tensor:
    """The values of 8-bit codes of scales, FP32 [256], ascending from -0.99 to 1: seven decades, each with twice as many linear
    steps as the one below it, in both signs; 0 and 1."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** decade + 1)
        middles = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*middles.tolist(), *(-middles).tolist()]
    return torch.tensor(sorted(values))


def _groups(blocks: int) -> int:
    return -(-blocks // SCALES_IN_GROUP)


def _nearest(values: Tensor, table: Tensor) -> Tensor:
    """The index of the nearest value in an ascending table, uint8, in the shape of `values`."""
    return torch.bucketize(values, (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8)


def _inverse(maximum: Tensor) -> Tensor:
    """1 / maximum, and 0 for a block of zeros."""
    return torch.where(maximum > 0, 1 / maximum, 0)


def is_finite(weights: Tensor) -> bool:
    """True if all weights are finite. A scale that is not finite makes all weights that share it NaN."""
    return bool(torch.isfinite(weights).all())


def as_bytes(*floats: Tensor) -> Tensor:
    """FP32 numbers, one tensor after the other, as uint8 [bytes] on the CPU."""
    return torch.cat([each.detach().float().cpu().flatten() for each in floats]).view(torch.uint8)


# --------------------
# A linear layer whose frozen weight is stored in four or eight bits. It is expanded where the layer computes.
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
        """A layer with the rounded values of this one; on the meta device if this one is there."""
        device = "meta" if linear.weight.is_meta else "cpu"
        made = cls(linear.in_features, linear.out_features, linear.bias, stored, device, compute_dtype)
        if not linear.weight.is_meta:
            pieces = linear.weight.detach().cpu().flatten().split(stored.piece(shape_of(made)))
            stored.encode(pieces, made.weight.data, made.scales.data)
        return made.train(linear.training)

    def put(self, codes: Tensor, scales: Tensor) -> None:
        """Replaces codes and scales, uint8, 1-D."""
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


# --------------------
# Experts whose frozen stacked weights, [experts, rows, columns], are stored in four or eight bits. A stack is encoded as one
# matrix of all experts' rows.
class QuantizedExperts(nn.Module):
    """What a module of experts becomes: an instance of a subclass of this class and of its own class. The weights are in
    `NAME_codes` and `NAME_scales`, uint8 [bytes], and reading `NAME` gives their values.

    `stacks`: the shape and dtype of each weight. `deltas`: tensors that are added to the values, for PEFT's own forward."""

    stored: Format
    stacks: dict[str, tuple[tuple[int, int, int], torch.dtype]]
    deltas: dict[str, Tensor]

    @classmethod
    def of(cls, experts: nn.Module, names: Iterable[str], stored: Format) -> QuantizedExperts:
        """A module with the rounded values of this one; on the meta device if this one is there. `names`: the stacked
        weights."""
        names = tuple(names)
        made: Any = copy.copy(experts)
        for held in ("_parameters", "_buffers", "_modules"):
            setattr(made, held, dict(getattr(experts, held)))
        made.stored, made.stacks, made.deltas = stored, {}, {}
        for name in names:
            weight = made._parameters.pop(name)
            made.stacks[name] = tuple(weight.shape), weight.dtype
            matrix, device = matrix_of(weight.shape), "meta" if weight.is_meta else "cpu"
            codes, scales = _bytes(stored.code_bytes(matrix), device), _bytes(stored.scale_bytes(matrix), device)
            if not weight.is_meta:
                stored.encode(weight.detach().cpu().flatten().split(stored.piece(matrix)), codes.data, scales.data)
            made._parameters |= {f"{name}_codes": codes, f"{name}_scales": scales}
        made.__class__ = _expert_class(type(experts), names)
        found: QuantizedExperts = made
        return found

    def dequantized(self, name: str) -> Tensor:
        """The values of a weight, FP32 [experts, rows, columns]."""
        shape, _ = self.stacks[name]
        return self.stored.decode(getattr(self, f"{name}_codes"), getattr(self, f"{name}_scales"), matrix_of(shape)).view(shape)

    def plain(self, dtype: torch.dtype) -> nn.Module:
        """The module with ordinary weights in this dtype."""
        made: Any = copy.copy(self)
        made._parameters = {name: p for name, p in self._parameters.items() if not name.endswith(("_codes", "_scales"))}
        made._parameters |= {name: nn.Parameter(self.dequantized(name).to(dtype), requires_grad=False) for name in self.stacks}
        made.__class__ = type(self).__bases__[1]
        for name in ("stored", "stacks", "deltas"):
            del made.__dict__[name]
        found: nn.Module = made
        return found


def _expert_class(experts: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    if (experts, names) not in _expert_classes:
        values = {name: property(functools.partial(_values, name)) for name in names}
        _expert_classes[experts, names] = type(
            experts.__name__, (QuantizedExperts, experts), {"__module__": experts.__module__, **values})
    return _expert_classes[experts, names]


_expert_classes: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


def _values(name: str, experts: QuantizedExperts) -> Tensor:
    _, dtype = experts.stacks[name]
    values = experts.dequantized(name).to(dtype)
    return values + experts.deltas[name] if name in experts.deltas else values


def matrix_of(stack: Sequence[int]) -> tuple[int, int]:
    """The shape of the matrix that a stack of this shape is encoded as."""
    return stack[0] * stack[1], stack[2]


def weights_of_codes(model: nn.Module) -> dict[int, int]:
    """The number of weights that each parameter of codes or scales encodes, by its `id`."""
    found: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            found |= {id(module.weight): math.prod(shape_of(module)), id(module.scales): 0}
        elif isinstance(module, QuantizedExperts):
            for name, (shape, _) in module.stacks.items():
                found |= {id(getattr(module, f"{name}_codes")): math.prod(shape), id(getattr(module, f"{name}_scales")): 0}
    return found


def _bytes(count: int, device: torch.device | str | None) -> nn.Parameter:
    return nn.Parameter(torch.empty(count, dtype=torch.uint8, device=device), requires_grad=False)
