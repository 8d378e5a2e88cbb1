"""Steps of `formats.steps` printed as Triton, and kernels whose global names mean device functions that were printed.

`with_functions(kernel, functions)` is a copy of the kernel in which global names mean functions of a printed text.
Inductor follows the global names of a kernel and writes the source of what it calls into its wrapper, and Triton's
cache keys cover it; a function that a kernel takes as a constexpr argument would not get through Dynamo. Equal steps
print equal source, so that caches on disk serve other processes.

The arithmetic is Inductor's: float32, in the operations that Inductor generates, or in fewer that give the same bits.
Casts in between round nothing, unless a step says so.
"""

import hashlib
import linecache
import types
from collections.abc import Callable, Container, Mapping, Sequence

import triton
import triton.language as tl
from triton.language.extra import libdevice

from fp4compile.formats.steps import ROUNDINGS, Step, with_silu
from fp4compile.templates.device.dequantize import INTERPRETING
from fp4compile.templates.device.elements import float_bits
from fp4compile.templates.device.sigmoid import exp, sigmoid, silu


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
def bfloat16(x):
    if INTERPRETING:
        return (float_bits(x, tl.bfloat16, 0) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def float16(x):
    return x.to(tl.float16).to(tl.float32)


def _pair_ptx(operation: str) -> tl.constexpr:
    """PTX: $2, $3 and $4, $5 -> the results of both pairs, $0 and $1."""
    return tl.constexpr(
        "{ .reg .b64 p, q; mov.b64 p, {$2, $3}; mov.b64 q, {$4, $5};"
        f" {operation}.rn.f32x2 p, p, q; mov.b64 {{$0, $1}}, p; }}"
    )


_SUB, _MUL = _pair_ptx("sub"), _pair_ptx("mul")


@triton.jit
def of_pairs(PTX: tl.constexpr, a, b):
    """An operation on float32 numbers, two of a thread's at a time."""
    return tl.inline_asm_elementwise(PTX, "=f,=f,f,f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def sub(a, b, ISA: tl.constexpr):
    """a - b. On SM100 one instruction computes two of them, with the same bits."""
    if ISA >= 100:
        return of_pairs(_SUB, a, b)
    else:
        return a - b


@triton.jit
def mul(a, b, ISA: tl.constexpr):
    """a * b, as `sub`."""
    if ISA >= 100:
        return of_pairs(_MUL, a, b)
    else:
        return a * b


# What Inductor computes (torch._inductor.codegen.triton) of float32 values, by the names of `formats.steps.OPERATIONS`.
_TRITON = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "neg": "-{}",
    "relu": "tl.where(0.0 > {0}, 0.0, {0})",
    "square": "{0} * {0}",
    "cube": "{0} * {0} * {0}",
    "sigmoid": "sigmoid({}, ISA)",
    "exp": "exp({})",
    "erf": "erf({})",
    "tanh": "tanh({})",
    "rsqrt": "rsqrt({})",
    "bfloat16": "bfloat16({})",
    "float16": "float16({})",
}
_OF_PAIRS = {"sub": "sub({}, {}, ISA)", "mul": "mul({}, {}, ISA)"}
# What printed functions call.
CALLED = {
    function.__name__: function for function in (bfloat16, erf, exp, float16, rsqrt, tanh, sub, mul, sigmoid, silu)
}


def printed_steps(steps: Sequence[Step], narrow: Container[str]) -> list[str]:
    """The steps that the last one needs as lines of Triton, each an assignment to its `s<i>`.

    narrow: the tensors that are numbers of 16 bits.
    """
    steps, lines = with_silu(steps), []
    needed = {f"s{len(steps) - 1}"}
    for i in reversed(range(len(steps))):
        if f"s{i}" in needed:
            needed |= {*steps[i].arguments}
            lines.append(f"s{i} = {printed_step(steps, i, narrow, pairs=False)}")
    return lines[::-1]


def printed_step(
    steps: Sequence[Step], number: int, narrow: Container[str], named: Callable[[str], str] = str, pairs: bool = True
) -> str:
    """A step, which may be one of `with_silu`, as an expression of Triton, which may use ISA.

    narrow: as in `printed_steps`. named: what the values are called there. pairs: whether one
    instruction may compute two elements.
    """
    step = steps[number]
    if step.operation == "silu":
        argument = str(step.arguments[0])
        rounded = argument[0] == "s" and steps[int(argument[1:])].operation in ROUNDINGS
        return f"silu({named(argument)}, {argument in narrow or rounded}, ISA)"
    of_pairs = pairs and step.operation in _OF_PAIRS and not _contracted(steps, number)
    return (_OF_PAIRS if of_pairs else _TRITON)[step.operation].format(*_printed(step, named))


def _contracted(steps: Sequence[Step], number: int) -> bool:
    """Whether the compiler may make one operation of a product and of the sum that takes it, which rounds once."""
    products, sums = ("mul", "square", "cube"), ("add", "sub", "sum", "mean", "variance")
    if steps[number].operation in products:
        return any(step.operation in sums and f"s{number}" in step.arguments for step in steps)
    before = (steps[int(x[1:])] for x in steps[number].arguments if isinstance(x, str) and x[0] == "s")
    return any(step.operation in products for step in before)


def _printed(step: Step, named: Callable[[str], str]) -> list[str]:
    """The arguments of a step."""
    numbers = (repr(x) if isinstance(x, str) or x >= 0 else f"({x!r})" for x in step.arguments)
    return [named(x) if isinstance(x, str) else number for x, number in zip(step.arguments, numbers, strict=True)]


def device_functions(text: str, names: Mapping[str, object]) -> dict[str, object]:
    """The global names after a text of device functions, which may use `names`."""
    file = f"<fp4compile device functions {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # Triton reads the source there
    names = {**names, "__name__": __name__}  # Triton takes functions of no module for builtins
    exec(compile(text, file, "exec"), names)
    return names


def with_functions(kernel, functions: Mapping[str, object]):
    """A copy of a kernel in which some global names mean these functions."""
    function = kernel.fn
    names = {**function.__globals__, **functions}
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__annotations__ = function.__annotations__
    return triton.jit(copy)
