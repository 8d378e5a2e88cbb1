"""Triton kernels, one family a file. Nothing here depends on FX."""
