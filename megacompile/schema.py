"""Composable rules that check values read from a file.

A rule takes a value and its name. It raises `SchemaError` with the name, the value, and what the value must be.
"""
from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

Rule = Callable[[Any, str], None]
_SHOWN = 60  # characters of a value in a message


class SchemaError(ValueError):
    """A value violates a rule."""


def must(accepts: Callable[[Any], bool], what: str) -> Rule:
    """A rule from a predicate. `what` completes the phrase "must be ..."."""
    def rule(value: Any, name: str) -> None:
        if not accepts(value):
            raise SchemaError(f"{name} is {_shown(value)}, but must be {what}")
    return rule


def _shown(value: Any) -> str:
    """A short description of any value. (Python cannot even print a number of a million digits.)"""
    if type(value) is int and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    if value is None or type(value) in (bool, int, float):
        return repr(value)
    if type(value) is str:
        return repr(value if len(value) <= _SHOWN else value[:_SHOWN] + "...")
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, list | tuple | dict) else "")


def anything(value: Any, name: str) -> None:
    """The rule that accepts every value."""


def whole(least: int, most: int) -> Rule:
    """An integer in this range. `True` and `False` are not accepted, although they are integers in Python."""
    return must(lambda value: type(value) is int and least <= value <= most, f"a whole number from {least} to {most}")


def finite(least: float = -math.inf) -> Rule:
    def accepts(value: Any) -> bool:
        if type(value) is int:
            return least <= value and value.bit_length() < 1024
        return type(value) is float and math.isfinite(value) and value >= least
    return must(accepts, "a finite number" + ("" if least == -math.inf else f" of at least {least:g}"))


def text(pattern: str = "(?s).*", what: str = "text") -> Rule:
    return must(lambda value: type(value) is str and bool(re.fullmatch(pattern, value)), what)


def one_of(values: Collection[Any]) -> Rule:
    return must(lambda value: type(value) is str and value in values, " or ".join(values))


flag = must(lambda value: type(value) is bool, "true or false")


def optional(rule: Rule) -> Rule:
    def checked(value: Any, name: str) -> None:
        if value is not None:
            rule(value, name)
    return checked


def sequence(of: Rule, *, kind: type[list[Any] | tuple[Any, ...]] = list, length: int | None = None) -> Rule:
    many = "" if length is None else f" of {length}"
    shape = must(lambda value: type(value) is kind and length in (None, len(value)), f"a {kind.__name__}{many}")

    def rule(value: Any, name: str) -> None:
        shape(value, name)
        for number, item in enumerate(value):
            of(item, f"{name}[{number}]")
    return rule


def distinct(rule: Rule) -> Rule:
    """A sequence that keeps `rule` and has no repeated items."""
    unique = must(lambda value: len(set(value)) == len(value), "without repetitions")

    def checked(value: Any, name: str) -> None:
        rule(value, name)
        unique(value, name)
    return checked


def table(key: Rule, of: Rule) -> Rule:
    def rule(value: Any, name: str) -> None:
        _is_dict(value, name)
        for each, item in value.items():
            key(each, f"a key of {name}")
            of(item, f"{name}[{each!r}]")
    return rule


def record(fields: Mapping[str, Rule], optional: Mapping[str, Rule] | None = None, others: Rule | None = None) -> Rule:
    """A dict with all keys of `fields`, and possibly those of `optional`. Values of other keys must keep the rule `others`;
    without it, other keys are refused."""
    known = {**fields, **(optional or {})}

    def rule(value: Any, name: str) -> None:
        _is_dict(value, name)
        if missing := fields.keys() - value.keys():
            raise SchemaError(f"{name} has no {min(missing)}")
        for key, item in value.items():
            if key not in known and others is None:
                raise SchemaError(f"{name} has an unknown key {_shown(key)}")
            known.get(key, others or anything)(item, f"{name}[{key!r}]")
    return rule


_is_dict = must(lambda value: type(value) is dict, "a dict")


_number = must(lambda value: type(value) in (int, float) and (abs(value) < 2**63 or value in (math.inf, -math.inf)),
               "a number below 2**63")


def like(now: Any, known: Mapping[str, Rule], complete: bool) -> Rule:
    """The rule for a value that replaces `now`: it must have the same types, lengths and keys. If `now` is None, any value is
    accepted. `known`: rules for keys, at any depth. `complete`: all keys of `now` must be present."""
    def rule(value: Any, name: str) -> None:
        if now is None:
            return
        if type(now) is dict:
            record(dict.fromkeys(now, anything) if complete else {}, others=anything)(value, name)
            for key in now.keys() & value.keys():
                known.get(key, like(now[key], known, complete))(value[key], f"{name}[{key!r}]")
        elif isinstance(now, list | tuple):
            must(lambda it: isinstance(it, list | tuple) and len(it) == len(now), f"a sequence of {len(now)}")(value, name)
            for number, (item, own) in enumerate(zip(value, now, strict=True)):
                like(own, known, complete)(item, f"{name}[{number}]")
        elif type(now) is Counter:
            must(lambda value: type(value) is Counter, "a Counter")(value, name)
            kinds = {*map(type, now)}
            for key, count in value.items():
                must(lambda key: type(key) in kinds, "of a type that is counted")(key, f"a key of {name}")
                whole(0, 2**63 - 1)(count, f"{name}[{key!r}]")
        elif type(now) in (int, float) and not isinstance(value, Tensor):
            _number(value, name)
        elif not isinstance(now, Tensor):
            must(lambda value: type(value) is type(now), f"a {type(now).__name__}")(value, name)
    return rule
