"""Measures a row: the training step of a decoder shape with random weights, timed over several steps with new batches.

    python benchmarks/step.py --shape qwen2-7b --layers 28 --batch 64 --length 1024 --checkpoint-interval 1

Prints one JSON line: machine, versions, commit, the time of every step, TFLOPS (6 x parameters x tokens / step time, 4 for
frozen parameters, without recomputation), predicted time, how busy each lane was, peak device memory (what PyTorch's
allocator reserves, and what is allocated in it), host bytes, and losses. `--append FILE` appends the line to a file. `--then`
begins the options of another row, which the same process measures. If only the plan and the batch differ, it uses the same
model.

LoRA over frozen weights, in bfloat16 or in codes:

    python benchmarks/step.py --shape llama-70b --lora 16 --quantize nf4 --batch 16 --device-memory 24GiB

Moments that host memory does not hold on a drive, with what a step reads and writes there:

    megacompile calibrate --disk /nvme/state
    python benchmarks/step.py --shape qwen2-14b --layers 36 --disk /nvme/state --host-memory 115GiB --train-step

Several GPUs train one copy of the model, each on `--batch` sequences of its own:

    torchrun --standalone --nproc-per-node 2 benchmarks/step.py --batch 64 --train-step
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

import rows
import torch
from rows import KeptModel, Row
from shapes import config, random_model
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import megacompile
from megacompile import picture
from megacompile.errors import MegacompileError
from megacompile.ir import options as stream_options
from megacompile.ir.options import Takes
from megacompile.ir.program import OPS, Lane, Op, argument, find
from megacompile.planning.device import join_group, process_count
from megacompile.planning.explain import host_slab_bytes
from megacompile.predict.hardware import Hardware, device_name
from megacompile.predict.simulate import Timeline
from megacompile.runtime.operations import OPERATIONS
from megacompile.streaming.optimizer.names import OPTIMIZERS, optimizer_named
from megacompile.streaming.optimizer.optimizer import StreamedOptimizer
from megacompile.streaming.streamed import Streamed
from megacompile.system.host_memory import resident_bytes
from megacompile.timeline import save_trace
from megacompile.weights.codes import FORMATS


def of_the_disk(model: Any, simulated: Timeline | None) -> Row:
    """The part of a row about a streamed model that has trained, with its simulated steps; {} if all moments are in memory.

    GB of this process (10^9 bytes): those of a step on average, and those that the program names. The rates are those that the
    prediction used: what `megacompile calibrate --disk` has measured, or else a profile's. `predicted_disk_s`: how long each
    lane of the disk works in a simulated step."""
    handle = model.megacompile
    plan, stats, trained = handle.plan, handle.stats, handle.streamed.step.trained
    if not plan.disk_state or trained is None:
        return {}
    steps, program = handle.streamed.step.count, trained.program
    hardware = Hardware.known(handle.streamed.backend.device)

    def planned(op: str) -> int:
        return sum(program.tiles[argument(node, "tile")].disk_bytes for graph in program.sections.values()
                   for node in find(graph, op))

    busy = {} if simulated is None else {"read": simulated.busy_s[Lane.DISK_READ], "write": simulated.busy_s[Lane.DISK_WRITE]}
    return dict(
        disk_tiles=len(plan.disk_state), state_slabs=plan.state_slabs, disk_gib=round(stats["disk_bytes"] / 2**30, 2),
        disk_gb_per_step={way: round(stats[f"disk_bytes_{word}"] / steps / 1e9, 4)
                          for way, word in (("read", "read"), ("write", "written"))},
        predicted_disk_gb_per_step={way: round(planned(f"{way}_state") / 1e9, 4) for way in ("read", "write")},
        predicted_disk_s={way: round(seconds, 3) for way, seconds in busy.items()},
        disk_rates_gb_s=None if hardware is None else {way: round(rate / 1e9, 3) for way, rate in hardware.disk.items()})


#: Lanes whose operations are copies and exchanges. Compute reads the values that some of them produce.
_COPYING = (Lane.H2D, Lane.D2H, Lane.COLLECTIVE)


_YES = {"yes": True, "no": False}
#: Options of a row that `replan` can change.
_PLANNED = ("checkpoint_interval", "micro_batch_size", "weight_slots", "resident", "resident_state", "visiting_state",
            "held_state", "deferred_moments", "saved_layers", "residuals", "token_chunk", "device_memory", "waves")
#: The options of `stream` that a row may have, besides those of all rows, and their defaults where these are not `stream`'s.
OPTIONS = {*_PLANNED, "pinned_memory", "host_memory", "disk", "disk_state", "state_slabs", "precision"} - {"micro_batch_size"}
DEFAULTS: dict[str, Any] = {"checkpoint_interval": 1, "resident": []}
_HOW: dict[Takes, dict[str, Any]] = {Takes.COUNT: dict(type=int), Takes.TILES: dict(nargs="*"), Takes.TEXT: {}, Takes.BYTES: {},
                                     Takes.FLAG: dict(choices=tuple(_YES))}


def options() -> argparse.ArgumentParser:
    parser = rows.parser(__doc__)
    for name, _, row in stream_options.rows():
        if name in OPTIONS:
            parser.add_argument(f"--{name.replace('_', '-')}", help=f"{row.help} (default: {DEFAULTS.get(name, row.unset)})",
                                default=DEFAULTS.get(name), **_HOW[row.takes])
    parser.add_argument("--uncompiled", action="store_true", help="run templates op by op instead of compiling them")
    parser.add_argument("--train-step", action="store_true", help="run each step as one program")
    parser.add_argument("--overlap", action="store_true", help="update tiles as their gradients arrive, without clipping")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK",
                        help="train PEFT's adapters on all linear layers, over frozen weights (default: train all weights)")
    parser.add_argument("--quantize", choices=tuple(FORMATS), help="format of the frozen weights (default: bfloat16)")
    parser.add_argument("--optim", choices=OPTIMIZERS, default="adamw", help="optimizer (default: adamw)")
    parser.add_argument("--optim-args", help='more of its options, such as "master=bfloat16"')
    parser.add_argument("--synchronous-optimizer", action="store_true",
                        help="wait for the update at the end of each step")
    parser.add_argument("--compute-only", action="store_true",
                        help="skip copies and updates, to measure the rate of the templates")
    parser.add_argument("--nccl", action="store_true", help="several GPUs exchange by NCCL, also where they could by copies")
    parser.add_argument("--sequence-ranks", type=int, default=1,
                        help="number of GPUs that have the tokens of each sequence together (default: 1)")
    parser.add_argument("--recorded-steps", type=int, default=2,
                        help="number of additional steps that measure how busy lanes are; 0: none (default: 2)")
    parser.add_argument("--timeline", metavar="PREFIX",
                        help="write the recorded and the simulated steps to PREFIX.json (a trace for Perfetto), PREFIX.svg and "
                             "PREFIX.png")
    parser.add_argument("--profile", action="store_true",
                        help="run one more step under PyTorch's profiler and print device time by kernel")
    return parser


#: Rows that have these options in common are measured on one model.
MODEL = ("shape", "layers", "device", "pinned_memory", "host_memory", "disk", "disk_state", "state_slabs", "uncompiled", "nccl",
         "lora", "quantize", "precision", "overlap", "sequence_ranks")  # clipping leaves gradients in tiles


class Models(KeptModel):
    """State, in addition to `KeptModel`'s: `before`, the resident bytes of the process before the model was streamed."""

    COMMON = MODEL

    def __init__(self) -> None:
        super().__init__()
        self.before = 0

    def planned(self, given: argparse.Namespace) -> dict[str, Any]:
        found = {name: getattr(given, name) for name in _PLANNED}
        found["resident"] = tuple(given.resident)
        for name in ("resident_state", "visiting_state", "held_state"):
            found[name] = "all" if found[name] == ["all"] else found[name]
        found["deferred_moments"] = _YES.get(given.deferred_moments)
        return found

    def streamed(self, given: argparse.Namespace, planned: dict[str, Any]) -> Any:
        how = dict(device=given.device, pinned_memory=given.pinned_memory, host_memory=given.host_memory, disk=given.disk,
                   state_slabs=given.state_slabs, disk_state="all" if given.disk_state == ["all"] else given.disk_state,
                   compile=False if given.uncompiled else None, peer_copies=False if given.nccl else None,
                   precision=given.precision, mesh=sequence_mesh(given), **planned)
        layers = rows.layer_count(given)
        if not given.lora:  # drawn in tiles, so that the host holds the weights once
            torch.manual_seed(0)
            self.before = resident_bytes()
            return megacompile.from_config(config(given.shape, layers), dtype=torch.bfloat16, **how).train()
        model = random_model(given.shape, layers, given.device, given.lora, given.quantize)
        if given.device == "cuda":
            torch.cuda.empty_cache()
        self.before = resident_bytes()
        return megacompile.stream(model, **how)


