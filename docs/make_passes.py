"""Writes docs/passes.md: the docstring of every pass, and lines of a program or graph before and after it.

    python docs/make_passes.py

Everything except the introduction comes from the code: docstrings, and the passes run on small models. A test fails if the page
is out of date.
"""
from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import torch
from torch import fx

from megacompile.frontend.capture import capture
from megacompile.ir.precision import Float8
from megacompile.ir.program import model_program
from megacompile.passes import PIPELINE, TEMPLATE_PIPELINE
from megacompile.passes.pipeline import compile_program
from megacompile.passes.template import Target
from megacompile.plan import Plan
from megacompile.program import CallSpec, Program, Tile

PAGE = Path(__file__).with_name("passes.md")
LINES, WIDTH = 7, 100
#: Passes that do nothing under the plan of the other examples, each with a plan for its own.
PLANS = {"shard": Plan(2, 8, (1, 1), ranks=2)}
#: Pass -> the section shown before it, the section shown after it, and a part of the first line shown ("": the first change).
SHOWN = {
    "micro_batch": ("forward", "forward", ""), "partition": ("forward", "forward", ""),
    "differentiate": ("forward", "backward", "a2 = "),
    "prefetch": ("forward", "forward", ""), "offload": ("backward", "backward", "p.scale(a3)"),
    "optimizer": ("update", "update", "c = "), "shard": ("backward", "backward", "d2 = "),
    "place": ("forward", "forward", "w1 = "), "synchronize": ("forward", "forward", "w1 = "),
    "fuse_loss": ("", "", "shift_labels = "), "chunk_tokens": ("", "", "tokens_0"),
    "recurrence": ("", "", "megacompile.recurrence")}

HEAD = """# Passes

This page shows what each pass does to a small model, for people who read or write passes.
`python docs/make_passes.py` makes it.

## A pass of your own

A pass is a pure function. A pipeline is a tuple of passes that run in order. To change it, build another tuple:

```python
from megacompile.passes import PIPELINE, TEMPLATE_PIPELINE, insert_after, insert_before, replace_pass

model = megacompile.stream(model, passes=insert_after(PIPELINE, "prefetch", my_pass),
                           template_passes=replace_pass(TEMPLATE_PIPELINE, "chunk_tokens"))    # removes the pass
```

A **schedule pass** is a module or an object with `name`, `requires` (the stage that it needs), `provides` (the stage of its
result) and `run(program, plan) -> program`. It does not change the program that it gets. A pass after `prefetch` can move
copies freely, since `place` and `synchronize` then find slots and order the lanes. A pass after `synchronize` must keep the
order itself. A pipeline is refused before capture if a pass lacks its stage, goes back a stage, or if it ends without events.
The verifier runs after each pass, and its error names the pass that broke the program.

A **template pass** has `name`, `level` and `run(graph, target) -> graph`. At level `"model"` it gets a section as Dynamo left
it, before differentiation. At level `"variant"` it gets a graph of ATen ops that will run (`passes/template/__init__.py`
describes `graph.meta`). It must keep the graph's inputs and results.

`examples/custom_pass.py` has one of each:

"""


def page() -> str:
    """The text of the page."""
    parts = [HEAD, _example(), "\n## Schedule passes\n"]
    parts += _schedule_passes()
    parts += ["\n## Template passes\n", *_template_passes()]
    return "\n".join(parts).rstrip() + "\n"


def _example() -> str:
    source = (PAGE.parent.parent / "examples" / "custom_pass.py").read_text(encoding="utf-8")
    classes = re.findall(r"^class .*?(?=\n\n\n)", source, re.MULTILINE | re.DOTALL)
    return _block("\n\n\n".join(classes).split("\n"))


def _block(lines: list[str]) -> str:
    return "\n".join(["```python", *lines, "```"])


def _section(number: int, each: Any, facts: str, before: tuple[str, list[str]], after: tuple[str, list[str]]) -> str:
    text = (each.__doc__ or "").strip()
    shown = [f"{what}:\n\n{_block(lines)}\n" if lines else f"{what}: nothing.\n" for what, lines in (before, after)]
    return "\n".join([f"### {number}. {each.name}\n", f"{facts}\n", f"{text}\n", *shown])


# Schedules

