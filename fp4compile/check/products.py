"""The matmuls that `check-sm100` compiles and runs: their table, and the checks of their results.

Every kernel serves at least one matmul of the table. A matmul of operands for which every sum is exact in float32 must
equal the reference in every bit. A matmul of hard operands is compared with float64, within the error of a float32 sum,
and so is a matmul whose epilogue has an approximate function. A quantised result must equal the reference's codes for
the result of the same kernel without that step; for groups, for the results of the dense kernel for each separate
group.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F

from fp4compile import _compat
from fp4compile.check.comparison import BF16, ENDS, F32, GROUP_ROWS, SEED, Runner, finite, same_bits
from fp4compile.check.quantisers import GROUPS, SIZE
from fp4compile.formats import epilogue as epilogues
from fp4compile.formats import formats
from fp4compile.formats.epilogue import AMAX, Epilogue
from fp4compile.formats.grouping import Groups
from fp4compile.formats.layouts import to_swizzled
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.formats.quantize_spec import QuantizeSpec
from fp4compile.formats.reference_grouped import (
    halves,
    matrix_of_group,
    rows_of_group,
    with_linear_scales,
    with_maxima,
)
from fp4compile.hardware import Target
from fp4compile.ops.functional import quantize
from fp4compile.ops.matmul import SCALED_MM
from fp4compile.ops.quantize import DEQUANTIZE, QUANTIZE
from fp4compile.templates.choose import Choice, candidates, choose, to_time
from fp4compile.templates.gemm import float8_sm90
from fp4compile.templates.launch import Launch, dry_run, target_of
from fp4compile.templates.multiply import multiply, multiply_together, results
from fp4compile.templates.problem import problem_of


@dataclass(frozen=True)
class MatmulCase:
    """A matmul of activations [batches, m, k] and weights [n, k], or of activations [m, k] and groups' weights; bf16.

    a: format of the activations; None keeps them in bf16. b: format of the weights. epilogue: "" for none, "bias",
    "gated": silu(matmul) * another matrix, or "pair": silu(matmul) * the matmul of n more rows of weights. weights:
    how many weights multiply the same activations, in one launch; with groups, 2 where gate and up are two weights.
    groups: the number of groups, 0 for none. Groups cut the m rows, and each has its own weights; or, with along_k,
    groups cut k, and [m, k] x [n, k] is multiplied for each part. result: the format to which the epilogue quantises
    the result; "amax" stores it in bf16 and finds its amax; "" stores it in bf16. kernel: the name of the kernel that
    must compute it; "" for the kernel that `choose` names.
    """

    a: str | None
    b: str
    m: int = 512
    n: int = SIZE
    k: int = SIZE
    epilogue: str = ""
    weights: int = 1
    batches: int = 1
    groups: int = 0
    along_k: bool = False
    result: str = ""
    kernel: str = ""

    @property
    def label(self) -> str:
        parts = ["x".join(str(size) for size in (self.batches, self.m, self.n, self.k)[self.batches == 1 :])]
        parts += [self.epilogue] * bool(self.epilogue) + [f"{self.weights} weights"] * (self.weights > 1)
        parts += [f"{self.groups} groups" + " along K" * self.along_k] * bool(self.groups)
        parts += [AMAX if self.result == AMAX else f"to {self.result}"] * bool(self.result)
        parts += [f"by {self.kernel}"] * bool(self.kernel)
        return ", ".join(parts)

    @property
    def formats(self) -> str:
        return f"{self.a or 'bf16'} x {self.b}"

    def launches(self, sm: int) -> tuple[str, list[Launch]]:
        """(tier, launches) of the chosen kernel or, where a library is chosen, of this package's best kernel.

        There are no launches where only a library computes the matmul, where no kernel takes the epilogue or quantises
        the result, and where only emulated kernels multiply the quantised groups.
        """
        choice, launches = self.served(Target(sm))
        return ("", []) if choice is None else (choice.tier, launches)

    def served(self, target: Target) -> tuple[Choice | None, list[Launch]]:
        """(the choice of the kernel that has the launches, the launches); (None, []) where there are no launches."""
        x = self.arguments()
        problem = problem_of(x, target)
        if self.result and not candidates(problem):
            return None, []
        names = (None, *candidates(problem))
        for name in [each for each in names if each == self.kernel] if self.kernel else names:
            choice = choose(problem, name)
            skipped = self.groups and self.a is not None and choice.tier != "native"
            if skipped or (x.spec.epilogue is not None and not choice.takes_epilogue):
                continue
            with dry_run(target) as launches:
                if self.weights > 1 and not self.groups:
                    multiply_together([x] * self.weights)
                else:
                    results(x, choice)
            if launches:
                return choice, launches
        return None, []

    def arguments(self) -> Arguments:
        """The arguments as meta tensors, with swizzled scales; see `reference_grouped` for the shapes of groups."""
        offs = _empty((self.groups,), torch.int32) if self.groups else None
        if self.along_k:
            a, b = (operand(name, _empty((rows, self.k)), offs=offs, along_k=True)
                    for name, rows in ((self.a, self.m), (self.b, self.n)))  # fmt: skip
            return Arguments.of(a, b, None, BF16, offs=offs, rows=self.k)
        batch = () if self.batches == 1 else (self.batches,)
        a = operand(self.a, _empty((*batch, self.m, self.k)), offs=offs)
        matrices = (self.weights * self.groups,) if self.groups else batch
        stacked = self.epilogue == "pair" and not (self.groups and self.weights > 1)
        b = operand(self.b, _empty((*matrices, self.n * (1 + stacked), self.k)), per_matrix=bool(self.groups))
        if stacked and not self.groups and b.outer is not None and not b.outer.dim():
            b = replace(b, outer=_empty((2,), torch.float32))
        bias = _empty((self.n,)) if self.epilogue == "bias" else None
        return self._with_epilogue(Arguments.of(a, b, bias, BF16, offs=offs, rows=self.m if self.groups else None))

    def _with_epilogue(self, x: Arguments) -> Arguments:
        last = [AMAX] if self.result == AMAX else [f"quantize {self.result}"]
        steps = {"gated": GATED, "pair": OF_A_PAIR}.get(self.epilogue, []) + last * bool(self.result)
        if not steps:
            return x
        gates = [_empty((*x.a.data.shape[:-1], self.n))] if self.epilogue == "gated" else []
        epilogue = Epilogue.parse(steps, BF16, BF16)
        outer = _empty((), torch.float32) if epilogue.quantize is not None and epilogue.quantize.static else None
        return x.but(epilogue=epilogue, auxiliaries=gates, result_outer=outer)


def _empty(shape: tuple[int, ...], dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def multiplies(launched: Launch) -> bool:
    """Whether a launch multiplies; a matmul's other launches dequantise operands or add partial sums."""
    return launched.kernel.__name__.startswith("gem")


