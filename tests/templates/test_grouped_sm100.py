"""The grouped block-scaled kernel: values in Triton's interpreter, machine code for SM100.

In Triton's interpreter in the process of test_grouped_candidates.py.
"""

from dataclasses import replace

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from triton.runtime import driver

from fp4compile import hardware
from fp4compile.check import machine_code as check_machine_code
from fp4compile.check.products import MatmulCase
from fp4compile.formats import formats, reference_grouped
from fp4compile.formats.grouping import Groups
from fp4compile.formats.operand import Operand
from fp4compile.hardware import Target
from fp4compile.templates import launch
from fp4compile.templates.gemm.block_scaled_sm100 import GROUPED as CANDIDATE
from fp4compile.templates.gemm.block_scaled_sm100 import sm100_configs
from fp4compile.templates.gemm.heuristics import BlockScaledConfig
from fp4compile.templates.multiply import call_of
from fp4compile.templates.problem import problem_of
from tests.helpers.arguments import of_groups
from tests.helpers.kernels import INTERPRETING, for_gpus, gpu, on_device
from tests.helpers.multiplied import scaled_grouped_mm

BF16 = torch.bfloat16
interpreted = pytest.mark.skipif(not INTERPRETING, reason="the interpreter stands in for an SM100 GPU")
compiled = pytest.mark.skipif(INTERPRETING, reason="compiles, or asks for launches")
both_forms = pytest.mark.parametrize("along_k", [False, True], ids=["rows", "along K"])

ROWS, OFFS = 170, (0, 3, 133, 133, 134, 163)  # groups of 0, 3, 130, 0, 1 and 29 rows, then 7 rows of no group


@pytest.fixture(autouse=True)
def memory_holds_anything(monkeypatch):
    """What is not written would be NaN."""
    torch.manual_seed(0)
    empty = torch.Tensor.new_empty

    def filled(x, size, **options):
        found = empty(x, size, **options)
        return found.fill_(torch.nan) if found.is_floating_point() and found.numel() else found

    if INTERPRETING:
        monkeypatch.setattr(torch.Tensor, "new_empty", filled)


def operands(a, b, along_k, offs=OFFS, rows=ROWS, k=288, n=140, outer=(None, None), p=100, x=None):
    """(A, B, offs), quantised by the reference: [rows, k] x [G, n, k], or [p, padded rows] x [n, padded rows]."""
    a, b, offs = formats.get(a), formats.get(b), torch.tensor(offs, dtype=torch.int32)
    groups = Groups.of(offs, rows)
    x = torch.randn(rows, p if along_k else k) if x is None else x
    if along_k:
        y = torch.randn(rows, n)
        left, right = (reference_grouped.quantize_columns(each, groups, fmt, given, "swizzled", None, False)
                       for each, fmt, given in ((x, a, outer[0]), (y, b, outer[1])))  # fmt: skip
    else:
        w = torch.randn(len(offs), n, k)
        left = reference_grouped.quantize_rows(x, groups, a, outer[0], "swizzled", None)
        right = reference_grouped.quantize_matrices(w, b, -1, outer[1], "swizzled", None, False)
    return Operand(*left, a), Operand(*right, b), offs


def magnitudes(x):
    """The operand with the absolute values of its elements."""
    codes = x.data.view(torch.uint8) & (0x77 if x.format.packed else 0x7F)
    return replace(x, data=codes.view(x.data.dtype))


def check(a, b, offs, rows=ROWS, out_dtype=torch.float32, config=None):
    """The kernel's product against the reference's, each within the error of a float32 sum."""
    call = call_of(of_groups(on_device(a), on_device(b), on_device(offs), rows, out_dtype))
    got = CANDIDATE.run(call, config or CANDIDATE.configure(call.problem)).cpu()
    expected = reference_grouped.scaled_grouped_mm(a, b, offs, rows, torch.float32)
    sums = reference_grouped.scaled_grouped_mm(magnitudes(a), magnitudes(b), offs, rows, torch.float32)
    assert (got.shape, got.dtype) == (expected.shape, out_dtype)
    got, k = got.float(), a.data.shape[-1] * (2 if a.format.packed else 1)
    bound = 2 * sums * (8 + k**0.5) * 2.0**-23 + 2.0**-140 + expected.abs() * torch.finfo(out_dtype).eps
    finite = expected.isfinite()
    assert (got - expected).abs().le(bound)[finite].all()
    assert torch.equal(got.isnan(), expected.isnan())
    return got


