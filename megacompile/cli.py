"""The command line: `megacompile train`, `inspect`, `verify`, `plan`, `calibrate` and `bench`.

Exit codes: 0 done; 1 refused, the reason on stderr; 2 wrong arguments; 130 stopped by Ctrl-C (and saved, if asked).
"""
from __future__ import annotations

import enum
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from tabulate import tabulate
from typer.core import TyperGroup

import megacompile
from megacompile import training
from megacompile.calibrate import measure
from megacompile.corpus import Corpus, PretrainedTokenizer, load_tokenizer
from megacompile.editing import source_text
from megacompile.errors import LaneError, MegacompileError
from megacompile.frontend.template import Template
from megacompile.hardware import cache_path
from megacompile.text import parse
from megacompile.verify import judge

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Ends on an error of ours with its message alone; any other exception is a fault and keeps its traceback."""
        try:
            return super().invoke(ctx)
        except MegacompileError as error:
            message = str(error)
        except LaneError as error:
            message = str(error).splitlines()[0]  # without the program around it
        print(f"megacompile: {message}", file=sys.stderr)
        raise typer.Exit(EXIT_FAILED)


app = typer.Typer(cls=_Commands, help="Train decoder models whose weights live in host memory.", no_args_is_help=True,
                  add_completion=False, pretty_exceptions_enable=False)


class DType(enum.StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    def resolve(self) -> torch.dtype | None:
        return None if self is DType.AUTO else getattr(torch, self.value)


Model = Annotated[Path, typer.Argument(metavar="MODEL", exists=True, readable=True,
                                       help="A model directory, or a config (directory or JSON file).")]
CheckpointInterval = Annotated[int | None, typer.Option(min=1, help="Layers between activation checkpoints.")]
MicroBatchSize = Annotated[int | None, typer.Option(min=1, help="Sequences that the device works on at a time.")]
Device = Annotated[str | None, typer.Option(help="Where layers are computed: cpu or cuda.")]
DeviceMemory = Annotated[str | None, typer.Option(help='Device memory to stay within, such as "24GiB".')]
ModelDType = Annotated[DType, typer.Option(help="Data type of the weights; auto takes the model's own.")]


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if show:
        print(megacompile.__version__)
        raise typer.Exit


@app.command()
def train(
    model_path: Model,
    data: Annotated[list[Path], typer.Option(exists=True, dir_okay=False, readable=True,
                                             help="A text file; repeat for more.")],
    steps: Annotated[int, typer.Option(min=1)] = 1000,
    batch: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="Tokens a sequence.")] = 512,
    lr: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = 1e-4,
    warmup: Annotated[int, typer.Option(min=0, help="Steps over which the learning rate rises.")] = 0,
    weight_decay: Annotated[float, typer.Option(min=0.0)] = 0.01,
    max_grad_norm: Annotated[float, typer.Option(min=0.0, help="Largest norm of all gradients (0: any).")] = 1.0,
    checkpoint_interval: CheckpointInterval = None,
    micro_batch_size: MicroBatchSize = None,
    device: Device = None,
    device_memory: DeviceMemory = None,
    dtype: ModelDType = DType.AUTO,
    save: Annotated[Path | None, typer.Option(file_okay=False, help="Save the trained model here.")] = None,
    log_interval: Annotated[int, typer.Option(min=1, help="Steps between lines of the log.")] = 10,
    seed: Annotated[int, typer.Option(help="Of random weights and of the order of the data.")] = 0,
) -> None:
    """Train a model on text files, streamed from host memory.

    The data is cut into random windows of --length tokens, by the model's tokenizer, or by bytes if it has none.
    The learning rate rises over --warmup steps, then falls linearly to a tenth of --lr.
    """
    torch.manual_seed(seed)
    console = Console(markup=False, highlight=False, soft_wrap=True)
    if save is not None:
        training.make_directory(save)  # now: what cannot be saved should not be trained first
    model = training.load_model(model_path, dtype=dtype.resolve())
    training.check_length(model.config, length)
    tokenizer = load_tokenizer(model_path)
    corpus = Corpus.from_files(data, tokenizer, model.config.vocab_size)
    batches = corpus.windows(batch, length, seed)
    console.print(f"{training.parameter_count(model):,} parameters, {corpus.tokens.numel():,} tokens of data, "
                  f"{batch * length:,} tokens a step")

    model = megacompile.stream(model, **_config(checkpoint_interval, micro_batch_size, device, device_memory))
    model.train()
    optimizer = megacompile.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay,
                                  max_grad_norm=max_grad_norm or None)
    schedule = training.warmup_then_linear(optimizer, steps, warmup)
    with training.Interruption(console.print) as interruption, training.ProgressDisplay(
            console, steps, log_interval) as display:
        losses = training.train(model, optimizer, batches, steps, schedule=schedule, on_step=display,
                                stop=lambda: interruption.asked)
        if save is not None:  # under the same guard: a Ctrl-C here must not leave half a model
            model.save_pretrained(save)
            if isinstance(tokenizer, PretrainedTokenizer):
                tokenizer.save_pretrained(save)
    model.megacompile.close()
    if save is not None:
        console.print(f"saved in {save} after {len(losses)} steps")
    if len(losses) < steps:
        console.print(f"stopped by Ctrl-C after {len(losses)} of {steps} steps"
                      + ("" if save else "; nothing saved, for want of --save"))
        raise typer.Exit(EXIT_INTERRUPTED)


@app.command()
def inspect(
    model_path: Model,
    batch: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="Tokens a sequence.")] = 512,
    stage: Annotated[str | None, typer.Option(help="Show the program as this pass left it; else the last.")] = None,
    section: Annotated[str | None, typer.Option(help="Show one section, such as forward, backward or update.")] = None,
    table: Annotated[bool, typer.Option("--table", help="Show the program as a table.")] = False,
    fold: Annotated[bool, typer.Option(help="Fold what repeats from layer to layer.")] = True,
    template: Annotated[str | None, typer.Option(help="Show this template's graphs instead.")] = None,
    checkpoint_interval: CheckpointInterval = None,
    micro_batch_size: MicroBatchSize = None,
    device: Device = None,
    device_memory: DeviceMemory = None,
    dtype: ModelDType = DType.AUTO,
) -> None:
    """Show what a model compiles to: stages, schedule, templates. Loads no weights and trains nothing."""
    model = training.load_model(model_path, dtype=dtype.resolve(), meta=True)
    compiled = megacompile.schedule(model, batch=batch, length=length,
                                    **_config(checkpoint_interval, micro_batch_size, device, device_memory))
    if template is not None:
        print(_template_text(_choose(compiled.templates, template, "template")))
        return
    stages = compiled.stages
    program = _choose(stages, stage if stage is not None else list(stages)[-1], "stage")
    if section is not None:
        _choose(program.sections, section, "section")
    if table:
        print(program.table(section))
        return
    print(f"# stages: {', '.join(stages)}")
    print(f"# templates: {', '.join(compiled.templates)}")
    print(program.text(section=section, fold=fold))


@app.command()
def verify(
    program_file: Annotated[Path, typer.Argument(metavar="PROGRAM_FILE", exists=True, dir_okay=False, readable=True,
                                                 help="A program as text, as printed or edited.")],
) -> None:
    """Prove a program safe, or show where it is not: exit code 0 or 1. Runs nothing, and needs no model."""
    program = parse(source_text(program_file))
    verdicts, error = judge(program)
    words = {True: "holds", False: "BROKEN", None: "not asked"}
    print(f"{program_file}: stage {program.stage}, sections {', '.join(program.sections) or 'none'}\n")
    print(tabulate([(v.rule, words[v.holds], v.why) for v in verdicts], ["rule", "", ""], tablefmt="simple"))
    if error is not None:
        print(f"\n{error}")
        raise typer.Exit(EXIT_FAILED)


@app.command()
def plan(
    model_path: Model,
    batch: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="Tokens a sequence.")] = 512,
    hardware: Annotated[str | None, typer.Option(help="A profile (h200, a100, rtx3090) or a file of calibrate; else this "
                                                      "machine.")] = None,
    checkpoint_interval: CheckpointInterval = None,
    micro_batch_size: MicroBatchSize = None,
    device: Device = None,
    device_memory: DeviceMemory = None,
    dtype: ModelDType = DType.AUTO,
) -> None:
    """Predict step time, memory and what binds, for the plan that would be chosen and for those beside it.

    Loads no weights, trains nothing, and needs no GPU to plan for one.
    """
    model = training.load_model(model_path, dtype=dtype.resolve(), meta=True)
    compiled = megacompile.schedule(model, batch=batch, length=length, hardware=hardware,
                                    **_config(checkpoint_interval, micro_batch_size, device, device_memory))
    print(compiled.explain())


@app.command()
def calibrate(
    device: Device = None,
    output: Annotated[Path | None, typer.Option(dir_okay=False, help="Write here instead, to plan for this machine from "
                                                                     "another.")] = None,
    scale: Annotated[float, typer.Option(min=0.01, help="How long to measure, as a multiple of the usual.")] = 1.0,
) -> None:
    """Measure this machine's rates, once, for plan: less than a minute. Nothing else should run meanwhile."""
    found = measure(device, scale)
    path = output or cache_path(device)
    found.save(path)
    print(found.table())
    print(f"saved in {path}")


