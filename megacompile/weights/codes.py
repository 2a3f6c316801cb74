"""Formats of frozen weights in four or eight bits, and the values of their codes.

    format        bytes per weight    values
    FourBits      0.516               16 of a table, times a scale for each block of 64 weights. Scales are 8-bit codes
                                      themselves ("double quantization"), with an FP32 scale for each 256 of them
    EightBits     1                   integers from -127 to 127, times an FP32 scale for each row
    Microscaled   0.531               FP4 numbers, times a power of two for each block of 32 weights (MXFP4)
    ScaledFloats  1.000               FP8 numbers, times an FP32 scale for each block of 128 x 128 weights

The layouts of codes are those of bitsandbytes, whose checkpoints can be read, of MXFP4 as GPT-OSS is published, and of FP8 as
DeepSeek-V3 is published. NF4: Dettmers et al., "QLoRA" (arXiv 2305.14314), appendix E; 8-bit codes of scales: Dettmers et al.,
"8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861); MXFP4: OCP Microscaling Formats (MX) Specification v1.0; FP8:
"DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 3.3.2.
"""
from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from megacompile.errors import UnsupportedError
from megacompile.frontend.ops.four_bit_values import FOUR_BIT_VALUES, MAP, SCALES_IN_GROUP, TABLE

#: Quantiles of a normal distribution, from -1 to 1, with an exact zero.
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
#: Weights that are encoded at a time: what that takes in addition is some 50 bytes for each.
_AT_ONCE = 1 << 22