OF_A_PAIR = ["neg product", "exp s0", "add s1 1.0", "div product s2", "mul s3 pair"]
GATED = ["neg product", "exp s0", "add s1 1.0", "div product s2", "mul s3 aux0"]


_experts = partial(MatmulCase, groups=GROUPS)
TWO_CTAS = "block_scaled_two_ctas_sm100"
POWERS_OF_TWO, POWERS_OF_TWO_SQUARE = "e4m3:1x128:float32:-:te_pow2", "e4m3:128x128:float32:-:te_pow2"
# The 2-CTA kernel: each element and block scale, global and row scales, and epilogues, also those that quantise the
# result or find its amax; then experts. No other kernel may replace it, and an older Triton cannot compile it; Triton
# 3.8 cannot compile it for experts.
_BY_TWO_CTAS = (
    MatmulCase("nvfp4", "nvfp4", epilogue="gated", kernel=TWO_CTAS),
    MatmulCase("mxfp8", "mxfp8", epilogue="bias", kernel=TWO_CTAS),
    MatmulCase("mxfp4", "mxfp4", n=SIZE - 8, kernel=TWO_CTAS),
    *(MatmulCase(a, b, kernel=TWO_CTAS) for a, b in (
        ("mxfp8_e5m2", "mxfp8"), ("mxfp8", "mxfp4"), ("nvfp4", "nvfp4"), ("nvfp4_one_level", "nvfp4_one_level"),
        ("nvfp4_rowwise", "nvfp4_te"),
    )),
    *(MatmulCase(name, name, epilogue=epilogue, result=name, kernel=TWO_CTAS) for epilogue in ("gated", "pair")
      for name in ("nvfp4", "nvfp4_te", "nvfp4_one_level", "mxfp8", "mxfp4")),
    MatmulCase("nvfp4_rowwise", "nvfp4_te", n=SIZE - 8, result="nvfp4", kernel=TWO_CTAS),
    MatmulCase("mxfp8", "mxfp4", n=SIZE - 16, epilogue="bias", result="mxfp8", kernel=TWO_CTAS),
    *(MatmulCase("nvfp4", "nvfp4", epilogue=kind, result=AMAX, kernel=TWO_CTAS) for kind in ("pair", "gated", "")),
)  # fmt: skip
_EXPERTS_BY_TWO_CTAS = (
    *(_experts(a, b, SIZE, 2048, 4096, kernel=TWO_CTAS) for a, b in (
        ("nvfp4", "nvfp4"), ("nvfp4_one_level", "nvfp4_one_level"), ("nvfp4_rowwise", "nvfp4_te"), ("mxfp8", "mxfp8"),
        ("mxfp8", "mxfp4"), ("mxfp4", "mxfp4"), ("mxfp8_e5m2", "mxfp8"),
    )),
    _experts("nvfp4", "nvfp4_rowwise", 128, 2040, 4096, kernel=TWO_CTAS),
)  # fmt: skip
PRODUCTS = (
    *(MatmulCase(name, name) for name in ("nvfp4", "nvfp4_one_level", "mxfp8", "mxfp4")),
    MatmulCase("nvfp4_rowwise", "nvfp4_te"), MatmulCase("mxfp8", "mxfp8_32x32"), MatmulCase("mxfp8_e5m2", "mxfp8"),
    MatmulCase("mxfp8", "mxfp4"), MatmulCase("nvfp4", "nvfp4", batches=4),
    MatmulCase("nvfp4", "nvfp4", epilogue="bias"),
    *(MatmulCase(name, name, epilogue="gated") for name in ("nvfp4", "mxfp8", "mxfp4")),
    # Rows of results that are multiples of 8 elements, of 2, of 1; rows of codes that are no multiples of 16 bytes.
    *(MatmulCase(name, name, n=SIZE - 8) for name in ("nvfp4", "mxfp8", "mxfp4")),
    MatmulCase("mxfp8", "mxfp8", n=SIZE - 2), MatmulCase("nvfp4", "nvfp4", n=SIZE - 1),
    MatmulCase("nvfp4", "nvfp4", k=SIZE - 16),
    # Results that are the next matmul's operands. Rows of codes that are multiples of 8 bytes.
    *(MatmulCase(name, name, epilogue="gated", result=name) for name in ("nvfp4", "nvfp4_one_level", "mxfp8", "mxfp4")),
    *(MatmulCase(name, name, epilogue="pair", result=name) for name in ("nvfp4", "nvfp4_one_level", "mxfp8", "mxfp4")),
    *(MatmulCase("nvfp4", "nvfp4", n=n, result="nvfp4_one_level") for n in (SIZE, SIZE - 16, SIZE - 8)),
    *(MatmulCase("mxfp8", "mxfp8", n=n, result="mxfp8") for n in (SIZE, SIZE - 16)),
    *(_BY_TWO_CTAS if _compat.two_cta_products() else ()),
    *(_EXPERTS_BY_TWO_CTAS if _compat.two_cta_products_of_groups() else ()),
    # Results that the next matmul's quantiser reads.
    *(MatmulCase("nvfp4", "nvfp4", epilogue=epilogue, result=AMAX) for epilogue in ("pair", "gated", "")),
    # Few tokens.
    *(MatmulCase("nvfp4", "nvfp4", m) for m in (1, 8, 16, 64)), MatmulCase("nvfp4", "nvfp4", 32, 4 * SIZE),
    *(MatmulCase(name, name, 16) for name in ("nvfp4_one_level", "mxfp8", "mxfp4")),
    MatmulCase("nvfp4_rowwise", "nvfp4_te", 16), MatmulCase("nvfp4", "nvfp4", 16, epilogue="gated"),
    *(MatmulCase(None, weights, m) for weights in ("nvfp4", "mxfp4") for m in (1, 16, 64)),
    MatmulCase(None, "mxfp4", 8),
    # FP8 weights that are streamed.
    MatmulCase(None, "float8_128x128", 1), MatmulCase(None, "float8_rowwise", 8), MatmulCase(None, "float8_1x128", 4),
    MatmulCase(None, "nvfp4", 1, 1024), MatmulCase(None, "nvfp4", 1, 4096), MatmulCase(None, "nvfp4", 1, k=28672),
    MatmulCase("nvfp4", "nvfp4", 1, 2560, weights=3), MatmulCase(None, "nvfp4", 1, 14336, 4096, weights=2),
    MatmulCase(None, "nvfp4", 1, weights=2), MatmulCase(None, "nvfp4", 2, 14336, 28672, weights=2),
    MatmulCase(None, "nvfp4", 4, 14336, 4096, weights=2), MatmulCase(None, "nvfp4", 8, weights=3),
    # Experts: forward and dgrad, with few tokens too, then wgrad; rows of results that are multiples of 8 and of 1.
    _experts("nvfp4_rowwise", "nvfp4_te", SIZE, 2048, 4096), _experts("mxfp8", "mxfp4", SIZE, 2048, 4096),
    *(_experts(name, name, SIZE, 2048, 4096) for name in ("mxfp8", "mxfp4", "nvfp4")),
    _experts("nvfp4", "nvfp4", 128, 2040, 4096),
    _experts("nvfp4_rowwise", "nvfp4_rowwise", 2048, 4095, SIZE, along_k=True),
    *(_experts(name, name, 2048, 4096, SIZE, along_k=True) for name in ("nvfp4_te", "mxfp8", "mxfp4")),
    _experts("nvfp4", "nvfp4", 256, 512, SIZE, along_k=True),
    # Experts whose results are the next experts' operands: of gate and up as one weight, two weights and two matmuls,
    # and of one matmul.
    *(_experts(name, name, SIZE, 2048, 4096, epilogue="pair", result=name)
      for name in ("nvfp4", "nvfp4_one_level", "mxfp8", "mxfp4")),
    _experts("nvfp4", "nvfp4", SIZE, 2048, 4096, epilogue="pair", weights=2, result="nvfp4"),
    *(_experts(name, name, SIZE, 2048, 4096, epilogue="gated", result=name) for name in ("nvfp4_one_level", "mxfp8")),
    _experts("nvfp4_rowwise", "nvfp4_te", 128, 2040, 4096, result="nvfp4_one_level"),
    _experts("mxfp8", "mxfp4", 128, 2032, 4096, result="mxfp8"),
    # Experts whose results the next experts' quantiser reads.
    _experts("nvfp4", "nvfp4", SIZE, 2048, 4096, epilogue="pair", weights=2, result=AMAX),
    *(_experts("nvfp4", "nvfp4", SIZE, 2048, 4096, epilogue=each, result=AMAX) for each in ("pair", "gated", "")),
    # FP8 on Hopper: groups of many rows and of few, along K; dense with a bias, which the library does not add.
    *(_experts("float8_1x128", "float8_128x128", m, 2048, 4096, kernel=float8_sm90.NAME) for m in (SIZE, 512)),
    _experts("float8_1x128", "float8_1x128", 2048, 4096, SIZE, along_k=True, kernel=float8_sm90.NAME),
    MatmulCase("float8_1x128", "float8_128x128", epilogue="bias", kernel=float8_sm90.NAME),
    _experts("float8_rowwise", "float8_rowwise", 2048, 4096, SIZE, along_k=True, kernel=float8_sm90.NAME),
    _experts("float8_tensor", "float8_tensor", SIZE, 2048, 4096, kernel=float8_sm90.NAME),
    # FP8 blocks whose scales are powers of two, as MX: dense, groups of rows, along K.
    MatmulCase(POWERS_OF_TWO, POWERS_OF_TWO_SQUARE, kernel="block_scaled_sm100_of_float8_blocks"),
    _experts(POWERS_OF_TWO, POWERS_OF_TWO_SQUARE, SIZE, 2048, 4096),
    _experts(POWERS_OF_TWO, POWERS_OF_TWO, 2048, 4096, SIZE, along_k=True),
    # Experts, dequantised.
    _experts(None, "nvfp4", SIZE, 2048, 4096), _experts(None, "mxfp4", 16, 5760, 2880),
    _experts(None, "mxfp8", 2048, 4096, SIZE, along_k=True),
)  # fmt: skip


