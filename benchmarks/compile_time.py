"""How much longer does compiling take under fp4compile than under Inductor alone?

A Llama-style model of 4 layers, forward and backward, in a fresh process with empty caches for every measurement.
What is timed is the first training step less the second, after Inductor has been warmed up on a trivial function,
so that imports and the work of the step itself are not counted. Backends take turns; medians are compared.

    python -m benchmarks.compile_time [--recipes mxfp8 nvfp4] [--runs 3] [--device D] [--out FILE]
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile

import torch

import fp4compile
from benchmarks import common
from fp4compile.cli.demo import Llama, ModelSizes, logits_of

SHAPE = ModelSizes(hidden=256, heads=4, inner=512, layers=4)
BATCH, LENGTH = 4, 64


def measure(backend_name: str, device: str) -> float:
    """Seconds of compiling, in this process."""
    torch.set_num_threads(1)  # threads of a busy machine make the two steps unequal, and their difference noise
    torch.manual_seed(0)
    warm_up(device)
    model = Llama(SHAPE).to(device)
    chosen = "inductor" if backend_name == "inductor" else fp4compile.backend(backend_name, strict=True)
    compiled = torch.compile(model, backend=chosen)
    tokens = torch.randint(256, (BATCH, LENGTH), device=device)

    def step() -> None:
        logits_of(compiled, tokens).float().square().mean().backward()

    first, second = (common.seconds(step, device) for _ in range(2))
    return first - second


def warm_up(device: str) -> None:
    x = torch.ones(64, device=device, requires_grad=True)
    torch.compile(torch.sin)(x).sum().backward()


def measure_in_fresh_process(backend_name: str, device: str) -> float:
    with tempfile.TemporaryDirectory() as caches:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
            "TRITON_CACHE_DIR": f"{caches}/triton",
        }
        command = [sys.executable, "-m", "benchmarks.compile_time", "--device", device, "--one", backend_name]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--recipes", nargs="+", default=["mxfp8", "nvfp4"])
    parser.add_argument("--runs", type=int, default=3, help="processes a backend")
    parser.add_argument("--one", help="measure this backend in this process, print the seconds, and stop")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.device)))
        return
    seconds: dict[str, list[float]] = {name: [] for name in ("inductor", *args.recipes)}
    for _ in range(args.runs):
        for name, measured in seconds.items():
            measured.append(measure_in_fresh_process(name, args.device))
            print(f"{name}: {measured[-1]:.1f} s", file=sys.stderr)
    baseline = statistics.median(seconds["inductor"])
    rows = [
        {
            "backend": name,
            "median s": statistics.median(measured),
            "min s": min(measured),
            "max s": max(measured),
            "ratio": statistics.median(measured) / baseline,
        }
        for name, measured in seconds.items()
    ]
    common.publish(args, {"layers": SHAPE.layers, "hidden": SHAPE.hidden, "runs": args.runs}, rows)


if __name__ == "__main__":
    main()
