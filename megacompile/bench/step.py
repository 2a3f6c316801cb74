"""One row: the training step of a decoder shape with random weights, timed over steady steps, a fresh batch each.

    python benchmarks/step.py --shape qwen2-7b --layers 28 --batch 64 --length 1024 --checkpoint-interval 1

Prints one JSON line: machine, versions, commit, every step's time, TFLOPS (6 x parameters x tokens / step time, recompute
not counted), predicted time, how busy each lane was, device peak, host bytes, and the loss. `--append FILE` adds the line
to a file. `--then` begins the options of another row, measured by the same process; where only plans and batches differ, of the
same model.
"""
from __future__ import annotations

import argparse
import contextlib
import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from torch import Tensor

import megacompile
from megacompile import picture
from megacompile.bench import rows
from megacompile.bench.shapes import random_model
from megacompile.errors import MegacompileError
from megacompile.ir.plan import RESIDUALS
from megacompile.ir.program import OPS, Lane, Op
from megacompile.predict.hardware import Hardware, device_name
from megacompile.predict.simulate import Timeline
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.operations import OPERATIONS
from megacompile.timeline import save_trace

#: Their operations are copies, and make values that compute reads.
_LINK = (Lane.H2D, Lane.D2H)


def options() -> argparse.ArgumentParser:
    parser = rows.parser(__doc__)
    parser.add_argument("--checkpoint-interval", type=int, default=1)
    parser.add_argument("--weight-slots", type=int)
    parser.add_argument("--resident", nargs="*", default=[])
    parser.add_argument("--resident-state", nargs="*", help="tiles that are updated on the device; default: the planner's")
    parser.add_argument("--visiting-state", nargs="*", help="tiles that go there for their update; default: the planner's")
    parser.add_argument("--deferred-moments", choices=tuple(_YES), help="moments behind all weights; default: the planner's")
    parser.add_argument("--saved-layers", type=int, help="default: as many as fit")
    parser.add_argument("--residuals", choices=RESIDUALS, help="what these layers keep")
    parser.add_argument("--token-chunk", type=int, help="tokens that a layer computes at a time; default: the planner's")
    parser.add_argument("--device-memory")
    parser.add_argument("--pinned-memory", help="pinned memory that tiles may take; less than all: through slabs")
    parser.add_argument("--uncompiled", action="store_true", help="templates op by op")
    parser.add_argument("--train-step", action="store_true", help="each step as one program")
    parser.add_argument("--waves", type=int)
    parser.add_argument("--overlap", action="store_true", help="update as gradients arrive, unclipped")
    parser.add_argument("--synchronous-optimizer", action="store_true", help="a step is over when its update is")
    parser.add_argument("--compute-only", action="store_true", help="no copies and no optimizer: the templates' own rate")
    parser.add_argument("--recorded-steps", type=int, default=2, help="more steps, for how busy lanes are; 0: none")
    parser.add_argument("--timeline", metavar="PREFIX", help="write the recorded and the simulated steps: PREFIX.json (a trace "
                                                             "for Perfetto), PREFIX.svg and PREFIX.png")
    parser.add_argument("--profile", action="store_true", help="also print where one more step's device time goes")
    return parser


#: Rows that have these in common are measured on one model.
MODEL = ("shape", "layers", "device", "pinned_memory", "uncompiled")
#: Options of a row that a new plan honours.
_PLANNED = ("checkpoint_interval", "micro_batch_size", "weight_slots", "resident", "resident_state", "visiting_state",
            "deferred_moments", "saved_layers", "residuals", "token_chunk", "device_memory", "waves")
_YES = {"yes": True, "no": False}


