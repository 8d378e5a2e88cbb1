"""The times of `check-sm100 --run`: quantise kernels and a copy of the same bytes, matmuls and the libraries.

Every time is the median of replays of a CUDA graph. Several copies of the weights are multiplied in turn, so that they
are read from memory, like a model's weights, and not from the L2 cache.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fp4compile.check.cases import Case
from fp4compile.check.products import MatmulCase, operand
from fp4compile.check.quantisers import CONFIGURATIONS, GATE, Configuration
from fp4compile.formats.layouts import ceil_div
from fp4compile.formats.operand import Arguments
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.passes.lib.autotune import replay_time
from fp4compile.templates.choose import candidates, choose
from fp4compile.templates.launch import target_of
from fp4compile.templates.multiply import multiply, results
from fp4compile.templates.problem import problem_of

REPLAYS = 21
CALLS = 10  # calls of a graph
COPIED = 512 * 2**20  # bytes of the copy that is timed
NOT_CACHED = 512 * 2**20  # bytes of all copies of a weight: several times the L2 cache of every GPU
MOST_COPIES = 32
PAIRS = (("nvfp4", "nvfp4"), ("nvfp4_one_level", "nvfp4_one_level"), ("nvfp4_rowwise", "nvfp4_te"), ("mxfp8", "mxfp8"),
         ("mxfp4", "mxfp4"), (None, "nvfp4"))  # fmt: skip
SHAPES = ((8192, 8192, 8192), (1024, 14336, 4096), (64, 8192, 8192), (16, 8192, 8192), (1, 8192, 8192))
QUANTISED = ("nvfp4", "nvfp4_one_level", "mxfp8", "mxfp4")  # of operands and result
# Dense and of experts; then with quantised results, for experts those of gate and up.
PRODUCTS = (
    *(MatmulCase(a, b, *shape) for shape in SHAPES for a, b in PAIRS),
    *(MatmulCase(name, name, 16384, 4096, 14336, groups=8) for name in QUANTISED),
    *(MatmulCase(name, name, 8192, 14336, 4096, result=name) for name in QUANTISED),
    *(MatmulCase(name, name, 16384, 14336, 4096, epilogue="pair", groups=8, result=name) for name in QUANTISED),
)


def cases() -> list[Case]:
    return [
        Case("copy of the device", copied),
        *(Case(f"time of quantise {one.label}, {one.format}", partial(quantized, one))
          for one in CONFIGURATIONS if not (one.dequantizes or one.lays_out)),
        *(Case(f"time of product {one.formats}, {one.label}", partial(multiplied, one)) for one in PRODUCTS),
    ]  # fmt: skip


def graph_time(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds for each call: the median replay of a CUDA graph of `calls`."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return statistics.median(replay_time(graph) for _ in range(REPLAYS)) / len(calls)


def copy_rate() -> float:
    """Bytes that a copy reads and writes together in a microsecond."""
    source = torch.empty(COPIED // 16, dtype=torch.int64, device="cuda")
    target = torch.empty_like(source)
    return COPIED / graph_time([lambda: target.copy_(source)] * CALLS)


def copied() -> dict[str, Any]:
    return {"TB/s": round(copy_rate() / 1e6, 2)}


def quantized(configuration: Configuration) -> dict[str, Any]:
    """The time of a configuration, its TB/s, and the share of a copy's rate.

    Every kernel of the configuration reads the input, an amax kernel too.
    """
    sm = target_of(torch.device("cuda")).sm
    layout, reads = configuration.layout_on(sm), len(configuration.launches(sm))
    inputs = [torch.randn(configuration.shape, device="cuda").to(configuration.dtype) for _ in range(2)]
    moved = reads * _bytes(inputs[0]) + _bytes(configuration.call(inputs[0], layout))
    time = graph_time([partial(configuration.call, x, layout) for x in inputs] * (CALLS // 2))
    return {
        "us": round(time, 1),
        "TB/s": round(moved / time / 1e6, 2),
        "of a copy": round(moved / time / copy_rate(), 2),
    }


def _bytes(outputs: Any) -> int:
    if isinstance(outputs, torch.Tensor):
        return outputs.numel() * outputs.element_size()
    return sum(map(_bytes, outputs or ()))


def multiplied(product: MatmulCase) -> dict[str, Any]:
    """The time of a matmul by each kernel that may compute it.

    For a result in bf16: TFLOP/s of the chosen kernel, and for a dense matmul the time of the library in bf16. For a
    quantised result: the time of a matmul and a separate quantiser; empty on GPUs without a kernel that quantises it. A
    kernel that fails is listed with its error under "wrong"; all other kernels are still timed.
    """
    x, wrong = _arguments(product), []
    problem = problem_of(x, target_of(torch.device("cuda")))
    if product.result and not candidates(problem):
        return {}
    m, n, k = product.m, product.n, product.k
    copies = 1 if product.groups or product.result else min(max(1, NOT_CACHED // (n * k // 2)), MOST_COPIES)
    turns = [x, *(_arguments(product) for _ in range(copies - 1))] * ceil_div(CALLS, copies)
    chosen = choose(problem).kernel
    found: dict[str, Any] = {"chosen": chosen}
    for name in dict.fromkeys((chosen, *candidates(problem))):
        choice = choose(problem, name)
        try:
            found[f"{name} us"] = round(graph_time([partial(results, one, choice) for one in turns]), 2)
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}"[:300])
    time = found.get(f"{chosen} us")
    if product.result:
        found["product and quantiser us"] = round(graph_time([partial(_separately, product, x)] * CALLS), 2)
    elif time is not None:
        found["TFLOP/s"] = round(2 * m * n * k / time / 1e6, 1)
    if not (product.result or product.groups):
        left, weights = _random(m, k), [_random(n, k) for _ in range(ceil_div(copies, 4))]
        calls = [partial(torch.mm, left, w.t()) for w in weights] * ceil_div(CALLS, len(weights))
        found["bf16 us"] = round(graph_time(calls), 2)
        if time is not None:
            found["over bf16"] = round(found["bf16 us"] / time, 2)
    return found | ({"wrong": wrong} if wrong else {})


def _arguments(product: MatmulCase) -> Arguments:
    """Random operands of a matmul on the GPU; of experts, equally many tokens each."""
    x = product.arguments()
    outer = None if x.result_outer is None else torch.ones((), device="cuda")
    (m, k), weights = (product.m, product.k), (*x.b.data.shape[:-1], product.k)
    offs, grouped = None, bool(product.groups)
    if grouped:
        offs = torch.arange(1, product.groups + 1, device="cuda", dtype=torch.int32) * (m // product.groups)
    native = grouped or target_of(torch.device("cuda")).block_scaled_matrix_units
    a = operand(product.a, _random(m, k), native, offs=offs)
    b = operand(product.b, _random(*weights), native, per_matrix=grouped)
    return x.but(a=a, b=b, offs=offs, result_outer=outer)


def _separately(product: MatmulCase, x: Arguments) -> None:
    """Run a matmul and then a kernel that quantises its result, where `product` names one kernel for both.

    Of two weights' results side by side (epilogue "pair") the second kernel quantises the gated product.
    """
    options: dict[str, Any] = {"offs": x.offs}
    parts: Sequence[torch.Tensor] = [multiply(x.but(epilogue=None, result_outer=None))]
    if product.epilogue == "pair":
        parts = parts[0].chunk(2, -1)
        options |= {"prologue": GATE, "dtype": torch.bfloat16}
    first, *others = parts
    QUANTIZE(first, product.result, [-1], layout="swizzled", outer=x.result_outer, operands=others, **options)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
