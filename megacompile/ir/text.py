"""Parses programs from their text: `parse(print_program(p)) == p` at every stage.

    # megacompile program, stage synchronize
    program = Program(stage="synchronize", micro_batches=(2, 1))
    program.tile("layers.0", parameters=1024, weight_bytes=2048, gradient_bytes=2048, trainable=True)
    program.call("layers.0", role="layer", template="decoder", tiles=("layers.0",))
    program.slot("W0", bytes=4096)

    def forward(p):
        w0 = p.prefetch("layers.0", into="W0")                                 # h2d
        e0 = p.record(w0)                                                      # h2d
        p.wait("compute", e0)                                                  # compute

The parser knows a closed list of calls and never executes any of the text. It refuses what the printer would not write: unknown
words, wrong kinds of arguments, undefined or redefined names, trailing text. A text that is meant to run again declares after
its opening what it was made for: `program.shape(...)` and `program.plan(...)` (`editing.py`). Where products are in float8,
`program.precision(...)` has the recipe. `docs/schedule-language.md` has the grammar.
"""
from __future__ import annotations

import json
import keyword
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from torch import fx

from megacompile.errors import MegacompileError, ProgramError, shortened
from megacompile.ir.nodes import Builder
from megacompile.ir.ops import OPS, Access, Lane
from megacompile.ir.plan import PLAIN, UPDATES, BatchSpec, CaptureKey, Plan
from megacompile.ir.precision import Float8
from megacompile.ir.printing import DECLARATIONS, ONCE, OPENING, OPENING_OPTIONAL, call_form, positional_parameters
from megacompile.ir.printing import form as form
from megacompile.ir.printing import print_node as print_node
from megacompile.ir.printing import print_section as print_section
from megacompile.ir.program import STAGES, CallSpec, Program, Slot, Tile
from megacompile.sizes import LARGEST, LARGEST_NUMBER, LONGEST_NAME, LONGEST_TEXT, check_micro_batches

_EXPECTED = {
    "text": "a printable string", "texts": "a tuple of strings", "flag": "True or False",
    "number": "a whole number below 2**63", "numbers": "a tuple of whole numbers",
    "value": "the name of a node above", "values": "a tuple of names of nodes above",
    "value or values": "the name of a node above, or a tuple of them"}
#: The kind of value of each parameter of an op.
KINDS = {
    **dict.fromkeys(("tile", "template", "call", "key", "into", "place", "access", "lane", "rule"), "text"),
    **dict.fromkeys(("tiles", "on_disk"), "texts"),
    "mb": "number", "overwrite": "flag", **dict.fromkeys(("weights", "inputs", "values"), "values"),
    "accumulators": "value or values",
    **dict.fromkeys(("staging", "shard", "gradient", "saved", "reduced", "resident", "slab", "state", "clip", "value", "node",
                     "event", "stashed", "moments", "momentum", "router", "held", "current"), "value")}
_CHOICES = {"lane": tuple(map(str, Lane)), "access": tuple(map(str, Access)), "stage": STAGES, "update": UPDATES}
_MADE = {"tile": Tile, "call": CallSpec, "slot": Slot}
#: The line above repeated lines in a folded text (`folding.py`), which shows them only once.
FOLDED = re.compile(r"^ *# x \d+ alike", re.MULTILINE)
_PASSED = -1  # the indentation after `pass`, which no line has


def print_program(program: Program, section: str | None = None, made_for: tuple[BatchSpec, Plan] | None = None) -> str:
    """As `Program.text`."""
    return program.text(section, made_for=made_for)


def source_text(source: str | Path | TextIO) -> str:
    """The text, or the contents of the file. A string of one line is the name of a file. Raises `MegacompileError`."""
    if isinstance(source, str) and ("\n" in source or not source):
        return source
    try:
        # Some editors put a byte order mark in front.
        with Path(source).open(encoding="utf-8-sig") if isinstance(source, str | Path) else nullcontext(source) as file:
            text = file.read(LONGEST_TEXT + 1)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise MegacompileError(f"the program cannot be read: {error}") from None
    if len(text) > LONGEST_TEXT:
        raise MegacompileError(f"the program cannot be read: it has more than {LONGEST_TEXT:,} characters")
    return text


def parse(text: str) -> Program:
    """The program that prints as `text`. Raises `ProgramError` with the line, the column and what was expected there."""
    return parse_with_plan(text)[0]


