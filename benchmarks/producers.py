"""Norm, activation and residual before a quantiser: fused into its kernels, before it, and by torchao's quantisers.

    python -m benchmarks.producers [--parts rows both] [--rows 8192] [--cols 8192] [--out FILE]
    python -m benchmarks.producers --parts values train prefill decode [--recipes nvfp4_train mxfp8 ...]

Parts. rows: a compiled function makes the bf16 tensor of a linear layer, as a Llama block has it, and quantises it
along its rows. both: in both directions, as training does. values: along the rows, for a GPU that multiplies
dequantised values. There is no product in these functions, so all that the device does counts: its time by the
profiler, in microseconds a call. "fused": with the pass `fuse_prologue`, where it does nothing on this GPU otherwise,
too; "-" where its model sees no gain. "apart": without the pass. "copy": a device copy that moves as many bytes as one
kernel would that reads each input once and writes each output once.

train, prefill, decode: one Llama-3-8B block of bf16 parameters under recipes, forward and backward of 8192 tokens,
forward of 8192 tokens, or forward of one token (a CUDA graph, replayed), with the pass as the backend has it on this
GPU and without; "prologues" counts what was fused. "us" is from one call to the next, which the host may bound; "device
us" is the time of the kernels.

Most of the time is spent in compiling: 33 small functions for rows, 15 for both, 8 blocks each for the others. Results
are written after each part.
"""

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch._inductor import config as inductor

import fp4compile
from benchmarks import common, quantize
from fp4compile.templates.quantize import prologue_cost

PARTS = ("rows", "both", "values", "train", "prefill", "decode")
FORMATS = {
    "rows": ("nvfp4_one_level", "nvfp4_rowwise", "nvfp4", "mxfp8"),
    "both": ("nvfp4", "mxfp8"),
    "values": ("nvfp4_one_level", "nvfp4_rowwise", "nvfp4"),
}
RECIPES = ("nvfp4_train", "mxfp8", "float8_rowwise", "nvfp4")
PASS = "fuse_prologue"


# ---------------------------------------------------------------- producers: of two tensors [M, K] and a weight [K]


def rms_norm(x, y, weight):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def add_rms_norm(x, y, weight):
    """The sum goes on to the next block."""
    stream = x + y
    return rms_norm(stream, None, weight), stream


def gate(x, y, weight):
    return F.silu(x) * y


PRODUCERS = {"rms_norm": rms_norm, "add, rms_norm": add_rms_norm, "silu, mul": gate}


def then(producer: Callable, quantiser: Callable) -> Callable:
    """x, y, weight -> what the quantiser makes of the producer's result, and other results of the producer's."""

    def function(x, y, weight):
        value, *others = made if isinstance(made := producer(x, y, weight), tuple) else (made,)
        return *quantiser(value), *others

    return function


def quantiser_of(part: str, format: str) -> Callable:
    options = {"rows": {}, "both": {"dim": [-1, -2]}, "values": {"values": [-1]}}[part]
    return lambda value: torch.ops.fp4compile.quantize(value, format, **options)


def torchao_of(part: str, format: str) -> Callable | None:
    """torchao's quantiser; None where it has none, or is not installed."""
    peers = quantize.torchao_functions()
    rows, columns, dynamic = (peers.get((case, format)) for case in ("rows", "columns", "two-level, dynamic"))
    rows = rows or dynamic
    if part == "rows" and rows is not None:
        return lambda value: _tensors(rows(value))
    if part == "both" and rows is not None and columns is not None:
        return lambda value: (*_tensors(rows(value)), *_tensors(columns(value)))
    return None


def _tensors(made) -> tuple:
    return tuple(each for each in made if isinstance(each, torch.Tensor))


def compiled(function: Callable, device: str, fused: bool | None) -> tuple[Callable, Callable[[], int]]:
    """The function under the backend, and how many prologues were fused so far. fused: None for Inductor alone."""
    if fused is None:
        return torch.compile(function, dynamic=False), lambda: 0
    with mock.patch.object(fp4compile.config, "disabled_passes", () if fused else (PASS,)):
        chosen = fp4compile.backend("mxfp8")
    return torch.compile(function, backend=chosen, dynamic=False), lambda: chosen.report.counts.get(PASS, 0)


def producers(part: str, args: argparse.Namespace) -> Iterator[dict]:
    torch.manual_seed(0)
    x, y = (torch.randn(args.rows, args.cols, device=args.device).bfloat16() for _ in range(2))
    weight = torch.randn(args.cols, device=args.device).bfloat16()
    for name, producer in PRODUCERS.items():
        for format in FORMATS[part]:
            times: dict[str, float | None] = {}
            for column, fused in (("fused us", True), ("apart us", False)):
                torch._dynamo.reset()
                call, count = compiled(then(producer, quantiser_of(part, format)), args.device, fused)
                outputs = call(x, y, weight)
                no_prologue = fused and count() == 0 and args.device != "cpu"
                times[column] = None if no_prologue else device_time(partial(call, x, y, weight), args)
            moved = quantize.nbytes((x,) if producer is rms_norm else (x, y)) + quantize.nbytes(outputs)
            peer = torchao_of(part, format)
            if peer is not None:
                torch._dynamo.reset()
                call, _ = compiled(then(producer, peer), args.device, None)
                call(x, y, weight)
            copy = copy_time(moved, args)
            best = times["fused us"] or times["apart us"]
            yield {
                "producer": name, "quantised": f"{part}, {format}", **times,
                "torchao us": None if peer is None else device_time(partial(call, x, y, weight), args),
                "copy us": copy, "over copy": None if copy is None else best / copy,
            }  # fmt: skip


