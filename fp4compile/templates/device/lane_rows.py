"""Load or store words in many rows of a matrix in global memory by one piece of inline PTX for each lane.

A word is two neighbouring elements (`device.elements.pack`). Word j of a lane lies in the j-th of the rows 0, 1, 8, 9,
16, 17 and so on, counted from a first row of the lane: the rows of a lane's sums after a matmul by `wgmma`.

Triton's compiler traverses the whole kernel for each load and each store: a matmul of 256 rows with an operand in its
epilogue, which has 192 of them, took 11 seconds to compile. It does not analyse inline PTX, which is ordered by tokens
here as in `device.async_copy`.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def _load_ptx(size, whole, word):
    """PTX that loads one word of `size` bytes from [a], where the predicates p and q say which elements exist."""
    if whole:
        return f"mov.b{8 * size} {word}, 0; @p ld.global.b{8 * size} {word}, [a];"
    half = 4 * size
    loads = f"@p ld.global.b{half} h, [a]; @q ld.global.b{half} k, [a + {size // 2}];"
    return f"mov.b{half} h, 0; mov.b{half} k, 0; {loads} mov.b{8 * size} {word}, {{h, k}};"


@triton.constexpr_function
def _store_ptx(size, whole, word):
    """PTX that stores one word of `size` bytes to [a], where the predicates p and q say which elements exist."""
    if whole:
        return f"@p st.global.b{8 * size} [a], {word};"
    half = 4 * size
    stores = f"@p st.global.b{half} [a], h; @q st.global.b{half} [a + {size // 2}], k;"
    return f"mov.b{8 * size} {{h, k}}, {word}; {stores}"


@triton.constexpr_function
def _rows_ptx(words, size, whole, stores):
    """PTX that loads or stores `words` words of `size` bytes of each lane, where their rows and columns exist.

    whole: every word has both its columns, and an address that is a multiple of its size.
    Inputs: the words, if it stores; the address of word 0; bytes from one row to the next; the first row that exists,
    at most 7, the row after the last one, and the column after the last one, counted from word 0; a token. Outputs: the
    words, if it loads, 0 where they do not exist; a token.
    """
    address, stride, first, rows, columns = (f"${words + 1 + i}" for i in range(5))
    text = [f"{{ .reg .pred p, q, c, d; .reg .b64 a, s; .reg .b{4 * size} h, k; mov.b64 a, {address};"]
    text.append(f"mul.lo.s64 s, {stride}, 7; setp.gt.s32 c, {columns}, 0; setp.gt.s32 d, {columns}, 1;")
    for j in range(words):
        text.append(f"setp.gt.s32 p, {rows}, {j // 2 * 8 + j % 2};")
        if j < 2:
            text.append(f"setp.le.and.s32 p, {first}, {j}, p;")
        text.append("and.pred q, p, d; and.pred p, p, c;")
        text.append(_store_ptx(size, whole, f"${j + 1}") if stores else _load_ptx(size, whole, f"${j}"))
        text.append(f"add.s64 a, a, {'s' if j % 2 else stride};")
    return " ".join([*text, f"mov.b32 ${0 if stores else words}, 0; }}"])


@triton.constexpr_function
def _rows_operands(words, size, stores):
    register = "l" if size == 8 else "r"
    outputs = ["=&r"] if stores else [f"=&{register}"] * words + ["=&r"]
    return ",".join([*outputs, *[register] * words * stores, "l,l,r,r,r,r"])


@triton.constexpr_function
def _word_types(words, size):
    return (tl.int64 if size == 8 else tl.int32,) * words + (tl.int32,)


@triton.constexpr_function
def bytes_of(ptr):
    """The number of bytes of a pointer's element type."""
    return ptr.dtype.element_ty.primitive_bitwidth // 8


@triton.jit
def load_rows(ptr, stride, rows, columns, token, SIZE: tl.constexpr, WORDS: tl.constexpr, WHOLE: tl.constexpr):
    """(A lane's WORDS words of SIZE bytes from ptr on, 0 where there is no element; a token).

    stride: bytes from one row to the next, int64. rows, columns: their numbers from ptr on. WHOLE: columns is never
    odd, and every word has an address that is a multiple of SIZE.
    """
    first = tl.zeros(token.shape, tl.int32)
    found = tl.inline_asm_elementwise(
        _rows_ptx(WORDS, SIZE, WHOLE, 0), _rows_operands(WORDS, SIZE, 0), (ptr, stride, first, rows, columns, token),
        dtype=_word_types(WORDS, SIZE), is_pure=True, pack=1,
    )  # fmt: skip
    return found[:WORDS], found[WORDS]


@triton.jit
def store_rows(ptr, words, stride, first, rows, columns, token, SIZE: tl.constexpr, WHOLE: tl.constexpr):
    """Store a lane's words of SIZE bytes from ptr on, where there are elements. Returns a token; see `load_rows`.

    first: the first row that is stored, counted from ptr on, at most 7. The stores are kept only if the token reaches
    `async_copy.keep`.
    """
    return tl.inline_asm_elementwise(
        _rows_ptx(len(words), SIZE, WHOLE, 1), _rows_operands(len(words), SIZE, 1),
        words + (ptr, stride, first, rows, columns, token), dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip
