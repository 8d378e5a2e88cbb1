"""The order of a program's basic blocks in which the threads of a warp that diverged execute them.

A compiler may lay out the block at which the paths of a branch meet before that branch, so the threads that have to
wait for others follow from the control flow, not from the layout. ptxas lets threads meet at the immediate
post-dominator of a branch (`BSSY`, `BSYNC` in SASS). Here they also meet there, or before; only if some would reach it
in a later iteration of a loop than others, they meet at the loop's single back edge. A block comes after those from
which threads reach it in an iteration, and the exits of a loop after all of it: a weak topological order (F.
Bourdoncle, "Efficient chaotic iteration strategies with widenings", 1993), except for the heads of some loops.
Confidence high, except for a loop with several entries, of which the first one in the layout counts as its head.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from graphlib import TopologicalSorter

import numpy as np

from ptxsim.control import BRANCHES
from ptxsim.parse import Instruction, Label, Program
from ptxsim.state import DONE

_Edges = Mapping[int, Sequence[int]]  # each block -> those that may follow, all by the first instruction's index


@dataclass(frozen=True)
class Order:
    """An order of blocks. starts: their first indices in this order, and DONE. places: in `starts`, by first index."""

    starts: np.ndarray
    places: np.ndarray

    @classmethod
    def of(cls, program: Program) -> "Order | None":
        """The order of a program's blocks; None if it is the layout's, so that the smallest program counter is first.

        Of the orders that a control flow allows, this is the one that is closest to the layout.
        """
        edges = edges_of(program)
        blocks = _Flow(edges).ordered(edges.keys())
        if blocks == sorted(blocks):
            return None
        places = np.zeros(len(program.instructions) + 1, np.int32)
        places[[*blocks, -1]] = np.arange(len(blocks) + 1)
        return cls(np.array([*blocks, DONE], np.int32), places)

    def first(self, counters: np.ndarray) -> np.ndarray:
        """The program counter that comes first in each row."""
        return self.starts[self.places.take(counters, mode="clip").min(1)]  # DONE is clipped to the last place


def edges_of(program: Program) -> dict[int, list[int]]:
    """Each basic block -> the blocks that may follow it, all by their first index, in the order of the code."""
    end = len(program.instructions)
    starts = sorted(program.leaders - {end})
    edges = {}
    for start, following in zip(starts, [*starts[1:], end], strict=True):
        last = program.instructions[following - 1]
        edges[start] = _targets(program, last)
        if following < end and (last.guard is not None or last.opcode not in BRANCHES):
            edges[start].append(following)
    return edges


def _targets(program: Program, one: Instruction) -> list[int]:
    """The indices to which an instruction may branch."""
    if one.opcode not in BRANCHES or not one.operands:
        return []
    label = one.operands[-1]
    assert isinstance(label, Label)
    return [program.labels[name] for name in program.tables.get(label.name, (label.name,))]


class _Flow:
    """The control flow of a program. after, before: the blocks that follow and that precede each block."""

    def __init__(self, after: _Edges) -> None:
        self.after = after
        self.before: dict[int, list[int]] = {block: [] for block in after}
        for block, following in after.items():
            for each in following:
                self.before[each].append(block)

    def ordered(self, blocks: Set[int], together: bool = True) -> list[int]:
        """Some blocks in order. Of several blocks or loops that may be next, the first one in the layout is.

        together: whether no thread reaches them in a later iteration of a loop than others.
        """
        loops: dict[int, set[int]] = {}
        sorter: TopologicalSorter[int] = TopologicalSorter()
        loop_of = self._loops(blocks)
        for block, loop in loop_of.items():
            loops.setdefault(loop, set()).add(block)
            sorter.add(loop, *({loop_of[each] for each in self.before[block] if each in blocks} - {loop}))
        sorter.prepare()
        found: list[int] = []
        waiting = sorted(sorter.get_ready())
        while waiting:
            loop = heapq.heappop(waiting)
            found += self._ordered_loop(loops[loop], together)
            sorter.done(loop)
            for ready in sorter.get_ready():
                heapq.heappush(waiting, ready)
        return found

    def _ordered_loop(self, loop: set[int], together: bool) -> list[int]:
        """The blocks of a loop in order, or one block.

        The head comes after the blocks that it post-dominates, so that threads that begin another iteration wait for
        the others. If all of them meet before, in the only block that leads back, the head comes first, as in the usual
        layout.
        """
        if len(loop) == 1:
            return list(loop)
        head = min((block for block in loop if not loop.issuperset(self.before[block])), default=min(loop))
        back = loop.intersection(self.before[head])
        if together and len(back) == 1 and loop.intersection(self.after[min(back)]) == {head}:
            return [head, *self.ordered(loop - {head})]
        ends = [block for block, following in self.after.items() if not following]
        passing_by = postorder(lambda block: [each for each in self.before[block] if each != head], ends)
        waiting = loop.difference(passing_by, {head})
        return [*self.ordered(waiting, together), head, *self.ordered(loop - waiting - {head}, together=False)]

    def _loops(self, blocks: Set[int]) -> dict[int, int]:
        """For each block the lowest one of its strongly connected component, by Kosaraju's algorithm."""
        found: dict[int, int] = {}
        for root in reversed(postorder(lambda block: [each for each in self.after[block] if each in blocks], blocks)):
            if root not in found:
                loop = postorder(
                    lambda block: [each for each in self.before[block] if each in blocks and each not in found], [root]
                )
                found.update(dict.fromkeys(loop, min(loop)))
        return found


def postorder(successors: Callable[[int], Sequence[int]], roots: Iterable[int] = (0,)) -> list[int]:
    """The blocks reachable from some blocks, each after its successors, except for back edges."""
    seen, finished = set(), []
    for root in roots:
        stack = [] if root in seen else [(root, iter(successors(root)))]
        seen.add(root)
        while stack:
            block, following = stack[-1]
            new = next((one for one in following if one not in seen), None)
            if new is None:
                finished.append(block)
                stack.pop()
            else:
                seen.add(new)
                stack.append((new, iter(successors(new))))
    return finished
