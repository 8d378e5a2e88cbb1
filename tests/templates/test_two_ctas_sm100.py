"""Products on pairs of CTAs: who chooses them, and how a graph has them. The gate and the simulator do the rest."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from fp4compile import _compat
from fp4compile.check import products
from fp4compile.check.comparison import same_bits
from fp4compile.check.machine_code import compile_launch, product_row
from fp4compile.check.products import (
    OF_A_PAIR,
    TWO_CTAS,
    MatmulCase,
    by_every_kernel,
    exact_arguments,
)
from fp4compile.check.simulation import launch_key
from fp4compile.check.simulator import LaunchSimulator
from fp4compile.formats.epilogue import Epilogue
from fp4compile.hardware import Target
from fp4compile.ops.matmul import SCALED_MM_OPAQUE
from fp4compile.templates.choose import candidates, choose, to_time
from fp4compile.templates.gemm import cost
from fp4compile.templates.gemm.block_scaled_two_ctas_sm100 import MOST_GROUPS
from fp4compile.templates.gemm.heuristics import BlockScaledConfig, two_cta_config
from fp4compile.templates.launch import dry_run
from fp4compile.templates.multiply import multiply, results
from fp4compile.templates.problem import problem_of
from ptxsim.run import Schedule
from tests.helpers.arguments import call, opaque
from tests.ptxsim.quantised_results import differences

pytestmark = pytest.mark.skipif(not _compat.two_cta_products(), reason="Gluon has no products of pairs of CTAs")


exactly = partial(pytest.approx, rel=1e-12, abs=0)  # float64: differences of a few roundings


def problem(a, b, sm=100, **options):
    return problem_of(MatmulCase(a, b, **options).arguments(), Target(sm))


@pytest.mark.parametrize(("a", "b"), [
    ("nvfp4", "nvfp4"), ("nvfp4_rowwise", "nvfp4_te"), ("mxfp8", "mxfp4"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp8"),
])  # fmt: skip
def test_only_timing_chooses_it(a, b, monkeypatch):
    """And only where a larger tile reads fewer operands: tiles of few rows would be half empty."""
    large, few = (problem(a, b, m=m) for m in (8192, 128))
    for one in (large, large.with_epilogue(), few):
        assert choose(one).kernel != TWO_CTAS and candidates(one)[-1] == TWO_CTAS
        assert (TWO_CTAS in {choice.kernel for choice in to_time(one)}) == (one is not few)
    monkeypatch.setattr(_compat, "two_cta_products", lambda: False)
    assert TWO_CTAS not in candidates(large)


@pytest.mark.parametrize(("name", "epilogue", "result"), [
    ("nvfp4", "pair", "nvfp4"), ("mxfp8", "gated", "mxfp8"), ("nvfp4", "", "amax"),
])  # fmt: skip
def test_only_timing_chooses_it_for_quantised_results(name, epilogue, result):
    """Where its larger tiles pay: for the widths of an MLP, and not where each multiprocessor has a smaller tile."""
    large, few = (problem(name, name, m=m, n=14336, k=4096, epilogue=epilogue, result=result) for m in (4096, 128))
    for one in (large, few):
        assert choose(one).kernel == "block_scaled_sm100" and candidates(one) == ("block_scaled_sm100", TWO_CTAS)
        assert choose(one, TWO_CTAS).kernel == TWO_CTAS and choose(one, TWO_CTAS).takes_epilogue
        assert (TWO_CTAS in {choice.kernel for choice in to_time(one)}) == (one is large)


def test_the_model_knows_what_an_epilogue_costs():
    """A tile of 128x256 waits for it, of a pair's tiles only the last one; gate and up are twice the columns."""
    shape = {"m": 148 * 256, "n": 4096, "k": 16384, "result": "mxfp8"}  # every multiprocessor has as many tiles
    gated, pair = (problem("mxfp8", "mxfp8", epilogue=epilogue, **shape) for epilogue in ("gated", "pair"))
    wide, pairs = BlockScaledConfig(128, 256, 128, 4, 4), two_cta_config(gated)
    (one, two), (_, of_both) = ([cost.quantizing_seconds(each, config) for config in (wide, pairs)]
                                for each in (gated, pair))  # fmt: skip
    rounds = 2 * 4096 // 256  # of a multiprocessor; a pair has half of the rows in each
    of_tile = 128 * 256 / 16 * cost.QUANTIZE_INSTRUCTIONS["e8m0"] / (128 * cost.ISSUED * cost.CLOCK)
    assert one - rounds * of_tile == exactly(3 / 2 * (two - of_tile))
    assert of_both - of_tile / 2 == exactly(2 * (two - of_tile))


