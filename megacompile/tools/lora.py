"""Options for a LoRA adapter, shared by several commands."""
from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer

from megacompile.errors import ArgumentError, MegacompileError

_PANEL = "LoRA"
#: PEFT's name for all linear layers except the head.
ALL_LINEAR = "all-linear"
DEFAULT_RANK = 16


class Stored(StrEnum):
    NF4 = "nf4"
    INT8 = "int8"


@dataclass(frozen=True)
class Lora:
    """The options of an adapter. Without `lora` there is no adapter, and the other fields must be None."""

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
    lora_dropout: Annotated[float | None, typer.Option(
        "--lora-dropout", min=0.0, max=0.99, rich_help_panel=_PANEL, help="Dropout probability at the adapter's input.",
        show_default="0")] = None

    quantize: Annotated[Stored | None, typer.Option(
        "--quantize", rich_help_panel=_PANEL, help="Store the frozen weights of linear layers in fewer bits: nf4 in 0.52 bytes "
        "each, int8 in 1 byte.", show_default="as they are")] = None

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
        given = tuple(name.strip() for each in self.lora_targets or () for name in each.split(",") if name.strip())
        return given or (ALL_LINEAR,)

    def resolved(self) -> Lora:
        """A copy with defaults filled in."""
        if not self.lora:
            return self
        return Lora(True, self.rank, self.alpha, list(self.targets), self.lora_dropout or 0.0, self.quantize)

    def config(self) -> Any | None:
        """The `peft.LoraConfig`, or None without an adapter."""
        if not self.lora:
            return None
        from peft import LoraConfig

        targets = self.targets
        return LoraConfig(r=self.rank, lora_alpha=self.alpha, lora_dropout=self.lora_dropout or 0.0, task_type="CAUSAL_LM",
                          target_modules=ALL_LINEAR if targets == (ALL_LINEAR,) else list(targets))
