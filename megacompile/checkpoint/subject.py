"""The objects whose state a checkpoint holds: a streamed model, its optimizer, and optionally a scheduler."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from megacompile.checkpoint.files import DTYPES
from megacompile.checkpoint.manifest import encode
from megacompile.errors import MegacompileError, UnsupportedError
from megacompile.ir.program import argument, nodes, op_of
from megacompile.streaming.optimizer.optimizer import StreamedOptimizer
from megacompile.streaming.streamed import Streamed


class Subject:
    """A streamed model with its optimizer and scheduler. Raises `MegacompileError` if the model is not streamed, or if the
    optimizer is not one of megacompile for this model."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        if not isinstance(optimizer, StreamedOptimizer):
            raise UnsupportedError(f"a checkpoint holds the state of megacompile.AdamW and its relatives, not of a "
                                   f"{type(optimizer).__name__}: use one of megacompile's optimizers")
        if optimizer.streamed is not self.streamed:
            raise MegacompileError("the optimizer belongs to another model: create one with this model's parameters")
        optimizer.ownership.check_alone("a checkpoint holds the state of")

    @property
    def streamed(self) -> Streamed:
        handle = getattr(self.model, "megacompile", None)
        if handle is None:
            raise MegacompileError("the model is not streamed (any more): call model = megacompile.stream(model) first; a "
                                   "plain model is saved with save_pretrained")
        return handle.streamed

    def groups(self) -> list[tuple[dict[str, Any], list[str]]]:
        """For each parameter group, its options and the names of its parameters."""
        return self.optimizer.named_groups()

    def settled_groups(self) -> list[tuple[dict[str, Any], list[str]]]:
        """Like `groups`, after waiting for the update in flight and copying all state to host memory. Raises the error of a
        failed update, and `MegacompileError` between a backward that updates weights and its step()."""
        if self.streamed.step.updated_in_backward:
            raise MegacompileError("a backward has updated the weights but its step has not ended: save after optimizer.step()")
        self.optimizer.ownership.check_alone("a checkpoint holds the state of")
        self.optimizer.settle()
        return self.groups()

    def steps(self) -> dict[str, int]:
        """The number of updates of each parameter that the optimizer trains, by name."""
        return self.optimizer.steps()

    def remainders(self) -> list[str]:
        """Names of the parameters whose FP32 master is split into a weight and a remainder."""
        tiles = self.streamed.store.tiles
        return [name for name, (tile, position) in self.streamed.tiling.position.items()
                if tiles[tile].remainder is not None and tiles[tile].layout.slices[position].trainable]

    def rest(self) -> dict[str, Tensor]:
        """The tensors of `state_dict` that are not in tiles: buffers, and parameters that no layer reads."""
        kept = nn.Module.state_dict(self.model, keep_vars=True)
        if odd := next((name for name, value in kept.items() if not isinstance(value, Tensor)), None):
            raise UnsupportedError(f"{odd} of the model's state_dict is not a tensor, which a checkpoint cannot hold: save it "
                                   "in extra, and leave it out of state_dict")
        if odd := next((name for name, value in kept.items() if value.dtype not in DTYPES), None):
            raise UnsupportedError(f"{odd} is {kept[odd].dtype}, which a checkpoint cannot hold: cast it to another dtype")
        named = dict([*nn.Module.named_parameters(self.model), *self.model.named_buffers()])
        return {name: kept[name] for name in named if name in kept and name not in self.streamed.tiling.position}

    def scheduler_state(self) -> Any:
        """The scheduler's class and its encoded state, or None without a scheduler."""
        if self.scheduler is None:
            return None
        return {"class": type(self.scheduler).__name__, "state": encode(self.scheduler.state_dict(), "scheduler")}

    def update_order(self) -> list[str]:
        """All tiles, in the order in which updates change them as far as it is known. Writing them in this order minimizes the
        waits of updates for the writer."""
        trained, order = self.streamed.step.trained, []
        if trained is not None:
            store, sections = self.streamed.store, trained.program.sections.values()
            order = [store[argument(node, "tile")].home.layout.name for section in sections for node in nodes(section)
                     if op_of(node).name in ("update", "update_weights", "offload_weights")]
        return list(dict.fromkeys([*order, *self.streamed.store.tiles]))

    def stamp(self) -> Callable[[str], object]:
        """A function from a tile's name to a value that changes when its parameters are written from outside. It refers only to
        the parameters, since it may outlive the model."""
        parameters: dict[str, list[nn.Parameter]] = {}
        for name, (tile, _) in self.streamed.tiling.position.items():
            parameters.setdefault(tile, []).append(self.streamed.parameters[name])
        return lambda tile: [(p._version, p.data_ptr()) for p in parameters[tile]]
