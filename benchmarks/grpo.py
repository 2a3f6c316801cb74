"""Measures a row: GRPO of a decoder shape with random weights through our `GRPOTrainer`, by phase (needs trl and datasets).

    python benchmarks/grpo.py --layers 8                            # 64 prompts x 8 samples x 256 new tokens
    python benchmarks/grpo.py --layers 8 --beta 0.04                # with log-probabilities of a reference model
    python benchmarks/grpo.py --layers 8 --iterations 2             # with log-probabilities of the policy before two updates
    python benchmarks/grpo.py --layers 8 --through turns            # generation with all layers in turns
    python benchmarks/grpo.py --layers 8 --compiled                 # generation with a static cache and compiled forwards

A step generates `--samples` completions for each of `--prompts` prompts, and trains on them `--iterations` times. Prompts have
`--length` random tokens. Completions are sampled and have exactly `--new-tokens` tokens. The reward is their share of even
tokens. The `*_s` fields are means over the timed steps, and these six add up to `step_s`:

- `generation_s`: `generate`, from prompts on the host to completions on the host, without switching.
- `switching_s`: making and refreshing the device's copy of the weights for generation, and releasing it; afterwards making the
  slots of training again and loading the weights that stay there.
- `log_probabilities_s`: log-probabilities that the loss is compared with, of the policy before its updates and of the reference
  model. TRL computes none with `--beta 0 --iterations 1`, its defaults, and this is 0 then. Those of the loss are in training.
- `training_s`: forward, loss, backward and optimizer step, until the device has finished.
- `update_s`: waiting for the host's update after that. Generation waits for a layer's update when its first forward gets there,
  or, with `--through turns`, for all before it begins. A step counts what the update before it makes it wait for.
- `rest_s`: tokenizing, decoding, rewards, advantages and logs.

`tokens_per_step` counts tokens that are trained: those of prompts and completions as TRL counts them, once for each iteration.
A prompt counts with each of its completions, since it is computed with each. `tokens_per_s` is `tokens_per_step` over `step_s`,
`training_tokens_per_s` is `tokens_per_step` over `training_s + update_s`, and `generated_tokens_per_s` is the number of new
tokens over `generation_s`.

`of_full_rows` is `training_tokens_per_s` over `full_rows_tokens_per_s`: the rate of `train_step` on `--batch` rows of 1,024
tokens, after GRPO, in the same process, with the same optimizer. The default of `--batch` has as many tokens as a step of the
default sizes. Both rates count all tokens. Prints one JSON line.

`mapped_gib_per_step` is the device memory that PyTorch's allocator has mapped in a timed step. It is near 0 if generation and
training hand memory on to each other; mapping it takes time, which counts for the phase that needs it.

`--recorded` records the lanes in one more step. `recorded_s` and `predicted_s` are then the seconds of each op of its training,
with the name of its template, as measured and as simulated. The former include time in which the device waits inside of an op.
"""
from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import clocks
import rows
import torch
import transformers
from clocks import PhaseClock
from shapes import random_model
from torch import Tensor, nn
from uneven import RandomRows, losses_of, number_tokenizer

import megacompile
from megacompile.errors import MegacompileError
from megacompile.ir.program import op_of
from megacompile.planning.device import process_count
from megacompile.predict.simulate import Timeline
from megacompile.streaming.device_copy import Turns
from megacompile.streaming.generation.copied_tiles import CopiedTiles
from megacompile.streaming.handle import Handle
from megacompile.timeline import kind_of

GENERATION, SWITCHING, LOG_PROBABILITIES, TRAINING, UPDATE, REST = PHASES = (
    "generation", "switching", "log_probabilities", "training", "update", "rest")
#: megacompile: `model.generate`, with the whole copy on the device if it fits. turns: all layers take turns in two slots.
THROUGH = ("megacompile", "turns")
FULL_LENGTH = 1024
LEARNING_RATE = 1e-6


