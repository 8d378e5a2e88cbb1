"""Kernels that quantise and dequantise."""
