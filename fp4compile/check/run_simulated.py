"""The cases of `check-sm100 --simulate`: the gate's launches at small shapes, executed in the simulator of their PTX.

Quantisers must return the reference's codes and scales bit for bit; stochastic rounding is compared with the reference
that rounds by eight random bits an element, as SM100 does. Products get operands for which every sum is exact in
float32, so they must equal the reference in every bit, too; where an epilogue has an approximate function, the result
must lie within its error. Every case runs under several schedules of warps, copies and matrix units.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fp4compile.check import run_prologues
from fp4compile.check.cases import Case
from fp4compile.check.product_table import PRODUCTS, Product
from fp4compile.check.quantiser_table import (
    CONFIGURATIONS,
    GROUPED_CONFIGURATIONS,
    PROLOGUE_CONFIGURATIONS,
    SIZE,
    Configuration,
)
from fp4compile.check.run_experts import up_to
from fp4compile.check.run_values import BF16, SEED, finite, not_finite, product_differences, same_bits
from fp4compile.check.simulate.launch import Simulator
from fp4compile.check.simulate.machine import Schedule
from fp4compile.formats import reference
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.hardware import Target
from fp4compile.ops.matmul import SCALED_GROUPED_MM, SCALED_MM
from fp4compile.ops.quantize import QUANTIZE, quantize_kernels
from fp4compile.templates.choose import choose
from fp4compile.templates.launch import Launch
from fp4compile.templates.multiply import multiply, scaled_mm_group
from fp4compile.templates.problem import problem_of

# Whole tiles and partly filled ones, in rows, columns and blocks.
QUANTIZE_SHAPE = (130, 400)
LONG_ROWS = (3, 2**16 + 80)  # that do not fit a program's registers
ENDS = (0, 3, 140, 140, 141, 150)  # groups without rows, of one row, of more rows than a tile; then rows of no group
ROWS = 160

Check = Callable[[Simulator], list[str]]  # returns what is wrong


def cases(sm: int, schedules: int) -> list[Case]:
    """Every case on a GPU of compute capability `sm`, each under so many schedules."""
    found: list[tuple[str, Check]] = []
    for one in CONFIGURATIONS:
        shape = LONG_ROWS if one.shape[1] > 2**15 else QUANTIZE_SHAPE
        found.append((f"quantise {one.label}, {one.format}", partial(quantized, one, shape)))
    for one in GROUPED_CONFIGURATIONS:
        found.append((f"quantise {one.label}, {one.format}", partial(quantized_groups, one)))
    for one in PROLOGUE_CONFIGURATIONS:
        found.append((f"quantise {one.label}, {one.format}", partial(quantized_after_steps, one)))
    for product in PRODUCTS:
        found.append((f"product {product.label} {product.formats}", partial(multiplied, product)))
    return [Case(name, partial(_on_schedules, sm, range(schedules), check)) for name, check in found]


def _on_schedules(sm: int, seeds: Sequence[int], check: Check) -> dict[str, Any]:
    """What a check finds under each schedule, and what the launches took."""
    wrong: list[str] = []
    kernels: dict[str, None] = {}
    launches: set[str] = set()
    instructions, seconds, notes = 0, 0.0, Counter[str]()
    for seed in seeds:
        simulator = Simulator(Target(sm), Schedule(seed))
        wrong += [f"schedule {seed}: {what}" for what in check(simulator)]
        kernels |= dict.fromkeys(launch.kernel.__name__ for launch in simulator.launches)
        launches |= set(map(launch_key, simulator.launches))
        instructions += simulator.tally.instructions
        notes += simulator.tally.notes
        seconds += simulator.seconds
    return {
        "kernels": ", ".join(kernels),
        "schedules": len(seeds),
        "warp instructions": instructions,
        "seconds": round(seconds, 2),
        "launches": sorted(launches),
        "notes": dict(notes),
        "wrong": wrong,
    }


def launch_key(launch: Launch) -> str:
    """What the code of a launch depends on, but for the divisibility of sizes and the number of groups."""
    constants = sorted((name, str(value)) for name, value in launch.constants.items() if name != "GROUPS")
    return f"{launch.kernel.__name__} {launch.num_warps} {launch.num_stages} {constants}"


def table_keys(sm: int) -> dict[str, str]:
    """For the key of each launch of the gate's table: the kernel and the first entry that has it."""
    found: dict[str, str] = {}
    for entry in (*CONFIGURATIONS, *GROUPED_CONFIGURATIONS, *PROLOGUE_CONFIGURATIONS, *PRODUCTS):
        launches = entry.launches(sm)[1] if isinstance(entry, Product) else entry.launches(sm)
        name = f"{entry.label} {entry.formats if isinstance(entry, Product) else entry.format}"
        for launch in launches:
            found.setdefault(launch_key(launch), f"{launch.kernel.__name__} of {name}")
    return found


