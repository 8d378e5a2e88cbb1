"""What packed weights do for a language model at batch 1: memory, decode and prefill speed, time to compile.

A Llama-3-8B with random weights, made on the device, in bf16 and then packed in place (`fp4compile.pack_`). Both are
compiled with mode="reduce-overhead" (CUDA graphs) and decode greedily into a static cache, in one run. "peak" is the
most memory that was in use while the model was packed (bf16: that of the loaded model).

    python -m benchmarks.llama_decode [--recipe nvfp4_weight_only] [--layers 32] [--prompt 2048] [--out FILE]
"""

import gc
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import fp4compile
from benchmarks import common

LLAMA_3_8B = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
              "num_key_value_heads": 8, "rope_theta": 500000.0, "rms_norm_eps": 1e-5}  # fmt: skip
TINY = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
        "num_key_value_heads": 2}  # fmt: skip


def random_model(args) -> LlamaForCausalLM:
    config = LlamaConfig(**(TINY if args.tiny else LLAMA_3_8B), num_hidden_layers=args.layers,
                         max_position_embeddings=args.prompt + args.tokens + 64, tie_word_embeddings=False,
                         attn_implementation="sdpa")  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(args.device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


class Session:
    """A model, compiled, and its static cache."""

    def __init__(self, model: LlamaForCausalLM, args, **how):
        self.args, self.device = args, args.device
        self.vocabulary = model.config.vocab_size
        length = args.prompt + args.tokens + 64
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        self.forward = torch.compile(model.forward, dynamic=False, **how)

    def next_token(self, tokens: torch.Tensor, start: int) -> torch.Tensor:
        """The likeliest token after `tokens`, which stand at positions `start` on."""
        at = torch.arange(start, start + tokens.shape[1], device=self.device)
        out = self.forward(input_ids=tokens, past_key_values=self.cache, cache_position=at,
                           position_ids=at.unsqueeze(0), use_cache=True, logits_to_keep=1)  # fmt: skip
        return out.logits[:, -1].argmax(-1, keepdim=True).clone()

    def prefill(self) -> torch.Tensor:
        self.cache.reset()
        prompt = torch.arange(self.args.prompt, device=self.device).unsqueeze(0) % self.vocabulary
        return self.next_token(prompt, 0)

    def decode(self, token: torch.Tensor, start: int, count: int) -> torch.Tensor:
        for position in range(start, start + count):
            token = self.next_token(token, position)
        return token


def seconds(work: Callable[[], object], device: str) -> float:
    """Wall-clock time of the work, the device's included."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


@torch.no_grad()
def measure(name: str, model: LlamaForCausalLM, args, **how) -> dict:
    """Times of a model compiled as `how` says."""
    torch.compiler.reset()
    session = Session(model, args, **how)
    first_prefill = seconds(session.prefill, args.device)
    token = session.prefill()
    first_decode = seconds(lambda: session.decode(token, args.prompt, 1), args.device)
    session.decode(token, args.prompt, 4)  # records the CUDA graph
    decode = min(seconds(lambda: session.decode(token, args.prompt, args.tokens), args.device) for _ in range(3))
    prefill = min(seconds(session.prefill, args.device) for _ in range(5))
    return {"model": name, "decode tokens/s": args.tokens / decode, "prefill ms": prefill * 1000,
            "compile prefill s": first_prefill, "compile decode s": first_decode}  # fmt: skip


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
    parser.add_argument("--recipe", default="nvfp4_weight_only")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=64, help="decoded in one measurement")
    parser.add_argument("--tiny", action="store_true", help="a narrow model, to try the script")
    args = parser.parse_args()
    mode = {} if args.device == "cpu" else {"mode": "reduce-overhead"}
    model = random_model(args)
    rows = [memory(args.device)]
    rows[0] = {**measure("bf16", model, args, **mode), **rows[0]}
    torch.compiler.reset()
    memory(args.device)
    fp4compile.pack_(model, args.recipe)
    used = memory(args.device)
    ours = measure(args.recipe, model, args, backend=fp4compile.backend(args.recipe, strict=True), **mode)
    rows.append({**ours, **used})
    for row in rows:
        row["decode x"] = row["decode tokens/s"] / rows[0]["decode tokens/s"]
        row["prefill x"] = row["prefill ms"] / rows[0]["prefill ms"]
    settings = {name: getattr(args, name) for name in ("recipe", "layers", "prompt", "tokens", "tiny")}
    common.publish(args, settings, rows)


if __name__ == "__main__":
    main()
