"""Snapshots: products of quantised activations and packed weights, before and after `fake_quantize` and
`fuse_horizontal`.

Regenerate with EXPECTTEST_ACCEPT=1 and read the difference.
"""

import torch
from expecttest import TestCase
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fp4compile.hardware import Target
from fp4compile.passes.fake_quantize import fake_quantize
from fp4compile.templates.launch import dry_run
from tests.helpers.arguments import times
from tests.helpers.graphs import summary
from tests.helpers.products import made_late, merged, packed, quantised_each, replaced, traced


def stages(function, *passes):
    """The graph of products of 64, 24 and 24 columns, and what each pass makes of it."""
    graph_module = traced(function, [packed(n) for n in (64, 24, 24)])
    texts = [summary(graph_module.graph)]
    for one in passes:
        one(graph_module)
        texts.append(summary(graph_module.graph))
    return "\n---\n".join(texts)


def experts(x, w, offs):
    """A forward graph in training, which saves codes for the weight gradient."""
    ops, fmt, weights = torch.ops.fp4compile, "nvfp4_te", "nvfp4_16x16"
    both = ops.quantize(x, fmt, [-1, -2], offs=offs, hadamard=True)
    operands = (*both[:3], fmt), (*ops.quantize(w, weights, each_matrix=True), weights)
    return times(*operands, offs=offs, rows=x.shape[0]), *both[3:]


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

    def test_operands_that_are_made_late(self):
        self.assertExpectedInline(
            stages(made_late, merged),
            """\
scaled_mm: bfloat16[1, 64] = fp4compile.scaled_mm(arg0_1, arg1_1, arg2_1, arg3_1, plain @ nvfp4 -> bfloat16)
scaled_mm_1: bfloat16[1, 24] = fp4compile.scaled_mm(arg0_1, arg4_1, arg5_1, mul, plain @ nvfp4 -> bfloat16)
scaled_mm_2: bfloat16[1, 24] = fp4compile.scaled_mm(arg0_1, arg7_1, arg8_1, exp, plain @ nvfp4 -> bfloat16)
return scaled_mm: bfloat16[1, 64], scaled_mm_1: bfloat16[1, 24], scaled_mm_2: bfloat16[1, 24]
---
scaled_mm_results_default = fp4compile.scaled_mm_results(arg0_1, [arg1_1, arg4_1, arg7_1], [arg2_1, arg5_1, arg8_1], [arg3_1, mul, exp], plain @ nvfp4 -> bfloat16)
return getitem: bfloat16[1, 64], getitem_1: bfloat16[1, 24], getitem_2: bfloat16[1, 24]""",
        )

    def test_experts(self):
        with FakeTensorMode(), dry_run(Target(90)):
            x, w = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in ((600, 64), (2, 48, 64)))
            graph = make_fx(experts)(x, w, torch.empty(2, dtype=torch.int32, device="cuda")).graph
            assert fake_quantize(graph) == 1
        self.assertExpectedInline(
            summary(graph),
            """\
quantize_default = fp4compile.quantize(x_1, nvfp4_te, [-1, -2], offs=offs_1, hadamard=True, values=[-1])
quantize_1 = fp4compile.quantize(w_1, nvfp4_16x16, each_matrix=True)
scaled_mm: bfloat16[600, 48] = fp4compile.scaled_mm(getitem_9, getitem_11, getitem_6, getitem_7, getitem_8, plain @ nvfp4_16x16, ragged rows -> bfloat16, offs=offs_1, rows=600)
return scaled_mm: bfloat16[600, 48], getitem_12: uint8[64, 384], getitem_13: float8_e4m3fn[64, 48], getitem_14: float32[2]""",
        )
