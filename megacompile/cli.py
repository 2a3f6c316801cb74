"""The command line: `megacompile train`, `inspect`, `verify`, `plan`, `calibrate`, `doctor`, `generate`, `chat`, `evaluate`,
`merge` and `export`.

Exit codes: 0 success; 1 failure, with the reason on stderr; 2 wrong arguments; 130 stopped by Ctrl-C, 143 by SIGTERM (after
saving, if --output was given).

Each command imports what it needs when it runs, so that --help does not wait seconds for torch.
"""
from __future__ import annotations

import enum
import re
import sys
from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from megacompile.errors import ArgumentError, MegacompileError
from megacompile.finetuning.settings import DATA_PANEL, REFUSED, Settings, read_defaults, with_hyphens
from megacompile.inference import commands
from megacompile.sizes import check_number
from megacompile.tools.options import DEFAULT_HARDWARE, Device, Knobs, Lora, Model, Planning, with_options
from megacompile.version import __version__

EXIT_FAILED = 1
EXIT_ARGUMENT = 2
EXIT_INTERRUPTED = 130

_SHOW_PANEL = "What to show"
F = TypeVar("F", bound=Callable[..., Any])


class _Commands(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Accepts underscores in options: --max_length means --max-length. Raises `ArgumentError` for options of other trainers
        that `train` does not have."""
        command = self.get_command(ctx, args[0])
        known = {option for parameter in command.params for option in parameter.opts} if command is not None else ()
        refused = REFUSED if args[0] == "train" else {}
        return super().resolve_command(ctx, [args[0], *with_hyphens(args[1:], known, refused)])

    def invoke(self, ctx: Any) -> Any:
        """Prints errors of megacompile without a traceback, but with all lines of the message: details, such as what each lane
        was doing, follow the first line. Ctrl-C also prints one line; the training loop handles it itself. Any other exception
        is a bug and keeps its traceback."""
        try:
            return super().invoke(ctx)
        except ArgumentError as error:
            message, code = _with_options(str(error), self.get_command(ctx, ctx.invoked_subcommand or "")), EXIT_ARGUMENT
        except typer.BadParameter as error:
            path = error.ctx.command_path if error.ctx is not None else "megacompile"
            message, code = f"{error.format_message().rstrip('.')}: see {path} --help", EXIT_ARGUMENT
        except MegacompileError as error:
            message, code = _with_options(str(error), self.get_command(ctx, ctx.invoked_subcommand or "")), EXIT_FAILED
        except KeyboardInterrupt:
            message, code = "stopped by Ctrl-C", EXIT_INTERRUPTED
        print(f"megacompile: {message}", file=sys.stderr)
        raise typer.Exit(code)


#: A call in Python, which stays as it is, or an argument by its name with its value.
_PYTHON = re.compile(r"""[\w.]+\([^()]*\)|\b(?P<name>[a-z_]\w*)=(?P<quote>['"]?)(?P<value>[^\s'",;()]+)(?P=quote)""")


def _with_options(message: str, command: Any) -> str:
    """A message with the options of the command in place of the arguments of the same names in Python: `waves=2` becomes
    `--waves 2`, and `strict=False` becomes `--no-strict`."""
    options = {each.name: each for each in command.params} if command is not None else {}

    def option(found: re.Match[str]) -> str:
        known, value = options.get(found["name"]), found["value"]
        if known is None or known.param_type_name != "option":
            return found[0]
        if not known.is_flag:
            return f"{known.opts[0]} {value.removeprefix('torch.')}"
        words = known.secondary_opts if value == "False" else known.opts
        return words[0] if words else found[0]

    return _PYTHON.sub(option, message)


class _Command(TyperCommand):
    def invoke(self, ctx: Any) -> Any:
        """Raises `ArgumentError` if the command line or a file has a number that no option accepts, such as nan."""
        for parameter in self.params:
            given = ctx.params.get(parameter.name)
            for value in given if isinstance(given, list | tuple) else (given,):
                check_number(parameter.opts[0], value)
        return super().invoke(ctx)


app = typer.Typer(cls=_Commands, help="Train language models whose weights stay in host memory.", no_args_is_help=True,
                  add_completion=False, pretty_exceptions_enable=False)


#: Command -> what people type, at the end of its --help.
EXAMPLES = {
    "train": ("train Qwen/Qwen3-0.6B --data rows.jsonl --output runs/one",
              "train Qwen/Qwen3-8B --data rows.jsonl --output runs/two --lora --quantize nf4",
              "train Qwen/Qwen3-8B --task dpo --data pairs.jsonl --output runs/three --lora",
              "train --config runs/one/settings.yaml --resume latest"),
    "inspect": ("inspect Qwen/Qwen3-8B --section forward", "inspect Qwen/Qwen3-8B --hardware h200 --html step.html"),
    "verify": ("verify edited.py", "inspect Qwen/Qwen3-8B | megacompile verify -"),
    "plan": ("plan Qwen/Qwen3-8B", "plan Qwen/Qwen3-32B --batch 64 --length 1024 --hardware rtx4090 --host-memory 128GiB",
             "plan openai/gpt-oss-120b --lora --quantize nf4 --hardware h200"),
    "calibrate": ("calibrate", "calibrate --disk /mnt/nvme --output this-machine.json"),
    "doctor": ("doctor",), "chat": ("chat runs/one/model",),
    "generate": ("generate runs/one/model --prompts questions.jsonl --output answers.jsonl",),
    "evaluate": ("evaluate runs/one/model --data held-out.jsonl",),
    "merge": ("merge runs/two --output runs/two/merged",),
    "export": ("export runs/one --gguf one.gguf --type q8_0",),
}


def _command() -> Callable[[F], F]:
    """Adds a function to the commands. Its docstring is the help text, with each paragraph on one line for typer to wrap."""
    def register(function: F) -> F:
        paragraphs = cleandoc(function.__doc__ or "").split("\n\n")
        examples = [f"megacompile {each}" for each in EXAMPLES[function.__name__]]
        return app.command(cls=_Command, help="\n\n".join(" ".join(each.split()) for each in paragraphs),
                           epilog="\n\n".join(["Examples:", *examples]))(function)
    return register


def _terminal() -> bool:
    """True if the output goes to a terminal."""
    return sys.stdout.isatty()


class OutputFormat(enum.StrEnum):
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
    model: Annotated[str, typer.Argument(
        metavar="MODEL", help="A model directory, a model id on the Hugging Face Hub, or a config (directory or JSON file) to "
                              "start from random weights.")],
    data: Annotated[list[str], typer.Option(
        "--data", "--dataset", "--dataset-name", rich_help_panel=DATA_PANEL,
        help="A text file, a file of rows (.jsonl, .json, .csv, .tsv, .parquet), a folder of such files, or a data set id on "
             "the Hugging Face Hub. Repeat for more.")],
    settings: Settings,
    lora: Lora,
    knobs: Knobs,
    config: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, is_eager=True, callback=read_defaults,
                                                help="YAML file with options. The command line overrides it.")] = None,
    gpus: Annotated[int, typer.Option(
        "--gpus", min=1, max=4096, help="Number of GPUs of this host that train one copy of the model. Each takes its share of "
                                        "the sequences of a step.")] = 1,
) -> None:
    """Train a model on texts or conversations, with weights streamed from host memory.

    The columns of the rows determine their format: Alpaca (instruction, input, output), ShareGPT (conversations), messages, or
    text. Conversations are formatted by the tokenizer's chat template, and only the assistant's tokens count for the loss.
    Texts are packed into sequences of --length tokens. --task learns from pairs of answers, or from verdicts. Ctrl-C or SIGTERM
    finishes the current step, saves and stops; --resume latest continues.
    """
    from rich.console import Console

    from megacompile.finetuning.launch import check_gpus, launch
    from megacompile.finetuning.train_command import run
    from megacompile.planning.device import process_count
    if gpus > 1 and process_count() == 1:
        check_gpus(gpus, knobs.device)
        raise typer.Exit(launch(sys.argv[1:], gpus))
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
    stage: Annotated[str | None, typer.Option(
        rich_help_panel=_SHOW_PANEL, help="Show the program after this pass.", show_default="the last pass")] = None,
    section: Annotated[str | None, typer.Option(
        rich_help_panel=_SHOW_PANEL, help="Show only this section, such as forward, backward or update.",
        show_default="all")] = None,
    layers: Annotated[str | None, typer.Option(
        rich_help_panel=_SHOW_PANEL, metavar="FIRST:END",
        help="Show only the instructions of these layers, counted from 0, END excluded.", show_default="all")] = None,
    diff: Annotated[str | None, typer.Option(
        rich_help_panel=_SHOW_PANEL, metavar="STAGE..STAGE", help="Show the difference between two stages.")] = None,
    output_format: Annotated[OutputFormat, typer.Option(
        "--format", "--form", rich_help_panel=_SHOW_PANEL, help="Output format.")] = OutputFormat.PYTHON,
    fold: Annotated[bool | None, typer.Option(
        "--fold/--no-fold", rich_help_panel=_SHOW_PANEL,
        help="Show lines that repeat for each layer only once. verify cannot read folded programs.",
        show_default="a whole program is folded only on a terminal")] = None,
    template: Annotated[str | None, typer.Option(
        rich_help_panel=_SHOW_PANEL,
        help="Show the graphs of this template instead of the program. With --stage: after that pass.")] = None,
    log: Annotated[bool, typer.Option(
        "--log", rich_help_panel=_SHOW_PANEL,
        help="Show what each pass did, and the op counts before and after it, instead of the program.")] = False,
    trace: Annotated[Path | None, typer.Option(
        dir_okay=False, rich_help_panel=_SHOW_PANEL,
        help="Simulate some steps, write a Perfetto trace (JSON) to this file, and print nothing.")] = None,
    picture: Annotated[Path | None, typer.Option(
        dir_okay=False, rich_help_panel=_SHOW_PANEL,
        help="Simulate a step, draw it to this file (.svg, .png or .pdf), and print nothing.")] = None,
    html: Annotated[Path | None, typer.Option(
        dir_okay=False, rich_help_panel=_SHOW_PANEL,
        help="Simulate a step, write it to this file as a page for a browser, with zoom and the program, and print nothing.")
    ] = None,
) -> None:
    """Show what a model compiles to: stages, schedule, templates, timelines. Loads no weights and needs no GPU."""
    from megacompile import inspection, step_page, timeline
    from megacompile import picture as pictures
    inspection.check_options([name for name, value in {
        "--trace": trace, "--picture": picture, "--html": html, "--log": log, "--template": template, "--diff": diff,
        "--stage": stage, "--section": section, "--layers": layers,
        "--format": output_format is not OutputFormat.PYTHON}.items() if value])
    if picture is not None:
        pictures.check(picture)
    if fold is None:
        fold = _terminal() or any((section, layers, diff))
    compiled = planning.schedule(model, knobs, lora)
    stages = compiled.stages
    if trace is not None or picture is not None or html is not None:
        simulated = {"simulated": compiled.simulate()}
        if trace is not None:
            timeline.save_trace(simulated, trace)
        if picture is not None:
            pictures.save(simulated, picture, title=compiled.title())
        if html is not None:
            step_page.save(simulated, html, compiled)
    elif log:
        print(inspection.pass_log(compiled.log, stages))
    elif template is not None:
        chosen = inspection.choose(compiled.templates, template, "template")
        print(inspection.template(chosen, stage, output_format.value, compiled.plan.token_chunk))
    else:
        last = compiled.program()
        among = inspection.layer_range(layers, last) if layers is not None else None
        if diff is not None:
            print(inspection.difference(*inspection.stage_range(diff, stages), section, among, fold))
            return
        program = inspection.choose(stages, stage, "stage") if stage is not None else last
        shown = inspection.select(program, section, among)
        if output_format is OutputFormat.PYTHON:
            print(f"# {compiled.title()}\n# stages: {', '.join(stages)}\n# templates: {', '.join(compiled.templates)}")
        print(inspection.render(program, shown, output_format.value, fold))


