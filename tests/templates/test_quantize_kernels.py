"""The quantise and dequantise kernels against the reference, bit for bit.

On a GPU (`-m gpu`) the sizes go up to 16384 x 16384. Without one the kernels run in Triton's interpreter, which has to
be chosen before Triton is imported: `test_in_the_interpreter` runs this file again in a process of its own. There the
shapes are the smallest that reach every branch, because the interpreter takes a fixed time for every operation of
every program.
"""

from pathlib import Path

import pytest
import torch

from fp4compile.formats import formats, reference
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.quantize_spec import holds_values
from fp4compile.ops.quantize import QUANTIZE, quantize_kernels
from fp4compile.templates.quantize import dequantize, row_on_chip
from fp4compile.templates.quantize.amax import AmaxConfig
from tests.helpers import guarded, in_interpreter
from tests.helpers.hard_inputs import DTYPES, NAMES, TINY_AMAXES, TINY_OUTERS, hard_input, of_amax
from tests.helpers.kernels import DEVICE, INTERPRETING, OLD_TRITON, assert_same_bits, gpu
from tests.helpers.quantisers import check_rows, make_tiles_tall, quantize, quantize_both

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ROWWISE = [name for name, fmt in formats.NAMED.items() if fmt.outer != "tensor" and not fmt.square]
TENSORWISE = [name for name, fmt in formats.NAMED.items() if fmt.outer == "tensor" or fmt.square]
MORE = [
    BlockFormat("e2m1", (1, 16), "e4m3", None, "te"),
    BlockFormat("e2m1", (1, 32), "e8m0", None, "floor"),
    BlockFormat("e5m2", (1, 32), "e8m0", None, "even"),
    BlockFormat("e5m2", (32, 32), "e8m0", None, "ceil"),
]
DTYPE_IDS = [str(dtype).removeprefix("torch.") for dtype in DTYPES]

# Rows of every hard input, and their length.
SHAPE = (4, 96) if INTERPRETING else (33, 1040)


@gpu
@pytest.mark.usefixtures("tall_tiles")
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("fmt", [formats.get(f) for f in (*ROWWISE, *MORE)], ids=lambda fmt: fmt.name)
def test_hard_inputs_at_once(fmt, dtype):
    """Rows, or tiles of them, are independent: all hard inputs in one tensor."""
    block = fmt.block_cols if fmt.block else 16
    rows, cols = (32 if fmt.square else SHAPE[0]), 32 if fmt.square and INTERPRETING else SHAPE[1]
    check_rows(torch.cat([hard_input(name, (rows, cols), dtype, block) for name in NAMES]), fmt)


@gpu
@pytest.mark.parametrize("transform", [False, True])
def test_no_amax_is_raised_of_what_is_not_there(transform, monkeypatch):
    """Of rows, columns and matrices that end inside a tile."""
    x, zeros = torch.randn(2, 5, 41).bfloat16().to(DEVICE), guarded.GuardedZeros(monkeypatch)
    for name in ("nvfp4_te", "nvfp4_rowwise"):
        quantize(x, formats.get(name), dim=-2, hadamard=transform)
        if not (transform and name == "nvfp4_rowwise"):
            quantize_both(x, formats.get(name), hadamard=transform)
    zeros.check()


@gpu
@pytest.mark.parametrize("name", ["nvfp4_rowwise", "float8_rowwise"])
def test_given_outer_scales_of_the_rows_of_matrices(name):
    check_rows(torch.randn(2, 3, 64).bfloat16(), formats.get(name), torch.rand(2, 3, 1) + 0.5)


@gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("format", TENSORWISE)
def test_hard_inputs_one_by_one(format, name):
    fmt = formats.get(format)
    for dtype in DTYPES[:1] if INTERPRETING else DTYPES:
        check_rows(hard_input(name, SHAPE, dtype, fmt.block_cols), fmt)


# Rows meet every input. Columns compute with the same functions: of elements that are half way between two codes, of
# scales that underflow or lie at a step, and what is not finite.
OF_COLUMNS = ("ties_fp4", "one_neg_inf", "one_nan", "scaled_rows", "tiny", "scale_boundary")[: 2 if INTERPRETING else 6]
# Formats whose columns are quantised by tiles of 64 columns or less, one of each kind: two tiles in the interpreter.
TWO_TILES = ("nvfp4_one_level", "nvfp4_te", "nvfp4_rowwise")


