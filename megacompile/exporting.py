"""Takes trained models out of the house: merges an adapter into its model, writes a GGUF file, uploads a folder."""
from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacompile.errors import ArgumentError, CheckpointError, MegacompileError, UnsupportedError
from megacompile.system.files import WorkingFolder
from megacompile.weights.saving import replacing, save_whole

_ELSEWHERE = "convert the model's folder with llama.cpp's convert_hf_to_gguf.py"


def model_folder(source: str | Path) -> Path:
    """The folder of the model that a run has saved, or `source` itself. Raises `ArgumentError` if there is none."""
    folder = Path(source)
    for found in (folder, folder / "model"):
        if (found / "config.json").exists() or (found / "adapter_config.json").exists():
            return found
    raise ArgumentError(f"{source} has no model: give the folder of a run, or of a saved model")


def merge(base: str, adapter: Path, output: Path) -> None:
    """Saves the model `base` with the weights of a PEFT adapter added to its own, and the adapter's tokenizer, in `output`.
    Needs peft and 2 bytes of host memory for each bf16 weight. Raises `CheckpointError` for an adapter that does not fit."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    try:
        merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{adapter} does not fit {base}: give the model that it was trained on ({error})") from error
    save_whole(merged.save_pretrained, output)
    for source in (adapter, base):
        if (Path(source) / "tokenizer_config.json").exists() or source == base:
            tokenizer = AutoTokenizer.from_pretrained(str(source))
            with replacing(output) as folder:
                tokenizer.save_pretrained(folder)
            return


def upload(folder: Path, repository: str) -> str:
    """Uploads a folder to a repository of the Hugging Face Hub, which is created if it does not exist. Returns its address.
    Raises `MegacompileError` if the Hub refuses."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    try:
        api = HfApi()
        made = api.create_repo(repository, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder))
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError, ValueError) as error:
        raise MegacompileError(f"{folder} was not uploaded to {repository}: log in with hf auth login, and upload it with hf "
                               f"upload {repository} {folder} ({error})") from error
    return str(made)


# -------------------- GGUF
@dataclass(frozen=True)
class Family:
    """How llama.cpp names a family. `interleaved`: it rotates neighboring channels of queries and keys, where transformers
    rotates halves, so that their rows are exchanged."""

    name: str
    interleaved: bool = False


#: By the class of the model.
FAMILIES = {
    "LlamaForCausalLM": Family("llama", interleaved=True), "MistralForCausalLM": Family("llama", interleaved=True),
    "Qwen2ForCausalLM": Family("qwen2"), "Qwen3ForCausalLM": Family("qwen3"), "Qwen3MoeForCausalLM": Family("qwen3moe"),
}

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: How a tokenizer splits texts before it merges bytes -> llama.cpp's name for it.
SPLITS = {(): "gpt-2", ("digits",): "smollm", (_WORDS + r"\p{N}{1,3}" + _REST,): "llama-bpe",
          (_WORDS + r"\p{N}" + _REST,): "qwen2"}


def export_gguf(source: Path, output: Path, kind: str) -> None:
    """Writes the model in a folder as a GGUF file, which appears once it is complete. `kind`: "f16" or "q8_0", the format of
    matrices. Vectors are float32. Reads one tensor at a time. Needs the package gguf.

    Raises `UnsupportedError` for a family or a tokenizer that this function does not know, `ArgumentError` for an adapter."""
    import numpy

    try:
        import gguf
    except ImportError as error:
        raise MegacompileError("a GGUF file needs the package gguf: run pip install gguf") from error
    if (source / "adapter_config.json").exists():
        raise ArgumentError(f"{source} is an adapter: merge it first, with megacompile merge")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.setdefault("num_experts", config.get("num_local_experts"))
    architecture = (config.get("architectures") or ["a model without a class"])[0]
    family = FAMILIES.get(architecture)
    if family is None:
        raise UnsupportedError(f"{architecture} cannot be exported here, only {', '.join(FAMILIES)}: {_ELSEWHERE}")
    if family.name == "qwen3moe" and not config.get("norm_topk_prob"):
        raise UnsupportedError("llama.cpp divides the weights of a token's experts by their sum, and this model does not: "
                               "serve it with transformers, or train with norm_topk_prob=True")
    working = WorkingFolder(output.resolve().parent, f".{output.name}.")
    try:
        path = working.path / output.name
        writer = gguf.GGUFWriter(path, family.name)
        _describe(writer, config, kind)
        _write_tokenizer(writer, source, config)
        tensors = _tensors(source, config, family)
        quantized = gguf.GGMLQuantizationType.Q8_0 if kind == "q8_0" else gguf.GGMLQuantizationType.F16
        made: list[tuple[Callable[[], Any], Any]] = []
        for name, shape, read in tensors:
            matrix = len(shape) > 1 and shape[-1] % 32 == 0
            form = quantized if matrix else gguf.GGMLQuantizationType.F32
            stored = gguf.quant_shape_to_byte_shape(shape, form) if form == gguf.GGMLQuantizationType.Q8_0 else shape
            dtype: Any = {"F32": numpy.float32, "F16": numpy.float16, "Q8_0": numpy.uint8}[form.name]
            size = int(numpy.prod(stored)) * numpy.dtype(dtype).itemsize
            writer.add_tensor_info(name, stored, numpy.dtype(dtype), size, raw_dtype=form)
            made.append((read, form))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for read, form in made:
            writer.write_tensor_data(gguf.quants.quantize(read().float().numpy(), form))
        writer.close()
        path.replace(output)
    finally:
        shutil.rmtree(working.path, ignore_errors=True)
        working.release()


