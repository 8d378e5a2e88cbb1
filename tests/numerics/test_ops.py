import itertools
import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from fp4compile import formats
from fp4compile.formats import NAMED, get
from fp4compile.functional import BlockScaled, quantize, scaled_mm
from fp4compile.ops import fake_quantize_cuda
from tests.helpers.hard_inputs import DTYPES, FINITE, hard_input

NAMES = tuple(NAMED)
LAYOUTS = ("linear", "swizzled")
SHAPES = [
    (16,),
    (7,),
    (1, 1),
    (5, 33),
    (33, 64),
    (2, 3, 40),
    (2, 3, 4, 17),
    (0, 16),
    (3, 0),
    (0,),
    (2, 0, 32),
    (0, 3, 5),
]
SHAPES_AND_DIMS = [(shape, dim) for shape in SHAPES for dim in range(-len(shape), len(shape))]


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def same_bits(a, b) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def same(a: BlockScaled, b: BlockScaled) -> bool:
    fields = same_bits(a.data, b.data) and same_bits(a.scales, b.scales) and same_bits(a.outer, b.outer)
    return fields and (a.format, a.shape, a.layout) == (b.format, b.shape, b.layout)


def static_outer(fmt, lead, value=0.01):
    """An outer scale for a format that has one, so that parts of a tensor quantise like the whole."""
    if fmt.outer is None:
        return None
    return torch.full((*lead, 1) if fmt.outer == "row" else (), value)


