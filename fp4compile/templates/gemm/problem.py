"""What a scaled product is about: its operands as the kernels read them, its sizes, its epilogue.

Checks what a caller hands in. Works on real tensors, on fake ones, and on symbolic sizes.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from fp4compile import reference
from fp4compile._compat import statically_true
from fp4compile.formats import BlockFormat, compatible
from fp4compile.layouts import ceil_div, swizzled_numel
from fp4compile.reference import FLOATS
from fp4compile.targets import Target
from fp4compile.templates.device.epilogue import OPERANDS, Epilogue, with_epilogue
from fp4compile.templates.launch import target_of
from fp4compile.templates.quantize.views import power_of_two

COMPUTE = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Operand:
    """One operand as the kernels read it: contiguous [batch, rows, k], with the names of its constexpr arguments."""

    data: torch.Tensor
    scales: torch.Tensor | None
    outer: torch.Tensor | None
    fmt: BlockFormat | None
    swizzled: bool
    batch: tuple
    rows: int
    k: int

    @property
    def element(self) -> str:
        return "plain" if self.fmt is None else self.fmt.element

    @property
    def scale(self) -> str:
        return "none" if self.fmt is None or self.fmt.scale is None else self.fmt.scale

    @property
    def outer_kind(self) -> str:
        if self.outer is None:
            return "none"
        return "tensor" if self.outer.dim() == 0 else "row"

    @property
    def per_row(self):
        """Units in a row; elements of a plain operand."""
        width = self.data.shape[-1]
        return width // 2 if self.element in ("e4m3", "e5m2") else width

    @property
    def scales_batch(self):
        """Scale bytes of one matrix."""
        if self.scales is None:
            return 0
        blocks = ceil_div(self.k, self.fmt.block_cols)
        if self.swizzled:
            return swizzled_numel(self.rows, blocks)
        return ceil_div(self.rows, self.fmt.block[0]) * blocks

    def part(self, start: int, rows: int) -> "Operand":
        """Rows from `start` on, of a single matrix; start: a multiple of 128."""

        def cut(x, per):  # an entry for each `per` rows
            return x.view(-1, x.shape[-1]).narrow(0, start // per, ceil_div(rows, per))

        scales, outer = self.scales, self.outer
        if scales is not None and self.swizzled:  # by tiles of 128 rows
            tiles = ceil_div(ceil_div(self.k, self.fmt.block_cols), 4)
            scales = cut(scales.view(-1, 512 * tiles), 128).view(-1)
        elif scales is not None:
            scales = cut(scales, self.fmt.block[0])
        if outer is not None and outer.dim() > 0:
            outer = cut(outer, 1)
        return replace(self, data=cut(self.data, 1), scales=scales, outer=outer, batch=(), rows=rows)

    def align(self, step: int) -> int:
        """See `expand.load_units`: -1 where rows are whole steps of `step` units; of plain rows, words that touch."""
        if self.fmt is not None:
            return -1 if statically_true(self.per_row % step == 0) else 0
        limit = 16 // self.data.element_size()
        return power_of_two(self.data.shape[-1], limit) // 2

    def constants(self, name: str, step: int) -> dict:
        fields = {"ELEMENT": self.element, "SCALE": self.scale, "SWIZZLED": int(self.swizzled),
                  "SQUARE": int(self.fmt is not None and self.fmt.square), "OUTER": self.outer_kind,
                  "ALIGN": self.align(step)}  # fmt: skip
        return {f"{name}_{field}": value for field, value in fields.items()}


def operand_of(name: str, data, scales, outer, fmt: BlockFormat | None) -> Operand:
    if data.dim() < 2:
        raise ValueError(f"{name}: expected two dimensions or more, got shape {tuple(data.shape)}")
    *batch, rows, width = data.shape
    if fmt is None:
        if data.dtype not in FLOATS:
            raise TypeError(f"{name}: a plain operand is bfloat16, float16 or float32, got {data.dtype}")
        if scales is not None:
            raise ValueError(f"{name}_scales: a plain operand has no block scales")
    elif data.dtype != fmt.data_dtype:
        raise TypeError(f"{name}: data of format {fmt.name} are {fmt.data_dtype}, got {data.dtype}")
    k = 2 * width if fmt is not None and fmt.packed else width
    swizzled = False
    if fmt is not None and fmt.scale is None:
        scales = None
    elif fmt is not None:
        swizzled = _check_scales(name, scales, fmt, batch, rows, k)
        scales = _aligned(scales.contiguous().view(torch.uint8))
    if outer is not None:
        if outer.dtype != torch.float32 or (outer.dim() > 0 and tuple(outer.shape) != (*batch, rows, 1)):
            raise ValueError(f"{name}_outer: expected float32 of shape () or {(*batch, rows, 1)}, "
                             f"got {outer.dtype} of shape {tuple(outer.shape)}")  # fmt: skip
        outer = outer.contiguous()
    if fmt is not None and not fmt.packed:
        data = data.view(torch.uint8)
        if not statically_true(width % 2 == 0):  # two codes make a unit
            data = F.pad(data, (0, width % 2))
    data = data.contiguous()
    return Operand(_aligned(data), scales, outer, fmt, swizzled, tuple(batch), rows, k)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, where need be copied to where 16 bytes can be read at a time."""
    return x if statically_true(x.storage_offset() * x.element_size() % 16 == 0) else x.clone()


