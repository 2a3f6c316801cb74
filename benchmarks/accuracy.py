"""Checks that a streamed model learns as well as a plain one, on word problems (70% for training, 30% held out).

    python benchmarks/accuracy.py                 # a few minutes on a CPU
    python benchmarks/accuracy.py --seeds 5 --device cuda
    python benchmarks/accuracy.py --bf16 --optim adamw_8bit --optim-args master=bfloat16
    python benchmarks/accuracy.py --bf16 --precision float8-emulated:min_features=64

For each seed, trains a small Qwen2 from the same weights on the same batches, once with plain PyTorch (torch.optim.AdamW) and
once streamed (whole steps, updates on the host, with AdamW or the optimizer that is given). Weights are fp32; with --bf16 those
of the streamed model are bf16. Accuracy is the fraction of held-out problems whose generated answer is
exactly right. Exit code 1 if the two accuracies differ by more than those of different seeds.
"""
from __future__ import annotations

import argparse
import copy
import functools
import itertools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tabulate import tabulate
from transformers import AutoModelForCausalLM, Qwen2Config

import megacompile
from megacompile import training
from megacompile.finetuning.chat import Encoded
from megacompile.finetuning.training_sequences import Order, Rows, collate
from megacompile.streaming.optimizer.names import OPTIMIZERS, optimizer_named

BATCH, LENGTH, LARGEST = 64, 32, 12
ADAMW: dict[str, Any] = dict(lr=2e-3, betas=(0.9, 0.98), weight_decay=0.1)
NAMES, THINGS = ("Ada", "Ben", "Eva", "Tom"), ("apples", "books", "coins", "pens")
#: Each problem with the function that gives its answer.
STORIES = (
    ("{n} has {a} {t} and buys {b} more . how many {t} does {n} have ?", lambda a, b: a + b),
    ("{n} has {a} {t} and gives {b} away . how many {t} are left ?", lambda a, b: a - b),
    ("{n} buys {a} boxes of {b} {t} . how many {t} are there ?", lambda a, b: a * b))
END = "<end>"


#: (question in words, answer).
Problem = tuple[list[str], str]


def problems() -> list[Problem]:
    """All problems whose answer is not negative."""
    numbers = range(1, LARGEST + 1)
    return [(story.format(n=n, t=t, a=a, b=b).split(), str(answer(a, b))) for (story, answer), n, t, a, b in itertools.product(
        STORIES, NAMES, THINGS, numbers, numbers) if answer(a, b) >= 0]


def split(seed: int) -> tuple[list[Problem], list[Problem]]:
    """(70% of the problems, the rest), in random order."""
    found = problems()
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen, boundary = [found[i] for i in order], round(0.7 * len(found))
    return chosen[:boundary], chosen[boundary:]


VOCABULARY = {word: number for number, word in enumerate(
    [END, *sorted({word for question, answer in problems() for word in [*question, answer]})])}


def encode(problem: Problem) -> Encoded:
    """Encodes a problem. The answer and the end token are learned, the question is not."""
    question, answer = problem
    tokens = [VOCABULARY[word] for word in [*question, answer, END]]
    return Encoded(tokens, [False] * len(question) + [True, True])


def small_qwen2(seed: int) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(Qwen2Config(
        vocab_size=len(VOCABULARY), hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, initializer_range=0.05, bos_token_id=0, eos_token_id=0,
        pad_token_id=0))


@torch.no_grad()
def exact_match(model: Any, held_out: Sequence[Problem]) -> float:
    """The fraction of problems for which a plain `model` generates exactly the answer and the end token."""
    model.eval()
    alike = defaultdict(list)  # grouped by length, so that no padding is needed
    for problem in held_out:
        alike[len(problem[0])].append(encode(problem).tokens)
    right = 0
    for length, rows in alike.items():
        tokens = torch.tensor(rows, device=model.device)
        made = model.generate(input_ids=tokens[:, :length], attention_mask=torch.ones_like(tokens[:, :length]),
                              max_new_tokens=2, do_sample=False)
        right += int((made[:, length:length + 2] == tokens[:, length:]).all(dim=1).sum()) if made.shape[1] > length + 1 else 0
    return right / len(held_out)


