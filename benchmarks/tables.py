"""The benchmark tables, as data. `python benchmarks/measure.py TABLE` measures the missing rows of a table."""
from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import rows

#: The module that measures a row, by the row's system.
MODULES = {"megacompile": "step", "native": "native", "uneven": "uneven"}

_Options = dict[str, Any]


@dataclass(frozen=True)
class Spec:
    """A row to measure. `options`: options of its system's module, by name without dashes. `how`: options that do not change
    the row's identity, such as the number of steps."""

    system: str
    options: _Options
    how: _Options = field(default_factory=dict)

    def arguments(self) -> list[str]:
        """The command-line arguments of the row."""
        found = []
        for name, value in {**self.options, **self.how}.items():
            found += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return found

    @property
    def label(self) -> str:
        return " ".join([self.system, *self.arguments()])

    def identifying(self) -> _Options:
        """The options that differ from the defaults, as stored in a row."""
        parser = importlib.import_module(MODULES[self.system]).options()
        return rows.identifying(parser, parser.parse_args(self.arguments()))

    @property
    def model(self) -> tuple[Any, ...]:
        """A key that is equal for rows that one process can measure on one model."""
        shared = getattr(importlib.import_module(MODULES[self.system]), "MODEL", None)
        return self.system, *([self.label] if shared is None else map(self.options.get, shared))

    def identity(self, device: str) -> str:
        """The identity of this row when it is measured on a device of this name."""
        return rows.identity(self.system, self.identifying(), device)

    def alone(self) -> Spec:
        """The compute-only row with the same templates, without copies and updates. Clipping does not change the templates, so
        it is left out; updates on arrival may have another plan, so they are kept."""
        return self.changed(no_clipping=None, compute_only=True)

    def changed(self, **options: Any) -> Spec:
        """A copy with these options added, and without those that are None."""
        return replace(self, options={name: value for name, value in {**self.options, **options}.items() if value is not None})

    def of_shape(self, shape: str | None) -> Spec:
        """A copy with this shape, unless the row has one of its own."""
        return self if shape is None else replace(self, options={"shape": shape, **self.options})


@dataclass(frozen=True)
class Table:
    """Rows in the order in which they are measured and printed. `x`: the option on the axis of a plot."""

    title: str
    rows: tuple[Spec, ...]
    x: str | None = None

    def of_shape(self, shape: str | None) -> Table:
        return replace(self, rows=tuple(row.of_shape(shape) for row in self.rows))


def ours(**options: Any) -> Spec:
    return Spec("megacompile", options)


def with_compute(specs: Iterable[Spec]) -> list[Spec]:
    """The rows, each followed by its compute-only row. A compute-only row that several rows share appears once."""
    found: list[Spec] = []
    for spec in specs:
        found += [each for each in (spec, spec.alone()) if each not in found]
    return found


