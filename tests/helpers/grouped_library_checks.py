"""What torch and MSLK ask of the arguments of a block-scaled grouped product, in Python, and what they compute of them.

`check` replays the checks of `_scaled_grouped_mm_v2` for CUDA in torch's GroupedBlas.cpp, as of torch 2.11 to 2.13 and
of its main branch in autumn 2026, and those of MSLK's `mx8mx8bf16_grouped_mm` and `f4f4bf16_grouped_mm` behind it:
where versions differ, the strictest. To them come the alignments of the Tensor Memory Accelerator. Only what a product
of this package can be is accepted: groups of rows, NVFP4 with two levels of scales or MXFP8, results in bfloat16.

`check_ends` and `product` replay what MSLK does on the device (grouped_common.cuh): its assertions on the offsets, and
where it finds the codes, the scales and the result of a group. torch up to 2.13 has no fake implementation of the op.
"""

from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp4compile.formats import formats, reference
from fp4compile.formats.layouts import from_swizzled
from fp4compile.formats.operand import Operand
from fp4compile.hardware import Target
from fp4compile.ops.matmul import SCALED_MM_OPAQUE
from fp4compile.templates.choose import to_time
from fp4compile.templates.gemm import library
from fp4compile.templates.launch import dry_run
from fp4compile.templates.multiply import call_of
from tests.helpers.arguments import of_groups, opaque
from tests.helpers.library_checks import BLOCK_1X16, BLOCK_1X32, FLOAT4, RECIPES, TENSOR_WISE, named, require, up

V2 = torch.ops.aten._scaled_grouped_mm_v2.default
_SWIZZLED, _LINEAR = 1, 0  # at::blas::SwizzleType


class Calls(TorchDispatchMode):
    """Runs the op around the library as a GPU would, and collects what torch's op is called with.

    answer: computes the result of a call; None leaves it uninitialised.
    """

    def __init__(self, answer=None):
        super().__init__()
        self.found, self.answer = [], answer

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is SCALED_MM_OPAQUE:
            with self:
                return opaque(*args, **kwargs or {})
        if func is V2:
            arguments = named(func, args, kwargs or {})
            self.found.append(arguments)
            if self.answer is not None:
                return self.answer(arguments)
            return args[0].new_empty((args[0].shape[0], args[1].shape[2]), dtype=arguments["out_dtype"])
        return func(*args, **(kwargs or {}))


def calls_of(a, b, offs, rows, out_dtype=torch.bfloat16, sm=100):
    """The arguments of torch's op in a product of tensors without values: none where the library is no candidate."""
    call = call_of(of_groups(a, b, offs, rows, out_dtype), Target(sm))
    if library.BLOCK_SCALED.name not in [choice.kernel for choice in to_time(call.problem)]:
        return []
    return calls_whatever_is_served(call)


def calls_whatever_is_served(call):
    with dry_run(call.problem.target), Calls() as calls:
        library.BLOCK_SCALED.run(call, None)
    return calls.found


def check(arguments, sm=100):
    """Raise Refused for arguments that torch or MSLK would refuse on a GPU of that compute capability."""
    a, b, offs = arguments["self"], arguments["mat2"], arguments["offs"]
    require(sm == 100, "block-scaled kernels for compute capability 10.0")
    require(a.dim() == 2 and b.dim() == 3, f"{a.dim()} and {b.dim()} dimensions")
    require(a.shape[-1] == b.shape[-2] and b.shape[0] == offs.shape[0], f"shapes {a.shape}, {b.shape}, {offs.shape}")
    require(all(size % 16 == 0 for size in (a.shape[1], b.shape[1], b.shape[2])), f"% 16: {a.shape} x {b.shape}")
    require(a.numel() and b.numel(), "an empty matrix")
    require(a.is_contiguous() and b.transpose(-2, -1).is_contiguous(), f"strides {a.stride()}, {b.stride()}")
    require(offs.dim() == 1 and offs.dtype == torch.int32 and offs.is_contiguous(), "offsets")
    require(offs.shape[0] <= 256, "more threads than there are registers for, if each has as many as can be")
    require(arguments["bias"] is None, "a bias")
    require(arguments["out_dtype"] == torch.bfloat16, f"a result of {arguments['out_dtype']}")
    require(not arguments["contraction_dim"] and not arguments["use_fast_accum"], "contraction_dim, use_fast_accum")
    scales = [_recipe(arguments, side, x) for side, x in (("a", a), ("b", b))]
    require(a.dtype == b.dtype, f"{a.dtype} x {b.dtype}")
    _check_scales(a, b, *scales)
    if a.dtype == FLOAT4:
        outer = arguments["scale_a"][1].mul(arguments["scale_b"][1])
        require(outer.shape == offs.shape and outer.is_contiguous(), f"outer scales {tuple(outer.shape)}")
    for x in (a, b, *scales):
        require(x.storage_offset() * x.itemsize % 16 == 0, "what does not begin at whole 16 bytes")


