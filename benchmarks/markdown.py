"""Tables and pages in Markdown, made from the JSON files in benchmarks/results. Needs nothing but Python.

Two kinds of page hold tables. A generated page is a sequence of texts and tables. A hand-written page has, between the
lines `<!-- table: NAME -->` and `<!-- end -->`, one generated table each.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cells import Cells, CellsOf

RESULTS = Path(__file__).parent / "results"
_MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """One generated table.

    files: names of JSON files in benchmarks/results. cells: header and rows, from the contents of these files, an
    argument each. environment: the part of a content that says where and with what it was measured. how: what was done
    there.
    """

    files: tuple[str, ...]
    cells: Callable[..., Cells]
    environment: Callable[[dict], dict] = lambda content: content["environment"]
    how: str = "Measured on"

    def lines(self, folder: str = "") -> list[str]:
        """The table in Markdown, under a line that says where, with what and when it was measured.

        folder: the way from the page to the files, such as "../benchmarks/results/".
        """
        contents = [json.loads((RESULTS / file).read_text(encoding="utf-8")) for file in self.files]
        header, *rows = self.cells(*contents)
        origins = [
            f"{_origin(self.how, self.environment(content))} ([{file}]({folder}{file}))."
            for file, content in zip(self.files, contents, strict=True)
        ]
        return [
            " ".join(origins),
            "",
            _line(header),
            _line(["---"] + ["--:"] * (len(header) - 1)),
            *map(_line, rows),
            "",
        ]


def table(file: str, cells: CellsOf, **others: Any) -> Table:
    """The table of one file."""
    return Table((file,), cells, **others)


def _origin(how: str, environment: dict) -> str:
    facts = [environment["device"]]
    if "cpus" in environment:
        facts.append(f"{environment['cpus']} CPU cores")
    facts.append(f"torch {environment['torch']}")
    facts.append(f"Triton {environment['triton']}")
    if "python" in environment:
        facts.append(f"Python {environment['python']}")
    facts.append(environment["date"])
    return f"{how} {', '.join(facts)}"


def _line(cells: list[Any]) -> str:
    return "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |"


def written(parts: Sequence[str | Table]) -> str:
    """A generated page in benchmarks/results: its parts, one after the other. The first part begins with the title."""
    lines: list[str] = []
    for part in parts:
        lines += part.lines() if isinstance(part, Table) else [part.strip(), ""]
    return "\n".join(lines)


def filled(text: str, tables: Mapping[str, Table], folder: str, page: str) -> str:
    """The text of a hand-written page with every table made anew.

    tables: those that the page has, by name. folder: the way from the page to the files. page: its name, for errors.

    Raises ValueError for a table that is not known, and where a known one is not in the text.
    """
    missing = [name for name in tables if f"<!-- table: {name} -->" not in text]
    if missing:
        raise ValueError(f"{page}: no place for the tables {', '.join(missing)}")

    def made(match: re.Match) -> str:
        if match[2] not in tables:
            raise ValueError(f"{page}: unknown table {match[2]!r}; allowed are {', '.join(tables)}")
        return match[1] + "\n".join(["", *tables[match[2]].lines(folder), match[3]])

    return _MARKED.sub(made, text)
