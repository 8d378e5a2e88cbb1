"""Quantisers with a prologue: the kernels against the reference of the steps, then of the quantiser, bit for bit.

As in test_quantize_kernels.py: on a GPU, and in Triton's interpreter in a process of its own.
"""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code

from fp4compile import _compat
from fp4compile.check.sass import disassemble
from fp4compile.formats import formats
from fp4compile.formats.prologue import Prologue
from fp4compile.hardware import Target
from fp4compile.ops import prologue as ops_prologue
from fp4compile.templates.device.prologue_source import source
from fp4compile.templates.launch import dry_run
from fp4compile.templates.quantize import dispatch, heuristics
from tests.helpers import in_interpreter
from tests.helpers.hard_inputs import NAMES, NON_FINITE, hard_input
from tests.helpers.kernels import DEVICE, INTERPRETING, OLD_TRITON, gpu, spilled_bytes

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

# Steps without functions that two libraries compute differently.
RESIDUAL = ["add aux0 aux1"]
NORM = ["sub aux0 col1", "mul s0 col2", "mul s1 row3", "add s2 row4"]
SHIFT = ["relu aux0", "square s0", "add s1 1.0"]  # not 0 of 0
WEIGHT = ["add row1 1.0", "mul aux0 s0"]


def operands_of(steps, first, row_dtype=BF16):
    """Operands for the steps, of which `first` is one."""
    kinds = Prologue.parse(steps, BF16).kinds
    generator = torch.Generator().manual_seed(7)
    *lead, cols = first.shape
    shapes = {"aux": (*lead, cols), "row": (cols,), "col": (*lead, 1)}
    dtypes = {"aux": first.dtype, "row": row_dtype, "col": F32}
    return [first] + [
        torch.randn(shapes[kinds[i]], generator=generator).to(dtypes[kinds[i]]) for i in range(1, len(kinds))
    ]


def check(steps, first, op, format, dim=-1, row_dtype=BF16, **options):
    """The kernels' bits against the op's on the CPU, which is the reference."""
    compare(operands_of(steps, first, row_dtype), steps, first.dtype, op, format, dim, **options)


def compare(operands, steps, dtype, op, format, dim=-1, **options):
    arguments = (steps, dtype, op, format, dim)
    expected = torch.ops.fp4compile.quantize_prologue(operands, *arguments, **options)
    moved = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    got = ops_prologue.quantize_prologue_cuda(list(map(on_device, operands)), *arguments, **moved)
    same(got, expected)


def same(got, expected):
    for one, other in zip(got, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        one, other = one.reshape(-1).cpu(), other.reshape(-1)
        if one.dtype in (F32, F16, BF16):  # NaNs are equal whatever their payload
            one, other = one.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0)
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@gpu
@pytest.mark.parametrize("format", ["nvfp4_one_level", "nvfp4", "nvfp4_rowwise", "mxfp8", "float8_rowwise"])
def test_hard_inputs(format):
    """NaN, infinities, zeros and ties on their way through the steps, in rows and in columns."""
    block = formats.get(format).block_cols if formats.get(format).block else 16
    finite = torch.cat([hard_input(name, (1, 80), BF16, block) for name in NAMES if name not in NON_FINITE])
    check(["mul aux0 1.0"], finite, "quantize", format)
    check(["mul aux0 1.0"], finite.t().contiguous(), "quantize", format, -2)
    check(RESIDUAL, torch.cat([hard_input(name, (2, 80), BF16, block) for name in NON_FINITE]), "quantize", format)


@gpu
@pytest.mark.parametrize("steps", [NORM, SHIFT, WEIGHT, RESIDUAL], ids=["norm", "shift", "weight", "residual"])
def test_forms(steps):
    """Each kernel, with rows and columns of any length: outside of the tensor the steps make nothing."""
    odd, even, batch = (torch.randn(shape).bfloat16() for shape in ((35, 41), (35, 72), (2, 3, 48)))
    for format in ("nvfp4_one_level", "nvfp4", "nvfp4_rowwise", "mxfp8", "float8_rowwise"):
        for first in (odd[:5].contiguous(), even[:5].contiguous()):
            check(steps, first, "quantize", format, row_dtype=F32)
        for op in ("quantize", "quantize_both"):
            check(steps, odd if format == "mxfp8" else even, op, format, -2 if op == "quantize" else -1)
    check(steps, batch, "quantize", "mxfp8", layout="swizzled")
    check(steps, batch.half(), "quantize_both", "mxfp8", layout="swizzled")
    for format in ("nvfp4", "nvfp4_rowwise"):
        check(steps, batch, "fake_quantize", format)
    check(steps, batch, "quantize", "nvfp4", outer=torch.tensor(0.25))


