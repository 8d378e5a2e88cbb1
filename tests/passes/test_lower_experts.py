"""Products of experts lowered for GPUs that need not be there: which kernels, how many launches, which tier."""

import pytest
import torch
import torch.nn.functional as F
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fp4compile.analysis.find import Input
from fp4compile.hardware import Target
from fp4compile.passes.lower import lower
from fp4compile.passes.merge_quantize import merge_quantize
from fp4compile.templates.launch import dry_run
from tests.helpers.absent_gpu import rewritten_by, symbolic
from tests.helpers.arguments import times

NATIVE, TILES = "gemm_block_scaled_sm100", "gemm_dequant_tiles"


def lowered(sm, function, *shapes, recipe=None, dynamic=False):
    """(decisions, names of the launches, names of fp4compile's ops that are left) of function(x, w, integers).

    shapes: of x and w in bf16, and the number of offsets (int32) or of indices (int64, a tuple). dynamic: whether the
    number of rows of x is symbolic.
    """
    *floats, integers = shapes
    inputs = (Input(), Input("w"), Input())
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, enable_python_dispatcher(), dry_run(Target(sm)) as launches:
        if dynamic:
            floats[0] = (symbolic(mode.shape_env, floats[0][0]), *floats[0][1:])
        tensors = [torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in floats]
        kind = torch.int32 if isinstance(integers, int) else torch.int64
        graph = make_fx(function)(*tensors, torch.empty(integers, device="cuda", dtype=kind)).graph
        decisions = rewritten_by(recipe, graph, inputs) if recipe else []
        merge_quantize(graph)
        lower(graph)
    left = [str(node.target) for node in graph.nodes if "fp4compile" in str(node.target)]
    return decisions, [one.kernel.__name__ for one in launches], left


def grouped(x, w, offs):
    return F.grouped_mm(x, w.transpose(1, 2), offs=offs)


def backward(name, hadamard):
    """The quantisers and the product of a weight gradient."""

    def wgrad(x, dy, offs):
        operands = []
        for t in (dy, x):
            data, scales, outer = torch.ops.fp4compile.quantize(t, name, -2, offs=offs, hadamard=hadamard)
            operands.append((data, scales, outer if outer.numel() else None, name))
        return times(*operands, offs=offs, rows=x.shape[0])

    return wgrad


FORWARD = {
    "nvfp4": ["tensor_amax", "quantize_rows", "tensor_amax", "quantize_rows"],
    "mxfp8": ["quantize_rows", "quantize_rows"],
    "float8_rowwise": ["quantize_whole_rows", "quantize_whole_rows"],
    "nvfp4_weight_only": ["tensor_amax", "quantize_rows"],
}


OPAQUE = ["fp4compile.scaled_mm_opaque.default"]


@pytest.mark.parametrize(("recipe", "columns"), [("float8_block", "float8_1x128"), ("float8_rowwise", "float8_rowwise"),
                                                 ("float8_tensor", "float8_tensor")])  # fmt: skip
def test_float8_on_hopper(recipe, columns):
    """The kernel is in Gluon, so an op stands for it: for any number of rows, and in a weight gradient."""
    for dynamic in (False, True):
        (decision,), launches, left = lowered(90, grouped, (256, 512), (8, 1024, 512), 8, recipe=recipe,
                                              dynamic=dynamic)  # fmt: skip
        assert (decision.tier, left) == ("native", OPAQUE) and "gemm" not in str(launches)
    assert lowered(90, backward(columns, False), (256, 512), (256, 1024), 8)[2] == OPAQUE
    assert lowered(89, backward(columns, False), (256, 512), (256, 1024), 8)[1][-1] == TILES


@pytest.mark.parametrize("recipe", FORWARD)
def test_launches_of_a_forward_product(recipe):
    """On Hopper; as many for any number of groups that the same kernel serves."""
    native = recipe == "float8_rowwise"
    for groups in (1, 4, 512):
        (decision,), launches, left = lowered(90, grouped, (256, 512), (groups, 1024, 512), groups, recipe=recipe)
        assert (decision.tier, decision.reason) == ("native" if native else "emulated", None)
        assert left == (OPAQUE if native else [])
        weight_only = recipe == "nvfp4_weight_only"
        if native:  # FP8 matrix units, by an op
            product = []
        elif recipe.startswith("nvfp4"):  # weights are read as codes; few rows: they are streamed
            streamed = [*["dequant_operand"] * (not weight_only), "gemm_skinny"]
            swizzle = "swizzle_a_sm90" if weight_only else "swizzle_codes_sm90"
            product = streamed if groups == 512 else [swizzle, "gemm_wgmma_sm90"]
        elif groups == 1:  # many rows: operands are dequantised once, and checked: bfloat16 may not hold a value
            product = ["dequant_operand", "dequant_operand", "gemm_grouped", TILES]
        else:
            product = [TILES]
        assert launches == [*FORWARD[recipe], *product]


