"""The tables of results/simulation.json and simulated_models.json: launches, and compiled models, for SM100, executed
in the simulator. Needs nothing but Python."""

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


def models(content: dict[str, Any]) -> Cells:
    """Every compiled model: what it launched, how much that was, and how far its results are from the reference's."""
    rows = [
        [row["model"], f"`{row['recipe']}`", row["run"], row["dtype"],
         *(row[f"{kind} launches"] for kind in ("package", "Inductor", "library")), row["PyTorch operations"],
         f"{row['warp instructions']:,}", row["CPU seconds"], f"{row['largest difference']:.1e}", f"{row['bound']:.1e}",
         row["of"]]
        for row in content["rows"]
    ]  # fmt: skip
    header = ["model", "recipe", "run", "dtype", "launches of this package", "of Inductor's kernels", "of cuBLASLt",
              "PyTorch's operations", "warp instructions", "CPU seconds, with compiling", "largest difference", "bound",
              "of the tensor"]  # fmt: skip
    return [header, *rows]


def kernels_of_models(content: dict[str, Any]) -> Cells:
    """The kernels that the models launched, and how often in each recipe."""
    recipes = list(dict.fromkeys(row["recipe"] for row in content["rows"]))
    counted: dict[str, dict[str, int]] = {}
    for row in content["rows"]:
        for name, count in row["kernels"].items():
            of_recipes = counted.setdefault(name, dict.fromkeys(recipes, 0))
            of_recipes[row["recipe"]] += count
    rows = [[f"`{name}`", *(counts[recipe] for recipe in recipes)] for name, counts in sorted(counted.items())]
    return [["kernel", *(f"`{recipe}`" for recipe in recipes)], *rows]
