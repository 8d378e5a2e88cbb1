"""Declare ops of the namespace `fp4compile`: schema, reference, shapes of the results, and kernels of each.

Arguments are tensors, strings and ints. Ops have no state, and never alias or mutate, so graph passes may merge, move
and recompute them. Random bits come from a seed, which is an input: a recomputed op has the same bits.
"""

from collections.abc import Callable

import torch
from torch._ops import OpOverload

LIBRARY = torch.library.Library("fp4compile", "DEF")
# The ops that `passes.lower` replaces with the launches of their kernels.
KERNELS: dict[OpOverload, Callable] = {}


def define(
    schema: str, *, reference: Callable, shapes: Callable, kernels: Callable, lowered: bool = True
) -> OpOverload:
    """Declare an op; all functions take the arguments of its schema.

    reference: computes the op with PyTorch operations, on any device. shapes: returns empty tensors like the results.
    kernels: computes the op on a GPU. lowered: whether `passes.lower` replaces the op with the launches of `kernels`.
    """
    name = LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    LIBRARY.impl(name, kernels, "CUDA")
    torch.library.register_fake(f"fp4compile::{name}", shapes, lib=LIBRARY)
    op = getattr(torch.ops.fp4compile, name).default
    if lowered:
        KERNELS[op] = kernels
    return op
