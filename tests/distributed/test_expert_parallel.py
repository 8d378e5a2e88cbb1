"""Experts of two ranks, which helpers/expert_parallel_worker.py runs, against one process with the tokens of both."""

import pytest
import torch

from tests.helpers import expert_parallel_worker as worker
from tests.helpers import process_groups

pytestmark = pytest.mark.slow
BY_TRANSFORMERS = pytest.mark.skipif(not worker.has_transformers(), reason="transformers is missing, or too old")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    statuses, said = process_groups.run_ranks(worker.main, [folder], folder)
    assert statuses == [0] * worker.RANKS, said
    return [torch.load(folder / f"{name}.pt") for name in (*range(worker.RANKS), "alone")]


@pytest.mark.parametrize("kind", [
    *(pytest.param(kind, marks=BY_TRANSFORMERS) for kind in worker.BY_TRANSFORMERS), *worker.RECIPES,
])  # fmt: skip
def test_experts_have_the_bits_of_one_process(kind, found):
    """Results, and the gradients of tokens where they are taken."""
    *ranks, alone = (kinds[kind] for kinds in found)
    for rank, mine in enumerate(ranks):
        part = slice(None) if kind == "all_reduce" else slice(2 * rank, 2 * rank + 2)
        trained = worker.RECIPES.get(kind, False)
        assert len(mine["found"]) == len(alone["found"]) == 1 + trained
        for ours, whole in zip(mine["found"], alone["found"], strict=True):
            assert torch.equal(ours, whole[part]) and ours.count_nonzero()
        products = {
            (name, product) for name in alone["fused"] for product in ("fprop", "dgrad", "wgrad")[: 1 + 2 * trained]
        }
        assert mine["products"] == alone["products"] == products


@pytest.mark.parametrize(("kind", "told"), [
    ("nvfp4", "quantised after index: its global scale is made of all moved rows"),
    ("nvfp4_one_level", "quantised after index: the numbers of rows are not known"),
    # transformers masks rows behind the index, which belong to no expert of the rank.
    *(pytest.param(kind, None, marks=BY_TRANSFORMERS) for kind in worker.BY_TRANSFORMERS),
])  # fmt: skip
def test_what_is_said_of_tokens_that_are_sorted(kind, told, found):
    for kinds in found[:-1]:
        assert set(kinds[kind]["fused"].values()) == {told, None}
