"""How far are the predictions of `explain` from times of whole blocks?

    python -m benchmarks.roofline            # writes "foreseen" of results/roofline_h200.json from the files of BLOCKS
    python -m benchmarks.roofline --check    # exits with 1 where the first of each kind is not what the model says now
    python -m benchmarks.roofline --compare FILE ... [--save]    # of other files, and GPUs

The files are of `producers` (`--parts rows values prefill decode train`) or of `mlp_block`: a Llama-3-8B block, an MLP
block, and functions of a producer and a quantiser. Measures nothing. Nothing was fitted to the times of BLOCKS but
attention's share, to the prefill under `float8_rowwise`. The "rows" and "summary" of roofline_h200.json are of layers
by themselves; the model of their sizes that made them is gone.
"""

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

import fp4compile
from benchmarks import common, producers
from fp4compile import hardware
from fp4compile.cli.demo import MLP, ModelSizes

RESULTS = Path(__file__).parent / "results"
FILE = RESULTS / "roofline_h200.json"
GPU = "H200"
BLOCKS = ("mlp_block", "producers")
FUNCTION = "norm or gate, and a quantiser"


def predicted(what: str, tokens: int, recipe: str, gpu: str) -> float:
    """Microseconds that `explain` predicts.

    what: "prefill", "decode" or "train" for a Llama-3-8B block; "train an MLP" for the block of `mlp_block`; FUNCTION
        and "apart" or "fused" for one of the functions of `producers`, which the recipe then names.
    """
    if what.startswith(FUNCTION):
        return _function(tokens, recipe, what.endswith("fused"), gpu)
    name = recipe.partition(", ")[0]
    training = what.startswith("train")
    torch._dynamo.reset()
    others: dict[str, Any] = {}
    if what == "train an MLP":
        with torch.device("meta"):
            block, x = MLP(ModelSizes(hidden=4096, inner=14336)).bfloat16(), torch.empty(tokens, 4096).bfloat16()
    else:
        block, x, others = producers.block_of(SimpleNamespace(device="meta", tiny=False), tokens)
    with torch.set_grad_enabled(training), contextlib.redirect_stdout(io.StringIO()):
        report = fp4compile.explain(block, x.requires_grad_(training), recipe="nvfp4" if name == "bf16" else name,
                                    gpu=gpu, **others)  # fmt: skip
    found = report.predicted()
    assert found is not None, "every product of a block has a time"
    return 1e6 * (found.plain_seconds if name == "bf16" else found.seconds)


def _function(size: int, case: str, fused: bool, gpu: str) -> float:
    """Microseconds of a producer and a quantiser: there is no product in it."""
    producer, _, quantised = case.partition(": ")
    call = producers.then(producers.PRODUCERS[producer], producers.quantiser_of(*quantised.split(", ")))
    torch._dynamo.reset()
    with torch.device("meta"):
        x, y, weight = (torch.empty(shape).bfloat16() for shape in ((size, size), (size, size), (size,)))
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
        rest = fp4compile.explain(call, x, y, weight, recipe="mxfp8", gpu=gpu).rest
    return 1e6 * (rest.seconds if fused else rest.plain_seconds)


class Measured(NamedTuple):
    """A measured time in microseconds. The other fields are those of `predicted`."""

    what: str
    tokens: int
    recipe: str
    us: float


def times_of(content: dict[str, Any]) -> list[Measured]:
    """The times in a file of this benchmark, of `producers` or of `mlp_block`."""
    settings, rows = content["settings"], content.get("rows", [])
    if "inner" in settings:
        return [Measured("train an MLP", settings["tokens"], row["block"], 1e3 * row["ms"])
                for row in rows if not row["block"].startswith("torchao")]  # fmt: skip
    if rows and "us" in rows[0]:
        return [Measured(*(row[name] for name in Measured._fields)) for row in rows]
    functions = [
        Measured(f"{FUNCTION}, {how}", settings["rows"], f"{row['producer']}: {row['quantised']}", row[f"{how} us"])
        for part in ("rows", "values") for row in content.get(part, []) for how in ("apart", "fused")
        if row[f"{how} us"] is not None
    ]  # fmt: skip
    return functions + [
        Measured(what, 1 if what == "decode" else settings["tokens"], row["recipe"],
                 row["fused us" if what == "decode" else "fused device us"])
        for what in ("prefill", "decode", "train") for row in content.get(what, [])
    ]  # fmt: skip


def compared(measured: Measured, gpu: str) -> dict[str, Any]:
    """A row with a measured time and the predicted one."""
    found = predicted(*measured[:3], gpu)
    return {**measured._asdict(), "us": round(measured.us, 1), "predicted us": round(found, 1),
            "error": round(found / measured.us - 1, 4)}  # fmt: skip


def _gpu_of(content: dict[str, Any]) -> str:
    device = content["environment"]["device"]
    for gpu in hardware.GPUS.values():
        if device in gpu.devices:
            return gpu.name
    raise SystemExit(f"{device} is none of the GPUs that predictions know: {', '.join(hardware.GPUS)}")


def measured_blocks() -> list[Measured]:
    """The times of whole blocks, which `explain` predicts. Every kernel is in both times."""
    files = (json.loads((RESULTS / f"{name}_h200.json").read_text()) for name in BLOCKS)
    return [each for content in files for each in times_of(content)]


def compare(path: Path, save: bool) -> None:
    """Print the times of a file beside the predicted ones. save: write them to the file, as "foreseen"."""
    content = json.loads(path.read_text(encoding="utf-8"))
    print(f"{path.name}, {content['environment']['device']}")
    gpu = _gpu_of(content)
    rows = [compared(each, gpu) for each in times_of(content)]
    print(common.table(rows))
    if save:
        path.write_text(json.dumps(content | {"foreseen": rows}, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Write, check or compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="change nothing, exit with 1 where the file is out of date"
    )
    parser.add_argument("--compare", nargs="+", type=Path, metavar="FILE", default=[], help="these files, and no other")
    parser.add_argument("--save", action="store_true", help='write the comparison to each FILE, as "foreseen"')
    args = parser.parse_args(arguments)
    for path in args.compare:
        compare(path, args.save)
    if args.compare:
        return 0
    stored, blocks = json.loads(FILE.read_text(encoding="utf-8")), measured_blocks()
    if args.check:
        first = {each.what: each for each in reversed(blocks)}
        if all(compared(each, GPU) in stored["foreseen"] for each in first.values()):
            return 0
        print(f"{FILE.name} is out of date: run python -m benchmarks.roofline", file=sys.stderr)
        return 1
    rows = [compared(each, GPU) for each in blocks]
    FILE.write_text(json.dumps(stored | {"foreseen": rows}, indent=1) + "\n", encoding="utf-8")
    print(common.table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
