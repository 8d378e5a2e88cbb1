"""SiLU of 16-bit numbers in inline PTX: the bits of Inductor's operations, in fewer instructions.

Inductor writes SiLU as x / (1 + exp(-x)), with the `exp` of libdevice. The PTX here has these operations with three
changes:

- One fused operation multiplies by the power of two at the end of `exp` and adds 1. The product was exact, or
  negligible against 1. For the same reason the exponential function may flush subnormal results.
- A division (`div.full`) multiplies by an approximate reciprocal. It scales both numbers by 1/4 if the divisor is
  above 2^126, because the reciprocal would be flushed. The PTX here always scales both: the reciprocal of d / 4
  is 4 times the reciprocal of d. A quarter of the dividend must be exact, which holds for any 16-bit number, but not
  for subnormal float32 numbers.
- On SM100 one instruction computes two elements where such an instruction exists. Without it a gate before a quantiser
  takes 344 instructions for 16 elements in place of 270; the bytes leave time for 328.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from fp4compile.templates.device.dequantized_tile import INTERPRETING

# 1 + exp(-x) in the register d, as libdevice computes it and adds 1; then x / 4 times the reciprocal of d / 4. The
# exponent of exp(-x) is in the last bits of a float32 integer: floor(252 * clamp(1/2 - x / (252 ln 2))) above 2^23.
_SILU = tl.constexpr(
    "{ .reg .b32 t, e, d; fma.rn.ftz.sat.f32 t, $1, 0fBBBB989D, 0f3F000000;"
    " fma.rm.ftz.f32 t, t, 0f437C0000, 0f4B400001; sub.f32 e, 0f4B40007F, t;"
    " fma.rn.ftz.f32 e, $1, 0fBFB8AA3B, e; fma.rn.ftz.f32 e, $1, 0fB2A57060, e; ex2.approx.ftz.f32 e, e;"
    " shl.b32 t, t, 23; fma.rn.f32 d, e, t, 0f3F800000; mul.rn.f32 d, d, 0f3E800000; rcp.approx.ftz.f32 d, d;"
    " mul.rn.f32 t, $1, 0f3E800000; mul.rn.f32 $0, t, d; }"
)
_SILU_OF_PAIRS = tl.constexpr(
    "{ .reg .b32 x0, x1, x2, x3; .reg .b64 x, t, e, d, log2_e, rest, steps, first, bias, one, quarter;"
    " mov.b64 log2_e, 0xBFB8AA3BBFB8AA3B; mov.b64 rest, 0xB2A57060B2A57060; mov.b64 steps, 0x437C0000437C0000;"
    " mov.b64 first, 0x4B4000014B400001; mov.b64 bias, 0x4B40007F4B40007F; mov.b64 one, 0x3F8000003F800000;"
    " mov.b64 quarter, 0x3E8000003E800000; mov.b64 x, {$2, $3};"
    " fma.rn.ftz.sat.f32 x0, $2, 0fBBBB989D, 0f3F000000; fma.rn.ftz.sat.f32 x1, $3, 0fBBBB989D, 0f3F000000;"
    " mov.b64 t, {x0, x1}; fma.rm.ftz.f32x2 t, t, steps, first; sub.rn.f32x2 e, bias, t;"
    " fma.rn.ftz.f32x2 e, x, log2_e, e; fma.rn.ftz.f32x2 e, x, rest, e;"
    " mov.b64 {x0, x1}, e; ex2.approx.ftz.f32 x0, x0; ex2.approx.ftz.f32 x1, x1; mov.b64 e, {x0, x1};"
    " mov.b64 {x2, x3}, t; shl.b32 x2, x2, 23; shl.b32 x3, x3, 23; mov.b64 t, {x2, x3}; fma.rn.f32x2 d, e, t, one;"
    " mul.rn.f32x2 d, d, quarter;"
    " mov.b64 {x0, x1}, d; rcp.approx.ftz.f32 x0, x0; rcp.approx.ftz.f32 x1, x1; mov.b64 d, {x0, x1};"
    " mul.rn.f32x2 x, x, quarter; mul.rn.f32x2 x, x, d; mov.b64 {$0, $1}, x; }"
)


@triton.jit
def exp(x):
    if INTERPRETING:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def silu(x, NARROW: tl.constexpr, ISA: tl.constexpr):
    """x / (1 + exp(-x)) of float32 values. NARROW: 16 bits hold each x."""
    if ISA >= 100 and NARROW:
        return tl.inline_asm_elementwise(_SILU_OF_PAIRS, "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2)
    elif ISA >= 90 and NARROW:
        return tl.inline_asm_elementwise(_SILU, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return x / (exp(-x) + 1.0)
