"""Snapshots: graphs of a decode step before and after products of the same activations become one node.

Regenerate with EXPECTTEST_ACCEPT=1 and read the difference.
"""

from expecttest import TestCase

from tests.helpers.graphs import summary
from tests.helpers.products import made_late, merged, packed, quantised_each, traced, users_between


def before_and_after(function):
    graph_module = traced(function, [packed(n) for n in (64, 24, 24)])
    before = summary(graph_module.graph)
    merged(graph_module)
    return f"{before}\n---\n{summary(graph_module.graph)}"


class Snapshots(TestCase):
    maxDiff = None

    def test_users_between(self):
        self.assertExpectedInline(
            before_and_after(users_between),
            """\
scaled_mm: bfloat16[1, 64] = fp4compile.scaled_mm(arg0_1, arg1_1, arg2_1, arg3_1, plain @ nvfp4 -> bfloat16)
scaled_mm_1: bfloat16[1, 24] = fp4compile.scaled_mm(arg0_1, arg4_1, arg5_1, arg6_1, plain @ nvfp4 -> bfloat16)
scaled_mm_2: bfloat16[1, 24] = fp4compile.scaled_mm(arg0_1, arg7_1, arg8_1, arg9_1, plain @ nvfp4 -> bfloat16)
return add: bfloat16[1, 64]
---
scaled_mm_results_default = fp4compile.scaled_mm_results(arg0_1, [arg1_1, arg4_1, arg7_1], [arg2_1, arg5_1, arg8_1], [arg3_1, arg6_1, arg9_1], plain @ nvfp4 -> bfloat16)
return add: bfloat16[1, 64]""",
        )

    def test_operands_that_are_made_late(self):
        self.assertExpectedInline(
            before_and_after(made_late),
            """\
scaled_mm: bfloat16[1, 64] = fp4compile.scaled_mm(arg0_1, arg1_1, arg2_1, arg3_1, plain @ nvfp4 -> bfloat16)
scaled_mm_1: bfloat16[1, 24] = fp4compile.scaled_mm(arg0_1, arg4_1, arg5_1, mul, plain @ nvfp4 -> bfloat16)
scaled_mm_2: bfloat16[1, 24] = fp4compile.scaled_mm(arg0_1, arg7_1, arg8_1, exp, plain @ nvfp4 -> bfloat16)
return scaled_mm: bfloat16[1, 64], scaled_mm_1: bfloat16[1, 24], scaled_mm_2: bfloat16[1, 24]
---
scaled_mm_results_default = fp4compile.scaled_mm_results(arg0_1, [arg1_1, arg4_1, arg7_1], [arg2_1, arg5_1, arg8_1], [arg3_1, mul, exp], plain @ nvfp4 -> bfloat16)
return getitem: bfloat16[1, 64], getitem_1: bfloat16[1, 24], getitem_2: bfloat16[1, 24]""",
        )

    def test_packed_layers(self):
        self.assertExpectedInline(
            before_and_after(quantised_each),
            """\
quantize = fp4compile.quantize(view_1, nvfp4)
scaled_mm: bfloat16[1, 64] = fp4compile.scaled_mm(getitem, getitem_1, getitem_2, arg1_1, arg2_1, arg3_1, nvfp4 @ nvfp4 -> bfloat16)
quantize_1 = fp4compile.quantize(view_3, nvfp4)
scaled_mm_1: bfloat16[1, 24] = fp4compile.scaled_mm(getitem_3, getitem_4, getitem_5, arg4_1, arg5_1, arg6_1, nvfp4 @ nvfp4 -> bfloat16)
quantize_2 = fp4compile.quantize(view_5, nvfp4)
scaled_mm_2: bfloat16[1, 24] = fp4compile.scaled_mm(getitem_6, getitem_7, getitem_8, arg7_1, arg8_1, arg9_1, nvfp4 @ nvfp4 -> bfloat16)
return scaled_mm: bfloat16[1, 64], scaled_mm_1: bfloat16[1, 24], scaled_mm_2: bfloat16[1, 24]
---
quantize = fp4compile.quantize(view_1, nvfp4)
scaled_mm_results_default = fp4compile.scaled_mm_results(getitem, getitem_1, getitem_2, [arg1_1, arg4_1, arg7_1], [arg2_1, arg5_1, arg8_1], [arg3_1, arg6_1, arg9_1], nvfp4 @ nvfp4 -> bfloat16)
return getitem_9: bfloat16[1, 64], getitem_10: bfloat16[1, 24], getitem_11: bfloat16[1, 24]""",
        )
