"""The fuzzer of quantisers: `make test` runs a few of its seeds, and one that finds a planted fault."""

import pytest

from fp4compile.templates.quantize import row
from tests.fuzz.random_quantisers import wrong_with

pytestmark = pytest.mark.pinned_triton  # the simulator executes what Triton compiles


@pytest.mark.parametrize("first", (0, 6))
def test_quantisers(first):
    for seed in range(first, first + 6):
        wrong, what, _ = wrong_with(seed)
        assert not wrong, (what, wrong)


def test_a_planted_fault_is_found(monkeypatch):
    """The padding of swizzled scales is not written."""
    monkeypatch.setattr(row, "padded_scale_shape", lambda rows, blocks, layout: (rows, blocks))
    wrong, what, kernels = wrong_with(32)
    assert kernels == ["quantize_rows"] and "swizzled" in what and wrong


def test_a_kernel_that_does_not_say_what_it_writes_is_found(monkeypatch):
    monkeypatch.setattr(row.quantize_rows, "written", lambda arguments: {"scales_ptr"})
    assert any("quantize_rows writes data_ptr" in one for one in wrong_with(32)[0])
