"""Models whose sequences are divided among ranks, and native PyTorch with whole sequences: `python sequence_jobs.py COPIES NAME
...` in each rank."""
from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import jobs
import torch
from jobs import DEVICE, VOCABULARY, adapters, gpt2
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

STEPS, LR = 4, 1e-2
#: Heads that ranks can divide. With a cache, rows of native PyTorch are one document.
model_of = functools.partial(jobs.model_of, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, use_cache=False)


def rows(copy: int, step: int, length: int = 16) -> dict[str, Tensor]:
    """Two full rows for the ranks of a sequence."""
    ids = torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1000 * step + copy))
    return {"input_ids": ids, "labels": ids.clone()}


def odd_rows(copy: int, step: int) -> dict[str, Tensor]:
    """Rows whose length the ranks do not divide, another one for each copy and step."""
    return rows(copy, step, 13 + 2 * copy + step)


def padded(copy: int, step: int) -> dict[str, Tensor]:
    """Rows with padding on the right."""
    batch = rows(copy, step)
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 9 + step:] = 0
    return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def documents(copy: int, step: int) -> dict[str, Tensor]:
    """Rows of documents, which begin within the tokens of a rank, at its first token, and at its second."""
    batch = rows(copy, step)
    starts = torch.zeros(2, 16, dtype=torch.long)
    starts[0, [0, 3, 8]] = starts[1, [0, 5 + step, 9]] = 1
    positions = torch.arange(16) - torch.where(starts == 1, torch.arange(16), 0).cummax(1).values
    return {**batch, "position_ids": positions}


#: Name of a job -> (model, batch of a copy and step, options of `stream`).
JOBS: dict[str, tuple[Callable[[], Any], Callable[[int, int], dict[str, Tensor]], dict[str, Any]]] = {
    "llama": (lambda: model_of("LlamaConfig"), rows, {}),
    "qwen2": (lambda: model_of("Qwen2Config"), odd_rows, {"micro_batch_size": 1}),
    "qwen3": (lambda: model_of("Qwen3Config", head_dim=8), rows, {"checkpoint_interval": 2}),
    "gpt2": (gpt2, odd_rows, {}),
    "padding": (lambda: model_of("LlamaConfig"), padded, {}),
    "documents": (lambda: model_of("LlamaConfig"), documents, {}),
    "windows": (lambda: model_of("MistralConfig", sliding_window=5), rows, {}),
    "windows and documents": (lambda: model_of("MistralConfig", sliding_window=5), documents, {}),
    "uneven heads": (lambda: model_of("LlamaConfig", hidden_size=36, num_attention_heads=3, num_key_value_heads=3), rows, {}),
    "uneven groups": (lambda: model_of("LlamaConfig", hidden_size=48, num_attention_heads=6, num_key_value_heads=2), rows, {}),
    "one group": (lambda: model_of("LlamaConfig", num_key_value_heads=1), documents, {}),
    "sinks": (lambda: model_of("GptOssConfig", num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=6,
                               layer_types=["sliding_attention", "full_attention", "sliding_attention"]), rows, {}),
    "experts": (lambda: model_of("Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                                 head_dim=8), rows, {"expert_pieces": 2}),
    "gemma": (lambda: model_of("Gemma2Config", head_dim=8, sliding_window=5, query_pre_attn_scalar=8), rows, {}),
    "chunks": (lambda: model_of("LlamaConfig"), rows, {"token_chunk": 2, "micro_batch_size": 1}),
    "attention kept": (lambda: model_of("LlamaConfig"), rows, {"residuals": "attention", "saved_layers": 2}),
    "adapters": (adapters, rows, {}),
    "arrival": (lambda: model_of("LlamaConfig"), rows, {}),
}


def train(name: str, rank: int, copies: int, **more: Any) -> dict[str, Any]:
    """Trains a job's model streamed, each sequence divided among all ranks of its copy."""
    import megacompile

    build, batch_of, options = JOBS[name]
    size = int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh(DEVICE, (copies, size // copies), mesh_dim_names=("shard", "sequence"))
    model = megacompile.stream(build(), device=DEVICE, compile=False, mesh=mesh, **options, **more)
    trained = [p for p in model.parameters() if p.requires_grad]
    arrival = name == "arrival"
    optimizer = megacompile.AdamW(trained, lr=LR, **({"overlap": "backward"} if arrival else {"max_grad_norm": 0.5}))
    losses, gradients = [], {}
    copy = rank // (size // copies)
    for step in range(STEPS):
        batch = batch_of(copy, step)
        if step % 2 or arrival:
            losses.append(float(model.megacompile.train_step(batch, optimizer)))
            continue
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    model.megacompile.synchronize()
    norm = optimizer.grad_norm
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        evaluated = float(model(**batch_of(0, 3)).loss)
    model.megacompile.close()
    return {"losses": losses, "gradients": gradients, "weights": weights, "norm": norm, "evaluated": evaluated}


def train_native(name: str, copies: int) -> dict[str, Any]:
    """The same with PyTorch in one process that has whole sequences."""
    build, batch_of, _ = JOBS[name]
    model = build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    losses, gradients, norm = [], {}, None
    for step in range(STEPS):
        batches = [batch_of(copy, step) for copy in range(copies)]
        items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        loss = torch.stack([model(**batch, num_items_in_batch=items).loss for batch in batches]).sum()
        losses.append(loss.item())
        loss.backward()
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        if name != "arrival":
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        evaluated = float(model(**batch_of(0, 3)).loss)
    return {"losses": losses, "gradients": gradients, "weights": dict(model.named_parameters()), "norm": norm,
            "evaluated": evaluated}


if __name__ == "__main__":
    jobs.run(sys.argv[2:], functools.partial(train, copies=int(sys.argv[1])))
