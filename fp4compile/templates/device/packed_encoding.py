"""Codes on SM100, by instructions that multiply or convert two elements at a time.

On SM100 one instruction multiplies two pairs of float32 numbers, with the bits of two separate products. (For SM120
ptxas makes two instructions of it.)

If factors are powers of two and elements are bf16, the products are exact in bf16, so neither products nor elements
need be unpacked (`exact_in_bf16`).
"""

import triton
import triton.language as tl

from fp4compile import _compat

PACKED_CONVERSIONS = tl.constexpr(_compat.packed_conversions())


def _products_ptx(pairs: list[tuple[str, str]], factors: list[tuple[str, str]]) -> str:
    """PTX: pairs of float32 values times pairs of factors, plus 0 -> y0, y1 of the first pair, y2, y3 of the next, ...

    The sum has the sign of the contract: see `elements.encode_pair`.
    """
    return "{ .reg .b64 p, f, zero; .reg .f32 y<16>; mov.b64 zero, 0;" + "".join(
        f" mov.b64 p, {{{a}, {b}}}; mov.b64 f, {{{f}, {g}}}; fma.rn.f32x2 p, p, f, zero;"
        f" mov.b64 {{y{2 * i}, y{2 * i + 1}}}, p;"
        for i, ((a, b), (f, g)) in enumerate(zip(pairs, factors, strict=True))
    )


def _convert_ptx(into: str, numbers: list[int], noise: tuple[str, ...] = ()) -> str:
    """PTX: the float32 registers y with these eight numbers -> their E2M1 codes, in a 32-bit register.

    noise: for stochastic rounding, two random words. The instruction takes one word for four elements; its use of the
    bits is not documented.
    """
    a, b, c, d, e, f, g, h = (f"y{number}" for number in numbers)
    if noise:
        return (
            f" {{ .reg .b16 low, high; cvt.rs.satfinite.e2m1x4.f32 low, {{{d}, {c}, {b}, {a}}}, {noise[0]};"
            f" cvt.rs.satfinite.e2m1x4.f32 high, {{{h}, {g}, {f}, {e}}}, {noise[1]}; mov.b32 {into}, {{low, high}}; }}"
        )
    return (
        f" {{ .reg .b8 c<4>; cvt.rn.satfinite.e2m1x2.f32 c0, {b}, {a}; cvt.rn.satfinite.e2m1x2.f32 c1, {d}, {c};"
        f" cvt.rn.satfinite.e2m1x2.f32 c2, {f}, {e}; cvt.rn.satfinite.e2m1x2.f32 c3, {h}, {g};"
        f" mov.b32 {into}, {{c0, c1, c2, c3}}; }}"
    )


def _pairs_ptx() -> str:
    """PTX of `encode_packed_pairs`: four first elements, four second elements, four factors -> $0."""
    pairs = [(f"${1 + i}", f"${5 + i}") for i in range(4)]
    factors = [(f"${9 + i}", f"${9 + i}") for i in range(4)]
    return _products_ptx(pairs, factors) + _convert_ptx("$0", list(range(8))) + " }"


def _run_ptx(stochastic: bool) -> str:
    """PTX of `encode_packed_run`: eight neighbours, their factor and, if stochastic, two words -> $0."""
    pairs = [(f"${i}", f"${i + 1}") for i in (1, 3, 5, 7)]
    noise = ("$10", "$11") if stochastic else ()
    return _products_ptx(pairs, [("$9", "$9")] * 4) + _convert_ptx("$0", list(range(8)), noise) + " }"


def _count(element: str) -> int:
    """Codes in 32 bits."""
    return 8 if element == "e2m1" else 4


def _exact_ptx(element: str, into: str, words: list[str], factors: list[str]) -> str:
    """PTX: words of two bf16 elements times powers of two (float32), one a word -> their codes in a 32-bit register."""
    multiply = "fma.rn.bf16x2 y, {}, f, zero;" if element == "e2m1" else "mul.rn.bf16x2 y, {}, f;"
    steps = "".join(
        f" prmt.b32 f, {factor}, 0, 0x3232;"  # the upper half of a float32 is its bf16
        f" {multiply.format(word)} cvt.rn.satfinite.{element}x2.bf16x2 c{i}, y;"
        for i, (word, factor) in enumerate(zip(words, factors, strict=True))
    )
    code = "b8" if element == "e2m1" else "b16"
    codes = ", ".join(f"c{i}" for i in range(len(words)))
    return f" {{ .reg .b32 f, y, zero; .reg .{code} c<4>; mov.b32 zero, 0;{steps} mov.b32 {into}, {{{codes}}}; }}"


def _exact_words_ptx(element: str) -> str:
    """PTX of `encode_exact_words`: several words, and a factor for each -> $0."""
    n = _count(element) // 2
    return _exact_ptx(element, "$0", [f"${1 + i}" for i in range(n)], [f"${1 + n + i}" for i in range(n)])


