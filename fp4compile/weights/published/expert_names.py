"""Map tensors of a published checkpoint to tensors of a model that transformers names or stores differently.

Checkpoints hold separate experts (`experts.3.gate_proj.weight`), models of transformers 5 one parameter
(`experts.gate_up_proj`). `transformers.conversion_mapping` maps weights; a layer's scales are mapped like its weight.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class ModelTensor:
    """The place of a checkpoint's tensor: its name in the model.

    leaves: the last names of an expert's layers that form the parameter together, in order; otherwise empty.
    """

    name: str
    leaves: tuple[str, ...] = ()


@dataclass(frozen=True)
class Experts:
    """The linear layers of a checkpoint that form one parameter of experts, `name`, of a model; see `ModelTensor`."""

    name: str
    prefix: str
    leaves: tuple[str, ...]

    def layers(self, expert: int) -> list[str]:
        """The names of an expert's layers."""
        return [f"{self.prefix}.{expert}.{leaf}" for leaf in self.leaves]


@dataclass(frozen=True)
class PublishedNames:
    """The names of a model's tensors in checkpoints; equal to those in the model without renamings and converters.

    renamings, converters: WeightRenamings of transformers, and its WeightConverters for experts. written: the renamings
    that are undone where a model is written. unused: patterns of names that the model may lack. base: the name of the
    base in models with a head, by which checkpoints of the one and of the other differ. present: the names of the
    model's tensors. gated: the names of tensors [experts, out, in] that hold a layer of all experts, gate before up.
    """

    renamings: Sequence[Any] = ()
    converters: Sequence[Any] = ()
    written: Sequence[Any] = ()
    unused: Sequence[str] = ()
    base: str = ""
    present: frozenset[str] = frozenset()
    gated: frozenset[str] = frozenset()

    def target(self, name: str) -> ModelTensor:
        """The place in the model of the checkpoint's tensor `name`."""
        name = _renamed(self.renamings, name)
        for converter in self.converters:
            found, pattern = converter.rename_source_key(name)
            if pattern is not None and expert_of(name.removesuffix(".weight")) is not None:
                return ModelTensor(self._in_class(found), _leaves(converter))
        return self._of_gated(name) or ModelTensor(self._in_class(name))

    def _of_gated(self, name: str) -> ModelTensor | None:
        """The place of an expert's weight without a converter: Gemma 4 has experts in one tensor, and quantisers none.

        Files may have a module `moe` about them, which the model does not have.
        """
        prefix, _, leaf = expert_of(name.removesuffix(".weight")) or ("", 0, "")
        for parameter, leaves in _GATED.items():
            for place in (prefix, prefix.replace(".moe.experts", ".experts")):
                found = self._in_class(f"{place}.{parameter}")
                if leaf in leaves and found in self.gated:
                    return ModelTensor(found, leaves)
        return None

    def _in_class(self, name: str) -> str:
        """A name with the base's name before it or without, if only so the model has it; otherwise as it is."""
        places = name, name.removeprefix(f"{self.base}."), f"{self.base}.{name}"
        return next((place for place in places if place in self.present), name)

    def layer(self, name: str) -> ModelTensor:
        """The place of a linear layer's weight, by the layer's name in the model if it is no part of experts."""
        found = self.target(f"{name}.weight")
        return found if found.leaves else ModelTensor(found.name.removesuffix(".weight"))

    def is_unused(self, name: str) -> bool:
        """Whether a checkpoint's tensor is skipped if the model does not have it."""
        return any(re.search(pattern, name) for pattern in self.unused)

    def source(self, name: str) -> str | Experts:
        """The name of a model's tensor in a checkpoint, or the experts that form it. Raises ValueError for none."""
        for converter, backwards in self._converters_back:
            found, pattern = backwards.rename_source_key(name)
            experts = Experts(name, _renamed(self._renamings_back, found).partition(".*.")[0], _leaves(converter))
            whole = ModelTensor(name, experts.leaves)
            if pattern is not None and all(self.layer(layer) == whole for layer in experts.layers(0)):
                return experts
        for found in (_renamed(self._renamings_back, name), name):
            if self.target(found) == ModelTensor(name):
                return found
        raise ValueError(f"model: no name in a checkpoint is known for {name!r}")

    @cached_property
    def _renamings_back(self) -> list[Any]:
        return [renaming.reverse_transform() for renaming in reversed(self.written)]

    @cached_property
    def _converters_back(self) -> list[tuple[Any, Any]]:
        return [(converter, converter.reverse_transform()) for converter in self.converters]


# The parameters of experts in one tensor, and the layers of separate experts that form each.
_GATED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def expert_of(layer: str) -> tuple[str, int, str] | None:
    """(prefix, expert number, leaf) of the name of an expert's linear layer; None for other names."""
    prefix, _, rest = layer.rpartition(".")
    prefix, _, number = prefix.rpartition(".")
    return (prefix, int(number), rest) if number.isascii() and number.isdigit() else None


def _renamed(renamings: Sequence[Any], name: str) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def _leaves(converter: Any) -> tuple[str, ...]:
    """The leaves of a converter: ("gate_proj", "up_proj") for patterns such as `mlp.experts.*.gate_proj.weight`."""
    return tuple(pattern.split(".")[-2] for pattern in converter.source_patterns)


def names_of_transformers(model: Any) -> PublishedNames:
    """The names of a transformers model's tensors in its checkpoints."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    conversions = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter) and _stacks_experts(one)]
    written = without_prefixes(renamings)
    unused = sorted(model._keys_to_ignore_on_load_unexpected or ())
    if any(name.endswith("rotary_emb.inv_freq") for name, _ in model.named_buffers()):
        unused.append(r"rotary_emb\.inv_freq$")  # each layer had one; transformers skips them, too
    present = frozenset(model.state_dict())
    layout = ("is_concatenated", True), ("has_gate", True), ("is_transposed", False)
    gated = [path for path, module in model.named_modules()
             if all(getattr(module, name, None) is value for name, value in layout)]  # fmt: skip
    named = frozenset(f"{path}.{child}" for path in gated for child in _GATED)
    return PublishedNames(renamings, converters, written, unused, model.base_model_prefix, present, named)


def without_prefixes(conversions: Sequence[Any]) -> list[Any]:
    """The conversions without those that drop or add a prefix of all names, which transformers does not reverse.

    A model does not record whether the names in its checkpoint had the prefix.
    """
    from transformers import core_model_loading

    changes = getattr(core_model_loading, "PrefixChange", ())  # none before transformers 5.6
    return [one for one in conversions if not isinstance(one, changes)]


def _stacks_experts(converter: Any) -> bool:
    """Whether a converter only stacks experts, and concatenates the layers of each expert."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    kinds = [(type(operation), operation.dim) for operation in converter.operations if hasattr(operation, "dim")]
    stacked: list[tuple[type, int]] = [(MergeModulelist, 0)]
    one = kinds == stacked and len(converter.source_patterns) == 1
    several = kinds == [*stacked, (Concatenate, 1)]
    whole = len(kinds) == len(converter.operations) and len(converter.target_patterns) == 1
    return whole and (one or several) and all(".*." in p and p.endswith(".weight") for p in converter.source_patterns)
