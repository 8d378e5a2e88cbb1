"""Kernels that reduce, normalise, scan and sort rows: norms and losses, quantisers, Inductor's reductions."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from tests.ptxsim.kernels.cases import ROUNDING, Results, case


@triton.jit
def _softmax(x, out, stride, rows, n, BLOCK: tl.constexpr, num_stages: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=num_stages):
        v = tl.load(x + row * stride + at, at < n, other=-float("inf"))
        e = tl.exp(v - tl.max(v, 0))
        tl.store(out + row * stride + at, e / tl.sum(e, 0), at < n)


@case("softmax of rows in a loop", "Triton tutorial", 4 * ROUNDING)
def softmax() -> Results:
    x = torch.randn(9, 300)
    out = torch.empty_like(x)
    _softmax[(4,)](x, out, 300, 9, 300, BLOCK=512, num_stages=2, num_warps=4)
    return out, x.softmax(-1)


@triton.jit
def _layer_norm(x, w, b, out, mean, rstd, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x + row * n + at, at < n, other=0.0).to(tl.float32)
    average = tl.sum(total, 0) / n
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + row * n + at, at < n, other=0.0).to(tl.float32)
        squares += tl.where(at < n, (v - average) * (v - average), 0.0)
    inverse = 1 / tl.sqrt(tl.sum(squares, 0) / n + eps)
    tl.store(mean + row, average)
    tl.store(rstd + row, inverse)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + row * n + at, at < n, other=0.0).to(tl.float32)
        y = (v - average) * inverse * tl.load(w + at, at < n) + tl.load(b + at, at < n)
        tl.store(out + row * n + at, y, at < n)


def _normalised() -> tuple[torch.Tensor, ...]:
    x, w, b = torch.randn(6, 200), torch.randn(200), torch.randn(200)
    out, mean, rstd = torch.empty_like(x), torch.empty(6), torch.empty(6)
    _layer_norm[(6,)](x, w, b, out, mean, rstd, 200, 1e-5, BLOCK=128)
    return x, w, b, out, mean, rstd


@case("layer norm, forward", "Triton tutorial", 16 * ROUNDING)
def layer_norm() -> Results:
    x, w, b, out, _, _ = _normalised()
    return out, F.layer_norm(x, (200,), w, b)


@triton.jit
def _layer_norm_dx(dx, dy, dw, db, x, w, mean, rstd, lock, n, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    mask = at < n
    v, g = tl.load(x + row * n + at, mask, other=0), tl.load(dy + row * n + at, mask, other=0)
    weight = tl.load(w + at, mask, other=0)
    inverse = tl.load(rstd + row)
    normed = tl.where(mask, (v - tl.load(mean + row)) * inverse, 0.0)
    wg = tl.where(mask, weight * g, 0.0)
    c1, c2 = tl.sum(normed * wg, 0) / n, tl.sum(wg, 0) / n
    tl.store(dx + row * n + at, (wg - (normed * c1 + c2)) * inverse, mask)
    group = row % GROUPS
    dw_at, db_at = dw + group * n + at, db + group * n + at
    count = lock + GROUPS
    while tl.atomic_cas(lock + group, 0, 1) == 1:
        pass
    found = tl.load(count + group)
    partial_dw, partial_db = g * normed, g
    if found == 0:
        tl.atomic_xchg(count + group, 1)
    else:
        partial_dw += tl.load(dw_at, mask, other=0)
        partial_db += tl.load(db_at, mask, other=0)
    tl.store(dw_at, partial_dw, mask)
    tl.store(db_at, partial_db, mask)
    tl.debug_barrier()
    tl.atomic_xchg(lock + group, 0)


@case("layer norm, backward, sums behind a lock", "Triton tutorial", 16 * ROUNDING)
def layer_norm_backward() -> Results:
    x, w, b, _, mean, rstd = _normalised()
    dy, dx = torch.randn(6, 200), torch.empty(6, 200)
    dw, db, lock = torch.empty(2, 200), torch.empty(2, 200), torch.zeros(4, dtype=torch.int32)
    _layer_norm_dx[(6,)](dx, dy, dw, db, x, w, mean, rstd, lock, 200, GROUPS=2, BLOCK=256)
    x, w, b = (each.requires_grad_() for each in (x, w, b))
    F.layer_norm(x, (200,), w, b).backward(dy)
    return torch.cat([dx, dw.sum(0)[None], db.sum(0)[None]]), torch.cat([x.grad, w.grad[None], b.grad[None]])


@triton.jit
def _rms_norm(x, w, out, rstd, n, eps, offset, CAST: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    v = tl.load(x + row * n + at, at < n, other=0)
    wide = v.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / n + eps)
    tl.store(rstd + row, inverse)
    y = wide * inverse
    if CAST:
        y = y.to(v.dtype)
    tl.store(out + row * n + at, y * (offset + tl.load(w + at, at < n, other=0)), at < n)


@case("RMS norm", "Liger", 2.0**-7)
def rms_norm() -> Results:
    x, w, out, rstd = (
        torch.randn(5, 300).bfloat16(),
        torch.randn(300).bfloat16(),
        torch.empty(5, 300).bfloat16(),
        torch.empty(5),
    )
    _rms_norm[(5,)](x, w, out, rstd, 300, 1e-6, 0.0, CAST=True, BLOCK=512, num_warps=4)
    return out, F.rms_norm(x.float(), (300,), eps=1e-6).bfloat16() * w


@triton.jit
def _cross_entropy(x, target, loss, stride, n, ignore, smoothing, BLOCK: tl.constexpr):
    """Online softmax; the gradient replaces the logits."""
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(target + row)
    x += row * stride
    if y == ignore:
        for start in range(0, n, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(x + at, 0.0, at < n)
        tl.store(loss + row, 0.0)
        return
    m, d, total = float("-inf"), 0.0, 0.0
    right = tl.load(x + y).cast(tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + at, at < n, other=float("-inf")).cast(tl.float32)
        total += tl.sum(tl.where(at < n, v, 0.0))
        top = tl.maximum(m, tl.max(v))
        d = d * tl.exp(m - top) + tl.sum(tl.exp(v - top))
        m = top
    lse = m + tl.log(d)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        v = tl.load(x + at, at < n, other=float("-inf")).cast(tl.float32)
        g = tl.exp(v - m) / d - smoothing / n
        tl.store(x + at, tl.where(at == y, g - (1 - smoothing), g), at < n)
    tl.debug_barrier()
    tl.store(loss + row, (lse - right) * (1 - smoothing) + smoothing * (lse - total / n))


@case("cross-entropy with its gradient", "Liger", 8 * ROUNDING)
def cross_entropy() -> Results:
    x, target, loss = torch.randn(6, 300), torch.randint(0, 300, (6,)), torch.empty(6)
    target[2] = -100
    wanted = x.clone().requires_grad_()
    losses = F.cross_entropy(wanted, target, reduction="none", label_smoothing=0.1)
    losses.sum().backward()
    _cross_entropy[(6,)](x, target, loss, 300, 300, -100, 0.1, BLOCK=128, num_warps=2)
    return torch.cat([loss[:, None], x], 1), torch.cat([losses.detach()[:, None], wanted.grad], 1)


@triton.jit
def _group_norm(x, out, rows, n, eps, BLOCK: tl.constexpr):
    group, at = tl.program_id(0), tl.arange(0, BLOCK)
    size = rows * n
    s, sq = 0.0, 0.0
    for start in range(0, size, BLOCK):
        v = tl.load(x + group * size + start + at, start + at < size, other=0.0)
        s += tl.sum(v)
        sq += tl.sum(v * v)
    mean = s / size
    rstd = tl.rsqrt(sq / size - mean * mean + eps)
    for start in range(0, size, BLOCK):
        mask = start + at < size
        v = tl.load(x + group * size + start + at, mask, other=0.0)
        tl.store(out + group * size + start + at, (v - mean) * rstd, mask)


@case("group norm", "Liger", 8 * ROUNDING)
def group_norm() -> Results:
    x, out = torch.randn(2, 6, 20), torch.empty(2, 6, 20)
    _group_norm[(6,)](x, out, 2, 20, 1e-5, BLOCK=32, num_warps=1)
    return out, F.group_norm(x, 3, eps=1e-5)


@triton.jit
def _kl(p, q, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = 0.0
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = tl.load(p + row * n + at, at < n, other=0.0)
        b = tl.load(q + row * n + at, at < n, other=0.0)
        total += tl.sum(b * (tl.log(tl.maximum(b, 1e-10)) - a))
    tl.store(out + row, total)


@case("KL divergence", "Liger", 4 * ROUNDING)
def kl() -> Results:
    p, q, out = torch.randn(4, 150).log_softmax(-1), torch.randn(4, 150).softmax(-1), torch.empty(4)
    _kl[(4,)](p, q, out, 150, BLOCK=64)
    return out, F.kl_div(p, q, reduction="none").sum(-1)


# ---------------------------------------------------------------- quantisers


@triton.jit
def _quantize_rowwise(x, out, scales, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * n + at, at < n, other=0.0)
    largest = tl.max(tl.abs(v), 0)
    tl.store(out + row * n + at, tl.extra.cuda.libdevice.llrint(127.0 * (v / largest)), at < n)
    tl.store(scales + row, largest)


@case("rows to int8", "torchao, bitsandbytes")
def quantize_rowwise() -> Results:
    x, out, scales = torch.randn(5, 100), torch.empty(5, 100, dtype=torch.int8), torch.empty(5)
    _quantize_rowwise[(5,)](x, out, scales, 100, BLOCK=128)
    largest = x.abs().amax(1)
    wanted = (127 * (x / largest[:, None])).round()
    return torch.cat([out.float(), scales[:, None]], 1), torch.cat([wanted, largest[:, None]], 1)


@triton.jit
def _blockwise_fp8(x, out, scales, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at).to(tl.float32)
    scale = tl.max(tl.abs(v)) / 448.0
    tl.store(out + at, (v / scale).to(out.dtype.element_ty))
    tl.store(scales + tl.program_id(0), scale)


@case("blocks to float8_e4m3fn", "torchao, DeepSeek")
def blockwise_fp8() -> Results:
    x, out, scales = torch.randn(4, 256).bfloat16(), torch.empty(4, 256, dtype=torch.float8_e4m3fn), torch.empty(8)
    _blockwise_fp8[(8,)](x, out, scales, BLOCK=128)
    blocks = x.float().view(8, 128)
    exact = (blocks.double() / (blocks.double().abs().amax(1) / 448)[:, None]).view(4, 256)
    # Both divisions of the kernel are off by two units in the last place at most: what such quotients are rounded to.
    ends = [(exact * (1 + sign * 2.0**-21)).float().to(torch.float8_e4m3fn).float() for sign in (-1, 1)]
    return out.float(), out.float().clamp(torch.minimum(*ends), torch.maximum(*ends))


@triton.jit
def _weight_dequant(x, s, out, M, N, BLOCK: tl.constexpr):
    m, n = tl.program_id(0), tl.program_id(1)
    rows, columns = m * BLOCK + tl.arange(0, BLOCK), n * BLOCK + tl.arange(0, BLOCK)
    at = rows[:, None] * N + columns[None, :]
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    scale = tl.load(s + m * tl.cdiv(N, BLOCK) + n)
    tl.store(out + at, tl.load(x + at, mask).to(tl.float32) * scale, mask)


@case("float8_e4m3fn weight in blocks, dequantised", "DeepSeek")
def weight_dequant() -> Results:
    x, s, out = torch.randn(40, 70).to(torch.float8_e4m3fn), torch.rand(2, 3), torch.empty(40, 70)
    _weight_dequant[(2, 3)](x, s, out, 40, 70, BLOCK=32)
    return out, x.float() * s.repeat_interleave(32, 0).repeat_interleave(32, 1)[:40, :70]


@triton.jit
def _mx_cast(x, out, scales, BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    at = tl.program_id(0) * BLOCK * GROUPS + tl.arange(0, BLOCK * GROUPS)
    v = tl.reshape(tl.load(x + at).to(tl.float32), (GROUPS, BLOCK))
    bits = tl.max(tl.abs(v), 1).to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) & 0xFF) - 8
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    tl.store(out + at, tl.reshape(v / scale[:, None], (BLOCK * GROUPS,)).to(tl.float8e4nv))
    tl.store(scales + tl.program_id(0) * GROUPS + tl.arange(0, GROUPS), exponent.to(tl.uint8))


@case("MX blocks with E8M0 scales, rounded down", "torchao")
def mx_cast() -> Results:
    x, out, scales = (
        torch.randn(512).bfloat16(),
        torch.empty(512, dtype=torch.float8_e4m3fn),
        torch.empty(16, dtype=torch.uint8),
    )
    _mx_cast[(2,)](x, out, scales, BLOCK=32, GROUPS=8)
    blocks = x.float().view(16, 32)
    power = blocks.abs().amax(1).log2().floor() - 8
    wanted = (blocks / power.exp2()[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return torch.cat([out.float().view(16, 32), scales.float()[:, None]], 1), torch.cat(
        [wanted.float(), power[:, None] + 127], 1
    )


# ---------------------------------------------------------------- Inductor's reductions


@triton.jit
def _welford_combine(mean_1, m2_1, weight_1, mean_2, m2_2, weight_2):
    delta = mean_2 - mean_1
    weight = weight_1 + weight_2
    ratio = tl.where(weight == 0.0, 0.0, weight_2 / weight)
    return mean_1 + delta * ratio, m2_1 + m2_2 + delta * delta * weight_1 * ratio, weight


@triton.jit
def _welford(in_ptr0, out_ptr0, out_ptr1, xnumel, rnumel, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
    x = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    r = tl.arange(0, RBLOCK)[None, :]
    xmask = x < xnumel
    mean = tl.zeros([XBLOCK, RBLOCK], tl.float32)
    m2 = tl.zeros([XBLOCK, RBLOCK], tl.float32)
    weight = tl.zeros([XBLOCK, RBLOCK], tl.float32)
    for start in range(0, rnumel, RBLOCK):
        mask = (start + r < rnumel) & xmask
        v = tl.load(in_ptr0 + x * rnumel + start + r, mask, other=0.0)
        delta = v - mean
        new_weight = weight + 1
        new_mean = mean + delta / new_weight
        m2 = tl.where(mask, m2 + delta * (v - new_mean), m2)
        mean, weight = tl.where(mask, new_mean, mean), tl.where(mask, new_weight, weight)
    mean, m2, weight = tl.reduce((mean, m2, weight), 1, _welford_combine)
    tl.store(out_ptr0 + x, mean[:, None], xmask)
    tl.store(out_ptr1 + x, (m2 / rnumel)[:, None], xmask)


@case("Welford reduction", "Inductor", 4 * ROUNDING)
def welford() -> Results:
    x, mean, variance = torch.randn(10, 200), torch.empty(10), torch.empty(10)
    _welford[(2,)](x, mean, variance, 10, 200, XBLOCK=8, RBLOCK=64)
    return torch.stack([mean, variance]), torch.stack([x.mean(1), x.var(1, correction=0)])


@triton.jit
def _argmax(in_ptr0, out_ptr0, out_ptr1, xnumel, rnumel, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
    x = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    r = tl.arange(0, RBLOCK)[None, :]
    mask = (r < rnumel) & (x < xnumel)
    v = tl.load(in_ptr0 + x * rnumel + r, mask, other=float("-inf"))
    best, place = tl.max(v, 1, return_indices=True)
    tl.store(out_ptr0 + x, best[:, None], x < xnumel)
    tl.store(out_ptr1 + x, place[:, None].to(tl.int64), x < xnumel)


@case("maximum and its index", "Inductor")
def argmax() -> Results:
    x, best, place = torch.randn(10, 100), torch.empty(10), torch.empty(10, dtype=torch.int64)
    _argmax[(2,)](x, best, place, 10, 100, XBLOCK=8, RBLOCK=128)
    return torch.stack([best, place.float()]), torch.stack([x.amax(1), x.argmax(1).float()])


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _cumsum(in_ptr0, out_ptr0, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    carry = 0.0
    for start in range(0, n, BLOCK):
        v = tl.load(in_ptr0 + tl.program_id(0) * n + start + at, start + at < n, other=0.0)
        found = tl.associative_scan(v, 0, _plus) + carry
        tl.store(out_ptr0 + tl.program_id(0) * n + start + at, found, start + at < n)
        carry += tl.sum(v)


@case("cumulative sum in chunks", "Inductor", 32 * ROUNDING)
def cumsum() -> Results:
    x, out = torch.randn(3, 300), torch.empty(3, 300)
    _cumsum[(3,)](x, out, 300, BLOCK=128)
    return out, x.cumsum(1)


@triton.jit
def _sort(in_ptr0, out_ptr0, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(in_ptr0 + tl.program_id(0) * n + at, at < n, other=float("inf"))
    tl.store(out_ptr0 + tl.program_id(0) * n + at, tl.sort(v), at < n)


@case("sort of rows", "Inductor")
def sort() -> Results:
    x, out = torch.randn(3, 100), torch.empty(3, 100)
    _sort[(3,)](x, out, 100, BLOCK=128)
    return out, x.sort(1).values


@triton.jit
def _any_all(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(x + tl.program_id(0) * n + at, at < n, other=0)
    some = tl.max((v > 1).to(tl.int32), 0)
    odd = tl.reduce_or(v & 1, 0)
    parity = tl.xor_sum(v, 0)
    tl.store(out + tl.program_id(0) * 3 + 0, some)
    tl.store(out + tl.program_id(0) * 3 + 1, odd)
    tl.store(out + tl.program_id(0) * 3 + 2, parity)


@case("any, or and xor of rows", "Inductor")
def any_all() -> Results:
    x, out = torch.randint(0, 3, (4, 60), dtype=torch.int32), torch.empty(4, 3, dtype=torch.int32)
    _any_all[(4,)](x, out, 60, BLOCK=64)
    parity = x.numpy().copy()
    import numpy as np

    wanted = np.stack([(parity > 1).any(1), (parity & 1).any(1), np.bitwise_xor.reduce(parity, 1)], 1)
    return out, torch.from_numpy(wanted.astype(np.int32))
