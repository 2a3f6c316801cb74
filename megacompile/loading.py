"""`from_pretrained` reads a checkpoint's files directly into the tiles of a streamed model, without a second copy in memory."""
from __future__ import annotations

import contextlib
import copy
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
from megacompile.errors import ArgumentError, CheckpointError, UnsupportedError, listed
from megacompile.frontend.tracing.layers import Layers
from megacompile.planning.config import StreamConfig, dtype_named
from megacompile.planning.host_needs import least_bytes
from megacompile.sizes import format_bytes
from megacompile.system.files import refuse_irregular
from megacompile.weights.codes import FORMATS, Format, ScaledFloats
from megacompile.weights.empty_models import draw, put_adapter, replace_parameters
from megacompile.weights.filling import fill, least_bytes_quantized, packed_tensors, quantize_empty
from megacompile.weights.quantizing import compute_dtype_of, compute_dtype_of_checkpoint, format_of
from megacompile.weights.quantizing import quantize as quantized
from megacompile.weights.tiling import require_host_memory
from megacompile.weights.weight_files import (
    CONFIG_FILE,
    DTYPES,
    FILE_PATTERNS,
    GENERATION_FILE,
    Match,
    StoredTensor,
    WeightReader,
    match,
    stored_tensors,
    weight_files,
)

#: An id on the Hugging Face Hub, such as "gpt2" or "owner/name", and no file.
HUB_ID = re.compile(r"(?!.*\.json$)[\w-][\w.-]*(/[\w-][\w.-]*)?")


