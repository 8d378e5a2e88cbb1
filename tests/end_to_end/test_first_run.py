"""`check-sm100 --run`: processes that end too early, kernels that are wrong, machines without a GPU.

The kernels run in Triton's interpreter, in a process of their own (`test_in_the_interpreter`).
"""

import json
import multiprocessing
import os
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from fp4compile.__main__ import main  # noqa: E402
from fp4compile.check import cases, comparison, first_run, products, quantisers, run_times  # noqa: E402
from fp4compile.check.cases import Case, Finding, in_process  # noqa: E402
from fp4compile.check.comparison import Here  # noqa: E402
from fp4compile.check.products import MatmulCase  # noqa: E402
from fp4compile.check.quantisers import BOTH, Configuration  # noqa: E402
from fp4compile.formats import formats, reference  # noqa: E402
from fp4compile.hardware import Target  # noqa: E402
from fp4compile.ops.quantize import DEQUANTIZE, QUANTIZE  # noqa: E402
from fp4compile.templates import choose  # noqa: E402
from fp4compile.templates.gemm import dequant_tiles  # noqa: E402
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


@pytest.fixture
def quick_starts(monkeypatch):
    """Processes are forks of one that has imported the package, and has done nothing else."""
    get_context = multiprocessing.get_context

    def context(method):
        assert method == "spawn"
        forks = get_context("forkserver")
        forks.set_forkserver_preload(["fp4compile.check.first_run", "fp4compile.check.run_times"])
        return forks

    monkeypatch.setattr(multiprocessing, "get_context", context)


@compiled
@pytest.mark.parametrize(("made", "status"), [(all_good, 0), (one_of_each, 1)])
def test_what_fails_is_recorded_and_the_rest_runs(made, status, pretended_gpu, monkeypatch, capsys, tmp_path, request):
    """Each case in another process; the one that ends it has its row, and a new process runs what is left."""
    if made is one_of_each:
        request.getfixturevalue("quick_starts")
    monkeypatch.setattr(first_run, "value_cases", made)
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
    monkeypatch.setattr(first_run, "value_cases", one_of_each)
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
    names = [case.name for case in first_run.value_cases()]
    assert len(set(names)) == len(names)
    for one in (*quantisers.ALL_CONFIGURATIONS, *quantisers.MORE_CONFIGURATIONS):
        name = f"quantise {one.label}, {one.format}"
        assert {name, f"{name}, ragged"} <= set(names)
    multiplied = {name for pair in first_run.PAIRS for name in pair if name}
    assert multiplied >= {"nvfp4", "nvfp4_one_level", "nvfp4_rowwise", "nvfp4_16x16", "mxfp8", "mxfp8_32x32", "mxfp4"}
    for a, b in first_run.PAIRS:
        of_pair = [name for name in names if f"product {a or 'bf16'} x {b}, " in name]
        assert all(any(kind in name for name in of_pair) for kind in ("bias", "gated", "not finite"))
    for name in first_run.OF_EXPERTS:
        of_groups = [one for one in names if one.startswith(f"exact product {name} x {name}, ") and "groups" in one]
        assert len({"along K" in one for one in of_groups}) == 2
    times = [case.name for case in run_times.cases()]
    assert len(set(times)) == len(times) > len(run_times.PAIRS) * len(run_times.SHAPES)


@compiled
@pytest.mark.parametrize("sm", [90, 100])
@pytest.mark.parametrize("one", quantisers.MORE_CONFIGURATIONS, ids=lambda one: f"{one.label}, {one.format}")
def test_the_cases_beyond_the_table_can_run(one, sm, few_rows_of_groups, monkeypatch):
    """With the reference in the place of the kernels: nothing but a GPU runs all of them."""
    monkeypatch.setattr(quantisers, "quantize_kernels", QUANTIZE)
    monkeypatch.setattr(quantisers, "dequantize_kernels", DEQUANTIZE)
    checks = dict(quantisers.checks((19, 48), more=[one]))
    (check,) = checks[f"quantise {one.label}, {one.format}"]
    assert check(SimpleNamespace(device="cpu", target=Target(sm), running=nullcontext)) == []


