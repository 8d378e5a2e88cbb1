"""The cells of the tables in benchmarks/results/*.md: a function for each, of the content of one JSON file.

Needs nothing but Python. `pages` says which file each takes.
"""

import statistics
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

# The first row is the header. A cell that is None is left empty.
Cells = list[list[Any]]
CellsOf = Callable[[dict], Cells]


def number(value: float | None, digits: int) -> str | None:
    """A number to so many digits. A half is rounded away from zero as the file's decimal digits have it: 0.835 is 0.84,
    although the nearest binary number is smaller."""
    if value is None:
        return None
    return str(Decimal(repr(value)).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_HALF_UP))


def percent(value: float, digits: int = 2) -> str:
    """With its sign; what is rounded to zero has none."""
    text = number(value, digits) or ""
    return f"+{text} %" if value > 0 and float(text) else f"{text if float(text) else text.lstrip('-')} %"


def variant(name: str) -> str:
    """The name of a training run in words: "nvfp4_train-no_sr" is "nvfp4_train, no stochastic rounding"."""
    words = {
        "no_sr": "no stochastic rounding",
        "no_hadamard": "no Hadamard transform",
        "with_head": "head quantised",
        "forward_bf16": "forward products of the last fifth of the steps in bf16",
        "last_bf16": "last quarter of the blocks in bf16",
        "uncompiled": "uncompiled",
    }
    base, *switches = name.split("-")
    return ", ".join((f"`{base}`" if base != "bf16" else base, *(words[switch] for switch in switches)))


# ---------------------------------------------------------------- accuracy and compile time


def minilm(content: dict) -> Cells:
    rows = [
        ["bf16, not quantised" if row["recipe"] == "bf16" else f"`{row['recipe']}`",
         number(row["mean cosine"], 4), number(row["min"], 4)]
        for row in content["rows"]
    ]  # fmt: skip
    return [["recipe", "mean cosine", "lowest cosine"], *rows]


def minilm_settings(content: dict) -> Cells:
    rows = [
        [row["activations"], f"`{row['weight scales']}`", number(row["weights dB"], 1), number(row["mean cosine"], 4),
         number(row["min"], 4), number(row["mean cosine, 3 in mxfp8"], 4), number(row["min, 3 in mxfp8"], 4)]
        for row in content["rows"]
    ]  # fmt: skip
    header = ["activations", "`weight_scales`", "weights' SQNR, dB", "mean cosine", "lowest cosine",
              "mean, 3 layers in `mxfp8`", "lowest, 3 layers in `mxfp8`"]  # fmt: skip
    return [header, *rows]


def compile_time(content: dict) -> Cells:
    rows = [
        ["Inductor alone" if row["backend"] == "inductor" else f"`{row['backend']}`",
         number(row["median s"], 1), number(row["min s"], 1), number(row["max s"], 1), number(row["ratio"], 2)]
        for row in content["rows"]
    ]  # fmt: skip
    return [["backend", "median, s", "lowest, s", "highest, s", "median over Inductor's"], *rows]


def compile_time_llama(content: dict) -> Cells:
    rows = [
        [packed_model(row["model"]), number(row["prefill s"], 1), number(row["prefill x"], 2),
         number(row["decode s"], 1), number(row["decode x"], 2)]
        for row in content["rows"]
    ]  # fmt: skip
    return [["model", "first prefill, s", "over bf16's", "first decode step, s", "over bf16's"], *rows]


def weight_check(content: dict) -> Cells:
    return [
        ["what", "figure"],
        ["check of a weight, lowest, us", number(content["check us"]["min"], 2)],
        ["check of a weight, median, us", number(content["check us"]["median"], 2)],
        ["step of 224 layers in CUDA graphs, ms", number(content["step ms"], 3)],
    ]


def packed_model(name: str) -> str:
    return name if name == "bf16" else f"packed, `{name}`"


# ---------------------------------------------------------------- quantising

# What the kernel of a benchmark's case does, in words.
CASES = {
    "rows": "rows",
    "rows, swizzled": "rows, swizzled scales",
    "32x32": "square blocks",
    "row-scaled": "rows with a scale each",
    "two-level, static": "rows, static tensor scale",
    "two-level, dynamic": "rows, tensor scale computed",
    "columns": "columns",
    "16x16, static": "square blocks, static tensor scale",
    "16x16, dynamic": "square blocks, tensor scale computed",
    "both": "rows and columns from one read",
    "both, dynamic": "rows and columns, tensor scale computed",
    "row-scaled columns": "columns with a scale each (two reads)",
    "rows, stochastic": "rows, stochastic, tensor scale computed",
    "columns, Hadamard": "transformed columns, tensor scale computed",
    "columns, Hadamard, stochastic": "transformed columns, stochastic, tensor scale computed",
    "both, Hadamard": "rows and transformed columns, tensor scale computed",
    "both, Hadamard, stochastic": "rows and transformed columns, stochastic, tensor scale computed",
}
TWO_READS = {("both", "float8_rowwise"): "rows and columns with a scale each (two reads)"}


