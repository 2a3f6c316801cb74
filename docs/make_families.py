"""Writes docs/families.md: for every causal language model of transformers, whether it streams exactly.

    python docs/make_families.py                     all of them: half an hour of one core
    python docs/make_families.py llama qwen3_next    these model types; the other rows stay as they are

Verdicts are those of tests/families/verdicts.py. The page is the only store of them.
"""
from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "families.md"
HEADINGS = ("class", "model type", "verdict", "reason")
OUTCOMES = {
    "exact": "loss and gradients are native PyTorch's",
    "refused": "`stream` says why, before anything has changed",
    "wrong": "other numbers, or an error that is not megacompile's own",
    "not built": "transformers builds or trains no tiny model of it on text alone",
    "not judged": "not run yet",
}

HEAD = """# Families

Every causal language model that transformers {transformers} knows ({classes} classes), streamed on the CPU and compared with
native PyTorch {torch}: a tiny random config (three layers, each kind of layer that the default config has, no dropout), float32,
a batch of 5 x 29 tokens padded on the right, where the captured size was 3 x 17. Exact means that the loss and every gradient
are within 1e-5 of their norm, or within twice what native float32 itself is off native float64. This page is made by
`python docs/make_families.py`; `pytest tests/families --all-families` judges all classes again.

**{exact} of the {trainable} classes that can be trained this way are exact ({share:.0%}).**

"""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    cls: str
    model_type: str
    outcome: str = "not judged"
    reason: str = ""


def page(rows: list[Row]) -> str:
    """The page around `rows`."""
    counts = Counter(row.outcome for row in rows)
    trainable = counts["exact"] + counts["refused"] + counts["wrong"]
    head = HEAD.format(transformers=transformers.__version__, torch=torch.__version__.split("+")[0], classes=len(rows),
                       exact=counts["exact"], trainable=trainable, share=counts["exact"] / max(trainable, 1))
    legend = [("verdict", "classes", "meaning"),
              *((outcome, str(counts[outcome]), meaning) for outcome, meaning in OUTCOMES.items() if counts[outcome])]
    return head + _table(legend) + "\n" + _table([HEADINGS, *(dataclasses.astuple(row) for row in rows)])


def read_rows() -> dict[str, Row]:
    """Class -> row, of the page as it is."""
    text = PAGE.read_text() if PAGE.exists() else ""
    lines = [[cell.strip().replace("\\|", "|") for cell in line.strip("|").split(" | ")] for line in text.splitlines()
             if line.startswith("| ")]
    return {cells[0]: Row(*cells) for cells in lines if len(cells) == len(HEADINGS) and tuple(cells) != HEADINGS}


def _table(lines: list[tuple[str, ...]]) -> str:
    cells = [f"| {' | '.join(cell.replace('|', chr(92) + '|') or ' ' for cell in line)} |" for line in lines]
    return "\n".join([cells[0], f"|{'---|' * len(lines[0])}", *cells[1:]]) + "\n"


def main(model_types: list[str]) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "families"))
    from tiny_configs import classes
    from verdicts import judge_each

    known, rows = classes(), read_rows()
    rows = {cls: rows.get(cls, Row(cls, model_type)) for cls, model_type in sorted(known.items())}
    class_of = {model_type: cls for cls, model_type in known.items()}
    for verdict in judge_each(model_types or list(class_of)):
        cls = class_of[verdict.model_type]
        rows[cls] = Row(cls, verdict.model_type, verdict.outcome, verdict.reason)
        print(f"{cls}: {verdict.outcome} {verdict.reason} ({verdict.seconds:.0f} s)", flush=True)
        PAGE.write_text(page(list(rows.values())))


if __name__ == "__main__":
    main(sys.argv[1:])
