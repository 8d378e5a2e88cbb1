"""A report as CSV of its rows, as a self-contained HTML page, and as HTML for notebooks."""

import csv
import html
import io
import re
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from fp4compile.report.product_row import Row
from fp4compile.report.report_view import Fact, ReportView, duration

# Every selector begins with the class of the fragment: in a notebook, the rules hold for the whole page. A narrow
# window, such as a phone's, shows each line of the table as a card, with the columns' names (`data-name`) above the
# cells.
_STYLE = """
.fp4compile { --back: #fff; --card: #f5f6f7; --text: #1c2024; --soft: #60666d; --line: #dfe2e6; --plain: #a9b0b8;
  --good: #2c8a5b; --bad: #c2482e; background: var(--back); color: var(--text); padding: 1.25em;
  font: 14px/1.45 system-ui, sans-serif; max-width: 1500px; margin: 0 auto; overflow-wrap: anywhere; }
.fp4compile h1 { font-size: 1.3em; margin: 0 0 .8em; }
.fp4compile .facts { display: flex; flex-wrap: wrap; gap: .7em; margin: 0 0 1.3em; }
.fp4compile .facts > div { flex: 1 1 15em; background: var(--card); border-radius: 8px; padding: .7em .9em; }
.fp4compile .facts > .wide { flex-basis: 100%; order: 1; }
.fp4compile dt, .fp4compile .sort { color: var(--soft); font-size: .9em; }
.fp4compile dd { margin: 0; }
.fp4compile .figure { font-size: 1.3em; font-weight: 600; }
.fp4compile table { border-collapse: collapse; width: 100%; margin: 0; color: inherit; font-size: 1em; }
.fp4compile td, .fp4compile th { padding: .4em .6em; text-align: left; vertical-align: top; white-space: normal;
  border: 0; border-bottom: 1px solid var(--line); overflow-wrap: normal; background: none; color: inherit; }
.fp4compile td:first-child { overflow-wrap: anywhere; min-width: 11em; width: 22%; }
.fp4compile td:last-of-type { overflow-wrap: anywhere; }
.fp4compile th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
.fp4compile .number { text-align: right; font-variant-numeric: tabular-nums; }
.fp4compile th button { all: unset; cursor: pointer; }
.fp4compile th button:focus-visible { outline: 2px solid var(--good); }
.fp4compile th[aria-sort=ascending] button::after { content: " \\25b2"; }
.fp4compile th[aria-sort=descending] button::after { content: " \\25bc"; }
.fp4compile .why { color: var(--soft); }
.fp4compile .bars { width: 16%; min-width: 6em; padding-top: .7em; }
.fp4compile .bar { height: 6px; margin: 1px 0; min-width: 1px; border-radius: 2px; }
.fp4compile .plain { background: var(--plain); }
.fp4compile .planned { background: var(--good); }
.fp4compile .slower { background: var(--bad); }
.fp4compile .notes { color: var(--soft); font-size: .9em; margin: 1em 0 0; }
.fp4compile .sort { display: none; margin: 0 0 .7em; }
.fp4compile .sort select { font: inherit; color: var(--text); background: var(--card); border: 1px solid var(--line); }
@media (prefers-color-scheme: dark) { .fp4compile { --back: #16181b; --card: #212429; --text: #e6e8ea; --soft: #9ba2aa;
  --line: #33383e; --plain: #6a727b; --good: #4fbf8b; --bad: #e57255; } }
@media (max-width: 1100px) {
.fp4compile { padding: .8em; }
.fp4compile thead { display: none; }
.fp4compile .sort { display: block; }
.fp4compile table, .fp4compile tbody { display: block; }
.fp4compile tr { display: grid; grid-template-columns: repeat(auto-fill, minmax(6.5em, 1fr)); gap: .3em .8em;
  padding: .7em .9em; margin: 0 0 .6em; background: var(--card); border-radius: 8px; }
.fp4compile td { border: 0; padding: 0; min-width: 0; }
.fp4compile td:empty { display: none; }
.fp4compile td::before { content: attr(data-name); display: block; color: var(--soft); font-size: .8em; }
.fp4compile td:first-child, .fp4compile .why, .fp4compile .bars { grid-column: 1 / -1; width: auto; }
.fp4compile td:first-child { font-weight: 600; min-width: 0; }
.fp4compile td:first-child::before, .fp4compile .bars::before { display: none; }
.fp4compile .bars { padding: .2em 0 0; }
.fp4compile .number { text-align: left; }
}
"""
# Makes the columns' names buttons that sort, and fills the selector that replaces them on a phone.
_SCRIPT = """
for (const root of document.querySelectorAll(".fp4compile")) {
  const body = root.querySelector("tbody"), heads = [...root.querySelectorAll("th:not(.bars)")];
  const choice = root.querySelector(".sort select"), first = body ? [...body.rows] : [];
  if (!body) continue;
  const value = (row, place) => row.cells[place].textContent.replace("<", "");
  const sort = (place, down) => {
    const number = heads[place].classList.contains("number"), sign = down ? -1 : 1;
    const compare = (a, b) => number ? (parseFloat(a) || 0) - (parseFloat(b) || 0) : a.localeCompare(b);
    const rows = [...first].sort((a, b) => sign * compare(value(a, place), value(b, place)));
    heads.forEach((head, each) => head.setAttribute("aria-sort",
      each !== place ? "none" : down ? "descending" : "ascending"));
    body.append(...rows);
    choice.value = place;
  };
  choice.add(new Option("largest first", ""));
  heads.forEach((head, place) => {
    const button = document.createElement("button"), number = head.classList.contains("number");
    button.append(...head.childNodes);
    head.append(button);
    choice.add(new Option(head.textContent, place));
    const now = () => head.getAttribute("aria-sort");
    button.onclick = () => sort(place, number ? now() !== "descending" : now() === "ascending");
  });
  choice.onchange = () => choice.value === "" ? body.append(...first)
    : sort(+choice.value, heads[choice.value].classList.contains("number"));
}
"""
_BODY = "body { margin: 0; } @media (prefers-color-scheme: dark) { body { background: #16181b; } }"
_DOT = re.compile(r"(?<=\.)")  # where a name may be broken
# The start of a formula. Spreadsheets may drop white space before it, and read wide characters as narrow ones.
_FORMULA = re.compile("[\\s=+@\uff1d\uff0b\uff0d\uff20-]")


