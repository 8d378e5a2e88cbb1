"""How far are the predictions of `fp4compile.roofline` from times on an H200? And torchao's model beside it.

    python -m benchmarks.roofline            # writes results/roofline_h200.json from the other files there
    python -m benchmarks.roofline --plot     # a scatter plot beside it, too (needs matplotlib)
    python -m benchmarks.roofline --check    # exits with 1 where the file is not what the model says now

Predicted is what the files of FILES measured, layer by layer, and those of BLOCKS, by `explain`. The shares in
`fp4compile/hardware.py` and `fp4compile/roofline/time_terms.py` are fitted to half of the former times ("fitted": every
other one, in the order of the files; of experts, two of three models) by `benchmarks/roofline_fit.py`. The summary
tells of the other half by itself. Of the blocks, one time was fitted to: attention's share, to the prefill under
`float8_rowwise`.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import common, llama_block
from benchmarks.grouped_mm import MODELS
from fp4compile.formats import formats
from fp4compile.hardware import named
from fp4compile.roofline import model as roofline
from fp4compile.roofline import time_terms
from fp4compile.roofline.model import Experts, Gpu, Use, predict
from fp4compile.templates import choose

RESULTS = Path(__file__).parent / "results"
FILE = RESULTS / "roofline_h200.json"
PICTURE = FILE.with_suffix(".png")
GPU = "H200"
FILES = ("linear", "quantize", "ceilings", "grouped_mm")
BLOCKS = ("mlp_block", "producers")
_FITTED_MODELS = ("DeepSeek-V3", "Llama-4")
_NOT_YET = "wgmma_sm90"  # did not multiply experts yet when grouped_mm_h200.json was measured


def torchao_gb200(m: Any, n: Any, k: Any, *, dynamic: bool) -> tuple[Any, Any]:
    """(seconds in bf16, seconds in NVFP4) of a linear layer by the roofline that torchao publishes for a GB200.

    Source: benchmarks/float8/float8_inference_roofline.py of pytorch/ao. dynamic: whether the outer scale is computed.
    The pass over the activations before the product counts in bf16 too. Sizes are whole numbers.
    """
    rate, memory, least = 2.25e15 * 0.78, 8e12 * 0.92, 2e-6
    codes, scales, out = 0.5 * (m * k + n * k), 0.5 * ((m * k + n * k) // 16), 2 * m * n
    plain = max(least, 2 * m * n * k / rate, (2 * (m * k + n * k) + out) / memory)
    product = max(least, 2 * m * n * k / (4 * rate), (codes + scales + out) / memory)
    quantise = max(least, ((4.5 if dynamic else 2.5) * m * k + m * (k // 16)) / memory)
    return plain + max(least, 4 * m * k / memory), product + quantise


# What a row is made of: what, case, predicted seconds, measured microseconds, whether shares are fitted to it.
Compared = Iterable[tuple[str, str, float, float, bool]]


def compared(files: dict[str, dict], gpu: str | Gpu) -> list[dict[str, Any]]:
    """A row for each measured time that the model is for. files: what the benchmarks of FILES wrote, by name."""
    readers = {"linear": _linear, "quantize": _quantised, "ceilings": _products, "grouped_mm": _experts}
    found = [each for name, content in files.items() for each in readers[name](content, gpu)]
    order = dict.fromkeys(each[0] for each in found)
    return [_row(*each) for what in order for each in found if each[0] == what]


def _row(what: str, case: str, predicted: float, measured: float, fitted: bool) -> dict[str, Any]:
    return {"what": what, "case": case, "predicted us": round(1e6 * predicted, 2), "measured us": round(measured, 2),
            "error": round(1e6 * predicted / measured - 1, 4), "fitted": fitted}  # fmt: skip


def _checkered(rows: list[dict], width: int) -> Iterator[tuple[bool, dict]]:
    """Each row, and whether it is for fitting: every other one, in turns of `width` rows the even and the odd ones."""
    return (((index + index // width) % 2 == 0, row) for index, row in enumerate(rows))


def _sizes(shape: str) -> tuple[int, ...]:
    return tuple(map(int, shape.split("x")))


def _linear(content: dict, gpu: str | Gpu) -> Compared:
    for fitted, row in _checkered(content["rows"], 4):
        weight_only, both = (predict(name, gpu, *_sizes(row["shape"])) for name in ("nvfp4_weight_only", "nvfp4"))
        yield "bf16 linear", row["shape"], both.plain_seconds, row["bf16"], fitted
        yield "NVFP4 weight-only linear", row["shape"], weight_only.seconds, row["weight-only"], fitted
        yield "NVFP4 W4A4 linear", row["shape"], both.seconds, row["w4a4"], fitted


def _quantised(content: dict, gpu: str | Gpu) -> Compared:
    large = content["rows"]
    shapes = {row["shape"] for row in large}
    for fitted, row in [*_checkered(large, len(large) // len(shapes)), *_checkered(content.get("small", []), 4)]:
        case, _, name = row["case"].rpartition(", ")
        along = "both" if case.startswith("both") else "columns" if "columns" in case else "rows"
        use = Use(formats.get(name), *(word in case for word in ("static", "stochastic", "Hadamard")))
        seconds = _quantise_seconds(use, *_sizes(row["shape"]), gpu, along, "swizzled" in case)
        square = "square blocks" if use.format.square else along
        yield f"quantise kernel, {square}", f"{row['case']}, {row['shape']}", seconds, row["us"], fitted


def _quantise_seconds(use: Use, rows: int, columns: int, gpu: str | Gpu, along: str, native: bool) -> float:
    """Seconds of quantising a 16-bit matrix [rows, columns] along its "rows", its "columns", or "both" at once."""
    written = 0 if along == time_terms.COLUMN else time_terms.stored(use.format, rows, columns, native)
    if along != time_terms.ROWS:
        written += time_terms.stored(use.format, columns, rows, native)
    step = time_terms.quantise_step("x", "fprop", use, use.hadamard, rows * columns, written, along, named(gpu))
    return step.seconds


def _products(content: dict, gpu: str | Gpu) -> Compared:
    """Copies are not compared: the share of the memory is that of the largest one."""
    for what, name in (("bf16 product", "bf16 linear"), ("FP8 rowwise product", "float8 rowwise product")):
        for fitted, row in _checkered([row for row in content["rows"] if row["what"] == what], 4):
            found = predict("float8_rowwise", gpu, *_sizes(row["shape"]))
            seconds = found.plain_seconds if what.startswith("bf16") else found.steps[-1].seconds
            yield name, f"{row['shape']} of ceilings", seconds, row["us"], fitted


@contextmanager
def _as_measured(compiled: bool) -> Iterator[None]:
    """Predict with the kernels of grouped_mm_h200.json. compiled: whether passes changed what is launched."""

    def forget() -> None:
        roofline._layer.cache_clear()
        roofline._chosen.cache_clear()

    kept = tuple(each for each in choose.REGISTRY if each.name != _NOT_YET)
    values = roofline._values if compiled else lambda *_: []
    forget()
    with mock.patch.object(choose, "REGISTRY", kept), mock.patch.object(roofline, "_values", values):
        yield
    forget()


def _experts(content: dict, gpu: str | Gpu) -> Compared:
    """Decode steps, and many tokens, by the kernels of then."""
    with _as_measured(compiled=False):
        decode = list(_decode_of_experts(content, gpu))
    with _as_measured(compiled=True):
        return [*decode, *_many_tokens_of_experts(content, gpu)]


def _decode_of_experts(content: dict, gpu: str | Gpu) -> Compared:
    """Decode steps by offsets and by index, of operators."""
    for row in content["decode"]:
        model, how = row["decode"].split(", ")
        shape, fitted = MODELS[model], model in _FITTED_MODELS
        each, by_index = int(how.split()[0]), how.endswith("by index")
        experts = Experts(each, "gather") if by_index else Experts(shape.experts)
        sizes = (each if by_index else each * shape.experts, shape.n, shape.k)
        weight_only, both = (predict(name, gpu, *sizes, experts=experts) for name in ("nvfp4_weight_only", "nvfp4"))
        yield "experts in bf16", f"{row['decode']}, bf16", both.plain_seconds, row["bf16 us"], fitted
        for what, found in (("weight-only", weight_only), ("w4a4", both)):
            yield "experts, quantised", f"{row['decode']}, {what}", found.seconds, row[f"{what} us"], fitted


def _many_tokens_of_experts(content: dict, gpu: str | Gpu) -> Compared:
    """Many tokens, forward, also those of an earlier run by other recipes, and by two kernels for NVFP4."""
    earlier = [row for row in content.get("earlier", {}).get("tokens", ()) if row["by"] != "bf16"]
    for row in [*content["tokens"], *earlier]:
        model, what = row["tokens"].split(", ")
        if what != "forward" or row["by"] == "loop":
            continue
        shape, plain = MODELS[model], row["by"] == "bf16"
        found = predict("nvfp4" if plain else row["by"], gpu, content["settings"]["tokens"], shape.n, shape.k,
                        experts=shape.experts)  # fmt: skip
        seconds = found.plain_seconds if plain else found.seconds
        kind = "experts in bf16" if plain else "experts, quantised"
        yield kind, f"{model}, {row['by']}", seconds, 1e3 * row["ms"], model in _FITTED_MODELS
    for row in content.get("configurations", ()):
        model, _, how = row["configurations"].partition(", ")
        if how.endswith(" tokens each"):  # of the two kernels, that which is chosen
            shape = MODELS[model]
            found = predict("nvfp4", gpu, int(how.split()[0]) * shape.experts, shape.n, shape.k,
                            experts=shape.experts)  # fmt: skip
            if found.steps[-1].name == f"grouped_dequant_{row['of']}":
                yield "experts, quantised", row["configurations"], found.seconds, row["us"], model in _FITTED_MODELS


def measured_blocks() -> list[llama_block.Measured]:
    """The times of whole blocks, which `explain` predicts. Every kernel is in both times."""
    files = (json.loads((RESULTS / f"{name}_h200.json").read_text()) for name in BLOCKS)
    return [each for content in files for each in llama_block.times_of(content)]


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each kind and of all: how many, the median and the largest error, without sign; and of those not fitted to."""
    kinds = {what: [row for row in rows if row["what"] == what] for what in dict.fromkeys(row["what"] for row in rows)}
    found = []
    for what, members in {**kinds, "all": rows}.items():
        others = [row for row in members if not row["fitted"]]
        worst, of_others = _worst(members), _worst(others) if others else None
        found.append({"what": what, "count": len(members), "median error": _median(members),
                      "largest error": worst["error"], "where": worst["case"], "others": len(others),
                      "median of others": _median(others) if others else None,
                      "largest of others": of_others and of_others["error"]})  # fmt: skip
    return found


