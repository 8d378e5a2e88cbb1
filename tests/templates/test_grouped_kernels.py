"""The grouped kernels against `reference_grouped`: quantised operands bit for bit, products to float32's sums.

Without a GPU they run in Triton's interpreter, as `test_quantize_kernels` does. The file is long because the
interpreter runs it in one process, which starts but once.
"""

import re
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fp4compile import _compat, hardware
from fp4compile.check.machine_code import check_quantize
from fp4compile.check.quantisers import GROUPED_CONFIGURATIONS
from fp4compile.formats import formats, reference_grouped
from fp4compile.formats.grouping import Groups
from fp4compile.formats.operand import Operand
from fp4compile.hardware import Target
from fp4compile.ops.quantize import LAY_OUT_SCALES, quantize_kernels
from fp4compile.templates.choose import choose
from fp4compile.templates.device.groups import group_of_tile, of_lanes, per_lane, rows_of_group, total_tiles
from fp4compile.templates.gemm import dequant_operand
from fp4compile.templates.gemm.dequant_operand import grouped_dot_config
from fp4compile.templates.launch import dry_run
from fp4compile.templates.multiply import call_of
from fp4compile.templates.quantize.lay_out import lay_out
from tests.helpers import guarded, in_interpreter
from tests.helpers.arguments import of_groups
from tests.helpers.by_hand import FP8_UNITS_ERROR
from tests.helpers.check_products import ON_FLOAT8_UNITS, magnitudes
from tests.helpers.hard_inputs import hard_input
from tests.helpers.kernels import DEVICE, INTERPRETING, OLD_TRITON, assert_same_bits, gpu, on_device, spilled_bytes
from tests.helpers.multiplied import scaled_grouped_mm
from tests.helpers.quantisers import quantize, quantize_both

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ROWS = 170
# Empty groups, small ones, one of two tiles of 128 rows; 7 rows of no group.
SIZES = (0, 3, 130, 0, 1, 29)
# What each group holds: a group's global scale may depend on nothing outside of it.
CONTENTS = ("randn", "one_nan", "scaled_rows", "randn", "outliers", "ties_fp4")
# Offsets that decrease, begin below 0 and end beyond the rows; one group with everything; none with anything.
UNEVEN = ((-4, 9, 3, 300, 20, 170), (ROWS,), (0, 0))
FORMATS = ["nvfp4", "nvfp4_one_level", "nvfp4_te", "nvfp4_rowwise", "mxfp8", "mxfp4", "float8_rowwise"]
SEED = torch.tensor(2**40 + 5)


def offsets(sizes=SIZES):
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def hard_rows(cols, fmt, dtype=torch.bfloat16):
    """[ROWS, cols], a hard input for each group; larger ones further on, and a NaN in the rows of no group."""
    block = fmt.block_cols if fmt.block else 16
    parts = [hard_input(name, (size, cols), dtype, block) for name, size in zip(CONTENTS, SIZES, strict=True)]
    parts.append(hard_input("one_nan", (ROWS - sum(SIZES), cols), dtype, block))
    return torch.cat([part * 2.0**i for i, part in enumerate(parts)])


def check(x, offs, fmt, dim, outer=None, layout="linear", seed=None, transform=False):
    """Quantise x, on the CPU, by the reference and by the kernels."""
    got = quantize(
        x.to(DEVICE), fmt, on_device(outer), layout, dim=dim, seed=on_device(seed), hadamard=transform,
        offs=on_device(offs), each_matrix=offs is None,
    )  # fmt: skip
    if offs is None:
        assert_same_bits(got, reference_grouped.quantize_matrices(x, fmt, dim, outer, layout, seed, transform))
        return
    groups = Groups.of(offs, x.shape[0])
    if dim == -1:
        expected = reference_grouped.quantize_rows(x, groups, fmt, outer, layout, seed)
        assert_same_bits(got, expected, groups.of_rows < groups.count)
    else:
        assert_same_bits(got, reference_grouped.quantize_columns(x, groups, fmt, outer, layout, seed, transform))


