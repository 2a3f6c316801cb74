"""Files of data -> rows. Read strictly, and one after another: a row that is no row is refused with its place, and no copy
of the data is left in a cache."""
from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megacompile.errors import ArgumentError, MegacompileError
from megacompile.finetuning.formats import Row

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
    """Whether something is a text, and not read row by row. Raises `ArgumentError` if it is nothing that there is."""
    path = Path(source)
    if not path.exists() and (path.suffix in _READERS or not _HUB_ID.fullmatch(source)):
        raise ArgumentError(f"there is no file or folder {source!r}: give data that is there, or the id of a data set of the "
                            "Hugging Face hub (owner/name)")
    return path.is_file() and path.suffix not in _READERS


def read_rows(source: str) -> Iterator[Row]:
    """The rows of a file (.jsonl, .json, .csv, .parquet), of a folder of such, or of the training split of a data set of the
    Hugging Face hub; the last two by the `datasets` library.

    Raises `MegacompileError` for what cannot be read, with the reason and, where a row is to blame, its number."""
    path = Path(source)
    if not path.is_file():
        return _dataset(source)
    return _refusing(path, _READERS[path.suffix](path))


def _refusing(path: Path, rows: Iterator[Any]) -> Iterator[Row]:
    for number in itertools.count(1):
        try:
            row = next(rows)
        except StopIteration:
            return
        except MegacompileError:
            raise
        except (OSError, ValueError, RecursionError, csv.Error) as error:  # of decoding: text, JSON, CSV, Arrow
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise MegacompileError(f"{path}, row {number} cannot be read ({reason}): mend or remove it") from error
        if not isinstance(row, dict):
            raise MegacompileError(f"{path}, row {number}: is a {type(row).__name__}, not an object with columns")
        yield row


def _json_lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8-sig") as lines:
        yield from (json.loads(line) for line in lines if line.strip())


def _json(path: Path) -> Iterator[Any]:
    """An array of objects; or, as many files of this name are, an object a line."""
    with path.open(encoding="utf-8-sig") as file:
        start = file.read(4096).lstrip()
        if not start.startswith("["):
            yield from _json_lines(path)
            return
        file.seek(0)
        yield from json.load(file)


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(_LARGEST_FIELD)
    with path.open(encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file, strict=True):
            if None in row or None in row.values():
                raise ValueError(f"it has {'more' if None in row else 'fewer'} fields than the first line")
            yield row


def _parquet(path: Path) -> Iterator[Row]:
    with needs_train_extra("Parquet files"):
        from pyarrow import parquet
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()


_READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".parquet": _parquet}


def _dataset(source: str) -> Iterator[Row]:
    with needs_train_extra("data sets"):
        import datasets
    try:
        rows = iter(datasets.load_dataset(source, split="train", streaming=True))
        yield from rows
    except Exception as error:  # of the network, of the hub, of files of every kind
        raise MegacompileError(f"{source} is no data set with a training split that can be read: check its name, its files and "
                               f"the network\n{type(error).__name__}: {error}") from error


@contextmanager
def needs_train_extra(what: str) -> Iterator[None]:
    """Around the import of a library that only some runs need."""
    try:
        yield
    except ImportError as error:
        raise MegacompileError(f"{what} need libraries that are not installed: pip install datasets pyarrow") from error
