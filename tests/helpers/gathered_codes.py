"""A weight, and what three ranks that quantise a third of its rows each make of it together."""

import torch

from fp4compile.distributed.codes import Direction, magnitudes_of

RANKS, N, K = 3, 384, 80  # a row is no whole number of blocks of 32


def weight(device="cpu") -> torch.Tensor:
    """The largest elements lie with the last rank: no other rank would find the whole weight's scales alone."""
    made = torch.randn(N, K, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    made[-N // RANKS :] *= 37
    return made.to(device)


def gathered(direction: Direction, whole: torch.Tensor, other: torch.Tensor | None = None) -> list[torch.Tensor | None]:
    """What three ranks that quantise a third of the rows each make of a weight. other: is quantised with it."""
    weights = torch.stack([each for each in (other, whole) if each is not None])
    stacks, magnitudes = weights.chunk(RANKS, dim=1), None
    if direction.scale_over_ranks:
        magnitudes = torch.stack([magnitudes_of([(direction, stack)])[0] for stack in stacks]).amax(0)
    places = direction.places(whole.device, RANKS)
    there = [place for place in places if place is not None]
    for memory in (tensor for place in there for tensor in (place.memory, place.arriving)):
        memory.untyped_storage().resize_(memory.nbytes)
    sent = [[part[-1] for part in direction.encode(stack, magnitudes)] for stack in stacks]
    for place, *parts in zip(there, *sent, strict=True):
        place.arriving.copy_(torch.cat(parts))
    for to, pieces in direction.copies(places, RANKS):
        to.copy_(pieces)
    if scales := direction.swizzled(places):
        direction.swizzle(*scales, RANKS)
    return [None if place is None else place.part for place in places]
