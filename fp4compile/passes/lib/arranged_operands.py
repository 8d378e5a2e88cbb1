"""Write A once, in the order in which a GEMM kernel reads it, for all matmuls of one A.

`gemm_wgmma_sm90` reads a swizzled A (`Candidate.arrangement`). Without this pass, each matmul launches a kernel that
copies A to that order. In a graph, matmuls of the same A share the copy: q, k and v of packed weights, or gate and up.
Where only matmuls read a gathered A, such as the tokens of experts, the copy gathers. And where Inductor computes A and
only matmuls read it, for example silu(gate) * up or the end of a norm, PyTorch operations in the graph swizzle A
(`SwizzledA.by_operations`). Inductor computes them in its kernel of A, so that A is written once and not copied. Where
that kernel gathers rows, nothing would be gained: on an H100, 32768 gathered tokens of 2048 elements took Inductor 187
us in this order, 66 us in their own.

`gemm_wgmma_sm90` starts before the kernel ahead of it has ended, and reads B and the offsets of groups meanwhile
(`device.dependent_launch`). After its own copy of A that is safe, because these are arguments of both kernels. Without
the copy, a kernel that writes them may run in between. So this is done only where B is an input of the graph, which no
kernel of the graph writes, and where the offsets are one too, or A depends on them: then they are in memory before
Inductor's kernel of A starts, which waits for all kernels ahead of it.

Entries: `arranged_operands(graph)`, before a graph's matmuls are lowered, and `written_arranged(node)`.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from fp4compile.formats.operand import Arguments, Operand
from fp4compile.ops.matmul import SCALED_MM
from fp4compile.ops.nodes import RESHAPES, ScaledMM, is_pointwise, reached, readers, scaled_mm_of
from fp4compile.passes.lib.autotune import fastest
from fp4compile.passes.lib.operations import contiguous
from fp4compile.passes.lib.traces import Traces
from fp4compile.templates.choose import named
from fp4compile.templates.gemm.call import aligned
from fp4compile.templates.gemm.swizzled_a_sm90 import SwizzledA
from fp4compile.templates.launch import on_gpu
from fp4compile.templates.multiply import call_of

FEW_ROWS = 64  # rows of A up to which copying it costs less than a launch
_VIEWS = {*RESHAPES, torch.ops.aten.view.dtype}
_INPUTS = ("placeholder", "get_attr")
# Views in other strides, which Inductor reads in the kernel of their reader.
_PARTS = (torch.ops.aten.slice.Tensor, torch.ops.aten.select.int)
_GATHERS = (torch.ops.aten.index.Tensor, torch.ops.aten.index_select.default, torch.ops.aten.embedding.default)


@dataclass(frozen=True)
class Arranged:
    """The arranged A of a matmul. node: its value. replaces_a: whether nothing else reads A, so A is not in memory."""

    node: Node
    replaces_a: bool


def arranged_operands(graph: Graph, traces: Traces) -> dict[Node, Arranged]:
    """Add arranged operands to the graph; returns the arranged operand of each matmul that reads one.

    traces: those made in the graph.
    """
    alike: dict[Hashable, list[ScaledMM]] = {}
    for node in graph.nodes:
        product = scaled_mm_of(node) if node.target is SCALED_MM else None
        if product is not None and (key := _key(product)) is not None:
            alike.setdefault(key, []).append(product)
    found = {}
    for products in alike.values():
        written = written_arranged(products[0].a.data)
        gathered = None if written else _gathered(products[0].a.data)
        if written or gathered or len(products) > 1:
            made = _by_operations(products[0], traces) if written else _by_launch(products[0], gathered, traces)
            arranged = Arranged(made, written or gathered is not None)
            found |= dict.fromkeys((product.node for product in products), arranged)
    return found


def written_arranged(node: Node) -> bool:
    """Whether Inductor computes a node's value, and all its readers are matmuls that can read it arranged."""
    source = _source(node)
    if not is_pointwise(source) or _gathers(source):
        return False
    return all(_reads_written(user, value) for user, value in readers(source, _VIEWS))


def _gathered(node: Node) -> tuple[Node, Node] | None:
    """(x, index) of a node whose value is x[index], rows of a matrix, and is read arranged alone; otherwise None."""
    if node.target is not torch.ops.aten.index.Tensor:
        return None
    x, (index, *others) = node.args
    if index is None or others or x.meta["val"].dim() != 2:
        return None
    rows = index.meta["val"]
    if rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64) or not on_gpu(rows):
        return None
    return (x, index) if all(_reads_arranged(user, value) for user, value in readers(node, _VIEWS)) else None


