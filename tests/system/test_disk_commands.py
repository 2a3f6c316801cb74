"""`train`, `plan` and `calibrate` with optimizer state on disk, from arguments to what is printed and logged."""
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizer
from tiny_models import build
from typer.testing import CliRunner, Result

from megacompile import cli
from megacompile.finetuning.reports import read_log
from megacompile.predict.hardware import Hardware
from megacompile.system.direct_file import DirectFile

CONFIG = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "four-layers.json"


def command(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    (tmp_path / "drive").mkdir()
    return tmp_path / "drive"


@pytest.fixture
def training(tmp_path: Path) -> tuple[Any, ...]:
    """`train` with a tiny model."""
    tokenizer = tiny_tokenizer.build()
    build(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    rows = [{"instruction": f"{a} + {b}", "output": str(a + b)} for a in range(5) for b in range(4)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ("train", tmp_path / "tiny", "--data", tmp_path / "sums.jsonl", "--length", 64, "--batch", 4, "--device", "cpu",
            "--lr", "1e-2", "--log-interval", 1, "--decay", "constant", "--save-interval", 3)


def test_a_run_with_state_on_disk_logs_what_it_writes_and_resumes_to_the_bit(
        training: tuple[Any, ...], drive: Path, tmp_path: Path) -> None:
    on_disk = ("--disk", drive, "--disk-state", "all")
    stopped, memory = tmp_path / "stopped", tmp_path / "memory"
    for steps in (3, 6):
        result = command(*training, *on_disk, "--output", stopped, "--steps", steps, "--resume", "latest")
        assert result.exit_code == 0 and re.search(r" written \S+ [KM]iB", result.output), result.output
    assert "resuming after step 3" in result.output
    assert command(*training, "--output", memory, "--steps", 6).exit_code == 0
    entries, others = ([entry for entry in read_log(output / "log.jsonl") if "loss" in entry] for output in (stopped, memory))
    assert [entry["loss"] for entry in entries] == [entry["loss"] for entry in others] and len(entries) == 6
    first, second = ((output / "model" / "model.safetensors").read_bytes() for output in (stopped, memory))
    assert first == second
    written = [entry.get("disk_bytes_written", 0) for entry in entries]  # an update may be in flight when its step is logged
    assert written[0] < written[2] and written[3] < written[5], "counted from the start of a process"
    assert not any("disk_bytes_written" in entry for entry in others)
    assert not list(drive.iterdir()), "the state's file is gone with the run"


@pytest.mark.nightly(held_by=(
    "tests/model/test_disk_plans.py::test_training_that_does_not_fit_host_memory_fits_with_a_disk",
    "tests/system/test_disk_commands.py::test_calibrate_measures_the_drives_of_a_folder"))
def test_a_plan_with_a_disk_says_what_is_written_and_how_long_drives_last(tmp_path: Path) -> None:
    arguments = ("plan", CONFIG, "--hardware", "h200", "--batch", 16, "--length", 1024, "--host-memory", "12GiB")
    alone = command(*arguments)
    assert alone.exit_code == 1 and "or keep moments on a local drive (--disk /nvme/state)" in alone.stderr, alone.output
    found = command(*arguments, "--disk", tmp_path, "--disk-rating", "1.2PB")
    assert found.exit_code == 0, found.output
    said = re.search(r"disk: the moments of (\d+) of 6 tiles, (\d+\.\d+) GiB, are read and written in each step.*; drives "
                     r"rated for 1\.2 PB last ([\d,]+) steps", found.output)
    assert said is not None and 0 < int(said[1]) < 6, found.output
    assert int(said[3].replace(",", "")) == pytest.approx(1.2e15 / (float(said[2]) * 2**30), rel=1e-3)
    assert "disk_write binds" in found.output, "its rates are those of data sheets"


def test_calibrate_measures_the_drives_of_a_folder(drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    write = DirectFile.write
    monkeypatch.setattr(DirectFile, "write", lambda file, *arguments: (calls.append(file.size), write(file, *arguments))[1])
    result = command("calibrate", "--device", "cpu", "--scale", "0.01", "--disk", drive, "--output", tmp_path / "rates.json")
    assert result.exit_code == 0 and "measuring the disk: both at once ..." in result.stderr, result.output
    assert all(re.search(rf"^disk {way} +\S+ [GM]B/s$", result.stdout, re.MULTILINE) for way in ("read", "write"))
    found = Hardware.load(tmp_path / "rates.json")
    assert calls and set(found.disk) == {"read", "write"} and min(found.disk.values()) > 0
    assert not list(drive.iterdir())
