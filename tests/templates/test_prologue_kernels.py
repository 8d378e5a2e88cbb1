"""Quantisers with a prologue: the kernels against the reference of the steps, then of the quantiser, bit for bit.

As in test_quantize_kernels.py: on a GPU, and in Triton's interpreter in a process of its own.
"""

import pytest
import torch
import torch.nn.functional as F

from fp4compile import _compat
from fp4compile.formats import formats
from fp4compile.formats.prologue import Prologue
from fp4compile.hardware import Target
from fp4compile.ops.quantize import QUANTIZE, quantize_kernels
from fp4compile.templates.device.apply_prologue import text
from fp4compile.templates.launch import dry_run
from fp4compile.templates.quantize import row_on_chip
from tests.helpers.hard_inputs import NAMES, NON_FINITE, hard_input
from tests.helpers.kernels import DEVICE, INTERPRETING, assert_same_bits, gpu, spilled_bytes, written_alone

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROWS, BOTH, VALUES = (-1,), (-1, -2), (-1,)  # dim, and values

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


def check(steps, first, format, dim=ROWS, row_dtype=BF16, **options):
    """The kernels' bits against the op's on the CPU, which is the reference."""
    compare(operands_of(steps, first, row_dtype), steps, first.dtype, format, dim, **options)


def compare(operands, steps, dtype, format, dim=ROWS, **options):
    first, *others = operands
    expected = QUANTIZE(first, format, dim, operands=others, prologue=steps, dtype=dtype, **options)
    moved = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    first, *others = map(on_device, operands)
    got = quantize_kernels(first, format, dim, operands=others, prologue=steps, dtype=dtype, **moved)
    assert_same_bits(got, expected)


@gpu
@pytest.mark.parametrize("format", ["nvfp4_one_level", "nvfp4", "nvfp4_rowwise", "mxfp8", "float8_rowwise"])
def test_hard_inputs(format):
    """NaN, infinities, zeros and ties on their way through the steps, in rows and in columns."""
    block = formats.get(format).block_cols if formats.get(format).block else 16
    finite = torch.cat([hard_input(name, (1, 80), BF16, block) for name in NAMES if name not in NON_FINITE])
    check(["mul aux0 1.0"], finite, format)
    if formats.get(format).outer is None:
        check(["mul aux0 1.0"], finite.t().contiguous(), format, BOTH)
    check(RESIDUAL, torch.cat([hard_input(name, (2, 80), BF16, block) for name in NON_FINITE]), format)


# Outside of the tensor the steps make nothing: matrices have an odd or an even number of columns.
of_forms = pytest.mark.parametrize(
    "steps", [NORM, SHIFT, WEIGHT, RESIDUAL], ids=["norm", "shift", "weight", "residual"]
)
of_columns = pytest.mark.parametrize("columns", [41, 72])


@gpu
@of_forms
@of_columns
@pytest.mark.parametrize("format", ["nvfp4_one_level", "nvfp4", "nvfp4_rowwise", "mxfp8", "float8_rowwise"])
def test_rows(steps, columns, format):
    check(steps, torch.randn(5, columns).bfloat16(), format, row_dtype=F32)


@gpu
@of_forms
@of_columns
@pytest.mark.parametrize("format", ["nvfp4_one_level", "mxfp8"])
def test_both_directions(steps, columns, format):
    check(steps, torch.randn(35, columns).bfloat16(), format, BOTH)


@gpu
@of_forms
def test_batches(steps):
    """Swizzled scales, values, and a global scale that is given."""
    batch = torch.randn(2, 3, 48).bfloat16()
    check(steps, batch, "mxfp8", layout="swizzled")
    check(steps, batch.half(), "mxfp8", BOTH, layout="swizzled")
    for format in ("nvfp4", "nvfp4_rowwise", "mxfp8"):
        check(steps, batch, format, values=VALUES)
    check(steps, batch, "mxfp8", BOTH, values=BOTH)
    check(steps, batch, "nvfp4", outer=torch.tensor(0.25))


