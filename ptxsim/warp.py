"""Instructions by which the threads of a warp exchange values.

Source: PTX ISA, "shfl.sync", "redux.sync", "vote.sync", "elect.sync", "bar.warp.sync"; confidence high, except for the
elected thread: the ISA leaves it open, and here it is the lowest one. A warp's threads must execute one of these
together: it is a fault if others than exactly the threads of the mask do.
"""

from collections.abc import Callable

import numpy as np

from ptxsim.fault import Fault
from ptxsim.floating import REDUCTIONS
from ptxsim.forms import Step, expect, form, pair, reader, writer
from ptxsim.fragment import LANES, Fragment
from ptxsim.parse import Immediate, Instruction, Operand, Pair, Program, Unused

_LANE = np.arange(LANES)
_BIT = np.uint32(1) << _LANE.astype(np.uint32)


def _participants(operand: Operand) -> Callable[[Fragment], None]:
    """A function that raises Fault unless exactly the threads of a mask are running, in each warp that has any."""
    read = reader(operand, "b32")
    everyone = isinstance(operand, Immediate) and operand.bits % 2**32 == 2**32 - 1

    def check(fragment: Fragment) -> None:
        if everyone and fragment.whole:
            return
        mask = read(fragment)
        running = fragment.running.reshape(-1, LANES)
        present = np.bitwise_or.reduce(np.where(running, _BIT, np.uint32(0)), axis=1)
        wrong = running & (fragment.by_warp(mask) != present[:, None])
        if wrong.any():
            warp, lane = np.argwhere(wrong)[0]
            named = int(fragment.by_warp(mask)[warp, lane])
            raise Fault(
                f"thread {lane} of warp {fragment.warps[warp]} of the machine names the threads {named:#010x} of its"
                f" warp, and {int(present[warp]):#010x} are there"
            )

    return check


