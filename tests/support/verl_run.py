"""Runs verl's engine and ours beside each other, in verl's environment: `python verl_run.py CASE JSON`, or under torchrun.

Rank 0 prints what a case returns as JSON in the last line. Both engines get the same batches and compute in float32 on the CPU.
verl's is its FSDP2 engine, with padded rows and PyTorch's attention."""
from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
import verl.utils.model
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.utils.metric import Metric
from verl.workers.config import ActorConfig, CriticConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss

OURS, THEIRS = "megacompile", "fsdp2"
FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32"}


# -------------------- Models and batches
def tiny_model(folder: Path, layers: int = 3) -> Path:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False, initializer_range=0.1, architectures=["Qwen2ForCausalLM"])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def nested(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def batch(seed: int, vocabulary: int = 128, rows: int = 6, longest: int = 9, **settings: Any) -> Any:
    """Prompts and responses of random lengths, with what verl's losses read."""
    random = torch.Generator().manual_seed(seed)
    prompts, responses = (torch.randint(2, longest + 1, (rows,), generator=random).tolist() for _ in range(2))
    tokens = [torch.randint(0, vocabulary, (p + r,), generator=random) for p, r in zip(prompts, responses, strict=True)]

    def noise(center: float, scale: float) -> Tensor:
        return nested([center + scale * torch.randn(r, generator=random) for r in responses])

    uniform = -float(torch.tensor(float(vocabulary)).log())
    tensors = dict(
        input_ids=nested(tokens), position_ids=nested([torch.arange(len(each)) for each in tokens]),
        prompts=nested([each[:p] for each, p in zip(tokens, prompts, strict=True)]),
        responses=nested([each[p:] for each, p in zip(tokens, prompts, strict=True)]),
        loss_mask=nested([(torch.arange(p + r) >= p).long() for p, r in zip(prompts, responses, strict=True)]),
        response_mask=nested([torch.ones(r, dtype=torch.long) for r in responses]),
        old_log_probs=noise(uniform, 0.3), ref_log_prob=noise(uniform, 0.3), advantages=noise(0.0, 1.0),
        values=noise(0.0, 1.0), returns=noise(0.0, 1.0))
    usual = dict(use_remove_padding=False, use_dynamic_bsz=True, max_token_len_per_gpu=40, temperature=0.9,
                 global_batch_size=rows * dist.get_world_size(), calculate_entropy=True, calculate_sum_pi_squared=True)
    return tensordict_utils.get_tensordict(tensors, non_tensor_dict=usual | settings)


def losses(model_type: str = "language_model") -> list[Any]:
    """verl's own losses. Steps take them in turn."""
    if model_type == "value_model":
        return [functools.partial(value_loss, config=CriticConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1))]
    actor = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_kl_loss=True, entropy_coeff=0.01)
    return [functools.partial(ppo_loss, config=actor), functools.partial(sft_loss, config=None)]


# -------------------- Engines
def engine(backend: str, folder: Path | str, model_type: str = "language_model", stream: dict[str, Any] | None = None,
           model: dict[str, Any] | None = None, checkpoint: dict[str, Any] | None = None,
           settings: dict[str, Any] | None = None, **optimizer: Any) -> Any:
    """An initialized engine."""
    described = HFModelConfig(
        path=str(folder), external_lib="megacompile.trainers.verl_engine", use_remove_padding=False, model_type=model_type,
        override_config={"attn_implementation": "eager"}, **{"load_tokenizer": False, **(model or {})})
    usual = dict(mixed_precision=FLOAT32, use_torch_compile=False) | (settings or {})
    if backend == OURS:
        from megacompile.trainers.verl_engine import MegacompileEngineConfig

        kind = EngineRegistry.get_engine_cls(model_type, OURS)
        config: Any = MegacompileEngineConfig(stream=stream or {}, **usual)
    else:
        usual.pop("tokens_per_forward", None)
        kind = EngineRegistry._engines[model_type][THEIRS]["cuda"]  # verl does not register it for a CPU
        config = FSDPEngineConfig(strategy=THEIRS, **usual)
    chosen = dict(lr=1e-2, total_training_steps=10, lr_scheduler_type="cosine", lr_warmup_steps=2, clip_grad=0.5)
    made = kind(model_config=described, engine_config=config, optimizer_config=FSDPOptimizerConfig(**chosen | optimizer),
                checkpoint_config=CheckpointConfig(**(checkpoint or {})))
    made.initialize()
    return made


