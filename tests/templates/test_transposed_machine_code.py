"""Machine code of gradients times packed weights on Hopper: registers, shared memory, instructions of the main loop."""

import re

import pytest
import torch

import fp4compile.ops.matmul  # noqa: F401
from fp4compile import _compat
from fp4compile.check.sass import disassemble
from fp4compile.formats import formats
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.hardware import Target
from fp4compile.templates.launch import dry_run
from fp4compile.templates.multiply import multiply
from tests.helpers.kernels import INTERPRETING, spilled_bytes

pytestmark = pytest.mark.skipif(INTERPRETING, reason="compiles")


def compiled(m, n, k):
    """(constants, code) of the product of a gradient [m, k] and packed weights [k, n]."""
    fmt = formats.get("nvfp4")
    shapes = ((k, n // 2), torch.uint8), ((k, n // 16), fmt.scale_dtype), ((), torch.float32)
    b = Operand(*(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes), fmt)
    a = Operand(torch.empty(m, k, dtype=torch.bfloat16, device="meta"))
    with dry_run(Target(90)) as launches:
        multiply(Arguments(a, b, None, torch.bfloat16, b_transposed=True))
    launch = launches[0]
    code = _compat.compile_ahead(launch.kernel, launch.args, launch.constants, launch.num_warps, 90, launch.num_stages)
    return launch.constants, code


# 256 rows are what the matrix units need to be busy; two parts of a warp have the least registers left.
@pytest.mark.parametrize(("m", "n", "tile"), [(2048, 4096, (256, 1)), (96, 28672, (96, 2))], ids=["256", "two parts"])
def test_transposed_weights_are_dequantised_while_wgmma_runs(m, n, tile):
    """One group of `wgmma` runs on, and its registers are left alone. A step has few instructions beside each one."""
    constants, code = compiled(m, n, 4096)
    assert (constants["ROWS"], constants["PARTS"]) == tile and spilled_bytes(code.asm["cubin"]) == 0
    assert code.metadata.shared <= 232448
    sass = disassemble(code.asm["cubin"])
    awaited = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d)", sass.text)
    assert awaited == ["0x1"] * 2 * tile[1] + ["0x0"]
    used = re.findall(r"HGMMA\.64x\d+x16\S* R\d+, R(\d+), .*?(gsb0)?\s*;", sass.text)
    groups = [set()]
    for register, last in used:
        groups[-1].add(register)
        groups += [set()] if last else []
    assert not groups.pop() and all(not one & other for one, other in zip(groups, groups[1:] + groups[:1], strict=True))
    loop = sass.flow.loop_around(lambda one: one.opcode.startswith("HGMMA"))
    opcodes = [one.opcode.split(".")[0] for one in sass.flow.instructions(loop.blocks)]
    assert opcodes.count("LDSM") == 4 * tile[1] and opcodes.count("HGMMA") == 8 * tile[1]
    assert len(opcodes) <= 44 * opcodes.count("HGMMA")
