"""Quantise and dequantise in one kernel, for matmuls that would dequantise: `quantize` returns values, not codes.

Entry: `fake_quantize(graph)`, on a forward, backward or inference graph after the partitioner. It runs after equal
quantises are merged, and before epilogue and horizontal fusion, which depend on the operands that this pass creates.

A GPU without FP4 matrix units multiplies 16-bit numbers. Most of its matmuls first dequantise A in memory, each matmul
separately (`Choice.dequantizes_a`). Codes and block scales need not be stored unless the backward pass or another
reader uses them. The matmuls then read a plain A, with A's global or row scale: equal numbers and equal kernels.
Matmuls that dequantise codes in registers are not changed, because codes are fewer bytes than 16-bit numbers.

Matmuls of experts dequantise A in memory, or A and B, and so does the library's matmul of MX operands. Each operand may
be dequantised values: activations and gradients along either dimension, and weights that are quantised in the graph. A
quantise along both dimensions may keep its codes along one of them: an activation's codes that are saved for the weight
gradient. MX values that bfloat16 cannot hold need a second matmul (`dequant_operand`); no value of a 16-bit number is
such a value, so a matmul of two operands of values needs none.
"""

import operator
from dataclasses import replace

from torch.fx import Graph, Node

from fp4compile._compat import statically_true
from fp4compile.formats import formats
from fp4compile.formats.grouping import Grouping
from fp4compile.formats.operand import Operand
from fp4compile.formats.quantize_spec import holds_values
from fp4compile.ops.matmul import SCALED_MM
from fp4compile.ops.nodes import A, B, Quantise, new_node, quantise_of, replace_results, scaled_mm_of
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.templates.launch import on_gpu


def fake_quantize(graph: Graph) -> int:
    """Let quantises on CUDA tensors return dequantised values where all readers would dequantise the codes.

    Returns the number of quantises changed. All decisions are made before any matmul is changed.
    """
    found = []
    for node in graph.find_nodes(op="call_function", target=QUANTIZE):
        quantise = quantise_of(node)
        dims = tuple(dim for dim in quantise.dims if _expands(quantise, dim))
        if dims:
            found.append((quantise, dims))
    for quantise, dims in found:
        _replace(quantise, dims)
    return len(found)


def _expands(quantise: Quantise, dim: int) -> bool:
    """Whether the op can return dequantised values along `dim`, and all readers of the codes would dequantise them."""
    x, fmt = quantise.x.meta["val"], formats.get(quantise.format)
    plain = (quantise.layout, quantise.scale_rule) == ("linear", "amax") and not quantise.values
    if not on_gpu(x) or not plain or not holds_values(fmt, x.dtype):
        return False
    readers = _readers(quantise, dim)
    if not readers:
        return False
    products = [scaled_mm_of(reader) for reader in readers if reader.target is SCALED_MM]
    dense = [each for each in products if each.spec.grouping in (Grouping.DENSE, Grouping.BATCHED)]
    if fmt.scale == "e4m3" and len(dense) == len(readers):
        return _reads_as_it_lies(quantise) and all(_dequantizes(reader, quantise, dim, True) for reader in readers)
    fits = not (fmt.square and quantise.seed is not None)  # or no kernel writes values
    return fits and all(_dequantizes(reader, quantise, dim) for reader in readers)


def _reads_as_it_lies(quantise: Quantise) -> bool:
    """Whether the kernel that writes dequantised values can read the tensor in rows."""
    plain = quantise.seed is None and not quantise.hadamard and not quantise.grouped
    unit_stride = statically_true(quantise.x.meta["val"].stride(-1) == 1)
    return plain and quantise.dims == (-1,) and unit_stride and not formats.get(quantise.format).square


def _readers(quantise: Quantise, dim: int) -> list[Node]:
    """The nodes that read the codes or the block scales along a dimension, each once."""
    data = _data(quantise, dim)
    outputs = [output for output in quantise.node.users if output.args[1] in (data, data + 1)]
    return list(dict.fromkeys(user for output in outputs for user in output.users))


def _data(quantise: Quantise, dim: int) -> int:
    """The index of the codes among the op's results; the block scales and the global or row scale follow."""
    return 3 * quantise.dims.index(dim)


def _dequantizes(reader: Node, quantise: Quantise, dim: int, a_alone: bool = False) -> bool:
    """Whether a reader is a matmul that first dequantises the codes, its A or its B, in memory.

    a_alone: whether the codes must be its A. Else a matmul without groups also has to dequantise the other operand, for
    the library's matmul.
    """
    place = _place(reader, quantise, dim) if reader.target is SCALED_MM else None
    if place is None or (a_alone and place != A):
        return False
    product = scaled_mm_of(reader)
    if product.index is not None or None in (product.a.format, product.b.format):
        return False
    expands = product.choice.dequantizes_a, product.choice.dequantizes_b
    return expands[place == B] if a_alone or product.offs is not None else all(expands)


def _place(product: Node, quantise: Quantise, dim: int) -> int | None:
    """The argument position of the codes, if codes and block scales are data and scales of one operand; else None."""
    data = _data(quantise, dim)
    places = [(place, arg.args[1] - data) for place, arg in enumerate(product.args)
              if isinstance(arg, Node) and arg.target is operator.getitem and arg.args[0] is quantise.node
              and arg.args[1] in (data, data + 1)]  # fmt: skip
    return next((place for place in (A, B) if places == [(place, 0), (place + 1, 1)]), None)


def _replace(quantise: Quantise, dims: tuple[int, ...]) -> None:
    """Let matmuls read dequantised values instead of codes and block scales along `dims`; other readers stay."""
    node, graph = quantise.node, quantise.node.graph
    with graph.inserting_before(node):
        new = replace(quantise, values=dims).new(graph, node.meta)
        outputs = [new_node(graph, operator.getitem, (new, i), node.meta) for i in range(3 * len(quantise.dims))]
    for dim in dims:
        for product in _readers(quantise, dim):
            place = _place(product, quantise, dim)
            read = scaled_mm_of(product)
            codes = read.a if place == A else read.b
            values = Operand(outputs[_data(quantise, dim)], None, codes.outer)
            product.args, product.kwargs = read.but(**{"a" if place == A else "b": values}).call
    replace_results(node, outputs)
    for output in outputs:
        if not output.users:
            graph.erase_node(output)
