"""StreamConfig: the options of `stream`, checked when they are given."""
from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from megacompile.errors import MegacompileError, UnsupportedError, listed, shortened
from megacompile.ir.placement import LISTS, LISTS_OF_UPDATED, check_disjoint
from megacompile.ir.plan import RESIDUALS, check_residuals
from megacompile.ir.precision import Float8, precision_of
from megacompile.limits import check_whole
from megacompile.passes import PIPELINE, TEMPLATE_PIPELINE
from megacompile.passes.pipeline import check_pipeline, check_template_pipeline
from megacompile.passes.template import float8
from megacompile.sizes import parse_bytes

#: The smallest value of each integer option. (`limits.LARGEST` has the largest values.)
_LEAST = {"checkpoint_interval": 1, "micro_batch_size": 1, "saved_layers": 0, "waves": 1, "token_chunk": 0,
          "weight_slots": 1, "expert_pieces": 1, "gradient_slots": 1, "gradient_slabs": 1, "state_slabs": 1}

#: Dtypes of weights by name, as transformers takes them.
_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


def check_device(device: Any) -> None:
    """Raises `MegacompileError` for a device that models cannot be streamed to."""
    if device is not None and not re.fullmatch(r"(cpu|cuda)(:\d{1,2})?", str(device)):
        raise MegacompileError(f"device must be 'cpu' or 'cuda', not {shortened(repr(device))}")


def dtype_named(dtype: Any) -> torch.dtype | None:
    """A dtype of weights, which may be given by its name; None for "auto". Raises `UnsupportedError` for another one."""
    found: Any = _DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if found not in _DTYPES.values():
        raise UnsupportedError(f"dtype must be torch.float32, torch.bfloat16 or 'auto', not {shortened(repr(dtype))}")
    return found


