"""The constructor that TRL's trainers of a policy beside a reference model share, DPO and KTO."""
from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any, ClassVar

from megacompile import trainer
from megacompile.trainers.fused_head import refuse_copied_adapter, refuse_dropout, refuse_moving_reference, streamed_heads
from megacompile.trainers.named_models import loader
from megacompile.trainers.reference_model import loaded_as, with_router_loss


class PreferenceTrainer(trainer.Trainer):
    """A trainer of a streamed policy. Inherit from this class first, then from TRL's. `module`: the one that defines TRL's
    class; `settings`: the class of its arguments; `suffix`: of the folder of a run whose model is given by name alone."""

    module: ClassVar[ModuleType]
    settings: ClassVar[Any]
    suffix: ClassVar[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        order = type(self).__mro__
        theirs: Any = order[order.index(trainer.Trainer) + 1]
        given = inspect.signature(theirs.__init__).bind(self, *args, **kwargs).arguments
        del given["self"]
        if isinstance(given["model"], str) and given.get("args") is None:
            given["args"] = self.settings(f"{given['model'].split('/')[-1]}-{self.suffix}")
        settings, reference, adapter = given.get("args"), given.get("ref_model"), given.get("peft_config")
        without_dropout = getattr(settings, "disable_dropout", True)
        refuse_copied_adapter(given["model"], reference is None)  # before TRL changes the model
        refuse_moving_reference(settings)
        for model in (given["model"], reference) if without_dropout else ():
            refuse_dropout(model, adapter)
        given["model"] = with_router_loss(given["model"], settings, given.get("optimizers"))
        load = loader(settings, adapter, without_dropout)
        with streamed_heads(self.module, given["model"]), loaded_as(self.module, given["model"], load):
            super().__init__(**given)
