"""The rounding of products of decoder layers: the recipe of the template pass `float8`, as data.

    format    largest value    mantissa bits
    e4m3      448              3
    e5m2      57344            2

Formats: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433).
"""
from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from megacompile.codegen.scaled_products import ALIGNMENT
from megacompile.errors import MegacompileError, shortened
from megacompile.sizes import check_whole

#: Formats by the name that users give.
FORMATS: dict[str, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
#: Modules that route tokens to experts. Their products always stay in the layers' dtype.
ROUTERS = ("gate", "router")
#: The values that each field of a recipe may have.
_CHOICES = {"scaling": ("tensor", "row"), "gradients": tuple(FORMATS), "weight_gradients": ("float8", "bfloat16"),
            "fast_accumulation": ("none", "forward", "all"), "emulated": (True, False)}


@dataclass(frozen=True)
class Float8:
    """Selects the products of a model's layers that are computed in float8, and the scaling of their operands.

    Attributes:
        scaling: "tensor": one scale for each operand. "row": a scale for each row of the first operand and each column of the
            second. Scales are computed again from each operand, so that its largest absolute value becomes the format's.
        gradients: format of output gradients, "e5m2" or "e4m3". Activations and weights are in e4m3.
        weight_gradients: "float8" or "bfloat16". Either is added to FP32 sums.
        fast_accumulation: the products that a GPU may sum with fewer bits than FP32 has: "none", those of the "forward",
            or "all".
        keep: products that stay in the layers' dtype, besides those that route tokens to experts: module names, or
            dot-separated parts of them ("down_proj", "model.layers.0", "layers.31.mlp").
        min_features: products of a weight with fewer inputs or outputs than this stay in the layers' dtype. They take less time
            than their casts, as adapters do.
        emulated: multiply the same rounded values in FP32, on any device. For tests: it is slower than no float8.
    """

    scaling: str = "tensor"
    gradients: str = "e5m2"
    weight_gradients: str = "float8"
    fast_accumulation: str = "forward"
    keep: tuple[str, ...] = ()
    min_features: int = 256
    emulated: bool = False

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise MegacompileError(f"Float8 {name} must be one of {', '.join(map(str, choices))}, not "
                                       f"{shortened(repr(getattr(self, name)))}")
        if isinstance(self.keep, str):
            object.__setattr__(self, "keep", (self.keep,))
        if not (isinstance(self.keep, tuple | list) and all(isinstance(name, str) and name for name in self.keep)):
            raise MegacompileError(f"Float8 keep must be names of modules, not {shortened(repr(self.keep))}")
        object.__setattr__(self, "keep", tuple(self.keep))
        check_whole("min_features", self.min_features)

    def keeps(self, parameter: str) -> bool:
        """True if a parameter ("model.layers.3.mlp.down_proj.weight") is a router's, or `keep` names its module or an enclosing
        one."""
        return any(is_part_of(each, parameter) for each in (*self.keep, *ROUTERS))

    def misfit(self, rows: int, columns: int) -> str:
        """The reason why a product with a weight [rows, columns] is not possible or not worthwhile in float8; "" if there is
        none."""
        if min(rows, columns) < self.min_features:
            return f"has fewer than {self.min_features} inputs or outputs"
        return f"has inputs or outputs that {ALIGNMENT} does not divide" if rows % ALIGNMENT or columns % ALIGNMENT else ""

    def kernel(self, forward: bool) -> str:
        """The kernel of a product (`scaled_products.py`). `forward`: the product is in the forward, not in the backward."""
        if self.emulated:
            return "emulated"
        return "float8_fast" if self.fast_accumulation == "all" or forward and self.fast_accumulation == "forward" else "float8"


def is_part_of(part: str, module: str) -> bool:
    """True if `part` is the name of a module ("model.layers.3.mlp"), or a dot-separated part of it ("layers.3")."""
    return f".{part}." in f".{module}."


#: Recipes by the name that users give.
PRECISIONS: dict[str, Float8] = {"float8": Float8(), "float8-emulated": Float8(emulated=True)}


def precision_of(given: Any) -> Float8 | None:
    """The recipe of this name; a recipe is returned as it is, and None for None. Fields may follow the name:
    "float8:scaling=row, keep=down_proj+layers.0". Raises `MegacompileError` for anything else."""
    if given is None or isinstance(given, Float8):
        return given
    name, _, changes = given.partition(":") if isinstance(given, str) else ("", "", "")
    if name not in PRECISIONS:
        raise MegacompileError(f"precision must be {' or '.join(map(repr, PRECISIONS))}, a megacompile.Float8 or None, not "
                               f"{shortened(repr(given))}: leave it out for bfloat16")
    return replace(PRECISIONS[name], **dict(map(_field, filter(None, changes.split(",")))))


def precision_text(recipe: Float8 | None) -> str:
    """The text for `precision=` that `precision_of` reads back as this recipe; "None" for None."""
    if recipe is None:
        return "None"
    name, base = next((name, base) for name, base in PRECISIONS.items() if base.emulated == recipe.emulated)
    changes = {field.name: getattr(recipe, field.name) for field in fields(Float8)
               if getattr(recipe, field.name) != getattr(base, field.name)}
    written = [f"{field}={'+'.join(value) if field == 'keep' else value}" for field, value in changes.items()]
    return repr(f"{name}{':' if written else ''}{','.join(written)}")


def _field(text: str) -> tuple[str, Any]:
    """A field of a recipe and its value, from "name=value"."""
    name, _, value = (part.strip() for part in text.partition("="))
    known = [field.name for field in fields(Float8) if field.name != "emulated"]
    if name not in known:
        raise MegacompileError(f"precision has no field {shortened(repr(name))}: it has {', '.join(known)}")
    if name == "keep":
        return name, tuple(filter(None, value.split("+")))
    return name, int(value) if name == "min_features" and value.isascii() and value.isdecimal() else value
