"""The cases of `check-sm100 --simulate`: the gate's launches at small shapes, executed in the simulator of their PTX.

Quantisers must return the reference's codes and scales bit for bit; stochastic rounding is compared with the reference
that rounds by eight random bits an element, as SM100 does. Products get operands for which every sum is exact in
float32, so they must equal the reference in every bit, too; where an epilogue has an approximate function, the result
must lie within its error. Every case runs under several schedules of warps, copies and matrix units.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fp4compile.check import run_prologues
from fp4compile.check.cases import Case
from fp4compile.check.product_table import PRODUCTS, Product
from fp4compile.check.quantiser_table import (
    ALL_CONFIGURATIONS,
    CONFIGURATIONS,
    GROUPED_CONFIGURATIONS,
    PROLOGUE_CONFIGURATIONS,
    SIZE,
    Configuration,
)
from fp4compile.check.run_experts import up_to
from fp4compile.check.run_values import (
    BF16,
    SEED,
    finite,
    not_finite,
    product_differences,
    quantised_differences,
    same_bits,
    schema,
)
from fp4compile.check.simulate.launch import Simulator
from fp4compile.check.simulate.run import Schedule
from fp4compile.formats import reference
from fp4compile.formats.groups import Groups
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.hardware import Target
from fp4compile.ops.matmul import SCALED_GROUPED_MM, SCALED_MM
from fp4compile.ops.quantize import QUANTIZE, quantize_kernels
from fp4compile.templates.choose import choose
from fp4compile.templates.launch import Launch
from fp4compile.templates.multiply import multiply, scaled_mm_group
from fp4compile.templates.problem import problem_of

# Whole tiles, as in the table, whose launches have the same constants; then partly filled tiles, blocks and words.
WHOLE, RAGGED = (256, 512), (130, 400)
LONG_ROWS = 2**16  # elements, that do not fit a program's registers
# Each kernel that finds an amax: threads, lanes and words that it leaves out show where only one element is large.
FEW_ROWS = (("rows", "nvfp4"), ("both, transform, seed", "nvfp4_te"))
ENDS = (0, 3, 140, 140, 141, 150)  # groups without rows, of one row, of more rows than a tile; then rows of no group
ROWS = 160

Check = Callable[[Simulator], list[str]]  # returns what is wrong


@dataclass(frozen=True)
class Variant:
    """One way to run a case. multiprocessors: of the GPU, 0 for as many as it has."""

    check: Check
    multiprocessors: int = 0


def cases(sm: int, schedules: int) -> list[Case]:
    """Every case on a GPU of compute capability `sm`: so many schedules, which take turns with the case's variants."""
    found: list[tuple[str, list[Variant]]] = []
    checks = ((CONFIGURATIONS, quantized), (GROUPED_CONFIGURATIONS, quantized_groups),
              (PROLOGUE_CONFIGURATIONS, quantized_after_steps))  # fmt: skip
    for table, check in checks:
        for one in table:
            shapes = (WHOLE, RAGGED) if one.shape[1] < LONG_ROWS else ((3, LONG_ROWS), (3, LONG_ROWS + 80))
            variants = [Variant(partial(check, one, shape)) for shape in shapes]
            found.append((f"quantise {one.label}, {one.format}", variants))
    found += [(f"few rows, {one.label}, {one.format}", [Variant(partial(quantized_few_rows, one))])
              for one in CONFIGURATIONS if (one.label, one.format) in FEW_ROWS]  # fmt: skip
    found += [(f"product {one.label} {one.formats}", product_variants(one)) for one in PRODUCTS]
    return [Case(name, partial(_on_schedules, sm, range(schedules), variants)) for name, variants in found]


def _on_schedules(sm: int, seeds: Sequence[int], variants: Sequence[Variant]) -> dict[str, Any]:
    """What is wrong under each schedule, and what the launches took."""
    wrong: list[str] = []
    kernels: dict[str, None] = {}
    launches: set[str] = set()
    instructions, seconds, notes = 0, 0.0, Counter[str]()
    for seed in seeds:
        variant = variants[seed % len(variants)]
        simulator = Simulator(Target(sm, variant.multiprocessors), Schedule(seed))
        wrong += [f"schedule {seed}: {what}" for what in variant.check(simulator)]
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
    entries = [(one.launches(sm), f"{one.label} {one.format}") for one in ALL_CONFIGURATIONS]
    entries += [(one.launches(sm)[1], f"{one.label} {one.formats}") for one in PRODUCTS]
    for launches, name in entries:
        for launch in launches:
            found.setdefault(launch_key(launch), f"{launch.kernel.__name__} of {name}")
    return found


