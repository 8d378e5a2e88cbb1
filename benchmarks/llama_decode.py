"""What packed weights do for a language model at batch 1: memory, decode and prefill speed, time to compile.

A Llama-3-8B, or a Qwen3-30B-A3B or gpt-oss-20b with their experts (`--model`), with random weights, made on the device,
in bf16 and then packed in place (`fp4compile.pack_`; gpt-oss as it was published, experts alone in MXFP4, unless
`--recipe` says otherwise). Both are compiled with mode="reduce-overhead" (CUDA graphs) and decode greedily
into a static cache, in one run: after a short prompt, because attention over a long one takes both models the same time
(`--context`). "awaited": the program waits for each token before it asks for the next one, as `generate` does, so that
the CPU's work adds to the GPU's. "peak" is the most memory that was in use while the model was packed (bf16: while it
was made). Prefill multiplies experts by groups of tokens; decode as `--experts` says, by groups or by index. "prefill
ms" is the time of one among prefills that follow each other for two seconds.

    python -m benchmarks.llama_decode [--model llama-3-8b] [--recipe R] [--layers N] [--out FILE]
"""

import gc
import statistics
import sys
from collections.abc import Callable

import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    StaticCache,
)

import fp4compile
from benchmarks import common
from benchmarks.common import seconds
from benchmarks.models import LLAMA_3_8B, TINY, in_bf16

QWEN3_30B_A3B = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
                 "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128,
                 "num_experts_per_tok": 8, "rope_theta": 1000000.0, "norm_topk_prob": True}  # fmt: skip
# All layers attend to all tokens: a static cache of a sliding window counts its tokens in an integer, and a graph is
# compiled, or a CUDA graph recorded, for every number.
GPT_OSS_20B = {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
               "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
               "layer_types": ["full_attention"] * 24, "attn_implementation": "eager"}  # fmt: skip
