"""Hyperparameters of a run and their defaults for each kind of run."""
from __future__ import annotations

import enum
import math
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any


# --------------------
# Learning rate decay of `megacompile train`. Does not import torch, since the command line needs it for --help.
class Decay(enum.StrEnum):
    """The decay of the learning rate after the warmup."""

    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    POLYNOMIAL = "polynomial"
    INVERSE_SQRT = "inverse_sqrt"

    @property
    def is_ours(self) -> bool:
        """True for those that end at `final_lr`. The others are transformers' own."""
        return self in (Decay.COSINE, Decay.LINEAR, Decay.CONSTANT)

    def height(self, progress: float) -> float:
        """A factor that falls from 1 at `progress` 0 to 0 at `progress` 1, or stays 1 if constant."""
        match self:
            case Decay.COSINE:
                return 0.5 * (1.0 + math.cos(math.pi * progress))
            case Decay.LINEAR:
                return 1.0 - progress
            case _:
                return 1.0


class Kind(enum.StrEnum):
    """The kind of training in a run."""

    FULL = "full fine-tuning"
    LORA = "LoRA"
    SCRATCH = "training from scratch"


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters. `batch`: sequences per step; `length`: maximum tokens per sequence; `warmup`: number of steps, or None
    to use `warmup_ratio`, a fraction of all steps; `final_lr`: a fraction of the peak learning rate `lr`."""

    batch: int = 16
    length: int = 2048
    epochs: float = 1.0
    lr: float = 1e-5
    warmup: int | None = None
    warmup_ratio: float = 0.03
    decay: Decay = Decay.COSINE
    final_lr: float = 0.1
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0

    @classmethod
    def of(cls, settings: Any, kind: Kind, positions: int | None) -> tuple[Recipe, frozenset[str]]:
        """(the recipe of a run with these settings, the names of the values that were set explicitly). `positions`: the number
        of positions that the model has, None for no limit; the default `length` is at most that."""
        asked = {each.name: getattr(settings, each.name) for each in fields(cls)}
        asked = {name: value for name, value in asked.items() if value is not None}
        if settings.per_device_train_batch_size is not None:
            asked["batch"] = settings.per_device_train_batch_size * (settings.gradient_accumulation_steps or 1)
        return replace(default_of(kind, positions), **asked), frozenset(asked)

    def warmup_steps(self, steps: int) -> int:
        return math.ceil(self.warmup_ratio * steps) if self.warmup is None else self.warmup

    def words(self, steps: int, endless: bool) -> list[tuple[tuple[str, ...], str]]:
        """A readable summary: (names of settings, their description). `steps`: steps of the whole run; `endless`: the number of
        steps was set, so epochs do not matter."""
        count = self.warmup_steps(steps)
        warmup = f"warmup {count:,} step{'s' * (count != 1)}" + (f" ({self.warmup_ratio:.1%})" if self.warmup is None else "")
        decay = ("constant after the warmup" if self.decay is Decay.CONSTANT else
                 f"{self.decay} decay" + (f" to {self.final_lr:.3g} of the peak" if self.decay.is_ours else ""))
        return [
            (("lr",), f"learning rate {self.lr:.3g}"),
            (("warmup", "warmup_ratio"), warmup),
            (("decay", "final_lr"), decay),
            (("batch",), f"batch {self.batch:,}"),
            (("length",), f"length {self.length:,}"),
            *([] if endless else [(("epochs",), f"epochs {self.epochs:.3g}")]),
            (("weight_decay",), f"weight decay {self.weight_decay:.3g}"),
            (("beta1", "beta2"), f"betas {self.beta1:.4g} and {self.beta2:.4g}"),
            (("max_grad_norm",), f"gradient norm at most {self.max_grad_norm:.3g}" if self.max_grad_norm else "no clipping"),
        ]


#: The defaults. docs/fine-tuning.md explains them.
DEFAULTS: dict[Kind, Recipe] = {
    Kind.FULL: Recipe(),
    Kind.LORA: Recipe(lr=1e-4),
    Kind.SCRATCH: Recipe(lr=3e-4, weight_decay=0.1, beta2=0.95),
}


def default_of(kind: Kind, positions: int | None) -> Recipe:
    """The defaults of a kind of run, for a model with this many positions (None: no limit)."""
    default = DEFAULTS[kind]
    return default if positions is None or positions <= 0 else replace(default, length=min(default.length, positions))


def default_words(name: str) -> str:
    """For --help: the default of a setting, or its defaults for each kind of run if they differ."""
    values = {kind: getattr(recipe, name) for kind, recipe in DEFAULTS.items()}
    if len(set(values.values())) == 1:
        return str(values[Kind.FULL])
    return ", ".join(f"{value:g} for {kind}" for kind, value in values.items())


def default_length() -> str:
    """For --help: the default of `length`."""
    return f"{default_words('length')}, or the number of positions of the model if that is smaller"


def block(title: str, words: Collection[tuple[tuple[str, ...], str]], asked: Collection[str], *more: tuple[str, str]) -> str:
    """The text that a run prints before it begins: a title, the settings that were given, the defaults, and more lines."""
    lines = [("given", ", ".join(said for names, said in words if set(names) & set(asked)) or "nothing"),
             ("defaults", ", ".join(said for names, said in words if not set(names) & set(asked)) or "nothing"), *more]
    widest = max(len(name) for name, _ in lines)
    return "\n".join([title, *(f"  {name:<{widest}}  {text}" for name, text in lines)])