@dataclass(frozen=True)
class StreamConfig:
    """Every choice that a user may make; None leaves it to the planner.

    Attributes:
        device: "cpu" or "cuda"; None: cuda if there is one.
        checkpoint_interval: K, layers between activation checkpoints.
        micro_batch_size: sequences per micro-batch.
        device_memory: budget of device memory, in bytes or as "24GiB"; None: nearly all that is free.
        pinned_memory: budget of pinned host memory; None: no limit. Where it is too small for all weights and gradients, they
            pass through slabs: as many as fit, and at most `gradient_slabs`.
        host_memory: budget of host memory, tiles included; None: what is available.
        dtype: compute dtype, or its name; None or "auto": that of the model's parameters.
        precision: "float8": products of layers with their weights are computed in float8 (`megacompile.Float8`), on GPUs of
            compute capability 8.9 or later; "float8-emulated": with the same rounding, but multiplied in FP32, on any device; a
            `Float8`, or text such as "float8:weight_gradients=bfloat16": with this recipe; None: in `dtype`.
        compile: compile templates with inductor; None: on cuda.
        dynamic: compile kernels of packed rows once for any number and length of rows, and split a step's rows into
            micro-batches that differ by at most one row. False: compile kernels for each of a few sizes, powers of two. None:
            True where templates are compiled.
        saved_layers: how many layers keep their residuals, the last ones first; None: on cuda as many as fit, elsewhere none.
        residuals: which residuals those layers keep: "all", or only the results of "attention", a fourteenth of a 7B layer's.
            The rest is then recomputed, but not attention, which takes longest in long sequences. Requires
            `checkpoint_interval` 1. None: attention's where not all layers can keep all residuals and a simulation says that
            it is faster; else all.
        waves: into how many shares `train_step` splits a batch, each of which goes forward and back; None: on cuda as many as a
            simulation says are fastest, or, on a machine without known rates, as many as let all layers keep their residuals;
            elsewhere one.
        host_sums: names of tiles (or one name, or "all") whose gradients are added up between waves in FP32 in host memory, 4
            bytes per parameter; None: those that do not fit on the device.
        token_chunk: positions of a sequence that a layer computes at a time, except in attention; 0: all; None: all, unless a
            micro-batch of one sequence does not fit.
        host_checkpoints: how many activation checkpoints of a micro-batch, those of the lowest layers, wait for their backward
            in pinned host memory; True: all; False: none; None: none, unless the batch does not fit otherwise.
        resident: names of tiles (or one name, or "all") whose weights stay on the device.
        resident_state: names of tiles (or one name, or "all") that stay on the device with their optimizer state and are
            updated there; None: as many as fit and as make a step faster.
        visiting_state: names of tiles (or one name, or "all" others) that are copied to the device for their update, with their
            optimizer state, and back; None: as many as make a step faster that waits for the host's updates. Only with updates
            at the end of a step. A tile may be named in one of `resident_state`, `visiting_state`, `host_sums` and
            `disk_state`.
        disk: a folder on a local drive for moments that host memory does not hold, "/nvme/state". They are in a file of each
            rank that no other user can open, and that is gone when the process ends. Updates read and write the file around
            the page cache. None: all moments are in host memory.
        disk_state: names of tiles (or one name, or "all" others) whose moments are on that disk; None: the fewest that let
            training fit `host_memory`.
        state_slabs: through how many buffers in host memory the moments of layers' tiles pass on their way from and to the
            disk; None: as few as make a step as fast as more do.
        deferred_moments: whether the host first updates the weights of all tiles, which the next forward waits for, and then
            their moments, beside that forward. This takes 36 bytes of memory traffic per parameter instead of 26, but the
            forward waits for only 18 of them. None: where that makes a step faster. Only with updates at the end of a step.
        weight_slots, gradient_slots: how many device buffers layers' weights, and their gradients, take turns in; None: two, so
            that copies run beside compute (more for weights where `checkpoint_interval` needs them), or one where nothing else
            fits.
        gradient_slabs: how many pinned buffers gradients pass through that are added to others.
        expert_pieces: into how many calls a layer's routed experts are divided, each with its own tiles, so that a slot holds a
            piece and not a whole layer; None: one, unless the layers in transit do not fit half of the device.
            `checkpoint_interval` and `saved_layers` then count calls; such a layer has one call more than pieces.
        passes: the pipeline over programs, made from `megacompile.passes.PIPELINE` with `insert_after` and similar functions.
        template_passes: the pipeline over the graphs of templates, made from `TEMPLATE_PIPELINE`.
        loss: a function that replaces the model's own loss. It takes the logits of some tokens, [N, vocabulary], and by
            parameter name the rows of other batch arguments for the same tokens; it returns a value for each token, [N]. The
            loss is their sum over `num_items_in_batch` (1 if that is not passed). Nothing is shifted.
        stall_timeout: seconds for which all lanes that a call waits for may make no progress before it raises `StallError`,
            which says what each lane is doing; None: no limit. Half an hour is longer than any instruction takes.
        repack: whether the rows of a padded batch are packed into rows of one length, where that changes only the time; a
            number: the usual length of these rows in tokens (rounded up to a power of two; 2048 by default). They are longer if
            a sequence is, and may be up to a quarter shorter. Rows that cannot be packed are grouped by length, and each group
            is padded to one of eight widths, parts of this length. False: every batch is computed as it comes.
        distributed: whether this process trains the model together with the other processes of torch.distributed's default
            group (torchrun). None: where there are several processes.
        mesh: a `DeviceMesh` of all ranks. One dimension: the ranks, all on one host, have shards of one copy of the model. Two:
            each row is a host with a copy of its own, (replicate, shard) as in FSDP2. The order of ranks does not matter. None:
            each machine is a host. (Processes with another value of the environment variable MEGACOMPILE_HOST count as being
            on another host.)
        peer_copies: how the GPUs of several ranks exchange weights and gradients: True: by copies from one GPU's memory to
            another's, which leave the multiprocessors to the layers; False: by NCCL. None: by copies where the GPUs can reach
            each other's memory.
        reference: run the reference interpreter (one thread, program order), for checking.
    """

    device: str | torch.device | None = None
    checkpoint_interval: int | None = None
    micro_batch_size: int | None = None
    device_memory: int | float | str | None = None
    pinned_memory: int | float | str | None = None
    host_memory: int | float | str | None = None
    dtype: torch.dtype | None = None
    precision: Float8 | str | None = None
    compile: bool | None = None
    dynamic: bool | None = None
    saved_layers: int | None = None
    residuals: str | None = None
    waves: int | None = None
    host_sums: tuple[str, ...] | str | None = None
    token_chunk: int | None = None
    host_checkpoints: int | bool | None = None
    resident: tuple[str, ...] | str = ()
    resident_state: tuple[str, ...] | str | None = None
    visiting_state: tuple[str, ...] | str | None = None
    deferred_moments: bool | None = None
    disk: str | os.PathLike[str] | None = None
    disk_state: tuple[str, ...] | str | None = None
    state_slabs: int | None = None
    weight_slots: int | None = None
    expert_pieces: int | None = None
    gradient_slots: int | None = None
    gradient_slabs: int = 12
    passes: tuple[Any, ...] = PIPELINE
    template_passes: tuple[Any, ...] = TEMPLATE_PIPELINE
    loss: Callable[..., Any] | None = None
    stall_timeout: float | None = 1800.0
    repack: bool | int = True
    distributed: bool | None = None
    mesh: Any = None
    peer_copies: bool | None = None
    reference: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_sizes_and_flags()
        self._check_tile_lists()
        self._check_disk()
        self._check_passes()
        self._check_processes()
        check_device(self.device)

    def _check_numbers(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), least)
        if self.residuals not in (None, *RESIDUALS):
            raise MegacompileError(f"residuals must be one of {', '.join(RESIDUALS)}, not {shortened(repr(self.residuals))}")
        check_residuals(self.residuals, self.checkpoint_interval)
        if self.host_checkpoints not in (None, True, False):
            check_whole("host_checkpoints", self.host_checkpoints, 0)
        if not isinstance(self.repack, bool):
            check_whole("repack", self.repack)
        timeout = self.stall_timeout
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0):
            raise MegacompileError(f"stall_timeout must be a number of seconds above 0, or None, not {timeout!r}")

    def _check_sizes_and_flags(self) -> None:
        """Also makes a dtype of its name."""
        object.__setattr__(self, "dtype", dtype_named(self.dtype))
        for size in (self.device_memory, self.pinned_memory, self.host_memory):
            parse_bytes(size)
        for name in ("compile", "dynamic", "deferred_moments", "distributed", "peer_copies", "reference"):
            if not isinstance(getattr(self, name), bool | None):
                raise MegacompileError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.loss is not None and not callable(self.loss):
            raise MegacompileError(f"loss must be a function of logits and of other batch arguments by name, not {self.loss!r}")

    def _check_tile_lists(self) -> None:
        """Also makes a tuple of a single name."""
        for option in LISTS:
            names = getattr(self, option)
            if isinstance(names, str) and names != "all":
                object.__setattr__(self, option, (names,))
            elif names not in ("all", None) and not (
                    isinstance(names, tuple | list) and all(isinstance(name, str) for name in names)):
                raise MegacompileError(f"{option} must be the names of tiles, or 'all', not {shortened(repr(names))}")
        # "all" means all tiles that the others do not name.
        check_disjoint({option: names for option in LISTS_OF_UPDATED if (names := getattr(self, option)) not in ("all", None)})

    def _check_disk(self) -> None:
        if self.disk is not None and (not isinstance(self.disk, str | os.PathLike) or not os.fspath(self.disk)):
            raise MegacompileError(f"disk must be the path of a folder on a local drive, not {shortened(repr(self.disk))}")
        if self.disk is None and self.disk_state:
            raise MegacompileError("disk_state names tiles whose moments are on disk, but no disk is given: add disk, a folder "
                                   "on a local drive")

    def _check_passes(self) -> None:
        """Also makes a recipe of the name of a precision."""
        check_pipeline(self.passes)
        check_template_pipeline(self.template_passes)
        object.__setattr__(self, "precision", precision_of(self.precision))
        if self.precision is not None and float8.name not in [each.name for each in self.template_passes]:
            raise MegacompileError("precision has no effect without the template pass float8: make template_passes from "
                                   "TEMPLATE_PIPELINE, or leave precision out")

    def _check_processes(self) -> None:
        if self.mesh is not None and not isinstance(self.mesh, DeviceMesh):
            raise MegacompileError(f"mesh must be a DeviceMesh, not a {type(self.mesh).__name__}: make one with "
                                   "torch.distributed.init_device_mesh, or leave mesh out")
        if self.mesh is not None and self.distributed is False:
            raise MegacompileError("distributed=False trains with this process alone, and a mesh is for several: leave out one "
                                   "of the two")

    @property
    def recipe(self) -> Float8 | None:
        """The recipe for products in float8."""
        assert not isinstance(self.precision, str), "made a recipe when it was checked"
        return self.precision

    def defers(self, update: str) -> bool:
        """Whether plans with this `update` ("step" or "arrival") must defer moments."""
        return self.deferred_moments is True and update == "step"

    def check_tiles(self, tiles: Collection[str], model: str) -> None:
        """Raises `MegacompileError` for an option that names a tile which the model does not have. `model`: its class."""
        for option in LISTS:
            names = getattr(self, option)
            if names not in ("all", None) and (unknown := set(names) - set(tiles)):
                raise MegacompileError(f"{option} names {listed(sorted(unknown))}, which are not tiles of {model}: choose from "
                                       f"{listed(tiles)}")

    @classmethod
    def of(cls, **options: Any) -> StreamConfig:
        """Raises `MegacompileError` for an unknown option, with the names of all options."""
        known = {f.name for f in fields(cls)}
        if unknown := set(options) - known:
            near = difflib.get_close_matches(min(unknown), known, n=1)
            raise MegacompileError(f"stream() has no option {', '.join(sorted(unknown))}: "
                                   f"{f'did you mean {near[0]}? ' if near else ''}it has {', '.join(sorted(known))}")
        return cls(**options)
