"""Triton's interpreter finds out once how an operation is done on operands of some types, and repeats that afterwards.

For every `a * b` the interpreter checks types, finds a type that holds both, casts, broadcasts, chooses an operation of
its builder, and makes the type of the result. All this depends on the operands' types and on Python's numbers among the
arguments, never on what a tensor holds. So a call with such arguments is recorded, as the builder's operations in their
order, each with the operands and earlier results that it takes. Later calls do these operations alone: the same NumPy
functions on the same arrays.
"""

import functools
import itertools
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import triton.language.core as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_semantic

OPERATORS = {f"__{side}{name}__" for side, name in itertools.product(("", "r"), (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift", "gt", "ge", "lt", "le",
    "eq", "ne"))}  # fmt: skip
FUNCTIONS = {
    "__getitem__", "__invert__", "__neg__", "__not__", "abs", "add", "arange", "broadcast_to", "cast", "ceil", "clamp",
    "div_rn", "exp", "exp2", "expand_dims", "fdiv", "floor", "fma", "full", "join", "load", "log", "log2",
    "logical_and", "logical_or", "maximum", "minimum", "mul", "permute", "reshape", "rsqrt", "split", "sqrt", "sqrt_rn",
    "store", "sub", "to", "trans", "umulhi", "where"
}  # fmt: skip
PLAIN = frozenset((int, bool, str, NoneType))
# Of these NumPy gives for bools what it gives for the integers that the interpreter makes of bools.
ON_BOOLS = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)


def planned(name, function):
    """`function`, an operation of Triton's language, as one that repeats what it did before; None if that cannot be."""
    return _operator(function) if name in OPERATORS else _function(function) if name in FUNCTIONS else None


def _operator(function):
    """The plan of an operation on two operands: a tensor, and a tensor or a number."""
    tensor, constexpr, plans = tl.tensor, tl.constexpr, {}

    def call(self, other, _semantic=None):
        kind = type(other)
        if kind is constexpr:
            other = other.value
            kind = type(other)
        if kind is tensor:
            key = self.type.name, other.type.name
        elif kind is int or kind is bool:
            key = self.type.name, kind, other
        elif kind is float:
            key = self.type.name, kind, repr(other)  # 0.0 is not -0.0
        else:
            return function(self, other, _semantic=interpreter_semantic)
        known = plans.get(key)
        if known is None or _recorder.active:
            return _found_out(plans, key, function, (self, other), {})
        return known(self, other) if kind is tensor else known(self)

    return call


def _function(function):
    """The plan of an operation on any arguments."""
    tensor, plans = tl.tensor, {}

    def call(*args, _semantic=None, **named):
        key, operands = [], []
        try:
            for value in args:
                if type(value) is tensor:
                    key.append(value.type.name)
                    operands.append(value)
                else:
                    _describe(value, key)
            for name, value in named.items():
                key.append(name)
                if type(value) is tensor:
                    key.append(value.type.name)
                    operands.append(value)
                else:
                    _describe(value, key)
        except _NotPlanned:
            return function(*args, **named, _semantic=interpreter_semantic)
        key = tuple(key)
        known = plans.get(key)
        if known is None or _recorder.active:
            return _found_out(plans, key, function, args, named)
        return known(*operands)

    return call


class _NotPlanned(Exception):
    """An argument that may be another one although nothing tells the two apart."""


def _describe(value, key):
    """Append to `key` what tells an argument that is no tensor from any other."""
    kind = type(value)
    if kind is tl.constexpr:
        value = value.value
        kind = type(value)
    if kind is tl.dtype or kind is tl.block_type:
        key += tl.dtype, value.name
    elif kind in PLAIN:
        key += kind, value
    elif kind is float or kind is slice:
        key += kind, repr(value)
    elif kind is tuple or kind is list or kind is tl.tuple:
        key += tuple, len(value)
        for each in value:
            _describe(each, key)
    else:
        raise _NotPlanned


