"""SiLU in inline PTX: the bits of the operations that Inductor writes.

On the CPU the text is played in NumPy (`helpers.inline_ptx`), beside what Triton and ptxas make of the operations.
"""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fp4compile.templates.device import silu
from tests.helpers.inline_ptx import play

EVERY = np.arange(2**16, dtype=np.uint32) << 16  # the bits of every bfloat16 number, as float32
SUBNORMAL = np.random.default_rng(1).integers(0, 2**24, 2**13, dtype=np.uint32).view(np.float32)
NARROW = EVERY.view(np.float32)

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
        (found,) = play(silu._SILU.value, 1, [x])
        equal(found, expected)
        equal(of_pairs(silu._SILU_OF_PAIRS, x), expected)
        exact = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))
        finite = np.isfinite(x) & (np.abs(exact) > 1e-36)
        # Rounded are the exponent, the sum, the reciprocal and the product.
        np.testing.assert_allclose(found.view(np.float32)[finite], exact[finite], rtol=4 * HALF_UNIT)


def test_a_subnormal_number_may_have_no_quarter():
    """So numbers of more than 16 bits take the operations themselves."""
    (narrow,) = play(silu._SILU.value, 1, [SUBNORMAL])
    (expected,) = play(SILU, 1, [SUBNORMAL])
    assert (narrow != expected).any()


@triton.jit
def _functions(x_ptr, out_ptr, COUNT: tl.constexpr, ISA: tl.constexpr):
    """For each x: SiLU by the text, then by the operations."""
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + 2 * at, silu.silu(x, True, ISA))
    tl.store(out_ptr + 2 * at + 1, x / (silu.exp(-x) + 1.0))


@pytest.mark.gpu
def test_on_a_gpu():
    """The text and the operations on the same device."""
    major, minor = torch.cuda.get_device_capability()
    x = torch.from_numpy(NARROW).cuda()
    found = torch.empty(len(x), 2, device="cuda")
    _functions[(len(x) // 2048,)](x, found, 2048, 10 * major + minor)
    got, expected = found.unbind(1)
    assert ((got.isnan() & expected.isnan()) | (got.view(torch.int32) == expected.view(torch.int32))).all()
