"""Packed experts: the bits of unpacked ones, in a module whose code runs as before, and nothing else in memory."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import fp4compile
from fp4compile.packed.experts import PackedExperts
from fp4compile.packed.pack import UNKNOWN_DIMENSION
from fp4compile.recipe import recipes
from tests.helpers.expert_models import EXPERTS, OFFS, Around, Forms, K, N, packed, recipe_of, tokens
from tests.helpers.rewritten import rewritten


def captured(model, recipe, *args):
    """(results of the rewritten graph, decisions)."""
    torch._dynamo.reset()
    run, decisions = rewritten(model, recipe)
    with torch.no_grad():
        return run(*args), decisions


@pytest.mark.parametrize("name", recipes())
def test_packed_experts_have_the_bits_of_unpacked_ones(name):
    x, recipe = tokens(), recipe_of(name)
    for is_transposed in (False, True):
        expected, before = captured(Around(Forms(is_transposed)), recipe, x)
        model, report = packed(Around(Forms(is_transposed)), name)
        assert [(row.module, row.reason) for row in report.rows] == [("experts.up_proj", None)]
        found, after = captured(model, recipe, x)
        assert all(map(torch.equal, expected, found))
        assert [d.reason for d in after] == [None] * 8
        for ours, theirs in zip(after, before, strict=True):
            assert (ours.a, ours.b, ours.gemm.groups) == (theirs.a, theirs.b, theirs.gemm.groups)
            assert (ours.gemm.module, ours.gemm.layer) == (theirs.gemm.module, theirs.gemm.layer)
        assert not dequantised(after)


def dequantised(decisions):
    graph = next(d.gemm.node.graph for d in decisions)
    return [node for node in graph.nodes if node.target is torch.ops.fp4compile.expert_weights.default]
