"""How fast are the products of packed NVFP4 experts with 65 to 1024 tokens each on Hopper? And with which tiles?

"bf16": `torch._grouped_mm`; "weight-only": bf16 tokens; "w4a4": tokens quantised and expanded in the measured time;
"in memory": weight-only by the kernels that the one for packed weights replaces, which dequantise in registers without
`wgmma` (up to 128 tokens) or in memory. "tile RxC": weight-only by tiles of R tokens and C rows of the
weights, beside the tile that the table has.
Groups are equal, or drawn at random once. All of a row are CUDA graphs, replayed in turns, of weights that the L2 cache
does not hold. Kernels are compiled first, by processes side by side.

A second table, "fit", is what `gemm/wgmma_launches_sm90.py` needs: of each tile, the microseconds of a step of 128
elements along K, and of a round of programs beside its steps, and the errors of that fit.
A third one, "loss": where the table's tile is not the fastest of those tried, and by how much.

    python -m benchmarks.packed_experts [--shapes 8x4096x14336] [--tokens 65 128] [--sizes equal drawn] [--out FILE]
"""

import itertools
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks import common, grouped_mm
from benchmarks.grouped_mm import BF16, Experts
from fp4compile.formats import formats
from fp4compile.formats.layouts import ceil_div
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.templates import choose
from fp4compile.templates.gemm.wgmma_launches_sm90 import GROUPED_TILES, WgmmaConfig, with_shared_memory
from fp4compile.templates.gemm.wgmma_sm90 import CANDIDATE, needed_bytes
from fp4compile.templates.launch import target_of
from fp4compile.templates.multiply import call_of, multiply
from fp4compile.templates.problem import Problem, problem_of

SHAPES = ("8x4096x14336", "128x1536x2048", "128x2048x768")  # experts x N x K; Qwen3-30B-A3B's are the last two
TOKENS = (65, 96, 128, 192, 256, 384, 512, 1024)  # of an expert, on average
TILES = {f"{config.rows}x{16 * config.parts * config.warps}": config for config, *_ in GROUPED_TILES}
SWIZZLED_PER_US = 2.7e6 / 4  # elements that `swizzle_a_sm90` copies on an H100, at the rate of any copy
NVFP4 = formats.get("nvfp4")


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="experts x N x K")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="of an expert, on average")
    parser.add_argument("--sizes", nargs="+", choices=("equal", "drawn"), default=["equal", "drawn"])
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile")
    parser.add_argument("--replays", type=int, default=5)
    args = parser.parse_args(arguments)
    compile_first(args)
    rows = [row for name in args.shapes for row in rows_of(name, args)]
    settings = {"replays": args.replays, "multiprocessors": target_of(torch.device(args.device)).multiprocessors}
    fitted = fit(rows, settings["multiprocessors"])
    common.publish_parts(args, settings, {"rows": rows, "fit": fitted, "loss": losses(rows)})


def shape_of(name: str) -> Experts:
    return Experts(*map(int, name.split("x")))


def tiles_for(problem: Problem) -> dict[str, WgmmaConfig]:
    """All tiles by their rows, with their shared memory."""
    return {name: with_shared_memory(config, problem, needed_bytes) for name, config in TILES.items()}


# ---------------------------------------------------------------- compile


def compile_first(args) -> None:
    """Compile every kernel of the new candidate into Triton's cache."""
    jobs = {}
    for name, each in itertools.product(args.shapes, args.tokens):
        shape = shape_of(name)
        rows = each * shape.experts
        for dtype in (BF16, torch.float16):  # weight-only, and values of NVFP4 tokens
            problem = problem_of(arguments_of(shape, rows, dtype, "meta"), target_of(torch.device(args.device)))
            tried = tiles_for(problem).values() if dtype == BF16 else [CANDIDATE.configure(problem)]
            jobs |= {(name, rows % 16 == 0, dtype, config): rows for config in tried}
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(partial(launch_once, args.device), jobs, jobs.values()))
    print(f"{len(jobs)} kernels", file=sys.stderr, flush=True)


