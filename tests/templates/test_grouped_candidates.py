"""Experts with few tokens and packed weights, and by the library's FP8 product: values, launches, machine code.

In Triton's interpreter inline PTX is played. The library is not here: torch's own meta implementation checks the
arguments, and a stand-in computes. The interpreter has to be chosen before Triton is imported:
`test_in_the_interpreter` of test_grouped_kernels.py runs this file again in a process of its own.
"""

import re

import pytest
import torch
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.runtime import driver

from fp4compile.check.machine_code import compile_launch
from fp4compile.check.ptx import Ptx
from fp4compile.formats import formats, reference, reference_grouped
from fp4compile.formats.grouping import Groups
from fp4compile.formats.layouts import ceil_div
from fp4compile.formats.operand import Operand
from fp4compile.hardware import Target
from fp4compile.templates import launch
from fp4compile.templates.gemm import indexed, streaming
from fp4compile.templates.gemm.skinny import SkinnyConfig
from fp4compile.templates.gemm.wgmma_launches_sm90 import WgmmaConfig
from fp4compile.templates.launch import dry_run
from fp4compile.templates.multiply import call_of
from tests.helpers import ptx_lanes
from tests.helpers.arguments import of_groups
from tests.helpers.kernels import INTERPRETING, gpu, on_device
from tests.helpers.multiplied import scaled_grouped_mm
from tests.helpers.quantisers import quantize

if INTERPRETING:
    ptx_lanes.install()

FP8, BF16 = formats.get("float8_rowwise"), torch.bfloat16
SIZES = (0, 3, 0, 11, 1, 0)  # of 17 rows; two are of no group


def operands(a, b, offs, rows, n, k, layout="linear"):
    offs, x, w = torch.tensor(offs, dtype=torch.int32), torch.randn(rows, k), torch.randn(len(offs), n, k)
    b = formats.get(b)
    right = Operand(*reference_grouped.quantize_matrices(w, b, -1, None, layout, None, False), b)
    if isinstance(a, torch.dtype):
        return Operand(x.to(a)), right, offs
    a = formats.get(a)
    return Operand(*reference_grouped.quantize_rows(x, Groups.of(offs, rows), a, None, "linear", None), a), right, offs


def check(a, b, offs, config=None, out_dtype=torch.float32):
    """The kernel's product against the reference's: float32's error, and one rounding to the output's type."""
    rows = a.data.shape[0]
    expected = reference_grouped.scaled_grouped_mm(a, b, offs, rows, out_dtype)
    call = call_of(of_groups(on_device(a), on_device(b), on_device(offs), rows, out_dtype))
    assert streaming.streams(call.problem)
    got = streaming.CANDIDATE.run(call, config or streaming.CANDIDATE.configure(call.problem))
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    got, expected = got.cpu().double(), expected.double()
    assert torch.equal(got.isnan(), expected.isnan())
    got, expected = got.nan_to_num(0.0), expected.nan_to_num(0.0)
    bound = 2.0**-18 if out_dtype == torch.float32 else 2.0**-7
    assert ((got - expected).abs() <= bound * expected.abs().amax()).all()


@gpu
@pytest.mark.parametrize(("a", "layout"), [(torch.bfloat16, "linear"), (torch.float16, "swizzled"),
                                           ("nvfp4", "swizzled"), ("nvfp4_rowwise", "linear")], ids=str)  # fmt: skip
def test_products(a, layout):
    """Groups without rows, with more rows than a tile, rows of no group; sizes that no tile divides."""
    offs = torch.tensor(SIZES).cumsum(0).tolist()
    check(*operands(a, "nvfp4", offs, 17, 40, 192, layout))


@gpu
@pytest.mark.parametrize("offs", [(-4, 9, 3, 300, 12), (0, 0), (9,)], ids=str)
def test_offsets(offs):
    """Those that decrease, begin below 0, end beyond the rows; groups without anything; one with more than a tile."""
    check(*operands(torch.bfloat16, "nvfp4_16x16", offs, 9, 32, 64), out_dtype=torch.bfloat16)


@gpu
@pytest.mark.parametrize(("config", "n", "k"), [
    (SkinnyConfig(2, 1, 4, 4, 2, 3), 40, 192), (SkinnyConfig(4, 2, 4, 3, 2, 2), 64, 512),
    (SkinnyConfig(8, 1, 4, 3, 1, 1), 40, 192),
], ids=str)  # fmt: skip
def test_every_program_walks_its_tiles(config, n, k):
    """Several tiles of several groups each, whole and ragged ones."""
    offs = torch.tensor(SIZES).cumsum(0).tolist()
    check(*operands(torch.float16, "nvfp4", offs, 17, n, k), config)


