"""The numbers that decide what is learned. Each is asked for, or is the default of its kind of run."""
from __future__ import annotations

import enum
import math
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any

from megacompile.tools.decay import Decay


class Kind(enum.StrEnum):
    """What a run trains."""

    FULL = "full fine-tuning"
    LORA = "LoRA"
    SCRATCH = "training from scratch"


@dataclass(frozen=True)
class Recipe:
    """`batch`: sequences a step; `length`: tokens that a sequence has at most; `warmup`: steps, or None where `warmup_ratio`,
    a share of all steps, gives them."""

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
        """(what a run with these settings uses, the names of what was asked for). `positions`: how many tokens the model has
        positions for, None where there is no limit; a default is no longer than that."""
        asked = {each.name: getattr(settings, each.name) for each in fields(cls)}
        asked = {name: value for name, value in asked.items() if value is not None}
        if settings.per_device_train_batch_size is not None:
            asked["batch"] = settings.per_device_train_batch_size * (settings.gradient_accumulation_steps or 1)
        return replace(default_of(kind, positions), **asked), frozenset(asked)

    def warmup_steps(self, steps: int) -> int:
        return math.ceil(self.warmup_ratio * steps) if self.warmup is None else self.warmup

    def words(self, steps: int, endless: bool) -> list[tuple[tuple[str, ...], str]]:
        """What matters of it for people: (the names of the settings, what they say). `steps`: of the whole run; `endless`:
        they were asked for, and epochs say nothing."""
        count = self.warmup_steps(steps)
        warmup = f"warm-up {count:,} step{'s' * (count != 1)}" + (f" ({self.warmup_ratio:.1%})" if self.warmup is None else "")
        decay = "constant after it" if self.decay is Decay.CONSTANT else f"{self.decay} decay to {self.final_lr:.3g} of it"
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


#: What a run uses of which nothing else was asked for. docs/fine-tuning.md says why.
DEFAULTS: dict[Kind, Recipe] = {
    Kind.FULL: Recipe(),
    Kind.LORA: Recipe(lr=1e-4),
    Kind.SCRATCH: Recipe(lr=3e-4, weight_decay=0.1, beta2=0.95),
}


def default_of(kind: Kind, positions: int | None) -> Recipe:
    """What a kind of run uses of a model with so many positions (None: without a limit)."""
    default = DEFAULTS[kind]
    return default if positions is None or positions <= 0 else replace(default, length=min(default.length, positions))


def default_words(name: str) -> str:
    """For --help: the default of a setting, or that of each kind of run where they differ."""
    values = {kind: getattr(recipe, name) for kind, recipe in DEFAULTS.items()}
    if len(set(values.values())) == 1:
        return str(values[Kind.FULL])
    return ", ".join(f"{value:g} for {kind}" for kind, value in values.items())


def default_length() -> str:
    """For --help."""
    return f"{default_words('length')}, or the model's positions if they are fewer"


def block(title: str, words: Collection[tuple[tuple[str, ...], str]], asked: Collection[str], *more: tuple[str, str]) -> str:
    """What a run prints before it begins: a title; what was asked for; what was not, and is used; and more lines."""
    lines = [("asked for", ", ".join(said for names, said in words if set(names) & set(asked)) or "nothing"),
             ("by default", ", ".join(said for names, said in words if not set(names) & set(asked)) or "nothing"), *more]
    widest = max(len(name) for name, _ in lines)
    return "\n".join([title, *(f"  {name:<{widest}}  {text}" for name, text in lines)])
