"""Snapshots: graphs before and after `fake_quantize`.

Regenerate with EXPECTTEST_ACCEPT=1 and read the difference.
"""

from expecttest import TestCase

from tests.helpers.graphs import summary
from tests.helpers.products import multiplied, outer_kept, packed, quantised_each, replaced, traced


def before_and_after(function, *columns):
    graph_module = traced(function, [packed(n) for n in columns])
    before = summary(graph_module.graph)
    replaced(graph_module)
    return f"{before}\n---\n{summary(graph_module.graph)}"


class Snapshots(TestCase):
    maxDiff = None

    def test_shared_activations(self):
        self.assertExpectedInline(
            before_and_after(quantised_each, 64, 24, 24),
            """\
quantize = fp4compile.quantize(view_1, nvfp4)
scaled_mm: bfloat16[1, 64] = fp4compile.scaled_mm(getitem, getitem_1, getitem_2, nvfp4, arg1_1, arg2_1, arg3_1, nvfp4, None, torch.bfloat16)
quantize_1 = fp4compile.quantize(view_3, nvfp4)
scaled_mm_1: bfloat16[1, 24] = fp4compile.scaled_mm(getitem_3, getitem_4, getitem_5, nvfp4, arg4_1, arg5_1, arg6_1, nvfp4, None, torch.bfloat16)
quantize_2 = fp4compile.quantize(view_5, nvfp4)
scaled_mm_2: bfloat16[1, 24] = fp4compile.scaled_mm(getitem_6, getitem_7, getitem_8, nvfp4, arg7_1, arg8_1, arg9_1, nvfp4, None, torch.bfloat16)
return scaled_mm: bfloat16[1, 64], scaled_mm_1: bfloat16[1, 24], scaled_mm_2: bfloat16[1, 24]
---
fake_quantize_default = fp4compile.fake_quantize(view_1, nvfp4)
scaled_mm: bfloat16[1, 64] = fp4compile.scaled_mm(getitem_9, None, getitem_10, None, arg1_1, arg2_1, arg3_1, nvfp4, None, torch.bfloat16)
scaled_mm_1: bfloat16[1, 24] = fp4compile.scaled_mm(getitem_9, None, getitem_10, None, arg4_1, arg5_1, arg6_1, nvfp4, None, torch.bfloat16)
scaled_mm_2: bfloat16[1, 24] = fp4compile.scaled_mm(getitem_9, None, getitem_10, None, arg7_1, arg8_1, arg9_1, nvfp4, None, torch.bfloat16)
return scaled_mm: bfloat16[1, 64], scaled_mm_1: bfloat16[1, 24], scaled_mm_2: bfloat16[1, 24]""",
        )

    def test_a_static_scale(self):
        self.assertExpectedInline(
            before_and_after(multiplied(given=True), 64),
            """\
quantize = fp4compile.quantize(arg0_1, nvfp4, outer=new_full)
scaled_mm: bfloat16[1, 64] = fp4compile.scaled_mm(getitem, getitem_1, new_full, nvfp4, arg1_1, arg2_1, arg3_1, nvfp4, None, torch.bfloat16)
return scaled_mm: bfloat16[1, 64]
---
fake_quantize_default = fp4compile.fake_quantize(arg0_1, nvfp4, outer=new_full)
scaled_mm: bfloat16[1, 64] = fp4compile.scaled_mm(getitem_3, None, new_full, None, arg1_1, arg2_1, arg3_1, nvfp4, None, torch.bfloat16)
return scaled_mm: bfloat16[1, 64]""",
        )

    def test_an_outer_scale_that_is_kept(self):
        self.assertExpectedInline(
            before_and_after(outer_kept, 64),
            """\
quantize = fp4compile.quantize(arg0_1, nvfp4)
scaled_mm: bfloat16[1, 64] = fp4compile.scaled_mm(getitem, getitem_1, getitem_2, nvfp4, arg1_1, arg2_1, arg3_1, nvfp4, None, torch.bfloat16)
return scaled_mm: bfloat16[1, 64], mul: float32[]
---
fake_quantize_default = fp4compile.fake_quantize(arg0_1, nvfp4)
scaled_mm: bfloat16[1, 64] = fp4compile.scaled_mm(getitem_3, None, getitem_4, None, arg1_1, arg2_1, arg3_1, nvfp4, None, torch.bfloat16)
return scaled_mm: bfloat16[1, 64], mul: float32[]""",
        )