@contextlib.contextmanager
def critics_on_a_cpu() -> Iterator[None]:
    """verl loads critics with an attention that needs a GPU."""
    theirs = verl.utils.model.load_valuehead_model

    def load(local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool) -> Any:
        torch.manual_seed(1)  # for the head
        return transformers.AutoModelForTokenClassification.from_pretrained(local_path, dtype=torch_dtype, config=model_config)

    verl.utils.model.load_valuehead_model = load
    try:
        yield
    finally:
        verl.utils.model.load_valuehead_model = theirs


def weights(of: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in of.get_per_tensor_param()[0]}


def plain_metrics(found: dict[str, Any]) -> dict[str, float]:
    made = {name: value.aggregate() if isinstance(value, Metric) else value for name, value in found.items()}
    return {name: float(torch.tensor(value).float().mean()) for name, value in made.items()}


def train(of: Any, steps: range, model_type: str = "language_model", **settings: Any) -> list[dict[str, Any]]:
    """What each step returns, in plain numbers. Rows differ between steps and ranks."""
    records = []
    for step in steps:
        loss = losses(model_type)[step % len(losses(model_type))]
        with of.train_mode():
            found = of.train_batch(batch(10 * step + dist.get_rank(), **settings), loss)
        records.append({"loss": sum(found["loss"]), "losses": found["loss"], "lr": of.lr_scheduler_step(),
                        **plain_metrics(found["metrics"])})
    return records


def infer(of: Any, model_type: str = "language_model", **settings: Any) -> dict[str, list[Tensor]]:
    """Values of each row's tokens but the last, which has no target."""
    with of.eval_mode():
        found = of.infer_batch(batch(500 + dist.get_rank(), **settings), losses(model_type)[0])
    return {"loss": [torch.tensor(found["loss"])],
            **{name: [row[:-1] for row in values.unbind()] for name, values in found["model_output"].items()}}


def farthest(left: dict[str, Any], right: dict[str, Any]) -> dict[str, float]:
    """By name, the largest difference over the larger of 1 and the largest value. Raises `AssertionError` for other names."""
    assert left.keys() == right.keys(), sorted(left.keys() ^ right.keys())
    made = {}
    for name in left:
        pairs = list(zip(left[name], right[name], strict=True)) if isinstance(left[name], list) else [(left[name], right[name])]
        both = [tuple(torch.as_tensor(each, dtype=torch.float64) for each in pair) for pair in pairs]
        made[name] = max(float((a - b).abs().max() / max(1.0, float(a.abs().max()))) for a, b in both)
    return made


# -------------------- Cases
def parity(folder: str, model_type: str = "language_model", lora: bool = False, steps: int = 5, optimizer: Any = None,
           settings: Any = None, stream: Any = None, **rows: Any) -> dict[str, float]:
    """The largest differences of all that both engines return before, in and after some steps."""
    model = dict(lora_rank=4, lora={"merge": True}, target_modules="all-linear") if lora else {}
    with critics_on_a_cpu():
        theirs, ours = (engine(each, folder, model_type, stream, model, settings=settings, **(optimizer or {}))
                        for each in (THEIRS, OURS))
    if lora or model_type == "value_model":
        copy_new_weights(theirs, ours)
    found = {}
    before = [infer(each, model_type, **rows) for each in (theirs, ours)]
    found |= {f"before {name}": value for name, value in farthest(*before).items()}
    records = [train(each, range(steps), model_type, **rows) for each in (theirs, ours)]
    for step, (left, right) in enumerate(zip(*records, strict=True)):
        for name, value in farthest(left, right).items():
            found[name] = max(value, found.get(name, 0.0))
        assert left["lr"] == right["lr"], step
    found |= {f"after {name}": value for name, value in farthest(*(infer(each, model_type, **rows)
                                                                  for each in (theirs, ours))).items()}
    found["weights"] = max(farthest(*map(rollout, (theirs, ours))).values())
    found["norm of the last step"] = records[1][-1]["grad_norm"]
    return found


def rollout(of: Any) -> dict[str, Tensor]:
    """The weights that both engines send: tied ones once, which verl sends twice."""
    found = {name.removeprefix("base_model.model."): tensor for name, tensor in weights(of).items()}
    if of.model_config.hf_config.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    return found


