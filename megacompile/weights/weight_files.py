"""Weights on disk: the files of a checkpoint, the tensors in them, and reading these into existing memory.

Only safetensors are read, since a pickle runs code. Files are read, not mapped: pages of a mapped file count as this process's
memory, and a copy through a mapping takes a page fault every 4 KiB.
"""
from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from megacompile.errors import CheckpointError
from megacompile.system.files import open_regular, read_regular

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
#: The files that are fetched of a model on the hub. Names have no folder, and an index may only name such files.
FILE_PATTERNS = (CONFIG_FILE, GENERATION_FILE, WEIGHTS_FILE, INDEX_FILE, "model-*.safetensors")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")

#: The format's names of dtypes that weights may have. Others (int8, float8) mean nothing without their scales.
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: All dtypes that are read: buffers may hold integers, and scales may be powers of two (E8M0).
DTYPES = {**FLOATS, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
          "BOOL": torch.bool, "F8_E8M0": torch.float8_e8m0fnu}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is stored. `offset`: bytes from the beginning of the file. `dtype`: the format's name of it ("BF16")."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class FusedTensor(StoredTensor):
    """A parameter whose elements are those of several stored tensors, one tensor after the other. `file` and `offset` are those
    of the first. `dtype`: one that can hold all their values, or that of a tensor that is not in floats."""

    parts: tuple[StoredTensor, ...]

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], parts: Sequence[StoredTensor]) -> FusedTensor:
        dtypes = {part.dtype for part in parts}
        dtype = min(dtypes - FLOATS.keys() or dtypes) if len(dtypes) == 1 or dtypes - FLOATS.keys() else "F32"
        return cls(name, parts[0].file, dtype, shape, parts[0].offset, sum(part.bytes for part in parts), tuple(parts))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those that its index names, or its single file. Raises `CheckpointError`."""
    index = folder / INDEX_FILE
    if not index.exists():
        if (folder / WEIGHTS_FILE).exists():
            return [folder / WEIGHTS_FILE]
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        found = f"only {pickles[0]}, a pickle, which can run code when it is read" if pickles else "none"
        raise CheckpointError(
            f"{folder} should have weights in {WEIGHTS_FILE} or {INDEX_FILE} and has {found}: if you trust the files, convert "
            "them once with AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder)")
    try:
        names = sorted(set(json.loads(read_regular(index))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of weight files ({type(error).__name__}: {error}): copy or download it "
                              "again") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {name!r}, which is not a safetensors file of its own folder: files elsewhere "
                                  "are not read; get the checkpoint from where it was made")
        if not (folder / name).exists():
            raise CheckpointError(f"{index} names {name}, which is not there: copy or download it again")
    return [folder / name for name in names]


def stored_tensors(files: list[Path]) -> dict[str, StoredTensor]:
    """All tensors of these files by name. Reads only headers. Raises `CheckpointError` for a damaged or truncated file, and for
    a name that two files have."""
    found: dict[str, StoredTensor] = {}
    for file in files:
        for stored in _header(file):
            if stored.name in found:
                raise CheckpointError(f"{stored.name} is both in {found[stored.name].file} and in {file.name}: the folder "
                                      "mixes two checkpoints; get it again from where it was made")
            found[stored.name] = stored
    return found


def _header(file: Path) -> Iterator[StoredTensor]:
    try:
        with open(open_regular(file), "rb") as stream:
            with safe_open(file, framework="pt"):  # checks the header: sizes, offsets, the end of the file
                pass
            length = int.from_bytes(stream.read(8), "little")
            entries = json.loads(stream.read(length))
    except (OSError, RecursionError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged or truncated ({error}): copy or download it again") from error
    for name, entry in entries.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield StoredTensor(name, file, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)


class WeightReader:
    """Reads parts of a few files from any thread. State: the open files."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def open(self, files: list[Path]) -> None:
        for file in files:
            if file not in self._descriptors:
                self._descriptors[file] = open_regular(file)

    def read(self, stored: StoredTensor, start: int, out: Tensor) -> None:
        """Reads elements from `start` on into all of `out`, which is 1-D, contiguous, on the CPU and of the stored dtype.

        Raises `CheckpointError` if the file ends too early, since it has changed after its header was read."""
        memory = out.view(torch.uint8).numpy().data
        position = stored.offset + start * out.element_size()
        while memory:
            try:
                count = os.preadv(self._descriptors[stored.file], [memory], position)
            except OSError as error:
                raise CheckpointError(f"{stored.file} cannot be read ({error.strerror}): copy or download it again") from error
            if count == 0:
                raise CheckpointError(f"{stored.file} ended inside {stored.name}: it was changed while it was read; load it "
                                      "again")
            memory, position = memory[count:], position + count

    def equal(self, one: StoredTensor, other: StoredTensor, block: int) -> bool:
        """True if two stored tensors of one shape have the same bytes, `block` elements at a time."""
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        dtype = DTYPES[one.dtype]
        total = one.bytes // dtype.itemsize
        for start in range(0, total, block):
            a, b = (torch.empty(min(block, total - start), dtype=dtype) for _ in range(2))
            self.read(one, start, a)
            self.read(other, start, b)
            if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                return False
        return True


