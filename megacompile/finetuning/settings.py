"""The settings of a run: each is an option of `megacompile train` and a key of its YAML file."""
from __future__ import annotations

import difflib
import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from megacompile.errors import ArgumentError
from megacompile.finetuning.formats import Format
from megacompile.finetuning.trackers import Tracker, check_trackers
from megacompile.sizes import LARGEST
from megacompile.tools.options import DType, ModelDType, Optim, OptimArgs, Strict, Update
from megacompile.tools.recipe import Decay, default_length, default_words

# --------------------
# Options of other trainers that `megacompile train` does not have, with the reason and what to use instead.
_QUANTIZED = "give --lora --quantize nf4 or int8: frozen weights are then stored in four or eight bits"
_PLACED = "one process trains on one GPU, and weights and optimizer state are in host memory already: leave it out"
_GPUS = "give --gpus N, which starts a process for each GPU"
_RECOMPUTED = "the plan chooses what to recompute: leave it out, or set --checkpoint-interval and --saved-layers"
_ATTENTION = "the attention kernel is chosen for the device and the dtype: leave it out"
_COMPILED = "layers are compiled already: leave it out"
_COUNTED = "intervals are counted in steps: give --save-interval, --eval-interval or --log-interval"
_FIRST = "the model is the first argument: megacompile train MODEL --data FILE"
_ADAPTER = "give --lora, with --lora-rank, --lora-alpha, --lora-targets and --lora-dropout"
_PEFT = "this command supports only plain LoRA: stream a model from peft.get_peft_model in a script, with megacompile.stream"
_MEMORY = "give --device-memory and --host-memory"
_EVALUATION = "give --eval-share, which holds out a fraction of the rows, or --eval-data"

#: By option name, spelled as a key of a YAML file.
REFUSED: dict[str, str] = {
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization", "quantization_bit", "quantization_config",
                     "bnb_4bit_quant_type", "use_qlora", "qlora"), _QUANTIZED),
    "fp16": "float16 cannot be trained: give --bf16 (weights in bfloat16, masters in float32)",
    "tf32": "the precision is that of the weights: give --dtype bfloat16 or float32",
    **dict.fromkeys(("fp8", "use_fp8", "enable_fp8"), "give --precision float8"),
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "local_rank", "tensor_parallel_size", "ddp_timeout",
                     "device_map", "cpu_offload", "offload"), _PLACED),
    **dict.fromkeys(("num_gpus", "num_processes"), _GPUS),
    **dict.fromkeys(("gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing",
                     "activation_offloading"), _RECOMPUTED),
    **dict.fromkeys(("flash_attn", "flash_attention", "use_flash_attention_2", "attn_implementation", "sdp_attention",
                     "xformers_attention"), _ATTENTION),
    **dict.fromkeys(("torch_compile", "compile", "use_liger_kernel", "use_unsloth"), _COMPILED),
    **dict.fromkeys(("save_strategy", "eval_strategy", "evaluation_strategy", "logging_strategy"), _COUNTED),
    **dict.fromkeys(("model", "model_name_or_path", "model_name", "base_model"), _FIRST),
    **dict.fromkeys(("use_peft", "adapter", "finetuning_type", "peft_type"), _ADAPTER),
    **dict.fromkeys(("use_dora", "use_rslora", "lora_modules_to_save", "lora_bias"), _PEFT),
    "hub_token": "log in with `hf auth login`: leave it out",
    **dict.fromkeys(("max_memory", "gpu_memory_limit"), _MEMORY),
    **dict.fromkeys(("val_set_size", "val_size", "test_size"), _EVALUATION),
    "per_device_eval_batch_size": "--batch is used for evaluations too: leave it out",
    "neftune_noise_alpha": "noise on embeddings is not supported: leave it out",
    "trust_remote_code": "code that comes with a model is not run: leave it out, or stream() the model in a script",
    "tensorboard": "give --report-to tensorboard",
    "group_by_length": "batches are packed, or grouped by length within a step: leave it out",
    "dataset_text_field": "texts are read from the column `text`: rename your column, or give --format",
    "do_train": "this command always trains: leave it out",
    "completion_only_loss": "only the assistant's messages are learned: leave it out",
    "assistant_only_loss": "only the assistant's messages are learned: leave it out",
    "train_on_inputs": "only the assistant's messages are learned: leave it out",
}


