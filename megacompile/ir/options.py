"""The table of options: one row says everything about an option of `stream`.

A row is a field of `StreamOptions`. Whatever needs an option reads its row: `StreamConfig` checks values by it, the command
line makes a flag of it, the plan cache asks whether it is part of a question, `replan` asks whether it may change, and the
reference page prints it. This module imports no torch, so that `--help` is quick.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from megacompile.errors import MegacompileError, shortened
from megacompile.sizes import check_whole, parse_bytes

if TYPE_CHECKING:
    import os

    import torch

    from megacompile.ir.precision import Float8


class Takes(StrEnum):
    """The kind of values that an option takes."""

    COUNT = "a whole number"
    BYTES = "an amount of memory"
    FLAG = "True or False"
    TILES = "names of tiles"
    TEXT = "text"
    OTHER = "something else"


class Scope(StrEnum):
    """The part of the system that depends on an option."""

    MODEL = "graphs, tiles and budgets, which are known before a plan is searched"
    PLAN = "plans: the value is part of the question that the search for a plan answers"
    RUN = "how programs run"


@dataclass(frozen=True)
class Row:
    """The description of an option, besides its name, type and default. `takes`, `scope`: see there. `help`: what it does, for
    the reference page and `--help`. `unset`: the meaning of None. `least`: the smallest value of a count; `limits.LARGEST` has
    the largest. `choices`: the values of a text, if there are only some. `replan`: `replan` may change it. `flag`: commands
    have it. `hinders`: it may keep a plan from fitting, so a refusal suggests to leave it out. `planned`: a given value becomes
    the field of `Plan` with the same name."""

    takes: Takes
    scope: Scope
    help: str
    unset: str = ""
    least: int = 0
    choices: tuple[str, ...] = ()
    replan: bool = False
    flag: bool = False
    hinders: bool = False
    planned: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raises `MegacompileError` if the option `name` can never have this value, whatever the model and the machine."""
        if value is None:
            return
        if self.takes is Takes.COUNT:
            check_whole(name, value, self.least)
        elif self.takes is Takes.BYTES:
            parse_bytes(value)
        elif self.takes is Takes.FLAG and not isinstance(value, bool):
            raise MegacompileError(f"{name} must be True or False, not {shortened(repr(value))}")
        elif self.choices and value not in self.choices:
            raise MegacompileError(f"{name} must be one of {', '.join(self.choices)}, not {shortened(repr(value))}")


def option(default: Any, takes: Takes, scope: Scope, help: str, **more: Any) -> Any:
    """A field with this default and a row."""
    return field(default=default, metadata={"row": Row(takes, scope, " ".join(help.split()), **more)})


_PLANNER = "chosen by the planner"


