"""The command line: `megacompile train`, `inspect`, `verify`, `plan`, `calibrate`, `doctor` and `bench`.

Exit codes: 0 done; 1 refused, the reason on stderr; 2 wrong arguments; 130 stopped by Ctrl-C, 143 by SIGTERM (and saved,
if asked).

What a command needs to run it imports itself: torch takes seconds, which --help need not.
"""
from __future__ import annotations

import enum
import functools
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from megacompile.errors import ArgumentError, MegacompileError
from megacompile.finetuning.refused import spelled
from megacompile.finetuning.settings import Settings, read_defaults
from megacompile.limits import check_number
from megacompile.tools.lora import Lora
from megacompile.tools.options import Device, Knobs, Model, Planning, with_options
from megacompile.version import __version__

EXIT_FAILED = 1
EXIT_ARGUMENT = 2
EXIT_INTERRUPTED = 130


class _Commands(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """With the options of a command as people spell them: --max_length is --max-length. Raises `ArgumentError` for options
        that other trainers have."""
        return super().resolve_command(ctx, [args[0], *spelled(args[1:])])

    def invoke(self, ctx: Any) -> Any:
        """Ends on an error of ours with its message alone, all lines of it: where each lane stood, or a dump's folder, come
        after the first. Ctrl-C ends on one line too, outside of a training loop, which handles it itself. Any other exception
        is a fault and keeps its traceback."""
        try:
            return super().invoke(ctx)
        except ArgumentError as error:
            message, code = str(error), EXIT_ARGUMENT
        except typer.BadParameter as error:
            path = error.ctx.command_path if error.ctx is not None else "megacompile"
            message, code = f"{error.format_message().rstrip('.')}: see {path} --help", EXIT_ARGUMENT
        except MegacompileError as error:
            message, code = str(error), EXIT_FAILED
        except KeyboardInterrupt:
            message, code = "stopped by Ctrl-C", EXIT_INTERRUPTED
        print(f"megacompile: {message}", file=sys.stderr)
        raise typer.Exit(code)


class _Command(TyperCommand):
    def invoke(self, ctx: Any) -> Any:
        """Raises `ArgumentError` for a number that no option takes, on the command line or in a file."""
        for parameter in self.params:
            given = ctx.params.get(parameter.name)
            for value in given if isinstance(given, list | tuple) else (given,):
                check_number(parameter.opts[0], value)
        return super().invoke(ctx)


app = typer.Typer(cls=_Commands, help="Train decoder models whose weights live in host memory.", no_args_is_help=True,
                  add_completion=False, pretty_exceptions_enable=False)


_command = functools.partial(app.command, cls=_Command)


def _terminal() -> bool:
    """Whether a person reads what is printed, and no program does."""
    return sys.stdout.isatty()


class Form(enum.StrEnum):
    PYTHON = "python"
    TABLE = "table"
    JSON = "json"


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if show:
        print(__version__)
        raise typer.Exit


@_command()
@with_options
def train(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model directory, a config (directory or JSON file: random "
                                                               "weights), or an id of the Hugging Face hub.")],
    data: Annotated[list[str], typer.Option(
        "--data", "--dataset", "--dataset-name", help="A text file, a file of rows (.jsonl, .json, .csv, .parquet), a folder "
                                                      "of these, or a Hugging Face data set. Repeat for more.")],
    settings: Settings,
    lora: Lora,
    knobs: Knobs,
    config: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, is_eager=True, callback=read_defaults,
                                                help="A YAML file with these options. Flags override it.")] = None,
) -> None:
    """Train a model on texts or on conversations, streamed from host memory.

    Columns tell the format of rows: Alpaca (instruction, input, output), ShareGPT (conversations), messages, or text.
    Conversations go through the tokenizer's chat template, and the loss counts what the assistant says. Texts are packed into
    sequences of --length tokens. Ctrl-C or SIGTERM finishes the step, saves and stops; --resume latest continues.
    """
    from rich.console import Console

    from megacompile.finetuning.run import run
    code = run(model, data, settings, lora, knobs, Console(markup=False, highlight=False, soft_wrap=True))
    if code:
        raise typer.Exit(code)


