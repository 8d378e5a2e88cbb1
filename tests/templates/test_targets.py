"""What a target says about its GPU."""

import pytest

from fp4compile.targets import Target


@pytest.mark.parametrize(
    "sm, multiprocessors", [(90, 132), (100, 148), (103, 160), (120, 188), (0, 132), (89, 132), (101, 148), (121, 188)]
)
def test_multiprocessors(sm, multiprocessors):
    """Of the GPUs that are listed; another one counts as the nearest before it, or as an H200."""
    assert Target(sm).multiprocessors == multiprocessors
