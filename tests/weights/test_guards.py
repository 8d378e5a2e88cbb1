"""What compiled code checks of packed modules before each call: nothing that Dynamo cannot pass over.

Torch 2.11 checks no guard of a module whose dictionaries have not changed, if all guards of the module are on its own
attributes. A single guard on anything else makes it check all guards of the module, and of the modules around it, in
each call.
"""

from collections.abc import Iterator

import pytest
import torch
from helpers import expert_models, packed_models
from torch._dynamo.guards import GuardManagerWrapper

import fp4compile


def managers(node) -> Iterator:
    """The managers of guards in a tree."""
    yield node
    pairs = node.get_key_value_managers().values() if hasattr(node, "get_key_value_managers") else ()
    for child in [value for _, value in pairs] or node.get_child_managers():
        if child is not None:
            yield from managers(child)


def safe_modules(model, inputs, monkeypatch) -> dict[str, bool]:
    """The classes of the modules that a compiled model's guards read, and whether Dynamo can pass over all of each."""
    trees, finalize = [], GuardManagerWrapper.finalize
    monkeypatch.setattr(GuardManagerWrapper, "finalize", lambda tree: (finalize(tree), trees.append(tree)))
    with torch.no_grad(), torch._dynamo.config.patch(use_recursive_dict_tags_for_guards=True):
        torch.compile(model, backend="eager")(inputs)
    found: dict[str, bool] = {}
    for node in (node for tree in trees for node in managers(tree.root)):
        kind = node.get_type_of_guarded_value()
        if kind is not None and issubclass(kind, torch.nn.Module):
            found[kind.__name__] = found.get(kind.__name__, True) and node.is_tag_safe()
    return found


@pytest.mark.parametrize("recipe", ["nvfp4_weight_only", "nvfp4", "nvfp4_static", "mxfp8", "float8_block"])
def test_guards_of_a_packed_model_can_be_passed_over(recipe, monkeypatch):
    model = packed_models.Net()
    fp4compile.pack_(model, packed_models.recipe_of(recipe))
    found = safe_modules(model, packed_models.TOKENS, monkeypatch)
    assert found.keys() == {"Net", "Embedding", "ModuleList", "PackedLinear", "Linear"}
    assert found["PackedLinear"]


@pytest.mark.parametrize("recipe", ["nvfp4_weight_only", "nvfp4_static"])
def test_guards_of_packed_experts_can_be_passed_over(recipe, monkeypatch):
    model = expert_models.Around(expert_models.Forms(False))
    expert_models.packed(model, recipe)
    assert safe_modules(model, expert_models.tokens(), monkeypatch)["PackedExperts"]
