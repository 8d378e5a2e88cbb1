"""The formats of cells, and the tables that are more than the rows of a file, in the pages that `tables` writes.

A function returns a table of the content of one JSON file each argument. Needs nothing but Python.
"""

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

# The first row is the header. A cell that is None is left empty.
Cells = list[list[Any]]
Content = dict[str, Any]


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


def figure(column: str, value: Any) -> Any:
    """A cell of a column that is shown as it is."""
    return number(value, 1 if column.endswith("us") else 2) if isinstance(value, float) else value


def recipe(name: str) -> str:
    if name.startswith("torchao"):
        return f"torchao 0.18 float8, {name.partition(' ')[2]}"
    return name if name == "bf16" else f"`{name}`"


def packed_model(name: str) -> str:
    return name if name == "bf16" else f"packed, `{name}`"


def base(name: str) -> str:
    """The frozen base of adapters."""
    if name == "nf4":
        return "bitsandbytes 0.50, NF4, double quantisation"
    frozen = name.removeprefix("frozen-")
    return packed_model(name) if frozen == name else f"bf16, quantised by `{frozen}`"


def share(value: float) -> str:
    return f"{number(100 * value, 1)} %"


def quantised(part: dict[str, Any]) -> str:
    return part["error"] if "error" in part else share(part["share"])


def generated(part: dict[str, Any]) -> str:
    if "error" in part:
        return part["error"]
    return f"{part['tokens']}, not compared" if part["equal"] is None else f"{part['equal']} of {part['tokens']}"


def packing(part: dict[str, Any]) -> str:
    if "error" in part:
        return part["error"]
    if not part["layers"]:
        return f"nothing is packed ({', '.join(part['left'])})"
    return "equal" if part["equal"] else "other bits"


def beside_packed(part: dict[str, Any]) -> str | None:
    if "packed SQNR" not in part:
        return None
    return "equal" if part["packed SQNR"] is None else number(part["packed SQNR"], 1)


def reasons(shares: dict[str, float]) -> str:
    """Shares of FLOPs by reason; those below a twentieth of a percent are left out."""
    return "; ".join(f"{reason.split(':')[0]} {share(one)}" for reason, one in shares.items() if one >= 0.0005)


def counts(found: dict[str, int]) -> str:
    return "; ".join(f"{what}: {count}" for what, count in found.items())


FORMATS: dict[str, Callable[[Any], Any]] = {
    "sizes": lambda text: ", ".join(text.split("x")),
    "code": lambda text: f"`{text}`",
    "backend": lambda name: "Inductor alone" if name == "inductor" else f"`{name}`",
    "unquantised": lambda name: "bf16, not quantised" if name == "bf16" else f"`{name}`",
    "version": lambda package: package.partition(" ")[2],
    "losses": lambda values: " to ".join(f"{value:.2f}" for value in values),
    "problems": lambda problems: "; ".join(problems) or "passed",
    "percents": lambda values: ", ".join(map(percent, values)),
    "count": lambda value: f"{value:,}",
    "e": lambda value: f"{value:.1e}",
    "recipe": recipe, "packed": packed_model, "base": base, "variant": variant, "percent": percent, "share": share,
    "quantised": quantised, "generated": generated, "packing": packing, "beside": beside_packed, "reasons": reasons,
    "counts": counts,
}  # fmt: skip


# ---------------------------------------------------------------- docs/results.md: what a user decides by

_PRODUCERS = {"rms_norm": "RMS norm", "add, rms_norm": "residual sum and RMS norm", "silu, mul": "SiLU gate"}
_BLOCKS = {"decode": "decode, 1 token", "prefill": "prefill, 8192 tokens", "train": "training step, 8192 tokens"}


def inference(llama: dict, qwen: dict, gpt_oss: dict) -> Cells:
    """Decode, prefill and memory of whole models in bf16 and packed."""
    models = {"Llama-3-8B": llama["rows"], "gpt-oss-20b, experts in MXFP4": gpt_oss["rows"],
              f"Qwen3-30B-A3B, {qwen['settings']['layers']} of 48 layers": qwen["rows"]}  # fmt: skip
    rows = []
    for name, (plain, packed) in models.items():
        rows.append([
            name,
            number(plain["decode tokens/s"], 0), number(packed["decode tokens/s"], 0), number(packed["decode x"], 2),
            number(plain["prefill ms"], 1), number(packed["prefill ms"], 1), number(packed["prefill x"], 2),
            number(plain["GiB"], 2), number(packed["GiB"], 2),
        ])  # fmt: skip
    header = ["model", "decode in bf16, tokens/s", "packed", "speed over bf16's", "prefill in bf16, ms", "packed",
              "time over bf16's", "bf16, GiB", "packed, GiB"]  # fmt: skip
    return [header, *rows]


