"""Train, get killed in the middle, and resume.

    python examples/resume.py

A loop that can be stopped anywhere needs two additions: it loads the latest checkpoint if there is one, and it saves regularly,
during training. Here the loop runs twice: in a child process that is killed in step 13, and then in this process.
"""
from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megacompile


class Counter(nn.Module):
    """Learns to count: the next token is one more than this one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 32), nn.SiLU()) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def train(folder: str, steps: int, killed_at: int | None = None) -> None:
    model = megacompile.stream(Counter(), layers="layers", device="cpu")
    optimizer = megacompile.AdamW(model.parameters(), lr=0.02, max_grad_norm=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    done = 0
    if megacompile.latest_checkpoint(folder) is not None:
        done = megacompile.load_checkpoint(folder, model, optimizer, scheduler=scheduler)["done"]
        print(f"continues after step {done}", flush=True)
    with megacompile.CheckpointWriter(folder, model, optimizer, scheduler=scheduler, keep=2) as writer:
        for step in range(done + 1, steps + 1):
            tokens = (torch.randint(64, (8, 1)) + torch.arange(17)) % 64  # a resume also restores the random state
            loss = model(input_ids=tokens[:, :-1], labels=tokens[:, 1:])
            loss.backward()
            if step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
            if step % 5 == 0:
                writer.save(extra={"done": step})  # returns at once; put other state of the loop into `extra`
    model.megacompile.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        first = multiprocessing.get_context("fork").Process(target=train, args=(folder, 30, 13))
        first.start()
        first.join()
        print(f"the first process was killed by signal {-(first.exitcode or 0)}")
        train(folder, 30)