def copy_new_weights(theirs: Any, ours: Any) -> None:
    """Copies what each engine has drawn by itself: adapters, and the head of a critic."""
    from verl.utils.fsdp_utils import fsdp2_load_full_state_dict

    state = {name: tensor.clone() for name, tensor in ours.module.state_dict().items()}
    fsdp2_load_full_state_dict(theirs.module, state, theirs.device_mesh, None)
    assert all(isinstance(each, DTensor) for each in theirs.module.parameters())


def resume(folder: str, out: str) -> dict[str, Any]:
    """Three steps, a checkpoint, two steps; and the same two steps of a new engine that loads it."""
    contents = {"save_contents": ["model", "optimizer", "extra", "hf_model"]}
    first = engine(OURS, folder, checkpoint=contents)
    train(first, range(2))
    for step in (2, 3):
        train(first, range(step, step + 1))
        first.save_checkpoint(f"{out}/global_step_{step}", global_step=step, max_ckpt_to_keep=1)
    saved = weights(first)
    expected = train(first, range(4, 6))
    second = engine(OURS, folder, checkpoint=contents)
    second.load_checkpoint(f"{out}/global_step_3")
    written = transformers.AutoModelForCausalLM.from_pretrained(f"{out}/global_step_3/huggingface", dtype=torch.float32)
    return {"weights": same(saved, weights(second)), "steps": expected == train(second, range(4, 6)),
            "after": same(weights(first), weights(second)), "folders": sorted(each.name for each in Path(out).iterdir()),
            "hugging face": same(saved, dict(written.state_dict()))}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def exported(folder: str) -> dict[str, Any]:
    """Weights for the rollout: whole, in shards of the ranks, and what a step changed in them."""
    ours = engine(OURS, folder)
    train(ours, range(1))
    whole = weights(ours)
    state = {name: tensor.float().clone() for name, tensor in ours.module.state_dict().items()}
    ours.prime_delta_snapshots()
    before = gathered({name: (part, spec.place or 0) for name, part, spec in ours.get_per_tensor_param_shard()[0]}, whole)
    train(ours, range(1, 2))
    changes = {}
    for slots, _, counts, indices, values, _ in ours.get_per_tensor_param_delta_shard()[0]:
        ((name, _),) = slots
        assert int(counts) == len(indices) == len(values)
        changes[name] = (indices, values)
    after = {name: tensor.clone() for name, tensor in before.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, changes)
    for each in everyone:
        for name, (indices, values) in each.items():
            after[name].view(-1)[indices.long()] = values
    now = {name: tensor.bfloat16() for name, tensor in weights(ours).items()}
    return {"whole": same(whole, state), "shards": same(before, {n: t.bfloat16() for n, t in whole.items()}),
            "changes": same(after, now), "changed": not same(before, now)}


def gathered(parts: dict[str, tuple[Tensor, int]], whole: dict[str, Tensor]) -> dict[str, Tensor]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, parts)
    made = {name: torch.empty(tensor.shape, dtype=torch.bfloat16) for name, tensor in whole.items()}
    for each in everyone:
        for name, (part, place) in each.items():
            made[name].view(-1)[place:place + len(part)] = part
    return made


def refused(folder: str) -> dict[str, str]:
    """What an engine says to settings that it does not support, by name."""
    found = {}
    for name, settings in REFUSED.items():
        try:
            engine(OURS, folder, **settings)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    ours = engine(OURS, folder, settings={"forward_only": True})
    packed, padded = (batch(0, use_dynamic_bsz=False, micro_batch_size_per_gpu=6) for _ in range(2))
    packed["position_ids"] = nested([torch.arange(len(each)) % 3 for each in packed["input_ids"].unbind()])
    padded["input_ids"] = torch.nested.to_padded_tensor(padded["input_ids"], 0)
    images = [{"pixel_values": torch.zeros(1)}] * 6
    for name, call in {
            "distillation_use_topk": lambda: ours.infer_batch(batch(0, distillation_use_topk=True), None),
            "images": lambda: ours.infer_batch(batch(0, multi_modal_inputs=images), None),
            "position_ids": lambda: ours.infer_batch(packed, None), "input_ids": lambda: ours.infer_batch(padded, None),
            "no optimizer": ours.optimizer_step}.items():
        try:
            call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


