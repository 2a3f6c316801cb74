"""TRL's DPOTrainer, KTOTrainer, GRPOTrainer and RLOOTrainer on streamed models, against the same models unstreamed."""
from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
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
from transformers import PreTrainedTokenizerFast
from trl.trainer import grpo_trainer, rloo_trainer

import megacompile
from megacompile.dpo import DPOTrainer
from megacompile.errors import UnsupportedError
from megacompile.grpo import GRPOTrainer
from megacompile.kto import KTOTrainer
from megacompile.rloo import RLOOTrainer
from megacompile.weights.quantizing import adopt_bitsandbytes

NUMBERS = tiny_models.VOCABULARY - 3
SHARED = {**trained.ARGUMENTS, "bf16": False, "learning_rate": 5e-3}
#: What is measured of time; what TRL does not log (loads of experts, too); and how often a reward is the larger one,
#: which rounding decides before the first update.
_OTHERWISE = ("time", "runtime", "per_second", "padding_share", "rewards/accuracies", "expert_")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CI", "1")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Its words are numbers."""
    words = ["<pad>", "<eos>", "<unk>", *map(str, range(NUMBERS))]
    tokens = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


@pytest.fixture
def policy(model: Any) -> Iterator[Any]:
    """A streamed model, as it was before trainers gave it a head."""
    yield model
    vars(model).pop("forward", None)


def count(*span: int) -> str:
    return " ".join(str(n % NUMBERS) for n in range(*span))


def preferences(rows: int) -> Any:
    """Prompts of 3 to 5 numbers, and completions of 3 to 6: those that count on are chosen."""
    from datasets import Dataset

    return Dataset.from_list([{"prompt": count(a, a + 3 + a % 3), "chosen": " " + count(a + 3, a + 6 + a % 4),
                               "rejected": " " + count(a + 20, a + 24)} for a in range(rows)])


def logged(trainer: Any) -> list[dict[str, float]]:
    """What was logged and must be equal."""
    return [{key: value for key, value in entry.items() if not any(name in key for name in _OTHERWISE)}
            for entry in trainer.state.log_history]


def assert_alike(ours: Any, theirs: Any) -> None:
    assert len(logged(ours)) == len(logged(theirs)) > 3
    for ours_now, theirs_now in zip(logged(ours), logged(theirs), strict=True):
        assert ours_now == pytest.approx(theirs_now, abs=2e-4)


def dpo(trainer: type, folder: Path, model: Any, tokenizer: Any, reference: Any = None, adapter: Any = None,
        **changes: Any) -> Any:
    settings = trl.DPOConfig(str(folder), **{**SHARED, "max_steps": 3, **changes})
    made = trainer(model=model, ref_model=reference, args=settings, train_dataset=preferences(24), eval_dataset=preferences(4),
                   processing_class=tokenizer, peft_config=adapter)
    made.train()
    return made


def test_dpo_trains_as_it_does_unstreamed(policy: Any, native: Any, tokenizer: Any, tmp_path: Path) -> None:
    """With padding, accumulation, clipping and all of TRL's metrics; the reference is the policy before training."""
    theirs, ours = (dpo(trainer, tmp_path, each, tokenizer, precompute_ref_log_probs=True)
                    for trainer, each in ((trl.DPOTrainer, native), (DPOTrainer, policy)))
    theirs.evaluate(), ours.evaluate()
    assert_alike(ours, theirs)
    tiny_models.assert_same_weights(policy, native, tolerance=1e-3)
    assert engine.trained(policy).spec.capture.further, "the last batch was not packed"


def test_a_reference_model_is_streamed_beside_the_policy(policy: Any, native: Any, tokenizer: Any, tmp_path: Path) -> None:
    """And losses with weights and lengths of their own."""
    options: dict[str, Any] = dict(loss_type=["sigmoid", "ipo"], use_weighting=True, ld_alpha=0.5)
    reference = tiny_models.build()
    with torch.no_grad():
        reference.model.norm.weight.mul_(1.5)  # another model
    theirs = dpo(trl.DPOTrainer, tmp_path, native, tokenizer, copy.deepcopy(reference), **options)
    streamed = megacompile.stream(reference, device="cpu")
    try:
        assert_alike(dpo(DPOTrainer, tmp_path, policy, tokenizer, streamed, **options), theirs)
    finally:
        streamed.megacompile.close()