@_command()
def verify(
    program_file: Annotated[Path, typer.Argument(metavar="PROGRAM_FILE",
                                                 help="A program as text, from inspect or edited by hand. - reads standard "
                                                      "input.")],
) -> None:
    """Prove that a program is safe, or show where it is not (exit code 1). Runs nothing and needs no model."""
    from tabulate import tabulate

    from megacompile.ir.text import parse, source_text
    from megacompile.verify.verifier import judge
    piped = str(program_file) == "-"
    named = "standard input" if piped else program_file
    if not piped and (not program_file.exists() or program_file.is_dir()):
        raise ArgumentError(f"{program_file} is not a file: give a file with a program's text, or - for standard input")
    program = parse(source_text(sys.stdin if piped else program_file))
    verdicts, error = judge(program)
    words = {True: "holds", False: "BROKEN", None: "not checked"}
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
    disk_rating: Annotated[str | None, typer.Option(
        help='Bytes that the drives for optimizer state may write in their life, such as "1.2PB": says how many steps that '
             "is.")] = None,
) -> None:
    """Predict whether a model fits in memory, how long a step takes, and what limits it, for the chosen plan and alternatives.

    Loads no weights, trains nothing, and can plan for a GPU without having one. Exit code 1 if the model does not fit.
    """
    from megacompile.sizes import parse_bytes
    rating = parse_bytes(disk_rating)
    found = planning.schedule(model, knobs, lora).outlook()
    if planning.is_assumed(knobs):
        print(f"This machine has no GPU, so the plan assumes {DEFAULT_HARDWARE}, with its usual host: give --hardware and "
              "--host-memory for another machine\n")
    print(found.text(rating))
    if not found.fits:
        raise typer.Exit(EXIT_FAILED)


