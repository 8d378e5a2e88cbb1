"""What a target says about its GPU, and that launches are made for its multiprocessors."""

import pytest
import torch

from fp4compile.formats import formats
from fp4compile.formats.epilogue import Epilogue
from fp4compile.formats.product_spec import OperandSpec, ProductSpec
from fp4compile.hardware import Target
from fp4compile.templates.choose import choose
from fp4compile.templates.launch import dry_run, target_of
from fp4compile.templates.problem import Problem
from tests.helpers import absent_gpu
from tests.helpers.kernels import INTERPRETING

NVFP4, MXFP8 = formats.get("nvfp4"), formats.get("mxfp8")


@pytest.mark.parametrize(
    "sm, multiprocessors", [(90, 132), (100, 148), (103, 160), (120, 188), (0, 132), (89, 132), (101, 148), (121, 188)]
)
def test_multiprocessors(sm, multiprocessors):
    """Of the GPUs that are listed; another one counts as the nearest before it, or as an H200."""
    assert Target(sm).multiprocessors == multiprocessors
    assert Target(sm) == Target(sm, multiprocessors) != Target(sm, 16)


@pytest.mark.skipif(INTERPRETING, reason="stands for no GPU")
def test_the_target_of_a_gpu_that_is_there(monkeypatch):
    """Its own multiprocessors, not those of its capability; a device without a number is the current one."""
    absent_gpu.install(monkeypatch, [(9, 0, 132), (9, 0, 16), (10, 3, 160)])
    assert [target_of(torch.device("cuda", i)) for i in range(3)] == [Target(90), Target(90, 16), Target(103)]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert target_of(torch.device("cuda")) == Target(90, 16)
    with dry_run(Target(100)):
        assert target_of(torch.device("cuda")) == Target(100, 148)


@pytest.mark.parametrize("multiprocessors", [16, 114, 132, 148])
def test_grids_are_made_for_the_multiprocessors(multiprocessors):
    """Of the kernels that stream weights: so many programs for each multiprocessor, or so many parts of K."""

    def config(m, n=28672, k=4096):
        plain, packed = OperandSpec(None, torch.bfloat16), OperandSpec(NVFP4, NVFP4.data_dtype, outer="tensor")
        spec = ProductSpec(plain, packed, torch.bfloat16)
        return choose(Problem(spec, m, n, k, Target(90, multiprocessors))).config

    assert config(1).grid in (2 * multiprocessors, 3 * multiprocessors)
    assert config(4).grid == 6 * multiprocessors
    few = config(32, n=4096)
    assert few.split_k == {16: 1, 114: 8, 132: 4, 148: 4}[multiprocessors]
    programs = min(-(-few.grid(32, 4096) // multiprocessors), 2)  # more have no room
    assert few.shared * programs <= Target(90).shared_memory


@pytest.mark.parametrize(("m", "n", "k", "epilogue", "rows", "warps", "split_k"), [
    (16, 8192, 8192, False, 16, 4, 4), (16, 1024, 4096, False, 16, 4, 8), (9, 2560, 9728, False, 16, 4, 8),
    (17, 10240, 8192, False, 32, 8, 4),
    (33, 28672, 4096, False, 48, 16, 1), (33, 28672, 4096, True, 48, 8, 1), (48, 5120, 5120, False, 48, 4, 4),
    (64, 1024, 2048, False, 64, 4, 4), (64, 28672, 4096, False, 64, 16, 1), (64, 28672, 4096, True, 64, 8, 1),
    (49, 5120, 17408, False, 64, 8, 8),
])  # fmt: skip
def test_tiles_of_up_to_64_rows(m, n, k, epilogue, rows, warps, split_k):
    """Rows of the next size; parts of K for a small B; 16 warps for a large one, without an epilogue."""
    plain, packed = OperandSpec(None, torch.bfloat16), OperandSpec(NVFP4, NVFP4.data_dtype, outer="tensor")
    steps = Epilogue.parse(["sigmoid product"], torch.bfloat16, torch.bfloat16) if epilogue else None
    spec = ProductSpec(plain, packed, torch.bfloat16, epilogue=steps)
    config = choose(Problem(spec, m, n, k, Target(90, 132))).config
    assert (config.rows, config.warps, config.split_k) == (rows, warps, split_k)


@pytest.mark.parametrize(("fmt", "target", "n", "programs"), [
    (NVFP4, Target(100), 4096, 256), (NVFP4, Target(100), 4608, 288), (NVFP4, Target(103), 4608, 288),
    (NVFP4, Target(100), 4736, 148), (MXFP8, Target(90), 4096, 128), (MXFP8, Target(90), 4064, 254),
])  # fmt: skip
def test_dequantised_tiles_fill_the_gpu(fmt, target, n, programs):
    """On SM100 with a program for each multiprocessor; 128 of an H200's 132 are enough, as measured."""
    plain, packed = OperandSpec(None, torch.bfloat16), OperandSpec(fmt, fmt.data_dtype)
    choice = choose(Problem(ProductSpec(plain, packed, torch.bfloat16), 16, n, 4096, target))
    config = choice.config
    assert choice.kernel == "dequant_tiles" and -(-n // config.bn) * config.split_k == programs
