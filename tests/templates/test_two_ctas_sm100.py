"""Products on pairs of CTAs: who chooses them, and how a graph has them. The gate and the simulator do the rest."""

from dataclasses import replace

import pytest
import torch
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from fp4compile import _compat
from fp4compile.check.product_table import TWO_CTAS, Product
from fp4compile.check.product_values import exact_arguments
from fp4compile.check.simulate.launch import Simulator
from fp4compile.check.simulate.run import Schedule
from fp4compile.check.values import same_bits
from fp4compile.formats.epilogue import Epilogue
from fp4compile.hardware import Target
from fp4compile.ops.matmul import SCALED_MM, SCALED_MM_TWO_CTAS, scaled_mm_two_ctas_kernels
from fp4compile.templates.choose import candidates, choose, to_time
from fp4compile.templates.launch import dry_run
from fp4compile.templates.multiply import multiply
from fp4compile.templates.problem import problem_of

pytestmark = pytest.mark.skipif(not _compat.two_cta_products(), reason="Gluon has no products of pairs of CTAs")


def problem(a, b, sm=100, **options):
    return problem_of(Product(a, b, **options).arguments(), Target(sm))


@pytest.mark.parametrize(("a", "b"), [
    ("nvfp4", "nvfp4"), ("nvfp4_rowwise", "nvfp4_te"), ("mxfp8", "mxfp4"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp8"),
])  # fmt: skip
def test_only_timing_chooses_it(a, b, monkeypatch):
    """And only where a larger tile reads fewer operands: tiles of few rows would be half empty."""
    large, few = (problem(a, b, m=m) for m in (8192, 128))
    for one in (large, replace(large, epilogue=True), few):
        assert choose(one).kernel != TWO_CTAS and candidates(one)[-1] == TWO_CTAS
        assert (TWO_CTAS in {choice.kernel for choice in to_time(one)}) == (one is not few)
    monkeypatch.setattr(_compat, "two_cta_products", lambda: False)
    assert TWO_CTAS not in candidates(large)


@pytest.mark.parametrize(("served", "b", "sm", "options"), [
    (True, "nvfp4", 100, {}), (True, "nvfp4", 100, {"n": 8184}), (True, "mxfp8", 103, {}), (True, "mxfp4", 103, {}),
    (False, "nvfp4", 103, {}), (False, "nvfp4", 120, {}), (False, "nvfp4", 90, {}),
    *((False, "nvfp4", 100, each) for each in (
        {"batches": 4}, {"n": 8188}, {"k": 8176}, {"result": "nvfp4_one_level"}, {"groups": 4},
    )),
])  # fmt: skip
def test_what_it_serves(served, b, sm, options):
    """One product whose rows of codes and of results are whole 16 bytes, on GPUs for which its code was simulated."""
    a = "nvfp4" if b == "nvfp4" else "mxfp8"
    assert (TWO_CTAS in candidates(problem(a, b, sm, **options))) == served


class OnGpu(Interpreter):
    """Runs a graph with the op's kernel, in a simulator."""

    def call_function(self, target, args, kwargs):
        if target is not SCALED_MM_TWO_CTAS:
            return super().call_function(target, args, kwargs)
        with Simulator(Target(100, 2), Schedule(1)).running():
            return scaled_mm_two_ctas_kernels(*args, **kwargs)


def test_a_graph_has_an_op():
    """It holds no launch of Gluon. The op gets all arguments of the product, and its kernel equals the reference."""
    x = exact_arguments(Product("nvfp4_rowwise", "nvfp4_te", 144, 264, 544, epilogue="bias"))
    x = replace(x, epilogue=Epilogue.parse(["add product aux0"], torch.bfloat16, torch.float32),
                auxiliaries=[torch.randint(-3, 4, (144, 264)).to(torch.bfloat16)])  # fmt: skip
    choice = choose(problem_of(x, Target(100)), TWO_CTAS)

    def function(a, other):
        return multiply(replace(x, a=replace(x.a, data=a), auxiliaries=[other]), choice)

    tensors = x.a.data, x.auxiliaries[0]
    with dry_run(Target(100)) as launches:
        graph = make_fx(function)(*tensors)
    assert not launches and sum(node.target is SCALED_MM_TWO_CTAS for node in graph.graph.nodes) == 1
    expected = SCALED_MM(*x.a.in_schema, *x.b.in_schema, x.bias, x.out_dtype, [tensors[1]], x.epilogue.strings(),
                         x.epilogue.dtype)  # fmt: skip
    assert same_bits(graph(*tensors), expected) == []
    assert same_bits(OnGpu(graph).run(*tensors), expected) == []
