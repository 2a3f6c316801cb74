"""What a closed or forgotten model leaves in the process."""
from __future__ import annotations

import copy
import gc
import mmap
import multiprocessing
import os
import statistics
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import engine
import pytest
import tiny_models
import torch
from left_behind import objects_left
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

import megacompile
from megacompile.errors import LaneError
from megacompile.runtime.memory.store import SharedTileMemory
from megacompile.runtime.memory.tiles import TileLayout
from megacompile.streaming import streamed
from megacompile.system.host_memory import SharedMemory

BATCH = tiny_models.batch(1, rows=4, length=16)


def raised(act: Callable[[], Any]) -> BaseException:
    """What it raises, with the traceback."""
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError("it raises nothing")


def unrelated(model: Any) -> None:
    raise ValueError("a frame of this traceback has the model")


def failing_backward(model: Any) -> BaseException:
    loss = model(**BATCH).loss
    engine.probe(model, mock.Mock(side_effect=RuntimeError("in a lane")))
    return raised(loss.backward)


def after_backward(model: Any) -> Any:
    output = model(**BATCH)
    output.loss.backward()
    return output


def native(model: Any) -> nn.Module:
    with model.megacompile.on_device() as found:
        return found


def trainer(model: Any, folder: Path) -> Any:
    from transformers import TrainingArguments, default_data_collator

    from megacompile.trainer import Trainer

    rows = [{name: tensor[row] for name, tensor in BATCH.items()} for row in range(4)]
    args = TrainingArguments(str(folder), max_steps=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True)
    made = Trainer(model=model, args=args, train_dataset=rows, data_collator=default_data_collator)
    made.train()
    return made


#: What a user may still hold when a model is closed, made of a model, its optimizer and a folder.
HELD: dict[str, Callable[[Any, Any, Path], Any]] = {
    "nothing": lambda model, optimizer, _: None,
    "the loss of a backward": lambda model, optimizer, _: after_backward(model).loss,
    "a loss without its backward": lambda model, optimizer, _: model(**BATCH).loss,
    "logits": lambda model, optimizer, _: model(input_ids=BATCH["input_ids"]).logits,
    "values of tokens": lambda model, optimizer, _: model.megacompile.per_token(
        partial(torch.logsumexp, dim=-1), {"input_ids": BATCH["input_ids"]}),
    "the model's output": lambda model, optimizer, _: after_backward(model),
    "the handle": lambda model, optimizer, _: model.megacompile,
    "the optimizer": lambda model, optimizer, _: optimizer,
    "the optimizer's state": lambda model, optimizer, _: optimizer.state_dict(),
    "a state's views": lambda model, optimizer, _: [state["exp_avg"] for state in optimizer.state.values()],
    "a parameter's state": lambda model, optimizer, _: optimizer.state[next(model.parameters())],
    "gradients": lambda model, optimizer, _: [after_backward(model), *(p.grad for p in model.parameters())][1:],
    "an unrelated exception": lambda model, optimizer, _: raised(lambda: unrelated(model)),
    "a refusal": lambda model, optimizer, _: raised(lambda: model(**BATCH, no_such_argument=1)),
    "the exception of a backward": lambda model, optimizer, _: failing_backward(model),
    "the model of on_device": lambda model, optimizer, _: native(model),
    "a recording": lambda model, optimizer, _: model.megacompile.record(),
    "a compiled shape": lambda model, optimizer, _: model.megacompile.compiled(),
    "the trainer": lambda model, optimizer, folder: trainer(model, folder),
}


class Mapping(mmap.mmap):
    """Host memory as tiles have it. State: all that was mapped."""

    alive: ClassVar[weakref.WeakSet[Mapping]] = weakref.WeakSet()

    def __new__(cls, *args: Any, **options: Any) -> Mapping:
        made = super().__new__(cls, *args, **options)
        cls.alive.add(made)
        return made