@gpu
@pytest.mark.parametrize("shape", [(3, 41), (2, 2, 48)])
def test_float32_operands(shape):
    """A residual stream in float32, whose norm is rounded to bf16 before it is quantised; its sum is stored."""
    norm, stored = ["add aux0 aux1", "mul s0 col2", "mul s1 row3"], ["s0 float32", "s2 bfloat16"]
    generator = torch.Generator().manual_seed(7)
    wide, column = (torch.randn(size, generator=generator) for size in (shape, (*shape[:-1], 1)))
    others = [torch.randn(size, generator=generator).bfloat16() for size in (shape, shape[-1:])]
    wide.view(-1)[:3] = torch.tensor([torch.inf, -0.0, torch.nan])
    for operands in ([wide, others[0], column, others[1]], [others[0], wide, column, others[1]]):
        for format in ("nvfp4", "mxfp8"):
            compare(operands, norm, BF16, format, stored=stored)
        compare(operands, norm, F16, "nvfp4_rowwise", values=VALUES, stored=["s0 float32"])
        compare(operands, norm, BF16, "mxfp8", values=VALUES, stored=stored)
    compare([wide, wide], RESIDUAL, F32, "mxfp8", stored=["s0 bfloat16"])


@gpu
def test_three_tensors_for_columns():
    """As the gradient of a gate has them."""
    check(["mul aux0 aux1", "relu s0", "sub 1.0 aux2", "mul s1 s2"], torch.randn(35, 72).bfloat16(), "mxfp8", BOTH)


@pytest.mark.skipif(not INTERPRETING, reason="on SM100 random bits are the hardware's")
def test_random_bits():
    check(SHIFT, torch.randn(5, 40).bfloat16(), "nvfp4_te", seed=torch.tensor(3))


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
        compare(few, steps, BF16, format)
    compare(few, steps, BF16, "nvfp4", stored=["s2 bfloat16"])  # the result, which the second kernel reads
    compare(few, steps, BF16, "mxfp8", layout="swizzled", stored=stored)
    compare([few[0].reshape(6, cols), few[1]], steps, BF16, "nvfp4_rowwise", values=VALUES)
    few[1][:, 0, :3] = torch.tensor([torch.nan, torch.inf, -0.0])
    compare(many, steps, BF16, "mxfp8", BOTH, stored=stored)


@gpu
def test_other_slices():
    """Of float32; of rows, which are copied first, as are slices of columns that a norm reads after its first operand.

    Sums of small integers are exact in any order.
    """
    wide, narrow = torch.randn(3, 48), torch.randint(-8, 9, (2, 3, 64)).bfloat16()
    compare([column_slice(wide, 97, 48), wide], RESIDUAL, BF16, "mxfp8", stored=["s0 float32"])
    rows_left_out = torch.randn(2, 5, 64).bfloat16()[:, :3]
    compare([narrow, rows_left_out], RESIDUAL, BF16, "mxfp8")
    norm, first = ["mean aux0", "sub aux0 s0", "mul s1 aux1"], column_slice(narrow, 200, 8)
    for operands in ([first, narrow], [narrow, first], [first.transpose(0, 1)[:1].transpose(0, 1), first[:, :1]]):
        for format in ("nvfp4", "nvfp4_rowwise"):
            compare(operands, norm, BF16, format)


RESULT, BETWEEN = "s3 bfloat16", "s0 bfloat16"


@gpu
@of_columns
def test_what_is_stored(columns):
    """Each kernel that reads first writes it, of matrices of any length and nothing beyond."""
    first = torch.randn(35, columns).bfloat16()
    for stored in ([RESULT], [BETWEEN, RESULT]):
        for format in ("nvfp4_one_level", "nvfp4", "float8_rowwise"):
            check(NORM, first[:5].contiguous(), format, stored=stored)
    for format in ("mxfp8", "nvfp4_one_level"):
        check(NORM, first, format, BOTH, stored=[BETWEEN, "s2 float16"])
        check(NORM, first, format, BOTH, stored=[RESULT])


@gpu
def test_what_is_stored_of_batches():
    batch = torch.randn(2, 3, 48).bfloat16()
    check(RESIDUAL, batch, "nvfp4", layout="swizzled", stored=["s0 bfloat16"])
    check(RESIDUAL, batch, "mxfp8", BOTH, layout="swizzled", stored=["s0 bfloat16"])
    check(RESIDUAL, batch, "nvfp4", values=VALUES, stored=["s0 bfloat16"])