def _exact_run_ptx(element: str) -> str:
    """PTX of `encode_exact_run`: neighbouring words of a row, and their factor -> $0."""
    n = _count(element) // 2
    return _exact_ptx(element, "$0", [f"${1 + i}" for i in range(n)], [f"${1 + n}"] * n)


def _exact_runs_ptx(element: str) -> str:
    """PTX of `encode_exact_runs`: words of neighbouring rows, the factors of their columns -> $0, $1."""
    n = _count(element)
    halves = range(n // 2)
    joined = "".join(
        f" prmt.b32 {name}{i}, ${2 + 2 * i}, ${3 + 2 * i}, {selector};"
        for i in halves
        for name, selector in (("a", "0x5410"), ("b", "0x7632"))
    )
    columns = (
        _exact_ptx(element, f"${column}", [f"{name}{i}" for i in halves], [f"${2 + n + column}"] * len(halves))
        for column, name in enumerate("ab")
    )
    return f"{{ .reg .b32 a<4>, b<4>;{joined}{''.join(columns)} }}"


def _of_each_element(ptx) -> tuple[tl.constexpr, ...]:
    return tuple(tl.constexpr(ptx(element)) for element in ("e2m1", "e4m3", "e5m2"))


_PACKED_PAIRS = tl.constexpr(_pairs_ptx())
_PACKED_RUN = tl.constexpr(_run_ptx(stochastic=False))
_PACKED_RUN_STOCHASTIC = tl.constexpr(_run_ptx(stochastic=True))
_EXACT_WORDS_E2M1, _EXACT_WORDS_E4M3, _EXACT_WORDS_E5M2 = _of_each_element(_exact_words_ptx)
_EXACT_RUN_E2M1, _EXACT_RUN_E4M3, _EXACT_RUN_E5M2 = _of_each_element(_exact_run_ptx)
_EXACT_RUNS_E2M1, _EXACT_RUNS_E4M3, _EXACT_RUNS_E5M2 = _of_each_element(_exact_runs_ptx)


@triton.constexpr_function
def of_element(element, e2m1, e4m3, e5m2):
    return {"e2m1": e2m1, "e4m3": e4m3, "e5m2": e5m2}[element]


@triton.constexpr_function
def exact_in_bf16(scale, dtype, isa):
    """Whether the products of elements and encode factors are exact in bf16, and the GPU converts bf16 numbers.

    Factors of E8M0 scales are powers of two from 2^-128 to 2^127, which bf16 has. Products below 2^-126 may be rounded:
    their codes are 0, with the sign of the element. A product that overflows saturates, as the code does.
    """
    return PACKED_CONVERSIONS.value and isa >= 100 and scale == "e8m0" and dtype == tl.bfloat16


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


@triton.jit
def encode_exact_words(words, factor, ELEMENT: tl.constexpr):
    """Encode words of two bf16 elements times factors, if `exact_in_bf16`, to units like `encode_pair`."""
    ptx: tl.constexpr = of_element(ELEMENT, _EXACT_WORDS_E2M1, _EXACT_WORDS_E4M3, _EXACT_WORDS_E5M2)
    if ELEMENT == "e2m1":
        return tl.inline_asm_elementwise(
            ptx, "=r,r,r,r,r,f,f,f,f", [words, factor], dtype=tl.uint8, is_pure=True, pack=4
        )
    else:
        return tl.inline_asm_elementwise(ptx, "=r,r,r,f,f", [words, factor], dtype=tl.uint16, is_pure=True, pack=2)


@triton.jit
def encode_exact_run(words, factor, ELEMENT: tl.constexpr):
    """`elements.encode_run` for a tuple of neighbouring words of a row, if `exact_in_bf16`."""
    ptx: tl.constexpr = of_element(ELEMENT, _EXACT_RUN_E2M1, _EXACT_RUN_E4M3, _EXACT_RUN_E5M2)
    return tl.inline_asm_elementwise(
        ptx, "=r,r,r,r,r,f" if ELEMENT == "e2m1" else "=r,r,r,f", words + (factor,), dtype=tl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def encode_exact_runs(words, first_factor, second_factor, ELEMENT: tl.constexpr):
    """`elements.encode_run` for both columns of a tuple of words of neighbouring rows, if `exact_in_bf16`."""
    ptx: tl.constexpr = of_element(ELEMENT, _EXACT_RUNS_E2M1, _EXACT_RUNS_E4M3, _EXACT_RUNS_E5M2)
    return tl.inline_asm_elementwise(
        ptx, "=&r,=&r,r,r,r,r,r,r,r,r,f,f" if ELEMENT == "e2m1" else "=&r,=&r,r,r,r,r,f,f",
        words + (first_factor, second_factor), dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
