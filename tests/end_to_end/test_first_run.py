"""`check-sm100 --run`: processes that end too early, kernels that are wrong, machines without a GPU.

The kernels run in Triton's interpreter, in a process of their own (`test_in_the_interpreter`).
"""

import json
import multiprocessing
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from fp4compile.__main__ import main  # noqa: E402
from fp4compile.check import cases, first_run, quantiser_table, run_experts, run_prologues, run_times, run_values
from fp4compile.check.cases import Case, Finding, in_process  # noqa: E402
from fp4compile.check.quantiser_table import BOTH, COLUMNS, ROWS, Configuration  # noqa: E402
from fp4compile.formats import formats, reference  # noqa: E402
from fp4compile.templates import choose  # noqa: E402
from fp4compile.templates.gemm import grouped_dequant_tiles  # noqa: E402
from tests.helpers import in_interpreter  # noqa: E402

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETING, reason="runs in the interpreter")
compiled = pytest.mark.skipif(INTERPRETING, reason="runs without the interpreter")

# ---------------------------------------------------------------- the command


@compiled
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["check-sm100", "--run"])
    assert "--run: torch sees no CUDA GPU here" in capsys.readouterr().err


def good():
    return {"us": 1.5}


def wrong():
    return {"kernels": "gemv", "wrong": ["gemv: 3 of 8 values"]}


def raises():
    raise RuntimeError("CUDA error: an illegal instruction was encountered\nCompile with ...")


def ends():
    os._exit(7)


def hangs():
    time.sleep(600)


def no_cases():
    return []


def all_good():
    return [Case("one", good), Case("two", good)]


def one_of_each():
    return [Case("good", good), Case("raises", raises), Case("ends", ends), Case("wrong", wrong), Case("last", good)]


@pytest.fixture
def pretended_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("fp4compile.check.environment.of_gpu", lambda: {"device": "a GPU"})
    monkeypatch.setattr(run_times, "cases", no_cases)
    monkeypatch.setattr(run_experts, "cases", no_cases)
    monkeypatch.setattr(run_prologues, "cases", no_cases)


@pytest.fixture
def quick_starts(monkeypatch):
    """Processes are forks of one that has imported the package, and has done nothing else."""
    get_context = multiprocessing.get_context

    def context(method):
        assert method == "spawn"
        forks = get_context("forkserver")
        forks.set_forkserver_preload(["fp4compile.check.run_prologues", "fp4compile.check.run_times"])
        return forks

    monkeypatch.setattr(multiprocessing, "get_context", context)


@compiled
@pytest.mark.parametrize(("made", "status"), [(all_good, 0), (one_of_each, 1)])
def test_what_fails_is_recorded_and_the_rest_runs(made, status, pretended_gpu, monkeypatch, capsys, tmp_path, request):
    """Each case in another process; the one that ends it has its row, and a new process runs what is left."""
    if made is one_of_each:
        request.getfixturevalue("quick_starts")
    monkeypatch.setattr(run_values, "cases", made)
    assert main(["check-sm100", "--run", "--json", str(tmp_path / "run.json")]) == status
    content = json.loads((tmp_path / "run.json").read_text())
    assert content["environment"] == {"device": "a GPU"} and content["times"] == []
    printed = capsys.readouterr().out
    assert [row["name"] for row in content["values"]] == [case.name for case in made()]
    assert f"\n{3 * status} cases failed" in printed
    if made is one_of_each:
        found = {row["name"]: row for row in content["values"]}
        assert found["raises"]["error"] == "RuntimeError: CUDA error: an illegal instruction was encountered"
        assert found["ends"]["error"] == "ended the process with status 7"
        assert found["wrong"]["wrong"] == ["gemv: 3 of 8 values"] and "error" not in found["wrong"]
        assert found["good"] == {"name": "good", "us": 1.5} and found["last"] == {"name": "last", "us": 1.5}
        assert "FAILED: ended the process" in printed and "WRONG: ['gemv: 3 of 8 values']" in printed


@compiled
def test_cases_can_be_chosen(pretended_gpu, quick_starts, monkeypatch, capsys):
    monkeypatch.setattr(run_values, "cases", one_of_each)
    assert main(["check-sm100", "--run", "--only", "a"]) == 1  # raises, last
    printed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:1].islower()]
    assert [word for word in printed if word in {case.name for case in one_of_each()}] == ["raises", "last"]


