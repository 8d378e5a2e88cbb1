"""Prologues in inference graphs: in which blocks, norms with their statistics included, what is stored, what is left."""

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase

from fp4compile.ops.nodes import quantise_of
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.passes.fake_quantize import fake_quantize
from fp4compile.passes.fuse_prologue import fuse_prologue
from fp4compile.passes.lower import lower
from fp4compile.passes.merge_quantize import merge_quantize
from fp4compile.templates.quantize import prologue_cost
from tests.helpers import llama
from tests.helpers.absent_gpu import ANY, fused_graph
from tests.helpers.graphs import for_inductor, summary
from tests.helpers.llama import llama_block, llama_norm

BF16 = torch.bfloat16
ONE, FIRST = "quantize_whole_rows", "row_statistics"


@pytest.fixture(autouse=True)
def on_any_gpu(monkeypatch):
    """What the model says, also of GPUs on which the pass does nothing yet."""
    monkeypatch.setattr(prologue_cost, "SINCE", dict.fromkeys(prologue_cost.SINCE, 0))


class Graph:
    """What became of a function's graph: lines of its snapshot, operations for Inductor, launches of this package."""

    def __init__(self, function, *shapes, **options):
        self.result = fused_graph(function, *shapes, then=self.read, **options)

    def read(self, graph):
        merge_quantize(graph)
        fake_quantize(graph)
        self.fused = fuse_prologue(graph)
        graph.lint()
        self.lines = summary(graph).splitlines()
        quantisers = map(quantise_of, graph.find_nodes(op="call_function", target=QUANTIZE))
        self.quantisers = [each for each in quantisers if each.prologue]
        self.left = [node.name for node in graph.nodes if for_inductor(node)]
        lower(graph)

    @property
    def finding(self):
        """Kernels that find statistics."""
        names = [one.kernel.__name__ for one in self.result.launches]
        return [name for name in names if name in (ONE, FIRST)]

    @property
    def snapshot(self):
        """Quantisers of activations, then what is left."""
        found = [line.split(" = fp4compile.")[1] for line in self.lines if "fp4compile.quantize" in line]
        lines = [line for line in found if not line.startswith(("quantize(w", "quantize(v"))]
        return "\n".join([*lines, f"for Inductor: {', '.join(self.left)}"])


class Snapshots(TestCase):
    """What quantises the activations of a block, and what Inductor has to compute.

    Regenerate with EXPECTTEST_ACCEPT=1 and read the difference.
    """

    def check(self, function, shapes, recipe, sm, expected):
        found = Graph(function, *shapes, recipe=recipe, sm=sm).snapshot
        self.assertExpectedInline(found, expected, skip=1)

    def test_llama_block_by_the_library(self):
        """The library's products write neither the gate nor the residual stream; the second norm writes the latter."""
        self.check(
            llama_block, llama.SHAPES, "float8_rowwise", 90,
            """\
quantize(reshape_default, float8_rowwise, [-1], operands=[norm_1], prologue=['square aux0', 'mean s0', 'add s1 1e-05', 'rsqrt s2', 'mul aux0 s3', 'mul row1 s4'], dtype=torch.bfloat16)
quantize(reshape_default_1, float8_rowwise, [-1], operands=[post_norm_1, scaled_mm_default_3], prologue=['add aux0 aux2', 'square s0', 'mean s1', 'add s2 1e-05', 'rsqrt s3', 'mul s0 s4', 'mul row1 s5'], dtype=torch.bfloat16, stored=['s0 bfloat16'])
quantize(scaled_mm_default_4, float8_rowwise, [-1], operands=[scaled_mm_default_5], prologue=['neg aux0', 'exp s0', 'add s1 1.0', 'div aux0 s2', 'mul s3 aux1'], dtype=torch.bfloat16)
for Inductor: add_4""",
        )  # fmt: skip

    def test_llama_block_block_scaled(self):
        """Products write the gate and the residual stream; the norms read the latter."""
        self.check(
            llama_block, llama.SHAPES, "mxfp8", 100,
            """\
quantize(reshape_default_2, mxfp8, [-1], layout=swizzled, operands=[norm_1], prologue=['square aux0', 'mean s0', 'add s1 1e-05', 'rsqrt s2', 'mul aux0 s3', 'mul row1 s4'], dtype=torch.bfloat16)
quantize(scaled_mm_default_7, mxfp8, [-1], layout=swizzled, operands=[post_norm_1], prologue=['square aux0', 'mean s0', 'add s1 1e-05', 'rsqrt s2', 'mul aux0 s3', 'mul row1 s4'], dtype=torch.bfloat16)
for Inductor: add_4""",
        )  # fmt: skip


SHAPES = (256, 512), (512,), (512,), (1024, 512)


def under_autocast(x, scale, bias, w):
    with torch.autocast("cuda", BF16):
        return F.linear(F.layer_norm(x, (512,), scale, bias), w)


def torch_norm(x, scale, bias, w):
    """As AOTAutograd has it: nothing is written in place."""
    wide = x.float()
    rstd = torch.rsqrt(torch.ops.aten.add.Scalar(wide.pow(2).mean(1, keepdim=True), 1e-5))
    return F.linear((wide * rstd * scale).to(BF16), w)


def in_bf16(x, scale, bias, w):
    return F.linear(x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * scale, w)


def by_var_mean(x, scale, bias, w):
    variance, mean = torch.var_mean(x.float(), -1, correction=0, keepdim=True)
    return F.linear(((x - mean) * torch.rsqrt(variance + 1e-5)).to(BF16), w)


