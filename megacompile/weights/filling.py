"""Stored tensors -> tiles, without a second copy of the model: threads read parts of files directly into tiles.

Each thread has one block of memory in addition, and only where the dtype changes.
"""
from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megacompile import schema
from megacompile.errors import CheckpointError, UnsupportedError
from megacompile.frontend.tracing.layers import Layers
from megacompile.runtime.memory.divided import within
from megacompile.runtime.memory.store import Store
from megacompile.runtime.memory.tiles import TileMemory
from megacompile.weights.codes import (
    FORMATS,
    EightBits,
    Format,
    QuantizedExperts,
    QuantizedLinear,
    ScaledFloats,
    Stack,
    as_bytes,
    is_finite,
    shape_of,
)
from megacompile.weights.empty_models import place
from megacompile.weights.quantizing import four_bits, frozen_experts, frozen_linears, read_through_codes, stacked_weights
from megacompile.weights.tiling import Tiling
from megacompile.weights.weight_files import DTYPES, FLOATS, FusedTensor, StoredTensor, WeightReader

# --------------------
# Weights in files -> codes in tiles. Those in codes already are copied; others are rounded while they are read. Weights in
# codes that are trained, or that are no layer's, are expanded while they are read.
_STATE = ".quant_state.bitsandbytes__"
#: The entries that are read from bitsandbytes' state of a four-bit weight. Others are ignored.
_FLAT = {"shape": schema.sequence(schema.whole(1, 2**31)), "blocksize": schema.whole(1, 2**20)}
_NESTED = {**_FLAT, "nested_blocksize": schema.whole(1, 2**20), "nested_offset": schema.finite()}