def copy_time(nbytes: int, args: argparse.Namespace) -> float | None:
    return quantize.copy_time(nbytes, args.repeats) if args.device != "cpu" else None


def device_time(call: Callable, args: argparse.Namespace) -> float:
    """Microseconds in which the device works in a call; on a CPU, of the call.

    A kernel that starts early, and waits for the one before it, counts once with it.
    """
    call()
    if args.device == "cpu":
        return 1e3 * common.step_time(call, args.device)
    events = common.device_events(call, args.repeats)
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    return busy(spans) / args.repeats


def busy(spans: Sequence[tuple[float, float]]) -> float:
    """The time that at least one of the spans (start, end) covers. spans: in the order of their starts."""
    covered, end = 0.0, -math.inf
    for first, last in spans:
        covered += max(0.0, last - max(first, end))
        end = max(end, last)
    return covered


# ---------------------------------------------------------------- a block of a model


def block_of(args: argparse.Namespace, tokens: int) -> tuple[torch.nn.Module, torch.Tensor, dict]:
    """A block, its input, and the other arguments of its forward."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    from benchmarks.models import LLAMA_3_8B, TINY

    shape = LlamaConfig(**(TINY if args.tiny else LLAMA_3_8B), attn_implementation="sdpa")
    torch.manual_seed(0)
    with torch.device(args.device):
        block = LlamaDecoderLayer(shape, 0).bfloat16()
        x = torch.randn(1, tokens, shape.hidden_size, device=args.device).bfloat16()
        places = torch.arange(tokens).unsqueeze(0)
        angles = LlamaRotaryEmbedding(shape)(x, places)
    return block, x, {"position_embeddings": angles, "position_ids": places}


def result(made) -> torch.Tensor:
    return made[0] if isinstance(made, tuple) else made


def blocks(part: str, args: argparse.Namespace) -> Iterator[dict]:
    measure = {"train": train_times, "prefill": prefill_times, "decode": decode_times}[part]
    for recipe in args.recipes:
        row: dict[str, object] = {"block": part, "recipe": recipe}
        for column, disabled in (("fused", ()), ("apart", (PASS,))):
            torch._dynamo.reset()
            with mock.patch.object(fp4compile.config, "disabled_passes", disabled):
                chosen = fp4compile.backend(recipe)
            start = time.perf_counter()
            row |= {f"{column} {name}": value for name, value in measure(chosen, args).items()}
            row[f"{column} s in all"] = time.perf_counter() - start
            if not disabled:
                row["prologues"] = chosen.report.counts.get(PASS, 0)
        of_device = "us" if part == "decode" else "device us"
        yield row | {"apart over fused": row[f"apart {of_device}"] / row[f"fused {of_device}"]}


def train_times(backend, args: argparse.Namespace) -> dict[str, float]:
    """`wall_and_device` of a forward and backward pass."""
    block, x, others = block_of(args, args.tokens)
    x.requires_grad_()
    run, gradient = torch.compile(block, backend=backend, dynamic=False), torch.randn_like(x) / args.tokens

    def step():
        result(run(x, **others)).backward(gradient)

    return wall_and_device(step, args)


@torch.no_grad()
def prefill_times(backend, args: argparse.Namespace) -> dict[str, float]:
    """`wall_and_device` of a forward pass of as many tokens."""
    return wall_and_device(forward(backend, args, args.tokens), args)


def wall_and_device(call: Callable, args: argparse.Namespace) -> dict[str, float]:
    """Microseconds from one call to the next, and of its kernels alone."""
    for _ in range(2):
        call()
    wall = 1e3 * statistics.median(common.step_time(call, args.device) for _ in range(args.repeats))
    return {"us": wall, "device us": device_time(call, args)}


def forward(backend, args: argparse.Namespace, tokens: int) -> Callable:
    """A compiled block, which has run once, and its arguments."""
    block, x, others = block_of(args, tokens)
    run = torch.compile(block.eval(), backend=backend, dynamic=False)
    run(x, **others)
    return partial(run, x, **others)


@torch.no_grad()
def decode_times(backend, args: argparse.Namespace) -> dict[str, float]:
    """Microseconds of a forward pass of one token."""
    call = forward(backend, args, 1)
    if args.device == "cpu":
        return {"us": 1e3 * common.step_time(call, args.device)}
    return {"us": common.graph_time([call] * 10, args.repeats)}


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["rows", "both"])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--cols", type=int, default=8192)
    parser.add_argument("--recipes", nargs="+", default=RECIPES, help="of train, prefill and decode")
    parser.add_argument("--tokens", type=int, default=8192, help="of train and prefill")
    parser.add_argument("--tiny", action="store_true", help="train, prefill, decode: a narrow model, to try the script")
    parser.add_argument("--repeats", type=int, default=11)
    args = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message=".*quantised nothing")  # there is no product
    found, seconds = {}, {}
    settings = {name: getattr(args, name) for name in ("rows", "cols", "recipes", "tokens", "tiny", "repeats")}
    everywhere = mock.patch.object(prologue_cost, "SINCE", dict.fromkeys(prologue_cost.SINCE, 0))
    # A graph in a cache does not say whether the pass was on for this GPU.
    with inductor.patch(force_disable_caches=True):
        for part in args.parts:
            start = time.perf_counter()
            if part in FORMATS:
                with everywhere:
                    found[part] = list(producers(part, args))
            else:
                found[part] = list(blocks(part, args))
            seconds[part] = time.perf_counter() - start
            common.publish_parts(args, settings | {"seconds": seconds}, found)


if __name__ == "__main__":
    main()
