"""Reads rows from data files.

One strict reader serves a file, a folder and a data set on the Hugging Face Hub: a folder is what its files are. An invalid row
is refused with its file and number. No value is guessed: what a file has as text is text.
"""
from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import itertools
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import unquote

from megacompile.errors import ArgumentError, MegacompileError, listed
from megacompile.finetuning import strict_json
from megacompile.finetuning.formats import Row, inner_rows
from megacompile.finetuning.strict_json import utf8
from megacompile.system.regular_files import open_regular, refuse_irregular

#: Maximum size of a field in a CSV file, in characters. Python's own limit is 128 Ki.
_LARGEST_FIELD = 1 << 30
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
#: How `datasets` names a file on the Hub.
_HUB_FILE = re.compile(r"hf://datasets/(?P<name>[^/]+/[^/@]+)@(?P<revision>[^/]+)/(?P<file>.+)")
#: What options of how to read a data set do not include.
_OF_EVERY_CONFIG = ("name", "version", "data_dir", "data_files", "description", "features")
#: Names of files, or of their folders, that belong to a split.
_TRAINED, _HELD_OUT = (re.compile(rf"(^|[^a-z])({names})([^a-z]|$)", re.IGNORECASE) for names in (
    "train|training", "test|testing|eval|evaluation|validation|valid|val|dev"))


@contextmanager
def placed(file: str | Path, row: int | None = None) -> Iterator[None]:
    """Prefixes the message of a `MegacompileError` with the file and the row number, counted from 1."""
    try:
        yield
    except MegacompileError as error:
        raise MegacompileError(f"{file}{f', row {row}' if row else ''}: {error}") from error


def _kind(path: Path) -> str:
    """The ending of a file's name that says its format, without that of compression."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def is_text(source: str) -> bool:
    """Whether a source is a text file, or a folder of text files, rather than rows. Raises `ArgumentError` if it does not
    exist, if a file can be read only once, such as a pipe, and for a folder as `files_of` does."""
    path = Path(source)
    if not path.exists() and (_kind(path) in _READERS or not _HUB_ID.fullmatch(source)):
        raise ArgumentError(f"file or folder {source!r} does not exist: give existing data, or the id of a data set on the "
                            "Hugging Face Hub (owner/name)")
    return path.exists() and _kind(_local_files(path)[0]) not in _READERS


def files_of(source: str) -> list[Path]:
    """The files of a source: the file itself, all files of a folder and its subfolders in the order of their names, or those of
    the training split of a data set on the Hugging Face Hub. Hidden files of a folder are left out.

    Raises `ArgumentError` for a folder that is not clear: one with rows and other files, or with a training split and another.
    Raises `MegacompileError` for a data set that cannot be fetched or whose files cannot be read."""
    path = Path(source)
    return _local_files(path) if path.exists() else _hub_files(source)


def _local_files(path: Path) -> list[Path]:
    files = list(_below(path))
    for file in files:
        refuse_irregular(file)
    if not path.is_dir():
        return files
    if not files:
        raise ArgumentError(f"folder {path} has no files: put data there, or give another --data")
    names = [str(file.relative_to(path)) for file in files]
    rows = [name for name, file in zip(names, files, strict=True) if _kind(file) in _READERS]
    others = [name for name in names if name not in rows]
    trained = [name for name in names if _TRAINED.search(name)]
    held_out = [name for name in names if name not in trained and _HELD_OUT.search(name)]
    for what, pair in (("rows and other files", (rows, others)), ("a training split and another", (trained, held_out))):
        if all(pair):
            raise ArgumentError(f"folder {path} has {what} ({pair[0][0]}, {pair[1][0]}): give the files or the subfolder that "
                                "you mean, each with --data")
    return files


def _below(path: Path) -> Iterator[Path]:
    """The file, or the files of a folder and its subfolders that are not hidden, in the order of their names."""
    if not path.is_dir():
        yield path
        return
    try:
        inside = sorted(each for each in path.iterdir() if not each.name.startswith("."))
    except OSError as error:
        raise ArgumentError(f"folder {path} cannot be read ({error.strerror}): give a readable one") from error
    for each in inside:
        yield from _below(each)


def _hub_files(source: str) -> list[Path]:
    """The files of the training split, as `datasets` finds them, in the local cache of the Hub."""
    with needs_train_extra("data sets"):
        import datasets
        import huggingface_hub
    try:
        builder = datasets.load_dataset_builder(source)
        splits = {str(split): [str(file) for file in files] for split, files in (builder.config.data_files or {}).items()}
        there = huggingface_hub.list_repo_files(source, repo_type="dataset")
        found = _checked(source, builder.config, splits)
        used = [file for files in splits.values() for file in files]
        left = [name for name in there if _kind(Path(name)) in _READERS and name not in datasets.data_files.FILES_TO_IGNORE
                and not any(file.endswith(f"/{name}") for file in used)]
        if left and len(builder.builder_configs) < 2:
            warnings.warn(f"data set {source} has files of no split, which are not read: {listed(left, 3)}", stacklevel=2)
        return [Path(huggingface_hub.hf_hub_download(each["name"], each["file"], repo_type="dataset",
                                                     revision=unquote(each["revision"]))) for each in found]
    except MegacompileError:
        raise
    except Exception as error:  # the network, the Hub or the files: there are many types
        raise MegacompileError(f"cannot read the training split of data set {source}: check its name, its files and the "
                               f"network\n{type(error).__name__}: {error}") from error


def _checked(source: str, config: Any, splits: Mapping[str, Sequence[str]]) -> list[re.Match[str]]:
    """The names of the files of the training split. Raises `MegacompileError` if this reader would read them otherwise than the
    data set's card says."""
    remedy = f"fetch it (hf download {source} --repo-type dataset --local-dir DIR), and give the files that you mean"
    if "train" not in splits:
        raise MegacompileError(f"data set {source} has no split train (its splits: {', '.join(splits) or 'none'}): {remedy}")
    found = []
    for file in splits["train"]:
        name = _HUB_FILE.fullmatch(file)
        if name is None or _kind(Path(file)) not in _READERS:
            raise MegacompileError(f"data set {source} has {file}, whose format is none of {', '.join(_READERS)}: {remedy}")
        found.append(name)
    plain = type(config)(name=config.name)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in _OF_EVERY_CONFIG and value != getattr(plain, field.name):
            raise MegacompileError(f"data set {source} is to be read with {field.name}={value!r}, which is not supported: "
                                   f"{remedy}")
    return found


