"""Times the grouped products of a layer's experts, forward and backward, in bfloat16 and in float8; prints JSON lines.

    python benchmarks/float8_experts.py --shape qwen3-moe-30b --tokens 8192 65536 --output benchmarks/results/float8.jsonl

Answers whether the experts of a layer gain from float8. Kernels have a scale for each row of tokens, and for each output of
each expert, and take e4m3 only. Each weight is rounded twice, since a scale must not change along the dimension that is summed
over. Weight gradients stay in bfloat16: their groups of tokens would have to begin at multiples of 16.

    bfloat16                    six products: of two weights, for outputs, inputs and weights
    float8, products alone      four of them in float8, of operands that are rounded already
    float8                      the same with compiled casts of tokens, gradients and weights

`error` is the largest relative error of an output or an input's gradient beside float32. On a CPU float8 is emulated.
"""
from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from float8 import seconds
from rows import Row, append, commit, machine, measured_before
from shapes import SHAPES, config, expert_count
from torch import Tensor

from megacompile.compat.core import grouped_mm
from megacompile.frontend.ops.scaled_linear import quantized

RUNS = ("bfloat16", "float8, products alone", "float8")
#: Values in float8, with K last, and the scales of their rows.
Rounded = tuple[Tensor, Tensor]


def rounded(x: Tensor) -> Rounded:
    return quantized(x.contiguous(), "e4m3", "row")  # a copy of a transposed weight belongs to the cast's kernels


def product(a: Rounded, b: Rounded, ends: Tensor) -> Tensor:
    """bfloat16 [R, N]: rows [R, K] times the weight [N, K] of their group. `ends`: int32 [E], where each group ends."""
    (rows, of_rows), (weights, of_outputs) = a, b
    if not rows.is_cuda:
        return grouped_mm((rows.float() * of_rows).bfloat16(), (weights.float() * of_outputs).bfloat16().mT, offs=ends)
    how = F.ScalingType.RowWise
    multiply: Any = F.scaled_grouped_mm  # type: ignore[attr-defined]  # not in its stub
    return multiply(rows, weights.mT, of_rows.squeeze(-1), how, of_outputs.squeeze(-1), how, offs=ends,
                    output_dtype=torch.bfloat16, use_fast_accum=True)


class Experts:
    """Random weights [E, N, K] of a layer. Each weight has inputs [`routed`, K] and gradients of its outputs [`routed`, N], in
    which the groups of the experts differ in size."""

    def __init__(self, shape: str, tokens: int, device: str) -> None:
        sizes = config(shape, 1)
        experts, hidden = expert_count(sizes), sizes.hidden_size
        width = getattr(sizes, "moe_intermediate_size", None) or sizes.intermediate_size
        self.routed = tokens * sizes.num_experts_per_tok
        torch.manual_seed(0)
        shares = torch.rand(experts) + 0.5
        ends = (shares.cumsum(0) / shares.sum() * self.routed).round().int()
        self.ends = ends.to(device)
        self.weights = [torch.randn(experts, rows, columns, device=device, dtype=torch.bfloat16) * 0.02
                        for rows, columns in ((2 * width, hidden), (hidden, width))]
        self.inputs, self.gradients = (
            [torch.randn(self.routed, weight.shape[dim], device=device, dtype=torch.bfloat16) for weight in self.weights]
            for dim in (2, 1))
        #: Multiplications and additions of six products.
        self.operations = sum(6 * weight[0].numel() * self.routed for weight in self.weights)

    def in_bfloat16(self) -> list[Tensor]:
        """Outputs and gradients of inputs."""
        return [made for x, g, weight in self._each()
                for made in (grouped_mm(x, weight.mT, offs=self.ends), grouped_mm(g, weight, offs=self.ends))]

    def of_weights(self) -> None:
        for x, g, _ in self._each():
            grouped_mm(g.t(), x, offs=self.ends)

    def operands(self, cast: Callable[[Tensor], Rounded] = rounded) -> list[tuple[Rounded, Rounded]]:
        """The operands of the four products in float8, rounded."""
        return [pair for x, g, weight in self._each()
                for pair in ((cast(x), cast(weight)), (cast(g), cast(weight.mT)))]

    def in_float8(self, operands: list[tuple[Rounded, Rounded]]) -> list[Tensor]:
        return [product(*pair, self.ends) for pair in operands]

    def error(self, found: list[Tensor]) -> float:
        return self.largest_error(found, [pair for x, g, weight in self._each() for pair in ((x, weight.mT), (g, weight))])

    def largest_error(self, found: list[Tensor], operands: Sequence[tuple[Tensor, Tensor]]) -> float:
        """The largest relative error of products of rows [R, K] and their experts' matrices [E, K, N], beside float32."""
        worst, starts = 0.0, [0, *self.ends.tolist()]
        for made, (rows, matrices) in zip(found, operands, strict=True):
            exact = torch.cat([rows[start:end].float() @ matrix.float()
                               for start, end, matrix in zip(starts, starts[1:], matrices, strict=False)])
            worst = max(worst, float((made.float() - exact).norm() / exact.norm()))
        return worst

    def _each(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        return list(zip(self.inputs, self.gradients, self.weights, strict=True))


def measured(run: str, shape: str, tokens: int, device: str, repeats: int) -> Row:
    torch.compiler.reset()  # or sizes of earlier runs count for Dynamo's limit, and casts run op by op
    experts = Experts(shape, tokens, device)
    if run == "bfloat16":
        products = experts.in_bfloat16
    elif "alone" in run:
        operands = experts.operands()
        products = lambda: experts.in_float8(operands)  # noqa: E731
    else:
        cast = torch.compile(rounded, dynamic=False) if device == "cuda" else rounded
        products = lambda: experts.in_float8(experts.operands(cast))  # noqa: E731

    def step() -> None:
        products()
        experts.of_weights()

    error = experts.error(products())
    took = seconds(step, device, repeats)
    return {"error": error, "step_s": took, "tflops": experts.operations / took / 1e12}


def measure_each(description: str, kind: str, runs: Callable[[str], Sequence[str]], tokens: Sequence[int],
                 measured: Callable[[str, str, int, str, int], Row], shown: Callable[[Row], str]) -> None:
    """Reads the command line, measures each of the `runs` on a device for each number of tokens, unless its row is in the file
    already, and prints what is `shown` of it. `measured`: of a run, a shape, tokens, a device and repeats."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--shape", choices=[name for name, sizes in SHAPES.items() if "num_experts_per_tok" in sizes],
                        default="qwen3-moe-30b")
    parser.add_argument("--tokens", type=int, nargs="*", default=tokens, help="tokens of a micro-batch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", type=Path, help="append rows to this JSON-lines file")
    given = parser.parse_args()
    for count in given.tokens:
        for run in runs(given.device):
            row: Row = {"kind": kind, "run": run, "shape": given.shape, "tokens": count, **machine(given.device)}
            done = measured_before(given.output, row)
            if done is None:
                done = row | measured(run, given.shape, count, given.device, given.repeats) | {"commit": commit()}
                if given.output is not None:
                    append(given.output, done)
            print(f"{run}, {count} tokens: {shown(done)}", flush=True)


def main() -> None:
    measure_each(__doc__ or "", "experts", lambda device: RUNS, [8192, 65536], measured, lambda done: (
        f"{1e3 * done['step_s']:.2f} ms, {done['tflops']:.3g} TFLOPS, error {done['error']:.4f}"))


if __name__ == "__main__":
    main()
