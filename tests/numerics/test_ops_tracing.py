"""The ops as a compiler meets them: fake implementations, schemas, one graph for every shape."""

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from fp4compile.formats import formats
from fp4compile.formats.formats import NAMED, get
from fp4compile.formats.product_spec import text_of
from fp4compile.ops.functional import quantize
from fp4compile.ops.quantize import quantize_kernels
from tests.helpers.codes import SHAPES_AND_DIMS, same_bits, static_outer
from tests.helpers.hard_inputs import DTYPES

NAMES = tuple(NAMED)
LAYOUTS = ("linear", "swizzled")


# ---------------------------------------------------------------- fake implementations


def meta(tensors):
    """Shape, strides (that of a dimension of size 1 says nothing), dtype and device."""
    strides = [[stride for size, stride in zip(t.shape, t.stride(), strict=True) if size != 1] for t in tensors]
    return [(t.shape, stride, t.dtype, t.device) for t, stride in zip(tensors, strides, strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_fake_quantize_and_dequantize_agree_with_the_real_ones(name):
    """Of each shape both layouts, one of them with a global scale that is given."""
    fmt = get(name)
    for shape, dim in SHAPES_AND_DIMS:
        lead = list(shape)
        k = lead.pop(dim)
        for layout, given in zip(LAYOUTS, (False, True), strict=True):
            x, outer = torch.randn(shape), static_outer(fmt, lead) if given else None
            real = torch.ops.fp4compile.quantize(x, name, dim, outer=outer, layout=layout)
            scales, decode = real[1] if fmt.scale else None, outer if given else real[2] if fmt.outer else None
            values = torch.ops.fp4compile.dequantize(real[0], scales, decode, name, k, x.dtype)
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake = torch.ops.fp4compile.quantize(
                    mode.from_tensor(x),
                    name,
                    dim,
                    outer=None if outer is None else mode.from_tensor(outer),
                    layout=layout,
                )
                fake_values = torch.ops.fp4compile.dequantize(*fake, name, k, x.dtype)
            if 0 in shape:  # strides of empty tensors say nothing
                assert [t.shape for t in fake] == [t.shape for t in real] and fake_values.shape == values.shape
                assert [t.dtype for t in fake] == [t.dtype for t in real]
            else:
                assert meta(fake) == meta(real)
                assert meta([fake_values]) == meta([values])


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_fake_scaled_mm_agrees_with_the_real_one(lead, out_dtype):
    a, b = quantize(torch.randn(*lead, 5, 40), "nvfp4"), quantize(torch.randn(*lead, 7, 40), "nvfp4")
    args, bias = (a.data, a.scales, a.outer, b.data, b.scales, b.outer), torch.randn(7)
    spec = text_of("nvfp4", "nvfp4", out_dtype)
    real = torch.ops.fp4compile.scaled_mm(*args, spec, bias=bias)
    with FakeTensorMode() as mode:
        *fake, fake_bias = map(mode.from_tensor, (*args, bias))
        assert meta([torch.ops.fp4compile.scaled_mm(*fake, spec, bias=fake_bias)]) == meta([real])


def opcheck_samples():
    x, w = torch.randn(6, 40), torch.randn(9, 40)
    for name, dim, layout in (("nvfp4", -1, "linear"), ("nvfp4_16x16", 0, "swizzled"), ("mxfp8", 0, "linear")):
        yield "quantize", (x, name, dim), {"layout": layout}
    yield "quantize", (x, "nvfp4_rowwise"), {"outer": torch.full((6, 1), 0.01)}
    yield "quantize", (x, "float8_rowwise"), {}
    yield "quantize", (x[:, :37], "nvfp4"), {"values": [-1]}
    yield "quantize", (x, "nvfp4_rowwise"), {"outer": torch.full((6, 1), 0.01), "values": [-1]}
    yield "quantize", (x[0], "nvfp4_one_level"), {"values": [-1]}
    yield "quantize", (x.bfloat16(), "mxfp4", [-2]), {"values": [-2]}
    yield "quantize", (x, "nvfp4", [-1, -2]), {"layout": "swizzled"}
    yield "quantize", (x, "mxfp8_32x32", [-1, -2]), {}
    yield "quantize", (x, "float8_rowwise", [-1, -2]), {}
    yield "quantize", (x, "nvfp4_te", -2), {"seed": torch.tensor(3), "hadamard": True}
    yield "quantize", (x, "nvfp4_te", [-1, -2]), {"seed": torch.tensor(3), "hadamard": True}
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    trained = {"offs": offs, "seed": torch.tensor(3), "hadamard": True}
    yield "quantize", (x, "nvfp4_te", [-1, -2]), trained
    yield "quantize", (x, "nvfp4_te", [-1, -2]), {**trained, "values": [-2]}
    yield "quantize", (x, "float8_rowwise", [-1, -2]), {"offs": offs}
    yield "quantize", (x, "float8_1x128", [-1, -2]), {"offs": offs}
    yield "quantize", (x.view(2, 3, 40), "nvfp4_16x16", [-1, -2]), {"each_matrix": True, "layout": "swizzled"}
    a, b = quantize(x, "nvfp4"), quantize(w, "nvfp4_rowwise", layout="swizzled")
    yield "dequantize", (a.data, a.scales, a.outer, "nvfp4", 40, torch.bfloat16), {}
    yield "dequantize", (*torch.ops.fp4compile.quantize(x, "mxfp4")[:2], None, "mxfp4", 40, torch.float32), {}
    right, bias = (b.data, b.scales, b.outer), {"bias": torch.randn(9)}
    yield "scaled_mm", (a.data, a.scales, a.outer, *right, "nvfp4 @ nvfp4_rowwise -> bfloat16"), bias
    yield "scaled_mm", (x, None, None, *right, "plain @ nvfp4_rowwise -> float32"), {}


@pytest.mark.parametrize("op, args, kwargs", list(opcheck_samples()), ids=itertools.count())
def test_opcheck(op, args, kwargs):
    # PyTorch's schema check cannot compare float8 arguments with themselves; test_no_op_changes_... does it here.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    if not any(isinstance(v, torch.Tensor) and v.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu) for v in args):
        checks = ("test_schema", *checks)
    torch.library.opcheck(getattr(torch.ops.fp4compile, op).default, args, kwargs, test_utils=checks)


@pytest.mark.parametrize("op, args, kwargs", list(opcheck_samples()), ids=itertools.count())
def test_no_op_changes_or_returns_its_arguments(op, args, kwargs):
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
    before = [t.clone() for t in tensors]
    results = getattr(torch.ops.fp4compile, op)(*args, **kwargs)
    results = [results] if isinstance(results, torch.Tensor) else results
    assert all(same_bits(t, b) for t, b in zip(tensors, before, strict=True))
    storages = [t.untyped_storage().data_ptr() for t in (*tensors, *results) if t.numel()]
    assert len(set(storages)) == len(storages)


@pytest.mark.parametrize("shape", [(6, 40), (2, 3, 37)], ids=str)
@pytest.mark.parametrize(("name", "outer"), [
    ("nvfp4_one_level", False),
    *itertools.product(["nvfp4", "nvfp4_te", "nvfp4_rowwise", "nvfp4_16x16"], [False, True])])  # fmt: skip
def test_expanded_values_are_a_plain_operand(name, outer, shape):
    """Of the codes and of their values, each with the global scale, `scaled_mm` makes the same bits."""
    ops, fmt = torch.ops.fp4compile, formats.get(name)
    x, w, bias = torch.randn(shape), torch.randn(9, shape[-1]), torch.randn(9)
    given = torch.rand((*shape[:-1], 1) if fmt.outer == "row" else ()) + 0.01 if outer else None
    data, scales, computed = ops.quantize(x, name, outer=given)
    values, also_computed = ops.quantize(x, name, outer=given, values=[-1])[::2]
    assert same_bits(computed, also_computed)
    factor = given if outer else computed if fmt.outer else None
    *weight, w_outer = ops.quantize(w, name)
    weight += [w_outer if fmt.outer else None]
    expected = ops.scaled_mm(data, scales, factor, *weight, f"{name} @ {name} -> bfloat16", bias=bias)
    got = ops.scaled_mm(values, None, factor, *weight, f"plain @ {name} -> bfloat16", bias=bias)
    assert same_bits(got, expected)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "float8_rowwise"])
