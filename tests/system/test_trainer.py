"""transformers' Trainer on streamed models, against the same models unstreamed."""
from __future__ import annotations

import gc
import multiprocessing
from pathlib import Path
from typing import Any

import engine
import pytest
import torch
from torch import Tensor

pytest.importorskip("accelerate")

import tiny_models
import trained
import transformers

import megacompile
from megacompile import AdamW
from megacompile.errors import ArgumentError, MegacompileError, UnsupportedError
from megacompile.trainer import Trainer

LOGGED = ("loss", "grad_norm", "learning_rate")


class Loop(Trainer):
    """The same without whole steps."""

    whole_steps = False


@pytest.fixture(scope="module")
def native_curve(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    native = trained.run(transformers.Trainer, tmp_path_factory.mktemp("native"), tiny_models.build(), max_steps=32)
    return trained.curve(native, *LOGGED)


@pytest.mark.parametrize(("trainer", "steps"), [(Trainer, 32), (Loop, 12)])
def test_curves_are_those_of_an_unstreamed_trainer(trainer: type, steps: int, native_curve: Tensor, model: Any,
                                                   tmp_path: Path) -> None:
    """In epochs of ten steps, with clipping, weight decay, warm-up and padding; accumulated over two batches."""
    curve = trained.curve(trained.run(trainer, tmp_path, model, max_steps=steps), *LOGGED)
    assert native_curve[-1, 0] < native_curve[0, 0] - 1, "nothing was learned that could differ"
    assert (native_curve[:, 1] > trained.ARGUMENTS["max_grad_norm"]).sum() > 16, "clipping was hardly at work"
    torch.testing.assert_close(curve, native_curve[:steps], rtol=0, atol=1e-4)


def test_an_epoch_that_ends_with_fewer_batches_is_trained_alike(model: Any, native: Any, tmp_path: Path) -> None:
    changes: dict[str, Any] = dict(max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=3)
    given = dict(train_dataset=trained.sequences(14))  # five batches: a step of three, and one of two
    curves = [trained.curve(trained.run(trainer, tmp_path, each, given=given, **changes), *LOGGED)
              for trainer, each in ((transformers.Trainer, native), (Trainer, model))]
    assert len(curves[0]) == 4
    torch.testing.assert_close(*curves, rtol=0, atol=1e-4)


@pytest.mark.nightly(held_by="tests/system/test_trainer.py::test_flattened_batches_are_accumulated_as_one_program")
def test_accumulated_batches_are_one_program(model: Any, tmp_path: Path) -> None:
    steps = model.megacompile.stats["steps"]
    trained.run(Trainer, tmp_path, model)
    latest = model.megacompile.compiled().spec  # of six rows, which share one
    assert latest.whole_step and model.megacompile.stats["steps"] == steps + 4


def test_batches_that_cannot_be_joined_are_trained_one_by_one(model: Any, native: Any, tmp_path: Path) -> None:
    def collate(rows: Any) -> dict[str, Any]:
        return {**trained.padded(rows), "use_cache": False}  # no tensor

    curves = [trained.curve(trained.run(trainer, tmp_path, each, given=dict(data_collator=collate)), *LOGGED)
              for trainer, each in ((transformers.Trainer, native), (Trainer, model))]
    latest = model.megacompile.compiled().spec
    assert not latest.whole_step
    torch.testing.assert_close(*curves, rtol=0, atol=1e-4)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("rows", "options"), [
    *(pytest.param(3, {each: True}, marks=pytest.mark.nightly) for each in ("return_seq_idx", "return_flash_attn_kwargs")),
    (1, dict(return_seq_idx=True, return_flash_attn_kwargs=True)),
    pytest.param(2, dict(return_position_ids=True), marks=pytest.mark.nightly)], ids=str)
def test_flattened_batches_are_accumulated_as_one_program(rows: int, options: dict[str, Any], model: Any, native: Any,
                                                          tmp_path: Path) -> None:
    """What the collator says of the sequences of each batch does not hold for the joined batches."""
    native.config.use_cache = False  # with a cache transformers lets the sequences of a row see each other
    given = dict(data_collator=transformers.DataCollatorWithFlattening(**options))
    curves = [trained.curve(trained.run(trainer, tmp_path, each, given=given, per_device_train_batch_size=rows), *LOGGED)
              for trainer, each in ((transformers.Trainer, native), (Trainer, model))]
    torch.testing.assert_close(*curves, rtol=0, atol=1e-4)
    assert model.megacompile.compiled().spec.whole_step


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [
    dict(dispatch_batches=True), dict(split_batches=True), dict(split_batches=True, dispatch_batches=True),
    dict(use_seedable_sampler=False), dict(even_batches=False, non_blocking=True)], ids=str)
