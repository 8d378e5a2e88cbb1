"""The ops that quantise and dequantise: shapes, dimensions, layouts, strides, and the caller's context."""

import itertools

import pytest
import torch

from fp4compile.formats.formats import NAMED, get
from fp4compile.ops.functional import quantize, scaled_mm
from tests.helpers.codes import SHAPES_AND_DIMS, same, same_bits, static_outer
from tests.helpers.hard_inputs import DTYPES, hard_input

NAMES = tuple(NAMED)
LAYOUTS = ("linear", "swizzled")


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
        if layout == "swizzled" and fmt.swizzles:
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


# ---------------------------------------------------------------- both directions


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_both_ways_are_the_two_quantisations(name, layout):
    fmt = get(name)
    if fmt.block is None and layout == "swizzled":
        return
    for shape in ((33, 70), (2, 5, 40), (0, 16), (3, 0)):
        x = hard_input("outliers", shape)
        for outer in (None,) if fmt.outer == "row" else (None, static_outer(fmt, ())):
            data, scales, fresh, columns, column_scales, column_fresh = torch.ops.fp4compile.quantize(
                x, name, [-1, -2], outer=outer, layout=layout
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_dequantize_casts_once(name, dtype):
    q = quantize(hard_input("outliers", (20, 70)), name)
    assert q.dequantize().dtype == torch.float32
    assert same_bits(q.dequantize(dtype), q.dequantize().to(dtype))


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
        args = (x, None, None, b.data, b.scales, b.outer, f"plain @ {name} -> float32")
        assert torch.ops.fp4compile.scaled_mm(*args).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
