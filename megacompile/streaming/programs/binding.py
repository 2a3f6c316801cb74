"""Templates -> kernels: compiles variants for a program's shapes, and binds each call's inputs to their memory."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from megacompile.codegen.inductor import Inductor
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.symbolic_rows import CodeForAnyRows, SymbolicRows
from megacompile.frontend.templates.template import BATCH, LENGTH, Call, Template, Variant
from megacompile.frontend.templates.variants import compile_for_any_rows, compile_variant
from megacompile.inputs.packed_layout import power_of_two
from megacompile.ir.ops import TEMPLATE_OPS
from megacompile.ir.plan import FULL_TOKENS, Plan
from megacompile.ir.program import Program, argument, nodes, op_of
from megacompile.runtime.kernels import Input, Kernel, ParameterGradient
from megacompile.system.under_way import at, under_way
from megacompile.torch_compat.core import FakeTensorMode
from megacompile.weights.tiling import Tiling


@dataclass
class Binder:
    """Kernels of one streamed model. State: compiled variants by (variant, mode, batch, length). With `symbolic_rows`, also
    variants of packed rows that serve any number of rows, by (variant, length), with the number of rows that inductor tuned for
    (None: the variant cannot serve any number). `inductor` counts compilations. `usual_rows`: the number of rows to tune for;
    None: the rows of full kernels."""

    captured: CapturedModel
    tiling: Tiling
    device: torch.device
    compiling: bool
    symbolic_rows: bool = False
    usual_rows: int | None = None
    compiled: dict[tuple[Variant, str, int, int], Callable[..., Any]] = field(default_factory=dict)
    for_any_rows: dict[tuple[Variant, int], dict[int, CodeForAnyRows | None]] = field(default_factory=dict)
    inductor: Inductor = field(default_factory=Inductor)

    @property
    def variants_of_any_rows(self) -> int:
        """Number of variants that serve any number of rows."""
        return sum(code is not None for codes in self.for_any_rows.values() for code in codes.values())

    @property
    def sizes(self) -> set[tuple[int | None, int]]:
        """Micro-batch sizes that kernels exist for: (rows, length), with rows None for any number."""
        any_rows = {(None, length) for (_, length), codes in self.for_any_rows.items() if any(codes.values())}
        return {key[2:] for key in self.compiled} | any_rows

    @property
    def variants(self) -> int:
        """Number of compiled variants, counted for each batch and length."""
        return len(self.compiled) + self.variants_of_any_rows

    def bind(self, program: Program, section: str, plan: Plan, steady: bool = True) -> dict[tuple[str, str, int], Kernel]:
        """The kernels of a section, by (call, op, micro-batch). Shapes that will not come again run uncompiled (`steady` False:
        generation, where each shape is one token longer)."""
        mode = "inductor" if self.compiling and steady else "eager"
        calls = {c.name: c for c in self.captured.calls_for(plan.output)}
        kernels = {}
        with under_way(f"compiling kernels for {plan.batch} x {plan.length}"):
            for node in nodes(program.section(section)):
                op = op_of(node).name
                if op in TEMPLATE_OPS:
                    call, mb = calls[argument(node, "call")], argument(node, "mb")
                    at(f"{call.template}, {op}")
                    kernels[call.name, op, mb] = self._kernel(program, call, op, program.micro_batches[mb], plan, mode)
        return kernels

    def _kernel(self, program: Program, call: Call, op: str, batch: int, plan: Plan, mode: str) -> Kernel:
        template = self.captured.templates[call.template]
        variant = template.variant(op, template.chunk(batch, plan.token_chunk), plan.residuals)
        tiles = program.call(call.name).tiles
        trainable = [t for t in tiles if program.tiles[t].trainable]
        parameters, carried = [], {}
        for gradient in variant.gradients:
            source = call.sources[gradient.input]
            if source.kind == "parameter":
                tile, position = self.tiling.read_at[source.name]
                parameters.append(ParameterGradient(gradient.results, trainable.index(tile), position))
            else:
                assert source.kind == "carried" and len(gradient.results) == 1, f"a gradient for {source}"
                carried[source.index] = gradient.results[0]
        function = self._for_any_rows(template, variant, batch, plan.length, mode)
        return Kernel(
            function or self._compile(template, variant, batch, plan.length, mode),
            tuple(self._input(call, i) for i in range(len(call.sources))),
            variant.outputs, variant.residuals, sum(template.has_gradient), tuple(parameters),
            tuple(carried[i] for i in sorted(carried)))

    def _input(self, call: Call, index: int) -> Input:
        source = call.sources[index]
        if source.kind == "parameter":
            tile, position = self.tiling.read_at[source.name]
            return Input("parameter", source.name, self.tiling.tiles_of[call.name].index(tile), position)
        return Input("constant" if source.kind == "buffer" else source.kind, source.name, position=source.index)

    def _for_any_rows(self, template: Template, variant: Variant, batch: int, length: int,
                      mode: str) -> Callable[..., Any] | None:
        """Code for `batch` rows that also serves other numbers of rows. None if that is impossible or disabled."""
        if not (self.symbolic_rows and self.captured.key.packed and mode == "inductor" and batch > 1):
            return None
        codes = self.for_any_rows.setdefault((variant, length), {})
        # Must not depend on earlier steps: a resumed run has the same bits as an uninterrupted one.
        for hint in (max(2, self.usual_rows or FULL_TOKENS // length), power_of_two(batch)):
            if hint not in codes:
                rows = SymbolicRows(hint)
                with rows.fakes:
                    examples = example_inputs(template, variant, rows.size, length, self.device)
                codes[hint] = compile_for_any_rows(variant, examples, rows, self.inductor)
            code = codes[hint]
            if code is None:
                return None
            if (made := code.of(batch)) is not None:
                return made
        return None

    def _compile(self, template: Template, variant: Variant, batch: int, length: int, mode: str) -> Callable[..., Any]:
        key = variant, mode, batch, length
        if key not in self.compiled:
            examples: list[Any] = []
            if mode == "inductor":
                with FakeTensorMode():
                    examples = example_inputs(template, variant, lambda size: int(size.subs(BATCH, batch)), length, self.device)
            self.compiled[key] = compile_variant(variant, examples, mode, self.inductor)
        return self.compiled[key]


def example_inputs(template: Template, variant: Variant, size_of: Callable[[sympy.Expr], int | torch.SymInt], length: int,
                   device: torch.device) -> list[Any]:
    """Tensors, numbers and None with the shapes that a variant sees at this length. `size_of` evaluates sizes that are written
    in terms of B. Returns fakes within a fake mode."""

    def size(value: Any) -> Any:
        return size_of(template.symbolic(value).subs(LENGTH, length))

    reads = set(variant.reads)
    examples: list[Any] = []
    for i, placeholder in enumerate(variant.graph.graph.find_nodes(op="placeholder")):
        value = placeholder.meta["val"]
        if not isinstance(value, torch.Tensor):
            examples.append(size(value))
        elif i not in reads:
            examples.append(None)
        else:
            examples.append(torch.empty_strided([size(s) for s in value.shape], [size(s) for s in value.stride()],
                                                dtype=value.dtype, device=device))
    return examples
