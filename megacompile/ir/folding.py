"""Folded text, for reading: lines that repeat for consecutive layers or micro-batches appear once.

    # x 26 alike: layers.1 .. layers.26
        w_2 = p.prefetch("layers.1", into="W1")
        ...

Two lines are alike if they differ only in numbers: those in names, and the positions of the nodes that they use. A group of
lines repeats if each of these numbers advances by a constant step from one group to the next. So values from far above fold as
well as values of the group. The numbers of slots and events may differ in any way, since each family of slots takes turns at
its own rate: a folded group shows the numbers of its first repetition.
"""
from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from megacompile.ir.nodes import argument, nodes, op_of
from megacompile.ir.printing import print_node

#: At least three groups: the numbers of two always advance by a constant step.
_FEWEST, _LONGEST_GROUP = 3, 2000
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class _Line:
    text: str
    about: Mapping[str, Any]  # what may name a group of lines
    words: tuple[Any, ...]
    numbers: tuple[int, ...]
    mark: str


def fold_head(head: str) -> str:
    """The declarations of a program (`Program.head`), folded."""
    return "\n".join(_folded([_declaration(line) for line in head.splitlines()], "")) + "\n"


def fold_section(name: str, listed: Sequence[fx.Node]) -> str:
    """A section with these of its nodes, folded."""
    return "\n".join([f"def {name}(p):", *(fold_lines(listed, [""] * len(listed)) if listed else ["    pass"])]) + "\n"


def fold_lines(listed: Sequence[fx.Node], marks: Sequence[str]) -> Iterator[str]:
    """The lines of these nodes, each after its mark, folded. Lines with different marks are not alike."""
    position = {node: i for graph in {node.graph for node in listed} for i, node in enumerate(nodes(graph))}
    return _folded([_line(node, position, mark) for node, mark in zip(listed, marks, strict=True)], "    ")


def _declaration(line: str) -> _Line:
    name = re.search('"[^"]*"', line)
    about = {"declared": name[0].strip('"')} if name is not None else {}
    return _Line(line, about, (_NUMBER.sub("0", line),), tuple(map(int, _NUMBER.findall(line))), "")


def _line(node: fx.Node, position: dict[fx.Node, int], mark: str) -> _Line:
    words: list[Any] = [mark, op_of(node).name]
    numbers: list[int] = []

    def visit(value: Any) -> None:
        if isinstance(value, fx.Node):
            words.append("node")
            numbers.append(position[value])
        elif isinstance(value, str):
            words.append(_NUMBER.sub("0", value))
            numbers.extend(map(int, _NUMBER.findall(value)))
        elif isinstance(value, tuple | list):
            words.append(len(value))
            for item in value:
                visit(item)
        elif isinstance(value, int) and not isinstance(value, bool):
            words.append("number")
            numbers.append(value)
        else:
            words.append(value)

    for name, value in node.kwargs.items():
        words.append(name)
        if name in ("into", "place") and "/" not in str(value):
            words.append(_NUMBER.sub("", str(value)))
        elif name == "event" and isinstance(value, fx.Node):
            words.append(op_of(value).name)
        else:
            visit(value)
    about = {name: argument(node, name) for name in ("call", "tile", "mb", "key", "place")}
    return _Line(print_node(node), about, tuple(words), tuple(numbers), mark)


def _folded(lines: list[_Line], indent: str) -> Iterator[str]:
    """Folds, at each line, the repeat that saves the most lines. Then folds inside its first group in the same way."""
    following = _same_words_after(lines)
    start = 0
    while start < len(lines):
        length, count = _best_repeat(lines, start, following[start])
        if count == 1:
            yield lines[start].mark + indent + lines[start].text
            start += 1
            continue
        first, last = lines[start:start + length], lines[start + length * (count - 1):start + length * count]
        yield f"{' ' * len(lines[start].mark)}{indent}# x {count} alike{_span(first, last)}"
        yield from _folded(first, indent + "    ")
        start += length * count


def _same_words_after(lines: list[_Line]) -> list[list[int]]:
    """For each line, the distances to later lines with the same words, nearest first."""
    places: dict[tuple[Any, ...], list[int]] = {}
    for i, line in enumerate(lines):
        places.setdefault(line.words, []).append(i)
    after: list[list[int]] = [[] for _ in lines]
    for same in places.values():
        for k, i in enumerate(same):
            after[i] = [j - i for j in same[k + 1:k + 65] if j - i <= _LONGEST_GROUP]
    return after


def _best_repeat(lines: list[_Line], start: int, distances: list[int]) -> tuple[int, int]:
    """(lines in the group, number of groups) of the repeat from here that saves the most lines; (1, 1) if none saves any."""
    best = (1, 1)
    for length in distances:
        count = _repeats(lines, start, length)
        if count >= _FEWEST and (count - 1) * length > (best[1] - 1) * best[0]:
            best = length, count
    return best


def _repeats(lines: list[_Line], start: int, length: int) -> int:
    """The number of consecutive groups like the one of `length` lines at `start`. Every number must change by a constant
    step."""
    count = 1
    steps: list[tuple[int, ...]] = []
    while start + (count + 1) * length <= len(lines):
        at = start + count * length
        found = []
        for i in range(length):
            before, here = lines[at - length + i], lines[at + i]
            if before.words != here.words:
                return count
            found.append(tuple(b - a for a, b in zip(before.numbers, here.numbers, strict=True)))
            if count > 1 and found[i] != steps[i]:
                return count
        steps = found
        count += 1
    return count


def _span(first: list[_Line], last: list[_Line]) -> str:
    """The difference between the first group and the last, as text: `: layers.1 .. layers.26`."""
    for a, b in zip(first, last, strict=True):
        for name, begin in a.about.items():
            if begin != b.about[name]:
                return f": {'mb ' if name == 'mb' else ''}{begin} .. {b.about[name]}"
    return ""
