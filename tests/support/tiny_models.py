"""Models of three tiny layers, batches for them, and comparisons with native PyTorch."""
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import engine
import pytest
import torch
from torch import Tensor, fx, nn

import megacompile
from megacompile.errors import LaneError, TornError
from megacompile.ir.program import op_of

VOCABULARY = 64


def build(bf16: bool = False, **changes: Any) -> Any:
    """A Qwen2 with random weights, in training mode. Eager attention: the reference shares no attention code with ours."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
             "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    model = AutoModelForCausalLM.from_config(Qwen2Config(**{**sizes, **changes}), attn_implementation="eager")
    return (model.bfloat16() if bf16 else model).train()


def batch(seed: int = 0, rows: int = 3, length: int = 9) -> dict[str, Tensor]:
    """input_ids and labels, int64 [rows, length]."""
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def right_padded(lengths: list[int], seed: int = 0, **changes: Any) -> dict[str, Tensor]:
    """Rows of these lengths, padded on the right to the longest one: input_ids, labels and attention_mask, int64."""
    ids = batch(seed, rows=len(lengths), length=max(lengths))["input_ids"]
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask, **changes}


class Shared:
    """One streamed model and its plain twin. State: their initial weights."""

    def __init__(self, bf16: bool = False, **options: Any) -> None:
        self.plain = build(bf16)
        self.model = megacompile.stream(build(bf16), device="cpu", **options)

    def fresh(self) -> Any:
        """The streamed model as it was made, and at rest; whatever a test did to its lanes is undone."""
        model = self.model
        engine.delay(model, None)
        engine.probe(model, None)
        engine.of(model).recover()
        model.load_state_dict(self.plain.state_dict())
        model.zero_grad()
        return model.train()

    def native(self) -> Any:
        return copy.deepcopy(self.plain)

    def close(self) -> None:
        self.model.megacompile.close()


def shared_in_module(**options: Any) -> Any:
    """A fixture: the model that the tests of one module share, made with these options."""
    @pytest.fixture(scope="module")
    def shared() -> Iterator[Shared]:
        made = Shared(**options)
        yield made
        made.close()

    return shared


@pytest.fixture(scope="module", params=[pytest.param(False, marks=pytest.mark.nightly), True], ids=["fp32", "bf16"])
def in_each_dtype(request: pytest.FixtureRequest) -> Iterator[Shared]:
    """The model that the tests of one module share, with micro-batches of two rows."""
    made = Shared(bf16=request.param, micro_batch_size=2)
    yield made
    made.close()


def replanned(shared: Shared, **options: Any) -> Any:
    """The model as it was made, under another plan: the host updates the tiles that the options do not place."""
    model = shared.fresh()
    model.megacompile.replan(**{"held_state": (), "visiting_state": (), "resident_state": (), "resident": (), "waves": 1,
                                **options})
    return model


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Everything that an update changes: weights, and the optimizer's state."""
    kept = optimizer.state_dict()["state"]
    return weights(model) | {f"{index}.{key}": torch.as_tensor(value).clone() for index, state in kept.items()
                             for key, value in state.items()}


def cut_power(model: Any, op: str, number: int) -> None:
    """From now on the lanes fail at the `number`-th instruction of this op, and at no other."""
    seen = []

    def probe(node: fx.Node) -> None:
        if op_of(node).name == op:
            seen.append(node)
            if len(seen) == number:
                raise RuntimeError("power cut")

    engine.probe(model, probe)


def assert_torn(model: Any) -> None:
    """The power was cut within an update, and says so once; the model says that it is torn."""
    with pytest.raises(LaneError, match="power cut"):
        model.megacompile.synchronize()
    with pytest.raises(TornError):
        model.state_dict()


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


def assert_same_gradients(model: nn.Module, native: nn.Module, tolerance: float = 1e-5, least: float = 1e-12) -> None:
    """Each gradient within `tolerance` of its norm, plus `least`; absent where the other is absent. The models may be on
    different devices and have different dtypes."""
    theirs = dict(native.named_parameters())
    for name, ours in model.named_parameters():
        a, b = ours.grad, theirs[name].grad
        assert (a is None) == (b is None), f"{name}: only one has a gradient"
        if a is not None and b is not None:
            a, b = a.cpu(), b.cpu()
            assert (a - b).norm() <= tolerance * b.norm() + least, f"{name}: {(a - b).norm() / b.norm():.2e}"


def assert_same_weights(model: nn.Module, native: nn.Module, tolerance: float = 2e-4) -> None:
    """Each parameter within `tolerance` of its norm."""
    theirs = dict(native.named_parameters())
    for name, ours in model.named_parameters():
        if not ours.is_floating_point():  # codes of quantized weights
            assert torch.equal(ours, theirs[name]), name
            continue
        error, norm = (ours - theirs[name]).norm(), theirs[name].norm()
        assert error <= tolerance * norm, f"{name}: {error / norm:.2e}"


def step_of_both(model: Any, native: nn.Module, optimizers: tuple[Any, Any], batch: dict[str, Tensor], whole: bool,
                 between: Callable[[], object] = lambda: None) -> tuple[Tensor, Tensor]:
    """Trains both models for a step, the streamed one as a loop or as a whole step. Returns their losses. `between`: called
    before the updates of a loop and of native PyTorch, when there are gradients."""
    ours, theirs = optimizers
    expected = native(**batch, use_cache=False).loss
    expected.backward()
    if whole:
        loss = model.megacompile.train_step(batch, ours)
    else:
        loss = model(**batch).loss
        loss.backward()
    between()
    if not whole:
        ours.step()
        ours.zero_grad()
    theirs.step()
    theirs.zero_grad()
    return loss.detach(), expected.detach()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0, **shape: int) -> float:
    """One step; returns the loss."""
    loss = model(**batch(seed, **shape)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())
