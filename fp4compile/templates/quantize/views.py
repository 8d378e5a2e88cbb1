"""What the launches of all quantise kernels share: views of tensors as matrices, output tensors, common arguments."""

import math
from dataclasses import dataclass, replace

import torch

from fp4compile._compat import statically_true, tracing
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.layouts import TILE_COLS, TILE_ROWS, ceil_div, swizzled_numel
from fp4compile.formats.prologue import OPERANDS, STORED, Prologue
from fp4compile.templates.device.prologue_source import with_prologue
from fp4compile.templates.launch import target_of
from fp4compile.templates.quantize.heuristics import PROGRAMS_AHEAD
from fp4compile.templates.view import View, span, within


@dataclass(frozen=True)
class Matrices:
    """A batch of matrices [batch, rows, cols] whose rows are contiguous, as the kernels of quantisers read it.

    view: the tensor with its sizes [batch, rows, cols] and strides (the last one is 1).
    prologue: None, or the steps whose result is quantised; `view` is then their first operand, and `operands` are the
    others. They are contiguous, but for rows of those of the tensor's size, which may lie apart (`row_stride`).
    Several results are the matrices of the batch. stored: what the first kernel that reads the tensor fills with
    `prologue.stored`.
    amax_bits: as of `amax.tensor_amax_bits`, if the kernel that found statistics of the prologue has found it, too.
    """

    view: View
    prologue: Prologue | None = None
    operands: tuple[torch.Tensor, ...] = ()
    stored: tuple[torch.Tensor, ...] = ()
    amax_bits: torch.Tensor | None = None

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
    def batch_stride(self):
        """Elements from one matrix to the next; 0 where there is one, or where the prologue makes all of one."""
        return self.view.strides[0]

    @property
    def row_stride(self):
        """Elements from one row to the next."""
        return self.view.strides[1]

    @property
    def args(self) -> tuple:
        """The arguments that every quantise kernel takes after its pointers: rows, cols and both strides."""
        return self.rows, self.cols, self.batch_stride, self.row_stride

    @property
    def read_args(self) -> tuple:
        """`args`, and what kernels take that read by `device.prologue`: operands 1, 2, ..., and what is stored.

        Raises RuntimeError where a kernel would leave the storage of one of them.
        """
        rows = self._rows_of_operands
        for (number, _), tensor in zip(self.prologue.stored if self.stored else (), self.stored, strict=True):
            whole = self.prologue.step_kinds[number] == "aux"
            within(tensor, span((rows, self.cols if whole else 1), (self.cols if whole else 1, 1)))
        return *self.args, *self.operand_args, *self.stored, *[None] * (STORED - len(self.stored))

    @property
    def operand_args(self) -> tuple:
        """Operands 1, 2, ... of the prologue; kernels of groups, which store nothing of it, take these alone.

        Raises RuntimeError where a kernel would leave the storage of one of them.
        """
        rows, strides = self._rows_of_operands, self._row_strides
        for i, tensor in enumerate(self.operands, 1):
            view = {"aux": ((rows, self.cols), (strides.get(i), 1)), "row": ((self.cols,), (1,)),
                    "col": ((rows,), (1,))}  # fmt: skip
            within(tensor, span(*view[self.prologue.kinds[i]]))
        return *self.operands, *[None] * (OPERANDS - 1 - len(self.operands))

    @property
    def _rows_of_operands(self):
        """Rows of an operand that has the size of the tensor."""
        return self.rows if self.several else self.batch * self.rows

    def read_by(self, kernel):
        """A kernel that reads by `device.prologue`, with the prologue in it."""
        if self.prologue is None:
            return kernel
        apart = {i: stride for i, stride in self._row_strides.items() if not statically_true(stride == self.cols)}
        dtypes = tuple(each.dtype for each in (self.tensor, *self.operands))
        return with_prologue(kernel, self.prologue, dtypes, tuple(apart.items()))

    @property
    def _row_strides(self) -> dict[int, int]:
        """Elements from one row to the next of the operands of the tensor's size, without the first one.

        An operand whose last dimension is another one is contiguous.
        """
        kinds = {} if self.prologue is None else self.prologue.kinds
        tensors = {i: each for i, each in enumerate(self.operands, 1) if kinds[i] == "aux"}
        return {i: row_stride(each) if statically_true(each.shape[-1] == self.cols) else self.cols
                for i, each in tensors.items()}  # fmt: skip

    def after(self, outer: "Outer") -> "Matrices":
        """What the next kernel reads, once outer scales are found: nothing is stored twice.

        If the kernel of the amax has stored the result itself, that is read, and not computed again.
        """
        if not (self.stored and outer.computed):
            return self
        if self.prologue.stores_result:
            return replace(self, view=as_matrices(self.stored_result), prologue=None, operands=(), stored=())
        return replace(self, prologue=replace(self.prologue, stored=()), stored=())

    @property
    def stored_result(self) -> torch.Tensor:
        """What takes the result that is quantised, where `prologue.stores_result`."""
        return self.stored[self.prologue.stored.index(self.prologue.result)]

    @property
    def programs_ahead(self) -> int:
        """How many programs later that one runs whose elements a program with a prologue prefetches; 0: it does not.

        Where it does, there is one matrix, operands lie contiguous, and nothing is stored besides.
        """
        if self.prologue is None or self.stored or not statically_true(self.batch == 1):
            return 0
        strides = [] if statically_true(self.rows == 1) else [self.row_stride]
        if not all(statically_true(stride == self.cols) for stride in (*strides, *self._row_strides.values())):
            return 0
        if 2 * self.align * min(each.element_size() for each in (self.tensor, *self.operands)) < 16:
            return 0
        target = target_of(self.tensor.device)
        return PROGRAMS_AHEAD.get(target.sm, 0) * target.multiprocessors

    @property
    def several(self) -> bool:
        """Whether the matrices are results of one prologue."""
        return self.prologue is not None and bool(self.prologue.several)

    @property
    def numel(self):
        return self.batch * self.rows * self.cols

    def flat(self) -> "Matrices | None":
        """The same elements as one row; None if they do not lie that way in memory, or an operand has no such row.

        Of several results, as one row each.
        """
        if self.prologue is not None and set(self.prologue.kinds.values()) != {"aux"}:
            return None
        if not all(statically_true(stride == self.cols) for stride in self._row_strides.values()):
            return None
        if self.several:
            apart = not statically_true(self.rows == 1) and not statically_true(self.row_stride == self.cols)
            return None if apart else self._with_sizes(self.batch, 1, self.rows * self.cols)
        one_matrix = statically_true(self.batch == 1) or statically_true(self.batch_stride == self.rows * self.cols)
        one_row = statically_true(self.rows == 1) or statically_true(self.row_stride == self.cols)
        if not (one_matrix and one_row):
            return None
        return self._with_sizes(1, 1, self.numel)

    def each_as_row(self) -> "Matrices":
        """The same elements, each matrix as one row, where its rows follow one another in memory."""
        return self._with_sizes(self.batch, 1, self.rows * self.cols)

    def _with_sizes(self, batch, rows, cols) -> "Matrices":
        """The same elements as matrices of one row, which are known to lie that way in memory."""
        batch_stride = 0 if statically_true(batch == 1) else self.batch_stride
        return replace(self, view=View(self.tensor, (batch, rows, cols), (batch_stride, 0, 1)))

    @property
    def align(self) -> int:
        """Words (pairs of elements) that divide a row's length and every row's address, at most 16 bytes of them.

        0 if not even one word does: an odd length or an odd address.
        """
        size = self.tensor.element_size()
        divisor = power_of_two(self.cols, 16 // size)
        if not statically_true(self.rows == 1):
            divisor = power_of_two(self.row_stride, divisor)
        for stride in (self.batch_stride, *self._row_strides.values()):
            divisor = power_of_two(stride, divisor)
        for each in (self.tensor, *self.operands, *self.stored):
            divisor = power_of_two(_address(each) // each.element_size(), divisor)
        return divisor // 2


def matrices(
    x: torch.Tensor,
    prologue: Prologue | None = None,
    operands: tuple[torch.Tensor, ...] = (),
    stored: tuple[torch.Tensor, ...] = (),
) -> Matrices:
    """x as matrices whose rows run along its last dimension; copied only where its strides leave no other way.

    prologue, operands, stored: see `Matrices`.
    """
    return Matrices(as_matrices(x), prologue, operands, stored)


def results_of(first: torch.Tensor, prologue: Prologue, operands: tuple, stored: tuple) -> Matrices:
    """The results of a prologue that has several, as a batch: each is a matrix made of the same operands."""
    one = as_matrices(first)
    view = View(one.tensor, (len(prologue.several), *one.sizes[1:]), one.strides)
    return Matrices(view, prologue, operands, stored)


def as_matrices(x: torch.Tensor) -> View:
    """x as [batch, rows, cols] whose rows run along its last dimension; copied only where strides leave no other way.

    The stride of the batch is 0 where there is one matrix.
    """
    if not (statically_true(x.stride(-1) == 1) or statically_true(x.shape[-1] == 1)):
        x = x.contiguous()
    if x.dim() > 3:
        x = x.flatten(0, -3)
    batch, rows, cols = [1] * (3 - x.dim()) + [*x.shape]
    batch_stride = 0 if statically_true(batch == 1) else x.stride(0)
    return View(x, (batch, rows, cols), (batch_stride, x.stride(-2) if x.dim() > 1 else 0, 1))


def one_matrix(x: torch.Tensor) -> View:
    """x, all of whose rows lie equally far apart, as one matrix [1, rows, cols]."""
    *lead, cols = x.shape
    return View(x, (1, math.prod(lead), cols), (0, row_stride(x), 1))


def row_stride(x: torch.Tensor):
    """Elements from one row of x to the next, the same throughout x; None if they differ, or rows are not contiguous.

    Of a tensor with one row, the length of the row.
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


def power_of_two(n, limit: int) -> int:
    """The largest power of two up to `limit` that is known to divide n (which may be symbolic)."""
    while limit > 1 and not statically_true(n % limit == 0):
        limit //= 2
    return limit


def _address(x: torch.Tensor):
    """The address of x, as far as it is known: under tracing, its offset in a storage that the allocator aligns."""
    return x.storage_offset() * x.element_size() if tracing() else x.data_ptr()


def lies_transposed(x: torch.Tensor) -> bool:
    """Whether the second but last dimension of x is the contiguous one, and its last is not."""
    along_last = statically_true(x.stride(-1) == 1) or statically_true(x.shape[-1] == 1)
    return not along_last and statically_true(x.stride(-2) == 1)


def code_pairs(cols, fmt: BlockFormat):
    """Pairs of codes in a row of `cols` elements, padding included."""
    return ceil_div(cols, 2) if fmt.block is None else ceil_div(cols, fmt.block_cols) * (fmt.block_cols // 2)


def empty_outputs(
    x: torch.Tensor, fmt: BlockFormat, layout: str, down_columns: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Uninitialised uint8 tensors for the codes and the block scales (None without) of x along its last dimension.

    down_columns: for the kernel of columns, which stores 16 bytes at a time; a row of codes is padded to that.
    """
    *batch, rows, cols = x.shape
    if fmt.block is None:
        row_bytes = ceil_div(cols, 16 if down_columns else 2) * (16 if down_columns else 2)
    else:
        row_bytes = code_pairs(cols, fmt) * (1 if fmt.packed else 2)
    data = x.new_empty((*batch, rows, row_bytes), dtype=torch.uint8)
    if fmt.scale is None:
        return data, None
    blocks = ceil_div(cols, fmt.block_cols)
    matrix = (swizzled_numel(rows, blocks),) if layout == "swizzled" else (ceil_div(rows, fmt.block[0]), blocks)
    return data, x.new_empty((*batch, *matrix), dtype=torch.uint8)


def empty_values(x: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """Uninitialised 16-bit floats for the values of the codes of x along its last dimension (`fmt.values_dtype`)."""
    return x.new_empty((*x.shape[:-1], 2 * code_pairs(x.shape[-1], fmt)), dtype=fmt.values_dtype)


def typed_outputs(
    data: torch.Tensor, scales: torch.Tensor | None, cols, fmt: BlockFormat
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The uint8 tensors of `empty_outputs` as codes and scales; without blocks, rows lose their padding."""
    data = data.view(fmt.data_dtype)
    if fmt.block is None and not statically_true(data.shape[-1] == cols):
        data = data[..., :cols].contiguous()
    return data, None if scales is None else scales.view(fmt.scale_dtype)


def padded_scale_shape(rows, blocks, layout: str):
    """Rows and block columns whose scale bytes a kernel writes, the padding of swizzled scales included."""
    if layout == "swizzled":
        return ceil_div(rows, TILE_ROWS) * TILE_ROWS, ceil_div(blocks, TILE_COLS) * TILE_COLS
    return rows, blocks


def tile_grid(source: Matrices, height: int, width: int, layout: str):
    """Programs of a kernel whose height x width tiles cover each matrix and, below and beside it, padding of scales."""
    rows, cols = [ceil_div(n, 128) * 128 if layout == "swizzled" else n for n in (source.rows, source.cols)]
    # Without rows there are still outer scales of the columns to write.
    return source.batch * torch.sym_max(ceil_div(rows, height), 1) * ceil_div(cols, width)


def check_outputs(
    source: Matrices,
    fmt: BlockFormat,
    layout: str,
    rows: tuple[torch.Tensor, torch.Tensor | None] | None,
    along: "Outer | None" = None,
    columns: tuple[torch.Tensor, torch.Tensor | None] | None = None,
    down: "Outer | None" = None,
) -> None:
    """Raise RuntimeError where a kernel would write codes, block scales or outer scales beyond the tensors for them.

    rows, columns: (data, scales) that are filled along the rows and down the columns. along, down: their outer scales.
    """
    sizes = (source.rows, source.cols), (source.cols, source.rows)
    for (lanes, length), outputs, outer in zip(sizes, (rows, columns), (along, down), strict=True):
        if outputs is None:
            continue
        data, scales = outputs
        # The kernel of columns stores 16 bytes at a time.
        pairs = 8 * ceil_div(length, 16) if outputs is columns and fmt.block is None else code_pairs(length, fmt)
        pair_size = 2 if data.is_floating_point() or not fmt.packed else 1
        within(data, span((source.batch * lanes * pairs * pair_size,), (1,)))
        if scales is not None and fmt.scale is not None:
            blocks = ceil_div(length, fmt.block_cols)
            matrix = swizzled_numel(lanes, blocks) if layout == "swizzled" else ceil_div(lanes, fmt.block[0]) * blocks
            within(scales, span((source.batch * matrix,), (1,)))
        if outer is not None and outer.scale is not None:
            count = {"tensor": 1, "amax": 1, "matrix amax": source.batch}.get(outer.mode, source.batch * lanes)
            within(outer.scale, span((count,), (1,)))


def whole_tiles(source: Matrices, height: int, width: int, layout: str) -> bool:
    """Whether it is known that the tiles of `tile_grid` divide each matrix, and that its rows are aligned."""
    if layout == "swizzled":
        height, width = max(height, 128), max(width, 128)
    divides = statically_true(source.rows % height == 0) and statically_true(source.cols % width == 0)
    return divides and source.align > 0


def format_constants(fmt: BlockFormat) -> dict:
    """The constexpr arguments that say what the numbers mean. Without block scales, BLOCK is only a unit of work."""
    return {
        "ELEMENT": fmt.element,
        "SCALE": fmt.scale or "none",
        "CONTRACT": fmt.contract,
        "BLOCK": fmt.block_cols if fmt.block else 32,
    }


def store_aligns(cols, fmt: BlockFormat, prefix: str = "") -> dict:
    """The constexpr arguments that say how wide stores may be: what divides a row of code pairs and one of scales."""
    return {
        prefix + "UNIT_ALIGN": power_of_two(code_pairs(cols, fmt), 16),
        prefix + "SCALE_ALIGN": power_of_two(ceil_div(cols, fmt.block_cols), 16),
    }


def column_aligns(rows, fmt: BlockFormat) -> dict:
    """`store_aligns` of the columns, for the kernels that store 8 bytes of codes at a time."""
    aligns = store_aligns(rows, fmt, "COLUMN_")
    aligns["COLUMN_UNIT_ALIGN"] = 2 if fmt.block is None else power_of_two(code_pairs(rows, fmt) // 8, 2)
    return aligns


def or_placeholder(tensor: torch.Tensor | None, placeholder: torch.Tensor) -> torch.Tensor:
    """The tensor or, where there is none, the placeholder.

    A kernel takes a tensor for every pointer, also for pointers that its constants leave unused.
    """
    return placeholder if tensor is None else tensor


@dataclass(frozen=True)
class Outer:
    """The outer scales of a launch, as the kernels take them (`device.block_scales.outer_scales`).

    scale: float32 decode factors, given or to be written; None without outer scales.
    amax: the float32 bits (int32) that they are made from; any tensor where none is read.
    mode: the kernels' constexpr OUTER.
    """

    scale: torch.Tensor | None
    amax: torch.Tensor | None
    mode: str

    @property
    def computed(self) -> bool:
        """Whether a kernel has read the tensor for them."""
        return self.mode in ("amax", "row amax", "matrix amax")

    @property
    def constants(self) -> dict:
        """OUTER, and how many partial maxima the amax consists of."""
        return {"OUTER": self.mode, "PARTIAL_MAXIMA": self.amax.numel() if self.mode == "amax" else 1}

    def arguments(self, placeholder: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The pointers of the scale and of the amax."""
        return or_placeholder(self.scale, placeholder), or_placeholder(self.amax, placeholder)

    @property
    def result(self) -> torch.Tensor | None:
        """The scale in the shape that callers know.

        A scale of the tensor that is made here has the shape [1]: Inductor would fill an empty tensor without
        dimensions by a launch of its own.
        """
        return self.scale.view(()) if self.mode == "amax" else self.scale
