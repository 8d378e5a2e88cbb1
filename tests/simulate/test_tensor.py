"""Descriptors, products and tensor memory of the simulator; and that it finds what is wrong with them."""

import re

import numpy as np
import pytest
import torch

from fp4compile.check.simulate.descriptors import F16, MXF4, MXF4NVF4_16, MXF8F6F4, Matrix, Shape
from fp4compile.check.simulate.fault import Fault
from fp4compile.check.simulate.forms import UnknownForm
from fp4compile.check.simulate.machine import Schedule
from fp4compile.formats import formats, reference
from fp4compile.formats.layouts import to_swizzled
from fp4compile.formats.operand import Operand
from tests.simulate.ptx_text import run_body

SCHEDULES = [Schedule(seed, strict_loads=True) for seed in range(4)]


def matrix_bits(start: int, layout: int, stride: int, leading: int = 0, base_offset: int = 0) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | base_offset << 49 | layout << 61


# ---------------------------------------------------------------- descriptors


@pytest.mark.parametrize(
    "layout, stride, row, column, expected",
    [
        (2, 1024, 0, 0, 8192), (2, 1024, 0, 1, 8192 + 16), (2, 1024, 1, 0, 8192 + 128 + 16),
        (2, 1024, 5, 1, 8192 + 5 * 128 + (5 ^ 1) * 16), (2, 1024, 13, 0, 8192 + 1024 + 5 * 128 + 5 * 16),
        (4, 512, 1, 0, 8192 + 64), (4, 512, 2, 0, 8192 + 128 + 16), (4, 512, 7, 1, 8192 + 448 + (3 ^ 1) * 16),
        (6, 256, 3, 1, 8192 + 96 + 16), (6, 256, 4, 0, 8192 + 128 + 16), (6, 256, 12, 1, 8192 + 256 + 128),
        (0, 128, 3, 0, 8192 + 48), (0, 128, 3, 1, 8192 + 4096 + 48), (0, 128, 9, 1, 8192 + 128 + 4096 + 16),
    ],
)  # fmt: skip
def test_addresses_in_shared_memory(layout, stride, row, column, expected):
    chunks = Matrix.of(matrix_bits(8192, layout, stride, leading=4096)).chunks(16, 32)
    assert chunks[row, column] == expected


def test_a_step_along_k_stays_in_the_pattern_of_the_matrix():
    chunks = Matrix.of(matrix_bits(8192 + 96, 2, 1024)).chunks(8, 32)
    assert chunks[5].tolist() == [8192 + 640 + (6 ^ 5) * 16, 8192 + 640 + (7 ^ 5) * 16]


def test_triton_sets_a_base_offset_without_swizzling():
    plain, odd = (Matrix.of(matrix_bits(512, 0, 128, base_offset=offset)) for offset in (0, 4))
    assert plain == odd


@pytest.mark.parametrize(
    "bits, what",
    [
        (matrix_bits(0, 2, 1024) | 1 << 14, "reserved bits 14 to 15"),
        (matrix_bits(0, 2, 1024) | 1 << 31, "reserved bits 30 to 31"),
        (matrix_bits(0, 2, 1024) | 1 << 60, "reserved bits 53 to 60"),
        (matrix_bits(0, 2, 1024) ^ 1 << 46, "version 0"),
        (matrix_bits(0, 2, 1024) | 1 << 47, "version 3"),
        (matrix_bits(0, 2, 1024) | 1 << 52, "absolute leading address"),
        (matrix_bits(0, 1, 1024), "layout 1"),
        (matrix_bits(0, 3, 1024), "layout 3"),
        (matrix_bits(0, 2, 1024, base_offset=1), "base offset"),
        (matrix_bits(128, 2, 1024), "in the middle of a pattern"),
    ],
)
def test_unknown_shared_memory_descriptors_are_faults(bits, what):
    with pytest.raises(Fault, match=what):
        Matrix.of(bits)


def test_a_row_must_not_leave_its_pattern():
    with pytest.raises(Fault, match="in a pattern of 128 bytes"):
        Matrix.of(matrix_bits(112, 2, 1024)).chunks(8, 32)


def instruction(
    kind, a: int, b: int, columns: int, *, scale: int = 1, a_byte: int = 0, b_byte: int = 0, programs: int = 1
) -> int:
    """The instruction descriptor of a product with 128 rows for each program."""
    bits = a << 7 | b << 10 | columns >> 3 << 17 | 8 * programs << 24
    return bits | 1 << 4 if kind is F16 else bits | b_byte << 4 | scale << 23 | a_byte << 29


