"""Text -> tokens."""
from __future__ import annotations

import bz2
import gzip
import lzma
import os
from pathlib import Path

import pytest
import torch

from megacompile.corpus import ByteTokenizer, PretrainedTokenizer, check_vocabulary, load_tokenizer, read_text
from megacompile.errors import MegacompileError
from megacompile.training import load_model


def write(folder: Path, name: str, text: bytes) -> Path:
    (folder / name).write_bytes(text)
    return folder / name


def test_bytes_survive_encoding_and_decoding() -> None:
    text = "naïve\n\tdef f(): return 'Ω'"
    assert ByteTokenizer().decode(ByteTokenizer().encode(text.encode())) == text


def test_files_are_joined_in_the_order_given(tmp_path: Path) -> None:
    files = [write(tmp_path, "b", b"first "), write(tmp_path, "a", b"second")]
    assert bytes(read_text(files, ByteTokenizer()).tolist()) == b"first second"


def test_a_vocabulary_without_all_bytes_is_refused() -> None:
    with pytest.raises(MegacompileError, match=r"vocabulary of 255 is too small for the 256 byte values"):
        check_vocabulary(torch.tensor([1]), ByteTokenizer(), 255)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    with pytest.raises(MegacompileError, match=r"token 1000, but the model's vocabulary ends at 999"):
        check_vocabulary(torch.tensor([1, 1000]), load_tokenizer(tmp_path), 1000)


@pytest.mark.parametrize(("text", "reason"), [
    (gzip.compress(b"text " * 50), r"it is compressed \(gzip\): unpack it"), (bz2.compress(b"text " * 50), r".*\(bzip2\)"),
    (lzma.compress(b"text " * 50), r".*\(xz\)"), (bytes.fromhex("28b52ffd") + bytes(9), r".*\(zstd\)"),
    ("one\ntwo\nüber".encode("latin-1"), r"byte 0xfc at 8 \(line 3\) is not valid in UTF-8 text: convert the file"),
    ("text".encode("utf-16"), r"byte 0x00 at 3 \(line 1\)"), (b"a\0b", r"byte 0x00 at 1"), (b"\xed\xa0\xbd", "byte 0xed at 0"),
], ids=["gz", "bz2", "xz", "zstd", "latin-1", "utf-16", "NUL", "half a character"])
def test_a_file_that_is_not_text_is_refused_under_any_name(tmp_path: Path, text: bytes, reason: str) -> None:
    for tokenizer in (ByteTokenizer(), PretrainedTokenizer.__new__(PretrainedTokenizer)):
        with pytest.raises(MegacompileError, match=rf"a\.txt is not text: {reason}"):
            read_text([write(tmp_path, "a.txt", text)], tokenizer)


def test_an_empty_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MegacompileError, match=r"a\.txt is empty: give text, or leave it out"):
        read_text([write(tmp_path, "b.txt", b"text"), write(tmp_path, "a.txt", b"")], ByteTokenizer())


def test_a_pipe_and_a_model_s_folder_with_one_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(MegacompileError, match=r"tokenizer.json cannot be read \(it is a FIFO, not a regular file\)"):
        read_text([tmp_path / "tokenizer.json"], ByteTokenizer())
    for load in (load_tokenizer, load_model):
        with pytest.raises(MegacompileError, match=r"tokenizer.json cannot be read \(it is a FIFO, not a regular file\)"):
            load(tmp_path)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MegacompileError, match=r"missing.txt cannot be read \(No such file"):
        read_text([tmp_path / "missing.txt"], ByteTokenizer())


def save_tokenizer(folder: Path) -> None:
    """The tokenizer knows two words."""
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
    with pytest.raises(MegacompileError, match=r"transformers cannot read the tokenizer in .*: fix its files"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_is_neither_here_nor_on_the_hub_has_no_files_to_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MegacompileError, match=r"tokenizer 'nobody-has-it' is not a folder here, .*: check the name and"):
        PretrainedTokenizer("nobody-has-it")
