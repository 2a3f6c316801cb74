"""Random training loops against native PyTorch: gradients, optimizers and their state used in any order."""
from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import engine
import pytest
import torch
from resumable import Decoder
from tiny_models import assert_same_weights, batch
from torch import Tensor, nn

import megacompile

#: Plans that place updates and state differently.
PLANS: dict[str, dict[str, Any]] = {
    "streamed": dict(checkpoint_interval=2),
    "state on the device": dict(resident_state="all"),
    "weights first": dict(deferred_moments=True, pinned_memory="32KiB"),
}
ROUNDS = 6
ADAMW = dict(lr=1e-2, eps=1e-3)


class Loop:
    """One side of a loop: a streamed model, or its native twin. The same calls with the same seed do the same to both."""

    def __init__(self, model: Any, seed: int, streamed: bool) -> None:
        self.model, self.streamed, self.draw = model, streamed, random.Random(seed)
        self.names = {name: p for name, p in nn.Module.named_parameters(model) if p.requires_grad and name != "unread"}
        self.max_norm = self.draw.choice([None, 0.05])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if self.draw.random() < 0.3 else None
        self.norms: list[float | None] = []
        self.kept: list[tuple[str, Tensor]] = []
        self.saved: list[Any] = []
        split = self.draw.choice([len(self.names), len(self.names), self.draw.randrange(1, len(self.names))])
        parameters = list(self.names.values())
        self.rest = parameters[split:]  # for a second optimizer, or a later group
        self.optimizers = [self.make(parameters[:split])]
        if self.rest and self.draw.random() < 0.5:
            self.optimizers.append(self.make(self.rest))
            self.rest = []

    def make(self, parameters: list[Any]) -> Any:
        if self.streamed:
            return megacompile.AdamW(parameters, max_grad_norm=self.max_norm, **ADAMW)
        return torch.optim.AdamW(parameters, foreach=False, **ADAMW)

    def one(self) -> tuple[Any, Any]:
        """An optimizer, and one of its parameters."""
        optimizer = self.draw.choice(self.optimizers)
        return optimizer, self.draw.choice([p for group in optimizer.param_groups for p in group["params"]])

    def two(self) -> tuple[Any, Any]:
        """Two parameters of the same shape."""
        return tuple(self.draw.sample([p for n, p in self.names.items() if n.startswith("layers") and p.dim() == 2], 2))

    def backward(self) -> None:
        share = self.draw.choice([1.0, 0.5])
        loss = self.model(**batch(self.draw.randrange(1000), rows=self.draw.choice([2, 3]))) * share
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
                continue
            if self.scaler is not None:
                self.scaler.unscale_(optimizer)
            norm = None if self.streamed else self.clipped(optimizer)
            optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
            self.late_options(optimizer)
            self.norms.append(optimizer.grad_norm if self.streamed else norm)
            if not self.streamed:
                for p, gradient in self.unclipped:
                    p.grad = gradient
        if self.scaler is not None and self.norms:  # some optimizer had gradients
            self.scaler.update()

    def clipped(self, optimizer: Any) -> float:
        """Clips as an optimizer of ours does, which leaves `.grad` as it is."""
        self.unclipped = [(p, p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for _, gradient in self.unclipped]).norm()
        for p, gradient in self.unclipped if self.max_norm else ():
            p.grad = gradient * min(1.0, self.max_norm / (float(norm) + 1e-6))
        return float(norm)

    # ---------------------------------------------------------------- what a user may do at any time
    def late_options(self, optimizer: Any) -> None:
        """Right after `step()`, while an update may run."""
        group = self.draw.choice(optimizer.param_groups)
        what, value = self.draw.choice(["lr", "weight_decay", "betas", ""]), self.draw.uniform(1e-3, 2e-2)
        if what == "lr" and isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        elif what == "betas":
            group["betas"] = self.draw.choice([list, tuple])((0.9, 1 - value))
        elif what:
            group[what] = self.draw.choice([float, torch.tensor])(value)

    def zero_grad(self) -> None:
        self.draw.choice([self.model, self.optimizers[0]]).zero_grad(set_to_none=self.draw.random() < 0.7)

    def keep_a_gradient(self) -> None:
        name = self.draw.choice(list(self.names))
        if self.names[name].grad is not None:
            self.kept.append((name, self.names[name].grad))

    def exchange_gradients(self) -> None:
        p, q = self.two()
        p.grad, q.grad = q.grad, p.grad

    def share_a_gradient(self) -> None:
        p, q = self.two()
        p.grad = q.grad

    def change_gradients(self) -> None:
        change = self.draw.choice([
            lambda g: g.mul_(0.5), lambda g: g.data.mul_(3.0), lambda g: g[:1].zero_(), lambda g: g.clamp_(-1e-2, 1e-2),
            lambda g: torch._foreach_mul_([g], 2.0), lambda g: g.numpy().__imul__(2.0)])
        _, parameter = self.one()
        if self.streamed:
            engine.settle(self.model)  # an update in flight reads the memory that is about to be written
        if parameter.grad is not None:
            change(parameter.grad)

    def set_a_gradient(self) -> None:
        _, parameter = self.one()
        if parameter.grad is not None:
            parameter.grad = self.draw.choice([None, parameter.grad * 2, torch.ones_like(parameter)])

    def transpose_a_gradient(self) -> None:
        p, _ = self.two()
        p.grad = None if p.grad is None else p.grad.t()

    def reset_state(self) -> None:
        optimizer, parameter = self.one()
        kind = self.draw.randrange(7)
        if kind == 0:
            optimizer.state.clear()
        elif kind == 1:
            optimizer.state = defaultdict(dict)
        elif kind == 2:
            optimizer.state.pop(parameter, None)
        elif kind == 3:
            optimizer.state[parameter] = {}
        elif kind == 4:
            optimizer.state = defaultdict(dict, {p: s for p, s in optimizer.state.items() if p is not parameter})
        elif kind == 5:
            optimizer.state[parameter].clear()
        else:
            optimizer.state.update({parameter: {}})

    def write_state(self) -> None:
        optimizer, parameter = self.one()
        state = optimizer.state[parameter]
        if "exp_avg" not in state or not float(state["step"]):
            return
        kind = self.draw.randrange(3)
        if kind == 0:
            state["exp_avg"].zero_()
        elif kind == 1:
            state["step"] = torch.tensor(float(state["step"]) + 3)
        else:
            state.update(exp_avg=torch.full_like(parameter, 1e-3), exp_avg_sq=torch.full_like(parameter, 1e-3))

    def save_state(self) -> None:
        optimizer = self.draw.choice(self.optimizers)
        self.saved = [(optimizer, copy.deepcopy(optimizer.state_dict()))]

    def load_state(self) -> None:
        for optimizer, saved in self.saved:
            sizes = [[len(group["params"]) for group in each["param_groups"]] for each in (saved, optimizer.state_dict())]
            if optimizer in self.optimizers and sizes[0] == sizes[1]:
                optimizer.load_state_dict(saved)
        self.saved = []

    def add_parameters(self) -> None:
        if not self.rest:
            return
        parameters, self.rest = self.rest[:2], self.rest[2:]
        optimizer = self.draw.choice(self.optimizers)
        if self.draw.random() < 0.7:
            optimizer.add_param_group({"params": parameters, "weight_decay": 0.3})
        else:
            optimizer.param_groups[0]["params"] += parameters

    def begin_again(self) -> None:
        """As in a notebook, whose old optimizer may still be there."""
        self.saved = []
        self.former, saved = self.optimizers, [optimizer.state_dict() for optimizer in self.optimizers]
        if len(self.former) == 1 and not self.rest and self.draw.random() < 0.5:
            self.optimizers = [self.make([p for group in self.former[0].param_groups for p in group["params"]])]
            if len(saved[0]["param_groups"]) == 1:
                self.optimizers[0].load_state_dict(saved[0])
        else:
            self.optimizers, self.rest = [self.make(list(self.names.values()))], []

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(**batch(self.draw.randrange(1000)))