def _recipe(arguments, side, x):
    """The block scales of a side, of the recipe that its dtype has."""
    recipe = [RECIPES[number] for number in arguments[f"recipe_{side}"]]
    scales, swizzle = arguments[f"scale_{side}"], list(arguments[f"swizzle_{side}"])
    if x.dtype == FLOAT4:
        require(recipe == [BLOCK_1X16, TENSOR_WISE] and swizzle == [_SWIZZLED, _LINEAR], f"recipe {recipe} {swizzle}")
        dtypes = torch.float8_e4m3fn, torch.float32
    else:
        require(x.dtype == torch.float8_e4m3fn, f"dtype {x.dtype}")
        require(recipe == [BLOCK_1X32] and swizzle == [_SWIZZLED], f"recipe {recipe} {swizzle}")
        dtypes = (torch.float8_e8m0fnu,)
    require(tuple(scale.dtype for scale in scales) == dtypes, f"scales of {[scale.dtype for scale in scales]}")
    return scales[0]


def _check_scales(a, b, a_scales, b_scales):
    sizes = _sizes(a)
    columns, groups, n = sizes.columns, b.shape[0], b.shape[2]
    require(sizes.k % (16 if a.dtype == FLOAT4 else 32) == 0, f"rows of {sizes.k} elements: no whole blocks")
    require(a_scales.is_contiguous() and b_scales.is_contiguous(), "scales that are not contiguous")
    require(a_scales.dim() == 2 and a_scales.shape[0] >= a.shape[0], f"scales of a: {tuple(a_scales.shape)}")
    require(a_scales.shape[1] == columns, f"scales of a: {tuple(a_scales.shape)}")  # read as flat memory
    require(tuple(b_scales.shape) == (groups, columns * up(n, 128)), f"scales of b: {tuple(b_scales.shape)}")


@dataclass(frozen=True)
class _Sizes:
    """Of a row of codes: elements, blocks, and columns of swizzled scales."""

    k: int
    blocks: int

    @property
    def columns(self):
        return up(self.blocks, 4)


def _sizes(a):
    k, block = (2 * a.shape[1], 16) if a.dtype == FLOAT4 else (a.shape[1], 32)
    return _Sizes(k, k // block)


def check_ends(arguments, ends):
    """What the device asserts of the offsets' values, and that the scales of each group lie inside their tensor.

    ends: list of int. An empty group is passed over; of all others, scales are read in tiles of 128 rows.
    """
    a, scales, row_tiles, start = arguments["self"], arguments["scale_a"][0], 0, 0
    for end in ends:
        require(end >= start, "offsets that decrease")
        if end > start:
            require(end <= a.shape[0], "an offset beyond the rows: the device asserts")
        row_tiles, start = row_tiles + up(end - start, 128) // 128, end
        require(row_tiles * 128 * _sizes(a).columns <= scales.numel(), "scales beyond their tensor")


def product(arguments):
    """What the library computes, on a CPU; rows of no group are NaN."""
    a, b, ends = arguments["self"], arguments["mat2"].transpose(-2, -1), arguments["offs"].tolist()
    check(arguments)
    check_ends(arguments, ends)
    fmt = formats.get("nvfp4_one_level" if a.dtype == FLOAT4 else "mxfp8")
    sizes, n = _sizes(a), b.shape[1]
    a_scales, b_scales = (arguments[name][0].flatten() for name in ("scale_a", "scale_b"))
    alpha = torch.ones(len(ends))
    if a.dtype == FLOAT4:
        alpha = arguments["scale_a"][1].mul(arguments["scale_b"][1])
    out = torch.full((a.shape[0], n), torch.nan)
    start = at = 0  # a row of A, and a byte of its scales
    for group, end in enumerate(ends):
        rows, of_matrix = up(end - start, 128), sizes.columns * up(n, 128)
        left = _linear(a_scales, at, end - start, sizes)
        right = _linear(b_scales, group * of_matrix, n, sizes)
        operands = (Operand(x.view(fmt.data_dtype), scales.contiguous(), None, fmt)
                    for x, scales in ((a[start:end], left), (b[group], right)))  # fmt: skip
        out[start:end] = reference.scaled_mm(*operands, None, torch.float32) * alpha[group]
        start, at = end, at + rows * sizes.columns
    return out.bfloat16()


def _linear(scales, at, rows, sizes):
    """The scales of a matrix of so many rows, swizzled from an element of flat memory on."""
    swizzled = scales[at : at + up(rows, 128) * sizes.columns]
    return from_swizzled(swizzled, up(rows, 128), sizes.columns)[:rows, : sizes.blocks]
