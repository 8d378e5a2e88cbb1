"""Kernels of kinds that other projects have, executed for a B200 and an RTX 50: their results, and the page's table."""

import re
import warnings
from pathlib import Path

import pytest
import torch

import ptxsim
from tests.ptxsim.kernels import gluon_kernels, pointwise, products, rows, scatter  # noqa: F401
from tests.ptxsim.kernels.cases import CASES

PAGE = Path(__file__).parents[2] / "docs" / "ptxsim.md"


PRODUCTS = [name for name, case in CASES.items() if case.run.__module__ == products.__name__]


@pytest.mark.parametrize(
    ("arch", "name"), [*(("sm_100a", name) for name in CASES), *(("sm_120a", name) for name in PRODUCTS)]
)
def test_results(arch, name):
    """On an RTX 50 the products, whose instructions are others than a B200's."""
    case = CASES[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Triton's of contractions
        with ptxsim.gpu(arch, ptxsim.Schedule(len(name) % 3, failing_waits=True)):
            found, expected = case.run()
    case.check(found, expected)


def test_loads_from_tensor_memory_that_reduce():
    with ptxsim.gpu("sm_103a") as gpu:
        found, expected = gluon_kernels.reduced_loads()
    assert torch.equal(found, expected)
    assert {opcode.rpartition(".x32.")[2] for opcode in gpu.tally.opcodes if ".ld.red." in opcode} == {
        "max.f32", "min.abs.NaN.f32"}  # fmt: skip


def test_the_page_lists_every_kernel():
    text = PAGE.read_text(encoding="utf-8")
    listed = re.findall(r"^\| ([^|]+) \| ([^|]+) \| right \|", text, re.MULTILINE)
    assert {(case.name, case.origin) for case in CASES.values()} == set(listed)
    assert len(CASES) >= 40