def sequence_mesh(given: argparse.Namespace) -> DeviceMesh | None:
    """All GPUs of a host, in groups with a sequence together; None if each has whole sequences."""
    if given.sequence_ranks == 1:
        return None
    join_group(given.device)
    return init_device_mesh(given.device, (process_count() // given.sequence_ranks, given.sequence_ranks),
                            mesh_dim_names=("shard", "sequence"))


def measure(given: argparse.Namespace, models: Models) -> rows.Row:
    if given.quantize and not given.lora:
        raise MegacompileError("--quantize is for frozen weights: add --lora")
    if given.timeline is not None:  # check before the measurement, which may take an hour
        picture.check_matplotlib()
        if not given.recorded_steps:
            raise MegacompileError("--timeline needs recorded steps: leave out --recorded-steps 0, or leave out --timeline")
    with models.closed_if_failed():
        return _measure(given, models)


def _measure(given: argparse.Namespace, models: Models) -> rows.Row:
    started = time.perf_counter()
    model = models.of(given)
    clip = rows.clip(given)
    named = optimizer_named(given.optim)
    optimizer = named.kind(model.parameters(), **named.arguments({"lr": 1e-5}, given.optim_args), max_grad_norm=clip,
                           overlap="backward" if given.overlap else None)
    if given.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    setup_s = time.perf_counter() - started
    step = Step(model, optimizer, given)
    with contextlib.ExitStack() as patches:

        def before_timing() -> None:
            # Otherwise the last update overlaps the first timed step, as every update overlaps the next step.
            if given.compute_only:
                model.megacompile.streamed.settle()
                patches.enter_context(compute_alone(model.megacompile.streamed))
                patches.callback(model.megacompile.streamed.settle)

        found = rows.timed(step, given, before_timing, seed=models.used - 1)  # batches that the model has not seen
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
        visiting_state=list(plan.visiting_state), held_state=list(plan.held_state),
        deferred_moments=plan.deferred_moments, saved_layers=plan.saved_layers, residuals=plan.residuals,
        host_checkpoints=plan.host_checkpoints, host_sums=list(plan.host_sums), update_order=list(plan.update_order),
        token_chunk=plan.token_chunk,
        precision=given.precision, compute_only=given.compute_only, device_memory=given.device_memory,
        predicted_device_gib=gib(stats["predicted_device_bytes"]), max_grad_norm=clip, train_step=given.train_step,
        waves=plan.waves, overlap=given.overlap, **rows.rates(model, given, found["step_s"]), **found,
        predicted_step_s=round(simulated.step_s, 4) if simulated is not None else None,
        recorded_step_s=round(measured.step_s, 4) if measured is not None else None, occupancy=occupancy(measured),
        phases_s=[[round(p, 3) for p in phase] for phase in step.phases[:len(found["times_s"])]],
        grad_norm=norm, peak_device_gib=gib(stats["peak_device_bytes"]),
        peak_allocated_gib=gib(torch.cuda.max_memory_allocated() if given.device == "cuda" else 0),
        host_gib=gib(stats["host_bytes"]),
        predicted_host_gib=gib(predicted_host_bytes(model)),
        host_bytes_per_parameter=round(stats["host_bytes"] / stats["parameters"], 3), resident_set_gib=gib(resident_bytes()),
        resident_set_before_gib=gib(models.before), checkpoint_gib=gib(activation_checkpoint_bytes(model, plan)),
        setup_s=round(setup_s, 1), **of_the_disk(model, simulated))


