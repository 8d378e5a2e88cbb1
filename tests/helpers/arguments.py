"""Arguments of products, as `problem_of`, `call_of`, `multiply` and the ops take them."""

from fp4compile.formats.operand import Arguments


def of_groups(a, b, offs, rows, out_dtype):
    return Arguments.of(a, b, None, out_dtype, offs=offs, rows=rows)


def of_one(a, b, spec):
    """Arguments of `scaled_mm_results` for one B. a, b: (data, scales, outer)."""
    return *a, *([] if x is None else [x] for x in b), spec
