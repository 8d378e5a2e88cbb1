"""What launches say to kernels about memory and order: nothing runs, and no GPU need be there."""

import itertools

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import fp4compile.ops.grouped  # noqa: F401  defines the ops
from fp4compile.check.launches import GATE, RMS_NORM, after_steps
from fp4compile.formats import formats, reference
from fp4compile.formats.operand import Operand
from fp4compile.formats.prologue import Prologue
from fp4compile.hardware import Target
from fp4compile.ops import prologue as ops_prologue
from fp4compile.templates.gemm.dispatch import scaled_mm
from fp4compile.templates.gemm.heuristics import tma_copies
from fp4compile.templates.grouped import indexed
from fp4compile.templates.grouped.dispatch import scaled_grouped_mm
from fp4compile.templates.launch import dry_run
from fp4compile.templates.quantize import dispatch, prologue_cost
from fp4compile.templates.quantize.heuristics import MAX_ROW_ON_CHIP, scaled_row_config

BF16 = torch.bfloat16


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def weights(*shape, name="nvfp4", layout="linear"):
    """An operand as `quantize` makes it of a tensor on the meta device."""
    op = torch.ops.fp4compile.quantize if len(shape) == 2 else torch.ops.fp4compile.quantize_grouped
    groups = () if len(shape) == 2 else (None,)
    data, scales, outer = op(meta(*shape), *groups, name, layout=layout)
    fmt = formats.get(name)
    return Operand(data, scales, outer if fmt.outer else None, fmt)


# ---------------------------------------------------------------- kernels that start before the last one has ended


@pytest.mark.parametrize(("steps", "stored", "waits"), [
    ((), (), True), (GATE, (), True), (GATE, ("s4 bfloat16",), False), (GATE, ("s2 bfloat16",), False),
    (RMS_NORM, (), False), (RMS_NORM, ("s5 bfloat16",), False),
], ids=["plain", "gate", "stored", "a part stored", "norm", "a norm stored"])  # fmt: skip
def test_what_a_kernel_reads_before_it_waits_is_not_of_the_kernel_before(steps, stored, waits):
    """The kernel that quantises waits for the amax alone, just before it reads that: what the first kernel has stored,
    statistics included, it would read too early."""
    x, fmt = meta(64, 512), formats.get("nvfp4")
    with dry_run(Target(90)) as found:
        after_steps(x, fmt, "linear", steps, stored) if steps else dispatch.quantize(x, fmt)
    first, second = found
    assert bool(second.constants.get("PDL")) == waits
    assert bool(first.constants.get("LAUNCH_DEPENDENTS")) or not waits


@pytest.mark.parametrize("steps", [(), RMS_NORM], ids=["plain", "norm"])
@pytest.mark.parametrize("rows", [2, 3, 65, 128, 129, 4096, 2**14])
def test_partial_maxima_are_as_many_as_programs_and_a_power_of_two(rows, steps):
    """Each program stores one, and a program of the next kernel reads all of them at once."""
    x, fmt = meta(rows, 512), formats.get("nvfp4")
    with dry_run(Target(90)) as found:
        after_steps(x, fmt, "linear", steps) if steps else dispatch.quantize(x, fmt)
    first, second = found
    count = first.args["amax_ptr"].numel()
    assert second.constants["PARTIAL_MAXIMA"] == count and count & (count - 1) == 0
    assert first.constants["PARTIAL"] == (rows <= (128 if steps else 4096))
    assert first.grid == count or not first.constants["PARTIAL"]


# ---------------------------------------------------------------- nothing to read


@pytest.mark.parametrize("shape", [(0, 3, 64), (0, 2, 3, 64), (3, 0, 64), (0, 64), (3, 64, 0)], ids=str)
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_rowwise", "mxfp8", "nvfp4_16x16"])
def test_what_is_empty_is_not_launched(name, shape):
    """No grid is empty: the one program would take itself for the first of some matrix, and read and write that."""
    x, fmt = meta(*shape), formats.get(name)
    with dry_run(Target(90)) as found:
        quantised = dispatch.quantize(x, fmt, layout="swizzled")
        columns = dispatch.quantize(x.mT, fmt)
        both = dispatch.quantize_both(x, fmt)
        if not fmt.square:
            after_steps(x, fmt, "linear", GATE)
        values = dispatch.dequantize(*dispatch.quantize(x, fmt), fmt, shape[-1], BF16)
    assert not found and values.shape == x.shape
    expected = reference.quantize(x, fmt, None, "swizzled"), reference.quantize(x.mT, fmt)
    for one, other in zip((*quantised, *columns, *both[1]), (*expected[0], *expected[1], *expected[1]), strict=True):
        assert one is other is None or (one.shape, one.dtype) == (other.shape, other.dtype)


