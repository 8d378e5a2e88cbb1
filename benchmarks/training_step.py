"""A training step of the first layers of a Llama-3-8B: time, time of the device and of the host, launches.

A model of `--layers` blocks with random bf16 weights, embedding and head, compiled as a whole by Inductor alone, under
recipes, and by torchao's float8 training (left out where torchao is not installed), in one run: the loss of 4 texts of
2048 tokens and its backward pass, no optimiser. "ms" is the time of a step among steps that follow each other, the
median of several runs of them; "device ms" is the sum of the kernels' times by the profiler, "host ms" the time until
all of a step is issued, and "launches" counts kernels, copies and fills of a step. A name that ends in ", graphs" is
compiled with mode="reduce-overhead" (CUDA graphs). "fast": forward products whose sums FP8 matrix units keep in fewer
bits than float32 (`fast_accumulation`), as torchao's forward products do.

    python -m benchmarks.training_step [--cases bf16 mxfp8 nvfp4_train ...] [--layers 4] [--out FILE]
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from transformers import LlamaForCausalLM

import fp4compile
from benchmarks import common
from benchmarks.models import random_llama, torchao_training
from fp4compile.recipe import named

CASES = ("bf16", "torchao tensorwise", "float8_rowwise", "float8_rowwise fast", "mxfp8", "nvfp4_train", "bf16, graphs",
         "nvfp4_train, graphs")  # fmt: skip


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kernels", type=int, default=0, help="print so many of the kernels that take longest")
    parser.add_argument("--tiny", action="store_true", help="narrow layers, to try the script")
    args = parser.parse_args()
    rows: list[dict] = []
    for case in args.cases:
        row = measure(case, args)
        if row is not None:
            rows.append({"case": case, "of bf16": None, **row})
            rows[-1]["of bf16"] = row["ms"] / rows[0]["ms"]
            print(rows[-1], file=sys.stderr, flush=True)
    settings = {name: getattr(args, name) for name in ("layers", "batch", "length", "repeats", "tiny")}
    common.publish(args, settings, rows)


def measure(case: str, args: argparse.Namespace) -> dict | None:
    """Times and launches of a step; None for a peer that is not installed."""
    torch._dynamo.reset()
    gc.collect()
    name, _, graphs = case.partition(", ")
    model = model_of(args)
    start = time.perf_counter()
    compiled = compiled_model(name, model, "reduce-overhead" if graphs else None)
    if compiled is None:
        return None
    tokens = torch.randint(model.config.vocab_size, (args.batch, args.length), device=args.device)

    def step() -> None:
        compiled(input_ids=tokens, labels=tokens).loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    for _ in range(3):
        step()
    common.synchronize(args.device)
    compiling = time.perf_counter() - start
    times = [common.step_time(step, args.device) for _ in range(args.repeats)]
    kernels = common.kernels_of(step, args.device)
    for kernel, (microseconds, count) in sorted(kernels.items(), key=lambda item: -item[1][0])[: args.kernels]:
        print(f"{microseconds:10.1f} us {count:5d}  {kernel[:100]}")
    return {
        "ms": statistics.median(times), "device ms": sum(each for each, _ in kernels.values()) / 1e3,
        "host ms": statistics.median(host_time(step, args.device) for _ in range(args.repeats)),
        "launches": sum(count for _, count in kernels.values()), "3 steps s": compiling,
    }  # fmt: skip


def model_of(args: argparse.Namespace) -> LlamaForCausalLM:
    return random_llama(args.device, args.layers, args.tiny, use_cache=False, max_position_embeddings=args.length)


def compiled_model(name: str, model: torch.nn.Module, mode: str | None) -> Callable | None:
    """The model compiled for a case; None for a peer that is not installed."""
    compiled = partial(torch.compile, dynamic=False, mode=mode)
    if name == "bf16":
        return compiled(model)
    if not name.startswith("torchao"):
        base, _, fast = name.partition(" ")
        recipe = named(base).replace(fast_accumulation=("fprop",)) if fast else named(base)
        return compiled(model, backend=fp4compile.backend(recipe, strict=True))
    model = torchao_training(model, name.partition(" ")[2])
    return None if model is None else compiled(model)


def host_time(step: Callable, device: str) -> float:
    """Milliseconds until the host has issued a step, on a device that is idle before."""
    common.synchronize(device)
    start = time.perf_counter()
    step()
    issued = 1e3 * (time.perf_counter() - start)
    common.synchronize(device)
    return issued


if __name__ == "__main__":
    main()