@interpreted
@both_forms
@pytest.mark.parametrize(("a", "b"), [("nvfp4", "nvfp4"), ("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp4")])
def test_formats(a, b, along_k):
    """Empty and ragged groups, rows of no group, sizes that no tile divides."""
    got = check(*operands(a, b, along_k))
    zeros = got[[0, 3]] if along_k else got[OFFS[-1] :]
    assert not zeros.any() and got.any()


@interpreted
@both_forms
@pytest.mark.parametrize(("a", "b", "given"), [("nvfp4", "nvfp4_rowwise", (0.37, None)),
                                               ("nvfp4_rowwise", "nvfp4", (None, 0.37))])  # fmt: skip
def test_outer_scales(a, b, given, along_k):
    """One for all, and of rows; those of groups and none are in `test_formats`."""
    outer = [None if each is None else torch.tensor(each) for each in given]
    check(*operands(a, b, along_k, (1, 2, 5), 7, 32, 130, outer, 32), 7, BF16)


@interpreted
@both_forms
@pytest.mark.parametrize("offs", [(0, 0, 300), (140, 20, 1000), (-300, 0, 7), (300,)], ids=str)
def test_offsets(offs, along_k):
    """Everything in one group, offsets that decrease, that exceed the rows and that are negative, no groups at all."""
    check(*operands("nvfp4", "nvfp4", along_k, offs, 300, 32, 16, p=8), 300)


@interpreted
@both_forms
def test_every_program_walks_its_tiles(along_k, monkeypatch):
    """Several tiles each, with different numbers of steps; every configuration, and another walk."""
    monkeypatch.setitem(hardware._MULTIPROCESSORS, 90, 3)  # which the interpreter counts as having
    a, b, offs = operands("nvfp4", "nvfp4", along_k, (0, 140, 150, 150, 300), 310, 288, 264, p=160)
    configs = sm100_configs(problem_of(of_groups(a, b, offs, 310, BF16), Target(100)))
    assert {(config.bn, config.two_sums) for config in configs} == {(256, False), (128, True)}
    for config in configs:
        check(a, b, offs, 310, BF16, replace(config, group_m=2))


@interpreted
@both_forms
def test_a_nan_stays_in_its_group(along_k):
    """The tiles and steps of other groups that hold its rows are not touched by it."""
    x = torch.randn(ROWS, 32)
    x[133] = torch.nan  # all of group 4, beside the last rows of group 2, which end in a step of 128 columns
    got = check(*operands("nvfp4_one_level", "nvfp4_one_level", along_k, k=32, n=16, x=x))
    nan = torch.zeros(got.shape, dtype=torch.bool)
    nan[4 if along_k else 133] = True
    assert torch.equal(got.isnan(), nan)


@gpu
@for_gpus
@both_forms
@pytest.mark.parametrize(("a", "b"), [("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp4")])
def test_by_tma(a, b, along_k):
    """On Hopper, which has TMA, Triton itself expands MX operands: descriptors and the table on a real GPU."""
    step = 256 if a == b == "mxfp4" and not along_k else 128
    config = BlockScaledConfig(128, 128, step, stages=2, parts=2, warp_specialize=False)
    offs = (0, 300, 301, 301, 1500, 1628, 1640, 1640)
    check(*operands(a, b, along_k, offs, 2000, 640, 1032, p=1000), 2000, BF16, config)


# ---------------------------------------------------------------- launches and machine code


@compiled
def test_what_it_serves():
    product = MatmulCase("nvfp4", "nvfp4", 512, 256, 256, groups=64)

    def served(sm=100, linear=False, **changes):
        one = replace(product, **changes)
        problem = problem_of(one.arguments(), Target(sm))
        if linear:
            problem = replace(problem, spec=replace(problem.spec, a=replace(problem.a, swizzled=False)))
        return CANDIDATE.serves(problem)

    assert served() and served(103) and served(along_k=True) and served(k=32)
    assert served(120) and served(121) and not served(120, along_k=True)
    assert not (served(90) or served(0) or served(k=16) or served(k=0) or served(linear=True))
    mixed = {"a": "mxfp8", "b": "mxfp4"}
    assert served(k=128, **mixed) and served(120, k=128, **mixed)
    assert served(k=96, along_k=True, **mixed) and not served(k=96, **mixed)


