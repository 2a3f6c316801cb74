"""Train a language model from host memory with `stream`, `AdamW` and the usual loop.

    python examples/train.py

The model is small and the text is one of Python's own modules, so this runs anywhere in seconds. For a real model, use
`megacompile.from_pretrained(...)`, and leave `device` out to use CUDA.
"""
from __future__ import annotations

import argparse as some_text
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import megacompile

torch.manual_seed(0)
config = Qwen2Config(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=128)
model = AutoModelForCausalLM.from_config(config)
text = torch.tensor(list(Path(some_text.__file__).read_bytes()))

model = megacompile.stream(model, device="cpu", checkpoint_interval=2, micro_batch_size=4)
optimizer = megacompile.AdamW(model.parameters(), lr=3e-3, max_grad_norm=1.0)

for step in range(20):
    starts = torch.randint(len(text) - 64, (8, 1))
    tokens = text[starts + torch.arange(64)]
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item():.3f}")

model.megacompile.close()