@pytest.mark.parametrize(("served", "b", "sm", "options"), [
    (True, "nvfp4", 100, {}), (True, "nvfp4", 100, {"n": 8184}), (True, "mxfp8", 103, {}), (True, "mxfp4", 103, {}),
    (False, "nvfp4", 103, {}), (False, "nvfp4", 120, {}), (False, "nvfp4", 90, {}),
    *((False, "nvfp4", 100, each) for each in (
        {"batches": 4}, {"n": 8188}, {"k": 8176}, {"n": 8176, "result": "nvfp4"},
        {"n": 8160, "result": "amax"}, {"batches": 4, "result": "nvfp4"},
        *({"n": 8000, "epilogue": "pair", "result": result} for result in ("nvfp4", "amax")),  # no kernel takes them
    )),
    *((True, "nvfp4", 100, each) for each in (
        {"result": "nvfp4_te"}, {"n": 8184, "result": "nvfp4_one_level"}, {"epilogue": "pair", "result": "nvfp4"},
        {"epilogue": "pair", "result": "amax"}, {"n": 8128, "result": "amax"},
    )),
    (True, "mxfp8", 103, {"n": 8145, "epilogue": "bias", "result": "mxfp8"}),
    (False, "nvfp4", 103, {"result": "nvfp4"}),
])  # fmt: skip
def test_what_it_serves(served, b, sm, options):
    """One product whose rows of codes and of results are whole 16 bytes, on GPUs for which its code was simulated.

    The amax of a result is found where columns are whole parts of 64.
    """
    a = "nvfp4" if b == "nvfp4" else "mxfp8"
    assert (TWO_CTAS in candidates(problem(a, b, sm, **options))) == served


class OnGpu(Interpreter):
    """Runs a graph with the op's kernel, in a simulator."""

    def call_function(self, target, args, kwargs):
        if target is not SCALED_MM_OPAQUE:
            return super().call_function(target, args, kwargs)
        with LaunchSimulator(Target(100, 4), Schedule(1)).running():
            return opaque(*args, **kwargs)


def test_a_graph_has_an_op():
    """It holds no launch of Gluon. The op gets all arguments of the product, and its kernel equals the reference."""
    x = exact_arguments(MatmulCase("nvfp4_rowwise", "nvfp4_te", 144, 264, 544, epilogue="bias"))
    x = x.but(epilogue=Epilogue.parse(["add product aux0"], torch.bfloat16, torch.float32),
              auxiliaries=[torch.randint(-3, 4, (144, 264)).to(torch.bfloat16)])  # fmt: skip
    choice = choose(problem_of(x, Target(100)), TWO_CTAS)

    def function(a, other):
        return multiply(replace(x, a=replace(x.a, data=a), auxiliaries=[other]), choice)

    tensors = x.a.data, x.auxiliaries[0]
    with dry_run(Target(100)) as launches:
        graph = make_fx(function)(*tensors)
    assert not launches and sum(node.target is SCALED_MM_OPAQUE for node in graph.graph.nodes) == 1
    expected = call(x)
    assert same_bits(graph(*tensors), expected) == []
    assert same_bits(OnGpu(graph).run(*tensors), expected) == []


# ---------------------------------------------------------------- results that are quantised


