"""Traces a few layers of a stack whose layers are alike, and copies their calls for the others.

Dynamo may trace every layer of a stack (torch before 2.13 always does), and takes a fifth of a second for each. A plain run on
fakes (`modes.py`) shows much sooner which layers are alike: they are built alike, have the same attributes, and call the same
functions with the same constants. They also read the same: their own weights, results of the layer before them, and results
from before the first layer.

Layers are traced from the front until each kind is among them. All layers are traced if a layer runs twice, shares weights, or
reads results of an earlier layer than the one before it, or if the model computes between layers.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.compat.core import pytree
from megacompile.frontend.graph.split import Section
from megacompile.frontend.templates.template import Source
from megacompile.frontend.tracing.layers import LayerStack, build_of
from megacompile.frontend.tracing.modes import RecordedCall, operation_number, torch_calls

#: Where nn.Module keeps what `build_of` compares.
_COMPARED = frozenset({"_parameters", "_buffers", "_modules"})


@dataclasses.dataclass(frozen=True)
class _Stretch:
    """The operations that one layer called: `start` + 1 to `end`. `gradients`: which of its arguments require a gradient."""

    start: int
    end: int
    gradients: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class _Run:
    """The operations that a model called, and which of them each layer called. Nothing is called between layers."""

    calls: tuple[RecordedCall, ...]
    names: tuple[str, ...]
    stretches: tuple[_Stretch, ...]

    def before(self) -> tuple[Hashable, ...]:
        """The operations before the first layer."""
        return tuple((each.operation, each.read) for each in self.calls[:self.stretches[0].start])

    def layer(self, position: int) -> tuple[Hashable, ...] | None:
        """The operations of a layer, independent of the layer's position; None if it reads results of a layer before the
        previous one."""
        here = self.stretches[position]
        ahead = self.stretches[position - 1] if position else None
        return self._relative(here.start, here.end, ahead, f"{self.names[position]}.")

    def after(self) -> tuple[Hashable, ...] | None:
        """The operations after the last layer; None if they read results of an earlier layer."""
        return self._relative(self.stretches[-1].end, len(self.calls), self.stretches[-1], "")

    def _relative(self, start: int, end: int, ahead: _Stretch | None, prefix: str) -> tuple[Hashable, ...] | None:
        found: list[Hashable] = []
        for each in self.calls[start:end]:
            read = []
            for label in each.read:
                number = operation_number(label)
                if number is None:
                    if label == "?":
                        return None
                    read.append("." + label.removeprefix(prefix) if prefix and label.startswith(prefix) else label)
                elif number > start:
                    read.append(f"own {number - start} {label.partition('.')[2]}")
                elif number <= self.stretches[0].start:
                    read.append(f"prologue {label}")
                elif ahead is not None and ahead.start < number <= ahead.end:
                    read.append(f"ahead {number - ahead.end} {label.partition('.')[2]}")
                else:
                    return None
            found.append((each.operation, tuple(read)))
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class Shortened:
    """`repeats`: the names of the layers that were removed from a model, each with the name of a similar layer. `calls`: the
    operations of the whole model. A second run without these layers called the same ones."""

    repeats: Mapping[str, str]
    calls: tuple[RecordedCall, ...]


def shorten(model: nn.Module, batch: Mapping[str, Any], options: Mapping[str, Any], stack: LayerStack) -> Shortened | None:
    """Removes layers from `model`, a fake model with this `stack`, that are similar to layers which stay. Returns None if all
    stay. `batch`: fakes. Call it within the mode of the fakes."""
    holder: Any = model.get_submodule(stack.paths[0])
    if len(stack.paths) > 1 or len(holder) != len(stack.layers) or len(stack.layers) < 3:
        return None
    whole = _run(model, batch, options, stack)
    if whole is None:
        return None
    like = _likenesses(whole, stack)
    kept = 1 + max(like)
    if kept == len(stack.layers):
        return None
    removed = list(holder)[kept:]
    del holder[kept:]
    short = _run(model, batch, options, LayerStack(stack.paths, stack.names[:kept], stack.layers[:kept]))
    if short is None or not _same_but_shorter(short, whole):
        holder.extend(removed)
        return None
    repeats = {stack.names[position]: stack.names[like[position]] for position in range(kept, len(stack.layers))}
    return Shortened(repeats, whole.calls)


def _run(model: nn.Module, batch: Mapping[str, Any], options: Mapping[str, Any], stack: LayerStack) -> _Run | None:
    """One call of the model. None if its layers do not run once each, one right after the other, or if some calls were not
    seen."""
    calls: list[RecordedCall] = []
    entered: list[tuple[nn.Module, int, tuple[bool, ...]]] = []
    ends: list[int] = []

    def enter(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        entered.append((layer, len(calls), tuple(tensor.requires_grad for tensor in given)))

    def leave(layer: nn.Module, args: Any, result: Any) -> None:
        ends.append(len(calls))

    with contextlib.ExitStack() as hooks:
        for layer in stack.layers:
            hooks.callback(layer.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(layer.register_forward_hook(leave).remove)
        found = torch_calls(model, batch, options, calls)
    if found is None or [layer for layer, _, _ in entered] != list(stack.layers) or len(ends) != len(entered):
        return None
    stretches = tuple(_Stretch(start, end, gradients) for (_, start, gradients), end in zip(entered, ends, strict=True))
    if any(one.end != other.start for one, other in itertools.pairwise(stretches)):
        return None
    return _Run(found, stack.names, stretches)


def _likenesses(run: _Run, stack: LayerStack) -> list[int]:
    """For each layer, the first layer that is similar to it, which may be itself. Layer 0 is unlike all others, since no layer
    made its input."""
    known: dict[Hashable, list[int]] = {}
    like = []
    for position, layer in enumerate(stack.layers):
        called = run.layer(position) if position else None
        if called is None:
            like.append(position)
            continue
        key = (type(layer), called, build_of(layer), run.stretches[position].gradients,
               tuple(parameter.requires_grad for parameter in layer.parameters()))
        alike = (other for other in known.get(key, []) if _same_attributes(
            layer, stack.layers[other], _Names(stack.names[position], stack.names[other], position - other)))
        like.append(next(alike, position))
        if like[-1] == position:
            known.setdefault(key, []).append(position)
    return like


def _same_but_shorter(short: _Run, whole: _Run) -> bool:
    """True if a model without its last layers calls the same operations before its layers, in each layer, and after them."""
    after = short.after()
    return (short.before() == whole.before() and after is not None and after == whole.after() and all(
        short.layer(position) == whole.layer(position) and short.stretches[position] == whole.stretches[position]
        for position in range(len(short.stretches))))


@dataclasses.dataclass(frozen=True)
class _Names:
    """The names of two layers in the model, and the first layer's position minus the second's."""

    one: str
    two: str
    distance: int

    def same_text(self, one: str, two: str) -> bool:
        """True if texts of the two layers are equal except for the layers' names, which PEFT stores in each adapter. A module
        inside the model does not know the names of the modules around it, so only the last two parts count: layers.1."""
        from_, to = (f".{'.'.join(name.split('.')[-2:])}." for name in (self.one, self.two))
        return one == two or f".{one}.".replace(from_, to) == f".{two}."


def _same_attributes(layer: nn.Module, other: nn.Module, names: _Names) -> bool:
    """True if two layers of the same build have the same attributes. Numbers may differ by the difference of positions, and
    texts by the layers' names."""
    return all(_same(vars(one), vars(two), names) for one, two in zip(layer.modules(), other.modules(), strict=True))


