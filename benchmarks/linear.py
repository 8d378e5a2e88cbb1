"""How fast are linear layers with packed NVFP4 weights, against the bf16 library product and torchao's weight-only?

Weight-only (bf16 activations) and W4A4 ("w4a4": activations quantised and expanded in one kernel in the measured time,
as a compiled graph has it; "w4a4 product": without that kernel). Weights are rotated, so that the L2 cache does not
hold them; every call sequence is one CUDA graph, those of one shape are replayed in turns, and the medians are
compared. torchao is measured at the square shape with the fewest and the most rows (compiling it for each takes
minutes), and left out where it is not installed. --peers adds Marlin, with the same weights, and Machete, with INT4
weights in groups of 128 (`benchmarks.peers`). A second table is of products that share their activations, each
launched apart and all in one launch, as a compiled graph has them.

    python -m benchmarks.linear [--rows 1 4 16 64 8192] [--shapes 8192x8192] [--peers PEERS] [--out FILE]
"""

import itertools
from functools import partial
from pathlib import Path

import torch

import fp4compile.ops.quantize  # noqa: F401
from benchmarks import common, peers
from benchmarks.common import graph_times, random

# N, K: a square, and the projections of Llama-3-8B and -70B.
SHAPES = [(8192, 8192), (4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (28672, 8192), (8192, 28672)]
# Products of the same activations in Llama-3-8B: N of each, K.
TOGETHER = {"q, k, v": ((4096, 1024, 1024), 4096), "gate, up": ((14336, 14336), 4096)}
ROTATED_BYTES = 240_000_000  # four times the L2 cache
WEIGHT_ONLY = "plain @ nvfp4 -> bfloat16"


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 8192])
    parser.add_argument("--shapes", nargs="+", help="N x K; by default SHAPES, the first alone for over 1024 rows")
    parser.add_argument("--peers", type=Path, help="the folder of `benchmarks.peers`")
    parser.add_argument("--replays", type=int, default=9)
    args = parser.parse_args()
    candidates = CANDIDATES if args.peers is None else CANDIDATES | {
        "marlin": partial(_marlin, args.peers), "machete": partial(_machete, args.peers),
    }  # fmt: skip
    rows = []
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes or ()] or SHAPES
    for (n, k), m in itertools.product(shapes, args.rows):
        if m > 1024 and (n, k) != SHAPES[0] and not args.shapes:
            continue
        calls = {name: made for name, make in candidates.items() if (made := make(m, n, k))}
        measured = dict(zip(calls, graph_times(calls.values(), args.replays), strict=True))
        times = {name: measured.get(name) for name in candidates}
        ratios = {f"{name} x": times["bf16"] / times[name] for name in ("weight-only", "w4a4")}
        rows.append({"shape": f"{m}x{n}x{k}", **times, **ratios})
    together = [_together(name, m, args.replays) for name in TOGETHER for m in args.rows if m <= 8]
    settings = {"rows": args.rows, "replays": args.replays, "unit": "us",
                "peers": args.peers and peers.VERSION}  # fmt: skip
    common.publish_parts(args, settings, {"rows": rows, "together": together})


def _together(name: str, m: int, replays: int) -> dict:
    """Weight-only products of the same activations: launched apart, and in one launch."""
    sizes, k = TOGETHER[name]
    x, ops = random(m, k), torch.ops.fp4compile
    copies = max(3, int(ROTATED_BYTES / (0.5625 * k * sum(sizes))))
    packed = [[ops.quantize(random(n, k), "nvfp4") for n in sizes] for _ in range(copies)]

    def apart(weights):
        return [ops.scaled_mm(x, None, None, *w, WEIGHT_ONLY) for w in weights]

    def in_one(weights):
        own = map(list, zip(*weights, strict=True))
        return ops.scaled_mm_results(x, None, None, *own, WEIGHT_ONLY)

    times = graph_times([[partial(how, weights) for weights in packed] for how in (apart, in_one)], replays)
    return {"products": name, "M": m, "apart us": times[0], "in one launch us": times[1]}


def _copies(weight_bytes: float) -> int:
    return min(max(3, int(ROTATED_BYTES / weight_bytes)), 64)


def _weights(n: int, k: int, weight_bytes: float):
    return [random(n, k) for _ in range(_copies(weight_bytes))]


def _bf16(m, n, k):
    x = random(m, k)
    return [lambda w=w: torch.nn.functional.linear(x, w) for w in _weights(n, k, 2 * n * k)]


def _packed(n, k):
    quantize = torch.ops.fp4compile.quantize
    return [quantize(w, "nvfp4") for w in _weights(n, k, 0.5625 * n * k)]


def _weight_only(m, n, k):
    x = random(m, k)
    product = torch.ops.fp4compile.scaled_mm
    return [lambda w=w: product(x, None, None, *w, WEIGHT_ONLY) for w in _packed(n, k)]


def _expanded(x):
    """(values, no block scales, outer scale): quantised activations as a compiled graph multiplies them."""
    values, outer = torch.ops.fp4compile.quantize(x, "nvfp4", values=[-1])[::2]
    return values, None, outer


def _w4a4(m, n, k):
    x = random(m, k)
    product = torch.ops.fp4compile.scaled_mm
    return [lambda w=w: product(*_expanded(x), *w, WEIGHT_ONLY) for w in _packed(n, k)]


def _w4a4_product(m, n, k):
    """Without the activations' quantisation."""
    x = _expanded(random(m, k))
    product = torch.ops.fp4compile.scaled_mm
    return [lambda w=w: product(*x, *w, WEIGHT_ONLY) for w in _packed(n, k)]


def _torchao(m, n, k):
    if (n, k) != SHAPES[0] or 1 < m < 8192:
        return []
    try:
        from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
        from torchao.quantization import quantize_
    except ImportError:
        return []
    torch._dynamo.reset()  # every shape compiled for itself
    x = random(m, k)
    layers = []
    for w in _weights(n, k, 0.5625 * n * k)[:3]:
        layer = torch.nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
        layer.weight = torch.nn.Parameter(w, requires_grad=False)
        quantize_(layer, NVFP4WeightOnlyConfig())
        layers.append(torch.compile(layer))
    with torch.no_grad():
        layers[0](x)

    def call(layer):
        with torch.no_grad():
            return layer(x)

    return [lambda layer=layer: call(layer) for layer in layers]


def _marlin(folder, m, n, k):
    x, weights = random(m, k), _packed(n, k)
    calls = [partial(peers.marlin(folder, *w), x) for w in weights]
    peers.check("Marlin", calls[0](), torch.ops.fp4compile.scaled_mm(x, None, None, *weights[0], WEIGHT_ONLY))
    return calls


def _machete(folder, m, n, k):
    x = random(m, k)
    return [partial(peers.machete(folder, n, k), x) for _ in range(_copies(0.5156 * n * k))]


CANDIDATES = {"bf16": _bf16, "torchao weight-only": _torchao, "weight-only": _weight_only, "w4a4": _w4a4,
              "w4a4 product": _w4a4_product}  # fmt: skip

if __name__ == "__main__":
    main()
