"""The prologue of a quantiser as data, and its op on the CPU: the steps by the reference, then the quantiser."""

import pytest
import torch
import torch.nn.functional as F

from fp4compile.formats.prologue import Prologue, apply, together

BF16, F32 = torch.bfloat16, torch.float32
GATE = ["neg aux0", "exp s0", "add s1 1.0", "div aux0 s2", "mul s3 aux1"]
NORM = ["mul aux0 col1", "mul s0 row2"]
quantize_prologue = torch.ops.fp4compile.quantize_prologue


def test_reference():
    """All in float32, one rounding at the end; columns and rows are told by their names, whatever the shape."""
    x, y, column, row = torch.randn(2, 3, 3), torch.randn(6, 3), torch.randn(6, 1), torch.randn(3)
    (gate,), _ = apply(Prologue.parse(GATE, BF16), [x.bfloat16(), y.bfloat16()])
    assert torch.equal(gate, (F.silu(x.bfloat16().float()) * y.bfloat16().float().view(2, 3, 3)).bfloat16())
    assert torch.equal(apply(Prologue.parse(NORM, F32), [x, column, row])[0][0], x * column.view(2, 3, 1) * row)
    assert Prologue.parse(NORM, BF16).strings() == NORM


@pytest.mark.parametrize("op", ["quantize", "quantize_both", "fake_quantize"])
def test_the_op_on_the_cpu(op):
    x, column, row = torch.randn(8, 64, dtype=BF16), torch.randn(8, 1), torch.randn(64, dtype=BF16)
    got = quantize_prologue([x, column, row], NORM, BF16, op, "nvfp4")
    (value,), _ = apply(Prologue.parse(NORM, BF16), [x, column, row])
    for one, other in zip(got, getattr(torch.ops.fp4compile, op)(value, "nvfp4"), strict=True):
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    checks = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(quantize_prologue.default, ([x, column, row], NORM, BF16, op, "nvfp4"), test_utils=checks)


@pytest.mark.parametrize("op", ["quantize", "quantize_both", "fake_quantize"])
def test_what_is_stored_comes_last(op):
    """Each step's result rounded by itself; what is quantised was not rounded on its way."""
    x, column, row = torch.randn(2, 8, 64), torch.randn(2, 8, 1), torch.randn(64, dtype=BF16)
    arguments = ([x, column, row], NORM, BF16, op, "nvfp4")
    *own, first, last = quantize_prologue(*arguments, stored=["s0 bfloat16", "s1 float32"])
    assert torch.equal(first, (x * column).bfloat16()) and torch.equal(last, x * column * row)
    for one, other in zip(own, quantize_prologue(*arguments), strict=True):
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    checks = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    options = {"stored": ["s0 bfloat16", "s1 float32"]}
    torch.library.opcheck(quantize_prologue.default, arguments, options, test_utils=checks)


# Both gradients of a product of two values, of which one is shifted: these, and the gradient of the product.
GRADIENTS, RESULTS = ["add aux1 1.0", "mul aux0 s0", "mul aux0 aux2"], [1, 2]


@pytest.mark.parametrize(("op", "format", "options"), [
    ("quantize", "nvfp4", {"dim": -2}), ("quantize_both", "nvfp4_te", {"hadamard": True}),
    ("fake_quantize", "nvfp4", {}),
], ids=str)  # fmt: skip
def test_several_results_are_several_ops(op, format, options):
    """One after the other, each with its own seed; then what is stored."""
    operands, dim = [torch.randn(16, 64, dtype=BF16) for _ in range(3)], options.get("dim", -1)
    options = {name: value for name, value in options.items() if name != "dim"}
    seeds = torch.tensor([7, 9]) if options else None
    arguments = BF16, op, format, dim
    asked = {**options, "seed": seeds, "results": RESULTS, "stored": ["s0 bfloat16"]}
    *got, shifted = quantize_prologue(operands, GRADIENTS, *arguments, **asked)
    assert torch.equal(shifted, operands[1] + 1)
    expected = []
    for i, (steps, read) in enumerate(((["add aux1 1.0", "mul aux0 s0"], (0, 1)), (["mul aux0 aux1"], (0, 2)))):
        own = {**options, "seed": None if seeds is None else seeds[i]}
        expected += quantize_prologue([operands[j] for j in read], steps, *arguments, **own)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    checks = "test_schema", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(quantize_prologue.default, (operands, GRADIENTS, *arguments), asked, test_utils=checks)


def test_prologues_together():
    """Equal steps are there once, operands and what is stored by their new numbers."""
    one = Prologue.parse(["sigmoid aux1", "mul aux0 s0"], BF16, ["s0 bfloat16"])
    other = Prologue.parse(["sigmoid aux0", "mul s0 aux1", "mul s1 row2"], BF16, ["s0 bfloat16", "s1 float16"])
    found, places = together((one, other), [[0, 1], [1, 2, 3]])
    assert found.strings() == ["sigmoid aux1", "mul aux0 s0", "mul s0 aux2", "mul s2 row3"]
    assert (found.several, places) == ((1, 3), [[0, 1], [0, 2, 3]])
    assert found.stored_strings() == ["s0 bfloat16", "s2 float16"]
    assert found.stored_with(1) == [(0, BF16)] and found.stored_with(3) == [(2, torch.float16)]
    assert found.operands_of(1) == {0: "aux", 1: "aux"} and not found.stores_result


