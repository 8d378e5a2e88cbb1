"""How fast are the grouped products of experts, against `torch._grouped_mm` and a loop of products in bf16?

Three parts, each a table, all peers of a part in one run:

decode: 1 to 8 tokens an expert and weights packed once, with bf16 activations ("weight-only") and with activations
    quantised in the measured time ("w4a4"); then 8 tokens that take their experts by index. "of copy": the time of a
    device copy that moves as many bytes as the packed weights have, over that of weight-only. Weights are rotated, so
    that the L2 cache does not hold them; times are those of CUDA graphs that are replayed in turns.
packed: the same of 65 to 1024 tokens an expert, in groups that are equal or drawn at random once; tokens of "w4a4" are
    quantised and expanded in one kernel, as a compiled graph has them.
tokens: 16384 tokens under recipes, compiled. "forward" packs weights once and quantises activations; "both", forward
    and backward, quantises all operands of the three products in each step. A time is that of a step among steps that
    follow each other, the median of several runs.

The sizes of groups are drawn at random once; the loop of products knows them, nothing else does.

    python -m benchmarks.grouped_mm [--parts decode ...] [--models DeepSeek-V3 ...] [--recipes R ...] [--out FILE]
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

import fp4compile
from benchmarks import common
from benchmarks.linear import ROTATED_BYTES
from benchmarks.quantize import copy_time, nbytes

BF16 = torch.bfloat16
ops = torch.ops.fp4compile


@dataclass(frozen=True)
class Experts:
    """Weights [experts, n, k] of bf16."""

    experts: int
    n: int
    k: int

    def weights(self, device: str) -> torch.Tensor:
        return torch.randn(self.experts, self.n, self.k, device=device, dtype=BF16) / self.k**0.5

    def rows(self, count: int, device: str) -> torch.Tensor:
        return torch.randn(count, self.k, device=device, dtype=BF16)


MODELS = {"DeepSeek-V3": Experts(8, 2048, 7168), "Llama-4": Experts(16, 8192, 5120),
          "Qwen3-30B-A3B": Experts(128, 768, 2048)}  # fmt: skip
RECIPES = ("nvfp4", "mxfp8", "nvfp4_train", "float8_rowwise")
PACKED = ("8x4096x14336", "128x1536x2048", "128x2048x768")  # experts x N x K; Qwen3-30B-A3B's are the last two
EACH = (65, 96, 128, 192, 256, 384, 512, 1024)  # tokens an expert on average
INDEXED = 8  # tokens with an expert by index


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--parts", nargs="+", default=["decode", "tokens"], choices=list(PARTS))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--replays", type=int, default=9)
    args = parser.parse_args(arguments)
    parts = {}
    for name in args.parts:
        torch.manual_seed(0)
        parts[name] = list(PARTS[name](args))
    settings = {"tokens": args.tokens, "replays": args.replays}
    common.publish_parts(args, settings, parts)


def group_sizes(count: int, experts: int) -> list[int]:
    """Sizes of groups of `count` tokens, each of an expert that is drawn at random, popular ones more often."""
    popularity = torch.rand(experts) + 0.5
    return torch.multinomial(popularity, count, replacement=True).bincount(minlength=experts).tolist()


def offsets(sizes: list[int], device: str) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).to(device, torch.int32)


def loop(x: torch.Tensor, weight: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """The products of all groups, one after the other."""
    return torch.cat([F.linear(rows, w) for rows, w in zip(x.split(sizes), weight, strict=True)])


# ---------------------------------------------------------------- decode


def decode(args: argparse.Namespace) -> Iterator[dict]:
    for name in args.models:
        shape = MODELS[name]
        plain, packed = rotated(shape, args.device)
        packed_bytes = nbytes(packed[0])
        copied = copy_us(packed_bytes, args.device)
        for each in (1, 4, 8):
            x = shape.rows(each * shape.experts, args.device)
            sizes = [each] * shape.experts
            offs = offsets(sizes, args.device)
            calls = {
                "bf16": [partial(F.grouped_mm, x, w.mT, offs=offs) for w in plain],
                "loop": [partial(loop, x, w, sizes) for w in plain],
                "weight-only": [partial(weight_only, x, w, offs) for w in packed],
                "w4a4": [partial(quantised, x, w, offs) for w in packed],
            }
            yield decode_row(f"{name}, {each} each", calls, copied, args)
        x = shape.rows(INDEXED, args.device)[:, None]
        index = torch.randint(shape.experts, (INDEXED,), device=args.device)
        calls = {
            "bf16": [partial(gathered_bf16, x, w, index) for w in plain],
            "loop": [partial(gathered_loop, x, w, index.tolist()) for w in plain],
            "weight-only": [partial(gathered, x, None, w, index) for w in packed],
            "w4a4": [partial(gathered, x, "nvfp4", w, index) for w in packed],
        }
        taken = copied and copied * len(index.unique()) / shape.experts
        yield decode_row(f"{name}, {len(index)} by index", calls, taken, args)


def packed(args: argparse.Namespace) -> Iterator[dict]:
    for experts, each, kind in itertools.product(PACKED, EACH, ("equal", "drawn")):
        shape, count = Experts(*map(int, experts.split("x"))), each * int(experts.split("x")[0])
        plain, weights = rotated(shape, args.device)
        sizes = [each] * shape.experts if kind == "equal" else group_sizes(count, shape.experts)
        x, offs = shape.rows(count, args.device), offsets(sizes, args.device)
        calls = {
            "bf16": [partial(F.grouped_mm, x, w.mT, offs=offs) for w in plain],
            "weight-only": [partial(weight_only, x, w, offs) for w in weights],
            "w4a4": [partial(expanded, x, w, offs) for w in weights],
        }
        times = dict(zip(calls, call_times(list(calls.values()), args), strict=True))
        ratios = {f"{name} x": times["bf16"] / times[name] for name in ("weight-only", "w4a4")}
        yield {"experts": experts, "tokens": each, "sizes": kind, **times, **ratios}


def decode_row(case: str, calls: dict[str, list], copied: float | None, args) -> dict:
    times = dict(zip(calls, call_times(list(calls.values()), args), strict=True))
    row = {"decode": case, **{f"{name} us": time for name, time in times.items()}}
    row |= {f"{name} x": times["bf16"] / times[name] for name in ("weight-only", "w4a4")}
    return row | {"of copy": copied and copied / times["weight-only"]}


def rotated(shape: Experts, device: str) -> tuple[list[torch.Tensor], list]:
    """Weights in bf16 and packed, of each as many as together do not fit the L2 cache."""

    def copies(size: float) -> int:
        return min(max(2, int(ROTATED_BYTES / size)), 16) if device.startswith("cuda") else 1

    elements = shape.experts * shape.n * shape.k
    weight = shape.weights(device)
    packed = [ops.quantize(weight, "nvfp4", each_matrix=True) for _ in range(copies(0.5625 * elements))]
    return [weight.clone() for _ in range(copies(2.0 * elements))], packed


def weight_only(x: torch.Tensor, weight: tuple, offs: torch.Tensor) -> torch.Tensor:
    return ops.scaled_mm(x, None, None, *weight, "plain @ nvfp4, ragged rows -> bfloat16", offs=offs)


def quantised(x: torch.Tensor, weight: tuple, offs: torch.Tensor) -> torch.Tensor:
    a = ops.quantize(x, "nvfp4", offs=offs)
    return ops.scaled_mm(*a, *weight, "nvfp4 @ nvfp4, ragged rows -> bfloat16", offs=offs)


def expanded(x: torch.Tensor, weight: tuple, offs: torch.Tensor) -> torch.Tensor:
    values, _, outer = ops.quantize(x, "nvfp4", offs=offs, values=[-1])
    return ops.scaled_mm(values, None, outer, *weight, "plain @ nvfp4, ragged rows -> bfloat16", offs=offs)


def gathered_bf16(x: torch.Tensor, weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x, weight[index].mT)


def gathered_loop(x: torch.Tensor, weight: torch.Tensor, index: list[int]) -> torch.Tensor:
    return torch.stack([F.linear(rows, weight[i]) for rows, i in zip(x, index, strict=True)])


def gathered(x: torch.Tensor, format: str | None, weight: tuple, index: torch.Tensor) -> torch.Tensor:
    a = (x, None, None) if format is None else ops.quantize(x, format)
    data, scales, outer = weight
    outer = outer.view(-1, 1, 1).expand(-1, data.shape[1], 1)
    spec = f"{format or 'plain'} @ nvfp4, gathered -> bfloat16"
    return ops.scaled_mm(*a, data, scales, outer, spec, index=index)


# ---------------------------------------------------------------- tokens


class Layer(torch.nn.Module):
    """The product of a layer of experts."""

    def __init__(self, shape: Experts, device: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(shape.weights(device))

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(x, self.weight.mT, offs=offs)


def tokens(args: argparse.Namespace) -> Iterator[dict]:
    for name in args.models:
        shape = MODELS[name]
        for what, calls in steps(shape, args.tokens, args.recipes, args).items():
            flops = 2 * args.tokens * shape.n * shape.k * (1 if what == "forward" else 3)
            times = step_times(calls, args)
            for peer, ms in times.items():
                yield {"tokens": f"{name}, {what}", "by": peer, "ms": ms, "of bf16's rate": times["bf16"] / ms,
                       "TFLOP/s": flops / ms / 1e9}  # fmt: skip


def steps(shape: Experts, count: int, recipes, args: argparse.Namespace) -> dict[str, dict[str, Callable]]:
    """Steps of `count` tokens by peer: of the forward product, and of all three products."""
    layer, x = Layer(shape, args.device), shape.rows(count, args.device)
    sizes = group_sizes(count, shape.experts)
    offs, gradient = offsets(sizes, args.device), torch.randn(count, shape.n, device=args.device, dtype=BF16)
    layers: dict[str, Callable] = {"bf16": layer, "loop": lambda x, offs: loop(x, layer.weight, sizes)}
    layers |= {recipe: compiled(layer, recipe) for recipe in recipes}
    return {
        "forward": {name: partial(forward, each, x, offs) for name, each in layers.items()},
        "both": {name: partial(all_products, each, layer, x, offs, gradient) for name, each in layers.items()},
    }


def compiled(layer: torch.nn.Module, recipe: str) -> Callable:
    """The layer, compiled. Every one is an entry of the same function's cache, and has one more under no_grad."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(layer, backend=fp4compile.backend(recipe, strict=True), dynamic=False)


def forward(layer: Callable, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return layer(x, offs)


def all_products(layer: Callable, of: Layer, x: torch.Tensor, offs: torch.Tensor, gradient: torch.Tensor) -> tuple:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(layer(x, offs), (x, of.weight), gradient)


# ---------------------------------------------------------------- times


def step_times(calls: dict[str, Callable], args) -> dict[str, float]:
    """Milliseconds of a step of each, in turns."""
    for call in calls.values():
        call()
    rounds = [[common.step_time(call, args.device) for call in calls.values()] for _ in range(args.replays)]
    return {name: statistics.median(times) for name, times in zip(calls, zip(*rounds, strict=True), strict=True)}


def call_times(sequences: list[list[Callable]], args) -> list[float]:
    """Microseconds of a call of each sequence."""
    if args.device.startswith("cuda"):
        return common.graph_times(sequences, args.replays)
    return [1e3 * statistics.mean(common.step_time(call, args.device) for call in calls) for calls in sequences]


def copy_us(size: int, device: str) -> float | None:
    """Microseconds of a device copy that reads and writes so many bytes together."""
    return copy_time(size, 10) if device.startswith("cuda") else None


PARTS = {"decode": decode, "packed": packed, "tokens": tokens}

if __name__ == "__main__":
    main()