FORMS = {
    "llama": lambda x, scale, bias, w: F.linear(llama_norm(x, scale), w),
    "torch": torch_norm,
    "layer norm": lambda x, scale, bias, w: F.linear(F.layer_norm(x, (512,), scale, bias), w),
    "autocast": under_autocast,
    "in bf16": in_bf16,
    "variance": by_var_mean,
    "another shape": lambda x, scale, bias, w: F.linear(llama_norm(x.view(2, 128, 512), scale).view(256, 512), w),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name):
    """Nothing is left to Inductor, whoever wrote the norm."""
    found = Graph(FORMS[name], *SHAPES, recipe="mxfp8")
    assert found.fused == 1 and found.left == [] and found.finding == [ONE]


def unbiased(x, scale, bias, w):
    variance, mean = torch.var_mean(x.float(), -1, correction=1, keepdim=True)
    return F.linear(((x - mean) * torch.rsqrt(variance + 1e-5)).to(BF16), w)


def without_its_mean(x, scale, bias, w):
    variance, _ = torch.var_mean(x.float(), -1, correction=0, keepdim=True)
    return F.linear((x * torch.rsqrt(variance + 1e-5)).to(BF16), w)


def of_columns(x, scale, bias, w):
    return F.linear((x * torch.rsqrt(x.float().square().mean(0, keepdim=True))).to(BF16), w)


def of_all(x, scale, bias, w):
    return F.linear((x * torch.rsqrt(x.float().square().mean((0, 1), keepdim=True))).to(BF16), w)


def of_heads(x, scale, bias, w):
    heads = x.view(256, 4, 128).float()
    return F.linear((heads * torch.rsqrt(heads.square().mean(-1, keepdim=True))).to(BF16).view(256, 512), w)


def of_half_a_row(x, scale, bias, w):
    halves = x.view(512, 256).float().square().mean(-1, keepdim=True)
    return F.linear((x * torch.rsqrt(halves.view(256, 2).narrow(1, 0, 1))).to(BF16), w)


def of_another_tensor(x, scale, bias, w):
    """Statistics of as many rows, but of another length."""
    others = w.view(256, 2048).float().square().mean(-1, keepdim=True)
    return F.linear((x * torch.rsqrt(others)).to(BF16), w)


LEFT = (unbiased, without_its_mean, of_columns, of_all, of_heads, of_half_a_row, of_another_tensor)


@pytest.mark.parametrize("function", LEFT, ids=lambda function: function.__name__)
def test_reductions_that_are_left(function):
    """To Inductor, which writes the statistics; what follows them may be fused."""
    found = Graph(function, *SHAPES, recipe="mxfp8")
    assert not any("mean" in step or "variance" in step for each in found.quantisers for step in each.prologue)
    assert any("mean" in name for name in found.left) and not found.finding


def for_backward(x, y, scale, w):
    """What the partitioner makes of a forward: the residual stream, the statistics and the norm are saved."""
    stream = x + y
    wide = stream.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    normed = scale * (wide * rstd).to(BF16)
    return F.linear(normed, w), stream, rstd, normed


@pytest.mark.parametrize("rows", [256, ANY], ids=["256", "any"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_what_the_backward_needs_is_stored(recipe, rows):
    """Of any number of rows, without a guard. The second kernel of two levels reads what the first has stored."""
    found = Graph(for_backward, (rows, 512), (rows, 512), (512,), (1024, 512), recipe=recipe, sm=100)
    assert found.fused == 1 and found.left == [] and not found.result.mode.shape_env.guards
    assert found.quantisers[0].stored == ("s0 bfloat16", "s4 float32", "s6 bfloat16")
    assert found.finding == [ONE if recipe == "mxfp8" else FIRST]
    first, second, *_ = found.result.launches
    if recipe == "nvfp4":
        assert second.kernel.__name__ == "quantize_rows" and second.constants["PROLOGUE"] == ""
        assert second.args["x_ptr"] is first.args["stored_3_ptr"]


@pytest.mark.parametrize(("length", "rounded"), [(1024, False), (2048, True)])
def test_the_residual_stream_is_read_as_inductor_reads_it(length, rounded):
    """Of longer rows than a kernel of Inductor's holds, a second loop reads the stream from memory."""

    def stream_too(x, y, scale, w):
        stream = x + y
        return F.linear(llama_norm(stream, scale), w), stream

    shapes = (256, length), (256, length), (length,), (64, length)
    found = Graph(stream_too, *shapes, recipe="nvfp4", sm=100)
    assert ("bfloat16 s0" in found.quantisers[0].prologue) == rounded
    assert found.finding == [FIRST, ONE]


@pytest.mark.parametrize(("recipe", "rows", "kernels"), [
    ("mxfp8", 64, [ONE]), ("nvfp4_rowwise", 8, [ONE]), ("nvfp4", 8, [FIRST, ONE]), ("nvfp4", 1, [ONE]),
])  # fmt: skip
def test_decoding(recipe, rows, kernels):
    """One launch, but for an amax of several rows; a single one has the global scale of the tensor."""
    found = Graph(FORMS["llama"], (rows, 512), *SHAPES[1:], recipe=recipe, sm=100)
    assert found.left == [] and found.finding == kernels


def test_long_rows():
    """Rows that do not fit on the chip have their statistics from Inductor; the quantiser reads these."""
    length = 2**15
    found = Graph(FORMS["llama"], (256, length), (length,), (length,), (64, length), recipe="nvfp4_rowwise", sm=100)
    assert "mean" in found.left
    assert [each.prologue for each in found.quantisers] == [("mul aux0 col2", "mul row1 s0")]
