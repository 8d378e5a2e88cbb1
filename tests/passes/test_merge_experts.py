"""`merge_quantize` on grouped rows and on matrices: which pairs become one op, and that every value stays the same."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fp4compile.ops.nodes import quantise_of
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.passes.merge_quantize import merge_quantize

X, OFFS, OTHERS = torch.randn(20, 64), torch.tensor([3, 3, 17], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
W, SEED, OUTER = torch.randn(3, 32, 64), torch.tensor(1), torch.tensor(0.01)


def quantize(x, offs, format, dim=-1, **options):
    """Of groups of rows; offs: None for matrices that are each alone."""
    return torch.ops.fp4compile.quantize(x, format, dim, offs=offs, each_matrix=offs is None, **options)


def merged(function, *args):
    """(how many pairs were merged, how many quantises are left apart); the values are compared."""
    module = make_fx(function, tracing_mode="fake")(*args)
    expected = function(*args)
    pairs = merge_quantize(module.graph)
    module.graph.lint()
    module.recompile()
    for got, right in zip(module(*args), expected, strict=True):
        assert got.dtype == right.dtype and torch.equal(got.view(torch.uint8), right.view(torch.uint8))
    directions = [len(quantise_of(node).dims) for node in module.graph.find_nodes(op="call_function", target=QUANTIZE)]
    assert directions.count(2) == pairs
    return pairs, directions.count(1)


def pair(x, offs, format, columns=None, **options):
    """Rows and columns; columns: what is asked for these besides."""
    return *quantize(x, offs, format, **options), *quantize(x, offs, format, -2, **{**options, **(columns or {})})


@pytest.mark.parametrize("function", [
    lambda x, offs, *_: pair(x, offs, "nvfp4"),
    lambda x, offs, *_: pair(x, offs, "nvfp4_te", {"hadamard": True}),
    lambda x, offs, *_: pair(x, offs, "nvfp4_rowwise"),
    lambda x, offs, *_: pair(x, offs, "float8_rowwise"),
    lambda x, offs, *_: pair(x, offs, "mxfp8", layout="swizzled"),
    lambda x, offs, others, seed, *_: pair(x, offs, "mxfp4", seed=seed),
    lambda x, offs, others, seed, outer: pair(x, offs, "nvfp4", outer=outer),
    lambda x, offs, *_: (*quantize(x, offs, "mxfp8", -2), *quantize(x, offs, "mxfp8")),  # the columns first
], ids=["outer", "hadamard", "row", "row alone", "swizzled", "seed", "static", "columns first"])  # fmt: skip
def test_rows_and_columns_of_one_tensor(function):
    assert merged(function, X, OFFS, OTHERS, SEED, OUTER) == (1, 0)


@pytest.mark.parametrize("function", [
    lambda x, offs, others, *_: (*quantize(x, offs, "nvfp4"), *quantize(x, others, "nvfp4", -2)),
    lambda x, offs, others, *_: (*quantize(x, offs, "nvfp4"), *quantize(x, offs, "nvfp4_te", -2)),
    lambda x, offs, others, seed, *_: pair(x, offs, "nvfp4", {"seed": seed}),
    lambda x, offs, others, seed, outer: pair(x, offs, "nvfp4", {"outer": outer}),
    lambda x, offs, *_: pair(x, offs, "nvfp4", {"layout": "swizzled"}),
    lambda x, offs, *_: (*quantize(x, offs, "mxfp8"), *quantize(x + 1, offs, "mxfp8", -2)),
], ids=["groups", "format", "seed", "outer", "layout", "tensor"])  # fmt: skip
def test_what_is_no_pair(function):
    assert merged(function, X, OFFS, OTHERS, SEED, OUTER) == (0, 2)


def test_matrices_and_equal_quantises():
    """Matrices in square blocks are a pair, others are not; rows and matrices never are, nor transformed rows and
    columns. Equal quantises become one."""
    assert merged(lambda w: pair(w, None, "nvfp4_16x16"), W) == (1, 0)
    assert merged(lambda w: pair(w, None, "mxfp8_32x32", layout="swizzled"), W) == (1, 0)
    assert merged(lambda w: pair(w, None, "nvfp4"), W) == (0, 2)
    dense = torch.ops.fp4compile.quantize
    assert merged(lambda x, offs: (*quantize(x, offs, "mxfp8"), *dense(x, "mxfp8", 0)), X, OFFS) == (0, 2)
    assert merged(lambda x: (*dense(x, "nvfp4_te", hadamard=True)[:2], *dense(x, "nvfp4_te", -2)[:2]), X) == (0, 2)
    assert merged(lambda x, offs: (*quantize(x, offs, "mxfp8"), *quantize(x, offs, "mxfp8")), X, OFFS) == (0, 1)
