"""Trains tiny models with trainers and losses in as many processes as there are, without and with streaming, and writes the
losses and norms of both.

Arguments: cases, each `trainer/loss/even|uneven/all|each`: whether rows have one length, and whether losses are divided by the
tokens of all processes or of each. A loss that ends in "@1" has no gradient accumulation."""
from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "CI": "1"}

import tiny_models
import torch
import trained
import transformers
import trl
from datasets import Dataset, load_from_disk
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import AutoModelForCausalLM, MixtralConfig
from trl.experimental import online_dpo as online_dpo_of_trl
from trl.trainer import kto_trainer
from trl_run import RANK, tokenizer

import megacompile
import megacompile.dpo
import megacompile.grpo
import megacompile.online_dpo
import megacompile.rloo
import megacompile.sft
import megacompile.trainer
from megacompile.trainers.fused_head import streamed_heads

NUMBERS = tiny_models.VOCABULARY - 3
SHARED = {**trained.ARGUMENTS, "bf16": False, "max_steps": 2, "per_device_train_batch_size": 2, "warmup_steps": 0,
          "learning_rate": 5e-3, "dataloader_drop_last": True, "seed": 1}


#: How processes get their rows.
ACCELERATORS = {"dispatched": {"dispatch_batches": True}, "split": {"split_batches": True},
                "dispatched_split": {"dispatch_batches": True, "split_batches": True},
                "unseeded": {"use_seedable_sampler": False, "even_batches": False, "non_blocking": True}}