def from_pretrained(source: str | Path, *, dtype: torch.dtype | str | None = None, config: Any = None,
                    revision: str | None = None, strict: bool = True, layers: Layers | None = None,
                    example: Mapping[str, Tensor] | None = None, adapter: Any = None, trainable: bool = True,
                    quantize: Any = None, **options: Any) -> Any:
    """A streamed causal language model from transformers, in evaluation mode.

    The result equals `stream(AutoModelForCausalLM.from_pretrained(source))`, but weights are read from the files directly into
    tiles, so that host memory never holds more than training needs. The model may also be one for images and text
    (`AutoModelForImageTextToText`); pass an `example` with images if it shall take images.

    Args:
        source: a folder with a config and safetensors files, or an id on the Hugging Face Hub.
        dtype: dtype of the weights, float32 or bfloat16, or its name. None or "auto": that of the config, or else the widest
            dtype in the files. Weights stored with more precision than bfloat16 keep their exact values in the FP32 master.
        config: a config from transformers to use instead of the checkpoint's own.
        revision: revision of the repository on the Hub.
        strict: every parameter must be in the files, and every tensor in the files must be used. False: missing parameters
            are initialized randomly, as in a new model, and a warning lists missing and unused tensors.
        layers, example, options: as for `stream`.
        adapter: a `peft.LoraConfig`. The result is then a PEFT model with an adapter in the dtype of the weights. The weights
            are frozen and take no host memory for gradients and optimizer state.
        trainable: False: all weights are frozen, for generation and evaluation. They then take their own size in host memory.
        quantize: stores the frozen linear layers in fewer bits ("nf4", "int8" or a `transformers.BitsAndBytesConfig`, see
            `megacompile.quantize`) while they are read. Quantized weights are frozen: give an `adapter`, or `trainable=False`.
            Checkpoints of bitsandbytes, and those in MXFP4 or in blocks of FP8, are read as they are. Weights of the latter
            two are expanded if they are trained.

    Raises `CheckpointError` if files cannot be read or do not fit the model, with a list of the mismatches;
    `InsufficientMemoryError` before weights are fetched or read, with the bytes that training takes; `ArgumentError` if there
    is no such checkpoint; and what `stream` raises.
    """
    stream_config = StreamConfig.of(**options)
    dtype = dtype_named(dtype)
    wanted, compute_dtype = None if quantize is None else format_of(quantize), compute_dtype_of(quantize)
    folder, commit = _find(source, revision)
    config = config if config is not None else _config(folder)
    stored_as = _format(source, config, wanted)
    published = stored_as is not None and wanted is None and stored_as.rows > 0  # in codes that can be expanded
    if stored_as is not None and adapter is None and trainable and not published:
        raise ArgumentError("quantized weights are frozen, and nothing would be trained: give an adapter (LoraConfig, "
                            "--lora), or trainable=False")
    if published:  # the weights are ours from here on
        config = copy.copy(config)
        vars(config).pop("quantization_config", None)
    known = dtype or config.dtype
    model = _empty_model(source, config, known or torch.bfloat16)
    model.requires_grad_(trainable)
    config._name_or_path = model.name_or_path = str(source)  # the files of an adapter refer to the model by this name
    require_host_memory(_least_bytes(model, stored_as, frozen=adapter is not None or not trainable))
    if commit is not None:
        folder = _fetch(str(source), commit, FILE_PATTERNS)
    files = weight_files(folder)
    with WeightReader() as reader:
        reader.open(files)
        block = stored_as.block if isinstance(stored_as, ScaledFloats) else ScaledFloats().block
        stored = packed_tensors(stored_tensors(files), reader, block)
        if known is None:
            model = _empty_model(source, config, _widest(stored.values())).requires_grad_(trainable)
        found = match(model, stored, reader)
        if found.converted and published:
            raise UnsupportedError(f"weights of {source} are in codes, and {listed(found.converted, 1)} must be converted: "
                                   "load the model with transformers (dequantize=True), and stream() it")
        if found.converted:
            return _convert(folder, config, found, model, strict, adapter, trainable, quantize, dtype=dtype, layers=layers,
                            example=example, **options)
        found.check(source, model, strict)
        if problems := found.text():
            warnings.warn(f"{source} does not match {type(model).__name__} exactly:\n{problems}", stacklevel=2)
        _initialize(model, found.missing)
        _keep_precise(model, parameters=dtype is None)
        _read_generation_config(model, folder)
        sources = found.sources
        if adapter is not None:
            model, sources = _adapted(model, adapter, sources)
        coded = quantize_empty(model, sources, wanted, layers, compute_dtype or compute_dtype_of_checkpoint(config))
        model.eval()
        filled = functools.partial(fill, sources=coded, reader=reader)
        return attach(model, filled, stream_config, layers, example)


def from_config(config: Any, *, dtype: torch.dtype | str | None = None, layers: Layers | None = None,
                example: Mapping[str, Tensor] | None = None, **options: Any) -> Any:
    """A streamed causal language model from transformers with new random weights.

    Weights are drawn directly in tiles, by all cores, as transformers initializes a new model, so that host memory never holds
    more than training needs. They depend on the seed (`torch.manual_seed`), not on the number of cores. With several ranks,
    they are those of rank 0.

    Args:
        config: a config from transformers, or a folder, a JSON file or an id on the Hugging Face Hub with one.
        dtype: dtype of the weights, float32 or bfloat16, or its name. None or "auto": that of the config, or else float32.
        layers, example, options: as for `stream`.

    Raises `CheckpointError` for a config that is not one of such a model, `InsufficientMemoryError` before memory is taken,
    and what `stream` raises.
    """
    stream_config = StreamConfig.of(**options)
    if isinstance(config, str | Path):
        config = _config(Path(config)) if Path(config).is_file() else read_config(config)
    model = _empty_model("a new model", config, dtype_named(dtype) or config.dtype or torch.float32)
    require_host_memory(least_bytes(model))
    _keep_precise(model, parameters=dtype is None)
    return attach(model, draw, stream_config, layers, example)


