"""The models and batches that ranks train, and native PyTorch over all rows: `python jobs.py NAME ...` in each rank."""
from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

STEPS, VOCABULARY, LR = 20, 64, 1e-3
RANK = int(os.environ.get("RANK", "0"))
#: Where models are streamed to. In float32 and not compiled, a GPU's results differ from the CPU's by rounding.
DEVICE = os.environ.get("JOB_DEVICE", "cpu")
#: One copy of the model is divided among all ranks, on whichever hosts they are.
DIVIDED = "JOB_DIVIDED" in os.environ
_SIZES = dict(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2,
              num_key_value_heads=1, max_position_embeddings=64)


def model_of(config: str, **changes: Any) -> Any:
    """A small model of a family, by the name of its config."""
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**_SIZES, **changes})
    return transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").train()


def qwen2() -> Any:
    return model_of("Qwen2Config", tie_word_embeddings=False)


def llama() -> Any:
    return model_of("LlamaConfig", tie_word_embeddings=True)


def on_rank_0() -> Any:
    """A model whose weights and buffers only rank 0 has."""
    with torch.device("cpu" if RANK == 0 else "meta"):
        return qwen2()


def gpt2() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=3, n_head=2, n_positions=64, resid_pdrop=0.0,
                                     embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()


def qwen3() -> Any:
    return model_of("Qwen3Config", head_dim=8)


def experts() -> Any:
    return model_of("MixtralConfig", num_local_experts=4, num_experts_per_tok=2, output_router_logits=False)


def adapters() -> Any:
    import peft

    model = peft.get_peft_model(qwen2(), peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj", "up_proj"]))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    return model


def quantized_adapters() -> Any:
    import megacompile

    return megacompile.quantize(adapters(), "nf4")


def even(rank: int, step: int) -> dict[str, Tensor]:
    """Three full rows for each rank."""
    ids = torch.randint(0, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1000 * step + rank))
    return {"input_ids": ids, "labels": ids.clone()}


def same(rank: int, step: int) -> dict[str, Tensor]:
    """The same three rows for each rank. A power of two of ranks then has the gradients of one, bit for bit."""
    return even(0, step)


def uneven(rank: int, step: int) -> dict[str, Tensor]:
    """Another number of rows of other lengths for each rank, padded on the right as collators do."""
    rows, longest = 1 + (rank + step) % 3, 5 + 3 * rank + step % 4
    lengths = torch.randint(2, longest + 1, (rows,), generator=torch.Generator().manual_seed(1000 * step + rank))
    lengths[0] = longest
    return _padded(lengths, 1000 * step + rank)


def unbalanced(rank: int, step: int) -> dict[str, Tensor]:
    """Rank 0 has most of the tokens. All ranks together fill four rows of 16 but for 14 tokens."""
    return _padded(torch.tensor(((13, 9, 4, 11, 6), (5, 2))[rank]), 1000 * step + rank)


def with_own_denominators(rank: int, step: int) -> dict[str, Any]:
    """Rows that fit better if ranks share them out. Each rank divides the loss of its own rows by another number."""
    return {**unbalanced(rank, step), "num_items_in_batch": (50, 3)[rank] + step}


def surprise(logits: Tensor, labels: Tensor) -> Tensor:
    """A loss of each token. Nothing is shifted."""
    return -logits.float().log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0] * (labels != -100)


def _padded(lengths: Tensor, seed: int) -> dict[str, Tensor]:
    """Rows of these lengths, padded on the right."""
    rows, longest = len(lengths), int(lengths.max())
    mask = (torch.arange(longest) < lengths[:, None]).long()
    ids = torch.randint(0, VOCABULARY, (rows, longest), generator=torch.Generator().manual_seed(seed)) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


