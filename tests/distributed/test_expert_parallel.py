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
    return [torch.load(folder / f"{rank}.pt") for rank in range(worker.RANKS)]


@pytest.mark.parametrize("kind", [
    *(pytest.param(kind, marks=BY_TRANSFORMERS) for kind in worker.BY_TRANSFORMERS), *worker.RECIPES,
])  # fmt: skip
def test_experts_have_the_bits_of_one_process(kind, found):
    """Results, and the gradients of tokens where they are taken."""
    for rank, kinds in enumerate(found):
        mine, alone = kinds[kind]
        part = slice(None) if kind == "all_reduce" else slice(2 * rank, 2 * rank + 2)
        trained = worker.RECIPES.get(kind, False)
        assert len(mine["found"]) == len(alone["found"]) == 1 + trained
        for ours, whole in zip(mine["found"], alone["found"], strict=True):
            assert torch.equal(ours, whole[part]) and ours.count_nonzero()
        products = {
            (name, product) for name in alone["fused"] for product in ("fprop", "dgrad", "wgrad")[: 1 + 2 * trained]
        }
        assert mine["products"] == alone["products"] == products


def test_exchanged_tokens_are_codes(found):
    """Without gradients, from before the tokens are sorted by expert to the products; results return in bf16."""
    moves = ("index", "cat", "all_to_all_single", "gather")
    for kinds in found:
        mine, _ = kinds["nvfp4_one_level"]
        before = "; ".join(f"quantised before {move}" for move in moves)
        assert mine["fused"] == {"experts.w1": before, "experts.w3": before, "experts.w2": None}
        assert mine["moved"] == {"all_to_all_single": ["i64", "u8", "u8", "bf16"]}


@pytest.mark.parametrize(("kind", "collectives", "told"), [
    ("nvfp4", {"all_to_all_single": ["i64", "bf16", "bf16"]},
     "quantised after index: each group has an outer scale of its own"),
    # transformers reads the sizes of an exchange behind a break of Dynamo's graph: the products are in another one.
    pytest.param("all_to_all", {"all_to_all_single": ["i64", "bf16", "bf16"]},
                 "quantised after index: the numbers of rows are not known", marks=BY_TRANSFORMERS),
    # Every rank has all tokens, and zeros in the place of tokens for other ranks' experts.
    pytest.param("all_reduce", {"all_reduce": ["bf16"]}, "quantised before index", marks=BY_TRANSFORMERS),
])  # fmt: skip
def test_tokens_that_are_sent_as_they_are(kind, collectives, told, found):
    for kinds in found:
        mine, _ = kinds[kind]
        assert mine["moved"] == collectives
        assert set(mine["fused"].values()) == {told, None}
