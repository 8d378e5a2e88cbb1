"""Quantisers that find the statistics of rows themselves, held to the reference: the steps of norms, and `check`."""

import torch

from fp4compile.formats.prologue import Prologue, apply
from fp4compile.formats.steps import evaluate
from fp4compile.ops.quantize import QUANTIZE, quantize_kernels
from tests.helpers.kernels import DEVICE

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

RMS = ["square aux0", "mean s0", "add s1 1e-06", "rsqrt s2", "mul aux0 s3", "mul row1 s4"]
GEMMA = ["square aux0", "mean s0", "add s1 1e-06", "rsqrt s2", "mul aux0 s3", "add row1 1.0", "mul s4 s5"]
RESIDUAL = ["add aux0 aux1", "square s0", "mean s1", "add s2 1e-06", "rsqrt s3", "mul s0 s4", "mul s5 row2"]
# As rows that Inductor walks: what follows the statistics takes the sum as it was stored.
SUM = ["add aux0 aux1", "bfloat16 s0", "square s0", "mean s2", "add s3 1e-06", "rsqrt s4", "mul s1 s5", "mul s6 row2"]
LAYER = ["mean aux0", "sub aux0 s0", "variance aux0 s0", "add s2 1e-05", "rsqrt s3", "mul s1 s4", "mul s5 row1",
         "add s6 row2"]  # fmt: skip
MAXIMUM = ["amax aux0", "sub aux0 s0", "sum s1", "div s1 s2"]
CENTRED = ["mean aux0", "amax aux0", "sub aux0 s0", "add s2 s1"]  # exact where the sum is


def rms_norm(x, w):
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def operands_of(steps, first):
    """Operands for the steps, of which `first` is one."""
    generator = torch.Generator().manual_seed(7)
    shapes = {"aux": first.shape, "row": first.shape[-1:], "col": (*first.shape[:-1], 1)}
    kinds = Prologue.parse(steps, first.dtype).kinds
    return [first] + [torch.randn(shapes[kinds[i]], generator=generator).to(first.dtype) for i in range(1, len(kinds))]


def run(operands, steps, format, stored=(), **options):
    """What the kernels return of rows, on the CPU."""
    moved = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    first, *others = (x.to(DEVICE) for x in operands)
    found = quantize_kernels(
        first, format, operands=others, prologue=steps, dtype=first.dtype, stored=list(stored), **moved
    )
    return [x.cpu() for x in found]


def assert_same_bits(got, expected):
    for one, other in zip(got, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if one.dtype in (BF16, F16, F32):  # NaNs are equal whatever their payload
            one, other = (x.float().nan_to_num(nan=7.0) for x in (one, other))
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def check(steps, first, format, stored=(), **options):
    """Kernels against references: the statistics, then all that follows from these."""
    operands, prologue = operands_of(steps, first), Prologue.parse(steps, first.dtype, stored)
    written = [*stored, *(f"s{i} float32" for i in prologue.statistics)]
    got = run(operands, steps, format, written, **options)
    count = len(got) - len(written)
    quantised, kept, statistics = got[:count], got[count : count + len(stored)], got[count + len(stored) :]
    for one, other in zip(statistics, exact_statistics(prologue, operands), strict=True):
        # Float32 sums of float32 terms; a mean of both signs is as wrong as its largest term.
        limit = 1e-6 * (other.abs() + (steps is LAYER) * first.double().abs().amax(-1, keepdim=True))
        assert (((one - other).abs() <= limit) | (one == other) | (one.isnan() & other.isnan())).all()
    rest, read = prologue.after_statistics()
    value, whole = apply(rest, [*(operands[i] for i in read), *statistics])
    assert_same_bits(quantised, QUANTIZE(value, format, **options))
    found = dict(zip(prologue.statistics, statistics, strict=True))
    expected = iter(whole)
    for one, (i, dtype) in zip(kept, prologue.stored, strict=True):
        assert_same_bits([one], [next(expected) if prologue.step_kinds[i] == "aux" else found[i].to(dtype)])


def exact_statistics(prologue, operands):
    """In float64, but for what overflows in float32."""
    wide = {f"{kind}{i}": operands[i].float().double() for i, kind in prologue.kinds.items()}
    narrow = {name: value.float() for name, value in wide.items()}
    exact, rounded = evaluate(prologue.steps, wide), evaluate(prologue.steps, narrow)
    return [torch.where(rounded[i].isfinite(), exact[i], rounded[i].double()) for i in prologue.statistics]
