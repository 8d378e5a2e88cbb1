"""The memory into which a weight's codes are gathered, and the calls that make the whole weight of it.

FSDP2 calls the hooks at each gather, in the thread that issues the matmuls. So everything that does not change between
gathers is prepared once, and a few calls finish all weights that are gathered together.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp4compile.distributed import compiled
from fp4compile.distributed.codes import Direction, GatheredPart
from fp4compile.distributed.whole import NAMES, GatheredFormat, GatheredWeight


def swizzle(directions: Sequence[tuple[Direction, int]], *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Write the block scales of whole weights in the swizzled layout.

    directions: of each weight's codes, with the number of ranks. tensors: for each of them the scales to write, and the
    gathered bytes.
    """
    for (direction, ranks), whole, arriving in zip(directions, tensors[::2], tensors[1::2], strict=True):
        direction.swizzle(whole, arriving, ranks)
    return []


def transpose(forms: Sequence[GatheredFormat], *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Write codes of square blocks along the columns, which are those along the rows.

    tensors: for each weight's form the parts along the rows, and the parts along the columns to write.
    """
    left = iter(tensors)
    for form in forms:
        rows, columns = form.rows.next_parts(left), form.columns.next_parts(left)
        form.columns.transpose(rows, columns)
    return []


@dataclass(frozen=True, eq=False)
class Gathering:
    """A gather of one weight, for matmuls that read codes in some directions.

    wanted: these directions. sent: the directions whose codes ranks send. arriving: the memory for the gathered bytes
    of `Direction.encode`. beside: the weight's other memory, which FSDP2 allocates and frees with `arriving`.
    """

    arrival: "Arrival"
    wanted: tuple[Direction, ...]
    sent: tuple[Direction, ...]
    arriving: list[torch.Tensor]
    beside: list[torch.Tensor]

    def allocate(self) -> None:
        """Allocate the memory `beside`, as FSDP2 does from the second gather on."""
        for tensor in self.beside:
            tensor.untyped_storage().resize_(tensor.nbytes)

    def write(self, sent: list[torch.Tensor]) -> None:
        """Copy `sent` of a group of one rank, for which FSDP2 copies only the first tensor (torch 2.13)."""
        for memory, tensor in zip(self.arriving, sent, strict=True):
            memory.untyped_storage().resize_(memory.nbytes)
            memory.copy_(tensor)


class Arrival:
    """The memory into which all gathers of a weight write its codes. ranks: the number that send shards.

    FSDP2 allocates the memory before a gather's bytes are written, and frees it after the matmuls.
    """

    def __init__(self, form: GatheredFormat, device: torch.device, ranks: int):
        self.form, self.ranks = form, ranks
        self.places = {direction: direction.places(device, ranks) for direction in (form.rows, form.columns)}
        self._gatherings: dict[tuple[bool, bool], Gathering] = {}

    def weight(self) -> GatheredWeight:
        """The weight in this memory, without codes before the first gather."""
        named = zip(NAMES, (*self.places[self.form.rows], *self.places[self.form.columns]), strict=True)
        return GatheredWeight(self.form, {name: place.part for name, place in named if place is not None})

    def gathering(self, *, rows: bool, columns: bool) -> Gathering:
        """The gather for matmuls that read the codes along the rows, along the columns, or both."""
        found = self._gatherings.get((rows, columns))
        if found is None:
            found = self._gatherings[rows, columns] = self._gathering(rows, columns)
        return found

    def _gathering(self, rows: bool, columns: bool) -> Gathering:
        wanted = tuple(itertools.compress((self.form.rows, self.form.columns), (rows, columns)))
        sent = self.form.sent(wanted)
        arriving = [place.arriving for direction in sent for place in self.there(direction)]
        known = {id(tensor) for tensor in arriving}
        memory = [place.memory for direction in self.places for place in self.there(direction)]
        return Gathering(self, wanted, sent, arriving, [one for one in memory if id(one) not in known])

    def there(self, direction: Direction) -> list[GatheredPart]:
        """The places of a direction's codes, block scales and global or row scale, without missing ones."""
        return [place for place in self.places[direction] if place is not None]

    def parts(self, direction: Direction) -> list[torch.Tensor]:
        """The tensors of the whole weight in these places."""
        return [place.part for place in self.there(direction)]

    def scaling(self, direction: Direction) -> torch.Tensor:
        """The global or row scale of a direction's codes; their block scales if they have none."""
        _, scales, outer = self.places[direction]
        place = outer or scales
        assert place is not None  # every format has one of them
        return place.part


class Finish:
    """Make whole weights of the gathered bytes. gatherings: of the weights that are gathered together.

    Codes that are not gathered become invalid: matmuls of them are NaN, so that no matmul uses old codes.
    """

    def __init__(self, gatherings: Sequence[Gathering]):
        arrivals = [one.arrival for one in gatherings]
        self._parts = tuple(part for one in arrivals for direction in one.places for part in one.parts(direction))
        sent = [(one.arrival, direction) for one in gatherings for direction in one.sent]
        pairs = [pair for one, direction in sent for pair in direction.copies(one.places[direction], one.ranks)]
        self._to, self._pieces = [to for to, _ in pairs], [piece for _, piece in pairs]
        self._rearranged = [each for each in (_swizzling(sent), _transposing(gatherings)) if each[2]]
        stale = [one.arrival.scaling(direction) for one in gatherings for direction in one.arrival.places
                 if direction not in one.wanted]  # fmt: skip
        self._stale = [scale.view(-1).view(torch.uint8) for scale in stale]
        self._spent = [place.arriving for one, direction in sent for place in one.there(direction)
                       if not place.lies_there]  # fmt: skip

    def __call__(self) -> None:
        # Autograd saved the tensors for the backward pass, which reads the new contents.
        with torch.autograd._unsafe_preserve_version_counter(self._parts):
            if self._to:
                torch._foreach_copy_(self._to, self._pieces)
            for rearranged in self._rearranged:
                compiled.run(*rearranged)
            if self._stale:  # a scale of bits that are all 1 is NaN in every format
                torch._foreach_clamp_min_(self._stale, 255)
        for tensor in self._spent:
            tensor.untyped_storage().resize_(0)


_Rearranged = tuple[Callable[..., list[torch.Tensor]], Any, list[torch.Tensor]]  # arguments of `compiled.run`


def _swizzling(sent: list[tuple[Arrival, Direction]]) -> _Rearranged:
    found = [((direction, one.ranks), pair) for one, direction in sent
             if (pair := direction.swizzled(one.places[direction]))]  # fmt: skip
    return swizzle, tuple(each for each, _ in found), [tensor for _, pair in found for tensor in pair]


def _transposing(gatherings: Sequence[Gathering]) -> _Rearranged:
    found = [one.arrival for one in gatherings if one.sent != one.wanted]
    tensors = [
        part for one in found for direction in (one.form.rows, one.form.columns) for part in one.parts(direction)
    ]
    return transpose, tuple(one.form for one in found), tensors
