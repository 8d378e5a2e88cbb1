"""Whole quantise kernels in the forms that they have on SM100, in Triton's interpreter, against the reference.

The interpreter has no inline PTX: `helpers.inline_ptx` plays it. Nothing is said here about the instructions
themselves, but which operand comes where: elements, factors, random words, counters.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fp4compile.formats import formats, reference
from tests.helpers import norms
from tests.helpers.hard_inputs import hard_input
from tests.helpers.inline_ptx import play
from tests.helpers.kernels import INTERPRETING, assert_same_bits
from tests.helpers.quantisers import quantize, quantize_both

if INTERPRETING:
    import triton
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from fp4compile.templates.device import block_scales
    from fp4compile.templates.quantize import launches

    _portable_round = block_scales.e4m3_round

    @triton.jit
    def _e4m3_round(value, ISA):
        return _portable_round(value, 0)  # the interpreter's cast to E4M3 is wrong where rounding carries


interpreted = pytest.mark.skipif(not INTERPRETING, reason="run in the interpreter")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def create_inline_asm(self, ptx, constraints, values, types, is_pure, pack):
    """`InterpreterBuilder.create_inline_asm`: `pack` neighbours at once, as many in a register as it holds."""
    count = values[0].data.size
    if "bar.red" in ptx:  # `register_tile.after_barrier`
        outputs = [values[1].data.reshape(-1)]
    else:
        inputs = []
        for value in values:
            flat = np.ascontiguousarray(value.data).reshape(-1)
            assert flat.itemsize == 4
            flat = np.pad(flat, (0, -count % pack))
            inputs += [flat[i::pack].view(np.uint32) for i in range(pack)]
        dtypes = [_numpy(kind) for kind in types]
        sizes = [max(1, pack * dtype.itemsize // 4) for dtype in dtypes]
        registers = iter(play(ptx, sum(sizes), inputs))
        outputs = []
        for dtype, size in zip(dtypes, sizes, strict=True):
            words = np.stack([next(registers) for _ in range(size)], 1)
            outputs.append(np.ascontiguousarray(words).view(dtype).reshape(-1)[:count])
    shape = values[0].data.shape
    handles = [TensorHandle(out.reshape(shape), kind.scalar) for out, kind in zip(outputs, types, strict=True)]
    return SimpleNamespace(get_result=handles.__getitem__)


def _numpy(kind):
    scalar = kind.scalar
    if scalar.is_floating():
        return np.dtype(np.float32)
    return np.dtype(f"{'int' if scalar.is_int_signed() else 'uint'}{scalar.primitive_bitwidth}")


@pytest.fixture(autouse=True)
def on_sm100(monkeypatch):
    """The kernels as on SM100, but for programmatic dependent launch. Rounding is stochastic as `play` has it."""
    if not INTERPRETING:
        yield
        return
    target = SimpleNamespace(isa=100, dependent_launch=False)
    monkeypatch.setattr(launches, "target_of", lambda device: target)
    monkeypatch.setattr(block_scales, "e4m3_round", _e4m3_round)
    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", create_inline_asm)
    # Several outputs come as Triton's own tuple, which kernels add to tuples.
    monkeypatch.setattr(tl.core.tuple, "__radd__", lambda self, other: other + tuple(self), raising=False)
    with reference.eight_random_bits():
        yield


def inputs(fmt, rows, cols):
    names = ("randn", "ties_fp4", "signed_zeros", "one_neg_inf", "one_nan", "scaled_rows", "zeros")
    for name in names if fmt.outer == "tensor" else [names[:2], names[2:]]:
        several = [name] if isinstance(name, str) else list(name)
        each = -(-rows // len(several))
        block = fmt.block_cols if fmt.block else 16
        yield torch.cat([hard_input(one, (each, cols), torch.bfloat16, block) for one in several])[:rows]


@interpreted
@pytest.mark.parametrize(
    "format", ["nvfp4", "nvfp4_one_level", "nvfp4_te", "nvfp4_rowwise", "nvfp4_16x16", "mxfp8", "mxfp4", "mxfp8_32x32"]
)
def test_rows_columns_and_both(format):
    fmt = formats.get(format)
    for x in inputs(fmt, 32, 96):
        expected = reference.quantize(x, fmt), reference.quantize(x.mT, fmt)
        assert_same_bits(quantize(x, fmt), expected[0])
        assert_same_bits(quantize(x.mT, fmt), expected[1])
        for got, right in zip(quantize_both(x, fmt), expected, strict=True):
            assert_same_bits(got, right)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_te", "mxfp4"])
def test_other_inputs(format, dtype):
    fmt = formats.get(format)
    x = hard_input("ties_fp4", (8, 40), dtype, fmt.block_cols)
    for got, view in zip(quantize_both(x, fmt), (x, x.mT), strict=True):
        assert_same_bits(got, reference.quantize(view, fmt))
    assert_same_bits(quantize(x, fmt), reference.quantize(x, fmt))


@interpreted
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_te"])
@pytest.mark.parametrize("outer", [0.37, 2.0**-59, 2.0**-61, 1e-42, 2.0**61, 3.4e38, torch.inf])
def test_outer_scales_in_and_out_of_the_quick_range(format, outer):
    """An infinite block amax, amaxes far above the scale and far below."""
    fmt, outer = formats.get(format), torch.tensor(outer)
    x = hard_input("scaled_rows", (16, 64))
    x[7, 3], x[8, 17], x[9, 40] = torch.inf, 3e38, 1e-38
    x[10] *= outer.clamp(1e-30, 1e30)
    assert_same_bits(quantize(x, fmt, outer), reference.quantize(x, fmt, outer))
    assert_same_bits(quantize(x.mT, fmt, outer), reference.quantize(x.mT, fmt, outer))


@interpreted
@pytest.mark.parametrize(("format", "shape"), [
    *(("nvfp4_te", shape) for shape in ((24, 40), (128, 128), (2, 17, 33))),
    *(("nvfp4_rowwise", shape) for shape in ((16, 64), (2, 17, 33))),  # a program a row
    ("mxfp4", (128, 128)), ("mxfp4", (2, 17, 33)),
], ids=str)  # fmt: skip
def test_stochastic_rounding(format, shape):
    """Every element has the random bits of its place: ragged tensors, whole tiles, several matrices."""
    fmt, seed, transform = formats.get(format), torch.tensor(0x123456789ABCDEF0), format != "mxfp4"
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = reference.quantize(x, fmt, seed=seed)
    assert_same_bits(quantize(x, fmt, seed=seed), expected)
    rows, columns = quantize_both(x, fmt, seed=seed, hadamard=transform)
    assert_same_bits(rows, expected)
    assert_same_bits(columns, reference.quantize(x.mT, fmt, seed=seed, stream=1, transform=transform))
    alone = quantize(x, fmt, dim=-2, seed=seed)
    assert_same_bits(alone, reference.quantize(x.mT, fmt, seed=seed, stream=1))


@interpreted
@pytest.mark.parametrize("format", ["nvfp4_one_level", "nvfp4", "nvfp4_rowwise"])
def test_norms(format):
    """Rows that fill a tile and others, a sum that is stored, and a layer norm, whose bias is added."""
    names = ["randn", "signed_zeros", "zeros", *["one_nan"] * (format != "nvfp4")]  # else all of the tensor is NaN
    for cols in (512, 72):
        x = torch.cat([hard_input(name, (1, cols), torch.bfloat16) for name in names])
        norms.check(norms.SUM, x, format, stored=["s0 bfloat16"])
        norms.check(norms.LAYER, x, format)
