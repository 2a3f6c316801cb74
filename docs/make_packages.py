"""Writes docs/packages.md, and docs/pictures/packages.svg for docs/design.md, from the imports and docstrings of the code.

    python docs/make_packages.py

One test fails if the files are out of date. Another fails if a package imports one that is not before it in `ORDER`.
"""
from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, PICTURE = ROOT / "docs" / "packages.md", ROOT / "docs" / "pictures" / "packages.svg"
#: Where the code is, and the package that it is installed as.
FOLDERS = {"megacompile": "megacompile", "passes": "megacompile.passes", "runtime": "megacompile.runtime"}
#: Each package imports only packages before it, also lazily and for types. An entry is the name of a package, or a name for
#: modules directly in `megacompile/`, followed by the other modules of that rank. `__init__` loads public names on first use.
ORDER = (
    ("base", "errors", "sizes", "limits", "schema", "losses", "version"),
    ("system",), ("compat",), ("codegen",), ("ir", "program", "plan", "text"), ("verify",), ("runtime",), ("frontend",),
    ("passes",),
    ("predict", "timeline", "picture"), ("weights",), ("planning",), ("inputs",), ("streaming",), ("checkpoint",),
    ("public", "api", "loading", "scheduling", "step_page", "capture_report", "mixers", "__init__"),
    ("trainers", "trainer", "sft", "dpo", "kto", "reward", "online_dpo", "grpo", "rloo", "fused_head"),
    ("tools", "training", "inspection", "corpus", "exporting"),
    ("finetuning",), ("inference",),
    ("cli", "__main__"))
#: A sentence for each entry of `ORDER` that is not a package.
SENTENCES = {"base": "What every package may use", "public": "Functions that users import", "cli": "The command line"}
HEAD = """# Packages

This page says what each package is for, to find where a change belongs. The first sentence of a file's docstring says what the
file has. Files without a folder are in `megacompile/`. A package imports only packages below it, lazy and type-only imports
included. `ORDER` in `docs/make_packages.py` has the order, and `tests/lint/test_layout.py` checks it. In the picture an arrow
means "imports". [How megacompile is built](design.md) explains the parts. `python docs/make_packages.py` makes this page.

![The packages](pictures/packages.svg)

| package | what it is | files | lines, about |
|---|---|---|---|
"""
#: Sizes in the picture, in pixels: of a box, and between boxes.
WIDTH, HEIGHT, SPACE = 110, 30, 20


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


def needed_arrows() -> list[tuple[str, str]]:
    """Pairs of packages of which the first imports the second, without arrows that others imply."""
    direct = arrows()
    reached: dict[int, set[int]] = {}
    for number in sorted(direct):
        reached[number] = direct[number].union(*(reached[below] for below in direct[number] if below < number))
    found = []
    for number in sorted(direct, reverse=True):
        below = {other for other in direct[number] if other < number}
        found += [(ORDER[number][0], ORDER[other][0]) for other in sorted(below, reverse=True)
                  if not any(other in reached[between] for between in below)]
    return found


def centers(pairs: Sequence[tuple[str, str]]) -> dict[str, tuple[float, int]]:
    """The center of each package's box. A package is one row below the lowest package that imports it. In a row, packages are
    ordered by the average place of those that import them."""
    rows: dict[str, int] = {}
    for name, *_ in reversed(ORDER):  # only those after it import it
        rows[name] = max((rows[one] + 1 for one, other in pairs if other == name), default=0)
    places: dict[str, float] = {}
    for row in range(max(rows.values()) + 1):
        above = {name: [places[one] for one, other in pairs if other == name] for name in rows if rows[name] == row}
        wanted = {name: sum(found) / len(found) if found else 0.0 for name, found in above.items()}
        middle = sum(wanted.values()) / len(wanted)
        for number, name in enumerate(sorted(wanted, key=wanted.__getitem__)):
            places[name] = middle + (number - (len(wanted) - 1) / 2) * (WIDTH + SPACE)
    left = min(places.values()) - WIDTH / 2 - 1
    return {name: (places[name] - left, row * (HEIGHT + 2 * SPACE) + HEIGHT // 2 + 1) for name, row in rows.items()}


def picture() -> str:
    """The packages as an SVG, from the top down."""
    pairs = needed_arrows()
    boxes = centers(pairs)
    width, height = (max(at[axis] for at in boxes.values()) + size / 2 + 1 for axis, size in enumerate((WIDTH, HEIGHT)))
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
             'font-family="sans-serif" font-size="13">',
             '<defs><marker id="arrow" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
             '<path d="M0,0 L8,4 L0,8 Z" fill="#667"/></marker></defs>',
             f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>']
    for one, other in pairs:
        (x, y), (to_x, to_y) = boxes[one], boxes[other]
        begin, end = y + HEIGHT / 2, to_y - HEIGHT / 2
        lines.append(f'<path d="M{x:g},{begin:g} C{x:g},{begin + SPACE:g} {to_x:g},{end - SPACE:g} {to_x:g},{end:g}" '
                     'fill="none" stroke="#667" marker-end="url(#arrow)"/>')
    for name, (x, y) in boxes.items():
        lines.append(f'<rect x="{x - WIDTH / 2:g}" y="{y - HEIGHT / 2:g}" width="{WIDTH}" height="{HEIGHT}" rx="5" '
                     'fill="#eef2fa" fill-opacity="0.85" stroke="#446"/>'
                     f'<text x="{x:g}" y="{y + 5:g}" text-anchor="middle">{name}</text>')
    return "\n".join([*lines, "</svg>", ""])


def first_sentence(path: Path) -> str:
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".")


def page() -> str:
    """The text of the page. Lines are rounded to hundreds, so that few changes of the code change it."""
    files = source_files()
    rows = []
    for number, names in reversed(list(enumerate(ORDER))):
        own = sorted(module for module in files if rank(module) == number)
        package = next((files[module] for module in own if module.endswith(f".{names[0]}.__init__")), None)
        where = [*([f"{package.parent.relative_to(ROOT)}/"] if package else []),
                 *(files[module].name for module in own if module.count(".") == 1)]
        lines = sum(files[module].read_text().count("\n") for module in own)
        sentence = first_sentence(package) if package else SENTENCES[names[0]]
        rows.append(f"| {', '.join(f'`{each}`' for each in where)} | {sentence} | {len(own)} | {round(lines, -2):,} |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")