def test_a_process_ends_where_the_gpu_cannot_be_used(monkeypatch):
    """The case before is blamed if it said nothing itself; what follows is left to a new process."""
    usable = iter([True, False, True])
    monkeypatch.setattr(cases, "_usable", lambda: next(usable))
    sent = []
    cases._work(all_good, 0, SimpleNamespace(send=sent.append))
    assert [(finding.error, ok) for finding, ok in sent] == [(None, True), ("left the GPU unusable", False)]
    sent.clear()
    usable = iter([False, True, True, True, True])
    cases._work(one_of_each, 1, SimpleNamespace(send=sent.append))
    ((finding, ok),) = sent
    assert finding.error.startswith("RuntimeError: CUDA error") and not ok


def ends_late():
    return [Case("hangs", hangs), Case("last", good)]


@compiled
def test_what_does_not_end_is_given_up(quick_starts):
    found = list(in_process(ends_late, patience=6))  # long enough to import torch, for the second case
    assert [one.name for one in found] == ["hangs", "last"]
    assert found[0].error == "did not end within 6 seconds"
    assert found[1].error is None or "did not end" in found[1].error  # a busy machine imports slowly


def test_a_finding_in_one_line():
    assert first_run.line(Finding("x", {"us": 2, "of a copy": 0.9})).split(None, 1) == ["x", "us 2, of a copy 0.9"]
    assert first_run.line(Finding("x", {"wrong": []})).split() == ["x", "right"]
    assert not Finding("x", {"wrong": []}).failed and Finding("x", {"wrong": ["y"]}).failed
    assert Finding("x", {}, "no").failed and Finding("x", {}, "no").to_dict() == {"name": "x", "error": "no"}


# ---------------------------------------------------------------- the cases


def test_every_kernel_has_a_case():
    names = [case.name for case in run_values.cases()]
    assert len(set(names)) == len(names)
    for one in quantiser_table.CONFIGURATIONS:
        assert sum(name.startswith(f"quantise {one.label}, {one.format}, ") for name in names) == 2
    multiplied = {name for pair in run_values.PAIRS for name in pair if name}
    assert multiplied >= {"nvfp4", "nvfp4_one_level", "nvfp4_rowwise", "nvfp4_16x16", "mxfp8", "mxfp8_32x32", "mxfp4"}
    for kind in ("bias", "gated", "not finite"):
        assert sum(name.endswith(f", {kind}") for name in names) >= len(run_values.PAIRS)
    assert len(run_experts.cases()) == len(run_experts.FORMATS) * len(run_experts.SHAPES)
    fused = [case.name for case in run_prologues.cases()]
    assert len(set(fused)) == len(fused)
    for what in ("codes along [-1]", "codes along [-1, -2]", "values along [-1]", "experts"):
        assert any(name.startswith(f"{what} after ") for name in fused)
    times = [case.name for case in run_times.cases()]
    assert len(set(times)) == len(times) > len(run_times.PAIRS) * len(run_times.SHAPES)


@compiled
def test_in_the_interpreter():
    in_interpreter.assert_passes(__file__)


TINY = [Configuration("rows", name) for name in ("nvfp4", "mxfp8")] + [
    Configuration("columns", "nvfp4_one_level", dim=(COLUMNS,)),
    Configuration("both", "nvfp4_16x16", dim=BOTH),
    Configuration("stochastic rows", "nvfp4_te", seeded=True),
    Configuration("transformed columns", "nvfp4_te", dim=(COLUMNS,), hadamard=True),
    Configuration("both, transform, seed", "nvfp4_te", dim=BOTH, hadamard=True, seeded=True),
    Configuration("dequantize", "nvfp4", dequantizes=True),
    Configuration("scale sweep", "nvfp4", scale_rule="mse"),
]


@interpreted
@pytest.mark.parametrize("configuration", TINY, ids=lambda one: f"{one.label}, {one.format}")
def test_quantise_kernels_are_right(configuration):
    assert run_values.quantized(configuration, (18, 40)) == {"wrong": []}


