"""How fast are the grouped products of experts, against `torch._grouped_mm` and a loop of products in bf16?

Five parts, each a table, all peers of a part in one run:

decode: 1 to 8 tokens an expert and weights packed once, with bf16 activations ("weight-only") and with activations
    quantised in the measured time ("w4a4"); then 8 tokens that take their experts by index. "of copy": the time of a
    device copy that moves as many bytes as the packed weights have, over that of weight-only. Weights are rotated, so
    that the L2 cache does not hold them; times are those of CUDA graphs that are replayed in turns.
tokens: 16384 tokens under recipes, compiled. "forward" packs weights once and quantises activations; "both", forward
    and backward, quantises all operands of the three products in each step. A time is that of a step among steps that
    follow each other, the median of several runs.
weights: what quantising experts' weights (8 to 32, 8192, 5120) costs against a device copy of the same bytes.
configurations: the launches of the kernels' tables for many and for few tokens of NVFP4, and the best of
    others; where tiles that dequantise for themselves ("tiles") are faster than operands dequantised in memory
    ("operand"), by tokens an expert; and tiles of the kernel that quantises tokens ("rows"). On a GPU only.
growth: the same 16640 tokens over 1 to 64 experts: our time over that of bf16, and launches of a step.

The sizes of groups are drawn at random once; the loop of products knows them, nothing else does.

    python -m benchmarks.grouped_mm [--parts decode ...] [--models DeepSeek-V3 ...] [--recipes R ...]
                                    [--kernels tiles ...] [--out FILE]
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F

import fp4compile
from benchmarks import common
from benchmarks.linear import ROTATED_BYTES
from benchmarks.quantize import copy_time, nbytes
from fp4compile.formats import formats
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.ops.quantize import quantize_kernels
from fp4compile.templates.gemm import dequant_operand, dequant_tiles, streaming
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.dequant_operand import GroupedDotConfig
from fp4compile.templates.gemm.skinny import SkinnyConfig
from fp4compile.templates.launch import target_of
from fp4compile.templates.multiply import call_of
from fp4compile.templates.problem import Problem
from fp4compile.templates.quantize import ragged_amax, ragged_rows
from fp4compile.templates.quantize.heuristics import ragged_amax_config, ragged_row_config
from fp4compile.templates.quantize.source import source_of
from fp4compile.templates.view import View

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
QUANTISED = Experts(32, 8192, 5120)  # of which 8, 16 and 32
GROWING = Experts(64, 8192, 5120)  # of which 1, 4, 16 and 64
INDEXED = 8  # tokens with an expert by index
# Block shapes of weights: the format and the dimension along which it is quantised.
BLOCKS = {"1x32": ("mxfp8", -1), "32x1": ("mxfp8", -2), "32x32": ("mxfp8_32x32", -1)}


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    kernels = (*KERNELS, "tiles", "rows")
    parser.add_argument("--kernels", nargs="+", default=kernels, choices=kernels)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--growth-tokens", type=int, default=16640)
    parser.add_argument("--replays", type=int, default=9)
    args = parser.parse_args(arguments)
    parts = {}
    for name in args.parts:
        torch.manual_seed(0)
        parts[name] = list(PARTS[name](args))
    settings = {"tokens": args.tokens, "growth tokens": args.growth_tokens, "replays": args.replays}
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
    return ops.scaled_grouped_mm(x, None, None, None, *weight, "nvfp4", offs, len(x), BF16)


def quantised(x: torch.Tensor, weight: tuple, offs: torch.Tensor) -> torch.Tensor:
    a = ops.quantize(x, "nvfp4", offs=offs)
    return ops.scaled_grouped_mm(*a, "nvfp4", *weight, "nvfp4", offs, len(x), BF16)


def gathered_bf16(x: torch.Tensor, weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x, weight[index].mT)


def gathered_loop(x: torch.Tensor, weight: torch.Tensor, index: list[int]) -> torch.Tensor:
    return torch.stack([F.linear(rows, weight[i]) for rows, i in zip(x, index, strict=True)])


def gathered(x: torch.Tensor, format: str | None, weight: tuple, index: torch.Tensor) -> torch.Tensor:
    a = (x, None, None) if format is None else ops.quantize(x, format)
    data, scales, outer = weight
    return ops.scaled_mm_gathered(*a, format, data, scales, outer.view(-1, 1, 1).expand(-1, data.shape[1], 1),
                                  "nvfp4", index, BF16)  # fmt: skip


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


# ---------------------------------------------------------------- weights


def weights(args: argparse.Namespace) -> Iterator[dict]:
    for experts in (QUANTISED.experts // 4, QUANTISED.experts // 2, QUANTISED.experts):
        weight = Experts(experts, QUANTISED.n, QUANTISED.k).weights(args.device)
        for name, (format, dim) in BLOCKS.items():
            call = partial(ops.quantize, weight, format, dim, each_matrix=True)
            moved = nbytes(weight) + nbytes(call())
            (us,), copied = call_times([[call]], args), copy_us(moved, args.device)
            yield {"weights": f"{experts}x{QUANTISED.n}x{QUANTISED.k}", "block": name, "MB": moved / 1e6, "us": us,
                   "copy us": copied, "of copy": copied and copied / us}  # fmt: skip


# ---------------------------------------------------------------- growth


def growth(args: argparse.Namespace) -> Iterator[dict]:
    """The first recipe of the arguments beside bf16, over 1, 4, 16 and 64 experts."""
    recipe = args.recipes[0]
    for experts in (1, 4, 16, 64):
        if experts > GROWING.experts:
            continue
        row = {"growth": f"{experts} groups", "recipe": recipe}
        shape = Experts(experts, GROWING.n, GROWING.k)
        for what, calls in steps(shape, args.growth_tokens, [recipe], args).items():
            times = step_times(calls, args)
            row |= {f"{what} ms": times[recipe], f"{what} over bf16": times[recipe] / times["bf16"],
                    f"{what} launches": launches(calls[recipe], args.device)}  # fmt: skip
        yield row


def launches(step: Callable, device: str) -> int | None:
    """Kernels that a step runs."""
    if not device.startswith("cuda"):
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in found.events())


# ---------------------------------------------------------------- configurations


def configurations(args: argparse.Namespace) -> Iterator[dict]:
    """The table's launch of each kernel, and the best three of the others."""
    if not args.device.startswith("cuda"):
        return
    for name in args.models:
        if "tiles" in args.kernels:
            yield from tiles_or_operand(name, args)
        if "rows" in args.kernels:
            yield from rows_of_tokens(name, args)
        wanted = [kernel for kernel in KERNELS if kernel in args.kernels]
        for kernel, call in grouped_calls(MODELS[name], args.tokens, args.device, wanted).items():
            table, *others = tried(kernel, call.problem)
            run = KERNELS[kernel].run
            times = call_times([[partial(run, call, config)] for config in (table, *others)], args)
            best = sorted(zip(times[1:], others, strict=True), key=lambda pair: pair[0])[:3]
            for of, (us, config) in [("table", (times[0], table)), *[("tried", each) for each in best]]:
                yield {"configurations": f"{name}, {kernel}", "of": of, "us": us, "launch": str(config)}