@pytest.mark.parametrize(
    "kind, bits, what",
    [
        (F16, instruction(F16, 1, 1, 64) | 1 << 6, "reserved bits 6 to 6"),
        (F16, instruction(F16, 1, 1, 64) | 1 << 23, "reserved bits 23 to 23"),
        (F16, instruction(F16, 1, 1, 64) | 1 << 2, "field sparse"),
        (F16, instruction(F16, 1, 1, 64) | 1 << 13, "field negate_a"),
        (F16, instruction(F16, 1, 1, 64) | 1 << 16, "field transpose_b"),
        (F16, instruction(F16, 1, 1, 64) ^ 1 << 4, "field d is 0"),
        (F16, instruction(F16, 2, 1, 64), "matrix a has format 2"),
        (F16, instruction(F16, 1, 1, 8), "N is 8"),
        (F16, instruction(F16, 1, 1, 264), "N is 264"),
        (F16, instruction(F16, 1, 1, 64) ^ 12 << 24, "M is 64"),
        (MXF8F6F4, instruction(MXF8F6F4, 0, 0, 64) | 1 << 3, "reserved bits 3 to 3"),
        (MXF8F6F4, instruction(MXF8F6F4, 0, 0, 64) | 1 << 31, "reserved bits 31 to 31"),
        (MXF8F6F4, instruction(MXF8F6F4, 0, 3, 64), "matrix b has format 3"),
        (MXF8F6F4, instruction(MXF8F6F4, 0, 0, 64, scale=0), "scales have type 0"),
        (MXF4, instruction(MXF4, 1, 1, 64) | 1 << 12, "reserved bits 12 to 12"),
        (MXF4, instruction(MXF4, 1, 1, 64) | 1 << 31, "field k"),
        (MXF4, instruction(MXF4, 1, 1, 64, scale=0), "scales have type 0"),
        (MXF4, instruction(MXF4, 1, 1, 64, a_byte=1), "2 scales from byte 1"),
        (MXF4, instruction(MXF4, 0, 1, 64), "matrix a has format 0"),
        (MXF4NVF4_16, instruction(MXF4NVF4_16, 1, 1, 64, b_byte=2), "4 scales from byte 0 of a word for A, and 2"),
    ],
)
def test_unknown_instruction_descriptors_are_faults(kind, bits, what):
    with pytest.raises(Fault, match=what):
        Shape.of(bits, kind, 1)


def test_the_m_of_a_pair_counts_the_rows_of_both_programs():
    bits = instruction(F16, 1, 1, 64)
    with pytest.raises(Fault, match="M is 128"):
        Shape.of(bits, F16, 2)
    assert Shape.of(instruction(F16, 1, 1, 64, programs=2), F16, 2).rows == 128


# ---------------------------------------------------------------- a kernel with a product

THREADS = 128
IMAGE = 1024  # where the image of the operands begins in dynamic shared memory, which begins at 1024
ROWS = 128
SUMS, SCALES_A, SCALES_B = 0, 256, 320  # columns
CLUSTER_SYNC = "barrier.cluster.arrive.aligned;\n    barrier.cluster.wait.aligned;"


def swizzled(matrix: np.ndarray) -> np.ndarray:
    """uint8 [rows, 128] as shared memory has it for 128-byte swizzling."""
    rows = np.arange(len(matrix))[:, None]
    chunks = matrix.reshape(len(matrix), 8, 16)
    return chunks[rows, np.arange(8)[None, :] ^ rows % 8].reshape(-1)


