"""Kernels that read and write by indices: caches in pages, sampling, embeddings, routing, atomic sums."""

import torch
import triton
import triton.language as tl

from tests.ptxsim.kernels.cases import ROUNDING, Results, case, small_integers


@triton.jit
def _paged_decode(q, cache, table, lengths, out, scale, PAGES: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr):
    """Attention of one query over keys in pages, which are their own values."""
    sequence, d, row = tl.program_id(0), tl.arange(0, D), tl.arange(0, PAGE)
    query = tl.load(q + sequence * D + d)
    length = tl.load(lengths + sequence)
    top, total, acc = float("-inf"), 0.0, tl.zeros([D], tl.float32)
    for i in range(tl.cdiv(length, PAGE)):
        page = tl.load(table + sequence * PAGES + i).to(tl.int64)
        k = tl.load(cache + (page * PAGE + row[:, None]) * D + d[None, :])
        s = tl.sum(query[None, :] * k, 1) * scale
        s = tl.where(i * PAGE + row < length, s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 0))
        p = tl.exp(s - new)
        acc = acc * tl.exp(top - new) + tl.sum(p[:, None] * k, 0)
        total = total * tl.exp(top - new) + tl.sum(p, 0)
        top = new
    tl.store(out + sequence * D + d, acc / total)


@case("decoding over a paged cache", "flashinfer, vLLM", 8 * ROUNDING)
def paged_decode() -> Results:
    q, cache, out = torch.randn(2, 32), torch.randn(6, 8, 32), torch.empty(2, 32)
    table, lengths = torch.tensor([[3, 0, 5], [1, 4, 2]], dtype=torch.int32), torch.tensor([19, 10], dtype=torch.int32)
    _paged_decode[(2,)](q, cache, table, lengths, out, 0.2, PAGES=3, PAGE=8, D=32, num_warps=2)
    wanted = []
    for i, length in enumerate((19, 10)):
        k = cache[table[i].long()].view(-1, 32)[:length]
        wanted.append((k @ q[i] * 0.2).softmax(0) @ k)
    return out, torch.stack(wanted)


@triton.jit
def _sample(probabilities, uniform, out, n, BLOCK: tl.constexpr):
    """The first index at which the running sum passes a uniform number."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    u = tl.load(uniform + row)
    carry, found = 0.0, n - 1
    for start in range(0, n, BLOCK):
        p = tl.load(probabilities + row * n + start + at, start + at < n, other=0.0)
        passed = (tl.cumsum(p, 0) + carry > u) & (start + at < n)
        found = tl.minimum(found, tl.min(tl.where(passed, start + at, n - 1), 0))
        carry += tl.sum(p, 0)
    tl.store(out + row, found)


@case("sampling from probabilities", "flashinfer")
def sample() -> Results:
    p, u, out = torch.rand(4, 200).softmax(-1), torch.tensor([0.01, 0.3, 0.6, 0.99]), torch.empty(4, dtype=torch.int32)
    _sample[(4,)](p, u, out, 200, BLOCK=64, num_warps=2)
    return out, (p.double().cumsum(1) > u[:, None]).int().argmax(1).int()


@triton.jit
def _embedding_backward(ids, grad, out, n, WIDTH: tl.constexpr):
    row, at = tl.load(ids + tl.program_id(0)), tl.arange(0, WIDTH)
    tl.atomic_add(out + row * n + at, tl.load(grad + tl.program_id(0) * n + at, at < n), at < n)


@case("embedding's gradient by atomic sums", "Liger, Inductor")
def embedding_backward() -> Results:
    ids, grad, out = torch.randint(0, 4, (12,)), small_integers(12, 40, dtype=torch.float32), torch.zeros(4, 40)
    _embedding_backward[(12,)](ids, grad, out, 40, WIDTH=64)
    return out, torch.zeros(4, 40).index_add_(0, ids, grad)


@triton.jit
def _scatter_add(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK: tl.constexpr):
    """Inductor's index_put with accumulation: negative indices wrap, others are asserted."""
    x = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    mask = x < xnumel
    tmp0 = tl.load(in_ptr0 + x, mask, other=0)
    index = tl.where(tmp0 < 0, tmp0 + 16, tmp0)
    tl.device_assert(((index >= 0) & (index < 16)) | ~mask, "index out of bounds: 0 <= tmp3 < 16")
    tl.atomic_add(out_ptr0 + index, tl.load(in_ptr1 + x, mask), mask, sem="relaxed")


