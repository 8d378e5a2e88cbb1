"""A report as a file: CSV of its rows, and one self-contained HTML page."""

import csv
import html
import io
import re
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from fp4compile.report.product_row import Row
from fp4compile.report.row_classes import Group

_STYLE = """
body { font: 14px sans-serif; margin: 2em; }
table { border-collapse: collapse; }
td, th { padding: 2px 10px; text-align: left; border-bottom: 1px solid #ddd; }
.bar { height: 8px; margin: 1px 0; min-width: 1px; }
.plain { background: #999; }
.planned { background: #4a7; }
.slower { background: #c54; }
"""
# The start of a formula. Spreadsheets may drop white space before it, and read wide characters as narrow ones.
_FORMULA = re.compile("[\\s=+@\uff1d\uff0b\uff0d\uff20-]")
_WIDTH = 300  # pixels of the longest bar


def to_csv(rows: Sequence[Row]) -> str:
    """One line for each row, under a line with the names of the fields; an empty cell for None.

    A text that a spreadsheet would take for a formula has an apostrophe in front, as spreadsheets mark text.
    """
    out = io.StringIO()
    # All texts are quoted: the writer would leave a carriage return unquoted, and readers would begin a line there.
    writer = csv.DictWriter(out, [one.name for one in fields(Row)], lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writeheader()
    writer.writerows({name: _no_formula(value) for name, value in asdict(row).items()} for row in rows)
    return out.getvalue()


def _no_formula(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def to_html(
    title: str, groups: Sequence[Group], header: Sequence[str], cells: Sequence[Sequence[str]], notes: str
) -> str:
    """A page with the table of the groups. Where times are predicted, a bar for bf16 and a bar for the plan.

    header, cells: the table's header, and a line of cells for each group. notes: plain text below the table.
    """
    longest = max((group.plain_seconds or 0 for group in groups), default=0) or None
    if longest is not None:
        longest = max(longest, *(group.seconds or 0 for group in groups))
    bars = [_bars(group, longest) for group in groups] if longest else []
    head = "".join(
        f"<th>{html.escape(name)}</th>" for name in (*header, *(["bf16 (grey), as planned"] if bars else []))
    )
    body = []
    for index, line in enumerate(cells):
        row = "".join(f"<td>{html.escape(cell)}</td>" for cell in line)
        body.append(f"<tr>{row}{f'<td>{bars[index]}</td>' if bars else ''}</tr>")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n<table><tr>{head}</tr>\n"
        + "\n".join(body) + f"\n</table>\n<pre>{html.escape(notes)}</pre></body></html>\n"
    )  # fmt: skip


def _bars(group: Group, longest: float) -> str:
    if group.plain_seconds is None or group.seconds is None:
        return ""
    planned = "planned" if group.seconds <= group.plain_seconds else "slower"
    bars = []
    for kind, seconds in (("plain", group.plain_seconds), (planned, group.seconds)):
        width = _WIDTH * seconds / longest
        bars.append(f'<div class="bar {kind}" style="width:{width:.1f}px" title="{1e6 * seconds:.1f} us"></div>')
    return "".join(bars)
