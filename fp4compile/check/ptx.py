"""PTX as Triton passes it to ptxas: the loop around matrix instructions, and whether loads and matmuls overlap in it.

ptxas keeps the order of barriers, asynchronous copies and matrix instructions. In PTX, unlike SASS, an address has one
name in all instructions, which shows that two instructions use one barrier.
"""

import re
from dataclasses import dataclass
from functools import cached_property

from fp4compile.check.control_flow import Block, ControlFlow, Loop
from ptxsim.order import edges_of
from ptxsim.parse import Address, Immediate, Instruction, Operand, Program, Register, parse

_PRODUCT = re.compile(r"tcgen05\.mma|wgmma\.mma_async|mma\.sync")
_TMA_LOAD = re.compile(r"cp\.async\.bulk\.tensor\.\S*shared::c\w+\.global")
_TMA_STORE = re.compile(r"cp\.async\.bulk\.tensor\.\S*global\.shared::cta")
_COPY = re.compile(r"cp\.async\.c[ag]\.")
BARRIER_BYTES = 8
# The bit of an address in shared memory that is the rank of the program in a pair. Loads of `cta_group::2` clear it, so
# that the loads of both programs signal the first program's mbarrier.
_RANK_IN_PAIR = 1 << 24


@dataclass(frozen=True)
class Overlap:
    """Whether loads, matmuls and other work of a loop run at the same time. why: the reason, in words."""

    overlapped: bool
    why: str