def accuracy(embeddings: dict, losses: dict) -> Cells:
    """Distances from high precision, by recipe, in inference and in training."""
    cosines = {row["recipe"]: row for row in embeddings["rows"]}
    above = {row["variant"]: row["over bf16 %"] for row in losses["rows"] if "-" not in row["variant"]}
    rows = []
    for name in dict.fromkeys((*cosines, *above)):
        cosine = cosines.get(name, {"mean cosine": None, "min": None})
        rows.append([variant(name), number(cosine["mean cosine"], 4), number(cosine["min"], 4),
                     percent(above[name]) if name in above else None])  # fmt: skip
    return [["recipe", "embeddings: mean cosine", "lowest cosine", "training loss over bf16's"], *rows]


def quantise_kernels(content: dict) -> Cells:
    """Quantise kernels that torchao has too, and those of training, at 8192x8192."""
    of_training = ("both, mxfp8", "both, dynamic, nvfp4", "both, Hadamard, stochastic, nvfp4_te",
                   "row-scaled, float8_rowwise")  # fmt: skip
    rows = []
    for row in content["rows"]:
        if row["shape"] != "8192x8192" or (row["torchao us"] is None and row["case"] not in of_training):
            continue
        what, _, fmt = row["case"].rpartition(", ")
        ratio = None if row["torchao us"] is None else row["torchao us"] / row["us"]
        rows.append([
            CASES[what], f"`{fmt}`", number(row["us"], 1), number(row["copy us"], 1), number(row["of copy"], 2),
            number(row["torchao us"], 1), number(ratio, 1),
        ])  # fmt: skip
    return [["what", "format", "us", "copy, us", "of copy's rate", "torchao 0.18, us", "over this"], *rows]


def prologues(content: dict) -> Cells:
    """What fusing gains: time of separate over fused kernels, lowest and highest over formats or recipes."""
    rows = []
    for key, words in _PRODUCERS.items():
        found = [row for part in ("rows", "values") for row in content[part] if row["producer"] == key]
        gains = [row["apart us"] / row["fused us"] for row in found]
        rows.append([f"{words} before a quantiser: kernels alone", f"{len(found)} formats", *_range(gains), None, None])
    for part, words in _BLOCKS.items():
        found = content[part]
        # What starts once in a process counts for the first recipe.
        compiling = [row["fused s in all"] / row["apart s in all"] for row in found[1:]]
        recipes = f"{len(found)} recipes" if len(found) > 1 else f"`{found[0]['recipe']}`"
        rows.append([f"Llama-3-8B block, {words}", recipes, *_range(row["apart over fused"] for row in found),
                     *(_range(compiling) if compiling else (None, None))])  # fmt: skip
    return [["what", "over", "lowest gain", "highest gain", "lowest compile time over separate", "highest"], *rows]


def _range(values: Iterable[float]) -> tuple[str | None, str | None]:
    values = list(values)
    return number(min(values), 2), number(max(values), 2)


def compile_times(on_cpu: dict, llama: dict, mlp: dict) -> Cells:
    """Seconds to compile, or of a first call, beside the same in high precision."""
    plain, *others = on_cpu["rows"]
    rows: list[list[Any]] = [
        ["4 Llama-style layers on a CPU, compiling", f"`{row['backend']}`", plain["median s"], row["median s"]]
        for row in others
    ]
    plain, packed = llama["rows"]
    for call, words in (("prefill s", "first prefill"), ("decode s", "first decode step")):
        rows.append([f"Llama-3-8B, {words}", packed_model(packed["model"]), plain[call], packed[call]])
    plain, *others = mlp["rows"]
    rows += [
        ["MLP block, first training step", recipe(row["block"]), plain["first step s"], row["first step s"]]
        for row in others
    ]
    header = ["what", "under", "in high precision, s", "s", "over high precision"]
    return [header, *([*names, number(high, 1), number(own, 1), number(own / high, 2)] for *names, high, own in rows)]