# ---------------------------------------------------------------- quantise


@gpu
@pytest.mark.parametrize("offs", [None, offsets(), *map(torch.tensor, UNEVEN)], ids=str)
def test_scales_that_are_laid_out(offs):
    """Of moved rows: as a quantiser of groups lays them out, or of matrices without groups."""
    offs = None if offs is None else offs.to(torch.int32)
    for blocks in (3, 40):
        x = hard_rows(32 * blocks, formats.get("mxfp8"))
        x = torch.stack((x, x.flip(0))) if offs is None else x
        linear = torch.ops.fp4compile.quantize(x, "mxfp8")[1]
        expected = torch.ops.fp4compile.quantize(x, "mxfp8", offs=offs, layout="swizzled")[1]
        assert_same_bits([LAY_OUT_SCALES(linear, offs)], [expected])
        assert_same_bits([lay_out(linear.to(DEVICE), on_device(offs))], [expected])


@gpu
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("format", FORMATS)
def test_rows(format, layout):
    fmt = formats.get(format)
    if INTERPRETING and (fmt.scale is None or (layout == "linear" and fmt.outer != "tensor")):
        pytest.skip("the kernels of rows without groups")
    check(hard_rows(40, fmt), offsets(), fmt, -1, layout=layout)


@gpu
@pytest.mark.parametrize("format", FORMATS)
def test_columns(format):
    """One tile of columns, or two."""
    fmt = formats.get(format)
    layout = "swizzled" if format in ("nvfp4_te", "mxfp8") else "linear"
    check(hard_rows(72 if format in ("nvfp4", "nvfp4_rowwise") else 40, fmt), offsets(), fmt, -2, layout=layout)


@gpu
@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_te", "nvfp4_16x16", "mxfp8", "mxfp8_32x32"])
def test_matrices(format, dim):
    fmt = formats.get(format)
    x = torch.stack([hard_input(name, (33, 40), torch.bfloat16, 16) for name in ("outliers", "zeros", "one_nan")])
    check(x, None, fmt, dim, layout="swizzled")
    check(x.mT.contiguous().mT, None, fmt, dim)
    if fmt.outer == "tensor":
        check(x, None, fmt, dim, outer=torch.tensor(0.01))


@gpu
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_16x16"])
def test_matrices_that_lie_apart(format):
    """In all dimensions, with NaN between them."""
    x = torch.stack([hard_input(name, (17, 40), torch.bfloat16, 16) for name in ("outliers", "scaled_rows")])
    around = x.new_full((4, 24, 64), torch.nan)
    around[::2, 4:21, 8:48] = x
    for dim in (-1, -2):
        check(around[::2, 4:21, 8:48], None, formats.get(format), dim)
    check(x[..., :32].contiguous(), None, formats.get(format), -1)  # whole blocks that lie one after the other


@gpu
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_rowwise", "mxfp8"])
def test_rows_and_offsets_that_lie_apart(format):
    """With NaN beside the rows; and groups that end with a block."""
    fmt, sizes = formats.get(format), (32, 0, 64)
    around = torch.full((sum(sizes), 80), torch.nan).bfloat16()
    around[:, 8:48] = torch.randn(sum(sizes), 40)
    around[3, 9] = torch.inf  # the first group's scales are not finite
    ends = torch.stack([offsets(sizes), torch.full((3,), 1, dtype=torch.int32)], 1)[:, 0]
    check(around[:, 8:48], ends, fmt, -1, layout="swizzled")
    check(around[:, 8:48], ends, fmt, -2)
    check_both(around[:, 8:48], ends, fmt)


@gpu
@pytest.mark.parametrize("format", ["nvfp4_te", "nvfp4_rowwise"])
def test_no_amax_is_raised_of_what_is_not_there(format, monkeypatch):
    """Of rows, columns and groups that end inside a tile; there are more tiles than groups."""
    x, zeros = torch.randn(ROWS, 41).bfloat16(), guarded.GuardedZeros(monkeypatch)
    for dim in (-1, -2):
        check(x, offsets((100, 70)), formats.get(format), dim, layout="swizzled")
    check_both(x, offsets((100, 70)), formats.get(format))
    zeros.check()


