"""Snapshots of training graphs: the joint graph after the rewrite, the forward and the backward after `merge_quantize`.

Each recipe and model is here for what no other shows. The last values that a forward graph returns are those saved for
the backward.

Regenerate with EXPECTTEST_ACCEPT=1 and read the difference.
"""

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase

import fp4compile
from fp4compile.passes.merge_quantize import merge_quantize
from tests.helpers.graphs import Recorder, summary

pytestmark = pytest.mark.usefixtures("without_kernels")


class Merged(Recorder):
    """Records the graph after `merge_quantize`."""

    def __call__(self, graph):
        merge_quantize(graph)
        super().__call__(graph)


def graphs(model, recipe, *more, shape=(64, 32), dtype=torch.bfloat16):
    """Texts of the joint, the forward and the backward graph, for 64 tokens of width 32."""
    recorder, joint = Merged(), []
    options = {
        "post_grad_custom_pre_pass": recorder,
        "joint_custom_post_pass": lambda graph: joint.append(summary(graph)),
    }
    compiled = torch.compile(model.to(dtype), backend=fp4compile.backend(recipe, strict=True), options=options)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    compiled(x, *more).sum().backward()
    return *joint, *recorder.graphs


def all_of(*args, **options):
    """The three as one text."""
    return "\n---\n".join(graphs(*args, **options))


def forward_and_backward(*args, **options):
    """As one text: these have all of the joint graph."""
    return "\n---\n".join(graphs(*args, **options)[1:])


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(32, 64, bias=False)
        self.down = torch.nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class QKV(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in "qkv":
            setattr(self, name, torch.nn.Linear(32, 32, bias=False))

    def forward(self, x):
        return self.q(x).sin() + self.k(x).cos() + self.v(x).tanh()


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(3, 64, 32))

    def forward(self, x, offs):
        return F.grouped_mm(x, self.w.transpose(1, 2), offs=offs)