@gpu
def test_rows_that_do_not_fit_on_the_chip(monkeypatch):
    """Two kernels read them, and compute the steps each time; few rows that do fit are shared by programs."""
    check(NORM, torch.randn(1, 8200).bfloat16(), "nvfp4_rowwise", stored=[BETWEEN])
    monkeypatch.setattr(row_on_chip, "MAX_ROW_ON_CHIP", 1024)
    check(NORM, torch.randn(2, 16400).bfloat16(), "nvfp4_rowwise", stored=[RESULT])


@gpu
def test_one_column_and_one_row_and_none():
    """Where rows, columns and tensors have the same shape, the names say how each is read."""
    for shape in ((5, 1), (1, 48), (0, 48), (3, 0)):
        first = torch.randn(shape).bfloat16()
        check(WEIGHT, first, "mxfp8")
        check(NORM, first, "mxfp8", BOTH)


@gpu
def test_what_no_kernel_reads():
    """By PyTorch, then quantised: square blocks and columns; float32, global scales, the transform, random bits and too
    many tensors in both directions."""
    wide, first = torch.randn(32, 64), torch.randn(32, 64).bfloat16()
    check(RESIDUAL, first, "nvfp4_16x16")
    check(RESIDUAL, first, "mxfp8", (-2,))
    check(RESIDUAL, wide, "mxfp8", BOTH)
    check(RESIDUAL, first, "nvfp4", BOTH, outer=torch.tensor(0.25))
    check(RESIDUAL, first, "nvfp4_te", BOTH, hadamard=True, stored=["s0 bfloat16"])
    for format in ("nvfp4", "nvfp4_te", "nvfp4_one_level", "nvfp4_rowwise"):  # rows behind a transform
        check(RESIDUAL, first, format, hadamard=True, stored=["s0 bfloat16"])
    if INTERPRETING:  # on SM100 random bits are the hardware's
        check(RESIDUAL, first, "mxfp4", BOTH, seed=torch.tensor(3))
    check(["mul aux0 aux1", "add s0 aux2"], first, "mxfp8", BOTH, stored=["s0 bfloat16"])


@gpu
@pytest.mark.parametrize(("steps", "exact"), [
    (["neg aux0", "exp s0", "add s1 1.0", "div aux0 s2", "mul s3 aux1"], lambda x, y: F.silu(x) * y),
    (["mul aux0 0.5", "mul aux0 0.7071067811865476", "erf s1", "add s2 1.0", "mul s0 s3"], F.gelu),
    (["tanh aux0", "sigmoid aux0", "cube s0", "sub s1 s2"], lambda x: torch.sigmoid(x) - torch.tanh(x) ** 3),
], ids=["silu", "gelu", "tanh"])  # fmt: skip
def test_functions(steps, exact):
    """Functions that two libraries compute differently: values, before the last bits of bfloat16 are lost."""
    operands = operands_of(steps, torch.randn(4, 64).bfloat16())
    first, *others = (x.to(DEVICE) for x in operands)
    values, _, outer = quantize_kernels(first, "nvfp4_rowwise", operands=others, prologue=steps, values=VALUES)
    got = values.cpu().float() * outer.cpu()
    expected = exact(*(x.float() for x in operands))
    assert ((got - expected).abs() <= 0.18 * expected.abs().unflatten(-1, (4, 16)).amax(-1, keepdim=True).expand(
        4, 4, 16).flatten(-2)).all()  # half a step of E2M1 at the top of a block  # fmt: skip


def test_text():
    """Operands with the distance of their rows, steps on values by their places, the result and what is stored."""
    steps = Prologue.parse(["add aux0 col1", "mul s0 row2", "mul s1 aux3"], BF16, ["s2 bfloat16", "s0 float16"])
    found = text(steps, (BF16, F32, BF16, BF16), ((3, 2048),))
    assert found == "aux0 col1 row2 aux3/2048 | add 0 1; mul.pairs 4 2; mul.pairs 5 3 | 6 6 4"
    # A result that is rounded to less than the words hold.
    rounded = text(Prologue.parse(["add aux0 1.0"], BF16, ["s0 bfloat16"]), (F32,))
    assert rounded == "aux0 | add 0 1.0; bfloat16 1 | 2 1"
    sums = ["square aux0", "mean s0", "exp aux0", "sum s2", "mul s1 s3", "mul aux0 s4"]
    assert text(Prologue.parse(sums, BF16), (BF16,)).split(" | ")[1] == (
        "square 0; mean 1; exp 0; sum 3; mul.pairs 2 4; mul.pairs 0 5"
    )


