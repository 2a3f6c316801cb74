"""Streamed: one streamed model. Its tiles, arena, lanes, programs, and the sections run in the user's order."""
from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from megacompile.compat.core import pytree
from megacompile.errors import LaneError, LeaseError
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.hidden_states import ALL
from megacompile.frontend.tracing.model_graph import forget_generated_code, forget_symbols
from megacompile.inputs.across_ranks import AllRows
from megacompile.inputs.batch import BatchArguments
from megacompile.ir.program import Lane, stays
from megacompile.planning.config import StreamConfig
from megacompile.planning.planner import Planner
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.executor import Executor
from megacompile.runtime.kernels import Batch
from megacompile.runtime.memory.activation_checkpoints import HostCheckpoints
from megacompile.runtime.memory.arena import Arena, pin_all
from megacompile.runtime.memory.store import Store
from megacompile.runtime.ranks import Ranks
from megacompile.runtime.reference import ReferenceExecutor
from megacompile.runtime.update import Update
from megacompile.sizes import parse_bytes
from megacompile.streaming import batch_io
from megacompile.streaming.open_forward import OpenForward, OpenForwards
from megacompile.streaming.optimizer.in_backward import OptimizerInBackward, Updater
from megacompile.streaming.optimizer.state import StateMemory
from megacompile.streaming.programs.captures import ModelCaptures
from megacompile.streaming.programs.executables import BatchSpec, Executable, Executables
from megacompile.streaming.rank_group import RankGroup
from megacompile.streaming.residency import Residency, SectionRunner, allocator_error
from megacompile.streaming.step_state import StepState, report_late
from megacompile.streaming.user_tensors.external_writes import Constants, ExternalWrites
from megacompile.streaming.user_tensors.gradients import Gradients
from megacompile.weights.tiling import Tiling


# --------------------
# Releases a streamed model's resources: when it is closed or garbage-collected, and when the interpreter exits.
def give_back(executor: Executor | ReferenceExecutor, arena: Arena, checkpoints: HostCheckpoints, store: Store,
              backend: Backend, ranks: Ranks | None = None) -> None:
    """Stops the lanes once they have finished their work, and then frees their memory. If a step fails, as on a lost device,
    the others still run, and then the first error is raised."""

    def unpin() -> None:
        for part in (*store.streamed_memory(), *(state for tile in store.tiles.values() for state in tile.state())):
            backend.unpin(part)

    def memory() -> None:
        each(store.first_touch.stop,
              backend.synchronize,  # a garbage-collected model may have copies in flight
              arena.close, checkpoints.close, store.drop_sums, unpin,
              *(file.stop_threads for file in store.files),
              *([] if ranks is None else [ranks.close]))

    each(partial(executor.close, then=memory), forget_symbols, forget_generated_code)


def each(*steps: Callable[[], object]) -> None:
    """Runs all steps, even if some fail, and then raises the first failure."""
    failures: list[Exception] = []
    for step in steps:
        try:
            step()
        except Exception as failure:
            failures.append(failure)
    if failures:
        raise failures[0]


R = TypeVar("R")


class _Part(Protocol):
    """A part of the model that holds memory."""

    def release(self) -> None:
        """Releases the memory, when the model is closed."""


class Guest(_Part, Protocol):
    """A user of the device between the sections of this model."""

    def give_way(self, needed: int) -> None:
        """Frees memory for sections that take `needed` bytes of device memory. Raises `MegacompileError` if that memory is in
        use."""