# ---------------------------------------------------------------- quantisers


def quantized(configuration: Configuration, shape: tuple[int, int], simulator: Simulator) -> list[str]:
    """Differences between the kernels and the reference, of finite values and of others."""
    inputs = (("finite", finite), ("not finite", not_finite))
    return [f"{name}: {what}" for name, made in inputs for what in _of_input(configuration, made(shape), simulator)]


def quantized_few_rows(configuration: Configuration, simulator: Simulator) -> list[str]:
    """Like `quantized`, for 2 to 15 rows, each with one large element in another place; and extreme outer scales."""
    x = finite(RAGGED)
    inputs = {"zeros": 0 * x, "tiny": x * 2.0**-90, "huge": x * 2.0**90}
    for rows in range(2, 16):
        x = finite((rows, RAGGED[1])).clamp(-1, 1)
        row, column = rows // 2, (93 * rows + 7) % RAGGED[1]
        x[row, column] = 100
        inputs[f"{rows} rows"] = x
    return [f"{name}: {what}" for name, x in inputs.items() for what in _of_input(configuration, x, simulator)]


def _of_input(configuration: Configuration, x: torch.Tensor, simulator: Simulator) -> list[str]:
    layout = configuration.layout_on(simulator.target.sm)
    x = x.to(configuration.dtype)
    with _rounded_as_on(simulator, configuration):
        expected = configuration.call(x, layout)
    with simulator.running():
        got = configuration.call_kernels(x, layout)
    return same_bits(got, expected)


def _rounded_as_on(simulator: Simulator, configuration: Configuration) -> contextlib.AbstractContextManager:
    """A context in which the reference takes as many random bits for an element as the GPU."""
    eight_bits = configuration.seeded and simulator.target.isa == 100
    return reference.eight_random_bits() if eight_bits else contextlib.nullcontext()


def quantized_groups(configuration: Configuration, shape: tuple[int, int], simulator: Simulator) -> list[str]:
    """Differences between the kernels of groups and the reference; rows of no group are not compared."""
    layout, (_, columns) = configuration.layout_on(simulator.target.sm), shape
    options: dict[str, Any] = {"layout": layout, "hadamard": configuration.hadamard}
    if configuration.seeded:
        options["seed"] = torch.tensor(SEED)
    x, end = finite((ROWS, columns)).to(BF16), None
    if configuration.groups == "rows":
        options["offs"] = torch.tensor(ENDS, dtype=torch.int32)
        end = ENDS[-1] if configuration.dim[0] == -1 else None
    else:
        x, options["each_matrix"] = finite((3, 128, columns)).to(BF16), True
    with _rounded_as_on(simulator, configuration):
        expected = QUANTIZE(x, configuration.format, list(configuration.dim), **options)
    with simulator.running():
        got = quantize_kernels(x, configuration.format, list(configuration.dim), **options)
    if len(configuration.dim) == 1:
        return same_bits(up_to(got, end), up_to(expected, end))
    return [f"{which}: {what}" for which, part, stop in (("rows", slice(0, 3), end), ("columns", slice(3, 6), None))
            for what in same_bits(up_to(got[part], stop), up_to(expected[part], stop))]  # fmt: skip


def quantized_after_steps(configuration: Configuration, shape: tuple[int, int], simulator: Simulator) -> list[str]:
    """Differences of a quantiser with a prologue: in the value that it computes, and in its codes and scales."""
    steps = configuration.steps
    options: dict[str, Any] = {"layout": configuration.layout_on(simulator.target.sm)}
    if configuration.static:
        options["outer"] = torch.tensor(0.01)
    end = None
    if configuration.shape[1] != SIZE:  # rows whose length decides how many tiles hold them
        shape = (3, configuration.shape[1] if shape == WHOLE else configuration.shape[1] - 48)
    if configuration.groups:
        shape, end = (ROWS, shape[1]), ENDS[-1]
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


def product_variants(product: Product) -> list[Variant]:
    """Two ways to run a product.

    On two multiprocessors, a launch has the tiles of the table, and programs walk over several of them. On all, it has
    tiles for few rows and columns. The kernel that cuts K for few rows takes its tiles from the rows alone.
    """
    small = reduced(product)
    if product.a is not None and product.m <= 64 and product.n <= SIZE:
        return [Variant(partial(multiplied, product, small))]
    as_in_table = replace(small, n=256, k=product.k) if product.a is None and product.m <= 8 else small
    return [Variant(partial(multiplied, product, as_in_table), 2), Variant(partial(multiplied, product, small))]