@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_rowwise", "mxfp8"])
@pytest.mark.parametrize("op", ["quantize", "quantize_both", "fake_quantize"])
def test_a_norm_of_no_rows_is_not_launched(op, format):
    """Programs beyond the last row would read that row."""
    operands = [meta(0, 512), meta(512)]
    if op == "fake_quantize" and format == "mxfp8":
        pytest.skip("float16 does not hold the values")
    with dry_run(Target(90)) as found:
        results = ops_prologue.quantize_prologue_cuda(
            operands, list(RMS_NORM), BF16, op, format, stored=["s5 bfloat16"]
        )
    assert not found and results[-1].shape == (0, 512)


def test_rows_whose_number_may_be_0_are_read_with_a_mask():
    """Of rows that fill a tile, those beyond the last are the last, if there is one."""

    def norm(x, w):
        return ops_prologue.quantize_prologue_cuda([x, w], list(RMS_NORM), BF16, "quantize", "mxfp8")

    for known, whole in ((True, True), (False, False)):
        env = ShapeEnv()
        with FakeTensorMode(shape_env=env), enable_python_dispatcher(), dry_run(Target(90)) as found:
            if known:
                rows = env.create_symintnode(env.create_symbol(4, ConstantSource("s"), DimDynamic.DYNAMIC), hint=4)
            else:
                with env.ignore_fresh_unbacked_symbols():
                    rows = env.create_unbacked_symint()
            make_fx(norm)(torch.empty(rows, 512, dtype=BF16), torch.empty(512, dtype=BF16))
        assert [launch.constants["WHOLE"] for launch in found] == [whole]


# ---------------------------------------------------------------- how wide a kernel may load


@pytest.mark.parametrize(("m", "n", "k", "even"), [
    (1, 4096, 4096, True), (1, 4104, 4096, False), (1, 4096, 4096 + 256, False), (1, 4096, 4096 + 64, False),
    (4, 4096, 4096, True), (4, 4104, 4096, False), (4, 4096, 4096 + 128, False), (4, 4096, 4096 + 64, False),
])  # fmt: skip
def test_no_step_of_a_streamed_product_goes_past_the_end(m, n, k, even):
    """`EVEN` takes all masks away: the warps' steps along K and the tiles of B must be whole."""
    with dry_run(Target(90)) as found:
        scaled_mm(Operand(meta(m, k)), weights(n, k), None, BF16)
    constants = found[-1].constants
    assert found[-1].kernel.__name__ == ("gemv" if m == 1 else "gemm_skinny") and constants["EVEN"] == even
    rows = 16 * constants.get("TILES", 1)
    assert even == (n % rows == 0 and k % ((256 if m == 1 else 128) * constants["WARPS"]) == 0)


@pytest.mark.parametrize(("k", "layout", "wide"), [
    (4096, "linear", 1), (4096, "swizzled", 0), (4096 + 64, "linear", 0),
])  # fmt: skip
def test_scales_that_are_swizzled_or_no_16_bytes_are_not_read_16_bytes_at_a_time(k, layout, wide):
    with dry_run(Target(90)) as found:
        scaled_mm(Operand(meta(1, k)), weights(4096, k, layout=layout), None, BF16)
    assert found[-1].kernel.__name__ == "gemv" and found[-1].constants["WIDE"] == wide


