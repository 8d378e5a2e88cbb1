"""`choose`: which kernel serves a product, what a graph may do with it, and that nothing else decides."""

import ast
import dataclasses
from pathlib import Path

import pytest
import torch

import fp4compile
from fp4compile import formats
from fp4compile.targets import Target
from fp4compile.templates.gemm import choose as module
from fp4compile.templates.gemm.choose import REGISTRY, candidates, choose, named
from fp4compile.templates.gemm.problem import OperandType, Problem
from tests.helpers.choices import configured, only, without

BF16 = torch.bfloat16


def operand_type(name, swizzled=False):
    if name is None:
        return OperandType(None, BF16)
    fmt = formats.get(name)
    return OperandType(fmt, fmt.data_dtype, swizzled and fmt.scale is not None, fmt.outer or "none")


def problem(a, b, m, sm, n=8192, k=4096, **options):
    return Problem(operand_type(a, sm >= 100), operand_type(b, sm >= 100), m, n, k, BF16, Target(sm), **options)


@pytest.mark.parametrize(("a", "b", "m", "sm", "kernel", "tier"), [
    (None, "nvfp4", 1, 90, "gemv", "emulated"), (None, "nvfp4", 3, 90, "skinny", "emulated"),
    (None, "nvfp4", 40, 90, "wgmma_sm90", "emulated"), (None, "nvfp4", 40, 80, "dequant_tiles", "emulated"),
    ("nvfp4", "nvfp4", 512, 90, "dequant_operand", "emulated"), ("mxfp8", "mxfp8", 8, 90, "dequant_tiles", "emulated"),
    ("float8_rowwise", "float8_rowwise", 7, 90, "library_row_scaled", "native"),
    ("float8_rowwise", "float8_rowwise", 7, 86, "dequant_tiles", "emulated"),
    ("nvfp4", "nvfp4", 512, 100, "block_scaled_sm100", "native"), (None, "nvfp4", 1, 100, "gemv", "emulated"),
    ("nvfp4_one_level", "nvfp4_one_level", 512, 100, "library_block_scaled", "native"),
    ("mxfp8", "mxfp8", 512, 103, "library_block_scaled", "native"),
    ("mxfp8", "mxfp4", 512, 100, "block_scaled_sm100", "native"),
    ("mxfp8", "mxfp4", 512, 120, "dequant_operand", "emulated"),
    ("nvfp4", "nvfp4", 512, 120, "block_scaled_sm100", "native"),
    ("nvfp4", "nvfp4", 512, 0, "dequant_tiles", "emulated"),
])  # fmt: skip
def test_kernel_and_tier(a, b, m, sm, kernel, tier):
    choice = choose(problem(a, b, m, sm))
    assert (choice.kernel, choice.tier, choice.settled) == (kernel, tier, True)
    assert choice.config == named(kernel).configure(problem(a, b, m, sm))


def test_an_epilogue_is_not_the_librarys():
    """Where the library computes the product, a kernel computes it with an epilogue; that of few rows has none."""
    mx = problem("mxfp8", "mxfp8", 512, 100)
    assert choose(mx).takes_epilogue and choose(mx).kernel == "library_block_scaled"
    assert choose(dataclasses.replace(mx, epilogue=True)).kernel == "block_scaled_sm100"
    taken = {m: choose(problem(None, "nvfp4", m, 90)).takes_epilogue for m in (1, 8, 9, 64, 65)}
    assert taken == {1: False, 8: False, 9: True, 64: True, 65: True}
    assert not choose(problem("mxfp8", "mxfp8", 512, 90)).takes_epilogue  # the tiles may be computed again
    assert not choose(problem("float8_rowwise", "float8_rowwise", 512, 90)).takes_epilogue


def test_groups():
    """Products of few rows of one A, if their weights are alike."""
    one, other = problem(None, "nvfp4", 1, 90), problem(None, "nvfp4", 1, 90, n=1024)
    assert choose(one).group == choose(other).group is not None
    assert choose(problem(None, "nvfp4_rowwise", 1, 90)).group != choose(one).group
    assert choose(problem(None, "nvfp4", 9, 90)).group is None
    assert choose(problem(None, "nvfp4", 1, 90, n=0)).group is None


def test_a_product_in_parts_is_no_part_of_a_graph():
    small, large = (problem("nvfp4", "nvfp4", m, 90, n=1024, k=16384) for m in (4096, 16384))
    assert choose(small).traceable and not choose(large).traceable
    assert choose(small).dequantizes_a and choose(large).dequantizes_a


def test_preferred():
    mx = problem("mxfp8", "mxfp8", 512, 100)
    assert candidates(mx) == ("library_block_scaled", "block_scaled_sm100")
    assert choose(mx, "block_scaled_sm100").kernel == "block_scaled_sm100"
    assert candidates(problem("nvfp4", "nvfp4", 512, 100)) == ("block_scaled_sm100",)
    with pytest.raises(ValueError, match="kernel: 'cutlass' is none of library_block_scaled, "):
        choose(mx, "cutlass")


def test_the_registry(monkeypatch):
    """Names are unique, and a candidate serves only what it says: taken away, the next one in rank serves."""
    assert len({candidate.name for candidate in REGISTRY}) == len(REGISTRY)
    one = problem(None, "nvfp4", 1, 90)
    with monkeypatch.context() as patch:
        without(patch, "gemv")
        assert choose(one).kernel == "skinny"
        configured(patch, "skinny", "anything")
        assert choose(one).config == "anything"
    with monkeypatch.context() as patch:
        only(patch, "dequant_tiles")
        assert choose(problem("nvfp4", "nvfp4", 512, 100)).kernel == "dequant_tiles"
    assert module.REGISTRY is REGISTRY


def test_problems_are_keys():
    assert len({problem("nvfp4", "nvfp4", 512, 90), problem("nvfp4", "nvfp4", 512, 90)}) == 1


def test_nobody_else_asks_a_candidate():
    """Outside the GEMM room, no module imports a kernel's file; passes import no device code. All read the Choice."""
    package = Path(fp4compile.__file__).parent
    kernels = {"gemv", "skinny", "wgmma_sm90", "dequant_tiles", "dequant_operand", "block_scaled_sm100", "library",
               "streaming"}  # fmt: skip
    for path in package.rglob("*.py"):
        if path.parent.name == "gemm":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fp4compile.templates.gemm"):
                names = {node.module.rpartition(".")[2], *(alias.name for alias in node.names)}
                assert not names & kernels, (path, names)
            if path.parent.name == "passes" and isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("fp4compile.templates.device"), path
