"""Times of two trees of this repository, measured by turns on one device.

    python -m benchmarks.compare_trees --parent CHECKOUT --out FILE [--only linear,experts,...] [--rounds 3] [--jobs 6]

First, --jobs processes a tree compile all kernels; then one of each tree measures, by turns. What differs by more than
2 % is measured again; what still does is flagged. Microseconds; of "compile", seconds of the first call in a fresh
process with empty caches.
"""

import functools
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import common

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 512, 2048)
LINEAR = ((4096, 4096), (14336, 4096), (4096, 14336))  # N, K
EXPERTS = {"mixtral": ("nvfp4", 2048, 7168, 8), "gpt-oss": ("mxfp4", 2880, 2880, 32)}  # weights, hidden, inner, count
FORMATS = ("nvfp4", "nvfp4_one_level", "nvfp4_te", "nvfp4_16x16", "nvfp4_rowwise", "mxfp8", "mxfp8_32x32", "mxfp4",
           "float8_rowwise")  # fmt: skip
COMPILED = ("training llama-3-8b nvfp4_train", "prefill llama-3-8b nvfp4_weight_only")
Timed = Callable[[int], float]  # the time by so many replays or repeats
PACKAGE: Any = None  # fp4compile, of this process's tree
DEVICE, SHRINK = "cuda", 1  # of this process; SHRINK divides sizes


def cases() -> dict[str, partial[Timed]]:
    """What builds each case, runs it once, and returns how it is timed. The first word of a name is the part."""
    product, models = itertools.product, (("llama-3-8b", "qwen3-30b-a3b"), ("nvfp4", "nvfp4_weight_only"))
    made = [
        *((linear, fmt, m, n, k) for (n, k), fmt, m in product(LINEAR, ("nvfp4", "mxfp8", "mxfp4"), ROWS)),
        *((experts, *each) for each in product(EXPERTS, (1, 4, 16, 64, 128, 512))),
        *((quantize, *each) for each in product(FORMATS, ((-1,), (-2,), (-1, -2)))),
        *((model, "training", "llama-3-8b", recipe) for recipe in ("nvfp4_train", "mxfp8", "float8_rowwise")),
        *((model, *each) for each in product(("decode", "prefill"), *models)),
    ]
    named = ([*settings] if make is model else [make.__name__, *settings] for make, *settings in made)
    return {" ".join(map(str, name)): partial(*each) for name, each in zip(named, made, strict=True)}