def padded_to_one_length(rows: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Batches that can be concatenated, to be sent by one process."""
    return {key: pad(value, (0, 12 - value.shape[1]), value=-100 if key == "labels" else 0)
            for key, value in trained.padded(rows).items()}


def lengths(uneven: bool) -> list[int]:
    """Lengths of rows, which differ between processes and batches."""
    return [(2, 9, 3, 7, 12, 2, 5, 10)[row % 8] if uneven else 6 for row in range(16)]


def count(*span: int) -> str:
    return " ".join(str(n % NUMBERS) for n in range(*span))


def router_model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(MixtralConfig(
        vocab_size=tiny_models.VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, num_local_experts=4, output_router_logits=True,
        router_aux_loss_coef=0.5), attn_implementation="eager").train()


def loss_of_logits(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The mean of squared negative log-likelihoods."""
    each = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return each.square().sum() / num_items_in_batch


def trainer_of(base: type, loss: str) -> type:
    """A subclass as users write it."""
    class OfLogits(base):  # type: ignore[misc, valid-type]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            labels = inputs.pop("labels")
            found = loss_of_logits(model(**inputs), labels, num_items_in_batch)
            return found * self.accelerator.num_processes if self.args.average_tokens_across_devices else found

    class OfModels(base):  # type: ignore[misc, valid-type]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

    class Uncounted(base):  # type: ignore[misc, valid-type]
        """Leaves out num_items_in_batch."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
            return model(**inputs).loss / self.current_gradient_accumulation_steps

    class Separate(base):  # type: ignore[misc, valid-type]
        whole_steps = False

    return {"of_logits": OfLogits, "of_models": OfModels, "uncounted": Uncounted, "separate": Separate}.get(loss, base)


def plain(streamed: bool, model: Any, loss: str, uneven: bool, settings: dict[str, Any]) -> Any:
    base: Any = megacompile.trainer.Trainer if streamed else transformers.Trainer
    given: dict[str, Any] = {"compute_loss_func": loss_of_logits} if loss == "loss_func" else {}
    if loss == "smoothed":
        settings["label_smoothing_factor"] = 0.2
    collate = trained.padded
    if loss in ACCELERATORS:
        settings["accelerator_config"] = ACCELERATORS[loss]
        collate = padded_to_one_length
    rows = [{"input_ids": (torch.arange(length) + row * 7) % NUMBERS} for row, length in enumerate(lengths(uneven))]
    return trainer_of(base, loss)(model=model, args=transformers.TrainingArguments(**settings), train_dataset=rows,
                                  data_collator=collate, **given)


def sft(streamed: bool, model: Any, loss: str, uneven: bool, settings: dict[str, Any]) -> Any:
    given: dict[str, Any] = {"compute_loss_func": loss_of_logits} if loss == "loss_func" else {}
    if loss == "smoothed":
        settings["label_smoothing_factor"] = 0.2
    settings["loss_type"] = "dft" if loss == "dft" else "nll"
    if loss in ("packed", "padding_free"):
        settings |= {"packing": True, "max_length": 16} if loss == "packed" else {"padding_free": True, "max_length": None}
        model.config.use_cache = False
    rows = Dataset.from_list([{"prompt": count(row, row + 3), "completion": " " + count(row + 3, row + 3 + length)}
                              for row, length in enumerate(lengths(uneven) * 2)])
    kind = megacompile.sft.SFTTrainer if streamed else trl.SFTTrainer
    return kind(model=model, args=trl.SFTConfig(**settings), train_dataset=rows, processing_class=tokenizer(), **given)


def dpo(streamed: bool, model: Any, loss: str, uneven: bool, settings: dict[str, Any]) -> Any:
    rows = Dataset.from_list([{"prompt": count(row, row + 3), "chosen": " " + count(row + 3, row + 3 + length),
                               "rejected": " " + count(row + 20, row + 20 + (length if not uneven else 13 - length))}
                              for row, length in enumerate(lengths(uneven))])
    settings |= {"loss_type": loss.split("+"), "label_smoothing": 0.1 if loss in ("exo_pair", "robust") else 0.0}
    kind = megacompile.dpo.DPOTrainer if streamed else trl.DPOTrainer
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.2)
    reference = megacompile.stream(other, device="cpu", compile=False) if streamed else other
    return kind(model=model, ref_model=reference, args=trl.DPOConfig(**settings), train_dataset=rows,
                processing_class=tokenizer())


def kto(streamed: bool, model: Any, loss: str, uneven: bool, settings: dict[str, Any]) -> Any:
    rows = Dataset.from_list([{"prompt": count(row, row + 3), "completion": " " + count(row + 3, row + 3 + length),
                               "label": row % 3 > 0} for row, length in enumerate(lengths(uneven))])
    folder = Path(os.environ["RESULTS"], f"rows-{streamed}-{loss}-{uneven}-{settings['average_tokens_across_devices']}")
    given = trl.KTOConfig(**settings, loss_type=loss, precompute_ref_log_probs=True)
    with given.main_process_first():  # it computes the reference's log-probabilities, and the others read them beside the rows
        if not folder.exists():
            rows.save_to_disk(folder)
    kind = type("KTOTrainer", (megacompile.trainer.Trainer, trl.KTOTrainer), {}) if streamed else trl.KTOTrainer
    with streamed_heads(kto_trainer) if streamed else contextlib.nullcontext():
        return kind(model=model, args=given, train_dataset=load_from_disk(folder), processing_class=tokenizer())


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(sum(int(word) % 2 == 0 for word in text.split() if word.isdigit())) for text in completions]


def online(name: str, streamed: bool, model: Any, loss: str, uneven: bool, settings: dict[str, Any]) -> Any:
    rows = Dataset.from_list([{"prompt": count(row, row + length)} for row, length in enumerate(lengths(uneven))])
    settings |= dict(num_generations=2, max_completion_length=4, beta=0.0)
    if name == "grpo":
        settings["loss_type"] = loss
        if loss == "luspo":
            settings["importance_sampling_level"] = "sequence"
    theirs, ours = {"grpo": (trl.GRPOTrainer, megacompile.grpo.GRPOTrainer),
                    "rloo": (trl.RLOOTrainer, megacompile.rloo.RLOOTrainer)}[name]
    config = trl.GRPOConfig if name == "grpo" else trl.RLOOConfig
    return (ours if streamed else theirs)(model=model, reward_funcs=reward, args=config(**settings), train_dataset=rows,
                                          processing_class=tokenizer())


def online_dpo(streamed: bool, model: Any, loss: str, uneven: bool, settings: dict[str, Any]) -> Any:
    rows = Dataset.from_list([{"prompt": count(row, row + length)} for row, length in enumerate(lengths(uneven))])
    kind = megacompile.online_dpo.OnlineDPOTrainer if streamed else online_dpo_of_trl.OnlineDPOTrainer
    return kind(model=model, reward_funcs=reward, args=online_dpo_of_trl.OnlineDPOConfig(
        **settings, loss_type=loss, max_new_tokens=4, gradient_checkpointing=False), train_dataset=rows,
        processing_class=tokenizer())


def run(streamed: bool, case: str) -> list[list[float]]:
    name, loss, rows, averaged = case.split("/")
    model = router_model() if loss.startswith("router") else tiny_models.build(num_hidden_layers=1)
    settings = {**SHARED, "output_dir": tempfile.mkdtemp(), "average_tokens_across_devices": averaged == "all"}
    if loss.endswith("@1"):
        loss, settings["gradient_accumulation_steps"] = loss[:-2], 1
    if streamed:
        model = megacompile.stream(model, device="cpu", compile=False)
    match name:
        case "trainer":
            made = plain(streamed, model, loss, rows == "uneven", settings)
        case "sft":
            made = sft(streamed, model, loss, rows == "uneven", settings)
        case "dpo":
            made = dpo(streamed, model, loss, rows == "uneven", settings)
        case "kto":
            made = kto(streamed, model, loss, rows == "uneven", settings)
        case "online_dpo":
            made = online_dpo(streamed, model, loss, rows == "uneven", settings)
        case _:
            made = online(name, streamed, model, loss, rows == "uneven", settings)
    made.train()
    for each in (model, getattr(made, "ref_model", None)):
        if streamed and each is not None:
            each.megacompile.close()
    return [[entry["loss"], entry["grad_norm"]] for entry in made.state.log_history if "grad_norm" in entry]


if __name__ == "__main__":
    results: dict[str, Any] = {}
    for case in sys.argv[1:]:
        results[case] = []
        for streamed in (False, True):
            results[case].append(run(streamed, case))
            torch.distributed.barrier()
    Path(os.environ["RESULTS"], f"{RANK}.json").write_text(json.dumps(results))
    torch.distributed.barrier()
