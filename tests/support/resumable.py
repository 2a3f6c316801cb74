"""Training runs that can be stopped anywhere: a model that is captured quickly, and a loop that draws from all generators."""
from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
import torch
from tiny_models import batch
from torch import Tensor, nn

import megacompile


class Decoder(nn.Module):
    """Captured in half the time of a model of transformers; with a frozen parameter, one that is not read, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(tiny_models.VOCABULARY, 16), nn.Linear(16, tiny_models.VOCABULARY)
        self.layers = nn.ModuleList(nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 16), nn.SiLU()) for _ in range(3))
        self.layers[0][0].weight.requires_grad_(False)
        self.unread = nn.Parameter(torch.zeros(3))
        self.register_buffer("scale", torch.ones(16, dtype=torch.bfloat16))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(input_ids) * self.scale
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


class Streamed:
    """A streamed model, made when it is asked for; and its first weights."""

    def __init__(self, **options: Any) -> None:
        self.options, self.model = options, None

    def fresh(self) -> Any:
        """The model as it was made; whatever a test did to it is undone."""
        if getattr(self.model, "megacompile", None) is None:
            torch.manual_seed(0)
            plain = Decoder().bfloat16()
            self.start = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
            self.model = megacompile.stream(plain, layers="layers", device="cpu", micro_batch_size=2, **self.options)
        assert self.model is not None
        self.model.load_state_dict(self.start)
        self.model.zero_grad()
        return self.model


def steps(model: Any, optimizer: Any, seeds: range, whole: bool = False) -> None:
    """A step for each seed of a batch, in a loop or as whole steps."""
    for seed in seeds:
        given = batch(seed, rows=4)
        if whole:
            model.megacompile.train_step(given, optimizer)
            continue
        model(**given).backward()
        optimizer.step()
        optimizer.zero_grad()


class Run:
    """A training run that draws its batches from the global random number generators."""

    def __init__(self, model: Any, overlap: str | None = None, whole: bool = False) -> None:
        self.model, self.whole = model, whole
        decayed = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() == 1]
        self.optimizer = megacompile.AdamW([{"params": rest, "weight_decay": 0.0}, {"params": decayed}], lr=1e-2, eps=1e-4,
                                           max_grad_norm=None if overlap else 0.5, overlap=overlap)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 7], gamma=0.3)

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            data = batch(int(torch.randint(1000, ())) + random.randrange(1000) + np.random.randint(1000))
            if self.whole:
                loss = self.model.megacompile.train_step(data, self.optimizer)
            else:
                loss = self.model(**data)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def masters(self) -> dict[str, Tensor]:
        return {name: self.optimizer.master(p) for name, p in self.model.named_parameters()}

    def moments(self) -> dict[str, Tensor]:
        self.optimizer.state_dict()
        return {f"{name} {key}": self.optimizer.state[p][key].clone() for name, p in self.model.named_parameters()
                if self.optimizer.state[p] for key in ("exp_avg", "exp_avg_sq")}


def load(path: Path, run: Run) -> Any:
    """Goes on from a checkpoint; returns its `extra`."""
    return megacompile.load_checkpoint(path, run.model, run.optimizer, scheduler=run.scheduler)