def timed(calls: list[Callable[[], object]]) -> Timed:
    calls[0]()
    if DEVICE != "cpu" and len(calls) > 1:
        return partial(common.graph_time, calls)
    return lambda repeats: 1e3 * statistics.median(common.step_time(calls[0], DEVICE) for _ in range(1 + repeats // 5))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


@functools.lru_cache(1)
def packed_layers(fmt: str, n: int, k: int) -> torch.nn.ModuleList:
    """As many packed layers as are more than the L2 cache."""
    count = 3 if SHRINK > 1 else max(3, int(4e8 / (n * k)))
    with torch.device(DEVICE):
        made = torch.nn.ModuleList(torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16) for _ in range(count))
    PACKAGE.pack_(made, {"fprop_w": fmt}, progress=False)
    return made


def linear(fmt: str, m: int, n: int, k: int) -> Timed:
    return timed([partial(layer, random(m, k // SHRINK)) for layer in packed_layers(fmt, n // SHRINK, k // SHRINK)])


def experts(name: str, tokens: int) -> Timed:
    """By groups, of tokens with four experts each."""
    from benchmarks import packed_layer

    fmt, *sizes, count = EXPERTS[name]
    hidden, inner = (size // SHRINK // 32 * 32 for size in sizes)
    with torch.device(DEVICE):
        layer = packed_layer.Layer(hidden, inner, count)
        inputs = packed_layer.routing(SimpleNamespace(tokens=tokens, experts=count, picked=4))
    PACKAGE.pack_(layer, {"fprop_w": fmt}, contracted={"*": -1}, progress=False)
    compiled = torch.compile(layer, backend=PACKAGE.backend({"fprop_w": fmt}), dynamic=False)
    return timed([torch.no_grad()(partial(compiled, random(tokens, hidden), *inputs))] * 5)


def quantize(fmt: str, dims: tuple[int, ...]) -> Timed:
    return timed([partial(torch.ops.fp4compile.quantize, random(8192 // SHRINK, 8192 // SHRINK), fmt, dims)] * 5)


def model(what: str, name: str, recipe: str) -> Timed:
    """A training step of a block, or two packed layers with embedding and head: prefill, four tokens after 128."""
    from benchmarks import llama_decode

    settings = {"model": name, "layers": 1 if what == "training" else 2, "prompt": 2048, "context": 128, "tokens": 64}
    whole = llama_decode.random_model(SimpleNamespace(**settings, tiny=SHRINK > 1, device=DEVICE))
    backend, prompt = PACKAGE.backend(recipe), 2048 // SHRINK
    if what == "training":
        compiled = torch.compile(whole.model.train(), backend=backend, dynamic=False)
        x = random(4, prompt, whole.config.hidden_size).requires_grad_()

        def step() -> None:
            compiled(inputs_embeds=x, use_cache=False).last_hidden_state.backward(torch.ones_like(x))
            whole.zero_grad()
            x.grad = None

        return timed([step])
    PACKAGE.pack_(whole, recipe, progress=False)
    llama_decode.multiply_experts(whole, "grouped_mm" if what == "prefill" else "batched_mm")
    mode = {"mode": "reduce-overhead"} if DEVICE != "cpu" else {}
    session = llama_decode.Session(whole, prompt + 256, DEVICE, backend=backend, **mode)

    def generate() -> None:
        session.seen = 128
        session.prefill(prompt) if what == "prefill" else session.decode(4)

    return timed([torch.no_grad()(generate)])


# ---------------------------------------------------------------- processes


def start(tree: Path, caches: str, device: str, shrink: int) -> None:
    """Import the package of a tree, with caches of its own, into a process that measures."""
    global PACKAGE, DEVICE, SHRINK
    DEVICE, SHRINK = device, shrink
    torch.set_num_threads(1)  # those of two processes would wait for each other
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
    sys.path.insert(0, str(tree))
    import fp4compile as PACKAGE

    if not Path(PACKAGE.__file__).is_relative_to(tree):
        raise RuntimeError(f"fp4compile is {PACKAGE.__file__}, expected that of {tree}")
    x = torch.ones(64, device=DEVICE, requires_grad=True)
    torch.compile(torch.sin)(x).sum().backward()  # what starts once in a process


@functools.lru_cache(1)
def built(case: str) -> tuple[Timed, float]:
    """How a case is timed, and the seconds until it had run once."""
    torch.compiler.reset()
    begin = time.perf_counter()
    made = cases()[case]()
    common.synchronize(DEVICE)
    return made, time.perf_counter() - begin


def measured(case: str, repeats: int) -> float | str:
    """The time of a case; without repeats, the seconds until it had run once; or an error."""
    try:
        made, seconds = built(case.removeprefix("compile "))
        return made(repeats) if repeats else seconds
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def compared(name: str, once: Callable[[str, int], float | str], rounds: int) -> dict[str, Any]:
    """A row: medians of what `once` measures of each tree by turns, in three times as many rounds where they differ."""
    found: dict[str, list] = {"parent": [], "new": []}
    row: dict[str, Any] = {"case": name}
    for number in range(1, 3 * rounds + 1):
        for tree in sorted(found, reverse=bool(number % 2)):
            found[tree].append(once(tree, number))
        errors = {tree: one for tree, times in found.items() for one in times if isinstance(one, str)}
        if errors:
            return row | errors | {"flagged": True}
        if number >= rounds:
            row |= {tree: statistics.median(times) for tree, times in found.items()}
            row["new over parent"] = row["new"] / row["parent"]
            row["flagged"] = abs(row["new over parent"] - 1) > 0.02
            if not row["flagged"]:
                break
    return row


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--parent", type=Path, required=True, help="a checkout of the tree to compare with")
    parser.add_argument("--only", default="linear,experts,quantize,training,decode,prefill,compile", help="parts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=25, help="replays of one measurement")
    parser.add_argument("--jobs", type=int, default=6, help="processes a tree that compile first, or 0")
    parser.add_argument("--tiny", action="store_true", help="a case of each part in a small size, to try the script")
    args = parser.parse_args()
    every = (*cases(), *(f"compile {name}" for name in COMPILED))
    names = [name for name in every if name.split()[0] in args.only.split(",")]
    if args.tiny:
        names = list({name.split()[0]: name for name in names}.values())
    warm = [name for name in names if not name.startswith("compile")]
    trees, rows = {"parent": args.parent.resolve(), "new": Path(__file__).resolve().parents[1]}, []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        def pool(tree: str, workers: int, caches: str) -> ProcessPoolExecutor:
            of_a_process = trees[tree], f"{folder}/{caches}", args.device, 32 if args.tiny else 1
            return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start, of_a_process)

        def once(tree: str, number: int) -> float | str:
            if name in warm:
                return pools[tree].submit(measured, name, args.repeats).result()
            with pool(tree, 1, f"{tree}-{names.index(name)}-{number}") as fresh:
                return fresh.submit(measured, name, 0).result()

        compilers = [stack.enter_context(pool(tree, args.jobs, tree)) for tree in trees if args.jobs]
        for found in [each.map(measured, warm, [0] * len(warm)) for each in compilers]:
            print(f"compiled in {sum(one for one in found if not isinstance(one, str)):.0f} s of processes", flush=True)
        for each in compilers:
            each.shutdown()  # of their memory
        pools = {tree: stack.enter_context(pool(tree, 1, tree)) for tree in trees}
        for name in names:
            if name in warm:
                wait([each.submit(measured, name, 0) for each in pools.values()])
            rows.append(compared(name, once, args.rounds if name in warm else 1))
            print(*rows[-1].values(), flush=True)
            common.write(args, {"parent": str(args.parent), "rounds": args.rounds}, {"rows": rows})
    print(f"flagged: {sum(row['flagged'] for row in rows)} of {len(rows)}")


if __name__ == "__main__":
    main()