# ---------------------------------------------------------------- quantisers


def quantized(configuration: Configuration, shape: tuple[int, int], simulator: Simulator) -> list[str]:
    """Differences between the kernels and the reference, of finite values and of others."""
    layout = configuration.layout_on(simulator.target.sm)
    eight_bits = configuration.seeded and simulator.target.isa == 100
    wrong = []
    for name, made in (("finite", finite), ("not finite", not_finite)):
        x = made(shape).to(configuration.dtype)
        with reference.eight_random_bits() if eight_bits else contextlib.nullcontext():
            expected = configuration.call(x, layout)
        with simulator.running():
            got = configuration.call_kernels(x, layout)
        wrong += [f"{name}: {what}" for what in same_bits(got, expected)]
    return wrong


def quantized_groups(configuration: Configuration, simulator: Simulator) -> list[str]:
    """Differences between the kernels of groups and the reference; rows of no group are not compared."""
    layout = configuration.layout_on(simulator.target.sm)
    options: dict[str, Any] = {"layout": layout, "hadamard": configuration.hadamard}
    if configuration.seeded:
        options["seed"] = torch.tensor(SEED)
    x, end = finite((ROWS, 400)).to(BF16), None
    if configuration.groups == "rows":
        options["offs"] = torch.tensor(ENDS, dtype=torch.int32)
        end = ENDS[-1] if configuration.dim[0] == -1 else None
    else:
        x, options["each_matrix"] = finite((3, 40, 80)).to(BF16), True
    eight_bits = configuration.seeded and simulator.target.isa == 100
    with reference.eight_random_bits() if eight_bits else contextlib.nullcontext():
        expected = QUANTIZE(x, configuration.format, list(configuration.dim), **options)
    with simulator.running():
        got = quantize_kernels(x, configuration.format, list(configuration.dim), **options)
    if len(configuration.dim) == 1:
        return same_bits(up_to(got, end), up_to(expected, end))
    return [f"{which}: {what}" for which, part, stop in (("rows", slice(0, 3), end), ("columns", slice(3, 6), None))
            for what in same_bits(up_to(got[part], stop), up_to(expected[part], stop))]  # fmt: skip


def quantized_after_steps(configuration: Configuration, simulator: Simulator) -> list[str]:
    """Differences of a quantiser with a prologue: in the value that it computes, and in its codes and scales."""
    steps = configuration.steps
    options: dict[str, Any] = {"layout": configuration.layout_on(simulator.target.sm)}
    if configuration.static:
        options["outer"] = torch.tensor(0.01)
    shape, end = QUANTIZE_SHAPE, None
    if configuration.shape[1] != SIZE:  # rows whose length decides how many tiles hold them
        shape = (3, configuration.shape[1])
    if configuration.groups:
        shape, end = (ROWS, 400), ENDS[-1]
        options["offs"] = torch.tensor(ENDS, dtype=torch.int32)
    wrong = []
    for name, made in (("finite", finite), ("not finite", not_finite)):
        operands = run_prologues.operands_of(steps, shape, made)
        if configuration.halves:
            operands[:2] = torch.cat(operands[:2], -1).chunk(2, -1)
        with simulator.running():
            found = run_prologues.compared(operands, steps, configuration.format, configuration.dim, end, **options)
        wrong += [f"{name}: {what}" for what in found]
    return wrong


# ---------------------------------------------------------------- products


