"""A training step of a Llama-3-8B's first layers under FSDP2: with weights gathered in bf16, and as codes.

Each GPU of the host is a rank. The script is what a user writes: transformers' `LlamaForCausalLM` in float32, its
blocks compiled one by one, `fully_shard` with gathers in bf16 and gradients reduced in float32, fused AdamW. A case is
a recipe; ", codes" adds a call of `fp4compile.distributed.gather_quantized_`, over NVLink too. "torchao tensorwise,
codes" is torchao's float8 training with its FP8 all-gather, left out where torchao is not installed.

"ms": the median time of a step, "slowest ms": the longest of the repeats, each of which is the mean of several steps
that follow each other. "sent MB": what a rank contributes to the gathers of weights in a step, by the tensors that
FSDP2 gathers. "peak GB": memory of the first rank. "loss": that of the second step. "host ms", "device ms" and
"launches": as in `benchmarks.training_step`; kernels of several streams overlap, and kernels of collectives wait for
the other rank. A slow link is what NCCL_P2P_DISABLE=1 leaves of NVLink.
--prefetch: each block asks for the weights of the next one before it runs (`set_modules_to_forward_prefetch`).
--reduced bfloat16: gradients are reduced in bf16, half the bytes.
--accumulated: the step is one of several batches whose gradients are added up before they are reduced, so that weights
alone are on the wire; it has no optimiser.

    python -m benchmarks.sharded_step [--cases bf16 nvfp4_train "nvfp4_train, codes"] [--prefetch] [--accumulated]
                                      [--reduced bfloat16] [--out FILE]
"""

import argparse
import itertools
import statistics

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from transformers import LlamaForCausalLM

import fp4compile
from benchmarks import common, ranks, training_step
from benchmarks.models import torchao_training
from fp4compile.distributed import gather_quantized_

RECIPES = ("float8_rowwise", "float8_block", "mxfp8", "nvfp4_train")
CODES = ", codes"
CASES = ("bf16", "torchao tensorwise, codes", *(recipe + end for recipe in RECIPES for end in ("", CODES)))


class Counted(DefaultAllGather):
    """FSDP2's all-gather, which adds up the bytes that this rank contributes."""

    def __init__(self) -> None:
        self.sent = 0

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.sent += input_tensor.nbytes
        return super().__call__(output_tensor, input_tensor, group, async_op)


def main() -> None:
    parser = common.parser(__doc__)
    ranks.add_options(parser)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1, help="texts of a rank")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--prefetch", action="store_true", help="gather a block's weights before the block before it")
    parser.add_argument("--reduced", choices=("float32", "bfloat16"), default="float32", help="dtype of the reduction")
    parser.add_argument("--accumulated", action="store_true", help="reduce no gradients")
    ranks.run(parser.parse_args(), measure, ("layers", "batch", "length", "prefetch", "reduced", "accumulated"))


def measure(case: str, args: argparse.Namespace) -> dict | None:
    """The time, the bytes and the memory of a step; None for a peer that is not installed."""
    recipe, codes = case.removesuffix(CODES), case.endswith(CODES)
    model = training_step.model_of(args).float()
    if recipe.startswith("torchao") and torchao_training(model, "", enable_fsdp_float8_all_gather=True) is None:
        return None
    counted = shard(model, recipe, getattr(torch, args.reduced))
    if codes and not recipe.startswith("torchao"):
        gather_quantized_(model, recipe, over_nvlink=True)
    if args.prefetch:
        for block, following in itertools.pairwise(model.model.layers):
            block.set_modules_to_forward_prefetch([following])
    model.set_requires_gradient_sync(not args.accumulated)
    optimiser = None if args.accumulated else torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(model.config.vocab_size, (args.batch, args.length), device=args.device)

    def step() -> torch.Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if optimiser is not None:
            optimiser.step()
        for parameter in model.parameters():
            parameter.grad = None
        return loss

    losses = [step().item() for _ in range(3)]
    counted.sent = 0
    if args.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    step()
    common.synchronize(args.device)
    sent = counted.sent
    times = ranks.times_of(step, args)
    peak = torch.cuda.max_memory_allocated() / 1e9 if args.device.startswith("cuda") else None
    host = statistics.median(training_step.host_time(step, args.device) for _ in range(args.repeats))
    kernels = common.kernels_of(step, args.device).values()
    return {
        "ms": statistics.median(times), "slowest ms": max(times), "sent MB": sent / 1e6, "peak GB": peak,
        "loss": losses[1], "host ms": host, "device ms": sum(time for time, _ in kernels) / 1e3,
        "launches": sum(count for _, count in kernels),
    }  # fmt: skip


def shard(model: LlamaForCausalLM, recipe: str, reduced: torch.dtype) -> Counted:
    """Compile and shard each block, then the whole; returns what counts the bytes of all gathers.

    reduced: the dtype in which gradients are reduced.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    plain = recipe == "bf16" or recipe.startswith("torchao")
    counted = Counted()
    for block in model.model.layers:
        block.compile(backend="inductor" if plain else fp4compile.backend(recipe), dynamic=False)
        fully_shard(block, mp_policy=policy)
        block.set_custom_all_gather(counted)
    fully_shard(model, mp_policy=policy)
    model.set_custom_all_gather(counted)
    return counted


if __name__ == "__main__":
    main()