def key_of(option: str) -> str:
    """The YAML key of an option: "--max-length" becomes "max_length"."""
    return option.lstrip("-").replace("-", "_")


def with_hyphens(words: Sequence[str], known: Collection[str], refused: Mapping[str, str]) -> list[str]:
    """The words of a command line, with underscores in options replaced by hyphens. Raises `ArgumentError` for a `refused`
    option (key -> reason), unless the command has it (`known`)."""
    found = []
    for word in words:
        option, sign, value = word.partition("=")
        if option.startswith("--"):
            if option not in known and (reason := refused.get(key_of(option))):
                raise ArgumentError(f"unknown option {option}: {reason}")
            option = f"--{key_of(option).replace('_', '-')}" if option != "--" else option
        found.append(f"{option}{sign}{value}")
    return found


DATA_PANEL = "Data"
_DATA = DATA_PANEL
_LEARNING = "Learning"
_RUN = "Checkpoints, evaluation and logs"


class TooLong(enum.StrEnum):
    """The handling of a conversation that has more tokens than a sequence may have."""

    TRUNCATE = "truncate"
    DROP = "drop"


class Task(enum.StrEnum):
    """What a run learns from its rows. All except `sft` are trained by TRL's trainer of that name."""

    SFT = "sft"
    DPO = "dpo"
    KTO = "kto"
    REWARD = "reward"


