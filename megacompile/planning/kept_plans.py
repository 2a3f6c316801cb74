"""Plans from earlier searches, kept in the user's cache folder, so that a second start of the same model on the same machine
does not search.

    plans/KEY.json      {"plan": {...}, "free": {...}}, then the seal (`seal.py`) of what is before it

KEY is a digest of the question that the search answers (`plan_questions.py`) and of our source code. A plan is a few kilobytes
of choices; programs are made from it and verified as from a new plan. `free` is the memory that the search found free where the
user gave no budget. That is never the same twice, so a plan is reused where about as much memory is free.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from megacompile import schema
from megacompile.codegen import kept_files
from megacompile.codegen.cache import CacheError, cache_directory
from megacompile.ir.placement import LISTS
from megacompile.ir.plan import Plan
from megacompile.limits import LONGEST_NAME

#: How many plans are kept, those that were used last.
MOST_PLANS = 256
#: By which share free memory may differ from that of the search. Host memory rarely decides.
ALIKE: Mapping[str, float] = {"device": 0.01, "host": 0.125}
#: The most bytes of a file. A longer one is not a plan.
_LONGEST = 1 << 22

_count = schema.whole(0, 2**31 - 1)
_name = schema.must(lambda value: type(value) is str and len(value) < LONGEST_NAME, "a name")
#: What a field of `Plan` may be in a file, by its annotation; `Plan` itself checks values and combinations.
_RULES: Mapping[str, schema.Rule] = {
    "int": _count, "bool": schema.flag, "str": _name, "tuple[str, ...]": schema.sequence(_name),
    "tuple[int, ...]": schema.sequence(_count)}
#: The same for each of `Plan.values`.
FIELDS: Mapping[str, schema.Rule] = {
    **{each.name: _RULES[str(each.type)] for each in fields(Plan) if each.name != "placements"},
    **dict.fromkeys(LISTS, _RULES["tuple[str, ...]"])}
_FILE = schema.record({"plan": schema.record(FIELDS),
                       "free": schema.record({}, optional=dict.fromkeys(ALIKE, schema.whole(0, 2**63 - 1)))})


def find(question: Mapping[str, Any], free: Mapping[str, int]) -> Plan | None:
    """The plan that was kept for a question (JSON values) while about as much memory was `free` (bytes by the names in
    `ALIKE`). None if there is no such plan, or no cache folder. A damaged or changed file is ignored with a RuntimeWarning."""
    try:
        plan, then = _read(_folder() / _name_of(question))
        return plan if then.keys() == free.keys() and all(
            abs(free[name] - then[name]) <= ALIKE[name] * then[name] for name in free) else None
    except (CacheError, FileNotFoundError):
        return None
    except (OSError, RecursionError, ValueError) as error:
        warnings.warn(f"a plan in the cache is not used and is searched for again: {error}", RuntimeWarning, stacklevel=2)
        return None


def _read(path: Path) -> tuple[Plan, dict[str, int]]:
    """The plan, and the bytes that were free. Raises `OSError`, `RecursionError`, and `ValueError` for a file without a
    plan."""
    found = json.loads(kept_files.read_kept(path, _LONGEST))
    _FILE(found, "the file")
    choices: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value
                               for name, value in found["plan"].items()}
    return Plan.of(**choices), found["free"]


def keep(question: Mapping[str, Any], free: Mapping[str, int], plan: Plan) -> None:
    """Writes the plan for a question. Does nothing if the file cannot be written."""
    contents = json.dumps({"plan": plan.values(), "free": dict(free)}, indent=0).encode()
    with contextlib.suppress(CacheError, OSError):
        kept_files.keep(_folder() / _name_of(question), contents, MOST_PLANS)


def _folder() -> Path:
    """Raises `CacheError`."""
    return cache_directory() / "plans"


def _name_of(question: Mapping[str, Any]) -> str:
    asked = json.dumps({**question, "source": source_digest()}, sort_keys=True, default=repr)
    return hashlib.sha256(asked.encode()).hexdigest()[:32] + ".json"


@functools.cache
def source_digest() -> str:
    """A digest of all our Python files, any of which may affect which plan is best."""
    import megacompile.passes
    import megacompile.runtime

    digest = hashlib.sha256()
    for package in (megacompile, megacompile.passes, megacompile.runtime):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()

