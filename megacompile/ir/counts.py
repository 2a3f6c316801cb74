"""How many nodes a program has of each op, and how many bytes each of its sections copies."""
from __future__ import annotations

from collections import Counter

from tabulate import tabulate

from megacompile.ir.program import Lane, Program, lane_of, nodes, op_of


def op_counts(program: Program) -> Counter[str]:
    """How many nodes of each op all sections have."""
    return Counter(op_of(node).name for graph in program.sections.values() for node in nodes(graph))


def summary(program: Program) -> str:
    """A row for each section: its nodes, how many of each op, its events, and the bytes that it copies in each direction."""
    rows = []
    for name, graph in program.sections.items():
        counts = Counter(op_of(node).name for node in nodes(graph))
        events = counts["record"] + counts["enter"]
        marks = ("record", "wait", "enter", "leave", "release")
        work = ", ".join(f"{count} {op}" for op, count in counts.items() if op not in marks)
        moved = dict.fromkeys((Lane.PACK, Lane.H2D, Lane.D2H), 0)
        for node in nodes(graph):
            lane = lane_of(node)
            if lane in moved:
                moved[lane] += program.moved_bytes(node)
        rows.append([name, sum(counts.values()), work, events, counts["wait"], *moved.values()])
    header = ["section", "nodes", "work", "events", "waits", "pack bytes", "h2d bytes", "d2h bytes"]
    return str(tabulate(rows, header, tablefmt="simple", intfmt=","))
