"""Runs a model with its graphs rewritten as the backend would, by the reference and without code generation."""

from unittest import mock

from torch._functorch.partitioners import min_cut_rematerialization_partition

from fp4compile.explain import run_captured
from fp4compile.passes.manager import analyse
from fp4compile.passes.plan import Decision
from fp4compile.passes.rewrite import rewrite
from fp4compile.recipe import resolve

ROLES = ("fprop_x", "fprop_w", "dgrad_dy", "dgrad_w", "wgrad_dy", "wgrad_x", "attention_a", "attention_b")


def rewritten(model, recipe, **overrides):
    """(the model as a function of rewritten graphs, the decisions of every graph that it has captured so far)."""
    chosen = resolve(recipe, **overrides)
    decisions: list[Decision] = []

    def run(module, known):
        found = analyse(module.graph, chosen, known.inputs)
        decisions.extend(found)
        rewrite(module.graph, found)
        module.recompile()
        return module.forward

    def call(*args):
        # Inductor's partitioner: the default one takes an activation's quantise, which stands behind, for backward.
        with mock.patch("fp4compile.explain.default_partition", min_cut_rematerialization_partition):
            return captured(*args)

    captured = run_captured(model, run)
    return call, decisions


def roles(decisions):
    """(module, product, formats or the reason for leaving it alone), one a product. Formats stand as the recipe's
    fields do, the gradient or the activation first, whichever side of the product they are on."""
    return [(d.gemm.module, d.gemm.product, d.reason or _formats(d)) for d in decisions]


def _formats(decision):
    by_role = {
        operand.role: treatment and treatment.format
        for operand, treatment in ((decision.gemm.left, decision.left), (decision.gemm.right, decision.right))
    }
    return " x ".join(str(by_role[role]) for role in ROLES if role in by_role)