def tensor_bytes() -> int:
    """Bytes of memory that any tensor of the process uses."""
    storages = [each.untyped_storage() for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)
                and each.device.type == "cpu"]
    total = end = 0
    for start, stop in sorted((storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages):
        total, end = total + max(0, stop - max(start, end)), max(stop, end)
    return total


@pytest.mark.sample(3)
@pytest.mark.parametrize("held", HELD)
def test_a_closed_model_leaves_the_memory_of_its_weights_and_of_the_tensors_that_a_user_holds(
        held: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", Mapping)
    gc.collect()
    mapped_before, tensors_before = sum(map(len, Mapping.alive)), tensor_bytes()
    sizes = dict(hidden_size=128, intermediate_size=256, vocab_size=1024)
    model = megacompile.stream(tiny_models.build(bf16=True, **sizes), device="cpu")
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-3)
    after_backward(model)
    optimizer.step()
    optimizer.zero_grad()
    kept = HELD[held](model, optimizer, tmp_path)
    owned = dict(kept) if isinstance(kept, dict) else list(kept.parameters()) if isinstance(kept, nn.Module) else kept
    leaves = [leaf for leaf in pytree.tree_leaves(owned) if isinstance(leaf, Tensor)]
    del owned
    values = [leaf.detach().clone() for leaf in leaves]
    weights = tiny_models.weights(copy.deepcopy(model)) if held != "the exception of a backward" else {}
    parameters = list(nn.Module.parameters(model))
    model.megacompile.close()
    for parameter in parameters:
        parameter.grad = None
    count, own = sum(p.numel() for p in parameters), sum(p.nbytes for p in parameters)
    assert all(torch.equal(weights[name], p) for name, p in model.named_parameters() if weights)
    assert all(map(torch.equal, leaves, values))
    held_bytes = sum(leaf.nbytes for leaf in leaves)
    del model, optimizer, parameters, values, weights
    gc.collect()
    assert sum(map(len, Mapping.alive)) - mapped_before < own + held_bytes + count / 5
    assert tensor_bytes() - tensors_before < own + held_bytes + count / 5


def test_a_closed_model_gives_the_memory_of_the_device_back_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although a user holds the loss: the backend is told once no slot and no activation is held any more."""
    model = megacompile.stream(tiny_models.build(), device="cpu", resident_state="all", saved_layers=2)
    loss = model(**BATCH).loss
    (forward,) = engine.open_forwards(model)
    slots = {name: StorageWeakRef(slot.untyped_storage()) for name, slot in engine.arena(model).slots.items()}
    held: list[str] = []
    monkeypatch.setattr(engine.backend(model), "trim", lambda: held.extend(
        ["nothing", *(name for name, slot in slots.items() if not slot.expired())]), raising=False)
    model.megacompile.close()
    assert slots and held == ["nothing"] and not forward.values and loss.isfinite()


@pytest.mark.nightly(
    held_by="tests/model/test_teardown.py::test_a_closed_model_leaves_the_memory_of_its_weights_and_of_the_tensors_that_a_user_holds")
def test_objects_in_the_process_do_not_grow_with_the_number_of_models() -> None:
    """PyTorch keeps records of its last 64 compilations, a dozen objects for each model.

    The median is judged: a module that some library imports late adds objects once.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        closed, forgotten = fresh.submit(objects_left, 3).result()
    for left in (closed, forgotten):
        assert not [each for each in left if "ShapeEnv" in each or "GraphModule" in each], left
        assert statistics.median(sum(each.values()) for each in left) < 50, left


def test_a_lost_device_does_not_keep_other_resources_from_being_released() -> None:
    executor, backend, arena, checkpoints, store, ranks = (mock.MagicMock() for _ in range(6))
    executor.close.side_effect = lambda then: then()
    backend.synchronize.side_effect = LaneError("the device has failed")
    arena.close.side_effect = LaneError("memory cannot be freed")
    store.files = [mock.Mock()]
    arguments: Any = executor, arena, checkpoints, store, backend, ranks
    with pytest.raises(LaneError, match="the device has failed"):
        streamed.give_back(*arguments)
    for released in (checkpoints.close, store.files[0].stop_threads, ranks.close):
        released.assert_called_once()


def test_a_closed_model_of_several_ranks_keeps_the_shared_memory_of_its_weights_alone() -> None:
    def taken() -> int:
        """Bytes of the shared files that this process has open: a mapping has its own descriptor."""
        opened = [each for each in Path("/proc/self/fd").iterdir() if os.path.lexists(each)]
        found = [each.stat() for each in opened if "/memfd:megacompile" in os.readlink(each)]
        return sum({each.st_ino: 512 * each.st_blocks for each in found}.values())

    gc.collect()
    before = taken()
    layout = TileLayout.of("tile", torch.bfloat16, [("weight", (64, 64), True)])
    ranks: Any = SimpleNamespace(rank=0, agree_on=lambda *_: None, shared_memory=SharedMemory)
    memory = SharedTileMemory([layout], ranks)
    tile = memory.allocate(layout)
    tile.allocate_gradients()
    tile.allocate_moments()
    for part in (tile.weights, tile.gradients, *tile.state()):
        assert part is not None
        part.fill_(1)
    assert taken() - before > 5 * tile.weights.nbytes
    weights, size = tile.parameter_view(tile.weights, 0), tile.weights.nbytes
    values = weights.clone()
    tile.release()
    del memory, ranks, part
    gc.collect()
    assert taken() - before <= size and torch.equal(weights, values)
