"""Measures how long tracing takes for small random models of several families: in `stream`, and for other kinds of batches.

    python benchmarks/capture.py --output benchmarks/results/capture.jsonl
    python benchmarks/capture.py qwen3_next qwen3_next_odd --limit 300

Reports processor seconds, on the CPU and uncompiled, each family in its own process. `stream` traces the model. `step` is a
plain training step, `padded` a step with a batch that is padded on the left, `evaluation` a forward in evaluation mode. The
last two trace the model again if it computes something else then. Needs no GPU and no weights. Models have three or four
layers and are small, since tracing time depends on what a layer computes and hardly on its width. The one with adapters has 64
layers.
"""
from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import tabulate
from rows import append, commit, machine

_COMMON = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
               num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2)
_EXPERTS = dict(num_experts_per_tok=2, num_local_experts=4)
_QWEN3_NEXT = _COMMON | dict(moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
_DELTA_RULE: dict[str, Any] = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention", "linear_attention"])

#: Name -> (model type, fields of its config that differ from the defaults).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", _COMMON),
    "qwen3_adapters": ("qwen3", _COMMON | dict(num_hidden_layers=64)),
    "llama": ("llama", _COMMON),
    "gemma3": ("gemma3_text", _COMMON | dict(sliding_window=8)),
    "gpt_oss": ("gpt_oss", _COMMON | _EXPERTS | dict(sliding_window=8)),
    "mamba2": ("mamba2", _COMMON | dict(num_heads=4, head_dim=16, state_size=8, n_groups=2, chunk_size=8)),
    "bamba": ("bamba", _COMMON | dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=2, mamba_chunk_size=8,
                                      attn_layer_indices=[1])),
    "zamba2": ("zamba2", _COMMON | dict(
        num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2, attention_hidden_size=64, attention_head_dim=16,
        mamba_d_state=8, mamba_headdim=8, n_mamba_heads=8, mamba_ngroups=2, chunk_size=8, num_mem_blocks=1, adapter_rank=8)),
    "nemotron_h": ("nemotron_h", _COMMON | dict(
        layers_block_type=["linear_attention", "full_attention", "moe"], mamba_num_heads=4, mamba_head_dim=16,
        ssm_state_size=8, n_groups=2, chunk_size=8, n_routed_experts=4, moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16, num_experts_per_tok=2)),
    "minimax": ("minimax", _COMMON | _EXPERTS | dict(
        block_size=64, layer_types=["linear_attention", "full_attention", "linear_attention"])),
    "qwen3_next": ("qwen3_next", _QWEN3_NEXT | _DELTA_RULE),
    "qwen3_next_odd": ("qwen3_next", _QWEN3_NEXT | dict(
        hidden_size=30, num_attention_heads=3, num_key_value_heads=1, head_dim=20, linear_num_key_heads=3,
        linear_num_value_heads=9, linear_key_head_dim=7, linear_value_head_dim=5, linear_conv_kernel_dim=3,
        layer_types=["linear_attention"] * 2 + ["full_attention"])),
    "qwen3_5": ("qwen3_5_text", _COMMON | _DELTA_RULE),
    "olmo_hybrid": ("olmo_hybrid", _COMMON | _DELTA_RULE),
    "kimi_linear": ("kimi_linear", _COMMON | dict(
        layer_types=_DELTA_RULE["layer_types"], linear_attn_config=dict(num_heads=2, head_dim=8, short_conv_kernel_size=4),
        num_experts=4, num_experts_per_token=2, moe_intermediate_size=16, kv_lora_rank=8, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=8)),
    "falcon_h1": ("falcon_h1", _COMMON | dict(
        mamba_n_heads=4, mamba_d_head=16, mamba_d_ssm=64, mamba_d_state=8, mamba_n_groups=2, mamba_chunk_size=8)),
    "granitemoehybrid": ("granitemoehybrid", _COMMON | _EXPERTS | dict(
        shared_intermediate_size=16, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=2, mamba_chunk_size=8,
        layer_types=_DELTA_RULE["layer_types"])),
    "lfm2": ("lfm2", _COMMON | dict(layer_types=["conv", "full_attention", "conv"])),
}
#: Families with a LoRA adapter (PEFT) in each linear layer.
_ADAPTED = frozenset({"qwen3_adapters"})


def measure(name: str, pipe: Connection | None = None) -> dict[str, float]:
    """Processor seconds of each stage, measured in this process. After each stage, the results so far are sent to `pipe`."""
    import torch
    import transformers

    import megacompile
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stages: dict[str, float] = {}
    started = time.process_time()

    def done(stage: str) -> None:
        nonlocal started
        stages[stage] = time.process_time() - started
        if pipe is not None:
            pipe.send(stages)
        started = time.process_time()

    model_type, fields = FAMILIES[name]
    config = transformers.AutoConfig.for_model(model_type, **fields, use_cache=False)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    if name in _ADAPTED:
        import peft
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    ids = torch.randint(8, 96, (2, 20))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    done("model")
    streamed = megacompile.stream(model, device="cpu", compile=False)
    done("stream")
    optimizer = megacompile.AdamW(streamed.parameters(), lr=1e-3)
    for stage, further in (("step", {}), ("padded", {"attention_mask": mask})):
        labels = ids if stage == "step" else ids.masked_fill(mask == 0, -100)
        streamed(input_ids=ids, labels=labels, **further).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        done(stage)
    streamed.eval()
    with torch.no_grad():
        streamed(input_ids=ids, labels=ids)
    done("evaluation")
    streamed.megacompile.close()
    return stages


_STAGES = ("stream", "step", "padded", "evaluation")


def measured(name: str, limit_s: int) -> dict[str, Any]:
    """The row of a family. A stage that did not end before `limit_s` processor seconds (for all stages together) is None."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure_into, args=(name, limit_s, theirs))
    process.start()
    theirs.close()
    stages: dict[str, float] = {}
    try:
        while True:
            stages = ours.recv()
    except EOFError:
        process.join()
    row = {"benchmark": "capture", "family": name, **{f"{stage}_processor_s": stages.get(stage) for stage in _STAGES},
           "commit": commit(), **machine("cpu")}
    if process.exitcode not in (0, -signal.SIGXCPU):
        row["error"] = f"ended with {process.exitcode}"
    return row


def _measure_into(name: str, limit_s: int, pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
    measure(name, pipe)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES),
                        help=f"families to measure: {', '.join(FAMILIES)} (default: all)")
    parser.add_argument("--limit", type=int, default=300, help="processor seconds for one family (default: 300)")
    parser.add_argument("--output", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.families:
        rows.append(measured(name, arguments.limit))
        if arguments.output:
            append(arguments.output, rows[-1])
        print(json.dumps(rows[-1]), flush=True)
    cells = [[row["family"], *(row[f"{stage}_processor_s"] for stage in _STAGES)] for row in rows]
    print(tabulate.tabulate(cells, ("family", *(f"{stage}, s" for stage in _STAGES)), "github", floatfmt=".1f",
                            missingval=f"more than {arguments.limit} in all"))


if __name__ == "__main__":
    main()
