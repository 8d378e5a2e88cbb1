"""The Gluon kernel of `gemm.block_scaled_two_ctas_sm100`. Import it only where `_compat.two_cta_products()` holds.

Functions of Gluon name the layout of each tensor. `cga_layout` says how a tensor is divided between the two CTAs of a
pair: [1, 0] gives each CTA half of the rows, [0, 0] gives both CTAs everything.

Three partitions of warps wait for each other at mbarriers:
- `ready` of a stage: the copies of both CTAs have arrived. It lies in the first CTA, which issues the products of both.
- `empty` of a stage: the products that read it are done. Each CTA has its own, and the tensor pipe arrives at both.
- `sums_ready`: the last product of a tile is done. Each CTA has its own, as above.
- `sums_empty`: the epilogues of both CTAs have read the sums. It lies in the first CTA.
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

from fp4compile.templates.device.block_scaled_tile import codes_in, loaded_type
from fp4compile.templates.device.epilogue import epilogue, factor_of_rows, rescale_columns, rescale_mode, stored
from fp4compile.templates.device.groups import ends_of_lanes, group_of_tile, per_lane
from fp4compile.templates.device.persistent_grid import grouped_tile


@gluon.aggregate
class Tile:
    """A tile of the result from (row, col) on."""

    row: gl.tensor
    col: gl.tensor

    @gluon.jit
    def b_row(self):
        """Its first row of B."""
        return self.col

    @gluon.jit
    def a_scales(self):
        """Its first 128 rows of the scales of A, counted in 128 rows."""
        return self.row // 128

    @gluon.jit
    def b_scales(self):
        """Its first 128 rows of the scales of B, counted in 128 rows."""
        return self.col // 128


@gluon.aggregate
class Walk:
    """The result [m, n], the tiles [BM, BN] of it that pairs take in turn, and how many steps along K each tile has."""

    m: gl.tensor
    n: gl.tensor
    steps: gl.tensor
    BM: gl.constexpr
    BN: gl.constexpr
    GROUP_M: gl.constexpr

    @gluon.jit
    def tiles(self):
        """How many tiles there are."""
        return gl.cdiv(self.m, self.BM) * gl.cdiv(self.n, self.BN)

    @gluon.jit
    def tile(self, number):
        """A tile by its number."""
        tile_m, tile_n = grouped_tile(number, gl.cdiv(self.m, self.BM), gl.cdiv(self.n, self.BN), self.GROUP_M)
        return Tile(tile_m * self.BM, tile_n * self.BN)


@gluon.aggregate
class TileOfGroup:
    """A tile of a group from (row, col) on; rows from `end` on are another group's. n: rows of each matrix of B.

    scales: its first 128 rows of the scales of A, counted in 128 rows: each group's begin at whole 128 rows.
    """

    row: gl.tensor
    col: gl.tensor
    end: gl.tensor
    group: gl.tensor
    scales: gl.tensor
    n: gl.tensor

    @gluon.jit
    def b_row(self):
        """Its first row of all matrices of B."""
        return self.group * self.n + self.col

    @gluon.jit
    def a_scales(self):
        """Its first 128 rows of the scales of A, counted in 128 rows."""
        return self.scales

    @gluon.jit
    def b_scales(self):
        """Its first 128 rows of the scales of all matrices of B, counted in 128 rows."""
        return self.group * gl.cdiv(self.n, 128) + self.col // 128


@gluon.aggregate
class WalkOverGroups:
    """A `Walk` over the rows of groups, each of which begins a new tile and has a matrix [n, K] of B.

    offs_ptr: where the groups end, int32 [GROUPS]. Every warp finds the group of a tile for itself, as it comes to it
    (`device.groups`): so partitions need no barrier, and no registers for what the others know.
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
        """(before, offs), as the functions of `device.groups` take them."""
        each: gl.constexpr = per_lane(self.GROUPS)
        lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0], [[0]]))
        loaded = ()
        for i in gl.static_range(2 * each):
            group = (lane - 1) * each + i
            mask = (group >= 0) & (group < self.GROUPS)
            loaded = loaded + (gl.load(self.offs_ptr + group, mask=mask, other=0),)
        return loaded[:each], loaded[each:]

    @gluon.jit
    def end(self):
        """(the row behind the last group, how many tiles of BM rows all groups have)."""
        before, offs = self.offsets()
        ends, after = ends_of_lanes(before, offs, self.m, self.BM)
        return gl.max(ends[len(ends) - 1], 0), gl.max(after[len(after) - 1], 0)

    @gluon.jit
    def tiles(self):
        """How many tiles all groups have."""
        _, tiles_m = self.end()
        return tiles_m * gl.cdiv(self.n, self.BN)

    @gluon.jit
    def tile(self, number):
        """A tile by its number."""
        before, offs = self.offsets()
        _, after = ends_of_lanes(before, offs, self.m, self.BM)
        _, scales = ends_of_lanes(before, offs, self.m, 128)
        tiles_m = gl.max(after[len(after) - 1], 0)
        tile_m, tile_n = grouped_tile(number, tiles_m, gl.cdiv(self.n, self.BN), self.GROUP_M)
        group, start, end, row = group_of_tile(before, offs, self.m, tile_m, self.BM, self.GROUPS)
        passed = scales[0] * 0
        for i in gl.static_range(len(after)):
            passed = gl.maximum(passed, gl.where(after[i] <= tile_m, scales[i], 0))
        first = gl.max(passed, 0) + (row - start) // 128
        return TileOfGroup(row, tile_n * self.BN, end, group, first, self.n)


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
def load_steps(walk, ring, a_source, b_source, a_scale_source, b_scale_source):
    """Copy the operands of all steps to the ring, as its stages become empty.

    Each CTA copies half of A, half of B, and the scales of its half of A. Both need all scales of B, so the first CTA
    copies these for both.
    """
    nbytes: gl.constexpr = (a_source.nbytes_per_cta + b_source.nbytes_per_cta + a_scale_source.nbytes_per_cta
                            + b_scale_source.nbytes_per_cta)  # fmt: skip
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for tile in range(gl.program_id(0), walk.tiles(), gl.num_programs(0)):
        at = walk.tile(tile)
        for step in range(walk.steps):
            mbarrier.wait(ring.empty.index(stage), phase)
            ready = ring.ready.index(stage)
            mbarrier.expect(ready, nbytes)
            col_tile = step * a_scale_source.block_shape[1]
            tma.async_load(a_source, [at.row, step * a_source.block_shape[1]], ready, ring.a.index(stage))
            tma.async_load(b_source, [at.b_row(), step * b_source.block_shape[1]], ready, ring.b.index(stage))
            tma.async_load(a_scale_source, [at.a_scales(), col_tile, 0, 0], ready, ring.a_scales.index(stage))
            tma.async_load(b_scale_source, [at.b_scales(), col_tile, 0, 0], ready, ring.b_scales.index(stage),
                           multicast=True)  # fmt: skip
            stage, phase = ring.after(stage, phase)


