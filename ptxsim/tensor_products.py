"""`tcgen05.mma`: products of matrices in shared memory, with sums in tensor memory.

Sources: PTX ISA, `tcgen05.mma`, "Data path layout organization" and "Block scaling for tcgen05.mma"; Triton,
`MMAv5.cpp`. Confidence high, unless a line below says less.

- Row m of D is lane m, column n is column n from the address on (layout D of the PTX ISA: M of 128 for each program).
  Of 64 rows, each 16 lie in half a quarter of the lanes (layout F): the lower one, or the upper one from lane 16 on.
- Sums of `kind::i8` are exact and wrap around. `kind::tf32` reads the upper 19 bits of each number.
- A in tensor memory: row m is the lane of row m of D, two 16-bit elements to a word, the one of lower K in the lower
  half.
- Scale k of row r: lane r % 32 of each of the four quarters, column r / 32 from the address on, byte k from the
  descriptor's byte on. Scales of B are laid out in the same way over N. Confidence medium to high. All four quarters
  must hold the same.
- A pair of programs (`cta_group::2`): each holds half the rows of A and of D, and half the rows of B. Both hold the
  scales of their rows of A, and all scales of B. The addresses and descriptors are the same in both, and the program
  of even rank issues. Confidence high for the halves, medium for the scales of B.
- Sums: in float64 for one instruction, then rounded to float32 once. The PTX ISA leaves the order and the width of
  hardware's sums open, so tests choose operands whose sums are exact.
"""

from dataclasses import dataclass

import numpy as np

from ptxsim.descriptors import KINDS, ROW_BYTES, Decode, Element, Kind, Matrix, Shape
from ptxsim.fault import Fault
from ptxsim.forms import Step, UnknownForm, address_reader, expect, form, reader
from ptxsim.fragment import Fragment
from ptxsim.numbers import matrix_product
from ptxsim.parse import Address, Instruction, Program
from ptxsim.tensor_issue import group_of, issue
from ptxsim.tensor_memory import LANES, QUARTER, TensorPipe


