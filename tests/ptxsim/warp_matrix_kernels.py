"""Texts of kernels that load, store and multiply matrices of a warp or a warpgroup, and their operands."""

import numpy as np

LANES = [(lane // 4, lane % 4) for lane in range(32)]  # g and t of the PTX ISA


def names(prefix: str, first: int, count: int) -> str:
    return ", ".join(f"%{prefix}{first + i}" for i in range(count))


MATRICES = """
    ld.param.b64 %rd1, [p0];
    ld.param.b64 %rd2, [p1];
    mov.u32 %r1, %tid.x;
    mov.b32 %r2, global_smem;
    shl.b32 %r3, %r1, 4;
    cvt.u64.u32 %rd3, %r3;
    add.u64 %rd4, %rd1, %rd3;
    add.u64 %rd5, %rd2, %rd3;
    add.u32 %r4, %r2, %r3;
    xor.b32 %r5, %r3, 80;
    add.u32 %r6, %r2, %r5;
    setp.lt.u32 %p1, %r1, 40;
    ld.global.v4.b32 {%r20, %r21, %r22, %r23}, [%rd4];
"""


def load_matrices(count: int, trans: str) -> str:
    return MATRICES + f"""
    st.shared.v4.b32 [%r4], {{%r20, %r21, %r22, %r23}};
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{names("r", 20, count)}}}, [%r6];
    st.global.v4.b32 [%rd5], {{%r20, %r21, %r22, %r23}};
"""  # fmt: skip


def store_matrices(count: int, trans: str) -> str:
    return MATRICES + f"""
    st.shared.v4.b32 [%r4], {{%r20, %r21, %r22, %r23}};
    bar.sync 0;
    stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r6], {{{names("r", 20, count)}}};
    bar.sync 1;
    ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r4];
    st.global.v4.b32 [%rd5], {{%r20, %r21, %r22, %r23}};
"""  # fmt: skip


def bits_of(values: np.ndarray, kind: str) -> np.ndarray:
    """The bits, uint16, of values that bf16 and f16 hold exactly."""
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def registers_of_a(a: np.ndarray, kind: str) -> np.ndarray:
    """The registers [32, 4] of a warp that hold A [16, 16]."""
    found = np.zeros((32, 4, 2), np.uint16)
    for lane, (g, t) in enumerate(LANES):
        for register in range(4):
            for half in (0, 1):
                element = a[g + 8 * (register % 2), 2 * t + half + 8 * (register // 2)]
                found[lane, register, half] = bits_of(element, kind)
    return found.view(np.uint32).reshape(32, 4)


def registers_of_sums(sums: np.ndarray) -> np.ndarray:
    """The registers [32, n / 2] of a warp that hold sums [16, n]."""
    found = np.zeros((32, sums.shape[1] // 2), np.float32)
    for lane, (g, t) in enumerate(LANES):
        for register in range(found.shape[1]):
            found[lane, register] = sums[g + 8 * (register // 2 % 2), 8 * (register // 4) + 2 * t + register % 2]
    return found


GROUPS = 2


TILE = 8192  # bytes of a matrix in shared memory


def tile(values: np.ndarray, kind: str, span: int) -> np.ndarray:
    """The bytes in shared memory of a matrix [rows, K], K contiguous; span: of the swizzle in bytes, 0 for none."""
    rows = bits_of(values, kind).view(np.uint8).reshape(len(values), -1, 16)
    found = np.zeros((TILE // 16, 16), np.uint8)
    for row in range(len(rows)):
        for chunk in range(rows.shape[1]):
            if not span:
                at = row // 8 * 8 + row % 8 + chunk * len(rows)
            else:
                at = row * (span // 16) + chunk
                at = at // 8 * 8 + (at % 8 ^ at // 8 % (span // 16))
            found[at] = rows[row, chunk]
    return found.ravel()


def descriptor(register: str, start: int, rows: int, span: int, base_offset: int = 0) -> str:
    stride, leading = (8 * span, 16) if span else (128, 16 * rows)
    swizzle = {0: 0, 128: 1, 64: 2, 32: 3}[span]
    bits = start + 1024 >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | base_offset << 49 | swizzle << 62
    return f"    mov.b64 {register}, {bits};\n"


FENCE = "    fence.proxy.async.shared::cta;\n"


def wgmma(n: int, kind: str, span: int, in_registers: bool = True) -> str:
    """A kernel that adds products to sums, one for each step of K. The first tile of shared memory is B, the second A.

    in_registers: whether A is read from registers.
    """
    steps = (span or 32) // 32
    copies = "".join(f"""
    ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd4+{at}];
    st.shared.v4.b32 [%r4+{at}], {{%r10, %r11, %r12, %r13}};"""
                     for at in range(0, 2 * TILE, 16 * 128 * GROUPS))  # fmt: skip
    sums = names("r", 200, n // 2)
    operands = "".join(
        f"    ld.global.v4.b32 {{{names('r', 20 + 4 * i, 4)}}}, [%rd5+{16 * i}];\n" for i in range(steps)
    )
    operands += "".join(f"    ld.global.b32 %r{200 + i}, [%rd6+{4 * i}];\n" for i in range(n // 2))
    products = ""
    for step in range(steps):
        a = f"{{{names('r', 20 + 4 * step, 4)}}}" if in_registers else "%rd11"
        products += descriptor("%rd10", 32 * step, n, span) + descriptor("%rd11", TILE + 32 * step, 64, span)
        products += f"    wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{sums}}}, {a}, %rd10, %p1, 1, 1, "
        products += "0;\n" if in_registers else "0, 0;\n"
    return f"""
    ld.param.b64 %rd1, [p0];
    ld.param.b64 %rd2, [p1];
    ld.param.b64 %rd3, [p2];
    mov.u32 %r1, %tid.x;
    mov.b32 %r2, global_smem;
    shl.b32 %r3, %r1, 4;
    cvt.u64.u32 %rd7, %r3;
    add.u64 %rd4, %rd1, %rd7;
    add.u32 %r4, %r2, %r3;
    mul.wide.u32 %rd7, %r1, {16 * steps};
    add.u64 %rd5, %rd2, %rd7;
    mul.wide.u32 %rd7, %r1, {2 * n};
    add.u64 %rd6, %rd3, %rd7;
    mov.pred %p1, -1;
    setp.lt.u32 %p2, %r1, 16;
{copies}
{FENCE}    bar.sync 0;
{operands}    wgmma.fence.sync.aligned;
{products}    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
""" + "".join(f"    st.global.b32 [%rd6+{4 * i}], %r{200 + i};\n" for i in range(n // 2))  # fmt: skip


def wgmma_case(n: int, kind: str, span: int) -> tuple[list[np.ndarray], np.ndarray]:
    """(contents of shared memory, registers of A, registers of the addends; the registers of the sums)."""
    generator = np.random.default_rng(4)
    k = (span or 32) // 2
    a, b, c = (generator.integers(-8, 9, shape).astype(np.float64) for shape in ((64, k), (n, k), (GROUPS, 64, n)))
    of_a = [np.hstack([registers_of_a(a[row : row + 16, at : at + 16], kind) for at in range(0, k, 16)])
            for row in range(0, 64, 16)]  # fmt: skip
    of_sums = [np.vstack([registers_of_sums(each[row : row + 16]) for each in sums for row in range(0, 64, 16)])
               for sums in (c, c + a @ b.T)]  # fmt: skip
    contents = np.concatenate([tile(b, kind, span), tile(a, kind, span)])
    return [contents, np.vstack(of_a * GROUPS), of_sums[0]], of_sums[1]
