"""A handful of the faults that `tests.simulate.mutate` plants, so that it cannot rot; and the table that it wrote."""

import json
import re
from pathlib import Path

import pytest

from tests.simulate.explained_edits import EXPLAINED, explanation
from tests.simulate.mutate import outcome, planted
from tests.simulate.source_edits import SOURCE_EDITS, changed
from tests.simulate.subjects import SUBJECTS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "simulated_mutations.json"
DENSE = (
    r"product 1 of \d+: scales of A and B swapped", r"arrival 1 of \d+: \+2048 bytes",
    r"tensor maps' swizzle_mode 1 of \d+: none", r"fence.proxy.async 3 of \d+ removed",
)  # fmt: skip
ROWS = (r"float constant 1 of \d+: doubled", r"mask \d+ of \d+: inverted", r"st.global 1 of \d+ removed")


@pytest.mark.parametrize("name, patterns", [("dense NVFP4", DENSE), ("rows", ROWS)])
def test_planted_edits_are_found(name, patterns):
    index = next(i for i, subject in enumerate(SUBJECTS) if subject.name == name)
    most, found = planted(index)
    for pattern in patterns:
        kernel, ptx, edit = next(each for each in found if re.fullmatch(pattern, each[2].name))
        text = edit.applied(ptx)
        assert text.count("\n") == ptx.count("\n")
        assert "found" in outcome(SUBJECTS[index], most, (kernel, text)), edit.name


def test_edits_of_source_have_their_places():
    for edit in SOURCE_EDITS:
        path, text = changed(edit)
        assert path.read_text() != text
        assert edit.subject in {subject.name for subject in SUBJECTS}


def test_the_table_explains_what_was_not_found():
    content = json.loads(RESULTS.read_text())
    entries = content["ptx"] + content["source"]
    for entry in entries:
        of_entry = explanation(entry["subject"], entry["kernel"], entry["edit"])
        assert (of_entry is None) == ("found" in entry), entry
        if of_entry is not None:
            assert entry["equivalent" if of_entry.equivalent else "why"] == of_entry.reason, entry
    used = {explanation(entry["subject"], entry["kernel"], entry["edit"]) for entry in entries}
    assert used >= set(EXPLAINED)
    changing = [entry for entry in entries if "equivalent" not in entry]
    assert sum("found" in entry for entry in changing) >= 0.95 * len(changing)
    assert len(content["source"]) >= 20
    assert len({entry["kernel"] for entry in content["ptx"]}) >= 6
