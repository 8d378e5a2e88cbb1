"""What a report says: a summary, a table of at most 120 columns with the reasons in it, and a page that agrees.

No name in it draws on the terminal, breaks a line, or is a formula of a spreadsheet.
"""

import csv
import io
import re
from dataclasses import replace

import pytest
import torch

import fp4compile
from fp4compile.calibration.sensitivity import LayerSensitivity, Sensitivity
from fp4compile.report.report import Report, Seconds
from fp4compile.report.report_view import view_of
from fp4compile.weights.buffers import BUFFERS, PackedWeight
from tests.helpers import without_codegen
from tests.helpers.report_text import Page, flat, row

ESCAPE = "\x1b[2J\x1b]0;title\x07"
LONG = "gradient x activation that is not the weight gradient of a layer; its weight was gathered in mxfp8_32x32"


def wide():
    """A report with everything that a table has, and names and reasons that are too long for it."""
    deep = "model.language_model.decoder.layers.{}.block_sparse_moe.experts.shared_expert.gate_up_projection"
    times = {"plain_seconds": 2e-3, "seconds": 1e-3, "launches": "quantise rows, fused / 2; library_block_scaled"}
    rows = [row(deep.format(block), fused="pow, mean, add, rsqrt, mul", **times) for block in range(3)]
    rows += [
        row("x" * 200, product="wgrad", m="8*s77*s91 + 3*s14*s27*s33", left="nvfp4_one_level", right="mxfp8_even",
            saved=3 * 2**19, saved_plain=3 * 2**20, weight_scales="mse (training)", **times),
        row("head", reason="output head", flops=1000, plain_seconds=4e-6, seconds=4e-6),
        row("layers.1.q", LONG, "other"), row("layers.1.k", "dtype float64", "dgrad"),
        row("router", reason="router: its outputs choose among experts"), row("a.b", note="something is so"),
    ]  # fmt: skip
    return Report("nvfp4", rows, {"find": 9}, graphs=2, gpu="B200", rest=Seconds(2e-3, 1e-3), lost=1)


def table_of(text):
    """The cells of a report's printed table, the header first, without the spaces at which cells are wrapped."""
    lines = text.partition("\n\n")[2].splitlines()
    rule = next(place for place, line in enumerate(lines) if set(line) == {"-"})
    inside = [*lines[:rule], *lines[rule + 1 : lines.index(lines[rule], rule + 1)]]
    # A column ends where all lines have two spaces.
    blank = [all(line[place : place + 1] in ("", " ") for line in inside) for place in range(len(lines[rule]))]
    starts = [
        0,
        *(place for place in range(2, len(blank)) if blank[place - 1] and blank[place - 2] and not blank[place]),
    ]
    rows = []
    for number, line in enumerate(inside):
        cells = [line[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=True)]
        if number == 0 or number == rule or (cells[1] and number > rule):  # the kind of matmul begins a line
            rows.append([""] * len(cells))
        rows[-1] = [before + cell.replace(" ", "") for before, cell in zip(rows[-1], cells, strict=True)]
    return rows


@pytest.mark.parametrize("all", [False, True])
def test_text_and_page_say_the_same(all):
    report = wide()
    text, page, view = report.table(all=all), Page(report.to_html(all=all)), view_of(report, all)
    said = [part for fact in view.facts for part in (fact.label, fact.figure, *fact.details) if part]
    assert page.facts == said and page.notes == list(view.notes)
    cells = [[column.name for column in view.columns], *(list(line.cells) for line in view.lines)]
    assert page.rows == cells
    assert table_of(text) == [[cell.replace(" ", "") for cell in line] for line in cells]
    position = 0
    for part in said:  # in this order
        position = flat(text).index(flat(part), position)
    assert all == any("launches:quantiserows,fused/2" in line[-1] for line in table_of(text))
    assert {fact.label for fact in view.facts} >= {"quantised", "not quantised", "predicted", "memory", "warnings"}


@pytest.mark.parametrize("all", [False, True])
def test_no_line_is_wider_than_120_columns_and_no_reason_is_lost(all):
    report = wide()
    text = report.table(all=all)
    assert max(map(len, text.splitlines())) <= 120
    reasons = [line[-1] for line in table_of(text)]
    assert {reason.replace(" ", "") for reason in report.reasons()} <= set("".join(reasons[1:]).split(";") + reasons)


