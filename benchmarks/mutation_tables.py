"""The tables of results/simulated_mutations.json: edits of kernels, and what the simulator finds of them.

Needs nothing but Python.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks.cells import Cells

Entry = dict[str, Any]


def kernels(content: dict[str, Any]) -> Cells:
    """For each kernel: how many edits of its PTX were found; then of Triton source."""
    cells = _counted(content["ptx"], ["case", "kernel"], lambda entry: (entry["subject"], f"`{entry['kernel']}`"))
    return [*cells, ["", "Triton source", *_counts(content["source"])]]


def kinds(content: dict[str, Any]) -> Cells:
    """For each kind of edit of PTX: how many were found."""
    return _counted(content["ptx"], ["edits of"], lambda entry: (entry["kind"],))


def checks(content: dict[str, Any]) -> Cells:
    """How many edits each check of the simulator found first."""
    counts = {kind: Counter(entry["by"] for entry in content[kind] if "by" in entry) for kind in ("ptx", "source")}
    order = [name for name, _ in (counts["ptx"] + counts["source"]).most_common()]
    return [["found by", "edits of PTX", "edits of source"],
            *([name, counts["ptx"][name], counts["source"][name]] for name in order)]  # fmt: skip


def _counted(entries: list[Entry], names: list[str], key: Callable[[Entry], tuple[str, ...]]) -> Cells:
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    rows = [[*group, *_counts(having)] for group, having in groups.items()]
    everything = ["**all of PTX**", *[""] * (len(names) - 1), *_counts(entries)]
    return [[*names, "edits", "change nothing", "found", "not found"], *rows, everything]


def _counts(entries: list[Entry]) -> list[Any]:
    changing = [entry for entry in entries if "equivalent" not in entry]
    found = sum("found" in entry for entry in changing)
    share = f"{found} ({found / len(changing):.1%})" if changing else "0"
    return [len(entries), len(entries) - len(changing), share, len(changing) - found]


def not_found(content: dict[str, Any]) -> Cells:
    """The edits that change something and are not found."""
    missed = [entry for entry in (*content["ptx"], *content["source"]) if not entry.keys() & {"found", "equivalent"}]
    rows = [[*_place(entry), entry.get("why", "")] for entry in missed]
    return [["case", "kernel", "edit", "line", "why not"], *rows]


def change_nothing(content: dict[str, Any]) -> Cells:
    """The edits that change nothing, by the reason."""
    having = [entry for entry in (*content["ptx"], *content["source"]) if "equivalent" in entry]
    having.sort(key=lambda entry: entry["equivalent"])
    return [["case", "kernel", "edit", "line", "why"], *([*_place(one), one["equivalent"]] for one in having)]


def found(content: dict[str, Any]) -> Cells:
    """Every edit that was found."""
    rows = [[*_place(entry), entry["by"], entry["schedule"], entry["found"].replace("|", "/")]
            for entry in (*content["source"], *content["ptx"]) if "found" in entry]  # fmt: skip
    return [["case", "kernel", "edit", "line", "found by", "schedule", "what the simulator says"], *rows]


def _place(entry: Entry) -> list[Any]:
    return [entry["subject"], f"`{entry['kernel']}`", entry["edit"], str(entry["line"])]
