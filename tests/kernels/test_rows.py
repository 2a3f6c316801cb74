"""Files -> rows -> sequences -> batches."""
from __future__ import annotations

import csv
import gzip
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizer
import torch

from megacompile.corpus import ByteTokenizer, PretrainedTokenizer
from megacompile.errors import ArgumentError, MegacompileError
from megacompile.finetuning.chat import Encoded
from megacompile.finetuning.data import check_sources, files_of, is_text, join, pack, pack_conversations, read, read_rows
from megacompile.finetuning.formats import Format
from megacompile.finetuning.training_sequences import Order, Padding, Rows, collate, in_order, split

ALPACA = [{"instruction": "one", "input": "", "output": "1"}, {"instruction": "two", "input": "NA", "output": "2"}]


def write(path: Path, content: str) -> str:
    path.write_text(content, encoding="utf-8")
    return str(path)


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# ---------------------------------------------------------------- files
@pytest.mark.parametrize(("content", "warned"), [
    (lines(ALPACA), True), ("\n \n" + lines(ALPACA), True), ("a story\n" + lines(ALPACA), False), ("[1]\n", False),
    ("{ not JSON\n", False)])
def test_rows_that_are_read_as_text_for_their_names_sake_are_noticed(tmp_path: Path, content: str, warned: bool) -> None:
    said: list[str] = []
    path = write(tmp_path / "rows.ndjson", content)
    read([path], ByteTokenizer(), None, 4, False, 256, said.append)
    assert [f"{path} is read as TEXT, but begins with a JSON object: if it holds rows, rename it to .jsonl" in each
            for each in said if "warning" in each] == [True] * warned


@pytest.mark.parametrize(("name", "content"), [
    ("a.jsonl", lines(ALPACA)), ("a.jsonl", "\ufeff" + lines(ALPACA).replace("\n", "\r\n\r\n")),
    ("a.json", json.dumps(ALPACA, indent=1)), ("a.json", lines(ALPACA)),
    ("a.csv", "instruction,input,output\none,,1\n\"two\",NA,2\n"),
    ("a.TSV", "instruction\tinput\toutput\none\t\t1\ntwo\tNA\t2\n")])
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, name: str, content: str) -> None:
    assert list(read_rows(write(tmp_path / name, content))) == ALPACA


def saved(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    """Rows in a file of a kind, in the folder. Columns of tables are texts."""
    path = folder / f"a{kind}"
    if kind == ".parquet":
        parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        parquet.write_table(arrow.Table.from_pylist(rows), path)
    elif kind in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, list(rows[0]), delimiter="," if kind == ".csv" else "\t")
            table.writeheader()
            table.writerows(rows)
    else:
        write(path, json.dumps(rows, indent=1) if kind == ".json" else lines(rows))
    return path


