"""What launches say to kernels about memory and order: nothing runs, and no GPU need be there."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fp4compile.check.quantisers import GATE, RMS_NORM
from fp4compile.formats import formats, reference
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.formats.prologue import Prologue
from fp4compile.formats.quantize_spec import QuantizeSpec
from fp4compile.hardware import Target
from fp4compile.ops.quantize import QUANTIZE, quantize_kernels
from fp4compile.templates import launch, multiply
from fp4compile.templates.gemm import indexed
from fp4compile.templates.gemm.heuristics import tma_copies
from fp4compile.templates.launch import dry_run
from fp4compile.templates.quantize.dequantize import dequantize
from fp4compile.templates.quantize.prologue_cost import reads_amax
from fp4compile.templates.quantize.prologues import takes_prologue
from fp4compile.templates.quantize.row_on_chip import MAX_ROW_ON_CHIP
from tests.helpers.multiplied import scaled_grouped_mm, scaled_mm
from tests.helpers.quantisers import quantize, quantize_both

BF16 = torch.bfloat16


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def weights(*shape, name="nvfp4", layout="linear"):
    """An operand as `quantize` makes it of a tensor on the meta device."""
    data, scales, outer = QUANTIZE(meta(*shape), name, layout=layout, each_matrix=len(shape) == 3)
    fmt = formats.get(name)
    return Operand(data, scales, outer if fmt.outer else None, fmt)


def after(steps, stored, *shape, format="nvfp4"):
    """The launches of a quantiser of rows after these steps; of a tensor as it is where there are none."""
    x = meta(*shape)
    kinds = Prologue.parse(steps, BF16).kinds if steps else {0: "aux"}
    others = [x if kind == "aux" else meta(shape[-1]) for i, kind in sorted(kinds.items()) if i]
    with dry_run(Target(90)) as found:
        quantize_kernels(x, format, operands=others, prologue=steps, stored=stored)
    return found


# ---------------------------------------------------------------- kernels that start before the last one has ended


@pytest.mark.parametrize(("steps", "stored", "waits"), [
    ((), (), True), (GATE, (), True), (GATE, ("s4 bfloat16",), False), (GATE, ("s2 bfloat16",), False),
    (RMS_NORM, (), False), (RMS_NORM, ("s5 bfloat16",), False),
], ids=["plain", "gate", "stored", "a part stored", "norm", "a norm stored"])  # fmt: skip
def test_what_a_kernel_reads_before_it_waits_is_not_of_the_kernel_before(steps, stored, waits):
    """The kernel that quantises waits for the amax alone, just before it reads that: what the first kernel has stored,
    statistics included, it would read too early."""
    first, second = after(steps, stored, 64, 512)
    assert bool(second.constants.get("PDL")) == waits
    assert bool(first.constants.get("LAUNCH_DEPENDENTS")) or not waits


@pytest.mark.parametrize("steps", [(), RMS_NORM], ids=["plain", "norm"])
@pytest.mark.parametrize("rows", [2, 3, 65, 128, 129, 4096, 2**14])
def test_partial_maxima_are_as_many_as_programs_and_a_power_of_two(rows, steps):
    """Each program stores one, and a program of the next kernel reads all of them at once."""
    first, second = after(steps, (), rows, 512)
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
        quantised = quantize(x, fmt, layout="swizzled")
        columns = quantize(x, fmt, dim=-2)
        both = quantize_both(x, fmt)
        values = dequantize(*quantize(x, fmt), fmt, shape[-1], BF16)
    assert not found and values.shape == x.shape and not after(GATE, (), *shape, format=name)
    expected = reference.quantize(x, fmt, None, "swizzled"), reference.quantize(x.mT, fmt)
    for one, other in zip((*quantised, *columns, *both[1]), (*expected[0], *expected[1], *expected[1]), strict=True):
        assert one is other is None or (one.shape, one.dtype) == (other.shape, other.dtype)


@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_rowwise", "mxfp8"])
@pytest.mark.parametrize("options", [{}, {"dim": [-1, -2]}, {"values": [-1]}], ids=["rows", "both", "values"])
def test_a_norm_of_no_rows_is_not_launched(options, format):
    """Programs beyond the last row would read that row."""
    with dry_run(Target(90)) as found:
        results = quantize_kernels(
            meta(0, 512), format, operands=[meta(512)], prologue=RMS_NORM, stored=["s5 bfloat16"], **options
        )
    assert not found and results[-1].shape == (0, 512)


def test_rows_whose_number_may_be_0_are_read_with_a_mask():
    """Of rows that fill a tile, those beyond the last are the last, if there is one."""

    def norm(x, w):
        return quantize_kernels(x, "mxfp8", operands=[w], prologue=RMS_NORM)

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


@pytest.mark.parametrize(("groups", "rows"), [(1, 1), (3, 3), (3, 9), (6, 23), (5, 20)])
def test_the_table_of_a_grouped_decode_step_holds_every_row_tile(groups, rows):
    """Of any sizes of the groups: the kernel writes an entry for each tile of each group."""
    a, b, offs = Operand(meta(rows, 1024)), weights(groups, 1024, 1024), meta(groups, dtype=torch.int32)
    with dry_run(Target(90)) as found:
        scaled_grouped_mm(a, b, offs, rows, BF16)
    launch = found[-1]
    assert launch.kernel.__name__ == "gemm_skinny"
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
    spec, dtypes = QuantizeSpec(formats.get("mxfp8"), prologue=prologue), [BF16] * len(prologue.kinds)
    assert takes_prologue(spec, dtypes, 512) == taken


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["nvfp4_one_level", "mxfp8", "mxfp8_e5m2", "mxfp4"])
@pytest.mark.parametrize("shape", [(128, 512), (3, 41), (2, 5, 64)], ids=str)
def test_what_both_directions_have_computed_is_read_once(shape, name, dtype):
    """By the one kernel that computes it, which serves every shape."""
    x = meta(*shape, dtype=dtype)
    with dry_run(Target(100)) as found:
        quantize_kernels(x, name, (-1, -2), operands=[x], prologue=["mul aux0 aux1"])
    (launch,) = found
    assert launch.kernel.__name__ == "quantize_both" and launch.args["operand_1_ptr"] is not None


@pytest.mark.parametrize(("name", "options"), [
    ("nvfp4", {}), ("nvfp4_te", {}), ("nvfp4_rowwise", {}), ("float8_rowwise", {}), ("nvfp4_16x16", {}),
    ("nvfp4", {"outer": meta(dtype=torch.float32)}), ("nvfp4_te", {"seed": meta(dtype=torch.int64)}),
    ("mxfp4", {"seed": meta(dtype=torch.int64)}), ("nvfp4_one_level", {"hadamard": True}), ("mxfp8", {"dim": -2}),
    ("nvfp4", {"offs": meta(4, dtype=torch.int32), "dim": -1}), ("mxfp8", {"offs": meta(4, dtype=torch.int32)}),
])  # fmt: skip
def test_what_else_is_quantised_is_computed_by_pytorch(name, options):
    x = meta(128, 512)
    with dry_run(Target(100)) as found:
        quantize_kernels(x, name, operands=[x], prologue=["mul aux0 aux1"], **{"dim": (-1, -2), **options})
    assert found and all(launch.args.get("operand_1_ptr") is None for launch in found)
    assert not any(launch.constants.get("PROLOGUE") for launch in found)


# ---------------------------------------------------------------- what the cost model says of the kernels


@pytest.mark.parametrize("cols", [MAX_ROW_ON_CHIP - 16, MAX_ROW_ON_CHIP, MAX_ROW_ON_CHIP + 16])
def test_a_row_on_the_chip_is_read_once(cols):
    read_again = reads_amax(QuantizeSpec(formats.get("nvfp4_rowwise")), cols)
    with dry_run(Target(100)) as found:
        quantize_kernels(torch.empty(4, cols, dtype=torch.bfloat16, device="meta"), "nvfp4_rowwise")
    assert len(found) == 1 + read_again and read_again == (cols > MAX_ROW_ON_CHIP)


# ---------------------------------------------------------------- what is looked up once


class Kernel:
    """A kernel that records how it is launched: by Triton's search, or as it was compiled."""

    arg_names = ("x", "n", "TILE", "MODE")

    def __init__(self):
        self.searched, self.found = [], []

    def __getitem__(self, grid):
        def run(*values, **named):
            self.searched.append((grid, values, named))
            return Compiled(self.found)

        return run