@gpu
def test_float32_operands():
    """A residual stream in float32, whose norm is rounded to bf16 before it is quantised; its sum is stored."""
    norm, stored = ["add aux0 aux1", "mul s0 col2", "mul s1 row3"], ["s0 float32", "s2 bfloat16"]
    for shape in ((3, 41), (2, 2, 48)):
        generator = torch.Generator().manual_seed(7)
        wide, column = (torch.randn(size, generator=generator) for size in (shape, (*shape[:-1], 1)))
        others = [torch.randn(size, generator=generator).bfloat16() for size in (shape, shape[-1:])]
        wide.view(-1)[:3] = torch.tensor([torch.inf, -0.0, torch.nan])
        for operands in ([wide, others[0], column, others[1]], [others[0], wide, column, others[1]]):
            for format in ("nvfp4", "mxfp8"):
                compare(operands, norm, BF16, "quantize", format, stored=stored)
            compare(operands, norm, F16, "fake_quantize", "nvfp4_rowwise", stored=["s0 float32"])
    compare([wide, wide], RESIDUAL, F32, "quantize", "mxfp8", stored=["s0 bfloat16"])


@gpu
def test_three_tensors_for_columns():
    """As the gradient of a gate has them."""
    check(["mul aux0 aux1", "relu s0", "sub 1.0 aux2", "mul s1 s2"], torch.randn(35, 72).bfloat16(), "quantize_both",
          "mxfp8")  # fmt: skip


@gpu
def test_training_forms():
    """The Hadamard transform and random bits: of the steps' result, in both directions."""
    first, seed = torch.randn(35, 40).bfloat16(), torch.tensor(3)
    check(NORM, first, "quantize_both", "nvfp4_te", hadamard=True)
    if INTERPRETING:  # on SM100 random bits are the hardware's
        check(NORM, first, "quantize_both", "nvfp4_te", hadamard=True, seed=seed)
        check(SHIFT, first, "quantize", "nvfp4_te", -2, seed=seed)


def on_device(x):
    """x there, a slice as a slice."""
    whole = x if x._base is None else x._base
    return whole.to(DEVICE).as_strided(x.shape, x.stride(), x.storage_offset())


def column_slice(x, width, start):
    """x as columns of a wider tensor that has NaN beside them, which no kernel may read."""
    wide = torch.full((*x.shape[:-1], width), torch.nan, dtype=x.dtype)
    wide.narrow(-1, start, x.shape[-1]).copy_(x)
    return wide.narrow(-1, start, x.shape[-1])


# Columns of an operand, then width and first column of the tensor that each is a slice of; None: it is no slice. Both
# halves of a product; such that no pair of elements is aligned; of other strides, of which one is aligned to 4 bytes.
SLICES = {
    "halves": (80, (160, 80), (160, 0)),
    "odd": (41, (82, 41), (82, 0)),
    "one": (48, None, (97, 48)),
    "other": (40, (90, 48), None),
}


@gpu
@pytest.mark.parametrize("name", SLICES)
def test_slices_of_columns(name):
    """Every kernel reads gate and up of one product where they lie, and stores what it stores as rows of its own."""
    cols, *places = SLICES[name]
    steps, stored = ["relu aux0", "mul s0 aux1", "add s1 1.0"], ["s1 bfloat16"]
    few, many = ([column_slice(x, *place) if place else x for x, place in zip(operands, places, strict=True)]
                 for operands in (torch.randn(2, *shape, cols).bfloat16() for shape in ((2, 3), (35,))))  # fmt: skip
    for format in ("nvfp4_one_level", "nvfp4", "nvfp4_rowwise"):
        compare(few, steps, BF16, "quantize", format)
    compare(few, steps, BF16, "quantize", "mxfp8", layout="swizzled", stored=stored)
    compare([few[0].reshape(6, cols), few[1]], steps, BF16, "fake_quantize", "nvfp4_rowwise")
    few[1][:, 0, :3] = torch.tensor([torch.nan, torch.inf, -0.0])
    compare(many, steps, BF16, "quantize", "nvfp4_rowwise", -2)
    compare(many, steps, BF16, "quantize_both", "mxfp8", stored=stored)