class Models:
    """Streams a row's model; rows one behind the other that differ in nothing but their plans and batches share it.

    State: the model of the last row, what it was `made` for, and for how many rows it was used."""

    def __init__(self) -> None:
        self.model: Any = None
        self.made: tuple[Any, ...] = ()
        self.used = 0
        self.before = 0  # bytes of the process, before the model was streamed

    def of(self, given: argparse.Namespace) -> Any:
        """The model, streamed, under the plan of a row."""
        planned = {name: getattr(given, name) for name in _PLANNED}
        planned["resident"] = tuple(given.resident)
        for name in ("resident_state", "visiting_state"):
            planned[name] = "all" if planned[name] == ["all"] else planned[name]
        planned["deferred_moments"] = _YES.get(given.deferred_moments)
        made = tuple(getattr(given, name) for name in MODEL)
        if self.model is not None and made == self.made:
            self.used += 1
            self.model.megacompile.replan(**planned)
            return self.model
        self.close()
        self.made, self.used = made, 1
        model = random_model(given.shape, rows.layer_count(given), given.device)
        if given.device == "cuda":
            torch.cuda.empty_cache()
        self.before = resident_bytes()
        self.model = megacompile.stream(model, device=given.device, pinned_memory=given.pinned_memory,
                                        compile=False if given.uncompiled else None, **planned)
        return self.model

    def close(self) -> None:
        """Gives the model back, if there is one."""
        model, self.model = self.model, None
        if model is not None:
            model.megacompile.close()

    def __enter__(self) -> Models:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def measure(given: argparse.Namespace, models: Models) -> rows.Row:
    if given.timeline is not None:  # now, not after an hour
        picture.check_matplotlib()
        if not given.recorded_steps:
            raise MegacompileError("without recorded steps there is no timeline: leave out --recorded-steps 0, or --timeline")
    try:
        return _measure(given, models)
    except BaseException:
        models.close()  # whatever it is, it is no model for another row
        raise


def _measure(given: argparse.Namespace, models: Models) -> rows.Row:
    started = time.perf_counter()
    model = models.of(given)
    clip = None if given.no_clipping or given.overlap else given.max_grad_norm
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-5, max_grad_norm=clip,
                                  overlap="backward" if given.overlap else None)
    if given.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    setup_s = time.perf_counter() - started
    step = Step(model, optimizer, given)
    with contextlib.ExitStack() as patches:

        def before_timing() -> None:
            if given.compute_only:  # else the last step's update goes on beside the first that is timed, as beside all others
                model.megacompile.streamed.settle()
                patches.enter_context(compute_alone(model.megacompile.streamed.backend))
                patches.callback(model.megacompile.streamed.settle)

        found = rows.timed(step, given, before_timing, seed=models.used - 1)  # no batch that it knows
        norm = optimizer.grad_norm
        measured = recorded(model, step, given)
        simulated = predicted(model, given)
        if measured is not None and given.timeline is not None:
            write_timelines(given, measured, simulated)
        if given.profile:
            profile(model, step, given)
    model.megacompile.synchronize()
    stats, plan = model.megacompile.stats, model.megacompile.plan
    return dict(
        layers=model.config.num_hidden_layers, checkpoint_interval=plan.checkpoint_interval,
        micro_batch=plan.micro_batches[0], weight_slots=plan.weight_slots,
        resident=list(plan.resident), resident_state=list(plan.resident_state),
        visiting_state=list(plan.visiting_state), deferred_moments=plan.deferred_moments, saved_layers=plan.saved_layers,
        residuals=plan.residuals,
        host_checkpoints=plan.host_checkpoints, host_sums=list(plan.host_sums), update_order=list(plan.update_order),
        token_chunk=plan.token_chunk,
        compute_only=given.compute_only, device_memory=given.device_memory,
        predicted_device_gib=gib(stats["predicted_device_bytes"]), max_grad_norm=clip, train_step=given.train_step,
        waves=plan.waves, overlap=given.overlap, **rows.rates(model, given, found["step_s"]), **found,
        predicted_step_s=round(simulated.step_s, 4) if simulated is not None else None, occupancy=occupancy(measured),
        phases_s=[[round(p, 3) for p in phase] for phase in step.phases[:len(found["times_s"])]],
        grad_norm=norm, peak_device_gib=gib(stats["peak_device_bytes"]), host_gib=gib(stats["host_bytes"]),
        host_bytes_per_parameter=round(stats["host_bytes"] / stats["parameters"], 3), resident_set_gib=gib(resident_bytes()),
        resident_set_before_gib=gib(models.before), checkpoint_gib=gib(checkpoint_bytes(model, plan)),
        setup_s=round(setup_s, 1))


