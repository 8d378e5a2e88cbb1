"""Block scales by least error: the search against all 126 scales, and what is quantised by them."""

import itertools

import pytest
import torch

import fp4compile
from fp4compile.formats import formats, reference
from fp4compile.formats import reference_scales as scales
from tests.helpers.hard_inputs import DTYPES, FINITE, hard_input

BLOCKS = {"nvfp4": (1, 16), "nvfp4_16x16": (16, 16)}
GRID = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def adversaries(rows, cols):
    """Weights whose blocks have equal errors at several scales, or the largest gain of a scale that is left out."""
    gen = torch.Generator().manual_seed(0)
    blocks = (rows, cols // 16)
    yield "randn", torch.randn(rows, cols, generator=gen)
    yield "wide", torch.randn(rows, cols, generator=gen) * torch.exp2(-14 * torch.rand(rows, cols, generator=gen))
    yield "one of many", torch.randn(rows, cols, generator=gen) * (torch.rand(rows, cols, generator=gen) < 0.06)
    # On E2M1's grid at a scale: the error is 0 there, and often at its double or half, too.
    at = torch.exp2(torch.randint(-9, 8, blocks, generator=gen).float()) * (
        1 + torch.randint(8, blocks, generator=gen) / 8
    )
    yield "on the grid", GRID[torch.randint(8, (rows, cols), generator=gen)] * at.repeat_interleave(16, 1)
    # All but the largest are half off the grid of the double scale, so that doubling raises their errors most.
    x = torch.full((rows, cols), 0.5)
    x[:, ::16] = torch.linspace(5.5, 16.5, rows * cols // 16).view(blocks)
    yield "against doubling", x
    x = torch.full((rows, cols), 0.5)
    x[::16, ::16] = torch.linspace(5.5, 16.5, rows * cols // 256).view(rows // 16, -1)
    yield "against doubling squares", x
    yield (
        "small",
        torch.randn(rows, cols, generator=gen) * torch.rand(blocks, generator=gen).repeat_interleave(16, 1) * 0.05,
    )


def with_top(x):
    """x in a tensor whose global scale is 1, so that its numbers are in units of it; scales may then be subnormal."""
    x = x.clone()
    x[0, 0] = reference.NVFP4_MAX
    return x


def all_scales(blocks, outer):
    """The byte of least error of every block, all 126 tried, the smallest of several."""
    factor = reference._encode_scale(outer)
    u = (blocks.transpose(-3, -2).reshape(-1, blocks.shape[-3], 16).abs() * factor).clamp(max=scales.U_MAX)
    errors = torch.stack([scales.block_error(u, scales.value(torch.full((len(u),), byte))) for byte in range(1, 127)])
    assert errors.isfinite().all()
    return errors.min(0).values, 1 + (errors == errors.min(0).values).int().argmax(0)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_search_misses_no_scale(name):
    fmt = formats.get(name)
    for (kind, x), (factor, top) in itertools.product(adversaries(64, 256), ((1.0, True), (0.37, False))):
        x = with_top(x * factor) if top else x * factor
        blocks, outer = reference._blocks(x, fmt), scales.outer_of(x.abs().amax())
        best, expected = all_scales(blocks, outer)
        found = scales.best_scales(blocks, outer).view(torch.uint8).flatten()
        assert torch.equal(found, expected.to(torch.uint8)), (kind, factor, top)
    # A smaller amax than the weight has: every scale clips the largest elements. Above 224 no scale has a double.
    clipped = torch.full((16, 16), 6 * 416.0)
    clipped[0, 0] = 6 * 416 + 900.0 if name == "nvfp4" else 8000.0
    blocks, outer = reference._blocks(clipped, fmt), torch.tensor(1.0)
    found = scales.best_scales(blocks, outer).view(torch.uint8).flatten()
    assert torch.equal(found, all_scales(blocks, outer)[1].to(torch.uint8)) and found[0] == 125
    for small in (1.0, 1e-3, 1e-38):
        outer = scales.outer_of(torch.tensor(small))
        expected = all_scales(blocks := reference._blocks(torch.randn(32, 64), fmt), outer)[1]
        found = scales.best_scales(blocks, outer).view(torch.uint8).flatten()
        assert torch.equal(found, expected.to(torch.uint8))


def test_few_scales_are_tried(monkeypatch):
    """At most 12 where the scale is a normal number, or the 15 smallest."""
    tried = []
    monkeypatch.setattr(
        scales, "block_error", lambda u, scale, real=scales.block_error: tried.append(1) or real(u, scale)
    )
    for _, x in adversaries(16, 256):
        for part in reference._blocks(with_top(x), formats.get("nvfp4")).view(-1, 1, 16).split(8):
            tried.clear()
            scales._least_error(part.abs(), part.abs().amax((-2, -1)))
            normal = bool((part.abs().amax() > 6 * 2.0**-5) & (part.abs().amax((-2, -1)) > 6 * 2.0**-5).all())
            assert len(tried) <= (12 if normal else 15 + 4)


@pytest.mark.parametrize("rows", [1, 16])
def test_the_kernel_tries_enough_scales(rows, monkeypatch):
    """The kernel's loop ends after MOST_SCALES steps, so no block may need more. Square blocks need as many."""
    tried = []
    monkeypatch.setattr(
        scales, "block_error", lambda u, scale, real=scales.block_error: tried.append(1) or real(u, scale)
    )
    # Octaves of normal scales need equally many: those below the last one are left out.
    bytes_of = torch.cat((torch.arange(1, 41), torch.arange(118, 127)))
    beside = torch.tensor([1 - 2**-20, 1, 1 + 2**-20]).repeat(len(bytes_of))
    tops = 6.0 * scales.value(bytes_of).repeat_interleave(3) * beside
    blocks = torch.rand(len(tops), rows, 16, generator=torch.Generator().manual_seed(0)) * 0.9 * tops[:, None, None]
    blocks[:, 0, 0] = tops
    most = 0
    for block, top in zip(blocks.split(1), tops.split(1), strict=True):
        tried.clear()
        scales._least_error(block, top)
        most = max(most, len(tried))
    assert most == (15 if rows == 1 else scales.MOST_SCALES)


def error(x, quantised):
    """The squared error of each row of blocks, in float64."""
    return (x.double() - quantised.dequantize().double()).square().unflatten(-1, (-1, 16)).sum(-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_block_has_more_error_than_by_its_amax(dtype):
    for name in set(FINITE) - {"tiny", "huge"}:
        x = hard_input(name, (32, 256), dtype)
        amax, mse = (fp4compile.quantize(x, "nvfp4", scales=rule) for rule in ("amax", "mse"))
        assert (error(x, mse) <= error(x, amax) * (1 + 1e-6)).all(), name


def test_codes_and_scales_are_modelopts():
    """Its formulas: scale = amax / 6 as E4M3 times global / 2688, element = E2M1 of x / scale."""
    x = torch.cat((torch.randn(48, 80), hard_input("ties_fp4", (48, 80))))
    best, top = fp4compile.scale_sweep(x), x.abs().amax()
    found = fp4compile.quantize(x, "nvfp4", scales="mse")
    scale = (best / 6.0 * 448.0 / (top / 6.0)).clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn)
    assert torch.equal(found.scales.view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(found.outer, top / 2688.0)
    y = x / (scale.float() * found.outer).repeat_interleave(16, 1)
    code = torch.bucketize(y.abs(), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]))
    code += (y.abs().unsqueeze(-1) == torch.tensor([0.75, 1.75, 3.5])).any(-1)
    assert torch.equal(reference.unpack(found.data), (code + 8 * (y < 0)).to(torch.uint8))


def test_mxfp4_takes_the_power_of_two_of_least_error():
    gen = torch.Generator().manual_seed(0)
    on_the_grid = GRID[torch.randint(8, (64, 256), generator=gen)] * 2.0 ** torch.randint(-3, 3, (64, 1), generator=gen)
    one_large = torch.full((32, 256), 0.24).index_fill_(1, torch.arange(0, 256, 32), 3.01)  # fine steps clip it
    normal = torch.randn(64, 256, generator=gen)
    x = torch.cat([normal, normal**3, on_the_grid, one_large, torch.zeros(2, 256)])
    for factor in (1.0, 2.0**-140, 2.0**120):
        found = fp4compile.quantize(x * factor, "mxfp4", scales="mse")
        blocks = (x * factor).double().unflatten(-1, (-1, 32))
        top = blocks.abs().amax(-1)
        best = torch.full_like(top, torch.inf)
        nearby = torch.log2(top[top > 0]).round().int()
        for exponent in range(max(int(nearby.min()) - 5, -127), min(int(nearby.max()) + 2, 127) + 1):
            power = 2.0**exponent
            rest = ((blocks / power).abs().unsqueeze(-1) - GRID).abs().amin(-1) * power
            best = torch.minimum(best, rest.square().sum(-1))
        error = (blocks - found.dequantize(torch.float32).double().unflatten(-1, (-1, 32))).square().sum(-1)
        assert (error <= best * (1 + 1e-9) + (1e-12 * top) ** 2).all()
    rounded_up = fp4compile.quantize(x, "mxfp4")
    assert (as_bytes(rounded_up) - as_bytes(fp4compile.quantize(x, "mxfp4", scales="mse"))).unique().tolist() == [0, 1]
    x[3, 20] = torch.nan
    assert fp4compile.quantize(x, "mxfp4", scales="mse").dequantize()[3, :32].isnan().all()


def as_bytes(quantised):
    return quantised.scales.view(torch.uint8).int()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows(value):
    x = torch.randn(20, 64)
    x[3, 20] = value
    for name in BLOCKS:
        assert not fp4compile.quantize(x, name, scales="mse").dequantize()[3, 20].isfinite()
        given = fp4compile.quantize(x, name, outer=torch.tensor(0.01), scales="mse").dequantize()
        assert given[3, 16:32].isnan().all() and given[:, :16].isfinite().all() and given[16:].isfinite().all()
    best = fp4compile.scale_sweep(x, torch.tensor(3.0))
    assert best[3, 1].isnan() and best.isnan().sum() == 1


def test_shapes_strides_and_matrices():
    w = torch.randn(3, 33, 40)
    for block, shape in (((1, 16), (3, 33, 3)), ((16, 16), (3, 3, 3))):
        best = fp4compile.scale_sweep(w, block=block)
        assert best.shape == shape and best.dtype == torch.float32
        assert torch.equal(best[1], fp4compile.scale_sweep(w[1], block=block))
        assert torch.equal(best[1], fp4compile.scale_sweep(w.transpose(1, 2).contiguous().mT, block=block)[1])
        assert torch.equal(best, fp4compile.scale_sweep(w, w.abs().amax((1, 2)), block=block))
        assert fp4compile.scale_sweep(w[:, :0], block=block).shape == (3, 0, 3)
        one = fp4compile.quantize(w[2].t(), dict(zip(BLOCKS.values(), BLOCKS, strict=True))[block], dim=0, scales="mse")
        each = fp4compile.quantize(w, one.format, per_matrix=True, scales="mse")
        assert torch.equal(each.data[2], one.data) and torch.equal(each.outer[2], one.outer)
    one_level = fp4compile.quantize(w[0], "nvfp4_one_level", scales="mse")
    assert one_level.outer is None and torch.equal(
        one_level.data, fp4compile.quantize(w[0], "nvfp4", outer=torch.tensor(1.0), scales="mse").data
    )
    assert fp4compile.scale_sweep(torch.zeros(2, 16)).tolist() == [[0.0], [0.0]]
    zero = fp4compile.scale_sweep(torch.tensor([[0.0] * 16 + [448.0] * 16]))
    assert zero.tolist() == [[2.0**-9, 448.0]]


@pytest.mark.parametrize(("call", "message"), [
    (lambda w: fp4compile.quantize(w, "mxfp8", scales="mse"), "scales='mse': needs an NVFP4 format .* got mxfp8"),
    (lambda w: fp4compile.quantize(w, "nvfp4_rowwise", scales="mse"), "scales='mse': needs an NVFP4 "),
    (lambda w: fp4compile.quantize(w, "nvfp4", scales="msee"), "scales: unknown rule 'msee'. Did you mean 'mse'"),
    (lambda w: fp4compile.quantize(w, "nvfp4", scales="mse", hadamard=True), "scales='mse': is for weights"),
    (lambda w: fp4compile.quantize(w, "nvfp4", scales="mse", offs=torch.tensor([1]).int()), "scales='mse': is for "),
    (lambda w: torch.ops.fp4compile.quantize(w, "mxfp8", scale_rule="mse"), "scale_rule='mse': needs an NVFP4"),
    (lambda w: torch.ops.fp4compile.quantize(w, "nvfp4", offs=torch.tensor([1]).int(), scale_rule="mse"),
     "scale_rule='mse': is for weights, which have no groups"),
    (lambda w: fp4compile.scale_sweep(w, block=(1, 32)), r"block=\(1, 32\): allowed are \(1, 16\) and \(16, 16\)"),
    (lambda w: fp4compile.scale_sweep(w[0]), "w: expected two or three dimensions"),
    (lambda w: fp4compile.scale_sweep(w, torch.ones(2)), r"global_amax: expected float32 of shape \(\) on cpu"),
], ids=map(str, range(12)))  # fmt: skip
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(4, 32))


def test_what_is_no_weight_is_refused():
    with pytest.raises(TypeError, match="w: expected a torch.Tensor, got list"):
        fp4compile.scale_sweep([1.0])
    with pytest.raises(TypeError, match="w: dtype torch.float64 cannot be quantised"):
        fp4compile.scale_sweep(torch.ones(2, 16, dtype=torch.float64))
