"""Plan: every choice that the planner or the user makes about a schedule, as data. Passes read no other settings."""
from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from megacompile.errors import MegacompileError, shortened
from megacompile.ir.placement import ALL_STREAMED, LISTS, Placement, Placements, Updated
from megacompile.sizes import check_micro_batches, check_whole

#: When tiles are updated: all at the end of a step, or each when its gradients arrive.
UPDATES = ("step", "arrival")
#: Tokens of a micro-batch beyond which a larger one is not faster, since kernels are full.
FULL_TOKENS = 16384
#: `FULL_TOKENS` where larger micro-batches gain more: in float8 each rounds the weights again, and each expert gets few rows.
MORE_TOKENS = 32768
#: Residuals that layers keep: everything that their backward reads, or only attention's results. The rest is recomputed.
RESIDUALS = ("all", "attention")
#: Slabs for moments on disk: one is read into, one is updated, one is written from.
STATE_SLABS = 3
#: Slots of each size class of tiles through which weight shards pass before they are gathered.
SHARD_SLOTS = 2


@dataclass(frozen=True)
class CaptureKey:
    """Selects the graphs of a model that a batch needs.

    `further`: names of the batch arguments beyond those of every batch (a mask, positions that restart within a row). A mask of
    pairs includes its dtype and shape ("mask: bool [B, 1, T, T]"). `evaluating`: the graphs of evaluation mode, if they differ
    from training mode. `without_adapters`: PEFT's adapters are switched off. `images`: images per sequence, for a model that
    takes images. `traced_length`: the number of tokens of the traced sequence, if the model's code behaves differently at this
    length than at the usual one; 0: the usual one. `sequence_ranks`: the ranks among which each row's tokens are divided;
    `documents`: then rows hold several documents, which do not see each other."""

    further: tuple[str, ...] = ()
    evaluating: bool = False
    without_adapters: bool = False
    images: int = 1
    traced_length: int = 0
    sequence_ranks: int = 1
    documents: bool = False

    @property
    def packed(self) -> bool:
        """True if rows are packed: positions alone say which tokens of a row belong together."""
        return self.further == ("position_ids",)


PLAIN = CaptureKey()


@dataclass(frozen=True)
class BatchSpec:
    """What a compiled program is made for: `batch` sequences of `length` tokens, with or without labels, for training or not.

    A `lean` program keeps none of the residuals that a plan keeps where memory is left. `update` is "step" or "arrival" (see
    `Plan`). A `whole_step` is one program for a step; otherwise forward, backward and update are sections. `output` is what the
    epilogue returns: the model's "loss" (without labels only its logits), or a head's outputs, which the caller differentiates:
    "logits", or the name of a function of tokens. `group_rows` and `group_lengths`: where rows are grouped by length, the rows
    of each group and the tokens that each of these rows is computed with; empty: all rows have `length` tokens. `capture`
    selects the graphs."""

    batch: int
    length: int
    labels: bool
    training: bool
    lean: bool = False
    update: str = "step"
    whole_step: bool = False
    output: str = "loss"
    group_rows: tuple[int, ...] = ()
    group_lengths: tuple[int, ...] = ()
    capture: CaptureKey = PLAIN

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """Rows and length of each group of rows."""
        return tuple(zip(self.group_rows, self.group_lengths, strict=True)) or ((self.batch, self.length),)

    @property
    def tokens(self) -> int:
        """Tokens that are computed, padding included."""
        return sum(rows * length for rows, length in self.groups)

    @property
    def packed(self) -> bool:
        return self.capture.packed


def kept_residuals(saved_layers: int, residuals: str) -> str:
    """The number of layers that keep residuals, and which residuals if not all, for tables."""
    return str(saved_layers) if residuals == "all" else f"{saved_layers} ({residuals})"


def check_residuals(residuals: str | None, checkpoint_interval: int | None) -> None:
    """Raises `MegacompileError` for options that exclude each other."""
    if residuals == "attention" and (checkpoint_interval or 1) > 1:
        raise MegacompileError("residuals='attention' needs checkpoint_interval=1: a block of several layers keeps all "
                               "residuals for a while")


