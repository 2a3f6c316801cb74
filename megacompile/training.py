"""The loop behind `megacompile train`: load a model, train it on batches, show how it goes, stop where asked.

A streamed model takes whole steps (`train_step`); the loop takes any other model whose forward gives a loss, too, and any
optimizer, by forward, backward, step and zero_grad.
"""
from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.errors import ArgumentError, MegacompileError
from megacompile.inputs.repacking import Wanted, present_tokens
from megacompile.losses import IGNORED
from megacompile.system.regular_files import refuse_irregular
from megacompile.tools.decay import Decay

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_WEIGHT_FILES = ("*.safetensors", "*.bin")


def load_model(source: str | Path, *, dtype: torch.dtype | None = None, meta: bool = False) -> Any:
    """A causal language model of transformers from a local directory or config file.

    A directory with weights is loaded; a directory or JSON file with a config alone gives random weights. `meta` gives
    the model without any weights, for looking at its schedule; then the id of a model of the Hugging Face hub ("owner/name")
    will do too. `dtype` None: the one that config or weights name.
    Raises ArgumentError if there is no such model, MegacompileError if transformers cannot make one of it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # seconds to import; only what needs a model pays

    from megacompile.loading import parameters_on_meta
    from megacompile.weights.random_weights import fill_randomly

    name, source = str(source), Path(source)
    remote = not source.exists()
    if remote and not (meta and _HUB_ID.fullmatch(name)):
        raise ArgumentError(f"there is no model {name!r} here: give a model directory, a config.json"
                            + (", or an id of the Hugging Face hub (owner/name)" if meta else ""))
    if source.exists():
        refuse_irregular(source)
    try:
        config = AutoConfig.from_pretrained(name, local_files_only=not remote)
        if not meta and has_weights(source):
            return AutoModelForCausalLM.from_pretrained(source, dtype=dtype or "auto", local_files_only=True)
        dtype = dtype or config.dtype or torch.float32
        if meta:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(config, dtype=dtype)
        with parameters_on_meta():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        fill_randomly(model)
        return model
    except Exception as error:  # whatever the files make transformers raise: a division by zero, a torn safetensors
        if remote and isinstance(error, OSError):
            raise ArgumentError(f"there is no model {name!r} here, and the Hugging Face hub gave no config of it: give a model "
                                "directory or a config.json, or check the id and the network") from error
        raise MegacompileError(f"{name} holds no causal language model that transformers reads: give a model "
                               f"directory or its config.json\n{type(error).__name__}: {error}") from error


def has_weights(source: str | Path) -> bool:
    """Whether a model's weights are pretrained: a config alone has none. What is not here is on the hub."""
    source = Path(source)
    return not source.exists() or (source.is_dir() and any(any(source.glob(pattern)) for pattern in _WEIGHT_FILES))


