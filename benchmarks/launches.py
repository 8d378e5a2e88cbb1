"""Which launches stream NVFP4 weights fastest? What the tables of `fp4compile.templates.gemm.heuristics` come from.

Every launch that fits on the chip is compiled, in processes side by side, run once and compared with the table's; then
all are timed as `benchmarks.linear` times products: CUDA graphs over weights that the L2 cache does not hold. Shown are
the fastest of each product beside what the table has for it. Products of several weights are one launch, up to
DECODE_ROWS rows of activations.

    python -m benchmarks.launches [--products "gate, up" ...] [--rows 1 4 16 64] [--best 4] [--jobs 16] [--out FILE]
"""

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
from fp4compile import formats
from fp4compile.layouts import ceil_div
from fp4compile.targets import Target
from fp4compile.templates.device.shared_memory import reserved
from fp4compile.templates.gemm import dispatch as scaled_mm
from fp4compile.templates.gemm.gemv import WIDTH, needed_bytes
from fp4compile.templates.gemm.heuristics import (
    DECODE_ROWS,
    MULTIPROCESSORS,
    decode_config,
    few_config,
    wgmma_config,
)
from fp4compile.templates.gemm.horizontal import products
from fp4compile.templates.gemm.wgmma_sm90 import needed_bytes as wgmma_bytes
from fp4compile.templates.quantize import dispatch as quantize

# N of each weight, K: of Llama-3-8B, and the largest of Llama-3-70B.
PRODUCTS = {
    "q, k, v": ((4096, 1024, 1024), 4096), "o": ((4096,), 4096), "gate, up": ((14336, 14336), 4096),
    "down": ((4096,), 14336), "8192x8192": ((8192,), 8192), "28672x8192": ((28672,), 8192),
    "8192x28672": ((8192,), 28672),
}  # fmt: skip
NVFP4 = formats.get("nvfp4")
H200 = Target(90)
Launch = dict[str, int | str]


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
            if m > DECODE_ROWS and len(sizes) > 1:
                continue
            table = table_of(m, sum(sizes), k)
            tried = [table, *(launch for launch in launches(m, k) if launch != table)]
            fits = pool.map(partial(agrees, sizes, k, m), tried)
            tried = [launch for launch, fit in zip(tried, fits, strict=True) if fit]
            times = dict(zip(range(len(tried)), measure(sizes, k, m, tried, args.replays), strict=True))
            for place in [0, *sorted(range(1, len(tried)), key=times.get)[: args.best]]:
                rows.append({
                    "product": name, "M": m, "us": times[place], "of": "table" if place == 0 else "tried",
                    "launch": " ".join(f"{constant} {value}" for constant, value in tried[place].items()),
                })  # fmt: skip
            print(f"{name}, M = {m}: {len(tried)} launches", flush=True)
    common.publish(args, {"replays": args.replays, "unit": "us"}, rows)


def table_of(m: int, n: int, k: int) -> Launch:
    few = few_config(m, n, k, H200)
    return few or (decode_config(m, n, k) if m <= DECODE_ROWS else wgmma_config(m, n, k))


def launches(m: int, k: int) -> list[Launch]:
    """All launches of the kernel that serves m rows; some of them do not fit."""
    if m > DECODE_ROWS:
        rows = 16 if m <= 16 else 32 if m <= 32 else 64
        every = itertools.product((4, 8, 16), (2, 3, 4, 6), (1, 2, 4), (1, 2, 4, 8))
        return [{"ROWS": rows, "WARPS": warps, "STAGES": stages, "STEPS_PER_STAGE": per, "SPLIT": split}
                for warps, stages, per, split in every if (split == 1 or k >= 512 * split)
                and reserved(wgmma_bytes(rows, warps, stages, per), 1, H200)]  # fmt: skip
    rows = triton.next_power_of_2(m)
    if few_config(m, 16, k, H200):
        every = [(warps, ceil_div(k, WIDTH.value * warps), each) for warps in (4, 8, 16) for each in range(1, 8)]
        found = [{"WARPS": warps, "STEPS": steps, "ROWS": rows, "GRID": each * MULTIPROCESSORS,
                  "SHARED": reserved(needed_bytes(warps, steps, rows), each, H200)}
                 for warps, steps, each in every if steps <= 16 and 8 <= warps * each <= 32]  # fmt: skip
        return [launch for launch in found if launch["SHARED"]]
    every = itertools.product((1, 2), (4, 8), (1, 2, 3, 4), (1, 2), range(2, 8))
    return [{"TILES": tiles, "WARPS": warps, "STAGES": stages, "CHAINS": chains, "ROWS": rows,
             "GRID": each * MULTIPROCESSORS} for tiles, warps, stages, chains, each in every]  # fmt: skip


def computes(m: int, launch: Launch):
    """Let products be launched so, whatever the table says."""
    few = "STEPS" in launch
    table = "few_config" if few else "decode_config" if m <= DECODE_ROWS else "wgmma_config"
    return mock.patch.object(scaled_mm, table, lambda *_: dict(launch))


def product(x: torch.Tensor, weights: list[tuple]) -> list[torch.Tensor]:
    """Of activations [m, k] and packed weights, in one launch where there are several."""
    if len(weights) > 1:
        return products(x, None, None, None, [(*w, None) for w in weights], NVFP4, x.dtype)
    return [scaled_mm.scaled_mm(x, None, None, None, *weights[0], NVFP4, None, x.dtype)]


def packed(sizes: tuple[int, ...], k: int) -> list[tuple]:
    return [quantize.quantize(weight(n, k), NVFP4) for n in sizes]


def agrees(sizes: tuple[int, ...], k: int, m: int, launch: Launch) -> bool:
    """Whether the launch fits, and computes what the table's does but for the order of sums; says so if not."""
    torch.manual_seed(0)
    x, weights = activations(m, k), packed(sizes, k)
    expected = product(x, weights)
    try:
        with computes(m, launch):
            found = product(x, weights)
            torch.cuda.synchronize()
    except (triton.CompilationError, OutOfResources, PTXASError):
        return False
    pairs = zip(found, expected, strict=True)
    right = all(torch.allclose(one, other, rtol=2**-7, atol=1e-3 * k**0.5) for one, other in pairs)
    if not right:
        print(f"{launch} with {m} rows of {k}: another result than the table's", file=sys.stderr)
    return right


def measure(sizes: tuple[int, ...], k: int, m: int, tried: list[Launch], replays: int) -> list[float]:
    """Microseconds of each launch."""
    x = activations(m, k)
    copies = max(3, int(ROTATED_BYTES / (0.5625 * k * sum(sizes))))
    every = [packed(sizes, k) for _ in range(copies)]
    as_asked = [[partial(_launched, launch, x, weights) for weights in every] for launch in tried]
    return common.graph_times(as_asked, replays)


def _launched(launch: Launch, x: torch.Tensor, weights: list[tuple]) -> list[torch.Tensor]:
    with computes(len(x), launch):
        return product(x, weights)


if __name__ == "__main__":
    main()
