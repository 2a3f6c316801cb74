"""Times the forward products of a layer's experts, frozen in NF4, by where the codes are expanded; prints JSON lines.

    python benchmarks/coded_experts.py --tokens 256 2048 16384 --output benchmarks/results/coded-experts.jsonl

Answers whether a product should expand the codes itself.

    bfloat16       grouped products of weights that were never in codes
    expanded       each weight is expanded as a whole and then multiplied: what megacompile does
    in pieces      the same for a quarter of each expert's rows at a time, whose results are copied into place. Only timed:
                   the pieces' scales are not those of the blocks
    fused          a grouped product in Triton that expands a tile of codes where it multiplies it. It has the same bits as
                   `expanded`, but for the order of sums
    fused, int8    the same kernel with the cheapest codes: what remains if the lookup of values costs nothing

`error` is the largest relative error beside float32 products of the same rounded weights. `workspace_bytes` is what a product
takes beside its operands and its result.
"""
from __future__ import annotations

import functools

import torch
from float8 import seconds
from float8_experts import Experts, measure_each
from rows import Row
from torch import Tensor

from megacompile.codegen import HAS_TRITON
from megacompile.compat.core import grouped_mm
from megacompile.weights.codes import FORMATS, FourBits, Stack

RUNS = ("bfloat16", "expanded", "in pieces", "fused", "fused, int8")
PIECES = 4

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _fused(rows, codes, floats, of_scales, out, tile_expert, tile_start, tile_end,  # type: ignore[no-untyped-def]
               width: tl.constexpr, inner: tl.constexpr, four_bits: tl.constexpr,
               size_m: tl.constexpr, size_n: tl.constexpr, size_k: tl.constexpr):
        tile = tl.program_id(1)
        expert = tl.load(tile_expert + tile)
        if expert < 0:
            return
        row = tl.load(tile_start + tile) + tl.arange(0, size_m)
        inside = row < tl.load(tile_end + tile)
        column = tl.program_id(0) * size_n + tl.arange(0, size_n)
        weight_row = expert.to(tl.int64) * width + column  # widths are multiples of tiles
        total = tl.zeros((size_m, size_n), tl.float32)
        for k in range(0, inner, size_k):
            x = tl.load(rows + row[:, None].to(tl.int64) * inner + k + tl.arange(0, size_k)[None, :], mask=inside[:, None])
            if four_bits:
                block = (weight_row * inner + k) // 64  # size_k is a block
                group = tl.load(floats + 273 + block // 256)
                largest = tl.load(floats + 16 + tl.load(of_scales + block).to(tl.int32)) * group + tl.load(floats + 272)
                place = (weight_row[:, None] * inner + k) // 2 + tl.arange(0, size_k // 2)[None, :]
                pairs = tl.load(codes + place).to(tl.int32)
                high = tl.load(floats + (pairs >> 4)) * largest[:, None]
                low = tl.load(floats + (pairs & 15)) * largest[:, None]
                w = tl.interleave(high, low).to(tl.bfloat16)
            else:
                numbers = tl.load(codes + weight_row[:, None] * inner + k + tl.arange(0, size_k)[None, :])
                w = numbers.to(tl.int8, bitcast=True).to(tl.bfloat16)
            total = tl.dot(x, tl.trans(w), total)
        if not four_bits:  # a scale for each row of weights
            total = total * tl.load(floats + weight_row)[None, :]
        tl.store(out + row[:, None].to(tl.int64) * width + column[None, :], total.to(tl.bfloat16), mask=inside[:, None])


def fused(rows: Tensor, codes: Tensor, scales: Tensor, ends: Tensor, width: int, four_bits: bool) -> Tensor:
    """bfloat16 [R, width]: rows [R, inner] times the weight [width, inner] of their expert, in NF4 or in int8."""
    experts, (count, inner) = len(ends), rows.shape
    size_m = 128 if count >= 64 * experts else 32
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    tiles = (ends - starts + size_m - 1) // size_m
    last = tiles.cumsum(0)
    tile = torch.arange(count // size_m + experts, device=rows.device)
    expert = torch.searchsorted(last, tile, right=True)
    known = expert.clamp(max=experts - 1)
    first = starts[known] + (tile - (last - tiles)[known]) * size_m
    out = rows.new_empty(count, width)
    blocks = 2 * codes.numel() // 64
    floats = (scales[:scales.numel() - blocks] if four_bits else scales).view(torch.float32)
    size_n = 128 if width % 128 == 0 else 64
    _fused[(width // size_n, len(tile))](
        rows, codes, floats, scales[scales.numel() - blocks:] if four_bits else scales, out,
        torch.where(expert < experts, expert, -1), first, ends[known], width, inner, four_bits,
        size_m, size_n, 64, num_warps=8, num_stages=3)
    return out


class CodedExperts(Experts):
    """The experts of a layer with their frozen weights in NF4 and in int8."""

    def __init__(self, shape: str, tokens: int, device: str) -> None:
        super().__init__(shape, tokens, device)
        self.gradients = []
        self.coded: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in ("nf4", "int8")}
        for weight in self.weights:
            matrix = Stack.of(weight).matrix
            for name, each in self.coded.items():
                stored = FORMATS[name]
                codes = torch.empty(stored.code_bytes(matrix), dtype=torch.uint8)
                scales = torch.empty(stored.scale_bytes(matrix), dtype=torch.uint8)
                stored.encode(weight.cpu().flatten().split(stored.piece(matrix)), codes, scales, matrix)
                each.append((codes.to(device), scales.to(device)))

    def values(self, name: str, at: int) -> Tensor:
        weight = self.weights[at]
        codes, scales = self.coded[name][at]
        return FORMATS[name].decode(codes, scales, Stack.of(weight).matrix, torch.bfloat16).view(weight.shape)

    def outputs(self, run: str) -> list[Tensor]:
        if run == "bfloat16":
            return [grouped_mm(x, w.mT, offs=self.ends) for x, w in zip(self.inputs, self.weights, strict=True)]
        if run == "expanded":
            return [grouped_mm(x, self.values("nf4", at).mT, offs=self.ends) for at, x in enumerate(self.inputs)]
        if run == "in pieces":
            return [self.in_pieces(at, x) for at, x in enumerate(self.inputs)]
        name = format_in(run)
        return [fused(x, *self.coded[name][at], self.ends, self.weights[at].shape[1], name == "nf4")
                for at, x in enumerate(self.inputs)]

    def in_pieces(self, at: int, x: Tensor) -> Tensor:
        """Outputs of the weight at this place. The scales of scales are not sliced, which takes no time either way."""
        experts, rows, columns = self.weights[at].shape
        codes, scales = self.coded["nf4"][at]
        stored = FourBits()
        out, height = x.new_empty(len(x), rows), rows // PIECES
        floats, of_scales = scales[:-(experts * rows * columns // 64)], scales[-(experts * rows * columns // 64):]
        for row in range(0, rows, height):
            piece = codes.view(experts, rows, -1)[:, row:row + height].reshape(-1)
            of_piece = of_scales.view(experts, rows, -1)[:, row:row + height].reshape(-1)
            weight = stored.decode(piece, torch.cat([floats, of_piece]), (experts * height, columns), torch.bfloat16)
            out[:, row:row + height] = grouped_mm(x, weight.view(experts, height, columns).mT, offs=self.ends)
        return out

    def error_of(self, run: str) -> float:
        weights = self.weights if run == "bfloat16" else [self.values(format_in(run), at) for at in range(len(self.weights))]
        return self.largest_error(self.outputs(run), [(x, w.mT) for x, w in zip(self.inputs, weights, strict=True)])


def format_in(run: str) -> str:
    return "int8" if "int8" in run else "nf4"


#: One run measures the experts that the run before has encoded, which takes seconds.
_experts = functools.lru_cache(maxsize=1)(CodedExperts)


def measured(run: str, shape: str, tokens: int, device: str, repeats: int) -> Row:
    experts = _experts(shape, tokens, device)
    took = seconds(lambda: experts.outputs(run), device, repeats)
    workspace = 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        out = experts.outputs(run)
        workspace = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        del out
    return {"error": experts.error_of(run) if run != "in pieces" else None, "step_s": took,
            "tflops": experts.operations / 3 / took / 1e12, "workspace_bytes": workspace}


def main() -> None:
    measure_each(__doc__ or "", "coded experts", lambda device: RUNS if device == "cuda" else RUNS[:3], [256, 2048, 16384],
                 measured, lambda done: (f"{1e3 * done['step_s']:.3f} ms, {done['tflops']:.3g} TFLOPS, error {done['error']}, "
                                         f"workspace {done['workspace_bytes'] / 2**20:.0f} MiB"))


if __name__ == "__main__":
    main()
