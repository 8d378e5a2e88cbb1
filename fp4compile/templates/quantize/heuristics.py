"""Launch configurations of the quantise and dequantise kernels: tile sizes and warps, by format and size.

Each kernel has a `LaunchConfig`, and a function that chooses its values. The values were measured on an H200 at
8192 x 8192 bf16 (benchmarks/quantize.py).
"""

from dataclasses import dataclass, replace

from fp4compile._compat import statically_true
from fp4compile.templates.launch import LaunchConfig

# A flat tensor of up to this many elements has its amax in partial maxima, one a program. A program stores its maximum
# without an atomic, so that nothing has to be set to 0 first.
PARTIAL_MAXIMA_ELEMENTS = 2**21
# The most partial maxima of one tensor. Every program of the quantise kernel reads all of them.
MAX_PARTIAL_MAXIMA = 128
# The longest row, in elements, that one program holds in its registers.
MAX_ROW_ON_CHIP = 32768
# The longest row, in elements, that one program holds as float32 values while it finds statistics: for longer rows
# ptxas spills registers.
MAX_REDUCED_ROW_ON_CHIP = 16384


@dataclass(frozen=True)
class WarpsConfig(LaunchConfig):
    """num_warps: warps of a program."""

    num_warps: int


@dataclass(frozen=True)
class RowConfig(WarpsConfig):
    """`quantize_rows`: tiles of rows x blocks; a thread loads `vectors` neighbouring runs of 16 bytes."""

    rows: int
    blocks: int
    vectors: int


@dataclass(frozen=True)
class ScaledRowConfig(RowConfig):
    """`quantize_scaled_rows`. on_chip: whether a tile holds whole rows. parts: programs of a row."""

    on_chip: int
    parts: int


@dataclass(frozen=True)
class ReducedRowConfig(RowConfig):
    """`quantize_reduced_rows` and `row_statistics`: a program has a row of pieces * blocks blocks, or walks it."""

    pieces: int


@dataclass(frozen=True)
class AmaxConfig(WarpsConfig):
    """`tensor_amax`: tiles of rows x blocks of `block` elements."""

    rows: int
    blocks: int
    block: int


@dataclass(frozen=True)
class ColumnAmaxConfig(WarpsConfig):
    """`columns_amax`: tiles of row_tiles * block rows by 2 * words columns."""

    block: int
    row_tiles: int
    words: int


@dataclass(frozen=True)
class ColumnConfig(WarpsConfig):
    """`quantize_columns`: tiles of row_tiles blocks down the columns by 2 * words columns."""

    row_tiles: int
    words: int
    vectors: int


@dataclass(frozen=True)
class BothConfig(WarpsConfig):
    """`quantize_both`: tiles of row_tiles * DEPTH rows by 2 * col_tiles * words columns."""

    row_tiles: int
    col_tiles: int
    words: int


@dataclass(frozen=True)
class SquareConfig(WarpsConfig):
    """`quantize_squares`: tiles of row_tiles blocks by 2 * words columns. lanes: threads that share a block's rows."""

    row_tiles: int
    lanes: int
    words: int


@dataclass(frozen=True)
class DequantizeConfig(WarpsConfig):
    """`dequantize_rows`: tiles of rows x blocks."""

    rows: int
    blocks: int