def parse_with_plan(text: str) -> tuple[Program, BatchSpec | None, Plan | None]:
    """The program, and the spec and plan that it was made for (None if the text does not declare them). Raises as `parse`."""
    parser = _Parser(text)
    return parser.program(), parser.shape, parser.plan


class _Parser:
    """Parses one text. State: the declarations so far, and the names of the section being parsed."""

    def __init__(self, text: str) -> None:
        self.source = Source(text)
        self.head: dict[str, Any] | None = None
        self.precision: Float8 | None = None
        self.shape: BatchSpec | None = None
        self.plan: Plan | None = None
        self.declared: dict[str, dict[str, Any]] = {"tile": {}, "call": {}, "slot": {}}
        self.sections: dict[str, fx.Graph] = {}
        self.graph = fx.Graph()  # of the section being read
        self.indent = 0
        self.names: dict[str, fx.Node] = {}
        self.given = frozenset(re.findall(r"^[ \t]*(\w+)[ \t]*=", text, re.MULTILINE))  # names that lines give
        self.unnamed = Counter[str]()  # nodes of each op, of this section, whose line gives none

    def fail(self, where: Token, message: str) -> NoReturn:
        self.source.fail(where, message)

    def program(self) -> Program:
        folded = FOLDED.search(self.source.text)
        if folded is not None:
            line = self.source.text.count("\n", 0, folded.start()) + 1
            self.fail(Token("other", "", line, 1), "the text is folded, for reading only; expected the whole program, as "
                                                   "`megacompile inspect --no-fold` or `program.text()` prints it")
        for statement in self.source.statements():
            if self.head is None:
                self.head = self.opening(statement)
            elif statement.start.column > 1 and self.sections:
                self.line(statement)
            elif statement.section is not None:
                self.end_section(statement.start)
                self.section(statement, statement.section)
            else:
                self.declaration(statement)
        if self.head is None:
            self.fail(self.source.here, "no program; expected `program = Program(stage=..., micro_batches=...)`")
        self.end_section(self.source.here)
        return Program(**self.head, tiles=self.declared["tile"], calls=tuple(self.declared["call"].values()),
                       slots=self.declared["slot"], sections=self.sections, precision=self.precision)

    def opening(self, statement: Statement) -> dict[str, Any]:
        form = "expected `program = Program(stage=..., micro_batches=...)`"
        match statement:
            case Statement(start=Token(column=1), target=Token(text="program"),
                           call=Call(owner=None, word=Token(text="Program")) as call):
                head = self.arguments(call, OPENING, OPENING_OPTIONAL, form)
                try:
                    check_micro_batches(len(head["micro_batches"]))
                except MegacompileError as error:
                    self.fail(call.word, f"{error}; expected fewer")
                return head
        self.fail(statement.start, f"not the beginning of a program; {form}")

    def declaration(self, statement: Statement) -> None:
        form = (f"expected {', '.join(f'`program.{kind}(...)`' for kind in (*ONCE, *DECLARATIONS))} or "
                "`def <section>(p):`")
        match statement:
            case Statement(start=Token(column=1), target=None, call=Call(owner=Token(text="program")) as call):
                kind = call.word.text
                if kind not in DECLARATIONS and kind not in ONCE:
                    self.fail(statement.start, f"unknown declaration {shortened(kind)}; {form}")
            case _:
                self.fail(statement.start, f"not a declaration; {form}")
        if self.sections:
            self.fail(statement.start, f"{kind} after a section; expected all declarations before the first section")
        if kind in ONCE:
            self.once(call, kind)
            return
        signature, optional = DECLARATIONS[kind]
        given = self.arguments(call, signature, optional, f"expected `{call_form(f'program.{kind}', signature, optional)}`")
        if given["name"] in self.declared[kind]:
            self.fail(statement.start, f"{kind} {shortened(given['name'])} is declared twice; expected another name")
        self.declared[kind][given["name"]] = _MADE[kind](**given)

    def once(self, call: Call, kind: str) -> None:
        signature, optional = ONCE[kind]
        given = self.arguments(call, signature, optional, f"expected `{call_form(f'program.{kind}', signature, optional)}`")
        if getattr(self, kind) is not None:
            self.fail(call.word, f"a second {kind}; expected one")
        if kind == "plan" and self.shape is None:
            self.fail(call.word, "a plan without a shape; expected `program.shape(...)` above it")
        make: dict[str, Callable[..., Any]] = {"precision": Float8, "shape": self.spec, "plan": self.plan_of_shape}
        try:
            setattr(self, kind, make[kind](**given))
        except MegacompileError as error:
            self.fail(call.word, f"{error}; expected a valid {kind}")

    def spec(self, **given: Any) -> BatchSpec:
        capture = {name: given.pop(name) for name in vars(PLAIN) if name in given}
        return BatchSpec(**given, capture=CaptureKey(**capture))

    def plan_of_shape(self, **given: Any) -> Plan:
        assert self.shape is not None and self.head is not None
        processes = {name: self.head.get(name, 1) for name in OPENING_OPTIONAL}
        return Plan.of(self.shape.batch, self.shape.length, self.head["micro_batches"], **processes, **given)

    def section(self, statement: Statement, name: Token) -> None:
        if not statement.plain or statement.start.column > 1:
            self.fail(statement.start, f"section {shortened(name.text)} has another signature; expected `def <section>(p):`")
        if keyword.iskeyword(name.text) or len(name.text) > LONGEST_NAME:
            self.fail(name, "a section cannot have this name; expected another")
        if name.text in self.sections:
            self.fail(statement.start, f"section {shortened(name.text)} is defined twice; expected another name")
        self.graph = self.sections[name.text] = fx.Graph()
        self.names, self.indent, self.unnamed = {}, 0, Counter()

    def end_section(self, where: Token) -> None:
        if self.sections and not self.indent:
            self.fail(where, "a section without a line; expected `p.op(...)` or `pass`, indented")

    def line(self, statement: Statement) -> None:
        """Parses one line of a section. A section with `pass` has no other line."""
        column = statement.start.column
        if self.indent == _PASSED:
            self.fail(statement.start, "a line after `pass`; expected the end of the section")
        if column != (self.indent or column):
            self.fail(statement.start, f"{column - 1} spaces before it; expected {self.indent - 1}, as above")
        if statement.empty and not self.indent:
            self.indent = _PASSED
            return
        self.indent = column
        self.node(statement)

    def node(self, statement: Statement) -> None:
        match statement:
            case Statement(call=Call(owner=Token(text="p"), word=word) as call):
                name = None if statement.target is None else statement.target.text
            case _:
                self.fail(statement.start, "not a node; expected `name = p.op(...)` or `p.op(...)`")
        if word.text not in OPS:
            self.fail(word, f"unknown op {shortened(word.text)}; expected one of {', '.join(OPS)}")
        op = OPS[word.text]
        form = f"expected `{call_form(f'p.{op.name}', op.parameters, op.optional, op)}`"
        if name is None and op.result is not None:
            self.fail(statement.start, f"the value of {op.name} has no name; {form}")
        if name == "p" or name in self.names:
            self.fail(statement.start, f"{shortened(name)} is defined twice; expected another name")
        if name is not None and len(name) > LONGEST_NAME:
            self.fail(statement.start, f"a name of {len(name)} characters; expected at most {LONGEST_NAME}")
        given = self.arguments(call, {k: KINDS[k] for k in op.parameters}, op.optional, form)
        made = Builder(self.graph).add(op.name, name or self.free_name(op.name), **given)
        made.meta["line"] = statement.start.line
        if name is None:
            return
        if made.name != name:
            self.fail(statement.start, f"{shortened(name)} cannot be the name of a value (an op or Python uses it); "
                                       "expected another name")
        self.names[name] = made

    def free_name(self, op: str) -> str:
        """A name for an unnamed node that no later line uses."""
        while True:
            number = self.unnamed[op]
            self.unnamed[op] += 1
            name = f"{op}_{number}" if number else op
            if name not in self.given:
                return name

    def arguments(self, call: Call, signature: Mapping[str, str], optional: tuple[str, ...],
                  form: str) -> dict[str, Any]:
        positional = positional_parameters(tuple(signature))
        given: dict[str, Any] = {}
        for number, argument in enumerate(call.arguments):
            if argument.name is None:
                if number >= len(positional) or len(given) > number or any(a.name for a in call.arguments[:number]):
                    extra = argument.start.text if argument.value is None else None
                    self.fail(argument.start, f"unexpected argument {shortened(extra, 80)}; {form}" if extra is not None else
                              f"too many positional arguments; {form}")
                name = positional[number]
            else:
                name = argument.name.text
                by_position = sum(a.name is None for a in call.arguments[:len(positional)])
                if name not in signature or name in positional[by_position:]:
                    self.fail(argument.start, f"unexpected argument {shortened(name)}; {form}")
            if name in given:
                self.fail(argument.start, f"argument {name} is given twice; {form}")
            given[name] = self.value(name, argument, signature[name])
        missing = [name for name in signature if name not in given and name not in optional]
        if missing:
            self.fail(call.word, f"missing {', '.join(missing)}; {form}")
        return given

    def value(self, parameter: str, argument: Argument, kind: str) -> Any:
        written, read = argument.value, _SCALARS.get(kind)
        value: Any = None
        if isinstance(written, tuple):
            scalar = _SCALARS[{"texts": "text", "numbers": "number"}.get(kind, "value")]
            read_all = [scalar(self, item) for item in written] if read is None else [None]
            value = None if any(v is None for v in read_all) else tuple(read_all)
        elif written is not None and read is not None:
            value = read(self, written)
        elif written is not None and kind == "value or values":
            value = self.reference(written)
        if value is None:
            self.fail(argument.start, f"{parameter} has another kind of value; expected {_EXPECTED[kind]}")
        largest = LARGEST.get(parameter, LARGEST_NUMBER)
        if kind in ("number", "numbers") and max(value if isinstance(value, tuple) else (value,), default=0) > largest:
            self.fail(argument.start, f"{parameter} is too large; expected at most {largest:,}")
        if parameter in _CHOICES and value not in _CHOICES[parameter]:
            self.fail(argument.start, f"unknown {parameter} {shortened(value)}; expected one of "
                                      f"{', '.join(_CHOICES[parameter])}")
        return value

    def text(self, token: Token) -> str | None:
        if token.kind != "string" or len(token.text) > 6 * LONGEST_NAME:
            return None
        try:
            value = str(json.loads(token.text))
        except ValueError:  # an escape that the printer does not write
            return None
        return value if len(value) <= LONGEST_NAME and value.isprintable() else None

    def number(self, token: Token) -> int | None:
        if token.kind != "number" or len(token.text) > len(str(LARGEST_NUMBER)) or str(int(token.text)) != token.text:
            return None
        return int(token.text) if int(token.text) <= LARGEST_NUMBER else None

    def flag(self, token: Token) -> bool | None:
        return {"True": True, "False": False}.get(token.text) if token.kind == "name" else None

    def reference(self, token: Token) -> fx.Node | None:
        if token.kind != "name":
            return None
        if token.text not in self.names:
            self.fail(token, f"{shortened(token.text)} is not defined here; expected the name of a node above")
        return self.names[token.text]