# ---------------------------------------------------------------- values

Made = Callable[[tuple[int, ...]], torch.Tensor]


def by_every_kernel(product: MatmulCase, machine: Runner, made: Made | None = None) -> dict[str, Any]:
    """The kernels that may compute a matmul, and the errors of their results.

    made: makes the activations; None takes operands of which every sum is exact.
    """
    x = exact_arguments(product) if made is None else _hard_arguments(product, machine, made)
    problem = problem_of(_moved(x, machine), machine.target)
    if product.result and not candidates(problem):
        return {"kernels": "", "wrong": []}
    choices = [choose(problem)]
    if product.groups and not product.result:
        choices += to_time(problem)
    if product.weights == 1:
        choices += [choose(problem, name) for name in candidates(problem)]
        choices = [one for one in choices if x.spec.epilogue is None or one.takes_epilogue]
    wrong = [f"{one.kernel}: {what}" for one in dict.fromkeys(choices)
             for what in differences(product, x, one, machine, made is None)]  # fmt: skip
    return {"kernels": ", ".join(dict.fromkeys(one.kernel for one in choices)), "wrong": wrong}


def differences(product: MatmulCase, x: Arguments, choice: Choice, machine: Runner, exact: bool = True) -> list[str]:
    """The errors of a matmul's result, as texts. exact: whether every sum is exact.

    choice: the kernel; not of several weights.
    """
    there = _moved(x, machine)
    if product.weights > 1 and not product.groups:
        members = [replace(x, b=exact_operand(x.b, i)) for i in range(product.weights)]
        with machine.running():
            found = multiply_together([_moved(one, machine) for one in members])
        return [f"weight {i}: {what}" for i, (got, one) in enumerate(zip(found, members, strict=True))
                for what in _from_reference(got, one, exact)]  # fmt: skip
    with machine.running():
        if product.result == AMAX:
            return amax_differences(there, choice)
        if product.result:
            return quantised_differences(there, choice)
        got = multiply(there, choice)
    return _from_reference(got, x, exact)


