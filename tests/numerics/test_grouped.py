"""Grouped operands: what each group gets is what it would get alone, padding is zero, and groups do not meet."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

import fp4compile
from fp4compile.formats import formats, reference
from fp4compile.formats.grouping import Groups, padded_rows
from fp4compile.formats.layouts import ceil_div, from_swizzled, swizzled_numel
from fp4compile.formats.operand import Operand
from tests.helpers.arguments import times
from tests.helpers.hard_inputs import hard_input

ops = torch.ops.fp4compile
ROWS, COLS = 190, 80
ENDS = [0, 3, 133, 133, 134, 170]  # empty ones, one of a row, one over several tiles, and rows of none
KINDS = ("scaled_rows", "zero_blocks", "one_nan")  # blocks are the reference's own; here it is the global scales
BLOCKS_OF_ROWS = [name for name, fmt in formats.NAMED.items() if not fmt.square]


def offsets(ends=ENDS):
    return torch.tensor(ends, dtype=torch.int32)


def spans(ends=ENDS):
    return list(zip([0, *ends[:-1]], ends, strict=True))


def same(x, y):
    """Equal bits, a NaN equal to itself."""
    assert x.shape == y.shape and x.dtype == y.dtype
    if x.element_size() == 1:
        x, y = x.view(torch.uint8), y.view(torch.uint8)
    return torch.equal(x.nan_to_num(-1), y.nan_to_num(-1)) if x.is_floating_point() else torch.equal(x, y)


def scale_tiles(scales, columns, start, rows):
    """The bytes of a group in swizzled scales of padded rows: they are one run."""
    begin = swizzled_numel(start, columns)
    return scales[begin : begin + swizzled_numel(rows, columns)]


@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("name", BLOCKS_OF_ROWS)
def test_rows_of_a_group_are_quantised_as_if_alone(name, layout):
    fmt = formats.get(name)
    for kind in KINDS:
        x = hard_input(kind, (ROWS, COLS), block=fmt.block_cols if fmt.block else 16)
        data, scales, outer = ops.quantize(x, name, -1, offs=offsets(), layout=layout)
        groups = Groups.of(offsets(), ROWS)
        for g, (start, end) in enumerate(spans()):
            alone, alone_scales, alone_outer = reference.quantize(x[start:end], fmt, None, layout)
            assert same(data[start:end], alone)
            if fmt.scale is not None and (layout == "linear" or not fmt.swizzles):
                assert same(scales[start:end], alone_scales)
            elif fmt.scale is not None:
                place = groups.padded_starts[g].item()
                assert same(scale_tiles(scales, ceil_div(COLS, fmt.block_cols), place, end - start), alone_scales)
            if fmt.outer is not None:
                assert same(outer[g] if fmt.outer == "tensor" else outer[start:end], alone_outer)


@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("name", BLOCKS_OF_ROWS)
def test_columns_of_a_group_are_quantised_as_if_alone(name, hadamard, layout):
    fmt = formats.get(name)
    if hadamard and fmt.scale != "e4m3":
        with pytest.raises(ValueError, match="hadamard: the transform goes with NVFP4"):
            ops.quantize(torch.randn(ROWS, COLS), name, -2, offs=offsets(), hadamard=True)
        return
    width, block = padded_rows(ROWS, len(ENDS)), fmt.block_cols
    for kind in KINDS:
        x = hard_input(kind, (ROWS, COLS), block=fmt.block_cols if fmt.block else 16)
        data, scales, outer = ops.quantize(x, name, -2, offs=offsets(), layout=layout, hadamard=hadamard)
        if fmt.swizzles and layout == "swizzled":
            scales = from_swizzled(scales, COLS, width // block)
        groups, seen = Groups.of(offsets(), ROWS), torch.zeros(width // block, dtype=torch.bool)
        blocks = data.view(torch.uint8).view(COLS, width // block, -1)
        for g, (start, end) in enumerate(spans()):
            alone, alone_scales, alone_outer = reference.quantize(x[start:end].t(), fmt, transform=hadamard)
            place = groups.padded_starts[g].item() // block
            own = slice(place, place + ceil_div(end - start, block))
            seen[own] = True
            assert same(blocks[:, own].flatten(1), alone.view(torch.uint8))
            if fmt.scale is not None:
                assert same(scales[:, own], alone_scales)
            if fmt.outer is not None:
                assert same(outer[g], alone_outer)
        assert not blocks[:, ~seen].any()
        assert fmt.scale is None or not scales[:, ~seen].view(torch.uint8).any()


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("name", formats.NAMED)
def test_each_matrix_is_quantised_as_if_alone(name, dim):
    fmt = formats.get(name)
    x = torch.randn(3, 48, 80) * torch.tensor([1.0, 100.0, 0.0])[:, None, None]
    for layout in ("linear", "swizzled"):
        found = ops.quantize(x, name, dim, each_matrix=True, layout=layout)
        for g in range(3):
            alone = reference.quantize(x[g].movedim(dim, -1), fmt, None, layout)
            assert all(same(ours[g], theirs) for ours, theirs in zip(found, alone, strict=True) if theirs is not None)


@pytest.mark.parametrize("name", formats.NAMED)
def test_both_directions_are_the_two_quantisations(name):
    fmt = formats.get(name)
    x = hard_input("outliers", (3, 48, 80) if fmt.square else (ROWS, COLS))
    each = {"each_matrix": True} if fmt.square else {"offs": offsets()}
    trained = fmt.scale == "e4m3" and not fmt.square
    for options in ({}, {"layout": "swizzled"}, *([{"hadamard": True, "seed": torch.tensor(3)}] if trained else [])):
        found = ops.quantize(x, name, [-1, -2], **each, **options)
        apart = fmt.outer == "row" or "hadamard" in options
        rows = ops.quantize(x, name, **each, **{**options, "hadamard": False})
        columns = ops.quantize(x, name, -2, **each, **options)
        assert all(map(same, found, (*rows, *columns[:2], columns[2] if apart else torch.empty(0))))


@pytest.mark.parametrize("name", formats.NAMED)
def test_weights_of_experts_are_dequantised_each_as_if_alone(name):
    """Whatever a product would make of their tokens."""
    fmt = formats.get(name)
    x = torch.stack([hard_input(kind, (48, 77), block=fmt.block_cols) for kind in KINDS])
    for layout in ("linear", "swizzled"):
        data, scales, outer = ops.quantize(x, name, each_matrix=True, layout=layout)
        scales, outer = scales if fmt.scale else None, outer if fmt.outer else None
        args = (data, scales, outer, name, 77, torch.bfloat16)
        found = ops.dequantize(*args, "mxfp8", torch.tensor(0.5))
        for g, matrix in enumerate(x):
            alone = reference.quantize(matrix, fmt, None, layout)
            assert same(found[g], reference.dequantize(*alone, fmt, 77, torch.bfloat16))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = ops.dequantize(*args)
    assert (fake.shape, fake.dtype, fake.stride()) == (found.shape, found.dtype, found.stride())


@pytest.mark.parametrize("name", ["nvfp4_te", "mxfp4"])
def test_seeded_codes_are_neighbours_of_the_value(name):
    """Where the random bits lie is a matter of the padded place; each code is still one of two."""
    fmt, x = formats.get(name), torch.randn(ROWS, COLS)
    seed = torch.tensor(7)
    for dim in (-1, -2):
        plain, scales, _ = ops.quantize(x, name, dim, offs=offsets())
        seeded, same_scales, _ = ops.quantize(x, name, dim, offs=offsets(), seed=seed)
        again, *_ = ops.quantize(x, name, dim, offs=offsets(), seed=seed)
        assert same(scales, same_scales) and torch.equal(seeded, again) and not torch.equal(seeded, plain)
        steps = reference.unpack(plain).int() - reference.unpack(seeded).int()
        assert steps[: ENDS[-1] if dim == -1 else None].remainder(8).unique().tolist() == [0, 1, 7]
    assert fmt.packed


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_te", "float8_rowwise"])
def test_a_nan_stays_in_its_group(name):
    x = torch.randn(ROWS, COLS)
    spoilt = x.clone()
    spoilt[50, 5] = torch.nan  # in group 2
    for dim in (-1, -2):
        for ours, theirs in zip(*(ops.quantize(t, name, dim, offs=offsets()) for t in (x, spoilt)), strict=True):
            if formats.get(name).outer == "tensor" and ours.dim() == 1:
                assert theirs.isnan().tolist() == [False, False, True, False, False, False]
    weights = torch.randn(len(ENDS), 64, COLS)
    b = ops.quantize(weights, name, each_matrix=True)
    out = product(ops.quantize(spoilt, name, offs=offsets()), b, name)
    assert out[3:133].isnan().any() and not out[:3].isnan().any() and not out[133:].isnan().any()


def product(a, b, name, ends=ENDS, rows=ROWS):
    fmt = formats.get(name)

    def operand(found):
        data, scales, outer = found
        return data, scales if fmt.scale else None, outer if fmt.outer else None, name

    return times(operand(a), operand(b), out_dtype=torch.float32, offs=offsets(ends), rows=rows)


@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("name", BLOCKS_OF_ROWS)
def test_products_are_those_of_each_group(name, layout):
    fmt = formats.get(name)
    x, y, w = torch.randn(ROWS, COLS), torch.randn(ROWS, 64), torch.randn(len(ENDS), 64, COLS)

    def alone(t):
        return Operand(*reference.quantize(t, fmt), fmt)

    a = ops.quantize(x, name, offs=offsets(), layout=layout)
    b = ops.quantize(w, name, each_matrix=True, layout=layout)
    rows = product(a, b, name)
    along = product(*(ops.quantize(t, name, -2, offs=offsets(), layout=layout) for t in (y, x)), name)
    assert rows.shape == (ROWS, 64) and along.shape == (len(ENDS), 64, COLS)
    assert not rows[ENDS[-1] :].any()
    for g, (start, end) in enumerate(spans()):
        expected = reference.scaled_mm(alone(x[start:end]), alone(w[g]), None, torch.float32)
        assert torch.equal(rows[start:end], expected)
        expected = reference.scaled_mm(alone(y[start:end].t()), alone(x[start:end].t()), None, torch.float32)
        assert torch.equal(along[g], expected)
    assert not along[0].any()


@pytest.mark.parametrize(("given", "meant"), [
    ([5, 2, 9], [5, 5, 9]), ([-3, 4, 4], [0, 4, 4]), ([2, 50, 7], [2, 20, 20]), ([0, 0, 0], [0, 0, 0]),
])  # fmt: skip
def test_offsets_that_decrease_or_lie_outside_are_moved_inside(given, meant):
    x, w = torch.randn(20, COLS), torch.randn(3, 64, COLS)

    def results(ends):
        rows, along = (ops.quantize(x, "nvfp4", dim, offs=offsets(ends)) for dim in (-1, -2))
        b = ops.quantize(w, "nvfp4", each_matrix=True)
        return *along, product(rows, b, "nvfp4", ends, 20), product(along, along, "nvfp4", ends, 20)

    assert all(same(ours, theirs) for ours, theirs in zip(results(given), results(meant), strict=True))


def test_any_sizes_of_groups_fit_the_padded_rows():
    for ends in ([1, 2, 3, 4], [127, 254, 381, 508], [0, 0, 0, 512], [129, 258, 387, 512]):
        padded = sum(ceil_div(end - start, 128) * 128 for start, end in spans(ends))
        assert padded <= padded_rows(ends[-1], len(ends))
    assert padded_rows(508, 4) == 128 * (3 + 4)


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"offs": offsets().long()}, TypeError, "offs: expected int32, got torch.int64"),
    ({"offs": offsets()[None]}, ValueError, r"offs: expected one dimension.*got shape \(1, 6\)"),
    ({"x": torch.randn(2, 3, 32)}, ValueError, "x: expected two dimensions"),
    ({"offs": None, "each_matrix": True}, ValueError, "x: expected three dimensions where each matrix is alone"),
    ({"each_matrix": True}, ValueError, "each_matrix: goes without offs"),
    ({"x": torch.randn(2, 3, 32), "offs": None, "each_matrix": True, "dim": 0}, ValueError, "dim=.*expected -1, -2 or"),
    ({"dim": [-2, -1]}, ValueError, r"dim=\[-2, -1\]: expected -1, -2 or \[-1, -2\]"),
    ({"outer": torch.ones(6)}, ValueError, r"outer: expected float32 of shape \(\)"),
    ({"format": "nvfp4_16x16"}, ValueError, "format: nvfp4_16x16 has square blocks"),
    ({"format": "nvfp5"}, ValueError, "unknown format"),
    ({"hadamard": True}, ValueError, "hadamard: the transform goes along the rows of groups"),
])  # fmt: skip
def test_bad_input_of_quantize(change, error, message):
    given = {"x": torch.randn(ROWS, 32), "offs": offsets(), "format": "nvfp4", "dim": -1, **change}
    for device in ("cpu", "meta"):
        moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
        with pytest.raises(error, match=message):
            ops.quantize(**moved)


@pytest.mark.parametrize(("arguments", "message"), [
    ((torch.randn(3, 32, 32), None, "nvfp4"), "format: matrices are quantised in both directions in square blocks"),
    ((torch.randn(ROWS, 32), offsets(), "nvfp4_16x16"), "format: nvfp4_16x16 has square blocks, and groups"),
    ((torch.randn(ROWS, 32), offsets(), "nvfp4_rowwise"), "outer: in format nvfp4_rowwise, rows and columns have"),
], ids=["matrices", "square", "outer"])  # fmt: skip
def test_bad_input_of_both_directions(arguments, message):
    x, offs, name = arguments
    for device in ("cpu", "meta"):
        groups = {"each_matrix": True} if offs is None else {"offs": offs.to(device)}
        with pytest.raises(ValueError, match=message):
            ops.quantize(x.to(device), name, [-1, -2], outer=torch.ones((), device=device), **groups)


@pytest.mark.parametrize(("shapes", "ends", "rows", "message"), [
    (((20, 32), (2, 64, 32)), [5, 9, 20], 20, r"offs: expected shape \(2,\), one a matrix, got shape \(3,\)"),
    (((20, 32), (3, 64, 32)), [5, 9, 20], 21, "rows: expected the 20 rows of a, got 21"),
    (((2, 20, 32), (3, 64, 32)), [5, 9, 20], 20, r"a, b: with ragged rows, expected \[M, K\] and \[G, N, K\]; got"),
    (((20, 64), (3, 64, 32)), [5, 9, 20], 20, "contraction dimensions differ"),
])  # fmt: skip
def test_bad_input_of_the_product(shapes, ends, rows, message):
    a, b = (torch.randn(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        ops.scaled_mm(
            a, None, None, b, None, None, "plain @ plain, ragged rows -> float32", offs=offsets(ends), rows=rows
        )


@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_rowwise", "mxfp8", "float8_rowwise"])
def test_eager_interface(name, layout):
    """Values and products are those of each group alone; other scales than a group's own would show."""
    x, w = torch.randn(ROWS, COLS) * torch.arange(ROWS)[:, None], torch.randn(len(ENDS), 64, COLS)
    w *= torch.arange(1, len(ENDS) + 1)[:, None, None]
    rows = fp4compile.quantize(x, name, offs=offsets(), layout=layout)
    columns = fp4compile.quantize(x, name, dim=0, offs=offsets(), layout=layout)
    matrices = fp4compile.quantize(w, name, per_matrix=True, layout=layout)
    out = fp4compile.scaled_grouped_mm(rows, matrices, offsets(), torch.float32)
    along = fp4compile.scaled_grouped_mm(columns, columns, offsets(), torch.float32)
    groups = Groups.of(offsets(), ROWS)
    for g, (start, end) in enumerate(spans()):
        one, other = fp4compile.quantize(x[start:end], name), fp4compile.quantize(w[g], name)
        down, place = fp4compile.quantize(x[start:end], name, dim=0), groups.padded_starts[g].item()
        assert torch.equal(rows.dequantize()[start:end], one.dequantize())
        assert torch.equal(matrices.dequantize()[g], other.dequantize())
        assert torch.equal(columns.dequantize()[:, place : place + end - start], down.dequantize())
        assert torch.equal(out[start:end], fp4compile.scaled_mm(one, other, out_dtype=torch.float32))
        torch.testing.assert_close(along[g], fp4compile.scaled_mm(down, down, out_dtype=torch.float32))


