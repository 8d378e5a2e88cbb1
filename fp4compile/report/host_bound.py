"""The report's advice to use CUDA graphs, where the host issues launches more slowly than the GPU runs them."""

from collections.abc import Sequence

from fp4compile.roofline.host import GraphLaunches


def advice_lines(graphs: Sequence[GraphLaunches], graph_count: int | None) -> list[str]:
    """One line for the graphs in which the host binds; none without such graphs.

    graphs: their launches. graph_count: how many graphs were compiled.
    """
    if not graphs:
        return []
    total = sum(graphs, GraphLaunches())
    where = f" of {len(graphs)} of {graph_count} graphs" if (graph_count or 1) > 1 else ""
    return [
        'predicted to wait for the host, better compiled with torch.compile(..., mode="reduce-overhead"): '
        f"{total.count} launches{where} take the host {1e6 * total.host_seconds:.1f} us to issue, and the GPU "
        f"{1e6 * total.seconds:.1f} us to run; CUDA graphs issue them at once"
    ]