# ---------------------------------------------------------------- quantize: shapes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_shapes_of_a_quantised_tensor(name, layout):
    fmt = get(name)
    for shape, dim in SHAPES_AND_DIMS:
        lead = list(shape)
        k = lead.pop(dim)
        blocks = -(-k // fmt.block_cols)
        q = quantize(torch.randn(shape), name, dim=dim, layout=layout)
        assert q.shape == (*lead, k)
        assert q.data.shape == (*lead, blocks * fmt.block_cols // (2 if fmt.packed else 1))
        assert q.data.dtype == fmt.data_dtype and q.data.is_contiguous()
        if fmt.outer is None:
            assert q.outer is None
        else:
            assert q.outer.shape == ((*lead, 1) if fmt.outer == "row" else ())
            assert q.outer.dtype == torch.float32
        if fmt.scale is None:
            assert q.scales is None
            continue
        rows = lead[-1] if lead else 1
        if layout == "swizzled":
            expected = (*lead[:-1], -(-rows // 128) * -(-blocks // 4) * 512)
        else:
            expected = (*lead[:-1], -(-rows // fmt.block[0]), blocks) if lead else (blocks,)
        assert q.scales.shape == expected
        assert q.scales.dtype == fmt.scale_dtype and q.scales.is_contiguous()


@pytest.mark.parametrize("name", NAMES)
def test_any_dim_equals_the_last_one_of_a_moved_copy(name):
    for shape, dim in SHAPES_AND_DIMS:
        x = hard_input("outliers", shape)
        moved = x.movedim(dim, -1).contiguous()
        for layout in LAYOUTS:
            assert same(quantize(x, name, dim=dim, layout=layout), quantize(moved, name, layout=layout))


@pytest.mark.parametrize("name", NAMES)
def test_along_rows_is_the_transpose(name):
    """dim=0 of a matrix: blocks of 32 x 1 or 16 x 1."""
    x = hard_input("scaled_rows", (50, 20))
    assert same(quantize(x, name, dim=0), quantize(x.t().contiguous(), name))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_each_matrix_of_a_batch_is_quantised_alone(name, layout):
    fmt = get(name)
    x = hard_input("outliers", (2, 3, 35, 40))
    outer = static_outer(fmt, (2, 3, 35))
    q = quantize(x, name, outer=outer, layout=layout)
    for i, j in itertools.product(range(2), range(3)):
        part = quantize(x[i, j], name, outer=outer[i, j] if fmt.outer == "row" else outer, layout=layout)
        assert same_bits(q.data[i, j], part.data)
        assert fmt.scale is None or same_bits(q.scales[i, j], part.scales)


@pytest.mark.parametrize("name", NAMES)
def test_one_dimension_is_one_row(name):
    x = hard_input("ties_fp4", (70,))
    for layout in LAYOUTS:
        q, row = quantize(x, name, layout=layout), quantize(x.unsqueeze(0), name, layout=layout)
        assert same_bits(q.data, row.data[0])
        assert q.scales is None or same_bits(q.scales.flatten(), row.scales.flatten())
        assert same_bits(q.dequantize(), row.dequantize()[0])
    static = static_outer(get(name), ())
    assert quantize(x, name, outer=static).dequantize().shape == (70,)


@pytest.mark.parametrize("k", [1, 15, 17, 31, 33])
@pytest.mark.parametrize("name", NAMES)
def test_padding_is_zero(name, k):
    fmt = get(name)
    x = hard_input("outliers", (5, k))
    q = quantize(x, name)
    whole = -(-k // fmt.block_cols) * fmt.block_cols
    padded = quantize(torch.nn.functional.pad(x, (0, whole - k)), name)
    assert same_bits(q.data, padded.data) and same_bits(q.scales, padded.scales) and same_bits(q.outer, padded.outer)
    assert padded.dequantize()[:, k:].count_nonzero() == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_strides_do_not_matter_and_the_input_is_left_alone(name, dtype):
    base = hard_input("outliers", (64, 96), dtype)
    before = base.clone()
    for x in (
        base.t(),
        base[:, ::2],
        base[::3],
        base[:, 5:70],
        base[0].expand(40, 96),
        base.view(8, 8, 96).transpose(0, 1),
    ):
        for layout in LAYOUTS:
            assert same(quantize(x, name, layout=layout), quantize(x.contiguous(), name, layout=layout))
    quantize(base, name)
    assert same_bits(base, before)


@pytest.mark.parametrize("name", NAMES)
def test_16_bit_input_is_the_same_numbers_in_float32(name):
    for dtype in (torch.bfloat16, torch.float16):
        x = hard_input("scaled_rows", (20, 70), dtype)
        assert same(quantize(x, name), quantize(x.float(), name))


@pytest.mark.parametrize("name", NAMES)
def test_a_format_may_be_named_spelled_out_or_given(name):
    x = torch.randn(3, 40)
    assert same(quantize(x, name), quantize(x, get(name).spec))
    assert same(quantize(x, name), quantize(x, get(name)))


@pytest.mark.parametrize("name", [n for n in NAMES if NAMED[n].outer])
def test_a_static_outer_scale_is_kept(name):
    x = hard_input("randn", (6, 64))
    dynamic = quantize(x, name)
    static = quantize(x, name, outer=dynamic.outer)
    assert static.outer is dynamic.outer
    assert torch.ops.fp4compile.quantize(x, name, outer=dynamic.outer)[2].numel() == 0  # no op returns its input
    if name == "nvfp4":
        assert same(static, dynamic)
    larger = quantize(x, name, outer=dynamic.outer * 4)
    assert not same_bits(larger.data, dynamic.data) or not same_bits(larger.scales, dynamic.scales)
    assert (larger.dequantize() - x).abs().max() < 0.5


def test_no_gradient_and_no_identity_surprises():
    x = torch.randn(4, 32, requires_grad=True)
    q = quantize(x, "nvfp4")
    assert not any(t.requires_grad for t in (q.data, q.scales, q.outer, q.dequantize()))
    assert q == q and q != quantize(x, "nvfp4")
    with torch.inference_mode():
        assert same(quantize(x, "nvfp4"), q)


# ---------------------------------------------------------------- quantize_both


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_both_ways_are_the_two_quantisations(name, layout):
    fmt = get(name)
    if fmt.block is None and layout == "swizzled":
        return
    for shape in ((33, 70), (2, 5, 40), (0, 16), (3, 0)):
        x = hard_input("outliers", shape)
        for outer in (None,) if fmt.outer == "row" else (None, static_outer(fmt, ())):
            data, scales, fresh, columns, column_scales, column_fresh = torch.ops.fp4compile.quantize_both(
                x, name, outer=outer, layout=layout
            )
            rows, cols = (quantize(x, name, dim=dim, outer=outer, layout=layout) for dim in (-1, -2))
            for got, expected in ((data, rows.data), (columns, cols.data)):
                assert same_bits(got, expected)
            for got, expected in ((scales, rows.scales), (column_scales, cols.scales)):
                assert got.numel() == 0 if expected is None else same_bits(got, expected)
            if outer is None and fmt.outer:
                assert same_bits(fresh, rows.outer)
            else:
                assert fresh.numel() == 0
            if fmt.outer == "row":
                assert same_bits(column_fresh, cols.outer)
            else:
                assert column_fresh.numel() == 0


# ---------------------------------------------------------------- dequantize


@pytest.mark.parametrize("name", NAMES)
def test_both_layouts_mean_the_same_values(name):
    for shape, dim in SHAPES_AND_DIMS:
        x = hard_input("outliers", shape)
        linear = quantize(x, name, dim=dim).dequantize()
        assert same_bits(linear, quantize(x, name, dim=dim, layout="swizzled").dequantize())
        assert linear.shape == x.movedim(dim, -1).shape and linear.is_contiguous()


@pytest.mark.parametrize("name", NAMES)
def test_both_layouts_mean_the_same_values_over_several_tiles(name):
    x = hard_input("scaled_rows", (2, 150, 300))
    assert same_bits(quantize(x, name).dequantize(), quantize(x, name, layout="swizzled").dequantize())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_dequantize_casts_once(name, dtype):
    q = quantize(hard_input("outliers", (20, 70)), name)
    assert q.dequantize().dtype == torch.float32
    assert same_bits(q.dequantize(dtype), q.dequantize().to(dtype))


# ---------------------------------------------------------------- fake implementations


def meta(tensors):
    """Shape, strides (that of a dimension of size 1 says nothing), dtype and device."""
    strides = [[stride for size, stride in zip(t.shape, t.stride(), strict=True) if size != 1] for t in tensors]
    return [(t.shape, stride, t.dtype, t.device) for t, stride in zip(tensors, strides, strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_fake_quantize_and_dequantize_agree_with_the_real_ones(name, layout):
    fmt = get(name)
    for shape, dim in SHAPES_AND_DIMS:
        lead = list(shape)
        k = lead.pop(dim)
        for given in (False, True):
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
    args = (a.data, a.scales, a.outer, "nvfp4", b.data, b.scales, b.outer, "nvfp4", torch.randn(7), out_dtype)
    real = torch.ops.fp4compile.scaled_mm(*args)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in args]
        assert meta([torch.ops.fp4compile.scaled_mm(*fake)]) == meta([real])


def opcheck_samples():
    x, w = torch.randn(6, 40), torch.randn(9, 40)
    for name, dim, layout in (("nvfp4", -1, "linear"), ("nvfp4_16x16", 0, "swizzled"), ("mxfp8", 0, "linear")):
        yield "quantize", (x, name, dim), {"layout": layout}
    yield "quantize", (x, "nvfp4_rowwise"), {"outer": torch.full((6, 1), 0.01)}
    yield "quantize", (x, "float8_rowwise"), {}
    yield "fake_quantize", (x[:, :37], "nvfp4"), {}
    yield "fake_quantize", (x, "nvfp4_rowwise"), {"outer": torch.full((6, 1), 0.01)}
    yield "fake_quantize", (x[0], "nvfp4_one_level"), {}
    yield "quantize_both", (x, "nvfp4"), {"layout": "swizzled"}
    yield "quantize_both", (x, "mxfp8_32x32"), {}
    yield "quantize_both", (x, "float8_rowwise"), {}
    yield "quantize", (x, "nvfp4_te", -2), {"seed": torch.tensor(3), "hadamard": True}
    yield "quantize_both", (x, "nvfp4_te"), {"seed": torch.tensor(3), "hadamard": True}
    a, b = quantize(x, "nvfp4"), quantize(w, "nvfp4_rowwise", layout="swizzled")
    yield "dequantize", (a.data, a.scales, a.outer, "nvfp4", 40, torch.bfloat16), {}
    yield "dequantize", (*torch.ops.fp4compile.quantize(x, "mxfp4")[:2], None, "mxfp4", 40, torch.float32), {}
    right = (b.data, b.scales, b.outer, "nvfp4_rowwise")
    yield "scaled_mm", (a.data, a.scales, a.outer, "nvfp4", *right, torch.randn(9), torch.bfloat16), {}
    yield "scaled_mm", (x, None, None, None, *right, None, torch.float32), {}


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
    results = results if isinstance(results, tuple) else (results,)
    assert all(same_bits(t, b) for t, b in zip(tensors, before, strict=True))
    storages = [t.untyped_storage().data_ptr() for t in (*tensors, *results) if t.numel()]
    assert len(set(storages)) == len(storages)


@pytest.mark.parametrize("shape", [(6, 40), (2, 3, 37)], ids=str)
@pytest.mark.parametrize(("name", "outer"), [
    ("nvfp4_one_level", False), *itertools.product(["nvfp4", "nvfp4_te", "nvfp4_rowwise"], [False, True])])  # fmt: skip
def test_expanded_values_are_a_plain_operand(name, outer, shape):
    """Of the codes and of their values, each with the outer scale, `scaled_mm` makes the same bits."""
    ops, fmt = torch.ops.fp4compile, formats.get(name)
    x, w, bias = torch.randn(shape), torch.randn(9, shape[-1]), torch.randn(9)
    given = torch.rand((*shape[:-1], 1) if fmt.outer == "row" else ()) + 0.01 if outer else None
    data, scales, computed = ops.quantize(x, name, outer=given)
    values, also_computed = ops.fake_quantize(x, name, outer=given)
    assert same_bits(computed, also_computed)
    factor = given if outer else computed if fmt.outer else None
    *weight, w_outer = ops.quantize(w, name)
    weight += [w_outer if fmt.outer else None, name]
    expected = ops.scaled_mm(data, scales, factor, name, *weight, bias, torch.bfloat16)
    assert same_bits(ops.scaled_mm(values, None, factor, None, *weight, bias, torch.bfloat16), expected)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4_16x16", "float8_rowwise"])
def test_formats_that_are_not_expanded(name):
    """By the reference, on a fake tensor and on CUDA: the same refusal."""
    for run in (torch.ops.fp4compile.fake_quantize, fake_quantize_cuda):
        with pytest.raises(ValueError, match=f"format: .* format {name} is another"):
            run(torch.randn(4, 32), name)
    with FakeTensorMode(), pytest.raises(ValueError, match="format: "):
        torch.ops.fp4compile.fake_quantize(torch.empty(4, 32), name)


# ---------------------------------------------------------------- dynamic shapes


def linear_of(a_format, b_format, layout):
    def operand(x, fmt, dim):
        data, scales, outer = torch.ops.fp4compile.quantize(x, fmt, dim, layout=layout)
        return data, scales, outer if get(fmt).outer else None

    def quantised_linear(x, w):
        q, p = operand(x, a_format, -1), operand(w, b_format, 0)
        values = torch.ops.fp4compile.dequantize(*q, a_format, x.shape[1], torch.float32)
        return torch.ops.fp4compile.scaled_mm(*q, a_format, *p, b_format, None, torch.float32), values.sum(-1)

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


# ---------------------------------------------------------------- scaled_mm


def assert_product(out, a: BlockScaled, b: BlockScaled, bias=None):
    """Within float32 summation error, and one rounding to the output type, of the float64 product."""
    left, right = a.dequantize().double(), b.dequantize().double()
    expected = left @ right.mT
    k = left.shape[-1]
    bound = (k + 4) * 2.0**-24 * (left.abs() @ right.abs().mT)
    if bias is not None:
        expected = expected + bias.double()
        bound = bound + 2.0**-23 * expected.abs()
    eps = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[out.dtype]
    error = (out.double() - expected).abs()
    assert (error <= bound * (1 + eps) + eps * expected.abs() + 1e-30).all(), (error - bound).max()


OUTERS = {"none": "nvfp4_one_level", "tensor": "nvfp4", "row": "nvfp4_rowwise"}


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("right", OUTERS)
@pytest.mark.parametrize("left", OUTERS)
def test_scaled_mm_with_every_mix_of_outer_scales(left, right, bias_dtype, out_dtype):
    a = quantize(hard_input("outliers", (19, 70)), OUTERS[left])
    b = quantize(hard_input("randn", (23, 70)), OUTERS[right])
    bias = None if bias_dtype is None else torch.randn(23).to(bias_dtype)
    out = scaled_mm(a, b, bias, out_dtype)
    assert (out.shape, out.dtype) == ((19, 23), out_dtype)
    assert_product(out, a, b, bias)


PAIRS = [(a, b) for a in NAMES for b in NAMES if formats.compatible(NAMED[a], NAMED[b])]


@pytest.mark.parametrize("a_name, b_name", PAIRS)
def test_scaled_mm_of_every_compatible_pair(a_name, b_name):
    a, b = quantize(hard_input("randn", (33, 70)), a_name), quantize(hard_input("zero_blocks", (20, 70)), b_name)
    linear = scaled_mm(a, b, out_dtype=torch.float32)
    assert_product(linear, a, b)
    swizzled = [quantize(q.dequantize(), q.format, outer=q.outer, layout="swizzled") for q in (a, b)]
    plain = [quantize(q.dequantize(), q.format, outer=q.outer) for q in (a, b)]
    assert same_bits(scaled_mm(*swizzled), scaled_mm(*plain))
    assert same_bits(scaled_mm(swizzled[0], plain[1]), scaled_mm(*plain))


@pytest.mark.parametrize("name", FINITE)
def test_scaled_mm_on_hard_inputs(name):
    for fmt in ("nvfp4", "nvfp4_rowwise", "mxfp8", "mxfp4"):
        a, b = quantize(hard_input(name, (20, 64)), fmt), quantize(hard_input("randn", (12, 64)), fmt)
        if name not in ("huge", "tiny"):  # out of float32's range before the outer scales, or the product of them
            assert_product(scaled_mm(a, b, out_dtype=torch.float32), a, b)


@pytest.mark.parametrize("lead", [(3,), (2, 3), (0,)])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_rowwise", "nvfp4_16x16", "mxfp8", "float8_rowwise"])
def test_scaled_mm_batched(name, lead):
    a, b = quantize(torch.randn(*lead, 19, 40), name), quantize(torch.randn(*lead, 21, 40), name)
    bias = torch.randn(21)
    out = scaled_mm(a, b, bias, torch.float32)
    assert out.shape == (*lead, 19, 21)
    assert_product(out, a, b, bias)


@pytest.mark.parametrize("name", ["nvfp4_rowwise", "mxfp8"])
def test_a_right_matrix_of_two_dimensions_serves_a_batch(name):
    """At the level of the ops: what matmul makes of a weight."""
    x, w = quantize(torch.randn(2, 3, 19, 40), name), quantize(torch.randn(21, 40), name)
    out = torch.ops.fp4compile.scaled_mm(
        x.data, x.scales, x.outer, name, w.data, w.scales, w.outer, name, None, torch.float32
    )
    assert out.shape == (2, 3, 19, 21)
    assert_product(out, x, w)


@pytest.mark.parametrize("m, n, k", [(0, 5, 32), (5, 0, 32), (5, 4, 0), (0, 0, 0), (1, 1, 1)])
@pytest.mark.parametrize("name", NAMES)
def test_scaled_mm_of_empty_operands(name, m, n, k):
    a, b = quantize(torch.randn(m, k), name), quantize(torch.randn(n, k), name)
    bias = torch.randn(n)
    out = scaled_mm(a, b, bias, torch.float32)
    assert out.shape == (m, n)
    assert k or torch.equal(out, bias.expand(m, n))


def ones(rows, fmt, outer):
    """[rows, 16] of ones: the block scale times the outer one is exact."""
    q = quantize(torch.ones(rows, 16), "nvfp4_one_level", layout="linear")
    return BlockScaled(q.data, q.scales, outer, get(fmt), (rows, 16))


def test_outer_scales_are_multiplied_first_then_applied_once():
    """Two float32 roundings, (sum) * (outer_a * outer_b): other orders of the same factors give other bits."""
    gen = torch.Generator().manual_seed(0)
    outer_a, outer_b = torch.rand(64, 1, generator=gen), torch.rand(64, 1, generator=gen)
    one = ones(1, "nvfp4", None).dequantize().sum()
    out = scaled_mm(ones(64, "nvfp4_rowwise", outer_a), ones(64, "nvfp4_rowwise", outer_b), out_dtype=torch.float32)
    total = (one / 16) ** 2 * 16
    assert torch.equal(out, total * (outer_a * outer_b.t()))
    assert not torch.equal(out, total * outer_a * outer_b.t())


def test_outer_scales_come_before_the_bias_and_the_cast():
    total = ones(1, "nvfp4", None).dequantize().square().sum()
    big, small = torch.tensor(2.0**18), torch.tensor(2.0**-18)
    # float16 ends at 65504: the product is finite only if both outer scales are in before the cast.
    out = scaled_mm(ones(2, "nvfp4", big), ones(2, "nvfp4", big * small * small), out_dtype=torch.float16)
    assert torch.equal(out, total.expand(2, 2).half())
    # The bias is not scaled.
    out = scaled_mm(ones(2, "nvfp4", small), ones(2, "nvfp4", small), torch.tensor([1.0, 3.0]), torch.float32)
    assert torch.equal(out, (total * 2.0**-36 + torch.tensor([1.0, 3.0])).expand(2, 2))
    # 257 is no bfloat16, 258 is: the bias comes before the cast.
    out = scaled_mm(ones(1, "nvfp4", 257 / total), ones(1, "nvfp4", None), torch.ones(1), torch.bfloat16)
    assert out.item() == 258


@pytest.mark.parametrize("k", [64, 50, 16, 1])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_plain_operand_on_either_side(name, k, dtype):
    """Weight-only products: format None, and no padding of the plain operand."""
    x, q = hard_input("randn", (9, k), dtype), quantize(hard_input("outliers", (13, k)), name)
    plain, packed = (x, None, None, None), (q.data, q.scales, q.outer, name)
    expected = x.double() @ q.dequantize().double().t()
    bound = (k + 4) * 2.0**-24 * (x.double().abs() @ q.dequantize().double().abs().t())
    left = torch.ops.fp4compile.scaled_mm(*plain, *packed, None, torch.float32)
    right = torch.ops.fp4compile.scaled_mm(*packed, *plain, None, torch.float32)
    assert ((left.double() - expected).abs() <= bound).all()
    assert ((right.double() - expected.t()).abs() <= bound.t()).all()


def test_two_plain_operands():
    x, w, bias = torch.randn(4, 10), torch.randn(5, 10), torch.randn(5)
    out = torch.ops.fp4compile.scaled_mm(x, None, None, None, w, None, None, None, bias, torch.float32)
    torch.testing.assert_close(out, x @ w.t() + bias)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_non_finite_input_reaches_the_product(name, value):
    fmt = get(name)
    x, w = hard_input("randn", (40, 64)), hard_input("randn", (8, 64))
    x[35, 3] = value
    for out in (
        scaled_mm(quantize(x, name), quantize(w, name), out_dtype=torch.bfloat16),
        scaled_mm(quantize(w, name), quantize(x, name), out_dtype=torch.bfloat16).t(),
    ):
        assert not out[35].isfinite().any()
        assert fmt.outer == "tensor" or out[:32].isfinite().all()


# ---------------------------------------------------------------- the caller's context


@pytest.mark.parametrize("name", NAMES)
def test_autocast_does_not_touch_the_arithmetic(name):
    x, w = hard_input("outliers", (9, 70)), hard_input("randn", (5, 70))
    a, b = quantize(x, name), quantize(w, name)
    product = scaled_mm(a, b, out_dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(quantize(x, name), a)
        assert same_bits(a.dequantize(), quantize(x, name).dequantize())
        assert same_bits(scaled_mm(a, b, out_dtype=torch.float32), product)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_default_dtype_does_not_matter(name, default):
    x, w = hard_input("outliers", (9, 70)), hard_input("randn", (5, 70))
    a, b = quantize(x, name), quantize(w, name)
    values, product = a.dequantize(), scaled_mm(a, b)
    torch.set_default_dtype(default)
    try:
        assert same(quantize(x, name), a)
        assert same_bits(a.dequantize(), values) and same_bits(scaled_mm(a, b), product)
        args = (x, None, None, None, b.data, b.scales, b.outer, name, None, torch.float32)
        assert torch.ops.fp4compile.scaled_mm(*args).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
