"""Which pointwise operations go into a quantiser's kernel, and what they compute there."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fp4compile.hardware import Target
from fp4compile.ops import nodes
from fp4compile.ops.nodes import CAST, quantise_of
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.passes import fuse_prologue
from fp4compile.passes.fuse_prologue import MOST_STEPS
from fp4compile.passes.lower import lower
from fp4compile.passes.merge_quantize import merge_quantize
from fp4compile.templates.launch import dry_run
from fp4compile.templates.quantize import prologue_cost
from fp4compile.templates.quantize.amax import PARTIAL_MAXIMA_ELEMENTS
from tests.helpers.absent_gpu import ANY, Result, symbolic
from tests.helpers.norms import rms_norm

BF16, F32 = torch.bfloat16, torch.float32
SAME, ROW = (2, 64, 128), (128,)
FLAT = (64, 128)
quantize = torch.ops.fp4compile.quantize


def quantize_both(x, format):
    return quantize(x, format, [-1, -2])


def fused_graph(function, *shapes, dtypes=(), lowered=False, fuse=True, device="cuda", sm=90, turned=False):
    """The graph of a function on fake CUDA tensors, decomposed as Inductor does it, after the pass."""
    dtypes = [*dtypes, *[BF16] * (len(shapes) - len(dtypes))]
    paper = dry_run(Target(sm)) if device == "cuda" else nullcontext([])
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, paper as launches:
        size = symbolic(mode.shape_env, 4)
        shapes = [[size if entry is ANY else entry for entry in shape] for shape in shapes]
        values = [torch.empty(shape, device=device, dtype=t) for shape, t in zip(shapes, dtypes, strict=True)]
        if turned:
            values[-1] = torch.empty_like(values[-1].t(), memory_format=torch.contiguous_format).t()
        with enable_python_dispatcher():
            graph = make_fx(function, decomposition_table=select_decomp_table())(*values).graph
        graph.eliminate_dead_code()
        merge_quantize(graph)
        fused = fuse_prologue.fuse_prologue(graph) if fuse else 0
        graph.lint()
        if lowered:
            lower(graph)
    return Result(graph, fused, launches, mode)


@pytest.fixture(autouse=True)
def on_any_gpu(monkeypatch):
    """What the model says, also of GPUs on which the pass does nothing yet."""
    monkeypatch.setattr(prologue_cost, "SINCE", dict.fromkeys(prologue_cost.SINCE, 0))


def test_on_hopper_rows_alone_are_fused(monkeypatch):
    """As it was timed there."""
    monkeypatch.undo()

    def along_rows(x, w):
        return quantize(rms_norm(x, w), "nvfp4")

    def in_both_directions(x, w):
        return quantize_both(F.silu(x), "mxfp8")

    found = {sm: [fused_graph(function, FLAT, ROW, sm=sm).fused for function in (along_rows, in_both_directions)]
             for sm in (89, 90, 100)}  # fmt: skip
    assert found == {89: [0, 0], 90: [1, 0], 100: [1, 1]}


def fused_quantiser(graph):
    """What the quantiser of a graph that has a prologue is asked for."""
    (found,) = (each for node in graph.find_nodes(op="call_function", target=QUANTIZE)
                if (each := quantise_of(node)).prologue)  # fmt: skip
    return found


def left(graph):
    """Operations that are Inductor's to compute."""
    return [str(node.target) for node in graph.nodes
            if node.op == "call_function" and torch.Tag.pointwise in getattr(node.target, "tags", ())]  # fmt: skip


def gemma_norm(x, w):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + w.float())).to(x.dtype)


def flat(value):
    return value.reshape(-1, value.shape[-1])


def gated(gate, up):
    return F.relu(gate) * up


def columns(x, *start_stop_step):
    return torch.ops.aten.slice.Tensor(x, -1, *start_stop_step)


