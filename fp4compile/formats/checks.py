"""Checks of a product's arguments. Each rule is written here, once.

An op checks its arguments where they enter: `check` runs before kernels are launched, `check_matrices` runs in the
reference. Code behind the op does not check again. All functions raise ValueError or TypeError that name the argument.
"""

from typing import Any

import torch

from fp4compile._compat import statically_true
from fp4compile.formats.epilogue import AMAX, AUXILIARIES, Epilogue
from fp4compile.formats.formats import BlockFormat, compatible
from fp4compile.formats.groups import check_offs, padded_rows
from fp4compile.formats.layouts import ceil_div, swizzled_numel
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.formats.quantize_spec import FLOAT_DTYPES


def check(x: Arguments) -> None:
    """Check the arguments of a product op, on any device."""
    _check_formats(x.a.format, x.b.format)
    check_float("out_dtype", x.out_dtype)
    if x.offs is not None:
        _check_groups(x, x.offs)
    else:
        check_operand("a", x.a)
        check_operand("b", x.b, _of_each_matrix(x) if x.epilogue is not None and x.epilogue.pair else None)
        check_matrices(x.a, x.b, x.bias)
        _check_devices(x.a, x.b, bias=x.bias)
    if x.epilogue is not None:
        _check_epilogue(x, x.epilogue)


def _of_each_matrix(x: Arguments) -> tuple[tuple, ...]:
    """The shapes of outer scales of B that has two matrices: one, one for each matrix, or one for each row."""
    return (), (2,), (*x.b.data.shape[:-1], 1)


def check_indexed(a: Operand, b: Operand, index: torch.Tensor, out_dtype: torch.dtype) -> None:
    """Check the arguments of a product of A [rows, K] and B [E, N, K], where an index gives each row its matrix."""
    _check_formats(a.format, b.format)
    check_float("out_dtype", out_dtype)
    _check_devices(a, b, index=index)
    check_operand("a", a)
    check_operand("b", b)
    if a.k != b.k:
        raise ValueError(f"a, b: rows of {a.k} and of {b.k} elements cannot be multiplied")


def check_matrices(a: Operand, b: Operand, bias: torch.Tensor | None) -> None:
    """Check that the shapes and formats of two operands (matrices or batches of matrices) and a bias fit."""
    _check_formats(a.format, b.format)
    a_batch, b_batch = tuple(a.data.shape[:-2]), tuple(b.data.shape[:-2])
    if b_batch and a_batch != b_batch:
        raise ValueError(f"batch dimensions differ: a has {a_batch}, b has {b_batch}")
    _check_contraction(a, b)
    check_bias(bias, b.data.shape[-2])


def check_bias(bias: torch.Tensor | None, n: Any) -> None:
    """Check that a bias is floating point of shape (n,)."""
    if bias is not None and (bias.dtype not in FLOAT_DTYPES or tuple(bias.shape) != (n,)):
        raise ValueError(f"bias: expected floating point of shape ({n},), got {bias.dtype} of {tuple(bias.shape)}")


def check_quantize(x: Arguments) -> None:
    """Check that an epilogue quantises the result, with a static outer scale exactly if the result's format has one."""
    spec, outer = None if x.epilogue is None else x.epilogue.quantize, x.result_outer
    if spec is None:
        given = None if x.epilogue is None else x.epilogue.strings()
        raise ValueError(f"epilogue: expected a last step 'quantize' with a format, got {given}")
    if (outer is not None) != spec.static:
        raise ValueError(f"outer: format {spec.format.name} "
                         + ("needs a static outer scale" if spec.static else "has no outer scale"))  # fmt: skip
    if outer is not None and (outer.dtype != torch.float32 or outer.dim()):
        raise ValueError(f"outer: expected float32 of shape (), got {outer.dtype} of shape {tuple(outer.shape)}")
    _check_products_of_groups(x)


def _check_products_of_groups(x: Arguments) -> None:
    """Check that groups, if there are any, have matrices of B and no bias."""
    if x.offs is not None and x.b.data.dim() != 3:
        raise ValueError(f"b: with offs, expected [G, N, K], got shape {tuple(x.b.data.shape)}")
    if x.offs is not None and x.bias is not None:
        raise ValueError("bias: products of groups have none")


