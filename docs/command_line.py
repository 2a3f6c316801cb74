"""The directive `command-line`: every command of `megacompile` with its options, as `--help` says them."""
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
    return re.sub(r"([|*<>_\[\]])", r"\\\1", " ".join(text.split()))
