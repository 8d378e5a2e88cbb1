"""Values in the place of codes: quantisers against quantise and dequantise, bit for bit; products that read them.

Without a GPU the kernels run in Triton's interpreter, in a process of their own, and their PTX is played in NumPy.
"""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fp4compile.check.machine_code import quantize_row
from fp4compile.check.quantisers import Configuration
from fp4compile.formats import formats, reference, reference_grouped
from fp4compile.formats.grouping import Groups
from fp4compile.formats.operand import Operand
from tests.helpers import ptx_lanes
from tests.helpers.arguments import of_groups
from tests.helpers.hard_inputs import hard_input
from tests.helpers.inline_ptx import play
from tests.helpers.kernels import DEVICE, INTERPRETING, assert_same_bits, gpu, on_device
from tests.helpers.quantisers import quantize, quantize_both

if INTERPRETING:
    ptx_lanes.install()

from fp4compile.templates.device import values  # noqa: E402
from fp4compile.templates.gemm import dequant_operand  # noqa: E402
from fp4compile.templates.gemm.dequant_operand import grouped_dot_config  # noqa: E402
from fp4compile.templates.multiply import call_of  # noqa: E402
from tests.helpers.multiplied import scaled_grouped_mm  # noqa: E402

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SEED = torch.tensor(2**40 + 5)
# What groups of so many rows hold, an empty one among them, one of more than a tile; a NaN in the rows of no group.
GROUPS_OF = (("randn", 0), ("one_nan", 3), ("scaled_rows", 130), ("outliers", 1), ("ties_fp4", 29), ("one_nan", 7))
OFFS = torch.tensor([size for _, size in GROUPS_OF[:-1]]).cumsum(0).to(torch.int32)


def rows_of(cols, block):
    return torch.cat([hard_input(name, (size, cols), torch.bfloat16, block) * 2.0**i
                      for i, (name, size) in enumerate(GROUPS_OF)])  # fmt: skip


@gpu
@pytest.mark.parametrize(("format", "seed", "transform"), [
    ("nvfp4", None, False), ("nvfp4_te", SEED, True), ("nvfp4_rowwise", None, False), ("mxfp8", None, False),
    ("mxfp4", SEED, False),
], ids=str)  # fmt: skip
def test_rows_and_columns(format, seed, transform):
    """Each alone, both at once, and one of both as codes."""
    fmt = formats.get(format)
    x, options = rows_of(40, fmt.block_cols), {"seed": on_device(seed), "offs": on_device(OFFS)}
    groups = Groups.of(OFFS, len(x))
    inside = groups.of_rows < groups.count
    rows = reference_grouped.quantize_rows(x, groups, fmt, None, "linear", seed)
    columns = reference_grouped.quantize_columns(x, groups, fmt, None, "linear", seed, transform)
    if format == "nvfp4_te":
        alone = quantize(on_device(x), fmt, dim=-2, **options, hadamard=transform, values=True)
        check(alone, columns, fmt, True)
    else:
        alone = quantize(on_device(x), fmt, **options, values=True)
        check(alone, rows, fmt, True, inside)
    for wanted in ((-1, -2), (-1,), (-2,))[: 2 + (format == "mxfp8")]:
        both = quantize_both(on_device(x), fmt, **options, hadamard=transform, values=wanted)
        check(both[0], rows, fmt, -1 in wanted, inside)
        check(both[1], columns, fmt, -2 in wanted)


def check(got, expected, fmt, as_values, rows=None):
    assert_same_bits(got, reference_grouped.values_of(expected, fmt) if as_values else expected, rows)


@gpu
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_16x16", "mxfp8", "mxfp8_32x32"])
def test_matrices(format):
    """Along both dimensions, of matrices as they lie and transposed; static scales; no element; float32."""
    fmt = formats.get(format)
    x = torch.stack([hard_input(name, (33, 40), torch.bfloat16, 16) for name in ("outliers", "zeros", "one_nan")])
    given = torch.tensor(0.01) if fmt.outer else None
    sources = [(x, -1, None), (x, -2, None), (x.mT, -1, None), (x[:, :0], -1, None), (x, -1, given)]
    if fmt.scale == "e4m3":
        sources += [(x.float() * 1.001, -1, None), (x.float() * 1.001, -2, None)]
    for source, dim, outer in sources:
        got = quantize(on_device(source), fmt, on_device(outer), dim=dim, each_matrix=True, values=True)
        check(got, reference_grouped.quantize_matrices(source, fmt, dim, outer, "linear", None, False), fmt, True)


def operands(x, fmt, of):
    """(codes, values) as operands."""
    groups = Groups.of(OFFS, len(x)) if of != "matrices" else None
    if of == "rows":
        found = reference_grouped.quantize_rows(x, groups, fmt, None, "linear", None)
    elif of == "columns":
        found = reference_grouped.quantize_columns(x, groups, fmt, None, "linear", None, fmt.scale == "e4m3")
    else:
        found = reference_grouped.quantize_matrices(x, fmt, -1, None, "linear", None, False)
    return Operand(*found, fmt), Operand(*reference_grouped.values_of(found, fmt))


