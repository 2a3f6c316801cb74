"""Programs by `BatchSpec`: each is compiled when its batch first comes, and those longest unused are forgotten."""
from __future__ import annotations

import contextlib
import functools
import hashlib
import time
import weakref
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megacompile.errors import MegacompileError, UnsupportedError
from megacompile.frontend.templates.hidden_states import ALL, LOGITS
from megacompile.inputs.packed_layout import lengths_of, power_of_two
from megacompile.ir.places import OF_A_FORWARD, Family
from megacompile.ir.plan import PLAIN, BatchSpec, CaptureKey, Plan
from megacompile.ir.program import Program, Slot, model_program, places, slot_family
from megacompile.passes import PIPELINE
from megacompile.passes.pipeline import Compiled, Pass, compile_program
from megacompile.planning.memory import Estimate, planned_calls
from megacompile.planning.packed_plans import PackedPlans
from megacompile.planning.planner import Choice, Planner
from megacompile.planning.step_time import UNEVEN_CAUTION
from megacompile.runtime.kernels import Kernel
from megacompile.streaming.programs.captures import ModelCaptures
from megacompile.system.linux import collections_paused
from megacompile.system.progress import under_way
from megacompile.verify.verifier import check_agreement
from megacompile.weights.tiling import Tiling

#: A generation brings a new length with every token: without a bound, its programs would never go away.
MAX_EXECUTABLES = 32
#: The most sizes near its own that the second training step of packed rows plans ahead.
SIZES_AHEAD = 16
#: A size is near if its tokens differ by at most this share.
NEAR = 0.3
#: Planning ahead ends after this many seconds. Programs of large models take longer.
SECONDS_AHEAD = 2.0

#: Those of all models that are streamed now: models on one device share its memory.
_live: weakref.WeakSet[Executables] = weakref.WeakSet()


def planned_and_not_taken(device: torch.device) -> int:
    """Device bytes that the models streamed to a device have planned and not yet allocated: all but their slots."""
    return sum(s.planned - s.slot_bytes for s in _live if s.binder.device == device)