#: How often each is drawn.
ACTIONS: dict[Callable[[Loop], None], int] = {
    Loop.zero_grad: 3, Loop.keep_a_gradient: 3, Loop.exchange_gradients: 2, Loop.share_a_gradient: 1, Loop.change_gradients: 3,
    Loop.set_a_gradient: 2, Loop.transpose_a_gradient: 1, Loop.reset_state: 3, Loop.write_state: 2, Loop.save_state: 1,
    Loop.load_state: 1, Loop.add_parameters: 3, Loop.begin_again: 1, Loop.evaluate: 1}


def check(ours: Loop, theirs: Loop) -> None:
    assert_same_weights(ours.model, theirs.model, 1e-3)
    for optimizer, other in zip(ours.optimizers, theirs.optimizers, strict=True):
        for name, parameter in ours.names.items():
            found, expected = optimizer.state.get(parameter, {}), other.state.get(theirs.names[name], {})
            for key, value in expected.items():
                difference = (torch.as_tensor(found[key]) - value).norm()
                assert difference <= 2e-3 * value.norm() + 1e-7, f"{key} of {name}: {difference} of {value.norm()}"
    for (name, kept), (_, other) in zip(ours.kept, theirs.kept, strict=True):
        assert (kept - other).norm() <= 1e-3 * other.norm() + 1e-6, f"a gradient of {name} that was kept has changed"
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-3)
    ours.norms.clear()
    theirs.norms.clear()


@pytest.fixture(scope="module")
def made() -> Iterator[Callable[[str], Any]]:
    models: dict[str, Any] = {}

    def get(plan: str) -> Any:
        if plan not in models:
            torch.manual_seed(0)
            models[plan] = megacompile.stream(Decoder(), layers="layers", device="cpu", micro_batch_size=2, **PLANS[plan])
        return models[plan]

    yield get
    for model in models.values():
        model.megacompile.close()


def run(model: Any, seed: int) -> None:
    torch.manual_seed(0)
    native = Decoder()
    model.zero_grad()
    model.load_state_dict(native.state_dict())
    draw, said = random.Random(seed), []
    ours, theirs = Loop(model, seed, streamed=True), Loop(native, seed, streamed=False)
    try:
        for _ in range(ROUNDS):
            drawn = draw.choices(list(ACTIONS), list(ACTIONS.values()), k=draw.randrange(6))
            at = draw.randrange(len(drawn) + 1)
            actions = [Loop.backward, *drawn[:at], Loop.step, *drawn[at:], *[Loop.zero_grad] * draw.randrange(2)]
            for action in actions:
                said.append(action.__name__)
                action(ours)
                action(theirs)
            check(ours, theirs)
    except BaseException as error:
        error.add_note(f"seed {seed}: {' '.join(said)}")
        raise


@pytest.mark.sample(6)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("seed", range(6))
def test_a_random_loop_trains_as_it_does_natively(made: Callable[[str], Any], plan: str, seed: int) -> None:
    run(made(plan), seed)


@pytest.mark.nightly(held_by="tests/model/test_random_loops.py::test_a_random_loop_trains_as_it_does_natively")
@pytest.mark.parametrize("plan", PLANS)
def test_hundreds_of_random_loops_train_as_they_do_natively(made: Callable[[str], Any], plan: str) -> None:
    for seed in range(1000, 1150):
        run(made(plan), seed)
