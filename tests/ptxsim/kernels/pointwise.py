"""Kernels that compute each element by itself: tutorials, activations, dropout, and what Inductor generates."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra import libdevice

from tests.ptxsim.kernels.cases import ROUNDING, Results, case


@triton.jit
def _dropout(x, out, n, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.rand(seed, at) > p
    tl.store(out + at, tl.where(kept, tl.load(x + at, at < n) / (1 - p), 0.0), at < n)


@case("dropout by a seed", "Triton tutorial")
def dropout() -> Results:
    x, out = torch.ones(2048), torch.empty(2048)
    _dropout[(4,)](x, out, 2048, 0.5, 123, BLOCK=512)
    share = (out != 0).float().mean()
    return torch.stack([out.max(), (share - 0.5).abs().lt(0.05).float()]), torch.tensor([2.0, 1.0])


@triton.jit
def _swiglu(gate, up, out, stride, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    a = tl.load(gate + row * stride + at, at < n, other=0).to(tl.float32)
    b = tl.load(up + row * stride + at, at < n, other=0)
    tl.store(out + row * stride + at, (a * tl.sigmoid(a)).cast(b.dtype) * b, at < n)


@case("SwiGLU forward", "Liger", 2.0**-7, below=0)
def swiglu() -> Results:
    gate, up = torch.randn(2, 5, 200).bfloat16()
    out = torch.empty_like(gate)
    _swiglu[(5,)](gate, up, out, 200, 200, BLOCK=256, num_warps=4)
    return out, F.silu(gate.float()).bfloat16() * up


@triton.jit
def _geglu(gate, up, out, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64) * n, tl.arange(0, BLOCK)
    a = tl.load(gate + row + at, at < n, other=0).to(tl.float32)
    inner = 0.7978845608028654 * (a + 0.044715 * a * a * a)
    tl.store(out + row + at, 0.5 * a * (1 + libdevice.tanh(inner)) * tl.load(up + row + at, at < n, other=0), at < n)


@case("GeGLU by libdevice's tanh", "Liger", 4 * ROUNDING)
def geglu() -> Results:
    gate, up, out = torch.randn(3, 3, 100)
    _geglu[(3,)](gate, up, out, 100, BLOCK=128)
    return out, F.gelu(gate, approximate="tanh") * up


@triton.jit
def _pointwise(in_ptr0, in_ptr1, out_ptr0, out_ptr1, xnumel, XBLOCK: tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    x0, x1 = xindex % 24, xindex // 24
    tmp0 = tl.load(in_ptr0 + xindex, xmask).to(tl.float32)
    tmp1 = tl.load(in_ptr1 + x0, xmask, eviction_policy="evict_last").to(tl.float32)
    tmp2 = libdevice.erf((tmp0 + tmp1) * 0.7071067811865476)
    tmp3 = tl.where(x1 % 2 == 0, tmp2, libdevice.log1p(libdevice.exp(tmp0)))
    tl.store(out_ptr0 + xindex, tmp3, xmask)
    tl.store(out_ptr1 + xindex, libdevice.rsqrt(tmp0 * tmp0 + 1.0) + tl.sqrt_rn(tmp0 * tmp0), xmask)


@case("pointwise with erf, log1p, rsqrt and sqrt", "Inductor", 4 * ROUNDING)
def pointwise() -> Results:
    x, bias, out, other = torch.randn(10, 24).bfloat16(), torch.randn(24), torch.empty(10, 24), torch.empty(10, 24)
    _pointwise[(2,)](x, bias, out, other, 240, XBLOCK=128)
    a = x.float()
    even = torch.arange(10)[:, None] % 2 == 0
    return torch.stack([out, other]), torch.stack([
        torch.where(even, torch.erf((a + bias) * 0.5**0.5), torch.log1p(a.exp())), (a * a + 1).rsqrt() + a.abs(),
    ])  # fmt: skip


@triton.jit
def _sin_cos(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n)
    tl.store(out + at, tl.sin(v) * tl.cos(v) + tl.exp2(v) - tl.log2(v * v + 1) + tl.floor(v) - tl.ceil(v), at < n)


@case("sine, cosine, exponentials, floor and ceil", "Inductor", 8 * ROUNDING)
def sin_cos() -> Results:
    x, out = 5 * torch.randn(200), torch.empty(200)
    _sin_cos[(1,)](x, out, 200, BLOCK=256)
    return out, x.sin() * x.cos() + x.exp2() - (x * x + 1).log2() + x.floor() - x.ceil()


@triton.jit
def _doubles(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + at, at < n, other=0), tl.load(y + at, at < n, other=1)
    tl.store(out + at, tl.maximum(a * b + a / b, tl.sqrt(a * a)) - a, at < n)


@case("pointwise in float64", "Inductor", 4 * 2.0**-53)
def doubles() -> Results:
    x, y, out = torch.randn(3, 100, dtype=torch.float64)
    _doubles[(1,)](x, y, out, 100, BLOCK=128)
    return out, torch.maximum(x * y + x / y, x.abs()) - x


@triton.jit
def _clamped(x, out, n, low, high, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    v = tl.load(x + at, at < n)
    v = tl.maximum(tl.minimum(v, high.to(v.dtype), propagate_nan=tl.PropagateNan.ALL), low.to(v.dtype),
                   propagate_nan=tl.PropagateNan.ALL)  # fmt: skip
    tl.store(out + at, v, at < n)


@case("clamp of bf16 that keeps NaN", "Inductor")
def clamped() -> Results:
    x, out = (2 * torch.randn(100)).bfloat16(), torch.empty(100).bfloat16()
    x[3] = float("nan")
    _clamped[(1,)](x, out, 100, -1.0, 1.5, BLOCK=128)
    return out, x.clamp(-1, 1.5)


@triton.jit
def _heuristic(x, out, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(out + at, tl.load(x + at) * 2)
    else:
        tl.store(out + at, tl.load(x + at, at < n) * 3, at < n)


_with_heuristics = triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})(_heuristic)


@case("heuristics choose a branch", "flash-attn")
def heuristics() -> Results:
    x, out, other = torch.randn(256), torch.empty(256), torch.empty(256)
    _with_heuristics[(2,)](x, out, 256, BLOCK=128)
    _with_heuristics[(2,)](x, other, 250, BLOCK=128)
    return torch.cat([out, other[:250]]), torch.cat([2 * x, 3 * x[:250]])


@triton.jit
def _asserting(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    index = tl.load(x + at, at < n, other=0)
    tl.device_assert((index >= 0) & (index < 10), "index out of bounds: 0 <= tmp0 < 10")
    tl.store(out + at, index * 2, at < n)


@case("device assert that holds", "Inductor")
def asserting() -> Results:
    x, out = torch.randint(0, 10, (100,)), torch.empty(100, dtype=torch.int64)
    _asserting[(1,)](x, out, 100, BLOCK=128, debug=True)
    return out, 2 * x
