"""torchrun reads the arguments after the script too: it refuses an option that abbreviates several of its own."""
from __future__ import annotations

import argparse

import endurance
import fsdp
import pytest
import step
import storage
import typer
import uneven
from torch.distributed.run import get_args_parser

from megacompile import cli


def flags(parser: argparse.ArgumentParser) -> set[str]:
    return set(parser._option_string_actions)


def flags_of_train() -> set[str]:
    train = typer.main.get_command(cli.app).commands["train"]  # type: ignore[attr-defined]
    return {flag for each in train.params for flag in (*each.opts, *each.secondary_opts) if flag.startswith("-")}


@pytest.mark.parametrize("given", [
    *(pytest.param(flags(each.options()), id=each.__name__.rpartition(".")[2])
      for each in (endurance, fsdp, step, storage, uneven)),
    pytest.param(flags_of_train(), id="train")])
def test_torchrun_passes_on_every_option_of_what_it_starts(given: set[str]) -> None:
    assert len(given) > 5
    for flag in sorted(given):
        options = get_args_parser().parse_args(["script.py", flag, "value"])
        assert options.training_script_args == [flag, "value"]


def test_torchrun_refuses_an_option_that_abbreviates_two_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        get_args_parser().parse_args(["script.py", "--log", "value"])
    assert "--log" in capsys.readouterr().err
