"""A change of any part of a cache key changes the key."""

import dataclasses
import importlib
import shutil
import warnings
from pathlib import Path

import pytest
import torch

import fp4compile
from fp4compile.analysis.gemm import Input
from fp4compile.passes import manager
from fp4compile.passes.manager import JointPasses, LowerPasses
from fp4compile.recipe import named
from fp4compile.report import stored_rows
from fp4compile.report.stored_rows import Outcome
from tests.helpers import absent_gpu, without_codegen


class Keyed:
    """The Dynamo graph of a function, its inputs, and the key under which its report is stored."""

    def __init__(self, function, *arguments):
        captured = []

        def keep(gm, example_inputs):
            captured.append((gm, example_inputs))
            return gm.forward

        torch._dynamo.reset()
        torch.compile(function, backend=keep, dynamic=False)(*arguments)
        ((self.gm, self.inputs),) = captured

    def key(self, uuid="uuid", **patches):
        return stored_rows.key(self.gm, self.inputs, uuid, patches)


def double(x):
    return (x + x) @ x.t()


def other(x):
    return (x + 3) @ x.t()


def branching(body):
    def function(x, flag):
        return torch.cond(flag, body, lambda x: x - 1.0, (x,))

    return function


SQUARE = torch.ones(8, 8)
FLAG = torch.tensor(True)


def key_of(function, *arguments, **patches):
    return Keyed(function, *arguments).key(**patches)


@pytest.mark.parametrize(
    "function, arguments",
    [
        (other, [SQUARE]),
        (double, [torch.ones(9, 8)]),
        (double, [torch.ones(8, 8).t().contiguous().t()]),
        (double, [torch.ones(8, 8, dtype=torch.bfloat16)]),
        (double, [torch.ones(8, 8, requires_grad=True)]),
        (double, [torch.empty(8, 8, device="meta")]),
    ],
    ids=["graph", "shape", "stride", "dtype", "gradient", "device"],
)
def test_the_report_is_kept_by_the_graph_and_its_inputs(function, arguments):
    assert key_of(double, SQUARE) == key_of(double, torch.zeros(8, 8)), "values do not matter"
    assert key_of(function, *arguments) != key_of(double, SQUARE)


def test_the_report_is_kept_by_the_bodies_of_control_flow():
    first, second = Keyed(branching(torch.sin), SQUARE, FLAG), Keyed(branching(torch.cos), SQUARE, FLAG)
    assert first.gm.code == second.gm.code, "the code of the graph does not tell them apart"
    assert first.key() != second.key()
    assert first.key() == Keyed(branching(torch.sin), SQUARE, FLAG).key()


def test_the_report_is_kept_by_recipe_mode_options_and_modes_of_tracing():
    keyed = Keyed(double, SQUARE)
    plain = keyed.key()
    others = [keyed.key(uuid="another")]
    others += [keyed.key(**torch._inductor.list_mode_options(mode)) for mode in ("reduce-overhead", "max-autotune")]
    with torch._inductor.config.patch(max_autotune=True):
        others.append(keyed.key())
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        others.append(keyed.key())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        others.append(keyed.key())
    with torch.autocast("cpu", dtype=torch.float16):
        others.append(keyed.key())
    with torch.no_grad():
        others.append(keyed.key())
    with torch.inference_mode():
        others.append(keyed.key())
    assert keyed.key() == plain and len({plain, *others}) == 1 + len(others)


def test_mode_options_and_switches_reach_the_key(monkeypatch):
    without_codegen.install(monkeypatch)
    keys = []
    keep = stored_rows.key
    monkeypatch.setattr(stored_rows, "key", lambda *args: keys.append(keep(*args)) or keys[-1])
    for how in ({}, {"mode": "max-autotune"}, {"options": {"shape_padding": False}}, {"off": ("inplace",)}):
        torch._dynamo.reset()
        monkeypatch.setattr(fp4compile.config, "disabled_passes", how.pop("off", ()))
        torch.compile(torch.nn.Linear(64, 64), backend=fp4compile.backend("mxfp8"), **how)(torch.ones(4, 64))
    assert len(set(keys)) == 4


