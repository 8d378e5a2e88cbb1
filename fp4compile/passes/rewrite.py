"""Rewrite the planned matmuls of a joint graph into quantise -> scaled_mm.

Entry: `rewrite(graph, decisions)`. A matmul A @ B contracts A's last dimension with B's second-to-last, and
`scaled_mm` takes both operands with the contraction last. So A is quantised along its last dimension and B along its
second-to-last. A transposition in the graph only changes the dimension along which the operand's source is quantised;
it never costs a copy.

New nodes take their metadata from the matmul they serve (activation checkpointing, partitioner tags, module stacks)
and their value from the op's fake implementation.
"""

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fp4compile import _compat
from fp4compile.analysis.gathers import is_gather
from fp4compile.analysis.gemm import Gemm, GemmOperand
from fp4compile.analysis.matmuls import computed_by
from fp4compile.analysis.plan import Decision, Treatment
from fp4compile.analysis.views import is_cast, source_of, value_key, view_of
from fp4compile.formats import formats
from fp4compile.formats.grouping import Grouping
from fp4compile.formats.operand import Operand
from fp4compile.ops.nodes import (
    Quantise,
    expert_weights_of,
    fake_value,
    gathered_weight_of,
    is_gathered,
    new_node,
    product_of,
)
from fp4compile.ops.quantize import DEQUANTIZE, GATHERED_WEIGHT
from fp4compile.passes.lib.notes import mark, name_product
from fp4compile.templates.quantize.source import lies_transposed

aten = torch.ops.aten


def rewrite(graph: Graph, decisions: list[Decision]) -> int:
    """Rewrite every matmul that is to be quantised or reads a dequantised operand; returns how many there are.

    Matmuls of packed layers are already quantised, and only get a name.
    """
    for decision in decisions:
        if decision.gemm.packed is not None:
            name_product(decision.gemm.node)
    chosen = [d for d in decisions if d.reason is None and d.gemm.packed is None]
    builder, dequantised = _Builder(graph), [d for d in decisions if d.dequantised]
    # Matmuls are replaced only when all replacements are built: until then, decisions name nodes of the old graph.
    replacements = [builder.build(decision) for decision in chosen]
    for decision in dequantised:
        builder.dequantise(decision)
    for decision, replacement in zip(chosen, replacements, strict=True):
        decision.gemm.node.replace_all_uses_with(replacement)
        graph.erase_node(decision.gemm.node)
    graph.eliminate_dead_code()
    _never_dequantised_again(graph)
    return len(chosen) + len(dequantised)


def _never_dequantised_again(graph: Graph) -> None:
    """Make activation checkpointing save dequantised gathered weights, because it lacks the codes later."""
    for node in graph.find_nodes(op="call_function", target=GATHERED_WEIGHT):
        if "recompute" in node.meta and not gathered_weight_of(node).recompute:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def insert(graph: Graph, decisions: list[Decision]) -> list[Node]:
    """Insert the quantised matmul of each decision before the matmul, which stays; returns the new matmuls.

    decisions: about matmuls that are to be quantised. A quantise that several matmuls share is inserted once.
    """
    builder = _Builder(graph)
    return [builder.build(decision) for decision in decisions]