def test_formats_that_are_not_expanded(name):
    """Numbers of 32 bits; by the reference, on a fake tensor and on CUDA: the same refusal."""
    refusal = f"format: 16 bits hold the values of .* got {name} of torch.float32"
    for run in (torch.ops.fp4compile.quantize, quantize_kernels):
        with pytest.raises(ValueError, match=refusal):
            run(torch.randn(4, 32), name, values=[-1])
    with FakeTensorMode(), pytest.raises(ValueError, match=refusal):
        torch.ops.fp4compile.quantize(torch.empty(4, 32), name, values=[-1])


# ---------------------------------------------------------------- dynamic shapes


def linear_of(a_format, b_format, layout):
    def operand(x, fmt, dim):
        data, scales, outer = torch.ops.fp4compile.quantize(x, fmt, dim, layout=layout)
        return data, scales, outer if get(fmt).outer else None

    def quantised_linear(x, w):
        q, p = operand(x, a_format, -1), operand(w, b_format, 0)
        values = torch.ops.fp4compile.dequantize(*q, a_format, x.shape[1], torch.float32)
        return torch.ops.fp4compile.scaled_mm(*q, *p, f"{a_format} @ {b_format} -> float32"), values.sum(-1)

    return quantised_linear


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("a_format, b_format", [("nvfp4_rowwise", "nvfp4_16x16"), ("mxfp8", "mxfp8_32x32")])
def test_one_graph_serves_every_shape(a_format, b_format, layout):
    """No guard on divisibility. (PyTorch itself tells one block from several: sizes of 1 are always special.)"""
    fn = linear_of(a_format, b_format, layout)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fn, dynamic=True, fullgraph=True, backend=counter)
    for m, k, n in ((33, 40, 65), (130, 64, 33), (37, 131, 129), (64, 96, 256)):
        x, w = torch.randn(m, k), torch.randn(k, n)
        for got, expected in zip(compiled(x, w), fn(x, w), strict=True):
            assert same_bits(got, expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_count_that_only_the_device_knows(layout):
    """An unbacked size, as the token count of an expert: nothing may guard on it."""
    fn = linear_of("nvfp4", "nvfp4", layout)
    torch._dynamo.reset()
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    w = torch.randn(40, 8)
    for m in (6, 130):
        x = torch.randn(m, 40)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        for got, expected in zip(compiled(x, w), fn(x, w), strict=True):
            assert same_bits(got, expected)
