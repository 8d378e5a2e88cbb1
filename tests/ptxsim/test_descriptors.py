"""Descriptors of matrices and instructions of the tensor cores."""

import pytest

from ptxsim.descriptors import F16, MXF4, MXF4NVF4_16, MXF8F6F4, Matrix, Shape
from ptxsim.fault import Fault
from tests.ptxsim.product_kernels import instruction, matrix_bits


@pytest.mark.parametrize(
    "layout, stride, row, column, expected",
    [
        (2, 1024, 0, 0, 8192), (2, 1024, 0, 1, 8192 + 16), (2, 1024, 1, 0, 8192 + 128 + 16),
        (2, 1024, 5, 1, 8192 + 5 * 128 + (5 ^ 1) * 16), (2, 1024, 13, 0, 8192 + 1024 + 5 * 128 + 5 * 16),
        (4, 512, 1, 0, 8192 + 64), (4, 512, 2, 0, 8192 + 128 + 16), (4, 512, 7, 1, 8192 + 448 + (3 ^ 1) * 16),
        (6, 256, 3, 1, 8192 + 96 + 16), (6, 256, 4, 0, 8192 + 128 + 16), (6, 256, 12, 1, 8192 + 256 + 128),
        (0, 128, 3, 0, 8192 + 48), (0, 128, 3, 1, 8192 + 4096 + 48), (0, 128, 9, 1, 8192 + 128 + 4096 + 16),
    ],
)  # fmt: skip
def test_addresses_in_shared_memory(layout, stride, row, column, expected):
    chunks = Matrix.of(matrix_bits(8192, layout, stride, leading=4096)).chunks(16, 32)
    assert chunks[row, column] == expected


def test_a_step_along_k_stays_in_the_pattern_of_the_matrix():
    chunks = Matrix.of(matrix_bits(8192 + 96, 2, 1024)).chunks(8, 32)
    assert chunks[5].tolist() == [8192 + 640 + (6 ^ 5) * 16, 8192 + 640 + (7 ^ 5) * 16]


def test_triton_sets_a_base_offset_without_swizzling():
    plain, odd = (Matrix.of(matrix_bits(512, 0, 128, base_offset=offset)) for offset in (0, 4))
    assert plain == odd


@pytest.mark.parametrize(
    "bits, what",
    [
        (matrix_bits(0, 2, 1024) | 1 << 14, "reserved bits 14 to 15"),
        (matrix_bits(0, 2, 1024) | 1 << 31, "reserved bits 30 to 31"),
        (matrix_bits(0, 2, 1024) | 1 << 60, "reserved bits 53 to 60"),
        (matrix_bits(0, 2, 1024) ^ 1 << 46, "version 0"),
        (matrix_bits(0, 2, 1024) | 1 << 47, "version 3"),
        (matrix_bits(0, 2, 1024) | 1 << 52, "absolute leading address"),
        (matrix_bits(0, 1, 1024), "layout 1"),
        (matrix_bits(0, 3, 1024), "layout 3"),
        (matrix_bits(0, 2, 1024, base_offset=1), "base offset"),
        (matrix_bits(128, 2, 1024), "in the middle of a pattern"),
    ],
)
def test_unknown_shared_memory_descriptors_are_faults(bits, what):
    with pytest.raises(Fault, match=what):
        Matrix.of(bits)


def test_a_row_must_not_leave_its_pattern():
    with pytest.raises(Fault, match="in a pattern of 128 bytes"):
        Matrix.of(matrix_bits(112, 2, 1024)).chunks(8, 32)


@pytest.mark.parametrize(
    "kind, bits, what",
    [
        (F16, instruction(F16, 1, 1, 64) | 1 << 6, "reserved bits 6 to 6"),
        (F16, instruction(F16, 1, 1, 64) | 1 << 23, "reserved bits 23 to 23"),
        (F16, instruction(F16, 1, 1, 64) | 1 << 2, "field sparse"),
        (F16, instruction(F16, 1, 1, 64) | 1 << 13, "field negate_a"),
        (MXF4, instruction(MXF4, 1, 1, 64) | 1 << 16, "matrix b is transposed"),
        (F16, instruction(F16, 1, 1, 64) ^ 1 << 4, "D has format 0"),
        (F16, instruction(F16, 2, 1, 64), "matrix a has format 2"),
        (F16, instruction(F16, 1, 1, 8), "N is 8"),
        (F16, instruction(F16, 1, 1, 264), "N is 264"),
        (F16, instruction(F16, 1, 1, 64) ^ 10 << 24, "M is 32"),
        (MXF8F6F4, instruction(MXF8F6F4, 0, 0, 64) ^ 12 << 24, "M is 64"),
        (MXF8F6F4, instruction(MXF8F6F4, 0, 0, 64) | 1 << 3, "reserved bits 3 to 3"),
        (MXF8F6F4, instruction(MXF8F6F4, 0, 0, 64) | 1 << 31, "reserved bits 31 to 31"),
        (MXF8F6F4, instruction(MXF8F6F4, 0, 3, 64), "matrix b has format 3"),
        (MXF8F6F4, instruction(MXF8F6F4, 0, 0, 64, scale=0), "scales have type 0"),
        (MXF4, instruction(MXF4, 1, 1, 64) | 1 << 12, "reserved bits 12 to 12"),
        (MXF4, instruction(MXF4, 1, 1, 64) | 1 << 31, "field k"),
        (MXF4, instruction(MXF4, 1, 1, 64, scale=0), "scales have type 0"),
        (MXF4, instruction(MXF4, 1, 1, 64, a_byte=1), "2 scales from byte 1"),
        (MXF4, instruction(MXF4, 0, 1, 64), "matrix a has format 0"),
        (MXF4NVF4_16, instruction(MXF4NVF4_16, 1, 1, 64, b_byte=2), "4 scales from byte 0 of a word for A, and 2"),
    ],
)
def test_unknown_instruction_descriptors_are_faults(kind, bits, what):
    with pytest.raises(Fault, match=what):
        Shape.of(bits, kind, 1)


def test_the_m_of_a_pair_counts_the_rows_of_both_programs():
    bits = instruction(F16, 1, 1, 64)
    with pytest.raises(Fault, match="M is 128"):
        Shape.of(bits, F16, 2)
    assert Shape.of(instruction(F16, 1, 1, 64, programs=2), F16, 2).rows == 128
