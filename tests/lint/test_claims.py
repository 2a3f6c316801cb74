"""benchmarks/claims.md: every figure is its row's, and the README states no figure that is not there."""
from __future__ import annotations

import json
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = (ROOT / "benchmarks" / "claims.md").read_text(encoding="utf-8")
SYSTEMS = {"step": "megacompile", "native": "native", "uneven": "uneven", "storage": "storage",
           "generation": "generation"}
#: Numbers of the README that are not results: sizes of examples, versions, budgets, what `megacompile plan` asks for, licenses.
NO_RESULTS = {"1", "7", "12", "13", "16", "24", "28", "64", "100", "110", "128", "1,024", "2,048", "2.0",
              "3.11", "2604.05091", "0.1.0"}


def table_rows(page: str, name: str) -> list[list[str]]:
    table = page[page.index(f"<!-- {name}:"):page.index(f"<!-- end of {name} -->")]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")]
            for line in table.splitlines() if line.startswith("|")][2:]


ROWS = table_rows(CLAIMS, "claims")


def results(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8").splitlines()]


def options(words: list[str]) -> dict[str, str]:
    """The options of a command line, as `as_text` shows those of a row. A flag is True. Several values are a list."""
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            found[name := word[2:].replace("-", "_")] = []
        else:
            found[name].append(word)
    return {name: str(values) if len(values) > 1 else values[0] if values else "True" for name, values in found.items()}


def as_text(stored: object) -> str:
    return str(stored[0] if isinstance(stored, list) and len(stored) == 1 else stored)


def at(row: dict[str, Any], path: str) -> Any:
    return reduce(lambda part, key: part[int(key)] if isinstance(part, list) else part[key], path.split("."), row)


def row_of(command: str, where: str) -> dict[str, Any]:
    """The row that a command made. `where`: file, commit, and fields that tell rows apart that have no options."""
    launched = re.fullmatch(r"torchrun --nproc-per-node (\d+) (.*)", command)
    program, *words = (command if launched is None else launched[2]).split()
    gpus = {} if launched is None else {"gpus": launched[1]}
    system = SYSTEMS.get(Path(program).stem)
    assert (ROOT / program).exists(), program
    file, *told = where.replace("`", "").split()
    fields = dict(word.split("=") for word in told if "=" in word)
    commits = [word for word in told if "=" not in word]
    matching = [row for row in results(file) if all(row["commit"] == commit for commit in commits)
                and all(str(at(row, key)) == found for key, found in fields.items())]
    if system is not None:
        matching = [row for row in matching if row["system"] == system
                    and {key: as_text(value) for key, value in row["options"].items()} == options(words) | gpus]
    assert matching, f"{file} has no such row: {command} {told}"
    return matching[-1]


def value(row: dict[str, Any], field: str) -> float:
    """`field` may be a path ("rates.16.copy") and have a unit ("parameters / 1e9")."""
    name, _, unit = re.sub(r" ([*/]) ", r"|\1", field).partition("|")
    found = float(at(row, name))
    return found if not unit else found * float(unit[1:]) if unit[0] == "*" else found / float(unit[1:])


def device_of(row: dict[str, Any]) -> str:
    """The device of a row in short: "H200", "4 x H100", "CPU"."""
    name = str(row.get("device") or row.get("machine", {}).get("device") or "CPU")
    gpu = re.search(r"[A-Z]\d{3}", name)
    short, count = "CPU" if gpu is None else gpu[0], row.get("options", {}).get("gpus")
    return short if count is None else f"{count} x {short}"


def test_a_figure_is_its_rows() -> None:
    for what, figure, field, commands, where, device in ROWS:
        named = [row_of(command, where) for command in re.findall(r"`([^`]+)`", commands)]
        assert device == device_of(named[0]), what
        first, *others = [value(each, field.strip("`")) for each in named]
        measured = first / others[0] if others else first
        stated = re.match(r"[\d,.]+", figure)
        assert stated is not None, what
        number = stated[0].replace(",", "")
        decimals = len(number.partition(".")[2])
        off = abs(measured - float(number))
        assert off <= 0.5 * 10 ** -decimals + 1e-9, f"{what}: {figure} is stated, the row has {measured}"


def test_the_readme_states_no_other_figure() -> None:
    page = re.sub(r"```.*?```|`[^`]*`|^    .*?$|\]\([^)]*\)", "", (ROOT / "README.md").read_text(encoding="utf-8"),
                  flags=re.DOTALL | re.MULTILINE)
    peers = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    known = set(re.findall(r"\d[\d,.]*\d|\d", CLAIMS)) | {
        number for row in table_rows(peers, "peers") for number in re.findall(r"[\d.]+", " ".join(row[4:]))}
    stated = re.findall(r"(?<![\w.])\d(?:[\d,.]*\d)?", page)
    assert len(stated) > 30 and not set(stated) - known - NO_RESULTS, sorted(set(stated) - known - NO_RESULTS)


def test_the_comparison_is_its_rows() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    shown = set()
    for system, variant, layers, clipped, *cells in table_rows(page, "peers"):
        for batch, tflops, gib in ((64, *cells[:2]), (16, *cells[2:4])):
            if tflops:
                shown.add((system, variant, int(layers), clipped == "yes", batch, tflops, int(gib), cells[4] or None))
    kept = {(row["system"], row["variant"], row["layers"], row["clipped"], row["batch"],
             "-".join(str(row[key]) for key in ("tflops", "tflops_at_most") if key in row),
             row["peak_device_gib"], row["host_bytes_per_parameter"]) for row in results("peers.jsonl")}
    assert shown == kept


def test_tests_that_are_named_exist() -> None:
    named = re.findall(r"`(?:pytest (?:-s )?)?(tests/[\w/.]+)", CLAIMS)
    assert len(named) >= 6 and all((ROOT / path).exists() for path in named)


def table_after(heading: str, number: int = 0) -> list[list[str]]:
    """The rows of a table of benchmarks/results/README.md: the first, or the one of this number, after a heading."""
    page = (ROOT / "benchmarks" / "results" / "README.md").read_text(encoding="utf-8")
    section = page[page.index(f"\n## {heading}\n"):]
    table = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)[number]
    return [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()[2:]]


