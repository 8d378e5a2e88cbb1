"""Every launch of quantisers with a prologue, in Triton's interpreter: `python -m tests.fuzz --prologues`.

The product of: steps, which operands are slices of wider tensors, what is stored, format, directions, values or the
Hadamard transform, layout of the scales, dimensions of the tensor. Slices lie in buffers of NaN, so that a kernel that
reads what is not its own shows in the result. Results are compared with the reference in every bit.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fp4compile.formats import formats
from fp4compile.formats.prologue import Prologue
from fp4compile.ops.quantize import QUANTIZE, quantize_kernels
from tests.helpers.foreign import embedded, poisoned_outputs, same_bits

BF16 = torch.bfloat16
RMS = ("square aux0", "mean s0", "rsqrt s1", "mul aux0 s2")
# Steps of each kind of kernel: a tensor alone, two and three tensors, a row and a column, statistics of rows.
STEPS = {
    "one": ("relu aux0",),
    "gate": ("relu aux0", "mul s0 aux1"),
    "three": ("mul aux0 aux1", "add s0 aux2"),
    "norm": ("sub aux0 col1", "mul s0 row2"),
    "statistics": RMS,
    "sum statistics": ("add aux0 aux1", "square s0", "mean s1", "rsqrt s2", "mul s0 s3"),
    # What follows the statistics reads the sum as it was stored.
    "rounded sum": ("add aux0 aux1", "bfloat16 s0", "square s0", "mean s2", "rsqrt s3", "mul s1 s4"),
}
FORMATS = ("nvfp4_one_level", "nvfp4", "nvfp4_te", "nvfp4_rowwise", "mxfp8", "float8_rowwise")
ROWS, BOTH = (-1,), (-1, -2)
# (dim, whether values are written in the place of codes, whether what is quantised is transformed before)
WAYS = ((ROWS, False, False), (BOTH, False, False), (ROWS, True, False), (ROWS, False, True))
LAYOUTS = ("linear", "swizzled")
SHAPES = ((5, 41), (35, 48), (2, 17, 32), (1, 64))


@dataclass(frozen=True)
class Case:
    """steps: a name of STEPS. sliced: numbers of the operands that are slices. stored: numbers of the steps whose
    results are stored."""

    steps: str
    sliced: tuple[int, ...]
    stored: tuple[int, ...]
    format: str
    dim: tuple[int, ...]
    values: bool
    hadamard: bool
    layout: str
    shape: tuple[int, ...]


def cases() -> Iterator[Case]:
    """All cases, in a fixed order."""
    for name, steps in STEPS.items():
        prologue = Prologue.parse(steps, BF16)
        whole = [i for i, kind in prologue.kinds.items() if kind == "aux"]
        last = len(steps) - 1
        between = [i for i in range(last) if prologue.step_kinds[i] == "aux"][:1]
        for sliced, stored in itertools.product(_subsets(whole), _subsets([*between, last])):
            for format, (dim, values, hadamard), layout, shape in itertools.product(FORMATS, WAYS, LAYOUTS, SHAPES):
                fmt = formats.get(format)
                if hadamard and not format.startswith("nvfp4"):
                    continue
                if values and (fmt.scale is None or layout != "linear"):
                    continue
                if dim == BOTH and fmt.outer is not None:  # PyTorch computes what is quantised so
                    continue
                if layout == "swizzled" and fmt.scale is None:
                    continue
                yield Case(name, sliced, stored, format, dim, values, hadamard, layout, shape)


def search(part: int, parts: int) -> int:
    """Check one of `parts` equal parts of all cases, and print what is wrong. Returns how many cases are."""
    found = run = 0
    for case in itertools.islice(cases(), part, None, parts):
        text, run = wrong(case), run + 1
        if text is not None:
            found += 1
            print(f"{case}: {text}", flush=True)
    print(f"{run} launches with a prologue, {found} differ from the reference", flush=True)
    return found


def _subsets(numbers: list[int]) -> Iterator[tuple[int, ...]]:
    for count in range(len(numbers) + 1):
        yield from itertools.combinations(numbers, count)


def wrong(case: Case) -> str | None:
    """What the kernels compute otherwise than the reference; None if nothing."""
    steps = STEPS[case.steps]
    generator = torch.Generator().manual_seed(len(repr(case)))
    shapes = {"aux": case.shape, "row": case.shape[-1:], "col": (*case.shape[:-1], 1)}
    operands = [torch.randn(shapes[kind], generator=generator).to(torch.float32 if kind == "col" else BF16)
                for _, kind in sorted(Prologue.parse(steps, BF16).kinds.items())]  # fmt: skip
    options = {"prologue": steps, "dtype": BF16, "layout": case.layout, "values": case.dim if case.values else (),
               "hadamard": case.hadamard, "stored": [f"s{number} bfloat16" for number in case.stored]}  # fmt: skip
    first, *others = operands
    expected = QUANTIZE(first, case.format, case.dim, operands=others, **options)
    first, *others = (embedded(x, beside=i in case.sliced) for i, x in enumerate(operands))
    try:
        with poisoned_outputs():
            got = quantize_kernels(first, case.format, case.dim, operands=others, **options)
    except RuntimeError as error:
        return str(error)
    differ = [i for i, (one, other) in enumerate(zip(got, expected, strict=True)) if not same_bits(one, other)]
    return f"results {differ} of {len(expected)} differ" if differ else None
