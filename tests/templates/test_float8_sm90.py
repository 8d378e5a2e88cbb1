"""The FP8 GEMM of Hopper: what it serves, and, on that GPU, what it computes."""

import pytest
import torch

from fp4compile.formats import formats, reference
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.hardware import Target
from fp4compile.templates.choose import choose
from fp4compile.templates.gemm import float8_sm90
from fp4compile.templates.multiply import multiply
from fp4compile.templates.problem import problem_of
from tests.helpers.by_hand import assert_rounds_to
from tests.helpers.check_products import units_error

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HOPPER = Target(90)
# Of A and B: codes by E4M3 or E5M2 (as a gradient's), and one square for a block of weights.
ROWS, GRADIENT, SQUARES = "float8_1x128", "e5m2:1x128:float32:-:torchao", "float8_128x128"
# A scale a row and a scale a matrix, without blocks.
ROW, ROW_GRADIENT, TENSOR = "float8_rowwise", "e5m2:-:-:row:torchao", "float8_tensor"


def uneven(*shape):
    """Rows, and runs of 128 elements, of very different sizes."""
    torch.manual_seed(sum(shape))
    x = torch.randn(shape) * torch.exp2(torch.randint(-9, 9, (*shape[:-1], 1)))
    return x * torch.exp2(torch.arange(shape[-1]) // 128 % 5 * 3 - 6)


def quantised(x, name, dim=-1, offs=None, each_matrix=False):
    fmt = formats.get(name)
    data, scales, outer = torch.ops.fp4compile.quantize(x, name, [dim], offs=offs, each_matrix=each_matrix)
    return Operand(data, scales if fmt.scale else None, outer if fmt.outer else None, fmt)


def on_gpu(x):
    return Operand(*(None if each is None else each.cuda() for each in (x.data, x.scales, x.outer)), x.format)


def dequantised(x):
    found = x.data.double()
    if x.scales is not None:
        rows, columns = x.format.block
        scales = x.scales.repeat_interleave(rows, -2)[..., : x.data.shape[-2], :].repeat_interleave(columns, -1)
        found = found * scales[..., : x.data.shape[-1]].double()
    return found if x.outer is None else found * x.outer.double()


def of_group(x, number, rows=None, columns=None):
    """The part of an operand that belongs to a group: these rows, these columns, or the group's matrix."""
    data, scales, outer = x.data, x.scales, x.outer
    if outer is not None:
        of_each_row = rows is not None and x.format.outer == "row"
        outer = outer[rows] if of_each_row else outer[number]
    if columns is not None:
        blocks = slice(columns.start // 128, columns.stop // 128)
        data, scales = data[:, columns], None if scales is None else scales[:, blocks]
    elif rows is not None:
        data, scales = data[rows], None if scales is None else scales[rows]
    else:
        data, scales = data[number], None if scales is None else scales[number]
    return Operand(data, scales, outer, x.format)


def check(got, a, b, dtype, bias=None):
    """got is the product of a and b, whose sums of a block have fewer bits than float32, rounded once."""
    left, right = dequantised(a).cuda(), dequantised(b).transpose(-2, -1).cuda()
    exact = left @ right
    if bias is not None:
        exact = exact + bias.cuda().double()
    assert_rounds_to(got.double(), exact, dtype, units_error(left, right))


def problem(m, n, k, a=ROWS, b=SQUARES, sm=90, offs=None, rows=None, dtype=BF16):
    with torch.device("meta"):
        groups = () if offs is None or rows is not None else (offs,)
        left, right = (described(lead, size, k, formats.get(name), None if rows is None else offs)
                       for lead, size, name in (((), m, a), (groups, n, b)))  # fmt: skip
        ends = None if offs is None else torch.empty(offs, dtype=torch.int32)
        return problem_of(Arguments.of(left, right, None, dtype, offs=ends, rows=rows), Target(sm))


def described(lead, size, k, fmt, groups):
    """An operand without values. groups: along the contraction; None without."""
    scales = None
    if fmt.scale:
        scales = torch.empty(*lead, -(-size // fmt.block[0]), -(-k // 128))
    outer = None if fmt.outer is None else torch.empty(*lead, *(() if groups is None else (groups,)), size, 1)
    return Operand(torch.empty(*lead, size, k, dtype=fmt.data_dtype), scales, outer, fmt)


@pytest.mark.parametrize(
    ("given", "kernel"),
    [
        (problem(192, 16, 128), "library_float8_blocks"),
        (problem(192, 24, 128), "float8_sm90"),
        (problem(64, 24, 128), "float8_tiles"),
        # The library has tiles for 80 of 132 multiprocessors, and takes no float16.
        (problem(33, 10240, 8192), "library_float8_blocks"),
        (problem(32, 10240, 8192), "float8_tiles"),
        (problem(33, 10240, 8192, dtype=FP16), "float8_tiles"),
        (problem(64, 8192, 8192), "float8_tiles"),
        (problem(64, 28672, 4096), "float8_tiles"),
        (problem(8192, 16, 128, b=ROWS), "library_float8_blocks"),
        (problem(8192, 24, 128, b=ROWS), "dequant_tiles"),
        (problem(8192, 4096, 128, a=GRADIENT), "library_float8_blocks"),
        (problem(3, 24, 128, offs=4), "float8_sm90"),
        (problem(8192, 4096, 128, sm=100), "dequant_tiles"),
        (problem(8192, 4096, 128, sm=89), "float8_tiles"),
        (problem(40, 24, 8 * 128, a=GRADIENT, b=ROWS, offs=4, rows=512), "float8_sm90"),
        (problem(40, 24, 8 * 128, a=ROW_GRADIENT, b=ROW, offs=4, rows=512), "float8_sm90"),
        (problem(192, 32, 128, a=ROW, b=ROW, offs=4), "float8_sm90"),
        (problem(192, 32, 128, a=ROW, b=ROW, offs=1024), "dequant_tiles"),
        (problem(192, 32, 128, a=ROW_GRADIENT, b=ROW, offs=4), "float8_sm90"),
        (problem(192, 32, 136, a=ROW, b=ROW, offs=4), "dequant_tiles"),
        (problem(192, 32, 128, a=ROW, b=ROW), "library_row_scaled"),
        (problem(192, 32, 128, a=ROW, b=ROW, dtype=FP16), "float8_sm90"),
        (problem(192, 32, 128, a=ROW, b=ROW, dtype=FP16, sm=89), "dequant_tiles"),
    ],
    ids=str,
)
def test_what_it_serves(given, kernel):
    assert choose(given).kernel == kernel


@pytest.mark.gpu
@pytest.mark.parametrize("names", [(ROWS, SQUARES), (GRADIENT, SQUARES), (ROW, ROW), (TENSOR, ROW)], ids="·".join)
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "biased"),
    [(192, 8, 128, BF16, False), (1000, 1001, 400, BF16, True), (256, 384, 256, FP32, True),
     (777, 264, 1008, FP16, True), (2048, 1536, 2176, BF16, False)],
)  # fmt: skip
def test_dense(names, m, n, k, dtype, biased):
    a, b = quantised(uneven(m, k), names[0]), quantised(uneven(n, k), names[1])
    bias = torch.randn(n) if biased else None
    x = Arguments.of(on_gpu(a), on_gpu(b), None if bias is None else bias.cuda(), dtype)
    check(multiply(x, choose(problem_of(x, HOPPER), preferred=float8_sm90.NAME)), a, b, dtype, bias)


OFFSETS = {
    "even": (4096, (512, 1024, 1536, 2048, 2560, 3072, 3584, 4096)),
    "empty groups, and rows of no group": (1000, (0, 3, 3, 700, 700)),
    "decreasing and out of range": (300, (-4, 250, 9, 900, 17)),
    "more groups than rows": (5, tuple(min(i // 9, 4) for i in range(40))),
    "no rows": (256, (0, 0)),
}


def ends_of(offs, rows):
    found, last = [], 0
    for each in offs:
        last = max(last, min(each, rows))
        found.append(last)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("case", OFFSETS)
@pytest.mark.parametrize("names", [(ROWS, SQUARES), (ROW, ROW), (TENSOR, TENSOR), (ROW_GRADIENT, ROW)], ids="·".join)
@pytest.mark.parametrize(("n", "k"), [(264, 400), (1001, 128), (1024, 1024)])
def test_groups_of_rows(case, names, n, k):
    rows, offs = OFFSETS[case]
    ends = torch.tensor(offs, dtype=torch.int32)
    a = quantised(uneven(rows, k), names[0], offs=ends)
    b = quantised(uneven(len(offs), n, k), names[1], each_matrix=True)
    x = Arguments.of(on_gpu(a), on_gpu(b), None, BF16, offs=ends.cuda())
    got, start = multiply(x, choose(problem_of(x, HOPPER), preferred=float8_sm90.NAME)), 0
    for i, end in enumerate(ends_of(offs, rows)):
        check(got[start:end], of_group(a, i, rows=slice(start, end)), of_group(b, i), BF16)
        start = end
    assert not got[start:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("case", OFFSETS)
@pytest.mark.parametrize(
    "names", [(ROWS, ROWS), (GRADIENT, ROWS), (ROW, ROW), (ROW_GRADIENT, ROW), (TENSOR, TENSOR)], ids="·".join
)
@pytest.mark.parametrize(("m", "n"), [(264, 392), (100, 1001), (1024, 512)])
def test_groups_along_the_contraction(case, names, m, n):
    rows, offs = OFFSETS[case]
    ends = torch.tensor(offs, dtype=torch.int32)
    a, b = (quantised(uneven(rows, size), name, -2, ends) for size, name in zip((m, n), names, strict=True))
    x = Arguments.of(on_gpu(a), on_gpu(b), None, BF16, offs=ends.cuda(), rows=rows)
    assert choose(problem_of(x, HOPPER)).kernel == float8_sm90.NAME
    got, start, block = multiply(x), 0, 0
    for i, end in enumerate(ends_of(offs, rows)):
        following = block + -(-(end - start) // 128)
        columns = slice(128 * block, 128 * following)
        check(got[i], of_group(a, i, columns=columns), of_group(b, i, columns=columns), BF16)
        start, block = end, following


@pytest.mark.gpu
def test_a_group_does_not_read_another_ones_not_a_number():
    """Tiles of 192 rows and stages of two blocks reach into other groups, whose elements may be NaN."""
    rows, k, offs = 300, 384, torch.tensor((100, 300), dtype=torch.int32)
    x, w = torch.randn(rows, k), torch.randn(2, 128, k)
    x[100:] = float("nan")
    a, b = quantised(x, ROWS), quantised(w, SQUARES, each_matrix=True)
    got = multiply(Arguments.of(on_gpu(a), on_gpu(b), None, BF16, offs=offs.cuda()))
    assert got[:100].isfinite().all() and got[100:].isnan().all()
    a, b = (quantised(y, ROWS, -2, offs) for y in (x, torch.randn(rows, 128)))
    got = multiply(Arguments.of(on_gpu(a), on_gpu(b), None, BF16, offs=offs.cuda(), rows=rows))
    assert got[0].isfinite().all() and got[1].isnan().all()


def test_the_reference_is_the_same():
    """`dequantised` above is what the codes mean."""
    a, b = quantised(uneven(40, 392), ROWS), quantised(uneven(24, 392), SQUARES)
    left, right = dequantised(a), dequantised(b).T
    roundings = left.shape[1] + 2  # float32 sums in any order, of products of two rounded values
    bound = roundings * 2.0**-24 * (left.abs() @ right.abs())
    assert ((reference.scaled_mm(a, b, None, FP32).double() - left @ right).abs() <= bound).all()
