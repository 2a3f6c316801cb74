"""Text -> tokens -> windows."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megacompile.corpus import ByteTokenizer, Corpus, load_tokenizer
from megacompile.errors import MegacompileError


def write(folder: Path, name: str, text: bytes) -> Path:
    (folder / name).write_bytes(text)
    return folder / name


def test_bytes_survive_encoding_and_decoding() -> None:
    text = "naïve\n\tdef f(): return 'Ω'"
    assert ByteTokenizer().decode(ByteTokenizer().encode(text.encode())) == text


def test_files_are_joined_in_the_order_given(tmp_path: Path) -> None:
    files = [write(tmp_path, "b", b"first "), write(tmp_path, "empty", b""), write(tmp_path, "a", b"second")]
    corpus = Corpus.from_files(files, ByteTokenizer(), 256)
    assert bytes(corpus.tokens.tolist()) == b"first second"


def test_windows_are_runs_of_the_text_from_its_first_to_its_last_token() -> None:
    corpus = Corpus(torch.arange(20, dtype=torch.uint8))
    starts = set()
    for _, batch in zip(range(50), corpus.windows(batch=4, length=17, seed=0), strict=False):
        tokens = batch["input_ids"]
        assert tokens.shape == (4, 17) and tokens.dtype == torch.int64
        assert torch.equal(tokens, tokens[:, :1] + torch.arange(17))
        assert torch.equal(tokens, batch["labels"])
        starts |= set(tokens[:, 0].tolist())
    assert starts == {0, 1, 2, 3}


def test_a_seed_fixes_the_windows() -> None:
    corpus = Corpus(torch.arange(250, dtype=torch.uint8))
    first, again, other = (next(corpus.windows(8, 5, seed)) for seed in (1, 1, 2))
    assert torch.equal(first["input_ids"], again["input_ids"])
    assert not torch.equal(first["input_ids"], other["input_ids"])


def test_a_text_of_exactly_one_window_is_enough() -> None:
    batch = next(Corpus(torch.arange(6)).windows(2, 6, seed=0))
    assert torch.equal(batch["input_ids"], torch.arange(6).expand(2, 6))


def test_too_short_a_text_is_refused_before_the_first_batch() -> None:
    with pytest.raises(MegacompileError, match=r"6 tokens, fewer than one sequence of 7: give more text"):
        Corpus(torch.arange(6)).windows(1, 7, seed=0)


def test_a_vocabulary_without_all_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MegacompileError, match=r"vocabulary of 255 does not hold the 256 byte values"):
        Corpus.from_files([write(tmp_path, "a", b"text")], ByteTokenizer(), 255)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    class Foreign:
        def encode(self, text: bytes) -> torch.Tensor:
            return torch.tensor([1, 1000])

        def decode(self, tokens: torch.Tensor) -> str:
            raise AssertionError("not reached")

    with pytest.raises(MegacompileError, match=r"token 1000, but the model's vocabulary ends at 999"):
        Corpus.from_files([write(tmp_path, "a", b"text")], Foreign(), 1000)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MegacompileError, match=r"missing.txt cannot be read \(No such file"):
        Corpus.from_files([tmp_path / "missing.txt"], ByteTokenizer(), 256)


def test_the_tokenizer_beside_a_model_is_used(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    own = Tokenizer(WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    own.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=own, unk_token="[UNK]").save_pretrained(tmp_path)
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
