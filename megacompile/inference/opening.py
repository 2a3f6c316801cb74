"""Opens a model for inference: frozen, with the adapter and the tokenizer that belong to it."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megacompile.errors import ArgumentError, CheckpointError
from megacompile.tools.options import Device, DeviceMemory, DType, ModelDType, Strict

if TYPE_CHECKING:
    from megacompile.corpus import PretrainedTokenizer

_ADAPTER_CONFIG = "adapter_config.json"
Source = Annotated[str, typer.Argument(
    metavar="MODEL", help="A model directory, an id on the Hugging Face Hub, or the directory of a LoRA adapter, whose model "
                          "is then opened too.")]


@dataclass(frozen=True)
class Opening:
    """The options for opening a model."""

    adapter: Annotated[Path | None, typer.Option(
        exists=True, file_okay=False, help="Directory of a LoRA adapter (PEFT) for the model.")] = None
    tokenizer: Annotated[str | None, typer.Option(
        help="Directory or Hugging Face Hub id of a tokenizer.", show_default="the model's own")] = None
    dtype: ModelDType = DType.AUTO
    strict: Strict = True
    device: Device = None
    device_memory: DeviceMemory = None

    def open_tokenizer(self, source: str) -> PretrainedTokenizer:
        """The model's tokenizer, loaded in a second: prompts are checked before weights are loaded. Raises `ArgumentError`."""
        from megacompile.corpus import ByteTokenizer, PretrainedTokenizer, load_tokenizer

        base, adapter = self.found(source)
        found = PretrainedTokenizer(self.tokenizer) if self.tokenizer else load_tokenizer(adapter or base)
        if isinstance(found, ByteTokenizer) and adapter is not None:
            found = load_tokenizer(base)
        if isinstance(found, ByteTokenizer):
            raise ArgumentError(f"{base} has no tokenizer: give --tokenizer")
        return found

    def read_config(self, source: str) -> Any:
        """The config of the model, or of its part for text. Raises what `megacompile.loading.read_config` raises."""
        from megacompile.loading import read_config

        return read_config(self.found(source)[0]).get_text_config()

    def open_model(self, source: str) -> Any:
        """The streamed model, in evaluation mode. Raises what `from_pretrained` raises, `ArgumentError` for a model without
        weights, and `CheckpointError` for an adapter that does not fit."""
        from megacompile import training
        from megacompile.loading import from_pretrained

        base, adapter = self.found(source)
        if not training.has_weights(base):
            raise ArgumentError(f"{base} has no weights, only a config: give a model that was trained")
        model = from_pretrained(base, dtype=self.dtype.resolve(), strict=self.strict, trainable=False,
                                device=self.device, device_memory=self.device_memory,
                                adapter=None if adapter is None else _adapter_config(adapter))
        if adapter is not None:
            _load_adapter(model, adapter)
        return model.eval()

    def found(self, source: str) -> tuple[str, Path | None]:
        """The model and its adapter."""
        if not (Path(source) / _ADAPTER_CONFIG).exists():
            return source, self.adapter
        if self.adapter is not None:
            raise ArgumentError(f"{source} is an adapter: give its model, or leave --adapter out")
        base = _adapter_config(Path(source)).base_model_name_or_path
        if not base:
            raise ArgumentError(f"{source} does not say which model it adapts: give the model, and --adapter {source}")
        return str(base), Path(source)


def _adapter_config(folder: Path) -> Any:
    from peft import PeftConfig

    try:
        return PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # PEFT may raise anything on damaged files
        raise ArgumentError(f"PEFT cannot read an adapter from {folder}: give a directory with {_ADAPTER_CONFIG}\n"
                            f"{type(error).__name__}: {error}") from error


def _load_adapter(model: Any, folder: Path) -> None:
    """Loads the adapter's weights. Raises `CheckpointError` if they do not fit."""
    from peft import load_peft_weights, set_peft_model_state_dict

    found: Any = set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
    wrong = [*(name for name in found.missing_keys if "lora_" in name), *found.unexpected_keys]
    if wrong:
        raise CheckpointError(f"the adapter in {folder} does not fit the model ({', '.join(wrong[:3])}): give the model that "
                              "it was trained for")
