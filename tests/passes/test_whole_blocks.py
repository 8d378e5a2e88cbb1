"""Blocks that reach over rows are quantised before a gather: square blocks, and blocks along the columns.

All ranks of a group run a graph together in one process, before the pass and after it.
"""

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.testing._internal.distributed.fake_pg import FakeStore

import fp4compile
from fp4compile.analysis.graph import quantise_of
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.passes.moves import move_of
from fp4compile.passes.quantize_before_move import _reason, quantize_before_move
from tests.helpers import rank_worker, without_codegen
from tests.helpers.ranks_in_step import run, same_bits, traced

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
RANKS, ROWS, K = 3, 64, 80  # of each rank; a row is no whole number of blocks of 32
SQUARE, MX4_SQUARE = "nvfp4_16x16", "e2m1:32x32:e8m0:-:rceil"


def shards() -> list[torch.Tensor]:
    """The rows of each rank; the last rank has the largest."""
    rows = torch.randn(RANKS, ROWS, K, generator=torch.Generator().manual_seed(0))
    rows *= 2.0 ** torch.arange(RANKS * ROWS).fmod(11).view(RANKS, ROWS, 1)
    rows[-1] *= 37
    return list(rows.bfloat16())


def quantize(x, fmt, dim=-1, **options):
    """The results that are there."""
    return [each for each in torch.ops.fp4compile.quantize(x, fmt, dim, **options) if each.shape != (0,)]


def gathered(x):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, RANKS, "0"))


def sequences(x, count=2):
    """Rows of which each rank has a part of every sequence."""
    rows = gathered(x.view(count, -1, K))
    return aten.cat(list(aten.split(rows, count)), 1).view(-1, K)


def matrices(x):
    return gathered(x.view(2, -1, K)).view(-1, K)


CHAINS = {"rows": gathered, "sequences": sequences, "matrices": matrices}


