"""What packing a language model takes, and loading it packed: seconds, and memory of the device and of the host.

A Llama-3-8B with random weights, made in bf16 on the device, is packed in place (`fp4compile.pack_`) under each rule of
`weight_scales`. "first s": the same of a model of one block before, when kernels are still to be compiled.

The last packed model is saved to shards by `save_pretrained`. A process of its own loads it by `from_pretrained`, and
compares its logits with those of the model that was saved. "tensors GiB": what the loaded model holds. Of Llama-3-8B in
NVFP4 that is 3.66 GiB of packed layers (6.98e9 weights of 4.5 bits) and 1.96 GiB of embedding and head, in bf16.
"peak GiB": the most that torch had allocated on the device. "host GiB": the most resident memory, and "host before GiB"
what the process had before; mapped files, which the system can drop, count.

    python -m benchmarks.packing [--recipe nvfp4_weight_only] [--layers 32] [--tiny] [--out FILE]
"""

import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import fp4compile
from benchmarks import common
from benchmarks.common import seconds
from benchmarks.models import random_llama
from fp4compile.formats.formats import SCALE_RULES

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 128
LOGITS = "logits"  # a file of safetensors; with that ending, it would be taken for a shard
MOST_GIB = 7.0  # of the device while a packed Llama-3-8B is loaded
MOST_SECONDS = 2.0  # that "mse" may add to packing one


def random_model(device: str, layers: int, tiny: bool, **sizes: int) -> LlamaForCausalLM:
    return random_llama(device, layers, tiny, max_position_embeddings=2 * TOKENS, **sizes).eval()


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.arange(TOKENS, device=model.device).unsqueeze(0) % model.config.vocab_size
    return model(input_ids=tokens, use_cache=False).logits.cpu()


def gib(count: float) -> float:
    return count / 2**30


def start_peak(device: str) -> None:
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak(device: str) -> float | None:
    """GiB that torch had allocated at most since `start_peak`; None on a CPU."""
    return gib(torch.cuda.max_memory_allocated()) if device.startswith("cuda") else None


def resident() -> float | None:
    """GiB of this process that were resident at most so far, by Linux; None elsewhere.

    `resource.getrusage` would tell of the process that has started this one, if that had more.
    """
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    return found and gib(1024 * int(found[1]))


# ---------------------------------------------------------------- packing


def pack(rule: str, args: Any) -> tuple[dict, LlamaForCausalLM]:
    """Times of packing under a rule, and the packed model."""
    recipe = fp4compile.Recipe.from_dict({"recipe": args.recipe, "weight_scales": rule})
    first = seconds(
        partial(fp4compile.pack_, random_model(args.device, 1, args.tiny, vocab_size=256), recipe), args.device
    )
    model = random_model(args.device, args.layers, args.tiny)
    start_peak(args.device)
    before = tensors(model)
    taken = seconds(partial(fp4compile.pack_, model, recipe), args.device)
    row = {"weight_scales": rule, "pack s": taken, "first s": first, "bf16 GiB": before, "packed GiB": tensors(model),
           "peak GiB": peak(args.device)}  # fmt: skip
    print(row, file=sys.stderr, flush=True)
    return row, model


def tensors(model: torch.nn.Module) -> float:
    """GiB of parameters and buffers."""
    return gib(sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())))


# ---------------------------------------------------------------- files


def save(model: LlamaForCausalLM, folder: Path, args: Any) -> dict:
    """Write the model and its logits; returns the time, and what was written."""
    save_file({"logits": logits(model)} | {name: tensor.cpu() for name, tensor in unsaved(model)}, folder / LOGITS)
    shard = "64KB" if args.tiny else "1GB"
    taken = seconds(lambda: model.save_pretrained(folder, max_shard_size=shard), args.device)
    files = list(folder.glob("*.safetensors"))
    return {"save s": taken, "shards": len(files), "files GiB": gib(sum(file.stat().st_size for file in files))}


def unsaved(model: LlamaForCausalLM) -> list[tuple[str, torch.Tensor]]:
    """The buffers that no checkpoint has: frequencies, which a GPU and a CPU compute with other last bits."""
    saved = model.state_dict()
    return [(name, buffer) for name, buffer in model.named_buffers() if name not in saved]


def load(folder: Path, device: str) -> dict:
    """Load the model of a folder: time, memory, whether it computes what the saved one computed."""
    fp4compile.register_with_transformers()
    torch.empty(1, device=device)  # starts the device
    start_peak(device)
    before, start = resident(), time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=device)
    common.synchronize(device)
    taken = time.perf_counter() - start
    found = {"load s": taken, "tensors GiB": tensors(model), "peak GiB": peak(device), "host before GiB": before,
             "host GiB": resident()}  # fmt: skip
    expected = load_file(folder / LOGITS)
    for name, buffer in unsaved(model):
        buffer.copy_(expected[name])
    return found | {"logits equal": torch.equal(logits(model), expected["logits"])}


def load_alone(folder: Path, device: str) -> dict:
    """`load` in a process of its own, which has allocated nothing before."""
    command = [sys.executable, "-m", "benchmarks.packing", "--load", str(folder), "--device", device]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


# ---------------------------------------------------------------- all


def problems(packed: list[dict], loaded: dict) -> list[str]:
    """What falls short."""
    plain, mse = (next(row["pack s"] for row in packed if row["weight_scales"] == rule) for rule in ("amax", "mse"))
    found = []
    if mse - plain >= MOST_SECONDS:
        found.append(f"mse adds {mse - plain:.2f} s to packing, expected less than {MOST_SECONDS}")
    if loaded["peak GiB"] is not None and loaded["peak GiB"] >= MOST_GIB:
        found.append(f"loading peaks at {loaded['peak GiB']:.2f} GiB, expected less than {MOST_GIB}")
    return found if loaded["logits equal"] else [*found, "the loaded model has other logits than the saved one"]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--recipe", default="nvfp4_weight_only")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tiny", action="store_true", help="a narrow model, to try the script")
    parser.add_argument("--load", type=Path, metavar="FOLDER", help="load a packed model, and print what that takes")
    args = parser.parse_args()
    if args.load is not None:
        print(json.dumps(load(args.load, args.device)))
        return
    rows = []
    for rule in SCALE_RULES:
        model: LlamaForCausalLM | None = None  # frees the one before
        row, model = pack(rule, args)
        rows.append(row)
    with tempfile.TemporaryDirectory() as folder:
        saved = save(model, Path(folder), args)
        del model
        start_peak(args.device)
        loaded = load_alone(Path(folder), args.device)
    settings = {name: getattr(args, name) for name in ("recipe", "layers", "tiny")} | {"tokens": TOKENS}
    common.publish_parts(args, settings, {"rows": rows, "load": [saved | loaded]})
    for problem in problems(rows, loaded):
        print(problem, file=sys.stderr)


if __name__ == "__main__":
    main()
