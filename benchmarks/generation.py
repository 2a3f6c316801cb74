"""Measures a row: `generate` of a decoder shape with random weights, streamed or as the plain model on the device.

    python benchmarks/generation.py --batch 32 --length 128 --new-tokens 256                    # as a user calls it
    python benchmarks/generation.py --batch 32 --length 128 --new-tokens 256 --through native   # transformers alone
    python benchmarks/generation.py --batch 32 --length 128 --new-tokens 256 --beside-native    # both in one process
    python benchmarks/generation.py --batch 256 --through turns                                 # all layers take turns
    python benchmarks/generation.py --batch 256 --new-tokens 2 --through streamed               # streamed, without a cache
    python benchmarks/generation.py --batch 1024 --device-memory 24GiB                          # in parts of the batch

`--batch` counts prompts, and `--length` their tokens. All prompts get `--new-tokens` tokens, greedily. With `--beside-native`
transformers' model generates from the same prompts after each call of ours, and `of_native` is its median time over ours.
With `--switches` a training step of 64 x 1,024 tokens runs before each generation: `first_token_s` is from its end to the
first token, and `back_s` is how much longer the next step takes than one after another step. Prints one JSON line.
"""
from __future__ import annotations

import argparse
import copy
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import rows
import torch
from shapes import SHAPES, random_model
from torch import Tensor

import megacompile
from megacompile.errors import MegacompileError
from megacompile.streaming.device_copy import Turns
from megacompile.streaming.generation.turns import LayerTurns, copied_bytes, spared_bytes
from megacompile.streaming.generation.ways import Finished, Way, ways_to_generate
from megacompile.streaming.streamed_module import generate_by, generate_streamed

#: native: transformers' model on the device. user: `model.generate`. turns: all layers take turns in two slots. streamed: where
#: nothing else fits, the streamed model computes all tokens for each new one.
THROUGH = ("user", "turns", "streamed", "native")
TRAINED_ROWS, TRAINED_LENGTH = 64, 1024


def options() -> argparse.ArgumentParser:
    parser = rows.parser(__doc__)
    parser.set_defaults(batch=32, length=128, steps=3, warm_up=1)
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens that each prompt gets (default: 256)")
    parser.add_argument("--through", choices=THROUGH, default="user",
                        help="model.generate, all layers in turns, without a cache, or transformers alone (default: user)")
    parser.add_argument("--beside-native", action="store_true",
                        help="also measure transformers alone, on a model with the same weights in the same process")
    parser.add_argument("--kv-cache", choices=("dynamic", "static", "offloaded"), default="dynamic",
                        help="how keys and values are kept (default: dynamic)")
    parser.add_argument("--switches", type=int, default=0, help="number of training steps with a generation after each")
    parser.add_argument("--overlap", action="store_true", help="these steps update on arrival of gradients, without clipping")
    parser.add_argument("--device-memory", help='device memory budget, such as "24GiB" (default: the free memory)')
    return parser


def measure(given: argparse.Namespace) -> rows.Row:
    if given.through == "native" and (given.switches or given.beside_native):
        raise MegacompileError("--switches and --beside-native are for streamed models: leave out --through native")
    started = time.perf_counter()
    model = random_model(given.shape, rows.layer_count(given), given.device).eval()
    model.generation_config.eos_token_id = None  # all answers have the same length
    cuda = given.device == "cuda"
    native = copy.deepcopy(model).to(given.device) if given.beside_native else None
    if given.through == "native":
        model = model.to(given.device)
    else:
        model = megacompile.stream(model, device=given.device, device_memory=given.device_memory)
    setup_s = time.perf_counter() - started
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    generate = _generate(model, given)
    alone = None if native is None else _generate(native, given)
    found = rows.timed(lambda ids: generate(ids, given.new_tokens), given,
                       beside=None if alone is None else lambda ids: alone(ids, given.new_tokens))
    seconds = found["step_s"]
    found |= dict(layers=model.config.num_hidden_layers, parameters=sum(p.numel() for p in model.parameters()),
                  tokens_per_s=rows.significant(given.batch * given.new_tokens / seconds), setup_s=round(setup_s, 1),
                  peak_device_gib=round(torch.cuda.max_memory_reserved() / 2**30, 2) if cuda else 0.0)
    if given.through == "native":
        return found
    turns = model.megacompile.device_copy.turns
    found["parts"] = parts = _part_count(model, given) if given.through == "user" else 1
    if turns is not None:
        link = _link_rate(turns)
        whole, tokens = copied_bytes(turns.program), math.ceil(given.batch / max(1, parts))
        spared = (given.new_tokens - 1) * spared_bytes(tuple(turns.layers.values()), tokens)  # all but the prompts' call
        bound = parts * (given.new_tokens * whole - spared) / link
        found |= dict(turns=len(turns.layers), link_gb_s=round(link / 1e9, 1), of_link_bound=rows.significant(bound / seconds))
    if native is not None:
        native_s = found.pop("beside_s")
        found |= dict(native_times_s=found.pop("beside_times_s"), of_native=round(native_s / seconds, 3),
                      native_tokens_per_s=rows.significant(given.batch * given.new_tokens / native_s))
        del native, alone
    if given.switches:
        found |= _switching(model, generate, given)
    model.megacompile.close()
    return found