@pytest.mark.parametrize(("changes", "message"), [
    ({"results": [1]}, "results: expected two different steps or more"),
    ({"results": [1, 1]}, "results: expected two different steps or more"),
    ({"results": [1, 3]}, "results: expected steps whose results have the shape of the whole, got 3"),
    ({"results": [1, -1]}, "results: expected steps whose results have the shape of the whole, got -1"),
    ({"results": [0, 1], "stored": ["s2 bfloat16"]}, r"stored: expected steps that a result needs, got \[2\]"),
    ({"outer": torch.tensor(1.0)}, "outer: several results have outer scales of their own"),
    ({"format": "nvfp4_te", "seed": torch.tensor(3)}, r"seed: expected one for each of 2 results, got \(\)"),
    ({"prologue": ["mean aux0", "sub aux0 s0", "mul aux1 aux2"]}, "results: expected none beside steps that reduce"),
])  # fmt: skip
def test_several_results_go_together_with(changes, message):
    options = {"operands": [torch.randn(16, 64)] * 3, "prologue": GRADIENTS, "dtype": BF16, "op": "quantize",
               "format": "mxfp8", "results": RESULTS}  # fmt: skip
    with pytest.raises(ValueError, match=message):
        quantize_prologue(**(options | changes))


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
    (value,), (kept, *statistics) = apply(prologue, operands)
    assert torch.allclose(value, expected, rtol=2e-6, atol=5e-7) and all(each.shape == (2, 3, 1) for each in statistics)
    rest, read = prologue.after_statistics()
    assert not rest.reductions and len(rest.kinds) == len(read) + len(statistics)
    (again,), stored = apply(rest, [*(operands[i] for i in read), *statistics])
    assert torch.equal(again, value) and torch.equal(stored[0], kept)
    checks = "test_schema", "test_faketensor", "test_aot_dispatch_dynamic"
    arguments, options = (operands, steps, BF16, "quantize", "mxfp8"), {"stored": prologue.stored_strings()}
    torch.library.opcheck(quantize_prologue.default, arguments, options, test_utils=checks)


WALKED = ["add aux0 aux1", "bfloat16 s0", "square s0", "mean s2", "rsqrt s3", "mul s1 s4", "mul s5 row2"]


def test_what_a_loop_reads_again():
    """The steps after the statistics take a stored sum as it was stored, and the statistics as it was computed."""
    steps = ["add aux0 aux1", "square s0", "mean s1", "rsqrt s2", "mul s0 s3", "mul s4 row2"]
    prologue = Prologue.parse(steps, BF16, ["s0 bfloat16", "s3 float32"])
    walked = prologue.as_walked()
    assert walked.strings() == WALKED and walked.stored_strings() == ["s0 bfloat16", "s4 float32"]
    operands = [torch.randn(4, 64, dtype=BF16), torch.randn(4, 64, dtype=BF16), torch.randn(64, dtype=BF16)]
    (value,), (total, rstd) = apply(walked, operands)
    wide = operands[0].float() + operands[1].float()
    assert torch.equal(rstd, wide.square().mean(-1, keepdim=True).rsqrt()) and torch.equal(total, wide.bfloat16())
    assert torch.equal(value, (total.float() * rstd * operands[2].float()).bfloat16())
    rest, read = walked.after_statistics(stored=True)  # neither term is read again, nothing is rounded again
    assert rest.strings() == ["mul aux0 col2", "mul s0 row1"] and read == (3, 2) and rest.stored == ()
    assert torch.equal(apply(rest, [total, operands[2], rstd])[0][0], value)


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
    ({"op": "dequantize"}, "op: expected one of quantize"), ({"dtype": torch.int32}, "dtype: expected one of"),
    ({"op": "fake_quantize", "layout": "swizzled"}, "op: fake_quantize takes no layout"),
    ({"op": "quantize_both", "dim": 0}, "dim: quantize_both takes none"),
    ({"operands": [torch.randn(4, 32)]}, "operands: expected 3, which the prologue reads, got 1"),
    ({"operands": [torch.randn(4, 32), torch.randn(5, 1), torch.randn(32)]}, "operands: expected col1 of shape"),
    ({"operands": [torch.ones(4, 32, dtype=torch.int32)] * 3}, "operands: expected floating-point tensors"),
    ({"prologue": ["mul row0 2.0"]}, "prologue: expected steps that read aux0"),
    ({"stored": ["s0"]}, "stored: expected a step and a floating-point dtype"),
    ({"stored": ["s0 int8"]}, "stored: expected a step and a floating-point dtype"),
    ({"stored": ["s2 bfloat16"]}, "stored: expected steps whose results have the shape of the whole or one a row, got"),
    ({"prologue": ["add row2 1.0", "mul aux0 col1", "mul s0 s1"], "stored": ["s0 bfloat16"]},
     "stored: expected steps whose results have the shape of the whole"),
    ({"prologue": ["mean row2", "mul aux0 s0", "mul s1 col1"]}, "prologue: mean row2: expected what has the shape"),
    ({"prologue": ["variance aux0 aux0", "mul aux0 s0"]}, "prologue: variance aux0 aux0: expected what has the shape"),
    ({"prologue": []}, "prologue: expected steps"),
    ({"prologue": ["sin aux0"]}, "prologue step 'sin aux0': no such operation"),
])  # fmt: skip
def test_bad_input(changes, message):
    arguments = {"operands": [torch.randn(4, 32), torch.randn(4, 1), torch.randn(32)], "prologue": NORM,
                 "dtype": F32, "op": "quantize", "format": "nvfp4", **changes}  # fmt: skip
    with pytest.raises(ValueError, match=message):
        quantize_prologue(**arguments)
