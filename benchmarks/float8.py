"""Times one layer, forward and backward, with products in bfloat16 and in float8, by recipe; prints a table and JSON lines.

    python benchmarks/float8.py --output benchmarks/results/float8.jsonl --limit-minutes 8

Three kinds of rows. Of a "layer": the compiled template as training runs it, with its casts and with gradients added to FP32
sums. Of "products": only the matrix products of that layer, of operands that are rounded already, and the addition of weight
gradients. Of "gradient": one product for a weight gradient and its addition to FP32 sums, in each way there is. TFLOPS are 2 x
parameters of the layer's matrices x tokens for a forward, 4 for a backward, over the time. Values are random: zeros would draw
less power. Rows that are in the output already are not measured again. `--profile` prints the kernels of each layer.
"""
from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rows import Row, append, commit, machine, measured_before
from shapes import SHAPES, config
from tabulate import tabulate
from torch import Tensor
from transformers import AutoModelForCausalLM

from megacompile.api import analyse
from megacompile.codegen.scaled_products import add_scaled_product, scaled_product
from megacompile.compat.core import FakeTensorMode
from megacompile.frontend.ops.attention_kernels import fused_kernel
from megacompile.frontend.ops.scaled_linear import quantized
from megacompile.frontend.templates.template import BATCH, LENGTH, Template
from megacompile.frontend.templates.variants import compile_variant
from megacompile.ir.precision import precision_of
from megacompile.planning.config import StreamConfig
from megacompile.runtime.kernels import Kernel, ParameterGradient, accumulate
from megacompile.runtime.memory.arena import Accumulators
from megacompile.streaming.programs.captures import example_inputs

#: Recipes by the name of their row; "" is bfloat16.
RECIPES = {
    "bfloat16": "", "float8": "float8",
    "fast sums everywhere": "float8:fast_accumulation=all", "exact sums everywhere": "float8:fast_accumulation=none",
    "gradients in e4m3": "float8:gradients=e4m3", "weight gradients in bfloat16": "float8:weight_gradients=bfloat16",
    "scales of rows": "float8:scaling=row,gradients=e4m3",
    "scales of rows, weight gradients in bfloat16": "float8:scaling=row,gradients=e4m3,weight_gradients=bfloat16",
}


def seconds(call: Callable[[], object], device: str, repeats: int) -> float:
    """The median time of a call, after a second of warm-up in which clock rates settle."""
    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    begin = time.perf_counter()
    while True:
        call()
        synchronize()
        if device == "cpu" or time.perf_counter() - begin > 1:
            break
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


# ---------------------------------------------------------------- a layer
def template_of(shape: str, precision: str, device: str) -> Template:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(shape, 2), dtype=torch.bfloat16)
    options = StreamConfig.of(device=device, precision=precision or None)
    kernel = fused_kernel(torch.device(device)) if device == "cuda" else "flash"
    return analyse(model, options, device, None, None, kernel)[0].templates["decoder"]


def filled(fake: Any, parameter: bool, device: str) -> Any:
    """A random value in the place of a fake. Weights have the deviation that they begin with."""
    if not isinstance(fake, Tensor):
        return fake
    value = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=device)
    if not fake.is_floating_point():
        return value.zero_()
    return value.copy_(torch.randn(fake.shape, device=device) * (0.02 if parameter else 1.0))


class Layer:
    """A layer's compiled variants, its inputs, and FP32 sums of its gradients."""

    def __init__(self, template: Template, batch: int, length: int, device: str, mode: str) -> None:
        self.template, self.device, self.mode = template, device, mode
        self.sizes = {BATCH: batch, LENGTH: length}
        parameters = [i for i, each in enumerate(template.inputs) if each.role.kind == "parameter"]
        fakes = self._examples("forward")
        self.inputs = [filled(fake, i in parameters, device) for i, fake in enumerate(fakes)]
        self.matrices = [tuple(map(int, template.inputs[i].shape)) for i in parameters if len(template.inputs[i].shape) == 2]
        views = tuple(torch.zeros(tuple(map(int, template.inputs[i].shape)), device=device) for i in parameters)
        self.sums = (Accumulators("layer", views[0], views),)
        self.position = {index: position for position, index in enumerate(parameters)}
        self.runs = {name: self._compiled(name) for name in ("forward_saving", "backward", "recompute_backward")}
        outputs = self.run("forward_saving", self.inputs)[:template.outputs]
        self.tangents = [1e-3 * torch.randn_like(out) for out, differentiated in
                         zip(outputs, template.has_gradient, strict=True) if differentiated]

    def _examples(self, name: str) -> list[Any]:
        with FakeTensorMode():
            return example_inputs(self.template, self.template.variant(name), lambda size: int(size.xreplace(self.sizes)),
                                  torch.device(self.device))

    def _compiled(self, name: str) -> tuple[Callable[..., Any], Kernel]:
        variant = self.template.variant(name)
        run = compile_variant(variant, self._examples(name), self.mode)
        gradients = tuple(ParameterGradient(g.results, 0, self.position[g.input], g.kernel)
                          for g in variant.gradients if g.input in self.position)
        return run, Kernel(run, (), variant.outputs, parameter_gradients=gradients)

    @torch.no_grad()
    def run(self, name: str, values: list[Any]) -> tuple[Any, ...]:
        function, kernel = self.runs[name]
        results: tuple[Any, ...] = function(*values)
        accumulate(kernel, results, self.sums)
        return results

    def step(self) -> None:
        """A forward that keeps residuals, and its backward."""
        results = self.run("forward_saving", self.inputs)
        self.run("backward", [*self.inputs, *results[self.template.outputs:], *self.tangents])

    def recompute(self) -> None:
        self.run("recompute_backward", [*self.inputs, *self.tangents])