@compiled
@pytest.mark.parametrize("along_k", [False, True], ids=["rows", "along K"])
@pytest.mark.parametrize("rows", [1, 100, 2**14])
def test_the_grid_holds_for_any_offsets(rows, along_k):
    """A program for each multiprocessor or for each tile that there can be; a table with an entry for each."""
    sizes = (512, 1000, rows) if along_k else (rows, 1000, 512)
    _, (launched,) = MatmulCase("nvfp4", "nvfp4", *sizes, groups=64, along_k=along_k).launches(100)
    columns = -(-1000 // launched.constants["BN"])
    tiles = columns * (64 * 4 if along_k else rows // 128 + 64)
    assert launched.args["table_ptr"].shape[0] >= tiles
    assert launched.grid == min(launched.args["table_ptr"].shape[0], 148)


@compiled
@both_forms
def test_in_a_graph(along_k, monkeypatch):
    """One launch, whatever the number of rows; nothing is guarded on, and nothing copied that is not written."""
    from tests.helpers.absent_gpu import NoGpu  # imports all passes

    monkeypatch.setattr(driver, "_active", NoGpu(100))
    monkeypatch.setattr(launch, "cuda_target", lambda index: Target(100))
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        symbol = mode.shape_env.create_symbol(512, ConstantSource("s"), DimDynamic.DYNAMIC)
        rows = mode.shape_env.create_symintnode(symbol, hint=512)
        m, k = (512, rows) if along_k else (rows, 256)
        arguments = MatmulCase("nvfp4", "nvfp4", m, 256, k, groups=64, along_k=along_k).arguments()
        a, b, offs = arguments.a, arguments.b, arguments.offs
        tensors = (a.data, a.scales, a.outer, b.data, b.scales, b.outer, offs, torch.empty(rows, device="meta"))
        tensors = [torch.empty(x.shape, dtype=x.dtype, device="cuda:0") for x in tensors]

        def product(a_data, a_scales, a_outer, b_data, b_scales, b_outer, offs, x):
            left, right = Operand(a_data, a_scales, a_outer, a.format), Operand(b_data, b_scales, b_outer, b.format)
            return scaled_grouped_mm(left, right, offs, x.shape[0], BF16)

        with enable_python_dispatcher():  # symbolic sizes
            graph = make_fx(torch.func.functionalize(product))(*tensors).graph
    (launched,) = graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional)
    assert sorted(launched.kwargs["tensors_to_clone"]) == ["out_ptr", "table_ptr"]
    (output,) = graph.find_nodes(op="output")
    assert output.args[0].meta["val"].shape == ((64, 512, 256) if along_k else (rows, 256))
    assert not mode.shape_env.guards


@compiled
def test_machine_code():
    """Scales by `tcgen05.cp`, operands by TMA, copies beside products, results stored 16 bytes at once, no spills.

    Of one product; the gate compiles the others.
    """
    product = MatmulCase("nvfp4_rowwise", "nvfp4", 256, 512, 8192, groups=128, along_k=True)
    _, (launched,) = product.launches(100)
    row = check_machine_code.product_row(product, "native", launched, 100)
    assert row.line == "block-scaled, words" and not row.problems
    assert (row.tma_loads, row.waits) == (4, 2)
    scale_columns = launched.constants["BK"] // launched.constants["BLOCK"]
    assert row.scale_copies == (128 + launched.constants["BN"]) // 128 * scale_columns // 4
    sass = check_machine_code.compile_launch(launched, 100).sass
    stores = sass.widths("STG")
    assert set(stores) == {4, 16}  # 4: entries of the table
    assert stores.count(16) >= 128 * launched.constants["BN"] * BF16.itemsize / (16 * 32 * launched.num_warps)
