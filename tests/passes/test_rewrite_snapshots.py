"""Snapshots: the joint graph after the rewrite, what the forward saves, and the backward graph.

Regenerate with EXPECTTEST_ACCEPT=1 and read the difference.
"""

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase

import fp4compile
from tests.helpers.graphs import compile_recorded, summary

pytestmark = pytest.mark.usefixtures("without_kernels")


def joint_graph(model, *args, recipe="mxfp8"):
    """Text of the rewritten joint graph, which a user pass records in the slot after this package's."""
    graphs = []
    options = {"joint_custom_post_pass": lambda graph: graphs.append(summary(graph))}
    torch.compile(model, backend=fp4compile.backend(recipe), options=options)(*args).sum().backward()
    (text,) = graphs
    return text


def partitions(model, *args, recipe="mxfp8"):
    """Texts of the forward and the backward graph after the partitioner."""
    compiled, recorder = compile_recorded(model, fp4compile.backend(recipe))
    compiled(*args).sum().backward()
    forward, backward = recorder.graphs
    return forward, backward


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(32, 64, bias=False, dtype=torch.bfloat16)
        self.down = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class QKV(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in "qkv":
            setattr(self, name, torch.nn.Linear(32, 32, bias=False))

    def forward(self, x):
        return self.q(x).sin() + self.k(x).cos() + self.v(x).tanh()


def tokens(dtype=torch.bfloat16):
    return torch.randn(2, 32, 32, dtype=dtype, requires_grad=True)


class Snapshots(TestCase):
    maxDiff = None

    def test_linear(self):
        layer = torch.nn.Linear(32, 64, bias=False, dtype=torch.bfloat16)
        self.assertExpectedInline(
            joint_graph(layer, tokens()),
            """\
quantize_default = fp4compile.quantize(view, mxfp8, [-1])
quantize_default_1 = fp4compile.quantize(primals_1, mxfp8, [-1])
scaled_mm_default: bfloat16[64, 64] = fp4compile.scaled_mm(getitem, getitem_1, getitem_3, getitem_4, mxfp8 @ mxfp8 -> bfloat16)
quantize_default_2 = fp4compile.quantize(view_2, mxfp8, [-2])
quantize_default_3 = fp4compile.quantize(view, mxfp8, [-2])
scaled_mm_default_1: bfloat16[64, 32] = fp4compile.scaled_mm(getitem_6, getitem_7, getitem_9, getitem_10, mxfp8 @ mxfp8 -> bfloat16)
quantize_default_4 = fp4compile.quantize(view_2, mxfp8, [-1])
quantize_default_5 = fp4compile.quantize(primals_1, mxfp8, [-2])
scaled_mm_default_2: bfloat16[64, 32] = fp4compile.scaled_mm(getitem_12, getitem_13, getitem_15, getitem_16, mxfp8 @ mxfp8 -> bfloat16)
return view_1: bfloat16[2, 32, 64], scaled_mm_default_1: bfloat16[64, 32], view_3: bfloat16[2, 32, 32]""",
        )
        forward, backward = partitions(layer, tokens())
        self.assertExpectedInline(
            forward,
            """\
quantize_default = fp4compile.quantize(view, mxfp8, [-1])
quantize_default_1 = fp4compile.quantize(primals_1, mxfp8, [-1])
scaled_mm_default: bfloat16[64, 64] = fp4compile.scaled_mm(getitem, getitem_1, getitem_3, getitem_4, mxfp8 @ mxfp8 -> bfloat16)
quantize_default_3 = fp4compile.quantize(view, mxfp8, [-2])
return view_1: bfloat16[2, 32, 64], primals_1: bfloat16[64, 32], getitem_9: float8_e4m3fn[32, 64], getitem_10: float8_e8m0fnu[32, 2]""",
        )
        self.assertExpectedInline(
            backward,
            """\
quantize_default_2 = fp4compile.quantize(view_2, mxfp8, [-2])
scaled_mm_default_1: bfloat16[64, 32] = fp4compile.scaled_mm(getitem_6, getitem_7, getitem_9, getitem_10, mxfp8 @ mxfp8 -> bfloat16)
quantize_default_4 = fp4compile.quantize(view_2, mxfp8, [-1])
quantize_default_5 = fp4compile.quantize(primals_1, mxfp8, [-2])
scaled_mm_default_2: bfloat16[64, 32] = fp4compile.scaled_mm(getitem_12, getitem_13, getitem_15, getitem_16, mxfp8 @ mxfp8 -> bfloat16)
return scaled_mm_default_1: bfloat16[64, 32], view_3: bfloat16[2, 32, 32]""",
        )

    def test_linear_with_bias(self):
        layer = torch.nn.Linear(32, 64, dtype=torch.bfloat16)
        self.assertExpectedInline(
            joint_graph(layer, tokens(), recipe="nvfp4_rowwise"),
            """\
quantize_default = fp4compile.quantize(view, nvfp4_rowwise, [-1])
quantize_default_1 = fp4compile.quantize(primals_1, nvfp4_te, [-1])
scaled_mm_default: bfloat16[64, 64] = fp4compile.scaled_mm(getitem, getitem_1, getitem_2, getitem_3, getitem_4, getitem_5, nvfp4_rowwise @ nvfp4_te -> bfloat16, bias=primals_2)
quantize_default_2 = fp4compile.quantize(view_2, nvfp4_te, [-1])
quantize_default_3 = fp4compile.quantize(primals_1, nvfp4_te, [-2])
scaled_mm_default_1: bfloat16[64, 32] = fp4compile.scaled_mm(getitem_6, getitem_7, getitem_8, getitem_9, getitem_10, getitem_11, nvfp4_te @ nvfp4_te -> bfloat16)
quantize_default_4 = fp4compile.quantize(view_2, nvfp4_te, [-2])
quantize_default_5 = fp4compile.quantize(view, nvfp4_te, [-2])
scaled_mm_default_2: bfloat16[64, 32] = fp4compile.scaled_mm(getitem_12, getitem_13, getitem_14, getitem_15, getitem_16, getitem_17, nvfp4_te @ nvfp4_te -> bfloat16)
return view_1: bfloat16[2, 32, 64], scaled_mm_default_2: bfloat16[64, 32], view_3: bfloat16[64], view_4: bfloat16[2, 32, 32]""",
        )
        forward, backward = partitions(layer, tokens(), recipe="nvfp4_rowwise")
        self.assertExpectedInline(
            forward,
            """\
quantize_default = fp4compile.quantize(view, nvfp4_rowwise, [-1])
quantize_default_1 = fp4compile.quantize(primals_1, nvfp4_te, [-1])
scaled_mm_default: bfloat16[64, 64] = fp4compile.scaled_mm(getitem, getitem_1, getitem_2, getitem_3, getitem_4, getitem_5, nvfp4_rowwise @ nvfp4_te -> bfloat16, bias=primals_2)
quantize_default_5 = fp4compile.quantize(view, nvfp4_te, [-2])
return view_1: bfloat16[2, 32, 64], primals_1: bfloat16[64, 32], getitem_15: uint8[32, 32], getitem_16: float8_e4m3fn[32, 4], getitem_17: float32[]""",
        )
        self.assertExpectedInline(
            backward,
            """\
quantize_default_2 = fp4compile.quantize(view_2, nvfp4_te, [-1])
quantize_default_3 = fp4compile.quantize(primals_1, nvfp4_te, [-2])
scaled_mm_default_1: bfloat16[64, 32] = fp4compile.scaled_mm(getitem_6, getitem_7, getitem_8, getitem_9, getitem_10, getitem_11, nvfp4_te @ nvfp4_te -> bfloat16)
quantize_default_4 = fp4compile.quantize(view_2, nvfp4_te, [-2])
scaled_mm_default_2: bfloat16[64, 32] = fp4compile.scaled_mm(getitem_12, getitem_13, getitem_14, getitem_15, getitem_16, getitem_17, nvfp4_te @ nvfp4_te -> bfloat16)
return scaled_mm_default_2: bfloat16[64, 32], view_3: bfloat16[64], view_4: bfloat16[2, 32, 32]""",
        )

    def test_mlp_saves_packed_activations(self):
        forward, backward = partitions(MLP(), tokens(), recipe="nvfp4")
        self.assertExpectedInline(
            forward,
            """\
quantize_default = fp4compile.quantize(view, nvfp4, [-1])
quantize_default_1 = fp4compile.quantize(primals_1, nvfp4, [-1])
scaled_mm_default: bfloat16[64, 64] = fp4compile.scaled_mm(getitem, getitem_1, getitem_2, getitem_3, getitem_4, getitem_5, nvfp4 @ nvfp4 -> bfloat16)
quantize_default_2 = fp4compile.quantize(view_2, nvfp4, [-1])
quantize_default_3 = fp4compile.quantize(primals_3, nvfp4, [-1])
scaled_mm_default_1: bfloat16[64, 32] = fp4compile.scaled_mm(getitem_6, getitem_7, getitem_8, getitem_9, getitem_10, getitem_11, nvfp4 @ nvfp4 -> bfloat16)
quantize_default_5 = fp4compile.quantize(view_2, nvfp4, [-2])
quantize_default_9 = fp4compile.quantize(view, nvfp4, [-2])
return view_3: bfloat16[2, 32, 32], primals_1: bfloat16[64, 32], primals_3: bfloat16[32, 64], scaled_mm_default: bfloat16[64, 64], getitem_15: uint8[64, 32], getitem_16: float8_e4m3fn[64, 4], getitem_17: float32[], getitem_27: uint8[32, 32], getitem_28: float8_e4m3fn[32, 4], getitem_29: float32[]""",
        )
        self.assertExpectedInline(
            backward,
            """\
quantize_default_4 = fp4compile.quantize(view_4, nvfp4, [-2])
scaled_mm_default_2: bfloat16[32, 64] = fp4compile.scaled_mm(getitem_12, getitem_13, getitem_14, getitem_15, getitem_16, getitem_17, nvfp4 @ nvfp4 -> bfloat16)
quantize_default_6 = fp4compile.quantize(view_4, nvfp4, [-1])
quantize_default_7 = fp4compile.quantize(primals_3, nvfp4, [-2])
scaled_mm_default_3: bfloat16[64, 64] = fp4compile.scaled_mm(getitem_18, getitem_19, getitem_20, getitem_21, getitem_22, getitem_23, nvfp4 @ nvfp4 -> bfloat16)
quantize_default_8 = fp4compile.quantize(view_6, nvfp4, [-2])
scaled_mm_default_4: bfloat16[64, 32] = fp4compile.scaled_mm(getitem_24, getitem_25, getitem_26, getitem_27, getitem_28, getitem_29, nvfp4 @ nvfp4 -> bfloat16)
quantize_default_10 = fp4compile.quantize(view_6, nvfp4, [-1])
quantize_default_11 = fp4compile.quantize(primals_1, nvfp4, [-2])
scaled_mm_default_5: bfloat16[64, 32] = fp4compile.scaled_mm(getitem_30, getitem_31, getitem_32, getitem_33, getitem_34, getitem_35, nvfp4 @ nvfp4 -> bfloat16)
return scaled_mm_default_4: bfloat16[64, 32], view_7: bfloat16[2, 32, 32], scaled_mm_default_2: bfloat16[32, 64]""",
        )

    def test_qkv_share_one_quantised_input(self):
        forward, backward = partitions(QKV(), tokens(torch.float32))
        self.assertExpectedInline(
            forward,
            """\
quantize_default = fp4compile.quantize(view, mxfp8, [-1])
quantize_default_1 = fp4compile.quantize(primals_1, mxfp8, [-1])
scaled_mm_default: float32[64, 32] = fp4compile.scaled_mm(getitem, getitem_1, getitem_3, getitem_4, mxfp8 @ mxfp8 -> float32)
quantize_default_2 = fp4compile.quantize(primals_3, mxfp8, [-1])
scaled_mm_default_1: float32[64, 32] = fp4compile.scaled_mm(getitem, getitem_1, getitem_6, getitem_7, mxfp8 @ mxfp8 -> float32)
quantize_default_3 = fp4compile.quantize(primals_4, mxfp8, [-1])
scaled_mm_default_2: float32[64, 32] = fp4compile.scaled_mm(getitem, getitem_1, getitem_9, getitem_10, mxfp8 @ mxfp8 -> float32)
quantize_default_5 = fp4compile.quantize(view, mxfp8, [-2])
return add_1: float32[2, 32, 32], primals_1: float32[32, 32], primals_3: float32[32, 32], primals_4: float32[32, 32], scaled_mm_default: float32[64, 32], scaled_mm_default_1: float32[64, 32], scaled_mm_default_2: float32[64, 32], getitem_15: float8_e4m3fn[32, 64], getitem_16: float8_e8m0fnu[32, 2]""",
        )
        self.assertExpectedInline(
            backward,
            """\
quantize_default_4 = fp4compile.quantize(view_6, mxfp8, [-2])
scaled_mm_default_3: float32[32, 32] = fp4compile.scaled_mm(getitem_12, getitem_13, getitem_15, getitem_16, mxfp8 @ mxfp8 -> float32)
quantize_default_6 = fp4compile.quantize(view_6, mxfp8, [-1])
quantize_default_7 = fp4compile.quantize(primals_4, mxfp8, [-2])
scaled_mm_default_4: float32[64, 32] = fp4compile.scaled_mm(getitem_18, getitem_19, getitem_21, getitem_22, mxfp8 @ mxfp8 -> float32)
quantize_default_8 = fp4compile.quantize(view_8, mxfp8, [-2])
scaled_mm_default_5: float32[32, 32] = fp4compile.scaled_mm(getitem_24, getitem_25, getitem_15, getitem_16, mxfp8 @ mxfp8 -> float32)
quantize_default_9 = fp4compile.quantize(view_8, mxfp8, [-1])
quantize_default_10 = fp4compile.quantize(primals_3, mxfp8, [-2])
scaled_mm_default_6: float32[64, 32] = fp4compile.scaled_mm(getitem_27, getitem_28, getitem_30, getitem_31, mxfp8 @ mxfp8 -> float32)
quantize_default_11 = fp4compile.quantize(view_10, mxfp8, [-2])
scaled_mm_default_7: float32[32, 32] = fp4compile.scaled_mm(getitem_33, getitem_34, getitem_15, getitem_16, mxfp8 @ mxfp8 -> float32)
quantize_default_12 = fp4compile.quantize(view_10, mxfp8, [-1])
quantize_default_13 = fp4compile.quantize(primals_1, mxfp8, [-2])
scaled_mm_default_8: float32[64, 32] = fp4compile.scaled_mm(getitem_36, getitem_37, getitem_39, getitem_40, mxfp8 @ mxfp8 -> float32)
return scaled_mm_default_7: float32[32, 32], add_3: float32[2, 32, 32], scaled_mm_default_5: float32[32, 32], scaled_mm_default_3: float32[32, 32]""",
        )

    def test_qkv_share_one_quantised_input_under_autocast(self):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            forward, _ = partitions(QKV(), tokens(torch.float32))
        self.assertExpectedInline(
            forward,
            """\
quantize_default = fp4compile.quantize(view, mxfp8, [-1])
quantize_default_1 = fp4compile.quantize(convert_element_type, mxfp8, [-1])
scaled_mm_default: bfloat16[64, 32] = fp4compile.scaled_mm(getitem, getitem_1, getitem_3, getitem_4, mxfp8 @ mxfp8 -> bfloat16)
quantize_default_2 = fp4compile.quantize(convert_element_type_4, mxfp8, [-1])
scaled_mm_default_1: bfloat16[64, 32] = fp4compile.scaled_mm(getitem, getitem_1, getitem_6, getitem_7, mxfp8 @ mxfp8 -> bfloat16)
quantize_default_3 = fp4compile.quantize(convert_element_type_8, mxfp8, [-1])
scaled_mm_default_2: bfloat16[64, 32] = fp4compile.scaled_mm(getitem, getitem_1, getitem_9, getitem_10, mxfp8 @ mxfp8 -> bfloat16)
quantize_default_5 = fp4compile.quantize(view, mxfp8, [-2])
return add_1: bfloat16[2, 32, 32], primals_1: float32[32, 32], primals_3: float32[32, 32], primals_4: float32[32, 32], scaled_mm_default: bfloat16[64, 32], scaled_mm_default_1: bfloat16[64, 32], scaled_mm_default_2: bfloat16[64, 32], getitem_15: float8_e4m3fn[32, 64], getitem_16: float8_e8m0fnu[32, 2]""",
        )

    def test_weight_only_keeps_the_activation(self):
        layer = torch.nn.Linear(32, 64, bias=False, dtype=torch.bfloat16)
        self.assertExpectedInline(
            joint_graph(layer, tokens(), recipe="nvfp4_weight_only"),
            """\
quantize_default = fp4compile.quantize(primals_1, nvfp4, [-1])
scaled_mm_default: bfloat16[64, 64] = fp4compile.scaled_mm(view, getitem, getitem_1, getitem_2, plain @ nvfp4 -> bfloat16)
mm_1: bfloat16[64, 32] = aten.mm(permute_1, view)
mm_2: bfloat16[64, 32] = aten.mm(view_2, primals_1)
return view_1: bfloat16[2, 32, 64], mm_1: bfloat16[64, 32], view_3: bfloat16[2, 32, 32]""",
        )
