"""What torch and cuBLASLt ask of the arguments of a scaled product, in Python, and the calls that a product makes.

`check` replays the checks of `_scaled_mm` (v1) and `_scaled_mm_v2` for CUDA in torch's ScaledBlas.cpp, as of torch 2.11
to 2.13 and of its main branch in autumn 2026: where versions differ, the strictest. To them come the alignments that
cuBLASLt documents for FP8 and FP4 (16 bytes for pointers and leading dimensions, A transposed and B not). Only what a
product of this package can be is accepted: bfloat16, float16 or float32 results, block scales, row or tensor scales.

`calls_of` runs a product on meta or fake CUDA tensors and gives back what torch's two ops are called with. The fake
implementations that torch has of them check the arguments as well.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp4compile.hardware import Target
from fp4compile.ops.matmul import SCALED_MM_OPAQUE
from fp4compile.templates.launch import dry_run
from tests.helpers.arguments import opaque
from tests.helpers.multiplied import scaled_mm

V1, V2 = torch.ops.aten._scaled_mm.default, torch.ops.aten._scaled_mm_v2.default
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOAT4 = torch.float4_e2m1fn_x2
TENSOR_WISE, ROW_WISE, BLOCK_1X16, BLOCK_1X32 = "tensor", "row", "1x16", "1x32"
BLOCK_1X128, BLOCK_128X128 = "1x128", "128x128"
RECIPES = dict(enumerate((TENSOR_WISE, ROW_WISE, BLOCK_1X16, BLOCK_1X32, BLOCK_1X128, BLOCK_128X128)))  # ScalingType
_SWIZZLED, _LINEAR = 1, 0  # at::blas::SwizzleType


class Refused(Exception):
    """A check fails; the message says which."""


def require(condition, what):
    if not condition:
        raise Refused(what)


class Calls(TorchDispatchMode):
    def __init__(self, torchs_fakes):
        super().__init__()
        self.found, self.torchs_fakes = [], torchs_fakes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is SCALED_MM_OPAQUE:
            with self:
                return opaque(*args, **kwargs or {})  # what runs on a GPU; its fake implementation calls nothing
        if func in (V1, V2):
            self.found.append((func, named(func, args, kwargs or {})))
            if not self.torchs_fakes:
                return args[0].new_empty((args[0].shape[0], args[1].shape[1]), dtype=self.found[-1][1]["out_dtype"])
        return func(*args, **(kwargs or {}))


def named(func, args, kwargs):
    """The arguments of a call by name, with the schema's defaults."""
    schema = func._schema.arguments
    given = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return given | dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs


def calls_of(a, b, bias, out_dtype, sm=100, torchs_fakes=True):
    """(op, arguments by name) of each call of torch's scaled products that a product makes, on tensors without values.

    torchs_fakes: whether torch's fake implementations see the calls.
    """
    with dry_run(Target(sm)), Calls(torchs_fakes) as calls:
        scaled_mm(a, b, bias, out_dtype)
    return calls.found


def check(op, arguments, sm=100):
    """Raise Refused for arguments that op would refuse on a GPU of that compute capability."""
    a, b, bias = arguments["self"], arguments["mat2"], arguments["bias"]
    out_dtype = a.dtype if arguments["out_dtype"] is None else arguments["out_dtype"]
    require(a.dim() == 2 and b.dim() == 2 and a.shape[1] == b.shape[0], f"shapes {tuple(a.shape)} x {tuple(b.shape)}")
    require(a.shape[0] and a.shape[1] and b.shape[1], "an empty matrix")
    require({a.dtype, b.dtype} <= {*FLOAT8, FLOAT4}, f"dtypes {a.dtype} x {b.dtype}")
    require((a.dtype, b.dtype) != (torch.float8_e5m2,) * 2, "two float8_e5m2 matrices")
    require(not arguments["use_fast_accum"] or FLOAT4 not in (a.dtype, b.dtype), "fast accumulation of FP4")
    # v1 counts bytes of FP4 codes here, v2 counts elements: bytes are stricter.
    require(a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0, f"sizes {tuple(a.shape)} x {tuple(b.shape)}: % 16")
    _check_layouts(a, b, out_dtype)
    _check_bias(bias, b.shape[1], out_dtype)
    recipe = _v1_recipe(a, b, arguments) if op is V1 else _v2_recipe(a, b, arguments)
    _check_recipe(recipe, a, b, bias, out_dtype, sm)