@gpu
@pytest.mark.usefixtures("tall_tiles")
@pytest.mark.parametrize("name", OF_COLUMNS)
@pytest.mark.parametrize("format", list(formats.NAMED))
def test_columns_and_both(format, name):
    """A transposed view is read as it lies; rows and columns from one read."""
    fmt = formats.get(format)
    rows, cols = (40, 72 if format in TWO_TILES else 56) if INTERPRETING else (200, 1000)
    layout = "swizzled" if name in ("one_nan", "ties_fp4") and fmt.block else "linear"
    block = fmt.block_cols if fmt.block else 16
    x = hard_input(name, (cols, rows), torch.bfloat16, block).mT  # structure down the columns
    if not INTERPRETING:
        check_rows(x, fmt, layout=layout)  # as below, in another shape and without structure
    x = x.contiguous()
    check_rows(x.mT, fmt, layout=layout)
    along_rows, along_columns = quantize_both(x.to(DEVICE), fmt, None, layout)
    assert_same_bits(along_rows, reference.quantize(x, fmt, None, layout))
    assert_same_bits(along_columns, reference.quantize(x.mT, fmt, None, layout))
    if layout == "linear" and holds_values(fmt, x.dtype):
        check_values(x, fmt)


@gpu
@pytest.mark.parametrize("format", ["nvfp4_one_level"] if INTERPRETING else list(formats.NAMED))
def test_float32_in_both_directions(format):
    """ptxas 12.8 gave row codes other rows' factors in one kernel for both directions of one-level NVFP4."""
    fmt = formats.get(format)
    for shape in ((96, 64),) if INTERPRETING else ((96, 64), (128, 96), (2, 48, 64)):
        x = torch.randn(shape)
        along_rows, along_columns = quantize_both(x.to(DEVICE), fmt)
        assert_same_bits(along_rows, reference.quantize(x, fmt))
        assert_same_bits(along_columns, reference.quantize(x.mT, fmt))


def check_values(x, fmt):
    """Values, or values and codes, of rows and columns from one read."""
    kinds = [(-1, -2), (-2,)] if INTERPRETING else [(-1, -2), (-2,), (-1,)]
    for kind in kinds:
        for dim, got in zip((-1, -2), quantize_both(x.to(DEVICE), fmt, values=kind), strict=True):
            expected = reference.quantize(x.movedim(dim, -1), fmt)
            if dim in kind:
                expected = reference.values_of(*expected[:2], fmt), None, expected[2]
            assert_same_bits(got, expected)


def check_training(x, fmt, seed, transform, layout="linear", rows_alone=True):
    """Rows and columns, each for itself and together, stochastically rounded and transformed, against the reference.

    rows_alone: not needed again where only the transform differs, which rows do not have.
    """
    on_device = x.to(DEVICE)
    # A seed comes as a view into a tensor of seeds.
    seed_view = None if seed is None else torch.tensor([0, seed, 0], device=DEVICE)[1]
    seed = None if seed is None else torch.tensor(seed)
    expected = reference.quantize(x, fmt, None, layout, seed=seed)
    expected_columns = reference.quantize(x.mT, fmt, None, layout, seed=seed, stream=1, transform=transform)
    if rows_alone:
        assert_same_bits(quantize(on_device, fmt, None, layout, seed=seed_view), expected)
    columns = quantize(on_device, fmt, None, layout, dim=-2, seed=seed_view, hadamard=transform)
    assert_same_bits(columns, expected_columns)
    both = quantize_both(on_device, fmt, None, layout, seed=seed_view, hadamard=transform)
    assert_same_bits(both[0], expected)
    assert_same_bits(both[1], expected_columns)


SEED = 0x123456789ABCDEF0


