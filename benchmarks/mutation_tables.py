"""The tables of results/simulated_mutations.json: edits of kernels, and what the simulator finds of them."""

from collections.abc import Callable
from typing import Any

from benchmarks.cells import Cells

Entry = dict[str, Any]


def subjects(content: dict[str, Any]) -> Cells:
    """For each kernel: how many edits of its PTX were found."""
    return _counted(content["ptx"], ["case", "kernel"], lambda entry: (entry["subject"], f"`{entry['kernel']}`"))


def kinds(content: dict[str, Any]) -> Cells:
    """For each kind of edit: how many were found."""
    return _counted(content["ptx"], ["edits of"], lambda entry: (entry["kind"],))


def _counted(entries: list[Entry], names: list[str], key: Callable[[Entry], tuple[str, ...]]) -> Cells:
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    rows = [[*group, *_counts(having)] for group, having in groups.items()]
    everything = ["**all**", *[""] * (len(names) - 1), *_counts(entries)]
    return [[*names, "edits", "change something", "found", "by a fault", "by wrong values"], *rows, everything]


def _counts(entries: list[Entry]) -> list[Any]:
    changing = [entry for entry in entries if "equivalent" not in entry]
    found = [entry for entry in changing if "found" in entry]
    faults = sum(entry["found"].startswith("fault:") for entry in found)
    share = f"{len(found)} ({len(found) / len(changing):.1%})" if changing else "0"
    return [len(entries), len(changing), share, faults, len(found) - faults]


def not_found(content: dict[str, Any]) -> Cells:
    """The edits that change something and are not found."""
    missed = [entry for kind in ("ptx", "source") for entry in content[kind]
              if "found" not in entry and "equivalent" not in entry]  # fmt: skip
    rows = [[entry["subject"], entry["edit"], f"`{entry['statement']}`", entry.get("why", "")] for entry in missed]
    return [["case", "edit", "statement", "why not"], *rows]


def change_nothing(content: dict[str, Any]) -> Cells:
    """Why edits change nothing, and which."""
    groups: dict[str, list[Entry]] = {}
    for entry in content["ptx"] + content["source"]:
        if "equivalent" in entry:
            groups.setdefault(entry["equivalent"], []).append(entry)
    rows = [[why, len(having), "; ".join(f"{entry['subject']}: {entry['edit']}" for entry in having)]
            for why, having in groups.items()]  # fmt: skip
    return [["why", "edits", "which"], *rows]


def source(content: dict[str, Any]) -> Cells:
    """Every edit of Triton source."""
    rows = [
        [entry["subject"], f"`{entry['kernel']}`", entry["edit"], entry.get("schedule"),
         entry.get("found", entry.get("equivalent", "not found"))]
        for entry in content["source"]
    ]  # fmt: skip
    return [["case", "file", "edit", "schedule", "what the simulator says"], *rows]