@dataclass(frozen=True)
class Settings:
    """All settings except the model, the data, the adapter (`Lora`) and the plan (`Knobs`). A hyperparameter that is None gets
    the default for the kind of run (`Recipe`)."""

    task: Annotated[Task, typer.Option(
        rich_help_panel=_DATA,
        help="sft: texts and answers. dpo: pairs of answers (columns chosen, rejected). kto: answers with a verdict (column "
             "label). reward: a reward model from pairs.")] = Task.SFT
    format: Annotated[Format | None, typer.Option(
        rich_help_panel=_DATA, help="Row format.",
        show_default="the first format whose required columns exist")] = None
    tokenizer: Annotated[str | None, typer.Option(
        rich_help_panel=_DATA, help="Tokenizer: a folder or an id on the Hugging Face Hub.",
        show_default="the model's own tokenizer")] = None
    batch: Annotated[int | None, typer.Option(
        "--batch", "--batch-size", min=1, max=LARGEST["batch"], rich_help_panel=_DATA,
        help="Number of sequences per step, which all GPUs share.",
        show_default=default_words("batch"))] = None
    per_device_train_batch_size: Annotated[int | None, typer.Option(
        min=1, max=LARGEST["batch"], rich_help_panel=_DATA,
        help="For compatibility with other trainers: multiplied by --gradient-accumulation-steps, this gives --batch. The plan "
             "chooses how many sequences the device computes at a time.")] = None
    gradient_accumulation_steps: Annotated[int | None, typer.Option(
        min=1, max=LARGEST["batch"], rich_help_panel=_DATA,
        help="Factor for --per-device-train-batch-size.", show_default="1")] = None
    length: Annotated[int | None, typer.Option(
        "--length", "--max-length", "--max-seq-length", min=2, max=LARGEST["length"], rich_help_panel=_DATA,
        help="Maximum number of tokens per sequence.",
        show_default=default_length())] = None
    too_long: Annotated[TooLong, typer.Option(
        rich_help_panel=_DATA, help="What to do with conversations longer than --length.")] = TooLong.TRUNCATE
    pack: Annotated[bool, typer.Option(
        "--pack", "--packing", rich_help_panel=_DATA,
        help="Put several conversations into one sequence, in which they do not attend to each other.")
    ] = False
    eval_share: Annotated[float, typer.Option(
        min=0.0, max=0.9, rich_help_panel=_DATA, help="Fraction of the rows to hold out for evaluation.")] = 0.0
    eval_data: Annotated[list[str] | None, typer.Option(
        "--eval-data", "--eval-dataset", rich_help_panel=_DATA,
        help="Rows to evaluate on, read as --data is. Repeat for more.", show_default="none")] = None
    steps: Annotated[int | None, typer.Option(
        "--steps", "--max-steps", min=1, rich_help_panel=_LEARNING, help="Number of steps. Overrides --epochs.")] = None
    epochs: Annotated[float | None, typer.Option(
        "--epochs", "--num-train-epochs", "--num-epochs", min=0.0, rich_help_panel=_LEARNING,
        help="Number of passes over the data.",
        show_default=default_words("epochs"))] = None
    lr: Annotated[float | None, typer.Option(
        "--lr", "--learning-rate", min=0.0, rich_help_panel=_LEARNING, help="Peak learning rate.",
        show_default=default_words("lr"))] = None
    warmup: Annotated[int | None, typer.Option(
        "--warmup", "--warmup-steps", min=0, rich_help_panel=_LEARNING,
        help="Number of steps over which the learning rate rises to its peak.", show_default="from --warmup-ratio")] = None
    warmup_ratio: Annotated[float | None, typer.Option(
        min=0.0, max=1.0, rich_help_panel=_LEARNING, help="Number of warmup steps as a fraction of all steps.",
        show_default=default_words("warmup_ratio"))] = None
    decay: Annotated[Decay | None, typer.Option(
        "--decay", "--lr-scheduler-type", rich_help_panel=_LEARNING, help="Learning rate schedule after the warmup.",
        show_default=default_words("decay"))] = None
    final_lr: Annotated[float | None, typer.Option(
        min=0.0, max=1.0, rich_help_panel=_LEARNING, help="Final learning rate, as a fraction of the peak.",
        show_default=default_words("final_lr"))] = None
    weight_decay: Annotated[float | None, typer.Option(
        min=0.0, rich_help_panel=_LEARNING, help="Weight decay for matrices. Norms and biases are not decayed.",
        show_default=default_words("weight_decay"))] = None
    beta1: Annotated[float | None, typer.Option(
        "--beta1", "--adam-beta1", min=0.0, max=1.0, rich_help_panel=_LEARNING, help="AdamW's decay rate of the first moment.",
        show_default=default_words("beta1"))] = None
    beta2: Annotated[float | None, typer.Option(
        "--beta2", "--adam-beta2", min=0.0, max=1.0, rich_help_panel=_LEARNING, help="AdamW's decay rate of the second moment.",
        show_default=default_words("beta2"))] = None
    eps: Annotated[float | None, typer.Option(
        "--eps", "--adam-epsilon", min=0.0, rich_help_panel=_LEARNING, help="AdamW's term for numerical stability.",
        show_default=default_words("eps"))] = None
    max_grad_norm: Annotated[float | None, typer.Option(
        min=0.0, rich_help_panel=_LEARNING, help="Clip gradients to this global norm. 0: do not clip.",
        show_default=default_words("max_grad_norm"))] = None
    optim: Optim = "adamw"
    optim_args: OptimArgs = None
    update: Annotated[Update, typer.Option(
        rich_help_panel=_LEARNING,
        help="When to update a layer: at the end of the step, or on arrival of its gradients, which needs --max-grad-norm 0.")
    ] = Update.STEP
    overlap: Annotated[bool, typer.Option(
        "--overlap", rich_help_panel=_LEARNING, help="Same as --update arrival.")] = False
    dtype: ModelDType = DType.AUTO
    strict: Strict = True
    bf16: Annotated[bool, typer.Option(
        "--bf16", rich_help_panel=_LEARNING, help="Same as --dtype bfloat16. Master weights stay in FP32.")] = False
    seed: Annotated[int, typer.Option(
        min=0, rich_help_panel=_LEARNING, help="Seed for weight initialization, data order and the evaluation split.")] = 0
    output: Annotated[Path | None, typer.Option(
        "--output", "--output-dir", file_okay=False, rich_help_panel=_RUN,
        help="Folder for checkpoints, the log, the loss curve and the model.")] = None
    save: Annotated[Path | None, typer.Option(
        file_okay=False, rich_help_panel=_RUN, help="Folder for the trained model.", show_default="OUTPUT/model")] = None
    save_interval: Annotated[int, typer.Option(
        "--save-interval", "--save-steps", min=1, rich_help_panel=_RUN,
        help="Number of steps between checkpoints. Training continues while they are written.")] = 500
    keep: Annotated[int, typer.Option(
        "--keep", "--save-total-limit", min=1, rich_help_panel=_RUN, help="Number of checkpoints to keep.")] = 3
    resume: Annotated[str | None, typer.Option(
        "--resume", "--resume-from-checkpoint", metavar="latest|FOLDER", rich_help_panel=_RUN,
        help="Continue from the latest checkpoint in OUTPUT (from the start if there is none), or from this folder.")] = None
    eval_interval: Annotated[int, typer.Option(
        "--eval-interval", "--eval-steps", min=1, rich_help_panel=_RUN,
        help="Number of steps between evaluations. The last step is always evaluated.")] = 100
    eval_on_start: Annotated[bool, typer.Option(
        "--eval-on-start", rich_help_panel=_RUN, help="Also evaluate before the first step.")] = False
    early_stopping_patience: Annotated[int | None, typer.Option(
        min=1, rich_help_panel=_RUN,
        help="Stop after this number of evaluations in a row that do not lower the loss.", show_default="never")] = None
    load_best_model_at_end: Annotated[bool, typer.Option(
        "--load-best-model-at-end", "--save-best", rich_help_panel=_RUN,
        help="Save the model that had the lowest loss in an evaluation, instead of the last one.")] = False
    callback: Annotated[list[str] | None, typer.Option(
        metavar="MODULE:CLASS", rich_help_panel=_RUN,
        help="Call this transformers.TrainerCallback during training. Repeat for more.", show_default="none")] = None
    extra: Annotated[list[str] | None, typer.Option(
        "--set", metavar="NAME=VALUE", rich_help_panel=_RUN,
        help="Another field of TrainingArguments, or of TRL's config of the task, such as beta=0.05. Repeat for more.",
        show_default="none")] = None
    log_interval: Annotated[int, typer.Option(
        "--log-interval", "--logging-steps", min=1, rich_help_panel=_RUN,
        help="Number of steps between printed lines.")] = 10
    push_to_hub: Annotated[str | None, typer.Option(
        "--push-to-hub", "--hub-model-id", metavar="ID", rich_help_panel=_RUN,
        help="Also upload the trained model to this repository of the Hugging Face Hub, such as me/my-model.")] = None
    report_to: Annotated[list[Tracker] | None, typer.Option(
        rich_help_panel=_RUN, help="Also send the log to this tracker. Repeat for more.", show_default="none")] = None

    def check(self) -> None:
        """Raises `ArgumentError` for settings that contradict each other, `MegacompileError` for missing packages."""
        if self.resume == "latest" and self.output is None:
            raise ArgumentError("--resume latest needs --output, the folder of the run")
        check_trackers(self.report_to or (), self.output)
        if self.push_to_hub is not None and "/" not in self.push_to_hub:
            raise ArgumentError(f"--push-to-hub {self.push_to_hub} is not a repository: give its id, such as me/my-model")
        if self.push_to_hub is not None and self.output is None and self.save is None:
            raise ArgumentError("--push-to-hub uploads the saved model: give --output, or --save")
        if self.eval_data and self.eval_share:
            raise ArgumentError("--eval-data and --eval-share both say what to evaluate on: give one of them")
        for name in ("early_stopping_patience", "load_best_model_at_end"):
            if getattr(self, name) and not self.eval_data and not self.eval_share:
                raise ArgumentError(f"{name}={getattr(self, name)} needs evaluations: give --eval-data, or --eval-share")
        if self.task is not Task.SFT:
            for name in ("format", "pack", "too_long"):
                if getattr(self, name) != getattr(Settings(), name):
                    raise ArgumentError(f"{name}={getattr(self, name)} is for --task sft, not for {self.task}: leave it out")
        if self.on_arrival and self.max_grad_norm != 0:
            raise ArgumentError("--update arrival updates before the norm of all gradients is known: add --max-grad-norm 0")
        if not self.steps and self.epochs == 0:
            raise ArgumentError("--epochs 0 trains nothing: give a larger number, or --steps")
        if max(self.beta1 or 0, self.beta2 or 0) >= 1:
            raise ArgumentError("--beta1 and --beta2 must be below 1")
        if self.warmup is not None and self.warmup_ratio is not None:
            raise ArgumentError("--warmup (in steps) and --warmup-ratio (a fraction of all steps) exclude each other: give one "
                                "of them")
        if self.batch is not None and (self.per_device_train_batch_size or self.gradient_accumulation_steps):
            raise ArgumentError("--batch is --per-device-train-batch-size times --gradient-accumulation-steps: give either "
                                "--batch or these two")
        if self.gradient_accumulation_steps is not None and self.per_device_train_batch_size is None:
            raise ArgumentError("--gradient-accumulation-steps needs --per-device-train-batch-size: give both, or their "
                                "product as --batch")
        if (self.per_device_train_batch_size or 1) * (self.gradient_accumulation_steps or 1) > LARGEST["batch"]:
            raise ArgumentError("--per-device-train-batch-size times --gradient-accumulation-steps is more than the "
                                f"{LARGEST['batch']:,} sequences that a step may have: give smaller numbers")
        if self.bf16 and self.dtype is DType.FLOAT32:
            raise ArgumentError("--bf16 means --dtype bfloat16 and contradicts --dtype float32: give one of them")

    @property
    def on_arrival(self) -> bool:
        """True if layers are updated as their gradients arrive."""
        return self.overlap or self.update is Update.ARRIVAL

    @property
    def weights_dtype(self) -> DType:
        return DType.BFLOAT16 if self.bf16 else self.dtype


