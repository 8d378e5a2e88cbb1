"""Weights of two ranks are quantised once, where nothing fills them unseen: see tests/helpers/lasting_worker.py."""

import pytest
import torch
from expecttest import TestCase

from tests.helpers import lasting_worker, process_groups

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lasting")
    statuses, said = process_groups.run_ranks(lasting_worker.main, [folder], folder)
    assert statuses == [0] * lasting_worker.RANKS, said
    return [torch.load(folder / f"{rank}.pt") for rank in range(lasting_worker.RANKS)]


@pytest.mark.parametrize("kind", ["tensor parallel", "DDP"])
def test_a_weight_is_quantised_once_and_behind_each_write(kind, found):
    writes = [count for _, count in lasting_worker.WRITES.values()]
    for mine in found:
        assert mine[kind] == {"packings": [2, *writes], "stale": [], "fused": {None}}


def test_frozen_weights_of_a_training_step_are_quantised_once(found):
    """Along the rows for the forward product, and along the columns for the gradient of its input."""
    assert [mine["frozen"] for mine in found] == [[4, 0, 0]] * lasting_worker.RANKS


def test_fsdp_in_another_model_marks_no_weight(found):
    assert [mine["beside FSDP2"] for mine in found] == [0] * lasting_worker.RANKS


@pytest.mark.parametrize(("kind", "why"), [
    ("one outer scale", "outer scale of 2 ranks; {}: the ranks make its outer scale together"),
    ("local tensors", "{}: the graph reads the local tensor of its DTensor"),
])  # fmt: skip
def test_weights_that_are_quantised_at_every_call_have_a_reason(kind, why, found):
    for mine in found:
        assert mine[kind] == {"packings": [0] * 7, "stale": [], "fused": {why.format("weight quantised at every call")}}


@pytest.mark.parametrize("kind", ["FSDP2 later", "FSDP2, tensor parallel", "FSDP1 later"])
def test_weights_that_fsdp_gathers_follow_its_gathers(kind, found):
    assert [mine[kind]["stale"] for mine in found] == [[]] * lasting_worker.RANKS


def test_the_report_says_which_weights_are_quantised_at_every_call(found):
    table, _, _ = found[0]["FSDP2, tensor parallel"]["report"].partition("\npasses: ")
    TestCase().assertExpectedInline(
        table,
        """\
module  product  M   N   K   left   right  tier       fused                                          left alone because
-----------------------------------------------------------------------------------------------------------------------
up      fprop    32  96  64  mxfp8  mxfp8  reference  weight quantised at every call: FSDP fills it
down    fprop    32  64  96  mxfp8  mxfp8  reference  weight quantised at every call: FSDP fills it
-----------------------------------------------------------------------------------------------------------------------
recipe mxfp8: 2 of 2 matrix products quantised, 100.0% of their FLOPs""",
    )
