"""Kernels that multiply matrices: tutorials' matmuls in all types, attention, groups, and block-scaled ones."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.ptxsim.kernels.cases import Results, case, small_integers


@triton.autotune(
    [triton.Config({"BM": 64, "BN": 32, "BK": 32, "GROUP": 2}, num_warps=4, num_stages=2),
     triton.Config({"BM": 128, "BN": 64, "BK": 64, "GROUP": 8}, num_warps=8, num_stages=3)],
    key=["M", "N", "K"],
)  # fmt: skip
@triton.jit
def _matmul(
    a, b, c, M, N, K, am, ak, bk, bn, cm, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    LEAKY: tl.constexpr, ACCUMULATOR: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = pid // (GROUP * columns)
    height = min(rows - group * GROUP, GROUP)
    pm = group * GROUP + (pid % (GROUP * columns)) % height
    pn = (pid % (GROUP * columns)) // height
    tl.assume(am > 0)
    m, n, k = (pm * BM + tl.arange(0, BM)) % M, (pn * BN + tl.arange(0, BN)) % N, tl.arange(0, BK)
    a += m[:, None] * am + k[None, :] * ak
    b += k[:, None] * bk + n[None, :] * bn
    acc = tl.zeros((BM, BN), ACCUMULATOR)
    for step in range(0, tl.cdiv(K, BK)):
        left = tl.load(a, k[None, :] < K - step * BK, other=0.0)
        right = tl.load(b, k[:, None] < K - step * BK, other=0.0)
        acc = tl.dot(left, right, acc, out_dtype=ACCUMULATOR)
        a += BK * ak
        b += BK * bk
    if LEAKY:
        acc = tl.where(acc >= 0, acc, 0.01 * acc)
    m, n = pm * BM + tl.arange(0, BM), pn * BN + tl.arange(0, BN)
    tl.store(c + m[:, None] * cm + n[None, :], acc.to(c.dtype.element_ty), (m[:, None] < M) & (n[None, :] < N))


def _multiplied(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, leaky: bool = False) -> torch.Tensor:
    (rows, inner), columns = a.shape, b.shape[1]
    c = torch.empty(rows, columns, dtype=dtype)
    kind = tl.int32 if dtype == torch.int32 else tl.float32
    _matmul[lambda meta: (triton.cdiv(rows, meta["BM"]) * triton.cdiv(columns, meta["BN"]),)](
        a, b, c, rows, columns, inner, *a.stride(), *b.stride(), columns, LEAKY=leaky, ACCUMULATOR=kind)  # fmt: skip
    return c


@case("matmul of fp16 with leaky ReLU, in groups", "Triton tutorial")
def matmul() -> Results:
    a, b = small_integers(100, 80), small_integers(80, 60)
    c = a.float() @ b.float()
    return _multiplied(a, b, torch.float16, True), torch.where(c >= 0, c, 0.01 * c).half()


@case("matmul of float8_e5m2", "Triton tutorial")
def matmul_float8() -> Results:
    a, b = (small_integers(64, 64).to(torch.float8_e5m2) for _ in "ab")
    return _multiplied(a, b.T.contiguous().T, torch.float32), a.float() @ b.float()


@case("matmul of float32 as tf32", "Triton tutorial, Inductor")
def matmul_tf32() -> Results:
    a, b = (small_integers(64, 64, dtype=torch.float32) for _ in "ab")
    return _multiplied(a, b, torch.float32), a @ b


@case("matmul of int8", "torchao")
def matmul_int8() -> Results:
    a, b = (torch.randint(-128, 128, (64, 64)).to(torch.int8) for _ in "ab")
    return _multiplied(a, b.T.contiguous().T, torch.int32), (a.int() @ b.int())


@triton.jit
def _persistent(
    a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PROGRAMS: tl.constexpr
):  # fmt: skip
    columns = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * columns, PROGRAMS, warp_specialize=True):
        m, n = tile // columns * BM, tile % columns * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            acc = tl.dot(a.load([m, k]), b.load([n, k]).T, acc)
        c.store([m, n], acc.to(c.dtype))


@case("persistent matmul with specialised warps", "Triton tutorial")
def specialized() -> Results:
    """By TMA descriptors of the host."""
    a, b, c = small_integers(200, 128), small_integers(128, 128), torch.empty(200, 128).half()
    descriptors = [
        TensorDescriptor.from_tensor(each, block) for each, block in ((a, [128, 64]), (b, [64, 64]), (c, [128, 64]))
    ]
    _persistent[(2,)](*descriptors, 200, 128, 128, BM=128, BN=64, BK=64, PROGRAMS=2, num_warps=4, num_stages=2)
    return c, (a.float() @ b.float().T).half()


@triton.jit
def _device_descriptors(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    left = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    right = tl.make_tensor_descriptor(b, [K, N], [N, 1], [BK, BN])
    result = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        acc = tl.dot(left.load([m, k]), right.load([k, n]), acc)
    result.store([m, n], acc.to(tl.bfloat16))


@case("matmul by TMA descriptors of the kernel, B of N as it lies", "Triton tutorial")
def device_descriptors() -> Results:
    a, b = small_integers(128, 64, dtype=torch.bfloat16), small_integers(64, 64, dtype=torch.bfloat16)
    c = torch.empty(128, 64).bfloat16()
    _device_descriptors[(1, 1)](a, b, c, 128, 64, 64, BM=128, BN=64, BK=64)
    return c, (a.float() @ b.float()).bfloat16()


@triton.jit
def _scaled(a, a_scale, b, b_scale, c, K, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
            A: tl.constexpr, B: tl.constexpr, PACKED: tl.constexpr, VEC: tl.constexpr):  # fmt: skip
    m, n = tl.arange(0, BM), tl.arange(0, BN)
    k, s = tl.arange(0, BK // PACKED), tl.arange(0, BK // VEC)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        left = tl.load(a + m[:, None] * (K // PACKED) + start // PACKED + k[None, :])
        right = tl.load(b + n[:, None] * (K // PACKED) + start // PACKED + k[None, :]).T
        ls = tl.load(a_scale + m[:, None] * (K // VEC) + start // VEC + s[None, :])
        rs = tl.load(b_scale + n[:, None] * (K // VEC) + start // VEC + s[None, :])
        acc = tl.dot_scaled(left, ls, A, right, rs, B, acc)
    tl.store(c + m[:, None] * N + n[None, :], acc)


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    return _E2M1[torch.stack([packed & 15, packed >> 4], -1).long()].flatten(-2)


@case("block-scaled matmul of MXFP8", "Triton tutorial")
def scaled_mxfp8() -> Results:
    a, b = small_integers(128, 256).to(torch.float8_e4m3fn), small_integers(64, 256).to(torch.float8_e4m3fn)
    sa, sb = torch.randint(126, 129, (128, 8), dtype=torch.uint8), torch.randint(126, 129, (64, 8), dtype=torch.uint8)
    c = torch.empty(128, 64)
    _scaled[(1,)](a, sa, b, sb, c, 256, N=64, BM=128, BN=64, BK=128, A="e4m3", B="e4m3", PACKED=1, VEC=32)
    left, right = (x.float() * (s.float() - 127).exp2().repeat_interleave(32, 1) for x, s in ((a, sa), (b, sb)))
    return c, left @ right.T


@case("block-scaled matmul of NVFP4", "Triton tutorial")
def scaled_nvfp4() -> Results:
    a, b = (torch.randint(0, 256, (rows, 128), dtype=torch.uint8) for rows in (128, 64))
    sa, sb = (torch.randint(1, 4, (rows, 16)).to(torch.float8_e4m3fn) for rows in (128, 64))
    c = torch.empty(128, 64)
    _scaled[(1,)](a, sa, b, sb, c, 256, N=64, BM=128, BN=64, BK=128, A="e2m1", B="e2m1", PACKED=2, VEC=16)
    left, right = (_nibbles(x) * s.float().repeat_interleave(16, 1) for x, s in ((a, sa), (b, sb)))
    return c, left @ right.T


@triton.jit
def _attention(
    q, k, v, out, lse, heads, T, scale, CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr
):
    base = tl.program_id(1).to(tl.int64) * T * D
    m, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    query = tl.load(q + base + m[:, None] * D + d[None, :], m[:, None] < T, other=0.0)
    top, total = tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    end = min((tl.program_id(0) + 1) * BM, T) if CAUSAL else T
    for start in range(0, end, BN):
        n = start + tl.arange(0, BN)
        key = tl.load(k + base + n[None, :] * D + d[:, None], n[None, :] < T, other=0.0)
        s = tl.dot(query, key) * scale
        mask = n[None, :] < T
        if CAUSAL:
            mask = mask & (m[:, None] >= n[None, :])
        s = tl.where(mask, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.math.exp2(s - new[:, None])
        alpha = tl.math.exp2(top - new)
        total = total * alpha + tl.sum(p, 1)
        value = tl.load(v + base + n[:, None] * D + d[None, :], n[:, None] < T, other=0.0)
        acc = tl.dot(p.to(value.dtype), value, acc * alpha[:, None])
        top = new
    tl.store(out + base + m[:, None] * D + d[None, :], acc / total[:, None], m[:, None] < T)
    tl.store(lse + tl.program_id(1) * T + m, top + tl.math.log2(total), m < T)


def _attended(causal: bool, rows: int, warps: int) -> Results:
    q, k, v = torch.randn(3, 2, 100, 32).half()
    out, lse = torch.empty(2, 100, 32).half(), torch.empty(2, 100)
    _attention[(triton.cdiv(100, rows), 2)](q, k, v, out, lse, 2, 100, 32**-0.5 * 1.44269504, CAUSAL=causal, BM=rows,
                                            BN=32, D=32, num_warps=warps)  # fmt: skip
    s = q.float() @ k.float().mT * 32**-0.5
    if causal:
        s = s.masked_fill(torch.ones(100, 100).triu(1).bool(), -torch.inf)
    return out, (s.softmax(-1) @ v.float()).half()


@case("attention, 128 queries a program", "Triton tutorial", 2.0**-10)
def attention() -> Results:
    return _attended(False, 128, 4)


@case("causal attention, 64 queries a program", "Triton tutorial", 2.0**-10)
def causal_attention() -> Results:
    return _attended(True, 64, 4)


@triton.jit
def _grouped(a, b, c, starts, E, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Each group's rows times the group's own matrix; programs walk over the tiles of all groups."""
    tile, n = tl.program_id(0), tl.arange(0, BN)
    last = 0
    for e in range(E):
        first, end = tl.load(starts + e), tl.load(starts + e + 1)
        tiles = tl.cdiv(end - first, BM)
        while tile >= last and tile < last + tiles:
            m, k = first + (tile - last) * BM + tl.arange(0, BM), tl.arange(0, BK)
            acc = tl.zeros((BM, BN), tl.float32)
            for start in range(0, K, BK):
                left = tl.load(a + m[:, None] * K + start + k[None, :], m[:, None] < end, other=0.0)
                right = tl.load(b + e * K * N + (start + k[:, None]) * N + n[None, :])
                acc = tl.dot(left, right, acc)
            tl.store(c + m[:, None] * N + n[None, :], acc, m[:, None] < end)
            tile += tl.num_programs(0)
        last += tiles


