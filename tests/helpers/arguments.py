"""Arguments of products, as `problem_of`, `call_of` and `multiply` take them."""

from fp4compile.formats.operand import Arguments


def of_groups(a, b, offs, rows, out_dtype):
    return Arguments.of(a, b, None, out_dtype, offs=offs, rows=rows)