def _gathers(node: Node) -> bool:
    """Whether Inductor gathers rows in the kernel that computes a pointwise operation."""

    def sources(each: Node) -> Iterator[Node]:
        return map(_source, each.all_input_nodes if is_pointwise(each) or each.target in _PARTS else ())

    return any(each.target in _GATHERS for each in reached(node, sources))


def _reads_arranged(user: Node, value: Node) -> ScaledMM | None:
    """The matmul that can read a plain value as its arranged A, and reads it only there; otherwise None."""
    if user.target is not SCALED_MM:
        return None
    product = scaled_mm_of(user)
    others = [*product.b.tensors, product.bias, *product.auxiliaries, product.offs]
    if product.a.data is not value or value in others or product.a.format is not None or _key(product) is None:
        return None
    return product


def _reads_written(user: Node, value: Node) -> bool:
    """Whether a node is a matmul of many rows that may read what Inductor writes arranged."""
    product = _reads_arranged(user, value)
    if product is None:
        return False
    p = product.problem
    many = p.static and p.m > FEW_ROWS and p.k == product.values().a.k
    return many and (product.offs is None or _written_before(_source(product.offs), _source(value)))


def _written_before(offs: Node, node: Node) -> bool:
    """Whether the groups' offsets are known before a node is computed: as a graph input, or as what it depends on."""
    return offs.op in _INPUTS or offs in reached(node, lambda each: each.all_input_nodes)


def _key(product: ScaledMM) -> Hashable | None:
    """A key of the matmul's arranged A; None if its kernel reads plain A, or the graph may write its B."""
    arrangement = _arrangement(product)
    if arrangement is None or any(_source(each).op not in _INPUTS for each in (product.b.data, product.b.scales)):
        return None
    tensors = (product.a.data, product.a.scales, product.offs)
    return str(arrangement), product.a.format, *map(_seen, tensors)


def _arrangement(product: ScaledMM) -> SwizzledA | None:
    choice = fastest(product) if product.on_gpu and product.index is None else None
    if choice is None or not choice.traceable or product.problem.empty:
        return None
    arrangement = named(choice.kernel).arrangement
    return None if arrangement is None else arrangement(product.problem, choice.config)


def _seen(node: Node | None) -> Hashable:
    if node is None:
        return None
    tensor = node.meta["val"]
    layout = (tensor.shape[-1:], tensor.numel()) if contiguous(tensor) else (tensor.shape, tensor.stride())
    return _source(node), str((tensor.dtype, *layout, tensor.storage_offset()))


def _source(node: Node) -> Node:
    """The node that a node is a view of."""
    while node.target in _VIEWS:
        node = node.all_input_nodes[0]
    return node


def _by_operations(product: ScaledMM, traces: Traces) -> Node:
    """Operations that arrange a matmul's plain A, before the matmul."""
    arrangement = _arrangement(product)
    return _stored(product, traces, str(arrangement), lambda a: arrangement.by_operations(a), [product.a.data])


def _by_launch(product: ScaledMM, gathered: tuple[Node, Node] | None, traces: Traces) -> Node:
    """The launch that arranges a matmul's A, before the matmul. gathered: see `_gathered`; then A is not read."""
    arrangement, a, b = _arrangement(product), product.a, product.b
    first = (a.data, None) if gathered is None else gathered
    tensors = [*first, a.scales, a.outer, *b.tensors, product.offs]
    nodes = [each for each in tensors if isinstance(each, Node)]
    for node in nodes:
        node.meta["inductor_realize_to_strides"] = True
    size = a.data.meta["val"].shape

    def launch(*values):
        left = iter(values)
        x, index, *operands, offs = (next(left) if isinstance(each, Node) else each for each in tensors)
        data = x if index is None else x.new_empty(size)
        rows = None if offs is None else size[0]
        read, weight = Operand(data, *operands[:2], a.format), Operand(*operands[2:], b.format)
        call = call_of(Arguments.of(read, weight, None, product.spec.out_dtype, offs=offs, rows=rows))
        return arrangement.of_call(call, None if index is None else (aligned(x.contiguous()), index.contiguous()))

    given = tuple(isinstance(each, Node) for each in tensors)
    key = str(arrangement), product.spec, str(size), given
    return _stored(product, traces, key, torch.func.functionalize(launch), nodes)


def _stored(product: ScaledMM, traces: Traces, key: Hashable, function: Callable, nodes: Sequence[Node]) -> Node:
    """`function` of nodes, computed before a matmul by its trace (`Traces.add`). Inductor stores the result as traced.

    It must not compute the result inside of a kernel of its own that reads a view of it: the view's dtype may be one,
    such as E8M0, for which Inductor generates no kernels.
    """
    graph = product.node.graph
    with graph.inserting_before(product.node):
        result = traces.add(graph, key, function, nodes)
    result.meta["inductor_realize_to_strides"] = True
    return result