def kernel(nbytes: int, columns: int, operations: str, *, after: str = "", programs: int = 1) -> str:
    """The body of a kernel of 128 threads that executes `operations` by its first thread, and stores its sums.

    nbytes: of the image of a program's operands in shared memory, the content of parameter 0. columns: of the sums,
    which go to parameter 1. operations: may use %r10, the first column of tensor memory. after: is executed before the
    end. programs: 1, or 2 for a pair.
    """
    sync = CLUSTER_SYNC if programs == 2 else "bar.sync 0;"
    commit = "mbarrier::arrive::one.shared::cluster.b64 [%r5]"
    if programs == 2:
        commit = "mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r5], 3"
    copies = "\n".join(f"""
    ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%rd3+{at}];
    st.shared.v4.b32 [%r4+{at + IMAGE}], {{%r20, %r21, %r22, %r23}};"""
        for at in range(0, nbytes, 16 * THREADS))  # fmt: skip
    results = [f"%r{100 + i}" for i in range(columns)]
    width = min(columns, 32)
    loads = "\n".join(f"""
    tcgen05.ld.sync.aligned.32x32b.x{width}.b32 {{{", ".join(results[at : at + width])}}}, [ %r11 + {SUMS + at} ];"""
        for at in range(0, columns, width))  # fmt: skip
    stores = "\n".join(f"st.global.b32 [%rd5+{4 * i}], {{{name}}};" for i, name in enumerate(results))
    body = f"""
    ld.param.b64 %rd1, [p0];
    ld.param.b64 %rd2, [p1];
    mov.u32 %r1, %tid.x;
    mov.u32 %r8, %cluster_ctarank;
    mul.wide.u32 %rd7, %r8, {nbytes};
    add.u64 %rd1, %rd1, %rd7;
    mul.wide.u32 %rd7, %r8, {4 * ROWS * columns};
    add.u64 %rd2, %rd2, %rd7;
    mov.b32 %r2, global_smem;
    shr.u32 %r3, %r1, 5;
    or.b32 %r9, %r1, %r8;
    setp.eq.u32 %p1, %r3, 0;
    setp.eq.u32 %p2, %r9, 0;
    setp.eq.u32 %p6, %r1, 0;
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 512;
    @%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    add.u32 %r5, %r2, 16;
    @%p6 mbarrier.init.shared::cta.b64 [%r5], 1;
    shl.b32 %r6, %r1, 4;
    add.u32 %r4, %r2, %r6;
    cvt.u64.u32 %rd4, %r6;
    add.u64 %rd3, %rd1, %rd4;
{copies}
    fence.proxy.async.shared::cta;
    bar.sync 0;
    ld.shared.b32 %r10, [%r2];
    shl.b32 %r7, %r3, 21;
    add.u32 %r11, %r10, %r7;
    {sync}
    mov.pred %p4, -1;
    mov.pred %p5, 0;
    @!%p2 bra DONE;
{operations}
    tcgen05.commit.cta_group::1.{commit};
DONE:
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r5], 0;
    @!%p3 bra WAIT;
{loads}
    tcgen05.wait::ld.sync.aligned;
    mul.wide.u32 %rd6, %r1, {4 * columns};
    add.u64 %rd5, %rd2, %rd6;
{stores}
{after}
    {sync}
    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 512;
"""
    return body.replace("cta_group::1", f"cta_group::{programs}")


def product(kind: str, bits: int, a: str, b: str, scales: tuple[int, int] | None, adds: bool) -> str:
    registers = "".join(f", [ %r10 + {column} ]" for column in scales or ())
    registers += ", %p4" if adds else ", %p5"
    return f"""
    mov.b32 %r12, {bits};
    {b}
    {a}
    tcgen05.mma.cta_group::1.kind::{kind} [ %r10 + {SUMS} ], %rd10, %rd11, %r12{registers};"""


def descriptor(register: str, start: int, layout: int = 2, stride: int = 1024) -> str:
    return f"mov.b64 {register}, {matrix_bits(1024 + IMAGE + start, layout, stride)};"


def padded(image: list[np.ndarray]) -> np.ndarray:
    """Parts of an image one after the other, each from a multiple of 1024 on."""
    return np.concatenate(
        [np.pad(each.reshape(-1), (0, -each.size % 1024)) for each in image] + [np.zeros(0, np.uint8)]
    )


