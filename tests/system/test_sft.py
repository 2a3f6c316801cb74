"""TRL's SFTTrainer on streamed models, against the same models unstreamed."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import engine
import pytest
import torch

pytest.importorskip("datasets")
pytest.importorskip("trl")

import bitsandbytes_models
import tiny_models
import trained
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, MixtralConfig, PreTrainedTokenizerFast

import megacompile.trainer
from megacompile.errors import UnsupportedError
from megacompile.sft import SFTTrainer
from megacompile.weights.quantizing import forget_bitsandbytes

SHARED = {**trained.ARGUMENTS, "max_steps": 30, "lr_scheduler_type": "cosine", "bf16": False}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # TRL reports what is trained with it, unless told not to
    monkeypatch.setenv("CI", "1")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Its words are numbers."""
    words = ["<pad>", "<eos>", "<unk>", *(str(n) for n in range(tiny_models.VOCABULARY - 3))]
    tokens = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def conversations(rows: int) -> Any:
    """Prompts of 3 to 6 numbers that count upwards, and completions that go on for 4: the loss is on these."""
    from datasets import Dataset

    def text(numbers: range) -> str:
        return " ".join(str(n % (tiny_models.VOCABULARY - 3)) for n in numbers)

    starts = torch.randint(60, (rows,), generator=torch.Generator().manual_seed(0)).tolist()
    spans = [(start, start + 3 + row % 4) for row, start in enumerate(starts)]
    return Dataset.from_list([{"prompt": text(range(a, b)), "completion": " " + text(range(b, b + 4))} for a, b in spans])


def make(trainer: type, folder: Path, model: Any, tokenizer: Any, given: dict[str, Any] | None = None, **changes: Any) -> Any:
    settings = trl.SFTConfig(str(folder), **{**SHARED, **changes})
    return trainer(model=model, args=settings, train_dataset=conversations(40), eval_dataset=conversations(5),
                   processing_class=tokenizer, **(given or {}))


def test_curves_are_those_of_an_unstreamed_trainer(model: Any, native: Any, tokenizer: Any, tmp_path: Path) -> None:
    """30 steps with prompts masked, padding, clipping and accumulation, then an evaluation."""
    curves, evaluated = [], []
    for trainer, each in ((trl.SFTTrainer, native), (SFTTrainer, model)):
        made = make(trainer, tmp_path, each, tokenizer)
        made.train()
        curves.append(trained.curve(made, "loss", "grad_norm", "learning_rate", "num_tokens"))
        evaluated.append(made.evaluate()["eval_loss"])
    assert curves[0].shape == (30, 4) and curves[0][-1, 0] < curves[0][0, 0] - 0.5, "nothing was learned that could differ"
    torch.testing.assert_close(curves[1], curves[0], rtol=0, atol=1e-4)
    assert evaluated[1] == pytest.approx(evaluated[0], abs=1e-4)
    assert engine.trained(model).spec.whole_step
    assert "forward" not in vars(model)


def test_losses_of_trls_own_are_trained_alike(model: Any, native: Any, tokenizer: Any, tmp_path: Path) -> None:
    """With what TRL logs of each step."""
    curves = []
    for trainer, each in ((trl.SFTTrainer, native), (SFTTrainer, model)):
        made = make(trainer, tmp_path, each, tokenizer, loss_type="dft", max_steps=4)
        made.train()
        curves.append(trained.curve(made, "loss", "grad_norm", "num_tokens", "entropy", "mean_token_accuracy"))
    torch.testing.assert_close(curves[1], curves[0], rtol=0, atol=1e-4)
    del model.forward