#: Name of a job -> (model, batch of a rank and step, how it trains, options of `stream`).
JOBS: dict[str, tuple[Callable[[], Any], Callable[[int, int], dict[str, Any]], str, dict[str, Any]]] = {
    "qwen2": (on_rank_0, even, "loop", {"micro_batch_size": 2}),
    "tied": (llama, even, "step", {}),
    "gpt2": (gpt2, even, "loop", {"checkpoint_interval": 2}),
    "qwen3": (qwen3, even, "step", {"micro_batch_size": 1, "resident": "all"}),
    "experts": (experts, even, "step", {}),
    "expert pieces": (experts, even, "loop", {"expert_pieces": 2}),
    "adapters": (adapters, even, "loop", {}),
    "quantized adapters": (quantized_adapters, even, "loop", {"micro_batch_size": 2}),
    "uneven rows": (qwen2, uneven, "loop", {}),
    "uneven rows, packed": (qwen2, uneven, "step", {"repack": 16}),
    "unbalanced rows": (qwen2, unbalanced, "loop", {"repack": 16}),
    "denominators of ranks": (qwen2, with_own_denominators, "loop", {"repack": 16}),
    "sum over tokens": (qwen2, uneven, "step", {"loss": surprise}),
    "sum over tokens, own denominators": (qwen2, with_own_denominators, "loop", {"loss": surprise}),
    "waves": (qwen2, even, "step", {"micro_batch_size": 1, "waves": 2}),
    "sums on the host": (qwen2, even, "step", {"micro_batch_size": 1, "waves": 3, "host_sums": "all"}),
    "accumulation": (qwen2, even, "accumulation", {}),
    "arrival": (qwen2, even, "arrival", {}),
    "arrival, loop": (llama, even, "arrival loop", {}),
    "updated on the device": (qwen2, even, "step", {"resident_state": "all"}),
    "some updated on the device": (qwen2, even, "loop", {"resident_state": ("model.layers.1", "epilogue")}),
    "arrival on the device": (qwen2, even, "arrival", {"resident_state": ("prologue", "model.layers.2")}),
    "visits": (qwen2, even, "step", {"visiting_state": "all"}),
    "matrices": (qwen2, even, "matrices", {}),
    "matrices of experts": (experts, same, "unclipped matrices", {"expert_pieces": 2}),
    "matrices in 8 bits": (qwen2, same, "unclipped matrices in 8 bits", {}),
    "matrices, the same rows": (qwen2, same, "unclipped matrices", {}),
    "deferred moments": (qwen2, even, "step", {"deferred_moments": True}),
    "slabs": (qwen2, even, "loop", {"pinned_memory": "48KiB"}),
    "checkpoints on the host": (qwen2, even, "loop", {"host_checkpoints": True}),
    "saved layers": (qwen2, even, "step", {"saved_layers": 2, "micro_batch_size": 1}),
    "custom loss": (qwen2, even, "custom", {}),
    "custom loss, uneven rows": (qwen2, uneven, "custom", {}),
}
#: How a job trains with Muon -> the optimizer's options.
MUON: dict[str, dict[str, Any]] = {
    "matrices": {"max_grad_norm": 0.5}, "unclipped matrices": {}, "unclipped matrices in 8 bits": {"state_dtype": "8bit"}}
#: Jobs whose ranks have the bits of one process: unclipped, since ranks add up a norm in another order than one process.
EXACT = tuple(name for name, (_, _, how, _) in JOBS.items() if how in MUON and "max_grad_norm" not in MUON[how])
#: Jobs that every run of the tests includes. The others run on demand.
USUAL = ("qwen2", "tied", "gpt2", "qwen3", "expert pieces", "adapters", "uneven rows", "unbalanced rows",
         "denominators of ranks", "sum over tokens", "sums on the host",
         "arrival on the device", "matrices", "matrices, the same rows", "custom loss, uneven rows")


def custom_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """A loss that the caller computes: the mean over its own tokens."""
    logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten().to(logits.device))


