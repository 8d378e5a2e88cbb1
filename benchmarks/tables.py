"""The tables of docs/measured.md, and one of docs/roofline.md, made from the JSON files in benchmarks/results.

    python -m benchmarks.tables            # writes the tables into the pages
    python -m benchmarks.tables --check    # exits with 1 where a page is out of date, and changes nothing

A page holds hand-written text and, between the lines `<!-- table: NAME -->` and `<!-- end -->`, one generated table
each. A table is a function of the content of one file: a new benchmark adds a function, an entry of TABLES and two
lines in the page. Needs nothing but Python.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import cells as of
from benchmarks import machine_code_tables
from benchmarks.cells import Cells

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "measured.md"
ROOFLINE_PAGE = ROOT / "docs" / "roofline.md"
_MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """One generated table.

    file: name of the JSON file in benchmarks/results. cells: header and rows, from the content of the file.
    environment: the part of the content that says where and with what it was measured. how: what was done there.
    """

    file: str
    cells: Callable[[dict], Cells]
    environment: Callable[[dict], dict] = lambda content: content["environment"]
    how: str = "Measured on"

    def lines(self) -> list[str]:
        """The table in Markdown, under a line that says where, with what and when it was measured."""
        content = json.loads((RESULTS / self.file).read_text(encoding="utf-8"))
        header, *rows = self.cells(content)
        return [
            _provenance(self.how, self.environment(content), self.file),
            "",
            _line(header),
            _line(["---"] + ["--:"] * (len(header) - 1)),
            *map(_line, rows),
            "",
        ]


def _provenance(how: str, environment: dict, file: str) -> str:
    facts = [environment["device"]]
    if "cpus" in environment:
        facts.append(f"{environment['cpus']} CPU cores")
    facts.append(f"torch {environment['torch']}")
    facts.append(f"Triton {environment['triton']}")
    if "python" in environment:
        facts.append(f"Python {environment['python']}")
    facts.append(environment["date"])
    return f"{how} {', '.join(facts)} ([{file}](../benchmarks/results/{file}))."


def _line(cells: list[Any]) -> str:
    return "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |"


def _environment_of_earlier(content: dict) -> dict:
    return content["earlier"]["environment"]


TABLES = {
    "minilm": Table("minilm_cpu.json", of.minilm),
    "minilm_settings": Table("minilm_settings_cpu.json", of.minilm_settings),
    "compile_time": Table("compile_time_cpu.json", of.compile_time),
    "compile_time_llama": Table("compile_time_h200.json", of.compile_time_llama),
    "quantize": Table("quantize_h200.json", of.quantize),
    "quantize_small": Table("quantize_h200.json", of.quantize_small),
    **{
        f"producers_{part}": Table("producers_h200.json", of.part_of(part))
        for part in ("rows", "values", "train", "prefill", "decode")
    },
    **{
        f"producers_{part}_earlier": Table("producers_h200.json", of.part_of(part, "earlier"), _environment_of_earlier)
        for part in ("both", "train")
    },
    **{f"scale_sweep_{part}": Table("scale_sweep_h200.json", of.part_of(part)) for part in ("rows", "values")},
    **{f"packing_{part}": Table("packing_h200.json", of.part_of(part)) for part in ("rows", "load")},
    "linear": Table("linear_h200.json", of.linear),
    "linear_together": Table("linear_h200.json", of.linear_together),
    "ceilings": Table("ceilings_h200.json", of.ceilings),
    "ceilings_copies": Table("ceilings_h200.json", of.ceilings_copies),
    "llama_decode": Table("llama_decode_h200.json", of.llama_decode),
    "llama_decode_earlier": Table("llama_decode_h200.json", of.llama_decode_earlier, _environment_of_earlier),
    "before_and_after_decode": Table("before_and_after_h200.json", of.before_and_after_decode, lambda content: content),
    "before_and_after_mlp": Table("before_and_after_h200.json", of.before_and_after_mlp, lambda content: content),
    "before_and_after_quantize": Table(
        "before_and_after_h200.json", of.before_and_after_quantize, lambda content: content
    ),
    "before_and_after_host": Table(
        "before_and_after_h200.json", of.before_and_after_host, lambda content: content["host"]
    ),
    "mlp_block": Table("mlp_block_h200.json", of.mlp_block),
    "mlp_block_busy": Table(
        "mlp_block_h200.json", of.mlp_block_busy, lambda content: _of_several(content["on a busy host"])
    ),
    "training_loss": Table("training_loss_h200.json", of.training_loss),
    "training_loss_again": Table("training_loss_h200.json", of.training_loss_again),
    "training_loss_texts": Table("training_loss_h200.json", of.training_loss_texts),
    "training_loss_512": Table("training_loss_512_h200.json", of.training_loss),
    "training_loss_with_head": Table("training_loss_with_head_h200.json", of.training_loss),
    "gradient_error": Table("gradient_error_h200.json", of.gradient_error),
    "roofline": Table("roofline_h200.json", of.roofline, how="Predicted; measured on"),
    "roofline_training": Table("roofline_h200.json", of.roofline_training, how="Predicted; measured on"),
    **{
        f"grouped_mm_{part}": Table("grouped_mm_h200.json", of.part_of(part))
        for part in ("decode", "tokens", "growth", "configurations")
    },
    **{
        f"grouped_mm_{part}_earlier": Table(
            "grouped_mm_h200.json", of.part_of(part, "earlier"), _environment_of_earlier
        )
        for part in ("tokens", "weights")
    },
    "qwen3_moe_decode": Table("qwen3_moe_decode_h200.json", of.qwen3_moe_decode),
    **{
        f"training_loss_experts_{device}": Table(f"training_loss_experts_{device}.json", of.training_loss)
        for device in ("h200", "cpu")
    },
    **{
        f"machine_code_{cells.__name__}": Table(
            "machine_code.json", cells, machine_code_tables.environment, "Compiled ahead of time:"
        )
        for cells in (machine_code_tables.below, machine_code_tables.products, machine_code_tables.quantizers)
    },
}


ROOFLINE_TABLES = {"errors": Table("roofline_h200.json", of.roofline_errors, how="Predicted; measured on")}


def _of_several(runs: list[dict]) -> dict:
    """The environment of runs that differ in the number of CPU cores alone, without that number."""
    return {name: value for name, value in runs[0]["environment"].items() if name != "cpus"}


def render(text: str, known: dict[str, Table] = TABLES, page: str = PAGE.name) -> str:
    """The text of a page, which has the known tables, with every one made anew. page: its name, for errors.

    Raises ValueError for a table that is not known, and where a known one is not in the text.
    """
    missing = [name for name in known if f"<!-- table: {name} -->" not in text]
    if missing:
        raise ValueError(f"{page}: no place for the tables {', '.join(missing)}")

    def made(match: re.Match) -> str:
        if match[2] not in known:
            raise ValueError(f"{page}: unknown table {match[2]!r}; allowed are {', '.join(known)}")
        return match[1] + "\n".join(["", *known[match[2]].lines(), match[3]])

    return _MARKED.sub(made, text)


def main(arguments: list[str] | None = None) -> int:
    """Write or check the pages; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, exit with 1 where a page is out of date")
    chosen = parser.parse_args(arguments)
    status = 0
    for path, known in ((PAGE, TABLES), (ROOFLINE_PAGE, ROOFLINE_TABLES)):
        text = path.read_text(encoding="utf-8")
        made = render(text, known, path.name)
        if chosen.check and made != text:
            print(f"{path} is out of date: run python -m benchmarks.tables", file=sys.stderr)
            status = 1
        if not chosen.check:
            path.write_text(made, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
