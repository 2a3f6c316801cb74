"""Streamed: one streamed model. Its tiles, arena, lanes, programs by shape, and the sections run in the user's order."""
from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megacompile.errors import DeviceMemoryError, InsufficientMemoryError, LaneError, LeaseError, MegacompileError, TornError
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.hidden_states import ALL
from megacompile.inputs.batch import BatchArguments
from megacompile.inputs.token_counts import TokenCounts
from megacompile.ir.program import Lane
from megacompile.planning.config import StreamConfig
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.executor import Executor
from megacompile.runtime.kernels import Batch
from megacompile.runtime.memory.arena import Arena
from megacompile.runtime.memory.checkpoints import HostCheckpoints
from megacompile.runtime.memory.pinning import pin_all
from megacompile.runtime.memory.store import Store
from megacompile.runtime.operations import Frame
from megacompile.runtime.reference import ReferenceExecutor
from megacompile.runtime.update import Update
from megacompile.sizes import format_bytes, parse_bytes
from megacompile.streaming import batch_io
from megacompile.streaming.captures import ModelCaptures
from megacompile.streaming.external_writes import Constants, ForeignWrites
from megacompile.streaming.gradients import Gradients
from megacompile.streaming.lease import Lease
from megacompile.streaming.nonfinite import report_late
from megacompile.streaming.optimizer_in_backward import Arrival
from megacompile.streaming.optimizer_state import StateMemory
from megacompile.streaming.out_of_memory import exhausted, explained
from megacompile.streaming.residency import Residency
from megacompile.streaming.shapes import CompiledShape, Shape, Shapes
from megacompile.streaming.teardown import give_back
from megacompile.weights.tiling import Tiling

R = TypeVar("R")


