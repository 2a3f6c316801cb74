"""Rows that say which answers are good, for `--task dpo`, `reward` and `kto`, as the columns that TRL's trainers read."""
from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from megacompile.corpus import PretrainedTokenizer, Tokenizer
from megacompile.errors import ArgumentError, MegacompileError
from megacompile.finetuning.data import files_of, is_text, needs_train_extra, placed, read_rows
from megacompile.finetuning.formats import PROMPT_COLUMNS, Message, Row, prompt_of, said_by
from megacompile.finetuning.settings import Task
from megacompile.finetuning.tools import tools_of


def preference_of(row: Row) -> dict[str, Any]:
    """`prompt`, `chosen` and `rejected`, each a list of messages. An answer is a text, a message, or a whole conversation, of
    which the last answer counts. Raises `MegacompileError` with the reason if the row is invalid."""
    (asked, chosen), (_, rejected) = _answer(row, "chosen"), _answer(row, "rejected")
    if chosen == rejected:
        raise MegacompileError("chosen and rejected are equal, so there is nothing to learn: remove the row")
    return {"prompt": _prompt(row, asked), "chosen": chosen, "rejected": rejected}


def verdict_of(row: Row) -> dict[str, Any]:
    """`prompt` and `completion`, each a list of messages, and `label`, true for a good answer. The answer is in `completion` or
    `output`, or ends a conversation. Raises `MegacompileError` with the reason if the row is invalid."""
    label = row.get("label")
    if label not in (0, 1):  # also False and True
        raise MegacompileError(f"label is {label!r}, but must be true (a good answer) or false")
    column = next((each for each in ("completion", "output", "messages", "conversations") if row.get(each) is not None), None)
    if column is None:
        raise MegacompileError("the row has no answer: give it a column completion (text), or messages that end with one")
    asked, completion = _answer(row, column)
    return {"prompt": _prompt(row, asked), "completion": completion, "label": bool(label)}


def _answer(row: Row, column: str) -> tuple[list[Message], list[Message]]:
    """(the messages before the last answer in a column, that answer)."""
    messages = said_by(row, column)
    if messages[-1]["role"] != "assistant":
        raise MegacompileError(f"{column} does not end with an answer of the assistant")
    begin = len(messages)
    while begin and messages[begin - 1]["role"] == "assistant":
        begin -= 1
    return messages[:begin], messages[begin:]


def _prompt(row: Row, asked: list[Message]) -> list[Message]:
    """The prompt in the row's own column if it has one, otherwise the messages before the answer."""
    if asked and not any(row.get(column) is not None for column in PROMPT_COLUMNS):
        return asked
    return prompt_of(row)


#: Task -> how a row is read.
_READ: dict[Task, Callable[[Row], dict[str, Any]]] = {
    Task.DPO: preference_of, Task.REWARD: preference_of, Task.KTO: verdict_of}


def read_answers(task: Task, sources: Sequence[str], tokenizer: Tokenizer) -> Any:
    """The rows of all sources as a `datasets.Dataset`. Raises `ArgumentError` for text files and without a tokenizer,
    `MegacompileError` for an invalid row, with its file, number and reason."""
    if not isinstance(tokenizer, PretrainedTokenizer):
        raise ArgumentError("rows need a tokenizer with an end token, which this model does not have: give --tokenizer")
    with needs_train_extra("data sets"):
        import datasets

    found = []
    for source in sources:
        if is_text(source):
            raise ArgumentError(f"--task {task} learns from rows, but {source} is text: give .jsonl, .json, .csv or .parquet")
        for file in files_of(source):
            for number, row in enumerate(read_rows(str(file)), start=1):
                with placed(file, number):
                    tools = tools_of(row)
                    found.append(_READ[task](row) | ({"tools": tools} if tools else {}))
    if not sys.stderr.isatty():  # a log would get a line for each stage of each bar
        datasets.disable_progress_bars()
    return datasets.Dataset.from_list(found)


def fingerprint(rows: Any) -> str:
    """A hash of the rows of a data set. It differs for other rows and for another order."""
    found = hashlib.blake2b(digest_size=16)
    for row in rows:
        found.update(json.dumps(row, sort_keys=True).encode() + b"\0")
    return found.hexdigest()
