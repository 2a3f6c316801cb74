"""What several ranks cannot train together is refused on every rank, before anything runs, and training goes on."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Each rank tries every batch, and writes what it was told: None, or the error.
SCRIPT = """
import contextlib, json, os, time
from pathlib import Path
from unittest import mock
import engine, torch, transformers
import torch.nn.functional as F
import megacompile
from megacompile.errors import UnsupportedError
from megacompile.runtime import ranks
from jobs import experts, qwen2
from test_heads import Pooled
from test_own_models import IDS, of
from test_packing import counts_from_two

rank = int(os.environ["RANK"])

def ids(rows, length):
    return torch.randint(1, 64, (rows, length), generator=torch.Generator().manual_seed(rank))

def labeled(rows, length, **more):
    return {"input_ids": ids(rows, length), "labels": ids(rows, length), **more}

def both_ways():
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                                      num_attention_heads=2, num_key_value_heads=1, is_causal=False)
    return transformers.AutoModelForCausalLM.from_config(config)

def routed():
    model = experts()
    model.config.output_router_logits = True
    return model

def classifier():
    config = transformers.Qwen2Config(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                                      num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, num_labels=3)
    return transformers.Qwen2ForSequenceClassification(config)

#: Rank 1 comes first, and when it looks, rank 0 has come and has refused its batch already.
@contextlib.contextmanager
def looking_late():
    if rank == 0:
        time.sleep(0.1)
        yield
    else:
        with mock.patch.multiple(ranks, _AWAKE_S=0.0, _FIRST_S=0.3, _LONGEST_S=0.3, _LOOK_S=0.0):
            yield

classes = torch.tensor([0, 2, 1])
#: What is tried -> (model, this rank's batch, the batch that it would take).
TRIED = {
    "labels on one rank": (qwen2(), labeled(2, 5) if rank else {"input_ids": ids(2, 5)}, labeled(2, 5)),
    "denominator on one rank": (qwen2(), labeled(2, 5, **({"num_items_in_batch": 7} if rank else {})), labeled(2, 5)),
    "no rows on one rank": (qwen2(), labeled(2 * rank, 5), labeled(2, 5)),
    "positions on one rank": (counts_from_two(),
                              labeled(2, 5, **({"position_ids": torch.arange(5)[None]} if rank else {})), labeled(2, 5)),
    "numbers that are no tokens": (qwen2(), {**labeled(2, 5), **({"input_ids": ids(2, 5).float()} if rank else {})},
                                   labeled(2, 5)),
    "rows of an average": (routed(), labeled(2 + rank, 5), labeled(2, 5)),
    "padding that tokens see": (both_ways(), labeled(2, 5 + rank), labeled(2, 5)),
    "scores of longer sequences": (classifier(), {"input_ids": ids(3, 5 + rank)}, {"input_ids": ids(3, 5), "labels": classes}),
    "rows that read each other": (of(lambda self, x: self.first(x) - x.mean(0, keepdim=True))(),
                                  {"input_ids": IDS, "labels": IDS}, None),
    "another loss": (Pooled(lambda scores, labels: F.cross_entropy(scores, labels).square(), 3),
                     {"input_ids": ids(3, 5), "labels": classes}, None),
}
found = {}
for what, (model, batch, good) in TRIED.items():
    model = megacompile.stream(model, device="cpu", compile=False, example=batch if good is None else None)
    try:
        with looking_late():
            model(**batch)
    except UnsupportedError as error:
        found[what] = str(error)
    if good is not None:
        assert (getattr(model(**good), "loss")).isfinite()
        engine.rank_group(model).agree(what)  # each rank has made as many calls
    model.megacompile.close()
(Path(os.environ["RESULTS"]) / f"{rank}.json").write_text(json.dumps(found))
"""

SAYS = {
    "labels on one rank": "the ranks' batches have different arguments",
    "denominator on one rank": "num_items_in_batch is passed on rank 1 and not on rank 0",
    "no rows on one rank": "batch arguments must share one [batch, length] of at least one token",
    "positions on one rank": "only some ranks pass position_ids, and the model assumes other values without it: pass",
    "numbers that are no tokens": "input_ids must be an integer tensor [batch, length]",
    "rows of an average": "the model's loss is an average over rows, and the ranks have batches of 2 x 5, 3 x 5: give every",
    "padding that tokens see": "and the model would see padding: pad all of them to one length",
    "scores of longer sequences": "and the model would see padding: pad all of them to one length",
    "rows that read each other": "the model mixes sequences of a batch, so ranks cannot share a batch: train with one process",
    "another loss": "the model's loss is not a cross entropy over tokens, so that it cannot be divided among ranks",
}


def test_what_ranks_cannot_train_together_is_refused_on_every_rank(launch: Callable[..., list[Any]]) -> None:
    for found in launch(SCRIPT, 2):
        assert found.keys() == SAYS.keys()
        for what, says in SAYS.items():
            assert says in found[what].splitlines()[0], (what, found[what])
