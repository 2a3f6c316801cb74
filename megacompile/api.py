"""`stream(model)`: the same model, streamed; and its handle, `model.megacompile`."""
from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megacompile.batch import Arguments, batch_types, read_arguments
from megacompile.config import StreamConfig
from megacompile.durations import Durations
from megacompile.editing import editable_text, load
from megacompile.errors import MegacompileError, UnsupportedError
from megacompile.frontend.attention_kernels import fused_kernel
from megacompile.frontend.capture import CapturedModel, capture
from megacompile.hardware import Hardware
from megacompile.lease import LogitsWithoutLoss, StreamedLoss, refuse_hooks
from megacompile.locked import spend_locked_memory
from megacompile.optim import AdamW, check_unclaimed, claim, disclaim
from megacompile.passes.template import Target
from megacompile.plan import Plan, Shape
from megacompile.program import Op, Program
from megacompile.recording import Recording
from megacompile.runtime.cuda import CudaBackend
from megacompile.runtime.lanes import Backend
from megacompile.runtime.threads import ThreadBackend
from megacompile.shapes import CompiledShape
from megacompile.simulate import Timeline
from megacompile.sizes import parse_bytes
from megacompile.streamed import Streamed
from megacompile.tiling import Tiling, build_store, check_device_memory, check_host_memory

M = TypeVar("M", bound=nn.Module)


def stream(model: M, *, layers: str | None = None, example: Mapping[str, Tensor] | None = None, **options: Any) -> M:
    """Moves a model's weights into host tiles and trains it layer by layer from there. Returns the same object.

    Args:
        model: a causal language model of transformers, or any decoder `nn.Module` whose forward returns its loss.
        layers: qualified name of the `nn.ModuleList` of layers, where it is not found.
        example: batch arguments, integer tensors [batch, length], where they are not `input_ids` and `labels`.
        options: the fields of `StreamConfig`.

    Raises, before anything of the model has changed: `CaptureError`, `UnsupportedError`, `InsufficientMemoryError`,
    `DeviceUnavailableError`, and `MegacompileError` for an option out of range.
    """
    check_module(model)
    if getattr(model, "megacompile", None) is not None:
        raise MegacompileError("the model is streamed already: model.megacompile.close() first to stream it with other options")
    if any(p.is_meta for p in model.parameters()):
        raise UnsupportedError("the model is on the meta device and has no weights to train: load them first, or use "
                               "megacompile.schedule(model, ...) to look at its schedule")
    config = StreamConfig.of(**options)
    backend = make_backend(config.device)
    captured, tiling = analyse(model, config, backend.device.type, layers, example, fused_kernel(backend.device))
    check_host_memory(tiling)
    check_device_memory(tiling, parse_bytes(config.device_memory) or backend.free_bytes())
    spend_locked_memory(captured, tiling, parse_bytes(config.locked_memory), config.gradient_slabs)
    store = build_store(model, tiling)
    streamed = Streamed(model, captured, tiling, store, backend, config)
    claim(streamed)
    handle = Handle(streamed)
    model.__dict__["megacompile"] = handle
    model.__class__ = _streamed_class(type(model))
    gc.collect()  # the weights as they were
    return model


def check_module(model: Any) -> None:
    """Raises `MegacompileError` for what is no model."""
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise MegacompileError(f"a model must be a torch.nn.Module, not {what}: build or load the model first")


def make_backend(device: str | torch.device | None) -> Backend:
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return CudaBackend(chosen.index or 0) if chosen.type == "cuda" else ThreadBackend()


def analyse(model: nn.Module, config: StreamConfig, device_type: str, layers: str | None,
            example: Mapping[str, Tensor] | None, fused_attention: str = "flash") -> tuple[CapturedModel, Tiling]:
    """Captures a model for a device and divides its parameters into tiles. Changes nothing. `fused_attention`: see `Target`."""
    refuse_hooks(model)
    check_unclaimed(model)
    if wrong := [key for key, value in (example or {}).items() if not isinstance(value, Tensor)]:
        raise MegacompileError(f"example[{wrong[0]!r}] must be an integer tensor [batch, length], not a "
                               f"{type((example or {})[wrong[0]]).__name__}")
    if not any(p.requires_grad for p in model.parameters()):
        raise UnsupportedError(f"no parameter of {type(model).__name__} is trained, and a model without a gradient cannot be "
                               "streamed yet: leave requires_grad=True, and evaluate it under torch.no_grad()")
    dtypes = {config.dtype or p.dtype for p in model.parameters()}
    if not dtypes <= {torch.float32, torch.bfloat16}:
        raise UnsupportedError(f"parameters are {', '.join(sorted(map(str, dtypes)))}: megacompile trains float32 and bfloat16")
    dtype = torch.bfloat16 if torch.bfloat16 in dtypes else torch.float32
    subject = model if config.dtype is None else _meta_twin(model, config.dtype)
    captured = capture(subject, layers=layers, example=example, pipeline=config.template_passes,
                       target=Target(device_type, dtype, fused_attention))
    tiling = Tiling.of(model, captured.calls, config.dtype)
    for option in ("resident", "resident_state"):
        names = getattr(config, option)
        if names not in ("all", None) and (unknown := set(names) - set(tiling.layouts)):
            raise MegacompileError(f"{option} names {', '.join(sorted(unknown))}, which are no tiles of "
                                   f"{type(model).__name__}: it has {', '.join(tiling.layouts)}")
    return captured, tiling


