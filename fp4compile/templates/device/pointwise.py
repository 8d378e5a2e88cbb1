"""Steps of `pointwise` printed as Triton, and kernels in which a global name means a device function that was printed.

`with_functions(kernel, functions)` is a copy of the kernel in which global names mean functions of a printed text.
Inductor follows the global names of a kernel and writes the source of what it calls into its wrapper, and Triton's
cache keys cover it; a function that a kernel takes as a constexpr argument would not get through Dynamo. Equal steps
print equal source, so that caches on disk serve other processes.

The arithmetic is Inductor's: float32, in the operations that Inductor generates; casts in between round nothing.
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
}


def printed_steps(steps: Sequence[Step]) -> list[str]:
    """The steps as lines of Triton, each an assignment to its `s<i>`."""
    return [f"s{i} = {printed_step(step)}" for i, step in enumerate(steps)]


def printed_step(step: Step, named: Callable[[str], str] = str) -> str:
    """A step as an expression of Triton. named: what the values are called there."""
    return _TRITON[step.operation].format(*(_printed(argument, named) for argument in step.arguments))


def _printed(argument: Argument, named: Callable[[str], str]) -> str:
    if isinstance(argument, str):
        return named(argument)
    return f"({argument!r})" if argument < 0 else repr(argument)


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