@gpu
@pytest.mark.parametrize(("format", "along_k"), [
    ("nvfp4_te", False), ("nvfp4_te", True), ("mxfp8", False), ("mxfp8", True),
])  # fmt: skip
def test_products(format, along_k):
    """With values for either operand or both: the bits that codes make, by the kernel that dequantises in memory.

    By the kernel for everything else as well; and the reference takes them.
    """
    fmt = formats.get(format)
    x, y = torch.randn(170, 40).bfloat16(), torch.randn(170, 17).bfloat16()
    every_a = operands(x, fmt, "columns" if along_k else "rows")
    every_b = operands(y, fmt, "columns") if along_k else operands(torch.randn(len(OFFS), 17, 40), fmt, "matrices")
    expected = reference_grouped.scaled_grouped_mm(every_a[0], every_b[0], OFFS, 170, torch.float32)
    bits = None
    for a in every_a:
        for b in every_b:
            assert torch.equal(reference_grouped.scaled_grouped_mm(a, b, OFFS, 170, torch.float32), expected)
            there = on_device(a), on_device(b)
            call = call_of(of_groups(*there, on_device(OFFS), 170, torch.float32))
            assert dequant_operand.computes_groups(call.problem)
            got = dequant_operand.run(call, grouped_dot_config(call.problem)).cpu()
            bits = got if bits is None else bits
            assert torch.equal(got, bits)
            if a is not every_a[0] or b is not every_b[0]:
                got = scaled_grouped_mm(*there, on_device(OFFS), 170, torch.float32).cpu()
            for one in (got, bits):
                assert ((one - expected).abs() <= 2.0**-18 * expected.abs().amax()).all()


@gpu
@pytest.mark.parametrize(("offs", "row", "again"), [
    ((0, 3, 163), 163, False), ((0, 3, 163), 162, True), ((5, 40, 9), 40, False), ((5, 40, 9), 39, True),
])  # fmt: skip
def test_products_are_computed_again_for_rows_of_groups_alone(offs, row, again, monkeypatch):
    """Values that bf16 does not hold; in rows of no group, where nothing was written, the memory may have such."""
    found = []
    monkeypatch.setattr(dequant_operand.dequant_tiles, "run", lambda *_, wanted: found.append(wanted.item()))
    offs, fmt = torch.tensor(offs, dtype=torch.int32), formats.get("mxfp8")
    tokens = reference_grouped.quantize_rows(torch.randn(170, 40), Groups.of(offs, 170), fmt, None, "linear", None)
    weights = reference_grouped.quantize_matrices(torch.randn(3, 17, 40), fmt, -1, None, "linear", None, False)
    a, b = (on_device(Operand(*parts, fmt)) for parts in (tokens, weights))
    a.data.view(torch.uint8)[row, 35], a.scales.view(torch.uint8)[row, 1] = 1, 0
    call = call_of(of_groups(a, b, on_device(offs), 170, torch.float32))
    dequant_operand.run(call, grouped_dot_config(call.problem))
    assert found == [again]


# ---------------------------------------------------------------- device functions


@triton.jit
def store_values(units_ptr, bytes_ptr, out_ptr, UNITS: tl.constexpr, BLOCKS: tl.constexpr, ELEMENT: tl.constexpr,
                 SCALE: tl.constexpr, ISA: tl.constexpr):  # fmt: skip
    row = tl.arange(0, 4)[:, None]
    units = tl.load(units_ptr + row * UNITS + tl.arange(0, UNITS)[None, :])
    byte = tl.load(bytes_ptr + row * BLOCKS + tl.arange(0, BLOCKS)[None, :])
    words = values.values_of_units(units, byte, ELEMENT, SCALE, out_ptr.dtype.element_ty, ISA)
    at = row * words.shape[1] + tl.arange(0, words.shape[1])[None, :]
    tl.store(out_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + at, words)


@gpu
@pytest.mark.parametrize("isa", [0, 90])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_units_of_any_width(format, dtype, isa):
    """Values and scales at their places, in the portable form and by PTX."""
    fmt = formats.get(format)
    data, scales, _ = reference.quantize(torch.randn(4, 256).bfloat16() * torch.randn(4, 256).exp2(), fmt)
    if dtype == torch.uint8:
        if INTERPRETING and isa:
            pytest.skip("several units in a register are played below")
        dtype = torch.uint8 if fmt.packed else torch.uint16
    units, byte = data.view(torch.uint8).view(dtype), scales.view(torch.uint8).int()
    out = torch.empty(4, 256, dtype=fmt.values_dtype, device=DEVICE)
    store_values[(1,)](
        on_device(units), on_device(byte), out, units.shape[1], byte.shape[1], fmt.element, fmt.scale, isa
    )
    assert_same_bits([out], [reference.values_of(data, scales, fmt)])


