"""One Llama-3-8B block: how long it takes, and how long `explain` predicts that it takes.

    python -m benchmarks.llama_block --out FILE [--seconds 110]    # measures on the GPU that is there
    python -m benchmarks.llama_block --compare FILE ... [--save]   # predictions beside the times in such files

Measured is the time of the device, of bf16 and under recipes, each compiled by itself: forward of 8192 and 2048 tokens
and a training step of 4096 by the profiler, forward of 1 and 64 tokens by replaying a CUDA graph. "packed" packs the
weights in place; weights that are not packed are quantised once and kept, but for training. CASES are in the order of
importance; those for which no time is left after --seconds are named in the file. Most of the time is spent in
compiling.
"""

import argparse
import contextlib
import io
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

import fp4compile
from benchmarks import common, producers
from fp4compile import hardware
from fp4compile.cli.demo import MLP, Shape

# What is done, with how many tokens, and in bf16 or under which recipe.
CASES: tuple[tuple[str, int, str], ...] = (
    ("prefill", 8192, "bf16"), ("prefill", 8192, "float8_rowwise"), ("prefill", 8192, "nvfp4"),
    ("train", 4096, "bf16"), ("train", 4096, "float8_rowwise"), ("train", 4096, "nvfp4_train"),
    ("decode", 1, "bf16"), ("decode", 1, "nvfp4, packed"), ("decode", 64, "bf16"), ("decode", 64, "nvfp4, packed"),
    ("prefill", 2048, "bf16"), ("prefill", 2048, "nvfp4"), ("prefill", 2048, "nvfp4_weight_only, packed"),
    ("prefill", 8192, "mxfp8"), ("train", 4096, "mxfp8"), ("prefill", 2048, "float8_rowwise"), ("decode", 1, "mxfp8"),
)  # fmt: skip
FUNCTION = "norm or gate, and a quantiser"


# ---------------------------------------------------------------- measured


def measure(args: argparse.Namespace) -> None:
    """Measure the cases in order, and write after each."""
    start, rows, left = time.perf_counter(), [], list(CASES)
    while left and time.perf_counter() - start < args.seconds:
        rows.append(time_of(left.pop(0), args))
        print(rows[-1], file=sys.stderr, flush=True)
        settings = {"repeats": args.repeats, "tiny": args.tiny, "seconds": time.perf_counter() - start, "left": left}
        with contextlib.redirect_stdout(io.StringIO()):
            common.publish(args, settings, rows)
    print(common.table(rows))


def time_of(case: tuple[str, int, str], args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of the device, and seconds in all."""
    what, tokens, recipe = case
    torch._dynamo.reset()
    start = time.perf_counter()
    block, x, others = producers.block_of(args, tokens)
    name, _, packed = recipe.partition(", ")
    if packed:
        fp4compile.pack_(block, name)
    backend = "inductor" if name == "bf16" else fp4compile.backend(name, strict=True)
    run = partial(torch.compile(block.train(what == "train"), backend=backend, dynamic=False), x, **others)
    with torch.set_grad_enabled(what == "train"):
        us = _time(what, run, block, x, args)
    return {"what": what, "tokens": tokens, "recipe": recipe, "us": us, "s in all": time.perf_counter() - start}


def _time(what: str, run: Callable, block: torch.nn.Module, x: torch.Tensor, args: argparse.Namespace) -> float:
    if what == "decode" and args.device != "cpu":
        run()
        return common.graph_time([run] * 10, args.repeats)
    call = run
    if what == "train":
        x.requires_grad_()
        gradient = torch.randn_like(x) / x.shape[1]

        def call() -> None:
            producers.result(run()).backward(gradient)
            block.zero_grad()  # or gradients would be added to those of the step before
            x.grad = None

    call()
    return producers.device_time(call, args)


# ---------------------------------------------------------------- predicted


def predicted(what: str, tokens: int, recipe: str, gpu: str) -> float:
    """Microseconds that `explain` predicts.

    what: as in CASES; "train an MLP" for the block of `mlp_block`; FUNCTION and "apart" or "fused" for one of the
    functions of `producers`, which the recipe then names.
    """
    if what.startswith(FUNCTION):
        return _function(tokens, recipe, what.endswith("fused"), gpu)
    name = recipe.partition(", ")[0]
    training = what.startswith("train")
    torch._dynamo.reset()
    others: dict[str, Any] = {}
    if what == "train an MLP":
        with torch.device("meta"):
            block, x = MLP(Shape(hidden=4096, inner=14336)).bfloat16(), torch.empty(tokens, 4096).bfloat16()
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
    """A measured time in microseconds. The other fields are as in CASES."""

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
    parser = common.parser(__doc__)
    parser.add_argument("--compare", nargs="+", type=Path, metavar="FILE", help="measure nothing")
    parser.add_argument("--save", action="store_true", help='write the comparison to the file, as "foreseen"')
    parser.add_argument("--seconds", type=float, default=110, help="begin no case after so long (110)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a narrow model, to try the script")
    args = parser.parse_args(arguments)
    if args.compare is None:
        measure(args)
        return
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
