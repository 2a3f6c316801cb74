"""Adds the update: one clip, then every trainable tile in the order in which the next forward needs it.

    c = clip(tiles=("prologue", "layers.0", ...))
    adam("prologue", c)
    adam("layers.0", c)
    w = prefetch("layers.0", into="R0")                    # a resident tile is refreshed at once

Where the plan updates on arrival, `adam` stands behind each tile's `offload` instead, and nothing is clipped.
"""
from __future__ import annotations

from torch import fx

from megacompile.plan import Plan
from megacompile.program import Builder, Program, argument, copy_section, find, op_of

name, requires, provides = "optimizer", "offload", "optimizer"


def run(program: Program, plan: Plan) -> Program:
    tiles = list(dict.fromkeys(tile for call in program.calls for tile in call.tiles))
    sections = dict(program.sections)
    if plan.update == "arrival":
        for key in ("backward", "train_step"):
            if key in sections:
                sections[key] = _on_arrival(program, plan, copy_section(sections[key]))
        sections.pop("backward_accumulate", None)  # gradients are consumed: there is nothing to add to
    elif "backward" in sections or "train_step" in sections:
        sections["update"] = _update(program, plan, [t for t in tiles if program.tiles[t].trainable])
    if plan.resident:
        sections["load"] = _load(program, plan, [t for t in tiles if t in plan.resident])
    return program.evolve(stage=provides, sections=sections)


def _arrive(build: Builder, program: Program, plan: Plan, tile: str) -> None:
    staging = None if plan.locked else build.add("pack", f"k{program.number(tile)}", tile=tile)
    build.add("prefetch", f"w{program.number(tile)}", tile=tile, staging=staging)


def _update(program: Program, plan: Plan, tiles: list[str]) -> fx.Graph:
    graph = fx.Graph()
    build = Builder(graph, name)
    clip = build.add("clip", "c", tiles=tuple(tiles))
    for tile in tiles:
        build.add("adam", tile=tile, clip=clip)
        if tile in plan.resident:
            _arrive(build, program, plan, tile)
    return graph


def _on_arrival(program: Program, plan: Plan, graph: fx.Graph) -> fx.Graph:
    """Each tile is updated as soon as its gradients are home, in the order in which they arrive."""
    build = Builder(graph, name)
    for node in list(find(graph, "offload")):
        tile = argument(node, "tile")
        home = next((user for user in node.users if op_of(user).name == "accumulate"), node)
        updated = build.after(home, "adam", tile=tile)
        if tile in plan.resident:
            arrival = Builder(graph, name)
            staging = None if plan.locked else arrival.after(updated, "pack", f"k{program.number(tile)}", tile=tile)
            arrival.after(staging or updated, "prefetch", f"w{program.number(tile)}", tile=tile, staging=staging)
    return graph


def _load(program: Program, plan: Plan, tiles: list[str]) -> fx.Graph:
    """Fills the resident slots: before the first step, and after weights were changed from outside."""
    graph = fx.Graph()
    build = Builder(graph, name)
    for tile in tiles:
        _arrive(build, program, plan, tile)
    return graph