REFUSED: dict[str, dict[str, Any]] = {
    "ulysses_sequence_parallel_size": dict(settings={"ulysses_sequence_parallel_size": 2}),
    "full_determinism": dict(settings={"full_determinism": True}),
    "mixed_precision": dict(settings={"mixed_precision": {"param_dtype": "fp16"}}),
    "use_liger": dict(model={"use_liger": True}),
    "lora": dict(model={"lora_rank": 4}),
    "load_contents": dict(checkpoint={"load_contents": ["model"]}),
    "save_lora_only": dict(checkpoint={"save_lora_only": True}),
    "optimizer": dict(optimizer="Adam"),
    "optimizer_impl": dict(optimizer_impl="torchao.optim"),
    "Lion": dict(optimizer="Lion"),
    "arrival": dict(override_optimizer_config={"update": "arrival", "max_grad_norm": None}),
}


def worker(folder: str) -> dict[str, float]:
    """What verl's worker of PPO and GRPO returns with both engines, by verl's own configuration: the differences."""
    import verl.trainer
    from hydra import compose, initialize_config_dir
    from verl.workers.engine_workers import ActorRolloutRefWorker

    kind = "megacompile.trainers.verl_engine"
    ours = ["actor_rollout_ref.actor.strategy=megacompile", f"actor_rollout_ref.model.external_lib={kind}",
            f"actor_rollout_ref.actor.fsdp_config._target_={kind}.MegacompileEngineConfig",
            "+actor_rollout_ref.actor.fsdp_config.stream.device_memory=1GiB"]
    results = []
    for changes, device in ((["actor_rollout_ref.actor.strategy=fsdp2"], "cuda"), (ours, "cpu")):
        with initialize_config_dir(str(Path(verl.trainer.__path__[0]).resolve() / "config"), version_base=None):
            config = compose("ppo_trainer", [*changes, *WORKER, f"actor_rollout_ref.model.path={folder}"])
        os.environ["VERL_ENGINE_DEVICE"] = device  # verl does not register its engine for a CPU
        found: dict[str, Any] = {}
        actor = ActorRolloutRefWorker(copy.deepcopy(config.actor_rollout_ref), "actor")
        actor.init_model()
        found["actor"] = scores(actor.compute_log_prob)
        found["reference"] = found["actor"]  # that of verl's engine needs a GPU; both have the same weights
        if device == "cpu":
            reference = ActorRolloutRefWorker(copy.deepcopy(config.actor_rollout_ref), "ref")
            reference.init_model()
            found["reference"] = scores(reference.compute_ref_log_prob)
        for seed in (1, 2):
            metrics = actor.update_actor(batch(seed, mini_batch_size=3, epochs=2))["metrics"]
            found |= {f"{seed} {name}": value for name, value in worker_metrics(metrics).items()}
        found["after"] = scores(actor.compute_log_prob)
        results.append(found)
    return farthest(*results)


def scores(compute: Any) -> list[Tensor]:
    return [row[:-1] for row in compute(batch(3, compute_loss=False))["log_probs"].unbind()]


def worker_metrics(found: dict[str, Any]) -> dict[str, float]:
    """Metrics that do not measure time or memory."""
    return {name: value for name, value in plain_metrics(found).items() if "perf/" not in name and "mfu" not in name}


_ACTOR, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
WORKER = [
    f"{_ACTOR}.use_dynamic_bsz=True", f"{_ACTOR}.ppo_max_token_len_per_gpu=30", f"{_ACTOR}.optim.lr=1e-2",
    f"{_ACTOR}.use_kl_loss=True", f"{_ACTOR}.entropy_coeff=0.01", f"{_ACTOR}.rollout_n=1",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True", "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=40",
    "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.model.use_remove_padding=False",
    "+actor_rollout_ref.model.load_tokenizer=False", "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    *(f"+{each}.fsdp_config.mixed_precision.{name}=fp32" for each in (_ACTOR, _REF) for name in FLOAT32),
    *(f"{each}.fsdp_config.use_torch_compile=False" for each in (_ACTOR, _REF))]


def model(folder: str) -> str:
    return str(tiny_model(Path(folder)))


def main(case: str, arguments: dict[str, Any]) -> None:
    if "RANK" not in os.environ:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    found = globals()[case](**arguments)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
