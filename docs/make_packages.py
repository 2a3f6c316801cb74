"""Writes docs/packages.md, and the picture of the packages in docs/design.md, from the imports and docstrings of the code.

    python docs/make_packages.py

One test fails if the files are out of date. Another fails if a package imports one that is not before it in `ORDER`.
"""
from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, DESIGN = ROOT / "docs" / "packages.md", ROOT / "docs" / "design.md"
#: Where the code is, and the package that it is installed as.
FOLDERS = {"megacompile": "megacompile", "passes": "megacompile.passes", "runtime": "megacompile.runtime"}
#: Each package imports only packages before it, also lazily and for types. An entry is the name of a package, or a name for
#: modules directly in `megacompile/`, followed by the other modules of that rank. `__init__` loads public names on first use.
ORDER = (
    ("base", "errors", "sizes", "limits", "schema", "losses", "version"),
    ("system",), ("torch_compat",), ("codegen",), ("ir", "program", "plan", "text"), ("verify",), ("runtime",), ("frontend",),
    ("passes",),
    ("predict", "timeline", "picture"), ("weights",), ("planning",), ("inputs",), ("streaming",), ("checkpoint",),
    ("public", "api", "loading", "scheduling", "capture_report", "__init__"),
    ("trainers", "trainer", "sft", "dpo", "grpo", "rloo", "fused_head"), ("tools", "training", "inspection", "corpus"),
    ("finetuning",), ("inference",), ("bench",),
    ("cli", "__main__"))
BEGIN, END = "<!-- packages: made by docs/make_packages.py -->", "<!-- end of packages -->"


def source_files() -> dict[str, Path]:
    """Module name -> file, as if installed."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            found[".".join([package, *path.relative_to(ROOT / folder).with_suffix("").parts])] = path
    return found


def imports(module: str, tree: ast.AST, known: Collection[str]) -> Iterator[str]:
    """The modules of this project that a file imports, at its top or inside a function. `known`: all modules of the project."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "megacompile")
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[:-node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            if source.split(".")[0] == "megacompile":
                names = [f"{source}.{alias.name}" for alias in node.names]
                yield from (name if name in known or f"{name}.__init__" in known else source for name in names)


def rank(module: str) -> int:
    """The index of a module's entry in `ORDER`. `megacompile` itself counts as its `__init__`."""
    inside = module.partition(".")[2].partition(".")[0] or "__init__"
    return next(number for number, names in enumerate(ORDER) if inside in names)


def arrows() -> dict[int, set[int]]:
    """Rank -> the ranks that it imports."""
    files = source_files()
    found: dict[int, set[int]] = {number: set() for number in range(len(ORDER))}
    for module, path in files.items():
        found[rank(module)] |= {rank(name) for name in imports(module, ast.parse(path.read_text()), files)} - {rank(module)}
    return found


def picture() -> str:
    """The packages as a mermaid graph, from the top down. Arrows that others imply are left out."""
    direct = arrows()
    reached: dict[int, set[int]] = {}
    for number in sorted(direct):
        reached[number] = direct[number].union(*(reached[below] for below in direct[number] if below < number))
    lines = ["```mermaid", "graph TD"]
    for number in sorted(direct, reverse=True):
        below = {other for other in direct[number] if other < number}
        needed = {other for other in below if not any(other in reached[between] for between in below)}
        lines += [f"    {ORDER[number][0]} --> {ORDER[other][0]}" for other in sorted(needed, reverse=True)]
    return "\n".join([*lines, "```"])


def first_sentence(path: Path) -> str:
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".")


def page() -> str:
    files = source_files()
    parts = ["# Packages", "", "This page lists every file with the first sentence of its docstring, to find where a change"
             " belongs. A package imports only packages above it on this page. [How megacompile is built](design.md) has the"
             " picture. `python docs/make_packages.py` makes this page.", ""]
    for number, names in enumerate(ORDER):
        own = sorted(module for module in files if rank(module) == number)
        package = next((files[module] for module in own if module.endswith(f".{names[0]}.__init__")), None)
        parts += [f"## {names[0]}", "", *([f"{first_sentence(package)}.", ""] if package else [])]
        parts += ["| file | what it is |", "|---|---|"]
        parts += [f"| `{files[module].relative_to(ROOT)}` | {first_sentence(files[module])} |" for module in own
                  if files[module] != package]
        parts.append("")
    return "\n".join(parts)


def design() -> str:
    """docs/design.md with the current picture."""
    before, _, rest = DESIGN.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{picture()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    DESIGN.write_text(design(), encoding="utf-8")
