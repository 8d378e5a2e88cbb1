"""Values that nothing wrote, and where they may go.

Memory that nothing wrote may be loaded, copied and computed with, as long as nothing depends on it: a tile has rows of
no tensor, a sum is scaled before its first product. Registers, shared memory and tensor memory therefore record beside
their contents which of them are undefined. A use that somebody can see is a fault: a store or a copy to global memory,
an address, a branch or another predicate of an instruction, a count, a descriptor, an atomic operation, a vote. (LLVM's
MemorySanitizer follows the same rule.)

Exact: copies by whole registers and cells of shared memory, words of tensor memory, and selections. The result of an
instruction is undefined if an operand is, except where another operand alone decides it (`and` with zero), so some
faults are false where a value is undefined in name only, as `x - x`. Of a product, element (m, n) is undefined if
anything in row m of A, in column n of B, or the element that it is added to is; of an operand that is transposed in
shared memory, everything is if anything is.
"""

import numpy as np

from ptxsim.fault import Fault
from ptxsim.parse import Instruction

_NAMED = 3  # reads that a fault lists


class Undefined(dict[str, np.ndarray]):
    """For each register that holds values which nothing wrote, in which threads: bool [threads].

    threads: of the machine. executing: the instruction that reads memory. reads: what was read, in order.
    """

    def __init__(self, threads: int) -> None:
        super().__init__()
        self.threads = threads
        self.executing: Instruction | None = None
        self.reads: dict[str, None] = {}

    def found(self, what: str) -> None:
        """Record that the present instruction reads a kind of memory that nothing wrote."""
        assert self.executing is not None
        self.reads.setdefault(f"line {self.executing.line} reads {what} that nothing wrote")

    def fault(self, use: str) -> Fault:
        """The fault of a use of values which nothing wrote."""
        return Fault(f"{use}: {'; '.join([*self.reads][:_NAMED])}")
