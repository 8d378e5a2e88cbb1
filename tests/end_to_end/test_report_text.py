"""Names of modules in reports: no name draws on the terminal, breaks a line, or is a formula of a spreadsheet."""

import csv
import io
from dataclasses import replace

import pytest
import torch

import fp4compile
from fp4compile.calibration.sensitivity import LayerSensitivity, Sensitivity
from fp4compile.report.report import Report, Row

ESCAPE = "\x1b[2J\x1b]0;title\x07"


def row(module="a", reason=None, **fields):
    formats = ("mxfp8", "mxfp8", "reference") if reason is None else ("bfloat16", "bfloat16", None)
    return replace(Row(module, "fprop", 2, 4, 8, *formats, reason, 100), **fields)


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


# ---------------------------------------------------------------- table and page


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
    assert len(lines) == 7 and all(line.isprintable() for line in lines)
    assert lines[3].startswith(r"a\nb ") and lines[4].startswith("(top) ")
