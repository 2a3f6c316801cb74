"""One causal language model streamed against itself in native PyTorch: exact, refused, wrong, or not to be built."""
from __future__ import annotations

import copy
import dataclasses
import logging
import math
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
from tiny_configs import FIRST_PLAIN_TOKEN, NOT_ALONE, SETTINGS, VOCABULARY, tiny_config
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import megacompile
from megacompile.errors import LaneError, MegacompileError
from megacompile.frontend.tracing.recurrent_mixers import mixers_as_ops

ROWS, LENGTH = 5, 29  # not the sizes at which models are captured
SECONDS = 240  # of the processor, for one class
#: How far off a gradient may be, as a share of its norm. Native float32 may be further off: its distance is measured from
#: native float64, or, where that does not run, from itself with the rows in another order. Then ROUNDINGS times that distance
#: is allowed, since one draw of rounding says little of another.
TOLERANCE, ROUNDINGS = 1e-5, 8


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`outcome`: "exact", "refused" (by us), "wrong" (other numbers, or an error that is not ours), "not built" (by
    transformers, or native training fails). `reason`: one sentence."""

    model_type: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0


def judge(model_type: str, options: Mapping[str, Any]) -> Verdict:
    """Builds a tiny random model of `model_type`, and compares loss and all gradients of a right-padded batch in float32.
    `options`: of `stream`."""
    started = time.process_time()
    outcome, reason = _compared(model_type, options)
    if outcome == "not built":
        reason = NOT_ALONE.get(model_type, reason)
    elif outcome == "exact":
        reason = ", ".join(f"with {name}={value!r}" for name, value in SETTINGS.get(model_type, {}).items())
    return Verdict(model_type, outcome, reason, time.process_time() - started)


def judge_compiled(model_type: str, device: str, draws: int = 3) -> Verdict:
    """Compiled, in bf16, all residuals kept: "exact" if the gradients, together, are as close to those of native float32 as
    native bf16's are (by a half) in one of a few draws of weights: in others tokens may go to other experts, by rounding."""
    started = time.process_time()
    said = []
    for seed in range(draws):
        torch.manual_seed(seed)
        batch = {name: value.to(device) for name, value in padded_batch().items()}
        try:
            half = _build(model_type).bfloat16()
            true = _loss_and_gradients(copy.deepcopy(half).float().to(device), batch)
            native = _loss_and_gradients(copy.deepcopy(half).to(device), batch)
        except Exception as reason:
            return Verdict(model_type, "not built", _sentence(reason))
        layers = getattr(half.config.get_text_config(), "num_hidden_layers", None)  # the plan's choice, where several lists are
        try:
            streamed = megacompile.stream(half, device=device, compile=True, saved_layers=layers)
            ours = _loss_and_gradients(streamed, batch)
            streamed.megacompile.close()
        except Exception as reason:
            refused = isinstance(reason, MegacompileError) and not isinstance(reason, LaneError)
            return Verdict(model_type, "refused" if refused else "wrong", f"{type(reason).__name__}: {_sentence(reason)}",
                           time.process_time() - started)
        off, rounding = (math.hypot(*_distances(_on_host(found), _on_host(true)).values()) for found in (ours, native))
        if off <= 1.5 * rounding:  # false for NaN
            return Verdict(model_type, "exact", "", time.process_time() - started)
        said.append(f"off by {off:.1e}, native bf16 by {rounding:.1e}")
    return Verdict(model_type, "wrong", "; ".join(said), time.process_time() - started)


def predicted_step(model_type: str, hardware: str) -> float:
    """Seconds of a step of the padded batch under the plan that is chosen by a machine's rates, in bf16."""
    schedule = megacompile.schedule(_build(model_type).bfloat16(), batch=ROWS, length=LENGTH, example=padded_batch(),
                                    hardware=hardware)
    return schedule.simulate().step_s