#: Texts that readers which guess types would change.
GUESSED = ["NA", "None", "null", "nan", "", "2024-01-31", "2024-01-31T10:00:00Z", "1", "1.50", "007", "true", " x ", "a\nb",
           "a\tb"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the files of a folder a data set on the Hub, `owner/name`, in the way in which `datasets` finds its splits."""
    datasets, huggingface = pytest.importorskip("datasets"), pytest.importorskip("huggingface_hub")
    load, prefix = datasets.load_dataset_builder, "hf://datasets/owner/name@abc/"

    def serve(folder: Path) -> None:
        def builder(name: str) -> Any:
            assert name == "owner/name"
            found = load(str(folder), cache_dir=str(tmp_path / "cache"))
            found.config.data_files = {split: [prefix + str(Path(file).relative_to(folder)) for file in files]
                                       for split, files in found.config.data_files.items()}
            return found

        def fetched(name: str, file: str, *, revision: str, repo_type: str) -> str:
            assert (name, revision, repo_type) == ("owner/name", "abc", "dataset")
            return str(folder / file)

        monkeypatch.setattr(datasets, "load_dataset_builder", builder)
        monkeypatch.setattr(huggingface, "hf_hub_download", fetched)
        monkeypatch.setattr(huggingface, "list_repo_files", lambda name, repo_type: sorted(
            str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()))

    return serve


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv", ".tsv", ".parquet"])
def test_a_folder_and_a_data_set_have_the_rows_of_their_files_to_the_letter(
        tmp_path: Path, hub: Callable[..., None], kind: str) -> None:
    rows = [{"instruction": f"q{number}", "input": text, "output": text} for number, text in enumerate(GUESSED)]
    (tmp_path / "set").mkdir()
    path = saved(tmp_path / "set", kind, rows)
    hub(tmp_path / "set")
    assert list(read_rows(str(path))) == list(read_rows(str(tmp_path / "set"))) == list(read_rows("owner/name")) == rows


def test_a_folder_is_read_whole_in_the_order_of_names_or_refused_by_name(tmp_path: Path) -> None:
    """No name of a file decides silently that it is left out."""
    for number, name in enumerate(("b/test.jsonl", "a.csv", "c-eval.json", "d.jsonl.gz")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = f"text\n{number}\n" if name.endswith("csv") else json.dumps({"text": str(number)})
        (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    (tmp_path / ".hidden").write_text("x")
    assert [row["text"] for row in read_rows(str(tmp_path))] == ["1", "0", "2", "3"]
    (tmp_path / "b" / "train.jsonl").write_text('{"text": ""}')
    with pytest.raises(ArgumentError, match=r"has a training split and another \(b/train.jsonl, b/test.jsonl\): give"):
        list(read_rows(str(tmp_path)))
    (tmp_path / "b" / "train.jsonl").rename(tmp_path / "notes.md")
    with pytest.raises(ArgumentError, match=r"has rows and other files \(a.csv, notes.md\): give the files"):
        is_text(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArgumentError, match=r"folder .*empty has no files"):
        is_text(str(tmp_path / "empty"))


@pytest.mark.parametrize("name", ["README.md", "LICENSE", "more/license.txt"])
def test_a_description_beside_rows_is_left_out_and_alone_it_is_a_text(tmp_path: Path, name: str) -> None:
    (tmp_path / "more").mkdir()
    described = write(tmp_path / name, "what the rows are")
    assert is_text(str(tmp_path))
    rows = write(tmp_path / "a.jsonl", lines(ALPACA))
    assert not is_text(str(tmp_path)) and list(read_rows(str(tmp_path))) == ALPACA
    Path(rows).rename(tmp_path / "a.txt")
    assert {str(each) for each in files_of(str(tmp_path))} == {described, str(tmp_path / "a.txt")}


def test_a_data_set_is_read_whole_or_what_is_left_out_is_named(tmp_path: Path, hub: Callable[..., None]) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    hub(folder)
    write(folder / "train.jsonl", lines([{"text": "1"}]))
    write(folder / "test.jsonl", lines([{"text": "2"}]))
    assert list(read_rows("owner/name")) == [{"text": "1"}]
    write(folder / "more.csv", "text\n3\n")
    with pytest.warns(UserWarning, match=r"owner/name has files of no split, which are not read: more.csv"):
        assert list(read_rows("owner/name")) == [{"text": "1"}]
    (folder / "more.csv").unlink()
    (folder / "train.jsonl").rename(folder / "validation.jsonl")
    with pytest.raises(MegacompileError, match=r"owner/name has no split train \(its splits: validation, test\): fetch it"):
        list(read_rows("owner/name"))
    for each in folder.glob("*.jsonl"):
        each.unlink()
    write(folder / "train.txt", "one\ntwo\n")
    with pytest.raises(MegacompileError, match=r"has .*train.txt, whose format is none of .jsonl, .json, .csv, .tsv, .parquet"):
        list(read_rows("owner/name"))
    (folder / "train.txt").unlink()
    write(folder / "a.csv", "text;more\n1;2\n")
    write(folder / "README.md", "---\nconfigs:\n- config_name: default\n  data_files: a.csv\n  sep: ';'\n---\n")
    with pytest.raises(MegacompileError, match=r"owner/name is to be read with sep=';', which is not supported: fetch it"):
        list(read_rows("owner/name"))


def test_objects_in_parquet_have_the_fields_that_they_were_written_with(tmp_path: Path) -> None:
    """Parquet gives each object of a column the fields of all others."""
    rows = [{"tools": [{"name": name, "parameters": {"properties": {name: {"type": "string", **more}}, "required": [name]}}],
             "messages": [{"role": "user", "content": "q"},
                          {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": {name: 1}}}]}]}
            for name, more in (("add", {}), ("send", {"enum": ["a", "b"]}), ("ask", {"description": "d"}))]
    assert list(read_rows(str(saved(tmp_path, ".parquet", rows)))) == rows


def test_a_folder_of_text_files_is_each_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "set" / "more").mkdir(parents=True)
    files = [write(tmp_path / "set" / name, text) for name, text in (("a.txt", "one\ntwo\n"), ("more/b.md", "three\n\nfour\n"))]
    assert is_text(str(tmp_path / "set"))
    for tokenizer in (ByteTokenizer(), tokenizer_of()):
        found, expected = (data(*sources, length=4, tokenizer=tokenizer) for sources in ([str(tmp_path / "set")], files))
        assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.spans, expected.spans)


@pytest.mark.parametrize(("name", "content", "reason"), [
    ("a.jsonl", lines(ALPACA) + '{"instruction": "three"', r"a\.jsonl, row 3 cannot be read \(Expecting"),
    ("a.jsonl", lines([*ALPACA, [1]]), r"a\.jsonl, row 3 is of type list, not an object"),
    ("a.jsonl", lines([None]), r"a\.jsonl, row 1 is of type NoneType, not an object"),
    ("a.json", "[{}", r"a\.json, row 2 cannot be read \(Expecting"),
    ("a.json", json.dumps(ALPACA)[:-1] + ', {"a": 1 2}]', r"a\.json, row 3 cannot be read \(Expecting"),
    ("a.json", json.dumps(ALPACA)[:-1] + ",]", r"a\.json, row 3 cannot be read \(Expecting value"),
    ("a.json", json.dumps(ALPACA) + "x", r"a\.json, row 3 cannot be read \(Extra data"),
    ("a.json", "[" * 100_000, r"a\.json, row 1 cannot be read \(it is nested too deeply"),
    ("a.json", '[{}, {"a": "\\ud83d"}]', r"a\.json, row 2 cannot be read \(\\ud83d is an unpaired surrogate"),
    ("a.jsonl", '{"a": "\\ud83d\\ude00"}\n{"a": ["\\uDE00"]}', r"a\.jsonl, row 2 cannot be read \(\\ude00 is an unpaired"),
    ("a.jsonl", '{"a": 1}\n{"a": 1, "b": {"c": 2, "c": 3}}', r"a\.jsonl, row 2 cannot be read \(two values are named 'c'"),
    ("a.csv", "output,instruction,output\n1,2,3\n", r"a\.csv: two columns are named 'output': rename or remove one"),
    ("a.csv", ",instruction,\n1,2,3\n", r"a\.csv: two columns are named ''"),
    ("a.csv", "", r"a\.csv has no rows: give data that has some"),
    ("a.csv", "instruction,output\n", "has no rows"), ("a.json", "[]", "has no rows"), ("a.json", "", "has no rows"),
    ("a.jsonl", "\n \n", "has no rows"),
    ("a.jsonl", "[" * 100_000, r"a\.jsonl, row 1 cannot be read"),
    ("a.json", json.dumps(ALPACA[0], indent=1), r"a\.json, row 1 is a JSON object over several lines: write .* of its own$"),
    ("a.jsonl", "\n".join(json.dumps(row, indent=1) for row in ALPACA), r"a\.jsonl, row 1 is a JSON object over several lines"),
    ("a.json", json.dumps({"data": ALPACA}, indent=1), r"over several lines: .*; if the rows are those under the key data"),
    ("a.csv", "instruction,output\none,1\ntwo,2,3\n", r"a\.csv, row 2 cannot be read \(it has more fields than"),
    ("a.csv", "instruction,output\none\n", r"a\.csv, row 1 cannot be read \(it has fewer fields than"),
    ("a.parquet", "no", r"a\.parquet, row 1 cannot be read"),
])
def test_a_row_that_cannot_be_read_is_refused_with_its_place(tmp_path: Path, name: str, content: str, reason: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    with pytest.raises(MegacompileError, match=reason):
        list(read_rows(write(tmp_path / name, content)))


@pytest.mark.parametrize(("name", "before", "after"), [
    ("a.jsonl", b'{"text": "x"}\n' * 2000 + b'{"text": "ab', b'c"}\n{"text": "x"}\n'),
    ("a.json", b"[" + b'{"text": "x"}, ' * 2000 + b'{"text": "ab', b'c"}, {"text": "x"}]'),
    ("a.csv", b"text,other\n" + b'x,"two\nlines"\n' * 2000 + b"x,ab", b"c\nx,y\n")])
def test_bytes_that_are_not_utf8_are_refused_in_the_row_where_they_are(
        tmp_path: Path, name: str, before: bytes, after: bytes) -> None:
    (tmp_path / name).write_bytes(before + "é".encode() + after)
    assert len(list(read_rows(str(tmp_path / name)))) in (2001, 2002)
    (tmp_path / name).write_bytes(before + b"\xe9" + after)
    with pytest.raises(MegacompileError, match=r", row 2001 cannot be read \(byte 0xe9 after \d+ characters is not UTF-8"):
        list(read_rows(str(tmp_path / name)))


def test_columns_of_a_name_bytes_that_are_not_utf8_and_no_rows_are_refused_in_parquet_files_too(tmp_path: Path) -> None:
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table([["1"], ["2"]], names=["text", "text"]), path)
    with pytest.raises(MegacompileError, match=r"a\.parquet: two columns are named 'text'"):
        list(read_rows(str(path)))
    texts = arrow.array([b"one", b"\xff", b"three"]).cast(arrow.binary())
    torn = arrow.StringArray.from_buffers(3, *texts.buffers()[1:])
    parquet.write_table(arrow.table([torn], names=["text"]), path)
    with pytest.raises(MegacompileError, match=r"a\.parquet, row 2 cannot be read \('utf-8' codec"):
        list(read_rows(str(path)))
    parquet.write_table(arrow.table([[]], names=["text"]), path)
    with pytest.raises(MegacompileError, match=r"a\.parquet has no rows"):
        list(read_rows(str(path)))


def test_names_in_capitals_are_of_rows_too_and_pipes_of_nothing(tmp_path: Path) -> None:
    assert not is_text(write(tmp_path / "A.JSONL", lines(ALPACA))) and list(read_rows(str(tmp_path / "A.JSONL"))) == ALPACA
    os.mkfifo(tmp_path / "pipe.jsonl")
    for refused in (tmp_path / "pipe.jsonl", tmp_path):
        with pytest.raises(ArgumentError, match=r"pipe.jsonl cannot be read \(it is a FIFO, not a regular file\)"):
            is_text(str(refused))


def test_a_missing_path_is_not_taken_for_a_data_set(tmp_path: Path) -> None:
    for absent in (str(tmp_path / "absent"), "absent", "data/absent.jsonl"):
        with pytest.raises(ArgumentError, match=r"file or folder .* does not exist"):
            is_text(absent)
    assert not is_text("owner/name")


# ---------------------------------------------------------------- data
def tokenizer_of(template: str | None = tiny_tokenizer.CHATML, around: str = "$A") -> PretrainedTokenizer:
    found = PretrainedTokenizer.__new__(PretrainedTokenizer)
    found.pretrained = tiny_tokenizer.build(template, around=around)
    return found


def data(*sources: str, length: int = 60, format: Format | None = None, packed: bool = False, vocabulary: int = 300,
         tokenizer: Any = None) -> Rows:
    check_sources(sources, format)
    said.clear()
    return read(sources, tokenizer or tokenizer_of(), format, length, packed, vocabulary, said.append)


said: list[str] = []


def texts(rows: Rows) -> list[str]:
    return [tokenizer_of().pretrained.decode(rows.row(index)[0]) for index in range(len(rows))]


def test_conversations_of_several_files_and_formats_are_a_sequence_each(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", lines(ALPACA[:1]))
    second = write(tmp_path / "b.jsonl", lines([{"messages": [{"role": "user", "content": "x"},
                                                              {"role": "assistant", "content": "y"}]}]))
    rows = data(first, second)
    assert texts(rows) == [f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
                           for asked, answer in (("one", "1"), ("x", "y"))]
    tokens, labels = rows.row(1)
    assert tokens.dtype == labels.dtype == torch.int64
    assert tokenizer_of().pretrained.decode(labels[labels != -100]) == "y<|im_end|>"
    assert torch.equal(tokens[labels != -100], labels[labels != -100]) and not said


def test_longer_conversations_are_counted_and_one_without_an_answer_left_is_dropped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines([*ALPACA, {"instruction": "x" * 100, "output": "3"}]))
    assert len(data(path)) == 2
    (warning,) = said
    assert "1 of 3 conversations" in warning and "longer than 60 tokens" in warning and "1 whose answers begin later" in warning
    with pytest.raises(MegacompileError, match=r"3 of 3 conversations .* nothing is left to learn"):
        data(path, length=9)


def test_packed_conversations_lose_nothing_and_know_where_they_begin() -> None:
    rows = pack_conversations(Rows.of([Encoded([1, 2], [True, True]), Encoded([3, 4, 5, 6], [False, False, True, True]),
                             Encoded([7, 8, 9], [False, True, True]), Encoded([10], [True])]), length=6)
    assert [rows.row(index)[0].tolist() for index in range(len(rows))] == [[3, 4, 5, 6, 1, 2], [7, 8, 9, 10]]
    batch = collate(rows, [1, 0], Padding(rows=3, longest=6))
    assert "attention_mask" not in batch, "a mask would say that a row holds one sequence"
    assert batch["input_ids"].tolist() == [[7, 8, 9, 10, 0, 0], [3, 4, 5, 6, 1, 2], [0] * 6]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]]
    # Nothing learns to begin from what stands before it.
    assert batch["labels"].tolist() == [[-100, 8, 9, -100, -100, -100], [-100, -100, 5, 6, -100, 2], [-100] * 6]


def test_packing_leaves_little_room_and_is_decided_by_the_rows() -> None:
    sizes = torch.randint(1, 50, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = Rows.of(Encoded([number] * size, [True] * size) for number, size in enumerate(sizes))
    packed = pack_conversations(rows, 64)
    assert int(packed.lengths.max()) <= 64 and len(packed) <= 1.02 * sum(sizes) / 64 + 1
    assert Counter(packed.tokens.tolist()) == Counter(rows.tokens.tolist()) and int(packed.begins.sum()) == 400
    assert pack_conversations(rows, 64).fingerprint() == packed.fingerprint() != rows.fingerprint()


def test_texts_are_joined_by_the_end_token_and_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines([{"text": "abcde"}, {"text": "fg"}, {"text": "hijkl"}]))
    rows = data(path, length=7)
    assert texts(rows) == ["abcde<|im_end|>f", "g<|im_end|>hijkl"]
    assert torch.equal(*rows.row(1))


def test_text_files_are_cut_into_sequences(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "abcdefgh")
    assert [bytes(tokens.tolist()) for tokens, _ in map(data(path, length=3, tokenizer=ByteTokenizer()).row, range(2))] == [
        b"abc", b"def"]


@pytest.mark.parametrize("around", ["<s> $A", "<s> $A </s>", "<s> <lang> $A", "$A </s>", "$A"])
@pytest.mark.parametrize("kind", ["files", "rows", "rows with special tokens"])
def test_every_sequence_begins_as_the_tokenizer_begins_a_text_once_and_nothing_else_changes(
        kind: str, around: str, tmp_path: Path) -> None:
    """The special tokens may be two, of which the end of a sequence cuts off one."""
    tokenizer, documents = tokenizer_of(around=around), ["abcdefghij" * 3, "klm", "nopqrstuvwxyz" * 5]
    native = tokenizer.pretrained
    before, after = (native.convert_tokens_to_ids(side.split()) for side in around.split("$A"))
    if kind == "files":
        sources = [write(tmp_path / f"{number}.txt", text) for number, text in enumerate(documents)]
    else:
        sides = [side.replace(" ", "") if kind == "rows with special tokens" else "" for side in around.split("$A")]
        sources = [write(tmp_path / "a.jsonl", lines([{"text": text.join(sides)} for text in documents]))]
    rows = data(*sources, length=8, tokenizer=tokenizer)
    found, left = [rows.row(index)[0].tolist() for index in range(len(rows))], [
        token for text in documents for token in [
            *native(text, add_special_tokens=False)["input_ids"], *after, *([] if kind == "files" else [native.eos_token_id])]]
    assert {len(each) for each in found} == {8}
    for each in found:
        assert each[:len(before)] == before
        starts = [at for at, token in enumerate(each) if token in before[:1]]
        assert [at for at, token in enumerate(each) if token in before] == [
            at + which for at in starts for which in range(len(before)) if at + which < 8], "whole, unless the sequence ends"
        assert all(second - first > len(before) for first, second in itertools.pairwise(starts)), "once"
    kept = [token for each in found for token in each if token not in before]
    assert kept == left[:len(kept)] and len(left) - len(kept) < 8
    if before:
        with pytest.raises(MegacompileError, match=rf"a sequence of {len(before)} has no room beside the {len(before)}"):
            data(*sources, length=len(before), tokenizer=tokenizer)


@pytest.mark.parametrize(("template", "warned"), [
    (tiny_tokenizer.CHATML, True), ("{{ bos_token }}" + tiny_tokenizer.CHATML, False), (None, False)])
def test_a_template_that_begins_otherwise_than_texts_is_noticed(template: str | None, warned: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines(ALPACA))
    rows = data(path, tokenizer=tokenizer_of(template, "<s> $A"))
    assert [each for each in said if "puts <s> before texts, but its chat template does not" in each] == said
    bos = tokenizer_of(template, "<s> $A").pretrained.bos_token_id
    assert bool(said) == warned and int((rows.tokens == bos).sum()) == (0 if warned else len(rows))


def test_answers_that_the_template_has_no_prompt_for_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines(2 * [{"messages": [
        {"role": role, "content": "x"} for role in ("system", "assistant", "user", "assistant")]}]))
    data(path, length=200, tokenizer=tokenizer_of(tiny_tokenizer.DEMANDING + tiny_tokenizer.THINKING))
    (warning,) = said
    assert "2 answers come before any message of a user" in warning


@pytest.mark.parametrize(("files", "options", "reason"), [
    ({"a.jsonl": lines([*ALPACA, {"instruction": "x", "output": None}])}, {}, r"a\.jsonl, row 3: output is missing"),
    ({"a.jsonl": lines([*ALPACA, {"text": "x"}])}, {}, r"a\.jsonl, row 3: instruction is missing"),
    ({"a.jsonl": lines([{"question": "x"}])}, {}, r"a\.jsonl: the columns question fit no format"),
    ({"a.jsonl": ""}, {}, r"a\.jsonl has no rows"),
    ({"a.jsonl": lines(ALPACA), "b.jsonl": lines([{"text": "x"}])}, {}, "texts and conversations cannot be combined"),
    ({"a.jsonl": lines(ALPACA), "b.txt": "x"}, {}, "text files and files of rows cannot be combined"),
    ({"b.txt": "x"}, {"format": Format.TEXT}, r"--format text is for rows, but .*b\.txt is text: leave"),
    ({"a.jsonl": lines(ALPACA)}, {"format": Format.TEXT}, r"a\.jsonl, row 1: text is missing"),
    ({"a.jsonl": lines(ALPACA)}, {"tokenizer": ByteTokenizer()}, "rows need a tokenizer with an end token"),
    ({"a.jsonl": lines(ALPACA)}, {"vocabulary": 100}, "the tokenizer gives token 2.., but the model's vocabulary ends at 99"),
])
def test_data_that_cannot_be_trained_on_is_refused(
        tmp_path: Path, files: dict[str, str], options: dict[str, Any], reason: str) -> None:
    with pytest.raises(MegacompileError, match=reason):
        data(*(write(tmp_path / name, content) for name, content in files.items()), **options)


# ---------------------------------------------------------------- batches
ROWS = Rows.of([Encoded([1, 2, 3], [False, True, True]), Encoded([4, 5], [False, True]), Encoded([6] * 9, [True] * 9)])


def test_a_batch_is_padded_on_the_right_and_its_padding_is_not_learnt() -> None:
    batch = collate(ROWS, [1, 0], Padding(rows=3, longest=32))
    assert batch["input_ids"].tolist() == [[4, 5, 0, 0], [1, 2, 3, 0], [0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 5, -100, -100], [-100, 2, 3, -100], [-100] * 4]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0] * 4]
    assert "attention_mask" not in collate(ROWS, [1, 0], Padding(mask=False))


def test_batches_that_are_packed_are_padded_to_their_longest_row() -> None:
    assert collate(ROWS, [1, 0])["input_ids"].shape == (2, 3)


@pytest.mark.parametrize(("which", "longest", "width"), [(0, 16, 4), (2, 16, 10), (2, 9, 9), (1, 100, 6), (2, 100, 12)])
def test_rows_that_cannot_be_packed_have_one_of_eight_widths(which: int, longest: int, width: int) -> None:
    padding = Padding(1, longest)
    assert collate(ROWS, [which], padding)["input_ids"].shape == (1, width)
    widths = {padding.size([length])[1] for length in range(1, longest + 1)}
    assert len(widths) <= 8 and max(widths) == longest


@pytest.mark.parametrize(("rows", "batch", "epochs"), [(10, 4, 2), (10, 4, 2.5), (3, 8, 3), (8, 4, 1)])
def test_an_epoch_has_every_row_once_in_an_order_of_its_own(rows: int, batch: int, epochs: float) -> None:
    order = Order(rows, batch, seed=1, epochs=epochs)
    steps = list(order.batches())
    assert len(steps) == order.steps and all(len(step) == batch for step in steps[:-1]) and 0 < len(steps[-1]) <= batch
    seen = list(itertools.chain(*steps))
    assert len(seen) == rows * epochs
    whole = [tuple(seen[start:start + rows]) for start in range(0, len(seen) - rows + 1, rows)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in whole) and (rows < 10 or len(set(whole)) == len(whole))
    assert set(Counter(seen).values()) <= {int(epochs), int(epochs) + 1}


@pytest.mark.parametrize("done", [0, 1, 4, 9])
def test_an_order_goes_on_at_any_step_and_a_seed_decides_it(done: int) -> None:
    def first(seed: int, done: int = 0) -> list[list[int]]:
        return list(itertools.islice(Order(7, 3, seed).batches(done), 12 - done))

    assert first(1, done) == first(1)[done:] and first(1) != first(2)


def test_a_split_is_decided_by_the_seed_and_loses_no_row() -> None:
    rows = pack(torch.arange(40), 2)
    kept, held = split(rows, 0.25, seed=3)
    assert len(kept) == 15 and len(held) == 5
    starts = [int(part.row(i)[0][0]) for part in (kept, held) for i in range(len(part))]
    assert sorted(starts) == list(range(0, 40, 2)) and starts[:15] == sorted(starts[:15])
    assert torch.equal(split(rows, 0.25, seed=3)[1].spans, held.spans)
    assert not torch.equal(split(rows, 0.25, seed=4)[1].spans, held.spans)
    assert [len(part) for part in split(rows, 0.0, seed=0)] == [20, 0]
    with pytest.raises(MegacompileError, match="leaves none of 1 rows to train on"):
        split(rows.select(torch.tensor([0])), 0.1, seed=0)


def test_rows_in_turn_are_all_there_once() -> None:
    batches = list(in_order(ROWS, 2))
    assert [batch["input_ids"].shape for batch in batches] == [(2, 3), (1, 9)]
    assert sum(int((batch["labels"] != -100).sum()) for batch in batches) == 12


def test_a_fingerprint_is_of_tokens_masks_and_rows() -> None:
    def changed(**what: Any) -> str:
        return Rows(**({"tokens": ROWS.tokens, "spans": ROWS.spans, "learned": ROWS.learned} | what)).fingerprint()

    assert ROWS.fingerprint() == changed()
    assert ROWS.learned is not None
    others = [changed(tokens=ROWS.tokens + 1), changed(learned=~ROWS.learned), changed(spans=ROWS.spans.flip(0))]
    assert len({changed(), *others}) == 4


def test_documents_end_once() -> None:
    assert join([[1, 2, 9], [3]], end=9).tolist() == [1, 2, 9, 3, 9]