class Step:
    """Runs training steps. State: `phases`, the seconds of forward, backward and update of each step, as seen by the caller."""

    def __init__(self, model: Any, optimizer: StreamedOptimizer, given: argparse.Namespace) -> None:
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
            self.model.megacompile.streamed.settle()  # `synchronize` would also send resident tiles to the device again
        self.phases.append((forward - start, backward - forward, time.perf_counter() - backward))
        return float(loss.detach())


@contextlib.contextmanager
def compute_alone(streamed: Streamed) -> Iterator[None]:
    """A context in which copies, exchanges between ranks and updates do nothing, so that only the templates take time. Slots
    keep the weights and checkpoints from the warm-up, since kernels would be faster on zeros."""
    before = dict(OPERATIONS)

    def nothing(*_: Any) -> None: ...

    # Copies and gathers are still issued, since later nodes need their values, but they move nothing. Other ranks wait until
    # updates are announced. All other ops that are left out are replaced.
    idle = (name for name, op in OPS.items() if left_out(op) and name != "announce"
            and (op.lane not in _COPYING or op.result is None or name.startswith("update")))
    OPERATIONS.update(dict.fromkeys(idle, nothing))
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(streamed.backend, "copy", nothing))
        if streamed.rank_group.ranks is not None:
            patches.enter_context(mock.patch.object(streamed.rank_group.ranks.exchanges, "gather", nothing))
        try:
            yield
        finally:
            OPERATIONS.clear()
            OPERATIONS.update(before)


