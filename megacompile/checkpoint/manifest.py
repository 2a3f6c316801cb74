"""The manifest of a checkpoint: one JSON file that says what the others hold, and has a checksum of its own.

It is written last, so that a folder without it was never complete. Every tensor is listed by its name in the model: nothing in
it depends on a plan, a batch or a device.
"""
from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megacompile.checkpoint.files import DTYPES, TENSOR_FILE, Entry, Written, write_file
from megacompile.errors import CheckpointError

NAME = "manifest.json"
FORMAT, VERSION = "megacompile checkpoint", 1
_DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class Saved:
    """A parameter or buffer: what it is in the model, and which file has it. `parts` are "weight" and what an optimizer keeps
    beside it ("exp_avg", "exp_avg_sq", "remainder"); `step`: its updates so far, None without an optimizer's state."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    trained: bool
    file: str
    parts: tuple[str, ...] = ("weight",)
    step: int | None = None

    def entry(self, name: str, part: str) -> Entry:
        """Moments are fp32 and a remainder is int16, whatever the weight is."""
        dtype = {"weight": self.dtype, "remainder": torch.int16}.get(part, torch.float32)
        return Entry(f"{part}:{name}", dtype, self.shape)

    def entries(self, name: str) -> list[Entry]:
        return [self.entry(name, part) for part in self.parts]

    def description(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}{'' if self.trained else ', not trained'}"


@dataclass(frozen=True)
class Manifest:
    """`options`, `scheduler`, `random` and `extra` are encoded (`values.py`). `groups`: the names in each parameter group."""

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
        body = dict(format=FORMAT, version=VERSION, **asdict(self))
        body["tensors"] = {name: {**asdict(saved), "dtype": str(saved.dtype).removeprefix("torch.")}
                           for name, saved in self.tensors.items()}
        write_file(folder / NAME, [json.dumps({"crc32": _checksum(body), **body}, indent=1).encode("ascii")])

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises `CheckpointError`, with the file and the reason, for anything but a whole manifest of this format."""
        path = folder / NAME
        try:
            body = json.loads(path.read_bytes())
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}): give a checkpoint's folder, or the folder that "
                                  "checkpoints were saved in") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: it is not JSON ({error}); take another checkpoint") from error
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise CheckpointError(f"{path} is no manifest of a {FORMAT}: give a folder that megacompile has saved")
        if body.get("version") != VERSION:
            raise CheckpointError(f"{path} has version {body.get('version')!r} of the format, and this megacompile reads "
                                  f"{VERSION}: use the megacompile that wrote it ({body.get('made_with')})")
        if body.pop("crc32", None) != _checksum(body):
            raise CheckpointError(f"{path} is damaged: its checksum does not fit; take another checkpoint")
        try:
            del body["format"], body["version"]
            body["files"] = {_file_name(name): Written(**written) for name, written in body["files"].items()}
            body["tensors"] = {name: _saved(**saved) for name, saved in body["tensors"].items()}
            return cls(**body)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} does not say what a manifest says ({type(error).__name__}: {error}): take another "
                                  "checkpoint") from error


def _file_name(name: str) -> str:
    if not TENSOR_FILE.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a file in a checkpoint")
    return name


def _saved(dtype: str, shape: list[int], trained: bool, file: str, parts: list[str], step: int | None) -> Saved:
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{shape} is no shape")
    return Saved(_DTYPE_NAMES[dtype], tuple(shape), trained, _file_name(file), tuple(parts), step)


def _checksum(body: Mapping[str, Any]) -> str:
    """Of the values, not of the text: whoever reads and writes the file again does it no harm."""
    return f"{zlib.crc32(json.dumps(body, sort_keys=True, separators=(',', ':')).encode('ascii')):08x}"
