"""The captures of one streamed model: graphs, plans and kernels for each kind of batch, over the same tiles.

A plain batch has the graphs that the model was streamed with. Padding that must be seen, several sequences in a row, evaluation
mode where it computes something else, lengths at which the model's code branches: each has graphs of its own, captured when the
first such batch comes.
"""
from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx, nn

from megacompile.codegen.inductor import Inductor
from megacompile.compat.core import FakeTensorMode
from megacompile.errors import CaptureError, UnsupportedError, first_line
from megacompile.frontend.batches import pair_masks
from megacompile.frontend.batches.pair_masks import masks_in
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.kernel_tuning import MixerCall, mixer_calls, tuned_beside
from megacompile.frontend.templates.symbolic_sizes import UNIT, UNITS, CodeForAnySize, SymbolicSizes, can_be_symbols
from megacompile.frontend.templates.template import BATCH, LENGTH, Call, Template, TemplateInput, Variant
from megacompile.frontend.templates.variants import compile_for_any_size, compile_variant
from megacompile.inputs.batch import batch_types
from megacompile.inputs.packed_layout import LENGTH as PACKED_LENGTH
from megacompile.inputs.packed_layout import power_of_two
from megacompile.inputs.repacking import Repacking
from megacompile.ir.ops import TEMPLATE_OPS
from megacompile.ir.plan import FULL_TOKENS, PLAIN, CaptureKey, Plan
from megacompile.ir.program import Lane, Program, argument, nodes, op_of
from megacompile.planning.config import StreamConfig
from megacompile.planning.device import device_budget
from megacompile.planning.memory_budget import margins
from megacompile.planning.planner import Planner
from megacompile.planning.step_time import simulator_of
from megacompile.predict.hardware import Hardware
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.kernels import Input, Kernel, ParameterGradient
from megacompile.sizes import parse_bytes
from megacompile.system.linux import collections_paused
from megacompile.system.progress import at, under_way
from megacompile.weights.tiling import Tiling

# --------------------
# Templates -> kernels: compiles variants for a program's shapes, and binds each call's inputs to their memory.
#: A variant of any number of packed rows, and their length, None for any.
AnySize: TypeAlias = tuple[Variant, int | None]


