"""Layers that inference engines multiply as one weight with one global scale: q, k and v; gate and up."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import nn

from fp4compile.formats import formats
from fp4compile.weights.buffers import autocast_dtype
from fp4compile.weights.replacements import Weight

_MEMBERS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def fused_groups(names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """The groups of which all members are among the layers, as tuples of full names."""
    known = dict.fromkeys(names)
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in known):
        for leaves in _MEMBERS:
            members = tuple(f"{parent}.{leaf}".removeprefix(".") for leaf in leaves)
            if all(member in known for member in members):
                yield members


def with_shared_scales(
    model: nn.Module, weights: Iterable[Weight]
) -> dict[tuple[str, ...], tuple[Weight, torch.Tensor]]:
    """(weight with its group's static scale, amax of its group, float32 []) by the weight's names, for linear layers.

    The group's static scale is the largest of its members. A group shares scales if its members have the same format,
    and that has a global scale.
    """
    linear = {weight.names[0]: weight for weight in weights if weight.experts is None}
    found = {}
    for names in fused_groups(linear):
        members = [linear[name] for name in names]
        if len({replace(one.layer_format, activation_outer=None) for one in members}) > 1:
            continue
        if formats.get(members[0].layer_format.weight).outer != "tensor":
            continue
        amax = torch.stack([_amax(one.parameter(model)) for one in members]).amax()
        static = [one.layer_format.activation_outer for one in members]
        outer = None if any(scale is None for scale in static) else max(scale for scale in static if scale is not None)
        for one in members:
            found[one.names] = replace(one, layer_format=replace(one.layer_format, activation_outer=outer)), amax
    return found


def _amax(weight: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of a weight as it is quantised, after autocast's cast: float32 [] on the CPU."""
    largest = weight.detach().abs().amax()
    return largest.to(autocast_dtype(weight.device) or largest.dtype).float().cpu()


def lost_by_one_scale(scales: dict[str, float]) -> tuple[str, float] | None:
    """The layer that a reader with one global scale for a group distorts most, and its SQNR in dB; None for none.

    scales: the global scales of a group's weights by layer. Such a reader takes the largest one, and so multiplies
    every other weight by a ratio r of two scales: its SQNR falls to at most -20 log10(r - 1).
    """
    ratios = {name: max(scales.values()) / scale for name, scale in scales.items()}
    name = max(ratios, key=lambda one: ratios[one])
    return None if ratios[name] == 1 else (name, -20 * math.log10(ratios[name] - 1))
