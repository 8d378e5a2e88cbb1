"""The epilogue of a product as data: its reference, what the op carries, and what is no epilogue."""

import re

import pytest
import torch
import torch.nn.functional as F

from fp4compile.formats import formats
from fp4compile.formats.epilogue import Epilogue, apply
from fp4compile.formats.steps import OPERATIONS, Step
from fp4compile.templates.device.apply_epilogue import text
from fp4compile.templates.device.pointwise import operate
from tests.helpers.arguments import of_one
from tests.helpers.codes import same_bits
from tests.helpers.hard_inputs import stacked

BF16, F32 = torch.bfloat16, torch.float32
SILU_AND_GATE = ["neg product", "exp s0", "add s1 1.0", "div product s2", "mul s3 aux0"]
SCALED_MM, RESULTS = torch.ops.fp4compile.scaled_mm.default, torch.ops.fp4compile.scaled_mm_results.default


def spec(name, steps=(), end=None):
    """The text of a product of two operands of a format, and of an epilogue."""
    return " | ".join(
        [f"{name} @ {name} -> bfloat16", *steps, *["to bfloat16"] * bool(steps or end), *[end] * bool(end)]
    )


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
    bias = torch.randn(16)
    arguments, options = (*a, *b, spec("nvfp4", SILU_AND_GATE)), {"bias": bias, "operands": [gate]}
    plain = SCALED_MM(*a, *b, spec("nvfp4"), bias=bias)
    assert torch.equal(
        SCALED_MM(*arguments, **options), apply(plain, Epilogue.parse(SILU_AND_GATE, BF16, BF16), [gate])
    )
    checks = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(SCALED_MM, arguments, options, test_utils=checks)


@pytest.mark.parametrize("name", ["nvfp4_one_level", "nvfp4", "mxfp8", "mxfp4"])
def test_quantised_results_on_the_cpu(name):
    """A quantised result is that of `scaled_mm`, whose result is rounded, and `quantize` after it: of hard inputs."""
    fmt = formats.get(name)
    value = stacked((3, 56), BF16, fmt.block_cols)
    a, b = (
        torch.ops.fp4compile.quantize(torch.randn(rows, 64), "mxfp8", layout="swizzled")[:2] for rows in value.shape
    )
    outer = torch.tensor(0.01) if fmt.outer else None
    steps = ["mul product 0.001", "add s0 1.0", "mul s1 aux0"]
    arguments = of_one((*a, None), (*b, None), spec("mxfp8", steps, f"quantize {name}"))
    options = {"operands": [value], "outer": outer}
    got = RESULTS(*arguments, **options)
    plain = SCALED_MM(*a, None, *b, None, spec("mxfp8", steps), operands=[value])
    expected = torch.ops.fp4compile.quantize(plain, name, layout="swizzled", outer=outer)
    assert len(got) == 2
    assert all(map(same_bits, got, expected[:2]))
    checks = "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(RESULTS, arguments, options, test_utils=checks)


def test_a_result_of_two_products_on_the_cpu():
    """B has the rows of two matrices; each product is rounded before the steps."""
    a, b = (torch.ops.fp4compile.quantize(torch.randn(rows, 64), "mxfp8", layout="swizzled")[:2] for rows in (6, 512))
    a, b, bias, gate = (*a, None), (*b, None), torch.randn(512), torch.randn(6, 256)
    text = spec("mxfp8", ["relu product", "mul s0 pair", "mul s1 aux0"], "quantize mxfp8")
    got = RESULTS(*of_one(a, b, text), bias=[bias], operands=[gate])
    product, pair = SCALED_MM(*a, *b, spec("mxfp8"), bias=bias).float().chunk(2, -1)
    expected = torch.ops.fp4compile.quantize((product.relu() * pair * gate).bfloat16(), "mxfp8", layout="swizzled")
    assert got[0].shape == (6, 256)
    assert all(map(same_bits, got, expected[:2]))


def test_an_amax_on_the_cpu():
    """Two matrices with a global scale each; a quantiser that takes the maxima finds no amax of its own."""
    a = torch.ops.fp4compile.quantize(torch.randn(6, 64), "nvfp4", layout="swizzled")
    each = [torch.ops.fp4compile.quantize(torch.randn(128, 64) * (i + 1), "nvfp4", layout="swizzled") for i in (0, 1)]
    data, scales = (torch.cat([one[i].view(torch.uint8) for one in each]).view(each[0][i].dtype) for i in (0, 1))
    outers = torch.stack([one[2] for one in each])
    arguments = of_one(a, (data, scales, outers), spec("nvfp4", ["relu product", "mul s0 pair"], "amax"))
    result, maxima = RESULTS(*arguments)
    gate, up = (SCALED_MM(*a, *one, spec("nvfp4")).float() for one in each)
    assert torch.equal(result, (gate.relu() * up).bfloat16()) and maxima.max() == result.abs().max()
    for options in ({}, {"layout": "swizzled"}):
        got, expected = (
            torch.ops.fp4compile.quantize(result, "nvfp4", **options, amax=amax) for amax in (maxima, None)
        )
        assert all(map(same_bits, got, expected))
    checks = "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(RESULTS, arguments, test_utils=checks)


def test_bad_quantised_results():
    a = torch.ops.fp4compile.quantize(torch.randn(4, 64), "mxfp8", layout="swizzled")[:2]
    a = (*a, None)

    def message(*ends, outer=None):
        with pytest.raises(ValueError) as error:
            RESULTS(*of_one(a, a, " | ".join([spec("mxfp8"), "to bfloat16", *ends])), outer=outer)
        return str(error.value)

    one = torch.ones(())
    assert "expected 'quantize' and a format with scales of blocks in a row" in message("quantize mxfp8_32x32")
    assert "without row scales" in message("quantize nvfp4_rowwise")
    assert "unknown format 'mxfp9'" in message("quantize mxfp9")
    assert "'mxfp8' is neither a name nor a number" in message("quantize mxfp8", "relu product")
    assert message("quantize nvfp4") == "outer: format nvfp4 needs a static global scale"
    assert message("quantize mxfp8", outer=one) == "outer: format mxfp8 has no static global scale"
    assert message("amax", outer=one) == "outer: a result that is not quantised has no static global scale"
    for other, said in ((one.double(), "torch.float64 of shape ()"), (one.expand(4), "torch.float32 of shape (4,)")):
        assert message("quantize nvfp4", outer=other) == f"outer: expected float32 of shape (), got {said}"
    with pytest.raises(ValueError, match="'pair' goes with a last step 'quantize' or 'amax', got \\['relu pair'\\]"):
        SCALED_MM(*a, *a, spec("mxfp8", ["relu pair"]))
    for end in ("quantize mxfp8", "amax"):
        with pytest.raises(ValueError, match="has two results, which the op scaled_mm_results returns"):
            SCALED_MM(*a, *a, spec("mxfp8", [], end))
