"""Parts of a program as Python text: nodes, sections, and the declarations above them.

    w0 = p.prefetch("layers.0", into="W0")                                 # h2d

`Program.text` puts the parts together, and `text.py` parses the result.
"""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tabulate import tabulate
from torch import fx

from megacompile.ir.nodes import accesses, argument, lane_of, nodes, op_of
from megacompile.ir.ops import OPS, Access, Op
from megacompile.ir.placement import LISTS
from megacompile.ir.plan import BatchSpec, CaptureKey, Plan
from megacompile.ir.precision import Float8

#: Parameters that say what a node works on. In text they are positional if they lead an op's parameters; others are keywords.
POSITIONAL = frozenset({"name", "tile", "template", "call", "key", "place", "access", "lane", "node", "event", "value"})

_COMMENT_COLUMN = 88

#: The opening of a program, and the declarations of a tile, a call and a slot: each parameter with the kind of value that it
#: holds, then the parameters that may be absent.
OPENING = {"stage": "text", "micro_batches": "numbers", "ranks": "number", "hosts": "number", "spread": "number"}
OPENING_OPTIONAL = ("ranks", "hosts", "spread")  # 1 if absent
DECLARATIONS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "tile": ({"name": "text", "parameters": "number", "weight_bytes": "number", "gradient_bytes": "number",
              "trainable": "flag", "state_bytes": "number", "visit_bytes": "number", "disk_bytes": "number",
              "rule": "text", "routed_bytes": "number"},
             ("state_bytes", "visit_bytes", "disk_bytes", "rule", "routed_bytes")),
    "call": ({"name": "text", "role": "text", "template": "text", "tiles": "texts", "weightless": "texts",
              "output_bytes": "number", "bytes_of_each": "numbers"},
             ("weightless", "output_bytes", "bytes_of_each")),
    "slot": ({"name": "text", "bytes": "number"}, ())}
#: Fields of a plan that say nothing where no tile's state is on disk.
_OF_DISK = ("disk_state", "state_slabs")
#: Fields of shapes and plans that are left out if empty, since most batches are not grouped.
_OF_GROUPS = ("group_rows", "group_lengths", "lengths")
_FIELD_KINDS = {"int": "number", "bool": "flag", "str": "text", "tuple[str, ...]": "texts", "tuple[int, ...]": "numbers"}


def _parameters(made: type[Float8 | BatchSpec | CaptureKey | Plan],
                written: Sequence[str] = ()) -> tuple[dict[str, str], tuple[str, ...]]:
    """The parameters of a declaration, each with its kind, and those that have a default. They are the fields of the declared
    object, except those `written` elsewhere, with lists of tiles instead of placements, and the fields of a capture instead of
    it."""
    kinds: dict[str, str] = {}
    for field in dataclasses.fields(made):
        if field.name == "placements":
            kinds |= dict.fromkeys(LISTS, "texts")
        elif field.name == "capture":
            kinds |= _parameters(CaptureKey, written)[0]
        elif field.name not in written:
            kinds[field.name] = _FIELD_KINDS[str(field.type)]
    needed = {field.name for field in dataclasses.fields(made) if field.default is dataclasses.MISSING}
    return kinds, tuple(name for name in kinds if name not in needed)


#: Declarations of what a program was made for: the fields of `BatchSpec` and `Plan`, except those that the opening has, and the
#: traced length, which depends on the batches that came before. Fields with a default may be absent.
MADE_FOR: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "shape": _parameters(BatchSpec, ("traced_length",)), "plan": _parameters(Plan, ("batch", "length", *OPENING))}
#: Declarations that stand once at most. A program whose products are in the dtype of its weights has no precision.
ONCE = {"precision": _parameters(Float8), **MADE_FOR}


