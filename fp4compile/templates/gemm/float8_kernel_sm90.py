"""The Gluon kernel of `gemm.float8_sm90`.

One to three warpgroups of a program multiply 64 rows of A each, by the same 128 rows of B; a further warp loads. They
wait for each other at two mbarriers for each stage of the ring in shared memory: `ready` when the copies of the stage
have arrived, `empty` when every warpgroup has multiplied it.

`wgmma` adds the products of one block, 128 elements along K, in fewer bits than float32. The warpgroup then adds these
sums, times the scales of the block, to its own in float32, while the matrix units multiply for another warpgroup. The
sums of all blocks must be in the same registers, or there are not enough of them: so `wgmma` gets the last block's sums
as the accumulator that it does not use, and the scaling is volatile PTX, which LLVM does not move past it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fp4compile.templates.device.apply_epilogue import rescale_values
from fp4compile.templates.device.block_scaled_tile import loaded_type
from fp4compile.templates.device.persistent_grid import grouped_tile

# Gluon of Triton 3.6 has other names.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

BLOCK = gl.constexpr(128)  # elements of a block along K; rows of B in a tile
ROWS = gl.constexpr(64)  # rows of A that a `wgmma` of a warpgroup multiplies
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
_LANES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # a column a thread
_CODES = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
_SCALES = gl.constexpr(gl.NVMMASharedLayout(0, 32, 1))


@gluon.jit
def tile_at(number, table_ptr, m, n, k, CONFIG: gl.constexpr):
    """(matrix, row, end, column, first block, number of blocks) of a tile, by its number.

    matrix: of B, or of the result with groups along K. row: the first of A; rows from `end` on are another tile's.
    table: see `float8_sm90.write_table`. Rows of no group have no blocks, so that their results are zeros.
    """
    BM: gl.constexpr = CONFIG[0] * ROWS
    GROUP_M: gl.constexpr = CONFIG[3]
    GROUPS: gl.constexpr = CONFIG[4]
    ALONG_K: gl.constexpr = CONFIG[5]
    tiles_n = gl.cdiv(n, BLOCK)
    blocks = gl.cdiv(k, BLOCK)
    matrix = gl.to_tensor(0)
    first = gl.to_tensor(0)
    end = m
    if ALONG_K:
        tiles = gl.cdiv(m, BM) * tiles_n
        matrix = number // tiles
        tile_m, tile_n = grouped_tile(number % tiles, gl.cdiv(m, BM), tiles_n, GROUP_M)
        row = tile_m * BM
        first = gl.load(table_ptr + 4 * matrix + 5)
        blocks = gl.load(table_ptr + 4 * matrix + 6) - first
    elif GROUPS:
        tile_m, tile_n = grouped_tile(number, gl.load(table_ptr), tiles_n, GROUP_M)
        matrix = gl.load(table_ptr + 4 * tile_m + 4)
        row = gl.load(table_ptr + 4 * tile_m + 5)
        end = gl.load(table_ptr + 4 * tile_m + 6)
        blocks = gl.where(matrix < GROUPS, blocks, 0)
        matrix = gl.minimum(matrix, GROUPS - 1)
    else:
        tile_m, tile_n = grouped_tile(number, gl.cdiv(m, BM), tiles_n, GROUP_M)
        row = tile_m * BM
    return matrix, row, end, tile_n * BLOCK, first, blocks


@gluon.jit
def tile_count(table_ptr, m, n, CONFIG: gl.constexpr):
    """The number of tiles of all matrices."""
    BM: gl.constexpr = CONFIG[0] * ROWS
    GROUPS: gl.constexpr = CONFIG[4]
    ALONG_K: gl.constexpr = CONFIG[5]
    if ALONG_K:
        return GROUPS * gl.cdiv(m, BM) * gl.cdiv(n, BLOCK)
    elif GROUPS:
        return gl.load(table_ptr) * gl.cdiv(n, BLOCK)
    else:
        return gl.cdiv(m, BM) * gl.cdiv(n, BLOCK)


@gluon.jit
def after(stage, phase, STAGES: gl.constexpr):
    """The next stage of the ring, and the phase of its mbarriers."""
    last = stage + 1 == STAGES
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def load_tiles(sources, ring, sizes, CONFIG: gl.constexpr):
    """Copy the operands of all tiles to the ring, STEPS blocks a stage, as its stages become empty."""
    a, b, b_scales = sources
    a_ring, b_ring, scale_ring, ready, empty = ring
    table_ptr, m, n, k, m_stride, n_stride, outside = sizes
    PARTS: gl.constexpr = CONFIG[0]
    STEPS: gl.constexpr = CONFIG[1]
    STAGES: gl.constexpr = CONFIG[2]
    ALONG_K: gl.constexpr = CONFIG[5]
    B_SCALES: gl.constexpr = CONFIG[8] and ALONG_K  # of its rows of blocks
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for number in range(gl.program_id(0), tile_count(table_ptr, m, n, CONFIG), gl.num_programs(0)):
        matrix, row, _, col, first, count = tile_at(number, table_ptr, m, n, k, CONFIG)
        b_row = col if ALONG_K else matrix * n + col
        for step in range(first, first + count, STEPS):
            mbarrier.wait(empty.index(stage), phase)
            arrived = ready.index(stage)
            mbarrier.expect(arrived, STEPS * ((PARTS * ROWS + BLOCK) * BLOCK + (4 * BLOCK if B_SCALES else 0)))
            for i in gl.static_range(STEPS):
                at = stage * STEPS + i
                # Beyond the last block, codes are zeros, from outside the matrices, and scales those of the last block.
                begin = gl.where(step + i < first + count, (step + i) * BLOCK, outside)
                async_load(b, [b_row, begin], arrived, b_ring.index(at))
                for part in gl.static_range(PARTS):
                    async_load(a, [row + part * ROWS, begin], arrived, a_ring.index(at * PARTS + part))
                if B_SCALES:
                    block = gl.minimum(step + i, first + count - 1)
                    async_load(b_scales, [block * n_stride + col], arrived, scale_ring.index(at))
            stage, phase = after(stage, phase, STAGES)


@gluon.jit
def scaled_sum(sums, products, rows, columns):
    """sums + products * rows * columns in float32; columns: None for 1."""
    if columns is None:
        return gl.inline_asm_elementwise("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [products, rows[:, None], sums],
                                         dtype=gl.float32, is_pure=False, pack=1)  # fmt: skip
    else:
        return gl.inline_asm_elementwise("{ .reg .f32 x; mul.rn.f32 x, $1, $2; fma.rn.f32 $0, x, $3, $4; }",
                                         "=f,f,f,f,f", [products, columns[None, :], rows[:, None], sums],
                                         dtype=gl.float32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def added(sums, products):
    """sums + products in float32."""
    return gl.inline_asm_elementwise("add.rn.f32 $0, $1, $2;", "=f,f,f", [products, sums], dtype=gl.float32,
                                     is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def row_factors(a_scales_ptr, rows, stride, b_scales_ptr, block, last, STEPS: gl.constexpr):
    """The factors of a tile's rows for STEPS blocks of K from `block` on; for blocks beyond the last one, its factors.

    a_scales: in rows of `stride` numbers. b_scales: of the tile's square blocks; None without.
    """
    factors = ()
    for i in gl.static_range(STEPS):
        at = gl.minimum(block + i, last)
        factor = gl.load(a_scales_ptr + (at * stride + rows))
        if b_scales_ptr is not None:
            factor = factor * gl.load(b_scales_ptr + at)
        factors = factors + (factor,)
    return factors


@gluon.jit
def outer_factors(matrix, rows, col, a_outer_ptr, b_outer_ptr, m, n, CONFIG: gl.constexpr):
    """(factors that all columns of a tile share, factors of its columns) by the global or row scales of its matrices.

    The first are of the rows `rows`, or a scalar. The second, of 128 columns from `col` on, lie one in a thread: a
    warpgroup loads them before it multiplies, when it has no register for the 32 columns of each thread. 1.0 for none.
    """
    ALONG_K: gl.constexpr = CONFIG[5]
    A_OUTER: gl.constexpr = CONFIG[9]
    B_OUTER: gl.constexpr = CONFIG[10]
    factor = 1.0
    of_columns = 1.0
    if A_OUTER == "row":
        first = matrix.to(gl.int64) * m if ALONG_K else 0
        factor = gl.load(a_outer_ptr + first + gl.minimum(rows, m - 1))
    elif A_OUTER != "none":
        factor = gl.load(a_outer_ptr + (matrix if A_OUTER == "group" else 0))
    if B_OUTER == "row":
        columns = gl.minimum(col + gl.arange(0, BLOCK, _LANES), n - 1)
        of_columns = gl.load(b_outer_ptr + matrix.to(gl.int64) * n + columns)
    elif B_OUTER != "none":
        other = gl.load(b_outer_ptr + (matrix if B_OUTER == "group" else 0))
        factor = factor * other if A_OUTER != "none" else other
    return factor, of_columns


@gluon.jit
def multiply_tiles(PART: gl.constexpr, tensors, ring, sizes, CONFIG: gl.constexpr):
    """Multiply and store this warpgroup's rows of all tiles."""
    out, staging, a_scales_ptr, b_scales_ptr, a_outer_ptr, b_outer_ptr, bias_ptr, out_ptr, b_blocks = tensors
    a_ring, b_ring, scale_ring, ready, empty = ring
    table_ptr, m, n, k, m_stride, _, _ = sizes
    BIAS: gl.constexpr = CONFIG[6]
    TMA: gl.constexpr = CONFIG[7]
    SCALES: gl.constexpr = CONFIG[8]
    A_OUTER: gl.constexpr = CONFIG[9]
    B_OUTER: gl.constexpr = CONFIG[10]
    PARTS: gl.constexpr = CONFIG[0]
    STEPS: gl.constexpr = CONFIG[1]
    STAGES: gl.constexpr = CONFIG[2]
    ALONG_K: gl.constexpr = CONFIG[5]
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    never = k < 0  # not a constant: `wgmma` would get no accumulator
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, _SUMS))
    columns = gl.arange(0, BLOCK, gl.SliceLayout(0, _SUMS))
    for number in range(gl.program_id(0), tile_count(table_ptr, m, n, CONFIG), gl.num_programs(0)):
        matrix, row, end, col, first, count = tile_at(number, table_ptr, m, n, k, CONFIG)
        row += PART * ROWS
        sums = gl.zeros([ROWS, BLOCK], gl.float32, _SUMS)
        products = sums
        a_rows = gl.minimum(row + rows, m - 1)
        b_scales = None
        if SCALES and not ALONG_K:
            b_scales = b_scales_ptr + (matrix.to(gl.int64) * gl.cdiv(n, BLOCK) + col // BLOCK) * b_blocks
        last = gl.maximum(first + count - 1, 0)
        factor, of_columns = outer_factors(matrix, row + rows, col, a_outer_ptr, b_outer_ptr, m, n, CONFIG)
        if SCALES:
            following = row_factors(a_scales_ptr, a_rows, m_stride, b_scales, first, last, STEPS)
        for step in range(first, first + count, STEPS):
            if SCALES:
                factors = following
                following = row_factors(a_scales_ptr, a_rows, m_stride, b_scales, step + STEPS, last, STEPS)
            mbarrier.wait(ready.index(stage), phase)
            for i in gl.static_range(STEPS):
                at = stage * STEPS + i
                b = b_ring.index(at).permute((1, 0))
                products = warpgroup_mma(a_ring.index(at * PARTS + PART), b, products, use_acc=never, is_async=True)
                of_block = None
                if SCALES and ALONG_K:
                    of_block = scale_ring.index(at).load(gl.SliceLayout(0, _SUMS))
                products = warpgroup_mma_wait(0, [products])
                if i == STEPS - 1:
                    mbarrier.arrive(empty.index(stage))
                if SCALES:
                    sums = scaled_sum(sums, products, factors[i], of_block)
                else:
                    sums = added(sums, products)
            stage, phase = after(stage, phase, STAGES)
        c = (col + columns)[None, :]
        inside = ((row + rows)[:, None] < end) & (c < n)
        bias = 0.0
        if BIAS:
            bias = gl.load(bias_ptr + gl.minimum(c, n - 1)).to(gl.float32)
        if A_OUTER == "row":
            factor = factor[:, None]
        if B_OUTER == "row":
            of_columns = gl.convert_layout(of_columns, gl.SliceLayout(0, _SUMS))[None, :]
        value = rescale_values(sums, factor, of_columns, bias, A_OUTER, B_OUTER, BIAS)
        # Global and row scales may be any number where no group has rows.
        value = gl.where(count > 0, value, 0.0).to(out_ptr.dtype.element_ty)
        out_row = row
        if ALONG_K:
            out_row += matrix * m
        at = out_ptr + ((out_row + rows)[:, None].to(gl.int64) * n + c)
        if TMA:
            if row + ROWS <= end:
                tma.store_wait(0)
                staging.index(PART).store(value)
                fence_async_shared()
                async_store(out, [out_row, col], staging.index(PART))
            else:
                gl.store(at, value, mask=inside)
        else:
            gl.store(at, value, mask=inside)
    if TMA:
        tma.store_wait(0)


@gluon.jit
def gemm_float8_sm90(
    a_ptr, a_scales_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, out_ptr, table_ptr,
    m, n, k, a_row, b_row, matrices, m_stride, n_stride,
    A_ELEMENT: gl.constexpr, B_ELEMENT: gl.constexpr, SCALES: gl.constexpr, A_OUTER: gl.constexpr,
    B_OUTER: gl.constexpr, PARTS: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, GROUPS: gl.constexpr, ALONG_K: gl.constexpr, BIAS: gl.constexpr, TMA: gl.constexpr,
):  # fmt: skip
    """Tiles [64 * PARTS, 128] of out [m, n] = a [m, K] x b [n, K]^T, plus a bias; a persistent grid.

    a, b: FP8 codes in rows of a_row and b_row elements, multiples of 16. k: elements to multiply, at least 16: Triton
    makes a constant of 1, and `wgmma` must not know that it runs once, nor that it has no accumulator.
    SCALES: whether blocks have scales; rows are then multiples of 128. a_scales: float32 (its bits) of rows of blocks,
    transposed, [a_row / 128, m_stride]. b_scales: float32 of square blocks, [matrices, ceil(n / 128), b_row / 128];
    with groups along K, as of A, [b_row / 128, n_stride]. *_OUTER: as in `gemm_dequant_tiles`. matrices: of B.
    table: see `float8_sm90.write_table`. GROUPS: of the rows of A, each with a matrix of B, or, if ALONG_K, of the
    blocks, each with a result [m, n]; 0 without groups.
    PARTS: warpgroups that multiply, 1 to 3. STEPS: blocks in a stage. STAGES: of the ring. GROUP_M: see
    `grouped_tile`. TMA: whether it stores whole parts of a tile.
    """
    a_ptr = a_ptr.to(gl.pointer_type(loaded_type(A_ELEMENT)), bitcast=True)
    b_ptr = b_ptr.to(gl.pointer_type(loaded_type(B_ELEMENT)), bitcast=True)
    a_scales_ptr = a_scales_ptr.to(gl.pointer_type(gl.float32), bitcast=True)
    b_scales_ptr = b_scales_ptr.to(gl.pointer_type(gl.float32), bitcast=True)
    a = tma.make_tensor_descriptor(a_ptr, [m, a_row], [a_row, 1], [ROWS, BLOCK], _CODES)
    b = tma.make_tensor_descriptor(b_ptr, [matrices * n, b_row], [b_row, 1], [BLOCK, BLOCK], _CODES)
    b_blocks = gl.to_tensor(b_row) // BLOCK
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES * STEPS * PARTS, ROWS, BLOCK], _CODES)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES * STEPS, BLOCK, BLOCK], _CODES)
    b_scales = b
    scale_ring = b_ring
    if SCALES and ALONG_K:
        b_scales = tma.make_tensor_descriptor(b_scales_ptr, [n_stride * b_blocks], [1], [BLOCK], _SCALES)
        scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES * STEPS, BLOCK], _SCALES)
    out = b
    staging = b_ring
    if TMA:
        results: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        out = tma.make_tensor_descriptor(out_ptr, [m * GROUPS if ALONG_K else m, n], [n, 1], [ROWS, BLOCK], results)
        staging = gl.allocate_shared_memory(out.dtype, [PARTS, ROWS, BLOCK], results)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), 1)
        mbarrier.init(empty.index(i), PARTS)
    fence_async_shared()

    m = gl.to_tensor(m)
    n = gl.to_tensor(n)
    k = gl.to_tensor(k)
    # The functions above read these by position: Gluon's partitions take one constant, and no names in it.
    config: gl.constexpr = (PARTS, STEPS, STAGES, GROUP_M, GROUPS, ALONG_K, BIAS, TMA, SCALES, A_OUTER, B_OUTER)
    ring = (a_ring, b_ring, scale_ring, ready, empty)
    tensors = (out, staging, a_scales_ptr, b_scales_ptr, a_outer_ptr, b_outer_ptr, bias_ptr, out_ptr, b_blocks)
    outside = gl.maximum(gl.to_tensor(a_row), b_row)
    sizes = (table_ptr, m, n, k, gl.to_tensor(m_stride), gl.to_tensor(n_stride), outside)
    sources = (a, b, b_scales)
    if PARTS == 3:
        gl.warp_specialize([(multiply_tiles, (0, tensors, ring, sizes, config)),
                            (multiply_tiles, (1, tensors, ring, sizes, config)),
                            (multiply_tiles, (2, tensors, ring, sizes, config)),
                            (load_tiles, (sources, ring, sizes, config))],
                           [4, 4, 1], [160, 160, 24])  # fmt: skip
    elif PARTS == 2:
        gl.warp_specialize([(multiply_tiles, (0, tensors, ring, sizes, config)),
                            (multiply_tiles, (1, tensors, ring, sizes, config)),
                            (load_tiles, (sources, ring, sizes, config))],
                           [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([(multiply_tiles, (0, tensors, ring, sizes, config)),
                            (load_tiles, (sources, ring, sizes, config))],
                           [1], [24])  # fmt: skip
