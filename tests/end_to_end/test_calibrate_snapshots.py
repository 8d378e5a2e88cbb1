"""Snapshots: a compiled graph with calibrated scales, and what is launched for a given and for a computed scale.

Regenerate with EXPECTTEST_ACCEPT=1 and read the difference.
"""

import torch
from expecttest import TestCase

import fp4compile
from fp4compile.recipe import named
from tests.helpers.absent_gpu import launched_on
from tests.helpers.graphs import compile_recorded


class Snapshots(TestCase):
    maxDiff = None

    def test_no_reduction_remains(self):
        """What computes a scale leaves the graph, and the launches: a dynamic scale needs one of its own."""
        layer, x = torch.nn.Linear(64, 48), torch.randn(4, 64)
        recipe = fp4compile.calibrate(layer, [x])
        with torch.no_grad():
            compiled, recorder = compile_recorded(layer, fp4compile.backend(recipe))
            compiled(x)
        given = named("nvfp4_static").replace(fprop_w=None, static_scales={"": 0.01})
        launches = [launched_on(100, chosen) for chosen in (given, given.replace(static_scales=()))]
        kernels = [", ".join(kernel for kernel, _ in found) for _, found in launches]
        self.assertExpectedInline(
            "\n".join([*recorder.graphs, *kernels]),
            """\
quantize_default = fp4compile.quantize(arg2_1, nvfp4, [-1], outer=full_default_1)
scaled_mm_default: float32[4, 48] = fp4compile.scaled_mm(getitem, getitem_1, full_default_1, packed_0, packed_1, packed_2, nvfp4 @ nvfp4 -> float32, bias=arg1_1)
return scaled_mm_default: float32[4, 48]
quantize_rows, dequant_operand, split_k_reduction
tensor_amax, quantize_rows, dequant_operand, split_k_reduction""",
        )
