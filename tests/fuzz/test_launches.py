"""Random programs whose ops are launched, in a process of Triton's interpreter."""

import pytest
import torch

from tests.helpers.foreign import embedded, poisoned_outputs, same_bits
from tests.helpers.kernels import OLD_TRITON
from tests.helpers.programs import Program

# Of 63 programs those that together met every kind of op, kernel, setting and step that any of them met, among these
# experts' weights, quantised results, amaxes, and rows that are quantised before a move. Pairs of formats are met by
# `test_pairs_of_formats`.
SEEDS = (317, 331, 335, 351, 7028, 7031, 7034, 7035, 7183, 7188, 7205, 7268)


interpreted = pytest.mark.skipif(OLD_TRITON, reason="its interpreter has no tl.dot_scaled, nor mixed tuples")


def printed(folder, *arguments):
    run = Program(["-m", "tests.fuzz", *arguments], folder, environment={"TRITON_INTERPRET": "1"}).ended(timeout=1800)
    assert run.status == 0, run.printed + run.said[-2000:]
    return run.printed


@interpreted
@pytest.mark.slow
def test_random_launches(tmp_path):
    """More programs: `python -m tests.fuzz --launches --seed 100 --count 500`."""
    told = printed(tmp_path, "--launches", "--seeds", *map(str, SEEDS))
    assert told.startswith(f"{len(SEEDS)} runs") and " 3 with rows quantised before a move, 0 findings" in told
    # Every kind of op that the interpreter can run is met.
    for name in ("quantize prologue", "quantize both", "quantize columns", "quantize values", "quantize offs",
                 "quantize each_matrix", "scaled_mm epilogue", "scaled_mm_results several", "scaled_mm offs",
                 "scaled_mm_results quantize", "scaled_mm_results offs quantize", "amax epilogue", "block_scaled_sm100",
                 "dequant_tiles", "lay_out_scales"):  # fmt: skip
        assert name in told


# ---------------------------------------------------------------- the memory that launches are given


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_embedded_operands_are_what_they_were_among_what_is_not_theirs(dtype):
    x = torch.randint(0, 9, (3, 5, 7)).to(dtype)
    for view in (x, x.transpose(1, 2), x[:, 1:, 2:5], x[0, 0]):
        for beside in (False, True):
            found = embedded(view, beside=beside)
            assert torch.equal(found, view) and (beside or found.stride() == view.stride())
            buffer = found.as_strided((found.untyped_storage().nbytes() // found.element_size(),), (1,), 0)
            own = buffer.isnan() if dtype.is_floating_point else buffer == 0x7F
            assert own.sum() == buffer.numel() - view.numel()
            assert found.data_ptr() % 16 == 0 and buffer[: found.storage_offset()].numel() >= 8
    assert embedded(x, beside=True).stride(-2) > 7


def test_outputs_are_poisoned():
    with poisoned_outputs():
        floats, codes = torch.empty(5), torch.empty(0).new_empty(5, dtype=torch.uint8)
    assert floats.isnan().all() and (codes == 0x7F).all()
    assert not torch.empty(5).fill_(1).isnan().any()


def test_same_bits():
    nan = torch.tensor([1.0, torch.nan])
    other = torch.tensor([1.0, -torch.nan]).view(torch.int32).add(5).sub(5).view(torch.float32)
    assert same_bits(nan, other) and same_bits(torch.tensor(2.0), torch.tensor(2.0))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(nan, torch.tensor([torch.nan, 1.0])) and not same_bits(nan, nan.double())