@gpu
def test_other_slices():
    """Of float32; of rows, which are copied first, as are slices of columns that a norm reads after its first operand.

    Sums of small integers are exact in any order.
    """
    wide, narrow = torch.randn(3, 48), torch.randint(-8, 9, (2, 3, 64)).bfloat16()
    compare([column_slice(wide, 97, 48), wide], RESIDUAL, BF16, "quantize", "mxfp8", stored=["s0 float32"])
    rows_left_out = torch.randn(2, 5, 64).bfloat16()[:, :3]
    compare([narrow, rows_left_out], RESIDUAL, BF16, "quantize", "mxfp8")
    norm, first = ["mean aux0", "sub aux0 s0", "mul s1 aux1"], column_slice(narrow, 200, 8)
    for operands in ([first, narrow], [narrow, first], [first.transpose(0, 1)[:1].transpose(0, 1), first[:, :1]]):
        for format in ("nvfp4", "nvfp4_rowwise"):
            compare(operands, norm, BF16, "quantize", format)


RESULT, BETWEEN = "s3 bfloat16", "s0 bfloat16"


@gpu
def test_what_is_stored():
    """Each kernel that reads first writes it, of matrices of any length and nothing beyond."""
    odd, even, batch = (torch.randn(shape).bfloat16() for shape in ((35, 41), (35, 72), (2, 3, 48)))
    for first in (odd, even):
        for stored in ([RESULT], [BETWEEN, RESULT]):
            for format in ("nvfp4_one_level", "nvfp4", "float8_rowwise"):
                check(NORM, first[:5].contiguous(), "quantize", format, stored=stored)
        for format in ("nvfp4_one_level", "nvfp4_rowwise"):
            check(NORM, first, "quantize", format, -2, stored=[RESULT])
        for format in ("mxfp8", "nvfp4", "nvfp4_rowwise"):
            check(NORM, first, "quantize_both", format, stored=[BETWEEN, "s2 float16"])
    check(NORM, even, "quantize_both", "nvfp4_te", hadamard=True, stored=[RESULT])
    check(RESIDUAL, batch, "quantize", "nvfp4", layout="swizzled", stored=["s0 bfloat16"])
    check(RESIDUAL, batch, "quantize_both", "mxfp8", layout="swizzled", stored=["s0 bfloat16"])
    check(RESIDUAL, batch, "fake_quantize", "nvfp4", stored=["s0 bfloat16"])


# Gradients of a gate's inputs, which read two tensors and three; without the gate's gradient, two.
GRADIENTS, RESULTS = ["add aux1 1.0", "relu s0", "mul aux0 s1", "mul aux0 aux2", "mul s3 s0"], [2, 4]
TWO = ["mul aux0 aux1", "sub aux1 1.0"], [0, 1]


@gpu
@pytest.mark.parametrize(("op", "format", "shape", "options"), [
    ("quantize_both", "mxfp8", (16, 80), {}),
    ("quantize_both", "nvfp4", (16, 48), {"layout": "swizzled"}),
    ("quantize_both", "nvfp4_te", (32, 48), {"hadamard": True, "seed": torch.tensor([3, 5])}),
    ("quantize_both", "nvfp4_rowwise", (16, 48), {}),
    ("quantize", "mxfp8", (176, 80), {}), ("quantize", "nvfp4", (3, 2048), {}),
    ("quantize", "nvfp4_te", (16, 48), {"seed": torch.tensor([3, 5])}), ("quantize", "nvfp4", (32, 40), {}),
    ("quantize", "nvfp4_te", (16, 80), {"seed": torch.tensor([3, 5]), "hadamard": True, "dim": -2}),
    ("quantize", "float8_rowwise", (8, 48), {}), ("fake_quantize", "nvfp4_rowwise", (8, 48), {}),
], ids=str)  # fmt: skip
def test_several_results(op, format, shape, options):
    """By one launch, and one of the amaxes; an infinity shows in both, a NaN in one, where scales leave more to see."""
    if "seed" in options and not INTERPRETING:
        pytest.skip("on SM100 random bits are the hardware's")
    operands = [torch.randn(shape).bfloat16() for _ in range(3)]
    if formats.get(format).outer != "tensor":  # else all that is quantised would be NaN
        operands[0][-1, :5] = torch.inf
    if formats.get(format).outer != "tensor" or format == "nvfp4":
        operands[2][0, 20] = torch.nan  # which the first result does not read
    several(GRADIENTS, RESULTS, operands, op, format, **options)