@_command()
@with_options
def inspect(
    model: Model,
    planning: Planning,
    lora: Lora,
    knobs: Knobs,
    stage: Annotated[str | None, typer.Option(help="Show the program after this pass. Default: after the last one.")] = None,
    section: Annotated[str | None, typer.Option(help="Show only this section, such as forward, backward or update.")] = None,
    layers: Annotated[str | None, typer.Option(metavar="FIRST:END", help="Show only instructions of these layers, "
                                                                         "counted from 0.")] = None,
    diff: Annotated[str | None, typer.Option(metavar="STAGE..STAGE", help="Show the difference between two "
                                                                          "stages.")] = None,
    form: Annotated[Form, typer.Option(help="Output format.")] = Form.PYTHON,
    fold: Annotated[bool | None, typer.Option(
        "--fold/--no-fold", help="Fold lines that repeat for each layer. Default: a whole program is folded on a terminal "
                                 "only, so that verify can read files and pipes.")] = None,
    template: Annotated[str | None, typer.Option(help="Show the graphs of this template instead. With --stage: after that "
                                                      "pass.")] = None,
    log: Annotated[bool, typer.Option("--log", help="Show op counts before and after each pass instead.")] = False,
    trace: Annotated[Path | None, typer.Option(dir_okay=False, help="Simulate some steps and write a Perfetto trace (JSON) "
                                                                    "here. Prints nothing.")] = None,
    picture: Annotated[Path | None, typer.Option(dir_okay=False, help="Simulate a step and draw it here (.svg or .png). "
                                                                      "Prints nothing.")] = None,
) -> None:
    """Show what a model compiles to: stages, schedule, templates, timelines. Loads no weights and needs no GPU."""
    from megacompile import inspection, timeline
    from megacompile import picture as pictures
    inspection.check_options([name for name, value in {
        "--trace": trace, "--picture": picture, "--log": log, "--template": template, "--diff": diff, "--stage": stage,
        "--section": section, "--layers": layers, "--form": form is not Form.PYTHON}.items() if value])
    if picture is not None:
        pictures.check(picture)
    if fold is None:
        fold = _terminal() or any((section, layers, diff))
    compiled = planning.schedule(model, knobs, lora)
    stages = compiled.stages
    if trace is not None or picture is not None:
        simulated = {"simulated": compiled.simulate()}
        if trace is not None:
            timeline.save_trace(simulated, trace)
        if picture is not None:
            pictures.save(simulated, picture, title=compiled.title())
    elif log:
        print(inspection.pass_log(compiled.log, stages))
    elif template is not None:
        chosen = inspection.choose(compiled.templates, template, "template")
        print(inspection.template(chosen, stage, form.value, compiled.plan.token_chunk))
    else:
        last = compiled.program()
        among = inspection.layer_range(layers, last) if layers is not None else None
        if diff is not None:
            print(inspection.difference(*inspection.stage_range(diff, stages), section, among, fold))
            return
        program = inspection.choose(stages, stage, "stage") if stage is not None else last
        shown = inspection.select(program, section, among)
        if form is Form.PYTHON:
            print(f"# {compiled.title()}\n# stages: {', '.join(stages)}\n# templates: {', '.join(compiled.templates)}")
        print(inspection.render(program, shown, form.value, fold))


