"""Arguments of products, as `problem_of`, `call_of`, `multiply` and the ops take them."""

from fp4compile.formats import formats
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.ops.matmul import SCALED_MM, SCALED_MM_RESULTS
from fp4compile.templates import multiply


def of_groups(a, b, offs, rows, out_dtype):
    return Arguments.of(a, b, None, out_dtype, offs=offs, rows=rows)


def operand(x):
    """The operand of (data, scales, outer, name of the format)."""
    return Operand(*x[:3], None if x[3] is None else formats.get(x[3]))


def call(x):
    """What the op of a product returns: `scaled_mm`, or `scaled_mm_results` where it has several results."""
    (*operands, spec), options = x.call
    if x.spec.results == 1:
        return SCALED_MM(*operands, spec, **options)
    options |= {"bias": [x.bias]} if x.bias is not None else {}
    return SCALED_MM_RESULTS(*of_one(operands[:3], operands[3:], spec), **options)


def times(a, b, **options):
    """The product, by its op, of operands (data, scales, outer, name of the format). options: of `Arguments.of`."""
    return call(Arguments.of(operand(a), operand(b), **options))


def of_one(a, b, spec):
    """Arguments of `scaled_mm_results` for one B. a, b: (data, scales, outer)."""
    return *a, *([] if x is None else [x] for x in b), spec


def opaque(*args, **options):
    """`scaled_mm_opaque` by the kernels that the op calls on a GPU."""
    return multiply.opaque(Arguments.of_call(*args[:-1], **options), args[-1])
