"""The quantise, dequantise and matmul kernels of FP8 formats with float32 scales against the reference, bit for bit.

Without a GPU they run in the interpreter, as in test_quantize_kernels.py. `e4m3:1x64:...` has no name: a format that a
spec string spells is quantised as one with a name.
"""

import pytest
import torch

from fp4compile.formats import formats, reference
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.templates.choose import choose
from fp4compile.templates.gemm.dequantized import dequantized
from fp4compile.templates.multiply import call_of, multiply
from tests.helpers import in_interpreter
from tests.helpers.by_hand import FP8_UNITS_ERROR
from tests.helpers.check_products import ON_FLOAT8_UNITS, magnitudes
from tests.helpers.hard_inputs import DTYPES, IN_ONE_DTYPE, hard_input
from tests.helpers.kernels import DEVICE, INTERPRETING, assert_same_bits, gpu, on_device, quantized
from tests.helpers.quantisers import check_rows, quantize, quantize_both

ROWS = [f"{element}:1x{block}:float32:-:{contract}" for element, block, contract in (
    ("e4m3", 64, "torchao"), ("e4m3", 128, "te"), ("e5m2", 128, "te_pow2"), ("e4m3", 32, "te_pow2")
)]  # fmt: skip
UNBLOCKED = ["e4m3:-:-:tensor:torchao", "e5m2:-:-:tensor:te_pow2", "e5m2:-:-:row:te"]
SQUARES = ["e4m3:64x64:float32:-:torchao", "e4m3:128x128:float32:-:te_pow2"]


pytestmark = pytest.mark.usefixtures("poisoned_memory")


@gpu
@pytest.mark.usefixtures("tall_tiles")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", [*ROWS, UNBLOCKED[2]])
def test_hard_inputs_at_once(format, dtype):
    """Rows are independent: each input in one dtype, all of a dtype in one tensor. Sizes are no multiples of the block;
    columns of a contiguous matrix, and rows of a transposed one."""
    fmt = formats.get(format)
    block = fmt.block_cols if fmt.block else 16
    check_everywhere(
        torch.cat([hard_input(name, (4, 200), dtype, block) for name, of in IN_ONE_DTYPE if of == dtype]), fmt
    )


@gpu
@pytest.mark.usefixtures("tall_tiles")
@pytest.mark.parametrize("format", [*SQUARES, *UNBLOCKED[:2]])
def test_hard_inputs_one_by_one(format):
    """A NaN is all that is left of its square or tensor."""
    for name, dtype in IN_ONE_DTYPE:
        check_everywhere(hard_input(name, (12, 72), dtype), formats.get(format))


def check_everywhere(x, fmt):
    check_rows(x, fmt)
    check_rows(x.t(), fmt)
    along_rows, along_columns = quantize_both(x.to(DEVICE), fmt)
    assert_same_bits(along_rows, reference.quantize(x, fmt))
    assert_same_bits(along_columns, reference.quantize(x.mT, fmt))


@gpu
@pytest.mark.parametrize("shape", [(1, 1), (3, 127), (129, 1), (2, 5, 130), (128, 256)], ids=str)
@pytest.mark.parametrize("format", [ROWS[0], ROWS[1], SQUARES[1]])
def test_shapes(format, shape):
    fmt, x = formats.get(format), torch.randn(shape).bfloat16()
    check_rows(x, fmt)
    for found, along in zip(quantize_both(x.to(DEVICE), fmt), (x, x.mT), strict=True):
        assert_same_bits(found, reference.quantize(along, fmt))


@gpu
@pytest.mark.parametrize("dim", [-1, -2])
def test_groups_of_rows(dim):
    from fp4compile.formats.grouping import Grouping
    from fp4compile.formats.quantize_spec import QuantizeSpec
    from fp4compile.formats.reference_grouped import quantize_along

    fmt, x = formats.get(ROWS[1]), torch.randn(300, 72).bfloat16()
    offs = torch.tensor([130, 130, 259, 280], dtype=torch.int32)
    expected = quantize_along(QuantizeSpec(fmt, (dim,), grouping=Grouping.RAGGED_ROWS), x, dim, offs, None, None)
    found = quantize(x.to(DEVICE), fmt, dim=dim, offs=offs.to(DEVICE))
    used = slice(None) if dim == -2 else slice(280)  # rows of no group are arbitrary
    assert_same_bits([found[0][used], found[1][used]], [expected[0][used], expected[1][used]])


@gpu
@pytest.mark.parametrize("m", [3, 40])
@pytest.mark.parametrize(("a", "b"), [
    (ROWS[0], ROWS[0]), (ROWS[1], SQUARES[1]), (torch.bfloat16, SQUARES[1]),
    *((a, b) for a in (torch.bfloat16, torch.float32, UNBLOCKED[0]) for b in UNBLOCKED),
], ids=str)  # fmt: skip
def test_products(a, b, m):
    left, right = (
        quantized(torch.randn(rows, 320), fmt if isinstance(fmt, torch.dtype) else formats.get(fmt))
        for rows, fmt in ((m, a), (24, b))
    )
    expected = reference.scaled_mm(left, right, None, torch.float32)
    given = Arguments.of(on_device(left), on_device(right), None, torch.float32)
    bound = 1e-4 + 1e-5 * expected.abs()
    if choose(call_of(given).problem).kernel in ON_FLOAT8_UNITS:
        bound += FP8_UNITS_ERROR * reference.scaled_mm(magnitudes(left), magnitudes(right), None, torch.float32)
    assert ((multiply(given).cpu() - expected).abs() <= bound).all()


@gpu
@pytest.mark.parametrize("format", [*ROWS, *SQUARES])
def test_weights_in_memory_are_rounded_once(format):
    """The bits of the reference's values in bfloat16: hard inputs, rows of 200 columns, a block that ends early."""
    x = torch.cat([hard_input(name, (10, 200), dtype).float() for name, dtype in IN_ONE_DTYPE])
    weights = quantized(x, formats.get(format))
    activations = Operand(torch.ones(65, 200, dtype=torch.bfloat16))
    call = call_of(Arguments.of(on_device(activations), on_device(weights), None, torch.bfloat16))
    unused = torch.zeros((), dtype=torch.int32, device=DEVICE)
    found = dequantized(call.b, len(x), 200, torch.bfloat16, call.problem.target, unused)
    expected = reference.dequantize(weights.data, weights.scales, None, weights.format, 200, torch.bfloat16)
    assert_same_bits([found.contiguous()], [expected])


@pytest.mark.skipif(INTERPRETING, reason="it is what starts the interpreter")
def test_in_the_interpreter():
    in_interpreter.assert_passes(__file__)
