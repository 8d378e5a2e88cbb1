"""Run a model whose graphs are rewritten as the backend rewrites them, by the reference and without code generation."""

from unittest import mock

from torch._functorch.partitioners import min_cut_rematerialization_partition

from fp4compile.analysis.plan import Decision
from fp4compile.capture import run_captured
from fp4compile.passes.manager import analyse
from fp4compile.passes.rewrite import rewrite
from fp4compile.recipe import resolve

ROLES = ("fprop_x", "fprop_w", "dgrad_dy", "dgrad_w", "wgrad_dy", "wgrad_x", "attention_a", "attention_b")
# A different format for each role; the two formats of a product can be multiplied.
UNEVEN = {
    "name": "uneven", "fprop_x": "mxfp8", "fprop_w": "mxfp4", "dgrad_dy": "mxfp8_floor", "dgrad_w": "mxfp8_e5m2",
    "wgrad_dy": "mxfp8_e5m2", "wgrad_x": "mxfp8_ceil",
}  # fmt: skip


def rewritten(model, recipe, **overrides):
    """(a function that runs the model's rewritten graphs, the decisions of every graph that it has captured so far)."""
    chosen = resolve(recipe, **overrides)
    decisions: list[Decision] = []

    def run(module, known, forward_outputs):
        found = analyse(module.graph, chosen, known.inputs)
        decisions.extend(found)
        rewrite(module.graph, found)
        module.recompile()
        return module.forward

    def call(*args, **kwargs):
        # As Inductor does. The default partitioner would put the quantise of an activation into the backward graph.
        with mock.patch("fp4compile.capture.default_partition", min_cut_rematerialization_partition):
            return captured(*args, **kwargs)

    captured = run_captured(model, run)
    return call, decisions


def roles(decisions):
    """(module, product, formats or the reason for leaving it alone) of each product.

    The formats are in the order of the recipe's fields: first the gradient or the activation, be it A or B.
    """
    return [(d.gemm.module, d.gemm.product, d.reason or _formats(d)) for d in decisions]


def _formats(decision):
    by_role = {
        operand.role: treatment and treatment.format
        for operand, treatment in ((decision.gemm.a, decision.a), (decision.gemm.b, decision.b))
    }
    return " x ".join(str(by_role[role]) for role in ROLES if role in by_role)
