"""The epilogue of a product as data: its reference, what the op carries, and what is no epilogue."""

import re

import pytest
import torch
import torch.nn.functional as F

from fp4compile.formats import formats
from fp4compile.formats.epilogue import Epilogue, apply
from fp4compile.formats.steps import OPERATIONS, Step
from fp4compile.templates.device.epilogue import text
from fp4compile.templates.device.pointwise import operate
from tests.helpers.hard_inputs import stacked

BF16, F32 = torch.bfloat16, torch.float32
SILU_AND_GATE = ["neg product", "exp s0", "add s1 1.0", "div product s2", "mul s3 aux0"]


def test_reference():
    """All in float32 from the rounded product on, one rounding at the end."""
    product, gate, row = torch.randn(2, 5, 8), torch.randn(10, 8, dtype=BF16), torch.randn(8)
    got = apply(product, Epilogue.parse(SILU_AND_GATE, BF16, F32), [gate])
    rounded = product.bfloat16().float()
    assert torch.allclose(got, F.silu(rounded) * gate.float().view(2, 5, 8), rtol=1e-6)
    got = apply(product, Epilogue.parse(["sub row0 product"], F32, BF16), [row])
    assert torch.equal(got, (row - product).bfloat16())
    got = apply(product, Epilogue.parse(["add product aux1", "mul s0 row0"], F32, F32), [row, gate])
    assert torch.equal(got, (product + gate.float().view(2, 5, 8)) * row)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_is_written_and_computed(operation):
    """The reference and the device function know the same operations."""
    assert set(re.findall(r'OPERATION == "(\w+)"', operate.src)) == {*OPERATIONS, "silu", "float32"}
    step = f"{operation} product aux0" if operation in ("add", "sub", "mul", "div") else f"{operation} product"
    epilogue = Epilogue.parse([step], F32, F32)
    x, y = torch.rand(3, 4) + 0.5, torch.rand(3, 4) + 0.5
    assert apply(x, epilogue, [y]).isfinite().all()
    assert text(epilogue).split(" | ")[1] == step.replace("product", "0").replace("aux0", "1")


def test_strings():
    """What the op carries reads back as it was, numbers to the last bit."""
    steps = (Step("mul", ("product", 0.7071067811865476)), Step("add", ("s0", -1e-30)), Step("erf", ("s1",)))
    epilogue = Epilogue(steps, BF16, BF16)
    assert epilogue.strings() == ["mul product 0.7071067811865476", "add s0 -1e-30", "erf s1"]
    assert Epilogue.parse(epilogue.strings(), BF16, BF16) == epilogue
    assert Epilogue.parse(["sub aux1 row0"], BF16, BF16).kinds == {1: "aux", 0: "row"}


@pytest.mark.parametrize(("step", "message"), [
    ("sin product", "no such operation of 1 arguments"), ("add product", "no such operation of 1 arguments"),
    ("relu product 1.0", "no such operation of 2 arguments"), ("relu s0", "s0 is no earlier step"),
    ("add product x0", "'x0' is neither a name nor a number"),
])  # fmt: skip
def test_what_is_no_step(step, message):
    with pytest.raises(ValueError, match=message):
        Epilogue.parse([step], BF16, BF16)


def test_the_op_on_the_cpu():
    """`scaled_mm` with an epilogue is `scaled_mm` and the reference of the steps after it."""
    x, w, gate = torch.randn(6, 64), torch.randn(16, 64), torch.randn(6, 16, dtype=BF16)
    a, b = (torch.ops.fp4compile.quantize(value, "nvfp4") for value in (x, w))
    arguments = (*a, "nvfp4", *b, "nvfp4", torch.randn(16), BF16)
    got = torch.ops.fp4compile.scaled_mm(*arguments, [gate], SILU_AND_GATE, BF16)
    expected = apply(torch.ops.fp4compile.scaled_mm(*arguments), Epilogue.parse(SILU_AND_GATE, BF16, BF16), [gate])
    assert torch.equal(got, expected)
    checks = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(
        torch.ops.fp4compile.scaled_mm.default, (*arguments, [gate], SILU_AND_GATE, BF16), test_utils=checks
    )


QUANTISED = torch.ops.fp4compile.scaled_mm_quantized


@pytest.mark.parametrize("name", ["nvfp4_one_level", "nvfp4", "mxfp8", "mxfp4"])
def test_quantised_results_on_the_cpu(name):
    """`scaled_mm_quantized` is `scaled_mm`, whose result is rounded, and `quantize` after it: of hard inputs."""
    fmt = formats.get(name)
    value = stacked((3, 56), BF16, fmt.block_cols)
    a, b = (
        torch.ops.fp4compile.quantize(torch.randn(rows, 64), "mxfp8", layout="swizzled")[:2] for rows in value.shape
    )
    arguments, outer = (*a, None, "mxfp8", *b, None, "mxfp8", None, BF16), torch.tensor(0.01) if fmt.outer else None
    steps = ["mul product 0.001", "add s0 1.0", "mul s1 aux0"]
    got = QUANTISED(*arguments, [value], [*steps, f"quantize {name}"], BF16, outer)
    plain = torch.ops.fp4compile.scaled_mm(*arguments, [value], steps, BF16)
    expected = torch.ops.fp4compile.quantize(plain, name, layout="swizzled", outer=outer)
    assert len(got) == 2
    assert all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(got, expected[:2], strict=True)
    )
    checks = "test_autograd_registration", "test_faketensor"
    given = (*arguments, [value], [*steps, f"quantize {name}"], BF16, outer)
    torch.library.opcheck(QUANTISED.default, given, test_utils=checks)