# ---------------------------------------------------------------- times

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


def weight_check(content: dict) -> Cells:
    return [
        ["what", "figure"],
        ["check of a weight, lowest, us", number(content["check us"]["min"], 2)],
        ["check of a weight, median, us", number(content["check us"]["median"], 2)],
        ["step of 224 layers in CUDA graphs, ms", number(content["step ms"], 3)],
    ]


def ceilings_copies(content: dict) -> Cells:
    rows = [[row["shape"], number(row["us"], 1), number(row["TB/s"], 2)]
            for row in content["rows"] if row["what"] == "copy"]  # fmt: skip
    return [["copied, read and written together", "us", "TB/s"], *rows]


def ceilings(content: dict) -> Cells:
    """The products in bf16 and in FP8 beside each other, which the file has in turns."""
    products = [row for row in content["rows"] if row["what"] != "copy"]
    rows = [
        [plain["shape"], number(plain["us"], 1), number(plain["TFLOP/s"], 0), number(float8["us"], 1),
         number(float8["TFLOP/s"], 0)]
        for plain, float8 in zip(products[::2], products[1::2], strict=True)
    ]  # fmt: skip
    return [["M x N x K", "bf16, us", "TFLOP/s", "FP8 rowwise, us", "TFLOP/s"], *rows]


def _distances(rows: list[dict]) -> Cells:
    return [
        [variant(row["variant"]), number(row["loss"], 3), percent(row["over bf16 %"]),
         ", ".join(percent(value) for value in row["of each seed"])]
        for row in rows
    ]  # fmt: skip


_LOSS_HEADER = ["variant", "mean loss of the last 50 steps", "over bf16", "of each seed"]


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


# ---------------------------------------------------------------- predictions

_GRAPHS = {
    "train an MLP": "MLP, training", "prefill": "Llama-3-8B, forward", "train": "Llama-3-8B, training",
    "decode": "Llama-3-8B, decoding",
}  # fmt: skip


def roofline_blocks(content: dict) -> Cells:
    rows = [
        [_GRAPHS[row["what"]], row["tokens"], recipe(row["recipe"]), number(row["predicted us"] / 1e3, 3),
         number(row["us"] / 1e3, 3), share(row["error"])]
        for row in content["foreseen"] if row["what"] in _GRAPHS
    ]  # fmt: skip
    return [["block", "tokens", "recipe", "predicted, ms", "measured, ms", "error"], *rows]


def roofline_functions(content: dict) -> Cells:
    errors: dict[str, list[float]] = {}
    for row in content["foreseen"]:
        if row["what"] not in _GRAPHS:
            errors.setdefault(row["what"], []).append(row["error"])
    return [["function", "times", "median error", "largest error"], *(
        [what, len(found), share(statistics.median(map(abs, found))), share(max(found, key=abs))]
        for what, found in errors.items()
    )]  # fmt: skip


# ---------------------------------------------------------------- kernels for SM100, without a time


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


def simulated_cases(content: dict[str, Any]) -> Cells:
    """Every case: what ran, how much, and what was wrong."""
    rows = [
        [f"{case['sm'] // 10}.{case['sm'] % 10}", case["name"], f"`{case.get('kernels', '')}`",
         f"{case.get('warp instructions', 0):,}", case.get("seconds"),
         counts(case.get("notes", {})),
         case.get("error") or "; ".join(case.get("wrong", ())) or "none"]
        for case in content["cases"]
    ]  # fmt: skip
    header = ["compute capability", "case", "kernels", "warp instructions", "seconds, with compiling", "notes", "wrong"]
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


def edits_of_kernels(content: dict[str, Any]) -> Cells:
    """For each kernel: how many edits of its PTX were found; then of Triton source."""
    cells = _counted(content["ptx"], ["case", "kernel"], lambda entry: (entry["subject"], f"`{entry['kernel']}`"))
    return [*cells, ["", "Triton source", *_counts(content["source"])]]


def edits_by_kind(content: dict[str, Any]) -> Cells:
    """For each kind of edit of PTX: how many were found."""
    return _counted(content["ptx"], ["edits of"], lambda entry: (entry["kind"],))


def edits_by_check(content: dict[str, Any]) -> Cells:
    """How many edits each check of the simulator found first."""
    by = {kind: Counter(entry["by"] for entry in content[kind] if "by" in entry) for kind in ("ptx", "source")}
    order = [name for name, _ in (by["ptx"] + by["source"]).most_common()]
    return [["found by", "edits of PTX", "edits of source"],
            *([name, by["ptx"][name], by["source"][name]] for name in order)]  # fmt: skip


