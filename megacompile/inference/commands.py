"""The commands of inference, for the command line. Each imports what it needs when it runs."""
from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from megacompile.errors import ArgumentError
from megacompile.finetuning.formats import Format
from megacompile.inference.opening import Opening, Source
from megacompile.inference.sampling import Sampling
from megacompile.sizes import LARGEST
from megacompile.tools.recipe import default_length


def generate(
    model: Source,
    prompts: Annotated[str, typer.Option(
        help="A file of rows with a column prompt (text), messages or instruction (.jsonl, .json, .csv, .tsv, .parquet), or a "
             "text file with a prompt in each line.")],
    opening: Opening,
    sampling: Sampling,
    output: Annotated[Path | None, typer.Option(
        dir_okay=False, help="File for the rows with their answers (JSON lines). It must not exist.",
        show_default="stdout")] = None,
    batch: Annotated[int, typer.Option(min=1, max=LARGEST["batch"], help="Number of prompts that are answered together.")] = 32,
    raw: Annotated[bool, typer.Option(
        "--raw", help="Continue the text of prompts as it is, without the tokenizer's chat template.")] = False,
) -> None:
    """Answer the prompts of a file. Each row is written with its completion and the number of its tokens.

    Weights are copied to the device if they fit. Otherwise layers take turns there, and each crosses the link once for every
    token of the whole batch, so that a larger --batch costs little.
    """
    from rich.console import Console

    from megacompile.inference import answers
    from megacompile.inference.answers import PromptEncoder
    answers.check_output(output)
    tokenizer = opening.open_tokenizer(model).pretrained
    config = opening.read_config(model)
    read = list(PromptEncoder(tokenizer, raw, lambda tokens: sampling.check(config, tokens)).read(prompts))
    answers.generate(opening.open_model(model), tokenizer, read, output, sampling, batch,
                     Console(stderr=True, highlight=False))


def chat(
    model: Source,
    opening: Opening,
    sampling: Sampling,
    system: Annotated[str | None, typer.Option(help="Message of the system, before the conversation.")] = None,
) -> None:
    """Talk to a model in the terminal. /reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer."""
    from megacompile.inference.answers import chat as talk
    tokenizer = opening.open_tokenizer(model).pretrained
    talk(opening.open_model(model), tokenizer, sampling, system, lambda: input("> "),
         lambda text: print(text, end="", flush=True))


def evaluate(
    model: Source,
    data: Annotated[list[str], typer.Option(
        "--data", help="Data as for train: a text file, a file of rows, a folder of such files, or a data set id on the "
                       "Hugging Face Hub. Repeat for more.")],
    opening: Opening,
    length: Annotated[int | None, typer.Option(
        min=2, max=LARGEST["length"], help="Most tokens of a sequence.", show_default=default_length())] = None,
    batch: Annotated[int, typer.Option(
        min=1, max=LARGEST["batch"], help="Number of sequences that are evaluated together.")] = 16,
    data_format: Annotated[Format | None, typer.Option(
        "--format", help="Format of the rows.", show_default="by their columns")] = None,
) -> None:
    """Print a model's loss (nats per token) and perplexity on texts or conversations, of which only the answers count."""
    from rich.console import Console

    from megacompile.inference.evaluation import evaluate as measured
    print(measured(model, opening, data, data_format, length, batch, Console(stderr=True, highlight=False)).words)


def merge(
    model: Source,
    output: Annotated[Path, typer.Option(file_okay=False, help="Folder for the merged model.")],
    opening: Opening,
    push_to_hub: Annotated[str | None, typer.Option(
        metavar="ID", help="Also upload the folder to this repository of the Hugging Face Hub.")] = None,
) -> None:
    """Add the weights of a LoRA adapter to those of its model, and save an ordinary model. MODEL is the folder of the adapter,
    or that of the run that trained it."""
    from megacompile import exporting
    base, adapter = opening.found(str(exporting.model_folder(model)) if Path(model).is_dir() else model)
    if adapter is None:
        raise ArgumentError(f"{model} is not an adapter: give the folder of one, or the model and --adapter FOLDER")
    exporting.merge(base, adapter, output)
    print(f"saved in {output}")
    if push_to_hub is not None:
        print(f"uploaded to {exporting.upload(output, push_to_hub)}")


class Matrices(enum.StrEnum):
    """The format of matrices in a GGUF file."""

    F16 = "f16"
    Q8_0 = "q8_0"


def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The folder of a run, or of a saved model.")],
    gguf: Annotated[Path, typer.Option("--gguf", dir_okay=False, help="The file to write, for llama.cpp.")],
    matrices: Annotated[Matrices, typer.Option(
        "--type", help="Format of matrices. Vectors are stored in float32.")] = Matrices.F16,
) -> None:
    """Write a trained model as a GGUF file, which llama.cpp and what is built on it run. Needs the package gguf."""
    from megacompile import exporting
    exporting.export_gguf(exporting.model_folder(model), gguf, matrices.value)
    print(f"saved in {gguf}")