@interpreted
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_rowwise", "mxfp8", "float8_rowwise"])
def test_experts_are_right(name, monkeypatch):
    small = {"n": 20, "k": 48, "ends": (0, 3, 3, 17), "rows": 19}
    assert run_experts.experts(name, **small)["wrong"] == []
    product = run_experts.multiply
    monkeypatch.setattr(run_experts, "multiply", lambda *args: 1.001 * product(*args))
    assert [one.partition(":")[0] for one in run_experts.experts(name, **small)["wrong"]] == [
        "product", "product along rows"
    ]  # fmt: skip
    right = run_experts.quantize_kernels
    monkeypatch.setattr(run_experts, "quantize_kernels", lambda x, *args, **more: right(-x, *args, **more))
    assert {one.partition(":")[0] for one in run_experts.experts(name, **small)["wrong"]} == {
        "rows", "columns", "matrices", "both", "product", "product along rows"
    }  # fmt: skip


@interpreted
def test_every_kernel_of_experts_is_run(monkeypatch):
    """With results in bfloat16: those between which `max-autotune` decides. Here one stands in for them."""
    small = {"n": 20, "k": 48, "ends": (0, 3, 3, 17), "rows": 19}
    tiles, registry = replace(grouped_dequant_tiles.CANDIDATE, name="tiles", tier="native"), choose.REGISTRY
    monkeypatch.setattr(choose, "REGISTRY", (tiles, *registry))
    assert run_experts.experts("nvfp4", **small)["wrong"] == []

    def run(call, config):
        return tiles.run(call, config) * (1 if call.problem.out_dtype == torch.float32 else 1.125)

    monkeypatch.setattr(choose, "REGISTRY", (replace(tiles, run=run), *registry))
    found = [one.split(": ")[:2] for one in run_experts.experts("nvfp4", **small)["wrong"]]
    assert found == [["product", "tiles"], ["product along rows", "tiles"]]


@interpreted
@pytest.mark.parametrize(("chain", "name", "shape", "dims", "values"), [
    ("a gate", "nvfp4_one_level", (18, 48), (ROWS,), False), ("a norm", "nvfp4", (18, 40), (ROWS,), False),
    ("a layer norm", "mxfp8", (6, 72), (ROWS,), False), ("a norm", "nvfp4_one_level", (5, 48), (ROWS,), True),
    ("the end of a norm", "nvfp4_one_level", (17, 48), BOTH, False),
])  # fmt: skip
def test_quantisers_with_a_prologue_are_right(chain, name, shape, dims, values):
    assert run_prologues.quantized(chain, name, shape, dims, values) == {"wrong": []}


SMALL_GROUPS = ((19, 48), (0, 3, 3, 17))


@interpreted
def test_quantisers_of_experts_with_a_prologue_are_right():
    for name in ("mxfp8", "nvfp4_one_level"):
        assert run_prologues.experts(name, *SMALL_GROUPS) == {"wrong": []}


@interpreted
def test_a_wrong_prologue_is_found(monkeypatch):
    """A bit of a code; a value that is computed wrong, and quantised as it is; a NaN that is hidden."""
    right = run_prologues.quantize_kernels

    def found(planted):
        monkeypatch.setattr(run_prologues, "quantize_kernels", planted)
        return run_prologues.quantized("a norm", "mxfp8", (6, 64))["wrong"]

    def wrong_code(*arguments, stored=(), **options):
        codes, *others = right(*arguments, stored=stored, **options)
        if not stored:
            codes.view(torch.uint8)[3, 2].bitwise_xor_(1)
        return [codes, *others]

    def wrong_value(x, *arguments, operands, **options):
        return right(x, *arguments, operands=[1.02 * operands[0]], **options)

    def hidden(x, *arguments, **options):
        return right(x.nan_to_num(0.0, 0.0, 0.0), *arguments, **options)

    assert found(right) == []
    assert found(wrong_code) == ["finite: codes: 1 of 384 differ", "not finite: codes: 1 of 384 differ"]
    assert all("values: " in what and "beyond the bound" in what for what in found(wrong_value))
    assert "not finite: values: a finite one where a NaN or an infinity went in" in found(hidden)

    def negated(x, *arguments, offs=None, **options):
        return right(x if offs is None else -x, *arguments, offs=offs, **options)

    monkeypatch.setattr(run_prologues, "quantize_kernels", negated)
    assert run_prologues.experts("mxfp8", *SMALL_GROUPS)["wrong"]


