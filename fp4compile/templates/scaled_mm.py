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
from fp4compile.templates.expand_matrix import expand_matrix
from fp4compile.templates.launch import launch, target_of
from fp4compile.templates.quantize import power_of_two
from fp4compile.templates.scaled_mm_native import native, native_arguments, scaled_mm_native
from fp4compile.templates.scaled_mm_tiles import reduce_splits, scaled_mm_tiles

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Rows of A from which on the library's product of expanded operands is the faster one. On an H200 with N = K = 8192,
# 128 rows take 90 us so and 146 us (codes) to 191 us (plain A) in one kernel, 2048 rows 410 us and 870 us.
LIBRARY_ROWS = 65
# Decode, by A (codes or plain 16-bit) and rows: columns of B, units and warps of a step, stages, warps, and how many
# programs make splitting the contraction dimension unnecessary. Measured on an H200.
DECODE = {
    ("plain", 8): (32, 128, 4, 3, 4, 128), ("packed", 8): (32, 128, 4, 4, 4, 128),
    ("plain", 16): (32, 64, 4, 4, 4, 128), ("packed", 16): (32, 128, 2, 5, 2, 128),
    ("plain", 32): (64, 32, 4, 5, 4, 128), ("packed", 32): (64, 64, 4, 5, 4, 128),
    ("plain", 64): (128, 64, 1, 4, 4, 256), ("packed", 64): (128, 64, 1, 4, 8, 256),
}  # fmt: skip
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
    k = reference.contraction(left.k, a_fmt, right.k, b_fmt)
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
    problem = Problem(left, right, bias, out, batches, m, n, k, not shared)
    if native(a_fmt, b_fmt, left.swizzled and right.swizzled, target_of(a.device)):
        _native(problem)
    elif _use_library(problem):
        _library(problem)
    else:
        _tiles(problem)
    return out


@dataclass(frozen=True)
class Problem:
    """A product as it is launched: [batches, m, k] x [batches or 1, n, k]."""

    left: Operand
    right: Operand
    bias: torch.Tensor | None
    out: torch.Tensor
    batches: int
    m: int
    n: int
    k: int
    b_batched: bool

    @property
    def epilogue(self) -> dict:
        return {"A_OUTER": self.left.outer_kind, "B_OUTER": self.right.outer_kind,
                "BIAS": int(self.bias is not None), "B_BATCHED": int(self.b_batched)}  # fmt: skip

    @property
    def epilogue_pointers(self) -> list:
        return [self.out if t is None else t for t in (self.left.outer, self.right.outer, self.bias)]

    @property
    def block(self) -> int:
        block = max(operand.fmt.block_cols for operand in (self.left, self.right) if operand.fmt is not None)
        return block if block > 1 else 32  # without block scales only a unit of work


def _native(p: Problem) -> None:
    """The product by the matrix units' own block-scaled instruction."""
    target = target_of(p.out.device)
    integers, constants = native_arguments(p.m, p.n, p.k, p.left.fmt, p.right.fmt, target)
    a_outer, b_outer, bias = p.epilogue_pointers
    launch(
        scaled_mm_native, ceil_div(p.m, constants["BM"]) * ceil_div(p.n, constants["BN"]) * p.batches,
        p.left.data, p.left.scales, a_outer, p.right.data, p.right.scales, b_outer, bias, p.out, *integers,
        **constants, **p.epilogue, ISA=target.isa,
    )  # fmt: skip


def _use_library(p: Problem) -> bool:
    """Whether both operands are expanded to 16 bits first: of large matrices the library's product is faster."""
    target = target_of(p.out.device)
    large = known(p.m >= LIBRARY_ROWS) and known(p.n >= 512)
    return target.sm > 0 and compute_type(p.left, p.right) != "fp32" and p.batches == 1 and large


def _library(p: Problem) -> None:
    """The product by the library, of operands expanded to 16 bits.

    Where values may be too small for bf16 the expansion notes it on the device; the tiles are then computed again.
    """
    dtype = torch.float16 if compute_type(p.left, p.right) == "fp16" else torch.bfloat16
    inexact = p.out.new_zeros((), dtype=torch.int32)
    left = _expanded(p.left, dtype, inexact, p.m, p.k)
    right = _expanded(p.right, dtype, inexact, p.n, p.k).t()
    out = p.out.view(p.m, p.n)
    plain = p.left.outer is None and p.right.outer is None and dtype == p.out.dtype
    with torch.autocast("cuda", enabled=False):  # it would cast fp16 operands to bf16
        if plain and p.bias is None:
            torch.mm(left, right, out=out)
        elif plain and p.bias.dtype == dtype:
            torch.addmm(p.bias, left, right, out=out)
        else:
            _rescale(p, torch.mm(left, right, out_dtype=torch.float32), 1)
    if "e8m0" in (p.left.scale, p.right.scale):
        _tiles(p, wanted=inexact)