def layer_row(shape: str, recipe: str, batch: int, length: int, given: argparse.Namespace) -> Row:
    torch.manual_seed(0)
    layer = Layer(template_of(shape, RECIPES[recipe], given.device), batch, length, given.device, given.mode)
    matrices = sum(rows * columns for rows, columns in layer.matrices)
    forward = seconds(lambda: layer.run("forward_saving", layer.inputs), given.device, given.repeats)
    both = seconds(layer.step, given.device, given.repeats)
    again = seconds(layer.recompute, given.device, given.repeats)
    if given.profile:
        profile(layer, recipe)
    tokens = batch * length
    return {"matrix_parameters": matrices, "forward_s": forward, "step_s": both, "recompute_s": again,
            "forward_tflops": 2 * matrices * tokens / forward / 1e12, "tflops": 6 * matrices * tokens / both / 1e12,
            "recompute_tflops": 8 * matrices * tokens / again / 1e12}


def profile(layer: Layer, recipe: str) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        layer.step()
        torch.cuda.synchronize()
    print(recipe)
    print(profiled.key_averages().table(sort_by="device_time_total", row_limit=30, max_name_column_width=90))


# ---------------------------------------------------------------- products alone
def products_row(shape: str, recipe: str, batch: int, length: int, given: argparse.Namespace) -> Row:
    """The three products of each matrix, each matrix by itself."""
    template, tokens, total = template_of(shape, "", given.device), batch * length, 0.0
    shapes = [tuple(map(int, each.shape)) for each in template.inputs if each.role.kind == "parameter" and len(each.shape) == 2]
    for rows, columns in shapes:
        total += seconds(three_products(recipe, rows, columns, tokens, given.device), given.device, given.repeats)
        gc.collect()
    matrices = sum(rows * columns for rows, columns in shapes)
    return {"matrix_parameters": matrices, "step_s": total, "tflops": 6 * matrices * tokens / total / 1e12}