def options() -> argparse.ArgumentParser:
    parser = rows.parser(__doc__)
    parser.set_defaults(batch=192, length=128, steps=3, warm_up=2)
    parser.add_argument("--prompts", type=int, default=64, help="prompts of a step (default: 64)")
    parser.add_argument("--samples", type=int, default=8, help="completions for each prompt (default: 8)")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens of each completion (default: 256)")
    parser.add_argument("--iterations", type=int, default=1,
                        help="updates for the completions of a step, TRL's num_iterations (default: 1)")
    parser.add_argument("--accumulation", type=int, default=1,
                        help="batches that completions are trained in, TRL's gradient_accumulation_steps (default: 1)")
    parser.add_argument("--beta", type=float, default=0.0,
                        help="weight of the divergence from a reference model; 0: there is none (default: 0)")
    parser.add_argument("--through", choices=THROUGH, default="megacompile",
                        help="generation through model.generate, or with all layers in turns (default: megacompile)")
    parser.add_argument("--compiled", action="store_true",
                        help="generation with a static cache, for which transformers compiles the forward of new tokens")
    parser.add_argument("--overlap", action="store_true",
                        help="update as gradients arrive, without clipping, so that generation waits for less; full rows too")
    parser.add_argument("--recorded", action="store_true", help="record the seconds of each op in one more step")
    parser.add_argument("--device-memory", help='device memory budget, such as "24GiB" (default: the free memory)')
    return parser


# ---------------------------------------------------------------- phases

class Timed:
    """A base before a `GRPOTrainer`, whose methods it times with a `clock`."""

    clock: PhaseClock

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.of(REST):
            return super()._generate_and_score_completions(*args, **kwargs)  # type: ignore[misc]

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.of(GENERATION):
            return super()._generate_single_turn(*args, **kwargs)  # type: ignore[misc]

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        theirs = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        if torch.is_grad_enabled():  # those of the loss
            return theirs(*args, **kwargs)
        with self.clock.of(LOG_PROBABILITIES):
            return theirs(*args, **kwargs)


class Steps(transformers.TrainerCallback):
    """Measures steps, each of which ends when the device has finished. The host may still update.

    State: for each step so far, its duration in seconds (`times`), the seconds of its `phases`, and the number of `tokens` that
    TRL has counted in prompts and completions; the device's `clocks` after the warm-up; and the bytes that the allocator has
    `mapped` so far, at the beginning and after each step."""

    recording: Any = None  # of the step after the timed ones, once it begins

    def __init__(self, clock: PhaseClock, model: Any, given: argparse.Namespace) -> None:
        self.clock, self.model, self.given = clock, model, given
        self.times: list[float] = []
        self.phases: list[dict[str, float]] = []
        self.tokens: list[int] = []
        self.mapped: list[int] = [0]
        self.clocks: dict[str, float] = {}
        self._sampling = contextlib.ExitStack()
        self._began, self._tokens_before = 0.0, 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.clock.taken()
        self._began = time.perf_counter()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if len(self.times) == self.given.warm_up + self.given.steps and self.recording is None:
            self.recording = self.model.megacompile.record().__enter__()
        self.clock.begin(TRAINING)

    def on_step_end(self, _: Any, state: transformers.TrainerState, *__: Any, **___: Any) -> None:
        self.clock.end()
        if state.global_step % self.given.iterations or self.recording is not None:
            return
        self.phases.append(self.clock.taken())
        now = time.perf_counter()
        self.times.append(now - self._began)
        self.tokens.append(state.num_input_tokens_seen - self._tokens_before)
        self._began, self._tokens_before = now, state.num_input_tokens_seen
        statistics_now = torch.cuda.memory_stats() if self.given.device == "cuda" else {}
        self.mapped.append(statistics_now.get("reserved_bytes.all.allocated", 0))
        if len(self.times) == self.given.warm_up:
            self.clocks = self._sampling.enter_context(clocks.sampled(self.given.device))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._sampling.close()
        if self.recording is not None:
            self.recording.__exit__(None, None, None)


