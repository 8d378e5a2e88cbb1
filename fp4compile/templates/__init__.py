"""Triton kernels, one family per file. Nothing here depends on FX."""
