"""The calls that Lightning makes, without Lightning, against native PyTorch."""
from __future__ import annotations

import time
from typing import Any

import engine
import pytest
import tiny_models
import torch
from torch import Tensor

import megacompile
from megacompile.ir.program import Lane
from megacompile.streaming.user_tensors.owners import require_owner


class AroundModel(torch.nn.Module):
    """What a user of Lightning writes."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self, kind: Any) -> tuple[Any, Any]:
        optimizer = kind(self.parameters(), lr=1e-2)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def fit(module: AroundModel, kind: Any, begun: Any = lambda optimizer: None) -> list[float]:
    """The calls of Lightning's automatic optimization, in its order: gradients are cleared between a closure's forward and its
    backward, and clipped within it; the optimizer's state is sent to the device by assignment."""
    module.to("cpu")
    optimizer, scheduler = module.configure_optimizers(kind)
    for parameter, state in optimizer.state.items():
        optimizer.state[parameter] = {key: torch.as_tensor(value).clone() if key != "step" else value
                                      for key, value in state.items()}
    module.train()
    losses = []
    for number in range(8):  # of which two at a time are accumulated
        def closure(number: int = number) -> Tensor:
            begun(optimizer)
            loss = module.training_step(tiny_models.batch(number)) / 2
            if number % 2 == 0:
                optimizer.zero_grad()
            loss.backward()
            if number % 2 == 1:  # configure_gradient_clipping
                torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.5)
            return loss.detach()

        if number % 2 == 0:
            losses.append(float(closure()))
        else:
            losses.append(float(optimizer.step(closure)))
            scheduler.step()
        if number == 3:  # a validation, and a checkpoint
            module.eval()
            with torch.no_grad():
                losses.append(float(module.training_step(tiny_models.batch(9))))
            assert all(tensor.device.type == "cpu" for tensor in module.state_dict().values())
            module.train()
    return losses


def test_lightning_s_calls_train_as_they_do_natively(model: Any, native: Any) -> None:
    """And the optimizer's state stays in the tiles, so that it can be saved."""
    def check(optimizer: Any) -> None:
        for parameter, state in optimizer.state.items():
            _, name = require_owner(parameter)
            tile, position = engine.tiling(model).position[name]
            start = engine.store(model)[tile].layout.slices[position].start
            assert state["exp_avg"].data_ptr() == engine.store(model)[tile].moments[0][4 * start:].data_ptr()

    assert fit(AroundModel(model), megacompile.AdamW, check) == pytest.approx(
        fit(AroundModel(native), torch.optim.AdamW), abs=1e-4)
    tiny_models.assert_same_weights(model, native)


def test_a_closure_runs_beside_the_update_before(model: Any) -> None:
    left = []

    def slowly(optimizer: Any) -> None:
        engine.delay(model, lambda lane: time.sleep(0.02) if lane == Lane.CPU else None)
        left.append(engine.updating(model) is not None and engine.updating(model).done != set(engine.updating(model).segments))

    fit(AroundModel(model), megacompile.AdamW, slowly)
    assert any(left), "each update was over before the next forward"
