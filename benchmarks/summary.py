"""The cells of the tables in docs/results.md: what a user decides by. Needs nothing but Python.

`tables` says which files each function takes; `cells` has the longer tables of the same files.
"""

from collections.abc import Iterable
from typing import Any

from benchmarks.cells import CASES, Cells, block, number, packed_model, percent, variant

_PRODUCERS = {"rms_norm": "RMS norm", "add, rms_norm": "residual sum and RMS norm", "silu, mul": "SiLU gate"}
_BLOCKS = {"decode": "decode, 1 token", "prefill": "prefill, 8192 tokens", "train": "training step, 8192 tokens"}


def inference(llama: dict, qwen: dict) -> Cells:
    """Decode, prefill and memory of whole models in bf16 and packed."""
    models = {"Llama-3-8B": llama["rows"]}
    for key, how in (("batched_mm", "by index"), ("grouped_mm", "by groups")):
        models[f"Qwen3-30B-A3B, {qwen['settings']['layers']} of 48 layers, experts {how}"] = qwen[key]
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


def training(content: dict) -> Cells:
    """A training step of an MLP block: time and memory."""
    rows = [
        [block(row["block"]), number(row["ms"], 2), number(row["of bf16"], 2), number(row["peak MiB"], 0),
         number(row["saved MiB"], 0), number(row["of its bf16"], 3)]
        for row in content["rows"]
    ]  # fmt: skip
    return [["block", "ms", "over bf16", "peak, MiB", "saved, MiB", "packed over its bf16 size"], *rows]


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


def quantize(content: dict) -> Cells:
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


def compile_time(on_cpu: dict, llama: dict, mlp: dict) -> Cells:
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
        ["MLP block, first training step", block(row["block"]), plain["first step s"], row["first step s"]]
        for row in others
    ]
    header = ["what", "under", "in high precision, s", "s", "over high precision"]
    return [header, *([*names, number(high, 1), number(own, 1), number(own / high, 2)] for *names, high, own in rows)]
