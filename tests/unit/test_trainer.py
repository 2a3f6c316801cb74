"""transformers' Trainer on streamed models, beside itself on the same models unstreamed."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("accelerate")

import trained  # noqa: E402  (after the check)
import transformers  # noqa: E402

import megacompile  # noqa: E402
from megacompile.errors import MegacompileError, UnsupportedError  # noqa: E402
from megacompile.trainer import Trainer  # noqa: E402

LOGGED = ("loss", "grad_norm", "learning_rate")


class Loop(Trainer):
    """The same without whole steps."""

    whole_steps = False


@pytest.fixture(scope="module")
def native_curve(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    return trained.curve(trained.run(transformers.Trainer, tmp_path_factory.mktemp("native"), trained.build(), max_steps=32), *LOGGED)


@pytest.mark.parametrize("trainer", [Trainer, Loop])
def test_curves_are_those_of_an_unstreamed_trainer(trainer: type, native_curve: Tensor, tmp_path: Path) -> None:
    """32 steps in epochs of ten, with clipping, weight decay, warm-up and padding; accumulated over two batches."""
    curve = trained.curve(trained.run(trainer, tmp_path, trained.streamed(), max_steps=32), *LOGGED)
    assert native_curve[-1, 0] < native_curve[0, 0] - 1, "nothing was learned that could differ"
    assert (native_curve[:, 1] > trained.ARGUMENTS["max_grad_norm"]).sum() > 16, "clipping was hardly at work"
    torch.testing.assert_close(curve, native_curve, rtol=0, atol=1e-4)


def test_an_epoch_that_ends_with_fewer_batches_is_trained_alike(tmp_path: Path) -> None:
    changes: dict[str, Any] = dict(max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=3)
    given = dict(train_dataset=trained.sequences(14))  # five batches: a step of three, and one of two
    curves = [trained.curve(trained.run(trainer, tmp_path, model, given=given, **changes), *LOGGED)
              for trainer, model in ((transformers.Trainer, trained.build()), (Trainer, trained.streamed()))]
    assert len(curves[0]) == 4
    torch.testing.assert_close(*curves, rtol=0, atol=1e-4)


def test_accumulated_batches_are_one_forward(tmp_path: Path) -> None:
    model = trained.streamed()
    trained.run(Trainer, tmp_path, model)
    shapes = [shape for shape in model.megacompile.streamed.shapes.table]
    assert {shape.batch for shape in shapes} == {6} and all(shape.whole_step for shape in shapes)


def test_batches_that_cannot_be_joined_are_trained_one_by_one(tmp_path: Path) -> None:
    def collate(rows: Any) -> dict[str, Any]:
        return {**trained.padded(rows), "use_cache": False}  # no tensor

    model = trained.streamed()
    curves = [trained.curve(trained.run(trainer, tmp_path, each, given=dict(data_collator=collate)), *LOGGED)
              for trainer, each in ((transformers.Trainer, trained.build()), (Trainer, model))]
    assert {shape.batch for shape in model.megacompile.streamed.shapes.table} == {3}
    torch.testing.assert_close(*curves, rtol=0, atol=1e-4)


def test_no_step_waits_for_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are counted, at the start and the end of the training: as many in nine steps as in three."""
    counts = []
    for steps in (3, 9):
        model = trained.streamed()
        waits: list[None] = []
        settle = model.megacompile.streamed.settle

        def counted(settle: Any = settle, waits: list[None] = waits) -> None:
            waits.append(None)
            settle()

        model.megacompile.streamed.settle = counted
        trained.run(Trainer, tmp_path, model, max_steps=steps, logging_strategy="no")
        counts.append(len(waits))
    assert counts[0] == counts[1]


def test_callbacks_find_gradients_without_whole_steps(tmp_path: Path) -> None:
    class Norms(transformers.TrainerCallback):
        seen: list[bool] = []  # noqa: RUF012

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.seen.append(all(p.grad is not None for p in model.parameters()))

    trained.run(Loop, tmp_path, trained.streamed(), given=dict(callbacks=[Norms()]))
    assert Norms.seen == [True] * 4


@pytest.mark.parametrize("bf16", [False, True])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(bf16: bool, tmp_path: Path) -> None:
    """Weights, remainders, moments, losses and learning rates, from the middle of an epoch; the last two checkpoints are kept."""
    def master_state(trainer: Any) -> list[Tensor]:
        model, optimizer = trainer.model, trainer.optimizer.optimizer
        states = [optimizer.state[p] for p in model.parameters()]
        return [*(optimizer.master(p) for p in model.parameters()), *(s[k].clone() for s in states for k in ("exp_avg", "exp_avg_sq"))]

    changes: dict[str, Any] = dict(max_steps=9, save_strategy="steps", save_steps=3, save_total_limit=2, bf16=bf16)
    whole = trained.run(Trainer, tmp_path, trained.streamed(bf16), **changes)
    expected = master_state(whole)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["checkpoint-6", "checkpoint-9"]
    resumed = trained.run(Trainer, tmp_path, trained.streamed(bf16), resume=str(tmp_path / "checkpoint-6"), **changes)
    assert torch.equal(trained.curve(resumed, *LOGGED), trained.curve(whole, *LOGGED))
    assert all(torch.equal(a, b) for a, b in zip(master_state(resumed), expected, strict=True))


