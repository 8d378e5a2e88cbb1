"""Products of one A share the copy of it that their kernel reads, for a GPU that need not be there and on one."""

import pytest
import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.runtime import driver

import fp4compile
from fp4compile.hardware import Target
from fp4compile.passes.lower import lower
from fp4compile.templates import launch
from tests.helpers.absent_gpu import NoGpu

K = 512


@pytest.fixture
def h100(monkeypatch):
    """Kernels are analysed, and chosen, as for an H100."""
    monkeypatch.setattr(driver, "_active", NoGpu(90))
    monkeypatch.setattr(launch, "cuda_target", lambda index: Target(90))


def multiply(x, weight):
    return torch.ops.fp4compile.scaled_mm(x, None, None, None, *weight, "nvfp4", None, x.dtype)


def copies_and_products(function, rows, sizes=(1024, 256, 256)):
    """The copies of A, and of each product the copy that it reads, as numbers of launches in the lowered graph.

    function: of bf16 x [rows, K], and of the packed weights [size, K] of each size.
    """
    with FakeTensorMode(), enable_python_dispatcher():
        x = torch.empty(rows, K, device="cuda:0", dtype=torch.bfloat16)
        packed = [torch.ops.fp4compile.quantize(x.new_empty(size, K), "nvfp4") for size in sizes]
        graph = make_fx(function)(x, *packed).graph
        lower(graph)
    launches = graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional)
    copies, products = [], []
    for node in launches:
        kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
        name = getattr(kernel, "fn", kernel).__name__
        if name == "swizzle_a_sm90":
            copies.append(node)
        elif name == "gemm_wgmma_sm90":
            products.append(node.kwargs["kwargs"]["swizzled_a_ptr"].args[0])  # a result of the launch
    return len(copies), [copies.index(node) for node in products]


# Among them: one tile; one tile, but matrices of whole eights; tiles of several sizes.
@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize("rows", [16, 64, 66, 300, 2048])
def test_products_of_one_a_share_its_copy(rows):
    def layer(x, *weights):
        return [multiply(x, weight) for weight in weights]

    assert copies_and_products(layer, rows) == (1, [0, 0, 0])


@pytest.mark.usefixtures("h100")
def test_products_of_one_value_share_its_copy():
    """Q, K and V each have a view of the input of their own, and one with a bias is no other product of A."""

    def layer(x, first, second):
        y = torch.ops.fp4compile.scaled_mm(
            x.view(3, 100, K).reshape(300, K), None, None, None, *second, "nvfp4", x.new_zeros(256), x.dtype
        )
        return multiply(x.view(1, 300, K).reshape(300, K), first), y

    assert copies_and_products(layer, 300, (1024, 256)) == (1, [0, 0])


@pytest.mark.usefixtures("h100")
def test_products_of_other_a_have_copies_of_their_own():
    def layer(x, first, second, third):
        return multiply(x, first), multiply(x.neg(), second), multiply(x, third)

    assert copies_and_products(layer, 300) == (2, [0, 1, 0])


@pytest.mark.usefixtures("h100")
def test_a_copy_is_no_longer_shared_once_a_was_changed():
    def layer(x, first, second, third):
        found = multiply(x, first), multiply(x, second)
        torch.ops.aten.neg_(x.view(-1))
        return *found, multiply(x, third)

    assert copies_and_products(layer, 300) == (2, [0, 0, 1])


@pytest.mark.usefixtures("h100")
def test_weights_that_the_graph_quantises_are_arguments_of_the_copy_before_them():
    def layer(x, first, second, third):
        made = torch.ops.fp4compile.quantize(x, "nvfp4")
        return multiply(x, made), multiply(x, first), multiply(x, second), multiply(x, made)

    assert copies_and_products(layer, 300) == (3, [0, 1, 1, 2])


class Projections(nn.Module):
    """Three projections of one input."""

    def __init__(self):
        super().__init__()
        for name, size in (("q", 1024), ("k", 256), ("v", 256)):
            setattr(self, name, nn.Linear(K, size, bias=name == "k", dtype=torch.bfloat16))

    def forward(self, x):
        return self.q(x), self.k(x), self.v(x)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["nvfp4_weight_only", "nvfp4"])
@pytest.mark.parametrize("rows", [40, 100, 300, 1111])
def test_shared_copies_on_a_gpu(recipe, rows):
    """A compiled graph has the bits of the layers, each of which makes its own copy."""
    torch.manual_seed(0)
    model = Projections().cuda()
    x = torch.randn(rows, K, device="cuda", dtype=torch.bfloat16)
    fp4compile.pack_(model, recipe)
    with torch.no_grad():
        expected = model(x)
        got = torch.compile(model, backend=fp4compile.backend(recipe, strict=True))(x)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)
