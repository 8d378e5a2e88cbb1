"""How fast are FP8 products, with each granularity of the scales, against the bf16 library product?

The columns: bf16; operands with a scale a row ("row"), the same with sums of fewer bits ("row, fast"), a scale a tensor
("tensor"), scales of 1x128 elements of A and 128x128 of B ("1x128 · 128x128", a layer's forward product and input
gradient in `float8_block`), 1x128 of both ("1x128 · 1x128", its weight gradient); all without quantising. "block" is a
layer with quantised activations and packed weights, "weights only" one with bf16 activations. "copy" is a copy of the
bytes of operands and result in bf16. --peers adds DeepGEMM's product of 1x128 · 128x128 (`benchmarks.peers`). Weights
are rotated, so that the L2 cache does not hold them; each column is one CUDA graph, replayed in turns, and medians
count. Microseconds.

--experts: matmuls of experts instead, whose tokens are split at random once: forward ones, beside bf16 (`F.grouped_mm`)
and torch's `_scaled_grouped_mm`, with a scale a row and by 1x128 · 128x128, then weight gradients.

    python -m benchmarks.float8_linear [--rows 1 8 64 8192] [--shapes 8192x8192] [--peers PEERS]
    python -m benchmarks.float8_linear --experts 8x4096x14336 128x1536x2048 --rows 64 4096 16384 131072
"""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import fp4compile.ops.quantize  # noqa: F401
from benchmarks import common, peers
from benchmarks.common import graph_times, random

# N, K: a square, and the projections of Llama-3-8B.
SHAPES = ("8192x8192", "28672x4096", "4096x14336", "6144x4096")
PAIRS = {
    "row": ("float8_rowwise", "float8_rowwise", ""),
    "row, fast": ("float8_rowwise", "float8_rowwise", ", fast accumulation"),
    "tensor": ("float8_tensor", "float8_tensor", ""),
    "1x128 · 128x128": ("float8_1x128", "float8_128x128", ""),
    "1x128 · 1x128": ("float8_1x128", "float8_1x128", ""),
}
ROTATED_BYTES = 480_000_000  # eight times the L2 cache
Calls = list[Callable[[], object]]
ops = torch.ops.fp4compile


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 8192])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="N x K")
    parser.add_argument("--experts", nargs="+", help="number of experts x N x K")
    parser.add_argument("--peers", type=Path, help="the folder of `benchmarks.peers`")
    parser.add_argument("--replays", type=int, default=9)
    args = parser.parse_args()
    rows = []
    for shape, m in itertools.product(args.experts or args.shapes, args.rows):
        sizes = tuple(map(int, shape.split("x")))
        columns = _expert_columns(m, *sizes) if args.experts else _columns(m, *sizes, args.peers)
        names = ("experts", "N", "K") if args.experts else ("N", "K")
        times = graph_times(columns.values(), args.replays)
        rows.append({"M": m, **dict(zip(names, sizes, strict=True)), **dict(zip(columns, times, strict=True))})
        print(rows[-1], file=sys.stderr, flush=True)
    common.publish(args, {"replays": args.replays, "peers": args.peers and peers.VERSION}, rows)


def _columns(m: int, n: int, k: int, folder: Path | None) -> dict[str, Calls]:
    """The calls of each column, one for each copy of the weights."""
    x = random(m, k)
    weights = [random(n, k) for _ in range(min(max(3, int(ROTATED_BYTES / (n * k))), 16))]
    found: dict[str, Calls] = {"bf16": [partial(F.linear, x, w) for w in weights]}
    for name, (a, b, how) in PAIRS.items():
        codes, spec = _quantised(x, a), f"{a} @ {b}{how} -> bfloat16"
        found[name] = [partial(ops.scaled_mm, *codes, *_quantised(w, b), spec) for w in weights]
    packed = [_quantised(w, "float8_128x128") for w in weights]
    if folder is not None:
        codes = _quantised(x, "float8_1x128")[:2]
        found["DeepGEMM"] = [partial(peers.deep_gemm, folder, codes, each[:2]) for each in packed]
        peers.check("DeepGEMM", found["DeepGEMM"][0](), found["1x128 · 128x128"][0]())
    found["block"] = [partial(_layer, x, *each) for each in packed]
    only = "plain @ float8_128x128 -> bfloat16"
    found["weights only"] = [partial(ops.scaled_mm, x, None, None, *each, only) for each in packed]
    moved = torch.empty((m * n + m * k + n * k) // 2, device="cuda", dtype=torch.bfloat16)
    found["copy"] = [moved.clone] * 3
    return found


def _expert_columns(m: int, experts: int, n: int, k: int) -> dict[str, Calls]:
    """The calls of each column. Weights and gradients of weights are larger than the L2 cache."""
    x, w, dy = random(m, k), random(experts, n, k), random(m, n)
    ends = (torch.rand(experts, device="cuda") + 0.5).cumsum(0)
    offs = (ends * (m / ends[-1])).round().int()
    a, b = _quantised(x, "float8_rowwise", offs=offs), _quantised(w, "float8_rowwise", each_matrix=True)
    by_torch = partial(torch._scaled_grouped_mm, a[0], b[0].mT, a[2].view(-1), b[2].view(experts, n), offs,
                       out_dtype=torch.bfloat16)  # fmt: skip
    blocks = _quantised(x, "float8_1x128", offs=offs), _quantised(w, "float8_128x128", each_matrix=True)
    found = {
        "bf16": partial(F.grouped_mm, x, w.mT, offs=offs), "torch, row": by_torch,
        "torch, row, fast": partial(by_torch, use_fast_accum=True),
        "row": partial(ops.scaled_mm, *a, *b, "float8_rowwise @ float8_rowwise, ragged rows -> bfloat16", offs=offs),
        "1x128 · 128x128": partial(ops.scaled_mm, *blocks[0], *blocks[1],
                                   "float8_1x128 @ float8_128x128, ragged rows -> bfloat16", offs=offs),
        "bf16, wgrad": partial(F.grouped_mm, dy.mT, x, offs=offs),
    }  # fmt: skip
    for column, name in (("row, wgrad", "float8_rowwise"), ("1x128 · 1x128, wgrad", "float8_1x128")):
        operands = [part for each in (dy, x) for part in _quantised(each, name, dim=[-2], offs=offs)]
        spec = f"{name} @ {name}, ragged contraction -> bfloat16"
        found[column] = partial(ops.scaled_mm, *operands, spec, offs=offs, rows=m)
    return {name: [call] * 3 for name, call in found.items()}


def _quantised(x: torch.Tensor, name: str, **options) -> tuple[torch.Tensor | None, ...]:
    return tuple(part if part.numel() else None for part in ops.quantize(x, name, **options))


def _layer(x: torch.Tensor, *weight: torch.Tensor | None) -> torch.Tensor:
    return ops.scaled_mm(*_quantised(x, "float8_1x128"), *weight, "float8_1x128 @ float8_128x128 -> bfloat16")


if __name__ == "__main__":
    main()
