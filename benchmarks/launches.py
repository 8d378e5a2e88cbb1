"""Which launches stream NVFP4 weights fastest? What the tables beside the kernels come from.

Every launch that fits on the chip is compiled, in processes side by side, run once and compared with the table's; then
all are timed as `benchmarks.linear` times products: CUDA graphs over weights that the L2 cache does not hold. Shown are
the fastest of each product beside what the table has for it. Products of several weights are one launch, up to
SKINNY_ROWS rows of activations.

    python -m benchmarks.launches [--products "gate, up" ...] [--rows 1 4 16 64] [--best 4] [--jobs 16] [--out FILE]
"""

import dataclasses
import itertools
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from unittest import mock

import torch
import triton
from triton.runtime.errors import OutOfResources, PTXASError

from benchmarks import common
from benchmarks.linear import ROTATED_BYTES, activations, weight
from fp4compile.formats import formats
from fp4compile.formats.layouts import ceil_div
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.hardware import Target
from fp4compile.ops.quantize import quantize_kernels
from fp4compile.templates import choose
from fp4compile.templates.device.shared_memory import reserved
from fp4compile.templates.gemm.gemv import WIDTH, GemvConfig, needed_bytes
from fp4compile.templates.gemm.skinny import SKINNY_ROWS, SkinnyConfig
from fp4compile.templates.gemm.wgmma_launches_sm90 import WgmmaConfig, with_shared_memory
from fp4compile.templates.gemm.wgmma_sm90 import needed_bytes as wgmma_bytes
from fp4compile.templates.multiply import multiply, scaled_mm_group
from fp4compile.templates.problem import OperandType, Problem

# N of each weight, K: of Llama-3-8B, and the largest of Llama-3-70B.
PRODUCTS = {
    "q, k, v": ((4096, 1024, 1024), 4096), "o": ((4096,), 4096), "gate, up": ((14336, 14336), 4096),
    "down": ((4096,), 14336), "8192x8192": ((8192,), 8192), "28672x8192": ((28672,), 8192),
    "8192x28672": ((8192,), 28672),
}  # fmt: skip
NVFP4 = formats.get("nvfp4")
H200 = Target(90)
Config = GemvConfig | SkinnyConfig | WgmmaConfig


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--products", nargs="+", choices=PRODUCTS, default=list(PRODUCTS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 64], help="of activations")
    parser.add_argument("--best", type=int, default=4, help="show so many of each product")
    parser.add_argument("--jobs", type=int, default=16, help="processes that compile")
    parser.add_argument("--replays", type=int, default=9)
    args = parser.parse_args()
    rows = []
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        for name, m in itertools.product(args.products, args.rows):
            sizes, k = PRODUCTS[name]
            if m > SKINNY_ROWS and len(sizes) > 1:
                continue
            table = choose.choose(problem(m, sum(sizes), k)).config
            tried = [table, *(launch for launch in launches(m, sum(sizes), k) if launch != table)]
            fits = pool.map(partial(agrees, sizes, k, m), tried)
            tried = [launch for launch, fit in zip(tried, fits, strict=True) if fit]
            times = dict(zip(range(len(tried)), measure(sizes, k, m, tried, args.replays), strict=True))
            for place in [0, *sorted(range(1, len(tried)), key=times.get)[: args.best]]:
                rows.append({
                    "product": name, "M": m, "us": times[place], "of": "table" if place == 0 else "tried",
                    "launch": " ".join(f"{field} {value}" for field, value in vars(tried[place]).items()),
                })  # fmt: skip
            print(f"{name}, M = {m}: {len(tried)} launches", flush=True)
    common.publish(args, {"replays": args.replays, "unit": "us"}, rows)


def problem(m: int, n: int, k: int) -> Problem:
    plain, packed = OperandType(None, torch.bfloat16), OperandType(NVFP4, NVFP4.data_dtype, outer="tensor")
    return Problem(plain, packed, m, n, k, torch.bfloat16, H200)