@dataclass(frozen=True)
class StreamOptions:
    """Every choice that a user may make about a streamed model. None leaves the choice to the planner."""

    device: str | torch.device | None = option(
        None, Takes.TEXT, Scope.MODEL, "Device to compute on: cpu or cuda.", unset="cuda if there is a GPU", flag=True)
    device_memory: int | float | str | None = option(
        None, Takes.BYTES, Scope.MODEL, 'Budget of device memory, in bytes or as "24GiB".',
        unset="the free memory, less a margin", replan=True, flag=True)
    pinned_memory: int | float | str | None = option(
        None, Takes.BYTES, Scope.MODEL, """Budget of pinned host memory, such as "64GiB". If weights and gradients need more,
        they pass through pinned slabs: as many as fit, and at most `gradient_slabs`.""", unset="no limit", flag=True)
    host_memory: int | float | str | None = option(
        None, Takes.BYTES, Scope.MODEL, 'Budget of host memory, tiles included, such as "256GiB".',
        unset="what is available", flag=True)
    dtype: torch.dtype | None = option(
        None, Takes.OTHER, Scope.MODEL, "Compute dtype, or its name.", unset='that of the model\'s parameters, as with "auto"')
    precision: Float8 | str | None = option(
        None, Takes.TEXT, Scope.MODEL, """float8: products of layers with their weights are computed in float8, on GPUs of
        compute capability 8.9 or later. float8-emulated: with the same rounding, but multiplied in FP32, on any device. Fields
        of the recipe may follow, as in float8:weight_gradients=bfloat16,scaling=row. In Python also a `megacompile.Float8`.""",
        unset="in the dtype of the weights", flag=True)
    compile: bool | None = option(
        None, Takes.FLAG, Scope.MODEL, "Compile templates with inductor.", unset="on cuda")
    dynamic: bool | None = option(
        None, Takes.FLAG, Scope.MODEL, """Compile kernels of packed rows once for any number and length of rows, and split a
        step's rows into micro-batches that differ by at most one row. Off: compile kernels for each of a few sizes, powers of
        two.""", unset="on where templates are compiled", flag=True)
    checkpoint_interval: int | None = option(
        None, Takes.COUNT, Scope.PLAN, "K, the number of layers between activation checkpoints.", unset=_PLANNER, least=1,
        replan=True, flag=True, hinders=True)
    micro_batch_size: int | None = option(
        None, Takes.COUNT, Scope.PLAN, "Number of sequences that the device computes at a time.", unset=_PLANNER, least=1,
        replan=True, flag=True, hinders=True)
    saved_layers: int | None = option(
        None, Takes.COUNT, Scope.PLAN, """Number of layers, counted from the last, that keep their residuals instead of
        recomputing them.""", unset="on cuda as many as fit, elsewhere none", replan=True, flag=True, hinders=True)
    residuals: str | None = option(
        None, Takes.TEXT, Scope.PLAN, """What these layers keep: "all" residuals, or only the results of "attention", a
        fourteenth of a 7B layer's. The rest is then recomputed, but not attention, which takes longest in long sequences.
        "attention" requires `checkpoint_interval` 1.""",
        unset="all, or attention's where not all fit and a simulation says that it is faster", choices=("all", "attention"),
        replan=True, flag=True, planned=True)
    waves: int | None = option(
        None, Takes.COUNT, Scope.PLAN, """Number of waves in a whole step. Each wave is a share of the batch that goes forward
        and back.""", unset="on cuda as many as a simulation says are fastest, elsewhere one", least=1, replan=True, flag=True)
    host_sums: tuple[str, ...] | str | None = option(
        None, Takes.TILES, Scope.PLAN, """Tiles whose gradients are added up between waves in FP32 in host memory, 4 bytes per
        parameter.""", unset="those that do not fit on the device", replan=True, flag=True)
    token_chunk: int | None = option(
        None, Takes.COUNT, Scope.PLAN, """Number of tokens of a sequence that a layer computes at a time, except in
        attention. 0: all.""", unset="all, unless a micro-batch of one sequence does not fit",
        replan=True, flag=True, hinders=True)
    host_checkpoints: int | bool | None = option(
        None, Takes.OTHER, Scope.PLAN, """How many activation checkpoints of a micro-batch, those of the lowest layers, wait for
        their backward in pinned host memory. True: all. False: none.""", unset="none, unless the batch does not fit otherwise",
        replan=True, hinders=True)
    resident: tuple[str, ...] | str = option(
        (), Takes.TILES, Scope.PLAN, "Tiles whose weights stay on the device.", unset="none", replan=True, flag=True,
        hinders=True)
    resident_state: tuple[str, ...] | str | None = option(
        None, Takes.TILES, Scope.PLAN, "Tiles that stay on the device with their optimizer state and are updated there.",
        unset="as many as fit and as make a step faster", replan=True, flag=True, hinders=True)
    visiting_state: tuple[str, ...] | str | None = option(
        None, Takes.TILES, Scope.PLAN, """Tiles that are copied to the device for their update, with their optimizer state, and
        back. Only with updates at the end of a step. A tile may be named in one of `resident_state`, `visiting_state`,
        `held_state`, `host_sums` and `disk_state`.""",
        unset="as many as make a step faster that waits for the host's updates", replan=True, flag=True)
    held_state: tuple[str, ...] | str | None = option(
        None, Takes.TILES, Scope.PLAN, """Tiles that are copied to the device for their update during the last backward, into
        the memory that it leaves, and back during the next forward. Only in whole steps of one process, with updates at the end
        of a step; elsewhere the host updates them.""", unset="as many as fit and as make a whole step clearly faster",
        replan=True, flag=True)
    deferred_moments: bool | None = option(
        None, Takes.FLAG, Scope.PLAN, """The host first updates the weights of all tiles, which the next forward waits for, and
        then their moments, beside that forward. This takes 36 bytes of memory traffic per parameter instead of 26, but the
        forward waits for only 18 of them. Only with updates at the end of a step.""", unset="where that makes a step faster",
        replan=True, flag=True)
    disk: str | os.PathLike[str] | None = option(
        None, Takes.TEXT, Scope.MODEL, """A folder on a local drive for moments that host memory does not hold. They are in a
        file of each rank that no other user can open, and that is gone when the process ends. Updates read and write the file
        around the page cache.""", unset="all moments are in host memory", flag=True)
    disk_state: tuple[str, ...] | str | None = option(
        None, Takes.TILES, Scope.PLAN, "Tiles whose moments are on that disk.",
        unset="the fewest that let training fit the host's memory", flag=True)
    state_slabs: int | None = option(
        None, Takes.COUNT, Scope.PLAN, """Number of buffers in host memory through which moments of layers' tiles pass from and
        to the disk.""", unset="as few as make a step as fast as more do", least=1, flag=True)
    weight_slots: int | None = option(
        None, Takes.COUNT, Scope.PLAN, "Number of device buffers that layers' weights take turns in.",
        unset="two, so that copies run beside compute; more where K needs them; one where nothing else fits", least=1,
        replan=True, flag=True, hinders=True)
    gradient_slots: int | None = option(
        None, Takes.COUNT, Scope.PLAN, "Number of device buffers that layers' gradients take turns in.",
        unset="two, or one where nothing else fits", least=1, replan=True, hinders=True, planned=True)
    gradient_slabs: int = option(
        12, Takes.COUNT, Scope.PLAN, "Number of pinned buffers that gradients pass through which are added to others.", least=1)
    expert_pieces: int | None = option(
        None, Takes.COUNT, Scope.MODEL, """Number of calls that a layer's routed experts are divided into, each with its own
        tiles, so that a slot holds a piece and not a whole layer. `checkpoint_interval` and `saved_layers` then count calls;
        such a layer has one call more than pieces.""",
        unset="one, unless the layers in transit do not fit half of the device", least=1)
    passes: tuple[Any, ...] = option(
        None, Takes.OTHER, Scope.MODEL, """The pipeline over programs, made from `megacompile.passes.PIPELINE` with
        `insert_after` and similar functions.""", unset="`PIPELINE`")
    template_passes: tuple[Any, ...] = option(
        None, Takes.OTHER, Scope.MODEL, "The pipeline over the graphs of templates, made from `TEMPLATE_PIPELINE`.",
        unset="`TEMPLATE_PIPELINE`")
    loss: Callable[..., Any] | None = option(
        None, Takes.OTHER, Scope.MODEL, """A function that replaces the model's own loss. It takes the logits of some tokens,
        [N, vocabulary], and by parameter name the rows of other batch arguments for the same tokens; it returns a value for
        each token, [N]. The loss is their sum over `num_items_in_batch` (1 if that is not passed). Nothing is shifted.""",
        unset="the model's own loss")
    stall_timeout: float | None = option(
        1800.0, Takes.OTHER, Scope.RUN, """Seconds for which all lanes that a call waits for may make no progress before it
        raises `StallError`, which says what each lane is doing. Half an hour is longer than any instruction takes.""",
        unset="no limit")
    repack: bool | int = option(
        True, Takes.OTHER, Scope.RUN, """Whether the rows of a padded batch are packed into rows of one length, where that
        changes only the time; a number: the usual length of these rows in tokens (rounded up to a power of two; 2048 by
        default). They are longer if a sequence is, and may be up to a quarter shorter. Rows that cannot be packed are grouped
        by length, and each group is padded to one of eight widths, parts of this length. False: every batch is computed as it
        comes.""")
    distributed: bool | None = option(
        None, Takes.FLAG, Scope.RUN, """Whether this process trains the model together with the other processes of
        torch.distributed's default group (torchrun).""", unset="where there are several processes")
    mesh: Any = option(
        None, Takes.OTHER, Scope.RUN, """A `DeviceMesh` of all ranks. One dimension: the ranks, all on one host, have shards of
        one copy of the model. Two: each row is a host with a copy of its own, (replicate, shard) as in FSDP2. The ranks along
        a last dimension named "sequence" train the same rows, and each has some tokens of every row. The order of other ranks
        does not matter. Processes with another value of the environment variable MEGACOMPILE_HOST count as being on
        another host.""", unset="each machine is a host")
    peer_copies: bool | None = option(
        None, Takes.FLAG, Scope.RUN, """How the GPUs of several ranks exchange weights and gradients. True: by copies from one
        GPU's memory to another's, which leave the multiprocessors to the layers. False: by NCCL.""",
        unset="by copies where the GPUs can reach each other's memory")
    reference: bool = option(
        False, Takes.FLAG, Scope.RUN, "Run the reference interpreter (one thread, program order), for checking.")


def rows() -> Iterator[tuple[str, Any, Row]]:
    """The name, the default and the row of each option."""
    return ((each.name, each.default, each.metadata["row"]) for each in fields(StreamOptions))


def named(choose: Callable[[Row], bool]) -> tuple[str, ...]:
    """The names of the options whose rows fit, in alphabetical order."""
    return tuple(sorted(name for name, _, row in rows() if choose(row)))


def planned(options: StreamOptions) -> dict[str, Any]:
    """The values that become fields of `Plan` unchanged."""
    return {name: value for name, _, row in rows() if row.planned and (value := getattr(options, name)) is not None}


def described() -> str:
    """The options as the section "Attributes" of a docstring."""
    lines = ["Attributes:"]
    for name, default, row in rows():
        otherwise = f" None: {row.unset}." if row.unset else "" if default is None else f" Default: {default}."
        lines.append(f"    {name}: {row.help}{otherwise}")
    return "\n".join(lines)
