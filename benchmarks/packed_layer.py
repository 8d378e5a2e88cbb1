"""How fast is a layer of packed NVFP4 experts on Hopper, compiled, with 65 to 1024 tokens an expert?

Tokens are gathered in the order of their experts and multiplied by gate and up; silu(gate) * up is multiplied by down
(`F.grouped_mm`). The routing is drawn before: each token goes to --picked experts at random. Sizes are hidden x inner x
experts: Qwen3-30B-A3B's, and eight experts of Mixtral's size.

"bf16" is compiled by Inductor alone, the others are packed in place (`pack_`). A time is the median replay of a CUDA
graph, all cases of a row in turns. A column with "x" is the time of bf16 over that of the case.

    python -m benchmarks.packed_layer [--tokens 65 128 256 512] [--shapes 2048x768x128] [--out FILE]
"""

import argparse
import gc
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import fp4compile
from benchmarks import common

PACKED = "packed "
CASES = ("bf16", "packed nvfp4_weight_only", "packed nvfp4_one_level")
SHAPES = ("2048x768x128", "4096x14336x8")
TOKENS = (65, 96, 128, 192, 256, 384, 512, 1024)  # of an expert, on average


class Layer(nn.Module):
    """Experts in bf16. x: [tokens, hidden]; order: the token of each row; offs: where the rows of each expert end."""

    def __init__(self, hidden: int, inner: int, count: int):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(count, 2 * inner, hidden).mul_(hidden**-0.5).bfloat16())
        self.down = nn.Parameter(torch.randn(count, hidden, inner).mul_(inner**-0.5).bfloat16())

    def forward(self, x: torch.Tensor, order: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        gate, up = F.grouped_mm(x[order], self.gate_up.mT, offs=offs).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.down.mT, offs=offs)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="hidden x inner x experts")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of an expert, on average")
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--replays", type=int, default=9)
    args = parser.parse_args()
    rows = [row for shape in args.shapes for row in rows_of(shape, args)]
    common.publish(args, {"replays": args.replays, "unit": "us"}, rows)


@torch.no_grad()
def rows_of(shape: str, args: argparse.Namespace) -> list[dict]:
    """A row for each number of tokens."""
    hidden, inner, experts = map(int, shape.split("x"))
    layers = {case: layer_of(case, hidden, inner, experts, args.device) for case in args.cases}
    rows = []
    for each in args.tokens:
        picked = min(experts // 4, 8)
        sizes = argparse.Namespace(tokens=each * experts // picked, experts=experts, picked=picked)
        with torch.device(args.device):
            inputs = torch.randn(sizes.tokens, hidden).bfloat16(), *routing(sizes)
        calls = {case: [partial(compiled(case, layer), *inputs)] for case, layer in layers.items()}
        times = dict(zip(calls, common.graph_times(calls.values(), args.replays), strict=True))
        ratios = {f"{case} x": times["bf16"] / times[case] for case in args.cases[1:]}
        rows.append({"layer": shape, "tokens": each, **times, **ratios})
        print(rows[-1], flush=True)
        torch._dynamo.reset()
        gc.collect()
    return rows


def routing(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """(the tokens in the order of their experts, the end of each expert's rows)."""
    experts = torch.rand(args.tokens, args.experts).topk(args.picked).indices.flatten()
    offs = experts.bincount(minlength=args.experts).cumsum(0).to(torch.int32)
    return experts.argsort(stable=True) // args.picked, offs


def layer_of(case: str, hidden: int, inner: int, experts: int, device: str) -> Layer:
    torch.manual_seed(0)
    with torch.device(device):
        layer = Layer(hidden, inner, experts)
    if case.startswith(PACKED):
        fp4compile.pack_(layer, case.removeprefix(PACKED), contracted={"gate_up": -1, "down": -1})
    return layer


def compiled(case: str, layer: Layer) -> Callable:
    backend = "inductor" if case == "bf16" else fp4compile.backend(case.removeprefix(PACKED), strict=True)
    return torch.compile(layer, backend=backend, dynamic=False)


if __name__ == "__main__":
    main()