def kto(trainer: type, folder: Path, model: Any, tokenizer: Any, adapter: Any = None, **changes: Any) -> Any:
    from datasets import Dataset

    rows = Dataset.from_list([{"prompt": count(a, a + 3 + a % 3), "completion": " " + count(a + 3, a + 6 + a % 4),
                               "label": a % 3 > 0} for a in range(24)])
    settings = trl.KTOConfig(str(folder), **{**SHARED, "max_steps": 3, "per_device_train_batch_size": 4, **changes})
    made = trainer(model=model, args=settings, train_dataset=rows, processing_class=tokenizer, peft_config=adapter)
    made.train()
    return made


@pytest.mark.parametrize("precomputed", [True, False])
def test_kto_trains_as_it_does_unstreamed(precomputed: bool, policy: Any, native: Any, tokenizer: Any, tmp_path: Path) -> None:
    """`train` names it to those who have answers with verdicts. The reference is the policy before training."""
    native.config._name_or_path = str(tmp_path / "before")  # TRL loads its reference from there
    native.save_pretrained(tmp_path / "before")
    theirs, ours = (kto(trainer, tmp_path, each, tokenizer, precompute_ref_log_probs=precomputed)
                    for trainer, each in ((trl.KTOTrainer, native), (KTOTrainer, policy)))
    assert_alike(ours, theirs)
    tiny_models.assert_same_weights(policy, native, tolerance=1e-3)


def test_kto_refuses_what_dpo_refuses(policy: Any, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="sync_ref_model would change the reference model's weights"):
        kto(KTOTrainer, tmp_path, policy, tokenizer, sync_ref_model=True)


def even(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(sum(int(word) % 2 == 0 for word in text.split() if word.isdigit())) for text in completions]


def prompts() -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"prompt": count(a, a + 3 + a % 3)} for a in range(24)])


def grpo(trainer: type, folder: Path, model: Any, tokenizer: Any, adapter: Any = None, reward: Any = None,
         reward_processing_classes: Any = None, **changes: Any) -> Any:
    """`reward`: in place of one for even numbers."""
    kind = trl.RLOOConfig if issubclass(trainer, trl.RLOOTrainer) else trl.GRPOConfig
    settings = kind(str(folder), **{
        **SHARED, "max_steps": 3, "per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 3,
        "num_iterations": 2, **changes})
    made = trainer(model=model, reward_funcs=even if reward is None else reward, args=settings, train_dataset=prompts(),
                   processing_class=tokenizer, peft_config=adapter, reward_processing_classes=reward_processing_classes)
    made.train()
    return made


@pytest.mark.parametrize(("module", "trainers"), [
    (grpo_trainer, (trl.GRPOTrainer, GRPOTrainer)), (rloo_trainer, (trl.RLOOTrainer, RLOOTrainer))], ids=["grpo", "rloo"])
