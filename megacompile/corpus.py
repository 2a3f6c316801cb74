"""Text files -> token ids -> random windows, the data of `megacompile train`.

A corpus is one long run of tokens in host memory. A batch is a set of windows at random places of it, so that every
sequence is full and no batch needs padding. Without a tokenizer the bytes themselves are the tokens.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megacompile.errors import MegacompileError

_BYTE_VALUES = 256
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: bytes) -> Tensor:
        """Token ids, 1-D, of any integer dtype."""

    def decode(self, tokens: Tensor) -> str:
        """The text of 1-D token ids."""


class ByteTokenizer:
    """A byte is a token: 256 ids, no merges, nothing to load."""

    def encode(self, text: bytes) -> Tensor:
        # An empty buffer is an error to `frombuffer`. The copy in `bytearray` is what makes the tensor writable.
        return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)

    def decode(self, tokens: Tensor) -> str:
        return bytes(tokens.tolist()).decode("utf-8", errors="replace")


class PretrainedTokenizer:
    """The tokenizer saved beside a model, with no special tokens added. Raises MegacompileError if it cannot be read."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer  # slow to import, and not needed for bytes

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except Exception as error:  # whatever the files make transformers raise
            raise MegacompileError(f"{directory} holds a tokenizer that transformers cannot read: mend its files, or remove "
                                   f"them to train on bytes\n{type(error).__name__}: {error}") from error

    def encode(self, text: bytes) -> Tensor:
        decoded = text.decode("utf-8", errors="replace")
        ids = self._tokenizer(decoded, add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.int32)

    def decode(self, tokens: Tensor) -> str:
        return str(self._tokenizer.decode(tokens.tolist()))

    def save_pretrained(self, directory: Path) -> None:
        self._tokenizer.save_pretrained(directory)


def load_tokenizer(source: Path) -> ByteTokenizer | PretrainedTokenizer:
    """The tokenizer of a model directory; bytes where there is none."""
    if source.is_dir() and any((source / name).exists() for name in _TOKENIZER_FILES):
        return PretrainedTokenizer(source)
    return ByteTokenizer()


@dataclass(frozen=True)
class Corpus:
    """`tokens` is 1-D, of any integer dtype."""

    tokens: Tensor

    @classmethod
    def from_files(cls, files: Sequence[Path], tokenizer: Tokenizer, vocabulary_size: int) -> Corpus:
        """Reads and encodes each file by itself, in the order given.

        Raises MegacompileError if a file cannot be read or a token does not exist in the model's vocabulary.
        """
        if isinstance(tokenizer, ByteTokenizer) and vocabulary_size < _BYTE_VALUES:
            raise MegacompileError(
                f"a vocabulary of {vocabulary_size} does not hold the {_BYTE_VALUES} byte values: use a model "
                f"directory with a tokenizer, or a config with vocab_size >= {_BYTE_VALUES}")
        parts = []
        for file in files:
            try:
                parts.append(tokenizer.encode(file.read_bytes()))
            except OSError as error:
                raise MegacompileError(f"{file} cannot be read ({error.strerror}): give readable text files") from error
        tokens = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        if tokens.numel() and int(tokens.max()) >= vocabulary_size:
            raise MegacompileError(
                f"the tokenizer gives token {int(tokens.max())}, but the model's vocabulary ends at "
                f"{vocabulary_size - 1}: use the tokenizer that belongs to the model")
        return cls(tokens)

    def windows(self, batch: int, length: int, seed: int) -> Iterator[dict[str, Tensor]]:
        """Endless batches `{"input_ids", "labels"}`, each int64 [batch, length]; a seed always gives the same ones.

        Labels equal the inputs: the model itself shifts them. Raises MegacompileError if the text is too short.
        """
        places = self.tokens.numel() - length + 1
        if places < 1:
            raise MegacompileError(
                f"the data holds {self.tokens.numel()} tokens, fewer than one sequence of {length}: "
                "give more text or a smaller --length")
        return self._windows(places, batch, length, torch.Generator().manual_seed(seed))

    def _windows(self, places: int, batch: int, length: int, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
        offsets = torch.arange(length)
        while True:
            starts = torch.randint(places, (batch, 1), generator=generator)
            tokens = self.tokens[starts + offsets].long()
            yield {"input_ids": tokens, "labels": tokens}
