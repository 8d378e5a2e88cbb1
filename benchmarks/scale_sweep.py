"""What the FP8 scale sweep costs against a copy of the same bytes and against ModelOpt's kernel, and what it gains.

    python -m benchmarks.scale_sweep --out benchmarks/results/scale_sweep_h200.json

"sweep": `fp4compile.scale_sweep`, block maxima alone. "mse": the codes too, without the pass that finds the tensor's
amax ("plain" likewise). All times are medians of CUDA graph replays; on a CPU, of plain calls. ModelOpt's are medians
of eager calls between CUDA events, after its autotuning: its function cannot be captured, because it indexes by a mask.
It takes milliseconds, so that what the host needs to issue a call is little of it. "error": the squared error of "mse"
over that of "plain".

The second table counts, for weights of several kinds, the blocks whose best amax is not ModelOpt's. Both scales of such
a block are compared by their squared errors in float64. "ties": the errors differ by 1e-6 of themselves at most; of
them "adjacent": the scales are neighbours. Most others are 1.5 times each other: where one large element makes the
error, it becomes 6 by one and 4 by the other. "better" and "worse": ours has the smaller or the larger error by more
than a tie. Both sum in float32, which is not exact to 1e-6 where elements are float32. "worse" has to be 0. "apart,
1e-6": the largest difference.

ModelOpt need not have its dependencies (`pip install --no-deps nvidia-modelopt`).
"""

import importlib
import importlib.util
import itertools
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator

import torch

import fp4compile
from benchmarks import common

REPLAYS = 21
CALLS = 5
TIE = 1e-6  # of the squared error
MARGIN = 20  # how many times faster than ModelOpt's the sweep has to be
DTYPES = (torch.bfloat16, torch.float32)
_MODELOPT = "modelopt.torch.kernels.quantization.gemm.nvfp4_fp8_sweep"
# Packages on the way to ModelOpt's kernel. Empty ones stand for them, because they import much that it does not need.
_PARENTS = (
    "modelopt", "modelopt.torch", "modelopt.torch.kernels", "modelopt.torch.kernels.quantization",
    "modelopt.torch.kernels.quantization.gemm", "modelopt.torch.kernels.quantization.common",
    "modelopt.torch.quantization", "modelopt.torch.quantization.utils",
)  # fmt: skip

Sweep = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # a weight and its amax -> the amax of each block


def modelopt() -> Sweep | None:
    """ModelOpt's kernel; None where ModelOpt is not installed."""
    found = importlib.util.find_spec("modelopt")
    if found is None or not found.submodule_search_locations:
        return None
    root = found.submodule_search_locations[0]
    for name in _PARENTS:
        package = types.ModuleType(name)
        package.__path__ = ["/".join([root, *name.split(".")[1:]])]
        sys.modules[name] = package
    return importlib.import_module(_MODELOPT).nvfp4_fp8_scale_sweep


def microseconds(call: Callable[[], object], device: str) -> float:
    if device.startswith("cuda"):
        return common.graph_time([call] * CALLS, REPLAYS)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def eager_microseconds(call: Callable[[], object]) -> float:
    """The median of calls between CUDA events, for what a CUDA graph cannot hold."""
    times = []
    for _ in range(REPLAYS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times[2:])  # the first tune and compile


# ---------------------------------------------------------------- times


def measure(shape: tuple[int, int], dtype: torch.dtype, device: str, peer: Sweep | None) -> dict:
    generator = torch.Generator().manual_seed(0)
    w = (0.02 * torch.randn(shape, generator=generator)).to(device, dtype)
    top = w.float().abs().amax()
    outer = top / 2688.0
    moved = w.numel() * w.element_size() + 4 * w.numel() // 16
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def quantized(scales: str) -> fp4compile.BlockScaled:
        return fp4compile.quantize(w, "nvfp4", outer=outer, scales=scales)

    def error(scales: str) -> float:
        return (quantized(scales).dequantize() - w.float()).square().sum().item()

    times = {
        "copy us": microseconds(lambda: target.copy_(source), device),
        "sweep us": microseconds(lambda: fp4compile.scale_sweep(w, top), device),
        "mse us": microseconds(lambda: quantized("mse"), device),
        "4/6 us": microseconds(lambda: quantized("four_over_six"), device),
        "plain us": microseconds(lambda: quantized("amax"), device),
        "ModelOpt us": None if peer is None else eager_microseconds(lambda: peer(w, top)),
    }
    rounded = {name: taken and round(taken, 1) for name, taken in times.items()}
    theirs = times["ModelOpt us"]
    name = str(dtype).removeprefix("torch.")
    return {
        "weight": f"{shape[0]}x{shape[1]} {name}", **rounded,
        "faster": theirs and round(theirs / times["sweep us"], 1), "error": round(error("mse") / error("amax"), 3),
    }  # fmt: skip


