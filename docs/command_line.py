"""The directives `command-line`, every command of `megacompile` with its options as `--help` says them, and `stream-options`,
the table of options of `stream`."""
from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective


class CommandLine(SphinxDirective):
    """Puts a section for each command in its place."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes("\n".join(page()), allow_section_headings=True)


class OptionTable(SphinxDirective):
    """Puts the table in its place."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes("\n".join(options()))


def options() -> Iterator[str]:
    """Markdown: a row for each option of `stream`, with the values that it takes and its default."""
    from megacompile.ir.options import StreamOptions, Takes, rows

    units = {Takes.BYTES: 'bytes, or text such as "24GiB"', Takes.TILES: "names of tiles, as a tuple or text"}
    yield from ("| option | values | default | meaning |", "|---|---|---|---|")
    for name, default, row in rows():
        values = " or ".join(f'"{choice}"' for choice in row.choices) or units.get(row.takes, row.takes.value)
        values += f", at least {row.least}" if row.least else ""
        types = StreamOptions.__annotations__[name].replace(" | None", "").split(" | ")
        taken = " or ".join(f"`{each}`" for each in types) if row.takes is Takes.OTHER else values
        otherwise = row.unset if default is None or row.unset == "none" else repr(default)
        yield f"| `{name}` | {_cell(taken)} | {_cell(otherwise)} | {_cell(row.help)} |"


def page() -> Iterator[str]:
    """Markdown: what each command does, its arguments and its options with their defaults."""
    import typer

    from megacompile.cli import app

    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        yield from (f"## megacompile {name}", "", command.help or "", "")
        shown = [parameter for parameter in command.params if not parameter.hidden]
        if shown:
            yield from ("| option | meaning | default |", "|---|---|---|")
        for parameter in shown:
            argument = parameter.param_type_name == "argument"
            names = parameter.metavar if argument else ", ".join(parameter.opts + parameter.secondary_opts)
            yield f"| `{names}` | {_cell(parameter.help or '')} | {_cell(_default(parameter))} |"
        yield ""


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    value = getattr(parameter.default, "value", parameter.default)
    return "" if value is None or value is False or value == [] else str(value)


def _cell(text: str) -> str:
    """Formats text for one line of a table cell. Only backticks stay markup."""
    return re.sub(r"(`[^`]*`)|([|*<>_\[\]])", lambda found: found[1] or f"\\{found[2]}", " ".join(text.split()))