@pytest.mark.parametrize(("a", "b", "k", "copied"), [
    ("mxfp4", "mxfp4", 128, True), ("mxfp4", "mxfp4", 96, True), ("mxfp8", "mxfp8", 32, True),
    ("mxfp8", "mxfp4", 128, True), ("mxfp8", "mxfp4", 96, False), ("mxfp4", "mxfp8", 160, False),
    ("nvfp4", "nvfp4", 48, False), ("nvfp4", "nvfp4", 32, True),
])  # fmt: skip
def test_rows_that_tma_copies(a, b, k, copied):
    """Whole 16 bytes; of FP4 codes that are spread to bytes on the way, whole 128 codes."""
    rows = [(fmt, k // 2 if fmt.packed else k) for fmt in map(formats.get, (a, b))]
    assert tma_copies(*rows) == copied


# ---------------------------------------------------------------- tables


@pytest.mark.parametrize(("groups", "rows"), [(1, 1), (3, 3), (3, 9), (4, 23), (5, 20)])
def test_the_table_of_a_grouped_decode_step_holds_every_row_tile(groups, rows):
    """Of any sizes of the groups: the kernel writes an entry for each tile of each group."""
    a, b, offs = Operand(meta(rows, 512)), weights(groups, 1024, 512), meta(groups, dtype=torch.int32)
    with dry_run(Target(90)) as found:
        scaled_grouped_mm(a, b, offs, rows, BF16)
    launch = found[-1]
    assert launch.kernel.__name__ == "gemm_skinny_grouped"
    tile = launch.constants["ROWS"]
    ends = itertools.combinations_with_replacement(range(rows + 1), groups)
    most = max(sum(-(-(end - start) // tile) for start, end in itertools.pairwise((0, *each))) for each in ends)
    assert launch.args["table_ptr"].shape[0] >= most


@pytest.mark.parametrize(("count", "served"), [(1024, True), (1025, False)])
def test_indices_that_a_program_looks_at(count, served):
    a, b, index = (
        Operand(meta(count, 1, 512)),
        weights(4, 1024, 512, name="nvfp4_one_level"),
        meta(count, dtype=torch.int64),
    )
    assert indexed.serves(a, b, index, BF16, Target(90)) == served


# ---------------------------------------------------------------- which prologues the kernels read


@pytest.mark.parametrize(("steps", "stored", "taken"), [
    (["mul aux0 aux1", "mul s0 aux2"], (), True), (["mul aux0 aux1", "mul s0 aux2", "mul s1 aux3"], (), False),
    (["mul aux0 row1", "mul s0 row2", "mul s1 row3", "mul s2 row4", "mul s3 row5"], (), True),
    (["mul aux0 row1", "mul s0 row2", "mul s1 row3", "mul s2 row4", "mul s3 row5", "mul s4 row6"], (), False),
    ([f"mul {'aux0' if not i else f's{i - 1}'} 2.0" for i in range(4)], (0, 1, 2), True),
    ([f"mul {'aux0' if not i else f's{i - 1}'} 2.0" for i in range(4)], (0, 1, 2, 3), False),
])  # fmt: skip
def test_tensors_that_a_prologue_may_read_and_store(steps, stored, taken):
    prologue = Prologue.parse(steps, BF16, [f"s{number} bfloat16" for number in stored])
    dtypes = [BF16] * len(prologue.kinds)
    assert dispatch.takes_prologue(formats.get("mxfp8"), prologue, dtypes, by_columns=False) == taken


@pytest.mark.parametrize(("name", "op", "layout", "shape", "taken"), [
    ("nvfp4_rowwise", "quantize", "linear", (4, 128), True), ("nvfp4_rowwise", "quantize", "linear", (2, 128), False),
    ("nvfp4_one_level", "quantize", "linear", (2, 128), True), ("mxfp8", "quantize", "linear", (2, 128), False),
    ("mxfp8", "quantize", "swizzled", (2, 128), True), ("mxfp8", "quantize", "linear", (2, 2, 128), False),
    ("float8_rowwise", "quantize_both", "linear", (16, 128), True),
    ("float8_rowwise", "quantize_both", "linear", (16, 130), False),
])  # fmt: skip
def test_what_belongs_to_the_second_result_begins_at_whole_16_bytes(name, op, layout, shape, taken):
    """Codes, scales and the outer scales of rows: each begins behind those of the first."""
    assert dispatch.takes_several(formats.get(name), op, layout, shape) == taken


# ---------------------------------------------------------------- what the cost model says of the kernels


def work(op="quantize", name="nvfp4_rowwise", cols=4096, **options):
    keys = ("columns", "given", "transform", "seeded")
    return prologue_cost.Work(op, formats.get(name), **dict.fromkeys(keys, False) | options, cols=cols)


@pytest.mark.parametrize("cols", [MAX_ROW_ON_CHIP - 16, MAX_ROW_ON_CHIP, MAX_ROW_ON_CHIP + 16])
def test_a_row_on_the_chip_is_read_once(cols):
    on_chip = scaled_row_config("e2m1", 16, 4096, cols).on_chip
    assert work(cols=cols).amax_read == (not on_chip) and on_chip == (cols <= MAX_ROW_ON_CHIP)


@pytest.mark.parametrize(("options", "kernel"), [
    ({}, "quantize_both"), ({"seeded": True}, "quantize_columns"), ({"transform": True}, "quantize_columns"),
])  # fmt: skip
def test_the_kernel_of_both_directions_evaluates_a_prologue_once(options, kernel):
    seed = meta(dtype=torch.int64) if options.get("seeded") else None
    with dry_run(Target(100)) as found:
        dispatch.quantize_both(
            meta(128, 512), formats.get("nvfp4_one_level"), seed=seed, transform="transform" in options
        )
    assert found[-1].kernel.__name__ == kernel
    evaluations = work("quantize_both", "nvfp4_one_level", **options).evaluations
    assert evaluations == (1 if kernel == "quantize_both" else 2)