# --------------------
# Matches stored tensors to parameters: by name, as transformers' loader renames tensors, then by shape, dtype and ties.
#
# A rename changes only the name (an old layout's names, a base model's prefix). Stored tensors may also be parts of a
# parameter, as experts that are stored one by one. Where a checkpoint needs more (another order of elements), the match says
# so, and transformers' loader has to load it.
#: The most lines of a list that an error shows.
_SHOWN = 12
_COMPARED_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Match:
    """Where a model's values are stored.

    `sources`: the stored tensor of each parameter (by its first name) and persistent buffer. `missing`: parameters and buffers
    without one. `unused`: stored tensors that the model does not have. `wrong`: sentences about tensors that do not fit their
    name. `converted`: stored tensors that are neither a parameter nor, as they are, parts of one."""

    sources: Mapping[str, StoredTensor]
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()

    def text(self) -> str:
        """A line for everything that does not match; empty if all matches."""
        lines = [*self.wrong, *(f"{name} is in no file" for name in self.missing),
                 *(f"{name} is stored, and the model does not have it" for name in self.unused)]
        shown = lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more"]
        return "\n".join(f"  {line}" for line in shown)

    def check(self, where: object, model: nn.Module, strict: bool) -> None:
        """Raises `CheckpointError` with the list of mismatches; without `strict` only if some are `wrong`."""
        if self.wrong or (strict and (self.missing or self.unused)):
            counts = {"do not fit": self.wrong, "are missing": self.missing, "are not used": self.unused}
            said = ", ".join(f"{len(names)} {what}" for what, names in counts.items() if names)
            otherwise = "start those missing from random values" if self.missing else "leave those out"
            remedy = ("give the config that belongs to it" if self.wrong else
                      f"give the checkpoint that belongs to it, or strict=False to {otherwise}")
            raise CheckpointError(f"{where} is not a checkpoint of {type(model).__name__} as configured ({said}): {remedy}\n"
                                  f"{self.text()}")