def three_products(recipe: str, rows: int, columns: int, tokens: int, device: str) -> Callable[[], None]:
    x, weight, gradient = (torch.randn(shape, device=device, dtype=torch.bfloat16)
                           for shape in ((tokens, columns), (rows, columns), (tokens, rows)))
    sums = torch.zeros(rows, columns, device=device)
    chosen = precision_of(RECIPES[recipe] or None)

    def add_in_bfloat16() -> None:
        add_product(sums, gradient.t(), x)

    if chosen is None:
        def plain() -> None:
            x @ weight.t()
            gradient @ weight
            add_in_bfloat16()
        return plain
    low, by = chosen.gradients, chosen.scaling
    forward = quantized(x, "e4m3", by), quantized(weight, "e4m3", by)
    backward = quantized(gradient, low, by), quantized(weight.t().contiguous(), "e4m3", by)
    of_weight = quantized(gradient.t().contiguous(), low, by), quantized(x.t().contiguous(), "e4m3", by)

    def operands(pair: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        (a, scale_a), (b, scale_b) = pair
        return a, b.t(), scale_a, scale_b.t() if scale_b.dim() else scale_b

    def scaled() -> None:
        scaled_product(*operands(forward), None, torch.bfloat16, chosen.kernel(True))
        scaled_product(*operands(backward), None, torch.bfloat16, chosen.kernel(False))
        if chosen.weight_gradients == "float8":
            add_scaled_product(sums, *operands(of_weight), chosen.kernel(False))
        else:
            add_in_bfloat16()
    return scaled


def add_product(sums: Tensor, a: Tensor, b: Tensor) -> None:
    """sums += a @ b, as the runtime does it for weight gradients in bfloat16."""
    if sums.is_cuda:
        torch.addmm(sums, a, b, out_dtype=torch.float32, out=sums)
    else:
        sums.add_(a @ b)


# ---------------------------------------------------------------- one weight gradient
GRADIENTS = ("bfloat16, added in the product", "float8, added in the product", "float8, float32 added",
             "float8, bfloat16 added", "float8, not added")


def gradient_row(shape: str, recipe: str, batch: int, length: int, given: argparse.Namespace) -> Row:
    """The largest weight gradient of a layer."""
    sizes, tokens = SHAPES[shape], batch * length
    rows, columns = sizes["intermediate_size"], sizes["hidden_size"]
    x, gradient = (torch.randn(tokens, width, device=given.device, dtype=torch.bfloat16) for width in (columns, rows))
    sums = torch.zeros(rows, columns, device=given.device)
    (a, scale_a), (b, scale_b) = (quantized(each.t().contiguous(), form, "tensor")
                                  for each, form in ((gradient, "e5m2"), (x, "e4m3")))
    kernel = "float8" if given.device == "cuda" else "emulated"

    def call() -> None:
        if recipe.startswith("bfloat16"):
            add_product(sums, gradient.t(), x)
            return
        if recipe.endswith("in the product"):
            add_scaled_product(sums, a, b.t(), scale_a, scale_b, kernel)
            return
        dtype = torch.bfloat16 if "bfloat16 added" in recipe else torch.float32
        product = scaled_product(a, b.t(), scale_a, scale_b, None, dtype, kernel)
        if "not" not in recipe:
            sums.add_(product)

    took = seconds(call, given.device, given.repeats)
    return {"step_s": took, "tflops": 2 * rows * columns * tokens / took / 1e12}


KINDS: dict[str, tuple[Callable[..., Row], tuple[str, ...]]] = {
    "layer": (layer_row, tuple(RECIPES)), "products": (products_row, tuple(RECIPES)), "gradient": (gradient_row, GRADIENTS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen2-7b")
    parser.add_argument("--tokens", type=int, nargs="*", default=[8192, 16384], help="tokens of a micro-batch")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--kinds", nargs="*", choices=tuple(KINDS), default=list(KINDS))
    parser.add_argument("--recipes", nargs="*", choices=tuple(RECIPES), default=list(RECIPES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--uncompiled", dest="mode", action="store_const", const="eager", default="inductor")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--limit-minutes", type=float, default=float("inf"), help="begin no row after so many minutes")
    parser.add_argument("--profile", action="store_true", help="print device time by kernel for each layer")
    parser.add_argument("--output", type=Path, help="append rows to this JSON-lines file")
    given = parser.parse_args()
    if given.device == "cpu":
        RECIPES.update({name: text.replace("float8", "float8-emulated", 1) for name, text in RECIPES.items()})
    began, found = time.perf_counter(), []
    for tokens in given.tokens:
        for kind in given.kinds:
            measure, names = KINDS[kind]
            for name in names:
                if name in RECIPES and name not in given.recipes:
                    continue
                row: Row = {"kind": kind, "run": name, "shape": given.shape, "tokens": tokens, "length": given.length,
                            "mode": given.mode, **machine(given.device)}
                done = measured_before(given.output, row)
                if done is None and time.perf_counter() - began < 60 * given.limit_minutes:
                    done = row | attempt(measure, given, name, tokens) | {"commit": commit()}
                    print(f"{kind}, {tokens} tokens, {name}: {done.get('error') or round(done['tflops'])}", flush=True)
                    if given.output is not None:
                        append(given.output, done)
                found += [done] if done is not None else []
    headers = ["", "tokens", "", "ms", "TFLOPS", "forward", "recomputed"]
    print(tabulate([_line(row) for row in found], headers, tablefmt="github"))


def attempt(measure: Callable[..., Row], given: argparse.Namespace, name: str, tokens: int) -> Row:
    """A row, or its error: other rows are measured anyway."""
    try:
        return measure(given.shape, name, tokens // given.length, given.length, given)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    finally:
        gc.collect()
        if given.device == "cuda":
            torch.cuda.empty_cache()


def _line(row: Row) -> tuple[Any, ...]:
    if "error" in row:
        return row["kind"], row["tokens"], row["run"], row["error"][:60]
    rates = (round(row[name]) if name in row else "" for name in ("tflops", "forward_tflops", "recompute_tflops"))
    return row["kind"], row["tokens"], row["run"], round(row["step_s"] * 1e3, 2), *rates


if __name__ == "__main__":
    main()
