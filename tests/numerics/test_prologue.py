"""The prologue of a quantiser as data, and its op on the CPU: the steps by the reference, then the quantiser."""

import pytest
import torch
import torch.nn.functional as F

from fp4compile.formats.prologue import Prologue, apply
from tests.helpers.codes import same_bits

BF16, F32 = torch.bfloat16, torch.float32
GATE = ["neg aux0", "exp s0", "add s1 1.0", "div aux0 s2", "mul s3 aux1"]
NORM = ["mul aux0 col1", "mul s0 row2"]
quantize = torch.ops.fp4compile.quantize
CHECKS = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
DIRECTIONS = [{}, {"dim": [-2]}, {"dim": [-1, -2]}, {"values": [-1]}]


def test_reference():
    """All in float32, one rounding at the end; columns and rows are told by their names, whatever the shape."""
    x, y, column, row = torch.randn(2, 3, 3), torch.randn(6, 3), torch.randn(6, 1), torch.randn(3)
    gate, _ = apply(Prologue.parse(GATE, BF16), [x.bfloat16(), y.bfloat16()])
    assert torch.equal(gate, (F.silu(x.bfloat16().float()) * y.bfloat16().float().view(2, 3, 3)).bfloat16())
    assert torch.equal(apply(Prologue.parse(NORM, F32), [x, column, row])[0], x * column.view(2, 3, 1) * row)
    assert Prologue.parse(NORM, BF16).strings() == NORM


@pytest.mark.parametrize("options", DIRECTIONS, ids=str)
def test_the_op_on_the_cpu(options):
    x, column, row = torch.randn(8, 64, dtype=BF16), torch.randn(8, 1), torch.randn(64, dtype=BF16)
    steps = {"operands": [column, row], "prologue": NORM, "dtype": BF16, **options}
    value, _ = apply(Prologue.parse(NORM, BF16), [x, column, row])
    assert all(map(same_bits, quantize(x, "nvfp4", **steps), quantize(value, "nvfp4", **options)))
    torch.library.opcheck(quantize.default, (x, "nvfp4"), steps, test_utils=CHECKS)


@pytest.mark.parametrize("options", DIRECTIONS, ids=str)
def test_what_is_stored_comes_last(options):
    """Each step's result rounded by itself; what is quantised was not rounded on its way."""
    x, column, row = torch.randn(2, 8, 64), torch.randn(2, 8, 1), torch.randn(64, dtype=BF16)
    steps = {"operands": [column, row], "prologue": NORM, "dtype": BF16, **options}
    stored = {**steps, "stored": ["s0 bfloat16", "s1 float32"]}
    *own, first, last = quantize(x, "nvfp4", **stored)
    assert torch.equal(first, (x * column).bfloat16()) and torch.equal(last, x * column * row)
    assert all(map(same_bits, own, quantize(x, "nvfp4", **steps)))
    torch.library.opcheck(quantize.default, (x, "nvfp4"), stored, test_utils=CHECKS)


@pytest.mark.parametrize("steps", [
    ["add aux0 aux2", "square s0", "mean s1", "add s2 1e-06", "rsqrt s3", "mul s0 s4", "mul row1 s5"],
    ["mean aux0", "variance aux0 s0", "add s1 1e-05", "rsqrt s2", "sub aux0 s0", "mul s4 s3", "mul s5 row1"],
    ["amax aux0", "sub aux0 s0", "exp s1", "sum s2", "div s2 s3", "mul s4 row1"],
], ids=["norm of a sum", "layer norm", "softmax"])  # fmt: skip
def test_statistics(steps):
    """In float32, of rows; taken apart, the steps after the statistics give the same, and what is stored as well."""
    x, row, y = torch.randn(2, 3, 32, dtype=BF16), torch.randn(32, dtype=BF16), torch.randn(2, 3, 32, dtype=BF16)
    wide, add = x.float(), y.float()
    normed = F.rms_norm(wide + add, (32,), row.float(), 1e-6), F.layer_norm(wide, (32,), row.float())
    expected = (*normed, torch.softmax(wide, -1) * row)[("add aux0 aux2", "mean aux0", "amax aux0").index(steps[0])]
    whole = next(i for i, kind in enumerate(Prologue.parse(steps, BF16).step_kinds) if kind == "aux")
    prologue = Prologue.parse(steps, F32, [f"s{i} float32" for i in (whole, *Prologue.parse(steps, F32).statistics)])
    operands = [x, row, y][: len(prologue.kinds)]
    value, (kept, *statistics) = apply(prologue, operands)
    assert torch.allclose(value, expected, rtol=2e-6, atol=5e-7) and all(each.shape == (2, 3, 1) for each in statistics)
    rest, read = prologue.after_statistics()
    assert not rest.reductions and len(rest.kinds) == len(read) + len(statistics)
    again, stored = apply(rest, [*(operands[i] for i in read), *statistics])
    assert torch.equal(again, value) and torch.equal(stored[0], kept)
    checks = "test_schema", "test_faketensor", "test_aot_dispatch_dynamic"
    x, *others = operands
    options = {"operands": others, "prologue": steps, "dtype": BF16, "stored": prologue.stored_strings()}
    torch.library.opcheck(quantize.default, (x, "mxfp8"), options, test_utils=checks)


