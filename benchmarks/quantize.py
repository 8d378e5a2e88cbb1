"""What quantising costs against a device copy of the same bytes, and against torchao's compiled quantisers.

    python -m benchmarks.quantize [--only both ...] --out benchmarks/results/quantize_h200.json

Bytes: each input read once (twice for a dynamic two-level format), each output written once. All times are medians of
CUDA graph replays, inputs and outputs on the device. "of copy" is the copy's time over the kernel's.
"""

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks import common
from fp4compile.formats.formats import SCALE_RULES
from fp4compile.ops.quantize import quantize_kernels

LARGE = ((8192, 8192), (16384, 16384))
SMALL = tuple((rows, cols) for rows in (1, 16, 64) for cols in (4096, 16384))
REPLAYS = 21
LARGEST_COPY = 800_000_000


def graph_time(run: Callable[[], object], calls: int) -> float:
    """Microseconds a call: the median replay of a CUDA graph of `calls` calls."""
    return common.graph_time([run] * calls, REPLAYS)


def copy_time(nbytes: int, calls: int) -> float:
    """Microseconds of a device copy that reads and writes `nbytes` together.

    One of more than LARGEST_COPY is taken to run at the rate of one of that size: PyTorch copies larger tensors at two
    thirds of the rate.
    """
    measured = min(nbytes, LARGEST_COPY)
    source = torch.empty(measured // 4096 * 256, dtype=torch.int64, device="cuda")  # bytes, and odd sizes, copy slower
    target = torch.empty_like(source)
    return graph_time(lambda: target.copy_(source), calls) * nbytes / measured


@triton.jit
def empty_kernel(ptr, ON: tl.constexpr):
    if ON:
        tl.store(ptr, 0)


def nbytes(outputs) -> int:
    """Bytes of a tensor, or of all tensors in a sequence."""
    if isinstance(outputs, torch.Tensor):
        return outputs.numel() * outputs.element_size()
    return sum(nbytes(output) for output in outputs if output is not None)


def cases() -> list[tuple[str, str, Callable, int]]:
    """(name, format, call, times the input is read)."""

    def static(x, format):
        return quantize_kernels(x, format, outer=STATIC[0])

    seed, down, every = torch.tensor(1, device="cuda"), (-2,), (-1, -2)
    rows, columns, both = quantize_kernels, partial(quantize_kernels, dim=down), partial(quantize_kernels, dim=every)
    swizzled = partial(quantize_kernels, layout="swizzled")
    stochastic = partial(quantize_kernels, seed=seed)
    transformed = partial(quantize_kernels, dim=down, hadamard=True)
    transformed_stochastic = partial(quantize_kernels, dim=down, hadamard=True, seed=seed)
    activations = partial(quantize_kernels, dim=every, hadamard=True)
    gradients = partial(quantize_kernels, dim=every, hadamard=True, seed=seed)

    return [
        ("rows", "mxfp8", rows, 1), ("rows, swizzled", "mxfp8", swizzled, 1), ("32x32", "mxfp8_32x32", rows, 1),
        ("rows", "nvfp4_one_level", rows, 1), ("rows, swizzled", "nvfp4_one_level", swizzled, 1),
        ("row-scaled", "nvfp4_rowwise", rows, 1), ("row-scaled", "float8_rowwise", rows, 1),
        ("rows", "mxfp4", rows, 1), ("two-level, static", "nvfp4", static, 1), ("two-level, dynamic", "nvfp4", rows, 2),
        ("columns", "mxfp8", columns, 1), ("columns", "mxfp4", columns, 1), ("columns", "nvfp4_one_level", columns, 1),
        ("16x16, static", "nvfp4_16x16", static, 1), ("16x16, dynamic", "nvfp4_16x16", rows, 2),
        ("both", "mxfp8", both, 1), ("both", "mxfp8_32x32", both, 1), ("both", "nvfp4_one_level", both, 1),
        ("both", "mxfp4", both, 1), ("both", "float8_rowwise", both, 2), ("both, dynamic", "nvfp4", both, 2),
        ("both, dynamic", "nvfp4_te", both, 2), ("both, dynamic", "nvfp4_16x16", both, 2),
        ("row-scaled columns", "float8_rowwise", columns, 2), ("row-scaled columns", "nvfp4_rowwise", columns, 2),
        ("rows, stochastic", "nvfp4_te", stochastic, 2), ("columns, Hadamard", "nvfp4_te", transformed, 2),
        ("columns, Hadamard, stochastic", "nvfp4_te", transformed_stochastic, 2),
        ("both, Hadamard", "nvfp4_te", activations, 2), ("both, Hadamard, stochastic", "nvfp4_te", gradients, 2),
    ]  # fmt: skip


STATIC: list[torch.Tensor] = []


def torchao_functions() -> dict[tuple[str, str], Callable]:
    """torchao's quantisers of the same operations, to be compiled; none where it is not installed."""
    try:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
    except ImportError:
        return {}
    rceil = ScaleCalculationMode.RCEIL

    def dynamic(x):
        return nvfp4_quantize(x, 16, per_tensor_amax_to_scale(x.abs().amax()))

    return {
        ("rows", "mxfp8"): lambda x: to_mx(x, torch.float8_e4m3fn, 32, rceil),
        ("columns", "mxfp8"): lambda x: to_mx(x.t().contiguous(), torch.float8_e4m3fn, 32, rceil),
        ("rows", "mxfp4"): lambda x: to_mx(x, torch.float4_e2m1fn_x2, 32, rceil),
        ("rows", "nvfp4_one_level"): lambda x: nvfp4_quantize(x, 16),
        ("two-level, dynamic", "nvfp4"): dynamic,
    }


def torchao_quantizers() -> dict[tuple[str, str], Callable]:
    """`torchao_functions`, compiled."""
    return {key: torch.compile(function, dynamic=False) for key, function in torchao_functions().items()}


def measure_large(shapes, only: list[str] | None = None) -> list[dict]:
    """only: cases whose names begin so; all where it is not given."""
    rows = []
    for shape in shapes:
        x = torch.randn(shape, device="cuda", dtype=torch.float32).bfloat16()
        STATIC[:] = [torch.tensor(0.002, device="cuda")]
        torch._dynamo.reset()
        peers = torchao_quantizers()
        for name, format, call, reads in cases():
            if only and not name.startswith(tuple(only)):
                continue
            moved = reads * x.numel() * x.element_size() + nbytes(call(x, format))
            copy = copy_time(moved, 10)
            ours = graph_time(partial(call, x, format), 10)
            peer = peers.get((name, format))
            theirs = None if peer is None else graph_time(partial(peer, x), 5)
            rows.append({
                "case": f"{name}, {format}", "shape": f"{shape[0]}x{shape[1]}", "MB": round(moved / 1e6, 1),
                "copy us": round(copy, 1), "us": round(ours, 1), "TB/s": round(moved / ours / 1e6, 2),
                "of copy": round(copy / ours, 3), "torchao us": theirs and round(theirs, 1),
            })  # fmt: skip
    return rows


def measure_small(shapes) -> list[dict]:
    """Launch-bound sizes: microseconds beyond an empty kernel and a copy of the bytes at a large copy's rate."""
    flag = torch.zeros((), dtype=torch.int32, device="cuda")
    empty = graph_time(lambda: empty_kernel[(1,)](flag, ON=False), 50)
    rate = 1e9 / copy_time(int(1e9), 10)  # bytes a microsecond
    rows = []
    for shape in shapes:
        x = torch.randn(shape, device="cuda").bfloat16()
        for format in ("nvfp4_one_level", "nvfp4_rowwise", "mxfp8", "nvfp4"):
            call = partial(quantize_kernels, x, format)
            moved = (2 if format == "nvfp4" else 1) * x.numel() * 2 + nbytes(call())
            ours = graph_time(call, 50)
            rows.append({
                "case": f"rows, {format}", "shape": f"{shape[0]}x{shape[1]}", "MB": round(moved / 1e6, 3),
                "empty us": round(empty, 2), "copy us": round(moved / rate, 2), "us": round(ours, 2),
                "beyond us": round(ours - empty - moved / rate, 2),
            })  # fmt: skip
    return rows


def measure_rules(shape) -> list[dict]:
    """NVFP4 weights with a static tensor scale, by each rule for block scales."""
    x, outer = torch.randn(shape, device="cuda").bfloat16(), torch.tensor(0.002, device="cuda")
    calls = {rule: partial(quantize_kernels, x, "nvfp4", outer=outer, scale_rule=rule) for rule in SCALE_RULES}
    return [
        {"scales": rule, "shape": f"{shape[0]}x{shape[1]}", "us": graph_time(call, 5)} for rule, call in calls.items()
    ]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--only", nargs="+", help="large shapes: cases whose names begin so")
    args = parser.parse_args()
    settings = {"replays": REPLAYS, "dtype": "bfloat16", "statistic": "median of CUDA graph replays"}
    parts = {"rows": measure_large(LARGE, args.only), "small": measure_small(SMALL), "rules": measure_rules(LARGE[0])}
    common.publish_parts(args, settings, parts)


if __name__ == "__main__":
    main()