def _model() -> Program:
    names = ("prologue", "layers.0", "layers.1", "epilogue")
    tiles = {name: Tile(name, 1024, 2048, 2048, True, 10240) for name in names}
    calls = [CallSpec(name, "layer" if "." in name else name, "decoder" if "." in name else name, (name,),
                      ("recompute_backward",) if name == "prologue" else ()) for name in names]
    return model_program(calls, tiles, 2, labels=True)


def _schedule_passes() -> list[str]:
    parts = []
    for number, each in enumerate(PIPELINE, 1):
        stages = compile_program(_model(), PLANS.get(each.name, Plan(2, 8, (1, 1))), PIPELINE).stages
        before_it = ["model", *(other.name for other in PIPELINE)][number - 1]
        (old, new, begin), program, made = SHOWN[each.name], stages[before_it], stages[each.name]
        before, after = _around(_lines(program, old), _lines(made, new), begin, same=old == new)
        parts.append(_section(number, each, f"Requires `{each.requires}`, provides `{each.provides}`.",
                              (f"Before, in `{old}`", before), (f"After, in `{new}`", after)))
    return parts


def _lines(program: Program, section: str) -> list[str]:
    if section not in program.sections:
        return []
    return [line.split("  #")[0].strip() for line in program.text(section).splitlines()[1:]]


def _around(before: list[str], after: list[str], begin: str, same: bool = True) -> tuple[list[str], list[str]]:
    """At most `LINES` lines of each: from two lines above the first with `begin` in it, or from one line above the first
    difference."""
    at = [0, 0]
    if begin:
        at = [next((i for i, line in enumerate(lines) if begin in line), 0) for lines in (before, after)]
        at = [max(0, i - 2) for i in at]
    elif same:
        changes = [c for c in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes() if c[0] != "equal"]
        at = [max(0, changes[0][1] - 1), max(0, changes[0][3] - 1)]
    return _cut(before, at[0]), _cut(after, at[1])


def _cut(lines: list[str], begin: int) -> list[str]:
    shown = [line if len(line) <= WIDTH else f"{line[:WIDTH - 4]} ..." for line in lines[begin:begin + LINES]]
    return [*(["..."] if begin else []), *shown, *(["..."] if begin + LINES < len(lines) else [])]


# Templates

class _Watched:
    """A template pass, and the first graph that it changed, as lines before and after."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.name, self.level = inner, inner.name, inner.level
        self.seen: tuple[list[str], list[str]] | None = None

    def run(self, graph: fx.GraphModule, target: Any) -> fx.GraphModule:
        before = _code(graph)
        made = self.inner.run(graph, target)
        if self.seen is None and _code(made) != before:
            self.seen = before, _code(made)
        return made


def _code(graph: fx.GraphModule) -> list[str]:
    """The lines of a graph's code, without frees, types, long module names and long numbers."""
    text = re.sub(r";  \w+ = .*None$", "", graph.code, flags=re.MULTILINE)
    text = re.sub(r" : [\w.\[\], \"]+(?= = )", "", text)
    text = re.sub(r"(\d\.\d{3})\d+", r"\1", text)
    text = re.sub(r"l_self_(?:\w+?_)?modules_|torch\.ops\.|torch\.nn\.functional\.", "", text)
    return [line.strip() for line in text.strip().splitlines() if line.strip() and not line.startswith("def ")]


def _template_passes() -> list[str]:
    watched = tuple(map(_Watched, TEMPLATE_PIPELINE))
    plain, low = (Target("cpu", torch.float32, precision=recipe) for recipe in (None, Float8(min_features=16, emulated=True)))
    captured = capture(_decoder(), pipeline=watched, target=plain)
    for chunk in (0, 4):
        captured.templates["decoder"].variant("recompute_backward", chunk)
    capture(_decoder(), pipeline=watched, target=low)  # a pass that has changed a graph shows that one
    capture(_recurrent(), pipeline=watched, target=plain)
    parts = []
    for number, each in enumerate(watched, 1):
        assert each.seen is not None, f"{each.name} changes nothing here"
        before, after = _around(*each.seen, SHOWN.get(each.name, ("", "", ""))[2])
        parts.append(_section(number, each.inner, f'Level `"{each.level}"`.', ("Before", before), ("After", after)))
    return parts


def _decoder() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, Qwen2Config
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(Qwen2Config(
            vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1))


def _recurrent() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, Mamba2Config
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(Mamba2Config(
            vocab_size=64, hidden_size=16, num_hidden_layers=2, num_heads=4, head_dim=8, state_size=8, n_groups=1))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
