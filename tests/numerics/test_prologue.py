"""The prologue of a quantiser as data, and its op on the CPU: the steps by the reference, then the quantiser."""

import pytest
import torch
import torch.nn.functional as F

from fp4compile.prologue import Prologue, apply

BF16, F32 = torch.bfloat16, torch.float32
GATE = ["neg aux0", "exp s0", "add s1 1.0", "div aux0 s2", "mul s3 aux1"]
NORM = ["mul aux0 col1", "mul s0 row2"]
quantize_prologue = torch.ops.fp4compile.quantize_prologue


def test_reference():
    """All in float32, one rounding at the end; columns and rows are told by their names, whatever the shape."""
    x, y, column, row = torch.randn(2, 3, 3), torch.randn(6, 3), torch.randn(6, 1), torch.randn(3)
    gate = apply(Prologue.parse(GATE, BF16), [x.bfloat16(), y.bfloat16()])
    assert torch.equal(gate, (F.silu(x.bfloat16().float()) * y.bfloat16().float().view(2, 3, 3)).bfloat16())
    assert torch.equal(apply(Prologue.parse(NORM, F32), [x, column, row]), x * column.view(2, 3, 1) * row)
    assert Prologue.parse(NORM, BF16).strings() == NORM


@pytest.mark.parametrize("op", ["quantize", "quantize_both", "fake_quantize"])
def test_the_op_on_the_cpu(op):
    x, column, row = torch.randn(8, 64, dtype=BF16), torch.randn(8, 1), torch.randn(64, dtype=BF16)
    got = quantize_prologue([x, column, row], NORM, BF16, op, "nvfp4")
    value = apply(Prologue.parse(NORM, BF16), [x, column, row])
    for one, other in zip(got, getattr(torch.ops.fp4compile, op)(value, "nvfp4"), strict=True):
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    checks = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(quantize_prologue.default, ([x, column, row], NORM, BF16, op, "nvfp4"), test_utils=checks)


@pytest.mark.parametrize(("changes", "message"), [
    ({"op": "dequantize"}, "op: expected one of quantize"), ({"dtype": torch.int32}, "dtype: expected one of"),
    ({"op": "fake_quantize", "layout": "swizzled"}, "op: fake_quantize takes no layout"),
    ({"op": "quantize_both", "dim": 0}, "dim: quantize_both takes none"),
    ({"operands": [torch.randn(4, 32)]}, "operands: expected 3, which the prologue reads, got 1"),
    ({"operands": [torch.randn(4, 32), torch.randn(5, 1), torch.randn(32)]}, "operands: expected col1 of shape"),
    ({"operands": [torch.ones(4, 32, dtype=torch.int32)] * 3}, "operands: expected floating-point tensors"),
    ({"prologue": ["mul row0 2.0"]}, "prologue: expected steps that read aux0"),
    ({"prologue": []}, "prologue: expected steps"),
    ({"prologue": ["sin aux0"]}, "prologue step 'sin aux0': no such operation"),
])  # fmt: skip
def test_bad_input(changes, message):
    arguments = {"operands": [torch.randn(4, 32), torch.randn(4, 1), torch.randn(32)], "prologue": NORM,
                 "dtype": F32, "op": "quantize", "format": "nvfp4", **changes}  # fmt: skip
    with pytest.raises(ValueError, match=message):
        quantize_prologue(**arguments)