def _worst(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return max(rows, key=lambda row: abs(row["error"]))


def _median(rows: list[dict[str, Any]]) -> float:
    return round(statistics.median(abs(row["error"]) for row in rows), 4)


def stored() -> dict[str, dict]:
    """The files that are compared, by name."""
    return {name: json.loads((RESULTS / f"{name}_h200.json").read_text()) for name in FILES}


def content() -> dict[str, Any]:
    """What the file has to hold."""
    return _of_layers() | {"foreseen": [llama_block.compared(each, GPU) for each in measured_blocks()]}


def _of_layers() -> dict[str, Any]:
    files = stored()
    rows = compared(files, GPU)
    return {"environment": files["linear"]["environment"], "summary": summary(rows), "rows": rows}


def is_current() -> bool:
    """Whether the file is what the model says now; of blocks, the first of each kind is predicted again."""
    there = json.loads(FILE.read_text())
    first = {each.what: each for each in reversed(measured_blocks())}
    again = [llama_block.compared(each, GPU) for each in first.values()]
    return all(there[name] == made for name, made in _of_layers().items()) and all(
        row in there["foreseen"] for row in again
    )


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Predicted over measured, both axes logarithmic, with lines of no error and of 15 %."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 6), layout="constrained")
    for what in dict.fromkeys(row["what"] for row in rows):
        points = [(row["measured us"], row["predicted us"]) for row in rows if row["what"] == what]
        axes.loglog(*zip(*points, strict=True), "o", markersize=4, label=what)
    ends = [min(row["measured us"] for row in rows), max(row["measured us"] for row in rows)]
    for factor, style in ((1, "-"), (1.15, ":"), (1 / 1.15, ":")):
        axes.loglog(ends, [factor * end for end in ends], f"k{style}", linewidth=0.8)
    axes.set(xlabel="measured, us", ylabel="predicted, us")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Write or check the file; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="change nothing, exit with 1 where the file is out of date"
    )
    parser.add_argument("--plot", action="store_true", help="make the scatter plot, too")
    args = parser.parse_args(arguments)
    if args.check:
        if is_current():
            return 0
        print(f"{FILE.name} is out of date: run python -m benchmarks.roofline --plot", file=sys.stderr)
        return 1
    made = content()
    FILE.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(common.table(made["summary"]))
    print(common.table(made["foreseen"]))
    if args.plot:
        plot(made["rows"], PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