def _least_bytes(model: nn.Module, stored_as: Format | None, frozen: bool) -> int:
    """Host bytes that the model takes at least. An adapter of a frozen model adds little, and is counted later."""
    if not frozen:
        return least_bytes(model)
    if stored_as is not None:
        return least_bytes_quantized(model, stored_as)
    return sum(parameter.nbytes for parameter in model.parameters())


# -------------------------------------------------------------------- finding the files
def _find(source: str | Path, revision: str | None) -> tuple[Path, str | None]:
    """A folder with the config, and the commit on the Hub to fetch the weights from (None if they are in the folder)."""
    folder = Path(source)
    if folder.is_dir():
        if not (folder / CONFIG_FILE).exists():
            raise ArgumentError(f"{folder} has no {CONFIG_FILE}: give a folder that save_pretrained wrote")
        refuse_irregular(folder)
        return folder, None
    if folder.exists() or not HUB_ID.fullmatch(str(source)):
        raise ArgumentError(f"{str(source)!r} is not a checkpoint folder: give a folder with {CONFIG_FILE} and safetensors "
                            "files, or an id on the Hugging Face Hub (owner/name)")
    snapshot = _fetch(str(source), revision, (CONFIG_FILE, GENERATION_FILE))
    return snapshot, snapshot.name


