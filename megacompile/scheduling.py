"""`schedule(model, batch=, length=)` plans what `stream` would run, without weights, memory or a device."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.api import analyse, check_module
from megacompile.errors import MegacompileError, UnsupportedError
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.graph.sequences import divided_key
from megacompile.frontend.ops.attention_kernels import fused_kernel
from megacompile.frontend.templates.template import Template
from megacompile.frontend.tracing.layers import Layers, find_layers
from megacompile.ir.plan import UPDATES, Plan
from megacompile.ir.program import Program, model_program
from megacompile.passes.pipeline import compile_program, named_stage
from megacompile.planning.config import StreamConfig
from megacompile.planning.device import compute_device, device_budget, free_device_bytes
from megacompile.planning.explain import Outlook, outlook
from megacompile.planning.host_needs import host_too_small, with_disk
from megacompile.planning.memory import planned_calls
from megacompile.planning.memory_budget import margins
from megacompile.planning.planner import Planner
from megacompile.planning.precision import check_float8
from megacompile.planning.step_time import simulator_of
from megacompile.predict.durations import Durations
from megacompile.predict.hardware import Hardware
from megacompile.predict.simulate import Timeline
from megacompile.sizes import check_whole, parse_bytes
from megacompile.streaming.optimizer.names import optimizer_named
from megacompile.streaming.optimizer.optimizer import check_masters
from megacompile.streaming.programs.executables import planned_and_not_taken
from megacompile.system.host_memory import available_host_bytes
from megacompile.system.progress import under_way
from megacompile.weights.tiling import Tiling


@dataclass(frozen=True)
class Schedule:
    """A model's schedule for one batch shape. `stages`: the program after each pass; `log`: what each pass did; `hardware`: the
    machine that it was planned for, None for this machine."""

    captured: CapturedModel
    tiling: Tiling
    plan: Plan
    stages: Mapping[str, Program]
    log: list[str]
    planner: Planner
    device: torch.device
    hardware: Hardware | None = None

    def program(self, stage: str | None = None) -> Program:
        """The program after the pass `stage`; by default after the last pass. Raises `MegacompileError` if there is no such
        pass."""
        return named_stage(self.stages, list(self.stages)[-1] if stage is None else stage)

    @property
    def templates(self) -> Mapping[str, Template]:
        return self.captured.templates

    def durations(self) -> Durations:
        """Estimates how long each node takes by itself. Raises `MegacompileError` if no `hardware` was given and this machine
        has not been calibrated."""
        compiled = self.planner.config.compile
        return Durations(self.captured, self.tiling.layouts, self.hardware or Hardware.here(self.device),
                         fused=compiled if compiled is not None else self.device.type == "cuda")

    def simulate(self) -> Timeline:
        """Predicts a few training steps: when each instruction runs, how long a step takes, and what limits it."""
        return self.durations().simulate(self.program(), self.plan)

    def title(self) -> str:
        """A line that describes the plan."""
        plan, parameters = self.plan, sum(layout.parameters for layout in self.tiling.layouts.values())
        where = self.hardware.name if self.hardware is not None else f"this machine's {self.device.type}"
        chosen = {"K": plan.checkpoint_interval, "micro-batch": plan.micro_batches[0], "waves": plan.waves,
                  "saved layers": plan.saved_layers, "residuals": plan.residuals, "token chunk": plan.token_chunk}
        shown = ", ".join(f"{name} {value}" for name, value in chosen.items()
                          if value and (name, value) not in (("waves", 1), ("residuals", "all")))
        each = f" on each of {plan.gpus}" if plan.processes > 1 else ""
        return (f"{parameters / 1e9:.3g}B parameters, {len(self.captured.layer_names)} layers, {plan.batch} x {plan.length} "
                f"tokens{each}, {shown}, {where}")

    def explain(self) -> str:
        """The plan and its alternatives as text: memory needs, predicted times, and what limits them."""
        return self.outlook().text()

    def outlook(self, host_memory: int | float | str | None = None) -> Outlook:
        """The prospects of training: whether the plan fits, how fast it would be, and its alternatives. `host_memory`: bytes or
        text such as "256GiB"; None: the amount that was planned for. Raises what `durations` raises."""
        planner = self.planner
        if planner.simulator is None:
            durations = self.durations()
            planner = replace(planner, simulator=simulator_of(self.captured, self.tiling, durations.hardware, durations.fused,
                                                              planner.config.passes))
        with under_way("simulating this plan and its alternatives"):
            return outlook(planner, self.plan, parse_bytes(host_memory) or self.planner.host_bytes,
                           whole_step="train_step" in self.program().sections)


def schedule(model: nn.Module, *, batch: int, length: int, layers: Layers | None = None,
             example: Mapping[str, Tensor] | None = None, update: str = "step", whole_step: bool = False,
             hardware: str | Path | Hardware | None = None, gpus: int = 1, hosts: int = 1, copies: int | None = None,
             sequence_ranks: int = 1, optim: str = "adamw", optim_args: str | None = None, **options: Any) -> Schedule:
    """The schedule of a training step for `batch` sequences of `length` tokens on each of `gpus` devices of each copy of the
    model. Each of `hosts` hosts has a copy, or `copies` copies are divided evenly among them. `sequence_ranks` devices have the
    tokens of each sequence together, and then `batch` sequences are on all of them. `model` may be on the meta device; it is
    not changed. Options as for `stream`; a schedule for device="cuda" does not need CUDA. Raises what `stream` raises.

    By default the schedule is for a training loop (forward, backward and step); with `whole_step` it is the single program of
    `train_step`. `update` says when tiles are updated: at the end of the step ("step"), or in the backward as gradients arrive
    ("arrival"). `optim` names the optimizer, such as "adamw_8bit", and `optim_args` has options of it, such as
    "master=bfloat16". `hardware` is a machine to plan for: a profile ("h200", "a100", "rtx3090"), a file that `megacompile
    calibrate` has written, or a `Hardware`. Its device and memory are used unless options override them."""
    check_module(model)
    if update not in UPDATES:
        raise MegacompileError(f"update must be {' or '.join(map(repr, UPDATES))}, not {update!r}")
    check_whole("batch", batch)
    check_whole("length", length)
    check_whole("gpus", gpus)
    check_whole("hosts", hosts)
    check_whole("sequence_ranks", sequence_ranks)
    if gpus % sequence_ranks or length % sequence_ranks:
        raise MegacompileError(f"sequences cannot be divided among {sequence_ranks} of {gpus} GPUs: sequence_ranks must divide "
                               f"the number of GPUs, and the length ({length})")
    copies = hosts if copies is None else copies
    check_whole("copies", copies)
    if hosts % copies or gpus % (hosts // copies):
        raise MegacompileError(f"{copies} copies of {gpus} GPUs cannot be divided evenly among {hosts} hosts: the number of "
                               "hosts must be a multiple of copies, and gpus a multiple of the hosts of each copy")
    spread = hosts // copies
    if spread > 1 and sequence_ranks > 1:
        raise UnsupportedError("a copy divided among hosts cannot divide sequences too: leave sequence_ranks out, or give each "
                               "host a copy")
    config = StreamConfig.of(**options)
    if config.deferred_moments and update == "arrival":
        raise MegacompileError("deferred_moments=True is for updates at the end of a step: leave it out, or leave "
                               "update='arrival' out")
    named = optimizer_named(optim)
    choice = named.choice(optim_args, on_arrival=update == "arrival")
    if isinstance(hardware, str | Path):
        hardware = Hardware.find(hardware)
    device = compute_device(config.device, hardware)
    check_float8(config.recipe, device, hardware)
    device_type = device.type
    there = parse_bytes(config.host_memory) or (hardware.host_memory if hardware is not None else available_host_bytes())
    budget = device_budget(config, free_device_bytes(device, hardware))
    captured, tiling = analyse(model, config, device_type, layers, example,
                               hardware.fused_attention if hardware is not None else fused_kernel(device), budget, there,
                               ranks=gpus, hosts=copies, spread=spread, choice=choice)
    if sequence_ranks > 1:
        captured, length = captured.for_key(divided_key(sequence_ranks)), length // sequence_ranks
    if not tiling.trains:
        raise UnsupportedError(f"no parameter of {type(model).__name__} is trained: set "
                               "requires_grad=True for some")
    check_masters(states := named.states(optim_args, model, tiling), tiling)
    tiling = tiling.with_states(states)
    if choice.on_arrival and tiling.has_matrices:
        raise UnsupportedError(f"{optim} updates whole matrices at the end of a step: leave update='arrival' out")
    tiling = with_disk(tiling, config, there, choice.on_arrival)
    fused = config.compile if config.compile is not None else device_type == "cuda"
    needed = tiling.host_bytes(gradients=not choice.on_arrival)
    if needed + tiling.margin_bytes > there:
        # What all hosts of a copy need and have together: the error counts a whole model.
        needed, there, margin = spread * needed, spread * there, spread * tiling.margin_bytes
        raise host_too_small(model, find_layers(model, captured.stacks), config, choice, needed, there, margin,
                             gpus)
    taken = planned_and_not_taken(device) if hardware is None and config.device_memory is None else 0
    simulator = simulator_of(captured, tiling, hardware or Hardware.known(device), fused, config.passes)
    planner = Planner(captured, tiling, config, budget, parse_bytes(config.pinned_memory), *margins(device_type), fused=fused,
                      taken_bytes=taken, host_bytes=there, simulator=simulator, output=captured.main_output, cached=True)
    if whole_step and not captured.has_loss:
        raise UnsupportedError(f"{type(model).__name__} has no loss, which a whole step needs: leave whole_step out, or pass "
                               "loss=...")
    with under_way(f"planning {batch} x {length}"):
        planned = planner.choose(batch, length, update=update, whole_step=whole_step, output=captured.main_output)
        program = model_program(planned_calls(captured, tiling, planned.plan), tiling.tiles(), batch, labels=captured.has_loss,
                                whole_step=whole_step, differentiable=not captured.has_loss, precision=config.recipe)
        compiled = compile_program(program, planned.plan, config.passes)
    return Schedule(captured, tiling, planned.plan, compiled.stages, compiled.log, planner.after(planned), device, hardware)