def _expanded(x: Operand, dtype, inexact, rows, k) -> torch.Tensor:
    """[rows, k] in dtype, without the outer scale."""
    data = x.data.view(rows, -1)
    if x.fmt is None:
        return data
    constants = {key.removeprefix("A_"): value for key, value in x.constants("A", 2048).items()}
    del constants["OUTER"]
    tiles = ceil_div(x.per_row, 2048)
    out = data.new_empty((rows, 2 * x.per_row), dtype=dtype)
    block = x.fmt.block_cols if x.fmt.block else 32
    launch(expand_matrix, rows * tiles, data, out if x.scales is None else x.scales, out, inexact, rows,
           ceil_div(x.k, block), x.per_row, tiles, num_warps=4, BLOCK=block, ROWS=1, UNITS=2048,
           ISA=target_of(data.device).isa, **constants)  # fmt: skip
    return out[:, :k]


def _tiles(p: Problem, wanted: torch.Tensor | None = None) -> None:
    """The product in one kernel (two with `SPLIT`); with `wanted`, only if the int32 there is set."""
    target = target_of(p.out.device)
    compute = compute_type(p.left, p.right)
    unit_bytes = [{"e2m1": 1, "plain": 2 * x.data.element_size()}.get(x.element, 2) for x in (p.left, p.right)]
    tile = tile_of(p.m, p.n, p.k, compute, *unit_bytes, target.sm)
    split = tile.pop("SPLIT")
    num_warps = tile.pop("num_warps")
    step = tile["UNITS"] * tile["WARPS"]
    constants = {**p.left.constants("A", step), **p.right.constants("B", step), **p.epilogue, **tile, "SPLIT": split,
                 "BLOCK": p.block, "COMPUTE": compute, "GUARD": int(wanted is not None), "ISA": target.isa}  # fmt: skip
    none = p.out  # a pointer that is not read
    a_outer, b_outer, bias = p.epilogue_pointers
    sums = p.out if split == 1 else p.out.new_empty((split, p.batches, p.m, p.n), dtype=torch.float32)
    launch(
        scaled_mm_tiles, ceil_div(p.m, tile["BM"]) * ceil_div(p.n, tile["BN"]) * p.batches * split,
        p.left.data, none if p.left.scales is None else p.left.scales, a_outer,
        p.right.data, none if p.right.scales is None else p.right.scales, b_outer, bias, sums,
        none if wanted is None else wanted, p.m, p.n, ceil_div(p.k, 2), ceil_div(p.k, p.block),
        p.left.per_row, p.right.per_row, p.left.scales_batch, p.right.scales_batch,
        num_warps=num_warps, **constants,
    )  # fmt: skip
    if split > 1:
        _rescale(p, sums, split)


def _rescale(p: Problem, sums: torch.Tensor, split: int) -> None:
    """out from float32 sums [split, batches, m, n]."""
    cols = 512
    launch(reduce_splits, p.batches * p.m * ceil_div(p.n, cols), sums, *p.epilogue_pointers, p.out,
           p.batches, p.m, p.n, num_warps=4, SPLIT=split, COLS=cols, ISA=target_of(p.out.device).isa,
           **p.epilogue)  # fmt: skip


def tile_of(m, n, k, compute: str, a_bytes: int, b_bytes: int, sm: int) -> dict:
    """Tile and launch of `scaled_mm_tiles`; *_bytes: of a unit."""

    def tile(bm, bn, units, warps, stages, num_warps, split=1):
        return {"BM": bm, "BN": bn, "UNITS": units, "WARPS": warps, "SPLIT": split, "GROUP": 8, "STAGES": stages,
                "num_warps": num_warps}  # fmt: skip

    if sm == 0:
        if known(m <= 8):  # in the interpreter as well
            return tile(8, 16, 16, 2, 2, 4, split=2)
        return tile(16, 16, 32, 1, 2, 4)
    if compute == "fp32":
        return tile(32, 32, 16, 1, 2, 4)
    small = sm < 80 or sm in (86, 89, 120, 121)  # about 100 KB of shared memory
    if known(m <= 64):
        bm = 8 if known(m <= 8) else 16 if known(m <= 16) else 32 if known(m <= 32) else 64
        bn, units, warps, stages, num_warps, programs = DECODE["packed" if a_bytes == 1 else "plain", bm]
        while bn > 16 and bm < 64 and not known(ceil_div(n, bn) >= 128):
            bn //= 2
        if b_bytes > 1:  # more registers an element
            units //= 2
        budget = 90_000 if small else 216_000
        while units > 32 and (stages - 1) * warps * units * (bm * a_bytes + bn * b_bytes) > budget:
            units //= 2
        split = 1
        while split < 8 and known(ceil_div(n, bn) * split < programs) and known(k >= 4 * split * units * warps):
            split *= 2
        return tile(bm, bn, units, warps, stages, num_warps, split)
    return tile(128, 128, 32, 1, 3, 8)
