"""Codes on SM100, by instructions that multiply or convert two elements at a time.

On SM100 one instruction multiplies two pairs of float32 numbers, with the bits of two separate products. (For SM120
ptxas makes two instructions of it.)
"""

import triton
import triton.language as tl


def _encode_ptx(pairs: list[tuple[str, str]], factors: list[str], noise: tuple[str, ...] = ()) -> str:
    """PTX: four pairs of float32 values, each times a factor, plus 0 -> their eight E2M1 codes in $0.

    The sum has the sign of the contract: see `elements.encode_pair`. noise: for stochastic rounding, two random words.
    The instruction takes one word for four elements; its use of the bits is not documented.
    """
    text = "{ .reg .b64 p, f, zero; .reg .f32 y<8>; .reg .b8 c<4>; .reg .b16 low, high; mov.b64 zero, 0;"
    for i, ((first, second), factor) in enumerate(zip(pairs, factors, strict=True)):
        text += f" mov.b64 p, {{{first}, {second}}}; mov.b64 f, {{{factor}, {factor}}}; fma.rn.f32x2 p, p, f, zero;"
        text += f" mov.b64 {{y{2 * i}, y{2 * i + 1}}}, p;"
    if noise:
        text += f" cvt.rs.satfinite.e2m1x4.f32 low, {{y3, y2, y1, y0}}, {noise[0]};"
        text += f" cvt.rs.satfinite.e2m1x4.f32 high, {{y7, y6, y5, y4}}, {noise[1]}; mov.b32 $0, {{low, high}};"
    else:
        text += "".join(f" cvt.rn.satfinite.e2m1x2.f32 c{i}, y{2 * i + 1}, y{2 * i};" for i in range(4))
        text += " mov.b32 $0, {c0, c1, c2, c3};"
    return text + " }"


_NEIGHBOURS = [(f"${i}", f"${i + 1}") for i in (1, 3, 5, 7)]
# Inputs: four first elements, four second elements, four factors.
_PACKED_PAIRS = tl.constexpr(
    _encode_ptx([(f"${1 + i}", f"${5 + i}") for i in range(4)], [f"${9 + i}" for i in range(4)])
)
# Inputs: eight neighbours, their factor and, if stochastic, two words.
_PACKED_RUN = tl.constexpr(_encode_ptx(_NEIGHBOURS, ["$9"] * 4))
_PACKED_RUN_STOCHASTIC = tl.constexpr(_encode_ptx(_NEIGHBOURS, ["$9"] * 4, ("$10", "$11")))


@triton.jit
def encode_packed_pairs(first, second, factor):
    """`elements.encode_pair` of E2M1 for SM100."""
    return tl.inline_asm_elementwise(
        _PACKED_PAIRS, "=r,f,f,f,f,f,f,f,f,f,f,f,f", [first, second, factor], dtype=tl.uint8, is_pure=True, pack=4
    )


@triton.jit
def encode_packed_run(values, factor, noise):
    """`elements.encode_run` of E2M1 for SM100. noise: two words (uint32), or none."""
    if len(noise) == 0:
        return tl.inline_asm_elementwise(
            _PACKED_RUN, "=r,f,f,f,f,f,f,f,f,f", values + (factor,), dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            _PACKED_RUN_STOCHASTIC, "=r,f,f,f,f,f,f,f,f,f,r,r", values + (factor,) + noise,
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