def check_amax(x: Arguments) -> None:
    """Check that an epilogue finds the amax of the result."""
    if x.epilogue is None or not x.epilogue.amax:
        given = None if x.epilogue is None else x.epilogue.strings()
        raise ValueError(f"epilogue: expected a last step {AMAX!r}, got {given}")
    _check_products_of_groups(x)


def check_operand(name: str, x: Operand, outers: tuple[tuple, ...] | None = None, swizzled_rows: Any = None) -> None:
    """Check that the tensors of one operand fit each other.

    outers: the shapes that its outer scale may have; None stands for () and [*batch, rows, 1]. swizzled_rows: how many
    rows swizzled scales have; None stands for the number of the operand's rows.
    """
    fmt = x.format
    if x.data.dim() < 2:
        raise ValueError(f"{name}: expected two dimensions or more, got shape {tuple(x.data.shape)}")
    *batch, rows, _ = x.data.shape
    if fmt is None:
        if x.data.dtype not in FLOAT_DTYPES:
            raise TypeError(f"{name}: a plain operand is bfloat16, float16 or float32, got {x.data.dtype}")
        if x.scales is not None:
            raise ValueError(f"{name}_scales: a plain operand has no block scales")
    elif x.data.dtype != fmt.data_dtype:
        raise TypeError(f"{name}: data of format {fmt.name} are {fmt.data_dtype}, got {x.data.dtype}")
    elif fmt.scale is not None:
        _check_scales(name, x, fmt, rows if swizzled_rows is None else swizzled_rows)
    outers = ((), (*batch, rows, 1)) if outers is None else outers
    if x.outer is not None and (x.outer.dtype != torch.float32 or tuple(x.outer.shape) not in outers):
        raise ValueError(f"{name}_outer: expected float32 of shape {' or '.join(map(str, outers))}, "
                         f"got {x.outer.dtype} of shape {tuple(x.outer.shape)}")  # fmt: skip


def _check_scales(name: str, x: Operand, fmt: BlockFormat, swizzled_rows: Any) -> None:
    """Check an operand's block scales: linear, or swizzled with `swizzled_rows` rows."""
    scales = x.scales
    if scales is None:
        raise ValueError(f"{name}_scales: format {fmt.name} needs block scales")
    *batch, rows, _ = x.data.shape
    block_rows, block_cols = fmt.block or (1, 1)
    blocks = ceil_div(x.k, block_cols)
    linear = (*batch, ceil_div(rows, block_rows), blocks)
    flat = (*batch, swizzled_numel(swizzled_rows, blocks))
    if scales.dtype != fmt.scale_dtype or tuple(scales.shape) != (flat if x.swizzled else linear):
        raise ValueError(f"{name}_scales: expected {fmt.scale_dtype} of shape {linear} (linear) or {flat} (swizzled), "
                         f"got {scales.dtype} of shape {tuple(scales.shape)}")  # fmt: skip


def check_float(name: str, dtype: torch.dtype) -> None:
    """Check that a dtype is one of plain operands and results."""
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name}={dtype}: allowed are bfloat16, float16, float32")


def _check_formats(a: BlockFormat | None, b: BlockFormat | None) -> None:
    if a is not None and b is not None and not compatible(a, b):
        raise ValueError(f"formats {a.name} and {b.name} cannot be multiplied: scale types or blocks differ")


def _check_contraction(a: Operand, b: Operand) -> None:
    """Check that both operands have one contraction length, up to the padding of a quantised operand's last block."""
    k = min(a.k, b.k)
    for x in (a, b):
        whole = k if x.format is None else ceil_div(k, x.format.block_cols) * x.format.block_cols
        if x.k != whole:
            raise ValueError(f"contraction dimensions differ: a has {a.k}, b has {b.k} (packed operands: with padding)")


