"""Trains tiny models with TRL's trainers in as many processes as there are, and writes what each has logged."""
from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "CI": "1"}

import tiny_models
import torch
from test_preference import NUMBERS, dpo, grpo, logged
from test_sft import make
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import megacompile
from megacompile.dpo import DPOTrainer
from megacompile.grpo import GRPOTrainer
from megacompile.sft import SFTTrainer

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
ROWS = {"per_device_train_batch_size": 4 // SIZE}


def tokenizer() -> Any:
    """Its words are numbers."""
    words = ["<pad>", "<eos>", "<unk>", *map(str, range(NUMBERS))]
    tokens = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def run(name: str) -> dict[str, Any]:
    model = megacompile.stream(tiny_models.build(num_hidden_layers=1), device="cpu", compile=False)
    folder = Path(tempfile.mkdtemp())
    match name:
        case "sft":
            trainer = make(SFTTrainer, folder, model, tokenizer(), max_steps=4, **ROWS)
            trainer.train()
        case "dpo":
            trainer = dpo(DPOTrainer, folder, model, tokenizer(), **ROWS)
        case "grpo":  # what is sampled depends on each process's random numbers
            trainer = grpo(GRPOTrainer, folder, model, tokenizer(), beta=0.05, **ROWS)
    found = {"log": logged(trainer), "norm": float(sum(p.detach().double().square().sum() for p in model.parameters()))}
    if (reference := getattr(trainer, "ref_model", None)) is not None:
        reference.megacompile.close()
    model.megacompile.close()
    return found


if __name__ == "__main__":
    results = {name: run(name) for name in sys.argv[1:]}
    Path(os.environ["RESULTS"], f"{RANK}.json").write_text(json.dumps(results))
    if SIZE > 1:
        torch.distributed.barrier()
