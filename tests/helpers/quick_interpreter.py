"""Less work for Triton's interpreter, at the same values: reductions of whole arrays, types that are checked once.

Without this a reduction by a function of its own takes a call of that function for every element, and the types and
shapes of two operands are compared anew at every operation, which is half of the interpreter's time.
"""


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
    """Let Triton remember, by the types of two operands, that they need neither a cast nor a broadcast.

    A number is made an array once for each value, type and shape. Nothing may write to that array.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    equal, alike, numbers, tensor = set(), set(), {}, core.tensor

    def check_once(self, lhs, rhs, *options, **named):
        left, right = type(lhs) is tensor, type(rhs) is tensor
        flags = (options, tuple(named.items()))
        if left and right:
            key = lhs.type.name, rhs.type.name, flags
            if key in equal:
                return lhs, rhs
            made = check(self, lhs, rhs, *options, **named)
            if made[0] is lhs and made[1] is rhs:
                equal.add(key)
            return made
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
