"""How the quantise and dequantise kernels are launched: tile sizes and warps, by format and size.

Each kernel has a frozen dataclass whose fields are the kernel's tile constants in lower case (`rows` is the constexpr
ROWS), and a function that chooses its values. The values were measured on an H200 at 8192 x 8192 bf16
(benchmarks/quantize.py).
"""

from dataclasses import dataclass, fields, replace

# A flat tensor of up to this many elements has its amax in partial maxima, one a program. They are written, not raised
# by atomics, so that nothing has to be set to 0 first.
PARTIAL_MAXIMA_ELEMENTS = 2**21
# The most partial maxima of one tensor. Every program of the quantise kernel reads all of them.
MAX_PARTIAL_MAXIMA = 128
# The longest row, in elements, that one program holds in its registers.
MAX_ROW_ON_CHIP = 32768
# The same where it holds float32 values while it finds statistics: of longer ones ptxas spills registers.
MAX_REDUCED_ROW_ON_CHIP = 16384

# By compute capability: how many programs of a multiprocessor later the one runs whose elements a program prefetches
# (`device.prefetch`), where prologues are computed. With 4, an H200 takes 48 us for a norm before NVFP4 of one level
# (8192 x 8192, by CUDA graphs), and 53 without; before rows with scales of their own 54 and 58, a gate 90 and 109. 8
# lose for norms. Tensors that are merely read, sums that are stored and second reads gain nothing. On SM100 it would
# take 2 to 5 % more instructions, and nobody has timed it.
PROGRAMS_AHEAD = {90: 4}


@dataclass(frozen=True)
class LaunchConfig:
    """How one kernel is launched. num_warps: warps of a program."""

    num_warps: int

    @property
    def constants(self) -> dict[str, int]:
        """The kernel's constexpr arguments, by the names they have there."""
        return {field.name.upper(): getattr(self, field.name) for field in fields(self) if field.name != "num_warps"}


@dataclass(frozen=True)
class RowConfig(LaunchConfig):
    """`quantize_rows`: tiles of rows x blocks; a thread loads `vectors` neighbouring runs of 16 bytes."""

    rows: int
    blocks: int
    vectors: int


@dataclass(frozen=True)
class ScaledRowConfig(LaunchConfig):
    """`quantize_scaled_rows`. on_chip: whether a tile holds whole rows. parts: programs that share a row."""

    rows: int
    blocks: int
    vectors: int
    on_chip: int
    parts: int


@dataclass(frozen=True)
class ReducedRowConfig(LaunchConfig):
    """`quantize_reduced_rows` and `row_statistics`: a program has a row of pieces * blocks blocks, or walks it."""

    rows: int
    blocks: int
    vectors: int
    pieces: int


@dataclass(frozen=True)
class AmaxConfig(LaunchConfig):
    """`tensor_amax`: tiles of rows x blocks of `block` elements."""

    rows: int
    blocks: int
    block: int


@dataclass(frozen=True)
class ColumnAmaxConfig(LaunchConfig):
    """`columns_amax`: tiles of row_tiles * block rows by 2 * words columns."""

    block: int
    row_tiles: int
    words: int


@dataclass(frozen=True)
class ColumnConfig(LaunchConfig):
    """`quantize_columns`: tiles of row_tiles blocks down the columns by 2 * words columns."""

    row_tiles: int
    words: int
    vectors: int


@dataclass(frozen=True)
class BothConfig(LaunchConfig):
    """`quantize_both`: tiles of row_tiles * DEPTH rows by 2 * col_tiles * words columns."""

    row_tiles: int
    col_tiles: int
    words: int


@dataclass(frozen=True)
class SquareConfig(LaunchConfig):
    """`quantize_squares`: tiles of row_tiles blocks by 2 * words columns. lanes: threads that share a block's rows."""

    row_tiles: int
    lanes: int
    words: int


@dataclass(frozen=True)
class DequantizeConfig(LaunchConfig):
    """`dequantize_rows`: tiles of rows x blocks."""

    rows: int
    blocks: int