@pytest.mark.parametrize(("given", "error", "message"), [
    (lambda x, w: fp4compile.quantize(w, "nvfp4", offs=offsets()), ValueError, "offs: they go with a matrix x"),
    (lambda x, w: fp4compile.quantize(x, "nvfp4", offs=[3, 8]), TypeError, "offs: expected an int32 torch.Tensor, got"),
    (lambda x, w: fp4compile.quantize(x, "nvfp4", per_matrix=True), ValueError, "x: expected three dimensions"),
    (lambda x, w: fp4compile.quantize(x, "nvfp4_rowwise", offs=offsets(), outer=torch.ones(ROWS, 1)), ValueError,
     "outer: format nvfp4_rowwise scales rows"),
    (lambda x, w: product_of(x, w, offs=None), TypeError, "offs: expected an int32 torch.Tensor, got NoneType"),
    (lambda x, w: product_of(x, w[:2]), ValueError, r"offs: expected shape \(2,\), one a matrix, got shape \(6,\)"),
    (lambda x, w: product_of(x, w, "mxfp8"), ValueError, "formats nvfp4 and mxfp8 cannot be multiplied"),
    (lambda x, w: product_of(x, w, out_dtype=torch.int8), ValueError, "out_dtype=torch.int8: allowed are"),
    (lambda x, w: product_of(w, w), ValueError, "a, b: expected"),
    (lambda x, w: fp4compile.scaled_grouped_mm(x, w, offsets()), TypeError, "a: expected a BlockScaled, got Tensor"),
])  # fmt: skip
def test_bad_input_of_the_eager_interface(given, error, message):
    with pytest.raises(error, match=message):
        given(torch.randn(ROWS, COLS), torch.randn(len(ENDS), 64, COLS))


def product_of(x, w, name="nvfp4", **more):
    a = fp4compile.quantize(x, "nvfp4", **({"offs": offsets()} if x.dim() == 2 else {"per_matrix": True}))
    given = {"offs": offsets(), **more}
    return fp4compile.scaled_grouped_mm(a, fp4compile.quantize(w, name, per_matrix=True), **given)