def _same(one: Any, two: Any, names: _Names) -> bool:
    if one is two:
        return True
    if type(one) is not type(two):
        return False
    if isinstance(one, Mapping):
        keys = [key for key in one if key not in _COMPARED]
        return keys == [key for key in two if key not in _COMPARED] and all(_same(one[k], two[k], names) for k in keys)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(_same, one, two, itertools.repeat(names)))
    if isinstance(one, functools.partial):
        return all(_same(getattr(one, part), getattr(two, part), names) for part in ("func", "args", "keywords"))
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        return all(_same(getattr(one, field.name), getattr(two, field.name), names) for field in dataclasses.fields(one))
    if type(one) is int:
        return bool(one in (two, two + names.distance))
    if isinstance(one, str):
        return names.same_text(one, two)
    return isinstance(one, bool | float | bytes | set | frozenset | torch.device | torch.dtype) and bool(one == two)


# ---------------------------------------------------------------- the calls of the removed layers

def with_repeats(sections: Sequence[Section], repeats: Mapping[str, str]) -> list[Section]:
    """The sections of the whole model (prologue, layers, epilogue), made from those of a shortened one."""
    if not repeats:
        return list(sections)
    own: dict[str, list[Section]] = {}
    for section in sections[1:-1]:
        own.setdefault(section.layer or section.name, []).append(section)
    found = [sections[0], *sections[1:-1]]
    for name, like in repeats.items():
        found += [_renamed(section, like, name) for section in own[like]]
    layers = {name: number for number, name in enumerate([*own, *repeats], 1)}
    epilogue = dataclasses.replace(sections[-1], sources=_numbered(sections[-1].sources, len(layers) + 1))
    return [dataclasses.replace(each, sources=_numbered(each.sources, layers[each.layer or each.name])) if number else each
            for number, each in enumerate(found)] + [epilogue]


def _renamed(section: Section, old: str, new: str) -> Section:
    def name(former: str) -> str:
        return new + former.removeprefix(old) if former == old or former.startswith(f"{old}.") else former

    return dataclasses.replace(
        section, name=name(section.name), layer=name(section.layer),
        sources=[dataclasses.replace(source, name=name(source.name)) for source in section.sources],
        own_names={name(whole): part for whole, part in section.own_names.items()})


def _numbered(sources: Sequence[Source], call: int) -> list[Source]:
    return [dataclasses.replace(source, index=call) if source.kind == "random" else source for source in sources]