def test_a_result_of_two_products_on_the_cpu():
    """B has the rows of two matrices; each product is rounded before the steps."""
    a, b = (torch.ops.fp4compile.quantize(torch.randn(rows, 64), "mxfp8", layout="swizzled")[:2] for rows in (6, 512))
    arguments = (*a, None, "mxfp8", *b, None, "mxfp8", torch.randn(512), BF16)
    gate, steps = torch.randn(6, 256), ["relu product", "mul s0 pair", "mul s1 aux0", "quantize mxfp8"]
    got = QUANTISED(*arguments, [gate], steps, BF16)
    product, pair = torch.ops.fp4compile.scaled_mm(*arguments).float().chunk(2, -1)
    expected = torch.ops.fp4compile.quantize((product.relu() * pair * gate).bfloat16(), "mxfp8", layout="swizzled")
    assert got[0].shape == (6, 256)
    assert all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(got, expected[:2], strict=True)
    )


AMAX = torch.ops.fp4compile.scaled_mm_amax


def test_an_amax_on_the_cpu():
    """Two matrices with an outer scale each; a quantiser that takes the maxima finds no amax of its own."""
    a = torch.ops.fp4compile.quantize(torch.randn(6, 64), "nvfp4", layout="swizzled")
    each = [torch.ops.fp4compile.quantize(torch.randn(128, 64) * (i + 1), "nvfp4", layout="swizzled") for i in (0, 1)]
    data, scales = (torch.cat([one[i].view(torch.uint8) for one in each]).view(each[0][i].dtype) for i in (0, 1))
    outers = torch.stack([one[2] for one in each])
    arguments = (
        *a,
        "nvfp4",
        data,
        scales,
        outers,
        "nvfp4",
        None,
        BF16,
        [],
        ["relu product", "mul s0 pair", "amax"],
        BF16,
    )
    result, maxima = AMAX(*arguments)
    gate, up = (torch.ops.fp4compile.scaled_mm(*a, "nvfp4", *one, "nvfp4", None, BF16).float() for one in each)
    assert torch.equal(result, (gate.relu() * up).bfloat16()) and maxima.max() == result.abs().max()
    for options in ({}, {"layout": "swizzled"}):
        got, expected = (
            torch.ops.fp4compile.quantize(result, "nvfp4", **options, amax=amax) for amax in (maxima, None)
        )
        assert all(
            torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
            for one, other in zip(got, expected, strict=True)
        )
    checks = "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(AMAX.default, arguments, test_utils=checks)


def test_bad_quantised_results():
    a = torch.ops.fp4compile.quantize(torch.randn(4, 64), "mxfp8", layout="swizzled")[:2]
    arguments = (*a, None, "mxfp8", *a, None, "mxfp8", None, BF16, [])

    def message(steps, outer=None, op=QUANTISED):
        with pytest.raises(ValueError) as error:
            op(*arguments, steps, BF16, *([] if outer is None else [outer]))
        return str(error.value)

    one = torch.ones(())
    assert message(["relu product"]).startswith("epilogue: expected a last step 'quantize' with a format, got ['relu")
    assert "expected 'quantize' and a format with scales of blocks in a row" in message(["quantize mxfp8_32x32"])
    assert "without an outer scale of rows" in message(["quantize nvfp4_rowwise"])
    assert "unknown format 'mxfp9'" in message(["quantize mxfp9"])
    assert "'mxfp8' is neither a name nor a number" in message(["quantize mxfp8", "relu product"])
    with pytest.raises(
        ValueError, match="epilogue: 'pair' goes with a last step 'quantize' or 'amax', got \\['relu pair'\\]"
    ):
        torch.ops.fp4compile.scaled_mm(*arguments, ["relu pair"], BF16)
    assert message(["quantize nvfp4"]) == "outer: format nvfp4 needs a static outer scale"
    assert message(["quantize mxfp8"], one) == "outer: format mxfp8 has no outer scale"
    assert (
        message(["quantize nvfp4"], one.double())
        == "outer: expected float32 of shape (), got torch.float64 of shape ()"
    )
    assert "is a step of scaled_mm_quantized" in message(["quantize mxfp8"], op=torch.ops.fp4compile.scaled_mm)
    assert "is a step of scaled_mm_amax" in message(["amax"], op=torch.ops.fp4compile.scaled_mm)
    assert message(["quantize mxfp8"], op=AMAX) == "epilogue: expected a last step 'amax', got ['quantize mxfp8']"
    assert message(["amax"]).startswith("epilogue: expected a last step 'quantize' with a format, got ['amax']")