@gpu
def test_several_results_of_columns_and_rows_and_two_tensors():
    operands = operands_of(NORM, torch.randn(16, 48).bfloat16())
    several(NORM, [2, 3, 1], operands, "quantize", "mxfp8", stored=["s0 bfloat16", "s2 bfloat16"])
    operands = [torch.randn(16, 48).bfloat16() for _ in range(2)]
    several(*TWO, operands, "quantize_both", "float8_rowwise", stored=["s1 bfloat16"])
    several(*TWO, [operands[0].float(), operands[1]], "quantize", "mxfp8", stored=["s1 float32"])


def several(steps, results, operands, op, format, dim=-1, **options):
    """Several results by the kernels, which must take them."""
    shape, layout = operands[0].shape, options.get("layout", "linear")
    assert dispatch.takes_several(formats.get(format), op, layout, shape)
    prologue = Prologue.parse(steps, BF16, options.get("stored", ()), results)
    by_columns = op == "quantize_both" or dim == -2
    assert dispatch.takes_prologue(formats.get(format), prologue, [x.dtype for x in operands], by_columns)
    compare(operands, steps, BF16, op, format, dim, results=results, **options)


@gpu
def test_rows_that_do_not_fit_on_the_chip(monkeypatch):
    """Their programs walk them twice, and compute the steps each time; few of them are shared by programs."""
    check(NORM, torch.randn(1, 8200).bfloat16(), "quantize", "nvfp4_rowwise", stored=[BETWEEN])
    monkeypatch.setattr(heuristics, "MAX_ROW_ON_CHIP", 1024)
    check(NORM, torch.randn(2, 16400).bfloat16(), "quantize", "nvfp4_rowwise", stored=[RESULT])


@gpu
def test_one_column_and_one_row_and_none():
    """Where rows, columns and tensors have the same shape, the names say how each is read."""
    for shape in ((5, 1), (1, 48), (0, 48), (3, 0)):
        first = torch.randn(shape).bfloat16()
        check(WEIGHT, first, "quantize", "mxfp8")
        check(NORM, first, "quantize", "mxfp8", -2)
        check(NORM, first, "quantize_both", "mxfp8")


@gpu
def test_what_no_kernel_reads():
    """Square blocks, float32, and more than a kernel takes: by PyTorch, then quantised."""
    first = torch.randn(32, 64)
    check(RESIDUAL, first, "quantize", "nvfp4", -2)
    check(RESIDUAL, first.bfloat16(), "quantize", "nvfp4_16x16")
    check(["mul aux0 aux1", "add s0 aux2"], first.bfloat16(), "quantize_both", "float8_rowwise")


@gpu
@pytest.mark.parametrize(("steps", "exact"), [
    (["neg aux0", "exp s0", "add s1 1.0", "div aux0 s2", "mul s3 aux1"], lambda x, y: F.silu(x) * y),
    (["mul aux0 0.5", "mul aux0 0.7071067811865476", "erf s1", "add s2 1.0", "mul s0 s3"], F.gelu),
    (["tanh aux0", "sigmoid aux0", "cube s0", "sub s1 s2"], lambda x: torch.sigmoid(x) - torch.tanh(x) ** 3),
], ids=["silu", "gelu", "tanh"])  # fmt: skip
def test_functions(steps, exact):
    """Functions that two libraries compute differently: values, before the last bits of bfloat16 are lost."""
    operands = operands_of(steps, torch.randn(4, 64).bfloat16())
    arguments = (steps, BF16, "fake_quantize", "nvfp4_rowwise")
    values, outer = ops_prologue.quantize_prologue_cuda([x.to(DEVICE) for x in operands], *arguments)
    got = values.cpu().float() * outer.cpu()
    expected = exact(*(x.float() for x in operands))
    assert ((got - expected).abs() <= 0.18 * expected.abs().unflatten(-1, (4, 16)).amax(-1, keepdim=True).expand(
        4, 4, 16).flatten(-2)).all()  # half a step of E2M1 at the top of a block  # fmt: skip


