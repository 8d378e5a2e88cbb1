"""The FLOPs of each matmul of a captured graph, and the kind of layer that it belongs to. Adds no guard.

The formulas are those of `torch.utils.flop_counter`, and more. A symbolic size counts as in the captured call.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from fp4compile._compat import statically_true
from fp4compile.analysis.find import weights_of
from fp4compile.analysis.gemm import Gemm, Input
from fp4compile.analysis.matmuls import computed_by
from fp4compile.analysis.views import root_of
from fp4compile.formats.grouping import Grouping
from fp4compile.ops.matmul import SCALED_MM
from fp4compile.ops.nodes import contracted

aten = torch.ops.aten
_EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
_GROUPED = re.compile(r"(^|_)grouped_mm(_|$)")
ATTENTION = re.compile(r"scaled_dot_product|flash_attention|efficient_attention|flex_attention|varlen_attn")
_CONVOLUTION = re.compile(r"conv")
_BATCHED = {aten.bmm.default, aten.baddbmm.default, aten.addbmm.default}


def count(node: Node) -> int | None:
    """FLOPs of a node, or None; each of two results of one operator has half of its FLOPs."""
    made = computed_by(node)
    if made is not node:
        both = count(made)
        return None if both is None else both // 2
    if node.target is SCALED_MM:
        sizes = [hint(size) for size in (*node.meta["val"].shape, contracted(node))]
        return None if None in sizes else 2 * math.prod(sizes)
    packet = _packet(node.target)
    formula = _CORRECTED.get(packet) or flop_registry.get(packet) or _formula(node.target)
    if formula is None:
        return None
    try:
        args, kwargs, out = pytree.tree_map(_sized, (node.args, node.kwargs, node.meta.get("val")))
        return formula(*args, **kwargs, out_val=out)
    except (_UnknownSize, AssertionError):  # torch's formulas assert the shapes that they expect
        return None


def others(graph: Graph, listed: set[Node]) -> list[Node]:
    """The nodes that have a FLOP formula in torch and are not in `listed`."""
    return [node for node in graph.nodes
            if node.op == "call_function" and node not in listed and _packet(node.target) in flop_registry]  # fmt: skip


class Categories:
    """The kind of layer that each matmul of one graph belongs to: one of `report.CATEGORIES`."""

    def __init__(self, graph: Graph, inputs: tuple[Input, ...], gemms: list[Gemm]):
        self.parameters = weights_of(graph, inputs)
        # The categories of the batched matmuls, by the root of each operand. A backward matmul whose own category is
        # unclear reads an operand of its forward matmul, and so gets the forward matmul's category.
        self.operands: dict[Node, set[str]] = {}
        for gemm in gemms:
            category = self._forward(gemm)
            if gemm.node.target in _BATCHED and category != "other":
                for operand in _tensors(gemm.node):
                    self.operands.setdefault(root_of(operand), set()).add(category)

    def of(self, gemm: Gemm) -> str:
        """The category of a matmul."""
        category = self._forward(gemm)
        if category != "other" or gemm.node.target not in _BATCHED:
            return category
        found = set().union(*(self.operands.get(root_of(operand), ()) for operand in _tensors(gemm.node)))
        return found.pop() if len(found) == 1 else "other"

    def _forward(self, gemm: Gemm) -> str:
        """The category that follows from the matmul alone; "other" where none does."""
        name = _operator_name(computed_by(gemm.node).target)
        operands = ((operand, root_of(operand)) for operand in _tensors(gemm.node))
        weights = [(operand, root) for operand, root in operands if root in self.parameters]
        if gemm.groups is not Grouping.DENSE or _GROUPED.search(name) or _EXPERTS.search(gemm.module):
            return "experts"
        if _CONVOLUTION.search(name):
            return "convolution"
        if ATTENTION.search(name):
            return "attention"
        # A layer's single matrix may have three dimensions, such as the heads of a projection.
        whole = gemm.product in ("fprop", "dgrad", "wgrad")
        for operand, root in weights:
            all_of_it = statically_true(operand.meta["val"].numel() == root.meta["val"].numel())
            if root.meta["val"].dim() >= 3 and not (whole and all_of_it):
                return "experts"
        if gemm.product == "attention":
            return "attention"
        return "dense" if gemm.product != "other" or weights else "other"


def _tensors(node: Node) -> list[Node]:
    return [arg for arg in node.args if isinstance(arg, Node) and isinstance(arg.meta.get("val"), torch.Tensor)]


def _packet(target: Any) -> Any:
    return getattr(target, "overloadpacket", target)


def _operator_name(target: Any) -> str:
    return getattr(target, "__name__", "").partition(".")[0]


# ---------------------------------------------------------------- formulas


def _formula(target: Callable) -> Callable | None:
    if _packet(target) in _OWN:
        return _OWN[_packet(target)]
    name = _operator_name(target)
    if _GROUPED.search(name):
        return _grouped_backward if name.endswith("_backward") else _grouped
    if "scaled_dot_product" in name:  # variants for CPUs and other devices take the arguments of flash attention
        backward = name.endswith("_backward")
        return flop_registry[getattr(aten, _FLASH + "_backward" if backward else _FLASH)]
    return None


_FLASH = "_scaled_dot_product_flash_attention"


def _product(a: torch.Tensor, b: torch.Tensor, *args, **kwargs) -> int:
    """[..., m, k] x [..., k, n]."""
    return 2 * a.numel() * b.shape[-1]


def _grouped(a: torch.Tensor, b: torch.Tensor, *args, **kwargs) -> int | None:
    """A grouped matmul. Operands of three dimensions have one matrix per group; others have one part per group."""
    if a.shape[-1] != b.shape[-2]:
        return None  # an operator of another library with other arguments
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _grouped_backward(a: torch.Tensor, b: torch.Tensor, *args, **kwargs) -> int | None:
    """One operator that computes both gradients, as in transformers."""
    forward = _grouped(a, b)
    return None if forward is None else 2 * forward


def _convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, _bias, *settings, out_val: Any, **kwargs
) -> int:
    """Each of both gradients has the forward pass's FLOPs. (torch counts a weight gradient as if there were no groups.)

    settings: stride, padding, dilation, transposed, output padding, groups, and which gradients are wanted.
    """
    *settings, wanted = settings
    return sum(wanted[:2]) * flop_registry[aten.convolution](x, w, None, *settings, out_val=grad)


_OWN = {aten.addbmm: lambda term, a, b, *args, **kwargs: _product(a, b), aten._int_mm: _product}
_CORRECTED = {aten.convolution_backward: _convolution_backward}


# ---------------------------------------------------------------- sizes


class _UnknownSize(Exception):
    """Raised for a size that depends on the data, and is unknown in the captured call."""


def _sized(value: Any) -> Any:
    """An argument of a node, with numbers for symbolic sizes and meta tensors for tensors."""
    if isinstance(value, Node):
        value = value.meta.get("val")
    if isinstance(value, torch.Tensor):
        return torch.empty([_hint(size) for size in value.shape], dtype=value.dtype, device="meta")
    return _hint(value) if isinstance(value, torch.SymInt) else value


def _hint(size: int | torch.SymInt) -> int:
    known = hint(size)
    if known is None:
        raise _UnknownSize
    return known


def hint(size: int | torch.SymInt) -> int | None:
    """A size in the call that was captured; None where it depends on the data."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else None
