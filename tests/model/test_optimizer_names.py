"""Optimizers by name: what a name stands for, in `--optim` and in TrainingArguments, and what is refused."""
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import engine
import pytest
import torch
from tiny_models import build, same_bits, state_of
from typer.testing import CliRunner, Result

pytest.importorskip("accelerate")

import trained

import megacompile
from megacompile import SGD, AdamW, Lion, Muon, cli
from megacompile.errors import ArgumentError, MegacompileError
from megacompile.finetuning.reports import read_log
from megacompile.ir.program import argument, find
from megacompile.ir.text import parse
from megacompile.runtime.memory.state_layout import ElementState
from megacompile.runtime.optimizer.state_format import BFLOAT16, EIGHT_BITS, FLOAT32
from megacompile.streaming.optimizer.names import OPTIMIZERS, optimizer_named
from megacompile.trainer import Trainer
from megacompile.verify.updates import UPDATE_OPS

#: name -> class, state_dtype.
MEANT: dict[str, tuple[type, str]] = {
    "adamw": (AdamW, "float32"), "adamw_torch": (AdamW, "float32"), "adamw_torch_fused": (AdamW, "float32"),
    "paged_adamw": (AdamW, "float32"), "paged_adamw_32bit": (AdamW, "float32"), "adamw_bf16": (AdamW, "bfloat16"),
    "adamw_8bit": (AdamW, "8bit"), "adamw_bnb_8bit": (AdamW, "8bit"), "adamw_torch_8bit": (AdamW, "8bit"),
    "paged_adamw_8bit": (AdamW, "8bit"), "lion": (Lion, "float32"), "lion_32bit": (Lion, "float32"),
    "paged_lion_32bit": (Lion, "float32"), "lion_bf16": (Lion, "bfloat16"), "lion_8bit": (Lion, "8bit"),
    "paged_lion_8bit": (Lion, "8bit"), "muon": (Muon, "float32"), "muon_bf16": (Muon, "bfloat16"), "muon_8bit": (Muon, "8bit"),
    "sgd": (SGD, "float32"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_name_stands_for_a_class_and_a_format(name: str) -> None:
    named = optimizer_named(name)
    known = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
    of_this_one = {AdamW: known, Muon: known, Lion: {k: v for k, v in known.items() if k != "eps"},
                   SGD: {"lr": 0.1, "weight_decay": 0.2}}[named.kind]
    assert (named.kind, named.arguments(known)) == (MEANT[name][0], {**of_this_one, "state_dtype": MEANT[name][1]})


def test_all_names_are_known() -> None:
    assert OPTIMIZERS.keys() == MEANT.keys()


@pytest.mark.nightly(held_by=(
    "tests/model/test_optimizer_names.py::test_a_name_stands_for_a_class_and_a_format",
    "tests/model/test_optimizers.py::test_host_memory_has_what_the_format_says"))
@pytest.mark.parametrize(("name", "written", "state"), [
    ("adamw", None, ElementState(("exp_avg", "exp_avg_sq"), FLOAT32, exact=True)),
    ("adamw_8bit", "master=bfloat16", ElementState(("exp_avg", "exp_avg_sq"), EIGHT_BITS, exact=False)),
    ("lion_bf16", "", ElementState(("exp_avg",), BFLOAT16, exact=True, rule="lion")),
    ("muon", "ns_steps=3", ElementState(("momentum_buffer",), FLOAT32, whole=True, separable=False, rule="muon")),
    ("sgd", "state_dtype=8bit, momentum=0.9", ElementState(("momentum_buffer",), EIGHT_BITS, separable=False, rule="sgd"))])
def test_a_name_and_its_options_say_what_is_kept(name: str, written: str | None, state: ElementState) -> None:
    found = megacompile.schedule(build(bf16=True), batch=2, length=8, hardware="h200", optim=name, optim_args=written).tiling
    tile, position = found.position["model.layers.0.mlp.up_proj.weight"]
    assert found.host[tile].state_of(position) == state


@pytest.mark.parametrize(("name", "tile", "rule"), [
    ("adamw", "model.layers.0", None), ("lion", "model.layers.0", "lion"), ("muon", "model.layers.0", "adamw+muon"),
    ("muon", "prologue", None), ("sgd", "prologue", "sgd")])
def test_a_program_names_the_rule_of_each_update(name: str, tile: str, rule: str | None) -> None:
    program = megacompile.schedule(build(bf16=True), batch=2, length=8, hardware="h200", optim=name).program()
    updates = {argument(node, "tile"): argument(node, "rule") for node in find(program.section("update"), *UPDATE_OPS)}
    assert updates[tile] == rule and parse(program.text()) == program


@pytest.mark.parametrize(("name", "nearest"), [
    ("adamw_torch_4bit", "adamw_8bit"), ("adamw_anyprecision", "adamw_bf16"), ("lomo", "adamw_8bit with updates on arrival"),
    ("adalomo", "adamw_8bit with updates on arrival"), ("galore_adamw_8bit_layerwise", "adamw_8bit"),
    ("apollo_adamw", "adamw_8bit")])
def test_an_unknown_name_is_refused_with_what_comes_nearest(name: str, nearest: str) -> None:
    known = re.escape(", ".join(MEANT))
    with pytest.raises(ArgumentError, match=rf"'{name}' is not implemented for streamed models: choose one of {known} "
                                            rf"\({nearest} is the nearest\)$"):
        optimizer_named(name)


@pytest.mark.parametrize("name", ["adafactor", "", "AdamW", "adamw "])
def test_a_name_that_nothing_comes_near_is_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"'{name}' is not implemented .*: choose one of adamw, .*, sgd$"):
        optimizer_named(name)


def test_options_in_text_count_more_than_settings() -> None:
    found = optimizer_named("sgd").arguments({"lr": 0.1, "weight_decay": 0.0, "eps": 1.0},
                                             " momentum=0.9,nesterov = True, weight_decay=1e-2,, master=bfloat16,dampening=0 ")
    assert found == {"lr": 0.1, "weight_decay": 0.01, "momentum": 0.9, "nesterov": True, "dampening": 0.0,
                     "state_dtype": "float32", "master": "bfloat16"}


@pytest.mark.parametrize(("name", "written", "reason"), [
    ("adamw", "momentum=0.9", "'momentum=0.9' is not an option of AdamW: write name=value, with a name of lr, betas, eps, "),
    ("lion", "eps=1e-8", "'eps=1e-8' is not an option of Lion: write name=value, with a name of lr, betas, weight_"),
    ("adamw", "master", "'master' is not an option of AdamW: write name=value"),
    ("adamw", "overlap=backward", "'overlap=backward' is not an option of AdamW"),
    ("sgd", "lr=0.1, momentum=1", "'momentum=1' is out of range: give a number of at least 0 and below 1"),
    ("sgd", "nesterov=yes", "'nesterov=yes' is out of range: give True or False"),
    ("sgd", "nesterov=1", "'nesterov=1' is out of range: give True or False"),
    ("adamw", "eps=tiny", "'eps=tiny' is out of range: give a finite number of at least 0"),
    ("adamw", "weight_decay=nan", "'weight_decay=nan' is out of range: give a finite number of at least 0"),
    ("adamw", "betas=0.9", "'betas=0.9' is out of range: give two numbers of at least 0 and below 1"),
    ("adamw", "master=float16", "'master=float16' is out of range: give one of float32, bfloat16"),
    ("adamw", "state_dtype=4bit", "'state_dtype=4bit' is out of range: give one of float32, bfloat16, 8bit")])
def test_an_option_that_an_optimizer_does_not_have_or_cannot_have_is_refused(name: str, written: str, reason: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(reason)):
        optimizer_named(name).arguments({}, written)


@pytest.mark.nightly(held_by="tests/model/test_optimizers.py::test_a_master_that_is_not_kept_is_for_bf16_weights")
def test_a_schedule_refuses_what_the_optimizer_refuses() -> None:
    refused = r"master='bfloat16' is for bf16 weights, and .* is torch\.float32: leave master out"
    with pytest.raises(MegacompileError, match=refused):
        megacompile.schedule(build(), batch=2, length=8, hardware="h200", optim_args="master=bfloat16")
    model = megacompile.stream(build(), device="cpu")
    with pytest.raises(MegacompileError, match=refused):
        AdamW(model.parameters(), master="bfloat16")
    model.megacompile.close()


# ---------------------------------------------------------------- Trainer

@pytest.mark.nightly(held_by=(
    "tests/model/test_optimizer_names.py::test_a_trainer_makes_an_optimizer_of_a_class_and_its_options",
    "tests/model/test_optimizer_names.py::test_a_name_stands_for_a_class_and_a_format",
    "tests/model/test_optimizer_names.py::test_a_name_in_optim_args_is_the_only_one_and_is_known"))
@pytest.mark.parametrize(("optim", "optim_args", "make"), [
    ("adamw_8bit", None, lambda groups: AdamW(groups, lr=2e-2, state_dtype="8bit")),
    ("adamw_torch", "state_dtype=bfloat16, master=bfloat16",
     lambda groups: AdamW(groups, lr=2e-2, state_dtype="bfloat16", master="bfloat16")),
    ("lion_32bit", None, lambda groups: Lion(groups, lr=2e-2, betas=(0.9, 0.999))),
    ("sgd", "momentum=0.9", lambda groups: SGD(groups, lr=2e-2, momentum=0.9)),
    (None, "optimizer=muon_bf16, ns_steps=3", lambda groups: Muon(groups, lr=2e-2, state_dtype="bfloat16", ns_steps=3)),
    (None, "master=bfloat16,optimizer = adamw_bf16",
     lambda groups: AdamW(groups, lr=2e-2, state_dtype="bfloat16", master="bfloat16"))],
    ids=["8-bit", "bfloat16", "lion", "sgd", "muon in optim_args", "adamw in optim_args"])
def test_a_trainer_s_optimizer_is_the_one_made_by_hand(
        optim: str | None, optim_args: str | None, make: Any, tmp_path: Path) -> None:
    found, groups = [], []
    for by_name in (True, False):
        model = megacompile.stream(build(bf16=True), device="cpu")
        given: dict[str, Any] = {}
        if not by_name:
            parameters = dict(model.named_parameters())
            given["optimizers"] = make([{**options, "params": [parameters[name] for name in names]}
                                        for options, names in groups]), None
        made = trained.run(Trainer, tmp_path, model, given=given, bf16=True,
                           **({"optim_args": optim_args} | ({"optim": optim} if optim else {}) if by_name else {}))
        optimizer = made.optimizer.optimizer
        groups = [({"weight_decay": options["weight_decay"]}, names) for options, names in optimizer.named_groups()]
        found.append((type(optimizer), optimizer.max_grad_norm, state_of(model, optimizer)))
        model.megacompile.close()
    assert found[0][:2] == found[1][:2] and found[0][1] == trained.ARGUMENTS["max_grad_norm"]
    assert same_bits(found[0][2], found[1][2])
    assert not torch.equal(found[0][2]["lm_head.weight"], build(bf16=True).lm_head.weight), "nothing was trained"


def test_a_trainer_s_optimizer_has_no_unknown_options(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"'momentum=.*' is not an option of AdamW"):
        Trainer(model=model, args=trained.arguments(tmp_path, optim_args="momentum=0.9"))


@pytest.mark.parametrize(("options", "reason"), [
    (dict(optim="lion_8bit", optim_args="optimizer=muon"),
     r"optim='lion_8bit' and optimizer=muon in optim_args name two optimizers: leave one of them out"),
    (dict(optim_args="optimizer=adafactor"), "'adafactor' is not implemented for streamed models: choose one of adamw, "),
    (dict(optim_args="optimizer=muon, optimizer=lion"), "'optimizer=lion' is not an option of Muon"),
    (dict(optim_args="optimizer=lion, eps=1e-8"), "'eps=1e-8' is not an option of Lion")])
def test_a_name_in_optim_args_is_the_only_one_and_is_known(
        model: Any, options: dict[str, str], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=reason):
        Trainer(model=model, args=trained.arguments(tmp_path, **options))


def test_a_name_may_be_given_twice_if_it_is_the_same(model: Any, tmp_path: Path) -> None:
    args = trained.arguments(tmp_path, optim="lion_8bit", optim_args="optimizer=lion_8bit")
    assert Trainer.get_optimizer_cls_and_kwargs(args)[0] is Lion


def test_a_trainer_makes_an_optimizer_of_a_class_and_its_options(model: Any, tmp_path: Path) -> None:
    before = model.get_parameter("model.layers.0.mlp.up_proj.weight").clone()
    made = trained.run(Trainer, tmp_path, model, given={"optimizer_cls_and_kwargs": (Muon, dict(lr=2e-2))})
    assert type(made.optimizer.optimizer) is Muon
    assert any(layout.has_matrices for layout in engine.layouts(model).values())
    losses = trained.curve(made, "loss")
    assert losses[-1] < losses[0]
    assert not torch.equal(model.get_parameter("model.layers.0.mlp.up_proj.weight"), before)


# ---------------------------------------------------------------- megacompile train

FLAGS = ("--length", 16, "--batch", 4, "--device", "cpu", "--log-interval", 1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer, whose tokens are bytes; beside it a text."""
    folder = tmp_path_factory.mktemp("model")
    build(bf16=True, vocab_size=256).save_pretrained(folder)
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return folder


def train(source: Path, *arguments: object) -> Result:
    given = ("train", source, "--data", source / "text.txt", *FLAGS, *arguments)
    return CliRunner().invoke(cli.app, [str(each) for each in given])


def losses(output: Path) -> list[float]:
    return [entry["loss"] for entry in read_log(output / "log.jsonl") if "loss" in entry]


def formats(output: Path, step: int) -> set[str]:
    """The formats of the moments in the checkpoint of a step."""
    (path,) = output.glob(f"checkpoints/*-step-{step}/manifest.json")
    return {saved.get("format", "float32") for saved in json.loads(path.read_text())["tensors"].values() if saved["trained"]}


@pytest.mark.nightly(held_by=(
    "tests/model/test_optimizers.py::test_a_resumed_run_has_the_bits_of_an_uninterrupted_one",
    "tests/model/test_optimizer_names.py::test_a_run_of_a_version_with_one_optimizer_goes_on_with_adamw_alone",
    "tests/model/test_optimizer_names.py::test_an_optimizer_in_a_file_has_either_name"))
def test_a_run_with_a_named_optimizer_goes_on_to_the_bit_and_with_no_other_one(source: Path, tmp_path: Path) -> None:
    optim = ("--optim", "adamw_8bit", "--optim-args", "master=bfloat16", "--lr", "1e-2", "--decay", "constant")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    result = train(source, *optim, "--steps", 4, "--output", whole)
    assert result.exit_code == 0, result.output
    assert "AdamW, state_dtype 8bit, master bfloat16" in result.output
    assert train(source, *optim, "--steps", 2, "--output", parts).exit_code == 0
    assert formats(parts, 2) == {"8bit"}
    for other, now in ((("--optim", "adamw"), "AdamW, state_dtype float32"), ((), "AdamW, state_dtype float32"),
                       (("--optim", "adamw_8bit"), "AdamW, state_dtype 8bit"),
                       (("--optim", "lion_8bit"), "Lion, state_dtype 8bit")):
        refused = train(source, *other, *optim[4:], "--steps", 4, "--output", parts, "--resume", "latest")
        assert refused.exit_code == 1 and "initial" not in refused.output
        assert re.search(rf"other settings: optim \(was AdamW, state_dtype 8bit, master bfloat16, now {now}\);",
                         " ".join(refused.stderr.split()))
    assert train(source, "--config", parts / "settings.yaml", "--steps", 4, "--resume", "latest").exit_code == 0
    assert losses(parts) == losses(whole) and len(losses(whole)) == 4
    assert (parts / "model" / "model.safetensors").read_bytes() == (whole / "model" / "model.safetensors").read_bytes()


def test_a_run_of_a_version_with_one_optimizer_goes_on_with_adamw_alone() -> None:
    from megacompile.finetuning import saves

    saves.check_same_run(Path("run"), {"seed": 0}, {"seed": 0, "optim": "AdamW, state_dtype float32"})
    with pytest.raises(MegacompileError, match=r"optim \(was AdamW, state_dtype float32, now Lion, state_dtype float32\)"):
        saves.check_same_run(Path("run"), {"seed": 0}, {"seed": 0, "optim": "Lion, state_dtype float32"})


@pytest.mark.parametrize("optim", ["lion", "lion_8bit", "sgd"])
def test_an_optimizer_with_other_rates_than_adamw_s_needs_one(source: Path, optim: str) -> None:
    refused = train(source, "--optim", optim, "--steps", 1)
    assert refused.exit_code == 2 and "step 1/1" not in refused.output
    assert f"--optim {optim} has no default learning rate: give --lr" in (
        " ".join(refused.stderr.split()))


@pytest.mark.nightly(held_by=(
    "tests/model/test_optimizer_names.py::test_an_optimizer_with_other_rates_than_adamw_s_needs_one",
    "tests/model/test_optimizer_names.py::test_an_optimizer_in_a_file_has_either_name"))
@pytest.mark.parametrize("optim", ["lion", "lion_8bit", "sgd"])
def test_an_optimizer_with_other_rates_than_adamw_s_trains_with_one(source: Path, optim: str) -> None:
    assert train(source, "--optim", optim, "--lr", "1e-4", "--steps", 1).exit_code == 0


@pytest.mark.parametrize(("arguments", "reason"), [
    (("--optim", "adafactor"), "the optimizer 'adafactor' is not implemented for streamed models: choose one of adamw, "),
    (("--optim-args", "momentum=0.9"), "'momentum=0.9' is not an option of AdamW: write name=value")])
def test_an_optimizer_that_there_is_not_is_refused_before_weights_are_read(
        source: Path, arguments: tuple[str, ...], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megacompile, "from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    refused = train(source, *arguments, "--steps", 1)
    assert refused.exit_code == 2 and reason in " ".join(refused.stderr.split())


def test_an_optimizer_in_a_file_has_either_name(source: Path, tmp_path: Path) -> None:
    for key in ("optim", "optimizer"):
        (tmp_path / "run.yaml").write_text(f"{key}: adamw_bnb_8bit\noptim_args: weight_decay=0.1\n")
        result = train(source, "--config", tmp_path / "run.yaml", "--steps", 1)
        assert result.exit_code == 0, result.output
        assert "AdamW, state_dtype 8bit, weight_decay 0.1" in result.output


def test_torch_optimizers_have_the_same_names_for_what_is_kept() -> None:
    """States of `torch.optim` load, since moments are named as there."""
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    for kind, options in ((AdamW, {}), (SGD, {"momentum": 0.9})):
        theirs = getattr(torch.optim, kind.__name__)([parameter], lr=0.1, **options)
        theirs.step()
        assert theirs.state[parameter].keys() - {"step"} == {moment.name for moment in kind.rule.moments}
