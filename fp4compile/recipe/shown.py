"""Recipes as a person sees them: the fields that differ from the defaults, in one line and as a table of a notebook."""

import html
from typing import Any

_SHOWN = 8  # longer tuples, such as the static scales of a whole model, are counted


def line(fields: dict[str, Any]) -> str:
    """`Recipe(name='nvfp4', ...)`. fields: those that differ from the defaults."""
    return f"Recipe({', '.join(f'{name}={_short(value)}' for name, value in fields.items())})"


def table(fields: dict[str, Any]) -> str:
    """The same as HTML, a line for each field."""
    cells = "".join(
        f"<tr><td>{html.escape(name)}</td><td><code>{html.escape(_short(value))}</code></td></tr>"
        for name, value in fields.items()
    )
    return f"<table>{cells}</table>"


def _short(value: Any) -> str:
    return f"<{len(value)} entries>" if isinstance(value, tuple) and len(value) > _SHOWN else repr(value)