def _fetch(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Downloads the files of one commit into the local cache of the Hub. Raises `ArgumentError` if that fails."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # the network, the Hub or a wrong id: there are many types
        raise ArgumentError(f"folder {name!r} does not exist, and the Hugging Face Hub returned no such model: check the id, "
                            f"the revision, the network and HF_TOKEN\n{type(error).__name__}: {error}") from error
    if not (folder / CONFIG_FILE).exists():
        raise ArgumentError(f"{name} on the Hugging Face Hub has no {CONFIG_FILE}: give a model for transformers")
    return folder


def read_config(source: str | Path) -> Any:
    """The config of a checkpoint, as `from_pretrained` reads it. Raises `ArgumentError` if there is none, `CheckpointError` if
    transformers cannot read it."""
    return _config(_find(source, None)[0])


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers may raise anything on a damaged file
        path = folder if folder.is_file() else folder / CONFIG_FILE
        raise CheckpointError(f"transformers cannot read the config {path}: fix it, or pass config=...\n"
                              f"{type(error).__name__}: {error}") from error


def _read_generation_config(model: Any, folder: Path) -> None:
    from transformers import GenerationConfig

    if (folder / GENERATION_FILE).exists() and model.can_generate():
        try:
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers may raise anything on a damaged file
            raise CheckpointError(f"{folder / GENERATION_FILE} cannot be read: fix or remove it\n{error}") from error


def _format(source: str | Path, config: Any, wanted: Format | None) -> Format | None:
    """The format of most linear layers: the one that is asked for, or that of a quantized checkpoint."""
    how = getattr(config, "quantization_config", None)
    if not how:
        return wanted
    said = how if isinstance(how, dict) else how.to_dict()
    method, block = str(said.get("quant_method")), said.get("weight_block_size", ScaledFloats().block)
    if method not in ("bitsandbytes", "mxfp4", "fp8"):
        raise UnsupportedError(f"{source} is quantized by {method}, which is not supported: give the checkpoint that it was "
                               "quantized from, with quantize='nf4' or 'int8', or one of bitsandbytes, in MXFP4, or in blocks "
                               "of FP8")
    if wanted is not None:
        raise ArgumentError(f"{source} is quantized already: leave quantize out")
    if method == "fp8":
        if not (isinstance(block, list | tuple) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
            raise UnsupportedError(f"weight_block_size={block!r} of {source} is not supported: give a checkpoint in FP8 with a "
                                   "scale for each block [rows, columns], or the one that it was quantized from")
        return ScaledFloats((block[0], block[1]))
    if method == "mxfp4":
        return FORMATS["mxfp4"]
    return FORMATS["nf4" if said.get("load_in_4bit") else "int8"]


# -------------------------------------------------------------------- a model without weights
@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """A context in which modules that this thread creates have their parameters on the meta device. Buffers, such as rotary
    frequencies, keep their values; they would lose them if meta were the default device."""
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

    # A decoder with an image encoder has its class in this mapping. Some are listed as causal language models as well.
    towered = type(config) in AutoModelForImageTextToText._model_mapping
    towered = towered and type(config) not in AutoModelForCausalLM._model_mapping
    kind = AutoModelForImageTextToText if towered else AutoModelForCausalLM
    try:
        with parameters_on_meta():
            return kind.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # transformers may raise anything on a wrong config
        raise CheckpointError(f"transformers cannot build a causal language model from the {type(config).__name__} of "
                              f"{source}: give the config of such a model, or load the model yourself and stream() it\n"
                              f"{type(error).__name__}: {error}") from error


def _keep_precise(model: Any, parameters: bool) -> None:
    """Converts to float32 the tensors that the model's class keeps in float32 in any dtype: buffers, and with `parameters` also
    parameters on the meta device. (A tile cannot hold both dtypes; `stream` refuses that.)"""
    kept = [re.compile(rf"(^|\.){pattern}($|\.)") for pattern in getattr(model, "_keep_in_fp32_modules_strict", None) or ()]
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and any(k.search(f"{path}.{name}") for k in kept):
                module._buffers[name] = buffer.float()
        for name, held in module._parameters.items():
            if parameters and held is not None and held.is_meta and any(k.search(f"{path}.{name}") for k in kept):
                module._parameters[name] = nn.Parameter(held.float(), held.requires_grad)


def _widest(stored: Any) -> torch.dtype:
    """bfloat16 if all floating-point tensors are stored in it, otherwise float32."""
    found = {DTYPES[tensor.dtype] for tensor in stored if tensor.dtype in DTYPES}
    return torch.bfloat16 if {d for d in found if d.is_floating_point} == {torch.bfloat16} else torch.float32


def _initialize(model: Any, missing: Sequence[str]) -> None:
    """Initializes the `missing` parameters as in a new model. Other parameters stay on the meta device."""
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


def _adapted(model: Any, adapter: Any, sources: Mapping[str, StoredTensor]) -> tuple[Any, dict[str, StoredTensor]]:
    """The PEFT model around a model, and the stored tensors by their names in it."""
    plain = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    adapted = put_adapter(model, adapter)
    named = {plain.get(id(tensor)): name for name, tensor in (*adapted.named_parameters(), *adapted.named_buffers())}
    return adapted, {named[name]: stored for name, stored in sources.items()}


# -------------------------------------------------------------------- checkpoints in another layout
def _convert(folder: Path, config: Any, found: Match, empty: Any, strict: bool, adapter: Any, trainable: bool,
             quantize: Any, **options: Any) -> Any:
    """Streams the model after loading it with transformers, which can convert checkpoints in other layouts."""
    from transformers import AutoModelForCausalLM

    parameters = list(empty.parameters())
    weights = sum(p.nbytes for p in parameters)
    require_host_memory(weights + (least_bytes(empty) if adapter is None and trainable else weights))
    warnings.warn(f"weights ({listed(found.converted, 1)}) are stored in a layout that must be converted: "
                  f"transformers loads the model first, which temporarily takes {format_bytes(weights)} more host memory",
                  stacklevel=3)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=parameters[0].dtype, local_files_only=True, use_safetensors=True,
        output_loading_info=True)
    wrong = [f"{name} has shape {list(a)}, but {list(b)} in the model" for name, a, b in sorted(info["mismatched_keys"])]
    Match({}, tuple(sorted(info["missing_keys"])), tuple(sorted(info["unexpected_keys"])), tuple(wrong)).check(
        folder, model, strict)
    model.requires_grad_(trainable)
    model = model if adapter is None else put_adapter(model, adapter)
    return stream(quantized(model, quantize) if quantize else model, **options)
