"""Fits the shares of `fp4compile.roofline` to half of the times that were measured on an H200.

    python -m benchmarks.roofline_fit

Prints the shares as they are and as they would be. One share after the other is changed by a step, as long as the mean
error (of the logarithm, without sign) falls over the rows that are "fitted" in `benchmarks.roofline`. The share of the
memory is not fitted: it is that of the largest copy in `ceilings_h200.json`. Nor are tiles, which are the kernels'.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from benchmarks import roofline as comparison
from fp4compile.hardware import GPUS
from fp4compile.roofline import model as roofline
from fp4compile.roofline import time_terms


@dataclass(frozen=True)
class Parameter:
    """One share.

    table: of `roofline.time_terms`, or "gpu". kernel: whose it is, in a table of kernels. step: what it is changed by.
    """

    table: str
    kernel: str
    field: str
    step: float


_STEPS = {"launch": 0.05, "turn": 1e-7}


def _of_kernel(table: str, kernel: str, *fields: str) -> list[Parameter]:
    return [Parameter(table, kernel, field, _STEPS.get(field, 0.01)) for field in fields]


PARAMETERS = (
    Parameter("gpu", "", "bf16_share", 0.01), Parameter("gpu", "", "fp8_share", 0.01),
    Parameter("gpu", "", "launch", 1e-7), Parameter("gpu", "", "product_launch", 1e-7),
    *_of_kernel("KERNELS", "gemv", "memory", "launch"), *_of_kernel("KERNELS", "skinny", "memory", "launch"),
    *_of_kernel("KERNELS", "wgmma_sm90", "memory", "launch"),
    *_of_kernel("KERNELS", "library_row_scaled", "memory", "launch"),
    *(Parameter("QUANTISERS", "", field, 0.01) for field in ("columns", "both", "square", "hadamard", "stochastic")),
    Parameter("QUANTISERS", "", "row_amax", 0.1),
    *_of_kernel("LIBRARY", "grouped", "memory"), *_of_kernel("KERNELS", "grouped_library_row_scaled", "turn"),
    *_of_kernel("KERNELS", "grouped_skinny", "memory", "launch", "turn"),
    *_of_kernel("KERNELS", "grouped_dequant_tiles", "matrix", "turn"),
)  # fmt: skip


@contextmanager
def using(values: dict[Parameter, float]) -> Iterator[Any]:
    """The model with these values; gives the GPU."""
    gpu = GPUS[comparison.GPU]
    tables = {name: dict(getattr(time_terms, name)) for name in ("KERNELS", "LIBRARY")}
    quantisers = time_terms.QUANTISERS
    for parameter, value in values.items():
        if parameter.table == "gpu":
            gpu = replace(gpu, **{parameter.field: value})
        elif parameter.table == "QUANTISERS":
            quantisers = replace(quantisers, **{parameter.field: value})
        else:
            table = tables[parameter.table]
            table[parameter.kernel] = replace(table[parameter.kernel], **{parameter.field: value})
    with (
        mock.patch.dict(time_terms.KERNELS, tables["KERNELS"]),
        mock.patch.dict(time_terms.LIBRARY, tables["LIBRARY"]),
        mock.patch.object(time_terms, "QUANTISERS", quantisers),
    ):
        roofline._layer.cache_clear()
        yield gpu
    roofline._layer.cache_clear()


def as_they_are() -> dict[Parameter, float]:
    """The values of the package."""
    places = {"gpu": GPUS[comparison.GPU], "QUANTISERS": time_terms.QUANTISERS}
    return {each: getattr(places.get(each.table) or getattr(time_terms, each.table)[each.kernel], each.field)
            for each in PARAMETERS}  # fmt: skip


def error(values: dict[Parameter, float], files: dict[str, dict]) -> float:
    """Mean of |log(predicted / measured)| over the rows to fit to."""
    with using(values) as gpu:
        rows = [row for row in comparison.compared(files, gpu) if row["fitted"]]
    return sum(abs(math.log(row["predicted us"] / row["measured us"])) for row in rows) / len(rows)


def fit(files: dict[str, dict], values: dict[Parameter, float]) -> dict[Parameter, float]:
    """The values at which no step of one share makes the error smaller, from the given ones on."""
    values, best, changed = dict(values), error(values, files), True
    while changed:
        changed = False
        for parameter in values:
            for step in (parameter.step, -parameter.step):
                value = round(values[parameter] + step, 8)
                tried = values | {parameter: value}
                limited = parameter.field not in ("launch", "product_launch", "row_amax", "turn") and value > 1
                if limited or value <= 0 or (found := error(tried, files)) >= best - 1e-6:
                    continue
                values, best, changed = tried, found, True
                break
    return values


def main() -> None:
    files, now = comparison.stored(), as_they_are()
    found = fit(files, now)
    for parameter, value in found.items():
        name = ".".join(filter(None, (parameter.table, parameter.kernel, parameter.field)))
        print(f"{name:40} {now[parameter]:<10.3g} {value:.3g}")
    print(f"mean error {error(now, files):.4f}, fitted {error(found, files):.4f}")


if __name__ == "__main__":
    main()
