"""Kernels in Gluon: layouts and shared memory, TMA with mbarriers, tensor memory and tcgen05 by hand."""

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
    tma,
)
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.ptxsim.kernels.cases import Results, case, small_integers


@gluon.jit
def _through_shared(x, out, N: gl.constexpr, first: gl.constexpr, second: gl.constexpr, shared: gl.constexpr):
    rows = gl.arange(0, N, layout=gl.SliceLayout(1, first))[:, None]
    columns = gl.arange(0, N, layout=gl.SliceLayout(0, first))[None, :]
    buffer = gl.allocate_shared_memory(x.dtype.element_ty, [N, N], shared)
    buffer.store(gl.load(x + rows * N + columns))
    found = buffer.permute((1, 0)).load(second)
    rows = gl.arange(0, N, layout=gl.SliceLayout(1, second))[:, None]
    columns = gl.arange(0, N, layout=gl.SliceLayout(0, second))[None, :]
    gl.store(out + rows * N + columns, found)


@case("transposition through swizzled shared memory", "Gluon tutorial")
def through_shared() -> Results:
    x, out = torch.randn(32, 32), torch.empty(32, 32)
    first, second = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]), gl.BlockedLayout([1, 2], [8, 4], [4, 1], [1, 0])
    _through_shared[(1,)](x, out, N=32, first=first, second=second, shared=gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    return out, x.T


@gluon.jit
def _reduced(x, out, M: gl.constexpr, N: gl.constexpr, layout: gl.constexpr):
    """Maxima of rows, and minima of their magnitudes, as rows are loaded: tcgen05.ld.red, from 10.3 on."""
    rows = gl.arange(0, M, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, N, layout=gl.SliceLayout(0, layout))
    memory = allocate_tensor_memory(gl.float32, [M, N], TensorMemoryLayout([M, N], col_stride=1))
    registers: gl.constexpr = memory.get_reg_layout()
    memory.store(gl.convert_layout(gl.load(x + rows[:, None] * N + columns[None, :]), registers))
    _, largest = memory.load_max(registers)
    _, smallest = memory.load_min(registers, abs=True, propagate_nan=tl.PropagateNan.ALL)
    gl.store(out + rows, gl.convert_layout(largest, rows.type.layout))
    gl.store(out + M + rows, gl.convert_layout(smallest, rows.type.layout))


def reduced_loads() -> Results:
    """Not among the cases: sm_100a has no such loads."""
    x, out = torch.randn(128, 32), torch.empty(2, 128)
    _reduced[(1,)](x, out, M=128, N=32, layout=gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    return out, torch.stack([x.amax(1), x.abs().amin(1)])


@gluon.jit
def _tcgen05(a, b, c, layout: gl.constexpr):
    left = gl.allocate_shared_memory(a.dtype, a.block_shape, a.layout)
    right = gl.allocate_shared_memory(b.dtype, b.block_shape, b.layout)
    M: gl.constexpr = a.block_shape[0]
    N: gl.constexpr = b.block_shape[1]
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    mbarrier.init(done, count=1)
    mbarrier.expect(loaded, a.block_type.nbytes + b.block_type.nbytes)
    tma.async_load(a, [0, 0], loaded, left)
    tma.async_load(b, [0, 0], loaded, right)
    mbarrier.wait(loaded, phase=0)
    tmem_layout: gl.constexpr = TensorMemoryLayout([M, N], col_stride=1)
    sums = allocate_tensor_memory(gl.float32, [M, N], tmem_layout)
    tcgen05_mma(left, right, sums, use_acc=False)
    tcgen05_commit(done)
    mbarrier.wait(done, phase=0)
    result = sums.load(sums.get_reg_layout())
    result = gl.convert_layout(result, layout)
    out = gl.allocate_shared_memory(c.dtype, c.block_shape, c.layout, result.to(c.dtype))
    fence_async_shared()
    tma.async_store(c, [0, 0], out)
    tma.store_wait(0)


@case("tcgen05 product of fp16, B of N as it lies", "Gluon tutorial")
def tcgen05() -> Results:
    a, b, c = small_integers(128, 64), small_integers(64, 64), torch.empty(128, 64).half()
    layout = gl.NVMMASharedLayout.get_default_for([128, 64], gl.float16)
    descriptors = [TensorDescriptor.from_tensor(each, list(each.shape), layout) for each in (a, b, c)]
    _tcgen05[(1,)](*descriptors, layout=gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]), num_warps=4)
    return c, (a.float() @ b.float()).half()
