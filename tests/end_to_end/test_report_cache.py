"""The rows of graphs that come from Inductor's cache: what is stored is read back, and what cannot be read is said."""

import importlib
import json
import os

import pytest
import torch
from torch._dynamo.utils import counters

import fp4compile
from fp4compile.report import stored_rows
from fp4compile.report.stored_rows import Outcome

ROW = dict.fromkeys(("m", "n", "k", "left", "right", "tier", "reason", "flops")) | {"module": "a", "product": "fprop"}
UNREADABLE = {
    "empty": b"", "blank": b"\n",
}  # fmt: skip
OF_ANOTHER_KIND = {
    "number": 3, "null": None, "text": "rows", "list": [1], "object": {}, "no counts": {"rows": []},
    "no rows": {"counts": {}}, "rows of a dict": {"rows": {}, "counts": {}},
    "rows of a text": {"rows": "", "counts": {}}, "more": {"rows": [], "counts": {}, "x": 1},
    "counts of a list": {"rows": [], "counts": []},
}  # fmt: skip
WRONG_ROWS = {
    "a list": [], "no fields": {}, "no module": {name: value for name, value in ROW.items() if name != "module"},
    "another field": ROW | {"x": 1},
}  # fmt: skip
CONTENTS = UNREADABLE | {name: json.dumps(content).encode() for name, content in OF_ANOTHER_KIND.items()}
CONTENTS |= {
    f"row: {name}": json.dumps({"rows": [ROW, row], "counts": {}}).encode() for name, row in WRONG_ROWS.items()
}


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The file of every key."""
    monkeypatch.setattr(stored_rows, "_path", lambda key: tmp_path / "made" / "rows.json")
    return tmp_path / "made" / "rows.json"


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_rows_that_cannot_be_read_are_missed_loudly(content, file, monkeypatch, caplog):
    """The graph comes from Inductor's cache, and the file of its rows holds something else. It is removed."""
    backend_module = importlib.import_module("fp4compile.dynamo_backend")
    monkeypatch.setattr(backend_module, "compile_fx", lambda gm, *args, **kwargs: gm.forward)
    file.parent.mkdir()
    file.write_bytes(content)
    backend = fp4compile.backend("mxfp8", strict=True)
    y = torch.compile(lambda x: x + 1, backend=backend)(torch.ones(4))
    assert torch.equal(y, torch.full((4,), 2.0))
    assert backend.report.lost == 1 and backend.report.rows == [] and "are gone" in str(backend.report)
    (said,) = (message for message in caplog.messages if "report rows" in message)
    assert "its report rows cannot be read (" in said and f"{file} is removed" in said
    assert not file.exists()


def test_rows_are_written_whole_or_not_at_all(file, monkeypatch, caplog):
    stored_rows.store("key", Outcome([], {"find": 1}))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        stored_rows.store("key", Outcome([], {"find": 2}))
    assert "report rows not stored: [Errno 28]" in caplog.text
    assert stored_rows.load("key") == Outcome([], {"find": 1}) and list(file.parent.iterdir()) == [file]


def test_what_inductors_cache_alone_has_is_in_the_report():
    """Frozen weights keep a graph out of AOTAutograd's cache, so the joint passes run, and the later ones do not."""
    summaries, counts = [], []
    for _ in range(2):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
        model[0].requires_grad_(False)
        backend = fp4compile.backend("mxfp8", name="of this test")  # equal backends that live share a report
        torch.compile(model, backend=backend)(torch.randn(32, 64, requires_grad=True)).sum().backward()
        summaries.append(backend.report.summary())
        counts.append(backend.report.counts)
    assert "saved for backward" in summaries[0] and "merge_quantize" in counts[0]
    assert summaries[1] == summaries[0] and counts[1] == counts[0]


def test_what_is_saved_is_known_where_only_the_text_of_a_function_changed(tmp_path, monkeypatch):
    """Inductor's cache has the graph, and no stored row belongs to the function."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    layer, summaries = torch.nn.Linear(64, 64), []
    for function in (lambda x: layer(x).relu(), lambda renamed: layer(renamed).relu()):
        torch._dynamo.reset()
        counters.clear()
        backend = fp4compile.backend("mxfp8", name="of this test")
        torch.compile(function, backend=backend)(torch.ones(32, 64)).sum().backward()
        summaries.append(backend.report.summary())
    assert counters["inductor"]["fxgraph_cache_hit"] and not counters["aot_autograd"]["autograd_cache_hit"]
    assert summaries[1] == summaries[0] and "saved for backward" in summaries[0]


def test_rows_of_a_graph_of_symbolic_sizes_that_another_size_compiled(tmp_path, monkeypatch):
    """AOTAutograd's cache has one graph for all sizes."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    summaries = []
    for tokens in (4, 9):
        torch._dynamo.reset()
        counters.clear()
        backend = fp4compile.backend("mxfp8", name="of this test")
        torch.compile(torch.nn.Linear(64, 64), backend=backend, dynamic=True)(torch.randn(tokens, 64)).sum().backward()
        summaries.append(backend.report.summary())
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert summaries == 2 * ["recipe of this test: 2 of 2 matmuls quantised, 100.0% of their FLOPs"]
