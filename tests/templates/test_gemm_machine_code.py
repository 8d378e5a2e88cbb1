"""Machine code of products on Hopper: the instructions, registers and shared memory that the kernels rely on."""

import re

import pytest
import torch

from fp4compile.check.sass import disassemble
from fp4compile.hardware import Target
from fp4compile.templates.gemm.wgmma_sm90 import needed_bytes
from tests.helpers.kernels import INTERPRETING, compile_ahead, launches, spilled_bytes

pytestmark = pytest.mark.skipif(INTERPRETING, reason="compiles")


@pytest.mark.parametrize(("a", "b", "m", "instruction"), [
    (torch.bfloat16, "nvfp4", 1, "mma.sync.aligned.m16n8k16.row.col.f32.bf16"),
    ("nvfp4", "nvfp4", 8, "mma.sync.aligned.m16n8k16.row.col.f32.f16"),
    ("nvfp4", "nvfp4", 16, "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16"),
    (torch.bfloat16, "nvfp4_16x16", 17, "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16"),
    (torch.bfloat16, "nvfp4", 64, "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16"),
    (torch.bfloat16, "nvfp4", 512, "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16"),
    ("mxfp8", "mxfp8", 16, "mma.sync.aligned.m16n8k16.row.col.f32.bf16"),
    (torch.bfloat16, "mxfp8", 64, "wgmma.mma_async"),
    ("mxfp8", "mxfp8", 300, "wgmma.mma_async"),
], ids=str)  # fmt: skip
def test_dequantised_products_use_matrix_units(a, b, m, instruction):
    """On Hopper the matrix units make the sums, nothing spills, and shared memory suffices."""
    compiled = compile_ahead(90, a, b, m)
    assert instruction in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 232448
    assert spilled_bytes(compiled.asm["cubin"]) == 0


@pytest.mark.parametrize(("sm", "a", "b"), [
    (80, torch.bfloat16, "float8_128x128"), (80, "float8_1x128", "float8_128x128"), (89, torch.bfloat16, "nvfp4"),
    (89, torch.bfloat16, "float8_1x128"), (90, torch.bfloat16, "float8_128x128"),
], ids=str)  # fmt: skip
def test_shared_memory_suffices(sm, a, b):
    """32 rows take the largest tiles of all numbers of rows; a share of FP8's steps is a whole block."""
    assert compile_ahead(sm, a, b, 32).metadata.shared <= Target(sm).shared_memory


@pytest.mark.parametrize("m", [9, 32, 64, 512])
def test_shared_memory_is_reserved(m):
    """Triton allocates, for a loop that is never run, what the inline PTX uses."""
    (_, found, *_) = launches(90, torch.bfloat16, "nvfp4", m)
    sizes = ("ROWS", "WARPS", "PARTS", "STAGES", "STEPS_PER_STAGE", "BUFFERS")
    needed = needed_bytes(*map(found.constants.get, sizes))
    assert compile_ahead(90, torch.bfloat16, "nvfp4", m).metadata.shared == found.constants["SHARED"] >= needed + 1023


@pytest.mark.parametrize(("n", "m"), [(512, 16), (4096, 16), (33792, 16), (4096, 32), (512, 64), (4096, 64),
                                    (32768, 128), (8192, 512)])  # fmt: skip
def test_registers_of_running_wgmma_are_left_alone(n, m):
    """While `wgmma` reads some registers of B, the next elements of B are dequantised to other registers."""
    sass = disassemble(compile_ahead(90, torch.bfloat16, "nvfp4", m, n).asm["cubin"]).text
    used = re.findall(r"HGMMA\.64x\d+x16\S* R\d+, R(\d+), .*?(gsb0)?\s*;", sass)
    groups = [set()]
    for register, last in used:
        groups[-1].add(register)
        groups += [set()] if last else []
    assert not groups.pop() and len(groups) > 1
    assert all(not one & other for one, other in zip(groups, groups[1:] + groups[:1], strict=True))


@pytest.mark.parametrize("m", [64, 512])
def test_b_is_dequantised_while_wgmma_runs(m):
    """One group of `wgmma` always runs on. ptxas waits for all of them where it cannot follow their registers."""
    sass = disassemble(compile_ahead(90, torch.bfloat16, "nvfp4", m).asm["cubin"]).text
    awaited = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d)", sass)
    assert awaited == ["0x1"] * (len(awaited) - 1) + ["0x0"]
    assert len(awaited) > 2
