"""The eager interface: quantise, multiply and dequantise tensors outside of any compiled graph."""

from dataclasses import dataclass

import torch

from fp4compile import formats
from fp4compile.formats import BlockFormat
from fp4compile.layouts import ceil_div
from fp4compile.ops import FLOAT_DTYPES, check_layout


@dataclass(frozen=True, eq=False)  # no `==`: the comparison of two tensors has no truth value
class BlockScaled:
    """A quantised tensor: codes, scales and what they mean. value = element * block scale * outer.

    data: the codes, with the quantised dimension last and padded to whole blocks: uint8 with two codes a byte (E2M1),
        float8_e4m3fn or float8_e5m2.
    scales: the block scales, float8_e4m3fn or float8_e8m0fnu; None for a format without block scales. In the layout
        "linear": [..., rows, blocks] (square blocks: [..., rows / block, blocks]); "swizzled": one flat run for each
        matrix.
    outer: the float32 factor that decodes, [] or [..., rows, 1]; None means 1.
    format: the `BlockFormat`, see `formats`.
    shape: the shape of the represented values, with the quantised dimension last and without padding.
    layout: where the block scales lie, "linear" or "swizzled", see `layouts`.
    """

    data: torch.Tensor
    scales: torch.Tensor | None
    outer: torch.Tensor | None
    format: BlockFormat
    shape: tuple[int, ...]
    layout: str = "linear"

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The represented values, of shape `shape`. dtype: bf16, fp16 or fp32; ValueError for another one."""
        _check_float("dtype", dtype)
        return torch.ops.fp4compile.dequantize(
            self.data, self.scales, self.outer, self.format.name, self.shape[-1], dtype
        )


def quantize(
    x: torch.Tensor,
    format: str | BlockFormat,
    *,
    dim: int = -1,
    outer: torch.Tensor | None = None,
    layout: str = "linear",
    seed: torch.Tensor | None = None,
    hadamard: bool = False,
) -> BlockScaled:
    """Quantise a tensor to a block format.

    x: bf16, fp16 or fp32, of one dimension or more, any strides and any size; it is padded with zeros to whole blocks.
    format: a name of `formats.NAMED`, a spec string or a `BlockFormat`.
    dim: the dimension to quantise along. It is the last dimension of the result: dim=0 of a matrix gives the codes of
        the transposed matrix, whose blocks are columns of x (32x1).
    outer: a static factor that decodes, float32, [] (or [..., rows, 1] where the format scales rows); None computes it.
    layout: "linear" or "swizzled": where the block scales of the result lie.
    seed: int64 [], to round E2M1 elements stochastically; the same seed gives the same codes. None rounds to nearest.
    hadamard: quantise the random Hadamard transform of x along dim, in groups of 16 (NVFP4 blocks of 1x16). The
        result represents the transformed values, and its shape has whole groups.

    Returns a `BlockScaled`, which is not differentiable.

    Raises TypeError for an argument of the wrong type, and for an x that is not bf16, fp16 or fp32; ValueError for an
    unknown format or layout, a dim out of range, an outer scale or a seed of wrong shape, dtype or device, and for a
    seed or a transform that the format does not support.
    """
    fmt = formats.get(format)
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: expected a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"x: dtype {x.dtype} cannot be quantised; allowed are bfloat16, float16, float32")
    if not isinstance(dim, int):
        raise TypeError(f"dim: expected an int, got {type(dim).__name__}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim={dim}: x has {x.dim()} dimensions")
    check_layout(layout)
    lead = list(x.shape)
    k = lead.pop(dim)
    if outer is not None:
        _check_outer(outer, fmt, lead, x.device)
    if seed is not None and (not isinstance(seed, torch.Tensor) or seed.device != x.device):
        raise TypeError(f"seed: expected an int64 torch.Tensor on {x.device}, got {seed!r}")
    data, scales, computed = torch.ops.fp4compile.quantize(
        x.detach(), fmt.name, dim, outer=outer, layout=layout, seed=seed, hadamard=hadamard
    )
    if hadamard:
        k = ceil_div(k, fmt.block_cols) * fmt.block_cols
    if outer is None and fmt.outer is not None:
        outer = computed
    return BlockScaled(data, scales if fmt.scale else None, outer, fmt, (*lead, k), layout)


def scaled_mm(
    a: BlockScaled, b: BlockScaled, bias: torch.Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """A @ B^T of two quantised operands: [..., M, K] x [..., N, K] -> [..., M, N] in out_dtype.

    The float32 product is multiplied once by a.outer * b.outer, bias is added, and the result is cast.

    a, b: both quantised along K. Operands of different formats can be multiplied if their scale types and block lengths
        are equal (such as MXFP8 with MXFP4, or NVFP4 blocks of 1x16 with blocks of 16x16).
    bias: [N], bf16, fp16 or fp32; None adds nothing.
    out_dtype: bf16, fp16 or fp32.

    Raises TypeError for an operand that is no `BlockScaled` or a bias that is no tensor of these dtypes, ValueError
    for shapes, formats, devices, a bias or an out_dtype that do not fit.
    """
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, BlockScaled):
            raise TypeError(f"{name}: expected a BlockScaled, got {type(operand).__name__}")
        if len(operand.shape) < 2:
            raise ValueError(f"{name}: expected two dimensions or more, got shape {operand.shape}")
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(f"contraction dimensions differ: a has {a.shape[-1]}, b has {b.shape[-1]}")
    if a.shape[:-2] != b.shape[:-2]:
        raise ValueError(f"batch dimensions differ: a has {a.shape[:-2]}, b has {b.shape[:-2]}")
    if not formats.compatible(a.format, b.format):
        raise ValueError(
            f"formats {a.format.name} and {b.format.name} cannot be multiplied: scale types or block lengths differ"
        )
    if a.data.device != b.data.device:
        raise ValueError(f"devices differ: a is on {a.data.device}, b on {b.data.device}")
    if bias is not None:
        _check_bias(bias, b.shape[-2], a.data.device)
    _check_float("out_dtype", out_dtype)
    return torch.ops.fp4compile.scaled_mm(
        a.data, a.scales, a.outer, a.format.name, b.data, b.scales, b.outer, b.format.name, bias, out_dtype
    )


def _check_bias(bias: torch.Tensor, n: int, device: torch.device) -> None:
    if not isinstance(bias, torch.Tensor):
        raise TypeError(f"bias: expected a torch.Tensor, got {type(bias).__name__}")
    if bias.dtype not in FLOAT_DTYPES:
        raise TypeError(f"bias: dtype {bias.dtype}; allowed are bfloat16, float16, float32")
    if bias.shape != (n,) or bias.device != device:
        raise ValueError(f"bias: expected shape ({n},) on {device}, got {tuple(bias.shape)} on {bias.device}")


def _check_float(name: str, dtype: torch.dtype) -> None:
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name}={dtype}: allowed are bfloat16, float16, float32")


def _check_outer(outer: torch.Tensor, fmt: BlockFormat, lead: list[int], device: torch.device) -> None:
    if not isinstance(outer, torch.Tensor):
        raise TypeError(f"outer: expected a float32 torch.Tensor, got {type(outer).__name__}")
    if fmt.outer is None:
        raise ValueError(f"outer: format {fmt.name} has no outer scale")
    allowed = (*lead, 1) if fmt.outer == "row" else ()
    if outer.dtype != torch.float32 or outer.device != device or tuple(outer.shape) != allowed:
        raise ValueError(
            f"outer: expected float32 of shape {allowed} on {device}, "
            f"got {outer.dtype} of shape {tuple(outer.shape)} on {outer.device}"
        )
