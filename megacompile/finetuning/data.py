"""Reads the sources of `--data` into the rows that a model is trained on."""
from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import itertools
import re
import warnings
import zlib
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import unquote

import torch
from torch import Tensor

from megacompile.corpus import ByteTokenizer, PretrainedTokenizer, check_vocabulary, read_text
from megacompile.errors import ArgumentError, MegacompileError, listed
from megacompile.finetuning import tools
from megacompile.finetuning.chat import ChatEncoder, Encoded
from megacompile.finetuning.formats import Format, Row, detect, inner_rows, messages_of, text_of
from megacompile.finetuning.settings import TooLong
from megacompile.finetuning.tools import tools_of, utf8
from megacompile.finetuning.training_sequences import Rows
from megacompile.system.files import open_regular, refuse_irregular


# -------------------- Puts several documents into one sequence, to reduce padding
#
# Texts are joined with the end token and cut into sequences, which all begin as a text does. Tokens of a text see those of the
# text before it, as is usual in pretraining. Conversations are packed whole and do not see each other: their positions restart
# at 0.
def pack(tokens: Tensor, length: int) -> Rows:
    """Cuts tokens, 1-D, into sequences of `length`. Drops an incomplete sequence at the end.

    Raises `MegacompileError` if there is not a single complete sequence."""
    count = tokens.numel() // length
    if count == 0:
        raise MegacompileError(f"the data has {tokens.numel()} tokens, fewer than one sequence of {length}: give more text or "
                               "a smaller --length")
    starts = torch.arange(count) * length
    return Rows(tokens, torch.stack([starts, starts + length], dim=1))


def begun(tokens: Tensor, length: int, begin: Sequence[int]) -> Tensor:
    """The tokens, 1-D, with those of `begin` inserted so that every sequence of `length` begins with them, once. Models that
    were trained with a beginning-of-sequence token predict badly without it.

    Raises `MegacompileError` if `begin` fills a sequence."""
    if not begin or not tokens.numel():
        return tokens
    if len(begin) >= length:
        raise MegacompileError(f"a sequence of {length} has no room beside the {len(begin)} special tokens that the tokenizer "
                               "puts before a text: give a larger --length")
    parts, start, first = list[Tensor](), 0, torch.tensor(begin, dtype=tokens.dtype)
    while start < tokens.numel():
        # If a text begins here, or just before, only the part of `begin` that was cut off is missing.
        missing = next((cut for cut in range(min(len(begin), start + 1))
                        if torch.equal(tokens[start - cut:start - cut + len(begin)], first)), len(begin))
        end = start + length - missing
        parts += [first[:missing], tokens[start:end]]
        start = end
    return torch.cat(parts)


def join(documents: Iterable[list[int]], end: int) -> Tensor:
    """The documents in order, 1-D int32, with the token `end` after each."""
    parts = [torch.tensor(each if each[-1:] == [end] else [*each, end], dtype=torch.int32) for each in documents]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32)


def pack_conversations(rows: Rows, length: int) -> Rows:
    """Packs conversations of at most `length` tokens into sequences of at most `length` by best fit, longest first."""
    lengths = rows.lengths.tolist()
    members = best_fit(lengths, length)
    order = torch.tensor([row for each in members for row in each], dtype=torch.int64)
    sizes = rows.lengths[order]
    starts = sizes.cumsum(0) - sizes
    where = torch.arange(int(sizes.sum())) + (rows.spans[order, 0] - starts).repeat_interleave(sizes)
    begins = torch.zeros(where.numel(), dtype=torch.bool)
    begins[starts] = True
    filled = torch.tensor([sum(lengths[row] for row in each) for each in members], dtype=torch.int64)
    ends = filled.cumsum(0)
    learned = torch.ones_like(begins) if rows.learned is None else rows.learned[where]
    # The first token of a conversation would be predicted from the last one's end.
    return Rows(rows.tokens[where], torch.stack([ends - filled, ends], dim=1), learned & ~begins, begins)


