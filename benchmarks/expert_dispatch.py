"""Tokens with several experts on one GPU: quantised once for all their experts, or once for each of them.

Prefill of a layer of experts with the sizes of Qwen3-30B-A3B: tokens are gathered in the order of their experts, and
multiplied by gate and up (`F.grouped_mm`). The routing is drawn before. "packed" packs the experts (`pack_`).
", codes": tokens are quantised first, and codes and scales are gathered; without it, the pass `quantize_before_index`
is off.

Microseconds of a call, by the profiler: "quantise us" of the quantisers, which read tokens alone; "gather us" of the
kernels that gather rows; "device us" of all kernels. "quantised rows" and "moved MB" are of the graph: what the
quantisers read, and what the gathers write. Equal sums show equal bits.

    python -m benchmarks.expert_dispatch [--cases bf16 float8_rowwise "float8_rowwise, codes"] [--out FILE]
"""

import argparse
import gc
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import config as inductor

import fp4compile
from benchmarks import common

CASES = ("bf16", "float8_rowwise", "float8_rowwise, codes", "packed nvfp4_one_level", "packed nvfp4_one_level, codes",
         "packed nvfp4_rowwise", "packed nvfp4_rowwise, codes")  # fmt: skip
PACKED, CODES, PASS = "packed ", ", codes", "quantize_before_index"
CALLS = 5  # that the profiler sees
_BYTES = {"u8": 1, "bf16": 2, "f16": 2, "f32": 4, "f8e4m3fn": 1}
# Nodes of a dumped graph: gathers of rows, and quantisers with what they read.
_GATHER = re.compile(r'"(\w+)\[([\d, ]+)\].*= torch\.ops\.aten\.index\.Tensor\(')
_QUANTISER = re.compile(r"= torch\.ops\.fp4compile\.quantize\.default\((\w+),")


class Experts(nn.Module):
    """Gate and up of all experts, in bf16. x: [tokens, K]; order: the token of each row that is multiplied."""

    def __init__(self, count: int, n: int, k: int):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(count, n, k).mul_(k**-0.5).bfloat16())

    def forward(self, x: torch.Tensor, order: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(x[order], self.gate_up.mT, offs=offs)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--picked", type=int, default=8, help="experts of a token")
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--hidden", type=int, default=2048)
    args = parser.parse_args()
    settings = {name: getattr(args, name) for name in ("tokens", "experts", "picked", "inner", "hidden")}
    parts: dict[str, list[dict]] = {"rows": [], "kernels": []}
    for case in args.cases:
        row, kernels = measure(case, args)
        parts["rows"].append(row)
        parts["kernels"] += kernels
        print(row, file=sys.stderr, flush=True)
        common.write(args, settings, parts)
    common.publish_parts(args, settings, parts)


@torch.no_grad()
def measure(case: str, args: argparse.Namespace) -> tuple[dict, list[dict]]:
    """The times of a call, what its graph quantises and moves, and the time of each kernel."""
    torch._dynamo.reset()
    gc.collect()
    recipe = case.removeprefix(PACKED).removesuffix(CODES)
    torch.manual_seed(0)
    with torch.device(args.device):
        model = Experts(args.experts, 2 * args.inner, args.hidden)
        inputs = torch.randn(args.tokens, args.hidden).bfloat16(), *routing(args)
    if case.startswith(PACKED):
        fp4compile.pack_(model, recipe, contracted={"gate_up": -1})
    fp4compile.config.disabled_passes = [PASS] * (not case.endswith(CODES))
    backend = "inductor" if recipe == "bf16" else fp4compile.backend(recipe, strict=True)
    compiled = torch.compile(model, backend=backend, dynamic=False)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", FP4COMPILE_DUMP=folder):
        with inductor.patch(force_disable_caches=True):  # a graph that comes from a cache passes no pass
            y = compiled(*inputs)
        graphs = [path.read_text() for path in sorted(Path(folder).glob("*_fuse_quantize_before.py"))]
    quantised, moved = work_of(*graphs) if recipe != "bf16" else (0, inputs[1].numel() * args.hidden * 2)
    for _ in range(3 * args.device.startswith("cuda")):
        compiled(*inputs)
    kernels = common.kernels_of(lambda: compiled(*inputs), args.device, CALLS)
    times = {name: time for name, (time, _) in kernels.items()}
    row = {
        "case": case,
        "device us": sum(times.values()),
        "quantise us": sum(time for name, time in times.items() if re.search("quantize|amax", name)),
        "gather us": sum(time for name, time in times.items() if re.search("index|gather", name)),
        "quantised rows": quantised,
        "moved MB": moved / 1e6,
        "sum": y.double().sum().item(),
    }
    return row, [{"case": case, "kernel": name, "us": time} for name, time in times.items()]


def routing(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """(the tokens in the order of their experts, the end of each expert's rows), drawn at random."""
    experts = torch.rand(args.tokens, args.experts).topk(args.picked).indices.flatten()
    offs = experts.bincount(minlength=args.experts).cumsum(0).to(torch.int32)
    return experts.argsort(stable=True) // args.picked, offs


def work_of(graph: str) -> tuple[int, int]:
    """(rows that a graph's quantisers read, bytes that its gathers of rows write)."""
    moved = 0
    for dtype, sizes in _GATHER.findall(graph):
        moved += torch.Size(map(int, sizes.split(","))).numel() * _BYTES[dtype]
    shapes = dict(re.findall(r'(\w+): "\w+\[(\d+)', graph))
    return sum(int(shapes[name]) for name in _QUANTISER.findall(graph)), moved


if __name__ == "__main__":
    main()
