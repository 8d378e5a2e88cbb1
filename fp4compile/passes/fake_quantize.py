"""Quantise A and dequantise it in one kernel, where only products read it: `quantize` becomes `fake_quantize`.

Entry: `fake_quantize(graph)`, on a forward, backward or inference graph after the partitioner. It runs after equal
quantises became one, and before epilogue and horizontal fusion, which then see the operands that this pass leaves.

A GPU without FP4 matrix units multiplies 16-bit numbers. Most of its products first dequantise A in memory, each for
itself (`Choice.dequantizes_a`). The codes and block scales need not be written where nothing else reads them; the
backward pass reads them where they are saved for it. The products then get a plain A, with the outer scale that A had:
the same numbers, and the same kernels. Products that dequantise codes in registers are left alone, because they read
fewer bytes of codes than of 16-bit numbers.
"""

import operator

from torch.fx import Graph, Node

from fp4compile import formats, ops
from fp4compile._compat import statically_true
from fp4compile.passes.graph import FAKE_QUANTIZE, QUANTIZE, SCALED_MM, Quantise, new_node, quantise_of, scaled_mm_of


def fake_quantize(graph: Graph) -> int:
    """Replace quantises on CUDA tensors that only such products read; returns how many."""
    count = 0
    for node in graph.find_nodes(op="call_function", target=QUANTIZE):
        quantise = quantise_of(node)
        readers = _readers(node)
        if readers and _expandable(quantise) and all(_multiplies(reader, node) for reader in readers):
            _replace(quantise, readers)
            count += 1
    return count


def _expandable(quantise: Quantise) -> bool:
    """Whether `fake_quantize` does what the node does, and its kernel reads the tensor as it lies."""
    x = quantise.source.meta["val"]
    plain = quantise.layout == "linear" and quantise.seed is None and not quantise.hadamard
    plain = plain and quantise.scale_rule == "amax"
    along_rows = quantise.dim == -1 and statically_true(x.stride(-1) == 1)
    return x.device.type == "cuda" and plain and along_rows and ops.fake_quantizable(formats.get(quantise.format))


def _readers(quantise: Node) -> list[Node]:
    """Who reads the codes or the block scales, each once."""
    outputs = [output for output in quantise.users if output.args[1] < 2]
    return list(dict.fromkeys(user for output in outputs for user in output.users))


def _multiplies(reader: Node, quantise: Node) -> bool:
    """Whether a reader is a product that dequantises the codes in memory first, as its A and nothing else."""
    if reader.target is not SCALED_MM:
        return False
    places = [(place, arg.args[1]) for place, arg in enumerate(reader.args) if _comes_from(arg, quantise)]
    if places not in ([(0, 0), (1, 1)], [(0, 0), (1, 1), (2, 2)]):
        return False
    product = scaled_mm_of(reader)
    return None not in (product.a.format, product.b.format) and product.choice().dequantizes_a


def _comes_from(arg, quantise: Node) -> bool:
    return isinstance(arg, Node) and arg.target is operator.getitem and arg.args[0] is quantise


def _replace(quantise: Quantise, readers: list[Node]) -> None:
    """Let the products read the values, and all others the outer scale."""
    node = quantise.node
    options = {} if quantise.outer is None else {"outer": quantise.outer}
    with node.graph.inserting_before(node):
        expanded = new_node(node.graph, FAKE_QUANTIZE, (quantise.source, quantise.format), node.meta, **options)
        values, outer = (new_node(node.graph, operator.getitem, (expanded, i), node.meta) for i in range(2))
    for product in readers:
        product.args = (values, None, product.args[2], None, *product.args[4:])
    for output in list(node.users):
        output.replace_all_uses_with(outer)  # codes and block scales have no more uses
        node.graph.erase_node(output)
    node.graph.erase_node(node)
    if not outer.users:
        node.graph.erase_node(outer)