def _check_layouts(a, b, out_dtype):
    """Row-major A and column-major B, whose leading dimensions and addresses are whole 16 bytes."""
    require(a.stride(1) == 1 and a.stride(0) >= a.shape[1], f"A is not row-major: {a.stride()}")
    require(b.stride(0) == 1 and b.stride(1) >= b.shape[0], f"B is not column-major: {b.stride()}")
    for name, x, leading in (("A", a, a.stride(0)), ("B", b, b.stride(1))):
        require(leading * x.itemsize % 16 == 0, f"leading dimension of {name}: {leading}")
        _aligned(name, x)
    require(b.shape[1] * out_dtype.itemsize % 16 == 0, "leading dimension of the result")


def _aligned(name, x):
    require(x.storage_offset() * x.itemsize % 16 == 0, f"{name} does not begin at whole 16 bytes")


def _check_bias(bias, n, out_dtype):
    require(out_dtype in (torch.bfloat16, torch.float16, torch.float32), f"a result of {out_dtype}")
    if bias is None:
        return
    require(bias.numel() == n and bias.is_contiguous(), f"a bias of shape {tuple(bias.shape)}")
    require(out_dtype != torch.float32, "a bias with a float32 result")
    require(bias.dtype == out_dtype, f"a bias of {bias.dtype} with a result of {out_dtype}")
    _aligned("bias", bias)


def _v1_recipe(a, b, arguments):
    """How v1 takes the scales: the first of its list that dtypes and sizes fit."""
    scale_a, scale_b = arguments["scale_a"], arguments["scale_b"]
    require(arguments["scale_result"] is None, "a scale of the result")
    for recipe in (TENSOR_WISE, ROW_WISE, BLOCK_1X32, BLOCK_1X16):
        if _fits(recipe, a, scale_a, transposed=False) and _fits(recipe, b, scale_b, transposed=True):
            return recipe
    if _fits_128(a, scale_a, 1) and (_fits_128(b.t(), scale_b.t(), 1) or _fits_128(b.t(), scale_b.t(), 128)):
        require(a.shape[0] % 4 == 0, "scales of A that are no whole 16 bytes")
        return BLOCK_1X128
    raise Refused(
        f"no recipe has scales {scale_a.dtype} {tuple(scale_a.shape)}, {scale_b.dtype} {tuple(scale_b.shape)}"
    )


def _v2_recipe(a, b, arguments):
    """The recipe that v2 is given, with scales and swizzles that it asks for: all that this package uses of it."""
    recipes = [[RECIPES[number] for number in arguments[f"recipe_{side}"]] for side in "ab"]
    if recipes[0] == [BLOCK_1X128]:
        _check_blocks_of_128(a, b, arguments, *recipes)
        return BLOCK_1X128
    for side, x in (("a", a), ("b", b)):
        scales, swizzle = arguments[f"scale_{side}"], list(arguments[f"swizzle_{side}"])
        recipe = [RECIPES[number] for number in arguments[f"recipe_{side}"]]
        require(recipe == [BLOCK_1X16, TENSOR_WISE] and len(scales) == 2, f"recipe {recipe} of {len(scales)} scales")
        require(swizzle == [_SWIZZLED, _LINEAR], f"swizzle {swizzle}")
        require(
            _fits(BLOCK_1X16, x, scales[0], side == "b"), f"scales of {side}: {scales[0].dtype} {scales[0].numel()}"
        )
        require(scales[1].dtype == torch.float32 and scales[1].numel() == 1, f"global scale of {side}")
        require(scales[1].device == a.device, f"global scale of {side} on {scales[1].device}")
    require(not arguments["contraction_dim"], "contraction_dim")
    return BLOCK_1X16


