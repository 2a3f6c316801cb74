"""Reads text files into token ids. Without a tokenizer, each byte is a token."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megacompile.errors import ArgumentError, MegacompileError
from megacompile.loading import HUB_ID
from megacompile.system.files import read_regular, refuse_irregular

_BYTE_VALUES = 256
#: First bytes of compressed files. Such files are not valid UTF-8.
_COMPRESSED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ\0": "xz", b"BZh": "bzip2"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class Tokenizer(Protocol):
    """Converts text to token ids and back."""

    def encode(self, text: bytes) -> Tensor:
        """Token ids, 1-D, of any integer dtype."""

    def decode(self, tokens: Tensor) -> str:
        """The text of 1-D token ids."""


class ByteTokenizer:
    """Each byte is a token: 256 ids, no merges, nothing to load."""

    def encode(self, text: bytes) -> Tensor:
        # `frombuffer` raises for an empty buffer. The copy in `bytearray` makes the tensor writable.
        return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)

    def decode(self, tokens: Tensor) -> str:
        return bytes(tokens.tolist()).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class SpecialTokens:
    """The token ids that a transformers tokenizer itself puts `before` and `after` a text, such as a beginning-of-sequence
    token. Most models were trained with them."""

    before: list[int]
    after: list[int]

    @classmethod
    def of(cls, tokenizer: Any) -> SpecialTokens:
        """A tokenizer's special tokens. Raises `MegacompileError` if it encodes a text differently between them."""
        whole, bare = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (True, False))
        for start in range(len(whole) - len(bare), -1, -1):
            if whole[start:start + len(bare)] == bare:
                return cls(whole[:start], whole[start + len(bare):])
        raise MegacompileError("the tokenizer encodes a text differently if it adds special tokens, so they cannot be told "
                               "from the text: use another tokenizer")

    def begin(self, tokens: list[int]) -> list[int]:
        """A text's tokens after those that come before it, once: some texts begin with them."""
        return tokens if tokens[:len(self.before)] == self.before else [*self.before, *tokens]

    def around(self, tokens: list[int]) -> list[int]:
        """A text's tokens between those that come before and after it, once each."""
        ended = tokens[len(tokens) - len(self.after):] == self.after
        return self.begin(tokens if ended else [*tokens, *self.after])


class PretrainedTokenizer:
    """A tokenizer from transformers, read from a model's folder or from the Hugging Face Hub. `pretrained`: the tokenizer
    object of transformers.

    Raises `ArgumentError` if there is no such folder, `MegacompileError` if the tokenizer cannot be read."""

    def __init__(self, source: str | Path) -> None:
        if not Path(source).exists() and not HUB_ID.fullmatch(str(source)):
            raise ArgumentError(f"tokenizer {str(source)!r} was not found: give a folder that contains one, or an id on the "
                                "Hugging Face Hub")
        if Path(source).exists():
            refuse_irregular(Path(source))
        from transformers import AutoTokenizer  # slow to import, and not needed for bytes

        try:
            self.pretrained: Any = AutoTokenizer.from_pretrained(source, local_files_only=Path(source).exists())
        except Exception as error:  # transformers may raise anything on damaged files
            why = (f"transformers cannot read the tokenizer in {source}: fix its files, or remove them to train on bytes"
                   if Path(source).exists() else
                   f"tokenizer {str(source)!r} is not a folder here, and cannot be read from the Hugging Face Hub: check the "
                   "name and the network")
            raise MegacompileError(f"{why}\n{type(error).__name__}: {error}") from error

    @cached_property
    def special(self) -> SpecialTokens:
        return SpecialTokens.of(self.pretrained)

    def encode(self, text: bytes) -> Tensor:
        return torch.tensor(self.document(text.decode("utf-8", errors="replace")), dtype=torch.int32)

    def document(self, text: str) -> list[int]:
        """The token ids of a whole text, between the special tokens that the tokenizer itself adds."""
        return self.special.around(list(self.pretrained(text, add_special_tokens=False, verbose=False)["input_ids"]))

    def decode(self, tokens: Tensor) -> str:
        return str(self.pretrained.decode(tokens.tolist()))


def load_tokenizer(source: str | Path) -> ByteTokenizer | PretrainedTokenizer:
    """The tokenizer in a model's folder, or bytes if the folder has none. If `source` does not exist here, the tokenizer of
    that name on the Hugging Face Hub."""
    path = Path(source)
    if not path.exists() or any((path / name).exists() for name in _TOKENIZER_FILES):
        return PretrainedTokenizer(source)
    return ByteTokenizer()


def read_text(files: Sequence[Path], tokenizer: Tokenizer) -> Tensor:
    """The tokens of all files, 1-D, of any integer dtype. Files are encoded one by one, in the given order.

    Raises `MegacompileError` if a file cannot be read, is empty, or is not text (UTF-8 without NUL bytes)."""
    parts = []
    for file in files:
        try:
            data = read_regular(file)
        except OSError as error:
            raise MegacompileError(f"{file} cannot be read ({error.strerror}): give readable text files") from error
        if not data:
            raise MegacompileError(f"{file} is empty: give text, or leave it out")
        if why := _why_not_text(data):
            raise MegacompileError(f"{file} is not text: {why}")
        parts.append(tokenizer.encode(data))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _why_not_text(data: bytes) -> str | None:
    """The reason why the bytes are not text, and how to fix that; None if they are text."""
    place = data.find(0)
    if place < 0:
        try:
            data.decode()
            return None
        except UnicodeDecodeError as error:
            place = error.start
    if kind := next((kind for begin, kind in _COMPRESSED.items() if data.startswith(begin)), None):
        return f"it is compressed ({kind}): unpack it"
    line = data.count(b"\n", 0, place) + 1
    return (f"byte 0x{data[place]:02x} at {place} (line {line}) is not valid in UTF-8 text: convert the file, for example with "
            "iconv")


def check_vocabulary(tokens: Tensor, tokenizer: Tokenizer, vocabulary_size: int) -> None:
    """Raises `MegacompileError` if a token is not in the model's vocabulary."""
    if isinstance(tokenizer, ByteTokenizer) and vocabulary_size < _BYTE_VALUES:
        raise MegacompileError(
            f"a vocabulary of {vocabulary_size} is too small for the {_BYTE_VALUES} byte values: use a model "
            f"directory with a tokenizer, or a config with vocab_size >= {_BYTE_VALUES}")
    if tokens.numel() and int(tokens.max()) >= vocabulary_size:
        raise MegacompileError(
            f"the tokenizer gives token {int(tokens.max())}, but the model's vocabulary ends at "
            f"{vocabulary_size - 1}: use the tokenizer that belongs to the model")
