"""How fast is the gradient of the input of a layer with packed NVFP4 weights, against bf16 and a dequantised weight?

The layer is [M, K] x [N, K]; the gradient [M, N] is multiplied by the weight [N, K]. "codes": by the kernel that reads
the codes; "in memory": the weight is dequantised in memory and multiplied by the library. All sequences of one shape
are replayed in turns, over weights that the L2 cache does not hold, as in `benchmarks.linear`.

--tiles times every tile of the kernel as well, from which `_TRANSPOSED_TILES` of `fp4compile.templates.gemm.heuristics`
is fitted: "us a step" is the time of a program's step of 128 rows of the weight, in a round that all programs start
together, with its share of the round's start and end.

    python -m benchmarks.packed_gradients [--tiles] [--rows 512 2048] [--shapes 4096x4096] [--out FILE]
"""

import dataclasses
import itertools
from functools import partial
from unittest import mock

import torch

from benchmarks import common, linear
from benchmarks.common import graph_times
from fp4compile.formats import formats
from fp4compile.formats.layouts import ceil_div
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.hardware import Target
from fp4compile.templates import choose
from fp4compile.templates.device.shared_memory import reserved
from fp4compile.templates.gemm.heuristics import WgmmaConfig, with_shared_memory
from fp4compile.templates.gemm.wgmma_sm90 import needed_bytes
from fp4compile.templates.multiply import multiply
from fp4compile.templates.problem import OperandType, Problem

SHAPES = ("4096x4096", "14336x4096", "4096x14336")  # N x K of the layer
ROWS = (512, 2048, 4096, 8192)
KERNEL = "wgmma_transposed_sm90"
NVFP4 = formats.get("nvfp4")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="N x K")
    parser.add_argument("--tiles", action="store_true", help="time every tile")
    parser.add_argument("--replays", type=int, default=9)
    args = parser.parse_args()
    each = [(m, *map(int, shape.split("x"))) for shape, m in itertools.product(args.shapes, args.rows)]
    parts = {"rows": [row(*sizes, args.replays) for sizes in each]}
    if args.tiles:
        parts["tiles"] = [tile for sizes in each for tile in timed_tiles(*sizes, args.replays)]
    common.publish_parts(args, {"rows": args.rows, "replays": args.replays, "unit": "us"}, parts)


def row(m: int, n: int, k: int, replays: int) -> dict:
    gradient, weights = linear.activations(m, n), packed(n, k)
    plain = [linear.weight(n, k) for _ in range(max(3, int(linear.ROTATED_BYTES / (2 * n * k))))]
    calls = {
        "bf16": [partial(torch.mm, gradient, w) for w in plain],
        "codes": [partial(product, gradient, w) for w in weights],
        "in memory": [partial(_in_memory, gradient, w) for w in weights],
    }
    times = dict(zip(calls, graph_times(calls.values(), replays), strict=True))
    ratios = {"codes x": times["bf16"] / times["codes"], "over in memory x": times["in memory"] / times["codes"]}
    config = choose.choose(problem(m, n, k)).config
    return {"shape": f"{m}x{n}x{k}", **times, **ratios, "tile": _tile(config)}


def problem(m: int, n: int, k: int) -> Problem:
    plain, codes = OperandType(None, torch.bfloat16), OperandType(NVFP4, NVFP4.data_dtype, outer="tensor")
    return Problem(plain, codes, m, k, n, torch.bfloat16, Target(90), b_transposed=True)


def packed(n: int, k: int) -> list[Operand]:
    copies = min(max(3, int(linear.ROTATED_BYTES / (0.5625 * n * k))), 64)
    return [Operand(*torch.ops.fp4compile.quantize(linear.weight(n, k), "nvfp4"), NVFP4) for _ in range(copies)]


def product(gradient: torch.Tensor, weight: Operand) -> torch.Tensor:
    return multiply(Arguments(Operand(gradient), weight, None, gradient.dtype, b_transposed=True))


def _in_memory(gradient: torch.Tensor, w: Operand) -> torch.Tensor:
    """As the backward pass has it where no kernel reads the codes."""
    dequantize = torch.ops.fp4compile.dequantize
    return gradient @ dequantize(w.data, w.scales, w.outer, "nvfp4", 2 * w.data.shape[-1], gradient.dtype)


# ---------------------------------------------------------------- tiles


def tiles(m: int, n: int, k: int) -> list[WgmmaConfig]:
    """The tiles that fit, with as many buffers of A as fit; the contraction in one part or, of few rows, in several."""
    splits = (1, 2, 4) if m <= 512 else (1,)
    found = []
    for rows, parts in itertools.product((72, 80, 96, 128, 160, 192, 224, 256), (1, 2)):
        for buffers in (4, 3):
            size = needed_bytes(rows, 8, parts, 3, 1, buffers)
            if rows * parts <= 256 and reserved(size, 1, Target(90)):
                found += [WgmmaConfig(rows, 8, parts, 3, 1, split, buffers=buffers) for split in splits]
                break
    return [with_shared_memory(each, problem(m, n, k), needed_bytes) for each in found]


def timed_tiles(m: int, n: int, k: int, replays: int) -> list[dict]:
    """The time of each tile. Raises RuntimeError where one computes another result than the table's."""
    gradient, weights = linear.activations(m, n), packed(n, k)
    expected, tried = product(gradient, weights[0]), tiles(m, n, k)
    for config in tried:
        if not torch.allclose(_launched(config, gradient, weights[0]), expected, rtol=2**-7, atol=1e-3 * n**0.5):
            raise RuntimeError(f"{config} with {m}x{n}x{k}: another result than the table's")
    calls = [[partial(_launched, config, gradient, w) for w in weights] for config in tried]
    times = graph_times(calls, replays)
    found = []
    for config, microseconds in zip(tried, times, strict=True):
        rounds = ceil_div(config.grid(m, k), torch.cuda.get_device_properties(0).multi_processor_count)
        steps = ceil_div(n, 128 * config.split_k)
        found.append({"shape": f"{m}x{n}x{k}", "tile": _tile(config), "us": microseconds, "rounds": rounds,
                      "steps": steps, "us a step": microseconds / rounds / steps})  # fmt: skip
    return found


def _tile(config: WgmmaConfig) -> str:
    return f"{config.rows} rows, {config.parts} parts, {config.split_k} splits, {config.buffers} buffers"


def _launched(config: WgmmaConfig, gradient: torch.Tensor, weight: Operand) -> torch.Tensor:
    registry = tuple(dataclasses.replace(each, configure=lambda _: config) if each.name == KERNEL else each
                     for each in choose.REGISTRY)  # fmt: skip
    with mock.patch.object(choose, "REGISTRY", registry):
        return product(gradient, weight)


if __name__ == "__main__":
    main()