def _describe(writer: Any, config: Mapping[str, Any], kind: str) -> None:
    import gguf

    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0))
    writer.add_vocab_size(config["vocab_size"])
    if config.get("num_experts"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if kind == "q8_0" else gguf.LlamaFileType.MOSTLY_F16)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if (kind := rope.get("rope_type", "default")) not in ("default", "llama3"):
        raise UnsupportedError(f"positions of the kind {kind} cannot be exported here: {_ELSEWHERE}")


def _write_tokenizer(writer: Any, source: Path, config: Mapping[str, Any]) -> None:
    """Writes the vocabulary of a tokenizer that merges bytes. Raises `UnsupportedError` for another one."""
    import gguf
    from transformers import AutoTokenizer

    if not (source / "tokenizer.json").exists():
        raise ArgumentError(f"{source} has no tokenizer.json, which a GGUF file needs: save the tokenizer there")
    tokenizer = AutoTokenizer.from_pretrained(str(source))
    found = json.loads(tokenizer.backend_tokenizer.to_str())  # not the file: the class may split texts in another way
    model = found["model"]
    steps = split_of(found.get("pre_tokenizer"))
    split = None if steps is None else SPLITS.get(steps)
    if model["type"] != "BPE" or model.get("byte_fallback") or split is None:
        raise UnsupportedError("this tokenizer cannot be exported here, only GPT-2's, SmolLM's, Llama 3's and Qwen's: "
                               f"{_ELSEWHERE}")
    by_id: dict[int, str] = {number: token for token, number in tokenizer.get_vocab().items()}
    added = {each["id"]: each["special"] for each in found.get("added_tokens", ())}
    names, kinds = [], []
    for number in range(config["vocab_size"]):
        names.append(by_id.get(number, f"[PAD{number}]"))
        kinds.append(gguf.TokenType.UNUSED if number not in by_id else gguf.TokenType.NORMAL if number not in added
                     else gguf.TokenType.CONTROL if added[number] else gguf.TokenType.USER_DEFINED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in model["merges"]])
    for number, add in ((tokenizer.bos_token_id, writer.add_bos_token_id), (tokenizer.eos_token_id, writer.add_eos_token_id),
                        (tokenizer.pad_token_id, writer.add_pad_token_id), (tokenizer.unk_token_id, writer.add_unk_token_id)):
        if number is not None:
            add(number)
    writer.add_add_bos_token(tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def split_of(pre_tokenizer: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    """What happens to a text before its bytes are merged: regular expressions, or "digits"; None if something else does."""
    steps = [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    found, own_pattern = [], False
    for step in steps:
        if step["type"] == "Digits" and step["individual_digits"]:
            found.append("digits")
        elif step["type"] == "Split" and "Regex" in step["pattern"]:
            found.append(step["pattern"]["Regex"])
        elif step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            own_pattern = step["use_regex"]
        else:
            return None
    return tuple(found) if own_pattern == (found in ([], ["digits"])) else None


def _tensors(
    source: Path, config: Mapping[str, Any], family: Family,
) -> Iterator[tuple[str, tuple[int, ...], Callable[[], Tensor]]]:
    """Name in GGUF, shape and a function that reads it, of each tensor of a saved model."""
    import gguf
    from safetensors import safe_open

    layers, experts = config["num_hidden_layers"], config.get("num_experts") or 0
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, family.name.upper()), layers)
    heads = {"q_proj": config["num_attention_heads"],
             "k_proj": config.get("num_key_value_heads") or config["num_attention_heads"]}
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ArgumentError(f"{source} has no weights in safetensors files: save the model with save_pretrained")
    places: dict[str, Path] = {}
    for path in files:
        with safe_open(path, "pt") as opened:
            places |= dict.fromkeys(opened.keys(), path)

    def read(name: str) -> Tensor:
        with safe_open(places[name], "pt") as file:
            found: Tensor = file.get_tensor(name)
        part = name.split(".")[-2]
        return _interleaved(found, heads[part]) if family.interleaved and part in heads else found

    def shape_of(name: str) -> tuple[int, ...]:
        with safe_open(places[name], "pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def stacked(every: Sequence[str]) -> Tensor:
        return torch.stack([read(each) for each in every])

    for name in places:
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            number, rest = after.split(".", 1)
            if number != "0":
                continue
            every = [f"{before}.experts.{each}.{rest}" for each in range(experts)]
            whole = _named(names, f"{before}.experts.{rest}")
            yield whole, (experts, *shape_of(name)), partial(stacked, every)
        elif name != "lm_head.weight" or not config.get("tie_word_embeddings"):
            yield _named(names, name), shape_of(name), partial(read, name)
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        factors = llama3_factors(config, rope)
        yield "rope_freqs.weight", tuple(factors.shape), lambda: factors


def _named(names: Any, name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise UnsupportedError(f"the tensor {name} has no name in GGUF: {_ELSEWHERE}")
    return str(found)


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """The rows of each head with its halves interleaved."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def llama3_factors(config: Mapping[str, Any], rope: Mapping[str, Any]) -> Tensor:
    """What llama.cpp divides the frequencies of positions by, for the scaling of Llama 3.1: 1 for short wavelengths, `factor`
    for long ones, and between them in between."""
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    wavelength = 2 * math.pi * float(rope["rope_theta"]) ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = ((rope["original_max_position_embeddings"] / wavelength - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