def _from_reference(got: torch.Tensor, x: Arguments, exact: bool) -> list[str]:
    args, options = x.call
    if x.offs is not None:
        expected = SCALED_MM(*args, **options) + 0.0  # as below, for a group of one row
        if got.dim() == 2:  # rows of no group are arbitrary
            got, expected = got[: x.offs[-1]], expected[: x.offs[-1]]
        return same_bits(got, expected)
    if exact and x.spec.epilogue is None:
        expected = SCALED_MM(*args, **options)
        if x.a.k == 1:
            expected = expected + 0.0  # a kernel's sums begin with +0, the reference's of one product are the product
        return same_bits(got, expected)
    return product_differences(got, x)


def product_differences(got: torch.Tensor, x: Arguments) -> list[str]:
    """Differences of a matmul from float64 beyond the rounding of its sums and of its result, as texts.

    An epilogue is silu(matmul) times another matrix.
    """
    k = min(x.a.k, x.b.k)  # without the zeros that fill blocks
    left, right = (_values(one, k) for one in (x.a, x.b))
    outer = _outer_product(x.a, x.b)
    expected, sums = left @ right.mT * outer, left.abs() @ right.abs().mT * outer
    error = sums * (8 + k**0.5) * 2.0**-23 + 2.0**-140
    if x.bias is not None:
        expected = expected + x.bias.double()
    error = error + expected.abs() * 2.0**-23
    eps = torch.finfo(BF16).eps
    if x.spec.epilogue is not None:
        error = (error + expected.abs() * eps) * 1.1 * x.auxiliaries[0].double().abs()  # the slope of silu is below 1.1
        expected = epilogues.apply(expected.float(), x.spec.epilogue, x.auxiliaries).double()
    bound = error + expected.abs() * eps
    inside = expected.isfinite() & (expected.abs() < torch.finfo(BF16).max) & sums.isfinite()
    got = got.cpu().double()
    wrong = []
    beyond = inside & ~((got - expected).abs() <= bound)
    if beyond.any():
        worst = ((got - expected).abs() / bound)[beyond].nan_to_num(nan=torch.inf).max()
        wrong.append(f"{int(beyond.sum())} of {beyond.numel()} values, by up to {worst:.3g} times the bound")
    if got[~expected.isfinite()].isfinite().any():
        wrong.append("a finite value where a NaN or an infinity went in")
    return wrong