def row_config(element: str, block: int, elements: int | None, isa: int = 0, prologue: bool = False) -> RowConfig:
    """The configuration of `quantize_rows`. elements: length of a tensor that is one row (may be symbolic), else None.

    A thread writes 16 bytes of codes at a time. In a small tensor it writes fewer, so that there are more threads. If
    Hopper computes the elements (`prologue`), it writes 8 bytes: a gate takes 85 us with 8 bytes, and 95 us with 16.
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
    """The configuration for rows with an outer scale each; up to MAX_ROW_ON_CHIP elements, a row is read once.

    isa: see `Target`. If Hopper computes the elements (`prologue`), a thread loads two runs of 16 bytes at a time: a
    gate before E2M1 codes took 87 us with two runs and 91 us with four; before dequantised values 103 and 109 us.
    Before E4M3 codes a gate took 85 us with 16 elements a thread, and 89 us with 32.
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
        # There are fewer rows than multiprocessors, so latency decides: several programs quantise one row.
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
    """The configuration for rows whose statistics a kernel finds itself.

    A row of up to MAX_REDUCED_ROW_ON_CHIP elements is read once; a program walks longer rows.
    rows, cols: rows of all matrices, and columns; both may be symbolic. isa: see `Target`.
    A thread has 32 elements or, where there are fewer rows than multiprocessors and latency decides, 16. outer: whether
    a kernel of E2M1 codes makes an outer scale. Each thread repeats that work, so a thread then has 64 elements.
    several: whether a row may be cut into several tiles; a thread then has 16 elements of each.
    work: "statistics" and "codes" for two kernels of which the second one quantises, or "all" for one kernel. Rows of
    8192 elements before E2M1 codes were timed on an H200 (benchmarks/producers.py), with (tiles of a row, warps). A
    norm took 57 us with (4, 4), and 60 to 63 us in one tile. The statistics of a norm, and of a norm of a sum, took 38
    and 92 us with (4, 8), 39 and 100 us with (4, 4); the codes took 48 us with (2, 4), 51 us with (4, 4).
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
        # A tile's width is a power of two. Three or five smaller tiles have fewer elements beyond the row. (Seven tiles
        # would take nearly all registers.)
        part = width // 8 if cols <= width // 8 * 5 else width // 4
        pieces = -(-cols // part)
        return ReducedRowConfig(num_warps=part // 512, rows=1, blocks=part // block, vectors=2, pieces=pieces)
    elements = 16 if few or width < 1024 else 64 if outer and element == "e2m1" and width >= 2048 else 32
    elements = max(elements, width // 512)  # at most 16 warps
    vectors = 4 if element == "e2m1" and elements >= 32 else 2
    num_warps = width // (32 * elements)
    return ReducedRowConfig(num_warps=num_warps, rows=1, blocks=width // block, vectors=vectors, pieces=1)


def fits_on_chip(cols: int) -> bool:
    """Whether a program holds a row of `cols` elements (may be symbolic) on the chip while it finds statistics."""
    return isinstance(cols, int) and cols <= MAX_REDUCED_ROW_ON_CHIP


def amax_config(elements: int | None) -> AmaxConfig:
    """The configuration for a flat tensor of `elements` elements with partial maxima; None: with one maximum."""
    if elements is None:
        return AmaxConfig(num_warps=8, rows=1, blocks=512, block=32)
    width = max(2048, 1 << (-(-elements // MAX_PARTIAL_MAXIMA) - 1).bit_length())
    return AmaxConfig(num_warps=4, rows=1, blocks=width // 32, block=32)


def amax_of_rows_config(cols: int) -> AmaxConfig:
    """The configuration for separate rows of `cols` elements (may be symbolic), with little of a tile beyond a row."""
    config = amax_config(None)
    whole = 1 << (-(-cols // config.block) - 1).bit_length() if isinstance(cols, int) and cols else config.blocks
    blocks = min(whole, config.blocks)
    return replace(config, rows=config.blocks // blocks, blocks=blocks)


def column_amax_config() -> ColumnAmaxConfig:
    return ColumnAmaxConfig(num_warps=4, block=16, row_tiles=8, words=64)


def column_config(element: str, block: int, both: bool) -> ColumnConfig:
    """The configuration of `quantize_columns`. both: whether it quantises along the rows as well, or tiles have 128
    rows, to which groups are padded.

    A thread holds whole blocks of its columns. With more words a thread, loads would be 16 bytes wide, but registers
    would suffice for fewer programs: that was slower.
    """
    if element == "e2m1":
        return ColumnConfig(num_warps=4, row_tiles=128 // block, words=32, vectors=4)
    if both:
        return ColumnConfig(num_warps=4, row_tiles=4, words=64, vectors=2)
    return ColumnConfig(num_warps=8, row_tiles=8, words=64, vectors=2)


def both_config(element: str, more: bool) -> BothConfig:
    """The configuration of `quantize_both`.

    more: whether elements are computed, or rows of values stored. That takes more registers: small programs fit better.
    """
    if element == "e2m1" or more:
        return BothConfig(num_warps=4, row_tiles=8, col_tiles=16, words=4)
    return BothConfig(num_warps=8, row_tiles=8, col_tiles=32, words=4)


def square_config(element: str) -> SquareConfig:
    """Lanes that share a block repeat the arithmetic of its scale."""
    if element == "e2m1":
        return SquareConfig(num_warps=4, row_tiles=4, lanes=2, words=64)
    return SquareConfig(num_warps=4, row_tiles=4, lanes=4, words=32)


def dequantize_config(block: int) -> DequantizeConfig:
    return DequantizeConfig(num_warps=4, rows=1, blocks=(4096 if block == 16 else 2048) // block)


def row_config_of_groups(element: str, block: int, rows, groups: int, padded: bool) -> RowConfig:
    """The configuration for grouped rows. padded: whether each group is padded to tiles of 128 rows.

    rows: rows of all groups; a symbolic number counts as large. If groups have few rows, a tile has 16 longer rows.
    """
    config = row_config(element, block, None)
    if padded or not statically_true(rows <= 32 * groups):
        return config
    return replace(config, rows=config.rows // 8, blocks=config.blocks * 8)


def amax_of_groups_config() -> AmaxConfig:
    """Tiles of 16 rows: many tiles for a group of many rows, and few rows beyond the end of a small group."""
    return AmaxConfig(num_warps=8, rows=16, blocks=32, block=32)
