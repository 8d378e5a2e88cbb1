"""One op call, launched: its kernels on operands in buffers of NaN, compared with what the reference computed.

Entries: `kernels_of(launched)`, `difference(launched, kernel)`.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from fp4compile.formats import reference
from fp4compile.formats.grouping import Groups
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.formats.steps import REDUCTIONS
from fp4compile.hardware import Target
from fp4compile.ops.define import KERNELS
from fp4compile.ops.matmul import SCALED_MM, SCALED_MM_RESULTS, arguments, arguments_of_each
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.templates import choose
from fp4compile.templates.problem import Problem, problem_of
from tests.helpers.foreign import embedded, poisoned_outputs, same_bits

# Kernels of products that Triton's interpreter runs; the others are inline PTX.
DENSE = ("dequant_tiles", "block_scaled_sm100", "skinny_block_scaled_sm100")
GROUPED = ("dequant_tiles", "dequant_operand", "grouped_block_scaled_sm100")
NATIVE = Target(100)  # what kernels for SM100 serve, whichever GPU the graph is for
# Steps that two libraries compute with other last bits, or in another order.
INEXACT = {*REDUCTIONS, "exp", "silu", "sigmoid", "erf", "tanh", "rsqrt", "div"}


@dataclass(frozen=True)
class Launched:
    """A call of an op with its arguments, and what its reference returned."""

    op: torch._ops.OpOverload
    args: tuple
    kwargs: dict
    expected: Any

    @property
    def name(self) -> str:
        return self.op._schema.name.split("::")[1]

    @cached_property
    def products(self) -> list[Arguments]:
        """The products that a call computes; none where the op is another one."""
        if self.op is SCALED_MM_RESULTS:
            return arguments_of_each(*self.args, **self.kwargs)
        return [arguments(*self.args, **self.kwargs)] if self.op is SCALED_MM else []

    @property
    def kind(self) -> str:
        """What a call does, in words: the op, then options of `quantize` that change the kernels, or the epilogue."""
        words = [self.name]
        if self.op is QUANTIZE:
            dims = self.argument("dim")
            words += ["both"] * (len(dims) == 2) + ["columns"] * (list(dims) == [-2])
            words += [name for name in ("offs", "each_matrix", "values", "prologue") if _given(self.argument(name))]
        if self.products:
            x, epilogue = self.products[0], self.products[0].spec.epilogue
            words += ["offs"] * (x.offs is not None) + ["several"] * (len(self.products) > 1)
            words += [] if epilogue is None else [*(epilogue.end or "").split()[:1], "epilogue"]
        return " ".join(words)

    @property
    def signature(self) -> tuple:
        """Equal for calls that differ in the values of their tensors alone."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        each = ((x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves)
        return self.op, str(spec), *map(str, each)

    def argument(self, name: str) -> Any:
        """An argument by its name in the schema; its default where it was not given."""
        for given, declared in zip(self.args, self.op._schema.arguments, strict=False):
            if declared.name == name:
                return given
        if name in self.kwargs:
            return self.kwargs[name]
        return next((each.default_value for each in self.op._schema.arguments if each.name == name), None)

    def by_kernels(self, **options) -> list[torch.Tensor]:
        """What the CUDA implementation returns of embedded operands."""
        args, kwargs = pytree.tree_map(lambda x: embedded(x) if isinstance(x, torch.Tensor) else x,
                                       (self.args, self.kwargs))  # fmt: skip
        with poisoned_outputs():
            return pytree.tree_leaves(KERNELS[self.op](*args, **kwargs, **options))


def _given(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) or bool(argument)


def kernels_of(launched: Launched) -> list[str]:
    """The kernels that can serve a call and that the interpreter runs; [""] for an op that has its own kernels."""
    if not launched.products:
        return [""]
    x = launched.products[0]
    problem = problem_of(x, NATIVE)
    if problem.empty or x.index is not None or (x.a.format is None and x.b.format is None):
        return []  # of an index, the kernel is inline PTX
    if x.spec.results > 1:
        return _quantizing_kernels(problem)
    return _dense_kernels(problem) if x.offs is None else _grouped_kernels(problem)


def difference(launched: Launched, kernel: str) -> str | None:
    """What one of `kernels_of` computes otherwise than the reference; None if nothing."""
    expected = pytree.tree_leaves(launched.expected)
    if not kernel:
        return _codes_differ(launched, launched.by_kernels(), expected)
    always = dict.fromkeys(("serves", "quantizes", "finds_amax"), lambda problem: True)
    with mock.patch.object(choose, "REGISTRY", (replace(choose.named(kernel), **always),)):
        spec = launched.products[0].spec
        differ = _codes_differ if spec.result is not None else _amax_differs if spec.amax else _products_differ
        return differ(launched, launched.by_kernels(), expected)


# ---------------------------------------------------------------- quantisers


