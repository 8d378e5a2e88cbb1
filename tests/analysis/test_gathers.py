"""Products with parameters whose rows the graph gathers from the ranks of a group that does not exist."""

import pytest
import torch
import torch.distributed._functional_collectives  # noqa: F401  shapes of the collectives
from torch.fx.experimental.proxy_tensor import make_fx

from fp4compile.analysis.find import find
from fp4compile.analysis.gemm import Input, Shard

c10d = torch.ops._c10d_functional
ROWS = Shard(0, 64, "0", 2)
COMPUTED = "its weight is computed from parameters and is none itself"


class Index:
    """AOTAutograd's descriptor of an input, as far as it is read."""

    def __init__(self, idx):
        self.idx = idx


def gathered(w, group="0"):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(w, 2, group))


@pytest.mark.parametrize(("weight", "shards", "reason"), [
    (lambda w: gathered(w.bfloat16()), (ROWS,), None),
    (lambda w: gathered(w.view(-1)).view(64, 32).bfloat16(), (ROWS,), COMPUTED),  # no rows are gathered
    (lambda w: gathered(w.t().reshape(32, 32)).bfloat16(), (ROWS,), COMPUTED),
    (lambda w: gathered(w, "1").bfloat16(), (ROWS,), COMPUTED),  # other ranks have the other rows
    (lambda w: gathered(w).bfloat16(), (ROWS, Shard(1, 64, "1", 2)), COMPUTED),  # each rank has a part of each row
    (lambda w: gathered(w).bfloat16(), (Shard(1, 64, "0", 2),), COMPUTED),
    (lambda w: gathered(w).bfloat16(), (Shard(0, 63, "0", 2),), COMPUTED),  # the last row is padding
])  # fmt: skip
def test_all_rows_of_a_parameter_are_the_parameter(weight, shards, reason):
    def layer(w, x):
        return x @ weight(w).t()

    graph = make_fx(layer, tracing_mode="fake")(torch.randn(32, 32), torch.randn(8, 32).bfloat16()).graph
    for i, node in enumerate(graph.find_nodes(op="placeholder")):
        node.meta["desc"] = Index(i)
    (gemm,) = find(graph, (Input("layer.weight", shards=shards), Input()))
    assert (gemm.product, gemm.unsupported) == (("fprop", None) if reason is None else ("other", reason))
    assert reason is not None or (gemm.module, gemm.layer) == ("layer", (8, 64, 32))


@pytest.mark.parametrize(("shard", "sizes"), [(ROWS, (8, 64, 32)), (Shard(1, 64, "0", 2), (8, 32, 64))])
@pytest.mark.parametrize("stored", ["out first", "in first"])
def test_limits_are_for_the_whole_layer_of_which_a_rank_has_a_shard(shard, sizes, stored):
    """Under tensor parallelism a rank multiplies its rows or columns, here as many of one as of the other."""

    def layer(w, x):
        return x @ (w.t() if stored == "out first" else w)

    graph = make_fx(layer, tracing_mode="fake")(torch.randn(32, 32), torch.randn(8, 32)).graph
    for i, node in enumerate(graph.find_nodes(op="placeholder")):
        node.meta["desc"] = Index(i)
    (gemm,) = find(graph, (Input("layer.weight", shards=(shard,)), Input()))
    tokens, *features = sizes
    assert gemm.layer == (tokens, *(features if stored == "out first" else reversed(features)))
