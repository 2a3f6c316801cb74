"""The command line, from arguments to exit code."""
from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

import megacompile
from megacompile import cli, training
from megacompile.errors import MegacompileError, NonFiniteError, StallError
from megacompile.finetuning.settings import Settings
from megacompile.runtime.operations import OPERATIONS
from megacompile.system.progress import Progress
from megacompile.tools.recipe import Kind, Recipe
from megacompile.verify.verifier import RULES

CONFIG = """{"model_type": "qwen2", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48,
 "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(CONFIG)
    return tmp_path / "config.json"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 20)
    return tmp_path / "text.txt"


def megacompile_command(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def train(config: Path, text: Path, *more: object) -> Result:
    return megacompile_command("train", config, "--data", text, "--batch", 4, "--length", 16, "--device", "cpu",
                               "--lr", "1e-2", "--log-interval", 1, *more)


def test_training_lowers_the_loss_and_saves_a_model_that_plain_transformers_loads(
        config: Path, text: Path, tmp_path: Path) -> None:
    result = train(config, text, "--steps", 12, "--checkpoint-interval", 2, "--micro-batch-size", 3,
                   "--save", tmp_path / "saved")
    assert result.exit_code == 0, result.output
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", result.output)]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.5
    assert re.search(r"tokens/s \(\d+% padding\) +\S+ TFLOPS +device \S+ [KM]iB +host \S+ [KM]iB", result.output)
    assert f"saved in {tmp_path / 'saved'} after 12 steps" in result.output
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    tokens = torch.tensor(list(text.read_bytes()[:160])).view(10, 16)
    with torch.no_grad():
        assert saved(input_ids=tokens, labels=tokens).loss < losses[0] - 0.5


def test_a_seed_fixes_the_training(config: Path, text: Path) -> None:
    losses = [re.findall(r"loss \S+", train(config, text, "--steps", 3, "--seed", seed).output) for seed in (1, 1, 2)]
    assert len(losses[0]) == 3 and losses[0] == losses[1] != losses[2]


@pytest.mark.usefixtures("ctrl_c_after_two_steps")
def test_ctrl_c_stops_after_the_step_saves_and_says_so(config: Path, text: Path, tmp_path: Path) -> None:
    result = train(config, text, "--steps", 50, "--save", tmp_path / "saved")
    assert result.exit_code == cli.EXIT_INTERRUPTED, result.output
    assert "stopped by Ctrl-C after 2 of 50 steps" in result.output
    assert (tmp_path / "saved" / "model.safetensors").exists()


def test_an_error_of_ours_is_one_line_and_exit_code_1(config: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    result = train(config, tmp_path / "short.txt", "--steps", 1)
    assert result.exit_code == 1
    assert result.stderr == ("megacompile: the data has 5 tokens, fewer than one sequence of 16: "
                             "give more text or a smaller --length\n")


def test_where_nothing_can_be_saved_nothing_is_trained(config: Path, text: Path) -> None:
    result = train(config, text, "--steps", 1, "--save", "/proc/absent/saved")
    assert result.exit_code == 1 and "step 1" not in result.output
    assert result.stderr.startswith("megacompile: nothing can be saved in /proc/absent/saved (")


def test_sequences_that_the_model_has_no_positions_for_are_refused(config: Path, text: Path) -> None:
    result = train(config, text, "--steps", 1, "--length", 65)
    assert result.exit_code == 1
    assert result.stderr == ("megacompile: a sequence of 65 tokens is longer than the 64 positions of the model: use a "
                             "smaller --length, or a model with a larger max_position_embeddings\n")


def test_a_lane_that_fails_is_shown_with_the_program_around_it(config: Path, text: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("in a lane")

    monkeypatch.setitem(OPERATIONS, "reduce", broken)
    result = train(config, text, "--steps", 1)
    assert result.exit_code == 1 and "Traceback" not in result.output
    cause, *program = result.stderr.splitlines()
    assert cause == "megacompile: reduce failed in lane compute: ZeroDivisionError: in a lane"
    assert any("reduce" in line and line.endswith("<-- FAILED HERE") for line in program) and len(program) < 12


@pytest.mark.sample(1)
@pytest.mark.parametrize("error", [
    StallError("no lane has begun an instruction for 1800 s\ncompute  stands at  p.wait(e1)  of forward\nh2d      is at rest"),
    NonFiniteError("the gradients of step 1 are not finite\nnot finite: layers.1\ndumped: there/step-1", 1, 1.0, 1.0,
                   ("layers.1",), Path("there/step-1"))])
def test_the_lines_of_an_error_are_all_shown(config: Path, text: Path, monkeypatch: pytest.MonkeyPatch,
                                             error: Exception) -> None:
    """Where each lane stands, and the folder of a dump, come after the first line."""
    def failed(*_: Any) -> None:
        raise error

    monkeypatch.setitem(OPERATIONS, "reduce", failed)
    result = train(config, text, "--steps", 1)
    assert result.exit_code == 1 and result.stderr == f"megacompile: {error}\n"


@pytest.mark.parametrize("command", typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]
def test_a_remedy_names_options_that_the_command_has(command: str) -> None:
    """For all of its options, of which Python has arguments of the same names; code stays as it is."""
    asked = typer.main.get_command(cli.app).commands[command]  # type: ignore[attr-defined]
    for option in asked.params:
        if option.param_type_name != "option" or option.name == "help":
            continue
        values = {"False": option.secondary_opts, "True": option.opts} if option.is_flag else {"2": [f"{option.opts[0]} 2"]}
        for value, words in values.items():
            given = f"{option.name}={value}"
            code = f", or stream(model, {given}), or other_{given}"
            for told in (f"give {given}", f"one ({given}), or fewer"):
                said = cli._with_options(told + code, asked)
                assert said.endswith(code)
                assert not words or (words[0] in said and given not in said.removesuffix(code)), said


def test_a_fault_keeps_its_traceback(config: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(training, "load_model", broken)
    assert isinstance(train(config, text).exception, ZeroDivisionError)


@pytest.mark.parametrize("arguments", [
    ("train", "absent", "--data", "absent"),
    ("train", "{config}", "--data", "absent"),
    ("train", "{config}", "--data", "{config}", "--steps", "0"),
    ("train", "{config}", "--data", "{config}", "--lr", "-1"),
    ("train", "{config}", "--data", "{config}", "--dtype", "int8"),
    ("train", "{config}"),
    ("inspect", "{config}", "--batch", "0"),
])
def test_wrong_arguments_are_exit_code_2(config: Path, arguments: tuple[str, ...]) -> None:
    result = megacompile_command(*(argument.format(config=config) for argument in arguments))
    assert result.exit_code == 2
    assert result.stderr.startswith("megacompile: ") and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", [
    pytest.param("train", marks=pytest.mark.nightly), "plan", "inspect", "calibrate", "doctor"])  # train has most options
def test_a_number_that_no_option_takes_is_one_sentence(command: str, config: Path, tmp_path: Path) -> None:
    """Every option that takes a number is given NaN, infinity, numbers beyond any count, and numbers below its least."""
    options = {each.name: each for each in typer.main.get_command(cli.app).commands[command].params}  # type: ignore[attr-defined]
    needed = {"train": [config, "--data", config], "plan": [config], "inspect": [config]}.get(command, [])
    tried = 0
    for name, hint in get_type_hints(next(each.callback for each in cli.app.registered_commands
                                          if each.callback.__name__ == command)).items():
        kinds = {float, int} & {hint, *get_args(hint)}
        for value in ("nan", "inf", "-inf", "-1") if float in kinds else (2**70, -2**70) if int in kinds else ():
            option = options[name].opts[0]
            for result in (megacompile_command(command, *needed, f"{option}={value}"),
                           *([with_file(needed, f"{name}: {yaml_of(value)}", tmp_path)] if command == "train" else [])):
                assert result.exit_code == 2, result.output
                assert result.stderr.startswith("megacompile: ") and option in result.stderr, result.output
                assert len(result.stderr.splitlines()) == 1 and isinstance(result.exception, SystemExit), result.output
                tried += 1
    assert tried or command == "doctor"


@pytest.mark.parametrize(("given", "reason"), [
    ("--lr=inf", "give a finite number"), ("--lr=nan", "--lr"), (f"--seed={2**70}", "give a number of at most"),
    ("--seed=-1", "--seed")])
def test_a_wrong_number_is_refused_with_what_to_give(given: str, reason: str) -> None:
    result = megacompile_command("train", "absent", "--data", "absent", given)
    assert result.exit_code == 2 and reason in result.stderr


def with_file(needed: list[Any], text: str, folder: Path) -> Result:
    (folder / "settings.yaml").write_text(text)
    return megacompile_command("train", *needed, "--config", folder / "settings.yaml")


def yaml_of(value: Any) -> Any:
    return {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}.get(value, value)


def test_the_version_is_printed() -> None:
    result = megacompile_command("--version")
    assert (result.exit_code, result.output.strip()) == (0, megacompile.__version__)


def inspect(config: Path, *more: object) -> Result:
    return megacompile_command("inspect", config, "--batch", 4, "--length", 16, "--micro-batch-size", 2,
                               "--checkpoint-interval", 2, "--device", "cpu", *more)


def test_inspect_prints_stages_and_schedule_without_weights(config: Path) -> None:
    result = inspect(config)
    assert result.exit_code == 0, result.output
    assert re.search(r"^# stages: model, micro_batch, partition, .*place, synchronize$", result.output, re.MULTILINE)
    assert "prefetch(" in result.output and "wait(" in result.output


def test_inspect_prints_the_stage_and_section_asked_for(config: Path) -> None:
    result = inspect(config, "--stage", "partition", "--section", "forward", "--no-fold")
    assert result.exit_code == 0, result.output
    assert "forward(" in result.output
    assert "prefetch(" not in result.output and "update(" not in result.output


def test_inspect_prints_the_layers_asked_for(config: Path) -> None:
    result = inspect(config, "--layers", "1:2", "--section", "backward")
    assert result.exit_code == 0, result.output
    assert set(re.findall(r'"model\.layers\.(\d)"', result.output)) == {"1"}


def test_inspect_prints_a_table_or_json(config: Path) -> None:
    table, data = inspect(config, "--format", "table", "--section", "forward"), inspect(config, "--format", "json")
    assert table.exit_code == 0, table.output
    assert re.search(r"^ *# +.*h2d +compute", table.output, re.MULTILINE)
    assert set(json.loads(data.output)["sections"]) >= {"forward", "backward", "update"}


def test_inspect_prints_what_a_pass_changed(config: Path) -> None:
    result = inspect(config, "--diff", "differentiate..prefetch", "--section", "forward")
    assert result.exit_code == 0, result.output
    assert re.search(r"^\+ +w1 = p\.prefetch\(", result.output, re.MULTILINE) and "def backward" not in result.output


def test_inspect_prints_the_log_of_the_passes(config: Path) -> None:
    result = inspect(config, "--log")
    assert result.exit_code == 0, result.output
    assert re.search(r"^4/9 prefetch: \d+ -> \d+ nodes, \+\d+ prefetch", result.output, re.MULTILINE)
    assert re.search(r"^prefetch +\d+", result.output, re.MULTILINE)


def test_inspect_prints_the_graphs_of_a_template_and_its_stages(config: Path) -> None:
    whole, stage, table = (inspect(config, "--template", "decoder", *more) for more in (
        (), ("--stage", "attention"), ("--format", "table")))
    assert whole.exit_code == stage.exit_code == table.exit_code == 0, whole.output
    assert "aten" in whole.output and "prefetch(" not in whole.output
    assert "[B, T, 32]" in whole.output and not re.search(r"\bs\d+\b", whole.output)
    assert "# decoder: attention" in stage.output and "megacompile.attention" in stage.output
    assert re.search(r"placeholder +.*\[B, T, 32\] +float32", table.output)


@pytest.mark.parametrize(("more", "section"), [((), "forward"), (("--update", "arrival"), "backward"),
                                               (("--train-step",), "train_step"),
                                               (("--train-step", "--update", "arrival", "--waves", 2), "train_step")])
def test_inspect_shows_loops_and_whole_steps(config: Path, more: tuple[object, ...], section: str) -> None:
    result = inspect(config, "--format", "json", *more)
    assert result.exit_code == 0, result.output
    sections = json.loads(result.output)["sections"]
    assert section in sections and ("update" in sections) == ("arrival" not in more)


def test_knobs_of_a_plan_shape_the_schedule(config: Path) -> None:
    result = inspect(config, "--format", "json", "--resident", "all", "--saved-layers", 1)
    sections = json.loads(result.output)["sections"]
    ops = {node["op"] for node in sections["forward"]}
    assert "resident" in ops and "forward_saving" in ops and "prefetch" not in ops


def test_inspect_needs_no_gpu_and_says_what_it_planned_for(config: Path) -> None:
    result = megacompile_command("inspect", config, "--batch", 4, "--length", 16)
    assert result.exit_code == 0, result.output
    assert torch.cuda.is_available() or "NVIDIA H200" in result.output.splitlines()[0]


def test_inspect_writes_a_trace_and_draws_a_picture(config: Path, tmp_path: Path) -> None:
    result = inspect(config, "--hardware", "h200", "--trace", tmp_path / "out/step.json",
                     "--picture", tmp_path / "out/step.svg")
    assert (result.exit_code, result.output) == (0, "")
    assert json.loads((tmp_path / "out/step.json").read_text())["traceEvents"]
    assert "<svg" in (tmp_path / "out/step.svg").read_text()


@pytest.mark.parametrize(("more", "message"), [
    (("--stage", "absent"), "unknown stage 'absent': choose one of model, micro_batch, "),
    (("--section", "absent"), "unknown section 'absent': choose one of forward, "),
    (("--template", "absent"), "unknown template 'absent': choose one of prologue, "),
    (("--template", "decoder", "--stage", "absent"), "unknown stage of template decoder 'absent': choose one of captured"),
    (("--template", "decoder", "--stage", "joint", "--format", "json"), "a template's stages exist only as Python: leave out"),
    (("--layers", "2:9"), "'2:9' is not a range of layers: write first:end, from 0 to 3, such as 0:3"),
    (("--diff", "prefetch"), "'prefetch' does not name two stages: write two of model, "),
    (("--hardware", "absent"), "unknown hardware 'absent': give one of a100, "),
    (("--diff", "prefetch..place", "--format", "json"), "--diff and --format cannot be combined: leave one of them out"),
    (("--log", "--stage", "place"), "--log and --stage cannot be combined"),
    (("--template", "decoder", "--layers", "0:1"), "--template and --layers cannot be combined"),
    (("--trace", "step.json", "--section", "update"), "--trace and --section cannot be combined"),
    (("--picture", "step.gif"), "a picture cannot be written as .gif: give a file name that ends in .svg"),
])
def test_what_does_not_exist_is_refused_in_a_line_with_what_does(
        config: Path, more: tuple[str, ...], message: str) -> None:
    result = inspect(config, *more)
    assert result.exit_code == cli.EXIT_ARGUMENT == 2, result.output
    assert result.stderr.startswith(f"megacompile: {message}") and result.stderr.count("\n") == 1


@pytest.mark.parametrize(("name", "asked"), [("gpt2", True), ("owner/name", True), ("absent.json", False), ("a/b/c", False)])
def test_the_hub_is_asked_for_what_may_be_an_id(name: str, asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert ("the Hugging Face Hub returned no config" in megacompile_command("plan", name).stderr) == asked


@pytest.mark.parametrize("command", ["inspect", "plan"])
@pytest.mark.parametrize("name", ["absent", "absent.json", "absent/of/many", "nobody/nothing"])
def test_a_model_that_does_not_exist_is_refused_in_a_line(command: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = megacompile_command(command, name)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"megacompile: model '{name}' was not found") and result.stderr.count("\n") == 1


def test_plan_says_whether_the_host_holds_it(config: Path) -> None:
    plan = ("plan", config, "--batch", 4, "--length", 16, "--hardware", "3090", "--device-memory", "8GiB", "--host-memory")
    refused = megacompile_command(*plan, "1GiB")
    assert refused.exit_code == 1
    assert re.match(r"megacompile: training \w+ takes .* and 1.00 GiB are available: ", refused.stderr)
    result = megacompile_command(*plan, "64GiB")
    assert result.exit_code == 0, result.output
    assert re.search(r"^host: fits, ", result.output, re.MULTILINE) and "of 8.00 GiB" in result.output
    assert re.search(r"^(moments +\S+ +8\.\d\d)$", result.output, re.MULTILINE)


ADAPTED = ("--lora", "--lora-rank", 4, "--lora-targets", "q_proj,v_proj")


@pytest.mark.nightly(held_by=("tests/system/test_cli.py::test_inspect_shows_what_is_frozen_and_an_adapter_s_program",
                              "tests/system/test_cli.py::test_plan_predicts_a_step_on_hardware_that_is_not_there"))
@pytest.mark.parametrize(("more", "said"), [
    pytest.param(ADAPTED, r"parameters, [\d,]+ of them trained", marks=pytest.mark.nightly),
    (("--frozen-layers", 2, "--update", "arrival"), r"updates on arrival of gradients, .* parameters, [\d,]+ of them trained")])
def test_plan_knows_adapters_frozen_layers_and_updates_on_arrival(config: Path, more: tuple[object, ...], said: str) -> None:
    plan = ("plan", config, "--batch", 4, "--length", 16, "--hardware", "4090")
    whole, less = megacompile_command(*plan), megacompile_command(*plan, *more)
    assert less.exit_code == 0, less.output
    assert re.search(said, less.output) and not re.search(said, whole.output)
    moments = [re.search(r"^moments +\S+ +(\S+)$", each.output, re.MULTILINE) for each in (whole, less)]
    assert moments[0] is not None and moments[1] is not None and float(moments[1][1]) < float(moments[0][1])


def test_inspect_shows_what_is_frozen_and_an_adapter_s_program(config: Path) -> None:
    of_a_gpu = ("inspect", config, "--batch", 4, "--length", 16, "--hardware", "4090")  # shares the captures above
    frozen, adapted = (megacompile_command(*of_a_gpu, *more) for more in (("--frozen-layers", 2), ADAPTED))
    assert frozen.exit_code == adapted.exit_code == 0, frozen.output + adapted.output
    assert 'offload("model.layers.2"' in frozen.output and 'offload("model.layers.1"' not in frozen.output
    assert "layers.0.frozen" in adapted.output


@pytest.mark.parametrize(("more", "said"), [
    (("--frozen-layers", 99), "99 layers cannot be frozen: "), (("--lora-rank", 4), "--lora-rank needs --lora: ")])
def test_plan_refuses_what_cannot_be_frozen_or_adapted(config: Path, more: tuple[object, ...], said: str) -> None:
    result = megacompile_command("plan", config, "--hardware", "h200", *more)
    assert result.exit_code == 2 and result.stderr.startswith(f"megacompile: {said}")


@pytest.mark.parametrize("positions", [64, 32768])
def test_plan_and_inspect_take_the_batch_and_length_that_train_takes(
        positions: int, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, _ = Recipe.of(Settings(), Kind.FULL, positions)
    config.write_text(CONFIG.replace('"max_position_embeddings": 64', f'"max_position_embeddings": {positions}'))
    asked: list[tuple[int, int]] = []

    def schedule(model: Any, *, batch: int, length: int, **_: Any) -> Any:
        asked.append((batch, length))
        raise MegacompileError("enough")

    monkeypatch.setattr("megacompile.scheduling.schedule", schedule)
    for command in ("plan", "inspect"):
        assert megacompile_command(command, config).stderr == "megacompile: enough\n"
    assert asked == [(recipe.batch, recipe.length)] * 2 == [(16, min(positions, 2048))] * 2


def test_plan_predicts_a_step_on_hardware_that_is_not_there(config: Path) -> None:
    result = megacompile_command("plan", config, "--batch", 4, "--length", 16, "--hardware", "h200")
    assert result.exit_code == 0, result.output
    assert "rates of NVIDIA H200" in result.output
    assert re.search(r"^->  +1 +4 ", result.output, re.MULTILINE)


@pytest.mark.parametrize("hardware", [pytest.param("h200", marks=pytest.mark.nightly), "rtx4090"])  # with links, and without
def test_plan_says_what_all_gpus_of_a_host_train_together(hardware: str, config: Path) -> None:
    refused = megacompile_command("plan", config, "--batch", 3, "--hardware", hardware, "--gpus", 4)
    assert refused.exit_code == 2 and "--batch 3 has fewer sequences than GPUs (4): give --batch 4 or more" in refused.stderr
    result = megacompile_command("plan", config, "--batch", 15, "--length", 16, "--hardware", hardware, "--gpus", 4)
    assert result.exit_code == 0, result.output
    assert "4 x 16 tokens a step on each of 4 GPUs" in result.output and re.search("^collective ", result.output, re.MULTILINE)
    whole, each = (int(rate.replace(",", "")) for rate in re.findall(
        r"([\d,]+) tokens/s \(([\d,]+) on each of 4 GPUs\), \S+ TFLOPS each", result.output)[0])
    assert abs(whole - 4 * each) <= 4


def test_inspect_shows_the_program_of_several_gpus_which_can_be_verified(config: Path, tmp_path: Path) -> None:
    streamed = ("--resident-state", "none")  # all of so small a model would stay on each device
    shown = megacompile_command("inspect", config, "--batch", 8, "--length", 16, "--gpus", 2, *streamed)
    assert "4 x 16 tokens on each of 2 GPUs" in shown.output and "p.gather(" in shown.output
    (tmp_path / "program.py").write_text(shown.output)
    verified = megacompile_command("verify", tmp_path / "program.py")
    assert verified.exit_code == 0 and re.search(r"^together +holds", verified.output, re.MULTILINE)
    shown = megacompile_command("inspect", config, "--batch", 8, "--length", 16, "--gpus", 2, *streamed, "--format", "json")
    assert json.loads(shown.output)["ranks"] == 2
    alone = megacompile_command("inspect", config, "--batch", 4, "--length", 16)
    assert "GPUs" not in alone.output and "gather" not in alone.output


@pytest.mark.parametrize("command", ["plan", "inspect"])
@pytest.mark.parametrize("gpus", [0, 5000])
def test_a_number_of_gpus_that_no_host_has_is_refused(command: str, gpus: int, config: Path) -> None:
    refused = megacompile_command(command, config, "--gpus", gpus)
    assert refused.exit_code == 2 and "--gpus" in refused.stderr


def test_plan_refuses_a_machine_that_was_not_measured_and_takes_one_that_was(
        config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGACOMPILE_CACHE", str(tmp_path / "cache"))
    plan = ("plan", config, "--batch", 4, "--length", 16, "--device", "cpu")
    refused = megacompile_command(*plan)
    assert refused.exit_code == 1 and "run megacompile calibrate" in refused.stderr
    measured = megacompile_command("calibrate", "--device", "cpu", "--scale", "0.01")
    assert measured.exit_code == 0 and "AdamW" in measured.output
    assert re.search(r"step: \d+\.\d+ s", megacompile_command(*plan).output)


@pytest.mark.parametrize("device", ["tpu", "meta"])
def test_calibrate_measures_no_device_that_nothing_is_streamed_to(device: str) -> None:
    result = megacompile_command("calibrate", "--device", device)
    assert result.exit_code != 0 and f"device must be 'cpu' or 'cuda', not '{device}'" in result.output


@pytest.mark.nightly(held_by="tests/system/test_cli.py::test_plan_refuses_a_machine_that_was_not_measured_and_takes_one_that_was")
def test_rates_that_cannot_be_kept_are_printed_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = megacompile_command("calibrate", "--device", "cpu", "--scale", "0.01", "--output", tmp_path / "file/rates.json")
    assert result.exit_code == 2 and "AdamW" in result.output and "cannot be written" in result.output


@pytest.mark.parametrize("command", [
    ("doctor",), pytest.param(("calibrate", "--device", "cpu", "--scale", "0.01"), marks=pytest.mark.nightly)])
def test_what_takes_long_says_what_is_being_done(command: tuple[str, ...], tmp_path: Path) -> None:
    more = ("--output", tmp_path / "rates.json") if command[0] == "calibrate" else ()
    result = megacompile_command(*command, *more)
    assert result.exit_code == 0, result.output
    said = {"doctor": "checking host memory ...", "calibrate": "measuring attention ..."}[command[0]]
    assert said in result.stderr.splitlines() and "..." not in result.stdout


def test_on_a_terminal_one_line_says_what_is_being_done() -> None:
    terminal = io.StringIO()
    with Progress(Console(file=terminal, force_terminal=True, width=60)) as say:
        for what in ("measuring one", "measuring two"):
            say(what)
            limit = time.monotonic() + 60
            while f"{what} ..." not in terminal.getvalue():
                assert time.monotonic() < limit, f"{what} is not shown"
                time.sleep(0.01)
    written = terminal.getvalue()
    assert written.count("\n") <= 1 and "\x1b[2K" in written, "lines are written over"


@pytest.mark.nightly(held_by=(
    "tests/system/test_cli.py::test_plan_refuses_a_machine_that_was_not_measured_and_takes_one_that_was",
    "tests/system/test_disk_commands.py::test_calibrate_measures_the_drives_of_a_folder"))
def test_calibrate_writes_where_it_is_told(config: Path, tmp_path: Path) -> None:
    megacompile_command("calibrate", "--device", "cpu", "--scale", "0.01", "--output", tmp_path / "mine.json")
    planned = megacompile_command("plan", config, "--batch", 4, "--length", 16, "--hardware", tmp_path / "mine.json")
    assert planned.exit_code == 0, planned.output
    assert "measured with torch" in planned.output


GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "streamed_k1_three_micro_batches.txt"


def test_verify_says_of_each_rule_that_it_holds() -> None:
    result = megacompile_command("verify", GOLDEN)
    assert result.exit_code == 0, result.output
    assert "stage synchronize, sections forward, evaluate, backward" in result.output
    assert len(re.findall(r"^\w+ +holds *$", result.output, re.MULTILINE)) == len(RULES)


def test_what_inspect_prints_into_a_file_or_a_pipe_can_be_verified(config: Path, tmp_path: Path) -> None:
    for stage in ("model", "place", "synchronize"):
        printed = inspect(config, "--stage", stage).stdout
        (tmp_path / "program.txt").write_text(printed)
        from_file = megacompile_command("verify", tmp_path / "program.txt")
        from_pipe = CliRunner().invoke(cli.app, ["verify", "-"], input=printed)
        assert from_file.exit_code == from_pipe.exit_code == 0, from_file.output + from_pipe.output
        assert f"program.txt: stage {stage}" in from_file.output and f"standard input: stage {stage}" in from_pipe.output


def test_a_terminal_and_parts_of_a_program_are_folded(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "alike" not in inspect(config).output
    assert "alike" in inspect(config, "--fold").output and "alike" in inspect(config, "--layers", "0:3").output
    monkeypatch.setattr(cli, "_terminal", lambda: True)
    assert "alike" in inspect(config).output and "alike" not in inspect(config, "--no-fold").output


def test_a_folded_program_is_refused_with_what_to_do(config: Path) -> None:
    result = CliRunner().invoke(cli.app, ["verify", "-"], input=inspect(config, "--fold").stdout)
    assert result.exit_code == 1
    assert re.match(r"megacompile: line \d+, column \d+: the text is folded, for reading only; expected the whole program, as "
                    r"`megacompile inspect --no-fold` or `program.text\(\)` prints it\n", result.stderr)


@pytest.mark.parametrize(("given", "message"), [("", "no program; expected"), ("\0", "not the beginning of a program")])
def test_standard_input_that_is_not_a_program_is_refused(given: str, message: str) -> None:
    result = CliRunner().invoke(cli.app, ["verify", "-"], input=given)
    assert result.exit_code == 1 and message in result.stderr


def test_verify_shows_the_fault_and_fails(tmp_path: Path) -> None:
    broken = tmp_path / "broken.txt"
    broken.write_text(re.sub(r'    p.wait\("compute", e_\d+\).*\n', "", GOLDEN.read_text(), count=1))
    result = megacompile_command("verify", broken)
    assert result.exit_code == 1
    assert re.search(r"^ordered +BROKEN", result.output, re.MULTILINE)
    assert re.search(r"^handed_on +not checked +relies on the rules above", result.output, re.MULTILINE)
    assert "not ordered:  read of WB0 by forward prologue mb 0 is not ordered after write by prefetch prologue" in result.output
    assert "<-- ERROR HERE" in result.output and "<-- conflicts with" in result.output


def test_verify_says_where_a_text_is_malformed_and_what_was_expected(tmp_path: Path) -> None:
    broken = tmp_path / "broken.txt"
    broken.write_text(GOLDEN.read_text().replace('p.wait("compute", ', 'p.wait("gpu", ', 1))
    result = megacompile_command("verify", broken)
    assert result.exit_code == 1
    assert re.match(r"megacompile: line \d+, column 12: unknown lane gpu; expected one of compute, h2d", result.stderr)
    for absent in (tmp_path / "nowhere.txt", tmp_path):
        result = megacompile_command("verify", absent)
        assert result.exit_code == 2 and f"{absent} is not a file: give a file with a program's text" in result.stderr
    broken.write_bytes(b"\xff\xfe\x00")
    assert "the program cannot be read" in megacompile_command("verify", broken).stderr


def test_every_command_ends_its_help_with_examples_of_options_that_it_has() -> None:
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    assert commands.keys() == cli.EXAMPLES.keys()
    for name, examples in cli.EXAMPLES.items():
        for example in examples:
            command, *words = example.split(" | ")[0].split()
            known = {option for parameter in commands[command].params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= known, example
        assert example in " ".join(CliRunner().invoke(cli.app, [name, "--help"]).stdout.split())


def test_a_plan_without_a_gpu_says_which_machine_it_assumes(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assumed, named = (megacompile_command("plan", config, "--batch", 4, "--length", 16, *words).stdout
                      for words in ((), ("--hardware", "h200")))
    first, _, rest = assumed.partition("\n\n")
    assert first == ("This machine has no GPU, so the plan assumes h200, with its usual host: give --hardware and "
                     "--host-memory for another machine")
    assert rest == named