def check_length(config: Any, length: int) -> None:
    """Raises MegacompileError if a model with this configuration has no positions for `length` tokens."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and length > positions > 0:
        raise MegacompileError(f"a sequence of {length} tokens is longer than the {positions} positions of the model: give a "
                               "smaller --length, or a model whose config has a larger max_position_embeddings")


def parameter_count(model: nn.Module) -> int:
    """Parameters of a model, tied ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def warmup_then_decay(optimizer: torch.optim.Optimizer, steps: int, warmup: int, decay: Decay = Decay.LINEAR,
                      final: float = 0.1) -> torch.optim.lr_scheduler.LambdaLR:
    """The learning rate rises linearly over the first `warmup` steps, then falls to the share `final` of it at the last."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))  # the schedule is asked once too often
        return final + (1.0 - final) * decay.height(progress)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def _unknown() -> None:
    """The norm of gradients that nobody measured."""


@dataclass(frozen=True)
class Step:
    """What one step did. `loss` is in nats a token, `lr` the learning rate that it had, `rate` in tokens a second without
    padding, `padding` its share of what was computed, `tflops` is 6 x parameters x `rate` (recomputation and padding not
    counted), `seconds` how long it took. `norm` gives the norm of all gradients before clipping, without a wait: None until
    the update has begun, and where it is never known."""

    number: int
    loss: float
    lr: float
    rate: float
    padding: float
    tflops: float
    device_bytes: int
    host_bytes: int
    seconds: float
    norm: Callable[[], float | None] = _unknown


def _write_at_once(text: str) -> None:
    """To stderr, past all buffers: a print within a print would repeat what the outer one has begun, or fail."""
    os.write(2, f"{text}\n".encode())


class Interruption:
    """While entered, a first Ctrl-C or SIGTERM asks for a stop at the next step boundary; a second one is a KeyboardInterrupt.

    `signal`: the one that asked, None if none did. `announce` may be called in the midst of any other print."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, announce: Callable[[str], None] = _write_at_once) -> None:
        self.signal: signal.Signals | None = None
        self._announce = announce

    @property
    def asked(self) -> bool:
        return self.signal is not None

    @property
    def name(self) -> str:
        return "Ctrl-C" if self.signal is signal.SIGINT else "SIGTERM"

    def __enter__(self) -> Interruption:
        self._previous = {each: signal.signal(each, self._handle) for each in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._previous.items():
            signal.signal(each, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.signal = signal.Signals(signum)
        self._announce(f"{self.name}: stopping after this step (once more to stop at once)")


def train(model: Any, optimizer: torch.optim.Optimizer, batches: Iterator[Mapping[str, Tensor]], steps: int, *, done: int = 0,
          schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
          on_step: Callable[[Step], None] = lambda _: None, stop: Callable[[], bool] = lambda: False) -> list[float]:
    """Trains until `steps` steps are done, of which `done` were before, or until `stop()`, asked between steps; returns the
    loss of each step taken. `on_step` is called between steps too: it may evaluate and save.

    Raises MegacompileError when a loss is not finite: an optimizer that does not look at gradients, as `megacompile.AdamW`
    does, has made one bad update.
    """
    parameters, losses = parameter_count(model), []
    for number in range(done + 1, steps + 1):
        if stop():
            break
        begin, lr = time.perf_counter(), float(optimizer.param_groups[0]["lr"])
        batch = next(batches)
        found = _step(model, optimizer, batch)
        if schedule is not None:
            schedule.step()
        loss = float(found)  # waits for the device, not for the update, which runs beside the next step
        if not math.isfinite(loss):
            raise MegacompileError(
                f"the loss of step {number} is {loss}: lower the learning rate or clip the gradients")
        losses.append(loss)
        taken = time.perf_counter() - begin
        useful, computed = _tokens(model, batch)
        device_bytes, host_bytes = memory(model)
        norm = getattr(optimizer, "norm_of_last_step", lambda: _unknown)()
        rate = useful / taken
        on_step(Step(number, loss, lr, rate, 1 - useful / computed, 6e-12 * parameters * rate, device_bytes, host_bytes, taken,
                     norm))
    return losses


def _step(model: Any, optimizer: torch.optim.Optimizer, batch: Mapping[str, Tensor]) -> Tensor:
    """One step; its loss."""
    if hasattr(model, "megacompile"):
        loss = model.megacompile.train_step(batch, optimizer)
        optimizer.step()  # there is nothing left to do, but schedulers want to see it
        return loss
    output = model(**batch)
    output.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return output.loss.detach()


def _tokens(model: Any, batch: Mapping[str, Tensor]) -> tuple[int, int]:
    """Tokens of the last step: those without padding, and those that were computed."""
    if hasattr(model, "megacompile"):
        stats = model.megacompile.stats
        return stats["step_useful_tokens"], stats["step_computed_tokens"]
    present = present_tokens(batch, batch.get("attention_mask"), ("labels",), Wanted.LOSS)
    return int(present.sum()), present.size


@torch.no_grad()
def evaluate(model: Any, batches: Iterable[Mapping[str, Tensor]]) -> float:
    """The mean loss of all labels that are predicted, nats a token, batches without any left out; leaves the model in the mode
    that it was in."""
    training, total, count = model.training, 0.0, 0
    model.eval()
    for batch in batches:
        labels = int((batch["labels"][:, 1:] != IGNORED).sum())
        if labels:
            total, count = total + labels * float(model(**batch).loss), count + labels
    model.train(training)
    return total / max(1, count)


def memory(model: Any) -> tuple[int, int]:
    """(device bytes, host bytes) of a streamed model: the device's peak, what the host holds. Of a plain model: where
    its parameters are."""
    handle = getattr(model, "megacompile", None)
    if handle is not None:
        stats = handle.stats  # slots are a floor: not every device counts its peak
        return max(stats["peak_device_bytes"], stats["slot_bytes"]), stats["host_bytes"]
    held = sum(p.nbytes for p in model.parameters())
    on_device = sum(p.nbytes for p in model.parameters() if p.device.type != "cpu")
    return on_device, held - on_device