def _values(x: Operand, k: int) -> torch.Tensor:
    """An operand without its global or row scale, in float64."""
    if x.format is None:
        return x.data.double()
    return DEQUANTIZE(x.data, x.scales, None, x.format.name, k, F32).double()


def _outer_product(a: Operand, b: Operand) -> torch.Tensor:
    """The product of both global or row scales, computed in float32 as in the kernels: [], [M, 1], [1, N] or [M, N]."""
    left, right = (torch.ones(()) if x.outer is None else x.outer for x in (a, b))
    return (left * (right.mT if right.dim() else right)).double()


# ---------------------------------------------------------------- operands


def reduced(product: MatmulCase) -> MatmulCase:
    """A smaller matmul, with partly filled tiles in each direction in which the table's has whole ones.

    The remainders by 16, which decide how rows are loaded and stored, are kept.
    """
    n = 288 if product.result == AMAX else 272 - (-product.n % 16)
    if product.result and product.kernel == TWO_CTAS:  # multiples of a part, of 16 bytes of codes, and of a block
        n = 320 if product.result == AMAX else 288 - (-product.n % 32)
    if product.epilogue == "pair":  # whole tiles of both matrices
        n = 384
    k = 1536 - (-product.k % 256)
    if product.groups:
        rows = GROUP_ROWS * (2 if product.kernel == TWO_CTAS else 1)  # its tiles are as high
        m, k = (144, rows) if product.along_k else (rows, 512)
        return replace(product, groups=len(ENDS), m=m, n=n, k=k)
    return replace(product, m=product.m if product.m <= 64 else 144, n=n, k=k)


