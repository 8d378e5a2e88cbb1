"""The fuzzer of products: `make test` runs a few of its seeds, and one that finds a planted fault."""

import pytest

from fp4compile.templates.gemm import float8_tiles
from fp4compile.templates.launch import launch
from tests.fuzz.random_products import wrong_with

pytestmark = pytest.mark.pinned_triton  # the simulator executes what Triton compiles


@pytest.mark.parametrize("seeds", [range(8), range(8, 16), range(16, 24), [71151]], ids=["0", "8", "16", "one element"])
def test_products(seeds):
    for seed in seeds:
        wrong, what, _ = wrong_with(seed)
        assert not wrong, (what, wrong)


def test_a_planted_fault_is_found(monkeypatch):
    """Rows of 16-bit activations of 80 elements, read as if they were padded to whole blocks, as rows of codes are."""

    def with_padded_rows(*arguments, **options):
        *others, width, _ = arguments
        return launch(*others, width, width, **options)

    monkeypatch.setattr(float8_tiles, "launch", with_padded_rows)
    wrong, what, kernels = wrong_with(256)
    assert kernels == ["float8_weight_tiles"] and "15x264x80" in what and wrong
