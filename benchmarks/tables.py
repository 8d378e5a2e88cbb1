"""The tables in the pages of measured results, made from the JSON files in benchmarks/results.

    python -m benchmarks.tables            # writes the tables into their pages
    python -m benchmarks.tables --check    # exits with 1 where a page is out of date, and changes nothing

Pages are hand-written Markdown, in docs/ and beside the JSON files. A page names each of its tables:

    <!-- table: rows training_step_h100.json
    case | ms @1 | over bf16 = of bf16 @2
    -->
    (what this script writes)
    <!-- end -->

`rows` shows the rows of a file, in columns `header = key @format`. A key alone is its own header; part.key is a key of
a part of the row; @2 means two digits, `cells.FORMATS` has the other formats; without columns, all are shown.
FILE.json#part names the part of a file that has the rows. Any other name is a function of `cells`, called with the
content of each file. Needs nothing but Python.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import cells
from benchmarks.cells import Cells

ROOT = Path(__file__).parents[1]
DOCS, RESULTS = ROOT / "docs", Path(__file__).parent / "results"
_MARKED = re.compile(r"(<!-- table: (.*?)-->\n).*?(<!-- end -->)", re.DOTALL)
# What was done there, where it is not "Measured on", by the beginning of a file's name.
HOW = {
    "machine_code": "Compiled ahead of time:", "simulation": "Executed in the simulator, with",
    "simulated_mutations": "Executed in the simulator, with", "simulated_models": "Executed in the simulator on",
    "reach": "Compiled for GPUs that are not there, on", "zoo": "Run on", "ecosystem": "Run on",
    "roofline": "Predicted; measured on", "llama_block": "Predicted; measured on",
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """One table of a page, as its marker says.

    name: "rows", or a function of `cells`. files: JSON files in benchmarks/results, with the part after "#", if any.
    columns: of rows.
    """

    name: str
    files: tuple[str, ...]
    columns: str

    @staticmethod
    def of(marker: str) -> "Table":
        first, _, columns = marker.partition("\n")
        name, *files = first.split()
        return Table(name, tuple(files), " ".join(columns.split()))

    @property
    def function(self) -> Any:
        """The cells of the table by the files' contents; None for an unknown name."""
        return getattr(cells, self.name, None)

    def environments(self) -> list[dict[str, Any]]:
        """Where and with what each file, or the part of one, was measured."""
        return [_environment(file) for file in self.files]

    def cells(self) -> Cells:
        """The header and the rows."""
        contents = [_part(file) for file in self.files]
        if self.name != "rows":
            return self.function(*contents)
        (rows,) = (content["rows"] if isinstance(content, dict) else content for content in contents)
        rows = [row for row in rows if "skipped" not in row]
        if not self.columns:
            return [list(rows[0]), *([cells.figure(key, value) for key, value in row.items()] for row in rows)]
        columns = [_column(text) for text in self.columns.split(" | ")]
        header = [title for title, _, _ in columns]
        return [header, *([_formatted(_value(row, key), how) for _, key, how in columns] for row in rows)]

    def lines(self, folder: str = "") -> list[str]:
        """The table in Markdown, under a line that says where, with what and when it was measured.

        folder: the way from the page to the files, such as "../benchmarks/results/".
        """
        header, *rows = self.cells()
        names = [file.partition("#")[0] for file in self.files]
        origins = (
            f"{_origin(name, environment)} ([{name}]({folder}{name}))."
            for name, environment in zip(names, self.environments(), strict=True)
        )
        rule = ["---"] + ["--:"] * (len(header) - 1)
        return [" ".join(origins), "", *map(_line, (header, rule, *rows)), ""]


def _column(text: str) -> tuple[str, str, str]:
    """(header, key, format) of `header = key @format`."""
    text, _, how = text.strip().partition(" @")
    title, _, key = text.partition(" = ")
    return title, key or title, how


def _value(row: dict[str, Any], key: str) -> Any:
    """Of "part.key", what the part of the row has under the key; None where it lacks it."""
    part, _, within = key.partition(".")
    return (row.get(part) or {}).get(within) if within and key not in row else row.get(key)


def _formatted(value: Any, how: str) -> Any:
    if not how or value is None:
        return value
    return cells.number(value, int(how)) if how.isdigit() else cells.FORMATS[how](value)


def _content(file: str) -> dict[str, Any]:
    return json.loads((RESULTS / file.partition("#")[0]).read_text(encoding="utf-8"))


def _part(file: str) -> Any:
    content = _content(file)
    for key in filter(None, file.partition("#")[2].split(".")):
        content = content[key]
    return content


def _environment(file: str) -> dict[str, Any]:
    """Of the content, or of the earlier run in it that the part is of."""
    content = _content(file)
    earlier = content.get(file.partition("#")[2].partition(".")[0])
    within = earlier if isinstance(earlier, dict) and "environment" in earlier else content
    return within["environment"] if "environment" in within else cells.environment_of_runs(within)


def _origin(name: str, environment: dict) -> str:
    how = next((words for begin, words in HOW.items() if name.startswith(begin)), "Measured on")
    facts = [environment["device"]]
    if "cpus" in environment:
        facts.append(f"{environment['cpus']} CPU cores")
    facts += [f"torch {environment['torch']}", f"Triton {environment['triton']}"]
    if "python" in environment:
        facts.append(f"Python {environment['python']}")
    return f"{how} {', '.join((*facts, environment['date']))}"


def _line(cells: list[Any]) -> str:
    return "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |"


def tables_of(text: str) -> list[Table]:
    """The tables that a page's markers name."""
    return [Table.of(marker) for _, marker, _ in _MARKED.findall(text)]


def filled(text: str, folder: str, page: str) -> str:
    """The text of a page with every table made anew.

    folder: the way from the page to the files. page: its name, for errors. Raises ValueError for an unknown table, and
    for a marker without an end.
    """

    def made(match: re.Match) -> str:
        table = Table.of(match[2])
        if table.name != "rows" and table.function is None:
            raise ValueError(f"{page}: unknown table {table.name!r}; allowed are rows and the functions of cells.py")
        return match[1] + "\n".join(["", *table.lines(folder), match[3]])

    if text.count("<!-- table: ") != len(tables_of(text)):
        raise ValueError(f"{page}: a table has no <!-- end -->")
    return _MARKED.sub(made, text)


def pages() -> Iterator[tuple[Path, str]]:
    """The path of every page with tables, and the text that it should have."""
    for parent, folder in ((DOCS, "../benchmarks/results/"), (RESULTS, "")):
        for path in sorted(parent.glob("*.md")):
            text = path.read_text(encoding="utf-8")
            if "<!-- table: " in text:
                yield path, filled(text, folder, path.name)


def main(arguments: list[str] | None = None) -> int:
    """Write or check the pages; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, exit with 1 where a page is out of date")
    chosen = parser.parse_args(arguments)
    status = 0
    for path, text in pages():
        if not chosen.check:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            print(f"{path} is out of date: run python -m benchmarks.tables", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
