"""Issue operations of instructions to the tensor pipe of their cluster."""

from collections.abc import Callable, Iterator

import numpy as np

from ptxsim.fault import Fault
from ptxsim.fragment import Fragment
from ptxsim.parse import Instruction
from ptxsim.state import LANES
from ptxsim.tensor_memory import TensorPipe

Operation = Callable[[TensorPipe], None]


def group_of(instruction: Instruction) -> int:
    """The number of programs that take part in a `tcgen05` instruction: its `cta_group`."""
    return int(instruction.opcode.split(".cta_group::")[1][0])


def issue(fragment: Fragment, pair: bool) -> Iterator[tuple[int, tuple[int, ...], Callable[[Operation], None]]]:
    """(lane, ranks of the programs that take part, function that issues an operation) of every running thread.

    pair: whether two programs take part.
    """
    machine = fragment.machine
    for lane, warp in zip(map(int, fragment.lanes()), map(int, fragment.warp_of(fragment.lanes())), strict=True):
        cluster, rank = machine.cluster_of_warp(warp), machine.program_of(warp) % machine.program.cluster
        if pair and (rank % 2 or machine.program.cluster % 2):
            raise Fault("an instruction for a pair of programs, from a program that is not the first of a pair")
        local = machine.local_warp(warp)
        rows = machine.clocks.of_tensor(cluster, local, in_pipe=True)

        def begin(
            operation: Operation, cluster: int = cluster, local: int = local, rows: np.ndarray = rows, lane: int = lane
        ) -> None:
            pipe = machine.tensor_memory.pipes[cluster]
            pipe.issued[local] += 1
            pipe.issuers[local] = lane % LANES

            def run() -> None:
                pipe.begin(local, rows)
                operation(pipe)

            machine.in_pipe(fragment.instruction, cluster, run)

        yield lane, (rank, rank + 1) if pair else (rank,), begin