@dataclass(frozen=True)
class Product:
    """An issued instruction.

    ranks: the programs of the cluster that take part. sums: the address of D. a: an address in tensor memory, or a
    shared memory descriptor, of which b is one. scales: the columns of the scales of A and of B. adds: whether D is
    added.
    """

    kind: Kind
    ranks: tuple[int, ...]
    sums: int
    a: int
    a_in_tensor_memory: bool
    b: int
    instruction: int
    scales: tuple[int, ...]
    adds: bool

    def run(self, pipe: TensorPipe) -> None:
        """Compute the product, in the tensor pipe of the cluster."""
        shape = Shape.of(self.instruction, self.kind, len(self.ranks))
        part = shape.columns // len(self.ranks)
        b = np.concatenate([_operand(pipe, rank, self.b, part, shape.b, shape.b_across) for rank in self.ranks])
        dtype = np.int32 if self.kind.integer else np.float32
        for rank in self.ranks:
            if self.a_in_tensor_memory and shape.a_across:
                raise Fault(f"instruction descriptor {self.instruction:#x}: matrix a is transposed, in tensor memory")
            if self.a_in_tensor_memory:
                words = pipe.read(rank, shape.rows, self.a, ROW_BYTES // 4)
                a = shape.a.decode(np.ascontiguousarray(words).view(np.uint8))
            else:
                a = _operand(pipe, rank, self.a, shape.rows, shape.a, shape.a_across)
            if shape.scale is not None:
                count = self.kind.scales
                left = _scaled(a, _scales(pipe, rank, self.scales[0], shape.rows, shape.a_byte, count, shape.scale))
                right = _scaled(b, _scales(pipe, rank, self.scales[1], shape.columns, shape.b_byte, count, shape.scale))
            else:
                left, right = a.astype(np.float64), b.astype(np.float64)
            total = matrix_product(left, right)
            if self.adds:
                total += pipe.read(rank, shape.rows, self.sums, shape.columns).view(dtype)
            total = total.astype(np.int64) if self.kind.integer else total
            undefined = self._undefined(pipe, shape, rank) if pipe.has_undefined else None
            pipe.write(rank, self.sums, total.astype(dtype).view(np.uint32), undefined)

    def _undefined(self, pipe: TensorPipe, shape: Shape, rank: int) -> np.ndarray:
        """Which sums of a program are undefined, bool [rows, columns], after their operands were read."""
        part = shape.columns // len(self.ranks)
        b = np.concatenate([_undefined_rows(pipe, each, self.b, part, shape.b, shape.b_across) for each in self.ranks])
        if self.a_in_tensor_memory:
            a = np.any(pipe.undefined_words(rank, shape.rows, self.a, ROW_BYTES // 4), 1)
        else:
            a = _undefined_rows(pipe, rank, self.a, shape.rows, shape.a, shape.a_across)
        if shape.scale is not None:
            a = a | _undefined_scales(pipe, rank, self.scales[0], shape.rows)
            b = b | _undefined_scales(pipe, rank, self.scales[1], shape.columns)
        found = a[:, None] | b
        return found | pipe.undefined_words(rank, shape.rows, self.sums, shape.columns) if self.adds else found


def _operand(pipe: TensorPipe, rank: int, bits: int, rows: int, element: Element, across: bool) -> np.ndarray:
    """The numbers of a matrix in shared memory, [rows, K]."""
    matrix = Matrix.of(bits)
    if not across:
        return element.decode(pipe.read_matrix(rank, matrix, rows, ROW_BYTES, element.used))
    raw = pipe.read_matrix(rank, matrix, ROW_BYTES // element.nbytes, rows * element.nbytes, across=True)
    return element.decode(raw).T


def _undefined_rows(pipe: TensorPipe, rank: int, bits: int, rows: int, element: Element, across: bool) -> np.ndarray:
    """Which rows of a matrix of `_operand` are undefined, bool [rows]."""
    matrix = Matrix.of(bits)
    if not across:
        return np.any(pipe.undefined_matrix(rank, matrix, rows, ROW_BYTES, element.used), 1)
    found = pipe.undefined_matrix(rank, matrix, ROW_BYTES // element.nbytes, rows * element.nbytes, across=True)
    return np.full(rows, found.any())


def _undefined_scales(pipe: TensorPipe, rank: int, column: int, rows: int) -> np.ndarray:
    """Whether the words with a row's scales are undefined, bool [rows]."""
    words = pipe.undefined_words(rank, LANES, column, -(-rows // QUARTER))
    return np.any(words.reshape(LANES // QUARTER, QUARTER, -1), 0).T.reshape(-1)[:rows]


def _scaled(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Values [rows, K] times scales [rows, n] of K / n elements each, in float64."""
    rows, count = scales.shape
    blocks = values.astype(np.float64).reshape(rows, count, -1)
    return (blocks * scales[:, :, None]).reshape(rows, -1)


def _scales(
    pipe: TensorPipe, rank: int, column: int, rows: int, first: int, count: int, decode: Decode
) -> np.ndarray:  # fmt: skip
    """The scales of rows, [rows, count]. column: of tensor memory. first: the byte of the first one in a word."""
    words = pipe.read(rank, LANES, column, -(-rows // QUARTER))
    quarters = words.reshape(LANES // QUARTER, QUARTER, -1)
    if (quarters != quarters[0]).any():
        raise Fault("the quarters of tensor memory hold different scales")
    of_rows = np.ascontiguousarray(quarters[0].T).reshape(-1)[:rows]
    return decode(of_rows.view(np.uint8).reshape(rows, 4)[:, first : first + count])


def column_of(address: int) -> int:
    """The column of an address in tensor memory whose lane must be 0, of scales or a copy."""
    if address >> 16:
        raise Fault(f"a product or copy in tensor memory from lane {address >> 16} on")
    return address


_OPCODES = {f"tcgen05.mma.cta_group::{group}.kind::{name}": kind for group in (1, 2) for name, kind in KINDS.items()}


@form(*_OPCODES)
def _mma(instruction: Instruction, program: Program) -> Step:
    kind = _OPCODES[instruction.opcode]
    expect(instruction, 7 if kind.scales else 5)
    sums, a, b, descriptor, *rest = instruction.operands
    in_tensor_memory = isinstance(a, Address)
    if in_tensor_memory and kind.scales:
        raise UnknownForm("A in tensor memory, for this kind")
    read_sums, read_b = address_reader(sums, 32), reader(b, "u64")
    read_a = address_reader(a, 32) if in_tensor_memory else reader(a, "u64")
    read_descriptor, read_adds = reader(descriptor, "u32"), reader(rest[-1], "pred")
    read_scales = [address_reader(each, 32) for each in rest[:-1]]
    pair = group_of(instruction) == 2

    def step(fragment: Fragment) -> None:
        def numbers(read: object) -> np.ndarray:
            return fragment.every(read(fragment))  # type: ignore[operator]

        columns, scales = numbers(read_sums), [numbers(each) for each in read_scales]
        left, right, bits, adds = numbers(read_a), numbers(read_b), numbers(read_descriptor), numbers(read_adds)
        for lane, ranks, begin in issue(fragment, pair):
            begin(Product(
                kind, ranks, int(columns[lane]), int(left[lane]), in_tensor_memory, int(right[lane]), int(bits[lane]),
                tuple(column_of(int(each[lane])) for each in scales), bool(adds[lane]),
            ).run)  # fmt: skip

    return step