@contextlib.contextmanager
def switching_timed(handle: Handle, clock: PhaseClock, through: str) -> Iterator[list[int]]:
    """A context in which a streamed model's switches between training and generation, and its waits for updates, are timed, and
    layers of its copy on the device take turns as `through` says. Yields a list of the numbers of layers that did, one for each
    use of the copy."""
    streamed, device_copy, turns = handle.streamed, handle.device_copy, []
    use, release, enter, settle, reach = (
        device_copy.use, device_copy.release, streamed._enter, streamed.settle, CopiedTiles.reach)

    @contextlib.contextmanager
    def timed_use(original: type[nn.Module], more_bytes: int = 0, asked: Turns = Turns.NONE,
                  early: bool = False) -> Iterator[nn.Module]:
        with contextlib.ExitStack() as stack:
            with clock.of(SWITCHING):
                taken = Turns.ALL if through == "turns" else asked
                native = stack.enter_context(use(original, more_bytes, taken, early and through != "turns"))
            turns.append(0 if device_copy.turns is None else len(device_copy.turns.layers))
            yield native

    def timed_release() -> None:
        with clock.of(SWITCHING):
            release()

    def timed_enter(*args: Any) -> None:
        with clock.of(SWITCHING):
            enter(*args)
            streamed.drain()  # weights that stay on the device are loaded by other threads

    def timed_settle() -> None:
        with clock.of(UPDATE):
            settle()

    def timed_reach(tiles: CopiedTiles, *stage: str) -> None:
        with clock.of(UPDATE):
            reach(tiles, *stage)

    replaced = ((device_copy, "use", timed_use), (device_copy, "release", timed_release), (streamed, "_enter", timed_enter),
                (streamed, "settle", timed_settle))
    for owner, name, timed in replaced:
        vars(owner)[name] = timed
    try:
        with mock.patch.object(CopiedTiles, "reach", timed_reach):
            yield turns
    finally:
        for owner, name, _ in replaced:
            del vars(owner)[name]


# ---------------------------------------------------------------- training

def even_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward: the share of even tokens in each completion."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def trainer_of(given: argparse.Namespace, model: Any, optimizer: Any, steps: Steps, folder: str) -> Any:
    """The trainer, timed by the clock of `steps`."""
    import datasets
    import trl

    from megacompile.grpo import GRPOTrainer

    completions, count = given.prompts * given.samples, given.steps + given.warm_up + given.recorded
    tokenizer = number_tokenizer(model.config.vocab_size)
    source = RandomRows([given.length] * given.prompts * count, model.config.vocab_size - len(tokenizer.all_special_ids))
    prompts = [dict(prompt=" ".join(map(str, source[index]["input_ids"]))) for index in range(len(source))]
    # Kernels of so many rows take longer than their launches, and CUDA graphs would be recorded anew for each cache.
    compiled = dict(cache_implementation="static",
                    compile_config=transformers.CompileConfig(mode="default")) if given.compiled else {}
    said = trl.GRPOConfig(
        folder, max_steps=count * given.iterations, per_device_train_batch_size=completions // given.accumulation,
        gradient_accumulation_steps=given.accumulation, num_generations=given.samples, num_iterations=given.iterations,
        max_completion_length=given.new_tokens, generation_kwargs=dict(min_new_tokens=given.new_tokens, **compiled),
        beta=given.beta,
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
        max_grad_norm=rows.clip(given) or 0.0,
        save_strategy="no", report_to=[], logging_steps=1, disable_tqdm=True, use_cpu=given.device == "cpu")

    class TimedTrainer(Timed, GRPOTrainer):
        clock = steps.clock

    return TimedTrainer(model=model, reward_funcs=even_share, args=said, train_dataset=datasets.Dataset.from_list(prompts),
                        processing_class=tokenizer, callbacks=[steps], optimizers=(optimizer, None))


def full_rows(given: argparse.Namespace, model: Any, optimizer: Any) -> rows.Row:
    """Times whole training steps of `--batch` full rows."""

    def step(ids: Tensor) -> float:
        return float(model.megacompile.train_step(dict(input_ids=ids, labels=ids), optimizer).item())

    return rows.timed(step, argparse.Namespace(**vars(given) | {"length": FULL_LENGTH}))


# ---------------------------------------------------------------- a row

def check(given: argparse.Namespace) -> None:
    """Raises `MegacompileError` for what this benchmark does not measure."""
    if process_count() > 1:
        raise MegacompileError("this benchmark measures one process: start it without torchrun")
    completions = given.prompts * given.samples
    if completions % given.accumulation:
        raise MegacompileError(f"{completions} completions cannot be divided into {given.accumulation} batches of one size: "
                               "give another --accumulation")
    if given.overlap and given.accumulation > 1:
        raise MegacompileError("--overlap updates in each backward, and --accumulation has several: leave one of them out")