def launches(m: int, n: int, k: int) -> list[Config]:
    """All configurations of the kernel that serves m rows; some of them do not fit."""
    choice = choose.choose(problem(m, 16, k))
    if choice.kernel == "wgmma_sm90":
        return [with_shared_memory(each, problem(m, n, k), wgmma_bytes) for each in _wgmma_launches(m, k)]
    rows = triton.next_power_of_2(m)
    if isinstance(choice.config, GemvConfig):
        every = [(warps, ceil_div(k, WIDTH.value * warps), each) for warps in (4, 8, 16) for each in range(1, 8)]
        return [GemvConfig(warps, steps, rows, shared, each * H200.multiprocessors)
                for warps, steps, each in every if steps <= 16 and 8 <= warps * each <= 32
                if (shared := reserved(needed_bytes(warps, steps, rows), each, H200))]  # fmt: skip
    every = itertools.product((1, 2), (4, 8), (1, 2, 3, 4), (1, 2), range(2, 8))
    return [SkinnyConfig(rows, tiles, warps, stages, chains, each * H200.multiprocessors)
            for tiles, warps, stages, chains, each in every]  # fmt: skip


def _wgmma_launches(m: int, k: int) -> list[WgmmaConfig]:
    """Those of which a program fits on a multiprocessor."""
    splits = [split for split in (1, 2, 4, 8) if split == 1 or k >= 512 * split]
    if m <= 64:
        rows = 16 if m <= 16 else 32 if m <= 32 else 64
        every = itertools.product((rows,), (4, 8, 16), (1,), (2, 3, 4, 6), (1, 2, 4), splits, (8,), (4,))
    else:
        rows_of_tiles = (72, 80, 96, 128, 160, 192, 224, 256)
        every = itertools.product(rows_of_tiles, (8,), (1, 2), (2, 3, 4), (1,), splits, (8,), (3, 4))
    found = [WgmmaConfig(*each) for each in every if each[0] * each[2] <= 256]
    sizes = [(each.rows, each.warps, each.parts, each.stages, each.steps_per_stage, each.buffers) for each in found]
    return [each for each, size in zip(found, sizes, strict=True) if reserved(wgmma_bytes(*size), 1, H200)]


def computes(m: int, k: int, config: Config):
    """Let products of m rows be launched so, whatever the heuristics say."""
    kernel = choose.choose(problem(m, 16, k)).kernel
    registry = tuple(dataclasses.replace(each, configure=lambda _: config) if each.name == kernel else each
                     for each in choose.REGISTRY)  # fmt: skip
    return mock.patch.object(choose, "REGISTRY", registry)


def product(x: torch.Tensor, weights: list[Operand]) -> list[torch.Tensor]:
    """Of activations [m, k] and packed weights, in one launch where there are several."""
    if len(weights) > 1:
        return scaled_mm_group(Operand(x), [(w, None) for w in weights], x.dtype)
    return [multiply(Arguments(Operand(x), weights[0], None, x.dtype))]


def packed(sizes: tuple[int, ...], k: int) -> list[Operand]:
    return [Operand(*quantize_kernels(weight(n, k), NVFP4.name), NVFP4) for n in sizes]


def agrees(sizes: tuple[int, ...], k: int, m: int, launch: Config) -> bool:
    """Whether the launch fits, and computes what the table's does but for the order of sums; says so if not."""
    torch.manual_seed(0)
    x, weights = activations(m, k), packed(sizes, k)
    expected = product(x, weights)
    try:
        with computes(m, k, launch):
            found = product(x, weights)
            torch.cuda.synchronize()
    except (triton.CompilationError, OutOfResources, PTXASError):
        return False
    pairs = zip(found, expected, strict=True)
    right = all(torch.allclose(one, other, rtol=2**-7, atol=1e-3 * k**0.5) for one, other in pairs)
    if not right:
        print(f"{launch} with {m} rows of {k}: another result than the table's", file=sys.stderr)
    return right


def measure(sizes: tuple[int, ...], k: int, m: int, tried: list[Config], replays: int) -> list[float]:
    """Microseconds of each launch."""
    x = activations(m, k)
    copies = max(3, int(ROTATED_BYTES / (0.5625 * k * sum(sizes))))
    every = [packed(sizes, k) for _ in range(copies)]
    as_asked = [[partial(_launched, launch, x, weights) for weights in every] for launch in tried]
    # A graph keeps its results, and the sums of up to eight parts of K in float32: so many graphs have 16 GiB.
    each = max(1, 2**34 // (copies * 34 * m * sum(sizes)))
    parts = (as_asked[start : start + each] for start in range(0, len(as_asked), each))
    return [us for part in parts for us in common.graph_times(part, replays)]


def _launched(launch: Config, x: torch.Tensor, weights: list[Operand]) -> list[torch.Tensor]:
    with computes(*x.shape, launch):
        return product(x, weights)


if __name__ == "__main__":
    main()
