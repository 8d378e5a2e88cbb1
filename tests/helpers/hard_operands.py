"""Operands of instructions on which roundings, signs and ends of ranges show."""

import numpy as np

from tests.helpers import exact_floats
from tests.helpers.exact_floats import BF16, F16, F32, F64, Format

FLOATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}


def bits_of(kind: str) -> int:
    if kind == "pred":
        return 1
    if kind == "count":
        return 32
    return int(kind.removesuffix("x2").lstrip("busf")) * (2 if kind.endswith("x2") else 1)


def integers(bits: int, count: int, random: np.random.Generator) -> list[int]:
    """Unsigned numbers of all magnitudes, and the ends of the ranges."""
    ends = [0, 1, 2, 2 ** (bits - 1) - 1, 2 ** (bits - 1), 2 ** (bits - 1) + 1, 2**bits - 2, 2**bits - 1]
    drawn = random.integers(0, 2**64, count, dtype=np.uint64) >> random.integers(0, 64, count, dtype=np.uint64)
    return [ends[i] if i < len(ends) else int(x) % 2**bits
            for i, x in zip(random.integers(0, 20, count), drawn, strict=True)]  # fmt: skip


def floats(form: Format, count: int, random: np.random.Generator) -> list[int]:
    """A third each: numbers that are hard, any bits, and numbers not far from 1."""
    hard = [0, 1, 2, form.infinity - 1, form.infinity, form.infinity + 1, form.nan]
    # The smallest normal number and half of it; halves between numbers of narrow floats; and what lies beside them.
    for bits in [1 << form.mantissa, 1 << form.mantissa - 1, *map(form.encode, (
        1.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 9.0, 464.0, 61440.0, 2.0**-10, 3 * 2.0**-10, 2.0**-17,
    ))]:  # fmt: skip
        hard += [bits - 1, bits, bits + 1]
    signs = random.integers(0, 2, count, dtype=np.uint64)
    near = random.standard_normal(count) * 2.0 ** random.integers(-12, 12, count)
    some = np.stack([
        random.choice(np.array(hard, np.uint64), count) | signs << np.uint64(form.width - 1),
        random.integers(0, 2**64, count, dtype=np.uint64) >> np.uint64(64 - form.width),
        np.array([form.encode(float(x)) for x in near], np.uint64),
    ])  # fmt: skip
    return [int(x) for x in some[random.integers(0, 3, count), np.arange(count)]]


def factors_and_terms(form: Format, count: int, random: np.random.Generator) -> list[list[int]]:
    """Operands of a fused multiply-add; a third of the products are ties that a small term decides, a third cancel."""
    found = [floats(form, count, random) for _ in range(3)]
    for i in range(0, count, 3):
        # An odd product that has one bit more than the format.
        a = 2 * int(random.integers(2 ** (form.mantissa // 2), 2 ** (form.mantissa // 2 + 1))) + 1
        b = 2 ** (form.mantissa + 1) // a + 1 | 1
        tiny = float(random.choice([-1, 1])) * 2.0 ** -float(random.integers(1, 14 if form == F16 else 70))
        found[0][i], found[1][i], found[2][i] = (form.encode(float(x)) for x in (a, b, tiny))
    for i in range(1, count, 3):
        found[2][i] = exact_floats.multiply(form, found[0][i], found[1][i]) ^ 1 << form.width - 1
    return found


def operands(opcode: str, kinds: list[str], count: int) -> list[list[int]]:
    """Numbers for each operand: unsigned, in the types' widths."""
    random = np.random.default_rng(sum(map(ord, opcode)))
    if opcode.startswith("fma."):
        single = kinds[0].removesuffix("x2")
        low, high = (factors_and_terms(FLOATS[single], count, random) for _ in range(2))
        return joined(low, high, bits_of(single)) if kinds[0].endswith("x2") else low
    found = [operand(kind, count, random) for kind in kinds]
    if len(kinds) == 2 and kinds[0] == kinds[1] and kinds[0].removesuffix("x2") in FLOATS:
        # Two zeros of different signs, and numbers that differ in their signs.
        sign = 1 << bits_of(kinds[0]) - 1 | (1 << bits_of(kinds[0]) // 2 - 1) * kinds[0].endswith("x2")
        for i in range(0, count, 16):
            found[0][i], found[1][i] = 0, sign
            found[0][i + 1], found[1][i + 1] = sign, 0
            found[1][i + 2] = found[0][i + 2] ^ sign
    return found


def joined(low: list[list[int]], high: list[list[int]], bits: int) -> list[list[int]]:
    return [[a | b << bits for a, b in zip(*both, strict=True)] for both in zip(low, high, strict=True)]


def operand(kind: str, count: int, random: np.random.Generator) -> list[int]:
    if kind.removesuffix("x2") in FLOATS:
        form = FLOATS[kind.removesuffix("x2")]
        low, high = (floats(form, count, random) for _ in range(2))
        return joined([low], [high], form.width)[0] if kind.endswith("x2") else low
    if kind == "count":
        return [int(x) for x in random.choice([*range(70), 255, 256, 300, 2**31, 2**32 - 1], count)]
    if kind == "pred":
        return [int(x) for x in random.integers(0, 2, count)]
    return integers(bits_of(kind), count, random)
