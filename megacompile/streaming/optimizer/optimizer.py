"""Optimizers of streamed models: updates on the host, overlapped with the next step's forward."""
from __future__ import annotations

import functools
import gc
import itertools
import os
import weakref
import zlib
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megacompile.errors import DiskError, MegacompileError, UnsupportedError
from megacompile.planning.host_needs import check_state, with_disk
from megacompile.runtime.memory.state_file import StateFile
from megacompile.runtime.memory.state_layout import ElementState
from megacompile.runtime.memory.store import STATE
from megacompile.runtime.memory.tiles import TileLayout
from megacompile.runtime.optimizer import native
from megacompile.runtime.optimizer.host_update import definitions, join_fp32, split_fp32
from megacompile.runtime.optimizer.rule import MatrixRule, Rule, Segment
from megacompile.runtime.optimizer.state_format import FLOAT32
from megacompile.runtime.update import Update, counting
from megacompile.sizes import parse_bytes
from megacompile.streaming.call_lock import exclusive
from megacompile.streaming.optimizer.hyper_parameters import (
    KEPT,
    Check,
    check_complete,
    check_options,
    checked_norm,
    is_on_arrival,
    state_of_group,
)
from megacompile.streaming.optimizer.state import OptimizerState, ParameterState, SavedState, StateMemory
from megacompile.streaming.replanning import discard_plans
from megacompile.streaming.shared_writes import loading
from megacompile.streaming.step_state import NonFinite
from megacompile.streaming.streamed import Streamed
from megacompile.streaming.user_tensors.owners import owner_of, owners_of, require_owner
from megacompile.streaming.whole_values import whole_values
from megacompile.weights.tiling import Tiling


# --------------------
# The owner of a parameter: the last optimizer that was made for it, which takes over its state.
class Ownership:
    """State: the `states` of the parameters that an optimizer updates, a parameter that it lost to a newer optimizer, and
    whether its model was closed."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)  # an optimizer that the user drops is gone at once
        self.states = OptimizerState(optimizer)
        self._lost, self._closed = "", False

    @property
    def optimizer(self) -> Any:
        found = self._optimizer()
        assert found is not None, "only the optimizer itself asks"
        return found

    def check(self) -> None:
        """Raises `MegacompileError` if another optimizer has taken over, or if the model was closed."""
        if self._closed:
            raise MegacompileError("the model of this optimizer was closed, which frees the optimizer's state: call "
                                   "state_dict() before close(), and make a new optimizer after stream()")
        if self._lost:
            raise MegacompileError(f"another optimizer, made later, updates {self._lost} now, and has taken its state: use "
                                   "that one, or make a new optimizer")

    def take_over(self, found: Iterable[tuple[Tensor, StateMemory]]) -> None:
        """Makes this optimizer the only one that updates these parameters. A parameter has one state."""
        found = list(found)
        for _, memory in found:
            if (former := self._other(memory)) is not None:
                former.ownership.lose(memory.name)
                self.optimizer.streamed.optimizer_in_backward.detach(former)
            memory.optimizer = self.optimizer
        for parameter, memory in found:
            self.states.ready(parameter, memory)

    def write_back(self, models: Iterable[Any], drop: bool = False) -> None:
        """Like `OptimizerState.write_back`. If it fails, tells the other ranks that train these streamed models."""
        with ExitStack() as stack:
            for streamed in models:
                stack.enter_context(streamed.rank_group.failing())
            self.states.write_back(drop)

    def lose(self, parameter: str) -> None:
        """Records that another optimizer updates the parameter of this name from now on."""
        self._lost, self.states = parameter, OptimizerState(self.optimizer)

    def release(self) -> None:
        """Releases the state, when the model is closed."""
        self._closed, self.states = True, OptimizerState(self.optimizer)

    def check_alone(self, doing: str) -> None:
        """Raises `MegacompileError` if another optimizer updates parameters of the model. `doing`: the action that needs a
        single optimizer."""
        for memory in self.optimizer.streamed.states.values():
            if self._other(memory) is not None:
                raise MegacompileError(f"{doing} one optimizer, and another one updates {memory.name}: make one with parameter "
                                       "groups, or drop the other (del optimizer)")

    def _other(self, memory: StateMemory) -> Any:
        """Another optimizer that updates this parameter."""
        other: Any = memory.optimizer
        if other is None or other is self.optimizer or other.ownership._lost:
            return None
        return other if any(memory.name in names for _, names in other.named_groups()) else None


# -------------------- The segments of an update that an optimizer requests: which elements of which tiles, with which options
@dataclass(frozen=True)
class GroupOptions:
    """A copy of a group's options: `elementwise`, as the elementwise rule reads them, and all of them for the `matrix_rule`."""

    elementwise: Any
    all: Mapping[str, Any]
    matrix_rule: MatrixRule | None

    def of(self, shape: tuple[int, ...], state: ElementState) -> Any:
        """The options for a parameter of this shape with this state."""
        if not state.whole:
            return self.elementwise
        assert self.matrix_rule is not None, "the state of a rule that the optimizer does not have"
        return self.matrix_rule.options_of(self.all, shape)


