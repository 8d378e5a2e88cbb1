"""A step of the first blocks of a Llama-3-8B under tensor and sequence parallelism: with and without moved codes.

Each GPU of the host is a rank. DTensor's `ColwiseParallel`, `RowwiseParallel` and `SequenceParallel` cut the blocks, as
torchtitan does: norms and residuals have a part of each sequence on each rank, attention and MLP a part of the weights.
The blocks are compiled as one graph, without embedding and head, in bf16.

A case is a recipe, and what is switched on: "codes" is the pass `quantize_before_gather`, which gathers codes where the
link is known to be slow (NCCL_P2P_DISABLE=1), "kept" is `weight_cache="always"`, as in "mxfp8, codes, kept". --kind:
"training" is a forward and a backward pass with all gradients; "frozen" has gradients of activations alone, as adapters
need them; "inference" is a forward pass.

"ms": the median time of a step. "sent MB": what a rank sends in a step where its collectives are rings, computed from
their inputs as the profiler sees them; "gathered MB" is the part of the gathers. "collectives": how many there are.
--graphs: with CUDA graphs, because the host bounds short steps otherwise. The profiler sees no collectives in them.

    python -m benchmarks.tensor_parallel [--cases bf16 mxfp8 "mxfp8, codes"] [--kind inference] [--graphs] [--out FILE]
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import LlamaForCausalLM

import fp4compile
from benchmarks import common, ranks, training_step

CASES = ("bf16", "mxfp8", "mxfp8, codes", "nvfp4_one_level", "nvfp4_one_level, codes")
CODES, KEPT = "codes", "kept"


class Blocks(nn.Module):
    """The blocks of a model. x: [batch, a rank's part of the sequence, hidden]."""

    def __init__(self, model: LlamaForCausalLM, length: int):
        super().__init__()
        self.layers = model.model.layers
        positions = torch.arange(length, device=model.device)[None]
        self.cos, self.sin = model.model.rotary_emb(model.lm_head.weight, positions)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, position_embeddings=(self.cos, self.sin))
        return x


def main() -> None:
    parser = common.parser(__doc__)
    ranks.add_options(parser)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--kind", choices=("training", "frozen", "inference"), default="training")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--graphs", action="store_true", help="compile with CUDA graphs")
    ranks.run(parser.parse_args(), measure, ("kind", "layers", "batch", "length", "graphs"))


def measure(case: str, args: argparse.Namespace) -> dict:
    """The time of a step, and what its collectives send."""
    recipe, *switches = case.split(", ")
    model = training_step.model_of(args)
    hidden = model.config.hidden_size
    blocks = cut(Blocks(model, args.length), init_device_mesh(args.device.partition(":")[0], (args.ranks,)))
    blocks.requires_grad_(args.kind == "training")
    fp4compile.config.disabled_passes = ["quantize_before_gather"] * (CODES not in switches)
    cache = "always" if KEPT in switches else "on"
    backend = "inductor" if recipe == "bf16" else fp4compile.backend(recipe, strict=True, weight_cache=cache)
    mode = {"mode": "reduce-overhead"} if args.graphs else {}
    compiled = torch.compile(blocks, backend=backend, dynamic=False, **mode)
    generator = torch.Generator(args.device).manual_seed(dist.get_rank())
    size = args.batch, args.length // args.ranks, hidden
    x, gradient = (torch.randn(size, generator=generator, device=args.device).bfloat16() for _ in range(2))
    x.requires_grad_(args.kind != "inference")

    def step() -> torch.Tensor:
        if args.kind == "inference":
            with torch.no_grad():
                return compiled(x)
        y = compiled(x)
        y.backward(gradient)
        for tensor in (x, *blocks.parameters()):
            tensor.grad = None
        return y

    for _ in range(3):
        y = step()
    figures = {"ms": ranks.median_time(step, args), "norm": y.detach().float().norm().item()}
    if args.graphs:
        return figures
    found = ranks.collectives_of(step, args.device)
    return figures | {
        "sent MB": sum(sent for _, sent in found.values()) / 1e6,
        "gathered MB": found.get("all_gather_into_tensor", (0, 0.0))[1] / 1e6,
        "collectives": sum(count for count, _ in found.values()),
    }


def cut(blocks: Blocks, mesh: DeviceMesh) -> Blocks:
    """The blocks with a part of the weights on each rank, and of the sequences between attention and MLP."""
    part, whole = Shard(1), Replicate()
    hidden = {"input_kwarg_layouts": {"hidden_states": part}, "desired_input_kwarg_layouts": {"hidden_states": whole}}
    plan = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(**hidden),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=part, desired_input_layouts=whole),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        **{f"{name}_proj": RowwiseParallel(output_layouts=part) for name in ("self_attn.o", "mlp.down")},
    }
    for layer in blocks.layers:
        parallelize_module(layer, mesh, plan)
    return blocks


if __name__ == "__main__":
    main()
