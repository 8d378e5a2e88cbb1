"""Pointwise steps in kernels: a constexpr string, which device functions interpret while a kernel is compiled.

A kernel takes the steps of a prologue or of an epilogue as a text of parts:

    aux0 aux1 row2 | silu.narrow 0; mul.pairs 3 1; mul.pairs 4 2 | 5

The first part has the names of the tensors, the second the steps (`written`); `apply_prologue` or `apply_epilogue` adds
the third. A step refers to a value by its position: the tensors come first, the result of each step follows. An
argument with another character than digits is a number. `compute` computes the steps in order; machine code does not
contain the text.

Inductor writes the constexpr arguments of a kernel, and the source of all functions that it calls, into its wrapper. So
the functions that read a text use only builtins and each other.

The arithmetic is Inductor's: float32, in the operations that Inductor generates, or in fewer that give the same bits.
Casts in between round nothing, unless a step says so.
"""

from collections.abc import Container, Iterable, Sequence

import triton
import triton.language as tl
from triton.language.extra import libdevice

from fp4compile.formats.steps import ROUNDINGS, Step
from fp4compile.templates.device.dequantized_tile import INTERPRETING
from fp4compile.templates.device.elements import float_bits
from fp4compile.templates.device.silu import exp, silu

# ---------------------------------------------------------------- writing a text


def written(
    steps: Sequence[Step],
    numbers: Iterable[int],
    names: Sequence[str],
    narrow: Container[str],
    *,
    pairs: bool = True,
) -> tuple[str, dict[str, int]]:
    """The part of a text with the steps of these numbers, and the position of each value by its name.

    steps: may be a result of `with_silu`. names: names of the tensors, in order. narrow: names of tensors that hold
    16-bit numbers. pairs: whether one instruction may compute two products.
    """
    places, text = {name: place for place, name in enumerate(names)}, []
    for number in numbers:
        words = [str(places[x]) if isinstance(x, str) else str(float(x)) for x in steps[number].arguments]
        text.append(" ".join((form_of(steps, number, narrow, pairs), *words)))
        places[f"s{number}"] = len(places)
    return "; ".join(text), places


def needed(steps: Sequence[Step], root: int) -> list[int]:
    """Numbers of the steps that step `root` depends on, itself included, in order."""
    found = {root}
    for number in range(root, -1, -1):
        if number in found:
            found |= {int(x[1:]) for x in steps[number].arguments if isinstance(x, str) and x[0] == "s"}
    return sorted(found)


def form_of(steps: Sequence[Step], number: int, narrow: Container[str], pairs: bool = True) -> str:
    """The operation of a step, or the name of its variant with the same bits in fewer instructions."""
    operation, argument = steps[number].operation, steps[number].arguments[0]
    if operation == "silu":
        rounded = isinstance(argument, str) and argument[0] == "s" and steps[int(argument[1:])].operation in ROUNDINGS
        return "silu.narrow" if rounded or argument in narrow else "silu"
    return "mul.pairs" if pairs and operation == "mul" and not _contracted(steps, number) else operation


def _contracted(steps: Sequence[Step], number: int) -> bool:
    """Whether the compiler may contract a product and a later sum to one operation that is rounded once."""
    sums = ("add", "sub", "sum", "mean", "variance")
    return any(step.operation in sums and f"s{number}" in step.arguments for step in steps)


# ---------------------------------------------------------------- reading a text


@triton.constexpr_function
def part_of(TEXT, number):
    return TEXT.split(" | ")[number]


@triton.constexpr_function
def tensor_count(TEXT):
    return len(part_of(TEXT, 0).split())


@triton.constexpr_function
def kind_of(TEXT, number):
    """The kind of tensor `number`: "aux", "row" or "col"."""
    return part_of(TEXT, 0).split()[number][:3]


@triton.constexpr_function
def step_count(TEXT):
    steps = part_of(TEXT, 1)
    return len(steps.split("; ")) if steps else 0


@triton.constexpr_function
def operation_of(TEXT, step):
    """The operation of a step, or the name of its variant (`form_of`)."""
    return part_of(TEXT, 1).split("; ")[step].split()[0]


@triton.constexpr_function
def argument_of(TEXT, step, which):
    """Argument `which` of a step as a word; its last argument if it has fewer."""
    words = part_of(TEXT, 1).split("; ")[step].split()
    return words[min(1 + which, len(words) - 1)]


