"""A report as a file: CSV of its rows, and one self-contained HTML page; its table as HTML for notebooks."""

import csv
import html
import io
import re
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from fp4compile.report.product_row import Row
from fp4compile.report.row_classes import Group

# Every selector begins with the class of the fragment: in a notebook, the rules hold for the whole page.
_STYLE = """
.fp4compile { font: 14px sans-serif; }
.fp4compile table { border-collapse: collapse; }
.fp4compile td, .fp4compile th { padding: 2px 10px; text-align: left; border-bottom: 1px solid #ddd; }
.fp4compile .bar { height: 8px; margin: 1px 0; min-width: 1px; }
.fp4compile .plain { background: #999; }
.fp4compile .planned { background: #4a7; }
.fp4compile .slower { background: #c54; }
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


def to_html(title: str, body: str) -> str:
    """A page that needs no other file, of a `fragment`."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title></head>\n'
        f'<body style="margin: 2em">{body}</body></html>\n'
    )


def groups_fragment(
    title: str, groups: Sequence[Group], header: Sequence[str], cells: Sequence[Sequence[str]], notes: str
) -> str:
    """The table of the groups. Where times are predicted, a bar for bf16 and a bar for the plan.

    header, cells, notes: as for `fragment`; a line of cells for each group.
    """
    longest = max((group.plain_seconds or 0 for group in groups), default=0) or None
    if longest is None:
        return fragment(title, header, cells, notes)
    longest = max(longest, *(group.seconds or 0 for group in groups))
    bars = [_bars(group, longest) for group in groups]
    return fragment(title, [*header, "bf16 (grey), as planned"], cells, notes, bars)


def fragment(
    title: str, header: Sequence[str], cells: Sequence[Sequence[str]], notes: str, last: Sequence[str] = ()
) -> str:
    """A heading, a table and text, which a page or a notebook shows.

    header, cells: the table's header and lines. notes: plain text below the table. last: markup of one more cell at the
    end of each line; () for none.
    """
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = []
    for index, line in enumerate(cells):
        row = "".join(f"<td>{html.escape(cell)}</td>" for cell in line)
        body.append(f"<tr>{row}{f'<td>{last[index]}</td>' if last else ''}</tr>")
    return (
        f'<div class="fp4compile"><style>{_STYLE}</style><h3>{html.escape(title)}</h3>\n<table><tr>{head}</tr>\n'
        + "\n".join(body) + f"\n</table>\n<pre>{html.escape(notes)}</pre></div>"
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