def train(model: Any, optimizer: Any, learn: Rows, steps: int, seed: int) -> None:
    batches = ({name: each.to(model.device) for name, each in collate(learn, rows).items()}
               for rows in Order(len(learn), BATCH, seed).batches())
    schedule = training.warmup_then_decay(optimizer, steps, warmup=20, decay=training.Decay.COSINE, final=0.0)
    model.train()
    for batch in itertools.islice(batches, steps):
        if hasattr(model, "megacompile"):
            model.megacompile.train_step(batch, optimizer)
        else:
            model(**batch).loss.backward()
        optimizer.step()  # of a streamed model the update is done already; schedulers expect the call
        optimizer.zero_grad()
        schedule.step()


def chosen_optimizer(name: str, written: str | None) -> Callable[..., torch.optim.Optimizer]:
    """Makes the streamed model's optimizer, with the options of AdamW that it has. Raises `ArgumentError`."""
    named = optimizer_named(name)
    return functools.partial(named.kind, **named.arguments(ADAMW, written))


def compare(seed: int, steps: int, device: str, make: Callable[..., torch.optim.Optimizer],
            bf16: bool, precision: str | None) -> tuple[float, float, float]:
    """The (untrained, native, streamed) accuracy for a seed."""
    learn, held_out = split(seed)
    rows, plain = Rows.of(map(encode, learn)), small_qwen2(seed)
    streamed = copy.deepcopy(plain)
    plain.to(device)
    untrained = exact_match(plain, held_out)
    train(plain, torch.optim.AdamW(plain.parameters(), **ADAMW), rows, steps, seed)
    streamed = megacompile.stream(streamed.bfloat16() if bf16 else streamed, device=device, precision=precision)
    train(streamed, make(streamed.parameters()), rows, steps, seed)
    streamed.megacompile.close()  # a plain model again
    return untrained, exact_match(plain, held_out), exact_match(streamed, held_out)


def agree(native: Sequence[float], streamed: Sequence[float]) -> bool:
    """Whether the means differ by at most one standard deviation of native training over seeds, or by at most 0.5%."""
    return abs(statistics.mean(native) - statistics.mean(streamed)) <= max(statistics.stdev(native), 0.005)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--steps", type=int, default=300, help="training steps for each model (default: 300)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--optim", choices=OPTIMIZERS, default="adamw", help="the streamed model's optimizer (default: adamw)")
    parser.add_argument("--optim-args", help='more of its options, such as "master=bfloat16"')
    parser.add_argument("--bf16", action="store_true", help="the streamed model has bf16 weights (default: fp32)")
    parser.add_argument("--precision", help='the streamed model\'s precision, such as "float8-emulated:min_features=64"')
    options = parser.parse_args()
    make = chosen_optimizer(options.optim, options.optim_args)
    streamed = ", ".join(filter(None, ("streamed", "bf16 weights" if options.bf16 else "", options.optim, options.optim_args,
                                      options.precision)))
    begin, found = time.perf_counter(), []
    for seed in range(options.seeds):
        found.append(compare(seed, options.steps, options.device, make, options.bf16, options.precision))
        print(f"seed {seed}: untrained {found[-1][0]:.1%}, native {found[-1][1]:.1%}, streamed {found[-1][2]:.1%} "
              f"({time.perf_counter() - begin:.0f} s)", flush=True)
    columns = list(zip(*found, strict=True))
    table = [(name, f"{statistics.mean(each):.1%}", f"{statistics.stdev(each):.1%}", *(f"{x:.1%}" for x in each))
             for name, each in zip(("untrained", "native PyTorch", streamed), columns, strict=True)]
    headers = ["exact match", "mean", "deviation", *(f"seed {seed}" for seed in range(options.seeds))]
    print(tabulate(table, headers, tablefmt="github"))
    return 0 if agree(columns[1], columns[2]) else 1


if __name__ == "__main__":
    sys.exit(main())