def _check_devices(a: Operand, b: Operand, **others: torch.Tensor | None) -> None:
    """Check that all tensors are on the device of A. others: further tensors by the names of their arguments."""
    tensors = {"b": b.data, "a_scales": a.scales, "b_scales": b.scales, "a_outer": a.outer, "b_outer": b.outer}
    for name, tensor in {**tensors, **others}.items():
        if tensor is not None and tensor.device != a.data.device:
            raise ValueError(f"{name}: is on {tensor.device}, a on {a.data.device}")


def _check_groups(x: Arguments, offs: torch.Tensor) -> None:
    """Check the operands of a grouped product, whose groups are rows or lie along the contraction."""
    a, b = x.a, x.b
    if a.data.dim() != 2 or b.data.dim() not in (2, 3):
        raise ValueError(f"a, b: expected [M, K] and [G, N, K], or [P, W] and [Q, W]; got shapes {tuple(a.data.shape)} "
                         f"and {tuple(b.data.shape)}")  # fmt: skip
    along_k = b.data.dim() == 2
    matrices = b.data.shape[0] // 2 if x.two_weights else b.data.shape[0]
    check_offs(offs, None if along_k else matrices)
    _check_devices(a, b, offs=offs)
    groups, m, n = offs.shape[0], a.data.shape[0], b.data.shape[-2]
    rows = m if x.rows is None else x.rows
    padded = padded_rows(rows, groups)
    a_outer = (groups, m, 1) if along_k else (m, 1)
    check_operand("a", a, ((), (groups,), a_outer), None if along_k else padded)
    each = groups if along_k else b.data.shape[0]
    check_operand("b", b, ((), (each,), (each, n, 1)))
    if along_k:
        _check_run("a", a, rows, groups)
        _check_run("b", b, rows, groups)
        return
    if m != rows:
        raise ValueError(f"rows: expected the {m} rows of a, got {rows}")
    _check_no_square("a", a)
    _check_contraction(a, b)


def _check_run(name: str, x: Operand, rows: Any, groups: int) -> None:
    """Check an operand with groups along the contraction: quantised operands and dequantised values are padded."""
    padded = padded_rows(rows, groups)
    expected = padded if x.format is not None or statically_true(x.k == padded) else rows
    if x.k != expected:
        raise ValueError(f"{name}: expected rows of {expected} elements for {rows} rows of {groups} groups, "
                         f"got shape {tuple(x.data.shape)}")  # fmt: skip
    _check_no_square(name, x)


def _check_no_square(name: str, x: Operand) -> None:
    if x.format is not None and x.format.square:
        raise ValueError(f"{name}: groups of rows have no square blocks, got format {x.format.name}")


def _check_epilogue(x: Arguments, epilogue: Epilogue) -> None:
    """Check an epilogue and the tensors that it reads, each of the product's size or of N elements."""
    *batch, m, _ = x.a.data.shape
    n, device = x.b.data.shape[-2], x.a.data.device
    if epilogue.pair:
        dims, times = 2 if x.offs is None else 3, 1 if x.two_weights else 2
        if x.b.data.dim() != dims or not statically_true(n % (times * 128) == 0):
            rows = "a multiple of 128 rows" if x.two_weights else "twice a multiple of 128 rows"
            raise ValueError(f"epilogue: with 'pair', expected b of {dims}-D and of {rows}, got "
                             f"{tuple(x.b.data.shape)}")  # fmt: skip
        n = n // times
    size = m * n
    for count in batch:
        size = size * count
    if len(x.auxiliaries) > AUXILIARIES:
        raise ValueError(f"epilogue: at most {AUXILIARIES} operands, got {len(x.auxiliaries)}")
    for i, each in enumerate(x.auxiliaries):
        row = epilogue.kinds.get(i) == "row"
        fits = statically_true(each.numel() == (n if row else size))
        if not fits or each.dtype not in FLOAT_DTYPES or each.device != device:
            raise ValueError(f"epilogue: expected floating-point operands of the product's size or of {n} elements "
                             f"on {device}, got {each.dtype} of {tuple(each.shape)} on {each.device}")  # fmt: skip
    if epilogue.dtype not in FLOAT_DTYPES:
        raise ValueError(f"epilogue: dtype {epilogue.dtype}; allowed are bfloat16, float16, float32")