@case("grouped matmul of ragged rows", "Triton tutorial, torchao")
def grouped() -> Results:
    a, b, c = small_integers(150, 64), small_integers(3, 64, 64), torch.empty(150, 64)
    starts = torch.tensor([0, 70, 70, 150], dtype=torch.int32)
    _grouped[(2,)](a, b, c, starts, 3, 64, 64, BM=64, BN=64, BK=32)
    return c, torch.cat([a[:70].float() @ b[0].float(), a[70:].float() @ b[2].float()])


@triton.jit
def _split_k(a, b, c, K, N: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr):
    m, n, k = tl.arange(0, BM), tl.arange(0, N), tl.program_id(0) * BK + tl.arange(0, BK)
    acc = tl.zeros((BM, N), tl.float32)
    for start in range(0, K, BK * SPLIT):
        left = tl.load(a + m[:, None] * K + start + k[None, :])
        acc = tl.dot(left, tl.load(b + (start + k[:, None]) * N + n[None, :]), acc)
    tl.atomic_add(c + m[:, None] * N + n[None, :], acc, sem="relaxed")


@case("split-K matmul with atomic sums", "torchao, Inductor")
def split_k() -> Results:
    a, b, c = small_integers(32, 128), small_integers(128, 32), torch.zeros(32, 32)
    _split_k[(2,)](a, b, c, 128, N=32, BM=32, BK=32, SPLIT=2)
    return c, a.float() @ b.float()