@case("scatter with atomic sums of fp16", "Inductor")
def scatter_add() -> Results:
    index, values, out = torch.randint(-16, 16, (100,)), torch.randint(-3, 4, (100,)).half(), torch.zeros(16).half()
    _scatter_add[(1,)](index, values, out, 100, XBLOCK=128)
    return out, torch.zeros(16).index_add_(0, index % 16, values.float()).half()


@triton.jit
def _extremes(x, top, bottom, flags, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n, other=0.0)
    tl.atomic_max(top, tl.max(v, 0))
    tl.atomic_min(bottom, tl.min(v, 0))
    tl.atomic_or(flags, 1 << tl.program_id(0))


@case("maximum, minimum and flags of all programs by atomics", "torchao")
def extremes() -> Results:
    x, top, bottom = torch.randn(300), torch.tensor([-1e9]), torch.tensor([1e9])
    flags = torch.zeros(1, dtype=torch.int32)
    _extremes[(3,)](x, top, bottom, flags, 300, BLOCK=128)
    return torch.cat([top, bottom, flags.float()]), torch.stack([x.max(), x.min().clamp(max=0), torch.tensor(7.0)])


@triton.jit
def _histogram(x, out, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    counts = tl.histogram(tl.load(x + at, at < n, other=0), BINS, mask=at < n)
    tl.atomic_add(out + tl.arange(0, BINS), counts)


@case("histogram of the experts of tokens", "vLLM, triton_kernels")
def histogram() -> Results:
    x, out = torch.randint(0, 16, (300,), dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    _histogram[(3,)](x, out, 300, BINS=16, BLOCK=128)
    return out, torch.bincount(x, minlength=16).int()


@triton.jit
def _top_k(logits, weights, indices, n, K: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(logits + row * n + at, at < n, other=float("-inf"))
    total = 0.0
    for k in tl.static_range(K):
        best, place = tl.max(v, 0), tl.argmax(v, 0)
        e = tl.exp(best)
        total += e
        tl.store(weights + row * K + k, e)
        tl.store(indices + row * K + k, place)
        v = tl.where(at == place, float("-inf"), v)
    tl.debug_barrier()
    for k in tl.static_range(K):
        tl.store(weights + row * K + k, tl.load(weights + row * K + k) / total)


@case("routing of tokens to their two best experts", "vLLM, triton_kernels", 2 * ROUNDING)
def top_k() -> Results:
    x, weights, indices = torch.randn(5, 16), torch.empty(5, 2), torch.empty(5, 2, dtype=torch.int32)
    _top_k[(5,)](x, weights, indices, 16, K=2, BLOCK=16, num_warps=1)
    values, places = x.topk(2)
    return torch.cat([weights, indices.float()], 1), torch.cat([values.softmax(-1), places.float()], 1)


@triton.jit
def _split_sum(x, out, semaphore, partial, n, BLOCK: tl.constexpr):
    """The last program sums what all have stored: a cooperative reduction."""
    me, at = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(partial + me, tl.sum(tl.load(x + me * BLOCK + at, me * BLOCK + at < n, other=0.0), 0))
    tl.debug_barrier()
    if tl.atomic_add(semaphore, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        each = tl.load(partial + tl.arange(0, 4), volatile=True)
        tl.store(out, tl.sum(each, 0))


@case("sum by the last program, behind a semaphore", "Inductor, flashinfer")
def split_sum() -> Results:
    x, out, semaphore, partial = (
        small_integers(500, dtype=torch.float32),
        torch.empty(1),
        torch.zeros(1, dtype=torch.int32),
        torch.empty(4),
    )
    _split_sum[(4,)](x, out, semaphore, partial, 500, BLOCK=128)
    return out, x.sum()[None]
