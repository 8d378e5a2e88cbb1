"""The times of `check-sm100 --run`: what is divided by what, with a table for a clock, and no GPU."""

import pytest
import torch

pytest.importorskip("triton")

from torch._subclasses import FakeTensorMode  # noqa: E402

from fp4compile import _compat  # noqa: E402
from fp4compile.check import run_times  # noqa: E402
from fp4compile.check.products import TWO_CTAS, MatmulCase  # noqa: E402
from fp4compile.check.quantisers import CONFIGURATIONS  # noqa: E402
from fp4compile.hardware import Target  # noqa: E402
from fp4compile.templates.launch import dry_run  # noqa: E402

OF_EXPERTS = {"grouped_block_scaled_sm100": 4.0,
              **({TWO_CTAS: 20.0} if _compat.two_cta_products_of_groups() else {})}  # fmt: skip
KERNELS = {"skinny_block_scaled_sm100": 8.0, "block_scaled_sm100": 16.0, "library_block_scaled": 40.0,
           **({TWO_CTAS: 20.0} if _compat.two_cta_products() else {})}  # fmt: skip
BF16, QUANTISE = 24.0, 50.0
RATE = 4e6  # bytes a microsecond that a copy reads and writes


@pytest.fixture
def clock(monkeypatch):
    """Microseconds of a call, by what is called; a kernel that is missing from the table fails."""

    def graph_time(calls):
        called = getattr(calls[0], "func", None)
        if called is torch.mm:
            return BF16
        if called is run_times.results:
            _, choice = calls[0].args
            return (KERNELS | OF_EXPERTS)[choice.kernel]
        if called is None:
            return sum(tensor.cell_contents.nbytes for tensor in calls[0].__closure__) / RATE
        return QUANTISE

    monkeypatch.setattr(run_times, "graph_time", graph_time)
    with FakeTensorMode(), dry_run(Target(100)):
        yield


pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


def test_over_bf16_is_how_many_times_faster_than_bf16(clock):
    found = run_times.multiplied(MatmulCase("nvfp4", "nvfp4", 64, 512, 1024))
    assert found["chosen"] == "skinny_block_scaled_sm100" and found["bf16 us"] == 24
    assert {name: found[f"{name} us"] for name in KERNELS} == KERNELS
    assert found["over bf16"] == 3  # 24 us / 8 us, of the kernel that is chosen and not of another one
    assert found["TFLOP/s"] == round(2 * 64 * 512 * 1024 / 8e-6 / 1e12, 1) == 8.4
    assert "wrong" not in found


def test_a_kernel_that_fails_has_no_ratio(clock, monkeypatch):
    monkeypatch.delitem(KERNELS, "skinny_block_scaled_sm100")
    found = run_times.multiplied(MatmulCase("nvfp4", "nvfp4", 64, 512, 1024))
    assert found["wrong"] == ["skinny_block_scaled_sm100: KeyError: 'skinny_block_scaled_sm100'"]
    assert found["block_scaled_sm100 us"] == 16 and not {"over bf16", "TFLOP/s"} & found.keys()


def test_experts_are_timed_by_every_kernel(clock):
    found = run_times.multiplied(MatmulCase("nvfp4", "nvfp4", 64, 512, 1024, groups=4))
    assert {name: found.get(f"{name} us") for name in OF_EXPERTS} == OF_EXPERTS
    assert found["chosen"] == "grouped_block_scaled_sm100"
    assert found["TFLOP/s"] == round(2 * 64 * 512 * 1024 / 4e-6 / 1e12, 1) == 16.8


def test_a_copy_reads_and_writes(clock):
    assert run_times.copied() == {"TB/s": 4.0}


@pytest.mark.parametrize(("format", "reads"), [("nvfp4_one_level", 1), ("nvfp4", 2)])
def test_quantisers_are_measured_by_the_bytes_of_a_copy(format, reads, clock):
    """2 bytes an element for each kernel that reads it; of the codes half a byte, and a sixteenth of a scale."""
    (rows,) = (one for one in CONFIGURATIONS if (one.label, one.format) == ("rows", format))
    moved = rows.shape[0] * rows.shape[1] * (2 * reads + 1 / 2 + 1 / 16)
    found = run_times.quantized(rows)
    assert found["us"] == 50 and found["TB/s"] == pytest.approx(moved / 50e-6 / 1e12, abs=0.006)
    assert found["of a copy"] == pytest.approx(moved / 50 / RATE, abs=0.006)


OF_CODES = ["block_scaled_sm100", *[TWO_CTAS] * _compat.two_cta_products()]


@pytest.mark.parametrize(("product", "names", "kernels", "read"), [
    (MatmulCase("mxfp4", "mxfp4", 512, 512, 1024, result="mxfp4"), OF_CODES,
     [*(f"gemm_{name}" for name in OF_CODES), "gemm_block_scaled_sm100"], [(512, 512)]),
    (MatmulCase("mxfp4", "mxfp4", 512, 256, 1024, epilogue="pair", groups=4, result="mxfp4"),
     ["grouped_block_scaled_sm100"], ["gemm_block_scaled_sm100"] * 2,
     [(512, 256)] * 2),
])  # fmt: skip
def test_a_result_in_codes_is_timed_beside_a_quantiser(product, names, kernels, read, monkeypatch):
    """What is launched for each of the times, and what the quantiser reads; nothing on other GPUs."""

    def graph_time(calls):
        calls[0]()
        return 8.0

    def quantise(x, *arguments, operands, **options):
        found.append([tuple(one.shape) for one in (x, *operands)])

    found = []
    monkeypatch.setattr(run_times, "graph_time", graph_time)
    monkeypatch.setattr(run_times, "QUANTIZE", quantise)
    with FakeTensorMode(), dry_run(Target(100)) as launches:
        assert run_times.multiplied(product) == {
            "chosen": names[0], **{f"{one} us": 8 for one in names}, "product and quantiser us": 8
        }  # fmt: skip
    assert [launch.kernel.__name__ for launch in launches] == kernels and found == [read]
    with FakeTensorMode(), dry_run(Target(90)):
        assert run_times.multiplied(product) == {}
