"""The faults of `planted_faults`: which the simulator finds, and what the page says of the others."""

from collections import Counter
from pathlib import Path

import pytest

from tests.ptxsim.planted_faults import DENSE, FAULTS, LAST, LOCK, PAIRS, SCOPED, wrong

PAGE = Path(__file__).parents[2] / "docs" / "ptxsim.md"


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [DENSE, PAIRS, LAST, LOCK])
def test_kernels_without_a_fault_are_right(kernel):
    """Under the last schedule that finds the faults; the kernel of pairs also with its scopes, where these count.

    The other two are checked before their first fault, under the first schedule.
    """
    of_kernel = [one for one in FAULTS if one.kernel == kernel]
    for kind in {one.kind for one in of_kernel} & {"scopes", of_kernel[-1].kind}:
        edits = SCOPED if (kind, kernel) == ("scopes", PAIRS) else ()
        schedule = next(one for one in of_kernel if one.kind == kind).schedules()[-1]
        assert wrong(kernel, edits, schedule) == ""


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: f"{one.kind}: {one.kernel}: {one.name}")
def test_faults_are_found(fault):
    found = any(wrong(fault.kernel, fault.edits, each) for each in fault.schedules())
    assert found == (not fault.missed)


def test_the_page_has_the_counts_and_the_misses():
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    for kind, count in Counter(one.kind for one in FAULTS).items():
        missed = sum(1 for one in FAULTS if one.kind == kind and one.missed)
        assert f"| {kind} | {count} | {count - missed} |" in text
    assert all(f"| {one.kind} | {one.name} | {one.missed} |" in text for one in FAULTS if one.missed)
    assert len(FAULTS) >= 40