class Streamed:
    """Holds the parts of a streamed model, and runs the sections of a step in the user's order. Each part owns its state:
    `executables` the compiled programs, `step` the training step, `residency` what stays on the device, `runner` the lanes,
    `gradients` and `states` the tensors that users see, `writes` and `constants` what users change, `optimizer_in_backward`
    updates on arrival, `forwards` the open forwards, and `guests` other users of the device."""

    def __init__(self, model: nn.Module, captured: CapturedModel, tiling: Tiling, store: Store, backend: Backend,
                 config: StreamConfig, ranks: Ranks | None = None, agreed_budgets: Sequence[str] = ()) -> None:
        self.call_lock = threading.RLock()  # see call_lock.py
        self.model, self.captured, self.store, self.backend = model, captured, store, backend
        self.arena, self.activation_checkpoints = Arena(backend), HostCheckpoints(backend)
        self.parameters = {n: p for n, p in model.named_parameters() if n in tiling.position}
        self.dtypes = {p.dtype for p in self.parameters.values() if p.is_floating_point()}  # codes of weights are integers
        self.gradients = Gradients(self.parameters, tiling, store)
        before_write = weakref.WeakMethod(self._before_state_write)
        self.states = {name: StateMemory(name, tiling, store, before_write) for name in self.gradients}
        self.constants = Constants(model, backend.device)
        self.constants.add(captured.calls)
        self.writes = ExternalWrites(model, self.parameters, tiling, store, self.gradients)
        host_bytes = store.available_bytes(parse_bytes(config.host_memory))
        self.captures = ModelCaptures(model, captured, tiling, config, backend, host_bytes)
        self.binder = self.captures.first.binder
        self.executables, self.step = Executables(self.captures), StepState()
        executor = (ReferenceExecutor(backend) if config.reference else Executor(
            backend, stall_timeout_s=config.stall_timeout, check_others=None if ranks is None else ranks.check))
        self.rank_group = RankGroup(ranks, self.captures, agreed_budgets, executor.check_own)
        self.runner = SectionRunner(executor, backend, store, self.arena, self.executables, self.constants, ranks)
        self.residency = Residency(self.runner, self.step)
        self.optimizer_in_backward = OptimizerInBackward(self.step, self.gradients)
        self.forwards, self.guests = OpenForwards(), list[Guest]()
        # Runs when the model is closed, and when it is forgotten: threads end, and no page stays pinned.
        self._give_back = weakref.finalize(self, give_back, executor, self.arena, self.activation_checkpoints, store,
                                           backend, ranks)
        if self.planner.pinned().tiles:
            pin_all(backend, store.streamed_memory())

    def hold_gradients(self) -> None:
        """Allocates memory for gradients that wait for a step, unless it exists. Raises `InsufficientMemoryError`."""
        if made := self.store.hold_gradients():
            self.gradients.hold()
            if self.planner.pinned().tiles:
                pin_all(self.backend, made)

    @property
    def tiling(self) -> Tiling:
        return self.captures.tiling

    @property
    def closed(self) -> bool:
        return not self._give_back.alive

    @property
    def planner(self) -> Planner:
        """The planner of plain batches, in its current state."""
        return self.executables.planner

    @property
    def config(self) -> StreamConfig:
        """The options of `stream`, including changes by `replan`."""
        return self.rank_group.asked(self.captures.config)

    @property
    def executor(self) -> Executor | ReferenceExecutor:
        return self.runner.executor

    # ---------------------------------------------------------------- programs and memory
    def compiled(self, spec: BatchSpec) -> Executable:
        """The program of a spec, compiled at its first use. Raises what `Executables.get` raises."""
        return self.executables.get(spec, self.in_use())

    def reached(self, executable: Executable) -> frozenset[str]:
        """The parameters that get a gradient in a training step of this program."""
        return self.captures.serve(executable.spec.capture).captured.reached_from(executable.spec.output)

    def in_use(self) -> set[Executable]:
        """Programs of open forwards, of the last backward, and of the tiles on the device."""
        found = {*(forward.executable for forward in self.forwards.open()), self.step.trained, self.residency.executable}
        return {executable for executable in found if executable is not None}

    @property
    def ends_step(self) -> Executable | None:
        """The program whose update, at the end of a loop's step, is all that the lanes may still do; else None. None for
        several ranks."""
        return self.step.trained if self.runner.in_flight == ["update"] and self.rank_group.size == 1 else None

    def _reserve(self, executable: Executable, *sections: str) -> None:
        """Makes the slots of these sections, and frees slots of other programs that do not fit the budget beside them."""
        for guest in self.guests:
            guest.give_way(executable.estimate.total)
        wanted, surplus = executable.slots(*sections), self.residency.surplus(executable)
        if changed := [*surplus, *self.runner.lacking(wanted)]:
            (self.evict if any(map(stays, changed)) else self.settle)()
            self.arena.forget(*surplus)
            self.arena.reserve(wanted)

    # ---------------------------------------------------------------- running sections
    def _enter(self, executable: Executable, *sections: str) -> None:
        """Prepares sections that read weights: makes slots, adopts writes from outside, loads resident tiles."""
        self.step.check_whole()
        self.forwards.check_room(executable, self.planner)
        self._reserve(executable, "load", *sections)
        self.adopt_writes()
        self._load(executable)

    def _load(self, executable: Executable) -> None:
        if self.residency.must_leave(executable):
            self.evict()
        self.residency.load(executable, self.rank_group.wait_for_updates)

    def adopt_writes(self) -> None:
        """Adopts what was written to parameters and buffers from outside."""
        written = self.writes.pending()
        if written or self.constants.stale():
            with self.guarded():
                (self.evict if written else self.settle)()  # buffers are in no tile
                self.writes.adopt()
                self.constants.refresh()
            self.step.weights_written()

    def forward(self, given: BatchArguments,
                output: str = "loss") -> tuple[tuple[Tensor, ...], OpenForward, BatchArguments]:
        """The loss of a batch (0-d), or a head's outputs, on the compute device; the state for its backward; and the batch in
        the layout of the outputs."""
        with self.guarded(), self.rank_group.failing():
            self.executor.check()
            given, own, all_rows, output = self.rank_group.joined(given, "forward", output)
            wanted = self.spec_of(given, training=True, output=output)
            executable = self.rank_group.compiled(self.executables, wanted, self.in_use())
            if executable.plan.saved_layers and not self.forwards.leave_room(executable, self.planner):
                executable = self.rank_group.compiled(self.executables, replace(wanted, lean=True), self.in_use())
            self._enter(executable, "forward", "backward", "update")
            batch = self._batch(executable, given, all_rows)
            forward = self._open(executable, batch)
            try:
                self.runner.submit(executable, "forward", batch, forward).wait((Lane.COMPUTE,))
                results = ((batch_io.loss_of(self.backend, batch),) if output == "loss" else
                           batch_io.outputs_of(self.backend, batch))
            except BaseException:
                forward.end()  # the caller may keep the traceback
                raise
        self.forwards.add(forward)
        return results, forward, own

    def _open(self, executable: Executable, batch: Batch) -> OpenForward:
        forward = OpenForward(executable, batch, self.step.version)
        forward.host, forward.give_back = self.activation_checkpoints.lend(forward, executable.host_slots, self.settle)
        return forward

    def train_step(self, given: BatchArguments, optimizer: Updater, on_arrival: bool) -> Tensor:
        """The loss of a step that runs as one program. Without `on_arrival`, its update runs during the next step's forward.
        `optimizer`: prepared."""
        with self.guarded(), self.rank_group.failing():
            self.executor.check()
            given, _, all_rows, _ = self.rank_group.joined(given, "train_step")
            wanted = replace(self.spec_of(given, training=True), update="arrival" if on_arrival else "step", whole_step=True)
            executable = self.rank_group.compiled(self.executables, wanted, self.in_use())
            self.store.allocate_sums(executable.plan.host_sums)
            if not on_arrival:
                self.hold_gradients()
            update = optimizer.request(self.reached(executable))
            self._enter(executable, "train_step", "update")
            self.gradients.gather()  # before all ranks agree on the program: gradients that users keep move first
            batch = self._batch(executable, given, all_rows)
            self.rank_group.agree_on_update("update", update)
            self.step.backward_began(executable, batch)
            if on_arrival:
                self.begin_update(executable, update)
            # Compute ends only after every tile's weights were sent, so after the update before this one.
            self.runner.submit(executable, "train_step", batch, self._open(executable, batch), update).wait((Lane.COMPUTE,))
            self.step.gradients_stored()
            loss = batch_io.loss_of(self.backend, batch)
            if not on_arrival:
                self.begin_update(executable, update)
                self.runner.submit(executable, "update", update=update)
        return loss

    def begin_update(self, executable: Executable, update: Update) -> None:
        self.residency.updated(executable)
        self.step.update_began(update)

    def evaluate(self, given: BatchArguments) -> tuple[Tensor | None, Tensor | None]:
        """Returns (loss or None, logits), without gradients."""
        return self._evaluate(given, "loss", batch_io.evaluation_of)

    def evaluate_outputs(self, given: BatchArguments, output: str) -> tuple[Tensor, ...]:
        """A head's outputs, without gradients."""
        return self._evaluate(given, output, batch_io.outputs_of)

    def evaluate_hidden_states(self, given: BatchArguments) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns the logits and the last hidden state (only the hidden state for a model without a head), and all states
        before it."""
        return self._evaluate(given, ALL, batch_io.outputs_and_hidden_states_of)

    def _evaluate(self, given: BatchArguments, output: str, results_of: Callable[[Backend, Batch], R]) -> R:
        if self.store.division is not None:
            return self._evaluate_together(given, output, results_of)
        with self.guarded():
            self.executor.check()
            executable = self.compiled(self.spec_of(given, training=False, output=output))
            self.rank_group.wait_for_updates()
            self._enter(executable, "evaluate")
            batch = self._batch(executable, given, None)
            self.runner.submit(executable, "evaluate", batch).wait((Lane.COMPUTE,))
            return results_of(self.backend, batch)

    def _evaluate_together(self, own: BatchArguments, output: str, results_of: Callable[[Backend, Batch], R]) -> R:
        """Like `_evaluate`, of all ranks at once: no host has all weights. Each rank gets the results of its own rows."""
        with self.guarded(), self.rank_group.failing():
            self.executor.check()
            given, _, _, output = self.rank_group.joined(replace(own, only_loss=False, read_again=None), "evaluate", output)
            given = replace(given, loss_denominator=own.loss_denominator)
            wanted = self.spec_of(given, training=False, output=output)
            executable = self.rank_group.compiled(self.executables, wanted, self.in_use())
            self._enter(executable, "evaluate")
            batch = self._batch(executable, given, None)
            self.runner.submit(executable, "evaluate", batch).wait((Lane.COMPUTE,))
            padded = given.rows, given.length
            return pytree.tree_map_only(  # type: ignore[no-any-return]
                Tensor, lambda each: each[:own.rows, :own.length] if each.shape[:2] == padded else each,
                results_of(self.backend, batch))

    def backward(self, forward: OpenForward, gradients: Sequence[Tensor]) -> None:
        """Runs the backward of an open forward, given the gradients of its results, and sets `.grad` of every trained parameter
        that the results depend on. Returns when gradients are in host memory. With updates on arrival it returns once compute
        was issued, and sets no `.grad`. If anything stops it, no parameter has a `.grad` afterwards. Otherwise only some would
        hold this batch's gradients."""
        self.raise_pending()
        if self.closed:
            raise LeaseError("the model was closed since this loss was computed: run the forward of the plain model again")
        forward.check_open(None if self.writes.pending() else self.step.version)
        reached = self.reached(forward.executable)
        self.optimizer_in_backward.check(forward, [each for each in self.forwards.open() if each is not forward], reached)
        if self.gradients.waiting:
            self.settle()  # an update in flight reads them
        with self.guarded(), self.rank_group.failing():
            if forward.executable.spec.update == "step":
                self.hold_gradients()
            added = self.gradients.gather()
            section = "backward_accumulate" if added else "backward"
            self.rank_group.agree(section)  # also: no rank has yet to clear gradients that another one writes
            self._reserve(forward.executable, section)
            self._load(forward.executable)
        forward.close()
        self.step.backward_began(forward.executable, forward.batch, added)
        try:
            with self.guarded(), self.rank_group.failing():
                batch_io.send_gradients(self.backend, forward.executable.plan, forward.batch, gradients)
                update = self.optimizer_in_backward.request(forward, reached)
                of_loss = forward.executable.plan.output == "loss"
                if update is not None:
                    if of_loss:
                        self.rank_group.agree_on_factor(section, *gradients)
                    self.rank_group.agree_on_update("update", update)
                    self.begin_update(forward.executable, update)
                run = self.runner.submit(forward.executable, section, forward.batch, forward, update)
                if update is not None:
                    run.wait((Lane.COMPUTE,))
                    return
                run.wait()
                self.drain()
                if of_loss:  # late, since the device may have to compute the factor
                    self.rank_group.agree_on_factor("the end of backward", *gradients)
                else:
                    self.rank_group.agree("the end of backward")  # every rank's shards of gradients are there
            self.gradients.hand_out(reached)
            self.step.gradients_stored()
        except BaseException:
            self.step.backward_updates(None)
            self.gradients.clear()
            raise
        finally:
            forward.end()

    def update(self, update: Update) -> None:
        """Hands an optimizer step to the cpu lane and returns. Raises the failure of the step before it."""
        self.settle()  # the step before it is over, or `recover` would take this one for the one that failed
        trained = self.step.trained
        assert trained is not None, "no backward has stored gradients"
        with self.guarded(), self.rank_group.failing():
            self.rank_group.agree_on_update("step", update)
            self._reserve(trained, "update")
            self._load(trained)
            self.residency.refresh_gradients(trained)
            self.begin_update(trained, update)
            self.runner.submit(trained, "update", update=update)

    def complete(self) -> bool:
        """Completes a failed update, with its own hyper-parameters. Returns False, and does nothing, if gradients have
        changed."""
        assert self.step.unfinished is not None, "no update has failed"
        if not self.step.stored or not self.gradients.untouched():
            return False
        self.update(self.step.unfinished)
        return True

    # ---------------------------------------------------------------- waiting and failing
    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """A context around lane work. After any failure the lanes are ready for the next step. Explains errors for lack of
        memory."""
        try:
            yield
        except (LaneError, KeyboardInterrupt, SystemExit, torch.OutOfMemoryError) as error:
            self.recover()
            if (explained := self.runner.out_of_memory(error, self.step.torn)) is not None:
                raise explained from allocator_error(error)
            raise

    def recover(self) -> None:
        """Makes the lanes ready after a failure, and saves weights that were updated on the device."""
        self.executor.recover()
        self.residency.failed(updated=self.step.failed())

    def raise_pending(self) -> None:
        """Raises the failure of an update in flight."""
        with self.guarded(), self.rank_group.failing():
            self.executor.check()

    def drain(self, sooner: threading.Event | None = None) -> None:
        """Waits for everything submitted, on the host and on the device, or until the event `sooner`."""
        self.runner.drain(sooner)

    def settle(self) -> None:
        """Like `drain`, for callers outside a step: afterwards host memory may be read and written freely (optimizer state
        after `copy_back`)."""
        with self.call_lock:
            with self.guarded(), self.rank_group.failing():
                self.runner.drain()
                self.rank_group.wait_for_updates()
            self.residency.rescue()
            report_late(self.arena.take_verdicts(), self.step.skipped)

    # ---------------------------------------------------------------- host and device
    def copy_back(self) -> None:
        """Copies newer optimizer state from the device to the host. All lanes are idle on return."""
        self.settle()
        if self.residency.state_ahead:
            with self.guarded(), self.rank_group.failing():
                self.residency.store_state()
            self.settle()
            self.rank_group.agree("copying state back to the host")
            self.residency.stored_state()

    def copy_back_whole(self) -> None:
        """Like `copy_back`, and adopts writes from outside. Raises `TornError` if the weights are not all of one step."""
        with self.call_lock:
            self.copy_back()
            self.step.check_whole()
            self.adopt_writes()  # a remainder belongs to the weight that was there before

    def evict(self) -> None:
        """Like `copy_back`. What stays on the device is loaded again before its next use, so the host's memory may be
        written."""
        with self.call_lock:
            self.copy_back()
            self.residency.left()

    def _before_state_write(self, tile: str) -> None:
        """Called before the user writes optimizer state of a tile."""
        if not self.closed:
            self.evict()
            self.store.preserve(tile)

    # ---------------------------------------------------------------- batches
    def spec_of(self, given: BatchArguments, training: bool, output: str = "loss") -> BatchSpec:
        """What a batch's program is made for, in the user's loop, with the current optimizer."""
        output = self.captured.main_output if output == "loss" else output
        return BatchSpec(given.rows, given.length, output == "loss" and given.has_labels, training,
                     group_rows=tuple(rows for rows, _ in given.groups), group_lengths=tuple(each for _, each in given.groups),
                     update=self.optimizer_in_backward.update_at if training else "step", output=output,
                     capture=self.captures.key_at(given.key, given.length))

    def _batch(self, executable: Executable, given: BatchArguments, all_rows: AllRows | None) -> Batch:
        captured, constants = self.captures.serve(executable.spec.capture).captured, self.constants.on_device
        loss_denominator = given.loss_denominator if executable.spec.labels else None
        seed = self.rank_group.seed(captured, all_rows)
        batch = batch_io.batch_of(self.backend, captured, executable.plan, constants, given.inputs, given.present,
                                  loss_denominator, seed, all_rows)
        batch.useful_tokens = given.useful_tokens
        batch.computed_tokens = executable.plan.tokens * self.rank_group.size  # of all ranks, like useful_tokens
        return batch

    def close(self) -> None:
        """Releases everything, and only then raises the failure of an update in flight (`LaneError`, `TornError`)."""
        with contextlib.ExitStack() as ending:
            ending.callback(self._release)
            ending.callback(self.store.preserve)  # a save reads the tiles; from now on the model's owner may change them
            self.copy_back()
            self.step.check_whole()

    def _release(self) -> None:
        """Ends the lanes, and releases all memory of the model. Objects that still refer to this one, such as the graph of a
        loss, the handle, an optimizer or a traceback, then keep no memory alive."""
        parts: list[_Part] = [self.forwards, self.step, *self.guests, self.constants, self.gradients,
                              *self.states.values(), self.store]
        # PyTorch's allocator would keep the device's memory from other processes.
        each(self._give_back, self.writes.remainders.clear, *(part.release for part in parts), self.backend.trim)
