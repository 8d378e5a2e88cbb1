"""README and docs/: links lead somewhere, generated tables are those of the files, and nothing that a page should
list is missing from it."""

import argparse
import ast
import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import fp4compile
from benchmarks import cells, tables
from fp4compile.formats import formats
from fp4compile.passes import manager
from fp4compile.recipe import Recipe, recipes

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = tables.RESULTS
PAGES = (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md")), *sorted(RESULTS.glob("*.md")))


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def without_code(text: str) -> str:
    """A page's text without blocks and spans of code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


# ---------------------------------------------------------------- README and links


def test_readme_is_short():
    assert len(read(ROOT / "README.md").splitlines()) <= 150


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^()\s]+)\)", without_code(read(page)))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts and MyST make them."""
    text = re.sub(r"^```.*?^```$", "", read(page), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """Links into the repository: file and heading are there. Others are addresses, which are not visited."""
    for link in links(page):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            assert parts.scheme == "https" and "." in parts.netloc, link
            continue
        target = (page.parent / parts.path).resolve() if parts.path else page
        assert target.is_relative_to(ROOT) and target.exists(), link
        if parts.fragment:
            assert parts.fragment in anchors(target), link


def test_every_page_is_in_the_contents():
    tree = "\n".join(re.findall(r"```\{toctree\}(.*?)```", read(DOCS / "index.md"), re.DOTALL))
    assert set(re.findall(r"^(\w+)$", tree, re.MULTILINE)) == {page.stem for page in DOCS.glob("*.md")} - {"index"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_of_toml_are_recipes(page):
    for block in re.findall(r"^```toml\n(.*?)^```$", read(page), re.MULTILINE | re.DOTALL):
        Recipe.from_dict(tomllib.loads(block))


# ---------------------------------------------------------------- the measured results


def generated(*pages: Path) -> list[tables.Table]:
    """Every table of these pages; of all pages by default."""
    return [table for page in pages or PAGES for table in tables.tables_of(read(page))]


def stored(name: str) -> dict:
    return json.loads(read(RESULTS / name))


def test_the_measured_results_are_those_of_the_files():
    assert tables.main(["--check"]) == 0, "run python -m benchmarks.tables"


def test_every_file_of_results_is_on_a_page():
    # `benchmarks.run_all --check` looks at pages of their own that whole runs have; the others are of tests.
    others = ("all_", "versions.json", "gpu_suite.json")
    files = {path.name for path in RESULTS.glob("*.json") if not path.name.startswith(others)}
    in_pages = {file.partition("#")[0] for table in generated(*RESULTS.glob("*.md")) for file in table.files}
    assert files == in_pages == {file.partition("#")[0] for table in generated() for file in table.files}
    pictures = {path.name for path in RESULTS.glob("*.png") if not path.name.startswith("all_")}
    texts = "".join(map(read, RESULTS.glob("*.md")))
    assert pictures == set(re.findall(r"\((\w+\.png)\)", texts))


def test_every_column_is_in_its_file():
    """A key that no row has would be an empty column."""
    for table in generated():
        header, *rows = table.cells()
        assert rows and all(len(row) == len(header) for row in rows), table
        if table.columns:
            assert all(any(row[place] is not None for row in rows) for place in range(len(header))), table


def test_every_generated_page_is_there_and_in_the_contents():
    there = {path.name for path in RESULTS.glob("*.md") if not path.name.startswith("all_")}
    linked = set(re.findall(r"\(\.\./benchmarks/results/(\w+\.md)\)", read(DOCS / "results.md")))
    assert there == linked


def test_every_table_says_where_it_was_measured():
    for table in generated():
        for file, environment in zip(table.files, table.environments(), strict=True):
            assert {"device", "torch", "triton", "date"} <= environment.keys()
            for value in ("device", "torch", "triton", "date"):
                assert environment[value] in table.lines()[0]
            name = file.partition("#")[0]
            assert f"[{name}](folder/{name})" in table.lines("folder/")[0]


@pytest.mark.parametrize("name", ["docs/results.md", "benchmarks/results/quantize.md"])
def test_a_changed_figure_is_noticed(name, tmp_path, monkeypatch, capsys):
    """Of a hand-written page and of a generated one, in copies of both folders."""
    for folder, attribute, source in (("docs", "DOCS", DOCS), ("benchmarks/results", "RESULTS", RESULTS)):
        (tmp_path / folder).mkdir(parents=True)
        for path in source.glob("*.md"):
            (tmp_path / folder / path.name).write_text(read(path), encoding="utf-8")
        for path in source.glob("*.json"):
            (tmp_path / folder / path.name).symlink_to(path)
        monkeypatch.setattr(tables, attribute, tmp_path / folder)
    assert tables.main(["--check"]) == 0
    page = tmp_path / name
    changed = read(page).replace("| `mxfp8` | 49.4 |", "| `mxfp8` | 48.4 |")
    assert changed != read(page)
    page.write_text(changed, encoding="utf-8")
    assert tables.main(["--check"]) == 1
    assert capsys.readouterr().err == f"{page} is out of date: run python -m benchmarks.tables\n"
    assert read(page) == changed
    assert tables.main([]) == 0
    assert read(page) == read(ROOT / name)


def test_tables_need_no_torch():
    """So that the pages can be made where the package is not installed."""
    code = "import sys; sys.modules['torch'] = None; from benchmarks import tables; sys.exit(tables.main(['--check']))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def span(values: Iterable[float], digits: int = 2) -> str:
    """The lowest and the highest of measured values, as a page has them."""
    values = list(values)
    return f"{cells.number(min(values), digits)} to {cells.number(max(values), digits)}"


FIRST_CALLS = "compile prefill s", "compile decode s"


def claims() -> dict[str, list[str]]:
    """Figures in sentences of hand-written pages, from the files, by page."""
    plain, packed = stored("llama_decode_h200.json")["rows"]
    linear = [row for row in stored("linear_h200.json")["rows"] if int(row["shape"].split("x")[0]) <= 64]
    decode = [row for row in stored("experts_decode_h200.json")["decode"] if row["decode"].endswith("each")]
    mlp = {row["block"]: row for row in stored("mlp_block_h100.json")["rows"]}
    emulated = [row for name, row in mlp.items() if name.startswith(("mxfp8", "nvfp4"))]
    fused = stored("producers_h200.json")
    first_steps = span((row["first step s"] for row in emulated), 1)
    compiling = [
        row["fused s in all"] / row["apart s in all"] for part in ("decode", "prefill") for row in fused[part][1:]
    ]
    on_cpu = stored("compile_time_cpu.json")["rows"][1:]
    losses = {row["variant"]: row["over bf16 %"] for row in stored("training_loss_h200.json")["rows"]}
    check = stored("weight_check_h200.json")
    gpt_oss = [row["fp4compile"] / row["bf16"] for row in stored("gpt_oss_layer_h200.json")["rows"][:6]]
    plain8, packed8 = stored("llama_decode_float8_h200.json")["rows"]
    oss, oss_packed = stored("gpt_oss_20b_h200.json")["rows"]
    pairs = (plain, packed), (plain8, packed8), (oss, oss_packed)
    first_calls = [one[1][part] / one[0][part] for one in pairs for part in FIRST_CALLS]
    prefill8 = f"{cells.number(packed8['prefill x'], 2)} of"
    by_rows = {
        m: [row["weights only"] / row["bf16"] for row in stored("float8_linear_h200.json")["rows"] if row["M"] in m]
        for m in ((1, 8, 16, 32), (64,), (256,), (8192,))
    }
    prefill = f"prefill takes {cells.number(packed['prefill x'], 2)} times"
    many = {row["shape"]: row["weight-only x"] for row in stored("many_rows_h200.json")["rows"]}
    faster, slower = (
        span((gain**power for shape, gain in many.items() if int(shape.split("x")[0]) in rows), 1)
        for rows, power in (((128,), 1), ((512, 1024, 2048), -1))
    )
    return {
        "README.md": [
            f"{packed['decode tokens/s']:.0f} tokens/s against {plain['decode tokens/s']:.0f}",
            f"({packed['awaited tokens/s']:.0f} against {plain['awaited tokens/s']:.0f} if",
            f"{packed['GiB']:.1f} GiB against {plain['GiB']:.1f}",
            prefill,
            f"{span((row['weight-only x'] for row in linear), 1)} times",
            f"{span((row['weight-only x'] for row in decode), 1)} times",
            f"{cells.number(mlp['float8_rowwise']['of bf16'], 2)} of bf16's time",
            f"{span(row['of bf16'] for row in emulated)} times",
            f"{span(compiling, 1)} times as long",
            f"{span(row['ratio'] for row in on_cpu)} of Inductor's time",
            f"these packed models take {span(first_calls)} times",
            f"{cells.number(mlp['bf16']['first step s'], 1)} s in bf16, {first_steps} s",
            f"{span((row['saved MiB'] for row in emulated), 0)} MiB instead of {mlp['bf16']['saved MiB']:.0f}",
            f"{span(gpt_oss)} of bf16's time for up to 1024 tokens",
            f"in `float8_block` {packed8['decode tokens/s']:.0f} against {plain8['decode tokens/s']:.0f}",
            f"prefill takes {prefill8} bf16's time",
            f"MXFP4, decodes {oss_packed['decode tokens/s']:.0f} tokens/s against {oss['decode tokens/s']:.0f}",
            f"{cells.percent(losses['mxfp8'])} under `mxfp8`",
            f"{cells.percent(losses['nvfp4_train'])} under `nvfp4_train`",
            f"{cells.number(check['check us']['median'], 1)} us",
        ],
        "docs/results.md": [
            prefill,
            f"at {cells.number(packed8['decode x'], 2)} times bf16's speed and prefills in {prefill8} its time",
            f"{span((1 / x for x in by_rows[1, 8, 16, 32]), 1)} times as fast up to 32 tokens",
            f"take {span(by_rows[64,], 1)} times bf16's time with 64, {span(by_rows[256,], 1)} times with 256, and "
            f"{span(by_rows[8192,], 1)} times with 8192",
            f"with 128 tokens it is {faster} times as fast,",
            f"with 512 to 2048 tokens it takes {slower} times as long",
        ],
    }  # fmt: skip


@pytest.mark.parametrize("page", claims())
def test_figures_in_sentences_are_those_of_the_files(page):
    text = " ".join(read(ROOT / page).split())
    assert [claim for claim in claims()[page] if claim not in text] == []


def test_every_figure_of_the_readme_is_checked():
    """A decimal number of the README is in a claim, a version, or a line of the recipes and formats."""
    text = re.sub(r"<!-- versions -->.*?<!-- end -->", "", without_code(read(ROOT / "README.md")), flags=re.DOTALL)
    versions = ("3.11", "3.12", "2.11", "2.13", "3.6", "3.9", "2.0")  # Python, torch, Triton, the licence
    figures = set(re.findall(r"\b\d+\.\d+\b", text)) - set(versions)
    assert figures <= set(re.findall(r"\d+\.\d+", " ".join(claims()["README.md"])))


def test_training_gains_nothing_by_prologues():
    """What the pages say of training: with the pass on everywhere no recipe's step was faster by 1 %."""
    assert all(row["apart over fused"] < 1.01 for row in stored("producers_h200.json")["earlier"]["train"])


# ---------------------------------------------------------------- reasons


def reasons_in(source: str) -> Iterator[tuple[int, str]]:
    """(line, pattern) of what a module may give as the reason for leaving a product alone.

    These are its strings with a space in them, but for docstrings, annotations, and messages of errors, warnings and
    logs. Of an f-string the pattern takes anything in place of what is inserted.
    """
    tree = ast.parse(source)
    others: set[int] = set()
    for node in ast.walk(tree):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        logged = isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("warnings.", "log."))
        if docstring or logged or isinstance(node, ast.Raise):
            others |= _ids(node)
        for field in ("annotation", "returns"):
            annotation = getattr(node, field, None)
            others |= _ids(annotation) if annotation is not None else set()
    for node in ast.walk(tree):
        if id(node) in others:
            continue
        if isinstance(node, ast.JoinedStr):
            others |= _ids(node)
            texts = [part.value if isinstance(part, ast.Constant) else None for part in node.values]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts = [node.value]
        else:
            continue
        if any(text is not None and " " in text for text in texts):
            yield node.lineno, "".join(".+" if text is None else re.escape(text) for text in texts)


def _ids(node: ast.AST) -> set[int]:
    return {id(one) for one in ast.walk(node)}


# Modules that give reasons, and strings with spaces in them that are none.
GIVING_REASONS = (*sorted(Path("fp4compile/analysis").glob("*.py")), *sorted(Path("fp4compile/passes").rglob("*.py")),
                  Path("fp4compile/distributed/codes.py"), Path("fp4compile/distributed/fsdp.py"),
                  Path("fp4compile/distributed/gather.py"), Path("fp4compile/weights/linear.py"),
                  Path("fp4compile/calibration/pack.py"), Path("fp4compile/weights/experts.py"))  # fmt: skip
NO_REASONS = (
    r".+\ .+\ in\ .+\ ms", r".+,\ .+,\ weight=.+,\ activation=.+",
    r".+\ experts,\ .+,\ .+,\ weight=.+,\ activation=.+", "as\\ it\\ comes",
    re.escape("the model has adapters"), re.escape("others are frozen"),
    re.escape("A packed Conv1D of transformers; see `PackedLayer`."), r"packed\ layer\ .+:\ .+",
    r"the\ state\ is\ of\ .+,\ the\ layer\ is\ .+", r".+\ is\ .+\ in\ the\ state,\ the\ layer\ has\ .+",
    r"decides\ for\ no\ layer\ of\ the\ model\ \(such\ as\ .+\)", r"and\ the\ model\ has\ no\ layer", r";\ ",
    r"quantize\ .+", r"mul\ product\ pair",
)  # fmt: skip


def explained() -> list[str]:
    return code_spans(read(DOCS / "report.md"))


@pytest.mark.parametrize("module", [ROOT / path for path in GIVING_REASONS], ids=lambda path: path.name)
def test_every_reason_is_explained(module):
    spans = explained()
    for line, pattern in reasons_in(read(module)):
        if pattern not in NO_REASONS:
            assert any(re.search(pattern, span) for span in spans), f"{module.name}:{line}: {pattern}"


def test_reasons_are_found():
    """That the search of reasons sees them: these are strings, f-strings and entries of tables."""
    patterns = {pattern for path in GIVING_REASONS for _, pattern in reasons_in(read(ROOT / path))}
    for reason in (
        "output head", "dtype float64", "fused attention: its matmuls lie inside one kernel", "integer matmul",
        "its weight is that of 'a' too", "block 0 is among the first 2", "gradient x gradient", "operator a.b.default",
        "inside cond: matmuls of nested regions are not quantised", "M=16 is below min_m=32", "a forward pre-hook",
    ):  # fmt: skip
        assert any(re.fullmatch(pattern, reason) for pattern in patterns), reason


@pytest.mark.parametrize("message", [
    "convolution", "no matmul found", "switches off those passes of Inductor that quantise",
    "freezing makes parameters constants", "compiled nothing", "no graph of it was captured", "decides for no layer",
    "from Inductor's cache are gone", "skips blocks by their number, and no name in this graph has one",
    "is compiled by itself, names in its graph begin below it",
])  # fmt: skip
def test_messages_are_explained_and_are_in_the_code(message):
    assert any(message in span for span in explained())
    sources = (re.sub(r'"\s*f?"', "", read(path)) for path in (ROOT / "fp4compile").rglob("*.py"))
    assert any(message in source for source in sources)


# ---------------------------------------------------------------- what pages list


def first_cells(page: str) -> list[str]:
    """The code spans in the first cells of a page's tables."""
    rows = re.findall(r"^\| ([^|]*) \|", read(DOCS / page), re.MULTILINE)
    return [span for row in rows for span in re.findall(r"`([^`]+)`", row)]


def test_the_guide_has_every_recipe_and_field():
    cells = first_cells("recipes.md")
    assert [cell for cell in cells if cell in recipes()] == list(recipes())
    assert {field.name for field in dataclasses.fields(Recipe)} <= set(cells)


def test_the_guide_has_every_option():
    parser = argparse.ArgumentParser(add_help=False)
    fp4compile.add_arguments(parser)
    options = {option for action in parser._actions for option in action.option_strings}
    listed = {option for cell in first_cells("recipes.md") for option in re.findall(r"--[\w-]+", cell)}
    assert options == listed


def test_every_named_format_is_described():
    listed = [cell for cell in first_cells("numerics.md") if cell in formats.NAMED]
    assert listed == list(formats.NAMED)


def test_formats_are_described_as_they_are():
    for row in re.findall(r"^\| (`[^|]+) \|(.*)\|$", read(DOCS / "numerics.md"), re.MULTILINE):
        cells = [cell.strip() for cell in row[1].split("|")]
        for name, contract in zip(re.findall(r"`(\w+)`", row[0]), cells[4].split(", "), strict=True):
            fmt = formats.NAMED[name]
            block = "none" if fmt.block is None else "{}x{}".format(*fmt.block)
            outer = "none" if fmt.outer is None else f"a {fmt.outer}"
            expected = [fmt.element.upper(), block, (fmt.scale or "none").upper(), outer, fmt.contract]
            assert [cells[0], cells[1], cells[2].upper(), cells[3], contract] == expected


def test_every_switch_of_a_pass_is_described():
    names = {one.__name__ for one in getattr(manager, "ALL", ())}
    assert names <= set(first_cells("report.md"))


def test_every_public_name_is_in_the_reference():
    text = read(DOCS / "api.md")
    for name in fp4compile.__all__:
        if not name.startswith("__"):
            assert re.search(rf":: (fp4compile\.)?{name}(\.\w+)*$", text, re.MULTILINE), name


def test_paths_of_the_architecture_page_are_there():
    """Paths in code spans: from the root where they begin with one of its folders; of the package otherwise."""
    missing = set()
    for line in read(DOCS / "architecture.md").splitlines():
        spans = re.findall(r"`([\w/]+(?:\.py|\.toml|/))`", line)
        # In a row of the map, names after a folder are files of that folder.
        folder = next((span for span in spans if span.endswith("/")), "")
        for span in spans:
            package = ROOT / "fp4compile"
            roots = (ROOT, ROOT / folder, package, package / folder, ROOT / "tests" / "end_to_end")
            if "NAME" not in span and not any((root / span).exists() for root in roots):
                missing.add(folder + span if folder and span != folder else span)
    assert not missing
