"""Uses of registers that tensor memory is loaded to, before the load ends: found by the control bits of SASS."""

import pytest

from fp4compile.check.sass import hazards

NONE = 7


def instruction(text, board=NONE, waits=()):
    """(text, control bits) of an instruction that names a scoreboard, and that waits for some."""
    return text, board << 5 | sum(1 << each for each in waits) << 11


LOAD = instruction("LDTM.x2 R4, tmem[UR1]", board=1)
USE = "FMUL R8, R5, 2"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ([LOAD, instruction(USE)], [USE]),
        ([LOAD, instruction(USE, waits=[1])], []),
        ([LOAD, instruction("NOP", waits=[1]), instruction(USE)], []),
        ([LOAD, instruction(USE, waits=[2])], [USE]),
        ([LOAD, instruction("FMUL R8, R6, 2")], []),  # another register
        # Loads that follow each other: the last one names the scoreboard of all.
        ([instruction("LDTM.x2 R4, tmem[UR1]"), instruction("LDTM R6, tmem[UR2]", 2), instruction(USE, waits=[2])], []),
        ([instruction("LDTM.x2 R4, tmem[UR1]"), instruction("LDTM R6, tmem[UR2]", 2), instruction(USE)], [USE]),
        ([instruction("LDTM.x2 R4, tmem[UR1]"), instruction(USE, waits=range(6))], [USE]),
    ],
)
def test_hazards(code, found):
    assert hazards(code) == found