def _counted(
    entries: list[dict[str, Any]], names: list[str], key: Callable[[dict[str, Any]], tuple[str, ...]]
) -> Cells:
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    rows = [[*group, *_counts(having)] for group, having in groups.items()]
    everything = ["**all of PTX**", *[""] * (len(names) - 1), *_counts(entries)]
    return [[*names, "edits", "change nothing", "found", "not found"], *rows, everything]


def _counts(entries: list[dict[str, Any]]) -> list[Any]:
    changing = [entry for entry in entries if "equivalent" not in entry]
    found = sum("found" in entry for entry in changing)
    share = f"{found} ({found / len(changing):.1%})" if changing else "0"
    return [len(entries), len(entries) - len(changing), share, len(changing) - found]


def edits_not_found(content: dict[str, Any]) -> Cells:
    """The edits that change something and are not found."""
    missed = [entry for entry in (*content["ptx"], *content["source"]) if not entry.keys() & {"found", "equivalent"}]
    rows = [[*_place(entry), entry.get("why", "")] for entry in missed]
    return [["case", "kernel", "edit", "line", "why not"], *rows]


def edits_that_change_nothing(content: dict[str, Any]) -> Cells:
    """The edits that change nothing, by the reason."""
    having = [entry for entry in (*content["ptx"], *content["source"]) if "equivalent" in entry]
    having.sort(key=lambda entry: entry["equivalent"])
    return [["case", "kernel", "edit", "line", "why"], *([*_place(one), one["equivalent"]] for one in having)]


def edits_found(content: dict[str, Any]) -> Cells:
    """Every edit that was found."""
    rows = [[*_place(entry), entry["by"], entry["schedule"], entry["found"].replace("|", "/")]
            for entry in (*content["source"], *content["ptx"]) if "found" in entry]  # fmt: skip
    return [["case", "kernel", "edit", "line", "found by", "schedule", "what the simulator says"], *rows]


def _place(entry: dict[str, Any]) -> list[Any]:
    return [entry["subject"], f"`{entry['kernel']}`", entry["edit"], str(entry["line"])]


def environment_of_runs(content: dict) -> dict:
    """With what the kernels were compiled. All runs have one version of torch."""
    versions = " and ".join(run["environment"]["triton"] for run in content["runs"])
    return content["runs"][0]["environment"] | {"triton": versions}


def beyond_bounds(content: dict) -> Cells:
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


def machine_code_of_products(content: dict) -> Cells:
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


def machine_code_of_quantisers(content: dict) -> Cells:
    """Instructions for 16 elements of every launch on SM100, by version of Triton, beside budget and bound."""
    runs = content["runs"]
    found = [_by_launch(run["quantizers"]) for run in runs]
    rows = []
    for key, row in found[0].items():
        executed = [f"{each[key]['instructions']:.0f}" if key in each else None for each in found]
        rows.append([
            "{}, `{}`: `{}`".format(*key), f"{row['budget']:.0f}", f"{row['line']:.0f}", *executed,
            f"{100 * row['occupancy']:.0f} %",
        ])  # fmt: skip
    versions = [f"Triton {run['environment']['triton']}" for run in runs]
    return [["launch", "budget", "bound", *versions, "occupancy"], *rows]


def _rows(table: dict) -> list[dict[str, Any]]:
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def _by_product(table: dict) -> dict[tuple, dict[str, Any]]:
    """The row of the product itself, by formats and sizes."""
    found: dict[tuple, dict[str, Any]] = {}
    for row in _rows(table):
        if row["sm"] == 100 and row["line"] != "beside a product":
            found.setdefault((row["format"], row["configuration"]), row)
    return found


def _by_launch(table: dict) -> dict[tuple, dict[str, Any]]:
    return {(row["configuration"], row["format"], row["kernel"]): row for row in _rows(table) if row["sm"] == 100}


def _cell(value: Any) -> str:
    if isinstance(value, list):
        kinds = (re.search(r"kind::(\w+)", one) or re.search(r"\.(bf16|f16)\b", one) for one in value)
        return ", ".join(sorted({kind[1] for kind in kinds if kind}))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value).replace("gemm_", "")
