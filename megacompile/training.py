"""What commands and scripts share: loads a model, makes a schedule, describes a step, evaluates, stops on request."""
from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.errors import ArgumentError, MegacompileError
from megacompile.losses import IGNORED
from megacompile.system.files import refuse_irregular
from megacompile.tools.recipe import Decay
from megacompile.weights.codes import weights_of_codes

_WEIGHT_FILES = ("*.safetensors", "*.bin")


def load_model(source: str | Path, *, dtype: torch.dtype | None = None, meta: bool = False) -> Any:
    """A causal language model from transformers, from a local directory or config file.

    With `meta` the model has no weights, which is enough to inspect its schedule; `source` may then also have only a config, or
    be an id on the Hugging Face Hub ("owner/name"). `dtype`: None for that of the config or of the weights.

    Raises `ArgumentError` if there is no such model, `MegacompileError` if transformers cannot load it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # slow to import

    from megacompile.loading import HUB_ID

    name, source = str(source), Path(source)
    remote = not source.exists()
    if remote and not (meta and HUB_ID.fullmatch(name)):
        raise ArgumentError(f"model {name!r} was not found: give a model directory, a config.json"
                            + (", or an id on the Hugging Face Hub (owner/name)" if meta else ""))
    if source.exists():
        refuse_irregular(source)
    try:
        if not meta:
            return AutoModelForCausalLM.from_pretrained(source, dtype=dtype or "auto", local_files_only=True)
        config = AutoConfig.from_pretrained(name, local_files_only=not remote)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype or torch.float32)
    except Exception as error:  # transformers may raise anything: a division by zero, an error about a torn safetensors file
        if remote and isinstance(error, OSError):
            raise ArgumentError(f"model {name!r} was not found, and the Hugging Face Hub returned no config for it: give a "
                                "model directory or a config.json, or check the id and the network") from error
        raise MegacompileError(f"transformers cannot load a causal language model from {name}: give a model directory or its "
                               f"config.json\n{type(error).__name__}: {error}") from error


def has_weights(source: str | Path) -> bool:
    """True if a model has pretrained weights, and not only a config. A model that is not local is assumed to be on the Hub."""
    source = Path(source)
    return not source.exists() or (source.is_dir() and any(any(source.glob(pattern)) for pattern in _WEIGHT_FILES))


def check_length(config: Any, length: int) -> None:
    """Raises `MegacompileError` if a model with this config has fewer than `length` positions."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and length > positions > 0:
        raise MegacompileError(f"a sequence of {length} tokens is longer than the {positions} positions of the model: use a "
                               "smaller --length, or a model with a larger max_position_embeddings")


def parameter_count(model: nn.Module) -> int:
    """The number of parameters of a model. Tied ones count once, and codes count as the weights that they stand for."""
    of_codes = weights_of_codes(model)
    return sum(of_codes.get(id(parameter), parameter.numel()) for parameter in model.parameters())


def warmup_then_decay(optimizer: torch.optim.Optimizer, steps: int, warmup: int, decay: Decay = Decay.LINEAR,
                      final: float = 0.1) -> torch.optim.lr_scheduler.LambdaLR:
    """A schedule that raises the learning rate linearly over the first `warmup` steps, then lowers it to the fraction `final`
    of the peak at the last step."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))  # PyTorch also asks for the step after the last one
        return final + (1.0 - final) * decay.height(progress)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@dataclass(frozen=True)
class Step:
    """The results of one step. `loss`: nats per token. `lr`: learning rate of the step. `rate`: tokens per second without
    padding. `padding`: fraction of computed tokens that are padding. `tflops`: 6 x parameters x `rate`, without recomputation
    and padding. `seconds`: duration. `disk_bytes_written`: by updates of optimizer state on disk so far. `host_bytes`:
    what the model and its training take; `process_bytes`: all host memory of the process, also of Python and libraries."""

    number: int
    loss: float
    lr: float
    rate: float
    padding: float
    tflops: float
    device_bytes: int
    host_bytes: int
    seconds: float
    disk_bytes_written: int = 0
    process_bytes: int = 0


def _write_at_once(text: str) -> None:
    """Writes to stderr without a buffer. A signal handler may interrupt a print; a nested print would repeat its text or
    fail."""
    os.write(2, f"{text}\n".encode())


def name_of(number: int) -> str:
    """The usual name of a signal."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


class Interruption:
    """A context in which a first Ctrl-C or SIGTERM requests a stop at the next step boundary, and a second one raises
    `KeyboardInterrupt`.

    `signal`: the first signal, or None. `announce` is called in the signal handler, possibly during another print."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, announce: Callable[[str], None] = _write_at_once) -> None:
        self.signal: signal.Signals | None = None
        self._announce = announce

    @property
    def asked(self) -> bool:
        return self.signal is not None

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
        self._announce(f"{name_of(signum)}: stopping after this step (repeat to stop immediately)")


def evaluate(model: Any, batches: Iterable[Mapping[str, Tensor]]) -> float:
    """The mean loss over all predicted labels in nats per token. Skips batches without labels. Restores the model's mode."""
    total, count = total_loss(model, batches)
    return total / max(1, count)


@torch.no_grad()
def total_loss(model: Any, batches: Iterable[Mapping[str, Tensor]]) -> tuple[float, int]:
    """(the sum of the losses of all predicted labels in nats, their number), as for `evaluate`."""
    training, total, count = model.training, 0.0, 0
    model.eval()
    for batch in batches:
        labels = int((batch["labels"][:, 1:] != IGNORED).sum())
        if labels:
            total, count = total + labels * float(model(**batch).loss), count + labels
    model.train(training)
    return total, count


def memory(model: Any) -> tuple[int, int]:
    """(device bytes, host bytes). For a streamed model: the device's peak, and the bytes that the host holds. For a plain
    model: the bytes of its parameters on each."""
    handle = getattr(model, "megacompile", None)
    if handle is not None:
        stats = handle.stats  # not every device counts its peak; it is at least the size of the slots
        return max(stats["peak_device_bytes"], stats["slot_bytes"]), stats["host_bytes"]
    held = sum(p.nbytes for p in model.parameters())
    on_device = sum(p.nbytes for p in model.parameters() if p.device.type != "cpu")
    return on_device, held - on_device