@gluon.jit
def copy_scales(tiles, target):
    """Copy swizzled scales from shared memory, [row tiles, column tiles, 2, 256], to tensor memory."""
    row_tiles: gl.constexpr = tiles.shape[0]
    col_tiles: gl.constexpr = tiles.shape[1]
    tiles = tiles.reshape((row_tiles, col_tiles, 32, 4, 4)).permute((0, 3, 2, 1, 4))
    tcgen05_copy(tiles.reshape((row_tiles * 128, col_tiles * 4)), target)


@gluon.jit
def multiply_steps(walk, ring, sums, sums_ready, sums_empty, a_scales, b_scales, A_ELEMENT: gl.constexpr,
                   B_ELEMENT: gl.constexpr):  # fmt: skip
    """Multiply the operands of all steps, as they arrive. a_scales, b_scales: tensor memory for the scales of a step.

    Copies to tensor memory and products are executed in order, so one place for scales is enough.
    """
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    sums_phase = gl.to_tensor(1)
    for _ in range(gl.program_id(0), walk.tiles(), gl.num_programs(0)):
        mbarrier.wait(sums_empty, sums_phase)
        for step in range(walk.steps):
            mbarrier.wait(ring.ready.index(stage), phase)
            copy_scales(ring.a_scales.index(stage), a_scales)
            copy_scales(ring.b_scales.index(stage), b_scales)
            tcgen05_mma_scaled(
                ring.a.index(stage), ring.b.index(stage).permute((1, 0)), sums, a_scales, b_scales, A_ELEMENT,
                B_ELEMENT, use_acc=step > 0, multicast=True, mbarriers=[ring.empty.index(stage)],
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
def store_tiles(
    walk, sums, sums_ready, sums_empty, target, buffers, a_outer_ptr, b_outer_ptr, bias_ptr, epilogue_0_ptr,
    epilogue_1_ptr, out_ptr,
    A_OUTER: gl.constexpr, B_OUTER: gl.constexpr, BIAS: gl.constexpr, EPILOGUE: gl.constexpr, ISA: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """Rescale the sums of all tiles, apply the epilogue, and store the result.

    Registers hold all sums of a tile, so that the products of the next tile need not wait for the epilogue. It takes a
    part of the columns at a time. TMA stores the parts from two buffers in turn: it stores one while the epilogue
    computes the next one.
    """
    part_cols: gl.constexpr = buffers.shape[2]
    parts: gl.constexpr = walk.BN // part_cols
    layout: gl.constexpr = sums.slice(0, part_cols).get_reg_layout()
    m = walk.m
    n = walk.n
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), walk.tiles(), gl.num_programs(0)):
        at = walk.tile(tile)
        row0 = at.row
        rows = gl.arange(0, walk.BM, layout=gl.SliceLayout(1, layout))[:, None]
        cols = gl.arange(0, part_cols, layout=gl.SliceLayout(0, layout))[None, :]
        a_outer = a_outer_ptr
        b_outer = b_outer_ptr
        here = target
        if GROUPS:
            if A_OUTER == "group":
                a_outer = a_outer_ptr + at.group
            if B_OUTER == "group":
                b_outer = b_outer_ptr + at.group
            elif B_OUTER == "row":
                b_outer = b_outer_ptr + at.group * n
            tma.store_wait(0)
            here = tma.make_tensor_descriptor(out_ptr, [at.end, n], [n, 1], [walk.BM, part_cols], target.layout)
        factor = factor_of_rows(row0 + rows, m, 0, a_outer, b_outer, rescale_mode(A_OUTER), rescale_mode(B_OUTER))
        mbarrier.wait(sums_ready, phase)
        phase = phase ^ 1
        loaded = ()
        for i in gl.static_range(parts):
            loaded = loaded + (sums.slice(i * part_cols, part_cols).load(layout),)
        mbarrier.arrive(sums_empty)
        for i in gl.static_range(parts):
            col0 = at.col + i * part_cols
            col = col0 + cols
            first = row0.to(gl.int64) * n + col0
            part = rescale_columns(loaded[i], factor, col, n, 0, b_outer, bias_ptr, rescale_mode(A_OUTER),
                                   rescale_mode(B_OUTER), BIAS, False)  # fmt: skip
            part = epilogue(part, rows * n + cols, col, (row0 + rows < m) & (col < n), n, epilogue_0_ptr,
                            epilogue_1_ptr, EPILOGUE, ISA, None, first)  # fmt: skip
            buffer = buffers.index(i % 2)
            tma.store_wait(1)
            buffer.store(stored(part, out_ptr, ISA))
            fence_async_shared()
            tma.async_store(here, [row0, col0], buffer)
    tma.store_wait(0)
    if GROUPS:
        clear_rows(walk, target, buffers.index(0), layout)


