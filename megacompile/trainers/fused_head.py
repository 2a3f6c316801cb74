"""TRL's fused head, for streamed models: `model(..., labels=labels, fused_lm_head=True)` gives values of each token.

All of TRL's losses are made of these. Its own head runs a model's backbone and the head's weight by themselves, neither of
which is streamed; ours gives the same values by `model.megacompile.per_token`.
"""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from trl.trainer.utils import FusedCausalLMOutput

from megacompile.errors import UnsupportedError
from megacompile.inputs.repacking import Wanted
from megacompile.losses import IGNORED, next_tokens
from megacompile.streaming.streamed_module import StreamedModule
from megacompile.trainers.adapters import add_adapter


class FusedHead:
    """The forward of a streamed model with TRL's argument `fused_lm_head`; without it, the model's own."""

    streams = True  # it may stand in the place of a streamed model's forward

    def __init__(self, model: nn.Module, temperature: float, fields: tuple[str, ...]) -> None:
        self.model, self.function = model, function_of(temperature, fields)
        functools.update_wrapper(self, type(model).forward.__get__(model))  # `generate` reads the signature

    def __call__(self, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return type(self.model).forward(self.model, *args, **kwargs)
        if args or kwargs.get("output_router_logits"):
            raise UnsupportedError("the router's auxiliary loss was not captured with the model: give router_aux_loss_coef=0")
        labels, count = kwargs.pop("labels"), kwargs.pop("num_items_in_batch", None)
        targets = next_tokens(labels)
        mask = kwargs.get("attention_mask")
        read = mask is not None and mask.shape == targets.shape and bool((targets[mask == 0] != IGNORED).any())
        values = self.model.megacompile.values_of_tokens(  # type: ignore[operator, union-attr]
            self.function, kwargs, {"targets": targets}, Wanted.ALL if read else Wanted.TOKENS)
        values = {name: value[:, :-1] for name, value in values.items()}  # the last position predicts nothing
        counted = (targets[:, :-1] != IGNORED).to(values["log_probs"].device)
        loss = -values["log_probs"].sum() / (counted.sum().clamp(min=1) if count is None else count)
        return FusedCausalLMOutput(loss=loss, label_mask=counted, **values)


@functools.cache
def function_of(temperature: float, fields: tuple[str, ...]) -> Callable[..., dict[str, Tensor]]:
    """One function for all trainers that want the same: each is traced for itself."""
    return functools.partial(token_fields, temperature=temperature, fields=fields)


def token_fields(logits: Tensor, targets: Tensor, temperature: float, fields: tuple[str, ...]) -> dict[str, Tensor]:
    """TRL's fields of each token, [N], 0 where the target is ignored: of logits [N, V] and targets, int64 [N]."""
    scores = logits.float() / temperature
    known = scores.log_softmax(-1)
    log_probs = known.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    made: dict[str, Callable[[], Tensor]] = {
        "entropy": lambda: -(known.exp() * known).sum(-1),
        "log_sum_sq_probs": lambda: (2 * known).logsumexp(-1).detach(),
        "mean_logits": lambda: scores.mean(-1).detach(),
        "is_top1": lambda: scores.argmax(-1) == targets}
    values = {"log_probs": log_probs, **{name: made[name]() for name in fields if name != "log_probs"}}
    return {name: value.masked_fill(targets == IGNORED, 0) for name, value in values.items()}


@contextlib.contextmanager
def streamed_heads(trainer: ModuleType, policy: Any = None) -> Iterator[None]:
    """Within, what one of TRL's trainer modules adds to streamed models is our head, and an adapter that it puts on one is
    streamed as well. (TRL has no hook for either, and some trainers use them before their constructor returns.) `policy`: the
    model that the trainer is given."""
    theirs, their_adapter = trainer.add_fused_lm_head, getattr(trainer, "get_peft_model", None)  # without peft there is none
    wrappers = [policy]

    def adapt(model: nn.Module, adapter: Any, **options: Any) -> Any:
        wrappers.append(add_adapter(model, adapter, **options))
        return wrappers[-1]

    def add(model: nn.Module, temperature: float = 1.0, cast_lm_head_to_fp32: bool = False,
            outputs: tuple[str, ...] = ("log_probs",)) -> None:
        # Of an adapted model TRL has the one inside of PEFT's wrapper, and the wrapper is what streams.
        model = next((each for each in wrappers if hasattr(each, "get_base_model") and each.get_base_model() is model), model)
        if not isinstance(model, StreamedModule):
            theirs(model, temperature, cast_lm_head_to_fp32, outputs)
            return
        if cast_lm_head_to_fp32:
            raise UnsupportedError("cast_lm_head_to_fp32 changes the head, which was captured: leave it out")
        model.__dict__["forward"] = FusedHead(model, temperature, outputs)

    trainer.add_fused_lm_head, trainer.get_peft_model = add, adapt  # type: ignore[attr-defined]
    try:
        yield
    finally:
        trainer.add_fused_lm_head, trainer.get_peft_model = theirs, their_adapter  # type: ignore[attr-defined]


def refuse_copied_adapter(model: Any, wanted: bool) -> None:
    """Raises `UnsupportedError` where TRL would put a copy of a streamed model's adapter beside it, for a reference."""
    if wanted and hasattr(model, "get_base_model"):
        raise UnsupportedError("TRL would copy the adapter of a model that is streamed already, for a reference: give the "
                               "model without its adapter, streamed, and peft_config=..., which makes the base the reference, "
                               "or ref_model=megacompile.stream(...) (DPO)")


def refuse_dropout(model: Any, adapter: Any = None) -> None:
    """Raises `UnsupportedError` for a streamed model with dropout, or one that gets it with an `adapter`: TRL would switch it
    off after it was captured."""
    if getattr(adapter, "lora_dropout", 0):
        raise UnsupportedError("disable_dropout comes too late for an adapter that is streamed: give lora_dropout=0, or "
                               "disable_dropout=False")
    if isinstance(model, StreamedModule) and any(isinstance(m, nn.Dropout) and m.p > 0 for m in nn.Module.modules(model)):
        raise UnsupportedError("disable_dropout comes too late for a model that is streamed: set its dropout to 0 before "
                               "stream(), or give disable_dropout=False")


def refuse_moving_reference(settings: Any) -> None:
    """Raises `UnsupportedError` where the reference model is to follow the policy."""
    if getattr(settings, "sync_ref_model", False):
        raise UnsupportedError("sync_ref_model writes the reference model's weights past its tiles, where copies on the device "
                               "would not see it: leave it out")
