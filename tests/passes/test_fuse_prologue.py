"""Which pointwise operations go into a quantiser's kernel, and what they compute there."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fp4compile.passes.fuse_prologue import MOST_STEPS, fuse_prologue
from fp4compile.passes.graph import CAST, QUANTIZE, QUANTIZE_PROLOGUE
from fp4compile.passes.lower import lower
from fp4compile.passes.merge_quantize import merge_quantize
from fp4compile.targets import Target
from fp4compile.templates.launch import dry_run
from fp4compile.templates.quantize import prologue_cost
from tests.helpers.absent_gpu import fused_graph as epilogue_graph
from tests.helpers.graphs import summary

BF16, F32 = torch.bfloat16, torch.float32
SAME, ROW = (2, 64, 128), (128,)
ANY = object()  # a symbolic size
quantize, quantize_both = torch.ops.fp4compile.quantize, torch.ops.fp4compile.quantize_both


@dataclass
class Result:
    graph: torch.fx.Graph
    fused: int
    launches: list
    mode: FakeTensorMode


def fused_graph(function, *shapes, dtypes=(), lowered=False, fuse=True, device="cuda", sm=90, turned=False):
    """The graph of a function on fake CUDA tensors, decomposed as Inductor does it, after the pass."""
    dtypes = [*dtypes, *[BF16] * (len(shapes) - len(dtypes))]
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, dry_run(Target(sm)) as launches:
        symbol = mode.shape_env.create_symbol(4, ConstantSource("s"), DimDynamic.DYNAMIC)
        size = mode.shape_env.create_symintnode(symbol, hint=4)
        shapes = [[size if entry is ANY else entry for entry in shape] for shape in shapes]
        values = [torch.empty(shape, device=device, dtype=t) for shape, t in zip(shapes, dtypes, strict=True)]
        if turned:
            values[-1] = torch.empty_like(values[-1].t(), memory_format=torch.contiguous_format).t()
        with enable_python_dispatcher():
            graph = make_fx(function, decomposition_table=select_decomp_table())(*values).graph
        merge_quantize(graph)
        fused = fuse_prologue(graph) if fuse else 0
        graph.lint()
        if lowered:
            lower(graph)
    return Result(graph, fused, launches, mode)


@pytest.fixture(autouse=True)
def on_any_gpu(monkeypatch):
    """What the model says, also of GPUs on which the pass does nothing yet."""
    monkeypatch.setattr(prologue_cost, "SINCE", 0)


def test_what_was_measured_stays_as_it_is(monkeypatch):
    monkeypatch.undo()
    found = [fused_graph(lambda x, w: quantize(rms_norm(x, w), "nvfp4"), FLAT, ROW, sm=sm).fused for sm in (90, 100)]
    assert found == [0, 1]


def steps_of(graph):
    (node,) = graph.find_nodes(op="call_function", target=QUANTIZE_PROLOGUE)
    return node.args[1]


def left(graph):
    """Operations that are Inductor's to compute."""
    return [str(node.target) for node in graph.nodes
            if node.op == "call_function" and torch.Tag.pointwise in getattr(node.target, "tags", ())]  # fmt: skip


def rms_norm(x, w):
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def gemma_norm(x, w):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + w.float())).to(x.dtype)


def flat(value):
    return value.reshape(-1, value.shape[-1])


