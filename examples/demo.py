"""The demo (`make demo`): a 10M-parameter Qwen2 learns Python from this machine's standard library.

Its layers stream from host memory through slots of the "device", here the CPU, with an activation checkpoint every
second layer. It prints the schedule, the training, a sample of generated text, and where the model was saved. Then it
loads the model with plain transformers and compares the loss. Exit code 1: the losses differ, or the loss is above the target.
"""
from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

import megacompile
from megacompile import training
from megacompile.corpus import ByteTokenizer, read_text
from megacompile.finetuning.data import pack
from megacompile.finetuning.training_sequences import Order, Rows, collate, in_order

BATCH, LENGTH = 4, 128
HELD_OUT_BYTES = 400_000


def small_qwen2() -> PreTrainedModel:
    """A random model with 10.2M parameters. The wide init and the short rotary base suit a small model and 128 bytes."""
    return AutoModelForCausalLM.from_config(Qwen2Config(
        vocab_size=256, hidden_size=384, intermediate_size=1056, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=512, initializer_range=0.06,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0}))


def standard_library() -> tuple[Rows, Rows]:
    """The modules of the standard library as bytes: rows to train on, and held-out rows."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    tokens = read_text(files, ByteTokenizer())
    return pack(tokens[:-HELD_OUT_BYTES], LENGTH), pack(tokens[-HELD_OUT_BYTES:], LENGTH)


def passed(loss: float, difference: float, target: float) -> bool:
    """Whether the loss reached the target and the saved model has the same loss. False if a loss is NaN."""
    return loss < target and difference < 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small model on the Python standard library.")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--target", type=float, default=2.6, help="held-out loss to reach, in nats per byte")
    parser.add_argument("--sample", type=int, default=100, help="bytes to generate at the end")
    parser.add_argument("--save", type=Path, default=Path("runs/demo"))
    arguments = parser.parse_args()
    begin, console = time.perf_counter(), Console(highlight=False)
    torch.manual_seed(0)

    learn, held_out = standard_library()
    examination = list(in_order(held_out.select(torch.arange(0, len(held_out), len(held_out) // 64)[:64]), 16))
    model = megacompile.stream(small_qwen2(), device="cpu", checkpoint_interval=2, micro_batch_size=2)
    optimizer = megacompile.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=1.0)
    batches = (collate(learn, rows) for rows in Order(len(learn), BATCH, seed=0).batches())
    console.print(f"{training.parameter_count(model):,} parameters, {learn.tokens.numel():,} bytes of Python\n")
    print(model.megacompile.compiled(next(batches), whole_step=True).program.text("train_step", fold=True))

    model.train()
    schedule = training.warmup_then_decay(optimizer, arguments.steps, warmup=10)
    for step, batch in zip(range(1, arguments.steps + 1), batches, strict=False):
        loss = model.megacompile.train_step(batch, optimizer)
        optimizer.step()  # the update is done already; schedulers expect the call
        schedule.step()
        if step == 1 or step % 20 == 0:
            console.print(f"step {step}/{arguments.steps}  loss {loss:.4f}  {time.perf_counter() - begin:.0f} s")
    loss = training.evaluate(model, examination)

    prompt = ByteTokenizer().encode(b"    def ").long()[None]
    sample = model.generate(input_ids=prompt, max_new_tokens=arguments.sample, do_sample=True, temperature=0.7, top_k=20)
    print(f"\n{'-' * 30} sample\n{ByteTokenizer().decode(sample[0].cpu())}\n{'-' * 37}")

    model.save_pretrained(arguments.save)
    model.megacompile.close()
    reloaded = AutoModelForCausalLM.from_pretrained(arguments.save)
    difference = abs(training.evaluate(reloaded, examination) - loss)
    print(f"saved in {arguments.save}; loaded with plain transformers, its loss differs by {difference:.1e}")
    print(f"held-out loss {loss:.3f} nats per byte (target {arguments.target}) in {time.perf_counter() - begin:.0f} s")
    if not passed(loss, difference, arguments.target):
        print("the demo failed: see the two lines above", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
