"""Templates -> kernels: compiles variants for a program's shapes, and binds each call's inputs to their memory."""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
import torch

from megacompile.codegen.inductor import Inductor
from megacompile.compat.core import FakeTensorMode
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.symbolic_sizes import UNIT, UNITS, CodeForAnySize, SymbolicSizes, can_be_symbols
from megacompile.frontend.templates.template import BATCH, LENGTH, Call, Template, Variant
from megacompile.frontend.templates.variants import compile_for_any_size, compile_variant
from megacompile.inputs.packed_layout import LENGTH as PACKED_LENGTH
from megacompile.inputs.packed_layout import power_of_two
from megacompile.ir.ops import TEMPLATE_OPS
from megacompile.ir.plan import FULL_TOKENS, Plan
from megacompile.ir.program import Program, argument, nodes, op_of
from megacompile.runtime.kernels import Input, Kernel, ParameterGradient
from megacompile.system.long_lived import collections_paused
from megacompile.system.under_way import at, under_way
from megacompile.weights.tiling import Tiling

#: A variant of any number of packed rows, and their length, None for any.
AnySize: TypeAlias = tuple[Variant, int | None]


@dataclass
class Binder:
    """Kernels of one streamed model. State: compiled variants by (variant, mode, batch, length). With `symbolic_sizes`, also
    variants of uneven rows that serve any number of rows, by (variant, length) with None for any length; each with the sizes
    that inductor tuned for (None: the variant cannot serve any). `inductor` counts compilations.
    `usual_rows`, `usual_length`: the packed rows to tune for; `usual_rows` None: the rows of full kernels."""

    captured: CapturedModel
    tiling: Tiling
    device: torch.device
    compiling: bool
    symbolic_sizes: bool = False
    usual_rows: int | None = None
    usual_length: int = PACKED_LENGTH
    compiled: dict[tuple[Variant, str, int, int], Callable[..., Any]] = field(default_factory=dict)
    for_any_size: dict[AnySize, dict[tuple[int, int], CodeForAnySize | None]] = field(default_factory=dict)
    inductor: Inductor = field(default_factory=Inductor)

    @property
    def variants_of_any_size(self) -> int:
        """Number of variants that serve any number of rows."""
        return sum(code is not None for codes in self.for_any_size.values() for code in codes.values())

    @property
    def sizes(self) -> set[tuple[int | None, int | None]]:
        """Micro-batch sizes that kernels exist for: (rows, length), with None for any number."""
        any_rows = {(None, length) for (_, length), codes in self.for_any_size.items() if any(codes.values())}
        return {key[2:] for key in self.compiled} | any_rows

    @property
    def variants(self) -> int:
        """Number of compiled variants, counted for each batch and length."""
        return len(self.compiled) + self.variants_of_any_size

    def bind(self, program: Program, section: str, plan: Plan, comes_again: bool = True) -> dict[tuple[str, str, int], Kernel]:
        """The kernels of a section, by (call, op, micro-batch). A shape that is not likely to come again runs uncompiled."""
        mode = "inductor" if self.compiling and comes_again else "eager"
        calls = {c.name: c for c in self.captured.calls_for(plan.output)}
        kernels = {}
        with under_way(f"compiling kernels for {plan.batch} x {plan.length}"), collections_paused():
            for node in nodes(program.section(section)):
                op = op_of(node).name
                if op in TEMPLATE_OPS:
                    call, mb = calls[argument(node, "call")], argument(node, "mb")
                    at(f"{call.template}, {op}")
                    kernels[call.name, op, mb] = self._kernel(program, call, op, mb, plan, mode)
        return kernels

    def compile_ahead(self, program: Program, plan: Plan) -> None:
        """Compiles what `bind` would compile for training in addition to the code for any size that there is, such as code for
        few tokens. Compiles no variant that has no code yet, and nothing for one size only."""
        if not (self.symbolic_sizes and self.captured.key.packed and self.compiling):
            return
        calls = {c.name: c for c in self.captured.calls_for(plan.output)}
        needed = {(calls[argument(node, "call")].template, op_of(node).name, program.micro_batches[argument(node, "mb")])
                  for section, graph in program.sections.items() if section != "evaluate"
                  for node in nodes(graph) if op_of(node).name in TEMPLATE_OPS}
        with collections_paused():
            for name, op, batch in sorted(needed):
                at(f"{name}, {op}")
                template = self.captured.templates[name]
                variant = _variant(template, op, batch, plan)
                codes = self.for_any_size.get((variant, None))
                if codes and None not in codes.values() and UNITS in can_be_symbols(batch, plan.length):
                    self._with_symbols(template, variant, batch, plan.length, (BATCH, UNITS))

    def _kernel(self, program: Program, call: Call, op: str, mb: int, plan: Plan, mode: str) -> Kernel:
        template = self.captured.templates[call.template]
        batch, length = program.micro_batches[mb], plan.length_of(mb)
        variant = _variant(template, op, batch, plan)
        tiles = program.call(call.name).tiles
        trainable = [t for t in tiles if program.tiles[t].trainable]
        parameters, carried = [], {}
        for gradient in variant.gradients:
            source = call.sources[gradient.input]
            if source.kind == "parameter":
                tile, position = self.tiling.read_at[source.name]
                parameters.append(ParameterGradient(gradient.results, trainable.index(tile), position, gradient.kernel))
            else:
                assert source.kind == "carried" and len(gradient.results) == 1, f"a gradient for {source}"
                carried[source.index] = gradient.results[0]
        uneven = self.captured.key.packed or bool(plan.lengths)
        function = self._for_any_size(template, variant, batch, length) if uneven and mode == "inductor" else None
        return Kernel(
            function or self._compile(template, variant, batch, length, mode),
            tuple(self._input(call, i) for i in range(len(call.sources))),
            variant.outputs, variant.residuals, sum(template.has_gradient), tuple(parameters),
            tuple(carried[i] for i in sorted(carried)))

    def _input(self, call: Call, index: int) -> Input:
        source = call.sources[index]
        if source.kind == "parameter":
            tile, position = self.tiling.read_at[source.name]
            return Input("parameter", source.name, self.tiling.tiles_of[call.name].index(tile), position)
        return Input("constant" if source.kind == "buffer" else source.kind, source.name, position=source.index)

    def _for_any_size(self, template: Template, variant: Variant, batch: int, length: int) -> Callable[..., Any] | None:
        """Code for `batch` rows of `length` that also serves other sizes. None if that is impossible or disabled."""
        if not self.symbolic_sizes:
            return None
        # A variant that fixes the length may still serve any number of rows.
        possible = can_be_symbols(batch, length)
        for symbols in dict.fromkeys((possible, (BATCH,) if batch > 1 else ())):
            if symbols and (made := self._with_symbols(template, variant, batch, length, symbols)) is not None:
                return made
        return None

    def _with_symbols(self, template: Template, variant: Variant, batch: int, length: int,
                      symbols: tuple[sympy.Symbol, ...]) -> Callable[..., Any] | None:
        length_fixed = None if UNITS in symbols else length
        codes = self.for_any_size.setdefault((variant, length_fixed), {})
        for hint in self._hints(batch, length, length_fixed is None):
            if hint not in codes:
                sizes = SymbolicSizes(*hint, symbols)
                with sizes.fakes:
                    examples = example_inputs(template, variant, sizes.size, self.device)
                codes[hint] = compile_for_any_size(variant, examples, sizes, self.inductor)
            code = codes[hint]
            if code is None:
                return None
            if (made := code.of(batch, length)) is not None:
                return made
        return None

    def _hints(self, batch: int, length: int, any_length: bool) -> list[tuple[int, int]]:
        """Numbers of rows (at least 2) and their lengths for inductor to choose kernels for, in the order to try them: usual
        ones; then, since code may hold only from a number of tokens on, or up to one, sizes with fewer and with more tokens
        than this one. Must not depend on earlier steps: a resumed run has the same bits as an uninterrupted one."""
        usual = self.usual_length if any_length else length
        first = max(2, self.usual_rows or FULL_TOKENS // usual), usual
        if not any_length:
            return [first, (max(2, power_of_two(batch)), length)]
        tokens = batch * length
        around = [power_of_two(tokens + 1) // 2, power_of_two(tokens)]
        lengths = [max(2 * UNIT, min(usual, count // 2)) for count in around]
        hints = [(max(2, count // each), each) for count, each in zip(around, lengths, strict=True)]
        return [first, *(hints if tokens < math.prod(first) else reversed(hints))]

    def _compile(self, template: Template, variant: Variant, batch: int, length: int, mode: str) -> Callable[..., Any]:
        key = variant, mode, batch, length
        if key not in self.compiled:
            examples: list[Any] = []
            numbers = {BATCH: sympy.Integer(batch), LENGTH: sympy.Integer(length)}
            if mode == "inductor":
                with FakeTensorMode():
                    examples = example_inputs(template, variant, lambda size: int(size.xreplace(numbers)), self.device)
            self.compiled[key] = compile_variant(variant, examples, mode, self.inductor)
        return self.compiled[key]


def _variant(template: Template, op: str, batch: int, plan: Plan) -> Variant:
    return template.variant(op, template.chunk(batch, plan.token_chunk), plan.residuals)


def example_inputs(template: Template, variant: Variant, size_of: Callable[[sympy.Expr], int | torch.SymInt],
                   device: torch.device) -> list[Any]:
    """Tensors, numbers and None with the shapes that a variant sees. `size_of` evaluates sizes that are written in terms of B
    and T. Returns fakes within a fake mode."""

    def size(value: Any) -> Any:
        return size_of(template.symbolic(value))

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