def quantize(content: dict) -> Cells:
    sizes = ("8192x8192", "16384x16384")
    found = {(row["case"], row["shape"]): row for row in content["rows"]}
    header = ["what", "format"]
    for size in sizes:
        header += [f"{size}: us", "of copy's rate", "torchao 0.18, us"]
    rows = []
    for case in dict.fromkeys(row["case"] for row in content["rows"]):
        what, _, fmt = case.rpartition(", ")
        cells = [TWO_READS.get((what, fmt), CASES[what]), f"`{fmt}`"]
        for size in sizes:
            row = found[case, size]
            cells += [number(row["us"], 1), number(row["of copy"], 2), number(row["torchao us"], 1)]
        rows.append(cells)
    return [header, *rows]


def quantize_small(content: dict) -> Cells:
    formats = list(dict.fromkeys(row["case"] for row in content["small"]))
    found = {(row["case"], row["shape"]): row for row in content["small"]}
    names = [f"`{case.rpartition(', ')[2]}`" for case in formats]
    rows = [
        [shape, *(f"{found[case, shape]['us']:.2f} ({found[case, shape]['beyond us']:.2f})" for case in formats)]
        for shape in dict.fromkeys(row["shape"] for row in content["small"])
    ]
    return [["shape", *names], *rows]


# ---------------------------------------------------------------- products and models


def linear(content: dict) -> Cells:
    header = [
        "M, N, K", "bf16", "NVFP4 weight-only", "bf16 over it", "NVFP4 W4A4", "bf16 over it",
        "W4A4, product alone", "torchao 0.18 weight-only",
    ]  # fmt: skip
    rows = []
    for row in content["rows"]:
        sizes = ", ".join(row["shape"].split("x"))
        rows.append([
            sizes, number(row["bf16"], 1), number(row["weight-only"], 1), number(row["weight-only x"], 2),
            number(row["w4a4"], 1), number(row["w4a4 x"], 2), number(row["w4a4 product"], 1),
            number(row["torchao weight-only"], 1),
        ])  # fmt: skip
    return [header, *rows]


def many_rows(content: dict) -> Cells:
    header = ["M, N, K", "bf16", "NVFP4 weight-only", "bf16 over it", "NVFP4 W4A4", "bf16 over it", "in memory"]
    rows = []
    for row in content["rows"]:
        rows.append([
            ", ".join(row["shape"].split("x")), number(row["bf16"], 1), number(row["weight-only"], 1),
            number(row["weight-only x"], 2), number(row["w4a4"], 1), number(row["w4a4 x"], 2),
            number(row["in memory"], 1),
        ])  # fmt: skip
    return [header, *rows]


def packed_experts(content: dict) -> Cells:
    header = ["experts x N x K", "tokens each", "sizes", "bf16", "NVFP4 weight-only", "bf16 over it", "tile",
              "without this kernel", "bf16 over it"]  # fmt: skip
    rows = []
    for row in content["rows"]:
        rows.append([
            row["experts"], row["tokens"], row["sizes"], number(row["bf16"], 1), number(row["weight-only"], 1),
            number(row["weight-only x"], 2), row["table"], number(row["in memory"], 1), number(row["in memory x"], 2),
        ])  # fmt: skip
    return [header, *rows]


def packed_layer(content: dict) -> Cells:
    cases = [name for name in content["rows"][0] if name.startswith("packed") and not name.endswith(" x")]
    names = [f"`{case.removeprefix('packed ')}`" for case in cases]
    header = [
        "hidden x inner x experts",
        "tokens each",
        "bf16",
        *(each for name in names for each in (name, "bf16 over it")),
    ]
    rows = [
        [row["layer"], row["tokens"], number(row["bf16"], 1),
         *(cell for case in cases for cell in (number(row[case], 1), number(row[f"{case} x"], 2)))]
        for row in content["rows"]
    ]  # fmt: skip
    return [header, *rows]


def linear_together(content: dict) -> Cells:
    rows = [
        [row["products"], row["M"], number(row["apart us"], 1), number(row["in one launch us"], 1)]
        for row in content["together"]
    ]
    return [["products", "M", "one launch each, us", "one launch for all, us"], *rows]


_DECODE_HEADER = [
    "model", "memory, GiB", "peak while packing, GiB", "decode, tokens/s", "speed over bf16's",
    "prefill, ms", "time over bf16's", "first prefill, s", "first decode step, s",
]  # fmt: skip


