"""Reads the sources of `--data` into the rows that a model is trained on."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from megacompile.corpus import ByteTokenizer, PretrainedTokenizer, check_vocabulary, read_text
from megacompile.errors import ArgumentError, MegacompileError
from megacompile.finetuning.chat import ChatEncoder, Encoded
from megacompile.finetuning.data_files import begins_with_object, files_of, is_text, placed, read_rows
from megacompile.finetuning.document_packing import begun, join, pack, pack_conversations
from megacompile.finetuning.formats import Format, Row, detect, messages_of, text_of
from megacompile.finetuning.settings import TooLong
from megacompile.finetuning.tools import tools_of
from megacompile.finetuning.training_sequences import Rows

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
