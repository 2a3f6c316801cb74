"""Options that several commands have, each stated once.

    @app.command()
    @with_options
    def plan(model: Model, planning: Planning) -> None: ...

A command's parameter whose type is a dataclass stands for an option for each of its fields. Nothing here imports torch before a
command runs: --help is quick.
"""
from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from megacompile.limits import LARGEST
from megacompile.tools.lora import Lora
from megacompile.tools.recipe import Kind, default_length, default_of, default_words

if TYPE_CHECKING:
    import torch

    from megacompile.scheduling import Schedule

#: What to plan for where no GPU is.
DEFAULT_HARDWARE = "h200"


class DType(enum.StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    def resolve(self) -> torch.dtype | None:
        import torch
        return None if self is DType.AUTO else getattr(torch, self.value)


class Update(enum.StrEnum):
    """When tiles are updated (see `Plan`)."""

    STEP = "step"
    ARRIVAL = "arrival"


Model = Annotated[str, typer.Argument(
    metavar="MODEL", help="A model directory, a config (directory or JSON file), or a Hugging Face hub id. Only the config is "
                          "read.")]
CheckpointInterval = Annotated[int | None, typer.Option(min=1, help="Layers between activation checkpoints.")]
MicroBatchSize = Annotated[int | None, typer.Option(min=1, help="Sequences that the device computes at a time.")]
Device = Annotated[str | None, typer.Option(help="Device that computes: cpu or cuda.")]
DeviceMemory = Annotated[str | None, typer.Option(help='Device memory budget, such as "24GiB".')]
ModelDType = Annotated[DType, typer.Option(help="Data type of the weights. auto: the model's own.")]


@dataclass(frozen=True)
class Knobs:
    """Those of `StreamConfig` that shape a plan; None leaves it to the planner."""

    device: Device = None
    device_memory: DeviceMemory = None
    pinned_memory: Annotated[str | None, typer.Option(
        help="Budget of pinned host memory. If weights and gradients need more, they pass through slabs.")] = None
    host_memory: Annotated[str | None, typer.Option(
        help='Host memory budget, such as "256GiB". Default: what the hardware has.')] = None
    checkpoint_interval: CheckpointInterval = None
    micro_batch_size: MicroBatchSize = None
    saved_layers: Annotated[int | None, typer.Option(
        min=0, help="Number of layers, counted from the last, that keep their residuals.")] = None
    residuals: Annotated[str | None, typer.Option(
        help='What those layers keep: "all" residuals, or only the results of "attention" (the rest is recomputed).')] = None
    waves: Annotated[int | None, typer.Option(
        min=1, help="Number of waves (forward and backward of a share of the batch) in a whole step.")] = None
    host_sums: Annotated[list[str] | None, typer.Option(
        help="A tile whose gradients are summed over waves in host memory (FP32), or all, or none. Repeat for more.")] = None
    token_chunk: Annotated[int | None, typer.Option(
        min=0, help="Tokens of a sequence that a layer computes at a time, except in attention. 0: all.")] = None
    resident: Annotated[list[str] | None, typer.Option(
        help="A tile whose weights stay on the device, or all. Repeat for more.")] = None
    resident_state: Annotated[list[str] | None, typer.Option(
        help="A tile that stays on the device with its optimizer state and is updated there, or all, or none. Repeat for "
             "more.")] = None
    visiting_state: Annotated[list[str] | None, typer.Option(
        help="A host tile that is copied to the device for its update, or all, or none. Repeat for more.")] = None
    deferred_moments: Annotated[bool | None, typer.Option(
        help="Update the weights of all tiles first, and their moments during the next forward.")] = None
    dynamic: Annotated[bool | None, typer.Option(
        help="Compile kernels of packed rows once for any number of rows, or for each of a few sizes.",
        show_default="once, on a GPU")] = None
    weight_slots: Annotated[int | None, typer.Option(min=1, help="Number of device buffers for streamed weights.")] = None

    def given(self) -> dict[str, Any]:
        """Without those that are left to the planner."""
        return {name: _words(value) for name, value in asdict(self).items() if value is not None}


def _words(value: Any) -> Any:
    """Names of tiles as `StreamConfig` has them."""
    if not isinstance(value, list):
        return value
    return "all" if value == ["all"] else () if value == ["none"] else tuple(value)


@dataclass(frozen=True)
class Planning:
    """What a schedule is made for. A batch or a length that is None is that of a run of `train`."""

    batch: Annotated[int | None, typer.Option(
        min=1, max=LARGEST["batch"], help="Sequences per step.", show_default=default_words("batch"))] = None
    length: Annotated[int | None, typer.Option(
        min=2, max=LARGEST["length"], help="Tokens per sequence.", show_default=default_length())] = None
    update: Annotated[Update, typer.Option(
        help="When to update a tile: at the end of the step, or when its gradients arrive, as AdamW(overlap='backward') "
             "does.")] = Update.STEP
    train_step: Annotated[bool, typer.Option(
        "--train-step",
        help="Plan train_step, which runs a step as one program. Default: forward, backward and step of a loop.")] = False
    hardware: Annotated[str | None, typer.Option(
        help="A profile (h200, a100, 4090, ...) or a file that calibrate wrote. Default: this machine, or "
             f"{DEFAULT_HARDWARE} if it has no GPU.")] = None
    dtype: ModelDType = DType.AUTO
    frozen_layers: Annotated[int, typer.Option(
        min=0, help="Number of frozen layers, counted from the first. The embeddings are frozen too.")] = 0

    def schedule(self, model: str, knobs: Knobs, lora: Lora) -> Schedule:
        """Loads no weights. Raises what `megacompile.schedule` raises, and `ArgumentError` where there is no such model."""
        import torch

        from megacompile import training
        from megacompile.scheduling import schedule
        from megacompile.tools.frozen import freeze_lowest
        from megacompile.weights.empty_models import put_adapter

        lora.check()
        loaded = training.load_model(model, dtype=self.dtype.resolve(), meta=True)
        freeze_lowest(loaded, self.frozen_layers)
        if (adapter := lora.config()) is not None:
            loaded = put_adapter(loaded, adapter)
        here = knobs.device is not None or torch.cuda.is_available()
        hardware = self.hardware or (None if here else DEFAULT_HARDWARE)
        default = default_of(Kind.LORA if lora.lora else Kind.FULL, getattr(loaded.config, "max_position_embeddings", None))
        return schedule(loaded, batch=self.batch or default.batch, length=self.length or default.length,
                        update=self.update.value, whole_step=self.train_step, hardware=hardware, **knobs.given())


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each field of its dataclasses, as `typer` reads it."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters[name] = parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            continue
        inner = get_type_hints(groups[name], include_extras=True)
        for each in fields(groups[name]):
            assert each.name not in parameters, f"{command.__name__} has two options {each.name}"
            parameters[each.name] = inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=inner[each.name])

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {name: group(**{each.name: given.pop(each.name) for each in fields(group)}) for name, group in groups.items()}
        command(**given, **made)

    run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    vars(run)["__signature__"] = inspect.Signature(list(parameters.values()))
    del run.__wrapped__  # type: ignore[attr-defined]  # its signature is no longer this one's
    return run