#: A parameter that is to be updated: its options, the memory of its state, and the state.
Ready = tuple[GroupOptions, StateMemory, ParameterState]


def segments_of(tiling: Tiling, ready: Sequence[Ready]) -> dict[str, list[Segment]]:
    """For each tile, the runs of its host tile's elements to update, ascending. Called while step counts are increased."""
    found: dict[str, list[Segment]] = {}
    for options, memory, state in ready:
        seed = zlib.crc32(memory.name.encode())
        for tile, position in tiling.streamed_at[memory.name]:
            layout = tiling.layouts[tile]
            part, read = layout.at_home(position), options.of(layout.slices[position].shape, memory.kept)
            found.setdefault(tile, []).append(
                Segment(part.start, part.stop, read, state["step"] + 1, part.start - memory.start, seed, position))
    for segments in found.values():
        segments.sort(key=lambda s: s.start)
    return found


def positions_of(tiling: Tiling, names: Iterable[str]) -> dict[str, list[int]]:
    """The positions of the parameters with these names in each tile, ascending."""
    found: dict[str, list[int]] = {}
    for name in names:
        for tile, position in tiling.streamed_at[name]:
            found.setdefault(tile, []).append(position)
    return {tile: sorted(positions) for tile, positions in found.items()}


def matrix_positions(tiling: Tiling, segments: Mapping[str, Sequence[Segment]]) -> dict[str, frozenset[int]]:
    """For each tile, the positions of the parameters that are updated as whole matrices."""
    found = {tile: frozenset(s.position for s in each if tiling.layouts[tile].state_of(s.position).whole)
             for tile, each in segments.items()}
    return {tile: positions for tile, positions in found.items() if positions}


# --------------------
# The FP32 master of a parameter: a bf16 weight holds its upper half, and a remainder in the tile the lower half.
def read(streamed: Streamed, parameter: Tensor, remainder: Tensor | None) -> Tensor:
    """A copy of a parameter's master, fp32, in the parameter's shape. `remainder`: int16, of the same shape; None for an fp32
    parameter."""
    streamed.copy_back()
    streamed.adopt_writes()
    if remainder is None:
        return parameter.detach().float().clone()
    return join_fp32(parameter.detach().flatten(), remainder.flatten()).view(parameter.shape)


@torch.no_grad()
def write(streamed: Streamed, parameter: Tensor, memory: StateMemory | None, remainder: Tensor | None, master: Tensor) -> None:
    """Sets a parameter's master, including the remainder. With several ranks, sets all of them to rank 0's."""
    streamed.adopt_writes()
    with loading(streamed, "set_master", tiles=None if memory is None else (memory.tile,)):
        if memory is None or remainder is None or not memory.writable:
            parameter.copy_(master if memory is None or memory.writable else parameter)
            streamed.adopt_writes()
            return
        high, low = split_fp32(master.detach().float().contiguous().flatten())
        parameter.copy_(high.view(parameter.shape))
        streamed.adopt_writes()
        remainder.copy_(low.view(parameter.shape))


