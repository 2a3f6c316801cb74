"""Trains tiny models with transformers' Trainer in as many processes as there are, and writes what each has seen."""
from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import tiny_models
import torch
import trained
from torch.nn.functional import cross_entropy

import megacompile
from megacompile.trainer import Trainer

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class InOrder(Trainer):
    """Takes the rows in order: one process with twice the rows has the batches of two."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Separate(InOrder):
    whole_steps = False


def loss_of_logits(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    found = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return found / num_items_in_batch


def of_one_length(rows: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    return [{key: value[:9] for key, value in row.items()} for row in rows]


def run(name: str, model: Any) -> dict[str, Any]:
    rows = trained.sequences(24)
    changes: dict[str, Any] = dict(per_device_train_batch_size=4 // SIZE, max_steps=5)
    given: dict[str, Any] = {}
    trainer = InOrder
    match name:
        case "separate":
            trainer = Separate
        case "tail":  # seven rows: the last batch of an epoch is filled with the first rows
            rows = rows[:7] if SIZE > 1 else [*rows[:7], *rows[:1]]
            changes.update(gradient_accumulation_steps=1, max_steps=-1, num_train_epochs=2)
        case "outputs":
            given["compute_loss_func"] = loss_of_logits
        case "uncounted":  # with as many tokens in each batch, the mean of the processes' losses is that of all tokens
            trainer, rows = Separate, of_one_length(rows)
            changes.update(average_tokens_across_devices=False)
        case "evaluation":
            changes.update(eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4 // SIZE)
            given.update(eval_dataset=of_one_length(trained.sequences(8, seed=1)), compute_metrics=accuracy)
    folder = Path(os.environ["RESULTS"] if SIZE > 1 else tempfile.mkdtemp())
    if name == "resumed":
        trained.run(trainer, folder, model, given={"train_dataset": rows}, **changes, save_strategy="steps", save_steps=3)
        wait_for_all()
        model.load_state_dict(tiny_models.build().state_dict())
        changes["resume"] = str(folder / "checkpoint-3")
    made = trained.run(trainer, folder, model, given={"train_dataset": rows, **given}, **changes)
    weights = {key: value.double().flatten()[::7].tolist() for key, value in tiny_models.weights(model).items()}
    return {"history": made.state.log_history, "steps": made.state.global_step, "weights": weights}


def accuracy(outputs: Any) -> dict[str, float]:
    logits, labels = torch.tensor(outputs.predictions), torch.tensor(outputs.label_ids)
    return {"accuracy": float((logits[:, :-1].argmax(-1) == labels[:, 1:]).float().mean()), "rows": len(labels)}


def all_runs(names: list[str]) -> dict[str, Any]:
    """Runs one after the other, with one model that gets its first weights back."""
    model = megacompile.stream(tiny_models.build(), device="cpu", micro_batch_size=1, compile=False)
    results = {}
    for name in names:
        model.load_state_dict(tiny_models.build().state_dict())
        model.zero_grad()
        wait_for_all()
        results[name] = run(name, model)
        wait_for_all()
    model.megacompile.close()
    return results


def wait_for_all() -> None:
    if SIZE > 1:
        torch.distributed.barrier()


if __name__ == "__main__":
    Path(os.environ["RESULTS"], f"{RANK}.json").write_text(json.dumps(all_runs(sys.argv[1:])))
