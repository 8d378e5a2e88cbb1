"""Times of two trees of this repository, measured by turns on one device: {"rows": ..., "flagged": ...} as JSON.

    python -m benchmarks.compare_trees --parent CHECKOUT --out FILE [--only linear,experts,...] [--rounds 3] [--jobs 6]

First, --jobs processes a tree compile all kernels; then one of each tree measures, by turns. What differs by more than
2 % is measured again; what still does is flagged. "compile" is the first call in a fresh process with empty caches, in
seconds; the others are microseconds.
"""

import functools
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
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import common

LINEAR = ((4096, 4096), (14336, 4096), (4096, 14336))  # N, K
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 512, 2048)
EXPERTS = {"mixtral": ("nvfp4", 2048, 7168, 8), "gpt-oss": ("mxfp4", 2880, 2880, 32)}  # weights, hidden, inner, count
FORMATS = ("nvfp4", "nvfp4_one_level", "nvfp4_te", "nvfp4_16x16", "nvfp4_rowwise", "mxfp8", "mxfp8_32x32", "mxfp4",
           "float8_rowwise")  # fmt: skip
ALLOWED = 0.02
Timed = Callable[[int], float]  # the time by so many replays or repeats
PACKAGE: Any = None  # fp4compile, of this process's tree
DEVICE, SHRINK = "cuda", 1  # of this process; SHRINK divides sizes


def cases() -> dict[str, partial[Timed]]:
    """What builds each case, runs it once, and returns how it is timed. A name begins with the part."""
    linears, quantisers = product(LINEAR, ("nvfp4", "mxfp8", "mxfp4"), ROWS), product(FORMATS, ([-1], [-2], [-1, -2]))
    made = {f"linear {fmt} {m}x{n}x{k}": partial(linear, fmt, m, n, k) for (n, k), fmt, m in linears}
    for name, tokens in product(EXPERTS, (1, 4, 16, 64, 128, 512)):
        made[f"experts {name}, {tokens} tokens"] = partial(experts, *EXPERTS[name], tokens)
    made |= {f"quantize {fmt} along {dims}": partial(quantize, fmt, dims) for fmt, dims in quantisers}
    for recipe in ("nvfp4_train", "mxfp8", "float8_rowwise"):
        made[f"training {recipe}"] = partial(model, "training", recipe)
    for what, name, recipe in product(
        ("decode", "prefill"), ("llama-3-8b", "qwen3-30b-a3b"), ("nvfp4", "nvfp4_weight_only")
    ):
        made[f"{what} {name} {recipe}"] = partial(model, what, recipe, name)
    return made | {f"compile {what} {recipe}": partial(model, what, recipe)
                   for what, recipe in (("training", "nvfp4_train"), ("prefill", "nvfp4_weight_only"))}  # fmt: skip


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
    with torch.device(DEVICE):
        layers = [torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16) for _ in range(max(3, int(4e8 / (n * k))))]
    PACKAGE.pack_(packed := torch.nn.ModuleList(layers[: 3 if SHRINK > 1 else None]), {"fprop_w": fmt}, progress=False)
    return packed


def linear(fmt: str, m: int, n: int, k: int) -> Timed:
    x = random(m, k // SHRINK)
    return timed([partial(layer, x) for layer in packed_layers(fmt, n // SHRINK, k // SHRINK)])


def experts(fmt: str, hidden: int, inner: int, count: int, tokens: int) -> Timed:
    """By groups, of tokens with four experts each."""
    from benchmarks import packed_layer

    hidden, inner = (size // SHRINK // 32 * 32 for size in (hidden, inner))
    with torch.device(DEVICE):
        layer = packed_layer.Layer(hidden, inner, count)
        inputs = packed_layer.routing(SimpleNamespace(tokens=tokens, experts=count, picked=4))
    PACKAGE.pack_(layer, {"fprop_w": fmt}, contracted={"*": -1}, progress=False)
    compiled = torch.compile(layer, backend=PACKAGE.backend({"fprop_w": fmt}), dynamic=False)
    return timed([torch.no_grad()(partial(compiled, random(tokens, hidden), *inputs))] * 5)


def quantize(fmt: str, dims: list[int]) -> Timed:
    return timed([partial(torch.ops.fp4compile.quantize, random(8192 // SHRINK, 8192 // SHRINK), fmt, dims)] * 5)


def model(what: str, recipe: str, name: str = "llama-3-8b") -> Timed:
    """A training step of one block without the head, or prefill or four decoded tokens of two packed ones."""
    from benchmarks import llama_decode

    args = SimpleNamespace(model=name, layers=1 if what == "training" else 2, prompt=2048 // SHRINK, context=128,
                           tokens=64, tiny=SHRINK > 1, device=DEVICE)  # fmt: skip
    whole, backend = llama_decode.random_model(args), PACKAGE.backend(recipe)
    if what == "training":
        compiled = torch.compile(whole.model.train(), backend=backend, dynamic=False)
        x = random(4, args.prompt, whole.config.hidden_size).requires_grad_()

        def step() -> None:
            compiled(inputs_embeds=x, use_cache=False).last_hidden_state.backward(torch.ones_like(x))
            whole.zero_grad()
            x.grad = None
    else:
        PACKAGE.pack_(whole, recipe, progress=False)
        llama_decode.multiply_experts(whole, "batched_mm" if what == "decode" else "grouped_mm")
        how = {"mode": "reduce-overhead"} if DEVICE != "cpu" else {}
        session = llama_decode.Session(whole, max(args.prompt, 256), DEVICE, backend=backend, **how)

        @torch.no_grad()
        def step() -> None:
            session.seen = args.context  # of zeros
            session.prefill(args.prompt) if what == "prefill" else session.decode(4)

    return timed([step])


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
        made, seconds = built(case)
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
            row["flagged"] = abs(row["new over parent"] - 1) > ALLOWED
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
    names = [name for name in cases() if name.split()[0] in args.only.split(",")]
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
