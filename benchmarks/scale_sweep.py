"""What the FP8 scale sweep costs against a copy of the same bytes and against ModelOpt's kernel, and what it gains.

    python -m benchmarks.scale_sweep --out benchmarks/results/scale_sweep_h200.json

"sweep": `fp4compile.scale_sweep`, block maxima alone. "mse": the codes too, without the pass that finds the tensor's
amax ("plain" likewise). All times are medians of CUDA graph replays; on a CPU, of plain calls. "error": the squared
error of "mse" over that of "plain". ModelOpt need not have its dependencies: `pip install --no-deps nvidia-modelopt`.
"""

import importlib
import importlib.util
import statistics
import sys
import time
import types
from collections.abc import Callable

import torch

import fp4compile
from benchmarks import common

REPLAYS = 21
CALLS = 5
DTYPES = (torch.bfloat16, torch.float32)
_MODELOPT = "modelopt.torch.kernels.quantization.gemm.nvfp4_fp8_sweep"
# Packages on the way to ModelOpt's kernel. Empty ones stand for them, because they import much that it does not need.
_PARENTS = (
    "modelopt", "modelopt.torch", "modelopt.torch.kernels", "modelopt.torch.kernels.quantization",
    "modelopt.torch.kernels.quantization.gemm", "modelopt.torch.kernels.quantization.common",
    "modelopt.torch.quantization", "modelopt.torch.quantization.utils",
)  # fmt: skip


def modelopt_sweep() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """ModelOpt's kernel, as a function of a weight and its amax; None where ModelOpt is not installed."""
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


def measure(shape: tuple[int, int], dtype: torch.dtype, device: str) -> dict:
    generator = torch.Generator().manual_seed(0)
    w = (0.02 * torch.randn(shape, generator=generator)).to(device, dtype)
    top = w.float().abs().amax()
    outer = top / 2688.0
    moved = w.numel() * w.element_size() + 4 * w.numel() // 16
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    peer = modelopt_sweep() if device.startswith("cuda") else None

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
        "ModelOpt us": None if peer is None else microseconds(lambda: peer(w, top), device),
    }
    rounded = {name: taken and round(taken, 1) for name, taken in times.items()}
    theirs = times["ModelOpt us"]
    name = str(dtype).removeprefix("torch.")
    return {
        "weight": f"{shape[0]}x{shape[1]} {name}", **rounded,
        "faster": theirs and round(theirs / times["sweep us"], 1), "error": round(error("mse") / error("amax"), 3),
    }  # fmt: skip


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--shape", default="8192x4096", help="rows x columns of the weight")
    args = parser.parse_args()
    rows, columns = map(int, args.shape.split("x"))
    settings = {"replays": REPLAYS, "weights": "0.02 * randn", "statistic": "median"}
    common.publish(args, settings, [measure((rows, columns), dtype, args.device) for dtype in DTYPES])


if __name__ == "__main__":
    main()
