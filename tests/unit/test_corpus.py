"""Text -> tokens."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megacompile.corpus import ByteTokenizer, check_vocabulary, load_tokenizer, read_text
from megacompile.errors import MegacompileError


def write(folder: Path, name: str, text: bytes) -> Path:
    (folder / name).write_bytes(text)
    return folder / name


def test_bytes_survive_encoding_and_decoding() -> None:
    text = "naïve\n\tdef f(): return 'Ω'"
    assert ByteTokenizer().decode(ByteTokenizer().encode(text.encode())) == text


def test_files_are_joined_in_the_order_given(tmp_path: Path) -> None:
    files = [write(tmp_path, "b", b"first "), write(tmp_path, "empty", b""), write(tmp_path, "a", b"second")]
    assert bytes(read_text(files, ByteTokenizer()).tolist()) == b"first second"


def test_a_vocabulary_without_all_bytes_is_refused() -> None:
    with pytest.raises(MegacompileError, match=r"vocabulary of 255 does not hold the 256 byte values"):
        check_vocabulary(torch.tensor([1]), ByteTokenizer(), 255)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    with pytest.raises(MegacompileError, match=r"token 1000, but the model's vocabulary ends at 999"):
        check_vocabulary(torch.tensor([1, 1000]), load_tokenizer(tmp_path), 1000)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MegacompileError, match=r"missing.txt cannot be read \(No such file"):
        read_text([tmp_path / "missing.txt"], ByteTokenizer())


def save_tokenizer(folder: Path) -> None:
    """Of two words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    own = Tokenizer(WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    own.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=own, unk_token="[UNK]").save_pretrained(folder)


def test_the_tokenizer_beside_a_model_is_used(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(b"two one three").tolist() == [2, 1, 0]
    assert tokenizer.decode(torch.tensor([1, 2])) == "one two"


def test_without_a_tokenizer_bytes_are_tokens(tmp_path: Path) -> None:
    assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)
    assert isinstance(load_tokenizer(write(tmp_path, "config.json", b"{}")), ByteTokenizer)


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "config.json", b'{"model_type": "qwen2"}')
    write(tmp_path, "tokenizer.json", b"{}")
    with pytest.raises(MegacompileError, match="holds a tokenizer that transformers cannot read: mend its files"):
        load_tokenizer(tmp_path)