def _decode_row(row: dict, label: str = "") -> list[Any]:
    packed = row["model"] != "bf16"
    return [
        packed_model(row["model"]) + label,
        number(row["GiB"], 2), number(row["peak GiB"], 2) if packed else None,
        number(row["decode tokens/s"], 0), number(row["decode x"], 2) if packed else None,
        number(row["prefill ms"], 1), number(row["prefill x"], 2) if packed else None,
        number(row["compile prefill s"], 1), number(row["compile decode s"], 1),
    ]  # fmt: skip


def llama_decode(content: dict) -> Cells:
    return [_DECODE_HEADER, *map(_decode_row, content["rows"])]


def qwen3_moe_decode(content: dict) -> Cells:
    how = {"batched_mm": "by index", "grouped_mm": "by groups"}
    return [_DECODE_HEADER, *(_decode_row(row, f", {label}") for key, label in how.items() for row in content[key])]


def ceilings(content: dict) -> Cells:
    """The products in bf16 and in FP8 beside each other, which the file has in turns."""
    products = [row for row in content["rows"] if row["what"] != "copy"]
    rows = [
        [plain["shape"], number(plain["us"], 1), number(plain["TFLOP/s"], 0), number(float8["us"], 1),
         number(float8["TFLOP/s"], 0)]
        for plain, float8 in zip(products[::2], products[1::2], strict=True)
    ]  # fmt: skip
    return [["M x N x K", "bf16, us", "TFLOP/s", "FP8 rowwise, us", "TFLOP/s"], *rows]


def ceilings_copies(content: dict) -> Cells:
    rows = [[row["shape"], number(row["us"], 1), number(row["TB/s"], 2)]
            for row in content["rows"] if row["what"] == "copy"]  # fmt: skip
    return [["copied, read and written together", "us", "TB/s"], *rows]


# ---------------------------------------------------------------- training


def block(name: str) -> str:
    if name.startswith("torchao"):
        return f"torchao 0.18 float8, {name.partition(' ')[2]}"
    return name if name == "bf16" else f"`{name}`"


def _blocks(rows: list[dict]) -> Cells:
    header = ["block", "ms", "over bf16", "peak, MiB", "saved, MiB", "packed over its bf16 size", "first step, s"]
    return [
        header,
        *(
            [block(row["block"]), number(row["ms"], 2), number(row["of bf16"], 2), number(row["peak MiB"], 0),
             number(row["saved MiB"], 0), number(row["of its bf16"], 3), number(row["first step s"], 1)]
            for row in rows
        ),
    ]  # fmt: skip


def mlp_block(content: dict) -> Cells:
    return _blocks(content["rows"])


def _base(name: str) -> str:
    frozen = name.removeprefix("frozen-")
    if name == "nf4":
        return "bitsandbytes 0.50, NF4, double quantisation"
    if frozen != name:
        return f"bf16, quantised by `{frozen}`"
    return name if name == "bf16" else f"packed, `{name}`"


def adapters(content: dict) -> Cells:
    rows = [
        [_base(row["base"]), number(row["ms"], 1), number(row["ms x"], 2), number(row["peak GiB"], 2),
         number(row["peak x"], 3), number(row["at rest GiB"], 2), number(row["first step s"], 1)]
        for row in content["rows"]
    ]  # fmt: skip
    return [["base", "ms", "over bf16", "peak, GiB", "over bf16", "at rest, GiB", "first step, s"], *rows]


def training_step(content: dict) -> Cells:
    rows = [
        [row["case"], number(row["ms"], 1), number(row["of bf16"], 2), number(row["device ms"], 1),
         number(row["host ms"], 1), row["launches"], number(row["3 steps s"], 0)] for row in content["rows"]
    ]  # fmt: skip
    return [["case", "ms", "over bf16", "device, ms", "host, ms", "launches", "first three steps, s"], *rows]


def sharded_step(content: dict) -> Cells:
    rows = [
        [row["case"], number(row["ms"], 1), number(row["of the first"], 2), number(row["sent MB"], 0),
         number(row["loss"], 4)] for row in content["rows"]
    ]  # fmt: skip
    return [["case", "ms", "over bf16", "sent by a rank, MB", "loss"], *rows]


def tensor_parallel(content: dict) -> Cells:
    rows = [
        [row["case"], number(row["ms"], 2), number(row["of the first"], 2), number(row["sent MB"], 0),
         number(row["gathered MB"], 0), row["collectives"]] for row in content["rows"]
    ]  # fmt: skip
    return [["case", "ms", "over bf16", "sent by a rank, MB", "of it gathered", "collectives"], *rows]


def tensor_parallel_time(content: dict) -> Cells:
    rows = [[row["case"], number(row["ms"], 2), number(row["of the first"], 2)] for row in content["rows"]]
    return [["case", "ms", "over bf16"], *rows]


