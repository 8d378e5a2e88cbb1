"""Kernels that quantise and multiply groups of rows, those of experts."""