def read_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of an eager option: makes the keys of a YAML file the defaults of a command's arguments and options, so that
    options on the command line override them. Values are parsed as on the command line.

    Raises `ArgumentError` for a file that is not YAML, an unknown key, and a value of an unsuitable type."""
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")  # the path may also be a pipe
        twice = _named_twice(yaml.compose(text, Loader=yaml.SafeLoader))
        found = yaml.safe_load(text)
    except RecursionError:
        raise ArgumentError(f"{path} is nested too deeply: write keys and values, such as steps: 1000") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ArgumentError(f"Could not parse {path} as YAML: fix its syntax\n{error}") from error
    if twice is not None:
        raise ArgumentError(f"{path} has the key {twice} twice: remove one")
    if not isinstance(found, dict):
        raise ArgumentError(f"{path} does not contain keys and values: write lines such as steps: 1000")
    known = {each.name: each for each in context.command.params if each.name is not None}
    known |= {key_of(option): each for each in known.values() for option in each.opts if option.startswith("--")}
    defaults = {}
    for key, value in found.items():
        name = key_of(str(key))
        if name not in known and name in REFUSED:
            raise ArgumentError(f"{path} has the key {key}: {REFUSED[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ArgumentError(f"{path} has the unknown key {key}: " + (f"did you mean {near[0]}?" if near else "remove it"))
        if value is not None:
            several = known[name].nargs != 1 or getattr(known[name], "multiple", False)
            meant = str(known[name].name)
            if meant in defaults:
                raise ArgumentError(f"{path} has the key {key} and another name of {meant}: remove one of them")
            defaults[meant] = _words(value, several, f"{path}: {key}")
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def _named_twice(node: yaml.Node | None) -> str | None:
    """A key that a mapping has twice, if there is one. YAML itself would silently use the last value."""
    names = [str(key.value).replace("-", "_") for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
    return next((name for name in names if names.count(name) > 1), None)


def _words(value: Any, several: bool, where: str) -> str | list[str]:
    values = value if isinstance(value, list) else [value]
    if any(isinstance(each, dict | list) or each is None for each in values):
        raise ArgumentError(f"{where} must be a number, a word, true or false" + (", or a list of these" if several else ""))
    if not several and isinstance(value, list):
        raise ArgumentError(f"{where} is a list, but takes one value")
    return [str(each) for each in values] if several else str(value)
