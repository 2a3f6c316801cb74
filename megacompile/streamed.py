"""Streamed: one streamed model. Its tiles, arena, lanes, programs by shape, and the sections run in the user's order."""
from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.binding import Binder
from megacompile.config import StreamConfig, parse_bytes
from megacompile.errors import LaneError, LeaseError, TornError, UnsupportedError
from megacompile.frontend.capture import CapturedModel
from megacompile.lowering import model_program
from megacompile.passes import PIPELINE
from megacompile.passes.manager import Compiled, compile_program
from megacompile.plan import Plan
from megacompile.planner import Planner
from megacompile.program import Lane, Program, find, argument
from megacompile.runtime.arena import Arena
from megacompile.runtime.executor import Executor
from megacompile.runtime.kernels import Activation, Batch, Kernel
from megacompile.runtime.lanes import Backend
from megacompile.runtime.operations import Frame, Update
from megacompile.runtime.reference import ReferenceExecutor
from megacompile.runtime.store import Store
from megacompile.tiling import Tiling, named_gradients
from megacompile.verify import verify
from megacompile.writes import ForeignWrites


@dataclass(frozen=True)
class Shape:
    """What a program is compiled for."""

    batch: int
    length: int
    labels: bool
    training: bool


@dataclass
class CompiledShape:
    """The program of one shape, every stage of it, and the kernels bound so far, by section."""

    shape: Shape
    plan: Plan
    compiled: Compiled
    kernels: dict[str, Mapping[tuple[str, str, int], Kernel]] = field(default_factory=dict)

    @property
    def program(self) -> Program:
        return self.compiled.program


@dataclass
class Lease:
    """What an open forward holds: kept activations, the epilogue's gradients, and which weights they were made with."""

    shape: CompiledShape
    batch: Batch
    version: int
    values: dict[str, Any] = field(default_factory=dict)
    closed: bool = False


