"""Sphinx configuration: `make docs` builds the pages of this folder and the API reference into build/docs.

Docstrings of the package are plain text: single backticks around code, and lines such as "name: what it is", continued
by indented lines. `_to_rst` makes reStructuredText of them.
"""

import re

project = "fp4compile"
copyright = "the fp4compile authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = []
html_theme = "furo"
html_title = "fp4compile"
html_copy_source = False
html_show_sphinx = False
# Anchors of headings, so that pages link to each other's sections as on a code host. A link that leads nowhere is a
# warning, and `make docs` makes errors of warnings.
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
add_module_names = False
default_role = "code"
smartquotes = False

# Generated pages of measured results are no documents of this folder: a reader of the built pages downloads them.
_RESULTS = re.compile(r"\[([^\]]+)\]\((\.\./benchmarks/results/\w+\.md)\)")
_FIELD = re.compile(r"([A-Za-z_]\w*(?:(?:, | \.\.\. )[A-Za-z_]\w*)*): +(.*)")
_MARKUP = re.compile(r"[*|\\]|_(?!\w)")


def _escaped(text: str) -> str:
    """Plain text without what reStructuredText would take for markup; code in backticks stays."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else _MARKUP.sub(r"\\\g<0>", part) for part in parts)


def _paragraphs(lines: list[str]) -> list[list[str]]:
    """Runs of lines that are not empty."""
    found: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            found[-1].append(line.rstrip())
        elif found[-1]:
            found.append([])
    return [paragraph for paragraph in found if paragraph]


def _paragraph_to_rst(paragraph: list[str]) -> list[str]:
    """A paragraph, a literal block where all of it is indented, or a list where its first line describes a name."""
    if all(line.startswith("    ") for line in paragraph):
        return ["::", "", *paragraph, ""]
    entries: list[str] = []
    for line in paragraph:
        field = _FIELD.fullmatch(line)
        if field is not None and field[1] not in ("Raises", "Returns"):
            entries.append(f"* **{field[1]}**: {_escaped(field[2])}".replace("_*", r"\_*"))
        elif entries:
            entries[-1] += " " + _escaped(line.strip())
        else:
            return [_escaped(one.strip()) for one in paragraph] + [""]
    return [*entries, ""]


def _to_rst(app, what, name, obj, options, lines: list[str]) -> None:
    """Handler of autodoc's event: replaces the lines of a docstring."""
    lines[:] = [line for paragraph in _paragraphs(lines) for line in _paragraph_to_rst(paragraph)]


def _results_to_downloads(app, name: str, text: list[str]) -> None:
    """Handler of Sphinx's event: replaces links to generated pages in a document's text."""
    text[0] = _RESULTS.sub(lambda link: f"{{download}}`{' '.join(link[1].split())} <{link[2]}>`", text[0])


def setup(app) -> dict[str, bool]:
    app.connect("source-read", _results_to_downloads)
    app.connect("autodoc-process-docstring", _to_rst)
    return {"parallel_read_safe": True}
