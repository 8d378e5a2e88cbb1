"""Checks of a matmul's tensors. Each rule is written once, in this file.

`check` runs where an op's tensors enter its reference or its kernels; code behind the op does not check again. All
functions raise ValueError or TypeError that name the argument.
"""

from typing import Any

import torch

from fp4compile._compat import statically_true
from fp4compile.formats.epilogue import AUXILIARIES, Epilogue
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.grouping import Grouping, check_offs, padded_rows
from fp4compile.formats.layouts import ceil_div, swizzled_numel
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.formats.quantize_spec import FLOAT_DTYPES


def check(x: Arguments) -> None:
    """Check the tensors of a matmul, on any device. Its `ProductSpec` has checked its own fields."""
    if x.offs is not None:
        _check_groups(x, x.offs)
    elif x.index is not None:
        _check_gathered(x, x.index)
    else:
        check_operand("a", x.a)
        check_operand("b", x.b, _of_each_matrix(x) if x.spec.pair else None)
        a_batch, b_batch = tuple(x.a.data.shape[:-2]), tuple(x.b.data.shape[:-2])
        if b_batch and a_batch != b_batch:
            raise ValueError(f"batch dimensions differ: a has {a_batch}, b has {b_batch}")
        _check_contraction(x.a, x.b)
        check_bias(x.bias, x.b.data.shape[-2])
    check_devices(x)
    check_epilogue(x)
    if x.spec.epilogue is not None:
        _check_auxiliaries(x, x.spec.epilogue)


def _of_each_matrix(x: Arguments) -> tuple[tuple, ...]:
    """The allowed shapes of B's scales, where B has two matrices: one global scale, one per matrix, or row scales."""
    return (), (2,), (*x.b.data.shape[:-1], 1)


def _check_gathered(x: Arguments, index: torch.Tensor) -> None:
    """Check A [S, M, K], B [E, N, K] and the index [S] of each A's matrix of B."""
    check_index(x.a.data, x.b.data, index)
    check_operand("a", x.a)
    check_operand("b", x.b)
    if x.a.k != x.b.k:
        raise ValueError(f"a, b: rows of {x.a.k} and of {x.b.k} elements cannot be multiplied")


def check_index(a: torch.Tensor, b: torch.Tensor, index: torch.Tensor) -> None:
    """Check the shapes of A [S, M, K], B [E, N, K] and an index [S]; sizes may be symbolic."""
    expected = (
        f"a, b, index: expected [S, M, K], [E, N, K] and [S]; got shapes {tuple(a.shape)}, {tuple(b.shape)} and "
        f"{tuple(index.shape)}"
    )
    if a.dim() != 3 or b.dim() != 3 or index.dim() != 1:
        raise ValueError(expected)
    torch._check_value(a.shape[0] == index.shape[0], lambda: expected)


def check_bias(bias: torch.Tensor | None, n: Any) -> None:
    """Check that a bias is floating point of shape (n,)."""
    if bias is not None and (bias.dtype not in FLOAT_DTYPES or tuple(bias.shape) != (n,)):
        raise ValueError(f"bias: expected floating point of shape ({n},), got {bias.dtype} of {tuple(bias.shape)}")


def check_epilogue(x: Arguments) -> None:
    """Check that a static global scale is given if, and only if, the epilogue quantises to a format that needs one."""
    spec, outer = x.result_spec, x.result_outer
    if (outer is not None) != (spec is not None and spec.static):
        name = "a result that is not quantised" if spec is None else f"format {spec.format.name}"
        raise ValueError(f"outer: {name} {'needs a' if outer is None else 'has no'} static global scale")
    if outer is not None and (outer.dtype != torch.float32 or outer.dim()):
        raise ValueError(f"outer: expected float32 of shape (), got {outer.dtype} of shape {tuple(outer.shape)}")


def check_operand(name: str, x: Operand, outers: tuple[tuple, ...] | None = None, swizzled_rows: Any = None) -> None:
    """Check that the tensors of one operand fit each other.

    outers: the allowed shapes of its global or row scale; None stands for () and [*batch, rows, 1]. swizzled_rows: the
    number of rows of swizzled scales; None stands for the number of the operand's rows.
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
    if scales.dtype != fmt.scale_dtype or tuple(scales.shape) != (flat if x.swizzled and fmt.swizzles else linear):
        raise ValueError(f"{name}_scales: expected {fmt.scale_dtype} of shape {linear} (linear) or {flat} (swizzled), "
                         f"got {scales.dtype} of shape {tuple(scales.shape)}")  # fmt: skip


def check_float(name: str, dtype: torch.dtype) -> None:
    """Check that a dtype is allowed for plain operands and results."""
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name}={dtype}: allowed are bfloat16, float16, float32")


def _check_contraction(a: Operand, b: Operand) -> None:
    """Check that both operands have the same K, except for the padding of a quantised operand's last block."""
    k = min(a.k, b.k)
    for x in (a, b):
        whole = k if x.format is None else ceil_div(k, x.format.block_cols) * x.format.block_cols
        if x.k != whole:
            raise ValueError(f"contraction dimensions differ: a has {a.k}, b has {b.k} (packed operands: with padding)")


def check_devices(x: Arguments) -> None:
    """Check that all tensors are on the device of A."""
    a, b = x.a, x.b
    tensors = {"b": b.data, "a_scales": a.scales, "b_scales": b.scales, "a_outer": a.outer, "b_outer": b.outer,
               "bias": x.bias, "offs": x.offs, "index": x.index, "outer": x.result_outer}  # fmt: skip
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != a.data.device:
            raise ValueError(f"{name}: is on {tensor.device}, a on {a.data.device}")


def check_groups(x: Arguments, offs: torch.Tensor) -> None:
    """Check the dimensions of a product with ragged groups, and its offsets; sizes may be symbolic."""
    a, b, along_k = x.a.data, x.b.data, x.spec.grouping is Grouping.RAGGED_CONTRACTION
    if a.dim() != 2 or b.dim() != (2 if along_k else 3):
        expected = "[P, W] and [Q, W]" if along_k else "[M, K] and [G, N, K]"
        raise ValueError(f"a, b: with {x.spec.grouping}, expected {expected}; got shapes {tuple(a.shape)} and "
                         f"{tuple(b.shape)}")  # fmt: skip
    matrices = b.shape[0] // 2 if x.two_weights else b.shape[0]
    check_offs(offs, None if along_k else matrices)
    if along_k and x.rows is None:
        raise ValueError("rows: a matmul of groups along the contraction needs the number of rows")
    if not along_k and x.rows is not None:
        torch._check_value(a.shape[0] == x.rows, lambda: f"rows: expected the {a.shape[0]} rows of a, got {x.rows}")


def _check_groups(x: Arguments, offs: torch.Tensor) -> None:
    """Check the operands of a product with ragged groups."""
    check_groups(x, offs)
    a, b, along_k = x.a, x.b, x.spec.grouping is Grouping.RAGGED_CONTRACTION
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


def _check_auxiliaries(x: Arguments, epilogue: Epilogue) -> None:
    """Check the tensors that an epilogue reads, each of the matmul's size or of N elements."""
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
