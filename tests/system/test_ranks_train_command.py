"""`megacompile train --gpus N` trains as one process does, prints and writes once, and ends all processes together.

With every commit the processes of a training are forked from one that has imported everything, and what starts them, `launch`,
starts a command that imports nothing. Nightly tests have both together."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizer
import torch
from processes import PATHS, free_port
from processes import start as start_job
from rich.console import Console
from tiny_models import build
from typer.testing import CliRunner

import megacompile
from megacompile import cli
from megacompile.finetuning.launch import launch
from megacompile.finetuning.reports import LOG, read_log

BATCH, STEPS = 5, 6
#: What a rank runs that is forked.
SCRIPT = "from megacompile.cli import app\napp()\n"
#: Of 27 rows in steps of 5 the last step has two; an evaluation's batches are divided too.
OPTIONS = ("--epochs", 1, "--eval-share", 0.1, "--eval-interval", 3, "--save-interval", 2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, `rows.jsonl`, of uneven lengths."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_tokenizer.build()
    build(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "rows.jsonl").write_text("".join(
        json.dumps({"instruction": f"{a} + {b}", "output": " ".join([str(a + b)] * (1 + a * b))}) + "\n"
        for a in range(6) for b in range(5)))
    return folder


def train(source: Path, *arguments: object) -> list[str]:
    """Arguments of `megacompile`."""
    return list(map(str, ("train", source, "--data", source / "rows.jsonl", "--length", 64, "--batch", BATCH, "--device", "cpu",
                          "--lr", "1e-2", "--log-interval", 1, "--no-dynamic", *arguments)))


def start(source: Path, *arguments: object, launcher: Sequence[object] = (), **environment: str) -> subprocess.Popen[str]:
    """Runs `megacompile train`, or has a launcher run it."""
    command = [sys.executable, *map(str, launcher), "-m", "megacompile", *train(source, *arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, PATHS)), **environment})


def run_here(source: Path, *arguments: object) -> None:
    """`megacompile train` in this process, which has imported everything."""
    result = CliRunner().invoke(cli.app, train(source, *arguments))
    assert result.exit_code == 0, result.output


def finished(process: subprocess.Popen[str], code: int = 0) -> str:
    output, errors = process.communicate(timeout=180)
    assert process.returncode == code, output + errors
    return output + errors


def assert_same_curve(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [entry["step"] for entry in found] == [entry["step"] for entry in expected] and len(found) == STEPS + 2
    for key in ("loss", "eval_loss", "grad_norm"):
        wanted = [entry[key] for entry in expected if key in entry]
        assert [entry[key] for entry in found if key in entry] == pytest.approx(wanted, rel=2e-4), key


def assert_trained_as_one(printed: str, folder: Path, source: Path) -> None:
    """Two processes have printed this and written to `folder / "two"`."""
    assert printed.count("saved in") == 1 and printed.count("step 3/6  evaluation loss") == 1, printed
    run_here(source, *OPTIONS, "--output", folder / "one")
    one, two = (read_log(folder / name / LOG) for name in ("one", "two"))
    assert_same_curve(two, one)
    # From the middle, on another number of processes.
    checkpoint = sorted((folder / "two" / "checkpoints").iterdir())[1]
    run_here(source, *OPTIONS, "--resume", checkpoint, "--output", folder / "three")
    wanted = [entry["loss"] for entry in one if "loss" in entry][4:]
    assert [entry["loss"] for entry in read_log(folder / "three" / LOG) if "loss" in entry] == pytest.approx(wanted, rel=2e-4)


def test_two_processes_have_the_curve_of_one_and_resume_as_one(source: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    job = start_job(tmp_path / "script.py", 2, tmp_path / "ranks", train(source, *OPTIONS, "--output", tmp_path / "two"))
    codes = job.wait(180)
    printed = job.errors(0) + job.errors(1)
    assert codes == [0, 0], printed
    assert_trained_as_one(printed, tmp_path, source)


def test_a_command_is_started_in_processes_of_which_the_first_has_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(["--version"], 3) == 0
    assert capfd.readouterr().out == f"{megacompile.__version__}\n"
    assert launch(["nothing"], 2) == 2
    assert "No such command" in capfd.readouterr().err


@pytest.mark.nightly(held_by=(
    "tests/system/test_ranks_train_command.py::test_two_processes_have_the_curve_of_one_and_resume_as_one",
    "tests/system/test_ranks_train_command.py::test_a_command_is_started_in_processes_of_which_the_first_has_the_terminal"))
def test_gpus_2_has_the_curve_of_one_process(source: Path, tmp_path: Path) -> None:
    printed = finished(start(source, *OPTIONS, "--gpus", 2, "--output", tmp_path / "two"))
    assert_trained_as_one(printed, tmp_path, source)


@pytest.mark.nightly(
    held_by="tests/system/test_ranks_train_command.py::test_two_processes_have_the_curve_of_one_and_resume_as_one")
def test_two_hosts_that_torchrun_starts_have_the_curve_of_one_process_and_write_once(source: Path, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 2, "--rdzv-backend", "c10d",
                "--rdzv-endpoint", f"localhost:{free_port()}")
    hosts = [start(source, *OPTIONS, "--output", tmp_path / "two", launcher=launcher, MEGACOMPILE_HOST=name)
             for name in ("left", "right")]
    printed = "".join(finished(host) for host in hosts)
    assert printed.count("saved in") == 1 and printed.count("step 3/6  evaluation loss") == 1, printed
    run_here(source, *OPTIONS, "--output", tmp_path / "one")
    one, two = (read_log(tmp_path / name / LOG) for name in ("one", "two"))
    assert_same_curve(two, one)


@pytest.mark.nightly(held_by="tests/system/test_fine_tuning.py::test_a_run_that_sigterm_stops_goes_on_to_the_bit")
def test_a_signal_stops_all_processes_after_a_step_and_saves(source: Path, tmp_path: Path) -> None:
    process = start(source, "--steps", 100000, "--gpus", 2, "--output", tmp_path / "run")
    log = tmp_path / "run" / LOG
    limit = time.monotonic() + 120
    while not log.exists() or len(log.read_text().splitlines()) < 3:
        assert process.poll() is None and time.monotonic() < limit, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    printed = finished(process, 128 + signal.SIGTERM)
    assert "stopped by SIGTERM after" in printed and "continue with --resume latest" in printed
    steps = len(read_log(log))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"000001-step-{steps}"]


@pytest.mark.nightly(held_by="tests/system/test_ranks_faults.py::test_a_rank_that_is_killed_or_stopped_ends_the_others")
def test_a_process_that_is_killed_ends_the_command(source: Path, tmp_path: Path) -> None:
    process = start(source, "--steps", 100000, "--gpus", 2, "--output", tmp_path / "run")
    log = tmp_path / "run" / LOG
    while not log.exists() or len(log.read_text().splitlines()) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    children = [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(children) == 2
    os.kill(children[1], signal.SIGKILL)
    killed = time.monotonic()
    printed = finished(process, 128 + signal.SIGKILL)
    assert f"rank 1 (process {children[1]}) has ended" in printed and time.monotonic() - killed < 40, printed


def test_too_few_gpus_or_rows_are_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megacompile.errors import ArgumentError
    from megacompile.finetuning import preparation
    from megacompile.finetuning.launch import check_gpus
    from megacompile.finetuning.settings import Settings
    from megacompile.tools.lora import Lora
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ArgumentError, match="--gpus 2 needs 2 GPUs, and this machine has 1: give --gpus 1"):
        check_gpus(2, None)
    check_gpus(2, "cpu")
    monkeypatch.setattr(preparation, "process_count", lambda: 2)
    with pytest.raises(ArgumentError, match=r"--batch 1 has fewer sequences than GPUs \(2\): give --batch 2 or more"):
        preparation.prepare(str(source), [str(source / "rows.jsonl")], Settings(batch=1, steps=1, length=64), Lora(),
                            Console(file=StringIO()))
