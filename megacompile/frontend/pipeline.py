"""Runs a capture: a list of named steps over one state, each with its inputs and outputs declared and printable.

A step's inputs are the parameters of its function, by name; `gives` names its outputs, and `changes` what it rewrites in place.
All of them are attributes of `CaptureState`. `megacompile/frontend/steps.py` has the list.
"""
from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from megacompile.frontend.batches.images import ImagePositions, Patches
from megacompile.frontend.batches.tables import EmbeddingTable
from megacompile.frontend.captured import AttentionFacts, BatchFacts, LayerFacts, LossFacts
from megacompile.frontend.graph.loss import TargetCount
from megacompile.frontend.graph.output import OutputStructure
from megacompile.frontend.graph.pieces import Rows
from megacompile.frontend.graph.split import Section
from megacompile.frontend.templates.build import Condition, Renaming
from megacompile.frontend.templates.hidden_states import BuildTemplate, Heads
from megacompile.frontend.templates.template import Call, TargetLike, Template, TemplatePass
from megacompile.frontend.templates.token_functions import Described
from megacompile.frontend.tracing.layers import LayerStack
from megacompile.frontend.tracing.model_graph import ModelGraph
from megacompile.frontend.tracing.trace import Traced, Validity
from megacompile.ir.plan import CaptureKey
from megacompile.system.progress import at

CountTargets = Callable[[Mapping[str, Tensor]], Tensor]


@dataclasses.dataclass
class Given:
    """The inputs of a capture (see `capture`). `layers`: the qualified names of the lists of layers. `chained`: each layer call
    must read what the call before it makes. `known_patches`: the encoders, if an earlier capture installed them. `known_trace`:
    the trace, if there already is one."""

    model: nn.Module
    layers: tuple[str, ...]
    example: Mapping[str, Tensor] | None
    template_passes: Sequence[TemplatePass]
    target: TargetLike
    key: CaptureKey
    loss: Callable[..., Any] | None
    expert_pieces: int = 1
    dtype: torch.dtype | None = None
    chained: bool = False
    known_patches: tuple[Patches, ...] | None = None
    known_trace: Traced | None = None