@gpu
def test_a_nan_stays_in_its_row():
    a, b, offs = operands(torch.bfloat16, "nvfp4_one_level", (2, 3, 9), 11, 32, 128)
    a.data[2] = a.data[10] = torch.nan  # of the second group; of no group
    check(a, b, offs)


@gpu
@pytest.mark.parametrize("rows", [1, 3])
def test_by_index(rows):
    """Each few rows have a matrix of their own; negative indices, and some that do not exist."""
    x, w, fmt = torch.randn(5, rows, 64), torch.randn(4, 24, 64), formats.get("nvfp4_rowwise")
    a, b = Operand(x.bfloat16()), Operand(*reference.quantize(w, fmt, None, "linear"), fmt)
    check_indexed(a, b, torch.tensor([3, 0, -1, 3, -4]))
    a = Operand(*reference.quantize(x, fmt, None, "linear"), fmt)
    check_indexed(a, b, torch.tensor([3, 0, 9, -1, -9], dtype=torch.int32))


def check_indexed(a, b, index):
    taken = torch.where(index < 0, index + 4, index).clamp(0, 3)
    each = Operand(b.data[taken], b.scales.view(torch.uint8)[taken].view(b.scales.dtype), b.outer[taken], b.format)
    expected = reference.scaled_mm(a, each, None, torch.float32)
    got = indexed.multiply_indexed(on_device(a), on_device(b), on_device(index), torch.float32).cpu()
    assert got.shape == expected.shape
    assert ((got - expected).abs() <= 2.0**-18 * expected.abs().amax()).all()


# ---------------------------------------------------------------- launches and machine code


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def launched(rows, groups, n, k, mxfp8=False):
    """The launches of bfloat16 tokens and NVFP4 weights, or of MXFP8 tokens and weights."""
    fmt, offs, x = formats.get("mxfp8" if mxfp8 else "nvfp4"), meta(groups, dtype=torch.int32), meta(rows, k)
    with dry_run(Target(90)):
        a = Operand(*quantize(x, fmt), fmt) if mxfp8 else Operand(x)
        b = quantize(meta(groups, n, k), fmt, each_matrix=True)
    with dry_run(Target(90)) as launches:
        scaled_grouped_mm(a, Operand(*b, fmt), offs, rows, torch.bfloat16)
    return launches


@pytest.mark.skipif(INTERPRETING, reason="asks for launches")
@pytest.mark.parametrize(("n", "k", "rows", "kernel"), [
    (4096, 1024, 1, "gemm_skinny"), (4096, 1024, 32, "gemm_skinny"), (4096, 1024, 33, "gemm_wgmma_sm90"),
    (4096, 1024, 2**17, "gemm_wgmma_sm90"), (2048, 1024, 64, "gemm_skinny"), (2048, 1024, 65, "gemm_wgmma_sm90"),
    (4096, 768, 7, "gemm_skinny"), (4096, 768, 8, "gemm_wgmma_sm90"),
])  # fmt: skip
def test_which_kernel_by_rows(n, k, rows, kernel):
    """Up to four rows a group on average are streamed, and up to eight where the other kernel has few programs; less
    than one where K is short."""
    assert launched(rows, 8, n, k)[-1].kernel.__name__ == kernel


@pytest.mark.skipif(INTERPRETING, reason="asks for launches")
def test_launches_of_streamed_weights():
    """What was measured: one stage and 32 rows of B for every number of rows, four programs a multiprocessor."""
    found = [[launched(rows, 8, 2048, 1024)[-1].constants[name] for name in ("ROWS", "TILES", "WARPS", "STAGES")]
             for rows in (2, 4, 32)]  # fmt: skip
    assert found == [[2, 2, 4, 1], [4, 2, 4, 1], [8, 2, 4, 1]]
    assert launched(32, 8, 2048, 1024)[-1].grid == 4 * 132


