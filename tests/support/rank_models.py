"""Steps of a plain loop, for scripts that several processes run."""
from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from rank_decoder import VOCABULARY, decoder
from torch import Tensor

import megacompile

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def streamed(bf16: bool = False, **options: Any) -> Any:
    return megacompile.stream(decoder(bf16), layers="layers", device="cpu", micro_batch_size=2, compile=False, **options)


def adamw(model: Any, **options: Any) -> Any:
    return megacompile.AdamW(model.parameters(), **{"lr": 1e-2, "max_grad_norm": 1.0, **options})


def rows(seed: int) -> dict[str, Tensor]:
    """This rank's rows of the batch of a step."""
    ids = torch.randint(0, VOCABULARY, (8, 9), generator=torch.Generator().manual_seed(seed))[RANK::SIZE]
    return {"input_ids": ids, "labels": ids.clone()}


def copies(model: Any, optimizer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Copies of the weights and of the optimizer's state, to load again."""
    state = optimizer.state_dict()
    copied = {index: {key: torch.as_tensor(value).clone() for key, value in each.items()}
              for index, each in state["state"].items()}
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, {**state, "state": copied}


def steps(model: Any, optimizer: Any, numbers: Iterable[int], whole: bool = False) -> list[float]:
    """The losses of some steps."""
    losses = []
    for number in numbers:
        if whole:
            loss = model.megacompile.train_step(rows(number), optimizer)
        else:
            loss = model(**rows(number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values(model: Any) -> dict[str, list[float]]:
    return {name: tensor.double().flatten().tolist() for name, tensor in model.state_dict().items()}