@triton.constexpr_function
def takes_value(TEXT, step, which):
    """Whether argument `which` of a step is a value (True) or a number (False)."""
    return argument_of(TEXT, step, which).isdigit()


@triton.constexpr_function
def place_of(TEXT, step, which):
    """The position of the value that is argument `which` of a step."""
    return int(argument_of(TEXT, step, which))


@triton.constexpr_function
def number_of(TEXT, step, which):
    """The number that is argument `which` of a step."""
    return float(argument_of(TEXT, step, which))


# ---------------------------------------------------------------- computing


@triton.jit
def compute(values, TEXT: tl.constexpr, ISA: tl.constexpr):
    """Append the result of each step of a text to `values`, the tuple of its tensors in float32."""
    for i in tl.static_range(step_count(TEXT)):
        result = operate(
            operation_of(TEXT, i),
            values[place_of(TEXT, i, 0)] if takes_value(TEXT, i, 0) else number_of(TEXT, i, 0),
            values[place_of(TEXT, i, 1)] if takes_value(TEXT, i, 1) else number_of(TEXT, i, 1),
            ISA,
        )
        values = values + (result,)
    return values


@triton.jit
def operate(OPERATION: tl.constexpr, a, b, ISA: tl.constexpr):
    """The result of an operation on a and b, or on a alone.

    Each computes what Inductor (torch._inductor.codegen.triton) computes for float32 values.
    """
    if OPERATION == "add":
        return a + b
    elif OPERATION == "sub":
        return a - b
    elif OPERATION == "mul":
        return a * b
    elif OPERATION == "mul.pairs":
        return mul_pairs(a, b, ISA)
    elif OPERATION == "div":
        return a / b
    elif OPERATION == "neg":
        return -a
    elif OPERATION == "relu":
        return tl.where(0.0 > a, 0.0, a)
    elif OPERATION == "square":
        return a * a
    elif OPERATION == "cube":
        return a * a * a
    elif OPERATION == "sigmoid":
        return tl.sigmoid(a)
    elif OPERATION == "silu":
        return silu(a, False, ISA)
    elif OPERATION == "silu.narrow":
        return silu(a, True, ISA)
    elif OPERATION == "exp":
        return exp(a)
    elif OPERATION == "erf":
        return erf(a)
    elif OPERATION == "tanh":
        return tanh(a)
    elif OPERATION == "rsqrt":
        return rsqrt(a)
    elif OPERATION == "bfloat16":
        return bfloat16(a, ISA)
    elif OPERATION == "float16":
        return float16(a)
    else:
        tl.static_assert(OPERATION == "float32")
        return a


@triton.jit
def erf(x):
    if INTERPRETING:
        return tl.erf(x)
    else:
        return libdevice.erf(x)


@triton.jit
def tanh(x):
    if INTERPRETING:
        return 2.0 * tl.sigmoid(2.0 * x) - 1.0
    else:
        return libdevice.tanh(x)


@triton.jit
def rsqrt(x):
    if INTERPRETING:
        return tl.rsqrt(x)
    else:
        return libdevice.rsqrt(x)


@triton.jit
def bfloat16(x, ISA: tl.constexpr):
    """x, rounded to bfloat16."""
    if INTERPRETING:
        return (float_bits(x, tl.bfloat16, 0) << 16).to(tl.float32, bitcast=True)
    elif ISA >= 80:
        # Two numbers are converted faster than one, which the unit of `ex2` and `rcp` converts. The upper half of the
        # result is that of the float32.
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, 0f00000000;", "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1
        ).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def float16(x):
    return x.to(tl.float16).to(tl.float32)


_MUL_PAIRS = tl.constexpr(
    "{ .reg .b64 p, q; mov.b64 p, {$2, $3}; mov.b64 q, {$4, $5}; mul.rn.f32x2 p, p, q; mov.b64 {$0, $1}, p; }"
)


@triton.jit
def mul_pairs(a, b, ISA: tl.constexpr):
    """a * b. On SM100 one instruction computes two products of a thread, with the same bits."""
    if ISA >= 100:
        return tl.inline_asm_elementwise(_MUL_PAIRS, "=f,=f,f,f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=2)
    else:
        return a * b