@gpu
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float16, -1), (torch.float32, -1), (torch.float32, -2)], ids=str)
def test_static_outer_scales(dtype, dim):
    fmt = formats.get("nvfp4")
    check(hard_rows(40, fmt, dtype), offsets(), fmt, dim, outer=torch.tensor(0.01), layout="swizzled")


@gpu
@pytest.mark.parametrize("format", ["nvfp4_te", "nvfp4_rowwise"])
def test_stochastic_rounding_and_the_transform(format):
    fmt = formats.get(format)
    x = hard_rows(40, fmt)
    check(x, offsets(), fmt, -1, layout="swizzled", seed=SEED)
    check(x, offsets(), fmt, -2, seed=SEED, transform=True)
    if fmt.outer == "tensor":
        check(x[:66].view(2, 33, 40), None, fmt, -2, seed=SEED, transform=True)


@triton.jit
def find_groups(offs_ptr, tiles_ptr, found_ptr, rows, TILE: tl.constexpr, GROUPS: tl.constexpr):
    offs = ()
    for i in tl.static_range(2 * per_lane(GROUPS)):
        number, exists = of_lanes(i - per_lane(GROUPS), GROUPS)
        offs = offs + (tl.load(offs_ptr + number, mask=exists, other=0),)
    at = found_ptr + tl.program_id(0) * 8
    tile = tl.load(tiles_ptr + tl.program_id(0))
    group, start, end, row0 = group_of_tile(offs, rows, tile, TILE, GROUPS)
    tl.store(at, group)
    tl.store(at + 1, start)
    tl.store(at + 2, end)
    tl.store(at + 3, row0)
    start, end, first_tile = rows_of_group(offs, rows, tile % GROUPS, TILE, GROUPS)
    tl.store(at + 4, start)
    tl.store(at + 5, end)
    tl.store(at + 6, first_tile)
    tl.store(at + 7, total_tiles(offs, rows, TILE))


