"""Options of other trainers that `megacompile train` does not have, with the reason and what to use instead."""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from megacompile.errors import ArgumentError

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
_HUB = "nothing is uploaded: run `hf upload` on OUTPUT/model afterwards"
_MEMORY = "give --device-memory and --host-memory"
_EVALUATION = "give --eval-share, which holds out a fraction of the rows for evaluation"

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
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_token"), _HUB),
    **dict.fromkeys(("max_memory", "gpu_memory_limit"), _MEMORY),
    **dict.fromkeys(("val_set_size", "val_size", "test_size", "eval_dataset"), _EVALUATION),
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