SILU = ["neg aux0", "exp s0", "add s1 1.0", "div aux0 s2"]
RMS = ["square aux0", "mean s0", "add s1 1e-06", "rsqrt s2", "mul aux0 s3"]
ONE_LEVEL = "nvfp4_one_level"
# function of the value, shapes, format, steps (None: whatever they are)
FUSED = {
    "relu squared": (lambda x: F.relu(x).square(), (SAME,), "nvfp4", ["relu aux0", "square s0"]),
    "gate": (lambda x, y: F.silu(x) * y, (SAME, SAME), "mxfp8", [*SILU, "mul s3 aux1"]),
    "gelu": (F.gelu, (SAME,), ONE_LEVEL, None),
    "gelu by tanh": (lambda x: F.gelu(x, approximate="tanh"), (SAME,), ONE_LEVEL, None),
    "scaled": (lambda x: x * 0.5, (SAME,), "nvfp4_rowwise", ["mul aux0 0.5"]),
    "norm": (rms_norm, (SAME, ROW), "nvfp4", [*RMS, "mul row1 s4"]),
    "gemma": (gemma_norm, (SAME, ROW), "mxfp8", [*RMS, "add row1 1.0", "mul s4 s5"]),
    "norm of a sum": (lambda x, y, w: rms_norm(x + y, w), (SAME, SAME, ROW), "nvfp4_rowwise", None),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (128,), w, b), (SAME, ROW, ROW), "nvfp4",
                   ["mean aux0", "sub aux0 s0", "variance aux0 s0", "add s2 1e-05", "rsqrt s3", "mul s1 s4",
                    "mul s5 row1", "add s6 row2"]),
    "softmax": (lambda x: torch.softmax(x, -1), (SAME,), "mxfp8",
                ["amax aux0", "sub aux0 s0", "exp s1", "sum s2", "div s2 s3"]),
    "of another shape": (lambda x, y: flat(x.float() * 3) - flat(y).view(-1, 128), (SAME, SAME), ONE_LEVEL,
                         ["mul aux0 3.0", "sub s0 aux1"]),
    "residual": (lambda x, y: x + y, (SAME, SAME), "float8_rowwise", ["add aux0 aux1"]),
    "gate and up of one tensor": (lambda x: gated(*x.chunk(2, -1)), (SAME,), "mxfp8", ["relu aux0", "mul s0 aux1"]),
    "of other widths": (lambda x, y: gated(x.split([40, 16, 72], -1)[1], y), (SAME, (2, 64, 16)), "mxfp8", None),
    "slices of slices": (lambda x: gated(columns(columns(x, 16, 48), -16), columns(x, None, 16)), (SAME,), ONE_LEVEL,
                         ["relu aux0", "mul s0 aux1"]),
    "a norm of a slice": (lambda x, w: rms_norm(columns(x, 0, 96), w), (SAME, (96,)), "nvfp4_rowwise", None),
}  # fmt: skip


@pytest.mark.parametrize("name", FUSED)
def test_fused(name):
    """Nothing is left to Inductor; the kernels can be launched, and read by the prologue."""
    function, shapes, format, steps = FUSED[name]
    result = fused_graph(lambda *args: quantize(flat(function(*args).to(BF16)), format), *shapes, lowered=True)
    assert result.fused == 1
    assert result.launches and all(one.constants["PROLOGUE"] for one in result.launches)
    graph = fused_graph(lambda *args: quantize(flat(function(*args).to(BF16)), format), *shapes).graph
    assert steps is None or fused_quantiser(graph).prologue == tuple(steps)
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


def squared(x):
    return F.relu(x).square()


def kept(x):
    y = squared(x)
    return *quantize(y, ONE_LEVEL), y


def kept_by_another_shape(x, y):
    z = (x.float() + y).to(BF16)
    return *quantize(flat(z), "nvfp4"), z


def twice(x):
    y = squared(x)
    return *quantize(y, ONE_LEVEL), *quantize(y, "mxfp8", -2)


def read_before(x, w):
    y = squared(x)
    product = y @ w
    return *quantize(y, ONE_LEVEL), product + y


def kept_between(x, y):
    stream = x + y
    return *quantize(F.relu(stream).square(), ONE_LEVEL), stream


def read_for_the_scale(x, y):
    """The sum of squares is of the stream, and the quantiser needs it."""
    stream = (x + y).float()
    y = stream * torch.rsqrt(stream.square().sum(-1, keepdim=True) + 1)
    return *quantize(y.to(BF16), ONE_LEVEL), stream.to(BF16)


