"""A view as text of at most `WIDTH` columns."""

import re
from collections.abc import Sequence

from fp4compile.report.report_view import Fact, ReportView

WIDTH = 120
_GAP = "  "
_REASONS = 20  # fewest columns of reasons, if others can shrink
_PREFERRED = 14  # by how much the columns of names and of reasons are wider than others
_WORDS, _NAME_PARTS = re.compile(r"(?<= )"), re.compile(r"(?<=[ .])")


def to_text(view: ReportView) -> str:
    """The title, the summary, the table, and the notes. Wide text is wrapped, not shortened."""
    indent = max((len(fact.label) for fact in view.facts), default=0) + len(_GAP)
    summary = [line for fact in view.facts for line in _fact_lines(fact, indent)]
    notes = [line for note in view.notes for line in wrapped(note, WIDTH)]
    return "\n".join((view.title, *summary, *([""] if view.lines else []), *_table(view), *notes))


def _fact_lines(fact: Fact, indent: int) -> list[str]:
    """The label, and beside it the figure and the details: on one line if there is one detail."""
    texts = [*filter(None, [fact.figure]), *fact.details]
    texts = [": ".join(texts)] if len(fact.details) < 2 else texts
    lines = [line for text in texts for line in wrapped(text, WIDTH - indent)]
    return [f"{'' if place else fact.label:<{indent}}{line}" for place, line in enumerate(lines)]


def _table(view: ReportView) -> list[str]:
    if not view.lines:
        return []
    header = [column.name for column in view.columns]
    rows = [line.cells for line in view.lines]
    widths = _widths(header, rows)
    numeric = [column.numeric for column in view.columns]
    rule = "-" * (sum(widths) + len(_GAP) * (len(widths) - 1))
    lines = [line for row in rows for line in _row(row, widths, numeric)]
    return [*_row(header, widths, numeric), rule, *lines, rule]


def _widths(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """The columns' widths. Where they do not fit, headers break at spaces, and the widest columns shrink."""
    room = WIDTH - len(_GAP) * (len(header) - 1)
    cells = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths = [max(len(name), cell) for name, cell in zip(header, cells, strict=True)]
    if sum(widths) > room:
        widths = [max(cell, *map(len, name.split())) for name, cell in zip(header, cells, strict=True)]
    while sum(widths) > room:
        pressed = [widths[0] - _PREFERRED, *widths[1:]]
        pressed[-1] -= _PREFERRED * (widths[-1] <= _REASONS)
        widths[pressed.index(max(pressed))] -= 1
    return widths


def _row(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> list[str]:
    """The lines of a row. The first column holds names, which may break after their dots."""
    parts = [wrapped(cell, width, _WORDS if place else _NAME_PARTS)
             for place, (cell, width) in enumerate(zip(cells, widths, strict=True))]  # fmt: skip
    found = []
    for number in range(max(map(len, parts))):
        line = [part[number] if number < len(part) else "" for part in parts]
        texts = (text.rjust(width) if right else text.ljust(width)
                 for text, width, right in zip(line, widths, numeric, strict=True))  # fmt: skip
        found.append(_GAP.join(texts).rstrip())
    return found


def wrapped(text: str, width: int, ends: re.Pattern = _WORDS) -> list[str]:
    """The text in lines of at most this width, broken where `ends` matches, or inside of longer words."""
    lines = [""]
    for piece in ends.split(text):
        if len(lines[-1]) + len(piece.rstrip()) > width and lines[-1]:
            lines.append("")
        while len(piece.rstrip()) > width:
            lines[-1:] = [piece[:width], ""]
            piece = piece[width:]
        lines[-1] += piece
    return [line.rstrip() for line in lines if line.strip()] or [""]
