"""StreamConfig: the options of `stream`, checked when they are given."""
from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from megacompile.errors import MegacompileError, UnsupportedError, listed, shortened
from megacompile.ir.options import StreamOptions, described, rows
from megacompile.ir.placement import LISTS, LISTS_OF_UPDATED, check_disjoint
from megacompile.ir.plan import check_residuals
from megacompile.ir.precision import Float8, precision_of
from megacompile.passes import PIPELINE, TEMPLATE_PIPELINE
from megacompile.passes.pipeline import check_pipeline, check_template_pipeline
from megacompile.passes.template import float8
from megacompile.sizes import check_whole

#: Dtypes of weights by name, as transformers takes them.
_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


def check_device(device: Any) -> None:
    """Raises `MegacompileError` for a device that models cannot be streamed to."""
    if device is not None and not re.fullmatch(r"(cpu|cuda)(:\d{1,2})?", str(device)):
        raise MegacompileError(f"device must be 'cpu' or 'cuda', not {shortened(repr(device))}")


def dtype_named(dtype: Any) -> torch.dtype | None:
    """The dtype of weights, which may be given by its name; None for "auto". Raises `UnsupportedError` for another one."""
    found: Any = _DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if found not in _DTYPES.values():
        raise UnsupportedError(f"dtype must be torch.float32, torch.bfloat16 or 'auto', not {shortened(repr(dtype))}")
    return found


@dataclass(frozen=True)
class StreamConfig(StreamOptions):
    __doc__ = f"""The options of `stream`, checked when they are given. None leaves a choice to the planner.

{described()}"""

    def __post_init__(self) -> None:
        for name, _, row in rows():
            row.check(name, getattr(self, name))
        check_residuals(self.residuals, self.checkpoint_interval)
        self._check_other_values()
        self._check_tile_lists()
        self._check_disk()
        self._check_passes()
        self._check_processes()
        check_device(self.device)

    def _check_other_values(self) -> None:
        """Also converts the name of a dtype to the dtype."""
        object.__setattr__(self, "dtype", dtype_named(self.dtype))
        if self.host_checkpoints not in (None, True, False):
            check_whole("host_checkpoints", self.host_checkpoints, 0)
        if not isinstance(self.repack, bool):
            check_whole("repack", self.repack)
        timeout = self.stall_timeout
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0):
            raise MegacompileError(f"stall_timeout must be a number of seconds above 0, or None, not {timeout!r}")
        if self.loss is not None and not callable(self.loss):
            raise MegacompileError(f"loss must be a function of logits and of other batch arguments by name, not {self.loss!r}")

    def _check_tile_lists(self) -> None:
        """Also converts a single name to a tuple."""
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
        """Also converts the name of a precision to its recipe, and None to the default pipelines."""
        for name, usual in (("passes", PIPELINE), ("template_passes", TEMPLATE_PIPELINE)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, usual)
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
        """True if plans with this `update` ("step" or "arrival") must defer moments."""
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
        """The options from these values. Raises `MegacompileError` for an unknown option, with the names of all options."""
        known = {f.name for f in fields(cls)}
        if unknown := set(options) - known:
            near = difflib.get_close_matches(min(unknown), known, n=1)
            raise MegacompileError(f"stream() has no option {', '.join(sorted(unknown))}: "
                                   f"{f'did you mean {near[0]}? ' if near else ''}it has {', '.join(sorted(known))}")
        return cls(**options)