@compiled
def test_in_the_interpreter():
    in_interpreter.assert_passes(__file__)


@pytest.fixture
def few_rows_of_groups(monkeypatch):
    """Groups of 0, 3, 0 and 14 rows, and two rows of no group."""
    for module in (quantisers, products):
        monkeypatch.setattr(module, "ENDS", (0, 3, 3, 17))
        monkeypatch.setattr(module, "GROUP_ROWS", 19)


@interpreted
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_rowwise", "mxfp8", "float8_rowwise"])
def test_experts_are_right(name, few_rows_of_groups, monkeypatch):
    both = Configuration("grouped both", name, dim=BOTH, groups="rows")
    multiplied = [
        MatmulCase(name, name, 19, 20, 48, groups=4),
        MatmulCase(name, name, 20, 48, 19, groups=4, along_k=True),
    ]

    def found():
        wrong = quantisers.quantized(both, (19, 48), Here())
        return wrong + [what for one in multiplied for what in products.by_every_kernel(one, Here())["wrong"]]

    assert found() == []
    right, product = quantisers.quantize_kernels, products.multiply
    monkeypatch.setattr(quantisers, "quantize_kernels", lambda x, *args, **more: right(-x, *args, **more))
    monkeypatch.setattr(products, "multiply", lambda *args: 1.01 * product(*args))
    wrong = found()
    assert {one.split(" codes: ")[0] for one in wrong[:-2]} >= {"finite: rows'", "finite: columns'"}
    assert [one.partition(":")[0] for one in wrong[-2:]] == ["dequant_tiles"] * 2


@interpreted
def test_every_kernel_of_experts_is_run(few_rows_of_groups, monkeypatch):
    """Those between which `max-autotune` decides. Here one stands in for them."""
    product = MatmulCase("nvfp4", "nvfp4", 19, 20, 48, groups=4)
    tiles, registry = replace(dequant_tiles.CANDIDATE, name="tiles", tier="native"), choose.REGISTRY

    def run(call, config):
        return tiles.run(call, config) * 1.125

    monkeypatch.setattr(choose, "REGISTRY", (*registry, replace(tiles, run=run)))
    found = products.by_every_kernel(product, Here())
    assert found["kernels"] == "dequant_tiles, tiles"
    assert [one.split(": ")[0] for one in found["wrong"]] == ["tiles"]


GATED_ROWS = Configuration("rows of a gate", "nvfp4_one_level", steps=quantisers.GATE)
RMS_NORM = Configuration("a norm", "nvfp4", steps=quantisers.RMS_NORM)


@interpreted
def test_a_wrong_prologue_is_found(few_rows_of_groups, monkeypatch):
    """A bit of a code; a value that is computed wrong, and quantised as it is; a NaN that is hidden."""
    right, norm = quantisers.quantize_kernels, replace(RMS_NORM, format="mxfp8")

    def found(planted, configuration=norm):
        monkeypatch.setattr(quantisers, "quantize_kernels", planted)
        return quantisers.quantized_after_steps(configuration, (6, 64), Here())

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

    experts = replace(GATED_ROWS, format="mxfp8", groups="rows")
    assert found(right, experts) == [] and found(negated, experts)


def multiplied(a, b, kind="", batches=1):
    """What is wrong with a small product."""
    epilogue, made = ("", comparison.not_finite) if kind == "not finite" else (kind, comparison.finite)
    m, n, k = (12, 20, 96) if batches == 1 else (5, 8, 64)
    return products.by_every_kernel(MatmulCase(a, b, m, n, k, epilogue, batches=batches), Here(), made)