def places(image: list[np.ndarray]) -> list[int]:
    return [sum(-(-each.size // 1024) * 1024 for each in image[:i]) for i in range(len(image))]


def whole(image: np.ndarray) -> np.ndarray:
    return np.pad(image, (0, -image.size % (16 * THREADS)))


MAGNITUDES = {"e2m1": (0, 1, 2, 3, 4, 5, 6, 7), "e4m3": (0x00, 0x30, 0x38, 0x40, 0x44), "e5m2": (0, 0x38, 0x3C, 0x40)}
SCALES = {"e4m3": (0x30, 0x38, 0x40), "e8m0": (126, 127, 128)}


def operand(element: str, scale: str, rows: int, bytes_of_k: int, block: int, generator) -> tuple[Operand, np.ndarray]:
    """An operand with small elements and scales of 1/2, 1 and 2, and its bytes [rows, 128] in shared memory."""
    fmt = formats.get({"e2m1": {"e4m3": "nvfp4_one_level", "e8m0": "mxfp4"}[scale], "e4m3": "mxfp8",
                       "e5m2": "mxfp8_e5m2"}[element])  # fmt: skip
    assert fmt.block_cols == block

    def codes(sign: int) -> np.ndarray:
        shape = (rows, bytes_of_k)
        return generator.choice(MAGNITUDES[element], shape) | generator.choice((0, sign), shape)

    data = (codes(8) | codes(8) << 4 if fmt.packed else codes(128)).astype(np.uint8)
    blocks = bytes_of_k * (2 if fmt.packed else 1) // block
    scales = generator.choice(SCALES[scale], (rows, blocks)).astype(np.uint8)
    made = Operand(
        torch.from_numpy(data).view(fmt.data_dtype), torch.from_numpy(scales).view(fmt.scale_dtype), None, fmt
    )
    return made, data


CODES = {"e4m3": 0, "e5m2": 1, "e2m1": 5}
# kind, elements of A and of B, scale, elements of a block, scales of an instruction
KINDS = [
    ("mxf4nvf4.block_scale.block16", "e2m1", "e2m1", "e4m3", 16, 4),
    ("mxf4.block_scale.block32", "e2m1", "e2m1", "e8m0", 32, 2),
    ("mxf4.block_scale", "e2m1", "e2m1", "e8m0", 32, 2),
    ("mxf4nvf4.block_scale.block32", "e2m1", "e2m1", "e8m0", 32, 2),
    *[(f"mxf8f6f4.block_scale{size}", a, b, "e8m0", 32, 1) for a, b, size in
      (("e4m3", "e4m3", ".block32"), ("e4m3", "e4m3", ""), ("e5m2", "e4m3", ".block32"), ("e4m3", "e5m2", ".block32"),
       ("e4m3", "e2m1", ".block32"), ("e2m1", "e5m2", ".block32"))],
]  # fmt: skip


def scaled_case(kind: str, a: str, b: str, scale: str, block: int, count: int, columns: int, programs: int = 1):
    """(body, image, expected sums) of a product over four steps of K, with the scales copied to tensor memory."""
    generator = np.random.default_rng(3)
    mixed = kind.startswith("mxf8f6f4")
    bytes_of_k = [64 if mixed and element == "e2m1" else 128 for element in (a, b)]
    left, a_data = operand(a, scale, programs * ROWS, bytes_of_k[0], block, generator)
    right, b_data = operand(b, scale, columns, bytes_of_k[1], block, generator)
    expected = reference.scaled_mm(left, right, None, torch.float32).numpy()
    matrices = [spread(data) if mixed and element == "e2m1" else data for data, element in ((a_data, a), (b_data, b))]
    steps_of_word = 4 // count
    images = [[swizzled(own_a), swizzled(own_b), of_a, to_swizzled(right.scales.view(torch.uint8)).numpy()]
              for own_a, own_b, of_a in zip(
                  np.split(matrices[0], programs), np.split(matrices[1], programs),
                  [to_swizzled(each).numpy() for each in left.scales.view(torch.uint8).chunk(programs)], strict=True,
              )]  # fmt: skip
    a_at, b_at, *scales_at = places(images[0])
    operations = []
    tiles = left.scales.shape[1] // 4  # copies of 512 bytes
    for column, start in ((SCALES_A, scales_at[0]), (SCALES_B, scales_at[1])):
        for tile in range(tiles):
            operations.append(descriptor("%rd12", start + 512 * tile, 0, 128))
            operations.append(f"tcgen05.cp.cta_group::1.warpx4.32x128b [ %r10 + {column + 4 * tile} ], %rd12;")
    for step in range(4):
        word, byte = step // steps_of_word, step % steps_of_word * count
        codes = [1, 1] if not mixed else [CODES[a], CODES[b]]
        bits = instruction(None, *codes, columns, scale=int(scale == "e8m0"), a_byte=byte, b_byte=byte,
                           programs=programs)  # fmt: skip
        matrices_at = descriptor("%rd10", a_at + 32 * step), descriptor("%rd11", b_at + 32 * step)
        scales_of_step = SCALES_A + 4 * word, SCALES_B + 4 * word
        operations.append(product(kind, bits, *matrices_at, scales_of_step, adds=step > 0))
    contents = [whole(padded(image)) for image in images]
    body = kernel(contents[0].size, columns, "\n".join(operations), programs=programs)
    return body, np.concatenate(contents), expected


def spread(data: np.ndarray) -> np.ndarray:
    """FP4 codes [rows, 64] as products with FP8 read them: 8 bytes of codes, 8 bytes of anything."""
    filled = np.full((len(data), 8, 16), 0xEE, np.uint8)
    filled[:, :, :8] = data.reshape(len(data), 8, 8)
    return filled.reshape(len(data), 128)


@pytest.mark.parametrize("wide", [True, False])
def test_products_do_not_read_the_padding_of_fp4_codes_beside_fp8(wide):
    body, content, expected = scaled_case("mxf8f6f4.block_scale.block32", "e4m3", "e2m1", "e8m0", 32, 1, 64)
    for at in range(16384, 16384 + 64 * 128, 16 * THREADS):
        stored = f"    st.shared.v4.b32 [%r4+{at + IMAGE}], {{%r20, %r21, %r22, %r23}};"
        eight_bytes = f"    st.shared.v2.b32 [%r4+{at + IMAGE}], {{%r20, %r21}};"
        body = edited(body, stored, eight_bytes if wide else f"    st.shared.b32 [%r4+{at + IMAGE}], {{%r20}};")
    if wide:
        np.testing.assert_array_equal(run_product(body, content, 64), expected)
    else:
        found(body, content, "reads shared memory that nothing wrote")


def run_product(
    body: str, content: np.ndarray, columns: int, schedule: Schedule = SCHEDULES[0], programs: int = 1
) -> np.ndarray:
    sums = np.zeros((programs * ROWS, columns), np.float32)
    return run_body(body, [content, sums], threads=THREADS, shared_bytes=IMAGE + content.size // programs,
                    grid=programs, cluster=programs, schedule=schedule)[1]  # fmt: skip


@pytest.mark.parametrize("kind, a, b, scale, block, count", KINDS, ids=lambda value: str(value))
def test_products_with_block_scales_equal_the_reference(kind, a, b, scale, block, count):
    body, content, expected = scaled_case(kind, a, b, scale, block, count, 96)
    np.testing.assert_array_equal(run_product(body, content, 96), expected)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("case", [KINDS[0], KINDS[4]], ids=lambda case: case[0])
def test_products_of_a_pair_of_programs_equal_the_reference(case, schedule):
    body, content, expected = scaled_case(*case, 64, programs=2)
    np.testing.assert_array_equal(run_product(body, content, 64, schedule, programs=2), expected)


@pytest.mark.parametrize(
    "old, new, what",
    [
        (CLUSTER_SYNC + "\n    mov.pred", "bar.sync 0;\n    mov.pred", "nothing wrote|without a wait|not allocated"),
        ("or.b32 %r9, %r1, %r8;", "xor.b32 %r9, %r8, 1;\n    or.b32 %r9, %r1, %r9;", "not the first of a pair"),
    ],
)
def test_what_is_wrong_with_a_pair_is_found(old, new, what):
    body, content, _ = scaled_case(*KINDS[0], 64, programs=2)
    found(edited(body, old, new), content, what, programs=2)


def test_a_commit_that_reaches_one_program_of_a_pair_leaves_the_other_one_waiting():
    body, content, _ = scaled_case(*KINDS[0], 64, programs=2)
    found(edited(body, "[%r5], 3;", "[%r5], 1;"), content, "nothing can go on", programs=2)


def values_of_16_bits(kind: str, rows: int, generator) -> tuple[np.ndarray, np.ndarray]:
    """Small numbers [rows, 64], and their bytes [rows, 128]."""
    values = torch.from_numpy(generator.integers(-8, 9, (rows, 64)) / 4)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    return values.numpy(), values.to(dtype).view(torch.uint8).numpy()


def plain_case(a: str = "bf16", b: str = "bf16", columns: int = 64, **edits):
    """(body, image, expected sums) of a product of 16-bit operands over four steps of K."""
    generator = np.random.default_rng(5)
    (left, a_bytes), (right, b_bytes) = values_of_16_bits(a, ROWS, generator), values_of_16_bits(b, columns, generator)
    image = [swizzled(a_bytes), swizzled(b_bytes)]
    a_at, b_at = places(image)
    bits = instruction(F16, int(a == "bf16"), int(b == "bf16"), columns)
    operations = ""
    for step in range(4):
        matrices_at = descriptor("%rd10", a_at + 32 * step), descriptor("%rd11", b_at + 32 * step)
        operations += product("f16", bits, *matrices_at, None, adds=step > 0)
    content = whole(padded(image))
    return kernel(content.size, columns, operations, **edits), content, (left @ right.T).astype(np.float32)


@pytest.mark.parametrize("a, b", [("bf16", "bf16"), ("f16", "f16"), ("f16", "bf16")])
@pytest.mark.parametrize("columns", [16, 128])
def test_products_of_16_bits(a, b, columns):
    body, content, expected = plain_case(a, b, columns)
    np.testing.assert_array_equal(run_product(body, content, columns), expected)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_right_kernels_pass_under_every_schedule(schedule):
    body, content, expected = plain_case()
    np.testing.assert_array_equal(run_product(body, content, 64, schedule), expected)
    body, content, expected = scaled_case(*KINDS[0], 64)
    np.testing.assert_array_equal(run_product(body, content, 64, schedule), expected)


def in_tensor_memory_case(columns: int = 64):
    """(body, image, expected sums) of a product whose A the warps store to tensor memory: one step of K."""
    generator = np.random.default_rng(7)
    (left, a_bytes), (right, b_bytes) = (values_of_16_bits("bf16", rows, generator) for rows in (ROWS, columns))
    image = [a_bytes, swizzled(b_bytes)]
    a_at, b_at = places(image)
    registers = ", ".join(f"%r{300 + i}" for i in range(8))
    stored = f"""
    mad.lo.u32 %r13, %r1, 112, %r4;
    ld.shared.v4.b32 {{%r300, %r301, %r302, %r303}}, [%r13+{IMAGE + a_at}];
    ld.shared.v4.b32 {{%r304, %r305, %r306, %r307}}, [%r13+{IMAGE + a_at + 16}];
    tcgen05.st.sync.aligned.32x32b.x8.b32 [ %r11 + {SCALES_A} ], {{{registers}}};
    tcgen05.wait::st.sync.aligned;
    bar.sync 0;
    mov.pred %p4, -1;"""
    operations = product("f16", instruction(F16, 1, 1, columns), "", descriptor("%rd11", b_at), None, adds=False)
    content = whole(padded(image))
    body = kernel(content.size, columns, operations.replace("%rd10", f"[ %r10 + {SCALES_A} ]"))
    body = body.replace("bar.sync 0;\n    mov.pred %p4, -1;", stored)
    return body, content, (left[:, :16] @ right[:, :16].T).astype(np.float32)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_product_with_a_in_tensor_memory(schedule):
    body, content, expected = in_tensor_memory_case()
    np.testing.assert_array_equal(run_product(body, content, 64, schedule), expected)


# ---------------------------------------------------------------- what is found in products


def edited(body: str, old: str, new: str) -> str:
    """A body with one place changed."""
    assert body.count(old) == 1, body.count(old)
    return body.replace(old, new)


def found(body: str, content: np.ndarray, what: str, programs: int = 1) -> None:
    """That a broken kernel is a fault under every schedule."""
    for schedule in SCHEDULES:
        with pytest.raises(Fault, match=what):
            run_product(body, content, 64, schedule, programs)


BROKEN = [
    ("fence.proxy.async.shared::cta;", "", "without a fence.proxy.async"),
    ("tcgen05.wait::ld.sync.aligned;", "", r"uses %r\d+ before tcgen05.wait::ld"),
    ("    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 512;", "", "did not free their tensor memory"),
    ("b32 %r10, 512;", "b32 %r10, 256;", "which are no allocation"),
    ("b32 [%r2], 512;", "b32 [%r2], 300;", "not a power of two"),
    ("b32 [%r2], 512;", "b32 [%r2], 32;", "columns 480 to 543 of tensor memory are not allocated"),
    ("shl.b32 %r7, %r3, 21;", "shl.b32 %r7, %r3, 20;", "from lane .* on, and its lanes begin at"),
    ("shl.b32 %r7, %r3, 21;", "shl.b32 %r7, %r1, 16;", "name several addresses"),
    (f"[ %r11 + {SUMS} ]", "[ %r11 + 64 ]", "reads tensor memory that nothing wrote"),
    ("@%p1 tcgen05.alloc", "@%p2 tcgen05.alloc", "executed by part of a warp"),
    ("@%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
     "@%p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n"
     "@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 32;", "gave up the right"),
]  # fmt: skip


@pytest.mark.parametrize("old, new, what", BROKEN)
def test_a_broken_kernel_is_found(old, new, what):
    body, content, _ = plain_case()
    found(edited(body, old, new), content, what)


def test_an_epilogue_that_does_not_wait_for_the_commit_is_found():
    body, content, _ = plain_case()
    body = edited(body, "WAIT:\n    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r5], 0;\n    @!%p3 bra WAIT;", "")
    for schedule in SCHEDULES:  # the pipe has written the sums, or not
        with pytest.raises(Fault, match="the tensor pipe wrote, without a wait|nothing wrote"):
            run_product(body, content, 64, schedule)


def test_a_wait_for_a_phase_that_is_over_is_found():
    body, content, _ = plain_case()
    body = edited(body, "%p3, [%r5], 0;", "%p3, [%r5], 1;")
    for schedule in SCHEDULES:
        with pytest.raises(Fault, match="the tensor pipe wrote, without a wait|nothing wrote"):
            run_product(body, content, 64, schedule)


def test_products_that_overwrite_sums_that_are_read_are_found():
    """After the loads thread 0 issues one more product, and all wait for it."""
    again = f"""
    @!%p2 bra AGAIN;
{product("f16", instruction(F16, 1, 1, 64), descriptor("%rd10", 0), descriptor("%rd11", 16384), None, False)}
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r5];
AGAIN:
WAIT_AGAIN:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r5], 1;
    @!%p3 bra WAIT_AGAIN;
    """
    body, content, expected = plain_case()
    waited = "tcgen05.wait::ld.sync.aligned;\n"
    ordered = edited(body, waited, waited + "    bar.sync 0;" + again)
    for schedule in SCHEDULES:
        np.testing.assert_array_equal(run_product(ordered, content, 64, schedule), expected)
    races = "the tensor pipe overwrites tensor memory that tcgen05.ld of warp . may be reading"
    found(edited(body, waited, waited + again), content, races + "|tcgen05.ld of warp . reads .* without a wait")
    found(edited(body, waited, "bar.sync 0;" + again + waited), content, races)


def test_a_product_after_the_commit_is_not_waited_for():
    body, content, _ = plain_case()
    commit = "    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r5];\n"
    before, last, rest = edited(body, commit, "").rpartition("    mov.b32 %r12")
    found(before + commit + last + rest, content,
          "tcgen05.ld of warp . reads .* without a wait|tensor pipe overwrites .* may be reading")  # fmt: skip


def test_shared_memory_that_a_product_still_reads_is_found():
    body, content, _ = plain_case()
    overwritten = f"    st.shared.b32 [%r4+{IMAGE}], {{%r1}};\nWAIT:"
    found(edited(body, "WAIT:", "bar.sync 0;\n" + overwritten), content,
          "may be reading|without a fence.proxy.async|without a wait")  # fmt: skip
    after = f"    st.shared.b32 [%r4+{IMAGE}], {{%r1}};"
    run_product(plain_case(after=after)[0], content, 64)


def test_a_product_that_adds_to_nothing_is_found():
    body, content, _ = plain_case()
    found(body.replace(", %p5;", ", %p4;"), content, "reads tensor memory that nothing wrote")


def test_operands_that_nothing_wrote_are_found():
    body, content, _ = plain_case()
    stored = re.findall(r"    st.shared.v4.b32 \[%r4\+\d+\], .*?;", body)
    found(edited(body, stored[-1], ""), content, "reads shared memory that nothing wrote")


def test_a_matrix_outside_of_shared_memory_is_found():
    body, content, _ = plain_case()
    found(
        edited(body, descriptor("%rd11", 16384), descriptor("%rd11", content.size)), content, "outside of shared memory"
    )


def test_a_store_must_be_waited_for_before_the_product():
    body, content, _ = in_tensor_memory_case()
    found(edited(body, "tcgen05.wait::st.sync.aligned;", ""), content, "tcgen05.st of warp . wrote, without a wait")
    found(edited(body, "tcgen05.wait::st.sync.aligned;", "tcgen05.wait::ld.sync.aligned;"), content,
          "tcgen05.st of warp . wrote, without a wait")  # fmt: skip
    found(edited(body, "tcgen05.wait::st.sync.aligned;\n    bar.sync 0;", "tcgen05.wait::st.sync.aligned;"), content,
          "nothing wrote|without a wait")  # fmt: skip


def test_scales_must_be_copied_and_the_same_in_all_quarters():
    body, content, _ = scaled_case(*KINDS[0], 64)
    copy = f"tcgen05.cp.cta_group::1.warpx4.32x128b [ %r10 + {SCALES_A + 4} ], %rd12;"
    found(edited(body, copy, ""), content, "reads tensor memory that nothing wrote")
    stored = f"""
    tcgen05.st.sync.aligned.32x32b.x1.b32 [ %r11 + {SCALES_A} ], {{%r3}};
    tcgen05.wait::st.sync.aligned;
    bar.sync 0;
    mov.pred %p4, -1;"""
    copy = f"tcgen05.cp.cta_group::1.warpx4.32x128b [ %r10 + {SCALES_A} ], %rd12;"
    other = copy.replace(str(SCALES_A), str(SCALES_A + 16))
    body = edited(edited(body, copy, other), "    mov.pred %p4, -1;", stored)
    body = body.replace(f"[ %r10 + {SCALES_A} ]", f"[ %r10 + {SCALES_A - 3} ]")
    found(body, content, "nothing wrote")
    body = body.replace("x1.b32", "x4.b32").replace("{%r3}", "{%r3, %r3, %r3, %r3}")
    body = body.replace(f"[ %r10 + {SCALES_A - 3} ]", f"[ %r10 + {SCALES_A} ]")
    found(body, content, "the quarters of tensor memory hold different scales")


def test_scales_that_are_copied_after_the_product_are_found():
    body, content, _ = scaled_case(*KINDS[0], 64)
    copies = re.findall(r"mov.b64 %rd12, \d+;\ntcgen05.cp[^;]*;", body)
    late = edited(edited(body, copies[-1], ""), "    tcgen05.commit", copies[-1] + "\n    tcgen05.commit")
    found(late, content, "reads tensor memory that nothing wrote")


def test_one_kernel_has_one_cta_group():
    body, content, _ = plain_case()
    with pytest.raises(UnknownForm, match="several values of cta_group"):
        run_product(edited(body, "@%p1 tcgen05.dealloc.cta_group::1", "@%p1 tcgen05.dealloc.cta_group::2"), content, 64)


# ---------------------------------------------------------------- tensor memory alone

ROUND_TRIP = """
    ld.param.b64 %rd1, [p0];
    mov.u32 %r1, %tid.x;
    mov.b32 %r2, global_smem;
    shr.u32 %r3, %r1, 5;
    setp.eq.u32 %p1, %r3, 0;
    @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 64;
    bar.sync 0;
    ld.shared.b32 %r10, [%r2];
    and.b32 %r4, %r3, 3;
    shl.b32 %r5, %r4, 21;
    add.u32 %r11, %r10, %r5;
    add.u32 %r6, %r1, 1000;
    tcgen05.st.sync.aligned.32x32b.x2.b32 [ %r11 + 5 ], {%r1, %r6};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r7, %r8}, [ %r11 + 5 ];
    tcgen05.wait::ld.sync.aligned;
    mul.wide.u32 %rd2, %r1, 8;
    add.u64 %rd3, %rd1, %rd2;
    st.global.v2.b32 [%rd3], {%r7, %r8};
    bar.sync 0;
    @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 64;
"""


def round_trip(body: str, schedule: Schedule = SCHEDULES[0], threads: int = 128, grid: int = 1) -> np.ndarray:
    return run_body(body, [np.zeros((threads, 2), np.uint32)], threads=threads, shared_bytes=64, grid=grid,
                    schedule=schedule)[0]  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_stores_and_loads_of_a_warp(schedule):
    rows = np.arange(128)
    np.testing.assert_array_equal(round_trip(ROUND_TRIP, schedule), np.stack([rows, rows + 1000], 1))


@pytest.mark.parametrize(
    "old, new, what",
    [
        ("    tcgen05.wait::st.sync.aligned;\n", "", "tcgen05.ld of warp . reads .* tcgen05.st of warp . wrote"),
        ("[ %r11 + 5 ], {%r1", "[ %r11 + 63 ], {%r1", "columns 511 to 512 of tensor memory are not allocated"),
        ("[%r2], 64;\n", "[%r2], 64;\n@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 128;\n",
         "allocates 128 columns after an allocation of 64"),
        ("    tcgen05.wait::ld.sync.aligned;\n", "    bar.sync 0;\n    tcgen05.wait::st.sync.aligned;\n",
         "uses %r. before tcgen05.wait::ld"),
        ("    tcgen05.wait::ld.sync.aligned;\n",
         "    tcgen05.st.sync.aligned.32x32b.x1.b32 [ %r11 + 5 ], {%r6};\n    tcgen05.wait::ld.sync.aligned;\n",
         "overwrites tensor memory that tcgen05.ld of warp . may be reading"),
        ("    bar.sync 0;\n    @%p1 tcgen05.dealloc", "    @%p1 tcgen05.dealloc",
         "frees tensor memory in use|not allocated"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_loads_and_stores_is_found(old, new, what):
    for schedule in SCHEDULES:
        with pytest.raises(Fault, match=what):
            round_trip(edited(ROUND_TRIP, old, new), schedule)


def test_an_allocation_may_follow_one_that_was_freed():
    body = ROUND_TRIP + ROUND_TRIP.replace("ld.param.b64 %rd1, [p0];", "bar.sync 0;")
    rows = np.arange(128)
    np.testing.assert_array_equal(round_trip(body), np.stack([rows, rows + 1000], 1))


def test_memory_of_a_freed_allocation_holds_nothing():
    """The second allocation has the columns of the first one, and reads them."""
    again = ROUND_TRIP.replace("ld.param.b64 %rd1, [p0];", "bar.sync 0;")
    again = edited(again, "    tcgen05.st.sync.aligned.32x32b.x2.b32 [ %r11 + 5 ], {%r1, %r6};\n", "")
    with pytest.raises(Fault, match="reads tensor memory that nothing wrote"):
        round_trip(ROUND_TRIP + again)


def test_every_column_is_allocated_once():
    more = "\n".join(
        f"@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+{4 * i}], 64;" for i in range(9)
    )
    with pytest.raises(Fault, match="allocates 64 columns, and 0 are free"):
        round_trip(edited(ROUND_TRIP, "@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 64;", more))