@app.command()
def bench(
    name: Annotated[str, typer.Argument(metavar="TABLE", help="gates, depth, ablation, budgets, batch, context, width or "
                                                              "large.")],
    output: Annotated[Path, typer.Option(dir_okay=False, help="The rows: read first, then added to.")] = Path("bench.jsonl"),
    shape: Annotated[str | None, typer.Option(help="Of the model, for rows that name none, such as tiny.")] = None,
    limit_minutes: Annotated[float | None, typer.Option(min=0.0, help="Stop after so long; the same command goes on from "
                                                                      "there. 0: only print what there is.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Measure rows again that failed.")] = False,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Draw the table here (SVG).")] = None,
) -> None:
    """Measure a table's rows that are not in a file yet, each in a process of its own, and print the table."""
    from megacompile.bench import plots, rows
    from megacompile.bench.run import run
    from megacompile.bench.shapes import SHAPES
    from megacompile.bench.table import markdown
    from megacompile.bench.tables import TABLES
    if plot is not None:
        plots.check()
    if shape is not None:
        _choose(SHAPES, shape, "shape")
    table = _choose(TABLES, name, "table").of_shape(shape)
    try:
        run(table, output, limit_s=None if limit_minutes is None else 60 * limit_minutes, retry=retry)
    except KeyboardInterrupt:
        print(f"stopped by Ctrl-C: the rows that are done are in {output}", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    print(markdown(table, rows.read(output)))
    if plot is not None:
        plots.draw(table, rows.read(output), plot)


def _config(checkpoint_interval: int | None, micro_batch_size: int | None, device: str | None,
            device_memory: str | None) -> dict[str, Any]:
    """The knobs that were given; the others are left to `megacompile`'s own choice."""
    knobs = {"checkpoint_interval": checkpoint_interval, "micro_batch_size": micro_batch_size, "device": device,
             "device_memory": device_memory}
    return {name: value for name, value in knobs.items() if value is not None}


def _choose(choices: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in choices:
        raise MegacompileError(f"there is no {what} {name!r}: choose one of {', '.join(choices)}")
    return choices[name]


def _template_text(template: Template) -> str:
    """Every variant as Python, with shapes and dtypes in B and T's symbols."""
    graphs = (f"# {name}\n{template.variant(name).graph.print_readable(print_output=False).strip()}"
              for name in template.variant_names)
    return "\n\n".join([f"# template {template.name}: residuals take {template.residual_bytes()} bytes", *graphs])