@pytest.mark.parametrize("whole_steps", [False, True])
def test_the_tables_of_planning_are_their_rows(whole_steps: bool) -> None:
    kept = {(row["shape"], *(f"{number:.1f}" for number in (
        row["parameters"] / 1e9, row["capture_processor_s"], row["plan_processor_s"], row["capture_s"] + row["plan_s"],
        row["peak_bytes"] / 2**30))) for row in results("planning.jsonl") if row.get("train_step", False) == whole_steps}
    shown = {tuple(row) for row in table_after("What planning takes", int(whole_steps))}
    assert len(shown) == 4 and shown <= kept


def test_the_table_of_tracing_is_its_rows() -> None:
    rows = results("capture.jsonl")
    for family, *cells in table_after("What tracing takes"):
        for columns in (cells[::2], cells[1::2]):
            assert any(columns == [f"{row[f'{what}_processor_s']:.1f}" for what in ("stream", "padded", "evaluation")]
                       for row in rows if row["family"] == family), family


def test_the_table_of_uneven_rows_is_its_rows() -> None:
    kept = {(row["device"].split()[1], str(row["layers"]), f"{row['tokens_per_s']:,}", f"{row['step_s']:.3f}", row["commit"])
            for row in results("rows.jsonl") if "error" not in row}
    shown = {(*row[:2], row[4], *row[6:8]) for row in table_after("Rows of uneven length")}
    assert len(shown) >= 10 and shown <= kept


def test_the_table_of_optimizer_state_is_its_rows() -> None:
    kept = {(f"{row['batch']} x {row['length']:,}", (row["device_memory"] or "default").replace("GiB", " GiB"),
             f"`{row['options'].get('optim', 'adamw')}`" + ", updates on arrival" * row["overlap"], f"{row['tflops']:.0f}",
             f"{row['step_s']:.2f}", f"{row['predicted_step_s']:.2f}", f"{row['host_gib']:.1f}")
            for row in results("optimizer-speed.jsonl")}
    shown = {(*row[:4], *row[5:8]) for row in table_after("Optimizer state")}
    assert len(shown) >= 7 and shown <= kept


def test_the_table_of_plans_with_a_disk_is_its_rows() -> None:
    """Moments on disk keep 0.95 of the rate in memory, except for clipped float32 ones on the slower drives."""
    rows = results("disk-plans.jsonl")
    kept = {(row["moments"], "{read} / {write}".format(**row["drives_gb_s"]), str(row["disk_tiles"]),
             "{read:.0f} / {write:.0f}".format(**row["disk_gb_per_step"]), f"{row['step_s']:.1f}", f"{row['in_memory_s']:.1f}",
             f"{row['ratio']:.3f}", f"`{row['binds']}`") for row in rows if row["host_memory"] == "512GiB"}
    assert {tuple(row) for row in table_after("Optimizer state on disk", 1)} == kept and len(kept) == 8
    slower = {(row["moments"], row["drives_gb_s"]["read"]) for row in rows if row["ratio"] < 0.95}
    assert slower == {("float32", 27)}
    least = {row["host_memory"]: row["ratio"] for row in rows if row["ratio"] < 0.95}
    assert f"{least['512GiB']:.3f}" in CLAIMS and min(row["ratio"] for row in rows if row["ratio"] > 0.95) >= 0.995
