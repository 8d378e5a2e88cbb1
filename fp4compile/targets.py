"""What a GPU can do, and how the quantise kernels are launched on it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A CUDA compute capability, 90 for 9.0; 0 stands for Triton's interpreter."""

    sm: int

    @property
    def block_scaled_matrix_units(self) -> bool:
        """Whether the matrix units multiply NVFP4 and MX operands."""
        return self.sm >= 100

    @property
    def float8_matrix_units(self) -> bool:
        """Whether the matrix units multiply FP8 operands."""
        return self.sm >= 89

    @property
    def dependent_launch(self) -> bool:
        """Whether a kernel can start before the one before it is done; see `templates.device.dependent_launch`."""
        return self.sm >= 90

    @property
    def shared_memory(self) -> int:
        """Bytes that a program can have, at most."""
        if self.sm < 80 or self.sm in (86, 89, 120, 121):
            return 99 * 1024
        return 163 * 1024 if self.sm < 90 else 227 * 1024

    @property
    def isa(self) -> int:
        """Which form of the device functions of `templates.device.elements` the GPU runs: 0, 90, 100 or 120."""
        if self.sm >= 100:
            return 120 if self.sm >= 120 else 100
        return 90 if self.sm >= 89 else 0

    @property
    def arch(self) -> str:
        """The architecture name that ptxas takes for the instructions used here."""
        return f"sm_{self.sm}a" if self.sm >= 100 else f"sm_{self.sm}"


@dataclass(frozen=True)
class Launch:
    """How one kernel is launched: its tile and other constexpr arguments, and warps a program."""

    constants: tuple[tuple[str, int], ...]
    num_warps: int

    @property
    def kwargs(self) -> dict[str, int]:
        return dict(self.constants)


def _launch(num_warps: int, **constants: int) -> Launch:
    return Launch(tuple(constants.items()), num_warps)


# A tensor up to this size has its maxima in partial ones, written without being set to 0 before.
MOST_ELEMENTS_IN_PARTIAL_MAXIMA = 2**21

# The launch tables below were measured on an H200 at 8192 x 8192 bf16 (see benchmarks/quantize.py).
LONGEST_ROW_ON_CHIP = 32768


def rows_launch(element: str, block: int, elements: int | None) -> Launch:
    """The row kernel, on one long row of `elements`, or (None) on rows apart. A thread writes 16 bytes of codes at a
    time; in a small tensor less, for the sake of more threads."""
    pieces = 4 if element == "e2m1" else 2
    if elements is None:
        return _launch(4, ROWS=128, BLOCKS=64 // block, PIECES=pieces)
    if element == "e2m1":
        small = isinstance(elements, int) and elements <= 2**16
        return _launch(4, ROWS=1, BLOCKS=(512 if small else 4096) // block, PIECES=1 if small else pieces)
    return _launch(4, ROWS=1, BLOCKS=2048 // block, PIECES=pieces)


def scaled_rows_launch(element: str, block: int, rows: int, cols: int) -> Launch:
    """The kernel of rows with their own scale: a whole row on chip up to LONGEST_ROW_ON_CHIP elements."""
    pieces = 4 if element == "e2m1" else 2
    width = max(2048, 1 << (max(cols, 1) - 1).bit_length())
    on_chip = width <= LONGEST_ROW_ON_CHIP
    if not on_chip:
        width = 16384
    elements_per_thread = 64 if element == "e2m1" or width > 8192 else 32
    parts = 1
    if element == "e2m1" and on_chip and isinstance(rows, int) and rows <= 128:
        # Rows are fewer than multiprocessors, and latency is all: so several of them quantise a row.
        pieces, elements_per_thread = 2, 16
        while parts * rows <= 64 and width // parts > 4096:
            parts *= 2
        elements_per_thread = max(elements_per_thread, width // parts // 512)
    return _launch(
        width // parts // (32 * elements_per_thread), ROWS=1, BLOCKS=width // block, PIECES=pieces,
        ON_CHIP=int(on_chip), PARTS=parts,
    )  # fmt: skip


MOST_PARTIAL_MAXIMA = 128


def amax_launch(elements: int | None) -> Launch:
    """The amax of a tensor. elements: of a small one, whose programs write a maximum each; None: they raise one."""
    if elements is None:
        return _launch(8, ROWS=1, BLOCKS=512, BLOCK=32)
    width = max(2048, 1 << (-(-elements // MOST_PARTIAL_MAXIMA) - 1).bit_length())
    return _launch(4, ROWS=1, BLOCKS=width // 32, BLOCK=32)


def columns_amax_launch() -> Launch:
    return _launch(4, BLOCK=16, ROW_TILES=8, WORDS=64)


def columns_launch(element: str, block: int, both: bool) -> Launch:
    """The kernel of columns, and of rows and columns (`both`): whole blocks of its columns in every thread.

    More words a thread would make loads of 16 bytes, and leave registers for fewer programs: slower as measured.
    """
    if element == "e2m1":
        return _launch(4, ROW_TILES=128 // block, WORDS=32, PIECES=4)
    if both:
        return _launch(4, ROW_TILES=4, WORDS=64, PIECES=2)
    return _launch(8, ROW_TILES=8, WORDS=64, PIECES=2)


def both_launch(element: str) -> Launch:
    """The kernel of rows and columns from one read: a thread holds 16 rows of WORDS words."""
    if element == "e2m1":
        return _launch(4, ROW_TILES=8, COL_TILES=16, WORDS=4)
    return _launch(8, ROW_TILES=8, COL_TILES=32, WORDS=4)


def squares_launch(element: str) -> Launch:
    """The kernel of square blocks. Lanes that share a block repeat its scale's arithmetic."""
    if element == "e2m1":
        return _launch(4, ROW_TILES=4, LANES=2, WORDS=64)
    return _launch(4, ROW_TILES=4, LANES=4, WORDS=32)


def dequantize_launch(block: int) -> Launch:
    return _launch(4, ROWS=1, BLOCKS=(4096 if block == 16 else 2048) // block)
