"""Products of FP8 operands with float32 scales: what goes to the library on Hopper, and what comes out."""

import pytest
import torch

import fp4compile
from fp4compile.formats import formats
from fp4compile.formats.operand import Operand
from tests.helpers.by_hand import FP8_UNITS_ERROR, assert_rounds_to
from tests.helpers.library_checks import V1, V2, calls_of, check

BF16 = torch.bfloat16
PAIRS = [("float8_1x128", "float8_128x128"), ("float8_1x128", "float8_1x128")]
SIZES = [(1, 16, 128), (256, 384, 512), (299, 400, 640), (68, 144, 1000), (20, 144, 640)]  # M, N, K


def quantised(rows, k, name):
    torch.manual_seed(rows + k)
    x = torch.randn(rows, k, dtype=BF16) * torch.exp2(torch.randint(-6, 6, (rows, 1)))
    return fp4compile.quantize(x, name)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_torch_takes_what_hopper_sends(pair, m, n, k):
    """v1, which Inductor calls itself, has no padding of scales; our own kernels multiply few rows."""
    with torch.device("meta"):
        a, b = (Operand(torch.empty(rows, -(-k // 128) * 128, dtype=torch.float8_e4m3fn),
                        torch.empty(-(-rows // formats.get(name).block[0]), -(-k // 128)), None, formats.get(name))
                for rows, name in ((m, pair[0]), (n, pair[1])))  # fmt: skip
    found = calls_of(a, b, None, BF16, sm=90, torchs_fakes=False)
    padded = m % 4 != 0 or (pair[1] == "float8_128x128" and -(-k // 128) % 4 != 0)
    assert [op for op, _ in found] == ([] if m <= 64 else [V2 if padded else V1])
    for call in found:
        check(*call, sm=90)


@pytest.mark.parametrize("sm", [80, 89, 100, 120])
def test_other_gpus_multiply_in_16_bits(sm):
    with torch.device("meta"):
        a, b = (Operand(torch.empty(256, 256, dtype=torch.float8_e4m3fn), torch.empty(rows, 2), None, formats.get(name))
                for rows, name in ((256, "float8_1x128"), (2, "float8_128x128")))  # fmt: skip
    assert calls_of(a, b, None, BF16, sm=sm) == []


@pytest.mark.gpu
@pytest.mark.parametrize("pair", [*PAIRS, ("float8_tensor",) * 2, ("float8_rowwise", "float8_tensor")])
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_hopper_multiplies_what_the_codes_mean(pair, m, n, k):
    """Each product of a block has float32 sums of few bits (FP8 units keep 14 of them), scaled and added in float32."""
    a, b = (quantised(rows, k, name) for rows, name in ((m, pair[0]), (n, pair[1])))
    values = [x.dequantize().double() for x in (a, b)]
    expected, size = values[0] @ values[1].T, values[0].abs() @ values[1].abs().T
    spec = f"{pair[0]} @ {pair[1]} -> bfloat16"
    on_gpu = [t if t is None else t.cuda() for x in (a, b) for t in (x.data, x.scales, x.outer)]
    got = torch.ops.fp4compile.scaled_mm(*on_gpu, spec).cpu().double()
    assert_rounds_to(got, expected, BF16, FP8_UNITS_ERROR * size)
