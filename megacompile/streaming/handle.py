"""The handle of a streamed model, `model.megacompile`."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from megacompile.errors import MegacompileError, UnsupportedError
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.heads import LOGITS, batch_name
from megacompile.frontend.templates.hidden_states import LAST
from megacompile.frontend.templates.token_functions import described
from megacompile.inputs.batch import BatchArguments, check_token_tensors, logits_of, read_arguments
from megacompile.inputs.repacking import Wanted
from megacompile.ir.plan import Plan, Shape
from megacompile.ir.program import Op, Program
from megacompile.planning.explain import outlook
from megacompile.planning.step_time import pace_of
from megacompile.predict.durations import Durations
from megacompile.predict.hardware import Hardware
from megacompile.predict.simulate import Timeline
from megacompile.streaming.differentiable_results import StreamedResults, refuse_hooks
from megacompile.streaming.editing import editable_text, load
from megacompile.streaming.optim import AdamW
from megacompile.streaming.owners import disclaim
from megacompile.streaming.recording import Recording
from megacompile.streaming.replanning import replan
from megacompile.streaming.shapes import CompiledShape
from megacompile.streaming.streamed import Streamed
from megacompile.streaming.streamed_module import StreamedModule, original_class
from megacompile.streaming.turns import in_turn


class Handle:
    """`model.megacompile`: what was captured, planned and scheduled, and control over what runs."""

    def __init__(self, streamed: Streamed) -> None:
        self.streamed = streamed
        self.anchor = torch.zeros((), requires_grad=True)

    # ---------------------------------------------------------------- calls of the model
    @in_turn
    def call(self, model: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        streamed = self.streamed
        given = self._arguments(model, forward, args, kwargs)
        rebuild = streamed.captured.output.rebuild
        if given.hidden_states:
            made, states = self._hidden_states(given)
            return rebuild(None, self._logits(made, given), hidden_states=states)
        if not self._differentiates():
            with torch.inference_mode(False), torch.no_grad():  # slots outlive the call: no inference tensors
                loss, logits = streamed.evaluate(given)
            return rebuild(loss, None if logits is None else self._logits(logits, given))
        if given.has_labels:
            (loss,) = self._differentiable(given, "loss", (True,))
            return rebuild(loss, None)
        (logits,) = self._outputs(given, LOGITS)
        return rebuild(None, self._logits(logits, given))

    def _logits(self, logits: Tensor, given: BatchArguments) -> Tensor:
        """What the caller is to see of them."""
        with self.streamed.guarded():
            return logits_of(logits, given)

    def _unpacked(self, values: Sequence[Tensor], given: BatchArguments) -> tuple[Tensor, ...]:
        """Values of the tokens that were computed, as the caller has its tokens."""
        with self.streamed.guarded():
            return tuple(map(given.unpacked, values))

    def _hidden_states(self, given: BatchArguments) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Logits, or of a model without a head what it returns, and the hidden states of all layers."""
        if self._differentiates() or given.has_labels:
            raise UnsupportedError("output_hidden_states gives those of all layers without a loss and without gradients: leave "
                                   "labels out and call under torch.no_grad(), or differentiate "
                                   "model.megacompile.last_hidden_state(batch)")
        with torch.inference_mode(False), torch.no_grad():
            outputs, before = self.streamed.evaluate_hidden_states(given)
        return outputs[0], self._unpacked((*before, outputs[-1]), given)

    @in_turn
    def last_hidden_state(self, batch: Mapping[str, Any]) -> Tensor:
        """What the model would make logits of, [B, T, hidden], without these: of `batch`, the model's arguments without labels.
        Differentiable.

        Raises `UnsupportedError` where the gradient of a parameter would be missing: of a head that is trained and used for
        nothing else."""
        given = self._of_mapping("last_hidden_state", batch, {})
        captured = self._captured(given)
        left_out = sorted(captured.left_out_of(LAST) & self.streamed.gradients.keys())
        if left_out and self._differentiates():
            raise UnsupportedError(f"{left_out[0]} is trained, and no gradient comes to it from the last hidden state: stream "
                                   "the model without its head (AutoModel), freeze it before stream(), or call under "
                                   "torch.no_grad()")
        (hidden,) = self._unpacked(self._outputs(given, LAST), given)
        return hidden

    def _of_mapping(self, caller: str, batch: Mapping[str, Any], tensors: Mapping[str, Tensor],
                    wanted: Wanted = Wanted.ALL) -> BatchArguments:
        """Arguments of a method that takes the model's by name, without labels; and `tensors` of the same tokens."""
        if not isinstance(batch, Mapping):
            raise MegacompileError(f"{caller} takes the model's arguments by name, such as {{'input_ids': ids}}, not a "
                                   f"{type(batch).__name__}")
        given = self._named(batch, wanted=wanted)
        check_token_tensors(caller, tensors, given, self.streamed.captured.labels)
        return given

    def _outputs(self, given: BatchArguments, output: str) -> tuple[Tensor, ...]:
        """A head's outputs, differentiable where gradients are wanted."""
        if not self._differentiates():
            with torch.inference_mode(False), torch.no_grad():
                return self.streamed.evaluate_outputs(given, output)
        head = self._captured(given).head(output)
        if not any(head.has_gradient):
            raise UnsupportedError(f"the function {output} returns nothing that has a gradient: call it under torch.no_grad()")
        return self._differentiable(given, output, head.has_gradient)

    def _differentiates(self) -> bool:
        return torch.is_grad_enabled() and self.streamed.tiling.trains

    def _differentiable(self, given: BatchArguments, output: str, has_gradient: tuple[bool, ...]) -> tuple[Tensor, ...]:
        results, forward = self.streamed.forward(given, output)
        return StreamedResults.apply(self.anchor.view_as(self.anchor), results, has_gradient, self.streamed, forward,
                                     *self.streamed.parameters.values())

    @in_turn
    def per_token(self, function: Callable[..., Any], batch: Mapping[str, Any], **tensors: Tensor) -> Any:
        """Values of each token, differentiable, without all logits at once: what `function(logits, **tensors)` returns for the
        tokens of `batch`, the model's arguments without labels.

        `function` gets logits [N, vocabulary] of some tokens and the rows of `tensors` ([B, T, ...] here, [N, ...] there) of
        the same tokens; it returns a tensor [N, ...], or several in any structure, and is traced: make it once, and pass what
        changes as tensors. Returned are [B, T, ...]. Nothing is shifted: logits tell the next position's token.

        Raises `UnsupportedError` for what cannot be traced or honoured."""
        return self.values_of_tokens(function, batch, tensors)

    def values_of_tokens(self, function: Callable[..., Any], batch: Mapping[str, Any], tensors: Mapping[str, Tensor],
                         wanted: Wanted = Wanted.ALL) -> Any:
        """As `per_token`, for a caller that may read no values of padding."""
        given = self._of_mapping("per_token", batch, tensors, wanted)
        packed = {batch_name(name): given.packed(tensor).contiguous() for name, tensor in tensors.items()}
        given = replace(given, inputs={**given.inputs, **packed})
        heads = self._captured(given).require_heads()
        output = heads.of_function(function, described(tensors))
        head = heads.head(output)
        assert head.structure is not None, "a function's head has one"
        return pytree.tree_unflatten(self._unpacked(self._outputs(given, output), given), head.structure)

    def _captured(self, given: BatchArguments) -> CapturedModel:
        """The capture that serves a batch."""
        return self.streamed.captures.serve(given.key).captured

    def _arguments(self, model: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                   training: bool = False, wanted: Wanted = Wanted.ALL) -> BatchArguments:
        """What the user passes, once nothing of the model or its surroundings forbids honouring it. `training`: whatever the
        grad mode is."""
        streamed = self.streamed
        if torch.is_autocast_enabled(streamed.backend.device.type):
            dtype = torch.get_autocast_dtype(streamed.backend.device.type)
            if any(p.dtype != dtype for p in streamed.parameters.values()):
                raise UnsupportedError(f"autocast to {dtype} differs from the dtype that the model was streamed in: "
                                       f"leave autocast out, or stream(model, dtype={dtype})")
        refuse_hooks(model)
        differentiating = training or torch.is_grad_enabled()
        streamed.captures.adapters.check(differentiating)
        streamed.writes.check_model(model, differentiating)
        with streamed.guarded():  # images go to the device
            return read_arguments(model, forward, streamed.captures, args, kwargs, wanted,
                                  differentiating=differentiating and streamed.tiling.trains)

    def _named(self, batch: Mapping[str, Any], training: bool = False, wanted: Wanted = Wanted.ALL) -> BatchArguments:
        """As `_arguments`, of those that are given by name."""
        model = self.streamed.model
        return self._arguments(model, original_class(model).forward.__get__(model), (), batch, training, wanted)

    @in_turn
    def train_step(self, batch: Mapping[str, Any], optimizer: AdamW) -> Tensor:
        """One whole training step as one program: forward, backward and update of `batch`, which has its labels. The loss,
        0-d, on the compute device, without gradient. Whole steps alone run in waves (see `StreamConfig.waves`) and update as
        gradients arrive (`AdamW(overlap="backward")`); `.grad` stays None.

        Raises `MegacompileError` if gradients of earlier backwards wait for a step, `UnsupportedError` without labels."""
        streamed = self.streamed
        if not streamed.tiling.trains:
            raise UnsupportedError("no parameter of the model is trained, so that train_step has nothing to do: close() it, "
                                   "set requires_grad where it should train, and stream() it again")
        given = self._named(batch, training=True)
        if not given.has_labels:
            if not streamed.captured.has_loss:
                raise UnsupportedError("train_step needs a loss, and the model has none: give stream(model, loss=...), or "
                                       "train in a loop by a loss of the model's output")
            raise UnsupportedError(f"train_step needs labels ({', '.join(streamed.captured.labels)}): pass them in the batch")
        if optimizer.streamed is not streamed:
            raise MegacompileError("the optimizer belongs to another model: make one of this model's parameters")
        if streamed.gradients.waiting:
            raise MegacompileError("gradients of an earlier backward wait for a step: call step() or zero_grad() first")
        return streamed.train_step(given, optimizer.request(), optimizer.overlap is not None)

    # ---------------------------------------------------------------- looking
    @in_turn
    def compiled(self, batch: Mapping[str, Tensor] | None = None, *, training: bool = True,
                 update: str | None = None, whole_step: bool = False) -> CompiledShape:
        """The compiled shape of a batch; of the last one without. `training` False: of an evaluation, as a batch without labels
        always is. Of a training step: `update` is "step" or "arrival" (None: as the optimizer does that was made last), and
        `whole_step` asks for that of a `train_step`. Compiles, runs nothing."""
        streamed = self.streamed
        if batch is None:
            if streamed.shapes.latest is None:
                raise MegacompileError("nothing has been compiled yet: pass a batch, or run one")
            return streamed.shapes.latest
        training = training and streamed.tiling.trains
        given = self._looked_at(batch, training)
        shape = streamed.shape_of(given, training=training and set(streamed.captured.batch_inputs) <= given.inputs.keys())
        if shape.training:
            shape = replace(shape, update=update or shape.update, whole_step=whole_step)
        return streamed.compiled(shape)

    def _looked_at(self, batch: Mapping[str, Tensor], training: bool) -> BatchArguments:
        """The arguments of a batch that is not run. Raises `MegacompileError` where it is none."""
        known = self.streamed.captured.batch_inputs
        tensors = {k: v for k, v in batch.items() if isinstance(v, Tensor)} if isinstance(batch, Mapping) else {}
        if not any(k in known and v.dim() >= 2 for k, v in tensors.items()):
            raise MegacompileError(f"a batch must map {', '.join(known)} to tensors [batch, length]: this is a "
                                   f"{type(batch).__name__} without such")
        return self._named(tensors, training)

    def _trained(self, batch: Mapping[str, Tensor] | None) -> CompiledShape:
        """As `compiled`. Raises `MegacompileError` for a batch that does not train."""
        shape = self.compiled(batch)
        if not shape.shape.training:
            raise MegacompileError("plans of training steps are simulated and explained, not those of evaluations: pass a "
                                   "batch with labels")
        return shape

    def program(self, batch: Mapping[str, Tensor] | None = None, stage: str | None = None) -> Program:
        """The program for a batch's shape: the one that runs, or as the pass of that name left it."""
        stages = self.compiled(batch).compiled.stages
        if stage is None:
            return self.compiled(batch).program
        if stage not in stages:
            raise MegacompileError(f"there is no stage {stage!r}: there are {', '.join(stages)}")
        return stages[stage]

    def table(self, batch: Mapping[str, Tensor] | None = None, section: str | None = None) -> str:
        return self.program(batch).table(section)

    def text(self, batch: Mapping[str, Tensor] | None = None, **which: Any) -> str:
        """The program for a batch's shape (`which`, as for `compiled`), as text that says what it was made for: it may be
        edited, and `load_program` runs it."""
        return editable_text(self.compiled(batch, **which))

    @property
    def stages(self) -> dict[str, Program]:
        """Every stage of the last program."""
        return self.compiled().compiled.stages

    @property
    def plan(self) -> Plan:
        """The plan of the last program."""
        return self.compiled().plan

    @property
    @in_turn
    def stats(self) -> dict[str, Any]:
        """Counters, sizes in bytes and times in seconds. `skipped_steps`: those of `steps` whose gradients were not finite;
        `kept_tiles`: with updates on arrival, tiles whose gradients were not, one for each step (known after `synchronize`).
        `compiled`: graphs that inductor compiled, `compiled_from_cache` that an earlier process had; `compile_s`, what both
        took; `capture_s`, the model's capture and templates. `plan_searches`: plans of training steps that were searched
        for; `plans_from_cache`, those that an earlier process had. `micro_batch_shapes`: sizes of micro-batches, [rows,
        length], that kernels are there for; any number of rows counts as one (`variants_of_any_rows`: how many of the
        `compiled_variants` serve any). `useful_tokens`: tokens of all training steps that no mask hides;
        `computed_tokens`, with padding; `packing_efficiency`, the former over the latter; `step_...`: the same of the last
        step."""
        streamed = self.streamed
        return dict(
            steps=streamed.step.count, skipped_steps=len(streamed.step.skipped), kept_tiles=len(streamed.step.kept),
            shapes=len(streamed.shapes), templates=len(streamed.captured.templates),
            compiled_variants=sum(served.binder.variants for served in streamed.captures),
            variants_of_any_rows=sum(served.binder.variants_of_any_rows for served in streamed.captures),
            micro_batch_shapes=sum(len(served.binder.sizes) for served in streamed.captures),
            plan_searches=streamed.planner.answers["searched"], plans_from_cache=streamed.planner.answers["kept"],
            **streamed.step.tokens.stats(),
            capture_s=sum(served.captured.seconds for served in streamed.captures),
            compiled=streamed.binder.inductor.compiled, compiled_from_cache=streamed.binder.inductor.from_cache,
            compile_s=streamed.binder.inductor.seconds,
            host_bytes=sum(streamed.store.bytes().values()) + streamed.arena.slab_bytes() + streamed.checkpoints.bytes(),
            host_parts=streamed.store.bytes(), checkpoint_bytes=streamed.checkpoints.bytes(),
            slab_bytes=streamed.arena.slab_bytes(), slot_bytes=streamed.arena.device_bytes(),
            peak_device_bytes=streamed.backend.peak_bytes(),
            predicted_device_bytes=max((s.estimate.total for s in streamed.shapes.table.values()), default=0),
            parameters=sum(x.parameters for x in streamed.tiling.layouts.values()))

    def record(self) -> Recording:
        """A context in which each instruction's start and end are recorded, on the device's own clock: see `Recording`."""
        return Recording(self.streamed)

    def simulate(self, batch: Mapping[str, Tensor] | None = None, hardware: str | Path | Hardware | None = None,
                 without: Callable[[Op], bool] | None = None) -> Timeline:
        """What `record` would show of some steps, predicted: of a batch's program, or of the last one; here, or on `hardware`
        (as in `megacompile.schedule`). Ops that are `without` take no time. Raises `MegacompileError` for a batch that does not
        train, and for a machine of which nothing is known."""
        streamed, shape = self.streamed, self._trained(batch)
        captured = streamed.captures.serve(shape.shape.capture_key).captured
        durations = Durations(captured, streamed.tiling.layouts, self._hardware(hardware), streamed.binder.compiling)
        return durations.simulate(shape.program, shape.plan, without)

    def explain(self, batch: Mapping[str, Tensor] | None = None, hardware: str | Path | Hardware | None = None) -> str:
        """The training plan of a batch (None: the last one), and those beside it, as text: how its rows are packed, or why they
        are not, what each plan takes, how fast it would be and what binds. `hardware`, and what is raised, as for
        `simulate`."""
        streamed, shape = self.streamed, self._trained(batch)
        served = streamed.captures.serve(shape.shape.capture_key)
        pace = pace_of(served.captured, streamed.tiling, self._hardware(hardware), streamed.binder.compiling,
                       streamed.planner.config.passes)
        planner = replace(served.planner, pace=pace, output=shape.plan.output)
        layout, refusal = None, ""
        if batch is not None:
            given = self._looked_at(batch, training=True)
            layout, refusal = given.layout, given.not_packed
        rows = streamed.captures.repacking.outlook(shape.shape, layout, refusal)
        return f"{rows}\n{outlook(planner, shape.plan, planner.host_bytes, shape.shape.whole_step).text()}"

    def _hardware(self, hardware: str | Path | Hardware | None) -> Hardware:
        if isinstance(hardware, Hardware):
            return hardware
        return Hardware.here(self.streamed.backend.device) if hardware is None else Hardware.find(hardware)

    # ---------------------------------------------------------------- control
    @in_turn
    def load_program(self, source: str | Path) -> Shape:
        """Runs an edited `text` from now on for the shape that it was made for, which is returned: a string, or a file.
        Forwards that are open go on with the program that they began with. Evaluations have a program of their own
        (`text(batch, training=False)`).

        Raises `ProgramError` if the text does not parse or is not proved safe, or was made for another model;
        `InsufficientMemoryError` if its slots do not fit. Then nothing has changed."""
        streamed = self.streamed
        beside = streamed.shapes_in_use() | set(streamed.shapes.table.values())
        loaded = load(source, streamed.shapes, [shape.program for shape in beside])
        streamed.shapes.adopt(loaded)
        return loaded.shape

    @in_turn
    def unload_program(self, shape: Shape | None = None) -> None:
        """Goes back to the compiled program of a shape, or of all. Raises `MegacompileError` if none was loaded for it."""
        if not self.streamed.shapes.drop(shape):
            raise MegacompileError("no edited program is loaded" + (f" for {shape}" if shape is not None else "")
                                   + ": there is nothing to go back from")

    @in_turn
    def replan(self, **options: Any) -> None:
        """Other options of `stream` from the next step on, where plans alone know them (`device_memory`,
        `checkpoint_interval`, `micro_batch_size`, ...; see `OPTIONS` in `replanning.py`): weights, optimizers and compiled
        kernels stay. Edited programs are unloaded. Raises `MegacompileError`, and nothing has changed, for other options, and
        between a forward and the end of its step."""
        replan(self.streamed, **options)

    @in_turn
    def synchronize(self) -> None:
        """Waits for updates in flight. Afterwards parameters, gradients and optimizer state that you hold are current, and what
        you write to them before the next call counts, through `.data` too, which leaves no trace: what lives on the device is
        sent there anew."""
        self.streamed.evict()

    @in_turn
    def whole(self) -> None:
        """As `synchronize`; raises `TornError` if the weights are not all of one step."""
        self.streamed.settle()
        self.streamed.step.check_whole()

    @in_turn
    def close(self) -> None:
        """Gives everything back: what remains is a plain model on the CPU, trained. Raises, when that is done, what an
        update in flight failed with."""
        model = self.streamed.model
        try:
            self.streamed.close()
        finally:
            disclaim(self.streamed)
            self.streamed.shapes.close()
            if isinstance(model, StreamedModule):
                model.__class__ = original_class(model)  # type: ignore[assignment]
                del model.__dict__["megacompile"]
