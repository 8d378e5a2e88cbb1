"""What the ops say of arguments that they do not take."""

import ast
import dataclasses
import inspect
import itertools
import re

import pytest
import torch

from fp4compile.formats import checks, formats, layouts, quantize_spec, reference
from fp4compile.ops import matmul
from fp4compile.ops import quantize as ops_quantize
from fp4compile.ops.functional import quantize, scaled_mm

X = torch.randn(4, 64)
A, B = quantize(X, "nvfp4"), quantize(torch.randn(6, 64), "nvfp4")
MX, ROWWISE = quantize(X, "mxfp8"), quantize(X, "nvfp4_rowwise")
ONE = AMAX = torch.tensor(1.0)
QUANTIZE, OFFS = torch.ops.fp4compile.quantize, torch.tensor([1, 4], dtype=torch.int32)
ON_META = dataclasses.replace(B, data=B.data.to("meta"))


def op_mm(a, a_format, b, b_format):
    return spec_mm(f"{a_format or 'plain'} @ {b_format or 'plain'} -> float32", a, b)


def spec_mm(spec, a=X, b=X, **options):
    return torch.ops.fp4compile.scaled_mm(a, None, None, b, None, None, spec, **options)


def mm_of(**changed):
    """A @ B^T with other tensors in the place of A's."""
    return scaled_mm(dataclasses.replace(A, **changed), B)


