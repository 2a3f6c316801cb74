"""Every example runs as a user would run it, and prints what it promises."""
from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megacompile.passes import PIPELINE

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
OWN_TEST = {"custom_layer.py", "custom_pass.py", "demo.py", "inspect_schedule.py", "resume.py", "train.py", "trainer.py"}


Run = Callable[..., str]


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run` in this process, which has imported everything."""
    def run(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        code = None
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as end:
            code = end.code
        assert not code, f"{name} ended with {code}"
        return capsys.readouterr().out

    return run


def run(name: str, *arguments: object) -> str:
    done = subprocess.run([sys.executable, EXAMPLES / name, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, f"{name} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_train_lowers_the_loss(run_here: Run) -> None:
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", run_here("train.py"))]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.5


@pytest.mark.nightly(held_by="tests/system/test_cli.py::test_inspect_prints_stages_and_schedule_without_weights")
def test_inspect_schedule_shows_each_stage_the_program_and_a_table(run_here: Run) -> None:
    printed = run_here("inspect_schedule.py")
    assert len(re.findall(r"^after \w+ +\d+ nodes$", printed, re.MULTILINE)) == 1 + len(PIPELINE)
    assert "prefetch(" in printed and "h2d" in printed


@pytest.mark.nightly(held_by=("tests/system/test_tutorials.py::test_a_tutorial_prints_what_it_shows",
                              "tests/system/test_examples.py::test_train_lowers_the_loss"))
def test_custom_layer_learns_to_count(run_here: Run) -> None:
    printed = run_here("custom_layer.py")
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.5
    assert "continues [7, 8, 9] with [10, 11, 12, 13, 14]" in printed


@pytest.mark.nightly(held_by=(
    "tests/model/test_pipeline.py::test_a_schedule_and_a_template_pass_run_where_they_were_put_and_change_no_bit",
    "tests/system/test_examples.py::test_train_lowers_the_loss"))
def test_custom_passes_show_in_the_schedule_and_change_no_bit(run_here: Run) -> None:
    printed = run_here("custom_pass.py")
    assert "def forward(p):" in printed and "weights are bit-identical" in printed
    assert len(re.findall(r"^step \d: loss (\S+), with both passes \1$", printed, re.MULTILINE)) == 3


@pytest.mark.nightly(held_by=(
    "tests/system/test_disk_faults.py::test_a_resume_after_a_kill_has_the_bits_of_a_run_that_was_never_killed",
    "tests/system/test_checkpoint_files.py::test_no_complete_checkpoint_is_lost_when_training_is_killed"))
def test_resume_goes_on_from_a_checkpoint_after_a_kill() -> None:
    printed = run("resume.py")
    first, second = printed.split("the first process was killed by signal 9")
    (begin,) = re.findall(r"continues after step (5|10)$", second, re.MULTILINE)
    steps = [(int(step), float(loss)) for step, loss in re.findall(r"^step (\d+): loss (\S+)$", second, re.MULTILINE)]
    assert [step for step, _ in steps] == list(range(int(begin) + 1, 31))
    repeated = dict(re.findall(r"^step (\d+): loss (\S+)$", first, re.MULTILINE))
    assert len(repeated) == 12 and all(float(repeated[str(step)]) == loss for step, loss in steps if step <= 12)
    assert steps[-1][1] < float(repeated["1"]) - 0.5


@pytest.mark.nightly(held_by="tests/system/test_trainer.py::test_curves_are_those_of_an_unstreamed_trainer")
def test_trainer_has_the_curve_of_an_unstreamed_one(run_here: Run) -> None:
    pytest.importorskip("accelerate")
    printed = run_here("trainer.py", "--steps", 8, "--compare")
    assert float(re.findall(r"difference between the curves: (\S+)", printed)[0]) < 1e-4
    first, last = re.findall(r"loss (\d+\.\d+), after 8 steps (\d+\.\d+)", printed)[0]
    assert float(last) < float(first) - 0.3


@pytest.mark.nightly(held_by=(
    "tests/system/test_examples.py::test_train_lowers_the_loss",
    "tests/system/test_examples.py::test_demo_fails_when_its_target_is_missed_or_the_saved_model_differs",
    "tests/system/test_cli.py::test_training_lowers_the_loss_and_saves_a_model_that_plain_transformers_loads"))
def test_demo_trains_prints_a_sample_and_saves_what_it_says(run_here: Run, tmp_path: Path) -> None:
    # Two steps reach no interesting loss. The demonstration itself checks that the saved model gives the same one.
    printed = run_here("demo.py", "--steps", 2, "--target", 6.2, "--sample", 8, "--save", tmp_path / "saved")
    assert "prefetch(" in printed and "sample" in printed
    assert (tmp_path / "saved" / "model.safetensors").exists()
    assert float(re.findall(r"held-out loss (\S+) nats", printed)[0]) < 6.2


def test_demo_fails_when_its_target_is_missed_or_the_saved_model_differs() -> None:
    demo = runpy.run_path(str(EXAMPLES / "demo.py"))
    assert demo["passed"](loss=2.5, difference=1e-7, target=2.6)
    assert not demo["passed"](loss=2.7, difference=1e-7, target=2.6)
    assert not demo["passed"](loss=2.5, difference=1e-3, target=2.6)
    assert not demo["passed"](loss=float("nan"), difference=float("nan"), target=2.6)


@pytest.mark.parametrize("name", sorted({path.name for path in EXAMPLES.glob("*.py")} - OWN_TEST))
def test_every_other_example_runs(name: str, run_here: Run) -> None:
    assert run_here(name), f"{name} prints nothing"
