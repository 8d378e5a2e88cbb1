"""The last step of an epilogue: the result of a product becomes the operand of the next one.

A kernel takes a part of its tile's columns at a time, in float32 (`device.epilogue`). `quantized_part` rounds it to the
result's dtype, as if it had been stored, and quantises it as the quantisers of rows do, by the same functions. A row of
a tile of the matrix unit lies in one thread, so an amax needs no other thread.

Codes leave part by part. Scale bytes are few: one for 16 or 32 elements. `store_scale_tiles` stores those of all parts
at once, because each 128 rows of 4 scales are 512 bytes in a row of the swizzled layout (`formats.layouts`).
"""

import triton
import triton.language as tl

from fp4compile.templates.device.block_codes import scale_and_encode
from fp4compile.templates.device.elements import pack, word_amax
from fp4compile.templates.device.pointwise import part_of
from fp4compile.templates.device.register_tile import log2


@triton.constexpr_function
def quantizes(EPILOGUE):
    """Whether an epilogue ends in codes."""
    return EPILOGUE.count(" | ") == 3


@triton.constexpr_function
def result_of(EPILOGUE, field):
    """A field of the last part of a text (`device.epilogue.text`): what an epilogue stores."""
    fields = ("element", "scale", "contract", "block", "outer", "dtype")
    value = part_of(EPILOGUE, 3).split()[fields.index(field)]
    return int(value) if value.isdigit() else value


@triton.constexpr_function
def dtype_of(EPILOGUE):
    """The type that an epilogue's result is rounded to before it is quantised."""
    name = result_of(EPILOGUE, "dtype")
    return tl.bfloat16 if name == "bfloat16" else tl.float16 if name == "float16" else tl.float32


@triton.constexpr_function
def unit_type(EPILOGUE):
    """The type of a unit of two codes."""
    return tl.uint8 if result_of(EPILOGUE, "element") == "e2m1" else tl.uint16


@triton.jit
def quantized_part(part, encode, decode, EPILOGUE: tl.constexpr, ISA: tl.constexpr):
    """float32 [ROWS, COLS] -> (units of two codes [ROWS, COLS / 2], scale bytes as int32 [ROWS, COLS / block]).

    encode, decode: the static outer scale and its inverse; not used without one.
    """
    block: tl.constexpr = result_of(EPILOGUE, "block")
    dtype: tl.constexpr = dtype_of(EPILOGUE)
    static: tl.constexpr = result_of(EPILOGUE, "outer") == "tensor"
    first, second = tl.split(tl.reshape(part, (part.shape[0], part.shape[1] // block, block // 2, 2)))
    words = pack(first, second, dtype, ISA)
    byte, units = scale_and_encode(
        words, word_amax(words, 2, ISA, dtype), encode, decode, static, result_of(EPILOGUE, "element"),
        result_of(EPILOGUE, "scale"), result_of(EPILOGUE, "contract"), static, False, "", dtype, ISA,
    )  # fmt: skip
    return units, byte


@triton.jit
def joined_columns(parts):
    """The inverse of `device.epilogue.column_parts`: tensors [M, N] of neighbouring columns -> [M, len(parts) * N]."""
    for _ in tl.static_range(log2(len(parts))):
        pairs = ()
        for i in tl.static_range(0, len(parts), 2):
            both = tl.permute(tl.join(parts[i], parts[i + 1]), (0, 2, 1))
            pairs = pairs + (tl.reshape(both, (both.shape[0], both.shape[1] * both.shape[2])),)
        parts = pairs
    return parts[0]


@triton.jit
def store_scale_tiles(scales_ptr, byte, batch, tile_m, tile_n, m, blocks):
    """Store the scale bytes [ROWS, COLS] of tile (tile_m, tile_n) as whole tiles of the swizzled layout.

    ROWS, COLS: multiples of 128 and of 4. m, blocks: rows of a matrix, and blocks in a row.
    """
    rows: tl.constexpr = byte.shape[0] // 128
    cols: tl.constexpr = byte.shape[1] // 4
    row_tiles = tl.cdiv(m, 128)
    col_tiles = tl.cdiv(blocks, 4)
    tiles = tl.permute(tl.reshape(byte.to(tl.uint8), (rows, 4, 32, cols, 4)), (0, 3, 2, 1, 4))
    tiles = tl.reshape(tiles, (rows, cols * 512))
    row = (tile_m * rows + tl.arange(0, rows))[:, None]
    col = tile_n * cols
    at = tl.arange(0, cols * 512)[None, :]
    mask = (row < row_tiles) & (at // 512 < col_tiles - col)
    first = ((batch.to(tl.int64) * row_tiles + row) * col_tiles + col) * 512
    tl.store(scales_ptr + (first + at), tiles, mask=mask)
