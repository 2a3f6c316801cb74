"""Print the schedule of a model without weights or device: layers of Qwen2-7B's shape.

    python examples/inspect_schedule.py
"""
from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import megacompile
from megacompile.inspection import pass_log

config = Qwen2Config(vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=6,
                     num_attention_heads=28, num_key_value_heads=4)
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

compiled = megacompile.schedule(model, batch=16, length=1024, micro_batch_size=8, checkpoint_interval=2, device="cpu",
                               device_memory="24GiB", host_memory="64GiB")

print(f"{compiled.title()}; templates: {', '.join(compiled.templates)}\n")
for name, program in compiled.stages.items():
    print(f"after {name:<12} {sum(len(graph.nodes) for graph in program.sections.values()):>4} nodes")

print(f"\n{pass_log(compiled.log, compiled.stages)}\n")
print(f"{compiled.program().text(fold=True)}\n")
print(compiled.program().table("forward"))
