"""The last step of an epilogue: the result of a matmul becomes the operand of the next one.

A kernel takes a part of its tile's columns at a time, in float32 (`apply_epilogue`). `quantized_part` rounds it to the
result's dtype, as if it had been stored, and quantises it as the quantisers of rows do, by the same functions. A row of
a tile of the matrix unit lies in one thread, so an amax needs no other thread.

Codes are stored part by part. Scale bytes are few: one for 16 or 32 elements. `store_scale_tiles` stores the bytes of
all parts at once, because each 128 rows of 4 scales are 512 contiguous bytes of the swizzled layout.

A dynamic global scale of the operand depends on the whole result. Then the epilogue stores the rounded result, and
finds its amax: each program the amax of its tiles (`store_maximum`), or each tile raises its group's amax
(`raise_maximum`).
"""

import triton
import triton.language as tl

from fp4compile.templates.device.block_codes import scale_and_encode
from fp4compile.templates.device.elements import pack, word_amax
from fp4compile.templates.device.pointwise import part_of
from fp4compile.templates.device.register_tile import log2


@triton.constexpr_function
def quantizes(EPILOGUE):
    """Whether an epilogue quantises its result."""
    return EPILOGUE.count(" | ") == 3 and not finds_amax(EPILOGUE)


@triton.constexpr_function
def finds_amax(EPILOGUE):
    """Whether an epilogue finds the amax of its result."""
    return " | amax " in EPILOGUE


@triton.constexpr_function
def result_of(EPILOGUE, field):
    """A field of the last part of a text (`device.apply_epilogue.text`), which describes the stored result."""
    fields = ("element", "scale", "contract", "block", "outer", "dtype")
    value = part_of(EPILOGUE, 3).split()[fields.index(field)]
    return int(value) if value.isdigit() else value


@triton.constexpr_function
def dtype_of(EPILOGUE):
    """The type to which an epilogue's result is rounded before it is quantised, or before its amax is found."""
    name = EPILOGUE.split()[-1]
    return tl.bfloat16 if name == "bfloat16" else tl.float16 if name == "float16" else tl.float32


@triton.constexpr_function
def unit_type(EPILOGUE):
    """The type of a unit of two codes."""
    return tl.uint8 if result_of(EPILOGUE, "element") == "e2m1" else tl.uint16


@triton.jit
def quantized_part(part, encode, decode, EPILOGUE: tl.constexpr, ISA: tl.constexpr):
    """float32 [ROWS, COLS] -> (units of two codes [ROWS, COLS / 2], scale bytes as int32 [ROWS, COLS / block]).

    encode, decode: the static global scale and its inverse; not used without one.
    """
    block: tl.constexpr = result_of(EPILOGUE, "block")
    dtype: tl.constexpr = dtype_of(EPILOGUE)
    static: tl.constexpr = result_of(EPILOGUE, "outer") == "tensor"
    first, second = tl.split(tl.reshape(part, (part.shape[0], part.shape[1] // block, block // 2, 2)))
    words = pack(first, second, dtype, ISA)
    byte, units = scale_and_encode(
        words, word_amax(words, 2, ISA, dtype), encode, decode, static, result_of(EPILOGUE, "element"),
        result_of(EPILOGUE, "scale"), result_of(EPILOGUE, "contract"), static, False, dtype, ISA,
    )  # fmt: skip
    return units, byte


@triton.jit
def joined_columns(parts):
    """The inverse of `column_parts`: tensors [M, N] of neighbouring columns -> [M, len(parts) * N]."""
    for _ in tl.static_range(log2(len(parts))):
        pairs = ()
        for i in tl.static_range(0, len(parts), 2):
            both = tl.permute(tl.join(parts[i], parts[i + 1]), (0, 2, 1))
            pairs = pairs + (tl.reshape(both, (both.shape[0], both.shape[1] * both.shape[2])),)
        parts = pairs
    return parts[0]


@triton.jit
def store_scale_tiles(scales_ptr, byte, batch, tile_m, tile_n, m, blocks):
    """Store the scale bytes [128, COLS] (int32) of tile (tile_m, tile_n) as whole tiles of the swizzled layout.

    COLS: a multiple of 4. m, blocks: rows of a matrix, and blocks in a row. The matrix has rows of the tile. Four bytes
    of a row are a word, so that even a tile with few scales is stored by words.
    """
    cols: tl.constexpr = byte.shape[1] // 4
    shift = 8 * tl.arange(0, 4)[None, None, :]
    words = tl.sum(tl.reshape(byte, (128, cols, 4)) << shift, 2)
    words = tl.reshape(tl.permute(tl.reshape(words, (4, 32, cols)), (2, 1, 0)), (cols * 128,))
    col_tiles = tl.cdiv(blocks, 4)
    col = tile_n * cols
    first = ((batch.to(tl.int64) * tl.cdiv(m, 128) + tile_m) * col_tiles + col) * 128
    at = tl.arange(0, cols * 128)
    ptr = scales_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(ptr + (first + at), words, mask=at // 128 < col_tiles - col)


@triton.jit
def amax_of_part(part, EPILOGUE: tl.constexpr, ISA: tl.constexpr):
    """float32 [ROWS, COLS] -> bits of the largest magnitudes of half rows after they are rounded, int32 [ROWS, 2].

    A thread has half of a part's row.
    """
    dtype: tl.constexpr = dtype_of(EPILOGUE)
    first, second = tl.split(tl.reshape(part, (part.shape[0], part.shape[1] // 2, 2)))
    words = tl.reshape(pack(first, second, dtype, ISA), (part.shape[0], 2, part.shape[1] // 4))
    return word_amax(words, 2, ISA, dtype)


@triton.jit
def store_maximum(maxima_ptr, amax, COUNT: tl.constexpr):
    """Store the largest of amax, bits of magnitudes, int32 [ROWS, 2], as the program's entry of COUNT int32.

    The first program stores 0 to the entries that have no program.
    """
    at = tl.arange(0, COUNT)
    absent = tl.where(tl.program_id(0) == 0, tl.num_programs(0), COUNT)  # the first entry without a program
    tl.store(maxima_ptr + at, tl.zeros((COUNT,), tl.int32), mask=at >= absent)
    tl.store(maxima_ptr + tl.program_id(0), tl.max(tl.max(amax, 1), 0))


@triton.jit
def raise_maximum(maximum_ptr, amax):
    """Raise an int32 to the largest of amax, bits of magnitudes, int32 [128, 2].

    A warp has 32 rows, and raises the number separately: in a partition of warps, Triton 3.6 cannot compile a reduction
    for which warps wait for each other. The addresses do not depend on amax, or torch would count the tensors of which
    amax is made as written.
    """
    of_warps = tl.max(tl.reshape(amax, (4, 32, 2)), 1)
    tl.atomic_max(maximum_ptr + tl.zeros((4, 2), tl.int32), of_warps, sem="relaxed")