@pytest.mark.parametrize("loss", ["nll", pytest.param("dft", marks=pytest.mark.nightly)])
def test_evaluations_log_what_trl_logs_and_choose_the_best_model_by_it(loss: str, model: Any, native: Any, tokenizer: Any,
                                                                       tmp_path: Path) -> None:
    """From the evaluation before the first step."""
    best, evaluations = [], []
    for trainer, each in ((trl.SFTTrainer, native), (SFTTrainer, model)):
        made = make(trainer, tmp_path / trainer.__module__, each, tokenizer, max_steps=4, eval_strategy="steps", eval_steps=2,
                    save_strategy="steps", save_steps=2, load_best_model_at_end=True, loss_type=loss, eval_on_start=True,
                    metric_for_best_model="eval_mean_token_accuracy", per_device_eval_batch_size=2)
        made.train()
        best.append(made.state.best_metric)
        evaluations.append([{key: value for key, value in entry.items() if not key.endswith(("runtime", "second", "time"))}
                            for entry in made.state.log_history if "eval_loss" in entry])
    vars(model).pop("forward", None)
    assert best[1] == pytest.approx(best[0], abs=1e-5)
    assert len(evaluations[0]) == 3 and {"eval_entropy", "eval_mean_token_accuracy"} <= evaluations[0][0].keys()
    for ours, theirs in zip(*reversed(evaluations), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", [
    dict(packing=True, packing_strategy="wrapped", max_length=16), dict(packing=True, packing_strategy="bfd", max_length=16),
    dict(padding_free=True, max_length=None)], ids=["wrapped", "bfd", "padding-free"])
