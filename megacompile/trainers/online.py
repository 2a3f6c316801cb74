"""Code shared by TRL's trainers of online reinforcement learning, GRPO and RLOO, with a streamed policy."""
from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any, ClassVar

from megacompile import trainer
from megacompile.trainers.fused_head import refuse_copied_adapter, refuse_dropout, refuse_moving_reference, streamed_heads
from megacompile.trainers.named_models import loader
from megacompile.trainers.reference_model import loaded_as, with_router_loss
from megacompile.trainers.sent_weights import sends_weights


class OnlineTrainer(trainer.Trainer):
    """A base to put before one of TRL's trainers. `theirs`: that trainer. `name`: as in the names of its folders. `settings`:
    its class of arguments, by name in trl."""

    theirs: ClassVar[type]
    name: ClassVar[str]
    settings: ClassVar[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        import trl

        given = inspect.signature(self.theirs).bind(*args, **kwargs).arguments
        if isinstance(given["model"], str) and given.get("args") is None:
            given["args"] = getattr(trl, self.settings)(f"{given['model'].split('/')[-1]}-{self.name}")
        settings, adapter = given.get("args"), given.get("peft_config")
        without_dropout = getattr(settings, "disable_dropout", False)
        refuse_copied_adapter(given["model"], bool(getattr(settings, "beta", 0.0)))  # before TRL changes the model
        refuse_moving_reference(settings)
        if without_dropout:
            refuse_dropout(given["model"], adapter)
        given["model"] = with_router_loss(given["model"], settings, given.get("optimizers"))
        load = loader(settings, adapter, without_dropout)
        module: ModuleType = sys.modules[self.theirs.__module__]
        with streamed_heads(module, given["model"]), loaded_as(module, given["model"], load), sends_weights(module):
            super().__init__(**given)