def _codes_differ(launched: Launched, got: list[torch.Tensor], expected: list[torch.Tensor]) -> str | None:
    exact = not launched.products  # sums in another order
    exact = exact and not any(step.split()[0] in INEXACT for step in launched.argument("prologue") or ())
    offs, rows = launched.argument("offs"), None
    if offs is not None:  # rows of no group are as they were in memory
        groups = Groups.of(offs, launched.args[0].shape[0])
        rows = groups.of_rows < groups.count
    for i, (one, other) in enumerate(zip(got, expected, strict=True)):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"result {i}: {one.dtype} {tuple(one.shape)}, expected {other.dtype} {tuple(other.shape)}"
        if rows is not None and other.dim() == 2 and len(other) == len(rows):
            one, other = one[rows], other[rows]
        if not (same_bits(one, other) if exact else _nearly(one, other)):
            return f"result {i} of {len(expected)}, {other.dtype} {tuple(other.shape)}: {_described(one, other)}"
    return None


def _nearly(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results differ as sums in another order make them: NaN in the same places, few codes by a step."""
    if one.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return torch.equal(one.isnan(), other.isnan()) and _distance(one, other) < 2.0**-6
    differ = (one.reshape(-1).view(torch.uint8) != other.reshape(-1).view(torch.uint8)).sum().item()
    return differ <= max(4, 0.03 * other.numel())


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    one, other = one.double().nan_to_num(0, 0, 0), other.double().nan_to_num(0, 0, 0)
    return ((one - other).norm() / other.norm().clamp(min=1e-30)).item()


def _described(one: torch.Tensor, other: torch.Tensor) -> str:
    if one.dtype.itemsize == 1:
        one, other = one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    differ = ((one != other) & ~((one != one) & (other != other))).reshape(-1).nonzero().reshape(-1)
    if not len(differ):
        return "signs of zeros"
    i = int(differ[0])
    one, other = one.reshape(-1), other.reshape(-1)
    return f"{len(differ)} of {one.numel()} differ, the first at {i}: {one[i]}, expected {other[i]}"


# ---------------------------------------------------------------- products


def _dense_kernels(problem: Problem) -> list[str]:
    """The kernels of the interpreter that serve a product, or each of those in one launch."""
    serving = [name for name in DENSE if choose.named(name).tier == "emulated" or choose.named(name).serves(problem)]
    return [name for name in serving if problem.spec.epilogue is None or choose.named(name).takes_epilogue(problem)]


def _quantizing_kernels(problem: Problem) -> list[str]:
    kernel = choose.named("grouped_block_scaled_sm100" if problem.ragged else "block_scaled_sm100")
    serves = kernel.serves(problem) and (not problem.spec.amax or kernel.finds_amax(problem))
    return [kernel.name] if serves else []


def _grouped_kernels(problem: Problem) -> list[str]:
    return [name for name in GROUPED if name == "dequant_tiles" or choose.named(name).serves(problem)]


def _products_differ(launched: Launched, got: list[torch.Tensor], expected: list[torch.Tensor]) -> str | None:
    for i, (one, other) in enumerate(zip(got, expected, strict=True)):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"product {i}: {one.dtype} {tuple(one.shape)}, expected {other.dtype} {tuple(other.shape)}"
        if not torch.equal(one.isfinite(), other.isfinite()):
            return f"product {i}: not finite in other places; {_described(one, other)}"
        error = (one.double() - other.double()).nan_to_num(0, 0, 0).abs()
        allowed = _rounding(launched, i, other)
        if (error > allowed).any():
            at = int((error - allowed).reshape(-1).argmax())
            return (f"product {i} {tuple(other.shape)}: {(error > allowed).sum()} of {other.numel()} differ, most at "
                    f"{at}: {one.reshape(-1)[at]}, expected {other.reshape(-1)[at]}")  # fmt: skip
    return None


def _amax_differs(launched: Launched, got: list[torch.Tensor], expected: list[torch.Tensor]) -> str | None:
    """The maxima belong to the result of the kernel, whatever the order of its sums."""
    (result, maxima), amax = got, got[0].float().abs().amax()
    if not same_bits(maxima.amax(), amax):
        return f"the largest of the maxima is {maxima.amax()}, expected {amax}"
    return _products_differ(launched, [result], expected[:1])


def _rounding(launched: Launched, i: int, expected: torch.Tensor) -> torch.Tensor:
    """What rounding may do to each element of a product: float32 sums in another order, and then an output's rounding.

    Of products with an epilogue and those of experts, a share of the largest element in a row.
    """
    eps = torch.finfo(expected.dtype).eps
    plain = expected.double().nan_to_num(0, 0, 0).abs()
    x = launched.products[i]
    if x.offs is not None or x.spec.epilogue is not None:
        return 4 * eps * plain + 2.0**-16 * plain.amax(-1, keepdim=True) + eps * plain.amax() / 4 + 1e-30
    left, right = (_values(x).abs().nan_to_num(0, 0, 0) for x in (x.a, x.b))
    k = min(left.shape[-1], right.shape[-1])
    sums = left[..., :k] @ right[..., :k].transpose(-2, -1)
    return (k + 8) * 2.0**-24 * (sums + plain) + eps * plain + 1e-30


def _values(x: Operand) -> torch.Tensor:
    """An operand's values in float64, global scale included."""
    if x.format is None:
        return x.data.double() * (1.0 if x.outer is None else x.outer.double())
    k = x.data.shape[-1] * (2 if x.format.packed else 1)
    return reference.dequantize(x.data, x.scales, x.outer, x.format, k, torch.float32).double()
