"""Predicted times of the products of a graph, by `fp4compile.roofline`: the recipe's `min_gain`, the report's figures.

A layer is judged with those of its products that the graph has, as if it were alone: an activation that several layers
read is quantised once for each here. The weight of a graph without gradients is taken to be quantised beforehand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from fp4compile.analysis import flops
from fp4compile.analysis.gemm import Gemm
from fp4compile.formats import formats
from fp4compile.hardware import Gpu
from fp4compile.recipe import Recipe
from fp4compile.roofline import model as roofline
from fp4compile.roofline.model import Experts, Prediction, Use


@dataclass(frozen=True)
class Products:
    """Which products of each layer a graph has.

    by_layer: in the order of `roofline.PRODUCTS`, by the layer's forward node. gradients: whether the graph has any.
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

    def predict(
        self, gemm: Gemm, uses: Mapping[str, Use | None], gpu: str | Gpu, recipe: Recipe
    ) -> Prediction | None:  # fmt: skip
        """The times of a product's layer; None for products that the model is not for, and for unknown sizes."""
        sizes = tuple(map(flops.hint, _layer(gemm)))
        if not _is_linear(gemm) or not all(sizes):
            return None
        experts = _experts(gemm)
        if gemm.groups is not None and experts is None:
            return None
        packed = gemm.packed is not None or gemm.packed_weight is not None
        kept = packed or (not self.gradients and recipe.weight_cache != "off")
        return roofline.layer(uses, gpu, *sizes, products=self.by_layer[gemm.forward], packed=kept, experts=experts)


def too_slow(gemm: Gemm, layer_recipe: Recipe, recipe: Recipe, products: Products) -> str | None:
    """The reason to leave a product alone for its layer's predicted gain; None where there is none.

    A layer with a symbolic size is not judged: its gain in one call says nothing of other calls.
    """
    if recipe.min_gain is None or recipe.target is None or not all(isinstance(size, int) for size in gemm.layer):
        return None
    found = products.predict(gemm, roofline.uses_of(layer_recipe), recipe.target, recipe)
    if found is None or found.gain >= recipe.min_gain:
        return None
    return f"predicted gain {found.gain:.2f} on {recipe.target} is below min_gain={recipe.min_gain:g}"


def predicted(decisions: Sequence, recipe: Recipe, gpu: Gpu) -> dict[Node, tuple[float, float]]:
    """(seconds in bf16, seconds as decided) of each product whose time the model can tell, by the product's node."""
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


def _uses(decision) -> dict[str, Use | None]:
    """How a decision quantises the operands, by role. Those of packed weights have no roles in the graph."""
    gemm, found = decision.gemm, {}
    for side, role, treatment in ((gemm.a, "fprop_x", decision.a), (gemm.b, "fprop_w", decision.b)):
        if treatment is not None:
            found[role if side is None else side.role] = Use(
                formats.get(treatment.format), treatment.outer is not None, treatment.stochastic, treatment.hadamard
            )
    return found


def _is_linear(gemm: Gemm) -> bool:
    """Whether a product is one of a linear layer, of one matrix or of experts, which is what the model is for."""
    return gemm.product in roofline.PRODUCTS and bool(_layer(gemm)) and gemm.forward is not None


def _experts(gemm: Gemm) -> Experts | None:
    """How the layer's rows find their matrices; None for one matrix, and where their number is unknown."""
    if gemm.groups is None:
        return None
    if gemm.offs is not None:
        count, grouping = flops.hint(gemm.offs.meta["val"].shape[0]), "rows"
    else:
        count, grouping = flops.hint(gemm.node.meta["val"].shape[0]), gemm.groups
    return Experts(count, grouping) if count else None


def _layer(gemm: Gemm) -> tuple:
    """(tokens, out features, in features); of packed weights, whose product is the layer, from the product's sizes."""
    return gemm.layer if gemm.packed is None else gemm.dims


def _seconds(gemm: Gemm, gpu: Gpu) -> float | None:
    """Of a product that stays as it is. Of attention, and where sizes are unknown, of its FLOPs alone: fused kernels
    do not write what is between its products, and the graph of a model on the meta device has these apart."""
    count = flops.count(gemm.node)
    if not count:
        return None
    dims = () if gemm.product == "attention" else tuple(map(flops.hint, gemm.dims))
    return roofline.product(gpu, count, dims if dims and all(dims) else None).seconds
