"""Multiply quantised CUDA tensors: which kernel, with what tile, on what view of the operands.

`scaled_mm` allocates its output and launches kernels; it runs eagerly and under tracing, on concrete and on symbolic
sizes. The product is that of `reference.scaled_mm`, up to the order of the float32 sums.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fp4compile import reference
from fp4compile._compat import known
from fp4compile.formats import BlockFormat, compatible
from fp4compile.layouts import ceil_div, swizzled_numel
from fp4compile.templates.launch import launch, target_of
from fp4compile.templates.quantize import power_of_two
from fp4compile.templates.scaled_mm_tiles import reduce_splits, scaled_mm_tiles

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
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

    def align(self, step: int) -> int:
        """See `expand.load_units`: -1 where rows are whole steps of `step` units; of plain rows, words that touch."""
        if self.fmt is not None:
            return -1 if known(self.per_row % step == 0) else 0
        limit = 16 // self.data.element_size()
        return power_of_two(self.data.shape[-1], limit) // 2

    def constants(self, name: str, step: int) -> dict:
        fields = {"ELEMENT": self.element, "SCALE": self.scale, "SWIZZLED": int(self.swizzled),
                  "SQUARE": int(self.fmt is not None and self.fmt.square), "OUTER": self.outer_kind,
                  "ALIGN": self.align(step)}  # fmt: skip
        return {f"{name}_{field}": value for field, value in fields.items()}


def _operand(name: str, data, scales, outer, fmt: BlockFormat | None) -> Operand:
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
        scales = scales.contiguous().view(torch.uint8)
    if outer is not None:
        if outer.dtype != torch.float32 or (outer.dim() > 0 and tuple(outer.shape) != (*batch, rows, 1)):
            raise ValueError(f"{name}_outer: expected float32 of shape () or {(*batch, rows, 1)}, "
                             f"got {outer.dtype} of shape {tuple(outer.shape)}")  # fmt: skip
        outer = outer.contiguous()
    if fmt is not None and not fmt.packed:
        data = data.view(torch.uint8)
        if not known(width % 2 == 0):  # two codes make a unit
            data = F.pad(data, (0, width % 2))
    data = data.contiguous()
    if fmt is None and (data.storage_offset() * data.element_size()) % 16:
        data = data.clone()
    return Operand(data, scales, outer, fmt, swizzled, tuple(batch), rows, k)


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


def scaled_mm(a, a_scales, a_outer, a_fmt, b, b_scales, b_outer, b_fmt, bias, out_dtype) -> torch.Tensor:
    """`reference.scaled_mm` on the GPU: [..., M, K] x [..., N, K] (or [N, K] for every batch) -> [..., M, N].

    Raises ValueError or TypeError, naming the argument, for operands, scales or a bias that do not fit.
    """
    if a_fmt is None and b_fmt is None:
        return reference.scaled_mm(a, a_scales, a_outer, a_fmt, b, b_scales, b_outer, b_fmt, bias, out_dtype)
    if a_fmt is not None and b_fmt is not None and not compatible(a_fmt, b_fmt):
        raise ValueError(f"formats {a_fmt.name} and {b_fmt.name} cannot be multiplied: scale types or blocks differ")
    left = _operand("a", a, a_scales, a_outer, a_fmt)
    right = _operand("b", b, b_scales, b_outer, b_fmt)
    shared = not right.batch and bool(left.batch)
    if not shared and left.batch != right.batch:
        raise ValueError(f"batch dimensions differ: a has {left.batch}, b has {right.batch}")
    if out_dtype not in FLOATS:
        raise ValueError(f"out_dtype={out_dtype}: allowed are bfloat16, float16, float32")
    k = reference._contraction(left.k, a_fmt, right.k, b_fmt)
    n = right.rows
    if bias is not None:
        if bias.dtype not in FLOATS or tuple(bias.shape) != (n,):
            raise ValueError(f"bias: expected floating point of shape ({n},), got {bias.dtype} of {tuple(bias.shape)}")
        bias = bias.contiguous()
    for name, tensor in (("b", b), ("a_scales", a_scales), ("b_scales", b_scales), ("a_outer", a_outer),
                         ("b_outer", b_outer), ("bias", bias)):  # fmt: skip
        if tensor is not None and tensor.device != a.device:
            raise ValueError(f"{name}: is on {tensor.device}, a on {a.device}")
    batches, m = 1, left.rows
    for size in left.batch:
        batches = batches * size
    linear_rows = not (left.swizzled or (a_fmt is not None and a_fmt.square))
    if shared and (linear_rows or known(batches == 1)):  # one product of all rows
        batches, m = 1, batches * m
    out = a.new_empty((*left.batch, left.rows, n), dtype=out_dtype)
    if known(out.numel() == 0):
        return out
    _tiles(left, right, bias, out, batches, m, n, k, b_batched=not shared)
    return out


def _tiles(left: Operand, right: Operand, bias, out, batches, m, n, k, b_batched: bool) -> None:
    target = target_of(out.device)
    compute = compute_type(left, right)
    tile = tile_of(m, n, k, compute, target.sm)
    split = tile.pop("SPLIT")
    num_warps = tile.pop("num_warps")
    step = tile["UNITS"] * tile["WARPS"]
    outer = {"A_OUTER": left.outer_kind, "B_OUTER": right.outer_kind, "BIAS": int(bias is not None),
             "B_BATCHED": int(b_batched)}  # fmt: skip
    block = max(operand.fmt.block_cols for operand in (left, right) if operand.fmt is not None)
    block = block if block > 1 else 32
    constants = {**left.constants("A", step), **right.constants("B", step), **outer, **tile, "SPLIT": split,
                 "BLOCK": block, "COMPUTE": compute, "ISA": target.isa}  # fmt: skip
    none = out  # a pointer that is not read
    pointers = [none if t is None else t for t in (left.outer, right.outer, bias)]
    sums = out if split == 1 else out.new_empty((split, batches, m, n), dtype=torch.float32)
    programs = ceil_div(m, tile["BM"]) * ceil_div(n, tile["BN"]) * batches * split
    launch(
        scaled_mm_tiles, programs,
        left.data, none if left.scales is None else left.scales, pointers[0],
        right.data, none if right.scales is None else right.scales, pointers[1], pointers[2], sums,
        m, n, ceil_div(k, 2), ceil_div(k, block), left.per_row, right.per_row, left.scales_batch, right.scales_batch,
        num_warps=num_warps, **constants,
    )  # fmt: skip
    if split > 1:
        cols = 512
        launch(reduce_splits, batches * m * ceil_div(n, cols), sums, *pointers, out, batches, m, n,
               num_warps=4, SPLIT=split, COLS=cols, ISA=target.isa, **outer)  # fmt: skip


def tile_of(m, n, k, compute: str, sm: int) -> dict:
    """Tile and launch of `scaled_mm_tiles`."""
    if sm == 0:
        return {"BM": 16, "BN": 16, "UNITS": 32, "WARPS": 1, "SPLIT": 1, "GROUP": 8, "STAGES": 2, "num_warps": 4}
    if compute == "fp32":
        return {"BM": 32, "BN": 32, "UNITS": 16, "WARPS": 1, "SPLIT": 1, "GROUP": 8, "STAGES": 2, "num_warps": 4}
    if known(m <= 16):
        return {"BM": 16, "BN": 16, "UNITS": 64, "WARPS": 4, "SPLIT": 1, "GROUP": 8, "STAGES": 3, "num_warps": 4}
    return {"BM": 128, "BN": 128, "UNITS": 32, "WARPS": 1, "SPLIT": 1, "GROUP": 8, "STAGES": 3, "num_warps": 8}
