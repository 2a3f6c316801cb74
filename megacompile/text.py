"""Programs as Python text, and back: `parse(print_program(p)) == p` at every stage.

    # megacompile program, stage synchronize
    program = Program(stage="synchronize", micro_batches=(2, 1))
    program.tile("layers.0", parameters=1024, weight_bytes=2048, gradient_bytes=2048, trainable=True)
    program.call("layers.0", role="layer", template="decoder", tiles=("layers.0",))
    program.slot("W0", bytes=4096)

    def forward(p):
        w0 = p.prefetch("layers.0", into="W0")                                 # h2d
        e0 = p.record(w0)                                                      # h2d
        p.wait("compute", e0)                                                  # compute

The parser reads the syntax tree of such text with a closed list of calls; nothing in it is ever executed. It refuses
whatever the printer would not write: unknown words, wrong kinds of arguments, undefined or redefined names, a tail.
`docs/schedule-language.md` has the grammar.
"""
from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch import fx

from megacompile.errors import ProgramError
from megacompile.program import (
    OPS,
    STAGES,
    Access,
    Builder,
    CallSpec,
    Lane,
    Op,
    Program,
    Slot,
    Tile,
    lane_of,
    nodes,
    op_of,
)

#: Parameters that say what a node is about. Those that lead an op's parameters are positional in text, others keywords.
POSITIONAL = frozenset({"name", "tile", "template", "call", "key", "place", "access", "lane", "node", "event", "value"})
#: What text may hold: longer names or larger numbers are no program of ours.
LONGEST_NAME, LARGEST_NUMBER = 1024, 2**63 - 1

_COMMENT_COLUMN = 88
_EXPECTED = {
    "text": "a printable string", "texts": "a tuple of strings", "flag": "True or False",
    "number": "a whole number below 2**63", "numbers": "a tuple of whole numbers",
    "value": "the name of a node above", "values": "a tuple of names of nodes above",
    "value or values": "the name of a node above, or a tuple of them"}
#: What each parameter of an op holds.
KINDS = {
    **dict.fromkeys(("tile", "template", "call", "key", "into", "place", "access", "lane"), "text"), "tiles": "texts",
    "mb": "number", "overwrite": "flag", **dict.fromkeys(("weights", "inputs", "values"), "values"),
    "accumulators": "value or values",
    **dict.fromkeys(("staging", "gradient", "saved", "reduced", "resident", "slab", "state", "clip", "value", "node", "event"),
                    "value")}
_CHOICES = {"lane": tuple(map(str, Lane)), "access": tuple(map(str, Access)), "stage": STAGES}
_PROGRAM = {"stage": "text", "micro_batches": "numbers"}
_DECLARATIONS: dict[str, tuple[type, dict[str, str], tuple[str, ...]]] = {
    "tile": (Tile, {"name": "text", "parameters": "number", "weight_bytes": "number", "gradient_bytes": "number",
                    "trainable": "flag", "state_bytes": "number"}, ("state_bytes",)),
    "call": (CallSpec, {"name": "text", "role": "text", "template": "text", "tiles": "texts", "weightless": "texts"},
             ("weightless",)),
    "slot": (Slot, {"name": "text", "bytes": "number"}, ())}


# Printing

def print_program(program: Program, section: str | None = None) -> str:
    """Python text that rebuilds the program; with `section` only that section's function. Deterministic."""
    if section is not None:
        return print_section(section, list(nodes(program.section(section))))
    head = [f"# megacompile program, stage {program.stage}",
            f"program = Program({_arguments(_PROGRAM, {k: getattr(program, k) for k in _PROGRAM})})"]
    for kind, declared in (("tile", program.tiles.values()), ("call", program.calls), ("slot", program.slots.values())):
        _, signature, optional = _DECLARATIONS[kind]
        for one in declared:
            given = {k: getattr(one, k) for k in signature if k not in optional or getattr(one, k)}
            head.append(f"program.{kind}({_arguments(signature, given)})")
    sections = [print_section(name, list(nodes(graph))) for name, graph in program.sections.items()]
    return "\n".join(["\n".join(head) + "\n", *sections])


def print_node(node: fx.Node) -> str:
    """One line of a section, without indentation and comment. Nodes without a value have a name if another needs it."""
    op = op_of(node)
    given = {name: value for name, value in node.kwargs.items() if value is not None}
    call = f"p.{op.name}({_arguments(op.parameters, given)})"
    return f"{node.name} = {call}" if op.result is not None or node.users else call