@pytest.mark.parametrize(("operands", "result", "columns", "epilogue", "multiprocessors"), [
    (("nvfp4_rowwise", "nvfp4_te"), "nvfp4", 544, "gated", 2), (("mxfp8_e5m2", "mxfp8"), "mxfp8", 290, "", 4),
    (("nvfp4", "nvfp4"), "nvfp4_one_level", 384, "pair", 4), (("mxfp4", "mxfp4"), "mxfp4", 128, "pair", 2),
    (("nvfp4", "nvfp4"), "amax", 384, "pair", 4),
])  # fmt: skip
def test_results_that_are_quantised(operands, result, columns, epilogue, multiprocessors):
    """Two rows of tiles, of which pairs take several; columns end in the middle of a tile, a part and a block."""
    product = MatmulCase(*operands, 400, columns, 416, epilogue, result=result, kernel=TWO_CTAS)
    simulator = LaunchSimulator(Target(100, multiprocessors), Schedule(1))
    assert differences(product, simulator) == []
    assert [(one.num_ctas, one.constants["PAIR"]) for one in simulator.launches] == [(2, epilogue == "pair")]


def test_an_amax_of_nan():
    """In the last row, of the second CTA of the second pair. The entries of CTAs that are not there are 0."""
    value = torch.zeros(400, 64, dtype=torch.bfloat16)
    value[-1, -1] = torch.nan
    steps = ["mul product 0.0", "add s0 aux0", "amax"]
    x = exact_arguments(MatmulCase("nvfp4", "nvfp4", 400, 64, 416, "gated", result="amax"))
    x = x.but(epilogue=Epilogue.parse(steps, torch.bfloat16, torch.bfloat16), auxiliaries=[value])
    with LaunchSimulator(Target(100, 4), Schedule(1)).running():
        _, maxima = results(x, choose(problem_of(x, Target(100)), TWO_CTAS))
    assert maxima.isnan().nonzero().tolist() == [[3]] and maxima.nan_to_num().amax() == 0


@pytest.mark.parametrize(("epilogue", "result"), [("gated", "nvfp4"), ("pair", "mxfp8"), ("pair", "amax")])
def test_a_graph_has_an_op_of_quantised_results(epilogue, result):
    """It returns both results, from all arguments, static global scales and those of both matrices among them."""
    name = "mxfp8" if result == "mxfp8" else "nvfp4"
    product = MatmulCase(name, name, 144, 128, 288, epilogue, result=result)
    steps = ["relu product", "mul s0 pair" if epilogue == "pair" else "mul s0 aux0"]
    x = exact_arguments(product)
    x = x.but(epilogue=Epilogue.parse([*steps, x.spec.epilogue.end], torch.bfloat16, torch.bfloat16))
    choice = choose(problem_of(x, Target(100)), TWO_CTAS)

    def function(*tensors):
        a, outer, result_outer, *auxiliaries = tensors
        return results(replace(x, a=replace(x.a, data=a), b=replace(x.b, outer=outer), result_outer=result_outer,
                               auxiliaries=auxiliaries), choice)  # fmt: skip

    tensors = x.a.data, x.b.outer, x.result_outer, *x.auxiliaries
    with dry_run(Target(100)) as launches:
        graph = make_fx(function)(*tensors)
    assert not launches and sum(node.target is SCALED_MM_OPAQUE for node in graph.graph.nodes) == 1
    expected = call(x)
    for found in (graph(*tensors), OnGpu(graph).run(*tensors)):
        if result == "amax":  # which of the maxima is the largest depends on the device
            found, expected = ([one[0], one[1].amax()] for one in (found, expected))
        assert same_bits([*found, torch.empty(0)], [*expected, torch.empty(0)]) == []


def test_registers_hold_most_operands_of_an_epilogue():
    """Two 16-bit operands beside gate, up, and all global scales and biases: no spills. It serves no more bytes."""
    two = [torch.empty(512, 8192, dtype=torch.bfloat16, device="meta")] * 2
    x = MatmulCase("nvfp4_rowwise", "nvfp4_te", epilogue="pair", result="nvfp4").arguments()
    steps = [*OF_A_PAIR, "add s4 aux0", "mul s5 aux1", "quantize nvfp4"]
    x = x.but(epilogue=Epilogue.parse(steps, torch.bfloat16, torch.bfloat16), auxiliaries=two,
              bias=torch.empty(2 * 8192, device="meta"))  # fmt: skip
    with dry_run(Target(100)) as launches:
        results(x, choose(problem_of(x, Target(100)), TWO_CTAS))
    compiled = compile_launch(launches[0], 100)
    assert launches[0].num_ctas == 2 and not compiled.problems and not compiled.resources.problems
    gated = problem("nvfp4", "nvfp4", epilogue="gated", result="nvfp4")
    served = [TWO_CTAS in candidates(replace(gated, operand_bytes=count)) for count in (4, 6)]
    assert served == [True, False]


