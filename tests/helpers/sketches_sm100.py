"""Block-scaled products of NVFP4 for SM100 that differ in how their loop is fed: what the gate's rules are tried on."""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def _scales(ptr, tile, col, col_tiles, ROWS: tl.constexpr, COLS: tl.constexpr, BY_POINTER: tl.constexpr):
    """Scales [ROWS, COLS] of the swizzled layout. BY_POINTER: cast the pointer, not what is loaded."""
    if BY_POINTER:
        ptr = ptr.to(tl.pointer_type(tl.float8e4nv))
    row = tile + tl.arange(0, ROWS // 128)[:, None]
    byte = col * 512 + tl.arange(0, COLS // 4 * 512)[None, :]
    scales = tl.load(ptr + row * col_tiles * 512 + byte)
    scales = tl.reshape(scales, (ROWS // 128, COLS // 4, 32, 4, 4))
    scales = tl.reshape(tl.permute(scales, (0, 3, 2, 1, 4)), (ROWS, COLS))
    if not BY_POINTER:
        scales = scales.to(tl.float8e4nv, bitcast=True)
    return scales


@triton.jit
def by_pointers(
    a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, out_ptr, n, per_row, col_tiles, steps,
    BY_POINTER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of 128 x 128. Loads of pointers, by the warps that issue the products.

    BY_POINTER: scales reach tensor memory by themselves, and a step waits for the product before its own. Otherwise
    they pass registers, and each step waits for its product.
    """
    row = tl.program_id(0) * 128 + tl.arange(0, 128)[:, None]
    col = tl.program_id(1) * 128 + tl.arange(0, 128)[:, None]
    byte = tl.arange(0, 128)[None, :]
    acc = tl.zeros((128, 128), tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        a = tl.load(a_ptr + row * per_row + step * 128 + byte)
        b = tl.load(b_ptr + col * per_row + step * 128 + byte)
        a_scales = _scales(a_scales_ptr, tl.program_id(0), step * 4, col_tiles, 128, 16, BY_POINTER)
        b_scales = _scales(b_scales_ptr, tl.program_id(1), step * 4, col_tiles, 128, 16, BY_POINTER)
        acc = tl.dot_scaled(a, a_scales, "e2m1", tl.trans(b), b_scales, "e2m1", acc)
    tl.store(out_ptr + row * n + tl.reshape(col, (1, 128)), acc.to(tl.bfloat16))


@triton.jit
def by_descriptors(
    a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, out_ptr, m, n, per_row, col_tiles, steps, SPECIALIZED: tl.constexpr
):
    """Tiles of 128 x 128, one after the other, by TMA. SPECIALIZED: partitions of warps load, multiply and store."""
    a_rows = tl.make_tensor_descriptor(a_ptr, [m, per_row], [per_row, 1], [128, 128])
    b_rows = tl.make_tensor_descriptor(b_ptr, [n, per_row], [per_row, 1], [128, 128])
    a_tiles = tl.make_tensor_descriptor(a_scales_ptr.to(tl.pointer_type(tl.float8e4nv)), [m // 128, col_tiles, 2, 256],
                                        [col_tiles * 512, 512, 256, 1], [1, 4, 2, 256])  # fmt: skip
    b_tiles = tl.make_tensor_descriptor(b_scales_ptr.to(tl.pointer_type(tl.float8e4nv)), [n // 128, col_tiles, 2, 256],
                                        [col_tiles * 512, 512, 256, 1], [1, 4, 2, 256])  # fmt: skip
    out = tl.make_tensor_descriptor(out_ptr, [m, n], [n, 1], [128, 128])
    tiles_m = m // 128
    for tile in tl.range(
        tl.program_id(0), tiles_m * (n // 128), tl.num_programs(0), flatten=SPECIALIZED, warp_specialize=SPECIALIZED,
        disallow_acc_multi_buffer=True,
    ):  # fmt: skip
        tile_m, tile_n = tile % tiles_m, tile // tiles_m
        acc = tl.zeros((128, 128), tl.float32)
        for step in tl.range(0, steps, disallow_acc_multi_buffer=True):
            a = a_rows.load([tile_m * 128, step * 128])
            b = b_rows.load([tile_n * 128, step * 128])
            a_scales = tl.reshape(a_tiles.load([tile_m, step * 4, 0, 0]), (1, 4, 32, 4, 4))
            b_scales = tl.reshape(b_tiles.load([tile_n, step * 4, 0, 0]), (1, 4, 32, 4, 4))
            a_scales = tl.reshape(tl.permute(a_scales, (0, 3, 2, 1, 4)), (128, 16))
            b_scales = tl.reshape(tl.permute(b_scales, (0, 3, 2, 1, 4)), (128, 16))
            acc = tl.dot_scaled(a, a_scales, "e2m1", b.T, b_scales, "e2m1", acc)
        out.store([tile_m * 128, tile_n * 128], acc.to(tl.bfloat16))


def compiled(kernel, num_stages=3, **constants):
    """A sketch, compiled for SM100."""
    names = kernel.arg_names
    types = {"out_ptr": "*bf16"}
    signature = {name: "constexpr" if name in constants else types.get(name, "*u8" if name.endswith("ptr") else "i32")
                 for name in names}  # fmt: skip
    whole = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in constants}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, whole)
    return triton.compile(source, target=GPUTarget("cuda", 100, 32), options={"num_warps": 4, "num_stages": num_stages})
