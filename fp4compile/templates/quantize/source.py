"""The input of a quantise kernel: a batch of matrices with contiguous rows, and the other operands of its prologue."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fp4compile._compat import statically_true, tracing
from fp4compile.formats.grouping import padded_rows
from fp4compile.formats.prologue import OPERANDS, STORED, Prologue
from fp4compile.hardware import Target
from fp4compile.templates.device.apply_prologue import text
from fp4compile.templates.view import View


@dataclass(frozen=True, eq=False)
class Source:
    """The matrices [batch, rows, cols] that a quantise kernel reads.

    view: the tensor with its sizes [batch, rows, cols] and strides (the last one is 1).
    target: the GPU for which the kernels are compiled.
    prologue: None, or the steps whose result is quantised; `view` is then their first operand. operands: views of the
        other operands: [batch * rows, cols] for kind "aux", [cols] for "row", [batch * rows] for "col".
    stored: contiguous views that the first kernel to read the tensor fills with the results of `prologue.stored`.
    amax_bits: the bits of the largest magnitudes, if the kernel of the prologue's statistics finds them, or the caller
        passes them.
    offs: int32 [G], which cut the rows of one matrix in groups (`formats.grouping`); None: there are no groups.
    """

    view: View
    target: Target
    prologue: Prologue | None = None
    operands: tuple[View, ...] = ()
    stored: tuple[View, ...] = ()
    amax_bits: View | None = None
    offs: View | None = None

    @property
    def tensor(self) -> torch.Tensor:
        return self.view.tensor

    @property
    def batch(self):
        return self.view.sizes[0]

    @property
    def rows(self):
        return self.view.sizes[1]

    @property
    def cols(self):
        return self.view.sizes[2]

    @property
    def groups(self) -> int:
        """The number of groups of rows; 0 without offsets."""
        return 0 if self.offs is None else self.offs.sizes[0]

    @property
    def padded_rows(self):
        """The rows of results down the columns and of swizzled scales, with each group padded to tiles of 128 rows."""
        return padded_rows(self.rows, self.groups) if self.groups else self.rows

    @property
    def numel(self):
        return self.batch * self.rows * self.cols

    @property
    def row_stride(self):
        """The distance, in elements, from one row to the next."""
        return self.view.strides[1]

    @property
    def args(self) -> tuple:
        """The arguments of every quantise kernel after its pointers: rows, cols, batch stride, row stride."""
        return self.rows, self.cols, *self.view.strides[:2]

    @property
    def operand_args(self) -> tuple:
        """Operands 1, 2, ... of the prologue; None for operands that it does not have."""
        return *self.operands, *[None] * (OPERANDS - 1 - len(self.operands))

    @property
    def read_args(self) -> tuple:
        """`args`, `operand_args` and `stored`: the arguments of kernels that read by `device.apply_prologue`."""
        return *self.args, *self.operand_args, *self.stored, *[None] * (STORED - len(self.stored))

    @property
    def _row_strides(self) -> dict[int, int]:
        """Row strides of the operands of the tensor's size, by number, without the first operand."""
        kinds = {} if self.prologue is None else self.prologue.kinds
        return {i: each.strides[0] for i, each in enumerate(self.operands, 1) if kinds[i] == "aux"}

    @property
    def prologue_text(self) -> str:
        """The constexpr PROLOGUE of kernels that read by `device.apply_prologue`."""
        if self.prologue is None:
            return ""
        separate = {i: stride for i, stride in self._row_strides.items() if not statically_true(stride == self.cols)}
        dtypes = tuple(each.tensor.dtype for each in (self.view, *self.operands))
        return text(self.prologue, dtypes, tuple(separate.items()))

    def once_read(self) -> "Source":
        """The source for the kernel after one that reads the tensor for its amax: nothing is stored twice.

        If the first kernel stores the result, the next one reads it instead of computing it again.
        """
        if not self.stored:
            return self
        if self.prologue.stores_result:
            return replace(self, view=matrices_view(self.stored_result.tensor), prologue=None, operands=(), stored=())
        return replace(self, prologue=replace(self.prologue, stored=()), stored=())

    @property
    def stored_result(self) -> View:
        """The view of the stored result that is quantised; requires `prologue.stores_result`."""
        return self.stored[self.prologue.stored.index(self.prologue.result)]

    def flat(self) -> "Source | None":
        """The source with all elements as one row; None unless they, and all operands' elements, are contiguous."""
        if self.prologue is not None and set(self.prologue.kinds.values()) != {"aux"}:
            return None
        if not all(statically_true(stride == self.cols) for stride in self._row_strides.values()):
            return None
        batch_stride, row_stride, _ = self.view.strides
        one_matrix = statically_true(self.batch == 1) or statically_true(batch_stride == self.rows * self.cols)
        one_row = statically_true(self.rows == 1) or statically_true(row_stride == self.cols)
        return self._with_sizes(1, self.numel) if one_matrix and one_row else None

    def each_as_row(self) -> "Source":
        """The source with each matrix as one row. The rows of a matrix must be contiguous in memory."""
        return self._with_sizes(self.batch, self.rows * self.cols)

    def _with_sizes(self, batch, cols) -> "Source":
        """The source with its elements as matrices of one row. The caller ensures that memory has this layout."""
        batch_stride = 0 if statically_true(batch == 1) else self.view.strides[0]
        return replace(self, view=View(self.tensor, (batch, 1, cols), (batch_stride, 0, 1)))

    @property
    def align(self) -> int:
        """The number of words (pairs of elements), at most 16 bytes, that divides rows' lengths and addresses.

        0 if one word does not: an odd length or an odd address.
        """
        size = self.tensor.element_size()
        divisor = power_of_two(self.cols, 16 // size)
        if not statically_true(self.rows == 1):
            divisor = power_of_two(self.row_stride, divisor)
        for stride in (self.view.strides[0], *self._row_strides.values()):
            divisor = power_of_two(stride, divisor)
        for each in (self.view, *self.operands, *self.stored):
            divisor = power_of_two(_address(each.tensor) // each.tensor.element_size(), divisor)
        return divisor // 2


def source_of(
    x: torch.Tensor,
    target: Target,
    prologue: Prologue | None = None,
    operands: Sequence[torch.Tensor] = (),
    stored: Sequence[torch.Tensor] = (),
) -> Source:
    """x as matrices whose rows run along its last dimension; copied only if its strides require it.

    prologue, operands, stored: see `Source`. Operands in another layout than kernels read are copied.
    """
    if prologue is None:
        return Source(matrices_view(x), target)
    view = matrices_view(x if isinstance(row_stride(x), int) else x.contiguous())
    rows, cols = view.sizes[0] * view.sizes[1], view.sizes[2]
    shapes = {"aux": ((rows, cols), (cols, 1)), "row": ((cols,), (1,)), "col": ((rows,), (1,))}
    views = []
    for i, operand in enumerate(operands, 1):
        sizes, strides = shapes[prologue.kinds[i]]
        # Kernels of norms read contiguous operands besides the first one.
        slices = prologue.kinds[i] == "aux" and not prologue.reductions and statically_true(operand.shape[-1] == cols)
        distance = row_stride(operand) if slices else None
        if isinstance(distance, int):
            views.append(View(operand, sizes, (distance, 1)))
        else:
            views.append(View(operand.contiguous(), sizes, strides))
    written = [
        View(each, *shapes[prologue.step_kinds[number]])
        for each, (number, _) in zip(stored, prologue.stored, strict=True)
    ]
    return Source(view, target, prologue, tuple(views), tuple(written))


def matrices_view(x: torch.Tensor) -> View:
    """x as [batch, rows, cols] whose rows run along its last dimension; copied only if its strides require it.

    The stride of the batch is 0 if there is one matrix.
    """
    if not (statically_true(x.stride(-1) == 1) or statically_true(x.shape[-1] == 1)):
        x = x.contiguous()
    if x.dim() > 3:
        x = x.flatten(0, -3)
    batch, rows, cols = [1] * (3 - x.dim()) + [*x.shape]
    batch_stride = 0 if statically_true(batch == 1) else x.stride(0)
    return View(x, (batch, rows, cols), (batch_stride, x.stride(-2) if x.dim() > 1 else 0, 1))


def one_matrix(x: torch.Tensor) -> View:
    """x as one matrix [1, rows, cols]. The distances between rows must be equal."""
    *lead, cols = x.shape
    return View(x, (1, math.prod(lead), cols), (0, row_stride(x), 1))


def row_stride(x: torch.Tensor):
    """The number of elements from one row of x to the next, if all are equal and rows are contiguous; else None.

    For a tensor with one row, the length of the row.
    """
    if not (statically_true(x.stride(-1) == 1) or statically_true(x.shape[-1] == 1)):
        return None
    found, rows = None, 1
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if statically_true(size == 1):
            continue
        if found is None:
            found = stride
        elif not statically_true(stride == found * rows):
            return None
        rows = rows * size
    return x.shape[-1] if found is None else found


def lies_transposed(x: torch.Tensor) -> bool:
    """Whether the second-to-last dimension of x is contiguous, and the last one is not."""
    along_last = statically_true(x.stride(-1) == 1) or statically_true(x.shape[-1] == 1)
    return not along_last and statically_true(x.stride(-2) == 1)


def power_of_two(n, limit: int) -> int:
    """The largest power of two up to `limit` that is known to divide n (which may be symbolic)."""
    while limit > 1 and not statically_true(n % limit == 0):
        limit //= 2
    return limit


def _address(x: torch.Tensor):
    """The address of x or, under tracing, its offset in a storage that the allocator aligns."""
    return x.storage_offset() * x.element_size() if tracing() else x.data_ptr()