class Snapshots(TestCase):
    maxDiff = None

    def test_nvfp4_rowwise_with_bias(self):
        """In scales of rows the two directions are no pair; rows of a batch are viewed as a matrix."""
        layer = torch.nn.Linear(32, 64)
        self.assertExpectedInline(
            all_of(layer, "nvfp4_rowwise", shape=(2, 32, 32)),
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
return view_1: bfloat16[2, 32, 64], scaled_mm_default_2: bfloat16[64, 32], view_3: bfloat16[64], view_4: bfloat16[2, 32, 32]
---
quantize_default = fp4compile.quantize(view, nvfp4_rowwise, [-1])
quantize_default_1 = fp4compile.quantize(primals_1, nvfp4_te, [-1])
scaled_mm_default: bfloat16[64, 64] = fp4compile.scaled_mm(getitem, getitem_1, getitem_2, getitem_3, getitem_4, getitem_5, nvfp4_rowwise @ nvfp4_te -> bfloat16, bias=primals_2)
quantize_default_5 = fp4compile.quantize(view, nvfp4_te, [-2])
return view_1: bfloat16[2, 32, 64], primals_1: bfloat16[64, 32], getitem_15: uint8[32, 32], getitem_16: float8_e4m3fn[32, 4], getitem_17: float32[]
---
quantize_default = fp4compile.quantize(view_2, nvfp4_te, [-1, -2])
quantize_default_3 = fp4compile.quantize(primals_1, nvfp4_te, [-2])
scaled_mm_default_1: bfloat16[64, 32] = fp4compile.scaled_mm(getitem, getitem_18, getitem_19, getitem_9, getitem_10, getitem_11, nvfp4_te @ nvfp4_te -> bfloat16)
scaled_mm_default_2: bfloat16[64, 32] = fp4compile.scaled_mm(getitem_20, getitem_21, getitem_19, getitem_15, getitem_16, getitem_17, nvfp4_te @ nvfp4_te -> bfloat16)
return scaled_mm_default_2: bfloat16[64, 32], view_3: bfloat16[64], view_4: bfloat16[2, 32, 32]""",
        )

    def test_mxfp8_layers_of_one_input(self):
        """One quantiser of the input, in both directions."""
        self.assertExpectedInline(
            forward_and_backward(QKV(), "mxfp8", dtype=torch.float32),
            """\
quantize_default_6 = fp4compile.quantize(primals_2, mxfp8, [-1, -2])
quantize_default_1 = fp4compile.quantize(primals_1, mxfp8, [-1])
scaled_mm_default: float32[64, 32] = fp4compile.scaled_mm(getitem_17, getitem_18, getitem_3, getitem_4, mxfp8 @ mxfp8 -> float32)
quantize_default_2 = fp4compile.quantize(primals_3, mxfp8, [-1])
scaled_mm_default_1: float32[64, 32] = fp4compile.scaled_mm(getitem_17, getitem_18, getitem_6, getitem_7, mxfp8 @ mxfp8 -> float32)
quantize_default_3 = fp4compile.quantize(primals_4, mxfp8, [-1])
scaled_mm_default_2: float32[64, 32] = fp4compile.scaled_mm(getitem_17, getitem_18, getitem_9, getitem_10, mxfp8 @ mxfp8 -> float32)
return add_1: float32[64, 32], primals_1: float32[32, 32], primals_3: float32[32, 32], primals_4: float32[32, 32], scaled_mm_default: float32[64, 32], scaled_mm_default_1: float32[64, 32], scaled_mm_default_2: float32[64, 32], getitem_20: float8_e4m3fn[32, 64], getitem_21: float8_e8m0fnu[32, 2]
---
quantize_default = fp4compile.quantize(mul_1, mxfp8, [-1, -2])
scaled_mm_default_3: float32[32, 32] = fp4compile.scaled_mm(getitem_43, getitem_44, getitem_15, getitem_16, mxfp8 @ mxfp8 -> float32)
quantize_default_7 = fp4compile.quantize(primals_4, mxfp8, [-2])
scaled_mm_default_4: float32[64, 32] = fp4compile.scaled_mm(getitem, getitem_41, getitem_21, getitem_22, mxfp8 @ mxfp8 -> float32)
quantize_default_14 = fp4compile.quantize(mul_2, mxfp8, [-1, -2])
scaled_mm_default_5: float32[32, 32] = fp4compile.scaled_mm(getitem_49, getitem_50, getitem_15, getitem_16, mxfp8 @ mxfp8 -> float32)
quantize_default_10 = fp4compile.quantize(primals_3, mxfp8, [-2])
scaled_mm_default_6: float32[64, 32] = fp4compile.scaled_mm(getitem_46, getitem_47, getitem_30, getitem_31, mxfp8 @ mxfp8 -> float32)
quantize_default_15 = fp4compile.quantize(mul_3, mxfp8, [-1, -2])
scaled_mm_default_7: float32[32, 32] = fp4compile.scaled_mm(getitem_55, getitem_56, getitem_15, getitem_16, mxfp8 @ mxfp8 -> float32)
quantize_default_13 = fp4compile.quantize(primals_1, mxfp8, [-2])
scaled_mm_default_8: float32[64, 32] = fp4compile.scaled_mm(getitem_52, getitem_53, getitem_39, getitem_40, mxfp8 @ mxfp8 -> float32)
return scaled_mm_default_7: float32[32, 32], add_3: float32[64, 32], scaled_mm_default_5: float32[32, 32], scaled_mm_default_3: float32[32, 32]""",
        )

    def test_nvfp4_train_mlp(self):
        self.assertExpectedInline(
            forward_and_backward(MLP(), "nvfp4_train"),
            """\
quantize_default_10 = fp4compile.quantize(primals_2, nvfp4_te, [-1, -2], hadamard=True)
quantize_default_1 = fp4compile.quantize(primals_1, nvfp4_16x16, [-1])
scaled_mm_default: bfloat16[64, 64] = fp4compile.scaled_mm(getitem_30, getitem_31, getitem_32, getitem_3, getitem_4, getitem_5, nvfp4_te @ nvfp4_16x16 -> bfloat16)
quantize_default_11 = fp4compile.quantize(convert_element_type_3, nvfp4_te, [-1, -2], hadamard=True)
quantize_default_3 = fp4compile.quantize(primals_3, nvfp4_16x16, [-1])
scaled_mm_default_1: bfloat16[64, 32] = fp4compile.scaled_mm(getitem_36, getitem_37, getitem_38, getitem_9, getitem_10, getitem_11, nvfp4_te @ nvfp4_16x16 -> bfloat16)
return scaled_mm_default_1: bfloat16[64, 32], primals_1: bfloat16[64, 32], primals_3: bfloat16[32, 64], scaled_mm_default: bfloat16[64, 64], getitem_39: uint8[64, 32], getitem_40: float8_e4m3fn[64, 4], getitem_41: float32[], getitem_33: uint8[32, 32], getitem_34: float8_e4m3fn[32, 4], getitem_35: float32[]
---
inductor_seeds_default: int64[2] = prims.inductor_seeds(2, cpu)
quantize_default = fp4compile.quantize(tangents_1, nvfp4_te, [-1, -2], seed=select_int, hadamard=True)
scaled_mm_default_2: bfloat16[32, 64] = fp4compile.scaled_mm(getitem_38, getitem_39, getitem_40, getitem_15, getitem_16, getitem_17, nvfp4_te @ nvfp4_te -> bfloat16)
quantize_default_7 = fp4compile.quantize(primals_3, nvfp4_16x16, [-2])
scaled_mm_default_3: bfloat16[64, 64] = fp4compile.scaled_mm(getitem, getitem_36, getitem_37, getitem_21, getitem_22, getitem_23, nvfp4_te @ nvfp4_16x16 -> bfloat16)
quantize_default_12 = fp4compile.quantize(convert_element_type_12, nvfp4_te, [-1, -2], seed=select_int_1, hadamard=True)
scaled_mm_default_4: bfloat16[64, 32] = fp4compile.scaled_mm(getitem_44, getitem_45, getitem_46, getitem_27, getitem_28, getitem_29, nvfp4_te @ nvfp4_te -> bfloat16)
quantize_default_11 = fp4compile.quantize(primals_1, nvfp4_16x16, [-2])
scaled_mm_default_5: bfloat16[64, 32] = fp4compile.scaled_mm(getitem_41, getitem_42, getitem_43, getitem_33, getitem_34, getitem_35, nvfp4_te @ nvfp4_16x16 -> bfloat16)
return scaled_mm_default_4: bfloat16[64, 32], scaled_mm_default_5: bfloat16[64, 32], scaled_mm_default_2: bfloat16[32, 64]""",
        )

    def test_nvfp4_train_experts(self):
        offs = torch.tensor([3, 3, 60], dtype=torch.int32)
        self.assertExpectedInline(
            forward_and_backward(Experts(), "nvfp4_train", offs),
            """\
quantize_default = fp4compile.quantize(primals_2, nvfp4_te, [-1], offs=primals_3)
quantize_default_1 = fp4compile.quantize(primals_1, nvfp4_16x16, [-1], each_matrix=True)
scaled_mm_default: bfloat16[64, 64] = fp4compile.scaled_mm(getitem, getitem_1, getitem_2, getitem_3, getitem_4, getitem_5, nvfp4_te @ nvfp4_16x16, ragged rows -> bfloat16, offs=primals_3, rows=64)
return scaled_mm_default: bfloat16[64, 64], primals_1: bfloat16[3, 64, 32], primals_2: bfloat16[64, 32], primals_3: int32[3]
---
inductor_seeds_default: int64[1] = prims.inductor_seeds(1, cpu)
quantize_default = fp4compile.quantize(tangents_1, nvfp4_te, [-1, -2], offs=primals_3, seed=select_int, hadamard=True)
quantize_default_3 = fp4compile.quantize(primals_2, nvfp4_te, [-2], offs=primals_3, hadamard=True)
scaled_mm_default_1: bfloat16[3, 64, 32] = fp4compile.scaled_mm(getitem_20, getitem_21, getitem_22, getitem_9, getitem_10, getitem_11, nvfp4_te @ nvfp4_te, ragged contraction -> bfloat16, offs=primals_3, rows=64)
quantize_default_5 = fp4compile.quantize(primals_1, nvfp4_16x16, [-2], each_matrix=True)
scaled_mm_default_2: bfloat16[64, 32] = fp4compile.scaled_mm(getitem, getitem_18, getitem_19, getitem_15, getitem_16, getitem_17, nvfp4_te @ nvfp4_16x16, ragged rows -> bfloat16, offs=primals_3, rows=64)
return scaled_mm_default_1: bfloat16[3, 64, 32], scaled_mm_default_2: bfloat16[64, 32]""",
        )

    def test_weight_only_keeps_the_activation(self):
        joint, *_ = graphs(torch.nn.Linear(32, 64, bias=False), "nvfp4_weight_only", shape=(2, 32, 32))
        self.assertExpectedInline(
            joint,
            """\
quantize_default = fp4compile.quantize(primals_1, nvfp4, [-1])
scaled_mm_default: bfloat16[64, 64] = fp4compile.scaled_mm(view, getitem, getitem_1, getitem_2, plain @ nvfp4 -> bfloat16)
mm_1: bfloat16[64, 32] = aten.mm(permute_1, view)
mm_2: bfloat16[64, 32] = aten.mm(view_2, primals_1)
return view_1: bfloat16[2, 32, 64], mm_1: bfloat16[64, 32], view_3: bfloat16[2, 32, 32]""",
        )
