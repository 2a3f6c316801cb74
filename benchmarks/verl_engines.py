"""A pretrained model trained by verl's FSDP2 engine and by ours, on the same batches with verl's loss of SFT, in float32.

    VERL_USE_EXTERNAL_MODULES=verl_cpu VERL_PLATFORM=cpu PYTHONPATH=.:tests/support:benchmarks \
        VERL_PYTHON benchmarks/verl_engines.py MODEL --data FOLDER --output rows.jsonl

VERL_PYTHON: the interpreter of verl's environment (`tests/support/real_verl.py`). MODEL: a folder with weights and a tokenizer.
FOLDER: has alpaca_en_demo.json, which LLaMA-Factory publishes in its `data`. Both run on the CPU, in turns. Prints and appends
a JSON line for each step of each engine:

- `loss`, `grad_norm`: as verl logs them. `held_out`: the loss of rows that are not trained on, after the last step.
- `forward_backward_s`, `optimizer_s`: of the engine's methods. The optimizer's time is until its weights are readable.
"""
from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from rows import append, commit, machine

#: Of the tokens in a row at most.
LONGEST = 256


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=8, help="of a step (default: 8)")
    parser.add_argument("--micro-batch-tokens", type=int, default=512, help="verl's max_token_len_per_gpu (default: 512)")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--output", type=Path, help="a file of rows, to which rows are appended")
    return parser


def instructions(given: argparse.Namespace) -> list[tuple[list[int], int]]:
    """Tokens of each row, and how many of them are its prompt's."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    found = []
    for row in json.loads((given.data / "alpaca_en_demo.json").read_text()):
        said = [{"role": "user", "content": f"{row['instruction']}\n{row['input']}".strip()}]
        prompt = tokenizer(tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)).input_ids
        answer = [*tokenizer(row["output"]).input_ids, tokenizer.eos_token_id]
        if len(prompt) + len(answer) <= LONGEST:
            found.append((prompt + answer, len(prompt)))
    return found


def batch(rows: list[tuple[list[int], int]], given: argparse.Namespace) -> Any:
    from verl.utils import tensordict_utils

    nested = importlib.import_module("verl_run").nested
    tensors = dict(input_ids=nested([torch.tensor(tokens) for tokens, _ in rows]),
                   position_ids=nested([torch.arange(len(tokens)) for tokens, _ in rows]),
                   loss_mask=nested([(torch.arange(len(tokens)) >= prompt).long() for tokens, prompt in rows]))
    return tensordict_utils.get_tensordict(tensors, non_tensor_dict=dict(
        use_remove_padding=False, use_dynamic_bsz=True, max_token_len_per_gpu=given.micro_batch_tokens, temperature=1.0))


def step_of(made: Any, data: Any, loss: Any) -> dict[str, Any]:
    """Trains an engine on a batch: its figures."""
    with made.train_mode():
        began = time.perf_counter()
        made.optimizer_zero_grad()
        found = made.forward_backward_batch(data, loss)
        between = time.perf_counter()
        norm = made.optimizer_step()
        if hasattr(made.module, "megacompile"):
            made.module.megacompile.synchronize()
        ended = time.perf_counter()
    return {"loss": sum(found["loss"]), "grad_norm": norm, "forward_backward_s": round(between - began, 3),
            "optimizer_s": round(ended - between, 3)}


def main(given: argparse.Namespace) -> int:
    import verl

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    loss = functools.partial(importlib.import_module("verl.workers.utils.losses").sft_loss, config=None)
    data = instructions(given)
    said = {name: vars(given)[name] for name in ("rows", "micro_batch_tokens", "learning_rate")} | {"model": given.model.name}
    engines = {backend: importlib.import_module("verl_run").engine(
        backend, given.model, lr=given.learning_rate, clip_grad=1.0, lr_scheduler_type="constant", lr_warmup_steps=0,
        total_training_steps=given.steps) for backend in ("fsdp2", "megacompile")}
    for step in range(given.steps):
        rows = data[(step + 4) * given.rows:(step + 5) * given.rows]
        for backend, made in engines.items():  # in turns, so that other work on the machine slows both
            row = step_of(made, batch(rows, given), loss)
            if step + 1 == given.steps:
                with made.eval_mode():
                    row["held_out"] = sum(made.infer_batch(batch(data[:4 * given.rows], given), loss)["loss"])
            line = {"system": "verl_engines", "options": said, "engine": backend, "step": step + 1, **row, **machine("cpu"),
                    "threads": torch.get_num_threads(), "verl": verl.__version__, "transformers": transformers.__version__,
                    "commit": commit()}
            print(json.dumps(line), flush=True)
            if given.output is not None:
                append(given.output, line)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(options().parse_args()))
