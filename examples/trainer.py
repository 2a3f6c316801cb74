"""Fine-tune with Hugging Face's Trainer, or with TRL's SFTTrainer (`--sft`), by replacing one class.

    python examples/trainer.py
    python examples/trainer.py --steps 300 --compare    # also trains unstreamed, and compares the losses

The model is small and the text is source code of Python's own modules, so this runs anywhere. On a GPU leave out `use_cpu`
and `device`, stream with `dtype=torch.bfloat16`, and give `bf16=True`.
"""
from __future__ import annotations

import argparse
import inspect
import tempfile
from typing import Any

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, TrainingArguments

import megacompile
import megacompile.trainer

LENGTH = 64
SETTINGS: dict[str, Any] = dict(
    per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=3e-3, warmup_steps=5, weight_decay=0.1,
    lr_scheduler_type="cosine", logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte, and one for padding and the end."""
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokens = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<end>", pad_token="<end>")


def make_model(vocabulary: int) -> Any:
    transformers.set_seed(0)
    return AutoModelForCausalLM.from_config(Qwen2Config(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH))


def text_windows() -> list[str]:
    """Source code of Python's own modules, in pieces of `LENGTH` characters."""
    text = "".join(inspect.getsource(module) for module in (argparse, inspect, tempfile))
    return [text[start:start + LENGTH] for start in range(0, len(text) - LENGTH, LENGTH)]


def train(model: Any, tokenizer: PreTrainedTokenizerFast, steps: int, sft: bool) -> list[float]:
    """Trains, evaluates, and returns the loss of each step."""
    streamed = hasattr(model, "megacompile")
    windows = text_windows()
    with tempfile.TemporaryDirectory() as folder:
        if sft:
            import trl
            from datasets import Dataset

            from megacompile.sft import SFTTrainer
            settings = trl.SFTConfig(folder, max_steps=steps, bf16=False, max_length=LENGTH, **SETTINGS)
            rows = Dataset.from_list([{"text": window} for window in windows])
            trainer = (SFTTrainer if streamed else trl.SFTTrainer)(
                model=model, args=settings, processing_class=tokenizer, train_dataset=rows, eval_dataset=rows.select(range(16)))
        else:
            arguments = TrainingArguments(folder, max_steps=steps, **SETTINGS)
            tokens = [tokenizer(window)["input_ids"][:LENGTH] for window in windows]
            rows = [{"input_ids": row, "labels": row} for row in tokens if len(row) == LENGTH]
            trainer = (megacompile.trainer.Trainer if streamed else transformers.Trainer)(
                model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:16])
        trainer.train()
        trainer.evaluate()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sft", action="store_true", help="use TRL's SFTTrainer")
    parser.add_argument("--compare", action="store_true", help="also train unstreamed")
    options = parser.parse_args()
    tokenizer = make_tokenizer()
    model = megacompile.stream(make_model(len(tokenizer)), device="cpu")
    losses = train(model, tokenizer, options.steps, options.sft)
    if options.compare:
        others = train(make_model(len(tokenizer)), tokenizer, options.steps, options.sft)
        print("largest difference between the curves:", max(abs(a - b) for a, b in zip(losses, others, strict=True)))
    print(f"loss {losses[0]:.3f}, after {len(losses)} steps {losses[-1]:.3f}")
    model.megacompile.close()


if __name__ == "__main__":
    main()
