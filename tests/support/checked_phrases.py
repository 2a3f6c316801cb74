"""The texts that tests compare with what the program says, found in their sources: not those that merely stand in a test.

A text counts where it is the `match` of an expected error or warning, or stands in what an `assert` tests; directly, or through
names: a parameter of a test with its parametrized values, a parameter of a helper with the arguments of its callers, a
variable, a constant of the module.
"""
from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
#: Methods of texts and tables whose result holds the constants of what they are called on.
_SAME = {"items", "values", "format", "join", "strip", "lower"}
#: Functions and methods that compare texts with what they are given, or hand them on.
_COMPARING = {"startswith", "endswith", "count", "search", "match", "fullmatch", "findall", "escape", "all", "any", *_SAME}


class Checked:
    """State: what was found in all files. `texts`: what tests compare; `helpers`: by a function's name, the parameters that it
    compares."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.texts: set[str] = set()
        self.helpers: dict[str, set[str]] = defaultdict(set)
        modules = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
        self._parameters = {each.name: [a.arg for a in (*each.args.posonlyargs, *each.args.args)]
                            for module in modules for each in ast.walk(module) if isinstance(each, Function)}
        scopes = [(module, scope, list(_own_nodes(scope))) for module in modules for scope in _scopes(module)]
        known = -1
        while known != (known := sum(map(len, self.helpers.values()))):  # helpers may call helpers
            for scope in scopes:
                self._read(*scope)

    def _read(self, module: ast.Module, scope: Function | ast.Module, nodes: list[ast.AST]) -> None:
        """All that one function compares."""
        names: set[str] = set()
        for node in nodes:
            for compared in self._compared(node):
                names |= self._take(compared)
        seen: set[str] = set()
        while names - seen:
            name = (names - seen).pop()
            seen.add(name)
            bound = [value for node in nodes for value in _bound_to(name, node)]
            if isinstance(scope, Function):
                bound += [value for decorator in scope.decorator_list for value in _parametrized(name, decorator)]
                if name in self._parameters[scope.name] and not bound and not scope.name.startswith("test_"):
                    self.helpers[scope.name].add(name)
            if not bound and scope is not module:
                bound = [value for node in module.body for value in _bound_to(name, node)]
            for value in bound:
                names |= self._take(value)

    def _compared(self, node: ast.AST) -> Iterator[ast.expr]:
        """What a statement or call compares with what the program says."""
        if isinstance(node, ast.Assert):
            yield node.test
        elif isinstance(node, ast.Call):
            name = _name_of(node)
            compared = self.helpers.get(name, set())
            yield from (k.value for k in node.keywords if k.arg in compared or k.arg == "match" and name in ("raises", "warns"))
            yield from (value for value, parameter in zip(node.args, self._parameters.get(name, ()), strict=False)
                        if parameter in compared)

    def _take(self, value: ast.expr) -> set[str]:
        """Keeps the texts of an expression; returns the names in it."""
        if isinstance(value, ast.Constant):
            if isinstance(value.value, str):
                self.texts.add(value.value)
            return set()
        if isinstance(value, ast.Name):
            return {value.id}
        children: Iterable[ast.AST] = ast.iter_child_nodes(value)
        if isinstance(value, ast.Call):
            children = [value.func, *(value.args if _name_of(value) in _COMPARING else ())]
        found: set[str] = set()
        for child in children:
            if isinstance(child, ast.expr):
                found |= self._take(child)
            elif isinstance(child, ast.comprehension):
                found |= self._take(child.iter)
        return found


def _name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _scopes(module: ast.Module) -> Iterator[Function | ast.Module]:
    yield module
    yield from (node for node in ast.walk(module) if isinstance(node, Function))


def _own_nodes(scope: Function | ast.Module) -> Iterator[ast.AST]:
    """All nodes of a function's body, without those of functions in it."""
    waiting: list[ast.AST] = [*scope.body]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function):
            waiting.extend(ast.iter_child_nodes(node))


def _bound_to(name: str, node: ast.AST) -> Iterator[ast.expr]:
    """What a statement binds to a name, as far as it is written there: results of calls are not."""
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr | ast.AugAssign):
        targets, value = [node.target], node.value
    elif isinstance(node, ast.For | ast.comprehension):
        targets, value = [node.target], node.iter
    else:
        return
    named = (each for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
    if value is not None and any(each.id == name for each in named):
        if not isinstance(value, ast.Call):
            yield value
        elif isinstance(value.func, ast.Attribute) and value.func.attr in _SAME:
            yield value.func.value


def _parametrized(name: str, decorator: ast.expr) -> Iterator[ast.expr]:
    """The values of a parameter."""
    if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Attribute) and decorator.func.attr == "parametrize":
        names, values = decorator.args[:2]
        listed = [each.value for each in ast.walk(names) if isinstance(each, ast.Constant)]
        given = [part.strip() for each in listed if isinstance(each, str) for part in each.split(",")]
        if name in given:
            index, alone = given.index(name), len(given) == 1
            for case in values.elts if isinstance(values, ast.List | ast.Tuple) else [values]:
                parts = case.args if isinstance(case, ast.Call) else getattr(case, "elts", None)
                yield case if alone or parts is None or len(parts) != len(given) else parts[index]
