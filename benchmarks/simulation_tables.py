"""The tables of results/simulation.json: launches for SM100, executed in the simulator. Needs nothing but Python."""

from typing import Any

from benchmarks.cells import Cells


def coverage(content: dict[str, Any]) -> Cells:
    """For each compute capability: how many cases ran and were right, and how many of the table's launches ran."""
    rows = []
    for sm, covered in content["coverage"].items():
        cases = [case for case in content["cases"] if case["sm"] == int(sm)]
        right = sum(not case.get("wrong") and "error" not in case for case in cases)
        rows.append([f"{int(sm) // 10}.{int(sm) % 10}", f"{right} of {len(cases)}", content["schedules"],
                     f"{covered['simulated']} of {covered['launches']}",
                     f"{sum(case.get('warp instructions', 0) for case in cases):,}",
                     "; ".join(covered["not simulated"]) or "none"])  # fmt: skip
    header = ["compute capability", "cases right", "schedules", "launches of the table with these constants",
              "warp instructions", "launches that no case has"]  # fmt: skip
    return [header, *rows]


def cases(content: dict[str, Any]) -> Cells:
    """Every case: what ran, how much, and what was wrong."""
    rows = [
        [f"{case['sm'] // 10}.{case['sm'] % 10}", case["name"], f"`{case.get('kernels', '')}`",
         f"{case.get('warp instructions', 0):,}", case.get("seconds"),
         "; ".join(f"{what}: {count}" for what, count in case.get("notes", {}).items()),
         case.get("error") or "; ".join(case.get("wrong", ())) or "none"]
        for case in content["cases"]
    ]  # fmt: skip
    header = ["compute capability", "case", "kernels", "warp instructions", "seconds, with compiling", "notes", "wrong"]
    return [header, *rows]
