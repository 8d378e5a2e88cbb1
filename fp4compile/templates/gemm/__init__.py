"""GEMM kernels for quantised operands."""
