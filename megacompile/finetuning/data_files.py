"""Reads rows from data files.

Files are read strictly, row by row: an invalid row is refused with its file and number, and no copy of the data is cached.
"""
from __future__ import annotations

import csv
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from megacompile.errors import ArgumentError, MegacompileError
from megacompile.finetuning import strict_json
from megacompile.finetuning.formats import Row
from megacompile.finetuning.strict_json import utf8
from megacompile.system.regular_files import open_regular, refuse_irregular

#: Maximum size of a field in a CSV file, in characters. Python's own limit is 128 Ki.
_LARGEST_FIELD = 1 << 30
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@contextmanager
def placed(file: str | Path, row: int | None = None) -> Iterator[None]:
    """Prefixes the message of a `MegacompileError` with the file and the row number, counted from 1."""
    try:
        yield
    except MegacompileError as error:
        raise MegacompileError(f"{file}{f', row {row}' if row else ''}: {error}") from error


def is_text(source: str) -> bool:
    """Whether a source is a text file rather than rows. Raises `ArgumentError` if it does not exist, or if it is a file that
    can be read only once, such as a pipe."""
    path = Path(source)
    if not path.exists() and (_kind(path) in _READERS or not _HUB_ID.fullmatch(source)):
        raise ArgumentError(f"file or folder {source!r} does not exist: give existing data, or the id of a data set on the "
                            "Hugging Face Hub (owner/name)")
    if path.exists():
        refuse_irregular(path)
    return path.is_file() and _kind(path) not in _READERS


def _kind(path: Path) -> str:
    return path.suffix.lower()


def read_rows(source: str) -> Iterator[Row]:
    """The rows of a file (.jsonl, .json, .csv, .parquet), of a folder of such files, or of the training split of a data set on
    the Hugging Face Hub. Folders and data sets are read by the `datasets` library.

    Raises `MegacompileError` if the source cannot be read, with the reason and the row number if there is one, or if it has no
    rows."""
    path, empty = Path(source), True
    for row in _refusing(path, _READERS[_kind(path)](path)) if path.is_file() else _dataset(source):
        empty = False
        yield row
    if empty:
        raise MegacompileError(f"{source} has no rows: give data that has some, or leave it out")


def begins_with_object(path: Path) -> bool:
    """Whether the first line of a text file that is not blank is a JSON object of less than a megabyte, as in files of
    rows."""
    with _opened(path) as file:
        line = next((line for line in iter(lambda: file.readline(1 << 20), "") if line.strip()), "")
    try:
        return isinstance(strict_json.parse(line), dict)
    except ValueError:
        return False


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a text file that are not blank. Raises `MegacompileError` for one that cannot be read, with its number."""
    with _opened(path) as file:
        for row in _refusing(path, ({"line": utf8(line.rstrip("\n"))} for line in file)):
            if row["line"].strip():
                yield row["line"]


def _refusing(path: Path, rows: Iterator[Any]) -> Iterator[Row]:
    for number in itertools.count(1):
        try:
            row = next(rows)
        except StopIteration:
            return
        except MegacompileError:
            raise
        except (OSError, ValueError, csv.Error) as error:  # from decoding text, JSON, CSV or Arrow
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise MegacompileError(f"{path}, row {number} cannot be read ({reason}): fix or remove it") from error
        if not isinstance(row, dict):
            raise MegacompileError(f"{path}, row {number} is a {type(row).__name__}, not an object with columns: fix or remove "
                                   "it")
        yield row


def _opened(path: Path, newline: str | None = None) -> TextIO:
    """Opens a text file. Bytes that are not UTF-8 are kept as surrogates, so that `utf8` can report them row by row."""
    return open(open_regular(path), encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def _json_lines(path: Path) -> Iterator[Any]:
    with _opened(path) as lines:
        yield from (strict_json.parse(utf8(line)) for line in lines if line.strip())


def _json(path: Path) -> Iterator[Any]:
    """Rows of an array of objects. Many .json files have an object on each line instead, which is accepted too."""
    with _opened(path) as file:
        if file.read(4096).lstrip().startswith("["):
            file.seek(0)
            yield from strict_json.items(file.read())
            return
    yield from _json_lines(path)


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(_LARGEST_FIELD)
    with _opened(path, newline="") as file:
        rows = csv.DictReader(file, strict=True)
        names = [utf8(name) for name in rows.fieldnames or ()]
        _refuse_twice(path, names)
        for row in rows:
            if None in row or None in row.values():
                raise ValueError(f"it has {'more' if None in row else 'fewer'} fields than the first line")
            yield {name: utf8(value) for name, value in row.items()}


def _refuse_twice(path: Path, names: Sequence[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise MegacompileError(f"{path}: two columns are named {twice[0]!r}: rename or remove one")


def _parquet(path: Path) -> Iterator[Row]:
    with needs_train_extra("Parquet files"):
        import pyarrow
        from pyarrow import parquet
    with parquet.ParquetFile(path) as file:
        _refuse_twice(path, file.schema_arrow.names)
        try:
            for batch in file.iter_batches():
                try:
                    rows = iter(batch.to_pylist())
                except UnicodeDecodeError:  # decode row by row to find which one
                    rows = (batch.slice(row, 1).to_pylist()[0] for row in range(batch.num_rows))
                yield from rows
        except pyarrow.ArrowException as error:  # not every ArrowException is a ValueError
            raise ValueError(str(error)) from error


_READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".parquet": _parquet}


def _dataset(source: str) -> Iterator[Row]:
    with needs_train_extra("data sets"):
        import datasets
    try:
        rows = iter(datasets.load_dataset(source, split="train", streaming=True))
        yield from rows
    except Exception as error:  # the network, the Hub or the files: there are many types
        what, remedy = f"data set {source}", "check its name, its files and the network"
        if Path(source).is_dir():
            what, remedy = f"folder {source}", f"put files of one format there ({', '.join(_READERS)})"
        raise MegacompileError(f"cannot read the training split of {what}: {remedy}\n"
                               f"{type(error).__name__}: {error}") from error


@contextmanager
def needs_train_extra(what: str) -> Iterator[None]:
    """A context for importing a library that only some runs need. Turns `ImportError` into `MegacompileError`."""
    try:
        yield
    except ImportError as error:
        raise MegacompileError(f"{what} need libraries that are not installed: pip install datasets pyarrow") from error
