"""Adds the update: one clip, then every trainable tile in the order in which the next forward needs it.

    c = clip(tiles=("prologue", "layers.0", ...))
    adam("prologue", c)
    adam("layers.0", c)
    w = prefetch("layers.0", into="R0")                    # a resident tile is refreshed at once
"""
from __future__ import annotations

from torch import fx

from megacompile.plan import Plan
from megacompile.program import Builder, Program

name, requires, provides = "optimizer", "offload", "optimizer"


def run(program: Program, plan: Plan) -> Program:
    tiles = list(dict.fromkeys(tile for call in program.calls for tile in call.tiles))
    sections = dict(program.sections)
    if "backward" in sections:
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


def _load(program: Program, plan: Plan, tiles: list[str]) -> fx.Graph:
    """Fills the resident slots: before the first step, and after weights were changed from outside."""
    graph = fx.Graph()
    build = Builder(graph, name)
    for tile in tiles:
        _arrive(build, program, plan, tile)
    return graph