@pytest.mark.parametrize("sm", [90, 100])
def test_a_symbolic_number_of_rows(sm):
    """On Hopper many rows have another kernel than few: the op stays, and chooses when it runs."""
    _, launches, left = lowered(sm, grouped, (256, 512), (4, 1024, 512), 4, recipe="mxfp8", dynamic=True)
    if sm == 90:
        assert left == ["fp4compile.scaled_mm.default"] and launches == FORWARD["mxfp8"]
    else:
        assert not left and launches[-1] == NATIVE


@pytest.mark.parametrize(("recipe", "native"), [
    ("nvfp4", True), ("mxfp8", True), ("nvfp4_rowwise", True), ("mxfp4", True), ("nvfp4_weight_only", False),
    ("float8_rowwise", False),
])  # fmt: skip
def test_tier_on_sm100(recipe, native):
    """Block-scaled operands multiply on the matrix units that read them, with swizzled scales."""
    (decision,), launches, left = lowered(100, grouped, (256, 512), (4, 1024, 512), 4, recipe=recipe)
    assert decision.tier == ("native" if native else "emulated") and not left
    assert launches[-1] == (NATIVE if native else TILES)
    assert decision.b.layout == ("swizzled" if native else "linear")
    # TMA copies rows of whole 16 bytes. NVFP4 rows of 48 elements have 24.
    (decision,), launches, _ = lowered(100, grouped, (256, 48), (4, 1024, 48), 4, recipe=recipe)
    assert decision.tier == ("native" if native and recipe.startswith("mx") else "emulated")


@pytest.mark.parametrize(("name", "hadamard", "count"), [
    ("nvfp4_te", False, 2), ("nvfp4_te", True, 2), ("nvfp4_rowwise", False, 2), ("mxfp8", False, 1),
])  # fmt: skip
def test_launches_of_both_directions(name, hadamard, count):
    """One launch reads the amaxes of both, and one quantises in both."""

    def both(x, w, offs):
        rows = torch.ops.fp4compile.quantize(x, name, -1, offs=offs)
        columns = torch.ops.fp4compile.quantize(x, name, -2, offs=offs, hadamard=hadamard)
        return (*rows, *columns)

    for sm, groups in ((90, 3), (100, 64)):
        _, launches, left = lowered(sm, both, (512, 256), (1,), groups)
        assert launches[-1] == "quantize_columns" and len(launches) == count and not left


def test_both_directions_of_matrices_in_square_blocks():
    def both(x, w, unused):
        quantize = torch.ops.fp4compile.quantize
        return (*quantize(w, "nvfp4_16x16", each_matrix=True), *quantize(w, "nvfp4_16x16", -2, each_matrix=True))

    _, launches, left = lowered(100, both, (1,), (4, 256, 512), 4)
    assert launches == ["tensor_amax", "quantize_squares"] and not left


@pytest.mark.parametrize("hadamard", [False, True])
def test_launches_of_a_weight_gradient(hadamard):
    for groups, product in ((1, ["dequant_operand", "dequant_operand", "gemm_grouped"]), (64, [TILES])):
        _, launches, left = lowered(90, backward("nvfp4_te", hadamard), (512, 256), (512, 1024), groups)
        assert len(launches) == 4 + len(product) and launches[4:] == product and not left


def test_experts_of_a_batch_and_by_index():
    def batched(x, w, unused):
        return torch.bmm(x, w.transpose(1, 2))

    def gathered(x, w, index):
        return torch.bmm(torch.ops.aten.index.Tensor(w, [index]), x.unsqueeze(-1))

    for sm, tier in ((90, "emulated"), (100, "native")):
        (decision,), launches, left = lowered(sm, batched, (4, 64, 512), (4, 1024, 512), 4, recipe="nvfp4")
        assert (decision.tier, decision.gemm.groups) == (tier, "batched") and not left
        assert launches.count("quantize_rows") == 2 and launches.count("tensor_amax") == 2
        (decision,), launches, left = lowered(sm, gathered, (6, 512), (4, 1024, 512), (6,), recipe="nvfp4")
        assert (decision.tier, decision.gemm.groups) == (tier, "gathered")
        if sm == 90:
            assert launches[-1] == "gemm_skinny" and not left  # reads weights through the index
        else:
            assert left == ["fp4compile.scaled_mm.default"]  # stays an op
    _, launches, left = lowered(90, gathered, (6, 512), (4, 1024, 512), (6,), recipe="mxfp8")
    assert left == ["fp4compile.scaled_mm.default"]


def test_an_index_for_other_tokens_raises():
    with FakeTensorMode():
        a, b = torch.empty(6, 1, 512, dtype=torch.bfloat16), torch.empty(4, 1024, 512, dtype=torch.bfloat16)
        for shapes in ((5,), (6, 1)):
            index = torch.empty(shapes, dtype=torch.int64)
            with pytest.raises(ValueError, match="a, b, index: expected"):
                spec = "plain @ plain, gathered -> bfloat16"
                torch.ops.fp4compile.scaled_mm(a, None, None, b, None, None, spec, index=index)
