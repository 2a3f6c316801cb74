"""TRL's `RewardTrainer` for streamed models (needs trl)."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
import trl
from trl.trainer import reward_trainer

from megacompile import trainer
from megacompile.api import stream
from megacompile.compat.hugging_face import replaced
from megacompile.errors import UnsupportedError
from megacompile.planning.config import dtype_named
from megacompile.trainers.fused_head import refuse_dropout
from megacompile.trainers.reference_model import add_adapter
from megacompile.trainers.trainer_arguments import check_model
from megacompile.weights.quantizing import quantize as in_codes


class RewardTrainer(trainer.Trainer, trl.RewardTrainer):
    """`trl.RewardTrainer` for a streamed model that gives each row one number (`streamed_classifier`), or the name of a model,
    which is then loaded so.

    With a `peft_config`, the streamed model is closed, wrapped with the adapter, and streamed again with the same options
    (`trainer.model`). Raises `UnsupportedError` for dropout, and for a model whose `config.pad_token_id` is not that of the
    tokenizer: the model reads the last token before the padding, and was captured so."""

    def __init__(self, model: Any, args: Any = None, *more: Any, processing_class: Any = None, **kwargs: Any) -> None:
        if isinstance(model, str):
            args = args or trl.RewardConfig(f"{model.split('/')[-1]}-Reward")
            processing_class = processing_class or transformers.AutoTokenizer.from_pretrained(model)
            chosen = torch.bfloat16 if args.bf16 else dtype_named((args.model_init_kwargs or {}).get("dtype", "float32"))
            model = streamed_classifier(model, pad_token_of(processing_class), dtype=chosen,
                                        device="cpu" if args.use_cpu else None)
        check_model(model)
        if getattr(args, "disable_dropout", True):
            refuse_dropout(model, kwargs.get("peft_config"))
        tokenizer = processing_class or transformers.AutoTokenizer.from_pretrained(model.config.name_or_path)
        if model.config.get_text_config().pad_token_id != pad_token_of(tokenizer):
            raise UnsupportedError("the model was captured with another padding token than the tokenizer's: set model.config."
                                   f"pad_token_id = {pad_token_of(tokenizer)} before megacompile.stream")
        with _adapters_streamed():
            super().__init__(model, args, *more, processing_class=tokenizer, **kwargs)


def streamed_classifier(source: str, pad_token_id: int, *, dtype: torch.dtype | None = None, quantize: Any = None,
                        **options: Any) -> Any:
    """A streamed model that gives each row of tokens one number, from the weights of a causal language model and a random head.
    Host memory holds the weights twice for a moment. `options`: of `megacompile.stream`."""
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(
        source, num_labels=1, dtype=dtype or "auto", pad_token_id=pad_token_id)
    return stream(plain if quantize is None else in_codes(plain.requires_grad_(False), quantize), **options)


def pad_token_of(tokenizer: Any) -> int:
    """The id of the token that TRL pads with."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


@contextlib.contextmanager
def _adapters_streamed() -> Iterator[None]:
    """A context in which TRL adds an adapter by streaming the model again."""
    if not hasattr(reward_trainer, "get_peft_model"):  # without peft
        yield
        return
    with replaced(reward_trainer, get_peft_model=add_adapter):
        yield