@_command()
def verify(
    program_file: Annotated[Path, typer.Argument(metavar="PROGRAM_FILE",
                                                 help="A program as text, from inspect or edited. - reads standard input.")],
) -> None:
    """Prove a program safe, or show where it is not: exit code 0 or 1. Runs nothing, and needs no model."""
    from tabulate import tabulate

    from megacompile.ir.text import parse
    from megacompile.system.reading import source_text
    from megacompile.verify.verifier import judge
    piped = str(program_file) == "-"
    named = "standard input" if piped else program_file
    if not piped and (not program_file.exists() or program_file.is_dir()):
        raise ArgumentError(f"there is no file {program_file}: give a program's text, or - for standard input")
    program = parse(source_text(sys.stdin if piped else program_file))
    verdicts, error = judge(program)
    words = {True: "holds", False: "BROKEN", None: "not asked"}
    print(f"{named}: stage {program.stage}, sections {', '.join(program.sections) or 'none'}\n")
    print(tabulate([(v.rule, words[v.holds], v.why) for v in verdicts], ["rule", "", ""], tablefmt="simple"))
    if error is not None:
        print(f"\n{error}")
        raise typer.Exit(EXIT_FAILED)


@_command()
@with_options
def plan(
    model: Model,
    planning: Planning,
    lora: Lora,
    knobs: Knobs,
) -> None:
    """Predict whether a model fits, how fast a step is, and what limits it, for the chosen plan and its alternatives.

    Loads no weights, trains nothing, and needs no GPU to plan for one. Exit code 1 if the model does not fit.
    """
    found = planning.schedule(model, knobs, lora).outlook()
    print(found.text())
    if not found.fits:
        raise typer.Exit(EXIT_FAILED)


@_command()
def calibrate(
    device: Device = None,
    output: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the rates here instead, to plan for this "
                                                                     "machine on another one.")] = None,
    scale: Annotated[float, typer.Option(min=0.01, max=1000.0, help="Measuring time, as a multiple of the default.")] = 1.0,
) -> None:
    """Measure this machine's rates, once, for plan.

    Takes a minute or two. Run nothing else meanwhile: it would spoil the measurement."""
    from megacompile.predict.hardware import cache_path
    from megacompile.system.progress import Progress
    from megacompile.tools.calibrate import measure
    with Progress() as say:
        found = measure(device, scale, say)
    path = output or cache_path(device)
    print(found.table())
    found.save(path)
    print(f"saved in {path}")


@_command()
def doctor() -> None:
    """Check what this machine has for training, and say how to fix what is missing. Exit code 1 if training cannot work."""
    from megacompile.system.progress import Progress
    from megacompile.tools.doctor import devices, examine, report
    with Progress() as say:
        findings = examine(say)
    print(report(findings))
    if not devices(findings):
        raise typer.Exit(EXIT_FAILED)


@_command()
def bench(
    name: Annotated[str, typer.Argument(metavar="TABLE", help="gates, depth, ablation, budgets, batch, context, kinds, width, "
                                                              "rows, large or whole.")],
    output: Annotated[Path, typer.Option(dir_okay=False, help="File of rows. New rows are added to it.")] = Path("bench.jsonl"),
    shape: Annotated[str | None, typer.Option(help="Shape of the model for rows that name none, such as tiny.")] = None,
    limit_minutes: Annotated[float | None, typer.Option(min=0.0, help="Time limit. The same command continues later. "
                                                                      "0: only print the existing rows.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Measure failed rows again.")] = False,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Draw the table here (SVG).")] = None,
) -> None:
    """Measure the rows of a table that a file does not have yet, and print the table."""
    from megacompile import inspection
    from megacompile import picture as pictures
    from megacompile.bench import plots, rows
    from megacompile.bench.run import run
    from megacompile.bench.shapes import SHAPES
    from megacompile.bench.table import markdown
    from megacompile.bench.tables import TABLES
    if plot is not None:
        pictures.check_matplotlib()
    if shape is not None:
        inspection.choose(SHAPES, shape, "shape")
    table = inspection.choose(TABLES, name, "table").of_shape(shape)
    try:
        run(table, output, limit_s=None if limit_minutes is None else 60 * limit_minutes, retry=retry)
    except KeyboardInterrupt:
        print(f"stopped by Ctrl-C: the rows that are done are in {output}", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    print(markdown(table, rows.read(output)))
    if plot is not None:
        plots.draw(table, rows.read(output), plot)


if __name__ == "__main__":
    app(prog_name="megacompile")
