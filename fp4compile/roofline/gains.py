"""Predicted times of the products of a graph, for the report of `explain`.

Each layer is predicted separately, with its products in the graph: an activation that several layers read counts as
quantised once for each. In a graph without gradients, weights count as quantised beforehand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from fp4compile.analysis import flops
from fp4compile.analysis.gemm import Gemm
from fp4compile.analysis.plan import Decision
from fp4compile.formats import formats
from fp4compile.hardware import Gpu
from fp4compile.recipe import Recipe
from fp4compile.roofline import model as roofline
from fp4compile.roofline.model import Experts, Prediction, Use


@dataclass(frozen=True)
class Products:
    """Which products of each layer a graph has.

    by_layer: the products' names in the order of `roofline.PRODUCTS`, by the layer's forward node. gradients: whether
    the graph has gradients.
    """

    by_layer: Mapping[Node, tuple[str, ...]]
    gradients: bool

    @classmethod
    def of(cls, gemms: Sequence[Gemm]) -> "Products":
        found: dict[Node, set[str]] = {}
        for gemm in gemms:
            if _is_linear(gemm):
                found.setdefault(gemm.forward, set()).add(gemm.product)
        by_layer = {node: tuple(name for name in roofline.PRODUCTS if name in names) for node, names in found.items()}
        return cls(by_layer, any(names != {"fprop"} for names in found.values()))

    def predict(self, gemm: Gemm, uses: Mapping[str, Use | None], gpu: Gpu, recipe: Recipe) -> Prediction | None:
        """The times of a product's layer; None for products that the model does not cover, and for unknown sizes."""
        sizes = tuple(map(flops.hint, _layer(gemm)))
        if not _is_linear(gemm) or not all(sizes):
            return None
        experts = _experts(gemm)
        if gemm.groups is not None and experts is None:
            return None
        packed = gemm.packed is not None or gemm.packed_weight is not None
        kept = packed or (not self.gradients and recipe.weight_cache != "off")
        return roofline.layer(uses, gpu, *sizes, products=self.by_layer[gemm.forward], packed=kept, experts=experts)


def predicted(decisions: Sequence[Decision], recipe: Recipe, gpu: Gpu) -> dict[Node, tuple[float, float]]:
    """(seconds in bf16, seconds as decided) of each product that the model covers, by the product's node."""
    products = Products.of([decision.gemm for decision in decisions])
    uses: dict[Node, dict[str, Use | None]] = {}
    for decision in decisions:
        uses.setdefault(decision.gemm.forward, {}).update(_uses(decision))
    found = {}
    for decision in decisions:
        gemm = decision.gemm
        if _is_linear(gemm):
            layer = products.predict(gemm, uses[gemm.forward], gpu, recipe)
            if layer is not None:
                own = layer.of_product(gemm.product)
                found[gemm.node] = (own.plain_seconds, own.seconds)
        elif gemm.groups is None and decision.reason is not None:
            seconds = _seconds(gemm, gpu)
            if seconds is not None:
                found[gemm.node] = (seconds, seconds)
    return found


def _uses(decision: Decision) -> dict[str, Use | None]:
    """How a decision quantises the operands, by role. Packed weights' products have operands without roles."""
    gemm = decision.gemm
    found: dict[str, Use | None] = {}
    for side, role, treatment in ((gemm.a, "fprop_x", decision.a), (gemm.b, "fprop_w", decision.b)):
        own = None if side is None else side.role
        if treatment is not None:
            found[own or role] = Use(
                formats.get(treatment.format), treatment.outer is not None, treatment.stochastic, treatment.hadamard
            )
    return found


def _is_linear(gemm: Gemm) -> bool:
    """Whether a product belongs to a linear layer, with one matrix or experts: the products that the model covers."""
    return gemm.product in roofline.PRODUCTS and bool(_layer(gemm)) and gemm.forward is not None


def _experts(gemm: Gemm) -> Experts | None:
    """The number and the grouping of the layer's matrices; None for one matrix, and where the number is unknown."""
    if gemm.groups is None:
        return None
    if gemm.offs is not None:
        count, grouping = flops.hint(gemm.offs.meta["val"].shape[0]), "rows"
    else:
        count, grouping = flops.hint(gemm.node.meta["val"].shape[0]), gemm.groups
    return Experts(count, grouping) if count else None


def _layer(gemm: Gemm) -> tuple:
    """(tokens, out features, in features) of a product's layer; for packed weights, the product's own sizes."""
    return gemm.layer if gemm.packed is None else gemm.dims


def _seconds(gemm: Gemm, gpu: Gpu) -> float | None:
    """Seconds of a product that is left alone; for attention, and where sizes are unknown, seconds of its FLOPs alone.

    Fused attention kernels do not write values between their products, which are separate on the meta device.
    """
    count = flops.count(gemm.node)
    if not count:
        return None
    m, n, k = (None, None, None) if gemm.product == "attention" or not gemm.dims else map(flops.hint, gemm.dims)
    return roofline.product(gpu, count, (m, n, k) if m and n and k else None).seconds
