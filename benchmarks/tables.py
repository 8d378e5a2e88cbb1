"""The pages of measured results, made from the JSON files in benchmarks/results.

    python -m benchmarks.tables            # writes the pages
    python -m benchmarks.tables --check    # exits with 1 where a page is out of date, and changes nothing

`docs/results.md`, `docs/models.md` and `docs/roofline.md` are hand-written pages with generated tables. Every other
page is generated as a whole and lies beside the JSON files; `benchmarks/pages.py` says what each holds. A new benchmark
adds a function of cells and a page, or a part of one. Needs nothing but Python.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import cells, markdown, summary, zoo_tables
from benchmarks.markdown import RESULTS, Table, table
from benchmarks.pages import PAGES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
_FOLDER = "../benchmarks/results/"  # from a page of DOCS to the files

# The tables of hand-written pages, by page and name.
TABLES: dict[str, dict[str, Table]] = {
    "results.md": {
        "inference": Table(("llama_decode_h100.json", "qwen3_moe_decode_h200.json"), summary.inference),
        "training": table("mlp_block_h100.json", summary.training),
        "accuracy": Table(("minilm_cpu.json", "training_loss_h200.json"), summary.accuracy),
        "quantize": table("quantize_h200.json", summary.quantize),
        "prologues": table("producers_h200.json", summary.prologues),
        "compile_time": Table(
            ("compile_time_cpu.json", "compile_time_h200.json", "mlp_block_h100.json"), summary.compile_time
        ),
    },
    "models.md": {
        "families": table("zoo_cpu.json", zoo_tables.families, how="Run on"),
        "libraries": table("ecosystem.json", zoo_tables.libraries, how="Run on"),
    },
    "roofline.md": {
        "errors": table("roofline_h200.json", cells.roofline_errors, how="Predicted; measured on"),
    },
}


def pages() -> Iterator[tuple[Path, str]]:
    """Every page's path, and the text that it should have."""
    for name, tables in TABLES.items():
        path = DOCS / name
        yield path, markdown.filled(path.read_text(encoding="utf-8"), tables, _FOLDER, name)
    for name, parts in PAGES.items():
        yield RESULTS / name, markdown.written(parts)


def main(arguments: list[str] | None = None) -> int:
    """Write or check the pages; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, exit with 1 where a page is out of date")
    chosen = parser.parse_args(arguments)
    status = 0
    for path, text in pages():
        if not chosen.check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path} is out of date: run python -m benchmarks.tables", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