def expert_dispatch(content: dict) -> Cells:
    rows = [
        [row["case"], number(row["quantise us"], 0), number(row["gather us"], 0), number(row["device us"], 0),
         row["quantised rows"], number(row["moved MB"], 0)] for row in content["rows"]
    ]  # fmt: skip
    return [["case", "quantise, us", "gather, us", "all kernels, us", "quantised rows", "moved, MB"], *rows]


def adapters_losses(content: dict) -> Cells:
    rows = [
        [_base(row["base"]), number(row["first loss"], 4), number(row["last loss"], 4),
         percent(row["last over bf16 %"])] for row in content["losses"]
    ]  # fmt: skip
    return [["base", "loss of the first step", "mean loss of the last 50 steps", "over bf16"], *rows]


def _distances(rows: list[dict]) -> Cells:
    return [
        [variant(row["variant"]), number(row["loss"], 3), percent(row["over bf16 %"]),
         ", ".join(percent(value) for value in row["of each seed"])]
        for row in rows
    ]  # fmt: skip


_LOSS_HEADER = ["variant", "mean loss of the last 50 steps", "over bf16", "of each seed"]


def training_loss(content: dict) -> Cells:
    return [_LOSS_HEADER, *_distances(content["rows"])]


def training_loss_again(content: dict) -> Cells:
    return [_LOSS_HEADER, *_distances(content["again"]["rows"])]


def training_loss_texts(content: dict) -> Cells:
    rows = [[text["text"], *row] for text in content["other texts"] for row in _distances(text["rows"])]
    return [["text", *_LOSS_HEADER], *rows]


def gradient_error(content: dict) -> Cells:
    header = [
        "backward", "weights", "one gradient", "mean of 64 seeds", "mean of 64 batches", "held-out loss over bf16's"
    ]  # fmt: skip
    rows = [
        [variant(row["variant"]), {"lm_head": "head"}.get(row["weights"], row["weights"]),
         *(f"{row[column]:.1f} %" for column in ("one %", "64 draws %", "64 batches %")),
         f"{percent(row['over bf16 %'], 3).removesuffix(' %')} ± {row['+-']:.3f} %"]
        for row in content["rows"]
    ]  # fmt: skip
    return [header, *rows]


# ---------------------------------------------------------------- columns as a benchmark prints them


def part_of(part: str, run: str | None = None) -> CellsOf:
    """The table of one part of a file: its columns as they are. run: whose content is in the file under that name."""

    def cells(content: dict) -> Cells:
        rows = (content if run is None else content[run])[part]
        return [list(rows[0]), *([_figure(key, value) for key, value in row.items()] for row in rows)]

    return cells


def _figure(column: str, value: Any) -> Any:
    return number(value, 1 if column.endswith("us") else 2) if isinstance(value, float) else value


# ---------------------------------------------------------------- predictions


def roofline(content: dict) -> Cells:
    rows = [
        [row["what"], row["count"], _error(row["median error"]), _error(row["largest error"]), row["where"],
         row["others"], _error(row["median of others"]), _error(row["largest of others"])]
        for row in content["summary"]
    ]  # fmt: skip
    return [["what", "times", "median error", "largest error", "where", "times not fitted to", "their median error",
             "their largest"], *rows]  # fmt: skip


def roofline_errors(content: dict) -> Cells:
    """Without the worst cases."""
    rows = [
        [row["what"], row["count"], _error(row["median error"]), _error(row["largest error"]),
         _error(row["median of others"]), _error(row["largest of others"])]
        for row in content["summary"]
    ]  # fmt: skip
    return [["what", "times", "median error", "largest", "median, not fitted to", "largest, not fitted to"], *rows]


def roofline_blocks(content: dict) -> Cells:
    rows = [
        [_BLOCKS[row["what"]], row["tokens"], block(row["recipe"]), number(row["predicted us"] / 1e3, 3),
         number(row["us"] / 1e3, 3), _error(row["error"])]
        for row in content["foreseen"] if row["what"] in _BLOCKS
    ]  # fmt: skip
    return [["block", "tokens", "recipe", "predicted, ms", "measured, ms", "error"], *rows]


def roofline_functions(content: dict) -> Cells:
    errors: dict[str, list[float]] = {}
    for row in content["foreseen"]:
        if row["what"] not in _BLOCKS:
            errors.setdefault(row["what"], []).append(row["error"])
    return [["function", "times", "median error", "largest error"], *(
        [what, len(found), _error(statistics.median(map(abs, found))), _error(max(found, key=abs))]
        for what, found in errors.items()
    )]  # fmt: skip


_BLOCKS = {
    "train an MLP": "MLP, training", "prefill": "Llama-3-8B, forward", "train": "Llama-3-8B, training",
    "decode": "Llama-3-8B, decoding",
}  # fmt: skip


def _error(share: float) -> str:
    return f"{number(100 * share, 1)} %"