class _Builder:
    """Builds the quantised matmuls of one graph.

    quantised: (data, scales, global or row scale) of every quantised value, so that matmuls share a quantise.
    seeds: the seed node of each stochastically rounded value. drawn: the node that draws all seeds of a device.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.quantised: dict[tuple, tuple[Node, Node | None, Node | None]] = {}
        self.seeds: dict[tuple, Node] = {}
        self.drawn: dict[torch.device, Node] = {}

    def build(self, decision: Decision) -> Node:
        """Insert the quantised matmul before the matmul that it will replace; returns its node."""
        gemm, node = decision.gemm, decision.gemm.node
        name_product(node)
        dtype = node.meta["val"].dtype
        with self.graph.inserting_before(node):
            if gemm.offs is not None:
                return self._grouped(decision, dtype)
            if gemm.index is not None:
                return self._gathered(decision, dtype)
            return self._product(decision, dtype, bias=gemm.bias)

    def dequantise(self, decision: Decision) -> None:
        """Let a gradient's matmul read its other operand as the forward matmul has it, dequantised.

        The forward matmul's own quantise makes the codes, along the dimension that the forward matmul contracts.
        """
        gemm, node = decision.gemm, computed_by(decision.gemm.node)
        name_product(decision.gemm.node)
        if gemm.offs is not None:
            gemm = replace(gemm, groups=Grouping.RAGGED_ROWS)
        for operand, treatment, dim in ((gemm.a, decision.a, -2), (gemm.b, decision.b, -1)):
            if treatment is not None and operand.argument is not None:
                argument, swapped = operand.argument
                with self.graph.inserting_before(node):
                    values = self._dequantised(gemm, operand, treatment, dim, -3 - dim if swapped else dim)
                    node.replace_input_with(argument, values)

    def _dequantised(self, gemm: Gemm, operand: GemmOperand, treatment: Treatment, dim: int, place: int) -> Node:
        """The dequantised operand in place of `operand.argument`, whose dimension `place` is the quantised one."""
        argument, _ = operand.argument
        value, meta = argument.meta["val"], gemm.node.meta | {"partitioner_tag": "must_be_in_backward"}
        codes = self._operand(gemm, operand, treatment, dim)
        quantise = codes.data.args[0]
        if operand.role == "wgrad_x":
            mark(quantise, gemm.node.name)
        elif not is_gather(view_of(operand.source).root):  # a saved weight is a copy of the parameter, as in _meta_for
            for node in (quantise, *quantise.users):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        offs = {} if codes.outer is None or codes.outer.meta["val"].dim() != 1 else {"offs": gemm.offs}
        data = codes.data.meta["val"]
        args = codes.data, codes.scales, codes.outer, treatment.format, self._size(argument, place, meta), value.dtype
        values = self._call(DEQUANTIZE, args, meta, **(offs if data.dim() == 2 else {}))
        values = values if place == -1 else self._swapped(values, meta)
        if value.dim() > data.dim():  # one matrix that repeats along a batch
            shape = [self._size(argument, d, meta) for d in range(value.dim())]
            values = self._call(aten.expand.default, (values, shape), meta)
        return values

    def _grouped(self, decision: Decision, dtype: torch.dtype) -> Node:
        """The grouped matmul. Groups of the contraction are rows of both operands, quantised along these rows."""
        gemm, meta = decision.gemm, decision.gemm.node.meta
        by_rows = gemm.groups is Grouping.RAGGED_ROWS
        source = gemm.a.source
        rows = self._size(source, -1 if gemm.a.transposed == by_rows else -2, meta)
        transposed = not by_rows and lies_transposed(gemm.node.meta["val"])  # a gradient has its weight's memory layout
        product = self._product(decision, dtype, swapped=transposed, offs=gemm.offs, rows=rows)
        if transposed:
            return self._swapped(product, meta)
        return self._transposed(product, meta) if gemm.swapped else product

    def _gathered(self, decision: Decision, dtype: torch.dtype) -> Node:
        """The matmul with matrices gathered from the weight; W @ x as the transpose of x^T @ W^T."""
        gemm = decision.gemm
        weight_is_a = gemm.a.parameter is not None
        product = self._product(decision, dtype, swapped=weight_is_a, index=gemm.index)
        return self._transposed(product, gemm.node.meta) if weight_is_a else product

    def _transposed(self, product: Node, meta: dict) -> Node:
        """The contiguous transpose: later operators may depend on contiguity."""
        swapped = self._swapped(product, meta)
        return self._call(aten.clone.default, (swapped,), meta, memory_format=torch.contiguous_format)

    def _size(self, node: Node, dim: int, meta: dict) -> int | Node:
        """A size of a node's tensor: a number, or a node where it is symbolic."""
        size = node.meta["val"].shape[dim]
        if isinstance(size, int):
            return size
        return self._call(aten.sym_size.int, (node, dim % node.meta["val"].dim()), meta)

    def _product(self, decision: Decision, dtype: torch.dtype, swapped: bool = False, **fields: Any) -> Node:
        """The matmul node of a decision. swapped: computed as B @ A. fields: further arguments of `product_of`."""
        gemm = decision.gemm
        a, b = self._operand(gemm, gemm.a, decision.a, -1), self._operand(gemm, gemm.b, decision.b, -2)
        left, right = (b, a) if swapped else (a, b)
        product = product_of(left, right, dtype, fast_accumulation=decision.fast_accumulation, **fields)
        return product.new(self.graph, gemm.node.meta)

    def _operand(self, gemm: Gemm, operand: GemmOperand, treatment: Treatment | None, dim: int) -> Operand:
        """An operand whose tensors are nodes, with the contraction last.

        dim: the contraction's dimension, from the end, in the operand as the graph multiplies it.
        """
        if operand.transposed:
            dim = -3 - dim  # -1 <-> -2
        meta = self._meta_for(gemm, operand)
        source = operand.source
        if operand.packed:
            return self._for_batch(gemm, treatment, self._packed(operand, meta), meta)
        if operand.role == "dgrad_w":
            _casts_never_saved(source)
        if operand.repeated:
            source = self._call(aten.select.int, (source, 0, 0), meta)
        if treatment is None:
            if dim == -1:
                return Operand(source)
            return Operand(self._swapped(source, meta))
        # A weight is one matrix for each group. In every other operand, groups are rows of the quantised tensor.
        offs = None if source.meta["val"].dim() == 3 else gemm.offs
        if offs is not None and (dim == -2) != (gemm.groups is Grouping.RAGGED_CONTRACTION):
            source, dim = self._swapped(source, meta), -3 - dim
        alone = offs is not None or (gemm.groups is not Grouping.DENSE and treatment.per_group)
        key = (value_key(source), treatment, dim, alone, value_key(offs))
        if key not in self.quantised:
            self.quantised[key] = self._quantize(source, treatment, dim, meta, (offs,) if alone else ())
            if operand.role == "wgrad_x":
                mark(self.quantised[key][0].args[0], gemm.node.name)
        return self._for_batch(gemm, treatment, self.quantised[key], meta)

    def _packed(self, operand: GemmOperand, meta: dict) -> tuple:
        """(data, scales, global or row scale) of a gathered weight, of all packed experts, or of one expert."""
        if is_gathered(operand.source):
            codes = gathered_weight_of(operand.source).operand_for(str(operand.role))
            return codes.data, codes.scales, codes.outer
        weights = expert_weights_of(operand.source).weights
        parts = weights.data, weights.scales, weights.outer
        if operand.expert is None:
            return parts
        return tuple(part and self._call(aten.select.int, (part, 0, operand.expert), meta) for part in parts)

    def _for_batch(self, gemm: Gemm, treatment: Treatment, quantised: tuple, meta: dict) -> Operand:
        """The operand of a quantised value; in a batch, each matrix's global scale is repeated for its rows."""
        data, scales, outer = quantised
        if gemm.groups in (Grouping.BATCHED, Grouping.GATHERED) and treatment.per_group:
            shape = [*data.meta["val"].shape[:2], 1]
            outer = self._call(aten.view.default, (outer, [-1, 1, 1]), meta)
            outer = self._call(aten.expand.default, (outer, shape), meta)
            outer = self._call(aten.clone.default, (outer,), meta, memory_format=torch.contiguous_format)
        return Operand(data, scales, outer, formats.get(treatment.format))

    def _swapped(self, source: Node, meta: dict) -> Node:
        """`source` with the last two dimensions exchanged."""
        *batch, rows, columns = range(source.meta["val"].dim())
        # Not aten.transpose: the graph is already decomposed, and Inductor expects no transpose from here on.
        return self._call(aten.permute.default, (source, [*batch, columns, rows]), meta)

    def _quantize(self, source: Node, treatment: Treatment, dim: int, meta: dict, groups: tuple = ()) -> tuple:
        """(data, scales, global or row scale) of a new quantise of `source` along `dim`; None for absent scales.

        groups: (offsets,) for groups, (None,) for a batch of matrices, each with its own global scale; otherwise ().
        """
        outer, device = treatment.outer, source.meta["val"].device
        if outer is not None and not isinstance(outer, Node):
            outer = self._call(aten.full.default, ([], outer), meta, dtype=torch.float32, device=device)
        node = Quantise(
            None, source, treatment.format, (dim,), next(iter(groups), None), outer,
            self._seed(source, meta) if treatment.stochastic else None, treatment.layout,
            hadamard=treatment.hadamard, scale_rule=treatment.scale_rule, each_matrix=groups == (None,),
        ).new(self.graph, meta)  # fmt: skip
        data, scales, computed = (self._call(operator.getitem, (node, i), meta) for i in range(3))
        fmt = formats.get(treatment.format)
        computed = None if fmt.outer is None else computed
        return data, scales if fmt.scale else None, computed if outer is None else outer

    def _seed(self, source: Node, meta: dict) -> Node:
        """The seed for rounding a gradient, equal along both dimensions.

        It is one element of the seeds that each step draws. One node draws all seeds of a device; each new seed
        increases its count by one.
        """
        key, device = value_key(source), source.meta["val"].device
        if key not in self.seeds:
            meta = meta | {"partitioner_tag": "must_be_in_backward"}
            if device not in self.drawn:
                self.drawn[device] = self._call(_compat.random_seeds(), (0, device), meta)
            drawn = self.drawn[device]
            index = drawn.args[0]
            drawn.args = (index + 1, device)
            drawn.meta["val"] = fake_value(drawn)
            self.seeds[key] = self._call(aten.select.int, (drawn, 0, index), meta)
        return self.seeds[key]

    def _meta_for(self, gemm: Gemm, operand: GemmOperand) -> dict:
        """Metadata of a quantise, from which the partitioner and activation checkpointing place and recompute it."""
        if operand.role == "dgrad_w" and not is_gather(view_of(operand.source).root):
            # The packed weight is a copy of a parameter. Saving it would cost memory; the backward recomputes it. A
            # weight that the graph gathers would be saved itself, unless the backward gathers it again.
            return gemm.node.meta | {"partitioner_tag": "must_be_in_backward"}
        # The activation of wgrad belongs to the forward, and is recomputed where the layer's forward is recomputed.
        meta = gemm.forward.meta if operand.role in ("wgrad_x", "dgrad_w") else gemm.node.meta
        if "recompute" in meta:
            # A checkpointing policy may save the matmul. Its operands are then still recomputed.
            return meta | {"recompute": CheckpointPolicy.PREFER_RECOMPUTE}
        return meta

    def _call(self, target: Callable, args: tuple, meta: dict, **kwargs: Any) -> Node:
        return new_node(self.graph, target, args, meta, **kwargs)


def _casts_never_saved(node: Node) -> None:
    """Mark the casts of a weight to be recomputed: a cast saved for the backward would be a copy of the parameter."""
    source = source_of(node)
    while source is not None:
        if is_cast(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node, source = source, source_of(source)
