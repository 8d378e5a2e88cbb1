"""Rewrite the planned products of a joint graph into quantise -> scaled_mm.

Entry: `rewrite(graph, decisions)`. A product left @ right contracts left's last dimension with right's first, and
`scaled_mm` takes both operands with the contraction last. So the left operand is quantised along its last dimension
and the right one along its first; a transposition in the graph only swaps which dimension of the source that is,
and never costs a copy.

New nodes take the metadata of the product they serve (activation checkpointing, partitioner tags, module stacks) and
their value from the op's fake implementation.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from fp4compile import _compat, formats
from fp4compile.passes.find import Gemm, Operand
from fp4compile.passes.graph import fake_value, new_node
from fp4compile.passes.plan import Decision, Treatment
from fp4compile.passes.saved import mark
from fp4compile.passes.views import is_cast, source_of, value_key

aten = torch.ops.aten


def rewrite(graph: Graph, decisions: list[Decision]) -> int:
    """Rewrite every quantised decision; returns how many."""
    builder = _Builder(graph)
    chosen = [d for d in decisions if d.reason is None and d.gemm.packed is None]
    built = [(decision.gemm.node, builder.build(decision)) for decision in chosen]
    # Only now: until every replacement is built, the decisions' operands must stay what they name.
    for node, replacement in built:
        node.replace_all_uses_with(replacement)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    return len(chosen)


class _Builder:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.quantised: dict[tuple, tuple[Node, Node | None, Node | None]] = {}
        self.seeds: dict[tuple, Node] = {}
        self.drawn: dict[torch.device, Node] = {}

    def build(self, decision: Decision) -> Node:
        """The quantised product, inserted before the one that it will replace."""
        gemm, node = decision.gemm, decision.gemm.node
        dtype = node.meta["val"].dtype
        with self.graph.inserting_before(node):
            args = (*self._operand(gemm, gemm.left, decision.left, -1),
                    *self._operand(gemm, gemm.right, decision.right, -2))  # fmt: skip
            if gemm.bias is None:
                return self._scaled_mm(args, None, dtype, node.meta)
            bias = gemm.bias.meta["val"]
            # One element, to be broadcast, has one dimension as well.
            one_a_column = bias.dim() == 1 and _compat.statically_true(bias.shape[0] == node.meta["val"].shape[-1])
            if (gemm.beta, gemm.alpha) == (1, 1) and one_a_column:
                return self._scaled_mm(args, gemm.bias, dtype, node.meta)
            return self._general_addmm(gemm, args, dtype)

    def _general_addmm(self, gemm: Gemm, args: tuple, dtype: torch.dtype) -> Node:
        """beta * bias + alpha * product in float32, then the cast, for a bias that is scaled or no plain row."""
        meta = gemm.node.meta
        product = self._scaled_mm(args, None, torch.float32, meta)
        if gemm.alpha != 1:
            product = self._call(aten.mul.Tensor, (product, gemm.alpha), meta)
        if gemm.beta != 0:
            product = self._call(aten.add.Tensor, (product, gemm.bias), meta, alpha=gemm.beta)
        if dtype != torch.float32:
            product = self._call(torch.ops.prims.convert_element_type.default, (product, dtype), meta)
        return product

    def _scaled_mm(self, args: tuple, bias: Node | None, dtype: torch.dtype, meta: dict) -> Node:
        return self._call(torch.ops.fp4compile.scaled_mm.default, (*args, bias, dtype), meta)

    def _operand(self, gemm: Gemm, operand: Operand, treatment: Treatment | None, dim: int) -> tuple:
        """(data, scales, outer, format), contraction last; `dim` is the contraction in the operand as multiplied."""
        if operand.transposed:
            dim = -3 - dim  # -1 <-> -2
        meta = self._meta_for(gemm, operand)
        source = operand.source
        if operand.role == "dgrad_w":
            _casts_never_saved(source)
        if operand.repeated:
            source = self._call(aten.select.int, (source, 0, 0), meta)
        if treatment is None:
            if dim == -1:
                return source, None, None, None
            *batch, rows, columns = range(source.meta["val"].dim())
            # Not aten.transpose: the graph is past the decompositions that Inductor counts on.
            swap = self._call(aten.permute.default, (source, [*batch, columns, rows]), meta)
            return swap, None, None, None
        key = (value_key(source), treatment, dim)
        if key not in self.quantised:
            self.quantised[key] = self._quantize(source, treatment, dim, meta)
            if operand.role == "wgrad_x":
                mark(self.quantised[key][0].args[0], gemm.node.name)
        return *self.quantised[key], treatment.format

    def _quantize(self, source: Node, treatment: Treatment, dim: int, meta: dict) -> tuple:
        kwargs: dict[str, Any] = {}
        if treatment.outer is not None:
            device = source.meta["val"].device
            kwargs["outer"] = self._call(
                aten.full.default, ([], treatment.outer), meta, dtype=torch.float32, device=device
            )
        if treatment.layout != "linear":
            kwargs["layout"] = treatment.layout
        if treatment.stochastic:
            kwargs["seed"] = self._seed(source, meta)
        if treatment.hadamard:
            kwargs["hadamard"] = True
        node = self._call(torch.ops.fp4compile.quantize.default, (source, treatment.format, dim), meta, **kwargs)
        data, scales, computed = (self._call(operator.getitem, (node, i), meta) for i in range(3))
        known = formats.get(treatment.format)
        if known.outer is None:
            computed = None
        return data, scales if known.scale else None, kwargs.get("outer", computed)

    def _seed(self, source: Node, meta: dict) -> Node:
        """The seed of a gradient, for both of its directions: an element of the tensor that a step draws."""
        key, device = value_key(source), source.meta["val"].device
        if key not in self.seeds:
            meta = meta | {"partitioner_tag": "must_be_in_backward"}
            if device not in self.drawn:
                self.drawn[device] = self._call(_compat.RANDOM_SEEDS, (0, device), meta)
            drawn = self.drawn[device]
            index = drawn.args[0]
            drawn.args = (index + 1, device)
            drawn.meta["val"] = fake_value(drawn)
            self.seeds[key] = self._call(aten.select.int, (drawn, 0, index), meta)
        return self.seeds[key]

    def _meta_for(self, gemm: Gemm, operand: Operand) -> dict:
        """Metadata of a quantise: where the partitioner and activation checkpointing shall count it."""
        if operand.role == "dgrad_w":
            # A packed copy of a parameter that is there anyway: never saved, made when the backward needs it.
            return gemm.node.meta | {"partitioner_tag": "must_be_in_backward"}
        # An activation for wgrad is part of the forward: recomputed where the layer's forward is recomputed.
        meta = gemm.forward.meta if operand.role == "wgrad_x" else gemm.node.meta
        if "recompute" in meta:
            # A checkpointing policy that saves the product says nothing of its operands: these come from what is saved.
            return meta | {"recompute": CheckpointPolicy.PREFER_RECOMPUTE}
        return meta

    def _call(self, target: Callable, args: tuple, meta: dict, **kwargs: Any) -> Node:
        return new_node(self.graph, target, args, meta, **kwargs)


def _casts_never_saved(node: Node) -> None:
    """Mark the casts of a weight: saved for the backward, they would be copies of the parameter."""
    source = source_of(node)
    while source is not None:
        if is_cast(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node, source = source, source_of(source)
