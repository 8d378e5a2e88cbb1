"""Experts on SM100 under `max-autotune`: the kernel is timed in its configurations, and the fastest is launched."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._inductor import config
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fp4compile.formats import formats
from fp4compile.formats.grouping import padded_rows
from fp4compile.formats.layouts import ceil_div, swizzled_numel
from fp4compile.formats.operand import Operand
from fp4compile.hardware import Target
from fp4compile.ops.matmul import SCALED_MM
from fp4compile.ops.nodes import scaled_mm_of
from fp4compile.passes.lib import autotune
from fp4compile.passes.lower import lower
from fp4compile.templates import choose as registry
from fp4compile.templates.choose import named
from fp4compile.templates.gemm.block_scaled_sm100 import sm100_configs
from fp4compile.templates.launch import dry_run
from tests.helpers.arguments import of_groups, times
from tests.helpers.clock import Clock

BF16 = torch.bfloat16
KERNEL = "grouped_block_scaled_sm100"


def empty_operand(name, rows, k, scale_rows, batch=(), outer=None):
    """An operand as SM100 quantises it, without values. outer: of which shape its global scale is; None: a group's."""
    fmt = formats.get(name)
    blocks = ceil_div(k, fmt.block_cols)
    width = blocks * fmt.block_cols // (2 if fmt.packed else 1)
    data = torch.empty(*batch, rows, width, dtype=fmt.data_dtype)
    scales = torch.empty(*batch, swizzled_numel(scale_rows, blocks), dtype=fmt.scale_dtype)
    return Operand(data, scales, torch.empty(outer) if outer is not None else None, fmt)


def operands(rows, groups, n, k, a="nvfp4", b=None, outers=(None, None)):
    """(A, B, offsets). outers: shapes of the global scales; None stands for one a group, where the format has one."""
    names = a, b or a
    shapes = ((groups,) if outer is None and formats.get(name).outer else outer
              for name, outer in zip(names, outers, strict=True))  # fmt: skip
    a_outer, b_outer = shapes
    left = empty_operand(names[0], rows, k, padded_rows(rows, groups), (), a_outer)
    return left, empty_operand(names[1], n, k, n, (groups,), b_outer), torch.empty(groups, dtype=torch.int32)


def experts(name, along_k=False):
    """A product of quantised tokens and weights, or of two quantised tensors of tokens."""

    def function(x, w, offs):
        found = []
        for each, dim, groups in ((x, -2 if along_k else -1, offs), (w, -2 if along_k else -1, offs)):
            groups = None if each.dim() == 3 else groups
            data, scales, outer = torch.ops.fp4compile.quantize(each, name, dim, offs=groups, layout="swizzled")
            found.append((data, scales, outer if outer.numel() else None, name))
        return times(*found, offs=offs, rows=x.shape[0])

    return function


def lowered(function, shapes, groups=4, sm=100, dynamic=False, then=lower):
    """(the last two launches, fp4compile's ops that are left) of a function lowered for a GPU that is not there."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, enable_python_dispatcher(), dry_run(Target(sm)) as launches:
        shapes = [list(shape) for shape in shapes]
        if dynamic:
            symbol = mode.shape_env.create_symbol(shapes[0][0], ConstantSource("s"), DimDynamic.DYNAMIC)
            shapes[0][0] = mode.shape_env.create_symintnode(symbol, hint=shapes[0][0])
        tensors = [torch.empty(shape, device="cuda", dtype=BF16) for shape in shapes]
        graph = make_fx(function)(*tensors, torch.empty(groups, device="cuda", dtype=torch.int32)).graph
        then(graph)
    left = [str(node.target) for node in graph.nodes if "fp4compile" in str(node.target)]
    return [one.kernel.__name__ for one in launches][-2:], left


FORWARD = (256, 512), (4, 1024, 512)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("along_k", [False, True], ids=["rows", "along K"])
def test_the_fastest_configuration_is_launched(along_k, index, monkeypatch):
    """Of groups along the contraction, too, which are the kernel's alone."""
    function, shapes = experts("nvfp4", along_k), ((256, 512), (256, 384)) if along_k else FORWARD
    configs, ran, original = [], [], named(KERNEL).run

    def keep(graph):
        (node,) = graph.find_nodes(op="call_function", target=SCALED_MM)
        configs.extend(sm100_configs(scaled_mm_of(node).problem))

    def run(call, config):
        ran.append(config)
        return original(call, config)

    lowered(function, shapes, then=keep)
    clock = Clock(monkeypatch, {configs[index]: 1.0})
    kernels = tuple(replace(one, run=run) if one.name == KERNEL else one for one in registry.REGISTRY)
    monkeypatch.setattr(registry, "REGISTRY", kernels)
    with config.patch(max_autotune=True):
        lowered(function, shapes)
    assert clock.kernels == [[KERNEL, KERNEL]] and ran == [configs[index]]


@pytest.mark.parametrize("options", [{"dynamic": True}, {"shapes": ((0, 512), (4, 1024, 512))}],
                         ids=["a symbolic number of tokens", "no tokens"])  # fmt: skip
def test_what_is_not_timed(options, monkeypatch):
    clock = Clock(monkeypatch, {KERNEL: 1.0})
    with config.patch(max_autotune=True):
        _, left = lowered(experts("nvfp4"), **{"shapes": FORWARD, **options})
    assert not clock.kernels and not left


def test_what_is_timed_is_the_product(monkeypatch):
    """On real tensors like the product's own, without NaN; of groups that are as large as each other."""
    with torch.device("meta"):
        a, b, offs = operands(10, 4, 32, 64)
    empty_strided = torch.empty_strided
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=0))
    monkeypatch.setattr(torch, "empty_strided", lambda *args, device, **more: empty_strided(*args, **more))
    with unset_fake_temporarily():
        copies = autotune._copies(of_groups(a, b, torch.empty_like(offs, device="cpu"), 10, BF16))
    assert len(copies) == autotune.FEWEST_CALLS and len({one.a.data.data_ptr() for one in copies}) == len(copies)
    for made in copies:
        assert (made.offs.tolist(), made.offs.dtype) == ([2, 5, 7, 10], torch.int32)
        assert (made.rows, made.spec.out_dtype) == (10, BF16)
        for like, x in ((a, made.a), (b, made.b)):
            assert not isinstance(x.data, FakeTensor) and x.outer.isfinite().all() and x.outer.shape == (4,)
            assert (x.data.shape, x.data.dtype, x.scales.shape) == (like.data.shape, like.data.dtype, like.scales.shape)
            assert x.scales.view(torch.uint8).unique().tolist() == [0x38]
