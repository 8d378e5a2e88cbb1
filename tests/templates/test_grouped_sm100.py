"""The grouped block-scaled kernel: values in Triton's interpreter, machine code for SM100.

The interpreter has to be chosen before Triton is imported: `test_in_the_interpreter` runs this file again in a process
of its own.
"""

from dataclasses import replace

import pytest
import torch

from fp4compile import formats, reference_grouped, targets
from fp4compile.groups import Groups
from fp4compile.operand import Operand
from fp4compile.targets import Target
from fp4compile.templates.grouped.block_scaled_sm100 import run, serves, sm100_config, sm100_configs
from tests.helpers import in_interpreter
from tests.helpers.kernels import INTERPRETING, OLD_TRITON

BF16 = torch.bfloat16
interpreted = pytest.mark.skipif(not INTERPRETING, reason="the interpreter stands in for an SM100 GPU")
compiled = pytest.mark.skipif(INTERPRETING, reason="compiles, or asks for launches")
both_forms = pytest.mark.parametrize("along_k", [False, True], ids=["rows", "along K"])

ROWS, OFFS = 170, (0, 3, 133, 133, 134, 163)  # groups of 0, 3, 130, 0, 1 and 29 rows, then 7 rows of no group


@pytest.fixture(autouse=True)
def memory_holds_anything(monkeypatch):
    """What is not written would be NaN."""
    torch.manual_seed(0)
    empty = torch.Tensor.new_empty

    def filled(x, size, **options):
        found = empty(x, size, **options)
        return found.fill_(torch.nan) if found.is_floating_point() and found.numel() else found

    if INTERPRETING:
        monkeypatch.setattr(torch.Tensor, "new_empty", filled)


def operands(a, b, along_k, offs=OFFS, rows=ROWS, k=288, n=140, outer=(None, None), x=None):
    """(A, B, offs), quantised by the reference: [rows, k] x [G, n, k], or [160, padded rows] x [n, padded rows]."""
    a, b, offs = formats.get(a), formats.get(b), torch.tensor(offs, dtype=torch.int32)
    groups = Groups.of(offs, rows)
    x = torch.randn(rows, 160 if along_k else k) if x is None else x
    if along_k:
        y = torch.randn(rows, n)
        left, right = (reference_grouped.quantize_columns(each, groups, fmt, given, "swizzled", None, False)
                       for each, fmt, given in ((x, a, outer[0]), (y, b, outer[1])))  # fmt: skip
    else:
        w = torch.randn(len(offs), n, k)
        left = reference_grouped.quantize_rows(x, groups, a, outer[0], "swizzled", None)
        right = reference_grouped.quantize_matrices(w, b, -1, outer[1], "swizzled", None, False)
    return Operand(*left, a), Operand(*right, b), offs


def magnitudes(x):
    """The operand with the absolute values of its elements."""
    codes = x.data.view(torch.uint8) & (0x77 if x.format.packed else 0x7F)
    return replace(x, data=codes.view(x.data.dtype))


def check(a, b, offs, rows=ROWS, out_dtype=torch.float32, config=None):
    """The kernel's product against the reference's, each within the error of a float32 sum."""
    got = run(a, b, offs, rows, out_dtype, config)
    expected = reference_grouped.scaled_grouped_mm(a, b, offs, rows, torch.float32)
    sums = reference_grouped.scaled_grouped_mm(magnitudes(a), magnitudes(b), offs, rows, torch.float32)
    assert (got.shape, got.dtype) == (expected.shape, out_dtype)
    got, k = got.float(), a.data.shape[-1] * (2 if a.format.packed else 1)
    bound = 2 * sums * (8 + k**0.5) * 2.0**-23 + 2.0**-140 + expected.abs() * torch.finfo(out_dtype).eps
    finite = expected.isfinite()
    assert (got - expected).abs().le(bound)[finite].all()
    assert torch.equal(got.isnan(), expected.isnan())
    return got


@interpreted
@both_forms
@pytest.mark.parametrize(("a", "b"), [("nvfp4", "nvfp4"), ("nvfp4_rowwise", "nvfp4_rowwise"), ("mxfp8", "mxfp8"),
                                      ("mxfp4", "mxfp4"), ("mxfp8", "mxfp4")])  # fmt: skip
def test_formats(a, b, along_k):
    """Empty and ragged groups, sizes that no tile divides; outer scales of groups, of rows, and none."""
    got = check(*operands(a, b, along_k))
    zeros = got[[0, 3]] if along_k else got[OFFS[-1] :]
    assert not zeros.any() and got.any()


@interpreted
@both_forms
@pytest.mark.parametrize(("a", "b", "given"), [("nvfp4", "nvfp4_rowwise", (0.37, None)),
                                               ("nvfp4_rowwise", "nvfp4", (None, 0.37)),
                                               ("nvfp4_one_level", "nvfp4", (None, None)),
                                               ("nvfp4", "nvfp4_one_level", (None, None))])  # fmt: skip
def test_outer_scales(a, b, given, along_k):
    """Any kind with any other: none, one for all, of groups, of rows."""
    outer = [None if each is None else torch.tensor(each) for each in given]
    check(*operands(a, b, along_k, (1, 2, 5), 7, 32, 130, outer), 7, BF16)


@interpreted
@both_forms
@pytest.mark.parametrize("offs", [(0, 0, 300), (140, 20, 1000), (-3, 0, 0), (300,)], ids=str)
def test_offsets(offs, along_k):
    """Everything in one group, offsets that decrease, that exceed the rows and that are negative, no groups at all."""
    check(*operands("nvfp4", "nvfp4", along_k, offs, 300, 32, 16), 300)


@interpreted
@both_forms
def test_every_program_walks_its_tiles(along_k, monkeypatch):
    """Several tiles each, with different numbers of steps; every configuration, and another walk."""
    monkeypatch.setitem(targets._MULTIPROCESSORS, 90, 3)  # which the interpreter counts as having
    a, b, offs = operands("nvfp4", "nvfp4", along_k, (0, 290, 300, 300, 600), 640, 288, 300)
    configs = sm100_configs(a.format, b.format, along_k, BF16, Target(100))
    assert {(config.bn, config.two_sums) for config in configs} == {(256, False), (128, True)}
    for config in configs:
        check(a, b, offs, 640, BF16, replace(config, group_m=2))


@interpreted
@both_forms
def test_a_nan_stays_in_its_group(along_k):
    """The tiles and steps of other groups that hold its rows are not touched by it."""
    x = torch.randn(ROWS, 160 if along_k else 288)
    x[133] = torch.nan  # all of group 4, beside the last rows of group 2, which end in a step of 128 columns
    got = check(*operands("nvfp4_one_level", "nvfp4_one_level", along_k, x=x))
    nan = torch.zeros(got.shape, dtype=torch.bool)
    nan[4 if along_k else 133] = True
    assert torch.equal(got.isnan(), nan)


@pytest.mark.skipif(INTERPRETING, reason="is the interpreter")
@pytest.mark.skipif(OLD_TRITON, reason="its interpreter has no tl.dot_scaled")
def test_in_the_interpreter():
    in_interpreter.assert_passes(__file__)
