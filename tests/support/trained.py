"""Runs of trainers on tiny models."""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCABULARY
from torch import Tensor
from transformers import TrainingArguments, default_data_collator


def sequences(rows: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Sequences of 9 to 12 tokens that count upwards from anywhere, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(VOCABULARY, (rows,), generator=generator).tolist()
    return [{"input_ids": (torch.arange(9 + row % 4) + start) % VOCABULARY} for row, start in enumerate(starts)]


def padded(rows: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """A batch padded on the right to its longest sequence, as data collators do it."""
    longest = max(len(row["input_ids"]) for row in rows)
    filled = [{key: torch.nn.functional.pad(row["input_ids"] if key != "attention_mask" else torch.ones_like(row["input_ids"]),
                                            (0, longest - len(row["input_ids"])), value=-100 if key == "labels" else 0)
               for key in ("input_ids", "attention_mask", "labels")} for row in rows]
    return default_data_collator(filled)


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), **{**ARGUMENTS, **changes})


#: What all runs share. Clipping is at work in most steps, and the warm-up ends early.
ARGUMENTS: dict[str, Any] = dict(
    use_cpu=True, report_to="none", disable_tqdm=True, dataloader_pin_memory=False, save_strategy="no", logging_steps=1,
    max_steps=4, per_device_train_batch_size=3, gradient_accumulation_steps=2, learning_rate=2e-2, weight_decay=0.1,
    warmup_steps=3, lr_scheduler_type="constant_with_warmup", max_grad_norm=0.5)


def run(trainer: type, folder: Path, model: Any, resume: str | None = None, given: Mapping[str, Any] | None = None,
        **changes: Any) -> Any:
    """A trainer that has trained. `given`: other arguments of its constructor; `changes`: of TrainingArguments."""
    made = trainer(model=model, args=arguments(folder, **changes), **{
        "train_dataset": sequences(60), "eval_dataset": sequences(5, seed=1), "data_collator": padded, **(given or {})})
    made.train(resume_from_checkpoint=resume)
    return made


def curve(trainer: Any, *keys: str) -> Tensor:
    """What was logged of each step, [steps, keys]."""
    return torch.tensor([[entry[key] for key in keys] for entry in trainer.state.log_history if "loss" in entry])
