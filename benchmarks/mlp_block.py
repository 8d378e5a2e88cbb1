"""Training a Llama-3-8B MLP block: time of forward + backward, peak memory, and what is saved in between.

bf16 parameters and activations, 8192 tokens, the block compiled by Inductor alone, by torchao's float8 training
(left out where torchao is not installed) and under recipes, in one run. A time is that of a step among steps that
follow each other as in training, the median of several runs of them; the peak is that of the allocator with parameters,
gradients and input included; saved counts what autograd keeps, parameters left out, and of that the packed inputs of
linear layers against their bf16 bytes.

    python -m benchmarks.mlp_block [--recipes R ...] [--tokens 8192] [--hidden 4096] [--inner 14336] [--out FILE]
"""

import statistics
import time
from collections.abc import Callable

import torch

import fp4compile
from benchmarks import common
from benchmarks.models import torchao_training
from fp4compile.cli.demo import MLP, ModelSizes
from fp4compile.report.report import Report

RECIPES = ("float8_rowwise", "mxfp8", "mxfp8_32x32", "nvfp4", "nvfp4_train")
MIB = 2**20


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=14336)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    shape = ModelSizes(hidden=args.hidden, inner=args.inner)
    rows = []
    for name in ("bf16", "torchao tensorwise", "torchao rowwise", *args.recipes):
        row = measure(name, shape, args)
        if row is not None:
            rows.append({"block": name, "of bf16": None, **row})
            rows[-1]["of bf16"] = row["ms"] / rows[0]["ms"]
    settings = {"tokens": args.tokens, "hidden": args.hidden, "inner": args.inner, "repeats": args.repeats}
    common.publish(args, settings, rows)


def measure(name: str, shape: ModelSizes, args) -> dict | None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = MLP(shape).to(args.device, torch.bfloat16)
    x = torch.randn(args.tokens, shape.hidden, device=args.device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(x) / args.tokens
    start = time.perf_counter()
    made = compiled_block(name, block)
    if made is None:
        return None
    compiled, report = made

    def step():
        y = compiled(x)
        y.backward(gradient)
        return y

    step()
    common.synchronize(args.device)
    compiling = time.perf_counter() - start
    for _ in range(3):
        step()
    times = [common.step_time(step, args.device) for _ in range(args.repeats)]
    for tensor in (x, *block.parameters()):
        tensor.grad = None
    peak = _peak(step, args.device)
    kept = _saved_by(compiled(x), block)
    packed, plain = report.saved() if report else (0, 0)
    return {
        "ms": statistics.median(times), "peak MiB": peak, "saved MiB": kept / MIB, "packed MiB": packed / MIB,
        "of its bf16": packed / plain if plain else None, "first step s": compiling,
    }  # fmt: skip


def compiled_block(name: str, block: MLP) -> tuple[Callable, Report | None] | None:
    """The compiled block, with the backend's report under a recipe; None for a peer that is not installed."""
    if name == "bf16":
        return torch.compile(block), None
    if name.startswith("torchao"):
        converted = torchao_training(block, name.partition(" ")[2]) if torch.cuda.is_available() else None
        return None if converted is None else (torch.compile(converted), None)
    chosen = fp4compile.backend(name, strict=True)
    return torch.compile(block, backend=chosen), chosen.report


def _peak(step: Callable, device: str) -> float | None:
    if not device.startswith("cuda"):
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / MIB


def _saved_by(y: torch.Tensor, block: torch.nn.Module) -> int:
    """Bytes that autograd keeps for a compiled block's output, without its parameters."""
    node = y.grad_fn
    while not hasattr(node, "saved_tensors"):  # a view of what the compiled function returned
        node = node.next_functions[0][0]
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept = [t for t in node.saved_tensors if t is not None and t.untyped_storage().data_ptr() not in parameters]
    return sum(t.nbytes for t in kept)


if __name__ == "__main__":
    main()