def _options(given: argparse.Namespace, count: int) -> dict[str, Any]:
    """Arguments of `generate` for so many new tokens."""
    cache = {} if given.kv_cache == "dynamic" else {"cache_implementation": given.kv_cache}
    return dict(do_sample=False, pad_token_id=0, max_new_tokens=count, **cache)


def _generate(model: Any, given: argparse.Namespace) -> Callable[[Tensor, int], float]:
    """A function that generates so many tokens for some prompts. Returns 0, where a training step returns its loss."""
    through = given.through if hasattr(model, "megacompile") else "native"

    def generate(ids: Tensor, count: int) -> float:
        ids, how = ids.to(given.device), _options(given, count)
        if through == "turns":
            generate_by(model, Way(Turns.ALL, 0, {"inputs": ids, **how}), Finished())
        elif through == "streamed":
            generate_streamed(model, {"inputs": ids, **how})
        else:
            model.generate(ids, **how)
        if given.device == "cuda":
            torch.cuda.synchronize()
        return 0.0

    return generate


def _part_count(model: Any, given: argparse.Namespace) -> int:
    """Into how many parts `model.generate` cuts the batch; 0: it streams without a cache."""
    call = {"inputs": torch.zeros(given.batch, given.length, dtype=torch.long), **_options(given, given.new_tokens)}
    ways = ways_to_generate(model, call, model.megacompile.device_copy.arrangement)
    return next((way.parts for way in ways), 0)


def _link_rate(turns: LayerTurns) -> float:
    """Bytes per second of the copies of all layers that take turns, one after another, while nothing is computed."""
    rates = []
    for _ in range(3):
        turns.stop()
        begun = time.perf_counter()
        turns.skip_call()
        rates.append(copied_bytes(turns.program) / (time.perf_counter() - begun))
    turns.stop()
    return statistics.median(rates)


def _switching(model: Any, generate: Callable[[Tensor, int], float], given: argparse.Namespace) -> rows.Row:
    """Seconds from the end of a training step to the first token, and back; and the memory that is reserved after each. A step
    ends when all weights are updated: `update_s` is how long that takes after the device has finished. In training, the next
    step runs beside that update."""
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-5, overlap="backward" if given.overlap else None,
                                  max_grad_norm=rows.clip(given))
    cuda, vocabulary = given.device == "cuda", SHAPES[given.shape]["vocab_size"]

    def step() -> float:
        ids = torch.randint(0, vocabulary, (TRAINED_ROWS, TRAINED_LENGTH))
        begun = time.perf_counter()
        model.megacompile.train_step(dict(input_ids=ids, labels=ids), optimizer).item()
        if cuda:  # the loss is known before the backward ends
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    steady = statistics.median([step() for _ in range(5)][2:])
    first, back, reserved, updates = [], [], [], []
    for _ in range(given.switches):
        ids = torch.randint(0, vocabulary, (given.batch, given.length))
        begun = time.perf_counter()
        model.megacompile.whole()
        updates.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        generate(ids, 1)
        first.append(time.perf_counter() - begun)
        back.append(step() - steady)
        reserved.append(round(torch.cuda.memory_reserved() / 2**30, 2) if cuda else 0.0)
    return dict(first_token_s=round(statistics.median(first), 3), back_s=round(statistics.median(back), 3),
                update_s=round(statistics.median(updates), 3), train_step_s=round(steady, 3),
                first_tokens_s=[round(t, 3) for t in first], backs_s=[round(t, 3) for t in back], reserved_gib=reserved)


def main() -> None:
    rows.main("generation", options(), measure)


if __name__ == "__main__":
    main()