# ---------------------------------------------------------------- what is recorded


class _Place(NamedTuple):
    """Among the handles of a call: its operands', then what its steps make."""

    number: int


class _Step(NamedTuple):
    """A call of a builder's member. `arguments`: handles by their places, all else as it is."""

    name: str
    member: Any
    arguments: tuple
    given: tuple
    made: Any


class _Recorder:
    """In the builder's place: notes every call that makes something of an operand."""

    def __init__(self, builder):
        self.builder, self.active = builder, False
        self.begin([])

    def begin(self, operands):
        self.operands = operands
        self.places = {id(operand.handle): _Place(number) for number, operand in enumerate(operands)}
        self.handles, self.steps = len(operands), []

    def __getattr__(self, name):
        member = getattr(self.builder, name)
        if not name.startswith("create_"):
            return member  # settings, types and numbers, which depend on nothing but what is in the key

        def call(*given):
            made = member(*given)
            arguments = tuple([self.places.get(id(value), value) for value in given])
            if any(type(argument) is _Place for argument in arguments):
                self.steps.append(_Step(name, member, arguments, given, made))
                for each in made if type(made) is tuple else (made,):
                    self.places[id(each)] = _Place(self.handles)
                    self.handles += 1
            return made

        return call


_recorder = _Recorder(interpreter_semantic.builder)


def _found_out(plans, key, function, args, named):
    """Call `function`. The second time what it does is noted: Triton remembers more of types then than at first."""
    if _recorder.active:  # called by another operation, whose steps these are
        return function(*args, **named, _semantic=interpreter_semantic)
    if key not in plans:
        plans[key] = None
        return function(*args, **named, _semantic=interpreter_semantic)
    operands: list[tl.tensor] = []
    args = [_stand_in(value, operands) for value in args]
    named = {name: _stand_in(value, operands) for name, value in named.items()}
    if not all(type(operand.handle) is TensorHandle for operand in operands):
        return function(*args, **named, _semantic=interpreter_semantic)
    _recorder.begin(operands)
    _recorder.active, interpreter_semantic.builder = True, _recorder
    try:
        result = function(*args, **named, _semantic=interpreter_semantic)
    finally:
        _recorder.active, interpreter_semantic.builder = False, _recorder.builder
    plans[key] = _plan(result)
    return result


def _stand_in(value, operands):
    """A tensor with a handle of its own: operands that are one tensor in this call may be two in another."""
    if type(value) is not tl.tensor:
        return value
    handle = value.handle
    if type(handle) is TensorHandle:
        handle = TensorHandle(handle.data, handle.dtype, handle.attr)
    operands.append(tl.tensor(handle, value.type))
    return operands[-1]


# ---------------------------------------------------------------- what is repeated


def _plan(result):
    """A function of the operands that takes the steps noted and makes what they made; None of what is no tensor."""
    several, made = type(result) is tuple, result if type(result) is tuple else (result,)
    if any(type(each) is not tl.tensor for each in made):
        return None
    constants: list[Any] = []

    def constant(value):
        constants.append(value)
        return f"c{len(constants) - 1}"

    def handle(argument):
        return f"h{argument.number}" if type(argument) is _Place else constant(argument)

    operands = len(_recorder.operands)
    lines = [f"h{number} = t{number}.handle" for number in range(operands)]
    number = operands
    for step in _recorder.steps:
        several_made = type(step.made) is tuple
        names = [f"h{number + more}" for more in range(len(step.made) if several_made else 1)]
        call = f"{constant(step.member)}({', '.join(map(handle, step.arguments))})"
        direct = _direct(step, handle, constant)
        if direct is None:
            lines.append(f"{', '.join(names)} = {call}")
        else:
            lines += [
                f"data = {direct.data}",
                f"if data.dtype is {constant(step.made.data.dtype)}{direct.condition}:",
                f"    {names[0]} = new(Handle)",
                f"    {names[0]}.data, {names[0]}.dtype, {names[0]}.attr = data, {direct.dtype}, {{}}",
                "else:",
                f"    {names[0]} = {call}",
            ]
        number += len(names)
    returned = []
    for at, tensor in enumerate(made):
        same = [number for number, operand in enumerate(_recorder.operands) if operand is tensor]
        returned.append(f"t{same[0]}" if same else f"r{at}")
        if not same:
            place = _recorder.places.get(id(tensor.handle), tensor.handle)
            fields = ", ".join(constant(getattr(tensor, name)) for name in ("shape", "numel", "type", "dtype"))
            lines += [f"r{at} = new(Tensor)",
                      f"r{at}.shape, r{at}.numel, r{at}.type, r{at}.dtype = {fields}",
                      f"r{at}.handle = {handle(place)}"]  # fmt: skip
    lines.append(f"return {', '.join(returned)}{',' if several and len(returned) == 1 else ''}")
    parameters = ", ".join(f"t{number}" for number in range(operands))
    return _function_of_source(parameters, "\n        ".join(lines), len(constants))(*constants)