class Compiled:
    def __init__(self, found):
        self.found = found

    def __getitem__(self, grid):
        return lambda *values: self.found.append((grid, values))


def test_a_launch_is_searched_once_for_all_that_a_kernel_depends_on(monkeypatch):
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernel, x = Kernel(), torch.empty(64)
    usual = (x, 5), {"TILE": 16, "MODE": "fast"}, 4
    others = [
        ((x, 6), *usual[1:]), ((x, None), *usual[1:]), ((x, 5.0), *usual[1:]), ((x.bfloat16(), 5), *usual[1:]),
        ((x[1:], 5), *usual[1:]), (usual[0], {"TILE": 32, "MODE": "fast"}, 4), (*usual[:2], 8),
    ]  # fmt: skip
    for arguments, constants, warps in [usual, *others]:
        for grid in (7, 9):
            launch.Launch(kernel, grid, arguments, constants, warps).run()
    assert [grid for grid, *_ in kernel.searched] == [(7,)] * 8
    assert [grid for grid, _ in kernel.found] == [(9, 1, 1)] * 8
    for (_, values, named), (_, again) in zip(kernel.searched, kernel.found, strict=True):
        assert all(one is other for one, other in zip(again, (*values, named["TILE"], named["MODE"]), strict=True))
    assert kernel.searched[0][2] == {"TILE": 16, "MODE": "fast", "num_warps": 4}
    launch.Launch(Kernel(), 1, *usual).run()  # another kernel of the same arguments
    launch.Launch(kernel, 1, (x, 5), {"MODE": "fast", "TILE": 16}, 4).run()
    assert len(kernel.found) == 8 and len(kernel.searched) == 9
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch.Launch(kernel, 1, *usual).run()
    assert len(kernel.found) == 8