@triton.jit
def _gathered(x, rows, out, N: tl.constexpr, COUNT: tl.constexpr):
    descriptor = tl.make_tensor_descriptor(x, [32, N], [N, 1], [1, N])
    found = descriptor.gather(tl.load(rows + tl.arange(0, COUNT)), 0)
    tl.store(out + tl.arange(0, COUNT)[:, None] * N + tl.arange(0, N)[None, :], found)


@case("rows gathered by TMA", "triton_kernels")
def gathered() -> Results:
    x, rows, out = (
        torch.randn(32, 64).half(),
        torch.randint(0, 32, (16,), dtype=torch.int32),
        torch.empty(16, 64).half(),
    )
    _gathered[(1,)](x, rows, out, N=64, COUNT=16)
    return out, x[rows.long()]


@triton.jit
def _weight_only(x, w, scales, out, K, N: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """int4 weights in pairs along N, with a scale for each group of K."""
    m, n, k = tl.arange(0, BM), tl.arange(0, N), tl.arange(0, BK)
    half = tl.arange(0, N // 2)
    acc = tl.zeros((BM, N), tl.float32)
    for start in range(0, K, BK):
        packed = tl.load(w + (start + k[:, None]) * (N // 2) + half[None, :])
        low, high = (packed & 15).to(tl.int8) - 8, (packed >> 4).to(tl.int8) - 8
        codes = tl.join(low, high).reshape(BK, N)
        s = tl.load(scales + (start + k[:, None]) // GROUP * N + n[None, :])
        left = tl.load(x + m[:, None] * K + start + k[None, :])
        acc = tl.dot(left, (codes.to(tl.float16) * s), acc)
    tl.store(out + m[:, None] * N + n[None, :], acc)


@case("matmul with int4 weights in groups", "torchao, GPTQ")
def weight_only() -> Results:
    x, w = small_integers(16, 64), torch.randint(0, 256, (64, 16), dtype=torch.uint8)
    scales, out = torch.randint(1, 3, (2, 32)).half(), torch.empty(16, 32)
    _weight_only[(1,)](x, w, scales, out, 64, N=32, BM=16, BK=32, GROUP=32)
    codes = torch.stack([w & 15, w >> 4], -1).flatten(-2).float() - 8
    return out, x.float() @ (codes * scales.float().repeat_interleave(32, 0))
