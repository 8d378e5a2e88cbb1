"""Compiled models, end to end, for a B200 that is not there: `tests/helpers/compiled_models.py` says what is compared.

In a process of its own: torch remembers what it once found out about the GPU. `benchmarks.simulated_models` runs all
combinations of model, recipe, run and dtype, which takes ten minutes.
"""

import os

import pytest
import torch

from tests.helpers import in_interpreter
from tests.helpers.compiled_models import RUNS, Case, compared, difference, expected_of

PRETENDING = os.environ.get("FP4COMPILE_PRETENDING") == "1"
pretending = pytest.mark.skipif(not PRETENDING, reason="run in a process of its own")
ONE_TOKEN, ROWS, TRAINING = RUNS


@pretending
@pytest.mark.parametrize(("case", "kernels"), [
    (Case("MLP", "nvfp4_train", TRAINING, torch.float32),
     {"columns_amax", "quantize_columns", "quantize_squares", "gemm_skinny_block_scaled_sm100",
      "gemm_block_scaled_sm100"}),
    (Case("Llama block", "nvfp4", ROWS, torch.bfloat16), {"row_statistics", "quantize_rows", "_scaled_mm_v2"}),
], ids=str)  # fmt: skip
def test_model(case, kernels):
    found = compared(case)
    assert found.largest.found <= found.largest.bound, found.differences
    assert kernels <= {name for counts in found.launches.values() for name in counts}


@pretending
def test_one_other_code_is_found():
    """A weight that is rounded up instead of down is beyond the bound."""
    case = Case("MLP", "mxfp8", ONE_TOKEN, torch.float32)
    model, x, target = case.made()
    before = expected_of(case, model, x, target)["result"]
    with torch.no_grad():
        model.up.weight[7, 5] *= 1.125  # one step of E4M3, in a block whose largest element is another one
    after = expected_of(case, model, x, target)["result"]
    found = difference("result", after, before, None)
    assert found.found > 10 * found.bound


@pytest.mark.skipif(PRETENDING, reason="is that process")
@pytest.mark.slow
def test_in_a_process_of_its_own():
    in_interpreter.assert_passes(__file__, variable="FP4COMPILE_PRETENDING")