# ---------------------------------------------------------------- values


def kinds(shape: tuple[int, int], device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights in float32: normal, Student's t of three degrees, of a wide range in two ways, and with zero blocks."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*lead: int) -> torch.Tensor:
        return torch.randn(*lead, *shape, generator=generator, device=device)

    def uniform(columns: int) -> torch.Tensor:
        return torch.rand(shape[0], columns, generator=generator, device=device)

    yield "normal", normal()
    yield "heavy-tailed", normal() / normal(3).square().mean(0).sqrt()
    yield "wide range of rows", normal() * torch.exp2(-20 * uniform(1))
    yield "wide range of elements", normal() * torch.exp2(-20 * uniform(shape[1]))
    yield "30 % zero blocks", normal() * (uniform(shape[1] // 16) > 0.3).repeat_interleave(16, 1)


def disagreements(w: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> dict[str, float]:
    """Blocks of a weight whose best amax differs, [blocks] each: how many, of what kind, and their errors."""
    top = w.double().abs().amax()
    bytes_of = [(best / top.float() * 448.0).to(torch.float8_e4m3fn).view(torch.uint8).int() for best in (ours, theirs)]
    differ = bytes_of[0] != bytes_of[1]
    blocks = w.reshape(-1, 16)[differ].double().abs()
    errors = [_squared_error(blocks, byte[differ], top) for byte in bytes_of]
    larger = torch.maximum(*errors)
    apart = torch.where(larger == 0, 0.0, (errors[0] - errors[1]).abs() / larger)
    tie = apart <= TIE
    adjacent = tie & ((bytes_of[0] - bytes_of[1])[differ].abs() == 1)
    smaller = errors[0] < errors[1]
    counted = {"differ": differ, "ties": tie, "adjacent": adjacent, "better": ~tie & smaller, "worse": ~tie & ~smaller}
    return {name: int(found.sum()) for name, found in counted.items()} | {
        "apart, 1e-6": 1e6 * max(apart.tolist(), default=0.0)
    }


def _squared_error(blocks: torch.Tensor, byte: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """That of blocks [B, 16] of magnitudes, in float64, quantised by the E4M3 scales of these bytes [B]."""
    step = (byte.to(torch.uint8).view(torch.float8_e4m3fn).double() * top / 2688.0).unsqueeze(-1)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=blocks.device)
    rests = (blocks.unsqueeze(-1) - grid * step.unsqueeze(-1)).abs().amin(-1)
    return rests.square().sum(-1)


def compare(shape: tuple[int, int], device: str, peer: Sweep) -> Iterator[dict]:
    for (kind, exact), dtype in itertools.product(kinds(shape, device), DTYPES):
        w = exact.to(dtype)
        top = w.float().abs().amax()
        found = disagreements(w, fp4compile.scale_sweep(w, top).flatten(), peer(w, top))
        yield {"weight": f"{kind}, {str(dtype).removeprefix('torch.')}", "blocks": w.numel() // 16, **found}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--shape", default="8192x4096", help="rows x columns of the weight; columns: a multiple of 16")
    args = parser.parse_args()
    rows, columns = map(int, args.shape.split("x"))
    if columns % 16:
        parser.error(f"--shape {args.shape}: expected columns that are a multiple of 16")
    peer = modelopt() if args.device.startswith("cuda") else None
    settings = {"replays": REPLAYS, "weights": "0.02 * randn", "statistic": "median",
                "ModelOpt": "eager calls between CUDA events", "tie": TIE, "margin": MARGIN}  # fmt: skip
    times = [measure((rows, columns), dtype, args.device, peer) for dtype in DTYPES]
    values = [] if peer is None else list(compare((rows, columns), args.device, peer))
    common.publish_parts(args, settings, {"rows": times, "values": values})
    for problem in problems(times, values):
        print(problem, file=sys.stderr)


def problems(times: list[dict], values: list[dict]) -> list[str]:
    """What falls short: a sweep that is not MARGIN times as fast as ModelOpt's, a block that is worse than by a tie."""
    slow = [f"{row['weight']}: {row['faster']} times faster, expected {MARGIN}" for row in times
            if row["faster"] is not None and row["faster"] < MARGIN]  # fmt: skip
    return slow + [
        f"{row['weight']}: {row['worse']} blocks are worse by more than a tie" for row in values if row["worse"]
    ]


if __name__ == "__main__":
    main()
