"""How fast is one MLP of gpt-oss-20b (router and experts) by number of tokens, beside bf16 and vLLM's kernels?

The layer is transformers' own, with random weights: 32 experts of 2880 x 2880, four for each token. "bf16" is the layer
compiled by Inductor. "fp4compile" is the layer with its experts packed in MXFP4, as gpt-oss was published, and 16-bit
activations. "triton_kernels" are the kernels that vLLM calls for it on Hopper (routing, both matmuls, the gate; weights
in MXFP4), from the folder PEER; the wheel vllm==0.20.0 has it as vllm/third_party/triton_kernels, in plain Python. All
read the same number of bytes of weights; triton_kernels' contents are random. Each column is one CUDA graph, replayed
in turns, and medians count. Microseconds.

    python -m benchmarks.gpt_oss_layer [--tokens 1 64 1024] [--peer PEER] [--out FILE]
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import fp4compile
from benchmarks import common
from benchmarks.common import graph_times

EXPERTS, HIDDEN, CHOSEN = 32, 2880, 4
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
RECIPE = {"recipe": "mxfp4", "fprop_x": "none", "min_m": 1}
Layer = Callable[[torch.Tensor], object]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--peer", type=Path, help="the folder that holds triton_kernels")
    parser.add_argument("--replays", type=int, default=7)
    args = parser.parse_args()
    plain, packed = _layer(), _layer()
    fp4compile.pack_(packed, RECIPE)
    peer = None if args.peer is None else _triton_kernels(args.peer, plain)
    rows = []
    for tokens in args.tokens:
        rows.append({"tokens": tokens, **_times(args, tokens, plain, packed, peer)})
        print(rows[-1], file=sys.stderr, flush=True)
    common.publish(args, {"replays": args.replays, "peer": "vllm 0.20.0's triton_kernels" if peer else None}, rows)


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


def _triton_kernels(folder: Path, layer: torch.nn.Module) -> Layer:
    """The layer by triton_kernels, with the router of `layer` and random codes."""
    sys.path.insert(0, str(folder))
    import triton_kernels.matmul_ogs_details.opt_flags as opt_flags
    from triton_kernels.matmul_ogs import (
        FlexCtx,
        FnSpecs,
        FusedActivation,
        GatherIndx,
        PrecisionConfig,
        RoutingData,
        ScatterIndx,
        matmul_ogs,
    )
    from triton_kernels.numerics import InFlexData
    from triton_kernels.swiglu import swiglu_fn
    from triton_kernels.tensor import FP4, convert_layout, make_ragged_tensor_metadata, wrap_torch_tensor
    from triton_kernels.tensor_details import layout
    from triton_kernels.topk import topk

    opt_flags.update_opt_flags_constraints({"split_k": 1})  # as vLLM does on Hopper
    of_codes, codes_options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    of_scales, scales_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)

    def weights(n: int) -> tuple:
        codes = torch.randint(0, 256, (EXPERTS, n, HIDDEN // 2), device="cuda", dtype=torch.uint8)
        scales = torch.randint(118, 125, (EXPERTS, n, HIDDEN // 32), device="cuda", dtype=torch.uint8)
        codes = convert_layout(wrap_torch_tensor(codes.mT, dtype=FP4), of_codes, **codes_options)
        scales = convert_layout(wrap_torch_tensor(scales.mT), of_scales, **scales_options)
        config = PrecisionConfig(weight_scale=scales, flex_ctx=FlexCtx(rhs_data=InFlexData()))
        return codes, torch.zeros(EXPERTS, n, device="cuda"), config

    (up, up_bias, up_config), (down, down_bias, down_config) = weights(2 * HIDDEN), weights(HIDDEN)
    gate = FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"), reduction_n=2), (1.702, 7.0))

    def run(x: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(x, layer.router.weight, layer.router.bias)
        chosen = topk(logits, CHOSEN, apply_softmax=True)
        into, out_of = chosen.mask_metadata.row_sorted_indx, chosen.mask_metadata.col_sorted_indx
        groups = make_ragged_tensor_metadata(chosen.mask_metadata.col_sum, into.shape[0])
        factors = chosen.vals.flatten()[out_of]
        routing = RoutingData(factors, groups.block_sizes, EXPERTS, CHOSEN, groups)
        inner = matmul_ogs(x, up, up_bias, routing, gather_indx=GatherIndx(out_of, into), precision_config=up_config,
                           fused_activation=gate)  # fmt: skip
        return matmul_ogs(inner, down, down_bias, routing, scatter_indx=ScatterIndx(into, out_of),
                          precision_config=down_config, gammas=factors)  # fmt: skip

    return run


if __name__ == "__main__":
    main()
