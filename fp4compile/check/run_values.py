"""The values of `check-sm100 --run`: every quantise kernel against the op on the CPU, every product's kernel.

Quantised results are compared bit for bit. Products are compared with float64, within the error of a float32 sum. SM100
rounds stochastically by an instruction with its own random bits: its codes are compared with the two neighbours of a
value, and their mean with the value.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from fp4compile.check.cases import Case, device
from fp4compile.check.product_table import GATED
from fp4compile.check.quantiser_table import CONFIGURATIONS, SIZE, Configuration
from fp4compile.formats import epilogue as epilogues
from fp4compile.formats.epilogue import Epilogue
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.layouts import scale_layout
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.ops.functional import quantize
from fp4compile.templates.choose import candidates, choose
from fp4compile.templates.launch import target_of
from fp4compile.templates.multiply import multiply
from fp4compile.templates.problem import problem_of

BF16, F32 = torch.bfloat16, torch.float32
SEED = 20251122
# Whole tiles; then partly filled tiles in rows, columns and blocks.
QUANTIZE_SHAPES = ((256, 1024), (130, 1000))
PAIRS = (
    *((name, name) for name in ("nvfp4", "nvfp4_one_level", "nvfp4_te", "mxfp8", "mxfp4")),
    ("nvfp4_rowwise", "nvfp4_te"), ("nvfp4_te", "nvfp4_16x16"), ("mxfp8", "mxfp8_32x32"), ("mxfp8_e5m2", "mxfp8"),
    ("mxfp8", "mxfp4"), (None, "nvfp4"), (None, "mxfp8"),
)  # fmt: skip
# batches, M, N, K: whole tiles; ragged tiles; rows of results, or of codes, that are no multiples of 16 bytes; few
# tokens.
PRODUCT_SHAPES = (
    (1, 512, 1024, 2048), (1, 300, 520, 1040), (1, 130, 257, 544), (1, 200, 384, 528), (3, 70, 136, 256),
    (1, 1, 512, 1024), (1, 8, 512, 1024), (1, 16, 528, 1040), (1, 33, 520, 2048), (1, 64, 1024, 4096),
)  # fmt: skip
EPILOGUE_SHAPES = ((1, 300, 520, 1040), (1, 16, 512, 1024))


def cases() -> list[Case]:
    """Every case, in an order that finds simple faults first."""
    found = []
    for configuration in CONFIGURATIONS:
        for rows, columns in QUANTIZE_SHAPES:
            if configuration.shape[1] > SIZE:  # rows that do not fit a program's registers
                rows, columns = 8, configuration.shape[1] + columns
            name = f"quantise {configuration.label}, {configuration.format}, {rows}x{columns}"
            found.append(Case(name, partial(quantized, configuration, (rows, columns))))
    for a, b in PAIRS:
        for shape in PRODUCT_SHAPES:
            found.append(_product_case(a, b, shape, "none"))
        found += [_product_case(a, b, shape, kind) for shape in EPILOGUE_SHAPES for kind in ("bias", "gated")]
        found.append(_product_case(a, b, PRODUCT_SHAPES[0], "not finite"))
    return found


def _product_case(a: str | None, b: str, shape: tuple[int, int, int, int], kind: str) -> Case:
    name = f"product {a or 'bf16'} x {b}, {'x'.join(map(str, shape))}" + f", {kind}" * (kind != "none")
    return Case(name, partial(multiplied, a, b, shape, kind))


# ---------------------------------------------------------------- inputs


def finite(shape: tuple[int, ...], seed: int = SEED) -> torch.Tensor:
    """Values on which quantisers disagree: rows of very different sizes, outliers, runs of zeros, negative zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(-12 * torch.rand((*shape[:-1], 1), generator=generator))
    x = torch.where(torch.rand(shape, generator=generator) < 0.01, x * 1000, x)
    x = torch.where(torch.rand(shape, generator=generator) < 0.05, -0.0, x)
    x[..., shape[-1] // 2 : shape[-1] // 2 + 48] = 0
    return x


def layout_here(fmt: BlockFormat) -> str:
    """The layout of block scales that the products of this GPU read."""
    return scale_layout(fmt, native=target_of(torch.device(device())).block_scaled_matrix_units)


def not_finite(shape: tuple[int, ...]) -> torch.Tensor:
    """The values of `finite` with a NaN and both infinities."""
    x = finite(shape)
    for place, value in zip((0, 1, 2), (torch.nan, torch.inf, -torch.inf), strict=True):
        x[..., place % shape[-2], (7 + 40 * place) % shape[-1]] = value
    return x


# ---------------------------------------------------------------- quantising


def quantized(configuration: Configuration, shape: tuple[int, int]) -> dict[str, Any]:
    """What differs between the kernels on this GPU and the op on the CPU, of several inputs."""
    target = target_of(torch.device(device()))
    layout = configuration.layout_on(target.sm)
    compare, inputs = same_bits, {"finite": finite(shape), "not finite": not_finite(shape), "zeros": torch.zeros(shape)}
    if configuration.seeded and target.isa == 100:
        compare, inputs = rounded_alike, {"finite": finite(shape)}
    wrong = []
    for name, x in inputs.items():
        x = x.to(configuration.dtype)
        got, expected = configuration.call_kernels(x.to(device()), layout), configuration.call(x, layout)
        wrong += [f"{name}: {what}" for what in compare(got, expected)]
    return {"wrong": wrong}


Results: TypeAlias = torch.Tensor | Sequence[torch.Tensor]


def same_bits(got: Results, expected: Results) -> list[str]:
    """The differences between results of an op, as texts."""
    return [what for name, one, other in _paired(got, expected) for what in _bits(name, one, other)]


def rounded_alike(got: Results, expected: Results) -> list[str]:
    """The differences between stochastically rounded results, as texts.

    Codes with different random bits must be neighbours without bias; scales must be equal.
    """
    wrong = []
    for name, one, other in _paired(got, expected):
        if not name.endswith("codes"):
            wrong += _bits(name, one, other)
            continue
        steps = (_position(one.cpu()) - _position(other)).float()
        if steps.abs().max() > 1:
            wrong.append(f"{name}: a value is not rounded to a neighbour")
        # Both round up with a probability equal to the distance, so there is no mean shift within six standard errors.
        # The hardware rounds the probability down to a multiple of 1/256.
        if steps.mean().abs() > 6 * 0.7 / steps.numel() ** 0.5 + 2**-8:
            wrong.append(f"{name}: rounding is biased by {steps.mean():.4f} steps")
    return wrong


def _bits(name: str, one: torch.Tensor, other: torch.Tensor) -> list[str]:
    """The differences between two tensors, as texts. All NaNs of float32 and 16-bit values are equal."""
    one, other = (x.reshape(-1) for x in (one.cpu(), other))
    if (one.numel(), one.dtype) != (other.numel(), other.dtype):
        return [f"{name}: {one.numel()} of {one.dtype}, and not {other.numel()} of {other.dtype}"]
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    differ = one.view(bits) != other.view(bits)
    if one.element_size() > 1:
        differ &= ~(one.isnan() & other.isnan())
    return [f"{name}: {int(differ.sum())} of {differ.numel()} differ"] if differ.any() else []


def _position(packed: torch.Tensor) -> torch.Tensor:
    """The positions of E2M1 codes in the order of their values."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).to(torch.int32)
    return torch.where(codes > 7, 8 - codes, codes)


def _paired(got: Results, expected: Results) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, tensor, tensor) for the results of `quantize` along one dimension or both, or for dequantised values."""
    if isinstance(got, torch.Tensor) or isinstance(expected, torch.Tensor):
        return [("values", got, expected)]
    names = ("codes", "scales", "outer scale")
    if len(expected) > 3:
        names = tuple(f"{which} {name}" for which in ("rows'", "columns'") for name in names)  # type: ignore[assignment]
    return list(zip(names, got, expected, strict=True))


# ---------------------------------------------------------------- products


def multiplied(a: str | None, b: str, shape: tuple[int, int, int, int], kind: str) -> dict[str, Any]:
    """The kernels that compute a product on this GPU, and the errors in their values.

    kind: "none", "bias", "gated" (an epilogue), or "not finite".
    """
    batches, m, n, k = shape
    made = not_finite if kind == "not finite" else finite
    left = operand(a, made(_batched(batches, m, k)))
    right = operand(b, finite(_batched(batches, n, k), SEED + 1))
    generator = torch.Generator().manual_seed(SEED)
    bias = torch.randn(n, generator=generator).to(BF16) if kind == "bias" else None
    epilogue = Epilogue.parse(GATED, BF16, BF16) if kind == "gated" else None
    gate = (torch.randn(_batched(batches, m, n), generator=generator).to(BF16),) if epilogue else ()
    arguments = Arguments(here(left), here(right), _moved(bias), BF16, epilogue, [x.to(device()) for x in gate])
    problem = problem_of(arguments, target_of(torch.device(device())))
    names = dict.fromkeys((choose(problem).kernel, *candidates(problem)))
    wrong, served = [], []
    for name in names:
        choice = choose(problem, name)
        if epilogue is not None and not choice.takes_epilogue:
            continue
        served.append(name)
        got = multiply(arguments, choice)
        wrong += [f"{name}: {what}" for what in product_differences(got.cpu(), left, right, k, bias, epilogue, gate)]
    return {"kernels": ", ".join(served), "wrong": wrong}


def _batched(batches: int, *shape: int) -> tuple[int, ...]:
    return shape if batches == 1 else (batches, *shape)


def operand(name: str | None, x: torch.Tensor) -> Operand:
    """An operand of a format, or a plain one, with scales in the layout that the GPU's products read."""
    if name is None:
        return Operand(x.to(BF16))
    native = target_of(torch.device(device())).block_scaled_matrix_units
    found = quantize(x.to(BF16), name, layout="swizzled" if native else "linear")
    return Operand(found.data, found.scales, found.outer, found.format)


def _moved(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.to(device())


def here(x: Operand) -> Operand:
    """The operand on the device of the kernels."""
    return Operand(x.data.to(device()), _moved(x.scales), _moved(x.outer), x.format)


def schema(x: Operand) -> tuple:
    """The four arguments by which ops take an operand."""
    return x.data, x.scales, x.outer, x.format and x.format.name


def product_differences(
    got: torch.Tensor,
    a: Operand,
    b: Operand,
    k: int,
    bias: torch.Tensor | None,
    epilogue: Epilogue | None,
    gate: tuple[torch.Tensor, ...],
) -> list[str]:
    """Differences of a product from float64 beyond the rounding of its sums and of its result, as texts."""
    left, right = (_values(x, k) for x in (a, b))
    outer = _outer_product(a, b)
    expected, sums = left @ right.mT * outer, left.abs() @ right.abs().mT * outer
    error = sums * (8 + k**0.5) * 2.0**-23 + 2.0**-140
    if bias is not None:
        expected = expected + bias.double()
    error = error + expected.abs() * 2.0**-23
    eps = torch.finfo(BF16).eps
    if epilogue is not None:
        error = (error + expected.abs() * eps) * 1.1 * gate[0].double().abs()  # the slope of silu is below 1.1
        expected = epilogues.apply(expected.float(), epilogue, gate).double()
    bound = error + expected.abs() * eps
    inside = expected.isfinite() & (expected.abs() < torch.finfo(BF16).max) & sums.isfinite()
    got = got.double()
    wrong = []
    beyond = inside & ~((got - expected).abs() <= bound)
    if beyond.any():
        worst = ((got - expected).abs() / bound)[beyond].nan_to_num(nan=torch.inf).max()
        wrong.append(f"{int(beyond.sum())} of {beyond.numel()} values, by up to {worst:.3g} times the bound")
    if got[~expected.isfinite()].isfinite().any():
        wrong.append("a finite value where a NaN or an infinity went in")
    return wrong


def _values(x: Operand, k: int) -> torch.Tensor:
    """An operand without its outer scale, in float64."""
    if x.format is None:
        return x.data.double()
    return torch.ops.fp4compile.dequantize(x.data, x.scales, None, x.format.name, k, F32).double()


def _outer_product(a: Operand, b: Operand) -> torch.Tensor:
    """The product of both outer scales, computed in float32 as in the kernels: [], [M, 1], [1, N] or [M, N]."""
    left, right = (torch.ones(()) if x.outer is None else x.outer for x in (a, b))
    return (left * (right.mT if right.dim() else right)).double()