class Streamed:
    """State: the `shapes` compiled so far, the open `leases`, the version of all weights, what lives on the device
    (`residency`), the update in flight (`updating`), and one that failed before its last tile (`unfinished`)."""

    def __init__(self, model: nn.Module, captured: CapturedModel, tiling: Tiling, store: Store, backend: Backend,
                 config: StreamConfig) -> None:
        self.turn = threading.RLock()  # see turns.py
        self.model, self.captured, self.tiling, self.store = model, captured, tiling, store
        self.backend, self.config = backend, config
        self.arena, self.checkpoints = Arena(backend), HostCheckpoints(backend)
        self.executor: Executor | ReferenceExecutor = (
            ReferenceExecutor(backend) if config.reference else Executor(backend, stall_timeout_s=config.stall_timeout))
        self.parameters = {n: p for n, p in model.named_parameters() if n in tiling.position}
        self.gradients = Gradients(self.parameters, tiling, store)
        self.states = {name: StateMemory(self, name) for name in self.gradients}
        self.constants = Constants(model, backend.device)
        self.constants.add(captured.calls)
        self.writes = ForeignWrites(model, self.parameters, tiling, store, self.gradients)
        self.captures = ModelCaptures(model, captured, tiling, config, backend, store.room(parse_bytes(config.host_memory)))
        self.planner, self.binder = self.captures.first.planner, self.captures.first.binder
        self.shapes = Shapes(self.captures)
        self.leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        self.trained: CompiledShape | None = None  # that of the last backward, whose program also updates
        self.running: CompiledShape | None = None  # that of the last section
        self.residency, self.arrival = Residency(self), Arrival(self)
        self.version = self.steps = 0
        self.tokens = TokenCounts()
        self.skipped: list[int] = []  # numbers of steps whose gradients were not finite
        self.kept: list[str] = []  # tiles that were not updated on arrival, since their gradients were not finite
        self.batches: list[Batch] = []  # those that the gradients are of
        self.updating: Update | None = None
        self.unfinished: Update | None = None
        # Runs when the model is closed, and when it is forgotten: threads end, and no page stays pinned.
        self._give_back = weakref.finalize(self, give_back, self.executor, self.arena, self.checkpoints, store, backend)
        if self.planner.pinned().tiles:
            pin_all(backend, store.streamed_memory())

    @property
    def closed(self) -> bool:
        return not self._give_back.alive

    # ---------------------------------------------------------------- programs and memory
    def compiled(self, shape: Shape) -> CompiledShape:
        """The program of a shape, compiled at its first use. Raises what `Shapes.get` raises."""
        keep = {lease.shape for lease in self.open_leases()} | {self.trained, self.residency.shape}
        return self.shapes.get(shape, {shape for shape in keep if shape is not None})

    def open_leases(self) -> list[Lease]:
        return [lease for lease in self.leases if not lease.closed]

    def _fits(self, shape: CompiledShape) -> bool:
        """Whether sections of this shape fit beside the forwards that are open. Alone, the planner has seen to it."""
        held = sum(lease.device_bytes for lease in self.open_leases())
        return not held or shape.estimate.total + self.planner.margin_bytes + held <= self.planner.device_bytes

    def _check_room(self, shape: CompiledShape) -> None:
        """Raises `InsufficientMemoryError` if they do not fit."""
        if not self._fits(shape):
            held = sum(lease.device_bytes for lease in self.open_leases())
            needed, budget = shape.estimate.total + self.planner.margin_bytes, self.planner.device_bytes
            raise InsufficientMemoryError(
                f"a batch of {shape.shape.batch} x {shape.shape.length} needs {format_bytes(needed)} of device memory and "
                f"{format_bytes(budget - held)} are available, since forwards without their backward hold "
                f"{format_bytes(held)}: run backward (or drop the loss) before the next forward, or give more device_memory")

    def _reserve(self, shape: CompiledShape, *sections: str) -> None:
        """Slots for these sections are there, and none of other shapes that would be over the budget beside this one."""
        wanted, surplus = shape.slots(*sections), self.residency.surplus(shape)
        if surplus or any(s not in self.arena.slots or self.arena.slots[s].numel() < slot.bytes for s, slot in wanted.items()):
            self.residency.leave()
            for slot in surplus:
                self.arena.forget(slot)
            self.arena.reserve(wanted)

    # ---------------------------------------------------------------- running sections
    def submit(self, shape: CompiledShape, section: str, batch: Batch, lease: Lease | None = None,
               update: Update | None = None) -> Any:
        if section not in shape.kernels:
            served = self.captures.serve(shape.shape.capture_key)
            self.constants.add(served.captured.calls)
            shape.kernels[section] = served.binder.bind(shape.program, section, shape.plan, shape.shape.labels)
        self.running = shape
        held = (lease.values, lease.host) if lease is not None else ({}, {})
        frame = Frame(self.backend, self.store, self.arena, shape.kernels[section], batch, *held, update)
        return self.executor.submit(shape.program.section(section), frame, section)

    def enter(self, shape: CompiledShape, *sections: str) -> None:
        """Before sections that read weights: slots exist, foreign writes are noticed, resident tiles are there."""
        self.check_whole()
        self._check_room(shape)
        self._reserve(shape, "load", *sections)
        self.adopt_writes()
        self.residency.enter(shape)

    def adopt_writes(self) -> None:
        """Takes over what was written to parameters and buffers from outside."""
        if self.writes.pending() or self.constants.stale():
            with self.guarded():
                self.residency.leave()
                self.writes.adopt()
                self.constants.refresh()
            self.version += 1

    def forward(self, given: BatchArguments, output: str = "loss") -> tuple[tuple[Tensor, ...], Lease]:
        """The loss of a batch (0-d), or a head's outputs, on the compute device; and the lease that its backward needs."""
        with self.guarded():
            self.executor.check()
            wanted = self.shape_of(given, training=True, output=output)
            shape = self.compiled(wanted)
            if shape.plan.saved_layers and not self._fits(shape):  # beside the forwards that are open
                shape = self.compiled(replace(wanted, lean=True))
            self.enter(shape, "forward", "backward", "update")
            batch = self._batch(shape, given)
            lease = self._open(shape, batch)
            try:
                self.submit(shape, "forward", batch, lease).wait((Lane.COMPUTE,))
                results = ((batch_io.loss_of(self.backend, batch),) if output == "loss" else
                           batch_io.outputs_of(self.backend, batch))
            except BaseException:
                lease.end()  # though whoever catches this may keep the traceback
                raise
        self.leases.add(lease)
        return results, lease

    def _open(self, shape: CompiledShape, batch: Batch) -> Lease:
        lease = Lease(shape, batch, self.version)
        lease.host, lease.give_back = self.checkpoints.lend(lease, shape.host_slots, self.settle)
        return lease

    def train_step(self, given: BatchArguments, update: Update, overlap: bool) -> Tensor:
        """The loss of a step that runs as one program. Without `overlap`, its update goes on beside the next step's forward."""
        with self.guarded():
            self.executor.check()
            shape = self.compiled(replace(self.shape_of(given, training=True), update="arrival" if overlap else "step",
                                          whole_step=True))
            self.store.allocate_sums(shape.plan.host_sums)
            self.enter(shape, "train_step", "update")
            batch = self._batch(shape, given)
            self.gradients.gather()
            self.trained, self.unfinished, self.batches = shape, None, [batch]
            if overlap:
                self.begin_update(shape, update)
            # Compute comes to its end only after every tile's weights were sent, so after the update before this one.
            self.submit(shape, "train_step", batch, self._open(shape, batch), update).wait((Lane.COMPUTE,))
            self.residency.gradients_current = True
            loss = batch_io.loss_of(self.backend, batch)
            if not overlap:
                self.begin_update(shape, update)
                self.submit(shape, "update", Batch([], self.constants.on_device), update=update)
        return loss

    def begin_update(self, shape: CompiledShape, update: Update) -> None:
        self.residency.updated(shape)
        self.version += 1
        self.steps += 1
        self.tokens.end_step(self.batches)
        update.batches = self.batches
        self.updating, self.unfinished = update, None
        update.begin()

    def evaluate(self, given: BatchArguments) -> tuple[Tensor | None, Tensor | None]:
        """(loss or None, logits) without gradients."""
        return self._evaluate(given, "loss", batch_io.evaluation_of)

    def evaluate_outputs(self, given: BatchArguments, output: str) -> tuple[Tensor, ...]:
        """A head's outputs, without gradients."""
        return self._evaluate(given, output, batch_io.outputs_of)

    def evaluate_hidden_states(self, given: BatchArguments) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(logits and the last hidden state, or of a model without a head this alone; all states before it)."""
        return self._evaluate(given, ALL, batch_io.outputs_and_hidden_states_of)

    def _evaluate(self, given: BatchArguments, output: str, results_of: Callable[[Backend, Batch], R]) -> R:
        with self.guarded():
            self.executor.check()
            shape = self.compiled(self.shape_of(given, training=False, output=output))
            self.enter(shape, "evaluate")
            batch = self._batch(shape, given)
            self.submit(shape, "evaluate", batch).wait((Lane.COMPUTE,))
            return results_of(self.backend, batch)

    def backward(self, lease: Lease, gradients: Sequence[Tensor]) -> None:
        """Runs a lease's backward, given the gradients of what its forward gave, and sets `.grad` of every trained parameter.
        Returns when gradients are home; where it updates on their arrival, once compute has been issued, and there are none.

        Whatever stops it, no parameter has a `.grad` afterwards: some would hold this batch's gradients, others not."""
        self.raise_pending()
        if self.closed:
            raise LeaseError("the model was closed since this loss was computed: run the forward of the plain model again")
        if lease.closed:
            raise LeaseError("this loss has had its backward, or was refused one: run the forward again (retain_graph cannot "
                             "be honoured, activations are freed as the backward goes)")
        if lease.version != self.version or self.writes.pending():
            raise LeaseError("the weights have changed since this loss was computed: run backward before optimizer.step(), "
                             "or the forward again")
        self.arrival.check(lease)
        if self.gradients.waiting:
            self.settle()  # an update in flight reads them
        added = self.gradients.gather()
        section = "backward_accumulate" if added else "backward"
        with self.guarded():
            self._reserve(lease.shape, section)
            self.residency.enter(lease.shape)
        lease.closed, self.trained, self.unfinished = True, lease.shape, None
        self.batches = [*(self.batches if added else ()), lease.batch]
        try:
            with self.guarded():
                batch_io.send_gradients(self.backend, lease.shape.plan, lease.batch, gradients)
                update = self.arrival.begin(lease)
                run = self.submit(lease.shape, section, lease.batch, lease, update)
                if update is not None:
                    run.wait((Lane.COMPUTE,))
                    return
                run.wait()
                self.drain()
        except BaseException:
            self.arrival.fail()
            self.gradients.clear()
            raise
        finally:
            lease.end()
        self.gradients.hand_out()
        self.residency.gradients_current = True

    def update(self, update: Update) -> None:
        """Hands an optimizer step to the cpu lane and returns. Raises what the one before it failed with."""
        self.settle()  # the step before it is over, or `recover` would take this one for the one that failed
        assert self.trained is not None, "no backward has stored gradients"
        with self.guarded():
            self._reserve(self.trained, "update")
            self.residency.enter(self.trained)
            self.residency.refresh_gradients(self.trained)
            self.begin_update(self.trained, update)
            self.submit(self.trained, "update", Batch([], self.constants.on_device), update=update)

    def complete(self) -> bool:
        """Completes an update that failed, with its own hyper-parameters; False, doing nothing, if gradients have changed."""
        update = self.unfinished
        assert update is not None, "no update has failed"
        if not self._stored() or not self.gradients.untouched():
            return False
        self.update(update)
        return True

    # ---------------------------------------------------------------- waiting and failing
    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Around lane work: whatever it raises leaves the lanes ready for the next step. Out of memory is explained."""
        try:
            yield
        except (LaneError, KeyboardInterrupt, SystemExit, torch.OutOfMemoryError) as error:
            self.recover()
            if isinstance(error, DeviceMemoryError) or (cause := exhausted(error)) is None:
                raise
            raise explained(self, error, cause) from cause

    def raise_pending(self) -> None:
        """Raises what an update in flight has failed with."""
        with self.guarded():
            self.executor.check()

    def drain(self, sooner: threading.Event | None = None) -> None:
        """Waits for everything submitted, on the host and on the device; or until the event `sooner`."""
        self.executor.idle(sooner)
        self.executor.check()
        if sooner is None:
            self.backend.synchronize()

    def settle(self) -> None:
        """As `drain`, for callers outside a step: afterwards host memory may be read and written freely (optimizer state
        after `residency.bring_home`)."""
        with self.turn:
            with self.guarded():
                self.drain()
            self.residency.rescue()
            report_late(self)

    @property
    def torn(self) -> bool:
        """Whether some tiles have had an update that others have not."""
        return self.unfinished is not None and self.unfinished.has_updated

    def _stored(self) -> bool:
        """Whether the last backward stored its gradients; one that updates on arrival consumes them."""
        return self.trained is not None and "update" in self.trained.program.sections

    def check_trained(self) -> None:
        """Raises `MegacompileError` unless the last backward stored gradients: there is no program for their update."""
        if not self._stored():
            raise MegacompileError("gradients were set by hand before any backward of this model that stores its own: run a "
                                   "forward and a backward first, or call zero_grad()")

    def check_whole(self) -> None:
        """Raises `TornError` if an update stopped between its first and its last tile."""
        if self.torn:
            complete = "call optimizer.step() again to complete it, or " if self._stored() else ""
            raise TornError(f"an update stopped half-way: {complete}load a checkpoint (megacompile.load_checkpoint, or "
                            "load_state_dict of the model, then of the optimizer)")

    def mend(self) -> None:
        """All weights were written anew: what was missing of an update is no longer wanted."""
        self.unfinished = None
        self.arrival.end()

    def recover(self) -> None:
        """After a failure. Before the first `adam` of an update nothing has changed; after it, and before the last, the
        weights are torn until the update is completed."""
        self.executor.recover()
        update, self.updating = self.updating, None
        self.residency.failed(done=update is not None and bool(update.done))
        if update is not None and not update.refused and update.done != set(update.segments):
            update.withdraw()
            self.unfinished = update

    # ---------------------------------------------------------------- batches
    def shape_of(self, given: BatchArguments, training: bool, output: str = "loss") -> Shape:
        """The shape of a batch in the user's loop, with the optimizer that it has now."""
        output = self.captured.main_output if output == "loss" else output
        key = given.key
        return Shape(given.rows, given.length, output == "loss" and given.has_labels, training,
                     update=self.arrival.update_at if training else "step", output=output, further=key.further,
                     evaluating=key.evaluating, without_adapters=key.without_adapters, images=key.images)

    def _batch(self, shape: CompiledShape, given: BatchArguments) -> Batch:
        captured, constants = self.captures.serve(shape.shape.capture_key).captured, self.constants.on_device
        loss_denominator = given.loss_denominator if shape.shape.labels else None
        batch = batch_io.batch_of(self.backend, captured, shape.plan, constants, given.inputs, loss_denominator)
        batch.useful_tokens, batch.computed_tokens = given.useful_tokens, shape.plan.batch * shape.plan.length
        return batch

    def close(self) -> None:
        """Gives everything back, and only then raises what an update in flight failed with (`LaneError`, `TornError`)."""
        try:
            self.residency.bring_home()
            self.store.preserve()  # from now on whoever has the model may change it
            self.check_whole()
        finally:
            self._give_back()