def test_the_summary_has_three_reasons_at_most_and_counts_the_others():
    facts = {fact.label: fact for fact in view_of(wide()).facts}
    lines = facts["not quantised"].details
    assert len(lines) == 3 and lines[0].startswith("output head (55.6% of FLOPs, ")
    assert lines[-1].endswith("; and 1 more reason in the table (1 matmul)")
    assert view_of(wide()).facts[0].label == "quantised"


@pytest.mark.parametrize("seconds, column, cell", [
    (9.994e-4, "before, \u00b5s", "999.4"), (1e-3, "before, ms", "1.00"), (2.4e-3, "before, ms", "2.40")
])  # fmt: skip
def test_milliseconds_where_they_are(seconds, column, cell):
    rows = [row("a", plain_seconds=seconds, seconds=4e-6), row("b", plain_seconds=2e-6, seconds=0.0)]
    header, first, second = table_of(str(Report("mxfp8", rows, gpu="B200", graphs=1)))
    place = header.index(column.replace(" ", ""))
    assert first[place] == cell and first[place + 1] == (
        "4.0" if column.endswith("s") and "ms" not in column else "<0.01"
    )
    assert second[place + 1] == ("0.0" if "ms" not in column else "0.00")


# ---------------------------------------------------------------- sizes that vary