class Ptx:
    """The PTX of one kernel."""

    def __init__(self, text: str):
        self.flow: ControlFlow[Instruction] = _control_flow(parse(text))

    @cached_property
    def all(self) -> list[Instruction]:
        return self.flow.instructions()

    @cached_property
    def products(self) -> tuple[str, ...]:
        """The matrix instructions, each kind once."""
        return tuple(sorted({one.opcode for one in self.all if _PRODUCT.match(one.opcode)}))

    def count(self, pattern: str) -> int:
        """The number of instructions whose opcode begins with a match of a regular expression."""
        return sum(bool(re.match(pattern, one.opcode)) for one in self.all)

    @property
    def tma_loads(self) -> int:
        return self.count(_TMA_LOAD.pattern)

    @property
    def tma_stores(self) -> int:
        return self.count(_TMA_STORE.pattern)

    @property
    def asynchronous_loads(self) -> int:
        """Asynchronous loads to shared memory, by TMA or by `cp.async`."""
        return self.tma_loads + self.count(_COPY.pattern)

    @cached_property
    def main_loop(self) -> Loop | None:
        """The innermost loop around a matrix instruction."""
        return self.flow.loop_around(lambda one: bool(_PRODUCT.match(one.opcode)))

    @property
    def waits(self) -> int:
        """Waits for an mbarrier in the main loop."""
        return sum(one.opcode.startswith("mbarrier.try_wait") for one in self._inside)

    @cached_property
    def _inside(self) -> list[Instruction]:
        return [] if self.main_loop is None else self.flow.instructions(self.main_loop.blocks)

    # ------------------------------------------------------------ overlap

    @cached_property
    def overlap(self) -> Overlap:
        """Whether the main loop overlaps: no step waits for a load or matmul that this step has started.

        1. The step waits for no mbarrier to which it commits its matmul, so that the matmul continues while the warps
           begin the next step. (`mma.sync` and `wgmma` commit to no mbarrier.)
        2. The loop's loads are asynchronous, and the step does not wait for its own loads: it waits for no mbarrier
           that its TMA loads signal, and each wait for `cp.async` leaves at least one group pending.
        3. Another partition of warps feeds a loop without loads: its TMA loads are in a separate loop, and fill a ring
           of at least two buffers.
        4. The step does not synchronise with the other CTA of a cluster. Triton lets the warps of both CTAs arrive at
           each other's mbarriers where accesses to the shared memory of both may race.
        """
        if self.main_loop is None:
            return Overlap(False, "no loop around the product")
        waited = self._barriers("mbarrier.try_wait")
        if waited & self._barriers(r"tcgen05\.commit"):
            return Overlap(False, "each step waits for its own product")
        if any(re.match(r"mbarrier\.arrive\S*shared::cluster", one.opcode) for one in self._inside):
            return Overlap(False, "each step meets the other CTA")
        loads = self._barriers(_TMA_LOAD.pattern)
        copies = any(_COPY.match(one.opcode) for one in self._inside)
        if not loads and not copies:
            return self._fed_by_others()
        if waited & loads:
            return Overlap(False, "each step waits for its own loads")
        left = [one.operands[0] != Immediate(0) for one in self._inside if one.opcode == "cp.async.wait_group"]
        if copies and not (left and all(left)):
            return Overlap(False, "each step waits until no load is under way")
        return Overlap(True, "loads and products of several steps are under way")

    def _barriers(self, pattern: str) -> set[str]:
        """The addresses of the mbarriers of the main loop's instructions that match a pattern."""
        return {self._value(_barrier(one)) for one in self._inside if re.match(pattern, one.opcode)}

    def _fed_by_others(self) -> Overlap:
        feeding = self.flow.loop_around(lambda one: bool(_TMA_LOAD.match(one.opcode)))
        if feeding is None or feeding.blocks & self.main_loop.blocks:  # type: ignore[union-attr]
            return Overlap(False, "no asynchronous loads in a loop")
        loads = [one for one in self.flow.instructions(feeding.blocks) if _TMA_LOAD.match(one.opcode)]
        buffers = min(self._ring(_barrier(one)) for one in loads)
        if buffers < 2:
            return Overlap(False, f"another partition loads, into {buffers} buffer")
        return Overlap(True, "another partition loads, into several buffers")

    def _ring(self, barrier: Address) -> int:
        """The number of contiguous mbarriers in memory from a ring's first mbarrier on; 0 if none is found.

        Triton begins every ring at a multiple of 16 bytes, so that a single mbarrier never counts as two.
        """
        there = {self._offset(_barrier(one)) for one in self.all if one.opcode.startswith("mbarrier.init")}
        at, count = self._offset(barrier), 0
        while at + BARRIER_BYTES * count in there:
            count += 1
        return count

    # ------------------------------------------------------------ registers

    @cached_property
    def _definitions(self) -> dict[str, Instruction]:
        """The instruction that computes each register, for registers that only one instruction writes."""
        found: dict[str, list[Instruction]] = {}
        for one in self.all:
            if one.opcode.split(".")[0] in _PURE and isinstance(one.operands[0], Register):
                found.setdefault(one.operands[0].name, []).append(one)
        return {register: each[0] for register, each in found.items() if len(each) == 1}

    def _value(self, operand: Operand) -> str:
        """A value, as an expression of constants and of registers that several instructions write."""
        if isinstance(operand, Address):
            return f"{self._value(operand.base)} + {operand.offset}"
        one = self._definitions.get(operand.name) if isinstance(operand, Register) else None
        if one is None:
            return str(operand)
        # The same address in 64 bits, or the same mbarrier of the first program of a pair.
        if one.opcode.startswith(("cvt", "mov")) or _clears_rank(one):
            return self._value(one.operands[1])
        return f"{one.opcode}({', '.join(map(self._value, one.operands[1:]))})"

    def _offset(self, operand: Operand) -> int:
        """The sum of the constants in an address: its offset in shared memory, at the first buffer of a ring."""
        if isinstance(operand, Address):
            return self._offset(operand.base) + operand.offset
        if isinstance(operand, Immediate):
            return _signed(operand)
        one = self._definitions.get(operand.name) if isinstance(operand, Register) else None
        if one is None:
            return 0
        if _clears_rank(one):
            return self._offset(one.operands[1])
        return sum(map(self._offset, one.operands[1:])) if one.opcode.startswith(("add", "mov", "cvt")) else 0


def _barrier(one: Instruction) -> Address:
    """The mbarrier of a wait, a commit or a TMA load: its last address."""
    return [each for each in one.operands if isinstance(each, Address)][-1]


def _signed(constant: Immediate) -> int:
    return constant.bits - 2**64 * (constant.bits >> 63)


def _clears_rank(one: Instruction) -> bool:
    """Whether an instruction clears the rank in an address, and at most low bits, which are known to be 0."""
    if one.opcode != "and.b32" or not isinstance(one.operands[2], Immediate) or _signed(one.operands[2]) >= 0:
        return False
    cleared = ~_signed(one.operands[2])
    low = cleared & ~_RANK_IN_PAIR
    return low != cleared and low & (low + 1) == 0


_PURE = ("add", "sub", "mul", "mad", "shl", "shr", "and", "or", "xor", "mov", "cvt", "cvta", "selp", "min", "max")


def _control_flow(program: Program) -> ControlFlow[Instruction]:
    edges = edges_of(program)
    index = {start: i for i, start in enumerate(edges)}
    ends = [*list(edges)[1:], len(program.instructions)]
    return ControlFlow([Block(program.instructions[start:end], tuple(index[each] for each in following))
                        for (start, following), end in zip(edges.items(), ends, strict=True)])  # fmt: skip