def best_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Groups of indices whose sizes fit together into `room`, by best fit, longest first."""
    members: list[list[int]] = []
    with_space: defaultdict[int, list[int]] = defaultdict(list)
    spaces: list[int] = []  # the keys of `with_space` with a non-empty list, sorted
    for number in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        index = bisect_left(spaces, sizes[number])
        if index == len(spaces):
            members.append([])
            which, space = len(members) - 1, room
        else:
            space = spaces[index]
            which = with_space[space].pop()
            if not with_space[space]:
                del spaces[index]
        members[which].append(number)
        left = space - sizes[number]
        if not with_space[left]:
            insort(spaces, left)
        with_space[left].append(which)
    return members


# -------------------- Reads rows from data files
#
# One strict reader serves a file, a folder and a data set on the Hugging Face Hub: a folder is what its files are. An invalid
# row is refused with its file and number. No value is guessed: what a file has as text is text.
#: Maximum size of a field in a table, in characters. Python's own limit is 128 Ki.
_LARGEST_FIELD = 1 << 30
#: What stands between the fields of a table.
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
#: The form of a file name on the Hub in `datasets`.
_HUB_FILE = re.compile(r"hf://datasets/(?P<name>[^/]+/[^/@]+)@(?P<revision>[^/]+)/(?P<file>.+)")
#: Fields that are not options for reading a data set.
_OF_EVERY_CONFIG = ("name", "version", "data_dir", "data_files", "description", "features")
#: Names of files, or of their folders, that belong to a split.
_TRAINED, _HELD_OUT = (re.compile(rf"(^|[^a-z])({names})([^a-z]|$)", re.IGNORECASE) for names in (
    "train|training", "test|testing|eval|evaluation|validation|valid|val|dev"))
#: Names of files that describe the rows beside them.
_DESCRIPTION = re.compile(r"(readme|license)(\.(md|txt|rst))?", re.IGNORECASE)


@contextmanager
def placed(file: str | Path, row: int | None = None) -> Iterator[None]:
    """Prefixes the message of a `MegacompileError` with the file and the row number, counted from 1."""
    try:
        yield
    except MegacompileError as error:
        raise MegacompileError(f"{file}{f', row {row}' if row else ''}: {error}") from error


def _kind(path: Path) -> str:
    """The suffix of a file's name that gives its format, ignoring the suffix of compression."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def is_text(source: str) -> bool:
    """True if a source is a text file, or a folder of text files, rather than rows. Raises `ArgumentError` if it does not
    exist, if a file can be read only once, such as a pipe, and for a folder as `files_of` does."""
    path = Path(source)
    if not path.exists() and (_kind(path) in _READERS or not _HUB_ID.fullmatch(source)):
        raise ArgumentError(f"file or folder {source!r} does not exist: give existing data, or the id of a data set on the "
                            "Hugging Face Hub (owner/name)")
    return path.exists() and _kind(_local_files(path)[0]) not in _READERS


def files_of(source: str) -> list[Path]:
    """The files of a source: the file itself, all files of a folder and its subfolders in the order of their names, or those of
    the training split of a data set on the Hugging Face Hub. Hidden files of a folder are left out, and a README or LICENSE
    beside rows.

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
    if any(_kind(file) in _READERS for file in files):
        files = [file for file in files if not _DESCRIPTION.fullmatch(file.name)]
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
    separators = [_SEPARATORS[kind] for kind in {_kind(Path(file)) for file in splits["train"]} if kind in _SEPARATORS]
    for field in dataclasses.fields(config):
        value, here = getattr(config, field.name), separators if field.name == "sep" else [getattr(plain, field.name)]
        if field.name not in _OF_EVERY_CONFIG and [value] != here:
            raise MegacompileError(f"data set {source} is to be read with {field.name}={value!r}, which is not supported: "
                                   f"{remedy}")
    return found


def read_rows(source: str) -> Iterator[Row]:
    """The rows of a source, file by file (.jsonl, .json, .csv, .tsv, .parquet; all but the last also compressed: .jsonl.gz).

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
    """True if the first non-blank line of a text file is a JSON object of less than a megabyte, as in files of rows."""
    with _opened(path) as file:
        line = next((line for line in iter(lambda: file.readline(1 << 20), "") if line.strip()), "")
    try:
        return isinstance(tools.parse(line), dict)
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
            raise MegacompileError(f"{path}, row {number} is of type {type(row).__name__}, not an object with columns: fix or "
                                   "remove it")
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
                row = tools.parse(utf8(line))
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
            row = tools.first(file.read())
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
            yield from tools.items(file.read())
            return
    yield from _json_lines(path)


def _table(path: Path) -> Iterator[Row]:
    csv.field_size_limit(_LARGEST_FIELD)
    with _opened(path, newline="") as file:
        rows = csv.DictReader(file, strict=True, delimiter=_SEPARATORS[_kind(path)])
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
    ".jsonl": _json_lines, ".json": _json, ".csv": _table, ".tsv": _table, ".parquet": _parquet}


@contextmanager
def needs_train_extra(what: str) -> Iterator[None]:
    """A context for importing a library that only some runs need. Turns `ImportError` into `MegacompileError`."""
    try:
        yield
    except ImportError as error:
        raise MegacompileError(f"{what} need libraries that are not installed: pip install datasets pyarrow") from error


Say = Callable[[str], None]


def check_sources(sources: Sequence[str], format: Format | None) -> None:
    """Raises `ArgumentError` for a source that does not exist, and for sources that cannot be combined."""
    texts = [source for source in sources if is_text(source)]
    if texts and len(texts) < len(sources):
        raise ArgumentError("text files and files of rows cannot be combined: give only one kind of --data")
    if texts and format is not None:
        raise ArgumentError(f"--format {format} is for rows, but {texts[0]} is text: leave --format out, or rename files of "
                            "rows to .jsonl, .json, .csv or .parquet")