def match(model: Any, stored: Mapping[str, StoredTensor], reader: WeightReader) -> Match:
    """Finds the stored tensor of each parameter and persistent buffer of a transformers model. The current values of parameters
    are not read. `reader` has the files open: stored copies of tied parameters are compared and must be equal."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    parameters = {id(p): name for name, p in model.named_parameters()}  # the first name of each
    names, fused, converted = _model_names(model, stored, state)
    sources: dict[str, StoredTensor] = {}
    wrong, unused = [], []
    parts = {origin for fusion in fused.values() for origins in fusion.origins for origin in origins}
    candidates: list[tuple[str, StoredTensor | None]] = [
        (name, stored[origin]) for origin, name in names.items() if origin not in parts]
    candidates += [(name, fusion.tensor(name, tuple(state[name].shape), stored)) for name, fusion in fused.items()]
    for name, found in candidates:
        if found is None:
            wrong.append(f"{fused[name].first} and others like it do not make {name} of {list(state[name].shape)}")
            continue
        origin = found.name
        if name not in state:
            unused.append(origin)
            continue
        tensor = state[name]
        first = parameters.get(id(tensor), name)
        if found.shape != tuple(tensor.shape):
            wrong.append(f"{origin} has shape {list(found.shape)}, and {name} has {list(tensor.shape)}")
        elif found.dtype not in FLOATS if tensor.is_floating_point() else DTYPES.get(found.dtype) != tensor.dtype:
            wrong.append(f"{origin} is stored as {found.dtype}, which cannot become {name} in {tensor.dtype} (no scales "
                         "of a known format belong to it)")
        elif first in sources and isinstance(found, FusedTensor):
            wrong.append(f"{name} is stored both as a whole and in parts, such as {fused[name].first}")
        elif first in sources and not reader.equal(sources[first], found, _COMPARED_ELEMENTS):
            wrong.append(f"{sources[first].name} and {origin} differ, and the config ties them: set tie_word_embeddings=False "
                         "in it if they should differ")
        else:
            sources.setdefault(first, found)
    wanted = {parameters.get(id(tensor), name): name for name, tensor in state.items()}
    known = {parameters.get(id(state[name]), name) for name in names.values() if name in state}
    forgivable = _patterns(getattr(model, "_keys_to_ignore_on_load_missing", None))
    trained = set(parameters.values())
    missing = [name for name in wanted if name not in known and (name in trained or not _any(forgivable, name))]
    return Match(sources, tuple(missing), tuple(_without_leftovers(model, unused)), tuple(wrong), tuple(converted))


#: What transformers' loader does to stored tensors so that a parameter is one of them after the other, by its operations and
#: their dimensions: whether it stacks them.
_FUSIONS: dict[tuple[tuple[str, int | None], ...], bool] = {
    (("MergeModulelist", 0), ("Concatenate", 1)): True, (("MergeModulelist", 0),): True, (("Concatenate", 0),): False}


@dataclass(frozen=True)
class _Fusion:
    """How stored tensors make a parameter. `stacked`: it has a matrix for each item of a list, such as experts. `origins`:
    their names for each pattern of the loader (gates, then inputs)."""

    stacked: bool
    origins: tuple[list[str], ...]

    @property
    def first(self) -> str:
        return next(origins[0] for origins in self.origins if origins)

    def tensor(self, name: str, shape: tuple[int, ...], stored: Mapping[str, StoredTensor]) -> FusedTensor | None:
        """None if the stored tensors do not make a parameter of this shape."""
        # Names of one pattern differ in their numbers.
        lists = [[stored[origin] for origin in sorted(origins, key=_numbers)] for origins in self.origins]
        if self.stacked and any(len(items) != shape[0] for items in lists):
            return None
        whole = shape[1:] if self.stacked else shape
        groups = list(zip(*lists, strict=True)) if self.stacked else [tuple(itertools.chain.from_iterable(lists))]
        parts = list(itertools.chain.from_iterable(groups))
        fits = all(len(part.shape) == len(whole) and part.shape[1:] == whole[1:] for part in parts)
        fits = fits and all(sum(part.shape[0] for part in group) == whole[0] for group in groups)
        return FusedTensor.of(name, shape, parts) if fits else None


def _model_names(model: Any, stored: Iterable[str],
                 state: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, _Fusion], list[str]]:
    """(the model's name for each stored tensor, as in transformers' loader; the parameters that stored tensors make; the
    tensors that the loader would convert in another way)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    patterns = {pattern: (entry, i) for entry in converters for i, pattern in enumerate(entry.source_patterns)}
    names: dict[str, str] = {}
    fused: dict[str, _Fusion] = {}
    converted = []
    for origin in stored:
        name, conversion = rename_source_key(origin, renamings, converters, model.base_model_prefix, state)
        if name not in state and origin in state:  # in the model's own layout already
            name, conversion = rename_source_key(origin, [], [], model.base_model_prefix, state)
        names[origin] = name
        if conversion is not None and name in state:
            entry, which = patterns[conversion]
            done = tuple((type(step).__name__, getattr(step, "dim", None)) for step in entry.operations)
            if done in _FUSIONS and len(entry.target_patterns) == 1:
                empty = _Fusion(_FUSIONS[done], tuple([] for _ in entry.source_patterns))
                fused.setdefault(name, empty).origins[which].append(origin)
            else:
                converted.append(origin)
    # `save_pretrained` writes the names that were read.
    model._weight_conversions = [entry for entry in mapping if entry.was_used()]
    return names, fused, converted


def _numbers(name: str) -> list[int]:
    """The numbers in a name."""
    return [int(each) for each in re.findall(r"\d+", name)]


def _without_leftovers(model: Any, unused: Iterable[str]) -> list[str]:
    """The unused names, without tensors that only older versions stored: buffers that are no longer persistent, and names that
    the model's class allows."""
    patterns = _patterns(getattr(model, "_keys_to_ignore_on_load_unexpected", None))
    computed = {_last_words(name) for name, _ in model.named_buffers()}
    return [name for name in unused if _last_words(name) not in computed and not _any(patterns, name)]


def _last_words(name: str) -> tuple[str, ...]:
    return tuple(name.split(".")[-2:])


def _patterns(given: Iterable[str] | None) -> list[re.Pattern[str]]:
    return [re.compile(pattern) for pattern in given or ()]


def _any(patterns: Iterable[re.Pattern[str]], name: str) -> bool:
    return any(pattern.search(name) for pattern in patterns)