@dataclass(frozen=True)
class PackedTensor(StoredTensor):
    """A weight that is stored in codes. `shape`: of the weight. `file`, `offset` and `bytes`: the location of the codes.
    `scales`: the stored tensors, and numbers, that our scales consist of, in order. Floats are multiplied by `factor`.
    `transposed`: the weight is a stack [experts, rows, columns], and its columns are in codes as rows."""

    stored: Format
    scales: tuple[StoredTensor | float, ...]
    factor: float = 1.0
    transposed: bool = False

    @property
    def matrix(self) -> tuple[int, int]:
        """The shape of the matrix that the codes are of."""
        if len(self.shape) == 2:
            return self.shape[0], self.shape[1]
        experts, rows, columns = self.shape
        return Stack((experts, rows, columns), torch.bfloat16, self.transposed).matrix

    def read_codes(self, reader: WeightReader, first: int, codes: Tensor) -> None:
        """Reads codes from the row `first` of the matrix on into `codes`, uint8, 1-D. Raises `CheckpointError` for NaNs."""
        reader.read(self, self.stored.code_bytes((first, self.matrix[1])), codes)
        checks = codes.split(BLOCK_ELEMENTS // 4) if isinstance(self.stored, ScaledFloats) else ()
        if not all(self.stored.are_finite(piece) for piece in checks):  # type: ignore[attr-defined]  # of this format
            raise _not_finite(self)

    def read_scales(self, reader: WeightReader) -> Tensor:
        """All scales, uint8, 1-D."""
        return torch.cat([as_bytes(torch.tensor(part)) if isinstance(part, float) else
                          self._scale_bytes(part, reader, 0, math.prod(part.shape)) for part in self.scales])

    def read_rows(self, reader: WeightReader, first: int, count: int) -> Tensor:
        """The values of `count` rows of the matrix from `first` on, a multiple of the format's rows, FP32 [count, columns]."""
        width, (scales,) = self.matrix[1], self.scales
        assert isinstance(scales, StoredTensor), "scales that are divided by rows are one tensor"
        codes = torch.empty(self.stored.code_bytes((count, width)), dtype=torch.uint8)
        self.read_codes(reader, first, codes)
        element = 1 if scales.dtype == "U8" else 4
        found = self._scale_bytes(scales, reader, self.stored.scale_bytes((first, width)) // element,
                                  self.stored.scale_bytes((count, width)) // element)
        return self.stored.decode(codes, found, (count, width))

    def _scale_bytes(self, part: StoredTensor, reader: WeightReader, start: int, count: int) -> Tensor:
        found = torch.empty(count, dtype=DTYPES[part.dtype])
        reader.read(part, start, found)
        return found if found.dtype == torch.uint8 else as_bytes(found.float() * self.factor)


def _not_finite(source: StoredTensor) -> CheckpointError:
    return CheckpointError(f"{source.name} in {source.file} has values that are not finite, which codes would spread to other "
                           "weights: copy or download the checkpoint again")


def _format_of(source: StoredTensor | None, wanted: Format | None = None) -> Format | None:
    """The format in which a frozen weight is kept: that of its codes, `wanted` for one that is not in codes, and None for one
    whose parts have codes that do not make those of the whole."""
    if not isinstance(source, FusedTensor):
        return source.stored if isinstance(source, PackedTensor) else wanted
    packed = [part for part in source.parts if isinstance(part, PackedTensor)]
    if not packed:
        return wanted
    form = packed[0].stored
    alike = len(packed) == len(source.parts) and all(part.stored == form and len(part.shape) == 2 for part in packed)
    return form if alike and form.rows and all(part.shape[0] % form.rows == 0 for part in packed[:-1]) else None


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
            self.source.read_codes(reader, 0, self.codes)
            self.scales.copy_(self.source.read_scales(reader))
        else:
            self.coded.stored.encode(self._pieces(reader), self.codes, self.scales, self.coded.shape)

    def _pieces(self, reader: WeightReader) -> Iterator[Tensor]:
        count, size = math.prod(self.coded.shape), self.coded.stored.piece(self.coded.shape)
        for start in range(0, count, size):
            piece = torch.empty(min(size, count - start), dtype=DTYPES[self.source.dtype])
            for part in _parts(self.source, piece, None, size, start):
                part.read(reader)
            if not is_finite(piece):
                raise _not_finite(self.source)
            yield piece


def packed_tensors(stored: Mapping[str, StoredTensor], reader: WeightReader,
                   block: tuple[int, int] = ScaledFloats().block) -> dict[str, StoredTensor]:
    """The stored tensors, with one `PackedTensor` instead of all tensors of a weight that bitsandbytes has quantized, of a
    stack of experts in MXFP4, or of a weight in FP8 with scales of blocks of this shape. Raises `UnsupportedError` for a weight
    that is not in a format of ours, and `CheckpointError` if a part of one is missing or has another size."""
    found = dict(stored)
    for name in stored:
        if _STATE in name:
            weight, _, kind = name.partition(_STATE)
            _gather(found, weight, _four_bits(weight, kind, stored, reader), (name,))
        elif name.endswith(".SCB"):
            weight = name.removesuffix("SCB") + "weight"
            _gather(found, weight, _eight_bits(weight, name, stored), (name, name.removesuffix("SCB") + "weight_format"))
        elif name.endswith(_BLOCKS) and stored[name].dtype == "U8" and len(stored[name].shape) == 4:
            weight = name.removesuffix(_BLOCKS)
            _gather(found, weight, _microscaled(weight, stored), (name,))
        elif name.endswith(_SCALE) and _part(stored, name.removesuffix(_SCALE)).dtype == "F8_E4M3":
            weight = name.removesuffix(_SCALE)
            _gather(found, weight, _scaled_floats(weight, stored, block), (name,))
    return found


def _gather(found: dict[str, StoredTensor], weight: str, packed: PackedTensor, others: tuple[str, ...]) -> None:
    parts = [part for part in packed.scales if isinstance(part, StoredTensor)]
    shape = packed.matrix
    numbers = len(packed.scales) - len(parts)
    there = packed.bytes, 4 * numbers + sum(math.prod(part.shape) * (1 if part.dtype == "U8" else 4) for part in parts)
    needed = packed.stored.code_bytes(shape), packed.stored.scale_bytes(shape)
    if there != needed:
        raise CheckpointError(f"{weight} of {list(shape)} has {there[0]:,} bytes of codes and {there[1]:,} bytes of scales, "
                              f"not {needed[0]:,} and {needed[1]:,}: copy or download the checkpoint again")
    for each in (*others, *(part.name for part in parts)):
        found.pop(each, None)
    found[weight] = packed


def _four_bits(weight: str, kind: str, stored: Mapping[str, StoredTensor], reader: WeightReader) -> PackedTensor:
    state = _state(stored[f"{weight}{_STATE}{kind}"], reader)
    shape, codes = tuple(state["shape"]), _part(stored, weight)
    form = four_bits(weight, shape, state["blocksize"], state.get("nested_blocksize"))

    def part(name: str) -> StoredTensor:
        return _part(stored, f"{weight}.{name}")

    scales: tuple[StoredTensor | float, ...] = part("quant_map"), part("absmax")
    if form.nested:
        mean = float(state["nested_offset"])
        scales = part("quant_map"), part("nested_quant_map"), mean, part("nested_absmax"), part("absmax")
    return PackedTensor(weight, codes.file, "BF16", shape, codes.offset, codes.bytes, form, scales)


#: The end of the name of MXFP4 codes: [experts, columns, blocks, 16], of a stack [experts, 32 * blocks, columns].
_BLOCKS = "_blocks"


def _microscaled(weight: str, stored: Mapping[str, StoredTensor]) -> PackedTensor:
    codes, scales = _part(stored, weight + _BLOCKS), _part(stored, weight + "_scales")
    experts, columns, blocks, _ = codes.shape
    form = FORMATS["mxfp4"]
    return PackedTensor(weight, codes.file, "BF16", (experts, 32 * blocks, columns), codes.offset, codes.bytes, form, (scales,),
                        transposed=True)


#: The end of the name of the scales of FP8 codes.
_SCALE = "_scale_inv"


def _scaled_floats(weight: str, stored: Mapping[str, StoredTensor], block: tuple[int, int]) -> PackedTensor:
    codes, scales = stored[weight], stored[weight + _SCALE]
    if len(codes.shape) != 2 or scales.dtype not in {*FLOATS, "F8_E8M0"}:
        raise UnsupportedError(f"{weight} of {list(codes.shape)} is in FP8 with scales in {scales.dtype}: only matrices with "
                               "scales in floats are supported; give the checkpoint in bfloat16")
    return PackedTensor(weight, codes.file, "BF16", codes.shape, codes.offset, codes.bytes, ScaledFloats(block), (scales,))


def _eight_bits(weight: str, scales: str, stored: Mapping[str, StoredTensor]) -> PackedTensor:
    codes = _part(stored, weight)
    if len(codes.shape) != 2:
        raise UnsupportedError(f"{weight} of {list(codes.shape)} is not a matrix: only quantized matrices are supported")
    return PackedTensor(weight, codes.file, "BF16", codes.shape, codes.offset, codes.bytes, EightBits(), (stored[scales],),
                        1 / 127)


def _state(stored: StoredTensor, reader: WeightReader) -> dict[str, Any]:
    text = torch.empty(stored.bytes, dtype=torch.uint8)
    reader.read(stored, 0, text)
    try:
        found = json.loads(bytes(text.tolist()))
        schema.record(_NESTED if "nested_blocksize" in found else _FLAT, others=schema.anything)(found, stored.name)
        return dict(found)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{stored.name} in {stored.file} is not the state of a quantized weight: copy or download it "
                              "again") from error


def _part(stored: Mapping[str, StoredTensor], name: str) -> StoredTensor:
    if name not in stored:
        raise CheckpointError(f"{name} is in no file, and belongs to a quantized weight: copy or download the checkpoint again")
    return stored[name]


def quantize_empty(model: nn.Module, sources: Mapping[str, StoredTensor], stored: Format | None,
                   layers: Layers | None, compute_dtype: torch.dtype | None) -> dict[str, StoredTensor | Coded]:
    """Replaces linear layers on the meta device by quantized ones, which compute in `compute_dtype`: frozen ones whose sources
    are in codes, and with a format `stored` all frozen ones in the model's layers. Returns the sources of all parameters.

    Raises `UnsupportedError` for another weight in codes, unless its format can be expanded while it is read."""
    made: dict[str, StoredTensor | Coded] = dict(sources)
    if stored is None and not any(map(_format_of, sources.values())):
        return made
    names = {id(module): name for name, module in model.named_modules()}
    for parent, child, linear in frozen_linears(model, layers):
        name = ".".join(filter(None, (names[id(parent)], child)))
        source = sources.get(f"{name}.weight")
        form = _format_of(source, stored)
        if form is not None and source is not None and form.fits(shape_of(linear)):
            parent._modules[child] = QuantizedLinear.of(linear, form, compute_dtype)
            made[f"{name}.weight"] = Coded(source, form, shape_of(linear), f"{name}.scales")
    for parent, child, experts, held in frozen_experts(model, layers):
        name = ".".join(filter(None, (names[id(parent)], child)))
        found = {weight: sources.get(f"{name}.{weight}") for weight in held}
        formats = {_format_of(source, stored) for source in found.values()}
        form = formats.pop()
        stacks = {weight: Stack.of(p, isinstance(source := found[weight], PackedTensor) and source.transposed)
                  for weight, p in held.items()}
        if form is None or formats or not all(form.fits(stack.matrix) for stack in stacks.values()):
            continue
        if all(source is not None for source in found.values()):
            parent._modules[child] = QuantizedExperts.of(experts, stacks, form)
            for weight, source in found.items():
                assert source is not None
                del made[f"{name}.{weight}"]
                made[f"{name}.{weight}_codes"] = Coded(source, form, stacks[weight].matrix, f"{name}.{weight}_scales")
    read_through_codes(model)
    for name, made_of in made.items():
        if isinstance(made_of, PackedTensor) and not made_of.stored.rows:
            raise UnsupportedError(f"{name} is quantized, and is not the weight of a frozen nn.Linear in a layer: leave it in "
                                   "bfloat16 when the model is quantized (llm_int8_skip_modules)")
    return made


def least_bytes_quantized(model: nn.Module, stored: Format) -> int:
    """The fewest bytes that a model's parameters take: with all its linear layers and experts quantized."""
    total = sum(p.nbytes for p in model.parameters())
    for module in model.modules():
        stacks = stacked_weights(module).values()
        matrices: list[tuple[tuple[int, int], Tensor]] = [(Stack.of(weight).matrix, weight) for weight in stacks]
        if type(module) is nn.Linear:
            matrices.append((shape_of(module), module.weight))
        total += sum(stored.code_bytes(shape) + stored.scale_bytes(shape) - weight.nbytes
                     for shape, weight in matrices if stored.fits(shape))
    return total


#: Elements that a thread reads at a time. All threads together take less than a gigabyte in addition to the tiles.
BLOCK_ELEMENTS = 1 << 22
#: Number of reading threads. Disks and network file systems are fast only with many requests at a time.
READERS = max(4, min(16, os.cpu_count() or 1))


@dataclass(frozen=True)
class Part:
    """Elements of a stored tensor from `start` on, in the order of its codes if it has codes, and the memory for them:
    `weights`, and in a bf16 tile also `remainder`."""

    source: StoredTensor
    start: int
    weights: Tensor
    remainder: Tensor | None

    def read(self, reader: WeightReader) -> None:
        dtype = DTYPES[self.source.dtype]
        if isinstance(self.source, PackedTensor):
            rows, width = self.weights.shape
            place(self.source.read_rows(reader, self.start // width, rows).flatten(), self.weights, self.remainder, threads=1)
        elif dtype == self.weights.dtype:
            reader.read(self.source, self.start, self.weights)
        else:
            block = torch.empty(self.weights.numel(), dtype=dtype)
            reader.read(self.source, self.start, block)
            place(block, self.weights, self.remainder, threads=1)


@dataclass(frozen=True)
class PartOfRows(Part):
    """Some elements of `count` rows of the matrix of a tensor in codes, which are read from `start` on. `skipped`: the elements
    of these rows before the first one."""

    count: int = 0
    skipped: int = 0

    def read(self, reader: WeightReader) -> None:
        assert isinstance(self.source, PackedTensor), "other tensors are read element by element"
        values = self.source.read_rows(reader, self.start // self.source.matrix[1], self.count).flatten()
        place(values[self.skipped:self.skipped + self.weights.numel()], self.weights, self.remainder, threads=1)


def fill(model: nn.Module, tiling: Tiling, sources: Mapping[str, StoredTensor | Coded], reader: WeightReader,
         block: int = BLOCK_ELEMENTS, memory: TileMemory | None = None) -> Store:
    """Allocates the tiles of a model whose parameters are on the meta device, reads their values, and puts parameters over the
    tiles into the model. `sources`: stored tensors by the first name of a parameter, or the name of a buffer. Parameters
    without one must have values, which are copied.

    Raises `CheckpointError` for a file that cannot be read; the model is then unchanged."""
    memory = memory or TileMemory()
    with ThreadPoolExecutor(READERS, "megacompile-read") as pool:
        store = tiling.store(dict(zip(tiling.host, pool.map(memory.allocate, tiling.host.values()), strict=True)))
        made: dict[int, nn.Parameter] = {}
        parts: list[Part | CodedPart] = []
        scales = {source.scales for source in sources.values() if isinstance(source, Coded)}
        homes: dict[str, Tensor] = {}  # of codes and scales
        copied: dict[str, list[str]] = {}  # by tile: parameters whose values are in memory
        for name, parameter in model.named_parameters():
            value, weights, remainder = _home(name, parameter, tiling, store)
            made[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
            shared = name in tiling.position  # by all ranks; else each has its own
            source = sources.get(name)
            runs = _runs(name, tiling, store)
            if isinstance(source, Coded) or name in scales:
                if runs is not None:
                    raise UnsupportedError(f"{name} is in codes, which cannot be divided among hosts while they are read: give "
                                           "each host a copy of the model, or leave quantize out")
                homes[name] = weights
            elif source is not None:
                whole = (0, weights.numel())
                found = [part for first, last in ([whole] if runs is None else runs) for part in _parts(
                    source, weights[first:last], None if remainder is None else remainder[first:last], block, first)]
                parts.extend(memory.share(found) if shared else found)
            else:
                if memory.writes or not shared:
                    assert not parameter.is_meta, f"{name} has no values"
                    place(parameter.detach().flatten(), weights, remainder)
                if runs is not None:
                    copied.setdefault(tiling.position[name][0], []).append(name)
        coded = {name: list(_coded_parts(source, homes[name], homes[source.scales]))
                 for name, source in sources.items() if isinstance(source, Coded)}
        parts.extend(memory.share([part for name, each in coded.items() if name in tiling.position for part in each]))
        parts.extend(part for name, each in coded.items() if name not in tiling.position for part in each)
        for name, buffer in model.named_buffers():
            if isinstance(source := sources.get(name), StoredTensor):
                assert buffer.is_contiguous(), f"buffer {name} is not contiguous"
                parts.extend(_parts(source, buffer.view(-1), None, block))
        parts.sort(key=lambda part: (part.source.file, part.source.offset, part.start))  # sequential reads are faster
        try:
            for done in [pool.submit(part.read, reader) for part in parts]:
                done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    for tile, names in copied.items():
        memory.written(store.tiles[tile], names)
    for module in model.modules():
        for name, held in module._parameters.items():
            if held is not None:  # tied parameters stay one object
                module._parameters[name] = made[id(held)]
    return store


def _home(name: str, parameter: nn.Parameter, tiling: Tiling, store: Store) -> tuple[Tensor, Tensor, Tensor | None]:
    """(the parameter's tensor, its elements, their remainder; the last two 1-D): in its tile, or in its own memory if no call
    reads it."""
    if name not in tiling.position:
        value = torch.empty(parameter.shape, dtype=parameter.dtype)
        return value, value.view(-1), None
    tile_name, index = tiling.position[name]
    tile = store.tiles[tile_name]
    part = tile.layout.slices[index]
    remainder = None if tile.remainder is None else tile.remainder[part.start:part.stop]
    return tile.parameter_view(tile.weights, index), tile.layout.flat(tile.weights)[part.start:part.stop], remainder


def _runs(name: str, tiling: Tiling, store: Store) -> list[tuple[int, int]] | None:
    """The elements of a parameter that this host has memory for; None if it has all."""
    if name not in tiling.position:
        return None
    tile_name, index = tiling.position[name]
    tile = store.tiles[tile_name]
    part = tile.layout.slices[index]
    return None if tile.here is None else [*within(tile.here, part.start, part.stop)]


def _parts(source: StoredTensor, weights: Tensor, remainder: Tensor | None, block: int, first: int = 0) -> Iterator[Part]:
    """Parts of some `block` elements for `weights`, the elements of a tensor from `first` on. Codes are read in whole rows."""
    if isinstance(source, FusedTensor):
        at = -first  # where a part begins in the weights
        for part in source.parts:
            start, stop = max(at, 0), min(at + math.prod(part.shape), weights.numel())
            if start < stop:
                yield from _parts(part, weights[start:stop], None if remainder is None else remainder[start:stop], block,
                                  start - at)
            at += math.prod(part.shape)
        return
    if isinstance(source, PackedTensor):
        whole = weights.numel() == math.prod(source.shape)
        yield from (_expanded(source, weights, remainder, block) if whole else
                    _expanded_run(source, weights, remainder, block, first))
        return
    for start in range(0, weights.numel(), block):
        stop = min(start + block, weights.numel())
        yield Part(source, first + start, weights[start:stop], None if remainder is None else remainder[start:stop])


def _expanded(source: PackedTensor, weights: Tensor, remainder: Tensor | None, block: int) -> Iterator[Part]:
    """Parts of a tensor in codes, each of some rows of its matrix. Their memory may be columns of a stack. Decoding takes
    several numbers for a weight, so that a part has fewer weights."""
    rows, width = source.matrix

    def stacks(memory: Tensor) -> Tensor:  # [stacks, rows, width]
        return memory.view(source.shape).transpose(1, 2) if source.transposed else memory.view(1, rows, width)

    homes, remainders = stacks(weights), None if remainder is None else stacks(remainder)
    step = max(1, block // 4 // width // source.stored.rows) * source.stored.rows
    for i, home in enumerate(homes):
        for start in range(0, len(home), step):
            chosen = slice(start, min(start + step, len(home)))
            yield Part(source, (i * len(home) + start) * width, home[chosen],
                       None if remainders is None else remainders[i][chosen])


def _expanded_run(source: PackedTensor, weights: Tensor, remainder: Tensor | None, block: int,
                  first: int) -> Iterator[Part]:
    """Like `_expanded`, for the elements of a tensor from `first` on."""
    if source.transposed:
        raise UnsupportedError(f"{source.name} is a stack of codes in columns, which cannot be divided among hosts: give "
                               "each host a copy of the model")
    (rows, width), each = source.matrix, source.stored.rows
    last, step = first + weights.numel(), max(1, block // 4 // width // each) * each
    for row in range(first // width // each * each, -(-last // width), step):
        count = min(step, rows - row)
        begin, end = max(first, row * width), min(last, (row + count) * width)
        chosen = slice(begin - first, end - first)
        yield PartOfRows(source, row * width, weights[chosen], None if remainder is None else remainder[chosen], count,
                         begin - row * width)


def _coded_parts(coded: Coded, codes: Tensor, scales: Tensor) -> Iterator[CodedPart]:
    """One part, or as many as the source has if it is in codes."""
    source, form, row, width = coded.source, coded.stored, 0, coded.shape[1]
    if not isinstance(source, FusedTensor) or _format_of(source) is None:
        yield CodedPart(coded, codes, scales)
        return
    for part in source.parts:
        rows = part.shape[0]
        at, to = ((form.code_bytes((r, width)), form.scale_bytes((r, width))) for r in (row, row + rows))
        yield CodedPart(replace(coded, source=part, shape=(rows, width)), codes[at[0]:to[0]], scales[at[1]:to[1]])
        row += rows
