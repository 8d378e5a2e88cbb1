"""The resources of a multiprocessor, how many programs of a kernel fit on it, and the instruction budget of bandwidth.

**The budget of a kernel that reads and writes memory once.** Let it move B bytes per 16 elements. At the GPU's
bandwidth W (bytes a second) that takes B / W seconds. In a second each of the GPU's P multiprocessors issues, with its
four schedulers at the clock C, 4 * C instructions for warps of 32 threads: 128 * C * P thread instructions in all. So
the kernel keeps up with memory only if it executes at most

    budget = B / W * 128 * C * P

thread instructions per 16 elements. On a B200 (P = 148, C = 1.9 GHz, W = 8 TB/s) that is 4.4992 * B: NVFP4 rows of bf16
read 32 bytes and write 8 of codes and 1 of scales, B = 41 and the budget 184; along both directions they write twice
that, B = 50 and the budget 225. It is an upper bound, not a prediction: dependent instructions, and instructions of
several scheduler clocks, leave less.
"""

from dataclasses import dataclass

from fp4compile.formats.layouts import ceil_div
from fp4compile.hardware import Target

SCHEDULERS, LANES = 4, 32
REGISTERS = 65536  # registers of a multiprocessor
TENSOR_COLUMNS = 512  # columns of a multiprocessor's tensor memory
RESERVED = 1024  # bytes of shared memory that the system takes for each program


@dataclass(frozen=True)
class Multiprocessor:
    """The limits of a multiprocessor, and its GPU's rates.

    shared: bytes of shared memory. threads, programs: the most it holds. clock: in Hz. bandwidth: bytes/s from the
    memory of the whole GPU, which has the number of multiprocessors in `Target`.
    """

    shared: int
    threads: int
    programs: int
    clock: float
    bandwidth: float


# H200, B200, B300 and RTX PRO 6000 Blackwell: limits from the CUDA programming guide's table of compute capabilities,
# bandwidth and boost clock (rounded down) as published by the vendor. Only the H200's were measured here.
_MULTIPROCESSORS = {
    90: Multiprocessor(228 * 1024, 2048, 32, 1.98e9, 4.8e12),
    100: Multiprocessor(228 * 1024, 2048, 32, 1.9e9, 8e12),
    103: Multiprocessor(228 * 1024, 2048, 32, 1.9e9, 8e12),
    120: Multiprocessor(100 * 1024, 1536, 24, 2.6e9, 1.79e12),
}


def multiprocessor(sm: int) -> Multiprocessor:
    """The multiprocessor of a compute capability, or of the nearest listed one below it.

    Raises ValueError for a compute capability below all listed ones.
    """
    known = [each for each in _MULTIPROCESSORS if each <= sm]
    if not known:
        raise ValueError(f"sm={sm}: expected a compute capability from {min(_MULTIPROCESSORS)} on")
    return _MULTIPROCESSORS[max(known)]


def programs(sm: int, warps: int, registers: int, shared: int, tensor_columns: int = 0) -> int:
    """The number of programs of a kernel that a multiprocessor holds; 0 if none fits.

    registers: registers of a thread. shared: a program's bytes of shared memory. tensor_columns: a program's columns of
    tensor memory.
    """
    has = multiprocessor(sm)
    warp_registers = 256 * ceil_div(LANES * registers, 256)  # registers are allocated to warps in units of 256
    limits = [
        has.programs, has.threads // (LANES * warps), REGISTERS // (warp_registers * warps),
        has.shared // (shared + RESERVED),
    ]  # fmt: skip
    if tensor_columns:
        limits.append(TENSOR_COLUMNS // tensor_columns)
    return min(limits)


def occupancy(sm: int, warps: int, held: int) -> float:
    """The share of a multiprocessor's warps that so many programs fill."""
    return held * warps * LANES / multiprocessor(sm).threads


def instruction_budget(sm: int, bytes_per_16: float) -> float:
    """Thread instructions for 16 elements that the bandwidth leaves time for; derived at the top of this file."""
    has = multiprocessor(sm)
    slots = SCHEDULERS * LANES * has.clock * Target(sm).multiprocessors
    return bytes_per_16 / has.bandwidth * slots