def test_source():
    steps = Prologue.parse(["add aux0 col1", "mul s0 row2"], BF16, ["s1 bfloat16", "s0 float16"])
    assert (
        source(steps, "tile", (BF16, torch.float32, BF16))
        == """\
@triton.jit
def prologue(aux0, col1, row2, ISA: tl.constexpr):
    s0 = aux0 + col1
    s1 = mul(s0, row2, ISA)
    return s1, s0


@triton.jit
def read_tile(ptr, operands, batch, row, rows, col0, cols, cols_left, dtype: tl.constexpr, ROWS: tl.constexpr, \
BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr, \
ISA: tl.constexpr, STORES: tl.constexpr):
    first0, second0 = unpack_column_tile((load_tile(ptr, cols_left, row < rows, dtype, ROWS, BLOCKS, BLOCK, VECTORS, \
ALIGN, WHOLE),), dtype)
    first1, second1 = col_tile(operands[0], batch, row, rows, col0, cols, cols_left, dtype, ROWS, BLOCKS, BLOCK, \
VECTORS, ALIGN, WHOLE)
    first2, second2 = row_tile(operands[1], batch, row, rows, col0, cols, cols_left, dtype, ROWS, BLOCKS, BLOCK, \
VECTORS, ALIGN, WHOLE)
    words = ()
    words1 = ()
    for i in tl.static_range(len(first0)):
        first_s1, first_s0 = prologue(first0[i], first1[i], first2[i], ISA)
        second_s1, second_s0 = prologue(second0[i], second1[i], second2[i], ISA)
        words = words + (pack(first_s1, second_s1, dtype, ISA),)
        words1 = words1 + (pack(first_s0, second_s0, tl.float16, ISA),)
    if STORES:
        to_tile(operands[5], words, batch, row, rows, col0, cols, cols_left, dtype, ROWS, BLOCKS, BLOCK, VECTORS, \
ALIGN, WHOLE)
        to_tile(operands[6], words1, batch, row, rows, col0, cols, cols_left, dtype, ROWS, BLOCKS, BLOCK, VECTORS, \
ALIGN, WHOLE)
    return inside_tile(words, batch, row, rows, col0, cols, cols_left, dtype, ROWS, BLOCKS, BLOCK, VECTORS, ALIGN, \
WHOLE)
"""
    )


def launches(sm, steps, op, format, shape=(1024, 1024), dim=-1, **options):
    """Those of a quantiser with a prologue, on a GPU that need not be there."""
    operands = [x.to("meta") for x in operands_of(steps, torch.empty(shape, dtype=BF16, device="meta"))]
    with dry_run(Target(sm)) as found:
        ops_prologue.quantize_prologue_cuda(operands, steps, BF16, op, format, dim, **options)
    return found


def test_source_of_a_gate():
    """SiLU is one operation, and knows whether its argument has 16 bits. Tiles of columns: both columns at once."""
    steps = Prologue.parse(["neg aux0", "exp s0", "add 1.0 s1", "div aux0 s2", "mul s3 aux1"], BF16)
    of_columns = source(steps, "column_tile", (BF16, torch.float32)).splitlines()
    assert of_columns[:4] == [
        "@triton.jit",
        "def prologue(aux0, aux1, ISA: tl.constexpr):",
        "    s3 = silu(aux0, True, ISA)",
        "    s4 = mul(s3, aux1, ISA)",
    ]
    assert of_columns[-4:-1] == [
        "        both_s4 = prologue(tl.join(first0[i], second0[i]), tl.join(first1[i], second1[i]), ISA)",
        "        first_s4, second_s4 = tl.split(both_s4)",
        "        words = words + (pack(first_s4, second_s4, dtype, ISA),)",
    ]
    assert "s3 = silu(aux0, False, ISA)" in source(steps, "tile", (torch.float32, torch.float32))
    rounded = Prologue.parse(["add aux0 aux1", "bfloat16 s0", "neg s1", "exp s2", "add s3 1.0", "div s1 s4"], BF16)
    assert "s5 = silu(s1, True, ISA)" in source(rounded, "tile", (torch.float32, BF16))
    other = Prologue.parse(["neg aux1", "exp s0", "add s1 1.0", "div aux0 s2"], BF16)
    assert "s3 = aux0 / s2" in source(other, "tile", (BF16, BF16))


@pytest.mark.skipif(INTERPRETING, reason="compiles")
def test_a_thread_stores_8_or_16_bytes_at_a_time_and_spills_nothing():
    """A thread stores what it has loaded and computed: nothing goes through shared memory for that."""
    for sm, stores in ((90, (2, 1)), (100, (5, 0))):  # a thread's values and their codes: 16 and 32, by heuristics
        (launch,) = launches(sm, RESIDUAL, "quantize", "nvfp4_one_level", stored=["s0 bfloat16"])
        compiled = _compat.compile_ahead(launch.kernel, launch.args, launch.constants, launch.num_warps, sm)
        assert spilled_bytes(compiled.asm["cubin"]) == 0 and compiled.metadata.shared == 0
        assert tuple(compiled.asm["ptx"].count(f"st.global.v{words}.b32") for words in (4, 2)) == stores


