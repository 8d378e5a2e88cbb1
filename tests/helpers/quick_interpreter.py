"""Less work for Triton's interpreter, at the same values: reductions of whole arrays, types that are checked once.

Without this a reduction by a function of its own takes a call of that function for every element, and the types and
shapes of two operands are compared anew at every operation, which is half of the interpreter's time.
"""

import inspect


def reduce_whole_arrays() -> None:
    """Let a reduction combine all pairs of neighbours along its axis at once, then all pairs of what comes out.

    Triton's own reductions are trees as well: that a combination is associative is asked of every caller.
    """
    from triton.language import core
    from triton.runtime.interpreter import ReduceOps

    one_by_one = ReduceOps.generic_reduce

    def by_pairs(self, input):
        size = input[0].handle.data.shape[self.axis] if self.axis is not None else 0
        if size < 2 or size & (size - 1) or input[0].handle.data.ndim < 2:
            return one_by_one(self, input)
        values = list(input)
        while values[0].handle.data.shape[self.axis] > 1:
            pairs = [self.to_tensor(_every_other(value, first, self.axis), value.dtype)
                     for first in (0, 1) for value in values]  # fmt: skip
            combined = self.combine_fn.fn(*pairs)
            values = [combined] if isinstance(combined, core.tensor) else list(combined)
        whole = [value.handle.data if self.keep_dims else value.handle.data.squeeze(self.axis) for value in values]
        return [self.to_tensor(data, value.dtype) for data, value in zip(whole, input, strict=True)]

    ReduceOps.generic_reduce = by_pairs


def _every_other(value, first, axis):
    data = value.handle.data
    index = [slice(None)] * data.ndim
    index[axis] = slice(first, None, 2)
    return data[tuple(index)]


def keep_type_checks() -> None:
    """Let Triton remember, by the types of two operands, that they need no cast, and leave their broadcast to NumPy.

    A number is made an array once for each value, type and shape. Nothing may write to that array.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    spread, alike, numbers, tensor = {}, set(), {}, core.tensor

    def check_once(self, lhs, rhs, *options, **named):
        left, right = type(lhs) is tensor, type(rhs) is tensor
        flags = (options, tuple(named.items()))
        if left and right:
            key = lhs.type.name, rhs.type.name, flags
            if key not in spread:
                made = check(self, lhs, rhs, *options, **named)
                types = [one.type for one in made]
                cast = [one.type.scalar for one in (lhs, rhs)] != [one.scalar for one in types]
                spread[key] = None if cast else types
                return made
            if spread[key] is not None:
                one, other = spread[key]
                return (lhs if lhs.type.name == one.name else tensor(lhs.handle, one),
                        rhs if rhs.type.name == other.name else tensor(rhs.handle, other))  # fmt: skip
            return check(self, lhs, rhs, *options, **named)
        operand, number = (lhs, rhs) if left else (rhs, lhs)
        if type(operand) is not tensor or type(number) not in (int, bool, float):
            return check(self, lhs, rhs, *options, **named)
        key = operand.type.name, type(number), repr(number), left, flags  # repr: 0.0 is not -0.0
        if key not in numbers:
            made = check(self, lhs, rhs, *options, **named)
            if made[not left] is not operand:
                return made
            made[left].handle.data.flags.writeable = False
            numbers[key] = made[left]
        return (lhs, numbers[key]) if left else (numbers[key], rhs)

    def broadcast_once(self, lhs, rhs):
        key = lhs.type.name, rhs.type.name
        if key in alike:
            return lhs, rhs
        made = broadcast(self, lhs, rhs)
        if made[0] is lhs and made[1] is rhs:
            alike.add(key)
        return made

    TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value = check_once, broadcast_once


def call_directly() -> None:
    """Let a kernel call Triton's functions without the layer that asks for what the interpreter has just passed."""
    from triton.language import core
    from triton.runtime import interpreter

    from tests.helpers import interpreter_plans  # imports Triton's interpreter

    semantic = interpreter.interpreter_semantic

    def patch(owner, name, member, builder, scope):
        function = inspect.unwrap(member)

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, interpreter_plans.planned(name, function) or call)

    unwrap, tensor, constexpr = core._unwrap_if_constexpr, core.tensor, core.constexpr
    as_they_are = (tensor, int, bool, float, str, type(None), core.dtype, core.block_type)

    def unwrap_quickly(value):
        kind = type(value)
        return value if kind in as_they_are else value.value if kind is constexpr else unwrap(value)

    interpreter._patch_attr, core._unwrap_if_constexpr = patch, unwrap_quickly


def keep_types() -> None:
    """Let Triton compare types by their names, and make each type of blocks once; check a handle's size once a type."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    block_type, dtype, constexpr, blocks = core.block_type, core.dtype, core.constexpr, {}

    def with_element_type(self, element):
        key = element.name, *self.shape
        if key not in blocks:
            blocks[key] = block_type(element, self.shape)
        return blocks[key]

    def equal(self, other):
        if type(other) is constexpr:
            other = other.value
        return self is other or isinstance(other, dtype) and self.name == other.name

    def different(self, other):
        return not equal(self, other)

    block_type.with_element_ty, dtype.__eq__, dtype.__ne__ = with_element_type, equal, different

    handle, check, fitting = interpreter.TensorHandle, interpreter.TensorHandle.__post_init__, set()

    def make_handle(self, data, dtype, attr=None):
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        key = data.itemsize, dtype.name
        if key not in fitting:
            check(self)
            fitting.add(key)

    handle.__init__ = make_handle

    binary = interpreter.InterpreterBuilder.binary_op

    def binary_op(self, lhs, rhs, op):
        kind = lhs.data.dtype
        if kind.kind == "b":
            return binary(self, lhs, rhs, op)
        output = op(lhs.data, rhs.data)
        scalar = lhs.dtype.scalar
        if (output.itemsize, scalar.name) not in fitting:
            return binary(self, lhs, rhs, op)
        return handle(output, scalar)

    interpreter.InterpreterBuilder.binary_op = binary_op

    promote, integers = TritonSemantic.bitwise_op_type_checking_impl, set()

    def check_bits_once(self, input, other):
        if not (type(input) is type(other) is core.tensor and input.type.name == other.type.name):
            return promote(self, input, other)
        if input.type.name not in integers:
            promote(self, input, other)
            integers.add(input.type.name)
        return input, other

    TritonSemantic.bitwise_op_type_checking_impl = check_bits_once
