"""Random rounds of two ranks: each is computed as native PyTorch computes it, or refused on both ranks for one reason.

As a script, it is one rank: `python test_rounds.py MODEL FIRST LAST`.
"""
from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from processes import start
from torch import Tensor
from torch.nn.functional import cross_entropy

import megacompile
from megacompile.errors import UnsupportedError

RANKS = 2
#: Rounds of a model that every run of the tests includes. A run on demand has all.
FEW, ALL = 30, 200
#: What a round may be refused for.
NO_ROWS, ONE_DENOMINATOR = "at least one token", "num_items_in_batch is passed on rank"
LEFT_TARGET, TWO_FACTORS = "padding on the left predicts a target", "multiplies its loss by"
Batch = dict[str, Any]


def opt() -> Any:
    """A model that counts positions by its mask."""
    import transformers

    torch.manual_seed(0)
    config = transformers.OPTConfig(vocab_size=jobs.VOCABULARY, hidden_size=16, ffn_dim=24, num_hidden_layers=2,
                                    num_attention_heads=2, max_position_embeddings=64, word_embed_proj_dim=16, dropout=0.0,
                                    attention_dropout=0.0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()


MODELS = {"qwen2": jobs.qwen2, "gpt2": jobs.gpt2, "opt": opt}


@dataclass(frozen=True)
class Round:
    """`batches`: one for each rank. `factors`: what each rank multiplies its loss by. `how`: the loss is the model's ("loop",
    "step"), or that of each rank's own logits ("logits") or of values of its tokens ("tokens"). `refused`: what it must be
    refused for, or ""."""

    batches: list[Batch]
    factors: list[float]
    how: str
    refused: str


def drawn(seed: int) -> Round:
    """A round of ranks that collate alike, each its own rows."""
    draw = random.Random(seed)
    numbers = torch.Generator().manual_seed(seed)
    left, masked, positions, few = (draw.random() < share for share in (0.5, 0.9, 0.2, 0.3))
    how = draw.choice(["loop"] * 6 + ["step", "step", "logits", "tokens"])
    own = how in ("logits", "tokens")
    first_counts = draw.random() < 0.5 and not own  # the values of padding, which predict it, depend on the length
    items = [None] * RANKS if own else draw.choice([[None, None]] * 4 + [[17, 17], [17, 5], [40.0, 3.0], [None, 9]])
    rows = [draw.choice([1, 1, 2, 3, 5]) for _ in range(RANKS)]
    if draw.random() < 0.08:
        rows[draw.randrange(RANKS)] = 0
    batches, before = [], []
    for count, number in zip(rows, items, strict=True):
        longest = draw.randint(3, 14)
        lengths = torch.tensor([longest, *(draw.randint(2, longest) for _ in range(count - 1))][:count])
        at = torch.arange(longest).expand(count, -1)
        shown = at >= longest - lengths[:, None] if left else at < lengths[:, None]
        mask = (shown if masked else torch.ones_like(shown)).long()
        ids = torch.randint(3, jobs.VOCABULARY, mask.shape, generator=numbers) * mask
        labels = ids.masked_fill(mask == 0, -100)
        if few:
            labels[torch.rand(labels.shape, generator=numbers) < 0.7] = -100
        of_first = (mask.cumsum(1) == 1) & (mask[:, :1] == 0)
        if not first_counts:
            labels[of_first] = -100
        before.append(longest if bool((labels[of_first] != -100).any()) else None)
        batch: Batch = {"input_ids": ids, "labels": labels}
        batch |= {"attention_mask": mask} if masked else {}
        batch |= {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if positions and masked else {}
        batches.append(batch | ({} if number is None else {"num_items_in_batch": number}))
    refused = NO_ROWS if 0 in rows else ONE_DENOMINATOR if (items[0] is None) != (items[1] is None) else ""
    if any(length and length < max(batch["labels"].shape[1] for batch in batches) for length in before):
        refused = refused or LEFT_TARGET
    factors = draw.choice([[1.0, 1.0], [1.0, 1.0], [0.5, 0.5], [1.0, 0.25]])
    if how == "loop" and len({*factors}) > 1:
        refused = refused or TWO_FACTORS
    return Round(batches, factors, how, refused)


def log_probabilities(logits: Tensor, following: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, following.clamp(min=0)[:, None])[:, 0]


def loss_of_outputs(model: Any, batch: Batch, how: str) -> Tensor:
    """The sum over a rank's own targets, computed from the model's outputs."""
    given = {name: value for name, value in batch.items() if name not in ("labels", "num_items_in_batch")}
    labels = batch["labels"]
    following = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
    if how == "tokens" and hasattr(model, "megacompile"):
        values: Tensor = model.megacompile.per_token(log_probabilities, given, following=following)
        return -(values * (following != -100)).sum()
    return cross_entropy(model(**given).logits.flatten(0, 1), following.flatten(), reduction="sum")


def run(model: Any, of: Round, rank: int, optimizer: Any) -> Any:
    """[loss, gradients' norms] of a round on one rank, or the first line of the error."""
    batch = of.batches[rank]
    try:
        if of.how == "step":
            return [float(model.megacompile.train_step(batch, optimizer)), []]
        loss = model(**batch).loss if of.how == "loop" else loss_of_outputs(model, batch, of.how)
        (loss * of.factors[rank]).backward()
    except UnsupportedError as error:
        assert all(p.grad is None for p in model.parameters()), "no rank has gradients of a refused round"
        return str(error).splitlines()[0]
    found = [loss.item(), [checked(p.grad) for p in model.parameters()]]
    model.zero_grad()
    return found


def checked(gradient: Tensor) -> list[float]:
    """Numbers that show whether gradients are alike."""
    return [float(gradient.double().norm()), *gradient.double().flatten()[::7].tolist()]


def native(model: Any, of: Round) -> list[Any]:
    """By rank: what `run` returns."""
    model.zero_grad()
    if of.how in ("loop", "step"):
        targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in of.batches)
        given = [{"num_items_in_batch": targets, **batch} for batch in of.batches]
        total = torch.stack([model(**batch).loss for batch in given]).sum()
        losses = [total.item()] * RANKS
        total = total * of.factors[0]
    else:
        each = [loss_of_outputs(model, batch, of.how) for batch in of.batches]
        total = torch.stack([loss * factor for loss, factor in zip(each, of.factors, strict=True)]).mean()
        losses = [loss.item() for loss in each]
    total.backward()
    return [[loss, [] if of.how == "step" else [checked(p.grad) for p in model.parameters()]] for loss in losses]


def main(name: str, first: int, last: int) -> None:
    import alike_models

    from megacompile import api

    api.capture = alike_models.capture_once
    rank = int(os.environ["RANK"])
    model = megacompile.stream(MODELS[name](), device="cpu", compile=False)
    optimizer = megacompile.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)  # every round has the same weights
    found = []
    for seed in range(first, last):
        print("round", seed, flush=True)
        found.append(run(model, drawn(seed), rank, optimizer))
    Path(os.environ["RESULTS"], f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.parametrize(("name", "first", "last"), [
    *((name, 0, FEW) for name in MODELS), *(pytest.param(name, FEW, ALL, marks=pytest.mark.nightly) for name in MODELS)])
def test_every_round_is_that_of_native_training_or_refused_on_all_ranks(tmp_path: Path, name: str, first: int,
                                                                        last: int) -> None:
    ranks = start(Path(__file__), RANKS, tmp_path, [name, str(first), str(last)]).results(900)
    plain: Any = MODELS[name]()
    computed = 0
    for seed, *found in zip(range(first, last), *ranks, strict=True):
        of = drawn(seed)
        refused = [each for each in found if isinstance(each, str)]
        assert len(refused) in (0, RANKS), (seed, found)
        assert bool(refused) == bool(of.refused), (seed, of, refused)
        if refused:
            assert all(of.refused in text for text in refused), (seed, refused)
            continue
        for (loss, gradients), (expected, wanted) in zip(found, native(plain, of), strict=True):
            if expected != expected:
                assert loss != loss, seed
                continue
            computed += 1
            assert loss == pytest.approx(expected, rel=1e-5), (seed, of)
            assert_alike(gradients, wanted, (seed, of))
    assert computed > (last - first) / 2


def assert_alike(found: list[list[float]], wanted: list[list[float]], where: object) -> None:
    assert len(found) == len(wanted), where
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5 * (1 + other[0])), where


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
