"""Writes docs/families.md: for every causal language model of transformers, whether it streams exactly.

    python docs/make_families.py                     judges all models: half an hour of one core
    python docs/make_families.py --missing           judges models without a verdict on the page
    python docs/make_families.py llama qwen3_next    judges these model types and keeps the other rows

tests/support/verdicts.py judges. The verdicts are stored only on the page.
"""
from __future__ import annotations

import dataclasses
import re
import sys
from collections import Counter
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
PAGE, README = ROOT / "docs" / "families.md", ROOT / "README.md"
sys.path.insert(0, str(ROOT / "tests" / "support"))

from kinds import DECODER, KINDS, kind_of  # noqa: E402

HEADINGS = ("class", "model type", "verdict", "reason")
OUTCOMES = {
    "exact": "loss and gradients equal native PyTorch's",
    "refused": "`stream` gives the reason and a remedy",
    "wrong": "other numbers, or an error that is not megacompile's own",
    "not built": "transformers cannot train a tiny model of it on text alone",
    "not judged": "not run yet",
}

HEAD = """# Families

This page says which causal language models of transformers train exactly. Look up your model's class before you stream it.

The {classes} classes of transformers {transformers} were streamed on the CPU and compared with native PyTorch {torch}: a tiny
random config with each kind of layer, float32, no dropout, 5 x 29 tokens padded on the right. Exact means that the loss and
every gradient are within 1e-5 of their norm, or within 8 times the difference between native float32 and float64.
`python docs/make_families.py` makes this page. `pytest tests/nightly --nightly` judges all classes again.

**{counts} classes that can be trained this way and were judged are exact. Of the decoder-only Transformers among them,
{decoders} are.**

"""
#: Where the remedy of a refusal begins.
REMEDY = re.compile("; |: (?=(compute|give|keep|let|pass|switch|take|use) )")


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    cls: str
    model_type: str
    outcome: str = "not judged"
    reason: str = ""

    @property
    def kind(self) -> str:
        return kind_of(self.cls, self.model_type)


def page(rows: list[Row]) -> str:
    """The text of the page with these rows."""
    outcomes = Counter(row.outcome for row in rows)
    head = HEAD.format(transformers=transformers.__version__, torch=torch.__version__.split("+")[0], classes=len(rows),
                       counts=counts(rows), decoders=_of_decoders(rows))
    legend = [("verdict", "classes", "meaning"),
              *((outcome, str(outcomes[outcome]), meaning) for outcome, meaning in OUTCOMES.items() if outcomes[outcome])]
    shown = [outcome for outcome in OUTCOMES if outcomes[outcome]]
    by_kind = Counter((row.kind, row.outcome) for row in rows)
    kinds = [("kind", *shown, "meaning"),
             *((kind, *(str(by_kind[kind, outcome]) for outcome in shown), meaning) for kind, meaning in KINDS.items())]
    listed = [(row.cls, row.model_type, row.outcome, row.reason) for row in rows]
    return "\n".join([head + _table(legend), _table(kinds), _table([HEADINGS, *listed])])


def write(rows: list[Row]) -> None:
    """Writes the page, and the counts in the README."""
    PAGE.write_text(page(rows))
    README.write_text(re.sub(r"\d+ of the \d+ causal language models", f"{counts(rows)} causal language models",
                             README.read_text()))


def counts(rows: list[Row]) -> str:
    """How many are exact, out of those that train on text alone and were judged: "153 of the 175"."""
    outcomes = Counter(row.outcome for row in rows)
    return f"{outcomes['exact']} of the {outcomes['exact'] + outcomes['refused'] + outcomes['wrong']}"


def shown_reason(cls: str, outcome: str, reason: str) -> str:
    """A reason as the page has it: of a refusal without the name of the class and without the remedy."""
    return REMEDY.split(reason)[0].removeprefix(f"{cls} ") if outcome == "refused" else reason


def _of_decoders(rows: list[Row]) -> str:
    decoders = [row for row in rows if row.kind == DECODER]
    exact, judged = (int(number) for number in counts(decoders).split(" of the "))
    return f"{exact} of {judged} ({exact / max(judged, 1):.0%})"


def read_rows() -> dict[str, Row]:
    """Class -> row, read from the existing page."""
    text = PAGE.read_text() if PAGE.exists() else ""
    lines = [[cell.strip().replace("\\|", "|") for cell in line.strip("|").split(" | ")] for line in text.splitlines()
             if line.startswith("| ")]
    return {cells[0]: Row(*cells) for cells in lines if len(cells) == len(HEADINGS) and cells[2] in OUTCOMES}


def _table(lines: list[tuple[str, ...]]) -> str:
    cells = [f"| {' | '.join(cell.replace('|', chr(92) + '|') or ' ' for cell in line)} |" for line in lines]
    return "\n".join([cells[0], f"|{'---|' * len(lines[0])}", *cells[1:]]) + "\n"


def main(model_types: list[str]) -> None:
    from tiny_configs import classes
    from verdicts import judge_each

    known, rows = classes(), read_rows()
    rows = {cls: rows.get(cls, Row(cls, model_type)) for cls, model_type in sorted(known.items())}
    class_of = {model_type: cls for cls, model_type in known.items()}
    if model_types == ["--missing"]:
        model_types = [row.model_type for row in rows.values() if row.outcome == Row.outcome]
    elif not model_types:
        model_types = list(class_of)
    for verdict in judge_each(model_types):
        cls = class_of[verdict.model_type]
        rows[cls] = Row(cls, verdict.model_type, verdict.outcome, shown_reason(cls, verdict.outcome, verdict.reason))
        print(f"{cls}: {verdict.outcome} {verdict.reason} ({verdict.seconds:.0f} s)", flush=True)
        write(list(rows.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