def multiplied(product: Product, small: Product, simulator: Simulator) -> list[str]:
    """Differences between the kernel that the gate's table names for a product and the reference.

    small: the same product in the sizes that are multiplied here.
    """
    choice, _ = product.served(Target(simulator.target.sm))
    if choice is None:
        return [f"no kernel on compute capability {simulator.target.sm}"]
    arguments = exact_arguments(small)
    if small.weights > 1:
        members = [(exact(arguments.b, i), None) for i in range(small.weights)]
        with simulator.running():
            got = scaled_mm_group(arguments.a, members, BF16)
        return [f"weight {i}: {what}" for i, (one, (b, _)) in enumerate(zip(got, members, strict=True))
                for what in _differences(one, replace(arguments, b=b))]  # fmt: skip
    before = len(simulator.launches)
    with simulator.running():
        if small.result:
            return quantised_differences(arguments)
        got = multiply(arguments, choose(problem_of(arguments, simulator.target), choice.kernel))
    if len(simulator.launches) == before:
        return [f"no kernel of {choice.kernel} for {small.label}"]
    return _differences(got, arguments)


def reduced(product: Product) -> Product:
    """A product with partly filled tiles in each direction where the table's has whole ones, and few of them.

    The remainders by 16, which decide how rows are loaded and stored, stay.
    """
    n = 272 - (-product.n % 16)
    k = 1536 - (-product.k % 256)
    if product.groups:
        m, k = (144, ROWS) if product.along_k else (ROWS, 512)
        return replace(product, groups=len(ENDS), m=m, n=n, k=k)
    if product.epilogue == "pair":  # whole tiles of both matrices
        n = 384
    return replace(product, m=product.m if product.m <= 64 else 144, n=n, k=k)


def exact_arguments(product: Product) -> Arguments:
    """Arguments of a product for which every sum is exact in float32."""
    x = product.arguments()
    generator = torch.Generator().manual_seed(SEED)

    def whole(shape: Sequence[int]) -> torch.Tensor:
        return torch.randint(-3, 4, tuple(shape), generator=generator).to(BF16)

    a, b = exact(x.a, 100), exact(x.b, 0)
    if product.along_k:
        a, b = _without_padding(a, product.k), _without_padding(b, product.k)
    return replace(
        x, a=a, b=b, bias=None if x.bias is None else whole(x.bias.shape),
        auxiliaries=[whole(each.shape) for each in x.auxiliaries],
        result_outer=None if x.result_outer is None else torch.tensor(0.01),
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
        # A kernel that scales by the largest magnitude of a thread's elements must not have the same one everywhere.
        sizes = torch.where(torch.arange(x.data.shape[-1]) % 256 < 128, 1.0, 1 / 16).to(BF16)
        return replace(x, data=chosen(range(-3, 4), x.data.shape, BF16) * sizes)
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


def _without_padding(x: Operand, rows: int) -> Operand:
    """An operand of groups along K with zeros behind each group, as quantisers write them."""
    if x.format is None:
        return x
    per_byte = 2 if x.format.packed else 1
    _, column = Groups.of(torch.tensor(ENDS), rows).of_padded()
    kept = (column < rows).unflatten(0, (-1, per_byte))
    masks = sum(kept[:, i].to(torch.uint8) * (15 << 4 * i if per_byte == 2 else 255) for i in range(per_byte))
    return replace(x, data=(x.data.view(torch.uint8) & masks).view(x.data.dtype))


def _differences(got: torch.Tensor, x: Arguments) -> list[str]:
    a, b = schema(x.a), schema(x.b)
    if x.offs is not None:
        expected = SCALED_GROUPED_MM(*a, *b, x.offs, x.rows, x.out_dtype)
        expected += 0.0  # a kernel's sums begin with +0, the reference's of a group of one row with its product
        if got.dim() == 2:  # rows of no group mean nothing
            got, expected = got[: ENDS[-1]], expected[: ENDS[-1]]
        return same_bits(got, expected)
    if x.epilogue is None:
        return same_bits(got, SCALED_MM(*a, *b, x.bias, x.out_dtype))
    return product_differences(got, x.a, x.b, x.a.k, x.bias, x.epilogue, tuple(x.auxiliaries))
