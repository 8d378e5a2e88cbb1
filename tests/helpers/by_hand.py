"""Products composed by hand from `quantize` and `dequantize`, in float64, and how closely a result must agree."""

import torch

import fp4compile

STATIC = {"": 0.0021}


def values(x, fmt, dim, outer=None, **training):
    """x as the product sees it: quantised along dim and dequantised, in x's own orientation, in float64."""
    if fmt is None:
        return x.double()
    scale = None if outer is None else torch.tensor(outer, device=x.device)
    return fp4compile.quantize(x, fmt, dim=dim, outer=scale, **training).dequantize().movedim(-1, dim).double()


def by_hand(recipe, x, w, bias, dy, compute_dtype, seed=None):
    """(y, dx, dw) before the output cast; x [tokens, K], w [N, K], dy [tokens, N]; seed: of dy's rounding.

    On the CPU, whatever the device: there the reference quantises, on a GPU the kernels that are under test.
    """
    x, w, dy = x.cpu(), w.cpu(), dy.cpu()
    seeds = {p: seed.cpu() if p in recipe.stochastic_rounding else None for p in ("dgrad", "wgrad")}
    hadamard = "wgrad" in recipe.hadamard
    outer = STATIC[""] if recipe.activation_scale == "static" else None
    xc, wc = x.to(compute_dtype), w.to(compute_dtype)  # quantised is what the product multiplies
    y = values(xc, recipe.fprop_x, -1, outer) @ values(wc, recipe.fprop_w, -1).t()
    if bias is not None:
        y = y + bias.cpu().to(compute_dtype).double()
    dx = values(dy, recipe.dgrad_dy, -1, seed=seeds["dgrad"]) @ values(wc, recipe.dgrad_w, 0)
    transformed = values(xc, recipe.wgrad_x, 0, hadamard=hadamard)
    dw = values(dy, recipe.wgrad_dy, 0, seed=seeds["wgrad"], hadamard=hadamard).t() @ transformed
    return y, dx, dw


def drawn(step_seed, count, device="cpu"):
    """The seeds that a backward graph draws right after torch.manual_seed."""
    limits = torch.iinfo(torch.int64)
    torch.manual_seed(step_seed)
    return torch.randint(limits.min, limits.max, (count,), device=device)


# What the sums of Hopper's FP8 matrix units may be off by, of the sum of magnitudes: they keep fewer bits than float32.
FP8_UNITS_ERROR = 2.0**-12


def assert_rounds_to(actual, exact, dtype, slack=None):
    """actual is exact rounded to dtype, give or take `slack` before that rounding: 1e-5 of the largest value."""
    slack = 1e-5 * exact.abs().max() if slack is None else slack
    low, high = (exact - slack).to(dtype), (exact + slack).to(dtype)
    outside = ~((actual >= low) & (actual <= high))  # a NaN is outside
    assert not outside.any(), f"{outside.sum()} elements off, at most by {(actual - exact).abs().max()}"


def assert_product(got, x, layer, recipe):
    """got [tokens, N] bf16 is the product of the quantised operands, by the CPU's reference, rounded once."""
    weight, bias = (p.detach().cpu() for p in (layer.weight, layer.bias))
    left, right = values(x.cpu(), recipe.fprop_x, -1), values(weight, recipe.fprop_w, -1)
    slack = FP8_UNITS_ERROR * (left.abs() @ right.abs().t()) if str(recipe.fprop_x).startswith("float8") else None
    assert_rounds_to(got.cpu().double(), left @ right.t() + bias.double(), torch.bfloat16, slack)
