"""Weights in files -> codes in tiles. Those that bitsandbytes has quantized are copied; others are rounded while they are read.
"""
from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.errors import CheckpointError, UnsupportedError
from megacompile.weights.codes import SCALES_IN_GROUP, EightBits, Format, FourBits
from megacompile.weights.quantized_linear import QuantizedLinear
from megacompile.weights.quantizing import frozen_linears
from megacompile.weights.weight_files import DTYPES, StoredTensor, WeightReader

_STATE = ".quant_state.bitsandbytes__"


@dataclass(frozen=True)
class PackedTensor(StoredTensor):
    """A weight that is stored in codes. `shape`: of the weight. `file`, `offset`, `bytes`: of its codes. `scales`: the stored
    tensors whose values, times `factor`, follow each other in our scales; `mean` follows where one is None."""

    stored: Format
    scales: tuple[StoredTensor | None, ...]
    mean: float = 0.0
    factor: float = 1.0


@dataclass(frozen=True)
class Coded:
    """The source of a quantized layer's codes and scales. `source`: a weight, packed or not. `scales`: the parameter's name."""

    source: StoredTensor
    stored: Format
    shape: tuple[int, int]
    scales: str


@dataclass(frozen=True)
class CodedPart:
    """A quantized layer to be read into `codes` and `scales`, uint8, 1-D."""

    coded: Coded
    codes: Tensor
    scales: Tensor
    start: int = 0

    @property
    def source(self) -> StoredTensor:
        return self.coded.source

    def read(self, reader: WeightReader) -> None:
        if isinstance(self.source, PackedTensor):
            reader.read(self.source, 0, self.codes)
            self.scales.copy_(torch.cat([self._bytes(each, reader) for each in self.source.scales]))
        else:
            self.coded.stored.encode(self._pieces(reader), self.codes, self.scales)

    def _bytes(self, stored: StoredTensor | None, reader: WeightReader) -> Tensor:
        assert isinstance(self.source, PackedTensor)
        if stored is None:
            return torch.tensor([self.source.mean]).view(torch.uint8)
        found = torch.empty(math.prod(stored.shape), dtype=DTYPES[stored.dtype])
        reader.read(stored, 0, found)
        return found if found.dtype == torch.uint8 else (found.float() * self.source.factor).view(torch.uint8)

    def _pieces(self, reader: WeightReader) -> Iterator[Tensor]:
        count, size = math.prod(self.coded.shape), self.coded.stored.piece(self.coded.shape)
        for start in range(0, count, size):
            piece = torch.empty(min(size, count - start), dtype=DTYPES[self.source.dtype])
            reader.read(self.source, start, piece)
            yield piece


def packed_tensors(stored: Mapping[str, StoredTensor], reader: WeightReader) -> dict[str, StoredTensor]:
    """The stored tensors, in which one `PackedTensor` takes the place of all tensors that bitsandbytes stores of a weight.

    Raises `UnsupportedError` for a weight in a form that is not known, and `CheckpointError` if a part of one is missing."""
    found = dict(stored)
    for name in stored:
        if _STATE in name:
            weight, _, kind = name.partition(_STATE)
            _gather(found, weight, _four_bits(weight, kind, stored, reader), (name,))
        elif name.endswith(".SCB"):
            weight = name.removesuffix("SCB") + "weight"
            _gather(found, weight, _eight_bits(weight, name, stored), (name, name.removesuffix("SCB") + "weight_format"))
    return found


def _gather(found: dict[str, StoredTensor], weight: str, packed: PackedTensor, others: tuple[str, ...]) -> None:
    for each in (*others, *(part.name for part in packed.scales if part is not None)):
        found.pop(each, None)
    found[weight] = packed