def print_section(name: str, listed: Sequence[fx.Node]) -> str:
    """A section of which these nodes are shown."""
    lines = [(f"    {print_node(node)}", lane_of(node)) for node in listed] or [("    pass", None)]
    width = max(min(len(line), _COMMENT_COLUMN) for line, _ in lines)
    body = [line if lane is None else f"{line:<{width}}  # {lane}" for line, lane in lines]
    return "\n".join([f"def {name}(p):", *body]) + "\n"


def _arguments(parameters: Mapping[str, str] | tuple[str, ...], given: Mapping[str, Any]) -> str:
    positional = _positional(tuple(parameters))
    return ", ".join(_literal(given[name]) if name in positional else f"{name}={_literal(given[name])}"
                     for name in parameters if name in given)


def _positional(parameters: tuple[str, ...]) -> tuple[str, ...]:
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


# Parsing

def parse(text: str) -> Program:
    """The program that prints as `text`. Raises ProgramError with line, column and what was expected there."""
    return _Parser(text).program()


class _Parser:
    """Reads one text. State: what is declared so far, and the names of the section being read."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.head: dict[str, Any] | None = None
        self.declared: dict[str, dict[str, Any]] = {"tile": {}, "call": {}, "slot": {}}
        self.sections: dict[str, fx.Graph] = {}
        self.names: dict[str, fx.Node] = {}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "\d" in a string warns; such strings are judged below
                self.body = ast.parse(text).body
        except SyntaxError as error:
            self.fail_at(error.lineno or 1, error.offset or 1, f"no Python ({error.msg}); expected a program's text")
        except (ValueError, RecursionError, MemoryError) as error:  # null bytes, absurd nesting
            self.fail_at(1, 1, f"no Python ({error or type(error).__name__}); expected a program's text")

    def fail_at(self, line: int, column: int, message: str) -> NoReturn:
        shown = self.lines[line - 1] if 0 < line <= len(self.lines) else ""
        mark = f"\n    {shown[:200]}\n    {' ' * (column - 1)}^" if shown and column <= 200 else ""
        raise ProgramError(f"line {line}, column {column}: {message}{mark}") from None

    def fail(self, where: ast.AST, message: str) -> NoReturn:
        self.fail_at(getattr(where, "lineno", 1), getattr(where, "col_offset", 0) + 1, message)

    def program(self) -> Program:
        for statement in self.body:
            if self.head is None:
                self.head = self.opening(statement)
            elif isinstance(statement, ast.FunctionDef):
                self.section(statement)
            else:
                self.declaration(statement)
        if self.head is None:
            self.fail_at(1, 1, "no program; expected `program = Program(stage=..., micro_batches=...)`")
        return Program(**self.head, tiles=self.declared["tile"], calls=tuple(self.declared["call"].values()),
                       slots=self.declared["slot"], sections=self.sections)

    def opening(self, statement: ast.stmt) -> dict[str, Any]:
        form = "expected `program = Program(stage=..., micro_batches=...)`"
        match statement:
            case ast.Assign(targets=[ast.Name(id="program")], value=ast.Call(func=ast.Name(id="Program")) as call):
                return self.arguments(call, _PROGRAM, (), form)
        self.fail(statement, f"a program begins otherwise; {form}")

    def declaration(self, statement: ast.stmt) -> None:
        form = "expected `program.tile(...)`, `program.call(...)`, `program.slot(...)` or `def <section>(p):`"
        match statement:
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="program"), attr=kind)) as call):
                if kind not in _DECLARATIONS:
                    self.fail(call, f"unknown declaration {kind}; {form}")
            case _:
                self.fail(statement, f"no declaration; {form}")
        if self.sections:
            self.fail(statement, f"{kind} after a section; expected all declarations before the first section")
        make, signature, optional = _DECLARATIONS[kind]
        given = self.arguments(call, signature, optional, f"expected `{_form(f'program.{kind}', signature, optional)}`")
        if given["name"] in self.declared[kind]:
            self.fail(call, f"{kind} {given['name']} is declared twice; expected another name")
        self.declared[kind][given["name"]] = make(**given)

    def section(self, function: ast.FunctionDef) -> None:
        plain = ast.parse(f"def {function.name}(p): pass").body[0]
        assert isinstance(plain, ast.FunctionDef)
        if (ast.dump(function.args) != ast.dump(plain.args) or function.decorator_list or function.returns
                or getattr(function, "type_params", None)):  # type parameters: Python 3.12
            self.fail(function, f"section {function.name} has another signature; expected `def {function.name}(p):`")
        if function.name in self.sections:
            self.fail(function, f"section {function.name} is defined twice; expected another name")
        graph = self.sections[function.name] = fx.Graph()
        build, self.names = Builder(graph), {}
        if len(function.body) == 1 and isinstance(function.body[0], ast.Pass):
            return
        for statement in function.body:
            self.node(statement, build)

    def node(self, statement: ast.stmt, build: Builder) -> None:
        name: str | None = None
        match statement:
            case ast.Assign(targets=[ast.Name(id=target)]):
                name = target
            case ast.Assign():
                self.fail(statement, "no plain name on the left; expected `name = p.op(...)`")
        match statement.value if isinstance(statement, ast.Assign | ast.Expr) else None:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="p"), attr=word)) as call:
                pass
            case _:
                self.fail(statement, "no node; expected `name = p.op(...)` or `p.op(...)`")
        if word not in OPS:
            self.fail(call, f"unknown op {word}; expected one of {', '.join(OPS)}")
        op = OPS[word]
        form = f"expected `{_form(f'p.{word}', op.parameters, op.optional, op)}`"
        if name is None and op.result is not None:
            self.fail(statement, f"{word} makes a value that has no name; {form}")
        if name == "p" or name in self.names:
            self.fail(statement, f"{name} is defined twice; expected another name")
        given = self.arguments(call, {k: KINDS[k] for k in op.parameters}, op.optional, form)
        made = build.add(word, name, **given)
        if name is None:
            return
        if made.name != name:
            self.fail(statement, f"{name} is no name for a value (a node has it, or Python); expected another name")
        self.names[name] = made

    def arguments(self, call: ast.Call, signature: Mapping[str, str], optional: tuple[str, ...],
                  form: str) -> dict[str, Any]:
        positional = _positional(tuple(signature))
        if len(call.args) > len(positional):
            self.fail(call.args[len(positional)], f"too many positional arguments; {form}")
        given: dict[str, Any] = {}
        written = [*zip(positional, call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
        for name, value in written:
            if name is None or name not in signature or name in positional[len(call.args):]:
                self.fail(value, f"unexpected argument {name or '**'}; {form}")
            if name in given:
                self.fail(value, f"argument {name} is given twice; {form}")
            given[name] = self.value(name, value, signature[name])
        missing = [name for name in signature if name not in given and name not in optional]
        if missing:
            self.fail(call, f"missing {', '.join(missing)}; {form}")
        return given

    def value(self, parameter: str, tree: ast.expr, kind: str) -> Any:
        read = _SCALARS.get(kind)
        if read is not None:
            value = read(self, tree)
        elif isinstance(tree, ast.Tuple):
            scalar = _SCALARS[{"texts": "text", "numbers": "number"}.get(kind, "value")]
            read_all = [scalar(self, item) for item in tree.elts]
            value = None if any(v is None for v in read_all) else tuple(read_all)
        else:
            value = self.reference(tree) if kind == "value or values" else None
        if value is None:
            self.fail(tree, f"{parameter} is something else; expected {_EXPECTED[kind]}")
        if parameter in _CHOICES and value not in _CHOICES[parameter]:
            self.fail(tree, f"unknown {parameter} {value}; expected one of {', '.join(_CHOICES[parameter])}")
        return value

    def text(self, tree: ast.expr) -> str | None:
        match tree:
            case ast.Constant(value=str(value), kind=None) if len(value) <= LONGEST_NAME and value.isprintable():
                return value
        return None

    def number(self, tree: ast.expr) -> int | None:
        match tree:
            case ast.Constant(value=int(value)) if not isinstance(value, bool) and value <= LARGEST_NUMBER:
                return value
        return None

    def flag(self, tree: ast.expr) -> bool | None:
        match tree:
            case ast.Constant(value=bool(value)):
                return value
        return None

    def reference(self, tree: ast.expr) -> fx.Node | None:
        if not isinstance(tree, ast.Name):
            return None
        if tree.id not in self.names:
            self.fail(tree, f"{tree.id} is not defined here; expected the name of a node above")
        return self.names[tree.id]


_SCALARS: dict[str, Callable[[_Parser, ast.expr], Any]] = {
    "text": _Parser.text, "number": _Parser.number, "flag": _Parser.flag, "value": _Parser.reference}


def _form(head: str, parameters: Mapping[str, str] | tuple[str, ...], optional: tuple[str, ...] = (),
          op: Op | None = None) -> str:
    """How a call looks, for messages and the documentation: `value = p.prefetch(tile, [staging=...], [into=...])`."""
    positional = _positional(tuple(parameters))
    written = [name if name in positional else f"{name}=..." for name in parameters]
    shown = ", ".join(f"[{w}]" if name in optional else w for name, w in zip(parameters, written, strict=True))
    return f"{'value = ' if op is not None and op.result is not None else ''}{head}({shown})"


def form(op: Op) -> str:
    """How a node of this op looks in text; arguments in brackets may be absent."""
    return _form(f"p.{op.name}", op.parameters, op.optional, op)