@_command()
def calibrate(
    device: Device = None,
    output: Annotated[Path | None, typer.Option(
        dir_okay=False, help="Write the rates to this file, for example to plan for this machine on another one.",
        show_default="a file in the cache folder, which plan and train read")] = None,
    scale: Annotated[float, typer.Option(min=0.01, max=1000.0, help="Measuring time as a multiple of the usual time.")] = 1.0,
    disk: Annotated[Path | None, typer.Option(
        file_okay=False, help="A folder on the drives for optimizer state, to measure them too. Writes 16 GiB there for a "
                              "moment.", show_default="rates of four drives of PCIe 4, from data sheets")] = None,
) -> None:
    """Measure how fast this machine computes and copies, so that plans fit it. Once for each machine is enough.

    With --disk also how fast its drives read and write. Takes a minute or two. Run nothing else at the same time, which would
    falsify the rates."""
    from megacompile.predict.hardware import cache_path
    from megacompile.system.progress import Progress
    from megacompile.tools.calibrate import measure, with_disk_rates
    with Progress() as say:
        found = measure(device, scale, say)
        if disk is not None:
            found = with_disk_rates(found, disk, scale, say)
    path = output or cache_path(device)
    print(found.table())
    found.save(path)
    print(f"saved in {path}")


@_command()
def doctor() -> None:
    """Check whether this machine can train, and say how to fix what is missing. Exit code 1 if training is not possible."""
    from megacompile.system.progress import Progress
    from megacompile.tools.doctor import devices, examine, report
    with Progress() as say:
        findings = examine(say)
    print(report(findings))
    if not devices(findings):
        raise typer.Exit(EXIT_FAILED)


for _function in (commands.generate, commands.chat, commands.evaluate, commands.merge, commands.export):
    _command()(with_options(_function))


if __name__ == "__main__":
    app(prog_name="megacompile")