def native(**size: Any) -> list[Spec]:
    """Rows of PyTorch: the usual way, and the fastest way found. Both use micro-batches, since the logits of a whole batch
    would not fit."""
    micro = max(1, min(size.get("batch", 64), 8192 // size.get("length", 1024)))
    return [Spec("native", dict(size, micro_batch_size=micro, **way)) for way in (dict(checkpointing=True), dict(compile=True))]


def uneven(**options: Any) -> list[Spec]:
    """Rows for training on sequences of uneven length: full rows first, then each way to train on uneven ones, with megacompile
    and with native PyTorch."""
    ways: list[_Options] = [dict(through=way) for way in ("trainer", "sft", "loop", "train")]
    natives: tuple[_Options, ...] = (
        dict(checkpointing=True), dict(checkpointing=True, arrangement="grouped"),
        dict(checkpointing=True, arrangement="packed"), dict(arrangement="packed", compile=True),
        dict(arrangement="packed", attention="flex_attention", compile=True))
    found: list[_Options] = [
        dict(data="full"), *(dict(data=data, **way) for data in ("instructions", "chat", "documents") for way in ways),
        dict(data="full", through="native", compile=True),
        *(dict(data="instructions", through="native", **way) for way in natives)]
    return [Spec("uneven", {**options, **each}) for each in found]


def larger(**size: Any) -> tuple[Spec, ...]:
    """Rows for steps of the 14B and 32B shapes."""
    shapes = (dict(shape=shape, **size) for shape in ("qwen2-14b", "qwen2-32b"))
    return tuple(with_compute(ours(**shape, **way) for shape in shapes for way in (STEP, ARRIVAL)))


# The ways to run a step: a loop of forward, backward and step(), or one program; with exact clipping, or without.
LOOP: _Options = {}
UNCLIPPED: _Options = dict(no_clipping=True)
STEP: _Options = dict(train_step=True)
ARRIVAL: _Options = dict(train_step=True, overlap=True)

_GATES: tuple[tuple[_Options, _Options, tuple[_Options, ...]], ...] = (  # batch and length; device memory; ways to run a step
    (dict(batch=64, length=1024), {}, (STEP, ARRIVAL, LOOP, UNCLIPPED)),
    (dict(batch=64, length=1024), dict(device_memory="24GiB"), (LOOP, UNCLIPPED, STEP, ARRIVAL)),
    (dict(batch=16, length=1024), {}, (STEP, ARRIVAL)),
    (dict(batch=16, length=1024), dict(device_memory="24GiB"), (STEP, ARRIVAL)),
    (dict(batch=8, length=1024), {}, (STEP, ARRIVAL)),
    (dict(batch=8, length=8192), {}, (STEP, ARRIVAL)),
)
EXPERTS: _Options = dict(shape="qwen3-moe-30b", layers="fit")
SINKS: _Options = dict(shape="gpt-oss-120b", layers="fit", batch=32)
WINDOW: _Options = dict(shape="mistral-7b", layers="fit", batch=8, length=8192)
_CONTEXTS = [1024 * 2**i for i in range(7)]
_FEW_STEPS = dict(steps=2, recorded_steps=1)
_ONE_STEP = dict(warm_up=1, steps=1, recorded_steps=1)
_OPTIMIZERS: tuple[_Options, ...] = ({}, dict(optim="adamw_bf16"), dict(optim="adamw_8bit"), dict(optim="muon"))
_ABLATIONS: tuple[_Options, ...] = (
    {}, dict(waves=1), dict(saved_layers=0), *(dict(saved_layers=0, checkpoint_interval=k) for k in (2, 4, 8)),
    dict(weight_slots=1), dict(saved_layers=0, weight_slots=1), dict(synchronous_optimizer=True),
    dict(pinned_memory="8GiB"), dict(uncompiled=True),
    *(dict(batch=16, device_memory="24GiB", **moments) for moments in ({}, dict(deferred_moments="no"))))

TABLES = {
    "gates": Table("Speed, also relative to the same templates without copies and to native PyTorch", tuple(
        spec for size, memory, ways in _GATES
        for spec in [*with_compute(ours(**size, **memory, **way) for way in ways), *([] if memory else native(**size))])),
    "depth": Table("Layers", tuple(
        spec for depth in (dict(layers=8), dict(layers=16), {})  # the last are the shape's own, which other tables have
        for spec in [*with_compute(ours(**depth, **way) for way in (STEP, LOOP)), *native(**depth)]), x="layers"),
    "ablation": Table("Effect of each choice", tuple(ours(**STEP, **changed) for changed in _ABLATIONS)),
    "budgets": Table("Device memory", tuple(
        ours(**memory, **way) for memory in (*(dict(device_memory=f"{size}GiB") for size in (16, 24, 48, 80)), {})
        for way in (STEP, LOOP)), x="device_memory"),
    "optimizers": Table("Optimizers and their state", tuple(
        ours(batch=batch, **memory, **way, **optimizer) for way in (STEP, ARRIVAL) for batch in (64, 16)
        for memory in ({}, dict(device_memory="24GiB")) for optimizer in _OPTIMIZERS
        if way is STEP or optimizer.get("optim") != "muon")),  # matrices are updated at the end of a step
    "batch": Table("Sequences per step", tuple(
        ours(batch=batch, **way) for batch in (8, 16, 32, 64, 128) for way in (STEP, ARRIVAL)), x="batch"),
    "context": Table("Tokens per sequence, with 65,536 tokens per step or one sequence, up to half a million", (
        *(replace(ours(batch=2**16 // length, length=length, **STEP), how=_FEW_STEPS) for length in _CONTEXTS),
        replace(ours(batch=1, length=2**17, **STEP), how=_ONE_STEP),
        replace(ours(batch=1, length=2**19, layers=4, **STEP), how=_ONE_STEP)), x="length"),
    "kinds": Table("Mixture of experts and a sliding window: TFLOPS over active parameters", (
        *with_compute(ours(**shape, **STEP) for shape in (EXPERTS, SINKS, WINDOW)),
        *native(**EXPERTS), *native(**SINKS), *native(**WINDOW))),
    "width": Table("Layers 1 to 5 times as wide as those of the 7B shape; as many as fit in host memory, at most 4", tuple(
        with_compute(ours(shape=f"wide-{times}", layers="fit", **STEP) for times in range(1, 6))), x="shape"),
    "rows": Table("Rows of uneven length: tokens per second without padding", (
        *uneven(layers=8), Spec("uneven", dict(layers=8, data="instructions", cold=True)),
        *(Spec("uneven", dict(memory, data=data)) for memory in ({}, dict(device_memory="24GiB"))
          for data in ("full", "instructions")))),
    "large": Table("Larger shapes, with as many layers as fit in host memory", larger(layers="fit")),
    "whole": Table("Whole models of 14B and 32B", larger()),
}
