"""Control flow of a kernel's code: basic blocks, the loops among them, and a thread's path through them.

A `Block` is a run of instructions with its successors. The readers of SASS and PTX define the instruction type.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from ptxsim.order import postorder

Instruction = TypeVar("Instruction")


@dataclass(frozen=True)
class Block(Generic[Instruction]):
    """Instructions that run one after another, and the indices of the blocks that can follow."""

    instructions: tuple[Instruction, ...]
    successors: tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """A natural loop. header: the block through which it is entered. blocks: all of its blocks, the header included."""

    header: int
    blocks: frozenset[int]


class ControlFlow(Generic[Instruction]):
    """The blocks of a kernel, the entry first. All results leave out unreachable blocks."""

    def __init__(self, blocks: Sequence[Block[Instruction]]):
        self.blocks = tuple(blocks)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The reachable blocks, each before its successors, except for back edges of loops."""
        return tuple(reversed(postorder(lambda block: self.blocks[block].successors)))

    @cached_property
    def predecessors(self) -> dict[int, tuple[int, ...]]:
        """The reachable blocks that lead to each reachable block."""
        found: dict[int, list[int]] = {block: [] for block in self.order}
        for block in self.order:
            for successor in self.blocks[block].successors:
                found[successor].append(block)
        return {block: tuple(before) for block, before in found.items()}

    @cached_property
    def dominators(self) -> dict[int, frozenset[int]]:
        """For each block, the blocks on every path to it, itself included."""
        found = dict.fromkeys(self.order, frozenset(self.order))
        found[0] = frozenset({0})
        changed = True
        while changed:
            changed = False
            for block in self.order[1:]:
                before = [found[each] for each in self.predecessors[block]]
                new = frozenset.intersection(*before) | {block}
                changed |= new != found[block]
                found[block] = new
        return found

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """The natural loops, the smallest first. Back edges to one header form one loop."""
        found: dict[int, set[int]] = {}
        for block in self.order:
            for header in self.blocks[block].successors:
                if header in self.dominators[block]:
                    found.setdefault(header, {header}).update(self._leading_to(block, header))
        return tuple(sorted((Loop(header, frozenset(body)) for header, body in found.items()),
                            key=lambda loop: len(loop.blocks)))  # fmt: skip

    def _leading_to(self, block: int, header: int) -> set[int]:
        """The blocks from which `block` is reached without passing the header."""
        found, waiting = {header}, [block]
        while waiting:
            one = waiting.pop()
            if one not in found:
                found.add(one)
                waiting += self.predecessors[one]
        return found

    def loop_around(self, matches: Callable[[Instruction], bool]) -> Loop | None:
        """The innermost loop with an instruction that matches; None where no loop has one."""
        having = {
            block
            for block in self.order
            if any(matches(instruction) for instruction in self.blocks[block].instructions)
        }
        return next((loop for loop in self.loops if loop.blocks & having), None)

    def instructions(self, blocks: frozenset[int] | None = None) -> list[Instruction]:
        """The instructions of `blocks`, or of all reachable blocks."""
        chosen = self.order if blocks is None else [block for block in self.order if block in blocks]
        return [instruction for block in chosen for instruction in self.blocks[block].instructions]

    def way(self, rare: Callable[[Instruction], bool], trips: int = 1, idle: bool = False) -> list[Instruction]:
        """The instructions that a thread executes on its path from the entry to the end, in loops `trips` times.

        At a fork, the path takes the side with fewer rare instructions ahead, such as calls of a division's slow path;
        of equal sides, the longer one. An inner loop counts trips * trips times.

        A side less than a third as long as the other belongs to a program without work. It is taken if `idle`, and
        otherwise the longer side is, regardless of rare instructions.
        """
        counts = [sum(map(rare, block.instructions)) for block in self.blocks]
        # A block that could lead into a rare one counts slightly: it is the rest of the rare case's code.
        ahead: dict[int, tuple[int, int]] = {}
        chosen: dict[int, int | None] = {}
        for block in postorder(self._forward):
            following = self._forward(block)
            lengths = [ahead[one][1] for one in following]
            if lengths and 3 * min(lengths) < max(lengths):
                best: int | None = following[lengths.index(min(lengths) if idle else max(lengths))]
            else:
                best = min(following, key=lambda one: (ahead[one][0], -ahead[one][1]), default=None)
            beside = any(counts[one] for one in following)
            fewest, length = (0, 0) if best is None else ahead[best]
            repeated = len(self.blocks[block].instructions) * trips ** self._depth(block)
            ahead[block] = (fewest + 1000 * counts[block] + beside, length + repeated)
            chosen[block] = best
        found: list[Instruction] = []
        at: int | None = 0
        while at is not None:
            found += self.blocks[at].instructions * trips ** self._depth(at)
            at = chosen[at]
        return found

    def _depth(self, block: int) -> int:
        return sum(block in loop.blocks for loop in self.loops)

    def _forward(self, block: int) -> list[int]:
        """The successors of a block; a back edge is replaced by the successors of its loop."""
        found: list[int] = []
        for successor in self.blocks[block].successors:
            found += self._after(successor) if successor in self.dominators[block] else [successor]
        return found

    def _after(self, header: int) -> list[int]:
        """The successors of the loop of a header."""
        loop = next(loop for loop in self.loops if loop.header == header)
        found: list[int] = []
        for inside in loop.blocks:
            for after in self.blocks[inside].successors:
                if after not in loop.blocks:
                    found += self._after(after) if after in self.dominators[inside] else [after]
        return found