def test_online_trainers_sample_and_train_as_they_do_unstreamed(
        module: Any, trainers: tuple[type, type], policy: Any, native: Any, tokenizer: Any, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards are of what was sampled: the same completions, token by token. Each is trained on twice, with ratios clipped, and
    beside a reference, a copy of the policy."""
    monkeypatch.setattr(module, "create_model_from_path", lambda *args, **kwargs: copy.deepcopy(native))
    theirs, ours = (grpo(trainer, tmp_path, each, tokenizer, beta=0.05)
                    for trainer, each in zip(trainers, (native, policy), strict=True))
    assert_alike(ours, theirs)
    assert any(entry.get("reward_std", 0) > 0 for entry in logged(ours)), "nothing was rewarded that could differ"


@pytest.mark.nightly(held_by=(
    "tests/system/test_preference.py::test_dpo_trains_as_it_does_unstreamed",
    "tests/system/test_sft.py::test_a_model_given_by_name_is_loaded_and_streamed_as_trl_loads_it",
    "tests/model/test_adapters.py::test_a_model_whose_adapters_are_switched_off_is_its_base_and_trains_on_afterwards"))
@pytest.mark.parametrize(("run", "trainers", "changes"), [
    (dpo, (trl.DPOTrainer, DPOTrainer), {}), (grpo, (trl.GRPOTrainer, GRPOTrainer), {"beta": 0.1})])
def test_adapters_train_against_their_base(run: Any, trainers: tuple[type, type], changes: dict[str, Any], tokenizer: Any,
                                           tmp_path: Path) -> None:
    """The reference is the model without its adapter: no second copy of the weights."""
    peft = pytest.importorskip("peft")
    logs, adapters = [], []
    for trainer in trainers:
        model = tiny_models.build(num_hidden_layers=1)
        if trainer in (DPOTrainer, GRPOTrainer):
            model = megacompile.stream(model, device="cpu")
        adapter = peft.LoraConfig(r=4, target_modules=["v_proj", "down_proj"], task_type="CAUSAL_LM")
        torch.manual_seed(3)
        logs.append(run(trainer, tmp_path, model, tokenizer, adapter=adapter, **changes))
        trained = logs[-1].model
        adapters.append({name: p.detach().clone() for name, p in trained.named_parameters() if "lora_" in name})
    assert_alike(logs[1], logs[0])
    assert sum(float(b.norm()) for name, b in adapters[1].items() if "lora_B" in name) > 0.01, "the adapter has trained"
    for name, theirs in adapters[0].items():
        assert (adapters[1][name] - theirs).norm() <= 1e-3 * theirs.norm(), name
    trained.megacompile.close()


@pytest.mark.nightly(held_by=(
    "tests/model/test_quantized.py::test_adapters_over_quantized_weights_train_as_they_do_natively",
    "tests/system/test_preference.py::test_dpo_trains_as_it_does_unstreamed"))
def test_a_policy_of_bitsandbytes_trains_an_adapter(tokenizer: Any, tmp_path: Path) -> None:
    """Against its frozen weights in four bits."""
    peft = pytest.importorskip("peft")
    made = []
    for trainer in (trl.DPOTrainer, DPOTrainer):
        model = bitsandbytes_models.loaded(bf16=False)
        if trainer is DPOTrainer:
            model = megacompile.stream(model, device="cpu", compile=False)
        else:
            adopt_bitsandbytes(model)
            megacompile.dequantize(model, torch.float32)
        adapter = peft.LoraConfig(r=4, target_modules=["v_proj", "down_proj"], task_type="CAUSAL_LM")
        torch.manual_seed(3)
        made.append(dpo(trainer, tmp_path, model, tokenizer, adapter=adapter))
    assert_alike(made[1], made[0])
    made[1].model.megacompile.close()


def test_the_default_reference_is_a_frozen_copy_of_the_policy(
        policy: Any, native: Any, tokenizer: Any, tmp_path: Path) -> None:
    ours, theirs = (dpo(trainer, tmp_path, each, tokenizer, reference) for trainer, each, reference in (
        (DPOTrainer, policy, None), (trl.DPOTrainer, native, copy.deepcopy(native))))
    assert_alike(ours, theirs)
    reference = ours.ref_model
    layout = engine.layouts(reference).values()
    assert not any(each.trainable for each in layout), "weights alone"
    assert tiny_models.same_bits(tiny_models.weights(reference), tiny_models.weights(tiny_models.build()))
    reference.megacompile.close()


def test_references_that_cannot_be_had_are_refused(policy: Any, tokenizer: Any, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(engine.config(policy), device_memory="1GiB")
    monkeypatch.setattr(type(engine.of(policy)), "config", config)
    with pytest.raises(UnsupportedError, match="a share of device_memory, which was given to the policy"):
        dpo(DPOTrainer, tmp_path, policy, tokenizer)
    for trainer, settings, more in ((DPOTrainer, trl.DPOConfig, {}), (GRPOTrainer, trl.GRPOConfig, {"reward_funcs": len})):
        with pytest.raises(UnsupportedError, match="sync_ref_model would change the reference model's weights"):
            trainer(model=policy, args=settings(str(tmp_path), sync_ref_model=True, bf16=False, use_cpu=True),
                    processing_class=tokenizer, **more)


def mixture(tokenizer: Any, routers: bool = True) -> Any:
    from transformers import AutoModelForCausalLM, MixtralConfig

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(MixtralConfig(
        vocab_size=tiny_models.VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, num_local_experts=4, output_router_logits=routers,
        router_aux_loss_coef=0.5, initializer_range=0.3, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id), attn_implementation="eager").train()


@pytest.mark.parametrize(("run", "trainers", "changes", "known"), [
    (dpo, (trl.DPOTrainer, DPOTrainer), {"precompute_ref_log_probs": True}, True),
    (kto, (trl.KTOTrainer, KTOTrainer), {"precompute_ref_log_probs": True}, False),
    (grpo, (trl.GRPOTrainer, GRPOTrainer), {}, True)], ids=["dpo", "kto, streamed again", "grpo"])
def test_router_losses_train_as_they_do_unstreamed(run: Any, trainers: tuple[type, type], changes: dict[str, Any], known: bool,
                                                   tokenizer: Any, tmp_path: Path) -> None:
    native = mixture(tokenizer, routers=run is not grpo)  # transformers cannot generate with them
    model = megacompile.stream(mixture(tokenizer, known), device="cpu")
    try:
        theirs, ours = (run(trainer, tmp_path, each, tokenizer, **changes)
                        for trainer, each in zip(trainers, (native, model), strict=True))
        assert_alike(ours, theirs)
        assert any("aux_loss" in entry for entry in logged(ours))
        tiny_models.assert_same_weights(model, native, tolerance=1e-3)
    finally:
        model.megacompile.close()


def test_a_router_loss_that_was_not_captured_is_refused(policy: Any) -> None:
    from megacompile.trainers.fused_head import FusedHead  # needs trl

    head = FusedHead(policy, 1.0, ("log_probs",))
    with pytest.raises(UnsupportedError, match="streamed without an auxiliary loss of routers: set config"):
        head(input_ids=torch.zeros(1, 4, dtype=torch.int64), labels=torch.zeros(1, 4, dtype=torch.int64),
             fused_lm_head=True, output_router_logits=True)


def test_adapters_and_dropout_are_refused(policy: Any, tokenizer: Any, tmp_path: Path) -> None:
    """TRL switches dropout off, which comes too late for a model that was captured."""
    given = dict(model=policy, args=trl.DPOConfig(str(tmp_path), use_cpu=True, bf16=False, precompute_ref_log_probs=True),
                 train_dataset=preferences(4), processing_class=tokenizer)
    peft = pytest.importorskip("peft")
    with pytest.raises(UnsupportedError, match="disable_dropout comes too late for an adapter that is streamed: pass lora"):
        DPOTrainer(**given, peft_config=peft.LoraConfig(lora_dropout=0.1))
    policy.get_base_model = lambda: None
    with pytest.raises(UnsupportedError, match=r"copy the adapter .* peft_config="):
        DPOTrainer(**given)
    del policy.get_base_model
    policy.add_module("late", torch.nn.Dropout(0.1))
    try:
        with pytest.raises(UnsupportedError, match="set its dropout to 0 before"):
            DPOTrainer(**given)
    finally:
        del policy.late


@pytest.mark.nightly(held_by=(
    "tests/system/test_preference.py::test_the_default_reference_is_a_frozen_copy_of_the_policy",
    "tests/system/test_preference.py::test_grpo_needs_no_more_than_a_name_and_a_reward"))
@pytest.mark.parametrize(("run", "trainers", "changes"), [
    pytest.param(dpo, (trl.DPOTrainer, DPOTrainer), {}, id="dpo"),
    pytest.param(grpo, (trl.GRPOTrainer, GRPOTrainer), {"beta": 0.05}, id="grpo")])
def test_a_policy_given_by_name_is_streamed_and_its_reference_is_a_frozen_copy(
        run: Any, trainers: tuple[type, type], changes: dict[str, Any], tokenizer: Any, tmp_path: Path) -> None:
    tiny_models.build().save_pretrained(tmp_path / "base")
    # As the other tests' models are made, which shares their captures.
    changes = {**changes, "model_init_kwargs": {"attn_implementation": "eager"}}
    theirs, made = (run(trainer, tmp_path, str(tmp_path / "base"), tokenizer, **changes) for trainer in trainers)
    assert_alike(made, theirs)
    assert not any(p.requires_grad for p in made.ref_model.parameters())
    for each in (made.model, made.ref_model):
        each.megacompile.close()


@pytest.mark.parametrize("adapted", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["plain", "adapted"])
def test_grpo_needs_no_more_than_a_name_and_a_reward(adapted: bool, tokenizer: Any, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Without arguments: TRL's defaults, in a folder of the model's name."""
    from datasets import Dataset

    peft = pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trl, "GRPOConfig", functools.partial(trl.GRPOConfig, use_cpu=True, bf16=False))  # there is no GPU
    tiny_models.build().save_pretrained("base")
    tokenizer.save_pretrained("base")
    adapter = peft.LoraConfig(r=2, target_modules=["v_proj"], task_type="CAUSAL_LM") if adapted else None
    made = GRPOTrainer("base", len, train_dataset=Dataset.from_list([{"prompt": "1 2 3"}]), peft_config=adapter)
    assert made.args.output_dir == "base-GRPO"
    assert any("lora_" in name for name, _ in made.model.named_parameters()) is adapted
    made.model.megacompile.close()


