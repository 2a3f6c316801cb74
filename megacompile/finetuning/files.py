"""Files of data -> rows. Read strictly, and one after another: a row that is not a row is refused with its place, and no copy
of the data is left in a cache."""
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

#: Of a CSV file; Python's own limit is 128 KiB.
_LARGEST_FIELD = 1 << 30
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@contextmanager
def placed(file: str | Path, row: int | None = None) -> Iterator[None]:
    """Puts the file, and the row's number from 1, before an error's reason."""
    try:
        yield
    except MegacompileError as error:
        raise MegacompileError(f"{file}{f', row {row}' if row else ''}: {error}") from error


def is_text(source: str) -> bool:
    """Whether something is a text, and not read row by row. Raises `ArgumentError` if it is nothing that there is, or no file
    that can be read more than once."""
    path = Path(source)
    if not path.exists() and (_kind(path) in _READERS or not _HUB_ID.fullmatch(source)):
        raise ArgumentError(f"there is no file or folder {source!r}: give data that is there, or the id of a data set of the "
                            "Hugging Face hub (owner/name)")
    if path.exists():
        refuse_irregular(path)
    return path.is_file() and _kind(path) not in _READERS


def _kind(path: Path) -> str:
    return path.suffix.lower()


def read_rows(source: str) -> Iterator[Row]:
    """The rows of a file (.jsonl, .json, .csv, .parquet), of a folder of such, or of the training split of a data set of the
    Hugging Face hub; the last two by the `datasets` library.

    Raises `MegacompileError` for what cannot be read, with the reason and, where a row is to blame, its number; and for what
    holds no row."""
    path, empty = Path(source), True
    for row in _refusing(path, _READERS[_kind(path)](path)) if path.is_file() else _dataset(source):
        empty = False
        yield row
    if empty:
        raise MegacompileError(f"{source} holds no row: give data that does, or leave it out")


def _refusing(path: Path, rows: Iterator[Any]) -> Iterator[Row]:
    for number in itertools.count(1):
        try:
            row = next(rows)
        except StopIteration:
            return
        except MegacompileError:
            raise
        except (OSError, ValueError, csv.Error) as error:  # of decoding: text, JSON, CSV, Arrow
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise MegacompileError(f"{path}, row {number} cannot be read ({reason}): mend or remove it") from error
        if not isinstance(row, dict):
            raise MegacompileError(f"{path}, row {number}: is a {type(row).__name__}, not an object with columns")
        yield row


def _opened(path: Path, newline: str | None = None) -> TextIO:
    """A text in which bytes that are not UTF-8 are still to be found: each row is looked at as it is read."""
    return open(open_regular(path), encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def _json_lines(path: Path) -> Iterator[Any]:
    with _opened(path) as lines:
        yield from (strict_json.parse(utf8(line)) for line in lines if line.strip())


def _json(path: Path) -> Iterator[Any]:
    """An array of objects; or, as many files of this name are, an object a line."""
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
                except UnicodeDecodeError:  # in which row?
                    rows = (batch.slice(row, 1).to_pylist()[0] for row in range(batch.num_rows))
                yield from rows
        except pyarrow.ArrowException as error:  # not all of them are ValueErrors
            raise ValueError(str(error)) from error


_READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".parquet": _parquet}


def _dataset(source: str) -> Iterator[Row]:
    with needs_train_extra("data sets"):
        import datasets
    try:
        rows = iter(datasets.load_dataset(source, split="train", streaming=True))
        yield from rows
    except Exception as error:  # of the network, of the hub, of files of every kind
        raise MegacompileError(f"{source} is not a data set with a training split that can be read: check its name, its files "
                               f"and the network\n{type(error).__name__}: {error}") from error


@contextmanager
def needs_train_extra(what: str) -> Iterator[None]:
    """Around the import of a library that only some runs need."""
    try:
        yield
    except ImportError as error:
        raise MegacompileError(f"{what} need libraries that are not installed: pip install datasets pyarrow") from error