@dataclass(frozen=True)
class Plan:
    """All choices for training one batch shape.

    `micro_batches` gives the sequences of each micro-batch, in order, and `lengths` their tokens; empty: all have `length`
    tokens. A whole step runs in `waves`, consecutive shares of the micro-batches that each go forward and back. Templates
    compute the ops that treat each token alone on `token_chunk` positions of a micro-batch at a time; 0: on all at once.
    `output`: see `BatchSpec`.

    Recomputation: a block of `checkpoint_interval` layers lies between two activation checkpoints. `saved_layers` layers keep
    all their residuals and are not recomputed; with `residuals` "attention" they keep only attention's results and recompute
    the rest. These are the last layers. The checkpoints at the lowest `host_checkpoints` boundaries
    between blocks, whose backward comes last, wait in host memory and are fetched into `checkpoint_slots` device slots.

    Updates: tiles are updated at "step", after an exact clip over all gradients, or each on "arrival" of its gradients,
    unclipped, in `update_order` (empty: the order of arrival) as far as slabs last. `placements` say for each tile where it is
    updated (`Updated`) and whether its weights stay on the device. With `deferred_moments` the host first updates the weights
    of its tiles and then their moments, during the next forward and backward. Between waves gradients are added up in FP32: on
    the device, or for tiles with host sums in host memory, to which each wave's gradients come in link precision.

    `ranks` processes, each with its own device and batch, run the program together. They share the tiles: each rank copies and
    updates its shard of every tile, and the ranks exchange shards. Each of `hosts` copies has so many ranks, on one host, or
    divided among `spread` hosts. Gradients are added up over the copies, so that all of them are updated alike.

    Pinned memory: with `pinned` the tiles themselves are pinned. Otherwise weights pass through `staging_slabs` and gradients
    through `gradient_slabs` pinned slabs (the paper's pinned slab pool). Gradients that are consumed on arrival always do. The
    moments of layers' tiles on disk pass through `state_slabs` slabs: so many tiles are read ahead, updated or written back at
    a time."""

    batch: int
    length: int
    micro_batches: tuple[int, ...]
    checkpoint_interval: int = 1
    saved_layers: int = 0
    weight_slots: int = 2
    gradient_slots: int = 2
    placements: Placements = ALL_STREAMED
    pinned: bool = True
    staging_slabs: int = 2
    gradient_slabs: int = 12
    waves: int = 1
    update: str = "step"
    token_chunk: int = 0
    update_order: tuple[str, ...] = ()
    host_checkpoints: int = 0
    checkpoint_slots: int = 2
    output: str = "loss"
    deferred_moments: bool = False
    residuals: str = "all"
    ranks: int = 1
    hosts: int = 1
    state_slabs: int = STATE_SLABS
    lengths: tuple[int, ...] = ()
    spread: int = 1

    @functools.cached_property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Sequences and length of each micro-batch."""
        return tuple((rows, self.length_of(mb)) for mb, rows in enumerate(self.micro_batches))

    @property
    def tokens(self) -> int:
        """Tokens that a step of one rank computes, padding included."""
        return sum(rows * length for rows, length in self.sizes)

    def length_of(self, mb: int) -> int:
        """Tokens of a sequence of this micro-batch."""
        return self.lengths[mb] if self.lengths else self.length

    @property
    def processes(self) -> int:
        """The number of processes that run the program together."""
        return self.ranks * self.hosts

    @property
    def gpus(self) -> str:
        """The devices of all processes in words: "16 GPUs of 2 hosts"."""
        return f"{self.processes} GPUs" + (f" of {self.hosts * self.spread} hosts" if self.hosts * self.spread > 1 else "")

    def __post_init__(self) -> None:
        """Raises `MegacompileError` for choices that exclude each other: a person may have written the plan."""
        least = {"batch": 1, "length": 1, "weight_slots": 1, "gradient_slots": 1, "staging_slabs": 1, "gradient_slabs": 1,
                 "checkpoint_slots": 1, "checkpoint_interval": 1, "saved_layers": 0, "token_chunk": 0, "host_checkpoints": 0,
                 "ranks": 1, "hosts": 1, "state_slabs": 1, "spread": 1}
        for name, value in least.items():
            check_whole(name, getattr(self, name), value)
        check_micro_batches(len(self.micro_batches))
        if len(set(self.update_order)) < len(self.update_order):
            raise MegacompileError("update_order names a tile twice: name each once")
        if sum(self.micro_batches) != self.batch or min(self.micro_batches, default=0) < 1:
            raise MegacompileError(f"micro-batches of {shortened(str(self.micro_batches))} are not a split of {self.batch} "
                                   "sequences")
        if self.lengths and (len(self.lengths) != len(self.micro_batches) or min(self.lengths) < 1
                             or max(self.lengths) != self.length):
            raise MegacompileError(f"lengths of {shortened(str(self.lengths))} do not belong to {len(self.micro_batches)} "
                                   f"micro-batches: give each its own, the longest of them {self.length}, or leave lengths out")
        if not 1 <= self.waves <= len(self.micro_batches):
            raise MegacompileError(f"{len(self.micro_batches)} micro-batches cannot go in {self.waves} waves: plan fewer waves "
                                   "or smaller micro-batches")
        if self.ranks % self.spread:
            raise MegacompileError(f"{self.ranks} ranks cannot be divided evenly among {self.spread} hosts: give each "
                                   "host as many")
        if self.update not in UPDATES:
            raise MegacompileError(f"update is {self.update!r}, and must be one of {', '.join(UPDATES)}")
        if self.residuals not in RESIDUALS:
            raise MegacompileError(f"residuals is {self.residuals!r}, and must be one of {', '.join(RESIDUALS)}")
        check_residuals(self.residuals, self.checkpoint_interval)
        if self.host_sums and self.waves == 1:
            raise MegacompileError("host_sums adds gradients up between waves, and there is one wave: plan more waves, or "
                                   "leave host_sums out")
        if self.visiting_state and self.update == "arrival":
            raise MegacompileError("visiting_state needs updates at the end of a step, not on arrival of gradients: leave out "
                                   "one of the two")
        if self.held_state and (self.update == "arrival" or self.processes > 1):
            raise MegacompileError("held_state needs updates at the end of a step, and one process: leave it out")
        if self.deferred_moments and self.update == "arrival":
            raise MegacompileError("deferred_moments needs updates at the end of a step, not on arrival of gradients: leave "
                                   "out one of the two")

    @classmethod
    def of(cls, batch: int, length: int, micro_batches: tuple[int, ...], **choices: Any) -> Plan:
        """The plan with these values of its fields, and with lists of tiles (`LISTS`) instead of `placements`. Raises
        `MegacompileError` for values that exclude each other."""
        lists = {name: choices.pop(name) for name in LISTS if name in choices}
        return cls(batch, length, micro_batches, placements=Placements.named(**lists), **choices)

    def values(self) -> dict[str, Any]:
        """The numbers, texts and tuples from which `of` makes this plan."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "placements"} | {
            **self.placements.lists}

    def placement(self, tile: str) -> Placement:
        """The placement of a tile: where it is updated, and whether its weights stay on the device."""
        return self.placements.of(tile)

    def placed(self, updated: Updated, tiles: Sequence[str]) -> Plan:
        """As `Placements.placed`."""
        return replace(self, placements=self.placements.placed(updated, tiles))

    @property
    def resident(self) -> tuple[str, ...]:
        """The tiles whose weights stay on the device."""
        return self.placements.lists["resident"]

    @property
    def resident_state(self) -> tuple[str, ...]:
        """The tiles that stay on the device with their optimizer state, and are updated there."""
        return self.placements.lists["resident_state"]

    @property
    def visiting_state(self) -> tuple[str, ...]:
        """The tiles that are copied to the device for their update."""
        return self.placements.lists["visiting_state"]

    @property
    def held_state(self) -> tuple[str, ...]:
        """The tiles that the device holds from their last backward until they are updated. In a loop the host updates them."""
        return self.placements.lists["held_state"]

    @property
    def host_sums(self) -> tuple[str, ...]:
        """The tiles whose gradients are added up in host memory between waves."""
        return self.placements.lists["host_sums"]

    @property
    def disk_state(self) -> tuple[str, ...]:
        """The tiles whose moments are on disk."""
        return self.placements.lists["disk_state"]

    def wave_of(self, mb: int) -> int:
        return mb * self.waves // len(self.micro_batches)

    def wave(self, number: int) -> list[int]:
        """The micro-batches of a wave, by number."""
        return [mb for mb in range(len(self.micro_batches)) if self.wave_of(mb) == number]

    def recomputed(self, layers: Sequence[str]) -> list[str]:
        """The layers that keep no residuals, the first ones."""
        return [*layers[:max(0, len(layers) - self.saved_layers)]]

    def blocks(self, layers: Sequence[str]) -> list[tuple[str, ...]]:
        """The recomputed layers, in blocks. The last block may be shorter. Layers that keep their residuals are in no block."""
        recomputed, step = self.recomputed(layers), self.checkpoint_interval
        return [tuple(recomputed[i:i + step]) for i in range(0, len(recomputed), step)]

    def from_host(self, layers: Sequence[str]) -> list[str]:
        """The layers whose input waits in host memory; each begins a block. (The first block's input stays on the device: it is
        the prologue's output, part of which every layer reads.)"""
        return [block[0] for block in self.blocks(layers)[1:1 + self.host_checkpoints]]


def split(batch: int, micro_batch_size: int) -> tuple[int, ...]:
    """Sequences of each micro-batch; the last may be smaller. Raises `MegacompileError` for more than a program takes."""
    check_micro_batches(-(-batch // micro_batch_size))
    whole, rest = divmod(batch, micro_batch_size)
    return (micro_batch_size,) * whole + ((rest,) if rest else ())
