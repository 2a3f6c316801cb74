"""The forms of one streamed model: graphs, plans and kernels for each kind of batch, over the same tiles.

A plain batch has the graphs that the model was streamed with. Padding that must be seen, several sequences in a row, evaluation
mode where it computes something else: each has graphs of its own, captured when the first such batch comes.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from megacompile.errors import CaptureError, UnsupportedError
from megacompile.frontend.batches.pairs import argument, masks_in
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.template import TemplateInput
from megacompile.frontend.tracing.adapters import forward_signature
from megacompile.inputs.batch import batch_types
from megacompile.inputs.repacking import Repacking
from megacompile.ir.plan import PLAIN, Form
from megacompile.planning.config import StreamConfig
from megacompile.planning.device import device_budget
from megacompile.planning.memory_budget import margins
from megacompile.planning.planner import Planner
from megacompile.planning.step_time import pace_of
from megacompile.predict.hardware import Hardware
from megacompile.runtime.lanes import Backend
from megacompile.sizes import parse_bytes
from megacompile.streaming.adapters import AdapterStates
from megacompile.streaming.binding import Binder
from megacompile.weights.tiling import Tiling


@dataclass(frozen=True)
class Served:
    """What serves batches of one form."""

    captured: CapturedModel
    planner: Planner
    binder: Binder

    @cached_property
    def types(self) -> Mapping[str, TemplateInput]:
        """Shape and dtype of each batch argument."""
        return batch_types(self.captured)

    @property
    def device(self) -> torch.device:
        """Where its kernels run."""
        return self.binder.device


class Forms:
    """State: what serves each form that has come."""

    def __init__(self, model: nn.Module, captured: CapturedModel, tiling: Tiling, config: StreamConfig, backend: Backend,
                 host_bytes: int) -> None:
        self.model, self.tiling = model, tiling
        self.parameters = frozenset(forward_signature(model).parameters)  # of the model's forward, by name
        compiling = config.compile if config.compile is not None else backend.device.type == "cuda"
        budget = device_budget(config, backend.free_bytes())
        planner = Planner(captured, tiling, config, budget, parse_bytes(config.locked_memory), *margins(backend.device.type),
                          fused=compiling, host_bytes=host_bytes, output=captured.main_output, keeping=True)
        planner.pace = pace_of(captured, tiling, Hardware.known(backend.device), compiling, config.passes)
        binder = Binder(captured, tiling, backend.device, compiling, compiling and config.dynamic is not False,
                        config.micro_batch_size)
        self.first = Served(captured, planner, binder)
        self.adapters = AdapterStates(model)
        self.repacking = Repacking(self, config.repack)
        self._known = {PLAIN: self.first}
        self._reads_masks: dict[Form, bool] = {}

    def __iter__(self) -> Iterator[Served]:
        return iter(self._known.values())

    def form_of(self, further: tuple[str, ...], training: bool, images: int = 1) -> Form:
        """The form of a batch with `further` arguments and `images` for each sequence in a mode, with adapters as they are now;
        that of training mode where evaluation mode is the same."""
        form = Form(further, without_adapters=self.adapters.disabled(), images=images)
        return form if training or self.serve(form).captured.same_in_evaluation() else replace(form, evaluating=True)

    def reads_masks(self, form: Form) -> bool:
        """Whether our attention, in every layer, reads the masks of pairs that a form's batches have. May capture it."""
        if form not in self._reads_masks:
            try:
                self._reads_masks[form] = self.serve(form).captured.fused_attention
            except (CaptureError, UnsupportedError):
                self._reads_masks[form] = False
        return self._reads_masks[form]

    def check_modes(self, captured: CapturedModel) -> None:
        """Raises `UnsupportedError` where modules inside the model are in another mode than they were captured in, and that
        matters."""
        unlike = [name for name, module in self.model.named_modules() if module.training is (name in captured.evaluating)]
        if unlike and (captured.form.evaluating or not captured.same_in_evaluation()):
            module = self.model.get_submodule(unlike[0])
            mode, call = ("training", "eval") if module.training else ("evaluation", "train")
            raise UnsupportedError(
                f"{unlike[0]} is in {mode} mode and {type(self.model).__name__} is not, which graphs of the whole model do not "
                f"know: call model.{call}(), or let the {call}() of the model's class leave it as it is, before stream()")

    def serve(self, form: Form) -> Served:
        """What serves a form, captured at its first use. Raises what capturing raises, and `UnsupportedError` where the model
        reads other weights then than the tiles were made for."""
        if form not in self._known:
            self._known[form] = self._capture(form)
        return self._known[form]

    def _capture(self, form: Form) -> Served:
        planner, binder = self.first.planner, self.first.binder
        try:
            captured = self.first.captured.in_form(form)
        except CaptureError as reason:
            if not masks_in(form.further):
                raise
            raise CaptureError(f"{type(self.model).__name__} cannot be captured with {', '.join(form.further)}: leave the mask "
                               f"out, or pass one that the model takes without streaming\n{reason}") from reason
        read = {source.name for call in captured.calls for source in call.sources if source.kind == "batch"}
        if ignored := [key for key in map(argument, form.further) if key not in read]:
            raise UnsupportedError(f"{type(self.model).__name__} does nothing with {', '.join(ignored)}: leave it out")
        if not self._reads_as_planned(captured, form):
            what = ("without its adapters" if form.without_adapters else "in evaluation mode" if form.evaluating
                    else f"with {', '.join(form.further)}")
            raise UnsupportedError(f"{what} the model reads its weights in other layers than in training without: a streamed "
                                   "model cannot do both, leave it out")
        pace = planner.pace and pace_of(captured, self.tiling, planner.pace.durations.hardware, binder.compiling,
                                        planner.config.passes)
        return Served(captured, replace(planner, captured=captured, pace=pace),
                      replace(binder, captured=captured, compiled={}, for_any_rows={}))

    def _reads_as_planned(self, captured: CapturedModel, form: Form) -> bool:
        """Whether there are the same calls, and each reads parameters of its own tiles, of each of them; where adapters are
        off, and nothing is trained, of some."""
        if [call.name for call in captured.calls] != [call.name for call in self.first.captured.calls]:
            return False
        for call in captured.calls:
            places = [self.tiling.read_at.get(source.name) for source in call.sources if source.kind == "parameter"]
            read, own = {place[0] if place is not None else None for place in places}, set(self.tiling.tiles_of[call.name])
            if read - own or (read != own and not form.without_adapters):
                return False
        return True
