"""Kernels written by hand that multiply on the tensor cores, with their operands and the sums they must give."""

import numpy as np
import pytest
import torch

from fp4compile.check.products import exact_operand
from fp4compile.formats import formats, reference
from fp4compile.formats.layouts import to_swizzled
from fp4compile.formats.operand import Operand
from ptxsim.descriptors import F16
from ptxsim.fault import Fault
from ptxsim.run import Schedule
from tests.ptxsim.ptx_text import run_body

SCHEDULES = [Schedule(seed, strict_loads=True) for seed in range(2)]


def matrix_bits(start: int, layout: int, stride: int, leading: int = 0, base_offset: int = 0) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | base_offset << 49 | layout << 61


def instruction(
    kind, a: int, b: int, columns: int, *, scale: int = 1, a_byte: int = 0, b_byte: int = 0, programs: int = 1
) -> int:
    """The instruction descriptor of a product with 128 rows for each program."""
    bits = a << 7 | b << 10 | columns >> 3 << 17 | 8 * programs << 24
    return bits | 1 << 4 if kind is F16 else bits | b_byte << 4 | scale << 23 | a_byte << 29


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


def operand(element: str, scale: str, rows: int, bytes_of_k: int, block: int, seed: int) -> tuple[Operand, np.ndarray]:
    """An operand with small elements and scales of 1/2, 1 and 2, and its bytes [rows, 128] in shared memory."""
    fmt = formats.get({"e2m1": {"e4m3": "nvfp4_one_level", "e8m0": "mxfp4"}[scale], "e4m3": "mxfp8",
                       "e5m2": "mxfp8_e5m2"}[element])  # fmt: skip
    assert fmt.block_cols == block
    blocks = bytes_of_k * (2 if fmt.packed else 1) // block
    shapes = ((bytes_of_k, fmt.data_dtype), (blocks, fmt.scale_dtype))
    data, scales = (torch.empty(rows, columns, dtype=dtype, device="meta") for columns, dtype in shapes)
    made = exact_operand(Operand(data, scales, None, fmt), seed)
    return made, made.data.view(torch.uint8).numpy()


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
    mixed = kind.startswith("mxf8f6f4")
    bytes_of_k = [64 if mixed and element == "e2m1" else 128 for element in (a, b)]
    left, a_data = operand(a, scale, programs * ROWS, bytes_of_k[0], block, 0)
    right, b_data = operand(b, scale, columns, bytes_of_k[1], block, 1)
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


def run_product(
    body: str, content: np.ndarray, columns: int, schedule: Schedule = SCHEDULES[0], programs: int = 1
) -> np.ndarray:
    sums = np.zeros((programs * ROWS, columns), np.float32)
    return run_body(body, [content, sums], threads=THREADS, shared_bytes=IMAGE + content.size // programs,
                    grid=programs, cluster=programs, schedule=schedule)[1]  # fmt: skip


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


def found(body: str, content: np.ndarray, what: str, programs: int = 1) -> None:
    """That a broken kernel is a fault under every schedule."""
    for schedule in SCHEDULES:
        with pytest.raises(Fault, match=what):
            run_product(body, content, 64, schedule, programs)