def print_head(stage: str, micro_batches: Sequence[int], processes: Mapping[str, int],
               declared: Iterable[tuple[str, Any]]) -> str:
    """The text above the sections. `processes`: the numbers of ranks, of copies, and of hosts of each copy. `declared`:
    objects to declare, each with its kind (in `ONCE` or `DECLARATIONS`)."""
    opening = {"stage": stage, "micro_batches": tuple(micro_batches)} | {
        name: count for name, count in processes.items() if count > 1}
    lines = [f"# megacompile program, stage {stage}", f"program = Program({_arguments(OPENING, opening)})"]
    for kind, one in declared:
        signature, optional = DECLARATIONS.get(kind) or (ONCE[kind][0], ())
        capture = vars(one.capture) if isinstance(one, BatchSpec) else {}
        given = {name: capture[name] if name in capture else getattr(one, name) for name in signature}
        given = {name: value for name, value in given.items() if value or name not in optional}
        if isinstance(one, Plan) and not one.disk_state:
            given = {name: value for name, value in given.items() if name not in _OF_DISK}
        given = {name: value for name, value in given.items() if value or name not in _OF_GROUPS}
        lines.append(f"program.{kind}({_arguments(signature, given)})")
    return "\n".join(lines) + "\n"


def print_node(node: fx.Node) -> str:
    """One line of a section, without indentation and comment. Names a node without a value only if another node uses it."""
    op = op_of(node)
    given = {name: value for name, value in node.kwargs.items() if value is not None}
    call = f"p.{op.name}({_arguments(op.parameters, given)})"
    return f"{node.name} = {call}" if op.result is not None or node.users else call


def print_section(name: str, listed: Sequence[fx.Node]) -> str:
    """A section with only these of its nodes."""
    lines = [(f"    {print_node(node)}", lane_of(node)) for node in listed] or [("    pass", None)]
    width = max(min(len(line), _COMMENT_COLUMN) for line, _ in lines)
    body = [line if lane is None else f"{line:<{width}}  # {lane}" for line, lane in lines]
    return "\n".join([f"def {name}(p):", *body]) + "\n"


def _arguments(parameters: Mapping[str, str] | tuple[str, ...], given: Mapping[str, Any]) -> str:
    positional = positional_parameters(tuple(parameters))
    return ", ".join(_literal(given[name]) if name in positional else f"{name}={_literal(given[name])}"
                     for name in parameters if name in given)


def positional_parameters(parameters: tuple[str, ...]) -> tuple[str, ...]:
    first_keyword = next((i for i, name in enumerate(parameters) if name not in POSITIONAL), len(parameters))
    return parameters[:first_keyword]


def _literal(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, str):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, bool | int):
        return str(value)
    assert isinstance(value, tuple | list), f"{value!r} has no place in a schedule"
    return f"({', '.join(map(_literal, value))}{',' if len(value) == 1 else ''})"


def call_form(head: str, parameters: Mapping[str, str] | tuple[str, ...], optional: tuple[str, ...] = (),
          op: Op | None = None) -> str:
    """The form of a call, for messages and documentation: `value = p.prefetch(tile, [staging=...], [into=...])`."""
    positional = positional_parameters(tuple(parameters))
    written = [name if name in positional else f"{name}=..." for name in parameters]
    shown = ", ".join(f"[{w}]" if name in optional else w for name, w in zip(parameters, written, strict=True))
    return f"{'value = ' if op is not None and op.result is not None else ''}{head}({shown})"


def form(op: Op) -> str:
    """The form of a node of this op in text; arguments in brackets may be absent."""
    return call_form(f"p.{op.name}", op.parameters, op.optional, op)


# -------------------- Tables of sections with a column for each lane, and the excerpt that errors show
_MARKS = "-"  # the column of nodes that no lane runs


# One node

def describe(node: fx.Node) -> str:
    """A short description of a node: `forward layers.0 mb 1`, `wait h2d e3`."""
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
    """A section with only these of its nodes, as a table: a row for each, in the column of its lane, in program order, then the
    places that it reads and writes. Nodes have their numbers in the whole section."""
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
    """The rows around the nodes in `marks`, `context` on each side. Those nodes are marked."""
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
