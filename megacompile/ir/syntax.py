"""The syntax of a program's text: characters -> tokens -> statements, in one pass and in linear time.

The text is Python, but Python's parser does not read it. The language is a list of calls whose arguments are names, strings,
numbers and tuples of them. Nothing nests deeper than a tuple in a call, so nothing here recurses, and nothing is executed.
`text.py` decides what a statement means. Text that is not a statement becomes a `Statement` without a call.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from megacompile.errors import ProgramError, shortened

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
    """`value` is a token, a tuple of tokens, or None for anything else. The argument begins at `start`."""

    name: Token | None
    value: Token | tuple[Token, ...] | None
    start: Token


@dataclass(frozen=True, slots=True)
class Call:
    """`owner.word(arguments)`, or `word(arguments)`. No argument is read after one without a value."""

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
    """A text that is being read. State: the next token."""

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
        """The value that begins here, or with a name that was read already."""
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