TINY_EXPERTS = TINY | {"head_dim": 32, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
TINY_GPT_OSS = GPT_OSS_20B | TINY | {"head_dim": 32, "num_local_experts": 8}
WEIGHT_ONLY = "nvfp4_weight_only"
AS_PUBLISHED = {"recipe": "mxfp4", "fprop_x": "none", "min_m": 1, "rules": [["*self_attn*", "skip"]]}
# The model's and the configuration's classes, layers, sizes, the sizes of a narrow model to try the script with, and
# the recipe.
MODELS = {
    "llama-3-8b": (LlamaForCausalLM, LlamaConfig, 32, LLAMA_3_8B, TINY, WEIGHT_ONLY),
    "qwen3-30b-a3b": (Qwen3MoeForCausalLM, Qwen3MoeConfig, 48, QWEN3_30B_A3B, TINY_EXPERTS, WEIGHT_ONLY),
    "gpt-oss-20b": (GptOssForCausalLM, GptOssConfig, 24, GPT_OSS_20B, TINY_GPT_OSS, AS_PUBLISHED),
}


def random_model(args) -> PreTrainedModel:
    kind, config_kind, layers, sizes, tiny, _ = MODELS[args.model]
    longest = max(args.prompt, args.context + decoded(args))
    sizes = {"attn_implementation": "sdpa"} | (tiny if args.tiny else sizes)
    if args.attention:
        sizes |= {"attn_implementation": args.attention}
    layers = args.layers or layers
    if "layer_types" in sizes:
        sizes |= {"layer_types": sizes["layer_types"][:layers]}
    config = config_kind(**sizes, num_hidden_layers=layers, max_position_embeddings=longest,
                         tie_word_embeddings=False)  # fmt: skip
    return in_bf16(lambda: kind(config).eval(), args.device)


WARM_UP, REPEATS, AWAITED = 4, 3, 16


def decoded(args) -> int:
    """Tokens that are decoded one after the other in all."""
    return WARM_UP + REPEATS * args.tokens + AWAITED


class Session:
    """A model, compiled, and its static cache of `length` tokens, of which it has seen some."""

    def __init__(self, model: PreTrainedModel, length: int, device: str, **how):
        self.device, config = device, model.config
        self.vocabulary = config.vocab_size
        self.cache = StaticCache(config=config, max_cache_len=length)
        # Tensors made inside a compiled region would not be known to stay, and CUDA graphs would be skipped.
        self.cache.early_initialization(1, config.num_key_value_heads, config.head_dim, model.dtype, device)
        self.token = torch.zeros(1, 1, dtype=torch.long, device=device)
        self.seen = 0
        self.forward = torch.compile(model.forward, dynamic=False, **how)

    def next_token(self, tokens: torch.Tensor) -> torch.Tensor:
        """The likeliest token after `tokens`, which follow those in the cache."""
        at = torch.arange(self.seen, self.seen + tokens.shape[1], device=self.device)
        self.seen += tokens.shape[1]
        out = self.forward(input_ids=tokens, past_key_values=self.cache, cache_position=at,
                           position_ids=at.unsqueeze(0), use_cache=True, logits_to_keep=1)  # fmt: skip
        return out.logits[:, -1].argmax(-1, keepdim=True).clone()

    def prefill(self, length: int) -> torch.Tensor:
        self.cache.reset()
        self.seen = 0
        prompt = torch.arange(length, device=self.device).unsqueeze(0) % self.vocabulary
        self.token = self.next_token(prompt)
        return self.token

    def decode(self, count: int) -> None:
        for _ in range(count):
            self.token = self.next_token(self.token)


def steady_seconds(work: Callable[[], object], device: str) -> float:
    """Wall-clock time of the work among others that follow each other, at the clock that the card keeps under them.

    It is the median of three runs of two seconds. After a pause a card runs faster than it can stay.
    """
    once = statistics.median(seconds(work, device) for _ in range(3))
    count = max(1, round(2 / once)) if device.startswith("cuda") else 1
    return statistics.median(seconds(lambda: [work() for _ in range(count)], device) / count for _ in range(3))


@torch.no_grad()
def measure(name: str, model: PreTrainedModel, args, **how) -> dict:
    """Times of a model compiled as `how` says."""
    torch.compiler.reset()
    multiply_experts(model, "grouped_mm")  # by index, every token's experts are gathered
    session = Session(model, args.prompt, args.device, **how)
    first_prefill = seconds(lambda: session.prefill(args.prompt), args.device)
    prefill = steady_seconds(lambda: session.prefill(args.prompt), args.device)
    multiply_experts(model, args.experts)
    session = Session(model, args.context + decoded(args), args.device, **how)
    session.seen = args.context  # of zeros: what was said does not matter
    first_decode = seconds(lambda: session.decode(1), args.device)
    session.decode(WARM_UP - 1)  # records the CUDA graph
    decode = min(seconds(lambda: session.decode(args.tokens), args.device) for _ in range(REPEATS))
    awaited = statistics.median(seconds(lambda: session.decode(1), args.device) for _ in range(AWAITED))
    row = {"model": name, "decode tokens/s": args.tokens / decode, "awaited tokens/s": 1 / awaited,
           "prefill ms": prefill * 1000, "compile prefill s": first_prefill,
           "compile decode s": first_decode}  # fmt: skip
    print(row, file=sys.stderr, flush=True)  # the whole takes minutes
    return row


def multiply_experts(model: PreTrainedModel, how: str) -> None:
    """Let transformers multiply the model's experts, if it has any, so."""
    if has_experts(model):
        model.set_experts_implementation(how)


def has_experts(model: PreTrainedModel) -> bool:
    return hasattr(model.config, "num_experts_per_tok")


def memory(device: str) -> dict:
    """GiB in use now, and at most since the last call."""
    gc.collect()
    if not device.startswith("cuda"):
        return {"GiB": None, "peak GiB": None}
    found = {"GiB": torch.cuda.memory_allocated() / 2**30, "peak GiB": torch.cuda.max_memory_allocated() / 2**30}
    torch.cuda.reset_peak_memory_stats()
    return found


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--recipe", help="by default the model's in `MODELS`")
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="by default all of the model's")
    parser.add_argument("--attention", help="transformers' implementation; by default the model's in `MODELS`, or sdpa")
    parser.add_argument("--head", metavar="RECIPE", help="also measure with an output head packed by this recipe")
    parser.add_argument("--experts", choices=("batched_mm", "grouped_mm"), default="batched_mm")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--context", type=int, default=128, help="tokens in the cache before those that are decoded")
    parser.add_argument("--tokens", type=int, default=64, help="decoded in one measurement")
    parser.add_argument("--tiny", action="store_true", help="narrow layers, to try the script")
    args = parser.parse_args()
    mode = {} if args.device == "cpu" else {"mode": "reduce-overhead"}
    model = random_model(args)
    rows = [memory(args.device)]
    rows[0] = {**measure("bf16", model, args, **mode), **rows[0]}
    torch.compiler.reset()
    memory(args.device)
    recipe = args.recipe or MODELS[args.model][-1]
    name = recipe if isinstance(recipe, str) else "mxfp4 experts"
    packings = [(name, recipe)]
    if args.head:
        rules = {"recipe": recipe, "rules": [["lm_head", args.head]]}
        packings.append((f"{name}, head {args.head}", rules))  # packs the head of the packed model
    for name, recipe in packings:
        fp4compile.pack_(model, recipe)
        used = memory(args.device)
        ours = measure(name, model, args, backend=fp4compile.backend(recipe, strict=True), **mode)
        rows.append({**ours, **used})
    for row in rows:
        row["decode x"] = row["decode tokens/s"] / rows[0]["decode tokens/s"]
        row["prefill x"] = row["prefill ms"] / rows[0]["prefill ms"]
    settings = {name: getattr(args, name) for name in ("prompt", "context", "tokens", "tiny")}
    settings = {"recipe": packings[0][1], **settings, "model": args.model, "layers": model.config.num_hidden_layers}
    if has_experts(model):
        settings["experts"] = args.experts
    settings |= {name: value for name in ("attention", "head") if (value := getattr(args, name)) is not None}
    common.publish(args, settings, rows)


if __name__ == "__main__":
    main()
