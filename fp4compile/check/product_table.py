"""The table of products that `check-sm100` compiles; every kernel serves at least one of them."""

from dataclasses import dataclass, replace
from functools import partial

import torch

from fp4compile import _compat
from fp4compile.check.quantiser_table import BF16, GROUPS, SIZE
from fp4compile.formats import formats
from fp4compile.formats.epilogue import AMAX, Epilogue
from fp4compile.formats.groups import padded_rows
from fp4compile.formats.layouts import ceil_div, swizzled_numel
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.hardware import Target
from fp4compile.templates.choose import Choice, candidates, choose
from fp4compile.templates.launch import Launch, dry_run
from fp4compile.templates.multiply import results, scaled_mm_group
from fp4compile.templates.problem import problem_of


@dataclass(frozen=True)
class Product:
    """A product of activations [batches, m, k] and weights [n, k], or of activations [m, k] and groups' weights; bf16.

    a: format of the activations; None keeps them in bf16. b: format of the weights. epilogue: "" for none, "bias",
    "gated": silu(product) * another matrix, or "pair": silu(product) * the product of n more rows of weights. weights:
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

        There are no launches where only a library computes the product, where no kernel takes the epilogue or quantises
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
            if skipped or (x.epilogue is not None and not choice.takes_epilogue):
                continue
            with dry_run(target) as launches:
                if self.weights > 1 and not self.groups:
                    scaled_mm_group(x.a, [(x.b, x.bias)] * self.weights, BF16)
                else:
                    results(x, choice)
            if launches:
                return choice, launches
        return None, []

    def arguments(self) -> Arguments:
        """The arguments as meta tensors, with swizzled scales; see `reference_grouped` for the shapes of groups."""
        if self.groups:
            return self._of_groups()
        batch = () if self.batches == 1 else (self.batches,)
        a = self._operand(self.a, (*batch, self.m), self.k, (*batch, self.m, 1))
        rows = 2 * self.n if self.epilogue == "pair" else self.n
        b = self._operand(self.b, (*batch, rows), self.k, (*batch, rows, 1))
        if self.epilogue == "pair" and b.outer is not None and not b.outer.dim():
            b = replace(b, outer=_empty((2,), torch.float32))
        bias = _empty((self.n,)) if self.epilogue == "bias" else None
        return self._with_epilogue(Arguments(a, b, bias, BF16))

    def _of_groups(self) -> Arguments:
        each = (self.groups,)
        offs = _empty(each, torch.int32)
        if self.along_k:
            padded = padded_rows(self.k, self.groups)
            a = self._operand(self.a, (self.m,), padded, (*each, self.m, 1))
            b = self._operand(self.b, (self.n,), padded, (*each, self.n, 1))
            return Arguments(a, b, None, BF16, offs=offs, rows=self.k)
        a = self._operand(self.a, (self.m,), self.k, (self.m, 1), padded_rows(self.m, self.groups))
        rows = 2 * self.n if self.epilogue == "pair" and self.weights == 1 else self.n
        matrices = self.weights * self.groups
        b = self._operand(self.b, (matrices, rows), self.k, (matrices, rows, 1))
        if b.outer is not None and b.outer.dim() == 1:
            b = replace(b, outer=_empty((matrices,), torch.float32))
        return self._with_epilogue(Arguments(a, b, None, BF16, offs=offs, rows=self.m))

    def _with_epilogue(self, x: Arguments) -> Arguments:
        last = [AMAX] if self.result == AMAX else [f"quantize {self.result}"]
        steps = {"gated": GATED, "pair": OF_A_PAIR}.get(self.epilogue, []) + last * bool(self.result)
        if not steps:
            return x
        gates = [_empty((*x.a.data.shape[:-1], self.n))] if self.epilogue == "gated" else []
        epilogue = Epilogue.parse(steps, BF16, BF16)
        outer = _empty((), torch.float32) if epilogue.quantize is not None and epilogue.quantize.static else None
        return replace(x, epilogue=epilogue, auxiliaries=gates, result_outer=outer)

    def _operand(
        self, name: str | None, shape: tuple[int, ...], k: int, of_rows: tuple[int, ...], scale_rows: int | None = None
    ) -> Operand:
        """An operand on the meta device.

        shape: [*batch, rows], without the length of a row. k: elements of a quantised row. of_rows: the shape of
        rowwise outer scales. scale_rows: rows of the block scales; None takes the operand's rows.
        """
        if name is None:
            return Operand(_empty((*shape, self.k)))
        fmt, (*batch, rows) = formats.get(name), shape
        blocks = ceil_div(k, fmt.block_cols)
        data = _empty((*shape, blocks * fmt.block_cols // (2 if fmt.packed else 1)), fmt.data_dtype)
        swizzled = (*batch, swizzled_numel(rows if scale_rows is None else scale_rows, blocks))
        scales = None if fmt.scale is None else _empty(swizzled, fmt.scale_dtype)
        outer = {"tensor": (self.groups,) * bool(self.groups), "row": of_rows}.get(fmt.outer or "")
        return Operand(data, scales, None if outer is None else _empty(outer, torch.float32), fmt)


def _empty(shape: tuple[int, ...], dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def multiplies(launched: Launch) -> bool:
    """Whether a launch multiplies; a product's other launches dequantise operands or add partial sums."""
    return launched.kernel.__name__.startswith("gem")