def measure(given: argparse.Namespace) -> rows.Row:
    check(given)
    cuda, began = given.device == "cuda", time.perf_counter()
    model = random_model(given.shape, rows.layer_count(given), given.device)
    model = megacompile.stream(model, device=given.device, device_memory=given.device_memory,
                               micro_batch_size=given.micro_batch_size)
    optimizer = megacompile.AdamW(model.parameters(), lr=LEARNING_RATE, max_grad_norm=rows.clip(given),
                                  overlap="backward" if given.overlap else None)
    steps = Steps(PhaseClock(torch.cuda.synchronize if cuda else lambda: None, outside=REST), model, given)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(given, model, optimizer, steps, folder)
        setup_s = time.perf_counter() - began
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        with switching_timed(model.megacompile, steps.clock, given.through) as turns:
            trainer.train()
    peak = torch.cuda.max_memory_reserved() if cuda else 0
    by_op = {} if steps.recording is None else seconds_by_op(model, steps.recording)
    if trainer.ref_model is not None:
        trainer.ref_model.megacompile.close()
    model.megacompile.device_copy.release()
    full = full_rows(given, model, optimizer)
    model.megacompile.close()
    logged = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    return row_of(given, steps) | dict(
        layers=model.config.num_hidden_layers, parameters=sum(p.numel() for p in model.parameters()),
        **compared(given, steps, full), turns=turns[-1], rewards=logged, losses=losses_of(trainer) + full["losses"],
        setup_s=round(setup_s, 1), peak_device_gib=round(peak / 2**30, 2), **by_op, **steps.clocks)


def seconds_by_op(model: Any, recording: Any) -> rows.Row:
    """The fields of a recorded step: the seconds of each op, and if the machine's rates are known, those that are predicted."""
    found: rows.Row = dict(recorded_s=_seconds(recording.timeline()))
    with contextlib.suppress(MegacompileError):
        found["predicted_s"] = _seconds(model.megacompile.simulate())
    return found


def _seconds(timeline: Timeline) -> dict[str, float]:
    """Seconds of the last step's instructions, by op and template, the longest first."""
    found: dict[str, float] = {}
    last = max(item.step for item in timeline.items)
    for item in timeline.items:
        if item.step == last and kind_of(item) is not None:
            name = f"{op_of(item.node).name} {item.node.kwargs.get('template', '')}".strip()
            found[name] = found.get(name, 0.0) + item.end_s - item.start_s
    return {name: round(found[name], 4) for name in sorted(found, key=found.__getitem__, reverse=True)}


def row_of(given: argparse.Namespace, steps: Steps) -> rows.Row:
    """The fields of the steps and their phases."""
    timed = steps.phases[given.warm_up:]
    mean = {phase: statistics.mean(each.get(phase, 0.0) for each in timed) for phase in PHASES}
    return dict(
        step_s=round(statistics.mean(steps.times[given.warm_up:]), 4), **{f"{name}_s": round(s, 4) for name, s in mean.items()},
        generated_tokens_per_s=round(given.prompts * given.samples * given.new_tokens / mean[GENERATION]),
        mapped_gib_per_step=round((steps.mapped[-1] - steps.mapped[given.warm_up]) / given.steps / 2**30, 2),
        times_s=[round(t, 4) for t in steps.times],
        phases_s=[{name: round(s, 4) for name, s in each.items()} for each in steps.phases])


def compared(given: argparse.Namespace, steps: Steps, full: rows.Row) -> rows.Row:
    """The rates of trained tokens, also relative to that of full rows."""
    tokens = given.iterations * statistics.mean(steps.tokens[given.warm_up:])
    training = statistics.mean(each[TRAINING] + each[UPDATE] for each in steps.phases[given.warm_up:])
    rate, full_rate = tokens / training, given.batch * FULL_LENGTH / full["step_s"]
    return dict(
        tokens_per_step=round(tokens), tokens_per_s=round(tokens / statistics.mean(steps.times[given.warm_up:])),
        training_tokens_per_s=round(rate), full_rows_tokens_per_s=round(full_rate), of_full_rows=round(rate / full_rate, 3),
        full_rows_step_s=full["step_s"], full_rows_times_s=full["times_s"])


def main() -> None:
    rows.main("grpo", options(), measure)


if __name__ == "__main__":
    main()
