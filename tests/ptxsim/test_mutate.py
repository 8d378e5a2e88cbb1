"""A handful of the faults that `tests.ptxsim.mutate` plants, so that it cannot rot; and the table that it wrote."""

import json
import re

import pytest

from tests.ptxsim.checks import check_of
from tests.ptxsim.mutate import RESULTS, outcome, planted
from tests.ptxsim.source_edits import SOURCE_EDITS, changed
from tests.ptxsim.subjects import SUBJECTS

# Edits by the pattern of their name, and the check that finds them.
DENSE = {
    r"product 1 of \d+: scales of A and B swapped": "wrong values",
    r"arrival \d of \d+: \+2048 bytes": "deadlock",
    r"tensor copy 4 of \d+: to 128 bytes later": "race",
    r"fence.proxy.async 3 of \d+ removed": "proxy fence",
}
ROWS = {
    r"barrier 1 of \d+ removed": "race",
    r"mask 11 of \d+: inverted": "outside or unaligned",
    r"float constant 1 of \d+: one bit up": "wrong values",
}


@pytest.mark.parametrize("name, patterns", [("dense NVFP4", DENSE), ("rows", ROWS)])
def test_planted_edits_are_found(name, patterns):
    """`planted` raises where the kernels are wrong without an edit."""
    index = next(i for i, subject in enumerate(SUBJECTS) if subject.name == name)
    most, found = planted(index)
    for pattern, check in patterns.items():
        kernel, ptx, edit = next(each for each in found if re.fullmatch(pattern, each[2].name))
        text = edit.applied(ptx)
        assert text.count("\n") == ptx.count("\n")
        assert check_of(outcome(SUBJECTS[index], most, (kernel, text))["found"]) == check, edit.name


def test_edits_of_source_have_their_places():
    for edit in SOURCE_EDITS:
        path, text = changed(edit)
        assert path.read_text() != text
        assert edit.subject in {subject.name for subject in SUBJECTS}


def test_the_table_explains_what_was_not_found():
    content = json.loads(RESULTS.read_text())
    entries = content["ptx"] + content["source"]
    assert all(len(entry.keys() & {"found", "equivalent", "why"}) == 1 for entry in entries)
    changing = [entry for entry in entries if "equivalent" not in entry]
    assert sum("found" in entry for entry in changing) >= 0.97 * len(changing)
    assert len(content["source"]) >= 20
    assert len({entry["kernel"] for entry in content["ptx"]}) >= 6