SILU = ["neg aux0", "exp s0", "add s1 1.0", "div aux0 s2"]
ONE_LEVEL = "nvfp4_one_level"
# function of the value, shapes, format, steps (None: whatever they are)
FUSED = {
    "relu squared": (lambda x: F.relu(x).square(), (SAME,), "nvfp4", ["relu aux0", "square s0"]),
    "gate": (lambda x, y: F.silu(x) * y, (SAME, SAME), "mxfp8", [*SILU, "mul s3 aux1"]),
    "gelu": (F.gelu, (SAME,), ONE_LEVEL, None),
    "gelu by tanh": (lambda x: F.gelu(x, approximate="tanh"), (SAME,), ONE_LEVEL, None),
    "scaled": (lambda x: x * 0.5, (SAME,), "nvfp4_rowwise", ["mul aux0 0.5"]),
    "norm": (rms_norm, (SAME, ROW), "nvfp4", ["mul aux0 col2", "mul row1 s0"]),
    "gemma": (gemma_norm, (SAME, ROW), "mxfp8", ["mul aux0 col1", "add row2 1.0", "mul s0 s1"]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (128,), w, b), (SAME, ROW, ROW), "nvfp4",
                   ["sub aux0 col1", "mul s0 col2", "mul s1 row3", "add s2 row4"]),
    "of another shape": (lambda x, y: flat(x.float() * 3) - flat(y).view(-1, 128), (SAME, SAME), ONE_LEVEL,
                         ["mul aux0 3.0", "sub s0 aux1"]),
    "residual": (lambda x, y: x + y, (SAME, SAME), "float8_rowwise", ["add aux0 aux1"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FUSED)
def test_fused(name):
    """Nothing but statistics is left to Inductor; the kernels can be launched, and read by the prologue."""
    function, shapes, format, steps = FUSED[name]
    result = fused_graph(lambda *args: quantize(flat(function(*args).to(BF16)), format), *shapes, lowered=True)
    assert result.fused == 1
    readers = [one.kernel.fn.__globals__["read_tile"] for one in result.launches]
    assert readers and all("prologue(" in reader.src for reader in readers)
    graph = fused_graph(lambda *args: quantize(flat(function(*args).to(BF16)), format), *shapes).graph
    assert steps is None or steps_of(graph) == steps
    if "norm" not in name and name != "gemma":
        assert not left(graph)


class AsInductorRounds(torch.fx.Interpreter):
    """Runs a graph before the pass: all in float32, and only the tensor that is quantised is rounded."""

    def placeholder(self, target, args, kwargs):
        return super().placeholder(target, args, kwargs).float()

    def call_function(self, target, args, kwargs):
        if target is CAST:
            return args[0]
        if target is QUANTIZE:
            args = (args[0].bfloat16(), *args[1:])
        return super().call_function(target, args, kwargs)


@pytest.mark.parametrize("name", FUSED)
def test_the_fused_graph_computes_what_inductor_would(name):
    """By the reference, to the last bit: of NaN, infinities and zeros as well."""
    function, shapes, format, _ = FUSED[name]

    def quantised(*args):
        return quantize(flat(function(*args).to(BF16)), format)

    values = [torch.randn(shape, dtype=BF16) * 3 for shape in shapes]
    values[0].view(-1)[:5] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0])
    fused = torch.fx.GraphModule({}, fused_graph(quantised, *shapes).graph)(*values)
    before = torch.fx.GraphModule({}, fused_graph(quantised, *shapes, fuse=False).graph)
    for one, other in zip(fused, AsInductorRounds(before).run(*values), strict=True):
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def kept(x):
    y = F.relu(x).square()
    return quantize(y, "nvfp4"), y


def twice(x):
    y = F.relu(x).square()
    return quantize(y, "nvfp4"), quantize(y, "nvfp4_te", -2)


def written_over(x):
    y = F.relu(x)
    x.add_(1.0)
    return quantize(y.square(), "nvfp4")


def long(x):
    for i in range(MOST_STEPS + 1):
        x = x * (1.0 + i)
    return quantize(x, ONE_LEVEL)


