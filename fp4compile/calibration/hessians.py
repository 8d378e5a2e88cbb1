"""Second moments of the inputs of layers: what GPTQ takes from a user's batches."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph

from fp4compile.analysis.find import find
from fp4compile.analysis.gemm import Gemm, Input
from fp4compile.analysis.views import view_of
from fp4compile.calibration.batches import call, in_inference
from fp4compile.calibration.observers import Observation, operands
from fp4compile.formats import float32_sums
from fp4compile.formats.grouping import Grouping, Groups
from fp4compile.report.progress import with_bar
from fp4compile.weights.gptq import Moments
from fp4compile.weights.replacements import Weight

AT_ONCE = 8 << 30  # bytes of second moments that are collected in one pass over the batches


def sizes(weight: Weight, model: nn.Module) -> tuple[int, int]:
    """How many matrices a weight has, and their in features."""
    packed = weight.empty(model)
    return packed.experts or 1, packed.in_features


def moments_of(
    model: nn.Module, weights: Sequence[Weight], batches: Sequence[Any], progress: bool
) -> Iterator[tuple[Weight, Moments, bool]]:
    """Each weight, the moments of its inputs in the unquantised model, and whether it also ran outside of its graphs.

    Inputs outside of the captured graphs do not count. Neighbours of equal inputs share an object of moments.
    The model runs over the batches once for each 8 GiB of moments, which are freed before the next ones are collected.
    Raises ValueError for inputs that are not finite.
    """
    parts = list(_parts(model, weights))
    collector = _Collector()
    watched = Observation(model, _weights_products, collector.see)
    for number, part in enumerate(parts, 1):
        collector.sums = {weight.parameter(model).data_ptr(): _none_yet(weight, model) for weight in part}
        bar = f"second moments, {number} of {len(parts)}" if progress else None
        with in_inference(model):
            for batch in with_bar(batches, bar):
                call(watched, batch)
        collector.last = before = None
        for weight in part:
            found = collector.sums.pop(weight.parameter(model).data_ptr())
            if not found.second.isfinite().all():
                raise ValueError(f"batches: an input of {weight.names[0]!r} is not finite")
            before = found = before if before is not None and before.equals(found) else found
            yield weight, found, watched.ran_outside(weight.parameter(model))


def _none_yet(weight: Weight, model: nn.Module) -> Moments:
    """The moments of a weight before any input."""
    matrices, k = sizes(weight, model)
    return Moments(torch.zeros(matrices, k, k, device=weight.parameter(model).device), [0] * matrices)


def _parts(model: nn.Module, weights: Iterable[Weight]) -> Iterator[list[Weight]]:
    """The weights in order, in parts of at most `AT_ONCE` bytes of moments, or of one weight."""
    part: list[Weight] = []
    taken = 0
    for weight in weights:
        matrices, k = sizes(weight, model)
        needed = 4 * matrices * k * k
        if part and taken + needed > AT_ONCE:
            yield part
            part, taken = [], 0
        part.append(weight)
        taken += needed
    if part:
        yield part


def _weights_products(graph: Graph, inputs: tuple[Input, ...]) -> list[Gemm]:
    """The forward matmuls of a graph that read a parameter."""
    found = (gemm for gemm in find(graph, inputs) if gemm.product == "fprop" and gemm.packed is None)
    return [gemm for gemm in found if gemm.packed_weight is None and operands(gemm)[1].parameter is not None]


class _Collector:
    """Adds the inputs of matmuls to the moments of their weights.

    sums: the moments by the address of the parameter. last: the last input of one matrix, with its version and x^T x,
    which q, k and v, or gate and up, share.
    """

    def __init__(self) -> None:
        self.sums: dict[int, Moments] = {}
        self.last: tuple[torch.Tensor, int, torch.Tensor] | None = None

    def see(
        self, gemm: Gemm, names: set[str], parameter: torch.Tensor, x: torch.Tensor, groups: torch.Tensor | None
    ) -> None:
        """See `observers.See`."""
        moments = self.sums.get(parameter.data_ptr())
        if moments is None:
            return
        for matrix, rows in _inputs(gemm, parameter, x, groups):
            moments.second[matrix] += self._squares(rows)
            moments.tokens[matrix] += rows.shape[0]

    def _squares(self, rows: torch.Tensor) -> torch.Tensor:
        """`squares`, computed once for the layers that one after the other read the same x."""
        if self.last is None or not _same(self.last[0], rows) or self.last[1] != rows._version:
            self.last = rows, rows._version, squares(rows)
        return self.last[2]


def squares(x: torch.Tensor) -> torch.Tensor:
    """x^T x of x [tokens, K] in float32, [K, K].

    On a GPU, 16-bit numbers are multiplied by 16-bit matrix units, which add in float32: the product of two such
    numbers has 22 bits at most, so float32 holds it exactly, and only sums are rounded. Everywhere else a float32
    matmul computes it, in the precision of `torch.set_float32_matmul_precision`.
    """
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        return float32_sums.mm(x.mT, x)
    with torch.autocast(x.device.type, enabled=False):
        x = x.float()
        return x.mT @ x


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two living tensors are the same elements of one memory."""
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


def _inputs(
    gemm: Gemm, parameter: torch.Tensor, x: torch.Tensor, groups: torch.Tensor | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """The matrices of a parameter that a matmul multiplies, with the inputs of each, [tokens, K]. x: [..., K]."""
    if parameter.dim() < 3:
        yield 0, x.flatten(0, -2)
        return
    first = int(view_of(operands(gemm)[1].source).offset) // parameter[0].numel()
    if gemm.groups is Grouping.DENSE:
        yield first, x.flatten(0, -2)
    elif gemm.groups is Grouping.RAGGED_ROWS and groups is not None:
        found = Groups.of(groups, x.shape[-2])
        for matrix, (start, end) in enumerate(zip(found.starts.tolist(), found.ends.tolist(), strict=True)):
            yield first + matrix, x[start:end]
    elif gemm.groups is Grouping.GATHERED and groups is not None:
        for matrix in groups.unique().tolist():
            yield first + matrix, x[groups == matrix].flatten(0, -2)
    else:
        for matrix, rows in enumerate(x):
            yield first + matrix, rows
