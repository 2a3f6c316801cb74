"""verl's FSDP engine and ours beside each other: with verl's losses, its worker of PPO and GRPO, and its trainer of SFT.

Skipped unless `MEGACOMPILE_VERL_PYTHON` names the interpreter of an environment with verl (`tests/support/real_verl.py`)."""
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import real_verl
import tiny_models
import tiny_tokenizer
import verl_contract

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(not real_verl.PYTHON, reason="MEGACOMPILE_VERL_PYTHON is not set")]
#: The largest difference of what is computed once, and of weights after five steps of AdamW, which divides by gradients' sizes.
TOLERANCE, OF_WEIGHTS = 5e-6, 1e-4
#: verl sends merged weights in bfloat16.
OF_MERGED = 2**-8
CRITIC = {"before values", "critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean", "after values"}
POLICY = {"before log_probs", "before entropy", "before sum_pi_squared", "actor/pg_loss", "actor/ppo_kl", "actor/entropy_loss",
          "kl_loss", "after log_probs", "after entropy"}
OF_ALL = {"before loss", "loss", "losses", "lr", "grad_norm", "after loss", "weights"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return real_verl.case("model", folder=str(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(("ranks", "settings"), [
    (1, {}), (1, {"max_token_len_per_gpu": 20}), (1, {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}),
    (1, {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 6, "temperature": 1.0}),
    (1, {"settings": {"tokens_per_forward": 25}, "max_token_len_per_gpu": 20}), (1, {"calculate_entropy": False}),
    (2, {}), (2, {"settings": {"tokens_per_forward": 25}, "max_token_len_per_gpu": 20}),
    (1, {"lora": True}), (1, {"model_type": "value_model"}), (1, {"optimizer": {"optimizer": "SGD", "lr": 0.1}})], ids=str)
def test_losses_metrics_norms_values_and_weights_are_those_of_verls_fsdp_engine(
        ranks: int, settings: dict[str, Any], folder: str) -> None:
    found = real_verl.case("parity", ranks, folder=folder, **settings)
    print(json.dumps(found))
    without_entropy = {"before entropy", "actor/entropy_loss", "after entropy"} if "calculate_entropy" in settings else set()
    wanted = (CRITIC if "model_type" in settings else POLICY) - without_entropy
    assert found.keys() >= wanted | OF_ALL
    assert found.pop("norm of the last step") > 0.6, "so that clipping changes it"
    assert found.pop("weights") <= (OF_MERGED if "lora" in settings else OF_WEIGHTS)
    assert max(value for name, value in found.items() if not name.startswith("after")) <= TOLERANCE
    assert max(value for name, value in found.items() if name.startswith("after")) <= OF_WEIGHTS


def test_verls_worker_of_ppo_and_grpo_trains_by_verls_own_configuration(folder: str) -> None:
    """With `actor.strategy=megacompile`: log-probabilities, also of a reference, and updates over mini-batches and epochs."""
    found = real_verl.case("worker", folder=folder)
    print(json.dumps(found))
    assert found.keys() >= {"actor", "reference", "1 actor/pg_loss", "2 kl_loss", "2 grad_norm", "2 lr"}
    assert found.pop("after") <= OF_WEIGHTS
    assert max(found.values()) <= TOLERANCE


def test_a_checkpoint_goes_on_with_the_same_bits(folder: str, tmp_path: Path) -> None:
    found = real_verl.case("resume", folder=folder, out=str(tmp_path))
    assert found == {"weights": True, "steps": True, "after": True, "hugging face": True, "folders": ["global_step_3"]}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_rollout_gets_the_models_weights_whole_in_shards_and_as_changes(ranks: int, folder: str) -> None:
    assert real_verl.case("exported", ranks, folder=folder) == {"whole": True, "shards": True, "changes": True, "changed": True}


#: A part of what is said.
REFUSALS = {
    "ulysses_sequence_parallel_size": "ulysses_sequence_parallel_size=2 is not supported by the engine",
    "full_determinism": "full_determinism=True is not supported by the engine",
    "mixed_precision": "mixed_precision.param_dtype='fp16' is not supported by the engine megacompile: compute in bf16 or fp32",
    "use_liger": "use_liger=True is not supported by the engine", "lora": "lora_rank > 0 needs lora.merge=True",
    "load_contents": "load_contents leaves out 'optimizer', and a checkpoint is loaded whole: add it",
    "save_lora_only": "save_lora_only=True is not supported by the engine",
    "optimizer": "optimizer='Adam' is not supported by the engine megacompile: choose AdamW, Lion, Muon or SGD",
    "optimizer_impl": "optimizer_impl='torchao.optim' is not supported by the engine",
    "Lion": "optimizer=Lion is not torch.optim's: set optimizer_impl=megacompile",
    "arrival": "override_optimizer_config has update='arrival', and verl clips",
    "distillation_use_topk": "needs the logits of every token",
    "images": "images do not reach a streamed model through verl",
    "position_ids": "position_ids do not count the tokens of each row",
    "input_ids": "input_ids are padded: set pad_mode=no_padding",
    "no optimizer": "the engine has no optimizer: call initialize()",
}


def test_settings_and_batches_that_are_not_supported_are_refused(folder: str) -> None:
    found = real_verl.case("refused", folder=folder)
    assert found.keys() == REFUSALS.keys()
    for name, said in REFUSALS.items():
        assert found[name].startswith("UnsupportedError: ") and said in found[name], found[name]


def test_verls_trainer_of_sft_logs_the_same_with_both_engines_and_resumes(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer.build()
    tokenizer.pad_token = tokenizer.eos_token
    tiny_models.build(vocab_size=300).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [[{"role": "user", "content": f"{a} + {b}?"}, {"role": "assistant", "content": f"It is {a + b}." * (1 + a % 3)}]
            for a in range(6) for b in range(8)]
    write_rows(tmp_path / "rows.parquet", rows)
    ours = ["engine._target_=megacompile.trainers.verl_engine.MegacompileEngineConfig", "+engine.stream.device_memory=1GiB"]
    logs = {name: sft(tmp_path, name, device, *chosen) for name, device, chosen in (
        ("fsdp2", "cuda", ["engine.strategy=fsdp2"]), ("megacompile", "cpu", ours))}
    print(logs)
    assert len(logs["fsdp2"]) == 3 * 3 + 2 and logs["fsdp2"].keys() == logs["megacompile"].keys()
    for name, value in logs["fsdp2"].items():
        assert logs["megacompile"][name] == pytest.approx(value, rel=2e-6), name
    (tmp_path / "megacompile" / "latest_checkpointed_iteration.txt").write_text("2")
    again = sft(tmp_path, "megacompile", "cpu", *ours)
    assert again == {name: value for name, value in logs["megacompile"].items() if name.startswith("3 ")}


def write_rows(path: Path, rows: list[Any]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"messages": rows}), path)


def sft(folder: Path, name: str, device: str, *changes: str) -> dict[str, float]:
    """What verl's trainer logs of each step, from "STEP NAME" to the value, in full digits."""
    printed = real_verl.run(
        "-m", "verl.trainer.sft_trainer", f"model.path={folder / 'model'}", "model.use_remove_padding=False",
        "+model.override_config.attn_implementation=eager", f"data.train_files={folder / 'rows.parquet'}",
        f"data.val_files={folder / 'rows.parquet'}", "data.train_batch_size=16", "data.max_token_len_per_gpu=200",
        "data.num_workers=0", "data.max_length=256", "trainer.logger=[console]", "trainer.total_epochs=1",
        "trainer.save_freq=1", "trainer.test_freq=2", "trainer.device=cpu", f"trainer.default_local_dir={folder / name}",
        "optim.lr=1e-2", "optim.clip_grad=0.5", "+engine.mixed_precision.param_dtype=fp32",
        "+engine.mixed_precision.reduce_dtype=fp32", "engine.use_torch_compile=false", *changes, device=device)
    wanted = ("train/loss", "train/grad_norm", "train/lr", "val/loss")
    return {f"{step} {key}": float(value) for step, line in re.findall(r"step:(\d+) - (.*)", printed)
            for key, value in re.findall(r"(\S+):(\S+)", line) if key in wanted}


def test_the_recorded_interface_is_that_of_the_installed_release() -> None:
    script = str(Path(verl_contract.__file__))
    printed = real_verl.run(script)
    recorded = (Path(script).parent / "verl_contract.json").read_text()
    assert json.loads(printed[printed.index("{\n"):]) == json.loads(recorded)


def test_a_release_of_verl_that_was_not_tested_is_refused(tmp_path: Path) -> None:
    (tmp_path / "later.py").write_text(
        "import verl\nverl.__version__ = '0.10.0'\nimport megacompile.trainers.verl_engine\n")
    with pytest.raises(AssertionError, match=r"verl 0.10.0 was not tested with megacompile's engine: install verl 0.9"):
        real_verl.run(str(tmp_path / "later.py"))
