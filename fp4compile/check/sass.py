"""SASS, the machine code of a GPU, as nvdisasm prints it: its control flow and its instructions."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property

from fp4compile import _compat
from fp4compile.check.control_flow import Block, ControlFlow


@dataclass(frozen=True)
class SassInstruction:
    """An instruction. predicate: such as "@!P0", or empty. opcode: with its modifiers. operands: as printed."""

    predicate: str
    opcode: str
    operands: str


@dataclass(frozen=True)
class Sass:
    """The machine code of one kernel.

    text: the output of nvdisasm. usage: the output of `cuobjdump -res-usage`. encoded: the output of nvdisasm with the
    128 bits of each instruction.
    """

    text: str
    usage: str
    encoded: str = ""

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        return int(re.search(r"REG:(\d+)", self.usage)[1])  # type: ignore[index]

    @property
    def local_accesses(self) -> int:
        """Accesses of local memory: spilled registers, or an indexed array.

        Stores that are never read back do not count: ptxas 12.8 stores a zero beside each TMA load on SM120.
        """
        read_back = re.search(r"\bLDL\b", self.text)
        return len(re.findall(r"\b(?:LDL|STL)\b", self.text)) if read_back else 0

    @property
    def lost_values(self) -> list[str]:
        """Instructions that compute with R1, the stack pointer, in a kernel that has no stack.

        ptxas 12.8, which comes with Triton 3.6, dropped 16-bit values of a kernel and read R1 instead, so that all
        block scales were equal. Instructions that pack a value with an unused one may read any register, so they are
        skipped.
        """
        if "STACK:0" not in self.usage:
            return []
        found = []
        for one in self.flow.instructions():
            sources = one.operands.partition(",")[2]
            packs = one.opcode.startswith("F2FP") and "PACK_AB" in one.opcode or one.opcode == "PRMT"
            if not packs and re.search(r"\bR1\b", re.sub(r"\[[^]]*\]", "", sources)):
                found.append(f"{one.opcode} {one.operands}".rstrip(" ;"))
        return found

    @cached_property
    def flow(self) -> ControlFlow[SassInstruction]:
        """The control flow of the kernel. A call continues with the next instruction; called code is left out."""
        return _control_flow(self.text)

    def widths(self, opcode: str) -> list[int]:
        """Bytes that each global access with an opcode ("LDG", "STG") moves for a thread."""
        found = (one.opcode for one in self.flow.instructions() if one.opcode.split(".")[0] == opcode)
        return [next((_WIDTHS[part] for part in one.split(".") if part in _WIDTHS), 4) for one in found]

    def executed(self, trips: int = 1, idle: bool = False) -> int:
        """The number of instructions that a thread executes; see `ControlFlow.way`.

        trips: the steps of each loop. idle: whether the program has no work. Calls are the rare instructions: ptxas
        calls the slow path of a division or a reciprocal, for operands at the ends of float32's range.
        """
        return len(self.flow.way(lambda one: one.opcode.startswith("CALL"), trips, idle))


def disassemble(cubin: bytes) -> Sass:
    """The machine code of a cubin."""
    instructions = memoryview(cubin)[: len(cubin) // 16 * 16].cast("Q")[::2]  # sections of code are aligned
    jumps_by_table = any(word & 0xFFF == _BRX for word in instructions)  # its targets need nvdisasm's slower analysis
    encoded = _run(cubin, "nvdisasm", "-c", "-hex", *() if jumps_by_table else ("-ndf",))
    text = re.sub(r"\n? +/\* 0x[0-9a-f]{16} \*/", "", encoded)
    return Sass(text, _run(cubin, "cuobjdump", "-res-usage"), encoded)


def _run(cubin: bytes, tool: str, *arguments: str) -> str:
    """A tool's output for a cubin. Raises RuntimeError with the output if it fails, as on an unknown architecture."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([_compat.cuda_tool(tool), *arguments, file.name], capture_output=True, text=True)
    said = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(" ".join(said.split()) or f"{tool} ended with status {done.returncode}")
    return said