# function, shapes, what is stored, and operations that are left to Inductor
STORED = {
    "kept": (kept, (FLAT,), "s1 bfloat16", []),
    "by another shape": (kept_by_another_shape, (SAME, SAME), "s0 bfloat16", []),
    "twice": (twice, (FLAT,), "s1 bfloat16", []),
    "read before": (read_before, (FLAT, (128, 128)), "s1 bfloat16", ["aten.add.Tensor"]),
    "between": (kept_between, (FLAT, FLAT), "s0 bfloat16", []),
    "for the scale": (read_for_the_scale, (FLAT, FLAT), "s0 bfloat16",
                      [f"aten.{name}" for name in ("add.Tensor", "pow.Tensor_Scalar", "add.Tensor", "rsqrt.default")]),
}  # fmt: skip


@pytest.mark.parametrize("name", STORED)
def test_what_others_need_is_stored(name, monkeypatch):
    """By the quantiser's kernel, which rounds it; only what leads to the quantiser itself computes it again."""
    function, shapes, stored, others = STORED[name]
    if name == "for the scale":  # Inductor's reduction makes it, for nothing
        monkeypatch.setattr(fuse_prologue, "gain", lambda spec, *_: 1 + len(spec.prologue.stored))
    result = fused_graph(function, *shapes)
    assert result.fused == 1 and fused_quantiser(result.graph).stored == (stored,)
    assert [each for each in left(result.graph) if "convert" not in each] == others
    values = [torch.randint(-3, 4, shape).to(BF16) for shape in shapes]  # so that no order of sums matters
    for one, other in zip(torch.fx.GraphModule({}, result.graph)(*values), function(*values), strict=True):
        assert one.shape == other.shape
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    launches = fused_graph(function, *shapes, lowered=True).launches
    assert sum(launch.args.get("stored_1_ptr") is not None for launch in launches) == 1


def test_what_is_read_before_an_operand_is_there_is_not_stored(monkeypatch):
    """The product reads the sum, and comes before the other product, which the quantiser reads: Inductor writes it."""

    def function(x, y, w):
        stream = x + y
        product = stream @ w
        return *quantize(F.relu(stream) * (y @ w), ONE_LEVEL), product

    monkeypatch.setattr(fuse_prologue, "gain", lambda spec, *_: 1 + len(spec.prologue.stored))
    result = fused_graph(function, (128, 128), (128, 128), (128, 128))
    assert result.fused == 1 and fused_quantiser(result.graph).stored == ()
    assert left(result.graph) == ["aten.add.Tensor"]


def written_over(x):
    y = F.relu(x)
    x.add_(1.0)
    return quantize(y.square(), "nvfp4")


def long(x):
    for i in range(MOST_STEPS + 1):
        x = x * (1.0 + i)
    return quantize(x, ONE_LEVEL)


