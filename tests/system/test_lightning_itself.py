"""PyTorch Lightning's own Trainer, against the same training unstreamed. Skipped without Lightning."""
from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import megacompile
from megacompile.errors import LeaseError, UnsupportedError

lightning = pytest.importorskip("lightning", reason="Lightning is not installed")
callbacks = pytest.importorskip("lightning.pytorch.callbacks")

QUIET: dict[str, Any] = dict(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False)
TRAINED, HELD_OUT = ([{name: tensor[0] for name, tensor in tiny_models.batch(seed, rows=1).items()} for seed in seeds]
                     for seeds in (range(12), range(100, 104)))


class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
    """What a user of Lightning writes. State: losses of training, and of validation."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__()
        self.model, self.options = model, options
        self.losses: list[float] = []
        self.held_out: list[float] = []

    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        loss = self.model(**batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: dict[str, Tensor], number: int) -> None:
        loss = self.model(**batch).loss
        self.held_out.append(float(loss))
        self.log("held_out", loss)

    def configure_optimizers(self) -> Any:
        kind = megacompile.AdamW if hasattr(self.model, "megacompile") else torch.optim.AdamW
        optimizer = kind(self.parameters(), lr=1e-2, **self.options)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(module: Module, folder: Path, resumed: Path | None = None, **options: Any) -> Module:
    """Epochs of six batches of two rows, each with its validation."""
    trainer = lightning.Trainer(**{**QUIET, "default_root_dir": folder, "max_epochs": 2, **options})
    trainer.fit(module, DataLoader(TRAINED, batch_size=2), DataLoader(HELD_OUT, batch_size=2), ckpt_path=resumed)
    return module


TRAININGS: dict[str, dict[str, Any]] = {
    "plain": {}, "clipped": {"gradient_clip_val": 0.3}, "accumulated": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}}


@pytest.mark.parametrize("training", TRAININGS)
def test_lightning_trains_as_it_does_unstreamed(model: Any, native: Any, training: str, tmp_path: Path) -> None:
    options = dict(enable_checkpointing=False, **TRAININGS[training])
    ours, theirs = (fit(Module(each), tmp_path, **options) for each in (model, native))
    assert len(ours.losses) == 12 and len(ours.held_out) == 6  # two of them before training
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-5)
    assert ours.held_out == pytest.approx(theirs.held_out, abs=1e-5)
    tiny_models.assert_same_weights(model, native)


def test_a_moving_average_reads_no_weight_of_an_update_in_flight(model: Any, native: Any, tmp_path: Path) -> None:
    """Lightning's callback reads parameters through the module around the model, and puts the average in their place to
    validate."""
    averages = [fit(Module(each), tmp_path, callbacks=[callbacks.EMAWeightAveraging(decay=0.9)], enable_checkpointing=False)
                for each in (model, native)]
    assert averages[0].held_out == pytest.approx(averages[1].held_out, abs=1e-5)
    tiny_models.assert_same_weights(model, native)


def test_a_checkpoint_of_lightning_s_goes_on_to_the_bit(bf16_model: Any, tmp_path: Path) -> None:
    """FP32 masters of bf16 weights included, and plain models read its weights."""
    model, start, plain = bf16_model, tiny_models.weights(bf16_model), copy.deepcopy(bf16_model)

    def train(**options: Any) -> tuple[list[float], dict[str, Tensor], list[Tensor]]:
        model.load_state_dict(start)
        keeper = callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        module = fit(Module(model, max_grad_norm=0.3), tmp_path, callbacks=[keeper], precision="bf16-true", **options)
        optimizer = module.trainer.optimizers[0]
        return module.losses, tiny_models.weights(model), [optimizer.master(p) for p in model.parameters()]

    losses, weights, masters = train()
    resumed_losses, resumed_weights, resumed_masters = train(resumed=tmp_path / "epoch=0.ckpt")
    assert resumed_losses == losses[6:]
    assert tiny_models.same_bits(weights, resumed_weights)
    assert all(torch.equal(a, b) for a, b in zip(masters, resumed_masters, strict=True))
    saved = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)["state_dict"]
    plain.load_state_dict({name.removeprefix("model."): tensor for name, tensor in saved.items()})
    assert tiny_models.same_bits(tiny_models.weights(plain), weights)


@pytest.mark.parametrize(("options", "optimizer", "error", "remedy"), [
    ({"precision": "bf16-true"}, {}, UnsupportedError, "dtype="),
    ({"precision": "bf16-mixed"}, {}, UnsupportedError, "leave autocast out"),
    ({"accumulate_grad_batches": 2}, {"overlap": "backward"}, LeaseError, "give the whole batch to one forward"),
])
def test_what_lightning_cannot_have_is_refused(model: Any, options: dict[str, Any], optimizer: dict[str, Any],
                                               error: type[Exception], remedy: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=remedy):
        fit(Module(model, **optimizer), tmp_path, enable_checkpointing=False, limit_val_batches=0, **options)