class Step:
    """One training step. State: of each, the seconds of forward, backward and update, as its caller sees them."""

    def __init__(self, model: Any, optimizer: megacompile.AdamW, given: argparse.Namespace) -> None:
        self.model, self.optimizer, self.given = model, optimizer, given
        self.phases: list[tuple[float, float, float]] = []

    def __call__(self, ids: Tensor) -> float:
        start = time.perf_counter()
        if self.given.train_step:
            loss = self.model.megacompile.train_step(dict(input_ids=ids, labels=ids), self.optimizer)
            loss.item()
            forward = backward = time.perf_counter()
        else:
            loss = self.model(input_ids=ids, labels=ids).loss
            forward = time.perf_counter()
            loss.backward()
            backward = time.perf_counter()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.given.synchronous_optimizer:
            self.model.megacompile.streamed.settle()  # `synchronize` would send what lives on the device anew
        self.phases.append((forward - start, backward - forward, time.perf_counter() - backward))
        return float(loss.detach())


@contextlib.contextmanager
def compute_alone(backend: Backend) -> Iterator[None]:
    """Copies that move nothing and updates that change nothing: what remains is the rate of the templates. Slots keep the
    weights and checkpoints that the warm-up left there: kernels are faster on zeros."""
    before = dict(OPERATIONS)

    def nothing(*_: Any) -> None: ...

    # Whatever is no mere copy: those are issued, so that what follows finds values, and move nothing.
    idle = (name for name, op in OPS.items() if left_out(op) and (op.lane not in _LINK or name.startswith("adam")))
    OPERATIONS.update(dict.fromkeys(idle, nothing))
    with mock.patch.object(backend, "copy", nothing):
        try:
            yield
        finally:
            OPERATIONS.clear()
            OPERATIONS.update(before)


def left_out(op: Op) -> bool:
    """Whether a row of compute alone does without: what other lanes do, and updates, wherever they are made."""
    return op.lane not in (None, Lane.COMPUTE) or op.name.startswith("adam")


def recorded(model: Any, step: Step, given: argparse.Namespace) -> Timeline | None:
    """What the lanes do in some more steps."""
    if not given.recorded_steps:
        return None
    ids = torch.randint(0, model.config.vocab_size, (given.batch, given.length))
    with model.megacompile.record() as recording:
        for _ in range(given.recorded_steps):
            step(ids)
    return recording.timeline()


def occupancy(timeline: Timeline | None) -> dict[str, float] | None:
    """How busy each lane is in the last step, 0 to 1."""
    if timeline is None:
        return None
    lanes = dict.fromkeys(item.lane for item in timeline.items)
    return {str(lane): round(timeline.occupancy(lane), 4) for lane in Lane if lane in lanes}


def predicted(model: Any, given: argparse.Namespace) -> Timeline | None:
    """What the simulator says of the same program; None for a machine whose rates are not known, and where a step waits for its
    update: steps are simulated one behind the other."""
    if Hardware.known(given.device) is None or given.synchronous_optimizer:
        return None
    return model.megacompile.simulate(without=left_out if given.compute_only else None)


def write_timelines(given: argparse.Namespace, measured: Timeline, simulated: Timeline | None) -> None:
    timelines = ({"simulated": simulated} if simulated is not None else {}) | {"measured": measured}
    save_trace(timelines, Path(f"{given.timeline}.json"))
    title = (f"{given.shape}, {rows.layer_count(given)} layers, {given.batch} x {given.length} tokens, "
             f"{device_name(given.device)[1]}")
    for suffix in ("svg", "png"):
        picture.save(timelines, Path(f"{given.timeline}.{suffix}"), title)


def profile(model: Any, step: Step, given: argparse.Namespace) -> None:
    """One step under PyTorch's profiler: device time by kernel."""
    from torch.profiler import ProfilerActivity
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step(torch.randint(0, model.config.vocab_size, (given.batch, given.length)))
        model.megacompile.synchronize()
    print(profiled.key_averages().table(sort_by="device_time_total", row_limit=40, max_name_column_width=70))


def checkpoint_bytes(model: Any, plan: Any) -> int:
    """Activation checkpoints of one step: the inputs of all blocks."""
    blocks = -(-(model.config.num_hidden_layers - plan.saved_layers) // plan.checkpoint_interval)
    return int(blocks * plan.batch * plan.length * model.config.hidden_size * model.dtype.itemsize)


def resident_bytes() -> int:
    """Resident set of this process, in bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def gib(count: int) -> float:
    return round(count / 2**30, 2)


def main() -> None:
    with Models() as models:
        rows.main("megacompile", options(), functools.partial(measure, models=models))


if __name__ == "__main__":
    main()
