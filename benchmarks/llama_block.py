"""How long whole graphs take, and how long `explain` predicts that they take.

    python -m benchmarks.llama_block --compare FILE ... [--save]

The files are of `producers` (`--parts rows values prefill decode train`) or of `mlp_block`: a Llama-3-8B block, an MLP
block, and functions of a producer and a quantiser. Measures nothing.
"""

import argparse
import contextlib
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

import fp4compile
from benchmarks import common, producers
from fp4compile import hardware
from fp4compile.cli.demo import MLP, ModelSizes

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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", nargs="+", type=Path, metavar="FILE", required=True)
    parser.add_argument("--save", action="store_true", help='write the comparison to the file, as "foreseen"')
    args = parser.parse_args(arguments)
    for path in args.compare:
        content = json.loads(path.read_text(encoding="utf-8"))
        print(f"{path.name}, {content['environment']['device']}")
        gpu = _gpu_of(content)
        rows = [compared(each, gpu) for each in times_of(content)]
        print(common.table(rows))
        if args.save:
            path.write_text(json.dumps(content | {"foreseen": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