class CaptureState(Given):
    """The inputs of a capture, and the results of its steps so far, roughly in the order in which they are made. Reading a
    field that no step has set yet is an `AttributeError`."""

    # The copy that is traced.
    plain: nn.Module
    rows: Mapping[str, Rows]
    patches: tuple[Patches, ...]
    traced_example: Mapping[str, Tensor] | None
    read_by_loss: Described
    masks_added: bool
    # The trace.
    traced: Traced
    images_apart: bool
    validity: Validity
    graph: ModelGraph
    fake_model: nn.Module
    batch: dict[str, Tensor]
    stack: LayerStack
    # Results of rewriting the graph.
    output: OutputStructure
    positions: list[int]
    image_positions: tuple[ImagePositions, ...]
    tables: tuple[EmbeddingTable, ...]
    has_loss: bool
    count_targets: CountTargets | None
    counts_positions: bool
    totals: tuple[TargetCount, ...]
    arguments_mix: str
    # The graph in pieces.
    sections: list[Section]
    renaming: Renaming
    layer_names: tuple[str, ...]
    to_logits: Section | None
    to_auxiliary: Section | None
    conditions: tuple[Condition, ...]
    build: BuildTemplate
    templates: dict[str, Template]
    calls: tuple[Call, ...]
    layers_mix: str
    heads: Heads | None
    # Facts about the model.
    layer_facts: LayerFacts
    batch_facts: BatchFacts
    attention_facts: AttentionFacts
    loss_facts: LossFacts

    @property
    def name(self) -> str:
        """The model's class, for messages."""
        return type(self.model).__name__

    def text(self) -> str:
        """All results so far, to print and to compare."""
        return "\n".join(_field_text(name, getattr(self, name)) for name in CaptureState.__annotations__ if hasattr(self, name))


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a capture. `run`: its function, whose parameters name the fields that it reads. It returns the fields that
    the step `gives`, as a tuple if there are several. `changes`: fields that it rewrites in place."""

    name: str
    run: Callable[..., Any]
    gives: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.run).parameters)

    def apply(self, state: CaptureState) -> None:
        """Runs the function on the fields that it reads, and sets those that it gives."""
        returned = self.run(*(getattr(state, name) for name in self.reads))
        values = returned if len(self.gives) > 1 else (returned,) if self.gives else ()
        for name, value in zip(self.gives, values, strict=True):
            setattr(state, name, value)


#: Called after each step with the step and the state's text before it and after it.
Watch = Callable[[Step, str, str], None]


def run_steps(steps: Sequence[Step], state: CaptureState, watch: Watch | None = None) -> None:
    """Applies the steps in order. The state is printed only for a `watch`."""
    before = ""
    for step in steps:
        at(step.name)
        step.apply(state)
        if watch is not None:
            after = state.text()
            watch(step, before, after)
            before = after


# ---------------------------------------------------------------- the state as text
#: Dynamo's name of a parameter or buffer; statements that only free values; lines that show nothing of the model.
_WEIGHT = re.compile(r"\b[lL]_model_((?:modules|parameters|buffers)_\w+)_\b")
_FREED = re.compile(r";\s+\w+(?: = \w+)* = None(?=\s|$)")
_FRAME = re.compile(r"\s*(?:def forward|_fn_args = |.*_dynamo_bytecode_flatten|(\S+) = \1$|\w+ = L_\w+$)")


def _field_text(name: str, value: Any) -> str:
    if isinstance(value, ModelGraph):
        regions = [(key, module) for key, module in value.graph.named_children() if isinstance(module, fx.GraphModule)]
        names = {node.name: source.name or source.kind for node, source in value.sources.items() if node.op == "placeholder"}
        inputs = [f"    input {names[node.name]}: {_value(node.meta['example_value'])}"
                  for node, source in value.sources.items()
                  if node.name in names and source.kind not in ("parameter", "buffer")]
        return "\n".join([f"{name}:", *inputs, *_code(value.graph, names),
                          *itertools.chain.from_iterable([f"{name}.{key}:", *_code(module, {})] for key, module in regions)])
    if name == "sections":
        return "\n".join(line for section in value for line in _section(section))
    if name == "templates":
        return "\n".join(line for key, template in value.items()
                         for line in [f"template {key}:", *_statements(template.stages["joint"].splitlines(), {})])
    return f"{name} = {_value(value)}"


def _section(section: Section) -> list[str]:
    placeholders = section.graph.graph.find_nodes(op="placeholder")
    names = {node.name: source.name or node.name for node, source in zip(placeholders, section.sources, strict=True)
             if source.kind != "size"}
    reads = (f"    {source.kind} {source.name or source.index}: {_value(node.meta['example_value'])}"
             for node, source in zip(placeholders, section.sources, strict=True))
    return [f"section {section.call_name}:", *reads, *_code(section.graph, names)]


def _code(module: fx.GraphModule, names: Mapping[str, str]) -> list[str]:
    return _statements(module.graph.python_code("self").src.splitlines(), names)


def _statements(lines: Iterable[str], names: Mapping[str, str]) -> list[str]:
    """The lines that compute something, with weights under their names in the model, and values in `names` under these."""
    def plain(found: re.Match[str]) -> str:
        return re.sub(r"(^|_)(modules|parameters|buffers)_", ".", found[1]).lstrip(".")

    def named(line: str) -> str:
        return _WEIGHT.sub(plain, re.sub(r"\b[a-z]\w*\b", lambda word: names.get(word[0], word[0]), line))

    short = (named(_FREED.sub("", line)) for line in lines)
    return [f"    {line.strip()}" for line in short if line.strip() and not _FRAME.match(line)]


def _value(value: Any) -> str:
    """A short text of a value; its class if it has none."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} [{', '.join(map(str, value.shape))}]"
    if isinstance(value, Call):
        return f"{value.name} -> {value.template}"
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | sympy.Basic | type):
        return str(value) if isinstance(value, sympy.Basic) else repr(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_value(each)}' for key, each in value.items())}}}"
    if isinstance(value, tuple | list | set | frozenset):
        return f"[{', '.join(map(_value, sorted(value) if isinstance(value, set | frozenset) else value))}]"
    if dataclasses.is_dataclass(value) and not isinstance(value, ModelGraph | Section | Template):
        fields = (f"{field.name}={_value(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(fields)})"
    return type(value).__name__