def multiplied(product: Product, simulator: Simulator) -> list[str]:
    """Differences between the kernel that the gate's table names for a product and the reference, at a small shape."""
    choice, _ = product.served(simulator.target)
    if choice is None:
        return [f"no kernel on compute capability {simulator.target.sm}"]
    small = reduced(product)
    arguments = exact_arguments(small)
    if small.weights > 1:
        members = [(exact(arguments.b, i), None) for i in range(small.weights)]
        with simulator.running():
            got = scaled_mm_group(arguments.a, members, BF16)
        return [f"weight {i}: {what}" for i, (one, (b, _)) in enumerate(zip(got, members, strict=True))
                for what in _differences(one, replace(arguments, b=b))]  # fmt: skip
    with simulator.running():
        got = multiply(arguments, choose(problem_of(arguments, simulator.target), choice.kernel))
    return _differences(got, arguments)


def reduced(product: Product) -> Product:
    """A product with partly filled tiles in each direction where the table's has whole ones, and few of them.

    The remainders by 16, which decide how rows are loaded and stored, stay.
    """
    n = 272 - (-product.n % 16)
    k = 1536 - (-product.k % 256)
    if product.groups:
        rows = {"k": ROWS} if product.along_k else {"m": ROWS}
        return replace(product, groups=len(ENDS), **{"m": 144, "n": n, "k": 512} | rows)
    return replace(product, m=product.m if product.m <= 64 else 144, n=n, k=k)


def exact_arguments(product: Product) -> Arguments:
    """Arguments of a product for which every sum is exact in float32."""
    x = product.arguments()
    generator = torch.Generator().manual_seed(SEED)

    def whole(shape: Sequence[int]) -> torch.Tensor:
        return torch.randint(-3, 4, tuple(shape), generator=generator).to(BF16)

    return replace(
        x, a=exact(x.a, 100), b=exact(x.b, 0), bias=None if x.bias is None else whole(x.bias.shape),
        auxiliaries=[whole(each.shape) for each in x.auxiliaries],
        offs=None if x.offs is None else torch.tensor(ENDS, dtype=torch.int32),
    )  # fmt: skip


_SCALES = {"e4m3": (0x30, 0x38, 0x40), "e8m0": (126, 127, 128)}  # 1/2, 1, 2
_MAGNITUDES = {"e2m1": (0, 1, 2, 3, 4, 5), "e4m3": (0x00, 0x30, 0x38, 0x40, 0x44), "e5m2": (0x00, 0x38, 0x3C, 0x40)}


def exact(x: Operand, seed: int) -> Operand:
    """An operand like one on the meta device: small elements, block scales 1/2, 1 and 2, outer scales alike."""
    generator = torch.Generator().manual_seed(SEED + seed)

    def chosen(values: Sequence[float], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), tuple(shape), generator=generator)]

    if x.format is None:
        return replace(x, data=chosen(range(-3, 4), x.data.shape, BF16))
    fmt = x.format

    def codes(sign: int) -> torch.Tensor:
        signs = chosen((0, sign), x.data.shape, torch.uint8)
        return chosen(_MAGNITUDES[fmt.element], x.data.shape, torch.uint8) | signs

    data = (codes(8) | codes(8) << 4 if fmt.packed else codes(128)).view(fmt.data_dtype)
    scales = None
    if x.scales is not None and fmt.scale is not None:
        scales = chosen(_SCALES[fmt.scale], x.scales.shape, torch.uint8).view(fmt.scale_dtype)
    outer = None if x.outer is None else chosen((0.5, 1.0, 2.0), x.outer.shape, torch.float32)
    return Operand(data, scales, outer, fmt)


def _differences(got: torch.Tensor, x: Arguments) -> list[str]:
    a, b = ((each.data, each.scales, each.outer, each.format and each.format.name) for each in (x.a, x.b))
    if x.offs is not None:
        expected = SCALED_GROUPED_MM(*a, *b, x.offs, x.rows, x.out_dtype)
        if got.dim() == 2:  # rows of no group mean nothing
            got, expected = got[: ENDS[-1]], expected[: ENDS[-1]]
        return same_bits(got, expected)
    if x.epilogue is None:
        return same_bits(got, SCALED_MM(*a, *b, x.bias, x.out_dtype))
    return product_differences(got, x.a, x.b, x.a.k, x.bias, x.epilogue, tuple(x.auxiliaries))
