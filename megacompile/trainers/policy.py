"""The constructor that TRL's trainers of a policy share: DPO, KTO, GRPO and RLOO, with or without a reference model."""
from __future__ import annotations

import contextlib
import inspect
import sys
from typing import Any, ClassVar

from megacompile import trainer
from megacompile.trainers.fused_head import refuse_copied_adapter, refuse_dropout, refuse_moving_reference, streamed_heads
from megacompile.trainers.named_models import loader
from megacompile.trainers.reference_model import loaded_as, with_router_loss
from megacompile.trainers.sent_weights import sends_weights


class PolicyTrainer(trainer.Trainer):
    """A trainer of a streamed policy. Inherit from this class first, then from TRL's. `generates`: TRL's trainer samples
    completions, perhaps by a server, which then needs the weights."""

    generates: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        import trl

        order = type(self).__mro__
        theirs: Any = order[order.index(trainer.Trainer) + 1]
        module, name = sys.modules[theirs.__module__], theirs.__name__.removesuffix("Trainer")
        kind = getattr(trl, f"{name}Config")
        given = inspect.signature(theirs.__init__).bind(self, *args, **kwargs).arguments
        del given["self"]
        if isinstance(given["model"], str) and given.get("args") is None:
            given["args"] = kind(f"{given['model'].split('/')[-1]}-{name}")
        settings, reference, adapter = given.get("args"), given.get("ref_model"), given.get("peft_config")
        without_dropout, beta = (getattr(settings or kind, option) for option in ("disable_dropout", "beta"))
        # Before TRL changes the model. Those that generate make no reference if beta is 0.
        refuse_copied_adapter(given["model"], reference is None and (bool(beta) or not self.generates))
        refuse_moving_reference(settings)
        for model in (given["model"], reference) if without_dropout else ():
            refuse_dropout(model, adapter)
        given["model"] = with_router_loss(given["model"], settings, given.get("optimizers"))
        load = loader(settings, adapter, without_dropout)
        with (streamed_heads(module, given["model"]), loaded_as(module, given["model"], load),
              sends_weights(module) if self.generates else contextlib.nullcontext()):
            super().__init__(**given)
