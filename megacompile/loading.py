"""`from_pretrained`: a streamed model straight from a checkpoint's files, without the model beside its tiles."""
from __future__ import annotations

import contextlib
import functools
import re
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from megacompile.api import attach, stream
from megacompile.errors import ArgumentError, CheckpointError, UnsupportedError
from megacompile.frontend.tracing.layers import Layers
from megacompile.planning.config import StreamConfig
from megacompile.sizes import format_bytes
from megacompile.system.regular_files import refuse_irregular
from megacompile.weights.empty_models import put_adapter, replace_parameters
from megacompile.weights.filling import fill
from megacompile.weights.matching import Match, match
from megacompile.weights.tiling import require_host_memory
from megacompile.weights.weight_files import (
    CONFIG_FILE,
    DTYPES,
    FILE_PATTERNS,
    GENERATION_FILE,
    StoredTensor,
    WeightReader,
    stored_tensors,
    weight_files,
)

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
#: Host memory that training takes a parameter, in bytes.
_BYTES_A_PARAMETER = {torch.bfloat16: 14, torch.float32: 16}


def from_pretrained(source: str | Path, *, dtype: torch.dtype | None = None, config: Any = None, revision: str | None = None,
                    strict: bool = True, layers: Layers | None = None, example: Mapping[str, Tensor] | None = None,
                    adapter: Any = None, **options: Any) -> Any:
    """A causal language model of transformers, streamed: what `stream(AutoModelForCausalLM.from_pretrained(source))` gives, in
    evaluation mode like that, but read from the files into tiles, so that host memory never holds more than training needs. Or
    a model of images and text (`AutoModelForImageTextToText`); give an `example` with images if it is to take some.

    Args:
        source: a folder with a config and safetensors, or an id of the Hugging Face hub.
        dtype: of the weights, float32 or bfloat16; None: the config's, else the widest that is stored. Weights that are stored
            wider than bfloat16 keep their exact value in the FP32 master.
        config: a config of transformers instead of the checkpoint's own.
        revision: of the hub's repository.
        strict: every parameter must be in the files, and everything in the files must be used. False: parameters that are
            missing get the random values of a new model, and a warning lists both.
        layers, example, options: as for `stream`.
        adapter: a `peft.LoraConfig`. The result is PEFT's model, with an adapter in the dtype of the weights, and host memory
            holds no gradients and no optimizer state of the weights, which are frozen.

    Raises `CheckpointError` for files that cannot be read or do not fit the model, with the list of what does not;
    `InsufficientMemoryError`, before weights are fetched or read, with the bytes that training takes; `ArgumentError` where
    there is no such checkpoint; and what `stream` raises.
    """
    stream_config = StreamConfig.of(**options)
    folder, commit = _find(source, revision)
    config = config if config is not None else _config(folder)
    if getattr(config, "quantization_config", None):
        raise UnsupportedError(f"{source} is quantised, and quantised weights are not trained: give the checkpoint that it was "
                               "made from")
    known = dtype or config.dtype
    model = _empty_model(source, config, known or torch.bfloat16)
    config._name_or_path = model.name_or_path = str(source)  # an adapter's files name the model by it
    if adapter is None:
        require_host_memory(_training_bytes(model))
    else:
        require_host_memory(sum(p.nbytes for p in model.parameters()))  # what an adapter adds is little, and counted later
    if commit is not None:
        folder = _fetch(str(source), commit, FILE_PATTERNS)
    files = weight_files(folder)
    stored = stored_tensors(files)
    if known is None:
        model = _empty_model(source, config, _widest(stored.values()))
    with WeightReader() as reader:
        reader.open(files)
        found = match(model, stored, reader)
        if found.converted:
            return _convert(folder, config, found, model, strict, adapter, dtype=dtype, layers=layers, example=example,
                            **options)
        found.check(source, model, strict)
        if problems := found.text():
            warnings.warn(f"{source} is not all of {type(model).__name__}, or more:\n{problems}", stacklevel=2)
        _initialise(model, found.missing)
        _keep_precise(model, parameters=dtype is None)
        _read_generation_config(model, folder)
        sources = found.sources
        if adapter is not None:
            model, sources = _adapted(model, adapter, sources)
        model.eval()
        filled = functools.partial(fill, sources=sources, reader=reader)
        return attach(model, filled, stream_config, layers, example)


# -------------------------------------------------------------------- where it is
def _find(source: str | Path, revision: str | None) -> tuple[Path, str | None]:
    """(a folder with the config, the commit that the weights are yet to be fetched of or None if they are there)."""
    folder = Path(source)
    if folder.is_dir():
        if not (folder / CONFIG_FILE).exists():
            raise ArgumentError(f"{folder} has no {CONFIG_FILE}: give a folder that save_pretrained wrote")
        refuse_irregular(folder)
        return folder, None
    if folder.exists() or not HUB_ID.fullmatch(str(source)):
        raise ArgumentError(f"{str(source)!r} is not a checkpoint folder: give one with {CONFIG_FILE} and safetensors, or an "
                            "id of the Hugging Face hub (owner/name)")
    snapshot = _fetch(str(source), revision, (CONFIG_FILE, GENERATION_FILE))
    return snapshot, snapshot.name