class Streamed:
    """State: `shapes` compiled so far, whether resident tiles are current, the version of all weights, an update in
    flight, and whether a failed update has torn the weights."""

    def __init__(self, model: nn.Module, captured: CapturedModel, tiling: Tiling, store: Store, backend: Backend,
                 config: StreamConfig) -> None:
        self.model, self.captured, self.tiling, self.store = model, captured, tiling, store
        self.backend, self.config = backend, config
        self.arena = Arena(backend)
        self.executor: Executor | ReferenceExecutor = (
            ReferenceExecutor(backend) if config.reference else Executor(backend))
        compiling = config.compile if config.compile is not None else backend.device.type == "cuda"
        self.binder = Binder(captured, tiling, backend.device, compiling)
        self.parameters = {n: p for n, p in model.named_parameters() if n in tiling.position}
        self.gradients = dict(named_gradients(store))
        buffers = {s.name for call in captured.calls for s in call.sources if s.kind == "buffer"}
        named_buffers = dict(model.named_buffers())
        self.constants = {n: named_buffers[n].detach().to(backend.device) for n in buffers}
        self.writes = ForeignWrites(self.parameters, tiling, store)
        budget = parse_bytes(config.device_memory) or int(backend.free_bytes() * 0.95)
        self.planner = Planner(captured, tiling, config, budget, parse_bytes(config.locked_memory),
                               **({} if backend.device.type == "cuda" else {"margin_bytes": 0}))
        self.shapes: dict[Shape, CompiledShape] = {}
        self.latest: CompiledShape | None = None
        self.resident_current = False
        self.version = 0
        self.updating: Update | None = None
        self.torn = False
        self.steps = 0
        if self.planner.locked():
            for tile in store.tiles.values():
                for part in (tile.weights, tile.gradients):
                    if part is not None:
                        backend.lock(part)

    # ---------------------------------------------------------------- programs
    def compiled(self, shape: Shape) -> CompiledShape:
        """The program of a shape, compiled at its first use and proven against those that exist.

        Raises `InsufficientMemoryError`, `UnsupportedError`, `ProgramError`."""
        if shape not in self.shapes:
            self.captured.check_shape(shape.batch, shape.length)
            plan = self.planner.plan(shape.batch, shape.length, shape.training)
            if len(plan.micro_batches) > 1 and shape.labels and not self.captured.has_normaliser:
                raise UnsupportedError(
                    "the model's loss is not a cross entropy over tokens, so that it cannot be split into micro-batches: "
                    f"give micro_batch_size={shape.batch} or smaller batches")
            model = model_program(self.tiling.call_specs(self.captured.calls, self.captured.templates),
                                  self.tiling.tiles(), shape.batch, shape.labels)
            compiled = compile_program(model, plan, PIPELINE)
            verify(compiled.program, [s.program for s in self.shapes.values()])
            self.shapes[shape] = CompiledShape(shape, plan, compiled)
        self.latest = self.shapes[shape]
        return self.latest

    def _reserve(self, shape: CompiledShape) -> None:
        program = shape.program
        wanted = {s: slot for s, slot in program.slots.items()
                  if not self.arena.is_slab(s) or self._uses(program, s, ("forward", "backward", "update", "evaluate"))}
        grown = any(s not in self.arena.slots or self.arena.slots[s].numel() < slot.bytes for s, slot in wanted.items())
        if grown:
            self.settle()
            self.arena.reserve(wanted)
            self.resident_current = False

    @staticmethod
    def _uses(program: Program, slot: str, sections: tuple[str, ...]) -> bool:
        return any(argument(n, "into") == slot for s in sections if s in program.sections
                   for n in find(program.section(s), "pack", "offload"))

    # ---------------------------------------------------------------- running sections
    def submit(self, shape: CompiledShape, section: str, batch: Batch, lease: dict[str, Any] | None = None,
               update: Update | None = None) -> Any:
        if section not in shape.kernels:
            shape.kernels[section] = self.binder.bind(shape.program, section, shape.plan.length, shape.shape.labels)
        frame = Frame(self.backend, self.store, self.arena, shape.kernels[section], batch,
                      lease if lease is not None else {}, update)
        return self.executor.submit(shape.program.section(section), frame)

    def enter(self, shape: CompiledShape) -> None:
        """Before any section that reads weights: slots exist, foreign writes are noticed, resident tiles are current."""
        self.raise_pending()
        self.check_whole()
        self._reserve(shape)
        if self.writes.pending():
            self.settle()
            self.writes.adopt()
            self.version += 1
            self.resident_current = False
        if shape.plan.resident and not self.resident_current:
            self.submit(shape, "load", Batch([], self.constants))
            self.resident_current = True

    def forward(self, inputs: Mapping[str, Tensor], normaliser: Tensor | None) -> tuple[Tensor, Lease]:
        """The loss of a batch (0-d, on the compute device) and the lease that its backward needs."""
        shape = self.compiled(self._shape(inputs, training=True))
        self.enter(shape)
        batch = self._batch(shape, inputs, normaliser)
        lease = Lease(shape, batch, self.version)
        with self.guarded():
            self.submit(shape, "forward", batch, lease.values).wait((Lane.COMPUTE,))
        with self._on_compute():
            losses = [value.loss for value in batch.results.pop("loss")]
            loss = torch.stack(losses).sum(dim=0) if len(losses) > 1 else losses[0].clone()
        self.backend.exit([loss])
        return loss, lease

    def evaluate(self, inputs: Mapping[str, Tensor], normaliser: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """(loss or None, logits) without gradients."""
        shape = self.compiled(self._shape(inputs, training=False))
        self.enter(shape)
        batch = self._batch(shape, inputs, normaliser)
        with self.guarded():
            self.submit(shape, "evaluate", batch).wait((Lane.COMPUTE,))
        (values,) = batch.results.values()
        loss, logits = self._collect(values, labels="logits" not in batch.results)
        self.backend.exit([t for t in (loss, logits) if t is not None])
        return loss, logits

    def _collect(self, values: list[Activation], labels: bool) -> tuple[Tensor | None, Tensor | None]:
        columns = list(zip(*(v.outputs for v in values), strict=True))
        with self._on_compute():
            loss = torch.stack(columns[0]).sum(dim=0) if labels else None
            tensors = columns[1 if labels else 0:]
            logits = torch.cat(tensors[0]) if tensors else None
        return loss, logits

    def backward(self, lease: Lease, gradient: Tensor) -> None:
        """Runs a lease's backward and sets `.grad` of every trained parameter. Returns when gradients are home."""
        self.raise_pending()
        if lease.closed:
            raise LeaseError("this loss has had its backward: run the forward again (retain_graph cannot be honoured, "
                             "activations are freed as the backward goes)")
        if lease.version != self.version or self.writes.pending():
            raise LeaseError("the weights have changed since this loss was computed: run backward before optimizer.step(), "
                             "or the forward again")
        section = "backward_accumulate" if self._gather_gradients() else "backward"
        if section == "backward_accumulate":
            wanted = {s: slot for s, slot in lease.shape.program.slots.items()}
            if any(s not in self.arena.slots for s in wanted):
                self.settle()
                self.arena.reserve(wanted)
        lease.closed = True
        lease.batch.scale = gradient.to(self.backend.device)
        self.backend.enter([lease.batch.scale])
        with self.guarded():
            self.submit(lease.shape, section, lease.batch, lease.values).wait()
            self.drain()
        for name, view in self.gradients.items():
            self.parameters[name].grad = view
        self.writes.note_gradients(self.gradients)

    def _gather_gradients(self) -> bool:
        """Whether gradients exist to be added to; then all of them do, in the tiles."""
        given = {n: self.parameters[n].grad for n in self.gradients}
        if all(g is None for g in given.values()):
            return False
        self.settle()
        for name, view in self.gradients.items():
            gradient = given[name]
            if gradient is None:
                view.zero_()
            elif gradient.data_ptr() != view.data_ptr():
                view.copy_(gradient)
        return True

    def update(self, update: Update) -> None:
        """Hands an optimizer step to the cpu lane and returns. A failed one is completed by the next call."""
        self.raise_pending()
        shape = next((s for s in self.shapes.values() if "update" in s.program.sections), None)
        if shape is None:
            return  # no backward has been run: there is nothing to do
        if self.updating is not None and self.torn:
            update.done, update.norm = self.updating.done, self.updating.norm
        self._reserve(shape)
        self.version += 1
        self.steps += 1
        self.updating, self.torn = update, False
        with self.guarded():
            self.submit(shape, "update", Batch([], self.constants), update=update)

    # ---------------------------------------------------------------- waiting and failing
    def guarded(self) -> _Guard:
        return _Guard(self)

    def raise_pending(self) -> None:
        """Raises what an update in flight has failed with."""
        with self.guarded():
            self.executor.check()

    def drain(self) -> None:
        """Waits for everything submitted, on the host and on the device."""
        self.executor.idle()
        self.executor.check()
        self.backend.synchronize()

    def settle(self) -> None:
        """As `drain`, for callers outside a step: afterwards host memory may be read and written freely."""
        with self.guarded():
            self.drain()

    def check_whole(self) -> None:
        """Raises `TornError` if an update stopped between its first and its last tile."""
        if self.torn:
            raise TornError("an update stopped half-way: call optimizer.step() again to complete it, or load a checkpoint")

    def recover(self) -> None:
        """After a failure. Before the first `adam` of an update nothing has changed; after it, and before the last, the
        weights are torn until the update is run again."""
        self.executor.recover()
        self.resident_current = False
        update = self.updating
        if update is not None:
            update.failed = update.done != set(update.segments)
            self.torn = update.failed and bool(update.done)

    # ---------------------------------------------------------------- batches
    def _shape(self, inputs: Mapping[str, Tensor], training: bool) -> Shape:
        first = next(iter(inputs.values()))
        labels = set(self.captured.batch_inputs) <= inputs.keys()
        return Shape(first.shape[0], first.shape[1], labels, training)

    def _batch(self, shape: CompiledShape, inputs: Mapping[str, Tensor], normaliser: Tensor | None) -> Batch:
        """The border: the batch goes to the device here, outside the program (it is a few kilobytes a step)."""
        device = self.backend.device
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
        if normaliser is not None:
            normaliser = normaliser.to(device=device, dtype=torch.float32, non_blocking=True)
        self.backend.enter([*moved.values(), *([] if normaliser is None else [normaliser])])
        cuts = list(itertools.accumulate(shape.plan.micro_batches, initial=0))
        micro_batches = [{name: tensor[a:b] for name, tensor in moved.items()} for a, b in itertools.pairwise(cuts)]
        return Batch(micro_batches, self.constants, normaliser)

    def _on_compute(self) -> Any:
        return self.backend.lane(Lane.COMPUTE)

    def close(self) -> None:
        self.settle()
        self.executor.close()
        self.arena.close()
        for tile in self.store.tiles.values():
            for part in (tile.weights, tile.gradients):
                if part is not None:
                    self.backend.unlock(part)


class _Guard:
    """Around lane work: whatever it raises leaves the lanes ready for the next step."""

    def __init__(self, streamed: Streamed) -> None:
        self.streamed = streamed

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, LaneError | KeyboardInterrupt | SystemExit):
            self.streamed.recover()