FLAT = (64, 128)
LEFT = {
    "nothing to fuse": (lambda x: quantize(flat(x), "nvfp4"), (SAME,)),
    "a cast": (lambda x: quantize(x.to(BF16), "nvfp4"), (FLAT,), (F32,)),
    "float32": (lambda x: quantize(x * 2.0, "nvfp4"), (FLAT,), (F32,)),
    "a wide operand": (lambda x, y: quantize((x * y).to(BF16), "nvfp4"), (FLAT, FLAT), (BF16, F32)),
    "used elsewhere": (kept, (FLAT,)),
    "quantised twice": (twice, (FLAT,)),
    "written over": (written_over, (FLAT,)),
    "too long": (long, (FLAT,)),
    "unknown operation": (lambda x: quantize(x.sin(), "nvfp4"), (FLAT,)),
    "unknown overload": (lambda x, y: quantize(torch.add(x, y, alpha=2.0), "nvfp4"), (FLAT, FLAT)),
    "operand computed for it": (lambda x, y: quantize(x * y.sin(), "nvfp4"), (FLAT, FLAT)),
    "dropout": (lambda x: quantize(F.dropout(x, 0.5) * 2.0, "nvfp4"), (FLAT,)),
    "other stride": (lambda x, y: quantize(x * y.t(), "nvfp4"), (FLAT, (128, 64))),
    "heads apart": (lambda x, row: quantize((x.view(64, 4, 32) * row).view(64, 128), "nvfp4"), (FLAT, (32,))),
    "broadcast up": (lambda x, y: quantize((x + y).view(-1, 128), "nvfp4"), (FLAT, (2, 64, 128))),
    "one for some rows": (lambda x, y: quantize(flat(x * y), "nvfp4"), (SAME, (2, 1, 1))),
    "scalar tensor": (lambda x, scale: quantize(x * scale, "nvfp4"), (FLAT, ())),
    "integers": (lambda x, y: quantize(x * y, "nvfp4"), (FLAT, FLAT), (BF16, torch.int32)),
    "too large a constant": (lambda x: quantize(x * 1e300, "nvfp4"), (FLAT,)),
    "rows of an average": (lambda x, y: quantize(x.mean(0) * y, "nvfp4"), ((2, 64, 128), (1, 1))),
    "square blocks": (lambda x: quantize(x * 2.0, "nvfp4_16x16"), (FLAT,)),
    "one dimension": (lambda x: quantize(x * 2.0, "nvfp4"), ((128,),)),
    "erf for columns": (lambda x: quantize_both(F.gelu(x), "mxfp8"), (FLAT,)),
    "three tensors for columns": (lambda x, y, z: quantize_both(x * y + z, "mxfp8"), (FLAT, FLAT, FLAT)),
    "a norm of a sum for itself": (lambda x, y, w: quantize(rms_norm(x + y, w), "mxfp8"), (FLAT, FLAT, ROW)),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_left_to_inductor(name):
    function, shapes, *dtypes = LEFT[name]
    dtypes = dtypes[0] if dtypes else ()
    before = fused_graph(function, *shapes, dtypes=dtypes, fuse=False).graph
    result = fused_graph(function, *shapes, dtypes=dtypes)
    assert result.fused == 0
    assert [node.target for node in result.graph.nodes] == [node.target for node in before.nodes]


@pytest.mark.parametrize("switch", ["emulate_precision_casts", "use_fast_math", "eager_numerics.division_rounding"])
def test_other_arithmetic_is_left_to_inductor(switch):
    with config.patch({switch: True}):
        assert fused_graph(lambda x: quantize(x * 2.0, "nvfp4"), FLAT).fused == 0


def test_operands_of_other_strides():
    """The kernels read other operands as if they lay like the first."""
    assert [fused_graph(lambda x, y: quantize(x * y, ONE_LEVEL), FLAT, FLAT, turned=t).fused for t in (0, 1)] == [1, 0]


def test_the_choice():
    """Two tensors that an amax reads as well, and erf: less than is saved on a B200, more on an H200."""
    for function, shapes in (
        (lambda x, y: quantize(F.silu(x) * y, "nvfp4"), (FLAT, FLAT)),
        (lambda x: quantize(F.gelu(x), ONE_LEVEL), (FLAT,)),
    ):
        assert [fused_graph(function, *shapes, sm=sm).fused for sm in (90, 100, 120)] == [1, 0, 0]
    for sm in (90, 100, 120):
        assert fused_graph(lambda x, w: quantize(rms_norm(x, w), "nvfp4"), FLAT, ROW, sm=sm).fused == 1


def test_not_on_the_cpu():
    """There the op is a call of the reference, and Inductor's kernels are C++."""
    assert fused_graph(lambda x: quantize(x * 2.0, "nvfp4"), FLAT, device="cpu").fused == 0


def test_residual_stream():
    """The sum is read by the quantiser where the next sum reads it; the values between have other users and stay."""

    def block(x, y, w):
        x = x + y
        data, *_ = quantize(rms_norm(x, w), "mxfp8")
        return x + data.to(BF16)

    result = fused_graph(block, FLAT, FLAT, ROW)
    assert result.fused == 1 and steps_of(result.graph) == ["mul aux0 col2", "mul row1 s0"]
    (node,) = result.graph.find_nodes(op="call_function", target=QUANTIZE_PROLOGUE)
    assert str(node.args[0][0].target) == "aten.add.Tensor"


def _gate_into(format):
    return lambda x, y: quantize(flat(F.silu(x) * y), format)


def test_symbolic_sizes():
    """Any number of rows, without a guard; the shape of the result is found in the graph where it is needed."""
    for shape in ((ANY, 128), (ANY, 64, 128)):
        for format in (ONE_LEVEL, "mxfp8"):
            result = fused_graph(_gate_into(format), shape, shape, lowered=True)
            assert result.fused == 1 and not result.mode.shape_env.guards
    norm = fused_graph(lambda x, w: quantize(rms_norm(x, w), "nvfp4_rowwise"), (ANY, 128), ROW, lowered=True)
    assert norm.fused == 1 and not norm.mode.shape_env.guards


def test_both_directions_and_the_others():
    """Merged pairs, columns alone, values for products that read them so; options stay as they were."""

    def pair(x, w, seed):
        y = rms_norm(x, w)
        return quantize(y, "nvfp4_te", seed=seed), quantize(y, "nvfp4_te", -2, seed=seed, hadamard=True)

    result = fused_graph(pair, FLAT, ROW, (), dtypes=(BF16, BF16, torch.int64), lowered=True)
    assert result.fused == 1
    assert [one.kernel.__name__ for one in result.launches] == ["columns_amax", "quantize_columns"]
    columns = fused_graph(lambda x: quantize(F.relu(x) * 2.0, "mxfp8", 0), FLAT, lowered=True)
    assert columns.fused == 1 and columns.launches[0].kernel.__name__ == "quantize_columns"
    fake = fused_graph(lambda x: torch.ops.fp4compile.fake_quantize(F.relu(x) * 2.0, "nvfp4"), FLAT, lowered=True)
    assert fake.fused == 1 and [one.kernel.__name__ for one in fake.launches] == ["tensor_amax", "quantize_rows"]


def quantisers(function, *shapes, **options):
    """The lines of the snapshot of a graph that quantise activations or gradients, after the passes before this one."""

    def fuse(graph):
        merge_quantize(graph)
        fuse_prologue(graph)

    lines = summary(epilogue_graph(function, *shapes, recipe="mxfp8", then=fuse, **options).graph).splitlines()
    found = [line.split(" = fp4compile.")[1] for line in lines if "fp4compile.quantize" in line]
    return [line for line in found if not line.startswith(("quantize(w", "quantize(v"))]


def llama_mlp(x, norm, w, v, w_down):
    y = rms_norm(x, norm)
    return x + F.linear(F.silu(F.linear(y, w)) * F.linear(y, v), w_down)


def test_snapshot_of_a_llama_mlp():
    """The norm goes into its quantiser; the gate into the product where that writes it, else into its quantiser."""
    norm = (
        "quantize_prologue([x_1, norm_1, rsqrt], ['mul aux0 col2', 'mul row1 s0'], torch.bfloat16, quantize, mxfp8, -1"
    )
    shapes = (512, 1024), (1024,), (2048, 1024), (2048, 1024), (1024, 2048)
    assert quantisers(llama_mlp, *shapes, sm=100) == [
        f"{norm}, layout=swizzled)", "quantize(scaled_mm_epilogue_default, mxfp8, -1, layout=swizzled)",
    ]  # fmt: skip
    assert quantisers(llama_mlp, *shapes, sm=90) == [
        f"{norm})",
        "quantize_prologue([scaled_mm_default, scaled_mm_default_1], ['neg aux0', 'exp s0', 'add s1 1.0', "
        "'div aux0 s2', 'mul s3 aux1'], torch.bfloat16, quantize, mxfp8, -1)",
    ]  # fmt: skip