def test_evaluation_gathers_the_logits_and_the_best_model_is_loaded(tmp_path: Path) -> None:
    def accuracy(outputs: Any) -> dict[str, float]:
        logits, labels = torch.tensor(outputs.predictions), torch.tensor(outputs.label_ids)
        counted = labels[:, 1:] != -100
        return {"accuracy": float((logits[:, :-1].argmax(-1) == labels[:, 1:])[counted].float().mean())}

    same_length = [{key: value[:9] for key, value in row.items()} for row in trained.sequences(4, seed=1)]
    changes: dict[str, Any] = dict(max_steps=6, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
                                   load_best_model_at_end=True, metric_for_best_model="eval_accuracy", per_device_eval_batch_size=2)
    runs = [trained.run(trainer, tmp_path / trainer.__module__, model, given=dict(compute_metrics=accuracy, eval_dataset=same_length),
                        **changes) for trainer, model in ((transformers.Trainer, trained.build()), (Trainer, trained.streamed()))]
    native, ours = ([{k: v for k, v in entry.items() if k in ("eval_loss", "eval_accuracy")} for entry in each.state.log_history
                     if "eval_loss" in entry] for each in runs)
    assert len(ours) == 3 and [e["eval_accuracy"] for e in ours] == [e["eval_accuracy"] for e in native]
    assert [e["eval_loss"] for e in ours] == pytest.approx([e["eval_loss"] for e in native], abs=1e-5)
    predicted = [torch.tensor(each.predict(same_length).predictions) for each in runs]
    assert predicted[0].shape == (4, 9, trained.VOCABULARY)
    torch.testing.assert_close(predicted[1], predicted[0], rtol=0, atol=1e-4)


def test_saving_the_model_leaves_checkpoints_in_its_folder(tmp_path: Path) -> None:
    trainer = trained.run(Trainer, tmp_path, trained.streamed(), save_strategy="steps", save_steps=2)
    trainer.save_model()
    assert (tmp_path / "checkpoint-4" / "optimizer.pt").exists() and (tmp_path / "checkpoint-2" / "optimizer.pt").exists()
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(saved[name], weight) for name, weight in trainer.model.state_dict().items())


def test_a_bf16_run_leaves_a_plain_model_after_close(tmp_path: Path) -> None:
    model = trained.streamed(bf16=True)
    trained.run(Trainer, tmp_path, model, bf16=True, gradient_checkpointing=True)
    model.megacompile.close()
    assert "forward" not in vars(model) and not model.is_gradient_checkpointing
    assert torch.isfinite(model(input_ids=torch.arange(4)[None]).logits).all()


def test_updates_on_arrival_train_alike(tmp_path: Path) -> None:
    logged = LOGGED[::2]
    native = trained.run(transformers.Trainer, tmp_path, trained.build(), max_grad_norm=0)
    model = trained.streamed()
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, overlap="backward")
    ours = trained.run(Trainer, tmp_path, model, given=dict(optimizers=(optimizer, None)), max_grad_norm=0)
    assert all("grad_norm" not in entry for entry in ours.state.log_history)
    assert trained.curve(ours, "loss")[0] == pytest.approx(trained.curve(native, "loss")[0], abs=1e-5)
    torch.testing.assert_close(trained.curve(ours, *logged), trained.curve(native, *logged), rtol=0, atol=2e-3)  # norms decay too


@pytest.mark.parametrize(("of_optimizer", "message"), [
    (dict(overlap="backward"), "before the global norm is known"),
    (dict(max_grad_norm=2.0), "give the same to both"),
])
def test_optimizers_that_contradict_the_arguments_are_refused(of_optimizer: Any, message: str, tmp_path: Path) -> None:
    model = trained.streamed()
    with pytest.raises(MegacompileError, match=message):
        trained.run(Trainer, tmp_path, model, given=dict(optimizers=(megacompile.AdamW(model.parameters(), **of_optimizer), None)))


def test_an_optimizer_of_torch_is_refused(tmp_path: Path) -> None:
    model = trained.streamed()
    with pytest.raises(MegacompileError, match="is trained with megacompile.AdamW, not SGD"):
        trained.run(Trainer, tmp_path, model, given=dict(optimizers=(torch.optim.SGD(model.parameters()), None)))


@pytest.mark.parametrize(("changes", "remedy"), [
    (dict(bf16=True), "stream.model, dtype=torch.bfloat16"),
    (dict(label_smoothing_factor=0.1), "leave it out"),
    (dict(neftune_noise_alpha=5.0), "leave it out"),
    (dict(torch_compile=True), "leave it out"),
    (dict(optim="adafactor"), "optim must be adamw_torch"),
])
def test_arguments_that_cannot_be_honoured_are_refused_at_once(changes: Any, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=remedy):
        Trainer(model=trained.streamed(), args=trained.arguments(tmp_path, **changes))


def test_models_that_are_not_streamed_or_have_adapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MegacompileError, match=r"is not streamed: call model = megacompile.stream"):
        Trainer(model=trained.build(), args=trained.arguments(tmp_path))
    peft = pytest.importorskip("peft")
    with pytest.raises(UnsupportedError, match="adapters"):
        adapted = peft.get_peft_model(trained.streamed(), peft.LoraConfig(target_modules=["q_proj"]))
        Trainer(model=adapted, args=trained.arguments(tmp_path))


def test_logs_reach_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = trained.run(Trainer, tmp_path, trained.streamed(), report_to="tensorboard", max_steps=2)
    (file,) = tmp_path.rglob("events.out.*")
    events = EventAccumulator(str(file)).Reload()
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(trained.curve(trainer, "loss").flatten().tolist())
    assert len(events.Scalars("train/grad_norm")) == 2