BIAS = "bias: expected floating point of shape (6,), got "
GIVEN_AMAX = "amax: goes with a format whose global scale is computed for the tensor"
BAD_CALLS = [
    # what is raised, what the message says, call
    (TypeError, "x: expected a torch.Tensor, got list", lambda: quantize([1.0], "nvfp4")),
    (TypeError, "x: expected a dense tensor, got one of the layout sparse", lambda: quantize(X.to_sparse(), "nvfp4")),
    (TypeError, "x: expected a dense tensor, got a nested", lambda: quantize(torch.nested.nested_tensor([X]), "nvfp4")),
    (TypeError, "x: dtype torch.int32", lambda: quantize(torch.ones(4, 16, dtype=torch.int32), "nvfp4")),
    (TypeError, "x: dtype torch.float64", lambda: quantize(X.double(), "nvfp4")),
    (TypeError, "x: dtype torch.complex64", lambda: quantize(X.to(torch.complex64), "nvfp4")),
    (TypeError, "x: dtype torch.float8_e4m3fn", lambda: quantize(X.to(torch.float8_e4m3fn), "nvfp4")),
    (ValueError, "dim=-1: x has 0 dimensions", lambda: quantize(torch.tensor(1.0), "nvfp4")),
    (ValueError, "dim=2: x has 2 dimensions", lambda: quantize(X, "nvfp4", dim=2)),
    (ValueError, "dim=-3: x has 2 dimensions", lambda: quantize(X, "nvfp4", dim=-3)),
    (TypeError, "dim: expected an int, got str", lambda: quantize(X, "nvfp4", dim="rows")),
    (TypeError, "dim: expected an int, got float", lambda: quantize(X, "nvfp4", dim=1.0)),
    (ValueError, "unknown format 'nvfp5'. Did you mean 'nvfp4'?", lambda: quantize(X, "nvfp5")),
    (TypeError, "format: expected", lambda: quantize(X, None)),
    (ValueError, "unknown layout 'swizled'. Did you mean 'swizzled'?", lambda: quantize(X, "nvfp4", layout="swizled")),
    (ValueError, "unknown layout None", lambda: quantize(X, "nvfp4", layout=None)),
    (TypeError, "outer: expected a float32 torch.Tensor, got float", lambda: quantize(X, "nvfp4", outer=1.0)),
    (ValueError, GIVEN_AMAX, lambda: QUANTIZE(X, "mxfp8", amax=AMAX)),
    (ValueError, GIVEN_AMAX, lambda: QUANTIZE(X, "float8_rowwise", [-1, -2], amax=AMAX)),
    (ValueError, GIVEN_AMAX, lambda: QUANTIZE(X, "nvfp4", outer=AMAX, amax=AMAX)),
    (ValueError, GIVEN_AMAX, lambda: QUANTIZE(X, "nvfp4", -2, offs=OFFS, amax=AMAX)),
    (ValueError, GIVEN_AMAX, lambda: QUANTIZE(X, "nvfp4_rowwise", offs=OFFS, amax=AMAX)),
    (ValueError, "amax: expected float32 of shape (2,), got", lambda: QUANTIZE(X, "nvfp4", offs=OFFS, amax=AMAX)),
    (ValueError, "amax: expected float32 of shape () or (P,)", lambda: QUANTIZE(X, "nvfp4", amax=AMAX.expand(3))),
    (ValueError, "amax: expected float32 of shape (64, 1)", lambda: QUANTIZE(X, "float8_rowwise", -2, amax=AMAX)),
    (ValueError, "amax: goes without a prologue", lambda: QUANTIZE(X, "nvfp4", prologue=["neg aux0"], amax=AMAX)),
    (ValueError, "outer: format mxfp8 has no global or row scale", lambda: quantize(X, "mxfp8", outer=ONE)),
    (ValueError, "outer: format nvfp4_one_level", lambda: quantize(X, "nvfp4_one_level", outer=ONE)),
    (ValueError, "outer: expected float32 of shape () ", lambda: quantize(X, "nvfp4", outer=torch.ones(1))),
    (ValueError, "outer: expected float32 of shape () ", lambda: quantize(X, "nvfp4", outer=torch.ones(4, 1))),
    (ValueError, "outer: expected float32 of shape (4, 1) ", lambda: quantize(X, "nvfp4_rowwise", outer=ONE)),
    (
        ValueError,
        "outer: expected float32 of shape (64, 1) ",
        lambda: quantize(X, "nvfp4_rowwise", dim=0, outer=torch.ones(4, 1)),
    ),
    (ValueError, "got torch.float64", lambda: quantize(X, "nvfp4", outer=torch.tensor(1.0, dtype=torch.float64))),
    (
        ValueError,
        "on cpu, got torch.float32 of shape () on meta",
        lambda: quantize(X, "nvfp4", outer=torch.ones((), device="meta")),
    ),
    (ValueError, "dtype=torch.float64", lambda: A.dequantize(torch.float64)),
    (ValueError, "dtype=torch.int8", lambda: A.dequantize(torch.int8)),
    (TypeError, "a: expected a BlockScaled, got Tensor", lambda: scaled_mm(X, B)),
    (TypeError, "b: expected a BlockScaled, got NoneType", lambda: scaled_mm(A, None)),
    (ValueError, "a: expected two dimensions or more", lambda: scaled_mm(quantize(X[0], "nvfp4"), B)),
    (ValueError, "b: expected two dimensions or more", lambda: scaled_mm(A, quantize(X[0], "nvfp4"))),
    (
        ValueError,
        "contraction dimensions differ: a has 64, b has 63",
        lambda: scaled_mm(A, quantize(X[:, 1:], "nvfp4")),
    ),
    (ValueError, "batch dimensions differ: a has (), b has (1,)", lambda: scaled_mm(A, quantize(X[None], "nvfp4"))),
    (ValueError, "formats nvfp4 and mxfp8 cannot be multiplied", lambda: scaled_mm(A, MX)),
    (ValueError, "formats float8_rowwise and nvfp4 cannot", lambda: scaled_mm(quantize(X, "float8_rowwise"), B)),
    (TypeError, "bias: expected a torch.Tensor, got float", lambda: scaled_mm(A, B, 1.0)),
    (ValueError, f"{BIAS}torch.int64", lambda: scaled_mm(A, B, torch.ones(6, dtype=torch.int64))),
    (ValueError, f"{BIAS}torch.float32 of (4,)", lambda: scaled_mm(A, B, torch.ones(4))),
    (ValueError, f"{BIAS}torch.float32 of (1, 6)", lambda: scaled_mm(A, B, torch.ones(1, 6))),
    (ValueError, "bias: is on meta, a on cpu", lambda: scaled_mm(A, B, torch.ones(6, device="meta"))),
    (ValueError, "out_dtype=torch.float64", lambda: scaled_mm(A, B, out_dtype=torch.float64)),
    (ValueError, "out_dtype=bfloat16", lambda: scaled_mm(A, B, out_dtype="bfloat16")),
    (ValueError, "b: is on meta, a on cpu", lambda: scaled_mm(A, ON_META)),
    # At the level of the ops, where graph passes work.
    (ValueError, "unknown layout 'blocked'", lambda: QUANTIZE(X, "nvfp4", layout="blocked")),
    (ValueError, "unknown format 'fp4'", lambda: QUANTIZE(X, "fp4")),
    (ValueError, "contraction dimensions differ: a has 10, b has 11", lambda: op_mm(X[:, :10], None, X[:, :11], None)),
    (
        ValueError,
        "contraction dimensions differ: a has 65",
        lambda: op_mm(torch.randn(4, 65), None, MX.data, "float8_rowwise"),
    ),
    (ValueError, "spec 'nvfp4': expected 'format @ format -> dtype', with 'plain' for a", lambda: spec_mm("nvfp4")),
    (ValueError, "spec 'plain @ plain -> float8': 'float8' is no dtype", lambda: spec_mm("plain @ plain -> float8")),
    (ValueError, "out_dtype=torch.int8: allowed are bfloat16,", lambda: spec_mm("plain @ plain -> int8")),
    (ValueError, "unknown format 'nvfp5'. Did you mean 'nvfp4'?", lambda: spec_mm("nvfp5 @ plain -> float32")),
    (ValueError, "'ragged' is none of dense, batched, ", lambda: spec_mm("plain @ plain, ragged -> float32")),
    (ValueError, "expected one 'to dtype' after", lambda: spec_mm("plain @ plain -> float32 | relu product")),
    (
        ValueError,
        "offs: a product of spec 'plain @ plain, ragged rows -> float32' needs offs",
        lambda: spec_mm("plain @ plain, ragged rows -> float32"),
    ),
    (
        ValueError,
        "index: a product of spec 'plain @ plain, gathered -> float32' needs index",
        lambda: spec_mm("plain @ plain, gathered -> float32"),
    ),
    (
        ValueError,
        "offs: a product of spec 'plain @ plain -> float32' takes no offs",
        lambda: spec_mm("plain @ plain -> float32", offs=OFFS),
    ),
    (
        ValueError,
        "index: a product of spec 'plain @ plain -> float32' takes no index",
        lambda: spec_mm("plain @ plain -> float32", index=OFFS),
    ),
    # Bytes of another type would be read as numbers of the format's.
    (TypeError, "a: data of format nvfp4 are torch.uint8, got", lambda: mm_of(data=A.data.view(torch.int8))),
    (ValueError, "a_scales: expected torch.float8_e4m3fn of", lambda: mm_of(scales=A.scales.view(torch.uint8))),
    (
        ValueError,
        "a_scales: expected torch.float8_e4m3fn of",
        lambda: mm_of(scales=A.scales.view(torch.float8_e8m0fnu)),
    ),
    (ValueError, "a_scales: expected torch.float8_e4m3fn of", lambda: mm_of(scales=A.scales.float())),
    (ValueError, "a_scales: expected torch.float8_e4m3fn of shape (4, 4)", lambda: mm_of(scales=A.scales[:3])),
    (ValueError, "a_scales: is on meta, a on cpu", lambda: mm_of(scales=A.scales.to("meta"))),
    (ValueError, "a_outer: is on meta, a on cpu", lambda: mm_of(outer=A.outer.to("meta"))),
    (ValueError, "a_scales: format nvfp4 needs block scales", lambda: mm_of(scales=None)),
    (ValueError, "a_outer: expected float32 of shape () or (4, 1), got", lambda: mm_of(outer=A.outer.double())),
    (ValueError, "a_outer: expected float32 of shape () or (4, 1), got", lambda: mm_of(outer=torch.ones(2))),
    (ValueError, "batch dimensions differ", lambda: op_mm(X, None, X[None], None)),
    (ValueError, "formats nvfp4 and mxfp8 cannot be multiplied", lambda: op_mm(A.data, "nvfp4", MX.data, "mxfp8")),
    (
        ValueError,
        "outer: in format float8_rowwise",
        lambda: QUANTIZE(X, "float8_rowwise", [-1, -2], outer=torch.ones(len(X), 1)),
    ),
    (ValueError, "dim=[-1, -2]: x has 1 dimensions", lambda: QUANTIZE(X[0], "nvfp4", [-1, -2])),
    (ValueError, "unknown layout 'x'", lambda: QUANTIZE(X, "nvfp4", [-1, -2], layout="x")),
    (ValueError, "dim=[-2]: x has 1 dimensions", lambda: QUANTIZE(X[0], "nvfp4", -2)),
    (ValueError, "values: expected some of [-1]", lambda: QUANTIZE(X, "nvfp4", values=[-2])),
    (
        ValueError,
        "values: go with linear scales by the rule 'amax', got 'linear' and 'mse'",
        lambda: QUANTIZE(X, "nvfp4", values=[-1], scale_rule="mse"),
    ),
    (ValueError, "operands: expected none", lambda: QUANTIZE(X, "nvfp4", operands=[X])),
    (
        ValueError,
        "scale_rule='mse': goes along one dimension, got [-1, -2]",
        lambda: QUANTIZE(X, "nvfp4", [-1, -2], scale_rule="mse"),
    ),
]


@pytest.mark.parametrize("error, message, call", BAD_CALLS, ids=itertools.count())
def test_bad_input_is_named(error, message, call):
    with pytest.raises(error, match=re.escape(message)):
        call()


@pytest.mark.parametrize("k", [33, 31, 15])
def test_a_plain_operand_must_have_the_packed_ones_length(k):
    """Packed 17 to 32 long, padded to 32: what a plain operand of that many columns can stand for."""
    packed = quantize(torch.randn(4, 17), "nvfp4")
    args = (packed.data, packed.scales, packed.outer, "plain @ nvfp4 -> float32")
    product = torch.ops.fp4compile.scaled_mm
    if k == 31:
        assert product(torch.randn(3, k), None, None, *args).shape == (3, 4)
        return
    with pytest.raises(ValueError, match=f"contraction dimensions differ: a has {k}, b has 32"):
        product(torch.randn(3, k), None, None, *args)


@pytest.mark.parametrize(
    "module", [checks, formats, layouts, matmul, ops_quantize, quantize_spec, reference], ids=lambda m: m.__name__
)
def test_checks_survive_python_dash_o(module):
    assert not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(inspect.getsource(module))))