def _meta_twin(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model without data, its parameters in another dtype. Buffers keep theirs: rotary frequencies are fp32 on purpose."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, dtype=dtype, device="meta"), parameter.requires_grad)
    return copy.deepcopy(model, memo)


class Handle:
    """`model.megacompile`: what was captured, planned and scheduled, and control over what runs."""

    def __init__(self, streamed: Streamed) -> None:
        self.streamed = streamed
        self.anchor = torch.zeros((), requires_grad=True)
        captured = streamed.captured
        self._types = batch_types(captured)

    # ---------------------------------------------------------------- calls of the model
    def call(self, model: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        streamed = self.streamed
        given = self._arguments(model, forward, args, kwargs)
        rebuild = streamed.captured.output.rebuild
        if not (torch.is_grad_enabled() and given.has_labels):
            with torch.inference_mode(False), torch.no_grad():  # slots outlive the call: no inference tensors
                loss, logits = streamed.evaluate(given.inputs, given.normaliser)
            if torch.is_grad_enabled() and logits is not None:
                logits = LogitsWithoutLoss.apply(self.anchor, logits)
            return rebuild(loss, logits)
        loss, lease = streamed.forward(given.inputs, given.normaliser)
        anchor = self.anchor.view_as(self.anchor)
        return rebuild(StreamedLoss.apply(anchor, loss, streamed, lease, *streamed.parameters.values()), None)

    def _arguments(self, model: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """What the user passes, once nothing of the model or its surroundings forbids honouring it."""
        streamed = self.streamed
        if torch.is_autocast_enabled(streamed.backend.device.type):
            dtype = torch.get_autocast_dtype(streamed.backend.device.type)
            if any(p.dtype != dtype for p in streamed.parameters.values()):
                raise UnsupportedError(f"autocast to {dtype} differs from the dtype that the model was streamed in: "
                                       f"leave autocast out, or stream(model, dtype={dtype})")
        refuse_hooks(model)
        streamed.writes.check_model(model)
        streamed.captured.check_mode(model.training)
        return read_arguments(model, forward, streamed.captured, self._types, args, kwargs)

    def train_step(self, batch: Mapping[str, Any], optimizer: AdamW) -> Tensor:
        """One whole training step as one program: forward, backward and update of `batch`, which has its labels. The loss,
        0-d, on the compute device, without gradient. Whole steps alone run in waves (see `StreamConfig.waves`) and update as
        gradients arrive (`AdamW(overlap="backward")`); `.grad` stays None.

        Raises `MegacompileError` if gradients of earlier backwards wait for a step, `UnsupportedError` without labels."""
        streamed = self.streamed
        given = self._arguments(streamed.model, _original_class(streamed.model).forward.__get__(streamed.model), (), batch)
        if not given.has_labels:
            raise UnsupportedError(f"train_step needs labels ({', '.join(streamed.captured.labels)}): pass them in the batch")
        if optimizer.streamed is not streamed:
            raise MegacompileError("the optimizer belongs to another model: make one of this model's parameters")
        if any(streamed.parameters[name].grad is not None for name in streamed.gradients):
            raise MegacompileError("gradients of an earlier backward wait for a step: call step() or zero_grad() first")
        return streamed.train_step(given.inputs, given.normaliser, optimizer.request(), optimizer.overlap is not None)

    # ---------------------------------------------------------------- looking
    def compiled(self, batch: Mapping[str, Tensor] | None = None, *, training: bool = True,
                 update: str | None = None, whole_step: bool = False) -> CompiledShape:
        """The compiled shape of a batch; of the last one without. `training` False: of an evaluation, as a batch without labels
        always is. Of a training step: `update` is "step" or "arrival" (None: as the optimizer does that was made last), and
        `whole_step` asks for that of a `train_step`. Compiles, runs nothing."""
        streamed = self.streamed
        if batch is None:
            if streamed.shapes.latest is None:
                raise MegacompileError("nothing has been compiled yet: pass a batch, or run one")
            return streamed.shapes.latest
        known = streamed.captured.batch_inputs
        inputs = {k: v for k, v in batch.items() if k in known} if isinstance(batch, Mapping) else {}
        first = next(iter(inputs.values()), None)
        if not isinstance(first, Tensor) or first.dim() < 2:
            raise MegacompileError(f"a batch must map {', '.join(known)} to tensors [batch, length]: this is a "
                                   f"{type(batch).__name__} without such")
        shape = streamed.shape_of(inputs, training=training and set(known) <= inputs.keys())
        if shape.training:
            shape = replace(shape, update=update or shape.update, whole_step=whole_step)
        return streamed.compiled(shape)

    def program(self, batch: Mapping[str, Tensor] | None = None, stage: str | None = None) -> Program:
        """The program for a batch's shape: the one that runs, or as the pass of that name left it."""
        stages = self.compiled(batch).compiled.stages
        if stage is None:
            return self.compiled(batch).program
        if stage not in stages:
            raise MegacompileError(f"there is no stage {stage!r}: there are {', '.join(stages)}")
        return stages[stage]

    def table(self, batch: Mapping[str, Tensor] | None = None, section: str | None = None) -> str:
        return self.program(batch).table(section)

    def text(self, batch: Mapping[str, Tensor] | None = None, **which: Any) -> str:
        """The program for a batch's shape (`which`, as for `compiled`), as text that says what it was made for: it may be
        edited, and `load_program` runs it."""
        return editable_text(self.compiled(batch, **which))

    @property
    def stages(self) -> dict[str, Program]:
        """Every stage of the last program."""
        return self.compiled().compiled.stages

    @property
    def plan(self) -> Plan:
        """The plan of the last program."""
        return self.compiled().plan

    @property
    def stats(self) -> dict[str, Any]:
        """Counters, sizes in bytes and times in seconds. `compiled`: graphs that inductor compiled, `compiled_from_cache` that
        an earlier process had; `compile_s`, what both took; `capture_s`, the model's capture and templates."""
        streamed = self.streamed
        return dict(
            steps=streamed.steps, shapes=len(streamed.shapes), templates=len(streamed.captured.templates),
            compiled_variants=len(streamed.binder.compiled), capture_s=streamed.captured.seconds,
            compiled=streamed.binder.inductor.compiled, compiled_from_cache=streamed.binder.inductor.from_cache,
            compile_s=streamed.binder.inductor.seconds,
            host_bytes=sum(streamed.store.bytes().values()) + streamed.arena.slab_bytes() + streamed.checkpoints.bytes(),
            host_parts=streamed.store.bytes(), checkpoint_bytes=streamed.checkpoints.bytes(),
            slab_bytes=streamed.arena.slab_bytes(), slot_bytes=streamed.arena.device_bytes(),
            peak_device_bytes=streamed.backend.peak_bytes(),
            predicted_device_bytes=max((s.estimate.total for s in streamed.shapes.table.values()), default=0),
            parameters=sum(x.parameters for x in streamed.tiling.layouts.values()))

    def record(self) -> Recording:
        """A context in which each instruction's start and end are recorded, on the device's own clock: see `Recording`."""
        return Recording(self.streamed)

    def simulate(self, batch: Mapping[str, Tensor] | None = None, hardware: str | Path | Hardware | None = None,
                 without: Callable[[Op], bool] | None = None) -> Timeline:
        """What `record` would show of some steps, predicted: of a batch's program, or of the last one; here, or on `hardware`
        (as in `megacompile.schedule`). Ops that are `without` take no time. Raises `MegacompileError` for a machine of which
        nothing is known."""
        streamed, shape = self.streamed, self.compiled(batch)
        if not isinstance(hardware, Hardware):
            hardware = Hardware.here(streamed.backend.device) if hardware is None else Hardware.find(hardware)
        durations = Durations(streamed.captured, streamed.tiling.layouts, hardware, streamed.binder.compiling)
        return durations.simulate(shape.program, shape.plan, without)

    # ---------------------------------------------------------------- control
    def load_program(self, source: str | Path) -> Shape:
        """Runs an edited `text` from now on for the shape that it was made for, which is returned: a string, or a file.
        Forwards that are open go on with the program that they began with. Evaluations have a program of their own
        (`text(batch, training=False)`).

        Raises `ProgramError` if the text does not parse or is not proved safe, or was made for another model;
        `InsufficientMemoryError` if its slots do not fit. Then nothing has changed."""
        streamed = self.streamed
        beside = {*streamed.shapes.table.values(), *(lease.shape for lease in streamed.open_leases()), streamed.trained,
                  streamed.residency.shape}
        loaded = load(source, streamed.shapes, [shape.program for shape in beside if shape is not None])
        streamed.shapes.adopt(loaded)
        return loaded.shape

    def unload_program(self, shape: Shape | None = None) -> None:
        """Goes back to the compiled program of a shape, or of all. Raises `MegacompileError` if none was loaded for it."""
        if not self.streamed.shapes.drop(shape):
            raise MegacompileError("no edited program is loaded" + (f" for {shape}" if shape is not None else "")
                                   + ": there is nothing to go back from")

    def synchronize(self) -> None:
        """Waits for updates in flight. Afterwards parameters, gradients and optimizer state that you hold are current."""
        self.streamed.residency.bring_home()

    def whole(self) -> None:
        """As `synchronize`; raises `TornError` if the weights are not all of one step."""
        self.streamed.settle()
        self.streamed.check_whole()

    def close(self) -> None:
        """Gives everything back: what remains is a plain model on the CPU, trained. Raises, when that is done, what an
        update in flight failed with."""
        model = self.streamed.model
        try:
            self.streamed.close()
        finally:
            disclaim(self.streamed)
            self.streamed.shapes.close()
            if isinstance(model, _StreamedModule):
                model.__class__ = _original_class(model)  # type: ignore[assignment]
                del model.__dict__["megacompile"]


class _StreamedModule(nn.Module):
    """What changes in a streamed model's class: calls go to the handle, reads wait for updates in flight."""

    megacompile: Handle

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.megacompile.call(self, super().forward, args, kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise UnsupportedError("a streamed model's weights cannot be moved or cast: model.megacompile.close() first")

    def to(self, *args: Any, **kwargs: Any) -> Any:
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        here = self.megacompile.streamed.backend.device
        if dtype is not None and any(p.dtype != dtype for p in self.megacompile.streamed.parameters.values()):
            raise UnsupportedError(f"a streamed model cannot be cast to {dtype}: close() it first, or give dtype= to stream()")
        if device is not None and (device.type != here.type or device.index not in (None, here.index or 0)):
            raise UnsupportedError(f"a streamed model computes on {here} and cannot be moved to {device}: close() it first")
        return self

    def cuda(self, device: Any = None) -> Any:
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def cpu(self) -> Any:
        return self.to("cpu")

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        self.megacompile.streamed.settle()
        return super().named_parameters(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            self.megacompile.whole()  # an update in flight reads them, and one that stopped half-way needs them yet
            super().zero_grad(set_to_none)
            return
        for _, parameter in nn.Module.named_parameters(self):  # ours would wait for the update
            parameter.grad = None

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.megacompile.whole()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """All weights written anew also mend those that an update left half-way."""
        if kwargs.get("assign"):
            raise UnsupportedError("load_state_dict(assign=True) would replace parameters that live in host tiles: leave "
                                   "assign out")
        self.megacompile.streamed.settle()
        result = super().load_state_dict(*args, **kwargs)
        if not result.missing_keys:
            self.megacompile.streamed.mend()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A plain CPU model with the same weights."""
        self.megacompile.whole()
        plain = object.__new__(_original_class(self))
        memo[id(self)] = plain
        plain.__dict__ = copy.deepcopy({k: v for k, v in self.__dict__.items() if k != "megacompile"}, memo)
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError("a streamed model cannot be pickled: use save_pretrained, state_dict, or copy.deepcopy(model)")


class _StreamedPretrained(_StreamedModule):
    """What models of transformers have beside."""

    @property
    def device(self) -> torch.device:
        """The compute device: Trainer sends batches there."""
        return self.megacompile.streamed.backend.device

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        self.megacompile.whole()
        return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Layers are streamed for every token, without a cache: right, and slow."""
        kwargs["use_cache"] = False
        with torch.no_grad():
            return super().generate(*args, **kwargs)  # type: ignore[misc]


def _original_class(model: nn.Module) -> type[nn.Module]:
    _, original = type(model).__bases__
    return original


_classes: dict[type, type] = {}


def _streamed_class(original: type) -> type:
    """The subclass of a model's class that streams. It keeps the name: configs record it as the architecture."""
    if original not in _classes:
        body = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
        streamed = _StreamedPretrained if hasattr(original, "save_pretrained") else _StreamedModule
        _classes[original] = type(original.__name__, (streamed, original), body)
    return _classes[original]