class Format(Protocol):
    """A format of the weights of a linear layer. Codes and scales are uint8, 1-D."""

    @property
    def name(self) -> str: ...

    @property
    def rows(self) -> int:
        """The number of rows that share scales, so that a matrix can be decoded from one of its multiples on; 0 if the scales
        of a matrix are not divided by rows."""

    def fits(self, shape: tuple[int, int]) -> bool:
        """True if a matrix of this shape can be stored in this format."""

    def code_bytes(self, shape: tuple[int, int]) -> int: ...

    def scale_bytes(self, shape: tuple[int, int]) -> int: ...

    def piece(self, shape: tuple[int, int]) -> int:
        """The number of weights that are encoded at a time. All pieces but the last have this size."""

    def encode(self, pieces: Iterable[Tensor], codes: Tensor, scales: Tensor, shape: tuple[int, int]) -> None:
        """A matrix of this shape in pieces, floats, 1-D -> codes and scales."""

    def decode(self, codes: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Codes and scales -> values `shape`, computed in FP32. A compiler should fuse this into one kernel."""


@dataclass(frozen=True)
class FourBits:
    """Two codes in a byte, the first one in the high bits. Scales: FP32 values of the 16 codes; then, if `nested`, FP32 values
    of the 256 codes of scales, their mean, and a scale for each group, followed by the codes of scales; otherwise an FP32 scale
    for each block. `block`: weights that share a scale."""

    block: int = 64
    nested: bool = True

    name, rows = "nf4", 0

    def fits(self, shape: tuple[int, int]) -> bool:
        return math.prod(shape) % self.block == 0

    def code_bytes(self, shape: tuple[int, int]) -> int:
        return math.prod(shape) // 2

    def scale_bytes(self, shape: tuple[int, int]) -> int:
        blocks = math.prod(shape) // self.block
        if not self.nested:
            return 4 * (TABLE + blocks)
        return 4 * (TABLE + MAP + 1 + _groups(blocks)) + blocks

    def piece(self, shape: tuple[int, int]) -> int:
        return max(1, _AT_ONCE // self.block) * self.block

    def encode(self, pieces: Iterable[Tensor], codes: Tensor, scales: Tensor, shape: tuple[int, int]) -> None:
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

    def decode(self, codes: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
        return FOUR_BIT_VALUES(codes, scales, self.block, self.nested, dtype).view(shape)


@dataclass(frozen=True)
class EightBits:
    """A signed integer for each weight, and FP32 scales of rows."""

    name, rows = "int8", 0

    def fits(self, shape: tuple[int, int]) -> bool:
        return True

    def code_bytes(self, shape: tuple[int, int]) -> int:
        return math.prod(shape)

    def scale_bytes(self, shape: tuple[int, int]) -> int:
        return 4 * shape[0]

    def piece(self, shape: tuple[int, int]) -> int:
        return max(1, _AT_ONCE // shape[1]) * shape[1]

    def encode(self, pieces: Iterable[Tensor], codes: Tensor, scales: Tensor, shape: tuple[int, int]) -> None:
        at, maxima, numbers = 0, [], codes.view(torch.int8)
        for piece in pieces:
            rows = piece.float().view(-1, shape[1])
            maxima.append(rows.abs().amax(1))
            numbers[at:at + piece.numel()] = (rows * (127 * _inverse(maxima[-1]))[:, None]).round().flatten().to(torch.int8)
            at += piece.numel()
        scales.copy_(as_bytes(torch.cat(maxima) / 127))

    def decode(self, codes: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
        return (codes.view(torch.int8).view(shape).float() * scales.view(torch.float32)[:, None]).to(dtype)


@dataclass(frozen=True)
class MicroscaledFourBits:
    """FP4 (E2M1) codes, two in a byte, the first one in the low bits; and for each block of 32 weights of a row a power of two,
    as its exponent plus 127 (E8M0). OCP Microscaling Formats v1.0, sections 5.3.3, 5.4.1 and 6.3: the power is that of the
    block's largest absolute value, over that of the largest code."""

    block = 32

    name, rows = "mxfp4", 1

    def fits(self, shape: tuple[int, int]) -> bool:
        return shape[1] % self.block == 0

    def code_bytes(self, shape: tuple[int, int]) -> int:
        return math.prod(shape) // 2

    def scale_bytes(self, shape: tuple[int, int]) -> int:
        return math.prod(shape) // self.block

    def piece(self, shape: tuple[int, int]) -> int:
        return max(1, _AT_ONCE // self.block) * self.block

    def encode(self, pieces: Iterable[Tensor], codes: Tensor, scales: Tensor, shape: tuple[int, int]) -> None:
        at, magnitudes = 0, torch.tensor(E2M1)
        for piece in pieces:
            blocks = piece.float().view(-1, self.block)
            exponents = (torch.frexp(blocks.abs().amax(1)).exponent - 1 - _E2M1_EXPONENT).clamp(-_E8M0_BIAS, _E8M0_BIAS)
            numbers = _nearest(torch.ldexp(blocks.abs(), -exponents[:, None]), magnitudes) | (blocks < 0).to(torch.uint8) << 3
            pairs = numbers.view(-1, 2)
            codes[at:at + len(pairs)] = pairs[:, 0] | pairs[:, 1] << 4
            scales[at // 16:at // 16 + len(blocks)] = (exponents + _E8M0_BIAS).to(torch.uint8)
            at += len(pairs)

    def decode(self, codes: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
        # Arithmetic instead of a table: graphs with constants are not cached. A scale's bits are those of an FP32 exponent.
        numbers = torch.stack((codes & 15, codes >> 4), dim=-1).view(-1, self.block)
        exponent, fraction = numbers >> 1 & 3, (numbers & 1).float()
        values = torch.where(exponent > 0, (2 + fraction) * (1 << exponent.int()), 2 * fraction) * 0.25
        signed = torch.where(numbers > 7, -values, values)
        return (signed * (scales.int() << 23).view(torch.float32)[:, None]).view(shape).to(dtype)


@dataclass(frozen=True)
class ScaledFloats:
    """FP8 codes (E4M3, `torch.float8_e4m3fn`), and an FP32 scale for each block of a matrix. Blocks at the right and lower edge
    may be smaller. `block`: rows and columns of a block."""

    block: tuple[int, int] = (128, 128)

    name = "fp8"

    @property
    def rows(self) -> int:
        return self.block[0]

    def fits(self, shape: tuple[int, int]) -> bool:
        return True

    def code_bytes(self, shape: tuple[int, int]) -> int:
        return math.prod(shape)

    def scale_bytes(self, shape: tuple[int, int]) -> int:
        return 4 * math.prod(self._grid(shape))

    def piece(self, shape: tuple[int, int]) -> int:
        block_row = self.block[0] * shape[1]
        return max(1, _AT_ONCE // block_row) * block_row

    def encode(self, pieces: Iterable[Tensor], codes: Tensor, scales: Tensor, shape: tuple[int, int]) -> None:
        at, maxima, width, numbers = 0, [], shape[1], codes.view(torch.float8_e4m3fn)
        for piece in pieces:
            rows = piece.float().view(-1, width)
            blocks = self._blocks(rows)
            maxima.append(blocks.abs().amax((1, 3)))
            scaled = blocks * (_LARGEST_E4M3 * _inverse(maxima[-1]))[:, None, :, None]
            numbers[at:at + rows.numel()] = self._matrix(scaled, rows.shape).flatten().to(torch.float8_e4m3fn)
            at += rows.numel()
        scales.copy_(as_bytes(torch.cat(maxima) / _LARGEST_E4M3))

    def decode(self, codes: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
        # Arithmetic instead of a float8 dtype, which only new GPUs convert. A code is a number of steps of 2^-9.
        numbers = codes.view(shape).int()
        exponent, fraction = numbers >> 3 & 15, numbers & 7
        steps = torch.where(exponent > 0, (8 + fraction) << (exponent - 1).clamp(min=0), fraction).float() * 2**-9
        signed = torch.where(numbers > 127, -steps, steps)
        grid = scales.view(torch.float32).view(self._grid(shape))[:, None, :, None].expand(-1, self.block[0], -1, self.block[1])
        return (signed * self._matrix(grid, shape)).to(dtype)

    def are_finite(self, codes: Tensor) -> bool:
        """True if no code is NaN."""
        return not bool(((codes & 127) == 127).any())

    def _grid(self, shape: Sequence[int]) -> tuple[int, int]:
        """The number of blocks in a column and in a row."""
        return -(-shape[0] // self.block[0]), -(-shape[1] // self.block[1])

    def _blocks(self, matrix: Tensor) -> Tensor:
        """[block rows, rows, block columns, columns], with zeros beyond the edges."""
        (down, across), (rows, columns) = self._grid(matrix.shape), self.block
        missing = across * columns - matrix.shape[1], down * rows - matrix.shape[0]
        return functional.pad(matrix, (0, missing[0], 0, missing[1])).view(down, rows, across, columns)

    def _matrix(self, blocks: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse of `_blocks`."""
        down, rows, across, columns = blocks.shape
        return blocks.reshape(down * rows, across * columns)[:shape[0], :shape[1]]


#: The largest number of E4M3.
_LARGEST_E4M3 = 448.0
#: Magnitudes of the codes of FP4, and the exponent of the largest.
E2M1, _E2M1_EXPONENT = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), 2
_E8M0_BIAS = 127

#: By the name that users give.
FORMATS: dict[str, Format] = {"nf4": FourBits(), "int8": EightBits(), "mxfp4": MicroscaledFourBits(),
                             "fp8": ScaledFloats()}


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
            stored.encode(pieces, made.weight.data, made.scales.data, shape_of(made))
        return made.train(linear.training)

    def put(self, codes: Tensor, scales: Tensor) -> None:
        """Replaces codes and scales, uint8, 1-D."""
        self.weight, self.scales = (nn.Parameter(each, requires_grad=False) for each in (codes, scales))

    def dequantized_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in]."""
        return self.stored.decode(self.weight, self.scales, shape_of(self), dtype)

    def forward(self, input: Tensor) -> Tensor:
        dtype = self.compute_dtype or input.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return functional.linear(input.to(dtype), self.dequantized_weight(dtype), bias).to(input.dtype)

    def reset_parameters(self) -> None:
        raise UnsupportedError("quantized weights have no initial values: initialize the model before it is quantized")

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, stored={self.stored}, compute_dtype={self.compute_dtype}"


def shape_of(linear: nn.Linear) -> tuple[int, int]:
    """The shape of a layer's weight (out, in), also of a weight in codes."""
    return linear.out_features, linear.in_features


# --------------------
# Experts whose frozen stacked weights, [experts, rows, columns], are stored in four or eight bits.
@dataclass(frozen=True)
class Stack:
    """A stacked weight: its shape and dtype. It is encoded as one matrix of all experts' rows; `transposed`: of their
    columns."""

    shape: tuple[int, int, int]
    dtype: torch.dtype
    transposed: bool = False

    @classmethod
    def of(cls, weight: Tensor, transposed: bool = False) -> Stack:
        experts, rows, columns = weight.shape
        return cls((experts, rows, columns), weight.dtype, transposed)

    @property
    def matrix(self) -> tuple[int, int]:
        """The shape of the matrix."""
        experts, rows, columns = self.shape
        return (experts * columns, rows) if self.transposed else (experts * rows, columns)


class QuantizedExperts(nn.Module):
    """What a module of experts becomes: an instance of a subclass of this class and of its own class. The weights are in
    `NAME_codes` and `NAME_scales`, uint8 [bytes], and reading `NAME` gives their values.

    `stacks`: each weight by name. `deltas`: tensors that are added to the values, for PEFT's own forward."""

    stored: Format
    stacks: dict[str, Stack]
    deltas: dict[str, Tensor]

    @classmethod
    def of(cls, experts: nn.Module, stacks: Mapping[str, Stack], stored: Format) -> QuantizedExperts:
        """A module with the rounded values of this one; on the meta device if this one is there."""
        made: Any = copy.copy(experts)
        for held in ("_parameters", "_buffers", "_modules"):
            setattr(made, held, dict(getattr(experts, held)))
        made.stored, made.stacks, made.deltas = stored, dict(stacks), {}
        for name, stack in stacks.items():
            weight = made._parameters.pop(name)
            matrix, device = stack.matrix, "meta" if weight.is_meta else "cpu"
            codes, scales = _bytes(stored.code_bytes(matrix), device), _bytes(stored.scale_bytes(matrix), device)
            if not weight.is_meta:
                values = weight.detach().cpu()
                values = values.transpose(1, 2).contiguous() if stack.transposed else values
                stored.encode(values.flatten().split(stored.piece(matrix)), codes.data, scales.data, matrix)
            made._parameters |= {f"{name}_codes": codes, f"{name}_scales": scales}
        made.__class__ = _expert_class(type(experts), tuple(stacks))
        found: QuantizedExperts = made
        return found

    def put(self, name: str, codes: Tensor, scales: Tensor) -> None:
        """Replaces codes and scales of a weight, uint8, 1-D."""
        for part, values in (("codes", codes), ("scales", scales)):
            self._parameters[f"{name}_{part}"] = nn.Parameter(values, requires_grad=False)

    def dequantized(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values of a weight [experts, rows, columns]."""
        stack = self.stacks[name]
        values = self.stored.decode(getattr(self, f"{name}_codes"), getattr(self, f"{name}_scales"), stack.matrix, dtype)
        experts, rows, columns = stack.shape
        return values.view(experts, columns, rows).transpose(1, 2) if stack.transposed else values.view(stack.shape)

    def plain(self, dtype: torch.dtype) -> nn.Module:
        """The module with ordinary weights in this dtype."""
        made: Any = copy.copy(self)
        made._parameters = {name: p for name, p in self._parameters.items() if not name.endswith(("_codes", "_scales"))}
        values = {name: self.dequantized(name, dtype).contiguous() for name in self.stacks}
        made._parameters |= {name: nn.Parameter(each, requires_grad=False) for name, each in values.items()}
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
    values = experts.dequantized(name, experts.stacks[name].dtype)
    return values + experts.deltas[name] if name in experts.deltas else values


def weights_of_codes(model: nn.Module) -> dict[int, int]:
    """The number of weights that each parameter of codes or scales encodes, by its `id`."""
    found: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            found |= {id(module.weight): math.prod(shape_of(module)), id(module.scales): 0}
        elif isinstance(module, QuantizedExperts):
            for name, stack in module.stacks.items():
                codes, scales = (getattr(module, f"{name}_{part}") for part in ("codes", "scales"))
                found |= {id(codes): math.prod(stack.shape), id(scales): 0}
    return found


def _bytes(count: int, device: torch.device | str | None) -> nn.Parameter:
    return nn.Parameter(torch.empty(count, dtype=torch.uint8, device=device), requires_grad=False)
