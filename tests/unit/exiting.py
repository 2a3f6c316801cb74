"""A program that ends, and whose forked child ends, while its lanes are at work. `python exiting.py` (see test_exit.py)."""
from __future__ import annotations

import os
import sys
import time

import torch
from torch import Tensor, nn

import megacompile


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
executor = model.megacompile.streamed.executor
executor.delay = lambda lane: time.sleep(0.02)
optimizer.step()  # in flight at the end
loss = model(input_ids=ids, labels=ids)  # whose backward never comes
optimizer.step()
print("ending", executor.check() is None, flush=True)
