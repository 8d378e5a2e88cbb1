"""Which pointwise operations go into the kernels that quantise the rows of experts."""

import pytest
import torch
import torch.nn.functional as F

from fp4compile.ops.nodes import quantise_of
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.passes import fuse_prologue
from fp4compile.passes.lower import lower
from fp4compile.passes.merge_quantize import merge_quantize
from fp4compile.templates.quantize import prologue_cost
from tests.helpers.absent_gpu import ANY, fused_graph
from tests.helpers.graphs import summary

BF16, F32 = torch.bfloat16, torch.float32
ops = torch.ops.fp4compile


@pytest.fixture(autouse=True)
def on_any_gpu(monkeypatch):
    """What the model says, also of GPUs on which the pass does nothing yet."""
    monkeypatch.setattr(prologue_cost, "SINCE", dict.fromkeys(prologue_cost.SINCE, 0))


class Fused:
    """A function's graph after the pass: its quantisers with a prologue, the snapshot's lines, launches."""

    def __init__(self, function, *shapes, fuse=True, **options):
        self.result = fused_graph(function, *shapes, then=lambda found: self.read(found, fuse), **options)
        self.launches = [launch.kernel.__name__ for launch in self.result.launches]

    def read(self, found, fuse):
        merge_quantize(found)
        self.fused = fuse_prologue.fuse_prologue(found) if fuse else 0
        found.lint()
        quantisers = map(quantise_of, found.find_nodes(op="call_function", target=QUANTIZE))
        self.quantisers = [each for each in quantisers if each.prologue]
        self.lines = [line.split(" = fp4compile.")[1] for line in summary(found).splitlines() if "prologue=" in line]
        self.module = torch.fx.GraphModule({}, torch.fx.Graph())
        self.module.graph.output(self.module.graph.graph_copy(found, {}))
        self.module.recompile()
        lower(found)


def mixtral(x, w, v, offs):
    """Experts as transformers computes them: gate and up are one product."""
    gate, up = F.grouped_mm(x, w.transpose(1, 2), offs=offs).chunk(2, -1)
    return F.grouped_mm(F.silu(gate) * up, v.transpose(1, 2), offs=offs)


SILU = "prologue=['neg aux0', 'exp s0', 'add s1 1.0', 'div aux0 s2', 'mul s3 aux1'], dtype=torch.bfloat16"


@pytest.mark.parametrize(("recipe", "rows"), [("mxfp8", ANY), ("nvfp4_one_level", 2048)])
def test_snapshot_of_experts(recipe, rows):
    """On SM100 the gate goes into the quantiser of the rows, which reads both halves of the product where they lie."""
    shapes, dtypes = ((rows, 512), (8, 2048, 512), (8, 512, 1024), (8,)), (BF16, BF16, BF16, torch.int32)
    found = Fused(mixtral, *shapes, recipe=recipe, dtypes=dtypes)
    assert found.fused == 1 and not found.result.mode.shape_env.guards
    options = f"offs=offs_1, layout=swizzled, operands=[getitem_1], {SILU}"
    assert found.lines == [f"quantize(getitem, {recipe}, [-1], {options})"]
    grouped = [one.kernel.__name__ for one in found.result.launches if one.constants.get("GROUPS")]
    assert [name for name in grouped if "gemm" not in name] == ["quantize_rows"] * 2


def gated(x, y):
    return F.relu(x) * y


def rows(x, y, offs):
    return ops.quantize(gated(x, y), "mxfp8", offs=offs, layout="swizzled")


def given(x, y, offs):
    return ops.quantize(gated(x, y), "nvfp4", offs=offs, outer=y.float().amax(), layout="swizzled")


def routed(x, y, offs):
    return ops.quantize((x * y).to(BF16), "nvfp4_one_level", offs=offs)


def own(x, y, offs):
    return ops.quantize(gated(x, y), "float8_rowwise", offs=offs)


# function, shape of y, (kernel, groups that it reads), format
EACH = {
    "rows": (rows, (96, 64), ("quantize_rows", 3), "mxfp8"),
    "rows as they are": (routed, (96, 1), ("quantize_rows", 0), "nvfp4_one_level"),
    "a global scale that is given": (given, (96, 64), ("quantize_rows", 3), "nvfp4"),
    "row scales": (own, (96, 64), ("quantize_whole_rows", 0), "float8_rowwise"),
}


@pytest.mark.parametrize("name", EACH)
def test_each_quantiser(name, monkeypatch):
    """Its arguments stay; the graph computes what it did, by the reference, and the kernels read by the prologue."""
    monkeypatch.setattr(fuse_prologue, "gain", lambda spec, *_: 1 - len(spec.prologue.stored))
    function, other, kernel, format = EACH[name]
    dtypes = BF16, F32 if other[1] == 1 else BF16, torch.int32
    found, before = (Fused(function, (96, 64), other, (3,), dtypes=dtypes, sm=90, fuse=fuse) for fuse in (True, False))
    (quantise,) = found.quantisers
    (launch,) = found.result.launches
    assert found.fused == 1 and (launch.kernel.__name__, launch.constants.get("GROUPS", 0)) == kernel
    assert (quantise.format, quantise.dims, quantise.offs.name) == (format, (-1,), "offs_1")
    assert launch.constants["PROLOGUE"]
    x, y = torch.randn(96, 64).bfloat16(), torch.randn(other).to(dtypes[1])
    x[3, :2] = torch.tensor([torch.nan, torch.inf])
    offs = torch.tensor([7, 7, 90], dtype=torch.int32)
    for one, two in zip(found.module(x, y, offs), before.module(x, y, offs), strict=True):
        assert one.shape == two.shape and torch.equal(
            one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8)
        )


def matrices(x, y, offs):
    return ops.quantize(gated(x, y).view(3, 32, 64), "mxfp8", each_matrix=True)


def columns(x, y, offs):
    return ops.quantize(gated(x, y), "mxfp8", -2, offs=offs)


def pair(x, y, offs):
    value = gated(x, y)
    return *ops.quantize(value, "mxfp8", offs=offs), *ops.quantize(value, "mxfp8", -2, offs=offs)


def two_levels(x, y, offs):
    return ops.quantize(gated(x, y), "nvfp4", offs=offs)


def values(x, y, offs):
    return ops.quantize(gated(x, y), "nvfp4", offs=offs, values=[-1])[::2]


def kept(x, y, offs):
    value = gated(x, y)
    return *ops.quantize(value, "mxfp8", offs=offs), value


def swept(x, y, offs):
    return ops.quantize(gated(x, y).view(3, 32, 64), "nvfp4_one_level", each_matrix=True, scale_rule="mse")


def norm(x, y, offs):
    wide = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1)).to(BF16)
    return ops.quantize(wide, "mxfp8", offs=offs)


@pytest.mark.parametrize("function", [matrices, columns, pair, two_levels, values, kept, swept, norm],
                         ids=lambda function: function.__name__)  # fmt: skip
def test_left_to_inductor(function, monkeypatch):
    """Weights; columns; computed global scales; statistics; what others read: rows of no group are not written."""
    monkeypatch.setattr(fuse_prologue, "gain", lambda *_: 1)
    found = Fused(function, (96, 64), (96, 64), (3,), dtypes=(BF16, BF16, torch.int32))
    assert [each.prologue for each in found.quantisers] == ([("mul aux0 col1",)] if function is norm else [])
