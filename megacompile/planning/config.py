"""StreamConfig: the knobs of `stream`, checked when they are given."""
from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Any

import torch

from megacompile.errors import MegacompileError, listed, shortened
from megacompile.ir.plan import RESIDUALS, check_residuals
from megacompile.limits import check_whole
from megacompile.passes import PIPELINE, TEMPLATE_PIPELINE
from megacompile.passes.pipeline import check_pipeline, check_template_pipeline
from megacompile.sizes import parse_bytes

#: Options that name tiles.
NAMES_OF_TILES = ("resident", "resident_state", "visiting_state", "host_sums")
#: The least of each option that is a whole number. (`limits.LARGEST` has the largest.)
_LEAST = {"checkpoint_interval": 1, "micro_batch_size": 1, "saved_layers": 0, "waves": 1, "token_chunk": 0, "weight_slots": 1,
          "expert_pieces": 1, "gradient_slots": 1, "gradient_slabs": 1}


def check_device(device: Any) -> None:
    """Raises `MegacompileError` for a device that nothing is streamed to."""
    if device is not None and not re.fullmatch(r"(cpu|cuda)(:\d{1,2})?", str(device)):
        raise MegacompileError(f"device must be 'cpu' or 'cuda', not {shortened(repr(device))}")


@dataclass(frozen=True)
class StreamConfig:
    """Every choice a user may make; None leaves it to the planner.

    Attributes:
        device: "cpu" or "cuda"; None: cuda if there is one.
        checkpoint_interval: K, layers between activation checkpoints.
        micro_batch_size: sequences a micro-batch.
        device_memory: budget of the device, bytes or "24GiB".
        pinned_memory: pinned host memory; too little for all weights and gradients: they pass through slabs, as many as
            fit and at most `gradient_slabs`.
        host_memory: budget of the host, tiles and all; None: what there is.
        dtype: compute dtype; None: that of the model's parameters.
        compile: templates through inductor; None: on cuda.
        dynamic: compile kernels of packed rows once for any number of rows, and split a step's rows into micro-batches that
            differ by one row at most. False: kernels are compiled for each of a few sizes, powers of two. None: True where
            templates are compiled.
        saved_layers: how many last layers keep their residuals; None: on cuda as many as fit, elsewhere none.
        residuals: which these keep: "all", or the results of "attention", a fourteenth of a 7B layer's: then the rest is
            computed again, and not what takes longest in long sequences. Goes with a `checkpoint_interval` of 1. None: those
            of attention where not all layers could keep all, and a simulation says that it is faster; else all.
        waves: in how many shares `train_step` sends a batch forward and back; None: on cuda as many as a simulation says are
            fastest, or, on a machine of which nothing is known, let all layers keep their residuals; elsewhere one.
        host_sums: names of tiles (or one name) whose gradients are added up between waves in FP32 in host memory, 4 bytes a
            parameter, or "all"; None: those for which the device has no room.
        token_chunk: positions of a sequence that a layer computes at a time, outside of attention; 0: all; None: all, unless
            a micro-batch of one sequence does not fit.
        host_checkpoints: how many activation checkpoints of a micro-batch, those of the lowest layers, wait in (pinned)
            host memory for their backward; True: all, False: none; None: none, unless the batch does not fit otherwise.
        resident: names of tiles (or one name) whose weights stay on the device, or "all".
        resident_state: names of tiles (or one name) that stay there with their optimizer state and are updated there, or
            "all"; None: as many as there is memory for and the update is hidden by.
        visiting_state: names of tiles (or one name) that go to the device for their update and home again, with their
            optimizer state, or "all" others; None: as many as make a step faster that waits for the host's updates. Updates
            at the end of a step only.
        deferred_moments: whether the host updates the weights of all tiles first, which the next forward waits for, and their
            moments beside it: 36 bytes of memory traffic a parameter instead of 26, 18 of them waited for; None: where that
            makes a step faster. Updates at the end of a step only.
        weight_slots, gradient_slots: how many device buffers layers' weights, and their gradients, take turns in; None: two, so
            that copies run beside compute (more weights where `checkpoint_interval` asks for them), or one where nothing else
            fits. gradient_slabs: how many pinned buffers gradients that are added to others pass through.
        expert_pieces: into how many calls a layer's routed experts are divided, each with tiles of its own, so that a slot
            holds a piece and not a layer; None: one, unless half of the device cannot hold the layers under way.
            Then `checkpoint_interval` and `saved_layers` count calls, of which such a layer has one more than pieces.
        passes: the pipeline over programs, made from `megacompile.passes.PIPELINE` by `insert_after` and its like.
        template_passes: that over the graphs of templates, made from `TEMPLATE_PIPELINE`.
        loss: in the place of the model's own loss, a function of the logits of some tokens, [N, vocabulary], and of rows of
            further batch arguments for the same tokens, by parameter name, that returns a value for each, [N]; the loss is
            their sum over `num_items_in_batch` (1, if that is not passed). Nothing is shifted.
        stall_timeout: seconds for which the lanes that a call waits for may all stand still, before it raises `StallError`
            with what each is at; None: for ever. Half an hour is longer than any instruction takes, and shorter than a night.
        repack: whether the rows of a padded batch are laid into rows of one length, where that changes nothing but the time;
            a number: the least length of these rows, in tokens (rounded up to a power of two; 2048 by default).
        reference: run the reference interpreter (one thread, program order), for checking.
    """

    device: str | torch.device | None = None
    checkpoint_interval: int | None = None
    micro_batch_size: int | None = None
    device_memory: int | float | str | None = None
    pinned_memory: int | float | str | None = None
    host_memory: int | float | str | None = None
    dtype: torch.dtype | None = None
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
    weight_slots: int | None = None
    expert_pieces: int | None = None
    gradient_slots: int | None = None
    gradient_slabs: int = 12
    passes: tuple[Any, ...] = PIPELINE
    template_passes: tuple[Any, ...] = TEMPLATE_PIPELINE
    loss: Callable[..., Any] | None = None
    stall_timeout: float | None = 1800.0
    repack: bool | int = True
    reference: bool = False

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), least)
        if self.residuals not in (None, *RESIDUALS):
            raise MegacompileError(f"residuals must be one of {', '.join(RESIDUALS)}, not {shortened(repr(self.residuals))}")
        check_residuals(self.residuals, self.checkpoint_interval)
        if self.host_checkpoints not in (None, True, False):
            check_whole("host_checkpoints", self.host_checkpoints, 0)
        for option in NAMES_OF_TILES:
            names = getattr(self, option)
            if isinstance(names, str) and names != "all":
                object.__setattr__(self, option, (names,))
            elif names not in ("all", None) and not (
                    isinstance(names, tuple | list) and all(isinstance(name, str) for name in names)):
                raise MegacompileError(f"{option} must be the names of tiles, or 'all', not {shortened(repr(names))}")
        if not isinstance(self.repack, bool):
            check_whole("repack", self.repack)
        timeout = self.stall_timeout
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0):
            raise MegacompileError(f"stall_timeout must be a number of seconds above 0, or None, not {timeout!r}")
        if self.dtype not in (None, torch.float32, torch.bfloat16):
            raise MegacompileError(f"dtype must be torch.float32 or torch.bfloat16, not {self.dtype}")
        check_pipeline(self.passes)
        check_template_pipeline(self.template_passes)
        parse_bytes(self.device_memory)
        parse_bytes(self.pinned_memory)
        parse_bytes(self.host_memory)
        for name in ("compile", "dynamic", "deferred_moments", "reference"):
            if getattr(self, name) not in (None, True, False):
                raise MegacompileError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.loss is not None and not callable(self.loss):
            raise MegacompileError(f"loss must be a function of logits and of what it names beside them, not {self.loss!r}")
        check_device(self.device)

    def defers(self, update: str) -> bool:
        """Whether plans with updates at "step", or on "arrival", must defer moments."""
        return self.deferred_moments is True and update == "step"

    def check_tiles(self, tiles: Collection[str], model: str) -> None:
        """Raises `MegacompileError` for an option that names a tile which a model of this class has not."""
        for option in NAMES_OF_TILES:
            names = getattr(self, option)
            if names not in ("all", None) and (unknown := set(names) - set(tiles)):
                raise MegacompileError(f"{option} names {listed(sorted(unknown))}, which are not tiles of {model}: it has "
                                       f"{listed(tiles)}")

    @classmethod
    def of(cls, **options: Any) -> StreamConfig:
        """Raises `MegacompileError` for an option there is not, naming those there are."""
        known = {f.name for f in fields(cls)}
        if unknown := set(options) - known:
            raise MegacompileError(f"stream() has no option {', '.join(sorted(unknown))}: it has {', '.join(sorted(known))}")
        return cls(**options)
