"""The captures of one streamed model: graphs, plans and kernels for each kind of batch, over the same tiles.

A plain batch has the graphs that the model was streamed with. Padding that must be seen, several sequences in a row, evaluation
mode where it computes something else, lengths at which the model's code branches: each has graphs of its own, captured when the
first such batch comes.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from megacompile.errors import CaptureError, UnsupportedError, first_line
from megacompile.frontend.batches.pair_masks import argument, masks_in
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.template import TemplateInput
from megacompile.inputs.batch import batch_types
from megacompile.inputs.repacking import Repacking
from megacompile.ir.plan import PLAIN, CaptureKey
from megacompile.planning.config import StreamConfig
from megacompile.planning.device import device_budget
from megacompile.planning.memory_budget import margins
from megacompile.planning.planner import Planner
from megacompile.planning.step_time import simulator_of
from megacompile.predict.hardware import Hardware
from megacompile.runtime.backends.lanes import Backend
from megacompile.sizes import parse_bytes
from megacompile.streaming.adapters import AdapterStates
from megacompile.streaming.programs.binding import Binder
from megacompile.weights.tiling import Tiling

#: How often a model is captured again for lengths at which its code does something else.
MOST_LENGTHS = 8


@dataclass(frozen=True)
class Served:
    """What serves the batches of one capture key. `planner`: with what is known of the capture; `Shapes.planner_for` adds what
    other models take and what earlier plans fixed."""

    captured: CapturedModel
    planner: Planner
    binder: Binder

    @cached_property
    def types(self) -> Mapping[str, TemplateInput]:
        """Shape and dtype of each batch argument."""
        return batch_types(self.captured)

    @property
    def device(self) -> torch.device:
        """The device that runs the kernels of this capture."""
        return self.binder.device


class ModelCaptures:
    """State: what serves each capture key so far, under the options of now (`plan_with`)."""

    def __init__(self, model: nn.Module, captured: CapturedModel, tiling: Tiling, config: StreamConfig, backend: Backend,
                 host_bytes: int) -> None:
        self.model, self.tiling = model, tiling
        compiling = config.compile if config.compile is not None else backend.device.type == "cuda"
        budget = device_budget(config, backend.free_bytes())
        planner = Planner(captured, tiling, config, budget, parse_bytes(config.pinned_memory), *margins(backend.device.type),
                          fused=compiling, host_bytes=host_bytes, output=captured.main_output,
                          keeping=True,
                          simulator=simulator_of(captured, tiling, Hardware.known(backend.device), compiling, config.passes))
        self.adapters = AdapterStates(model)
        any_size = compiling and config.dynamic is not False
        # Ranks pad their rows to those of the longest length on any rank.
        self.repacking = Repacking(self, config.repack, any_size, alone=tiling.ranks * tiling.hosts == 1)
        binder = Binder(captured, tiling, backend.device, compiling, any_size, config.micro_batch_size, self.repacking.least)
        self._known = {PLAIN: Served(captured, planner, binder)}
        self._reads_masks: dict[CaptureKey, bool] = {}
        self._tried: dict[tuple[CaptureKey, int], str] = {}  # and why the model could not be captured for this length, or ""

    @property
    def first(self) -> Served:
        """What serves plain batches."""
        return self._known[PLAIN]

    @property
    def config(self) -> StreamConfig:
        """The options that plans are made under now."""
        return self.first.planner.config

    def plan_with(self, **known: Any) -> None:
        """Changes what the planners of all captures know (fields of `Planner`): plans are made with it from now on."""
        self._known = {key: replace(served, planner=replace(served.planner, **known)) for key, served in self._known.items()}

    def keep(self, tiling: Tiling) -> None:
        """Plans for other optimizer state from now on."""
        self.tiling = tiling
        known = {}
        for key, served in self._known.items():
            simulator = served.planner.simulator
            again = None if simulator is None else simulator_of(
                served.captured, tiling, simulator.durations.hardware, served.binder.compiling, served.planner.config.passes)
            known[key] = replace(served, planner=replace(served.planner, tiling=tiling, simulator=again))
        self._known = known

    def __iter__(self) -> Iterator[Served]:
        return iter(self._known.values())

    def capture_key(self, further: tuple[str, ...], training: bool, images: int = 1) -> CaptureKey:
        """The capture key of a batch with `further` arguments and `images` for each sequence, and adapters as they are. The
        key of training mode also serves evaluation mode where both compute the same."""
        key = CaptureKey(further, without_adapters=self.adapters.disabled(), images=images)
        return key if training or self.serve(key).captured.same_in_evaluation() else replace(key, evaluating=True)

    def key_at(self, key: CaptureKey, length: int) -> CaptureKey:
        """The key of a capture that holds for sequences of `length` tokens, where `key` serves the batch in all else. The model
        is captured again if its code branches on the length, at most `MOST_LENGTHS` times. If no capture holds, returns `key`:
        `check_shape` then refuses the batch, and names the branch. A key that has a `traced_length` already is returned."""
        found = self.known_key_at(key, length)
        if self.serve(found).captured.holds_at(length) or (key, length) in self._tried:
            return found
        if sum(tried == key for tried, _ in self._tried) == MOST_LENGTHS:
            return key
        self._tried[key, length] = ""
        try:
            self.serve(replace(key, traced_length=length))
        except (CaptureError, UnsupportedError) as error:
            self._tried[key, length] = first_line(error)
        return self.known_key_at(key, length)

    def why_not_at(self, key: CaptureKey, length: int) -> str:
        """What `key_at` met when it captured the model for this length; "" if that has not failed."""
        return self._tried.get((key, length), "")

    def known_key_at(self, key: CaptureKey, length: int) -> CaptureKey:
        """As `key_at`, but does not capture the model again."""
        if key.traced_length or self.serve(key).captured.holds_at(length):
            return key
        known = (each for each in self._known if each != key and replace(each, traced_length=0) == key)
        return next((each for each in known if self.serve(each).captured.holds_at(length)), key)

    def reads_masks(self, key: CaptureKey) -> bool:
        """Whether our attention, in every layer, reads the masks of pairs of a key's batches. May capture it."""
        if key not in self._reads_masks:
            try:
                self._reads_masks[key] = self.serve(key).captured.fused_attention
            except (CaptureError, UnsupportedError):
                self._reads_masks[key] = False
        return self._reads_masks[key]

    def check_modes(self, captured: CapturedModel) -> None:
        """Raises `UnsupportedError` where modules inside the model are in another mode than they were captured in, and that
        matters."""
        unlike = [name for name, module in self.model.named_modules() if module.training is (name in captured.evaluating)]
        if unlike and (captured.key.evaluating or not captured.same_in_evaluation()):
            module = self.model.get_submodule(unlike[0])
            mode, call = ("training", "eval") if module.training else ("evaluation", "train")
            raise UnsupportedError(
                f"{unlike[0]} is in {mode} mode, but {type(self.model).__name__} is not, and its graphs have one mode for the "
                f"whole model: call model.{call}(), or override {call}() in the model's class so that it leaves {unlike[0]} as "
                "it is, before stream()")

    def serve(self, key: CaptureKey) -> Served:
        """What serves a key, captured at its first use. Raises what capturing raises, and `UnsupportedError` where the model
        reads other weights then than the tiles were made for."""
        if key not in self._known:
            self._known[key] = self._capture(key)
        return self._known[key]

    def _capture(self, key: CaptureKey) -> Served:
        planner, binder = self.first.planner, self.first.binder
        try:
            captured = self.first.captured.for_key(key)
        except CaptureError as reason:
            if not masks_in(key.further):
                raise
            raise CaptureError(f"{type(self.model).__name__} cannot be captured with {', '.join(key.further)}: leave the mask "
                               f"out, or pass one that the model takes without streaming\n{reason}") from reason
        read = {source.name for call in captured.calls for source in call.sources if source.kind == "batch"}
        if ignored := [name for name in map(argument, key.further) if name not in read]:
            raise UnsupportedError(f"{type(self.model).__name__} does nothing with {', '.join(ignored)}: leave it out")
        what = (f"with {key.traced_length} tokens" if key.traced_length else "without its adapters" if key.without_adapters
                else "in evaluation mode" if key.evaluating else f"with {', '.join(key.further)}")
        if not self._reads_as_planned(captured, key):
            raise UnsupportedError(f"{what} the model reads its weights in other layers than in other training batches, "
                                   "and a streamed model supports only one of the two: pass only batches like the one that it "
                                   "was streamed with")
        if key.traced_length and not captured.reads_batches_as(self.serve(replace(key, traced_length=0)).captured):
            raise UnsupportedError(f"{what} the model treats padding, rows or evaluation differently than with other lengths: "
                                   "use only lengths that take one branch, or remove the branch on the length from its forward")
        hardware = planner.simulator.durations.hardware if planner.simulator is not None else None
        simulator = simulator_of(captured, self.tiling, hardware, binder.compiling, planner.config.passes)
        return Served(captured, replace(planner, captured=captured, simulator=simulator),
                      replace(binder, captured=captured, compiled={}, for_any_size={}))

    def _reads_as_planned(self, captured: CapturedModel, key: CaptureKey) -> bool:
        """Whether there are the same calls, and each reads parameters of its own tiles, of each of them; where adapters are
        off, and nothing is trained, of some."""
        if [call.name for call in captured.calls] != [call.name for call in self.first.captured.calls]:
            return False
        for call in captured.calls:
            positions = [self.tiling.read_at.get(source.name) for source in call.sources if source.kind == "parameter"]
            read = {position[0] if position is not None else None for position in positions}
            own = set(self.tiling.tiles_of[call.name])
            if read - own or (read != own and not key.without_adapters):
                return False
        return True
