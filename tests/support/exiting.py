"""A program that ends, and whose forked child ends, while its lanes are at work. `python exiting.py` (see test_exit.py).

With the argument `failed`, it ends because another rank has failed.
"""
from __future__ import annotations

import os
import sys
import time

import engine
import torch
from torch import Tensor, fx, nn

import megacompile
from megacompile.errors import RankError


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


model = megacompile.stream(Model().train(), device="cpu")
optimizer = megacompile.AdamW(model.parameters())
ids = torch.randint(0, 16, (2, 6))
model(input_ids=ids, labels=ids).backward()
child = os.fork()
if child == 0:
    sys.exit(0)  # with everything that an interpreter does at its end
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the forked child failed"
executor = engine.executor(model)
if sys.argv[1:] == ["failed"]:
    matrix = torch.ones(1000, 1000)

    def compute(node: fx.Node) -> None:
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            torch.mm(matrix, matrix)

    def another_rank_has_failed() -> None:
        raise RankError("rank 1 has ended")

    executor.probe, executor.check_others = compute, another_rank_has_failed
    try:
        model(input_ids=ids, labels=ids)
    except RankError as error:
        print(error, flush=True)
    sys.exit(0)
executor.delay = lambda lane: time.sleep(0.02)
optimizer.step()  # in flight at the end
loss = model(input_ids=ids, labels=ids)  # whose backward never comes
optimizer.step()
print("ending", executor.check() is None, flush=True)