@pytest.mark.skipif(INTERPRETING, reason="plays PTX")
def test_every_e2m1_code_with_every_e4m3_scale():
    bytes_of_scales = np.arange(128, dtype=np.uint8)  # the last one is NaN
    scales = torch.from_numpy(bytes_of_scales).view(torch.float8_e4m3fn)
    twice = scales.half().view(torch.int16).numpy().astype(np.uint16).astype(np.uint32) * 0x10001
    codes = np.uint32(0xFEDCBA98) ^ np.array([[0x88888888], [0]], np.uint32)  # each code in one place or another
    for bits in map(np.uint32, range(0, 32, 4)):
        rotated = codes << bits | codes >> np.uint32(31 - bits) >> np.uint32(1)
        units = np.ascontiguousarray(np.broadcast_to(rotated, (2, 128)))
        data = torch.from_numpy(units.reshape(-1, 1).view(np.uint8))
        expected = reference.e2m1_unpack(data) * scales.float().repeat(2)[:, None]
        for ptx, count in ((values._E2M1, 1), (values._E2M1_BYTES, 4)):
            words = play(ptx.value, 4, [units, *[np.broadcast_to(twice, (2, 128))] * count])
            got = torch.from_numpy(np.stack(words, -1).reshape(-1, 4).view(np.float16))
            assert_same_bits([got], [expected.half()])


@pytest.mark.skipif(INTERPRETING, reason="plays PTX")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_e4m3_code_with_every_e8m0_scale():
    """As far as bfloat16 holds the value. Codes of NaN have the scale NaN."""
    byte, no_number = np.arange(256, dtype=np.uint32), (torch.arange(256) == 255)[:, None]
    twice = np.where(byte == 0, 0x40, np.where(byte == 255, 0x7FC0, byte << 7)).astype(np.uint32) * 0x10001
    for first in range(0, 256, 4):
        unit = np.full(256, sum((first + i) << 8 * i for i in range(4)), np.uint32)
        codes = torch.from_numpy(unit.view(np.uint8).reshape(256, 4)).view(torch.float8_e4m3fn).float()
        expected = codes * reference.e8m0_decode(torch.from_numpy(byte.astype(np.uint8)))[:, None]
        held = (expected.bfloat16().float() == expected) | no_number
        for ptx, count in ((values._E4M3, 1), (values._E4M3_PAIRS, 2)):
            words = np.stack(play(ptx.value, 2, [unit, *[twice] * count]), -1)
            got = torch.from_numpy(words.view(np.uint16).reshape(256, 4).view(np.int16)).view(torch.bfloat16)
            assert_same_bits([got[held]], [expected.bfloat16()[held]])


@pytest.mark.skipif(INTERPRETING, reason="is about formats")
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp4"])
def test_bfloat16_holds_the_values_of_16_bit_numbers(name):
    """Every bfloat16 and float16 number, at any scale that a block may have; not every float32 number."""
    fmt = formats.get(name)
    numbers = torch.arange(2**15, dtype=torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        x = numbers.view(dtype)
        x = x[x.isfinite()]
        for shift in (0, 1, 5, 40):  # the block's largest element is larger by so many powers of two
            largest = (x.float() * 2.0**shift).clamp(max=torch.finfo(dtype).max)
            blocks = torch.stack((largest, x.float(), *[-x.float()] * 30), -1)
            data, scales, _ = reference.quantize(blocks, fmt)
            found = reference.dequantize_blocks(data, scales, fmt)
            assert torch.equal(found.to(fmt.values_dtype).float(), found)
    tiny = torch.full((1, 32), 1.5 * 2.0**-140)
    found = reference.dequantize_blocks(*reference.quantize(tiny, fmt)[:2], fmt)
    assert not torch.equal(found.to(fmt.values_dtype).float(), found) or not found.any()


# ---------------------------------------------------------------- machine code


TRAINED = {"dim": (-1, -2), "groups": "rows", "hadamard": True, "seeded": True, "values": (-1, -2)}
COLUMNS_OF_MATRICES = {"dim": (-2,), "groups": "matrices", "values": (-2,)}


@pytest.mark.skipif(INTERPRETING, reason="compiles")
@pytest.mark.parametrize(("name", "options", "most"), [
    ("nvfp4_te", TRAINED, 960), ("nvfp4_16x16", COLUMNS_OF_MATRICES, 345), ("mxfp8", COLUMNS_OF_MATRICES, 400),
], ids=["trained", "squares", "columns"])  # fmt: skip
def test_machine_code(name, options, most):
    """On Hopper: nothing spills, 16 bytes a store; a limit of instructions for 16 elements."""
    one = Configuration("values", name, layout="linear", **options)
    found = quantize_row(one, one.launches(90)[-1], 90)
    assert found.resources.spills == 0 and found.stores == 16
    assert found.instructions <= most