LEFT = {
    "nothing to fuse": (lambda x: quantize(flat(x), "nvfp4"), (SAME,)),
    "a cast": (lambda x: quantize(x.to(BF16), "nvfp4"), (FLAT,), (F32,)),
    "columns alone": (lambda x: quantize(x * 2.0, "mxfp8", -2), (FLAT,)),
    "float32 in both directions": (lambda x: quantize_both(x * 2.0, "mxfp8"), (FLAT,), (F32,)),
    "both directions of two levels": (lambda x: quantize_both(x * 2.0, "nvfp4"), (FLAT,)),
    "both directions of scaled rows": (lambda x: quantize_both(x * 2.0, "float8_rowwise"), (FLAT,)),
    "transformed": (lambda x: quantize(x * 2.0, ONE_LEVEL, [-1, -2], hadamard=True), (FLAT,)),
    "seeded": (lambda x, seed: quantize(x * 2.0, "mxfp4", [-1, -2], seed=seed), (FLAT, ()), (BF16, torch.int64)),
    "another narrow operand": (lambda x: quantize((x * 2.0).to(torch.float16), "mxfp8"), (FLAT,)),
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
    "every other column": (lambda x: quantize(gated(columns(x, 0, 128, 2), columns(x, 1, 128, 2)), "nvfp4"), (FLAT,)),
    "slices of what is computed": (lambda x: quantize(gated(*(x * 2.0).chunk(2, -1)), ONE_LEVEL), (FLAT,)),
    "slices of other rows": (lambda x: quantize(gated(*x.view(32, 256).chunk(2, -1)), ONE_LEVEL), (FLAT,)),
    "slices of heads": (lambda x: quantize(flat(gated(*x.chunk(2, 1))), "nvfp4"), (SAME,)),
    "slices of any width": (lambda x: quantize(gated(*x.chunk(2, -1)), "nvfp4"), ((64, ANY),)),
    "a norm of a slice and of another": (lambda x: quantize(rms_norm(*x.chunk(2, -1)), "mxfp8"), (FLAT,)),
    "one dimension": (lambda x: quantize(x * 2.0, "nvfp4"), ((128,),)),
    "erf for columns": (lambda x: quantize_both(F.gelu(x), "mxfp8"), (FLAT,)),
    "three tensors for columns, and kept":
        (lambda x, y, z: (quantize_both(v := x * y + z, "mxfp8"), v), (FLAT, FLAT, FLAT)),
    "a norm of a sum, for columns": (lambda x, y, w: quantize_both(rms_norm(x + y, w), "mxfp8"), (FLAT, FLAT, ROW)),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_left_to_inductor(name):
    function, shapes, *dtypes = LEFT[name]
    dtypes = dtypes[0] if dtypes else ()
    before = fused_graph(function, *shapes, dtypes=dtypes, fuse=False).graph
    result = fused_graph(function, *shapes, dtypes=dtypes)
    assert result.fused == 0
    assert [node.target for node in result.graph.nodes] == [node.target for node in before.nodes]


def test_float32_streams():
    """As autocast has them. Where Inductor's reduction reads the stream anyway, its bf16 norm is the less to read."""

    def block(x, y, w):
        stream = x + y
        norm = stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + 1e-6) * w
        return quantize(norm.to(BF16), "mxfp8"), stream

    assert fused_graph(block, FLAT, FLAT, ROW, dtypes=(F32, BF16, F32)).fused == 0
    for dtypes in ((BF16, F32), (F32, BF16), (F32, F32)):
        product = fused_graph(lambda x, y: quantize((x * y).to(BF16), ONE_LEVEL), FLAT, FLAT, dtypes=dtypes)
        first = fused_quantiser(product.graph).x.name
        assert product.fused == 1 and first == ("y_1" if dtypes == (F32, BF16) else "x_1")
    kept = fused_graph(lambda x: (quantize((y := F.relu(x)).to(BF16), "mxfp8"), y), FLAT, dtypes=(F32,), lowered=True)
    assert kept.fused == 1 and kept.launches[0].args["stored_1_ptr"].dtype == F32


@pytest.mark.parametrize("switch", ["emulate_precision_casts", "use_fast_math", "eager_numerics.division_rounding"])
def test_other_arithmetic_is_left_to_inductor(switch):
    with config.patch({switch: True}):
        assert fused_graph(lambda x: quantize(x * 2.0, "nvfp4"), FLAT).fused == 0


def test_operands_of_other_strides():
    """The kernels read other operands as if they lay like the first."""
    assert [fused_graph(lambda x, y: quantize(x * y, ONE_LEVEL), FLAT, FLAT, turned=t).fused for t in (0, 1)] == [1, 0]
    halves = [fused_graph(lambda x: quantize(gated(*x.chunk(2, -1)), ONE_LEVEL), FLAT, turned=t) for t in (0, 1)]
    assert [result.fused for result in halves] == [1, 0]

    def with_a_slice(x, y):
        return quantize(x * columns(y, 0, 64), ONE_LEVEL)

    assert [fused_graph(with_a_slice, (64, 64), FLAT, turned=t).fused for t in (0, 1)] == [1, 0]


def test_the_choice():
    """erf takes longer on a B200 than what it saves, and less on an H200. A gate's two tensors, read twice, do not. In
    both directions a B200 is short of instructions by tanh or after a layer norm, too."""
    gelu = [fused_graph(lambda x: quantize(F.gelu(x), ONE_LEVEL), FLAT, sm=sm).fused for sm in (90, 100, 120)]
    assert gelu == [1, 0, 0]
    for function, *shapes in ((lambda x: quantize_both(F.gelu(x, approximate="tanh"), "mxfp8"), FLAT),
                              (lambda x, w, b: quantize_both(F.layer_norm(x, (128,), w, b), "mxfp8"), FLAT, ROW, ROW)
                              ):  # fmt: skip
        assert fused_graph(function, *shapes, sm=100).fused == 0
    for sm in (90, 100, 120):
        assert fused_graph(lambda x, w: quantize(rms_norm(x, w), "nvfp4"), FLAT, ROW, sm=sm).fused == 1
        assert fused_graph(lambda x, y: quantize(F.silu(x) * y, "nvfp4"), FLAT, FLAT, sm=sm).fused == 1


