"""Kernels that reduce, normalise, scan and sort rows: norms and losses, quantisers, Inductor's reductions."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from tests.ptxsim.kernels.cases import ROUNDING, Results, case


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


@case("cross-entropy with its gradient", "Liger", 4 * ROUNDING)
def cross_entropy() -> Results:
    x, target, loss = torch.randn(6, 300), torch.randint(0, 300, (6,)), torch.empty(6)
    target[2] = -100
    wanted = x.clone().requires_grad_()
    losses = F.cross_entropy(wanted, target, reduction="none", label_smoothing=0.1)
    losses.sum().backward()
    _cross_entropy[(6,)](x, target, loss, 300, 300, -100, 0.1, BLOCK=128, num_warps=2)
    return torch.cat([loss[:, None], x], 1), torch.cat([losses.detach()[:, None], wanted.grad], 1)


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