@dataclass
class Binder:
    """Kernels of one streamed model. State: compiled variants by (variant, mode, batch, length). With `symbolic_sizes`, also
    variants of uneven rows that serve any number of rows, by (variant, length) with None for any length, each with the sizes
    that inductor tuned for (None: the variant cannot serve any). `tuned`: the kinds of calls of mixers whose kernels are tuned.
    `inductor` counts compilations. `usual_rows`, `usual_length`: the packed rows to tune for; `usual_rows` None: the rows of
    full kernels."""

    captured: CapturedModel
    tiling: Tiling
    backend: Backend
    compiling: bool
    symbolic_sizes: bool = False
    usual_rows: int | None = None
    usual_length: int = PACKED_LENGTH
    compiled: dict[tuple[Variant, str, int, int], Callable[..., Any]] = field(default_factory=dict)
    for_any_size: dict[AnySize, dict[tuple[int, int], CodeForAnySize | None]] = field(default_factory=dict)
    tuned: set[MixerCall] = field(default_factory=set)
    inductor: Inductor = field(default_factory=Inductor)

    @property
    def device(self) -> torch.device:
        return self.backend.device

    @property
    def variants_of_any_size(self) -> int:
        """Number of variants that serve any number of rows."""
        return sum(code is not None for codes in self.for_any_size.values() for code in codes.values())

    @property
    def sizes(self) -> set[tuple[int | None, int | None]]:
        """Micro-batch sizes that have kernels: (rows, length), with None for any number."""
        any_rows = {(None, length) for (_, length), codes in self.for_any_size.items() if any(codes.values())}
        return {key[2:] for key in self.compiled} | any_rows

    @property
    def variants(self) -> int:
        """Number of compiled variants, counted for each batch and length."""
        return len(self.compiled) + self.variants_of_any_size

    def bind(self, program: Program, section: str, plan: Plan, comes_again: bool = True) -> dict[tuple[str, str, int], Kernel]:
        """The kernels of a section, by (call, op, micro-batch). A shape that is unlikely to come again runs uncompiled."""
        mode = "inductor" if self.compiling and comes_again else "eager"
        needed = list(self._uses(program.section(section), plan))
        kernels = {}
        with under_way(f"compiling kernels for {plan.batch} x {plan.length}"), collections_paused():
            sizes = {(call.template, op, program.micro_batches[mb], plan.length_of(mb)) for call, op, mb in needed}
            mixers = dict(each for size in sorted(sizes) for each in self._mixer_calls(plan, *size))
            missing = [call for kind, call in mixers.items() if kind not in self.tuned]
            with tuned_beside(missing, self.device, partial(self.backend.issuing, Lane.COMPUTE)):
                for call, op, mb in needed:
                    at(f"{call.template}, {op}")
                    kernels[call.name, op, mb] = self._kernel(program, call, op, mb, plan, mode)
            self.tuned.update(mixers)
        return kernels

    def _uses(self, graph: fx.Graph, plan: Plan) -> Iterator[tuple[Call, str, int]]:
        """(call, op, micro-batch) of each node of a section that runs a template."""
        calls = {c.name: c for c in self.captured.calls_for(plan.output)}
        return ((calls[argument(node, "call")], op_of(node).name, argument(node, "mb"))
                for node in nodes(graph) if op_of(node).name in TEMPLATE_OPS)

    def _mixer_calls(self, plan: Plan, name: str, op: str, batch: int, length: int) -> Iterator[tuple[MixerCall, MixerCall]]:
        template = self.captured.templates[name]
        return mixer_calls(template, _variant(template, op, batch, plan), batch, length)

    def compile_ahead(self, program: Program, plan: Plan) -> None:
        """Compiles what `bind` compiles for training beside code for any size, such as code for few tokens. Skips variants
        without compiled code, and code for a single size."""
        if not (self.symbolic_sizes and self.captured.key.packed and self.compiling):
            return
        needed = {(call.template, op, program.micro_batches[mb]) for section, graph in program.sections.items()
                  if section != "evaluate" for call, op, mb in self._uses(graph, plan)}
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
        """Code for `batch` rows of `length` that also serves other sizes; None if that is impossible or disabled."""
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
        """Numbers of rows (at least 2) and their lengths for which inductor chooses kernels, in the order to try them. First
        the usual ones. Then sizes with fewer, more and nearly as many tokens as this one, since code may hold only above or
        below some number of tokens, or between two. Must not depend on earlier steps: a resumed run has the same bits."""
        usual = self.usual_length if any_length else length
        first = max(2, self.usual_rows or FULL_TOKENS // usual), usual
        if not any_length:
            return [first, (max(2, power_of_two(batch)), length)]
        tokens, below = batch * length, power_of_two(batch * length + 1) // 2
        quarter, around = max(UNIT, below // 4), [below, power_of_two(tokens)]
        counts = [*(around if tokens < math.prod(first) else reversed(around)), tokens // quarter * quarter]
        return [first, *(_rows_of(max(4, count // UNIT), usual) for count in counts)]

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


def _rows_of(units: int, usual: int) -> tuple[int, int]:
    """Two rows or more of two units or more, together of so many units, and their length. It divides them if one can."""
    dividing = (length for length in range(min(usual // UNIT, units // 2), 1, -1) if units % length == 0)
    length = next(dividing, units // 2)
    return units // length, length * UNIT


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


# --------------------
# Adapters (PEFT) on a streamed model: state that a capture treats as constant, and calls that bypass PEFT's wrapper.
def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that PEFT has added to a model, by name."""
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


class AdapterStates:
    """The active and merged adapters, their scales, and whether they are disabled. These are Python values, and constants of
    the captured graphs. Graphs without adapters are captured when adapters are first disabled. State: the model's adapter
    layers, and their values at capture."""

    def __init__(self, model: nn.Module) -> None:
        self.captured = [(name, layer, _values(layer)) for name, layer in adapter_layers(model).items()]

    def disabled(self) -> bool:
        """True if all adapters that were enabled when the model was streamed are disabled now (PEFT's `disable_adapter`)."""
        return bool(self.captured) and all(layer.disable_adapters and not before["disable_adapters"]
                                           for _, layer, before in self.captured)

    def check(self, differentiating: bool) -> None:
        """Raises `UnsupportedError` if an adapter has changed since the capture. Disabling all of them for an evaluation is
        allowed."""
        disabled = self.disabled()
        if disabled and differentiating:
            raise UnsupportedError("adapters are switched off (disable_adapter), and a loss without them has no gradient here: "
                                   "call the model under torch.no_grad(), or leave disable_adapter first")
        for name, layer, before in self.captured:
            now = _values(layer) | ({"disable_adapters": False} if disabled else {})
            if now != before:
                what = next(key for key in before if now[key] != before[key])
                raise UnsupportedError(
                    f"{what} of {name} is {now[what]!r} and was {before[what]!r} when the model was streamed: put it back, or "
                    "close() the model, change it, and stream() it again")


def _values(layer: Any) -> dict[str, Any]:
    return {"active_adapters": list(layer.active_adapters), "disable_adapters": bool(layer.disable_adapters),
            "merged_adapters": list(layer.merged_adapters), "scaling": dict(getattr(layer, "scaling", {}))}


@contextlib.contextmanager
def base_calls_streamed(model: nn.Module, prepare: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """A context in which calls of the model inside PEFT's wrapper go to the wrapper, which streams. `prepare` rewrites their
    keyword arguments. PEFT calls `generate` of the inner model."""
    if not hasattr(model, "get_base_model"):
        yield
        return
    inner: Any = model.get_base_model()  # type: ignore[operator]

    @functools.wraps(inner.forward)  # generation reads the signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **prepare(kwargs))

    inner.forward = forward
    try:
        yield
    finally:
        del inner.forward


#: The most captures of a model for lengths at which its code branches differently.
MOST_LENGTHS = 8


@dataclass(frozen=True)
class Served:
    """The capture, planner and kernels for the batches of one capture key. `planner`: with the facts of the capture;
    `Executables.planner_for` adds what other models take and what earlier plans fixed."""

    captured: CapturedModel
    planner: Planner
    binder: Binder

    @cached_property
    def types(self) -> Mapping[str, TemplateInput]:
        """Shape and dtype of each batch argument."""
        return batch_types(self.captured)

    @property
    def device(self) -> torch.device:
        """The device that runs the kernels of this capture."""
        return self.binder.device


class ModelCaptures:
    """State: the `Served` of each capture key so far, under the current options (`plan_with`)."""

    def __init__(self, model: nn.Module, captured: CapturedModel, tiling: Tiling, config: StreamConfig, backend: Backend,
                 host_bytes: int) -> None:
        self.model, self.tiling = model, tiling
        compiling = config.compile if config.compile is not None else backend.device.type == "cuda"
        budget = device_budget(config, backend.free_bytes())
        planner = Planner(captured, tiling, config, budget, parse_bytes(config.pinned_memory), *margins(backend.device.type),
                          fused=compiling, host_bytes=host_bytes, output=captured.main_output,
                          cached=True,
                          simulator=simulator_of(captured, tiling, Hardware.known(backend.device), compiling, config.passes))
        self.adapters = AdapterStates(model)
        any_size = compiling and config.dynamic is not False
        # Ranks pad their rows to those of the longest length on any rank.
        self.repacking = Repacking(self, config.repack, any_size, alone=tiling.ranks * tiling.hosts == 1)
        binder = Binder(captured, tiling, backend, compiling, any_size, config.micro_batch_size, self.repacking.least)
        self._known = {PLAIN: Served(captured, planner, binder)}
        self._reads_masks: dict[CaptureKey, bool] = {}
        self._tried: dict[tuple[CaptureKey, int], str] = {}  # and why the model could not be captured for this length, or ""

    @property
    def first(self) -> Served:
        """The `Served` of plain batches."""
        return self._known[PLAIN]

    @property
    def config(self) -> StreamConfig:
        """The current options for plans."""
        return self.first.planner.config

    def plan_with(self, **known: Any) -> None:
        """Changes fields of the planners of all captures (`Planner`). Later plans are made with them."""
        self._known = {key: replace(served, planner=replace(served.planner, **known)) for key, served in self._known.items()}

    def keep(self, tiling: Tiling) -> None:
        """Plans for this optimizer state from now on."""
        self.tiling = tiling
        known = {}
        for key, served in self._known.items():
            simulator = served.planner.simulator
            again = None if simulator is None else simulator_of(
                served.captured, tiling, simulator.durations.hardware, served.binder.compiling, served.planner.config.passes)
            known[key] = replace(served, planner=replace(served.planner, tiling=tiling, simulator=again))
        self._known = known

    def __iter__(self) -> Iterator[Served]:
        return iter(self._known.values())

    def capture_key(self, further: tuple[str, ...], training: bool, images: int = 1) -> CaptureKey:
        """The capture key of a batch with `further` arguments and `images` for each sequence, and the current adapters. The key
        of training mode also serves evaluation mode if both compute the same."""
        key = CaptureKey(further, without_adapters=self.adapters.disabled(), images=images)
        return key if training or self.serve(key).captured.same_in_evaluation() else replace(key, evaluating=True)

    def key_at(self, key: CaptureKey, length: int) -> CaptureKey:
        """The key of a capture that holds for sequences of `length` tokens, and serves the batch like `key` in all else. The
        model is captured again if its code branches on the length, at most `MOST_LENGTHS` times. If no capture holds, returns
        `key`: `check_shape` then refuses the batch, and names the branch. Returns a key that already has a `traced_length`."""
        found = self.known_key_at(key, length)
        if self.serve(found).captured.holds_at(length) or (key, length) in self._tried:
            return found
        if sum(tried == key for tried, _ in self._tried) == MOST_LENGTHS:
            return key
        self._tried[key, length] = ""
        try:
            self.serve(replace(key, traced_length=length))
        except (CaptureError, UnsupportedError) as error:
            self._tried[key, length] = first_line(error)
        return self.known_key_at(key, length)

    def why_not_at(self, key: CaptureKey, length: int) -> str:
        """The error that `key_at` met when it captured the model for this length; "" if none."""
        return self._tried.get((key, length), "")

    def known_key_at(self, key: CaptureKey, length: int) -> CaptureKey:
        """Like `key_at`, but never captures the model again."""
        if key.traced_length or self.serve(key).captured.holds_at(length):
            return key
        known = (each for each in self._known if each != key and replace(each, traced_length=0) == key)
        return next((each for each in known if self.serve(each).captured.holds_at(length)), key)

    def reads_masks(self, key: CaptureKey) -> bool:
        """True if our attention, in every layer, reads the masks of pairs of a key's batches. May capture it."""
        if key not in self._reads_masks:
            try:
                self._reads_masks[key] = self.serve(key).captured.fused_attention
            except (CaptureError, UnsupportedError):
                self._reads_masks[key] = False
        return self._reads_masks[key]

    def check_modes(self, captured: CapturedModel) -> None:
        """Raises `UnsupportedError` if modules inside the model are in another mode than at capture, and the mode matters."""
        unlike = [name for name, module in self.model.named_modules() if module.training is (name in captured.evaluating)]
        if unlike and (captured.key.evaluating or not captured.same_in_evaluation()):
            module = self.model.get_submodule(unlike[0])
            mode, call = ("training", "eval") if module.training else ("evaluation", "train")
            raise UnsupportedError(
                f"{unlike[0]} is in {mode} mode, but {type(self.model).__name__} is not, and its graphs have one mode for the "
                f"whole model: call model.{call}(), or override {call}() in the model's class so that it leaves {unlike[0]} as "
                "it is, before stream()")

    def serve(self, key: CaptureKey) -> Served:
        """The `Served` of a key, which is captured at its first use. Raises what capturing raises, and `UnsupportedError` if
        the model then reads weights other than those that the tiles were made for."""
        if key not in self._known:
            self._known[key] = self._capture(key)
        return self._known[key]

    def _capture(self, key: CaptureKey) -> Served:
        planner, binder = self.first.planner, self.first.binder
        try:
            captured = self.first.captured.for_key(key)
        except CaptureError as reason:
            if not masks_in(key.further):
                raise
            raise CaptureError(f"{type(self.model).__name__} cannot be captured with {', '.join(key.further)}: leave the mask "
                               f"out, or pass one that the model takes without streaming\n{reason}") from reason
        read = {source.name for call in captured.calls for source in call.sources if source.kind == "batch"}
        if ignored := [name for name in map(pair_masks.argument, key.further) if name not in read]:
            raise UnsupportedError(f"{type(self.model).__name__} does nothing with {', '.join(ignored)}: leave it out")
        what = (f"with {key.traced_length} tokens" if key.traced_length else "without its adapters" if key.without_adapters
                else "in evaluation mode" if key.evaluating else f"with {', '.join(key.further)}")
        if not self._reads_as_planned(captured, key):
            raise UnsupportedError(f"{what} the model reads its weights in other layers than in other training batches, "
                                   "and a streamed model supports only one of the two: pass only batches like the one that it "
                                   "was streamed with")
        if key.traced_length and not captured.reads_batches_as(self.serve(replace(key, traced_length=0)).captured):
            raise UnsupportedError(f"{what} the model treats padding, rows or evaluation differently than with other lengths: "
                                   "use only lengths that take one branch, or remove the branch on the length from its forward")
        hardware = planner.simulator.durations.hardware if planner.simulator is not None else None
        simulator = simulator_of(captured, self.tiling, hardware, binder.compiling, planner.config.passes)
        return Served(captured, replace(planner, captured=captured, simulator=simulator),
                      replace(binder, captured=captured, compiled={}, for_any_size={}))

    def _reads_as_planned(self, captured: CapturedModel, key: CaptureKey) -> bool:
        """True if the capture has the same calls as the first one, and each call reads all of its own tiles and no others. With
        adapters disabled, a call may read only some of them."""
        if [call.name for call in captured.calls] != [call.name for call in self.first.captured.calls]:
            return False
        for call in captured.calls:
            positions = [self.tiling.read_at.get(source.name) for source in call.sources if source.kind == "parameter"]
            read = {position[0] if position is not None else None for position in positions}
            own = set(self.tiling.tiles_of[call.name])
            if read - own or (read != own and not key.without_adapters):
                return False
        return True
