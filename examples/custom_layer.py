"""Train your own decoder: without transformers, with your own layer and other argument names.

    python examples/custom_layer.py

A model streams if its layers run in order, each on the output of the one before. The layer here mixes tokens with a gated
running average instead of attention. `layers` names the stack; otherwise `stream` takes the `nn.ModuleList` with the most
parameters, here the embeddings. `example` gives the arguments of a batch, since they are not `input_ids` and `labels`.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megacompile

VOCABULARY, WIDTH, DEPTH, LENGTH = 64, 32, 6, 32


class RunningAverage(nn.Module):
    """Each token gets the mean of the tokens up to it, gated by its own value."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.value, self.gate, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        normed = self.norm(x)
        mean = self.value(normed).cumsum(1) / positions
        return x + self.out(mean * F.silu(self.gate(normed)))


class Decoder(nn.Module):
    """Returns logits, and the loss if there are targets."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(VOCABULARY, WIDTH) for _ in range(16))  # 16 hashes per token
        self.decoder = nn.ModuleDict({"blocks": nn.ModuleList(RunningAverage() for _ in range(DEPTH))})
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = sum(table(tokens * (2 * i + 1) % VOCABULARY) for i, table in enumerate(self.tables))
        positions = torch.arange(1, tokens.shape[1] + 1, device=tokens.device).unsqueeze(-1)
        for block in self.decoder["blocks"]:
            x = block(x, positions)
        logits = self.head(x)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def batch() -> dict[str, Tensor]:
    """Sequences that count up from a random token, as tokens and targets [8, LENGTH], int64."""
    tokens = (torch.randint(VOCABULARY, (8, 1)) + torch.arange(LENGTH + 1)) % VOCABULARY
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


torch.manual_seed(0)
model = megacompile.stream(Decoder(), layers="decoder.blocks", example=batch(), device="cpu", micro_batch_size=4)
optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)

for step in range(20):
    _, loss = model(**batch())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item():.3f}")

model.megacompile.close()  # leaves the plain module with its trained weights
sequence = torch.tensor([[7, 8, 9]])
with torch.no_grad():
    for _ in range(5):
        logits, _ = model(sequence)
        sequence = torch.cat([sequence, logits[:, -1:].argmax(-1)], dim=1)
print(f"continues {sequence[0, :3].tolist()} with {sequence[0, 3:].tolist()}")