class Gated(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.router = (torch.nn.Linear(64, width) for width in (128, 64, 8))

    def forward(self, x):
        y = self.down(torch.nn.functional.pad(self.up(x)[..., :64], (0, 0)).relu())
        return (y * self.router(x).topk(2)[0].sum(-1, keepdim=True)).sum()


def trained(monkeypatch, lengths, **settings):
    without_codegen.install(monkeypatch)
    backend = fp4compile.backend("mxfp8")
    compiled = torch.compile(Gated(), backend=backend, **settings)
    for length in lengths:
        compiled(torch.randn(length, 64, requires_grad=True)).backward()
    return backend.report


@pytest.mark.parametrize("settings", [{}, {"dynamic": True}, {"dynamic": False}], ids=str)
def test_a_matmul_in_several_sizes_is_one_line_and_counted_once(settings, monkeypatch):
    once = trained(monkeypatch, [32])
    torch.compiler.reset()
    report = trained(monkeypatch, [32, 64, 96], **settings)
    assert len(report.matmuls) == len(once.rows) == 9 and (report.graphs > 1 or "dynamic" in settings)
    lines = table_of(str(report))[1:]
    assert [line[:2] for line in lines] == [line[:2] for line in table_of(str(once))[1:]]
    shown = {"{}": "32,s77", "{'dynamic': True}": "s77", "{'dynamic': False}": "32,...,96"}[str(settings)]
    assert {line[2] for line in lines if line[1] != "wgrad"} == {shown}
    assert report.summary().split(";")[0] == once.summary().split(";")[0]
    assert (len(report.quantised), report.reasons(), report.flops_shares()) == (
        len(once.quantised), once.reasons(), once.flops_shares())  # fmt: skip


def test_what_is_saved_is_known_where_sizes_vary(monkeypatch):
    static = trained(monkeypatch, [32])
    torch.compiler.reset()
    dynamic = trained(monkeypatch, [32], dynamic=True)
    assert isinstance(dynamic.rows[0].m, str)
    assert dynamic.saved() == static.saved() and static.saved()[0] > 0
    assert "saved for backward: " in dynamic.summary() and "activations saved for backward" in str(dynamic)


def test_a_row_that_differs_in_more_than_sizes_is_a_line_of_its_own(monkeypatch):
    without_codegen.install(monkeypatch)
    backend = fp4compile.backend("mxfp8", min_m=48)
    compiled = torch.compile(torch.nn.Linear(64, 64), backend=backend, dynamic=False)
    with torch.no_grad():
        for length in (32, 64):
            compiled(torch.ones(length, 64))
    assert [row.reason for row in backend.report.matmuls] == ["M=32 is below min_m=48", None]


# ---------------------------------------------------------------- memory


class Experts(torch.nn.Module):
    """Weights of experts, beside layers whose sizes are no multiples of blocks."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(3, 48, 80).bfloat16())
        self.odd, self.even = torch.nn.Linear(80, 50, dtype=torch.bfloat16), torch.nn.Linear(80, 64, bias=False)

    def forward(self, x):
        return self.even(x.float()), self.odd(x), torch.bmm(x.expand(3, *x.shape), self.w.mT)


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "mxfp8_32x32", "float8_rowwise", "nvfp4_one_level"])
def test_bytes_of_packed_weights_are_those_of_the_buffers(recipe):
    square = {"recipe": "mxfp8", "fprop_w": recipe}
    recipe = (square if "32x32" in recipe else {"recipe": recipe}) | {"skip_lm_head": False}
    model = Experts()
    with torch.no_grad():
        explained = fp4compile.explain(model, torch.ones(2, 80, dtype=torch.bfloat16), recipe=recipe)
    report = fp4compile.pack_(model, recipe, contracted={"w": -1}, progress=False)
    packed = [module for module in model.modules() if isinstance(module, PackedWeight)]
    buffers = (getattr(module, name) for module in packed for name in BUFFERS)
    assert len(packed) == 3
    assert report.weights() == (
        sum(each.nbytes for each in buffers if each is not None),
        2 * (3 * 48 + 50) * 80 + 4 * 64 * 80,
    )
    assert explained.weights() == report.weights()
    assert re.search(r"; weights: [\d.]+ KiB packed, unquantised 50.3 KiB$", report.summary())
    assert "unquantised ones, compiled graphs keep both" in flat(explained) and "keep both" not in str(report)


# ---------------------------------------------------------------- CSV


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", " =1", "\uff1d1", "-", "="])
def test_a_text_that_would_be_a_formula_is_marked_as_text(text):
    report = Report("mxfp8", [row(text, f"{text}, as it is", name=text, note=text, m=text, fused=text)])
    (read,) = csv.DictReader(io.StringIO(report.to_csv(), newline=""))
    for field in ("module", "name", "note", "m", "fused"):
        assert read[field] == f"'{text}", field
    assert read["reason"] == f"'{text}, as it is"


def test_numbers_and_other_texts_of_a_csv_file_stay_as_they_are():
    values = {"plain_seconds": -1.5, "seconds": 2e-5, "saved": -3, "m": "s0 - 1", "note": "a=b+c-d@e", "name": "'x"}
    (read,) = csv.DictReader(io.StringIO(Report("mxfp8", [row("layers.0.up", **values)]).to_csv()))
    assert {field: read[field] for field in values} == {field: str(value) for field, value in values.items()}
    assert read["module"] == "layers.0.up" and read["flops"] == "100" and read["reason"] == ""


# ---------------------------------------------------------------- names in the table and the page


@pytest.mark.parametrize("text, shown", [
    (ESCAPE, r"\x1b[2J\x1b]0;title\x07"), ("a\nb\r\tc", r"a\nb\r\tc"), ("\x9b2J\x7f\x00", r"\x9b2J\x7f\x00"),
    ("\u202egnp.exe", r"\u202egnp.exe"), ("\u2028\ud800", r"\u2028\ud800"), ("N\u00e4me \u5c42", "N\u00e4me \u5c42"),
])  # fmt: skip
def test_what_is_not_printable_is_escaped(text, shown):
    rows = [row(text, note=text, plain_seconds=1e-6, seconds=2e-6), row("b", text, m=text, fused=text)]
    report = Report(text, rows, {"find": 2}, graphs=1, gpu="B200")
    plain = Report(shown, [replace(rows[0], module=shown, note=shown), row("b", shown, m=shown, fused=shown)],
                   {"find": 2}, graphs=1, gpu="B200")  # fmt: skip
    assert str(report) == str(plain) and report.table(all=True) == plain.table(all=True)
    assert str(report).count(shown) >= 6 and all(line.isprintable() for line in str(report).split("\n"))
    assert report.summary() == plain.summary() and shown in Report(text, graphs=0).summary()
    assert report.to_html() == plain.to_html() and shown in report.to_html()
    assert report.rows[0].module == text, "data stay as they are"


def test_a_module_with_such_a_name_is_explained_on_one_line(capsys):
    model = torch.nn.Module()
    model.add_module(f"up{ESCAPE}\nrecipe x: all is well", torch.nn.Linear(64, 64))
    model.forward = lambda x: next(model.children())(x)
    with torch.no_grad():
        report = fp4compile.explain(model, torch.randn(4, 64), recipe="mxfp8")
    (only,) = report.rows
    assert ESCAPE in only.module
    printed = capsys.readouterr().out
    assert all(line.isprintable() for line in printed.split("\n"))
    assert len(printed.splitlines()) == len(str(report).split("\n")) and "\nrecipe x" not in printed


def test_the_table_of_sensitivities_escapes_too():
    layers = tuple(LayerSensitivity(name, 4096, 20.0, 30.0) for name in (ESCAPE, "a\nb", ""))
    lines = str(Sensitivity(ESCAPE, layers)).split("\n")
    assert len(lines) == 9 and all(line.isprintable() for line in lines)
    assert lines[5].startswith(r"a\nb ") and lines[6].startswith("(top) ")