def launches(sm, steps, format, dim=ROWS, shape=(1024, 1024), **options):
    """The launches of a quantiser with a prologue, on a GPU that need not be there."""
    first, *others = (x.to("meta") for x in operands_of(steps, torch.empty(shape, dtype=BF16, device="meta")))
    with dry_run(Target(sm)) as found:
        quantize_kernels(first, format, dim, operands=others, prologue=steps, **options)
    return found


def test_text_of_a_gate():
    """SiLU is one operation, and knows whether its argument has 16 bits."""
    steps = Prologue.parse(["neg aux0", "exp s0", "add 1.0 s1", "div aux0 s2", "mul s3 aux1"], BF16)
    assert text(steps, (BF16, F32)) == "aux0 aux1 | silu.narrow 0; mul.pairs 2 1 | 3"
    assert "| silu 0; mul.pairs 2 1; bfloat16 3 |" in text(steps, (F32, F32))
    rounded = Prologue.parse(["add aux0 aux1", "bfloat16 s0", "neg s1", "exp s2", "add s3 1.0", "div s1 s4"], BF16)
    assert "| add 0 1; bfloat16 2; silu.narrow 3; bfloat16 4 |" in text(rounded, (F32, BF16))
    other = Prologue.parse(["neg aux1", "exp s0", "add s1 1.0", "div aux0 s2"], BF16)
    assert "div 0 4 |" in text(other, (BF16, BF16))


@pytest.mark.skipif(INTERPRETING, reason="compiles")
def test_a_thread_stores_8_or_16_bytes_at_a_time_and_spills_nothing():
    """A thread stores what it has loaded and computed: nothing goes through shared memory for that."""
    for sm, stores in ((90, (2, 1)), (100, (5, 0))):  # a thread's values and their codes: 16 and 32, by heuristics
        (launch,) = launches(sm, RESIDUAL, "nvfp4_one_level", stored=["s0 bfloat16"])
        compiled = _compat.compile_ahead(launch.kernel, launch.args, launch.constants, launch.num_warps, sm)
        assert spilled_bytes(compiled.asm["cubin"]) == 0 and compiled.metadata.shared == 0
        assert tuple(compiled.asm["ptx"].count(f"st.global.v{words}.b32") for words in (4, 2)) == stores


@pytest.mark.skipif(INTERPRETING, reason="launches nothing")
def test_the_first_kernel_stores_and_the_second_reads_it():
    """Only the result: what was rounded on the way is computed again, so that all kernels see the same values."""
    first, second = launches(100, NORM, "nvfp4", shape=(128, 128), stored=[BETWEEN, RESULT])
    assert second.args["x_ptr"] is first.args["stored_2_ptr"] and second.args["operand_1_ptr"] is None
    assert second.constants["PROLOGUE"] == ""
    first, second = launches(100, NORM, "nvfp4", shape=(128, 128), stored=[BETWEEN])
    assert first.args["stored_1_ptr"] is not None and second.args["stored_1_ptr"] is None
    result, *stored = first.constants["PROLOGUE"].split(" | ")[2].split()
    assert len(stored) == 1 and second.constants["PROLOGUE"].split(" | ")[2] == result


@pytest.mark.skipif(INTERPRETING, reason="compiles")
def test_inductor_writes_the_prologue_into_its_wrapper(tmp_path):
    """The text that Inductor writes for a kernel stands alone, and nothing spills."""
    (launch,) = launches(90, ["mul aux0 aux1"], "mxfp8", BOTH)
    written = written_alone(launch.kernel, tmp_path)
    compiled = _compat.compile_ahead(written.quantize_both, launch.args, launch.constants, launch.num_warps, 90)
    assert spilled_bytes(compiled.asm["cubin"]) == 0


@pytest.mark.skipif(INTERPRETING, reason="has no cache keys")
def test_every_prologue_is_read_by_one_kernel():
    """Kernels are not copied; their constants tell what they read, the same for equal steps."""
    found = [launches(90, steps, "mxfp8")[0] for steps in (NORM, NORM, SHIFT, ["mul aux0 2.0"])]
    assert len({launch.kernel for launch in found}) == 1
    one, same, *others = (launch.constants["PROLOGUE"] for launch in found)
    assert one == same and len({one, *others, ""}) == 4
