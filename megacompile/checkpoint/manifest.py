"""The manifest of a checkpoint: a JSON file that describes the other files and has its own checksum.

It is written last, so a folder without a manifest was never complete. Tensors are listed by their names in the model; nothing
in the manifest depends on a plan, a batch or a device.
"""
from __future__ import annotations

import base64
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megacompile import schema
from megacompile.checkpoint.files import DTYPES, TENSOR_FILE, Entry, Written, write_file
from megacompile.errors import CheckpointError, first_line
from megacompile.runtime.memory.state_layout import scale_of
from megacompile.runtime.optimizer.state_format import BLOCK, FLOAT32, FORMATS
from megacompile.system.files import read_regular

# --------------------
# Encodes Python values as JSON without loss: the types that options, schedulers and the user's own state consist of.
#
# JSON types are encoded as themselves. A value that JSON would not preserve becomes an object with one key that begins with
# `$`:
#
#     {"$tuple": [...]}  {"$dict": [[key, value], ...]}  {"$counter": [[key, value], ...]}  {"$bytes": base64}
#     {"$tensor": [dtype, shape, base64]}                                     # decoded on the CPU, for any original device
_SHOWN = 60  # characters of a name in a message

#: Maximum levels of nesting. Python's own limit is some hundreds and depends on the caller, but everything that can be saved
#: must be readable.
DEEPEST = 100


def encode(value: Any, name: str) -> Any:
    """Encodes a value for `json.dumps`. Raises `CheckpointError`, which refers to the value as `name`, for unsupported
    types."""
    return _encoded(value, name, DEEPEST)


def _encoded(value: Any, name: str, levels: int) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if levels == 0:
        raise CheckpointError(f"{name[:_SHOWN]}... is nested deeper than {DEEPEST} levels, which a checkpoint cannot hold: "
                              "flatten it")
    if type(value) is list:
        return [_encoded(item, f"{name}[{i}]", levels - 1) for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": _encoded(list(value), name, levels)}
    if type(value) in (dict, Counter):
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encoded(item, f"{name}[{key!r}]", levels - 1) for key, item in value.items()}
        items = [[_encoded(key, f"a key of {name}", levels - 1), _encoded(item, f"{name}[{key!r}]", levels - 1)]
                 for key, item in value.items()]
        return {"$dict" if type(value) is dict else "$counter": items}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if type(value) is Tensor:
        flat = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        data = base64.b64encode(flat.numpy().tobytes()).decode("ascii")
        return {"$tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), {"$bytes": data}]}
    raise CheckpointError(f"{name} is a {type(value).__name__}, which a checkpoint cannot hold: it takes None, numbers, "
                          "strings, bytes, lists, tuples, dicts and tensors (anything else would have to be unpickled)")


def decode(value: Any) -> Any:
    """Decodes a value. Raises `CheckpointError` for anything that `encode` does not write."""
    try:
        return _decoded(value, DEEPEST)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"a value does not match its kind ({first_line(error)[:200]})") from error


def _decoded(value: Any, levels: int) -> Any:
    if not isinstance(value, list | dict):
        return value
    if levels == 0:
        raise CheckpointError(f"values are nested deeper than {DEEPEST} levels")
    if isinstance(value, list):
        return [_decoded(item, levels - 1) for item in value]
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: _decoded(item, levels - 1) for key, item in value.items()}
    if len(value) != 1 or tag not in _DECODERS:
        raise CheckpointError(f"unknown kind of value {tag[:_SHOWN]!r}")
    return _of_kind(tag, value[tag], levels - 1)


def _of_kind(tag: str, inside: Any, levels: int) -> Any:
    if not isinstance(inside, str if tag == "$bytes" else list):
        raise CheckpointError(f"a {type(inside).__name__} is not a value of kind {tag!r}")
    return _DECODERS[tag](inside, levels)


def _pairs(items: list[list[Any]], levels: int) -> dict[Any, Any]:
    return {_decoded(key, levels): _decoded(item, levels) for key, item in items}


def _tensor(dtype: str, shape: list[int], data: dict[str, str]) -> Tensor:
    found = getattr(torch, dtype)
    if not isinstance(found, torch.dtype) or any(type(size) is not int or size < 0 for size in shape):
        raise CheckpointError(f"{dtype} {shape} is not a dtype and a shape")
    memory = bytearray(base64.b64decode(data["$bytes"], validate=True))
    return (torch.frombuffer(memory, dtype=found) if memory else torch.empty(0, dtype=found)).view(shape)


_DECODERS: dict[str, Callable[[Any, int], Any]] = {
    "$tuple": lambda items, levels: tuple(_decoded(item, levels) for item in items),
    "$dict": _pairs,
    "$counter": lambda items, levels: Counter(_pairs(items, levels)),
    "$bytes": lambda text, _: base64.b64decode(text, validate=True),
    "$tensor": lambda parts, _: _tensor(*parts),
}


