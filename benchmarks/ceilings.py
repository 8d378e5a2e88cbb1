"""What the GPU reaches at best: copies of the device, and the library's products in bf16 and in rowwise FP8.

    python -m benchmarks.ceilings [--replays 9] [--out FILE]

Every time is the median of replays of a CUDA graph. The operands of products rotate, so that the L2 cache does not hold
them. The other benchmarks' figures are to be read beside these, measured in the same run.
"""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks import common
from benchmarks.linear import ROTATED_BYTES, SHAPES
from benchmarks.quantize import copy_time

COPIED = tuple(10**power for power in range(5, 10))  # bytes, read and written together
PRODUCTS = (
    *((size, size, size) for size in (1024, 2048, 4096, 8192)),
    *((m, n, k) for n, k in SHAPES for m in (16, 64, 512, 4096)),
)
CALLS = 6


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--replays", type=int, default=9)
    args = parser.parse_args()
    rows = [_copy(nbytes) for nbytes in COPIED]
    for sizes in PRODUCTS:
        for what, make in (("bf16 product", _bf16), ("FP8 rowwise product", _float8)):
            time = common.graph_time(make(*sizes), args.replays)
            rows.append(_row(what, "x".join(map(str, sizes)), time, 2e-6 * sizes[0] * sizes[1] * sizes[2] / time, None))
    common.publish(args, {"replays": args.replays, "unit": "us"}, rows)


def _copy(nbytes: int) -> dict:
    time = copy_time(nbytes, 10)
    return _row("copy", f"{nbytes} bytes", time, None, nbytes / time / 1e6)


def _row(what: str, shape: str, time: float, tflops: float | None, rate: float | None) -> dict:
    return {"what": what, "shape": shape, "us": time, "TFLOP/s": tflops, "TB/s": rate}


def _pairs(m: int, n: int, k: int, itemsize: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Operands [m, k] and [n, k]: as many pairs as are more than the L2 cache, at least CALLS."""
    copies = max(CALLS, min(ROTATED_BYTES // (itemsize * (m * k + n * k)), 64))
    x = common.random(m, k)
    return [(x, common.random(n, k)) for _ in range(copies)]


def _bf16(m: int, n: int, k: int) -> list[Callable]:
    return [partial(torch.mm, x, w.t()) for x, w in _pairs(m, n, k, 2)]


def _float8(m: int, n: int, k: int) -> list[Callable]:
    ones = [torch.ones(shape, device="cuda") for shape in ((m, 1), (1, n))]
    multiply = partial(torch._scaled_mm, scale_a=ones[0], scale_b=ones[1], out_dtype=torch.bfloat16)
    return [
        partial(multiply, x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn).t()) for x, w in _pairs(m, n, k, 1)
    ]  # fmt: skip


if __name__ == "__main__":
    main()