def moved(function, *more) -> tuple[int, list[torch.Size]]:
    """(moves that the pass changes, the shapes of what ranks send); all ranks' results must keep their bits."""
    values = [(rows, *more) for rows in shards()]
    graph = traced(function, values[0])
    expected = run(graph, values)
    count = quantize_before_move(graph)
    graph.lint()
    for mine, wanted in zip(run(graph, values), expected, strict=True):
        assert all(map(same_bits, mine, wanted))
    gathers = graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default)
    return count, [node.args[0].meta["val"] for node in gathers]


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("dim", [[-1], [-2], [-1, -2]], ids=str)
@pytest.mark.parametrize("fmt", ["nvfp4_16x16", "mxfp8_32x32", MX4_SQUARE])
def test_square_blocks_have_the_bits_of_the_gathered_rows(fmt, dim, layout, chain):
    """Both directions are sent once: the codes of a rank's rows, and a scale for each block."""
    count, sent = moved(lambda x: quantize(chain(x), fmt, dim, layout=layout))
    block = 16 if fmt == "nvfp4_16x16" else 32
    assert count == 1 and len(sent) == 2 and all(each.dtype == torch.uint8 for each in sent)
    codes, scales = (each.numel() for each in sent)
    along, other = (K, ROWS) if -1 in dim else (ROWS, K)  # blocks are filled up along the rows of codes
    assert codes == other * -(-along // block) * block // (1 if fmt == "mxfp8_32x32" else 2)
    assert scales == -(-other // block) * -(-along // block)


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize(("fmt", "dim", "parts"), [
    ("nvfp4", [-2], 2), ("nvfp4", [-1, -2], 4), ("nvfp4_te", [-1, -2], 4), ("nvfp4_one_level", [-1, -2], 4),
    ("mxfp4", [-1, -2], 4), ("mxfp8", [-2], 2), ("mxfp8_e5m2", [-2], 2),
])  # fmt: skip
def test_columns_have_the_bits_of_the_gathered_rows(fmt, dim, parts, layout, chain):
    count, sent = moved(lambda x: quantize(chain(x), fmt, dim, layout=layout))
    assert (count, len(sent)) == (1, parts) and all(each.dtype == torch.uint8 for each in sent)


def test_several_quantisers_of_a_gather():
    """A static outer scale; codes along the rows that two quantisers share; one gather of each tensor."""

    def function(x, outer):
        rows = gathered(x)
        return *quantize(rows, "nvfp4_16x16", [-1, -2], outer=outer), *quantize(rows, "nvfp4_16x16", outer=outer)

    count, sent = moved(function, torch.tensor(0.01))
    assert count == 1 and len(sent) == 2
    count, sent = moved(lambda x: (*quantize(gathered(x), "nvfp4_16x16", -2), *quantize(gathered(x), "mxfp8")))
    assert count == 2 and len(sent) == 4


def test_all_results_of_both_directions():
    """The outer scale of the columns is empty, because they share the rows'."""
    count, sent = moved(lambda x: torch.ops.fp4compile.quantize(gathered(x), SQUARE, [-1, -2]))
    assert (count, len(sent)) == (1, 4)


def masked(x):
    rows = gathered(x)
    return aten.where((rows.sum(-1, dtype=torch.float32) > 0).view(-1, 1), aten.full([], 0.0, dtype=x.dtype), rows)


def interleaved(rows, pieces, along=0):
    """Pieces of six matrices, or of the rows of each of two, joined along the other dimension."""
    cut = rows.view(2 if along else 6, -1, K)
    return aten.cat(list(aten.split(cut, cut.shape[along] // pieces, along)), 1 - along).view(-1, K)


def of(by, fmt, dim=-2, **options):
    return lambda x: quantize(by(x), fmt, dim, **options)


def groups(x):
    return quantize(gathered(x), "mxfp8", -2, offs=torch.ones(2, dtype=torch.int32, device=x.device) * 32)


def stochastic(x):
    return quantize(gathered(x), "mxfp4", -2, seed=torch.ones((), dtype=torch.int64))


STAYS = {
    "blocks are square": of(lambda x: aten.cat([x, x]), SQUARE, -1),
    "columns are quantised": of(lambda x: aten.cat([x, x]), "mxfp8"),
    "columns of groups are quantised": groups,
    "columns are transformed": of(gathered, "nvfp4", [-1, -2], hadamard=True),
    "the scale of a column is made of the rows of all ranks": of(gathered, "float8_rowwise"),
    "its rows are put in another order, or masked, behind the move": of(masked, SQUARE, -1),
    "the 20 rows of a rank cut blocks of 16 rows": of(lambda x: gathered(aten.slice(x, 0, 0, 20)), SQUARE, -1),
    "the 40 rows of a rank cut blocks of 32 rows": of(lambda x: gathered(aten.slice(x, 0, 0, 40)), "mxfp8"),
    "the 16 rows of a rank cut blocks of 32 rows": of(lambda x: sequences(x, 4), "mxfp8"),
    "elements are rounded stochastically": stochastic,
    "it is no quantiser of activations alone": of(gathered, SQUARE, -1, scale_rule="mse"),
    "its products read 16-bit numbers": of(gathered, SQUARE, [-1, -2], values=[-2]),
    "codes and scales are no fewer bytes": of(gathered, "mxfp8", [-1, -2]),
}


@pytest.mark.parametrize("reason", STAYS)
def test_what_stays_behind_a_gather(reason):
    assert _why(traced(STAYS[reason], shards()[:1])) == reason and moved(STAYS[reason])[0] == 0


ORDERS = {
    "other pieces than those of ranks": of(lambda x: interleaved(gathered(x), 2), "mxfp8"),
    "pieces of each matrix": of(lambda x: interleaved(gathered(x), RANKS, 1), SQUARE),
    "twice": of(lambda x: interleaved(sequences(x), RANKS), SQUARE),
    "columns of sequences": of(lambda x: sequences(x).view(2, -1, K), "mxfp8"),
    "blocks of matrices": of(lambda x: gathered(x).view(RANKS, -1, K), SQUARE, -1),
}


@pytest.mark.parametrize("function", ORDERS.values(), ids=ORDERS)
def test_rows_in_another_order(function):
    reason = "its rows are put in another order, or masked, behind the move"
    assert _why(traced(function, shards()[:1])) == reason and moved(function)[0] == 0


def _why(graph) -> str | None:
    (quantise,) = graph.find_nodes(op="call_function", target=QUANTIZE)
    *_, move = [found for node in graph.nodes if (found := move_of(node)) is not None]
    return _reason(move, [quantise_of(quantise)])


def test_an_unknown_number_of_rows():
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        symbol = mode.shape_env.create_symbol(ROWS, ConstantSource("s"), DimDynamic.DYNAMIC)
        x = torch.empty(mode.shape_env.create_symintnode(symbol, hint=ROWS), K, dtype=torch.bfloat16)
        graph = make_fx(of(gathered, "mxfp8"))(x).graph
    graph.eliminate_dead_code()
    assert _why(graph) == "the numbers of rows are not known" and quantize_before_move(graph) == 0


# ---------------------------------------------------------------- compiled


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_inductor_stores_what_is_transposed(one_rank, monkeypatch):
    """It has no kernels on a CPU with the dtype of MX scales."""
    monkeypatch.setattr(fp4compile.config, "enabled_passes", ("quantize_before_move",))

    group = dist.group.WORLD.group_name

    def function(x):
        return quantize(c10d.wait_tensor(c10d.all_gather_into_tensor(x, 1, group)), "mxfp8_32x32", [-1, -2])

    torch._dynamo.reset()
    backend = fp4compile.backend("mxfp8")
    x = shards()[0]
    with pytest.warns(UserWarning, match="no matmul found"):
        found = torch.compile(function, backend=backend)(x)
    for got, expected in zip(found, function(x), strict=True):
        assert got.dtype == expected.dtype and torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
    assert backend.report.counts["quantize_before_move"] == 1


# ---------------------------------------------------------------- what a training step saves


@pytest.fixture
def two_ranks():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize(("again", "recipe", "codes"), [
    (False, rank_worker.SQUARE, {(64, 48), (96, 32)}), (False, "mxfp8", {(64, 96), (96, 64)}),
    (True, rank_worker.SQUARE, set()),
])  # fmt: skip
def test_codes_of_gathered_parameters_are_saved(again, recipe, codes, two_ranks, monkeypatch):
    """A backward pass reads codes along the columns; or it gathers the parameters again, of which it has the shards."""
    without_codegen.install(monkeypatch)
    model = rank_worker.gathered(rank_worker.Mlp(), two_ranks, again)
    function, _ = rank_worker.compiled(model, recipe)
    x, saved = torch.randn(112, rank_worker.WIDTH, requires_grad=True), []  # codes of tokens have other sizes
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        function(x)
    plain = {tuple(each.shape) for each in saved if each.dtype == torch.float32}
    sizes = {tuple(each.shape) for each in saved if each.dtype != torch.float32}
    assert not {(96, 64), (64, 96)} & plain, "no whole weight"
    assert sizes & {(64, 48), (96, 32), (64, 96), (96, 64)} == codes