@interpreted
@pytest.mark.parametrize("kind", ["none", "bias", "gated", "not finite"])
@pytest.mark.parametrize(("a", "b"), [("nvfp4", "nvfp4"), ("nvfp4_rowwise", "nvfp4_te"), ("mxfp8", "mxfp4"),
                                      (None, "mxfp8")])  # fmt: skip
def test_products_are_right(a, b, kind):
    found = run_values.multiplied(a, b, (1, 12, 20, 96), kind)
    assert found == {"kernels": "dequant_tiles", "wrong": []}
    assert run_values.multiplied(a, b, (2, 5, 8, 64), "none")["wrong"] == []


@interpreted
def test_a_wrong_quantise_kernel_is_found(monkeypatch):
    """One bit of one code, one of a scale, an outer scale by one step; and in codes of which a step is allowed, two."""
    right = quantiser_table.quantize_kernels

    def planted(change):
        def quantize(*args, **options):
            found = [x.clone() for x in right(*args, **options)]
            change(*found)
            return found

        monkeypatch.setattr(quantiser_table, "quantize_kernels", quantize)
        return run_values.quantized(TINY[0], (18, 40))["wrong"]

    assert planted(lambda data, scales, outer: None) == []
    assert "finite: codes: 1 of 432 differ" in planted(lambda data, scales, outer: data[3, 2].bitwise_xor_(1))
    assert "finite: scales: 1 of 54 differ" in planted(
        lambda data, scales, outer: scales.view(torch.uint8)[3, 2].bitwise_xor_(1)
    )
    assert "finite: outer scale: 1 of 1 differ" in planted(lambda data, scales, outer: outer.mul_(1 + 2**-23))


@interpreted
@pytest.mark.parametrize(("factor", "kind"), [(1.02, "none"), (1.02, "bias"), (1.05, "gated"), (1.02, "not finite")])
def test_a_wrong_product_is_found(factor, kind, monkeypatch):
    right = run_values.multiply

    def planted(*args, **options):
        out = right(*args, **options)
        return torch.cat((out[:-1], (out[-1:].float() * factor).to(out.dtype)))

    monkeypatch.setattr(run_values, "multiply", planted)
    format = "mxfp8" if kind == "not finite" else "nvfp4"  # whose outer scale would make every value a NaN
    (what,) = run_values.multiplied(format, format, (1, 12, 20, 96), kind)["wrong"]
    assert what.startswith("dequant_tiles: ") and "times the bound" in what


@interpreted
def test_a_hidden_nan_is_found(monkeypatch):
    monkeypatch.setattr(run_values, "multiply", lambda *args: torch.zeros(12, 20, dtype=torch.bfloat16))
    found = run_values.multiplied("mxfp8", "mxfp8", (1, 12, 20, 96), "not finite")["wrong"]
    assert any("a finite value where a NaN or an infinity went in" in what for what in found)


def test_stochastic_codes_may_be_a_step_apart_and_no_more():
    """Of codes 1..6 (0.5 to 4), as many up as down."""
    codes = torch.randint(1, 6, (64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed = reference.pack
    scales, outer = torch.ones(64, 4).to(torch.float8_e4m3fn), torch.ones(())
    expected = (packed(codes), scales, outer)
    up = torch.arange(64) % 2

    def compared(other):
        return run_values.rounded_alike((packed(other), scales, outer), expected)

    assert compared(codes + (up * 2 - 1).to(torch.uint8)) == []
    assert "codes: a value is not rounded to a neighbour" in compared(codes + (up * 2).to(torch.uint8))
    assert any("biased by" in what for what in compared(codes + (up > 0).to(torch.uint8)))
    shifted = run_values.rounded_alike((expected[0], scales.float().mul(2).to(scales.dtype), outer), expected)
    assert shifted == ["scales: 256 of 256 differ"]


def test_inputs_are_hard():
    x = run_values.not_finite((20, 128))
    assert x.isnan().sum() == 1 and x.isinf().sum() == 2
    assert (run_values.finite((20, 128)) == 0).sum() > 20 * 48 and formats.get("nvfp4").block_cols == 16