def test_packed_rows_are_trained_alike(how: dict[str, Any], model: Any, native: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Rows cut from a stream of tokens; whole sequences one after another, each of which sees itself alone; all sequences of
    a batch in one row."""
    curves = []
    native.config.use_cache = False  # with a cache transformers lets the sequences of a row see each other
    for trainer, each in ((trl.SFTTrainer, native), (SFTTrainer, model)):
        made = make(trainer, tmp_path, each, tokenizer, **how, max_steps=3)
        made.train()
        curves.append(trained.curve(made, "loss", "grad_norm"))
    torch.testing.assert_close(curves[1], curves[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("changes", "remedy"), [
    (dict(bf16=True), "bf16=False"),
])
def test_what_is_not_supported_is_refused_at_once(changes: Any, remedy: str, model: Any, tokenizer: Any,
                                                     tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=remedy):
        make(SFTTrainer, tmp_path, model, tokenizer, **changes)


@pytest.mark.parametrize("known", [False, pytest.param(True, marks=pytest.mark.nightly(
    held_by="tests/system/test_sft.py::test_a_router_loss_is_divided_among_accumulated_batches"))])
def test_a_router_loss_is_divided_among_accumulated_batches(known: bool, tokenizer: Any, tmp_path: Path) -> None:
    """Also if it was not known when the model was streamed."""
    curves = []
    for trainer in (trl.SFTTrainer, SFTTrainer):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(MixtralConfig(
            vocab_size=tiny_models.VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, num_local_experts=4, output_router_logits=known,
            router_aux_loss_coef=0.5), attn_implementation="eager")
        if trainer is SFTTrainer:
            model = megacompile.stream(model, device="cpu", compile=False)
        made = make(trainer, tmp_path, model, tokenizer, max_steps=3)
        made.train()
        curves.append(trained.curve(made, "loss", "grad_norm"))
    torch.testing.assert_close(curves[1], curves[0], rtol=0, atol=1e-4)
    made.model.megacompile.close()


def test_a_model_that_takes_other_arguments_is_not_streamed_again_for_an_adapter(tokenizer: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(
        "gpt2", vocab_size=tiny_models.VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64))
    ids = torch.zeros(2, 8, dtype=torch.int64)
    model = megacompile.stream(plain, device="cpu", example=dict(input_ids=ids, labels=ids, token_type_ids=ids))
    with pytest.raises(UnsupportedError, match="can stream a model again only if it takes input_ids and labels: call peft"):
        make(SFTTrainer, tmp_path, model, tokenizer, dict(peft_config=peft.LoraConfig(r=4, target_modules=["c_attn"])))
    model.megacompile.close()


def randomize_adapter(model: Any) -> None:
    """The same random values in every model: PEFT starts from an adapter that does nothing."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, 0, 0.3, generator)


@pytest.mark.nightly(held_by="tests/system/test_sft.py::test_a_model_given_by_name_is_loaded_and_streamed_as_trl_loads_it")
@pytest.mark.parametrize("loss", ["nll", "dft"])
def test_an_adapter_is_trained_as_it_is_by_an_unstreamed_trainer(loss: str, tokenizer: Any, tmp_path: Path) -> None:
    """With a `peft_config`, and evaluated; and a checkpoint of the adapter is loaded when training is resumed."""
    peft = pytest.importorskip("peft")
    curves, evaluated = [], []
    for trainer in (trl.SFTTrainer, SFTTrainer):
        model = tiny_models.build(num_hidden_layers=1)
        if trainer is SFTTrainer:
            megacompile.stream(model, device="cpu")
        config = peft.LoraConfig(r=4, target_modules=["v_proj", "down_proj"])
        folder = tmp_path / trainer.__module__
        made = make(trainer, folder, model, tokenizer, dict(peft_config=config), max_steps=4, learning_rate=1e-2,
                    save_strategy="steps", save_steps=2, loss_type=loss)
        randomize_adapter(made.model)
        made.train()
        curves.append(trained.curve(made, "loss", "grad_norm"))
        found = made.evaluate()
        evaluated.append([found[f"eval_{name}"] for name in ("loss", "entropy", "mean_token_accuracy")])
    assert evaluated[1] == pytest.approx(evaluated[0], abs=1e-4)
    torch.testing.assert_close(curves[1], curves[0], rtol=0, atol=1e-4)
    assert (folder / "checkpoint-2" / "adapter_model.safetensors").exists()
    final = [p.detach().clone() for p in made.model.parameters()]
    made.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert all(torch.equal(p, q) for p, q in zip(made.model.parameters(), final, strict=True))
    made.model.megacompile.close()


def test_a_trainer_that_replaces_the_forward_is_refused(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    class Theirs(megacompile.trainer.Trainer, trl.SFTTrainer):
        """Computes its loss outside the model, as DPO and GRPO do."""

    trainer = make(Theirs, tmp_path, model, tokenizer)
    try:
        with pytest.raises(UnsupportedError, match="Theirs replaces the model's forward"):
            trainer.train()
    finally:
        del model.forward


def test_a_model_given_by_name_is_loaded_and_streamed_as_trl_loads_it(tokenizer: Any, tmp_path: Path) -> None:
    """With its config changed by `model_init_kwargs`, and an adapter, which is evaluated, and whose checkpoint is resumed."""
    peft = pytest.importorskip("peft")
    tiny_models.build(num_hidden_layers=1).save_pretrained(tmp_path / "base")
    curves, evaluated = [], []
    for trainer in (trl.SFTTrainer, SFTTrainer):
        config = peft.LoraConfig(r=4, target_modules=["v_proj", "down_proj"])
        folder = tmp_path / trainer.__module__
        made = make(trainer, folder, str(tmp_path / "base"), tokenizer, dict(peft_config=config), max_steps=3,
                    learning_rate=1e-1, save_strategy="steps", save_steps=2,
                    model_init_kwargs={"initializer_range": 0.5, "dtype": "float32"})
        made.train()
        curves.append(trained.curve(made, "loss", "grad_norm"))
        found = made.evaluate()
        evaluated.append([found[f"eval_{name}"] for name in ("loss", "entropy", "mean_token_accuracy")])
    torch.testing.assert_close(curves[1], curves[0], rtol=0, atol=1e-4)
    assert evaluated[1] == pytest.approx(evaluated[0], abs=1e-4)
    assert made.model.config.initializer_range == 0.5
    assert (folder / "checkpoint-2" / "adapter_model.safetensors").exists()
    final = [p.detach().clone() for p in made.model.parameters()]
    made.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert all(torch.equal(p, q) for p, q in zip(made.model.parameters(), final, strict=True))
    made.model.megacompile.close()


@pytest.mark.parametrize(("options", "reason"), [
    ({"attn_implementation": "flash_attention_2"}, "the attention kernel is chosen"),
    ({"dtype": "float16"}, "dtype must be torch"),
    ({"device_map": "balanced"}, "streaming decides where weights are"), ({"trust_remote_code": True}, "is not run"),
    ({"absent_option": 1}, "absent_option, which is an option of neither the config")])
def test_model_init_kwargs_that_are_not_supported_are_refused(
        options: dict[str, Any], reason: str, tokenizer: Any, tmp_path: Path) -> None:
    tiny_models.build(num_hidden_layers=1).config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=reason):
        make(SFTTrainer, tmp_path, str(tmp_path), tokenizer, model_init_kwargs=options)


# ---------------------------------------------------------------- quantized weights
#: What holds of these models with every commit: that they train, and that trainers give adapters to models.
WITH_EVERY_COMMIT = ("tests/model/test_quantized.py::test_adapters_over_quantized_weights_train_as_they_do_natively",
                     "tests/system/test_sft.py::test_a_model_given_by_name_is_loaded_and_streamed_as_trl_loads_it")


@pytest.mark.nightly(
    held_by="tests/model/test_bitsandbytes.py::test_an_adapter_over_a_checkpoint_in_eight_bits_trains_as_it_does_natively")
@pytest.mark.parametrize(("bf16", "prepared"), [(True, True), (False, False), (True, False)])
def test_a_model_of_bitsandbytes_is_streamed_and_given_an_adapter(bf16: bool, prepared: bool, tokenizer: Any,
                                                                  tmp_path: Path) -> None:
    """As people write it: load, perhaps prepare, stream, and give the trainer a `peft_config`. The adapter stays in float32,
    which it would not in a model that TRL took for one of bitsandbytes."""
    peft = pytest.importorskip("peft")
    curves = []
    for trainer in (trl.SFTTrainer, SFTTrainer):
        model = bitsandbytes_models.loaded(torch.bfloat16 if prepared else torch.float32, bf16)
        if prepared:
            model = peft.prepare_model_for_kbit_training(model)
        if trainer is SFTTrainer:
            model = megacompile.stream(model, device="cpu", compile=False)
        else:
            forget_bitsandbytes(model)
        config = peft.LoraConfig(r=4, target_modules=["v_proj", "down_proj"], task_type="CAUSAL_LM")
        made = make(trainer, tmp_path, model, tokenizer, dict(peft_config=config), max_steps=3, learning_rate=1e-2)
        randomize_adapter(made.model)
        made.train()
        curves.append(trained.curve(made, "loss", "grad_norm"))
    tolerance = 3e-2 if bf16 else 1e-4
    torch.testing.assert_close(curves[1], curves[0], rtol=tolerance, atol=tolerance)
    assert {p.dtype for p in made.model.parameters() if p.requires_grad} == {torch.float32}
    made.model.megacompile.close()


@pytest.mark.nightly(held_by="tests/system/test_sft.py::test_a_model_given_by_name_is_loaded_and_streamed_as_trl_loads_it")
@pytest.mark.parametrize("given_as", ["argument", "model_init_kwargs"])
def test_a_model_given_by_name_is_quantized_as_trl_is_told_to(given_as: str, tokenizer: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    bitsandbytes_models.build().save_pretrained(tmp_path / "base")
    rounded = megacompile.quantize(bitsandbytes_models.build().requires_grad_(False))
    megacompile.dequantize(rounded, torch.float32).save_pretrained(tmp_path / "rounded")
    narrow = given_as == "argument"
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                             bnb_4bit_compute_dtype=torch.bfloat16 if narrow else None)
    curves = []
    for trainer, name in ((trl.SFTTrainer, "rounded"), (SFTTrainer, "base")):
        given: dict[str, Any] = dict(peft_config=peft.LoraConfig(r=4, target_modules=["v_proj", "down_proj"]))
        options: dict[str, Any] = {"dtype": "float32"}
        if trainer is SFTTrainer:
            (given if narrow else options)["quantization_config"] = how
        made = make(trainer, tmp_path, str(tmp_path / name), tokenizer, given, max_steps=3, learning_rate=1e-1,
                    model_init_kwargs=options)
        made.train()
        curves.append(trained.curve(made, "loss", "grad_norm"))
    tolerance = 3e-2 if narrow else 1e-4
    torch.testing.assert_close(curves[1], curves[0], rtol=tolerance, atol=tolerance)
    layers = bitsandbytes_models.layers_of(made.model)
    assert layers and {layer.compute_dtype for layer in layers} == {torch.bfloat16 if narrow else None}
    made.model.megacompile.close()
