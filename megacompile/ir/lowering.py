"""Calls and tiles -> the first program: what a model computes, on the whole batch, before any pass has touched it."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from megacompile.ir.program import Builder, CallSpec, Program, Tile


def model_program(calls: Sequence[CallSpec], tiles: Mapping[str, Tile], batch: int, labels: bool,
                  whole_step: bool = False, differentiable: bool = False, hidden_states: bool = False) -> Program:
    """Stage "model". With labels: sections `forward` (training) and `evaluate`. Without: the epilogue's outputs alone, of
    `evaluate`, or of a `forward` if they are `differentiable`; with `hidden_states`, what every call but the last layer hands
    on as well. A whole step is one section, `train_step`."""
    if whole_step:
        sections = {"train_step": _chain(calls, "loss")}
    elif labels:
        sections = {"forward": _chain(calls, "loss"), "evaluate": _chain(calls, "evaluate")}
    else:
        sections = {"forward" if differentiable else "evaluate": _chain(calls, "outputs", hidden_states)}
    return Program("model", (batch,), dict(tiles), tuple(calls), {}, sections)


def _chain(calls: Sequence[CallSpec], last: str, hidden_states: bool = False) -> fx.Graph:
    """Each call reads its predecessor's outputs, and what the prologue shares with all of them."""
    graph = fx.Graph()
    build = Builder(graph, "model")
    shared: fx.Node | None = None
    carried: fx.Node | None = None
    made: list[fx.Node] = []
    for position, call in enumerate(calls):
        inputs = () if carried is None else (carried, shared)
        op = last if call.role == "epilogue" else "forward"
        name = {"prologue": "s", "epilogue": "l"}.get(call.role, f"h{position}")
        carried = build.add(op, name, template=call.template, call=call.name, mb=0, inputs=inputs)
        shared = shared if shared is not None else carried
        made.append(carried)
    if hidden_states:  # the last layer's becomes the epilogue's: models return it behind their last norm
        build.add("result", key="forward", values=tuple(made[:-2]))
    build.add("result", key=last, values=(carried,))
    return graph