_BRX = 0x949  # the lowest 12 bits of an instruction are its opcode
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


_LABEL = re.compile(r"(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z]\S*)\s*(.*)")


def _control_flow(text: str) -> ControlFlow[SassInstruction]:
    _, _, body = text.partition("\n.text.")
    runs: list[list[SassInstruction]] = [[]]
    labels: dict[str, int] = {}
    for line in body.splitlines():
        if label := _LABEL.match(line):
            if runs[-1]:
                runs.append([])
            labels[label[1]] = len(runs) - 1
        elif found := _INSTRUCTION.match(line):
            runs[-1].append(SassInstruction(found[1] or "", found[2], found[3]))
            if found[2].split(".")[0] in ("BRA", "BRX", "EXIT", "RET", "CALL"):
                runs.append([])
    blocks = [Block(tuple(run), _successors(run, i, len(runs), labels)) for i, run in enumerate(runs)]
    return ControlFlow([*blocks, Block((), ())])  # the last block is the target of an EXIT with a predicate


def _successors(run: list[SassInstruction], index: int, count: int, labels: dict[str, int]) -> tuple[int, ...]:
    following = (index + 1,) if index + 1 < count else ()
    last = run[-1] if run else SassInstruction("", "", "")
    opcode = last.opcode.split(".")[0]
    if opcode == "BRX":
        return tuple(labels[label] for label in re.findall(r"\.L_x_\d+", last.operands.partition("TARGETS")[2]))
    conditional = bool(last.predicate) or bool(re.match(r"!?U?P\d", last.operands))
    if opcode == "BRA":
        target = labels[re.findall(r"\.L_x_\d+", last.operands)[0]]
        return (target, *following) if conditional else (target,)
    if opcode in ("EXIT", "RET"):
        return (count, *following) if conditional else ()
    return following


# ---------------------------------------------------------------- waiting for tensor memory

# Scoreboards in the control bits of instructions show whether code waits for loads from tensor memory. Triton places
# `tcgen05.wait::ld` after the first uses of the loaded registers and leaves the waits to ptxas. An `LDTM` names a
# scoreboard that it holds until its registers are written, and an instruction waits for the scoreboards in its mask.
# Loads that follow each other complete in order, and only the last one of them names a scoreboard. (The layout of the
# control bits: Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking", 2018, section 2.1; the
# code of the kernels here agrees with it.)
_NO_SCOREBOARD = 7


def hazards(instructions: list[tuple[str, int]]) -> list[str]:
    """The uses, as lines of SASS, of registers that a kernel loads from tensor memory and has not waited for.

    instructions: (text, control bits), in the order of the code.
    """
    found: list[str] = []
    unnamed: set[int] = set()  # registers being loaded, whose scoreboard a later load names
    pending: dict[int, set[int]] = {}  # registers being loaded, by scoreboard
    for text, control in instructions:
        board, waits = control >> 5 & 7, control >> 11 & 63
        for done in [each for each in pending if waits >> each & 1]:
            del pending[done]
        if loads := _LOAD.search(text):
            first = int(loads[2])
            unnamed |= set(range(first, first + int(loads[1] or 1)))
            if board != _NO_SCOREBOARD:
                pending[board] = pending.get(board, set()) | unnamed
                unnamed = set()
        elif unnamed.union(*pending.values()) & {int(number) for number in re.findall(r"\bR(\d+)\b", text)}:
            found.append(text.strip())
    return found


_LOAD = re.compile(r"\bLDTM(?:\.x(\d+))? R(\d+)")


def encoded_instructions(encoded: str) -> list[tuple[str, int]]:
    """(text, control bits) of every instruction."""
    lines, found = encoded.splitlines(), []
    for line, following in zip(lines, lines[1:], strict=False):
        one = re.search(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);\s+/\* 0x[0-9a-f]{16} \*/", line)
        high = re.search(r"/\* 0x([0-9a-f]{16}) \*/", following)
        if one and high:
            found.append((one[1], int(high[1], 16) >> 41))
    return found
