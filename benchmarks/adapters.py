"""Training LoRA adapters on a frozen base: packed by this project, in bf16, and in bitsandbytes' NF4, in one run.

A Llama-3-8B with random weights, LoRA of rank 16 on all linear layers of its blocks (peft, adapters in bf16), AdamW.
Blocks are compiled one by one (one graph serves all) and checkpointed; the loss is computed for an eighth of the tokens
at a time, so that no logits of all tokens are in memory. A time is that of a step among steps that follow each other,
the median of several runs of them; the peak is that of the allocator in these steps. `--bases` are bf16, nf4, a recipe
by which the base is packed, or `frozen-` and a recipe: the base stays in bf16, and the backend quantises it.

    python -m benchmarks.adapters [--bases bf16 nvfp4_weight_only frozen-mxfp8 nf4 ...] [--out FILE]
"""

import gc
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp4compile
from benchmarks import common
from benchmarks.models import random_llama

BASES = ("bf16", "nvfp4_weight_only", "nvfp4", "nf4")
PARTS = 8  # of the tokens, for the loss
GIB = 2**30


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--bases", nargs="+", default=BASES, help="see above")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="narrow layers, to try the script")
    args = parser.parse_args()
    rows = []
    for base in args.bases:
        row = measure(base, args)
        if row is not None:
            rows.append({"base": base, **row})
            rows[-1] |= {"ms x": row["ms"] / rows[0]["ms"], "peak x": row["peak GiB"] / max(rows[0]["peak GiB"], 1e-9)}
            print(rows[-1], file=sys.stderr, flush=True)
    names = ("layers", "batch", "length", "rank", "repeats", "tiny")
    settings = {name: getattr(args, name) for name in names}
    common.publish(args, settings, rows)


def measure(base: str, args) -> dict | None:
    """Time and memory of a step on a base; None where bitsandbytes is not installed."""
    torch._dynamo.reset()
    gc.collect()
    model = random_llama(args.device, args.layers, args.tiny, use_cache=False, max_position_embeddings=args.length)
    if base == "nf4" and not in_nf4(model, args.device):
        return None
    how = base_of(model, base) if base not in ("bf16", "nf4") else {}
    model = with_adapters(model, args.rank)
    held = allocated(args.device)
    start = time.perf_counter()
    train = Training(model, **how)
    tokens = torch.randint(model.config.vocab_size, (args.batch, args.length + 1), device=args.device)

    def step() -> Tensor:
        return train.step(tokens)

    first = step().item()
    compiling = time.perf_counter() - start
    for _ in range(2):
        step()
    if args.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    times = [common.step_time(step, args.device) for _ in range(args.repeats)]
    peak = torch.cuda.max_memory_allocated() / GIB if args.device.startswith("cuda") else 0.0
    return {"ms": statistics.median(times), "peak GiB": peak, "at rest GiB": held, "first step s": compiling,
            "first loss": first}  # fmt: skip


class Training:
    """Steps of a model's trained parameters. Its blocks are compiled, as `how` says, and checkpointed."""

    def __init__(self, model: nn.Module, **how):
        self.model = model
        core = model.get_base_model() if hasattr(model, "get_base_model") else model
        core.enable_input_require_grads()
        core.gradient_checkpointing_enable({"use_reentrant": False})
        self.body, self.head = core.model, core.lm_head
        for block in self.body.layers:
            block.compile(**how)
        self.loss = torch.compile(self._loss)
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimiser = torch.optim.AdamW(trained, lr=1e-4, fused=trained[0].is_cuda)
        model.train()

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden).float(), targets, reduction="sum")

    def step(self, tokens: Tensor) -> Tensor:
        """One step on tokens [batch, length + 1]; returns the loss."""
        hidden = self.body(input_ids=tokens[:, :-1]).last_hidden_state.flatten(0, 1)
        targets = tokens[:, 1:].flatten()
        parts = zip(hidden.chunk(PARTS), targets.chunk(PARTS), strict=True)
        loss = sum(checkpoint(self.loss, *part, use_reentrant=False) for part in parts) / len(targets)
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        return loss.detach()


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", lora_dropout=0.0)
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def base_of(model: nn.Module, base: str) -> dict:
    """Pack the model in place, unless the base is `frozen-`; returns how its blocks are compiled."""
    recipe = base.removeprefix("frozen-")
    if base == recipe:
        fp4compile.pack_(model, recipe)
    return {"backend": fp4compile.backend(recipe)}


def in_nf4(model: nn.Module, device: str) -> bool:
    """Replace the linear layers of the blocks by bitsandbytes' NF4, as QLoRA has them: double quantisation, bf16."""
    try:
        import bitsandbytes
    except ImportError:
        return False
    for block in model.model.layers:
        for parent in list(block.modules()):
            for name, layer in list(parent.named_children()):
                if type(layer) is nn.Linear:
                    made = bitsandbytes.nn.Linear4bit(
                        layer.in_features, layer.out_features, bias=False, compute_dtype=torch.bfloat16,
                        compress_statistics=True, quant_type="nf4", device="meta",
                    )  # fmt: skip
                    made.weight = bitsandbytes.nn.Params4bit(
                        layer.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
                    )
                    setattr(parent, name, made.to(device))
    model.is_loaded_in_4bit = True  # peft asks
    return True


def allocated(device: str) -> float:
    gc.collect()
    return torch.cuda.memory_allocated() / GIB if device.startswith("cuda") else 0.0


if __name__ == "__main__":
    main()
