"""The tables of results/machine_code.json: what the gate found before and after a change. Needs nothing but Python."""

import re
from typing import Any

Cells = list[list[Any]]
Rows = dict[tuple, dict[str, Any]]
_STATES = ("before", "after")
_SHOWN = 100  # the compute capability of which every launch is shown


def environment(content: dict) -> dict:
    """With what the newer state was compiled. All runs of a state have one version of torch."""
    runs = content["after"]["runs"]
    versions = " and ".join(run["environment"]["triton"] for run in runs)
    return runs[0]["environment"] | {"triton": versions}


def below(content: dict) -> Cells:
    """How many launches are below their line, by version of Triton and GPU, in figures that are not judged too."""
    rows = []
    for i, run in enumerate(content["after"]["runs"]):
        for sm in (100, 103, 120):
            cells = [run["environment"]["triton"], f"{sm // 10}.{sm % 10}"]
            for name in ("products", "quantizers"):
                for state in _STATES:
                    found = [row for row in _rows(content[state]["runs"][i][name]) if row["sm"] == sm]
                    cells.append(
                        f"{sum(bool(row['problems'] or row.get('unjudged')) for row in found)} of {len(found)}"
                    )
            rows.append(cells)
    header = ["Triton", "compute capability", "launches of products: before", "after", "of quantise kernels: before",
              "after"]  # fmt: skip
    return [header, *rows]


def products(content: dict) -> Cells:
    """The block-scaled products on SM100, by the first version of Triton."""
    found = [_by_product(content[state]["runs"][0]["products"]) for state in _STATES]
    columns = {
        "kernel": "kernel", "matrix instruction": "instruction", "`tcgen05.cp`": "scale_copies",
        "TMA loads": "tma_loads", "waits in the loop": "waits", "loop overlaps": "overlapped",
        "bytes of a store": "stores", "programs a multiprocessor": "programs", "columns of tensor memory":
        "tensor_columns", "registers": "registers", "spills": "spills",
    }  # fmt: skip
    rows = []
    for key, after in found[1].items():
        before = found[0].get(key, after)
        if any(row["line"].startswith("block-scaled") for row in (before, after)):
            rows.append([", ".join(key), *(_change(before[name], after[name]) for name in columns.values())])
    return [["product", *columns], *rows]


def quantizers(content: dict) -> Cells:
    """Instructions for 16 elements of every launch on SM100, by version of Triton, beside budget and line."""
    runs = content["after"]["runs"]
    found = [[_by_launch(content[state]["runs"][i]["quantizers"]) for state in _STATES] for i in range(len(runs))]
    rows = []
    for key, row in found[0][1].items():
        cells = ["{}, `{}`: `{}`".format(*key), f"{row['budget']:.0f}", f"{row['line']:.0f}"]
        for before, after in found:
            cells.append(_change(*(f"{state[key]['instructions']:.0f}" if key in state else None
                                   for state in (before, after))))  # fmt: skip
        cells.append(
            _change(*(f"{100 * state[key]['occupancy']:.0f} %" if key in state else None for state in found[0]))
        )
        rows.append(cells)
    versions = [f"Triton {run['environment']['triton']}" for run in runs]
    return [["launch", "budget", "line", *versions, "occupancy"], *rows]


def _rows(table: dict) -> list[dict[str, Any]]:
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def _by_product(table: dict) -> Rows:
    """The row of the product itself, by formats and sizes."""
    found: Rows = {}
    for row in _rows(table):
        if row["sm"] == _SHOWN and row["line"] != "beside a product":
            found.setdefault((row["format"], row["configuration"]), row)
    return found


def _by_launch(table: dict) -> Rows:
    return {(row["configuration"], row["format"], row["kernel"]): row for row in _rows(table) if row["sm"] == _SHOWN}


def _change(before: Any, after: Any) -> str:
    before, after = (_cell(value) for value in (before, after))
    return after if before in (after, "") else f"{before} → {after}"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        kinds = (re.search(r"kind::(\w+)", one) or re.search(r"\.(bf16|f16)\b", one) for one in value)
        return ", ".join(sorted({kind[1] for kind in kinds if kind}))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value).replace("gemm_", "")
