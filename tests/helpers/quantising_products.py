"""Graphs whose products quantise their results, for a GPU that need not be there."""

from fp4compile.passes.fuse_epilogue import fuse_epilogue
from fp4compile.passes.fuse_prologue import fuse_prologue
from fp4compile.passes.fuse_quantize import fuse_quantize
from fp4compile.passes.lib.notes import fused
from fp4compile.passes.lower import lower
from fp4compile.passes.merge_quantize import merge_quantize
from tests.helpers.absent_gpu import fused_graph
from tests.helpers.graphs import summary


def graph_of(function, *shapes, recipe="mxfp8", lowered=None, **options):
    """(the graph after the pass, fused operations, how many quantisers it fused, the launches it is lowered to).

    lowered: takes the lowered graph.
    """
    counts, graphs = [], []

    def passes(graph):
        merge_quantize(graph)
        counts.append(fuse_quantize(graph))
        fuse_epilogue(graph)
        fuse_prologue(graph)
        graph.lint()
        graphs.append((summary(graph), fused(graph)))
        lower(graph)

    result = fused_graph(function, *shapes, recipe=recipe, fuse=False, then=passes, **options)
    if lowered is not None:
        lowered(result.graph)
    return *graphs[0], counts[0], [launch.kernel.__name__ for launch in result.launches]
