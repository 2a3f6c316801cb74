"""TRL's fused head for streamed models: `model(..., labels=labels, fused_lm_head=True)` returns values for each token.

TRL computes all of its losses from these values. Its own head runs the backbone and the head's weight separately, which would
not stream; ours computes the same values with `model.megacompile.per_token`.
"""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from trl.trainer.utils import FusedCausalLMOutput

from megacompile.compat.hugging_face import replaced
from megacompile.errors import UnsupportedError
from megacompile.inputs.repacking import Wanted
from megacompile.losses import IGNORED, log_probabilities_and_entropies, next_tokens, zero_where_ignored
from megacompile.streaming.streamed_module import StreamedModule
from megacompile.trainers.reference_model import add_adapter


class FusedHead:
    """The forward of a streamed model, with support for TRL's argument `fused_lm_head`. Without it, calls the model's own."""

    streams = True  # it may replace the forward of a streamed model

    def __init__(self, model: nn.Module, temperature: float, fields: tuple[str, ...]) -> None:
        self.model, self.function = model, function_of(temperature, fields)
        functools.update_wrapper(self, type(model).forward.__get__(model))  # `generate` reads the signature

    def __call__(self, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return type(self.model).forward(self.model, *args, **kwargs)
        assert not args, "TRL passes names"
        routers = bool(kwargs.get("output_router_logits"))
        labels, count = kwargs.pop("labels"), kwargs.pop("num_items_in_batch", None)
        targets = next_tokens(labels)
        mask = kwargs.get("attention_mask")
        read = mask is not None and mask.shape == targets.shape and bool((targets[mask == 0] != IGNORED).any())
        # Packed rows are other micro-batches, and an auxiliary loss is one of micro-batches.
        values, auxiliary = self.model.megacompile.values_of_tokens(  # type: ignore[operator, union-attr]
            self.function, kwargs, {"targets": targets}, Wanted.ALL if read or routers else Wanted.TOKENS, auxiliary=routers)
        values = {name: value[:, :-1] for name, value in values.items()}  # the last position predicts nothing
        counted = (targets[:, :-1] != IGNORED).to(values["log_probs"].device)
        loss = -values["log_probs"].sum() / (counted.sum().clamp(min=1) if count is None else count)
        if auxiliary is not None:
            config: Any = self.model.config
            loss = loss + config.get_text_config().router_aux_loss_coef * auxiliary
        return FusedCausalLMOutput(loss=loss, label_mask=counted, aux_loss=auxiliary, **values)


@functools.cache
def function_of(temperature: float, fields: tuple[str, ...]) -> Callable[..., dict[str, Tensor]]:
    """One function object for all trainers that need the same values, since every new object is traced again."""
    return functools.partial(token_fields, temperature=temperature, fields=fields)


@zero_where_ignored
def token_fields(logits: Tensor, targets: Tensor, temperature: float, fields: tuple[str, ...]) -> dict[str, Tensor]:
    """TRL's fields for each token, [N], 0 where the target is ignored. `logits`: [N, V]; `targets`: int64 [N]."""
    scores = logits.float() / temperature
    log_probs, entropy = log_probabilities_and_entropies(scores, targets)  # what no field reads is not computed
    made: dict[str, Callable[[], Tensor]] = {
        "entropy": lambda: entropy,
        "log_sum_sq_probs": lambda: (2 * scores.log_softmax(-1)).logsumexp(-1).detach(),
        "mean_logits": lambda: scores.mean(-1).detach(),
        "is_top1": lambda: scores.argmax(-1) == targets}
    values = {"log_probs": log_probs, **{name: made[name]() for name in fields if name != "log_probs"}}
    return {name: value.masked_fill(targets == IGNORED, 0) for name, value in values.items()}


@contextlib.contextmanager
def streamed_heads(trainer: ModuleType, policy: Any = None) -> Iterator[list[Any]]:
    """A context in which one of TRL's trainer modules gives streamed models our head instead of its own, and streams a model
    again after adding an adapter to it. TRL has no hooks for this, and some trainers need it before their constructor returns.
    `policy`: the model that the trainer is given. A streamed model with an adapter that comes from elsewhere is appended to the
    list of the context."""
    theirs = trainer.add_fused_lm_head
    wrappers = [policy]

    def adapt(model: nn.Module, adapter: Any, **options: Any) -> Any:
        wrappers.append(add_adapter(model, adapter, **options))
        return wrappers[-1]

    def add(model: nn.Module, temperature: float = 1.0, cast_lm_head_to_fp32: bool = False,
            outputs: tuple[str, ...] = ("log_probs",)) -> None:
        # For a model with an adapter, TRL passes the model inside of PEFT's wrapper, but the wrapper is the streamed model.
        model = next((each for each in wrappers if hasattr(each, "get_base_model") and each.get_base_model() is model), model)
        if not isinstance(model, StreamedModule):
            theirs(model, temperature, cast_lm_head_to_fp32, outputs)
            return
        if cast_lm_head_to_fp32:
            raise UnsupportedError("cast_lm_head_to_fp32 would change the head, which is captured already: leave it out")
        model.__dict__["forward"] = FusedHead(model, temperature, outputs)

    has_adapters = hasattr(trainer, "get_peft_model")  # not without peft
    adapting = replaced(trainer, get_peft_model=adapt) if has_adapters else contextlib.nullcontext()
    with replaced(trainer, add_fused_lm_head=add), adapting:
        yield wrappers


def refuse_copied_adapter(model: Any, wanted: bool) -> None:
    """Raises `UnsupportedError` if TRL would add a copy of a streamed model's adapter as the reference model."""
    if wanted and hasattr(model, "get_base_model"):
        raise UnsupportedError("TRL would copy the adapter of a model that is streamed already to get a reference: pass the "
                               "streamed model without its adapter and peft_config=..., so that the base model is the "
                               "reference, or pass ref_model=megacompile.stream(...) (DPO)")


def refuse_dropout(model: Any, adapter: Any = None) -> None:
    """Raises `UnsupportedError` if a streamed model or its `adapter` has dropout, which TRL would disable after the capture."""
    if getattr(adapter, "lora_dropout", 0):
        raise UnsupportedError("disable_dropout comes too late for an adapter that is streamed: pass lora_dropout=0, or "
                               "disable_dropout=False")
    if isinstance(model, StreamedModule) and any(isinstance(m, nn.Dropout) and m.p > 0 for m in nn.Module.modules(model)):
        raise UnsupportedError("disable_dropout comes too late for a model that is streamed: set its dropout to 0 before "
                               "stream(), or pass disable_dropout=False")


def refuse_moving_reference(settings: Any) -> None:
    """Raises `UnsupportedError` if the reference model shall follow the policy during training."""
    if getattr(settings, "sync_ref_model", False):
        raise UnsupportedError("sync_ref_model would change the reference model's weights without updating their copies on the "
                               "device: leave it out")
