"""Read pointwise operations, and reductions of rows, from graphs, for the passes that fuse them into kernels."""

import operator

import torch
from torch.fx import Node

from fp4compile._compat import statically_true
from fp4compile.formats.quantize_spec import FLOAT_DTYPES
from fp4compile.ops.matmul import SCALED_GROUPED_MM, SCALED_MM, SCALED_MM_GATHERED
from fp4compile.ops.quantize import DEQUANTIZE

aten = torch.ops.aten

FLOAT32 = torch.finfo(torch.float32)
_OPERATIONS = {
    aten.add.Tensor: "add", aten.sub.Tensor: "sub", aten.mul.Tensor: "mul", aten.div.Tensor: "div",
    aten.neg.default: "neg", aten.relu.default: "relu", aten.sigmoid.default: "sigmoid", aten.exp.default: "exp",
    aten.erf.default: "erf", aten.tanh.default: "tanh", aten.rsqrt.default: "rsqrt",
    aten.add.Scalar: "add", aten.sub.Scalar: "sub", aten.mul.Scalar: "mul", aten.div.Scalar: "div",
}  # fmt: skip
_REDUCTIONS = {aten.sum.dim_IntList: "sum", aten.mean.dim: "mean", aten.amax.default: "amax"}
_POWERS = {2: "square", 3: "cube"}
# Operators whose results are always materialised.
STORED = (
    operator.getitem, SCALED_MM, SCALED_GROUPED_MM, SCALED_MM_GATHERED, aten._grouped_mm.default,
    DEQUANTIZE, aten._scaled_mm.default,
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default,
)  # fmt: skip


def operation_of(node: Node) -> tuple[str, tuple] | None:
    """(name, arguments) of an operation of `formats.steps`, None for other nodes. Arguments are nodes or floats."""
    if node.target is aten.pow.Tensor_Scalar:
        base, exponent = node.args
        return (_POWERS[exponent], (base,)) if exponent in _POWERS else None
    name = _OPERATIONS.get(node.target)
    if name is None or any(isinstance(arg, bool) or not isinstance(arg, Node | int | float) for arg in node.args):
        return None
    arguments = tuple(arg if isinstance(arg, Node) else float(arg) for arg in node.args)
    if name == "div" and isinstance(arguments[1], float):  # as Inductor does on a GPU
        return ("mul", (arguments[0], 1.0 / arguments[1])) if arguments[1] else None
    return name, arguments


def reduction_of(node: Node) -> tuple[str, tuple[Node, ...]] | None:
    """(name, arguments) of a reduction of `formats.steps.REDUCTIONS` over the last dimension; None for anything else.

    Returns None for a variance whose mean is not in the graph: kernels compute the variance from the mean.
    """
    if node.target is operator.getitem and node.args[0].target is aten.var_mean.correction:
        both, place = node.args
        x, *dims = both.args
        if not _over_rows(x, *dims, **both.kwargs) or both.kwargs.get("correction") != 0:
            return None
        if place == 1:
            return "mean", (x,)
        mean = next((user for user in both.users if user.args[1] == 1), None)
        return None if mean is None else ("variance", (x, mean))
    name = _REDUCTIONS.get(node.target)
    if name is None or not _over_rows(*node.args, **node.kwargs):
        return None
    return name, (node.args[0],)


def _over_rows(x: Node, dim=(), keepdim: bool = False, *, dtype: torch.dtype | None = None, correction=None) -> bool:
    """Whether a reduction with these arguments reduces rows, in its default dtype."""
    value = x.meta["val"]
    last = isinstance(dim, list | tuple) and len(dim) == 1 and dim[0] in (-1, value.dim() - 1)
    return last and keepdim and dtype in (None, value.dtype) and value.dtype.is_floating_point


def fits_float32(number: float) -> bool:
    return number == 0 or FLOAT32.tiny <= abs(number) <= FLOAT32.max


def float_value(node: Node) -> torch.Tensor | None:
    """The (fake) tensor of a node; None where kernels do not compute with its dtype."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) and value.dtype in FLOAT_DTYPES else None


def same_shape(shape, other) -> bool:
    return len(shape) == len(other) and all(statically_true(a == b) for a, b in zip(shape, other, strict=True))


def contiguous(value: torch.Tensor) -> bool:
    step = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not statically_true(size == 1) and not statically_true(stride == step):
            return False
        step = step * size
    return True
