"""GRPO of a pretrained model whose completions are those of a real vLLM server, step by step, in float32 on a CPU.

    MEGACOMPILE_VLLM_PYTHON=.../bin/python python benchmarks/grpo_vllm.py MODEL --data FOLDER --kill-at 10

MODEL: a folder with weights and a tokenizer. FOLDER: has alpaca_en_demo.json, which LLaMA-Factory publishes in its `data`.
The server has an environment of its own (`tests/support/real_vllm.py`). The reward is 1 for an empty text and 0 for one of 80
characters or more, so that texts get shorter. `--kill-at` kills the server before the completions of that step, and starts it
again; training waits for it. Prints and appends a JSON line for each step:

- `reward`, `loss`, `step_s`: as TRL logs them.
- `log_probability_difference`: the largest difference of log-probabilities of tokens between the server and the policy.
- `differing`: how many of the server's weights were not the policy's bit for bit when it generated.

The last line has the weights after the last step. Exit code 1 if any weight differed, or if the mean reward of the last five
steps is not larger than that of the first five.
"""
from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from rows import append, commit, machine

import megacompile
from megacompile.grpo import GRPOTrainer

ROOT = Path(__file__).resolve().parents[1]
#: The length of a text in characters at which its reward is 0.
LONGEST = 80


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--instructions", type=int, default=4, help="how many there are to draw from (default: 4)")
    parser.add_argument("--prompts", type=int, default=2, help="instructions of a step (default: 2)")
    parser.add_argument("--samples", type=int, default=6, help="completions of each prompt (default: 6)")
    parser.add_argument("--new-tokens", type=int, default=16, help="the most of a completion (default: 16)")
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--kill-at", type=int, help="the step before which the server is killed")
    parser.add_argument("--output", type=Path, help="a file of rows, to which rows are appended")
    return parser


def shortness(completions: list[Any], **_: Any) -> list[float]:
    texts = [each[0]["content"] if isinstance(each, list) else each for each in completions]
    return [1 - min(len(text), LONGEST) / LONGEST for text in texts]


class Transcript(transformers.TrainerCallback):
    """Compares weights when completions are rewarded, and writes the row of each step."""

    def __init__(self, given: argparse.Namespace, server: Any, model: Any, real_vllm: Any) -> None:
        self.given, self.server, self.model, self.real_vllm = given, server, model, real_vllm
        self.rows: list[dict[str, Any]] = []
        self.differing = 0

    def compare(self, *_: Any, completions: list[Any], **__: Any) -> list[float]:
        """A reward that adds nothing: it is called between the completions and the update."""
        weights = {name: weight.detach() for name, weight in self.model.named_parameters()}
        self.differing = len(self.real_vllm.differing(self.server.weights(), weights))
        return [0.0] * len(completions)

    def on_step_begin(self, _: Any, state: transformers.TrainerState, *__: Any, **___: Any) -> None:
        if state.global_step + 1 == self.given.kill_at:
            self.server.kill()
            self.server.start()

    def on_log(self, _: Any, state: transformers.TrainerState, *__: Any, logs: dict[str, float], **___: Any) -> None:
        if "reward" in logs:
            self.write(step=state.global_step, reward=round(logs["reward"], 4), loss=float(f"{logs['loss']:.4g}"),
                       log_probability_difference=float(f"{logs['sampling/sampling_logp_difference/max']:.2g}"),
                       length=logs["completions/mean_length"], step_s=round(logs["step_time"], 2),
                       **({"killed": True} if state.global_step == self.given.kill_at else {}))

    def write(self, **fields: Any) -> None:
        said = {name: vars(self.given)[name] for name in (
            "instructions", "prompts", "samples", "new_tokens", "learning_rate")} | {"model": self.given.model.name}
        row = {"system": "grpo_vllm", "options": said, **fields, "differing": self.differing, **machine("cpu"),
               "vllm": self.server.version(), "commit": commit()}
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        if self.given.output is not None:
            append(self.given.output, row)


def main(given: argparse.Namespace) -> int:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    real_vllm, generation_server = map(importlib.import_module, ("real_vllm", "generation_server"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    rows = json.loads((given.data / "alpaca_en_demo.json").read_text())
    prompts = [{"prompt": [{"role": "user", "content": row["instruction"]}]} for row in rows
               if not row["input"] and len(row["instruction"]) < LONGEST][:given.instructions]
    model = megacompile.stream(
        transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).train(), device="cpu")
    with (tempfile.TemporaryDirectory() as folder, generation_server.over_sockets(),
          real_vllm.serving(given.model, "float32", longest=256, log=Path(folder) / "vllm.log") as server):
        transcript = Transcript(given, server, model, real_vllm)
        said = trl.GRPOConfig(
            folder, max_steps=given.steps, per_device_train_batch_size=given.prompts * given.samples, use_cpu=True, bf16=False,
            num_generations=given.samples, max_completion_length=given.new_tokens, learning_rate=given.learning_rate,
            lr_scheduler_type="constant", max_grad_norm=1.0, save_strategy="no", report_to=[], logging_steps=1, seed=1,
            disable_tqdm=True, use_vllm=True, vllm_mode="server", vllm_server_base_url=server.url,
            vllm_group_port=real_vllm.free_port(), generation_kwargs={"seed": 1})
        trainer = GRPOTrainer(model=model, reward_funcs=[shortness, transcript.compare], args=said, processing_class=tokenizer,
                              train_dataset=datasets.Dataset.from_list(prompts), callbacks=[transcript])
        trainer.train()
        trainer.vllm_generation.sync_weights()
        transcript.compare(completions=[])
        transcript.write(step=given.steps, after=True)
    model.megacompile.close()
    rewards = [row["reward"] for row in transcript.rows if "reward" in row]
    return int(any(row["differing"] for row in transcript.rows) or sum(rewards[-5:]) <= sum(rewards[:5]))


if __name__ == "__main__":
    sys.exit(main(options().parse_args()))
