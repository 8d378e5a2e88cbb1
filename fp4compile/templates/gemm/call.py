"""A matmul with its tensors in the form of kernel arguments: contiguous bytes, aligned to 16 bytes."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from fp4compile._compat import statically_true
from fp4compile.formats.epilogue import AUXILIARIES, PARTIAL_MAXIMA, Epilogue
from fp4compile.formats.formats import as_integers
from fp4compile.formats.grouping import padded_rows
from fp4compile.formats.layouts import ceil_div, swizzled_numel
from fp4compile.formats.operand import Operand
from fp4compile.formats.product_spec import OperandSpec
from fp4compile.templates.device.apply_epilogue import text
from fp4compile.templates.problem import Problem
from fp4compile.templates.quantize.source import power_of_two
from fp4compile.templates.view import span, within


@dataclass(frozen=True, eq=False)
class KernelOperand:
    """An operand as the kernels read it: data [batches * rows, k] and the bits of scales, integers, contiguous.

    k: elements of a row, padding included.
    """

    type: OperandSpec
    data: torch.Tensor
    scales: torch.Tensor | None
    outer: torch.Tensor | None
    rows: int
    k: int

    @property
    def units_per_row(self) -> int:
        """Units of two elements in a row; elements of a plain operand."""
        width = self.data.shape[-1]
        return width // 2 if self.type.element in ("e4m3", "e5m2") else width

    @property
    def scale_count(self) -> int:
        """Block scales of one matrix."""
        if self.scales is None:
            return 0
        fmt = self.type.format
        blocks = ceil_div(self.k, fmt.block_cols)
        if self.type.swizzled:
            return swizzled_numel(self.rows, blocks)
        return ceil_div(self.rows, fmt.block[0]) * blocks

    def operand(self, *rows, matrices=None) -> Operand:
        """The operand as ops take it, of these rows: of a matrix, or of the matrices of groups.

        matrices: with groups along the contraction, their number; each row then has a row scale for each group.
        """
        fmt, outer = self.type.format, self.outer
        data = self.data.view(*rows, self.data.shape[-1]).view(fmt.data_dtype)
        scales = None if self.scales is None else self.scales.view(fmt.scale_dtype)
        if scales is not None and not self.type.swizzled:
            scales = scales.view(*rows[:-1], ceil_div(rows[-1], fmt.block[0]), ceil_div(self.k, fmt.block_cols))
        if self.type.outer == "row":
            outer = outer.view(*rows, 1) if matrices is None else outer.view(matrices, *rows, 1)
        return Operand(data, scales, outer, fmt)

    def check(self, matrices, rows) -> None:
        """Raise RuntimeError if the operand's tensors hold less than `matrices` matrices of `rows` rows."""
        lanes, of_each = matrices * rows, max(self.rows, 1) if isinstance(self.rows, int) else self.rows
        within(self.data, span((lanes, self.data.shape[-1]), (self.data.shape[-1], 1)))
        if self.scales is not None:
            within(self.scales, span((ceil_div(lanes, of_each) * self.scale_count,), (1,)))
        if self.outer is not None and self.type.outer == "row":
            within(self.outer, span((lanes,), (1,)))

    def align(self, step: int) -> int:
        """The constexpr ALIGN of `dequantized_tile.load_units` for this operand. step: units of a step along K."""
        if self.type.format is not None:
            return -1 if statically_true(self.units_per_row % step == 0) else 0
        return power_of_two(self.data.shape[-1], 16 // self.data.element_size()) // 2

    def constants(self, name: str, step: int) -> dict:
        """The constexpr arguments of a kernel that reads this operand, as operand `name`, `step` units at a time."""
        fields = {**self.reading(step), "OUTER": self.type.outer}
        return {f"{name}_{field}": value for field, value in fields.items()}

    def reading(self, step: int) -> dict:
        """The constexpr arguments of a kernel that reads this operand alone, without its global or row scale."""
        square = self.type.format is not None and self.type.format.square
        return {"ELEMENT": self.type.element, "SCALE": self.type.scale, "SWIZZLED": int(self.type.swizzled),
                "SQUARE": int(square), "ALIGN": self.align(step)}  # fmt: skip


def kernel_operand(x: Operand, type: OperandSpec, pair: bool = False) -> KernelOperand:
    """The operand's tensors in the layout that kernels read; copied only if their layout differs.

    pair: global scales of two matrices, whose kernel takes their stride.
    """
    data, scales, fmt = x.data, x.scales, x.format
    *_, rows, width = data.shape
    scales = aligned(as_integers(scales.contiguous())) if x.scaled else None
    outer = x.outer if x.outer is None or pair else x.outer.contiguous()
    if fmt is not None and not fmt.packed:
        data = data.view(torch.uint8)
        if not statically_true(width % 2 == 0):  # two codes make a unit
            data = F.pad(data, (0, width % 2))
    return KernelOperand(type, aligned(data.contiguous()), scales, outer, rows, x.k)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x, copied unless its address is known to be a multiple of 16 bytes."""
    return x if statically_true(x.storage_offset() * x.element_size() % 16 == 0) else x.clone()


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of a matmul's launch: the problem, its operands, and the tensors that its epilogue reads.

    auxiliaries: the tensors that the steps of the epilogue read, of the matmul's size or of n elements.
    result_outer: the static global scale of a quantised result; None without one.
    offs: int32 [groups], contiguous; None without groups.
    arranged_a: A in the order of `Candidate.arrangement`, if it exists already; else None.
    """

    problem: Problem
    a: KernelOperand
    b: KernelOperand
    bias: torch.Tensor | None
    auxiliaries: tuple[torch.Tensor, ...] = ()
    offs: torch.Tensor | None = None
    result_outer: torch.Tensor | None = None
    arranged_a: torch.Tensor | None = None

    def check(self) -> None:
        """Raise RuntimeError where a kernel of the problem's sizes would leave the storage of a tensor."""
        p = self.problem
        self.a.check(p.batches, p.m)
        self.b.check(p.b_matrices, p.b_rows)
        if self.bias is not None:
            within(self.bias, span((2 * p.n if p.spec.pair else p.n,), (1,)))
        for tensor in self.auxiliaries:
            row = statically_true(tensor.numel() == p.n)
            within(tensor, span((p.n,) if row else (p.batches * p.m, p.n), (1,) if row else (p.n, 1)))
        if p.outer_of_each_matrix:
            within(self.b.outer, span((2,), self.b.outer.stride()))
        if self.offs is not None:
            within(self.offs, span((p.groups,), (1,)))

    @property
    def epilogue(self) -> Epilogue | None:
        return self.problem.spec.epilogue

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.problem.spec.stored_dtype

    def empty(self) -> torch.Tensor:
        """Memory for the result."""
        return self.a.data.new_empty(self.problem.shape, dtype=self.stored_dtype)

    def empty_codes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for the result's codes, uint8 [batches, m, bytes], and for the swizzled block scales, uint8."""
        p, data = self.problem, self.a.data
        blocks = ceil_div(p.n, p.spec.result.block_cols)
        row = blocks * p.spec.result.block_cols // (2 if p.spec.result.packed else 1)
        scales = p.batches * swizzled_numel(p.m if not p.ragged else padded_rows(p.m, p.groups), blocks)
        return data.new_empty((p.batches, p.m, row)), data.new_empty(scales)

    def empty_maxima(self) -> torch.Tensor:
        """Memory for the magnitudes whose largest is the result's amax; with groups, a 0 for each, to be raised."""
        if self.problem.ragged:
            return self.a.data.new_zeros(self.problem.groups, dtype=torch.float32)
        return self.a.data.new_empty(PARTIAL_MAXIMA, dtype=torch.float32)

    def empty_results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for codes and block scales, or for a result and maxima; for a result alone, the same tensor twice."""
        if self.problem.spec.result is not None:
            return self.empty_codes()
        out = self.empty()
        return out, self.empty_maxima() if self.problem.spec.amax else out

    @property
    def even_blocks(self) -> bool:
        """Whether the columns of stored codes are a multiple of a block; True without codes."""
        p = self.problem
        return p.spec.result is None or statically_true(p.n % p.spec.result.block_cols == 0)

    def empty_sums(self, split_k: int) -> torch.Tensor:
        """Memory for the partial sums [split_k, batches, m, n] in float32."""
        p = self.problem
        return self.a.data.new_empty((split_k, p.batches, p.m, p.n), dtype=torch.float32)

    @property
    def rescale_constants(self) -> dict:
        """The constexpr arguments of `device.apply_epilogue.rescale`."""
        p = self.problem
        return {"A_OUTER": p.a.outer, "B_OUTER": p.b.outer, "BIAS": int(self.bias is not None),
                "B_BATCHED": int(p.b_batched)}  # fmt: skip

    def rescale_pointers(self, unused: torch.Tensor) -> list:
        """Global or row scales of A and of B, and bias; `unused` for each that is absent."""
        return [unused if t is None else t for t in (self.a.outer, self.b.outer, self.bias)]

    def epilogue_pointers(self, unused: torch.Tensor) -> list:
        """The kernel's pointers to the tensors that the epilogue reads; `unused` for the rest."""
        return [*self.auxiliaries, *[unused] * (AUXILIARIES - len(self.auxiliaries))]

    @property
    def epilogue_text(self) -> str:
        """The constexpr EPILOGUE of a kernel."""
        return "" if self.epilogue is None else text(self.epilogue)

    def without_epilogue(self) -> "Call":
        return replace(
            self, problem=replace(self.problem, spec=replace(self.problem.spec, epilogue=None)), auxiliaries=()
        )
