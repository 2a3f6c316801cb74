"""Calls and tiles -> the first program: the model's computation on the whole batch, before any pass."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from megacompile.ir.precision import Float8
from megacompile.ir.program import Builder, CallSpec, Program, Tile


def model_program(calls: Sequence[CallSpec], tiles: Mapping[str, Tile], batch: int, labels: bool,
                  whole_step: bool = False, differentiable: bool = False, hidden_states: bool = False,
                  precision: Float8 | None = None) -> Program:
    """The program of stage "model".

    With labels it has the sections `forward` (training) and `evaluate`. Without labels it has one section that returns the
    epilogue's outputs: `forward` if they are `differentiable`, else `evaluate`; with `hidden_states` it also returns the
    outputs of every call before the last layer. A whole step is one section, `train_step`. `precision`: that of the
    templates."""
    if whole_step:
        sections = {"train_step": _chain(calls, "loss")}
    elif labels:
        sections = {"forward": _chain(calls, "loss"), "evaluate": _chain(calls, "evaluate")}
    else:
        sections = {"forward" if differentiable else "evaluate": _chain(calls, "outputs", hidden_states)}
    return Program("model", (batch,), dict(tiles), tuple(calls), {}, sections, precision=precision)


def _chain(calls: Sequence[CallSpec], last: str, hidden_states: bool = False) -> fx.Graph:
    """Each call reads the outputs of the call before it and those of the prologue."""
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
    if hidden_states:  # the last layer's is the epilogue's: models return it after their last norm
        build.add("result", key="forward", values=tuple(made[:-2]))
    build.add("result", key=last, values=(carried,))
    return graph