def read(sources: Sequence[str], tokenizer: ByteTokenizer | PretrainedTokenizer, format: Format | None, length: int,
         packed: bool, vocabulary_size: int, say: Say, too_long: TooLong = TooLong.TRUNCATE) -> Rows:
    """Reads sources that were checked. Texts are packed into sequences of `length` tokens. Each conversation is one sequence,
    unless they are `packed`. Longer conversations are truncated or dropped, with a warning through `say`.

    Raises `MegacompileError` for invalid rows, with file, row number and reason; `ArgumentError` for formats that cannot be
    combined, or if a tokenizer is missing."""
    files = [file for source in sources for file in files_of(source)]
    if is_text(sources[0]):
        rows = _cut(read_text(files, tokenizer), tokenizer, length, say)
        for file in files:
            if begins_with_object(file):
                say(f"warning: {file} is read as TEXT, but begins with a JSON object: if it holds rows, rename it to .jsonl")
    else:
        rows = _of_rows([str(file) for file in files], tokenizer, format, length, packed, say, too_long)
    check_vocabulary(rows.tokens, tokenizer, vocabulary_size)
    return rows


def _of_rows(sources: Sequence[str], tokenizer: Any, format: Format | None, length: int, packed: bool,
             say: Say, too_long: TooLong) -> Rows:
    if isinstance(tokenizer, ByteTokenizer):
        raise ArgumentError("rows need a tokenizer with an end token, which this model does not have: give --tokenizer")
    formats = [format or _detected(source) for source in sources]
    if len({each is Format.TEXT for each in formats}) > 1:
        raise ArgumentError("texts and conversations cannot be combined: give only one kind of --data, or --format")
    if formats[0] is Format.TEXT:
        return _cut(join(_texts(sources, tokenizer), _end_of(tokenizer.pretrained)), tokenizer, length, say)
    encoder = ChatEncoder(tokenizer.pretrained)
    rows, begin = Rows.of(_conversations(sources, formats, encoder)), tokenizer.special.before
    if rows.tokens[:len(begin)].tolist() != begin:
        say(f"warning: the tokenizer puts {tokenizer.pretrained.decode(begin)} before texts, but its chat template does not, "
            "and conversations are trained as the template renders them: add it to the template if the model expects it")
    if encoder.unasked:
        say(f"warning: {encoder.unasked:,} answers come before any message of a user, where the chat template has no prompt: "
            "they are read, but not learned")
    found = _fitted(rows, length, too_long, say)
    return pack_conversations(found, length) if packed else found


def _cut(tokens: Tensor, tokenizer: ByteTokenizer | PretrainedTokenizer, length: int, say: Say) -> Rows:
    """Text in sequences of `length` tokens. Says how many tokens do not fill a last one."""
    if isinstance(tokenizer, PretrainedTokenizer):
        tokens = begun(tokens, length, tokenizer.special.before)
    rows = pack(tokens, length)
    if left := tokens.numel() % length:
        say(f"the last {left:,} of {tokens.numel():,} tokens do not fill a sequence of {length:,} and are left out")
    return rows


def _fitted(rows: Rows, length: int, too_long: TooLong, say: Say) -> Rows:
    """Rows of at most `length` tokens. Raises `MegacompileError` if none is left."""
    longer = rows.lengths > length
    count = int(longer.sum())
    if not count:
        return rows
    cut = rows.truncated(length)
    kept = ~longer if too_long is TooLong.DROP else ~longer | cut.learning()
    dropped = len(rows) - int(kept.sum())
    what = f"{count:,} of {len(rows):,} conversations ({count / len(rows):.1%}) are longer than {length:,} tokens"
    remedy = f"--length {int(rows.lengths.max()):,} keeps all of them whole".replace(",", "")
    if dropped == len(rows):
        raise MegacompileError(f"{what}, and nothing is left to learn: {remedy}")
    if too_long is TooLong.DROP:
        say(f"warning: {what}, and are DROPPED: {remedy}")
    else:
        lost = int((rows.lengths - cut.lengths)[kept].sum())
        gone = f", and {dropped:,} whose answers begin later are DROPPED" if dropped else ""
        say(f"warning: {what}, and are TRUNCATED ({lost:,} tokens are cut off{gone}): {remedy}; --too-long drop drops them")
    return cut.select(kept)


def _detected(source: str) -> Format:
    """The format of a source, detected from its first row."""
    row = next(read_rows(source))
    with placed(source):
        return detect(row)


def _numbered(sources: Sequence[str]) -> Iterator[tuple[int, str, int, Row]]:
    """(index of the source, its name, row number in it from 1, the row) for all rows."""
    for which, source in enumerate(sources):
        for number, row in enumerate(read_rows(source), start=1):
            yield which, source, number, row


def _conversations(sources: Sequence[str], formats: Sequence[Format], encoder: ChatEncoder) -> Iterator[Encoded]:
    for which, source, number, row in _numbered(sources):
        with placed(source, number):
            encoded = encoder.encode(messages_of(row, formats[which]), tools_of(row))
        yield from encoded


def _texts(sources: Sequence[str], tokenizer: PretrainedTokenizer) -> Iterator[list[int]]:
    for _, source, number, row in _numbered(sources):
        with placed(source, number):
            text = text_of(row)
        yield tokenizer.document(text)


def _end_of(tokenizer: Any) -> int:
    if tokenizer.eos_token_id is None:
        raise MegacompileError("the tokenizer has no end-of-sequence token, which separates texts: set eos_token and save it "
                               "again")
    return int(tokenizer.eos_token_id)