def train(name: str, rank: int, **more: Any) -> dict[str, Any]:
    """Trains a job's model streamed. Returns losses, the first step's gradients, weights and the last norm."""
    import megacompile

    build, batch_of, how, options = JOBS[name]
    if DIVIDED:
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        more["mesh"] = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = megacompile.stream(build(), device=DEVICE, compile=False, **options, **more)
    trained = [p for p in model.parameters() if p.requires_grad]
    arrival = how.startswith("arrival")
    kind = megacompile.Muon if how in MUON else megacompile.AdamW
    optimizer = kind(trained, lr=LR, **MUON.get(how, {"overlap": "backward"} if arrival else {"max_grad_norm": 0.5}))
    losses, gradients = [], {}
    for step in range(STEPS):
        if how in ("step", "arrival", *MUON):
            losses.append(float(model.megacompile.train_step(batch_of(rank, step), optimizer)))
            continue
        for part in range(2 if how == "accumulation" else 1):
            batch = batch_of(rank, step + 100 * part)
            loss = custom_loss(model, batch) if how == "custom" else model(**batch).loss
            (loss / 2 if how == "accumulation" else loss).backward()
            losses.append(loss.item())
        if step == 0 and not arrival and not DIVIDED:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    model.megacompile.synchronize()
    state = model.state_dict()
    weights = {n: state[n].clone() for n, _ in model.named_parameters()}
    norm, state = optimizer.grad_norm, optimizer.state_dict()["state"]
    moments = {f"{i}.{key}": torch.as_tensor(value).clone() for i, each in state.items() for key, value in each.items()}
    stats = model.megacompile.stats
    model.megacompile.close()
    return {"stats": stats, "losses": losses, "gradients": gradients, "weights": weights, "norm": norm,
            "moments": moments}


def loss_of(model: Any, batch: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """The loss of one rank's rows in native PyTorch."""
    if "loss" not in options:
        loss: Tensor = model(**batch).loss
        return loss
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return options["loss"](logits.flatten(0, 1), batch["labels"].flatten()).sum() / batch["num_items_in_batch"]


def train_native(name: str, ranks: int) -> dict[str, Any]:
    """The same with PyTorch in one process that has the rows of all ranks."""
    build, batch_of, how, options = JOBS[name]
    model = build()
    arrival = how.startswith("arrival")
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = [p for name, p in named.items() if ".layers." in name and p.dim() == 2] if how in MUON else []
    others = [p for p in named.values() if not any(p is matrix for matrix in matrices)]
    optimizers: list[Any] = [torch.optim.AdamW(others, lr=LR, **({"weight_decay": 0.1} if matrices else {}))]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=LR, adjust_lr_fn="match_rms_adamw"))
    losses, gradients, norm = [], {}, None
    for step in range(STEPS):
        for part in range(2 if how == "accumulation" else 1):
            batches = [batch_of(rank, step + 100 * part) for rank in range(ranks)]
            if how == "custom":
                each = [custom_loss(model, each) for each in batches]
                loss = torch.stack(each).mean()
                losses.append([value.item() for value in each])
            else:
                items = 1 if "loss" in options else sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
                loss = torch.stack([loss_of(model, {"num_items_in_batch": items, **b}, options) for b in batches]).sum()
                losses.append(loss.item())
            (loss / 2 if how == "accumulation" else loss).backward()
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        if not arrival:
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "gradients": gradients, "weights": dict(model.named_parameters()), "norm": norm}


def main() -> None:
    import alike_models

    from megacompile import api

    api.capture = alike_models.capture_once  # most jobs train the same model

    def train_kind(job: str, rank: int) -> dict[str, Any]:
        name, _, kind = job.partition("|")
        return train(name, rank, **({"reference": True} if kind == "reference" else {}))

    run(sys.argv[1:], train_kind)


def run(jobs: Sequence[str], train: Callable[[str, int], dict[str, Any]]) -> None:
    """Runs jobs in a rank. Writes what each had at its end, or its error."""
    rank, folder = int(os.environ["RANK"]), Path(os.environ["RESULTS"])
    for job in jobs:
        try:
            found = train(job, rank)
        except Exception:  # the test of this job says what it was, and the other jobs go on
            traceback.print_exc()
            found = {"error": traceback.format_exc()}
        torch.save(found, folder / f"{job}.{rank}.pt")
    (folder / f"{rank}.json").write_text(json.dumps("done"))


if __name__ == "__main__":
    main()