def _check_blocks_of_128(a, b, arguments, recipe_a, recipe_b):
    """Float32 scales, those of a row of blocks at the strides that torch asks for."""
    require(recipe_b in ([BLOCK_1X128], [BLOCK_128X128]), f"recipe {recipe_b}")
    blocks = -(-a.shape[1] // 128)
    for rows, recipe, side in ((a.shape[0], recipe_a, "a"), (b.shape[1], recipe_b, "b")):
        (scale,) = arguments[f"scale_{side}"]
        shape = (rows, blocks) if recipe == [BLOCK_1X128] else (up(blocks, 4), -(-rows // 128))
        require(scale.dtype == torch.float32 and tuple(scale.shape) == shape, f"scales of shape {tuple(scale.shape)}")
        strides = (shape[0], 1) if shape[1] == 1 else (shape[0],)  # of one column it may be 1
        require(scale.stride(0) == 1 and scale.stride(1) in strides, f"strides {scale.stride()}")
    require(a.shape[0] % 4 == 0, "scales of A that are no whole 16 bytes")


def _fits_128(x, scales, block_rows):
    """Whether v1 takes float32 scales as those of blocks of 1 or 128 rows of x [rows, width], 128 elements wide.

    Versions of torch differ in the strides of square blocks, unless there are whole fours of them along a row.
    """
    shape = -(-x.shape[0] // block_rows), -(-x.shape[1] // 128)
    strides = (1, shape[0]) if block_rows == 1 else (up(shape[1], 4), 1)
    fits = x.dtype in FLOAT8 and scales.dtype == torch.float32 and tuple(scales.shape) == shape
    alike = block_rows == 1 or shape[1] % 4 == 0
    return fits and alike and all(scales.stride(i) == strides[i] or shape[i] == 1 for i in range(2))


def _fits(recipe, x, scales, transposed):
    """Whether a scale tensor is one of a recipe for a matrix [rows, width], or [width, rows] if transposed."""
    width, rows = x.shape if transposed else reversed(x.shape)
    k = 2 * width if x.dtype == FLOAT4 else width
    if recipe == TENSOR_WISE:
        return x.dtype in FLOAT8 and scales.dtype == torch.float32 and scales.numel() == 1
    if recipe == ROW_WISE:
        shape = (1, rows) if transposed else (rows, 1)
        fits = x.dtype in FLOAT8 and scales.dtype == torch.float32 and tuple(scales.shape) == shape
    else:
        block, codes, kind = ((16, (FLOAT4,), torch.float8_e4m3fn) if recipe == BLOCK_1X16 else
                              (32, (torch.float8_e4m3fn,), torch.float8_e8m0fnu))  # fmt: skip
        count = up(rows, 128) * up(up(k, block) // block, 4)
        fits = x.dtype in codes and scales.dtype == kind and scales.numel() == count
    return fits and scales.is_contiguous() and scales.storage_offset() * scales.itemsize % 16 == 0


def up(size, multiple):
    return (size + multiple - 1) // multiple * multiple


def _check_recipe(recipe, a, b, bias, out_dtype, sm):
    """What depends on the GPU."""
    require(sm >= 89, "FP8 matrix units")
    if recipe in (BLOCK_1X16, BLOCK_1X32):
        require(sm >= 100, "block-scaled matrix units")
        require(a.dtype == b.dtype, f"{a.dtype} x {b.dtype}")
    if recipe == BLOCK_1X128:
        require(sm == 90, "FP8 with float32 scales of blocks")
        require(out_dtype == torch.bfloat16 and bias is None, f"a result of {out_dtype}, a bias")
    if recipe == ROW_WISE:
        require(sm not in (103, 120), "the CUTLASS kernel of row-wise scales is reported to fail")
        require(out_dtype == torch.bfloat16, f"row-wise scales with a result of {out_dtype}")
