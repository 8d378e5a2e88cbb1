"""Find weights that the graph itself gathers from the ranks' rows, as in torchtitan's SimpleFSDP."""

from torch.fx import Graph, Node

from fp4compile._compat import statically_true
from fp4compile.analysis.gemm import Shard
from fp4compile.analysis.views import view_of

# By name, because torch may be built without distributed.
GATHER = "_c10d_functional.all_gather_into_tensor.default"
REDUCE_SCATTER = "_c10d_functional.reduce_scatter_tensor.default"
WAIT = "_c10d_functional.wait_tensor.default"


def gathered_parameters(graph: Graph, cuts: dict[Node, tuple[Shard, ...]]) -> dict[Node, Node]:
    """The nodes that hold all rows of a sharded parameter, with the placeholder of this rank's rows."""
    found = {node: parameter_of(node) for node in graph.nodes if is_gather(node)}
    return {node: one for node, one in found.items() if one is not None and _all_rows(node, cuts.get(one, ()))}


def is_gather(node: Node) -> bool:
    """Whether a node waits for an all-gather along the first dimension."""
    return str(node.target) == WAIT and str(node.args[0].target) == GATHER


def parameter_of(node: Node) -> Node | None:
    """The placeholder of a rank's rows that a gather sends, in order and possibly cast; None for another tensor."""
    view = view_of(node.args[0].args[0])
    whole = view_of(view.root)
    same = view.root.op == "placeholder" and (view.stride, view.offset) == (whole.stride, whole.offset)
    return view.root if same and view.size == whole.size else None


def _all_rows(node: Node, cuts: tuple[Shard, ...]) -> bool:
    _, ranks, group = node.args[0].args
    if len(cuts) != 1:
        return False
    (cut,) = cuts
    rows = node.meta["val"].shape[0]
    return cut.dim == 0 and (cut.group, cut.ranks) == (group, ranks) and statically_true(rows == cut.whole)
