"""Options that several commands share.

    @app.command()
    @with_options
    def plan(model: Model, planning: Planning) -> None: ...

If the type of a command's parameter is a dataclass, the command gets an option for each of its fields. This module imports
torch only when a command runs, so that --help is quick.
"""
from __future__ import annotations

import enum
import functools
import importlib.util
import inspect
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, get_type_hints

import typer

from megacompile.errors import ArgumentError, MegacompileError
from megacompile.ir.options import Row, Takes, rows
from megacompile.sizes import LARGEST
from megacompile.tools.recipe import Kind, default_length, default_of, default_words


# -------------------- Freezes the lowest layers of a model, which may have no weights yet
def freeze_lowest(model: Any, count: int) -> None:
    """Freezes the lowest `count` layers of a model from transformers and, if `count` is not 0, its embeddings. The backward
    then ends above them.

    Raises `ArgumentError` if the model has fewer layers."""
    if not count:
        return
    from megacompile.frontend.tracing.layers import find_layers

    stack = find_layers(model)
    if count > len(stack.layers):
        raise ArgumentError(f"{count} layers cannot be frozen: {type(model).__name__} has {len(stack.layers)}; freeze at most "
                            "that many")
    for module in (model.get_input_embeddings(), *stack.layers[:count]):
        module.requires_grad_(False)


# -------------------- Options for a LoRA adapter, shared by several commands
_PANEL = "LoRA"
#: PEFT's name for all linear layers except the head.
ALL_LINEAR = "all-linear"
DEFAULT_RANK = 16


class Stored(StrEnum):
    NF4 = "nf4"
    INT8 = "int8"
    MXFP4 = "mxfp4"
    FP8 = "fp8"


@dataclass(frozen=True)
class Lora:
    """The options of an adapter. Without `lora` the model gets no adapter, and the other fields must be None."""

    lora: Annotated[bool, typer.Option(
        "--lora", rich_help_panel=_PANEL, help="Train a LoRA adapter (PEFT) and freeze the model's own weights.")
    ] = False
    lora_rank: Annotated[int | None, typer.Option(
        "--lora-rank", "--lora-r", min=1, rich_help_panel=_PANEL, help="Rank of the adapter's matrices.",
        show_default=str(DEFAULT_RANK))] = None
    lora_alpha: Annotated[int | None, typer.Option(
        "--lora-alpha", min=1, rich_help_panel=_PANEL, help="The adapter is scaled by alpha / rank.",
        show_default="twice the rank")] = None
    lora_targets: Annotated[list[str] | None, typer.Option(
        "--lora-targets", "--lora-target-modules", rich_help_panel=_PANEL,
        help="Names of the layers that get an adapter, such as q_proj,v_proj. Separate them with commas, or repeat the option.",
        show_default=f"{ALL_LINEAR}: every linear layer except the head")] = None
    lora_parameters: Annotated[list[str] | None, typer.Option(
        "--lora-parameters", "--lora-target-parameters", rich_help_panel=_PANEL,
        help="Names of stacked weights of experts that get an adapter too, such as experts.gate_up_proj,experts.down_proj.",
        show_default="none, or those that PEFT takes for linear layers")] = None
    lora_dropout: Annotated[float | None, typer.Option(
        "--lora-dropout", min=0.0, max=0.99, rich_help_panel=_PANEL, help="Dropout probability at the adapter's input.",
        show_default="0")] = None

    quantize: Annotated[Stored | None, typer.Option(
        "--quantize", rich_help_panel=_PANEL, help="Store the frozen weights of linear layers in fewer bits: nf4 in 0.52 bytes "
        "each, mxfp4 in 0.53, int8 in 1 byte.", show_default="as they are")] = None

    def check(self) -> None:
        """Raises `ArgumentError` if an option is given without `lora`, `MegacompileError` if PEFT is not installed."""
        if not self.lora:
            for name, value in asdict(self).items():
                if name != "lora" and value is not None:
                    raise ArgumentError(f"--{name.replace('_', '-')} needs --lora: give both, or neither")
        elif importlib.util.find_spec("peft") is None:
            raise MegacompileError("--lora needs PEFT, which is not installed: pip install peft")

    @property
    def rank(self) -> int:
        return self.lora_rank or DEFAULT_RANK

    @property
    def alpha(self) -> int:
        return self.lora_alpha or 2 * self.rank

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of layers, or only `ALL_LINEAR`."""
        return _names(self.lora_targets) or (ALL_LINEAR,)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of stacked weights of experts."""
        return _names(self.lora_parameters)

    def resolved(self) -> Lora:
        """A copy with defaults filled in."""
        if not self.lora:
            return self
        return replace(self, lora_rank=self.rank, lora_alpha=self.alpha, lora_targets=list(self.targets),
                       lora_parameters=list(self.parameters) or None, lora_dropout=self.lora_dropout or 0.0)

    def config(self) -> Any | None:
        """The `peft.LoraConfig`, or None without an adapter."""
        if not self.lora:
            return None
        from peft import LoraConfig

        targets = self.targets
        return LoraConfig(r=self.rank, lora_alpha=self.alpha, lora_dropout=self.lora_dropout or 0.0, task_type="CAUSAL_LM",
                          target_modules=ALL_LINEAR if targets == (ALL_LINEAR,) else list(targets),
                          target_parameters=list(self.parameters) or None)