def test_rows_that_are_gone_are_missed_loudly(monkeypatch, caplog):
    """The graph comes from Inductor's cache, so that no pass runs, and its rows were deleted."""
    module = importlib.import_module("fp4compile.dynamo_backend")
    monkeypatch.setattr(module, "compile_fx", lambda gm, *args, **kwargs: gm.forward)
    backend = fp4compile.backend("mxfp8", strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(torch.nn.Linear(64, 64), backend=backend)(torch.ones(4, 64))
    assert backend.report.lost == 1 and "its report rows are gone" in caplog.text
    assert backend.report.summary().endswith("; rows of 1 graphs from Inductor's cache are gone, and these not counted")


# ---------------------------------------------------------------- the passes' own key, for Inductor's caches


class UserPass:
    def __init__(self, name):
        self.name = name

    def uuid(self):
        return self.name


INPUTS = (Input("a.weight"), Input(), Input("b.weight"))


def joint(recipe="mxfp8", inputs=INPUTS, user_passes=(), **overrides):
    return JointPasses(named(recipe).replace(**overrides), inputs, lambda *_: None, user_passes).uuid()


def lower(user_passes=()):
    return LowerPasses(lambda *_: None, user_passes).uuid()


def test_the_passes_are_kept_by_recipe_inputs_and_what_else_is_in_the_slot():
    keys = [
        joint(), joint("mxfp4"), joint(min_k=64), joint(fprop_w="mxfp4"), joint(rules=[("a", "skip")]),
        joint(inputs=INPUTS[::-1]),  # the same names at other places
        joint(inputs=(*INPUTS[::2], Input())), joint(inputs=(*INPUTS, Input())),
        joint(inputs=(Input("a.weight", in_block=True), *INPUTS[1:])), joint(inputs=(Input("a.bias"), *INPUTS[1:])),
        joint(inputs=(Input("a.weight", head=True), *INPUTS[1:])),
        joint(user_passes=(UserPass("one"),)), joint(user_passes=(UserPass("two"),)),
        lower(), lower((UserPass("one"),)),
    ]  # fmt: skip
    assert None not in keys and len(set(keys)) == len(keys)
    assert (joint(), lower()) == (keys[0], keys[-2])
    for without_key in (UserPass(None), print):
        assert joint(user_passes=(without_key,)) is None and lower((without_key,)) is None


H200, B200 = (9, 0, 132), (10, 0, 148)


def test_the_passes_are_kept_by_the_gpus(monkeypatch):
    """By capability and multiprocessors, for which grids are made. torch keeps which GPU a graph is for."""
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    keys = []
    for gpus in [(), (H200,), (B200,), ((10, 3, 148),), ((9, 0, 114),), (H200, B200), (B200, H200)]:
        absent_gpu.install(monkeypatch, gpus)
        keys.append((joint(), lower()))
    assert all(len(set(of_one)) == len(keys) for of_one in zip(*keys, strict=True))
    absent_gpu.install(monkeypatch, (H200, H200))
    assert (joint(), lower()) == keys[1], "more GPUs of one kind make no difference"
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert joint() not in dict(keys), "a slow link between GPUs does"


def test_the_passes_are_kept_by_the_whole_source(tmp_path, monkeypatch):
    """A new version of the package must not run graphs that an older one compiled."""
    copied = tmp_path / "fp4compile"
    shutil.copytree(Path(manager.__file__).parents[1], copied, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(manager, "__file__", str(copied / "passes" / "manager.py"))
    monkeypatch.setattr(manager, "source_digest", manager.source_digest.__wrapped__)
    seen, read_bytes = [], Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: seen.append(path) or read_bytes(path))
    before = joint(), lower()
    assert sorted(seen) == sorted(2 * list(copied.rglob("*.py"))), "each key reads every file"
    for changed in ("dynamo_backend.py", "templates/quantize/row.py", "templates/new.py"):
        with (copied / changed).open("a") as file:
            file.write("# changed\n")
        after = joint(), lower()
        assert not {*before} & {*after}
        before = after
    copied.joinpath("notes.txt").write_text("no source")
    assert (joint(), lower()) == before


def test_rows_are_stored_and_read_back_with_every_field(monkeypatch):
    without_codegen.install(monkeypatch)
    backend = fp4compile.backend("mxfp8")
    torch.compile(torch.nn.Linear(64, 48), backend=backend)(torch.ones(4, 64))
    outcome = Outcome(list(backend.report.rows), {"find": 2})
    stored_rows.store("a key", outcome)
    rows, counts = stored_rows.load("a key")
    assert [dataclasses.asdict(row) for row in rows] == [dataclasses.asdict(row) for row in backend.report.rows]
    assert counts == outcome.counts and stored_rows.load("another key") is None