@gpu
@pytest.mark.usefixtures("tall_tiles")
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("name", OF_COLUMNS)
@pytest.mark.parametrize("format", ["nvfp4_te", "nvfp4_one_level", "nvfp4_rowwise", "mxfp4"])
def test_training(format, name, dtype):
    """Stochastic rounding, the Hadamard transform, both; the tokens end within a block."""
    fmt = formats.get(format)
    rows, cols = (24, 40) if INTERPRETING else (200, 1000)
    x = hard_input(name, (cols, rows), dtype, fmt.block_cols).mT.contiguous()
    # Elements are read, and scales stored, in the same way whatever becomes of them in between.
    once = INTERPRETING and (name, dtype) != ("ties_fp4", torch.bfloat16)
    for layout in ("linear",) if once else ("linear", "swizzled"):
        check_training(x, fmt, SEED, False, layout)
        if fmt.scale == "e4m3":
            check_training(x, fmt, -SEED, True, layout, rows_alone=False)
            check_training(x, fmt, None, True, layout, rows_alone=False)


@gpu
@pytest.mark.usefixtures("tall_tiles")
@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (3, 31), (130, 16), (2, 17, 33), (2, 0, 32)], ids=str)
def test_training_shapes(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    for format in ("nvfp4_te", "mxfp4"):
        check_training(x, formats.get(format), 7, format == "nvfp4_te", "swizzled")
    check_training(x, formats.get("nvfp4_rowwise"), 7, True)


@gpu
def test_transform_along_the_contiguous_dimension():
    fmt = formats.get("nvfp4_te")
    for x in (torch.randn(3, 40, 72).bfloat16(), torch.randn(100), torch.randn(1, 50)):
        for outer in (None, torch.tensor(0.37)):
            got = quantize(x.to(DEVICE), fmt, None if outer is None else outer.to(DEVICE), hadamard=True)
            assert_same_bits(got, reference.quantize(x, fmt, outer, transform=True))


@gpu
@pytest.mark.usefixtures("tall_tiles")
@pytest.mark.parametrize("shape", [(40, 72), (33, 50), (2, 64, 31), (1, 40)] if INTERPRETING else [(2, 1000, 1056)])
@pytest.mark.parametrize("format", ["nvfp4_rowwise", "float8_rowwise"])
def test_scaled_columns(format, shape):
    """Columns with their own scale, which are independent: four hard inputs side by side."""
    *batch, rows, cols = shape
    for dtype in DTYPES[:1] if INTERPRETING else DTYPES:
        names = ("scaled_rows", "one_nan", "one_neg_inf", "zeros")
        inputs = [hard_input(name, (*batch, -(-cols // len(names)), rows), dtype) for name in names]
        x = torch.cat(inputs, -2)[..., :cols, :].mT.contiguous()
        check_rows(x.mT, formats.get(format))


@gpu
@pytest.mark.skipif(INTERPRETING, reason="CUDA graphs")
def test_a_graph_reads_the_seed_at_every_replay():
    fmt = formats.get("nvfp4_te")
    x = torch.randn(256, 512, device="cuda").bfloat16()
    seed = torch.zeros((), dtype=torch.int64, device="cuda")
    quantize_both(x, fmt, seed=seed, hadamard=True)  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows, columns = quantize_both(x, fmt, seed=seed, hadamard=True)
    for value in (1, 2):
        seed.fill_(value)
        graph.replay()
        assert_same_bits(rows, reference.quantize(x, fmt, seed=seed))
        assert_same_bits(columns, reference.quantize(x.mT, fmt, seed=seed, stream=1, transform=True))


SHAPES = [(0, 64), (1, 1), (3, 31), (130, 16), (2, 3, 33), (2, 0, 32), (2, 1, 5, 64)]


@gpu
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, layout, monkeypatch):
    """Empty, tiny, odd and batched; padding of data and of swizzled scales is zero."""
    gen = torch.Generator().manual_seed(0)
    # Padding makes 128 rows of one: a program a row is done once, for one shape.
    if INTERPRETING and (shape[-2] > 100 or layout == "swizzled" and shape != (3, 31)):
        make_tiles_tall(monkeypatch)
    for format in ("nvfp4", "mxfp8", "mxfp4", "mxfp8_32x32", "nvfp4_rowwise", "float8_rowwise"):
        x, fmt = torch.randn(shape, generator=gen).bfloat16(), formats.get(format)
        if fmt.block is None and layout == "swizzled":
            continue
        check_rows(x, fmt, layout=layout)
        rows, columns = quantize_both(x.to(DEVICE), fmt, None, layout)
        assert_same_bits(rows, reference.quantize(x, fmt, None, layout))
        assert_same_bits(columns, reference.quantize(x.mT, fmt, None, layout))


@gpu
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_te", "nvfp4_rowwise", "nvfp4_16x16", "float8_rowwise"])
def test_given_outer_scale(format):
    fmt = formats.get(format)
    x = hard_input("scaled_rows", (40, 64))
    x[7, 3] = torch.inf
    outer = torch.rand(40, 1) + 0.1 if fmt.outer == "row" else torch.tensor(0.37)
    for layout in ("linear", "swizzled") if fmt.block else ("linear",):
        check_rows(x, fmt, outer, layout)
    if fmt.block:
        check_rows(x.t().contiguous().mT, fmt, outer)
    if outer.dim() == 0:
        for scale in (outer, torch.full_like(outer, 1e-42)):
            both = quantize_both(x.to(DEVICE), fmt, scale.to(DEVICE))
            for got, one in zip(both, (x, x.mT), strict=True):
                assert_same_bits(got, reference.quantize(one, fmt, scale))
    check_rows(x, fmt, torch.full_like(outer, 3.4e38))
    check_rows(x, fmt, torch.full_like(outer, 1e-42))


@gpu
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_te"])
def test_given_amax_of_transformed_elements(format):
    """Of a tensor of which some columns are quantised, whose groups of 16 are transformed."""
    x = torch.cat((hard_input("randn", SHAPE, torch.bfloat16), 3 * hard_input("outliers", SHAPE, torch.bfloat16)), 1)
    cols = slice(SHAPE[1])
    amax = reference.largest(reference.hadamard(x.mT), per_row=False)
    for values in (x[:, cols], x[:, cols].t().contiguous().t(), x[:, cols].unsqueeze(0)):
        for dim, given in ((-2, values), (-1, values.mT)):
            found = quantize_kernels(given.to(DEVICE), format, dim, amax=amax.to(DEVICE), hadamard=True)
            assert_same_bits(found, QUANTIZE(given, format, dim, amax=amax, hadamard=True))
    whole = QUANTIZE(x, format, -2, hadamard=True)
    part = QUANTIZE(x[:, cols], format, -2, amax=amax, hadamard=True)
    assert_same_bits(part, (whole[0][cols], whole[1][cols], whole[2]))


@gpu
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_te"])
def test_given_amax(format):
    """Of a tensor of which only some rows are quantised: their codes are those of the whole tensor's rows."""
    x = torch.cat((hard_input("randn", SHAPE, torch.bfloat16), 3 * hard_input("outliers", SHAPE, torch.bfloat16)))
    expected, rows = reference.quantize(x, formats.get(format)), slice(SHAPE[0])
    for values in (x[rows], x[rows].t().contiguous().t(), x[rows].unsqueeze(0)):
        for amax in (x.float().abs().amax(), torch.tensor(torch.nan)):
            by_reference = QUANTIZE(values, format, amax=amax)
            by_kernels = quantize_kernels(values.to(DEVICE), format, amax=amax.to(DEVICE))
            assert_same_bits(by_kernels, by_reference)
            if amax.isfinite() and values.dim() == 2:
                assert_same_bits(by_kernels, (expected[0][rows], expected[1][rows], expected[2]))


@gpu
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_te", "nvfp4_16x16", "nvfp4_rowwise", "float8_rowwise"])
def test_given_amaxes_of_matrices_and_rows(format):
    """Shards, each a half of a weight, in one stack: their codes are the codes of the whole weights."""
    fmt, half = formats.get(format), 32
    names = ("randn", "outliers", "randn")
    whole = torch.stack([hard_input(name, (2 * half, 48), torch.bfloat16) * (i + 1) for i, name in enumerate(names)])
    whole[:, half:] *= 3
    each = fmt.outer == "tensor"
    amax = whole.float().abs().amax((1, 2) if each else 1)
    amax = amax if each else amax.unsqueeze(-1)
    shards = whole[:, :half]
    for stack, dim in ((shards, -2), (shards, -1) if each else (shards.mT.contiguous(), -1)):
        found = quantize_kernels(stack.to(DEVICE), format, dim, amax=amax.to(DEVICE), each_matrix=each)
        assert_same_bits(found, QUANTIZE(stack, format, dim, amax=amax, each_matrix=each))
        there = [part.cpu() for part in found if part.numel()]
        for one, its, values, *parts in zip(whole, amax, stack, *there, strict=True):
            expected = reference.quantize(one if each and dim == -1 else one.mT, fmt)
            for part, of_all in zip(parts, (one for one in expected if one is not None), strict=True):
                cut = of_all[tuple(slice(size) for size in part.shape)].contiguous()
                assert torch.equal(part.view(-1).view(torch.uint8), cut.view(-1).view(torch.uint8))
            for dims in [[dim], [-1, -2]][: 1 + each]:
                given = QUANTIZE(values, format, dims, amax=its)
                assert_same_bits(quantize_kernels(values.to(DEVICE), format, dims, amax=its.to(DEVICE)), given)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_te", "nvfp4_rowwise", "nvfp4_16x16"])
def test_tiny_tensors(format, dtype):
    """Factors at the end of float32's range, in each kernel that makes them."""
    fmt = formats.get(format)
    some = (1e-40, 1e-30) if fmt.contract == "te" else (1e-45, 1e-40, 7.9e-36, 4e-34)
    for amax in some if INTERPRETING else TINY_AMAXES:
        x = of_amax(amax, (18 if fmt.square else 4, 40), dtype)
        check_rows(x, fmt)
        both = quantize_both(x.to(DEVICE), fmt)
        assert_same_bits(both[0], reference.quantize(x, fmt))
        assert_same_bits(both[1], reference.quantize(x.mT, fmt))
    if not fmt.square:
        check_training(of_amax(1e-40, (20, 34), dtype), fmt, SEED, True)


@gpu
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_te", "nvfp4_rowwise", "nvfp4_16x16", "float8_rowwise"])
def test_tiny_outer_scales(format):
    """As `test_tiny_tensors`, the scale being given; an element may be of ordinary size all the same."""
    fmt = formats.get(format)
    x = of_amax(1e-38, (18 if fmt.square else 4, 40))
    x[1, 8] = 1.0
    if fmt.outer == "row":
        x = x.repeat(-(-len(TINY_OUTERS) // 4), 1)[: len(TINY_OUTERS)]
        scales = [torch.tensor(TINY_OUTERS)[:, None]]
    else:
        scales = [torch.tensor(outer) for outer in TINY_OUTERS]
    for outer in scales:
        check_rows(x, fmt, outer)
        check_rows(x.t().contiguous().mT, fmt, outer)
        if fmt.outer == "tensor":
            for dtype in (torch.bfloat16, torch.float32):
                one = x.to(dtype)
                both = quantize_both(one.to(DEVICE), fmt, outer.to(DEVICE))
                assert_same_bits(both[0], reference.quantize(one, fmt, outer))
                assert_same_bits(both[1], reference.quantize(one.mT, fmt, outer))


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("format", ["nvfp4_te", "nvfp4_rowwise", "nvfp4_one_level"])
def test_transforms_at_both_ends_of_the_range(format, dtype):
    """Sums of sixteen that overflow without the quarter; float32 numbers without a quarter of their own."""
    fmt = formats.get(format)
    least, most = 2.0**-149 if dtype == torch.float32 else 2.0**-133, 8e37
    odd = 1 + 2 * torch.randint(0, 16, (20, 18), generator=torch.Generator().manual_seed(0))
    small = (least * odd.double()).to(dtype)
    large = (most * (1 - (odd & 2)) * (odd.double() / 32) ** (odd % 3)).to(dtype)
    large[:16, 3] = torch.where(torch.tensor([reference.HADAMARD_SIGNS >> i & 1 for i in range(16)]) > 0, -most, most)
    for x in (small, large):
        transformed = reference.hadamard(x.mT)
        assert transformed.isfinite().all()
        assert (transformed * 4).isinf().any() == (x is large)
        check_training(x, fmt, None, True)
        along = x.mT.contiguous().to(DEVICE)
        assert_same_bits(quantize(along, fmt, hadamard=True), reference.quantize(x.mT, fmt, transform=True))


@gpu
def test_strides():
    """Rows apart, rows at odd addresses, no contiguous dimension, one dimension."""
    x = torch.randn(3, 2, 100).bfloat16()
    views = (x[:, 0], x[:, :, :64], x[:, :, 1:65], x[:, 1, 2:66], x[:, :, ::2], x.permute(1, 2, 0), x[0, 0])
    for fmt in map(formats.get, ("nvfp4_one_level", "mxfp8")):
        for view in views:
            check_rows(view, fmt)
    for view in views[1:3]:
        check_rows(view, formats.get("nvfp4_rowwise"))


@pytest.fixture(scope="module")
def far_apart(tmp_path_factory):
    """Four rows, or matrices, 2^30 elements apart, in a file of 10 GiB of which only what is written takes space.

    An offset of 32 bits would wrap to what lies before them, which is zeros.
    """
    file, step = str(tmp_path_factory.mktemp("far") / "apart"), 2**30
    whole = torch.from_file(file, shared=True, size=5 * step + 4096, dtype=torch.bfloat16)
    yield lambda *sizes: whole.as_strided((4, *sizes), (step, *(sizes[-1], 1)[-len(sizes) :]), 2 * step)
    Path(file).unlink()


@pytest.mark.skipif(not INTERPRETING, reason="test_beyond_32_bit_offsets is for a GPU")
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_te", "nvfp4_rowwise", "nvfp4_16x16", "mxfp8"])
def test_rows_and_matrices_whose_offsets_take_more_than_32_bits(format, far_apart):
    fmt = formats.get(format)
    for sizes in ((48,), (18, 48)):
        x = far_apart(*sizes)
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(0)))
        x[2] *= 8  # it has the amax
        check_rows(x, fmt)
        for transform in (False, True)[: 1 + (format == "nvfp4_te")]:
            rows, columns = reference.quantize(x, fmt), reference.quantize(x.mT, fmt, transform=transform)
            assert_same_bits(quantize(x, fmt, dim=-2, hadamard=transform), columns)
            for got, expected in zip(quantize_both(x, fmt, hadamard=transform), (rows, columns), strict=True):
                assert_same_bits(got, expected)
        for dim in (-1, -2) if x.dim() == 3 and fmt.outer == "tensor" else ():
            expected = QUANTIZE(x, format, dim, each_matrix=True)
            assert_same_bits(quantize_kernels(x, format, dim, each_matrix=True), expected)


@gpu
def test_long_rows(monkeypatch):
    """Rows that do not fit on the chip are walked twice; their amax takes several tiles."""
    cols = 40000
    if INTERPRETING:
        cols = 1250
        monkeypatch.setattr(row_on_chip, "MAX_ROW_ON_CHIP", 1024)
        config = AmaxConfig(num_warps=4, rows=1, blocks=16, block=32)
        monkeypatch.setattr("fp4compile.templates.quantize.amax.amax_config", lambda elements: config)
    for fmt in map(formats.get, ("nvfp4_rowwise", "float8_rowwise")):
        check_rows(hard_input("outliers", (2, cols), torch.bfloat16), fmt)


# On a GPU, more parts and more rows as well.
PARTS = [(1, 8192), (2, 8200), (1, 4112)] if INTERPRETING else [(1, 8192), (3, 8200), (1, 16400), (5, 4112)]


@gpu
@pytest.mark.parametrize("shape", PARTS, ids=str)
def test_rows_in_parts(shape):
    """Of few long rows, several programs write a row; the last of them may have little or nothing of it."""
    for layout in ("linear", "swizzled") if shape[1] < 8192 or not INTERPRETING else ("linear",):
        check_rows(hard_input("outliers", shape, torch.bfloat16), formats.get("nvfp4_rowwise"), layout=layout)


@gpu
@pytest.mark.skipif(INTERPRETING, reason="CUDA graphs")
@pytest.mark.parametrize("shape", [(1, 64), (16, 4096), (33, 4112), (128, 16384)], ids=str)
def test_the_amax_is_awaited(shape):
    """Of a small tensor, the quantise kernel starts before the amax is known. Each takes what the one before wrote."""
    torch.use_deterministic_algorithms(False)  # filling what is allocated comes between the two kernels
    fmt = formats.get("nvfp4")
    x = torch.randn(shape, device="cuda").bfloat16()
    scale = torch.ones((), device="cuda")
    rounds = 20

    def chain():
        found, value = [], x * scale
        for i in range(rounds):
            found.append((value, quantize(value, fmt), quantize(value, fmt, values=True)))
            value = value * (1.5 if i % 2 else 0.5)
        return found

    chain()  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for factor in (1.0, 3.0, 0.01):
        scale.fill_(factor)
        graph.replay()
        for found in (captured, chain()):
            for value, codes, values in found:
                assert_same_bits(codes, reference.quantize(value, fmt))
                expected, outer = reference.fake_quantize(value, fmt)
                assert_same_bits(values, (expected, None, outer))


# Every format in an odd shape; one of each way to find a global scale in others, such as rows that do not fit.
LARGE = [(format, (8191, 4080)) for format in formats.NAMED]
LARGE += [(format, shape) for format in ("nvfp4", "nvfp4_rowwise", "nvfp4_16x16", "mxfp8")
          for shape in ((16384, 16384), (1, 32768), (64, 65536))]  # fmt: skip


@gpu
@pytest.mark.skipif(INTERPRETING, reason="sizes for a GPU")
@pytest.mark.parametrize(("format", "shape"), LARGE, ids=str)
def test_large(format, shape):
    """Against the reference on the GPU."""
    fmt = formats.get(format)
    gen = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(shape, generator=gen, device="cuda").bfloat16()
    x *= torch.exp2(-12 * torch.rand(shape[0], 1, generator=gen, device="cuda")).bfloat16()
    layout = "swizzled" if fmt.block and shape[0] % 2 else "linear"
    expected = reference.quantize(x, fmt, None, layout)
    assert_same_bits(quantize(x, fmt, None, layout), expected)
    if holds_values(fmt, x.dtype):
        values = reference.values_of(*expected[:2], fmt), None, expected[2]
        assert_same_bits(quantize(x, fmt, values=True), values)
    columns = reference.quantize(x.mT, fmt, None, layout)
    assert_same_bits(quantize(x.mT, fmt, None, layout), columns)
    both = quantize_both(x, fmt, None, layout)
    assert_same_bits(both[0], expected)
    assert_same_bits(both[1], columns)


@gpu
@pytest.mark.skipif(INTERPRETING, reason="sizes for a GPU")
@pytest.mark.parametrize("format", ["nvfp4_one_level", "mxfp8", "nvfp4_rowwise"])
def test_beyond_32_bit_offsets(format):
    fmt = formats.get(format)
    x = torch.empty(70000, 32768, device="cuda", dtype=torch.bfloat16).normal_()
    last_rows = x[-64:]
    data, scales, outer = quantize(x, fmt, None, "linear")
    expected = reference.quantize(last_rows, fmt, None, "linear")
    assert_same_bits((data[-64:], scales[-64:], None if outer is None else outer[-64:]), expected)
    assert_same_bits([dequantize.dequantize(data, scales, outer, fmt, x.shape[-1], torch.bfloat16)[-64:]],
                     [reference.dequantize(*expected, fmt, x.shape[-1], torch.bfloat16)])  # fmt: skip
    if holds_values(fmt, x.dtype):
        values, *_ = quantize(x, fmt, values=True)
        assert_same_bits([values[-64:]], [reference.values_of(*expected[:2], fmt)])


@gpu
@pytest.mark.skipif(INTERPRETING, reason="the GPU's arithmetic")
def test_every_element_rounding_and_every_scale():
    """All bf16 numbers as elements, all as block maxima: the PTX forms against the reference."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for fmt in map(formats.get, (*ROWWISE, *MORE)):
        n = fmt.block_cols if fmt.block else 16
        maxima = torch.zeros(every.numel(), n, dtype=torch.bfloat16)
        maxima[:, 0] = every
        maxima[:, 1:] = every[:, None] * torch.linspace(-1, 1, n - 1).bfloat16()
        check_rows(maxima, fmt)
        small = every[every.abs() <= 6].view(-1)
        check_rows(
            torch.cat([torch.full((small.numel(), 1), 6.0).bfloat16(), small[:, None].expand(-1, n - 1)], 1), fmt
        )


@pytest.mark.skipif(INTERPRETING, reason="is the interpreter")
def test_in_the_interpreter():
    others = () if OLD_TRITON else ("test_prologue_kernels.py", "test_norm_kernels.py")
    in_interpreter.assert_passes(
        __file__, "test_sm100_kernels.py", "test_scale_sweep_kernel.py", "test_compensate_kernel.py", *others
    )
