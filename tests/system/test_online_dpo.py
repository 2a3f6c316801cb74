"""TRL's OnlineDPOTrainer on streamed models, against the same models unstreamed."""
from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("datasets")
pytest.importorskip("trl")

import test_preference
import tiny_models
from test_preference import SHARED, assert_alike, even, logged, preferences, prompts
from trl.experimental import online_dpo as trl_online_dpo

import megacompile
from megacompile.errors import MegacompileError, UnsupportedError
from megacompile.online_dpo import OnlineDPOTrainer


def online_dpo(trainer: type, folder: Path, model: Any, tokenizer: Any, reference: Any = None, adapter: Any = None,
               **changes: Any) -> Any:
    settings = trl_online_dpo.OnlineDPOConfig(str(folder), **{
        **SHARED, "max_steps": 3, "per_device_train_batch_size": 4, "max_new_tokens": 4, "missing_eos_penalty": 0.5,
        "gradient_checkpointing": False, **changes})
    made = trainer(model=model, ref_model=reference, reward_funcs=even, args=settings, train_dataset=prompts(),
                   processing_class=tokenizer, peft_config=adapter)
    made.train()
    return made


class Native(trl_online_dpo.OnlineDPOTrainer):
    """TRL's, whose logs leave out tokens after the end of a completion, as ours do. Its loss does so anyway."""

    def _forward(self, model: Any, prompt_ids: Tensor, prompt_mask: Tensor, ids: Tensor, mask: Tensor, *images: Any) -> Any:
        return super()._forward(model, prompt_ids, prompt_mask, ids, mask, *images) * mask


_offline, tokenizer, policy = test_preference._offline, test_preference.tokenizer, test_preference.policy  # fixtures
ONLINE_DPO = (Native, OnlineDPOTrainer)


@pytest.mark.parametrize("changes", [
    {"max_length": 3}, *(pytest.param(each, marks=pytest.mark.nightly) for each in (
        {}, {"loss_type": "ipo", "max_length": 5}, {"beta": 0.3, "gradient_checkpointing": True}))], ids=str)
def test_online_dpo_samples_and_trains_as_it_does_unstreamed(
        changes: dict[str, Any], policy: Any, native: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Against a frozen copy of the policy; prompts that are too long are cut."""
    theirs, ours = (online_dpo(trainer, tmp_path, each, tokenizer, **changes)
                    for trainer, each in zip(ONLINE_DPO, (native, policy), strict=True))
    assert_alike(ours, theirs)
    tiny_models.assert_same_weights(policy, native, tolerance=1e-3)
    assert not any(p.requires_grad for p in ours.ref_model.parameters())
    assert any(entry.get("objective/scores_margin", 0) > 0 for entry in logged(ours)), "nothing was rewarded that could differ"
    ours.ref_model.megacompile.close()


@pytest.mark.nightly(held_by=("tests/system/test_online_dpo.py::test_online_dpo_samples_and_trains_as_it_does_unstreamed",
                              "tests/system/test_sft.py::test_a_model_given_by_name_is_loaded_and_streamed_as_trl_loads_it"))
def test_online_dpo_trains_an_adapter_against_its_base(tokenizer: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    made = []
    for trainer in ONLINE_DPO:
        model = tiny_models.build(num_hidden_layers=1)
        model = megacompile.stream(model, device="cpu") if trainer is OnlineDPOTrainer else model
        adapter = peft.LoraConfig(r=4, target_modules=["v_proj", "down_proj"], task_type="CAUSAL_LM")
        torch.manual_seed(3)
        made.append(online_dpo(trainer, tmp_path, model, tokenizer, adapter=adapter))
    assert_alike(made[1], made[0])
    assert made[1].ref_model is None
    trained = [p.detach() for name, p in made[1].model.named_parameters() if "lora_B" in name]
    assert any(float(p.norm()) > 0 for p in trained)
    made[1].model.megacompile.close()


@pytest.mark.nightly(held_by=(
    "tests/system/test_online_dpo.py::test_online_dpo_samples_and_trains_as_it_does_unstreamed",
    "tests/system/test_preference.py::test_grpo_needs_no_more_than_a_name_and_a_reward",
    "tests/system/test_preference.py::test_a_reference_model_is_streamed_beside_the_policy"))
def test_online_dpo_takes_a_name_and_a_streamed_reference(tokenizer: Any, tmp_path: Path) -> None:
    tiny_models.build().save_pretrained(tmp_path / "base")
    reference = tiny_models.build()
    with torch.no_grad():
        reference.model.norm.weight.mul_(1.5)  # another model
    streamed = megacompile.stream(copy.deepcopy(reference).requires_grad_(False), device="cpu")
    changes = {"model_init_kwargs": {"attn_implementation": "eager", "dtype": "float32"}}
    theirs = online_dpo(Native, tmp_path, str(tmp_path / "base"), tokenizer, reference, **changes)
    ours = online_dpo(OnlineDPOTrainer, tmp_path, str(tmp_path / "base"), tokenizer, streamed, **changes)
    assert_alike(ours, theirs)
    for each in (ours.model, streamed):
        each.megacompile.close()


def test_online_dpo_refuses_what_it_cannot_do(policy: Any, tokenizer: Any, tmp_path: Path) -> None:
    run = functools.partial(online_dpo, OnlineDPOTrainer, tmp_path, policy, tokenizer)
    with pytest.raises(UnsupportedError, match=r"sends weights to a vLLM server: .*leave use_vllm out"):
        run(use_vllm=True)
    with pytest.raises(MegacompileError, match="streamed"):
        run(reference=tiny_models.build())
    with pytest.raises(UnsupportedError, match="pass an OnlineDPOConfig"):
        OnlineDPOTrainer(policy, reward_funcs=[len], train_dataset=preferences(4), processing_class=tokenizer)
    dropping = megacompile.stream(tiny_models.build(), device="cpu")
    dropping.model.norm = torch.nn.Sequential(torch.nn.Dropout(0.1))  # as a model that has dropout
    with pytest.raises(UnsupportedError, match="disable_dropout comes too late"):
        online_dpo(OnlineDPOTrainer, tmp_path, dropping, tokenizer, disable_dropout=True)
    dropping.megacompile.close()