NAME = "manifest.json"
FORMAT, VERSION = "megacompile checkpoint", 1
#: The version of a checkpoint of a copy that hosts divide, whose parameters are in several files.
DIVIDED = 2
_DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}

#: The parts of a parameter besides its moments, and what the name of moments' scales ends with.
_OTHERS = frozenset(("weight", "remainder"))
_SCALE = scale_of("")
#: Limit for step numbers: float64 represents all integers up to here.
MOST_STEPS = 2**53

_file = schema.text(TENSOR_FILE.pattern, "the name of a file in a checkpoint")
_size = schema.whole(0, 2**63 - 1)
_part = schema.text("[a-z][a-z_]{0,63}", "a part of a parameter")
_step = schema.whole(0, MOST_STEPS)
_name = schema.text()
#: The schema of a manifest without `format`, `version` and `crc32`. Encoded values are checked when they are decoded.
_BODY = schema.record({
    "step": _step,
    "model": _name,
    "tensors": schema.table(_name, schema.record({
        "dtype": schema.one_of(_DTYPE_NAMES), "shape": schema.sequence(_size), "trained": schema.flag, "file": _file,
        "parts": schema.distinct(schema.sequence(_part)), "step": schema.optional(_step)},
        optional={"format": schema.one_of(FORMATS), "runs": schema.sequence(schema.record(
            {"file": _file, "first": _size, "last": _size}))})),
    "files": schema.table(_file, schema.record({
        "bytes": _size, "crc32": schema.text("[0-9a-f]{8}", "eight hexadecimal digits")})),
    "groups": schema.sequence(schema.distinct(schema.sequence(_name))),
    "options": schema.sequence(schema.anything),
    "scheduler": schema.optional(schema.record({"class": _name, "state": schema.anything})),
    "random": schema.anything,
    "extra": schema.anything,
    "made_with": schema.table(_name, _name),
})


class Run(NamedTuple):
    """The elements [first, last) of a parameter, and the file that contains them."""

    file: str
    first: int
    last: int


