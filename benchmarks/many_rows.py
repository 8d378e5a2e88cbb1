"""How fast are linear layers with packed NVFP4 weights from 64 to some thousand rows of activations, against bf16?

"weight-only": bf16 activations; "w4a4": activations quantised and expanded in one kernel in the measured time; "in
memory": weights dequantised in memory and multiplied by the library, which the kernels up to 8192 rows replace. All
sequences of one shape are replayed in turns, as in `benchmarks.linear`.

    python -m benchmarks.many_rows [--rows 65 128 2048] [--shapes 8192x8192] [--out FILE]
"""

import itertools
from unittest import mock

from benchmarks import common, linear
from benchmarks.common import graph_times
from fp4compile.templates import choose

SHAPES = ("8192x8192", "28672x8192", "4096x14336")  # N x K
ROWS = (64, 65, 96, 128, 192, 256, 384, 512, 1024, 2048)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="N x K")
    parser.add_argument("--replays", type=int, default=9)
    args = parser.parse_args()
    rows = [row(m, *map(int, shape.split("x")), args.replays) for shape, m in itertools.product(args.shapes, args.rows)]
    common.publish(args, {"rows": args.rows, "replays": args.replays, "unit": "us"}, rows)


def row(m: int, n: int, k: int, replays: int) -> dict:
    calls = {name: linear.CANDIDATES[name](m, n, k) for name in ("bf16", "weight-only", "w4a4")}
    calls["in memory"] = [lambda call=call: _in_memory(call) for call in linear.CANDIDATES["weight-only"](m, n, k)]
    times = dict(zip(calls, graph_times(calls.values(), replays), strict=True))
    ratios = {f"{name} x": times["bf16"] / times[name] for name in ("weight-only", "w4a4")}
    return {"shape": f"{m}x{n}x{k}", **times, **ratios}


def _in_memory(call):
    kept = tuple(each for each in choose.REGISTRY if each.name != "wgmma_sm90")
    with mock.patch.object(choose, "REGISTRY", kept):
        return call()


if __name__ == "__main__":
    main()
