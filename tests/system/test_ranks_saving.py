"""Checkpoints and models of several ranks: written once, by all ranks, and read by any number of them."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_models import adamw, decoder, steps, streamed, values

import megacompile
from megacompile.checkpoint import load_checkpoint, save_checkpoint

#: Loads a checkpoint if there is one, trains to the given step, and saves there while two more steps run.
RESUMED = """
import json, os, sys
from pathlib import Path
import torch
from rank_models import *
from megacompile.checkpoint import CheckpointWriter, load_checkpoint

folder, start, stop, bf16 = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "bf16"
model = streamed(bf16)
optimizer = adamw(model)
extra = load_checkpoint(folder, model, optimizer) if start else None
assert extra is None or extra == {"step": start}
found = {"losses": steps(model, optimizer, range(start, stop))}
with CheckpointWriter(folder, model, optimizer) as writer:
    writer.save({"step": stop})
    later = steps(model, optimizer, range(stop, stop + 2))  # updates wait until their tile is read
    path = writer.wait()
load_checkpoint(folder, model, optimizer)
found["same"] = steps(model, optimizer, range(stop, stop + 2)) == later  # to the bit
found["path"], found["random"] = path.name, torch.initial_seed()
(Path(os.environ["RESULTS"]) / f"{RANK}.json").write_text(json.dumps(found))
model.megacompile.close()
"""


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.nightly)])
def test_a_checkpoint_resumes_on_another_number_of_ranks(launch: Callable[..., list[Any]], tmp_path: Path, dtype: str) -> None:
    """1 -> 2 -> 4 -> 1, with the losses of a run that never stopped."""
    folder, counts, losses = str(tmp_path / "run"), (1, 2, 4, 1), []
    for number, ranks in enumerate(counts):
        found = launch(RESUMED, ranks, folder, str(3 * number), str(3 * number + 3), dtype)
        assert all(each == found[0] for each in found) and found[0]["same"]
        losses += found[0]["losses"]
    model = streamed(dtype == "bf16")
    assert losses == pytest.approx(steps(model, adamw(model), range(12)), rel=2e-4 if dtype == "fp32" else 5e-3)
    model.megacompile.close()


#: Everything that reads or replaces the whole model, on two ranks.
WHOLE = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
import megacompile
from jobs import even, qwen2
from rank_models import *
from megacompile.checkpoint import load_checkpoint, save_checkpoint
from megacompile.errors import CheckpointError, UnsupportedError

folder, found = Path(sys.argv[1]), {}

def refused(what, do, kind=UnsupportedError):
    try:
        do()
    except kind as error:
        found[what] = str(error)

model = streamed()
optimizer = adamw(model)
steps(model, optimizer, range(2))
kept, state = copies(model, optimizer)
first = steps(model, optimizer, range(2, 5))
model.load_state_dict(kept)
optimizer.load_state_dict(state)
found["again"] = steps(model, optimizer, range(2, 5)) == first

def clipped():
    model(**rows(9)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()

refused("gradient", clipped)
model.zero_grad()
model.load_state_dict(kept)
optimizer.load_state_dict(state)
found["after"] = steps(model, optimizer, range(2, 5)) == first

def written():
    with torch.no_grad():
        model.head.weight.add_(1)
    model(**rows(9))

refused("weight", written)
model.load_state_dict(kept)
optimizer.load_state_dict(state)
found["after that"] = steps(model, optimizer, range(2, 5)) == first
refused("unwritable", lambda: save_checkpoint("/proc/none", model, optimizer), CheckpointError)
refused("missing", lambda: load_checkpoint(folder / ("run" if RANK else "none"), model, optimizer), CheckpointError)
model.load_state_dict(kept)
found["values"] = values(model)
model.megacompile.close()

model = streamed(bf16=True)
optimizer = adamw(model)
steps(model, optimizer, range(2))
given, state = get_state_dict(model, optimizer)
dcp.save({"model": given, "optimizer": state}, checkpoint_id=folder / "dcp")
expected = steps(model, optimizer, range(2, 5))
model.megacompile.close()
model = streamed(bf16=True)
optimizer = adamw(model)
given, state = get_state_dict(model, optimizer)
dcp.load({"model": given, "optimizer": state}, checkpoint_id=folder / "dcp")
set_state_dict(model, optimizer, model_state_dict=given, optim_state_dict=state, options=StateDictOptions(strict=False))
found["imported"] = steps(model, optimizer, range(2, 5)) == expected
model.megacompile.close()

saved = megacompile.stream(qwen2(), device="cpu", compile=False)
saved.save_pretrained(folder / "model")
torch.distributed.barrier()
model = megacompile.from_pretrained(folder / "model", device="cpu", compile=False).train()
found["read"] = all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in saved.state_dict().items())
batch = even(RANK, 0)
found["loss"] = [model(**batch).loss.item(), saved(**batch).loss.item()]
(Path(os.environ["RESULTS"]) / f"{RANK}.json").write_text(json.dumps(found))
"""


def test_whole_models_and_states_are_read_and_replaced_by_all_ranks(launch: Callable[..., list[Any]], tmp_path: Path) -> None:
    alone = streamed()
    optimizer = adamw(alone)
    steps(alone, optimizer, range(2))
    save_checkpoint(tmp_path / "run", alone, optimizer)
    for rank, found in enumerate(launch(WHOLE, 2, str(tmp_path))):
        assert found["again"] and found["after"] and found["after that"] and found["read"]
        assert found["imported"]
        assert found["loss"][0] == found["loss"][1]
        assert "was changed, but all ranks share its memory" in found["gradient"] and "max_grad_norm" in found["gradient"]
        assert "was changed outside megacompile.AdamW, but all ranks share its memory" in found["weight"]
        for name, wanted in values(alone).items():
            assert found["values"][name] == pytest.approx(wanted, abs=1e-6), name
        assert "nothing can be saved in /proc/none" in found["unwritable"]
        assert ("rank 0 has failed in load_checkpoint" if rank else "none") in found["missing"]
    alone.megacompile.close()


def test_a_checkpoint_of_several_ranks_has_the_form_of_one(launch: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Files, names and values are those that one process writes, so that any process can read them."""
    launch(RESUMED, 2, str(tmp_path / "two"), "0", "2", "fp32")
    model = streamed()
    optimizer = adamw(model)
    steps(model, optimizer, range(2))
    one = save_checkpoint(tmp_path / "one", model, optimizer)
    two = next((tmp_path / "two").iterdir())
    assert sorted(path.name for path in one.iterdir()) == sorted(path.name for path in two.iterdir())
    expected = values(model)
    load_checkpoint(tmp_path / "two", model, optimizer)
    for name, found in values(model).items():
        assert found == pytest.approx(expected[name], abs=1e-6), name
    assert megacompile.__version__ and torch.isfinite(decoder().head.weight).all()
    model.megacompile.close()
