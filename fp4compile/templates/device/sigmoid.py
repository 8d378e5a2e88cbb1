"""The sigmoid function and SiLU in inline PTX: the bits of Inductor's operations, in fewer instructions.

Inductor writes SiLU as x / (1 + exp(-x)), with the `exp` of libdevice, and the sigmoid function as `tl.sigmoid`:
1 / (1 + exp(-x)), with an exponential function of one multiplication. The PTX here has these operations with three
changes:

- One fused operation multiplies by the power of two at the end of `exp` and adds 1. The product was exact, or
  negligible against 1. For the same reason the exponential function may flush subnormal results.
- A division (`div.full`) multiplies by an approximate reciprocal. It scales both numbers by 1/4 if the divisor is
  above 2^126, because the reciprocal would be flushed. The PTX here always scales both: the reciprocal of d / 4
  is 4 times the reciprocal of d. A quarter of the dividend must be exact, which holds for 1 and for any 16-bit number,
  but not for subnormal float32 numbers.
- On SM100 one instruction computes two elements where such an instruction exists.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from fp4compile.templates.device.dequantized_tile import INTERPRETING

_QUARTER, _ONE = "0f3E800000", "0f3F800000"
_LOG2_E, _LOG2_E_REST = "0fBFB8AA3B", "0fB2A57060"  # of the argument -x: both negative
# The exponent of exp(x) is in the last bits of a float32 integer: floor(252 * clamp(x / (252 ln 2) + 1/2)) above 2^23.
_RATE, _HALF, _STEPS, _FIRST, _BIAS = "0fBBBB989D", "0f3F000000", "0f437C0000", "0f4B400001", "0f4B40007F"


def _exp_plus_one(x: str) -> str:
    """PTX: 1 + exp(-x) in the register d, as libdevice computes it and adds 1."""
    return (
        f"fma.rn.ftz.sat.f32 t, {x}, {_RATE}, {_HALF}; fma.rm.ftz.f32 t, t, {_STEPS}, {_FIRST}; sub.f32 e, {_BIAS}, t;"
        f" fma.rn.ftz.f32 e, {x}, {_LOG2_E}, e; fma.rn.ftz.f32 e, {x}, {_LOG2_E_REST}, e; ex2.approx.ftz.f32 e, e;"
        f" shl.b32 t, t, 23; fma.rn.f32 d, e, t, {_ONE};"
    )


def _both(number: str) -> str:
    """A float32 constant twice in 64 bits."""
    return f"0x{number[2:] * 2}"


def _constants(**constants: str) -> str:
    """PTX: registers that hold a constant for two elements each."""
    moves = (f"mov.b64 {name}, {_both(number)};" for name, number in constants.items())
    return f".reg .b64 {', '.join(constants)}; {' '.join(moves)}"


_REGISTERS = ".reg .b32 t, e, d;"
_PAIR_REGISTERS = ".reg .b32 x0, x1, x2, x3; .reg .b64 x, t, e, d;"
# 1 + exp(-x) in the register d, of the two elements $2 and $3.
_PAIR_EXP_PLUS_ONE = (
    _constants(log2_e=_LOG2_E, rest=_LOG2_E_REST, steps=_STEPS, first=_FIRST, bias=_BIAS, one=_ONE)
    + f" mov.b64 x, {{$2, $3}}; fma.rn.ftz.sat.f32 x0, $2, {_RATE}, {_HALF};"
    f" fma.rn.ftz.sat.f32 x1, $3, {_RATE}, {_HALF}; mov.b64 t, {{x0, x1}}; fma.rm.ftz.f32x2 t, t, steps, first;"
    " sub.rn.f32x2 e, bias, t; fma.rn.ftz.f32x2 e, x, log2_e, e; fma.rn.ftz.f32x2 e, x, rest, e;"
    " mov.b64 {x0, x1}, e; ex2.approx.ftz.f32 x0, x0; ex2.approx.ftz.f32 x1, x1; mov.b64 e, {x0, x1};"
    " mov.b64 {x2, x3}, t; shl.b32 x2, x2, 23; shl.b32 x3, x3, 23; mov.b64 t, {x2, x3}; fma.rn.f32x2 d, e, t, one;"
)  # fmt: skip
_PAIR_RECIPROCALS = "mov.b64 {x0, x1}, d; rcp.approx.ftz.f32 x0, x0; rcp.approx.ftz.f32 x1, x1; mov.b64 d, {x0, x1};"

_SILU = tl.constexpr(
    f"{{ {_REGISTERS} {_exp_plus_one('$1')} mul.rn.f32 d, d, {_QUARTER}; rcp.approx.ftz.f32 d, d;"
    f" mul.rn.f32 t, $1, {_QUARTER}; mul.rn.f32 $0, t, d; }}"
)
_SILU_OF_ANY = tl.constexpr(
    f"{{ {_REGISTERS} .reg .pred large; {_exp_plus_one('$1')} mov.b32 t, $1; setp.gt.f32 large, d, 0f7E800000;"
    f" @large mul.rn.f32 t, t, {_QUARTER}; @large mul.rn.f32 d, d, {_QUARTER}; rcp.approx.ftz.f32 d, d;"
    " mul.rn.f32 $0, t, d; }"
)
_SILU_OF_PAIRS = tl.constexpr(
    f"{{ {_PAIR_REGISTERS} {_PAIR_EXP_PLUS_ONE} {_constants(quarter=_QUARTER)} mul.rn.f32x2 d, d, quarter;"
    f" {_PAIR_RECIPROCALS} mul.rn.f32x2 x, x, quarter; mul.rn.f32x2 x, x, d; mov.b64 {{$0, $1}}, x; }}"
)
_SIGMOID = tl.constexpr(
    f"{{ {_REGISTERS} mul.rn.f32 e, $1, {_LOG2_E}; ex2.approx.ftz.f32 e, e;"
    f" fma.rn.f32 d, e, {_QUARTER}, {_QUARTER}; rcp.approx.ftz.f32 d, d; mul.rn.f32 $0, d, {_QUARTER}; }}"
)
_SIGMOID_OF_PAIRS = tl.constexpr(
    f"{{ {_PAIR_REGISTERS} {_constants(log2_e=_LOG2_E, quarter=_QUARTER)} mov.b64 x, {{$2, $3}};"
    " mul.rn.f32x2 e, x, log2_e; mov.b64 {x0, x1}, e; ex2.approx.ftz.f32 x0, x0; ex2.approx.ftz.f32 x1, x1;"
    f" mov.b64 e, {{x0, x1}}; fma.rn.f32x2 d, e, quarter, quarter; {_PAIR_RECIPROCALS}"
    " mul.rn.f32x2 d, d, quarter; mov.b64 {$0, $1}, d; }"
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
    elif ISA >= 90:
        return tl.inline_asm_elementwise(_SILU_OF_ANY, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return x / (exp(-x) + 1.0)


@triton.jit
def sigmoid(x, ISA: tl.constexpr):
    """`tl.sigmoid` of float32 values."""
    if ISA >= 100:
        return tl.inline_asm_elementwise(_SIGMOID_OF_PAIRS, "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2)
    elif ISA >= 90:
        return tl.inline_asm_elementwise(_SIGMOID, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.sigmoid(x)
