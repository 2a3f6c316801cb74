"""Prints predictions beside what was measured, by kind of step, as a Markdown table; with `--all`, row by row.

    python benchmarks/predictions.py
    python benchmarks/predictions.py --all

Reads the files of `benchmarks/results/`. Of rows with the same options and device it takes the last whose steps were steady. A
ratio is predicted over measured; the prediction is the one that was made when the row was measured.
"""
from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rows
from shapes import SHAPES
from tabulate import tabulate

RESULTS = Path(__file__).parent / "results"
#: Rows that the results' page withdraws, and of moments on a drive, whose rate nobody calibrates in advance.
LEFT_OUT = frozenset({"withdrawn.jsonl", "disk.jsonl"})
#: Models with fewer parameters count as small.
SMALL = 5e9
#: How far from 1 a ratio may be.
WITHIN = 0.1
Key = tuple[str, str, str, str, str, str]


@dataclass(frozen=True)
class Prediction:
    """`kind`: model, products, state, step, memory, size. `time`, `memory`: predicted over measured."""

    kind: Key
    label: str
    step_s: float
    time: float
    memory: float | None


def predictions(folder: Path = RESULTS) -> Iterator[Prediction]:
    """The last steady row of each identity that has a prediction."""
    found: dict[str, rows.Row] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines() if path.name not in LEFT_OUT else ():
            row = json.loads(line)
            if (row.get("system") == "megacompile" and row.get("predicted_step_s") and not row.get("compute_only")
                    and steady(row)):
                found[rows.identity(row["system"], row["options"], row["device"])] = row
    for row in found.values():
        options = row["options"]
        memory = row["predicted_device_gib"] / row["peak_device_gib"] if row.get("predicted_device_gib") else None
        said = " ".join(f"{name}={value}" for name, value in options.items() if name not in ("resident", "resident_state"))
        yield Prediction(_kind(row), f"{row['device']}: {said or 'defaults'}", row["step_s"],
                         row["predicted_step_s"] / row["step_s"], memory)


def steady(row: rows.Row) -> bool:
    """A row whose last steps agree (one that was still warming up says nothing), or that has one timed step alone."""
    if len(row["times_s"]) < 2:  # the first step compiles
        return False
    *_, a, b = row["times_s"]
    return bool(abs(a - b) < 0.02 * b or len(row["times_s"]) == 2)


def _kind(row: rows.Row) -> Key:
    options, shape = row["options"], SHAPES[row["shape"]]
    names = set(shape)
    mixture = bool({"num_experts", "num_local_experts", "n_routed_experts"} & names)
    hybrid = bool({"layer_types", "linear_num_value_heads", "layers_block_type"} & names)
    model = "hybrid" if hybrid else "mixture" if mixture else "dense"
    products = "float8" if options.get("precision") else str(options.get("quantize", "bf16")).replace("nf4", "NF4 codes")
    optim, given = str(options.get("optim", "adamw")), str(options.get("optim_args", ""))
    if "lora" in options:
        state = "adapters"
    elif "8bit" in optim:
        state = "4 bytes" if "master=bfloat16" in given else "8 bytes"
    else:
        state = "10 bytes" if "bf16" in optim or "state_dtype=bfloat16" in given else "14 bytes"
    step = "loop" if not row.get("train_step") else "arrival" if row.get("overlap") else "clipped"
    memory = f"within {options['device_memory']}" if options.get("device_memory") else "all"
    return model, products, state, step, memory, "small" if row["parameters"] < SMALL else "large"


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def table(found: Sequence[Prediction]) -> str:
    """One line for each kind of step."""
    kinds: dict[Key, list[Prediction]] = {}
    for each in found:
        kinds.setdefault(each.kind, []).append(each)
    lines: list[tuple[Any, ...]] = [
        (*kind, len(of_kind), _range([each.time for each in of_kind]),
         _range(memory) if (memory := [each.memory for each in of_kind if each.memory is not None]) else "")
        for kind, of_kind in sorted(kinds.items())]
    return str(tabulate(lines, ["model", "products", "state", "step", "memory", "size", "rows", "step time", "GPU memory"],
                        tablefmt="github", disable_numparse=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="print all rows, the worst first")
    given = parser.parse_args()
    found = list(predictions())
    print(table(found))
    missed = [each for each in found if abs(each.time - 1) > WITHIN]
    print(f"\n{len(found) - len(missed)} of {len(found)} step times are predicted within {WITHIN:.0%}.")
    for each in sorted(found if given.all else missed, key=lambda each: -abs(each.time - 1)):
        print(f"  {each.time:.2f} {each.step_s:8.3f} s  {each.label}")


if __name__ == "__main__":
    main()