def _check_scales(name: str, scales, fmt: BlockFormat, batch, rows, k) -> bool:
    """Whether the scales are swizzled. Raises ValueError if they are missing or do not fit the data."""
    if scales is None:
        raise ValueError(f"{name}_scales: format {fmt.name} needs block scales")
    blocks = ceil_div(k, fmt.block_cols)
    swizzled = scales.dim() == len(batch) + 1
    linear = (*batch, ceil_div(rows, fmt.block[0]), blocks)
    expected = (*batch, swizzled_numel(rows, blocks)) if swizzled else linear
    if scales.dtype != fmt.scale_dtype or tuple(scales.shape) != expected:
        raise ValueError(f"{name}_scales: expected {fmt.scale_dtype} of shape {linear} (linear) or "
                         f"{(*batch, swizzled_numel(rows, blocks))} (swizzled), "
                         f"got {scales.dtype} of shape {tuple(scales.shape)}")  # fmt: skip
    return swizzled


def compute_type(a: Operand, b: Operand) -> str:
    """The type that holds every value of both operands: see `expand`."""
    plain = [operand.data.dtype for operand in (a, b) if operand.fmt is None]
    if "e8m0" in (a.scale, b.scale):
        return "fp32" if any(dtype != torch.bfloat16 for dtype in plain) else "bf16"
    return COMPUTE[plain[0]] if plain else "fp16"


@dataclass(frozen=True)
class Problem:
    """A product as it is launched: [batches, m, k] x [batches or 1, n, k]."""

    left: Operand
    right: Operand
    bias: torch.Tensor | None
    out_dtype: torch.dtype
    target: Target
    batches: int
    m: int
    n: int
    k: int
    b_batched: bool
    shape: tuple
    epilogue: Epilogue | None = None

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.out_dtype if self.epilogue is None else self.epilogue.dtype

    def empty(self) -> torch.Tensor:
        return self.left.data.new_empty((self.batches, self.m, self.n), dtype=self.stored_dtype)

    def empty_sums(self, split: int) -> torch.Tensor:
        return self.left.data.new_empty((split, self.batches, self.m, self.n), dtype=torch.float32)

    @property
    def rescale_constants(self) -> dict:
        return {"A_OUTER": self.left.outer_kind, "B_OUTER": self.right.outer_kind,
                "BIAS": int(self.bias is not None), "B_BATCHED": int(self.b_batched)}  # fmt: skip

    def rescale_pointers(self, unused: torch.Tensor) -> list:
        return [unused if t is None else t for t in (self.left.outer, self.right.outer, self.bias)]

    def rows(self, start: int, count: int) -> "Problem":
        """The product of some rows of A, of one matrix; start: a multiple of 128."""
        return replace(self, left=self.left.part(start, count), m=count, epilogue=self._epilogue_of(0, start, count))

    def columns(self, start: int, count: int) -> "Problem":
        """The product with some rows of B, of one matrix: columns of the result; start: a multiple of 128."""
        bias = None if self.bias is None else self.bias.narrow(0, start, count)
        right = self.right.part(start, count)
        return replace(self, right=right, bias=bias, n=count, epilogue=self._epilogue_of(1, start, count))

    def _epilogue_of(self, dim: int, start: int, count: int) -> Epilogue | None:
        """The epilogue with those parts of its operands, [m, n] or [n], that belong to a part of the result."""

        def cut(x):
            if x.numel() == self.n:
                return x.view(-1).narrow(0, start, count) if dim == 1 else x
            return x.view(self.m, self.n).narrow(dim, start, count)

        epilogue = self.epilogue
        return None if epilogue is None else replace(epilogue, operands=tuple(map(cut, epilogue.operands)))

    def with_epilogue(self, kernel):
        return kernel if self.epilogue is None else with_epilogue(kernel, self.epilogue.text)

    def epilogue_pointers(self, unused: torch.Tensor) -> list:
        operands = () if self.epilogue is None else self.epilogue.operands
        return [*operands, *[unused] * (OPERANDS - len(operands))]

    @property
    def block(self) -> int:
        block = max(operand.fmt.block_cols for operand in (self.left, self.right) if operand.fmt is not None)
        return block if block > 1 else 32  # without block scales only a unit of work


def problem_of(a, a_scales, a_outer, a_fmt, b, b_scales, b_outer, b_fmt, bias, out_dtype) -> Problem:
    """The problem of the arguments of `scaled_mm`. Raises ValueError or TypeError, naming one that does not fit."""
    if a_fmt is not None and b_fmt is not None and not compatible(a_fmt, b_fmt):
        raise ValueError(f"formats {a_fmt.name} and {b_fmt.name} cannot be multiplied: scale types or blocks differ")
    left = operand_of("a", a, a_scales, a_outer, a_fmt)
    right = operand_of("b", b, b_scales, b_outer, b_fmt)
    shared = not right.batch and bool(left.batch)
    if not shared and left.batch != right.batch:
        raise ValueError(f"batch dimensions differ: a has {left.batch}, b has {right.batch}")
    if out_dtype not in FLOATS:
        raise ValueError(f"out_dtype={out_dtype}: allowed are bfloat16, float16, float32")
    k = reference.contraction(left.k, a_fmt, right.k, b_fmt)
    n = right.rows
    reference.check_bias(bias, n)
    if bias is not None:
        bias = bias.contiguous()
    for name, tensor in (("b", b), ("a_scales", a_scales), ("b_scales", b_scales), ("a_outer", a_outer),
                         ("b_outer", b_outer), ("bias", bias)):  # fmt: skip
        if tensor is not None and tensor.device != a.device:
            raise ValueError(f"{name}: is on {tensor.device}, a on {a.device}")
    batches, m = 1, left.rows
    for size in left.batch:
        batches = batches * size
    linear_rows = not (left.swizzled or (a_fmt is not None and a_fmt.square))
    if shared and (linear_rows or statically_true(batches == 1)):  # one product of all rows
        batches, m = 1, batches * m
    shape = (*left.batch, left.rows, n)
    return Problem(left, right, bias, out_dtype, target_of(a.device), batches, m, n, k, not shared, shape)