def to_csv(rows: Sequence[Row]) -> str:
    """One line for each row, under a line with the names of the fields; an empty cell for None.

    Text that a spreadsheet would read as a formula begins with an apostrophe, which marks it as text.
    """
    out = io.StringIO()
    # All texts are quoted: the writer would leave a carriage return unquoted, and readers would begin a line there.
    writer = csv.DictWriter(out, [one.name for one in fields(Row)], lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writeheader()
    writer.writerows({name: _no_formula(value) for name, value in asdict(row).items()} for row in rows)
    return out.getvalue()


def _no_formula(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def to_html(view: ReportView) -> str:
    """A page that needs no other file: the view's `fragment`, and a script that sorts the table."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(view.title)}</title><style>{_BODY}</style></head>\n"
        f"<body>{fragment(view)}<script>{_SCRIPT}</script></body></html>\n"
    )


def fragment(view: ReportView) -> str:
    """The view as HTML for a page or a notebook; with bars in the table where times are predicted."""
    facts = "".join(map(_fact, view.facts))
    notes = "".join(f"<div>{html.escape(note)}</div>" for note in view.notes)
    return (
        f'<div class="fp4compile"><style>{_STYLE}</style><h1>{html.escape(view.title)}</h1>\n'
        + (f'<dl class="facts">{facts}</dl>\n' if facts else "")
        + (_table(view) if view.lines else "")
        + f'<div class="notes">{notes}</div></div>'
    )


def _fact(fact: Fact) -> str:
    figure = f'<dd class="figure">{html.escape(fact.figure)}</dd>' if fact.figure else ""
    details = "".join(f"<dd>{html.escape(detail)}</dd>" for detail in fact.details)
    wide = ' class="wide"' if len(fact.details) > 1 or not fact.figure else ""
    return f"<div{wide}><dt>{html.escape(fact.label)}</dt>{figure}{details}</div>"


def _table(view: ReportView) -> str:
    longest = max((max(line.seconds) for line in view.lines if line.seconds is not None), default=0.0)
    classes = ["number" if column.numeric else "" for column in view.columns]
    classes[-1] += " why" * (len(classes) > 1 and not view.columns[-1].numeric)
    head = "".join(
        _cell("th", html.escape(column.name), kind) for column, kind in zip(view.columns, classes, strict=True)
    )
    head += _cell("th", "before (grey), after", "bars") if longest else ""
    body = []
    for line in view.lines:
        cells = "".join(
            _cell("td", _DOT.sub("<wbr>", html.escape(cell)) if place == 0 else html.escape(cell), kind, column.name)
            for place, (cell, column, kind) in enumerate(zip(line.cells, view.columns, classes, strict=True))
        )
        bars = _cell("td", "" if line.seconds is None else _bars(*line.seconds, longest), "bars") if longest else ""
        body.append(f"<tr>{cells}{bars}</tr>\n")
    return (
        '<label class="sort">sorted by <select></select></label>'
        f"<table><thead><tr>{head}</tr></thead>\n<tbody>{''.join(body)}</tbody></table>\n"
    )


def _cell(tag: str, content: str, kind: str, name: str = "") -> str:
    attributes = {"class": kind.strip(), "data-name": html.escape(name)}
    given = "".join(f' {key}="{value}"' for key, value in attributes.items() if value)
    return f"<{tag}{given}>{content}</{tag}>"


def _bars(plain: float, planned: float, longest: float) -> str:
    """A bar for each time, whose width is a share of the cell's."""
    kinds = (("plain", plain), ("planned" if planned <= plain else "slower", planned))
    return "".join(
        f'<div class="bar {kind}" style="width:{100 * seconds / longest:.1f}%" title="{duration(seconds)}"></div>'
        for kind, seconds in kinds
    )
