"""Optimizers by the names that people know them by, for `--optim` and `TrainingArguments(optim=...)`."""
from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from megacompile.errors import ArgumentError
from megacompile.planning.host_needs import StateChoice
from megacompile.runtime.memory.state_layout import ElementState
from megacompile.runtime.optimizer.state_format import FORMATS
from megacompile.streaming.optimizer.adamw import AdamW
from megacompile.streaming.optimizer.hyper_parameters import KEPT
from megacompile.streaming.optimizer.lion import Lion
from megacompile.streaming.optimizer.muon import Muon
from megacompile.streaming.optimizer.optimizer import StreamedOptimizer
from megacompile.streaming.optimizer.sgd import SGD
from megacompile.weights.tiling import Tiling


@dataclass(frozen=True)
class NamedOptimizer:
    """`kind`: the class. `state_dtype`: the dtype of its moments. `rates_of_adamw`: AdamW's learning rates fit it."""

    kind: type[StreamedOptimizer]
    state_dtype: str = "float32"
    rates_of_adamw: bool = True

    def states(self, written: str | None, model: nn.Module, tiling: Tiling) -> dict[str, ElementState]:
        """The stored state of each trained parameter by name. Options are text, as for `arguments`. Raises `ArgumentError`."""
        group = {"master": "float32", **self.kind.more, **self.arguments({}, written)}
        return self.kind.states_of(group, tiling.states, model, tiling)

    def choice(self, written: str | None, on_arrival: bool) -> StateChoice:
        """The way in which the optimizer stores its state. Raises `ArgumentError`."""
        options = {"master": "float32", **self.arguments({}, written)}
        moments = 1 if self.kind.matrix_rule is not None else len(self.kind.rule.moments)
        return StateChoice(FORMATS[options["state_dtype"]], options["master"] == "float32", on_arrival, moments)

    def arguments(self, known: Mapping[str, Any], written: str | None = None) -> dict[str, Any]:
        """Arguments of the constructor: the `known` hyper-parameters that this optimizer has, the dtype of its moments, and
        options in text such as "momentum=0.9, nesterov=True". Raises `ArgumentError` for an option in the text that the
        optimizer does not have, or that is out of range."""
        found = {name: value for name, value in known.items() if name in self.kind.checks}
        return found | {"state_dtype": self.state_dtype} | self._read(written)

    def _read(self, written: str | None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in (written or "").split(","))):
            name, sign, value = (word.strip() for word in part.partition("="))
            checks = {**self.kind.checks, **KEPT}
            if not sign or name not in checks:
                raise ArgumentError(f"{part!r} is not an option of {self.kind.__name__}: write name=value, with a name of "
                                    f"{', '.join(checks)}")
            found[name] = _value(value)
            if not checks[name].good(found[name]):
                raise ArgumentError(f"{part!r} is out of range: give {checks[name].what}")
        return found


def _value(written: str) -> Any:
    if written in ("True", "False"):
        return written == "True"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(written)
    return written  # its check refuses what is neither a number nor a name


def named_in_text(written: str | None) -> tuple[str | None, str | None]:
    """The name in options such as "optimizer=muon, ns_steps=3", and the other options. transformers checks `optim` against its
    own list, so TrainingArguments can only take other names in `optim_args`."""
    parts = [part.strip() for part in (written or "").split(",")]
    for index, part in enumerate(parts):
        key, sign, name = (word.strip() for word in part.partition("="))
        if sign and key == "optimizer":  # a second name is an unknown option, which is refused
            return name, ", ".join(parts[:index] + parts[index + 1:])
    return None, written


#: By name. A paged optimizer keeps its state in host memory when the device is full; here all state is there.
OPTIMIZERS: Mapping[str, NamedOptimizer] = {
    **dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "paged_adamw", "paged_adamw_32bit"), NamedOptimizer(AdamW)),
    "adamw_bf16": NamedOptimizer(AdamW, "bfloat16"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"), NamedOptimizer(AdamW, "8bit")),
    **dict.fromkeys(("lion", "lion_32bit", "paged_lion_32bit"), NamedOptimizer(Lion, rates_of_adamw=False)),
    "lion_bf16": NamedOptimizer(Lion, "bfloat16", rates_of_adamw=False),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), NamedOptimizer(Lion, "8bit", rates_of_adamw=False)),
    "muon": NamedOptimizer(Muon),
    "muon_bf16": NamedOptimizer(Muon, "bfloat16"),
    "muon_8bit": NamedOptimizer(Muon, "8bit"),
    "sgd": NamedOptimizer(SGD, rates_of_adamw=False),
}
#: Names without an entry, and what comes nearest.
_NEAREST = {"adamw_torch_4bit": "adamw_8bit", "adamw_anyprecision": "adamw_bf16", "lomo": "adamw_8bit with updates on arrival",
            "adalomo": "adamw_8bit with updates on arrival", "galore_adamw": "adamw_8bit", "apollo_adamw": "adamw_8bit"}


def optimizer_named(name: str) -> NamedOptimizer:
    """The optimizer with this name. Raises `ArgumentError` if there is none."""
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    nearest = next((f" ({near} is the nearest)" for known, near in _NEAREST.items() if name.startswith(known)), "")
    raise ArgumentError(f"the optimizer {name!r} is not implemented for streamed models: choose one of "
                        f"{', '.join(OPTIMIZERS)}{nearest}")