@pytest.mark.nightly(held_by="tests/system/test_preference.py::test_adapters_and_dropout_are_refused")
@pytest.mark.parametrize(("trainer", "settings"), [
    (DPOTrainer, lambda folder: trl.DPOConfig(folder, bf16=False, use_cpu=True)),
    (GRPOTrainer, lambda folder: trl.GRPOConfig(folder, bf16=False, use_cpu=True, disable_dropout=True))], ids=["dpo", "grpo"])
def test_dropout_of_a_model_given_by_name_is_refused(trainer: Any, settings: Any, tokenizer: Any, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    more = {"reward_funcs": len} if trainer is GRPOTrainer else {}
    with pytest.raises(UnsupportedError, match="set its dropout to 0 before"):
        trainer(model=str(tmp_path / "base"), args=settings(str(tmp_path)), train_dataset=preferences(4),
                processing_class=tokenizer, **more)


@pytest.mark.parametrize("generations", [
    {"steps_per_generation": 2}, pytest.param({"generation_batch_size": 16}, marks=pytest.mark.nightly)], ids=str)
def test_completions_of_several_steps_are_sampled_at_once_as_they_are_unstreamed(
        generations: dict[str, int], policy: Any, native: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Later batches of a generation, and its second iteration, are trained on by a policy that has changed since: their ratios
    are to what it was. (TRL refuses both settings at once.)"""
    theirs, ours = (grpo(trainer, tmp_path, each, tokenizer, gradient_accumulation_steps=1, max_steps=10, **generations)
                    for trainer, each in ((trl.GRPOTrainer, native), (GRPOTrainer, policy)))
    assert_alike(ours, theirs)
    sampled = generations.get("steps_per_generation") or generations["generation_batch_size"] // 4
    assert ours.args.steps_per_generation == sampled and ours.num_iterations == 2
    steps = [entry for entry in logged(ours) if "loss" in entry]
    rewards = {number: entry["reward"] for number, entry in enumerate(steps) if "reward" in entry}
    assert list(rewards) == [*range(0, 10, 2 * sampled)] and len(set(rewards.values())) == len(rewards)
    assert any(entry["clip_ratio/region_mean"] > 0 for entry in steps), "the policy has moved"


@pytest.mark.nightly(held_by=(
    "tests/system/test_preference.py::test_online_trainers_sample_and_train_as_they_do_unstreamed",
    "tests/model/test_heads.py::test_a_classifier_of_transformers_is_exact"))
@pytest.mark.parametrize("trainer", [GRPOTrainer, RLOOTrainer])
def test_a_reward_model_that_is_streamed_rewards_as_it_does_unstreamed(
        trainer: Any, policy: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Texts of several lengths, padded on the right."""
    from transformers import AutoModelForSequenceClassification, Qwen2Config

    from megacompile.streaming.streamed_module import StreamedModule

    config = Qwen2Config(vocab_size=tiny_models.VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, num_labels=1,
                         pad_token_id=tokenizer.pad_token_id, initializer_range=0.5)
    torch.manual_seed(1)
    judge = AutoModelForSequenceClassification.from_config(config).eval()
    judges = (judge, megacompile.stream(copy.deepcopy(judge).requires_grad_(False), device="cpu"))
    made, start = [], tiny_models.weights(policy)
    for each in judges:
        policy.load_state_dict(start)
        torch.manual_seed(3)
        made.append(grpo(trainer, tmp_path, policy, tokenizer, reward=each, reward_processing_classes=tokenizer))
        vars(policy).pop("forward", None)
    assert isinstance(made[1].reward_funcs[0], StreamedModule) and not isinstance(made[0].reward_funcs[0], StreamedModule)
    assert_alike(*made)
    rewards = [entry["reward"] for entry in logged(made[1]) if "reward" in entry]
    assert len(set(rewards)) > 1 and any(entry.get("reward_std", 0) > 0 for entry in logged(made[1]))
    judges[1].megacompile.close()
