"""Selects and prints parts of a program: a section, some layers, or what changed between stages, as Python, table or JSON.

    shown = select(program, section="forward", layers=layer_range("0:2", program))
    print(render(program, shown, "table"))
    print(difference(stages["prefetch"], stages["place"]))

`Program.text` and `Program.table` print whole sections with the same code.
"""
from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from tabulate import tabulate
from torch import Tensor, fx

from megacompile.errors import ArgumentError
from megacompile.frontend.templates.template import Template
from megacompile.ir import folding, printing, text
from megacompile.ir.program import Access, Program, accesses, argument, lane_of, nodes, op_of, operands
from megacompile.passes.pipeline import op_counts

#: The nodes to show for each section, in program order.
Shown = Mapping[str, Sequence[fx.Node]]
T = TypeVar("T")


#: Options that show something other than a program, and the options that may be combined with them.
_INSTEAD: Mapping[str, Sequence[str]] = {
    "--trace": ("--picture", "--html"), "--picture": ("--trace", "--html"), "--html": ("--trace", "--picture"), "--log": (),
    "--template": ("--stage", "--format"), "--diff": ("--section", "--layers")}


def check_options(given: Collection[str]) -> None:
    """Raises `ArgumentError` if one of the given options would have no effect next to another."""
    for option in given:
        for other in given if option in _INSTEAD else ():
            if other != option and other not in _INSTEAD[option]:
                raise ArgumentError(f"{option} and {other} cannot be combined: leave one of them out")


def choose(choices: Mapping[str, T], name: str, what: str) -> T:
    """The choice with this name. Raises `ArgumentError`, which lists the choices, if there is none."""
    if name not in choices:
        raise ArgumentError(f"unknown {what} {name!r}: choose one of {', '.join(choices)}")
    return choices[name]


# ---------------------------------------------------------------- which nodes

def layer_range(written: str, program: Program) -> list[str]:
    """The calls of a range of layers: "1:3" gives those of the second and third layer. Either bound may be left out; a single
    number means one layer.

    Raises `ArgumentError` if `written` is not a range, or if it contains none of the program's layers."""
    layers = [call.name for call in program.calls if call.role == "layer"]
    match = re.fullmatch(r"(\d*)(:?)(\d*)", written)
    if match is not None and (match[1] or match[2]):
        begin = int(match[1] or 0)
        end = int(match[3] or len(layers)) if match[2] else begin + 1
        if begin < end <= len(layers):
            return layers[begin:end]
    raise ArgumentError(f"{written!r} is not a range of layers: write first:end, from 0 to {len(layers)}, such as "
                        f"0:{min(3, len(layers))}")


def select(program: Program, section: str | None = None, layers: Collection[str] | None = None) -> Shown:
    """The nodes of one section (None: of all), restricted to those about `layers` if given. Raises `ArgumentError` for an
    unknown section."""
    if section is not None:
        choose(program.sections, section, "section")
    names = program.sections if section is None else (section,)
    return {name: _about(program, program.section(name), layers) for name in names}


def _about(program: Program, graph: fx.Graph, layers: Collection[str] | None) -> list[fx.Node]:
    listed = list(nodes(graph))
    if layers is None:
        return listed
    wanted = {*layers, *(tile for call in program.calls if call.name in layers for tile in call.tiles)}
    subjects = _subjects(listed)
    return [node for node in listed if subjects[node] & wanted]


def _subjects(listed: Sequence[fx.Node]) -> dict[fx.Node, frozenset[str]]:
    """The names of the calls and tiles that each node is about. A wait is about the next instruction of its lane. A value from
    an earlier section is about its users. A node that uses a value or event is also about the node that produced it."""
    found: dict[fx.Node, frozenset[str]] = {}
    ahead: dict[Any, frozenset[str]] = {}  # by lane: the names of its next instruction
    for node in reversed(listed):
        op, lane = op_of(node).name, lane_of(node)
        named = frozenset(argument(node, name) for name in ("call", "tile")) - {None}
        if op == "wait":
            named = ahead.get(lane, named)
        elif op in ("enter", "leased"):
            named = frozenset(itertools.chain.from_iterable(found[user] for user in node.users))
        elif named:
            ahead[lane] = named
        found[node] = named
    for node in listed:
        for name in ("node", "value", "event"):
            if op_of(node).name != "wait" and operands(node, name):
                found[node] |= found[operands(node, name)[0]]
    return found