def exact_arguments(product: MatmulCase) -> Arguments:
    """Arguments of a matmul for which every sum is exact in float32."""
    x = product.arguments()
    ends = torch.tensor(ENDS, dtype=torch.int32)
    if not product.along_k:
        ends *= max(product.m // GROUP_ROWS, 1)
    generator = torch.Generator().manual_seed(SEED)

    def whole(shape: Sequence[int]) -> torch.Tensor:
        return torch.randint(-3, 4, tuple(shape), generator=generator).to(BF16)

    a, b = exact_operand(x.a, 100), exact_operand(x.b, 0)
    if product.along_k:
        a, b = _without_padding(a, product.k), _without_padding(b, product.k)
    return x.but(
        a=a, b=b, bias=None if x.bias is None else whole(x.bias.shape),
        auxiliaries=[whole(each.shape) for each in x.auxiliaries],
        # Block scales of sums, and of products of two sums, are then seldom the largest or the least number.
        result_outer=None if x.result_outer is None else torch.tensor(64.0),
        offs=None if x.offs is None else ends,
    )  # fmt: skip


# The bits of 1/2, 1 and 2.
_SCALES = {"e4m3": (0x30, 0x38, 0x40), "e8m0": (126, 127, 128), "float32": (0x3F000000, 0x3F800000, 0x40000000)}
_MAGNITUDES = {"e2m1": (0, 1, 2, 3, 4, 5), "e4m3": (0x00, 0x30, 0x38, 0x40, 0x44), "e5m2": (0x00, 0x38, 0x3C, 0x40)}


def exact_operand(x: Operand, seed: int) -> Operand:
    """An operand like one on the meta device: small elements; scales of 1/2, 1 and 2."""
    generator = torch.Generator().manual_seed(SEED + seed)

    def chosen(values: Sequence[float], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), tuple(shape), generator=generator)]

    if x.format is None:
        # A kernel that scales by the largest magnitude of a thread's elements must not have the same one everywhere.
        sizes = torch.where(torch.arange(x.data.shape[-1]) % 256 < 128, 1.0, 1 / 16).to(BF16)
        return replace(x, data=chosen(range(-3, 4), x.data.shape, BF16) * sizes)
    fmt = x.format

    def codes(sign: int) -> torch.Tensor:
        signs = chosen((0, sign), x.data.shape, torch.uint8)
        return chosen(_MAGNITUDES[fmt.element], x.data.shape, torch.uint8) | signs

    data = (codes(8) | codes(8) << 4 if fmt.packed else codes(128)).view(fmt.data_dtype)
    scales = None
    if x.scales is not None and fmt.scale is not None:
        bits = chosen(_SCALES[fmt.scale], x.scales.shape, formats.integer_dtype(fmt.scale_dtype))
        scales = bits.view(fmt.scale_dtype)
    outer = None if x.outer is None else chosen((0.5, 1.0, 2.0), x.outer.shape, torch.float32)
    return Operand(data, scales, outer, fmt)


