"""The tables of results/machine_code.json: what the gate found in compiled kernels. Needs nothing but Python."""

import re
from typing import Any

from benchmarks.cells import Cells

Rows = dict[tuple, dict[str, Any]]
_SHOWN = 100  # the compute capability of which every launch is shown


def environment(content: dict) -> dict:
    """With what the kernels were compiled. All runs have one version of torch."""
    versions = " and ".join(run["environment"]["triton"] for run in content["runs"])
    return content["runs"][0]["environment"] | {"triton": versions}


def below(content: dict) -> Cells:
    """How many launches are beyond their bounds, by version of Triton and GPU, in figures that are not judged too."""
    rows = []
    for run in content["runs"]:
        for sm in (100, 103, 120):
            cells = [run["environment"]["triton"], f"{sm // 10}.{sm % 10}"]
            for name in ("products", "quantizers"):
                found = [row for row in _rows(run[name]) if row["sm"] == sm]
                count = sum(bool(row["problems"] or row.get("unjudged")) for row in found)
                cells.append(f"{count} of {len(found)}")
            rows.append(cells)
    return [["Triton", "compute capability", "launches of products beyond bounds", "of quantise kernels"], *rows]


def products(content: dict) -> Cells:
    """The block-scaled products on SM100, by the first version of Triton."""
    columns = {
        "kernel": "kernel", "matrix instruction": "instruction", "`tcgen05.cp`": "scale_copies",
        "TMA loads": "tma_loads", "waits in the loop": "waits", "loop overlaps": "overlapped",
        "bytes of a store": "stores", "programs a multiprocessor": "programs", "columns of tensor memory":
        "tensor_columns", "registers": "registers", "spills": "spills",
    }  # fmt: skip
    rows = [
        [", ".join(key), *(_cell(row[name]) for name in columns.values())]
        for key, row in _by_product(content["runs"][0]["products"]).items()
        if row["line"].startswith("block-scaled")
    ]
    return [["product", *columns], *rows]


def quantizers(content: dict) -> Cells:
    """Instructions for 16 elements of every launch on SM100, by version of Triton, beside budget and bound."""
    runs = content["runs"]
    found = [_by_launch(run["quantizers"]) for run in runs]
    rows = []
    for key, row in found[0].items():
        counts = [f"{each[key]['instructions']:.0f}" if key in each else None for each in found]
        rows.append([
            "{}, `{}`: `{}`".format(*key), f"{row['budget']:.0f}", f"{row['line']:.0f}", *counts,
            f"{100 * row['occupancy']:.0f} %",
        ])  # fmt: skip
    versions = [f"Triton {run['environment']['triton']}" for run in runs]
    return [["launch", "budget", "bound", *versions, "occupancy"], *rows]


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


def _cell(value: Any) -> str:
    if isinstance(value, list):
        kinds = (re.search(r"kind::(\w+)", one) or re.search(r"\.(bf16|f16)\b", one) for one in value)
        return ", ".join(sorted({kind[1] for kind in kinds if kind}))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value).replace("gemm_", "")
