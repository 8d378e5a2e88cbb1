"""The times of `check-sm100 --run`: quantise kernels beside a copy of the same bytes, products beside the libraries.

Every time is the median of replays of a CUDA graph. Several copies of the weights are multiplied in turn, so that they
come from memory, as a model's weights do, and not from the L2 cache.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from fp4compile.check.cases import Case
from fp4compile.check.product_values import operand
from fp4compile.check.quantiser_table import CONFIGURATIONS, Configuration
from fp4compile.formats.epilogue import Epilogue
from fp4compile.formats.layouts import ceil_div
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.formats.quantize_spec import QuantizeSpec
from fp4compile.ops.functional import quantize
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
QUANTISED = ("nvfp4", "nvfp4_one_level", "mxfp8", "mxfp4")  # of operands and result
TO_CODES = (8192, 14336, 4096)
EXPERTS = (8, 16384, 4096, 14336)  # experts; tokens of all together, columns, K
EXPERTS_TO_CODES = (8, 16384, 14336, 4096)  # experts; tokens of all together, columns of gate and of up, K
SHAPES = ((8192, 8192, 8192), (1024, 14336, 4096), (64, 8192, 8192), (16, 8192, 8192), (1, 8192, 8192))


def cases() -> list[Case]:
    return [
        Case("copy of the device", copied),
        *(Case(f"time of quantise {one.label}, {one.format}", partial(quantized, one))
          for one in CONFIGURATIONS if not (one.dequantizes or one.lays_out)),
        *(Case(f"time of product {a or 'bf16'} x {b}, {m}x{n}x{k}", partial(multiplied, a, b, m, n, k))
          for m, n, k in SHAPES for a, b in PAIRS),
        *(Case(f"time of experts {name} x {name}, {'x'.join(map(str, EXPERTS))}", partial(experts, name, *EXPERTS))
          for name in QUANTISED),
        *(Case(f"time of product {name} x {name} to codes, {'x'.join(map(str, TO_CODES))}",
               partial(multiplied_to_codes, name, *TO_CODES)) for name in QUANTISED),
        *(Case(f"time of experts {name} x {name} to codes, {'x'.join(map(str, EXPERTS_TO_CODES))}",
               partial(experts_to_codes, name, *EXPERTS_TO_CODES)) for name in QUANTISED),
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


def multiplied(a: str | None, b: str, m: int, n: int, k: int) -> dict[str, Any]:
    """The time of a product by each kernel that may compute it, and of the library's bf16 product; TFLOP/s of the best.

    A kernel that fails is listed with its error under "wrong"; all other kernels are still timed.
    """
    copies = min(max(1, NOT_CACHED // (n * k // 2)), MOST_COPIES)
    left = _operand(a, m, k)
    rights = [_operand(b, n, k) for _ in range(copies)]
    turns = rights * ceil_div(CALLS, copies)
    found, wrong = _by_each_kernel([Arguments(left, right, None, torch.bfloat16) for right in turns])
    chosen = found["chosen"]
    x, weights = _random(m, k), [_random(n, k) for _ in range(ceil_div(copies, 4))]
    found["bf16 us"] = round(
        graph_time([partial(torch.mm, x, w.t()) for w in weights] * ceil_div(CALLS, len(weights))), 2
    )
    if f"{chosen} us" in found:
        found["TFLOP/s"] = round(2 * m * n * k / found[f"{chosen} us"] / 1e6, 1)
        found["over bf16"] = round(found["bf16 us"] / found[f"{chosen} us"], 2)
    return found | ({"wrong": wrong} if wrong else {})


def _by_each_kernel(turns: Sequence[Arguments]) -> tuple[dict[str, Any], list[str]]:
    """(the chosen kernel, and the time of each kernel that may compute these equal products; the errors)."""
    problem = problem_of(turns[0], target_of(torch.device("cuda")))
    chosen = choose(problem).kernel
    found: dict[str, Any] = {"chosen": chosen}
    wrong = []
    for name in dict.fromkeys((chosen, *candidates(problem))):
        choice = choose(problem, name)
        try:
            found[f"{name} us"] = round(graph_time([partial(results, x, choice) for x in turns]), 2)
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}"[:300])
    return found, wrong


def experts(name: str, groups: int, m: int, n: int, k: int) -> dict[str, Any]:
    """The time of the product of experts of equally many tokens, m of all together, by each kernel; TFLOP/s.

    Their weights exceed the L2 cache.
    """
    found, wrong = _by_each_kernel([_of_experts(name, groups, m, n, k)] * CALLS)
    if (time := found.get(f"{found['chosen']} us")) is not None:
        found["TFLOP/s"] = round(2 * m * n * k / time / 1e6, 1)
    return found | ({"wrong": wrong} if wrong else {})


def multiplied_to_codes(name: str, m: int, n: int, k: int) -> dict[str, Any]:
    """The time of a product by each kernel that quantises its result, and of the chosen product and a quantiser.

    Empty on GPUs without such a kernel.
    """
    fused = _quantising(Arguments(_operand(name, m, k), _operand(name, n, k), None, torch.bfloat16), [], name)
    return _beside_a_quantiser(fused, lambda product: (product,), {})


def experts_to_codes(name: str, groups: int, m: int, n: int, k: int) -> dict[str, Any]:
    """`multiplied_to_codes` for experts of equally many tokens: of relu(gate) * up, whose weights are [groups, 2 n, k].

    The quantiser computes relu(gate) * up itself.
    """
    plain = _of_experts(name, groups, m, 2 * n, k)
    fused = _quantising(plain, ["relu product", "mul s0 pair"], name)
    steps = {"prologue": ["relu aux0", "mul s0 aux1"], "dtype": torch.bfloat16}
    return _beside_a_quantiser(fused, lambda product: product.chunk(2, -1), {"offs": plain.offs, **steps})


def _of_experts(name: str, groups: int, m: int, n: int, k: int) -> Arguments:
    """m tokens, equally many of each expert, and their weights [groups, n, k]."""
    offs = torch.arange(1, groups + 1, device="cuda", dtype=torch.int32) * (m // groups)
    left = quantize(_random(m, k), name, offs=offs, layout="swizzled")
    right = quantize(_random(groups, n, k), name, per_matrix=True, layout="swizzled")
    a, b = (Operand(each.data, each.scales, each.outer, each.format) for each in (left, right))
    return Arguments(a, b, None, torch.bfloat16, offs=offs)


def _quantising(plain: Arguments, steps: list[str], name: str) -> Arguments:
    """A product whose epilogue quantises its result after the steps."""
    epilogue = Epilogue.parse([*steps, f"quantize {name}"], torch.bfloat16, torch.bfloat16)
    outer = torch.ones((), device="cuda") if cast(QuantizeSpec, epilogue.quantize).static else None
    return replace(plain, epilogue=epilogue, result_outer=outer)


def _beside_a_quantiser(fused: Arguments, parts: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """The time of a product by each kernel that quantises its result, and of the product and a quantiser with options.

    A kernel that fails is listed with its error under "wrong". parts: the tensors that the quantiser reads of the
    product. Empty on GPUs without such a kernel.
    """
    if not candidates(problem_of(fused, target_of(torch.device("cuda")))):
        return {}
    plain, name = replace(fused, epilogue=None, result_outer=None), cast(QuantizeSpec, fused.result_spec).format.name

    def apart() -> None:
        x, *others = parts(multiply(plain))
        QUANTIZE(x, name, [-1], layout="swizzled", outer=fused.result_outer, operands=others, **options)

    found, wrong = _by_each_kernel([fused] * CALLS)
    found["product and quantiser us"] = round(graph_time([apart] * CALLS), 2)
    return found | ({"wrong": wrong} if wrong else {})


def _operand(name: str | None, rows: int, columns: int) -> Operand:
    return operand(name, _random(rows, columns), target_of(torch.device("cuda")).block_scaled_matrix_units)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
