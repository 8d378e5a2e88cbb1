"""A snapshot: products of quantised activations and packed weights, before and after `fake_quantize` and
`fuse_horizontal`.

Regenerate with EXPECTTEST_ACCEPT=1 and read the difference.
"""

from expecttest import TestCase

from tests.helpers.graphs import summary
from tests.helpers.products import merged, packed, quantised_each, replaced, traced


def stages(function, *passes):
    """The graph of products of 64, 24 and 24 columns, and what each pass makes of it."""
    graph_module = traced(function, [packed(n) for n in (64, 24, 24)])
    texts = [summary(graph_module.graph)]
    for one in passes:
        one(graph_module)
        texts.append(summary(graph_module.graph))
    return "\n---\n".join(texts)


class Snapshots(TestCase):
    maxDiff = None

    def test_packed_layers(self):
        self.assertExpectedInline(
            stages(quantised_each, replaced, merged),
            """\
quantize = fp4compile.quantize(view_1, nvfp4)
scaled_mm: bfloat16[1, 64] = fp4compile.scaled_mm(getitem, getitem_1, getitem_2, arg1_1, arg2_1, arg3_1, nvfp4 @ nvfp4 -> bfloat16)
quantize_1 = fp4compile.quantize(view_3, nvfp4)
scaled_mm_1: bfloat16[1, 24] = fp4compile.scaled_mm(getitem_3, getitem_4, getitem_5, arg4_1, arg5_1, arg6_1, nvfp4 @ nvfp4 -> bfloat16)
quantize_2 = fp4compile.quantize(view_5, nvfp4)
scaled_mm_2: bfloat16[1, 24] = fp4compile.scaled_mm(getitem_6, getitem_7, getitem_8, arg7_1, arg8_1, arg9_1, nvfp4 @ nvfp4 -> bfloat16)
return scaled_mm: bfloat16[1, 64], scaled_mm_1: bfloat16[1, 24], scaled_mm_2: bfloat16[1, 24]
---
quantize_default = fp4compile.quantize(view_1, nvfp4, [-1], values=[-1])
scaled_mm: bfloat16[1, 64] = fp4compile.scaled_mm(getitem_9, getitem_11, arg1_1, arg2_1, arg3_1, plain @ nvfp4 -> bfloat16)
scaled_mm_1: bfloat16[1, 24] = fp4compile.scaled_mm(getitem_9, getitem_11, arg4_1, arg5_1, arg6_1, plain @ nvfp4 -> bfloat16)
scaled_mm_2: bfloat16[1, 24] = fp4compile.scaled_mm(getitem_9, getitem_11, arg7_1, arg8_1, arg9_1, plain @ nvfp4 -> bfloat16)
return scaled_mm: bfloat16[1, 64], scaled_mm_1: bfloat16[1, 24], scaled_mm_2: bfloat16[1, 24]
---
quantize_default = fp4compile.quantize(view_1, nvfp4, [-1], values=[-1])
scaled_mm_results_default = fp4compile.scaled_mm_results(getitem_9, getitem_11, [arg1_1, arg4_1, arg7_1], [arg2_1, arg5_1, arg8_1], [arg3_1, arg6_1, arg9_1], plain @ nvfp4 -> bfloat16)
return getitem_12: bfloat16[1, 64], getitem_13: bfloat16[1, 24], getitem_14: bfloat16[1, 24]""",
        )
