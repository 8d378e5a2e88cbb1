"""The Gluon kernel of `gemm.block_scaled_two_ctas_sm100`. Import it only where `_compat.two_cta_products()` holds.

Functions of Gluon name the layout of each tensor. `cga_layout` divides a tensor between the two CTAs of a pair: [1, 0]
gives each CTA half of the rows, [0, 0] gives both CTAs the whole tensor.

Three partitions of warps wait for each other at mbarriers:
- `ready` of a stage: the copies of both CTAs have arrived. It is in the first CTA, which issues the matrix instructions
  of both.
- `empty` of a stage: the matrix instructions that read it are done. Each CTA has its own, and the tensor pipe arrives
  at both.
- `sums_ready`: the last matrix instruction of a tile is done. Each CTA has its own, as above.
- `sums_empty`: the epilogues of both CTAs have read the sums. It is in the first CTA.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    fence_async_shared,
    mbarrier,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma_scaled,
    tma,
)

from fp4compile.templates.device.apply_epilogue import epilogue, factor_of_rows, rescale_columns, rescale_mode, stored
from fp4compile.templates.device.block_scaled_tile import codes_in, loaded_type
from fp4compile.templates.device.block_scales import outer_scales
from fp4compile.templates.device.groups import ends_of_lanes, group_of_tile, per_lane
from fp4compile.templates.device.persistent_grid import grouped_tile
from fp4compile.templates.device.quantized_epilogue import (
    amax_of_part,
    finds_amax,
    joined_columns,
    quantized_part,
    quantizes,
    result_of,
    unit_type,
)


@gluon.aggregate
class Tile:
    """A tile of the result from (row, col) on."""

    row: gl.tensor
    col: gl.tensor

    @gluon.jit
    def matrix(self):
        """Its first matrix of B."""
        return 0

    @gluon.jit
    def a_scales(self):
        """Its first 128 rows of the scales of A, counted in 128 rows."""
        return self.row // 128


@gluon.aggregate
class Walk:
    """The result [m, n], its tiles [BM, BN], which CTA pairs take in turn, and the steps along K of each tile."""

    m: gl.tensor
    n: gl.tensor
    steps: gl.tensor
    BM: gl.constexpr
    BN: gl.constexpr
    GROUP_M: gl.constexpr

    @gluon.jit
    def tiles(self):
        """The number of tiles."""
        return gl.cdiv(self.m, self.BM) * gl.cdiv(self.n, self.BN)

    @gluon.jit
    def tile(self, number):
        """A tile by its number."""
        tile_m, tile_n = grouped_tile(number, gl.cdiv(self.m, self.BM), gl.cdiv(self.n, self.BN), self.GROUP_M)
        return Tile(tile_m * self.BM, tile_n * self.BN)


@gluon.aggregate
class TileOfGroup:
    """A tile of a group from (row, col) on; rows from `end` on belong to another group.

    scales: its first 128 rows of the scales of A, counted in 128 rows: each group's begin at whole 128 rows.
    """

    row: gl.tensor
    col: gl.tensor
    end: gl.tensor
    group: gl.tensor
    scales: gl.tensor

    @gluon.jit
    def matrix(self):
        """Its matrix of B."""
        return self.group

    @gluon.jit
    def a_scales(self):
        """Its first 128 rows of the scales of A, counted in 128 rows."""
        return self.scales


@gluon.aggregate
class WalkOverGroups:
    """A `Walk` over the rows of groups, each of which begins a new tile and has a matrix [n, K] of B.

    offs_ptr: where the groups end, int32 [GROUPS]. Every warp finds the group of its next tile by itself
    (`device.groups`): so partitions need no barrier, and no registers for other warps' tiles.
    """

    offs_ptr: gl.tensor
    m: gl.tensor
    n: gl.tensor
    steps: gl.tensor
    BM: gl.constexpr
    BN: gl.constexpr
    GROUP_M: gl.constexpr
    GROUPS: gl.constexpr

    @gluon.jit
    def offsets(self):
        """The offsets, as the functions of `device.groups` take them."""
        each: gl.constexpr = per_lane(self.GROUPS)
        lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0], [[0]]))
        loaded = ()
        for i in gl.static_range(2 * each):
            group = (lane - 1) * each + i
            mask = (group >= 0) & (group < self.GROUPS)
            loaded = loaded + (gl.load(self.offs_ptr + group, mask=mask, other=0),)
        return loaded

    @gluon.jit
    def end(self):
        """(the row behind the last group, how many tiles of BM rows all groups have)."""
        offs = self.offsets()
        ends, after = ends_of_lanes(offs, self.m, self.BM)
        return gl.max(ends[len(ends) - 1], 0), gl.max(after[len(after) - 1], 0)

    @gluon.jit
    def tiles(self):
        """The number of tiles of all groups."""
        _, tiles_m = self.end()
        return tiles_m * gl.cdiv(self.n, self.BN)

    @gluon.jit
    def tile(self, number):
        """A tile by its number."""
        offs = self.offsets()
        _, after = ends_of_lanes(offs, self.m, self.BM)
        _, scales = ends_of_lanes(offs, self.m, 128)
        tiles_m = gl.max(after[len(after) - 1], 0)
        tile_m, tile_n = grouped_tile(number, tiles_m, gl.cdiv(self.n, self.BN), self.GROUP_M)
        group, start, end, row = group_of_tile(offs, self.m, tile_m, self.BM, self.GROUPS)
        passed = scales[0] * 0
        for i in gl.static_range(len(after)):
            passed = gl.maximum(passed, gl.where(after[i] <= tile_m, scales[i], 0))
        first = gl.max(passed, 0) + (row - start) // 128
        return TileOfGroup(row, tile_n * self.BN, end, group, first)


@gluon.aggregate
class Sources:
    """The operands in global memory. TMA fills in zeros outside of a matrix.

    Codes: A [m, bytes of a row], B [matrices, n, bytes of a row]. Scales, in tiles of 128 rows and 4 columns, 512 bytes
    each: A [row tiles, column tiles, 2, 256], B [matrices, row tiles, 2 * column tiles, 256].
    """

    a: tma.tensor_descriptor
    b: tma.tensor_descriptor
    a_scales: tma.tensor_descriptor
    b_scales: tma.tensor_descriptor


@gluon.aggregate
class ResultStores:
    """The outputs of the epilogue: tensors in global memory, and shared memory from which TMA stores to them.

    target, buffers: for parts of the result, or of its codes, from two buffers. scales, scale_buffer: for the swizzled
    block scales of a tile of codes, as in `Sources`; for other results, `target` and `buffers` again.
    """

    target: tma.tensor_descriptor
    buffers: gl.shared_memory_descriptor
    scales: tma.tensor_descriptor
    scale_buffer: gl.shared_memory_descriptor


@gluon.aggregate
class Ring:
    """Shared memory for the operands of several steps, and two mbarriers for each step."""

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    a_scales: gl.shared_memory_descriptor
    b_scales: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def after(self, stage, phase):
        """The stage of the next step, and the phase of its mbarriers."""
        last = stage + 1 == self.a.shape[0]
        return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def load_steps(walk, ring, sources):
    """Copy the operands of all steps to the ring, as its stages become empty.

    Each CTA copies half of A, half of B, and the scales of its half of A. Both need all scales of B, so the first CTA
    copies these for both.
    """
    nbytes: gl.constexpr = (sources.a.nbytes_per_cta + sources.b.nbytes_per_cta + sources.a_scales.nbytes_per_cta
                            + sources.b_scales.nbytes_per_cta)  # fmt: skip
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for tile in range(gl.program_id(0), walk.tiles(), gl.num_programs(0)):
        at = walk.tile(tile)
        for step in range(walk.steps):
            mbarrier.wait(ring.empty.index(stage), phase)
            ready = ring.ready.index(stage)
            mbarrier.expect(ready, nbytes)
            a_col = step * sources.a.block_shape[1]
            b_col = step * sources.b.block_shape[2]
            col_tile = step * sources.a_scales.block_shape[1]
            tma.async_load(sources.a, [at.row, a_col], ready, ring.a.index(stage))
            tma.async_load(sources.b, [at.matrix(), at.col, b_col], ready, ring.b.index(stage))
            tma.async_load(sources.a_scales, [at.a_scales(), col_tile, 0, 0], ready, ring.a_scales.index(stage))
            tma.async_load(sources.b_scales, [at.matrix(), at.col // 128, 2 * col_tile, 0], ready,
                           ring.b_scales.index(stage), multicast=True)  # fmt: skip
            stage, phase = ring.after(stage, phase)


@gluon.jit
def as_matrix(tiles, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Swizzled scales in shared memory, tiles of 512 bytes, as the matrix [ROWS, COLS]."""
    tiles = tiles.reshape((ROWS // 128, COLS // 4, 32, 4, 4)).permute((0, 3, 2, 1, 4))
    return tiles.reshape((ROWS, COLS))


@gluon.jit
def multiply_steps(walk, ring, sums, sums_ready, sums_empty, a_scales, b_scales, A_ELEMENT: gl.constexpr,
                   B_ELEMENT: gl.constexpr):  # fmt: skip
    """Multiply the operands of all steps, as they arrive. a_scales, b_scales: tensor memory for the scales of a step.

    Copies to tensor memory and matrix instructions are executed in order, so one buffer of scales is enough.
    """
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    sums_phase = gl.to_tensor(1)
    for _ in range(gl.program_id(0), walk.tiles(), gl.num_programs(0)):
        mbarrier.wait(sums_empty, sums_phase)
        for step in range(walk.steps):
            mbarrier.wait(ring.ready.index(stage), phase)
            tcgen05_copy(as_matrix(ring.a_scales.index(stage), a_scales.shape[0], a_scales.shape[1]), a_scales)
            tcgen05_copy(as_matrix(ring.b_scales.index(stage), b_scales.shape[0], b_scales.shape[1]), b_scales)
            b = ring.b.index(stage).reshape((sums.shape[1], ring.b.shape[3])).permute((1, 0))
            tcgen05_mma_scaled(
                ring.a.index(stage), b, sums, a_scales, b_scales, A_ELEMENT, B_ELEMENT, use_acc=step > 0,
                multicast=True, mbarriers=[ring.empty.index(stage)],
            )  # fmt: skip
            stage, phase = ring.after(stage, phase)
        tcgen05_commit(sums_ready)
        sums_phase = sums_phase ^ 1


@gluon.jit
def clear_rows(walk, target, buffer, layout: gl.constexpr):
    """Store zeros in the rows behind the last group."""
    buffer.store(gl.zeros(buffer.shape, buffer.dtype, layout))
    fence_async_shared()
    end, _ = walk.end()
    for row in range(end + gl.program_id(0) * walk.BM, walk.m, gl.num_programs(0) * walk.BM):
        for col in range(0, walk.n, buffer.shape[1]):
            tma.async_store(target, [row, col], buffer)
    tma.store_wait(0)


@gluon.jit
def rows_of(x):
    """The rows of a matrix, counted from 0, [ROWS, 1] in its layout."""
    return gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.jit
def columns_of(x):
    """The columns of a matrix, counted from 0, [1, COLUMNS] in its layout."""
    return gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))[None, :]


