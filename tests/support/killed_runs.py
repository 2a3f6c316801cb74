"""`megacompile train`, killed and started again, over and over: for a process of its own."""
from __future__ import annotations

import json
import os
import random
import signal
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megacompile import latest_checkpoint

STEPS = 40


def kill_runs_at_random_moments(directory: Path, model: Path, data: Path, moments: int,
                                more: Sequence[str] = ()) -> dict[str, int]:
    """How many kills came where; those that came too late are not among the `moments`. The model is saved beside checkpoints
    and log. `more`: further options of the command.

    Raises AssertionError if a checkpoint or a line of the log is lost, the settings are torn, or a run that comes to its end
    differs from one that was never killed."""
    import megacompile.finetuning.train_command  # noqa: F401  (once, and not in each process)

    child = start_run(model, data, directory / "whole", more)
    begin = time.monotonic()
    wait_until_it_trains(directory / "whole", None)
    trains = time.monotonic()
    wait_for(child)
    starting, training = trains - begin, 1.1 * (time.monotonic() - trains)
    counts = dict.fromkeys(("before the first step", "in training", "after the last step", "too late", "runs compared"), 0)
    draw, number, done = random.Random(0), 0, 0
    output = directory / "0"
    while sum(counts.values()) - counts["too late"] - counts["runs compared"] < moments:
        before = log_of(output)
        child = start_run(model, data, output, more)
        if draw.random() < 0.2:
            time.sleep(draw.random() * starting)
        else:
            wait_until_it_trains(output, before)
            time.sleep(draw.random() * training)
        os.kill(child, signal.SIGKILL)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        now = look(output, directory / "whole", done)
        place = "too late" if not killed else "before the first step" if now <= done else (
            "in training" if now < STEPS else "after the last step")
        counts[place], done = counts[place] + 1, now
        if not killed or (done == STEPS and draw.random() < 0.5):
            if killed:
                wait_for(start_run(model, data, output, more))
            compare(output, directory / "whole")
            counts["runs compared"] += 1
            number, done = number + 1, 0
            output = directory / str(number)
    return counts


def start_run(model: Path, data: Path, output: Path, more: Sequence[str]) -> int:
    """The id of a process that trains."""
    child = os.fork()
    if child == 0:
        try:
            with (output.parent / "printed").open("ab") as printed:
                for stream in (1, 2):
                    os.dup2(printed.fileno(), stream)
            from megacompile.cli import app
            app([*map(str, (
                "train", model, "--data", data, "--length", 64, "--batch", 4, "--device", "cpu", "--lr", "1e-2", "--steps",
                STEPS, "--save-interval", 3, "--keep", 2, "--eval-share", 0.2, "--eval-interval", 5, "--resume", "latest",
                "--output", output, "--save", output, *more))], standalone_mode=False)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return child


def log_of(output: Path) -> int | None:
    """Which file the log is: a start puts another in its place."""
    path = output / "log.jsonl"
    return path.stat().st_ino if path.exists() else None


def wait_until_it_trains(output: Path, before: int | None) -> None:
    end = time.monotonic() + 120
    while log_of(output) == before and time.monotonic() < end:
        time.sleep(0.001)


def wait_for(child: int) -> None:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "a run failed: see the file printed"


def entries(output: Path) -> list[dict[str, Any]]:
    """The log's, but for a last line that is cut off. Raises AssertionError for one that is cut off elsewhere."""
    lines = (output / "log.jsonl").read_text().split("\n") if (output / "log.jsonl").exists() else [""]
    found = [json.loads(line) for line in lines[:-1]]
    return [{key: entry[key] for key in ("step", "loss", "eval_loss", "lr") if key in entry} for entry in found]


def look(output: Path, whole: Path, done: int) -> int:
    """The last step that is logged, of a run that was killed after `done` were."""
    if not output.exists():
        return 0
    expected, found = entries(whole), entries(output)
    assert found == expected[:len(found)], "a line of the log is lost, or comes twice"
    latest = latest_checkpoint(output / "checkpoints")
    saved = 0 if latest is None else int(latest.name.split("-step-")[1])
    last = found[-1]["step"] if found else 0
    assert saved <= last and last >= done - 2 * 3, "a checkpoint is lost: it is saved every 3 steps, beside the next"
    if found:
        assert settings(output) == settings(whole)
    return last


def settings(output: Path) -> dict[str, Any]:
    found = yaml.safe_load((output / "settings.yaml").read_text())
    assert found.pop("output") == found.pop("save") == str(output)
    return found


def compare(output: Path, whole: Path) -> None:
    """What was killed and came to its end with what was never killed."""
    assert entries(output) == entries(whole) and settings(output) == settings(whole)
    assert (output / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    checkpoint = latest_checkpoint(output / "checkpoints")
    assert checkpoint is not None and checkpoint.name.endswith(f"-step-{STEPS}")
    assert not any(path.is_symlink() for path in output.iterdir())
    assert {path.name for path in output.iterdir()} == {path.name for path in whole.iterdir()}
    assert not list(output.parent.glob(f".{output.name}.saving-*")), "a killed save has left something"