WALKED = ["add aux0 aux1", "bfloat16 s0", "square s0", "mean s2", "rsqrt s3", "mul s1 s4", "mul s5 row2"]


def test_what_a_loop_reads_again():
    """The steps after the statistics take a stored sum as it was stored, and the statistics as it was computed."""
    steps = ["add aux0 aux1", "square s0", "mean s1", "rsqrt s2", "mul s0 s3", "mul s4 row2"]
    prologue = Prologue.parse(steps, BF16, ["s0 bfloat16", "s3 float32"])
    walked = prologue.as_walked()
    assert walked.strings() == WALKED and walked.stored_strings() == ["s0 bfloat16", "s4 float32"]
    operands = [torch.randn(4, 64, dtype=BF16), torch.randn(4, 64, dtype=BF16), torch.randn(64, dtype=BF16)]
    value, (total, rstd) = apply(walked, operands)
    wide = operands[0].float() + operands[1].float()
    assert torch.equal(rstd, wide.square().mean(-1, keepdim=True).rsqrt()) and torch.equal(total, wide.bfloat16())
    assert torch.equal(value, (total.float() * rstd * operands[2].float()).bfloat16())
    rest, read = walked.after_statistics(stored=True)  # neither term is read again, nothing is rounded again
    assert rest.strings() == ["mul aux0 col2", "mul s0 row1"] and read == (3, 2) and rest.stored == ()
    assert torch.equal(apply(rest, [total, operands[2], rstd])[0], value)


@pytest.mark.parametrize(("steps", "stored"), [
    (["add aux0 aux1", "square s0", "mean s1", "mul s0 s2"], ["s0 float32"]),
    (["add aux0 aux1", "square s0", "mean s1", "mul s0 s2"], ["s0 bfloat16", "s0 float16"]),
    (["add aux0 aux1", "mul s0 2.0", "square s1", "mean s2", "mul s1 s3"], ["s0 bfloat16"]),
    (["mean aux0", "sub aux0 s0", "mul s1 2.0"], ["s1 bfloat16"]), (GATE, ["s3 bfloat16"]),
], ids=["float32", "two dtypes", "a step in between", "after statistics", "no statistics"])  # fmt: skip
def test_what_no_loop_reads_again(steps, stored):
    prologue = Prologue.parse(steps, BF16, stored)
    assert prologue.as_walked() == prologue


@pytest.mark.parametrize(("changes", "message"), [
    ({"dtype": torch.int32}, "dtype: expected one of"),
    ({"values": [-1], "layout": "swizzled"}, "values: go with linear scales"),
    ({"x": torch.randn(32)}, "x: expected two dimensions or more"),
    ({"x": torch.randn(2, 4, 32), "each_matrix": True}, "prologue: activations have one, not weights"),
    ({"scale_rule": "mse"}, "prologue: activations have one, not weights"),
    ({"offs": torch.tensor([4], dtype=torch.int32), "stored": ["s0 bfloat16"]}, "stored: rows of groups store nothing"),
    ({"operands": []}, "operands: expected 2 besides x for the prologue, got 0"),
    ({"operands": [torch.randn(5, 1), torch.randn(32)]}, "operands: expected col1 of shape"),
    ({"x": torch.ones(4, 32, dtype=torch.int32)}, "operands: expected floating-point tensors"),
    ({"operands": [torch.ones(4, 1, dtype=torch.int32)] * 2}, "operands: expected floating-point tensors"),
    ({"prologue": ["mul row0 2.0"]}, "prologue: expected steps that read aux0"),
    ({"stored": ["s0"]}, "stored: expected a step and a floating-point dtype"),
    ({"stored": ["s0 int8"]}, "stored: expected a step and a floating-point dtype"),
    ({"stored": ["s2 bfloat16"]}, "stored: expected steps whose results have the shape of the whole or one a row, got"),
    ({"prologue": ["add row2 1.0", "mul aux0 col1", "mul s0 s1"], "stored": ["s0 bfloat16"]},
     "stored: expected steps whose results have the shape of the whole"),
    ({"prologue": ["mean row2", "mul aux0 s0", "mul s1 col1"]}, "prologue: mean row2: expected what has the shape"),
    ({"prologue": ["variance aux0 aux0", "mul aux0 s0"]}, "prologue: variance aux0 aux0: expected what has the shape"),
    ({"prologue": []}, "operands: expected none without a prologue, got 2"),
    ({"prologue": ["sin aux0"]}, "prologue step 'sin aux0': no such operation"),
])  # fmt: skip
def test_bad_input(changes, message):
    arguments = {"x": torch.randn(4, 32), "operands": [torch.randn(4, 1), torch.randn(32)], "prologue": NORM,
                 "dtype": F32, "format": "nvfp4", **changes}  # fmt: skip
    with pytest.raises(ValueError, match=message):
        quantize(**arguments)
