"""Whether machine code waits for what it loads from tensor memory: the scoreboards in the control bits of instructions.

Triton places `tcgen05.wait::ld` after the first uses of the loaded registers and leaves these to ptxas. An `LDTM` names
a scoreboard that it holds until its registers are written, and an instruction waits for the scoreboards in its mask.
Loads that follow each other complete in order, and only the last one of them names a scoreboard.
(The layout of the control bits: Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking", 2018,
section 2.1; the code of the kernels here agrees with it.)
"""

import re

_NO_SCOREBOARD = 7


def unwaited_loads(encoded: str) -> list[str]:
    """The uses, as lines of SASS, of registers that a kernel loads from tensor memory and has not waited for.

    encoded: see `sass.Sass`.
    """
    return hazards(_instructions(encoded))


def hazards(instructions: list[tuple[str, int]]) -> list[str]:
    """`unwaited_loads` of instructions, given as (text, control bits), in the order of the code."""
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


def _instructions(encoded: str) -> list[tuple[str, int]]:
    """(text, control bits) of every instruction."""
    lines, found = encoded.splitlines(), []
    for line, following in zip(lines, lines[1:], strict=False):
        one = re.search(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);\s+/\* 0x[0-9a-f]{16} \*/", line)
        high = re.search(r"/\* 0x([0-9a-f]{16}) \*/", following)
        if one and high:
            found.append((one[1], int(high[1], 16) >> 41))
    return found
