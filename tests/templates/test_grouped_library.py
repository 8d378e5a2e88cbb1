"""Experts by the library's FP8 product: what it is asked for, and what is made of offsets and of its result.

The library is not here: torch's own meta implementation checks the arguments, and a stand-in computes. The interpreter
has to be chosen before Triton is imported: `test_in_the_interpreter` runs this file again in a process of its own.
"""

from dataclasses import replace

import pytest
import torch

from fp4compile import formats, reference_grouped
from fp4compile.groups import Groups
from fp4compile.operand import Operand
from fp4compile.targets import Target
from fp4compile.templates.grouped import library
from fp4compile.templates.grouped.choose import choose
from fp4compile.templates.grouped.dispatch import scaled_grouped_mm
from fp4compile.templates.grouped.problem import call_of, problem_of
from fp4compile.templates.launch import dry_run, target_of
from tests.helpers import in_interpreter
from tests.helpers.kernels import INTERPRETING, OLD_TRITON, gpu, on_device

FP8, BF16 = formats.get("float8_rowwise"), torch.bfloat16
ROWS, N, K = 23, 48, 32
OFFSETS = [(0, 3, 3, 17, 20), (-4, 9, 3, 300, 12), (0, 0), (23,)]


def operands(offs):
    offs, x, w = torch.tensor(offs, dtype=torch.int32), torch.randn(ROWS, K), torch.randn(len(offs), N, K)
    a = reference_grouped.quantize_rows(x, Groups.of(offs, ROWS), FP8, None, "linear", None)
    return (
        Operand(*a, FP8),
        Operand(*reference_grouped.quantize_matrices(w, FP8, -1, None, "linear", None, False), FP8),
        offs,
    )


def stand_in(a, b, a_scale, b_scale, offs, *, out_dtype, use_fast_accum):
    """What the library computes; it stops at offsets that decrease, and leaves rows of no group as they were."""
    assert not use_fast_accum and (offs.diff() >= 0).all() and offs.min() >= 0 and offs[-1] <= len(a)
    out, start = torch.full((len(a), b.shape[-1]), torch.nan), 0
    for group, end in enumerate(offs.tolist()):
        values = a[start:end].float() @ b[group].float()
        out[start:end] = values * a_scale[start:end, None] * b_scale[group]
        start = end
    return out.to(out_dtype)


@gpu
@pytest.mark.parametrize("offs", OFFSETS, ids=str)
def test_values(offs, monkeypatch):
    """Offsets as they may come, empty groups; rows of no group are zeros."""
    if INTERPRETING:
        monkeypatch.setattr(torch, "_scaled_grouped_mm", stand_in)
    a, b, offs = operands(offs)
    expected = reference_grouped.scaled_grouped_mm(a, b, offs, ROWS, BF16)
    call = call_of(on_device(a), on_device(b), on_device(offs), ROWS, BF16, target_of(on_device(offs).device))
    got = library.run(call, None).cpu()
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    difference, largest = (got.float() - expected.float()).abs(), expected.float().abs().amax()
    assert (difference <= 2.0**-7 * largest).all() and not got[expected.eq(0).all(-1)].any()


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def meta_operands(rows=512, groups=8, n=256, k=512):
    row_outer = (meta(rows, 1, dtype=torch.float32), meta(groups, n, 1, dtype=torch.float32))
    data = meta(rows, k, dtype=torch.float8_e4m3fn), meta(groups, n, k, dtype=torch.float8_e4m3fn)
    a, b = (Operand(x, None, outer, FP8) for x, outer in zip(data, row_outer, strict=True))
    return a, b, meta(groups, dtype=torch.int32)


@pytest.mark.skipif(INTERPRETING, reason="runs nothing")
def test_the_arguments_are_what_torch_asks_for():
    """Its meta implementation checks dtypes, layouts, alignment and scales, and raises for others."""
    a, b, offs = meta_operands()
    with dry_run(Target(90)) as launches:
        out = scaled_grouped_mm(a, b, offs, 512, BF16)
    assert (out.shape, out.dtype) == ((512, 256), BF16)
    assert [one.kernel.__name__ for one in launches] == ["group_ends", "clear_ungrouped_rows"]
    wrong = replace(b, outer=b.outer[:, :1])
    with dry_run(Target(90)), pytest.raises(ValueError, match="b_outer"):
        scaled_grouped_mm(a, wrong, offs, 512, BF16)


@pytest.mark.skipif(INTERPRETING, reason="runs nothing")
def test_what_it_serves():
    problem = problem_of(*meta_operands(), 512, BF16, Target(90))

    def served(**changes):
        return choose(replace(problem, **changes)).name == "library_row_scaled"

    assert served() and served(rows=1, m=1) and served(groups=1023)
    assert not any(served(target=Target(sm)) for sm in (80, 89, 100, 120))
    others = {"n": 264, "k": 520, "rows": 0, "groups": 1024, "out_dtype": torch.float32, "along_k": True}
    assert not any(served(**{name: value}) for name, value in others.items())
    assert not served(a=replace(problem.a, outer="tensor")) and not served(b=replace(problem.b, format=None))


@pytest.mark.skipif(INTERPRETING, reason="is the interpreter")
@pytest.mark.skipif(OLD_TRITON, reason="reductions of its interpreter fail on numpy 2.4")
def test_in_the_interpreter():
    in_interpreter.assert_passes(__file__)