def _names(written: list[str] | None) -> tuple[str, ...]:
    """Names that are separated by commas, or given one by one."""
    return tuple(name.strip() for each in written or () for name in each.split(",") if name.strip())


if TYPE_CHECKING:
    import torch

    from megacompile.scheduling import Schedule

#: The hardware to plan for on a machine without a GPU.
DEFAULT_HARDWARE = "h200"

_PLAN_PANEL = "Plan"
_SCHEDULE_PANEL = "What to plan for"


class DType(enum.StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    def resolve(self) -> torch.dtype | None:
        import torch
        return None if self is DType.AUTO else getattr(torch, self.value)


class Update(enum.StrEnum):
    """The time when tiles are updated (see `Plan`)."""

    STEP = "step"
    ARRIVAL = "arrival"


Model = Annotated[str, typer.Argument(
    metavar="MODEL", help="A model directory, a config (directory or JSON file), or a model id on the Hugging Face Hub. Only "
                          "the config is read.")]
Optim = Annotated[str, typer.Option(
    "--optim", "--optimizer", help="Optimizer: adamw, muon, lion or sgd, with state in float32; or with smaller state: "
                                   "adamw_bf16, adamw_8bit, and the same for muon and lion. Names of transformers that mean "
                                   "the same work too.")]
OptimArgs = Annotated[str | None, typer.Option(
    help='More options of the optimizer, such as "master=bfloat16" or "momentum=0.9, nesterov=True".')]
Strict = Annotated[bool, typer.Option(
    "--strict/--no-strict", help="Refuse a checkpoint without all tensors of the model, or with others. --no-strict: those "
                                 "that are missing start from random values, and others are left out, with a warning.")]
ModelDType = Annotated[DType, typer.Option(help="Data type of the weights. auto: the model's own.")]


#: The type of the value of each kind of option, as a command gets it.
_TYPES: dict[Takes, Any] = {Takes.COUNT: int | None, Takes.BYTES: str | None, Takes.FLAG: bool | None, Takes.TEXT: str | None,
                           Takes.TILES: list[str] | None}
#: Options that are not among the details of a plan.
_PLAIN = ("device",)


def flag(name: str, row: Row) -> Any:
    """The type of a command's parameter for this option of `stream`."""
    help = re.sub(r"`(\w+)`", lambda found: f"--{found[1].replace('_', '-')}", row.help)
    if row.takes is Takes.TILES:
        help += ' The name of a tile, repeated for more; or "all", or "none".'
    more: dict[str, Any] = dict(min=row.least) if row.takes is Takes.COUNT else {}
    panel = None if name in _PLAIN else _PLAN_PANEL
    return Annotated[_TYPES[row.takes], typer.Option(help=help, show_default=row.unset, rich_help_panel=panel, **more)]


FLAGS = {name: flag(name, row) for name, _, row in rows() if row.flag}
if TYPE_CHECKING:
    Device: TypeAlias = str | None
    DeviceMemory: TypeAlias = str | None
else:
    Device, DeviceMemory = FLAGS["device"], FLAGS["device_memory"]


class Knobs:
    """The options of `stream` that commands have, each None unless it is given."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __init__(self, **given: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    def given(self) -> dict[str, Any]:
        """The given options, in the form for `StreamConfig`."""
        return {name: _tile_names(value) for name, value in asdict(self).items() if value is not None}


Knobs.__annotations__ = FLAGS
for _name in FLAGS:
    setattr(Knobs, _name, None)
dataclass(frozen=True)(Knobs)


def _tile_names(value: Any) -> Any:
    """Converts a list of tile names to the form that `StreamConfig` takes. Other values are unchanged."""
    if not isinstance(value, list):
        return value
    return "all" if value == ["all"] else () if value == ["none"] else tuple(value)


@dataclass(frozen=True)
class Planning:
    """The target of a schedule. A batch or length of None stands for the default of `train`."""

    batch: Annotated[int | None, typer.Option(
        min=1, max=LARGEST["batch"], rich_help_panel=_SCHEDULE_PANEL,
        help="Number of sequences per step, which all GPUs share.",
        show_default=default_words("batch"))] = None
    length: Annotated[int | None, typer.Option(
        min=2, max=LARGEST["length"], rich_help_panel=_SCHEDULE_PANEL, help="Number of tokens per sequence.",
        show_default=default_length())] = None
    update: Annotated[Update, typer.Option(
        rich_help_panel=_SCHEDULE_PANEL,
        help="When to update a tile: at the end of the step, or on arrival of its gradients, as AdamW(update='arrival') "
             "does.")] = Update.STEP
    optim: Optim = "adamw"
    optim_args: OptimArgs = None
    train_step: Annotated[bool, typer.Option(
        "--train-step", rich_help_panel=_SCHEDULE_PANEL,
        help="Plan train_step, which runs a step as one program, instead of a loop of forward, backward and step.")] = False
    hardware: Annotated[str | None, typer.Option(
        rich_help_panel=_SCHEDULE_PANEL,
        help="Machine to plan for: a profile (h200, a100, 4090, ...) or a file that calibrate has written.",
        show_default=f"this machine, or {DEFAULT_HARDWARE} if it has no GPU")] = None
    gpus: Annotated[int, typer.Option(
        min=1, max=LARGEST["gpus"], rich_help_panel=_SCHEDULE_PANEL,
        help="Number of GPUs that train one copy of the model, each on sequences of its own.")] = 1
    hosts: Annotated[int, typer.Option(
        min=1, max=LARGEST["hosts"], rich_help_panel=_SCHEDULE_PANEL,
        help="Number of hosts. Each has a copy of the model, unless --copies says otherwise.")] = 1
    copies: Annotated[int | None, typer.Option(
        min=1, max=LARGEST["copies"], rich_help_panel=_SCHEDULE_PANEL, show_default="one for each host",
        help="Number of copies of the model, each divided evenly among the hosts and --gpus GPUs in all. Gradients are added "
             "up over the copies.")] = None
    sequence_ranks: Annotated[int, typer.Option(
        min=1, max=LARGEST["gpus"], rich_help_panel=_SCHEDULE_PANEL,
        help="Number of GPUs that have the tokens of each sequence together.")] = 1
    dtype: ModelDType = DType.AUTO
    frozen_layers: Annotated[int, typer.Option(
        min=0, rich_help_panel=_SCHEDULE_PANEL,
        help="Number of layers to freeze, counted from the first. With any, the embeddings are frozen too.")] = 0

    def is_assumed(self, knobs: Knobs) -> bool:
        """True if the plan is for `DEFAULT_HARDWARE`, because the user named no machine and this one has no GPU."""
        import torch

        return self.hardware is None and knobs.device is None and not torch.cuda.is_available()

    def schedule(self, model: str, knobs: Knobs, lora: Lora) -> Schedule:
        """The schedule of a model; loads no weights. Raises what `megacompile.schedule` raises, and `ArgumentError` if there is
        no such model."""
        from megacompile import training
        from megacompile.scheduling import schedule
        from megacompile.weights.empty_models import put_adapter
        from megacompile.weights.quantizing import quantize

        lora.check()
        loaded = training.load_model(model, dtype=self.dtype.resolve(), meta=True)
        freeze_lowest(loaded, self.frozen_layers)
        if (adapter := lora.config()) is not None:
            loaded = put_adapter(loaded, adapter)
        if lora.quantize is not None:
            quantize(loaded, lora.quantize.value)
        hardware = self.hardware or (DEFAULT_HARDWARE if self.is_assumed(knobs) else None)
        default = default_of(Kind.LORA if lora.lora else Kind.FULL, getattr(loaded.config, "max_position_embeddings", None))
        groups = max(1, self.gpus // self.sequence_ranks)
        batch, processes = self.batch or default.batch, groups * (self.copies or self.hosts)
        if batch < processes:
            what = "groups of GPUs" if self.sequence_ranks > 1 else "GPUs"
            raise ArgumentError(f"--batch {batch} has fewer sequences than {what} ({processes}): give --batch {processes} or "
                                "more")
        return schedule(loaded, batch=-(-batch // processes), length=self.length or default.length,
                        update=self.update.value, whole_step=self.train_step, hardware=hardware, gpus=self.gpus,
                        hosts=self.hosts, copies=self.copies, sequence_ranks=self.sequence_ranks, optim=self.optim,
                        optim_args=self.optim_args, **knobs.given())


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces each dataclass parameter of a command with options for its fields, in a signature that `typer` reads."""
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
    del run.__wrapped__  # type: ignore[attr-defined]  # it has another signature
    return run