def launch_once(device: str, job: tuple, rows: int) -> None:
    name, _, dtype, config = job
    CANDIDATE.run(call_of(arguments_of(shape_of(name), rows, dtype, device)), config)
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def arguments_of(shape: Experts, rows: int, dtype: torch.dtype, device: str) -> Arguments:
    """Arguments whose values mean nothing; tokens in float16 stand for those of NVFP4, with an outer scale each."""

    def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=device)

    codes = empty(shape.experts, shape.n, shape.k // 2, dtype=NVFP4.data_dtype)
    scales = empty(shape.experts, shape.n, shape.k // 16, dtype=NVFP4.scale_dtype)
    outer = None if dtype == BF16 else empty(shape.experts)
    offs = torch.zeros(shape.experts, dtype=torch.int32, device=device)
    tokens = Operand(empty(rows, shape.k, dtype=dtype), None, outer)
    return Arguments(tokens, Operand(codes, scales, empty(shape.experts), NVFP4), None, BF16, offs=offs, rows=rows)


# ---------------------------------------------------------------- time


def rows_of(name: str, args):
    """A row for each number of tokens and kind of sizes."""
    shape = shape_of(name)
    plain, packed = grouped_mm.rotated(shape, args.device)
    for each, kind in itertools.product(args.tokens, args.sizes):
        count = each * shape.experts
        sizes = sizes_of(kind, each, shape.experts)
        x, offs = shape.rows(count, args.device), grouped_mm.offsets(sizes, args.device)
        calls = calls_of(x, plain, packed, offs)
        compare(calls, f"{name}, {each} tokens, {kind}")
        times = dict(zip(calls, grouped_mm.call_times(list(calls.values()), args), strict=True))
        problem = problem_of(arguments(x, packed[0], offs), target_of(x.device))
        chosen = CANDIDATE.configure(problem)
        table = next(name for name, config in tiles_for(problem).items() if config == chosen)
        row = {"experts": name, "tokens": each, "sizes": kind, "table": table}
        yield row | times | {f"{peer} x": times["bf16"] / times[peer] for peer in ("weight-only", "w4a4", "in memory")}
        print(f"{name}, {each} tokens, {kind}", file=sys.stderr, flush=True)


def sizes_of(kind: str, each: int, experts: int) -> list[int]:
    """The tokens of each expert: equal, or drawn at random."""
    return [each] * experts if kind == "equal" else grouped_mm.group_sizes(each * experts, experts)


def calls_of(x: torch.Tensor, plain: list, packed: list, offs: torch.Tensor) -> dict[str, list[Callable]]:
    """The products by peer, with each copy of the weights."""
    calls: dict[str, list[Callable]] = {
        "bf16": [partial(F.grouped_mm, x, w.mT, offs=offs) for w in plain],
        "weight-only": [partial(grouped_mm.weight_only, x, w, offs) for w in packed],
        "w4a4": [partial(expanded, x, w, offs) for w in packed],
        "in memory": [partial(in_memory, x, w, offs) for w in packed],
    }
    made = [call_of(arguments(x, w, offs)) for w in packed]
    for name, config in tiles_for(made[0].problem).items():
        calls[f"tile {name}"] = [partial(CANDIDATE.run, call, config) for call in made]
    return calls


def arguments(x: torch.Tensor, weight: tuple, offs: torch.Tensor) -> Arguments:
    return Arguments(Operand(x), Operand(*weight, NVFP4), None, BF16, offs=offs, rows=len(x))


def expanded(x: torch.Tensor, weight: tuple, offs: torch.Tensor) -> torch.Tensor:
    """NVFP4 tokens, as a compiled graph has them: one kernel quantises them and writes their values."""
    return multiply(replace(arguments(x, weight, offs), a=grouped_mm.quantised_tokens(x, offs, True)))


def in_memory(x: torch.Tensor, weight: tuple, offs: torch.Tensor) -> torch.Tensor:
    kept = tuple(each for each in choose.REGISTRY if each is not CANDIDATE)
    with mock.patch.object(choose, "REGISTRY", kept):
        return grouped_mm.weight_only(x, weight, offs)


def compare(calls: dict[str, list[Callable]], case: str) -> None:
    """Raise SystemExit where weight-only or a tile computes something else than the kernels before did."""
    expected = calls["in memory"][0]().float()
    for name in calls:
        if name == "weight-only" or name.startswith("tile"):
            error = (calls[name][0]().float() - expected).abs().amax() / expected.abs().amax()
            if not error < 0.02:
                raise SystemExit(f"{case}: {name} is off by {error:.3g} of the largest result")


# ---------------------------------------------------------------- fit


def fit(rows: list[dict], multiprocessors: int) -> list[dict]:
    """Of each tile: a step's and a round's microseconds, by least squares of relative errors.

    The time in which `swizzle_a_sm90` arranges the tokens does not depend on the tile and is left out. Tiles of equal
    sizes run in whole rounds, others as they come.
    """
    found = []
    for tile, config in TILES.items():
        timed = [row for row in rows if f"tile {tile}" in row]
        if len(timed) < 2:
            continue
        us = torch.tensor([row[f"tile {tile}"] for row in timed], dtype=torch.float64)
        terms, arranged = [], []
        for row in timed:
            shape, count = shape_of(row["experts"]), row["tokens"] * shape_of(row["experts"]).experts
            tiles = sum(ceil_div(size, config.rows) for size in sizes_of(row["sizes"], row["tokens"], shape.experts))
            programs = tiles * ceil_div(shape.n, 16 * config.parts * config.warps)
            equal = row["sizes"] == "equal"
            rounds = ceil_div(programs, multiprocessors) if equal else max(1.0, programs / multiprocessors)
            terms.append([rounds * ceil_div(shape.k, 128), rounds])
            arranged.append(count * shape.k / SWIZZLED_PER_US)
        relative = torch.tensor(terms, dtype=torch.float64) / us[:, None]
        wanted = 1 - torch.tensor(arranged, dtype=torch.float64) / us
        solution = torch.linalg.lstsq(relative, wanted[:, None]).solution
        errors = ((relative @ solution)[:, 0] - wanted).abs()
        found.append({"tile": tile, "step us": solution[0].item(), "round us": solution[1].item(),
                      "mean error": errors.mean().item(), "largest error": errors.amax().item(),
                      "cases": len(timed)})  # fmt: skip
    return found


def losses(rows: list[dict]) -> list[dict]:
    """The rows in which another tile is faster than the table's."""
    found = []
    for row in rows:
        times = {name.split()[1]: us for name, us in row.items() if name.startswith("tile ")}
        best = min(times, key=lambda tile: times[tile])
        if best != row["table"]:
            found.append({**{name: row[name] for name in ("experts", "tokens", "sizes", "table")}, "best": best,
                          "loss": times[row["table"]] / times[best] - 1})  # fmt: skip
    return found


if __name__ == "__main__":
    main()