def test_arguments_are_checked_once_for_each_layout(monkeypatch):
    monkeypatch.setattr(multiply, "_problems", {})
    checks, check = [], multiply.check
    monkeypatch.setattr(multiply, "check", lambda x: checks.append(x) or check(x))
    fmt, rows = formats.get("float8_rowwise"), torch.randn(8, 256)
    a, b = (Operand(*reference.quantize(x, fmt), fmt) for x in (rows[:4], rows))
    b = replace(b, data=torch.empty(8 * 256 + 16, dtype=torch.uint8)[: 8 * 256].view(8, 256).view(b.data.dtype))

    def call(a, b, dtype=BF16):
        return multiply.call_of(Arguments.of(a, b, None, dtype), Target(90))

    first = call(a, b)
    second = call(replace(a, data=a.data.clone()), b)
    assert len(checks) == 1 and second.problem is first.problem and second.a.data is not first.a.data
    call(a, b, torch.float32)
    call(a, replace(b, outer=None))
    assert len(checks) == 3
    with pytest.raises(ValueError, match="b_outer: expected float32"):
        call(a, replace(b, outer=b.outer[1:]))
    with pytest.raises(ValueError, match="contraction dimensions differ"):
        call(replace(a, data=a.data[:, :128]), b)
    b.data.untyped_storage().resize_(8 * 256 - 1)
    with pytest.raises(RuntimeError, match="a launch would address"):
        call(a, b)
