"""SiLU and the sigmoid function in inline PTX: the bits of the operations that Inductor writes.

On the CPU the texts are played in NumPy (`helpers.inline_ptx`), beside what Triton and ptxas make of the operations.
"""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fp4compile.templates.device import sigmoid
from tests.helpers.inline_ptx import play

EVERY = np.arange(2**16, dtype=np.uint32) << 16  # the bits of every bfloat16 number, as float32
# float32 x whose exp(-x) lies next to 2^126, where a reciprocal would be flushed, and next to what overflows.
LARGE = np.concatenate([np.linspace(-104, -86, 2**14), -np.log(2) * np.linspace(125.9, 128.1, 2**12)])
ANY = np.random.default_rng(0).integers(0, 2**32, 2**17, dtype=np.uint32).view(np.float32)
SUBNORMAL = np.random.default_rng(1).integers(0, 2**24, 2**13, dtype=np.uint32).view(np.float32)
NARROW = EVERY.view(np.float32)
ALL = np.concatenate([NARROW, LARGE.astype(np.float32), ANY, SUBNORMAL, -SUBNORMAL])

# `libdevice.exp(-x)` and the sum, as Triton compiles them: 1 + exp(-x) in the register d.
EXP_PLUS_ONE = (
    "neg.f32 n, $1; fma.rn.ftz.f32 t, n, 0f3BBB989D, 0f3F000000; cvt.ftz.sat.f32.f32 t, t;"
    " fma.rm.ftz.f32 t, t, 0f437C0000, 0f4B400001; add.f32 e, t, 0fCB40007F; neg.f32 e, e;"
    " fma.rn.ftz.f32 e, n, 0f3FB8AA3B, e; fma.rn.ftz.f32 e, n, 0f32A57060, e; shl.b32 t, t, 23;"
    " ex2.approx.ftz.f32 e, e; mul.ftz.f32 e, e, t; add.f32 d, e, 0f3F800000;"
)
# `div.full` of a divisor that is 1 or more, as ptxas assembles it: of n and d.
QUOTIENT = (
    "setp.gt.f32 large, d, 0f7E800000; @large mul.rn.f32 n, n, 0f3E800000; @large mul.rn.f32 d, d, 0f3E800000;"
    " rcp.approx.ftz.f32 d, d; mul.rn.f32 $0, n, d;"
)
REGISTERS = ".reg .b32 n, t, e, d; .reg .pred large; "
SILU = f"{REGISTERS}{EXP_PLUS_ONE} mov.b32 n, $1; {QUOTIENT}"
SIGMOID = REGISTERS + (
    "neg.f32 n, $1; mul.rn.f32 e, n, 0f3FB8AA3B; ex2.approx.f32 e, e; add.f32 d, e, 0f3F800000;"
    f" mov.b32 n, 0f3F800000; {QUOTIENT}"
)

HALF_UNIT = 2.0**-24  # of the last place of float32, beside 1

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def equal(found, expected):
    found, expected = (x.view(np.float32) for x in (found, expected))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_array_equal(np.where(np.isnan(found), 0, found).view(np.uint32),
                                  np.where(np.isnan(expected), 0, expected).view(np.uint32))  # fmt: skip


def of_pairs(ptx, x):
    return np.stack(play(ptx.value, 2, [x[::2], x[1::2]]), 1).ravel()


def test_silu_of_16_bits():
    half = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    for x in (NARROW, half):
        (expected,) = play(SILU, 1, [x])
        (found,) = play(sigmoid._SILU.value, 1, [x])
        equal(found, expected)
        equal(of_pairs(sigmoid._SILU_OF_PAIRS, x), expected)
        exact = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))
        finite = np.isfinite(x) & (np.abs(exact) > 1e-36)
        # Rounded are the exponent, the sum, the reciprocal and the product.
        np.testing.assert_allclose(found.view(np.float32)[finite], exact[finite], rtol=4 * HALF_UNIT)


def test_silu_of_any_number():
    (expected,) = play(SILU, 1, [ALL])
    (found,) = play(sigmoid._SILU_OF_ANY.value, 1, [ALL])
    equal(found, expected)
    # Why there are two: a subnormal float32 number may have no quarter.
    (narrow,) = play(sigmoid._SILU.value, 1, [SUBNORMAL])
    (expected,) = play(SILU, 1, [SUBNORMAL])
    assert (narrow != expected).any()


def test_sigmoid():
    (expected,) = play(SIGMOID, 1, [ALL])
    (found,) = play(sigmoid._SIGMOID.value, 1, [ALL])
    equal(found, expected)
    equal(of_pairs(sigmoid._SIGMOID_OF_PAIRS, ALL), expected)
    exact = 1 / (1 + np.exp(-ALL.astype(np.float64)))
    ordinary = ~np.isnan(ALL) & (exact > 1e-37)
    # Rounded are the exponent, in proportion to x, the power, the sum and the reciprocal; and log2(e) is off by 0.22.
    x = np.clip(ALL[ordinary].astype(np.float64), -104, 104)
    error = np.abs(found.view(np.float32)[ordinary] / exact[ordinary] - 1)
    assert (error <= (3 + 1.22 * np.abs(x) / (1 + np.exp(x))) * HALF_UNIT).all()


@triton.jit
def _functions(x_ptr, out_ptr, COUNT: tl.constexpr, NARROW: tl.constexpr, ISA: tl.constexpr):
    """For each x: SiLU and sigmoid by the texts, then by the operations."""
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    x = tl.load(x_ptr + at)
    out_ptr += 4 * at
    tl.store(out_ptr, sigmoid.silu(x, NARROW, ISA))
    tl.store(out_ptr + 1, sigmoid.sigmoid(x, ISA))
    tl.store(out_ptr + 2, x / (sigmoid.exp(-x) + 1.0))
    tl.store(out_ptr + 3, tl.sigmoid(x))


@pytest.mark.gpu
@pytest.mark.parametrize("narrow", [True, False])
def test_on_a_gpu(narrow):
    """The texts and the operations on the same device, and reciprocals of every mantissa."""
    major, minor = torch.cuda.get_device_capability()
    mantissas = np.arange(2**23, dtype=np.uint32) + np.uint32(127 << 23)
    x = NARROW if narrow else np.concatenate([ALL, -np.log(mantissas.view(np.float32) - 1 + 2.0**-23)])
    x = torch.from_numpy(x[: len(x) // 2048 * 2048].astype(np.float32)).cuda()
    found = torch.empty(len(x), 4, device="cuda")
    _functions[(len(x) // 2048,)](x, found, 2048, narrow, 10 * major + minor)
    got, expected = found[:, :2].view(torch.int32), found[:, 2:].view(torch.int32)
    both_nan = found[:, :2].isnan() & found[:, 2:].isnan()
    assert (both_nan | (got == expected)).all()
