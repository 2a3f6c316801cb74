"""What a run is asked for: each a flag of `megacompile train`, and a key of its YAML file."""
from __future__ import annotations

import difflib
import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from megacompile.decay import Decay
from megacompile.errors import ArgumentError, MegacompileError
from megacompile.finetuning.formats import Format
from megacompile.options import Batch, DType, Length, ModelDType

_DATA = "Data"
_LEARNING = "Learning"
_RUN = "The run"


@dataclass(frozen=True)
class Settings:
    """All but the model, the data and what shapes the plan (`Knobs`)."""

    format: Annotated[Format | None, typer.Option(
        rich_help_panel=_DATA, help="Of the rows; else the first whose columns are there.")] = None
    tokenizer: Annotated[str | None, typer.Option(
        rich_help_panel=_DATA, help="A folder or an id of the Hugging Face hub; else the model's own.")] = None
    batch: Batch = 8
    length: Length = 512
    pack: Annotated[bool, typer.Option(
        "--pack", rich_help_panel=_DATA, help="Pack conversations into sequences; they do not see each other.")] = False
    eval_share: Annotated[float, typer.Option(
        min=0.0, max=0.9, rich_help_panel=_DATA, help="Share of the rows to evaluate on instead.")] = 0.0
    steps: Annotated[int | None, typer.Option(min=1, rich_help_panel=_LEARNING, help="Steps, whatever --epochs says.")] = None
    epochs: Annotated[float, typer.Option(min=0.0, rich_help_panel=_LEARNING, help="How often each row is seen.")] = 1.0
    lr: Annotated[float, typer.Option(min=0.0, rich_help_panel=_LEARNING, help="Peak learning rate.")] = 1e-4
    warmup: Annotated[int, typer.Option(
        min=0, rich_help_panel=_LEARNING, help="Steps over which the learning rate rises.")] = 0
    decay: Annotated[Decay, typer.Option(rich_help_panel=_LEARNING, help="How it falls then.")] = Decay.COSINE
    final_lr: Annotated[float, typer.Option(
        min=0.0, max=1.0, rich_help_panel=_LEARNING, help="Where it ends, as a share of the peak.")] = 0.1
    weight_decay: Annotated[float, typer.Option(
        min=0.0, rich_help_panel=_LEARNING, help="Of matrices; norms and biases have none.")] = 0.01
    beta1: Annotated[float, typer.Option(min=0.0, max=1.0, rich_help_panel=_LEARNING)] = 0.9
    beta2: Annotated[float, typer.Option(min=0.0, max=1.0, rich_help_panel=_LEARNING)] = 0.999
    eps: Annotated[float, typer.Option(min=0.0, rich_help_panel=_LEARNING)] = 1e-8
    max_grad_norm: Annotated[float, typer.Option(
        min=0.0, rich_help_panel=_LEARNING, help="Largest norm of all gradients (0: any).")] = 1.0
    overlap: Annotated[bool, typer.Option(
        "--overlap", rich_help_panel=_LEARNING, help="Update layers as gradients arrive; needs --max-grad-norm 0.")] = False
    dtype: ModelDType = DType.AUTO
    seed: Annotated[int, typer.Option(
        min=0, rich_help_panel=_LEARNING, help="Of random weights, of the order of the data and of what is evaluated on.")] = 0
    output: Annotated[Path | None, typer.Option(
        file_okay=False, rich_help_panel=_RUN, help="Folder of the run: checkpoints, log, loss curve, the model.")] = None
    save: Annotated[Path | None, typer.Option(
        file_okay=False, rich_help_panel=_RUN, help="Save the trained model here, instead of in OUTPUT/model.")] = None
    save_interval: Annotated[int, typer.Option(
        min=1, rich_help_panel=_RUN, help="Steps between checkpoints, written beside training.")] = 500
    keep: Annotated[int, typer.Option(min=1, rich_help_panel=_RUN, help="The last checkpoints that are kept.")] = 3
    resume: Annotated[str | None, typer.Option(
        metavar="latest|FOLDER", rich_help_panel=_RUN,
        help="Go on from OUTPUT's latest checkpoint (from the beginning if there is none yet), or from this one.")] = None
    eval_interval: Annotated[int, typer.Option(
        min=1, rich_help_panel=_RUN, help="Steps between evaluations; there is one at the end anyway.")] = 100
    log_interval: Annotated[int, typer.Option(min=1, rich_help_panel=_RUN, help="Steps between printed lines.")] = 10
    tensorboard: Annotated[bool, typer.Option(
        "--tensorboard", rich_help_panel=_RUN, help="Write OUTPUT/tensorboard too.")] = False

    def check(self) -> None:
        """Raises `ArgumentError` for what does not go together, `MegacompileError` for what is not installed."""
        if self.output is None:
            for name, given in {"--resume latest": self.resume == "latest", "--tensorboard": self.tensorboard}.items():
                if given:
                    raise ArgumentError(f"{name} needs --output, the folder of the run")
        if self.tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise MegacompileError("--tensorboard needs TensorBoard: pip install 'megacompile[train]'")
        if self.overlap and self.max_grad_norm:
            raise ArgumentError("--overlap updates before the norm of all gradients is known: give --max-grad-norm 0 with it")
        if not self.steps and not self.epochs:
            raise ArgumentError("--epochs 0 trains nothing: give more, or --steps")
        if not self.steps and math.isinf(self.epochs):
            raise ArgumentError("--epochs inf never ends: give a number, or --steps")
        if max(self.beta1, self.beta2) >= 1:
            raise ArgumentError("--beta1 and --beta2 must be below 1")


def read_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """Makes the keys of a YAML file the defaults of a command's arguments and options, so that flags win. Callback of an eager
    option. Values are read as words of the command line are.

    Raises `ArgumentError` for a file that is no YAML, a key that there is not, and a value that no word can stand for."""
    if path is None:
        return None
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ArgumentError(f"{path} is no YAML: mend it\n{error}") from error
    if not isinstance(found, dict):
        raise ArgumentError(f"{path} holds no keys and values, such as steps: 1000")
    known = {each.name: each for each in context.command.params if each.name is not None}
    defaults = {}
    for key, value in found.items():
        name = str(key).replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ArgumentError(f"{path} has the key {key}, which there is not" + (f": is it {near[0]}?" if near else ""))
        if value is not None:
            several = known[name].nargs != 1 or getattr(known[name], "multiple", False)
            defaults[name] = _words(value, several, f"{path}: {key}")
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def _words(value: Any, several: bool, where: str) -> str | list[str]:
    values = value if isinstance(value, list) else [value]
    if any(isinstance(each, dict | list) or each is None for each in values):
        raise ArgumentError(f"{where} must be a number, a word or true or false" + (", or a list of them" if several else ""))
    if not several and isinstance(value, list):
        raise ArgumentError(f"{where} is a list, and takes one value")
    return [str(each) for each in values] if several else str(value)