def _fetch(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """The hub's files of one commit in the local cache. Raises `ArgumentError`."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # of the network, of the hub, of an id that is none: there are many
        raise ArgumentError(f"there is no folder {name!r} here, and the Hugging Face hub gave no such model: check the id, the "
                            f"revision, the network and HF_TOKEN\n{type(error).__name__}: {error}") from error
    if not (folder / CONFIG_FILE).exists():
        raise ArgumentError(f"{name} on the Hugging Face hub has no {CONFIG_FILE}: give a model of transformers")
    return folder


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever the file makes transformers raise
        raise CheckpointError(f"{folder / CONFIG_FILE} is not a config that transformers can read: fix it, or give config=\n"
                              f"{type(error).__name__}: {error}") from error


def _read_generation_config(model: Any, folder: Path) -> None:
    from transformers import GenerationConfig

    if (folder / GENERATION_FILE).exists() and model.can_generate():
        try:
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # whatever the file makes transformers raise
            raise CheckpointError(f"{folder / GENERATION_FILE} cannot be read: mend or remove it\n{error}") from error


# -------------------------------------------------------------------- a model without weights
@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that this thread makes have parameters without data. Buffers (rotary frequencies) have their values: the meta
    device as a default would take those too."""
    here = threading.get_ident()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != here:
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # what it returns is taken
    try:
        yield
    finally:
        handle.remove()


def _empty_model(source: str | Path, config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    # A decoder with a tower beside it has a class of its own there, unless it is a causal language model as well.
    towered = type(config) in AutoModelForImageTextToText._model_mapping
    towered = towered and type(config) not in AutoModelForCausalLM._model_mapping
    kind = AutoModelForImageTextToText if towered else AutoModelForCausalLM
    try:
        with parameters_on_meta():
            return kind.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # whatever the config makes transformers raise
        raise CheckpointError(f"transformers makes no causal language model of {source}, a {type(config).__name__}: give the "
                              f"config of one, or load it yourself and stream() it\n{type(error).__name__}: {error}") from error


def _keep_precise(model: Any, parameters: bool) -> None:
    """Makes float32 what the model's class wants in float32 whatever the dtype: buffers, and unless a dtype was asked for
    `parameters`, on the meta device (a tile cannot hold both dtypes: `stream` says so)."""
    kept = [re.compile(rf"(^|\.){pattern}($|\.)") for pattern in getattr(model, "_keep_in_fp32_modules_strict", None) or ()]
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and any(k.search(f"{path}.{name}") for k in kept):
                module._buffers[name] = buffer.float()
        for name, held in module._parameters.items():
            if parameters and held is not None and held.is_meta and any(k.search(f"{path}.{name}") for k in kept):
                module._parameters[name] = nn.Parameter(held.float(), held.requires_grad)


def _widest(stored: Any) -> torch.dtype:
    """bfloat16 if all floating tensors are stored in it, else float32."""
    found = {DTYPES[tensor.dtype] for tensor in stored if tensor.dtype in DTYPES}
    return torch.bfloat16 if {d for d in found if d.is_floating_point} == {torch.bfloat16} else torch.float32


def _initialise(model: Any, missing: Sequence[str]) -> None:
    """Gives parameters that are in no file the values that a new model would have. Those on the meta device stay there."""
    parameters = dict(model.named_parameters())
    made = {id(parameters[name]): nn.Parameter(torch.empty_like(parameters[name], device="cpu"), parameters[name].requires_grad)
            for name in missing if name in parameters}
    if not made:
        return
    for module in model.modules():
        if any(id(held) in made for held in module._parameters.values()):
            module._is_hf_initialized = False
    replace_parameters(model, made)
    model.initialize_weights()


def _training_bytes(model: nn.Module) -> int:
    return sum(p.numel() * _BYTES_A_PARAMETER.get(p.dtype, 14) for p in model.parameters())


def _adapted(model: Any, adapter: Any, sources: Mapping[str, StoredTensor]) -> tuple[Any, dict[str, StoredTensor]]:
    """(PEFT's model around a model, what is read for it by the names that it has there)."""
    plain = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    adapted = put_adapter(model, adapter)
    named = {plain.get(id(tensor)): name for name, tensor in (*adapted.named_parameters(), *adapted.named_buffers())}
    return adapted, {named[name]: stored for name, stored in sources.items()}


# -------------------------------------------------------------------- checkpoints in another layout
def _convert(folder: Path, config: Any, found: Match, empty: Any, strict: bool, adapter: Any, **options: Any) -> Any:
    """The model through transformers' own loader, which knows how a checkpoint in another layout is converted."""
    from transformers import AutoModelForCausalLM

    parameters = list(empty.parameters())
    weights = sum(p.nbytes for p in parameters)
    require_host_memory(weights + (_training_bytes(empty) if adapter is None else weights))
    warnings.warn(f"{found.converted[0]} and {len(found.converted) - 1} more are stored in a layout that has to be converted: "
                  f"transformers loads the model first, which takes {format_bytes(weights)} more of host memory meanwhile",
                  stacklevel=3)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=parameters[0].dtype, local_files_only=True, use_safetensors=True,
        output_loading_info=True)
    wrong = [f"{name} has shape {list(a)}, and the model's has {list(b)}" for name, a, b in sorted(info["mismatched_keys"])]
    Match({}, tuple(sorted(info["missing_keys"])), tuple(sorted(info["unexpected_keys"])), tuple(wrong)).check(
        folder, model, strict)
    return stream(model if adapter is None else put_adapter(model, adapter), **options)