class _Direct(NamedTuple):
    """A step without the builder, as expressions: the array that it makes, the type that its handle names, and what
    else must hold, because the builder looks at the types that handles name.
    """

    data: str
    dtype: str
    condition: str = ""


def _direct(step, handle, constant):
    """The step without the builder; None if the builder's member does more than one function of NumPy's."""
    if not (type(step.given[0]) is type(step.made) is TensorHandle):
        return None
    arguments = [handle(argument) for argument in step.arguments]
    array, dtype, made = f"{arguments[0]}.data", step.given[0].dtype, step.made
    if step.name == "create_bitcast":
        return _Direct(f"{array}.view({constant(made.data.dtype)})", constant(made.dtype))
    function = _numpy_function(step.name, len(arguments))
    if function is _CAST and "bf16" not in (dtype.name, made.dtype.name):
        condition = f" and {arguments[0]}.dtype is {constant(dtype)}"
        return _Direct(f"{array}.astype({constant(made.data.dtype)})", constant(made.dtype), condition)
    arrays = [value.data for value in step.given if type(value) is TensorHandle]
    bools = len(arrays) == 2 and all(array.dtype == bool for array in arrays)
    if function in (None, _CAST) or bools and function not in ON_BOOLS or len(arrays) != len(arguments):
        return None
    # A comparison's handle names the type of what was compared, of whatever size: a bool fits.
    named = arguments[-1 if len(arguments) == 3 else 0]
    condition = "" if made.data.dtype == bool else f" and {named}.dtype is {constant(made.dtype)}"
    return _Direct(
        f"{constant(function)}({', '.join(f'{each}.data' for each in arguments)})", f"{named}.dtype", condition
    )


@functools.cache
def _function_of_source(parameters, body, constants):
    """Makes a plan of its constants: plans for other types differ in nothing else."""
    names = ", ".join(f"c{number}" for number in range(constants))
    source = f"def make({names}):\n    def run({parameters}):\n        {body}\n    return run"
    scope: dict[str, Any] = {"new": object.__new__, "Handle": TensorHandle, "Tensor": tl.tensor}
    exec(compile(source, "<plan>", "exec"), scope)
    return scope["make"]


@functools.cache
def _numpy_function(name, arguments):
    """What a member of the builder computes of its arguments' arrays; None where it does more than that."""
    try:
        return vars(InterpreterBuilder)[name](_Told(), *[None] * arguments)
    except (AttributeError, KeyError, TypeError):
        return None


_CAST = object()


class _Told:
    """In a builder's place: tells which function a member would have applied."""

    def unary_op(self, argument, function):
        return function

    def binary_op(self, one, other, function):
        return function

    def ternary_op(self, one, other, third, function):
        return function

    def cast_impl(self, source, type):
        return _CAST