def _without_padding(x: Operand, rows: int) -> Operand:
    """An operand of groups along K with zeros behind each group, as quantisers write them."""
    if x.format is None:
        return x
    per_byte = 2 if x.format.packed else 1
    _, column = Groups.of(torch.tensor(ENDS), rows).of_padded()
    kept = (column < rows).unflatten(0, (-1, per_byte))
    masks = sum(kept[:, i].to(torch.uint8) * (15 << 4 * i if per_byte == 2 else 255) for i in range(per_byte))
    return replace(x, data=(x.data.view(torch.uint8) & masks).view(x.data.dtype))


def _hard_arguments(product: MatmulCase, machine: Runner, made: Made) -> Arguments:
    """Arguments of a matmul of quantised hard operands, with scales in the layout that the GPU's kernels read."""
    x, native = exact_arguments(product), machine.target.block_scaled_matrix_units
    a = made((*x.a.data.shape[:-1], product.k))
    b = finite((*x.b.data.shape[:-1], product.k), SEED + 1)
    return x.but(a=operand(product.a, a, native), b=operand(product.b, b, native))


def operand(name: str | None, x: torch.Tensor, native: bool = True, along_k: bool = False, **options: Any) -> Operand:
    """An operand of a format, or a plain one, of values [..., rows, K].

    native: whether matrix units read its scales. along_k: whether groups cut K. options: see `quantize`.
    """
    x = x.to(BF16)
    if name is None:
        return Operand(x)
    x, dim = (x.mT, -2) if along_k else (x, -1)
    found = quantize(x, name, dim=dim, layout="swizzled" if native else "linear", **options)
    return Operand(found.data, found.scales, found.outer, found.format)


def _moved(x: Arguments, machine: Runner) -> Arguments:
    """The arguments on the device of the kernels."""

    def there(part: Any) -> Any:
        if isinstance(part, Operand):
            return replace(part, data=there(part.data), scales=there(part.scales), outer=there(part.outer))
        return part if part is None else part.to(machine.device)

    return replace(x, a=there(x.a), b=there(x.b), bias=there(x.bias), auxiliaries=[*map(there, x.auxiliaries)],
                   result_outer=there(x.result_outer), offs=there(x.offs))  # fmt: skip


# ---------------------------------------------------------------- results that are quantised


def _multiplied_plainly(x: Arguments) -> torch.Tensor:
    problem = problem_of(x, target_of(x.a.data.device)).with_epilogue(x.spec.epilogue)
    return multiply(x, choose(problem, "block_scaled_sm100"))


def _halves(x: Operand) -> list[Operand]:
    """The two operands whose rows are stacked."""
    if x.outer is None or x.outer.dim() != 1:
        return halves(x)
    return [replace(half, outer=x.outer[i]) for i, half in enumerate(halves(x))]