def row_config(element: str, block: int, elements: int | None, isa: int = 0, prologue: bool = False) -> RowConfig:
    """For a tensor that is one row of `elements` elements (which may be symbolic), or None: for separate rows.

    A thread writes 16 bytes of codes at a time. In a small tensor it writes fewer, so that there are more threads.
    Where Hopper computes the elements (`prologue`), it writes 8 bytes: a gate takes 85 us that way, and 95 by 16 bytes.
    isa: see `Target`.
    """
    vectors = 4 if element == "e2m1" else 2
    if elements is None:
        return RowConfig(num_warps=4, rows=128, blocks=64 // block, vectors=vectors)
    if element == "e2m1":
        small = isinstance(elements, int) and elements <= 2**16
        if prologue and 90 <= isa < 100 and not small:
            return RowConfig(num_warps=4, rows=1, blocks=2048 // block, vectors=2)
        return RowConfig(num_warps=4, rows=1, blocks=(512 if small else 4096) // block, vectors=1 if small else vectors)
    return RowConfig(num_warps=4, rows=1, blocks=2048 // block, vectors=vectors)


def scaled_row_config(
    element: str, block: int, rows: int, cols: int, isa: int = 0, prologue: bool = False
) -> ScaledRowConfig:  # fmt: skip
    """For rows that each have an outer scale of their own; up to MAX_ROW_ON_CHIP elements, a row is read once.

    isa: see `Target`. Where Hopper computes the elements (`prologue`), a thread loads two runs of 16 bytes at a time: a
    gate before E2M1 codes took 87 us that way, and 91 with four; before their values 103 and 109. Before E4M3 codes it
    took 85 us with 16 elements a thread, and 89 with 32.
    """
    vectors = 4 if element == "e2m1" else 2
    width = max(2048, 1 << (max(cols, 1) - 1).bit_length())
    on_chip = width <= MAX_ROW_ON_CHIP
    if not on_chip:
        width = 16384
    elements_per_thread = 64 if element == "e2m1" or width > 8192 else 32
    if prologue and 90 <= isa < 100:
        vectors = 2
        elements_per_thread = 16 if element != "e2m1" and width <= 8192 else 64
    parts = 1
    if element == "e2m1" and on_chip and isinstance(rows, int) and rows <= 128:
        # There are fewer rows than multiprocessors, and latency decides: several programs quantise one row.
        vectors, elements_per_thread = 2, 16
        while parts * rows <= 64 and width // parts > 4096:
            parts *= 2
        elements_per_thread = max(elements_per_thread, width // parts // 512)
    return ScaledRowConfig(
        num_warps=width // parts // (32 * elements_per_thread), rows=1, blocks=width // block, vectors=vectors,
        on_chip=int(on_chip), parts=parts,
    )  # fmt: skip


def reduced_row_config(
    element: str, block: int, rows: int, cols: int, isa: int, outer: bool = False, several: bool = True,
    work: str = "all",
) -> ReducedRowConfig:  # fmt: skip
    """For rows whose statistics a kernel finds itself; up to MAX_REDUCED_ROW_ON_CHIP elements, a row is read once.

    rows, cols: of all matrices; both may be symbolic. A program walks rows that are longer. isa: see `Target`.
    A thread has 32 elements or, where there are fewer rows than multiprocessors and latency decides, 16. outer: whether
    a kernel of E2M1 codes makes an outer scale. That is the same work in each thread, so a thread then has 64.
    several: whether a row may lie in several tiles. A thread has 16 elements of each then.
    work: "statistics" and "codes" for two kernels of which the second one quantises, or "all" for one. Rows of 8192
    elements before E2M1 codes were timed on an H200 (benchmarks/producers.py). In tiles (a row's tiles, warps) of
    (4, 4) a norm took 57 us, and 60 to 63 in one tile. The statistics of a norm took 38 us and those of a norm of a sum
    92 in (4, 8), 39 and 100 in (4, 4); the codes 48 in (2, 4), 51 in (4, 4).
    """
    width = max(512, 1 << (max(cols, 1) - 1).bit_length()) if fits_on_chip(cols) else 4096
    few = isinstance(rows, int) and rows <= 128
    in_tiles = several and not few and fits_on_chip(cols)
    if in_tiles and element == "e2m1" and 90 <= isa < 100 and width >= 4096 and cols > width // 4 * 3:
        pieces, elements = {"all": (4, 16), "statistics": (4, 8), "codes": (2, 32)}[work]
        part = width // pieces
        return ReducedRowConfig(num_warps=part // (32 * elements), rows=1, blocks=part // block,
                                vectors=min(elements // 8, 2), pieces=pieces)  # fmt: skip
    if in_tiles and width >= 4096 and cols <= width // 4 * 3:
        # A tile's width is a power of two. Three or five smaller ones have fewer elements beyond the row. (Seven would
        # take nearly all registers.)
        part = width // 8 if cols <= width // 8 * 5 else width // 4
        pieces = -(-cols // part)
        return ReducedRowConfig(num_warps=part // 512, rows=1, blocks=part // block, vectors=2, pieces=pieces)
    elements = 16 if few or width < 1024 else 64 if outer and element == "e2m1" and width >= 2048 else 32
    elements = max(elements, width // 512)  # at most 16 warps
    vectors = 4 if element == "e2m1" and elements >= 32 else 2
    num_warps = width // (32 * elements)
    return ReducedRowConfig(num_warps=num_warps, rows=1, blocks=width // block, vectors=vectors, pieces=1)


def fits_on_chip(cols: int) -> bool:
    """Whether a program holds a row of so many elements, which may be symbolic, while it finds statistics."""
    return isinstance(cols, int) and cols <= MAX_REDUCED_ROW_ON_CHIP


def amax_config(elements: int | None) -> AmaxConfig:
    """For a flat tensor of `elements` elements whose programs write partial maxima, or None: they raise one maximum."""
    if elements is None:
        return AmaxConfig(num_warps=8, rows=1, blocks=512, block=32)
    width = max(2048, 1 << (-(-elements // MAX_PARTIAL_MAXIMA) - 1).bit_length())
    return AmaxConfig(num_warps=4, rows=1, blocks=width // 32, block=32)


def amax_of_rows_config(cols: int) -> AmaxConfig:
    """For rows of `cols` elements (which may be symbolic) that cannot be read as one: a tile has as few beyond them."""
    config = amax_config(None)
    whole = 1 << (-(-cols // config.block) - 1).bit_length() if isinstance(cols, int) and cols else config.blocks
    blocks = min(whole, config.blocks)
    return replace(config, rows=config.blocks // blocks, blocks=blocks)


def column_amax_config() -> ColumnAmaxConfig:
    return ColumnAmaxConfig(num_warps=4, block=16, row_tiles=8, words=64)


def column_config(element: str, block: int, both: bool) -> ColumnConfig:
    """both: whether the kernel quantises along the rows as well.

    A thread holds whole blocks of its columns. With more words a thread, loads would be 16 bytes wide, but the
    registers would suffice for fewer programs: that measured slower.
    """
    if element == "e2m1":
        return ColumnConfig(num_warps=4, row_tiles=128 // block, words=32, vectors=4)
    if both:
        return ColumnConfig(num_warps=4, row_tiles=4, words=64, vectors=2)
    return ColumnConfig(num_warps=8, row_tiles=8, words=64, vectors=2)


def both_config(element: str, prologue: bool) -> BothConfig:
    """prologue: whether elements are computed, which takes registers: smaller programs are more to a multiprocessor."""
    if element == "e2m1" or prologue:
        return BothConfig(num_warps=4, row_tiles=8, col_tiles=16, words=4)
    return BothConfig(num_warps=8, row_tiles=8, col_tiles=32, words=4)


def square_config(element: str) -> SquareConfig:
    """Lanes that share a block repeat the arithmetic of its scale."""
    if element == "e2m1":
        return SquareConfig(num_warps=4, row_tiles=4, lanes=2, words=64)
    return SquareConfig(num_warps=4, row_tiles=4, lanes=4, words=32)


def dequantize_config(block: int) -> DequantizeConfig:
    return DequantizeConfig(num_warps=4, rows=1, blocks=(4096 if block == 16 else 2048) // block)