def test_a_result_that_is_kept_for_the_second_kernel():
    """The amax kernel of a large tensor stores what it computes of two, and the other kernel reads that alone."""
    large = (4096, 1024)
    result = fused_graph(lambda x, y: quantize(F.silu(x) * y, "nvfp4"), large, large, sm=100, lowered=True)
    amax, quantiser = result.launches
    assert result.fused == 1 and quantiser.args["x_ptr"] is amax.args["stored_1_ptr"]
    small = 2048, 1024  # whose kernels overlap
    assert PARTIAL_MAXIMA_ELEMENTS == 2048 * 1024
    for format, shape in ((ONE_LEVEL, large), ("nvfp4", small)):
        graph = fused_graph(_gate_into(format), shape, shape, sm=100).graph
        assert fused_quantiser(graph).stored == ()


def test_not_on_the_cpu():
    """There the op is a call of the reference, and Inductor's kernels are C++."""
    assert fused_graph(lambda x: quantize(x * 2.0, "nvfp4"), FLAT, device="cpu").fused == 0


def test_residual_stream():
    """The kernel of the norm writes the sum, which the next sum reads."""

    def block(x, y, w):
        x = x + y
        data, *_ = quantize(rms_norm(x, w), "mxfp8")
        return x + data.to(BF16)

    result = fused_graph(block, FLAT, FLAT, ROW)
    assert result.fused == 1 and fused_quantiser(result.graph).prologue[0] == "add aux0 aux2"
    assert fused_quantiser(result.graph).stored == ("s0 bfloat16",)
    assert left(result.graph) == ["prims.convert_element_type.default", "aten.add.Tensor"]


def test_a_residual_stream_is_read_in_linear_time(monkeypatch):
    """All later layers depend on each quantiser. Of these, the pass reads no more than the next ones."""
    read = []

    def reached(*arguments):
        for node in nodes.reached(*arguments):
            read.append(node)
            yield node

    def layers(count):
        def run(x, w):
            for _ in range(count):
                data, *_ = quantize(rms_norm(x, w), "nvfp4")
                x = x + torch.ops.aten.mm(data.float(), data.float().t()).to(BF16)
            return x

        return run

    monkeypatch.setattr(fuse_prologue, "reached", reached)
    counted = []
    for count in (8, 12, 16):
        read.clear()
        assert fused_graph(layers(count), (128, 128), ROW).fused == count
        counted.append(len(read))
    assert counted[2] - counted[1] == counted[1] - counted[0] > 0


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


def test_both_directions_and_values():
    """Merged pairs, and values for products that read them so; options stay as they were."""

    def pair(x, y):
        z = gated(x, y)
        return *quantize(z, "mxfp8", layout="swizzled"), *quantize(z, "mxfp8", -2, layout="swizzled")

    result = fused_graph(pair, FLAT, FLAT, lowered=True)
    assert result.fused == 1 and [one.kernel.__name__ for one in result.launches] == ["quantize_both"]
    found = fused_quantiser(fused_graph(pair, FLAT, FLAT).graph)
    assert (found.dims, found.layout) == ((-1, -2), "swizzled")
    values = fused_graph(lambda x: quantize(F.relu(x) * 2.0, "nvfp4", values=[-1])[::2], FLAT, lowered=True)
    assert values.fused == 1 and [one.kernel.__name__ for one in values.launches] == ["tensor_amax", "quantize_rows"]


def gradients(d, gate, up):
    """Of silu(gate) * up, in both directions, as the backward of a gated MLP quantises them."""
    wide = gate.float()
    sigmoid = torch.sigmoid(wide)
    of_gate = (d * up * sigmoid * (1 + wide * (1 - sigmoid))).to(BF16)
    return quantize_both(of_gate, "mxfp8"), quantize_both(d * F.silu(gate), "mxfp8")


def test_both_gradients_of_a_gate():
    """Each quantiser computes its own."""
    result = fused_graph(gradients, FLAT, FLAT, FLAT, sm=100, lowered=True)
    assert result.fused == 2 and not left(result.graph)
    assert [launch.kernel.__name__ for launch in result.launches] == ["quantize_both"] * 2
