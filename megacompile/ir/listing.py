"""Tables of sections with a column for each lane, and the excerpt that errors show."""
from __future__ import annotations

from collections.abc import Iterable, Sequence

from tabulate import tabulate
from torch import fx

from megacompile.ir.nodes import accesses, argument, lane_of, nodes, op_of
from megacompile.ir.ops import OPS, Access
from megacompile.ir.printing import form

_MARKS = "-"  # the column of nodes that no lane runs


# One node

def describe(node: fx.Node) -> str:
    """A node in a few words: `forward layers.0 mb 1`, `wait h2d e3`."""
    words = [op_of(node).name]
    for name in ("call", "tile", "tiles", "key", "place", "access", "lane", "mb", "node", "event", "value"):
        value = argument(node, name)
        if isinstance(value, fx.Node):
            words += [value.name] if value.name not in words else []  # a lease's key is often the value's name
        elif name == "tiles" and value is not None:
            words.append(f"{len(value)} tiles")
        elif value is not None:
            words.append(f"mb {value}" if name == "mb" else str(value))
    return " ".join(words)


def _cell(node: fx.Node) -> str:
    named = op_of(node).result is not None or node.users
    return f"{node.name} = {describe(node)}" if named else describe(node)


def _column(node: fx.Node) -> str:
    lane = lane_of(node)
    return _MARKS if lane is None else str(lane)


def _columns(listed: Iterable[fx.Node]) -> list[str]:
    used = {_column(node) for node in listed}
    return [column for column in (_MARKS, "pack", "h2d", "compute", "d2h", "disk_read", "cpu", "disk_write") if column in used]


# Tables

def table_section(name: str, listed: Sequence[fx.Node]) -> str:
    """A section with these of its nodes: a row for each, time downwards, in the column of its lane, then the places that it
    reads and writes. Nodes are numbered as in the whole section."""
    columns = _columns(listed)
    number_of = {node: number for number, node in enumerate(nodes(listed[0].graph))} if listed else {}
    rows = []
    for node in listed:
        touched: dict[Access, list[str]] = {access: [] for access in Access}
        if lane_of(node) is not None:
            for place, access in accesses(node):
                touched[access].append(place)
        rows.append([number_of[node], *(_cell(node) if _column(node) == column else "" for column in columns),
                     *(_few(list(dict.fromkeys(touched[access]))) for access in (Access.READ, Access.WRITE))])
    shown = tabulate(rows, ["#", *columns, "reads", "writes"], tablefmt="simple", disable_numparse=True)
    return f"section {name}\n{shown}"


def op_table() -> str:
    """Every op as a Markdown table: its form in text, its lane, what it reads and writes, and its meaning."""
    rows = []
    for op in OPS.values():
        written = [*op.writes, *([f"{op.home}[tile] without `into`"] if op.home is not None else [])]
        rows.append([f"`{form(op)}`", op.lane or "", ", ".join(op.reads), ", ".join(written), op.meaning])
    return str(tabulate(rows, ["in text", "lane", "reads", "writes", "meaning"], tablefmt="github"))


def _few(places: list[str], most: int = 4) -> str:
    return " ".join(places if len(places) <= most else [*places[:most - 1], f"... ({len(places)})"])


# The excerpt in an error

def excerpt(graph: fx.Graph, marks: dict[fx.Node, str], context: int = 3) -> str:
    """The rows around some nodes, `context` on each side, with a mark after each of those nodes."""
    listed = list(nodes(graph))
    centres = [i for i, node in enumerate(listed) if node in marks]
    shown = sorted({i for c in centres for i in range(max(0, c - context), min(len(listed), c + context + 1))})
    columns = _columns(listed[i] for i in shown)
    width = {c: max([len(c), *(len(_short(listed[i])) for i in shown if _column(listed[i]) == c)]) for c in columns}
    lines = ["      #  " + "  ".join(f"{c:<{width[c]}}" for c in columns).rstrip()]
    for before, i in zip([shown[0] if shown else 0, *shown], shown, strict=False):
        if i > before + 1:
            lines.append("    ...")
        cells = (f"{_short(listed[i]) if _column(listed[i]) == c else '.':<{width[c]}}" for c in columns)
        mark = marks.get(listed[i])
        lines.append(f"{i:>7}  {'  '.join(cells)}{f'  <-- {mark}' if mark else ''}".rstrip())
    return "\n".join(lines)


def _short(node: fx.Node, longest: int = 44) -> str:
    cell = _cell(node)
    return cell if len(cell) <= longest else cell[:longest - 3] + "..."