def test_data_are_read_as_the_accelerator_is_configured(options: dict[str, Any], model: Any, native: Any,
                                                        tmp_path: Path) -> None:
    curves = []
    for trainer, each in ((transformers.Trainer, native), (Trainer, model)):
        torch.manual_seed(5)  # the sampler that is not seedable draws from it
        made = trained.run(trainer, tmp_path, each, accelerator_config=options)
        curves.append(trained.curve(made, *LOGGED))
    torch.testing.assert_close(*curves, rtol=0, atol=1e-4)


def test_no_step_waits_for_an_update(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are waits at the start and the end of a training: as many with five steps as with two."""
    streamed, waits = engine.of(model), []
    settle = streamed.settle
    monkeypatch.setattr(streamed, "settle", lambda: (waits.append(len(counts)), settle()))
    counts: list[int] = []
    for steps in (2, 2, 5):  # the first compiles
        trained.run(Trainer, tmp_path, model, max_steps=steps, logging_strategy="no")
        counts.append(waits.count(len(counts)))
    assert counts[1] == counts[2]


@pytest.mark.nightly(held_by="tests/system/test_trainer.py::test_no_step_waits_for_an_update")
def test_parameters_are_counted_before_the_first_step(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting waits for the update in flight, and Trainer counts floating-point operations in every step."""
    counted: list[int] = []
    before, count = model.megacompile.stats["steps"], type(model).num_parameters

    def noted(self: Any, *args: Any, **kwargs: Any) -> int:
        counted.append(self.megacompile.stats["steps"])
        return int(count(self, *args, **kwargs))

    monkeypatch.setattr(type(model), "num_parameters", noted)
    run = trained.run(Trainer, tmp_path, model, max_steps=2)
    assert model.megacompile.stats["steps"] == before + 2 and run.state.total_flos > 0
    assert {*counted} == {before}


@pytest.mark.parametrize("steps", [pytest.param(4, marks=pytest.mark.nightly), 6])
def test_a_log_does_not_keep_the_device_waiting_for_the_next_batches(
        steps: int, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log waits for the gradient norm. By then the batches of the next step have been read: two, and one more by Accelerate's
    loader. An epoch has five steps, and no batches are read after the last step."""
    read: list[int] = []
    waits: list[int] = []
    norm = AdamW.grad_norm

    def collate(rows: Any) -> Any:
        read.append(len(rows))
        return trained.padded(rows)

    def noted(optimizer: Any) -> Any:
        waits.append(len(read))
        return norm.fget(optimizer)  # type: ignore[attr-defined]

    monkeypatch.setattr(AdamW, "grad_norm", property(noted))
    trained.run(Trainer, tmp_path, model, given=dict(data_collator=collate, train_dataset=trained.sequences(30)),
                max_steps=steps)
    assert waits == ([5, 7, 9, 9] if steps == 4 else [5, 7, 9, 10, 10, 13])


def test_a_trainer_that_takes_batches_from_its_own_iterator_loses_none(model: Any, tmp_path: Path) -> None:
    class Wrapping(Trainer):
        def get_batch_samples(self, epoch_iterator: Any, *args: Any) -> Any:
            return super().get_batch_samples(map(dict, epoch_iterator), *args)

    used: list[Any] = []

    class Noted(Wrapping):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            used.extend(inputs["input_ids"][:, 0].tolist())
            return super().training_step(model, inputs, *args)

    rows = [{"input_ids": torch.full((9,), number)} for number in range(24)]
    trained.run(Noted, tmp_path, model, given=dict(train_dataset=rows))
    assert sorted(used) == list(range(24))


def test_no_worker_of_a_loader_outlives_a_training(model: Any, tmp_path: Path) -> None:
    trained.run(Trainer, tmp_path, model, dataloader_num_workers=1)
    gc.collect()
    assert not multiprocessing.active_children()


def test_an_error_of_the_data_is_raised_after_the_complete_steps_were_logged(model: Any, tmp_path: Path) -> None:
    batches: list[int] = []

    def collate(rows: Any) -> Any:
        batches.append(len(rows))
        if len(batches) == 8:
            raise ValueError("the eighth batch is broken")
        return trained.padded(rows)

    trainer = Trainer(model=model, args=trained.arguments(tmp_path, max_steps=6, save_strategy="steps", save_steps=1),
                      train_dataset=trained.sequences(60), data_collator=collate)
    with pytest.raises(ValueError, match="the eighth batch"):
        trainer.train()
    assert len(trained.curve(trainer, "loss")) == 3 and Path(tmp_path, "checkpoint-3").exists()


def test_callbacks_find_gradients_without_whole_steps(model: Any, tmp_path: Path) -> None:
    seen: list[bool] = []

    class Gradients(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            seen.append(all(p.grad is not None for p in model.parameters()))

    trained.run(Loop, tmp_path, model, given=dict(callbacks=[Gradients()]))
    assert seen == [True] * 4


@pytest.mark.parametrize("bf16", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(bf16: bool, request: Any, tmp_path: Path) -> None:
    """Masters, moments, losses and learning rates, from the middle of an epoch. The last two checkpoints are kept."""
    def state(trainer: Any) -> list[Tensor]:
        parameters, optimizer = list(trainer.model.parameters()), trainer.optimizer.optimizer
        moments = [optimizer.state[p][key].clone() for p in parameters for key in ("exp_avg", "exp_avg_sq")]
        return [*(optimizer.master(p) for p in parameters), *moments]

    model = request.getfixturevalue("bf16_model" if bf16 else "model")
    initial = tiny_models.weights(model)
    changes: dict[str, Any] = dict(max_steps=6, save_strategy="steps", save_steps=2, save_total_limit=2, bf16=bf16)
    whole = trained.run(Trainer, tmp_path, model, **changes)
    expected, logged = state(whole), trained.curve(whole, *LOGGED)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["checkpoint-4", "checkpoint-6"]
    model.load_state_dict(initial)
    resumed = trained.run(Trainer, tmp_path, model, resume=str(tmp_path / "checkpoint-4"), **changes)
    assert torch.equal(trained.curve(resumed, *LOGGED), logged)
    assert all(torch.equal(a, b) for a, b in zip(state(resumed), expected, strict=True))


def test_a_checkpoint_of_the_unstreamed_trainer_is_resumed(model: Any, native: Any, tmp_path: Path) -> None:
    changes: dict[str, Any] = dict(max_steps=6, save_strategy="steps", save_steps=3)
    theirs = trained.run(transformers.Trainer, tmp_path, native, **changes)
    ours = trained.run(Trainer, tmp_path, model, resume=str(tmp_path / "checkpoint-3"), **changes)
    torch.testing.assert_close(trained.curve(ours, *LOGGED), trained.curve(theirs, *LOGGED), rtol=0, atol=1e-4)


def test_evaluation_gathers_the_logits_and_the_best_model_is_loaded(model: Any, native: Any, tmp_path: Path) -> None:
    def accuracy(outputs: Any) -> dict[str, float]:
        logits, labels = torch.tensor(outputs.predictions), torch.tensor(outputs.label_ids)
        counted = labels[:, 1:] != -100
        return {"accuracy": float((logits[:, :-1].argmax(-1) == labels[:, 1:])[counted].float().mean())}

    same_length = [{key: value[:9] for key, value in row.items()} for row in trained.sequences(4, seed=1)]
    changes: dict[str, Any] = dict(
        max_steps=6, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
        metric_for_best_model="eval_accuracy", per_device_eval_batch_size=2)
    given = dict(compute_metrics=accuracy, eval_dataset=same_length)
    runs = [trained.run(transformers.Trainer, tmp_path / "native", native, given=given, **changes),
            trained.run(Trainer, tmp_path / "ours", model, given=given, **changes)]
    theirs, ours = ([{k: v for k, v in entry.items() if k in ("eval_loss", "eval_accuracy")} for entry in each.state.log_history
                     if "eval_loss" in entry] for each in runs)
    assert len(ours) == 3 and [e["eval_accuracy"] for e in ours] == [e["eval_accuracy"] for e in theirs]
    assert [e["eval_loss"] for e in ours] == pytest.approx([e["eval_loss"] for e in theirs], abs=1e-5)
    predicted = [torch.tensor(each.predict(same_length).predictions) for each in runs]
    assert predicted[0].shape == (4, 9, tiny_models.VOCABULARY)
    torch.testing.assert_close(predicted[1], predicted[0], rtol=0, atol=1e-4)


def test_saving_the_model_leaves_checkpoints_in_its_folder(model: Any, tmp_path: Path) -> None:
    trainer = trained.run(Trainer, tmp_path, model, save_strategy="steps", save_steps=2)
    trainer.save_model()
    assert all(list((tmp_path / f"checkpoint-{step}").glob("megacompile/*/manifest.json")) for step in (2, 4))
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(saved[name], weight) for name, weight in trainer.model.state_dict().items())


def test_a_bf16_run_leaves_a_plain_model_after_close(tmp_path: Path) -> None:
    model = megacompile.stream(tiny_models.build(bf16=True), device="cpu")
    trained.run(Trainer, tmp_path, model, bf16=True, activation_checkpointing=True)
    model.megacompile.close()
    assert "forward" not in vars(model) and not model.is_activation_checkpointing
    assert torch.isfinite(model(input_ids=torch.arange(4)[None]).logits).all()


def test_updates_on_arrival_train_alike(model: Any, native: Any, tmp_path: Path) -> None:
    theirs = trained.run(transformers.Trainer, tmp_path, native, max_grad_norm=0)
    ours = trained.run(Trainer, tmp_path, model, given=dict(optimizer_cls_and_kwargs=(
        megacompile.AdamW, dict(lr=trained.ARGUMENTS["learning_rate"], overlap="backward"))), max_grad_norm=0)
    assert all("grad_norm" not in entry for entry in ours.state.log_history)
    torch.testing.assert_close(trained.curve(ours, *LOGGED[::2]), trained.curve(theirs, *LOGGED[::2]), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("of_optimizer", "message"), [
    pytest.param(dict(overlap="backward"), "before the global norm is known", marks=pytest.mark.nightly),
    (dict(max_grad_norm=2.0), "pass the same value to both"),
])
def test_optimizers_that_contradict_the_arguments_are_refused(of_optimizer: Any, message: str, model: Any,
                                                                    tmp_path: Path) -> None:
    optimizer = megacompile.AdamW(model.parameters(), **of_optimizer)
    with pytest.raises(MegacompileError, match=message):
        trained.run(Trainer, tmp_path, model, given=dict(optimizers=(optimizer, None)))


@pytest.mark.parametrize("trainer", [Trainer, pytest.param(Loop, marks=pytest.mark.nightly)])
def test_gradients_of_parameters_that_the_optimizer_does_not_have_count_in_the_norm(
        trainer: type, model: Any, native: Any, tmp_path: Path) -> None:
    curves, weights = [], []
    for kind, make, each in ((transformers.Trainer, torch.optim.SGD, native), (trainer, megacompile.SGD, model)):
        some = [p for name, p in each.named_parameters() if "lm_head" not in name and "layers.1" not in name]
        given = dict(optimizers=(make(some, lr=0.5), None))
        curves.append(trained.curve(trained.run(kind, tmp_path, each, given=given), *LOGGED))
        weights.append(tiny_models.weights(each))
    assert (curves[0][:, 1] > trained.ARGUMENTS["max_grad_norm"]).all(), "clipping is at work"
    torch.testing.assert_close(*curves, rtol=0, atol=1e-4)
    torch.testing.assert_close(*weights, rtol=0, atol=1e-4)


def _focal(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss of logits."""
    known = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return ((1 - (-known).exp()).square() * known).sum() / num_items_in_batch


@pytest.mark.parametrize("how", [
    pytest.param(dict(label_smoothing_factor=0.2), marks=pytest.mark.nightly), dict(given=dict(compute_loss_func=_focal))])
def test_losses_of_logits_are_trained_alike(how: dict[str, Any], model: Any, native: Any, tmp_path: Path) -> None:
    curves = [trained.curve(trained.run(trainer, tmp_path, each, **how), *LOGGED)
              for trainer, each in ((transformers.Trainer, native), (Trainer, model))]
    torch.testing.assert_close(*curves, rtol=0, atol=1e-4)


def test_an_optimizer_of_torch_is_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(MegacompileError, match=r"is trained with an optimizer of megacompile, not SGD: leave the optimizer "
                                                r"out, or pass optimizers=\(megacompile\.AdamW"):
        trained.run(Trainer, tmp_path, model, given=dict(optimizers=(torch.optim.SGD(model.parameters()), None)))


@pytest.mark.parametrize(("changes", "kind", "remedy"), [
    (dict(bf16=True), UnsupportedError, "stream.model, dtype=torch.bfloat16"),
    (dict(neftune_noise_alpha=5.0), UnsupportedError, "leave it out"),
    (dict(torch_compile=True), UnsupportedError, "leave it out"),
    (dict(optim="adafactor"), ArgumentError, "'adafactor' is not implemented for streamed models: choose one of adamw, "),
])
def test_arguments_that_are_not_supported_are_refused_at_once(changes: Any, kind: type[Exception], remedy: str, model: Any,
                                                              tmp_path: Path) -> None:
    with pytest.raises(kind, match=remedy):
        Trainer(model=model, args=trained.arguments(tmp_path, **changes))


def test_a_metric_that_no_evaluation_logs_is_refused_at_once(model: Any, tmp_path: Path) -> None:
    """Unless something that the trainer does not know may log it."""
    def make(metric: str, kind: type = Trainer, **given: Any) -> Any:
        arguments = trained.arguments(tmp_path, eval_strategy="steps", metric_for_best_model=metric)
        return kind(model=model, args=arguments, **{"eval_dataset": trained.sequences(5), **given})

    with pytest.raises(ArgumentError, match=r"'eval_accuracy' is not among .* one of eval_loss, .* pass compute_metrics"):
        make("eval_accuracy")
    with pytest.raises(ArgumentError, match=r"'loss' is not among .* choose one of eval_one_loss, "):
        make("loss", eval_dataset={"one": trained.sequences(5)})

    class Logging(Trainer):
        def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            super().log(logs | {"eval_accuracy": 1.0}, *args, **kwargs)

    class Callback(transformers.TrainerCallback):
        def on_evaluate(self, *args: Any, metrics: Any, **kwargs: Any) -> None:
            metrics["eval_accuracy"] = 1.0

    for given in (dict(metric="one_loss", eval_dataset={"one": trained.sequences(5)}),
                  dict(metric="eval_accuracy", kind=Logging), dict(metric="accuracy", compute_metrics=len),
                  dict(metric="accuracy", callbacks=[Callback()])):
        make(**given)


def test_models_that_are_not_streamed_or_got_an_adapter_afterwards_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MegacompileError, match=r"is not streamed: call model = megacompile.stream"):
        Trainer(model=tiny_models.build(), args=trained.arguments(tmp_path))
    peft = pytest.importorskip("peft")
    streamed = megacompile.stream(tiny_models.build(), device="cpu")
    adapted = peft.get_peft_model(streamed, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(UnsupportedError, match=r"an adapter was added to a model that is streamed already: .* before"):
        Trainer(model=adapted, args=trained.arguments(tmp_path))


@pytest.mark.parametrize("steps", [1, 2])
def test_an_accelerate_loop_trains_as_it_does_unstreamed(steps: int, model: Any, native: Any) -> None:
    from accelerate import Accelerator

    def train(model: Any, optimizer: Any) -> list[float]:
        accelerator = Accelerator(gradient_accumulation_steps=steps, cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        losses = []
        for seed in range(6):
            with accelerator.accumulate(model):
                loss = model(**tiny_models.batch(seed)).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    expected = train(native, torch.optim.AdamW(native.parameters(), lr=1e-2))
    assert train(model, megacompile.AdamW(model.parameters(), lr=1e-2)) == pytest.approx(expected, abs=1e-4)
    tiny_models.assert_same_weights(model, native)


@pytest.mark.parametrize(("change", "message"), [(lambda module: module.half(), "cannot be cast to torch.float16"),
                                                 (lambda module: module.to("meta"), "cannot be moved to meta")])
def test_a_module_around_a_streamed_model_cannot_cast_or_move_it(change: Any, message: str, model: Any) -> None:
    with pytest.raises(UnsupportedError, match=message):
        change(torch.nn.ModuleDict({"model": model}))


@pytest.mark.nightly(held_by=(
    "tests/system/test_trainer.py::test_curves_are_those_of_an_unstreamed_trainer",
    "tests/system/test_fine_tuning.py::test_a_log_that_goes_on_has_each_step_once_and_tensorboard_the_same"))
def test_logs_reach_tensorboard(model: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = trained.run(Trainer, tmp_path, model, report_to="tensorboard", max_steps=2)
    (file,) = tmp_path.rglob("events.out.*")
    events = EventAccumulator(str(file)).Reload()
    losses = [event.value for event in events.Scalars("train/loss")]
    assert losses == pytest.approx(trained.curve(trainer, "loss").flatten().tolist())
    assert len(events.Scalars("train/grad_norm")) == 2