# ---------------------------------------------------------------- experts


# Not by `two_cta_products_of_groups`: a package that never chose the kernel would skip its tests.
COMPILES_GROUPS = _compat.triton_version() >= (3, 9)
of_groups = pytest.mark.skipif(not COMPILES_GROUPS, reason="compiles from Triton 3.9 on")


def experts(a, b, sm=100, m=8192, **options):
    return problem(a, b, sm, **{"m": m, "n": 2048, "k": 4096, "groups": 8, **options})


@of_groups
@pytest.mark.parametrize(("a", "b"), [("nvfp4", "nvfp4"), ("nvfp4_rowwise", "nvfp4_te"), ("mxfp8", "mxfp4")])
def test_only_timing_chooses_it_for_experts(a, b, monkeypatch):
    """And only where groups fill half of a tile of 256 rows on average."""
    many, few = experts(a, b, groups=64), experts(a, b, groups=64, m=8191)
    for one in (many, few):
        assert choose(one).kernel == "grouped_block_scaled_sm100" and candidates(one)[-1] == TWO_CTAS
        assert choose(one, TWO_CTAS).kernel == TWO_CTAS
        assert (TWO_CTAS in {choice.kernel for choice in to_time(one)}) == (one is many)
    monkeypatch.setattr(_compat, "two_cta_products", lambda: False)
    assert TWO_CTAS not in candidates(many)


@of_groups
def test_the_model_knows_what_a_pair_loads():
    """Where tiles bound both kernels, a tile of 256x256 takes two thirds of the time of two tiles of 128x256."""
    one = experts("nvfp4", "nvfp4", m=148 * 1024, n=4096, k=16384)
    found = [choose(one, name) for name in ("grouped_block_scaled_sm100", TWO_CTAS)]
    assert [(choice.config.bm, choice.config.bn) for choice in found] == [(128, 256), (256, 256)]
    seconds = cost.kernel_seconds(one, found[0].config), cost.kernel_seconds(one, found[1].config)
    assert seconds[1] == exactly(seconds[0] * 2 / 3)


@pytest.mark.parametrize(("served", "b", "sm", "options"), [
    (True, "nvfp4", 100, {}), (True, "nvfp4", 100, {"n": 8}), (True, "mxfp8", 103, {}), (True, "mxfp4", 103, {}),
    (True, "nvfp4", 100, {"groups": MOST_GROUPS}), (False, "nvfp4", 100, {"groups": MOST_GROUPS + 1}),
    (False, "nvfp4", 103, {}), (False, "nvfp4", 120, {}), (False, "nvfp4", 90, {}),
    *((False, "nvfp4", 100, each) for each in (
        {"along_k": True}, {"n": 2044}, {"k": 4080}, {"epilogue": "pair", "result": "nvfp4_one_level"},
    )),
])  # fmt: skip
def test_what_it_serves_of_experts(served, b, sm, options):
    """Groups of rows; else as without groups. Nothing where Triton does not compile the kernel for groups."""
    a = "nvfp4" if b == "nvfp4" else "mxfp8"
    served = served and COMPILES_GROUPS
    assert (TWO_CTAS in candidates(experts(a, b, sm, **options))) == served


OFFS = [-3, 256, 200, 256, 515, 770, 779]


def of_experts(m, offs):
    """Arguments with one global scale for all of A, and one for each row of B."""
    x = exact_arguments(MatmulCase("nvfp4", "nvfp4_rowwise", m, 264, 288, groups=len(offs)))
    outer = torch.tensor(0.5)
    return x.but(a=replace(x.a, outer=outer), out_dtype=torch.float32, offs=torch.tensor(offs, dtype=torch.int32))


