"""Steps of `pointwise` printed as Triton, and kernels in which a global name means a device function that was printed.

`with_functions(kernel, functions)` is a copy of the kernel in which global names mean functions of a printed text.
Inductor follows the global names of a kernel and writes the source of what it calls into its wrapper, and Triton's
cache keys cover it; a function that a kernel takes as a constexpr argument would not get through Dynamo. Equal steps
print equal source, so that caches on disk serve other processes.

The arithmetic is Inductor's: float32, in the operations that Inductor generates. Casts in between round nothing, unless
a step says so.
"""

import hashlib
import linecache
import types
from collections.abc import Callable, Mapping, Sequence

import triton
import triton.language as tl
from triton.language.extra import libdevice

from fp4compile.pointwise import Argument, Step
from fp4compile.templates.device.dequantize import INTERPRETING
from fp4compile.templates.device.elements import float_bits


@triton.jit
def exp(x):
    if INTERPRETING:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


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


# As ptxas divides, but for divisors below 2^-126.
_QUOTIENT = tl.constexpr(
    "{ .reg .pred large; .reg .f32 a, b; mov.f32 a, $1; mov.f32 b, $2; setp.gt.f32 large, b, 0f7E800000;"
    " @large mul.rn.f32 a, a, 0f3E800000; @large mul.rn.f32 b, b, 0f3E800000; rcp.approx.ftz.f32 b, b;"
    " mul.rn.f32 $0, a, b; }"
)


@triton.jit
def quotient(a, b, ISA: tl.constexpr):
    """a / b of a divisor that is 1 or more, or NaN: with the bits of any division (`div.full`)."""
    if ISA >= 90:
        return tl.inline_asm_elementwise(_QUOTIENT, "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return a / b


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


# What Inductor computes (torch._inductor.codegen.triton) of float32 values, by the names of `pointwise.OPERATIONS`.
_TRITON = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "{} / {}",
    "neg": "-{}",
    "relu": "tl.where(0.0 > {0}, 0.0, {0})",
    "square": "{0} * {0}",
    "cube": "{0} * {0} * {0}",
    "sigmoid": "tl.sigmoid({})",
    "exp": "exp({})",
    "erf": "erf({})",
    "tanh": "tanh({})",
    "rsqrt": "rsqrt({})",
    "bfloat16": "bfloat16({})",
    "float16": "float16({})",
}
_OF_PAIRS = {"sub": "sub({}, {}, ISA)", "mul": "mul({}, {}, ISA)"}
# What printed functions call.
CALLED = {function.__name__: function for function in (bfloat16, erf, exp, float16, rsqrt, tanh, sub, mul, quotient)}


def printed_steps(steps: Sequence[Step]) -> list[str]:
    """The steps as lines of Triton, each an assignment to its `s<i>`."""
    return [f"s{i} = {_TRITON[step.operation].format(*_printed(step, str))}" for i, step in enumerate(steps)]


def printed_step(steps: Sequence[Step], number: int, named: Callable[[str], str] = str) -> str:
    """A step as an expression of Triton, which may use ISA and has the same bits by fewer instructions.

    named: what the values are called there.
    """
    step = steps[number]
    form = _TRITON[step.operation]
    if step.operation in _OF_PAIRS and not _contracted(steps, number):
        form = _OF_PAIRS[step.operation]
    if step.operation == "div" and _at_least_one(steps, step.arguments[1]):
        form = "quotient({}, {}, ISA)"
    return form.format(*_printed(step, named))


def _contracted(steps: Sequence[Step], number: int) -> bool:
    """Whether the compiler may make one operation of a product and of the sum that takes it, which rounds once."""
    products, sums = ("mul", "square", "cube"), ("add", "sub", "sum", "mean", "variance")
    if steps[number].operation in products:
        return any(step.operation in sums and f"s{number}" in step.arguments for step in steps)
    before = (steps[int(x[1:])] for x in steps[number].arguments if isinstance(x, str) and x[0] == "s")
    return any(step.operation in products for step in before)


def _at_least_one(steps: Sequence[Step], argument: Argument) -> bool:
    """Whether a value is 1 and what an exponential function gives, as in SiLU: 1 or more, or NaN."""
    if not isinstance(argument, str) or argument[0] != "s":
        return False
    step = steps[int(argument[1:])]
    terms = {steps[int(x[1:])].operation if isinstance(x, str) and x[0] == "s" else x for x in step.arguments}
    return step.operation == "add" and terms == {"exp", 1.0}


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