def _on_host(found: tuple[Tensor, dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    return found[0].cpu(), {name: gradient.cpu() for name, gradient in found[1].items()}


def judge_each(model_types: Iterable[str], start: str = "fork", **options: Any) -> Iterator[Verdict]:
    """Each in a process of its own, with a limit of time. `start`: "fork" is quick, and for processes that have not run any
    model yet; "spawn" is for others, whose threads a fork would miss."""
    context = multiprocessing.get_context(start)
    for model_type in model_types:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_judge_into, args=(model_type, options, theirs))
        process.start()
        theirs.close()
        try:
            yield ours.recv()
        except EOFError:
            process.join()
            late = process.exitcode == -signal.SIGXCPU
            yield Verdict(model_type, "wrong", f"took more than {SECONDS} s" if late else f"ended with {process.exitcode}")
        process.join()


def _judge_into(model_type: str, options: Mapping[str, Any], pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    logging.disable(logging.ERROR)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    pipe.send(judge(model_type, options))


def _compared(model_type: str, options: Mapping[str, Any]) -> tuple[str, str]:
    torch.manual_seed(0)
    try:
        model = _build(model_type)
        batch = padded_batch()
        native = _loss_and_gradients(copy.deepcopy(model), batch)
    except Exception as reason:
        return "not built", _sentence(reason)
    if not native[0].isfinite() or not any(g.any() for g in native[1].values()):
        return "not built", "its native loss has no finite gradient"
    try:
        streamed = megacompile.stream(copy.deepcopy(model), device="cpu", **options)
        ours = _loss_and_gradients(streamed, batch)
        streamed.megacompile.close()
    except MegacompileError as reason:
        return "refused", _sentence(reason)
    except Exception as reason:
        return "wrong", f"{type(reason).__name__}: {_sentence(reason)}"
    return _difference(model, batch, ours, native)


def _build(model_type: str) -> nn.Module:
    model: nn.Module = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]](tiny_config(model_type)).float()
    with torch.no_grad():  # norms start at one and biases at zero, where mix-ups would not show
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.train()


def padded_batch() -> dict[str, Tensor]:
    """input_ids, labels and attention_mask, int64 [ROWS, LENGTH]; every sequence but the first ends in padding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(FIRST_PLAIN_TOKEN, VOCABULARY, (ROWS, LENGTH), generator=generator)
    ends = torch.tensor([LENGTH, *range(LENGTH - ROWS + 1, LENGTH)])[:, None]
    mask = (torch.arange(LENGTH) < ends).long()
    return {"input_ids": ids * mask, "labels": torch.where(mask.bool(), ids, -100), "attention_mask": mask}


def _loss_and_gradients(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _difference(model: nn.Module, batch: dict[str, Tensor], ours: tuple[Tensor, dict[str, Tensor]],
                native: tuple[Tensor, dict[str, Tensor]]) -> tuple[str, str]:
    distances = _distances(ours, native)
    name = max(distances, key=distances.__getitem__)
    if distances[name] <= TOLERANCE:
        return "exact", ""
    double: Any = copy.deepcopy(model).double()
    if hasattr(double, "set_experts_implementation"):
        double.set_experts_implementation("eager")  # PyTorch has no grouped products in float64
    try:
        with mixers_as_ops(double):  # transformers' scans would compute in float32
            exact = _loss_and_gradients(double, batch)
    except RuntimeError:  # it mixes in float32: its sums in another order show how far rounding goes
        exact = _loss_and_gradients(copy.deepcopy(model), {name: rows.flip(0) for name, rows in batch.items()})
    rounding, off = _distances(native, exact), _distances(ours, exact)
    name = max(off, key=lambda n: off[n] / max(rounding.get(n, 0.0), TOLERANCE))
    if off[name] <= max(TOLERANCE, ROUNDINGS * rounding.get(name, 0.0)):
        return "exact", ""
    return "wrong", f"{name} is off by {off[name]:.0e} of its norm, native training by {rounding.get(name, 0.0):.0e}"


def _distances(ours: tuple[Tensor, dict[str, Tensor]], theirs: tuple[Tensor, dict[str, Tensor]]) -> dict[str, float]:
    """How far off the loss and each gradient are, in shares of its norm. A gradient that is not there is zero."""
    distances = {"the loss": float((ours[0] - theirs[0]).abs() / theirs[0].abs())}
    largest = max(float(g.norm()) for g in theirs[1].values())
    for name in ours[1].keys() | theirs[1].keys():
        zero = torch.zeros(())
        mine, reference = ours[1].get(name, zero).double(), theirs[1].get(name, zero).double()
        # One that is zero but for rounding (a key's bias, a router's whose weights sum to one) is measured against the others.
        distances[f"the gradient of {name}"] = float((mine - reference).norm() / max(float(reference.norm()), 1e-3 * largest))
    return distances


def _sentence(reason: BaseException) -> str:
    """The first line of an error, without the folders of files."""
    first = next(iter(str(reason).strip().splitlines()), "") or type(reason).__name__
    return re.sub(r"[^\s(]*/(?=\w+\.py\b)", "", first)