def expected_of_experts(x):
    """The reference's product. It begins sums with a group's only product, which may be -0, the kernel with 0."""
    return call(x) + 0.0


@of_groups
def test_rows_of_no_group_are_cleared():
    x, simulator = of_experts(800, [0] * 7), LaunchSimulator(Target(100, 4), Schedule(2))
    with simulator.running():
        got = multiply(x, choose(problem_of(x, Target(100)), TWO_CTAS))
    assert [launch.num_ctas for launch in simulator.launches] == [2]
    assert same_bits(got, expected_of_experts(x)) == []


def test_many_experts():
    """A lane has several groups, most of them empty; the last one ends with the rows, where offsets exceed them."""
    x = exact_arguments(MatmulCase("mxfp8", "mxfp8", 60, 8, 96, groups=34))
    x = replace(x, offs=torch.tensor([*(5 + i // 3 for i in range(33)), 900], dtype=torch.int32))
    with LaunchSimulator(Target(103, 2), Schedule(1)).running():
        got = multiply(x, choose(problem_of(x, Target(103)), TWO_CTAS))
    assert same_bits(got, expected_of_experts(x)) == []


@of_groups
def test_a_graph_of_experts_has_an_op():
    """With the offsets, which stay on the device, for any number of tokens, over whose tiles two pairs walk.

    Whole tiles, empty and ragged groups, negative offsets and some that decrease.
    """
    x = of_experts(800, OFFS)
    choice = choose(problem_of(x, Target(100)), TWO_CTAS)

    def function(a, a_scales, a_outer, b, b_scales, b_outer, offs):
        left = replace(x.a, data=a, scales=a_scales, outer=a_outer)
        right = replace(x.b, data=b, scales=b_scales, outer=b_outer)
        return multiply(replace(x, a=left, b=right, offs=offs, rows=a.shape[0]), choice)

    def tensors(of):
        return *of.a.tensors, *of.b.tensors, of.offs

    with dry_run(Target(100)) as launches:
        graph = make_fx(function, tracing_mode="symbolic")(*tensors(of_experts(300, OFFS)))
    assert not launches and sum(node.target is SCALED_MM_OPAQUE for node in graph.graph.nodes) == 1
    assert same_bits(graph(*tensors(x)), expected_of_experts(x)) == []
    assert same_bits(OnGpu(graph).run(*tensors(x)), expected_of_experts(x)) == []


@of_groups
def test_machine_code_of_experts():
    """No spills with as many groups as it serves; results by TMA, and as many stages as without groups."""
    product = MatmulCase("nvfp4_rowwise", "nvfp4", 8192, 2048, 4096, groups=MOST_GROUPS, kernel=TWO_CTAS)
    _, (launched,) = product.launches(100)
    row = product_row(product, "native", launched, 100)
    assert not row.problems and row.line == "block-scaled" and row.stores == "TMA"
    assert row.resources.spills == 0 and launched.constants["STAGES"] == 5


@of_groups
def test_the_first_run_has_both_kernels(monkeypatch):
    """Those that rank does not choose, too, whether or not the cost model expects them to pay."""
    monkeypatch.setattr(products, "differences", lambda *args: [])
    product = MatmulCase("nvfp4", "nvfp4", 160, 264, 512, groups=6)
    assert (
        by_every_kernel(product, LaunchSimulator(Target(100)))["kernels"] == f"grouped_block_scaled_sm100, {TWO_CTAS}"
    )


@of_groups
def test_a_simulated_product_stands_for_no_experts():
    """Their launches have the same constants but for the number of groups."""
    dense, grouped = MatmulCase("mxfp8", "mxfp8", kernel=TWO_CTAS), MatmulCase("mxfp8", "mxfp8", groups=4)
    _, (one,) = dense.launches(100)
    _, (other,) = replace(grouped, kernel=TWO_CTAS).launches(100)
    assert one.constants | {"GROUPS": 4} == other.constants
    assert launch_key(one) != launch_key(other)
