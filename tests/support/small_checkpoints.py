"""Checkpoints in small, of files of text, beside files of the user's."""
from __future__ import annotations

import json
from pathlib import Path

INDEX = "model.safetensors.index.json"


def write(folder: Path, value: str, shards: int) -> None:
    """A checkpoint in small: every file says which it belongs to, the index says which there are."""
    names = [f"model-{i:05}-of-{shards:05}.safetensors" for i in range(1, shards + 1)]
    for name in (*names, "config.json"):
        (folder / name).write_text(value)
    (folder / INDEX).write_text(json.dumps({"value": value, "files": names}))


def read(folder: Path) -> str:
    """The checkpoint's value; raises unless it is whole and of one making."""
    index = json.loads((folder / INDEX).read_text())
    assert {(folder / name).read_text() for name in index["files"]} == {index["value"]}
    return index["value"]


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def shards(count: int) -> set[str]:
    return {"config.json", INDEX, *(f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1))}


USERS = {"tokenizer.json", "link", "runs", "runs/log"}
