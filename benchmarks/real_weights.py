"""Compares training of a pretrained model natively and streamed, through TRL's trainers and ours, in float32 on a CPU.

    python benchmarks/real_weights.py MODEL --data FOLDER
    python benchmarks/real_weights.py MODEL --data FOLDER --methods full nf4 --output benchmarks/results/real-weights.jsonl

MODEL: a folder with weights and a tokenizer. FOLDER: has alpaca_en_demo.json, dpo_en_demo.json and kto_en_demo.json, which
LLaMA-Factory publishes in its folder `data`. For each method, a few steps start from the same weights on the same rows: once
with TRL's class, once with ours on a streamed model. Compares their losses and the texts that both generate greedily
afterwards; for adapters also the text of the plain model with the saved adapter merged. Prints a JSON line for each method.
Exit code 1 if losses differ by more than 1e-4, or texts at all.
"""
from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import peft
import torch
import transformers
import trl
from rows import append, commit, machine

import megacompile
import megacompile.dpo
import megacompile.grpo
import megacompile.kto
import megacompile.sft

Row = dict[str, Any]
#: The largest difference of losses.
LARGEST = 1e-4


def instructions(folder: Path) -> list[Row]:
    return [{"prompt": "\n".join(filter(None, (row["instruction"], row["input"]))) + "\n", "completion": row["output"]}
            for row in json.loads((folder / "alpaca_en_demo.json").read_text())]


def pairs(folder: Path) -> list[Row]:
    return [{"prompt": row["conversations"][-1]["value"] + "\n", "chosen": row["chosen"]["value"],
             "rejected": row["rejected"]["value"]} for row in json.loads((folder / "dpo_en_demo.json").read_text())]


def verdicts(folder: Path) -> list[Row]:
    return [{"prompt": row["messages"][0]["content"] + "\n", "completion": row["messages"][1]["content"], "label": row["label"]}
            for row in json.loads((folder / "kto_en_demo.json").read_text())]


def prompts(folder: Path) -> list[Row]:
    return [{"prompt": row["prompt"]} for row in instructions(folder) if len(row["prompt"]) < 80]


@dataclass(frozen=True)
class Method:
    """A way of training: its rows, TRL's trainer and arguments, ours, what it changes in the arguments, and whether it trains
    an adapter, over a base in codes if `stored`."""

    rows: Callable[[Path], list[Row]]
    theirs: Any
    ours: Any
    settings: Any
    changes: Row
    adapter: bool = False
    stored: str = ""


_SFT = (instructions, trl.SFTTrainer, megacompile.sft.SFTTrainer, trl.SFTConfig)
_BESIDE = {"precompute_ref_log_probs": True}
METHODS = {
    "full": Method(*_SFT, {}),
    "lora": Method(*_SFT, {"learning_rate": 1e-4}, adapter=True),
    "nf4": Method(*_SFT, {"learning_rate": 1e-4}, adapter=True, stored="nf4"),
    "dpo": Method(pairs, trl.DPOTrainer, megacompile.dpo.DPOTrainer, trl.DPOConfig, _BESIDE),
    "kto": Method(verdicts, trl.KTOTrainer, megacompile.kto.KTOTrainer, trl.KTOConfig, _BESIDE),
    "grpo": Method(prompts, trl.GRPOTrainer, megacompile.grpo.GRPOTrainer, trl.GRPOConfig,
                   {"num_generations": 2, "max_completion_length": 16, "max_length": None, "num_iterations": 2,
                    "learning_rate": 1e-4}),
}


def short(completions: list[str], **_: Any) -> list[float]:
    """GRPO's reward: answers with few different letters."""
    return [-len(set(text)) / 10 for text in completions]


def trained(method: Method, folder: str, base: Any, tokenizer: Any, data: Any, steps: int, ours: bool) -> Any:
    """A trainer after so many steps from these weights."""
    torch.manual_seed(1)
    model = copy.deepcopy(base)
    if method.adapter:
        model = peft.get_peft_model(model, peft.LoraConfig(
            r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    if method.stored:
        model = megacompile.quantize(model, method.stored)
        model = model if ours else megacompile.dequantize(model)
    model = megacompile.stream(model, device="cpu") if ours else model
    common = dict(per_device_train_batch_size=4, max_steps=steps, learning_rate=2e-5, lr_scheduler_type="constant", seed=3,
                  max_length=256, logging_steps=1, report_to="none", use_cpu=True, bf16=False, save_strategy="no",
                  disable_tqdm=True, gradient_checkpointing=False)
    merged = {name: value for name, value in {**common, **method.changes}.items() if value is not None}
    more = {"reward_funcs": short} if method.settings is trl.GRPOConfig else {}
    trainer = (method.ours if ours else method.theirs)(
        model=model, args=method.settings(folder, **merged), train_dataset=data, processing_class=tokenizer, **more)
    trainer.train()
    return trainer


def text_of(model: Any, tokenizer: Any) -> str:
    model.eval()
    prompt = tokenizer("The three primary colors are", return_tensors="pt")
    return str(tokenizer.decode(model.generate(**prompt, max_new_tokens=24, do_sample=False)[0]))


def merged_text(method: Method, base: Any, folder: str, tokenizer: Any) -> str:
    """The text of a plain model with the adapter in a folder, merged."""
    plain = copy.deepcopy(base).requires_grad_(False)
    if method.stored:
        plain = megacompile.dequantize(megacompile.quantize(plain, method.stored))
    return text_of(peft.PeftModel.from_pretrained(plain, folder).merge_and_unload(), tokenizer)


def measure(name: str, given: argparse.Namespace) -> Row:
    method, began = METHODS[name], time.perf_counter()
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    base = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    data = datasets.Dataset.from_list(method.rows(given.data)[:16 * given.steps])
    losses, texts = [], []
    with tempfile.TemporaryDirectory() as folder:
        for ours in (True, False):
            trainer = trained(method, folder, base, tokenizer, data, given.steps, ours)
            losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
            texts.append(text_of(trainer.model, tokenizer))
            if ours and method.adapter:
                trainer.model.save_pretrained(f"{folder}/adapter")
                texts.append(merged_text(method, base, f"{folder}/adapter", tokenizer))
            if ours:
                trainer.model.megacompile.close()
    return dict(system="real-weights", model=Path(given.model).name, parameters=base.num_parameters(), method=name,
                losses=losses[0], losses_native=losses[1], text=texts[0],
                difference=max(abs(a - b) for a, b in zip(*losses, strict=True)), texts_equal=len(set(texts)) == 1,
                seconds=round(time.perf_counter() - began))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--data", type=Path, required=True, help="folder of the data")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS], help="default: all")
    parser.add_argument("--steps", type=int, default=3, help="default: 3")
    parser.add_argument("--output", type=Path, help="file that the rows are appended to")
    given = parser.parse_args()
    failed = False
    for name in given.methods:
        row = {**measure(name, given), **machine("cpu"), "commit": commit()}
        print(json.dumps(row), flush=True)
        failed |= row["difference"] > LARGEST or not row["texts_equal"]
        if given.output is not None:
            append(given.output, row)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