# -------------------- Checks a saved optimizer's `state_dict` before anything of it is loaded, and calls the hooks of the load
@contextmanager
def load_hooks(optimizer: Any, state_dict: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A context around a load. Gives the state to load, after the pre-hooks that may change it. Runs the post-hooks if the load
    succeeds."""
    given = dict(state_dict)
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = before(optimizer, given)
        given = given if changed is None else changed
    yield given
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def check_saved(optimizer: Any, state_dict: dict[str, Any]) -> tuple[list[dict[str, Any]], list[SavedState]]:
    """The saved options of each group of an `optimizer`, and the saved state of each parameter with its memory.

    Raises `MegacompileError` for other groups, parameters or shapes, and for invalid options."""
    others = ("params", "decoupled_weight_decay")  # also in a state that torch.optim.Adam saved
    groups = [optimizer.options_of_torch({option: deepcopy(value) for option, value in group.items() if option not in others})
              for group in state_dict["param_groups"]]
    indices = [group["params"] for group in state_dict["param_groups"]]
    if [len(each) for each in indices] != [len(group["params"]) for group in optimizer.param_groups]:
        raise MegacompileError("the saved optimizer has other parameter groups: make it with the groups it was saved with")
    for group, here in zip(groups, optimizer.param_groups, strict=True):
        check_options(group, optimizer.checks, type(optimizer).__name__)
        for option in KEPT:
            if group.setdefault(option, here[option]) != here[option]:
                raise MegacompileError(f"the saved optimizer has {option}={group[option]!r}, and this one {here[option]!r}: "
                                       f"make it with the {option} that it was saved with")
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    states = [(parameter, memory, memory.of_torch(state_dict["state"].get(index, {})))
              for index, parameter in zip(itertools.chain(*indices), parameters, strict=True)
              if (memory := optimizer.memory(parameter)) is not None]
    for _, memory, saved in states:
        memory.check_saved(saved)
    return groups, states


# --------------------
# The state that a model stores for its optimizers: moments in their formats. Changing it changes tiles and plans, so it
# happens between steps.
#: The state that an optimizer needs of parameters: (group, names, model, tiling) -> by name.
StatesOf = Callable[[Mapping[str, Any], Iterable[str], nn.Module, Tiling], Mapping[str, ElementState]]


def keep_groups(states_of: StatesOf, groups: Sequence[Mapping[str, Any]], on_arrival: bool) -> None:
    """Makes each model store the state that an optimizer needs for the parameters in these groups. Raises as `keep_states`."""
    of_models: dict[Streamed, dict[str, ElementState]] = {}
    for group in groups:
        for streamed, names in _of_models(group).items():
            of_models.setdefault(streamed, {}).update(states_of(group, names, streamed.model, streamed.tiling))
    for streamed, states in of_models.items():
        keep_states(streamed, states, on_arrival)


def _of_models(group: Mapping[str, Any]) -> dict[Streamed, list[str]]:
    """The names of a group's parameters that the forward reads, by model."""
    found: dict[Streamed, list[str]] = {}
    for parameter in group["params"]:
        streamed, name = require_owner(parameter)
        if name in streamed.states:
            found.setdefault(streamed, []).append(name)
    return found


def check_kept(optimizer: Any, group: Mapping[str, Any]) -> None:
    """Raises `MegacompileError` if a group's options that determine how its state is stored have changed."""
    fixed = " and ".join(("state_dtype", "master", *optimizer.more))
    for streamed, names in _of_models(group).items():
        for name, wanted in optimizer.states_of(group, names, streamed.model, streamed.tiling).items():
            memory = streamed.states[name]
            if memory.optimizer is optimizer and not memory.keeps(wanted):
                raise MegacompileError(f"{fixed} cannot change once the optimizer is made, but were changed for {name}: set "
                                       "them back, or make a new optimizer (its moments restart)")


def build_kernels(optimizer: Any, streamed: Streamed) -> None:
    """Builds the host's update kernels before the first step. Otherwise all lanes would wait for the C++ compiler."""
    on_host = streamed.backend.device.type == "cpu"  # matrices are updated on the device
    for layout in streamed.tiling.host.values():
        for state in {layout.state_of(i) for i, s in enumerate(layout.slices) if s.trainable}:
            exact = layout.has_remainder
            if not state.whole:
                native.update_library(definitions(optimizer.rule, layout.dtype, exact, state.format))
            elif on_host:
                native.update_library(definitions(optimizer.matrix_rule.momentum, torch.float32, False, state.format))
                native.update_library(definitions(optimizer.matrix_rule.weights, layout.dtype, exact, FLOAT32))


def check_masters(states: Mapping[str, ElementState], tiling: Tiling) -> None:
    """Raises `MegacompileError` for weights without an FP32 master that are not bf16."""
    for name, state in states.items():
        layout = tiling.host[tiling.position[name][0]]
        if not state.exact and layout.dtype != torch.bfloat16:
            raise MegacompileError(f"master='bfloat16' is for bf16 weights, and {name} is {layout.dtype}: leave master out")


def keep_states(streamed: Streamed, states: Mapping[str, ElementState], on_arrival: bool) -> None:
    """Makes the model store these states of the named parameters from now on. Moments that were stored in another way restart.
    `on_arrival`: no gradients wait in host memory. Raises `InsufficientMemoryError`, with what would fit, if the host cannot
    hold them, `DiskError` if the disk cannot, and `MegacompileError` between a forward and the end of its step. Then nothing
    has changed. With a disk, several ranks call this together."""
    check_masters(states, streamed.tiling)
    before, store = streamed.tiling, streamed.store
    tiling = before.with_states(states)
    if tiling.host != before.host or not store.has_moments:
        budget_bytes = store.available_bytes(parse_bytes(streamed.config.host_memory))
        if streamed.config.disk is not None:  # all ranks choose the same tiles
            budget_bytes = min(streamed.rank_group.values("the optimizer's constructor", budget_bytes))
        stays = [tile for tile, layout in tiling.host.items() if layout == before.host[tile] and store.tiles[tile].has_moments]
        tiling = with_disk(tiling, streamed.config, budget_bytes, on_arrival, there=set(stays) & set(before.on_disk),
                           in_memory=set(stays) - set(before.on_disk))
        check_state(tiling, budget_bytes, on_arrival, config=streamed.config)
    if tiling == before:
        return
    new = [tile for tile in tiling.on_disk if store.tiles[tile].file is None or tiling.host[tile] != before.host[tile]]
    if (snapshot := store.snapshot) is not None:  # a checkpoint that is being written reads the state that there is
        snapshot.wait()
    file = _state_file(streamed, [tiling.host[tile] for tile in new]) if new else None
    try:
        discard_plans(streamed, "a new optimizer that keeps other state")
    except BaseException:
        if file is not None:
            file.close()
        raise
    for unused in store.keep(tiling.host, tiling.layouts, tiling.on_disk, file):
        streamed.backend.unpin(unused)  # the system does not take pinned pages back
    streamed.captures.keep(tiling)
    streamed.writes.remainders.clear()


def _state_file(streamed: Streamed, layouts: Sequence[TileLayout]) -> StateFile:
    """Creates this rank's file for its share of the moments of these tiles, and opens those of the other ranks of this host.
    Raises `DiskError` and `RankError`; then no file is left."""
    folder, rank_group = Path(streamed.config.disk or ""), streamed.rank_group
    if rank_group.ranks is None:
        return StateFile(folder, layouts)
    made: list[StateFile] = []
    try:
        with rank_group.all_or_none("the optimizer's constructor", DiskError):
            made.append(StateFile(folder, layouts))
        addresses = rank_group.values("the optimizer's constructor", made[0].file.address)
        with rank_group.failing():
            hosts = rank_group.ranks.hosts
            made[0].share([addresses[rank] for rank in hosts.here], hosts.local)
    except BaseException:
        for file in made:
            file.close()
        raise
    return made[0]


class StreamedOptimizer(torch.optim.Optimizer):
    """The optimizers of streamed models: FP32 master weights and moments in host memory, fused and asynchronous.

    A subclass says which `rule` it has, how its options are checked, and what the rule reads of them (`options_of`). It may
    also have a `matrix_rule` for some parameters (`states_of`), and other options that say which (`more`, with defaults).

    `step()` returns at once; the update runs on the host during the next forward. With `max_grad_norm`, gradients are clipped
    by their exact global norm, like `torch.nn.utils.clip_grad_norm_`. `grad_norm` is the norm of the last step before clipping.

    `state_dtype`, also of a parameter group, is how moments are stored: "float32"; "bfloat16", rounded at random so that the
    mean is right; or "8bit", in blocks of 256 elements with a scale (see `docs/fine-tuning.md` for what that costs). `master`:
    "float32", the exact value of a bf16 weight, with two bytes beside it; or "bfloat16": the weight alone, rounded at random.

    `state_dict` holds the moments, step, and for bf16 parameters the low 16 bits of the FP32 master (`remainder`, int16). 8-bit
    moments are codes (uint8) with scales (`exp_avg_scale`, fp32, one for each 256 elements). `state` has no remainder: removing
    or replacing a state restarts the moments, as in torch.optim, and leaves the master unchanged.

    Parameters that the model's forward does not read, or whose gradient is None, are not updated. Whole steps, and updates on
    arrival, do not update parameters that the loss does not reach.

    Changes of `.grad` between backward and step count, in the norm too. Changes that PyTorch does not track (`.grad.data`,
    NumPy, `GradScaler.unscale_`) are found by sampling 256 elements of each gradient: a change of whole gradients is always
    seen, a change of a few elements may not be. After `step()`, synchronize (`model.megacompile`) before you change one.

    Several optimizers may each update their own parameters. An optimizer that is made for parameters of another one takes over
    their state; later uses of the other one raise. Whole steps, updates on arrival and checkpoints need one optimizer. Group
    options may change at any time, and take effect at the next `step()`, except `state_dtype` and `master`.

    With `update="arrival"` each tile is updated as its gradients arrive. Nothing is clipped. `.grad` and `grad_norm` stay
    None, so PyTorch's own clipping has nothing to clip. Forward, backward and `step()` must alternate. The backward reads the
    hyper-parameters. `step()` ends the step, which schedulers rely on, and does nothing without a backward. The newest
    optimizer decides whether a model's backward updates.

    Gradients whose norm is not finite change nothing, including moments and step counts, with or without clipping. `non_finite`
    selects what happens then: "raise" (a `NonFiniteError` from the next call that waits for the update), "skip" (training goes
    on; `model.megacompile.stats["skipped_steps"]` counts), or "dump" (writes the batch and the norm of each gradient to a
    folder in `dump_folder`, then raises). With `update="arrival"` each tile is checked when its gradients arrive: a tile
    whose gradients are not finite keeps its weights and moments, and the other tiles are updated (`stats["kept_tiles"]`
    counts). If no tile was updated, the step count is rolled back, unless the device skipped one: the host learns that later.

    Raises `MegacompileError` for parameters that belong to no streamed model, or to several, and for options out of range;
    `InsufficientMemoryError`, with what would fit, if the host cannot hold the state. Then nothing has changed."""

    rule: ClassVar[Rule]
    matrix_rule: ClassVar[MatrixRule | None] = None
    more: ClassVar[Mapping[str, Any]] = {}
    checks: ClassVar[Mapping[str, Check]]

    @staticmethod
    def options_of_torch(saved: dict[str, Any]) -> dict[str, Any]:
        """Saved options of a group with our names, if torch.optim's optimizer of the same name has others."""
        return saved

    @torch.inference_mode(False)  # moments and weights outlive the call: no inference tensors
    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], *, state_dtype: str, master: str,
                 max_grad_norm: float | None, update: str = "step", overlap: str | None = None, non_finite: str,
                 dump_folder: str | os.PathLike[str]) -> None:
        defaults = defaults | dict(state_dtype=state_dtype, master=master)
        self._check(defaults)
        self.on_arrival, self._made, self.ownership = is_on_arrival(update, overlap), False, Ownership(self)
        self.non_finite = NonFinite(non_finite, Path(dump_folder))
        self.max_grad_norm = max_grad_norm
        #: True if the norm covers all gradients of the model, including parameters of other optimizers, or of none.
        self.norm_of_model = False
        self._update: Update | None = None
        super().__init__(params, defaults)
        # A former optimizer that is garbage in a reference cycle still holds its state. A copy for it may not fit in memory.
        if any(memory.held for parameter in self._parameters() if (memory := self.memory(parameter)) is not None):
            gc.collect()
        keep_groups(self.states_of, self.param_groups, self.on_arrival)
        self._take_over(self._parameters())
        self._made = True
        for streamed in owners_of(self._parameters()):
            build_kernels(self, streamed)
            if not self.on_arrival:
                streamed.hold_gradients()
            streamed.optimizer_in_backward.attach(self if self.on_arrival else None)
            streamed.store.touch_state({memory.tile for parameter in self._parameters() if (memory := self.memory(parameter))})

    @abstractmethod
    def options_of(self, group: Mapping[str, Any]) -> Any:
        """The options of a group that the rule reads, copied by value."""

    @classmethod
    def states_of(cls, group: Mapping[str, Any], names: Iterable[str], model: nn.Module,
                  tiling: Tiling) -> dict[str, ElementState]:
        """The stored state of a group's parameters, by name. `whole` states belong to the matrix rule."""
        del model, tiling
        return dict.fromkeys(names, state_of_group(group, cls.rule))

    def _check(self, group: Mapping[str, Any]) -> None:
        check_options(group, self.checks, type(self).__name__)

    @property
    def max_grad_norm(self) -> float | None:
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        self._max_grad_norm = checked_norm(value, self.on_arrival)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.ownership.check()
        self._check(param_group)
        super().add_param_group(param_group)
        try:  # the constructor takes over once all groups are checked
            if self._made:
                keep_groups(self.states_of, self.param_groups, self.on_arrival)
                self._take_over(self.param_groups[-1]["params"])
                for streamed in owners_of(self._parameters()):
                    build_kernels(self, streamed)
        except BaseException:
            self.param_groups.pop()
            raise

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError("an optimizer of a streamed model can be neither pickled nor copied: its state is its model's "
                               "memory; use state_dict() or a CheckpointWriter")

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    @property
    def streamed(self) -> Streamed:
        """The streamed model of these parameters. Raises `MegacompileError` if another optimizer has taken over."""
        self.ownership.check()
        models = list({id(streamed): streamed for streamed, _ in map(require_owner, self._parameters())}.values())
        if len(models) != 1:
            raise MegacompileError(f"an optimizer updates one streamed model, not {len(models)}: make one optimizer for each")
        return models[0]

    def release(self) -> None:
        """Frees the state, when the model is closed."""
        self.ownership.release()
        self._update = None

    def _take_over(self, parameters: Iterable[Tensor]) -> None:
        self.ownership.take_over((parameter, memory) for parameter in parameters
                                 if (memory := self.memory(parameter)) is not None)

    # ---------------------------------------------------------------- state
    @property
    def state(self) -> OptimizerState:  # type: ignore[override]
        """Waits for the update in flight. Values written to it before the next call count."""
        self.ownership.check()
        for streamed in owners_of(self._parameters()):
            streamed.evict()
            streamed.store.lend_moments()
        return self.ownership.states

    @state.setter
    def state(self, state: Mapping[Tensor, Any]) -> None:
        self.ownership.check()
        if state is not self.ownership.states:
            self.ownership.states = OptimizerState(self, state)

    def memory(self, parameter: Tensor) -> StateMemory | None:
        """The state memory of a parameter that is trained and that the forward reads; None for others."""
        streamed, name = require_owner(parameter)
        return streamed.states.get(name)

    def memory_of(self, parameter: Any) -> StateMemory | None:
        """Like `memory`, for parameters that this optimizer updates; None for any other key of `state`."""
        owner = owner_of(parameter) if isinstance(parameter, Tensor) else None
        memory = owner[0].states.get(owner[1]) if owner is not None else None
        return memory if memory is not None and memory.optimizer is self else None

    def steps(self) -> dict[str, int]:
        """Updates of each parameter that has a state, by name."""
        return {memory.name: int(state["step"]) for parameter, state in self.ownership.states.items()
                if (memory := self.memory_of(parameter)) is not None and "step" in state}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Hands the update to the lanes and returns. Parameters without `.grad` are not updated. A `closure` is called first,
        while the previous update runs, and its loss is returned. After a backward that has updated (`update`), and after
        `train_step`, there is nothing left to do. Raises the failure of an earlier update (`LaneError`). The next call
        completes that update: the missing tiles, from the same gradients (`.grad` may have been set to None since), with the
        same hyper-parameters."""
        streamed = self.streamed
        streamed.optimizer_in_backward.check_step(self)
        loss = None
        if closure is not None:
            if self._completes(streamed):
                return None
            streamed.step.check_whole()
            with torch.enable_grad():
                loss = closure()  # without the lock: its backward may run in autograd's thread
        with streamed.call_lock:
            self._take_step(streamed)
        return loss

    def _take_step(self, streamed: Streamed) -> None:
        if streamed.step.ended() or self._ended(streamed):
            streamed.raise_pending()
            streamed.step.check_whole()
            return
        streamed.settle()
        self.ownership.write_back([streamed], drop=True)
        if self._completes(streamed):
            return
        streamed.step.check_whole()
        if not (trained := [p for p in self._parameters() if p.grad is not None]):
            return
        if unread := [name for name in (require_owner(p)[1] for p in trained) if name not in streamed.tiling.position]:
            raise UnsupportedError(f"{unread[0]} has a gradient, and the streamed forward does not read it: give it to an "
                                   "optimizer of torch.optim")
        streamed.step.check_stored()
        with streamed.rank_group.failing():
            streamed.adopt_writes()
            given = {name for name in streamed.gradients if streamed.parameters[name].grad is not None}
            update = self._request(streamed, given)
            if streamed.gradients.refresh():
                streamed.step.gradients_changed()
        self._update = update
        streamed.update(self._update)

    def _completes(self, streamed: Streamed) -> bool:
        """Completes a failed update of this optimizer. Returns False if there is none, or if gradients have changed."""
        return self._update is not None and self._update is streamed.step.unfinished and streamed.complete()

    def _ended(self, streamed: Streamed) -> bool:
        """True if the update in flight belongs to this optimizer, and no gradient was stored since."""
        update = streamed.step.updating
        return update is not None and update is self._update and all(p.grad is None for p in self._parameters())

    def request(self, names: Collection[str]) -> Update:
        """An update of the parameters with these names, for a whole step or for a backward that updates."""
        streamed = self.streamed
        streamed.raise_pending()
        streamed.step.check_whole()
        streamed.adopt_writes()
        self._update = self._request(streamed, names)
        return self._update

    def prepare(self) -> None:
        """Called before a whole step, and before a backward that updates. Raises `MegacompileError` for options out of range,
        and if another optimizer updates parameters of the model."""
        self.ownership.check_alone("a whole step, or one with update='arrival', takes")
        streamed = self.streamed
        self._ready(streamed, streamed.gradients)

    def _ready(self, streamed: Streamed, names: Collection[str]) -> list[Ready]:
        """The parameters with these names, with their current options and their states. Raises `MegacompileError` for options
        and states that an update cannot use."""
        self.ownership.write_back([streamed], drop=True)
        groups = []
        for group in self.param_groups:
            check_complete(group, self.checks, type(self).__name__)
            groups.append((self._read(group), group["params"]))
            check_kept(self, group)
        found = [(options, parameter, memory) for options, parameters in groups for parameter in parameters
                 if (memory := self.memory(parameter)) is not None and memory.name in names]
        if len({memory.name for _, _, memory in found}) < len(found):
            raise MegacompileError("a parameter is in the optimizer's groups twice: leave it in one of them, once")
        self.ownership.take_over((parameter, memory) for _, parameter, memory in found if memory.optimizer is not self)
        return [(options, memory, self.ownership.states.ready(parameter, memory)) for options, parameter, memory in found]

    def _read(self, group: Mapping[str, Any]) -> GroupOptions:
        """A copy of a group's options, in the form that the rules read."""
        copied = {name: value for name, value in group.items() if name != "params"}
        return GroupOptions(self.options_of(copied), copied, self.matrix_rule)

    def _request(self, streamed: Streamed, names: Collection[str]) -> Update:
        """An update of the parameters with these names, with the current hyper-parameters."""
        ready = self._ready(streamed, names)
        with counting:
            before = self._update if self._update is not None and self._update.open else None
            segments = segments_of(streamed.tiling, ready)
        counted = ([name for name in streamed.gradients if name in names] if self.norm_of_model
                   else [memory.name for _, memory, _ in ready])
        return Update(self.rule, segments, positions_of(streamed.tiling, counted), self.max_grad_norm, before=before,
                      on_arrival=self.on_arrival, states=[state for _, _, state in ready],
                      report=functools.partial(self.non_finite.report, streamed.step.skipped),
                      matrix_rule=self.matrix_rule, matrices=matrix_positions(streamed.tiling, segments))

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the last step's gradients before clipping. None before the first step. Waits until the norm is known,
        but not for the update."""
        if self._update is None:
            return None
        update, streamed = self._update, self.streamed
        if update.norm is None:
            with streamed.call_lock, streamed.guarded():
                streamed.drain(sooner=update.judged)
            if update.norm is None or update.refused:
                streamed.settle()  # raises its failure
        return update.norm

    def norm_of_last_step(self) -> Callable[[], float | None]:
        """A function that later returns the `grad_norm` of this step, even after further steps. It never waits: it returns None
        until the update has computed the norm, which is known once the next step's loss is."""
        update = self._update
        return lambda: None if update is None else update.norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            self.streamed.rank_group.agree("zero_grad")  # a rank may still read what this one overwrites
            self.streamed.settle()  # the update in flight reads gradients
            self.streamed.step.check_whole()  # an update that stopped half-way still needs them
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Views of tiles, and copies of what is on disk: save or copy them before the next step. Call this before `close()`,
        which frees the state. Tensors that were returned earlier stay valid."""
        self.settle()
        saved = super().state_dict()
        saved["state"] = {index: dict(state) for index, state in saved["state"].items()}  # plain dicts, which unpickle anywhere
        if (streamed := self.streamed).store.division is not None:
            self._make_whole(streamed, saved["state"])
            return saved
        for index, parameter in enumerate(self._parameters()):
            owner = owner_of(parameter)
            remainder = owner[0].writes.remainder(owner[1]) if owner else self._remainder(parameter)
            if remainder is not None:
                saved["state"].setdefault(index, {})["remainder"] = remainder
        return saved

    def _make_whole(self, streamed: Streamed, states: dict[int, dict[str, Any]]) -> None:
        """Replaces tensors that hosts divide by copies of the whole, on every rank."""
        indexes = {require_owner(parameter)[1]: index for index, parameter in enumerate(self._parameters())}
        with streamed.rank_group.failing():
            for name, values in whole_values(streamed, ("remainder", "moments"), "state_dict"):
                if name in indexes and (keys := {*states.get(indexes[name], ()), "remainder"} & values.keys()):
                    states.setdefault(indexes[name], {}).update((key, values[key].clone()) for key in keys)

    def _remainder(self, parameter: Tensor) -> Tensor | None:
        """The low bits of a parameter's FP32 master, in its tile; None for an fp32 parameter."""
        states = self.ownership.states
        memory = self.memory(parameter) if owner_of(parameter) else getattr(states.get(parameter), "memory", None)
        return memory.remainder if memory is not None else None

    def settle(self) -> None:
        """Waits until the host's state and remainders belong to the last step. Raises the failure of an update."""
        self.ownership.check()
        for streamed in owners_of(self._parameters()):
            streamed.copy_back_whole()
        self.ownership.write_back(owners_of(self._parameters()))

    @exclusive
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies moments and remainders into the tiles, exactly: the base class would cast them to the parameter's dtype. Load
        the model first: a remainder belongs to the weight that it was saved with, and loading a weight clears it.

        As in `torch.optim`, a parameter without a saved state restarts its moments. A parameter without a saved remainder keeps
        its master.

        Raises `MegacompileError` for other groups, parameters or shapes, and for invalid options. Then nothing has changed."""
        streamed = self.streamed
        with load_hooks(self, state_dict) as given:
            with streamed.rank_group.all_or_none("the optimizer's load_state_dict"):
                groups, states = check_saved(self, given)
            with loading(streamed, "the optimizer's load_state_dict", parts=STATE, torn=("state",)):
                streamed.adopt_writes()  # clears remainders before the saved ones are loaded
                self.put_state(groups, states)

    @torch.no_grad()
    def put_state(self, groups: Sequence[Mapping[str, Any]], states: Sequence[SavedState]) -> None:
        """Loads a checked state. First evict what is on the device, and make sure that tiles may be written."""
        self._update = None
        self.streamed.step.ended()
        for options, group in zip(groups, self.param_groups, strict=True):
            group.update(options)
        self.ownership.take_over((parameter, memory) for parameter, memory, _ in states if memory.optimizer is not self)
        for parameter, memory, saved in states:
            self.ownership.states[parameter] = {key: saved[key] for key in memory.keys if key in saved}
            self.ownership.states.ready(parameter, memory)
            if memory.remainder is not None and "remainder" in saved and memory.writable:
                memory.put("remainder", saved["remainder"])

    def named_groups(self) -> list[tuple[dict[str, Any], list[str]]]:
        """Each parameter group: its options, and its parameters' names in the model."""
        return [({k: v for k, v in group.items() if k not in ("params", "param_names")},
                 [require_owner(parameter)[1] for parameter in group["params"]]) for group in self.param_groups]

    def master(self, parameter: Tensor) -> Tensor:
        """A copy of a parameter's FP32 master weight, in the parameter's shape."""
        return read(self.streamed, parameter, self._remainder(parameter))

    @torch.no_grad()
    def set_master(self, parameter: Tensor, master: Tensor) -> None:
        """Sets a parameter's FP32 master, including the remainder. With several ranks, sets all of them to rank 0's."""
        write(self.streamed, parameter, self.memory(parameter), self._remainder(parameter), master)
