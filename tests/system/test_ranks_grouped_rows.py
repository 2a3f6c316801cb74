"""Rows of all ranks that cannot be packed are grouped by length, and dealt to the ranks."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import uneven_models
from processes import Job

#: Each rank has another number of rows, of other lengths. Rank 0 has the longest.
LENGTHS = ([60, 5, 9, 30, 8], [7, 12, 3, 15, 40, 6, 2, 11])
SCRIPT = """
import json, os, sys, torch
from pathlib import Path
import megacompile, uneven_models
from megacompile.inputs import packed_layout, rounded_lengths
from test_ranks_grouped_rows import batch_of

for module in (packed_layout, rounded_lengths):
    module.TOKENS_OF_A_GROUP = uneven_models.COST
rank, grouped = int(os.environ["RANK"]), sys.argv[1] == "grouped"
native = uneven_models.build()
model = megacompile.stream(native, device="cpu", repack=uneven_models.LONGEST if grouped else False)
optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
losses = []
for step in range(4):
    batch = batch_of(rank, step)
    if step % 2:
        losses.append(float(model.megacompile.train_step(batch, optimizer)))
        continue
    loss = model(**batch).loss
    loss.backward()
    losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
model.megacompile.synchronize()
plan = model.megacompile.plan
torch.save({name: p.detach().clone() for name, p in model.named_parameters()}, Path(os.environ["RESULTS"], f"{rank}.pt"))
Path(os.environ["RESULTS"], f"{rank}.json").write_text(json.dumps([losses, plan.sizes, plan.tokens]))
model.megacompile.close()
"""


def batch_of(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Rows of this rank, padded on the right."""
    lengths = torch.tensor(LENGTHS[rank]).roll(step)
    ids = torch.randint(1, 64, (len(lengths), int(lengths.max())), generator=torch.Generator().manual_seed(10 * step + rank))
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.fixture(scope="module")
def native() -> tuple[list[float], dict[str, Any]]:
    """Losses and weights of PyTorch with the rows of both ranks."""
    model = uneven_models.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        batches = [batch_of(rank, step) for rank in range(2)]
        items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        loss = torch.stack([model(**batch, use_cache=False, num_items_in_batch=items).loss for batch in batches]).sum()
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.named_parameters())


@pytest.mark.parametrize("how", ["grouped", pytest.param("padded", marks=pytest.mark.nightly)])
def test_ranks_train_as_one_process_and_compute_less_padding(start_job: Callable[..., Job], how: str,
                                                            native: tuple[list[float], dict[str, Any]]) -> None:
    job = start_job(SCRIPT, 2, how)
    results = job.results(240)
    losses, weights = native
    for rank, (found, sizes, tokens) in enumerate(results):
        assert found == pytest.approx(losses, abs=1e-4)
        trained = torch.load(job.folder / f"{rank}.pt")
        for name, expected in weights.items():
            torch.testing.assert_close(trained[name], expected.detach(), rtol=2e-3, atol=2e-4)
        assert (len({length for _, length in sizes}) > 1) == (how == "grouped")
        useful = sum(map(sum, LENGTHS)) // 2
        assert tokens < 2 * useful if how == "grouped" else tokens == 8 * 60, (sizes, useful)