def _stored_plainly(x: Arguments) -> torch.Tensor:
    """The result of a kernel with only the epilogue's steps; zeros in rows of no group.

    The second matmul of a pair is then another tensor that the first one's epilogue reads. Each group is a separate
    matmul.
    """
    if x.offs is not None:
        stored = [_stored_plainly(one) for one in _of_each_group(x, Groups.of(x.offs.cpu(), x.a.data.shape[0]))]
        return F.pad(torch.cat(stored), (0, 0, 0, x.a.data.shape[0] - sum(map(len, stored))))
    epilogue = cast(Epilogue, x.spec.epilogue)
    plain = x.but(epilogue=replace(epilogue, quantize=None, amax=False), result_outer=None)
    if epilogue.pair:
        first, second = _halves(x.b)
        other = _multiplied_plainly(plain.but(b=second, epilogue=None))
        steps = [step.renamed({"pair": "aux0"}) for step in epilogue.steps]
        epilogue = Epilogue(tuple(steps), epilogue.product_dtype, epilogue.dtype)
        plain = plain.but(b=first, epilogue=epilogue, auxiliaries=[other])
    return _multiplied_plainly(plain)


def _of_each_group(x: Arguments, groups: Groups) -> Iterator[Arguments]:
    """A separate matmul for each group that has rows."""
    a = with_linear_scales(x.a, groups)
    for g, (start, end) in enumerate(zip(groups.starts.tolist(), groups.ends.tolist(), strict=True)):
        if start < end:
            own = rows_of_group(a, g, start, end)
            scales = None if own.scales is None else to_swizzled(own.scales)
            yield x.but(a=replace(own, scales=scales), b=_weights_of_group(x, g), offs=None, rows=None,
                          auxiliaries=[each[start:end] for each in x.auxiliaries])  # fmt: skip


def _weights_of_group(x: Arguments, g: int) -> Operand:
    """The matrix of a group; for two weights, both matrices stacked."""
    if not x.two_weights:
        return matrix_of_group(x.b, g)
    one, other = (matrix_of_group(half, g) for half in halves(x.b))
    outer = None if one.outer is None else torch.stack if not one.outer.dim() else torch.cat
    parts = zip((one.data, one.scales), (other.data, other.scales), strict=True)
    data, scales = (torch.cat([each.view(torch.uint8) for each in both]).view(both[0].dtype) for both in parts)
    return Operand(data, scales, outer if outer is None else outer((one.outer, other.outer)), one.format)


def quantised_differences(x: Arguments, choice: Choice | None = None) -> list[str]:
    """Differences between a kernel's quantised result, and the reference's codes for its result without that step.

    Both kernels compute the same steps, so codes and scales must be equal in every bit. Codes of rows of no group are
    arbitrary. For `x` on a GPU or in a simulator. choice: the kernel; None takes the one that `choose` names.
    """
    spec = cast(QuantizeSpec, x.result_spec)
    data, scales = results(x, choice)
    value = _stored_plainly(x)
    outer, offs = (None if each is None else each.cpu() for each in (x.result_outer, x.offs))
    expected = QUANTIZE(value.cpu(), spec.format.name, [-1], offs=offs, layout="swizzled", outer=outer)
    end = None if offs is None else int(offs[-1])
    return same_bits([data[:end], scales, torch.empty(0)], [expected[0][:end], expected[1], torch.empty(0)])


def amax_differences(x: Arguments, choice: Choice | None = None) -> list[str]:
    """Differences between a kernel that finds the amax of its result, and one that does not.

    The results must be equal in every bit. The largest of the partial maxima must be the amax of the result; with
    groups, each maximum must be the amax of its group. choice: the kernel; None takes the one that `choose` names.
    """
    got, maxima = results(x, choice)
    value = _stored_plainly(x).cpu()
    if x.offs is None:
        found, expected = maxima.amax().cpu(), value.float().abs().amax()
    else:
        found, expected = maxima.cpu(), with_maxima(value, x.offs.cpu())[1]
    wrong = [] if torch.equal(found, expected) else [f"amax: {found}, expected {expected}"]
    return same_bits(got, value) + wrong
