"""How fast is one MLP of gpt-oss-20b (router and experts) by number of tokens, beside bf16 and vLLM's kernels?

The layer is transformers' own, with random weights: 32 experts of 2880 x 2880, four for each token. "bf16" is the layer
compiled by Inductor. "fp4compile" is the layer with its experts packed in MXFP4, as gpt-oss was published, and 16-bit
activations. "triton_kernels" are the kernels that vLLM calls for it on Hopper (routing, both matmuls, the gate; weights
in MXFP4), from the folder PEERS (`benchmarks.peers`). All read the same number of bytes of weights; triton_kernels'
contents are random. Each column is one CUDA graph, replayed in turns, and medians count. Microseconds.

    python -m benchmarks.gpt_oss_layer [--tokens 1 64 1024] [--peers PEERS] [--out FILE]
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import fp4compile
from benchmarks import common, peers
from benchmarks.common import graph_times

EXPERTS, HIDDEN, CHOSEN = 32, 2880, 4
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
RECIPE = {"recipe": "mxfp4", "fprop_x": "none", "min_m": 1}
Layer = Callable[[torch.Tensor], object]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--peers", type=Path, help="the folder of `benchmarks.peers`")
    parser.add_argument("--replays", type=int, default=7)
    args = parser.parse_args()
    plain, packed = _layer(), _layer()
    fp4compile.pack_(packed, RECIPE)
    peer = args.peers and peers.gpt_oss_experts(args.peers, plain.router, EXPERTS, HIDDEN, CHOSEN)
    rows = []
    for tokens in args.tokens:
        rows.append({"tokens": tokens, **_times(args, tokens, plain, packed, peer)})
        print(rows[-1], file=sys.stderr, flush=True)
    common.publish(args, {"replays": args.replays, "peer": f"{peers.VERSION}'s triton_kernels" if peer else None}, rows)


@torch.no_grad()
def _times(args: argparse.Namespace, tokens: int, plain: Layer, packed: Layer, peer: Layer | None) -> dict[str, float]:
    x = common.random(1, tokens, HIDDEN)
    torch._dynamo.reset()
    layers: dict[str, Layer] = {
        "bf16": torch.compile(plain, dynamic=False),
        "fp4compile": torch.compile(packed, dynamic=False, backend=fp4compile.backend(RECIPE)),
    }
    calls = {name: [partial(layer, x)] * 4 for name, layer in layers.items()}
    if peer is not None:
        calls["triton_kernels"] = [partial(peer, x[0])] * 4
    return dict(zip(calls, graph_times(calls.values(), args.replays), strict=True))


def _layer() -> torch.nn.Module:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    config = GptOssConfig(hidden_size=HIDDEN, intermediate_size=HIDDEN, num_local_experts=EXPERTS,
                          num_experts_per_tok=CHOSEN)  # fmt: skip
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    with torch.device("cuda"):
        layer = GptOssMLP(config).to(torch.bfloat16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return layer.eval().requires_grad_(False)


if __name__ == "__main__":
    main()