@dataclass(frozen=True)
class Saved:
    """A parameter or buffer, and the file that contains it. `parts`: "weight" and the optimizer's state ("exp_avg",
    "exp_avg_sq", "remainder", ...). `step`: the number of its updates; None if the checkpoint has no optimizer state for it.
    `format`: of the moments. `runs`: where hosts divide the parameter, the elements that each file has of it; empty: `file` has
    all of them."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    trained: bool
    file: str
    parts: tuple[str, ...] = ("weight",)
    step: int | None = None
    format: str = FLOAT32.name
    runs: tuple[Run, ...] = ()

    def entry(self, name: str, part: str, run: Run | None = None) -> Entry:
        """The file entry of a part, or of a run of it."""
        moments = FORMATS[self.format]
        key = f"{part}:{name}" if run is None else f"{part}:{name}:{run.first}"
        if part.endswith(_SCALE):
            scales = moments.scales(math.prod(self.shape)) if run is None else len(range(*self.span(part, run)))
            return Entry(key, torch.float32, (scales,))
        dtype = {"weight": self.dtype, "remainder": torch.int16}.get(part, moments.dtype)
        return Entry(key, dtype, self.shape if run is None else (run.last - run.first,))

    def span(self, part: str, run: Run) -> tuple[int, int]:
        """The elements of a part, or its scales, that a run has."""
        return (run.first // BLOCK, FORMATS[self.format].scales(run.last)) if part.endswith(_SCALE) else (run.first, run.last)

    def entries(self, name: str) -> list[tuple[str, Entry]]:
        """All entries, each with its file."""
        return [(self.file if run is None else run.file, self.entry(name, part, run))
                for run in self.runs or (None,) for part in self.parts]

    def values(self) -> tuple[Any, ...]:
        """The plain values from which `of` makes this."""
        return *astuple(self)[:-1], tuple(map(tuple, self.runs))

    @classmethod
    def of(cls, values: tuple[Any, ...]) -> Saved:
        return cls(*(*values[:-1], tuple(Run(*run) for run in values[-1])))

    def joined(self, other: Saved | None) -> Saved:
        """The same with the runs of both, in order."""
        if other is None or not self.runs:
            return self
        runs = tuple(sorted({*self.runs, *other.runs}, key=lambda run: run.first))
        return replace(self, runs=runs, file=runs[0].file)

    def description(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}{'' if self.trained else ', not trained'}"


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest. `options`, `scheduler`, `random` and `extra` are encoded (`encode`). `groups`: the names of
    the parameters in each parameter group."""

    step: int
    model: str
    tensors: Mapping[str, Saved]
    files: Mapping[str, Written]
    groups: list[list[str]]
    options: list[Any]
    scheduler: Any
    random: Any
    extra: Any
    made_with: Mapping[str, str]

    def write(self, folder: Path) -> None:
        """Raises `OSError`."""
        version = DIVIDED if any(saved.runs for saved in self.tensors.values()) else VERSION
        body = dict(format=FORMAT, version=version, **asdict(self))
        body["tensors"] = {name: _as_json(saved) for name, saved in self.tensors.items()}
        write_file(folder / NAME, [json.dumps({"crc32": _checksum(body), **body}, indent=1).encode("ascii")])

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads the manifest in a folder. Raises `CheckpointError`, with the file and the reason, if it is not a complete
        manifest of this format."""
        path = folder / NAME
        try:
            body = json.loads(read_regular(path, follow_links=False))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}): give the folder of a checkpoint, or a folder in "
                                  "which checkpoints were saved") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: it is not JSON ({error}); use another checkpoint") from error
        if not isinstance(body, dict) or body.pop("format", None) != FORMAT:
            raise CheckpointError(f"{path} is not a manifest of a {FORMAT}: give a folder that megacompile has saved")
        version = body.pop("version", None)
        if type(version) is not int or version not in (VERSION, DIVIDED):
            raise CheckpointError(f"{path} has version {str(version)[:20]} of the format, but this megacompile reads {VERSION} "
                                  f"and {DIVIDED}: use the megacompile that wrote it ({str(body.get('made_with'))[:100]})")
        try:
            if body.pop("crc32", None) != _checksum(dict(format=FORMAT, version=version, **body)):
                raise CheckpointError(f"{path} is damaged: its checksum does not match; use another checkpoint")
            _BODY(body, "manifest")
            _check_relations(body)
        except (schema.SchemaError, RecursionError) as error:
            raise CheckpointError(f"{path} is not a valid manifest ({error}): use another checkpoint") from error
        body["files"] = {name: Written(**written) for name, written in body["files"].items()}
        body["tensors"] = {name: Saved(_DTYPE_NAMES[saved["dtype"]], tuple(saved["shape"]), saved["trained"], saved["file"],
                                       tuple(saved["parts"]), saved["step"], saved.get("format", FLOAT32.name),
                                       tuple(Run(**run) for run in saved.get("runs", ())))
                           for name, saved in body["tensors"].items()}
        return cls(**body)


def moments(parts: Iterable[str]) -> list[str]:
    """The names of moments and of their scales among the parts of a parameter."""
    return [part for part in parts if part not in _OTHERS]


def _as_json(saved: Saved) -> dict[str, Any]:
    """The dict for the manifest. Omits the format of float32 moments, which are the most common, and the runs of a parameter
    that one file has."""
    found = {**asdict(saved), "dtype": str(saved.dtype).removeprefix("torch.")}
    if saved.format == FLOAT32.name:
        del found["format"]
    found["runs"] = [dict(file=run.file, first=run.first, last=run.last) for run in saved.runs]
    if not saved.runs:
        del found["runs"]
    return found


def _check_relations(body: Mapping[str, Any]) -> None:
    """Raises `SchemaError` if fields of a manifest contradict each other."""
    tensors = body["tensors"]
    for name, saved in tensors.items():
        if saved["file"] not in body["files"]:
            raise schema.SchemaError(f"it does not list {saved['file']}, which holds {name}")
        if runs := saved.get("runs", ()):
            ends = [0, *(run["last"] for run in runs)]
            if [run["first"] for run in runs] != ends[:-1] or ends[-1] != math.prod(saved["shape"]):
                raise schema.SchemaError(f"its files do not have each element of {name} once")
            if lacking := [run["file"] for run in runs if run["file"] not in body["files"]]:
                raise schema.SchemaError(f"it does not list {lacking[0]}, which holds {name}")
        if "weight" not in saved["parts"]:
            raise schema.SchemaError(f"{name} has no weight")
        if saved["step"] is not None and not moments(saved["parts"]):
            raise schema.SchemaError(f"{name} has no moments")
    steps = max((saved["step"] for saved in tensors.values() if saved["step"] is not None), default=0)
    if body["step"] != steps:
        raise schema.SchemaError(f"it is from step {body['step']}, but its tensors are from step {steps}")
    grouped = [name for names in body["groups"] for name in names]
    if len(set(grouped)) != len(grouped):
        raise schema.SchemaError("a parameter is in two groups")
    for name in tensors.keys() & set(grouped):  # parameters in no group may have unused moments in their tile
        if tensors[name]["step"] is None and moments(tensors[name]["parts"]):
            raise schema.SchemaError(f"{name} has moments but no step")
    if len(body["options"]) != len(body["groups"]):
        raise schema.SchemaError(f"it has {len(body['groups'])} parameter groups, but options for {len(body['options'])}")


def _checksum(body: Mapping[str, Any]) -> str:
    """The checksum of the values rather than of the text, so that reformatting the file does not invalidate it."""
    return f"{zlib.crc32(json.dumps(body, sort_keys=True, separators=(',', ':')).encode('ascii')):08x}"