def left_out(op: Op) -> bool:
    """Whether `--compute-only` leaves an op out: the work of other lanes, and all updates."""
    return op.lane not in (None, Lane.COMPUTE) or op.name.startswith("update")


def recorded(model: Any, step: Step, given: argparse.Namespace) -> Timeline | None:
    """A timeline of additional steps, recorded on the lanes; None if `--recorded-steps` is 0."""
    if not given.recorded_steps:
        return None
    ids = random_ids(model, given)
    with model.megacompile.record() as recording:
        for _ in range(given.recorded_steps):
            step(ids)
    return recording.timeline()


def random_ids(model: Any, given: argparse.Namespace) -> Tensor:
    """A batch, int64 [batch, length], the same on all ranks."""
    return torch.randint(0, model.config.vocab_size, (given.batch, given.length), generator=torch.Generator().manual_seed(0))


def occupancy(timeline: Timeline | None) -> dict[str, float] | None:
    """The fraction of the last step in which each lane is busy, 0 to 1."""
    if timeline is None:
        return None
    lanes = dict.fromkeys(item.lane for item in timeline.items)
    return {str(lane): round(timeline.occupancy(lane), 4) for lane in Lane if lane in lanes}


def predicted(model: Any, given: argparse.Namespace) -> Timeline | None:
    """The simulation of the same program. None if the machine has not been measured, or if steps wait for their update, which
    the simulator does not model."""
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
    """Runs one step under PyTorch's profiler and prints device time by kernel."""
    from torch.profiler import ProfilerActivity
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step(random_ids(model, given))
        model.megacompile.synchronize()
    print(profiled.key_averages().table(sort_by="device_time_total", row_limit=40, max_name_column_width=70))


def activation_checkpoint_bytes(model: Any, plan: Any) -> int:
    """The bytes of the activation checkpoints of one step: the inputs of all blocks."""
    blocks = -(-(model.config.num_hidden_layers - plan.saved_layers) // plan.checkpoint_interval)
    return int(blocks * plan.batch * plan.length * model.config.hidden_size * model.dtype.itemsize)


def predicted_host_bytes(model: Any) -> int:
    """What is known before anything is allocated: the tiles with their state, the plan's sums, and this rank's slabs and
    checkpoints. `stats["host_bytes"]` is what was allocated."""
    streamed, plan = model.megacompile.streamed, model.megacompile.plan
    parts, trained = streamed.planner.host_parts(plan), streamed.step.trained
    slabs = host_slab_bytes(trained.program) if trained is not None else 0
    return int(streamed.tiling.host_bytes(gradients=False) + parts["gradients"] + parts["sums"] + slabs)


def gib(count: int) -> float:
    return round(count / 2**30, 2)


def main() -> None:
    if torch.cuda.is_available() and process_count() > 1:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with Models() as models:
        rows.main("megacompile", options(), functools.partial(measure, models=models))


if __name__ == "__main__":
    main()
