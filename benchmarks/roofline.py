"""How far are the predictions of `fp4compile.roofline` from times on an H200? And torchao's model beside it.

    python -m benchmarks.roofline            # writes results/roofline_h200.json from the other files there
    python -m benchmarks.roofline --plot     # a scatter plot beside it, too (needs matplotlib)
    python -m benchmarks.roofline --check    # exits with 1 where the file is not what the model says now

Predicted is what `linear_h200.json`, `quantize_h200.json` and `mlp_block_h200.json` measured. The shares in
`fp4compile/gpus.py` and `fp4compile/roofline.py` were fitted to the first two, one share for all shapes of a kernel:
for these the errors say how well the model describes, not how well it foresees. Nothing was fitted to the third.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import common
from fp4compile import formats
from fp4compile.roofline import Use, predict, quantise_seconds

RESULTS = Path(__file__).parent / "results"
FILE = RESULTS / "roofline_h200.json"
PICTURE = FILE.with_suffix(".png")
GPU = "H200"


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


def compared(linear: dict, quantize: dict, gpu: str) -> list[dict[str, Any]]:
    """A row for each measured time that the model is for. linear, quantize: what these benchmarks wrote."""
    found = [*_linear(linear["rows"], gpu), *_quantised([*quantize["rows"], *quantize.get("small", ())], gpu)]
    return [_row(*each) for each in found]


def _row(what: str, case: str, predicted: float, measured: float) -> dict[str, Any]:
    return {"what": what, "case": case, "predicted us": round(1e6 * predicted, 2), "measured us": round(measured, 2),
            "error": round(1e6 * predicted / measured - 1, 4)}  # fmt: skip


def _linear(rows: list[dict], gpu: str) -> Iterator[tuple[str, str, float, float]]:
    for row in rows:
        sizes = tuple(map(int, row["shape"].split("x")))
        weight_only, both = (predict(name, gpu, *sizes) for name in ("nvfp4_weight_only", "nvfp4"))
        yield "bf16 linear", row["shape"], both.plain_seconds, row["bf16"]
        yield "NVFP4 weight-only linear", row["shape"], weight_only.seconds, row["weight-only"]
        yield "NVFP4 W4A4 linear", row["shape"], both.seconds, row["w4a4"]


def _quantised(rows: list[dict], gpu: str) -> Iterator[tuple[str, str, float, float]]:
    for row in rows:
        case, _, name = row["case"].rpartition(", ")
        sizes = tuple(map(int, row["shape"].split("x")))
        along = "both" if case.startswith("both") else "columns" if "columns" in case else "rows"
        use = Use(formats.get(name), *(word in case for word in ("static", "stochastic", "Hadamard")))
        seconds = quantise_seconds(use, *sizes, gpu, along=along, native="swizzled" in case)
        yield "quantise kernel", f"{row['case']}, {row['shape']}", seconds, row["us"]


def training_block(content: dict) -> list[dict[str, Any]]:
    """The three layers of the MLP block, forward and backward. What is between them is measured and not predicted."""
    tokens, hidden, inner = (content["settings"][name] for name in ("tokens", "hidden", "inner"))
    layers = ((tokens, inner, hidden), (tokens, inner, hidden), (tokens, hidden, inner))
    found = []
    for row in content["rows"]:
        if row["block"].startswith("torchao"):
            continue
        recipe = "nvfp4" if row["block"] == "bf16" else row["block"]
        each = [predict(recipe, GPU, *sizes, train=True) for sizes in layers]
        seconds = sum(one.plain_seconds if row["block"] == "bf16" else one.seconds for one in each)
        found.append(_row("training step of an MLP block", row["block"], seconds, 1e3 * row["ms"]))
    return found


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each kind and of all: how many, the median and the largest error, without sign."""
    kinds = {what: [row for row in rows if row["what"] == what] for what in dict.fromkeys(row["what"] for row in rows)}
    found = []
    for what, members in {**kinds, "all": rows}.items():
        worst = max(members, key=lambda row: abs(row["error"]))
        errors = [abs(row["error"]) for row in members]
        found.append({"what": what, "count": len(members), "median error": round(statistics.median(errors), 4),
                      "largest error": worst["error"], "where": worst["case"]})  # fmt: skip
    return found


def content() -> dict[str, Any]:
    """What the file has to hold."""
    linear, quantize, block = (
        json.loads((RESULTS / f"{name}_h200.json").read_text()) for name in ("linear", "quantize", "mlp_block")
    )
    rows = compared(linear, quantize, GPU)
    foreseen = training_block(block)
    return {
        "environment": linear["environment"], "summary": summary(rows), "foreseen": foreseen, "rows": rows,
    }  # fmt: skip


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
    made = content()
    if args.check:
        if json.loads(FILE.read_text()) == made:
            return 0
        print(f"{FILE.name} is out of date: run python -m benchmarks.roofline --plot", file=sys.stderr)
        return 1
    FILE.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(common.table(made["summary"]))
    print(common.table(made["foreseen"]))
    if args.plot:
        plot(made["rows"], PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