@gluon.jit
def gemm_block_scaled_two_ctas_sm100(
    a_ptr, a_scales_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, out_ptr,
    epilogue_0_ptr, epilogue_1_ptr, m, n, a_per_row, b_per_row, steps, row_tiles_a, row_tiles_b, col_tiles,
    offs_ptr, A_ELEMENT: gl.constexpr, B_ELEMENT: gl.constexpr, SCALE: gl.constexpr, BLOCK: gl.constexpr,
    A_OUTER: gl.constexpr, B_OUTER: gl.constexpr, BIAS: gl.constexpr, EPILOGUE: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    PART_COLS: gl.constexpr, ISA: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Tiles [BM, BN] of out [m, n] = a [m, K] x b [n, K]^T, rescaled, plus a bias; pairs of CTAs compute a tile each.

    The grid counts pairs and is persistent: pair p takes the tiles p, p + grid, p + 2 * grid, and so on.

    *_per_row: bytes of codes in a row. steps: of BK elements along K. row_tiles_*, col_tiles: tiles of 128 x 4 of the
    swizzled scales. GROUP_M: row tiles that are walked together, for the L2 cache. PART_COLS: columns of a tile that
    the epilogue takes at a time.
    """
    a_bytes: gl.constexpr = codes_in(BK, A_ELEMENT)
    b_bytes: gl.constexpr = codes_in(BK, B_ELEMENT)
    scale_cols: gl.constexpr = BK // BLOCK
    # TMA spreads FP4 codes beside FP8 codes to a byte each.
    a_layout: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2, fp4_padded=a_bytes < b_bytes, cga_layout=[[1, 0]])
    b_layout: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2, fp4_padded=b_bytes < a_bytes, cga_layout=[[1, 0]])
    a_scale_layout: gl.constexpr = gl.NVMMASharedLayout(0, 8, 4, cga_layout=[[1, 0, 0, 0]])
    b_scale_layout: gl.constexpr = gl.NVMMASharedLayout(0, 8, 4, cga_layout=[[0, 0, 0, 0]])
    out_layout: gl.constexpr = gl.NVMMASharedLayout(128, out_ptr.dtype.element_ty.primitive_bitwidth, 2,
                                                    cga_layout=[[1, 0]])  # fmt: skip

    a_ptr = a_ptr.to(gl.pointer_type(loaded_type(A_ELEMENT)), bitcast=True)
    b_ptr = b_ptr.to(gl.pointer_type(loaded_type(B_ELEMENT)), bitcast=True)
    a_scales_ptr = a_scales_ptr.to(gl.pointer_type(loaded_type(SCALE)), bitcast=True)
    b_scales_ptr = b_scales_ptr.to(gl.pointer_type(loaded_type(SCALE)), bitcast=True)
    a_source = tma.make_tensor_descriptor(a_ptr, [m, a_per_row], [a_per_row, 1], [BM, a_bytes], a_layout)
    matrices: gl.constexpr = max(GROUPS, 1)
    b_source = tma.make_tensor_descriptor(b_ptr, [matrices * n, b_per_row], [b_per_row, 1], [BN, b_bytes], b_layout)
    a_scale_source = tma.make_tensor_descriptor(
        a_scales_ptr, [row_tiles_a, col_tiles, 2, 256], [col_tiles * 512, 512, 256, 1],
        [BM // 128, scale_cols // 4, 2, 256], a_scale_layout,
    )  # fmt: skip
    b_scale_source = tma.make_tensor_descriptor(
        b_scales_ptr, [matrices * row_tiles_b, col_tiles, 2, 256], [col_tiles * 512, 512, 256, 1],
        [BN // 128, scale_cols // 4, 2, 256], b_scale_layout,
    )  # fmt: skip
    target = tma.make_tensor_descriptor(out_ptr, [m, n], [n, 1], [BM, PART_COLS], out_layout)

    ring = Ring(
        gl.allocate_shared_memory(a_source.dtype, [STAGES, BM, a_bytes], a_layout),
        gl.allocate_shared_memory(b_source.dtype, [STAGES, BN, b_bytes], b_layout),
        gl.allocate_shared_memory(a_scale_source.dtype, [STAGES, BM // 128, scale_cols // 4, 2, 256], a_scale_layout),
        gl.allocate_shared_memory(b_scale_source.dtype, [STAGES, BN // 128, scale_cols // 4, 2, 256], b_scale_layout),
        mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=True),
        mbarrier.allocate_mbarrier(batch=STAGES),
    )
    buffers = gl.allocate_shared_memory(target.dtype, [2, BM, PART_COLS], out_layout)
    sums = allocate_tensor_memory(
        gl.float32, [BM, BN], TensorMemoryLayout([BM // 2, BN], col_stride=1, cga_layout=[[1, 0]], two_ctas=True)
    )
    a_scales = allocate_tensor_memory(a_scale_source.dtype, [BM, scale_cols],
                                      TensorMemoryScalesLayout(cga_layout=[[1, 0]]))  # fmt: skip
    b_scales = allocate_tensor_memory(b_scale_source.dtype, [BN, scale_cols],
                                      TensorMemoryScalesLayout(cga_layout=[[0, 0]]))  # fmt: skip
    sums_ready = mbarrier.allocate_mbarrier()
    sums_empty = mbarrier.allocate_mbarrier(two_ctas=True)
    for i in gl.static_range(STAGES):
        mbarrier.init(ring.ready.index(i), 1)
        mbarrier.init(ring.empty.index(i), 1)
    mbarrier.init(sums_ready, 1)
    mbarrier.init(sums_empty, 1)
    # The descriptors were made in shared memory that the ring takes over. Without the barrier, Triton would make each
    # product wait for both CTAs.
    fence_async_shared(cluster=True)
    gl.barrier(cluster=True)

    if GROUPS:
        walk = WalkOverGroups(offs_ptr, gl.to_tensor(m), gl.to_tensor(n), gl.to_tensor(steps), BM, BN, GROUP_M, GROUPS)
    else:
        walk = Walk(gl.to_tensor(m), gl.to_tensor(n), gl.to_tensor(steps), BM, BN, GROUP_M)
    gl.warp_specialize([
        (store_tiles, (walk, sums, sums_ready, sums_empty, target, buffers, a_outer_ptr, b_outer_ptr, bias_ptr,
                       epilogue_0_ptr, epilogue_1_ptr, out_ptr, A_OUTER, B_OUTER, BIAS, EPILOGUE, ISA, GROUPS)),
        (multiply_steps, (walk, ring, sums, sums_ready, sums_empty, a_scales, b_scales, A_ELEMENT, B_ELEMENT)),
        (load_steps, (walk, ring, a_source, b_source, a_scale_source, b_scale_source)),
    ], [1, 1], [24, 64 if GROUPS else 24])  # fmt: skip
