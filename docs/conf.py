"""Settings of the documentation's site: `make docs` builds it with Sphinx, from this folder alone and without network."""
from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import download_reference, pending_xref
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

from command_line import CommandLine, OptionTable  # noqa: E402  (after the path is complete)

from megacompile.version import __version__  # noqa: E402

project = "megacompile"
version = release = __version__
copyright = "the authors of megacompile, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # `page.md#a-heading` is a link, on code hosts too
smartquotes = False

html_theme = "furo"
html_extra_path = ["extra"]  # pages that are made as they are: docs/make_what_fits.py
html_title = f"megacompile {__version__}"
html_show_sourcelink = False
html_copy_source = False

default_role = "code"  # docstrings have single backticks
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

_CODE = re.compile(r"``[^`]+``|`[^`]+`")
_SPECIAL = re.compile(r"[*|]|(?<=\w)_(?=\W|$)")
_SECTION = re.compile(r"(Args|Arguments|Attributes|Returns|Yields|Raises|Notes?|Examples?):")
_PAGE = re.compile(r"(?:docs/)?([\w-]+(?:/[\w-]+)*)\.md(?:#([\w-]+))?")


def plain_to_rst(lines: Iterable[str]) -> list[str]:
    """A plain docstring as reStructuredText. Single backticks are code, indented paragraphs and tables (paragraphs with a
    hanging indent) stay as they are, and nothing else is markup."""
    made: list[str] = []
    whole = _CODE.sub(lambda code: " ".join(code[0].split()), "\n".join(lines))
    indent = 0  # of the last line
    for paragraph in re.split(r"\n[ ]*\n", whole.strip("\n")):
        rows = paragraph.splitlines()
        here, *others = (len(row) - len(row.lstrip()) for row in rows)
        section = _SECTION.fullmatch(rows[0]) is not None
        hanging = here == 0 and any(others) and not section and not rows[0].startswith(("- ", "* "))
        if here > indent or hanging:
            made += [" " * indent + "::", "", *(f"    {row}" if hanging else row for row in rows), ""]
            continue  # the text goes on where it was
        made += [*map(_marked_up, rows), ""]
        indent = others[-1] if section and others else here
    return made[:-1]


def _marked_up(line: str) -> str:
    parts, end = [], 0
    for code in _CODE.finditer(line):
        parts += [_SPECIAL.sub(r"\\\g<0>", line[end:code.start()]), f"``{code[0].strip('`')}``"]
        end = code.end()
        if line[end:end + 1].isalnum():
            parts.append("\\ ")  # "`step`s": what follows code at once would be a part of it
    return "".join([*parts, _SPECIAL.sub(r"\\\g<0>", line[end:])])


def read_docstring(app: Sphinx, what: str, name: str, subject: object, options: Any, lines: list[str]) -> None:
    lines[:] = plain_to_rst(lines)


class LinkPages(SphinxTransform):
    """`docs/limits.md` in backticks links to that page; a page that does not exist is a warning, and so an error."""

    default_priority = 15

    def apply(self, **kwargs: Any) -> None:
        for literal in list(self.document.findall(nodes.literal)):
            match = _PAGE.fullmatch(literal.astext())
            if match is None or isinstance(literal.parent, nodes.reference | pending_xref | nodes.title):
                continue
            if match[1] not in self.env.found_docs and (DOCS.parent / f"{match[1]}.md").exists():
                continue  # the site has no page for it, such as `benchmarks/claims.md`
            page = "/" + match[1]
            if page[1:] not in self.env.found_docs:
                page = match[1] if match[1] in self.env.found_docs else page
            link = pending_xref("", literal.deepcopy(), refdomain="std", reftype="doc", reftarget=page, refexplicit=True,
                                refdoc=self.env.docname, refwarn=True)
            literal.replace_self(link)


class LinkFiles(SphinxTransform):
    """A link to a Markdown file outside of this folder, such as `../benchmarks/claims.md`, downloads the file."""

    default_priority = 15

    def apply(self, **kwargs: Any) -> None:
        for link in list(self.document.findall(pending_xref)):
            target = Path(f"{link['reftarget']}.md")
            if link.get("refdomain") == "doc" and target.is_relative_to(DOCS.parent) and target.exists():
                path = f"/../{target.relative_to(DOCS.parent).as_posix()}"
                link.replace_self(download_reference("", "", *link.children, refdoc=self.env.docname, reftarget=path))


def setup(app: Sphinx) -> None:
    app.add_directive("command-line", CommandLine)
    app.add_directive("stream-options", OptionTable)
    app.add_transform(LinkPages)
    app.add_transform(LinkFiles)
    app.connect("autodoc-process-docstring", read_docstring, priority=400)  # before napoleon, at 500