@gpu
def test_groups_are_found():
    """However many, in whatever lanes; empty ones, offsets that decrease, begin below 0 or end beyond the rows."""
    for groups, size in ((1, 300), (2, 40), (31, 9), (32, 20), (33, 9), (64, 5), (65, 9), (128, 3), (1024, 2)):
        offs = torch.randint(-3, 2 * size, (groups,)).mul(torch.rand(groups) < 0.7).cumsum(0).to(torch.int32)
        offs[torch.rand(groups) < 0.1] = -7
        for rows in (groups * size // 2, 3 * groups * size):
            cut = Groups.of(offs, rows)
            starts, ends = (torch.cat((each, torch.tensor([last]))) for each, last in ((cut.starts, int(cut.ends[-1])),
                                                                                       (cut.ends, rows)))  # fmt: skip
            after = ((ends - starts + 15) // 16).cumsum(0)
            first = torch.cat((torch.zeros(1), after[:-1])).long()
            total = int(after[-1])
            tiles = torch.cat((torch.randint(0, total, (4,)), torch.tensor([0, total - 1, total, total + 40])))
            found = torch.zeros(8, 8, dtype=torch.int32, device=DEVICE)
            find_groups[(8,)](on_device(offs), on_device(tiles.int()), found, rows, TILE=16, GROUPS=groups)
            group = torch.searchsorted(after, tiles, right=True).clamp(max=groups)
            each = tiles % groups
            expected = (group, starts[group], ends[group], starts[group] + 16 * (tiles - first[group]),
                        starts[each], ends[each], first[each], torch.full((8,), total))  # fmt: skip
            assert torch.equal(found.cpu(), torch.stack(expected, 1).int()), (groups, rows)


def check_both(x, offs, fmt, layout="linear", outer=None, seed=None, transform=False):
    """In both directions at once, by the kernels; each apart, by the reference."""
    found = quantize_both(
        x.to(DEVICE), fmt, on_device(outer), layout, seed=on_device(seed), hadamard=transform, offs=on_device(offs),
        each_matrix=offs is None,
    )  # fmt: skip
    if offs is None:
        for got, dim in zip(found, (-1, -2), strict=True):
            assert_same_bits(got, reference_grouped.quantize_matrices(x, fmt, dim, outer, layout, seed, transform))
        return
    groups = Groups.of(offs, x.shape[0])
    expected = (reference_grouped.quantize_rows(x, groups, fmt, outer, layout, seed),
                reference_grouped.quantize_columns(x, groups, fmt, outer, layout, seed, transform))  # fmt: skip
    for got, right, of_rows in zip(found, expected, (groups.of_rows < groups.count, None), strict=True):
        assert_same_bits(got, right, of_rows)


@gpu
@pytest.mark.parametrize(("format", "cols", "layout", "options"), [
    ("nvfp4", 72, "swizzled", ""), ("nvfp4_one_level", 40, "linear", ""), ("nvfp4_te", 40, "linear", ""),
    ("nvfp4_te", 40, "swizzled", "seed transform"), ("nvfp4", 40, "linear", "outer"),
    ("nvfp4_rowwise", 72, "linear", "transform"), ("nvfp4_rowwise", 24, "swizzled", "seed"),
    ("mxfp8", 40, "swizzled", ""), ("mxfp8", 136, "linear", ""), ("mxfp4", 40, "linear", "seed"),
    ("float8_rowwise", 41, "linear", ""),
])  # fmt: skip
def test_both_directions(format, cols, layout, options):
    fmt, values = formats.get(format), {"seed": SEED, "transform": True, "outer": torch.tensor(0.01)}
    given = {name: values[name] for name in options.split()}
    check_both(hard_rows(cols, fmt), offsets(), fmt, layout, **given)


@gpu
def test_both_directions_of_matrices_and_of_other_rows():
    """Square blocks; float32, rows that lie apart, no row."""
    x = torch.stack([hard_input(name, (33, 40), torch.bfloat16, 16) for name in ("outliers", "zeros", "one_nan")])
    check_both(x, None, formats.get("nvfp4_16x16"), "swizzled")
    check_both(x.mT, None, formats.get("mxfp8_32x32"))
    check_both(x[:, :0], None, formats.get("nvfp4_16x16"))
    fmt = formats.get("float8_rowwise")  # without block scales: nothing but codes is stored
    check_both(hard_rows(41, fmt, torch.float32), offsets(), fmt)
    fmt = formats.get("nvfp4")
    check_both(hard_rows(80, fmt, torch.float32)[:, ::2], offsets(), fmt)
    check_both(hard_rows(80, fmt)[:, :40], offsets(), fmt)
    check_both(torch.empty(0, 40).bfloat16(), torch.zeros(3, dtype=torch.int32), fmt)


@gpu
@pytest.mark.parametrize("offs", UNEVEN, ids=str)
def test_uneven_offsets(offs):
    fmt = formats.get("nvfp4_te")
    offs, x = torch.tensor(offs, dtype=torch.int32), hard_rows(24, fmt)
    check(x, offs, fmt, -1, layout="swizzled")
    check(x, offs, fmt, -2)
    check_both(x, offs, fmt, layout="swizzled", transform=True)
    a, b = of_rows(x.nan_to_num(), offs, "nvfp4_te"), of_matrices(torch.randn(len(offs), 17, 24), "nvfp4_te")
    check_product(a, b, offs)
    check_product(of_columns(x.nan_to_num(), offs, "nvfp4_te"), of_columns(torch.randn(ROWS, 8), offs, None), offs)


@gpu
def test_few_rows():
    """16 rows a tile, longer ones; products that cut K among warps."""
    x, offs = torch.randn(21, 600), offsets((3, 0, 17))
    check(x.bfloat16(), offs, formats.get("nvfp4"), -1)
    x = x[:, :80]
    check_product(of_rows(x, offs, "nvfp4"), of_matrices(torch.randn(3, 16, 80), "nvfp4"), offs, 21)
    check_product(of_columns(x[:, :8], offs, "nvfp4"), of_columns(x[:, 8:24], offs, "nvfp4"), offs, 21)


@gpu
def test_no_rows():
    fmt = formats.get("nvfp4")
    offs = torch.zeros(3, dtype=torch.int32)
    for dim in (-1, -2):
        check(torch.empty(0, 40).bfloat16(), offs, fmt, dim)
    check(torch.empty(2, 0, 40).bfloat16(), None, fmt, -1)


# ---------------------------------------------------------------- products


def of_rows(x, offs, format, layout="linear"):
    """Operands by the reference; plain where there is no format."""
    if format is None:
        return Operand(x.bfloat16())
    fmt = formats.get(format)
    return Operand(*reference_grouped.quantize_rows(x, Groups.of(offs, len(x)), fmt, None, layout, None), fmt)


def of_columns(x, offs, format, layout="linear"):
    if format is None:
        return Operand(x.bfloat16().T.contiguous())
    fmt = formats.get(format)
    groups = Groups.of(offs, len(x))
    return Operand(*reference_grouped.quantize_columns(x, groups, fmt, None, layout, None, False), fmt)


def of_matrices(x, format, layout="linear"):
    if format is None:
        return Operand(x.bfloat16())
    fmt = formats.get(format)
    return Operand(*reference_grouped.quantize_matrices(x, fmt, -1, None, layout, None, False), fmt)


def check_product(a, b, offs, rows=ROWS, out_dtype=torch.float32):
    """The kernel for any rows, and that for many where it computes such a product."""
    expected = reference_grouped.scaled_grouped_mm(a, b, offs, rows, out_dtype)
    sums = reference_grouped.scaled_grouped_mm(magnitudes(a), magnitudes(b), offs, rows, torch.float32)
    a, b = on_device(a), on_device(b)
    call = call_of(of_groups(a, b, on_device(offs), rows, out_dtype))
    error = FP8_UNITS_ERROR * sums if choose(call.problem).kernel in ON_FLOAT8_UNITS else 0.0
    assert_close(scaled_grouped_mm(a, b, on_device(offs), rows, out_dtype), expected, error)
    if dequant_operand.computes_groups(call.problem):
        assert_close(dequant_operand.run(call, grouped_dot_config(call.problem)), expected)


def assert_close(got, expected, error=0.0):
    """Products of values up to 1, in about 100 summands: float32's error, and one rounding to the output's type.

    error: by how much an element may be off before that.
    """
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    bound = 2.0**-20 if expected.dtype == torch.float32 else 2.0**-7
    got, expected = got.cpu().double(), expected.double()
    assert torch.equal(got.isnan(), expected.isnan())
    largest = expected.nan_to_num(0.0).abs().amax(-1, keepdim=True)
    error = torch.as_tensor(error).nan_to_num(0.0)
    assert ((got - expected).abs().nan_to_num(0.0) <= bound * largest + error).all()


PAIRS = [
    ("nvfp4", "nvfp4", "swizzled"), ("nvfp4_rowwise", "nvfp4_te", "linear"), (None, "nvfp4_one_level", "linear"),
    ("mxfp8", "mxfp4", "swizzled"), ("float8_rowwise", "float8_rowwise", "linear"), ("nvfp4", None, "linear"),
]  # fmt: skip


def layout_of(format, layout):
    return layout if format is not None and formats.get(format).scale is not None else "linear"


@gpu
@pytest.mark.parametrize(("a", "b", "layout"), PAIRS, ids=str)
def test_products_of_rows(a, b, layout):
    """A NaN in the last group, whose global scale is one then, does not show in the rows after it."""
    x, w, offs = torch.randn(ROWS, 80), torch.randn(len(SIZES), 16, 80), offsets()
    x[150, 3] = torch.nan
    a, b = of_rows(x, offs, a, layout_of(a, layout)), of_matrices(w, b, layout_of(b, layout))
    check_product(a, b, offs)


@gpu
@pytest.mark.parametrize(("a", "b", "layout"), PAIRS, ids=str)
def test_products_along_rows(a, b, layout):
    """The gradients of weights. A NaN in a group shows in the product of that group, not of the one before it."""
    x, g, offs = torch.randn(ROWS, 16), torch.randn(ROWS, 18), offsets()
    x[1, 3] = g[5, 2] = torch.nan
    a, b = (of_columns(each, offs, name, layout_of(name, layout)) for each, name in ((g, a), (x, b)))
    check_product(a, b, offs)


@gpu
def test_products_of_square_blocks_and_of_small_scales():
    """Blocks that bf16 cannot hold; scales of 0 in the padding are none of these. Results in bf16."""
    x, w, offs = torch.randn(ROWS, 64), torch.randn(len(SIZES), 40, 64), offsets()
    x[40, :32] *= 2.0**-110
    x[40, 32:] = 0.0
    check_product(of_rows(x, offs, "mxfp8"), of_matrices(w, "mxfp8_32x32"), offs)
    check_product(of_rows(x, offs, "nvfp4"), of_matrices(w, "nvfp4_16x16"), offs, out_dtype=torch.bfloat16)
    w = torch.randn(len(SIZES), 64, 64)
    check_product(of_rows(x, offs, "mxfp8"), of_matrices(w, "mxfp8_32x32"), offs)
    x[3:133, 5] *= 2.0**-110
    check_product(of_columns(x[:, :16], offs, "mxfp8"), of_columns(x[:, 16:24] * 2.0**60, offs, "mxfp8"), offs)


@pytest.mark.skipif(not INTERPRETING, reason="the interpreter has as many multiprocessors as it is told")
@pytest.mark.parametrize("along_k", [False, True], ids=["rows", "along K"])
def test_every_program_walks_its_tiles(along_k, monkeypatch):
    """Of several groups, with different numbers of steps."""
    monkeypatch.setitem(hardware._MULTIPROCESSORS, 90, 2)
    x, offs = torch.randn(ROWS, 72), offsets()
    if along_k:
        a, b = of_columns(torch.randn(ROWS, 130), offs, "nvfp4"), of_columns(x, offs, "nvfp4_te")
    else:
        a, b = of_rows(x, offs, "nvfp4"), of_matrices(torch.randn(len(SIZES), 130, 72), "nvfp4_te")
    call = call_of(of_groups(a, b, offs, ROWS, torch.bfloat16))
    config = replace(grouped_dot_config(call.problem), bm=64, bn=64, parts=1, group_m=2)
    expected = reference_grouped.scaled_grouped_mm(a, b, offs, ROWS, torch.bfloat16)
    assert_close(dequant_operand.run(call, config), expected)


# ---------------------------------------------------------------- no GPU, no values


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def meta_operand(x, offs, dim, format, layout="linear"):
    fmt = formats.get(format)
    with dry_run(Target(90)):
        return Operand(*quantize(x, fmt, None, layout, dim=dim, offs=offs, each_matrix=offs is None), fmt)


def test_operands_that_do_not_fit():
    x, w, offs = meta(64, 128), meta(4, 32, 128), meta(4, dtype=torch.int32)
    a, b = meta_operand(x, offs, -1, "nvfp4"), meta_operand(w, None, -1, "nvfp4")
    run, out = meta_operand(x, offs, -2, "nvfp4"), torch.bfloat16
    swizzled = meta_operand(x, offs, -1, "nvfp4", "swizzled")

    def changed(operand, **fields):
        return Operand(**{**vars(operand), **fields})

    for arguments, error, message in [
        ((a, b, meta(3, dtype=torch.int32), 64, out), ValueError, "offs: expected shape"),
        ((a, b, meta(4, dtype=torch.int64), 64, out), TypeError, "offs: expected int32"),
        ((a, b, offs, 63, out), ValueError, "rows: expected the 64 rows"),
        ((a, b, offs, 64, torch.int8), ValueError, "out_dtype"),
        ((Operand(x), Operand(meta(4, 32, 56)), offs, 64, out), ValueError, "contraction"),
        ((run, Operand(meta(32, 511)), offs, 64, out), ValueError, "b: expected rows of 64 elements"),
        ((changed(a, outer=meta(3, dtype=torch.float32)), b, offs, 64, out), ValueError, "a_outer: expected"),
        ((changed(a, scales=swizzled.scales[1:]), b, offs, 64, out), ValueError, "a_scales: expected"),
        ((a, meta_operand(meta(4, 32, 64), None, -1, "nvfp4"), offs, 64, out), ValueError, "contraction"),
        ((a, meta_operand(w, None, -1, "mxfp8"), offs, 64, out), ValueError, "cannot be multiplied"),
        ((a, run, offs, 64, out), ValueError, "a: expected rows of 512 elements"),
        ((run, Operand(meta(32, 63)), offs, 64, out), ValueError, "b: expected rows of 64 elements"),
        ((Operand(w), b, offs, 64, out), ValueError, r"a, b: .*expected \[M, K\] and"),
    ]:  # fmt: skip
        with dry_run(Target(90)), pytest.raises(error, match=message):
            scaled_grouped_mm(*arguments)
    for tensor, format, dim, options, message in [
        (w, "nvfp4", -1, {"offs": offs}, "x: expected two"),
        (x, "nvfp4", -1, {"each_matrix": True}, "x: expected three"),
        (x, "nvfp4", 2, {"offs": offs}, r"dim=\[2\]: x has 2"),
        (w, "nvfp4", 0, {"each_matrix": True}, r"dim=\[-3\]: expected"),
        (x, "nvfp4_16x16", -2, {"offs": offs}, "square blocks"),
        (x, "nvfp4", -1, {"offs": offs, "outer": meta(4, dtype=torch.float32)}, "outer: expected"),
        (x, "nvfp4_te", -1, {"offs": offs, "hadamard": True}, "hadamard: the transform goes along the rows"),
    ]:  # fmt: skip
        with dry_run(Target(90)), pytest.raises(ValueError, match=message):
            quantize_kernels(tensor, format, dim, **options)


@pytest.mark.skipif(INTERPRETING, reason="runs nothing")
def test_launches_do_not_grow_with_groups_nor_depend_on_rows():
    """At most two of a quantise, one of a product, traced with any number of rows, of which nothing is assumed."""
    fmt = formats.get("nvfp4_te")

    def step(x, offs, w):
        counts.append(len(launches))
        operands = []
        for tensor, dim, options in ((x, -1, {"offs": offs}), (w, -1, {"each_matrix": True}),
                                     (x, -2, {"offs": offs, "hadamard": True})):  # fmt: skip
            found = quantize(tensor, fmt, None, "swizzled", dim=dim, **options)
            operands.append(Operand(*found, fmt))
            counts.append(len(launches))
        for name in ("nvfp4_te", "nvfp4_rowwise"):
            quantize_both(x, formats.get(name), None, "swizzled", offs=offs, hadamard=True)
            counts.append(len(launches))
        a, b, down = operands
        products = [scaled_grouped_mm(*pair, offs, x.shape[0], torch.bfloat16) for pair in ((a, b), (down, down))]
        counts.append(len(launches))
        return down.data, *products

    for groups in (2, 300):
        counts: list[int] = []
        with FakeTensorMode(shape_env=ShapeEnv()) as mode, dry_run(Target(90)) as launches:
            symbol = mode.shape_env.create_symbol(256, ConstantSource("s"), DimDynamic.DYNAMIC)
            rows = mode.shape_env.create_symintnode(symbol, hint=256)
            shapes = ((rows, 128), (groups,), (groups, 64, 128))
            dtypes = (torch.bfloat16, torch.int32, torch.bfloat16)
            x, offs, w = (torch.empty(s, dtype=t, device="cuda") for s, t in zip(shapes, dtypes, strict=True))
            traced = make_fx(step)(x, offs, w)
        assert counts == [0, 2, 4, 6, 8, 10, 12]
        (output,) = traced.graph.find_nodes(op="output")
        values = [node.meta["val"] for node in output.args[0]]
        assert [tuple(map(str, value.shape)) for value in values[1:]] == [
            (str(rows), "64"),
            (str(groups), "128", "128"),
        ]
        assert values[0].shape[1].node.expr.subs(symbol, 300) == 64 * (2 + groups)  # bytes of padded rows
        assert not mode.shape_env.guards


@pytest.mark.skipif(INTERPRETING, reason="compiles")
@pytest.mark.parametrize("sm", [90, 100])
def test_quantisers_reach_their_lines(sm):
    """Nothing spills; 16 bytes are stored at a time. Of the gate's table, rows, and all that training asks for."""
    wanted = {("grouped rows", "nvfp4"), ("grouped both, transform, seed", "nvfp4_te")}
    chosen = tuple(one for one in GROUPED_CONFIGURATIONS if (one.label, one.format) in wanted)
    rows = list(check_quantize(sm, chosen))
    assert not [row.problems for row in rows if row.problems]
    assert [row.kernel for row in rows] == ["tensor_amax", "quantize_rows", "columns_amax", "quantize_columns"]


@pytest.mark.pinned_triton
@pytest.mark.skipif(INTERPRETING, reason="compiles")
def test_products_compile_ahead():
    """On Hopper. Nothing spills; codes are loaded 16 bytes at a time where groups lie along K as well."""
    offs, x, w = meta(64, dtype=torch.int32), meta(2**14, 4096), meta(64, 1024, 4096)
    a, b, down = (meta_operand(each, of, dim, "nvfp4_te")
                  for each, of, dim in ((x, offs, -1), (w, None, -1), (x, offs, -2)))  # fmt: skip
    with dry_run(Target(90)) as found:
        scaled_grouped_mm(a, b, offs, 2**14, torch.bfloat16)
        scaled_grouped_mm(down, down, offs, 2**14, torch.bfloat16)
        few = meta_operand(meta(64, 4096), offs, -1, "mxfp8")
        scaled_grouped_mm(few, meta_operand(w, None, -1, "mxfp8"), offs, 64, torch.bfloat16)
        for groups in (dequant_operand.MOST_GROUPS, dequant_operand.MOST_GROUPS + 1):
            x, w, offs = meta(2**17, 2048), meta(groups, 1024, 2048), meta(groups, dtype=torch.int32)
            a, b = meta_operand(x, offs, -1, "nvfp4_te"), meta_operand(w, None, -1, "nvfp4_te")
            scaled_grouped_mm(a, b, offs, 2**17, torch.bfloat16)
    packed = ["swizzle_codes_sm90", "gemm_wgmma_sm90"]
    assert [one.kernel.__name__ for one in found] == [
        *packed, "dequant_operand", "dequant_operand", "gemm_grouped", "gemm_dequant_tiles",
        *packed, "gemm_dequant_tiles"
    ]  # fmt: skip
    for one in found:
        made = _compat.compile_ahead(one.kernel, one.args, one.constants, one.num_warps, 90, one.num_stages)
        assert spilled_bytes(made.asm["cubin"]) == 0
        assert made.metadata.shared <= 232448
        if one.kernel.__name__ == "gemm_dequant_tiles":
            assert re.search(r"cp\.async\.cg\.shared\.global [^;]*, 0x10", made.asm["ptx"])


@pytest.mark.skipif(INTERPRETING, reason="is the interpreter")
@pytest.mark.skipif(OLD_TRITON, reason="its interpreter has no tl.dot_scaled and no mixed tuples")
def test_in_the_interpreter():
    others = ("prologue", "candidates", "values", "sm100", "quantized")
    in_interpreter.assert_passes(__file__, *(f"test_grouped_{other}.py" for other in others))