OF_A_PAIR = ["neg product", "exp s0", "add s1 1.0", "div product s2", "mul s3 pair"]
GATED = ["neg product", "exp s0", "add s1 1.0", "div product s2", "mul s3 aux0"]


_experts = partial(Product, groups=GROUPS)
TWO_CTAS = "block_scaled_two_ctas_sm100"
# Pairs of CTAs: each element and scale, each granularity of outer scales, and epilogues; results that are quantised, or
# whose amax is found; then experts. No other kernel may take their place, and an older Triton cannot compile them.
_BY_TWO_CTAS = (
    Product("nvfp4", "nvfp4", epilogue="gated", kernel=TWO_CTAS),
    Product("mxfp8", "mxfp8", epilogue="bias", kernel=TWO_CTAS),
    Product("mxfp4", "mxfp4", n=SIZE - 8, kernel=TWO_CTAS),
    *(Product(a, b, kernel=TWO_CTAS) for a, b in (
        ("mxfp8_e5m2", "mxfp8"), ("mxfp8", "mxfp4"), ("nvfp4", "nvfp4"), ("nvfp4_one_level", "nvfp4_one_level"),
        ("nvfp4_rowwise", "nvfp4_te"),
    )),
    *(Product(name, name, epilogue=epilogue, result=name, kernel=TWO_CTAS) for epilogue in ("gated", "pair")
      for name in ("nvfp4", "nvfp4_te", "nvfp4_one_level", "mxfp8", "mxfp4")),
    Product("nvfp4_rowwise", "nvfp4_te", n=SIZE - 8, result="nvfp4", kernel=TWO_CTAS),
    Product("mxfp8", "mxfp4", n=SIZE - 16, epilogue="bias", result="mxfp8", kernel=TWO_CTAS),
    *(Product("nvfp4", "nvfp4", epilogue=epilogue, result=AMAX, kernel=TWO_CTAS) for epilogue in ("pair", "gated", "")),
    *(_experts(a, b, SIZE, 2048, 4096, kernel=TWO_CTAS) for a, b in (
        ("nvfp4", "nvfp4"), ("nvfp4_one_level", "nvfp4_one_level"), ("nvfp4_rowwise", "nvfp4_te"), ("mxfp8", "mxfp8"),
        ("mxfp8", "mxfp4"), ("mxfp4", "mxfp4"), ("mxfp8_e5m2", "mxfp8"),
    )),
    _experts("nvfp4", "nvfp4_rowwise", 128, 2040, 4096, kernel=TWO_CTAS),
)  # fmt: skip
PRODUCTS = (
    *(Product(name, name) for name in ("nvfp4", "nvfp4_one_level", "mxfp8", "mxfp4")),
    Product("nvfp4_rowwise", "nvfp4_te"), Product("mxfp8", "mxfp8_32x32"), Product("mxfp8_e5m2", "mxfp8"),
    Product("mxfp8", "mxfp4"), Product("nvfp4", "nvfp4", batches=4), Product("nvfp4", "nvfp4", epilogue="bias"),
    *(Product(name, name, epilogue="gated") for name in ("nvfp4", "mxfp8", "mxfp4")),
    # Rows of results that are multiples of 8 elements, of 2, of 1; rows of codes that are no multiples of 16 bytes.
    Product("nvfp4", "nvfp4", n=SIZE - 8), Product("mxfp8", "mxfp8", n=SIZE - 8), Product("mxfp4", "mxfp4", n=SIZE - 8),
    Product("mxfp8", "mxfp8", n=SIZE - 2), Product("nvfp4", "nvfp4", n=SIZE - 1),
    Product("nvfp4", "nvfp4", k=SIZE - 16),
    # Results that are the next product's operands. Rows of codes that are multiples of 8 bytes.
    *(Product(name, name, epilogue="gated", result=name) for name in ("nvfp4", "nvfp4_one_level", "mxfp8", "mxfp4")),
    *(Product(name, name, epilogue="pair", result=name) for name in ("nvfp4", "nvfp4_one_level", "mxfp8", "mxfp4")),
    *(Product("nvfp4", "nvfp4", n=n, result="nvfp4_one_level") for n in (SIZE, SIZE - 16, SIZE - 8)),
    *(Product("mxfp8", "mxfp8", n=n, result="mxfp8") for n in (SIZE, SIZE - 16)),
    *(_BY_TWO_CTAS if _compat.two_cta_products() else ()),
    # Results that the next product's quantiser reads.
    *(Product("nvfp4", "nvfp4", epilogue=epilogue, result=AMAX) for epilogue in ("pair", "gated", "")),
    # Few tokens.
    *(Product("nvfp4", "nvfp4", m) for m in (1, 8, 16, 64)), Product("nvfp4", "nvfp4", 32, 4 * SIZE),
    *(Product(name, name, 16) for name in ("nvfp4_one_level", "mxfp8", "mxfp4")),
    Product("nvfp4_rowwise", "nvfp4_te", 16), Product("nvfp4", "nvfp4", 16, epilogue="gated"),
    *(Product(None, "nvfp4", m) for m in (1, 16, 64)),
    Product(None, "nvfp4", 1, 1024), Product(None, "nvfp4", 1, 4096), Product(None, "nvfp4", 1, k=28672),
    Product("nvfp4", "nvfp4", 1, 2560, weights=3), Product(None, "nvfp4", 1, 14336, 4096, weights=2),
    Product(None, "nvfp4", 1, weights=2), Product(None, "nvfp4", 2, 14336, 28672, weights=2),
    Product(None, "nvfp4", 4, 14336, 4096, weights=2), Product(None, "nvfp4", 8, weights=3),
    # Experts: forward and dgrad, with few tokens too, then wgrad; rows of results that are multiples of 8 and of 1.
    _experts("nvfp4_rowwise", "nvfp4_te", SIZE, 2048, 4096), _experts("mxfp8", "mxfp4", SIZE, 2048, 4096),
    *(_experts(name, name, SIZE, 2048, 4096) for name in ("mxfp8", "mxfp4", "nvfp4")),
    _experts("nvfp4", "nvfp4", 128, 2040, 4096),
    _experts("nvfp4_rowwise", "nvfp4_rowwise", 2048, 4095, SIZE, along_k=True),
    *(_experts(name, name, 2048, 4096, SIZE, along_k=True) for name in ("nvfp4_te", "mxfp8", "mxfp4")),
    _experts("nvfp4", "nvfp4", 256, 512, SIZE, along_k=True),
    # Experts whose results are the next experts' operands: of gate and up as one weight, two weights and two products,
    # and of one product.
    *(_experts(name, name, SIZE, 2048, 4096, epilogue="pair", result=name)
      for name in ("nvfp4", "nvfp4_one_level", "mxfp8", "mxfp4")),
    _experts("nvfp4", "nvfp4", SIZE, 2048, 4096, epilogue="pair", weights=2, result="nvfp4"),
    *(_experts(name, name, SIZE, 2048, 4096, epilogue="gated", result=name) for name in ("nvfp4_one_level", "mxfp8")),
    _experts("nvfp4_rowwise", "nvfp4_te", 128, 2040, 4096, result="nvfp4_one_level"),
    _experts("mxfp8", "mxfp4", 128, 2032, 4096, result="mxfp8"),
    # Experts whose results the next experts' quantiser reads.
    _experts("nvfp4", "nvfp4", SIZE, 2048, 4096, epilogue="pair", weights=2, result=AMAX),
    *(_experts("nvfp4", "nvfp4", SIZE, 2048, 4096, epilogue=each, result=AMAX) for each in ("pair", "gated", "")),
    # Experts, dequantised.
    _experts(None, "nvfp4", SIZE, 2048, 4096), _experts(None, "mxfp8", 2048, 4096, SIZE, along_k=True),
)  # fmt: skip