# ---------------------------------------------------------------- output formats

def _python(program: Program, shown: Shown, fold: bool) -> str:
    sections = [(folding.fold_section if fold else text.print_section)(name, listed) for name, listed in shown.items()]
    whole = all(len(shown.get(name, ())) == len(list(nodes(graph))) for name, graph in program.sections.items())
    head = folding.fold_head(program.head()) if fold else program.head()
    return "\n".join([head, *sections] if whole else sections)


def _table(program: Program, shown: Shown, fold: bool) -> str:
    return "\n\n".join(printing.table_section(name, listed) for name, listed in shown.items())


def _json(program: Program, shown: Shown, fold: bool) -> str:
    """An object with `stage`, `micro_batches`, `ranks`, `hosts`, `spread`, `tiles`, `calls`, `slots` and `sections`. Each
    section is the list of its nodes in program order. A node has `name`, `op`, `lane` (or null), `arguments` (other nodes by
    name), and the places that it `reads` and `writes`."""
    return json.dumps({
        "stage": program.stage, "micro_batches": program.micro_batches, "ranks": program.ranks,
        "hosts": program.hosts,
        "spread": program.spread,
        **{kind: [asdict(one) for one in declared] for kind, declared in (
            ("tiles", program.tiles.values()), ("calls", program.calls), ("slots", program.slots.values()))},
        "sections": {name: [_node(node) for node in listed] for name, listed in shown.items()}}, indent=1)


def _node(node: fx.Node) -> dict[str, Any]:
    lane = lane_of(node)
    touched = list(dict.fromkeys(accesses(node))) if lane is not None else []
    return {"name": node.name, "op": op_of(node).name, "lane": lane,
            "arguments": {name: fx.map_arg(value, lambda n: n.name) for name, value in node.kwargs.items()},
            "reads": [place for place, access in touched if access == Access.READ],
            "writes": [place for place, access in touched if access == Access.WRITE]}


_FORMATS: dict[str, Callable[[Program, Shown, bool], str]] = {"python": _python, "table": _table, "json": _json}


def render(program: Program, shown: Shown, output_format: str = "python", fold: bool = True) -> str:
    """The nodes as Python text (with the program's declarations if everything is shown), as a table with a row for each node,
    or as a JSON object (`_json`). `fold` affects only Python."""
    return _FORMATS[output_format](program, shown, fold)


# ---------------------------------------------------------------- what passes did

def stage_range(written: str, stages: Mapping[str, Program]) -> tuple[Program, Program]:
    """The two stages that "prefetch..place" names. Raises `ArgumentError` if there are no such stages."""
    before, dots, after = written.partition("..")
    if not dots:
        raise ArgumentError(f"{written!r} does not name two stages: write two of {', '.join(stages)}, for example "
                            "prefetch..place")
    return choose(stages, before, "stage"), choose(stages, after, "stage")


def difference(before: Program, after: Program, section: str | None = None, layers: Collection[str] | None = None,
               fold: bool = True, context: int = 1) -> str:
    """The nodes that one stage adds to another and removes from it, as lines that begin with + and -. With `fold`, runs that
    repeat for each layer are shown once. `context`: the number of unchanged lines to show around them."""
    old_head, new_head = (text.print_program(program.evolve(sections={}, stage=after.stage)).splitlines()
                          for program in (before, after))
    declared = [line for line in difflib.unified_diff(old_head, new_head, lineterm="", n=0) if not line.startswith("@@")]
    lines = [f"--- {before.stage}", f"+++ {after.stage}", *declared[2:]]
    named = {**before.sections, **after.sections}
    for name in named if section is None else [section]:
        choose(named, name, "section")
        old, new = (_about(p, p.sections.get(name, fx.Graph()), layers) for p in (before, after))
        listed, marks = _changes(old, new, context)
        if any(mark != " " for mark in marks):
            lines.append(f" def {name}(p):")
            lines += folding.fold_lines(listed, marks) if fold else (
                f"{mark}    {text.print_node(node)}" for node, mark in zip(listed, marks, strict=True))
    return "\n".join(lines)