@pytest.mark.skipif(INTERPRETING, reason="asks for launches")
@pytest.mark.parametrize(("groups", "n", "k"), [(8, 4096, 14336), (128, 1536, 2048), (128, 2048, 768)])
def test_tiles_of_packed_weights_grow_with_the_rows_of_groups(groups, n, k):
    """By the model of their time; each fits on a multiprocessor. Programs are enough for any sizes of groups."""
    made = [launched(each * groups, groups, n, k)[-1] for each in (9, 16, 32, 64, 65, 96, 128, 256, 512, 1024, 8192)]
    tiles = [one.constants["ROWS"] for one in made]
    assert tiles == sorted(tiles) and tiles[0] <= 32 and tiles[-1] >= 192
    assert {one.kernel.__name__ for one in made} == {"gemm_wgmma_sm90"}
    config = WgmmaConfig(128, 8, 1, 4, 1)
    assert config.grid(129, n) == n // 128 * 2
    for size in range(120, 140):  # a tile of a group may begin 7 rows before it; one row is of no group
        ends = [size * (i + 1) for i in range(groups)]
        needed = sum(ceil_div(end - (end - size) // 8 * 8, 128) for end in ends) + 1
        assert needed * ceil_div(n, 128) <= config.grid(ends[-1] + 1, n, groups)


@pytest.mark.skipif(INTERPRETING, reason="launches nothing")
def test_in_a_graph(monkeypatch):
    """Nothing is copied that is not written. Many rows with small scales are computed again into the same memory."""
    from tests.helpers.absent_gpu import NoGpu  # imports all passes

    monkeypatch.setattr(driver, "_active", NoGpu(90))
    monkeypatch.setattr(launch, "cuda_target", lambda index: Target(90))
    nvfp4, mxfp8 = formats.get("nvfp4_one_level"), formats.get("mxfp8")

    def products(x, data, scales, offs, index, rows, rows_scales, matrices, matrices_scales):
        b = Operand(data, scales, None, nvfp4)
        many = Operand(rows, rows_scales, None, mxfp8), Operand(matrices, matrices_scales, None, mxfp8)
        by_index = indexed.multiply_indexed(Operand(x.unsqueeze(1)), b, index, BF16)
        few = scaled_grouped_mm(Operand(x), b, offs, len(x), BF16)
        packed = scaled_grouped_mm(Operand(torch.cat([x] * 9)), b, offs, 9 * len(x), BF16)
        return by_index, few, packed, scaled_grouped_mm(*many, offs, len(rows), BF16)

    fp8, e8m0 = mxfp8.data_dtype, mxfp8.scale_dtype
    shapes = (((4, 1024), BF16), ((4, 32, 512), nvfp4.data_dtype), ((4, 32, 64), nvfp4.scale_dtype),
              ((4,), torch.int32), ((4,), torch.int64), ((1024, 128), fp8), ((1024, 4), e8m0), ((4, 256, 128), fp8),
              ((4, 256, 4), e8m0))  # fmt: skip
    with FakeTensorMode():
        tensors = (torch.empty(shape, dtype=dtype, device="cuda:0") for shape, dtype in shapes)
        graph = make_fx(torch.func.functionalize(products))(*tensors).graph
    launched = graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional)
    cloned = [sorted(node.kwargs["tensors_to_clone"]) for node in launched]
    assert cloned == [*[["out_ptr", "table_ptr"]] * 2, ["swizzled_a_ptr"], ["out_ptr"],
                      *[["inexact_ptr", "out_ptr"]] * 2, *[["out_ptr"]] * 2]  # fmt: skip


@pytest.mark.skipif(INTERPRETING, reason="compiles")
def test_machine_code():
    """Weights of DeepSeek-V3 for few rows: four programs a multiprocessor, copies of 16 bytes. Nothing spills."""
    (one,) = launched(32, 8, 2048, 7168)
    compiled = compile_launch(one, 90)
    assert not compiled.resources.problems and compiled.resources.programs >= 4
    assert re.search(r"cp\.async\.cg\.shared\.global", compiled.compiled.asm["ptx"])
    assert re.search(r"mma\.sync\.aligned\.m16n8k16", compiled.compiled.asm["ptx"])


@pytest.mark.skipif(INTERPRETING, reason="compiles")
def test_machine_code_of_packed_experts():
    """Offsets are searched without shared memory, which the kernel uses; weights are dequantised while `wgmma` runs."""
    swizzle, one = launched(64 * 8, 8, 2048, 7168)
    assert compile_launch(swizzle, 90).compiled.metadata.shared == 0
    compiled = compile_launch(one, 90)
    awaited = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d)", compiled.sass.text)
    assert awaited == ["0x1", "0x1", "0x0"] * 3  # of the tile, and of its two narrow forms
    assert compiled.compiled.metadata.shared == one.constants["SHARED"]
    assert compiled.compiled.asm["ptx"].count("st.shared") == 1  # in the loop that reserves it, and never runs
    assert not compiled.resources.problems and compiled.resources.programs == 2


@pytest.mark.skipif(INTERPRETING, reason="compiles")
def test_machine_code_of_many_rows():
    """Operands that are dequantised in memory: `wgmma` while TMA brings the next ones, also those of the program's next
    tile; 16-byte stores, no spills."""
    product = launched(65537, 8, 2048, 7168, mxfp8=True)[-2]  # before the kernel for values that bfloat16 does not hold
    assert product.kernel.__name__ == "gemm_grouped"
    compiled = compile_launch(product, 90)
    ptx = Ptx(compiled.compiled.asm["ptx"])
    assert set(ptx.products) == {"wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16"}
    assert ptx.tma_loads and ptx.overlap.overlapped, ptx.overlap.why
    assert not compiled.resources.problems and set(compiled.sass.widths("STG")) == {16}