def _four_bits(weight: str, kind: str, stored: Mapping[str, StoredTensor], reader: WeightReader) -> PackedTensor:
    state = _state(stored[f"{weight}{_STATE}{kind}"], reader)
    names = ["quant_map", "absmax"]
    nested = "nested_blocksize" in state
    if nested:
        if state["nested_blocksize"] != SCALES_IN_GROUP:
            raise UnsupportedError(f"{weight} has nested blocks of {state['nested_blocksize']} scales, not {SCALES_IN_GROUP}: "
                                   "quantize the model again")
        names = ["quant_map", "nested_quant_map", "", "nested_absmax", "absmax"]
    parts = tuple(_part(stored, f"{weight}.{name}") if name else None for name in names)
    form, shape = FourBits(int(state["blocksize"]), nested), tuple(state["shape"])
    codes = _part(stored, weight)
    if len(shape) != 2 or not form.fits((shape[0], shape[1])) or codes.bytes != form.code_bytes((shape[0], shape[1])):
        raise UnsupportedError(f"{weight} of {list(shape)} is stored in blocks of {form.block}, which do not divide it: leave "
                               "the layer in bfloat16 (llm_int8_skip_modules)")
    return PackedTensor(weight, codes.file, "BF16", shape, codes.offset, codes.bytes, form, parts,
                        float(state.get("nested_offset", 0.0)))


def _eight_bits(weight: str, scales: str, stored: Mapping[str, StoredTensor]) -> PackedTensor:
    codes = _part(stored, weight)
    return PackedTensor(weight, codes.file, "BF16", codes.shape, codes.offset, codes.bytes, EightBits(), (stored[scales],),
                        factor=1 / 127)


def _state(stored: StoredTensor, reader: WeightReader) -> dict[str, Any]:
    text = torch.empty(stored.bytes, dtype=torch.uint8)
    reader.read(stored, 0, text)
    try:
        return dict(json.loads(bytes(text.tolist())))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{stored.name} in {stored.file} is not the state of a quantized weight: copy or download it "
                              "again") from error


def _part(stored: Mapping[str, StoredTensor], name: str) -> StoredTensor:
    if name not in stored:
        raise CheckpointError(f"{name} is in no file, and belongs to a quantized weight: copy or download the checkpoint again")
    return stored[name]


def quantize_empty(model: nn.Module, sources: Mapping[str, StoredTensor],
                   stored: Format | None) -> dict[str, StoredTensor | Coded]:
    """Replaces linear layers on the meta device by quantized ones: those with packed sources, and with a format `stored` all
    frozen ones in the model's layers. Returns the sources of all parameters.

    Raises `UnsupportedError` for a packed weight that belongs to no frozen linear layer."""
    made: dict[str, StoredTensor | Coded] = dict(sources)
    names = {id(module): name for name, module in model.named_modules()}
    for parent, child, linear in frozen_linears(model):
        name = ".".join(filter(None, (names[id(parent)], child)))
        source = sources.get(f"{name}.weight")
        form = source.stored if isinstance(source, PackedTensor) else stored
        shape = (linear.out_features, linear.in_features)
        if form is None or source is None or not form.fits(shape):
            continue
        parent._modules[child] = QuantizedLinear.of(linear, form)
        made[f"{name}.weight"] = Coded(source, form, shape, f"{name}.scales")
    for name, found in made.items():
        if isinstance(found, PackedTensor):
            raise UnsupportedError(f"{name} is quantized, and is not the weight of a frozen nn.Linear in a layer: leave it in "
                                   "bfloat16 when the model is quantized (llm_int8_skip_modules)")
    return made


def bytes_quantized(model: nn.Module, stored: Format) -> int:
    """Bytes of a model's parameters once its frozen linear layers are quantized."""
    total = sum(p.nbytes for p in model.parameters())
    for _, _, linear in frozen_linears(model):
        shape = (linear.out_features, linear.in_features)
        if stored.fits(shape):
            total += stored.code_bytes(shape) + stored.scale_bytes(shape) - linear.weight.nbytes
    return total