@gluon.jit
def store_scales(output, byte, row, first, m, blocks):
    """Store the scale bytes (int32) of a tile of codes from (row, first) on, counted in rows and in blocks.

    m, blocks: rows, and blocks in a row. The swizzled layout has zeros outside of them.
    """
    inside = (row + rows_of(byte) < m) & (first + columns_of(byte) < blocks)
    byte = gl.where(inside, byte, 0).to(gl.uint8)
    as_matrix(output.scale_buffer, byte.shape[0], byte.shape[1]).store(byte)
    fence_async_shared()
    tma.async_store(output.scales, [row // 128, first // 4, 0, 0], output.scale_buffer)


@gluon.jit
def store_maxima(maxima_ptr, amax, COUNT: gl.constexpr):
    """Store the largest of each CTA's rows of amax, bits of magnitudes (int32), as two of COUNT entries (int32).

    The first pair stores 0 to the entries that have no CTA.
    """
    halves = gl.max(gl.reshape(amax, (2, amax.shape[0] * amax.shape[1] // 2)), 1)
    gl.store(maxima_ptr + (2 * gl.program_id(0) + gl.arange(0, 2, halves.type.layout)), halves)
    at = gl.arange(0, COUNT, gl.BlockedLayout([1], [32], [gl.num_warps()], [0], [[0]]))
    absent = gl.where(gl.program_id(0) == 0, 2 * gl.num_programs(0), COUNT)
    gl.store(maxima_ptr + at, gl.zeros([COUNT], gl.int32, at.type.layout), mask=at >= absent)


@gluon.jit
def store_tiles(
    walk, sums, sums_ready, sums_empty, output, a_outer_ptr, b_outer_ptr, b_outer_step, bias_ptr, epilogue_0_ptr,
    epilogue_1_ptr, out_ptr, out_scales_ptr, out_outer_ptr,
    A_OUTER: gl.constexpr, B_OUTER: gl.constexpr, BIAS: gl.constexpr, PAIR: gl.constexpr, EPILOGUE: gl.constexpr,
    PART_COLS: gl.constexpr, EVEN_BLOCKS: gl.constexpr, MAXIMA: gl.constexpr, ISA: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """Rescale the sums of all tiles, apply the epilogue, and store the result.

    Registers hold all sums of a tile, so that the main loop of the next tile need not wait for the epilogue. It
    processes a part of the columns at a time. TMA stores the parts from two buffers in turn: it stores one while the
    epilogue computes the next one.
    """
    parts: gl.constexpr = walk.BN // PART_COLS  # of the result
    layout: gl.constexpr = sums.slice(0, PART_COLS).get_reg_layout()
    m = walk.m
    n = walk.n
    phase = gl.to_tensor(0)
    if quantizes(EPILOGUE):
        block: gl.constexpr = result_of(EPILOGUE, "block")
        encode, decode = outer_scales(result_of(EPILOGUE, "outer"), out_outer_ptr, out_outer_ptr, 1, "", "", "", ISA)
    if finds_amax(EPILOGUE):
        amax = amax_of_part(gl.zeros([walk.BM, PART_COLS], gl.float32, layout), EPILOGUE, ISA)
    for tile in range(gl.program_id(0), walk.tiles(), gl.num_programs(0)):
        at = walk.tile(tile)
        row0 = at.row
        rows = gl.arange(0, walk.BM, layout=gl.SliceLayout(1, layout))[:, None]
        cols = gl.arange(0, PART_COLS, layout=gl.SliceLayout(0, layout))[None, :]
        a_outer = a_outer_ptr
        b_outer = b_outer_ptr
        here = output.target
        if GROUPS:
            if A_OUTER == "group":
                a_outer = a_outer_ptr + at.group
            if B_OUTER == "group":
                b_outer = b_outer_ptr + at.group
            elif B_OUTER == "row":
                b_outer = b_outer_ptr + at.group * n
            tma.store_wait(0)
            here = tma.make_tensor_descriptor(out_ptr, [at.end, n], [n, 1], [walk.BM, PART_COLS], here.layout)
        factor = factor_of_rows(row0 + rows, m, 0, a_outer, b_outer, rescale_mode(A_OUTER), rescale_mode(B_OUTER))
        pair_factor = factor
        if PAIR and B_OUTER == "group":
            pair_factor = factor_of_rows(row0 + rows, m, 0, a_outer, b_outer + b_outer_step, rescale_mode(A_OUTER),
                                         "tensor")  # fmt: skip
        mbarrier.wait(sums_ready, phase)
        phase = phase ^ 1
        loaded = ()
        for i in gl.static_range(sums.shape[1] // PART_COLS):
            loaded = loaded + (sums.slice(i * PART_COLS, PART_COLS).load(layout),)
        mbarrier.arrive(sums_empty)
        scales = ()
        for i in gl.static_range(parts):
            col0 = at.col + i * PART_COLS
            col = col0 + cols
            first = row0.to(gl.int64) * n + col0
            part = rescale_columns(loaded[i], factor, col, n, 0, b_outer, bias_ptr, rescale_mode(A_OUTER),
                                   rescale_mode(B_OUTER), BIAS, False)  # fmt: skip
            pair = None
            if PAIR:  # of the second matrix of B
                pair = rescale_columns(loaded[parts + i], pair_factor, col, n, 0, b_outer + n, bias_ptr + n,
                                       rescale_mode(A_OUTER), rescale_mode(B_OUTER), BIAS, False)  # fmt: skip
            part = epilogue(part, rows * n + cols, col, (row0 + rows < m) & (col < n), n, epilogue_0_ptr,
                            epilogue_1_ptr, EPILOGUE, ISA, pair, first)  # fmt: skip
            if quantizes(EPILOGUE):
                if not EVEN_BLOCKS:
                    part = gl.where(col < n, part, 0.0)
                part, byte = quantized_part(part, encode, decode, EPILOGUE, ISA)
                scales = scales + (byte,)
                col0 = col0 // 2  # units of two codes
            else:
                if finds_amax(EPILOGUE):
                    found = amax_of_part(part, EPILOGUE, ISA)
                    amax = gl.maximum(amax, gl.where((row0 + rows_of(found) < m) & (col0 < n), found, 0))
                part = stored(part, out_ptr, ISA)
            buffer = output.buffers.index(i % 2)
            tma.store_wait(1)
            buffer.store(part)
            fence_async_shared()
            tma.async_store(here, [row0, col0], buffer)
        if quantizes(EPILOGUE):
            store_scales(output, joined_columns(scales), row0, at.col // block, m, gl.cdiv(n, block))
    tma.store_wait(0)
    if GROUPS:
        clear_rows(walk, output.target, output.buffers.index(0), layout)
    if finds_amax(EPILOGUE):
        store_maxima(out_scales_ptr.to(gl.pointer_type(gl.int32), bitcast=True), amax, MAXIMA)


@gluon.jit
def operand_sources(
    a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, m, n, a_per_row, b_per_row, row_tiles_a, row_tiles_b, col_tiles,
    A_ELEMENT: gl.constexpr, B_ELEMENT: gl.constexpr, SCALE: gl.constexpr, BLOCK: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, MATRICES: gl.constexpr, TILE_MATRICES: gl.constexpr,
):  # fmt: skip
    """The operands, in steps of BK elements along K.

    MATRICES: of B. TILE_MATRICES: of a tile, which has BN rows of B. Each CTA of a pair loads half of the rows of B:
    with two matrices, one of them.
    """
    a_bytes: gl.constexpr = codes_in(BK, A_ELEMENT)
    b_bytes: gl.constexpr = codes_in(BK, B_ELEMENT)
    tiles_k: gl.constexpr = BK // BLOCK // 4
    b_rows: gl.constexpr = BN // TILE_MATRICES
    # For FP4 with FP8 operands, TMA expands each FP4 code to a byte.
    a_layout: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2, fp4_padded=a_bytes < b_bytes, cga_layout=[[1, 0]])
    b_halves: gl.constexpr = [[0, 1, 0]] if TILE_MATRICES == 1 else [[1, 0, 0]]
    b_layout: gl.constexpr = gl.NVMMASharedLayout(128, 8, 3, fp4_padded=b_bytes < a_bytes, cga_layout=b_halves)
    a_scale_layout: gl.constexpr = gl.NVMMASharedLayout(0, 8, 4, cga_layout=[[1, 0, 0, 0]])
    b_scale_layout: gl.constexpr = gl.NVMMASharedLayout(0, 8, 4, cga_layout=[[0, 0, 0, 0]])
    a_ptr = a_ptr.to(gl.pointer_type(loaded_type(A_ELEMENT)), bitcast=True)
    b_ptr = b_ptr.to(gl.pointer_type(loaded_type(B_ELEMENT)), bitcast=True)
    a_scales_ptr = a_scales_ptr.to(gl.pointer_type(loaded_type(SCALE)), bitcast=True)
    b_scales_ptr = b_scales_ptr.to(gl.pointer_type(loaded_type(SCALE)), bitcast=True)
    b_size = gl.cast(n, gl.int64) * b_per_row
    b_scale_size = gl.cast(row_tiles_b, gl.int64) * col_tiles * 512
    return Sources(
        tma.make_tensor_descriptor(a_ptr, [m, a_per_row], [a_per_row, 1], [BM, a_bytes], a_layout),
        tma.make_tensor_descriptor(b_ptr, [MATRICES, n, b_per_row], [b_size, b_per_row, 1],
                                   [TILE_MATRICES, b_rows, b_bytes], b_layout),
        tma.make_tensor_descriptor(a_scales_ptr, [row_tiles_a, col_tiles, 2, 256], [col_tiles * 512, 512, 256, 1],
                                   [BM // 128, tiles_k, 2, 256], a_scale_layout),
        tma.make_tensor_descriptor(b_scales_ptr, [MATRICES, row_tiles_b, 2 * col_tiles, 256],
                                   [b_scale_size, col_tiles * 512, 256, 1],
                                   [TILE_MATRICES, b_rows // 128, 2 * tiles_k, 256], b_scale_layout),
    )  # fmt: skip


@gluon.jit
def outputs(out_ptr, out_scales_ptr, m, n, EPILOGUE: gl.constexpr, BM: gl.constexpr, TILE_COLS: gl.constexpr,
            PART_COLS: gl.constexpr):  # fmt: skip
    """The outputs of an epilogue: TILE_COLS columns of a tile, PART_COLS columns at a time."""
    if quantizes(EPILOGUE):
        block: gl.constexpr = result_of(EPILOGUE, "block")
        blocks = gl.cdiv(n, block)
        codes_ptr = out_ptr.to(gl.pointer_type(unit_type(EPILOGUE)), bitcast=True)
        target, buffers = stored_parts(codes_ptr, m, blocks * (block // 2), BM, PART_COLS // 2)
        layout: gl.constexpr = gl.NVMMASharedLayout(0, 8, 4, cga_layout=[[1, 0, 0, 0]])
        tile: gl.constexpr = [BM // 128, TILE_COLS // block // 4, 2, 256]
        col_tiles = gl.cdiv(blocks, 4)
        scales = tma.make_tensor_descriptor(out_scales_ptr, [gl.cdiv(m, 128), col_tiles, 2, 256],
                                            [col_tiles * 512, 512, 256, 1], tile, layout)  # fmt: skip
        return ResultStores(target, buffers, scales, gl.allocate_shared_memory(gl.uint8, tile, layout))
    else:
        target, buffers = stored_parts(out_ptr, m, n, BM, PART_COLS)
        return ResultStores(target, buffers, target, buffers)


@gluon.jit
def stored_parts(ptr, m, n, BM: gl.constexpr, COLS: gl.constexpr):
    """(a descriptor of a matrix [m, n] that is stored in parts [BM, COLS], two buffers of such parts)."""
    bits: gl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMASharedLayout(COLS * bits // 8, bits, 2, cga_layout=[[1, 0]])
    target = tma.make_tensor_descriptor(ptr, [m, n], [n, 1], [BM, COLS], layout)
    return target, gl.allocate_shared_memory(target.dtype, [2, BM, COLS], layout)


@gluon.jit
def operand_ring(sources, STAGES: gl.constexpr):
    """Shared memory and mbarriers for STAGES steps of these operands."""
    ring = Ring(
        gl.allocate_shared_memory(sources.a.dtype, [STAGES] + sources.a.block_shape, sources.a.layout),
        gl.allocate_shared_memory(sources.b.dtype, [STAGES] + sources.b.block_shape, sources.b.layout),
        gl.allocate_shared_memory(sources.a_scales.dtype, [STAGES] + sources.a_scales.block_shape,
                                  sources.a_scales.layout),
        gl.allocate_shared_memory(sources.b_scales.dtype, [STAGES] + sources.b_scales.block_shape,
                                  sources.b_scales.layout),
        mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=True),
        mbarrier.allocate_mbarrier(batch=STAGES),
    )  # fmt: skip
    for i in gl.static_range(STAGES):
        mbarrier.init(ring.ready.index(i), 1)
        mbarrier.init(ring.empty.index(i), 1)
    return ring


@gluon.jit
def gemm_block_scaled_two_ctas_sm100(
    a_ptr, a_scales_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, out_ptr, out_scales_ptr,
    out_outer_ptr, epilogue_0_ptr, epilogue_1_ptr,
    b_outer_step, m, n, a_per_row, b_per_row, steps, row_tiles_a, row_tiles_b, col_tiles, offs_ptr,
    A_ELEMENT: gl.constexpr, B_ELEMENT: gl.constexpr, SCALE: gl.constexpr, BLOCK: gl.constexpr,
    A_OUTER: gl.constexpr, B_OUTER: gl.constexpr, BIAS: gl.constexpr, PAIR: gl.constexpr, EPILOGUE: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    PART_COLS: gl.constexpr, EVEN_BLOCKS: gl.constexpr, MAXIMA: gl.constexpr, ISA: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """Tiles [BM, BN] of out [m, n] = a [m, K] x b [n, K]^T, rescaled, plus a bias; each CTA pair computes a tile.

    The grid counts CTA pairs and is persistent: pair p takes the tiles p, p + grid, p + 2 * grid, and so on.

    out_scales, out_outer, b_outer_step, PAIR, EVEN_BLOCKS, MAXIMA: as in `block_scaled_sm100.gemm_block_scaled_sm100`.
    *_per_row: bytes of codes in a row. steps: of BK elements along K. row_tiles_*, col_tiles: tiles of 128 x 4 of the
    swizzled scales of one matrix. GROUP_M: row tiles that are scheduled together, for the L2 cache. PART_COLS: columns
    of a tile that the epilogue takes at a time.
    """
    tile_matrices: gl.constexpr = 2 if PAIR else 1
    tile_cols: gl.constexpr = BN // tile_matrices
    sources = operand_sources(
        a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, m, n, a_per_row, b_per_row, row_tiles_a, row_tiles_b, col_tiles,
        A_ELEMENT, B_ELEMENT, SCALE, BLOCK, BM, BN, BK, max(GROUPS, tile_matrices), tile_matrices,
    )  # fmt: skip
    output = outputs(out_ptr, out_scales_ptr, m, n, EPILOGUE, BM, tile_cols, PART_COLS)
    ring = operand_ring(sources, STAGES)
    sums = allocate_tensor_memory(
        gl.float32, [BM, BN], TensorMemoryLayout([BM // 2, BN], col_stride=1, cga_layout=[[1, 0]], two_ctas=True)
    )
    a_scales = allocate_tensor_memory(sources.a_scales.dtype, [BM, BK // BLOCK],
                                      TensorMemoryScalesLayout(cga_layout=[[1, 0]]))  # fmt: skip
    b_scales = allocate_tensor_memory(sources.b_scales.dtype, [BN, BK // BLOCK],
                                      TensorMemoryScalesLayout(cga_layout=[[0, 0]]))  # fmt: skip
    sums_ready = mbarrier.allocate_mbarrier()
    sums_empty = mbarrier.allocate_mbarrier(two_ctas=True)
    mbarrier.init(sums_ready, 1)
    mbarrier.init(sums_empty, 1)
    # The ring reuses the shared memory in which the descriptors were made. Without the barrier, Triton would make each
    # matrix instruction wait for both CTAs.
    fence_async_shared(cluster=True)
    gl.barrier(cluster=True)

    if GROUPS:
        walk = WalkOverGroups(offs_ptr, gl.to_tensor(m), gl.to_tensor(n), gl.to_tensor(steps), BM, BN, GROUP_M, GROUPS)
    else:
        walk = Walk(gl.to_tensor(m), gl.to_tensor(n), gl.to_tensor(steps), BM, tile_cols, GROUP_M)
    gl.warp_specialize([
        (store_tiles, (walk, sums, sums_ready, sums_empty, output, a_outer_ptr, b_outer_ptr, gl.to_tensor(b_outer_step),
                       bias_ptr, epilogue_0_ptr, epilogue_1_ptr, out_ptr, out_scales_ptr, out_outer_ptr, A_OUTER,
                       B_OUTER, BIAS, PAIR, EPILOGUE, PART_COLS, EVEN_BLOCKS, MAXIMA, ISA, GROUPS)),
        (multiply_steps, (walk, ring, sums, sums_ready, sums_empty, a_scales, b_scales, A_ELEMENT, B_ELEMENT)),
        (load_steps, (walk, ring, sources)),
    ], [1, 1], [24, 64 if GROUPS else 24])  # fmt: skip