@form("bar.warp.sync")
def _barrier(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 1)
    check = _participants(instruction.operands[0])

    def step(fragment: Fragment) -> None:
        check(fragment)
        machine, warps = fragment.machine, fragment.running_warps()
        machine.meet(warps // machine.warps_of_cluster, warps % machine.warps_of_cluster)

    return step


@form("elect.sync")
def _elect(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 2)
    leader, elected = pair(instruction.operands[0])
    write_leader, write_elected = writer(leader, "b32"), writer(elected, "pred")
    check = _participants(instruction.operands[1])

    def step(fragment: Fragment) -> None:
        check(fragment)
        lowest = fragment.running.reshape(-1, LANES).argmax(1)
        write_leader(fragment, np.repeat(lowest.astype(np.uint32), LANES))
        write_elected(fragment, (lowest[:, None] == _LANE).ravel())

    return step


@form("vote.sync.any.pred", "vote.sync.all.pred", "vote.sync.ballot.b32")
def _vote(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 3)
    into, source, mask = instruction.operands
    mode, kind = instruction.opcode.split(".")[2:]
    write, read, check = writer(into, kind), reader(source, "pred"), _participants(mask)

    def step(fragment: Fragment) -> None:
        check(fragment)
        votes = fragment.every(read(fragment))
        if mode == "all":
            found = fragment.by_warp(votes | ~fragment.running).all(1)
        else:
            found = fragment.by_warp(votes & fragment.running)
            found = found.any(1) if mode == "any" else np.bitwise_or.reduce(np.where(found, _BIT, 0), axis=1)
        write(fragment, np.repeat(found, LANES))

    return step


# ---------------------------------------------------------------- reductions

_REDUCTIONS: dict[str, tuple[np.ufunc, str, int]] = {
    "add.s32": (np.add, "u32", 0), "add.u32": (np.add, "u32", 0),
    "min.s32": (np.minimum, "s32", 2**31 - 1), "max.s32": (np.maximum, "s32", -(2**31)),
    "min.u32": (np.minimum, "u32", 2**32 - 1), "max.u32": (np.maximum, "u32", 0),
    "and.b32": (np.bitwise_and, "u32", 2**32 - 1), "or.b32": (np.bitwise_or, "u32", 0),
    "xor.b32": (np.bitwise_xor, "u32", 0),
}  # fmt: skip


@form(*[f"redux.sync.{name}" for name in _REDUCTIONS])
def _reduce(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 3)
    ufunc, kind, neutral = _REDUCTIONS[instruction.opcode.removeprefix("redux.sync.")]
    into, source, mask = instruction.operands
    write, read, check = writer(into, kind), reader(source, kind), _participants(mask)

    def step(fragment: Fragment) -> None:
        check(fragment)
        values = read(fragment)
        if not fragment.whole:
            values = np.where(fragment.running, values, values.dtype.type(neutral))
        found = ufunc.reduce(fragment.by_warp(values), axis=1, dtype=values.dtype)
        write(fragment, np.repeat(found, LANES))

    return step


@form(*[f"redux.sync.{name}" for name in REDUCTIONS])
def _reduce_floats(instruction: Instruction, program: Program) -> Step:
    """The step of a minimum or maximum of float32. Threads that do not run count as the warp's first one that does."""
    expect(instruction, 3)
    reduced = REDUCTIONS[instruction.opcode.removeprefix("redux.sync.")]
    into, source, mask = instruction.operands
    write, read, check = writer(into, "f32"), reader(source, "f32"), _participants(mask)

    def step(fragment: Fragment) -> None:
        check(fragment)
        values = fragment.by_warp(read(fragment))
        if not fragment.whole:
            running = fragment.by_warp(fragment.running)
            values = np.where(running, values, np.take_along_axis(values, running.argmax(1)[:, None], 1))
        write(fragment, np.repeat(reduced(values), LANES))

    return step


# ---------------------------------------------------------------- shuffles


def _source(mode: str, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the lane that each lane reads, whether it lies within the lane's segment). b, c: int64, the operands."""
    segment = c >> 8 & 31
    first = _LANE & segment
    last = first | c & 31 & ~segment
    match mode:
        case "up":
            lane = _LANE - (b & 31)
            inside = lane >= last
        case "down":
            lane = _LANE + (b & 31)
            inside = lane <= last
        case "bfly":
            lane = _LANE ^ b & 31
            inside = lane <= last
        case "idx":
            lane = first | b & 31 & ~segment
            inside = lane <= last
    return np.where(inside, lane, _LANE), inside


@form(*[f"shfl.sync.{mode}.b32" for mode in ("up", "down", "bfly", "idx")], moved=(1,))
def _shuffle(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 5)
    mode = instruction.opcode.split(".")[2]
    into, source, b, c, mask = instruction.operands
    result, within = (into.first, into.second) if isinstance(into, Pair) else (into, Unused())
    write, write_within = writer(result, "b32"), writer(within, "pred")
    read, check, lanes = reader(source, "b32"), _participants(mask), _lanes(mode, b, c)

    def step(fragment: Fragment) -> None:
        check(fragment)
        lane, inside = lanes(fragment)
        if not fragment.whole and not (_gather(fragment.running, lane) | ~fragment.running).all():
            raise Fault("a thread reads from a thread that is not there")
        undefined = fragment.undefined([source])
        write(fragment, _gather(fragment.by_warp(read(fragment)), lane))
        if undefined is not None:
            fragment.mark(result, _gather(undefined[0], lane))
        if isinstance(into, Pair):
            write_within(fragment, np.broadcast_to(inside, (len(fragment.warps), LANES)).ravel())

    return step


def _lanes(mode: str, b: Operand, c: Operand) -> Callable[[Fragment], tuple[np.ndarray, np.ndarray]]:
    """A function that returns `_source` of the operands, as arrays [32] or [warps, 32]."""
    read_b, read_c = reader(b, "u32"), reader(c, "u32")
    if isinstance(b, Immediate) and isinstance(c, Immediate):
        constant = _source(mode, np.array(b.bits & 31), np.array(c.bits & 0x1FFF))
        return lambda fragment: constant

    def by_thread(fragment: Fragment) -> tuple[np.ndarray, np.ndarray]:
        return _source(mode, *(fragment.by_warp(read(fragment)).astype(np.int64) for read in (read_b, read_c)))

    return by_thread


def _gather(values: np.ndarray, lane: np.ndarray) -> np.ndarray:
    """For each thread, the value of a lane of its warp. lane: [32] or [warps, 32]."""
    by_warp = values.reshape(-1, LANES)
    if lane.ndim == 1:
        return by_warp.take(lane, 1).ravel()
    return np.take_along_axis(by_warp, lane, 1).ravel()
