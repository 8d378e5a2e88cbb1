"""Arguments of products, as `problem_of`, `call_of`, `multiply` and the ops take them."""

from fp4compile.formats import formats
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.ops.matmul import SCALED_MM
from fp4compile.templates import multiply


def of_groups(a, b, offs, rows, out_dtype):
    return Arguments.of(a, b, None, out_dtype, offs=offs, rows=rows)


def operand(x):
    """The operand of (data, scales, outer, name of the format)."""
    return Operand(*x[:3], None if x[3] is None else formats.get(x[3]))


def times(a, b, op=SCALED_MM, **options):
    """What an op computes of two operands, each (data, scales, outer, name of the format). options: of `Arguments`."""
    args, given = Arguments.of(operand(a), operand(b), **options).call
    return op(*args, **given)


def of_one(a, b, spec):
    """Arguments of `scaled_mm_results` for one B. a, b: (data, scales, outer)."""
    return *a, *([] if x is None else [x] for x in b), spec


def opaque(*args, **options):
    """`scaled_mm_opaque` by the kernels that the op calls on a GPU."""
    return multiply.opaque(Arguments.of_call(*args[:-1], **options), args[-1])