_SCALARS: dict[str, Callable[[_Parser, Token], Any]] = {
    "text": _Parser.text, "number": _Parser.number, "flag": _Parser.flag, "value": _Parser.reference}


# -------------------- The syntax of a program's text: characters -> tokens -> statements, in one pass and in linear time
#
# The text is Python, but Python's parser does not read it. The language is a list of calls whose arguments are names, strings,
# numbers and tuples of them. Nothing nests deeper than a tuple in a call, so nothing here recurses, and nothing is executed.
# `text.py` decides what a statement means. Text that is not a statement becomes a `Statement` without a call.
#: A string that is not closed takes the rest of its line, so that no character is read twice.
_TOKEN = re.compile(r'''(?P<space>[ \t\r\f]+|\#[^\n]*)|(?P<newline>\n)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<number>[0-9]+)
                        |(?P<string>"(?:[^"\\\n]|\\[^\n])*+")|(?P<open>["'][^\n]*)|(?P<sign>[(),.=:])|(?P<other>\*\*|.)''',
                    re.VERBOSE)


@dataclass(frozen=True, slots=True)
class Token:
    """`kind`: "name", "number", "string", "newline", "end", a sign of the language (as itself), or "other". `line` and `column`
    count from 1."""

    kind: str
    text: str
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class Argument:
    """`value`: a token, a tuple of tokens, or None for anything else. `start`: where the argument begins."""

    name: Token | None
    value: Token | tuple[Token, ...] | None
    start: Token


