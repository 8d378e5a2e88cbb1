"""Products by `multiply`, with the arguments of `reference.scaled_mm` and `reference_grouped.scaled_grouped_mm`."""

from fp4compile.formats.operand import Arguments
from fp4compile.templates.multiply import multiply


def scaled_mm(a, b, bias, out_dtype, epilogue=None, auxiliaries=(), choice=None, fast_accumulation=False):
    """[..., M, K] x [..., N, K] (or [N, K] for every batch) -> [..., M, N]."""
    return multiply(
        Arguments.of(a, b, bias, out_dtype, epilogue, auxiliaries, fast_accumulation=fast_accumulation), choice
    )


def scaled_grouped_mm(a, b, offs, rows, out_dtype, choice=None, fast_accumulation=False):
    """The products of groups."""
    return multiply(
        Arguments.of(a, b, None, out_dtype, offs=offs, rows=rows, fast_accumulation=fast_accumulation), choice
    )