@pytest.mark.skipif(INTERPRETING, reason="compiles")
def test_two_results_take_the_registers_of_one():
    """What both load is loaded in each branch: loads that stood before it would be held with those of one branch."""
    sigmoid = ["sigmoid aux1", "mul aux1 s0", "mul aux0 s1", "sub 1.0 s0", "mul aux1 s3", "add s4 1.0"]
    steps, seed = (
        [*sigmoid, "mul aux0 aux2", "mul s6 s0", "mul s7 s5"],
        torch.zeros(2, dtype=torch.int64, device="meta"),
    )
    amax, last = launches(100, steps, "quantize_both", "nvfp4_te", hadamard=True, seed=seed, results=[2, 8])
    assert last.grid == 2 * launches(100, ["mul aux0 aux1"], "quantize_both", "nvfp4_te", hadamard=True)[-1].grid
    compiled = _compat.compile_ahead(amax.kernel, amax.args, amax.constants, amax.num_warps, 100)
    assert disassemble(compiled.asm["cubin"]).registers < 220 and spilled_bytes(compiled.asm["cubin"]) == 0


@pytest.mark.skipif(INTERPRETING, reason="launches nothing")
@pytest.mark.parametrize("op, format", [("quantize", "nvfp4"), ("quantize_both", "float8_rowwise")])
def test_the_first_kernel_stores_and_the_second_reads_it(op, format):
    """Only the result: what was rounded on the way is computed again, so that all kernels see the same values."""
    first, second = launches(100, NORM, op, format, shape=(128, 128), stored=[BETWEEN, RESULT])
    assert second.args["x_ptr"] is first.args["stored_2_ptr"] and second.args["operand_1_ptr"] is None
    assert "prologue" not in second.kernel.fn.__globals__["read_tile"].src
    first, second = launches(100, NORM, op, format, shape=(128, 128), stored=[BETWEEN])
    assert first.args["stored_1_ptr"] is not None and second.args["stored_1_ptr"] is None
    assert "to_tile" not in second.kernel.fn.__globals__["read_tile"].src


@pytest.mark.skipif(INTERPRETING, reason="launches nothing")
def test_what_is_stored_is_read_after_it_is_written():
    """The second kernel of a small tensor starts while the first one runs, but for what that one stores."""
    for stored, early in ((None, True), (["s0 bfloat16"], False)):
        _, second = launches(100, RESIDUAL, "quantize", "nvfp4", shape=(128, 128), stored=stored)
        assert second.constants["PDL"] is early


@pytest.mark.skipif(INTERPRETING, reason="compiles")
def test_inductor_writes_the_prologue_into_its_wrapper(tmp_path):
    """The text that Inductor writes for a kernel that reads two forms of tile stands alone, and nothing spills."""
    launch = launches(90, WEIGHT, "quantize_both", "nvfp4_te", hadamard=True)[-1]
    path = tmp_path / "written.py"
    text = user_defined_triton_kernel_transitive_closure_source_code(launch.kernel)
    path.write_text(TritonKernel.gen_common_triton_imports() + "\n@triton.jit\n" + text)
    spec = importlib.util.spec_from_file_location("written", path)
    written = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(written)
    compiled = _compat.compile_ahead(written.quantize_columns, launch.args, launch.constants, launch.num_warps, 90)
    assert spilled_bytes(compiled.asm["cubin"]) == 0


@pytest.mark.skipif(INTERPRETING, reason="has no cache keys")
def test_one_prologue_is_one_kernel():
    one, same, other, none = (
        launches(90, steps, "quantize", "mxfp8")[0].kernel for steps in (NORM, NORM, SHIFT, ["mul aux0 2.0"])
    )
    assert one is same and len({kernel.cache_key for kernel in (one, other, none)}) == 3


@pytest.mark.skipif(INTERPRETING, reason="is the interpreter")
@pytest.mark.skipif(OLD_TRITON, reason="its interpreter has no tl.dot_scaled, and reductions fail on numpy 2.4")
def test_in_the_interpreter():
    in_interpreter.assert_passes(__file__, "test_norm_kernels.py")