@dataclass(eq=False)
class Executable:
    """The program of one `spec` in every stage, its memory, and the kernels bound so far, by section. `loaded`: it was edited
    by hand, and stays until it is dropped. `asked`: a batch has asked for it; others were only planned ahead. `exchanging`:
    digests of the templates that ranks with a sequence together run."""

    spec: BatchSpec
    plan: Plan
    estimate: Estimate
    compiled: Compiled
    loaded: bool = False
    asked: bool = False
    exchanging: tuple[str, ...] = ()
    kernels: dict[str, Mapping[tuple[str, str, int], Kernel]] = field(default_factory=dict)
    _slots: dict[tuple[str, ...], dict[str, Slot]] = field(default_factory=dict)

    @property
    def program(self) -> Program:
        return self.compiled.program

    @property
    def comes_again(self) -> bool:
        """True if more batches of this kind and size are likely. A generation asks for logits of one more token each time."""
        spec = self.spec
        return spec.labels or spec.training or spec.packed or spec.output not in ("loss", LOGITS, ALL)

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the program, and of the templates that exchange values between ranks. Ranks run together only if it is the
        same on all of them."""
        return hashlib.sha256("\n".join((self.program.text(), *self.exchanging)).encode()).hexdigest()

    def slots(self, *sections: str) -> dict[str, Slot]:
        """The program's slots and slabs that these sections use, without `host_slots` and those of held tiles, whose memory
        comes and goes within a step."""
        if sections not in self._slots:
            program = self.program
            used = places(program.section(s) for s in sections if s in program.sections)
            self._slots[sections] = {name: slot for name, slot in program.slots.items() if name in used
                                     and name not in self.host_slots and slot_family(name) != Family.HELD}
        return self._slots[sections]

    @functools.cached_property
    def host_slots(self) -> dict[str, Slot]:
        """The buffers for checkpoints and residuals in host memory. Each open forward has its own."""
        return {name: slot for name, slot in self.program.slots.items() if slot_family(name) in OF_A_FORWARD}


class Executables:
    """State: the executables, the last used at the end, at most `limit` beside those in use; `planned`, the most device
    memory that any of them takes; `stateful`, the tiles that the plans so far update on the device (None before the first one);
    `answers`, how many plans were "searched", and how many "kept" on disk; and `packed_steps`, how many training steps of
    packed rows asked for their program.

    The default budget of device memory is what was free when the model was streamed. A plan within it leaves other models the
    memory that they have planned. The user divides a given budget (`device_memory`)."""

    def __init__(self, captures: ModelCaptures, limit: int = MAX_EXECUTABLES) -> None:
        self.captures, self.limit = captures, limit
        self.captured, self.binder = captures.first.captured, captures.first.binder
        self.table: dict[BatchSpec, Executable] = {}
        self.packed = PackedPlans(self.captures.repacking.least, balanced=self.binder.symbolic_sizes)
        self.planned = self.slot_bytes = 0
        self.stateful: tuple[str, ...] | None = None
        self.answers = Counter[str]()
        self.packed_steps = 0
        self.note_budget()
        _live.add(self)

    @property
    def tiling(self) -> Tiling:
        return self.captures.tiling

    @property
    def planner(self) -> Planner:
        """The planner of plain batches."""
        return self.planner_for(PLAIN)

    def planner_for(self, key: CaptureKey) -> Planner:
        """The planner of a capture, with the current memory of other models and the tiles that earlier plans fixed. Captures
        share one device, so what one capture's plan fixed holds for the others."""
        return replace(self.captures.serve(key).planner, taken_bytes=self._planned_by_others(), stateful=self.stateful)

    def note_budget(self) -> None:
        """Records the slots of other models now, when the default budget is measured. That budget does not include them."""
        self._not_free = weakref.WeakKeyDictionary({s: s.slot_bytes for s in self._others()})

    def _others(self) -> list[Executables]:
        return [s for s in _live if s is not self and s.binder.device == self.binder.device]

    def _planned_by_others(self) -> int:
        """Device bytes that other models have planned, without their slots at the time of the budget: the budget already
        excludes these."""
        if self.captures.config.device_memory is not None:
            return 0
        return sum(s.planned - self._not_free.get(s, 0) for s in self._others())

    def clear(self) -> None:
        """Discards every program and plan, including programs edited by hand."""
        self.table.clear()
        self.packed.clear()
        self.planned = self.slot_bytes = self.packed_steps = 0
        self.stateful = None

    def close(self) -> None:
        """Gives the device's memory to other models."""
        _live.discard(self)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def latest(self) -> Executable | None:
        return next(reversed(self.table.values()), None)

    def known(self, spec: BatchSpec, keep: Collection[Executable] = ()) -> Executable | None:
        """The program of a spec that was compiled before. None if there is none, or if later plans update fewer tiles on the
        device. `keep`: as for `get`."""
        found = self.table.get(spec)
        if found is None or found in keep or found.loaded or found.plan.resident_state == self.planner.resident_state():
            return found
        return None

    def get(self, spec: BatchSpec, keep: Collection[Executable] = (), choice: Choice | None = None) -> Executable:
        """The program of a spec. `keep`: those in use, which must not be forgotten to make room. `choice`: the plan of a new
        program; None: it is chosen here. Raises `InsufficientMemoryError`, `UnsupportedError`, `ProgramError`; then nothing has
        changed."""
        found = self.known(spec, keep) or self._compile(spec, choice)
        self.table.pop(spec, None)
        self.table[spec] = found
        self._note(found)
        self._forget(keep)
        return found

    def plan_ahead(self, spec: BatchSpec, keep: Collection[Executable] = ()) -> None:
        """Call this for each training step, once it has its program. At the second step of packed rows, makes the programs of
        steps of similar size, which are likely to come, and compiles more code for their sizes. This one step waits, instead of
        several later ones. Does nothing if other models take part of the budget, since plans depend on how much they take at
        the time."""
        if not (spec.packed and spec.training) or spec.lean:
            return
        self.packed_steps += 1
        if self.packed_steps != 2 or self._planned_by_others():
            return
        until, others = time.monotonic() + SECONDS_AHEAD, f"other sizes than {spec.batch} x {spec.length}"
        try:
            with under_way(f"planning for {others}"), collections_paused():
                for batch, length in self._likely_sizes(spec.batch, spec.length):
                    if time.monotonic() < until:
                        self._plan_one_ahead(replace(spec, batch=batch, length=length), keep)
            with under_way(f"compiling kernels for {others}"):
                for each in [each for each in self.table.values() if not each.asked]:
                    with contextlib.suppress(MegacompileError, torch.OutOfMemoryError):  # raised again if the batch comes
                        self.captures.serve(each.spec.capture).binder.compile_ahead(each.program, each.plan)
        finally:
            self.table[spec] = self.table.pop(spec)  # it stays the latest

    def _likely_sizes(self, batch: int, length: int) -> list[tuple[int, int]]:
        """Rows and lengths of packed steps that may follow one of this size: the closest sizes, one with half as many tokens
        again, and one with a third fewer. Plans of the last two may need another search. Likely sizes, and long searches, come
        first."""
        tokens, lengths = batch * length, lengths_of(power_of_two(length), self.captures.repacking.shares)
        sizes = ((rows, each) for each in lengths for rows in range(1, 2 * tokens // each))
        alike = sorted((abs(rows * each - tokens), rows, each) for rows, each in sizes
                       if abs(rows * each - tokens) <= NEAR * tokens)
        far = (batch + batch // 2, batch - batch // 3)
        near = [(rows, each) for _, rows, each in alike[:SIZES_AHEAD]]
        return [*near[:SIZES_AHEAD // 2], *((rows, length) for rows in far), *near[SIZES_AHEAD // 2:]]

    def _plan_one_ahead(self, spec: BatchSpec, keep: Collection[Executable]) -> None:
        """Makes the program of a batch that may come, unless it would update fewer tiles on the device."""
        if spec.batch < 1 or self.known(spec, keep) is not None:
            return
        planner = self.planner_for(spec.capture)
        with contextlib.suppress(Exception):  # raised again if the batch comes, and no reason to stop this step
            choice = self._choice(spec, planner)
            if choice.stateful == self.stateful:
                self.table[spec] = self._planned(spec, planner, choice)

    def adopt(self, compiled: Executable) -> None:
        """Replaces the compiled program of a spec by one that was edited by hand."""
        self.table.pop(compiled.spec, None)
        self.table[compiled.spec] = compiled
        self._note(compiled)

    def drop(self, spec: BatchSpec | None) -> list[BatchSpec]:
        """Forgets the programs that were edited by hand, of one spec or of all. Returns their specs."""
        dropped = [s.spec for s in self.table.values() if s.loaded and spec in (None, s.spec)]
        for each in dropped:
            del self.table[each]
        return dropped

    def _note(self, compiled: Executable) -> None:
        compiled.asked, estimate = True, compiled.estimate
        self.planned, self.slot_bytes = max(self.planned, estimate.total), max(self.slot_bytes, estimate.slots)

    @property
    def largest(self) -> int:
        """Predicted device memory, in bytes, of the largest program that a batch asked for."""
        return max((each.estimate.total for each in self.table.values() if each.asked), default=0)

    def model_program(self, spec: BatchSpec, plan: Plan) -> Program:
        """The program before the first pass. Raises `UnsupportedError` if the model cannot run such a batch."""
        captured = self.captures.serve(spec.capture).captured
        if not spec.labels and spec.output in ("loss", LOGITS) and not captured.same_logits_without_labels:
            raise UnsupportedError("without labels the model computes other logits than with them (the last position's, say), "
                                   f"and only those with labels were captured: pass {', '.join(captured.labels)}")
        for rows, length in dict.fromkeys(plan.sizes):
            try:
                captured.check_shape(rows, length, spec.output)
            except UnsupportedError as error:
                if why := self.captures.why_not_at(spec.capture, length):
                    raise UnsupportedError(f"{error}\nanother capture, for {length} tokens, failed: {why}") from error
                raise
        if len(plan.micro_batches) > 1 and spec.labels and not captured.has_loss_denominator:
            raise UnsupportedError(
                "the model's loss is not a cross entropy over tokens, so that it cannot be split into micro-batches: "
                f"give micro_batch_size={spec.batch} or smaller batches")
        if len(plan.micro_batches) > 1 and captured.across_rows:
            raise UnsupportedError(
                "the model computes with several sequences of a batch at once, so that micro-batches would change what it "
                f"computes: give micro_batch_size={spec.batch} or smaller batches, or let no row read another; in "
                f"{captured.across_rows}")
        return model_program(planned_calls(captured, self.tiling, plan), self.tiling.tiles(), spec.batch, spec.labels,
                             spec.whole_step, differentiable=spec.training and spec.output != "loss",
                             hidden_states=spec.output == ALL, precision=self.captures.config.recipe)

    def _compile(self, spec: BatchSpec, choice: Choice | None) -> Executable:
        planner = self.planner_for(spec.capture)
        with under_way(f"planning {spec.batch} x {spec.length}"), collections_paused():
            return self._planned(spec, planner, choice or self._choice(spec, planner))

    def _choice(self, spec: BatchSpec, planner: Planner) -> Choice:
        uneven = (spec.packed or spec.group_rows) and planner.splits(spec.output)
        if spec.group_rows and planner.simulator is not None:
            planner = replace(planner, simulator=planner.simulator.with_caution(UNEVEN_CAUTION))
        if uneven and spec.training:
            choice = self.packed.choose(planner, spec)
        else:
            choice = planner.choose(spec.batch, spec.length, spec.training, spec.update, spec.whole_step, spec.output)
        plan = choice.plan
        if uneven and not spec.training and (spec.group_rows or planner.config.micro_batch_size is None):
            parts = self.packed.in_few_sizes(plan, spec, planner.config.micro_batch_size)
            plan = parts if planner.estimate(parts, False).total <= max(
                planner.estimate(plan, False).total, planner.device_bytes - planner.margin_bytes) else plan
        if spec.lean:
            plan = replace(plan, saved_layers=planner.config.saved_layers or 0)
        return replace(choice, plan=plan)

    def _planned(self, spec: BatchSpec, planner: Planner, choice: Choice) -> Executable:
        self.stateful = choice.stateful
        self.answers.update(choice.answers)
        plan = choice.plan
        model = self.model_program(spec, plan)
        alike = any(known.spec.capture == spec.capture and known.spec.training for known in self.table.values())
        compiled = self._resized(spec, plan, model, planner.config.passes) or compile_program(
            model, plan, planner.config.passes, verify_stages=not ((spec.packed or spec.group_rows) and alike))
        check_agreement(compiled.program, [s.program for s in self.table.values()])
        captured, divided = planner.captured, spec.capture.sequence_ranks > 1
        names = dict.fromkeys(call.template for call in captured.calls_for(plan.output)) if divided else ()
        return Executable(spec, plan, planner.estimate(plan, spec.training), compiled,
                          exchanging=tuple(captured.templates[name].digest for name in names))

    def _resized(self, spec: BatchSpec, plan: Plan, model: Program, passes: Sequence[Pass]) -> Compiled | None:
        """The program for these groups of rows, made from a known program with as many micro-batches; None if there is none.
        Nodes and slots are the same for any sizes. Only slots of checkpoints and residuals, and the results of the user's own
        passes, depend on sizes."""
        if not spec.group_rows or plan.host_checkpoints or passes != PIPELINE:
            return None
        purpose, choices = _without_sizes(spec, plan)
        for known in self.table.values():
            if known.spec.group_rows and not known.loaded and len(known.plan.micro_batches) == len(plan.micro_batches) and (
                    _without_sizes(known.spec, known.plan) == (purpose, choices)):
                return known.compiled.resized(model, plan)
        return None

    def _forget(self, keep: Collection[Executable]) -> None:
        """Drops the programs that were unused longest, and the variants that were compiled only for them."""
        unused = [s for s in self.table.values() if s not in keep and s is not self.latest and not s.loaded]
        unused = unused[:max(0, len(self.table) - self.limit)]
        if not unused:
            return
        for each in unused:
            del self.table[each.spec]
        used = {size for s in self.table.values() for size in s.plan.sizes}
        uneven = {length for s in self.table.values() if s.spec.packed or s.plan.lengths for _, length in s.plan.sizes}
        for served in self.captures:
            for key in [k for k in served.binder.compiled if k[2:4] not in used]:
                del served.binder.compiled[key]
            for any_size in [k for k in served.binder.for_any_size if not uneven or k[1] not in {None, *uneven}]:
                del served.binder.for_any_size[any_size]


def _without_sizes(spec: BatchSpec, plan: Plan) -> tuple[BatchSpec, dict[str, Any]]:
    """A spec and a plan without the number and length of rows."""
    purpose = replace(spec, batch=1, length=1, group_rows=(), group_lengths=())
    return purpose, plan.values() | dict(batch=1, length=1, micro_batches=(), lengths=())