def read_rows(source: str) -> Iterator[Row]:
    """The rows of a source, file by file (.jsonl, .json, .csv, .parquet; all but the last also compressed, as in .jsonl.gz).

    Raises what `files_of` raises, and `MegacompileError` if a file cannot be read, with the reason and the row number if there
    is one, or if it has no rows."""
    for path in files_of(source):
        empty = True
        for row in _refusing(path, _READERS[_kind(path)](path)):
            empty = False
            yield row
        if empty:
            raise MegacompileError(f"{path} has no rows: give data that has some, or leave it out")


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
        except (OSError, EOFError, ValueError, csv.Error, zlib.error) as error:  # from decompressing or decoding
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise MegacompileError(f"{path}, row {number} cannot be read ({reason}): fix or remove it") from error
        if not isinstance(row, dict):
            raise MegacompileError(f"{path}, row {number} is a {type(row).__name__}, not an object with columns: fix or remove "
                                   "it")
        yield row


@contextmanager
def _opened(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """Opens a text file, which may be compressed. Bytes that are not UTF-8 are kept as surrogates, so that `utf8` can report
    them row by row."""
    with open(open_regular(path), "rb") as file:
        plain: Any = gzip.GzipFile(fileobj=file) if path.suffix.lower() == ".gz" else file
        with io.TextIOWrapper(plain, encoding="utf-8-sig", errors="surrogateescape", newline=newline) as text:
            yield text


def _json_lines(path: Path) -> Iterator[Any]:
    first = True
    with _opened(path) as lines:
        for line in filter(str.strip, lines):
            try:
                row = strict_json.parse(utf8(line))
            except ValueError:
                if first:
                    _refuse_several_lines(path)
                raise
            yield row
            first = False


def _refuse_several_lines(path: Path) -> None:
    """Raises `MegacompileError` if the file begins with a JSON object that spans several lines."""
    with _opened(path) as file:
        try:
            row = strict_json.first(file.read())
        except ValueError:
            return
    if isinstance(row, dict):
        raise MegacompileError(f"{path}, row 1 is a JSON object over several lines: write the rows as an array, or each on a "
                               f"line of its own{inner_rows(row)}")


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
                    rows = iter(batch.to_pylist(maps_as_pydicts="strict"))
                except UnicodeDecodeError:  # decode row by row to find which one
                    rows = (batch.slice(row, 1).to_pylist(maps_as_pydicts="strict")[0] for row in range(batch.num_rows))
                for row in rows:
                    yield {name: _without_nulls(value) for name, value in row.items()}
        except pyarrow.ArrowException as error:  # not every ArrowException is a ValueError
            raise ValueError(str(error)) from error


def _without_nulls(value: Any) -> Any:
    """The value without empty fields of objects: in Parquet each object has the fields of all others, and null for those that
    it was written without."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


_READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".parquet": _parquet}


@contextmanager
def needs_train_extra(what: str) -> Iterator[None]:
    """A context for importing a library that only some runs need. Turns `ImportError` into `MegacompileError`."""
    try:
        yield
    except ImportError as error:
        raise MegacompileError(f"{what} need libraries that are not installed: pip install datasets pyarrow") from error