@interpreted
@pytest.mark.parametrize("kind", ["", "bias", "gated", "not finite"])
@pytest.mark.parametrize(("a", "b"), [("nvfp4", "nvfp4"), ("nvfp4_rowwise", "nvfp4_te"), ("mxfp8", "mxfp4"),
                                      (None, "mxfp8")])  # fmt: skip
def test_products_are_right(a, b, kind):
    assert multiplied(a, b, kind) == {"kernels": "dequant_tiles", "wrong": []}
    assert multiplied(a, b, batches=2)["wrong"] == []


@interpreted
def test_a_wrong_quantise_kernel_is_found(monkeypatch):
    """One bit of one code, one of a scale, a global scale by one step; and in codes of which a step is allowed, two."""
    right = quantisers.quantize_kernels

    def planted(change):
        def quantize(*args, **options):
            found = [x.clone() for x in right(*args, **options)]
            change(*found)
            return found

        monkeypatch.setattr(quantisers, "quantize_kernels", quantize)
        return quantisers.quantized(Configuration("rows", "nvfp4"), (18, 40), Here())

    assert planted(lambda data, scales, outer: None) == []
    assert "finite: codes: 1 of 432 differ" in planted(lambda data, scales, outer: data[3, 2].bitwise_xor_(1))
    assert "finite: scales: 1 of 54 differ" in planted(
        lambda data, scales, outer: scales.view(torch.uint8)[3, 2].bitwise_xor_(1)
    )
    assert "finite: global or row scale: 1 of 1 differ" in planted(lambda data, scales, outer: outer.mul_(1 + 2**-23))


@interpreted
@pytest.mark.parametrize(("factor", "kind"), [(1.02, ""), (1.02, "bias"), (1.05, "gated"), (1.02, "not finite")])
def test_a_wrong_product_is_found(factor, kind, monkeypatch):
    right = products.multiply

    def planted(*args, **options):
        out = right(*args, **options)
        return torch.cat((out[:-1], (out[-1:].float() * factor).to(out.dtype)))

    monkeypatch.setattr(products, "multiply", planted)
    format = "mxfp8" if kind == "not finite" else "nvfp4"  # whose global scale would make every value a NaN
    (what,) = multiplied(format, format, kind)["wrong"]
    assert what.startswith("dequant_tiles: ") and "times the bound" in what


@interpreted
def test_a_hidden_nan_is_found(monkeypatch):
    monkeypatch.setattr(products, "multiply", lambda *args: torch.zeros(12, 20, dtype=torch.bfloat16))
    found = multiplied("mxfp8", "mxfp8", "not finite")["wrong"]
    assert any("a finite value where a NaN or an infinity went in" in what for what in found)


def test_stochastic_codes_may_be_a_step_apart_and_no_more():
    """Of codes 1..6 (0.5 to 4), as many up as down."""
    codes = torch.randint(1, 6, (64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed = reference.pack
    scales, outer = torch.ones(64, 4).to(torch.float8_e4m3fn), torch.ones(())
    expected = (packed(codes), scales, outer)
    up = torch.arange(64) % 2

    def compared(other):
        return quantisers.rounded_alike((packed(other), scales, outer), expected)

    assert compared(codes + (up * 2 - 1).to(torch.uint8)) == []
    assert "codes: a value is not rounded to a neighbour" in compared(codes + (up * 2).to(torch.uint8))
    assert any("biased by" in what for what in compared(codes + (up > 0).to(torch.uint8)))
    shifted = quantisers.rounded_alike((expected[0], scales.float().mul(2).to(scales.dtype), outer), expected)
    assert shifted == ["scales: 256 of 256 differ"]


def test_inputs_are_hard():
    x = comparison.not_finite((20, 128))
    assert x.isnan().sum() == 1 and x.isinf().sum() == 2
    assert (comparison.finite((20, 128)) == 0).sum() > 20 * 48 and formats.get("nvfp4").block_cols == 16