TOKENS_EACH = (64, 128, 256, 512)
KERNELS = {"many": dequant_operand.CANDIDATE, "few": streaming.CANDIDATE}


def grouped_calls(shape: Experts, count: int, device: str, wanted=KERNELS) -> dict[str, Call]:
    """NVFP4 tokens and weights, `count` tokens; weight-only, four tokens an expert."""
    if not wanted:
        return {}
    b = Operand(*quantize_kernels(shape.weights(device), "nvfp4", each_matrix=True), formats.get("nvfp4"))
    found = {}
    for kernel, rows in (("many", count), ("few", 4 * shape.experts)):
        if kernel not in wanted:
            continue
        x = shape.rows(rows, device)
        offs = torch.full((shape.experts,), rows // shape.experts, device=device).cumsum(0).to(torch.int32)
        a = Operand(x)
        if kernel == "many":
            a = quantised_tokens(x, offs)
        found[kernel] = call_of(Arguments(a, b, None, BF16, offs=offs, rows=rows))
    return found


def tiles_or_operand(name: str, args: argparse.Namespace) -> Iterator[dict]:
    """The products of packed NVFP4 weights by both kernels, the quantiser of the tokens included."""
    shape = MODELS[name]
    weight = ops.quantize(shape.weights(args.device), "nvfp4", each_matrix=True)
    for each in TOKENS_EACH:
        calls = both_calls(shape, each, weight, args.device)
        times = call_times([[call] for call in calls.values()], args)
        for (of, call), us in zip(calls.items(), times, strict=True):
            yield {"configurations": f"{name}, {each} tokens each", "of": of, "us": us,
                   "launch": str(call.keywords["config"])}  # fmt: skip


def both_calls(shape: Experts, each: int, weight: tuple, device: str) -> dict[str, partial]:
    """By kernel: quantise `each` tokens an expert on average, and multiply them as the kernel's table launches it.

    Tokens are codes for tiles, and values for the operand in memory, as graphs have them.
    """
    rows = each * shape.experts
    x, offs = shape.rows(rows, device), offsets(group_sizes(rows, shape.experts), device)
    b, calls = Operand(*weight, formats.get("nvfp4")), {}
    for of, candidate in (("tiles", dequant_tiles.CANDIDATE), ("operand", dequant_operand.CANDIDATE)):
        values = of == "operand"
        call = call_of(Arguments(quantised_tokens(x, offs, values), b, None, BF16, offs=offs, rows=rows))
        calls[of] = partial(
            multiplied, x, b, offs, values, candidate=candidate, config=candidate.configure(call.problem)
        )  # fmt: skip
    return calls


def multiplied(
    x: torch.Tensor, b: Operand, offs: torch.Tensor, values: bool, *, candidate: Candidate, config
) -> torch.Tensor:
    a = quantised_tokens(x, offs, values)
    return candidate.run(call_of(Arguments(a, b, None, BF16, offs=offs, rows=len(x))), config)


def quantised_tokens(x: torch.Tensor, offs: torch.Tensor, values: bool = False) -> Operand:
    """As codes, or as values."""
    data, scales, outer = quantize_kernels(x, "nvfp4", offs=offs, values=(-1,) if values else ())
    return Operand(data, None, outer) if values else Operand(data, scales, outer, formats.get("nvfp4"))


def rows_of_tokens(name: str, args: argparse.Namespace) -> Iterator[dict]:
    """Quantise the tokens, to codes and to values: the amaxes alone, the table's tiles, and others as large."""
    shape = MODELS[name]
    x, offs = shape.rows(args.tokens, args.device), offsets(group_sizes(args.tokens, shape.experts), args.device)
    source, bounds = source_of(x, target_of(x.device)), View.flat(offs, len(offs))
    (amax_us,) = call_times([[lambda: ragged_amax.amax_of_rows(source, bounds, each=False)[1].run()]], args)
    yield {"configurations": f"{name}, rows", "of": "amax", "us": amax_us, "launch": str(ragged_amax_config())}
    for values in (False, True):
        table = ragged_row_config("e2m1", 16, args.tokens, shape.experts, False)
        others = [replace(table, rows=rows, blocks=table.rows * table.blocks // rows) for rows in (128, 32, 16, 8)]
        for of, config in [("table", table), *[("tried", each) for each in others if each != table]]:
            with mock.patch.object(ragged_rows, "ragged_row_config", lambda *_, config=config: config):
                (us,) = call_times([[partial(quantised_tokens, x, offs, values)]], args)
            yield {"configurations": f"{name}, rows to {'values' if values else 'codes'}", "of": of, "us": us,
                   "launch": str(config)}  # fmt: skip


def tried(kernel: str, problem: Problem) -> list:
    """Configurations, that of the table first. Others differ in the tile, the stages, the walk or the grid."""
    table = KERNELS[kernel].configure(problem)
    if kernel == "many":
        tiles = ((128, 256, 64, 4, 8), (128, 256, 64, 3, 8), (256, 128, 64, 4, 8), (128, 128, 64, 6, 8),
                 (128, 128, 128, 3, 8), (128, 128, 64, 6, 4))  # fmt: skip
        every = [GroupedDotConfig(bm, bn, bk, stages, bn // 32, warps, group_m)
                 for bm, bn, bk, stages, warps in tiles for group_m in (4, 8, 16)]  # fmt: skip
    else:
        every = [SkinnyConfig(8, tiles, warps, stages, 1, each * problem.target.multiprocessors)
                 for tiles in (1, 2) for warps in (4, 8) for stages in (1, 2, 3) for each in (3, 4, 5, 6)
                 if warps * (stages * (1152 * tiles + 2048) + 1024 * tiles) <= 48 * 1024]  # fmt: skip
    return [table, *(config for config in every if config != table)]


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


PARTS = {"decode": decode, "tokens": tokens, "weights": weights, "growth": growth, "configurations": configurations}

if __name__ == "__main__":
    main()
