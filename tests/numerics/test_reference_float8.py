"""FP8 with float32 scales against torchao, transformers and Transformer Engine's formula.

Where they differ from the contract: torchao and transformers take a block with an infinity for a finite one, and
Transformer Engine gives it the scale 1; here its scale is NaN. transformers divides by a product with a reciprocal, so
its scales may differ in the last bit.
"""

import types

import numpy as np
import pytest
import torch

from fp4compile.formats.formats import BlockFormat
from fp4compile.ops.functional import quantize
from tests.helpers.codes import as_bytes
from tests.helpers.hard_inputs import IN_ONE_DTYPE, NAMES, NON_FINITE, hard_input

SHAPE = (256, 384)


def assert_equal(ours, codes, scales, finite):
    """Codes and scales of the blocks that are finite; the others have the scale NaN."""
    rows, cols = ours.format.block
    assert torch.equal(ours.scales[finite], scales.float()[finite]) and ours.scales[~finite].isnan().all()
    spread = finite.repeat_interleave(rows, 0).repeat_interleave(cols, 1)
    assert torch.equal(as_bytes(ours.data)[spread], as_bytes(codes)[spread])


def finite_blocks(x, rows, cols):
    return x.unflatten(1, (-1, cols)).unflatten(0, (-1, rows)).isfinite().all(3).all(1)


@pytest.mark.parametrize(("name", "dtype"), IN_ONE_DTYPE, ids=str)
def test_blocks_equal_torchao(name, dtype):
    kernels = pytest.importorskip("torchao.prototype.blockwise_fp8_training.kernels")
    x = hard_input(name, SHAPE, dtype, 128)
    of_rows, of_squares = finite_blocks(x, 1, 128), finite_blocks(x, 128, 128)
    assert (~of_rows).sum() == (~of_squares).sum() == (name in NON_FINITE)
    wide = x.float()
    assert_equal(quantize(x, "float8_1x128"), *kernels.torch_blockwise_scale_act_quant_lhs(wide), of_rows)
    assert_equal(quantize(x, "float8_128x128"), *kernels.torch_blockwise_scale_weight_quant(wide), of_squares)
    codes, scales = kernels.torch_blockwise_scale_act_quant_rhs(wide)
    assert_equal(quantize(x, "float8_1x128", dim=0), codes.t(), scales.t(), finite_blocks(x.t(), 1, 128))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NON_FINITE])
def test_one_scale_equals_torchao(name):
    utils = pytest.importorskip("torchao.float8.float8_utils")
    x = hard_input(name, SHAPE)
    for element in ("e4m3", "e5m2"):
        fmt = BlockFormat(element, None, None, "tensor", "torchao")
        scale = utils.tensor_to_scale(x, fmt.data_dtype)
        ours = quantize(x, fmt)
        assert torch.equal(ours.outer, 1.0 / scale)
        assert torch.equal(as_bytes(ours.data), as_bytes(utils.to_fp8_saturated(x * scale, fmt.data_dtype)))


def scale_of(amax, largest, power_of_two):
    """Transformer Engine's factor that encodes, for a finite amax."""
    with np.errstate(over="ignore", divide="ignore"):
        factor = np.float32(largest) / np.float32(amax)
    factor = np.float32(1) if amax == 0 else min(factor, np.finfo(np.float32).max)
    return np.float32(2.0 ** (np.frexp(factor)[1] - 1)) if power_of_two else factor


@pytest.mark.parametrize("contract", ["te", "te_pow2"])
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("name", NAMES)
def test_te(name, element, contract):
    x, fmt = hard_input(name, (16, 256), block=128), BlockFormat(element, (1, 128), "float32", None, contract)
    amax = x.unflatten(1, (2, 128)).abs().amax(-1)
    factors = [scale_of(each, fmt.element_max, contract == "te_pow2") for each in amax.flatten().tolist()]
    factor, finite = torch.tensor(np.array(factors)).view(16, 2), amax.isfinite()
    y = (x.unflatten(1, (2, 128)) * factor.unsqueeze(-1)).flatten(1).clamp(-fmt.element_max, fmt.element_max)
    assert_equal(quantize(x, fmt), y.to(fmt.data_dtype), 1 / factor, finite)


@pytest.mark.parametrize("contract", ["te", "te_pow2"])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*NON_FINITE, "tiny", "huge")])
def test_weights_of_transformers(name, contract):
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    config = types.SimpleNamespace(weight_block_size=(128, 128), scale_fmt="ue8m0" if contract == "te_pow2" else None)
    x = hard_input(name, SHAPE, torch.bfloat16, 128)
    theirs = module.Fp8Quantize(types.SimpleNamespace(quantization_config=config)).convert({"weight": x})
    ours, scales = quantize(x, BlockFormat("e4m3", (128, 128), "float32", None, contract)), theirs["weight_scale_inv"]
    apart = (ours.scales.view(torch.int32) - scales.float().view(torch.int32)).abs().max()
    assert apart <= (0 if contract == "te_pow2" else 1)  # numbers of float32
    alike = (ours.scales == scales.float()).repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(as_bytes(ours.data)[alike], as_bytes(theirs["weight"])[alike]) and alike.any()