def _changes(old: Sequence[fx.Node], new: Sequence[fx.Node], context: int) -> tuple[list[fx.Node], list[str]]:
    """The nodes of a difference, and the mark of each: "+", "-" or " "."""
    listed: list[fx.Node] = []
    marks: list[str] = []
    matcher = difflib.SequenceMatcher(a=[*map(text.print_node, old)], b=[*map(text.print_node, new)], autojunk=False)
    for group in matcher.get_grouped_opcodes(context):
        for tag, old_begin, old_end, new_begin, new_end in group:
            unchanged = tag == "equal"
            for mark, part in ((" ", new[new_begin:new_end] if unchanged else []),
                               ("-", [] if unchanged else old[old_begin:old_end]),
                               ("+", [] if unchanged else new[new_begin:new_end])):
                listed += part
                marks += [mark] * len(part)
    return listed, marks


def pass_log(log: Sequence[str], stages: Mapping[str, Program]) -> str:
    """The log line of each pass, then a table with the number of each op: a row for each op, a column for each stage."""
    counts = {name: op_counts(program) for name, program in stages.items()}
    ops = dict.fromkeys(op for each in counts.values() for op in each)
    rows = [[op, *(each.get(op, "") for each in counts.values())] for op in ops]
    rows.append(["all", *(sum(each.values()) for each in counts.values())])
    return "\n".join([*log, "", str(tabulate(rows, ["op", *counts], tablefmt="simple"))])


# ---------------------------------------------------------------- templates

def template(shown: Template, stage: str | None = None, output_format: str = "python", chunk: int = 0) -> str:
    """A template's variants with dtypes and shapes in terms of B and T; or, with `stage`, one stage of it as Python.

    `stage`: such as "attention" or "forward.chunk_tokens"; "chunk_tokens" gives this stage of every variant. `chunk`:
    `token_chunk` of a plan. Raises `ArgumentError` for an unknown stage, or for a stage in a format other than Python."""
    variants = {name: shown.variant(name, chunk) for name in shown.variant_names}
    if stage is not None:
        if output_format != "python":
            raise ArgumentError(f"a template's stages exist only as Python: leave out --format {output_format}, or leave out "
                                "--stage to show its variants")
        stages = {key: code for key, code in shown.stages.items() if key == stage or key.endswith(f".{stage}")}
        if not stages:
            choose(shown.stages, stage, f"stage of template {shown.name}")
        return "\n".join(f"# {shown.name}: {key}{code.rstrip()}\n" for key, code in stages.items())
    if output_format == "python":
        graphs = (f"# {name}\n{_readable(variant.graph)}" for name, variant in variants.items())
        return "\n\n".join([f"# template {shown.name}: residuals take {shown.residual_bytes()} bytes", *graphs])
    rows = {name: [_template_row(shown, node) for node in variant.graph.graph.nodes] for name, variant in variants.items()}
    if output_format == "json":
        return json.dumps({"template": shown.name, "variants": rows}, indent=1)
    tables = {name: tabulate(each, "keys", tablefmt="simple", disable_numparse=True) for name, each in rows.items()}
    return "\n\n".join(f"{name}\n{each}" for name, each in tables.items())


def _readable(graph: fx.GraphModule) -> str:
    """A graph's code, with shapes in terms of B and T."""
    code = graph.print_readable(print_output=False).strip().replace("        # No stacktrace found for following nodes\n", "")
    for symbol, name in graph.meta["symbols"].items():
        code = re.sub(rf"\b{symbol}\b", str(name), code)
    return code


def _template_row(shown: Template, node: fx.Node) -> dict[str, str]:
    value = node.meta.get("val")
    shape = f"[{', '.join(str(shown.symbolic(size)) for size in value.shape)}]" if isinstance(value, Tensor) else ""
    return {"name": node.name, "op": node.op, "target": str(node.target), "shape": shape,
            "dtype": str(getattr(value, "dtype", "")).removeprefix("torch."),
            "inputs": " ".join(used.name for used in node.all_input_nodes)}
