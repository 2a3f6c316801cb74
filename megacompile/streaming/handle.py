"""The handle of a streamed model, `model.megacompile`."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.compat.core import pytree
from megacompile.errors import MegacompileError, UnsupportedError
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.hidden_states import LAST, LOGITS, batch_name
from megacompile.frontend.templates.token_functions import described, filling
from megacompile.inputs.batch import BatchArguments, check_labels, check_names, check_token_tensors, logits_of, read_arguments
from megacompile.inputs.repacking import Wanted
from megacompile.ir.ops import UPDATE_OPS
from megacompile.ir.plan import BatchSpec, Plan
from megacompile.ir.program import Lane, Op, Program, op_of
from megacompile.passes.pipeline import named_stage
from megacompile.planning.explain import outlook
from megacompile.planning.step_time import simulator_of
from megacompile.predict.durations import Durations
from megacompile.predict.hardware import Hardware
from megacompile.predict.simulate import Item, Timeline
from megacompile.runtime.executor import Executed, Executor, Recorder
from megacompile.streaming.call_lock import exclusive
from megacompile.streaming.device_copy import DeviceCopy, Turns, original_class
from megacompile.streaming.differentiable_results import StreamedResults, refuse_hooks
from megacompile.streaming.expert_loads import imbalance, loads_of, move_biases
from megacompile.streaming.generation.turns import turns_program
from megacompile.streaming.optimizer.optimizer import StreamedOptimizer
from megacompile.streaming.programs.editing import editable_text, load
from megacompile.streaming.programs.executables import Executable
from megacompile.streaming.replanning import replan
from megacompile.streaming.streamed import Streamed
from megacompile.streaming.user_tensors.owners import disclaim


# -------------------- Records what the lanes of a streamed model did, in the simulator's format
#
#     with model.megacompile.record() as recorded:
#         for batch in three_batches:
#             ...a step...
#     print(recorded.timeline().table())
#
# As in a simulation, the first step has no earlier update to wait for, so `Timeline` describes the last step. Compute counts as
# busy from the moment its stream reaches a template until the template is done, so gaps between a template's kernels count as
# busy. On the critical chain, time in which a lane had no instruction is assigned to no lane; the chain's seconds may therefore
# be less than the step's.
class Recording:
    """Records everything submitted inside `with`. Entering and leaving wait for all lanes. State: the recorded items, after the
    end."""

    def __init__(self, streamed: Streamed) -> None:
        self._streamed = streamed
        self._items: list[Item] | None = None

    def __enter__(self) -> Recording:
        executor = self._streamed.executor
        if not isinstance(executor, Executor):
            raise MegacompileError("reference=True runs everything in one thread, so no lanes exist to record: leave "
                                   "reference out")
        if executor.recorder is not None:
            raise MegacompileError("the model is being recorded already: end that recording first")
        self._streamed.settle()
        executor.recorder = Recorder(self._streamed.backend.timestamps())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        executor = self._streamed.executor
        assert isinstance(executor, Executor) and executor.recorder is not None, "a recording ended twice"
        try:
            if error is None:
                self._streamed.settle()
                self._items = _items(executor.recorder)
        finally:
            executor.recorder = None

    def timeline(self) -> Timeline:
        """All instructions, sorted by start time. Raises `MegacompileError` before the recording ends, or if nothing ran."""
        if not self._items:
            raise MegacompileError("nothing was recorded: " + (
                "the recording has not ended, or an error ended it" if self._items is None else "no section ran meanwhile"))
        steps = range(max(item.step for item in self._items) + 1)
        return Timeline.of(sorted(self._items, key=lambda item: item.start_s),
                           [_end([item for item in self._items if item.step == step]) for step in steps])


def _end(items: list[Item]) -> float:
    return max(item.end_s for item in [i for i in items if i.lane == Lane.COMPUTE] or items)


def _items(recorder: Recorder) -> list[Item]:
    step_of = _steps(x for lane in recorder.lanes.values() for x in lane)
    items: dict[Executed, Item] = {}
    for lane, done in recorder.lanes.items():
        for x in done:
            begin, end = recorder.timestamps.seconds(x.begun), recorder.timestamps.seconds(x.ended)
            items[x] = Item(step_of[x.run], x.section, x.node, lane, end - begin, [], begin, end, done=True)
    for done in recorder.lanes.values():
        before: Item | None = None
        for x in done:
            awaited = items.get(recorder.recorded[x.waits_for]) if x.waits_for in recorder.recorded else None
            item = items[x]
            item.waits_for = awaited
            item.cause = max((i for i in (before, awaited) if i is not None), key=lambda i: i.end_s, default=None)
            before = item
    return list(items.values())


def _steps(executed: Iterable[Executed]) -> dict[int, int]:
    """The step of each run. A step begins with the first forward after an update, since several backwards may accumulate."""
    found: dict[int, int] = {}
    step, updated = 0, False
    executed = list(executed)
    updates = {x.run for x in executed if op_of(x.node).name in UPDATE_OPS}
    for run, section in sorted({(x.run, x.section) for x in executed}):
        if updated and section in ("forward", "train_step"):
            step, updated = step + 1, False
        updated |= run in updates
        found[run] = step
    return found


# -------------------- The counters, sizes and times of a streamed model
def compiled_variants(streamed: Streamed) -> int:
    """The number of kernels compiled, or loaded, so far."""
    return sum(served.binder.variants for served in streamed.captures)


def stats_of(streamed: Streamed) -> dict[str, Any]:
    """The values that `Handle.stats` describes."""
    return dict(
        steps=streamed.step.count, skipped_steps=len(streamed.step.skipped.steps), kept_tiles=len(streamed.step.skipped.tiles),
        shapes=len(streamed.executables), templates=len(streamed.captured.templates),
        compiled_variants=compiled_variants(streamed),
        variants_of_any_size=sum(served.binder.variants_of_any_size for served in streamed.captures),
        micro_batch_shapes=sum(len(served.binder.sizes) for served in streamed.captures),
        plan_searches=streamed.executables.answers["searched"], plans_from_cache=streamed.executables.answers["kept"],
        **streamed.step.tokens.stats(),
        capture_s=sum(served.captured.seconds for served in streamed.captures),
        compiled=streamed.binder.inductor.compiled, compiled_from_cache=streamed.binder.inductor.from_cache,
        compile_s=streamed.binder.inductor.seconds,
        host_bytes=sum(streamed.store.bytes().values()) + streamed.arena.slab_bytes() + streamed.activation_checkpoints.bytes(),
        host_parts=streamed.store.bytes(), checkpoint_bytes=streamed.activation_checkpoints.bytes(),
        disk_bytes=sum(file.bytes for file in streamed.store.files),
        disk_bytes_read=streamed.store.disk_bytes_read,
        disk_bytes_written=streamed.store.disk_bytes_written,
        slab_bytes=streamed.arena.slab_bytes(), slot_bytes=streamed.arena.device_bytes(),
        peak_device_bytes=streamed.backend.peak_bytes(),
        predicted_device_bytes=streamed.executables.largest,
        parameters=sum(x.parameters for x in streamed.tiling.layouts.values()))


class Handle:
    """`model.megacompile`: shows what was captured, planned and scheduled, and controls what runs."""

    def __init__(self, streamed: Streamed) -> None:
        self.streamed, self.device_copy = streamed, DeviceCopy(streamed)
        self.anchor = torch.zeros((), requires_grad=True)

    # ---------------------------------------------------------------- calls of the model
    @exclusive
    def call(self, model: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        streamed = self.streamed
        with self._told():
            given = self._arguments(model, forward, args, kwargs)
            if given.hidden_states and (self._differentiates() or given.has_labels):
                raise UnsupportedError("output_hidden_states=True works only without a loss and without gradients: leave "
                                       "labels out and call under torch.no_grad(), or differentiate "
                                       "model.megacompile.last_hidden_state(batch)")
        rebuild = streamed.captured.output.rebuild
        if given.hidden_states:
            made, states = self._hidden_states(given)
            return rebuild(None, self._logits(made, given), hidden_states=states)
        if not self._differentiates():
            with torch.inference_mode(False), torch.no_grad():  # slots outlive the call: no inference tensors
                loss, logits = streamed.evaluate(given)
            return rebuild(loss, None if logits is None else self._logits(logits, given))
        if given.has_labels:
            (loss,), _ = self._differentiable(given, "loss", (True,))
            return rebuild(loss, None)
        (logits,), given = self._outputs(given, LOGITS)
        return rebuild(None, self._logits(logits, given))

    def _told(self) -> AbstractContextManager[None]:
        """A context around the work that this rank does alone before a forward that all ranks run."""
        return self.streamed.rank_group.told("forward") if self._differentiates() else nullcontext()

    def _logits(self, logits: Tensor, given: BatchArguments) -> Tensor:
        """The logits in the caller's layout: the rows that the caller passed, and only the positions that it asked for."""
        with self.streamed.guarded():
            return logits_of(logits, given, self._captured(given).logits_of_tokens)

    def _unpacked(self, values: Sequence[Tensor], given: BatchArguments) -> tuple[Tensor, ...]:
        """Values of computed tokens, arranged in the rows that the caller passed."""
        with self.streamed.guarded():
            return tuple(map(given.unpacked, values))

    def _hidden_states(self, given: BatchArguments) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Logits (the output of a model without a head), and the hidden states of all layers."""
        with torch.inference_mode(False), torch.no_grad():
            outputs, before = self.streamed.evaluate_hidden_states(given)
        return outputs[0], self._unpacked((*before, outputs[-1]), given)

    @exclusive
    def last_hidden_state(self, batch: Mapping[str, Any]) -> Tensor:
        """The hidden states that the model computes logits from, [B, T, hidden]. Differentiable. `batch`: the model's
        arguments, without labels. Raises `UnsupportedError` if a trained parameter would get no gradient: a trained head whose
        weights nothing else uses."""
        with self._told():
            given = self._of_mapping("last_hidden_state", batch, {})
            captured = self._captured(given)
            left_out = sorted(captured.left_out_of(LAST) & self.streamed.gradients.keys())
            if left_out and self._differentiates():
                raise UnsupportedError(f"{left_out[0]} is trained and would get no gradient from the last hidden state: stream "
                                       "the model without its head (AutoModel), freeze it before stream(), or call under "
                                       "torch.no_grad()")
        (hidden,) = self._unpacked(*self._outputs(given, LAST))
        return hidden

    def _of_mapping(self, caller: str, batch: Mapping[str, Any], tensors: Mapping[str, Tensor],
                    wanted: Wanted = Wanted.ALL) -> BatchArguments:
        """The arguments of a method that takes the model's arguments by name, without labels. Checks `tensors`, values of its
        tokens."""
        check_names(caller, batch)
        given = self._named(batch, wanted=wanted)
        check_token_tensors(caller, tensors, given, self.streamed.captured.labels)
        return given

    def _outputs(self, given: BatchArguments, output: str) -> tuple[tuple[Tensor, ...], BatchArguments]:
        """A head's outputs, differentiable if gradients are wanted, and the batch in their layout."""
        if not self._differentiates():
            with torch.inference_mode(False), torch.no_grad():
                return self.streamed.evaluate_outputs(given, output), given
        with self._told():
            head = self._captured(given).head(output)
            if not any(head.has_gradient):
                raise UnsupportedError(f"the function {output} returns nothing that has a gradient: call it under "
                                       "torch.no_grad()")
        return self._differentiable(given, output, head.has_gradient)

    def _differentiates(self) -> bool:
        return torch.is_grad_enabled() and self.streamed.tiling.trains

    def _differentiable(self, given: BatchArguments, output: str,
                        has_gradient: tuple[bool, ...]) -> tuple[tuple[Tensor, ...], BatchArguments]:
        results, forward, given = self.streamed.forward(given, output)
        return StreamedResults.apply(self.anchor.view_as(self.anchor), results, has_gradient, self.streamed, forward,
                                     *self.streamed.parameters.values()), given

    @exclusive
    def per_token(self, function: Callable[..., Any], batch: Mapping[str, Any], **tensors: Tensor) -> Any:
        """Values of each token without computing all logits at once, differentiable: the result of `function(logits,
        **tensors)` for the tokens of `batch`, the model's arguments without labels.

        `function` gets the logits of N tokens, [N, vocabulary], and the same tokens' rows of `tensors`, which are [B, T, ...]
        here and [N, ...] there. It returns a tensor [N, ...] or any structure of them. It is traced: define it once, and pass
        values that change as tensors. The results are [B, T, ...]. Nothing is shifted: a position's logits predict the next
        token.

        Raises `UnsupportedError` for a function that cannot be traced, and for arguments that are not supported."""
        return self.values_of_tokens(function, batch, tensors)[0]

    def values_of_tokens(self, function: Callable[..., Any], batch: Mapping[str, Any], tensors: Mapping[str, Tensor],
                         wanted: Wanted = Wanted.ALL, auxiliary: bool = False) -> tuple[Any, Tensor | None]:
        """Like `per_token`. `wanted` says which values the caller reads. If the caller reads no padding, rows may be packed.
        Also returns, if `auxiliary`, the auxiliary loss of routers, 0-d: the mean over rows of their micro-batches'."""
        def with_tensors(given: BatchArguments) -> BatchArguments:
            packed = {batch_name(n): given.packed(x, filling(function, n)).contiguous() for n, x in tensors.items()}
            again = given.read_again
            return replace(given, inputs={**given.inputs, **packed},
                           read_again=None if again is None else lambda rounding: with_tensors(again(rounding)))

        with self._told():
            if auxiliary and not (self.streamed.captured.heads and self.streamed.captured.heads.has_auxiliary):
                raise UnsupportedError("the model was streamed without an auxiliary loss of routers: set "
                                       "config.output_router_logits = True before stream(), or pass router_aux_loss_coef=0")
            given = with_tensors(self._of_mapping("per_token", batch, tensors, wanted))
            heads = self._captured(given).require_heads()
            output = heads.of_function(function, described(tensors), auxiliary)
        head = heads.head(output)
        assert head.structure is not None, "a function's head has one"
        values = self._unpacked(*self._outputs(given, output))
        found = pytree.tree_unflatten(values[:head.structure.num_leaves], head.structure)
        return found, values[-1][:, 0].mean() if auxiliary else None

    def _captured(self, given: BatchArguments) -> CapturedModel:
        """The capture that serves a batch."""
        return self.streamed.captures.serve(given.key).captured

    def _arguments(self, model: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                   training: bool = False, wanted: Wanted = Wanted.ALL, hooks_run: bool = True) -> BatchArguments:
        """Reads the user's arguments. First checks that they can be honored with the current model and its surroundings.
        `training`: treat the call as training in any grad mode. `hooks_run`: PyTorch runs hooks of the model as a whole."""
        streamed = self.streamed
        if torch.is_autocast_enabled(streamed.backend.device.type):
            dtype = torch.get_autocast_dtype(streamed.backend.device.type)
            if streamed.dtypes != {dtype}:
                raise UnsupportedError(f"autocast to {dtype} differs from the dtype that the model was streamed in: "
                                       f"leave autocast out, or stream(model, dtype={dtype})")
        refuse_hooks(model, also_of_whole=not hooks_run)
        differentiating = training or torch.is_grad_enabled()
        streamed.captures.adapters.check(differentiating)
        streamed.writes.check_model(model, differentiating)
        trains = differentiating and streamed.tiling.trains
        whole = trains and streamed.rank_group.sequence_ranks > 1  # rows keep their form until ranks divide them
        with streamed.guarded():  # images go to the device
            return read_arguments(model, forward, streamed.captures, args, kwargs, wanted, trains, not whole, not whole)

    def _named(self, batch: Mapping[str, Any], training: bool = False, wanted: Wanted = Wanted.ALL,
               hooks_run: bool = False) -> BatchArguments:
        """Like `_arguments`, for arguments that are passed by name."""
        model = self.streamed.model
        return self._arguments(model, original_class(model).forward.__get__(model), (), batch, training, wanted, hooks_run)

    @exclusive
    @torch.inference_mode(False)  # slots outlive the call
    def train_step(self, batch: Mapping[str, Any], optimizer: StreamedOptimizer) -> Tensor:
        """Runs a whole training step as one program: forward, backward and update of `batch`, which includes labels. Returns
        the loss, 0-d, on the compute device, without a gradient; reading it waits for the last forward, not for the backward
        after it. `.grad` stays None. Only whole steps run in waves (see `StreamConfig.waves`). With
        `AdamW(update="arrival")` they update as gradients arrive.

        Raises `MegacompileError` if gradients of earlier backwards wait for a step, `UnsupportedError` without labels."""
        with self.streamed.rank_group.told("train_step"):
            given = self._trained_arguments(batch, optimizer)
            optimizer.prepare()
        return self.streamed.train_step(given, optimizer, optimizer.on_arrival)

    def _trained_arguments(self, batch: Mapping[str, Any], optimizer: StreamedOptimizer) -> BatchArguments:
        streamed = self.streamed
        if not streamed.tiling.trains:
            raise UnsupportedError("no parameter of the model is trained, so that train_step has nothing to do: close() it, "
                                   "set requires_grad where it should train, and stream() it again")
        check_names("train_step", batch)
        given = self._named(batch, training=True)
        check_labels("train_step", given, streamed.captured.labels, streamed.captured.has_loss)
        if not isinstance(optimizer, StreamedOptimizer):
            raise MegacompileError(f"train_step needs an optimizer of megacompile, not a {type(optimizer).__name__} of "
                                   f"{type(optimizer).__module__}: make megacompile.AdamW(model.parameters())")
        if optimizer.streamed is not streamed:
            raise MegacompileError("the optimizer belongs to another model: make one of this model's parameters")
        if streamed.gradients.waiting:
            raise MegacompileError("gradients of an earlier backward wait for a step: call step() or zero_grad() first")
        return given

    def on_device(self, *, in_turns: bool = False, more_bytes: int = 0) -> AbstractContextManager[nn.Module]:
        """A context with the plain model (of its own class, not streamed) and its weights on the device, for inference under
        `torch.no_grad()`: `generate` with every option, evaluation harnesses, hooks. The streamed model does not run meanwhile.

        `in_turns`: layers that do not fit take turns in two slots. Each crosses the link once for every call of the model,
        while others compute. `more_bytes`: of device memory that the use takes beside the weights, such as keys and values.

        Raises `InsufficientMemoryError`, with what is needed, if the device does not hold the weights."""
        return self.device_copy.use(original_class(self.streamed.model), more_bytes,
                                             Turns.SOME if in_turns else Turns.NONE)

    # ---------------------------------------------------------------- looking
    def generation_program(self, tokens: int | None = None) -> Program:
        """The program of one call of the plain model in which all layers take turns on the device: prefetches of their weights,
        and the model's own layers as calls, computed in the caller's thread. `generate` and `on_device(in_turns=True)` run it,
        or one of fewer layers, where the weights do not fit. `tokens`: of the call, of all sequences; where they are too few to
        choose all experts, only chosen experts are copied. None: all are."""
        layers = self.device_copy.layers()
        return turns_program(layers) if tokens is None else turns_program(layers, tokens)

    @exclusive
    def compiled(self, batch: Mapping[str, Tensor] | None = None, *, training: bool = True,
                 update: str | None = None, whole_step: bool = False) -> Executable:
        """The executable of a batch's shape; without a batch, the last one. Compiles, but runs nothing.

        `training` False: for an evaluation; batches without labels are always evaluations. For a training step, `update` is
        "step" or "arrival" (None: what the newest optimizer does), and `whole_step` selects the program of `train_step`."""
        streamed = self.streamed
        if batch is None:
            if streamed.executables.latest is None:
                raise MegacompileError("nothing has been compiled yet: pass a batch, or run one")
            return streamed.executables.latest
        training = training and streamed.tiling.trains
        given = self._looked_at(batch, training)
        spec = streamed.spec_of(given, training=training and set(streamed.captured.batch_inputs) <= given.inputs.keys())
        if spec.training:
            spec = replace(spec, update=update or spec.update, whole_step=whole_step)
        return streamed.compiled(spec)

    def _looked_at(self, batch: Mapping[str, Tensor], training: bool) -> BatchArguments:
        """The arguments of a batch that will not run. Raises `MegacompileError` if it is not a batch."""
        known = self.streamed.captured.batch_inputs
        tensors = {k: v for k, v in batch.items() if isinstance(v, Tensor)} if isinstance(batch, Mapping) else {}
        if not any(k in known and v.dim() >= 2 for k, v in tensors.items()):
            raise MegacompileError(f"a batch must map {', '.join(known)} to tensors [batch, length]: got a "
                                   f"{type(batch).__name__} that has none of them")
        given, group = self._named(tensors, training, hooks_run=True), self.streamed.rank_group
        return group.divided(given) if training and given.has_labels else given

    def _trained(self, batch: Mapping[str, Tensor] | None) -> Executable:
        """Like `compiled`. Raises `MegacompileError` for a batch that does not train."""
        executable = self.compiled(batch)
        if not executable.spec.training:
            raise MegacompileError("only plans of training steps can be simulated, and this batch does not train: "
                                   "pass a batch with labels")
        return executable

    def program(self, batch: Mapping[str, Tensor] | None = None, stage: str | None = None) -> Program:
        """The program for a batch's shape: the final one, or the result of the pass named `stage`."""
        executable = self.compiled(batch)
        return executable.program if stage is None else named_stage(executable.compiled.stages, stage)

    def table(self, batch: Mapping[str, Tensor] | None = None, section: str | None = None) -> str:
        return self.program(batch).table(section)

    def text(self, batch: Mapping[str, Tensor] | None = None, **which: Any) -> str:
        """The program for a batch's shape as text, with its spec and plan. `load_program` runs an edited text. `which`: as in
        `compiled`."""
        return editable_text(self.compiled(batch, **which))

    @property
    def stages(self) -> dict[str, Program]:
        """Every stage of the last program, by pass."""
        return self.compiled().compiled.stages

    @property
    def plan(self) -> Plan:
        """The plan of the last program."""
        return self.compiled().plan

    @property
    @exclusive
    def stats(self) -> dict[str, Any]:
        """Counters, sizes in bytes and times in seconds.

            steps, skipped_steps       steps begun; those whose gradients were not finite
            kept_tiles                 updates on arrival: tiles whose gradients were not finite, counted for each step (known
                                       after `synchronize`)
            compiled                   graphs that inductor compiled; compiled_from_cache: graphs that an earlier process
                                       compiled; compile_s: seconds for both
            capture_s                  seconds to capture the model and build templates
            plan_searches              plans of training steps found by a search; plans_from_cache: those that an earlier
                                       process found
            disk_bytes                 the file for moments on disk; disk_bytes_read, disk_bytes_written: by updates so far
            micro_batch_shapes         sizes of micro-batches, [rows, length], that have kernels; any number counts once
            compiled_variants          variants of templates; variants_of_any_size: those that serve any rows, or any length
            useful_tokens              tokens of all training steps that no mask hides; computed_tokens: padding included
            packing_efficiency         useful_tokens / computed_tokens; step_...: the same three for the last step
            expert_loads               `expert_loads()` as lists. Waits for the device if the model has experts
            expert_load_max            the busiest expert's load over the mean; expert_idle: the share of experts without a
                                       token. Means over layers, of the last step; only for a model with experts
        """
        loads = self.expert_loads()
        return stats_of(self.streamed) | {
            "expert_loads": {layer: load.tolist() for layer, load in loads.items()}, **imbalance(loads)}

    def expert_loads(self) -> dict[str, Tensor]:
        """For each layer of a mixture, the number of pairs of a token and an expert that each expert got in the last training
        step, int64 [experts]. Tokens are those of `useful_tokens`, without padding. Each rank counts the rows that it computes.
        Empty for a model without experts that run as grouped products on the batch's tokens, and for layers that compute a
        chunk of tokens at a time. Waits for the device."""
        if not any(counted := self.streamed.step.loads):
            return {}
        self.streamed.backend.synchronize()
        return loads_of(counted, [call.name for call in self.streamed.captured.calls])

    @exclusive
    def balance_experts(self, rate: float = 1e-3) -> None:
        """Moves the biases by which routers choose experts (`e_score_correction_bias` of DeepSeek-V3, GLM, Kimi and others):
        up by `rate` for experts with less than the mean load of the last training step, down for those with more. Call it after
        each step, on each rank; loads of all ranks count. Source: arXiv 2408.15664.

        Raises `UnsupportedError` if the model has no such bias, or has not trained yet."""
        loads, ranks = self.expert_loads(), self.streamed.rank_group.ranks
        if ranks is not None:
            flat = tuple(int(n) for load in loads.values() for n in load)
            together = torch.tensor(ranks.agree("balance_experts", flat)).sum(0)
            loads = dict(zip(loads, together.split([len(load) for load in loads.values()]), strict=True))
        move_biases(self.streamed.model, loads, rate)

    def record(self) -> Recording:
        """A context that records the start and end of each instruction on the device's clock: see `Recording`."""
        return Recording(self.streamed)

    def simulate(self, batch: Mapping[str, Tensor] | None = None, hardware: str | Path | Hardware | None = None,
                 without: Callable[[Op], bool] | None = None) -> Timeline:
        """The predicted timeline of some steps, in the format of `record`. `batch`: whose program, the last one by default.
        `hardware`: as in `megacompile.schedule`, this machine by default. Ops for which `without` returns True take no time.

        Raises `MegacompileError` for a batch that does not train, and for an unknown machine."""
        streamed, executable = self.streamed, self._trained(batch)
        captured = streamed.captures.serve(executable.spec.capture).captured
        durations = Durations(captured, streamed.tiling.layouts, self._hardware(hardware), streamed.binder.compiling)
        return durations.simulate(executable.program, executable.plan, without)

    def explain(self, batch: Mapping[str, Tensor] | None = None, hardware: str | Path | Hardware | None = None) -> str:
        """The training plan of a batch (the last one by default) as text, beside alternatives: how rows are packed, or why they
        are not, and each plan's memory, predicted speed and bottleneck. For a batch without labels, only how it is packed.
        `hardware`, and errors: as in `simulate`."""
        streamed, executable, useful = self.streamed, self.compiled(batch), 1.0
        given = None if batch is None else self._looked_at(batch, training=executable.spec.training)
        if given is None:
            rows = streamed.captures.repacking.outlook(executable.spec)
        else:
            rows = streamed.captures.repacking.outlook(executable.spec, given.layout, given.not_packed)
            useful = given.useful_tokens / executable.plan.tokens
        if not executable.spec.training:
            return rows
        served = streamed.captures.serve(executable.spec.capture)
        simulator = simulator_of(served.captured, streamed.tiling, self._hardware(hardware), streamed.binder.compiling,
                                 streamed.planner.config.passes)
        planner = replace(streamed.executables.planner_for(executable.spec.capture), simulator=simulator,
                          output=executable.plan.output)
        found = outlook(planner, executable.plan, planner.host_bytes, executable.spec.whole_step, useful)
        return f"{rows}\n{found.text()}"

    def _hardware(self, hardware: str | Path | Hardware | None) -> Hardware:
        if isinstance(hardware, Hardware):
            return hardware
        return Hardware.here(self.streamed.backend.device) if hardware is None else Hardware.find(hardware)

    # ---------------------------------------------------------------- control
    @exclusive
    def load_program(self, source: str | Path) -> BatchSpec:
        """Runs an edited program for its spec from now on, and returns the spec. `source`: a text, or a file. Open forwards
        continue with the program that they began with. Evaluations have a separate program (`text(batch, training=False)`).
        Raises `ProgramError` if the text does not parse, is not proved safe, or belongs to another model;
        `InsufficientMemoryError` if its slots do not fit. Then nothing has changed."""
        streamed = self.streamed
        beside = streamed.in_use() | set(streamed.executables.table.values())
        loaded = load(source, streamed.executables, [each.program for each in beside])
        streamed.executables.adopt(loaded)
        return loaded.spec

    @exclusive
    def unload_program(self, spec: BatchSpec | None = None) -> None:
        """Returns to the compiled program of a spec, or of all. Raises `MegacompileError` if no edited program is
        loaded."""
        if not self.streamed.executables.drop(spec):
            raise MegacompileError("no edited program is loaded" + (f" for {spec}" if spec is not None else "")
                                   + ": there is nothing to go back from")

    @exclusive
    def replan(self, **options: Any) -> None:
        """Changes options of `stream` from the next step on. Only options that affect plans alone can change (`device_memory`,
        `checkpoint_interval`, `micro_batch_size`, ...; see `OPTIONS` in `replanning.py`). Weights, optimizers and compiled
        kernels stay. Edited programs are unloaded.

        Raises `MegacompileError` for other options, and between a forward and the end of its step. Then nothing has changed."""
        replan(self.streamed, **options)

    @exclusive
    def synchronize(self) -> None:
        """Waits for updates in flight. Afterwards the parameters, gradients and optimizer state that you hold are current.
        Anything you write to them before the next call counts, through `.data` too: device-resident tiles are sent again."""
        self.streamed.evict()
        self.device_copy.expect_writes()

    @exclusive
    def whole(self) -> None:
        """Waits for updates in flight. Raises `TornError` if the weights do not all belong to one step."""
        self.streamed.settle()
        self.streamed.step.check_whole()

    @exclusive
    def close(self) -> None:
        """Releases everything and leaves a plain, trained model on the CPU. Then raises the failure of an update in flight."""
        model = self.streamed.model
        try:
            self.streamed.close()
        finally:
            disclaim(self.streamed)
            self.streamed.executables.close()
            if vars(model).get("megacompile") is self:
                model.__class__ = original_class(model)  # type: ignore[assignment]
                del model.__dict__["megacompile"]