@dataclass(frozen=True, slots=True)
class Call:
    """`owner.word(arguments)`, or `word(arguments)`. Reading stops after an argument without a value."""

    owner: Token | None
    word: Token
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Statement:
    """`[target =] call`, `def section(p):` or `pass`; without any of them, text that is not a statement."""

    start: Token
    target: Token | None = None
    call: Call | None = None
    section: Token | None = None
    plain: bool = True  # a section with the one parameter p, and nothing after the colon
    empty: bool = False  # pass


class Source:
    """A text and a read position. State: the next token."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lines = text.split("\n")
        self._tokens = _tokens(text)
        self._next = next(self._tokens)

    def fail(self, where: Token, message: str) -> NoReturn:
        """Raises `ProgramError` with the line and column, the line's text, and a mark under the column."""
        shown = self._lines[where.line - 1] if where.line <= len(self._lines) else ""
        mark = f"\n    {shown[:200]}\n    {' ' * (where.column - 1)}^" if shown and where.column <= 200 else ""
        raise ProgramError(f"line {where.line}, column {where.column}: {message}{mark}") from None

    @property
    def here(self) -> Token:
        return self._next

    def statements(self) -> Iterator[Statement]:
        """Each statement, from its first token to the end of its line (or of its last line, inside parentheses)."""
        while self._next.kind != "end":
            if self._take("newline") is None:
                yield self._statement()

    # ---------------------------------------------------------------- tokens
    def _advance(self) -> Token:
        token = self._next
        if token.kind != "end":
            self._next = next(self._tokens)
        return token

    def _take(self, kind: str, text: str | None = None) -> Token | None:
        return self._advance() if self._next.kind == kind and text in (None, self._next.text) else None

    def _ends(self) -> bool:
        return self._take("newline") is not None or self._next.kind == "end"

    # ---------------------------------------------------------------- statements
    def _statement(self) -> Statement:
        start = self._next
        first = self._take("name")
        if first is None:
            return self._anything(start)
        if first.text == "def":
            return self._section(start)
        if first.text == "pass":
            return Statement(start, empty=True) if self._ends() else self._anything(start)
        target = None
        if self._take("=") is not None:
            target, first = first, self._take("name")
            if first is None:
                return self._anything(start)
        owner, word = None, first
        if self._take(".") is not None:
            owner, following = first, self._take("name")
            if following is None:
                return self._anything(start)
            word = following
        if self._take("(") is None:
            return self._anything(start)
        call = Call(owner, word, tuple(self._arguments(word)))
        broken = bool(call.arguments) and call.arguments[-1].value is None
        return Statement(start, target, call) if broken or self._ends() else self._anything(start)

    def _section(self, start: Token) -> Statement:
        name = self._take("name")
        if name is None:
            return self._anything(start)
        signs = [self._take("("), self._take("name", "p"), self._take(")"), self._take(":")]
        plain = all(sign is not None for sign in signs) and self._ends()
        return Statement(start, section=name, plain=plain)

    def _anything(self, start: Token) -> Statement:
        return Statement(start, plain=False)

    def _arguments(self, word: Token) -> Iterator[Argument]:
        while self._take(")") is None:
            argument = self._argument()
            yield argument
            if argument.value is None:
                return
            if self._take(",") is None and self._next.kind != ")":
                self.fail(self._next, f"{shortened(word.text)}( is not closed; expected `,` or `)`")

    def _argument(self) -> Argument:
        start, name = self._next, self._take("name")
        if name is not None and self._take("=") is not None:
            start = self._next
            value = self._value(self._take("name"))
            return Argument(name, value, start)
        return Argument(None, self._value(name), start)

    def _value(self, token: Token | None) -> Token | tuple[Token, ...] | None:
        """The value that begins here, or begins with a name that was already read."""
        value: Token | tuple[Token, ...] | None = token or self._take("string") or self._take("number")
        if value is None and self._take("(") is not None:
            value = self._tuple()
        after = self._next
        ends = after.kind in (",", ")") or (value is not None and after.line > _line(value)) or after.kind == "end"
        return value if ends else None

    def _tuple(self) -> tuple[Token, ...] | None:
        items: list[Token] = []
        while self._take(")") is None:
            item = self._take("name") or self._take("string") or self._take("number")
            comma = self._take(",")
            if item is None or (comma is None and (self._next.kind != ")" or not items)):
                return None  # (h) is h
            items.append(item)
        return tuple(items)


def _line(value: Token | tuple[Token, ...]) -> int:
    if isinstance(value, Token):
        return value.line
    return value[-1].line if value else 0


def _tokens(text: str) -> Iterator[Token]:
    line, begin, depth = 1, 0, 0
    for match in _TOKEN.finditer(text):
        kind, found = match.lastgroup or "other", match.group()
        column = match.start() - begin + 1
        if kind == "newline":
            if depth == 0:
                yield Token("newline", found, line, column)
            line, begin = line + 1, match.end()
        elif kind == "sign":
            depth = max(0, depth + (found == "(") - (found == ")"))
            yield Token(found, found, line, column)
        elif kind != "space":
            yield Token("other" if kind == "open" else kind, found, line, column)
    yield Token("end", "", line, len(text) - begin + 1)
