"""NVFP4 weights whose rows are contracted: from shared memory to the registers of a transposed `wgmma` operand.

The gradient of a layer's input contracts the rows of the weights. The copies to shared memory are those of the forward
product: a warp copies 16 rows times 128 columns (`nvfp4_weights.copy_weights`). But the operand of a warp is 16 columns
times all rows of a step, so every warp reads from the buffers of all eight warps.

`ldmatrix.trans` transposes matrices of 16-bit elements, and here an element is four codes of one row. Of eight rows
times 32 columns, lane 4 * g + q gets the codes of columns 4g to 4g + 3 in rows 2q and 2q + 1. The order of columns may
be any, because it is only the order of the result's columns. So two neighbouring warps, or two parts of one warp, share
32 columns: the first has columns 4g and 4g + 1 of each lane, the second 4g + 2 and 4g + 3.

A register has two rows of one column, each with a scale of its own. A warp needs 256 scales a step, and a lane converts
four pairs of them, which the other lanes get by `shfl`.
"""

import triton
import triton.language as tl

from fp4compile.templates.device.nvfp4_weights import (
    CODES_LOWER,
    CODES_ROW,
    SCALES,
    SCALES_ROW,
    STEP_BYTES,
    dequantize_word,
    scale_pair,
)


def dequantize_columns(kind: str, pair: int) -> str:
    """PTX that dequantises the words of two blocks of 16 rows, w{i} to r{i}_0 to r{i}_3 for i = 2 * pair and the next.

    x{pair}: the scales that the lane has of these blocks.
    kind: f16x2 or bf16x2. Register 0 has rows 2q and 2q + 1 of the lane's first column, and register 1 of its second
    column; 2 and 3 have rows 2q + 8 and 2q + 9: as `wgmma` takes them. Needs registers u, v, h, k, f, g, s, t, and z
    with two halves of -0.
    """
    # The other lanes of a half warp: the immediate replaces bits 2 and 3 of the lane's number.
    lanes = "0x131F, 0xFFFFFFFF"
    text = [scale_pair(kind, f"x{pair}")]
    for block in range(2):
        r = f"r{2 * pair + block}_"
        text += [f".reg .b32 {r}<4>;", dequantize_word(kind, f"w{2 * pair + block}", r)]
        text += [f"shfl.sync.idx.b32 {x}, x{pair}, {8 * block + 4 * half}, {lanes};" for half, x in enumerate("st")]
        for j in range(4):
            product = f"{r}{j}, {r}{j}, {'st'[j // 2]}"
            text.append(f"mul.rn.f16x2 {product};" if kind == "f16x2" else f"fma.rn.bf16x2 {product}, z;")
    return " ".join(text)


@triton.constexpr_function
def _read_ptx(parts):
    """PTX that reads a lane's codes and scales of a step.

    Outputs: a word of codes for each block of 16 rows; for each pair of blocks two scale bytes, of two rows of the
    first block in the lower eight lanes of each half warp, and of the second block in its upper lanes; a token. Inputs:
    the address of the lane's row of a matrix of codes; the addresses of the scales of the lane's two rows; a `prmt`
    selector of two scale bytes, and one of the codes of a lane's two columns; a token.
    """
    text = ["{ .reg .b32 e, f, x<4>; mov.b32 $12, 0;"]
    for pair in range(4):
        at = 2 * pair * parts * STEP_BYTES.value
        text.append(
            f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{x0, x1, x2, x3}}, [$13 + {at}];"
            f" prmt.b32 ${2 * pair}, x0, x1, $17; prmt.b32 ${2 * pair + 1}, x2, x3, $17;"
            f" ld.shared.b32 e, [$14 + {at}]; ld.shared.b32 f, [$15 + {at}]; prmt.b32 ${8 + pair}, e, f, $16;"
        )
    return " ".join(text) + " }"


_READ_OPERANDS = tl.constexpr(",".join(["=&r"] * 13 + ["r"] * 6))


@triton.jit
def read_transposed_weights(buffer, part: tl.constexpr, token, lane, PARTS: tl.constexpr):
    """A lane's codes and scales of a step that has arrived: (the outputs of `_read_ptx` without its token, token).

    buffer: of this warp; those of the other warps lie before and behind it. part: which 16 columns of the warp.
    """
    in_warp = lane % 32
    sixteenth = lane // 32 * PARTS + part  # which 16 columns of the program
    unit = sixteenth // 2 % 4  # which 16 bytes of codes of a row
    first = buffer + (sixteenth // 8 - lane // 32 * PARTS) * STEP_BYTES
    # Eight lanes each have the rows of a matrix: rows 0 to 7 and 8 to 15 of a block, and those of the next block.
    row = in_warp % 8
    odd = in_warp // 8 % 2
    codes = first + in_warp // 16 * (PARTS * STEP_BYTES) + odd * CODES_LOWER
    codes += row * CODES_ROW + (unit ^ row // 2) * 16
    # Eight lanes each have the pairs of rows of a block, and those of the next block, for one of two blocks of columns.
    # Lanes of the next block read the two rows in the other order, so that they read other banks.
    scales = first + odd * (PARTS * STEP_BYTES + SCALES_ROW) + SCALES + row * (2 * SCALES_ROW) + unit // 2 * 4
    second = scales + SCALES_ROW * (1 - 2 * odd)
    byte = unit % 2 * 2 + in_warp // 16
    of_scales = byte * 17 + (4 << (1 - odd) * 4)
    of_codes = 0x6240 + sixteenth % 2 * 0x1111
    found = tl.inline_asm_elementwise(
        _read_ptx(PARTS), _READ_OPERANDS, (codes, scales, second, of_scales, of_codes, token),
        dtype=(tl.int32,) * 13, is_pure=True, pack=1,
    )  # fmt: skip
    return found[0:12], found[12]


@triton.jit
def column_of(lane, i, COUNT: tl.constexpr, PARTS: tl.constexpr):
    """The column of the program that a lane's i-th sum belongs to. COUNT: sums of a part."""
    sixteenth = lane // 32 * PARTS + i // COUNT
    return sixteenth // 2 * 32 + sixteenth % 2 * 2 + lane % 32 // 4 * 4 + i % 4 // 2
