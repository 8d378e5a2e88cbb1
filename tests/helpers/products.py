"""Graphs of products of packed weights, on fake CUDA tensors, and the passes that rewrite them."""

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fp4compile.formats import formats, reference
from fp4compile.hardware import Target
from fp4compile.ops.matmul import SCALED_MM_RESULTS
from fp4compile.ops.nodes import products_of, quantise_of
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.passes.fake_quantize import fake_quantize
from fp4compile.passes.fuse_horizontal import fuse_horizontal
from fp4compile.passes.merge_quantize import merge_quantize
from fp4compile.templates.launch import dry_run
from tests.helpers.arguments import times

BF16, F32 = torch.bfloat16, torch.float32
K = 128


def packed(n, fmt="nvfp4", layout="linear", k=K):
    """(data, scales, outer, format) of random weights."""
    fmt = formats.get(fmt)
    return *reference.quantize(torch.randn(n, k), fmt, None, layout), fmt.name


def product(x, w, bias=None, out_dtype=BF16, a=(None, None, None)):
    return times((x, *a), w, bias=bias, out_dtype=out_dtype)


def users_between(x, q, k, v):
    return product(x, q).exp() * product(x, k).sum() + product(x, v).amax()


def quantised(x, *weights):
    data, scales, outer = torch.ops.fp4compile.quantize(x, "nvfp4")
    return [product(data, w, a=(scales, outer, "nvfp4")) for w in weights]


def quantised_each(x, q, k, v):
    """As packed layers have it."""
    return [quantised(x.view(1, 1, K).view(-1, K), w)[0] for w in (q, k, v)]


def made_late(x, q, k, v):
    """What the others need is computed after the first product, partly from things that are there before."""
    first = product(x, q)
    scale = k[2].exp()
    return first, product(x, (*k[:2], scale * 2, k[3])), product(x, (*v[:2], scale, v[3]))


def traced(function, weights, rows=1):
    """The graph of a function of activations and weights, on fake CUDA tensors. rows: None for any number."""
    names = [fmt for *_, fmt in weights]

    def of_tensors(x, *flat):
        return function(x, *((*flat[3 * i : 3 * i + 3], fmt) for i, fmt in enumerate(names)))

    with FakeTensorMode(shape_env=ShapeEnv()) as mode, dry_run(Target(90)):
        if rows is None:
            symbol = mode.shape_env.create_symbol(4, ConstantSource("s"), DimDynamic.DYNAMIC)
            rows = mode.shape_env.create_symintnode(symbol, hint=4)
        x = torch.empty(rows, K, dtype=BF16, device="cuda")
        flat = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for *tensors, _ in weights for t in tensors]
        return make_fx(of_tensors)(x, *flat)


def merged(graph_module, sm=90):
    """How many products each launch has, after the pass."""
    with dry_run(Target(sm)):
        merge_quantize(graph_module.graph)
        count = fuse_horizontal(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    found = graph_module.graph.find_nodes(op="call_function", target=SCALED_MM_RESULTS)
    assert len(found) == count
    return [len(products_of(node)) for node in found]


def on_the_cpu(graph_module, x, weights):
    """What a graph of CUDA tensors computes from CPU tensors."""
    for node in graph_module.graph.nodes:
        if "device" in node.kwargs:
            node.update_kwarg("device", torch.device("cpu"))
    graph_module.recompile()
    torch.manual_seed(0)
    return torch.utils._pytree.tree_leaves(graph_module(x, *(t for *tensors, _ in weights for t in tensors)))


def operand(x, name="nvfp4", dim=-1, given=False, **options):
    """(data, (scales, outer, format)), as `product` takes them."""
    outer = x.new_full((), 0.01, dtype=torch.float32) if given else None
    data, scales, computed = torch.ops.fp4compile.quantize(x, name, dim, outer=outer, **options)
    return data, (scales, computed if outer is None else outer, name)


def multiplied(*args, **options):
    """A function of activations and a weight: the product of the activations, quantised so."""

    def function(x, w):
        data, a = operand(x, *args, **options)
        return product(data, w, a=a)

    return function


def outer_kept(x, w):
    """The global scale is there as before, for whoever wants it."""
    data, a = operand(x)
    return product(data, w, a=a), a[1] * 2


def replaced(graph_module, sm=90):
    """How many quantises the pass replaces."""
    with dry_run(Target(sm)):
        merge_quantize(graph_module.graph)
        count = fake_quantize(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    quantisers = map(quantise_of, graph_module.graph.find_nodes(op="call_function", target=QUANTIZE))
    assert count == sum(bool(each.values) for each in quantisers)
    return count
