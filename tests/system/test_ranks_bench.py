"""A benchmark under torchrun: one row of all ranks."""
from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from processes import ROOT, start


@pytest.mark.nightly(held_by="tests/system/test_ranks_parity.py::test_ranks_train_as_one_process_with_all_rows")
def test_a_row_of_two_ranks_is_written_once_and_counts_the_tokens_of_both(tmp_path: Path) -> None:
    arguments = ["--shape", "tiny", "--batch", "3", "--length", "16", "--train-step", "--uncompiled", "--append",
                 str(tmp_path / "rows.jsonl")]
    job = start(ROOT / "benchmarks" / "step.py", 2, tmp_path / "job", arguments)
    assert job.wait() == [0, 0], job.errors(0) + job.errors(1)
    row, = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    tokens_per_second = row["tflops"] * 1e12 / (6 * row["active_parameters"])
    assert abs(tokens_per_second * row["step_s"] / (2 * 3 * 16) - 1) < 0.1
    assert row["options"]["gpus"] == 2 and row["occupancy"]["collective"] > 0
    assert not job.errors(1).count('"system"')


@pytest.mark.nightly(held_by="tests/system/test_ranks_parity.py::test_ranks_train_as_one_process_with_all_rows")
def test_two_ranks_compute_alone_after_whole_steps_with_another_plan(tmp_path: Path) -> None:
    row = ["--shape", "tiny", "--batch", "3", "--length", "16", "--steps", "2", "--warm-up", "1", "--recorded-steps", "0",
           "--train-step", "--uncompiled", "--device", "cpu", "--append", str(tmp_path / "rows.jsonl")]
    job = start(ROOT / "benchmarks" / "step.py", 2, tmp_path / "job", [*row, "--then", *row, "--resident", "--compute-only"])
    assert job.wait() == [0, 0], job.errors(0) + job.errors(1)
    whole, alone = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert (whole["compute_only"], alone["compute_only"]) == (False, True)
    assert not any("error" in found for found in (whole, alone))


@pytest.mark.nightly(held_by="tests/system/test_ranks_parity.py::test_ranks_train_as_one_process_with_all_rows")
def test_a_row_of_uneven_lengths_counts_the_useful_tokens_of_both_ranks(tmp_path: Path) -> None:
    arguments = ["--shape", "tiny", "--layers", "2", "--batch", "6", "--steps", "2", "--warm-up", "1", "--device", "cpu",
                 "--logging-steps", "1", "--append", str(tmp_path / "rows.jsonl")]
    job = start(ROOT / "benchmarks" / "uneven.py", 2, tmp_path / "job", arguments)
    assert job.wait() == [0, 0], job.errors(0) + job.errors(1)
    row, = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert row["options"]["gpus"] == 2 and len(row["losses"]) == 3
    assert sum(row["useful_tokens"]) == row["stats"]["useful_tokens"]
    assert sum(row["computed_tokens"]) == row["stats"]["computed_tokens"] >= row["stats"]["useful_tokens"]
    assert not job.errors(1).count('"system"')


@pytest.mark.nightly(held_by="tests/system/test_ranks_parity.py::test_ranks_train_as_one_process_with_all_rows")
def test_a_long_run_of_two_ranks_has_the_losses_of_one_with_all_rows(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Each rank has a part of the rows. " * 20)
    row = ["--shape", "tiny", "--layers", "2", "--length", "16", "--steps", "30", "--train-step", "--uncompiled",
           "--device", "cpu", "--text", str(tmp_path / "text"), "--tolerance", "1", "--step-tolerance", "100"]
    script = ROOT / "benchmarks" / "endurance.py"
    for ranks, batch in ((2, "3"), (1, "6")):
        job = start(script, ranks, tmp_path / f"job{ranks}",
                    [*row, "--batch", batch, "--append", str(tmp_path / "rows.jsonl"),
                     "--log-file", str(tmp_path / f"log{ranks}")])
        assert job.wait() == [0] * ranks, job.errors(0)
    two, one = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert two["options"]["gpus"] == 2 and two["steps"] == one["steps"] == len(two["curve"])
    assert two["text_sha256"] == one["text_sha256"] == hashlib.sha256((tmp_path / "text").read_bytes()).hexdigest()
    assert two["curve"] == pytest.approx(one["curve"], rel=2e-3) and one["curve"][-1] < one["curve"][0]
    logged = [json.loads(line) for line in (tmp_path / "log2").read_text().splitlines()]
    assert len(logged) == two["samples"], "only one of the ranks writes a line for each sample"
    assert [loss for sample in logged for loss in sample["losses"]] == pytest.approx(two["curve"], abs=1e-4)


@pytest.mark.nightly(held_by="tests/system/test_ranks_parity.py::test_ranks_train_as_one_process_with_all_rows")
def test_two_ranks_load_and_save_one_copy_of_a_model(tmp_path: Path) -> None:
    arguments = ["--shape", "tiny", "--layers", "2", "--batch", "3", "--length", "16", "--steps", "2", "--warm-up", "1",
                 "--uncompiled", "--device", "cpu", "--save", "--folder", str(tmp_path),
                 "--append", str(tmp_path / "rows.jsonl")]
    job = start(ROOT / "benchmarks" / "storage.py", 2, tmp_path / "job", arguments)
    assert job.wait() == [0, 0], job.errors(0) + job.errors(1)
    row, = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert row["options"]["gpus"] == 2 and row["save_s"] > row["save_returned_s"] > 0 and row["load_s"] > row["capture_s"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "rows.jsonl"], "it leaves nothing on the disk"
